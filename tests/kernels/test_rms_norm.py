import functools
import importlib

import pytest
import torch

from ligermodels.errors import InputError
from ligermodels.kernels.rms_norm import add_rms_norm, add_rms_norm_reference, rms_norm, rms_norm_reference
from tests.kernels.on_gpu import assert_captures, assert_compiles, assert_never_waits
from tests.kernels.oracle import assert_as_exact, dtypes

module = importlib.import_module("ligermodels.kernels.rms_norm")
shared = importlib.import_module("ligermodels.kernels._norm")

ALMOST_FP64 = dict(rtol=1e-12, atol=1e-12)
"""Two fp64 results that differ in the order of their sums: 4500 ulp, and a thousandth of what fp32 can reach."""

OPTIONS = [
    dict(cast_before_weight=True, offset=0.0),
    dict(cast_before_weight=True, offset=1.0, eps=0.5),
    dict(cast_before_weight=False, offset=1.0),
    dict(cast_before_weight=False, offset=0.0, eps=0.5),
]
SHAPES = [(65, 7), (3, 5, 129), (64, 256), (33, 2050)]
"""Many rows to a program, several, and one; programs get several tiles."""

FP32_SLACK = {"y": 1.25, "sum": 1.0, "dx": 1.25, "dweight": 4.0}
"""Of eager's error in fp32, where no last rounding hides that of the statistics. The error of rstd is one per row,
so that chance averages over a few rows only; the rows of dweight are summed in a tree on a GPU, but one by one when
interpreted."""


@pytest.fixture
def narrow_is_wide(monkeypatch):
    """Rows above 64 columns take the path of rows that do not fit in registers."""
    monkeypatch.setattr(shared, "_WIDEST", (64, 64))
    monkeypatch.setattr(shared, "_WIDE", (64, 32))


def eager(x, weight, *, eps=1e-6, offset=0.0, cast_before_weight):
    """As transformers writes it: LlamaRMSNorm and GemmaRMSNorm."""
    h = x.float() if x.dtype != torch.float64 else x
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + eps)
    if weight is None:
        return h.to(x.dtype)
    if cast_before_weight:
        return (offset + weight) * h.to(x.dtype)
    return (h * (offset + weight.to(h.dtype))).to(x.dtype)


def eager_add(x, residual, weight, **options):
    return eager(x + residual, weight, **options), x + residual


def run(op, inputs, grads, **options):
    """Outputs of op and the gradients of its inputs; None inputs are passed on."""
    leaves = [None if x is None else x.detach().clone().requires_grad_() for x in inputs]
    outputs = op(*leaves, **options)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    trained = [x for x in leaves if x is not None]
    return [*outputs, *torch.autograd.grad(outputs, trained, grads)]


def judge(op, reference, same_dtype, inputs, grads, **options):
    actual = run(op, inputs, grads, **options)
    double = [None if x is None else x.double() for x in inputs]
    exact = run(reference, double, [g.double() for g in grads], **options)
    names = ["y", "sum"][: len(grads)] + ["dx"] * len(grads) + ["dweight"]
    if actual[0].dtype == torch.float64:
        for name, a, b in zip(names, actual, exact, strict=False):
            torch.testing.assert_close(a, b, **ALMOST_FP64, msg=lambda m, name=name: f"{name}: {m}")
        return
    allowed = run(same_dtype, inputs, grads, **options)
    for name, a, b, c in zip(names, actual, allowed, exact, strict=False):
        slack = FP32_SLACK[name] if a.dtype == torch.float32 else 1.0
        assert_as_exact(a, c + slack * (b.double() - c), c, name)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", dtypes(), ids=str)
def test_output_and_every_gradient(device, poison, dtype, shape, options):
    x = torch.randn(shape, dtype=dtype, device=device)
    weight = torch.randn(shape[-1], dtype=dtype, device=device)
    judge(rms_norm, rms_norm_reference, eager, [x, weight], [torch.randn_like(x)], **options)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", dtypes(), ids=str)
