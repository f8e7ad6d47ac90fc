"""linear_cross_entropy: the fused op against linear and cross entropy, and what it must not compute or keep."""

import contextlib
import importlib

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from ligermodels.errors import InputError
from ligermodels.kernels import _chunks
from ligermodels.kernels._chunks import Gradients, chunk_rows
from ligermodels.kernels._gradients import MARK
from ligermodels.kernels.cross_entropy import cross_entropy
from ligermodels.kernels.linear_cross_entropy import linear_cross_entropy, linear_cross_entropy_reference
from tests.kernels.cross_entropy_cases import (
    EXTRAS,
    IGNORE,
    arguments,
    assert_same,
    bounded,
    option_sets,
    results,
    some_labels,
)
from tests.kernels.oracle import assert_as_exact, dtypes

module = importlib.import_module("ligermodels.kernels.linear_cross_entropy")


def problem(tokens, hidden, vocab, device, dtype=torch.float64, ignored=0.3):
    """x [T, H], weight [V, H], bias [V], all with gradients, and labels [T]."""
    x = torch.randn(tokens, hidden, device=device).to(dtype).requires_grad_()
    weight = torch.randn(vocab, hidden, device=device).to(dtype).requires_grad_()
    bias = torch.randn(vocab, device=device).to(dtype).requires_grad_()
    return x, weight, bias, some_labels((tokens,), vocab, device, ignored)


@bounded
@given(
    options=option_sets(),
    tokens=st.sampled_from([0, 1, 5, 150]),
    vocab=st.sampled_from([1, 7, 64, 65]),
    layout=st.fixed_dictionaries(
        {
            "needs": st.sampled_from([(1, 1, 1), (1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 1, 0)]),
            "biased": st.booleans(),
            "accum_dtype": st.sampled_from([None, torch.float32]),
            "workspace_bytes": st.sampled_from([1, 2**20]),
            "compact": st.booleans(),
        }
    ),
)
def test_every_option(device, poison, options, tokens, vocab, layout):
    kwargs = arguments(options, vocab, torch.float64, device)
    x, weight, bias, labels = problem(tokens, 12, vocab, device, ignored=0.85)
    bias = bias if layout["biased"] or layout["needs"] == (0, 0, 1) else None
    inputs = []
    for tensor, needed in zip((x, weight, bias), layout["needs"], strict=True):
        if tensor is not None:
            tensor.requires_grad_(bool(needed))
            inputs += [tensor] if needed else []
    upstream = torch.randn(tokens if options["reduction"] == "none" else (), device=device, dtype=torch.float64)
    how = {"accum_dtype": layout["accum_dtype"], "workspace_bytes": layout["workspace_bytes"]}
    how["num_valid"] = int((labels != IGNORE).sum()) if layout["compact"] else tokens
    out = linear_cross_entropy(x, weight, labels, bias=bias, **kwargs, **how)
    actual = results(out, inputs, upstream)
    out = linear_cross_entropy_reference(x, weight, labels, bias=bias, **kwargs)
    # fp64 throughout; the products sum in another order.
    assert_same(actual, results(out, inputs, upstream), 1e-10, 1e-11)


@pytest.mark.parametrize("accum_dtype", [None, torch.float32])
@pytest.mark.parametrize("dtype", dtypes(), ids=str)
def test_as_exact_as_eager(device, poison, dtype, accum_dtype):
    """One chunk, so that accumulation adds no rounding; the chunks have a test of their own."""
    x, weight, _, labels = problem(96, 64, 500, device, dtype)
    x = (x.detach() * 0.3).requires_grad_()
    wide = [t.detach().double().requires_grad_() for t in (x, weight)]
    exact = results(linear_cross_entropy_reference(*wide, labels), wide)
    actual = results(linear_cross_entropy(x, weight, labels, accum_dtype=accum_dtype), [x, weight])
    assert actual["grad0"].dtype == dtype and actual["grad1"].dtype == dtype
    if dtype.itemsize == 2:
        eager = results(F.cross_entropy(F.linear(x, weight), labels, ignore_index=IGNORE), [x, weight])
        for name in ("grad0", "grad1"):
            assert_as_exact(actual[name], eager[name], exact[name], name)
        # The logits are rounded to the dtype once, at a magnitude of 4 to 8.
        rtol = 8 * torch.finfo(dtype).eps / 3
    else:
        # Sums of 64 to 500 products in this dtype, and logits near 5 that err by as much.
        for name in ("grad0", "grad1"):
            scale = exact[name].abs().max()
            assert (actual[name].double() - exact[name]).abs().max() <= 64 * torch.finfo(dtype).eps * scale
        rtol = 1e-6
    torch.testing.assert_close(actual["loss"].double(), exact["loss"], rtol=rtol, atol=0)


