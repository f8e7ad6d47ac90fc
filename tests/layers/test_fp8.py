"""Models in FP8: which modules, the weights that are kept, recomputation, refusals; on the CPU, by the same ops."""

import copy
import io

import pytest
import torch
from torch import nn

import ligermodels
from ligermodels import InputError
from ligermodels.kernels.linear import fp8_matmul, fp8_weight
from ligermodels.layers.fp8 import RECIPES, FP8Linear, FP8Recipe
from ligermodels.layers.linear import operands_of
from ligermodels.training import AdamW, accumulate_in_place, add_lora, merge_lora
from tests.tiny import FAMILIES, TINY

KEPT = FP8Recipe(keep_weights=True)
LLAMA = {**TINY, "model_type": "llama", "tie_word_embeddings": False}


def make(fp8="rowwise", **options):
    return ligermodels.Llama.from_config(LLAMA, dtype=torch.bfloat16, seed=0, fp8=fp8, **options).train()


def ids(rows=4, length=32, seed=0):
    return torch.randint(0, 256, (rows, length), generator=torch.Generator().manual_seed(seed))


def gradients(model, tokens=None):
    tokens = ids() if tokens is None else tokens
    model.zero_grad()
    loss = model(tokens, labels=tokens).loss
    loss.backward()
    return {"loss": loss.detach()} | {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def cosine(a, b):
    return torch.cosine_similarity(a.double().flatten(), b.double().flatten(), 0).item()


@pytest.fixture
def count(monkeypatch):
    """The number of times that weights were quantised."""
    calls, quantize = [], fp8_weight.quantize_rows
    monkeypatch.setattr(fp8_weight, "quantize_rows", lambda *args, **named: calls.append(1) or quantize(*args, **named))
    return calls


def test_linears_of_blocks_compute_in_fp8_and_nothing_else():
    model = make()
    chosen = {name for name, module in model.named_modules() if type(module) is FP8Linear}
    names = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
             "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")  # fmt: skip
    assert chosen == {f"model.layers.{i}.{name}" for i in (0, 1) for name in names}
    assert "in FP8 (rowwise)" in str(model.fusion_report()) and not model.fusion_report().unfused
    plain = make(None)
    assert model.state_dict().keys() == plain.state_dict().keys()
    assert all(map(torch.equal, model.state_dict().values(), plain.state_dict().values()))
    assert set(model.use_fp8(None)) == {name.removeprefix("model.layers.") for name in chosen}
    assert not any(isinstance(module, FP8Linear) for module in model.modules())
    assert gradients(model).keys() == gradients(plain).keys()
    assert all(map(torch.equal, gradients(model).values(), gradients(plain).values()))


def test_small_gates_routers_and_experts_stay():
    hybrid = ligermodels.Qwen3_5.from_config({**TINY, **FAMILIES["qwen3_5_text"], "model_type": "qwen3_5_text"},
                                             dtype=torch.bfloat16, seed=0, fp8="rowwise")  # fmt: skip
    mixer = hybrid.model.layers[0].linear_attn
    assert [type(getattr(mixer, f"in_proj_{name}")) is FP8Linear for name in ("qkv", "z", "b", "a")] == [1, 1, 0, 0]
    row = next(row for row in hybrid.fusion_report().rows if "in_proj_qkv" in row.part)
    assert row.fused and "in FP8 (rowwise, some bf16)" in row.runs and row.why
    assert all(g.isfinite().all() for g in gradients(hybrid.train()).values())
    mixture = ligermodels.Mixtral.from_config({**TINY, **FAMILIES["mixtral"], "model_type": "mixtral"},
                                              dtype=torch.bfloat16, seed=0, fp8="rowwise")  # fmt: skip
    chosen = [name for name, module in mixture.named_modules() if isinstance(module, FP8Linear)]
    assert len(chosen) == 8 and all(".self_attn." in name for name in chosen)


@pytest.mark.parametrize("fp8", RECIPES)
def test_gradients_point_where_those_of_bf16_do(fp8):
    exact, low = gradients(make(None)), gradients(make(fp8))
    assert all(cosine(low[name], exact[name]) > 0.985 for name in exact)  # 8 to 17 % of error: 10 products on the way
    assert any(cosine(low[name], exact[name]) < 0.9999 for name in exact)


