"""Entries of the table of ops: routing and the experts of a mixture."""

import functools
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ligermodels import kernels
from ligermodels.kernels._triton import accumulator
from tests.kernels.cases import Case, Op, Sizes
from tests.kernels.ops.mlp import CLAMPED, GATED, eager_unit

NORMALIZED = ("made to sum to 1", "of all")


def eager_route(logits, *, top_k, normalize=True, score="softmax", bias=None, eps=0.0, scale=1.0, **groups):
    """Qwen3MoeTopKRouter and DeepseekV3TopkRouter of transformers, less the choice, which torch.topk leaves open among
    equals, and the cast."""
    experts = kernels.route_reference(logits, top_k=top_k, score=score, bias=bias, **groups)[1]
    logits = logits.to(accumulator(logits.dtype))
    weights = (logits.softmax(-1) if score == "softmax" else logits.sigmoid()).gather(1, experts.long())
    return (weights / (weights.sum(-1, keepdim=True) + eps) if normalize else weights) * scale, experts


def eager_moe_experts(
    x, weights, experts, gate_up_proj, down_proj, gate_up_proj_bias=None, down_proj_bias=None, *, activation="silu",
    recompute=False,
):  # fmt: skip
    """MixtralExperts and GptOssExperts of transformers: expert by expert over its own tokens, the sum in the dtype of
    the weights."""
    of_first, of_last = ([None] * len(down_proj) if b is None else b for b in (gate_up_proj_bias, down_proj_bias))
    y = torch.zeros(x.shape, dtype=weights.dtype, device=x.device)
    for expert in range(down_proj.shape[0]):
        tokens, choice = (experts == expert).nonzero(as_tuple=True)
        gate, up = F.linear(x[tokens], gate_up_proj[expert], of_first[expert]).chunk(2, -1)
        out = F.linear(eager_unit(gate, up, activation), down_proj[expert], of_last[expert])
        y = y.index_add(0, tokens, out * weights[tokens, choice, None])
    return y.to(x.dtype)


def route_noise(case: Case, upstream: list[Tensor]) -> dict[str, Tensor]:
    """What half an ulp of fp32 of each term costs w (dw - sum(w dw)), which cancels where one weight is nearly all, and
    at experts that are not chosen -w sum(w dw)."""
    tensors = {name: x.detach().double() for name, x in case.tensors.items()}
    logits, sigmoid = tensors["logits"], case.options.get("score") == "sigmoid"
    weights, experts = kernels.route_reference(**tensors, **case.options)
    largest = upstream[0].double().abs().amax(-1, keepdim=True) if logits.numel() else weights
    of_all = not sigmoid and not case.options.get("normalize", True)
    noise = logits.softmax(-1) * largest * case.options.get("scale", 1.0) if of_all else torch.zeros_like(logits)
    slopes = weights * (1 - logits.sigmoid().gather(1, experts.long())) if sigmoid else weights
    return {"d_logits": 2.0**-24 * noise.scatter(1, experts.long(), slopes * largest)}


def decided(logits: Tensor, **options: Any) -> Tensor:
    """Rows whose choice does not hang on the rounding of scores and of their sums."""
    exact = logits.double()
    shifted = (exact + 1e-4 * (1e6 * exact + phase).sin() for phase in (0, 1))  # equals stay equal
    experts = kernels.route_reference(exact, **options)[1]
    return torch.stack([experts == kernels.route_reference(x, **options)[1] for x in shifted]).all(0).all(-1)


def grouped_route_op() -> Op:
    """With a bias, groups, eps and scale; the scores of both kinds."""

    def make(m, rows, *, experts, score, biased, eps, offset=0.0, **options):
        options |= {"score": score, "eps": eps if score == "sigmoid" else 0.0}
        logits, bias = torch.randn(rows, experts).to(m.dtype), torch.randn(experts) * 0.3 + offset if biased else None
        while not (good := decided(logits, bias=None if bias is None else bias.double(), **options)).all():
            logits[~good] = torch.randn(int((~good).sum()), experts).to(m.dtype)
        tensors = {"logits": m.of(logits)}
        if bias is not None:
            tensors["bias"] = m.of(bias, train=False, dtype=accumulator(m.dtype))
        return Case(tensors, options)

    def fits(chosen):
        size, rest = divmod(chosen["experts"], chosen["groups"])
        kept = chosen["groups_kept"]
        return rest == 0 and size > 1 and kept <= chosen["groups"] and chosen["top_k"] <= kept * size

    usual = dict(
        experts=8, top_k=2, normalize=True, score="sigmoid", biased=True, groups=4, groups_kept=2, dropped=-math.inf,
        eps=1e-6, scale=1.8,
    )  # fmt: skip
    return Op(
        kernels.route, kernels.route_reference, eager_route, make,
        choices={
            "experts": Sizes([8, 24, 32, 60, 64, 96, 128, 160, 256, 512], [8, 12, 24]), "top_k": [1, 2, 4, 8],
            "normalize": [True, False], "score": ["sigmoid", "sigmoid", "softmax"], "biased": [True, False],
            "groups": [1, 2, 4], "groups_kept": [1, 2, 3], "dropped": [-math.inf, 0.0], "eps": [0.0, 1e-20, 1e-6],
            "scale": [1.0, 2.5],
        },
        complete=usual,
        row=lambda chosen: chosen["experts"],
        few_rows=(0, 1, 5),
        fits=fits,
        edges={"dropped ones are chosen": lambda m: make(m, 9, **usual | dict(dropped=0.0, offset=-2.0))},
        noise=route_noise,
    )  # fmt: skip


