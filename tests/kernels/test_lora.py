"""Frozen layers with adapters: outputs and gradients of the formula in fp64, what is saved, and in how many matmuls.

Whole models are compared with modules that compute W x + b + s B (A x) one by one, in which nothing is fused.
"""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ligermodels.arch import ARCHS
from ligermodels.kernels import gated_mlp, mlp
from ligermodels.kernels.linear import lay_together, packed_linear
from ligermodels.kernels.lora import Adapter, lora_linear
from ligermodels.kernels.rms_norm import add_rms_norm
from ligermodels.layers.lora import LoRALinear
from ligermodels.training import add_lora
from tests.kernels.seen import Seen, saved_by

HIDDEN, INNER, OUT, R = 16, 24, 12, 4
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.float16: 2e-2}
"""Relative to the largest element: some hundred sums of about 30 terms of like size, one after the other."""
WHICH = {"all": (1, 1, 1), "first": (1, 0, 0), "second": (0, 1, 0), "last": (0, 0, 1), "two": (1, 0, 1)}
MODES = {"saved": {}, "recomputed": {"recompute": True}, "tiles": {"recompute": True, "workspace_bytes": 1}}


def close(found, expected, dtype):
    assert (found is None) == (expected is None)
    if found is not None:
        error = (found.double() - expected.double()).abs().max() / expected.double().abs().max()
        assert found.dtype == expected.dtype or dtype != torch.float64
        assert error <= TOLERANCE[dtype], f"{error:.1e}"


def make(device, dtype, sizes, which, *, joint=True, ranks=(R, R + 1, R)):
    """Frozen weights and biases of the sizes (out, in), and fp32 (fp64) adapters for those in `which`."""
    weights = [nn.Parameter(torch.randn(n, k, device=device).to(dtype) * k**-0.5, False) for n, k in sizes]
    biases = [nn.Parameter(torch.randn(n, device=device).to(dtype), False) for n, _ in sizes]
    if joint:
        lay_together(weights[:2])
        lay_together(biases[:2])
    master = torch.promote_types(dtype, torch.float32)
    adapters = []
    for (n, k), r, one in zip(sizes, ranks, which, strict=False):
        a = torch.randn(r, k, device=device, dtype=master).mul_(k**-0.5).requires_grad_()
        b = torch.randn(n, r, device=device, dtype=master).mul_(r**-0.5).requires_grad_()
        adapters.append(Adapter(a, b, 0.75) if one else None)
    return weights, biases, adapters


def exact(adapters):
    """In fp64, as leaves of their own."""
    double = [None if one is None else [t.detach().double().requires_grad_() for t in one[:2]] for one in adapters]
    return double, [None if one is None else Adapter(*one, 0.75) for one in double]


def formula(x, weight, bias, adapter):
    y = x @ weight.double().t() + bias.double()
    return y if adapter is None else y + adapter.scale * (x @ adapter.a.t() @ adapter.b.t())


def leaves(adapters):
    return [t for one in adapters if one is not None for t in one[:2]]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16])
