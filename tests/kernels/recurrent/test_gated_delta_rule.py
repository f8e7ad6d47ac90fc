"""The gated delta rule and the short convolution over packed documents, and continued from a state."""

import functools
import importlib
import itertools

import pytest
import torch
import torch.nn.functional as F

from ligermodels.errors import InputError
from ligermodels.kernels import causal_conv, gated_delta_rule, gated_delta_rule_reference
from ligermodels.kernels._triton import tl, triton
from ligermodels.kernels.recurrent._delta import chunk
from tests.kernels.judge import FP32_INTERPRETED, ON_GPU, TF32
from tests.kernels.ops.delta import eager_gated_delta_rule, terms_of
from tests.kernels.oracle import assert_as_exact

LENGTHS = [0, 1, 64, 0, 130]
"""Of packed documents."""
BOUNDS = list(itertools.accumulate(LENGTHS, initial=0))


def inputs(
    device, length, *, rows=1, states=1, key_heads=1, heads=2, keys=16, values=16, dtype=torch.float32, decay=1.0
):
    """q, k, v, g, beta and a state; q, k, v are parts of one tensor, as a convolution leaves them."""
    sizes = [key_heads * keys, key_heads * keys, heads * values]
    q, k, v = torch.randn(rows, length, sum(sizes), device=device).to(dtype).split(sizes, -1)
    g = -decay * F.softplus(torch.randn(rows, length, heads, device=device))
    beta = torch.randn_like(g).mul(3).sigmoid().to(dtype)
    q, k, v = q.unflatten(-1, (key_heads, keys)), k.unflatten(-1, (key_heads, keys)), v.unflatten(-1, (heads, values))
    return [q, k, v, g, beta, torch.randn(states, heads, keys, values, device=device)]


def bounds_of(device):
    return torch.tensor(BOUNDS, dtype=torch.int32, device=device)


def gradients(op, tensors, upstream, dtype=None):
    """Outputs and gradients of all tensors, which are new leaves."""
    leaves = [t.detach().to(dtype or t.dtype).requires_grad_() for t in tensors]
    outputs = op(*leaves)
    given = [g.to(y.dtype) for g, y in zip(upstream, outputs, strict=True)]
    return [*(y.detach() for y in outputs), *torch.autograd.grad(outputs, leaves, given)]


def allowed(what, eager, exact, dtype):
    """What may be as wrong as eager; dg also by an ulp of the dtype of the operands, see `operand_noise`."""
    factor = (TF32 if dtype == torch.float32 else 1.0) if ON_GPU else FP32_INTERPRETED
    error = (eager.double() - exact).abs() * factor
    return exact + torch.maximum(error, torch.finfo(dtype).eps * exact.abs() * (what == "dg"))


NAMES = ["out", "state after", "dq", "dk", "dv", "dg", "dbeta", "dstate"]
CASES = {
    "two heads of a key head": dict(),
    "three, and padded sizes": dict(key_heads=2, heads=6, keys=24, values=40),
    "strong decay": dict(decay=16.0, keys=32),
    "no decay": dict(decay=0.0, values=32),
    "values of three quarters of a power of 2": dict(values=192),
}


