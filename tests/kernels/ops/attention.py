"""Entries of the table of ops: attention as it chooses its engine, and the Triton kernels alone.

`attention` leaves some forms to torch where that is faster."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ligermodels import kernels
from ligermodels.kernels._triton import accumulator
from ligermodels.kernels.attention._flash_attention import flash_attention
from ligermodels.kernels.attention._unfused_attention import unfused_attention
from ligermodels.kernels.attention.attention import _visible
from tests.kernels.cases import Case, Maker, Op, Sizes


def visible(q, k, *, causal=True, window=None, key_mask=None, cu_seqlens=None, with_sinks=False) -> Tensor:
    """Which query sees which key, [B or 1, 1, S, K]; `test_attention.py` compares it with the definition."""
    return _visible(q, k, causal, window, key_mask, cu_seqlens, with_sinks=with_sinks)


def eager_attention(q, k, v, *, softcap=None, scale=None, causal=True, max_seqlen=None, sinks=None, **masks):
    """sdpa_attention_forward of transformers; with a softcap or sinks, which that has not, eager_attention_forward."""
    length, num_keys, groups = q.shape[1], k.shape[1], q.shape[2] // k.shape[2]
    seen = visible(q, k, causal=causal, with_sinks=sinks is not None, **masks)
    q, k, v = (x.transpose(1, 2) for x in (q, k.repeat_interleave(groups, 2), v.repeat_interleave(groups, 2)))
    if sinks is not None:
        return of_scores(q, k, v, seen, softcap, scale, sinks)
    if softcap is None and bool(seen.all()):
        return F.scaled_dot_product_attention(q, k, v, scale=scale).transpose(1, 2)
    if softcap is None and length == num_keys and causal and not any(x is not None for x in masks.values()):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale).transpose(1, 2)
    if softcap is None:
        mask = seen.expand(q.shape[0], 1, length, num_keys)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale).transpose(1, 2)
    return of_scores(q, k, v, seen, softcap, scale)


def of_scores(q, k, v, seen, softcap, scale, sinks=None):
    """eager_attention_forward of transformers, of Gemma 2 and of gpt-oss; the softmax in fp32, as the former has it."""
    scores = q @ k.transpose(2, 3) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~seen, float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks[:, None, None].expand(*scores.shape[:3], 1)], -1)
    weights = scores.softmax(-1, dtype=accumulator(q.dtype)).to(q.dtype)
    return (weights[..., : k.shape[2]] @ v).transpose(1, 2)


def our_attention(q, k, v, *, scale=None, **options):
    """`flash_attention` with the defaults of `attention`, which it has not."""
    defaults = dict.fromkeys(("window", "softcap", "key_mask", "cu_seqlens")) | {"causal": True}
    return flash_attention(q, k, v, scale=q.shape[-1] ** -0.5 if scale is None else scale, **defaults | options)


def wide_attention(q, k, v, *, scale=None, **options):
    """`unfused_attention` with the defaults of `attention`, which leaves it no empty tensors."""
    if q.numel() == 0:
        return kernels.attention_reference(q, k, v, scale=scale, **options)
    defaults = dict.fromkeys(("window", "key_mask", "cu_seqlens", "max_seqlen")) | {"causal": True}
    return unfused_attention(q, k, v, scale=q.shape[-1] ** -0.5 if scale is None else scale, **defaults | options)


def attention_noise(case: Case, upstream: list[Tensor]) -> dict[str, Tensor]:
    """What half an ulp of the output and of the probabilities, and one of fp32, costs dq and dk.

    They are made of dp - sum(dout * out), whose second term every flash attention, torch's own too, makes of the
    output as it was stored, and adds up in another order than the first. The eager formula keeps all scores instead,
    and cancels exactly where there is one key: there, the output is exact, and half an ulp is not granted.
    """
    q, k, v = (case.tensors[name].detach().double() for name in "qkv")
    groups, scale = q.shape[2] // k.shape[2], case.options.get("scale") or q.shape[-1] ** -0.5
    k, v = (x.repeat_interleave(groups, 2) for x in (k, v))
    scores, cap = torch.einsum("bshd,bkhd->bhsk", q, k) * scale, case.options.get("softcap")
    capped = scores if cap is None else cap * torch.tanh(scores / cap)
    named = case.options | case.tensors
    masks = {n: named[n] for n in ("causal", "window", "key_mask", "cu_seqlens") if n in named}
    sinks = case.tensors.get("sinks")
    hidden = ~visible(q, k, with_sinks=sinks is not None, **masks)
    logits = capped.masked_fill(hidden, float("-inf"))
    if sinks is not None:
        logits = torch.cat([logits, sinks.detach().double()[:, None, None].expand(*logits.shape[:3], 1)], -1)
    p_sinks, p = logits.softmax(-1)[..., k.shape[1] :], logits.softmax(-1)[..., : k.shape[1]]
    out, square = (torch.einsum("bhsk,bkhd->bhsd", p, x) for x in (v, v.square()))
    dout, eps = upstream[0].double().transpose(1, 2), torch.finfo(case.tensors["q"].dtype).eps
    several = 1 - p.amax(-1) > eps / 4 if p.numel() else p.new_zeros(p.shape[:-1], dtype=torch.bool)
    lost = eps / 2 * ((out.square() + square) * dout.square()).sum(-1).sqrt() * several
    lost = lost + 2.0**-23 * (out * dout).abs().sum(-1)
    dp = torch.einsum("bshd,bkhd->bhsk", upstream[0].double(), v)
    # The backward makes p again from one number per row, log sum exp, which is as large as the scores.
    rounded = 2.0**-23 * scores.abs().amax(-1, keepdim=True)
    from_lse = (dp - (p * dp).sum(-1, keepdim=True)).abs() * rounded
    ds = p * (lost[..., None] + from_lse) * scale * (1.0 if cap is None else 1 - (capped / cap).square())
    dk = torch.einsum("bhsk,bshd->bkhd", ds, q).unflatten(2, (-1, groups)).sum(3)
    noise = {"d_q": torch.einsum("bhsk,bkhd->bshd", ds, k), "d_k": dk}
    if sinks is not None:
        # Without sinks eager is the same engine of torch, and its backward has the same weights.
        dv = torch.einsum("bhsk,bhsd->bkhd", p * rounded, dout)
        noise["d_v"] = dv.unflatten(2, (-1, groups)).sum(3)
        noise["d_sinks"] = (p_sinks.squeeze(-1) * lost).square().sum((0, 2)).sqrt()
    return noise


FORMS: dict[str, dict[str, Any]] = {
    "causal": {},
    "whole": {"causal": False},
    "scaled": {"scale": 0.3},
    "decode": {"cached": 200, "decode": True},
    "window": {"window": 20},
    "softcap": {"softcap": 5.0},
    "softcap and window": {"softcap": 30.0, "window": 40},
    "key mask": {"key_mask": True},
    "packed": {"packed": True},
    "packed and whole": {"packed": True, "causal": False},
    "cached prompt": {"cached": 37},
}
OF_TORCH = ["causal", "whole", "scaled", "decode"]
"""Forms that `attention` leaves to torch's engines; of the others our kernels compute half precision."""
DEAR_FORMS: dict[str, dict[str, Any]] = {
    "window of one": {"window": 1, "cached": 3},
    "whole and window": {"causal": False, "window": 20, "cached": 5},
    "more queries than keys": {"causal": False, "cached": -1},
    "softcap beyond fp32's exponents": {"softcap": 90.0},
    "everything": {"key_mask": True, "window": 20, "softcap": 3.0, "cached": 9},
    "packed and masked": {"packed": True, "key_mask": True, "window": 20, "softcap": 3.0},
}
"""Mixtures that are compared in fp64 alone."""


