import functools
import importlib
import itertools

import pytest
import torch
import torch.nn.functional as F

from ligermodels.errors import InputError
from ligermodels.kernels.activation import (
    activate,
    activate_reference,
    activation_linear,
    activation_linear_reference,
)
from tests.kernels.on_gpu import assert_captures, assert_compiles, assert_never_waits
from tests.kernels.oracle import assert_as_exact, dtypes

module = importlib.import_module("ligermodels.kernels.activation")

ACTIVATIONS = {
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "gelu": F.gelu,
    "gelu_tanh": functools.partial(F.gelu, approximate="tanh"),
    "silu": F.silu,
}
SHAPES = [(1, 1), (5, 7), (2, 3, 129), (9, 1500)]
ALMOST_FP64 = dict(rtol=1e-12, atol=1e-12)
"""Two fp64 evaluations of one formula in another order; a thousandth of what fp32 can reach."""
FP32_SLACK = 1.5
"""Of eager's rms error, in fp32: exp is the hardware's, or numpy's when interpreted, whose error is 1 to 2 ulp
where libm's is 0.5. In half precision the last rounding hides that."""
each_activation = pytest.mark.parametrize("activation", ACTIVATIONS)


def eager(x, *, activation):
    return ACTIVATIONS[activation](x)


def eager_linear(x, weight, bias=None, *, activation):
    return F.linear(eager(x, activation=activation), weight, bias)


def run(op, inputs, dy, **options):
    leaves = [None if x is None else x.detach().clone().requires_grad_() for x in inputs]
    y = op(*leaves, **options)
    return [y, *torch.autograd.grad(y, [x for x in leaves if x is not None], dy)]


def judge(op, reference, same_dtype, inputs, dy, **options):
    actual = run(op, inputs, dy, **options)
    exact = run(reference, [None if x is None else x.double() for x in inputs], dy.double(), **options)
    allowed = run(same_dtype, inputs, dy, **options)
    for name, a, b, c in zip(("y", "dx", "dweight", "dbias"), actual, allowed, exact, strict=False):
        if a.dtype == torch.float64:
            torch.testing.assert_close(a, c, **ALMOST_FP64, msg=lambda m, name=name: f"{name}: {m}")
        else:
            slack = FP32_SLACK if a.dtype == torch.float32 else 1.0
            assert_as_exact(a, c + slack * (b.double() - c), c, name)


@each_activation
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", dtypes(), ids=str)
def test_output_and_gradient(device, poison, dtype, shape, activation):
    x, dy = torch.randn(2, *shape, dtype=dtype, device=device)
    judge(activate, activate_reference, eager, [x * 3], dy, activation=activation)


@each_activation
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("shape", [(5, 7), (2, 3, 129), (40, 300)], ids=str)
@pytest.mark.parametrize("dtype", dtypes(), ids=str)
def test_linear_output_and_every_gradient(device, poison, dtype, shape, with_bias, activation):
    x = torch.randn(shape, dtype=dtype, device=device)
    weight = torch.randn(11, shape[-1], dtype=dtype, device=device)
    bias = torch.randn(11, dtype=dtype, device=device) if with_bias else None
    dy = torch.randn(*shape[:-1], 11, dtype=dtype, device=device)
    judge(activation_linear, activation_linear_reference, eager_linear, [x, weight, bias], dy, activation=activation)


@each_activation
def test_far_tails(device, activation):
    """Where exp overflows, nothing else may: the ends are 0 and the identity, as in torch."""
    x = torch.tensor([-1e10, -1e4, -200.0, -100.0, -30.0, 0.0, 30.0, 100.0, 200.0, 1e4], device=device)
    x.requires_grad_()
    y = activate(x, activation=activation)
    (grad,) = torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close(y.double(), ACTIVATIONS[activation](x.double()), rtol=1e-6, atol=1e-12)
    slope = (x > 0) + 0.5 * (x == 0)
    torch.testing.assert_close(grad, slope, rtol=1e-6, atol=1e-10)


def test_activations_differ(device):
    """Negative control: the four are four functions, and no option is read as another."""
    x = torch.randn(5, 14, device=device)
    results = [activate(x, activation=name) for name in ACTIVATIONS]
    assert not any(torch.allclose(a, b) for a, b in itertools.combinations(results, 2))


@pytest.mark.parametrize("ours, theirs", [
    ("quick_gelu", "quick_gelu"), ("gelu", "gelu"), ("gelu_tanh", "gelu_pytorch_tanh"),
])  # fmt: skip
def test_references_are_those_of_transformers(ours, theirs):
    """By the name that a config.json gives them."""
    functions = pytest.importorskip("transformers.activations").ACT2FN
    x = torch.randn(5, 64) * 3
    torch.testing.assert_close(activate_reference(x, activation=ours), functions[theirs](x), rtol=0, atol=0)


