"""Entries of the table of ops: norms, rotary embedding, token embedding."""

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

from ligermodels import kernels
from ligermodels.kernels._triton import accumulator
from tests.kernels.cases import FEW_WIDTHS, VOCABS, WIDTHS, Case, Op, Sizes

# Norms. In fp32 a row shares the error of its statistic.


def eager_rms_norm(x, weight=None, *, eps=1e-6, offset=0.0, cast_before_weight=True):
    """LlamaRMSNorm and GemmaRMSNorm of transformers."""
    h = x.to(accumulator(x.dtype))
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + eps)
    if weight is None:
        return h.to(x.dtype)
    if cast_before_weight:
        return (offset + weight) * h.to(x.dtype)
    return (h * (offset + weight.to(h.dtype))).to(x.dtype)


def eager_layer_norm(x, weight=None, bias=None, *, eps=1e-5):
    return F.layer_norm(x, x.shape[-1:], weight, bias, eps)


def after_sum(norm):
    return lambda x, residual, *args, **options: (norm(x + residual, *args, **options), x + residual)


def row_noise(case: Case, upstream: list[Tensor], *, layer: bool) -> dict[str, Tensor]:
    """What an ulp of fp32 costs where terms cancel: x - mean(x), and the gradient less its part along the row.

    In rows of one number nothing else is left of either. And what a sum over R rows in fp32, one after the other, costs
    the gradients of weight and bias: sqrt(R / 24) ulp, as `assert_as_exact` has it for matmuls.
    """
    t = {name: x.detach().double() for name, x in case.tensors.items()}
    x, dy = t["x"] + t.get("residual", 0.0), upstream[0].double().abs()
    weight = (t["weight"] + case.options.get("offset", 0.0)).abs() if "weight" in t else 1.0
    spread = x.var(-1, correction=0, keepdim=True) if layer else x.square().mean(-1, keepdim=True)
    rstd = torch.rsqrt(spread + case.options.get("eps", 1e-5 if layer else 1e-6))
    slope = 2.0**-23 * (dy * weight).amax(-1, keepdim=True) * rstd
    noise = {f"d_{name}": slope.expand(x.shape) for name in ("x", "residual") if name in t}
    if layer:
        lost = 2.0**-23 * x.abs().amax(-1, keepdim=True) * rstd
        noise |= {"output 0": (lost * weight).expand(x.shape)}
        noise |= {"d_weight": (lost * dy).flatten(0, -2).sum(0)} if "weight" in t else {}
    normed = (x - x.mean(-1, keepdim=True) if layer else x) * rstd
    for name, terms in (("weight", dy * normed), ("bias", dy)):
        if name in t:
            terms = terms.flatten(0, -2)
            summed = 2.0**-23 * (len(terms) / 24) ** 0.5 * terms.square().sum(0).sqrt()
            noise[f"d_{name}"] = torch.maximum(noise.get(f"d_{name}", summed), summed)
    return noise


