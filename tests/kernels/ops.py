"""The table of ops: the choices for each, the eager code that it replaces, where it may be hard.

`OPS` is what `test_every_op.py` walks over. An entry (see `cases.Op`) holds the op, its reference, the eager code of
the same dtype that it replaces (as transformers or torch.nn.functional have it), what sizes and options may be,
adversarial values, and a case past 2^31 elements. All calls are by keyword: op, reference and eager take the same
arguments.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ligermodels import kernels
from ligermodels.experimental import bitnet
from ligermodels.kernels._triton import accumulator
from ligermodels.kernels.flash_attention import flash_attention
from ligermodels.kernels.linear import linear, packed_linear
from tests.kernels.cases import IGNORE, Case, Maker, Op, Sizes, drawn

WIDTHS = [
    1, 2, 3, 7, 16, 31, 64, 97, 127, 128, 129, 257, 512, 769, 896, 1023, 1025, 1536, 2048, 2304, 3072, 3584, 4096,
    5120, 8191, 8192, 11008, 14336, 16384, 18944, 65537, 131072,
]  # fmt: skip
VOCABS = [
    1, 2, 3, 7, 8, 33, 63, 97, 127, 129, 256, 511, 513, 1000, 1023, 2049, 4099, 8191, 16384, 30522, 32000, 32064,
    50257, 65537, 128256, 151936, 152064, 256000, 262144,
]  # fmt: skip
FEW_WIDTHS = [1, 7, 64, 129]
FEW_VOCABS = [1, 7, 65]
HALF = torch.bfloat16, torch.float16


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
            "wide, and one row": edge(lambda r, n: torch.randn(r, n), width=20001, rows=1),
        },
        past_2_31=huge,
        noise=functools.partial(row_noise, layer=layer),
    )  # fmt: skip


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
    def rotary_dims(dim, share):
        return max(2, int(dim * share) // 2 * 2)

    def make(m, rows, *, kv_heads, groups, dim, share=1.0, axes=0, scale=1.0, positions=None):
        """axes: 0 for tables per token, else positions that the kernel gathers, on so many axes."""
        batch = 2 if rows % 2 == 0 and rows else 1
        length, heads, rotary = rows // batch, kv_heads * groups, rotary_dims(dim, share)
        if positions is None:
            positions = m.integers(0, 8192, m.draw.choice([1, batch]), length)
        options: dict[str, Any] = {}
        tables = {}
        if axes:
            shape = (axes,) * (axes > 1) + positions.shape
            tables["position_ids"] = m.ids(m.integers(0, 500, *shape))
            positions = torch.arange(500, device=m.device)
            if axes > 1:
                options["sections"] = [rotary // 2 - axes + 1] + [1] * (axes - 1)
        angles = positions[..., None] * 10000.0 ** (-torch.arange(rotary // 2, device=m.device) * 2 / rotary)
        tables = {"cos": angles.cos(), "sin": angles.sin()} | tables
        if packed:
            qkv = m(batch, length, (heads + 2 * kv_heads) * dim, scale=scale)
            return Case({"qkv": qkv} | tables, {"num_heads": heads, "num_kv_heads": kv_heads} | options)
        q, k = (m(batch, length, n, dim, scale=scale) for n in (heads, kv_heads))
        return Case({"q": q, "k": k} | tables, options)

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
            "share": [1.0, 1.0, 0.4, 0.8], "axes": [0, 0, 1, 1, 2, 3],
        },
        complete={"kv_heads": 1, "groups": 2, "dim": 8, "axes": 1},
        row=lambda chosen: chosen["kv_heads"] * (chosen["groups"] + 2) * chosen["dim"],
        fits=lambda chosen: chosen["axes"] <= rotary_dims(chosen["dim"], chosen["share"]) // 2,
        edges={
            "values of 1e4": lambda m: make(m, 6, scale=1e4, **usual),
            "position zero": lambda m: make(m, 6, positions=torch.zeros(1, 3, device=m.device), **usual),
            "far positions": lambda m: make(m, 6, positions=m.integers(10**6, 10**7, 1, 3), **usual),
            "one token": lambda m: make(m, 1, **usual),
        },
        past_2_31=huge,
    )  # fmt: skip


# Activations and gated MLPs, alone and with the linear layer that reads them.

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
    return ACTIVATIONS[activation](gate) * up


def eager_activate(x, *, activation):
    return ACTIVATIONS[activation](x)


def linear_after(activation):
    def eager(*, weight, bias=None, **rest):
        return F.linear(activation(**rest), weight, bias)

    return eager


def activation_op(call, reference, eager, *, gated: bool, with_linear: bool, separate: bool = False) -> Op:
    first, parts = ("gate_up", 2) if gated else ("x", 1)
    names = GATED if gated else PLAIN

    def make(m, rows, *, width, out=64, bias=True, values=None, **options):
        values = torch.randn(*m.lead(rows), parts * width, device=m.device) * 3 if values is None else values
        tensors = {first: m.of(values)}
        if separate:
            tensors = {first: m.of(values[..., :width]), "up": m.of(values[..., width:])}
        if with_linear:
            tensors["weight"] = m(out, width, scale=width**-0.5)
            if bias:
                tensors["bias"] = m(out)
        return Case(tensors, options, terms=max(width, out, rows) if with_linear else 1)

    def edge(values, activation):
        def case(m):
            x = torch.tensor(values)[torch.randint(len(values), (9, 50))] * (1 + 0.02 * torch.randn(9, 50))
            x = torch.cat([x, torch.randn(9, 50)], -1) if gated else x
            return make(m, 9, width=50, activation=activation, values=x.to(m.device))

        return case

    def huge(m):
        m.strided, rows, width = False, 2**18 + 9, 8192
        tensors = {first: m.big(rows, parts * width)}
        if separate:
            tensors = {first: m.big(rows, width), "up": m.big(rows, width)}
        if with_linear:
            tensors |= {"weight": m(16, width, scale=width**-0.5), "bias": m(16)}
        return Case(tensors, {"activation": "gelu_tanh"})

    choices: dict[str, Any] = {"width": Sizes(WIDTHS[:-2], [*FEW_WIDTHS, 1030]), "activation": names}
    if with_linear:
        choices |= {"out": [1, 7, 64, 300], "bias": [False, True]}
    return Op(
        call, reference, eager, make, choices,
        complete={"width": 8, "activation": names[0]},
        row=lambda chosen: parts * chosen["width"],
        more={"activation": [name for name in ACTIVATIONS if name not in names]},
        edges={
            f"{what}, {name}": edge(values, name)
            for name in names
            for what, values in {
                "zeros": [0.0, -0.0],
                "far tails": [-200.0, -100.0, -30.0, 30.0, 100.0, 200.0],
                "near tails": [-13.0, -9.0, -6.0, -5.0, -4.0, -3.0],
                "1e4": [1e4, -1e4, 1.0],
                "near zero": [1e-3, -1e-3, 1e-5, 2e-4],
            }.items()
        },
        past_2_31=huge,
        matmuls=with_linear,
    )  # fmt: skip


def mlp_op(call, reference, eager_activation, *, gated: bool, separate: bool = False) -> Op:
    """An MLP with its linear layers; with recompute, in tiles of 128 tokens. separate: gate and up are two weights."""
    layers = ("gate", "up", "down") if separate else ("gate_up", "down") if gated else ("fc1", "fc2")
    names = GATED if gated else PLAIN

    def plain(op):
        return lambda *, recompute=False, workspace_bytes=0, **rest: op(**rest)

    def eager(x, *, activation, **weights):
        *first, (w2, b2) = ((weights[f"{name}_weight"], weights.get(f"{name}_bias")) for name in layers)
        h = torch.cat([F.linear(x, w1, b1) for w1, b1 in first], -1)
        return F.linear(eager_activation(h, activation=activation), w2, b2)

    def make(m, rows, *, width, inner, activation, out=7, bias=True, tiles=False, scale=2.0):
        tensors = {"x": m(*m.lead(rows), width, scale=scale)}
        first = [(inner, width)] * 2 if separate else [(inner * (1 + gated), width)]
        for name, shape in zip(layers, [*first, (out, inner)], strict=True):
            tensors[f"{name}_weight"] = m(*shape, scale=shape[1] ** -0.5)
            if bias and not (bias == "some" and name == layers[0]):
                tensors[f"{name}_bias"] = m(shape[0], scale=min(scale, 1.0))
        # Errors of z, h and dz, which are rows x inner numbers, are those of all sums over them.
        shared = max(1, width // max(1, min(rows, inner * (1 + gated))), out // max(1, min(rows, inner)))
        options = {"activation": activation} | ({"recompute": True, "workspace_bytes": 1} if tiles else {})
        return Case(tensors, options, shared, max(width, inner * (1 + gated), out, rows))

    def edge(scale, activation):
        return lambda m: make(m, 9, width=33, inner=50, activation=activation, bias=False, scale=scale)

    def huge(m):
        m.strided, rows, width = False, 2**18 + 9, 8192  # x, and all that is made of it
        case = make(m, 2, width=width, inner=4096 * (2 - gated), activation="gelu_tanh")
        return Case({**case.tensors, "x": m.big(rows, width)}, case.options)

    return Op(
        call, plain(reference), plain(eager), make,
        choices={
            "width": Sizes(WIDTHS[:-6], FEW_WIDTHS), "inner": Sizes([1, 7, 64, 300, 1000, 4096], [1, 7, 64]),
            "out": [1, 64, 300], "activation": names, "bias": [False, True], "tiles": [False, True],
        },
        complete={"width": 8, "inner": 4, "activation": names[0]},
        row=lambda chosen: chosen["width"] + chosen["out"] + 3 * chosen["inner"],
        more={"bias": ["some"]},
        few_rows=(0, 1, 9, 300),
        edges={
            f"{what}, {name}": edge(scale, name)
            for name in names
            for what, scale in {"zeros": 0.0, "far tails": 60.0, "near zero": 1e-3}.items()
        },
        past_2_31=huge,
        noise=functools.partial(mlp_noise, gated=gated),
        matmuls=True,
    )  # fmt: skip


def of_two_weights(op):
    """gated_mlp, or its reference, with the two weights and biases as arguments of their own."""

    def call(x, *, gate_weight, up_weight, down_weight, gate_bias=None, up_bias=None, down_bias=None, **options):
        biases = None if gate_bias is None and up_bias is None else (gate_bias, up_bias)
        return op(x, (gate_weight, up_weight), down_weight, biases, down_bias, **options)

    return call


def mlp_noise(case: Case, upstream: list[Tensor], *, gated: bool) -> dict[str, Tensor]:
    """What one rounding of z (the first layer's output), h and their gradients dz and dh costs: of few tokens, or of
    equal ones, eager's roundings may happen to cancel."""
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


# Linear layers: after a norm, whose output is not saved, and several of one input.


def linear_after_norm(op):
    def call(x, norm, weight, bias=None):
        return op(kernels.rms_norm(x, norm), weight, bias)

    return call


def exact_linear_after_norm(x, norm, weight, bias=None):
    return F.linear(kernels.rms_norm_reference(x, norm), weight, bias)


def three_layers(op):
    """packed_linear of three weights as arguments of their own."""

    def call(x, **rest):
        biases = [rest.get(f"bias{i}") for i in range(3)]
        return op(x, [rest[f"weight{i}"] for i in range(3)], None if biases == [None] * 3 else biases)

    return call


def one_by_one(x, weights, biases):
    return torch.cat([F.linear(x, w, b) for w, b in zip(weights, biases or [None] * len(weights), strict=True)], -1)


def linear_op(call, reference, eager, *, packed: bool) -> Op:
    def make(m, rows, *, width, out, bias=True):
        tensors = {"x": m(*m.lead(rows), width)}
        if not packed:
            tensors["norm"] = m(width)
        for i, columns in enumerate((out, out + 2, 1) if packed else (out,)):
            suffix = str(i) if packed else ""
            tensors[f"weight{suffix}"] = m(columns, width, scale=width**-0.5)
            if bias and not (bias == "some" and i == 0):
                tensors[f"bias{suffix}"] = m(columns)
        return Case(tensors, {}, width if not packed else 1, max(width, rows, 2 * out))

    return Op(
        call, reference, eager, make,
        choices={
            "width": Sizes(WIDTHS[3:-6], FEW_WIDTHS), "out": Sizes([1, 7, 64, 300, 1024], [1, 7, 64]),
            "bias": [False, True],
        },
        complete={"width": 8, "out": 5},
        row=lambda chosen: chosen["width"] + 2 * chosen["out"],
        more={"bias": ["some"]} if packed else {},
        noise=lambda case, upstream: {} if packed else norm_noise(case, upstream),
        matmuls=True,
        checks=False,
    )  # fmt: skip


def norm_noise(case: Case, upstream: list[Tensor]) -> dict[str, Tensor]:
    """`row_noise` of the gradient of a norm that a linear layer reads."""
    t = {name: x.detach() for name, x in case.tensors.items()}
    dy = upstream[0].double() @ t["weight"].double()
    norm_alone = Case({"x": t["x"], "weight": t["norm"]}, {})
    return {"d_x": row_noise(norm_alone, [dy], layer=False)["d_x"]}


# Attention: as `attention` chooses its engine, and our kernels alone, which it leaves out where torch's are faster.


def visible(q, k, *, causal=True, window=None, key_mask=None, cu_seqlens=None, padding=None) -> Tensor:
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
    if padding is not None:
        seen = seen & ~(padding[:, None, :, None] & padding[:, None, None])
    if key_mask is not None or padding is not None:
        seen = seen | (~seen.any(-1, keepdim=True) & (keys == at))
    return seen


def eager_attention(q, k, v, *, softcap=None, scale=None, causal=True, **masks):
    """sdpa_attention_forward of transformers; with a softcap, which that has not, its eager_attention_forward."""
    length, num_keys, groups = q.shape[1], k.shape[1], q.shape[2] // k.shape[2]
    seen = visible(q, k, causal=causal, **masks)
    q, k, v = (x.transpose(1, 2) for x in (q, k.repeat_interleave(groups, 2), v.repeat_interleave(groups, 2)))
    if softcap is None and bool(seen.all()):
        return F.scaled_dot_product_attention(q, k, v, scale=scale).transpose(1, 2)
    if softcap is None and length == num_keys and causal and not any(x is not None for x in masks.values()):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale).transpose(1, 2)
    if softcap is None:
        mask = seen.expand(q.shape[0], 1, length, num_keys)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale).transpose(1, 2)
    scores = q @ k.transpose(2, 3) * (q.shape[-1] ** -0.5 if scale is None else scale)
    scores = softcap * torch.tanh(scores / softcap)
    weights = scores.masked_fill(~seen, float("-inf")).softmax(-1, dtype=accumulator(q.dtype)).to(q.dtype)
    return (weights @ v).transpose(1, 2)


