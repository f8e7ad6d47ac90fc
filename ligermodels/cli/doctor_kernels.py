"""`ligermodels doctor --kernels`: every op that has kernels, on this machine's GPU, against its reference in fp64.

Outputs and gradients may err 1.5 times as much as the reference computed in the dtype of the inputs, or by `_EPS`: a
wrong tile, mask or compiler errs far more. `check_once` does the same at the start of a command on a GPU that
the kernels were not tested on, and writes down that it has.
"""

import json
import math
import os
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ligermodels import __version__, kernels
from ligermodels.cli.output import say
from ligermodels.errors import LigermodelsError
from ligermodels.kernels import _tested
from ligermodels.kernels._triton import cuda_capability, is_datacenter, triton, use_triton
from ligermodels.kernels.attention import attention, decode_attention, decode_keys_as_values, rope
from ligermodels.kernels.experts.experts import experts_of, experts_reference
from ligermodels.kernels.linear._fp8_quantize import (
    quantize_both,
    quantize_reference,
    quantize_rows,
    quantize_transposed,
)
from ligermodels.kernels.linear.fp8 import has_e4m3
from ligermodels.kernels.linear.int2_matmul import int2_matmul, int2_matmul_reference, pack_int2
from ligermodels.kernels.linear.linear import linears
from ligermodels.kernels.linear.mxfp4 import quantize_mxfp4
from ligermodels.kernels.linear.nf4 import dequantize_nf4_reference, quantize_nf4
from ligermodels.kernels.linear.operand import Adapter, LinearOperand
from ligermodels.kernels.linear.quantized import dequantize_reference, quantize
from ligermodels.kernels.loss.argmax import argmax, argmax_reference
from ligermodels.kernels.optimizer import adamw, adamw_many, eight_bits
from ligermodels.kernels.recurrent import gated_delta_step

_ALLOWED = 1.5
"""Of the error of the reference in the dtype of the inputs."""
_EPS = 1.0
"""Of the dtype's eps, an error that is always allowed, since ops round intermediate results. Interpreted in fp16,
experts, MLP and delta rule, which err more than all others, err half as much."""
Arguments = dict[str, Any]