@pytest.mark.parametrize(
    ("tokens", "row_bytes", "workspace_bytes", "expected"),
    [
        (8192, 2 * 128256, 512 * 2**20, 2048),
        (8200, 2 * 128256, 512 * 2**20, 1664),  # five near-equal chunks, not four of 2048 and one of 8
        (100, 2 * 128256, 512 * 2**20, 100),
        (1000, 2 * 128256, 1, 128),
        (1, 2, 1, 1),
        (0, 2, 1, 0),
        (16384, 2 * 256000, 512 * 2**20, 1024),
    ],
)
def test_chunk_rows(tokens, row_bytes, workspace_bytes, expected):
    assert chunk_rows(tokens, row_bytes, workspace_bytes) == expected


def test_chunks_change_nothing(device, products):
    x, weight, bias, labels = problem(520, 24, 70, device, torch.float32, ignored=0.85)
    runs = {}
    for count, workspace_bytes in ((1, 2**30), (3, 256 * 512), (5, 1)):
        products.clear()
        out = linear_cross_entropy(
            x, weight, labels, bias=bias, workspace_bytes=workspace_bytes, num_valid=520, z_loss=0.1, **EXTRAS
        )
        assert len(products) == 3 * count
        runs[count] = results(out, [x, weight, bias])
    # fp32 sums of 520 terms in another order.
    assert_same(runs[3], runs[1], 2e-5, 2e-7)
    assert_same(runs[5], runs[1], 2e-5, 2e-7)


