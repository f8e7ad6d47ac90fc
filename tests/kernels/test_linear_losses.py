"""Losses over a linear head: chunks of tokens, what is not computed, and what is never in memory."""

import pytest
import torch
from torch import Tensor

from ligermodels.kernels import (
    linear_cross_entropy,
    linear_cross_entropy_reference,
    linear_jsd,
    linear_jsd_reference,
    linear_logprobs,
    linear_logprobs_reference,
)
from tests.kernels import CHUNK
from tests.kernels.cases import IGNORE
from tests.kernels.judge import as_dtype, assert_same
from tests.kernels.on_gpu import large
from tests.kernels.oracle import assert_as_exact
from tests.kernels.seen import Seen, adding_in_place

METRICS = {
    "cross entropy": ("return_z_loss", "return_token_accuracy", "return_predicted_tokens", "return_entropy"),
    "logprobs": ("return_logits_mean",),
    "jsd": ("return_soft_hard_loss",),
}
OPS = {
    "cross entropy": (linear_cross_entropy, linear_cross_entropy_reference),
    "logprobs": (linear_logprobs, linear_logprobs_reference),
    "jsd": (linear_jsd, linear_jsd_reference),
}
each_op = pytest.mark.parametrize("name", OPS)


def problem(name, tokens, vocab, device, dtype=torch.float64, hidden=8, ignored=0.3, scale=1.0, bias=True):
    """The tensors of a call, of which x, weight and bias (the student's) have gradients."""

    def random(*shape, train=True):
        return (scale * torch.randn(shape, dtype=torch.float64)).to(device, dtype).requires_grad_(train)

    who = "student_" if name == "jsd" else ""
    call = {f"{who}x": random(tokens, hidden), f"{who}weight": random(vocab, hidden)}
    if bias:
        call[f"{who}bias"] = random(vocab)
    if name == "jsd":
        call |= {"teacher_x": random(tokens, 4, train=False), "teacher_weight": random(vocab, 4, train=False)}
    labels = torch.randint(0, vocab, (tokens,), device=device)
    return call | {"labels": labels.masked_fill(torch.rand(tokens, device=device) < ignored, IGNORE)}


def results(op, call: dict, **options) -> dict[str, Tensor]:
    """All outputs, and the gradients of the weighted sum of the first one."""
    out = op(**call, **options)
    outputs = out if isinstance(out, tuple) else (out,)
    found = {f"output {i}": t for i, t in enumerate(outputs) if t is not None}
    weights = torch.cos(torch.arange(outputs[0].numel(), device=outputs[0].device)).view(outputs[0].shape) + 1.5
    trained = {name: t for name, t in call.items() if t.requires_grad}
    gradients = torch.autograd.grad((outputs[0] * weights.to(outputs[0].dtype)).sum(), list(trained.values()))
    return found | dict(zip(trained, gradients, strict=True))


def wide(call):
    return {n: t.detach().requires_grad_(call[n].requires_grad) for n, t in as_dtype(call, torch.float64).items()}


def metrics(name):
    hard = {"weight_hard": 0.5} if name == "jsd" else {}
    return dict.fromkeys(METRICS[name], True) | hard


# Chunks.


@each_op
@pytest.mark.parametrize("grad", [False, True])
def test_logits_are_never_whole(device, name, grad):
    """The largest tensor has the logits of one chunk; rows start at multiples of 64 elements."""
    tokens = 2 * CHUNK + 9
    call = problem(name, tokens, 300, device, torch.float32, ignored=0.9, bias=False)
    options = metrics(name) | {"workspace_bytes": 1, "num_valid": tokens}
    with Seen() as seen, torch.set_grad_enabled(grad):
        found = results(OPS[name][0], call, **options) if grad else {"output 0": OPS[name][0](**call, **options)}
    assert seen.largest == CHUNK * 320 * 4
    if grad:
        expected = results(OPS[name][1], call, **metrics(name))
        assert_same(found, expected, 2e-5, 2e-5)  # fp32 sums in another order