class Draw:
    """Draws the arguments of a check, the same in every run, on `device`. dtype: of what is floating point; Triton's
    interpreter truncates where bf16 is rounded."""

    def __init__(self, device: torch.device):
        self.device, self.dtype = device, torch.bfloat16 if device.type == "cuda" else torch.float16
        self.generator = torch.Generator(device).manual_seed(0)

    def __call__(self, *shape: int, scale: float = 1.0, train: bool = True, dtype: torch.dtype | None = None) -> Tensor:
        x = torch.randn(shape, generator=self.generator, device=self.device) * scale
        return x.to(dtype or self.dtype).requires_grad_(train)

    def data(self, *shape: int, scale: float = 1.0, dtype: torch.dtype | None = None) -> Tensor:
        """Without a gradient."""
        return self(*shape, scale=scale, train=False, dtype=dtype)

    def integers(self, low: int, high: int, *shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.randint(low, high, shape, generator=self.generator, device=self.device, dtype=dtype)

    def int32(self, *values: int) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    def tables(self, length: int, size: int) -> Arguments:
        """cos and sin of `length` positions."""
        angles = torch.arange(length, device=self.device)[None, :, None] * 0.3 ** torch.arange(
            size // 2, device=self.device
        )
        return {"cos": angles.cos(), "sin": angles.sin()}

    def size(self, on_gpu: int, interpreted: int) -> int:
        return on_gpu if self.device.type == "cuda" else interpreted


class Check(NamedTuple):
    """op and reference take what `arguments` draws; they may write over it."""

    op: Callable[..., Any]
    reference: Callable[..., Any]
    arguments: Callable[[Draw], Arguments]


class Result(NamedTuple):
    """error: the largest relative rms error, beside its bound. failure: why there is none."""

    name: str
    error: float
    bound: float
    failure: str | None = None

    @property
    def ok(self) -> bool:
        return self.failure is None and self.error <= self.bound


# ---- The checks ----


def _heads(d: Draw, length: int, size: int, heads: int = 8, kv_heads: int = 2) -> Arguments:
    heads, kv_heads = d.size(heads, 2), d.size(kv_heads, 1)
    return {"q": d(1, length, heads, size), **{name: d(1, length, kv_heads, size) for name in "kv"}}


def _long(d: Draw) -> int:
    """Tokens of attention: on large GPUs enough for its bulk copies (TMA)."""
    return d.size(4096 if d.device.type == "cuda" and is_datacenter(d.device.index) else 700, 40)


def _cache(d: Draw, size: int, rotating: int | None = None) -> Arguments:
    """Of two rows, one of which is short."""
    heads, kv_heads, capacity = d.size(8, 2), d.size(2, 1), d.size(3000, 70)
    new = {"q": d.data(2, 1, heads, size), "k": d.data(2, 1, kv_heads, size), "v": d.data(2, 1, kv_heads, size)}
    kept = {"keys": d.data(2, capacity, kv_heads, rotating or size), "values": d.data(2, capacity, kv_heads, size)}
    return {**new, **d.tables(1, size), **kept, "starts": d.int32(0, 3), "ends": d.int32(capacity - 1, 20)}


def _decoded_reference(*, q, k, v, cos, sin, keys, values, starts, ends, **rest):  # type: ignore[no-untyped-def]
    q = rope.rope_to_cache_reference(q, k, v, cos, sin, keys, values, ends)
    return decode_attention.decode_attention_reference(q, keys, values, starts, ends, **rest)


def _with_cache(op: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, ...]]:
    return lambda *, keys, values, **rest: (op(keys=keys, values=values, **rest), keys, values)


def _appended(d: Draw) -> Arguments:
    arguments = _cache(d, d.size(128, 16))
    del arguments["starts"]
    return arguments


def _keys_as_values_reference(*, weight, **rest):  # type: ignore[no-untyped-def]
    """The op by its own path for fp64."""
    of = rest["q"].dtype
    return decode_keys_as_values.rope_decode_keys_as_values(weight=weight.double(), **_as(rest, torch.float64)).to(of)


def _tokens(d: Draw) -> int:
    return d.size(300, 9)


def _logits(d: Draw, scale: float = 2.0) -> Tensor:
    return d(_tokens(d), d.size(5003, 70), scale=scale)


def _labels(d: Draw, classes: int) -> Tensor:
    labels = d.integers(0, classes, _tokens(d))
    labels[::5] = -100
    return labels


def _head(d: Draw, prefix: str = "", train: bool = True) -> Arguments:
    """x and the weight of a head of 5003 classes."""
    hidden = d.size(256, 32)
    x, weight = d(_tokens(d), hidden, train=train), d(d.size(5003, 70), hidden, scale=hidden**-0.5, train=train)
    return {f"{prefix}x": x, f"{prefix}weight": weight}


def _classified(d: Draw) -> Arguments:
    return {**_head(d), "labels": _labels(d, d.size(5003, 70))}


def _two_distributions(d: Draw) -> Arguments:
    x, y = (_logits(d).detach().float().log_softmax(-1).to(d.dtype) for _ in range(2))
    return {"input": x.requires_grad_(), "target": y}


def _linear(*, x, weight, bias=None):  # type: ignore[no-untyped-def]
    return linears(x, [LinearOperand(weight, bias)])


def _adapted(*, x, weight, a, b):  # type: ignore[no-untyped-def]
    return linears(x, [LinearOperand(weight, None, Adapter(a, b, 2.0, torch.float32))])


