"""Attention: plain causal, with a window, with a softcap, packed documents, left-padded rows."""

import contextlib
import functools
import inspect
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.kernels.case import Case, Place, Provider, Tensors, chosen, compute
from ligermodels import kernels
from ligermodels.kernels._triton import INTERPRET
from ligermodels.kernels.flash_attention import flash_attention

DOCUMENTS = (1, 3, 6, 2, 9, 4, 27, 12)
"""Lengths of the documents in a packed row, in 64ths of it."""
KEPT = (8, 7, 5, 3)
"""Real tokens of the rows of a left-padded batch, in eighths, over and over."""


def bounds(length: int) -> list[int]:
    """Where the documents of a packed row begin, and its end."""
    return sorted({length * end // 64 for end in itertools.accumulate(DOCUMENTS, initial=0)})


def real_tokens(batch: int, length: int) -> list[int]:
    """Of each row of a left-padded batch."""
    return [length * eighths // 8 for eighths in itertools.islice(itertools.cycle(KEPT), batch)]


def attention_case(
    place: Place,
    peers: set[str],
    batch: int,
    heads: int,
    kv_heads: int,
    length: int,
    head_dim: int,
    window: int | None = None,
    softcap: float | None = None,
    layout: str = "full",
) -> Case:
    """layout: "full" rows, one row of "packed" documents, or "padded" on the left."""
    device, cuda = place.device, place.device == "cuda"
    on_cuda = functools.partial(_only_if, cuda)

    def sight(batch: int, length: int) -> Tensors:
        """What an engine is told about who sees whom."""
        if layout == "packed":
            return {"cu_seqlens": torch.tensor(bounds(length), dtype=torch.int32, device=device)}
        if layout == "padded":
            real = torch.tensor(real_tokens(batch, length), device=device)
            return {"key_mask": torch.arange(length, device=device) >= length - real[:, None]}
        return {}

    def make(batch=batch, length=length):
        q, k, v = (place.randn(batch, length, n, head_dim) for n in (heads, kv_heads, kv_heads))
        return {"q": q, "k": k, "v": v, **sight(batch, length)}, (place.randn(*q.shape),)

    def make_small():
        # Rows that are padded differently need one another, others do not.
        return make(batch, min(length, 1024)) if layout == "padded" else make(1, min(length, 2048))

    # As a model does, masks are made once and not per layer: their cost is not in the times below.
    masks = functools.lru_cache(maxsize=1)(lambda rows, n: _visible(sight(rows, n), n, window, device))
    block_masks = functools.lru_cache(maxsize=1)(lambda rows, n: _block_mask(sight(rows, n), rows, n, window, device))

    def ours(t):
        told: dict[str, Any] = {name: t[name] for name in ("key_mask", "cu_seqlens") if name in t}
        if layout == "packed":
            told["max_seqlen"] = _longest(bounds(t["q"].shape[1]))
        return (kernels.attention(t["q"], t["k"], t["v"], causal=True, window=window, softcap=softcap, **told),)

    def own_kernel(t):
        told = {name: t.get(name) for name in ("key_mask", "cu_seqlens")}
        sized: dict[str, Any] = dict(causal=True, window=window, softcap=softcap, scale=head_dim**-0.5)
        return (flash_attention(t["q"], t["k"], t["v"], **sized, **told),)

    def eager(t):
        q, k, v = _heads_first(t, repeat=True)
        scores = q @ k.transpose(2, 3) * head_dim**-0.5
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        scores = scores.masked_fill(~masks(q.shape[0], q.shape[2]), float("-inf"))
        weights = scores.softmax(-1, dtype=compute(q)).to(q.dtype)
        return ((weights @ v).transpose(1, 2).contiguous(),)

    def sdpa(t, backend=None):
        q, k, v = _heads_first(t)
        with contextlib.nullcontext() if backend is None else sdpa_kernel(backend):
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=heads != kv_heads)
        return (out.transpose(1, 2),)

    def masked_sdpa(t):
        q, k, v = _heads_first(t, repeat=True)  # no engine takes a mask and grouped heads
        mask = masks(q.shape[0], q.shape[2])
        return (F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2),)

    def flash(t):
        rows, n = t["q"].shape[:2]
        packed = layout == "packed"
        cu = t["cu_seqlens"] if packed else n * torch.arange(rows + 1, dtype=torch.int32, device=device)
        return (_flash(*(t[name] for name in "qkv"), cu, _longest(bounds(n)) if packed else n, window),)

    def flex(t):
        q, k, v = _heads_first(t)
        block_mask = block_masks(q.shape[0], q.shape[2])
        return (_flex_attention()(q, k, v, _softcapped(softcap), block_mask, enable_gqa=True).transpose(1, 2),)

    if layout == "packed":
        lengths = [end - start for start, end in itertools.pairwise(bounds(length))]
    else:
        lengths = real_tokens(batch, length) if layout == "padded" else [length] * batch
    pairs = heads * sum(_pairs(n, window) for n in lengths)
    flexible = on_cuda(Provider("FlexAttention", flex))  # no backward on a CPU
    if softcap is not None:
        torch_peers = flexible
    elif window is None and layout == "full":
        by_name = {"cuDNN": SDPBackend.CUDNN_ATTENTION, "FlashAttention-2": SDPBackend.FLASH_ATTENTION}
        engines = [Provider(f"SDPA, {name}", functools.partial(sdpa, backend=b)) for name, b in by_name.items()]
        torch_peers = [Provider("SDPA", sdpa), *on_cuda(*engines), *flexible]
    else:
        varlen = on_cuda(Provider("varlen_attn, FlashAttention-2", flash)) if layout != "padded" else []
        torch_peers = [Provider("SDPA, boolean mask", masked_sdpa), *varlen, *flexible]
    return Case(
        "attention",
        f"B={batch} HQ={heads} HK={kv_heads} S={length} D={head_dim}"
        + (f" window={window}" if window else "")
        + (f" softcap={softcap:g}" if softcap else "")
        + {"full": "", "packed": f", {len(lengths)} packed documents", "padded": ", left-padded"}[layout],
        make,
        leaves=("q", "k", "v"),
        outputs=("out",),
        eager=eager,
        providers=chosen(
            peers,
            Provider("ligermodels", ours, ours=True),
            # What the dispatch chooses for a softcap; elsewhere beside what it chooses.
            *_only_if(
                softcap is None and (cuda or INTERPRET), Provider("ligermodels, own kernel", own_kernel, ours=True)
            ),
            # The eager form holds [B, HQ, S, S] several times over.
            eager=[Provider("eager", eager)] if batch * heads * length**2 <= 2**31 else [],
            torch=torch_peers,
        ),
        forward_work=4 * pairs * head_dim,
        full_work=14 * pairs * head_dim,
        unit="operations",
        make_small=make_small,
    )


def _only_if(condition: bool, *providers: Provider) -> list[Provider]:
    return list(providers) if condition else []


def _longest(ends: Sequence[int]) -> int:
    return max(end - start for start, end in itertools.pairwise(ends))


def _pairs(length: int, window: int | None) -> float:
    """Of query and key, that a causal row of `length` tokens has in sight."""
    seen = min(window or length, length)
    return seen * (seen + 1) / 2 + (length - seen) * seen


def _heads_first(t: Tensors, *, repeat: bool = False) -> tuple[Tensor, ...]:
    q, k, v = (t[name].transpose(1, 2) for name in "qkv")
    return (q, *(x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))) if repeat else (q, k, v)


