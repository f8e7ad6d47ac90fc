"""Which modules are fused, the report that says so, and the warnings."""

import importlib
import warnings

import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

import ligermodels
from ligermodels import errors
from ligermodels.arch.fusion import short_names
from ligermodels.layers import linear
from ligermodels.layers.linear import why_not_fused
from ligermodels.training import add_lora
from tests.sizes import SIZES

attention_op = importlib.import_module("ligermodels.kernels.attention.attention")  # not the function of this name

CONFIG = dict(SIZES, num_hidden_layers=3, tie_word_embeddings=True)


class Adapter(nn.Module):
    """base_layer(x) + x @ a @ b, built as PEFT builds its own."""

    def __init__(self, base_layer):
        super().__init__()
        self.base_layer = base_layer
        for parameter in base_layer.parameters():
            parameter.requires_grad_(False)
        dtype, self.weight = base_layer.weight.dtype, base_layer.weight
        self.a = nn.Parameter(torch.randn(base_layer.weight.shape[1], 2, dtype=dtype))
        self.b = nn.Parameter(torch.randn(2, base_layer.weight.shape[0], dtype=dtype))

    def forward(self, x):
        return self.base_layer(x) + x @ self.a @ self.b


def llama(**changes):
    return ligermodels.Llama.from_config({**CONFIG, **changes}, dtype=torch.float32, device="cpu", seed=0)


def adapt(model, *names):
    for name in names:
        owner, _, child = name.rpartition(".")
        setattr(model.get_submodule(owner), child, Adapter(model.get_submodule(name)))
    return model


# ---- why a module is not fusable ----


def test_what_other_tests_do_not_wrap_is_an_obstacle():
    """Hooks, adapters, a parametrization and another class are in test_layers.py."""
    before, hooked, sharded = (nn.Linear(4, 4) for _ in range(3))
    before.register_forward_pre_hook(lambda *_: None)
    hooked.register_full_backward_hook(lambda *_: None)
    sharded.weight = nn.Parameter(TwoTensor(torch.randn(4, 4), torch.randn(4, 4)))
    assert why_not_fused(nn.Linear(4, 4)) is None and why_not_fused(before) == "a hook"
    assert why_not_fused(hooked) == "a hook" and why_not_fused(sharded) == "its weight, a TwoTensor"
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        assert why_not_fused(nn.Linear(4, 4)) == "a hook"
    finally:
        handle.remove()


# ---- the report ----


def rows(model, part):
    return {short_names(row.modules): (row.runs, row.fused, row.why) for row in model.fusion_report().rows
            if row.part == part}  # fmt: skip


QKV, GATED = "q_proj | k_proj | v_proj", "gate_proj | up_proj | down_proj"
ADAPTER = f"an adapter, {__name__}.Adapter"


def test_report_of_a_model_that_nothing_has_touched():
    report = llama().fusion_report()
    assert [(short_names(row.modules), row.part, row.fused) for row in report.rows] == [
        ("model.layers.0-2.self_attn", QKV, True),
        ("model.layers.0-2.self_attn", "scores", True),
        ("model.layers.0-2.mlp", GATED, True),
        ("model.layers.0-2.input_layernorm", "residual add, norm", True),
        ("model.layers.0-2.post_attention_layernorm", "residual add, norm", True),
        ("model.norm", "residual add, norm", True),
        ("lm_head", "lm_head, loss", True),
    ]
    assert report.unfused == () and report.kernels.startswith("plain PyTorch")
    runs = {row.part: row.runs for row in report.rows}
    assert (runs[QKV], runs[GATED], runs["lm_head, loss"]) == ("one matmul", "one op", "one op")


def test_report_tells_layers_apart_and_says_why():
    names = "0.self_attn.q_proj 0.self_attn.v_proj 2.self_attn.q_proj 1.mlp.gate_proj 2.mlp.down_proj"
    model = adapt(llama(), *(f"model.layers.{name}" for name in names.split()))
    model.model.layers[1].mlp.up_proj.register_forward_hook(lambda *_: None)
    assert rows(model, QKV) == {
        "model.layers.0.self_attn": ("each by itself", False, f"q_proj, v_proj: {ADAPTER}"),
        "model.layers.1.self_attn": ("one matmul", True, ""),
        "model.layers.2.self_attn": ("each by itself", False, f"q_proj: {ADAPTER}"),
    }
    assert rows(model, GATED) == {
        "model.layers.0.mlp": ("one op", True, ""),
        "model.layers.1.mlp": (
            "each by itself",
            False,
            f"gate_proj: {ADAPTER}; up_proj: a hook",
        ),
        "model.layers.2.mlp": ("one op of gate_proj | up_proj", False, f"down_proj: {ADAPTER}"),
    }
    assert len(model.fusion_report().unfused) == 4
    line = next(line for line in str(model.fusion_report()).splitlines() if QKV in line and ".2." in line)
    assert "each by itself" in line and line.endswith(f"q_proj: {ADAPTER}")


def test_report_of_adapters():
    """In one layer a bias of the base is trained too."""
    model = add_lora(ligermodels.Qwen2.from_config(CONFIG, dtype=torch.float32, device="cpu", seed=0), 2)
    model.model.layers[1].self_attn.q_proj.bias.requires_grad_()
    assert rows(model, QKV) == {"model.layers.0-2.self_attn": ("one matmul, with LoRA", True, "")}
    with torch.autocast("cpu", torch.bfloat16):
        assert rows(model, QKV)["model.layers.0-2.self_attn"][:2] == ("each by itself, by PyTorch", False)


# ---- the warning ----


def warned(run):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run()
    return [str(warning.message) for warning in caught if "FSDP" not in str(warning.message)]


def test_in_training_on_a_gpu_an_adapter_is_warned_of_once(monkeypatch):
    """A GPU as far as the warning asks."""
    monkeypatch.setattr(errors, "_warned", set())
    ids = torch.arange(12).view(2, 6)
    model = adapt(llama(), *(f"model.layers.{name}" for name in ("0.self_attn.q_proj", "1.self_attn.q_proj")))
    assert not warned(lambda: model(ids, labels=ids))
    monkeypatch.setattr(linear, "use_triton", lambda x: True)
    with torch.no_grad():
        assert not warned(lambda: model(ids))
    (message,) = warned(lambda: [model(ids, labels=ids) for _ in range(2)])
    assert message.startswith(
        f"Attention calls q_proj as a module, because of {ADAPTER}. It is not fused with k_proj, v_proj"
    )
    assert "model.fusion_report()" in message
    model.lm_head = Adapter(nn.Linear(32, 97))
    (message,) = warned(lambda: model(ids, labels=ids))
    assert f"not fused with lm_head, because of {ADAPTER}" in message


def test_a_module_that_a_library_quantised_is_not_warned_of(monkeypatch):
    monkeypatch.setattr(errors, "_warned", set())
    monkeypatch.setattr(linear, "use_triton", lambda x: True)
    model, ids = llama(), torch.arange(12).view(2, 6)
    attention = model.model.layers[0].self_attn
    attention.q_proj.__class__ = type("Linear4bit", (nn.Linear,), {})
    assert not warned(lambda: model(ids, labels=ids))
    torch.nn.utils.parametrize.register_parametrization(attention.k_proj, "weight", nn.Identity())
    (message,) = warned(lambda: model(ids, labels=ids))
    assert message.startswith("Attention calls k_proj as a module, because of its class")