def test_sum_output_and_every_gradient(device, poison, dtype, shape, options):
    x, residual = torch.randn(2, *shape, dtype=dtype, device=device)
    weight = torch.randn(shape[-1], dtype=dtype, device=device)
    grads = list(torch.randn(2, *shape, dtype=dtype, device=device))
    judge(add_rms_norm, add_rms_norm_reference, eager_add, [x, residual, weight], grads, **options)


@pytest.mark.parametrize("options", OPTIONS[::3], ids=str)
@pytest.mark.parametrize("dtype", dtypes(), ids=str)
def test_wide_rows(device, poison, narrow_is_wide, dtype, options):
    x, residual, dy, dtotal = torch.randn(4, 21, 150, dtype=dtype, device=device)
    weight = torch.randn(150, dtype=dtype, device=device)
    judge(rms_norm, rms_norm_reference, eager, [x, weight], [dy], **options)
    judge(add_rms_norm, add_rms_norm_reference, eager_add, [x, residual, weight], [dy, dtotal], **options)


@pytest.mark.parametrize("width", [2, 48, 1280, 17001, 131072])
def test_any_width(device, poison, width):
    """One tile, two in the backward, and two passes; `test_width_one` has the narrowest row of all."""
    x, residual, dy, dtotal = torch.randn(4, 5 if width < 2**16 else 2, width, device=device)
    inputs = [x, residual, torch.randn(width, device=device)]
    judge(add_rms_norm, add_rms_norm_reference, eager_add, inputs, [dy, dtotal], cast_before_weight=True)


WIDTHS = pytest.mark.parametrize("width", [60, 150])
"""A row of one tile, and with `narrow_is_wide` one of several."""


@WIDTHS
def test_no_weight(device, poison, narrow_is_wide, width):
    x, residual, dy, dtotal = torch.randn(4, 21, width, device=device)
    judge(rms_norm, rms_norm_reference, eager, [x, None], [dy], cast_before_weight=True)
    judge(add_rms_norm, add_rms_norm_reference, eager_add, [x, residual, None], [dy, dtotal], cast_before_weight=False)


def test_width_one(device, poison):
    """Each gradient is the difference of two equal numbers: judged by the size of those, not by its own."""
    x, residual, dy, dtotal = torch.randn(4, 67, 1, device=device)
    weight = torch.randn(1, device=device)
    actual = run(add_rms_norm, [x, residual, weight], [dy, dtotal])
    exact = run(add_rms_norm_reference, [t.double() for t in (x, residual, weight)], [dy.double(), dtotal.double()])
    assert_as_exact(actual[0], actual[0], exact[0])
    size = dtotal.abs() + (dy * weight).abs() * torch.rsqrt((x + residual).square() + 1e-6)
    assert ((actual[2] - exact[2]).abs() <= 8 * torch.finfo(torch.float32).eps * size).all()
    torch.testing.assert_close(actual[4].double(), exact[4], rtol=1e-5, atol=0)


def test_castings_differ(device):
    """Negative control: in half precision the two orders are two functions, and each is its reference's."""
    x, weight = torch.randn(64, 512, device=device).half(), torch.randn(512, device=device).half()
    llama, gemma = rms_norm(x, weight, cast_before_weight=True), rms_norm(x, weight, cast_before_weight=False)
    assert not torch.equal(llama, gemma)
    for early, y in ((True, llama), (False, gemma)):
        # Sums in another order move rstd by an fp32 ulp, which flips few of the half precision roundings.
        assert (y != rms_norm_reference(x, weight, cast_before_weight=early)).float().mean() < 0.01


def test_norm_reads_the_rounded_sum(device):
    x, residual = torch.randn(2, 64, 512, device=device).half()
    y, total = add_rms_norm(x, residual)
    assert torch.equal(total, x + residual)
    assert (y != rms_norm(total)).float().mean() < 0.01  # of the unrounded sum, a fifth differs


