import functools
import importlib
import itertools

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import ligermodels.layers as L
from ligermodels.kernels.grouped_mm import combine, grouped_mm, grouped_mm_outer, sort_by_expert, spread
from ligermodels.kernels.moe import moe_experts, route, route_reference
from ligermodels.kernels.rms_norm import rms_norm
from tests.kernels.oracle import assert_as_exact, dtypes

module = importlib.import_module("ligermodels.kernels.moe")
products = importlib.import_module("ligermodels.kernels.grouped_mm")


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


def run(op, inputs, dy, **options):
    leaves = [t.detach().clone().requires_grad_() for t in inputs]
    y = op(*leaves, **options)
    return [y, *torch.autograd.grad(y, leaves, dy)]


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
