"""Our fused ops beside their peers, in one process on one card. What computes something else is not timed.

For every op, first for all of its shapes: outputs and every gradient of each provider against fp64. Ours must
err no more than the eager op of the same dtype, else nothing of that op is timed and the exit code is 1. A
peer is reported with its error, and left out where it is so wrong that it must have been called wrongly.
Then, for each shape and provider: the median time of the forward and of forward + backward, the peak memory
beyond the inputs (gradients included), and the share of what the card can do, measured in the same run: of
the copy bandwidth for the fewest bytes that the op could move, or of the bf16 product for the operations that
it cannot leave out. Last, what a call costs the host, on a shape so small that the device does not matter.

    python -m benchmarks.kernels --ops rms_norm,glu --shapes full --out benchmarks/results/kernels.json
    python -m benchmarks.kernels --render benchmarks/results/kernels.json --markdown
    python -m benchmarks.kernels --dry                        # tiny, on the CPU: does everything run?
"""

import argparse
import functools
import gc
import importlib.util
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.common import PACKAGES, Error, Timer, ceilings, environment, table, write_json
from ligermodels import kernels

Tensors = dict[str, Tensor]
Call = Callable[[Tensors], tuple[Tensor, ...]]

EPS = 1e-5
IGNORED = -100
PEERS = {
    "eager": None,
    "compile": None,
    "torch": None,
    "liger": "liger_kernel.ops",
    "cce": "cut_cross_entropy",
}
"""Peer -> the module that it needs beyond torch."""
OUTRIGHT_WRONG = 0.05
"""Relative rms error above which a peer was called wrongly: a handful of bf16 roundings stay below 0.02."""


@dataclass(frozen=True)
class Provider:
    """One implementation. `packed` ones take the case's packed tensor in place of its parts."""

    name: str
    call: Call
    ours: bool = False
    packed: bool = False
    mutates: bool = False
    slack: float = 1.0


@dataclass(frozen=True)
class Packing:
    """`parts` side by side in one tensor `name`; their dims from `dim` on are one row."""

    name: str
    parts: tuple[str, ...]
    dim: int

    def pack(self, tensors: Tensors) -> Tensor:
        return torch.cat([tensors[part].flatten(self.dim) for part in self.parts], -1)

    def unpack(self, packed: Tensor, like: Tensors) -> list[Tensor]:
        widths = [like[part].flatten(self.dim).shape[-1] for part in self.parts]
        pieces = packed.split(widths, -1)
        return [piece.reshape(like[part].shape) for piece, part in zip(pieces, self.parts, strict=True)]


@dataclass(frozen=True)
class Case:
    """An op on one shape. `make` returns its inputs and one cotangent per output, none for a loss."""

    op: str
    shape: str
    make: Callable[[], tuple[Tensors, tuple[Tensor, ...]]]
    leaves: tuple[str, ...]
    outputs: tuple[str, ...]
    eager: Call
    """The op as transformers writes it: the measure of ours, whether or not it is timed as a peer."""
    providers: tuple[Provider, ...]
    exact: Callable[[Tensors], Tensors] | None = None
    """Outputs and gradients by name, where the eager form in fp64 is not the exact one."""
    packing: Packing | None = None
    forward_work: float | None = None
    full_work: float = 0.0
    unit: str = "bytes"
    loss_floor: float = 0.0
    make_small: Callable[[], tuple[Tensors, tuple[Tensor, ...]]] | None = None
    """Inputs that parity is checked on, where fp64 does not fit the ones that are timed."""


