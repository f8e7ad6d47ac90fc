"""bitsandbytes and torchao quantise our linear modules as they do transformers': at load, by converters, with adapters,
saved."""

import functools
import shutil
import sys

import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

import ligermodels
from ligermodels import CheckpointError, ConfigError, InputError
from ligermodels.checkpoint.weights import same_bits
from tests.tools import models
from tests.tools.models import make_ids, ours, quantization_settings, write_checkpoint

pytest.importorskip("bitsandbytes")
torchao = pytest.importorskip("torchao")
quantization = pytest.importorskip("torchao.quantization")
peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore:MatMul8bitLt")

BITSANDBYTES = {
    "nf4": dict(load_in_4bit=True, bnb_4bit_quant_type="nf4"),
    "nested": dict(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16, bnb_4bit_quant_storage=torch.bfloat16),
    "llm.int8": dict(load_in_8bit=True),
}  # fmt: skip
TORCHAO = {
    "int8": quantization.Int8WeightOnlyConfig(),
    "int8 activations": quantization.Int8DynamicActivationInt8WeightConfig(),
    "float8": quantization.Float8WeightOnlyConfig(),
    "int4": quantization.IntxWeightOnlyConfig(
        weight_dtype=torch.int4, granularity=quantization.PerGroup(32), scale_dtype=torch.float32
    ),
}
SETTINGS = {**BITSANDBYTES, **TORCHAO}
"""What a user passes as quantization_config, besides transformers' own config."""
# Equal integers on both sides; what is left is fp32's rounding in norms, softmax and head, as without quantisation.
FP32 = dict(rtol=1e-5, atol=1e-5)
Q = "model.layers.0.self_attn.q_proj"


theirs = functools.partial(models.theirs, attn_implementation="sdpa")  # int8 activations amplify another rounding


def config_of(name, **options):
    """transformers' config of the settings."""
    if name in BITSANDBYTES:
        return transformers.BitsAndBytesConfig(**BITSANDBYTES[name], **options)
    return transformers.TorchAoConfig(TORCHAO[name], **options)


def quantised(model):
    """The names of the modules that are quantised."""
    return {
        name
        for name, module in model.named_modules()
        if type(module).__module__.startswith("bitsandbytes")
        or (isinstance(module, nn.Linear) and type(module.weight).__module__.startswith("torchao"))
    }


def frozen(model, name):
    """Whether no quantised weight trains, and with bitsandbytes no bias beside one either."""
    parts = ("weight", "bias") if name in BITSANDBYTES else ("weight",)
    tensors = [getattr(model.get_submodule(linear), part) for linear in quantised(model) for part in parts]
    return not any(tensor is not None and tensor.requires_grad for tensor in tensors)


def plain_linear(module, name):
    return type(module) is nn.Linear and name != "lm_head"


def theirs_of(folder, name, **options):
    return theirs(folder, quantization_config=config_of(name, **options), device_map="cpu")


@pytest.fixture(scope="module")
def folders(quantizable):
    return quantizable


@pytest.mark.parametrize("name, family", [(name, "qwen2") for name in SETTINGS] + [("nf4", "llama"), ("int8", "llama")])
def test_a_model_is_quantised_and_saved_as_transformers_does(folders, family, name, tmp_path):
    hf, ids = theirs_of(folders[family], name), make_ids(2, 12)
    expected, plain = hf(ids).logits, ours(folders[family])(ids).logits  # bitsandbytes casts biases in its forward
    assert (expected - plain).abs().max() > 100 * FP32["atol"]
    for given in (SETTINGS[name], config_of(name)):
        model = ours(folders[family], quantization_config=given)
        assert quantised(model) == quantised(hf) and len(quantised(model)) == 14
        torch.testing.assert_close(model(ids).logits, expected, **FP32)
        assert frozen(model, name)
    logits = model(ids).logits
    model.save_pretrained(tmp_path / "ours")
    hf.save_pretrained(tmp_path / "theirs")
    found, wanted = (load_file(tmp_path / folder / "model.safetensors") for folder in ("ours", "theirs"))
    assert found.keys() == wanted.keys() and all(same_bits(found[tensor], wanted[tensor]) for tensor in found)
    assert quantization_settings(tmp_path / "ours") == quantization_settings(tmp_path / "theirs")
    ours(tmp_path / "ours").save_pretrained(tmp_path / "shards", max_shard_size="50KB")
    for folder in ("ours", "theirs", "shards"):
        again = ours(tmp_path / folder)
        assert quantised(again) == quantised(model) and again.is_quantized and frozen(again, name)
        assert torch.equal(again(ids).logits, logits)
    for folder in ("ours", "shards"):
        assert torch.equal(theirs(tmp_path / folder, device_map="cpu")(ids).logits, expected)


