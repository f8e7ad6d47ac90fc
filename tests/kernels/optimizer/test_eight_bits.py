"""Moments in 8 bits: the codes against the numbers that their definition lists, and steps of AdamW that store them."""

import pytest
import torch

from ligermodels.kernels.optimizer.adamw import adamw, adamw_reference
from ligermodels.kernels.optimizer.eight_bits import BLOCK, MOMENT, ROOT, decode, encode, exponents_shape
from ligermodels.kernels.optimizer.rounding import ShardLayout, join_master
from tests.kernels.on_gpu import large

SHAPE = 37, 128
"""In 74 blocks, which fill no whole number of programs."""
OPTIONS = dict(betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1)


def numbers(exponent, levels):
    """All numbers of a block from 0 up, in fp64."""
    return 2.0 ** (max(exponent, 1) - 127) * (torch.arange(levels + 1, dtype=torch.float64) / levels) ** 4


def some(levels, rows=50):
    """Blocks of many magnitudes, one of zeros among them."""
    x = (
        torch.randn(rows, 2 * BLOCK)
        * 10.0 ** torch.randint(-30, 30, (rows, 1))
        * 10.0 ** -torch.randint(9, (rows, 2 * BLOCK))
    )
    x[3, :BLOCK] = 0.0
    return x if levels == MOMENT else x.abs()


@pytest.mark.parametrize("levels", [MOMENT, ROOT])
def test_codes_are_the_nearest_numbers(levels):
    """In the fourth root, in which they are evenly spaced."""
    x = some(levels)
    codes, exponents = encode(x, levels)
    assert codes.dtype == exponents.dtype == torch.uint8 and exponents.shape == exponents_shape(x.shape)
    y = decode(codes, exponents, levels)
    for block, other, exponent in zip(x.view(-1, BLOCK), y.view(-1, BLOCK), exponents.flatten().tolist(), strict=True):
        table, size = numbers(exponent, levels), block.double().abs()
        assert not block.any() or table[-1] / 2 < size.max() <= table[-1]
        nearest = (size[:, None] ** 0.25 - table**0.25).abs().argmin(1)
        if levels == ROOT:
            nearest = torch.where(block > 0, nearest.clamp(min=1), nearest)
        torch.testing.assert_close(other.double().abs(), table[nearest], rtol=1e-6, atol=0)
        assert (block * other >= 0).all()
    again = encode(y, levels)
    kept = (again[1] == exponents).repeat_interleave(BLOCK, dim=1)  # but where the largest was rounded below a power
    assert torch.equal(decode(*again, levels)[kept], y[kept]) and kept.double().mean() > 0.95


@pytest.mark.parametrize("levels", [MOMENT, ROOT])
def test_random_bits_round_to_one_of_two_neighbours(levels):
    """Over all 2^16 random bits, the mean in the fourth root is the exact one, and the mean itself is 1 % off at most,
    down to 1/256 of the largest."""
    x = 2.0 ** -torch.arange(BLOCK).div(8) * (1 - 0.1 * torch.rand(BLOCK))
    x = x * (torch.rand(BLOCK) - 0.5).sign() if levels == MOMENT else x
    bits = torch.arange(2**16, dtype=torch.int32)[:, None].expand(-1, BLOCK).contiguous()
    codes, exponents = encode(x.expand(2**16, -1), levels, bits)
    y, table = decode(codes, exponents, levels).double(), numbers(int(exponents[0, 0]), levels)
    size = x.double().abs()
    place = levels * (size / table[-1]) ** 0.25
    code = (codes.int() & levels).double()
    assert ((code - place).abs() < 1).all() and (y * x >= 0).all()
    assert ((code.mean(0) - place).abs() < 2.0**-15).all()
    assert ((y.abs().mean(0) / size - 1).abs() < 0.01).all()


def test_what_is_not_finite_makes_its_block_nan():
    x = torch.ones(4, 2 * BLOCK)
    x[0, 3], x[1, 70], x[2, 5] = float("nan"), float("-inf"), 8e37
    for levels in (MOMENT, ROOT):
        y = decode(*encode(x if levels == MOMENT else x.abs(), levels), levels)
        lost = y.isnan().view(4, 2, BLOCK)
        assert lost.all(2).tolist() == lost.any(2).tolist() == [[True, False], [False, True], [False] * 2, [False] * 2]


def start(weight, device, *, remainder=False, shape=SHAPE):
    """Weight, moments, remainder and exponents before the first step."""
    w = torch.randn(shape, device=device).to(weight)
    m, v = torch.zeros(2, *shape, dtype=torch.uint8, device=device)
    exponents = torch.zeros(2, *exponents_shape(shape), dtype=torch.uint8, device=device)
    return [w, m, v, torch.zeros_like(w, dtype=torch.int16) if remainder else None, tuple(exponents)]


def moments(tensors):
    _, m, v, _, (m_exponents, v_exponents) = tensors
    return decode(m, m_exponents, MOMENT), decode(v, v_exponents, ROOT).square()


def run(op, tensors, grads, *, on_device=False, **options):
    """One step for each gradient, on copies of the tensors."""
    w, m, v, r, exponents = [None if x is None else x.clone() for x in tensors[:4]] + [[x.clone() for x in tensors[4]]]
    for t, grad in enumerate(grads, 1):
        values = dict(step=t, lr=3e-3)
        if on_device:
            values = {key: torch.tensor(float(value), device=w.device) for key, value in values.items()}
        op(w, grad, m, v, r, tuple(exponents), **values, **OPTIONS, **options)
    return [w, m, v, r, tuple(exponents)]