def our_attention(q, k, v, *, scale=None, **options):
    """`flash_attention` with the defaults of `attention`, which it has not."""
    defaults = dict.fromkeys(("window", "softcap", "key_mask", "cu_seqlens", "padding")) | {"causal": True}
    return flash_attention(q, k, v, scale=q.shape[-1] ** -0.5 if scale is None else scale, **defaults | options)


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
    masks = {n: named[n] for n in ("causal", "window", "key_mask", "cu_seqlens", "padding") if n in named}
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
    "decode": {"cached": 200, "decode": True},
    "window": {"window": 20},
    "softcap": {"softcap": 5.0},
    "softcap and window": {"softcap": 30.0, "window": 40},
    "key mask": {"key_mask": True},
    "packed": {"packed": True},
    "packed and whole": {"packed": True, "causal": False},
    "cached prompt": {"cached": 37},
    "padding": {"causal": False, "padding": True},
}
OF_TORCH = ["causal", "whole", "scaled", "decode"]
"""Forms that `attention` leaves to torch's engines; of the others our kernels compute half precision."""
DEAR_FORMS: dict[str, dict[str, Any]] = {
    "window of one": {"window": 1, "cached": 3},
    "whole and window": {"causal": False, "window": 20, "cached": 5},
    "more queries than keys": {"causal": False, "cached": -1},
    "negative scale": {"scale": -0.3},
    "scale of zero": {"scale": 0.0},
    "softcap beyond fp32's exponents": {"softcap": 90.0},
    "everything": {"key_mask": True, "window": 20, "softcap": 3.0, "cached": 9},
    "packed and masked": {"packed": True, "key_mask": True, "window": 20, "softcap": 3.0},
    "packed and padding": {"packed": True, "key_mask": True, "padding": True, "causal": False},
}
"""Mixtures that are compared in fp64 alone."""


