"""The ops that `benchmarks.kernels` times: inputs, the eager form, the baselines, and one table of shapes at the end.

A case is made by a function of (place, sizes). The eager form writes the op as transformers does and follows the dtype
of its inputs: in fp64 it is the exact result. All baselines of a case have the same inputs and the same leaves, laid
out alike; a peer's other layout is a case of its own.
"""

import functools
import inspect
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from ligermodels import kernels
from ligermodels.layers import MoE

Tensors = dict[str, Tensor]
Call = Callable[[Tensors], Any]
IGNORED, EPS = -100, 1e-5


@dataclass
class Case:
    """An op on one shape.

    leaves: inputs whose gradients are computed. constants: those without.
    baselines: name -> call of all inputs; those of ours begin with "ligermodels". overwrites: baselines that write over
    their inputs, and get fresh copies, outside of the time. slack: baseline -> factor on the error that it is allowed.
    bytes: the fewest that forward and backward can move. flops: of forward and backward, what cannot be left out.
    gemms: the matmuls that the op cannot do without, by themselves, as a row of their own.
    scalar_tolerance: the error that a loss is always allowed.
    compile_eager: the eager form is a baseline, and again under torch.compile.
    """

    leaves: Tensors
    eager: Call
    baselines: dict[str, Call]
    constants: Tensors = field(default_factory=dict)
    overwrites: tuple[str, ...] = ()
    slack: Mapping[str, float] = field(default_factory=dict)
    bytes: float = 0.0
    flops: float = 0.0
    forward_flops: float = 0.0
    gemms: tuple[str, Call] | None = None
    scalar_tolerance: float = 0.0
    compile_eager: bool = True

    def __post_init__(self) -> None:
        if self.compile_eager:
            ours = {name: call for name, call in self.baselines.items() if name.startswith("ligermodels")}
            compiled = torch.compile(self.eager, fullgraph=True, dynamic=False)
            self.baselines = {**ours, "eager": self.eager, "torch.compile": compiled, **self.baselines}


class Place:
    """Where and in what dtype inputs are made."""

    def __init__(self, device: str, dtype: torch.dtype):
        self.device, self.dtype = device, dtype

    def randn(self, *shape: int, scale: float = 1.0) -> Tensor:
        return torch.randn(shape, device=self.device).mul_(scale).to(self.dtype)

    def labels(self, tokens: int, vocab: int, ignored: float = 0.0) -> Tensor:
        labels = torch.randint(vocab, (tokens,), device=self.device)
        return labels.masked_fill_(torch.rand(tokens, device=self.device) < ignored, IGNORED)

    def head(self, vocab: int, size: int) -> Tensor:
        """A head that makes logits of deviation 1."""
        return self.randn(vocab, size, scale=size**-0.5)

    def logits_tolerance(self, tokens: int) -> float:
        """What a mean loss of so many tokens may err by: each token's errs by one rounding of a logit of size 1."""
        return 4 * torch.finfo(self.dtype).eps / tokens**0.5


def upcast(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def liger(name: str) -> Any:
    """An autograd.Function of Liger's."""
    return getattr(__import__("liger_kernel.ops", fromlist=[name]), name)


# Norms, activations, rotation: bound by memory.


def eager_rms_norm(t: Tensors) -> Tensor:
    x = upcast(t["x"])
    x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS)
    return t["weight"] * x.to(t["x"].dtype)


def rms_norm(place: Place, tokens: int, size: int) -> Case:
    return Case(
        leaves={"x": place.randn(tokens, size), "weight": 1 + place.randn(size, scale=0.1)},
        eager=eager_rms_norm,
        baselines={
            "ligermodels": lambda t: kernels.rms_norm(t["x"], t["weight"], eps=EPS),
            "F.rms_norm": lambda t: F.rms_norm(t["x"], (size,), t["weight"], EPS),
            # eps, offset, casting mode, in place: dx goes where dy was, the default of LigerRMSNorm
            "Liger": lambda t: liger("LigerRMSNormFunction").apply(t["x"], t["weight"], EPS, 0.0, "llama", True),
        },
        overwrites=("Liger",),
        bytes=10.0 * tokens * size,
    )