@pytest.mark.parametrize(
    ("weight", "remainder", "options"),
    [
        (torch.bfloat16, False, dict(seed=2**40 + 7, number=5, layout=ShardLayout(2**36))),
        (torch.bfloat16, False, dict(rounding="nearest")),
        (torch.bfloat16, True, {}),
        (torch.float32, False, dict(layout=ShardLayout(5, 1, 3))),
        (torch.float16, False, {}),
    ],
)
@pytest.mark.parametrize("where", ["numbers on the host", "numbers on the device", "pieces on the CPU"], indirect=True)
def test_every_path_rounds_as_the_reference(where, device, weight, remainder, options):
    device = "cpu" if where == "pieces on the CPU" else device
    tensors = start(weight, device, remainder=remainder)
    grads = torch.randn(3, *SHAPE, device=device) * 10.0 ** torch.randint(-12, 2, SHAPE, device=device)
    options = dict(options, factor=torch.tensor(0.5, device=device))
    found = run(adamw, tensors, grads.to(weight), on_device=where == "numbers on the device", **options)
    expected = run(adamw_reference, tensors, grads.to(weight), **options)
    for exponents, others in zip(found[4], expected[4], strict=True):
        assert (exponents == others).all()
    for moment, other in zip(moments(found), moments(expected), strict=True):
        # An exact value that the two compute an ulp apart rounds apart once in 2^16 / 2 times, from 3 steps on.
        assert (moment == other).double().mean() > 0.999
    if remainder:
        found[0], expected[0] = (join_master(w, r) for w, _, _, r, _ in (found, expected))
    eps = torch.finfo(found[0].dtype).eps
    same = (found[0].double() - expected[0].double()).abs() <= 8 * eps * (1 + expected[0].double().abs())
    assert same.double().mean() > 0.998  # other codes of one step change the weights of the next


@pytest.mark.filterwarnings("ignore:(invalid value|overflow):RuntimeWarning")
@pytest.mark.parametrize("op", [adamw, adamw_reference])
def test_gradients_that_are_not_finite_lose_their_blocks(device, op):
    """1e38 is too large as well: the inverse of its power of two is no normal number. betas of 0: a moment is it."""
    w, m, v, _, exponents = start(torch.float32, device)
    grad = torch.ones(SHAPE, device=device)
    grad[0, 3], grad[1, 70], grad[2, 5] = float("nan"), float("-inf"), 1e38
    op(w, grad, m, v, None, exponents, step=1, lr=1e-3, betas=(0.0, 0.0), eps=1e-8, weight_decay=0.0)
    for moment in moments([w, m, v, None, exponents]):
        lost = moment.isnan().view(*SHAPE[:1], 2, BLOCK)
        assert lost.all(2).equal(lost.any(2)) and lost.any(2).nonzero().tolist() == [[0, 0], [1, 1], [2, 0]]
    op(w, torch.ones_like(grad), m, v, None, exponents, step=2, lr=1e-3, betas=(0.9, 0.9), eps=1e-8, weight_decay=0.0)
    assert w.isnan().view(*SHAPE[:1], 2, BLOCK).equal(lost)


@pytest.mark.parametrize("op", [adamw, adamw_reference])
def test_pieces_have_the_bits_of_the_whole(device, op):
    """Rows, of which shards have some, and columns in whole blocks."""
    tensors = start(torch.bfloat16, device)
    grads = torch.randn(3, *SHAPE, device=device)
    whole = run(op, tensors, grads)
    everything = slice(None)
    for cut, blocks, layout in (
        ((slice(9), everything), (slice(9), everything), ShardLayout()),
        ((slice(9, None), everything), (slice(9, None), everything), ShardLayout(9 * 128)),
        ((everything, slice(BLOCK, None)), (everything, slice(1, None)), ShardLayout(BLOCK, BLOCK, 128)),
    ):
        piece = [tensors[0][cut], tensors[1][cut], tensors[2][cut], None, tuple(x[blocks] for x in tensors[4])]
        found = run(op, piece, [grad[cut] for grad in grads], layout=layout)
        assert all(torch.equal(x, y[cut]) for x, y in zip(found[:3], whole[:3], strict=True))
        assert all(torch.equal(x, y[blocks]) for x, y in zip(found[4], whole[4], strict=True))


@large
@pytest.mark.gpu
def test_more_than_2_31_elements():
    rows = 2**31 // 128 + 9
    w = torch.ones(rows, 128, dtype=torch.bfloat16, device="cuda")
    grad, (_, m, v, _, exponents) = torch.ones_like(w) * 0.01, start(torch.bfloat16, "cuda", shape=(rows, 128))
    tail = [x[-9:].clone() for x in (w, grad, m, v, *exponents)]
    adamw(w, grad, m, v, None, exponents, step=1, lr=1e-3, seed=2, **OPTIONS)
    layout = ShardLayout((rows - 9) * 128)
    adamw(*tail[:4], None, tuple(tail[4:]), step=1, lr=1e-3, seed=2, layout=layout, **OPTIONS)
    for whole, piece in zip((w, m, v, *exponents), (tail[0], *tail[2:]), strict=True):
        assert torch.equal(whole[-9:], piece)