DIMS = Sizes([8, 16, 40, 64, 80, 96, 128, 192, 256], [3, 24])
WIDE_DIMS = Sizes([128, 320, 512], [64])


def attention_op(
    call, forms: list[str], *, dtypes: tuple[torch.dtype, ...], ordered: bool, dims: Sizes = DIMS, sinks: bool = False
) -> Op:
    def make(m, rows, *, heads, kv_heads, dim, form, scale=1.0, same=False, hidden=False):
        options = (FORMS | DEAR_FORMS)[form].copy()
        packed, cached, decode, key_mask = (options.pop(name, 0) for name in ("packed", "cached", "decode", "key_mask"))
        batch = 1 if packed or rows > 300 else m.draw.choice([1, 2])
        length = min(rows, 1) if decode else rows
        num_keys = max(1, (rows if decode else length) + cached) if length else 0
        q = m(batch, length, heads * kv_heads, dim, scale=scale)
        k, v = (m(batch, num_keys, kv_heads, dim, scale=scale) for _ in range(2))
        if same:
            k = m.of(k.detach()[:, :1].expand_as(k))
        tensors = {"q": q, "k": k, "v": v}
        if sinks:
            tensors["sinks"] = m(heads * kv_heads, scale=scale)
        if key_mask:
            mask = torch.rand(batch, num_keys, device=m.device) < (0.0 if hidden else 0.7)
            tensors["key_mask"] = m.of(mask, train=False, dtype=torch.bool)
        if packed:
            ends = [0, num_keys // 3, num_keys // 3, num_keys // 2, num_keys]
            options["cu_seqlens"] = torch.tensor(ends, dtype=torch.int32, device=m.device)
        # What torch's engine for one query does with the keys in fp32 errs by up to twice as much.
        return Case(tensors, options, dim, max(num_keys, dim) * (4 if decode else 1))

    our_form, wide = call is not kernels.attention, dims is WIDE_DIMS
    usual = dict(heads=2, kv_heads=2, dim=64 if wide else 16)
    dear = [form for form, options in DEAR_FORMS.items() if not (wide and "softcap" in options)]
    edges: dict[str, Callable[[Maker], Case]] = {}
    for form in forms:
        edges |= {
            f"equal keys, {form}": lambda m, f=form: make(m, 40, form=f, same=True, **usual),
            f"scores of 1e4, {form}": lambda m, f=form: make(m, 40, form=f, scale=50.0, **usual),
        }
        if FORMS[form].get("key_mask"):
            edges[f"all hidden, {form}"] = lambda m, f=form: make(m, 40, form=f, hidden=True, **usual)

    def huge(m):
        m.strided, batch, length = False, 513, 1024
        q, k, v = m.big(batch, length, 32, 128), m(batch, length, 2, 128), m(batch, length, 2, 128)
        return Case({"q": q, "k": k, "v": v}, {"window": 256} if ordered else {})

    return Op(
        call, kernels.attention_reference, eager_attention, make,
        choices={
            "form": Sizes(forms, forms), "kv_heads": Sizes([1, 2, 4], [1, 2]), "heads": Sizes([1, 2, 3], [1, 2]),
            "dim": dims,
        },
        complete={
            "heads": 2, "kv_heads": 1, "dim": 64 if wide else 8,
            "form": "key mask" if "key mask" in forms else forms[0],
        },
        row=lambda chosen: 2**12 * chosen["heads"] * chosen["kv_heads"],
        more={} if call is kernels.attention and ordered and not sinks else {"form": dear},
        variants=16,  # which take long to compile
        few_rows=(0, 70) if our_form else (0, 1, 7, 70),
        edges=edges,
        past_2_31=None if sinks else huge,
        ordered=ordered,
        dtypes=dtypes,
        noise=attention_noise,
        checks=not our_form,
    )  # fmt: skip
