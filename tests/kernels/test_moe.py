import functools
import importlib
import itertools

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import ligermodels.layers as L
from ligermodels.errors import InputError
from ligermodels.kernels.glu import ACTIVATIONS, glu_reference
from ligermodels.kernels.grouped_mm import combine, grouped_mm, grouped_mm_outer, sort_by_expert, spread
from ligermodels.kernels.moe import moe_experts, moe_experts_reference, route, route_reference
from ligermodels.kernels.rms_norm import rms_norm
from tests.kernels.on_gpu import assert_captures, assert_compiles, assert_never_waits
from tests.kernels.oracle import assert_as_exact, dtypes

module = importlib.import_module("ligermodels.kernels.moe")
products = importlib.import_module("ligermodels.kernels.grouped_mm")

NAMES = ("y", "dx", "d_logits", "d_gate_up_proj", "d_down_proj")
SHAPES = [
    (13, 20, 12, 5, 2),
    (1, 8, 6, 4, 2),
    (70, 33, 17, 3, 1),
    (9, 16, 8, 3, 3),
    (6, 7, 5, 1, 1),
    (40, 24, 16, 9, 4),
]
"""Tokens, hidden_size, intermediate_size, experts, top_k."""
FP32_SLACK = 2.0
"""Of eager's rms error, in fp32: exp is the hardware's or numpy's, and products add one by one where BLAS adds in
parts, whose roundings grow less (1.75 times as much was seen at 130 terms)."""
ROUTING = {
    "uneven": lambda logits: logits + torch.arange(logits.shape[1]).to(logits),
    "some empty": lambda logits: logits - 50 * (torch.arange(logits.shape[1]) % 2).to(logits),
}


def inputs_of(shape, dtype, device, routing="uneven"):
    """x, logits, gate_up_proj, down_proj and dy; outputs of about 1."""
    tokens, hidden, inner, experts, _ = shape
    x, logits, gate_up, down, dy = (
        torch.randn(s, device=device)
        for s in ((tokens, hidden), (tokens, experts), (experts, 2 * inner, hidden), (experts, hidden, inner),
                  (tokens, hidden))
    )  # fmt: skip
    tensors = x, ROUTING[routing](logits), gate_up * hidden**-0.5, down * inner**-0.5, dy
    return [t.to(dtype) for t in tensors]


def fused(x, logits, gate_up, down, *, top_k, **options):
    return moe_experts(x, *route(logits, top_k=top_k), gate_up, down, **options)


def reference(x, logits, gate_up, down, *, top_k, **options):
    return moe_experts_reference(x, *route_reference(logits, top_k=top_k), gate_up, down, **options)


def eager(x, logits, gate_up, down, *, top_k, activation="silu"):
    """Expert by expert over its own tokens, every product and the gated unit in the dtype of x; the sum in fp32."""
    weights, experts = route_reference(logits, top_k=top_k)
    y = torch.zeros(x.shape, dtype=weights.dtype, device=x.device)
    for expert in range(down.shape[0]):
        tokens, choice = (experts == expert).nonzero(as_tuple=True)
        gate, up = F.linear(x[tokens], gate_up[expert]).chunk(2, -1)
        out = F.linear(ACTIVATIONS[activation](gate) * up, down[expert])
        y = y.index_add(0, tokens, out * weights[tokens, choice, None])
    return y.to(x.dtype)


def run(op, inputs, dy, **options):
    leaves = [t.detach().clone().requires_grad_() for t in inputs]
    y = op(*leaves, **options)
    return [y, *torch.autograd.grad(y, leaves, dy)]


def judge(inputs, dy, **options):
    actual, allowed = run(fused, inputs, dy, **options), run(eager, inputs, dy, **options)
    exact = run(reference, [t.double() for t in inputs], dy.double(), **options)
    for name, a, b, c in zip(NAMES, actual, allowed, exact, strict=True):
        if a.dtype == torch.float64:
            torch.testing.assert_close(a, c, rtol=1e-11, atol=1e-11, msg=lambda m, name=name: f"{name}: {m}")
        else:
            # The elements of a gradient share the roundings of tokens x intermediate_size numbers: see the oracle's
            # own allowance for chance, which counts all elements as independent.
            slack = 1 + 4 / (inputs[0].shape[0] * inputs[3].shape[2]) ** 0.5
            slack *= FP32_SLACK if a.dtype == torch.float32 else 1.0
            assert_as_exact(a, c + slack * (b.double() - c), c, name)