class Bound:
    """A provider with its own inputs, and the originals of those that it writes over."""

    def __init__(self, case: Case, provider: Provider, inputs: Tensors, cotangents: tuple[Tensor, ...]):
        self.case, self.provider, self.inputs = case, provider, inputs
        names, own = case.leaves, dict(inputs)
        if provider.packed:
            assert case.packing is not None, f"{case.op} has no packed form"
            packing = case.packing
            own[packing.name] = packing.pack(inputs)
            names = (packing.name, *(name for name in names if name not in packing.parts))
        self._originals: list[tuple[Tensor, Tensor]] = []
        self.tensors = {
            name: self._own(tensor).requires_grad_(name in names)
            for name, tensor in own.items()
            if not (provider.packed and name in case.packing.parts)
        }
        self.cotangents = tuple(self._own(cotangent) for cotangent in cotangents)
        self.leaves = [self.tensors[name] for name in names]

    def _own(self, tensor: Tensor) -> Tensor:
        if not self.provider.mutates:
            return tensor.detach()
        copy = tensor.detach().clone()
        self._originals.append((copy, tensor))
        return copy

    def restore(self) -> None:
        with torch.no_grad():
            for copy, original in self._originals:
                copy.copy_(original)

    def forward(self) -> tuple[Tensor, ...]:
        return self.provider.call(self.tensors)

    def full(self) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        outputs = self.forward()
        return outputs, torch.autograd.grad(outputs, self.leaves, self.cotangents or None)

    def results(self) -> Tensors:
        """Outputs by name, and the gradient of each leaf x as "d_x", whatever the provider's layout."""
        outputs, gradients = self.full()
        if self.provider.packed:
            parts = self.case.packing.unpack(gradients[0], self.inputs)
            gradients = (*parts, *gradients[1:])
        names = (*self.case.outputs, *(f"d_{leaf}" for leaf in self.case.leaves))
        return dict(zip(names, (*outputs, *gradients), strict=True))


def exact_results(case: Case, inputs: Tensors, cotangents: tuple[Tensor, ...]) -> Tensors:
    """Outputs and gradients in fp64."""
    if case.exact is not None:
        return case.exact(inputs)
    double = {name: x.double() if x.is_floating_point() else x for name, x in inputs.items()}
    bound = Bound(case, Provider("exact", case.eager), double, tuple(x.double() for x in cotangents))
    return {name: x.detach() for name, x in bound.results().items()}