LAYOUTS = {
    "transposed": lambda t: t.transpose(0, 1).contiguous().transpose(0, 1),
    "columns": lambda t: torch.stack([t, t], -1)[..., 0],
    "part of wider rows": lambda t: torch.cat([t, t], -1)[..., : t.shape[-1]],
    "expanded rows": lambda t: t[:1, :1].expand_as(t),
    "one expanded number": lambda t: t[0, 0, 0].expand_as(t),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(device, poison, layout):
    make, options = LAYOUTS[layout], dict(activation="quick_gelu")
    x, dy = (make(torch.randn(3, 5, 30, device=device)) for _ in range(2))
    weight = make(torch.randn(3, 30, 30, device=device))[0]
    for op, inputs in ((activate, [x]), (activation_linear, [x, weight])):
        leaves = [t.detach().requires_grad_() for t in inputs]
        y = op(*leaves, **options)
        expected = run(op, [t.contiguous() for t in inputs], dy.contiguous(), **options)
        for a, b in zip([y, *torch.autograd.grad(y, leaves, dy)], expected, strict=True):
            torch.testing.assert_close(a, b)  # a GEMM on other strides may add in another order


def test_zero_rows_and_one_row(device):
    for shape in ((0, 30), (2, 0, 30), (30,)):
        x, weight = torch.randn(shape, device=device), torch.randn(4, 30, device=device)
        y, dx = run(activate, [x], x, activation="gelu")
        assert y.shape == dx.shape == shape
        y, dx, dw = run(activation_linear, [x, weight], torch.ones(*shape[:-1], 4, device=device), activation="gelu")
        assert y.shape == (*shape[:-1], 4) and dx.shape == shape
        assert dw.any() == (x.numel() > 0)


@pytest.mark.parametrize("trained", [(0,), (1,), (2,), (0, 1), (0, 2), (1, 2)], ids=str)
def test_frozen(device, poison, trained):
    inputs = [torch.randn(s, device=device) for s in ((9, 30), (4, 30), (4,))]
    dy = torch.randn(9, 4, device=device)
    whole = run(activation_linear, inputs, dy, activation="gelu")
    leaves = [t.clone().requires_grad_(i in trained) for i, t in enumerate(inputs)]
    y = activation_linear(*leaves, activation="gelu")
    for i, grad in zip(trained, torch.autograd.grad(y, [leaves[i] for i in trained], dy), strict=True):
        torch.testing.assert_close(grad, whole[1 + i])


def test_linear_keeps_its_input_alone(device):
    """What it is for: of the activations, only the input is saved, and act(x) is not."""
    x = torch.randn(9, 30, device=device, requires_grad=True)
    weight = torch.randn(4, 30, device=device, requires_grad=True)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        activation_linear(x, weight, activation="quick_gelu")
    assert {t.data_ptr() for t in saved} == {x.data_ptr(), weight.data_ptr()}


@pytest.mark.parametrize("op", [activate, activation_linear])
def test_runs_twice_deterministically_and_overwrites_nothing(device, op):
    x = torch.randn(9, 30, device=device, requires_grad=True)
    weight = torch.randn(30, 30, device=device, requires_grad=True)
    inputs = (x, weight) if op is activation_linear else (x,)
    dy = torch.randn(9, 30, device=device)
    before = [t.detach().clone() for t in (*inputs, dy)]
    y = op(*inputs, activation="quick_gelu")
    kept = y.detach().clone()
    first, second = (torch.autograd.grad(y, inputs, dy, retain_graph=True) for _ in range(2))
    again = torch.autograd.grad(op(*inputs, activation="quick_gelu"), inputs, dy)
    for a, b, c in zip(first, second, again, strict=True):
        assert torch.equal(a, b) and torch.equal(a, c)
    for a, b in zip((*inputs, dy, y), (*before, kept), strict=True):
        assert torch.equal(a, b)


def test_double_backward_raises(device):
    x, weight = torch.randn(3, 8, device=device, requires_grad=True), torch.eye(8, device=device)
    for y in (activate(x, activation="gelu"), activation_linear(x, weight, activation="gelu")):
        (grad,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="twice"):
            grad.sum().backward()


@each_activation
def test_gradcheck(device, activation):
    x, weight, bias = (
        torch.randn(s, dtype=torch.float64, device=device, requires_grad=True) for s in ((2, 3), (2, 3), (2,))
    )
    for op in (activate, activate_reference):
        assert torch.autograd.gradcheck(functools.partial(op, activation=activation), x)
    for op in (activation_linear, activation_linear_reference):
        assert torch.autograd.gradcheck(functools.partial(op, activation=activation), (x, weight, bias))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("triton_path", [True, False])
def test_linear_under_autocast(device, monkeypatch, dtype, triton_path):
    """Weights stay fp32, results and gradients are of the dtypes F.linear gives; `dtype` is x's."""
    if not triton_path:
        monkeypatch.setattr(module, "use_triton", lambda x: False)
    inputs = [torch.randn(9, 30, device=device).to(dtype)] + [torch.randn(s, device=device) for s in ((4, 30), (4,))]

    def under_autocast(op, *inputs):
        with torch.autocast(device, dtype=torch.float16):
            return op(*inputs, activation="quick_gelu")

    dy = torch.randn(9, 4, device=device).half()
    actual, expected = (
        run(functools.partial(under_autocast, op), inputs, dy)
        for op in (activation_linear, activation_linear_reference)
    )
    exact = run(activation_linear_reference, [t.double() for t in inputs], dy.double(), activation="quick_gelu")
    for a, b, c in zip(actual, expected, exact, strict=True):
        assert a.dtype == b.dtype
        # Half precision GEMMs of 30 or 9 terms, on inputs rounded to half: some ulp of the largest terms.
        torch.testing.assert_close(a.double(), c, rtol=1e-2, atol=5e-2)


def test_reference_path_compiles_whole(monkeypatch):
    monkeypatch.setattr(module, "use_triton", lambda x: False)
    inputs = [torch.randn(s, requires_grad=True) for s in ((2, 3, 30), (4, 30), (4,))]
    op = functools.partial(activation_linear, activation="quick_gelu")
    assert_compiles(op, inputs, [torch.randn(2, 3, 4)], backend="aot_eager")


def test_errors(device):
    x, weight = torch.randn(3, 4, device=device), torch.randn(2, 4, device=device)
    gelu = dict(activation="gelu")
    for message, call in {
        "activate: activation='relu'; supported are 'silu', .*'quick_gelu'": lambda: activate(x, activation="relu"),
        "F >= 1": lambda: activate(x[:, :0], **gelu),
        "int64": lambda: activate(x.long(), **gelu),
        r"expected \[N, 4\]": lambda: activation_linear(x, weight[:, :3], **gelu),
        "bias": lambda: activation_linear(x, weight, weight[0], **gelu),
        "one dtype": lambda: activation_linear(x, weight.double(), **gelu),
        "on meta": lambda: activation_linear(x, weight.to("meta"), **gelu),
    }.items():
        with pytest.raises(InputError, match=message):
            call()


def on_gpu(dtype, rows, width, size=64):
    inputs = [torch.randn(s, dtype=dtype, device="cuda") for s in ((rows, width), (size, width), (size,))]
    dh, dy = (torch.randn(rows, n, dtype=dtype, device="cuda") for n in (width, size))
    return [t.requires_grad_() for t in inputs], dh, dy


@pytest.mark.gpu
@each_activation
@pytest.mark.parametrize("dynamic", [False, True])
def test_triton_path_compiles_whole(activation, dynamic):
    inputs, dh, dy = on_gpu(torch.float32, 70, 1500)
    assert_compiles(functools.partial(activate, activation=activation), inputs[:1], [dh], dynamic=dynamic)
    assert_compiles(functools.partial(activation_linear, activation=activation), inputs, [dy], dynamic=dynamic)


@pytest.mark.gpu
@pytest.mark.parametrize("check", [assert_captures, assert_never_waits])
def test_captured_and_never_waits(check):
    inputs, dh, dy = on_gpu(torch.bfloat16, 300, 1536)
    check(functools.partial(activate, activation="quick_gelu"), inputs[:1], [dh])
    check(functools.partial(activation_linear, activation="quick_gelu"), inputs, [dy])


@pytest.mark.gpu
@each_activation
@pytest.mark.parametrize("width", [1280, 5120])
def test_model_widths(activation, width):
    inputs, dh, _ = on_gpu(torch.bfloat16, 100, width)
    judge(activate, activate_reference, eager, inputs[:1], dh, activation=activation)


@pytest.mark.gpu
def test_more_than_2_31_elements():
    width, options = 8192, dict(activation="quick_gelu")
    rows = 2**31 // width + 9
    x = torch.randn(rows, width, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    h = activate(x, **options)
    dh = torch.randn_like(h)
    (grad,) = torch.autograd.grad(h, x, dh)
    expected = run(activate, [x[-8:]], dh[-8:], **options)
    assert torch.equal(h[-8:], expected[0])
    assert torch.equal(grad[-8:], expected[1])
    del h, grad, dh, expected
    weight = torch.randn(16, width, dtype=torch.bfloat16, device="cuda")
    dy = torch.randn(rows, 16, dtype=torch.bfloat16, device="cuda")
    (grad,) = torch.autograd.grad(activation_linear(x, weight, **options), x, dy)
    expected = run(activation_linear_reference, [x[-8:], weight], dy[-8:], **options)[1]
    torch.testing.assert_close(grad[-8:], expected, rtol=2e-2, atol=2e-2)  # dh is rounded to bf16 in both