def route_op() -> Op:
    def make(m, rows, *, experts, top_k, values=None, **options):
        logits = m(rows, experts, scale=3.0) if values is None else m.of(values)
        return Case({"logits": logits}, {"top_k": top_k, **options})

    def edges(name, values):
        def case(m, normalize):
            return make(m, 9, experts=16, top_k=3, values=values(), normalize=normalize)

        return {f"{name}, {n}": functools.partial(case, normalize=n == "made to sum to 1") for n in NORMALIZED}

    def huge(m):
        m.strided = False
        return Case({"logits": m.big(2**25 + 9, 64)}, {"top_k": 2})

    many = [1, 2, 3, 5, 7, 8, 16, 31, 60, 64, 72, 96, 127, 128, 160, 200, 256, 384, 512]
    return Op(
        kernels.route, kernels.route_reference, eager_route, make,
        choices={"experts": Sizes(many, [1, 3, 8, 70]), "top_k": [1, 2, 3, 4, 6, 8], "normalize": [True, False]},
        complete={"experts": 5, "top_k": 2},
        row=lambda chosen: chosen["experts"],
        few_rows=(0, 1, 5, 40),
        fits=lambda chosen: chosen["top_k"] <= chosen["experts"],
        edges={
            **edges("equal logits", lambda: torch.zeros(9, 16)),
            **edges("logits of 1e4", lambda: torch.randn(9, 16) * 1e4),
            **edges("one expert takes all", lambda: torch.eye(16)[:9] * 80),
            **edges("equals among others", lambda: torch.randint(3, (9, 16)).float()),
        },
        past_2_31=huge,
        noise=route_noise,
    )  # fmt: skip


def experts_noise(case: Case, upstream: list[Tensor]) -> dict[str, Tensor]:
    """What one rounding of dh = dy @ down, and sums of fp32 one after the other, cost d_weights = sum(dh * h) +
    sum(dy * bias); and what it costs where a rounded gate or up is clamped, or is not.

    A sum of K terms t errs by eps sqrt(K / 24 * sum(t^2)), however little is left of it. Eager's sum(dy * (down @ h))
    is added in parts: H rounded terms, where there may be one dh.
    """
    t = {name: x.detach().double() for name, x in case.tensors.items()}
    experts, dy = case.tensors["experts"], upstream[0].double()
    noise, rounding = torch.zeros_like(t["weights"]), torch.finfo(case.tensors["x"].dtype).eps ** 2 / 12
    activation = case.options.get("activation", "silu")
    of_first, of_last = (t.get(f"{name}_proj_bias", dy.new_zeros(1)) for name in ("gate_up", "down"))
    biases = of_first.expand(len(t["down_proj"]), -1), of_last.expand(len(t["down_proj"]), -1)
    for expert, (gate_up, down, b1, b2) in enumerate(zip(t["gate_up_proj"], t["down_proj"], *biases, strict=True)):
        tokens, choice = (experts == expert).nonzero(as_tuple=True)
        h = kernels.glu_reference(F.linear(t["x"][tokens], gate_up) + b1, activation=activation).square()
        hidden, inner = down.shape
        terms, sums = dy[tokens].square() @ down.square(), (dy[tokens] @ down).square()
        lost = 2.0**-46 / 24 * (hidden * terms + inner * sums) + rounding * sums
        of_bias = 2.0**-46 / 24 * hidden * (dy[tokens] * b2).square().sum(-1)
        noise[tokens, choice] = ((lost * h).sum(-1) + of_bias).sqrt()
    if not isinstance(activation, kernels.ClampedSwiGLU):
        return {"d_weights": noise}
    noises = clamping_noise(case, dy, activation)
    return noises | {"d_weights": torch.maximum(noise, noises["d_weights"])}