def test_modules_are_skipped_by_name(folders):
    folder = folders["qwen2"]
    skipped = ["lm_head", "down_proj", "model.layers.1", "q_.roj"]
    hf = theirs_of(folder, "nf4", llm_int8_skip_modules=skipped)
    model = ours(folder, quantization_config={**BITSANDBYTES["nf4"], "llm_int8_skip_modules": skipped})
    assert quantised(model) == quantised(hf)
    assert not any("down_proj" in name or "layers.1" in name for name in quantised(model))
    skipped = ["lm_head", "model.layers.1", r"model.layers.\d.self_attn.q_"]
    model = ours(folder, quantization_config=config_of("int8", modules_to_not_convert=skipped))
    assert quantised(model) == quantised(theirs_of(folder, "int8", modules_to_not_convert=skipped))
    assert len(quantised(model)) == 7


def by_transformers(model):
    from transformers.integrations.bitsandbytes import replace_with_bnb_linear

    return replace_with_bnb_linear(model, modules_to_not_convert=["lm_head"], quantization_config=config_of("nf4"))


def test_converters_find_the_same_modules(folders, tmp_path):
    made = [by_transformers(load(folders["qwen2"])) for load in (ours, theirs)]
    assert quantised(made[0]) == quantised(made[1]) and len(quantised(made[0])) == 14
    model, hf, ids = ours(folders["qwen2"]), theirs(folders["qwen2"]), make_ids(2, 12)
    torchao.quantize_(model, TORCHAO["int8"])  # leaves our head alone; transformers' is left out by name
    torchao.quantize_(hf, TORCHAO["int8"], filter_fn=plain_linear)
    assert quantised(model) == quantised(hf) and len(quantised(model)) == 14
    torch.testing.assert_close(model(ids).logits, hf(ids).logits, **FP32)
    with pytest.raises(CheckpointError, match=r"q_proj\.weight is quantised"):
        model.save_pretrained(tmp_path)


@pytest.mark.parametrize(
    "name, kind", [("nested", "Linear4bit"), ("llm.int8", "Linear8bitLt"), ("int8", "TorchaoLoraLinear")]
)
def test_adapters_train_as_on_transformers(folders, name, kind):
    losses, merged, ids = [], [], make_ids(4, 12)
    for load in (ours, theirs):
        model = load(folders["qwen2"], quantization_config=config_of(name))
        if name in BITSANDBYTES:
            model = peft.prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
        torch.manual_seed(0)
        model = peft.get_peft_model(model, peft.LoraConfig(r=4, task_type="CAUSAL_LM", target_modules="all-linear"))
        kinds = {type(module).__name__ for module in model.modules() if isinstance(module, peft.tuners.lora.LoraLayer)}
        assert kinds == {kind}
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
        losses.append([])
        for _ in range(5):
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[-1].append(loss.item())
        if name in TORCHAO:  # merging asks the quantiser how to quantise again
            merged.append(model.merge_and_unload()(ids, labels=ids).loss.item())
    # Five steps of AdamW carry the roundings of fp32 (llm.int8: of its fp16 sums) from one to the next.
    torch.testing.assert_close(*(torch.tensor(run) for run in losses), rtol=1e-3, atol=0)
    assert losses[0][-1] < losses[0][0]
    # A weight halfway between two integers may round to either: 1/127 of its row's largest.
    assert not merged or merged[0] == pytest.approx(merged[1], rel=2e-3)