@pytest.mark.parametrize(
    "name, packed", [*((name, True) for name in CASES), ("two heads of a key head", False)], ids=str
)
def test_chunks_are_as_exact_as_eager(device, poison, name, packed):
    """Outputs and gradients over several chunks, of which the last is ragged, against the recurrence in fp64."""
    if packed:
        tensors, cu_seqlens = inputs(device, BOUNDS[-1], states=len(LENGTHS), **CASES[name]), bounds_of(device)
    else:
        tensors, cu_seqlens = inputs(device, 70, rows=2, states=2, **CASES[name]), None
    half = torch.bfloat16 if ON_GPU else torch.float16  # the interpreter has no products of bf16
    for dtype in (torch.float32, half):
        q, k, v, g, beta, state = tensors
        some = [*(t.to(dtype) for t in (q, k, v)), g, beta.to(dtype), state]
        upstream = [torch.randn_like(v).to(dtype), torch.randn_like(state)]
        ours, eager, exact = (
            gradients(lambda *t, op=op: op(*t, cu_seqlens=cu_seqlens), some, upstream, of)
            for op, of in (
                (gated_delta_rule, None), (eager_gated_delta_rule, None), (gated_delta_rule_reference, torch.float64)
            )
        )  # fmt: skip
        for what, a, b, x in zip(NAMES, ours, eager, exact, strict=True):
            # The error of a value that is written is common to all key dims of a state. Of a state that decays fast,
            # the gradient reaches but the last token of a document, whose own gradients are larger than all others.
            shared = k.shape[3] if "state" in what else 1
            if name == "strong decay":
                shared = max(shared, b.numel() // (len(state) * state.shape[1]))
            bound = allowed(what, b, x, dtype)
            assert_as_exact(a, bound, x, f"{dtype} {what}", shared=shared, terms=terms_of(k.shape[3]))


@pytest.mark.parametrize("packed", [True, False])
def test_the_closed_form_is_the_recurrence(packed):
    """In fp64, over several chunks: by the closed form the tests of every op judge the kernels on a GPU."""
    tensors = inputs("cpu", BOUNDS[-1], states=len(LENGTHS) if packed else 1, dtype=torch.float64)
    upstream = [torch.randn_like(tensors[2]), torch.randn_like(tensors[5])]
    cu_seqlens = bounds_of("cpu") if packed else None
    closed, exact = (
        gradients(lambda *t, op=op: op(*t, cu_seqlens=cu_seqlens), tensors, upstream, torch.float64)
        for op in (eager_gated_delta_rule, gated_delta_rule_reference)
    )
    for what, a, b in zip(NAMES, closed, exact, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12, msg=lambda m, w=what: f"{w}: {m}")


def test_packed_equals_apart(device, poison):
    """To the bit in fp32, also gradients: chunks lie in a document as they do without the others."""
    tensors = inputs(device, BOUNDS[-1], states=len(LENGTHS))
    upstream = [torch.randn_like(tensors[2]), torch.randn_like(tensors[5])]
    together = gradients(lambda *t: gated_delta_rule(*t, cu_seqlens=bounds_of(device)), tensors, upstream)
    for i, (begin, end) in enumerate(itertools.pairwise(BOUNDS)):
        if begin == end:
            assert torch.equal(together[1][i], tensors[5][i])
            assert torch.equal(together[7][i], upstream[1][i])
            continue
        # Copies of g and beta: a part of them may be less aligned, for which Triton compiles another order of sums.
        own = [*(t[:, begin:end] for t in tensors[:3]), *(t[:, begin:end].clone() for t in tensors[3:5])]
        own.append(tensors[5][i : i + 1])
        apart = gradients(gated_delta_rule, own, [upstream[0][:, begin:end], upstream[1][i : i + 1]])
        for what, whole, part in zip(NAMES, together, apart, strict=True):
            whole = whole[i : i + 1] if "state" in what else whole[:, begin:end]
            assert torch.equal(whole, part), f"{what} of document {i}"


def test_grids_have_one_dim(device, monkeypatch):
    """A GPU takes up to 2**31 - 1 programs along the first dim of a grid, but 65,535 along others: with 32 heads, fewer
    than 2,048 documents."""
    rule, grids = importlib.import_module("ligermodels.kernels.recurrent.gated_delta_rule"), []
    launch = rule.launch
    monkeypatch.setattr(
        rule, "launch", lambda kernel, grid, *a, **o: grids.append(grid) or launch(kernel, grid, *a, **o)
    )
    tensors = inputs(device, BOUNDS[-1], states=len(LENGTHS))
    op = functools.partial(gated_delta_rule, cu_seqlens=bounds_of(device))
    gradients(op, tensors, [torch.randn_like(tensors[2]), torch.randn_like(tensors[5])])
    assert len(grids) == 9 and all(len(grid) == 1 for grid in grids)


@pytest.mark.gpu
def test_more_documents_than_65_535_programs(device):
    """2,100 documents of two tokens with 32 heads: as those in fp64."""
    length = 2 * 2100
    some = inputs(device, length, states=2100, key_heads=16, heads=32, keys=8, values=8, dtype=torch.bfloat16)
    bounds = torch.arange(0, length + 1, 2, dtype=torch.int32, device=device)
    upstream = [torch.randn_like(some[2]), torch.randn_like(some[5])]
    ours = gradients(lambda *t: gated_delta_rule(*t, cu_seqlens=bounds), some, upstream)

    def apart(*tensors):
        """Each document as a row of a batch."""
        out, state = eager_gated_delta_rule(*(t.unflatten(1, (2100, 2)).squeeze(0) for t in tensors[:5]), tensors[5])
        return out.flatten(0, 1)[None], state

    eager, exact = (gradients(apart, some, upstream, dtype) for dtype in (None, torch.float64))
    for what, a, b, x in zip(NAMES, ours, eager, exact, strict=True):
        assert_as_exact(a, allowed(what, b, x, torch.bfloat16), x, what, shared=8, terms=terms_of(8))


def test_continues_from_a_state(device, poison):
    """Two halves, of which the second begins within a chunk of the whole."""
    *tokens, state = inputs(device, 100, rows=2, states=2, key_heads=2, heads=6, keys=24, values=40)
    before = state.clone()
    with torch.no_grad():
        whole, last = gated_delta_rule(*tokens, state)
        first, middle = gated_delta_rule(*(t[:, :90] for t in tokens), state)
        second, after = gated_delta_rule(*(t[:, 90:] for t in tokens), middle)
    assert torch.equal(state, before)
    close = dict(rtol=1e-4, atol=1e-5)  # fp32 sums in another order
    torch.testing.assert_close(torch.cat([first, second], 1), whole, **close)
    torch.testing.assert_close(after, last, **close)


@pytest.mark.parametrize("activation", [None, "silu"])
def test_convolution_continues_from_a_state(device, poison, activation):
    x, weight, bias = (torch.randn(*size).to(device) for size in ((2, 9, 70), (70, 1, 4), (70,)))
    whole = causal_conv(x, weight, bias, activation=activation)
    continued = causal_conv(x[:, 5:], weight, bias, activation=activation, state=x[:, 2:5].transpose(1, 2))
    torch.testing.assert_close(continued, whole[:, 5:], rtol=1e-6, atol=1e-6)


def test_convolution_of_packed_documents(device, poison):
    """Each as it is alone, to the bit, also its gradient; x is longer than a tile of the backward."""
    bounds = [0, 0, 2, 300, 333, 700]
    x, weight = torch.randn(1, 700, 40, device=device), torch.randn(40, 1, 4, device=device)
    dy, x = torch.randn_like(x), x.requires_grad_()
    y = causal_conv(x, weight, activation="silu", cu_seqlens=torch.tensor(bounds, dtype=torch.int32, device=device))
    (dx,) = torch.autograd.grad(y, x, dy)
    for begin, end in itertools.pairwise(bounds):
        alone = x.detach()[:, begin:end].requires_grad_()
        own = causal_conv(alone, weight, activation="silu")
        assert torch.equal(own, y[:, begin:end])
        if begin < end:
            assert torch.equal(torch.autograd.grad(own, alone, dy[:, begin:end])[0], dx[:, begin:end])


@triton.jit
def _chunk_kernel(out_ptr, cu_ptr, T, N, C: tl.constexpr):
    slot = tl.program_id(0)
    _, n, _, first, end = chunk(slot, cu_ptr, T, N, True, C)
    tl.store(out_ptr + slot * 3, n)
    tl.store(out_ptr + slot * 3 + 1, first)
    tl.store(out_ptr + slot * 3 + 2, end)


def test_every_token_is_in_one_chunk(device):
    """Of more documents than a program compares at once, many of them empty."""
    torch.manual_seed(1)
    lengths = (torch.randint(0, 100, (150,)) * (torch.rand(150) < 0.7)).tolist()
    bounds = list(itertools.accumulate(lengths, initial=0))
    slots = bounds[-1] // 64 + len(lengths)
    out = torch.empty(slots, 3, dtype=torch.int32, device=device)
    cu_seqlens = torch.tensor(bounds, dtype=torch.int32, device=device)
    _chunk_kernel[(slots,)](out, cu_seqlens, bounds[-1], len(lengths), 64)
    found = [t for n, first, end in out.tolist() for t in range(first, min(first + 64, end))]
    assert found == list(range(bounds[-1]))
    assert all(bounds[n] <= first and end == bounds[n + 1] for n, first, end in out.tolist() if first < end)


def test_refuses_what_the_kernels_do_not_take(device):
    with pytest.raises(InputError, match="up to 256"):
        gated_delta_rule(*inputs(device, 3, keys=257))
    if ON_GPU:
        with pytest.raises(InputError, match="in fp32 the kernels take DK up to 128"):
            gated_delta_rule(*inputs(device, 3, keys=129))
    x, weight = torch.randn(1, 5, 8, device=device), torch.randn(8, 1, 4, device=device)
    with pytest.raises(InputError, match="state requires a gradient"):
        causal_conv(x, weight, state=torch.zeros(1, 8, 3, device=device, requires_grad=True))
    with pytest.raises(InputError, match=r"N >= 1 .* end to end in one row"):  # one bound: no document
        causal_conv(x, weight, cu_seqlens=torch.zeros(1, dtype=torch.int32, device=device))


@pytest.mark.parametrize("sms, block", [(1, 128), (1000, 16)])
def test_tiles_of_scans(device, poison, monkeypatch, sms, block):
    """Those of batches whose scans fill a datacenter GPU, and of such as leave it idle, of heads of 128 value dims; as
    exact as eager."""
    rule = importlib.import_module("ligermodels.kernels.recurrent.gated_delta_rule")
    monkeypatch.setattr(rule, "num_sms", lambda _: sms)
    monkeypatch.setattr(rule, "is_datacenter", lambda _: True)
    dtype = torch.bfloat16 if ON_GPU else torch.float16
    q, k, v, g, beta, state = inputs(device, 100, values=128)
    some = [q.to(dtype), k.to(dtype), v.to(dtype), g, beta.to(dtype), state]
    assert rule._options("reverse", some[0], rule._heads(some[0], some[2]), 2)[0] == block
    upstream = [torch.randn_like(some[2]), torch.randn_like(some[5])]
    ours, eager = (gradients(op, some, upstream) for op in (gated_delta_rule, eager_gated_delta_rule))
    exact = gradients(gated_delta_rule_reference, some, upstream, torch.float64)
    for what, a, b, x in zip(NAMES, ours, eager, exact, strict=True):
        shared = 16 if "state" in what else 1
        assert_as_exact(a, allowed(what, b, x, dtype), x, what, shared=shared, terms=terms_of(16))


def test_which_tiles_a_reverse_scan_takes(monkeypatch):
    """Of one, two and four rows of 32 heads on an H200, the fastest that was measured."""
    rule = importlib.import_module("ligermodels.kernels.recurrent.gated_delta_rule")
    monkeypatch.setattr(rule, "num_sms", lambda _: 132)
    monkeypatch.setattr(rule, "is_datacenter", lambda _: True)
    q = torch.empty(0, dtype=torch.bfloat16)
    blocks = [rule._options("reverse", q, (16, 32, 128, 128, 128, 128), rows * 32)[0] for rows in (1, 2, 4)]
    assert blocks == [16, 32, 128]


@pytest.mark.gpu
def test_real_sizes(device):
    """Heads of 128 dims, and 48 of them, in bf16: as exact as eager, and the same bits each time."""
    for heads in (32, 48):
        some = inputs(device, 333, key_heads=16, heads=heads, keys=128, values=128, dtype=torch.bfloat16, decay=4.0)
        upstream = [torch.randn_like(some[2]), torch.randn_like(some[5])]
        ours, again = (gradients(gated_delta_rule, some, upstream) for _ in range(2))
        eager = gradients(eager_gated_delta_rule, some, upstream)
        exact = gradients(eager_gated_delta_rule, some, upstream, torch.float64)
        for what, a, b, c, x in zip(NAMES, ours, again, eager, exact, strict=True):
            assert_as_exact(a, allowed(what, c, x, torch.bfloat16), x, what)
            assert torch.equal(a, b), what
