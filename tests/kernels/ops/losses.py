"""Entries of the table of ops: cross entropy and log probabilities."""

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ligermodels import kernels
from ligermodels.kernels._triton import accumulator
from tests.kernels.cases import FEW_VOCABS, IGNORE, VOCABS, Case, Maker, Op, Sizes
from tests.kernels.interpreter import CHUNK

# Cross entropy.


def eager_cross_entropy(
    logits, labels, *, class_weight=None, label_smoothing=0.0, z_loss=0.0, softcap=None, reduction="mean"
):
    """The loss of transformers, logits cast up, with torch's options; the cap and z-loss as models write them."""
    rows, y = logits.reshape(-1, logits.shape[-1]).to(accumulator(logits.dtype)), labels.reshape(-1).long()
    if softcap is not None:
        rows = softcap * torch.tanh(rows / softcap)
    class_weight = None if class_weight is None else class_weight.to(rows.dtype)
    loss = F.cross_entropy(rows, y, class_weight, label_smoothing=label_smoothing, reduction=reduction)
    if z_loss:
        z = (z_loss * rows.logsumexp(-1).square()).masked_fill(y == IGNORE, 0)
        loss = loss + (z if reduction == "none" else z.sum() if reduction == "sum" else z.sum() / (y != IGNORE).sum())
    return loss


LOSS_CHOICES = {
    "reduction": ["mean", "sum", "none"],
    "label_smoothing": [0.0, 0.0, 0.1],
    "z_loss": [0.0, 0.0, 1e-2],
    "softcap": [None, None, 30.0],
}
MORE_OF_A_LOSS: dict[str, list] = {
    "softcap": [4.0],
    "weighted": [True],
    "items": [None, None, 7, "tensor"],
    "token_scaling": [False, True],
    "metrics": [False, True],
}
"""What transformers' loss has not: the number of items in a batch, DFT's scaling, and metrics."""


def loss_options(m: Maker, options: dict[str, Any], items, metrics: bool) -> dict[str, Any]:
    """The arguments of a loss, which has `items` (num_items_in_batch) with reduction="mean" alone."""
    if items is not None and options.get("reduction", "mean") == "mean":
        options |= {"num_items_in_batch": torch.tensor(7, device=m.device) if items == "tensor" else items}
    if metrics:
        names = ("z_loss", "token_accuracy", "predicted_tokens", "entropy")
        options |= {f"return_{name}": True for name in names}
    return options


def confident(rows: int, vocab: int, p: float) -> tuple[Tensor, Tensor]:
    """Logits whose label has about the probability p, and the labels."""
    logits, labels = torch.randn(rows, vocab) / 8, torch.arange(rows) % vocab
    logits[torch.arange(rows), labels] = torch.tensor(p / (1 - p) * (vocab - 1)).log() + torch.randn(rows) / 8
    return logits, labels


def sure_head(m: Maker, **options) -> Case:
    """A head whose logits are those of `confident`."""
    logits, labels = confident(9, 70, 0.9999)
    weight = torch.zeros(70, 16)
    weight[:, :9] = logits.t()
    tensors = {"x": m.of(torch.eye(9, 16)), "weight": m.of(weight), "labels": labels.to(m.device)}
    return Case(tensors, options, 70)


def probability_noise(case: Case, upstream: list[Tensor]) -> dict[str, Tensor]:
    """What an ulp of fp32 at the probability 1 costs: the sum of exponentials rounds there, and log(1) cancels."""
    tensors = {name.removeprefix("student_"): t.detach() for name, t in case.tensors.items()}
    prefix = "student_" if "student_x" in case.tensors else ""
    first, given = tensors["logits"] if "logits" in tensors else tensors["x"], upstream[0].double().abs()
    tokens, per_token = first.shape[:-1], given.dim() > 0
    valid = (tensors["labels"] != IGNORE).double() if "labels" in tensors else given.new_ones(tokens)
    mean = not per_token and case.options.get("reduction", "mean") == "mean"
    rows = 2.0**-23 * valid * (given.reshape(tokens) if per_token else given)
    rows = rows / valid.sum().clamp(min=1) if mean else rows
    loss = {"output 0": 2.0**-23 * (valid.reshape(given.shape) if per_token else torch.ones_like(given))}
    if "logits" in tensors:
        return loss | {"d_logits": rows[..., None].expand(first.shape)}
    weight = tensors["weight"].double().abs()
    return loss | {
        f"d_{prefix}x": (rows[..., None] * weight.amax(0)).expand(first.shape),
        f"d_{prefix}weight": (rows.flatten() @ first.double().abs().flatten(0, -2)).expand(weight.shape),
    }


