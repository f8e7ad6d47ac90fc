"""Linear layers of one input as one op: the same as one by one, whether their weights lie together or apart."""

import functools
import importlib

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from ligermodels.errors import InputError
from ligermodels.kernels._gradients import MARK
from ligermodels.kernels.linear import joint, lay_together, packed_linear
from ligermodels.kernels.rms_norm import rms_norm
from tests.kernels.on_gpu import assert_captures, assert_compiles, assert_never_waits
from tests.kernels.oracle import assert_as_exact, dtypes

module = importlib.import_module("ligermodels.kernels.linear")

WIDTH, COLUMNS = 12, (5, 3, 4)
BIASES = {"all": (1, 1, 1), "none": (0, 0, 0), "some": (1, 0, 1)}
LAID = {"joint": lay_together, "apart": lambda parameters: None}
each_laid = pytest.mark.parametrize("laid", LAID)


def one_by_one(x, weights, biases=None):
    return torch.cat([F.linear(x, w, b) for w, b in zip(weights, biases or [None] * len(weights), strict=True)], -1)


def problem(device, laid, lead=(5,), dtype=torch.float32, bias="all", columns=COLUMNS, width=WIDTH):
    """x, weights and biases, and dy."""
    weights = [nn.Parameter((torch.randn(n, width) * width**-0.5).to(device, dtype)) for n in columns]
    there = BIASES[bias]
    biases = [
        nn.Parameter(torch.randn(n).to(device, dtype)) if t else None for n, t in zip(columns, there, strict=True)
    ]
    LAID[laid](weights)
    if bias == "all":
        LAID[laid](biases)
    assert (joint(weights) is not None) == (laid == "joint")
    x, dy = (torch.randn(*lead, n).to(device, dtype) for n in (width, sum(columns)))
    return x.requires_grad_(), weights, biases, dy


def trained(x, weights, biases):
    return [t for t in (x, *weights, *biases) if t is not None and t.requires_grad]


def run(op, x, weights, biases, dy):
    y = op(x, weights, biases)
    return [y.detach(), *torch.autograd.grad(y, trained(x, weights, biases), dy)]


def exact(x, weights, biases, dy):
    wide = [[None if t is None else t.detach().double().requires_grad_() for t in ts] for ts in ([x], weights, biases)]
    return run(one_by_one, wide[0][0], *wide[1:], dy.double())