def test_fp32_accumulation_is_as_exact_as_one_chunk(device):
    """Over 3 chunks; half precision is not. Where dweight is larger than the workspace, its first 128 of 131 rows are
    summed apart from the others, and all are rounded into their memory."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float16
    call = problem("cross entropy", 3 * CHUNK, 131, device, dtype, 64, 0.0, 1 / 64**0.25, bias=False)
    exact = results(linear_cross_entropy_reference, wide(call), reduction="sum")["weight"]

    def error(**options):
        found = results(linear_cross_entropy, call, reduction="sum", **options)["weight"]
        return (found.double() - exact).square().mean().sqrt()

    once = error(accum_dtype=torch.float32, workspace_bytes=2**30)
    with Seen() as seen:
        # 2 % for the order of summation inside the matmuls.
        assert error(accum_dtype=torch.float32, workspace_bytes=1) <= 1.02 * once
    assert len(seen.matmuls) == 3 * (2 + 2)  # logits, dx, and dweight in two parts
    assert error(accum_dtype=None, workspace_bytes=1) > 1.02 * once


# What is not computed.


@each_op
def test_ignored_rows_are_not_multiplied(device, poison, name):
    """11 of the tokens are valid: one chunk enters the matmuls, and NaN in the others reaches nothing."""
    tokens, (op, reference) = CHUNK + 19, OPS[name]
    call = problem(name, tokens, 30, device, ignored=0.0)
    valid = torch.zeros(tokens, dtype=torch.bool, device=device)
    valid[torch.randperm(tokens, device=device)[:11]] = True
    call["labels"] = call["labels"].where(valid, IGNORE)
    per_token = [n for n in call if n.endswith("x")]
    kept = call | {n: call[n].detach()[valid].requires_grad_(call[n].requires_grad) for n in (*per_token, "labels")}
    expected = results(reference, kept, **({} if name == "logprobs" else {"reduction": "mean"}), **metrics(name))
    for n in per_token:
        call[n] = call[n].detach().masked_fill(~valid[:, None], torch.nan).requires_grad_(call[n].requires_grad)
    for num_valid, labels in ((14, call["labels"]), (None, call["labels"].cpu())):
        with Seen() as seen:
            actual = op(**call | {"labels": labels}, num_valid=num_valid, **metrics(name))
            first = actual[0] if isinstance(actual, tuple) else actual
            dx, *rest = torch.autograd.grad(
                first[valid].dot((torch.cos(torch.arange(11, device=device)) + 1.5).double()) if first.dim()
                else first * 2.5,
                [t for t in call.values() if t.requires_grad],
            )  # fmt: skip
        assert all(CHUNK in shape[:2] and tokens not in shape for shape in seen.matmuls)
        assert not dx[~valid].any()
        names = [n for n, t in call.items() if t.requires_grad]
        for n, grad in zip(names, [dx[valid], *rest], strict=True):
            torch.testing.assert_close(grad, expected[n], rtol=1e-10, atol=1e-12)


@each_op
def test_more_valid_labels_than_announced(device, name):
    """A multiple of the smallest chunk is announced."""
    tokens, (op, reference) = CHUNK + 9, OPS[name]
    call = problem(name, tokens, 30, device, ignored=0.0)
    assert op(**call, num_valid=CHUNK).isnan().any()
    torch.testing.assert_close(op(**call, num_valid=tokens), reference(**call))
    call["labels"] = call["labels"].masked_fill(torch.arange(tokens, device=device) >= CHUNK, IGNORE)
    torch.testing.assert_close(op(**call, num_valid=CHUNK - 5), reference(**call))


# The gradient of the weight.


@each_op
def test_weight_grad_in_place(device, poison, name):
    """Micro-batches of 2 chunks add to one .grad, as exactly as autograd."""
    tokens = CHUNK + 2
    call = problem(name, tokens, 30, device, torch.float16, ignored=0.95, bias=False)
    call["labels"][[0, -1]] = 3  # in both chunks
    weight = next(n for n in call if n in ("weight", "student_weight"))
    (marked,) = adding_in_place(call[weight])
    options = {"workspace_bytes": 1, "num_valid": tokens}
    inputs = wide(call)
    once = torch.autograd.grad(3 * OPS[name][1](**inputs).sum(), inputs[weight])[0]
    for w in (call[weight], marked, marked):
        (3 * OPS[name][0](**call | {weight: w}, **options).sum()).backward()
    # Autograd rounds more often: the sum, 3 times it, and that added to itself.
    assert_as_exact(marked.grad, call[weight].grad * 2, 2 * once, terms=tokens)
    before = marked.grad.clone()
    (grad,) = torch.autograd.grad(3 * OPS[name][0](**call | {weight: marked}, **options).sum(), marked)
    assert_as_exact(grad, call[weight].grad, once, terms=tokens)
    assert torch.equal(marked.grad, before)


@pytest.mark.parametrize("name", ["cross entropy", "jsd"])
def test_fp16_gradients_do_not_underflow(device, name):
    """One of 2e6 tokens: p / 2e6 is below fp16, but not times a loss scaler's 65536."""
    call = problem(name, 32, 20, device, torch.float16, ignored=0.0, scale=0.3)
    small = {"num_items_in_batch": 2_000_000} if name == "cross entropy" else {"weight_soft": 1e-3, "weight_hard": 1e-4}
    trained = [n for n, t in call.items() if t.requires_grad]
    inputs = wide(call)
    (op, reference), scale = OPS[name], 2.0**16
    actual = torch.autograd.grad(op(**call, **small) * scale, [call[n] for n in trained])
    exact = torch.autograd.grad(reference(**inputs, **small) * scale, [inputs[n] for n in trained])
    for a, b in zip(actual, exact, strict=True):
        # fp16 logits near 4 are off by 2^-10; gradients of logits near 1e-5, in fp16's subnormals, by 2^-25.
        assert a.dtype == torch.float16 and (a.double() - b).norm() < 2e-2 * b.norm()


