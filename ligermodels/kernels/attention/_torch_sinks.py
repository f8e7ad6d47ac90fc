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
    once_differentiable,
)

_aten = torch.ops.aten


def engine_with_lse(q: Tensor) -> str | None:
    """The name of torch's engine for q [B, S, HQ, D], or None, also where `torch.nn.attention.sdpa_kernel` does not
    allow it, as for second derivatives."""
    if q.device.type == "cpu":
        return "cpu" if _is_allowed("flash") else None
    if q.device.type != "cuda" or cuda_capability(q.device.index) < 80:  # 0 on AMD's GPUs
        return None
    aligned = q.shape[-1] * q.element_size() % 16 == 0
    floats = q.dtype in (torch.float32, torch.bfloat16, torch.float16)
    return "efficient" if aligned and floats and _is_allowed("mem_efficient") else None


@assume_constant_result
def _is_allowed(engine: str) -> bool:
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
        rows = lse[..., : q.shape[2]]
        total = torch.logaddexp(rows, sinks.to(lse.dtype))
        if hidden is not None:
            total = total.masked_fill(hidden, float("inf"))
        factor = torch.exp(rows - total)[..., None]
        # torch 2.11 compiles a forward that returns every intermediate tensor. An output that is there twice, as after
        # a change in place or a conversion to its dtype, gets gradients of 0.
        out = (out * factor).to(out.dtype, copy=True) if torch.compiler.is_compiling() else out.mul_(factor)
        ctx.save_for_backward(q, k, v, sinks, bias, out, total, *rest)
        ctx.options = causal, scale, engine
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, do):
        q, k, v, sinks, bias, out, total, *rest = ctx.saved_tensors
        causal, scale, engine = ctx.options
        dsinks = None
        if ctx.needs_input_grad[3]:
            p = torch.exp(sinks.to(total.dtype) - total)
            dsinks = -(p * (do.to(total.dtype) * out).sum(-1)).sum_to_size(sinks.shape).to(sinks.dtype)
        dq, dk, dv = _BACKWARD[engine](do, q, k, v, bias, out, total, rest, causal, scale)
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


_FORWARD: dict[str, Callable[..., Any]] = {"cpu": _cpu, "efficient": _efficient}
"""(out, lse, what the backward needs besides): lse [B, H, S], of efficient with rows padded to multiples of 32."""
_BACKWARD: dict[str, Callable[..., Any]] = {"cpu": _cpu_backward, "efficient": _efficient_backward}