class Seen(TorchDispatchMode):
    """The names of what torch computes."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))

    @property
    def products(self):
        return sum(name in ("mm", "addmm") for name in self.names)


@each_laid
@pytest.mark.parametrize("bias", BIASES)
@pytest.mark.parametrize("lead", [(5,), (2, 3), (2, 1, 3), (1,), (0,), (2, 0)], ids=str)
@pytest.mark.parametrize("dtype", dtypes(), ids=str)
def test_output_and_every_gradient(device, poison, dtype, lead, bias, laid):
    case = problem(device, laid, lead, dtype, bias)
    actual, allowed, ideal = run(packed_linear, *case), run(one_by_one, *case), exact(*case)
    assert actual[0].is_contiguous() and actual[0]._base is None
    for i, (a, b, c) in enumerate(zip(actual, allowed, ideal, strict=True)):
        assert a.dtype == b.dtype and a.shape == b.shape
        if dtype == torch.float64:
            torch.testing.assert_close(a, c, rtol=1e-13, atol=1e-13)  # of at most 12 terms, in another order
        else:
            assert_as_exact(a, b, c, f"gradient {i}" if i else "y", terms=WIDTH)


@each_laid
@pytest.mark.parametrize("bias", BIASES)
def test_how_many_products(device, laid, bias):
    """One each for y, dx and all weights; of weights apart one for the columns of each in y, and for its part of dx.
    Neither joins, splits nor copies a tensor."""
    x, weights, biases, dy = problem(device, laid, bias=bias)
    whole = laid == "joint" and bias != "some"
    with Seen() as forward:
        y = packed_linear(x, weights, biases)
    with Seen() as backward:
        torch.autograd.grad(y, trained(x, weights, biases), dy)
    assert forward.products == (1 if whole else 3)
    assert backward.products == 1 + (1 if laid == "joint" else 3)
    assert not {"cat", "copy_", "clone", "_to_copy", "add", "add_"} & {*forward.names, *backward.names}
    with torch.no_grad(), Seen() as quiet:
        value = packed_linear(x, weights, biases)
    assert torch.equal(value, y) and quiet.products == forward.products


SUBSETS = [(), (0,), (1,), (2,), (0, 2), (1, 2), (0, 1, 2)]


@each_laid
@pytest.mark.parametrize("need_x", [True, False])
@pytest.mark.parametrize("some", SUBSETS, ids=str)
@pytest.mark.parametrize("some_biases", [(), (1,), (0, 1, 2)], ids=str)
def test_frozen(device, poison, laid, need_x, some, some_biases):
    """What is frozen gets no gradient and costs no product, and x is kept for weights alone."""
    x, weights, biases, dy = problem(device, laid)
    names = ["x", *(f"w{i}" for i in range(3)), *(f"b{i}" for i in range(3))]
    expected = dict(zip(names, run(one_by_one, x, weights, biases, dy)[1:], strict=True))
    x.requires_grad_(need_x)
    for i in range(3):
        weights[i].requires_grad_(i in some)
        biases[i].requires_grad_(i in some_biases)
    if not trained(x, weights, biases):
        assert not packed_linear(x, weights, biases).requires_grad
        return
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        y = packed_linear(x, weights, biases)
    assert (x.data_ptr() in {t.data_ptr() for t in saved}) == bool(some)
    with Seen() as backward:
        y.backward(dy)
    of_weights = 1 if len(some) == 3 else len(some)
    assert backward.products == of_weights + need_x * (1 if laid == "joint" else 3)
    for name, t in zip(names, (x, *weights, *biases), strict=True):
        assert (t.grad is None) == (not t.requires_grad)
        if t.requires_grad:
            torch.testing.assert_close(t.grad, expected[name])


@each_laid
def test_gradients_are_views_of_one_buffer(device, laid):
    """autograd takes them over as they are: no weight's gradient is copied, and a next one is added to them."""
    x, weights, biases, dy = problem(device, laid)
    for times in (1, 2):
        packed_linear(x, weights, biases).backward(dy)
        whole = joint([w.grad for w in weights])
        assert whole is not None and joint([b.grad for b in biases]) is not None
        torch.testing.assert_close(whole, times * dy.t() @ x.detach())


@each_laid
def test_behind_a_norm(device, poison, laid):
    """The norm's output is not kept, and is made again to the bit."""
    x, weights, biases, dy = problem(device, laid, (4, 8))
    norm = torch.randn(WIDTH, device=device)

    def op(forgets, x, weights, biases):
        y = rms_norm(x, norm)
        return packed_linear(y.view_as(y) if forgets else y, weights, biases)

    for a, b in zip(*(run(functools.partial(op, f), x, weights, biases, dy) for f in (True, False)), strict=True):
        assert torch.equal(a, b)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        op(False, x, weights, biases)
    known = {t.data_ptr() for t in (x, norm, *weights)}
    assert [t.numel() for t in {t.data_ptr(): t for t in saved if t.data_ptr() not in known}.values()] == [4 * 8]


STARTS = {
    "none": lambda weights: None,
    "joint": lambda weights: torch.zeros(sum(COLUMNS), WIDTH, device=weights[0].device).split(COLUMNS),
    "apart": lambda weights: [torch.zeros_like(w) for w in weights],
    "one": lambda weights: [torch.zeros_like(weights[0]), None, None],
}


