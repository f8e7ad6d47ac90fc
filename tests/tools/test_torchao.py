"""torchao quantises our linear modules as it does transformers': at load, by `quantize_`, under adapters, saved."""

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn

import ligermodels
from ligermodels import CheckpointError, ConfigError, InputError
from ligermodels.checkpoint.weights import same_bits
from tests.tools import models
from tests.tools.models import FAMILIES, make_ids, theirs

torchao = pytest.importorskip("torchao")
quantization = pytest.importorskip("torchao.quantization")

SETTINGS = {
    "int8": quantization.Int8WeightOnlyConfig(),
    "int8 activations": quantization.Int8DynamicActivationInt8WeightConfig(),
    "float8": quantization.Float8WeightOnlyConfig(),
    "int4": quantization.IntxWeightOnlyConfig(
        weight_dtype=torch.int4, granularity=quantization.PerGroup(32), scale_dtype=torch.float32
    ),
}
# Equal integers on both sides; what is left is fp32's rounding in norms, softmax and head, as without quantisation.
FP32 = dict(rtol=1e-5, atol=1e-5)


def quantised(model):
    return {
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and type(module.weight).__module__.startswith("torchao")
    }


def ours(folder, **options):
    return ligermodels.load(folder, device="cpu", progress=False, **options)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    made = tmp_path_factory.mktemp("models")
    return {family: models.write_checkpoint(made / family, family, intermediate_size=64) for family in FAMILIES}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("settings", SETTINGS)
def test_loading_quantises_what_transformers_quantises(folders, family, settings):
    config = transformers.TorchAoConfig(SETTINGS[settings])
    hf = theirs(folders[family], quantization_config=config)
    ids = make_ids(2, 12)
    expected, plain = hf(ids).logits, ours(folders[family])(ids).logits
    assert (expected - plain).abs().max() > 100 * FP32["atol"]
    for given in (config, SETTINGS[settings]):
        model = ours(folders[family], quantization_config=given)
        assert quantised(model) == quantised(hf) and len(quantised(model)) == 14
        torch.testing.assert_close(model(ids).logits, expected, **FP32)
        assert not any(parameter.requires_grad for name in quantised(model) for parameter in
                       [model.get_submodule(name).weight])  # fmt: skip


def test_modules_are_skipped_by_name(folders):
    def load(load, *skipped):
        config = transformers.TorchAoConfig(SETTINGS["int8"], modules_to_not_convert=["lm_head", *skipped])
        return quantised(load(folders["qwen2"], quantization_config=config))

    skipped = "model.layers.1", r"model.layers.\d.self_attn.q_"
    assert load(ours, *skipped) == load(theirs, *skipped) and len(load(ours, *skipped)) == 7
    # The end of a name: transformers looks for it in that of the parameter and quantises all the same.
    assert len(load(ours, "down_proj")) == 12


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("settings", SETTINGS)
def test_quantize_converts_the_model_as_it_stands(folders, family, settings):
    """`torchao.quantize_(model, config)`, which leaves our head alone; transformers' head is kept out by name."""
    model, hf = ours(folders[family]), theirs(folders[family])
    torchao.quantize_(model, SETTINGS[settings])
    torchao.quantize_(
        hf, SETTINGS[settings], filter_fn=lambda module, name: type(module) is nn.Linear and name != "lm_head"
    )
    assert quantised(model) == quantised(hf) and len(quantised(model)) == 14
    ids = make_ids(2, 12)
    torch.testing.assert_close(model(ids).logits, hf(ids).logits, **FP32)


def test_quantization_aware_training_finds_the_same_modules(folders):
    from torchao.quantization.qat import QATConfig

    base = quantization.Int8DynamicActivationIntxWeightConfig(
        weight_dtype=torch.int4, weight_granularity=quantization.PerGroup(32)
    )
    runs = []
    for load in (ours, theirs):
        model = load(folders["qwen2"]).train()
        plain = lambda module, name: type(module) is nn.Linear and name != "lm_head"  # noqa: E731
        torchao.quantize_(model, QATConfig(base, step="prepare"), filter_fn=plain)
        assert sum("FakeQuantized" in type(module).__name__ for module in model.modules()) == 14
        ids = make_ids(2, 12)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        runs.append({name: p.grad for name, p in model.named_parameters() if "lm_head" not in name} | {"loss": loss})
    for name, found in runs[0].items():
        torch.testing.assert_close(found, runs[1][name], **FP32)


