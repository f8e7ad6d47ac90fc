"""Adapters of stacked experts, and experts of 4 bits: in a model, in PEFT's files, merged and off."""

import itertools
import json
import warnings

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from ligermodels import CheckpointError, InputError
from ligermodels.checkpoint.weights import same_bits
from ligermodels.conversion.layouts import FolderSource
from ligermodels.conversion.merging import MergedSource
from ligermodels.conversion.source import View
from ligermodels.training import adapters_off, add_lora, load_adapter, merge_lora, save_adapter
from tests.arch.qwen3_vl import qwen3_vl_moe
from tests.arch.test_qwen3_5_moe import tiny
from tests.conversion.layouts import same, stored
from tests.quantized import with_quantized_experts
from tests.training.test_lora import IDS, adapted, logits, make

BOTH = ["experts.gate_up_proj", "experts.down_proj"]
ROUTER = ["mlp.gate.weight"]
NAMED = pytest.mark.parametrize(
    "names", [BOTH, BOTH[:1], BOTH[1:], ROUTER, BOTH + ROUTER], ids=["both", "gate_up", "down", "router", "all"]
)


FAMILIES = pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
EXPERT = {
    "mixtral": ("model.layers.{i}.block_sparse_moe.experts.{e}.", ("w1", "w3", "w2")),
    "qwen3_moe": ("model.layers.{i}.mlp.experts.{e}.", ("gate_proj", "up_proj", "down_proj")),
}
"""The modules that vLLM looks up in the file of an adapter for these families, whose classes have no is_3d_moe_weight:
`packed_modules_mapping["experts"]` of vllm/lora/utils.py, below the experts' module in vLLM's model, in
vllm/lora/model_manager.py (`_create_merged_loras_inplace`) and lora_model.py (`from_lora_tensors`), commit 01533aa."""


def by_peft(folder, adapter):
    """transformers' model of a checkpoint with PEFT's adapter, after no warning that keys are missing."""
    peft = pytest.importorskip("peft")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        warnings.filterwarnings("ignore", message=".*tie_word_embeddings.*|Unsupported layer type")
        return peft.PeftModel.from_pretrained(model, adapter).eval()


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "gpt_oss"])
@pytest.mark.parametrize("options", [
    *(dict(target_parameters=names, targets=["q_proj"]) for names in (BOTH, BOTH[:1], BOTH[1:], ROUTER)),
    dict(target_parameters=BOTH + ROUTER, targets=[]), dict(targets="all-linear", rslora=True),
    dict(target_parameters=BOTH, targets="all-linear", rslora=True),
], ids=["both", "gate_up", "down", "router", "all", "linear", "linear and both"])  # fmt: skip
@pytest.mark.parametrize("per_expert", [False, True], ids=["stacked", "per expert"])
def test_peft_computes_the_same_from_our_files(tmp_path, family, options, per_expert):
    """With linear modules of a dense block as well, whose names PEFT takes for the experts'. gpt-oss' matrices are
    [E, in, out] there, with the rows of gate and up in turn."""
    if family == "gpt_oss" and (names := options.get("target_parameters")):
        options = {**options, "target_parameters": [name.replace("mlp.gate", "mlp.router") for name in names]}
    model = adapted(family, **options)
    make(family).save_pretrained(tmp_path / "base")
    alone = options.get("target_parameters") in (BOTH[:1], BOTH[1:])
    if per_expert and (alone or (family == "gpt_oss" and options.get("target_parameters"))):
        with pytest.raises(InputError, match="beside it has none" if alone else "is one tensor on disk"):
            save_adapter(model, tmp_path / "adapter", per_expert=True)
        return
    save_adapter(model, tmp_path / "adapter", per_expert=per_expert)
    theirs = by_peft(tmp_path / "base", tmp_path / "adapter")
    with torch.no_grad():
        torch.testing.assert_close(theirs(IDS).logits, logits(model), rtol=1e-4, atol=1e-5)
    again = load_adapter(make(family), tmp_path / "adapter")
    assert {n: p.shape for n, p in again.named_parameters()} == {n: p.shape for n, p in model.named_parameters()}
    torch.testing.assert_close(logits(again), logits(model), rtol=1e-4, atol=1e-5)
    theirs.save_pretrained(tmp_path / "peft")
    torch.testing.assert_close(
        logits(load_adapter(make(family), tmp_path / "peft")), logits(model), rtol=1e-4, atol=1e-5
    )


