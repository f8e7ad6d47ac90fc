"""Frozen experts with adapters and few bits: outputs and gradients of the merged dense experts in fp64."""

import functools

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import ligermodels.kernels.experts.experts as experts_file
from ligermodels import InputError
from ligermodels.kernels import (
    ClampedSwiGLU,
    dequantize_nf4_reference,
    glu,
    glu_reference,
    moe_experts_reference,
    quantize_nf4,
    route,
)
from ligermodels.kernels._triton import use_triton
from ligermodels.kernels.experts.experts import experts_of, experts_reference
from ligermodels.kernels.linear.low_bit import LowBitWeight
from ligermodels.kernels.linear.nf4 import NF4Weight
from ligermodels.kernels.linear.operand import Adapter, LinearOperand, choose
from ligermodels.kernels.linear.quantized import QuantizedWeight, dequantize_reference, quantize
from tests.kernels.seen import saved_by

T, E, H, INNER = 13, 5, 20, 16
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5}
"""Relative to the largest element: some hundred sums of about 30 terms of like size, one after the other."""


def make(device, dtype, n, k, bits, rank):
    """(the operand, the weight in fp64 without the adapter)."""
    weight = torch.randn(E, n, k, device=device, dtype=dtype) * k**-0.5
    exact = weight.double()
    if bits == "nf4":
        weight = NF4Weight.stack([quantize_nf4(one.float(), block=32) for one in weight]).in_groups(E)
        exact = dequantize_nf4_reference(weight, torch.float64)
    elif bits != "dense":
        weight = QuantizedWeight.stack([quantize(one.float(), bits) for one in weight]).in_groups(E)
        exact = dequantize_reference(weight, torch.float64)
    if not rank:
        return LinearOperand(weight), exact
    a = torch.randn(E, rank, k, device=device, dtype=dtype).mul_(k**-0.5).requires_grad_()
    b = torch.randn(n, rank, E, device=device, dtype=dtype).permute(2, 0, 1).requires_grad_()
    return LinearOperand(weight, None, Adapter(a, b, 0.5)), exact


@pytest.mark.parametrize("recompute, dtype", [(False, torch.float64), (True, torch.float32)], ids=str)
@pytest.mark.parametrize("bits", ["dense", "nf4", "int8", "int4"])
@pytest.mark.parametrize("ranks", [(3, 2), (3, 0), (0, 2), (0, 0)], ids=str)
def test_as_the_merged_experts(device, poison, ranks, bits, recompute, dtype):
    operands, exact = zip(
        make(device, dtype, 2 * INNER, H, bits, ranks[0]), make(device, dtype, H, INNER, bits, ranks[1]), strict=True
    )
    x = torch.randn(T, H, device=device, dtype=dtype, requires_grad=True)
    logits = (torch.randn(T, E, device=device, dtype=dtype) + torch.arange(E, device=device)).requires_grad_()
    trained = [t for one in operands if one.adapter for t in one.adapter[:2]]
    y = experts_of(x, *route(logits, top_k=2), *operands, recompute=recompute)
    dy = torch.randn_like(y)
    found = y, *torch.autograd.grad(y, [x, logits, *trained], dy)

    x64, logits64, *rest = leaves = [t.detach().double().requires_grad_() for t in (x, logits, *trained)]
    rest = iter(rest)
    merged = []
    for weight, operand in zip(exact, operands, strict=True):
        if operand.adapter:
            a, b = next(rest), next(rest)
            weight = weight + 0.5 * b @ a
        merged.append(weight)
    y64 = moe_experts_reference(x64, *route(logits64, top_k=2), *merged)
    for one, other in zip(found, (y64, *torch.autograd.grad(y64, leaves, dy.double())), strict=True):
        assert (one.double() - other).abs().max() <= TOLERANCE[dtype] * other.abs().max()