def test_what_cannot_be_saved_says_so(folders, tmp_path):
    model = ours(folders["llama"], quantization_config=SETTINGS["nf4"])
    with pytest.raises(CheckpointError, match="leave state_dict out"):
        model.save_pretrained(tmp_path / "x", state_dict=model.state_dict())
    peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"]))
    with pytest.raises(CheckpointError, match="merge them first"):
        model.save_pretrained(tmp_path / "x")


@pytest.fixture(scope="module")
def saved(folders, tmp_path_factory):
    """{name of settings: a folder quantised so}, and a plain one."""
    made = {name: tmp_path_factory.mktemp("saved") / name for name in ("nf4", "int8")}
    for name, folder in made.items():
        ours(folders["qwen2"], quantization_config=SETTINGS[name]).save_pretrained(folder)
    return {"plain": folders["qwen2"], **made}


def test_a_damaged_quantised_weight_is_named(saved, tmp_path):
    tensors = load_file(saved["int8"] / "model.safetensors")
    header = safe_open(saved["int8"] / "model.safetensors", "pt").metadata()
    save_file({name: x for name, x in tensors.items() if not name.startswith(f"{Q}._weight_scale")},
        tmp_path / "model.safetensors", header)  # fmt: skip
    shutil.copy(saved["int8"] / "config.json", tmp_path)
    with pytest.raises(CheckpointError, match=f"{Q} was not quantised by"):
        ours(tmp_path)
    tensors = load_file(saved["plain"] / "model.safetensors")
    tensors[f"{Q}.weight"][3].fill_(float("nan"))
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    shutil.copy(saved["plain"] / "config.json", tmp_path)
    with pytest.raises(CheckpointError, match="q_proj holds NaN or infinity"):
        ours(tmp_path, quantization_config=SETTINGS["nf4"])


def test_settings_are_checked(saved, monkeypatch):
    for folder, given, message in (
        ("plain", dict(load_in_4bit=True, load_in_8bit=True), "one of load_in_4bit"),
        ("plain", dict(load_in_4bit=True, bnb_4bit_typ="nf4"), "no 'bnb_4bit_typ'; it has .*bnb_4bit_quant_type"),
        ("plain", transformers.GPTQConfig(bits=4), "'gptq'"),
        ("plain", dict(quant_method="torchao", quant_type="int8_weight_only"), "expected a config object of torchao"),
        ("nf4", "int4", "is quantised by bitsandbytes already"),
    ):
        with pytest.raises(InputError, match=message):
            ours(saved[folder], quantization_config=given)
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    monkeypatch.setitem(sys.modules, "torchao.core.config", None)
    with pytest.raises(InputError, match="pip install -U bitsandbytes"):
        ours(saved["plain"], quantization_config=SETTINGS["nf4"])
    with pytest.raises(ConfigError, match="pip install -U torchao"):
        ours(saved["int8"])


@pytest.mark.gpu
@pytest.mark.parametrize("name", BITSANDBYTES)
def test_on_a_gpu(tmp_path, name):
    """Outputs of transformers' model, and memory: of all weights to be quantised, one at a time is on the GPU."""
    sizes = dict(hidden_size=512, intermediate_size=2048, num_hidden_layers=8, initializer_range=0.02)
    folder = write_checkpoint(tmp_path, "llama", **sizes)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    model = ligermodels.load(folder, quantization_config=config_of(name), dtype=torch.float32, progress=False)
    held, peak = torch.cuda.memory_allocated() - before, torch.cuda.max_memory_allocated() - before
    assert model.device.type == "cuda"
    largest = 2048 * 512 * 4
    assert peak < held + 4 * largest  # the weight, its integers, and what bitsandbytes needs to make them
    hf = theirs(folder, quantization_config=config_of(name), dtype=torch.float32)
    ids = make_ids(2, 12).cuda()
    with torch.no_grad():
        error, plain = (model(ids).logits - hf(ids).logits).norm(), hf(ids).logits.norm()
    # fp32 in eight layers; where bitsandbytes computes in bf16 or fp16, a few of their roundings, 2^-9 and 2^-11.
    assert error < (1e-4 if name == "nf4" else 0.02) * plain