@FAMILIES
def test_each_expert_has_the_names_that_vllm_looks_up(tmp_path, family):
    model, (prefix, names) = adapted(family, r=3, alpha=6, targets=[], target_parameters=BOTH), EXPERT[family]
    save_adapter(model, tmp_path / "adapter", per_expert=True)
    file = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    layers = {i: layer.mlp.experts for i, layer in enumerate(model.model.layers) if hasattr(layer.mlp, "experts")}
    expected = {}
    for (i, experts), e in itertools.product(layers.items(), range(4)):
        place = "base_model.model." + prefix.format(i=i, e=e)
        gate_up, down = (experts.adapters[name].factors for name in ("gate_up_proj", "down_proj"))
        gate, up = gate_up.b[e].chunk(2)
        for name, a, b in zip(names, (gate_up.a, gate_up.a, down.a), (gate, up, down.b[e]), strict=True):
            expected |= {f"{place}{name}.lora_A.weight": a[e], f"{place}{name}.lora_B.weight": b.contiguous()}
    assert same(file, expected)
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["rank_pattern"]) == (3, 6, {})  # vLLM reads no patterns


@FAMILIES
@pytest.mark.parametrize("lacking", ["", "up", "gate and down"])
def test_files_of_peft_over_transformers_4(tmp_path, family, lacking):
    """Each matrix of an expert has an A of its own there, or no adapter; what merges files on disk is the oracle."""
    make(family).save_pretrained(tmp_path / "base")
    (gate, up, down), generator = EXPERT[family][1], torch.Generator().manual_seed(0)
    names = {"": (gate, up, down), "up": (gate, down), "gate and down": (up,)}[lacking]
    tensors = {}
    for name, weight in stored(tmp_path / "base").items():
        if ".experts." in name and name.removesuffix(".weight").endswith(names):
            for half, shape in (("A", (3, weight.shape[1])), ("B", (weight.shape[0], 3))):
                key = f"base_model.model.{name.replace('weight', f'lora_{half}.weight')}"
                tensors[key] = torch.randn(shape, generator=generator) / 4
    folder = tmp_path / "adapter"
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors", {"format": "pt"})
    config = dict(peft_type="LORA", task_type="CAUSAL_LM", r=3, lora_alpha=6, target_modules=list(names))
    for rslora in (False, True):
        (folder / "adapter_config.json").write_text(json.dumps(config | dict(use_rslora=rslora)))
        merged = MergedSource(View(FolderSource(tmp_path / "base")), folder)
        model = load_adapter(make(family), folder)
        before = logits(model)
        if not lacking and not rslora:  # PEFT 0.21 refuses gate without up, and scales rslora by another factor
            with torch.no_grad():
                torch.testing.assert_close(by_peft(tmp_path / "base", folder)(IDS).logits, before, rtol=1e-4, atol=1e-5)
        save_adapter(model, tmp_path / "stacked")
        assert torch.equal(logits(load_adapter(make(family), tmp_path / "stacked")), before)
        tensors = stored(merge_lora(model).save_pretrained(tmp_path / f"merged {rslora}"))
        for name in merged.headers:
            torch.testing.assert_close(tensors[name], merged.read(name), rtol=0, atol=1e-6)


