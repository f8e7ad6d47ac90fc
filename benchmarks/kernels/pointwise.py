"""The memory-bound ops: norms, rotation, activations and gated units."""

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.kernels.case import Case, Packing, Place, Provider, Tensors, chosen, compiled, compute
from ligermodels import kernels

EPS = 1e-5

# Each op below: the eager form as transformers writes it, and the case with its providers. Calls take a dict
# of tensors, return a tuple, and follow the input's dtype, so that the eager form in fp64 is the exact one.


def eager_rms_norm(t: Tensors) -> tuple[Tensor, ...]:
    x = t["x"].to(compute(t["x"]))
    x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS)
    return (t["weight"] * x.to(t["x"].dtype),)


def rms_norm_case(place: Place, peers: set[str], tokens: int, size: int) -> Case:
    def make():
        inputs = {"x": place.randn(tokens, size), "weight": 1 + place.randn(size, scale=0.1)}
        return inputs, (place.randn(tokens, size),)

    def liger(t):
        from liger_kernel.ops import LigerRMSNormFunction

        # eps, offset, casting mode, in place: dx goes where dy was, the default of LigerRMSNorm
        return (LigerRMSNormFunction.apply(t["x"], t["weight"], EPS, 0.0, "llama", True),)

    width = 2 * tokens * size
    return Case(
        "rms_norm",
        f"T={tokens} H={size}",
        make,
        leaves=("x", "weight"),
        outputs=("y",),
        eager=eager_rms_norm,
        providers=chosen(
            peers,
            Provider("ligermodels", lambda t: (kernels.rms_norm(t["x"], t["weight"], eps=EPS),), ours=True),
            eager=[Provider("eager", eager_rms_norm)],
            compile=[Provider("torch.compile", compiled(eager_rms_norm))],
            torch=[Provider("F.rms_norm", lambda t: (F.rms_norm(t["x"], (size,), t["weight"], EPS),))],
            liger=[Provider("Liger", liger, mutates=True)],
        ),
        forward_work=2 * width,
        full_work=5 * width,
    )


def eager_add_rms_norm(t: Tensors) -> tuple[Tensor, ...]:
    total = t["x"] + t["residual"]
    return (*eager_rms_norm({"x": total, "weight": t["weight"]}), total)


def add_rms_norm_case(place: Place, peers: set[str], tokens: int, size: int) -> Case:
    def make():
        inputs = {
            "x": place.randn(tokens, size),
            "residual": place.randn(tokens, size),
            "weight": 1 + place.randn(size, scale=0.1),
        }
        return inputs, (place.randn(tokens, size), place.randn(tokens, size))

    def pytorch(t):
        total = t["x"] + t["residual"]
        return F.rms_norm(total, (size,), t["weight"], EPS), total

    def liger(t):
        from liger_kernel.ops import LigerFusedAddRMSNormFunction

        return LigerFusedAddRMSNormFunction.apply(t["x"], t["residual"], t["weight"], EPS, 0.0, "llama", False)

    width = 2 * tokens * size
    return Case(
        "add_rms_norm",
        f"T={tokens} H={size}",
        make,
        leaves=("x", "residual", "weight"),
        outputs=("y", "sum"),
        eager=eager_add_rms_norm,
        providers=chosen(
            peers,
            Provider(
                "ligermodels",
                lambda t: kernels.add_rms_norm(t["x"], t["residual"], t["weight"], eps=EPS),
                ours=True,
            ),
            eager=[Provider("eager", eager_add_rms_norm)],
            compile=[Provider("torch.compile", compiled(eager_add_rms_norm))],
            torch=[Provider("add, F.rms_norm", pytorch)],
            liger=[Provider("Liger", liger)],
        ),
        forward_work=4 * width,
        full_work=8 * width,
    )


def eager_layer_norm(t: Tensors) -> tuple[Tensor, ...]:
    x = t["x"].to(compute(t["x"]))
    x = x - x.mean(-1, keepdim=True)
    x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS)
    return ((x * t["weight"].to(x.dtype) + t["bias"].to(x.dtype)).to(t["x"].dtype),)