@pytest.mark.parametrize("joint", [True, False], ids=["joint", "apart"])
@pytest.mark.parametrize("which", WHICH)
def test_layers_side_by_side(device, poison, dtype, joint, which):
    sizes = [(OUT, HIDDEN), (OUT // 2, HIDDEN), (OUT, HIDDEN)]
    weights, biases, adapters = make(device, dtype, sizes, WHICH[which], joint=joint)
    x = torch.randn(2, 5, HIDDEN, device=device).to(dtype).requires_grad_()
    y = lora_linear(x, weights, biases, adapters)
    dy = torch.randn_like(y)
    found = torch.autograd.grad(y, [x, *leaves(adapters)], dy)
    double, copies = exact(adapters)
    x64 = x.detach().double().requires_grad_()
    y64 = torch.cat([formula(x64, *one) for one in zip(weights, biases, copies, strict=True)], -1)
    expected = torch.autograd.grad(y64, [x64, *leaves(copies)], dy.double())
    for one, other in zip((y, *found), (y64, *expected), strict=True):
        close(one, other, dtype)
    with torch.no_grad():
        close(lora_linear(x, weights, biases, adapters), y64, dtype)
    del double


@pytest.mark.parametrize("need_x", [True, False], ids=["", "x frozen"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("which", WHICH)
@pytest.mark.parametrize("gated", [True, False], ids=["gated", "plain"])
def test_mlp(device, poison, gated, which, mode, need_x):
    dtype = torch.float64
    if not gated:
        sizes, chosen = [(INNER, HIDDEN), (OUT, INNER)], WHICH[which][1:]
        if not any(chosen):
            return
    else:
        sizes, chosen = [(INNER, HIDDEN), (INNER, HIDDEN), (OUT, INNER)], WHICH[which]
    weights, biases, adapters = make(device, dtype, sizes, chosen, joint=gated)
    x = torch.randn(3, 100, HIDDEN, device=device, dtype=dtype, requires_grad=need_x)
    if gated:
        y = gated_mlp(x, weights[:2], weights[2], biases[:2], biases[2], adapters=adapters, **MODES[mode])
    else:
        y = mlp(x, *weights, *biases, activation="gelu", adapters=adapters, **MODES[mode])
    dy = torch.randn_like(y)
    wanted = [*([x] if need_x else []), *leaves(adapters)]
    found = torch.autograd.grad(y, wanted, dy)
    z = [formula(x, *one) for one in zip(weights[:-1], biases[:-1], adapters[:-1], strict=True)]
    h = F.silu(z[0]) * z[1] if gated else F.gelu(z[0])
    y64 = formula(h, weights[-1], biases[-1], adapters[-1])
    for one, other in zip((y, *found), (y64, *torch.autograd.grad(y64, wanted, dy)), strict=True):
        close(one, other, dtype)
    if gated:
        with torch.no_grad():
            y = gated_mlp(x, weights[:2], weights[2], biases[:2], biases[2], adapters=adapters, **MODES[mode])
            close(y, y64, dtype)


def test_a_layer_that_is_not_frozen_gets_its_gradient(device):
    weights, biases, adapters = make(device, torch.float64, [(INNER, HIDDEN), (INNER, HIDDEN), (OUT, INNER)], (1, 0, 1))
    weights[1].requires_grad_()
    biases[2].requires_grad_()
    x = torch.randn(2, 3, HIDDEN, device=device, dtype=torch.float64)
    for y in (
        gated_mlp(x, weights[:2], weights[2], biases[:2], biases[2], adapters=adapters),
        lora_linear(x, weights[:2], biases[:2], adapters[:2]),
    ):
        wanted = [weights[1], *leaves(adapters[:1])]
        assert all(g.abs().sum() > 0 for g in torch.autograd.grad(y.sum(), wanted))


def test_what_is_saved(device):
    """After a norm: its inputs, and H; of an MLP gate and up too, unless they are recomputed. No copy of x, no h."""
    weights, biases, adapters = make(device, torch.float32, [(INNER, HIDDEN), (INNER, HIDDEN), (OUT, INNER)], (1, 1, 1))
    x, residual = torch.randn(2, 7, 9, HIDDEN, device=device).requires_grad_().unbind()
    norm = torch.randn(HIDDEN, device=device).requires_grad_()
    given = [*weights, *biases, *leaves(adapters), norm]
    y, total = add_rms_norm(x, residual, norm)
    _, saved = saved_by(lambda: lora_linear(y, weights[:2], biases[:2], adapters[:2]), *given, total)
    assert sorted(tuple(t.shape) for t in saved if t.dim() > 1) == [(63, R + R + 1)]

    def op(**mode):
        return gated_mlp(y, weights[:2], weights[2], biases[:2], biases[2], adapters=adapters, **mode)

    for mode, kept in ((MODES["saved"], [(7, 9, 2 * INNER)]), (MODES["tiles"], [])):
        _, saved = saved_by(lambda mode=mode: op(**mode), *given, total)
        assert [tuple(t.shape) for t in saved if t.dim() > 1] == kept


def test_in_how_many_matmuls(device):
    """One for all W and one for all A; none of the shape of a weight's gradient."""
    weights, biases, adapters = make(device, torch.float32, [(OUT, HIDDEN), (OUT, HIDDEN)], (1, 1), ranks=(R, R))
    x = torch.randn(50, HIDDEN, device=device).requires_grad_()
    with Seen() as seen:
        y = lora_linear(x, weights, [None, None], adapters)
        y.backward(torch.ones_like(y))
    large = [
        (50, HIDDEN, 2 * OUT),
        (50, HIDDEN, 2 * R),
        (50, 2 * OUT, HIDDEN),
        (2 * R, 50, HIDDEN),
        (50, 2 * R, HIDDEN),
    ]
    assert [one for one in seen.matmuls if HIDDEN in one] == [large[0], large[1], large[3], large[2], large[4]]
    assert y.shape == packed_linear(x, weights).shape and biases


# ---- Models ----

SIZES = dict(
    vocab_size=37, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, initializer_range=0.2,
)  # fmt: skip
FAMILIES = {
    "llama": dict(tie_word_embeddings=True),
    "qwen2": dict(tie_word_embeddings=False),
    "gemma2": dict(head_dim=8, query_pre_attn_scalar=12, sliding_window=6, tie_word_embeddings=True,
        attn_logit_softcapping=2.0, final_logit_softcapping=3.0),
    "phi3": dict(tie_word_embeddings=False, pad_token_id=0),
}  # fmt: skip


class OneByOne(nn.Module):
    """A layer and its adapter, which nothing fuses."""

    def __init__(self, linear):
        super().__init__()
        self.inner = linear

    def forward(self, x):
        one = self.inner
        return F.linear(x, one.weight, one.bias) + one.scale * F.linear(
            F.linear(x, one.lora_A.weight.to(x.dtype)), one.lora_B.weight.to(x.dtype)
        )


def a_model(family, device, dtype, **options):
    model = ARCHS[family].from_config({**SIZES, **FAMILIES[family]}, dtype=dtype, device=device, **options)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(parameter, std=0.2)
    master = torch.promote_types(dtype, torch.float32)
    add_lora(model, 4, 8, dtype=master)
    torch.manual_seed(1)
    for module in model.modules():
        if isinstance(module, LoRALinear):
            nn.init.normal_(module.lora_B.weight, std=0.1)
    return model


def gradients(model, ids):
    loss = model(ids, labels=ids).loss
    loss.backward()
    return loss.detach(), {
        name.replace(".inner", ""): parameter.grad for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float64, pytest.param(torch.float32, marks=pytest.mark.slow)])
@pytest.mark.parametrize("family", FAMILIES)
def test_models(device, family, dtype):
    """Loss and gradients of A and B, under each way to recompute; of the base there are none."""
    torch.manual_seed(0)
    model = a_model(family, device, dtype)
    plain = copy.deepcopy(model).double()
    for module in list(plain.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, LoRALinear):
                setattr(module, name, OneByOne(child))
    ids = torch.randint(37, (2, 9), device=device)
    loss, expected = gradients(plain, ids)
    assert all(".lora_" in name for name in expected)
    rows = [row for row in model.fusion_report().rows if "proj" in row.part]
    assert len(rows) == 2 and all(row.fused and row.runs.endswith("with LoRA") for row in rows)
    for recompute in ("none", "mlp", "block"):
        model.gradient_checkpointing_enable({"recompute": recompute})
        model.zero_grad()
        mine, found = gradients(model, ids)
        close(mine, loss, dtype)
        assert found.keys() == expected.keys()
        for name in expected:
            close(found[name].to(expected[name].dtype), expected[name], dtype)


@pytest.mark.parametrize("recompute", ["none", "mlp"])
def test_a_model_saves_no_more_with_adapters(device, recompute):
    """But for H of q, k and v and of o: (3 r + r) numbers per token and block. The base trains its norms alone."""
    ids, saved = torch.randint(37, (2, 9), device=device), []
    for adapted in (True, False):
        model = a_model("llama", device, torch.float32, activation_checkpointing=recompute)
        if not adapted:
            model = ARCHS["llama"].from_config({**SIZES, **FAMILIES["llama"]}, device=device, dtype=torch.float32)
            model.gradient_checkpointing_enable({"recompute": recompute})
            for parameter in model.parameters():
                parameter.requires_grad_()
        given = list(model.parameters())
        _, tensors = saved_by(lambda model=model: model.model(input_ids=ids), *given)
        saved.append(sum(t.numel() for t in tensors if t.dim() > 1 and t.is_floating_point()))
    assert saved[0] - saved[1] == 2 * 18 * (3 * 4 + 4)