def norm(call, reference, eager, *, add: bool, layer: bool) -> Op:
    inputs = ["x", "residual"] if add else ["x"]

    def make(m, rows, *, width, affine=("weight",), values=None, **options):
        lead = m.lead(rows)
        scale = m.draw.choice([0.1, 1.0, 10.0])
        tensors = {name: m(*lead, width, scale=scale) for name in inputs}
        if values is not None:
            tensors["x"] = m.of(values)
            if add:
                tensors["residual"] = m.of(torch.zeros_like(values))
        for name in affine:
            tensors[name] = m(width)
        return Case(tensors, options, width)

    def edge(values, width=300, rows=16):
        return lambda m: make(m, rows, width=width, values=values(rows, width))

    def outlier(rows, width):
        x = torch.randn(rows, width) * 0.01
        x[:, width // 2] = 1e4
        return x

    def huge(m):
        m.strided, rows, width = False, 2**19 + 9, 4096
        tensors = {name: m.big(rows, width) for name in inputs}
        return Case(tensors | {"weight": m(width)} | ({"bias": m(width)} if layer else {}), {})

    affine = [(), ("weight",), ("weight", "bias")] if layer else [(), ("weight",), ("weight",)]
    choices = {"width": Sizes(WIDTHS, [*FEW_WIDTHS, 1100]), "affine": affine, "eps": [1e-5, 1e-6, 0.5]}
    return Op(
        call, reference, eager, make,
        choices=choices if layer else choices | {"cast_before_weight": [True, False], "offset": [0.0, 1.0]},
        complete={"width": 8, "affine": ("weight", "bias") if layer else ("weight",)},
        row=lambda chosen: chosen["width"],
        more={"affine": [("bias",)]} if layer else {},
        few_rows=(0, 1, 5, 33),
        edges={
            "rows of equal values": edge(lambda r, n: torch.arange(1.0, r + 1)[:, None].expand(r, n)),
            "rows of zeros": edge(lambda r, n: torch.zeros(r, n)),
            "rows of 1e4": edge(lambda r, n: torch.randn(r, n) * 1e4),
            "tiny rows": edge(lambda r, n: torch.randn(r, n) * 1e-4),
            "one number of 1e4 in each row": edge(outlier),
            "far from zero": edge(lambda r, n: 100 + 0.25 * torch.randn(r, n)),
            "one row of 20001": edge(lambda r, n: torch.randn(r, n), width=20001, rows=1),
        },
        past_2_31=huge,
        noise=functools.partial(row_noise, layer=layer),
    )  # fmt: skip


# Rotary embedding.


def eager_rope_qk(q, k, cos, sin):
    """apply_rotary_pos_emb of transformers: the doubled table in the dtype of q, rotate_half, cat for the rest."""
    cos, sin = (torch.cat([t, t], -1).to(q.dtype).unsqueeze(2) for t in (cos, sin))
    rotary = cos.shape[-1]

    def rotate(x):
        x, rest = x[..., :rotary], x[..., rotary:]
        half = torch.cat([-x[..., rotary // 2 :], x[..., : rotary // 2]], -1)
        return torch.cat([x * cos + half * sin, rest], -1)

    return rotate(q), rotate(k)


def eager_rope(qkv, cos, sin, *, num_heads, num_kv_heads):
    q, k, v = qkv.unflatten(-1, (num_heads + 2 * num_kv_heads, -1)).split([num_heads, num_kv_heads, num_kv_heads], 2)
    return *eager_rope_qk(q, k, cos, sin), v


def rope_in_place(qkv, cos, sin, **options):
    """Over the output of a projection, as it is used."""
    return kernels.rope(qkv * 1, cos, sin, inplace=True, **options)


def rotation(call, reference, eager, *, packed: bool) -> Op:
    def make(m, rows, *, kv_heads, groups, dim, share=1.0, scale=1.0, positions=None, alone=False):
        batch = 2 if rows % 2 == 0 and rows else 1
        length, heads, rotary = rows // batch, kv_heads * groups, max(2, int(dim * share) // 2 * 2)
        if positions is None:
            positions = m.integers(0, 8192, m.draw.choice([1, batch]), length)
        angles = positions[..., None] * 10000.0 ** (-torch.arange(rotary // 2, device=m.device) * 2 / rotary)
        tables = {"cos": angles.cos(), "sin": angles.sin()}
        if packed:
            qkv = m(batch, length, (heads + 2 * kv_heads) * dim, scale=scale)
            return Case({"qkv": qkv} | tables, {"num_heads": heads, "num_kv_heads": kv_heads})
        q, k = (m(batch, length, n, dim, scale=scale) for n in (heads, 0 if alone else kv_heads))
        return Case({"q": q, "k": k} | tables, {})

    def huge(m):
        m.strided, batch, length = False, 513, 1024
        half = torch.randn(2, 1, length, 64, device=m.device)
        tables = {"cos": half[0].cos(), "sin": half[1].sin()}
        if packed:
            return Case({"qkv": m.big(batch, length, 32 * 128)} | tables, {"num_heads": 24, "num_kv_heads": 4})
        q, k = m.big(batch, length, 32, 128), m.big(batch, length, 4, 128)
        return Case({"q": q, "k": k} | tables, {})

    usual = dict(kv_heads=2, groups=3, dim=64)
    return Op(
        call, reference, eager, make,
        choices={
            "dim": Sizes([2, 16, 22, 64, 80, 96, 112, 128, 256], [2, 6, 16, 22]),
            "kv_heads": Sizes([1, 2, 3, 8], [1, 3]), "groups": Sizes([1, 2, 3, 5], [1, 2]),
            "share": [1.0, 1.0, 0.4, 0.8],
        },
        complete={"kv_heads": 1, "groups": 2, "dim": 8},
        row=lambda chosen: chosen["kv_heads"] * (chosen["groups"] + 2) * chosen["dim"],
        edges={
            "values of 1e4": lambda m: make(m, 6, scale=1e4, **usual),
            "position zero": lambda m: make(m, 6, positions=torch.zeros(1, 3, device=m.device), **usual),
            "far positions": lambda m: make(m, 6, positions=m.integers(10**6, 10**7, 1, 3), **usual),
        } | ({} if packed else {"no key heads": lambda m: make(m, 6, alone=True, **usual)}),
        past_2_31=huge,
    )  # fmt: skip


# Token embedding.


def eager_embedding(ids, weight, *, padding_idx=None, scale=None):
    """torch.nn.Embedding, and Gemma's factor, which transformers rounds to the weight's dtype."""
    rows = F.embedding(ids, weight, padding_idx)
    return rows if scale is None else rows * torch.tensor(scale, dtype=weight.dtype, device=weight.device)


def embedding_op() -> Op:
    def make(m, rows, *, width, vocab, few=False, ids=None, **options):
        """few: of the ids of long texts, most are the same few."""
        ids = m.ids(m.integers(0, min(vocab, 3) if few else vocab, *m.lead(rows)) if ids is None else ids)
        return Case({"ids": ids, "weight": m(vocab, width)}, options)

    def edge(ids, vocab=40, **options):
        return lambda m: make(m, 0, width=33, vocab=vocab, ids=ids, **options)

    def huge(m):
        m.strided = False
        return Case({"ids": m.integers(0, 1000, 2**18 + 9), "weight": m(1000, 8192)}, {})

    return Op(
        kernels.embedding, kernels.embedding_reference, eager_embedding, make,
        choices={
            "width": Sizes(WIDTHS[:-2], FEW_WIDTHS), "vocab": Sizes(VOCABS, [1, 2, 7, 33]),
            "padding_idx": [None, 0, -1], "scale": [None, None, 45.25, 0.5],  # exact in every dtype
            "few": [False, False, True],
        },
        complete={"width": 8, "vocab": 7},
        row=lambda chosen: chosen["width"],
        few_rows=(0, 1, 5, 65),
        fits=lambda chosen: chosen["vocab"] * chosen["width"] <= 2**24,
        edges={
            "all the same": edge(torch.full((3000,), 5)),
            "all padding": edge(torch.full((30,), 5), padding_idx=5),
            "the first and the last row": edge(torch.tensor([0, 39] * 100)),
            "one row": edge(torch.zeros(50, dtype=torch.int64), vocab=1),
            "every row nine times": edge(torch.arange(40).repeat(9)),
        },
        past_2_31=huge,
    )  # fmt: skip
