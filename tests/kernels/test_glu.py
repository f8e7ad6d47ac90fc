import functools
import importlib
import itertools

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from ligermodels.errors import InputError
from ligermodels.kernels.glu import glu, glu_linear, glu_linear_reference, glu_reference
from tests.kernels.on_gpu import assert_captures, assert_compiles, assert_never_waits
from tests.kernels.oracle import assert_as_exact, dtypes

module = importlib.import_module("ligermodels.kernels.glu")

ACTIVATIONS = {
    "silu": F.silu,
    "gelu_tanh": functools.partial(F.gelu, approximate="tanh"),
    "gelu": F.gelu,
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
}
SHAPES = [(1, 2), (5, 7 * 2), (2, 3, 129 * 2), (9, 100 * 2), (4, 3, 1500 * 2), (3, 1024 * 2)]
ALMOST_FP64 = dict(rtol=1e-12, atol=1e-12)
"""Two fp64 evaluations of one formula in another order; a thousandth of what fp32 can reach."""
FP32_SLACK = 1.5
"""Of eager's rms error, in fp32: exp is the hardware's, or numpy's when interpreted, whose error is 1 to 2 ulp
where libm's is 0.5. In half precision the last rounding hides that."""
each_activation = pytest.mark.parametrize("activation", ACTIVATIONS)


def eager(gate_up, up=None, *, activation="silu"):
    """As transformers writes it, every operation in the dtype of its input."""
    gate, up = gate_up.chunk(2, dim=-1) if up is None else (gate_up, up)
    h = ACTIVATIONS[activation](gate) * up
    return h


def eager_linear(gate_up, weight, bias=None, *, up=None, **options):
    return F.linear(eager(gate_up, up, **options), weight, bias)


def run(op, inputs, dy, **options):
    leaves = [None if x is None else x.detach().clone().requires_grad_() for x in inputs]
    y = op(*leaves, **options)
    return [y, *torch.autograd.grad(y, [x for x in leaves if x is not None], dy)]


def judge(op, reference, same_dtype, inputs, dy, **options):
    actual = run(op, inputs, dy, **options)
    exact = run(reference, [None if x is None else x.double() for x in inputs], dy.double(), **options)
    allowed = run(same_dtype, inputs, dy, **options)
    for i, (a, b, c) in enumerate(zip(actual, allowed, exact, strict=True)):
        name = f"gradient {i}" if i else "y"
        if a.dtype == torch.float64:
            torch.testing.assert_close(a, c, **ALMOST_FP64, msg=lambda m, name=name: f"{name}: {m}")
        else:
            slack = FP32_SLACK if a.dtype == torch.float32 else 1.0
            assert_as_exact(a, c + slack * (b.double() - c), c, name)