@each_laid
@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("some", [(0, 1, 2), (0, 2)], ids=str)
@pytest.mark.parametrize("normed", [True, False])
def test_adds_in_place(device, poison, monkeypatch, laid, start, some, normed):
    """Micro-batch after micro-batch into the same memory; autograd is given nothing to add. It is one product where
    each .grad follows the one before, or is not there yet."""
    x, weights, biases, dy = problem(device, laid)
    norm = torch.ones(WIDTH, device=device)
    y = rms_norm(x, norm).detach() if normed else x.detach()
    expected = dy.t() @ y
    for i, w in enumerate(weights):
        w.requires_grad_(i in some)
        setattr(w, MARK, True)
    for w, grad in zip(weights, STARTS[start](weights) or [None] * 3, strict=True):
        w.grad = grad
    given, real = [], module.weight_gradients
    monkeypatch.setattr(module, "weight_gradients", lambda *args: given.extend(real(*args)) or given[-3:])
    memory: list = []
    for times in (1, 2, 3):
        out = packed_linear(rms_norm(x, norm) if normed else x, weights, biases)
        with Seen() as backward:
            out.backward(dy)
        one = len(some) == 3 and (start in ("none", "joint"))
        assert backward.products == (1 if one else len(some)) + (1 if laid == "joint" else 3)
        for i in some:
            torch.testing.assert_close(weights[i].grad, times * expected.split(COLUMNS)[i])
        memory.append([weights[i].grad.data_ptr() for i in some])
    assert memory[0] == memory[1] == memory[2] and given == [None] * 9


def test_adds_in_place_only_what_is_marked(device):
    x, weights, biases, dy = problem(device, "joint")
    setattr(weights[1], MARK, True)
    for times in (1, 2):
        packed_linear(x, weights, biases).backward(dy)
        for w, expected in zip(weights, (dy.t() @ x.detach()).split(COLUMNS), strict=True):
            torch.testing.assert_close(w.grad, times * expected)


@pytest.mark.parametrize("marked", [True, False])
def test_one_weight_twice(device, marked):
    x, (weight, *_), _, _ = problem(device, "apart")
    dy = torch.randn(5, 10, device=device)
    setattr(weight, MARK, marked)
    for times in (1, 2):
        packed_linear(x, [weight, weight]).backward(dy)
        torch.testing.assert_close(weight.grad, times * (dy[:, :5] + dy[:, 5:]).t() @ x.detach())


@each_laid
def test_runs_twice_and_not_twice_differentiable(device, laid):
    x, weights, biases, dy = problem(device, laid)
    leaves = trained(x, weights, biases)
    y = packed_linear(x, weights, biases)
    first, second = (torch.autograd.grad(y, leaves, dy, retain_graph=True) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    (grad,) = torch.autograd.grad(packed_linear(x, weights).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="twice"):
        grad.sum().backward()


def test_the_result_may_be_changed_in_place(device):
    x, weights, biases, dy = problem(device, "joint")
    y = packed_linear(x, weights, biases).mul_(2)
    torch.testing.assert_close(torch.autograd.grad(y, x, dy)[0], 2 * run(one_by_one, x, weights, biases, dy)[1])


@each_laid
@pytest.mark.parametrize("normed", [True, False])
def test_checkpointed(device, laid, normed):
    x, weights, biases, dy = problem(device, laid)
    norm = torch.randn(WIDTH, device=device)

    def region(x, weights, biases):
        return packed_linear(rms_norm(x, norm) if normed else x, weights, biases).sin()

    again = functools.partial(checkpoint, region, use_reentrant=False)
    for a, b in zip(run(region, x, weights, biases, dy), run(again, x, weights, biases, dy), strict=True):
        assert torch.equal(a, b)


def test_kept_on_the_host(device):
    """What is kept comes back as other tensors, which lie apart."""
    case = problem(device, "joint")
    with torch.autograd.graph.save_on_cpu():
        actual = run(packed_linear, *case)
    for a, b in zip(actual, run(packed_linear, *case), strict=True):
        torch.testing.assert_close(a, b)  # products of other sizes may add in another order


def test_weights_that_move_before_the_backward(device):
    """As FSDP moves them: what was one matrix in the forward is several in the backward, and its memory is gone."""
    x, weights, biases, dy = problem(device, "joint")
    expected = run(one_by_one, x, weights, biases, dy)[1]
    y, old = packed_linear(x, weights, biases), joint(weights).data
    for w in weights:
        w.data = w.data.clone()
    old.fill_(torch.nan)
    torch.testing.assert_close(torch.autograd.grad(y, x, dy)[0], expected)


@each_laid
def test_gradcheck(device, laid):
    x, weights, biases, _ = problem(device, laid, (2, 2), torch.float64, columns=(2, 1, 2), width=3)
    op = lambda x, *rest: packed_linear(x, rest[:3], rest[3:])  # noqa: E731
    assert torch.autograd.gradcheck(op, (x, *weights, *biases))


LAYOUTS = {
    "transposed": lambda t: t.transpose(0, 1).contiguous().transpose(0, 1),
    "columns": lambda t: torch.stack([t, t], -1)[..., 0],
    "one expanded number": lambda t: t[(0,) * t.dim()].expand_as(t),
}


@each_laid
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(device, poison, layout, laid):
    x, weights, biases, dy = problem(device, laid, (2, 3))
    x, dy = LAYOUTS[layout](x.detach()).requires_grad_(), LAYOUTS[layout](dy)
    for a, b in zip(run(packed_linear, x, weights, biases, dy), run(one_by_one, x, weights, biases, dy), strict=True):
        torch.testing.assert_close(a, b)


class Other(torch.Tensor):
    """A tensor of another type, as quantization and sharding put in the place of a weight."""


def test_left_to_torch(device, monkeypatch):
    """Autocast, transforms, forward mode, other types, one dim: F.linear of each, and torch.cat."""
    x, weights, biases, _ = problem(device, "joint")
    monkeypatch.setattr(module, "pack", None)
    with torch.autocast(device, dtype=torch.float16 if device == "cuda" else torch.bfloat16):
        assert packed_linear(x, weights, biases).dtype == torch.get_autocast_dtype(device)
    stacked = [torch.stack([w, -w]).detach() for w in weights]
    mapped = torch.func.vmap(lambda *w: packed_linear(x, w))(*stacked)
    torch.testing.assert_close(mapped[1], -one_by_one(x, [w[0] for w in stacked]))
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x.detach(), torch.ones_like(x))
        tangent = forward_ad.unpack_dual(packed_linear(dual, weights)).tangent
    torch.testing.assert_close(tangent, one_by_one(torch.ones_like(x), weights))
    assert packed_linear(x[0], weights, biases).shape == (sum(COLUMNS),)
    assert type(packed_linear(x, [weights[0], weights[1].detach().as_subclass(Other)])) is Other
    assert type(packed_linear(x.detach().as_subclass(Other), weights)) is Other