def _adapted_reference(*, x, weight, a, b):  # type: ignore[no-untyped-def]
    y, h = F.linear(x, weight), F.linear(x.to(a.dtype), a)
    return (y.to(a.dtype) + 2 * F.linear(h, b)).to(x.dtype)


def _quantized(kind: str, rows: int) -> Check:
    """A linear layer whose weight is read as it is, or dequantised."""

    def arguments(d: Draw) -> Arguments:
        hidden = d.size(1024, 128)
        weight = d.data(d.size(1100, 40), hidden, scale=hidden**-0.5, dtype=torch.float32).to(d.dtype)
        bits: Any = quantize_nf4(weight) if kind == "nf4" else quantize(weight, kind)
        return {"x": d.data(rows, hidden), "weight": bits}

    def reference(*, x: Tensor, weight: Any) -> Tensor:
        dequantize: Any = dequantize_nf4_reference if kind == "nf4" else dequantize_reference
        return F.linear(x.double(), dequantize(weight, torch.float32).double()).to(x.dtype)

    return Check(_linear, reference, arguments)


def _int2(rows: int) -> Check:
    def arguments(d: Draw) -> Arguments:
        a, w = d.integers(-128, 128, rows, 1024, dtype=torch.int8), d.integers(-1, 2, 300, 1024)
        return {"a": a, "packed": pack_int2(w), "scale_w": d.data(1, dtype=torch.float32)}

    return _both(int2_matmul, int2_matmul_reference, arguments, out_dtype=torch.float32)


def _fp8(op: Callable[..., tuple[Tensor, Tensor]], of: Callable[[Tensor], Tensor], rows: int) -> Check:
    """Numbers in FP8 and their scales, multiplied; of: what of x the reference quantises by rows."""

    def product(q: Tensor, scale: Tensor) -> Tensor:
        return q.float() * scale

    return Check(
        lambda x: product(*op(x)), lambda x: product(*quantize_reference(of(x), "e4m3", False)),
        lambda d: {"x": d.data(d.size(rows, 16), d.size(2304, 64))},
    )  # fmt: skip


def _rows(name: str, count: int) -> str:
    return f"{name}, {count} row{'s' * (count > 1)}"


def _mlp(d: Draw, rows: int, train: bool) -> Arguments:
    hidden, inner = d.size(512, 32), d.size(1400, 48)
    weights = {"gate_up_weight": (2 * inner, hidden), "down_weight": (hidden, inner)}
    return {
        "x": d(rows, hidden, train=train),
        **{name: d(*shape, scale=shape[1] ** -0.5, train=train) for name, shape in weights.items()},
    }


def _experts(d: Draw, rows: int, train: bool, bias: bool = False) -> Arguments:
    hidden, inner, count, top_k = d.size(512, 32), d.size(256, 16), 8, 2
    weights, experts = kernels.route_reference(d.data(rows, count, dtype=torch.float32), top_k=top_k)
    biases = {"gate_up_proj_bias": 2 * inner, "down_proj_bias": hidden} if bias else {}
    return {
        "x": d(rows, hidden, train=train), "weights": weights.requires_grad_(train), "experts": experts,
        "gate_up_proj": d(count, 2 * inner, hidden, scale=hidden**-0.5, train=train),
        "down_proj": d(count, hidden, inner, scale=inner**-0.5, train=train),
        **{name: d(count, size, train=train) for name, size in biases.items()},
    }  # fmt: skip


def _biased_experts(rows: int) -> Check:
    """Those of gpt-oss. Its limit of 7 clamps nothing here: rounding would move elements across another."""
    options = dict(activation=kernels.ClampedSwiGLU(1.702, 7.0))
    return _both(
        kernels.moe_experts, kernels.moe_experts_reference, lambda d: _experts(d, rows, rows > 64, True), **options
    )