@WIDTHS
def test_mixed_dtypes(device, poison, narrow_is_wide, width):
    """Autocast's mixtures: an fp32 weight, and an fp32 residual stream, with half precision x."""
    x, dy = torch.randn(2, 9, width, device=device).half()
    weight, residual = torch.randn(width, device=device), torch.randn(9, width, device=device)
    y, dx, dw = run(rms_norm, [x, weight], [dy])
    assert (y.dtype, dx.dtype, dw.dtype) == (torch.float16, torch.float16, torch.float32)
    assert_as_exact(dw, dw, run(rms_norm_reference, [x.double(), weight.double()], [dy.double()])[2])
    torch.testing.assert_close(y, rms_norm_reference(x, weight))

    inputs, grads = [x, residual, weight], list(torch.randn(2, 9, width, device=device))
    actual, exact = (
        run(op, [t.double() if double else t for t in inputs], [g.double() if double else g for g in grads])
        for op, double in ((add_rms_norm, False), (add_rms_norm_reference, True))
    )
    assert [t.dtype for t in actual] == [torch.float32] * 2 + [torch.float16] + [torch.float32] * 2
    for a, b in zip(actual, exact, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=2e-3 if a.dtype == torch.float16 else 1e-5, atol=1e-5)


def test_frozen_weight_costs_nothing(device, poison, monkeypatch):
    x, residual, weight, dy, dtotal = (torch.randn(65, 96, device=device) for _ in range(5))
    weight = weight[0]
    whole = run(add_rms_norm, [x, residual, weight], [dy, dtotal])
    monkeypatch.setattr(shared, "sum_parts_kernel", None)  # calling it would raise
    leaves = [t.clone().requires_grad_() for t in (x, residual)]
    for expected, actual in zip(
        whole[2:4], torch.autograd.grad(add_rms_norm(*leaves, weight), leaves, (dy, dtotal)), strict=True
    ):
        torch.testing.assert_close(actual, expected)


@WIDTHS
def test_frozen_input_with_trained_weight(device, poison, narrow_is_wide, width):
    x, dy = torch.randn(2, 9, width, device=device)
    weight = torch.randn(width, device=device)
    expected = run(rms_norm, [x, weight], [dy])[2]
    leaf = weight.clone().requires_grad_()
    # Another specialisation of the kernel: the compiler may contract its multiply-adds otherwise.
    torch.testing.assert_close(torch.autograd.grad(rms_norm(x, leaf), leaf, dy)[0], expected, rtol=1e-6, atol=1e-6)
    rstd = torch.rsqrt(x.square().mean(-1) + 1e-6)
    made = shared._backward(dy, None, x, weight, rstd, 0.0, False, False, torch.float32, None)
    assert [grad is not None for grad in made] == [False, True, False]


def test_only_the_residual_is_trained(device):
    x, residual, weight = torch.randn(9, 96, device=device), torch.randn(9, 96, device=device), None
    leaf = residual.clone().requires_grad_()
    dy, dtotal = torch.randn(2, 9, 96, device=device)
    expected = run(add_rms_norm, [x, residual, weight], [dy, dtotal])[3]
    torch.testing.assert_close(torch.autograd.grad(add_rms_norm(x, leaf), leaf, (dy, dtotal))[0], expected)


@pytest.mark.parametrize("used", [0, 1])
def test_one_output_used(device, poison, used):
    inputs = [torch.randn(9, 96, device=device) for _ in range(2)] + [torch.randn(96, device=device)]
    dy = torch.randn(9, 96, device=device)
    results = []
    for op in (add_rms_norm, add_rms_norm_reference):
        leaves = [t.clone().requires_grad_() for t in inputs]
        results.append(torch.autograd.grad(op(*leaves)[used], leaves, dy, allow_unused=True))
    for actual, expected in zip(*results, strict=True):
        assert (actual is None) == (expected is None)
        if actual is not None:
            torch.testing.assert_close(actual, expected)