@each_laid
@pytest.mark.parametrize("bias", BIASES)
def test_compiles_whole(laid, bias, monkeypatch):
    monkeypatch.setattr(module, "pack", None) if laid == "apart" else None
    x, weights, biases, dy = problem("cpu", laid, (2, 3), bias=bias)
    torch.compiler.reset()
    compiled = torch.compile(packed_linear, backend="aot_eager", fullgraph=True)
    for a, b in zip(run(compiled, x, weights, biases, dy), run(one_by_one, x, weights, biases, dy), strict=True):
        torch.testing.assert_close(a, b)


def test_one_weight(device):
    x, weights, biases, _ = problem(device, "apart")
    for b in (None, biases[:1]):
        assert torch.equal(packed_linear(x, weights[:1], b), F.linear(x, weights[0], None if b is None else b[0]))


def test_on_meta():
    x, weights, biases, _ = problem("meta", "apart", (2, 3))
    assert packed_linear(x, weights, biases).shape == (2, 3, sum(COLUMNS))


def test_errors(device):
    x, weights, biases, _ = problem(device, "apart")
    with pytest.raises(InputError, match="3 weights and 2 biases"):
        packed_linear(x, weights, biases[:2])
    with pytest.raises(InputError, match="0 weights"):
        packed_linear(x, [])


# What lies together.


def test_joint_is_the_same_memory(device):
    whole = torch.randn(12, 7, device=device, requires_grad=True)
    parts = whole.split([5, 3, 4])
    found = joint(parts)
    assert torch.equal(found, whole) and found.data_ptr() == whole.data_ptr() and not found.requires_grad
    assert torch.equal(joint(parts[1:]), whole[5:])
    assert torch.equal(joint([whole[:1], whole[1:2]]), whole[:2])
    bias = torch.randn(9, device=device)
    assert torch.equal(joint(bias.split([1, 5, 3])), bias)
    deep = torch.randn(4, 2, 3, device=device)
    assert torch.equal(joint(deep.split(2)), deep)
    assert joint([whole]).data_ptr() == whole.data_ptr() and not joint([whole]).requires_grad


