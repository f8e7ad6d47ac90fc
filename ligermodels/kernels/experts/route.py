"""The experts of each token and their weights, from the router's logits.

Sources: Shazeer et al. 2017, https://arxiv.org/abs/1701.06538; DeepSeek-V3, https://arxiv.org/abs/2412.19437, section
2.1.2; order and precision as MixtralSparseMoeBlock, Qwen3MoeTopKRouter and DeepseekV3TopkRouter in
https://github.com/huggingface/transformers.
"""

import math
import operator

import torch
from torch import Tensor

from ligermodels.errors import InputError
from ligermodels.kernels._check import describe
from ligermodels.kernels._launch import launch
from ligermodels.kernels._math import activation, exp
from ligermodels.kernels._triton import (
    FEW_ROWS,
    accumulator,
    cdiv,
    last_dim_contiguous,
    next_power_of_2,
    once_differentiable,
    overlapping,
    overlaps_launches,
    tl,
    triton,
    use_triton,
    wait_for_previous,
)

SCORES = ("softmax", "sigmoid")


def route_reference(
    logits: Tensor,
    *,
    top_k: int,
    normalize: bool = True,
    score: str = "softmax",
    bias: Tensor | None = None,
    groups: int = 1,
    groups_kept: int = 1,
    dropped: float = -math.inf,
    eps: float = 0.0,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    logits = logits.to(accumulator(logits.dtype))
    scores = logits.sigmoid() if score == "sigmoid" else logits.softmax(-1)
    keys = logits if score == "softmax" and bias is None and groups == 1 else scores  # the same order, and no rounding
    keys = keys.detach() if bias is None else keys.detach() + bias.detach()
    if groups > 1:
        grouped = keys.unflatten(-1, (groups, -1))
        best = grouped.topk(2, -1).values.sum(-1).sort(dim=-1, descending=True, stable=True).indices
        kept = torch.zeros_like(grouped[..., 0], dtype=torch.bool).scatter(-1, best[..., :groups_kept], True)
        keys = grouped.masked_fill(~kept[..., None], dropped).flatten(-2)
    experts = keys.sort(dim=-1, descending=True, stable=True).indices[:, :top_k]
    return weights_of(logits, experts, normalize=normalize, score=score, eps=eps, scale=scale), experts.int()


def weights_of(
    logits: Tensor,
    experts: Tensor,
    *,
    normalize: bool = True,
    score: str = "softmax",
    eps: float = 0.0,
    scale: float = 1.0,
    **_: object,
) -> Tensor:
    """The weights [T, K] of these experts [T, K], whoever chose them, from logits [T, E], with gradients; options as in
    `route`, and those that only choose are ignored."""
    logits, experts = logits.to(accumulator(logits.dtype)), experts.long()
    if score == "softmax":
        weights = logits.gather(1, experts).softmax(-1) if normalize else logits.softmax(-1).gather(1, experts)
    else:
        weights = logits.gather(1, experts).sigmoid()
        weights = weights / (weights.sum(-1, keepdim=True) + eps) if normalize else weights
    return weights * scale


@triton.jit
def _softmax(logits, inside, EXACT: tl.constexpr):
    """(the largest logit, exp(logit - largest), their sum) of each row."""
    largest = tl.max(tl.where(inside, logits, -float("inf")), 1, keep_dims=True)
    terms = exp(logits - largest) if EXACT else tl.exp(logits - largest)
    terms = tl.where(inside, terms, 0.0)
    return largest, terms, tl.sum(terms, 1, keep_dims=True)


@triton.jit
def _without_dropped(
    keys, e, GROUPS: tl.constexpr, KEPT: tl.constexpr, TO_ZERO: tl.constexpr, SIZE: tl.constexpr,
    BLOCK_G: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """The keys, with 0 or -inf for experts outside of the KEPT groups whose two largest keys have the largest sums."""
    g, group = tl.arange(0, BLOCK_G)[None, :], e // SIZE
    sums = tl.full([ROWS, BLOCK_G], -float("inf"), keys.dtype)
    for i in range(GROUPS):
        inside = tl.where(group == i, keys, -float("inf"))
        first = tl.max(inside, 1, keep_dims=True)
        at = tl.min(tl.where((group == i) & (inside == first), e, GROUPS * SIZE), 1, keep_dims=True)
        second = tl.max(tl.where(e == at, -float("inf"), inside), 1, keep_dims=True)
        sums = tl.where(g == i, first + second, sums)
    kept = tl.zeros([ROWS, keys.shape[1]], tl.int1)
    unchosen = (g < GROUPS) & (sums == sums)
    for _ in range(KEPT):
        top = tl.max(tl.where(unchosen, sums, -float("inf")), 1, keep_dims=True)
        at = tl.min(tl.where(unchosen & (sums == top), g, GROUPS - 1), 1, keep_dims=True)  # the first of equals
        kept |= group == at
        unchosen &= g != at
    return tl.where(kept, keys, 0.0 if TO_ZERO else -float("inf"))


@triton.jit(do_not_specialize=["n_rows"])
def _route_kernel(
    weights_ptr, experts_ptr, chosen_ptr, logits_ptr, bias_ptr, n_rows, stride, eps, scale,
    E: tl.constexpr, TOP_K: tl.constexpr, NORMALIZE: tl.constexpr, SIGMOID: tl.constexpr, GROUPS: tl.constexpr,
    KEPT: tl.constexpr, TO_ZERO: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_G: tl.constexpr, ROWS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """chosen_ptr: for SIGMOID, the logits of the chosen experts, which the backward reads."""
    wait_for_previous(OVERLAP)
    ACC: tl.constexpr = weights_ptr.dtype.element_ty
    EXACT: tl.constexpr = weights_ptr.dtype.element_ty == tl.float32  # as in `activation`; fp64 is exact as it is
    eps, scale = tl.cast(eps, ACC), tl.cast(scale, ACC)  # torch.compile passes floats as fp64
    rows = tl.program_id(0).to(tl.int64)[None, None] * ROWS + tl.arange(0, ROWS)[:, None]
    e, j = tl.arange(0, BLOCK_E)[None, :], tl.arange(0, BLOCK_K)[None, :]
    inside = (rows < n_rows) & (e < E)
    logits = tl.load(logits_ptr + rows * stride + e, mask=inside, other=0.0).to(ACC)
    largest, terms, total = _softmax(logits, e < E, EXACT)
    keys = logits
    if SIGMOID:
        keys = activation(logits, "sigmoid", EXACT)[0]
    elif GROUPS > 1 or bias_ptr is not None:
        keys = tl.div_rn(terms, total) if EXACT else terms / total
    if bias_ptr is not None:
        keys += tl.load(bias_ptr + e, mask=e < E, other=0.0)
    if GROUPS > 1:
        keys = _without_dropped(keys, e, GROUPS, KEPT, TO_ZERO, E // GROUPS, BLOCK_G, ROWS)
    remaining = tl.where(e < E, keys, -float("inf"))
    unchosen = (e < E) & (rows >= 0)
    chosen = tl.zeros([ROWS, BLOCK_K], ACC)
    experts = tl.zeros([ROWS, BLOCK_K], tl.int32)
    for i in tl.static_range(TOP_K):
        top = tl.max(remaining, 1, keep_dims=True)
        expert = tl.min(tl.where(unchosen & (remaining == top), e, E - 1), 1, keep_dims=True)  # the first of equals
        logit = top
        if SIGMOID or GROUPS > 1 or bias_ptr is not None:
            logit = tl.sum(tl.where(e == expert, logits, 0.0), 1, keep_dims=True)
        chosen = tl.where(j == i, logit, chosen)
        experts = tl.where(j == i, expert, experts)
        unchosen &= e != expert
        remaining = tl.where(unchosen, remaining, -float("inf"))
    bad = tl.sum((logits != logits).to(tl.int32), 1, keep_dims=True) > 0  # NaN, which max passes over
    if SIGMOID:
        weights = tl.where(j < TOP_K, activation(chosen, "sigmoid", EXACT)[0], 0.0)
        total = tl.sum(weights, 1, keep_dims=True) + eps
    else:
        weights = exp(chosen - largest) if EXACT else tl.exp(chosen - largest)
        weights = tl.where(j < TOP_K, weights, 0.0)
        total = tl.sum(weights, 1, keep_dims=True) if NORMALIZE else total
        bad |= largest - largest != 0.0  # as inf - inf is
    if NORMALIZE or not SIGMOID:
        weights = tl.div_rn(weights, total) if EXACT else weights / total
    weights = tl.where(bad, float("nan"), weights * scale)
    inside = (rows < n_rows) & (j < TOP_K)
    tl.store(weights_ptr + rows * TOP_K + j, weights, mask=inside)
    tl.store(experts_ptr + rows * TOP_K + j, experts, mask=inside)
    if SIGMOID:
        tl.store(chosen_ptr + rows * TOP_K + j, chosen, mask=inside)


@triton.jit(do_not_specialize=["n_rows"])
def _route_backward_kernel(
    d_logits_ptr, d_weights_ptr, saved_ptr, experts_ptr, n_rows, stride, eps, scale,
    E: tl.constexpr, TOP_K: tl.constexpr, NORMALIZE: tl.constexpr, SIGMOID: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """saved_ptr: the logits of the chosen experts for SIGMOID, the weights for NORMALIZE, or else all logits.

    The weights are scale * share. d logit = gain * (sum over j of share_j (dw - dw_j) + rest * dw) at a chosen expert:
    rest is what the shares lack of 1, and pairwise differences lose less than the difference from the mean.
    """
    ACC: tl.constexpr = d_weights_ptr.dtype.element_ty
    EXACT: tl.constexpr = d_weights_ptr.dtype.element_ty == tl.float32  # as in the forward
    eps, scale = tl.cast(eps, ACC), tl.cast(scale, ACC)
    rows = tl.program_id(0).to(tl.int64)[None, None] * ROWS + tl.arange(0, ROWS)[:, None]
    e, j = tl.arange(0, BLOCK_E)[None, :], tl.arange(0, BLOCK_K)[None, :]
    inside = (rows < n_rows) & (j < TOP_K)
    d_weights = tl.load(d_weights_ptr + rows * TOP_K + j, mask=inside, other=0.0)
    d_logits = tl.zeros([ROWS, BLOCK_E], ACC)
    rest = tl.zeros([ROWS, 1], ACC)
    if SIGMOID:
        chosen = tl.load(saved_ptr + rows * TOP_K + j, mask=inside, other=0.0)
        scores, slopes = activation(chosen, "sigmoid", EXACT)
        shares, gains = tl.zeros([ROWS, BLOCK_K], ACC), slopes * scale
        if NORMALIZE:
            total = tl.sum(tl.where(j < TOP_K, scores, 0.0), 1, keep_dims=True) + eps
            shares, gains, rest = tl.where(inside, scores / total, 0.0), gains / total, eps / total
        else:
            rest += 1.0
    elif NORMALIZE:
        gains = tl.load(saved_ptr + rows * TOP_K + j, mask=inside, other=0.0)
        shares = gains / scale
    else:
        logits = tl.load(saved_ptr + rows * stride + e, mask=(rows < n_rows) & (e < E), other=0.0).to(ACC)
        _, others, total = _softmax(logits, e < E, EXACT)
        others = tl.div_rn(others, total) if EXACT else others / total
        shares = tl.zeros([ROWS, BLOCK_K], ACC)
        for i in tl.static_range(TOP_K):
            expert = tl.load(experts_ptr + rows * TOP_K + i, mask=rows < n_rows, other=-1)
            shares = tl.where(j == i, tl.sum(tl.where(e == expert, others, 0.0), 1, keep_dims=True), shares)
            others = tl.where(e == expert, 0.0, others)
        gains, rest = shares * scale, tl.sum(others, 1, keep_dims=True)
        d_logits = -others * tl.sum(gains * d_weights, 1, keep_dims=True)
    for i in tl.static_range(TOP_K):
        expert = tl.load(experts_ptr + rows * TOP_K + i, mask=rows < n_rows, other=-1)
        d_weight = tl.load(d_weights_ptr + rows * TOP_K + i, mask=rows < n_rows, other=0.0)
        gain = tl.sum(tl.where(j == i, gains, 0.0), 1, keep_dims=True)
        slope = tl.sum(shares * (d_weight - d_weights), 1, keep_dims=True) + rest * d_weight
        d_logits += tl.where(e == expert, gain * slope, 0.0)
    inside = (rows < n_rows) & (e < E)
    tl.store(d_logits_ptr + rows * E + e, d_logits.to(d_logits_ptr.dtype.element_ty), mask=inside)


def _route_tile(num_experts: int, top_k: int) -> tuple[int, int, int]:
    """BLOCK_E, BLOCK_K and ROWS."""
    block = next_power_of_2(num_experts)
    return block, next_power_of_2(top_k), max(1, min(64, 1024 // block))


class _Route(torch.autograd.Function):
    """logits: [T, E] -> weights [T, K], experts [T, K]. Saves experts, and what `_route_backward_kernel` says."""

    @staticmethod
    def forward(ctx, logits, bias, top_k, normalize, sigmoid, groups, kept, to_zero, eps, scale):
        n_rows, num_experts = logits.shape[0], operator.index(logits.shape[1])
        logits = last_dim_contiguous(logits)
        weights = torch.empty((n_rows, top_k), dtype=accumulator(logits.dtype), device=logits.device)
        experts = torch.empty((n_rows, top_k), dtype=torch.int32, device=logits.device)
        chosen = torch.empty_like(weights) if sigmoid else None
        if n_rows:
            block_e, block_k, rows = _route_tile(num_experts, top_k)
            overlap = n_rows <= FEW_ROWS and overlaps_launches(logits)
            launch(
                _route_kernel, (cdiv(n_rows, rows),),
                weights, experts, chosen, logits, None if bias is None else bias.contiguous(), n_rows,
                logits.stride(0), eps, scale, num_experts, top_k, normalize, sigmoid, groups, kept, to_zero,
                block_e, block_k, next_power_of_2(groups), rows, overlap, num_warps=4, **overlapping(overlap),
            )  # fmt: skip
        ctx.save_for_backward(experts, chosen if sigmoid else weights if normalize else logits)
        ctx.mark_non_differentiable(experts)
        ctx.options = num_experts, logits.dtype, normalize, sigmoid, eps, scale
        return weights, experts

    @staticmethod
    @once_differentiable
    def backward(ctx, d_weights, _):
        experts, saved = ctx.saved_tensors
        num_experts, dtype, normalize, sigmoid, eps, scale = ctx.options
        n_rows, top_k = experts.shape[0], operator.index(experts.shape[1])
        d_logits = torch.empty((n_rows, num_experts), dtype=dtype, device=experts.device)
        if n_rows:
            *blocks, rows = _route_tile(num_experts, top_k)
            launch(
                _route_backward_kernel, (cdiv(n_rows, rows),),
                d_logits, d_weights.contiguous(), saved, experts, n_rows, saved.stride(0), eps, scale,
                num_experts, top_k, normalize, sigmoid, *blocks, rows, num_warps=4,
            )  # fmt: skip
        return d_logits, *[None] * 9


def route(
    logits: Tensor,
    *,
    top_k: int,
    normalize: bool = True,
    score: str = "softmax",
    bias: Tensor | None = None,
    groups: int = 1,
    groups_kept: int = 1,
    dropped: float = -math.inf,
    eps: float = 0.0,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """The top_k experts of each token, those of the largest scores, and their weights:

        score      normalize  weights                                       gradient reaches the logits of
        "softmax"  True       softmax over the chosen, which sums to 1      the chosen
        "softmax"  False      softmax over all, at the chosen               all
        "sigmoid"  True       sigmoid / (eps + its sum over the chosen)     the chosen
        "sigmoid"  False      sigmoid, at the chosen                        the chosen

    scale: multiplies the weights. bias: [E], added to the scores for the choice alone: it makes no part of the weights,
    and has no gradient. groups: the experts are so many groups of equal size, one after the other. The groups_kept
    groups whose two largest scores (with the bias) have the largest sums stay; the scores of the others become
    `dropped`: -inf as in DeepSeek-V3, or 0.0 as in Mistral 4. Of equal scores or sums the lower one is taken.

    logits: [T, E]; scores and weights are in fp32 (fp64 for fp64), and bias has that dtype. Returns weights [T, top_k]
    and experts [T, top_k], int32, the largest score first.
    Raises InputError for logits that are not [T, E], a bias that is not [E] in that dtype, and as `check_routing`.
    """
    if logits.dim() != 2 or not logits.is_floating_point():
        raise InputError(f"route: logits have {describe(logits)}; expected floating point [T, E].")
    num_experts = operator.index(logits.shape[1])  # a constexpr of the kernels: from here on a constant for Dynamo
    options = dict(normalize=normalize, score=score, groups=groups, groups_kept=groups_kept, dropped=dropped, eps=eps)
    check_routing(num_experts, top_k=top_k, scale=scale, **options)  # type: ignore[arg-type]
    if bias is not None:
        dtype = accumulator(logits.dtype)
        if bias.shape != (num_experts,) or bias.dtype != dtype or bias.device != logits.device:
            raise InputError(
                f"route: bias has {describe(bias)}; expected {dtype} [{num_experts}] on {logits.device}, beside logits "
                f"{tuple(logits.shape)}."
            )
    if not use_triton(logits) or logits.dtype == torch.float64:  # Triton rounds eps and scale to fp32
        return route_reference(logits, top_k=top_k, bias=bias, scale=scale, **options)  # type: ignore[arg-type]
    constants = normalize, score == "sigmoid", groups, groups_kept, dropped == 0, eps, scale
    return _Route.apply(logits, bias, top_k, *constants)


def check_routing(
    num_experts: int,
    *,
    top_k: int,
    normalize: bool = True,
    score: str = "softmax",
    groups: int = 1,
    groups_kept: int = 1,
    dropped: float = -math.inf,
    eps: float = 0.0,
    scale: float = 1.0,
) -> None:
    """Raises InputError for options of `route` that do not fit each other or the number of experts: top_k experts that
    there are not, or not in the groups that are kept; groups of unequal size, or of one expert; an unknown score or
    `dropped`; eps with a score that needs none."""
    if not 1 <= top_k <= num_experts:
        raise InputError(f"route: top_k is {top_k} for {num_experts} experts; expected 1 <= top_k <= E.")
    if score not in SCORES:
        raise InputError(f"route: score is {score!r}; supported: {', '.join(map(repr, SCORES))}.")
    if not (0 <= eps < math.inf and 0 < scale < math.inf) or (eps > 0 and score == "softmax"):
        raise InputError(
            f"route: eps is {eps} and scale {scale}, with score {score!r}; expected eps >= 0, 0 with 'softmax', whose "
            "sums are not small, and scale > 0."
        )
    if dropped not in (0.0, -math.inf):
        raise InputError(f"route: dropped is {dropped}; expected -inf or 0.0.")
    if not 1 <= groups_kept <= groups or num_experts % groups or (groups > 1 and num_experts < 2 * groups):
        raise InputError(
            f"route: groups is {groups} and groups_kept {groups_kept} for {num_experts} experts; expected "
            "1 <= groups_kept <= groups, and groups of the same number of experts, 2 or more."
        )
    if top_k > groups_kept * (num_experts // groups):
        raise InputError(
            f"route: top_k is {top_k}, but {groups_kept} of {groups} groups have "
            f"{groups_kept * (num_experts // groups)} experts; lower top_k or keep more groups."
        )
