"""Entries of the table of ops: KL divergence and generalized Jensen-Shannon divergence."""

import torch
import torch.nn.functional as F
from torch import Tensor

from ligermodels import kernels
from ligermodels.kernels._triton import accumulator
from tests.kernels.cases import FEW_VOCABS, IGNORE, VOCABS, Case, Op, Sizes
from tests.kernels.ops.losses import (
    HEAD_ROWS,
    MORE_OF_A_HEAD,
    head_choices,
    head_of_usual_size,
    known_labels,
    largest_row_of_a_head,
    no_chunks,
    probability_noise,
)


def eager_kl_div(input, target, *, reduction="mean", log_target=False):
    dtype = torch.promote_types(input.dtype, target.dtype)
    up = accumulator(dtype)
    loss = F.kl_div(input.to(up), target.to(up), reduction=reduction, log_target=log_target)
    return loss.to(dtype) if reduction == "none" else loss


def term_noise(case: Case, upstream: list[Tensor]) -> dict[str, Tensor]:
    """What 2 ulp of fp32 of each term cost where terms of both signs cancel, in the loss and in log p - log q."""
    x, t = (case.tensors[name].detach().double() for name in ("input", "target"))
    kl, given = "log_target" in case.options, upstream[0].double().abs()
    log_t = t if not kl or case.options["log_target"] else torch.where(t > 0, t, 1.0).log()
    p, q = (t if kl and not case.options["log_target"] else t.exp()), torch.zeros_like(x) if kl else x.exp()
    terms = (p + q) * torch.where(p + q > 0, (log_t - x).abs(), 0)
    divisor, labels = torch.ones((), dtype=x.dtype, device=x.device), case.tensors.get("labels")
    if case.options.get("reduction", "mean") == "mean":
        divisor = divisor * (x.numel() if kl else x.shape[:-1].numel() if labels is None else (labels != IGNORE).sum())
    elif case.options["reduction"] == "batchmean":
        divisor = divisor * x.shape[0]
    divisor, ulps = divisor.clamp(min=1), 2.0**-22
    per_token = not kl and given.dim() > 0
    loss = terms.sum(-1) if per_token else terms.sum() / divisor if given.dim() == 0 else terms
    dy = ulps * (given[..., None] if per_token else given) / divisor
    sizes = 1 + torch.where(p > 0, log_t.abs(), 0) + torch.where(p + q > 0, x.abs(), 0)
    slopes = {"d_target": dy * (sizes if kl and not case.options["log_target"] else p * sizes)}
    return {"output 0": ulps * loss} | slopes | ({} if kl else {"d_input": dy * q})


def kl_op() -> Op:
    def make(m, rows, *, vocab, reduction, log_target, scale=2.0, target=None):
        lead = m.lead(max(rows, 1) if reduction == "mean" else rows)
        x, t = torch.randn(2, *lead, vocab, device=m.device) * scale
        t = t.log_softmax(-1) if log_target else t.softmax(-1) if target is None else target(t)
        options = {"reduction": reduction, "log_target": log_target}
        return Case({"input": m.of(x.log_softmax(-1)), "target": m.of(t)}, options)

    def edge(reduction="batchmean", log_target=False, rows=9, **more):
        return lambda m: make(m, rows, vocab=70, reduction=reduction, log_target=log_target, **more)

    def zeros_and_ones(t):
        return (t == t.amax(-1, keepdim=True)).float()

    edges = {
        "targets of 0 and 1": edge(target=zeros_and_ones),
        "targets of 0 and 1, none": edge("none", target=zeros_and_ones),
    }
    for log_target in (False, True):
        edges |= {
            f"equal probabilities, log_target={log_target}": edge(scale=0.01, log_target=log_target),
            f"log probabilities of -1e4, log_target={log_target}": edge(scale=3e3, log_target=log_target),
        }

    def huge(m):
        m.strided, rows, vocab = False, 16800, 128256
        tensors = {"input": m.big(rows, vocab, train=False).neg_(), "target": m.big(rows, vocab, train=False).abs_()}
        tensors["input"].requires_grad_()
        return Case(tensors, {"reduction": "none"})

    return Op(
        kernels.kl_div, kernels.kl_div_reference, eager_kl_div, make,
        choices={
            "vocab": Sizes(VOCABS, [*FEW_VOCABS, 2100]), "reduction": ["mean", "batchmean", "sum", "none"],
            "log_target": [False, True],
        },
        complete={"vocab": 7, "reduction": "mean", "log_target": False},
        row=lambda chosen: chosen["vocab"],
        edges=edges,
        past_2_31=huge,
        noise=term_noise,
    )  # fmt: skip


