"""Attention with sinks by those engines of torch that return log sum exp of each row's scores.

    lse' = logaddexp(lse, sink)      o' = o * exp(lse - lse')      dsink = -sum over rows of exp(sink - lse') (do . o')

The engine's backward gets o' and lse' in place of o and lse, and so computes with the weights exp(score - lse'): those
of a softmax over the scores and the sink. Nothing else in dq, dk and dv depends on the sink.

Bytes: besides those of the engine, o is read and written once more; for dsink do and o are read, and their product
goes through memory in fp32, in a few elementwise passes.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ligermodels.kernels._triton import (
    assume_constant_result,
    cdiv,
    cuda_capability,
    is_datacenter,
    once_differentiable,
)

_aten = torch.ops.aten


def in_one_layout(do: Tensor) -> Tensor:
    """The gradient of cuDNN's output [B, S, H, D], contiguous.

    torch keeps the graph of cuDNN's backward by the layouts of q, k and v alone: once built, it would read the gradient
    of a later call with these in the layout of the first. Source: aten/src/ATen/native/cudnn/MHA.cpp.
    """
    return do.contiguous()


def engine_with_lse(q: Tensor, *, plain: bool) -> str | None:
    """The name of torch's engine for q [B, S, HQ, D], or None. plain: S = K causal, or no mask at all.

    None where `torch.nn.attention.sdpa_kernel` allows none of them, as for second derivatives.
    """
    half = q.dtype in (torch.bfloat16, torch.float16)
    if q.device.type == "cpu":
        return "cpu" if _is_allowed("flash") else None
    if q.device.type != "cuda" or cuda_capability(q.device.index) < 80:  # 0 on AMD's GPUs
        return None
    of_cudnn = plain and half and q.shape[-1] <= 128 and q.shape[-1] % 8 == 0
    if of_cudnn and is_datacenter(q.device.index) and _is_allowed("cudnn"):
        return "cudnn"
    aligned = q.shape[-1] * q.element_size() % 16 == 0 and (half or q.dtype == torch.float32)
    return "efficient" if aligned and _is_allowed("mem_efficient") else None


@assume_constant_result
def _is_allowed(engine: str) -> bool:
    if engine == "cudnn" and torch.are_deterministic_algorithms_enabled():
        return False  # its gradients are not summed in a fixed order
    return getattr(torch.backends.cuda, f"{engine}_sdp_enabled")()


def attention_with_sinks(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, mask: Tensor | None, causal: bool, scale: float, engine: str
) -> Tensor:
    """softmax over [scores, sink], of which the sink has no value: [B, H, S, D].

    q [B, H, S, D], k, v [B, HK, K, D]; sinks, floating, broadcast to [B, H, S]; mask bool [B or 1, 1, S, K]. A row that
    the mask hides gives 0. engine: of `engine_with_lse`.
    """
    bias, hidden = None, None
    if engine == "efficient" and q.shape[1] != k.shape[1]:
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    if mask is not None:
        # Engines differ in what they make of a row without a key. It sees all of them here, with a weight of 0.
        hidden = ~mask.any(-1)
        num_keys = mask.shape[3]
        # Rows at multiples of 16 bytes, for the memory-efficient kernel.
        bias = q.new_zeros(*mask.shape[:3], cdiv(num_keys, 8) * 8)[..., :num_keys]
        bias.masked_fill_(~(mask | hidden[..., None]), float("-inf"))
    return _OfTorch.apply(q, k, v, sinks, bias, hidden, causal, scale, engine)


class _OfTorch(torch.autograd.Function):
    """`attention_with_sinks`. bias: 0 and -inf, in q's dtype; hidden: bool [B or 1, 1, S], rows without a key."""

    @staticmethod
    def forward(ctx, q, k, v, sinks, bias, hidden, causal, scale, engine):
        out, lse, *rest = _FORWARD[engine](q, k, v, bias, causal, scale)
        rows = lse.flatten(2)[..., : q.shape[2]]
        total = torch.logaddexp(rows, sinks.to(lse.dtype))
        if hidden is not None:
            total = total.masked_fill(hidden, float("inf"))
        factor = torch.exp(rows - total)[..., None]
        # torch 2.11 compiles a forward that returns every intermediate tensor. An output that is there twice, as after
        # a change in place or a conversion to its dtype, gets gradients of 0.
        out = (out * factor).to(out.dtype, copy=True) if torch.compiler.is_compiling() else out.mul_(factor)
        tensors = [x for x in rest if isinstance(x, Tensor)]  # they come first
        ctx.save_for_backward(q, k, v, sinks, bias, out, total, *tensors)
        ctx.options = causal, scale, engine
        ctx.sizes = rest[len(tensors) :]
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, do):
        q, k, v, sinks, bias, out, total, *tensors = ctx.saved_tensors
        causal, scale, engine = ctx.options
        dsinks = None
        if ctx.needs_input_grad[3]:
            p = torch.exp(sinks.to(total.dtype) - total)
            dsinks = -(p * (do.to(total.dtype) * out).sum(-1)).sum_to_size(sinks.shape).to(sinks.dtype)
        dq, dk, dv = _BACKWARD[engine](do, q, k, v, bias, out, total, (*tensors, *ctx.sizes), causal, scale)
        return dq, dk, dv, dsinks, None, None, None, None, None


def _cpu(q, k, v, bias, causal, scale):
    return _aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, attn_mask=bias, scale=scale)


def _cpu_backward(do, q, k, v, bias, out, lse, rest, causal, scale):
    backward = _aten._scaled_dot_product_flash_attention_for_cpu_backward
    return backward(do, q, k, v, out, lse, 0.0, causal, attn_mask=bias, scale=scale)


def _efficient(q, k, v, bias, causal, scale):
    bias = bias if bias is None else bias.expand(*q.shape[:3], -1)
    return _aten._scaled_dot_product_efficient_attention(q, k, v, bias, True, 0.0, causal, scale=scale)


def _efficient_backward(do, q, k, v, bias, out, lse, rest, causal, scale):
    bias = bias if bias is None else bias.expand(*q.shape[:3], -1)
    wanted = [True, True, True, False]
    lse = F.pad(lse, (0, -lse.shape[2] % 32), value=float("inf"))
    backward = _aten._scaled_dot_product_efficient_attention_backward
    return backward(do, q, k, v, bias, out, lse, *rest, 0.0, wanted, causal, scale=scale)[:3]


def _cudnn(q, k, v, bias, causal, scale):
    out, lse, cum_q, cum_k, max_q, max_k, seed, offset, _ = _aten._scaled_dot_product_cudnn_attention(
        q, k, v, bias, True, 0.0, causal, False, scale=scale
    )
    return out, lse, seed, offset, cum_q, cum_k, max_q, max_k


def _cudnn_backward(do, q, k, v, bias, out, lse, rest, causal, scale):
    seed, offset, *sizes = rest
    backward = _aten._scaled_dot_product_cudnn_attention_backward
    do = in_one_layout(do.transpose(1, 2)).transpose(1, 2)
    return backward(do, q, k, v, out, lse[..., None], seed, offset, bias, *sizes, 0.0, causal, scale=scale)


_FORWARD: dict[str, Callable[..., Any]] = {"cpu": _cpu, "efficient": _efficient, "cudnn": _cudnn}
"""(out, lse, what the backward needs besides, tensors first): lse [B, H, S], of cudnn [B, H, S, 1], of efficient with
rows padded to multiples of 32."""
_BACKWARD: dict[str, Callable[..., Any]] = {
    "cpu": _cpu_backward,
    "efficient": _efficient_backward,
    "cudnn": _cudnn_backward,
}
