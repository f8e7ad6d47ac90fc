"""The table of all public ops: what is drawn for each, what eager users run in its place, where it may be hard.

`OPS` is what `test_every_op.py` walks over. An entry holds the op, its reference, the eager code of the same dtype that
it replaces (as transformers or torch.nn.functional have it), a generator of shapes and options, adversarial values,
and a case past 2^31 elements. All calls are by keyword, so that op, reference and eager take the same arguments.
"""

import dataclasses
import functools
import random
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ligermodels import kernels
from ligermodels.experimental.bitnet.int2_matmul import int2_matmul, pack_int2, unpack_int2
from ligermodels.experimental.bitnet.quantize import quantize_int8
from ligermodels.kernels._triton import accumulator
from ligermodels.kernels.embedding import embedding, embedding_reference
from ligermodels.kernels.gated_mlp import gated_mlp, gated_mlp_reference, mlp, mlp_reference
from ligermodels.kernels.jsd import jsd, jsd_reference
from ligermodels.kernels.kl_div import kl_div, kl_div_reference
from ligermodels.kernels.linear_jsd import linear_jsd, linear_jsd_reference
from ligermodels.kernels.linear_logprobs import linear_logprobs, linear_logprobs_reference

IGNORE = -100
WIDTHS = [
    1, 2, 3, 7, 16, 31, 64, 97, 127, 128, 129, 257, 512, 769, 896, 1023, 1025, 1536, 2048, 2304, 3072, 3584, 4096,
    5120, 8191, 8192, 11008, 14336, 16384, 18944, 65537, 131072,
]  # fmt: skip
VOCABS = [
    1, 2, 3, 7, 8, 33, 63, 97, 127, 129, 256, 511, 513, 1000, 1023, 2049, 4099, 8191, 16384, 30522, 32000, 32064,
    50257, 65537, 128256, 151936, 152064, 256000, 262144,
]  # fmt: skip
ROWS = [0, 1, 2, 3, 17, 64, 100, 255, 300, 1000, 1023, 4096]
VARIANTS, VARIANTS_INTERPRETED = 20, 4


@dataclasses.dataclass
class Case:
    """Arguments of one call: its tensors, of which those that require grad are trained, and all that is no tensor.

    shared: how many elements of a result have one error in common, where several do: a row that of its statistic, and
        many sums of a product those of the few numbers that they are made of.
    terms: how many products its matrix products add to one element, at most.
    """

    tensors: dict[str, Tensor]
    options: dict[str, Any]
    shared: int = 1
    terms: int = 1


