"""Scaled dot-product attention: softmax(scale * q k^T + mask) v, on torch's engines or our own.

What is added to `torch.nn.functional.scaled_dot_product_attention`: [B, S, H, D] tensors, so that q, k and v
go in as strided views of one packed projection and the output is the next projection's input without a copy;
grouped heads; causality aligned to the last key; windows; softcaps; padding that cannot make a NaN; packed
sequences; the choice of engine.

| case                                   | engine                                                            |
|----------------------------------------|-------------------------------------------------------------------|
| S = K causal, or nothing hidden        | torch's first choice. bf16, fp16: cuDNN on Hopper and later,      |
|                                        | FlashAttention-2 on Ampere and Ada; fp32: memory-efficient kernel |
| the same past 2^31 elements, where     | bf16, fp16: `flash_attention`, in Triton                          |
| torch 2.11's gradients are wrong       |                                                                   |
| one query (decode)                     | FlashAttention-2: cuDNN would plan anew for every length K        |
| softcap                                | `flash_attention`, in Triton; fp32 on Hopper and Blackwell only   |
| window, packed sequences, key_mask,    | bf16, fp16: the same                                              |
| padding, S < K causal                  | fp32: memory-efficient kernel, boolean mask [1 or B, 1, S, K]     |
| long packed sequences, their lengths   | a batch for each run of equal lengths, each as above, so that     |
| known to the host                      | whole images and their frames get torch's first choice          |
| CPU; no Triton; D > 256; the rest      | torch's first choice, with a boolean mask where one is needed;    |
|                                        | with a softcap `attention_reference`                              |

Bytes: none of the engines but the reference writes scores; each reads q, k, v and writes the output and one
number per row and head, which is the minimum up to re-reading k and v from cache. A boolean mask costs S * K
elements per call, and another S * K of the inputs' dtype inside torch, held for the backward. With `turns`, from 2^27
elements of q on, torch's engines take some heads after others, so that what their backward needs beside its results
stays below 1 GiB where there are heads enough.

The gradients of torch's engines sum in no fixed order; `torch.use_deterministic_algorithms(True)` makes torch
choose, or switch, to ones that do. Those of the Triton kernels always sum in one order.

Source: Dao 2023, "FlashAttention-2", https://arxiv.org/abs/2307.08691.
"""

import itertools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from ligermodels.errors import InputError, warn_once
from ligermodels.kernels._recompute import attach, only_backward
from ligermodels.kernels._triton import accumulator, last_dim_contiguous, use_triton
from ligermodels.kernels.flash_attention import flash_attention
from ligermodels.kernels.flash_config import data_centre


def attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = True,
    window: int | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    key_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
    padding: Tensor | None = None,
) -> Tensor:
    """The specification of `attention`, in fp32 (fp64 for fp64) with the scores in memory."""
    dtype, groups = accumulator(q.dtype), q.shape[2] // k.shape[2]
    k, v = k.to(dtype).repeat_interleave(groups, dim=2), v.to(dtype).repeat_interleave(groups, dim=2)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    scores = torch.einsum("bshd,bkhd->bhsk", q.to(dtype), k) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    visible = _visible(q, k, causal, window, key_mask, cu_seqlens, padding)
    weights = scores.masked_fill(~visible, float("-inf")).softmax(-1)
    return torch.einsum("bhsk,bkhd->bshd", weights, v).to(q.dtype)


