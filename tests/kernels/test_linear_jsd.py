"""linear_jsd: the fused op against linear and jsd, and what it must not compute or keep."""

import importlib

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from ligermodels.errors import InputError
from ligermodels.kernels import _chunks
from ligermodels.kernels.linear_jsd import LinearJSDOutput, linear_jsd, linear_jsd_reference
from tests.kernels.cross_entropy_cases import IGNORE, bounded, some_labels
from tests.kernels.on_gpu import assert_compiles, assert_never_waits, forward_backward
from tests.kernels.oracle import assert_as_exact, dtypes

module = importlib.import_module("ligermodels.kernels.linear_jsd")


def problem(tokens, vocab, device, dtype=torch.float64, hidden=6, teacher_hidden=4, padding=0, ignored=0.3, scale=1.0):
    """The tensors of a call: student's with gradients, a teacher of another width, and labels."""

    def random(*shape, grad=False):
        return (scale * torch.randn(shape, dtype=torch.float64)).to(device, dtype).requires_grad_(grad)

    return {
        "student_x": random(tokens, hidden, grad=True),
        "student_weight": random(vocab, hidden, grad=True),
        "teacher_x": random(tokens, teacher_hidden),
        "teacher_weight": random(vocab + padding, teacher_hidden),
        "student_bias": random(vocab, grad=True),
        "teacher_bias": random(vocab + padding),
        "labels": some_labels((tokens,), vocab, device, ignored),
    }


def results(op, call, upstream=None, **options):
    """The losses and the student's gradients, by name."""
    out = op(**call, **options)
    found = out._asdict() if isinstance(out, LinearJSDOutput) else {"loss": out}
    trained = {name: t for name, t in call.items() if t is not None and t.requires_grad}
    upstream = torch.ones_like(found["loss"]) if upstream is None else upstream.to(found["loss"].dtype)
    gradients = torch.autograd.grad(found["loss"], list(trained.values()), upstream)
    return {name: t for name, t in found.items() if t is not None} | dict(zip(trained, gradients, strict=True))


def widened(call):
    return {
        name: t.detach().double().requires_grad_(t.requires_grad) if t is not None and t.is_floating_point() else t
        for name, t in call.items()
    }


def assert_same(actual, expected, rtol, atol):
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(
            actual[name], value.to(actual[name].device), rtol=rtol, atol=atol, check_dtype=False, equal_nan=True,
            msg=lambda m, name=name: f"{name}: {m}",
        )  # fmt: skip


def test_reference_by_hand():
    """Every token by itself: temperature on the soft loss alone, both losses divided by the tokens that count."""
    call = problem(5, 7, "cpu", padding=2)
    call["labels"][1] = IGNORE
    soft, hard = [], []
    for x, y, label in zip(call["student_x"], call["teacher_x"], call["labels"], strict=True):
        if label != IGNORE:
            z = call["student_weight"] @ x + call["student_bias"]
            u = (call["teacher_weight"] @ y + call["teacher_bias"])[:7]
            s, t = torch.softmax(z / 3, 0), torch.softmax(u / 3, 0)
            m = 0.2 * t + 0.8 * s
            soft.append(0.2 * (t * (t / m).log()).sum() + 0.8 * (s * (s / m).log()).sum())
            hard.append(-torch.softmax(z, 0)[label].log())
    options = {"beta": 0.2, "temperature": 3.0, "weight_hard": 0.6, "weight_soft": 0.7}
    out = linear_jsd_reference(**call, **options, return_soft_hard_loss=True)
    torch.testing.assert_close(out.soft_loss, sum(soft) / len(soft))
    torch.testing.assert_close(out.hard_loss, sum(hard) / len(hard))
    torch.testing.assert_close(out.loss, 0.6 * out.hard_loss + 0.7 * out.soft_loss)


