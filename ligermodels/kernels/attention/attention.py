"""Scaled dot-product attention: softmax(scale * q k^T + mask) v, by torch's engines or our own kernels.

What it adds to `torch.nn.functional.scaled_dot_product_attention`: [B, S, H, D] tensors, strided or not; grouped heads;
causality aligned to the last key; windows; softcaps; sinks; padding without NaN; packed sequences; and the choice of
the engine:

| case                                   | engine                                                            |
|----------------------------------------|-------------------------------------------------------------------|
| S = K causal, or no mask               | torch's first choice. bf16, fp16: cuDNN on Hopper and later,      |
|                                        | FlashAttention-2 on Ampere and Ada; fp32: memory-efficient kernel |
| the same past 2^31 elements, where     | bf16, fp16: `flash_attention`, in Triton                          |
| torch 2.11's gradients are wrong       |                                                                   |
| one query (decode)                     | FlashAttention-2: cuDNN would plan again for every length K       |
| softcap                                | `flash_attention`, in Triton; fp32 on Hopper and Blackwell only;  |
|                                        | of one query, without a mask or gradient, `decode_attention`      |
| window, packed sequences, key_mask,    | bf16, fp16: the same                                              |
| S < K causal                           | fp32: memory-efficient kernel, boolean mask [1 or B, 1, S, K]     |
| packed sequences without a mask, their | where `_one_by_one` says so, one batch per run of equal lengths,  |
| lengths known to the host              | so that images and video frames get torch's first choice          |
| together                               | torch's first choice, with a boolean mask [B, 1, S, K]            |
| sinks                                  | bf16, fp16: `flash_attention`, in Triton; else an engine of torch |
|                                        | that returns lse, see `_torch_sinks`: that of the CPU, the        |
|                                        | memory-efficient kernel                                           |
| D > 256, bf16, fp16, on Hopper and     | without a softcap or sinks and from 512 queries on                |
| datacenter Blackwell                   | `unfused_attention`, in Triton, whatever the mask                 |
| CPU; no Triton; D > 256; the rest      | torch's first choice, with a boolean mask where one is needed;    |
|                                        | with a softcap, or sinks on a GPU, `attention_reference`          |

Bytes: the engines read q, k, v and write the output and one number per row and head; only the reference writes scores,
and `unfused_attention`, in a workspace of 1 GiB.
A boolean mask has S * K elements, which torch also stores in the inputs' dtype for the backward. With `head_chunks`,
torch's engines take q of 2^27 elements or more in chunks of heads, so that the workspace of their backward stays below
1 GiB: sequences may be 10 % longer at 131,072 tokens.

The Triton kernels sum gradients in a fixed order; torch's engines do so with
`torch.use_deterministic_algorithms(True)`.

Source: Dao 2023, "FlashAttention-2", https://arxiv.org/abs/2307.08691.
"""

import itertools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from ligermodels.errors import InputError, warn_once
from ligermodels.kernels._check import check_bounds, check_operand, describe
from ligermodels.kernels._recompute import attach, only_backward
from ligermodels.kernels._triton import (
    accumulator,
    assume_constant_result,
    cdiv,
    cuda_capability,
    is_datacenter,
    last_dim_contiguous,
    use_triton,
)
from ligermodels.kernels.attention._flash_attention import flash_attention
from ligermodels.kernels.attention._torch_sinks import attention_with_sinks, engine_with_lse
from ligermodels.kernels.attention._unfused_attention import unfused_attention


def attention_reference(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool = True, window: int | None = None, softcap: float | None = None,
    scale: float | None = None, key_mask: Tensor | None = None, cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None, together: Tensor | None = None, sinks: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """The specification of `attention`, in fp32 (fp64 for fp64) with the scores in memory."""
    dtype, groups = accumulator(q.dtype), q.shape[2] // k.shape[2]
    k, v = k.to(dtype).repeat_interleave(groups, dim=2), v.to(dtype).repeat_interleave(groups, dim=2)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    scores = torch.einsum("bshd,bkhd->bhsk", q.to(dtype), k) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    visible = _visible(q, k, causal, window, key_mask, cu_seqlens, together, with_sinks=sinks is not None)
    scores = scores.masked_fill(~visible, float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks.to(dtype)[:, None, None].expand(*scores.shape[:3], 1)], -1)
    return torch.einsum("bhsk,bkhd->bshd", scores.softmax(-1)[..., : k.shape[1]], v).to(q.dtype)