def test_patterns_of_experts(tmp_path):
    peft = pytest.importorskip("peft")
    make("qwen3_moe").save_pretrained(tmp_path / "base")
    ranks = {"experts.down_proj": 2, "gate.weight": 5, "mlp.gate_proj.weight": 3}
    patterns = dict(rank_pattern=ranks, alpha_pattern={"experts.gate_up_proj": 3})
    config = peft.LoraConfig(
        r=4,
        lora_alpha=8,
        target_modules=["q_proj"],
        target_parameters=BOTH + ROUTER,
        init_lora_weights=False,
        **patterns,
    )
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    theirs = peft.get_peft_model(theirs, config).eval()
    theirs.save_pretrained(tmp_path / "theirs")
    model = load_adapter(make("qwen3_moe"), tmp_path / "theirs")
    with torch.no_grad():
        torch.testing.assert_close(logits(model), theirs(IDS).logits, rtol=1e-4, atol=1e-5)
        save_adapter(model, tmp_path / "ours")
        again = by_peft(tmp_path / "base", tmp_path / "ours")(IDS).logits
    torch.testing.assert_close(again, logits(model), rtol=1e-4, atol=1e-5)
    with pytest.raises(InputError, match=r"r=2 and alpha=8, r=4 and alpha=3, r=5 and alpha=8"):
        save_adapter(model, tmp_path / "ours", per_expert=True)


def test_gradients_of_experts_without_tokens_are_zeros():
    model = adapted("qwen3_moe", sizes=dict(num_experts=8), targets=[], target_parameters=BOTH)
    experts = model.model.layers[1].mlp.experts
    chosen = []
    experts.register_forward_pre_hook(lambda module, inputs: chosen.append(inputs[2]))
    model(IDS[:1, :3], labels=IDS[:1, :3]).loss.backward()
    without = sorted({*range(8)} - {*chosen[0].flatten().tolist()})
    assert without
    for adapter in experts.adapters.values():
        for part in adapter.by_expert(adapter.lora_A.weight.grad, adapter.lora_B.weight.grad):
            assert not part[without].any() and part.flatten(1).any(1).sum() == 8 - len(without)


def test_the_files_have_peft_s_order_of_ranks_and_experts(tmp_path):
    """Rank j of expert e is row e * r + j of A and column j * experts + e of B: PEFT's ParamWrapper, written out."""
    r, experts, model = 3, 4, adapted("mixtral", r=3, alpha=6, targets=[], target_parameters=BOTH)
    save_adapter(model, tmp_path)
    file, merged = load_file(tmp_path / "adapter_model.safetensors"), make("mixtral")
    for name, weight in merged.named_parameters():
        module, _, end = name.rpartition(".")
        if end in ("gate_up_proj", "down_proj"):
            place = f"base_model.model.{module}" + ".base_layer" * (end == "gate_up_proj")
            a, b = file[f"{place}.lora_A.weight"], file[f"{place}.lora_B.weight"]
            for e, j in itertools.product(range(experts), range(r)):
                weight.data[e] += 2 * torch.outer(b[:, j * experts + e], a[e * r + j])
    torch.testing.assert_close(logits(model), logits(merged), rtol=1e-4, atol=1e-5)
    assert torch.equal(logits(load_adapter(make("mixtral"), tmp_path)), logits(model))


@NAMED
def test_off_and_merged(names):
    model = adapted("mixtral", target_parameters=names, targets=["q_proj"])
    with adapters_off(model):
        assert torch.equal(logits(model), logits(make("mixtral")))
    before = logits(model)
    torch.testing.assert_close(logits(merge_lora(model)), before, rtol=1e-4, atol=1e-5)
    assert not any("lora" in name for name in model.state_dict())


def test_only_the_adapters_are_trained_also_over_4_bits():
    for bits in (16, 4):
        model = make("mixtral") if bits == 16 else with_quantized_experts(make("mixtral"))
        plain = logits(model)
        add_lora(model, 4, targets=[], target_parameters=BOTH + ROUTER)
        assert torch.equal(logits(model), plain)  # B is zero
        model(IDS, labels=IDS).loss.backward()
        trained = {name for name, p in model.named_parameters() if p.grad is not None}
        assert trained and all("_adapter.lora_" in name for name in trained)
        assert trained == {name for name, p in model.named_parameters() if p.requires_grad}
        if bits == 4:
            with pytest.raises(InputError, match="4-bit"):
                merge_lora(model)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(target_parameters=["experts.w1"]), "experts.w1"),
        (dict(target_parameters="experts.down_proj"), "list of names"),
        (dict(target_parameters=BOTH, dropout=0.1), "dropout or DoRA"),
        (dict(target_parameters=BOTH, dora=True), "dropout or DoRA"),
    ],
    ids=["name", "string", "dropout", "dora"],
)
def test_what_add_lora_refuses(options, message):
    with pytest.raises(InputError, match=message):
        add_lora(make("mixtral"), **options)


