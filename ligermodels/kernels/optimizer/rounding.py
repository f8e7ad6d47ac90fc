"""How a step of AdamW rounds fp32 to bf16.

- "nearest": as torch. An update smaller than half a step between neighbours (1/512 of a weight) is lost.
- "stochastic": up or down, such that the mean is the exact value: 16 random bits are added to the bits of the fp32
  number, whose lower 16 bits are then cut off. The random bits come from Philox4x32-7 with seed, parameter, step and
  the element's index in the whole parameter: they are the same on every device, for every block size and sharding, and
  after a resume. On the CPU they take most of the step's time.
- `remainder`: 2 bytes more make the weight an exact fp32 number: master's bits = (weight's bits << 16) + remainder,
  int16. The weight is the master rounded to nearest, ties away from zero, since ties to even would need one value more
  than 16 bits have. If the weight is set from outside, an old remainder adds half a step at most.

Sources: Salmon et al. 2011 (Philox), https://doi.org/10.1145/2063384.2063405; remainders: store_param_remainders of
DistributedFusedAdam in https://github.com/NVIDIA/apex.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ligermodels.kernels._triton import cdiv, tl, triton


class ShardLayout(NamedTuple):
    """Where a tensor's elements are in the whole parameter: in rows of `inner` elements that begin `stride` apart.

    Element i of the tensor is element first + i // inner * stride + i % inner of the whole, both in row-major order.
    Eight elements of the whole share a call of Philox, so shards are fastest where first, inner and stride are
    multiples of 8, or first is and inner == stride.
    """

    first: int = 0
    inner: int = 1
    stride: int = 1

    @property
    def kind(self) -> tuple[bool, bool]:
        """True if the elements are one range; True if each eight from the first on share a call of Philox."""
        first, inner, stride = self
        one_range = inner == stride
        return one_range, first % 8 == 0 and (one_range or (inner % 8 == 0 and stride % 8 == 0))


UNSHARDED = ShardLayout()


def philox(counters: tuple[Tensor | int, ...], seed: int, rounds: int = 7) -> list[Tensor]:
    """Philox4x32: four counters below 2^32, int64 tensors that broadcast or ints, and a 64-bit key -> four random
    numbers below 2^32."""
    c0, c1, c2, c3 = counters
    key0, key1 = seed & 0xFFFFFFFF, seed >> 32
    for _ in range(rounds):
        a, b = c0 * 0xD2511F53, c2 * 0xCD9E8D57  # past 2^63 they wrap, which keeps all bits that are read
        c0, c2 = (b >> 32) ^ c1, (a >> 32) ^ c3
        c0 ^= key0  # in place: on the CPU these passes over memory are most of a step
        c0 &= 0xFFFFFFFF
        c2 ^= key1
        c2 &= 0xFFFFFFFF
        c1, c3 = b, a  # of which the lower halves count
        key0, key1 = (key0 + 0x9E3779B9) & 0xFFFFFFFF, (key1 + 0xBB67AE85) & 0xFFFFFFFF
    return [c0, c1 & 0xFFFFFFFF, c2, c3 & 0xFFFFFFFF]  # type: ignore[list-item]


def random_bits(
    x: Tensor, streams: list[int], *, seed: int, number: int, step: int | Tensor, layout: ShardLayout, start: int = 0
) -> Tensor:  # fmt: skip
    """16 random bits per stream and element of x, as int32 [streams, *x.shape].

    streams: 0 for the weight, 1 and 2 for its moments; number, step, layout: as in `adamw`; start: the element of
    the shard at which x begins. Eight elements of the whole share a call of Philox.
    """
    first, inner, stride = layout
    if inner == stride and (first + start) % 8 == 0:
        group = torch.arange(cdiv(x.numel(), 8), device=x.device) + (first + start) // 8
        at: Any = slice(x.numel())
    else:
        i = torch.arange(start, start + x.numel(), device=x.device)
        place = first + i // inner * stride + i % inner
        group, which = torch.unique_consecutive(place >> 3, return_inverse=True)
        at = which * 8 + (place & 7)
    step = step.long() if isinstance(step, Tensor) else step
    last = torch.tensor(streams, device=x.device)[:, None] + number * 4
    a, b, c, d = philox((group & 0xFFFFFFFF, group >> 32, step, last), seed)
    halves = torch.stack([a | b << 32, c | d << 32], dim=-1).view(torch.int16)  # the lower half of each comes first
    return (halves.flatten(1)[:, at].int() & 0xFFFF).view(len(streams), *x.shape)


def round_stochastically(x: Tensor, bits: Tensor) -> Tensor:
    """fp32 x to bf16, rounded up where the lower 16 bits of x plus the random `bits` carry; inf and NaN stay."""
    raw = x.nan_to_num(math.nan, math.inf, -math.inf).view(torch.int32)  # a NaN to whose bits 16 can be added
    return (raw.add_(bits) >> 16).short().view(torch.bfloat16)


def join_master(weight: Tensor, remainder: Tensor) -> Tensor:
    """The fp32 that a bf16 weight and its int16 remainder are."""
    return ((weight.view(torch.int16).int() << 16) + remainder.int()).view(torch.float32)


def split_master(master: Tensor) -> tuple[Tensor, Tensor]:
    """fp32 -> its bf16 weight, rounded to nearest, ties away from zero, and the int16 remainder of its bits."""
    bits = torch.where(master.isnan(), torch.nan, master).view(torch.int32)
    weight = (bits + 0x8000) >> 16
    return weight.short().view(torch.bfloat16), (bits - (weight << 16)).short()


@triton.jit
def random_words(seed, group, word, step, stream, BLOCK: tl.constexpr):
    """16 random bits of each of BLOCK elements.

    group, word: which call of Philox an element uses, and which 16 bits of it. word None: whole groups of eight.
    """
    low = (group & 0xFFFFFFFF).to(tl.uint32)
    zero = low * 0
    a, b, c, d = tl.philox(seed, low, (group >> 32).to(tl.uint32), zero + step, zero + stream, n_rounds=7)
    if word is None:
        words = tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), [BLOCK // 2])
        return tl.reshape(tl.join(words & 0xFFFF, words >> 16), [BLOCK])
    else:
        pair = tl.where(word < 4, tl.where(word < 2, a, b), tl.where(word < 6, c, d))
        return tl.where(word % 2 == 0, pair & 0xFFFF, pair >> 16)


@triton.jit
def store_rounded(
    ptr, x, at, mask, seed, group, word, step, stream, BLOCK: tl.constexpr, STOCHASTIC: tl.constexpr
):  # fmt: skip
    """x, rounded to the dtype of ptr; to bf16 through its bits. group, word: as in `random_words`."""
    if ptr.dtype.element_ty == tl.bfloat16:
        raw = x.to(tl.uint32, bitcast=True)
        more = random_words(seed, group, word, step, stream, BLOCK) if STOCHASTIC else 0x7FFF + ((raw >> 16) & 1)
        raw = tl.where(x == x, raw + more, raw)  # adding to an infinity's bits never carries
        tl.store(ptr + at, (raw >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True), mask=mask)
    else:
        tl.store(ptr + at, x.to(ptr.dtype.element_ty), mask=mask)
