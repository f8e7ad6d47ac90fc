"""Frozen layers with adapters: outputs and gradients of the formula in fp64, what is saved, and in how many matmuls.

Whole models are compared with modules that compute W x + b + s B (A x) one by one, in which nothing is fused. W is
dense or of 4 bits, and then dequantised in the formula.
"""

import contextlib
import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ligermodels.arch import ARCHS
from ligermodels.kernels import dequantize_nf4_reference, gated_mlp, low_bit, mlp, nf4, quantize_nf4
from ligermodels.kernels.linear import joint_linear, make_joint
from ligermodels.kernels.lora import Adapter, lora_linear
from ligermodels.kernels.nf4 import NF4Weight
from ligermodels.kernels.rms_norm import add_rms_norm
from ligermodels.layers.lora import Adapted
from ligermodels.layers.nf4 import NF4Linear
from ligermodels.training import adapters_off, add_lora
from tests.kernels import CHUNK
from tests.kernels.seen import Seen, saved_by
from tests.quantized import quantized

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


def make(device, dtype, sizes, which, *, laid="joint", ranks=(R, R + 1, R)):
    """Frozen weights and biases of the sizes (out, in), and fp32 (fp64) adapters for those in `which`. laid: with "nf4"
    weights are of 4 bits, with "mixed" all but the second; their biases are fp32."""
    weights = [nn.Parameter(torch.randn(n, k, device=device).to(dtype) * k**-0.5, False) for n, k in sizes]
    biases = [nn.Parameter(torch.randn(n, device=device).to(dtype), False) for n, _ in sizes]
    for i in () if laid in ("joint", "apart") else range(0, len(sizes), 2 if laid == "mixed" else 1):
        weights[i] = NF4Weight(*quantize_nf4(weights[i].detach().float(), block=32))
        biases[i] = nn.Parameter(biases[i].float(), False)
    if laid == "joint":
        make_joint(weights[:2])
        make_joint(biases[:2])
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
    return [None if one is None else Adapter(*one, 0.75) for one in double]


def dense(weight, dtype=torch.float64):
    """The weight, dequantised where it is of 4 bits."""
    return (
        dequantize_nf4_reference(weight.packed, weight.state, dtype)
        if isinstance(weight, NF4Weight)
        else weight.to(dtype)
    )


def formula(x, weight, bias, adapter):
    y = x @ dense(weight).t() + bias.double()
    return y if adapter is None else y + adapter.scale * (x @ adapter.a.t() @ adapter.b.t())


def leaves(adapters):
    return [t for one in adapters if one is not None for t in one[:2]]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16])