@bounded
@given(
    beta=st.sampled_from([0.0, 0.3, 0.5, 1.0]),
    temperature=st.sampled_from([1.0, 2.0]),
    reduction=st.sampled_from(["mean", "sum", "none"]),
    weights=st.sampled_from([(0.0, 1.0), (0.4, 0.7), (1.0, 0.0)]),
    tokens=st.sampled_from([0, 1, 5, 5, 145]),
    vocab=st.sampled_from([1, 7, 65]),
    layout=st.fixed_dictionaries(
        {
            "needs": st.sampled_from([(1, 1, 1), (1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 1, 0)]),
            "biased": st.booleans(),
            "labelled": st.booleans(),
            "padding": st.sampled_from([0, 3]),
            "accum_dtype": st.sampled_from([None, torch.float32]),
            "workspace_bytes": st.sampled_from([1, 2**20]),
            "compact": st.booleans(),
            "parts": st.booleans(),
        }
    ),
)
def test_every_option(device, poison, beta, temperature, reduction, weights, tokens, vocab, layout):
    call = problem(tokens, vocab, device, padding=layout["padding"], ignored=0.85)
    if not layout["biased"] and layout["needs"] != (0, 0, 1):
        call["student_bias"] = call["teacher_bias"] = None
    for name, needed in zip(("student_x", "student_weight", "student_bias"), layout["needs"], strict=True):
        if call[name] is not None:
            call[name].requires_grad_(bool(needed))
    how = {"accum_dtype": layout["accum_dtype"], "workspace_bytes": layout["workspace_bytes"]}
    if layout["labelled"] or weights[0]:
        how["num_valid"] = int((call["labels"] != IGNORE).sum()) if layout["compact"] else tokens
    else:
        call["labels"] = None
    options = {
        "beta": beta, "temperature": temperature, "reduction": reduction, "weight_hard": weights[0],
        "weight_soft": weights[1], "return_soft_hard_loss": layout["parts"],
    }  # fmt: skip
    upstream = torch.randn(tokens if reduction == "none" else (), dtype=torch.float64, device=device)
    actual = results(linear_jsd, call, upstream, **options, **how)
    # fp64 throughout; the products sum in another order.
    assert_same(actual, results(linear_jsd_reference, call, upstream, **options), 1e-10, 1e-11)


@pytest.mark.parametrize(
    "options", [{}, {"beta": 0.0}, {"beta": 1.0}, {"temperature": 2.0, "weight_hard": 0.5}], ids=str
)
@pytest.mark.parametrize("dtype", [d for d in dtypes() if d != torch.float64], ids=str)
def test_as_exact_as_eager(device, poison, dtype, options):
    """Of the same logits, in fp32, from where eager goes on in fp32. One chunk: the chunks have their test."""
    call = problem(96, 500, device, dtype, hidden=64, teacher_hidden=32, scale=0.5)
    call["student_bias"] = call["teacher_bias"] = None
    exact = results(linear_jsd_reference, widened(call), **options)
    eager = results(linear_jsd_reference, call, **options)
    actual = results(linear_jsd, call, **options)
    # The gradients of all tokens of x, and all rows of weight, share the errors of the logits: as few as tokens.
    for name in ("student_x", "student_weight"):
        assert actual[name].dtype == dtype
        assert_as_exact(actual[name], eager[name], exact[name], name, shared=64)
    # The logits are sums of 64 and 32 products in fp32, near 8 at most; the loss adds 48 000 terms of them.
    torch.testing.assert_close(actual["loss"].double(), exact["loss"], rtol=2e-6, atol=0)


