"""Kullback-Leibler and Jensen-Shannon divergences of a student from its teacher, alone and over two linear heads."""

import functools
import math

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.kernels.case import IGNORED, Case, Place, Provider, Tensors, chosen, compiled, compute
from benchmarks.kernels.losses import three_products
from ligermodels import kernels

BETA = 0.5


def _log_probabilities(place: Place, tokens: int, vocab: int) -> Tensor:
    return place.randn(tokens, vocab, scale=2.0).log_softmax(-1)


def eager_kl_div(t: Tensors) -> tuple[Tensor, ...]:
    x = t["x"].to(compute(t["x"]))
    return (F.kl_div(x, t["target"].to(x.dtype), reduction="batchmean"),)


def kl_div_case(place: Place, peers: set[str], tokens: int, vocab: int) -> Case:
    def make():
        x, target = (_log_probabilities(place, tokens, vocab) for _ in "xt")
        return {"x": x, "target": target.exp_()}, ()

    def liger(t):
        from liger_kernel.ops import LigerKLDivLossFunction

        return (LigerKLDivLossFunction.apply(t["x"], t["target"], "batchmean"),)

    def ours(t):
        return (kernels.kl_div(t["x"], t["target"], reduction="batchmean"),)

    def pytorch(t):
        return (F.kl_div(t["x"], t["target"], reduction="batchmean"),)

    return Case(
        "kl_div",
        f"T={tokens} V={vocab}",
        make,
        leaves=("x",),
        outputs=("loss",),
        eager=eager_kl_div,
        providers=chosen(
            peers,
            Provider("ligermodels", ours, ours=True),
            eager=[Provider("eager", eager_kl_div)],
            compile=[Provider("torch.compile", compiled(eager_kl_div))],
            torch=[Provider("F.kl_div, no upcast", pytorch)],
            liger=[Provider("Liger", liger)],
        ),
        full_work=6.0 * tokens * vocab,
        # The inputs are exact here; what is left is fp32 sums over the vocabulary in another order.
        loss_floor=1e-5,
    )


def _jsd(student: Tensor, teacher: Tensor) -> Tensor:
    """Of log probabilities, summed over the vocabulary, mean over the tokens."""
    mixture = torch.logsumexp(torch.stack([student + math.log(1 - BETA), teacher + math.log(BETA)]), dim=0)
    of_teacher = F.kl_div(mixture, teacher, reduction="batchmean", log_target=True)
    return BETA * of_teacher + (1 - BETA) * F.kl_div(mixture, student, reduction="batchmean", log_target=True)


def eager_jsd(t: Tensors) -> tuple[Tensor, ...]:
    dtype = compute(t["x"])
    return (_jsd(t["x"].to(dtype), t["target"].to(dtype)),)


def jsd_case(place: Place, peers: set[str], tokens: int, vocab: int) -> Case:
    def make():
        x, target = (_log_probabilities(place, tokens, vocab) for _ in "xt")
        return {"x": x, "target": target}, ()

    def liger(t):
        from liger_kernel.ops import LigerJSDFunction

        return (LigerJSDFunction.apply(t["x"], t["target"], None, BETA),)

    return Case(
        "jsd",
        f"T={tokens} V={vocab}",
        make,
        leaves=("x",),
        outputs=("loss",),
        eager=eager_jsd,
        providers=chosen(
            peers,
            Provider("ligermodels", lambda t: (kernels.jsd(t["x"], t["target"], beta=BETA),), ours=True),
            eager=[Provider("eager", eager_jsd)],
            compile=[Provider("torch.compile", compiled(eager_jsd))],
            liger=[Provider("Liger", liger)],
        ),
        full_work=6.0 * tokens * vocab,
        loss_floor=1e-5,  # as in kl_div
    )


def eager_linear_jsd(t: Tensors) -> tuple[Tensor, ...]:
    student, teacher = (t[f"{name}_x"] @ t[f"{name}_weight"].T for name in ("student", "teacher"))
    dtype = compute(student)
    return (_jsd(student.log_softmax(-1, dtype=dtype), teacher.log_softmax(-1, dtype=dtype)),)


def linear_jsd_case(place: Place, peers: set[str], tokens: int, size: int, teacher_size: int, vocab: int) -> Case:
    def make(tokens=tokens):
        inputs = {
            "student_x": place.randn(tokens, size),
            "student_weight": place.randn(vocab, size, scale=size**-0.5),
            "teacher_x": place.randn(tokens, teacher_size),
            "teacher_weight": place.randn(vocab, teacher_size, scale=teacher_size**-0.5),
        }
        return inputs, ()

    names = ("student_x", "student_weight", "teacher_x", "teacher_weight")

    def liger(t, accum_dtype=None):
        from liger_kernel.ops import LigerFusedLinearJSDFunction

        # labels, beta, ignore_index, temperature, accum_dtype
        options = (None, BETA, IGNORED, 1.0, accum_dtype)
        return (LigerFusedLinearJSDFunction.apply(*(t[name] for name in names), *options),)

    def products(t):
        return three_products(t["student_x"], t["student_weight"]), t["teacher_x"] @ t["teacher_weight"].T

    return Case(
        "linear_jsd",
        f"T={tokens} H={size} teacher H={teacher_size} V={vocab}",
        make,
        leaves=("student_x", "student_weight"),
        outputs=("loss",),
        eager=eager_linear_jsd,
        providers=chosen(
            peers,
            Provider(
                "ligermodels", lambda t: (kernels.linear_jsd(*(t[name] for name in names), beta=BETA),), ours=True
            ),
            eager=[Provider("eager", eager_linear_jsd)],
            compile=[Provider("torch.compile", compiled(eager_linear_jsd))],
            liger=[
                Provider("Liger", liger),
                Provider("Liger, accum_dtype=fp32", functools.partial(liger, accum_dtype=torch.float32)),
            ],
        ),
        full_work=(6.0 * size + 2.0 * teacher_size) * tokens * vocab,
        unit="operations",
        products=("four GEMMs", products),
        # A token's loss errs by about one rounding of bf16 logits of size 1, independently of the others'.
        loss_floor=4 * torch.finfo(place.dtype).eps / tokens**0.5,
        make_small=lambda: make(min(tokens, 2048)),
    )