def _visible(
    q: Tensor,
    k: Tensor,
    causal: bool,
    window: int | None,
    key_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    padding: Tensor | None,
) -> Tensor:
    """Which query sees which key: bool [B or 1, 1, S, K], at least one True per row."""
    length, num_keys = q.shape[1], k.shape[1]
    keys = torch.arange(num_keys, dtype=torch.int32, device=q.device)
    aligned = torch.arange(num_keys - length, num_keys, dtype=torch.int32, device=q.device)[:, None]
    visible = torch.ones(length, num_keys, dtype=torch.bool, device=q.device)
    if causal:
        visible = visible & (keys <= aligned)
    if window is not None:
        visible = visible & (keys > aligned - window)
    if cu_seqlens is not None:
        sequence = torch.bucketize(keys, cu_seqlens[1:], right=True)
        visible = visible & (sequence == sequence[:, None])
    visible = visible[None, None]
    if key_mask is not None:
        visible = visible & key_mask[:, None, None]
    if padding is not None:
        visible = visible & ~(padding[:, None, :, None] & padding[:, None, None])
    if key_mask is not None or padding is not None:
        # A row of padding sees nothing, and the softmax of nothing is NaN both ways: let it see itself.
        itself = keys == aligned.clamp(min=0)
        visible = visible | (itself & ~visible.any(-1, keepdim=True))
    return visible


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = True,
    window: int | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    key_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
    padding: Tensor | None = None,
    turns: bool = False,
) -> Tensor:
    """Each query's mean of the values it may see, weighted by softmax(scale * q k^T): [B, S, HQ, D].

    q: [B, S, HQ, D]. k, v: [B, K, HK, D]; query head h reads key head h // (HQ / HK). Strided views are fine.
    causal: aligned to the last key: query i sees key j only if j <= i + K - S. Needs K >= S.
    window: tokens, counting itself: j > i + K - S - window.
    softcap: scores become softcap * tanh(scores / softcap) before masking.
    scale: multiplies q k^T; default D ** -0.5.
    key_mask: bool [B, K], False where a key is padding that nobody sees. A query left without a key sees its
        own, so that the output of padding is finite; nothing else may be read into it.
    cu_seqlens: int32 [N + 1], 0 = first, ascending, S = last, with B = 1 and K = S: boundaries of N packed
        sequences which do not see each other. On a GPU the values are taken on trust: looking would stall it.
        It may be on the CPU wherever q is: known lengths let few long sequences run as batches, which is faster.
    max_seqlen: at least the longest packed sequence; no engine here needs it.
    padding: bool [B, S] for K = S, True at tokens that do not see each other, nor themselves, but see, and are seen
        by, all others. A query left without a key sees its own.
    turns: of a long text, heads may be taken one after the other, which needs less memory in the backward. For who
        gives the output to `kernels.linear`, which then keeps the parts that are kept anyway; others keep it twice.

    Raises InputError if shapes, dtypes or devices do not fit together.
    """
    _check(q, k, v, causal, window, softcap, key_mask, cu_seqlens, padding)
    length, num_keys = q.shape[1], k.shape[1]
    if cu_seqlens is not None and cu_seqlens.shape[0] == 2:  # one sequence, which is all there is
        cu_seqlens = None
    if cu_seqlens is not None and cu_seqlens.device.type == "cpu" and not torch.compiler.is_compiling():
        runs = _runs(cu_seqlens)
        if length >= _LONG * len(runs) or not _triton_takes(q, softcap):
            options: dict[str, Any] = dict(causal=causal, window=window, softcap=softcap, scale=scale)
            return _run_by_run(q, k, v, runs, key_mask, padding, **options)
    if cu_seqlens is not None:
        cu_seqlens = cu_seqlens.to(q.device)
    if window is not None and num_keys > length + window - 1:
        start = num_keys - (length + window - 1)
        k, v, num_keys = k[:, start:], v[:, start:], num_keys - start
        key_mask = key_mask if key_mask is None else key_mask[:, start:]
    if window is not None and window >= num_keys:
        window = None
    options = dict(causal=causal, window=window, key_mask=key_mask, cu_seqlens=cu_seqlens, padding=padding)
    plain = window is None and key_mask is None and cu_seqlens is None and padding is None
    everything = plain and (length == num_keys or not causal)
    small = q.numel() < 2**31  # beyond, cuDNN's gradients were wrong on an H200, torch 2.11
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if _triton_takes(q, softcap) and (softcap is not None or not ((everything and small) or length == 1)):
        return flash_attention(q, k, v, softcap=softcap, scale=scale, **options)
    if softcap is not None or q.numel() == 0:
        if q.device.type != "cpu" and q.numel() and length > 1 and not torch.compiler.is_compiling():
            why = _not_by_triton(q, softcap)
            warn_once(f"attention: {why}", f"attention with a softcap keeps all scores in memory, because {why}")
        return attention_reference(q, k, v, softcap=softcap, scale=scale, **options)
    q, k, v = (last_dim_contiguous(x) for x in (q, k, v))
    if length == 1:
        return _decode(q, k, v, None if plain else _visible(q, k, **options), scale)
    if everything:
        turns = turns and not torch.compiler.is_compiling()
        return _by_head_chunks(q, k, v, causal, scale) if turns else _sdpa(q, k, v, None, causal, scale)
    return _sdpa(q, k, v, _visible(q, k, **options), False, scale)


# Tokens per run above which torch's engines, call by call, are taken for packed sequences: there they are what takes
# the time, not the launches, and have head sizes between the powers of two, which our tiles fill up with zeros.
_LONG = 1024


def _runs(cu_seqlens: Tensor) -> list[tuple[int, int]]:
    """(how many, how long) of the packed sequences that lie side by side and are equally long, empty ones left out."""
    lengths = [end - start for start, end in itertools.pairwise(cu_seqlens.tolist()) if end > start]
    return [(len(list(run)), length) for length, run in itertools.groupby(lengths)]