class Maker:
    """Makes the tensors of a case, of one dtype, in memory layouts that are drawn."""

    def __init__(self, draw: random.Random, dtype: torch.dtype, device: str, *, strided: bool = True):
        self.draw, self.dtype, self.device, self.strided = draw, dtype, device, strided

    def __call__(self, *shape: int, scale: float = 1.0, train: bool = True, dtype: torch.dtype | None = None) -> Tensor:
        return self.of(torch.randn(shape, device=self.device) * scale, train=train, dtype=dtype)

    def of(self, values: Tensor, *, train: bool = True, dtype: torch.dtype | None = None) -> Tensor:
        x = values.to(self.dtype if dtype is None else dtype)
        if self.strided and x.dim():
            x = LAYOUTS[self.draw.choice(["contiguous"] * 3 + list(LAYOUTS))](x)
        return x.detach().requires_grad_(train)

    def integers(self, low: int, high: int, *shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.randint(low, high, shape, device=self.device, dtype=dtype)

    def labels(self, vocab: int, *shape: int, ignored: float | None = None) -> Tensor:
        share = self.draw.choice([0.0, 0.3, 0.9]) if ignored is None else ignored
        labels = self.integers(0, vocab, *shape)
        return labels.masked_fill(torch.rand(shape, device=self.device) < share, IGNORE)

    def lead(self, rows: int) -> tuple[int, ...]:
        """Leading dims of `rows` rows."""
        return self.draw.choice([(rows,), (1, rows), (rows // 2, 2) if rows % 2 == 0 else (rows, 1)])


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda t: t,
    "part of wider rows": lambda t: torch.cat([t, t], -1)[..., : t.shape[-1]],
    "every other column": lambda t: torch.stack([t, t], -1)[..., 0],
    "transposed": lambda t: t.transpose(0, -1).contiguous().transpose(0, -1),
    "expanded rows": lambda t: t[:1].expand_as(t) if t.shape[0] else t,
}


@dataclasses.dataclass(frozen=True)
class Op:
    """An entry of the table.

    sizes: the sizes and options of variant j, for which kernels are compiled, from (j, draw, interpreted); "row" is
        the number of elements that a row of the largest tensor has, and bounds the rows.
    make: the case of those sizes with so many rows, from (make, rows, **sizes).
    edges: adversarial values, by what is hard about them; each from a Maker.
    past_2_31: a case of which a tensor has more than 2^31 elements, rows first, from a Maker.
    ordered: its sums have one order, so that every run gives the same bits.
    noise: errors that any such op has and its eager formula may lack, from a case and the gradients of its outputs.
    """

    call: Callable
    reference: Callable
    eager: Callable
    sizes: Callable[[int, random.Random, bool], dict[str, Any]]
    make: Callable[..., Case]
    edges: dict[str, Callable[[Maker], Case]]
    past_2_31: Callable[[Maker], Case] | None
    ordered: bool = True
    dtypes: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float16, torch.float32)
    noise: Callable[[Case, list[Tensor]], dict[str, Tensor]] = lambda case, upstream: {}


def drawn(name: str, interpreted: bool) -> Iterator[tuple[int, int, dict[str, Any], int, torch.dtype]]:
    """(variant, seed, sizes, rows, dtype) of all cases of an op: every variant with every number of rows."""
    op = OPS[name]
    dtypes = [d for d in op.dtypes if d != torch.bfloat16] if interpreted else [op.dtypes[0], *op.dtypes]
    budget = 2**11 if interpreted else 2**22
    for j in range(VARIANTS_INTERPRETED if interpreted else VARIANTS):
        sizes = op.sizes(j, random.Random(f"{name} {j}"), interpreted)
        row = sizes.pop("row")
        for i, rows in enumerate((0, 5) if interpreted else ROWS):
            rows = rows if rows * row <= budget else max(1, budget // row - i)
            yield j, 1000 * j + i, sizes, rows, dtypes[j % len(dtypes)]


def pick(values: list[int], j: int, interpreted: bool, most: int = 200) -> int:
    """Another value for each variant; only small ones where Python computes."""
    values = [n for n in values if n <= most] if interpreted else values
    return values[(j * 5 + 3) % len(values) if interpreted else j * 7 % len(values)]


# Norms. In fp32 a row shares the error of its statistic.


def eager_rms_norm(x, weight=None, *, eps=1e-6, offset=0.0, cast_before_weight=True):
    """LlamaRMSNorm and GemmaRMSNorm of transformers."""
    h = x.to(accumulator(x.dtype))
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + eps)
    if weight is None:
        return h.to(x.dtype)
    return (offset + weight) * h.to(x.dtype) if cast_before_weight else (h * (offset + weight.float())).to(x.dtype)


def eager_layer_norm(x, weight=None, bias=None, *, eps=1e-5):
    return F.layer_norm(x, x.shape[-1:], weight, bias, eps)


def after_sum(norm):
    return lambda x, residual, *args, **options: (norm(x + residual, *args, **options), x + residual)


def row_noise(case: Case, upstream: list[Tensor], *, layer: bool) -> dict[str, Tensor]:
    """What an ulp of fp32 costs where terms cancel: x - mean(x), and the gradient less its part along the row.

    In rows of one number nothing else is left of either.
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
    return noise


def norm(call, reference, eager, *, add: bool, layer: bool) -> Op:
    inputs = ["x", "residual"] if add else ["x"]

    def sizes(j, draw, interpreted):
        width = pick(WIDTHS, j, interpreted)
        affine = draw.choice([(), ("weight",), ("weight", "bias")] if layer else [(), ("weight",), ("weight",)])
        options = {"eps": draw.choice([1e-5, 1e-6, 0.5])}
        if not layer:
            options |= {"cast_before_weight": draw.choice([True, False]), "offset": draw.choice([0.0, 1.0])}
        return {"row": width, "width": width, "affine": affine, "options": options}

    def make(m, rows, *, width, affine=("weight",), options=None, values=None):
        lead = m.lead(rows)
        scale = m.draw.choice([0.1, 1.0, 10.0])
        tensors = {name: m(*lead, width, scale=scale) for name in inputs}
        if values is not None:
            tensors["x"] = m.of(values)
            if add:
                tensors["residual"] = m.of(torch.zeros_like(values))
        for name in affine:
            tensors[name] = m(width)
        return Case(tensors, options or {}, width)

    def edge(values, width=300, rows=16):
        return lambda m: make(m, rows, width=width, values=values(rows, width).to(m.device))

    def outlier(rows, width):
        x = torch.randn(rows, width) * 0.01
        x[:, width // 2] = 1e4
        return x

    edges = {
        "rows of equal values": edge(lambda r, n: torch.arange(1.0, r + 1)[:, None].expand(r, n)),
        "rows of zeros": edge(lambda r, n: torch.zeros(r, n)),
        "rows of 1e4": edge(lambda r, n: torch.randn(r, n) * 1e4),
        "tiny rows": edge(lambda r, n: torch.randn(r, n) * 1e-4),
        "one number of 1e4 in each row": edge(outlier),
        "far from zero": edge(lambda r, n: 100 + 0.25 * torch.randn(r, n)),
        "wide, and one row": edge(lambda r, n: torch.randn(r, n), width=20001, rows=1),
    }

    def huge(m):
        m.strided, rows, width = False, 2**19 + 9, 4096
        tensors = {name: m.of(big(m, rows, width)) for name in inputs}
        return Case(tensors | {"weight": m(width)} | ({"bias": m(width)} if layer else {}), {})

    return Op(call, reference, eager, sizes, make, edges, huge, noise=functools.partial(row_noise, layer=layer))


def big(m: Maker, *shape: int) -> Tensor:
    """Normal numbers, made in place: there must be no fp32 copy."""
    return torch.empty(shape, dtype=m.dtype, device=m.device).normal_()


# Rotary embedding.


def eager_rope_qk(q, k, cos, sin, position_ids=None, sections=None):
    """apply_rotary_pos_emb of transformers: the doubled table in the dtype of q, rotate_half, cat for the rest."""
    if position_ids is not None and sections is None:
        cos, sin = cos[position_ids], sin[position_ids]
    elif position_ids is not None:
        cos, sin = (
            torch.cat([part[p] for part, p in zip(t.split(sections, -1), position_ids, strict=True)], -1)
            for t in (cos, sin)
        )
    cos, sin = (torch.cat([t, t], -1).to(q.dtype).unsqueeze(2) for t in (cos, sin))
    rotary = cos.shape[-1]

    def rotate(x):
        x, rest = x[..., :rotary], x[..., rotary:]
        half = torch.cat([-x[..., rotary // 2 :], x[..., : rotary // 2]], -1)
        return torch.cat([x * cos + half * sin, rest], -1)

    return rotate(q), rotate(k)


def eager_rope(qkv, cos, sin, *, num_heads, num_kv_heads, position_ids=None, sections=None):
    q, k, v = qkv.unflatten(-1, (num_heads + 2 * num_kv_heads, -1)).split([num_heads, num_kv_heads, num_kv_heads], 2)
    return *eager_rope_qk(q, k, cos, sin, position_ids, sections), v


def rotation(call, reference, eager, *, packed: bool) -> Op:
    def sizes(j, draw, interpreted):
        kv_heads = draw.choice([1, 2, 3, 8])
        heads = kv_heads * draw.choice([1, 2, 3, 5])
        dim = draw.choice([2, 6, 16, 22] if interpreted else [2, 16, 22, 64, 80, 96, 112, 128, 256])
        rotary = draw.choice([dim, dim, 2 * draw.randint(1, dim // 2)])
        row = (heads + 2 * kv_heads) * dim
        axes = draw.choice([0, 0, 1, 1, 2, 3])
        return {"row": row, "heads": heads, "kv_heads": kv_heads, "dim": dim, "rotary": rotary,
                "axes": min(axes, rotary // 2)}  # fmt: skip

    def make(m, rows, *, heads, kv_heads, dim, rotary, axes=0, scale=1.0, positions=None):
        """axes: 0 for tables per token, else positions that the kernel gathers, on so many axes."""
        batch = 2 if rows % 2 == 0 and rows else 1
        length = rows // batch
        if positions is None:
            positions = m.integers(0, 8192, m.draw.choice([1, batch]), length)
        options: dict[str, Any] = {}
        if axes:
            shape = (axes,) * (axes > 1) + positions.shape
            options["position_ids"] = m.integers(0, 500, *shape, dtype=m.draw.choice([torch.int32, torch.int64]))
            positions = torch.arange(500, device=m.device)
            if axes > 1:
                options["sections"] = [rotary // 2 - axes + 1] + [1] * (axes - 1)
        angles = positions[..., None] * 10000.0 ** (-torch.arange(rotary // 2, device=m.device) * 2 / rotary)
        tables = {"cos": angles.cos(), "sin": angles.sin()}
        tables |= {name: options.pop(name) for name in ("position_ids",) if name in options}
        if packed:
            qkv = m(batch, length, (heads + 2 * kv_heads) * dim, scale=scale)
            return Case({"qkv": qkv} | tables, {"num_heads": heads, "num_kv_heads": kv_heads} | options)
        q, k = (m(batch, length, n, dim, scale=scale) for n in (heads, kv_heads))
        return Case({"q": q, "k": k} | tables, options)

    usual = dict(heads=6, kv_heads=2, dim=64, rotary=64)
    edges = {
        "values of 1e4": lambda m: make(m, 6, scale=1e4, **usual),
        "position zero": lambda m: make(m, 6, positions=torch.zeros(1, 3, device=m.device), **usual),
        "far positions": lambda m: make(m, 6, positions=m.integers(10**6, 10**7, 1, 3), **usual),
        "one token": lambda m: make(m, 1, **usual),
    }

    def huge(m):
        m.strided, batch, length = False, 513, 1024
        half = torch.randn(2, 1, length, 64, device=m.device)
        tables = {"cos": half[0].cos(), "sin": half[1].sin()}
        if packed:
            return Case({"qkv": m.of(big(m, batch, length, 32 * 128))} | tables, {"num_heads": 24, "num_kv_heads": 4})
        q, k = m.of(big(m, batch, length, 32, 128)), m.of(big(m, batch, length, 4, 128))
        return Case({"q": q, "k": k} | tables, {})

    return Op(call, reference, eager, sizes, make, edges, huge)


# Gated units and activations, alone and with the linear layer that reads them.

ACTIVATIONS = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": functools.partial(F.gelu, approximate="tanh"),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
}
GATED = ["silu", "gelu", "gelu_tanh"]
PLAIN = ["quick_gelu", "gelu", "gelu_tanh"]


def eager_glu(gate_up, up=None, *, activation="silu"):
    """The MLP of transformers, every step in the dtype of its input."""
    gate, up = gate_up.chunk(2, -1) if up is None else (gate_up, up)
    h = ACTIVATIONS[activation](gate) * up
    return h


def eager_activate(x, *, activation):
    return ACTIVATIONS[activation](x)


def linear_after(unit):
    def eager(*, weight, bias=None, **rest):
        return F.linear(unit(**rest), weight, bias)

    return eager


def unit(call, reference, eager, *, gated: bool, linear: bool, separate: bool = False) -> Op:
    first, parts = ("gate_up", 2) if gated else ("x", 1)

    def sizes(j, draw, interpreted):
        width = pick(WIDTHS[:-2], j, interpreted)
        options = {"activation": draw.choice(GATED if gated else PLAIN)}
        out = draw.choice([1, 7, 64, 300])
        return {"row": parts * width, "width": width, "options": options, "out": out, "bias": draw.random() < 0.5}

    def make(m, rows, *, width, options, out=64, bias=True, values=None):
        values = torch.randn(*m.lead(rows), parts * width, device=m.device) * 3 if values is None else values
        tensors = {first: m.of(values)}
        if separate:
            tensors = {first: m.of(values[..., :width]), "up": m.of(values[..., width:])}
        if linear:
            tensors["weight"] = m(out, width, scale=width**-0.5)
            if bias:
                tensors["bias"] = m(out)
        return Case(tensors, options, terms=max(width, out, rows) if linear else 1)

    def edge(values, activation):
        def case(m):
            x = torch.tensor(values)[torch.randint(len(values), (9, 50))] * (1 + 0.02 * torch.randn(9, 50))
            x = torch.cat([x, torch.randn(9, 50)], -1) if gated else x
            return make(m, 9, width=50, options={"activation": activation}, values=x.to(m.device))

        return case

    edges = {
        f"{what}, {name}": edge(values, name)
        for name in (GATED if gated else PLAIN)
        for what, values in {
            "zeros": [0.0, -0.0],
            "far tails": [-200.0, -100.0, -30.0, 30.0, 100.0, 200.0],
            "near tails": [-13.0, -9.0, -6.0, -5.0, -4.0, -3.0],
            "1e4": [1e4, -1e4, 1.0],
            "near zero": [1e-3, -1e-3, 1e-5, 2e-4],
        }.items()
    }

    def huge(m):
        m.strided, rows, width = False, 2**18 + 9, 8192
        tensors = {first: m.of(big(m, rows, parts * width))}
        if separate:
            tensors = {first: m.of(big(m, rows, width)), "up": m.of(big(m, rows, width))}
        if linear:
            tensors |= {"weight": m(16, width, scale=width**-0.5), "bias": m(16)}
        return Case(tensors, {"activation": "gelu_tanh"})

    return Op(call, reference, eager, sizes, make, edges, huge)


def whole_unit(call, reference, eager_unit, *, gated: bool, separate: bool = False) -> Op:
    """The unit with the linear layers around it; with recompute, in tiles of 128 tokens. separate: gate and up are two
    weights, the arguments `gate_weight` and `up_weight`."""
    layers = ("gate", "up", "down") if separate else ("gate_up", "down") if gated else ("fc1", "fc2")

    def plain(op):
        return lambda *, recompute=False, workspace_bytes=0, **rest: op(**rest)

    def eager(x, *, activation, **weights):
        *first, (w2, b2) = ((weights[f"{name}_weight"], weights.get(f"{name}_bias")) for name in layers)
        h = torch.cat([F.linear(x, w1, b1) for w1, b1 in first], -1)
        return F.linear(eager_unit(h, activation=activation), w2, b2)

    def sizes(j, draw, interpreted):
        width = pick(WIDTHS[:-6], j, interpreted)
        inner, out = draw.choice([1, 7, 64] if interpreted else [1, 7, 64, 300, 1000, 4096]), draw.choice([1, 64, 300])
        options = {"activation": draw.choice(GATED if gated else PLAIN)}
        if draw.random() < 0.5:
            options |= {"recompute": True, "workspace_bytes": 1}
        row = width + out + 3 * inner
        return {"row": row, "width": width, "inner": inner, "out": out, "options": options, "bias": draw.random() < 0.5}

    def make(m, rows, *, width, inner, options, out=7, bias=True, scale=2.0):
        tensors = {"x": m(*m.lead(rows), width, scale=scale)}
        first = [(inner, width)] * 2 if separate else [(inner * (1 + gated), width)]
        for name, shape in zip(layers, [*first, (out, inner)], strict=True):
            tensors[f"{name}_weight"] = m(*shape, scale=shape[1] ** -0.5)
            if bias:
                tensors[f"{name}_bias"] = m(shape[0], scale=min(scale, 1.0))
        # Errors of z, h and dz, which are rows x inner numbers, are those of all sums over them.
        shared = max(1, width // max(1, min(rows, inner * (1 + gated))), out // max(1, min(rows, inner)))
        return Case(tensors, options, shared, max(width, inner * (1 + gated), out, rows))

    def edge(scale, activation):
        options = {"activation": activation}
        return lambda m: make(m, 9, width=33, inner=50, options=options, bias=False, scale=scale)

    edges = {
        f"{what}, {name}": edge(scale, name)
        for name in (GATED if gated else PLAIN)
        for what, scale in {"zeros": 0.0, "far tails": 60.0, "near zero": 1e-3}.items()
    }

    def huge(m):
        m.strided, rows, width = False, 2**18 + 9, 8192  # x, and all that is made of it
        case = make(m, 2, width=width, inner=4096 * (2 - gated), options={"activation": "gelu_tanh"})
        return Case({**case.tensors, "x": big(m, rows, width).requires_grad_()}, case.options)

    noise = functools.partial(unit_noise, gated=gated)
    return Op(call, plain(reference), plain(eager), sizes, make, edges, huge, noise=noise)


def of_two_weights(op):
    """gated_mlp, or its reference, with the two weights and biases as arguments of their own."""

    def call(x, *, gate_weight, up_weight, down_weight, gate_bias=None, up_bias=None, down_bias=None, **options):
        return op(x, (gate_weight, up_weight), down_weight, (gate_bias, up_bias), down_bias, **options)

    return call


def unit_noise(case: Case, upstream: list[Tensor], *, gated: bool) -> dict[str, Tensor]:
    """What rounding the first product z, h and their gradients dz and dh once costs: of few tokens, or of equal ones,
    eager's roundings may happen to cancel."""
    first, second = ("gate_up", "down") if gated else ("fc1", "fc2")
    t = {name: x.detach().double() for name, x in case.tensors.items()}
    for kind in ("weight", "bias"):
        if f"gate_{kind}" in t:
            t[f"gate_up_{kind}"] = torch.cat([t[f"gate_{kind}"], t[f"up_{kind}"]])
    x, dy = t["x"].flatten(0, -2), upstream[0].double().flatten(0, -2)
    w1, w2 = t[f"{first}_weight"], t[f"{second}_weight"]
    z = F.linear(x, w1, t.get(f"{first}_bias")).requires_grad_()
    h = OPS["glu" if gated else "activate"].reference(z, activation=case.options["activation"])
    (dz,) = torch.autograd.grad(h, z, dy @ w2, create_graph=True)

    def by_z(y: Tensor) -> Tensor:
        """The square of what y, [T, inner], changes by where the numbers of z that it is made of are off by as much as
        they are large."""
        (slope,) = torch.autograd.grad(y.sum(), z, retain_graph=True)
        return ((slope * z.detach()) ** 2).unflatten(1, (-1, y.shape[1])).sum(1)

    squares = torch.finfo(case.tensors["x"].dtype).eps ** 2 / 12  # of a rounding, over the square of its number
    lost_h = squares * (by_z(h) + h.detach() ** 2)
    # dz is off by as much as dh, and by its own rounding.
    lost_dz = squares * (torch.cat([by_z(part) for part in dz.split(h.shape[1], 1)], 1) + 2 * dz.detach() ** 2)
    noise = {"output 0": lost_h @ w2.t() ** 2, f"d_{second}_weight": (dy**2).t() @ lost_h}
    noise |= {"d_x": lost_dz @ w1**2, f"d_{first}_weight": lost_dz.t() @ x**2, f"d_{first}_bias": lost_dz.sum(0)}
    for kind in ("weight", "bias"):
        if f"gate_{kind}" in t:
            noise |= zip((f"d_gate_{kind}", f"d_up_{kind}"), noise[f"d_gate_up_{kind}"].chunk(2), strict=True)
    shapes = {"output 0": upstream[0].shape, "d_x": t["x"].shape}
    return {name: n.sqrt().view(shapes.get(name, n.shape)) for name, n in noise.items()}


# Attention. On the engines of torch, and on our own.


def visible(q, k, *, causal=True, window=None, key_mask=None, cu_seqlens=None) -> Tensor:
    """Which query sees which key, [B or 1, 1, S, K]; one that is left without a key sees its own."""
    length, num_keys = q.shape[1], k.shape[1]
    keys = torch.arange(num_keys, device=q.device)
    at = keys[num_keys - length :, None]
    seen = (keys <= at) | (not causal)
    seen = seen if window is None else seen & (keys > at - window)
    if cu_seqlens is not None:
        sequence = torch.bucketize(keys, cu_seqlens[1:], right=True)
        seen = seen & (sequence == sequence[:, None])
    seen = seen[None, None]
    if key_mask is not None:
        seen = seen & key_mask[:, None, None]
        seen = seen | (~seen.any(-1, keepdim=True) & (keys == at))
    return seen


def eager_attention(q, k, v, *, softcap=None, scale=None, causal=True, **masks):
    """sdpa_attention_forward of transformers; with a softcap, which that has not, its eager_attention_forward."""
    length, num_keys, groups = q.shape[1], k.shape[1], q.shape[2] // k.shape[2]
    seen = visible(q, k, causal=causal, **masks)
    q, k, v = (x.transpose(1, 2) for x in (q, k.repeat_interleave(groups, 2), v.repeat_interleave(groups, 2)))
    if softcap is None and bool(seen.all()):
        return F.scaled_dot_product_attention(q, k, v, scale=scale).transpose(1, 2)
    if softcap is None and length == num_keys and not any(x is not None for x in masks.values()):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale).transpose(1, 2)
    if softcap is None:
        mask = seen.expand(q.shape[0], 1, length, num_keys)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale).transpose(1, 2)
    scores = softcap * torch.tanh(q @ k.transpose(2, 3) * q.shape[-1] ** -0.5 / softcap)
    weights = scores.masked_fill(~seen, float("-inf")).softmax(-1, dtype=accumulator(q.dtype)).to(q.dtype)
    return (weights @ v).transpose(1, 2)


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
    masks = {name: named[name] for name in ("causal", "window", "key_mask", "cu_seqlens") if name in named}
    p = capped.masked_fill(~visible(q, k, **masks), float("-inf")).softmax(-1)
    out, square = (torch.einsum("bhsk,bkhd->bhsd", p, x) for x in (v, v.square()))
    dout, eps = upstream[0].double().transpose(1, 2), torch.finfo(case.tensors["q"].dtype).eps
    several = 1 - p.amax(-1) > eps / 4 if p.numel() else p.new_zeros(p.shape[:-1], dtype=torch.bool)
    lost = eps / 2 * ((out.square() + square) * dout.square()).sum(-1).sqrt() * several
    lost = lost + 2.0**-23 * (out * dout).abs().sum(-1)
    dp = torch.einsum("bshd,bkhd->bhsk", upstream[0].double(), v)
    # The backward makes p again from one number per row, log sum exp, which is as large as the scores.
    from_lse = (dp - (p * dp).sum(-1, keepdim=True)).abs() * 2.0**-23 * scores.abs().amax(-1, keepdim=True)
    ds = p * (lost[..., None] + from_lse) * scale * (1.0 if cap is None else 1 - (capped / cap).square())
    dk = torch.einsum("bhsk,bshd->bkhd", ds, q).unflatten(2, (-1, groups)).sum(3)
    return {"d_q": torch.einsum("bhsk,bkhd->bshd", ds, k), "d_k": dk}