def test_joint_whatever_strides_a_dim_of_one_has(device):
    """They are contiguous, and their rows lie one behind the other."""
    room = torch.arange(24.0, device=device)
    one, more = room.as_strided((1, 4), (9, 1)), room.as_strided((2, 4), (4, 1), 4)
    assert one.is_contiguous() and torch.equal(joint([one, more]), room[:12].view(3, 4))
    short = room.as_strided((1, 3), (4, 1))
    assert short.is_contiguous() and joint([short, room.as_strided((2, 4), (4, 1), 3)]) is None


def apart_tensors():
    """Pairs of tensors that are no one matrix, by the reason."""
    a = torch.randn(6, 4)
    base = torch.randn(48)
    neighbours = torch.frombuffer(memoryview(bytearray(96))[:48], dtype=torch.float32).view(3, 4)
    buffer = bytearray(96)
    first, second = (torch.frombuffer(buffer, dtype=torch.float32, count=12, offset=o).view(3, 4) for o in (0, 48))
    assert second.data_ptr() == first.data_ptr() + first.nbytes  # two storages that are neighbours
    return {
        "two allocations": (torch.randn(2, 4), torch.randn(3, 4)),
        "two storages side by side": (first, second),
        "another order": (a[3:], a[:3]),
        "a gap": (a[:2], a[3:]),
        "an overlap": (a[:3], a[2:]),
        "the same": (neighbours, neighbours),
        "columns": (a[:, :2], a[:, 2:]),
        "transposed": (base[:12].view(4, 3).t(), base[12:24].view(3, 4)),
        "another width": (base[:12].view(3, 4), base[12:24].view(4, 3)),
        "more dims": (base[:12].view(3, 4), base[12:24].view(3, 2, 2)),
        "another dtype": (base[:12].view(3, 4), base.view(torch.int32)[12:24].view(3, 4)),
        "another type": (a[:3], a[3:].as_subclass(Other)),
        "meta": torch.randn(6, 4, device="meta").split(3),
        "no rows, meta": torch.randn(0, 4, device="meta").split(0),
        "sparse": (a[:3].to_sparse(), a[3:].to_sparse()),
    }  # fmt: skip


@pytest.mark.parametrize("why", apart_tensors())
def test_not_joint(why):
    assert joint(apart_tensors()[why]) is None


def test_laid_together_the_parameters_stay_what_they_are(device):
    _, weights, _, _ = problem(device, "apart", dtype=torch.float16)
    weights[1].requires_grad_(False)
    with torch.no_grad():
        weights[0][0, :3] = torch.tensor([-0.0, torch.nan, torch.inf])
    for w in weights[::2]:
        w.grad = torch.randn_like(w)
    grads, bits = [w.grad for w in weights], [w.detach().clone().view(torch.int16) for w in weights]
    objects, versions = list(weights), [w._version for w in weights]
    lay_together(weights)
    assert all(a is b for a, b in zip(weights, objects, strict=True)) and joint(weights) is not None
    assert all(torch.equal(w.detach().view(torch.int16), b) for w, b in zip(weights, bits, strict=True))
    assert all(w.grad is g for w, g in zip(weights, grads, strict=True))
    assert [w._version for w in weights] == versions and [w.requires_grad for w in weights] == [True, False, True]
    assert weights[0].untyped_storage().nbytes() == sum(w.nbytes for w in weights)
    before = [w.data_ptr() for w in weights]
    lay_together(weights)
    assert [w.data_ptr() for w in weights] == before


def test_laid_together_an_optimizer_goes_on(device):
    x, weights, biases, dy = problem(device, "apart")
    optimizer = torch.optim.AdamW(weights, lr=0.1)
    copies = [nn.Parameter(w.detach().clone()) for w in weights]
    other = torch.optim.AdamW(copies, lr=0.1)
    for step in range(3):
        for ws, o in ((weights, optimizer), (copies, other)):
            o.zero_grad()
            packed_linear(x, ws, biases).backward(dy)
            o.step()
        if step == 0:
            lay_together(weights)
    for w, c in zip(weights, copies, strict=True):
        torch.testing.assert_close(w, c)
    assert joint(weights) is not None


