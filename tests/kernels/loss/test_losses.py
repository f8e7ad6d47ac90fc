"""Losses: metrics, ignored labels, probabilities of 0; over a linear head: chunks, what is not computed, memory."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ligermodels import kernels
from ligermodels.kernels import (
    CrossEntropyOutput,
    cross_entropy,
    cross_entropy_reference,
    jsd,
    jsd_reference,
    kl_div,
    kl_div_reference,
    linear_cross_entropy,
    linear_cross_entropy_reference,
    linear_jsd,
    linear_jsd_reference,
)
from ligermodels.kernels.loss.linear_jsd import DIVERGENCES
from tests.kernels.cases import IGNORE
from tests.kernels.interpreter import CHUNK
from tests.kernels.judge import as_dtype, assert_same
from tests.kernels.on_gpu import large
from tests.kernels.seen import Seen

CE_METRICS = ("return_z_loss", "return_token_accuracy", "return_predicted_tokens", "return_entropy")
METRICS = {
    "linear_cross_entropy": CE_METRICS,
    "linear_logprobs": ("return_logits_mean",),
    "linear_jsd": ("return_soft_hard_loss",),
    "cross_entropy": CE_METRICS,
    "jsd": (),
}
OPS = {name: (getattr(kernels, name), getattr(kernels, f"{name}_reference")) for name in METRICS}
each_op = pytest.mark.parametrize("name", OPS)
each_head = pytest.mark.parametrize("name", [name for name in OPS if name.startswith("linear")])


def problem(name, tokens, vocab, device, dtype=torch.float64, hidden=8, ignored=0.3, scale=1.0, bias=True):
    """The tensors of a call, of which x, weight and bias (the student's) have gradients."""

    def random(*shape, train=True):
        return (scale * torch.randn(shape, dtype=torch.float64)).to(device, dtype).requires_grad_(train)

    labels = torch.randint(0, vocab, (tokens,), device=device)
    labels = labels.masked_fill(torch.rand(tokens, device=device) < ignored, IGNORE)
    if name == "cross_entropy":
        return {"logits": random(tokens, vocab), "labels": labels}
    if name == "jsd":
        x, y = (random(tokens, vocab).detach().log_softmax(-1).requires_grad_() for _ in range(2))
        return {"input": x, "target": y, "labels": labels}
    who = "student_" if name == "linear_jsd" else ""
    call = {f"{who}x": random(tokens, hidden), f"{who}weight": random(vocab, hidden)}
    if bias:
        call[f"{who}bias"] = random(vocab)
    if name == "linear_jsd":
        call |= {"teacher_x": random(tokens, 4, train=False), "teacher_weight": random(vocab, 4, train=False)}
    return call | {"labels": labels}


def results(op, call: dict, rows=slice(None), **options) -> dict[str, Tensor]:
    """All outputs, and the gradients of the weighted sum of the first one, or of its `rows`."""
    out = op(**call, **options)
    outputs = out if isinstance(out, tuple) else (out,)
    outputs = [t[rows] if t is not None and t.dim() else t for t in outputs]
    found = {f"output {i}": t for i, t in enumerate(outputs) if t is not None}
    weights = torch.cos(torch.arange(outputs[0].numel(), device=outputs[0].device)).view(outputs[0].shape) + 1.5
    trained = {name: t for name, t in call.items() if t.requires_grad}
    gradients = torch.autograd.grad((outputs[0] * weights.to(outputs[0].dtype)).sum(), list(trained.values()))
    return found | dict(zip(trained, gradients, strict=True))


def in_fp64(call):
    return {n: t.detach().requires_grad_(call[n].requires_grad) for n, t in as_dtype(call, torch.float64).items()}


def metrics(name):
    hard = {"weight_hard": 0.5} if name == "linear_jsd" else {}
    return dict.fromkeys(METRICS[name], True) | hard


# Metrics and special values.


def test_metrics_of_the_reference_by_hand():
    logits = torch.randn(9, 11, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(0, 11, (9,)).masked_fill(torch.arange(9) % 3 == 1, IGNORE)
    valid = labels != IGNORE
    options = dict(softcap=2.0, z_loss=0.1, token_scaling=True, num_items_in_batch=13)
    loss, z_part, hits, entropy = 0.0, 0.0, 0, 0.0
    for row, label in zip(logits[valid], labels[valid], strict=True):
        z = 2.0 * torch.tanh(row / 2.0)
        p = torch.softmax(z, 0)[label]
        entropy += torch.distributions.Categorical(logits=z.detach()).entropy() / valid.sum()
        z_part = z_part + p.detach() * 0.1 * torch.log(torch.exp(z).sum()) ** 2 / 13
        loss = loss - p.detach() * torch.log(p) / 13
        hits += int(row.argmax() == label)
    accuracy, predicted = torch.as_tensor(hits / valid.sum()), logits.argmax(-1).where(valid, -1)
    expected = CrossEntropyOutput(loss + z_part, z_part.detach(), accuracy, predicted, entropy)
    call = {"logits": logits}
    actual = results(cross_entropy_reference, call, labels=labels, **options, **metrics("cross_entropy"))
    assert_same(actual, results(lambda logits: expected, call), 1e-12, 1e-14)


def test_argmax_is_the_first_of_equals(device):
    logits = torch.zeros(3, 70, device=device)
    logits[0, [20, 50]] = 1.0
    logits[1, 69] = 1.0
    out = cross_entropy(logits, torch.tensor([20, 3, 0], device=device), **metrics("cross_entropy"))
    assert out.predicted_tokens.tolist() == [20, 69, 0] and out.token_accuracy.item() == pytest.approx(2 / 3)
    several_tiles = cross_entropy(
        torch.zeros(1, 20000, device=device), torch.tensor([0], device=device), return_predicted_tokens=True
    )
    assert several_tiles.predicted_tokens.item() == 0


@pytest.mark.parametrize("log_target", [False, True])
def test_kl_div_of_no_probability_counts_for_nothing(device, poison, log_target):
    """Where the target is 0, nothing is NaN or infinite, even if the input is -inf: not so in torch."""
    t = torch.tensor([[0.0, 0.25, 0.0, 0.75]], device=device)
    x = torch.tensor([[-torch.inf, -1.0, -2.0, -0.5]], device=device, requires_grad=True)
    call = {"input": x, "target": (t.log() if log_target else t).requires_grad_()}
    for op in (kl_div, kl_div_reference):
        loss, dx, dt = results(op, call, reduction="sum", log_target=log_target).values()
        expected = 0.25 * (torch.log(torch.tensor(0.25)) + 1) + 0.75 * (torch.log(torch.tensor(0.75)) + 0.5)
        torch.testing.assert_close(loss.cpu(), expected)
        assert dx[0, 0] == dx[0, 2] == dt[0, 0] == dt[0, 2] == 0 and dt.isfinite().all()
    # A target that has probability where the input has none is infinitely far away, and NaN stays NaN.
    t = torch.full((1, 4), 0.25, device=device)
    t = t.log() if log_target else t
    assert kl_div(x.detach(), t, log_target=log_target).item() == torch.inf
    assert kl_div(t, t * torch.nan, log_target=log_target).isnan()


@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides")
@pytest.mark.parametrize("path", ["poison", "without_triton"])
def test_kl_div_of_other_dtypes_and_shapes(device, request, path):
    """Mixed dtypes are promoted and shapes are broadcast, as in torch; batchmean divides by the input's size."""
    request.getfixturevalue(path)
    x = torch.randn(4, 6).log_softmax(-1).to(device, torch.float16).requires_grad_()
    t = torch.randn(3, 4, 6).log_softmax(-1).to(device).requires_grad_()
    for reduction in ("mean", "batchmean", "sum", "none"):
        for pair in ((x, t), (t, x), (x, t.detach()[0, 0].requires_grad_())):
            call = dict(zip(("input", "target"), pair, strict=True))
            actual, expected = (results(op, call, reduction=reduction, log_target=True) for op in (kl_div, F.kl_div))
            assert actual["output 0"].dtype == expected["output 0"].dtype == torch.float32
            # The gradient of x is rounded to fp16; three of them are, which may cancel, where x is broadcast.
            assert_same(actual, expected, 1e-3, 2e-3)


@pytest.mark.parametrize("beta", [0.0, 0.1, 1.0])
def test_jsd_of_no_probability(device, poison, beta):
    """Logits of 1e4 and tokens without probability: nothing underflows into NaN, infinite is what has to be."""
    x, y = (1e4 * torch.randn(3, 50, dtype=torch.float64) for _ in range(2))
    x[0, 3], y[1, 4] = -torch.inf, -torch.inf
    x[2, 5] = y[2, 5] = -torch.inf
    call = {n: z.log_softmax(-1).to(device).requires_grad_() for n, z in (("input", x), ("target", y))}
    exact = results(jsd_reference, call, beta=beta, reduction="none")
    assert not any(e.isnan().any() for e in exact.values())
    # Log-probabilities near 1e4 are rounded to fp32 once.
    low = {n: z.detach().float().requires_grad_() for n, z in call.items()}
    assert_same(results(jsd, low, beta=beta, reduction="none"), exact, 1e-5, 1e-6)
    uniform = torch.full((1, 4), 0.25, device=device).log()
    hole = torch.tensor([[0.5, 0.5, 0.0, 0.0]], device=device).log()
    # What the first lacks and the second has is infinitely far away, but not from their mixture.
    infinite = [jsd(hole, uniform, beta=beta).isinf().item(), jsd(uniform, hole, beta=beta).isinf().item()]
    assert infinite == [beta == 0.0, beta == 1.0]


# Chunks.


@each_head
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


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_logits_of_model_and_teacher_share_the_workspace(device, divergence):
    call = problem("linear_jsd", 4 * CHUNK, 300, device, torch.float32, ignored=0.0, bias=False)
    with Seen() as seen:
        results(linear_jsd, call, divergence=divergence, workspace_bytes=2 * CHUNK * 320 * (4 + 4))
    assert seen.largest == 2 * CHUNK * 320 * 4


def test_fp32_accumulation_is_as_exact_as_one_chunk(device):
    """Over 3 chunks; half precision is not. Where dweight is larger than the workspace, its first 128 of 131 rows are
    summed separately, and all are rounded into their memory."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float16
    size = 4 * CHUNK
    call = problem("linear_cross_entropy", 3 * CHUNK, 131, device, dtype, size, 0.0, 1 / size**0.25, bias=False)
    exact = results(linear_cross_entropy_reference, in_fp64(call), reduction="sum")["weight"]

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
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_ignored_tokens_reach_nothing(device, poison, name, reduction):
    """11 of the tokens are valid, and the others hold NaN. Over a head, one chunk enters the matmuls."""
    tokens, (op, reference) = CHUNK + 19, OPS[name]
    call = problem(name, tokens, 30, device, ignored=0.0)
    valid = torch.zeros(tokens, dtype=torch.bool, device=device)
    valid[torch.randperm(tokens, device=device)[:11]] = True
    call["labels"] = torch.where(valid, call["labels"].clamp(min=6), 5)
    options = metrics(name) | ({} if name == "linear_logprobs" else {"reduction": reduction})
    per_token = [n for n, t in call.items() if len(t) == tokens]
    kept = call | {n: call[n].detach()[valid].requires_grad_(call[n].requires_grad) for n in per_token}
    expected = results(reference, kept, **options)
    for n in set(per_token) - {"labels"}:
        call[n] = call[n].detach().masked_fill(~valid[:, None], torch.nan).requires_grad_(call[n].requires_grad)
    for known in ({"num_valid": 14}, {}) if name.startswith("linear") else ({},):
        labels = call["labels"] if known else call["labels"].cpu() if name.startswith("linear") else call["labels"]
        with Seen() as seen:
            actual = results(op, call | {"labels": labels}, valid, ignore_index=5, **known, **options)
        for n in set(per_token) & actual.keys():
            assert not actual[n][~valid].any()
            actual[n] = actual[n][valid]
        assert_same(actual, expected, 1e-10, 1e-12)
        assert all(CHUNK in shape[:2] and tokens not in shape for shape in seen.matmuls)


@each_head
def test_more_valid_labels_than_announced(device, name):
    """num_valid is a multiple of the smallest chunk, small enough that the ignored tokens are dropped."""
    tokens, (op, reference) = CHUNK + CHUNK // 2, OPS[name]
    call = problem(name, tokens, 30, device, ignored=0.0)
    assert op(**call, num_valid=CHUNK).isnan().any()
    torch.testing.assert_close(op(**call, num_valid=tokens), reference(**call))
    call["labels"] = call["labels"].masked_fill(torch.arange(tokens, device=device) >= CHUNK, IGNORE)
    found, expected = results(op, call, num_valid=CHUNK - 5, **metrics(name)), results(reference, call, **metrics(name))
    assert_same(found, expected, 1e-10, 1e-12)


@pytest.mark.parametrize("name", ["cross_entropy", "linear_cross_entropy", "linear_jsd"])
def test_fp16_gradients_do_not_underflow(device, name):
    """One of 2e6 tokens: p / 2e6 is below fp16, but not times a loss scaler's 65536."""
    call = problem(name, 32, 20, device, torch.float16, ignored=0.0, scale=0.3)
    small = {"weight_soft": 1e-3, "weight_hard": 1e-4} if name == "linear_jsd" else {"num_items_in_batch": 2_000_000}
    trained = [n for n, t in call.items() if t.requires_grad]
    inputs = in_fp64(call)
    (op, reference), scale = OPS[name], 2.0**16
    actual = torch.autograd.grad(op(**call, **small) * scale, [call[n] for n in trained])
    exact = torch.autograd.grad(reference(**inputs, **small) * scale, [inputs[n] for n in trained])
    for a, b in zip(actual, exact, strict=True):
        # fp16 logits near 4 are off by 2^-10; gradients of logits near 1e-5, in fp16's subnormals, by 2^-25.
        assert a.dtype == torch.float16 and (a.double() - b).norm() < 2e-2 * b.norm()


@pytest.mark.parametrize("tokens, vocab, options", [
    (20, 300, {}),
    (6, 7000, {"weight_hard": 0.1, "beta": 0.0, "reduction": "none"}),  # rows of several tiles
    (20, 300, {"divergence": "tv"}),
    (6, 7000, {"divergence": "cosine", "weight_hard": 0.1, "temperature": 2.0}),
], ids=str)  # fmt: skip
def test_a_teacher_nearer_than_rounded_logits_can_tell(device, poison, tokens, vocab, options):
    """Logits near 16, a tenth apart from the teacher's: in 16 bits they come in steps of 2^-7 (fp16) or 2^-4 (bf16)."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float16
    call = problem("linear_jsd", tokens, vocab, device, dtype, hidden=64, bias=False)
    call["teacher_x"] = call["student_x"].detach().clone()
    weight = call["student_weight"].detach()
    call["teacher_weight"] = weight + 0.01 * torch.randn_like(weight)
    options = options | {"weight_soft": 256.0}  # so that no gradient of a logit is a subnormal of fp16
    actual = results(linear_jsd, call, workspace_bytes=1, **options)
    expected = results(linear_jsd_reference, in_fp64(call), **options)
    errors = {name: ((actual[name].double() - t).norm() / t.norm()).item() for name, t in expected.items()}
    # The loss is of second order in differences of 0.1 between fp32 logits near 16, off by some 1e-6. The gradients of
    # the logits are rounded to the dtype, and so are those made of them, each by eps / 2 at most.
    assert errors.pop("output 0") < 1e-4, errors
    assert max(errors.values()) < torch.finfo(dtype).eps, errors


# Of a GPU alone.


@large
@pytest.mark.gpu
@each_head
def test_logits_beyond_int32(name):
    """A workspace of 2.2e9 logits in one chunk: the last rows are right."""
    call = problem(name, 17152, 128256, "cuda", torch.bfloat16, 64, 0.0, 0.3, bias=False)
    tail = {n: t.detach()[-8:].requires_grad_(t.requires_grad) if n[-1] in "xs" else t for n, t in call.items()}
    options = {} if name == "linear_logprobs" else {"reduction": "none"}
    op, reference = OPS[name]
    out, expected = op(**call, workspace_bytes=2**34, **options), reference(**tail, **options)
    torch.testing.assert_close(out[-8:], expected, rtol=1e-2, atol=1e-2)
    x = next(iter(call))
    (grad,), (other,) = torch.autograd.grad(out[-8:].sum(), call[x]), torch.autograd.grad(expected.sum(), tail[x])
    # dx is a sum of 128256 terms of bf16.
    assert (grad[-8:].float() - other.float()).norm() <= 2e-2 * other.float().norm()