def _compute(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _compiled(call: Call) -> Call:
    return torch.compile(call, fullgraph=True, dynamic=False)


class Place:
    """Where and in what dtype inputs are made; the same random numbers every time."""

    def __init__(self, device: str, dtype: torch.dtype):
        self.device, self.dtype = device, dtype

    def randn(self, *shape: int, scale: float = 1.0) -> Tensor:
        return torch.randn(shape, device=self.device, dtype=torch.float32).mul_(scale).to(self.dtype)

    def labels(self, tokens: int, vocab: int, *, ignored: float = 0.0) -> Tensor:
        labels = torch.randint(vocab, (tokens,), device=self.device)
        return labels.masked_fill_(torch.rand(tokens, device=self.device) < ignored, IGNORED)


# Each op below: the eager form as transformers writes it, and the case with its providers. Calls take a dict
# of tensors, return a tuple, and follow the input's dtype, so that the eager form in fp64 is the exact one.


def eager_rms_norm(t: Tensors) -> tuple[Tensor, ...]:
    x = t["x"].to(_compute(t["x"]))
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
        providers=_chosen(
            peers,
            Provider("ligermodels", lambda t: (kernels.rms_norm(t["x"], t["weight"], eps=EPS),), ours=True),
            eager=[Provider("eager", eager_rms_norm)],
            compile=[Provider("torch.compile", _compiled(eager_rms_norm))],
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
        providers=_chosen(
            peers,
            Provider(
                "ligermodels",
                lambda t: kernels.add_rms_norm(t["x"], t["residual"], t["weight"], eps=EPS),
                ours=True,
            ),
            eager=[Provider("eager", eager_add_rms_norm)],
            compile=[Provider("torch.compile", _compiled(eager_add_rms_norm))],
            torch=[Provider("add, F.rms_norm", pytorch)],
            liger=[Provider("Liger", liger)],
        ),
        forward_work=4 * width,
        full_work=8 * width,
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
            **{n: x.to(place.dtype) for n, x in full.items()},
        }
        return inputs, tuple(place.randn(*x.shape) for x in (q, k, v))

    def ours(t, inplace=False):
        qkv = _Produced.apply(t["qkv"]) if inplace else t["qkv"]
        return kernels.rope(qkv, t["cos"], t["sin"], num_heads=heads, num_kv_heads=kv_heads, inplace=inplace)

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
        providers=_chosen(
            peers,
            Provider("ligermodels", ours, ours=True, packed=True),
            Provider(
                "ligermodels, in place",
                functools.partial(ours, inplace=True),
                ours=True,
                packed=True,
                mutates=True,
            ),
            Provider("ligermodels, q and k apart", _rope_apart, ours=True),
            eager=[Provider("eager", eager_rope)],
            compile=[Provider("torch.compile", _compiled(eager_rope))],
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


def eager_glu(t: Tensors) -> tuple[Tensor, ...]:
    return (F.silu(t["gate"]) * t["up"],)


def glu_case(place: Place, peers: set[str], tokens: int, size: int) -> Case:
    def make():
        inputs = {"gate": place.randn(tokens, size), "up": place.randn(tokens, size)}
        return inputs, (place.randn(tokens, size),)

    def liger(t):
        from liger_kernel.ops import LigerSiLUMulFunction

        return (LigerSiLUMulFunction.apply(t["gate"], t["up"]),)

    def liger_packed(t):
        from liger_kernel.ops import LigerFusedGateUpSiLUMulFunction

        return (LigerFusedGateUpSiLUMulFunction.apply(t["gate_up"]),)

    width = 2 * tokens * size
    return Case(
        "glu",
        f"T={tokens} F={size}",
        make,
        leaves=("gate", "up"),
        outputs=("y",),
        eager=eager_glu,
        packing=Packing("gate_up", ("gate", "up"), 1),
        providers=_chosen(
            peers,
            Provider(
                "ligermodels",
                lambda t: (kernels.glu(t["gate_up"], activation="silu"),),
                ours=True,
                packed=True,
            ),
            eager=[Provider("eager", eager_glu)],
            compile=[Provider("torch.compile", _compiled(eager_glu))],
            liger=[
                Provider("Liger", liger, mutates=True),
                Provider("Liger, packed", liger_packed, packed=True),
            ],
        ),
        forward_work=3 * width,
        full_work=8 * width,
    )


def eager_cross_entropy(t: Tensors) -> tuple[Tensor, ...]:
    logits = t["logits"]
    return (F.cross_entropy(logits.to(_compute(logits)), t["labels"], ignore_index=IGNORED),)


def cross_entropy_case(place: Place, peers: set[str], tokens: int, vocab: int) -> Case:
    def make():
        return {"logits": place.randn(tokens, vocab, scale=2.0), "labels": place.labels(tokens, vocab)}, ()

    def liger(t):
        from liger_kernel.ops import LigerCrossEntropyFunction

        return (LigerCrossEntropyFunction.apply(t["logits"], t["labels"], None)[0],)

    width = 2 * tokens * vocab
    return Case(
        "cross_entropy",
        f"T={tokens} V={vocab}",
        make,
        leaves=("logits",),
        outputs=("loss",),
        eager=eager_cross_entropy,
        providers=_chosen(
            peers,
            Provider("ligermodels", lambda t: (kernels.cross_entropy(t["logits"], t["labels"]),), ours=True),
            eager=[Provider("eager", eager_cross_entropy)],
            compile=[Provider("torch.compile", _compiled(eager_cross_entropy))],
            torch=[Provider("F.cross_entropy, no upcast", lambda t: (F.cross_entropy(t["logits"], t["labels"]),))],
            liger=[Provider("Liger", liger, mutates=True)],
        ),
        full_work=2 * width,
        # The logits are exact here; what is left is fp32 sums over the vocabulary in another order.
        loss_floor=1e-5,
    )


def eager_linear_cross_entropy(t: Tensors) -> tuple[Tensor, ...]:
    return eager_cross_entropy({"logits": t["x"] @ t["weight"].T, "labels": t["labels"]})


def exact_linear_cross_entropy(inputs: Tensors) -> Tensors:
    """In fp64 and by hand, since the logits of all tokens in fp64 are too large: 1024 tokens at a time."""
    x, weight, labels = inputs["x"].double(), inputs["weight"].double(), inputs["labels"]
    dx, dw = torch.zeros_like(x), torch.zeros_like(weight)
    count = (labels != IGNORED).sum()
    loss = x.new_zeros(())
    for rows in torch.arange(len(x), device=x.device)[labels != IGNORED].split(1024):
        logits, target = x[rows] @ weight.T, labels[rows, None]
        lse = logits.logsumexp(-1, keepdim=True)
        loss += (lse - logits.gather(-1, target)).sum()
        dlogits = logits.sub_(lse).exp_().scatter_add_(-1, target, torch.full_like(lse, -1.0)).div_(count)
        dx[rows] = dlogits @ weight
        dw.addmm_(dlogits.T, x[rows])
    return {"loss": loss / count, "d_x": dx, "d_weight": dw}


def linear_cross_entropy_case(
    place: Place, peers: set[str], tokens: int, size: int, vocab: int, ignored: float = 0.0
) -> Case:
    def make():
        inputs = {
            "x": place.randn(tokens, size),
            "weight": place.randn(vocab, size, scale=size**-0.5),
            "labels": place.labels(tokens, vocab, ignored=ignored),
        }
        return inputs, ()

    torch.manual_seed(0)
    valid = int((make()[0]["labels"] != IGNORED).sum()) if ignored else tokens

    def ours(t, accum_dtype=torch.float32):
        num_valid = valid if ignored else None
        return (
            kernels.linear_cross_entropy(
                t["x"], t["weight"], t["labels"], num_valid=num_valid, accum_dtype=accum_dtype
            ),
        )

    def liger(t, accum_dtype=None):
        from liger_kernel.ops import LigerFusedLinearCrossEntropyFunction

        # bias, class weight, ignore_index, z-loss, smoothing, reduction, softcap, return_z_loss, accum_dtype
        options = (None, None, IGNORED, 0.0, 0.0, "mean", None, False, accum_dtype)
        return (LigerFusedLinearCrossEntropyFunction.apply(t["x"], t["weight"], t["labels"], *options)[0],)

    return Case(
        "linear_cross_entropy",
        f"T={tokens} H={size} V={vocab}" + (f", {ignored:.0%} ignored" if ignored else ""),
        make,
        leaves=("x", "weight"),
        outputs=("loss",),
        eager=eager_linear_cross_entropy,
        exact=exact_linear_cross_entropy,
        providers=_chosen(
            peers,
            Provider("ligermodels", ours, ours=True),
            # dW is rounded to bf16 after each of up to 8 chunks, worth sqrt((8 + 1) / 2) = 2.1 roundings
            Provider(
                "ligermodels, accum_dtype=None",
                functools.partial(ours, accum_dtype=None),
                ours=True,
                slack=2.5,
            ),
            eager=[Provider("eager", eager_linear_cross_entropy)],
            compile=[Provider("torch.compile", _compiled(eager_linear_cross_entropy))],
            liger=[
                Provider("Liger", liger),
                Provider("Liger, accum_dtype=fp32", functools.partial(liger, accum_dtype=torch.float32)),
            ],
            cce=[Provider("CCE, exact", _cce)],
        ),
        full_work=6.0 * valid * size * vocab,
        unit="operations",
        # A token's loss errs by about one rounding of a bf16 logit of size 1, independently of the others'.
        loss_floor=4 * torch.finfo(place.dtype).eps / valid**0.5,
    )


def _cce(t: Tensors) -> tuple[Tensor, ...]:
    """Without the gradient filter, whose saving comes from leaving small gradients out."""
    import cut_cross_entropy

    exact = {"filter_eps": None}
    if hasattr(cut_cross_entropy.LinearCrossEntropyImpl, "CCE_EXACT"):
        exact = {"impl": "cce_exact"}
    return (cut_cross_entropy.linear_cross_entropy(t["x"], t["weight"], t["labels"], **exact),)


def _hidden(length: int, window: int | None, device: str) -> Tensor:
    """[S, S], True where query i does not see key j."""
    distance = torch.arange(length, device=device)[:, None] - torch.arange(length, device=device)
    return (distance < 0) | (distance >= (window or length))


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
) -> Case:
    hidden = functools.lru_cache(maxsize=1)(lambda n: _hidden(n, window, place.device))
    block_masks = functools.lru_cache(maxsize=2)(lambda n: _block_mask(n, window, place.device))

    capped = _softcapped(softcap)

    def make(batch=batch, length=length):
        q, k, v = (place.randn(batch, length, n, head_dim) for n in (heads, kv_heads, kv_heads))
        return {"q": q, "k": k, "v": v}, (place.randn(*q.shape),)

    def eager(t):
        q, k, v = (t[name].transpose(1, 2) for name in ("q", "k", "v"))
        k, v = (x.repeat_interleave(heads // kv_heads, 1) for x in (k, v))
        scores = q @ k.transpose(2, 3) * head_dim**-0.5
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        scores = scores.masked_fill(hidden(q.shape[2]), float("-inf"))
        weights = scores.softmax(-1, dtype=_compute(q)).to(q.dtype)
        return ((weights @ v).transpose(1, 2).contiguous(),)

    def sdpa(t):
        q, k, v = (t[name].transpose(1, 2) for name in ("q", "k", "v"))
        return (F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2),)

    def flex(t):
        q, k, v = (t[name].transpose(1, 2) for name in ("q", "k", "v"))
        mask = block_masks(q.shape[2])
        return (_flex_attention()(q, k, v, capped, mask, enable_gqa=True).transpose(1, 2),)

    sized = f"B={batch} HQ={heads} HK={kv_heads} S={length} D={head_dim}"
    sized += (f" window={window}" if window else "") + (f" softcap={softcap:g}" if softcap else "")
    seen = min(window or length, length)
    pairs = batch * heads * (seen * (seen + 1) / 2 + (length - seen) * seen)
    plain = window is None and softcap is None
    flexible = [Provider("FlexAttention", flex)] if place.device == "cuda" else []  # no backward on a CPU
    return Case(
        "attention",
        sized,
        make,
        leaves=("q", "k", "v"),
        outputs=("out",),
        eager=eager,
        providers=_chosen(
            peers,
            Provider(
                "ligermodels",
                lambda t: (kernels.attention(t["q"], t["k"], t["v"], causal=True, window=window, softcap=softcap),),
                ours=True,
            ),
            # The eager form holds [B, HQ, S, S] several times over.
            eager=[Provider("eager", eager)] if batch * heads * length**2 <= 2**31 else [],
            torch=[Provider("SDPA", sdpa)] if plain else flexible,
        ),
        forward_work=4 * pairs * head_dim,
        full_work=14 * pairs * head_dim,
        unit="operations",
        make_small=lambda: make(1, min(length, 2048)),
    )


def _block_mask(length: int, window: int | None, device: str):
    from torch.nn.attention.flex_attention import create_block_mask

    def sees(batch, head, query, key):
        return (query >= key) & (query - key < (window or length))

    return create_block_mask(sees, None, None, length, length, device=device)


def _softcapped(softcap: float | None):
    if softcap is None:
        return None

    def capped(score, batch, head, query, key):
        return softcap * torch.tanh(score / softcap)

    return capped


@functools.lru_cache(maxsize=1)
def _flex_attention():
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False)


def _chosen(peers: set[str], *ours: Provider, **theirs: list[Provider]) -> tuple[Provider, ...]:
    return (*ours, *(provider for peer, listed in theirs.items() if peer in peers for provider in listed))


CASES: dict[str, Callable[..., Case]] = {
    "rms_norm": rms_norm_case,
    "add_rms_norm": add_rms_norm_case,
    "rope": rope_case,
    "glu": glu_case,
    "cross_entropy": cross_entropy_case,
    "linear_cross_entropy": linear_cross_entropy_case,
    "attention": attention_case,
}
"""Op -> the function that makes a case of it from (place, peers, *the numbers below)."""

V = 128256
SHAPES: dict[str, dict[str, list[tuple]]] = {
    "full": {
        "rms_norm": [(16384, 2048), (16384, 4096), (16384, 8192)],
        "add_rms_norm": [(16384, 2048), (16384, 4096), (16384, 8192)],
        "rope": [(4, 4096, 32, 8, 128)],
        "glu": [(16384, 8192), (16384, 14336)],
        "cross_entropy": [(8192, V)],
        "linear_cross_entropy": [(8192, 2048, V), (8192, 4096, V), (16384, 4096, V), (16384, 4096, V, 0.7)],
        "attention": [
            (8, 32, 8, 2048, 64),
            (4, 32, 8, 4096, 128),
            (4, 32, 32, 4096, 96),
            (4, 8, 4, 4096, 256, None, 50.0),
            (2, 32, 8, 8192, 128, 1024),
        ],
    },
    "quick": {
        "rms_norm": [(16384, 2048), (16384, 4096)],
        "add_rms_norm": [(16384, 4096)],
        "rope": [(4, 4096, 32, 8, 128)],
        "glu": [(16384, 14336)],
        "cross_entropy": [(8192, V)],
        "linear_cross_entropy": [(8192, 2048, V), (8192, 4096, V), (8192, 4096, V, 0.7)],
        "attention": [(4, 32, 8, 4096, 128)],
    },
    "tiny": {
        "rms_norm": [(16, 256)],
        "add_rms_norm": [(16, 256)],
        "rope": [(1, 16, 4, 2, 64)],
        "glu": [(16, 256)],
        "cross_entropy": [(16, 512)],
        "linear_cross_entropy": [(16, 64, 512)],
        "attention": [(1, 4, 2, 128, 64)],
    },
    "dry": {
        "rms_norm": [(5, 48)],
        "add_rms_norm": [(5, 48)],
        "rope": [(2, 7, 4, 2, 16)],
        "glu": [(5, 24)],
        "cross_entropy": [(9, 131)],
        "linear_cross_entropy": [(9, 32, 131), (33, 32, 131, 0.7)],
        "attention": [(2, 4, 2, 24, 16), (1, 4, 2, 24, 16, 8), (1, 4, 2, 24, 16, None, 5.0)],
    },
}
"""`tiny` is what the host cost is taken on. `full` and `quick` are Llama's sizes, the softcap's Gemma 2's."""


def check(case: Case) -> tuple[list[dict[str, Any]], set[str]]:
    """(what each provider's results err by, the providers that may not be timed)."""
    torch.manual_seed(0)
    inputs, cotangents = (case.make_small or case.make)()
    exact = exact_results(case, inputs, cotangents)
    eager_errors: dict[str, Error] = {}
    rows, refused = [], set()
    eager = Provider("eager", case.eager)
    for provider in [eager, *(provider for provider in case.providers if provider.name != "eager")]:
        try:
            errors = _errors(Bound(case, provider, inputs, cotangents), exact)
        except Exception as error:
            if provider is eager:
                raise
            traceback.print_exc()
            rows.append({"provider": provider.name, "why": _summary(error)})
            refused.add(provider.name)
            continue
        if provider is eager:
            eager_errors = errors
        for name, error in errors.items():
            why = ""
            if provider.ours:
                floor = case.loss_floor if name == "loss" else 0.0
                why = error.worse_than(eager_errors[name], slack=provider.slack, floor=floor)
            elif not error.relative <= OUTRIGHT_WRONG:
                why = f"relative rms error {error.relative:.3g}: computes something else"
            if why:
                refused.add(provider.name)
            rows.append({"provider": provider.name, "tensor": name, "why": why, **asdict(error)})
            rows[-1]["rms_over_eager"] = error.rms / eager_errors[name].rms if eager_errors[name].rms else None
    for row in rows:
        row.update(op=case.op, shape=case.shape)
    return rows, refused


def _errors(bound: Bound, exact: Tensors) -> dict[str, Error]:
    return {name: Error.of(result.detach(), exact[name]) for name, result in bound.results().items()}


def _summary(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:160]


def measure(case: Case, timer: Timer, limits: Mapping[str, float], skip: set[str]) -> Iterator[dict[str, Any]]:
    """One row per provider of the case."""
    torch.manual_seed(0)
    inputs, cotangents = case.make()
    rate = limits["copy_tb_per_s" if case.unit == "bytes" else "matmul_bf16_tflop_per_s"] * 1e9
    for provider in case.providers:
        row: dict[str, Any] = {
            "op": case.op,
            "shape": case.shape,
            "provider": provider.name,
            "ours": provider.ours,
        }
        if provider.name in skip:
            yield {**row, "note": "not timed: see parity"}
            continue
        try:
            bound = Bound(case, provider, inputs, cotangents)
            forward = timer.time(bound.forward, bound.restore)
            full = timer.time(bound.full, bound.restore)
            row.update(forward_ms=asdict(forward), full_ms=asdict(full))
            row["peak_mib"] = timer.peak_mib(bound.full, bound.restore)
            if case.forward_work is not None:
                row["forward_share"] = case.forward_work / forward.median / rate
            row["full_share"] = case.full_work / full.median / rate
            row["unit"] = case.unit
        except Exception as error:
            traceback.print_exc()
            row = {**row, "note": _summary(error)}
        yield row


def host_cost(case: Case, timer: Timer, skip: set[str]) -> Iterator[dict[str, Any]]:
    torch.manual_seed(0)
    inputs, cotangents = case.make()
    for provider in case.providers:
        if provider.name in skip:
            continue
        row: dict[str, Any] = {"op": case.op, "provider": provider.name, "ours": provider.ours}
        try:
            bound = Bound(case, provider, inputs, cotangents)
            row.update(forward_us=timer.host_us(bound.forward), full_us=timer.host_us(bound.full))
        except Exception as error:
            traceback.print_exc()
            row["note"] = _summary(error)
        yield row


def run(
    ops: Sequence[str], shapes: str, peers: set[str], place: Place, timer: Timer, limits: Mapping[str, float]
) -> dict[str, Any]:
    """Parity of every op, then the times of those that passed. `red` lists the ops that did not."""
    record: dict[str, Any] = {"parity": [], "rows": [], "host": [], "red": []}
    for op in ops:
        started = time.perf_counter()
        torch._dynamo.reset()  # or the shapes of all ops share one limit on recompilations
        cases = [CASES[op](place, peers, *numbers) for numbers in SHAPES[shapes][op]]
        refused = {}
        for case in cases:
            rows, refused[case.shape] = check(case)
            record["parity"] += rows
            _collect()
        ours = {provider.name for case in cases for provider in case.providers if provider.ours}
        everywhere = set().union(*refused.values())
        if everywhere & ours:
            record["red"].append(op)
            continue
        rows, host = [], []
        for case in cases:
            rows += measure(case, timer, limits, refused[case.shape])
            _collect()
        for numbers in SHAPES["tiny"][op]:
            host += host_cost(CASES[op](place, peers, *numbers), timer, everywhere)
        if any(row["ours"] and "note" in row for row in (*rows, *host)):
            record["red"].append(op)
        record["rows"] += rows
        record["host"] += host
        print(f"{op}: {time.perf_counter() - started:.0f} s", file=sys.stderr, flush=True)
    return record


def _collect() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def render(record: Mapping[str, Any], *, markdown: bool = False) -> str:
    """The tables of a result as text."""
    env, limits = record["environment"], record["ceilings"]
    versions = ", ".join(f"{package} {env[package]}" for package in PACKAGES if env[package])
    parts = [
        f"{env['device']}, {record['dtype']}, {versions}; commit {env['commit']}, {env['date']}",
        f"`{env['command']}`" if markdown else env["command"],
        f"ceilings in this run: copy {limits['copy_tb_per_s']:.2f} TB/s, "
        f"bf16 product {limits['matmul_bf16_tflop_per_s']:.0f} TFLOP/s",
    ]
    for op in dict.fromkeys(row["op"] for row in record["rows"]):
        rows = [row for row in record["rows"] if row["op"] == op]
        worst = _worst_errors(record["parity"], op)
        lines = [_line(row, rows, worst) for row in rows]
        parts.append(f"### {op}\n\n{table(COLUMNS, lines, markdown=markdown)}")
    if record["host"]:
        lines = [[row["op"], row["provider"], row.get("forward_us"), row.get("full_us")] for row in record["host"]]
        columns = ["op", "provider", "forward us", "fwd+bwd us"]
        parts.append(f"### Host time per call, tiny shapes\n\n{table(columns, lines, markdown=markdown)}")
    bad = [row for row in record["parity"] if row["why"]]
    if bad:
        lines = [[row["op"], row["shape"], row["provider"], row.get("tensor"), row["why"]] for row in bad]
        columns = ["op", "shape", "provider", "tensor", "why"]
        parts.append(f"### Parity: what is not as exact as it must be\n\n{table(columns, lines, markdown=markdown)}")
    if record["red"]:
        parts.append(f"RED, parity failed or ours did not run: {', '.join(record['red'])}")
    return "\n\n".join(parts)


COLUMNS = [
    "shape",
    "provider",
    "forward ms",
    "fwd+bwd ms",
    "peak MiB",
    "ceiling fwd / both",
    "time / ours",
    "error",
]
"""`time / ours`: of forward + backward, against the first row of ours. `error`: the largest rms error over
eager's, of all outputs and gradients."""


def _line(row: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], worst: Mapping[tuple, float]) -> list[Any]:
    start = [row["shape"], row["provider"]]
    if "full_ms" not in row:
        return [*start, None, None, None, row["note"], None, None]
    ours = next((r for r in rows if r["shape"] == row["shape"] and r["ours"] and "full_ms" in r), None)
    shares = [f"{row[key]:.0%}" if key in row else "" for key in ("forward_share", "full_share")]
    return [
        *start,
        row["forward_ms"]["median"],
        row["full_ms"]["median"],
        None if row["peak_mib"] is None else round(row["peak_mib"]),
        " / ".join(share for share in shares if share),
        row["full_ms"]["median"] / ours["full_ms"]["median"] if ours else None,
        worst.get((row["shape"], row["provider"])),
    ]