def clamping_noise(case: Case, dy: Tensor, clamped: kernels.ClampedSwiGLU) -> dict[str, Tensor]:
    """How far results in fp64 differ where the limit is off by two roundings either way."""
    eps, results = torch.finfo(case.tensors["x"].dtype).eps, []
    for limit in (clamped.limit, clamped.limit * (1 - 2 * eps), clamped.limit * (1 + 2 * eps)):
        tensors = {n: x.detach().double() if x.is_floating_point() else x for n, x in case.tensors.items()}
        trained = {n: x.requires_grad_() for n, x in tensors.items() if case.tensors[n].requires_grad}
        y = kernels.moe_experts_reference(**tensors, activation=kernels.ClampedSwiGLU(clamped.alpha, limit))
        results.append((y.detach(), *torch.autograd.grad(y, list(trained.values()), dy)))
    names = ["output 0", *(f"d_{n}" for n in trained)]
    return {n: torch.maximum((a - x).abs(), (b - x).abs()) for n, x, a, b in zip(names, *results, strict=True)}


def experts_op(*, biased: bool = False) -> Op:
    """biased: also with the unit of gpt-oss."""

    def make(m, rows, *, hidden, inner, experts, top_k, logits=None, scale=1.0, **options):
        logits = torch.randn(rows, experts, device=m.device) if logits is None else logits(rows, experts).to(m.device)
        weights, chosen = kernels.route_reference(logits, top_k=top_k)
        tensors = {
            "x": m(rows, hidden, scale=scale),
            "weights": m.of(weights, dtype=accumulator(m.dtype)),
            "experts": m.ids(chosen),
            "gate_up_proj": m(experts, 2 * inner, hidden, scale=hidden**-0.5),
            "down_proj": m(experts, hidden, inner, scale=inner**-0.5),
        }
        if biased:
            tensors |= {"gate_up_proj_bias": m(experts, 2 * inner), "down_proj_bias": m(experts, hidden)}
        # Squares of products of two normal numbers scatter 9 to 1: a ninth of the elements make up the rms.
        return Case(tensors, options, max(hidden, 2 * inner, 9), 2 * (hidden + 2 * inner) + rows)

    def huge(m):
        m.strided, rows, hidden = False, 2**19 + 9, 4096
        x = m.big(rows, hidden)
        weights = torch.rand(rows, 1, device=m.device).requires_grad_()
        tensors = {"x": x, "weights": weights, "experts": m.integers(0, 2, rows, 1, dtype=torch.int32)}
        projections = {"gate_up_proj": m(2, 32, hidden, scale=hidden**-0.5), "down_proj": m(2, hidden, 16, scale=0.25)}
        return Case(tensors | projections, {})

    usual: dict[str, Any] = dict(hidden=24, inner=16, experts=5, top_k=2) | ({"activation": CLAMPED} if biased else {})
    widths = [1, 8, 33, 64, 90, 96, 136, 256, 512]
    small = ([1, 90], [1, 90]) if biased else ([1, 20], [1, 8])
    return Op(
        kernels.moe_experts, no_recompute(kernels.moe_experts_reference), eager_moe_experts, make,
        choices={
            "hidden": Sizes(widths, small[0]), "inner": Sizes(widths, small[1]),
            "experts": Sizes([1, 3, 8, 16, 60], [1, 3, 4]), "top_k": [1, 2, 3, 4],
            "activation": [CLAMPED, CLAMPED, "silu"] if biased else GATED,
        },
        complete={"hidden": 8, "inner": 4, "experts": 5, "top_k": 2} | ({"activation": CLAMPED} if biased else {}),
        row=lambda chosen: 2**11,
        more={"recompute": [False, True]},
        few_rows=(0, 1, 9),
        variants=16,  # which take long to compile
        fits=lambda chosen: chosen["top_k"] <= chosen["experts"] and chosen["hidden"] * chosen["inner"] > 1,
        edges={
            "all to the same": lambda m: make(m, 20, logits=lambda r, e: torch.arange(e).expand(r, e) * 9.0, **usual),
            "equal weights": lambda m: make(m, 20, logits=lambda r, e: torch.zeros(r, e), **usual),
            "weights of 0 and 1": lambda m: make(m, 20, logits=lambda r, e: torch.randn(r, e) * 1e4, **usual),
            "tokens of zeros": lambda m: make(m, 20, scale=0.0, **usual),
            "tokens of 30": lambda m: make(m, 20, scale=30.0, **usual),
        },
        past_2_31=huge,
        noise=experts_noise,
        matmuls=True,
    )  # fmt: skip


def no_recompute(reference):
    return lambda *args, recompute=False, **options: reference(*args, **options)