def eager_jsd(input, target, *, labels=None, beta=0.5, reduction="mean"):
    """generalized_jsd_loss of TRL, on log-probabilities cast up."""
    up = accumulator(torch.promote_types(input.dtype, target.dtype))
    x, y = input.to(up), target.to(up)
    if beta == 0:
        loss = F.kl_div(x, y, reduction="none", log_target=True)
    elif beta == 1:
        loss = F.kl_div(y, x, reduction="none", log_target=True)
    else:
        share = torch.tensor(beta, dtype=up, device=x.device)
        mixture = torch.logsumexp(torch.stack([x + torch.log1p(-share), y + torch.log(share)]), 0)
        loss = beta * F.kl_div(mixture, y, reduction="none", log_target=True)
        loss = loss + (1 - beta) * F.kl_div(mixture, x, reduction="none", log_target=True)
    loss = loss.sum(-1)
    valid = torch.ones_like(loss, dtype=torch.bool) if labels is None else labels != IGNORE
    loss = loss.where(valid, 0)
    return {"none": loss, "sum": loss.sum(), "mean": loss.sum() / valid.sum()}[reduction]


DIVERGENCE_CHOICES = {"beta": [0.0, 0.1, 0.5, 0.5, 1.0], "reduction": ["mean", "sum", "none"]}


def jsd_op() -> Op:
    def make(m, rows, *, vocab, labelled=False, scale=2.0, same=False, ignored=None, **options):
        lead = m.lead(rows)
        x, y = (torch.randn(2, *lead, vocab, device=m.device) * scale).log_softmax(-1)
        tensors = {"input": m.of(x), "target": m.of(x if same else y)}
        if labelled:
            tensors["labels"] = m.labels(vocab, *lead, ignored=ignored)
        return Case(tensors, options, vocab)

    def edge(beta, reduction="mean", rows=9, **more):
        return lambda m: make(m, rows, vocab=70, beta=beta, reduction=reduction, **more)

    edges = {}
    for beta in (0.0, 0.5, 1.0):
        edges |= {
            f"all ignored, beta={beta}": edge(beta, labelled=True, ignored=1.1),
            f"rows of equal values, beta={beta}": edge(beta, scale=0.0),
            f"log probabilities of -1e4, beta={beta}": edge(beta, scale=3e3),
        }

    def huge(m):
        m.strided, rows, vocab = False, 16800, 128256
        x, y = (m.big(rows, vocab, train=False).abs_().neg_() for _ in range(2))
        return Case({"input": x.requires_grad_(), "target": y}, {"reduction": "none"})

    return Op(
        kernels.jsd, kernels.jsd_reference, eager_jsd, make,
        choices={
            "vocab": Sizes(VOCABS, [*FEW_VOCABS, 2100]), **DIVERGENCE_CHOICES, "labelled": [False, True]
        },
        complete={"vocab": 7, "labelled": True},
        row=lambda chosen: chosen["vocab"],
        edges=edges,
        past_2_31=huge,
        noise=term_noise,
    )  # fmt: skip


def eager_linear_jsd(
    student_x, student_weight, teacher_x, teacher_weight, *, labels=None, student_bias=None, teacher_bias=None,
    temperature=1.0, weight_hard=0.0, weight_soft=1.0, student_softcap=None, teacher_softcap=None, beta=0.5,
    reduction="mean", divergence="jsd", accum_dtype=None, workspace_bytes=None,
):  # fmt: skip
    z = F.linear(student_x, student_weight, student_bias)
    u = F.linear(teacher_x, teacher_weight, teacher_bias)[..., : student_weight.shape[0]]
    z, u = (t.to(accumulator(t.dtype)) for t in (z, u))
    z, u = (t if cap is None else cap * torch.tanh(t / cap) for t, cap in ((z, student_softcap), (u, teacher_softcap)))
    log_p, log_q = ((t / temperature).log_softmax(-1) for t in (z, u))
    if divergence == "jsd":
        soft = eager_jsd(log_p, log_q, labels=labels, beta=beta, reduction=reduction)
    else:
        cosine = F.cosine_similarity(F.normalize(z, dim=-1), F.normalize(u, dim=-1), dim=-1)
        each = 1 - cosine if divergence == "cosine" else (log_p.exp() - log_q.exp()).abs().sum(-1) / 2
        valid = torch.ones_like(each, dtype=torch.bool) if labels is None else labels != IGNORE
        each = each.where(valid, 0)
        soft = {"none": each, "sum": each.sum(), "mean": each.sum() / valid.sum()}[reduction]
    loss = weight_soft * soft
    if weight_hard:
        hard = F.cross_entropy(z.flatten(0, -2), labels.flatten().long(), reduction=reduction)
        loss = loss + weight_hard * hard.view(loss.shape)
    return loss


