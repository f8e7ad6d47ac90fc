"""LoRA adapters as GGUF files: added to the base as llama.cpp adds them, they are the file of the merged model."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

import ligermodels
from ligermodels import cli
from ligermodels.checkpoint.adapters import CONFIG, WEIGHTS
from ligermodels.checkpoint.files import read_json
from ligermodels.conversion import Options, convert
from ligermodels.errors import CheckpointError, ConfigError, InputError
from ligermodels.training import add_lora, save_adapter
from tests.conversion.gguf_files import fields_of, small_model, tensors_of, to_gguf
from tests.conversion.test_gguf import MODELS, OF_FAMILY

DENSE = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
LINEAR = ("in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b", "out_proj")
CASES = {
    "llama": DENSE,
    "llama, biases": DENSE,
    "mistral": DENSE,
    "gemma2": DENSE,
    "qwen3": DENSE,
    "phi3": ("qkv_proj", "o_proj", "gate_up_proj", "down_proj"),
    "qwen3.5": (*DENSE, *LINEAR),
    "mixtral": ("q_proj", "k_proj"),
    "qwen3_moe": ("q_proj",),
    "gpt_oss": ("q_proj", "k_proj", "v_proj", "o_proj"),
}
EXPERTS = ("mixtral", "qwen3_moe")


@pytest.fixture
def made(tmp_path):
    """(name of a model, options of add_lora) -> (folder of the base, of its adapter with random factors)."""

    def build(name: str, targets=None, save=None, **options):
        family, fields = MODELS[name]
        base = small_model(tmp_path / "base", OF_FAMILY[family], family, **{"num_hidden_layers": 2, **fields})
        model = ligermodels.load(base, progress=False, dtype="float32")
        add_lora(model, **{"r": 4, "alpha": 6, "targets": targets or CASES[name], **options})
        draw = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_" in name:
                    parameter.copy_(torch.randn(parameter.shape, generator=draw) * 0.1)
        return base, save_adapter(model, tmp_path / "adapter", **(save or {}))

    return build


def summed(base: dict, adapter: dict, alpha: float) -> dict:
    """What llama.cpp computes with: W + alpha / r * B A, by the names and shapes of the files."""
    left = dict(adapter)
    result = {}
    for name, weight in base.items():
        a, b = left.pop(f"{name}.lora_a", None), left.pop(f"{name}.lora_b", None)
        if a is not None:
            assert weight.shape[-1] == a.shape[-1] and weight.shape[-2] == b.shape[-2] and a.shape[-2] == b.shape[-1]
            weight = weight + alpha / b.shape[-1] * (b @ a)
        result[name] = weight
    assert not left, left.keys()
    return result


def compare(tmp_path, base, adapter):
    """Adds the adapter's file to the base's, and compares with the file of the merged model; its metadata."""
    quiet = {"dtype": "fp32", "verify": "bytes", "overwrite": True}
    to_gguf(base, tmp_path / "base.gguf", **quiet)
    to_gguf(base, tmp_path / "merged.gguf", adapter=adapter, **quiet)
    report = to_gguf(adapter, tmp_path / "adapter.gguf", verify="bytes", overwrite=True)
    assert report.details["to"] == "gguf adapter" and report.details["name"] == tmp_path.name
    with pytest.raises(CheckpointError, match="holds a LoRA adapter"):
        ligermodels.load(tmp_path / "adapter.gguf", progress=False)
    fields, factors = fields_of(tmp_path / "adapter.gguf"), tensors_of(tmp_path / "adapter.gguf")
    found = summed(tensors_of(tmp_path / "base.gguf"), factors, fields["adapter.lora.alpha"])
    merged, plain = tensors_of(tmp_path / "merged.gguf"), tensors_of(tmp_path / "base.gguf")
    for name, expected in merged.items():
        torch.testing.assert_close(found[name], expected, rtol=1e-5, atol=1e-6)
    changed = [name for name in merged if not torch.equal(merged[name], plain[name])]
    assert len(changed) == len(factors) // 2 > 0
    return fields, factors


@pytest.mark.parametrize("name", CASES)
@pytest.mark.filterwarnings("ignore:.*(1 . weight|window)")
def test_the_sum_is_the_merged_model(tmp_path, made, name):
    options = {}
    if name in EXPERTS:
        ends = ("experts.gate_up_proj", "experts.down_proj")
        options = {"target_parameters": ends, "save": {"per_expert": True}}
    base, adapter = made(name, **options)
    fields, factors = compare(tmp_path, base, adapter)
    arch = fields_of(tmp_path / "base.gguf")["general.architecture"]
    assert {key: fields[key] for key in fields if key != "general.quantization_version"} == {
        "general.architecture": arch, "general.type": "adapter", "general.name": tmp_path.name,
        "general.file_type": 0, "adapter.type": "lora", "adapter.lora.alpha": 6.0,
    }  # fmt: skip
    if name in EXPERTS:
        a = factors["blk.0.ffn_down_exps.weight.lora_a"]
        assert a.dim() == 3 and a.shape[0] == MODELS[name][1].get("num_experts", 3)


def test_scales_of_modules_and_rslora(tmp_path, made):
    base, adapter = made("llama", rslora=True)
    assert compare(tmp_path, base, adapter)[0]["adapter.lora.alpha"] == pytest.approx(12.0)  # 6 sqrt(4)
    options = read_json(adapter / CONFIG) | {"use_rslora": False, "alpha_pattern": {"v_proj": 10, "mlp.up_proj": 2}}
    tensors = load_file(adapter / WEIGHTS)
    for key in [key for key in tensors if "layers.1" in key and "o_proj" in key]:
        tensors[key] = tensors[key][:2].contiguous() if "lora_A" in key else tensors[key][:, :2].contiguous()
    options["rank_pattern"] = {"layers.1.self_attn.o_proj": 2}
    save_file(tensors, adapter / WEIGHTS)
    (adapter / CONFIG).write_text(json.dumps(options))
    assert compare(tmp_path, base, adapter)[0]["adapter.lora.alpha"] in (6.0, 10.0, 2.0)


def test_an_expert_without_an_adapter_and_16_bits(tmp_path, made):
    ends = ("experts.gate_up_proj", "experts.down_proj")
    base, adapter = made("mixtral", target_parameters=ends, save={"per_expert": True})
    tensors = {name: x for name, x in load_file(adapter / WEIGHTS).items() if ".experts.1." not in name}
    save_file(tensors, adapter / WEIGHTS)
    compare(tmp_path, base, adapter)
    report = to_gguf(adapter, tmp_path / "half.gguf", dtype="bf16", config=base)
    assert (
        set(report.details["dtypes"]) == {"bfloat16"} and fields_of(tmp_path / "half.gguf")["general.file_type"] == 32
    )


def add_tensor(adapter, name, tensor):
    save_file({**load_file(adapter / WEIGHTS), f"base_model.model.{name}": tensor}, adapter / WEIGHTS)


def set_options(adapter, **options):
    (adapter / CONFIG).write_text(json.dumps(read_json(adapter / CONFIG) | options))


def without_a_half(adapter):
    tensors = load_file(adapter / WEIGHTS)
    del tensors["base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight"]
    save_file(tensors, adapter / WEIGHTS)


def of_the_head(adapter):
    add_tensor(adapter, "lm_head.lora_A.weight", torch.ones(4, 32))
    add_tensor(adapter, "lm_head.lora_B.weight", torch.ones(1, 4))


BAD = {
    "use_dora": (lambda x: set_options(x, use_dora=True), "sets use_dora"),
    "a whole weight": (
        lambda x: add_tensor(x, "lm_head.modules_to_save.weight", torch.ones(4, 32)),
        "lm_head.modules_to_save.weight is a whole weight",
    ),
    "a bias": (lambda x: add_tensor(x, "model.layers.0.self_attn.q_proj.bias", torch.ones(32)), "is a whole weight"),
    "an embedding": (
        lambda x: add_tensor(x, "model.embed_tokens.lora_embedding_A", torch.ones(4, 8)), "adapts an embedding"
    ),
    "a tied head": (of_the_head, "the base has no lm_head.weight"),
    "half of a pair": (without_a_half, "one of lora_A and lora_B alone"),
    "another rank": (lambda x: set_options(x, r=5), "expected rank 5"),
    "no base": (lambda x: set_options(x, base_model_name_or_path=None), "does not name its base.*\n.*--config"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_what_is_refused(tmp_path, made, name):
    _, adapter = made("llama, tied", targets=DENSE)
    spoil, message = BAD[name]
    spoil(adapter)
    with pytest.raises(CheckpointError, match=message):
        to_gguf(adapter, tmp_path / "out.gguf")
    assert not (tmp_path / "out.gguf").exists()


def test_other_refusals(tmp_path, made, capsys):
    base, adapter = made("mixtral", target_parameters=("experts.down_proj",))
    with pytest.raises(CheckpointError, match=r"(target_parameters|all experts as one tensor)"):
        to_gguf(adapter, tmp_path / "out.gguf")
    shutil.rmtree(base)
    shutil.rmtree(adapter)
    base, adapter = made("llama")
    for options in ({"dtype": "q8_0"}, {"modelfile": True}, {"adapter": adapter}):
        with pytest.raises(InputError):
            convert(adapter, tmp_path / "out.gguf", Options(**options))
    other = small_model(tmp_path / "other", "qwen 2", "qwen2", hidden_size=64)
    with pytest.raises(CheckpointError, match="the adapter of another model"):
        to_gguf(adapter, tmp_path / "out.gguf", config=other)
    assert cli.main(["convert", str(adapter), str(tmp_path / "folder")]) == 3
    assert "a DST that ends in .gguf" in capsys.readouterr().err.replace("\n", " ")


def test_a_base_that_llama_cpp_computes_otherwise(tmp_path, made):
    base, adapter = made("llama")
    config = read_json(base / "config.json") | {"hidden_act": "gelu"}
    (base / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="hidden_act"):
        to_gguf(adapter, tmp_path / "out.gguf")