def of_reference(operands, x, logits, dy, **options):
    """The output and all gradients, in the order of `leaves_of`, of the reference in fp64, of dequantised weights."""

    def exact(tensor):
        if isinstance(tensor, LowBitWeight):
            return tensor.dequantize(torch.float32).double()
        return None if tensor is None else tensor.detach().double().requires_grad_(tensor.requires_grad)

    copies = []
    for weight, bias, adapter in operands:
        adapter = adapter and Adapter(exact(adapter.a), exact(adapter.b), adapter.scale)
        copies.append(LinearOperand(exact(weight), exact(bias), adapter))
    leaves = exact(x), exact(logits), *leaves_of(copies)
    y = experts_reference(leaves[0], *route(leaves[1], top_k=2), *copies, **options)
    return y, *torch.autograd.grad(y, leaves, dy.double())


def leaves_of(operands):
    """What is trained of operands."""
    tensors = [t for weight, bias, adapter in operands for t in (weight, bias, *(adapter or ())[:2])]
    return [t for t in tensors if t is not None and t.requires_grad]


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("gated", [True, False])
def test_biases_and_experts_without_a_gate(device, poison, gated, recompute):
    """With adapters beside weights that are trained as well."""
    operands = []
    for n, k in ((INNER * (1 + gated), H), (H, INNER)):
        (weight, _, adapter), _ = make(device, torch.float64, n, k, "dense", 3)
        bias = torch.randn(E, n, device=device, dtype=torch.float64).requires_grad_()
        operands.append(LinearOperand(weight.requires_grad_(), bias, adapter))
    x, logits = (torch.randn(T, n, device=device, dtype=torch.float64, requires_grad=True) for n in (H, E))
    y = experts_of(x, *route(logits, top_k=2), *operands, activation="gelu_tanh", recompute=recompute)
    dy = torch.randn_like(y)
    actual = y, *torch.autograd.grad(y, [x, logits, *leaves_of(operands)], dy)
    for one, exact in zip(actual, of_reference(operands, x, logits, dy, activation="gelu_tanh"), strict=True):
        assert (one - exact).abs().max() <= 1e-12 * exact.abs().max()


CLAMPED = ClampedSwiGLU(1.702, 0.9)


@pytest.mark.parametrize("trained", ["adapters", "both", ""])
@pytest.mark.parametrize(
    "bits, dtype, recompute",
    [("dense", torch.float64, False), ("nf4", torch.float32, True), ("int4", torch.float32, False)],
    ids=str,
)
def test_gpt_oss_over_any_operand(device, poison, bits, dtype, trained, recompute):
    """Biases that are frozen or not, of weights in few bits or not, with adapters or not; half of the elements are
    clamped. Each gradient that is asked for alone is the same."""
    operands = []
    for n, k in ((2 * INNER, H), (H, INNER)):
        (weight, _, adapter), _ = make(device, dtype, n, k, bits, 3 if trained else 0)
        bias = torch.randn(E, n, device=device, dtype=dtype).requires_grad_(trained == "both")
        operands.append(LinearOperand(weight, bias, adapter))
    x, logits = (torch.randn(T, n, device=device, dtype=dtype, requires_grad=True) for n in (H, E))
    dy, leaves = torch.randn_like(x), [x, logits, *leaves_of(operands)]

    def run():
        return experts_of(x, *route(logits, top_k=2), *operands, activation=CLAMPED, recompute=recompute)

    y = run()
    actual = y, *torch.autograd.grad(y, leaves, dy)
    for one, exact in zip(actual, of_reference(operands, x, logits, dy, activation=CLAMPED), strict=True):
        assert (one.double() - exact).abs().max() <= TOLERANCE[dtype] * exact.abs().max()
    for leaf, gradient in zip(leaves, actual[1:], strict=True):
        for other in leaves:
            other.requires_grad_(other is leaf)
        assert torch.equal(torch.autograd.grad(run(), leaf, dy)[0], gradient)


@pytest.mark.parametrize("recompute", [False, True])
def test_biases_are_not_saved_per_row(device, recompute):
    """Nothing more is saved than without them."""
    x, logits = (torch.randn(40, n, device=device, requires_grad=True) for n in (H, E))
    (gate_up, _), (down, _) = (make(device, torch.float32, *s, "dense", 0) for s in ((2 * INNER, H), (H, INNER)))
    weights, experts = route(logits.detach(), top_k=2)
    given = [x, weights.requires_grad_(), experts, gate_up.weight.requires_grad_(), down.weight.requires_grad_()]

    def sizes(first, last):
        operands = gate_up._replace(bias=first), down._replace(bias=last)
        known = [*given, *(t for t in (first, last) if t is not None)]
        op = functools.partial(experts_of, *given[:3], *operands, activation=CLAMPED, recompute=recompute)
        return sorted(tuple(t.shape) for t in saved_by(op, *known)[1])

    biases = [torch.randn(E, n, device=device).requires_grad_() for n in (2 * INNER, H)]
    assert sizes(*biases) == sizes(None, None)