def eager_add_rms_norm(t: Tensors) -> tuple[Tensor, Tensor]:
    total = t["x"] + t["residual"]
    return eager_rms_norm({"x": total, "weight": t["weight"]}), total


def add_rms_norm(place: Place, tokens: int, size: int) -> Case:
    def pytorch(t: Tensors) -> tuple[Tensor, Tensor]:
        total = t["x"] + t["residual"]
        return F.rms_norm(total, (size,), t["weight"], EPS), total

    def of_liger(t: Tensors) -> tuple[Tensor, Tensor]:
        function = liger("LigerFusedAddRMSNormFunction")
        return function.apply(t["x"], t["residual"], t["weight"], EPS, 0.0, "llama", False)

    return Case(
        leaves={
            "x": place.randn(tokens, size),
            "residual": place.randn(tokens, size),
            "weight": 1 + place.randn(size, scale=0.1),
        },
        eager=eager_add_rms_norm,
        baselines={
            "ligermodels": lambda t: kernels.add_rms_norm(t["x"], t["residual"], t["weight"], eps=EPS),
            "add, F.rms_norm": pytorch,
            "Liger": of_liger,
        },
        bytes=16.0 * tokens * size,
    )


def eager_layer_norm(t: Tensors) -> Tensor:
    x = upcast(t["x"])
    x = x - x.mean(-1, keepdim=True)
    x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS)
    return (x * t["weight"].to(x.dtype) + t["bias"].to(x.dtype)).to(t["x"].dtype)


def layer_norm(place: Place, tokens: int, size: int) -> Case:
    weight, bias = 1 + place.randn(size, scale=0.1), place.randn(size, scale=0.1)
    return Case(
        leaves={"x": place.randn(tokens, size), "weight": weight, "bias": bias},
        eager=eager_layer_norm,
        baselines={
            "ligermodels": lambda t: kernels.layer_norm(t["x"], t["weight"], t["bias"], eps=EPS),
            "F.layer_norm": lambda t: F.layer_norm(t["x"], (size,), t["weight"], t["bias"], EPS),
            "Liger": lambda t: liger("LigerLayerNormFunction").apply(t["x"], t["weight"], t["bias"], EPS),
        },
        bytes=10.0 * tokens * size,
    )