def _run_by_run(
    q: Tensor, k: Tensor, v: Tensor, runs: list[tuple[int, int]],
    key_mask: Tensor | None, padding: Tensor | None, **options: Any,
) -> Tensor:  # fmt: skip
    """Each of `runs` as a batch of its own."""
    if not runs:
        return attention(q, k, v, key_mask=key_mask, padding=padding, **options)
    sizes = [count * length for count, length in runs]
    tensors = (q, k, v, key_mask, padding)
    parts: list[Any] = [itertools.repeat(None) if x is None else x.split(sizes, dim=1) for x in tensors]
    outs = []
    for run, *part in zip(runs, *parts, strict=False):
        batch: list[Any] = [x if x is None else x.unflatten(1, run)[0] for x in part]
        outs.append(attention(*batch[:3], key_mask=batch[3], padding=batch[4], **options).flatten(0, 1))
    return (torch.cat(outs) if len(outs) > 1 else outs[0])[None]


def _triton_takes(q: Tensor, softcap: float | None) -> bool:
    """True if our kernels run on tensors like q. For fp32 torch's are faster, but have no softcap."""
    half = q.dtype in (torch.bfloat16, torch.float16)
    capped = q.dtype == torch.float32 and softcap is not None and q.is_cuda and data_centre(q.device.index)
    return use_triton(q) and q.numel() > 0 and q.shape[-1] <= 256 and (half or capped)


def _not_by_triton(q: Tensor, softcap: float | None) -> str:
    """Why `_triton_takes` says no."""
    if not use_triton(q):
        return "there is no GPU" if q.device.type == "cpu" else "Triton is not installed"
    if q.shape[-1] > 256:
        return f"head_dim {q.shape[-1]} is above 256"
    half = "bfloat16 and float16"
    return f"{q.dtype} is not {half}" + (", nor is this a Hopper or Blackwell GPU" if softcap is not None else "")


def engine(q: Tensor, *, softcap: float | None = None, window: int | None = None) -> tuple[str, str]:
    """What `attention` runs on q [B, S, heads, D], causal and longer than the window; and why not its first choice.

    The reason is "" where it is that.
    """
    takes = _triton_takes(q, softcap)
    if takes and (softcap is not None or window is not None):
        return "flash_attention in Triton", ""
    if takes:
        return "torch's engines; packed: flash_attention in Triton", ""
    name = "torch's engines; packed: with a mask" if window is None else "torch's engines, with a mask"
    return name if softcap is None else "attention_reference, scores in memory", _not_by_triton(q, softcap)


# Elements of q at a time. cuDNN's backward holds dq in fp32, and dk and dv of every query head before it adds up those
# that share a key head: 8 bytes per element of q in 16 bits, beside 6 of what it reads and 3 to 6 of what it gives.
_CHUNK_ELEMENTS = 2**26


