"""Mixture of experts: routing of equals and extremes, sorted slots, what is saved and recomputed."""

import functools

import pytest
import torch
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from ligermodels.kernels import moe_experts, rms_norm, route, route_reference
from ligermodels.kernels.experts._order import sort_by_expert
from tests.kernels.seen import saved_by


def inputs_of(tokens=13, hidden=20, inner=12, experts=5, dtype=torch.float32, device="cpu"):
    """x, logits, gate_up_proj, down_proj and dy; outputs of about 1, and experts of uneven load."""
    shapes = (
        (tokens, hidden),
        (tokens, experts),
        (experts, 2 * inner, hidden),
        (experts, hidden, inner),
        (tokens, hidden),
    )
    x, logits, gate_up, down, dy = (torch.randn(s, device=device) for s in shapes)
    logits = logits + torch.arange(experts, device=device)
    tensors = x, logits, gate_up * hidden**-0.5, down * inner**-0.5
    return [t.to(dtype).requires_grad_() for t in tensors], dy.to(dtype)


def fused(x, logits, gate_up, down, *, top_k=2, **options):
    return moe_experts(x, *route(logits, top_k=top_k), gate_up, down, **options)


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
    weights, same = route(logits, top_k=2, normalize=False)
    assert torch.equal(same, experts) and weights[4].isnan().all()
    torch.testing.assert_close(weights[:4], logits[:4].softmax(-1).gather(1, experts[:4].long()), rtol=1e-6, atol=0)


@pytest.mark.parametrize("experts, slots", [(3, 300), (8, 1000)])
def test_sort_is_stable(device, poison, experts, slots):
    ids = (torch.rand(slots, device=device).square() * experts).int()
    order = sort_by_expert(ids, experts, 16)
    by_expert, ends = order.slots.long(), ids.long().bincount(minlength=experts).cumsum(0).tolist()
    assert torch.equal(by_expert, ids.argsort(stable=True))
    assert torch.equal(order.rows[by_expert].long(), torch.arange(slots, device=device))
    assert order.offsets.tolist() == [0, *ends]
    starts = [0, *ends[:-1]]
    tiles = [[e, r, ends[e]] for e in range(experts) for r in range(starts[e], ends[e], 16)]
    assert order.tiles[0, 0] == len(tiles) and order.tiles[1 : 1 + len(tiles)].tolist() == tiles


def sizes_saved(op, *given):
    """The shapes of floating point that autograd saves; the rest, the routing, is small."""
    _, saved = saved_by(op, *given)
    assert all(t.numel() <= 80 for t in saved if not t.is_floating_point())
    return sorted(tuple(t.shape) for t in saved if t.is_floating_point() and t.numel())


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_routing_saves_the_logits_only_for_weights_of_all_experts(device, normalize, score):
    logits = inputs_of(40, device=device)[0][1]
    _, saved = saved_by(lambda: route(logits * 1, top_k=2, normalize=normalize, score=score), logits)
    assert [tuple(t.shape) for t in saved] == [(40, 2), (40, 2 if normalize or score == "sigmoid" else 5)]


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("frozen", [False, True])
def test_saves_x_the_routing_and_gate_up_alone(device, frozen, recompute):
    """gate_up only where it is not recomputed, x only where something is made of it, and then as a norm saves it."""
    (x, logits, gate_up, down), _ = inputs_of(40, 16, 32, device=device)
    weights, experts = route(logits.detach(), top_k=2)
    leaves = x, weights.requires_grad_(), gate_up.requires_grad_(not frozen), down
    op = functools.partial(moe_experts, recompute=recompute)
    of_gate_up, of_x = [] if recompute else [(80, 64)], [] if frozen and not recompute else [(40, 16)]
    assert sizes_saved(lambda: op(x, weights, experts, gate_up, down), *leaves) == of_gate_up
    assert sizes_saved(lambda: op(x * 1, weights, experts, gate_up, down), *leaves) == sorted(of_gate_up + of_x)
    assert sizes_saved(lambda: op(rms_norm(x), weights, experts, gate_up, down), *leaves) == [(40,), *of_gate_up]


def test_recomputed_after_a_norm_and_checkpointed(device, poison):
    """The same gradients to the bit, with gate_up recomputed and x recomputed of what the norm saves."""
    leaves, dy = inputs_of(5, 8, 6, 3, device=device)

    def block(x, *rest, norm=rms_norm, recompute=False):
        return fused(norm(x), *rest, recompute=recompute)

    expected = torch.autograd.grad(block(*leaves, norm=lambda x: rms_norm(x) * 1), leaves, dy)
    for recompute, early_stop in ((False, True), (True, None), (True, True), (True, False)):
        op = functools.partial(block, recompute=recompute)
        with set_checkpoint_early_stop(bool(early_stop)):
            y = op(*leaves) if early_stop is None else checkpoint(op, *leaves, use_reentrant=False)
            for a, b in zip(torch.autograd.grad(y, leaves, dy), expected, strict=True):
                assert torch.equal(a, b)
