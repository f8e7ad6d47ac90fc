"""AdamW: the kernels round as the reference does (tests/training compares it with torch); random bits; remainders."""

import pytest
import torch

from ligermodels.kernels.optimizer.adamw import adamw, adamw_reference
from ligermodels.kernels.optimizer.rounding import UNSHARDED, ShardLayout, join_master, random_bits, split_master
from ligermodels.training import AdamW
from tests.kernels.on_gpu import large

BETAS = dict(betas=(0.9, 0.999), eps=1e-8, weight_decay=0.1)
ODD = 1315  # two blocks, and a last group of three
PLAIN = dict(step=1, lr=0.0, betas=(0.0, 0.0), eps=1e-8, weight_decay=0.0)
"""A first step of which m is the gradient, v its square, and the weight stays, each exactly."""


def bits_of(x):
    return x.view({2: torch.int16, 4: torch.int32}[x.element_size()])


def start(size, weight, states, device, *, remainder=False):
    """Weight, moments and remainder before the first step."""
    w = torch.randn(size, device=device).to(weight)
    m, v = torch.zeros(2, *w.shape, dtype=states, device=device)
    return [w, m, v, torch.zeros_like(w, dtype=torch.int16) if remainder else None]


def run(op, tensors, grads, *, on_device=False, **options):
    """One step for each gradient, on copies of the tensors."""
    w, m, v, r = found = [None if x is None else x.clone() for x in tensors]
    for t, grad in enumerate(grads, 1):
        numbers = dict(step=t, lr=3e-3)
        if on_device:
            numbers = {key: torch.tensor(float(value), device=w.device) for key, value in numbers.items()}
        op(w, grad, m, v, r, **numbers, **BETAS, **options)
    return found


@pytest.mark.parametrize(
    ("weight", "states", "remainder", "options"),
    [
        (torch.bfloat16, torch.bfloat16, False, dict(seed=2**40 + 7, number=5, layout=ShardLayout(2**36))),
        (torch.bfloat16, torch.bfloat16, True, {}),
        (torch.bfloat16, torch.float32, False, dict(rounding="nearest")),
        (torch.float32, torch.bfloat16, False, dict(seed=1)),
        (torch.float16, torch.float16, False, {}),
        (torch.float32, torch.float32, False, {}),
        (torch.float64, torch.float64, False, {}),
    ],
)
@pytest.mark.parametrize("where", ["numbers on the host", "numbers on the device", "pieces on the CPU"], indirect=True)
def test_every_path_rounds_as_the_reference(where, device, weight, states, remainder, options):
    device = "cpu" if where == "pieces on the CPU" else device
    on_device = where == "numbers on the device"
    tensors = start((ODD,), weight, states, device, remainder=remainder)
    grads = torch.randn(3, ODD, device=device).to(weight)
    if options.get("rounding") != "nearest":
        options = dict(options, factor=torch.tensor(0.5, device=device))
    found = run(adamw, tensors, grads, on_device=on_device, **options)
    expected = run(adamw_reference, tensors, grads, on_device=on_device, **options)
    if remainder:
        found, expected = ([join_master(w, r), m, v] for w, m, v, r in (found, expected))
    for actual, other in zip(found[:3], expected, strict=False):
        eps = torch.finfo(actual.dtype).eps * (8 if actual.dtype == weight == states else 1)
        # An exact value that the two compute an ulp apart rounds apart once in 2^16 / 2 times, from 3 steps on.
        if actual.element_size() == 2:
            assert (actual == other).double().mean() > 0.99
        torch.testing.assert_close(actual, other, rtol=2 * eps, atol=2 * eps * other.float().abs().mean().item())