def _by_head_chunks(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> Tensor:
    """`_sdpa` of all key heads at once; of a long text, of some after others: its backward needs memory for each."""
    turns = q.numel() // _CHUNK_ELEMENTS
    if turns < 2 or k.shape[2] == 1 or not only_backward() or torch.is_autocast_enabled(q.device.type):
        return _sdpa(q, k, v, None, causal, scale)
    heads = -(-k.shape[2] // turns)
    parts = q.split(heads * (q.shape[2] // k.shape[2]), 2), k.split(heads, 2), v.split(heads, 2)
    outs = [_sdpa(*part, None, causal, scale) for part in zip(*parts, strict=True)]
    return attach(_joined(*outs), _joined, *outs)  # the backward of each reads its own, so who reads all keeps those


def _joined(*outs: Tensor) -> Tensor:
    return torch.cat(outs, 2)


def _sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float) -> Tensor:
    groups = q.shape[2] // k.shape[2]
    half = q.dtype in (torch.bfloat16, torch.float16)
    if groups > 1 and q.device.type == "cuda" and (mask is not None or not half or q.shape[-1] > 256):
        # The engine for these knows no grouped heads; what torch takes in its place materialises the scores.
        k, v, groups = k.repeat_interleave(groups, dim=2), v.repeat_interleave(groups, dim=2), 1
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=groups > 1)
    return out.transpose(1, 2)


def _decode(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """One query per sequence: heads that share a key head become its queries, so no engine needs groups."""
    batch_size, _, num_heads, size = q.shape
    grouped = q.reshape(batch_size, k.shape[2], num_heads // k.shape[2], size)
    k, v = k.transpose(1, 2), v.transpose(1, 2)
    if mask is None and _flash_takes(q):
        # What F.scaled_dot_product_attention calls, less the choice, which costs a context manager per layer.
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
        and _has_flash(q.device.index)
    )


@torch.compiler.assume_constant_result
def _has_flash(index: int) -> bool:
    """True on NVIDIA cards from Ampere on, where torch was built with FlashAttention-2."""
    built = torch.version.cuda is not None and torch.backends.cuda.is_flash_attention_available()
    return built and torch.cuda.get_device_capability(index) >= (8, 0)


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    window: int | None,
    softcap: float | None,
    key_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    padding: Tensor | None,
) -> None:
    of_q, of_k = q.shape, k.shape
    if len(of_q) != 4 or len(of_k) != 4 or of_k != v.shape or of_q[0] != of_k[0] or of_q[3] != of_k[3]:
        raise InputError(
            f"attention: q {list(of_q)}, k {list(of_k)} and v {list(v.shape)} do not fit together; "
            "expected q [B, S, HQ, D] and k, v [B, K, HK, D]"
        )
    if of_k[2] == 0 or of_q[2] % of_k[2]:
        raise InputError(
            f"attention: {of_q[2]} query heads cannot share {of_k[2]} key heads; "
            "the number of query heads must be a multiple of that of key heads"
        )
    if not (q.dtype == k.dtype == v.dtype) or not (q.device == k.device == v.device):
        raise InputError(
            f"attention: q is {q.dtype} on {q.device}, k {k.dtype} on {k.device}, v {v.dtype} on {v.device}; "
            "they must agree (a KV cache of another dtype than the model?)"
        )
    if causal and of_q[1] > of_k[1]:
        raise InputError(
            f"attention: {of_q[1]} causal queries but only {of_k[1]} keys: the first would see none; "
            "pass the keys of all queries, or causal=False"
        )
    if of_k[1] == 0 and of_q[1]:
        raise InputError(f"attention: {of_q[1]} queries but no key")
    if window is not None and window < 1:
        raise InputError(f"attention: window={window} hides even the query's own key; give 1 or more tokens, or None")
    if softcap is not None and not softcap > 0:
        raise InputError(f"attention: softcap={softcap} must be positive; None turns it off")
    if key_mask is not None and (key_mask.shape != k.shape[:2] or key_mask.dtype != torch.bool):
        raise InputError(
            f"attention: key_mask is {key_mask.dtype} {list(key_mask.shape)}; "
            f"expected torch.bool {list(k.shape[:2])}, one entry per key, cached ones included"
        )
    if padding is not None and (
        padding.shape != q.shape[:2] or padding.dtype != torch.bool or q.shape[1] != k.shape[1]
    ):
        raise InputError(
            f"attention: padding is {padding.dtype} {list(padding.shape)}, for {q.shape[1]} queries and {k.shape[1]} "
            f"keys; expected torch.bool {list(q.shape[:2])} and as many keys: both are the same tokens"
        )
    for name, mask in (("key_mask", key_mask), ("padding", padding)):
        if mask is not None and mask.device != q.device:
            raise InputError(f"attention: {name} is on {mask.device}, q on {q.device}; move one of them")
    if cu_seqlens is not None:
        _check_packing(q, k, cu_seqlens)


def _check_packing(q: Tensor, k: Tensor, cu_seqlens: Tensor) -> None:
    if q.shape[0] != 1 or q.shape[1] != k.shape[1]:
        raise InputError(
            f"attention: packed sequences lie end to end in one row and attend within themselves; "
            f"got q {list(q.shape)} and k {list(k.shape)}, expected [1, T, heads, D] for both"
        )
    if cu_seqlens.dtype != torch.int32 or cu_seqlens.dim() != 1 or cu_seqlens.numel() < 2:
        raise InputError(
            f"attention: cu_seqlens is {cu_seqlens.dtype} {list(cu_seqlens.shape)}; "
            "expected torch.int32 [N + 1] with N >= 1"
        )
    if cu_seqlens.device.type != "cpu" and cu_seqlens.device != q.device:
        found = f"attention: cu_seqlens is on {cu_seqlens.device}, q on {q.device}"
        raise InputError(f"{found}; move it there or to the CPU")
    if cu_seqlens.device.type == "cpu" and not torch.compiler.is_compiling():
        ends = cu_seqlens.tolist()
        if ends[0] != 0 or ends[-1] != q.shape[1] or ends != sorted(ends):
            raise InputError(
                f"attention: cu_seqlens runs from {ends[0]} to {ends[-1]}; "
                f"it must ascend from 0 to the number of tokens, {q.shape[1]}"
            )