def layer_norm_case(place: Place, peers: set[str], tokens: int, size: int) -> Case:
    def make():
        inputs = {
            "x": place.randn(tokens, size),
            "weight": 1 + place.randn(size, scale=0.1),
            "bias": place.randn(size, scale=0.1),
        }
        return inputs, (place.randn(tokens, size),)

    def pytorch(t):
        return (F.layer_norm(t["x"], (size,), t["weight"], t["bias"], EPS),)

    def liger(t):
        from liger_kernel.ops import LigerLayerNormFunction

        return (LigerLayerNormFunction.apply(t["x"], t["weight"], t["bias"], EPS),)

    width = 2 * tokens * size
    return Case(
        "layer_norm",
        f"T={tokens} H={size}",
        make,
        leaves=("x", "weight", "bias"),
        outputs=("y",),
        eager=eager_layer_norm,
        providers=chosen(
            peers,
            Provider(
                "ligermodels", lambda t: (kernels.layer_norm(t["x"], t["weight"], t["bias"], eps=EPS),), ours=True
            ),
            eager=[Provider("eager", eager_layer_norm)],
            compile=[Provider("torch.compile", compiled(eager_layer_norm))],
            torch=[Provider("F.layer_norm", pytorch)],
            liger=[Provider("Liger", liger)],
        ),
        forward_work=2 * width,
        full_work=5 * width,
    )


def eager_activation(t: Tensors) -> tuple[Tensor, ...]:
    return (t["x"] * torch.sigmoid(1.702 * t["x"]),)


def activation_case(place: Place, peers: set[str], tokens: int, size: int) -> Case:
    def make():
        return {"x": place.randn(tokens, size)}, (place.randn(tokens, size),)

    width = 2 * tokens * size
    return Case(
        "activate",
        f"quick_gelu T={tokens} F={size}",
        make,
        leaves=("x",),
        outputs=("y",),
        eager=eager_activation,
        providers=chosen(
            peers,
            Provider("ligermodels", lambda t: (kernels.activate(t["x"], activation="quick_gelu"),), ours=True),
            eager=[Provider("eager", eager_activation)],
            compile=[Provider("torch.compile", compiled(eager_activation))],
        ),
        forward_work=2 * width,
        full_work=5 * width,
    )


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


def eager_rope(t: Tensors) -> tuple[Tensor, ...]:
    """On [B, heads, S, D] views with full-width tables in the activation dtype, as transformers has them."""
    cos, sin = t["full_cos"][:, None], t["full_sin"][:, None]
    if t["q"].dtype == torch.float64:  # the exact one: not from rounded tables
        cos, sin = (torch.cat((t[name], t[name]), -1)[:, None] for name in ("cos", "sin"))
    q, k = (_rotated(t[name].transpose(1, 2), cos, sin).transpose(1, 2) for name in ("q", "k"))
    return q, k, t["v"]


