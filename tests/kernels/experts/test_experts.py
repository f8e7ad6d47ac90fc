"""Frozen experts with adapters and few bits: outputs and gradients of the merged dense experts in fp64."""

import pytest
import torch

import ligermodels.kernels.experts.experts as experts_file
from ligermodels import InputError
from ligermodels.kernels import dequantize_nf4_reference, moe_experts_reference, quantize_nf4, route
from ligermodels.kernels._triton import use_triton
from ligermodels.kernels.experts.experts import experts_of, experts_reference
from ligermodels.kernels.linear.nf4 import NF4Weight
from ligermodels.kernels.linear.operand import Adapter, LinearOperand, choose
from ligermodels.kernels.linear.quantized import QuantizedWeight, dequantize_reference, quantize

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
    """The output and all gradients, in the order of `leaves_of`, of the reference in fp64."""

    def exact(tensor):
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


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rank", [0, 16, 72])
@pytest.mark.parametrize("tokens", [150, 6000])
def test_16_bits(dtype, rank, tokens):
    """Widths that bulk copies and CUTLASS take; few rows an expert and many; adapters of one block of ranks and of two.
    Experts of very different load, one without tokens. The bounds are ten roundings of bf16 and of fp16."""
    device, hidden, inner = "cuda", 320, 192
    operands = []
    for n, k in ((2 * inner, hidden), (hidden, inner)):
        weight = torch.randn(E, n, k, device=device, dtype=dtype) * k**-0.5
        a = (torch.randn(E, rank, k, device=device) * k**-0.5).requires_grad_()
        b = (torch.randn(n, rank, E, device=device).permute(2, 0, 1) * rank**-0.5 if rank else a).requires_grad_()
        operands.append(LinearOperand(weight.requires_grad_(not rank), None, Adapter(a, b, 1.5) if rank else None))
    x = torch.randn(tokens, hidden, device=device, dtype=dtype, requires_grad=True)
    logits = torch.randn(tokens, E, device=device) + torch.arange(E, device=device)
    logits = logits.index_fill(1, torch.zeros(1, dtype=torch.long, device=device), -1e4).requires_grad_()
    y = experts_of(x, *route(logits, top_k=2), *operands)
    dy = torch.randn_like(y)
    actual = y, *torch.autograd.grad(y, [x, logits, *leaves_of(operands)], dy)
    for one, exact in zip(actual, of_reference(operands, x, logits, dy, activation="silu"), strict=True):
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
        "gate_up_proj bias": (x, weights, experts, gate_up._replace(bias=x[0]), down),
        "must be one": (x.double(), weights, experts, gate_up, down),
        "gate_up_proj adapter": (x, weights, experts, gate_up._replace(adapter=Adapter(a[1:], b, scale)), down),
        "and B of": (x, weights, experts, gate_up._replace(adapter=Adapter(a, b[:, :, 1:], scale)), down),
        "on meta": (x, weights, experts, gate_up._replace(weight=gate_up.weight.to("meta")), down),
    }
    for message, arguments in wrong.items():
        with pytest.raises(InputError, match=message):
            experts_of(*arguments)


@pytest.mark.parametrize("bits", ["nf4", "int8", "fp8", "int4"])
@pytest.mark.parametrize("rank", [0, 3])
def test_few_rows_dequantise_the_chosen_experts_alone(device, poison, bits, rank, monkeypatch):
    """The same bits as all experts give: two tokens of one expert, and three of the five."""
    operands = [make(device, torch.float32, *shape, bits, rank)[0] for shape in ((2 * INNER, H), (H, INNER))]
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
