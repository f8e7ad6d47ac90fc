"""Who sees whom in flash_attention: an interval of tokens each, less hidden keys and pairs of padding.

Bits of a token's code: 0, its key is seen; 1, it is padding, which padding does not see.
"""

import torch
from torch import Tensor

from ligermodels.kernels._launch import launch
from ligermodels.kernels._triton import cdiv, tl, triton


@triton.jit
def span(
    x, shift, limit, ends_ptr, before, after, BEFORE: tl.constexpr, AFTER: tl.constexpr, PACKED: tl.constexpr
):  # fmt: skip
    """[lo, hi) of what token x sees: `before` tokens before x + shift and `after` ones after it, of `limit`."""
    lo = x * 0
    hi = lo + limit
    if PACKED:
        lo = tl.load(ends_ptr + 2 * x)
        hi = tl.load(ends_ptr + 2 * x + 1)
    if BEFORE:
        lo = tl.maximum(lo, x + shift - before)
    if AFTER:
        hi = tl.minimum(hi, x + shift + after + 1)
    return lo, hi


@triton.jit(do_not_specialize=["T", "N"])
def _ends_kernel(ends_ptr, cu_ptr, T, N, BLOCK: tl.constexpr):
    """The start and the end of each token's sequence, of N sequences, by bisection."""
    tokens = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    low = tokens * 0
    high = low + N - 1
    width = N
    while width > 1:
        middle = (low + high + 1) // 2
        begun = tl.load(cu_ptr + middle) <= tokens
        low = tl.where(begun, middle, low)
        high = tl.where(begun, high, middle - 1)
        width = (width + 1) // 2
    tl.store(ends_ptr + 2 * tokens, tl.load(cu_ptr + low), mask=tokens < T)
    tl.store(ends_ptr + 2 * tokens + 1, tl.load(cu_ptr + low + 1), mask=tokens < T)


@triton.jit(do_not_specialize=["K"])
def _counts_kernel(counts_ptr, codes_ptr, K, BLOCK: tl.constexpr):
    """Of each row of codes [B, K]: the first key that is seen, one past the last, and then for every token, and for
    the end, how many tokens before it are hidden keys (bit 0 is 0) and how many are padding (bit 1): [B, 2 K + 4]."""
    b = tl.program_id(0).to(tl.int64)
    counts_ptr += b * (2 * K + 4)
    first = K + 0
    last = first * 0
    hidden = first * 0
    padding = first * 0
    for start in range(0, K, BLOCK):
        tokens = start + tl.arange(0, BLOCK)
        codes = tl.load(codes_ptr + b * K + tokens, mask=tokens < K, other=0).to(tl.int32)
        seen = (codes & 1) != 0
        first = tl.minimum(first, tl.min(tl.where(seen, tokens, K), 0))
        last = tl.maximum(last, tl.max(tl.where(seen, tokens + 1, 0), 0))
        unseen, pads = tl.where(seen, 0, 1), (codes >> 1) & 1
        tl.store(counts_ptr + 2 + 2 * tokens, hidden + tl.cumsum(unseen, 0) - unseen, mask=tokens < K)
        tl.store(counts_ptr + 3 + 2 * tokens, padding + tl.cumsum(pads, 0) - pads, mask=tokens < K)
        hidden += tl.sum(tl.where(tokens < K, unseen, 0), 0)
        padding += tl.sum(pads, 0)
    tl.store(counts_ptr, first)
    tl.store(counts_ptr + 1, last)
    tl.store(counts_ptr + 2 + 2 * K, hidden)
    tl.store(counts_ptr + 3 + 2 * K, padding)


@triton.jit
def count(counts_ptr, start, end, limit, PADDING: tl.constexpr):
    """Hidden keys, or padding, among tokens start .. end of `limit`, by the counts of _counts_kernel."""
    at = counts_ptr + (3 if PADDING else 2)
    return tl.load(at + 2 * tl.minimum(end, limit)) - tl.load(at + 2 * tl.minimum(start, limit))


@triton.jit
def holes(counts_ptr, start, end, K, pads, MASK: tl.constexpr, PAIRS: tl.constexpr):
    """Whether any of the keys start .. end is hidden from some query of a block with `pads` tokens of padding."""
    if PAIRS:
        some = (pads > 0) & (count(counts_ptr, start, end, K, True) > 0)
        return some | (count(counts_ptr, start, end, K, False) > 0)
    elif MASK:
        return count(counts_ptr, start, end, K, False) > 0
    else:
        return False


@triton.jit
def unhidden(visible, keys, queries, PAIRS: tl.constexpr):
    """`visible` less keys that nobody sees (bit 0 is 0) and, with PAIRS, less padding as padding sees it (bit 1)."""
    if PAIRS:
        return visible & ((keys & 1) != 0) & ((keys & queries & 2) == 0)
    else:
        return visible & (keys != 0)


def token_counts(codes: Tensor) -> Tensor:
    """int32 [B, 2 K + 4]: what _counts_kernel writes."""
    rows, length = codes.shape
    counts = torch.empty(rows, 2 * length + 4, dtype=torch.int32, device=codes.device)
    launch(_counts_kernel, (rows,), counts, codes, length, 1024)
    return counts


def sequence_ends(cu_seqlens: Tensor, length: int) -> Tensor:
    """int32 [T, 2]: where the sequence of each token starts and ends."""
    ends = torch.empty(length, 2, dtype=torch.int32, device=cu_seqlens.device)
    cu_seqlens = cu_seqlens.contiguous()
    launch(_ends_kernel, (cdiv(length, 256),), ends, cu_seqlens, length, cu_seqlens.shape[0] - 1, 256)
    return ends