def _visible(
    q: Tensor, k: Tensor, causal: bool, window: int | None, key_mask: Tensor | None, cu_seqlens: Tensor | None,
    together: Tensor | None = None, with_sinks: bool = False,
) -> Tensor:  # fmt: skip
    """Which query attends to which key: bool [B or 1, 1, S, K]; without sinks at least one True per row."""
    length, num_keys = q.shape[1], k.shape[1]
    keys = torch.arange(num_keys, dtype=torch.int32, device=q.device)
    aligned = torch.arange(num_keys - length, num_keys, dtype=torch.int32, device=q.device)[:, None]
    visible = torch.ones(length, num_keys, dtype=torch.bool, device=q.device)
    if causal:
        visible = visible & (keys <= aligned)
    visible = visible[None, None]
    if together is not None:
        of_queries = together[:, None, num_keys - length :, None]
        visible = visible | ((of_queries == together[:, None, None]) & (of_queries >= 0))
    if window is not None:
        visible = visible & (keys > aligned - window)
    if cu_seqlens is not None:
        sequence = torch.bucketize(keys, cu_seqlens[1:], right=True)
        visible = visible & (sequence == sequence[:, None])
    if key_mask is not None:
        visible = visible & key_mask[:, None, None]
    if key_mask is not None and not with_sinks:
        # The softmax over no key, and its gradient, would be NaN: a query without a visible key attends to itself.
        itself = keys == aligned.clamp(min=0)
        visible = visible | (itself & ~visible.any(-1, keepdim=True))
    return visible