def test_both_outputs_get_one_and_the_same_gradient_tensor(device):
    x, residual, dy = torch.randn(3, 9, 96, device=device)
    expected = run(add_rms_norm_reference, [x, residual, None], [dy, dy])[2]
    leaf = x.clone().requires_grad_()
    outputs = shared.Norm.apply(leaf, residual, None, None, 1e-6, 0.0, False, True)
    torch.testing.assert_close(torch.autograd.grad(outputs, leaf, (dy, dy))[0], expected)


def test_many_partial_sums_of_dweight(device, poison, monkeypatch):
    """As many programs as on a GPU, or more: the kernel that sums their parts takes several turns."""
    monkeypatch.setattr(shared, "num_sms", lambda index: 30)
    x, dy = torch.randn(2, 300, 1030, device=device)
    judge(rms_norm, rms_norm_reference, eager, [x, torch.randn(1030, device=device)], [dy], cast_before_weight=True)


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
    x, residual, dy, dtotal = (make(t) for t in torch.randn(4, 3, 5, 96, device=device))
    weight = make(torch.randn(3, 5, 96, device=device))[0, 0]
    for op, inputs, grads in (
        (rms_norm, [x, weight], [dy]),
        (add_rms_norm, [x, residual, weight], [dy, dtotal]),
    ):
        leaves = [t.detach().requires_grad_() for t in inputs]
        outputs = op(*leaves)
        actual = torch.autograd.grad(outputs, leaves, grads if len(grads) > 1 else grads[0])
        expected = run(op, [t.contiguous() for t in inputs], [g.contiguous() for g in grads])
        for a, b in zip([*(outputs if isinstance(outputs, tuple) else [outputs]), *actual], expected, strict=True):
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize("shape", [(0, 96), (2, 0, 1)], ids=str)
def test_zero_rows(device, shape):
    x, weight = torch.randn(shape, device=device), torch.randn(shape[-1], device=device)
    y, dx, dw = run(rms_norm, [x, weight], [x])
    assert y.shape == dx.shape == shape
    assert torch.equal(dw, torch.zeros_like(weight))
    y, total, *_, dw = run(add_rms_norm, [x, x, weight], [x, x])
    assert y.shape == total.shape == shape
    assert torch.equal(dw, torch.zeros_like(weight))


@WIDTHS
def test_deterministic_and_runs_twice(device, narrow_is_wide, width):
    x, residual, dy, dtotal = torch.randn(4, 21, width, device=device)
    weight = torch.randn(width, device=device, requires_grad=True)
    x.requires_grad_(), residual.requires_grad_()
    outputs = add_rms_norm(x, residual, weight)
    first, second = (
        torch.autograd.grad(outputs, (x, residual, weight), (dy, dtotal), retain_graph=True) for _ in range(2)
    )
    again = torch.autograd.grad(add_rms_norm(x, residual, weight), (x, residual, weight), (dy, dtotal))
    for a, b, c in zip(first, second, again, strict=True):
        assert torch.equal(a, b) and torch.equal(a, c)