@pytest.mark.parametrize("tokens, vocab, options", [
    (20, 300, {}), (20, 300, {"beta": 1.0}),
    (6, 7000, {"weight_hard": 0.1, "beta": 0.0, "reduction": "none"}),  # rows of several tiles
], ids=str)  # fmt: skip
def test_a_teacher_nearer_than_rounded_logits_can_tell(device, poison, tokens, vocab, options):
    """Logits near 16, a tenth apart from the teacher's: in 16 bits they come in steps of 2^-7 (fp16) or 2^-4 (bf16)."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float16
    call = problem("jsd", tokens, vocab, device, dtype, hidden=64, bias=False)
    call["teacher_x"] = call["student_x"].detach().clone()
    weight = call["student_weight"].detach()
    call["teacher_weight"] = weight + 0.01 * torch.randn_like(weight)
    options = options | {"weight_soft": 256.0}  # so that no gradient of a logit is a subnormal of fp16
    actual = results(linear_jsd, call, workspace_bytes=1, **options)
    expected = results(linear_jsd_reference, wide(call), **options)
    errors = {name: ((actual[name].double() - t).norm() / t.norm()).item() for name, t in expected.items()}
    # The loss is of second order in differences of 0.1 between fp32 logits near 16, off by some 1e-6. The gradients of
    # the logits are rounded to the dtype, and so are those made of them, each by eps / 2 at most.
    assert errors.pop("output 0") < 1e-4, errors
    assert max(errors.values()) < torch.finfo(dtype).eps, errors


@each_op
def test_compiled(device, name):
    """One graph, gradients included, with the fused op opaque in it."""
    call = problem(name, 20, 20, device, torch.float32, scale=0.5)
    options = metrics(name)
    torch.compiler.reset()
    backend = "inductor" if device == "cuda" else "aot_eager"
    compiled = torch.compile(lambda **call: OPS[name][0](**call, **options), fullgraph=True, backend=backend)
    # Upstream is multiplied in at another place, which rounds to the dtype once more.
    tolerance = 1e-4 if device == "cuda" else 1e-5
    actual = results(compiled, call)
    assert_same(actual, results(OPS[name][0], call, **options), tolerance, tolerance)


# Of a GPU alone.


@pytest.mark.gpu
@pytest.mark.parametrize("name, tokens, accum_dtype, in_place, peak, held", [
    # workspace 501 MiB, dx 64, dweight 1002
    ("cross entropy", 8192, None, False, 1.6, 1.1),
    # dx 64, dweight in fp32 2004, workspace 501
    ("cross entropy", 8192, torch.float32, False, 2.54, 1.05),
    # dx 128, dweight in fp32 until it is added to the gradient that is there, and in forward the workspace
    ("cross entropy", 16384, torch.float32, True, 2.6, 2.1),
    # dx 32, dweight in fp32 2004, beside it both workspaces, 501, and, at the end, half of dweight in bf16
    ("jsd", 4096, torch.float32, False, 2.5, 1.1),
])  # fmt: skip
def test_peak_memory(name, tokens, accum_dtype, in_place, peak, held):
    """T x 4096 x 128256 in bf16, GiB beyond the inputs (and the .grad that is added to), gradients included."""
    x, y = (torch.randn(tokens, 4096, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    weights = [torch.randn(128256, 4096, dtype=torch.bfloat16, device="cuda").mul_(0.02) for _ in range(2)]
    weight = adding_in_place(weights[0])[0] if in_place else torch.nn.Parameter(weights[0])
    labels = torch.randint(0, 128256, (tokens,), device="cuda")
    x.requires_grad_()

    def loss(count):
        if name == "jsd":
            return linear_jsd(x[:count], weight, y[:count], weights[1], accum_dtype=accum_dtype)
        return linear_cross_entropy(x[:count], weight, labels[:count], accum_dtype=accum_dtype)

    loss(128).backward()  # cuBLAS has its workspace from here on
    x.grad = None
    weight.grad = weight.grad if in_place else None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = loss(tokens)
    assert torch.cuda.memory_allocated() - before <= held * 2**30
    forward = torch.cuda.max_memory_allocated()
    (2 * out).backward()
    assert torch.cuda.max_memory_allocated() - before <= peak * 2**30
    assert not in_place or torch.cuda.max_memory_allocated() == forward


@large
@pytest.mark.gpu
@each_op
def test_logits_beyond_int32(name):
    """A workspace of 2.2e9 logits in one chunk: the last rows are right."""
    call = problem(name, 17152, 128256, "cuda", torch.bfloat16, 64, 0.0, 0.3, bias=False)
    tail = {n: t.detach()[-8:].requires_grad_(t.requires_grad) if n[-1] in "xs" else t for n, t in call.items()}
    options = {} if name == "logprobs" else {"reduction": "none"}
    op, reference = OPS[name]
    out, expected = op(**call, workspace_bytes=2**34, **options), reference(**tail, **options)
    torch.testing.assert_close(out[-8:], expected, rtol=1e-2, atol=1e-2)
    x = next(iter(call))
    (grad,), (other,) = torch.autograd.grad(out[-8:].sum(), call[x]), torch.autograd.grad(expected.sum(), tail[x])
    # dx is a sum of 128256 terms of bf16.
    assert (grad[-8:].float() - other.float()).norm() <= 2e-2 * other.float().norm()
