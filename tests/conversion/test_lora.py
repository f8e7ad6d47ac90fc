"""LoRA adapters merged into small models: against the sum in fp64, and against the adapted model's own logits."""

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import ligermodels
from ligermodels.checkpoint import weights
from ligermodels.checkpoint.adapters import size_of
from ligermodels.conversion import Options, convert
from ligermodels.conversion.layouts import FolderSource
from ligermodels.conversion.merging import MergedSource
from ligermodels.conversion.source import View
from ligermodels.errors import CheckpointError
from tests.checkpoint.fixtures import make_model
from tests.conversion.layouts import a_checkpoint, same, stored, write_adapter, write_dcp


def a_base(folder, *, dtype=torch.float32, **changes):
    sizes = dict(vocab_size=61, hidden_size=32, intermediate_size=44, num_hidden_layers=2, num_attention_heads=4)
    model = make_model(**sizes, num_key_value_heads=2, initializer_range=0.2, **changes)
    model.to(dtype).save_pretrained(folder)
    return View(FolderSource(folder))


def an_adapter(folder: Path, modules: dict[str, tuple[int, int]], *, r=4, ranks=None, extra=None, **options):
    """Factors for {module: (out, in)}; ranks: those that differ from r."""
    folder.mkdir()
    tensors = dict(extra or {})
    for module, (rows, columns) in modules.items():
        rank = (ranks or {}).get(module, r)
        tensors[f"base_model.model.{module}.lora_A.weight"] = torch.randn(rank, columns)
        tensors[f"base_model.model.{module}.lora_B.weight"] = torch.randn(rows, rank)
    save_file(tensors, folder / "adapter_model.safetensors")
    targets = sorted({module.rpartition(".")[2] for module in modules})
    options = {"peft_type": "LORA", "r": r, "lora_alpha": 6, "target_modules": targets, **options}
    (folder / "adapter_config.json").write_text(json.dumps(options))
    return tensors


def hf_modules(*names):
    shapes = {"q_proj": (32, 32), "k_proj": (16, 32), "down_proj": (32, 44)}
    part = {"q_proj": "self_attn", "k_proj": "self_attn", "down_proj": "mlp"}
    return {f"model.layers.{i}.{part[name]}.{name}": shapes[name] for i in range(2) for name in names}


def check_sum(source, base, tensors, module, scale, name=None, rows=slice(None)):
    a, b = (tensors[f"base_model.model.{module}.lora_{half}.weight"].double() for half in "AB")
    name = name or f"{module}.weight"
    exact = base.read(name).double() + scale * (b @ a)[rows]
    found = source.read(name)
    assert found.dtype == base.headers[name].dtype and source.headers[name] == base.headers[name]
    # One rounding to the base's dtype, of a sum in fp32.
    step = torch.finfo(found.dtype).eps / 2 * exact.abs() + 40 * torch.finfo(torch.float32).eps
    assert ((found.double() - exact).abs() <= step * 1.01).all()


@pytest.mark.parametrize("dtype, rslora", [(torch.float32, True), (torch.bfloat16, False), (torch.float64, False)])
def test_the_sum_is_rounded_once(tmp_path, dtype, rslora):
    base = a_base(tmp_path / "base", dtype=dtype)
    modules = hf_modules("q_proj", "down_proj")
    tensors = an_adapter(tmp_path / "adapter", modules, use_rslora=rslora)
    source = MergedSource(base, tmp_path / "adapter")
    assert list(source.headers) == list(base.headers)
    for module in modules:
        check_sum(source, base, tensors, module, 6 / (2 if rslora else 4))
    for name in base.headers:
        if name.removesuffix(".weight") not in modules:
            assert weights.same_bits(source.read(name), base.read(name))


def test_mixtral_takes_both_layouts_names(tmp_path):
    base = a_base(tmp_path / "base", model_type="mixtral", num_local_experts=2)
    expert, router = "model.layers.0.block_sparse_moe.experts.1.w1", "model.layers.0.mlp.gate"
    tensors = an_adapter(tmp_path / "adapter", {expert: (44, 32), router: (2, 32)}, target_modules=".*gate|.*w1")
    source = MergedSource(base, tmp_path / "adapter")
    check_sum(source, base, tensors, expert, 1.5)
    check_sum(source, base, tensors, router, 1.5, "model.layers.0.block_sparse_moe.gate.weight")
    an_adapter(tmp_path / "both", {router: (2, 32), "model.layers.0.block_sparse_moe.gate": (2, 32)})
    with pytest.raises(CheckpointError, match="changed twice"):
        MergedSource(base, tmp_path / "both")