@pytest.mark.parametrize("routing", ROUTING)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", dtypes(), ids=str)
def test_output_and_every_gradient(device, poison, dtype, shape, routing):
    *inputs, dy = inputs_of(shape, dtype, device, routing)
    judge(inputs, dy, top_k=shape[-1])


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations(device, poison, activation):
    *inputs, dy = inputs_of(SHAPES[0], torch.float32, device)
    judge(inputs, dy, top_k=2, activation=activation)


@pytest.mark.parametrize("dtype", dtypes(), ids=str)
@pytest.mark.parametrize("tokens, experts, top_k", [(40, 8, 2), (7, 5, 5), (3, 1, 1), (200, 70, 6)])
def test_route(device, poison, dtype, tokens, experts, top_k):
    """As written: softmax over all, top k of it, renormalised; the gradient through all of that."""
    distinct = torch.rand(tokens, experts, device=device).argsort(-1)
    logits = (6 * distinct / experts - 3).to(dtype).requires_grad_()
    weights, chosen = route(logits, top_k=top_k)
    exact = logits.detach().double().requires_grad_()
    values, _ = exact.softmax(-1).topk(top_k)
    expected = values / values.sum(-1, keepdim=True)
    assert weights.dtype == torch.promote_types(dtype, torch.float32)
    torch.testing.assert_close(weights.double(), expected, rtol=1e-6, atol=1e-7)
    assert torch.equal(chosen, route_reference(logits, top_k=top_k)[1])
    torch.testing.assert_close(logits.detach().gather(1, chosen.long()), logits.topk(top_k).values)
    upstream = torch.randn_like(weights)
    (grad,) = torch.autograd.grad(weights, logits, upstream)
    (expected,) = torch.autograd.grad(expected, exact, upstream.double())
    ulp = torch.finfo(dtype).eps
    torch.testing.assert_close(grad.double(), expected, rtol=max(2 * ulp, 1e-6), atol=5e-7)


def test_route_takes_the_lower_of_equals_and_survives_extremes(device):
    inf, nan = float("inf"), float("nan")
    logits = torch.tensor(
        [[1.0, 2, 2, 2], [0, 0, 0, 0], [-inf, 3, -inf, -inf], [3e38, -3e38, 0, 3e38], [1, nan, 0, 0]], device=device
    )
    weights, experts = route(logits, top_k=2)
    assert experts[:4].tolist() == [[1, 2], [0, 1], [1, 0], [0, 3]]
    assert weights[:4].tolist() == [[0.5, 0.5], [0.5, 0.5], [1, 0], [0.5, 0.5]]
    assert weights[4].isnan().all() and ((experts >= 0) & (experts < 4)).all()
    assert torch.equal(experts[:4], route_reference(logits, top_k=2)[1][:4])


@pytest.mark.parametrize("experts, slots", [(1, 5), (3, 300), (8, 1000), (130, 9000), (5, 0)])
def test_sort_is_stable(device, poison, experts, slots):
    ids = (torch.rand(slots, device=device).square() * experts).int()
    by_expert, rows, offsets = sort_by_expert(ids, experts)
    assert torch.equal(by_expert.long(), ids.argsort(stable=True))
    assert torch.equal(rows[by_expert.long()].long(), torch.arange(slots, device=device))
    assert offsets.tolist() == [0, *ids.long().bincount(minlength=experts).cumsum(0).tolist()]