@pytest.mark.parametrize("family", FAMILIES)
def test_adapters_train_as_on_transformers(folders, family):
    peft = pytest.importorskip("peft")
    losses, merged = [], []
    for load in (ours, theirs):
        model = load(folders[family], quantization_config=transformers.TorchAoConfig(SETTINGS["int8"]))
        torch.manual_seed(0)
        model = peft.get_peft_model(model, peft.LoraConfig(r=4, task_type="CAUSAL_LM", target_modules="all-linear"))
        kinds = {type(module).__name__ for module in model.modules() if isinstance(module, peft.tuners.lora.LoraLayer)}
        assert kinds == {"TorchaoLoraLinear"}
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
        losses.append([])
        ids = make_ids(4, 12)
        for _ in range(5):
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[-1].append(loss.item())
        # Merging asks the quantiser how to quantise again.
        merged.append(model.merge_and_unload()(ids, labels=ids).loss.item())
    # Five steps of AdamW carry the roundings of fp32 from one to the next.
    torch.testing.assert_close(*(torch.tensor(run) for run in losses), rtol=1e-4, atol=0)
    assert losses[0][-1] < losses[0][0]
    # A weight that lies between two integers goes to one here and to the other there: 1/127 of its row's largest.
    assert merged[0] == pytest.approx(merged[1], rel=2e-3)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("settings", SETTINGS)
def test_a_quantised_model_is_saved_as_transformers_saves_it(folders, family, settings, tmp_path):
    config = transformers.TorchAoConfig(SETTINGS[settings])
    model = ours(folders[family], quantization_config=config)
    hf = theirs(folders[family], quantization_config=config)
    model.save_pretrained(tmp_path / "ours")
    hf.save_pretrained(tmp_path / "theirs")
    found, wanted = (load_file(tmp_path / name / "model.safetensors") for name in ("ours", "theirs"))
    assert found.keys() == wanted.keys()
    assert all(same_bits(found[name], wanted[name]) for name in found)
    found, wanted = (
        json.loads((tmp_path / name / "config.json").read_text())["quantization_config"] for name in ("ours", "theirs")
    )
    assert found == wanted
    ids = make_ids(2, 12)
    for folder in ("ours", "theirs"):
        again = ours(tmp_path / folder)
        assert quantised(again) == quantised(model) and again.is_quantized
        assert torch.equal(again(ids).logits, model(ids).logits)
    assert torch.equal(theirs(tmp_path / "ours")(ids).logits, hf(ids).logits)
    again.save_pretrained(tmp_path / "shards", max_shard_size="20KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 1
    assert torch.equal(ours(tmp_path / "shards")(ids).logits, model(ids).logits)
    assert torch.equal(theirs(tmp_path / "shards")(ids).logits, hf(ids).logits)


def test_what_cannot_be_saved_says_so(folders, tmp_path):
    model = ours(folders["llama"])
    torchao.quantize_(model, SETTINGS["int8"])
    with pytest.raises(CheckpointError, match=r"q_proj\.weight is quantised \(Int8Tensor"):
        model.save_pretrained(tmp_path / "x")


def test_damage_is_told(folders, tmp_path):
    q = "model.layers.0.self_attn.q_proj"
    ours(folders["qwen2"], quantization_config=SETTINGS["int8"]).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    from safetensors import safe_open

    metadata = safe_open(file, "pt").metadata()
    whole = load_file(file)
    for change, told in (
        (lambda tensors, header: tensors.pop(f"{q}._weight_scale"), f"{q} is no module"),
        (lambda tensors, header: header.pop(f"{q}.weight"), f"{q} is no module"),
        (lambda tensors, header: header.update({f"{q}.weight": '{"_type": "os.system"}'}), f"{q} is no module"),
        (lambda tensors, header: tensors.pop(f"{q}.bias"), f"{q} has a bias"),
        (
            lambda tensors, header: tensors.update({f"{q}._weight_qdata": tensors[f"{q}._weight_qdata"][:4].clone()}),
            f"{q} is no module",
        ),
        (lambda tensors, header: [tensors.pop(name) for name in list(tensors) if name.startswith(q)], "missing"),
    ):
        tensors, header = dict(whole), dict(metadata)
        change(tensors, header)
        save_file(tensors, file, header)
        with pytest.raises(CheckpointError, match=told):
            ours(tmp_path)


def test_settings_are_checked(folders, tmp_path, monkeypatch):
    for given, words in (
        (transformers.TorchAoConfig(SETTINGS["int8"], include_input_output_embeddings=True), "embedding and head stay"),
        (quantization.FqnToConfig({"_default": SETTINGS["int8"]}), r"torchao\.quantize_\(model"),
        (dict(quant_method="torchao", quant_type="int8_weight_only"), "expected a config object of torchao"),
    ):
        with pytest.raises(InputError, match=words):
            ours(folders["llama"], quantization_config=given)
    ours(folders["llama"], quantization_config=SETTINGS["int8"]).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"]["quant_type"]["default"]["_type"] = "Nothing"
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"quantised by torchao: .*Nothing"):
        ours(tmp_path)
    monkeypatch.setitem(__import__("sys").modules, "torchao.core.config", None)
    with pytest.raises(ConfigError, match="pip install -U torchao"):
        ours(tmp_path)