FORMS: dict[str, dict[str, Any]] = {
    "causal": {},
    "whole": {"causal": False},
    "scaled": {"scale": 0.3},
    "window": {"window": 20},
    "softcap": {"softcap": 5.0},
    "softcap and window": {"softcap": 30.0, "window": 40},
    "key mask": {"key_mask": True},
    "packed": {"packed": True},
    "packed and whole": {"packed": True, "causal": False},
    "cached prompt": {"cached": 37},
    "decode": {"cached": 200, "decode": True},
}
OURS = ["window", "softcap", "softcap and window", "key mask", "packed", "packed and whole", "cached prompt"]
"""Forms that our own kernels compute, in half precision; the others are torch's engines."""


def attention_op(forms: list[str], *, dtypes: tuple[torch.dtype, ...], ordered: bool) -> Op:
    def sizes(j, draw, interpreted):
        kv_heads = draw.choice([1, 2] if interpreted else [1, 2, 4])
        heads = kv_heads * draw.choice([1, 2, 3])
        dim = draw.choice([2, 8, 16] if interpreted else [8, 16, 40, 64, 80, 96, 128, 192, 256])
        row = 128 if interpreted else 2**12 * heads
        return {"row": row, "heads": heads, "kv_heads": kv_heads, "dim": dim, "form": forms[j % len(forms)]}

    def make(m, rows, *, heads, kv_heads, dim, form, scale=1.0, same=False, hidden=False):
        options = dict(FORMS[form])
        packed, cached, decode = (options.pop(name, 0) for name in ("packed", "cached", "decode"))
        masked = options.pop("key_mask", False)
        batch = 1 if packed or rows > 300 else 2
        length = min(rows, 1) if decode else rows
        num_keys = (rows if decode else length) + cached if length else 0
        q = m(batch, length, heads, dim, scale=scale)
        k, v = (m(batch, num_keys, kv_heads, dim, scale=scale) for _ in range(2))
        if same:
            k = m.of(k.detach()[:, :1].expand_as(k))
        tensors = {"q": q, "k": k, "v": v}
        if masked:
            tensors["key_mask"] = torch.rand(batch, num_keys, device=m.device) < (0.0 if hidden else 0.7)
        if packed:
            ends = [0, num_keys // 3, num_keys // 3, num_keys // 2, num_keys]
            options["cu_seqlens"] = torch.tensor(ends, dtype=torch.int32, device=m.device)
        # What torch's engine for one query does with the keys in fp32 errs by up to twice as much.
        return Case(tensors, options, dim, max(num_keys, dim) * (4 if decode else 1))

    usual = dict(heads=4, kv_heads=2, dim=16)
    edges: dict[str, Callable[[Maker], Case]] = {}
    for form in forms:
        edges |= {
            f"equal keys, {form}": lambda m, f=form: make(m, 40, form=f, same=True, **usual),
            f"scores of 1e4, {form}": lambda m, f=form: make(m, 40, form=f, scale=50.0, **usual),
            f"one token, {form}": lambda m, f=form: make(m, 1, form=f, **usual),
        }
        if FORMS[form].get("key_mask"):
            edges[f"all hidden, {form}"] = lambda m, f=form: make(m, 40, form=f, hidden=True, **usual)

    def huge(m):
        m.strided, batch, length = False, 513, 1024
        q, k, v = m.of(big(m, batch, length, 32, 128)), m(batch, length, 2, 128), m(batch, length, 2, 128)
        return Case({"q": q, "k": k, "v": v}, {"window": 256} if ordered else {})

    reference = kernels.attention_reference
    return Op(kernels.attention, reference, eager_attention, sizes, make, edges, huge, ordered, dtypes, attention_noise)


# Cross entropy.


def eager_cross_entropy(
    logits, labels, *, class_weight=None, label_smoothing=0.0, z_loss=0.0, softcap=None, reduction="mean"
):
    """The loss of transformers, logits cast up, with torch's options; the cap and z-loss as models write them."""
    rows, y = logits.reshape(-1, logits.shape[-1]).to(accumulator(logits.dtype)), labels.reshape(-1)
    if softcap is not None:
        rows = softcap * torch.tanh(rows / softcap)
    class_weight = None if class_weight is None else class_weight.to(rows.dtype)
    loss = F.cross_entropy(rows, y, class_weight, label_smoothing=label_smoothing, reduction=reduction)
    if z_loss:
        z = (z_loss * rows.logsumexp(-1).square()).masked_fill(y == IGNORE, 0)
        loss = loss + (z if reduction == "none" else z.sum() if reduction == "sum" else z.sum() / (y != IGNORE).sum())
    return loss


def loss_options(draw: random.Random) -> dict[str, Any]:
    return {
        "reduction": draw.choice(["mean", "sum", "none"]),
        "label_smoothing": draw.choice([0.0, 0.0, 0.1]),
        "z_loss": draw.choice([0.0, 0.0, 1e-2]),
        "softcap": draw.choice([None, None, 30.0]),
    }


def confident(rows: int, vocab: int, p: float) -> tuple[Tensor, Tensor]:
    """Logits whose label has about the probability p, and the labels."""
    logits, labels = torch.randn(rows, vocab) / 8, torch.arange(rows) % vocab
    logits[torch.arange(rows), labels] = torch.tensor(p / (1 - p) * (vocab - 1)).log() + torch.randn(rows) / 8
    return logits, labels


def probability_noise(case: Case, upstream: list[Tensor]) -> dict[str, Tensor]:
    """What an ulp of fp32 at the probability 1 costs: the sum of exponentials rounds there, and log(1) cancels."""
    tensors = {name.removeprefix("student_"): t.detach() for name, t in case.tensors.items()}
    prefix = "student_" if "student_x" in case.tensors else ""
    first, given = tensors["logits"] if "logits" in tensors else tensors["x"], upstream[0].double().abs()
    tokens, per_token = first.shape[:-1], given.dim() > 0
    valid = (tensors["labels"] != IGNORE).double() if "labels" in tensors else given.new_ones(tokens)
    mean = not per_token and case.options.get("reduction", "mean") == "mean"
    rows = 2.0**-23 * valid * (given.reshape(tokens) if per_token else given)
    rows = rows / valid.sum().clamp(min=1) if mean else rows
    loss = {"output 0": 2.0**-23 * (valid.reshape(given.shape) if per_token else torch.ones_like(given))}
    if "logits" in tensors:
        return loss | {"d_logits": rows[..., None].expand(first.shape)}
    weight = tensors["weight"].double().abs()
    return loss | {
        f"d_{prefix}x": (rows[..., None] * weight.amax(0)).expand(first.shape),
        f"d_{prefix}weight": (rows.flatten() @ first.double().abs().flatten(0, -2)).expand(weight.shape),
    }


def loss_op() -> Op:
    def sizes(j, draw, interpreted):
        vocab = pick(VOCABS, j, interpreted)
        return {"row": vocab, "vocab": vocab, "options": loss_options(draw), "weighted": draw.random() < 0.2}

    def make(m, rows, *, vocab, options, weighted=False):
        lead = m.lead(rows)
        tensors = {"logits": m(*lead, vocab, scale=m.draw.choice([1.0, 3.0])), "labels": m.labels(vocab, *lead)}
        if weighted:
            tensors["class_weight"] = torch.rand(vocab, device=m.device) + 0.5
        return Case(tensors, options, vocab)

    def edge(values, **options):
        def case(m):
            logits, labels = values()
            return Case({"logits": m.of(logits.to(m.device)), "labels": labels.to(m.device)}, options, logits.shape[1])

        return case

    def some(rows=9, vocab=70, scale=1.0, ignored=0.0):
        labels = torch.randint(vocab, (rows,))
        return torch.randn(rows, vocab) * scale, labels.masked_fill(torch.rand(rows) < ignored, IGNORE)

    edges = {}
    for reduction in ("mean", "none"):
        edges |= {
            f"label at p = 0.9999, {reduction}": edge(lambda: confident(9, 70, 0.9999), reduction=reduction),
            f"label at p = 0.9999, 50257 classes, {reduction}": edge(
                lambda: confident(3, 50257, 0.9999), reduction=reduction
            ),
            f"logits of 1e4, {reduction}": edge(lambda: some(scale=1e4), reduction=reduction),
            f"rows of equal values, {reduction}": edge(
                lambda: (torch.arange(9.0)[:, None].expand(9, 70) * 10, torch.arange(9)), reduction=reduction
            ),
            f"all ignored, {reduction}": edge(lambda: some(ignored=1.1), reduction=reduction),
            f"one token, {reduction}": edge(lambda: some(rows=1), reduction=reduction),
            f"one token, ignored, {reduction}": edge(lambda: some(rows=1, ignored=1.1), reduction=reduction),
            f"no token, {reduction}": edge(lambda: some(rows=0), reduction=reduction),
            f"one class, {reduction}": edge(lambda: some(vocab=1), reduction=reduction),
            f"logits of 1e4, capped, {reduction}": edge(lambda: some(scale=1e4), reduction=reduction, softcap=30.0),
        }

    def huge(m):
        m.strided, rows, vocab = False, 16800, 128256
        return Case(
            {"logits": m.of(big(m, rows, vocab)), "labels": m.labels(vocab, rows, ignored=0.3)}, {"reduction": "none"}
        )

    reference = kernels.cross_entropy_reference
    return Op(kernels.cross_entropy, reference, eager_cross_entropy, sizes, make, edges, huge, noise=probability_noise)


def eager_linear_cross_entropy(x, weight, labels, *, bias=None, accum_dtype=None, workspace_bytes=None, **options):
    return eager_cross_entropy(F.linear(x, weight, bias), labels, **options)


def no_chunks(reference):
    """References hold all logits: they know nothing of chunks and of what sums over them are kept in."""
    return lambda *args, accum_dtype=None, workspace_bytes=None, **options: reference(*args, **options)


HIDDEN = [1, 7, 64, 96, 257, 896]


def head_sizes(j: int, draw: random.Random, interpreted: bool) -> dict[str, Any]:
    """Sizes of a head, whose weight stays below 2^25 elements, and a chunk size that gives several chunks or one."""
    vocab = pick(VOCABS, j, interpreted, 70)
    hidden = draw.choice([h for h in HIDDEN if h * vocab <= 2**25 and not (interpreted and h > 96)])
    workspace_bytes = draw.choice([1, 2**29])
    return {"row": max(vocab, hidden), "vocab": vocab, "hidden": hidden, "workspace_bytes": workspace_bytes}


def linear_loss_op() -> Op:
    def sizes(j, draw, interpreted):
        return head_sizes(j, draw, interpreted) | {"options": loss_options(draw), "bias": draw.random() < 0.3}

    def make(m, rows, *, vocab, hidden, workspace_bytes=2**29, options, bias=False, labels=None, scale=1.0):
        lead = m.lead(rows)
        x, weight = m(*lead, hidden, scale=scale * hidden**-0.5), m(vocab, hidden)
        tensors = {"x": x, "weight": weight, "labels": m.labels(vocab, *lead) if labels is None else labels(lead)}
        if bias:
            tensors["bias"] = m(vocab)
        return Case(tensors, options | {"workspace_bytes": workspace_bytes}, vocab, max(vocab, hidden, rows))

    def edge(rows=9, vocab=70, ignored=0.0, scale=1.0, **options):
        def case(m):
            def labels(lead):
                return m.labels(vocab, *lead, ignored=ignored)

            return make(m, rows, vocab=vocab, hidden=16, options=options, labels=labels, scale=scale)

        return case

    def sure(reduction):
        def case(m):
            logits, labels = confident(9, 70, 0.9999)
            x = torch.eye(9, 16)
            weight = torch.zeros(70, 16)
            weight[:, :9] = logits.t()
            return Case(
                {"x": m.of(x.to(m.device)), "weight": m.of(weight.to(m.device)), "labels": labels.to(m.device)},
                {"reduction": reduction},
                70,
            )

        return case

    edges = {}
    for reduction in ("mean", "none"):
        edges |= {
            f"label at p = 0.9999, {reduction}": sure(reduction),
            f"logits of 1e4, {reduction}": edge(scale=1e4, reduction=reduction),
            f"rows of equal values, {reduction}": edge(scale=0.0, reduction=reduction),
            f"all ignored, {reduction}": edge(ignored=1.1, reduction=reduction),
            f"one token, {reduction}": edge(rows=1, reduction=reduction),
            f"no token, {reduction}": edge(rows=0, reduction=reduction),
            f"one class, {reduction}": edge(vocab=1, reduction=reduction),
        }

    def huge(m):
        m.strided, rows, hidden, vocab = False, 2**20 + 9, 2048, 512
        tensors = {"x": m.of(big(m, rows, hidden)), "weight": m(vocab, hidden), "labels": m.labels(vocab, rows)}
        return Case(tensors, {"reduction": "none"})

    reference = no_chunks(kernels.linear_cross_entropy_reference)
    return Op(
        kernels.linear_cross_entropy,
        reference,
        eager_linear_cross_entropy,
        sizes,
        make,
        edges,
        huge,
        noise=probability_noise,
    )


# Mixture of experts.


def eager_route(logits, *, top_k):
    """MixtralTopKRouter of transformers, less the choice among equals, which torch.topk leaves open."""
    experts = kernels.route_reference(logits, top_k=top_k)[1]
    weights = logits.softmax(-1, dtype=accumulator(logits.dtype)).gather(1, experts.long())
    return weights / weights.sum(-1, keepdim=True), experts


def eager_moe_experts(x, weights, experts, gate_up_proj, down_proj, *, activation="silu"):
    """MixtralExperts of transformers: expert by expert over its own tokens, the sum in the dtype of the weights."""
    y = torch.zeros(x.shape, dtype=weights.dtype, device=x.device)
    for expert in range(down_proj.shape[0]):
        tokens, choice = (experts == expert).nonzero(as_tuple=True)
        gate, up = F.linear(x[tokens], gate_up_proj[expert]).chunk(2, -1)
        out = F.linear(ACTIVATIONS[activation](gate) * up, down_proj[expert])
        y = y.index_add(0, tokens, out * weights[tokens, choice, None])
    return y.to(x.dtype)


def route_noise(case: Case, upstream: list[Tensor]) -> dict[str, Tensor]:
    """What half an ulp of fp32 of each term costs w (dw - sum(w dw)), which cancels where one weight is nearly all."""
    logits = case.tensors["logits"].detach().double()
    weights, experts = kernels.route_reference(logits, **case.options)
    terms = weights * upstream[0].double().abs().amax(-1, keepdim=True) if logits.numel() else weights
    return {"d_logits": torch.zeros_like(logits).scatter(1, experts.long(), 2.0**-24 * terms)}


def route_op() -> Op:
    def sizes(j, draw, interpreted):
        experts = pick(
            [1, 2, 3, 5, 7, 8, 16, 31, 60, 64, 72, 96, 127, 128, 160, 200, 256, 384, 512], j, interpreted, 64
        )
        return {"row": experts, "experts": experts, "top_k": draw.randint(1, min(experts, 8))}

    def make(m, rows, *, experts, top_k, values=None):
        return Case({"logits": m(rows, experts, scale=3.0) if values is None else m.of(values)}, {"top_k": top_k})

    def edge(values):
        return lambda m: make(m, 9, experts=16, top_k=3, values=values().to(m.device))

    edges = {
        "equal logits": edge(lambda: torch.zeros(9, 16)),
        "logits of 1e4": edge(lambda: torch.randn(9, 16) * 1e4),
        "one expert takes all": edge(lambda: torch.eye(16)[:9] * 80),
        "equals among others": edge(lambda: torch.randint(3, (9, 16)).float()),
    }

    def huge(m):
        m.strided = False
        return Case({"logits": m.of(big(m, 2**25 + 9, 64))}, {"top_k": 2})

    return Op(kernels.route, kernels.route_reference, eager_route, sizes, make, edges, huge, noise=route_noise)


def experts_noise(case: Case, upstream: list[Tensor]) -> dict[str, Tensor]:
    """What one rounding of dh = dy @ down, and sums of fp32 one after the other, cost d_weights = sum(dh * h).

    A sum of K terms t errs by eps sqrt(K / 24 * sum(t^2)), however little is left of it. Eager's sum(dy * (down @ h))
    is added in parts, and of as many rounded terms as the tokens are wide, where there may be one dh.
    """
    t = {name: x.detach().double() for name, x in case.tensors.items()}
    experts, dy = case.tensors["experts"], upstream[0].double()
    noise, rounding = torch.zeros_like(t["weights"]), torch.finfo(case.tensors["x"].dtype).eps ** 2 / 12
    for expert, (gate_up, down) in enumerate(zip(t["gate_up_proj"], t["down_proj"], strict=True)):
        tokens, choice = (experts == expert).nonzero(as_tuple=True)
        h = kernels.glu_reference(F.linear(t["x"][tokens], gate_up), activation=case.options["activation"]).square()
        hidden, inner = down.shape
        terms, sums = dy[tokens].square() @ down.square(), (dy[tokens] @ down).square()
        lost = 2.0**-46 / 24 * (hidden * terms + inner * sums) + rounding * sums
        noise[tokens, choice] = (lost * h).sum(-1).sqrt()
    return {"d_weights": noise}


def experts_op() -> Op:
    def sizes(j, draw, interpreted):
        hidden, inner = (draw.choice([1, 8, 20] if interpreted else [1, 8, 33, 64, 96, 136, 256, 512]) for _ in "ab")
        experts = draw.choice([1, 3, 4] if interpreted else [1, 3, 8, 16, 60])
        sizes = {"hidden": hidden, "inner": inner, "experts": experts, "top_k": draw.randint(1, min(4, experts))}
        return {"row": 256 if interpreted else 2**11, "activation": draw.choice(GATED)} | sizes

    def make(m, rows, *, hidden, inner, experts, top_k, activation="silu", logits=None, scale=1.0):
        logits = torch.randn(rows, experts, device=m.device) if logits is None else logits(rows, experts).to(m.device)
        weights, chosen = kernels.route_reference(logits, top_k=top_k)
        tensors = {
            "x": m(rows, hidden, scale=scale),
            "weights": weights.detach().requires_grad_(),
            "experts": chosen,
            "gate_up_proj": m(experts, 2 * inner, hidden, scale=hidden**-0.5),
            "down_proj": m(experts, hidden, inner, scale=inner**-0.5),
        }
        # Squares of products of two normal numbers scatter 9 to 1: a ninth of the elements make up the rms.
        return Case(tensors, {"activation": activation}, max(hidden, 2 * inner, 9), 2 * (hidden + 2 * inner) + rows)

    usual = dict(hidden=24, inner=16, experts=5, top_k=2)
    edges = {
        "all to the same": lambda m: make(m, 20, logits=lambda r, e: torch.arange(e).expand(r, e) * 9.0, **usual),
        "equal weights": lambda m: make(m, 20, logits=lambda r, e: torch.zeros(r, e), **usual),
        "weights of 0 and 1": lambda m: make(m, 20, logits=lambda r, e: torch.randn(r, e) * 1e4, **usual),
        "tokens of zeros": lambda m: make(m, 20, scale=0.0, **usual),
        "tokens of 30": lambda m: make(m, 20, scale=30.0, **usual),
        "one token": lambda m: make(m, 1, **usual),
    }

    def huge(m):
        m.strided, rows, hidden = False, 2**19 + 9, 4096
        x = m.of(big(m, rows, hidden))
        weights = torch.rand(rows, 1, device=m.device).requires_grad_()
        tensors = {"x": x, "weights": weights, "experts": m.integers(0, 2, rows, 1, dtype=torch.int32)}
        projections = {"gate_up_proj": m(2, 32, hidden, scale=hidden**-0.5), "down_proj": m(2, hidden, 16, scale=0.25)}
        return Case(tensors | projections, {})

    reference = kernels.moe_experts_reference
    return Op(kernels.moe_experts, reference, eager_moe_experts, sizes, make, edges, huge, noise=experts_noise)


# Divergences.


def eager_kl_div(input, target, *, reduction="mean", log_target=False):
    dtype = torch.promote_types(input.dtype, target.dtype)
    up = accumulator(dtype)
    loss = F.kl_div(input.to(up), target.to(up), reduction=reduction, log_target=log_target)
    return loss.to(dtype) if reduction == "none" else loss


def term_noise(case: Case, upstream: list[Tensor]) -> dict[str, Tensor]:
    """What 2 ulp of fp32 of each term cost where terms of both signs cancel, in the loss and in log p - log q."""
    x, t = (case.tensors[name].detach().double() for name in ("input", "target"))
    kl, given = "log_target" in case.options, upstream[0].double().abs()
    log_t = t if not kl or case.options["log_target"] else torch.where(t > 0, t, 1.0).log()
    p, q = (t if kl and not case.options["log_target"] else t.exp()), torch.zeros_like(x) if kl else x.exp()
    terms = (p + q) * torch.where(p + q > 0, (log_t - x).abs(), 0)
    divisor, labels = torch.ones((), dtype=x.dtype, device=x.device), case.tensors.get("labels")
    if case.options.get("reduction", "mean") == "mean":
        divisor = divisor * (x.numel() if kl else x.shape[:-1].numel() if labels is None else (labels != IGNORE).sum())
    elif case.options["reduction"] == "batchmean":
        divisor = divisor * x.shape[0]
    divisor, ulps = divisor.clamp(min=1), 2.0**-22
    per_token = not kl and given.dim() > 0
    loss = terms.sum(-1) if per_token else terms.sum() / divisor if given.dim() == 0 else terms
    dy = ulps * (given[..., None] if per_token else given) / divisor
    sizes = 1 + torch.where(p > 0, log_t.abs(), 0) + torch.where(p + q > 0, x.abs(), 0)
    slopes = {"d_target": dy * (sizes if kl and not case.options["log_target"] else p * sizes)}
    return {"output 0": ulps * loss} | slopes | ({} if kl else {"d_input": dy * q})


def kl_op() -> Op:
    def sizes(j, draw, interpreted):
        options = {"reduction": draw.choice(["mean", "batchmean", "sum", "none"]), "log_target": draw.random() < 0.5}
        vocab = pick(VOCABS, j, interpreted)
        return {"row": vocab, "vocab": vocab, "options": options}

    def make(m, rows, *, vocab, options, scale=2.0, target=None):
        lead = m.lead(max(rows, 1) if options["reduction"] == "mean" else rows)
        x, t = torch.randn(2, *lead, vocab, device=m.device) * scale
        t = t.log_softmax(-1) if options["log_target"] else t.softmax(-1) if target is None else target(t)
        return Case({"input": m.of(x.log_softmax(-1)), "target": m.of(t)}, options)

    def edge(reduction="batchmean", log_target=False, rows=9, **more):
        options = {"reduction": reduction, "log_target": log_target}
        return lambda m: make(m, rows, vocab=70, options=options, **more)

    edges = {}
    for log_target in (False, True):
        edges |= {
            f"no token, log_target={log_target}": edge(rows=0, log_target=log_target),
            f"one token, log_target={log_target}": edge(rows=1, log_target=log_target),
            f"equal probabilities, log_target={log_target}": edge(scale=0.01, log_target=log_target),
            f"log probabilities of -1e4, log_target={log_target}": edge(scale=3e3, log_target=log_target),
        }
    edges |= {
        "targets of 0 and 1": edge(target=lambda t: (t == t.amax(-1, keepdim=True)).float()),
        "targets of 0 and 1, none": edge("none", target=lambda t: (t == t.amax(-1, keepdim=True)).float()),
    }

    def huge(m):
        m.strided, rows, vocab = False, 16800, 128256
        x, t = big(m, rows, vocab).neg_(), big(m, rows, vocab).abs_()
        return Case({"input": m.of(x), "target": m.of(t, train=False)}, {"reduction": "none"})

    return Op(kl_div, kl_div_reference, eager_kl_div, sizes, make, edges, huge, noise=term_noise)


def eager_jsd(input, target, *, labels=None, beta=0.5, reduction="mean"):
    """generalized_jsd_loss of TRL, on log-probabilities cast up."""
    up = accumulator(torch.promote_types(input.dtype, target.dtype))
    x, y = input.to(up), target.to(up)
    if beta == 0:
        loss = F.kl_div(x, y, reduction="none", log_target=True)
    elif beta == 1:
        loss = F.kl_div(y, x, reduction="none", log_target=True)
    else:
        share = torch.tensor(beta, dtype=up, device=x.device)
        mixture = torch.logsumexp(torch.stack([x + torch.log1p(-share), y + torch.log(share)]), 0)
        loss = beta * F.kl_div(mixture, y, reduction="none", log_target=True)
        loss = loss + (1 - beta) * F.kl_div(mixture, x, reduction="none", log_target=True)
    loss = loss.sum(-1)
    valid = torch.ones_like(loss, dtype=torch.bool) if labels is None else labels != IGNORE
    loss = loss.where(valid, 0)
    return {"none": loss, "sum": loss.sum(), "mean": loss.sum() / valid.sum()}[reduction]


def divergence_options(draw: random.Random) -> dict[str, Any]:
    return {"beta": draw.choice([0.0, 0.1, 0.5, 0.5, 1.0]), "reduction": draw.choice(["mean", "sum", "none"])}


def jsd_op() -> Op:
    def sizes(j, draw, interpreted):
        vocab = pick(VOCABS, j, interpreted)
        return {"row": vocab, "vocab": vocab, "options": divergence_options(draw), "labelled": draw.random() < 0.6}

    def make(m, rows, *, vocab, options, labelled=False, scale=2.0, same=False, ignored=None):
        lead = m.lead(rows)
        x, y = (torch.randn(2, *lead, vocab, device=m.device) * scale).log_softmax(-1)
        tensors = {"input": m.of(x), "target": m.of(x if same else y)}
        if labelled:
            tensors["labels"] = m.labels(vocab, *lead, ignored=ignored)
        return Case(tensors, options, vocab)

    def edge(beta, reduction="mean", rows=9, **more):
        options = {"beta": beta, "reduction": reduction}
        return lambda m: make(m, rows, vocab=70, options=options, **more)

    edges = {}
    for beta in (0.0, 0.5, 1.0):
        edges |= {
            f"no token, beta={beta}": edge(beta, rows=0),
            f"one token, beta={beta}": edge(beta, rows=1),
            f"all ignored, beta={beta}": edge(beta, labelled=True, ignored=1.1),
            f"rows of equal values, beta={beta}": edge(beta, scale=0.0),
            f"log probabilities of -1e4, beta={beta}": edge(beta, scale=3e3),
        }

    def huge(m):
        m.strided, rows, vocab = False, 16800, 128256
        x, y = (m.of(big(m, rows, vocab).abs_().neg_(), train=train) for train in (True, False))
        return Case({"input": x, "target": y}, {"reduction": "none"})

    return Op(jsd, jsd_reference, eager_jsd, sizes, make, edges, huge, noise=term_noise)


def eager_linear_jsd(
    student_x, student_weight, teacher_x, teacher_weight, *, labels=None, student_bias=None, teacher_bias=None,
    temperature=1.0, weight_hard=0.0, weight_soft=1.0, beta=0.5, reduction="mean", accum_dtype=None, workspace_bytes=None,
):  # fmt: skip
    z = F.linear(student_x, student_weight, student_bias)
    u = F.linear(teacher_x, teacher_weight, teacher_bias)[..., : student_weight.shape[0]]
    z, u = (t.to(accumulator(t.dtype)) for t in (z, u))
    log_p, log_q = ((t / temperature).log_softmax(-1) for t in (z, u))
    loss = weight_soft * eager_jsd(log_p, log_q, labels=labels, beta=beta, reduction=reduction)
    if weight_hard:
        hard = F.cross_entropy(z.flatten(0, -2), labels.flatten(), reduction=reduction)
        loss = loss + weight_hard * hard.view(loss.shape)
    return loss


def linear_jsd_op() -> Op:
    def sizes(j, draw, interpreted):
        options = divergence_options(draw) | {"temperature": draw.choice([1.0, 2.0, 0.7])}
        if draw.random() < 0.4:
            options |= {"weight_hard": 0.3, "weight_soft": 0.7}
        return head_sizes(j, draw, interpreted) | {"options": options, "padded": draw.choice([0, 0, 5])}

    def make(m, rows, *, vocab, hidden, workspace_bytes=2**29, options, padded=0, ignored=None, scale=1.0, same=False):
        lead, wide = m.lead(rows), hidden if same else hidden + 3
        tensors = {
            "student_x": m(*lead, hidden, scale=scale * hidden**-0.5),
            "student_weight": m(vocab, hidden),
            "teacher_x": m(*lead, wide, scale=scale * wide**-0.5, train=False),
            "teacher_weight": m(vocab + padded, wide, train=False),
        }
        if same:
            tensors["teacher_x"], tensors["teacher_weight"] = (tensors[n].detach() for n in list(tensors)[:2])
        if options.get("weight_hard") or ignored is not None or m.draw.random() < 0.5:
            tensors["labels"] = m.labels(vocab, *lead, ignored=ignored)
        return Case(tensors, options | {"workspace_bytes": workspace_bytes}, vocab, max(vocab, hidden, rows))

    def edge(beta, rows=9, vocab=70, **more):
        return lambda m: make(m, rows, vocab=vocab, hidden=16, options={"beta": beta}, **more)

    edges = {}
    for beta in (0.0, 0.5, 1.0):
        edges |= {
            f"no token, beta={beta}": edge(beta, rows=0),
            f"one token, beta={beta}": edge(beta, rows=1),
            f"one class, beta={beta}": edge(beta, vocab=1),
            f"all ignored, beta={beta}": edge(beta, ignored=1.1),
            f"rows of equal values, beta={beta}": edge(beta, scale=0.0),
            # fp16 has steps of 8 at 1e4: what the logits are is decided by how they are summed.
            f"large logits, beta={beta}": lambda m, b=beta: edge(b, scale=1e2 if m.dtype == torch.float16 else 1e4)(m),
            f"the teacher's own, beta={beta}": edge(beta, same=True),
        }

    def huge(m):
        m.strided, rows, hidden, vocab = False, 2**20 + 9, 2048, 512
        teacher = {"teacher_x": m(rows, 16, train=False), "teacher_weight": m(vocab, 16, train=False)}
        tensors = {"student_x": m.of(big(m, rows, hidden)), "student_weight": m(vocab, hidden, scale=hidden**-0.5)}
        return Case(tensors | teacher, {"reduction": "none"})

    reference = no_chunks(linear_jsd_reference)
    return Op(linear_jsd, reference, eager_linear_jsd, sizes, make, edges, huge, noise=probability_noise)


# Log probabilities, embedding, and products of ternary weights.


def eager_linear_logprobs(
    x, weight, labels, *, bias=None, temperature=1.0, softcap=None, return_entropy=False, return_logits_mean=False,
    accum_dtype=None, workspace_bytes=None,
):  # fmt: skip
    """selective_log_softmax of TRL, and its entropy_from_logits, of logits cast up."""
    logits = F.linear(x, weight, bias)
    logits = logits.to(accumulator(logits.dtype))
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    valid, log_p = labels != IGNORE, (logits / temperature).log_softmax(-1)
    logprobs = log_p.gather(-1, labels.where(valid, 0)[..., None])[..., 0].where(valid, 0)
    if not (return_entropy or return_logits_mean):
        return logprobs
    entropy = -(log_p.exp() * log_p).sum(-1).where(valid, 0)
    mean = logits.detach().mean(-1).where(valid, 0)
    return logprobs, entropy if return_entropy else None, mean if return_logits_mean else None


def logprobs_op() -> Op:
    def sizes(j, draw, interpreted):
        options = {
            "temperature": draw.choice([1.0, 0.6, 2.0]),
            "softcap": draw.choice([None, None, 30.0]),
            "return_entropy": draw.random() < 0.4,
            "return_logits_mean": draw.random() < 0.3,
        }
        return head_sizes(j, draw, interpreted) | {"options": options, "bias": draw.random() < 0.3}

    def make(m, rows, *, vocab, hidden, workspace_bytes=2**29, options, bias=False, ignored=None, scale=1.0):
        lead = m.lead(rows)
        x, weight = m(*lead, hidden, scale=scale * hidden**-0.5), m(vocab, hidden)
        tensors = {"x": x, "weight": weight, "labels": m.labels(vocab, *lead, ignored=ignored)}
        if bias:
            tensors["bias"] = m(vocab)
        return Case(tensors, options | {"workspace_bytes": workspace_bytes}, vocab, max(vocab, hidden, rows))

    def edge(rows=9, vocab=70, entropy=False, **more):
        return lambda m: make(m, rows, vocab=vocab, hidden=16, options={"return_entropy": entropy}, **more)

    def sure(m):
        logits, labels = confident(9, 70, 0.9999)
        weight = torch.zeros(70, 16)
        weight[:, :9] = logits.t()
        tensors = {"x": m.of(torch.eye(9, 16).to(m.device)), "weight": m.of(weight.to(m.device))}
        return Case(tensors | {"labels": labels.to(m.device)}, {"return_entropy": True}, 70)

    edges = {"label at p = 0.9999": sure}
    for entropy in (False, True):
        edges |= {
            f"no token, entropy={entropy}": edge(rows=0, entropy=entropy),
            f"one token, entropy={entropy}": edge(rows=1, entropy=entropy),
            f"one class, entropy={entropy}": edge(vocab=1, entropy=entropy),
            f"all ignored, entropy={entropy}": edge(ignored=1.1, entropy=entropy),
            f"rows of equal values, entropy={entropy}": edge(scale=0.0, entropy=entropy),
            f"logits of 1e4, entropy={entropy}": edge(scale=1e4, entropy=entropy),
        }

    def huge(m):
        m.strided, rows, hidden, vocab = False, 2**20 + 9, 2048, 512
        weight = m(vocab, hidden, scale=hidden**-0.5)
        return Case({"x": m.of(big(m, rows, hidden)), "weight": weight, "labels": m.labels(vocab, rows)}, {})

    reference = no_chunks(linear_logprobs_reference)
    return Op(linear_logprobs, reference, eager_linear_logprobs, sizes, make, edges, huge, noise=probability_noise)


def eager_embedding(ids, weight, *, padding_idx=None, scale=None):
    """torch.nn.Embedding, and Gemma's factor, which transformers rounds to the weight's dtype."""
    rows = F.embedding(ids, weight, padding_idx)
    return rows if scale is None else rows * torch.tensor(scale, dtype=weight.dtype, device=weight.device)


def embedding_op() -> Op:
    def sizes(j, draw, interpreted):
        width = pick(WIDTHS[:-2], j, interpreted)
        vocab = draw.choice([v for v in VOCABS if v * width <= (2**11 if interpreted else 2**24)])
        options = {"padding_idx": draw.choice([None, 0, -1]), "scale": draw.choice([None, None, 45.25, 0.5])}
        return {"row": width, "width": width, "vocab": vocab, "options": options, "few": draw.random() < 0.3}

    def make(m, rows, *, width, vocab, options, few=False, ids=None):
        """few: of the ids of long texts, most are the same few."""
        ids = m.integers(0, min(vocab, 3) if few else vocab, *m.lead(rows)) if ids is None else ids.to(m.device)
        return Case({"ids": ids, "weight": m(vocab, width)}, options)

    def edge(ids, vocab=40, **options):
        return lambda m: make(m, 0, width=33, vocab=vocab, options=options, ids=ids)

    edges = {
        "no id": edge(torch.zeros(0, dtype=torch.int64)),
        "one id": edge(torch.tensor([7])),
        "all the same": edge(torch.full((3000,), 5)),
        "all padding": edge(torch.full((30,), 5), padding_idx=5),
        "the first and the last row": edge(torch.tensor([0, 39] * 100)),
        "one row": edge(torch.zeros(50, dtype=torch.int64), vocab=1),
        "int32": edge(torch.arange(40, dtype=torch.int32).repeat(9)),
    }

    def huge(m):
        m.strided = False
        return Case({"ids": m.integers(0, 1000, 2**18 + 9), "weight": m(1000, 8192)}, {})

    # The scales drawn are exact in every dtype.
    return Op(embedding, embedding_reference, eager_embedding, sizes, make, edges, huge)


def exact_int2_matmul(a, packed, *, scale_a=None, scale_w=None, bias=None, out_features=None, out_dtype=None):
    out = a.double() @ unpack_int2(packed, out_features).double().t()
    out = out if scale_a is None else out * scale_a.double()[..., None]
    out = out if scale_w is None else out * scale_w.double()
    return out if bias is None else out + bias.double()


def eager_int2_matmul(a, packed, *, scale_a=None, scale_w=None, bias=None, out_features=None, out_dtype=torch.bfloat16):
    """BitLinear of transformers: the weight unpacked, a product in the dtype of the output, then the scales."""
    out = F.linear(a.to(out_dtype), unpack_int2(packed, out_features).to(out_dtype))
    out = out if scale_a is None else out * scale_a[..., None]
    out = out if scale_w is None else out * scale_w
    return (out if bias is None else out + bias).to(out_dtype)


def int2_op() -> Op:
    def sizes(j, draw, interpreted):
        k = draw.choice([1, 7, 64] if interpreted else [1, 7, 33, 64, 130, 256, 1000, 2560, 4096, 6912])
        n = draw.choice([1, 4, 30] if interpreted else [1, 4, 30, 100, 256, 640, 2560, 4099])
        scales = [draw.random() < 0.6 for _ in "awb"]
        return {"row": max(k, n), "k": k, "n": n, "scales": scales}

    def make(m, rows, *, k, n, scales=(True, True, True), low=-128, weight=None):
        lead = m.lead(rows)
        weight = m.integers(-1, 2, n, k, dtype=torch.int8) if weight is None else weight.to(m.device)
        tensors = {"a": m.integers(low, 128, *lead, k, dtype=torch.int8), "packed": pack_int2(weight)}
        for name, shape, wanted in zip(("scale_a", "scale_w", "bias"), (lead, (n,), (n,)), scales, strict=True):
            if wanted:
                tensors[name] = torch.rand(shape, device=m.device) * 0.1 + 0.01
        return Case(tensors, {"out_features": n, "out_dtype": m.dtype})

    edges = {
        "the largest sums": lambda m: make(m, 5, k=700, n=9, low=127, weight=torch.ones(9, 700, dtype=torch.int8),
                                           scales=(False, True, False)),
        "zero weights": lambda m: make(m, 5, k=70, n=9, weight=torch.zeros(9, 70, dtype=torch.int8)),
        "one row": lambda m: make(m, 1, k=70, n=9),
        "no row": lambda m: make(m, 0, k=70, n=9),
    }  # fmt: skip

    def huge(m):
        rows, k, n = 2**17 + 9, 64, 16388
        tensors = {"a": m.integers(-128, 128, rows, k, dtype=torch.int8)}
        weight = m.integers(-1, 2, n, k, dtype=torch.int8)
        return Case(tensors | {"packed": pack_int2(weight)}, {"out_features": n, "out_dtype": torch.bfloat16})

    return Op(int2_matmul, exact_int2_matmul, eager_int2_matmul, sizes, make, edges, huge)


def eager_quantize_int8(x):
    """activation_quant of transformers, x cast up."""
    x = x.to(accumulator(x.dtype))
    largest = x.abs().amax(-1, keepdim=True).clamp(min=1e-5)
    return (x * (127 / largest)).round().clamp(-128, 127).to(torch.int8), largest[..., 0] / 127


def exact_quantize_int8(x):
    """Before it is rounded to integers: near a tie either is as good."""
    largest = x.abs().amax(-1, keepdim=True).clamp(min=1e-5)
    return x * (127 / largest), largest[..., 0] / 127


def quantize_op() -> Op:
    def sizes(j, draw, interpreted):
        width = pick(WIDTHS, j, interpreted)
        return {"row": width, "width": width}

    def make(m, rows, *, width, scale=1.0):
        return Case({"x": m(*m.lead(rows), width, scale=scale, train=False)}, {}, width)

    edges = {
        "zeros": lambda m: make(m, 9, width=300, scale=0.0),
        "1e4": lambda m: make(m, 9, width=300, scale=1e4),
        "tiny": lambda m: make(m, 9, width=300, scale=1e-5),
    }

    def huge(m):
        m.strided = False
        return Case({"x": m.of(big(m, 2**19 + 9, 4096), train=False)}, {})

    return Op(quantize_int8, exact_quantize_int8, eager_quantize_int8, sizes, make, edges, huge)


HALF = torch.bfloat16, torch.float16
OPS: dict[str, Op] = {
    "rms_norm": norm(kernels.rms_norm, kernels.rms_norm_reference, eager_rms_norm, add=False, layer=False),
    "add_rms_norm": norm(
        kernels.add_rms_norm, kernels.add_rms_norm_reference, after_sum(eager_rms_norm), add=True, layer=False
    ),
    "layer_norm": norm(kernels.layer_norm, kernels.layer_norm_reference, eager_layer_norm, add=False, layer=True),
    "add_layer_norm": norm(
        kernels.add_layer_norm, kernels.add_layer_norm_reference, after_sum(eager_layer_norm), add=True, layer=True
    ),
    "rope": rotation(kernels.rope, kernels.rope_reference, eager_rope, packed=True),
    "rope_qk": rotation(kernels.rope_qk, kernels.rope_qk_reference, eager_rope_qk, packed=False),
    "glu": unit(kernels.glu, kernels.glu_reference, eager_glu, gated=True, linear=False),
    "glu of two tensors": unit(
        kernels.glu, kernels.glu_reference, eager_glu, gated=True, linear=False, separate=True
    ),
    "glu_linear": unit(
        kernels.glu_linear, kernels.glu_linear_reference, linear_after(eager_glu), gated=True, linear=True
    ),
    "glu_linear of two tensors": unit(
        kernels.glu_linear, kernels.glu_linear_reference, linear_after(eager_glu), gated=True, linear=True,
        separate=True,
    ),
    "activate": unit(kernels.activate, kernels.activate_reference, eager_activate, gated=False, linear=False),
    "activation_linear": unit(
        kernels.activation_linear, kernels.activation_linear_reference, linear_after(eager_activate),
        gated=False, linear=True,
    ),
    "gated_mlp": whole_unit(gated_mlp, gated_mlp_reference, eager_glu, gated=True),
    "gated_mlp of two weights": whole_unit(
        of_two_weights(gated_mlp), of_two_weights(gated_mlp_reference), eager_glu, gated=True, separate=True
    ),
    "mlp": whole_unit(mlp, mlp_reference, eager_activate, gated=False),
    "attention": attention_op(OURS, dtypes=HALF, ordered=True),
    "attention of torch": attention_op(
        [form for form in FORMS if form not in OURS], dtypes=(*HALF, torch.float32), ordered=False
    ),
    "cross_entropy": loss_op(),
    "linear_cross_entropy": linear_loss_op(),
    "linear_logprobs": logprobs_op(),
    "kl_div": kl_op(),
    "jsd": jsd_op(),
    "linear_jsd": linear_jsd_op(),
    "embedding": embedding_op(),
    "int2_matmul": int2_op(),
    "quantize_int8": quantize_op(),
    "route": route_op(),
    "moe_experts": experts_op(),
}  # fmt: skip


COMPLETE: dict[str, dict[str, Any]] = {
    **{name: {"width": 8, "affine": ("weight",)} for name in ("rms_norm", "add_rms_norm")},
    **{name: {"width": 8, "affine": ("weight", "bias")} for name in ("layer_norm", "add_layer_norm")},
    **{name: {"heads": 2, "kv_heads": 1, "dim": 8, "rotary": 8, "axes": 1} for name in ("rope", "rope_qk")},
    **{
        name + of: {"width": 8, "options": {"activation": "silu"}}
        for name in ("glu", "glu_linear")
        for of in ("", " of two tensors")
    },
    **{name: {"width": 8, "options": {"activation": "gelu"}} for name in ("activate", "activation_linear")},
    **{
        name: {"width": 8, "inner": 4, "options": {"activation": "silu"}}
        for name in ("gated_mlp", "gated_mlp of two weights")
    },
    "mlp": {"width": 8, "inner": 4, "options": {"activation": "gelu"}},
    "attention": {"heads": 2, "kv_heads": 1, "dim": 8, "form": "key mask"},
    "attention of torch": {"heads": 2, "kv_heads": 1, "dim": 8, "form": "causal"},
    "cross_entropy": {"vocab": 7, "options": {}, "weighted": True},
    "linear_cross_entropy": {"vocab": 7, "hidden": 5, "options": {"reduction": "none"}, "bias": True},
    "linear_logprobs": {"vocab": 7, "hidden": 5, "options": {"return_entropy": True}, "bias": True},
    "kl_div": {"vocab": 7, "options": {"reduction": "mean", "log_target": False}},
    "jsd": {"vocab": 7, "options": {}, "labelled": True},
    "linear_jsd": {"vocab": 7, "hidden": 5, "options": {"weight_hard": 0.5, "reduction": "none"}},
    "embedding": {"width": 8, "vocab": 7, "options": {}},
    "int2_matmul": {"k": 8, "n": 5},
    "quantize_int8": {"width": 8},
    "route": {"experts": 5, "top_k": 2},
    "moe_experts": {"hidden": 8, "inner": 4, "experts": 5, "top_k": 2},
}
"""Sizes of a small case of each op that has every tensor argument there is."""


def complete(name: str, m: Maker) -> Case:
    m.strided = False
    m.lead = lambda rows: (rows,)  # type: ignore[method-assign]
    return OPS[name].make(m, 6, **COMPLETE[name])


def every(*, of: Callable[[Op], bool] = lambda op: True) -> list[str]:
    return [name for name, op in OPS.items() if of(op)]


def public_ops() -> set[str]:
    """What `ligermodels.kernels` offers that computes: neither references nor the types of results."""
    return {
        name
        for name in kernels.__all__
        if not name.endswith("_reference") and not isinstance(getattr(kernels, name), type)
    }


def medium(name: str, m: Maker, choice: int = 0) -> Case:
    """A case of usual size, contiguous, for what is not about shapes."""
    m.strided = False
    cases = [case for case in drawn(name, interpreted=m.device == "cpu") if case[3] > 3]
    cases = [case for case in cases if case[0] == (3 + 2 * choice) % (1 + max(case[0] for case in cases))]
    _, seed, sizes, rows, _ = cases[len(cases) // 2]
    torch.manual_seed(seed)
    return OPS[name].make(m, rows, **sizes)