def test_rows_of_a_workspace(monkeypatch, device, products):
    """workspace_bytes, and where a single chunk spares the wide sum of dweight, H more; by default 2048 rows or more."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float16
    monkeypatch.setattr(module, "CHUNK_BYTES", 1)
    monkeypatch.setattr(module, "_ROWS", 256)
    for tokens, accum_dtype, rows, count in (
        (641, torch.float32, 128, 6 * 4),  # logits, dx, and dweight in two halves
        (640, torch.float32, 128, 1 * 3),
        (769, torch.float32, None, 4 * 4),
        (513, None, 128, 5 * 3),
        (513, None, None, 3 * 3),
    ):
        x, weight, _, labels = problem(tokens, 512, 128, device, dtype, ignored=0.97)
        products.clear()
        linear_cross_entropy(
            x, weight, labels, accum_dtype=accum_dtype, workspace_bytes=rows and rows * 256, num_valid=tokens,
            reduction="sum",
        )  # fmt: skip
        assert len(products) == count, (tokens, accum_dtype, rows)


@pytest.mark.parametrize(("hidden", "parts"), [(16, 1), (256, 2)])
def test_fp32_accumulation_forgets_the_chunks(device, products, hidden, parts):
    """Over 3 chunks, fp32 accumulation keeps dweight as exact as one product; half precision does not.

    Where dweight is larger than the workspace, of 131 rows 128 and 3 are summed apart, and rounded into the room of
    the 128.
    """
    dtype = torch.bfloat16 if device == "cuda" else torch.float16
    x, weight, _, labels = problem(384, hidden, 131, device, dtype, ignored=0.0)
    weight = (weight.detach() * (16 / hidden) ** 0.5).requires_grad_()  # logits of the same size
    wide = [t.detach().double().requires_grad_() for t in (x, weight)]
    exact = results(linear_cross_entropy_reference(*wide, labels, reduction="sum"), wide)["grad1"]

    def error(accum_dtype, workspace_bytes):
        out = linear_cross_entropy(
            x, weight, labels, reduction="sum", accum_dtype=accum_dtype, workspace_bytes=workspace_bytes
        )
        return (results(out, [weight])["grad0"].double() - exact).square().mean().sqrt()

    once = error(torch.float32, 2**30)
    products.clear()
    # 2 % for the order of summation inside the products.
    assert error(torch.float32, 1) <= 1.02 * once
    assert len(products) == 3 * (2 + parts)  # logits, dx, and dweight in its parts
    assert error(None, 1) > 1.02 * once


@pytest.mark.parametrize(("hidden", "parts"), [(16, 1), (256, 2)])
def test_the_gradient_of_a_tied_table_is_added_to_dweight_in_place(device, monkeypatch, hidden, parts):
    """By autograd, which does so where it alone holds the memory: a third [V, H] would be the peak of a step."""
    _, weight, _, labels = problem(384, hidden, 131, device, torch.float16, ignored=0.0)
    given, take = [], Gradients.take_dweight

    def taken(gradients):
        assert len(gradients.parts) == parts
        dweight = take(gradients)
        given.append(dweight.data_ptr())
        return dweight

    monkeypatch.setattr(Gradients, "take_dweight", taken)
    if device == "cpu":  # the interpreter holds what a kernel was given; a loss's own gradient is 1
        monkeypatch.setattr(_chunks, "scale_", lambda x, factor: x)
    ids = torch.randint(131, (384,), device=device)
    loss = linear_cross_entropy(F.embedding(ids, weight), weight, labels, reduction="sum", workspace_bytes=1)
    loss.backward()
    assert [weight.grad.data_ptr()] == given


def test_ignored_rows_are_not_multiplied(device, poison, products):
    """24 of 200 rows are valid: 128 rows enter the products, and NaN in the others reaches nothing."""
    x, weight, bias, labels = problem(200, 8, 30, device, ignored=0.0)
    valid = torch.zeros(200, dtype=torch.bool, device=device)
    valid[torch.randperm(200, device=device)[:24]] = True
    labels = labels.where(valid, IGNORE)
    kept = x.detach()[valid].requires_grad_()
    expected = results(
        linear_cross_entropy_reference(kept, weight, labels[valid], bias=bias, **EXTRAS), [kept, weight, bias]
    )
    with torch.no_grad():
        x[~valid] = torch.nan
    for num_valid, host_labels in ((24, labels), (29, labels), (None, labels.cpu())):
        products.clear()
        out = linear_cross_entropy(x, weight, host_labels, bias=bias, num_valid=num_valid, **EXTRAS)
        forward = list(products)
        actual = results(out, [x, weight, bias])
        assert sorted(forward) == sorted([(128, 8, 30), (128, 30, 8), (30, 128, 8)])
        assert torch.equal(actual["grad0"][~valid], torch.zeros_like(x[~valid]))
        assert (actual["predicted_tokens"][~valid] == -1).all()
        actual["grad0"], actual["predicted_tokens"] = actual["grad0"][valid], actual["predicted_tokens"][valid]
        assert_same(actual, expected, 1e-10, 1e-12)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_more_valid_labels_than_announced(device, reduction):
    x, weight, _, labels = problem(260, 8, 30, device, ignored=0.0)
    loss = linear_cross_entropy(x, weight, labels, num_valid=128, reduction=reduction)
    assert loss.isnan().any()
    # 100 announces anything up to the next multiple of 128.
    labels = labels.masked_fill(torch.arange(260, device=device) >= 128, IGNORE)
    actual = linear_cross_entropy(x, weight, labels, num_valid=100, reduction=reduction)
    torch.testing.assert_close(actual, linear_cross_entropy_reference(x, weight, labels, reduction=reduction))


def test_all_ignored_and_none_at_all(device, poison):
    for tokens in (0, 300):
        x, weight, bias, labels = problem(tokens, 8, 30, device, ignored=1.1)
        assert (labels == IGNORE).all()
        for num_valid in (0, tokens):
            for reduction in ("mean", "sum", "none"):
                out = linear_cross_entropy(
                    x, weight, labels, bias=bias, num_valid=num_valid, reduction=reduction, z_loss=0.1
                )
                found = results(out, [x, weight, bias])
                assert out.shape == ((tokens,) if reduction == "none" else ())
                assert not any(value.any() for value in found.values())


def test_frozen_inputs_cost_nothing(device, products):
    x, weight, bias, labels = problem(40, 8, 30, device)
    forward, dx, dweight = (40, 8, 30), (40, 30, 8), (30, 40, 8)
    cases = [
        ((True, True), [forward, dx, dweight]),
        ((True, False), [forward, dx]),
        ((False, True), [forward, dweight]),
        ((False, False), [forward]),
    ]
    for (need_x, need_weight), expected in cases:
        x.requires_grad_(need_x)
        weight.requires_grad_(need_weight)
        products.clear()
        linear_cross_entropy(x, weight, labels, num_valid=40)
        assert products == expected
    x.requires_grad_(True)
    weight.requires_grad_(True)
    products.clear()
    with torch.no_grad():
        quiet = linear_cross_entropy(x, weight, labels, bias=bias, num_valid=40, **EXTRAS)
    assert products == [forward]
    loud = linear_cross_entropy(x, weight, labels, bias=bias, num_valid=40, **EXTRAS)
    for a, b in zip(quiet, loud, strict=True):
        assert a is not None and not a.requires_grad and torch.equal(a, b.detach())


class Largest(TorchDispatchMode):
    """The bytes of the largest tensor that an op returns."""

    nbytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else [out]:
            self.nbytes = max(self.nbytes, tensor.nbytes if isinstance(tensor, torch.Tensor) else 0)
        return out


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("grad", [False, True])
def test_logits_are_never_whole(device, reduction, grad):
    """Loss, accuracy, predictions and entropy of 300 tokens from 128 rows of logits at a time."""
    x, weight, _, labels = problem(300, 8, 300, device, torch.float32, ignored=0.9)
    largest = Largest()
    with torch.set_grad_enabled(grad), largest:
        out = linear_cross_entropy(x, weight, labels, reduction=reduction, workspace_bytes=1, num_valid=300, **EXTRAS)
        if grad:
            torch.autograd.grad(out.loss.sum(), [x, weight])
    assert largest.nbytes == 128 * 320 * 4  # rows start on multiples of 64 elements
    with torch.no_grad():
        expected = linear_cross_entropy_reference(x, weight, labels, reduction=reduction, **EXTRAS)
    # fp32 sums of 300 terms in another order.
    for a, b in zip(out, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-5, atol=2e-5)


def test_backward_runs_once(device):
    x, weight, _, labels = problem(6, 8, 30, device)
    loss = linear_cross_entropy(x, weight, labels)
    torch.autograd.grad(loss, [x, weight], retain_graph=True)
    with pytest.raises(RuntimeError, match="compute the loss again"):
        torch.autograd.grad(loss, [x, weight])
    loss = linear_cross_entropy(x, weight, labels, reduction="none")
    runs = [torch.autograd.grad(loss.sum(), [x, weight], retain_graph=True) for _ in range(2)]
    assert torch.equal(runs[0][0], runs[1][0]) and torch.equal(runs[0][1], runs[1][1])


def test_gradient_is_the_slope(device):
    """Central differences, because backward runs once and gradcheck runs it often."""
    x, weight, bias, labels = problem(5, 4, 7, device, ignored=0.0)
    labels[1] = IGNORE
    kwargs = {"label_smoothing": 0.1, "z_loss": 0.1, "softcap": 3.0}
    inputs = [x, weight, bias]

    def loss(tensors):
        return linear_cross_entropy(tensors[0], tensors[1], labels, bias=tensors[2], **kwargs)

    gradients = torch.autograd.grad(loss(inputs), inputs)
    step = 1e-5
    for i, gradient in enumerate(gradients):
        direction = torch.randn_like(gradient)
        moved = [
            [t.detach() + s * step * direction if j == i else t.detach() for j, t in enumerate(inputs)] for s in (1, -1)
        ]
        slope = (loss(moved[0]) - loss(moved[1])) / (2 * step)
        # The error of a central difference is of order step^2.
        torch.testing.assert_close((gradient * direction).sum(), slope, rtol=1e-7, atol=1e-9)


def test_gradcheck_of_every_token(device):
    x, weight, bias, labels = problem(4, 3, 6, device, ignored=0.0)
    labels[2] = IGNORE

    def rows(x, weight, bias):
        return linear_cross_entropy(x, weight, labels, bias=bias, reduction="none", z_loss=0.1, softcap=2.0)

    assert torch.autograd.gradcheck(rows, (x, weight, bias))


def test_weight_grad_is_not_copied(device, monkeypatch):
    """The buffer that forward filled becomes weight.grad; later micro-batches are added to it."""
    x, weight, _, labels = problem(6, 8, 30, device, ignored=0.0)
    buffers = []
    real = _chunks.scale_
    monkeypatch.setattr(_chunks, "scale_", lambda t, f: buffers.append(t.data_ptr()) or real(t, f))
    linear_cross_entropy(x, weight, labels, num_items_in_batch=12).backward()
    assert weight.grad.data_ptr() in buffers
    linear_cross_entropy(x, weight, labels, num_items_in_batch=12).backward()
    expected = torch.autograd.grad(linear_cross_entropy_reference(x, weight, labels), weight)[0]
    torch.testing.assert_close(weight.grad, expected)


class Made(TorchDispatchMode):
    """Where ops make tensors of one shape; set_ and copy_ are what the interpreter moves its arguments with."""

    def __init__(self, shape):
        super().__init__()
        self.shape, self.pointers = shape, set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        tensors = [t for t in torch.utils._pytree.tree_leaves(out) if isinstance(t, torch.Tensor)]
        if func.overloadpacket not in (torch.ops.aten.set_, torch.ops.aten.copy_):
            self.pointers |= {t.data_ptr() for t in tensors if t.shape == self.shape}
        return out


@pytest.mark.parametrize(
    ("dtype", "reduction"),
    [(torch.float16, "mean"), (torch.float16, "none"), (torch.float16, "sum"), (dtypes()[-1], "sum")],
    ids=str,
)
def test_weight_grad_in_place(device, poison, dtype, reduction):
    """Micro-batches of 2 chunks add to one .grad, as exactly as autograd, with no other [V, H] but the sum itself."""
    x, weight, _, labels = problem(130, 8, 30, device, dtype, ignored=0.95)
    labels[-1] = 3  # in the second chunk
    marked = torch.nn.Parameter(weight.detach().clone())
    setattr(marked, MARK, True)
    wide = [t.detach().double().requires_grad_() for t in (x, weight)]
    once = results(linear_cross_entropy_reference(*wide, labels, reduction=reduction), wide)["grad1"]
    made = Made(weight.shape)
    for i, w in enumerate((weight, marked, marked)):
        with made if i == 2 else contextlib.nullcontext():
            loss = linear_cross_entropy(x, w, labels, reduction=reduction, workspace_bytes=1, num_valid=130)
            (3 * loss.sum()).backward()
    assert len(made.pointers - {marked.grad.data_ptr(), marked.data_ptr()}) == 1
    # Autograd rounds more often: the sum, 3 times it, and that added to itself.
    assert_as_exact(marked.grad, weight.grad + weight.grad, 6 * once, terms=130)
    before = marked.grad.clone()
    loss = linear_cross_entropy(x, marked, labels, reduction=reduction, workspace_bytes=1, num_valid=130)
    (grad,) = torch.autograd.grad(3 * loss.sum(), marked)
    assert_as_exact(grad, weight.grad, 3 * once, terms=130)
    assert torch.equal(marked.grad, before)


@pytest.mark.parametrize("options", ["num_items_in_batch", "class_weight"])
def test_fp16_gradients_do_not_underflow(device, options):
    """One of 2e6 tokens: p / 2e6 is below fp16, but not times a loss scaler's 65536.

    With class weights the two divisors differ, and both must reach backward.
    """
    x, weight, bias, labels = problem(8, 16, 50, device, torch.float16, ignored=0.0)
    inputs = [x, weight, bias]
    wide = [t.detach().double().requires_grad_() for t in inputs]
    kwargs = {"z_loss": 0.01, "num_items_in_batch": 2_000_000}
    if options == "class_weight":
        kwargs = {"z_loss": 0.01, "class_weight": torch.linspace(0.1, 9.0, 50, device=device)}
    scale = torch.tensor(2.0**16 if "num_items_in_batch" in kwargs else 1.0, device=device)
    actual = results(linear_cross_entropy(x, weight, labels, bias=bias, **kwargs), inputs, scale)
    out = linear_cross_entropy_reference(*wide[:2], labels, bias=wide[2], **kwargs)
    exact = results(out, wide, scale)
    for i, t in enumerate(inputs):
        assert actual[f"grad{i}"].dtype == t.dtype
        error = (actual[f"grad{i}"].double() - exact[f"grad{i}"]).norm() / exact[f"grad{i}"].norm()
        # fp16 logits near 8 are off by up to 2^-9, and the gradient relatively by that.
        assert error < 2.0**-8
    assert torch.autograd.grad(linear_cross_entropy(x, weight, labels, **kwargs), x)[0].isfinite().all()


@pytest.mark.parametrize("state", ["fp32", "mixed"])
def test_autocast(device, state):
    dtype = torch.bfloat16 if device == "cuda" else torch.float16
    x, weight, bias, labels = problem(40, 16, 50, device, torch.float32)
    if state == "mixed":
        x = x.detach().to(dtype).requires_grad_()
    inputs = [x, weight, bias]
    wide = [t.detach().double().requires_grad_() for t in inputs]
    with torch.autocast(device, dtype=dtype):
        loss = linear_cross_entropy(x, weight, labels, bias=bias)
        with pytest.raises(InputError, match="cast one"):
            linear_cross_entropy(x, weight.double(), labels)
    actual = results(loss, inputs)
    exact = results(linear_cross_entropy_reference(*wide[:2], labels, bias=wide[2]), wide)
    assert [actual[f"grad{i}"].dtype for i in range(3)] == [t.dtype for t in inputs]
    for name in ("grad0", "grad1", "grad2"):
        # Inputs and logits near 8 in the low dtype: about 8 eps on every probability.
        error = (actual[name].double() - exact[name]).norm() / exact[name].norm()
        assert error < 8 * torch.finfo(dtype).eps
    with pytest.raises(InputError, match="autocast"):
        linear_cross_entropy(x.to(dtype), weight, labels)


@pytest.mark.parametrize("layout", ["three_dims", "transposed", "expanded", "shifted"])
def test_layouts(device, layout):
    base = torch.randn(3, 50, 8, dtype=torch.float64, device=device, requires_grad=True)
    weight = torch.randn(8, 30, dtype=torch.float64, device=device, requires_grad=True)
    x = {
        "three_dims": lambda: base,
        "transposed": lambda: base[0, :8].t().reshape(8, 8).t(),
        "expanded": lambda: base[0, 0].expand(200, 8),
        "shifted": lambda: base[:, :-1],
    }[layout]()
    labels = some_labels(tuple(x.shape[:-1]), 30, device, ignored=0.7)
    actual = results(linear_cross_entropy(x, weight.t(), labels), [base, weight])
    expected = results(linear_cross_entropy_reference(x, weight.t(), labels), [base, weight])
    assert_same(actual, expected, 1e-10, 1e-12)


@pytest.mark.gpu  # interpreted: test_every_op, smaller
def test_deterministic(device):
    x, weight, bias, labels = problem(300, 16, 70, device, torch.float32, ignored=0.6)
    runs = [
        results(linear_cross_entropy(x, weight, labels, bias=bias, workspace_bytes=1, **EXTRAS), [x, weight, bias])
        for _ in range(3)
    ]
    for name, value in runs[0].items():
        assert all(torch.equal(value, run[name]) for run in runs[1:]), name


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"labels": torch.zeros(3, dtype=torch.int64)}, "one entry per token"),
        ({"weight": torch.randn(5, 3)}, "does not fit x"),
        ({"weight": torch.randn(5, 4).double()}, "cast one"),
        ({"bias": torch.randn(4)}, r"must be \[5\]"),
        ({"accum_dtype": torch.float16}, "accum_dtype"),
        ({"workspace_bytes": 0}, "workspace_bytes=0"),
        ({"num_valid": -1}, "num_valid=-1"),
        ({"class_weight": torch.ones(4)}, "class_weight"),
    ],
)
def test_input_errors(change, message):
    call = {"x": torch.randn(2, 4), "weight": torch.randn(5, 4), "labels": torch.tensor([0, 1])} | change
    with pytest.raises(InputError, match=message):
        linear_cross_entropy(call.pop("x"), call.pop("weight"), call.pop("labels"), **call)


def test_cpu_path_is_the_reference(monkeypatch):
    monkeypatch.setattr(module, "use_triton", lambda x: False)
    x, weight, bias, labels = problem(5, 4, 7, "cpu")
    inputs = [x, weight, bias]
    actual = results(linear_cross_entropy(x, weight, labels, bias=bias, num_valid=5, **EXTRAS), inputs)
    expected = results(linear_cross_entropy_reference(x, weight, labels, bias=bias, **EXTRAS), inputs)
    assert_same(actual, expected, 0, 0)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_compile(device, reduction):
    """Whole graph, gradients included, with the fused op opaque in it."""
    x, weight, bias, labels = problem(200, 16, 70, device, torch.float32, ignored=0.85)
    inputs = [x, weight, bias]

    def call(x, weight, bias, labels):
        out = linear_cross_entropy(
            2 * x, weight, labels, bias=bias, reduction=reduction, softcap=5.0, num_valid=110, **EXTRAS
        )
        return out.loss.sum() * 3, out.token_accuracy

    compiled = torch.compile(call, fullgraph=True, backend="inductor" if device == "cuda" else "aot_eager")
    loss, accuracy = compiled(x, weight, bias, labels)
    actual = results(loss, inputs)
    loss, expected_accuracy = call(x, weight, bias, labels)
    assert_same(actual, results(loss, inputs), 1e-4 if device == "cuda" else 1e-5, 1e-5)
    assert torch.equal(accuracy, expected_accuracy)


def test_fp16_compile(device):
    """fp16 hands one more tensor from forward to backward."""
    inputs = problem(20, 16, 70, device, torch.float16)
    compiled = torch.compile(
        lambda x, w, b, y: linear_cross_entropy(x, w, y, bias=b), fullgraph=True, backend="aot_eager"
    )
    actual = results(compiled(*inputs), list(inputs[:3]))
    expected = results(linear_cross_entropy(*inputs[:2], inputs[3], bias=inputs[2]), list(inputs[:3]))
    assert_same(actual, expected, 2**-10, 1e-7)


def test_custom_op_says_what_it_returns(device):
    x, weight, bias, labels = (t.detach() for t in problem(8, 4, 7, device, torch.float32))
    for reduction, extra in (("mean", True), ("sum", False)):
        scalars = (-100, 0.1, 0.1, None, reduction, False, extra, extra, extra, extra, 8, 2**20, torch.float32, True)
        args = (x, weight, bias, labels, None, None, *scalars, True, True, True)
        torch.library.opcheck(module._run_op, args, test_utils=("test_schema", "test_faketensor"))


def forward_backward(x, weight, labels, **kwargs):
    return results(linear_cross_entropy(x, weight, labels, **kwargs), [x, weight])


@pytest.mark.gpu
@pytest.mark.parametrize("num_valid", [None, 450])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_no_synchronisation(num_valid, reduction):
    x, weight, _, labels = problem(1000, 128, 5000, "cuda", torch.bfloat16, ignored=0.6)
    kwargs = {"num_valid": num_valid, "reduction": reduction, **EXTRAS}
    if reduction == "mean":
        kwargs["num_items_in_batch"] = torch.tensor(900, device="cuda")
    expected = forward_backward(x, weight, labels, **kwargs)
    torch.cuda.set_sync_debug_mode("error")
    try:
        actual = forward_backward(x, weight, labels, **kwargs)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert_same(actual, expected, 0, 0)


@pytest.mark.gpu
@pytest.mark.parametrize("num_valid", [None, 450])
def test_cuda_graph(num_valid):
    x, weight, _, labels = problem(1000, 128, 5000, "cuda", torch.bfloat16, ignored=0.6)
    kwargs = {"num_valid": num_valid, "workspace_bytes": 2**22}
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        forward_backward(x, weight, labels, **kwargs)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = forward_backward(x, weight, labels, **kwargs)
    with torch.no_grad():
        x.normal_()
        labels.copy_(some_labels((1000,), 5000, "cuda", 0.6))
    graph.replay()
    # cuBLAS may pick other algorithms under capture, whose workspace differs.
    assert_same(captured, forward_backward(x, weight, labels, **kwargs), 2e-2, 1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("tokens", "accum_dtype", "in_place", "peak", "held"),
    [
        # workspace 501 MiB, dx 64, dweight 1002
        (8192, None, False, 1.6, 1.1),
        # one chunk: workspace 1503, dx 48, dweight in bf16 1002, which is what more tokens take beside dx
        (6144, torch.float32, False, 2.52, 1.05),
        # dx 64, dweight in fp32 2004, workspace 501
        (8192, torch.float32, False, 2.54, 1.05),
        # dx 128, dweight in fp32 2004, workspace 501
        (16384, torch.float32, False, 2.6, 1.15),
        # dx 128, dweight in fp32 until it is added to the gradient that is there, and in forward the workspace
        (16384, torch.float32, True, 2.6, 2.1),
    ],
)
def test_peak_memory(tokens, accum_dtype, in_place, peak, held):
    """T x 4096 x 128256 in bf16, GiB beyond the inputs (and the .grad that is added to), gradients included."""
    x = torch.randn(tokens, 4096, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    weight = torch.nn.Parameter(torch.randn(128256, 4096, dtype=torch.bfloat16, device="cuda").mul_(0.02))
    labels = torch.randint(0, 128256, (tokens,), device="cuda")
    setattr(weight, MARK, in_place)
    torch.mm(x.detach()[:128], weight.detach()[:128].t())  # cuBLAS keeps a workspace from here on
    linear_cross_entropy(x[:128], weight, labels[:128], accum_dtype=accum_dtype).backward()
    x.grad = None
    if not in_place:
        weight.grad = None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    loss = linear_cross_entropy(x, weight, labels, accum_dtype=accum_dtype)
    assert torch.cuda.memory_allocated() - before <= held * 2**30
    forward = torch.cuda.max_memory_allocated()
    (2 * loss).backward()
    assert torch.cuda.max_memory_allocated() - before <= peak * 2**30
    if in_place:
        assert torch.cuda.max_memory_allocated() == forward


@pytest.mark.gpu
def test_evaluation_memory():
    """Without gradients the workspace is all there is: [V, H] and [T, H] buffers do not appear."""
    x = torch.randn(8192, 1024, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    weight = torch.randn(128256, 1024, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    labels = torch.randint(0, 128256, (8192,), device="cuda")
    torch.mm(x.detach()[:128], weight.detach()[:128].t())
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with torch.no_grad():
        linear_cross_entropy(x, weight, labels, **EXTRAS)
    assert torch.cuda.max_memory_allocated() - before <= 514 * 2**20


@pytest.mark.gpu
def test_wide_vocabulary():
    """262144 classes and an odd number of them, against eager on the same bf16 logits."""
    for vocab in (262144, 262147):
        x, weight, _, labels = problem(700, 64, vocab, "cuda", torch.bfloat16)
        x = (x.detach() * 0.3).requires_grad_()
        wide = [t.detach().double().requires_grad_() for t in (x, weight)]
        exact = results(linear_cross_entropy_reference(*wide, labels), wide)
        eager = results(F.cross_entropy(F.linear(x, weight), labels, ignore_index=IGNORE), [x, weight])
        actual = results(linear_cross_entropy(x, weight, labels, workspace_bytes=2**27, **EXTRAS), [x, weight])
        for name in ("grad0", "grad1"):
            assert_as_exact(actual[name], eager[name], exact[name], name)
        logits = F.linear(x, weight).float()
        valid = labels != IGNORE
        assert (logits.argmax(-1) == actual["predicted_tokens"])[valid].all()
        entropy = torch.distributions.Categorical(logits=logits[valid]).entropy().mean()
        # fp32 sums over 262144 classes.
        torch.testing.assert_close(actual["entropy"], entropy, rtol=1e-5, atol=0)


@pytest.mark.gpu
def test_beyond_int32():
    """A workspace of 2.2e9 logits in one chunk, and a weight of which dweight has 2.1e9 elements in another call."""
    x, weight, _, labels = problem(17152, 64, 128256, "cuda", torch.bfloat16, ignored=0.0)
    assert x.shape[0] * weight.shape[0] > 2**31
    rows = linear_cross_entropy(x, weight, labels, reduction="none", workspace_bytes=2**33)
    expected = cross_entropy(F.linear(x[-8:], weight), labels[-8:], reduction="none")
    torch.testing.assert_close(rows[-8:], expected, rtol=1e-2, atol=1e-2)
    (grad,) = torch.autograd.grad(rows[-8:].sum(), x)
    (expected_grad,) = torch.autograd.grad(expected.sum(), x)
    torch.testing.assert_close(grad[-8:], expected_grad[-8:], rtol=5e-2, atol=5e-2)

    x, weight, _, labels = problem(128, 16640, 129280, "cuda", torch.bfloat16, ignored=0.0)
    assert weight.numel() > 2**31
    loss = linear_cross_entropy(x, weight, labels, reduction="sum", accum_dtype=None)
    (tripled,) = torch.autograd.grad(3 * loss, weight)
    loss = linear_cross_entropy(x, weight, labels, reduction="sum", accum_dtype=None)
    (once,) = torch.autograd.grad(loss, weight)
    # 3 x, rounded to bf16, is within half an ulp.
    torch.testing.assert_close(tripled[-4:].float(), 3 * once[-4:].float(), rtol=2**-8, atol=0)