@each_activation
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", dtypes(), ids=str)
def test_output_and_gradient(device, poison, dtype, shape, activation):
    gate_up = torch.randn(shape, dtype=dtype, device=device) * 3
    dy = torch.randn(*shape[:-1], shape[-1] // 2, dtype=dtype, device=device)
    options = dict(activation=activation)
    judge(glu, glu_reference, eager, [gate_up], dy, **options)


@each_activation
@pytest.mark.parametrize("shape", [(5, 7), (2, 3, 129), (3, 1500)], ids=str)
@pytest.mark.parametrize("dtype", dtypes(), ids=str)
def test_two_tensors(device, poison, dtype, shape, activation):
    gate, up, dy = torch.randn(3, *shape, dtype=dtype, device=device) * 3
    options = dict(activation=activation)
    judge(glu, glu_reference, eager, [gate, up], dy, **options)
    halves = run(glu, [torch.cat([gate, up], -1)], dy, **options)
    whole = run(glu, [gate, up], dy, **options)
    assert torch.equal(whole[0], halves[0]) and torch.equal(torch.cat(whole[1:], -1), halves[1])


@pytest.mark.parametrize("trained", [0, 1])
def test_one_of_two_tensors_is_frozen(device, poison, trained):
    tensors = [torch.randn(9, 60, device=device) for _ in range(2)]
    dy = torch.randn(9, 60, device=device)
    expected = run(glu, tensors, dy)[1 + trained]
    tensors[trained].requires_grad_()
    y = glu(*tensors)
    (grad,) = torch.autograd.grad(y, tensors[trained], dy)
    assert torch.equal(grad, expected)
    needs = dict(need_x=trained == 0, need_up=trained == 1)
    grads = module.unit_backward(dy, *tensors, False, "silu", **needs)
    assert grads[1 - trained] is None and torch.equal(grads[trained], expected)


@each_activation
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("shape", [(5, 7 * 2), (2, 3, 129 * 2), (40, 300 * 2)], ids=str)
@pytest.mark.parametrize("dtype", dtypes(), ids=str)
def test_linear_output_and_every_gradient(device, poison, dtype, shape, with_bias, activation):
    gate_up = torch.randn(shape, dtype=dtype, device=device)
    weight = torch.randn(11, shape[-1] // 2, dtype=dtype, device=device)
    bias = torch.randn(11, dtype=dtype, device=device) if with_bias else None
    dy = torch.randn(*shape[:-1], 11, dtype=dtype, device=device)
    judge(glu_linear, glu_linear_reference, eager_linear, [gate_up, weight, bias], dy, activation=activation)


def two(op):
    """`glu_linear` in the order of tensors in which the tests give them: gate, up, weight, bias."""
    return lambda gate, up, weight, bias=None, **options: op(gate, weight, bias, up=up, **options)


@each_activation
@pytest.mark.parametrize("shape", [(5, 7), (2, 3, 129), (40, 300)], ids=str)
@pytest.mark.parametrize("dtype", dtypes(), ids=str)
def test_linear_of_two_tensors(device, poison, dtype, shape, activation):
    """As adapters on gate or on up alone give them: the same bits as of one packed tensor, to every input."""
    gate, up = torch.randn(2, *shape, dtype=dtype, device=device)
    weight, bias = torch.randn(11, shape[-1], dtype=dtype, device=device), torch.randn(11, dtype=dtype, device=device)
    dy = torch.randn(*shape[:-1], 11, dtype=dtype, device=device)
    options = dict(activation=activation)
    judge(two(glu_linear), two(glu_linear_reference), two(eager_linear), [gate, up, weight, bias], dy, **options)
    y, d_gate, d_up, *rest = run(two(glu_linear), [gate, up, weight, bias], dy, **options)
    packed = run(glu_linear, [torch.cat([gate, up], -1), weight, bias], dy, **options)
    for a, b in zip([y, torch.cat([d_gate, d_up], -1), *rest], packed, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("trained", [(0,), (1,), (2,), (3,), (0, 1), (0, 2), (1, 2), (0, 1, 2, 3)], ids=str)
def test_linear_of_two_tensors_frozen(device, poison, trained):
    """Of the activations gate and up alone are kept, and an input without a gradient costs no product."""
    inputs = [torch.randn(s, device=device) for s in ((9, 30), (9, 30), (4, 30), (4,))]
    dy = torch.randn(9, 4, device=device)
    whole = run(two(glu_linear), inputs, dy)
    leaves = [t.clone().requires_grad_(i in trained) for i, t in enumerate(inputs)]
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        y = two(glu_linear)(*leaves)
    with Products() as backward:
        grads = torch.autograd.grad(y, [leaves[i] for i in trained], dy)
    for i, grad in zip(trained, grads, strict=True):
        torch.testing.assert_close(grad, whole[1 + i])
    assert backward.count == (0 in trained or 1 in trained) + (2 in trained)
    assert {t.data_ptr() for t in saved} == {t.data_ptr() for t in leaves[:3]}


@each_activation
def test_far_tails(device, activation):
    """Where exp overflows, nothing else may: the ends are 0 and the identity, as in torch."""
    gate = torch.tensor([-1e10, -1e4, -200.0, -100.0, -30.0, 0.0, 30.0, 100.0, 200.0, 1e4], device=device)
    gate_up = torch.stack([gate, torch.ones_like(gate)], -1).requires_grad_()
    y = glu(gate_up, activation=activation)
    (grad,) = torch.autograd.grad(y.sum(), gate_up)
    expected = ACTIVATIONS[activation](gate.double())[:, None]
    torch.testing.assert_close(y.double(), expected, rtol=1e-6, atol=1e-12)
    torch.testing.assert_close(grad[:, 1:].double(), expected, rtol=1e-6, atol=1e-12)
    slope = (gate > 0) + 0.5 * (gate == 0)
    torch.testing.assert_close(grad[:, 0], slope, rtol=1e-6, atol=1e-10)  # silu'(-30) is -3e-12


def test_activations_differ(device):
    """Negative control: the four are four functions, and no option is read as another."""
    gate_up = torch.randn(5, 14, device=device)
    results = [glu(gate_up, activation=name) for name in ACTIVATIONS]
    assert not any(torch.allclose(a, b) for a, b in itertools.combinations(results, 2))


LAYOUTS = {
    "transposed": lambda t: t.transpose(0, 1).contiguous().transpose(0, 1),
    "columns": lambda t: torch.stack([t, t], -1)[..., 0],
    "part of wider rows": lambda t: torch.cat([t, t], -1)[..., : t.shape[-1]],
    "expanded rows": lambda t: t[:1, :1].expand_as(t),
    "one expanded number": lambda t: t[0, 0, 0].expand_as(t),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(device, poison, layout):
    make = LAYOUTS[layout]
    gate_up, dh, dy = (make(torch.randn(3, 5, n, device=device)) for n in (60, 30, 30))
    weight = make(torch.randn(3, 30, 30, device=device))[0]
    gate, up = make(torch.randn(3, 5, 30, device=device)), torch.randn(3, 5, 30, device=device)
    for op, inputs, grad in (
        (glu, [gate_up], dh), (glu, [gate, up], dh), (glu, [up, gate], dh), (glu_linear, [gate_up, weight], dy)
    ):  # fmt: skip
        leaves = [t.detach().requires_grad_() for t in inputs]
        y = op(*leaves)
        expected = run(op, [t.contiguous() for t in inputs], grad.contiguous())
        for a, b in zip([y, *torch.autograd.grad(y, leaves, grad)], expected, strict=True):
            torch.testing.assert_close(a, b)  # a GEMM on other strides may add in another order


def test_zero_rows(device):
    for shape in ((0, 60), (2, 0, 60)):
        gate_up, weight = torch.randn(shape, device=device), torch.randn(4, 30, device=device)
        y, dx = run(glu, [gate_up], gate_up[..., :30])
        assert y.shape == (*shape[:-1], 30) and dx.shape == shape
        assert all(t.shape == (*shape[:-1], 30) for t in run(glu, gate_up.chunk(2, -1), gate_up[..., :30]))
        y, dx, dw = run(glu_linear, [gate_up, weight], gate_up[..., :4])
        assert y.shape == (*shape[:-1], 4) and dx.shape == shape
        assert torch.equal(dw, torch.zeros_like(weight))


@pytest.mark.parametrize("trained", [(0,), (1,), (2,), (0, 1), (0, 2), (1, 2)], ids=str)
def test_frozen(device, poison, trained):
    inputs = [torch.randn(s, device=device) for s in ((9, 60), (4, 30), (4,))]
    dy = torch.randn(9, 4, device=device)
    whole = run(glu_linear, inputs, dy)
    leaves = [t.clone().requires_grad_(i in trained) for i, t in enumerate(inputs)]
    grads = torch.autograd.grad(glu_linear(*leaves), [leaves[i] for i in trained], dy)
    for i, grad in zip(trained, grads, strict=True):
        torch.testing.assert_close(grad, whole[1 + i])


def test_linear_keeps_gate_up_alone(device):
    """What it is for: of the activations, only the input is saved, and h is not."""
    gate_up = torch.randn(9, 60, device=device, requires_grad=True)
    weight = torch.randn(4, 30, device=device, requires_grad=True)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        glu_linear(gate_up, weight)
    assert {t.data_ptr() for t in saved} == {gate_up.data_ptr(), weight.data_ptr()}


class Products(TorchDispatchMode):
    """Counts matrix products."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("early_stop", [True, False])
def test_checkpointed(device, poison, early_stop, with_bias):
    """The second run ends before the down product, of which nothing is needed, unless it is told to go on."""
    inputs = [torch.randn(s, device=device) for s in ((2, 9, 16), (60, 16), (4, 30), (4,))]
    dy = torch.randn(2, 9, 4, device=device)

    def block(x, up_weight, weight, bias):
        return glu_linear(F.linear(x, up_weight), weight, bias if with_bias else None)

    expected = run(lambda *t: block(*t) + 0 * t[3], inputs, dy)
    leaves = [t.clone().requires_grad_() for t in inputs]
    with Products() as forward, set_checkpoint_early_stop(early_stop):
        y = checkpoint(block, *leaves, use_reentrant=False) + 0 * leaves[3]
    with Products() as backward:
        grads = torch.autograd.grad(y, leaves, dy)
    for a, b in zip([y, *grads], expected, strict=True):
        assert torch.equal(a, b)
    # The backward: the up projection again, dh and dW of the down projection, dx and dW of the up projection.
    assert (forward.count, backward.count) == (2, 5 if early_stop else 6)


@pytest.mark.parametrize("op", [glu, glu_linear])
def test_runs_twice_deterministically_and_overwrites_nothing(device, op):
    gate_up = torch.randn(9, 60, device=device, requires_grad=True)
    weight = torch.randn(30, 30, device=device, requires_grad=True)
    inputs = (gate_up, weight) if op is glu_linear else (gate_up,)
    dy = torch.randn(9, 30, device=device)
    before = [t.detach().clone() for t in (*inputs, dy)]
    y = op(*inputs)
    kept = y.detach().clone()
    first, second = (torch.autograd.grad(y, inputs, dy, retain_graph=True) for _ in range(2))
    for a, b, c in zip(first, second, torch.autograd.grad(op(*inputs), inputs, dy), strict=True):
        assert torch.equal(a, b) and torch.equal(a, c)
    for a, b in zip((*inputs, dy, y), (*before, kept), strict=True):
        assert torch.equal(a, b)


def test_double_backward_raises(device):
    gate_up = torch.randn(3, 8, device=device, requires_grad=True)
    for op in (glu, lambda x: glu_linear(x, torch.eye(4, device=device))):
        (grad,) = torch.autograd.grad(op(gate_up).square().sum(), gate_up, create_graph=True)
        with pytest.raises(RuntimeError, match="twice"):
            grad.sum().backward()


@each_activation
def test_gradcheck(device, activation):
    gate_up, weight, bias = (
        torch.randn(s, dtype=torch.float64, device=device, requires_grad=True) for s in ((2, 6), (2, 3), (2,))
    )
    options = dict(activation=activation)
    scaled = options
    up = torch.randn_like(gate_up, requires_grad=True)
    for op in (glu, glu_reference):
        assert torch.autograd.gradcheck(functools.partial(op, **scaled), gate_up)
        assert torch.autograd.gradcheck(functools.partial(op, **scaled), (gate_up, up))
    for op in (glu_linear, glu_linear_reference):
        assert torch.autograd.gradcheck(functools.partial(op, **options), (gate_up, weight, bias))
        halves = [t.detach().requires_grad_() for t in gate_up.chunk(2, -1)]
        assert torch.autograd.gradcheck(functools.partial(two(op), **options), (*halves, weight, bias))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("triton_path", [True, False])
def test_linear_under_autocast(device, monkeypatch, dtype, triton_path):
    """Weights stay fp32, results and gradients are of the dtypes F.linear gives; `dtype` is gate_up's."""
    if not triton_path:
        monkeypatch.setattr(module, "use_triton", lambda x: False)
    inputs = [torch.randn(9, 60, device=device).to(dtype)] + [torch.randn(s, device=device) for s in ((4, 30), (4,))]

    def under_autocast(op, *inputs):
        with torch.autocast(device, dtype=torch.float16):
            return op(*inputs)

    dy = torch.randn(9, 4, device=device).half()
    actual, expected = (
        run(functools.partial(under_autocast, op), inputs, dy) for op in (glu_linear, glu_linear_reference)
    )
    exact = run(glu_linear_reference, [t.double() for t in inputs], dy.double())
    for a, b, c in zip(actual, expected, exact, strict=True):
        assert a.dtype == b.dtype
        # Half precision GEMMs of 30 or 9 terms, on inputs rounded to half: some ulp of the largest terms.
        torch.testing.assert_close(a.double(), c, rtol=1e-2, atol=5e-2)


def test_reference_path_compiles_whole(monkeypatch):
    monkeypatch.setattr(module, "use_triton", lambda x: False)
    inputs = [torch.randn(s, requires_grad=True) for s in ((2, 3, 60), (4, 30), (4,))]
    assert_compiles(glu_linear, inputs, [torch.randn(2, 3, 4)], backend="aot_eager")
    assert_compiles(glu, inputs[:1], [torch.randn(2, 3, 30)], backend="aot_eager")
    halves = [t.detach().requires_grad_() for t in inputs[0].chunk(2, -1)]
    assert_compiles(glu, halves, [torch.randn(2, 3, 30)], backend="aot_eager")
    assert_compiles(two(glu_linear), [*halves, *inputs[1:]], [torch.randn(2, 3, 4)], backend="aot_eager")


def test_errors(device):
    gate_up, weight = torch.randn(3, 8, device=device), torch.randn(2, 4, device=device)
    for message, call in {
        "activation='relu'; supported are 'silu'": lambda: glu(gate_up, activation="relu"),
        "gate_up is the gate alone": lambda: glu(gate_up, gate_up[:, :4]),
        r"float32 on \w+(:0)?, up \(3, 8\), torch.float64": lambda: glu(gate_up, gate_up.double()),
        r"gate_up has .* expected floating point \[..., F\]": lambda: glu(gate_up.long(), gate_up.long()),
        r"expected floating point \[..., 2F\]": lambda: glu(gate_up[:, :7]),
        r"\[gate \| up\]": lambda: glu(gate_up.long()),
        r"expected \[N, 4\]": lambda: glu_linear(gate_up, weight[:, :3]),
        r"glu_linear: .*up \(3, 7\).* gate_up is the gate alone": lambda: glu_linear(
            gate_up, gate_up, up=gate_up[:, :7]
        ),
        r"expected \[N, 8\]": lambda: glu_linear(gate_up, weight, up=gate_up),
        "bias": lambda: glu_linear(gate_up, weight, weight[0]),
        "one dtype": lambda: glu_linear(gate_up, weight.double()),
        "on meta": lambda: glu_linear(gate_up, weight.to("meta")),
    }.items():
        with pytest.raises(InputError, match=message):
            call()


def on_gpu(dtype, rows, width, size=64):
    inputs = [torch.randn(s, dtype=dtype, device="cuda") for s in ((rows, 2 * width), (size, width), (size,))]
    dh, dy = (torch.randn(rows, n, dtype=dtype, device="cuda") for n in (width, size))
    return [t.requires_grad_() for t in inputs], dh, dy


@pytest.mark.gpu
@each_activation
@pytest.mark.parametrize("dynamic", [False, True])
def test_triton_path_compiles_whole(activation, dynamic):
    inputs, dh, dy = on_gpu(torch.float32, 70, 1500)
    assert_compiles(functools.partial(glu, activation=activation), inputs[:1], [dh], dynamic=dynamic)
    halves = [t.detach().clone().requires_grad_() for t in inputs[0].chunk(2, -1)]
    assert_compiles(functools.partial(glu, activation=activation), halves, [dh], dynamic=dynamic)
    apart = functools.partial(two(glu_linear), activation=activation)
    assert_compiles(apart, [*halves, *inputs[1:]], [dy], dynamic=dynamic)
    assert_compiles(functools.partial(glu_linear, activation=activation), inputs, [dy], dynamic=dynamic)


@pytest.mark.gpu
@pytest.mark.parametrize("check", [assert_captures, assert_never_waits])
def test_captured_and_never_waits(check):
    inputs, dh, dy = on_gpu(torch.bfloat16, 300, 1536)
    check(glu, inputs[:1], [dh])
    check(glu, [t.detach().clone().requires_grad_() for t in inputs[0].chunk(2, -1)], [dh])
    check(glu_linear, inputs, [dy])
    halves = [t.detach().clone().requires_grad_() for t in inputs[0].chunk(2, -1)]
    check(two(glu_linear), [*halves, *inputs[1:]], [dy])


@pytest.mark.gpu
@each_activation
@pytest.mark.parametrize("width", [768, 8192, 11008, 14336, 18944])
def test_model_widths(activation, width):
    inputs, dh, _ = on_gpu(torch.bfloat16, 100, width)
    judge(glu, glu_reference, eager, inputs[:1], dh, activation=activation)
    judge(glu, glu_reference, eager, inputs[0].detach().chunk(2, -1), dh, activation=activation)


@pytest.mark.gpu
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("activation", ["silu", "quick_gelu"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_what_is_written_over_was_read_before(dtype, activation, packed):
    """Rows of dh 1000 apart, no multiple of 16: Triton gives a thread 8 neighbours to load and 1 at a time to store, so
    that h is written where others read dh. Without a barrier they may read h (seen where there is no gate)."""
    rows, width = 4096, 1000
    x = torch.randn(rows, width * (1 + packed), dtype=dtype, device="cuda")
    dh = torch.randn(rows, width, dtype=dtype, device="cuda")
    exact = x.double().requires_grad_()
    h = glu_reference(exact, activation=activation) if packed else ACTIVATIONS[activation](exact)
    expected = torch.autograd.grad(h, exact, dh.double())[0], h.detach()

    def once(over):
        place = dh.clone()
        return module.unit_backward(place, x.clone(), None, packed, activation, emit=True, over=over)[0], place

    first = once(over=False)
    for a, b in zip(first, expected, strict=True):
        # Half of eps is the rounding; the rest, and 4 ulp of fp32 numbers as large as 64, are for the math before it.
        torch.testing.assert_close(a.double(), b, rtol=torch.finfo(dtype).eps, atol=2**-16)
    for i in range(20):
        assert all(map(torch.equal, once(over=i % 2 == 0), first))


@pytest.mark.gpu
def test_more_than_2_31_elements():
    width = 8192
    rows = 2**31 // width + 9  # h alone has 2^31 elements, gate_up twice that
    gate_up = torch.randn(rows, 2 * width, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    h = glu(gate_up)
    dh = torch.randn_like(h)
    (grad,) = torch.autograd.grad(h, gate_up, dh)
    expected = run(glu, [gate_up[-8:]], dh[-8:])
    assert torch.equal(h[-8:], expected[0])
    assert torch.equal(grad[-8:], expected[1])
    halves = [t.detach().requires_grad_() for t in gate_up.chunk(2, -1)]
    for a, b in zip(torch.autograd.grad(glu(*halves), halves, dh), grad.chunk(2, -1), strict=True):
        assert torch.equal(a[-8:], b[-8:])
    del grad, dh, expected, halves, a, b
    weight = torch.randn(16, width, dtype=torch.bfloat16, device="cuda")
    dy = torch.randn(rows, 16, dtype=torch.bfloat16, device="cuda")
    (grad,) = torch.autograd.grad(glu_linear(gate_up, weight), gate_up, dy)
    expected = run(glu_linear_reference, [gate_up[-8:], weight], dy[-8:])[1]
    torch.testing.assert_close(grad[-8:], expected, rtol=2e-2, atol=2e-2)  # dh is rounded to bf16 in both