@pytest.mark.parametrize("laid", ["joint", "apart", "nf4", "mixed"])
@pytest.mark.parametrize("which", WHICH)
def test_layers_side_by_side(device, poison, dtype, laid, which):
    sizes = [(OUT, HIDDEN), (OUT // 2, HIDDEN), (OUT, HIDDEN)]
    weights, biases, adapters = make(device, dtype, sizes, WHICH[which], laid=laid)
    x = torch.randn(2, 5, HIDDEN, device=device).to(dtype).requires_grad_()
    y = lora_linear(x, weights, biases, adapters)
    dy = torch.randn_like(y)
    found = torch.autograd.grad(y, [x, *leaves(adapters)], dy)
    copies = exact(adapters)
    x64 = x.detach().double().requires_grad_()
    y64 = torch.cat([formula(x64, *one) for one in zip(weights, biases, copies, strict=True)], -1)
    expected = torch.autograd.grad(y64, [x64, *leaves(copies)], dy.double())
    for one, other in zip((y, *found), (y64, *expected), strict=True):
        close(one, other, dtype)
    with torch.no_grad():
        close(lora_linear(x, weights, biases, adapters), y64, dtype)


@pytest.mark.parametrize("need_x", [True, False], ids=["", "x frozen"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("gated", [True, False], ids=["gated", "plain"])
@pytest.mark.parametrize(
    ("laid", "which"),
    [
        pytest.param(laid, which, marks=[] if laid == "dense" or (laid, which) == ("nf4", "two") else pytest.mark.slow)
        for laid in ("dense", "nf4", "mixed")
        for which in WHICH
    ],
)
def test_mlp(device, poison, laid, gated, which, mode, need_x):
    dtype = torch.float64
    if not gated:
        sizes, chosen = [(INNER, HIDDEN), (OUT, INNER)], WHICH[which][1:]
        if not any(chosen):
            return
    else:
        sizes, chosen = [(INNER, HIDDEN), (INNER, HIDDEN), (OUT, INNER)], WHICH[which]
    laid = ("joint" if gated else "apart") if laid == "dense" else laid
    weights, biases, adapters = make(device, dtype, sizes, chosen, laid=laid)
    x = torch.randn(3, CHUNK, HIDDEN, device=device, dtype=dtype, requires_grad=need_x)
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


@pytest.mark.parametrize("laid", ["joint", "nf4"])
def test_in_how_many_matmuls(device, laid):
    """One for all W and one for all A; none of the shape of a weight's gradient."""
    sizes = [(OUT, HIDDEN), (OUT, HIDDEN)]
    weights, biases, adapters = make(device, torch.float32, sizes, (1, 1), laid=laid, ranks=(R, R))
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
    assert y.shape == joint_linear(x, [dense(w, x.dtype) for w in weights]).shape
    with Seen() as seen, torch.no_grad():
        lora_linear(x, weights, biases, adapters)
    assert (50, HIDDEN, 2 * OUT) in seen.matmuls  # with the biases of weights of 4 bits too, which lie apart


@pytest.mark.parametrize(
    ("mode", "times"), [("saved", (3, 3)), ("recomputed", (3, 5)), ("tiles", (3, 3))], ids=list(MODES)
)
def test_how_often_and_where_weights_are_dequantised(device, monkeypatch, mode, times):
    """Each once in the forward, and in the backward once for each product, or for all chunks; in one buffer, as large
    as what is read at a time, which stays. Those who had it in inference mode leave it as they found it."""
    made, buffers, real = [], set(), nf4.dequantize_nf4
    monkeypatch.setattr(nf4, "dequantize_nf4", lambda *a, out, **k: made.append(out) or real(*a, out=out, **k))
    sizes = [(INNER, HIDDEN), (INNER, HIDDEN), (OUT, INNER)]
    weights, biases, adapters = make(device, torch.float32, sizes, (1, 1, 1), laid="nf4")
    x = torch.randn(2 * CHUNK + 4, HIDDEN, device=device, requires_grad=True)
    low_bit.release_buffers()
    with torch.inference_mode():
        gated_mlp(x, weights[:2], weights[2], biases[:2], biases[2], adapters=adapters, **MODES[mode])
    for _ in range(2):
        made.clear()
        y = gated_mlp(x, weights[:2], weights[2], biases[:2], biases[2], adapters=adapters, **MODES[mode])
        forward = len(made)
        y.sum().backward()
        assert (forward, len(made) - forward) == times
        (free,) = low_bit._FREE.values()
        buffers |= {(buffer.data_ptr(), buffer.numel()) for buffer in free}
    assert [size for _, size in buffers] == [4 * HIDDEN * 2 * INNER + (4 * OUT * INNER if mode == "tiles" else 0)]


def test_four_bits_under_autocast(device):
    """As the dequantised weights, cast."""
    sizes = [(INNER, HIDDEN), (INNER, HIDDEN), (OUT, INNER)]
    weights, biases, adapters = make(device, torch.float32, sizes, (1, 1, 1), laid="nf4")
    low = [dense(w, torch.float16) for w in weights]
    results = []
    for used in (weights, low):
        x = torch.randn(
            CHUNK + 4, HIDDEN, device=device, generator=torch.Generator(device).manual_seed(3)
        ).requires_grad_()
        with torch.autocast(device, torch.float16):
            y = lora_linear(x, used[:2], biases[:2], adapters[:2])
            z = gated_mlp(x, used[:2], used[2], biases[:2], biases[2], adapters=adapters, **MODES["tiles"])
        results.append((y, z, *torch.autograd.grad(y.float().sum() + z.float().sum(), [x, *leaves(adapters)])))
    for one, other in zip(*results, strict=True):
        assert one.dtype == other.dtype
        close(one, other, torch.float16)


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
        weight = one.dequantized_weight(x.dtype) if isinstance(one, NF4Linear) else one.weight
        h = F.linear(x, one.lora_A.weight.to(x.dtype))
        bias = None if one.bias is None else one.bias.to(x.dtype)
        return F.linear(x, weight, bias) + one.scale * F.linear(h, one.lora_B.weight.to(x.dtype))


def a_model(family, device, dtype, bits, **options):
    model = ARCHS[family].from_config({**SIZES, **FAMILIES[family]}, dtype=dtype, device=device, **options)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(parameter, std=0.2)
    add_lora(quantized(model) if bits == 4 else model, 4, 8, dtype=torch.promote_types(dtype, torch.float32))
    for module in model.modules():
        if isinstance(module, Adapted):
            nn.init.normal_(module.lora_B.weight, std=0.1)
    return model


def gradients(model, ids):
    loss = model(ids, labels=ids).loss
    loss.backward()
    parameters = model.named_parameters()
    return loss.detach(), {n.replace(".inner", ""): p.grad for n, p in parameters if p.grad is not None}


@pytest.mark.parametrize(
    ("family", "bits"),
    [("llama", 16), ("qwen2", 4), *(pytest.param(name, 16, marks=pytest.mark.slow) for name in ("gemma2", "phi3"))],
)
def test_models(device, family, bits):
    """Loss and gradients of A and B, under each way to recompute; the base gets no gradient."""
    model = a_model(family, device, torch.float64, bits)
    plain = copy.deepcopy(model)
    for module in list(plain.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, Adapted):
                setattr(module, name, OneByOne(child))
    ids = torch.randint(37, (2, 9), device=device)
    loss, expected = gradients(plain, ids)
    assert all(".lora_" in name for name in expected)
    for recompute in ("none", "mlp", "block"):
        model.gradient_checkpointing_enable({"recompute": recompute})
        model.zero_grad()
        mine, found = gradients(model, ids)
        close(mine, loss, torch.float64)
        assert found.keys() == expected.keys()
        for name in expected:
            close(found[name], expected[name], torch.float64)


@pytest.mark.parametrize("on", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["", "adapters off"])
@pytest.mark.parametrize("recompute", ["none", "mlp", "block"])
def test_a_model_of_four_bits_saves_what_one_of_sixteen_saves(device, recompute, on):
    """Beside the quantised weights nothing, and no copy of these. The norms are trained too, so that without adapters
    there is something to save."""
    ids, saved = torch.randint(37, (2, 9), device=device), []
    for bits in (4, 16):
        model = a_model("qwen2", device, torch.float16, bits, activation_checkpointing=recompute)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(parameter.requires_grad or "norm" in name)
        given = [*model.parameters(), *model.buffers()]
        with contextlib.nullcontext() if on else adapters_off(model):
            tensors = saved_by(lambda model=model: model.model(input_ids=ids), *given)[1]
        saved.append(sorted((tuple(t.shape), str(t.dtype)) for t in tensors))
    assert saved[0] == saved[1] and saved[0]