def linear_jsd_op() -> Op:
    def make(
        m, rows, *, vocab, hidden, padded=0, bias=False, hard=False, known=False, ignored=None, scale=1.0, same=False,
        **options,
    ):  # fmt: skip
        lead, teacher_hidden = m.lead(rows), hidden if same else hidden + 3
        tensors = {
            "student_x": m(*lead, hidden, scale=scale * hidden**-0.5),
            "student_weight": m(vocab, hidden),
            "teacher_x": m(*lead, teacher_hidden, scale=scale * teacher_hidden**-0.5, train=False),
            "teacher_weight": m(vocab + padded, teacher_hidden, train=False),
        }
        if same:
            tensors["teacher_x"], tensors["teacher_weight"] = (tensors[n].detach() for n in list(tensors)[:2])
        if bias:
            tensors |= {"student_bias": m(vocab), "teacher_bias": m(vocab + padded, train=False)}
        if hard:
            options |= {"weight_hard": 0.3, "weight_soft": 0.7}
        if hard or known or ignored is not None or m.draw.random() < 0.5:
            tensors["labels"] = m.labels(vocab, *lead, ignored=ignored)
            options |= known_labels(tensors["labels"], known)
        return Case(tensors, options, vocab, max(vocab, hidden, rows))

    def edge(beta, rows=9, vocab=70, **more):
        return lambda m: make(m, rows, vocab=vocab, hidden=16, beta=beta, **more)

    edges = {}
    for beta in (0.0, 0.5, 1.0):
        edges |= {
            f"one class, beta={beta}": edge(beta, vocab=1),
            f"all ignored, beta={beta}": edge(beta, ignored=1.1),
            f"rows of equal values, beta={beta}": edge(beta, scale=0.0),
            # fp16 has steps of 8 at 1e4: what the logits are is decided by how they are summed.
            f"large logits, beta={beta}": lambda m, b=beta: edge(b, scale=1e2 if m.dtype == torch.float16 else 1e4)(m),
            f"the teacher's own, beta={beta}": edge(beta, same=True),
            f"large logits, capped, beta={beta}": edge(
                beta, scale=1e2, student_softcap=30.0, teacher_softcap=30.0, hard=True
            ),
        }
    edges["one class, tv"] = edge(0.5, vocab=1, divergence="tv")
    for kind in ("tv", "cosine"):
        edges |= {
            f"all ignored, {kind}": edge(0.5, ignored=1.1, divergence=kind),
            f"rows of zeros, {kind}": edge(0.5, scale=0.0, divergence=kind),
            f"the teacher's own, {kind}": edge(0.5, same=True, divergence=kind),
            f"large logits, capped, {kind}": edge(
                0.5, scale=1e2, student_softcap=30.0, teacher_softcap=30.0, hard=True, divergence=kind
            ),
        }

    def fits(chosen):
        """One class or one hidden dim gives logits of one direction: the cosine's gradients are rounding alone."""
        turns = chosen["vocab"] > 1 < chosen["hidden"]
        return head_of_usual_size(chosen) and (turns or chosen["divergence"] != "cosine")

    def huge(m):
        m.strided, rows, hidden, vocab = False, 2**20 + 9, 2048, 512
        teacher = {"teacher_x": m(rows, 16, train=False), "teacher_weight": m(vocab, 16, train=False)}
        tensors = {"student_x": m.big(rows, hidden), "student_weight": m(vocab, hidden, scale=hidden**-0.5)}
        return Case(tensors | teacher, {"reduction": "none"})

    return Op(
        kernels.linear_jsd, no_chunks(kernels.linear_jsd_reference), eager_linear_jsd, make,
        choices=head_choices(
            padded=[0, 0, 5], hard=[False, False, True], temperature=[1.0, 2.0],
            divergence=["jsd", "jsd", "tv", "cosine"],
            student_softcap=[None, None, 30.0], teacher_softcap=[None, None, 30.0],
        )
        | DIVERGENCE_CHOICES,
        complete={
            "vocab": 7, "hidden": 5, "hard": True, "reduction": "none", "bias": True, "student_softcap": 3.0,
            "teacher_softcap": 2.0,
        },
        row=largest_row_of_a_head,
        more=MORE_OF_A_HEAD | {
            "bias": [False, True], "return_soft_hard_loss": [False, True], "student_softcap": [3.0],
            "teacher_softcap": [3.0],
        },
        few_rows=HEAD_ROWS,
        fits=fits,
        edges=edges,
        past_2_31=huge,
        noise=probability_noise,
        matmuls=True,
        runs_once=True,
    )  # fmt: skip