def rope_case(place: Place, peers: set[str], batch: int, length: int, heads: int, kv_heads: int, head_dim: int) -> Case:
    def make():
        q, k, v = (place.randn(batch, length, n, head_dim) for n in (heads, kv_heads, kv_heads))
        half = torch.arange(0, head_dim, 2, device=place.device, dtype=torch.float64) / head_dim
        angles = torch.arange(length, device=place.device)[None, :, None] * 5e5**-half
        cos, sin = angles.cos().float(), angles.sin().float()
        full = {"full_cos": torch.cat((cos, cos), -1), "full_sin": torch.cat((sin, sin), -1)}
        inputs = {
            "q": q,
            "k": k,
            "v": v,
            "cos": cos,
            "sin": sin,
            "position_ids": torch.arange(length, device=place.device).expand(batch, -1).contiguous(),
            **{n: x.to(place.dtype) for n, x in full.items()},
        }
        return inputs, tuple(place.randn(*x.shape) for x in (q, k, v))

    def ours(t, inplace=False):
        qkv = _Produced.apply(t["qkv"]) if inplace else t["qkv"]
        return kernels.rope(qkv, t["cos"], t["sin"], num_heads=heads, num_kv_heads=kv_heads, inplace=inplace)

    def gathered(t):
        """The tables of all positions, and each token's position: the rows are looked up in the kernel."""
        cos, sin = t["cos"][0], t["sin"][0]
        return kernels.rope(t["qkv"], cos, sin, num_heads=heads, num_kv_heads=kv_heads, position_ids=t["position_ids"])

    def liger(t):
        from liger_kernel.ops import LigerRopeFunction

        q, k = (t[name].transpose(1, 2) for name in ("q", "k"))
        q, k = LigerRopeFunction.apply(q, k, t["full_cos"], t["full_sin"])
        return q.transpose(1, 2), k.transpose(1, 2), t["v"]

    rotated = 2 * 2 * batch * length * (heads + kv_heads) * head_dim
    return Case(
        "rope",
        f"B={batch} S={length} HQ={heads} HK={kv_heads} D={head_dim}",
        make,
        leaves=("q", "k", "v"),
        outputs=("q", "k", "v"),
        eager=eager_rope,
        packing=Packing("qkv", ("q", "k", "v"), 2),
        providers=chosen(
            peers,
            Provider("ligermodels", ours, ours=True, packed=True),
            Provider(
                "ligermodels, in place",
                functools.partial(ours, inplace=True),
                ours=True,
                packed=True,
                mutates=True,
            ),
            Provider("ligermodels, position ids", gathered, ours=True, packed=True),
            Provider("ligermodels, q and k apart", _rope_apart, ours=True),
            eager=[Provider("eager", eager_rope)],
            compile=[Provider("torch.compile", compiled(eager_rope))],
            liger=[Provider("Liger", liger, mutates=True)],
        ),
        forward_work=rotated,
        full_work=2 * rotated,
    )


class _Produced(torch.autograd.Function):
    """The tensor itself, as a projection's output: no leaf, which must not be overwritten."""

    @staticmethod
    def forward(ctx, x):
        return x.detach()

    @staticmethod
    def backward(ctx, gradient):
        return gradient


def _rope_apart(t: Tensors) -> tuple[Tensor, ...]:
    return (*kernels.rope_qk(t["q"], t["k"], t["cos"], t["sin"]), t["v"])


def eager_glu(t: Tensors, activation: str) -> tuple[Tensor, ...]:
    gate = F.silu(t["gate"]) if activation == "silu" else F.gelu(t["gate"], approximate="tanh")
    return (gate * t["up"],)


def glu_case(place: Place, peers: set[str], tokens: int, size: int, activation: str = "silu") -> Case:
    def make():
        inputs = {"gate": place.randn(tokens, size), "up": place.randn(tokens, size)}
        return inputs, (place.randn(tokens, size),)

    eager = functools.partial(eager_glu, activation=activation)

    def apart(t):
        return (kernels.glu(t["gate"], t["up"], activation=activation),)

    def liger(t):
        from liger_kernel.ops import LigerGELUMulFunction, LigerSiLUMulFunction

        function = LigerSiLUMulFunction if activation == "silu" else LigerGELUMulFunction
        return (function.apply(t["gate"], t["up"]),)

    def liger_packed(t):
        from liger_kernel.ops import LigerFusedGateUpSiLUMulFunction

        return (LigerFusedGateUpSiLUMulFunction.apply(t["gate_up"]),)

    width = 2 * tokens * size
    return Case(
        "glu",
        f"{activation} T={tokens} F={size}",
        make,
        leaves=("gate", "up"),
        outputs=("y",),
        eager=eager,
        packing=Packing("gate_up", ("gate", "up"), 1),
        providers=chosen(
            peers,
            Provider(
                "ligermodels",
                lambda t: (kernels.glu(t["gate_up"], activation=activation),),
                ours=True,
                packed=True,
            ),
            Provider("ligermodels, gate and up apart", apart, ours=True),
            eager=[Provider("eager", eager)],
            compile=[Provider("torch.compile", compiled(eager))],
            liger=[
                Provider("Liger", liger, mutates=True),
                *([Provider("Liger, packed", liger_packed, packed=True)] if activation == "silu" else []),
            ],
        ),
        forward_work=3 * width,
        full_work=8 * width,
    )