@pytest.mark.parametrize("activations", ["mlp", "block"])
def test_recomputation_has_the_same_bits(activations):
    plain, again = gradients(make()), gradients(make(activation_checkpointing=activations))
    assert all(torch.equal(again[name], plain[name]) for name in plain)


def test_a_model_trains_as_in_bf16():
    def curve(fp8):
        model, losses = make(fp8), []
        optimizer = AdamW(model.parameters(), lr=3e-3)
        tokens = torch.arange(32).repeat(4, 2)
        for _ in range(12):
            loss = model(tokens, labels=tokens).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    exact = curve(None)
    assert exact[-1] < exact[0] - 1.5
    for fp8 in RECIPES:
        assert abs(curve(fp8)[-1] - exact[-1]) < 0.05 * exact[-1]


def test_weights_are_quantised_once_a_step(count):
    model = make(KEPT, activation_checkpointing="block")
    optimizer, ops = AdamW(model.parameters(), lr=1e-2), 8  # q | k | v, o, gate | up and down, in two blocks
    for micro in range(3):
        gradients(model, ids(seed=micro))
    assert len(count) == ops
    optimizer.step()
    before = gradients(model)
    assert len(count) == 2 * ops
    fresh = make(activation_checkpointing="block")
    fresh.load_state_dict(model.state_dict())
    assert all(torch.equal(value, before[name]) for name, value in gradients(fresh).items())
    with torch.no_grad():
        model.model.layers[0].self_attn.v_proj.weight += 1  # not the first of those that are joint
    count.clear()
    gradients(model)
    assert len(count) == 1
    torch.optim.AdamW(model.parameters()).step()
    count.clear()
    gradients(model)
    assert len(count) == ops


def test_kept_weights_are_not_those_of_other_tensors(count):
    model = make(KEPT)
    gradients(model)
    count.clear()
    linear = model.model.layers[0].self_attn.o_proj
    linear.weight = nn.Parameter(linear.weight.detach().clone())
    model.model.layers[1].mlp.down_proj.weight.data = torch.zeros_like(model.model.layers[1].mlp.down_proj.weight)
    gradients(model)
    assert len(count) == 2
    other = copy.deepcopy(model)
    torch.save(model, file := io.BytesIO())
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    for model_of in (other, loaded):
        count.clear()
        gradients(model_of)
        assert len(count) == 8


def test_nothing_is_kept_by_default_nor_in_a_process_group(count, monkeypatch):
    kept, model = gradients(make(KEPT)), make()
    count.clear()
    loss = gradients(model)
    assert len(count) == 16 and all(torch.equal(loss[name], kept[name]) for name in kept)
    model.model.layers[0].mlp.up_proj.weight.data.mul_(2)  # makes no version
    assert not torch.equal(gradients(model)["loss"], loss["loss"])
    model = make(KEPT)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    count.clear()
    gradients(model)
    assert len(count) == 16


def test_nothing_is_kept_once_a_graph_has_captured_a_forward(count, monkeypatch):
    model = make(KEPT)
    gradients(model)
    with monkeypatch.context() as patch:
        patch.setattr(fp8_weight, "_is_captured", lambda weight: True)
        count.clear()
        gradients(model)
        assert len(count) == 16  # in each forward and backward of the graph, not what was kept before
    count.clear()
    gradients(model)  # after replays, whose optimizer makes no version
    assert len(count) == 16


def test_gradients_may_be_accumulated_in_place():
    model, marked = make(), make()
    accumulate_in_place(marked)
    for tokens in (ids(), ids(seed=1)):
        for tuned in (model, marked):
            tuned(tokens, labels=tokens).loss.backward()
    for p, q in zip(model.parameters(), marked.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)  # on the CPU both add in bf16


def test_few_rows_without_a_gradient_are_exact():
    plain, low = make(None).eval(), make().eval()
    few = ids(1, 16)
    with torch.no_grad():
        assert torch.equal(low(few).logits, plain(few).logits)
        assert not torch.equal(low(ids()).logits, plain(ids()).logits)
    options = dict(max_new_tokens=8, do_sample=False)
    assert torch.equal(low.generate(few, **options), plain.generate(few, **options))