def loss_op() -> Op:
    def make(m, rows, *, vocab, weighted=False, items=None, metrics=False, **options):
        lead = m.lead(rows)
        tensors = {"logits": m(*lead, vocab, scale=m.draw.choice([1.0, 3.0])), "labels": m.labels(vocab, *lead)}
        if weighted:
            tensors["class_weight"] = torch.rand(vocab, device=m.device) + 0.5
        return Case(tensors, loss_options(m, options, items, metrics), vocab)

    def edge(values, **options):
        def case(m):
            logits, labels = values()
            return Case({"logits": m.of(logits), "labels": labels.to(m.device)}, options, logits.shape[1])

        return case

    def some(rows=9, vocab=70, scale=1.0, ignored=0.0):
        labels = torch.randint(vocab, (rows,))
        return torch.randn(rows, vocab) * scale, labels.masked_fill(torch.rand(rows) < ignored, IGNORE)

    values = {
        "label at p = 0.9999": lambda: confident(9, 70, 0.9999),
        "label at p = 0.9999, 50257 classes": lambda: confident(3, 50257, 0.9999),
        "logits of 1e4": lambda: some(scale=1e4),
        "rows of equal values": lambda: (torch.arange(9.0)[:, None].expand(9, 70) * 10, torch.arange(9)),
        "all ignored": lambda: some(ignored=1.1),
        "one class": lambda: some(vocab=1),
    }
    edges = {}
    for reduction in ("mean", "none"):
        edges |= {f"{what}, {reduction}": edge(make_them, reduction=reduction) for what, make_them in values.items()}
        edges[f"logits of 1e4, capped, {reduction}"] = edge(values["logits of 1e4"], reduction=reduction, softcap=30.0)

    def huge(m):
        m.strided, rows, vocab = False, 16800, 128256
        tensors = {"logits": m.big(rows, vocab), "labels": m.labels(vocab, rows, ignored=0.3)}
        return Case(tensors, {"reduction": "none"})

    return Op(
        kernels.cross_entropy, kernels.cross_entropy_reference, eager_cross_entropy, make,
        choices={
            "vocab": Sizes(VOCABS, [*FEW_VOCABS, 2100]), **LOSS_CHOICES, "weighted": [False, False, False, True]
        },
        complete={"vocab": 7, "weighted": True},
        row=lambda chosen: chosen["vocab"],
        more=MORE_OF_A_LOSS,
        edges=edges,
        past_2_31=huge,
        noise=probability_noise,
    )  # fmt: skip


def eager_linear_cross_entropy(x, weight, labels, *, bias=None, accum_dtype=None, workspace_bytes=None, **options):
    return eager_cross_entropy(F.linear(x, weight, bias), labels, **options)


def no_chunks(reference):
    """References hold all logits: they know nothing of chunks, of what is left out, and of what sums are kept in."""

    def call(*args, accum_dtype=None, workspace_bytes=None, num_valid=None, **options):
        return reference(*args, **options)

    return call


def head_choices(**options) -> dict[str, Any]:
    """Sizes of a head, and a workspace that gives several chunks or one."""
    vocab = Sizes(VOCABS, FEW_VOCABS)
    return {
        "vocab": vocab,
        "hidden": Sizes([1, 7, 64, 96, 257, 896], [1, 12]),
        "workspace_bytes": [1, 2**29],
        **options,
    }


MORE_OF_A_HEAD = {"accum_dtype": [None, torch.float32], "known": [False, True]}
HEAD_ROWS = (0, 1, 5, CHUNK + 3)
"""The last: two chunks."""


def head_of_usual_size(chosen: dict[str, Any]) -> bool:
    one_number = chosen["hidden"] == 1 and chosen.get("bias")  # a bias beside one number decides each logit
    return chosen["hidden"] * chosen["vocab"] <= 2**25 and not one_number


def largest_row_of_a_head(chosen: dict[str, Any]) -> int:
    return max(chosen["vocab"], chosen["hidden"])


def known_labels(labels: Tensor, known: bool) -> dict[str, int]:
    """num_valid where the host knows it, so that ignored tokens are left out."""
    return {"num_valid": int((labels != IGNORE).sum())} if known else {}


def head_case(
    m, rows, *, vocab, hidden, bias=False, weighted=False, items=None, metrics=False, known=False, ignored=None,
    scale=1.0, **options,
) -> Case:  # fmt: skip
    """A call of a loss over a linear head."""
    lead = m.lead(rows)
    x, weight = m(*lead, hidden, scale=scale * hidden**-0.5), m(vocab, hidden)
    tensors = {"x": x, "weight": weight, "labels": m.labels(vocab, *lead, ignored=ignored)}
    if bias:
        tensors["bias"] = m(vocab)
    if weighted:
        tensors["class_weight"] = torch.rand(vocab, device=m.device) + 0.5
    options |= known_labels(tensors["labels"], known)
    return Case(tensors, loss_options(m, options, items, metrics), vocab, max(vocab, hidden, rows))