def test_double_backward_raises(device):
    x = torch.randn(3, 8, device=device, requires_grad=True)
    (dx,) = torch.autograd.grad(rms_norm(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="twice"):
        dx.sum().backward()


@pytest.mark.parametrize("width", [5, 70])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_gradcheck(device, narrow_is_wide, options, width):
    x, residual = (torch.randn(3, width, dtype=torch.float64, device=device, requires_grad=True) for _ in range(2))
    weight = torch.randn(width, dtype=torch.float64, device=device, requires_grad=True)
    fast = dict(fast_mode=width > 5)
    assert torch.autograd.gradcheck(functools.partial(rms_norm, **options), (x, weight), **fast)
    for op in (add_rms_norm, add_rms_norm_reference):
        assert torch.autograd.gradcheck(functools.partial(op, **options), (x, residual, weight), **fast)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_references_are_those_of_transformers(dtype):
    gemma = pytest.importorskip("transformers.models.gemma.modeling_gemma").GemmaRMSNorm(64, eps=1e-5)
    llama = pytest.importorskip("transformers.models.llama.modeling_llama").LlamaRMSNorm(64, eps=1e-5)
    x = torch.randn(7, 64, dtype=dtype)
    for norm, options in ((llama, {}), (gemma, dict(cast_before_weight=False, offset=1.0))):
        torch.nn.init.normal_(norm.weight)
        norm.to(dtype)
        assert torch.equal(rms_norm_reference(x, norm.weight, eps=1e-5, **options), norm(x))


def test_reference_path_compiles_whole(monkeypatch):
    monkeypatch.setattr(module, "use_triton", lambda x: False)
    x, residual, dy, dtotal = torch.randn(4, 3, 96)
    inputs = [x.requires_grad_(), residual.requires_grad_(), torch.randn(96, requires_grad=True)]
    assert_compiles(add_rms_norm, inputs, [dy, dtotal], backend="aot_eager")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: rms_norm(x, torch.ones(7, device=x.device)), r"weight has shape \(7,\)"),
        (lambda x: rms_norm(x, torch.ones(8, device=x.device).long()), "weight .* torch.int64"),
        (lambda x: rms_norm(x[..., :0]), "N >= 1"),
        (lambda x: rms_norm(x.long()), "int64"),
        (lambda x: add_rms_norm(x, x[:1]), r"residual has shape \(1, 8\)"),
        (lambda x: rms_norm(x, torch.ones(8, device="meta")), "meta"),
    ],
)
def test_errors(device, call, message):
    with pytest.raises(InputError, match=message):
        call(torch.randn(3, 8, device=device))


def on_gpu(dtype, rows, width):
    tensors = [torch.randn(rows, width, dtype=dtype, device="cuda") for _ in range(4)]
    inputs = [*tensors[:2], torch.randn(width, dtype=dtype, device="cuda")]
    return [t.requires_grad_() for t in inputs], tensors[2:]


@pytest.mark.gpu
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("width", [96, 2048, 17001])
def test_triton_path_compiles_whole(width, dynamic):
    inputs, grads = on_gpu(torch.float32, 70, width)
    assert_compiles(add_rms_norm, inputs, grads, dynamic=dynamic)
    assert_compiles(rms_norm, [inputs[0], inputs[2]], grads[:1], dynamic=dynamic)


@pytest.mark.gpu
@pytest.mark.parametrize("check", [assert_captures, assert_never_waits])
@pytest.mark.parametrize("width", [2048, 17001])
def test_captured_and_never_waits(check, width):
    inputs, grads = on_gpu(torch.bfloat16, 300, width)
    check(add_rms_norm, inputs, grads)
    check(rms_norm, [inputs[0], inputs[2]], grads[:1])


@pytest.mark.gpu
@pytest.mark.parametrize("width", [7, 128, 768, 1280, 2048, 3584, 4096, 5120, 8192, 16384, 16385, 32768, 131072])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_every_tile(dtype, width):
    inputs, grads = on_gpu(dtype, 1000 if width < 32768 else 300, width)
    judge(add_rms_norm, add_rms_norm_reference, eager_add, [t.detach() for t in inputs], grads, cast_before_weight=True)


@pytest.mark.gpu
@pytest.mark.parametrize("width", [8192, 65536])
def test_more_than_2_31_elements(width):
    rows = 2**31 // width + 3
    x = torch.randn(rows, width, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    weight = torch.randn(width, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    dy = torch.zeros_like(x)
    dy[-8:] = torch.randn(8, width, device="cuda")
    y = rms_norm(x, weight)
    dx, dw = torch.autograd.grad(y, (x, weight), dy)
    expected = run(rms_norm, [x[-8:], weight], [dy[-8:]])
    assert torch.equal(y[-8:], expected[0])
    assert torch.equal(dx[-8:], expected[1])
    assert not dx[:-8].any()
    torch.testing.assert_close(dw, expected[2])