def _visible(sight: Tensors, length: int, window: int | None, device: str) -> Tensor:
    """Which query sees which key, bool [B or 1, 1, S, S]. One that sees none, being padding, sees itself."""
    index = torch.arange(length, device=device)
    distance = index[:, None] - index
    visible = (distance >= 0) & (distance < (window or length))
    if "cu_seqlens" in sight:
        document = torch.bucketize(index, sight["cu_seqlens"][1:], right=True)
        visible &= document[:, None] == document
    if "key_mask" in sight:
        return visible & sight["key_mask"][:, None, None] | (distance == 0)
    return visible[None, None]


def _block_mask(sight: Tensors, rows: int, length: int, window: int | None, device: str):
    """`_visible` for FlexAttention."""
    from torch.nn.attention.flex_attention import create_block_mask

    def causal(batch, head, query, key):
        seen = query >= key
        return seen & (query - key < window) if window else seen

    def same_document(batch, head, query, key):
        return (query >= key) & (document[query] == document[key])

    def not_padding(batch, head, query, key):
        return (query >= key) & key_mask[batch, key] | (query == key)

    sees: Callable = causal
    if "cu_seqlens" in sight:
        index = torch.arange(length, device=device)
        document, sees = torch.bucketize(index, sight["cu_seqlens"][1:], right=True), same_document
    if "key_mask" in sight:
        key_mask, sees = sight["key_mask"], not_padding
    return create_block_mask(sees, rows if "key_mask" in sight else None, None, length, length, device=device)


def _flash(q: Tensor, k: Tensor, v: Tensor, cu: Tensor, longest: int, window: int | None) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    # torch 2.11 takes grouped heads unasked, later ones want to be told.
    grouped: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
    sides = (-1 if window is None else window - 1, 0)
    flat = (x.flatten(0, 1) for x in (q, k, v))
    out: Any = varlen_attn(*flat, cu, cu, longest, longest, window_size=sides, **grouped)
    return out.view(q.shape)


@functools.cache
def _softcapped(softcap: float | None):
    """The score_mod of a softcap, the same function every time: another one would be compiled anew."""
    if softcap is None:
        return None

    def capped(score, batch, head, query, key):
        return softcap * torch.tanh(score / softcap)

    return capped


@functools.cache
def _flex_attention():
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False)