def _worst_errors(parity: Sequence[Mapping[str, Any]], op: str) -> dict[tuple[str, str], float]:
    """(shape, provider) -> largest rms error over eager's. The loss is one draw, whose ratio says nothing."""
    worst: dict[tuple[str, str], float] = {}
    for row in parity:
        ratio = row.get("rms_over_eager")
        if row["op"] == op and ratio is not None and row["tensor"] != "loss":
            key = (row["shape"], row["provider"])
            worst[key] = max(worst.get(key, 0.0), ratio)
    return worst


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--ops", default=",".join(CASES), help="comma-separated; default all")
    parser.add_argument("--shapes", choices=("quick", "full"), default="quick")
    parser.add_argument("--peers", help=f"comma-separated; default all that are installed: {','.join(PEERS)}")
    parser.add_argument("--out", help="JSON file for the result")
    parser.add_argument("--markdown", action="store_true", help="print Markdown tables")
    parser.add_argument("--render", metavar="FILE.json", help="print an earlier result instead of measuring")
    parser.add_argument("--dry", action="store_true", help="tiny shapes on the CPU; the times mean nothing")
    options = parser.parse_args(arguments)
    if options.render:
        print(render(json.loads(Path(options.render).read_text()), markdown=options.markdown))
        return 0
    ops = options.ops.split(",")
    asked = options.peers.split(",") if options.peers else ["eager", "torch"] if options.dry else list(PEERS)
    for names, known in ((ops, CASES), (asked, PEERS)):
        if unknown := sorted(set(names) - set(known) - {""}):
            parser.error(f"unknown: {', '.join(unknown)}; known: {', '.join(known)}")
    if not options.dry and not torch.cuda.is_available():
        parser.error("needs a CUDA device; --dry runs tiny shapes on the CPU")
    missing = {
        peer for peer in asked if PEERS.get(peer) and importlib.util.find_spec(PEERS[peer].split(".")[0]) is None
    }
    if missing and options.peers:
        parser.error(f"not installed: {', '.join(sorted(missing))}")
    device, dtype = "cpu" if options.dry else "cuda", torch.bfloat16
    if options.dry and os.environ.get("TRITON_INTERPRET") == "1":
        dtype = torch.float16  # interpreted kernels truncate where bf16 rounds
    timer = Timer(device)
    limits = ceilings(timer)
    result = run(
        ops,
        "dry" if options.dry else options.shapes,
        set(asked) - missing,
        Place(device, dtype),
        timer,
        limits,
    )
    record = {
        "benchmark": "kernels",
        "environment": environment(device),
        "dtype": str(dtype).removeprefix("torch."),
        "not_installed": sorted(missing),
        "ceilings": limits,
        **result,
    }
    if options.out:
        write_json(options.out, record)
    print(render(record, markdown=options.markdown))
    if missing:
        print(f"left out, not installed: {', '.join(sorted(missing))}")
    return 1 if record["red"] else 0


if __name__ == "__main__":
    sys.exit(main())