STACKED = {"qwen3_5_moe_text": tiny(), "qwen3_vl_moe": qwen3_vl_moe(), "gpt_oss": {}}
"""Experts that are one tensor on disk; of the last two it is transposed, and of the last has gate and up in turn."""


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", *STACKED])
@NAMED
def test_convert_merges_what_merge_lora_merges(tmp_path, family, names):
    """To the bit."""
    names = [name.replace("mlp.gate", "mlp.router") for name in names] if family == "gpt_oss" else names
    model = adapted(family, targets=["q_proj"], target_parameters=names, rslora=True, sizes=STACKED.get(family))
    save_adapter(model, tmp_path / "adapter")
    make(family, **STACKED.get(family, {})).save_pretrained(tmp_path / "base")
    merge_lora(model).save_pretrained(tmp_path / "merged")
    source = MergedSource(View(FolderSource(tmp_path / "base")), tmp_path / "adapter")
    wanted = stored(tmp_path / "merged")
    assert source.headers.keys() == wanted.keys()
    assert all(same_bits(source.read(name), wanted[name]) for name in wanted)


def test_what_convert_refuses_of_stacked_adapters(tmp_path):
    save_adapter(adapted("mixtral", target_parameters=BOTH), tmp_path / "adapter")
    for experts, base in ((4, "base"), (6, "other")):
        make("mixtral", num_local_experts=experts).save_pretrained(tmp_path / base)
    with pytest.raises(CheckpointError, match=r"(?s)experts\.gate_up_proj has .*16.* expected .*24.*other experts"):
        MergedSource(View(FolderSource(tmp_path / "other")), tmp_path / "adapter")
    options = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    for changes, message in ((dict(target_parameters=["experts.w1"]), "experts.w1"), (dict(r=3), "expected")):
        (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps({**options, **changes}))
        with pytest.raises(CheckpointError, match=message):
            MergedSource(View(FolderSource(tmp_path / "base")), tmp_path / "adapter")


def test_what_load_adapter_refuses(tmp_path):
    save_adapter(adapted("mixtral", target_parameters=BOTH), tmp_path)
    assert load_file(tmp_path / "adapter_model.safetensors")
    with pytest.raises(
        CheckpointError, match=r"(?s)the adapter of .*experts\.gate_up_proj has .*16.* expected .*24.*other experts"
    ):
        load_adapter(make("mixtral", num_local_experts=6), tmp_path)
    options = json.loads((tmp_path / "adapter_config.json").read_text())
    for changes, message in ((dict(target_parameters=["experts.w1"]), "experts.w1"), (dict(r=3), "expected")):
        (tmp_path / "adapter_config.json").write_text(json.dumps({**options, **changes}))
        with pytest.raises(CheckpointError, match=message):
            load_adapter(make("mixtral"), tmp_path)


def test_what_load_adapter_refuses_of_each_expert(tmp_path):
    save_adapter(adapted("qwen3_moe", target_parameters=BOTH, targets=[]), tmp_path, per_expert=True)
    for experts, message in ((6, r"experts\.4\.gate_proj has {}"), (3, r"experts\.3\.\w+_proj, which is not there")):
        with pytest.raises(CheckpointError, match=message):
            load_adapter(make("qwen3_moe", num_experts=experts), tmp_path)
    options = json.loads((tmp_path / "adapter_config.json").read_text())
    for pattern in (r"experts.2.gate_proj", "up_proj"):
        (tmp_path / "adapter_config.json").write_text(json.dumps({**options, "alpha_pattern": {pattern: 3}}))
        with pytest.raises(CheckpointError, match=r"experts\.0\.\w+_proj and the experts beside it have several"):
            load_adapter(make("qwen3_moe"), tmp_path)
