"""cross_entropy: the reference against torch, the kernels against the reference, and both against the edges."""

import importlib

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from ligermodels.errors import InputError
from ligermodels.kernels.cross_entropy import CrossEntropyOutput, cross_entropy, cross_entropy_reference
from tests.kernels.cross_entropy_cases import (
    EXTRAS,
    IGNORE,
    adversarial,
    arguments,
    assert_same,
    bounded,
    option_sets,
    results,
    some_labels,
)
from tests.kernels.oracle import assert_as_exact, dtypes


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("weighted", [False, True])
def test_reference_is_torch(reduction, smoothing, weighted):
    logits = torch.randn(9, 11, dtype=torch.float64, requires_grad=True)
    labels = some_labels((9,), 11, "cpu")
    weight = torch.rand(11, dtype=torch.float64) if weighted else None
    ours = cross_entropy_reference(logits, labels, class_weight=weight, label_smoothing=smoothing, reduction=reduction)
    torchs = F.cross_entropy(
        logits, labels, weight, ignore_index=IGNORE, label_smoothing=smoothing, reduction=reduction
    )
    upstream = torch.rand_like(ours)
    assert_same(results(ours, [logits], upstream), results(torchs, [logits], upstream), 1e-12, 1e-14)


def test_reference_extras_by_hand():
    logits = torch.randn(9, 11, dtype=torch.float64, requires_grad=True)
    labels = some_labels((9,), 11, "cpu")
    valid = labels != IGNORE
    out = cross_entropy_reference(
        logits, labels, softcap=2.0, z_loss=0.1, token_scaling=True, num_items_in_batch=13, **EXTRAS
    )
    loss, z_part, hits, entropy = 0.0, 0.0, 0, 0.0
    for row, label in zip(logits[valid], labels[valid], strict=True):
        z = 2.0 * torch.tanh(row / 2.0)
        p = torch.softmax(z, 0)[label]
        entropy += torch.distributions.Categorical(logits=z.detach()).entropy() / valid.sum()
        z_part = z_part + p.detach() * 0.1 * torch.log(torch.exp(z).sum()) ** 2 / 13
        loss = loss - p.detach() * torch.log(p) / 13
        hits += int(row.argmax() == label)
    expected = CrossEntropyOutput(
        loss + z_part,
        z_part.detach(),
        torch.as_tensor(hits / valid.sum()),
        logits.argmax(-1).where(valid, -1),
        entropy,
    )
    assert_same(results(out, [logits]), results(expected, [logits]), 1e-12, 1e-14)


@bounded
@given(options=option_sets(), rows=st.integers(0, 6), vocab=st.sampled_from([1, 2, 7, 64, 65, 300]))
def test_every_option(device, poison, options, rows, vocab):
    kwargs = arguments(options, vocab, torch.float64, device)
    logits = (3 * torch.randn(rows, vocab, dtype=torch.float64, device=device)).requires_grad_()
    labels = some_labels((rows,), vocab, device)
    upstream = torch.randn(rows if options["reduction"] == "none" else (), device=device, dtype=torch.float64)
    actual = results(cross_entropy(logits, labels, **kwargs), [logits], upstream)
    expected = results(cross_entropy_reference(logits, labels, **kwargs), [logits], upstream)
    # fp64 throughout; the sums are ordered differently.
    assert_same(actual, expected, 1e-11, 1e-12)


@pytest.mark.parametrize("dtype", dtypes(), ids=str)
@pytest.mark.parametrize("vocab", [33, 5003, 5008])
def test_as_exact_as_eager(device, poison, dtype, vocab):
    logits = (2 * torch.randn(24, vocab, device=device)).to(dtype).requires_grad_()
    labels = some_labels((24,), vocab, device)
    wide = logits.detach().double().requires_grad_()
    exact = results(cross_entropy_reference(wide, labels), [wide])
    actual = results(cross_entropy(logits, labels), [logits])
    assert actual["loss"].dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert actual["grad0"].dtype == dtype
    if dtype.itemsize == 2:
        eager = results(F.cross_entropy(logits, labels, ignore_index=IGNORE), [logits])
        assert_as_exact(actual["grad0"], eager["grad0"], exact["grad0"], "dlogits")
    else:
        # In wide dtypes only rounding noise of exp and of the order of sums is left: ex2.approx errs by 2 ulp,
        # and its argument by half an ulp of about 16.
        eps = torch.finfo(dtype).eps
        error = (actual["grad0"].double() - exact["grad0"]).abs()
        assert (error <= 24 * eps * exact["grad0"].abs() + 8 * eps / 24 * exact["grad0"].abs().max()).all()
    # The loss is a sum of 24 fp32 terms near log V.
    torch.testing.assert_close(actual["loss"].double(), exact["loss"], rtol=2e-6, atol=0)