@pytest.mark.parametrize(
    ("tokens", "vocab", "options"),
    [
        (40, 300, {}), (40, 300, {"beta": 0.0}), (40, 300, {"beta": 1.0}), (40, 300, {"temperature": 2.0}),
        (150, 300, {"reduction": "none"}),
        # Rows of several tiles: the gradients of one lie where the logits of another did.
        (6, 7000, {}), (6, 7000, {"beta": 0.0}), (6, 7000, {"weight_hard": 0.1, "beta": 0.0, "reduction": "none"}),
    ],
    ids=str,
)  # fmt: skip
def test_a_teacher_nearer_than_rounded_logits_can_tell(device, poison, tokens, vocab, options):
    """Logits near 16, a tenth apart from the teacher's: in 16 bits they come in steps of 2^-7 (fp16) or 2^-4 (bf16).

    Loss and gradients agree with fp64 of the same inputs. Interpreted in fp16, as the interpreter truncates to bf16."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float16
    call = problem(tokens, vocab, device, dtype, hidden=64, teacher_hidden=64)
    with torch.no_grad():
        call["teacher_x"].copy_(call["student_x"])
        call["teacher_weight"].copy_(call["student_weight"] + 0.01 * torch.randn_like(call["student_weight"]))
        call["teacher_bias"].copy_(call["student_bias"])
    if tokens == 40:
        call["student_bias"] = call["teacher_bias"] = None
    upstream = torch.rand(tokens if options.get("reduction") else (), device=device) + 1
    options = options | {"weight_soft": 256.0}  # so that no gradient of a logit is a subnormal of fp16
    actual = results(linear_jsd, call, upstream, workspace_bytes=1, **options)
    expected = results(linear_jsd_reference, widened(call), upstream.double(), **options)
    errors = {name: ((actual[name].double() - t).norm() / t.norm()).item() for name, t in expected.items()}
    # The loss is of second order in differences of 0.1 between fp32 logits near 16, off by some 1e-6. The gradients of
    # the logits are rounded to the dtype, and so are those made of them, each by eps / 2 at most.
    assert errors.pop("loss") < 1e-4, errors
    assert max(errors.values()) < torch.finfo(dtype).eps, errors


def test_confident_and_near(device):
    """A student at p = 0.9999 that is almost its teacher: eager fp32 has few digits left of what remains."""
    x = torch.zeros(2, 8, dtype=torch.float64)
    weight = torch.randn(300, 8, dtype=torch.float64)
    x[0, 0], weight[4] = 1.0, 0.0
    weight[:, 0] -= 16.0
    weight[4, 0] = 0.0
    near = weight + 1e-3 * torch.randn(300, 8, dtype=torch.float64)
    wide = [z.float().double().to(device) for z in (x, weight, x, near)]
    call = {"student_x": wide[0].requires_grad_(), "student_weight": wide[1].requires_grad_(), "teacher_x": wide[2],
            "teacher_weight": wide[3]}  # fmt: skip
    narrow = {name: z.detach().float().requires_grad_(z.requires_grad) for name, z in call.items()}
    for beta in (0.0, 0.3, 0.5, 1.0):
        exact, eager = (results(linear_jsd_reference, inputs, beta=beta) for inputs in (call, narrow))
        actual = results(linear_jsd, narrow, beta=beta)
        # The difference of the logits near 16 is 1e-3 at most and exact to 2^-21; the loss is of second order in it.
        torch.testing.assert_close(actual["loss"].double(), exact["loss"], rtol=4e-3, atol=0)
        for name in ("student_x", "student_weight"):
            # S - T at beta = 0 is as exact as the sums that divide S and T, in eager as here.
            error, allowed = ((g[name].double() - exact[name]).norm() / exact[name].norm() for g in (actual, eager))
            assert error < max(2e-3, 1.25 * allowed), (beta, name, error, allowed)


def test_large_logits(device, poison):
    """Logits of 1e4 and equal rows neither overflow nor become NaN."""
    call = problem(6, 50, device, torch.float32)
    call["student_bias"] = call["teacher_bias"] = None
    with torch.no_grad():
        call["student_x"][:3] *= 3e3
        call["teacher_x"][2:5] *= 3e3
        call["student_x"][5], call["teacher_x"][5] = 0.0, 0.0
    call["labels"] = torch.arange(6, device=device)
    for beta in (0.0, 0.5, 1.0):
        options = {"beta": beta, "weight_hard": 0.5, "reduction": "none"}
        actual = results(linear_jsd, call, **options)
        # Logits near 1e4 in fp32 are off by 5e-4, and what is left of a probability by as much, relatively.
        assert_same(actual, results(linear_jsd_reference, widened(call), **options), 5e-3, 1e-2)
        torch.testing.assert_close(actual["loss"][5].item(), 0.5 * torch.log(torch.tensor(50.0)).item())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_chunks_change_nothing(device, products, dtype):
    """Both logits take 8 bytes a class in either dtype; 30 classes take the room of 64."""
    call = problem(300, 30, device, dtype, ignored=0.85)
    runs = {}
    for count, workspace_bytes in ((1, 2**30), (2, 2 * 256 * 256), (3, 1)):
        products.clear()
        found = results(linear_jsd, call, weight_hard=0.5, workspace_bytes=workspace_bytes, num_valid=300)
        assert len(products) == 4 * count
        runs[count] = found
    # fp32 sums in another order, of which one may be rounded to the other fp16 number.
    tolerance = (2e-5, 2e-7) if dtype == torch.float32 else (2**-10, 2**-24)
    assert_same(runs[2], runs[1], *tolerance)
    assert_same(runs[3], runs[1], *tolerance)


def test_ignored_rows_are_not_multiplied(device, poison, products):
    """20 of 200 rows are valid: 128 rows enter the products, and NaN in the others reaches nothing."""
    call = problem(200, 30, device)
    valid = torch.zeros(200, dtype=torch.bool, device=device)
    valid[torch.randperm(200, device=device)[:20]] = True
    call["labels"] = torch.randint(0, 30, (200,), device=device).where(valid, IGNORE)
    options = {"weight_hard": 0.5, "return_soft_hard_loss": True}
    kept = dict(call)
    for name in ("student_x", "teacher_x", "labels"):
        kept[name] = call[name].detach()[valid].requires_grad_(call[name].requires_grad)
    with torch.no_grad():
        call["student_x"][~valid], call["teacher_x"][~valid] = torch.nan, torch.nan
    for reduction in ("mean", "none"):
        expected = results(linear_jsd_reference, kept, reduction=reduction, **options)
        for num_valid, labels in ((20, call["labels"]), (125, call["labels"]), (None, call["labels"].cpu())):
            products.clear()
            out = results(linear_jsd, call | {"labels": labels}, reduction=reduction, num_valid=num_valid, **options)
            assert set(products) == {(128, 6, 30), (128, 4, 30), (128, 30, 6), (30, 128, 6)}
            assert not out["student_x"][~valid].any()
            out["student_x"] = out["student_x"][valid]
            for name in ("loss", "soft_loss", "hard_loss") if reduction == "none" else ():
                assert not out[name][~valid].any()
                out[name] = out[name][valid]
            assert_same(out, expected, 1e-10, 1e-12)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_more_valid_labels_than_announced(device, reduction):
    call = problem(150, 30, device, ignored=0.0)
    assert linear_jsd(**call, num_valid=128, reduction=reduction).isnan().any()


def test_label_that_is_no_class(device):
    call = problem(3, 5, device, torch.float32)
    for bad in (5, -1, 2**40):
        call["labels"] = torch.tensor([0, bad, 2], device=device)
        for weight_hard in (0.0, 0.5):
            found = results(linear_jsd, call, weight_hard=weight_hard, reduction="none")
            assert found["loss"].isnan().tolist() == found["student_x"].isnan().any(1).tolist() == [False, True, False]
        with pytest.raises(InputError, match=f"labels hold {bad}"):
            linear_jsd_reference(**call)


def test_all_ignored_and_none_at_all(device, poison):
    for tokens in (0, 150):
        call = problem(tokens, 30, device, ignored=1.1)
        for num_valid in (0, tokens):
            for reduction in ("mean", "sum", "none"):
                found = results(linear_jsd, call, num_valid=num_valid, reduction=reduction, weight_hard=0.5)
                assert found["loss"].shape == ((tokens,) if reduction == "none" else ())
                assert not any(value.any() for value in found.values())


def test_frozen_inputs_cost_nothing(device, products):
    call = problem(40, 30, device)
    forward, dx, dweight = [(40, 6, 30), (40, 4, 30)], (40, 30, 6), (30, 40, 6)
    call["student_bias"] = call["teacher_bias"] = None
    for (need_x, need_weight), expected in {
        (True, True): [*forward, dx, dweight], (True, False): [*forward, dx], (False, True): [*forward, dweight],
        (False, False): forward,
    }.items():  # fmt: skip
        call["student_x"].requires_grad_(need_x)
        call["student_weight"].requires_grad_(need_weight)
        products.clear()
        linear_jsd(**call, num_valid=40)
        assert products == expected
    call["student_x"].requires_grad_(True)
    call["teacher_x"].requires_grad_(True)
    call["teacher_weight"].requires_grad_(True)
    products.clear()
    with torch.no_grad():
        quiet = linear_jsd(**call, num_valid=40)
    assert products == forward
    loud = linear_jsd(**call, num_valid=40)
    assert not quiet.requires_grad
    torch.testing.assert_close(quiet, loud.detach(), rtol=1e-14, atol=0)  # another kernel, with the gradient in it
    loud.backward()
    assert call["teacher_x"].grad is None and call["teacher_weight"].grad is None


def test_backward_runs_once(device):
    call = problem(6, 30, device)
    inputs = [call["student_x"], call["student_weight"]]
    loss = linear_jsd(**call)
    torch.autograd.grad(loss, inputs, retain_graph=True)
    with pytest.raises(RuntimeError, match="compute the loss again"):
        torch.autograd.grad(loss, inputs)
    loss = linear_jsd(**call, reduction="none").sum()
    first, second = (torch.autograd.grad(loss, inputs, retain_graph=True) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_gradcheck_of_every_token(device):
    call = problem(2, 4, device, hidden=2, teacher_hidden=2)
    call["labels"] = torch.tensor([1, IGNORE], device=device)
    trained = ("student_x", "student_weight", "student_bias")
    for options in ({"beta": 0.0}, {"weight_hard": 0.4, "temperature": 2.0}, {"beta": 1.0}):
        assert torch.autograd.gradcheck(
            lambda *t, o=options: linear_jsd(**call | dict(zip(trained, t, strict=True)), reduction="none", **o),
            [call[name] for name in trained],
        )


def test_weight_grad_is_not_copied(device, monkeypatch):
    """The buffer that forward filled becomes weight.grad; later micro-batches are added to it."""
    call = problem(6, 30, device, ignored=0.0)
    buffers = []
    real = _chunks.scale_
    monkeypatch.setattr(_chunks, "scale_", lambda t, f: buffers.append(t.data_ptr()) or real(t, f))
    for _ in range(2):
        (0.5 * linear_jsd(**call)).backward()
        assert call["student_weight"].grad.data_ptr() in buffers
    expected = results(linear_jsd_reference, call)["student_weight"]
    torch.testing.assert_close(call["student_weight"].grad, expected)


def test_fp16_gradients_do_not_underflow(device):
    """The mean over many tokens, with the factor of a loss scaler: a gradient of 1e-3 / 40 000 is below fp16."""
    call = problem(96, 20, device, torch.float16, ignored=0.0, scale=0.2)
    scale = torch.tensor(2.0**16, device=device)
    small = {"weight_soft": 1e-3, "weight_hard": 1e-4}
    actual = results(linear_jsd, call, scale, **small)
    exact = results(linear_jsd_reference, widened(call), scale, **small)
    for name in ("student_x", "student_weight", "student_bias"):
        error = (actual[name].double() - exact[name]).norm() / exact[name].norm()
        # Gradients of logits near 1e-5, in the subnormals of fp16, are off by 2^-25; logits near 1 by 2^-11.
        assert actual[name].dtype == torch.float16 and error < 2e-2, (name, error)


@pytest.mark.parametrize("state", ["fp32", "mixed"])
def test_autocast(device, state):
    dtype = torch.bfloat16 if device == "cuda" else torch.float16
    call = problem(40, 50, device, torch.float32, hidden=16, teacher_hidden=12)
    if state == "mixed":
        call["student_x"] = call["student_x"].detach().to(dtype).requires_grad_()
        call["teacher_x"] = call["teacher_x"].to(dtype)
    trained = ("student_x", "student_weight", "student_bias")
    with torch.autocast(device, dtype=dtype):
        actual = results(linear_jsd, call, weight_hard=0.5)
    exact = results(linear_jsd_reference, widened(call), weight_hard=0.5)
    for name in trained:
        assert actual[name].dtype == call[name].dtype
        # Inputs and logits near 8 in the low dtype: about 8 eps on every probability, here in a difference of two.
        error = (actual[name].double() - exact[name]).norm() / exact[name].norm()
        assert error < 16 * torch.finfo(dtype).eps
    if state == "mixed":
        with pytest.raises(InputError, match="autocast"):
            linear_jsd(**call)


def test_teacher_of_another_dtype(device, poison):
    """A bf16 or fp16 teacher beside an fp32 student: each multiplies in its own dtype."""
    call = problem(30, 50, device, torch.float32)
    for name in ("teacher_x", "teacher_weight", "teacher_bias"):
        call[name] = call[name].half()
    actual = results(linear_jsd, call)
    assert actual["loss"].dtype == torch.float32
    # The teacher's logits, near 4, are rounded to fp16 in both, but by products of another order.
    assert_same(actual, results(linear_jsd_reference, call), 1e-3, 5e-4)


@pytest.mark.parametrize("layout", ["three_dims", "transposed", "expanded", "shifted"])
def test_layouts(device, layout):
    call = problem(1, 30, device, hidden=8, teacher_hidden=8)
    student, teacher = (torch.randn(3, 50, 8, dtype=torch.float64, device=device) for _ in range(2))
    student.requires_grad_()
    view = {
        "three_dims": lambda t: t,
        "transposed": lambda t: t.transpose(0, 1),
        "expanded": lambda t: t[:1, :1].expand(2, 70, 8),
        "shifted": lambda t: t[:, :-1],
    }[layout]
    call["labels"] = some_labels(tuple(view(teacher).shape[:-1]), 30, device, ignored=0.9)
    call |= {"teacher_x": view(teacher), "teacher_weight": call["teacher_weight"].t().contiguous().t()}

    def through(op):
        return lambda student_x, **rest: op(student_x=view(student_x), **rest)

    for reduction in ("mean", "none"):
        call["student_x"] = student
        actual = results(through(linear_jsd), call, reduction=reduction)
        assert_same(actual, results(through(linear_jsd_reference), call, reduction=reduction), 1e-10, 1e-12)


@pytest.mark.gpu  # interpreted: test_every_op, smaller
def test_deterministic(device):
    call = problem(150, 70, device, torch.float32, ignored=0.6)
    runs = [results(linear_jsd, call, workspace_bytes=1, weight_hard=0.5) for _ in range(2)]
    for run in runs[1:]:
        assert_same(run, runs[0], 0, 0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"labels": torch.zeros(3, dtype=torch.int64)}, "one entry per token"),
        ({"student_weight": torch.randn(5, 3)}, "student_weight"),
        ({"teacher_weight": torch.randn(5, 4)}, "teacher_weight"),
        ({"teacher_weight": torch.randn(4, 3)}, "smaller than student_weight"),
        ({"teacher_x": torch.randn(3, 3)}, "teacher_x"),
        ({"teacher_x": torch.zeros(2, 3, dtype=torch.int64)}, "teacher_x is torch.int64"),
        ({"student_weight": torch.randn(5, 4).double()}, "cast one"),
        ({"student_bias": torch.randn(4)}, r"must be \[5\]"),
        ({"teacher_bias": torch.randn(4)}, r"must be \[6\]"),
        ({"beta": -0.1}, "beta=-0.1"),
        ({"temperature": 0.0}, "temperature=0.0"),
        ({"reduction": "batchmean"}, "reduction='batchmean'"),
        ({"weight_hard": 0.5}, "weight_hard=0.5"),
        ({"accum_dtype": torch.float16}, "accum_dtype"),
        ({"workspace_bytes": 0}, "workspace_bytes=0"),
        ({"num_valid": -1}, "num_valid=-1"),
    ],
)
def test_input_errors(change, message):
    call = {
        "student_x": torch.randn(2, 4), "student_weight": torch.randn(5, 4), "teacher_x": torch.randn(2, 3),
        "teacher_weight": torch.randn(6, 3),
    } | change  # fmt: skip
    with pytest.raises(InputError, match=message):
        linear_jsd(**call)


def test_cpu_path_is_the_reference(monkeypatch):
    monkeypatch.setattr(module, "use_triton", lambda x: False)
    call = problem(5, 7, "cpu", padding=2)
    options = {"weight_hard": 0.5, "return_soft_hard_loss": True, "temperature": 2.0}
    assert_same(results(linear_jsd, call, num_valid=5, **options), results(linear_jsd_reference, call, **options), 0, 0)


def test_on_meta():
    call = {name: t.to("meta") for name, t in problem(5, 7, "cpu", torch.bfloat16).items()}
    assert linear_jsd(**(call | {"labels": None})).dtype == torch.float32


@pytest.mark.parametrize(
    ("reduction", "dtype"), [("mean", torch.float32), ("none", torch.float32), ("mean", torch.float16)]
)
def test_compile(device, reduction, dtype):
    """Whole graph, gradients included, with the fused op opaque in it; fp16 hands one more tensor to backward."""
    call = problem(150, 20, device, dtype, ignored=0.9, scale=0.5)
    options = {"reduction": reduction, "num_valid": 100, "weight_hard": 0.5, "return_soft_hard_loss": True}

    def op(**call):
        out = linear_jsd(**call, **options)
        return LinearJSDOutput(3 * out.loss.sum(), out.soft_loss, out.hard_loss)

    compiled = torch.compile(op, fullgraph=True, backend="inductor" if device == "cuda" else "aot_eager")
    # Upstream is multiplied in at another place, which rounds to the dtype once more.
    tolerance = 2**-10 if dtype == torch.float16 else 1e-5
    assert_same(results(compiled, call), results(op, call), tolerance, tolerance)


def test_custom_op_says_what_it_returns(device):
    call = {name: t.detach() for name, t in problem(8, 7, device, torch.float32, padding=1).items()}
    names = ("student_x", "student_weight", "student_bias", "teacher_x", "teacher_weight", "teacher_bias", "labels")
    for reduction, parts in (("mean", True), ("none", False)):
        args = [call[name] for name in names] + [None, parts, torch.float32, 0.5, -100, reduction, 2.0, 0.5, 1.0]
        args += [8, 2**20, torch.float32, True, True, True, True]
        torch.library.opcheck(module._run_op, args, test_utils=("test_schema", "test_faketensor"))


def on_gpu(reduction):
    """An op of the trained tensors, those, and an upstream gradient."""
    call = problem(1000, 5000, "cuda", torch.bfloat16, hidden=128, teacher_hidden=64, ignored=0.6, scale=0.1)
    rest = {name: call[name] for name in ("teacher_x", "teacher_weight", "labels")}

    def op(x, weight):
        return linear_jsd(x, weight, **rest, reduction=reduction, weight_hard=0.5, num_valid=450)

    upstream = torch.randn(1000 if reduction == "none" else (), device="cuda")
    return op, [call["student_x"], call["student_weight"]], [upstream]


@pytest.mark.gpu
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("check", [assert_compiles, assert_never_waits])
def test_compiled_and_never_waits(check, reduction):
    check(*on_gpu(reduction))


@pytest.mark.gpu
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_cuda_graph(reduction):
    op, inputs, upstream = on_gpu(reduction)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        forward_backward(op, inputs, upstream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = forward_backward(op, inputs, upstream)
    with torch.no_grad():
        for x in inputs:
            x.copy_(0.1 * torch.randn_like(x))
    graph.replay()
    for actual, expected in zip(captured, forward_backward(op, inputs, upstream), strict=True):
        # cuBLAS may pick other algorithms under capture, whose workspace differs.
        torch.testing.assert_close(actual, expected, rtol=2e-2, atol=1e-2 * expected.abs().max().item())


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("accum_dtype", "peak"),
    [
        # both workspaces 501 MiB, dx 32, dweight 1002
        (None, 1.6),
        # dx 32, dweight in fp32 2004, beside it both workspaces, 501, and, at the end, half of dweight in bf16
        (torch.float32, 2.5),
    ],
)
def test_peak_memory(accum_dtype, peak):
    """4096 x 4096 x 128256 in bf16, GiB beyond the inputs, gradients included."""
    x, y = (torch.randn(4096, 4096, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    weight, teacher = (torch.randn(128256, 4096, dtype=torch.bfloat16, device="cuda").mul_(0.02) for _ in range(2))
    x.requires_grad_()
    weight.requires_grad_()
    linear_jsd(x[:128], weight, y[:128], teacher, accum_dtype=accum_dtype).backward()
    x.grad = weight.grad = None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    (2 * linear_jsd(x, weight, y, teacher, accum_dtype=accum_dtype)).backward()
    assert torch.cuda.max_memory_allocated() - before <= peak * 2**30


@pytest.mark.gpu
def test_beyond_int32():
    """Two workspaces of 2.2e9 logits in one chunk: the last rows are right."""
    call = problem(17152, 128256, "cuda", torch.bfloat16, hidden=64, teacher_hidden=64, ignored=0.0, scale=0.3)
    call["student_bias"] = call["teacher_bias"] = None
    assert 17152 * 128256 > 2**31
    call["student_weight"].requires_grad_(False)
    found = results(linear_jsd, call, reduction="sum", workspace_bytes=2**34)
    tail = dict(call)
    for name in ("student_x", "teacher_x", "labels"):
        tail[name] = call[name].detach()[-8:].requires_grad_(call[name].requires_grad)
    z, u = (F.linear(tail[f"{who}_x"], call[f"{who}_weight"]) for who in ("student", "teacher"))
    assert z.shape == u.shape
    expected = results(linear_jsd_reference, tail, reduction="sum")
    # dx is a sum of 128256 products of bf16.
    error = (found["student_x"][-8:].float() - expected["student_x"].float()).norm() / expected["student_x"].norm()
    assert error < 2e-2
