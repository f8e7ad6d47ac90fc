"""The experts of each token and their weights, from the router's logits.

Source: Shazeer et al. 2017, https://arxiv.org/abs/1701.06538; order and precision as MixtralSparseMoeBlock in
https://github.com/huggingface/transformers.
"""

import operator

import torch
from torch import Tensor

from ligermodels.errors import InputError
from ligermodels.kernels._check import describe
from ligermodels.kernels._launch import launch
from ligermodels.kernels._math import exp
from ligermodels.kernels._triton import (
    accumulator,
    cdiv,
    last_dim_contiguous,
    next_power_of_2,
    once_differentiable,
    tl,
    triton,
    use_triton,
)


def route_reference(logits: Tensor, *, top_k: int, normalize: bool = True) -> tuple[Tensor, Tensor]:
    ordered, experts = logits.to(accumulator(logits.dtype)).sort(dim=-1, descending=True, stable=True)
    weights = ordered[:, :top_k].softmax(-1) if normalize else ordered.softmax(-1)[:, :top_k]
    return weights, experts[:, :top_k].int()


@triton.jit(do_not_specialize=["n_rows"])
def _route_kernel(
    weights_ptr, experts_ptr, logits_ptr, n_rows, stride,
    E: tl.constexpr, TOP_K: tl.constexpr, NORMALIZE: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    ACC: tl.constexpr = weights_ptr.dtype.element_ty
    EXACT: tl.constexpr = weights_ptr.dtype.element_ty == tl.float32  # as in `activation`; fp64 is exact as it is
    rows = tl.program_id(0).to(tl.int64)[None, None] * ROWS + tl.arange(0, ROWS)[:, None]
    e, j = tl.arange(0, BLOCK_E)[None, :], tl.arange(0, BLOCK_K)[None, :]
    inside = (rows < n_rows) & (e < E)
    logits = tl.load(logits_ptr + rows * stride + e, mask=inside, other=0.0).to(ACC)
    remaining = tl.where(e < E, logits, -float("inf"))
    unchosen = (e < E) & (rows >= 0)
    largest = tl.max(remaining, 1, keep_dims=True)
    weights = tl.zeros([ROWS, BLOCK_K], ACC)
    experts = tl.zeros([ROWS, BLOCK_K], tl.int32)
    for i in tl.static_range(TOP_K):
        top = tl.max(remaining, 1, keep_dims=True)
        expert = tl.min(tl.where(unchosen & (remaining == top), e, E - 1), 1, keep_dims=True)  # the first of equals
        weights = tl.where(j == i, exp(top - largest) if EXACT else tl.exp(top - largest), weights)
        experts = tl.where(j == i, expert, experts)
        unchosen &= e != expert
        remaining = tl.where(unchosen, remaining, -float("inf"))
    terms = weights
    if not NORMALIZE:
        terms = exp(logits - largest) if EXACT else tl.exp(logits - largest)
        terms = tl.where(e < E, terms, 0.0)
    total = tl.sum(terms, 1, keep_dims=True)
    weights = tl.div_rn(weights, total) if EXACT else weights / total
    has_nan = tl.sum((logits != logits).to(tl.int32), 1, keep_dims=True) > 0  # which max passes over
    weights = tl.where(has_nan | (largest - largest != 0.0), float("nan"), weights)  # as inf - inf is
    inside = (rows < n_rows) & (j < TOP_K)
    tl.store(weights_ptr + rows * TOP_K + j, weights, mask=inside)
    tl.store(experts_ptr + rows * TOP_K + j, experts, mask=inside)


@triton.jit(do_not_specialize=["n_rows"])
def _route_backward_kernel(
    d_logits_ptr, d_weights_ptr, weights_ptr, experts_ptr, logits_ptr, n_rows, stride,
    E: tl.constexpr, TOP_K: tl.constexpr, NORMALIZE: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """logits_ptr, stride: of the logits; not NORMALIZE alone reads them."""
    EXACT: tl.constexpr = weights_ptr.dtype.element_ty == tl.float32  # as in the forward
    rows = tl.program_id(0).to(tl.int64)[None, None] * ROWS + tl.arange(0, ROWS)[:, None]
    e, j = tl.arange(0, BLOCK_E)[None, :], tl.arange(0, BLOCK_K)[None, :]
    inside = (rows < n_rows) & (j < TOP_K)
    weights = tl.load(weights_ptr + rows * TOP_K + j, mask=inside, other=0.0)
    d_weights = tl.load(d_weights_ptr + rows * TOP_K + j, mask=inside, other=0.0)
    d_logits = tl.zeros([ROWS, BLOCK_E], weights.dtype)
    inside = rows < n_rows
    if not NORMALIZE:  # others: the probabilities of the experts that were not chosen
        first = tl.load(experts_ptr + rows * TOP_K, mask=inside, other=0)
        logits = tl.load(logits_ptr + rows * stride + e, mask=inside & (e < E), other=0.0).to(weights.dtype)
        logits -= tl.sum(tl.where(e == first, logits, 0.0), 1, keep_dims=True)
        largest = tl.load(weights_ptr + rows * TOP_K, mask=inside, other=0.0)
        others = tl.where(e < E, largest * (exp(logits) if EXACT else tl.exp(logits)), 0.0)
        for i in tl.static_range(TOP_K):
            others = tl.where(e == tl.load(experts_ptr + rows * TOP_K + i, mask=inside, other=-1), 0.0, others)
        d_logits = -others * tl.sum(weights * d_weights, 1, keep_dims=True)
        rest = tl.sum(others, 1, keep_dims=True)
    for i in tl.static_range(TOP_K):
        expert = tl.load(experts_ptr + rows * TOP_K + i, mask=inside, other=-1)
        weight = tl.load(weights_ptr + rows * TOP_K + i, mask=inside, other=0.0)
        d_weight = tl.load(d_weights_ptr + rows * TOP_K + i, mask=inside, other=0.0)
        # All probabilities sum to 1: pairwise differences lose less than the difference from the mean.
        slope = tl.sum(weights * (d_weight - d_weights), 1, keep_dims=True)
        if not NORMALIZE:
            slope += rest * d_weight
        d_logits += tl.where(e == expert, weight * slope, 0.0)
    tl.store(d_logits_ptr + rows * E + e, d_logits.to(d_logits_ptr.dtype.element_ty), mask=inside & (e < E))


def _route_tile(num_experts: int, top_k: int) -> tuple[int, int, int]:
    """BLOCK_E, BLOCK_K and ROWS."""
    block = next_power_of_2(num_experts)
    return block, next_power_of_2(top_k), max(1, min(64, 1024 // block))


class _Route(torch.autograd.Function):
    """logits: [T, E] -> weights [T, K], experts [T, K]. Saves these, and unless `normalize` the logits."""

    @staticmethod
    def forward(ctx, logits, top_k, normalize):
        n_rows, num_experts = logits.shape[0], operator.index(logits.shape[1])
        logits = last_dim_contiguous(logits)
        weights = torch.empty((n_rows, top_k), dtype=accumulator(logits.dtype), device=logits.device)
        experts = torch.empty((n_rows, top_k), dtype=torch.int32, device=logits.device)
        if n_rows:
            *blocks, rows = _route_tile(num_experts, top_k)
            launch(
                _route_kernel, (cdiv(n_rows, rows),),
                weights, experts, logits, n_rows, logits.stride(0), num_experts, top_k, normalize, *blocks, rows,
                num_warps=4,
            )  # fmt: skip
        ctx.save_for_backward(weights, experts, *([] if normalize else [logits]))
        ctx.mark_non_differentiable(experts)
        ctx.options = num_experts, logits.dtype, normalize
        return weights, experts

    @staticmethod
    @once_differentiable
    def backward(ctx, d_weights, _):
        weights, experts, *logits = ctx.saved_tensors
        num_experts, dtype, normalize = ctx.options
        n_rows, top_k = weights.shape[0], operator.index(weights.shape[1])
        d_logits = torch.empty((n_rows, num_experts), dtype=dtype, device=weights.device)
        if n_rows:
            *blocks, rows = _route_tile(num_experts, top_k)
            launch(
                _route_backward_kernel, (cdiv(n_rows, rows),),
                d_logits, d_weights.contiguous(), weights, experts, None if normalize else logits[0], n_rows,
                0 if normalize else logits[0].stride(0), num_experts, top_k, normalize, *blocks, rows, num_warps=4,
            )  # fmt: skip
        return d_logits, None, None


def route(logits: Tensor, *, top_k: int, normalize: bool = True) -> tuple[Tensor, Tensor]:
    """The top_k experts of each token, those of the largest logits, and their weights:

        normalize    weights                                     gradient reaches the logits of
        True         softmax over the chosen, which sums to 1    the chosen
        False        softmax over all, at the chosen             all

    logits: [T, E]. Returns weights [T, top_k], fp32 (fp64 for fp64), largest first, and experts [T, top_k], int32. Of
    equal logits the lower expert is taken.
    Raises InputError unless logits are [T, E] and 1 <= top_k <= E.
    """
    if logits.dim() != 2 or not logits.is_floating_point() or not 1 <= top_k <= logits.shape[1]:
        raise InputError(
            f"route: logits have {describe(logits)}, top_k is {top_k}; expected "
            "floating point [T, E] and 1 <= top_k <= E."
        )
    operator.index(logits.shape[1])  # a constexpr of the kernels, which Dynamo must take for a constant from here on
    if not use_triton(logits):
        return route_reference(logits, top_k=top_k, normalize=normalize)
    return _Route.apply(logits, top_k, normalize)