def test_an_embedding_has_its_factors_the_other_way_round(tmp_path):
    base = a_base(tmp_path / "base")
    a, b = torch.randn(4, 61), torch.randn(32, 4)
    names = [f"base_model.model.model.embed_tokens.lora_embedding_{half}" for half in "AB"]
    an_adapter(tmp_path / "adapter", {}, extra=dict(zip(names, (a, b), strict=True)), target_modules=["embed_tokens"])
    name = "model.embed_tokens.weight"
    found = MergedSource(base, tmp_path / "adapter").read(name)
    torch.testing.assert_close(found, base.read(name) + 1.5 * (b @ a).T)


def test_whole_modules_and_biases_replace(tmp_path):
    base = a_base(tmp_path / "base", attention_bias=True)
    rows = torch.randn(64, 32)
    extra = {
        "base_model.model.model.embed_tokens.weight": rows,
        "base_model.model.lm_head.modules_to_save.default.weight": rows * 2,
        "base_model.model.model.layers.0.self_attn.q_proj.base_layer.bias": torch.arange(32.0),
        "base_model.model.model.norm.weight": torch.arange(32.0),
    }
    an_adapter(tmp_path / "adapter", hf_modules("k_proj"), extra=extra, modules_to_save=["embed_tokens"], bias="all")
    (tmp_path / "adapter" / "tokenizer.json").write_text("{}")
    source = MergedSource(base, tmp_path / "adapter")
    assert torch.equal(source.read("model.embed_tokens.weight"), rows)
    assert torch.equal(source.read("lm_head.weight"), rows * 2)
    assert torch.equal(source.read("model.layers.0.self_attn.q_proj.bias"), torch.arange(32.0))
    assert torch.equal(source.read("model.norm.weight"), torch.arange(32.0))
    assert source.config == {**base.config, "vocab_size": 64}  # three rows were added
    assert source.headers["lm_head.weight"].shape == (64, 32)
    files = source.files()
    assert files["tokenizer.json"] == tmp_path / "adapter" / "tokenizer.json"
    assert json.loads(files["config.json"]) == source.config


def test_a_tied_head_stays_tied_or_is_parted(tmp_path):
    base, rows = a_base(tmp_path / "base", tie_word_embeddings=True), torch.randn(61, 32)
    assert "lm_head.weight" not in base.headers
    embed, head = "base_model.model.model.embed_tokens.weight", "base_model.model.lm_head.weight"
    for name, extra in dict(alike={embed: rows, head: rows.clone()}, apart={embed: rows, head: -rows}).items():
        an_adapter(tmp_path / name, {}, extra=extra)
        source, tied = MergedSource(base, tmp_path / name), name == "alike"
        assert ("lm_head.weight" in source.headers) is not tied
        assert source.config["tie_word_embeddings"] is tied
        assert torch.equal(source.read("model.embed_tokens.weight"), rows)
    assert torch.equal(source.read("lm_head.weight"), -rows)
    factors = {f"base_model.model.lm_head.lora_{h}.weight": x for h, x in dict(A=rows[:4], B=rows[:, :4]).items()}
    factors = {name: x.clone() for name, x in factors.items()}
    an_adapter(tmp_path / "factors", {}, extra={embed: rows, **factors}, target_modules=["lm_head"])
    found = MergedSource(base, tmp_path / "factors").read("lm_head.weight")
    expected = base.read("model.embed_tokens.weight") + 1.5 * rows[:, :4] @ rows[:4]
    torch.testing.assert_close(found, expected)
    an_adapter(tmp_path / "one", {}, extra={embed: rows})
    with pytest.raises(CheckpointError, match="ties embedding and head"):
        MergedSource(base, tmp_path / "one")


def test_patterns_name_modules_by_the_ends_of_their_names():
    """As in the test below, without PEFT."""
    options = {"r": 4, "lora_alpha": 8, "rank_pattern": {"q_proj": 2, "v": 7, r"layers\.1\.mlp\.up_proj": 6}}
    names = ("model.layers.0.self_attn.q_proj", "q_proj", "model.layers.1.mlp.up_proj", "model.layers.11.mlp.up_proj",
             "model.layers.0.self_attn.v_proj", "model.layers.0.self_attn.kq_proj")  # fmt: skip
    assert [size_of(options, name) for name in names] == [(2, 8), (2, 8), (6, 8), (4, 8), (4, 8), (4, 8)]


