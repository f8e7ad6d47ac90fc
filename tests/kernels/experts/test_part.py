"""A part of all experts, as a rank of expert parallelism has it: parts add up to the whole, and cost what is theirs."""

import contextlib
import functools

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

import ligermodels.kernels.experts.experts as experts_file
from ligermodels import InputError
from ligermodels.kernels import moe_experts, moe_experts_reference, quantize_nf4
from ligermodels.kernels._triton import as_if_capturing, use_triton
from ligermodels.kernels.experts._order import ELSEWHERE, dispatch, sort_by_expert
from ligermodels.kernels.experts.experts import experts_of
from ligermodels.kernels.linear.nf4 import NF4Weight
from ligermodels.kernels.linear.operand import Adapter, LinearOperand
from tests.kernels.seen import saved_by

T, E, H, INNER = 13, 5, 20, 12
PARTS = (0, 1), (1, 4), (4, 5)
FORMS = {"plain": (True, False), "biased": (True, True), "without a gate": (False, True)}
NOWHERE = getattr(ELSEWHERE, "value", ELSEWHERE)


def inputs_of(device, dtype=torch.float64, form="plain", top_k=2, slope=0.3, tokens=T):
    """(x and weights; experts, of more load the higher their number; projections and biases), and dy."""
    gated, biased = FORMS[form]
    chosen = (torch.rand(tokens, E, device=device) + slope * torch.arange(E, device=device)).topk(top_k).indices.int()
    width = INNER * (1 + gated)
    shapes = [(E, width, H), (E, H, INNER), *([(E, width), (E, H)] if biased else [])]
    layers = [torch.randn(s, device=device, dtype=dtype) for s in shapes]
    x, weights = torch.randn(tokens, H, device=device, dtype=dtype), torch.rand(tokens, top_k, device=device).to(dtype)
    return [x, weights], chosen, layers, torch.randn_like(x)


def run(op, given, chosen, layers, dy, part=None, **options):
    """y, and the gradients of x, the weights, and the projections and biases of the part."""
    if part is not None:
        layers, options = [t[slice(*part)] for t in layers], options | dict(first_expert=part[0], total_experts=E)
    leaves = [t.detach().clone().requires_grad_() for t in (*given, *layers)]
    y = op(*leaves[:2], chosen, *leaves[2:], activation="gelu_tanh" if len(layers) > 2 else "silu", **options)
    return y.detach(), *torch.autograd.grad(y, leaves, dy)


def close(one, other):
    return (one - other).abs().max() <= 1e-12 * (1 + other.abs().max())


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("top_k, slope", [(2, 0.3), (1, 0.1), (3, 9.0)], ids=["uneven", "top-1", "two without rows"])
def test_parts_add_up_to_the_whole(device, poison, top_k, slope, form, recompute):
    """Each is as its reference, and its experts have the gradients that they have in the whole, bit for bit."""
    given, chosen, layers, dy = inputs_of(device, form=form, top_k=top_k, slope=slope)
    whole = run(moe_experts, given, chosen, layers, dy, recompute=recompute)
    parts = [run(moe_experts, given, chosen, layers, dy, part, recompute=recompute) for part in PARTS]
    exact = run(moe_experts_reference, given, chosen, layers, dy)
    for one, other, sums in zip(whole, exact, zip(*parts, strict=True), strict=False):
        assert close(one, other)
        if len(one) == T:  # y, and the gradients of x and the weights
            assert close(sum(sums), other)
        else:
            assert torch.equal(torch.cat(sums), one) if use_triton(dy) else close(torch.cat(sums), other)
    for (first, end), found in zip(PARTS, parts, strict=True):
        for one, other in zip(found, run(moe_experts_reference, given, chosen, layers, dy, (first, end)), strict=True):
            assert close(one, other)
        here = (chosen >= first) & (chosen < end)
        assert not found[2][~here].any() and not found[0][~here.any(1)].any() and not found[1][~here.any(1)].any()
        if not here.any():
            assert not any(t.any() for t in found)
    assert slope < 9 or not chosen.eq(0).any()