def words_of(place, *, seed, step, stream):
    """The 16 bits of one element, by the paper's Philox4x32-7 in Python's integers."""
    c, key = [place // 8 % 2**32, place // 8 >> 32, step, stream], [seed % 2**32, seed >> 32]
    for _ in range(7):
        a, b = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57
        c = [(b >> 32) ^ c[1] ^ key[0], b % 2**32, (a >> 32) ^ c[3] ^ key[1], a % 2**32]
        key = [(key[0] + 0x9E3779B9) % 2**32, (key[1] + 0xBB67AE85) % 2**32]
    return c[place % 8 // 2] >> 16 * (place % 2) & 0xFFFF


def test_the_random_bits_of_whole_parameters_stay(device):
    """Runs that were begun with an earlier version go on with its bits."""
    bits = random_bits(torch.zeros(19, device=device), [0, 1, 2], seed=2**40 + 7, number=5, step=3, layout=UNSHARDED)
    assert bits[:, -3:].tolist() == [[42432, 25657, 37753], [45610, 32532, 28785], [56045, 2479, 35576]]


LAYOUTS = [
    UNSHARDED,
    ShardLayout(13),  # a range that begins within a group
    ShardLayout(2**35 + 16, 40, 2**33),  # columns, of groups that stay whole
    ShardLayout(32, 49, 97),  # uneven columns
    ShardLayout(5, 1, 3),  # one column
]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("where", ["kernel", "reference", "pieces on the CPU"], indirect=True)
def test_the_random_bits_of_pieces_are_those_of_the_whole(where, device, layout):
    """Gradients that are the first moment, exactly, and are rounded up by their bits but by none smaller."""
    device = "cpu" if where == "pieces on the CPU" else device
    places = [layout.first + i // layout.inner * layout.stride + i % layout.inner for i in range(ODD)]
    seed, number = 2**40 + 7, 5
    bits = torch.tensor([words_of(place, seed=seed, step=1, stream=number * 4 + 1) for place in places], device=device)
    op = adamw_reference if where == "reference" else adamw
    for more, expected in ((0, 0x3F81), (-1, 0x3F80)):
        grad = ((0x3F80 << 16) + (65536 + more - bits)).int().view(torch.float32)
        w, m, v, _ = start((ODD,), torch.bfloat16, torch.bfloat16, device)
        op(w, grad, m, v, **PLAIN, seed=seed, number=number, layout=layout)
        assert (bits_of(m) == expected).all()


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("op", [adamw, adamw_reference])
def test_what_is_not_finite_stays_what_it_is(device, op):
    nan, inf = float("nan"), float("inf")
    w, m, v, r = start((64,), torch.bfloat16, torch.bfloat16, device, remainder=True)
    grad = torch.ones(64, device=device)
    grad[:3] = torch.tensor([nan, inf, -inf])
    grad.view(torch.int32)[3] = 2**31 - 1  # a NaN to whose bits nothing can be added, as GPUs make them
    op(w, grad, m, v, step=1, lr=1e-3, **BETAS, seed=3)
    assert m[:4].tolist()[1:3] == [inf, -inf] and m[0].isnan() and m[3].isnan() and v[1] == inf
    assert w[:4].isnan().all() and w[4:].isfinite().all() and m[4:].isfinite().all() and v[4:].isfinite().all()
    w[:3] = torch.tensor([inf, -inf, nan])
    op(w, grad, m, v, r, step=2, lr=1e-3, **BETAS)
    assert w[:2].isnan().all() and w[2].isnan() and w[4:].isfinite().all()


def test_masters_are_kept_in_all_their_bits(device):
    """The lowest and highest remainder, ties, infinities and subnormals: into bf16 + int16 and out again."""
    high = torch.tensor([0x3F80, 0x3F81, 0x0000, 0x0001, 0x7F7F, 0x4049], device=device).int() << 16
    low = torch.tensor([0x0000, 0x0001, 0x7FFF, 0x8000, 0x8001, 0xFFFF], device=device).int()
    raw = (high[:, None] + low).flatten()
    infinite = torch.tensor([0x7F800000], device=device).int()
    master = torch.cat([raw, raw | -(2**31), infinite, infinite | -(2**31)]).view(torch.float32)
    weight, remainder = split_master(master)
    assert torch.equal(bits_of(join_master(weight, remainder)), bits_of(master))
    tie = master.view(torch.int32) & 0xFFFF == 0x8000
    assert (weight[tie].double().abs() > master[tie].double().abs()).all()
    assert torch.equal(weight[~tie], master[~tie].bfloat16())
    assert split_master(torch.tensor([float("nan")]))[0].isnan()


@large
@pytest.mark.gpu
def test_more_than_2_31_elements():
    size = 2**31 + 1003
    w = torch.ones(size, dtype=torch.bfloat16, device="cuda")
    grad, m, v = torch.ones_like(w) * 0.01, torch.zeros_like(w), torch.zeros_like(w)
    tail = [x[-1003:].clone() for x in (w, grad, m, v)]
    options = dict(step=1, lr=1e-3, **BETAS, seed=2)
    adamw(w, grad, m, v, **options)
    adamw(*tail, **options, layout=ShardLayout(2**31))
    for whole, piece in zip((w, m, v), (tail[0], *tail[2:]), strict=True):
        assert torch.equal(whole[-1003:], piece)


@pytest.mark.parametrize("options", [{}, dict(master_weights=True)], ids=["", "master weights"])
def test_a_backward_that_needs_weights_from_before_a_step_raises(device, options):
    """As with torch's optimizers: the optimizer counts up the version of each weight, which no kernel does."""
    weight, x = (torch.ones(3, dtype=torch.bfloat16, device=device, requires_grad=True) for _ in range(2))
    y, optimizer = weight * x, AdamW([weight], **options)
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