def test_softcap_keeps_small_arguments(device):
    """1 - exp(-2u) in fp32 would err by 2^-24 in u = z / 1000, and so by 6e-5 in z."""
    logits = torch.randn(4, 300, device=device, requires_grad=True)
    labels = some_labels((4,), 300, device, ignored=0.0)
    wide = logits.detach().double().requires_grad_()
    actual = results(cross_entropy(logits, labels, softcap=1000.0, reduction="none"), [logits])
    exact = results(cross_entropy_reference(wide, labels, softcap=1000.0, reduction="none"), [wide])
    # Half an ulp of z - max (up to 8) and two of the exponential.
    assert_same(actual, exact, 3e-6, 1e-10)


def test_confident_gradient_does_not_cancel(device):
    """At p = 0.999 the label's gradient is p - 1 = -0.001: exact to one rounding of the dtype, not of bf16(p)."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float16
    logits = torch.zeros(1, 9, dtype=dtype, device=device)
    logits[0, 4] = 9.0
    logits.requires_grad_()
    labels = torch.tensor([4], device=device)
    wide = logits.detach().double().requires_grad_()
    actual = results(cross_entropy(logits, labels), [logits])["grad0"].double()
    exact = results(cross_entropy_reference(wide, labels), [wide])["grad0"]
    assert 0.9985 < 1 + exact[0, 4] < 0.9995
    # Half an ulp of the store, and fp32's 2^-24 on p against 2^-10 of 1 - p.
    rounding = torch.finfo(dtype).eps / 2 + 2.0**-13
    assert ((actual - exact).abs() <= rounding * exact.abs()).all()


@pytest.mark.parametrize("vocab", [4099, 128256, 262144])
def test_wide_vocabulary(device, poison, vocab):
    logits = torch.full((3, vocab), -80.0, device=device)
    logits[0, -1] = 80.0
    logits[1] = torch.randn(vocab, device=device)
    logits[2, ::2] = -torch.inf
    logits.requires_grad_()
    labels = torch.tensor([vocab - 1, 0, 1], device=device)
    actual = results(cross_entropy(logits, labels, reduction="none", **EXTRAS), [logits])
    expected = results(cross_entropy_reference(logits, labels, reduction="none", **EXTRAS), [logits])
    # fp32 both; sums over 262144 columns in different order.
    assert_same(actual, expected, 2e-5, 1e-8)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_adversarial_values(device, poison, dtype, reduction):
    if dtype == torch.bfloat16 and device == "cpu":
        pytest.skip("the interpreter truncates where it rounds to bf16")
    logits, labels = adversarial(device, dtype)
    logits.requires_grad_()
    wide = logits.detach().double().requires_grad_()
    actual = results(cross_entropy(logits, labels, reduction=reduction, **EXTRAS), [logits])
    exact = results(cross_entropy_reference(wide, labels, reduction=reduction, **EXTRAS), [wide])
    assert all(value.isfinite().all() for value in actual.values())
    gradient, exact_gradient = actual.pop("grad0").double(), exact.pop("grad0")
    eps = torch.finfo(dtype).eps
    # One rounding to the dtype, and in fp32 a few ulp of exp and of the sums, below which p - 1 cannot be told.
    wide_eps = torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps
    # The reference subtracts a sum near 1e4, rounded to fp64.
    allowed = eps / 2 * exact_gradient.abs() + 8 * wide_eps + torch.finfo(dtype).smallest_normal * eps + 4e-12
    assert ((gradient - exact_gradient).abs() <= allowed).all()
    # 1e4 - 1e4 is exact; the loss near 0 is log(1 + d), d as exact as fp32 is near 1.
    assert_same(actual, exact, 8 * wide_eps, 8 * wide_eps + 4e-12)


def test_equal_logits(device):
    """Entropy log V, argmax 0, gradient 1 / V and 1 / V - 1, whatever the value."""
    logits = torch.full((3, 50), 77.0, device=device, requires_grad=True)
    labels = torch.tensor([0, 1, 49], device=device)
    found = results(cross_entropy(logits, labels, reduction="none", **EXTRAS), [logits])
    assert found["predicted_tokens"].tolist() == [0, 0, 0]
    expected = torch.full((3, 50), 0.02, device=device)
    expected[range(3), labels] -= 1
    # fp32: one rounding of 1 / 50, one of log 50.
    torch.testing.assert_close(found["grad0"], expected, rtol=1e-6, atol=0)
    torch.testing.assert_close(found["entropy"], torch.full((3,), 50.0, device=device).log(), rtol=1e-6, atol=0)


def test_gradcheck(device):
    labels = torch.tensor([2, IGNORE, 0], device=device)
    for kwargs in (
        {"label_smoothing": 0.1, "z_loss": 0.1, "class_weight": torch.rand(5, dtype=torch.float64, device=device)},
        {"softcap": 2.0, "reduction": "none", "z_loss": 0.1},
        {"softcap": 3.0, "reduction": "sum", "label_smoothing": 0.3},
    ):
        logits = torch.randn(3, 5, dtype=torch.float64, device=device, requires_grad=True)
        assert torch.autograd.gradcheck(lambda x, k=kwargs: cross_entropy(x, labels, **k), logits)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_backward_again(device, reduction):
    """A second backward gives the same, and neither is written over; nor are the logits.

    The second is made by another kernel, which a GPU may round differently in the last bits.
    """
    logits = torch.randn(5, 40, device=device, requires_grad=True)
    before, version = logits.detach().clone(), logits._version
    loss = cross_entropy(logits, some_labels((5,), 40, device), reduction=reduction).sum()
    first = torch.autograd.grad(loss, logits, retain_graph=True)[0]
    kept = first.clone()
    second = torch.autograd.grad(loss, logits, retain_graph=True)[0]
    third = torch.autograd.grad(2 * loss, logits)[0]
    assert torch.equal(logits, before) and logits._version == version
    assert torch.equal(first, kept) and torch.equal(2 * second, third)
    torch.testing.assert_close(second, first, rtol=1e-6, atol=1e-8)


def test_second_derivative_raises(device):
    logits = torch.randn(2, 3, device=device, requires_grad=True)
    loss = cross_entropy(logits, torch.tensor([0, 1], device=device))
    upstream = torch.ones_like(loss, requires_grad=True)
    (grad,) = torch.autograd.grad(loss, logits, upstream, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_ignored_rows(device, poison, reduction):
    """NaN logits at ignored labels reach nothing; when all labels are ignored, the loss is 0."""
    logits = torch.randn(4, 6, device=device)
    logits[1] = torch.nan
    logits.requires_grad_()
    labels = torch.tensor([1, IGNORE, IGNORE, 5], device=device)
    keep = labels != IGNORE
    part = logits.detach()[keep].requires_grad_()
    kwargs = {"reduction": reduction, "z_loss": 0.1, "label_smoothing": 0.1}
    actual = results(cross_entropy(logits, labels, **kwargs), [logits])
    expected = results(cross_entropy_reference(part, labels[keep], **kwargs), [part])
    if reduction == "none":
        assert torch.equal(actual["loss"][~keep], torch.zeros(2, device=device))
        actual["loss"] = actual["loss"][keep]
    assert torch.equal(actual["grad0"][~keep], torch.zeros(2, 6, device=device))
    actual["grad0"] = actual["grad0"][keep]
    assert_same(actual, expected, 1e-5, 1e-7)

    nothing = torch.full_like(labels, IGNORE)
    weight = torch.rand(6, device=device)
    for call in (cross_entropy, cross_entropy_reference):
        out = call(logits, nothing, class_weight=weight, **kwargs, **EXTRAS)
        found = results(out, [logits])
        assert not found["loss"].any() and not found["grad0"].any() and not found["z_loss"].any()
        assert not found["token_accuracy"].any() and (found["predicted_tokens"] == -1).all()


def test_other_ignore_index_and_label_dtypes(device):
    logits = torch.randn(4, 6, device=device, requires_grad=True)
    labels = torch.tensor([3, 2, 3, 0], dtype=torch.int32, device=device)
    expected = results(F.cross_entropy(logits, labels.long(), ignore_index=3), [logits])
    for call in (cross_entropy, cross_entropy_reference):
        assert_same(results(call(logits, labels, ignore_index=3), [logits]), expected, 1e-5, 1e-7)


def test_num_items_in_batch(device):
    """Micro-batches that divide by the count of the whole batch add up to the whole batch."""
    logits = torch.randn(6, 9, device=device, requires_grad=True)
    labels = torch.tensor([1, IGNORE, 3, 4, 5, 8], device=device)
    whole = results(cross_entropy(logits, labels, z_loss=0.1), [logits])
    for count in (5, torch.tensor(5, device=device), torch.tensor([5.0], device=device), torch.tensor(5)):
        parts = [
            cross_entropy(logits[i : i + 3], labels[i : i + 3], z_loss=0.1, num_items_in_batch=count) for i in (0, 3)
        ]
        assert_same(results(parts[0] + parts[1], [logits]), whole, 1e-5, 1e-7)
    assert cross_entropy(logits, labels, num_items_in_batch=0).item() == 0.0


def test_label_that_is_no_class(device):
    logits = torch.randn(3, 5, device=device, requires_grad=True)
    for bad in (5, -1, 2**40):
        labels = torch.tensor([0, bad, 2], device=device)
        for reduction in ("mean", "sum"):
            found = results(cross_entropy(logits, labels, reduction=reduction, class_weight=None), [logits])
            assert found["loss"].isnan() and found["grad0"][1].isnan().all()
        found = results(
            cross_entropy(logits, labels, reduction="none", class_weight=torch.ones(5, device=device)), [logits]
        )
        assert found["loss"].isnan().tolist() == [False, True, False]
        assert found["grad0"].isnan().any(1).tolist() == [False, True, False]
        with pytest.raises(InputError, match=f"labels hold {bad}"):
            cross_entropy_reference(logits, labels)


def test_argmax_is_the_first_of_equals(device):
    logits = torch.zeros(3, 70, device=device)
    logits[0, [20, 50]] = 1.0
    logits[1, 69] = 1.0
    out = cross_entropy(logits, torch.tensor([20, 3, 0], device=device), **EXTRAS)
    assert out.predicted_tokens.tolist() == [20, 69, 0]
    assert out.token_accuracy.item() == pytest.approx(2 / 3)
    assert out.token_accuracy.dtype == torch.float32 and out.predicted_tokens.dtype == torch.int64


@pytest.mark.parametrize("layout", ["transposed", "sliced", "expanded", "three_dims", "shifted"])
def test_layouts(device, layout):
    base = torch.randn(6, 7, 10, device=device)
    base.requires_grad_()
    logits = {
        "transposed": lambda: base[0].t().reshape(10, 7).t(),
        "sliced": lambda: base[0, ::2, 1:],
        "expanded": lambda: base[0, 0].expand(5, 10),
        "three_dims": lambda: base,
        "shifted": lambda: base[:, :-1],
    }[layout]()
    labels = some_labels(tuple(logits.shape[:-1]), logits.shape[-1], device)
    actual = results(cross_entropy(logits, labels), [base])
    expected = results(cross_entropy_reference(logits, labels), [base])
    assert_same(actual, expected, 1e-5, 1e-7)


def test_deterministic(device):
    logits = torch.randn(64, 300, device=device, requires_grad=True)
    labels = some_labels((64,), 300, device)
    runs = [results(cross_entropy(logits, labels, label_smoothing=0.1, **EXTRAS), [logits]) for _ in range(3)]
    for name, value in runs[0].items():
        assert all(torch.equal(value, run[name]) for run in runs[1:]), name


def test_without_gradients(device):
    logits = torch.randn(5, 40, device=device, requires_grad=True)
    labels = some_labels((5,), 40, device)
    with torch.no_grad():
        quiet = cross_entropy(logits, labels)
    assert not quiet.requires_grad
    assert torch.equal(quiet, cross_entropy(logits, labels).detach())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"labels": torch.zeros(3, dtype=torch.int64)}, "one entry per token"),
        ({"labels": torch.zeros(2)}, "class indices"),
        ({"logits": torch.zeros(2, 4, dtype=torch.int64)}, "floating point"),
        ({"class_weight": torch.ones(3)}, "class_weight"),
        ({"reduction": "avg"}, "reduction='avg'"),
        ({"label_smoothing": 1.5}, "label_smoothing=1.5"),
        ({"softcap": 0.0}, "softcap=0.0"),
        ({"reduction": "sum", "num_items_in_batch": 4}, "num_items_in_batch"),
        ({"num_items_in_batch": torch.tensor([3, 4])}, "one number"),
    ],
)
def test_input_errors(change, message):
    call = {"logits": torch.randn(2, 4), "labels": torch.tensor([0, 1])} | change
    with pytest.raises(InputError, match=message):
        cross_entropy(call.pop("logits"), call.pop("labels"), **call)


def test_cpu_path_is_the_reference(monkeypatch):
    monkeypatch.setattr(importlib.import_module("ligermodels.kernels.cross_entropy"), "use_triton", lambda x: False)
    logits = torch.randn(5, 7, requires_grad=True)
    labels = some_labels((5,), 7, "cpu")
    actual = results(cross_entropy(logits, labels, **EXTRAS), [logits])
    assert_same(actual, results(cross_entropy_reference(logits, labels, **EXTRAS), [logits]), 0, 0)
    with pytest.raises(InputError, match="labels hold 7"):
        cross_entropy(logits, torch.full((5,), 7))


def forward_backward(logits, labels, **kwargs):
    return results(cross_entropy(logits, labels, **kwargs), [logits])


@pytest.mark.gpu
@pytest.mark.parametrize("count", [None, 700, "tensor"])
def test_no_synchronisation(count):
    logits = torch.randn(1000, 5000, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    labels = some_labels((1000,), 5000, "cuda")
    count = torch.tensor(700, device="cuda") if count == "tensor" else count
    kwargs = {"num_items_in_batch": count, "class_weight": torch.rand(5000, device="cuda"), **EXTRAS}
    expected = forward_backward(logits, labels, **kwargs)
    torch.cuda.set_sync_debug_mode("error")
    try:
        actual = forward_backward(logits, labels, **kwargs)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert_same(actual, expected, 0, 0)


@pytest.mark.gpu
def test_cuda_graph():
    logits = torch.randn(300, 5000, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    labels = some_labels((300,), 5000, "cuda")
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        forward_backward(logits, labels)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = forward_backward(logits, labels)
    with torch.no_grad():
        logits.normal_()
        labels.copy_(some_labels((300,), 5000, "cuda"))
    graph.replay()
    assert_same(captured, forward_backward(logits, labels), 0, 0)


@pytest.mark.gpu
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_compile(reduction):
    logits = torch.randn(300, 5000, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    labels = some_labels((300,), 5000, "cuda")
    kwargs = {"reduction": reduction, "softcap": 30.0, "z_loss": 1e-4, "label_smoothing": 0.1}
    compiled = torch.compile(lambda x, y: cross_entropy(x, y, **kwargs), fullgraph=True)
    actual = results(compiled(logits, labels), [logits])
    # Inductor may order the sum over rows differently.
    assert_same(actual, forward_backward(logits, labels, **kwargs), 1e-5, 1e-8)


@pytest.mark.gpu
def test_beyond_int32_and_memory():
    """2.15e9 logits: the last rows are right, and backward holds dlogits and nothing of its size beside it."""
    rows, vocab = 16800, 128256
    assert rows * vocab > 2**31
    logits = torch.empty(rows, vocab, dtype=torch.bfloat16, device="cuda").normal_().requires_grad_()
    labels = torch.randint(0, vocab, (rows,), device="cuda")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    loss = cross_entropy(logits, labels, reduction="none")
    (grad,) = torch.autograd.grad(loss.sum(), logits)
    assert torch.cuda.max_memory_allocated() - before <= logits.numel() * 2 + 2**24
    tail = logits.detach()[-3:].double().requires_grad_()
    exact = results(cross_entropy_reference(tail, labels[-3:], reduction="none"), [tail])
    torch.testing.assert_close(loss[-3:].double(), exact["loss"], rtol=1e-6, atol=0)
    torch.testing.assert_close(grad[-3:].double(), exact["grad0"], rtol=2**-8, atol=1e-9)
