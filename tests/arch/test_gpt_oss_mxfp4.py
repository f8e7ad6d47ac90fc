"""gpt-oss as it was released, in MXFP4: the numbers of transformers' dequantised model, adapters over it, and train."""

import json
import re
import shutil

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import ligermodels
from ligermodels.layers import QuantizedLinear
from ligermodels.processes import Processes
from ligermodels.recipes import memory
from ligermodels.training import add_lora, load_adapter, save_adapter
from tests.arch.suite import tiny_config
from tests.arch.test_gpt_oss import YARN
from tests.conversion.layouts import same, stored
from tests.recipes.conftest import home  # noqa: F401  # a fixture
from tests.recipes.runs import metrics, options_of, train

pytest.importorskip("accelerate")  # transformers needs it to dequantise

DEQUANTIZE = {"quant_method": "mxfp4", "dequantize": True}
SKIPPED = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
BOTH = ["experts.gate_up_proj", "experts.down_proj"]
IDS = torch.randint(3, 60, (2, 24), generator=torch.Generator().manual_seed(0))
MASK = (torch.arange(24) >= torch.tensor([[0], [5]])).long()


def write_released(folder, **changes):
    """A checkpoint in the released layout, of random codes."""
    sizes = dict(head_dim=16, hidden_size=64, intermediate_size=32, num_local_experts=4, num_experts_per_tok=2)
    limits = dict(sliding_window=6, swiglu_limit=0.9, rope_parameters=YARN, initializer_range=0.2)
    config = tiny_config("gpt_oss", **{**sizes, **limits, **changes})
    torch.manual_seed(0)
    plain = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**config)).bfloat16()
    plain.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, columns, rows = tensors.pop(name).shape
        tensors[f"{name}_blocks"] = torch.randint(0, 256, (experts, rows, columns // 32, 16), dtype=torch.uint8)
        tensors[f"{name}_scales"] = torch.randint(119, 125, (experts, rows, columns // 32), dtype=torch.uint8)
    for name, tensor in tensors.items():
        if name.endswith("bias") or name.endswith("_bias"):
            tensor.normal_(0.0, 0.1)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    values = json.loads((folder / "config.json").read_text())
    values["quantization_config"] = {"modules_to_not_convert": SKIPPED, "quant_method": "mxfp4"}
    (folder / "config.json").write_text(json.dumps(values))
    return folder


@pytest.fixture(scope="module")
def released(tmp_path_factory):
    return write_released(tmp_path_factory.mktemp("released") / "model")


def theirs(folder, dtype=torch.float32):
    config = transformers.Mxfp4Config(dequantize=True)
    options = dict(quantization_config=config, dtype=dtype, attn_implementation="eager")
    return transformers.AutoModelForCausalLM.from_pretrained(folder, **options).eval()


def load(folder, config=None, **options):
    options = {"dtype": torch.float32, "device": "cpu", "progress": False, **options}
    return ligermodels.load(folder, quantization_config=config, **options)


@pytest.mark.parametrize("config", [None, DEQUANTIZE], ids=["kept", "dequantised"])
def test_the_numbers_are_those_of_the_dequantised_model(released, config, tmp_path):
    hf, model = theirs(released), load(released, config)
    with torch.no_grad():
        found, wanted = model(IDS, attention_mask=MASK).logits, hf(IDS, attention_mask=MASK).logits
    assert (found - wanted)[MASK.bool()].abs().max() <= 1e-5 * wanted.abs().max()
    options = dict(attention_mask=MASK, max_new_tokens=12, do_sample=False, pad_token_id=2)
    assert torch.equal(model.generate(IDS, **options), hf.generate(IDS, **options))
    folder = load(released, config, dtype=torch.bfloat16).save_pretrained(tmp_path / "x")
    if config is None:
        assert same(stored(folder), stored(released))
    with torch.no_grad():
        assert torch.equal(theirs(folder)(IDS).logits, hf(IDS).logits)


def test_what_transformers_5_24_and_5_23_dequantised_is_read(released, tmp_path):
    """5.23 wrote floats under the names of the blocks."""
    theirs(released, torch.bfloat16).save_pretrained(tmp_path / "a")
    expected, tensors = load(released, DEQUANTIZE)(IDS).logits, load_file(tmp_path / "a" / "model.safetensors")
    assert torch.equal(load(tmp_path / "a")(IDS).logits, expected)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    named = {re.sub(r"(gate_up|down)_proj$", r"\g<0>_blocks", name): x for name, x in tensors.items()}
    assert sum(name.endswith("_blocks") for name in named) == 4
    save_file(named, tmp_path / "b" / "model.safetensors", {"format": "pt"})
    model = load(tmp_path / "b", dtype=torch.bfloat16)
    assert same(stored(model.save_pretrained(tmp_path / "c")), tensors)


def test_adapters_over_it(released, tmp_path):
    """As over the dequantised model, experts too; their files are the same."""
    gradients, folders = [], []
    for config in (None, DEQUANTIZE):
        model = add_lora(load(released, config), 4, targets="all-linear", target_parameters=BOTH, seed=1)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.1, generator=torch.Generator().manual_seed(2))
        model.train()(IDS, attention_mask=MASK, labels=IDS).loss.backward()
        gradients.append({name: p.grad for name, p in model.named_parameters() if p.requires_grad})
        folders.append(save_adapter(model, tmp_path / str(len(folders))))
    assert gradients[0].keys() == gradients[1].keys() and sum(".experts." in name for name in gradients[0]) == 8
    for name, found in gradients[0].items():
        assert found.abs().max() > 0
        torch.testing.assert_close(found, gradients[1][name], rtol=1e-4, atol=1e-6)
    files = [load_file(tmp_path / name / "adapter_model.safetensors") for name in "01"]
    assert same(*files)
    over, dense = (load_adapter(load(released, config), tmp_path / "0")(IDS).logits for config in (None, DEQUANTIZE))
    torch.testing.assert_close(over, dense, rtol=1e-5, atol=1e-6)


@pytest.fixture(scope="module")
def trainable(released, home):  # noqa: F811
    """A folder in `home`, with its tokenizer."""
    folder, ids = home / "gpt_oss", json.loads((home / "model" / "config.json").read_text())
    shutil.copytree(home / "model", folder)
    (folder / "model.safetensors").unlink()
    vocabulary = {key: ids[key] for key in ("vocab_size", "bos_token_id", "eos_token_id") if key in ids}
    write_released(folder, **vocabulary, max_position_embeddings=256)
    return folder


def test_train_keeps_it_under_adapters_and_dequantises_it_without(trainable, home, capsys):  # noqa: F811
    few = ("--max-steps", "3", "--max-length", "64", "--accumulation", "1")
    assert train(home, "lora", *few, "--lora-r", "4", model="gpt_oss") == 0
    assert 'quantize: "mxfp4"' in (home / "lora" / "options.yaml").read_text() and len(metrics(home / "lora")) == 3
    before = stored(trainable)
    assert train(home, "full", *few, model="gpt_oss") == 0
    after = stored(home / "full" / "model")
    name = "model.layers.0.mlp.experts.down_proj"
    wanted = load(trainable, DEQUANTIZE, dtype=torch.bfloat16).get_parameter(name).mT.float()
    assert f"{name}_blocks" in before and f"{name}_blocks" not in after
    moved = (after[name].float() - wanted).abs().max()
    assert 0 < moved < 0.1
    capsys.readouterr()
    assert train(home, "merged", *few, "--lora-r", "4", "--merge", model="gpt_oss") != 0
    assert "merge later" in capsys.readouterr().err


def test_the_plan_counts_the_bits_of_the_experts(released):
    modules = [module for module in load(released).modules() if type(module) is QuantizedLinear]
    stored = sum(parameter.nbytes for module in modules for parameter in module.parameters())
    sketch, weights = load(released, DEQUANTIZE), []
    for quantize in ("mxfp4", "none"):
        options = dict(batch_tokens=64, accumulation=1, precision="bf16", activations="none", lora_r=4)
        options = options_of("sft", quantize=quantize, **options)
        needs = memory.estimate(memory.Sizes.of(sketch, options), options, Processes(torch.device("cuda")))
        weights.append(needs["weights"])
    plain = 2 * sum(module.in_features * module.out_features for module in modules)
    assert weights[1] - weights[0] == plain - stored