def glu(place: Place, tokens: int, size: int, activation: str = "silu", packed: bool = False) -> Case:
    """packed: gate and up side by side in one tensor, as one matmul makes them."""

    def eager(t: Tensors) -> Tensor:
        gate, up = t["gate_up"].chunk(2, -1) if packed else (t["gate"], t["up"])
        return (F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")) * up

    def of_liger(t: Tensors) -> Tensor:
        if packed:
            return liger("LigerFusedGateUpSiLUMulFunction").apply(t["gate_up"])
        function = "LigerSiLUMulFunction" if activation == "silu" else "LigerGELUMulFunction"
        return liger(function).apply(t["gate"], t["up"])

    leaves = {"gate": place.randn(tokens, size), "up": place.randn(tokens, size)}
    if packed:
        leaves = {"gate_up": torch.cat([leaves["gate"], leaves["up"]], -1)}
    return Case(
        leaves=leaves,
        eager=eager,
        baselines={
            "ligermodels": lambda t: kernels.glu(*(t[name] for name in leaves), activation=activation),
            "Liger": of_liger,
        },
        overwrites=("Liger",),
        bytes=16.0 * tokens * size,
    )


def _rope_tables(place: Place, batch: int, length: int, head_dim: int) -> Tensors:
    """cos and sin in fp32 for ours, and of full width in the activations' dtype, as transformers has them."""
    frequencies = 5e5 ** -(torch.arange(0, head_dim, 2, device=place.device, dtype=torch.float64) / head_dim)
    angles = torch.arange(length, device=place.device)[None, :, None] * frequencies
    tables = {"cos": angles.cos().float(), "sin": angles.sin().float()}
    return tables | {f"full_{name}": torch.cat((x, x), -1).to(place.dtype) for name, x in tables.items()}


def _rotate(t: Tensors, x: Tensor) -> Tensor:
    """x [B, S, heads, D] as transformers rotates it: heads before positions."""
    cos, sin = t["full_cos"][:, None], t["full_sin"][:, None]
    if x.dtype == torch.float64:  # the exact result is not that of rounded tables
        cos, sin = (torch.cat((t[name], t[name]), -1)[:, None] for name in ("cos", "sin"))
    x = x.transpose(1, 2)
    first, second = x.chunk(2, -1)
    return (x * cos + torch.cat((-second, first), -1) * sin).transpose(1, 2)


class _Produced(torch.autograd.Function):
    """The tensor itself, as the output of a projection: an op in place may not write over a leaf."""

    @staticmethod
    def forward(ctx, x):
        return x.detach()

    @staticmethod
    def backward(ctx, gradient):
        return gradient


def rope(place: Place, batch: int, length: int, heads: int, kv_heads: int, head_dim: int, packed: bool = False) -> Case:
    """packed: q, k and v side by side in one tensor, as one matmul makes them."""

    def eager(t: Tensors) -> tuple[Tensor, ...]:
        if not packed:
            return _rotate(t, t["q"]), _rotate(t, t["k"])
        q, k, v = t["qkv"].unflatten(-1, (-1, head_dim)).split((heads, kv_heads, kv_heads), dim=2)
        return _rotate(t, q), _rotate(t, k), v

    def ours(t: Tensors, inplace: bool = False) -> tuple[Tensor, ...]:
        if not packed:
            return kernels.rope_qk(t["q"], t["k"], t["cos"], t["sin"])
        qkv = _Produced.apply(t["qkv"]) if inplace else t["qkv"]
        return kernels.rope(qkv, t["cos"], t["sin"], num_heads=heads, num_kv_heads=kv_heads, inplace=inplace)

    def of_liger(t: Tensors) -> tuple[Tensor, Tensor]:
        q, k = (t[name].transpose(1, 2) for name in ("q", "k"))
        q, k = liger("LigerRopeFunction").apply(q, k, t["full_cos"], t["full_sin"])
        return q.transpose(1, 2), k.transpose(1, 2)

    in_place = {"ligermodels, in place": functools.partial(ours, inplace=True)}
    q, k = (place.randn(batch, length, n, head_dim) for n in (heads, kv_heads))
    qkv = place.randn(batch, length, (heads + 2 * kv_heads) * head_dim)
    return Case(
        leaves={"qkv": qkv} if packed else {"q": q, "k": k},
        constants=_rope_tables(place, batch, length, head_dim),
        eager=eager,
        baselines={"ligermodels": ours, **(in_place if packed else {"Liger": of_liger})},
        overwrites=("Liger", "ligermodels, in place"),
        bytes=8.0 * batch * length * (heads + kv_heads) * head_dim,
    )


# Losses and divergences, alone and over the matmul that makes their logits.


def eager_cross_entropy(t: Tensors) -> Tensor:
    return F.cross_entropy(upcast(t["logits"]), t["labels"], ignore_index=IGNORED)


def cross_entropy(place: Place, tokens: int, vocab: int) -> Case:
    return Case(
        leaves={"logits": place.randn(tokens, vocab, scale=2.0)},
        constants={"labels": place.labels(tokens, vocab)},
        eager=eager_cross_entropy,
        baselines={
            "ligermodels": lambda t: kernels.cross_entropy(t["logits"], t["labels"]),
            "F.cross_entropy, no upcast": lambda t: F.cross_entropy(t["logits"], t["labels"]),
            "Liger": lambda t: liger("LigerCrossEntropyFunction").apply(t["logits"], t["labels"], None)[0],
        },
        overwrites=("Liger",),
        bytes=4.0 * tokens * vocab,
        scalar_tolerance=1e-5,  # the logits are exact here: only fp32 sums in another order are left
    )


def three_gemms(x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    """The matmuls of a linear loss: the logits, and with something of their shape the gradients of both factors."""
    logits = x @ weight.T
    return logits @ weight, logits.T @ x


def eager_linear_cross_entropy(t: Tensors) -> Tensor:
    return eager_cross_entropy({"logits": t["x"] @ t["weight"].T, "labels": t["labels"]})


def linear_cross_entropy(place: Place, tokens: int, size: int, vocab: int, ignored: float = 0.0) -> Case:
    labels = place.labels(tokens, vocab, ignored)
    valid = int((labels != IGNORED).sum())

    def ours(t: Tensors, accum_dtype: torch.dtype | None) -> Tensor:
        num_valid = valid if ignored else None
        return kernels.linear_cross_entropy(
            t["x"], t["weight"], t["labels"], num_valid=num_valid, accum_dtype=accum_dtype
        )

    def of_liger(t: Tensors, accum_dtype: torch.dtype | None) -> Tensor:
        # bias, class weight, ignore_index, z-loss, smoothing, reduction, softcap, return_z_loss, accum_dtype
        options = (None, None, IGNORED, 0.0, 0.0, "mean", None, False, accum_dtype)
        return liger("LigerFusedLinearCrossEntropyFunction").apply(t["x"], t["weight"], t["labels"], *options)[0]

    def cce(t: Tensors) -> Tensor:
        """Without the gradient filter, which saves time by leaving small gradients out."""
        import cut_cross_entropy

        implementations = cut_cross_entropy.LinearCrossEntropyImpl
        exact = {"impl": "cce_exact"} if hasattr(implementations, "CCE_EXACT") else {"filter_eps": None}
        return cut_cross_entropy.linear_cross_entropy(t["x"], t["weight"], t["labels"], **exact)

    return Case(
        leaves={"x": place.randn(tokens, size), "weight": place.head(vocab, size)},
        constants={"labels": labels},
        eager=eager_linear_cross_entropy,
        baselines={
            "ligermodels": functools.partial(ours, accum_dtype=torch.float32),
            "ligermodels, accum_dtype=None": functools.partial(ours, accum_dtype=None),
            "Liger, accum_dtype=fp32": functools.partial(of_liger, accum_dtype=torch.float32),
            "Liger": functools.partial(of_liger, accum_dtype=None),
            "CCE, exact": cce,
        },
        # dW is rounded to bf16 after each of up to 8 chunks, worth sqrt((8 + 1) / 2) = 2.1 roundings
        slack={"ligermodels, accum_dtype=None": 2.5},
        flops=6.0 * valid * size * vocab,
        gemms=("three GEMMs", lambda t: three_gemms(t["x"][:valid], t["weight"])),
        scalar_tolerance=place.logits_tolerance(valid),
    )


def eager_linear_logprobs(x: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return upcast(x @ weight.T).log_softmax(-1).gather(-1, labels[..., None])[..., 0]


def eager_jsd(student: Tensor, teacher: Tensor) -> Tensor:
    """With beta 0.5, of log probabilities, summed over the vocabulary, mean over the tokens."""
    mixture = torch.logsumexp(torch.stack([student, teacher]), dim=0) - math.log(2)
    divergence = functools.partial(F.kl_div, mixture, reduction="batchmean", log_target=True)
    return 0.5 * divergence(target=teacher) + 0.5 * divergence(target=student)


def linear_jsd(place: Place, tokens: int, size: int, teacher_size: int, vocab: int) -> Case:
    names = ("x", "weight", "teacher_x", "teacher_weight")

    def eager(t: Tensors) -> Tensor:
        student, teacher = t["x"] @ t["weight"].T, t["teacher_x"] @ t["teacher_weight"].T
        return eager_jsd(upcast(student).log_softmax(-1), upcast(teacher).log_softmax(-1))

    def of_liger(t: Tensors, accum_dtype: torch.dtype | None) -> Tensor:
        options = (None, 0.5, IGNORED, 1.0, accum_dtype)  # labels, beta, ignore_index, temperature, accum_dtype
        return liger("LigerFusedLinearJSDFunction").apply(*(t[name] for name in names), *options)

    def gemms(t: Tensors) -> tuple[Tensor, ...]:
        return *three_gemms(t["x"], t["weight"]), t["teacher_x"] @ t["teacher_weight"].T

    return Case(
        leaves={"x": place.randn(tokens, size), "weight": place.head(vocab, size)},
        constants={"teacher_x": place.randn(tokens, teacher_size), "teacher_weight": place.head(vocab, teacher_size)},
        eager=eager,
        baselines={
            "ligermodels": lambda t: kernels.linear_jsd(*(t[name] for name in names), beta=0.5),
            "Liger, accum_dtype=fp32": functools.partial(of_liger, accum_dtype=torch.float32),
            "Liger": functools.partial(of_liger, accum_dtype=None),
        },
        flops=(6.0 * size + 2.0 * teacher_size) * tokens * vocab,
        gemms=("four GEMMs", gemms),
        scalar_tolerance=place.logits_tolerance(tokens),
    )


BETA = 0.1


def dpo(t: Tensors, logprobs: Callable[..., Tensor]) -> Tensor:
    """DPO's loss as TRL writes it, of the first half of the sequences against the second."""
    with torch.no_grad():
        reference = logprobs(t["ref_x"], t["ref_weight"], t["labels"]).sum(-1)
    chosen, rejected = (logprobs(t["x"], t["weight"], t["labels"]).sum(-1) - reference).chunk(2)
    return -F.logsigmoid(BETA * (chosen - rejected)).mean()


def linear_dpo(place: Place, sequences: int, length: int, size: int, vocab: int) -> Case:
    """DPO with a reference model, from the hidden states of both."""
    tokens = sequences * length

    def of_liger(t: Tensors) -> Tensor:
        from liger_kernel.chunked_loss import LigerFusedLinearDPOLoss

        module = LigerFusedLinearDPOLoss(beta=BETA, use_ref_model=True)
        return module(t["weight"], t["x"], t["labels"], ref_input=t["ref_x"], ref_weight=t["ref_weight"])[0]

    def gemms(t: Tensors) -> tuple[Tensor, ...]:
        return *three_gemms(t["x"].flatten(0, 1), t["weight"]), t["ref_x"].flatten(0, 1) @ t["ref_weight"].T

    return Case(
        leaves={"x": place.randn(sequences, length, size), "weight": place.head(vocab, size)},
        constants={
            "ref_x": place.randn(sequences, length, size),
            "ref_weight": place.head(vocab, size),
            "labels": place.labels(tokens, vocab).view(sequences, length),
        },
        eager=functools.partial(dpo, logprobs=eager_linear_logprobs),
        baselines={"ligermodels": functools.partial(dpo, logprobs=kernels.linear_logprobs), "Liger": of_liger},
        flops=8.0 * tokens * size * vocab,
        gemms=("four GEMMs", gemms),
        scalar_tolerance=place.logits_tolerance(tokens) * BETA * tokens,  # of a sum over tokens
    )


# Attention and the mixture of experts: bound by arithmetic.

DOCUMENTS = (1, 3, 6, 2, 9, 4, 27, 12)
"""Lengths of the documents in a packed row, in 64ths of it."""
REAL_TOKENS = (8, 7, 5, 3)
"""Of the rows of a left-padded batch, in eighths, over and over."""


def attention(
    place: Place,
    batch: int,
    length: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    window: int | None = None,
    softcap: float | None = None,
    layout: str = "full",
) -> Case:
    """Causal. layout: "full" rows, one row of "packed" documents, or "padded" on the left."""
    device = place.device
    q, k, v = (place.randn(batch, length, n, head_dim) for n in (heads, kv_heads, kv_heads))
    real = [length * REAL_TOKENS[row % 4] // 8 if layout == "padded" else length for row in range(batch)]
    ends = itertools.accumulate(DOCUMENTS, initial=0) if layout == "packed" else (0, 64)
    starts = [length * end // 64 for end in ends]
    longest = max(end - start for start, end in itertools.pairwise(starts))
    told: dict[str, Any] = {}
    if layout == "padded":
        told["key_mask"] = torch.arange(length, device=device) >= length - torch.tensor(real, device=device)[:, None]
    if layout == "packed":
        cu_seqlens = torch.tensor(starts, dtype=torch.int32, device=device)
        told |= {"cu_seqlens": cu_seqlens, "max_seqlen": longest}
    # As a model does, masks are made once and not per layer: their cost is not in the times.
    sees = _sees(starts, told.get("key_mask"), window, length, device)

    @functools.cache
    def mask() -> Tensor:
        from torch.nn.attention.flex_attention import create_mask

        return create_mask(sees, batch, None, length, length, device=device)

    @functools.cache
    def block_mask() -> Any:
        from torch.nn.attention.flex_attention import create_block_mask

        return create_block_mask(sees, batch, None, length, length, device=device)

    def ours(t: Tensors) -> Tensor:
        return kernels.attention(t["q"], t["k"], t["v"], causal=True, window=window, softcap=softcap, **told)

    def heads_first(t: Tensors, repeat: bool = False) -> list[Tensor]:
        q, k, v = (t[name].transpose(1, 2) for name in "qkv")
        return [q, *(x.repeat_interleave(heads // kv_heads, 1) if repeat else x for x in (k, v))]

    def eager(t: Tensors) -> Tensor:
        q, k, v = heads_first(t, repeat=True)
        scores = q @ k.transpose(2, 3) * head_dim**-0.5
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        weights = upcast(scores.masked_fill(~mask(), float("-inf"))).softmax(-1).to(q.dtype)
        return (weights @ v).transpose(1, 2).contiguous()

    def sdpa(t: Tensors, backend: SDPBackend) -> Tensor:
        with sdpa_kernel(backend):
            out = F.scaled_dot_product_attention(*heads_first(t), is_causal=True, enable_gqa=heads != kv_heads)
        return out.transpose(1, 2)

    def varlen(t: Tensors) -> Tensor:
        from torch.nn.attention.varlen import varlen_attn

        cu = torch.tensor([row * length + start for row in range(batch) for start in starts[:-1]] + [batch * length])
        cu = cu.to(device, torch.int32) if layout != "packed" else cu_seqlens
        # torch 2.11 takes grouped heads unasked, later ones want to be told.
        grouped = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
        sides = (-1 if window is None else window - 1, 0)
        flat = (t[name].flatten(0, 1) for name in "qkv")
        out: Any = varlen_attn(*flat, cu, cu, longest, longest, window_size=sides, **grouped)
        return out.view(t["q"].shape)

    def flex(t: Tensors) -> Tensor:
        return _flex_attention()(*heads_first(t), _softcapped(softcap), block_mask(), enable_gqa=True).transpose(1, 2)

    baselines: dict[str, Call] = {"ligermodels": ours}
    if batch * heads * length**2 <= 2**31:  # eager holds so many scores several times over
        baselines["eager"] = eager
    if softcap is None and window is None and layout == "full":
        baselines["cuDNN by SDPA"] = functools.partial(sdpa, backend=SDPBackend.CUDNN_ATTENTION)
        baselines["FlashAttention-2 by SDPA"] = functools.partial(sdpa, backend=SDPBackend.FLASH_ATTENTION)
    elif softcap is None and layout != "padded":
        baselines["FlashAttention-2, varlen_attn"] = varlen
    baselines["FlexAttention"] = flex
    lengths = [end - start for start, end in itertools.pairwise(starts)] if layout == "packed" else real
    pairs = heads * sum(_pairs(n, window) for n in lengths)
    return Case(
        leaves={"q": q, "k": k, "v": v},
        eager=eager,
        baselines=baselines,
        compile_eager=False,
        forward_flops=4.0 * pairs * head_dim,
        flops=14.0 * pairs * head_dim,
    )


def _sees(
    starts: Sequence[int], key_mask: Tensor | None, window: int | None, length: int, device: str
) -> Callable[..., Tensor]:
    """Which query sees which key, as FlexAttention asks. A padding token, which sees nothing else, sees itself."""
    document = torch.bucketize(torch.arange(length, device=device), torch.tensor(starts[1:], device=device), right=True)

    def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        seen = (query >= key) & (document[query] == document[key])
        if window is not None:
            seen &= query - key < window
        return seen if key_mask is None else seen & key_mask[batch, key] | (query == key)

    return sees


def _pairs(length: int, window: int | None) -> float:
    """Of query and key, that a causal row of `length` tokens has in sight."""
    seen = min(window or length, length)
    return seen * (seen + 1) / 2 + (length - seen) * seen


@functools.cache
def _softcapped(softcap: float | None) -> Callable[..., Tensor] | None:
    """The score_mod of a softcap, the same function every time: another one would be compiled again."""
    if softcap is None:
        return None
    return lambda score, batch, head, query, key: softcap * torch.tanh(score / softcap)


@functools.cache
def _flex_attention() -> Callable[..., Tensor]:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False)


MARGIN = 0.05
"""By how much the last expert chosen leads the first one not chosen, in router logits of size 1: several bf16
roundings, so that all baselines send a token to the same experts and errors are those of the arithmetic."""


def moe(place: Place, tokens: int, size: int, intermediate: int, experts: int, top_k: int) -> Case:
    """A mixture-of-experts layer: router, gated experts, the weighted sum of each token's experts."""
    router = place.randn(experts, size, scale=size**-0.5)
    x = place.randn(tokens, size)
    best = (x.float() @ router.float().T).topk(top_k + 1).values
    clear = x[best[:, -2] - best[:, -1] > MARGIN]
    leaves = {
        "x": clear[torch.arange(tokens, device=x.device) % len(clear)],
        "router": router,
        "gate_up": place.randn(experts, 2 * intermediate, size, scale=size**-0.5),
        "down": place.randn(experts, size, intermediate, scale=intermediate**-0.5),
    }
    names = {"gate.weight": "router", "experts.gate_up_proj": "gate_up", "experts.down_proj": "down"}

    def route(t: Tensors) -> tuple[Tensor, Tensor]:
        probabilities = upcast(F.linear(t["x"], t["router"])).softmax(-1)
        weights, chosen = probabilities.topk(top_k)
        return weights / weights.sum(-1, keepdim=True), chosen

    def eager(t: Tensors) -> Tensor:
        weights, chosen = route(t)
        y = torch.zeros_like(t["x"])
        for expert in range(experts):
            token, place_of = torch.where(chosen == expert)
            gate, up = F.linear(t["x"][token], t["gate_up"][expert]).chunk(2, -1)
            out = F.linear(F.silu(gate) * up, t["down"][expert]) * weights[token, place_of, None]
            y = y.index_add(0, token, out.to(y.dtype))
        return y

    def run(layer: nn.Module, t: Tensors) -> Tensor:
        out = torch.func.functional_call(layer, {name: t[key] for name, key in names.items()}, (t["x"][None],))
        return (out[0] if isinstance(out, tuple) else out)[0]

    def theirs(t: Tensors, implementation: str) -> Tensor:
        return run(_transformers_moe(size, intermediate, experts, top_k, implementation), t)

    def of_liger(t: Tensors) -> Tensor:
        weights, chosen = route(t)
        return liger("LigerFusedMoEFunction").apply(t["x"], t["gate_up"], t["down"], chosen.int(), weights)

    with torch.device("meta"):  # no memory: `run` gives it the case's tensors
        ours = MoE(size, intermediate, num_experts=experts, top_k=top_k)
    forward = 6.0 * tokens * top_k * size * intermediate
    return Case(
        leaves=leaves,
        eager=eager,
        baselines={
            "ligermodels": lambda t: run(ours, t),
            "eager": eager,
            "transformers, grouped_mm": functools.partial(theirs, implementation="grouped_mm"),
            "transformers, loop over experts": functools.partial(theirs, implementation="eager"),
            "Liger": of_liger,
        },
        compile_eager=False,
        forward_flops=forward,
        flops=3 * forward,
    )


@functools.cache
def _transformers_moe(size: int, intermediate: int, experts: int, top_k: int, implementation: str) -> nn.Module:
    from transformers import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

    config = MixtralConfig(
        hidden_size=size, intermediate_size=intermediate, num_local_experts=experts, num_experts_per_tok=top_k
    )
    config._experts_implementation = implementation
    with torch.device("meta"):
        return MixtralSparseMoeBlock(config)


@dataclass(frozen=True)
class Op:
    """shapes: on a GPU. dry: on a CPU. parity_limits: the sizes at which parity is checked, where those of the shape
    are too large for fp64."""

    build: Callable[..., Case]
    shapes: Sequence[dict[str, Any]]
    dry: Sequence[dict[str, Any]]
    parity_limits: dict[str, int] = field(default_factory=dict)


V = 128256
_HEADS = dict(heads=32, kv_heads=8, head_dim=128)
_TINY_HEADS = dict(heads=4, kv_heads=2, head_dim=16)
OPS: dict[str, Op] = {
    "rms_norm": Op(rms_norm, [dict(tokens=16384, size=n) for n in (2048, 4096, 8192)], [dict(tokens=5, size=48)]),
    "add_rms_norm": Op(add_rms_norm, [dict(tokens=16384, size=n) for n in (2048, 4096)], [dict(tokens=5, size=48)]),
    "layer_norm": Op(
        layer_norm,
        [dict(tokens=21904, size=1280), dict(tokens=16384, size=4096)],  # four images of 1036 x 1036 in Qwen2-VL
        [dict(tokens=5, size=48)],
    ),
    "glu": Op(
        glu,
        [dict(tokens=16384, size=14336), dict(tokens=16384, size=14336, activation="gelu_tanh"),
         dict(tokens=16384, size=14336, packed=True)],
        [dict(tokens=5, size=24), dict(tokens=5, size=24, activation="gelu_tanh"),
         dict(tokens=5, size=24, packed=True)],
    ),
    "rope": Op(
        rope,
        [dict(batch=4, length=4096, **_HEADS, packed=packed) for packed in (False, True)],
        [dict(batch=2, length=7, **_TINY_HEADS, packed=packed) for packed in (False, True)],
    ),
    "cross_entropy": Op(
        cross_entropy,
        [dict(tokens=16384, vocab=32000), dict(tokens=8192, vocab=V), dict(tokens=4096, vocab=262144)],
        [dict(tokens=9, vocab=131)],
    ),
    "linear_cross_entropy": Op(
        linear_cross_entropy,
        [dict(tokens=8192, size=2048, vocab=V), dict(tokens=8192, size=4096, vocab=V),
         dict(tokens=16384, size=4096, vocab=V, ignored=0.7)],
        [dict(tokens=9, size=32, vocab=131), dict(tokens=33, size=32, vocab=131, ignored=0.7)],
        parity_limits={"tokens": 8192},
    ),
    "linear_jsd": Op(
        linear_jsd,
        [dict(tokens=4096, size=2048, teacher_size=4096, vocab=V)],
        [dict(tokens=9, size=32, teacher_size=48, vocab=131)],
        parity_limits={"tokens": 2048},
    ),
    "linear_dpo": Op(
        linear_dpo,
        [dict(sequences=4, length=1024, size=4096, vocab=V)],
        [dict(sequences=4, length=5, size=32, vocab=131)],
    ),
    "attention": Op(
        attention,
        [
            dict(batch=8, length=2048, heads=32, kv_heads=8, head_dim=64),
            dict(batch=4, length=4096, **_HEADS),
            dict(batch=4, length=4096, heads=8, kv_heads=4, head_dim=256, softcap=50.0),  # Gemma 2
            dict(batch=2, length=8192, **_HEADS, window=1024),
            dict(batch=1, length=16384, **_HEADS, layout="packed"),
            dict(batch=4, length=4096, **_HEADS, layout="padded"),
        ],
        [
            dict(batch=2, length=24, **_TINY_HEADS),
            dict(batch=1, length=24, **_TINY_HEADS, softcap=5.0),
            dict(batch=1, length=24, **_TINY_HEADS, window=8),
            dict(batch=1, length=64, **_TINY_HEADS, layout="packed"),
            dict(batch=4, length=24, **_TINY_HEADS, layout="padded"),
        ],
        parity_limits={"batch": 4, "length": 2048},  # beyond the window
    ),
    "moe": Op(
        moe,
        [dict(tokens=16384, size=2048, intermediate=7168, experts=8, top_k=2),
         dict(tokens=16384, size=2048, intermediate=768, experts=64, top_k=4)],
        [dict(tokens=40, size=32, intermediate=48, experts=4, top_k=2)],
        parity_limits={"tokens": 4096},
    ),
}  # fmt: skip
"""Op -> its case and shapes. Sizes are Llama's where nothing else is said; one mixture is half a Mixtral, the other has
many small experts. 32000, 128256 and 262144 are the vocabularies of Llama 2, Llama 3 and Gemma 3."""