@pytest.mark.parametrize("part", [(0, 3), (3, 8), (2, 3)], ids=str)
def test_the_order_of_a_part(device, poison, part):
    """Slots by expert and then by number, in several programs; others are marked, and numbers that no expert has."""
    (first, end), top_k, tile = part, 4, 16
    chosen = (torch.rand(1000, device=device).square() * 10 - 1).floor().int().view(-1, top_k)  # from -1 to 8
    order = sort_by_expert(chosen, end - first, tile, first, 8)
    ids = chosen.flatten().long()
    nearest = ids.clamp(0, 7)
    here = (nearest >= first) & (nearest < end)
    slots = here.nonzero().flatten()
    slots = slots[nearest[slots].argsort(stable=True)]
    assert torch.equal(order.slots.long(), slots) and len(slots) < len(ids)
    rows = torch.full_like(ids, NOWHERE).index_copy(0, slots, torch.arange(len(slots), device=device))
    assert torch.equal(order.rows.long(), torch.where(ids == nearest, rows, -1 - rows))
    counts = (nearest[slots] - first).bincount(minlength=end - first).tolist()
    ends = torch.tensor(counts).cumsum(0).tolist()
    assert order.offsets.tolist() == [0, *ends]
    tiles = [[e, r, ends[e]] for e, n in enumerate(counts) for r in range(ends[e] - n, ends[e], tile)]
    assert order.tiles[0, 0] == len(tiles) and order.tiles[1 : 1 + len(tiles)].tolist() == tiles
    x = torch.randn(len(chosen), H, device=device)
    assert torch.equal(dispatch(x, order, top_k), x[slots // top_k])


def test_a_number_that_no_expert_has(device, poison):
    """On every rank the token is NaN, and no other one; also where a part has no rows. The reference raises."""
    given, chosen, layers, _ = inputs_of(device, slope=9.0)  # experts 3 and 4
    chosen[2, 1], chosen[5, 0] = E, -1
    wrong = torch.zeros(T, dtype=torch.bool, device=device)
    wrong[[2, 5]] = True
    for first, end in (*PARTS, (1, 3)):
        arguments = *given, chosen, *(t[first:end] for t in layers)
        if use_triton(chosen):
            y = moe_experts(*arguments, first_expert=first, total_experts=E)
            assert torch.equal(y.isnan(), wrong[:, None].expand_as(y))
        with pytest.raises(InputError, match="integers from 0 to 4"):
            moe_experts_reference(*arguments, first_expert=first, total_experts=E)


def checkpointed(op, *args, **options):
    return checkpoint(functools.partial(op, **options), *args, use_reentrant=False)


@pytest.mark.parametrize("slope", [0.3, 9.0])
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("early_stop", [False, True])
def test_checkpointed(device, poison, early_stop, recompute, slope):
    given, chosen, layers, dy = inputs_of(device, torch.float32, "biased", slope=slope)
    for part in PARTS:
        expected = run(moe_experts, given, chosen, layers, dy, part, recompute=recompute)
        with set_checkpoint_early_stop(early_stop):
            again = functools.partial(checkpointed, moe_experts)
            found = run(again, given, chosen, layers, dy, part, recompute=recompute)
        for one, other in zip(found, expected, strict=True):
            assert torch.equal(one, other)


def test_the_host_reads_one_number_a_forward_and_none_of_all_experts(device, monkeypatch):
    """All experts, as one part of all, have the bits that they have without the keywords."""
    given, chosen, layers, dy = inputs_of(device, torch.float32)
    reads, item = [], Tensor.item
    monkeypatch.setattr(Tensor, "item", lambda self: reads.append(self.shape) or item(self))
    monkeypatch.setattr(experts_file, "_check_experts", lambda *_: None)
    on_device = int(use_triton(chosen))
    for recompute in (False, True):
        y, *_ = run(moe_experts, given, chosen, layers, dy, PARTS[1], recompute=recompute)
        assert len(reads) == on_device
        reads.clear()
        whole = run(moe_experts, given, chosen, layers, dy, recompute=recompute)
        for one, other in zip(run(moe_experts, given, chosen, layers, dy, (0, E)), whole, strict=True):
            assert torch.equal(one, other)
        assert not reads
    run(functools.partial(checkpointed, moe_experts), given, chosen, layers, dy, PARTS[1])
    assert len(reads) == 2 * on_device
    reads.clear()
    with torch.no_grad():  # few tokens, which are decoded, but not by a part of the experts
        moe_experts(*given, chosen, *layers, total_experts=E)
        assert not reads
        part = [t[slice(*PARTS[1])] for t in layers]
        assert torch.equal(moe_experts(*given, chosen, *part, first_expert=PARTS[1][0], total_experts=E), y)
    assert len(reads) == on_device


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("part", PARTS, ids=str)
def test_saves_the_rows_that_are_here(device, part, recompute):
    (x, weights), chosen, layers, _ = inputs_of(device, torch.float32, top_k=3, slope=0.0, tokens=40)
    leaves = [t.requires_grad_() for t in (x, weights, *(t[slice(*part)].clone() for t in layers))]
    op = functools.partial(moe_experts, first_expert=part[0], total_experts=E, recompute=recompute)
    if not use_triton(x):
        pytest.skip("autograd saves what PyTorch's own functions do")
    _, saved = saved_by(lambda: op(*leaves[:2], chosen, *leaves[2:]), *leaves, chosen)
    rows = int(((chosen >= part[0]) & (chosen < part[1])).sum())
    assert 0 < rows < chosen.numel()
    floats = [tuple(t.shape) for t in saved if t.is_floating_point()]
    assert floats == ([] if recompute else [(rows, 2 * INNER)])
    assert (rows,) in [tuple(t.shape) for t in saved if not t.is_floating_point()]


def test_no_tokens(device):
    given, chosen, layers, dy = inputs_of(device, torch.float32, tokens=0)
    y, dx, *rest = run(moe_experts, given, chosen, layers, dy, PARTS[1])
    assert y.shape == dx.shape == (0, H) and not any(t.any() for t in rest)


def test_what_a_part_does_not_take_is_refused(device, monkeypatch):
    given, chosen, layers, _ = inputs_of(device, torch.float32)
    gate_up, down = (LinearOperand(t[1:4]) for t in layers)
    for first, total in ((3, E), (-1, E), (0, 2), (1, None), (1, 3)):
        with pytest.raises(InputError, match="expected 0 <= first_expert <= total_experts - 3"):
            experts_of(*given, chosen, gate_up, down, first_expert=first, total_experts=total)
    refused = functools.partial(experts_of, *given, chosen, first_expert=1, total_experts=E)
    a, b = torch.randn(3, 2, INNER, device=device), torch.randn(3, H, 2, device=device)
    with pytest.raises(
        InputError, match=r"down_proj has an adapter.* train dense weights.* For LoRA .* without expert"
    ):
        refused(gate_up, down._replace(adapter=Adapter(a, b, 1.0)))
    few = NF4Weight.stack([quantize_nf4(t, block=32) for t in torch.randn(3, 2 * INNER, H, device=device)])
    with pytest.raises(InputError, match=r"gate_up_proj is in few bits.* or frozen weights use a mesh without expert"):
        refused(LinearOperand(few.in_groups(3)), down)
    with monkeypatch.context() as patch:
        patch.setattr(torch.compiler, "is_compiling", lambda: True)
        with pytest.raises(InputError, match=r"1 to 3 of 5 cannot be computed under torch\.compile"):
            refused(gate_up, down)
    with FakeTensorMode() if device == "cpu" else contextlib.nullcontext(), as_if_capturing():
        of_rank = *given, chosen, gate_up.weight, down.weight
        on_gpu = [torch.empty(t.shape, dtype=t.dtype, device="cuda") for t in of_rank]
        with pytest.raises(InputError, match="while a CUDA graph is captured"):
            moe_experts(*on_gpu, first_expert=1, total_experts=E)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [150, 9000])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("biased", [False, True])
def test_16_bits(dtype, biased, tokens):
    """Bulk copies and CUTLASS, of few rows an expert and of many; one part has no rows. Ten roundings, as of all."""
    hidden, inner, device = 320, 192, "cuda"
    chosen = torch.rand(tokens, E, device=device) + torch.arange(E, device=device) * 0.3 + 9
    chosen[:, 0] = 0
    chosen = chosen.topk(2).indices.int()
    shapes = [(E, 2 * inner, hidden), (E, hidden, inner), *([(E, 2 * inner), (E, hidden)] if biased else [])]
    layers = [torch.randn(s, device=device, dtype=dtype) * s[-1] ** -0.5 for s in shapes]
    given = [torch.randn(tokens, hidden, device=device, dtype=dtype), torch.rand(tokens, 2, device=device)]
    dy = torch.randn_like(given[0])
    exact_inputs = [t.double() for t in given], chosen, [t.double() for t in layers], dy.double()
    for part in PARTS:
        found = run(moe_experts, given, chosen, layers, dy, part)
        for one, exact in zip(found, run(moe_experts_reference, *exact_inputs, part), strict=True):
            bound = 0.02 if dtype == torch.bfloat16 else 0.003
            assert (one.double() - exact).norm() <= bound * exact.norm()