def _mxfp4(rows: int) -> Check:
    """Experts whose weights are read in 4 bits, or dequantised."""

    def arguments(d: Draw) -> Arguments:
        hidden, inner, count = d.size(512, 32), d.size(256, 32), 8
        weights, experts = kernels.route_reference(d.data(rows, count, dtype=torch.float32), top_k=2)
        shapes = {"gate_up": (count, 2 * inner, hidden), "down": (count, hidden, inner)}
        drawn = {name: d.data(*shape, scale=shape[2] ** -0.5) for name, shape in shapes.items()}
        packed = {name: quantize_mxfp4(weight) for name, weight in drawn.items()}
        return {"x": d.data(rows, hidden), "weights": weights, "experts": experts, **packed}

    def op(*, gate_up: Any, down: Any, **rest: Any) -> Tensor:
        return experts_of(**rest, gate_up=LinearOperand(gate_up), down=LinearOperand(down))

    def reference(*, gate_up: Any, down: Any, **rest: Any) -> Tensor:
        first, last = (LinearOperand(weight.dequantize(rest["x"].dtype)) for weight in (gate_up, down))
        return experts_reference(**rest, gate_up=first, down=last, activation="silu")

    return Check(op, reference, arguments)


def _delta(d: Draw) -> Arguments:
    length, size, key_heads, heads = d.size(300, 70), d.size(128, 16), d.size(4, 1), d.size(8, 2)
    q, k = (d(1, length, key_heads, size) for _ in range(2))
    decay = -0.2 * d.data(1, length, heads, dtype=torch.float32).abs()
    beta = d.data(1, length, heads).sigmoid()
    gates = {"g": decay.requires_grad_(), "beta": beta.requires_grad_()}
    return {"q": q, "k": k, "v": d(1, length, heads, size), **gates}


def _delta_step(d: Draw) -> Arguments:
    size, key_heads, heads = d.size(128, 16), d.size(4, 1), d.size(8, 2)
    channels = (2 * key_heads + heads) * size
    ends = {"ends": d.int32(3, 9)}
    rings = {"conv": d.data(2, 5, channels), "state": d.data(2, 2, heads, size, size, dtype=torch.float32)}
    gates = {"a": d.data(2, 2, heads), "b": d.data(2, 2, heads), "A_log": d.data(heads), "dt_bias": d.data(heads)}
    return {"qkv": d.data(2, 2, channels), "weight": d.data(channels, 1, 4), **gates, **rings, **ends}


def _with_rings(op: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, ...]]:
    return lambda *, conv, state, **rest: (op(conv=conv, state=state, **rest), conv, state)


def _optimizer(d: Draw) -> Arguments:
    shape = d.size(300, 7), 70
    state = {name: d.data(*shape) for name in ("weight", "grad", "exp_avg")}
    return {**state, "exp_avg_sq": d.data(*shape).square()}


def _step_of(op: Callable[..., None]) -> Callable[..., tuple[Tensor, ...]]:
    options: Any = dict(step=3, lr=0.01, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, rounding="nearest")

    def run(**state: Tensor) -> tuple[Tensor, ...]:
        op(**state, **options)
        return tuple(state.values())

    return run


def _step_of_two(weight: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor) -> tuple[Tensor, ...]:
    """`_step_of` adamw, of two in one launch."""
    copies = weight.clone(), grad.clone(), exp_avg.clone(), exp_avg_sq.clone()
    two = [adamw_many.Parameter(weight, grad, exp_avg, exp_avg_sq), adamw_many.Parameter(*copies)]
    options: Any = dict(step=3, lr=0.01, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, rounding="nearest")
    adamw_many.adamw_many(two, adamw_many.Tables(), **options)
    return *two[0][:4], *two[1][:4]