def test_peft_merges_to_the_same(tmp_path):
    peft = pytest.importorskip("peft")
    base, modules = a_base(tmp_path / "base"), ["q_proj", "v_proj", "gate_proj", "down_proj"]
    model = ligermodels.load(tmp_path / "base", progress=False)
    options = peft.LoraConfig(
        task_type="CAUSAL_LM", target_modules=modules, r=4, lora_alpha=7, use_rslora=True, init_lora_weights=False,
        # "v" names no module, and must not match the beginning of v_proj
        rank_pattern={"layers.1.mlp.down_proj": 2, "v": 3}, alpha_pattern={"q_proj": 5}, modules_to_save=["lm_head"],
    )  # fmt: skip
    model = peft.get_peft_model(model, options)
    with torch.no_grad():
        model.base_model.model.lm_head.modules_to_save["default"].weight.mul_(2)
    model.save_pretrained(tmp_path / "adapter")
    model.merge_and_unload().save_pretrained(tmp_path / "merged")
    expected = load_file(tmp_path / "merged" / "model.safetensors")
    source = MergedSource(base, tmp_path / "adapter")
    assert expected.keys() == source.headers.keys()
    for name in expected:
        torch.testing.assert_close(source.read(name), expected[name], rtol=1e-6, atol=1e-6)
    assert not torch.equal(source.read("lm_head.weight"), base.read("lm_head.weight"))


def options(**fields):
    def apply(folder):
        values = json.loads((folder / "adapter_config.json").read_text())
        (folder / "adapter_config.json").write_text(json.dumps({**values, **fields}))

    return apply


def tensors(change):
    def apply(folder):
        found = change(load_file(folder / "adapter_model.safetensors"))
        save_file({name: tensor.clone() for name, tensor in found.items()}, folder / "adapter_model.safetensors")

    return apply


Q = "base_model.model.model.layers.0.self_attn.q_proj"
BAD = {
    "IA3": (options(peft_type="IA3"), "peft_type 'IA3'"),
    "DoRA": (options(use_dora=True), "sets use_dora, which (?s:.*)load_adapter and merge_lora of ligermodels.training"),
    "PiSSA": (options(init_lora_weights="pissa_niter_4"), "changed the base"),
    "another rank": (options(r=8), "has rank 4 in A and 4 in B, r 8"),
    "magnitudes": (tensors(lambda t: {**t, f"{Q}.lora_magnitude_vector": torch.ones(32)}), "variant of LoRA"),
    "another model's names": (tensors(lambda t: {k.replace("q_proj", "wq"): v for k, v in t.items()}), "has no"),
    "another size": (tensors(lambda t: {k: torch.cat([v, v], -1) if "_A" in k else v for k, v in t.items()}), "size"),
    "rows of a head": (tensors(lambda t: {**t, "base_model.model.lm_head.weight": torch.ones(70, 32)}), "rows"),
    "beyond the dtype": (tensors(lambda t: {name: x * 1e6 for name, x in t.items()}), r"infinity in torch\.float16"),
    "NaN": (tensors(lambda t: {name: x * math.nan for name, x in t.items()}), "NaN or infinity"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_adapters(tmp_path, case):
    base = a_base(tmp_path / "base", dtype=torch.float16)
    an_adapter(tmp_path / "adapter", hf_modules("q_proj"))
    spoil, message = BAD[case]
    spoil(tmp_path / "adapter")
    with pytest.raises(CheckpointError, match=message):
        MergedSource(base, tmp_path / "adapter").read("model.layers.0.self_attn.q_proj.weight")


def test_a_pickle_is_read_only_where_allowed(tmp_path):
    base = a_base(tmp_path / "base")
    found = an_adapter(tmp_path / "adapter", hf_modules("q_proj"))
    expected = MergedSource(base, tmp_path / "adapter").read("model.layers.1.self_attn.q_proj.weight")
    (tmp_path / "adapter" / "adapter_model.safetensors").unlink()
    torch.save(found, tmp_path / "adapter" / "adapter_model.bin")
    with pytest.raises(CheckpointError, match="allow_pickle=True"):
        MergedSource(base, tmp_path / "adapter")
    source = MergedSource(base, tmp_path / "adapter", allow_pickle=True)
    assert torch.equal(source.read("model.layers.1.self_attn.q_proj.weight"), expected)


@pytest.mark.parametrize("layout", ["hf", "dcp"])
def test_the_pipeline_merges_into_any_layout(tmp_path, layout):
    tensors = a_checkpoint(tmp_path / "hf", finite=True)
    (write_dcp if layout == "dcp" else shutil.copytree)(tmp_path / "hf", tmp_path / "base")
    write_adapter(tmp_path / "adapter")
    convert(tmp_path / "base", tmp_path / "out", Options(adapter=tmp_path / "adapter", progress=False, verify="bytes"))
    source = MergedSource(View(FolderSource(tmp_path / "hf")), tmp_path / "adapter")
    merged = stored(tmp_path / "out")
    assert same(merged, {name: source.read(name) for name in source.headers})
    assert {name for name in merged if not weights.same_bits(merged[name], tensors[name])} == {
        f"model.layers.{layer}.self_attn.q_proj.weight" for layer in range(2)
    }
    with pytest.raises(CheckpointError, match="holds an adapter"):
        convert(tmp_path / "adapter", tmp_path / "again")