def attention_op(call, forms: list[str], *, dtypes: tuple[torch.dtype, ...], ordered: bool) -> Op:
    def make(m, rows, *, heads, kv_heads, dim, form, scale=1.0, same=False, hidden=False):
        options = (FORMS | DEAR_FORMS)[form].copy()
        packed, cached, decode, key_mask, padding = (
            options.pop(name, 0) for name in ("packed", "cached", "decode", "key_mask", "padding")
        )
        batch = 1 if packed or rows > 300 else m.draw.choice([1, 2])
        length = min(rows, 1) if decode else rows
        num_keys = max(1, (rows if decode else length) + cached) if length else 0
        q = m(batch, length, heads * kv_heads, dim, scale=scale)
        k, v = (m(batch, num_keys, kv_heads, dim, scale=scale) for _ in range(2))
        if same:
            k = m.of(k.detach()[:, :1].expand_as(k))
        tensors = {"q": q, "k": k, "v": v}
        if key_mask:
            mask = torch.rand(batch, num_keys, device=m.device) < (0.0 if hidden else 0.7)
            tensors["key_mask"] = m.of(mask, train=False, dtype=torch.bool)
        if padding:  # at the end of a row, as the tiles of an image have it, and some before
            tensors["padding"] = torch.rand(batch, length, device=m.device) < 0.1
            tensors["padding"][0, -(length // 3) - 1 :] = True
        if packed:
            ends = [0, num_keys // 3, num_keys // 3, num_keys // 2, num_keys]
            options["cu_seqlens"] = torch.tensor(ends, dtype=torch.int32, device=m.device)
        # What torch's engine for one query does with the keys in fp32 errs by up to twice as much.
        return Case(tensors, options, dim, max(num_keys, dim) * (4 if decode else 1))

    our_form = call is our_attention
    usual = dict(heads=2, kv_heads=2, dim=16)
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
        q, k, v = m.big(batch, length, 32, 128), m(batch, length, 2, 128), m(batch, length, 2, 128)
        return Case({"q": q, "k": k, "v": v}, {"window": 256} if ordered else {})

    return Op(
        call, kernels.attention_reference, eager_attention, make,
        choices={
            "form": Sizes(forms, forms), "kv_heads": Sizes([1, 2, 4], [1, 2]), "heads": Sizes([1, 2, 3], [1, 2]),
            "dim": Sizes([8, 16, 40, 64, 80, 96, 128, 192, 256], [3, 8, 24]),
        },
        complete={"heads": 2, "kv_heads": 1, "dim": 8, "form": "key mask" if "key mask" in forms else forms[0]},
        row=lambda chosen: 2**12 * chosen["heads"] * chosen["kv_heads"],
        more={"form": [form for form in DEAR_FORMS if our_form or "scale" not in form]},
        few_rows=(0, 70) if our_form else (0, 1, 7, 70),
        edges=edges,
        past_2_31=huge,
        ordered=ordered,
        dtypes=dtypes,
        noise=attention_noise,
        checks=call is kernels.attention,
    )  # fmt: skip


# Cross entropy.


def eager_cross_entropy(
    logits, labels, *, class_weight=None, label_smoothing=0.0, z_loss=0.0, softcap=None, reduction="mean"
):
    """The loss of transformers, logits cast up, with torch's options; the cap and z-loss as models write them."""
    rows, y = logits.reshape(-1, logits.shape[-1]).to(accumulator(logits.dtype)), labels.reshape(-1).long()
    if softcap is not None:
        rows = softcap * torch.tanh(rows / softcap)
    class_weight = None if class_weight is None else class_weight.to(rows.dtype)
    loss = F.cross_entropy(rows, y, class_weight, label_smoothing=label_smoothing, reduction=reduction)
    if z_loss:
        z = (z_loss * rows.logsumexp(-1).square()).masked_fill(y == IGNORE, 0)
        loss = loss + (z if reduction == "none" else z.sum() if reduction == "sum" else z.sum() / (y != IGNORE).sum())
    return loss


LOSS_CHOICES = {
    "reduction": ["mean", "sum", "none"],
    "label_smoothing": [0.0, 0.0, 0.1],
    "z_loss": [0.0, 0.0, 1e-2],
    "softcap": [None, None, 30.0],
}
MORE_OF_A_LOSS: dict[str, list] = {
    "softcap": [4.0],
    "weighted": [True],
    "items": [None, None, 7, "tensor"],
    "token_scaling": [False, True],
    "metrics": [False, True],
}
"""What transformers' loss has not: the number of items in a batch, DFT's scaling, and metrics."""


def loss_options(m: Maker, options: dict[str, Any], items, metrics: bool) -> dict[str, Any]:
    """The arguments of a loss, which has `items` (num_items_in_batch) with reduction="mean" alone."""
    if items is not None and options.get("reduction", "mean") == "mean":
        options |= {"num_items_in_batch": torch.tensor(7, device=m.device) if items == "tensor" else items}
    if metrics:
        names = ("z_loss", "token_accuracy", "predicted_tokens", "entropy")
        options |= {f"return_{name}": True for name in names}
    return options


def confident(rows: int, vocab: int, p: float) -> tuple[Tensor, Tensor]:
    """Logits whose label has about the probability p, and the labels."""
    logits, labels = torch.randn(rows, vocab) / 8, torch.arange(rows) % vocab
    logits[torch.arange(rows), labels] = torch.tensor(p / (1 - p) * (vocab - 1)).log() + torch.randn(rows) / 8
    return logits, labels


def sure_head(m: Maker, **options) -> Case:
    """A head whose logits are those of `confident`."""
    logits, labels = confident(9, 70, 0.9999)
    weight = torch.zeros(70, 16)
    weight[:, :9] = logits.t()
    tensors = {"x": m.of(torch.eye(9, 16)), "weight": m.of(weight), "labels": labels.to(m.device)}
    return Case(tensors, options, 70)


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
    def make(m, rows, *, vocab, weighted=False, items=None, metrics=False, **options):
        lead = m.lead(rows)
        tensors = {"logits": m(*lead, vocab, scale=m.draw.choice([1.0, 3.0])), "labels": m.labels(vocab, *lead)}
        if weighted:
            tensors["class_weight"] = torch.rand(vocab, device=m.device) + 0.5
        return Case(tensors, loss_options(m, options, items, metrics), vocab)

    def edge(values, **options):
        def case(m):
            logits, labels = values()
            return Case({"logits": m.of(logits), "labels": labels.to(m.device)}, options, logits.shape[1])

        return case

    def some(rows=9, vocab=70, scale=1.0, ignored=0.0):
        labels = torch.randint(vocab, (rows,))
        return torch.randn(rows, vocab) * scale, labels.masked_fill(torch.rand(rows) < ignored, IGNORE)

    values = {
        "label at p = 0.9999": lambda: confident(9, 70, 0.9999),
        "label at p = 0.9999, 50257 classes": lambda: confident(3, 50257, 0.9999),
        "logits of 1e4": lambda: some(scale=1e4),
        "rows of equal values": lambda: (torch.arange(9.0)[:, None].expand(9, 70) * 10, torch.arange(9)),
        "all ignored": lambda: some(ignored=1.1),
        "one token": lambda: some(rows=1),
        "one token, ignored": lambda: some(rows=1, ignored=1.1),
        "no token": lambda: some(rows=0),
        "one class": lambda: some(vocab=1),
    }
    edges = {}
    for reduction in ("mean", "none"):
        edges |= {f"{what}, {reduction}": edge(make_them, reduction=reduction) for what, make_them in values.items()}
        edges[f"logits of 1e4, capped, {reduction}"] = edge(values["logits of 1e4"], reduction=reduction, softcap=30.0)

    def huge(m):
        m.strided, rows, vocab = False, 16800, 128256
        tensors = {"logits": m.big(rows, vocab), "labels": m.labels(vocab, rows, ignored=0.3)}
        return Case(tensors, {"reduction": "none"})

    return Op(
        kernels.cross_entropy, kernels.cross_entropy_reference, eager_cross_entropy, make,
        choices={
            "vocab": Sizes(VOCABS, [*FEW_VOCABS, 2100]), **LOSS_CHOICES, "weighted": [False, False, False, True]
        },
        complete={"vocab": 7, "weighted": True},
        row=lambda chosen: chosen["vocab"],
        more=MORE_OF_A_LOSS,
        edges=edges,
        past_2_31=huge,
        noise=probability_noise,
    )  # fmt: skip


def eager_linear_cross_entropy(x, weight, labels, *, bias=None, accum_dtype=None, workspace_bytes=None, **options):
    return eager_cross_entropy(F.linear(x, weight, bias), labels, **options)


def no_chunks(reference):
    """References hold all logits: they know nothing of chunks, of what is left out, and of what sums are kept in."""

    def call(*args, accum_dtype=None, workspace_bytes=None, num_valid=None, **options):
        return reference(*args, **options)

    return call


def head_choices(**options) -> dict[str, Any]:
    """Sizes of a head, and a workspace that gives several chunks or one."""
    vocab = Sizes(VOCABS, FEW_VOCABS)
    return {
        "vocab": vocab,
        "hidden": Sizes([1, 7, 64, 96, 257, 896], [1, 12]),
        "workspace_bytes": [1, 2**29],
        **options,
    }


MORE_OF_A_HEAD = {"accum_dtype": [None, torch.float32], "known": [False, True]}
HEAD_ROWS = (0, 1, 5, 131)
"""More than a chunk, of which 128 tokens are the least."""


def head_of_usual_size(chosen: dict[str, Any]) -> bool:
    return chosen["hidden"] * chosen["vocab"] <= 2**25


def widest_of_a_head(chosen: dict[str, Any]) -> int:
    return max(chosen["vocab"], chosen["hidden"])


def known_labels(labels: Tensor, known: bool) -> dict[str, int]:
    """num_valid where the host knows it, so that ignored tokens are left out."""
    return {"num_valid": int((labels != IGNORE).sum())} if known else {}


def linear_loss_op() -> Op:
    def make(
        m, rows, *, vocab, hidden, bias=False, weighted=False, items=None, metrics=False, known=False, ignored=None,
        scale=1.0, **options,
    ):  # fmt: skip
        lead = m.lead(rows)
        x, weight = m(*lead, hidden, scale=scale * hidden**-0.5), m(vocab, hidden)
        tensors = {"x": x, "weight": weight, "labels": m.labels(vocab, *lead, ignored=ignored)}
        if bias:
            tensors["bias"] = m(vocab)
        if weighted:
            tensors["class_weight"] = torch.rand(vocab, device=m.device) + 0.5
        options |= known_labels(tensors["labels"], known)
        return Case(tensors, loss_options(m, options, items, metrics), vocab, max(vocab, hidden, rows))

    def edge(rows=9, vocab=70, ignored=0.0, **more):
        return lambda m: make(m, rows, vocab=vocab, hidden=16, ignored=ignored, **more)

    edges: dict[str, Any] = {}
    for reduction in ("mean", "none"):
        edges |= {
            f"label at p = 0.9999, {reduction}": functools.partial(sure_head, reduction=reduction),
            f"logits of 1e4, {reduction}": edge(scale=1e4, reduction=reduction),
            f"rows of equal values, {reduction}": edge(scale=0.0, reduction=reduction),
            f"all ignored, {reduction}": edge(ignored=1.1, reduction=reduction),
            f"one token, {reduction}": edge(rows=1, reduction=reduction),
            f"no token, {reduction}": edge(rows=0, reduction=reduction),
            f"one class, {reduction}": edge(vocab=1, reduction=reduction),
        }

    def huge(m):
        m.strided, rows, hidden, vocab = False, 2**20 + 9, 2048, 512
        tensors = {"x": m.big(rows, hidden), "weight": m(vocab, hidden), "labels": m.labels(vocab, rows)}
        return Case(tensors, {"reduction": "none"})

    return Op(
        kernels.linear_cross_entropy, no_chunks(kernels.linear_cross_entropy_reference), eager_linear_cross_entropy,
        make,
        choices=head_choices(bias=[False, False, True]) | LOSS_CHOICES,
        complete={"vocab": 7, "hidden": 5, "reduction": "none", "bias": True, "weighted": True},
        row=widest_of_a_head,
        more=MORE_OF_A_LOSS | MORE_OF_A_HEAD,
        few_rows=HEAD_ROWS,
        fits=head_of_usual_size,
        edges=edges,
        past_2_31=huge,
        noise=probability_noise,
        matmuls=True,
        runs_once=True,
    )  # fmt: skip


# Mixture of experts.


def eager_route(logits, *, top_k):
    """MixtralTopKRouter of transformers, less the choice among equals, which torch.topk leaves open."""
    experts = kernels.route_reference(logits, top_k=top_k)[1]
    weights = logits.softmax(-1, dtype=accumulator(logits.dtype)).gather(1, experts.long())
    return weights / weights.sum(-1, keepdim=True), experts


def eager_moe_experts(x, weights, experts, gate_up_proj, down_proj, *, activation="silu", recompute=False):
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
    def make(m, rows, *, experts, top_k, values=None):
        return Case({"logits": m(rows, experts, scale=3.0) if values is None else m.of(values)}, {"top_k": top_k})

    def edge(values):
        return lambda m: make(m, 9, experts=16, top_k=3, values=values())

    def huge(m):
        m.strided = False
        return Case({"logits": m.big(2**25 + 9, 64)}, {"top_k": 2})

    many = [1, 2, 3, 5, 7, 8, 16, 31, 60, 64, 72, 96, 127, 128, 160, 200, 256, 384, 512]
    return Op(
        kernels.route, kernels.route_reference, eager_route, make,
        choices={"experts": Sizes(many, [1, 3, 8, 70]), "top_k": [1, 2, 3, 4, 6, 8]},
        complete={"experts": 5, "top_k": 2},
        row=lambda chosen: chosen["experts"],
        few_rows=(0, 1, 5, 40),
        fits=lambda chosen: chosen["top_k"] <= chosen["experts"],
        edges={
            "equal logits": edge(lambda: torch.zeros(9, 16)),
            "logits of 1e4": edge(lambda: torch.randn(9, 16) * 1e4),
            "one expert takes all": edge(lambda: torch.eye(16)[:9] * 80),
            "equals among others": edge(lambda: torch.randint(3, (9, 16)).float()),
        },
        past_2_31=huge,
        noise=route_noise,
    )  # fmt: skip


def experts_noise(case: Case, upstream: list[Tensor]) -> dict[str, Tensor]:
    """What one rounding of dh = dy @ down, and sums of fp32 one after the other, cost d_weights = sum(dh * h).

    A sum of K terms t errs by eps sqrt(K / 24 * sum(t^2)), however little is left of it. Eager's sum(dy * (down @ h))
    is added in parts, and of as many rounded terms as the tokens are wide, where there may be one dh.
    """
    t = {name: x.detach().double() for name, x in case.tensors.items()}
    experts, dy = case.tensors["experts"], upstream[0].double()
    noise, rounding = torch.zeros_like(t["weights"]), torch.finfo(case.tensors["x"].dtype).eps ** 2 / 12
    activation = case.options.get("activation", "silu")
    for expert, (gate_up, down) in enumerate(zip(t["gate_up_proj"], t["down_proj"], strict=True)):
        tokens, choice = (experts == expert).nonzero(as_tuple=True)
        h = kernels.glu_reference(F.linear(t["x"][tokens], gate_up), activation=activation).square()
        hidden, inner = down.shape
        terms, sums = dy[tokens].square() @ down.square(), (dy[tokens] @ down).square()
        lost = 2.0**-46 / 24 * (hidden * terms + inner * sums) + rounding * sums
        noise[tokens, choice] = (lost * h).sum(-1).sqrt()
    return {"d_weights": noise}


def experts_op() -> Op:
    def make(m, rows, *, hidden, inner, experts, top_k, logits=None, scale=1.0, **options):
        logits = torch.randn(rows, experts, device=m.device) if logits is None else logits(rows, experts).to(m.device)
        weights, chosen = kernels.route_reference(logits, top_k=top_k)
        tensors = {
            "x": m(rows, hidden, scale=scale),
            "weights": m.of(weights, dtype=accumulator(m.dtype)),
            "experts": m.ids(chosen),
            "gate_up_proj": m(experts, 2 * inner, hidden, scale=hidden**-0.5),
            "down_proj": m(experts, hidden, inner, scale=inner**-0.5),
        }
        # Squares of products of two normal numbers scatter 9 to 1: a ninth of the elements make up the rms.
        return Case(tensors, options, max(hidden, 2 * inner, 9), 2 * (hidden + 2 * inner) + rows)

    def huge(m):
        m.strided, rows, hidden = False, 2**19 + 9, 4096
        x = m.big(rows, hidden)
        weights = torch.rand(rows, 1, device=m.device).requires_grad_()
        tensors = {"x": x, "weights": weights, "experts": m.integers(0, 2, rows, 1, dtype=torch.int32)}
        projections = {"gate_up_proj": m(2, 32, hidden, scale=hidden**-0.5), "down_proj": m(2, hidden, 16, scale=0.25)}
        return Case(tensors | projections, {})

    usual = dict(hidden=24, inner=16, experts=5, top_k=2)
    widths = [1, 8, 33, 64, 96, 136, 256, 512]
    return Op(
        kernels.moe_experts, no_recompute(kernels.moe_experts_reference), eager_moe_experts, make,
        choices={
            "hidden": Sizes(widths, [1, 20]), "inner": Sizes(widths, [1, 8]),
            "experts": Sizes([1, 3, 8, 16, 60], [1, 3, 4]), "top_k": [1, 2, 3, 4], "activation": GATED,
        },
        complete={"hidden": 8, "inner": 4, "experts": 5, "top_k": 2},
        row=lambda chosen: 2**11,
        more={"recompute": [False, True]},
        few_rows=(0, 1, 9),
        fits=lambda chosen: chosen["top_k"] <= chosen["experts"],
        edges={
            "all to the same": lambda m: make(m, 20, logits=lambda r, e: torch.arange(e).expand(r, e) * 9.0, **usual),
            "equal weights": lambda m: make(m, 20, logits=lambda r, e: torch.zeros(r, e), **usual),
            "weights of 0 and 1": lambda m: make(m, 20, logits=lambda r, e: torch.randn(r, e) * 1e4, **usual),
            "tokens of zeros": lambda m: make(m, 20, scale=0.0, **usual),
            "tokens of 30": lambda m: make(m, 20, scale=30.0, **usual),
            "one token": lambda m: make(m, 1, **usual),
        },
        past_2_31=huge,
        noise=experts_noise,
        matmuls=True,
    )  # fmt: skip


def no_recompute(reference):
    return lambda *args, recompute=False, **options: reference(*args, **options)


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
    def make(m, rows, *, vocab, reduction, log_target, scale=2.0, target=None):
        lead = m.lead(max(rows, 1) if reduction == "mean" else rows)
        x, t = torch.randn(2, *lead, vocab, device=m.device) * scale
        t = t.log_softmax(-1) if log_target else t.softmax(-1) if target is None else target(t)
        options = {"reduction": reduction, "log_target": log_target}
        return Case({"input": m.of(x.log_softmax(-1)), "target": m.of(t)}, options)

    def edge(reduction="batchmean", log_target=False, rows=9, **more):
        return lambda m: make(m, rows, vocab=70, reduction=reduction, log_target=log_target, **more)

    def zeros_and_ones(t):
        return (t == t.amax(-1, keepdim=True)).float()

    edges = {
        "targets of 0 and 1": edge(target=zeros_and_ones),
        "targets of 0 and 1, none": edge("none", target=zeros_and_ones),
    }
    for log_target in (False, True):
        edges |= {
            f"no token, log_target={log_target}": edge(rows=0, log_target=log_target),
            f"one token, log_target={log_target}": edge(rows=1, log_target=log_target),
            f"equal probabilities, log_target={log_target}": edge(scale=0.01, log_target=log_target),
            f"log probabilities of -1e4, log_target={log_target}": edge(scale=3e3, log_target=log_target),
        }

    def huge(m):
        m.strided, rows, vocab = False, 16800, 128256
        tensors = {"input": m.big(rows, vocab, train=False).neg_(), "target": m.big(rows, vocab, train=False).abs_()}
        tensors["input"].requires_grad_()
        return Case(tensors, {"reduction": "none"})

    return Op(
        kernels.kl_div, kernels.kl_div_reference, eager_kl_div, make,
        choices={
            "vocab": Sizes(VOCABS, [*FEW_VOCABS, 2100]), "reduction": ["mean", "batchmean", "sum", "none"],
            "log_target": [False, True],
        },
        complete={"vocab": 7, "reduction": "mean", "log_target": False},
        row=lambda chosen: chosen["vocab"],
        edges=edges,
        past_2_31=huge,
        noise=term_noise,
    )  # fmt: skip


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


DIVERGENCE_CHOICES = {"beta": [0.0, 0.1, 0.5, 0.5, 1.0], "reduction": ["mean", "sum", "none"]}


def jsd_op() -> Op:
    def make(m, rows, *, vocab, labelled=False, scale=2.0, same=False, ignored=None, **options):
        lead = m.lead(rows)
        x, y = (torch.randn(2, *lead, vocab, device=m.device) * scale).log_softmax(-1)
        tensors = {"input": m.of(x), "target": m.of(x if same else y)}
        if labelled:
            tensors["labels"] = m.labels(vocab, *lead, ignored=ignored)
        return Case(tensors, options, vocab)

    def edge(beta, reduction="mean", rows=9, **more):
        return lambda m: make(m, rows, vocab=70, beta=beta, reduction=reduction, **more)

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
        x, y = (m.big(rows, vocab, train=False).abs_().neg_() for _ in range(2))
        return Case({"input": x.requires_grad_(), "target": y}, {"reduction": "none"})

    return Op(
        kernels.jsd, kernels.jsd_reference, eager_jsd, make,
        choices={
            "vocab": Sizes(VOCABS, [*FEW_VOCABS, 2100]), **DIVERGENCE_CHOICES, "labelled": [False, True]
        },
        complete={"vocab": 7, "labelled": True},
        row=lambda chosen: chosen["vocab"],
        edges=edges,
        past_2_31=huge,
        noise=term_noise,
    )  # fmt: skip


def eager_linear_jsd(
    student_x, student_weight, teacher_x, teacher_weight, *, labels=None, student_bias=None, teacher_bias=None,
    temperature=1.0, weight_hard=0.0, weight_soft=1.0, beta=0.5, reduction="mean", accum_dtype=None,
    workspace_bytes=None,
):  # fmt: skip
    z = F.linear(student_x, student_weight, student_bias)
    u = F.linear(teacher_x, teacher_weight, teacher_bias)[..., : student_weight.shape[0]]
    z, u = (t.to(accumulator(t.dtype)) for t in (z, u))
    log_p, log_q = ((t / temperature).log_softmax(-1) for t in (z, u))
    loss = weight_soft * eager_jsd(log_p, log_q, labels=labels, beta=beta, reduction=reduction)
    if weight_hard:
        hard = F.cross_entropy(z.flatten(0, -2), labels.flatten().long(), reduction=reduction)
        loss = loss + weight_hard * hard.view(loss.shape)
    return loss


def linear_jsd_op() -> Op:
    def make(
        m, rows, *, vocab, hidden, padded=0, bias=False, hard=False, known=False, ignored=None, scale=1.0, same=False,
        **options,
    ):  # fmt: skip
        lead, wide = m.lead(rows), hidden if same else hidden + 3
        tensors = {
            "student_x": m(*lead, hidden, scale=scale * hidden**-0.5),
            "student_weight": m(vocab, hidden),
            "teacher_x": m(*lead, wide, scale=scale * wide**-0.5, train=False),
            "teacher_weight": m(vocab + padded, wide, train=False),
        }
        if same:
            tensors["teacher_x"], tensors["teacher_weight"] = (tensors[n].detach() for n in list(tensors)[:2])
        if bias:
            tensors |= {"student_bias": m(vocab), "teacher_bias": m(vocab + padded, train=False)}
        if hard:
            options |= {"weight_hard": 0.3, "weight_soft": 0.7}
        if hard or known or ignored is not None or m.draw.random() < 0.5:
            tensors["labels"] = m.labels(vocab, *lead, ignored=ignored)
            options |= known_labels(tensors["labels"], known)
        return Case(tensors, options, vocab, max(vocab, hidden, rows))

    def edge(beta, rows=9, vocab=70, **more):
        return lambda m: make(m, rows, vocab=vocab, hidden=16, beta=beta, **more)

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
        tensors = {"student_x": m.big(rows, hidden), "student_weight": m(vocab, hidden, scale=hidden**-0.5)}
        return Case(tensors | teacher, {"reduction": "none"})

    return Op(
        kernels.linear_jsd, no_chunks(kernels.linear_jsd_reference), eager_linear_jsd, make,
        choices=head_choices(padded=[0, 0, 5], hard=[False, False, True], temperature=[1.0, 2.0, 0.7])
        | DIVERGENCE_CHOICES,
        complete={"vocab": 7, "hidden": 5, "hard": True, "reduction": "none", "bias": True},
        row=widest_of_a_head,
        more=MORE_OF_A_HEAD | {"bias": [False, True], "return_soft_hard_loss": [False, True]},
        few_rows=HEAD_ROWS,
        fits=head_of_usual_size,
        edges=edges,
        past_2_31=huge,
        noise=probability_noise,
        matmuls=True,
        runs_once=True,
    )  # fmt: skip


# Log probabilities, embedding, and matmuls of ternary weights.


def eager_linear_logprobs(
    x, weight, labels, *, bias=None, temperature=1.0, softcap=None, return_entropy=False, return_logits_mean=False,
    accum_dtype=None, workspace_bytes=None,
):  # fmt: skip
    """selective_log_softmax of TRL, and its entropy_from_logits, of logits cast up."""
    logits = F.linear(x, weight, bias)
    logits = logits.to(accumulator(logits.dtype))
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    valid, log_p = labels != IGNORE, (logits / temperature).log_softmax(-1)
    logprobs = log_p.gather(-1, labels.where(valid, 0).long()[..., None])[..., 0].where(valid, 0)
    if not (return_entropy or return_logits_mean):
        return logprobs
    entropy = -(log_p.exp() * log_p).sum(-1).where(valid, 0)
    mean = logits.detach().mean(-1).where(valid, 0)
    return logprobs, entropy if return_entropy else None, mean if return_logits_mean else None


def logprobs_op() -> Op:
    def make(m, rows, *, vocab, hidden, bias=False, known=False, ignored=None, scale=1.0, **options):
        lead = m.lead(rows)
        x, weight = m(*lead, hidden, scale=scale * hidden**-0.5), m(vocab, hidden)
        tensors = {"x": x, "weight": weight, "labels": m.labels(vocab, *lead, ignored=ignored)}
        if bias:
            tensors["bias"] = m(vocab)
        options |= known_labels(tensors["labels"], known)
        return Case(tensors, options, vocab, max(vocab, hidden, rows))

    def edge(rows=9, vocab=70, **more):
        return lambda m: make(m, rows, vocab=vocab, hidden=16, **more)

    edges: dict[str, Any] = {"label at p = 0.9999": functools.partial(sure_head, return_entropy=True)}
    for entropy in (False, True):
        edges |= {
            f"no token, entropy={entropy}": edge(rows=0, return_entropy=entropy),
            f"one token, entropy={entropy}": edge(rows=1, return_entropy=entropy),
            f"one class, entropy={entropy}": edge(vocab=1, return_entropy=entropy),
            f"all ignored, entropy={entropy}": edge(ignored=1.1, return_entropy=entropy),
            f"rows of equal values, entropy={entropy}": edge(scale=0.0, return_entropy=entropy),
            f"logits of 1e4, entropy={entropy}": edge(scale=1e4, return_entropy=entropy),
        }

    def huge(m):
        m.strided, rows, hidden, vocab = False, 2**20 + 9, 2048, 512
        weight = m(vocab, hidden, scale=hidden**-0.5)
        return Case({"x": m.big(rows, hidden), "weight": weight, "labels": m.labels(vocab, rows)}, {})

    return Op(
        kernels.linear_logprobs, no_chunks(kernels.linear_logprobs_reference), eager_linear_logprobs, make,
        choices=head_choices(
            bias=[False, False, True], temperature=[1.0, 0.6, 2.0], softcap=[None, None, 30.0],
            return_entropy=[False, False, True], return_logits_mean=[False, False, True],
        ),
        complete={"vocab": 7, "hidden": 5, "return_entropy": True, "bias": True},
        row=widest_of_a_head,
        more=MORE_OF_A_HEAD | {"softcap": [3.0]},
        few_rows=HEAD_ROWS,
        fits=head_of_usual_size,
        edges=edges,
        past_2_31=huge,
        noise=probability_noise,
        matmuls=True,
    )  # fmt: skip


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
            "no id": edge(torch.zeros(0, dtype=torch.int64)),
            "one id": edge(torch.tensor([7])),
            "all the same": edge(torch.full((3000,), 5)),
            "all padding": edge(torch.full((30,), 5), padding_idx=5),
            "the first and the last row": edge(torch.tensor([0, 39] * 100)),
            "one row": edge(torch.zeros(50, dtype=torch.int64), vocab=1),
            "every row nine times": edge(torch.arange(40).repeat(9)),
        },
        past_2_31=huge,
    )  # fmt: skip


def exact_int2_matmul(a, packed, *, scale_a=None, scale_w=None, bias=None, out_features=None, out_dtype=None):
    out = a.double() @ bitnet.unpack_int2(packed, out_features).double().t()
    out = out if scale_a is None else out * scale_a.double()[..., None]
    out = out if scale_w is None else out * scale_w.double()
    return out if bias is None else out + bias.double()


def eager_int2_matmul(a, packed, *, scale_a=None, scale_w=None, bias=None, out_features=None, out_dtype=torch.bfloat16):
    """BitLinear of transformers: the weight unpacked, a matmul in the dtype of the output, then the scales."""
    out = F.linear(a.to(out_dtype), bitnet.unpack_int2(packed, out_features).to(out_dtype))
    out = out if scale_a is None else out * scale_a[..., None]
    out = out if scale_w is None else out * scale_w
    return (out if bias is None else out + bias).to(out_dtype)


def int2_op() -> Op:
    def make(m, rows, *, k, n, scales="awb", low=-128, weight=None, dtype=None):
        lead = m.lead(rows)
        weight = m.integers(-1, 2, n, k, dtype=torch.int8) if weight is None else weight.to(m.device)
        a = m.of(m.integers(low, 128, *lead, k, dtype=torch.int8), train=False, dtype=torch.int8)
        tensors = {"a": a, "packed": bitnet.pack_int2(weight)}
        shapes = {"scale_a": lead, "scale_w": () if "1" in scales else (n,), "bias": (n,)}
        for name, letter in zip(shapes, "awb", strict=True):
            if letter in scales:
                tensors[name] = torch.rand(shapes[name], device=m.device) * 0.1 + 0.01
        return Case(tensors, {"out_features": n, "out_dtype": m.dtype if dtype is None else dtype})

    def huge(m):
        rows, k, n = 2**17 + 9, 64, 16388
        tensors = {"a": m.integers(-128, 128, rows, k, dtype=torch.int8)}
        weight = m.integers(-1, 2, n, k, dtype=torch.int8)
        return Case(tensors | {"packed": bitnet.pack_int2(weight)}, {"out_features": n, "out_dtype": torch.bfloat16})

    return Op(
        bitnet.int2_matmul, exact_int2_matmul, eager_int2_matmul, make,
        choices={
            "k": Sizes([1, 7, 33, 64, 130, 256, 1000, 2560, 4096, 6912], [1, 7, 64, 330]),
            "n": Sizes([1, 4, 30, 100, 256, 640, 2560, 4099], [1, 4, 30, 130]),
            "scales": ["", "a", "w", "b", "aw", "awb"],
        },
        complete={"k": 8, "n": 5},
        row=lambda chosen: max(chosen["k"], chosen["n"]),
        more={"scales": ["w1", "aw1b"]},
        few_rows=(0, 1, 3, 17, 70),
        edges={
            "the largest sums": lambda m: make(m, 5, k=700, n=9, low=127, scales="w",
                                               weight=torch.ones(9, 700, dtype=torch.int8)),
            "zero weights": lambda m: make(m, 5, k=70, n=9, weight=torch.zeros(9, 70, dtype=torch.int8)),
            "one row": lambda m: make(m, 1, k=70, n=9),
            "no row": lambda m: make(m, 0, k=70, n=9),
        },
        past_2_31=huge,
        widest=torch.float32,
    )  # fmt: skip


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
    def make(m, rows, *, width, scale=1.0):
        return Case({"x": m(*m.lead(rows), width, scale=scale, train=False)}, {}, width)

    def huge(m):
        m.strided = False
        return Case({"x": m.big(2**19 + 9, 4096, train=False)}, {})

    return Op(
        bitnet.quantize_int8, exact_quantize_int8, eager_quantize_int8, make,
        choices={"width": Sizes(WIDTHS, [*FEW_WIDTHS, 9000])},
        complete={"width": 8},
        row=lambda chosen: chosen["width"],
        edges={
            "zeros": lambda m: make(m, 9, width=300, scale=0.0),
            "1e4": lambda m: make(m, 9, width=300, scale=1e4),
            "tiny": lambda m: make(m, 9, width=300, scale=1e-5),
        },
        past_2_31=huge,
    )  # fmt: skip


OURS = [form for form in FORMS if form not in OF_TORCH]
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
    "glu": activation_op(kernels.glu, kernels.glu_reference, eager_glu, gated=True, with_linear=False),
    "glu of two tensors": activation_op(
        kernels.glu, kernels.glu_reference, eager_glu, gated=True, with_linear=False, separate=True
    ),
    "glu_linear": activation_op(
        kernels.glu_linear, kernels.glu_linear_reference, linear_after(eager_glu), gated=True, with_linear=True
    ),
    "glu_linear of two tensors": activation_op(
        kernels.glu_linear, kernels.glu_linear_reference, linear_after(eager_glu), gated=True, with_linear=True,
        separate=True,
    ),
    "activate": activation_op(
        kernels.activate, kernels.activate_reference, eager_activate, gated=False, with_linear=False
    ),
    "activation_linear": activation_op(
        kernels.activation_linear, kernels.activation_linear_reference, linear_after(eager_activate),
        gated=False, with_linear=True,
    ),
    "gated_mlp": mlp_op(kernels.gated_mlp, kernels.gated_mlp_reference, eager_glu, gated=True),
    "gated_mlp of two weights": mlp_op(
        of_two_weights(kernels.gated_mlp), of_two_weights(kernels.gated_mlp_reference), eager_glu, gated=True,
        separate=True,
    ),
    "mlp": mlp_op(kernels.mlp, kernels.mlp_reference, eager_activate, gated=False),
    "linear after a norm": linear_op(
        linear_after_norm(linear), exact_linear_after_norm, linear_after_norm(F.linear), packed=False
    ),
    "packed_linear": linear_op(
        three_layers(packed_linear), three_layers(one_by_one), three_layers(one_by_one), packed=True
    ),
    "attention": attention_op(kernels.attention, OURS, dtypes=HALF, ordered=True),
    "attention of torch": attention_op(kernels.attention, OF_TORCH, dtypes=(*HALF, torch.float32), ordered=False),
    "flash_attention": attention_op(our_attention, list(FORMS), dtypes=HALF, ordered=True),
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

HELPERS = {"pack_int2", "unpack_int2"}
"""Public, and tested with the op that they serve."""


def complete(name: str, m: Maker, rows: int = 6) -> Case:
    """A small case with every tensor argument there is, contiguous."""
    m.strided = False
    m.lead = lambda rows: (rows,)  # type: ignore[method-assign]
    return OPS[name].make(m, rows, **OPS[name].complete)


def medium(name: str, m: Maker, choice: int = 0) -> Case:
    """A case of usual size, contiguous, for what is not about shapes."""
    m.strided = False
    cases = [case for case in drawn(name, OPS[name], interpreted=m.device == "cpu") if case[3] > 3]
    variants = sorted({case[0] for case in cases})
    cases = [case for case in cases if case[0] == variants[(3 + 2 * choice) % len(variants)]]
    _, seed, chosen, rows, _ = cases[len(cases) // 2]
    torch.manual_seed(seed)
    return OPS[name].make(m, rows, **chosen)


def public_ops() -> set[str]:
    """What `ligermodels.kernels` offers that computes: neither references nor the types of results."""
    return {
        name
        for name in kernels.__all__
        if not name.endswith("_reference") and not isinstance(getattr(kernels, name), type)
    }