def head_edge(rows=9, vocab=70, **more):
    return lambda m: head_case(m, rows, vocab=vocab, hidden=16, **more)


def huge_head(m, scale=1.0, **options) -> Case:
    m.strided, rows, hidden, vocab = False, 2**20 + 9, 2048, 512
    weight = m(vocab, hidden, scale=scale)
    return Case({"x": m.big(rows, hidden), "weight": weight, "labels": m.labels(vocab, rows)}, options)


def linear_loss_op() -> Op:
    edges: dict[str, Any] = {}
    for reduction in ("mean", "none"):
        edges |= {
            f"label at p = 0.9999, {reduction}": functools.partial(sure_head, reduction=reduction),
            f"logits of 1e4, {reduction}": head_edge(scale=1e4, ignored=0.0, reduction=reduction),
            f"rows of equal values, {reduction}": head_edge(scale=0.0, ignored=0.0, reduction=reduction),
            f"all ignored, {reduction}": head_edge(ignored=1.1, reduction=reduction),
            f"one class, {reduction}": head_edge(vocab=1, ignored=0.0, reduction=reduction),
        }

    return Op(
        kernels.linear_cross_entropy, no_chunks(kernels.linear_cross_entropy_reference), eager_linear_cross_entropy,
        head_case,
        choices=head_choices(bias=[False, False, True]) | LOSS_CHOICES,
        complete={"vocab": 7, "hidden": 5, "reduction": "none", "bias": True, "weighted": True},
        row=largest_row_of_a_head,
        more=MORE_OF_A_LOSS | MORE_OF_A_HEAD,
        few_rows=HEAD_ROWS,
        fits=head_of_usual_size,
        edges=edges,
        past_2_31=functools.partial(huge_head, reduction="none"),
        noise=probability_noise,
        matmuls=True,
        runs_once=True,
    )  # fmt: skip


# Log probabilities.


def eager_linear_logprobs(
    x, weight, labels, *, bias=None, temperature=1.0, softcap=None, return_entropy=False, return_logits_mean=False,
    accum_dtype=None, workspace_bytes=None,
):  # fmt: skip
    """selective_log_softmax of TRL, and its entropy_from_logits, of logits cast up."""
    logits = F.linear(x, weight, bias)
    logits = logits.to(accumulator(logits.dtype))
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    valid, log_p = labels != IGNORE, (logits / temperature).log_softmax(-1)
    logprobs = log_p.gather(-1, labels.where(valid, 0).long()[..., None])[..., 0].where(valid, 0)
    if not (return_entropy or return_logits_mean):
        return logprobs
    entropy = -(log_p.exp() * log_p).sum(-1).where(valid, 0)
    mean = logits.detach().mean(-1).where(valid, 0)
    return logprobs, entropy if return_entropy else None, mean if return_logits_mean else None


def logprobs_op() -> Op:
    edges: dict[str, Any] = {"label at p = 0.9999": functools.partial(sure_head, return_entropy=True)}
    for entropy in (False, True):
        edges |= {
            f"one class, entropy={entropy}": head_edge(vocab=1, return_entropy=entropy),
            f"all ignored, entropy={entropy}": head_edge(ignored=1.1, return_entropy=entropy),
            f"rows of equal values, entropy={entropy}": head_edge(scale=0.0, return_entropy=entropy),
            f"logits of 1e4, entropy={entropy}": head_edge(scale=1e4, return_entropy=entropy),
        }

    return Op(
        kernels.linear_logprobs, no_chunks(kernels.linear_logprobs_reference), eager_linear_logprobs, head_case,
        choices=head_choices(
            bias=[False, False, True], temperature=[1.0, 0.6, 2.0], softcap=[None, None, 30.0],
            return_entropy=[False, False, True], return_logits_mean=[False, False, True],
        ),
        complete={"vocab": 7, "hidden": 5, "return_entropy": True, "bias": True},
        row=largest_row_of_a_head,
        more=MORE_OF_A_HEAD | {"softcap": [3.0]},
        few_rows=HEAD_ROWS,
        fits=head_of_usual_size,
        edges=edges,
        past_2_31=functools.partial(huge_head, scale=2048**-0.5),
        noise=probability_noise,
        matmuls=True,
    )  # fmt: skip