@pytest.mark.parametrize("recompute", [False, True])
def test_checkpointed_with_biases(device, poison, recompute):
    """The same bits as without activation checkpointing."""
    operands = []
    for n, k in ((2 * INNER, H), (H, INNER)):
        (weight, _, adapter), _ = make(device, torch.float32, n, k, "dense", 3)
        bias = torch.randn(E, n, device=device).requires_grad_()
        operands.append(LinearOperand(weight.requires_grad_(), bias, adapter))
    x, logits = (torch.randn(T, n, device=device, requires_grad=True) for n in (H, E))
    leaves, dy = [x, logits, *leaves_of(operands)], torch.randn(T, H, device=device)

    def block(x, logits):
        return experts_of(x, *route(logits, top_k=2), *operands, activation=CLAMPED, recompute=recompute)

    expected = torch.autograd.grad(block(x, logits), leaves, dy)
    y = checkpoint(block, x, logits, use_reentrant=False)
    for one, other in zip(torch.autograd.grad(y, leaves, dy), expected, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("clamped", [ClampedSwiGLU(1.702, 7.0), ClampedSwiGLU(1.1, 0.9)], ids=str)
def test_a_gradient_passes_at_the_limit_and_not_above(device, clamped):
    """As with torch.clamp, to which the reference leaves it; NaN stays NaN."""
    limit = clamped.limit
    at = torch.tensor([-2 * limit, -limit, -0.3, 0.0, 0.4, limit, 2 * limit, -1e30, 1e30], device=device)
    gate, up = (t.flatten()[None].clone().requires_grad_() for t in torch.meshgrid(at, at, indexing="ij"))
    dy = torch.randn_like(gate)
    actual, exact = (
        torch.autograd.grad(op(gate, up, activation=clamped), [gate, up], dy) for op in (glu, glu_reference)
    )
    for one, other in zip(actual, exact, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
        assert torch.equal(one == 0, other == 0)
    nan, one = torch.full((1, 1), torch.nan, device=device), torch.ones(1, 1, device=device)
    assert glu(nan, one, activation=clamped).isnan() and glu(one, nan, activation=clamped).isnan()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("rank", [0, 16, 72])
@pytest.mark.parametrize("tokens", [150, 6000])
def test_16_bits(dtype, biased, rank, tokens):
    """Widths that bulk copies and CUTLASS take; few rows an expert and many; adapters of one block of ranks and of two.
    Experts of very different load, one without tokens. The bounds are ten roundings of bf16 and of fp16. biased: a
    width that is no multiple of a tile, as gpt-oss' 2880, and its unit, with a limit that is rarely met."""
    device, hidden, inner = "cuda", 320, 448 if biased else 192
    activation = ClampedSwiGLU(1.702, 7.0) if biased else "silu"
    operands = []
    for n, k in ((2 * inner, hidden), (hidden, inner)):
        weight = torch.randn(E, n, k, device=device, dtype=dtype) * k**-0.5
        a = (torch.randn(E, rank, k, device=device) * k**-0.5).requires_grad_()
        b = (torch.randn(n, rank, E, device=device).permute(2, 0, 1) * rank**-0.5 if rank else a).requires_grad_()
        bias = torch.randn(E, n, device=device, dtype=dtype).requires_grad_() if biased else None
        operands.append(LinearOperand(weight.requires_grad_(not rank), bias, Adapter(a, b, 1.5) if rank else None))
    x = torch.randn(tokens, hidden, device=device, dtype=dtype, requires_grad=True)
    logits = torch.randn(tokens, E, device=device) + torch.arange(E, device=device)
    logits = logits.index_fill(1, torch.zeros(1, dtype=torch.long, device=device), -1e4).requires_grad_()
    y = experts_of(x, *route(logits, top_k=2), *operands, activation=activation)
    dy = torch.randn_like(y)
    actual = y, *torch.autograd.grad(y, [x, logits, *leaves_of(operands)], dy)
    for one, exact in zip(actual, of_reference(operands, x, logits, dy, activation=activation), strict=True):
        assert (one.double() - exact).norm() <= (0.02 if dtype == torch.bfloat16 else 0.003) * exact.norm()


def test_what_does_not_fit_is_refused(device):
    (gate_up, _), (down, _) = (
        make(device, torch.float32, 2 * INNER, H, "dense", 3),
        make(device, torch.float32, H, INNER, "dense", 2),
    )
    x, (weights, experts) = torch.randn(T, H, device=device), route(torch.randn(T, E, device=device), top_k=2)
    a, b, scale, _ = gate_up.adapter
    wrong = {
        "expected both": (x, weights[:3], experts, gate_up, down),
        "expected .T, H., ": (x, weights, experts, gate_up, down._replace(weight=down.weight[:, :, 1:])),
        "gate_up_proj_bias": (x, weights, experts, gate_up._replace(bias=x[0]), down),
        "must be one": (x.double(), weights, experts, gate_up, down),
        "gate_up_proj adapter": (x, weights, experts, gate_up._replace(adapter=Adapter(a[1:], b, scale)), down),
        "and B of": (x, weights, experts, gate_up._replace(adapter=Adapter(a, b[:, :, 1:], scale)), down),
        "on meta": (x, weights, experts, gate_up._replace(weight=gate_up.weight.to("meta")), down),
    }
    for message, arguments in wrong.items():
        with pytest.raises(InputError, match=message):
            experts_of(*arguments)
    ungated = gate_up.weight[:, :INNER].contiguous()
    with pytest.raises(InputError, match="multiplies a gate with up, and there is no gate"):
        experts_of(x, weights, experts, LinearOperand(ungated), down, activation=CLAMPED)
    for alpha, limit in ((float("nan"), 7.0), (1.702, 0.0), (1.702, float("nan"))):
        with pytest.raises(InputError, match="a finite number and one above 0"):
            ClampedSwiGLU(alpha, limit)


@pytest.mark.parametrize("bits", ["nf4", "int8", "fp8", "int4"])
@pytest.mark.parametrize("rank", [0, 3])
def test_few_rows_dequantise_the_chosen_experts_alone(device, poison, bits, rank, monkeypatch):
    """The same bits as all experts give: two tokens of one expert, and three of the five."""
    operands = [make(device, torch.float32, *shape, bits, rank)[0] for shape in ((2 * INNER, H), (H, INNER))]
    if rank:
        operands = [one._replace(bias=torch.randn(one.weight.shape[:2], device=device)) for one in operands]
    x, weights = torch.randn(2, H, device=device), torch.rand(2, 1, device=device)
    kind, sizes = type(operands[0].weight), []
    dequantize = kind.dequantize
    monkeypatch.setattr(
        kind, "dequantize", lambda self, *a, **k: sizes.append(self.shape[0]) or dequantize(self, *a, **k)
    )
    for chosen in ([3, 3], [4, 1], [2]):
        x, weights = x[: len(chosen)], weights[: len(chosen)]
        experts = torch.tensor(chosen, dtype=torch.int32, device=device)[:, None]
        assert choose(operands, x, routed_rows=3) == "experts"
        with torch.no_grad():
            assert choose(operands, x, routed_rows=len(chosen)) == "selected_experts"
            y = experts_of(x, weights, experts, *operands)
            few, sizes[:] = set(sizes), []
            with monkeypatch.context() as patch:
                patch.setattr(experts_file, "choose", lambda *a, **k: "experts")
                expected = experts_of(x, weights, experts, *operands)
        assert max(few) <= 2 < max(sizes) and torch.equal(y, expected)
        sizes.clear()
    if use_triton(x):
        x, weights = torch.randn(2, H, device=device), torch.rand(2, 1, device=device)
        with torch.no_grad():
            y = experts_of(x, weights, torch.tensor([[1], [E]], device=device), *operands)
        assert y[0].isfinite().all() and y[1].isnan().all()