@pytest.mark.parametrize("width", [1, 100, 5000])
def test_spread_and_combine_are_each_others_transpose(device, poison, width):
    ids = torch.randint(3, (11, 2), device=device)
    slots, rows, _ = sort_by_expert(ids, 3)
    x, z = torch.randn(11, width, device=device), torch.randn(22, width, device=device)
    assert torch.equal(spread(x, rows, 2), x[slots.long() // 2])
    torch.testing.assert_close(combine(z, rows, 2), z[rows.long()].view(11, 2, width).sum(1))
    weights = torch.rand(11, 2, device=device)
    torch.testing.assert_close(
        combine(z, rows, 2, weights), (z[rows.long()].view(11, 2, -1) * weights[..., None]).sum(1)
    )


@pytest.mark.parametrize("sizes", [(0, 5, 0, 130), (3,), (0, 0), (64, 128, 1)], ids=str)
@pytest.mark.parametrize("dtype", [dtype for dtype in dtypes() if dtype != torch.float64], ids=str)
@pytest.mark.parametrize("k, n", [(5, 3), (64, 40), (72, 136)])
def test_grouped_products(device, poison, dtype, sizes, k, n):
    """On a GPU bf16 takes torch's product where widths are multiples of 8, and Triton's where not."""
    offsets = torch.tensor([0, *itertools.accumulate(sizes)], dtype=torch.int32, device=device)
    a = torch.randn(sum(sizes), k, device=device).to(dtype)
    d = torch.randn(sum(sizes), n, device=device).to(dtype)
    for b in (
        torch.randn(len(sizes), k, n, device=device).to(dtype),
        torch.randn(len(sizes), n, k, device=device).to(dtype).transpose(1, 2),
    ):
        groups = list(zip(a.split(sizes), b, strict=True))
        if sum(sizes):
            same, exact = (torch.cat([x.to(t) @ w.to(t) for x, w in groups]) for t in (dtype, torch.float64))
            assert_as_exact(grouped_mm(a, b, offsets), exact + FP32_SLACK * (same - exact), exact)
        else:
            assert grouped_mm(a, b, offsets).shape == (0, n)
    pairs = list(zip(a.split(sizes), d.split(sizes), strict=True))
    same, exact = (torch.stack([x.to(t).t() @ y.to(t) for x, y in pairs]) for t in (dtype, torch.float64))
    assert_as_exact(grouped_mm_outer(a, d, offsets), exact + FP32_SLACK * (same - exact), exact)


def test_groups_do_not_mix(device):
    """NaN in one expert's rows or weights stays with the tokens and weights of that expert."""
    x, _, gate_up, down, dy = inputs_of((40, 64, 64, 3, 1), torch.float32, device)
    experts = torch.arange(40, device=device)[:, None] % 3
    x[1::3] = gate_up[1] = float("nan")
    leaves = [t.requires_grad_() for t in (x, torch.ones(40, 1, device=device), gate_up, down)]
    y = moe_experts(leaves[0], leaves[1], experts, *leaves[2:])
    dx, d_weights, d_gate_up, d_down = torch.autograd.grad(y, leaves, dy)
    for t in (y, dx, d_weights):
        assert t[0::3].isfinite().all() and t[2::3].isfinite().all() and t[1::3].isnan().all()
    for t in (d_gate_up, d_down):
        assert t[0].isfinite().all() and t[2].isfinite().all() and t[1].isnan().any()


@pytest.mark.parametrize("bad", [-1, -7, 3, 5000])
def test_experts_that_there_are_not(device, poison, bad):
    """Such a token's row is NaN, and no other row is another; the reference raises."""
    x, logits, gate_up, down, dy = inputs_of((40, 16, 8, 3, 2), torch.float32, device)
    weights, experts = route(logits, top_k=2)
    expected = moe_experts(x, weights, experts, gate_up, down)
    experts = experts.clone()
    experts[7, 1] = bad
    y = moe_experts(x.requires_grad_(), weights, experts, gate_up, down)
    (dx,) = torch.autograd.grad(y, x, dy)
    rest = torch.arange(40, device=device) != 7
    assert y[7].isnan().all() and dx[7].isnan().all() and dx[rest].isfinite().all()
    # The rows of the nearest expert are one more, and so at other places of its tiles.
    torch.testing.assert_close(y[rest], expected[rest])
    with pytest.raises(InputError, match=f"experts hold {bad}; expected integers from 0 to 2"):
        module.moe_experts_reference(x, weights, experts, gate_up, down)


@pytest.mark.parametrize("op", [fused, reference])
def test_zero_tokens(device, op):
    *inputs, dy = inputs_of((0, 16, 8, 3, 2), torch.float32, device)
    y, dx, d_logits, d_gate_up, d_down = run(op, inputs, dy, top_k=2)
    assert y.shape == dx.shape == (0, 16) and d_logits.shape == (0, 3)
    assert torch.equal(d_gate_up, torch.zeros_like(d_gate_up)) and torch.equal(d_down, torch.zeros_like(d_down))


LAYOUTS = {
    "transposed": lambda t: t.transpose(0, 1).contiguous().transpose(0, 1),
    "columns": lambda t: torch.stack([t, t], -1)[..., 0],
    "part of wider rows": lambda t: torch.cat([t, t], -1)[..., : t.shape[-1]],
    "expanded rows": lambda t: t[:1].expand_as(t),
    "one expanded number": lambda t: t[(0,) * t.dim()].expand_as(t),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(device, poison, layout):
    inputs = inputs_of((13, 16, 8, 5, 2), torch.float32, device)
    weights, experts = route(inputs.pop(1), top_k=2)
    *inputs, dy = (LAYOUTS[layout](t) for t in (inputs[0], weights, *inputs[1:]))
    experts = LAYOUTS["columns"](experts.long())

    def op(x, weights, gate_up, down):
        return moe_experts(x, weights, experts, gate_up, down)

    leaves = [t.detach().requires_grad_() for t in inputs]
    y = op(*leaves)
    expected = run(op, [t.contiguous() for t in inputs], dy.contiguous())
    for a, b in zip([y, *torch.autograd.grad(y, leaves, dy)], expected, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("trained", [c for n in (1, 2, 3) for c in itertools.combinations(range(4), n)], ids=str)
def test_frozen(device, poison, monkeypatch, trained):
    *inputs, dy = inputs_of(SHAPES[0], torch.float32, device)
    whole = run(fused, inputs, dy, top_k=2)
    calls = []
    for name in ("grouped_mm", "grouped_mm_outer"):
        op = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *args, op=op, name=name: calls.append(name) or op(*args))
    leaves = [t.clone().requires_grad_(i in trained) for i, t in enumerate(inputs)]
    y = fused(*leaves, top_k=2)
    calls.clear()
    grads = torch.autograd.grad(y, [leaves[i] for i in trained], dy)
    for i, grad in zip(trained, grads, strict=True):
        torch.testing.assert_close(grad, whole[1 + i])
    # dh for x, the logits and gate_up_proj; dx; one outer product for each projection: no more than is needed.
    assert calls.count("grouped_mm") == (set(trained) != {3}) + (0 in trained)
    assert calls.count("grouped_mm_outer") == (2 in trained) + (3 in trained)


def saved(op, *given):
    """What autograd keeps of floating point beside `given`, and that the rest, the routing, is small."""
    found = {}
    with torch.autograd.graph.saved_tensors_hooks(lambda t: found.update({t.data_ptr(): t}) or t, lambda t: t):
        op()
    made = [t for pointer, t in found.items() if pointer not in {t.data_ptr() for t in given}]
    assert all(t.numel() <= 80 for t in made if not t.is_floating_point())
    return sorted(tuple(t.shape) for t in made if t.is_floating_point())


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("frozen", [False, True])
def test_saves_x_the_routing_and_gate_up_alone(device, frozen, recompute):
    """gate_up only where it is not made again, x only where something is made of it, and then as a norm keeps it."""
    *inputs, _ = inputs_of((40, 16, 32, 5, 2), torch.float32, device)
    weights, experts = route(inputs.pop(1), top_k=2)
    x, weights, gate_up, down = leaves = [t.requires_grad_() for t in (inputs[0], weights, *inputs[1:])]
    gate_up.requires_grad_(not frozen)
    experts_of = functools.partial(moe_experts, recompute=recompute)
    of_gate_up, of_x = [] if recompute else [(80, 64)], [] if frozen and not recompute else [(40, 16)]
    assert saved(lambda: experts_of(x, weights, experts, gate_up, down), *leaves) == of_gate_up
    assert saved(lambda: experts_of(x * 1, weights, experts, gate_up, down), *leaves) == sorted(of_gate_up + of_x)
    assert saved(lambda: experts_of(rms_norm(x), weights, experts, gate_up, down), *leaves) == [(40,), *of_gate_up]


SMALL = (5, 8, 6, 3, 2)


def test_the_layer_behind_a_norm_keeps_no_rows_of_hidden_size(device):
    """The statistics of the norm, the weights of the routing, and gate_up; x, which the norm keeps, is given."""
    norm, moe = L.RMSNorm(16).to(device), L.MoE(16, 32, num_experts=5, top_k=2).to(device)
    x = torch.randn(2, 20, 16, device=device, requires_grad=True)
    assert saved(lambda: moe(norm(x)[0]), x, *norm.parameters(), *moe.parameters()) == [(40,), (40, 2), (80, 64)]


@pytest.mark.parametrize("trained", [(0, 1, 2, 3), (0, 1), (2,), (3,)], ids=str)
def test_recomputed_and_behind_a_norm(device, poison, trained):
    """The same gradients to the bit, with gate_up made again and x made again of what the norm keeps."""
    *inputs, dy = inputs_of(SMALL, torch.float32, device)

    def gradients(norm, recompute):
        x, *rest = leaves = [t.clone().requires_grad_(i in trained) for i, t in enumerate(inputs)]
        y = fused(norm(x), *rest, top_k=2, recompute=recompute)
        return [y, *torch.autograd.grad(y, [leaves[i] for i in trained], dy)]

    expected = gradients(lambda x: rms_norm(x) * 1, False)
    for norm, recompute in ((rms_norm, False), (rms_norm, True)):
        for a, b in zip(gradients(norm, recompute), expected, strict=True):
            assert torch.equal(a, b)


def test_gate_up_is_written_over_where_nobody_reads_it_again(device, monkeypatch):
    *inputs, dy = inputs_of(SMALL, torch.float32, device)
    over, real = [], module._backward

    def spy(dh, gate_up, *args):
        place, result = gate_up.data_ptr(), real(dh, gate_up, *args)
        over.append(result[0].data_ptr() == place)
        return result

    monkeypatch.setattr(module, "_backward", spy)
    leaves = [t.requires_grad_() for t in inputs]
    for recompute in (False, True):
        y = fused(*leaves, top_k=2, recompute=recompute)
        first = torch.autograd.grad(y, leaves, dy, retain_graph=True)
        for a, b in zip(first, torch.autograd.grad(y, leaves, dy), strict=True):
            assert torch.equal(a, b)
    assert over == [False, True, True, True]


def test_backward_is_not_handed_zeros_of_the_size_of_gate_up(device, monkeypatch):
    *inputs, dy = inputs_of(SMALL, torch.float32, device)
    seen, backward = [], module._Experts.backward
    spy = staticmethod(lambda ctx, *grads: seen.append(grads[1]) or backward(ctx, *grads))
    monkeypatch.setattr(module._Experts, "backward", spy)
    run(fused, inputs, dy, top_k=2)
    assert seen == [None]


@pytest.mark.parametrize("early_stop", [True, False])
@pytest.mark.parametrize("recompute", [False, True])
def test_checkpointed(device, monkeypatch, early_stop, recompute):
    """The second run of a checkpointed block ends before the down product: 1 product of a forward's 2 runs again, and
    with recompute none, as the backward makes gate_up itself."""
    *inputs, dy = inputs_of(SMALL, torch.float32, device)
    products_run = []
    op = module.grouped_mm
    monkeypatch.setattr(module, "grouped_mm", lambda *args: products_run.append(args[1].shape) or op(*args))
    expected = run(fused, inputs, dy, top_k=2)
    plain = len(products_run)
    products_run.clear()
    with torch.utils.checkpoint.set_checkpoint_early_stop(early_stop):
        block = functools.partial(fused, top_k=2, recompute=recompute)
        actual = run(functools.partial(checkpoint, block, use_reentrant=False), inputs, dy)
    for a, b in zip(actual, expected, strict=True):
        assert torch.equal(a, b)
    assert (plain, len(products_run)) == (4, 5 + (not early_stop) * (1 + recompute))


def test_runs_twice_deterministically_and_overwrites_nothing(device):
    *inputs, dy = inputs_of(SHAPES[-1], torch.float32, device)
    leaves = [t.requires_grad_() for t in inputs]
    before = [t.detach().clone() for t in (*leaves, dy)]
    y = fused(*leaves, top_k=4)
    kept = y.detach().clone()
    first, second = (torch.autograd.grad(y, leaves, dy, retain_graph=True) for _ in range(2))
    for a, b, c in zip(first, second, torch.autograd.grad(fused(*leaves, top_k=4), leaves, dy), strict=True):
        assert torch.equal(a, b) and torch.equal(a, c)
    for a, b in zip((*leaves, dy, y), (*before, kept), strict=True):
        assert torch.equal(a, b)


def test_double_backward_raises(device):
    *inputs, _ = inputs_of((3, 8, 6, 3, 2), torch.float32, device)
    leaves = [t.requires_grad_() for t in inputs]
    (grad,) = torch.autograd.grad(fused(*leaves, top_k=2).square().sum(), leaves[0], create_graph=True)
    with pytest.raises(RuntimeError, match="twice"):
        grad.sum().backward()


def test_gradcheck(device):
    *inputs, _ = inputs_of((3, 4, 3, 3, 2), torch.float64, device)
    leaves = [t.requires_grad_() for t in inputs]
    for op in (fused, reference):
        assert torch.autograd.gradcheck(functools.partial(op, top_k=2), leaves, fast_mode=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("triton_path", [True, False])
def test_under_autocast(device, monkeypatch, dtype, triton_path):
    """Weights stay fp32; the result is of the autocast dtype and gradients of each input's own; `dtype` is x's."""
    if not triton_path:
        monkeypatch.setattr(module, "use_triton", lambda x: False)
    x, *inputs, dy = inputs_of(SHAPES[0], torch.float32, device)
    inputs = [x.to(dtype), *inputs]
    exact = run(reference, [t.double() for t in inputs], dy.double(), top_k=2)

    def under_autocast(*leaves):
        with torch.autocast(device, dtype=torch.float16):
            return fused(*leaves, top_k=2)

    actual = run(under_autocast, inputs, dy.half())
    assert [t.dtype for t in actual] == [torch.float16, *(t.dtype for t in inputs)]
    for a, b in zip(actual, exact, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-2, atol=2e-2)  # sums of up to 24 products of half numbers


def test_reference_path_keeps_less_if_asked(monkeypatch):
    monkeypatch.setattr(module, "use_triton", lambda x: False)
    *inputs, dy = inputs_of(SHAPES[0], torch.float32, "cpu")
    leaves = [t.requires_grad_() for t in inputs]
    most, least = (saved(lambda r=r: fused(*leaves, top_k=2, recompute=r), *leaves) for r in (False, True))
    least = [shape for shape in least if 0 not in shape]  # torch 2.11 saves an empty one beside
    assert len(least) == 1 < len(most)  # the weights of the routing
    for a, b in zip(*(run(functools.partial(fused, recompute=r, top_k=2), inputs, dy) for r in (False, True)),
                    strict=True):  # fmt: skip
        assert torch.equal(a, b)


def test_reference_path_compiles_whole(monkeypatch):
    monkeypatch.setattr(module, "use_triton", lambda x: False)
    *inputs, dy = inputs_of(SHAPES[0], torch.float32, "cpu")
    assert_compiles(functools.partial(fused, top_k=2), [t.requires_grad_() for t in inputs], [dy], backend="aot_eager")


def test_errors(device):
    x, logits, gate_up, down, _ = inputs_of(SHAPES[0], torch.float32, device)
    weights, experts = route(logits, top_k=2)
    for message, call in {
        "top_k is 6": lambda: route(logits, top_k=6),
        "top_k is 0": lambda: route(logits, top_k=0),
        r"floating point \[T, E\]": lambda: route(logits[0], top_k=1),
        "activation='relu'": lambda: moe_experts(x, weights, experts, gate_up, down, activation="relu"),
        "do not fit": lambda: moe_experts(x, weights, experts, gate_up[:, 1:], down),
        r"\[E, H, I\]": lambda: moe_experts(x[:, 1:], weights, experts, gate_up, down),
        r"\[13, top_k\]": lambda: moe_experts(x, weights[1:], experts[1:], gate_up, down),
        "experts .* of torch.float32; .* integers": lambda: moe_experts(x, weights, experts.float(), gate_up, down),
        "weights .* of torch.int64 .* floating": lambda: moe_experts(x, weights.long(), experts, gate_up, down),
        "one dtype": lambda: moe_experts(x, weights, experts, gate_up.double(), down),
        "on meta": lambda: moe_experts(x, weights, experts, gate_up, down.to("meta")),
    }.items():
        with pytest.raises(InputError, match=message):
            call()


def on_gpu(dtype, shape=(300, 128, 192, 5, 2)):
    *inputs, dy = inputs_of(shape, dtype, "cuda")
    return [t.requires_grad_() for t in inputs], dy


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dynamic, recompute", [(False, False), (True, False), (False, True)])
def test_triton_path_compiles_whole(dtype, dynamic, recompute):
    inputs, dy = on_gpu(dtype)
    assert_compiles(functools.partial(fused, top_k=2, recompute=recompute), inputs, [dy], dynamic=dynamic)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("check", [assert_captures, assert_never_waits])
@pytest.mark.parametrize("recompute", [False, True])
def test_captured_and_never_waits(check, dtype, recompute):
    """Behind a norm, whose output is made again."""
    inputs, dy = on_gpu(dtype)
    check(lambda x, *rest: fused(rms_norm(x), *rest, top_k=2, recompute=recompute), inputs, [dy])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "shape", [(1000, 256, 448, 8, 2), (700, 512, 96, 64, 4), (257, 64, 72, 6, 3), (5, 2048, 768, 60, 8)]
)
def test_model_shapes(poison, dtype, shape):
    """What torch's product takes in bf16 and the wide tiles in fp16, and 72, which is no multiple of a tile."""
    *inputs, dy = inputs_of(shape, dtype, "cuda")
    judge(inputs, dy, top_k=shape[-1])


@pytest.mark.gpu
@pytest.mark.parametrize("inner", [1001, 1500])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_what_is_written_over_was_read_before(dtype, inner):
    """Inner widths that are no multiple of 16: a thread loads more neighbours than it stores at a time, so that what it
    writes over is read by others."""
    rows = 4096
    gate_up, dh = (torch.randn(rows, n, dtype=dtype, device="cuda") for n in (2 * inner, inner))
    weights, slots = torch.rand(rows // 2, 2, device="cuda"), torch.randperm(rows, device="cuda")
    exact = [t.double().requires_grad_() for t in (gate_up, weights)]
    h = glu_reference(exact[0]) * exact[1].view(-1)[slots, None]
    expected = *torch.autograd.grad(h, exact, dh.double()), h.detach()

    def once(own):
        return module._backward(dh.clone(), gate_up.clone(), weights, slots.int(), "silu", True, own)

    # Half of eps is the rounding; the rest, and 4 ulp of fp32 numbers as large as 64, are for the math before it. The
    # gradient of a weight is a sum of `inner` products below 1 in the mean, each right to 2^-20.
    slack = [(torch.finfo(dtype).eps, 2**-16), (0, inner * 2**-20), (torch.finfo(dtype).eps, 2**-16)]
    first = once(own=False)
    for a, b, (rtol, atol) in zip(first, expected, slack, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=rtol, atol=atol)
    for i in range(20):
        assert all(map(torch.equal, once(own=i % 2 == 0), first))


@pytest.mark.gpu
def test_more_than_2_31_elements():
    """gate_up has 2^31 elements and more: the last tokens come out as they do alone."""
    tokens, inner = 2**17 + 40, 8192
    x, logits, gate_up, down, dy = inputs_of((tokens, 64, inner, 2, 1), torch.bfloat16, "cuda")
    y, dx, d_logits, *_ = run(fused, [x, logits, gate_up, down], dy, top_k=1)
    last = slice(tokens - 64, None)
    expected = run(fused, [x[last], logits[last], gate_up, down], dy[last], top_k=1)
    for a, b in zip((y, dx, d_logits), expected, strict=False):
        torch.testing.assert_close(a[last], b)