def attention(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool = True, window: int | None = None, softcap: float | None = None,
    scale: float | None = None, key_mask: Tensor | None = None, cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None, head_chunks: bool = False, together: Tensor | None = None,
    sinks: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """softmax(scale * q k^T) v over the keys that each query attends to: [B, S, HQ, D].

    q: [B, S, HQ, D]. k, v: [B, K, HK, D]; query head h reads key head h // (HQ / HK). Strided views are fine.
    causal: aligned to the last key: query i sees key j only if j <= i + K - S. Needs K >= S.
    window: number of tokens, the query included: j > i + K - S - window.
    softcap: scores become softcap * tanh(scores / softcap) before masking.
    scale: multiplies q k^T; positive, default D ** -0.5.
    key_mask: bool [B, K], False at keys that are padding. A query without a visible key attends to its own key, so that
        its output is finite, but means nothing.
    cu_seqlens: int32 [N + 1], ascending from 0 to S, with B = 1 and K = S: boundaries of N packed sequences, which do
        not attend to each other. On a GPU its values are not checked, since that would synchronise. On the CPU, allowed
        wherever q is, it lets long sequences run as batches, which is faster.
    max_seqlen: at least the longest packed sequence, which saves `unfused_attention` memory and time; None: not known.
    head_chunks: compute the heads of a long sequence in chunks, for less memory in the backward. Only for an output
        that goes to `kernels.linear`, which saves the chunks; anything else would save the whole output too.
    together: integers [B, K]; tokens with the same number, 0 or more, also see those of them that come after, within
        the window. By torch's engines with a boolean mask.
    sinks: floating [HQ], a score without a key and a value that all rows of a head have: it takes part in the sum of
        the softmax, and is neither scaled nor capped. A query without a visible key then gives 0.

    Raises InputError if shapes, dtypes or devices do not fit together.
    """
    _check(q, k, v, causal, window, softcap, scale, key_mask, cu_seqlens, together)
    if sinks is not None:
        check_operand("attention", "sinks", sinks, q.shape[2:3], "q", q)
    length, num_keys = q.shape[1], k.shape[1]
    unfused = together is sinks is None and length >= _UNFUSED_QUERIES and _unfused_takes(q, softcap)
    if cu_seqlens is not None and cu_seqlens.shape[0] == 2:  # a single sequence
        cu_seqlens = None
    if cu_seqlens is not None and together is None and _is_known(cu_seqlens):
        runs, masked = _runs(cu_seqlens), not (window is softcap is key_mask is None)
        if unfused:
            max_seqlen = max(size for _, size in runs)
        elif not _triton_takes(q, softcap) or (_one_by_one(runs) and not masked):
            options: dict[str, Any] = dict(causal=causal, window=window, softcap=softcap, scale=scale, sinks=sinks)
            return _run_by_run(q, k, v, runs, key_mask, **options)
    if cu_seqlens is not None:
        cu_seqlens = cu_seqlens.to(q.device)
    if window is not None and num_keys > length + window - 1:
        start = num_keys - (length + window - 1)
        k, v, num_keys = k[:, start:], v[:, start:], num_keys - start
        key_mask = key_mask if key_mask is None else key_mask[:, start:]
        together = together if together is None else together[:, start:]
    if window is not None and window >= num_keys:
        window = None
    options = dict(causal=causal, window=window, key_mask=key_mask, cu_seqlens=cu_seqlens)
    if together is not None:
        options |= {"together": together}
    plain = window is key_mask is cu_seqlens is together is None
    everything = plain and (length == num_keys or not causal)
    small = q.numel() < 2**31  # beyond, cuDNN's gradients were wrong on an H200, torch 2.11
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if unfused:
        return unfused_attention(q, k, v, scale=scale, max_seqlen=max_seqlen, **options)
    by_torch = softcap is sinks is None and ((everything and small) or length == 1)
    if together is None and _triton_takes(q, softcap) and not by_torch:
        return flash_attention(q, k, v, softcap=softcap, scale=scale, sinks=sinks, **options)
    lse_engine = None if sinks is None else engine_with_lse(q)
    if softcap is not None or q.numel() == 0 or (sinks is not None and lse_engine is None):
        if q.device.type != "cpu" and q.numel() and length > 1 and not torch.compiler.is_compiling():
            why, what = _not_by_triton(q, softcap), "sinks" if softcap is None else "a softcap"
            warn_once(f"attention: {why}", f"attention with {what} has all scores in memory, because {why}")
        return attention_reference(q, k, v, softcap=softcap, scale=scale, sinks=sinks, **options)
    q, k, v = (last_dim_contiguous(x) for x in (q, k, v))
    if length == 1:
        mask = None if plain else _visible(q, k, **options, with_sinks=sinks is not None)
        return _decode(q, k, v, mask, scale, sinks, lse_engine)
    if everything:
        if head_chunks and sinks is None and not torch.compiler.is_compiling():
            return _by_head_chunks(q, k, v, causal, scale)
        return _sdpa(q, k, v, None, causal, scale, sinks, lse_engine)
    mask = _visible(q, k, **options, with_sinks=sinks is not None)
    return _sdpa(q, k, v, mask, False, scale, sinks, lse_engine)


def _is_known(cu_seqlens: Tensor) -> bool:
    """Whether the host can read the bounds without waiting."""
    return cu_seqlens.device.type == "cpu" and not torch.compiler.is_compiling()


def _one_by_one(runs: list[tuple[int, int]]) -> bool:
    """True if packed sequences are faster as batches on torch's engines, one for each of `_runs`, than all at once in
    `flash_attention`.

    cuDNN is faster on long sequences, but each run takes the host 0.5 ms, forward and backward, in which the GPU must
    have work. On an H200 with 8 causal documents, 32 heads of 128 dims (of 64), `flash_attention` and one run after the
    other took 3.6 and 4.1 ms (2.3 and 4.4) for 2,048 tokens a run, 15.3 and 13.8 ms for 4,096. A single run is one
    launch either way.
    """
    tokens = sum(count * length for count, length in runs)
    return tokens >= (1024 if len(runs) == 1 else 3072 * len(runs))


def _runs(cu_seqlens: Tensor) -> list[tuple[int, int]]:
    """(count, length) of runs of packed sequences of one length; empty sequences are dropped."""
    lengths = [end - start for start, end in itertools.pairwise(cu_seqlens.tolist()) if end > start]
    return [(len(list(run)), length) for length, run in itertools.groupby(lengths)]


def _run_by_run(
    q: Tensor, k: Tensor, v: Tensor, runs: list[tuple[int, int]], key_mask: Tensor | None, **options: Any
) -> Tensor:
    """Attention of each run as one batch."""
    if not runs:
        return attention(q, k, v, key_mask=key_mask, **options)
    sizes = [count * length for count, length in runs]
    tensors = (q, k, v, key_mask)
    parts: list[Any] = [itertools.repeat(None) if x is None else x.split(sizes, dim=1) for x in tensors]
    outs = []
    for run, *part in zip(runs, *parts, strict=False):
        batch: list[Any] = [x if x is None else x.unflatten(1, run)[0] for x in part]
        outs.append(attention(*batch[:3], key_mask=batch[3], **options).flatten(0, 1))
    return (torch.cat(outs) if len(outs) > 1 else outs[0])[None]


def _triton_takes(q: Tensor, softcap: float | None) -> bool:
    """True if `flash_attention` can run. In fp32 torch's engines are faster, but have no softcap."""
    half = q.dtype in (torch.bfloat16, torch.float16)
    capped = q.dtype == torch.float32 and softcap is not None and q.is_cuda and is_datacenter(q.device.index)
    return use_triton(q) and q.numel() > 0 and q.shape[-1] <= 256 and (half or capped)


_UNFUSED_QUERIES = 512
"""Fewer leave a GPU to the host that launches; forward and backward take 1.4 and 1.5 ms at this length on an H200."""


def _unfused_takes(q: Tensor, softcap: float | None) -> bool:
    """True if `unfused_attention` can run, which torch's engines do not match for heads above 256."""
    wide, half = q.shape[-1] > 256 and q.shape[-1] % 64 == 0, q.dtype in (torch.bfloat16, torch.float16)
    return wide and half and softcap is None and q.numel() > 0 and use_triton(q) and is_datacenter(q.device.index)


def _not_by_triton(q: Tensor, softcap: float | None) -> str:
    """Why `_triton_takes` is False."""
    if not use_triton(q):
        return "there is no GPU" if q.device.type == "cpu" else "Triton is not installed"
    if q.shape[-1] > 256:
        return f"head_dim {q.shape[-1]} is above 256"
    half = "bfloat16 and float16"
    return f"{q.dtype} is not {half}" + (", nor is this a Hopper or Blackwell GPU" if softcap is not None else "")


def engine(
    q: Tensor, *, softcap: float | None = None, window: int | None = None, sinks: bool = False
) -> tuple[str, str]:
    """(engine, reason) of `attention` for q [B, S, heads, D], causal and longer than the window; the reason says why it
    is not the first choice, "" if it is."""
    takes = _triton_takes(q, softcap)
    if sinks and not takes:
        in_memory = softcap is not None or engine_with_lse(q) is None
        name = "attention_reference, scores in memory" if in_memory else "torch's kernel with lse"
        return name, _not_by_triton(q, softcap)
    if _unfused_takes(q, softcap):
        return f"unfused_attention in Triton from {_UNFUSED_QUERIES} tokens on, else torch SDPA", ""
    if takes and (softcap is not None or window is not None or sinks):
        return "flash_attention in Triton", ""
    if takes:
        return "torch SDPA; packed rows: flash_attention in Triton", ""
    name = "torch SDPA; packed rows use a mask" if window is None else "torch SDPA with a mask"
    return name if softcap is None else "attention_reference, scores in memory", _not_by_triton(q, softcap)


# Elements of q per chunk. In 16 bits cuDNN's backward has a workspace of 8 bytes for each.
_CHUNK_ELEMENTS = 2**26


def _by_head_chunks(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> Tensor:
    """`_sdpa`, in chunks of heads if q is large, because the backward's workspace grows with the heads."""
    chunks = q.numel() // _CHUNK_ELEMENTS
    if chunks < 2 or k.shape[2] == 1 or not only_backward() or torch.is_autocast_enabled(q.device.type):
        return _sdpa(q, k, v, None, causal, scale)
    heads = cdiv(k.shape[2], chunks)
    split = q.split(heads * (q.shape[2] // k.shape[2]), 2), k.split(heads, 2), v.split(heads, 2)
    outs = [_sdpa(*chunk, None, causal, scale) for chunk in zip(*split, strict=True)]
    return attach(_joined(*outs), _joined, *outs)  # each chunk is saved for its own backward anyway


def _joined(*outs: Tensor) -> Tensor:
    return torch.cat(outs, 2)


def _sdpa(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float, sinks: Tensor | None = None,
    lse_engine: str | None = None,
) -> Tensor:  # fmt: skip
    if sinks is not None and lse_engine is not None:
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        return attention_with_sinks(q, k, v, sinks[:, None], mask, causal, scale, lse_engine).transpose(1, 2)
    groups = q.shape[2] // k.shape[2]
    half = q.dtype in (torch.bfloat16, torch.float16)
    if groups > 1 and q.device.type == "cuda" and (mask is not None or not half or q.shape[-1] > 256):
        # The right engine has no grouped heads, and torch would take one that stores the scores.
        k, v, groups = k.repeat_interleave(groups, dim=2), v.repeat_interleave(groups, dim=2), 1
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    grouped = {"enable_gqa": True} if groups > 1 else {}  # `groups > 1` would not be a bool for symbolic sizes
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, scale=scale, **grouped)
    out = out.transpose(1, 2)
    if half and out.is_cuda and out.requires_grad and not torch.compiler.is_compiling():
        out.register_hook(_in_one_layout)
    return out


def _in_one_layout(do: Tensor) -> Tensor:
    """The gradient of cuDNN's output [B, S, H, D], contiguous.

    torch keeps the graph of cuDNN's backward by the layouts of q, k and v alone: once built, it would read the gradient
    of a later call with these in the layout of the first. Source: aten/src/ATen/native/cudnn/MHA.cpp.
    """
    return do.contiguous()


def _decode(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, sinks: Tensor | None, lse_engine: str | None
) -> Tensor:
    """One query per sequence: query heads of one key head become queries, so that no engine needs grouped heads."""
    batch_size, _, num_heads, size = q.shape
    grouped = q.reshape(batch_size, k.shape[2], num_heads // k.shape[2], size)
    k, v = k.transpose(1, 2), v.transpose(1, 2)
    if sinks is not None and lse_engine is not None:
        of_heads = sinks.view(k.shape[1], -1)
        out = attention_with_sinks(grouped, k, v, of_heads, mask, False, scale, lse_engine)
    elif mask is None and _flash_takes(q):
        # What F.scaled_dot_product_attention calls; sdpa_kernel, to choose it, would cost a context manager per layer.
        out = torch.ops.aten._scaled_dot_product_flash_attention(grouped, k, v, scale=scale)[0]
    elif q.device.type == "cuda":
        with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
            out = F.scaled_dot_product_attention(grouped, k, v, attn_mask=mask, scale=scale)
    else:
        out = F.scaled_dot_product_attention(grouped, k, v, attn_mask=mask, scale=scale)
    return out.reshape(q.shape)


def _flash_takes(q: Tensor) -> bool:
    """True if torch's FlashAttention-2 runs on tensors like q."""
    return (
        q.device.type == "cuda"
        and q.dtype in (torch.bfloat16, torch.float16)
        and q.shape[-1] <= 256
        and q.shape[-1] % 8 == 0
        and cuda_capability(q.device.index) >= 80
        and _built_with_flash()
    )


@assume_constant_result
def _built_with_flash() -> bool:
    return torch.backends.cuda.is_flash_attention_available()


def _check(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, window: int | None, softcap: float | None, scale: float | None,
    key_mask: Tensor | None, cu_seqlens: Tensor | None, together: Tensor | None,
) -> None:  # fmt: skip
    of_q, of_k = q.shape, k.shape
    if (
        len(of_q) != 4 or len(of_k) != 4 or of_k != v.shape or of_q[0] != of_k[0] or of_q[3] != of_k[3]
        or not (q.dtype == k.dtype == v.dtype) or not (q.device == k.device == v.device)
    ):  # fmt: skip
        raise InputError(
            f"attention: q has {describe(q)}, k {describe(k)}, v {describe(v)}; expected q [B, S, HQ, D] and k, v "
            "[B, K, HK, D] of one dtype and device. Is the KV cache of another dtype than the model?"
        )
    if of_k[2] == 0 or of_q[2] % of_k[2]:
        raise InputError(f"attention: {of_q[2]} query heads must be a multiple of the {of_k[2]} key heads")
    if (causal and of_q[1] > of_k[1]) or (of_k[1] == 0 and of_q[1]):
        raise InputError(f"attention: {of_q[1]} queries but only {of_k[1]} keys; pass the keys of all queries")
    if window is not None and window < 1:
        raise InputError(f"attention: window={window} hides even the query's own key; give 1 or more tokens, or None")
    if softcap is not None and not softcap > 0:
        raise InputError(f"attention: softcap={softcap} must be positive; None turns it off")
    if scale is not None and not scale > 0:  # torch's engines return NaN for it on the CPU
        raise InputError(f"attention: scale={scale} must be positive; None is head_dim ** -0.5")
    if key_mask is not None and (
        key_mask.shape != of_k[:2] or key_mask.dtype != torch.bool or key_mask.device != q.device
    ):
        raise InputError(
            f"attention: key_mask has {describe(key_mask)}, for {of_q[1]} queries and {of_k[1]} keys; expected "
            f"torch.bool {list(of_k[:2])} on {q.device}, one entry per key"
        )
    if together is not None and (together.shape != of_k[:2] or together.device != q.device):
        raise InputError(
            f"attention: together has {describe(together)}, for {of_k[1]} keys; expected integers {list(of_k[:2])} on "
            f"{q.device}, one for each key"
        )
    if cu_seqlens is not None:
        if of_q[1] != of_k[1]:
            raise InputError(f"attention: {of_q[1]} queries and {of_k[1]} keys; packed sequences have as many of each")
        check_bounds("attention", cu_seqlens, q, also_on_cpu=True)