def test_laid_together_between_forward_and_backward(device):
    x, weights, biases, dy = problem(device, "apart")
    expected = run(one_by_one, x, weights, biases, dy)[1:]
    y = packed_linear(x, weights, biases)
    lay_together(weights)
    for a, b in zip(torch.autograd.grad(y, trained(x, weights, biases), dy), expected, strict=True):
        torch.testing.assert_close(a, b)


def test_laid_together_again_after_all_were_moved(device):
    _, weights, _, _ = problem(device, "joint")
    for w in weights:
        w.data = w.data.clone()
    lay_together(weights)
    assert joint(weights) is not None


def not_laid():
    """Parameters that stay as they are, by the reason."""
    parameter = lambda *shape, **options: nn.Parameter(torch.randn(shape, **options))  # noqa: E731
    twice, large = parameter(3, 4), torch.randn(9, 4)
    shared = parameter(3, 4)
    shared.data.share_memory_()

    class Quantized(nn.Parameter):
        pass

    return {
        "a subclass": [parameter(3, 4), Quantized(torch.randn(3, 4))],
        "a tensor": [parameter(3, 4), torch.randn(3, 4)],
        "another dtype": [parameter(3, 4), parameter(3, 4, dtype=torch.float64)],
        "another device": [parameter(3, 4), parameter(3, 4, device="meta")],
        "meta": [parameter(3, 4, device="meta"), parameter(3, 4, device="meta")],
        "another width": [parameter(3, 4), parameter(3, 5)],
        "another dim": [parameter(3, 4), parameter(3)],
        "one twice": [twice, twice],
        "part of more": [parameter(3, 4), nn.Parameter(large[:3])],
        "of other processes": [parameter(3, 4), shared],
        "numbers": [parameter(), parameter()],
        "away": [parameter(0), parameter(0)],
    }  # fmt: skip


@pytest.mark.parametrize("why", not_laid())
def test_not_laid_together(why):
    parameters = not_laid()[why]
    before = [(p.data_ptr(), p.untyped_storage()._cdata) for p in parameters]
    lay_together(parameters)
    assert [(p.data_ptr(), p.untyped_storage()._cdata) for p in parameters] == before


def test_laid_together_in_inference_mode():
    """The parameters can be trained afterwards."""
    x, weights, biases, dy = problem("cpu", "apart")
    with torch.inference_mode():
        lay_together(weights)
    assert joint(weights) is not None and not weights[0].is_inference()
    run(packed_linear, x, weights, biases, dy)


# Of a GPU alone.


def on_gpu(laid, dtype=torch.bfloat16):
    x, weights, biases, dy = problem("cuda", laid, (2, 300), dtype, columns=(256, 64, 64), width=256)
    inputs = [x, *weights, *biases]
    return lambda x, *rest: packed_linear(x, rest[:3], rest[3:]), inputs, [dy]


@pytest.mark.gpu
@each_laid
@pytest.mark.parametrize("check", [assert_captures, assert_never_waits])
def test_captured_and_never_waits(check, laid):
    check(*on_gpu(laid))


@pytest.mark.gpu
@each_laid
def test_compiles_on_a_gpu(laid):
    assert_compiles(*on_gpu(laid, torch.float32))


@pytest.mark.gpu
@each_laid
def test_peak_memory(laid):
    """Forward: y. Backward: dx and one buffer for the gradients of all weights, which become their .grad."""
    x, weights, _, dy = problem("cuda", laid, (8192,), torch.bfloat16, "none", (4096, 1024, 1024), 2048)
    for _ in range(2):  # the first makes the workspace of cuBLAS
        x.grad = None
        for w in weights:
            w.grad = None
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        y = packed_linear(x, weights)
        forward = torch.cuda.max_memory_allocated() - before
        y.backward(dy)
        whole = torch.cuda.max_memory_allocated() - before
        del y
    assert forward == dy.nbytes
    assert whole == dy.nbytes + x.nbytes + sum(w.nbytes for w in weights)