def test_saving_and_loading(tmp_path):
    make().save_pretrained(tmp_path / "model")
    make(None).save_pretrained(tmp_path / "plain")
    for file in (tmp_path / "plain").iterdir():
        assert file.read_bytes() == (tmp_path / "model" / file.name).read_bytes()
    loaded = ligermodels.load(tmp_path / "model", fp8="rowwise", dtype=torch.bfloat16).train()
    found = gradients(loaded)
    assert all(torch.equal(found[name], value) for name, value in gradients(make()).items())


def test_autocast_over_weights_in_fp32():
    model = make().float()
    with torch.autocast("cpu", torch.bfloat16):
        found = gradients(model)
    exact = gradients(make(None).float())
    assert all(found[name].dtype == torch.float32 and cosine(found[name], exact[name]) > 0.985 for name in exact)


@pytest.mark.parametrize("quantised", [False, True])
def test_adapters_over_a_base_in_fp8(tmp_path, quantised, count):
    make(None).save_pretrained(tmp_path)
    how = dict(quantization_config="fp8") if quantised else dict(fp8=KEPT)
    model, plain = (ligermodels.load(tmp_path, dtype=torch.bfloat16, **options) for options in (how, {}))
    bases = {name: p.detach().clone() for name, p in model.named_parameters()}
    for tuned in (model, plain):
        add_lora(tuned.train(), r=4, alpha=8)
        for name, p in tuned.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(p, std=0.05, generator=torch.Generator().manual_seed(len(name)))
    assert "with LoRA, in FP8 (rowwise)" in str(model.fusion_report())
    found, exact = gradients(model), gradients(plain)
    assert found.keys() == exact.keys() and all(".lora_" in name or name == "loss" for name in found)
    assert all(cosine(found[name], exact[name]) > 0.985 for name in found)
    assert any(not torch.equal(found[name], exact[name]) for name in found)
    assert all(torch.equal(model.get_parameter(name), value) for name, value in bases.items())
    again = copy.deepcopy(model)
    again._set_checkpointing("block")
    assert all(torch.equal(value, found[name]) for name, value in gradients(again).items())
    # A base in FP8 is never quantised again. Weights that are mapped from the file are separate, those of a copy joint.
    assert len(count) == (0 if quantised else 2 * 7 + 2 * 4)
    if quantised:
        with pytest.raises(InputError, match="rounded to FP8"):
            merge_lora(model)
    else:
        merged = merge_lora(model)
        assert any(isinstance(module, FP8Linear) for module in merged.modules())
        assert gradients(merged.requires_grad_())["loss"].isclose(found["loss"], rtol=0.01)


def test_an_adapter_over_fp8_in_a_hybrid(tmp_path):
    config = {**TINY, **FAMILIES["qwen3_5_text"], "model_type": "qwen3_5_text"}
    ligermodels.Qwen3_5.from_config(config, dtype=torch.bfloat16, seed=0).save_pretrained(tmp_path)
    model = add_lora(ligermodels.load(tmp_path, dtype=torch.bfloat16, quantization_config="fp8").train(), r=4)
    mixer = model.model.layers[0].linear_attn
    assert operands_of([mixer.in_proj_qkv])[0].is_fp8 and not operands_of([mixer.in_proj_a])[0].is_fp8
    assert all(value.isfinite().all() for value in gradients(model).values())


def test_it_is_refused_where_it_cannot_be(tmp_path, monkeypatch):
    with pytest.raises(InputError, match="fp8='int8'; expected 'rowwise'"):
        make("int8")
    model = make(None).float()
    model.use_fp8("rowwise")
    with pytest.raises(InputError, match="bfloat16"):
        gradients(model)
    make(None).save_pretrained(tmp_path)
    with pytest.raises(InputError, match="fp8= multiplies weights in 16 bits"):
        ligermodels.load(tmp_path, fp8="rowwise", quantization_config="nf4")
    odd = {**LLAMA, "hidden_size": 40, "num_attention_heads": 4, "head_dim": 10, "intermediate_size": 24}
    with pytest.raises(InputError, match="multiples of 16"):
        ligermodels.Llama.from_config(odd, dtype=torch.bfloat16, fp8="rowwise")
    with pytest.raises(InputError, match="DoRA needs the norms"):
        add_lora(make(), r=4, dora=True)
    monkeypatch.setattr(fp8_matmul, "cuda_capability", lambda index: 0)
    with pytest.raises(InputError, match="cuda:0 is not NVIDIA's"):
        fp8_matmul.check_device(torch.device("cuda", 0))