def _step_in_8_bits(op: Callable[..., None]) -> Callable[..., tuple[Tensor, ...]]:
    """Two steps; weight and decoded moments."""
    options: Any = dict(lr=0.01, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, rounding="nearest")

    def run(weight: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
        codes = [torch.zeros_like(weight, dtype=torch.uint8) for _ in range(2)]
        shape = eight_bits.exponents_shape(weight.shape)
        exponents = [torch.zeros(shape, dtype=torch.uint8, device=weight.device) for _ in range(2)]
        for step in (1, 2):
            op(weight, grad, *codes, None, tuple(exponents), step=step, **options)
        moments = map(eight_bits.decode, codes, exponents, (eight_bits.MOMENT, eight_bits.ROOT))
        return weight, *moments

    return run


def _gated_norm(d: Draw) -> Arguments:
    shape = _tokens(d), 4, d.size(128, 16)
    return {"x": d(*shape), "z": d(*shape), "weight": d(shape[2]), "eps": 1e-6}


def _normed(d: Draw, *names: str) -> Arguments:
    width = d.size(2304, 70)
    return {"x": d(_tokens(d), width), **{n: d(_tokens(d), width) if n == "residual" else d(width) for n in names}}


def _partial(reference: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    return lambda **arguments: reference(**arguments, **options)


def _both(op: Callable[..., Any], reference: Callable[..., Any], arguments: Callable[[Draw], Arguments],
          **options: Any) -> Check:  # fmt: skip
    """With the same options for both."""
    return Check(_partial(op, **options), _partial(reference, **options), arguments)


def _attention(size: int, length: Callable[[Draw], int] = _long, **options: Any) -> Check:
    def arguments(d: Draw) -> Arguments:
        tokens = length(d)
        more = {}
        if options.get("packed"):
            more["cu_seqlens"] = d.int32(0, tokens // 3, tokens // 3 + 1, tokens)
        if options.get("padded"):
            more["key_mask"] = (torch.arange(tokens, device=d.device) >= 5)[None]
        if options.get("sinks"):
            more["sinks"] = d(d.size(8, 2))
        return {**_heads(d, tokens, d.size(size, 320 if size > 256 else 16)), **more}

    given = {name: value for name, value in options.items() if name not in ("packed", "padded", "sinks")}
    return _both(kernels.attention, attention.attention_reference, arguments, **given)


def _rope(d: Draw) -> Arguments:
    length, size = _tokens(d), d.size(128, 16)
    heads = {"q": d(1, length, 8, size), "k": d(1, length, 2, size)}
    return {**heads, **d.tables(length, size)}


_K: Any = kernels
CHECKS: dict[str, Check] = {
    "rms_norm": Check(_K.rms_norm, _K.rms_norm_reference, lambda d: _normed(d, "weight")),
    "add_rms_norm": Check(_K.add_rms_norm, _K.add_rms_norm_reference, lambda d: _normed(d, "residual", "weight")),
    "layer_norm": Check(_K.layer_norm, _K.layer_norm_reference, lambda d: _normed(d, "weight", "bias")),
    "gated_norm": Check(_K.gated_norm, _K.gated_norm_reference, _gated_norm),
    "rope": Check(_K.rope_qk, _K.rope_qk_reference, _rope),
    "glu": Check(_K.glu, _K.glu_reference, lambda d: {"gate_up": d(_tokens(d), d.size(2800, 70))}),
    "activate": _both(
        _K.activate, _K.activate_reference, lambda d: {"x": d(_tokens(d), d.size(1400, 35))}, activation="gelu"
    ),
    "mlp": Check(_K.gated_mlp, _K.gated_mlp_reference, lambda d: _mlp(d, _tokens(d), True)),
    "mlp, one row": Check(_K.gated_mlp, _K.gated_mlp_reference, lambda d: _mlp(d, 1, False)),
    "linear, one row": Check(
        _linear, F.linear, lambda d: {"x": d.data(1, 520), "weight": d.data(300, 520, scale=0.05)}
    ),
    "linear, LoRA": Check(
        _adapted, _adapted_reference, lambda d: {
            "x": d(_tokens(d), 96), "weight": d.data(64, 96, scale=0.1),
            "a": d(8, 96, scale=0.1, dtype=torch.float32), "b": d(64, 8, scale=0.1, dtype=torch.float32),
        },
    ),
    **{_rows(kind, n): _quantized(kind, n) for kind in ("int8", "fp8", "int4", "nf4") for n in (1, 7, 100)},
    **{_rows("int2", n): _int2(n) for n in (1, 40)},
    "to fp8, rows": _fp8(quantize_rows, lambda x: x, 300),
    "to fp8, columns": _fp8(quantize_transposed, Tensor.t, 320),
    "to fp8, both": _fp8(lambda x: quantize_both(x)[1], Tensor.t, 320),
    "attention": _attention(128, softcap=30.0),
    "attention, window": _attention(64, window=33),
    "attention, packed": _attention(128, packed=True),
    "attention, padded": _attention(64, lambda d: d.size(700, 40), window=33, padded=True),
    "attention, sinks": _attention(64, window=33, sinks=True),
    "attention of 256": _attention(256, lambda d: d.size(700, 40), window=33),
    "attention of 512": _attention(512, lambda d: d.size(700, 40)),
    "decode": Check(decode_attention.rope_decode_attention, _decoded_reference, lambda d: _cache(d, d.size(128, 16))),
    "decode, sinks": Check(
        decode_attention.rope_decode_attention, _decoded_reference,
        lambda d: {**_cache(d, d.size(64, 16)), "sinks": d.data(d.size(8, 2))},
    ),
    "rope to cache": Check(_with_cache(rope.rope_to_cache), _with_cache(rope.rope_to_cache_reference), _appended),
    "decode, keys as values": Check(
        decode_keys_as_values.rope_decode_keys_as_values, _keys_as_values_reference,
        lambda d: {**_cache(d, d.size(512, 32), d.size(128, 16)), "weight": d.data(d.size(512, 32))},
    ),
    "route": _both(_K.route, _K.route_reference, lambda d: {"logits": d(_tokens(d), 64, scale=3.0)}, top_k=4),
    "experts": Check(_K.moe_experts, _K.moe_experts_reference, lambda d: _experts(d, _tokens(d), True)),
    "experts, one row": Check(_K.moe_experts, _K.moe_experts_reference, lambda d: _experts(d, 1, False)),
    "experts, 12 rows": Check(_K.moe_experts, _K.moe_experts_reference, lambda d: _experts(d, 12, False)),
    **{_rows("expert biases", n): _biased_experts(n) for n in (1, 12, 100)},
    **{_rows("mxfp4 experts", n): _mxfp4(n) for n in (1, 12, 100)},
    "gated_delta_rule": Check(_K.gated_delta_rule, _K.gated_delta_rule_reference, _delta),
    "gated_delta_step": Check(
        _with_rings(gated_delta_step.gated_delta_step), _with_rings(gated_delta_step.gated_delta_step_reference),
        _delta_step,
    ),
    "causal_conv": _both(
        _K.causal_conv, _K.causal_conv_reference,
        lambda d: {"x": d(2, d.size(150, 12), d.size(512, 24)), "weight": d(d.size(512, 24), 1, 4)}, activation="silu",
    ),
    "delta_gates": Check(
        _K.delta_gates, _K.delta_gates_reference,
        lambda d: {"a": d(_tokens(d), 8), "b": d(_tokens(d), 8), "A_log": d(8), "dt_bias": d(8)},
    ),
    "embedding": Check(
        _K.embedding, _K.embedding_reference,
        lambda d: {"ids": d.integers(0, 90, _tokens(d)), "weight": d(100, d.size(1400, 35))},
    ),
    "cross_entropy": Check(
        _K.cross_entropy, _K.cross_entropy_reference,
        lambda d: {"logits": _logits(d), "labels": _labels(d, d.size(5003, 70))},
    ),
    "linear_cross_entropy": Check(_K.linear_cross_entropy, _K.linear_cross_entropy_reference, _classified),
    "linear_logprobs": Check(_K.linear_logprobs, _K.linear_logprobs_reference, _classified),
    "kl_div": _both(_K.kl_div, _K.kl_div_reference, _two_distributions, log_target=True, reduction="batchmean"),
    "jsd": Check(_K.jsd, _K.jsd_reference, _two_distributions),
    "linear_jsd": Check(
        _K.linear_jsd, _K.linear_jsd_reference, lambda d: {**_head(d, "student_"), **_head(d, "teacher_", False)}
    ),
    "argmax": Check(argmax, argmax_reference, lambda d: {"logits": _logits(d).detach()[:3]}),
    "adamw": Check(_step_of(adamw.adamw), _step_of(adamw.adamw_reference), _optimizer),
    "adamw, many": Check(_step_of_two, lambda **state: 2 * _step_of(adamw.adamw_reference)(**state), _optimizer),
    "adamw, 8 bits": Check(
        _step_in_8_bits(adamw.adamw), _step_in_8_bits(adamw.adamw_reference),
        lambda d: {name: d.data(d.size(300, 7), 128) for name in ("weight", "grad")},
    ),
}  # fmt: skip


# ---- Judging ----


def _as(arguments: Mapping[str, Any], dtype: torch.dtype | None) -> Arguments:
    """A copy, floating point in `dtype`; None: as it is."""

    def copy(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        y = x.detach().to(dtype if dtype is not None and x.is_floating_point() else x.dtype, copy=True)
        return y.requires_grad_(x.requires_grad)

    return {name: copy(x) for name, x in arguments.items()}


def _run(call: Callable[..., Any], arguments: Arguments, draw: Draw, upstream: list[Tensor]) -> list[Tensor]:
    """Outputs, and the gradients of the arguments that have one. upstream: of the outputs; drawn where it is empty."""
    outputs = call(**arguments)
    outputs = [y for y in (outputs if isinstance(outputs, tuple) else (outputs,)) if isinstance(y, Tensor)]
    judged = [y for y in outputs if y.requires_grad]
    leaves = [x for x in arguments.values() if isinstance(x, Tensor) and x.requires_grad]
    if not upstream:
        upstream += [torch.ones_like(y) if y.dim() == 0 else draw.data(*y.shape) for y in judged]
    given = [g.to(y.dtype) for g, y in zip(upstream, judged, strict=True)]
    grads = torch.autograd.grad(judged, leaves, given) if judged else ()
    return [y.detach() for y in (*outputs, *grads)]


def _rms(x: Tensor) -> float:
    return x.double().square().mean().sqrt().item()


def judge(name: str, check: Check, device: torch.device) -> Result:
    """The result of a check; whatever it raises is one, too."""
    try:
        draw, upstream = Draw(device), list[Tensor]()
        arguments = check.arguments(draw)
        exact = _run(check.reference, _as(arguments, torch.float64), draw, upstream)
        rounded = _run(check.reference, _as(arguments, None), draw, upstream)
        found = _run(check.op, _as(arguments, None), draw, upstream)
        worst = Result(name, 0.0, 0.0)
        for x, in_dtype, right in zip(found, rounded, exact, strict=True):
            if not right.is_floating_point():
                if not torch.equal(x, right.to(x.dtype)):
                    return Result(name, 0.0, 0.0, "other integers than the reference's")
                continue
            scale = max(_rms(right), 1e-30)
            error, bound = _rms(x.double() - right) / scale, _ALLOWED * _rms(in_dtype.double() - right) / scale
            bound = max(bound, _EPS * torch.finfo(draw.dtype).eps)
            if math.isnan(error):
                return Result(name, error, bound, "NaN")
            if not worst.bound or error / bound > worst.error / worst.bound:
                worst = Result(name, error, bound)
        return worst
    except Exception as error:  # of the compiler, the driver, or an op that does not support this GPU
        text = (str(error).strip().splitlines() or [""])[-1]
        return Result(name, float("nan"), float("nan"), f"{type(error).__name__}: {text}")


def results(device: torch.device) -> Iterator[Result]:
    for name, check in CHECKS.items():
        if "fp8" in name and not has_e4m3(device):
            continue
        if name.startswith("to fp8") and device.type == "cpu":
            continue  # the interpreter truncates
        yield judge(name, check, device)


# ---- The commands ----


def run(device: torch.device, show: Callable[[str], None] = print) -> list[Result]:
    """All checks, with a line for each."""
    found = []
    for result in results(device):
        what = result.failure or f"error {result.error:.2g}, bound {result.bound:.2g}"
        show(f"{'ok  ' if result.ok else 'FAIL'} {result.name:24}{what}")
        found.append(result)
    return found


def doctor() -> int:
    """`ligermodels doctor --kernels`: 1 if a check has failed."""
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    if not use_triton(torch.empty(0, device=device)):
        print("ok   kernels: none on this machine, which computes in plain PyTorch; nothing to check")
        return 0
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else "the CPU, in Triton's interpreter"
    print(f"kernels on {where}, against their references in fp64 (relative rms errors)\n")
    start = time.perf_counter()
    found = run(device)
    failed = [result.name for result in found if not result.ok]
    print(f"\n{len(found)} checks in {time.perf_counter() - start:.0f} s, {len(failed)} failed")
    if device.type == "cuda":
        _write(device, found)
    return 1 if failed else 0


def check_once(device: torch.device | None = None) -> None:
    """At the start of a command: `run` on a GPU, or with a Triton, that the kernels were not tested on, unless a report
    says that they passed. One process of a machine does it. device: None stands for the first GPU, if there is one.

    Raises LigermodelsError if a check fails: what the command computes would be wrong. The report is left then, too,
    but the next command checks again.
    """
    if os.environ.get(_tested.SWITCH) == "0" or os.environ.get("LOCAL_RANK", "0") != "0":
        return
    if not torch.cuda.is_available() or (device is not None and device.type != "cuda"):
        return
    if device is None or device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    name = torch.cuda.get_device_name(device)
    with warnings.catch_warnings(action="ignore"):  # that nobody has
        capability = cuda_capability(device.index)
    if not use_triton(torch.empty(0, device=device)):
        return
    reason = _tested.why_untested(capability, name, triton.__version__)
    if reason is None or _tested.has_passed(_tested.report_of(name, triton.__version__)):
        return
    say(f"note: {reason}; checking them once, for about a minute (`ligermodels doctor --kernels`)")
    found = run(device, show=lambda line: say(line) if line.startswith("FAIL") else None)
    torch.cuda.empty_cache()
    _write(device, found)
    if failed := [result.name for result in found if not result.ok]:
        raise LigermodelsError(
            f"kernels give wrong results, or none, on {name} with Triton {triton.__version__}: {', '.join(failed)}. "
            f"Report it with the output of `ligermodels doctor --kernels`; {_tested.SWITCH}=0 runs the command anyway"
        )
    say(f"note: all {len(found)} checks passed")


def _write(device: torch.device, found: list[Result]) -> None:
    """The report; where it cannot be written, a warning: the next command checks again."""
    name = torch.cuda.get_device_name(device)
    path = _tested.report_of(name, triton.__version__)
    record = {
        "gpu": name, "triton": triton.__version__, "torch": torch.__version__, "ligermodels": __version__,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "failed": [result.name for result in found if not result.ok], "checks": [result._asdict() for result in found],
    }  # fmt: skip
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(f".{os.getpid()}")
        temporary.write_text(json.dumps(record, indent=1) + "\n", "utf-8")
        temporary.replace(path)
    except OSError as error:
        warnings.warn(f"{path} cannot be written: {error.strerror}. The kernels will be checked again", stacklevel=2)
