"""What benchmarks/compile.py compiles: calls of every op at shapes of real models, forward and backward.

A case runs inside `pretend.gpu`, where tensors have no memory. Sizes are those of Llama 3.1 8B and 3.2 1B, Gemma 2 and
4, Qwen3.5 4B, Qwen3-30B-A3B and gpt-oss-20b; bf16, and fp32 where it has tiles of its own. Ops of torch that a case
calls are not compiled.
"""

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.autograd.graph import _engine_run_backward as run_backward

from ligermodels import kernels
from ligermodels.kernels._math import Activation
from ligermodels.kernels.attention.decode_attention import HeadNorms, decode_attention, rope_decode_attention
from ligermodels.kernels.attention.decode_keys_as_values import rope_decode_keys_as_values
from ligermodels.kernels.attention.rope import rope_to_cache
from ligermodels.kernels.experts.experts import experts_of
from ligermodels.kernels.linear._fp8_quantize import (
    quantize_both,
    quantize_rows,
    quantize_transposed,
    tensor_scale,
    transposed,
)
from ligermodels.kernels.linear._gemv import gemv
from ligermodels.kernels.linear.int2_matmul import int2_matmul
from ligermodels.kernels.linear.linear import linears
from ligermodels.kernels.linear.mxfp4 import MXFP4Weight
from ligermodels.kernels.linear.nf4 import NF4Weight
from ligermodels.kernels.linear.operand import Adapter, LinearOperand
from ligermodels.kernels.linear.quantized import GROUP, WORDS, QuantizedWeight
from ligermodels.kernels.loss import vocab_parallel_cross_entropy as vocab_parallel
from ligermodels.kernels.loss.argmax import argmax
from ligermodels.kernels.optimizer.adamw import adamw
from ligermodels.kernels.optimizer.adamw_many import Parameter, Tables, adamw_many
from ligermodels.kernels.recurrent.gated_delta_step import gated_delta_step
from ligermodels.training.gradients import accumulate_in_place

BF16, FP32, INT32 = torch.bfloat16, torch.float32, torch.int32
VOCAB = 128256
CLAMPED = kernels.ClampedSwiGLU(1.702, 7.0)


def new(*shape: int, dtype: torch.dtype = BF16, train: bool = True) -> Tensor:
    """A tensor without memory, trained if it is floating point."""
    return torch.empty(shape, dtype=dtype, device="meta").requires_grad_(train and dtype in (BF16, FP32))


def frozen(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return new(*shape, dtype=dtype, train=False)


def backward(outputs: Any) -> None:
    """Runs the backward of everything that has one.

    By the engine itself: torch.autograd.backward would be one call for `pretend.gpu`, which then sees nothing inside.
    """
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    trained = tuple(y for y in outputs if y is not None and y.requires_grad)
    grads = tuple(torch.empty_like(y) for y in trained)
    run_backward(trained, grads, False, False, (), allow_unreachable=True, accumulate_grad=True)


# ---- Norms, activations, rope ----


def norms(dtype: torch.dtype, width: int) -> None:
    x, residual, weight, bias = (new(*shape, dtype=dtype) for shape in ((4, 2048, width),) * 2 + ((width,),) * 2)
    backward(kernels.rms_norm(x, weight))
    backward(kernels.add_rms_norm(x, residual, weight))
    backward(kernels.layer_norm(x, weight, bias))


def decoded_norms() -> None:
    with torch.no_grad():
        kernels.add_rms_norm(new(1, 1, 4096), new(1, 1, 4096), new(4096))
        kernels.gated_norm(new(1, 1, 32, 128), new(1, 1, 32, 128), new(128), 1e-6)
        kernels.glu(new(1, 2 * 14336))
        kernels.route(new(1, 128), top_k=8)


def gated_norms() -> None:
    backward(kernels.gated_norm(new(1, 4096, 32, 128), new(1, 4096, 32, 128), new(128), 1e-6))


def activations() -> None:
    backward(kernels.glu(new(4096, 2 * 14336)))
    backward(kernels.glu(new(4096, 4096, dtype=FP32), new(4096, 4096, dtype=FP32), activation="gelu_tanh"))
    backward(kernels.activate(new(4096, 4304), activation="quick_gelu"))


def rope() -> None:
    cos, sin = (frozen(1, 4096, 64, dtype=FP32) for _ in range(2))
    backward(kernels.rope(new(2, 4096, 48 * 128), cos, sin, num_heads=32, num_kv_heads=8))
    backward(kernels.rope_qk(new(2, 4096, 32, 128), new(2, 4096, 8, 128), cos, sin))


# ---- Attention ----


def qkv(batch: int, length: int, heads: int, kv_heads: int, dim: int, dtype: torch.dtype = BF16) -> tuple[Tensor, ...]:
    return tuple(new(batch, length, n, dim, dtype=dtype) for n in (heads, kv_heads, kv_heads))


def attention(dim: int, dtype: torch.dtype = BF16, length: int = 8192, **options: Any) -> None:
    heads, kv_heads = (16, 4) if dim > 128 else (32, 8)
    if options.pop("packed", False):
        options["cu_seqlens"] = frozen(9, dtype=INT32)
    if options.pop("padded", False):
        options["key_mask"] = frozen(1, length, dtype=torch.bool)
    if options.pop("sinks", False):
        options["sinks"] = new(heads, dtype=dtype)
    backward(kernels.attention(*qkv(1, length, heads, kv_heads, dim, dtype), **options))


def decoded(
    dim: int, *, rows: int = 1, dtype: torch.dtype = BF16, fp8: bool = False, heads: int = 32, **options: Any
) -> None:
    kv_heads, capacity = heads // 4, 32768
    q, k, v = (frozen(rows, 1, n, dim, dtype=dtype) for n in (heads, kv_heads, kv_heads))
    cache = dict(dtype=torch.float8_e4m3fn if fp8 else dtype)
    keys, values = (frozen(rows, capacity, kv_heads, dim, **cache) for _ in range(2))
    tables = [frozen(1, 1, dim // 2, dtype=FP32) for _ in range(2)]
    starts, ends = (frozen(rows, dtype=INT32) for _ in range(2))
    if fp8:
        options["scales"] = tuple(frozen(rows, capacity, kv_heads) for _ in range(2))
    if options.pop("sinks", False):
        options["sinks"] = frozen(heads, dtype=dtype)
    if "offset" in options:
        offset = options.pop("offset")
        options["norms"] = HeadNorms(frozen(dim), frozen(dim), 1e-6, offset, cast_before_weight=not offset)
    rope_decode_attention(q, k, v, *tables, keys, values, starts, ends, **options)
    if dim == 128 and "norms" not in options:
        options.pop("window", None)
        decode_attention(q, keys, values, starts, ends, **options)


def appended() -> None:
    q, k, v = (frozen(4, 1, n, 128) for n in (32, 8, 8))
    tables = [frozen(1, 1, 64, dtype=FP32) for _ in range(2)]
    rope_to_cache(q, k, v, *tables, frozen(4, 4096, 8, 128), frozen(4, 4096, 8, 128), frozen(4, dtype=INT32))


def keys_as_values() -> None:
    q, k, v = (frozen(1, 1, n, 512) for n in (32, 4, 4))
    tables = [frozen(1, 1, 256, dtype=FP32) for _ in range(2)]
    keys, values = frozen(1, 32768, 4, 128), frozen(1, 32768, 4, 512)
    rope_decode_keys_as_values(
        q, k, v, *tables, keys, values, frozen(512), frozen(1, dtype=INT32), frozen(1, dtype=INT32)
    )


# ---- Gated DeltaNet ----


def delta_rule(dtype: torch.dtype = BF16, dim: int = 128, packed: bool = False) -> None:
    q, k = (new(1, 8192, 16, dim, dtype=dtype) for _ in range(2))
    g, beta = new(1, 8192, 32, dtype=FP32), new(1, 8192, 32, dtype=dtype)
    cu = frozen(9, dtype=INT32) if packed else None
    backward(kernels.gated_delta_rule(q, k, new(1, 8192, 32, dim, dtype=dtype), g, beta, cu_seqlens=cu))


def delta_parts() -> None:
    backward(kernels.delta_gates(new(1, 8192, 32), new(1, 8192, 32), new(32), new(32)))
    backward(kernels.causal_conv(new(1, 8192, 8192), new(8192, 1, 4), activation="silu"))


def delta_step() -> None:
    rows, states = 1, 4
    gates = [frozen(rows, 1, 32), frozen(rows, 1, 32), frozen(32), frozen(32)]
    rings = frozen(rows, 3 + states, 8192), frozen(rows, states, 32, 128, 128, dtype=FP32)
    ends = frozen(rows, dtype=INT32)
    gated_delta_step(frozen(rows, 1, 8192), frozen(8192, 1, 4), *gates, *rings, ends, rings_are_ready=True)


# ---- Losses and the table ----


def losses(**options: Any) -> None:
    labels = frozen(4096, dtype=torch.int64)
    backward(kernels.cross_entropy(new(4096, VOCAB), labels, **options))
    backward(kernels.linear_cross_entropy(new(4096, 4096), new(VOCAB, 4096), labels, **options))
    backward(kernels.linear_logprobs(new(4096, 4096), new(VOCAB, 4096), labels, return_entropy=True))


def divergences() -> None:
    student, teacher = new(4096, VOCAB), frozen(4096, VOCAB)
    backward(kernels.kl_div(student, teacher, reduction="batchmean", log_target=True))
    backward(kernels.jsd(student, teacher))
    labels = frozen(4096, dtype=torch.int64)
    head = new(4096, 2048), new(VOCAB, 2048), frozen(4096, 4096), frozen(VOCAB, 4096)
    backward(kernels.linear_jsd(*head, labels=labels, weight_hard=0.5, weight_soft=0.5))


def vocabulary_on_two() -> None:
    """The collective is replaced: it has no launch of ours."""
    group: Any = SimpleNamespace(size=lambda: 2, rank=lambda: 0)
    with mock.patch.object(vocab_parallel, "_gather", lambda stats, group: stats.new_empty(2, *stats.shape)):
        labels = frozen(4096, dtype=torch.int64)
        head = new(4096, 4096), new(VOCAB // 2, 4096), labels
        backward(vocab_parallel.vocab_parallel_cross_entropy(*head, group=group, first_id=0))


def table() -> None:
    backward(kernels.embedding(frozen(4, 2048, dtype=torch.int64), new(VOCAB, 4096)))


def greedy() -> None:
    argmax(frozen(1, VOCAB))
    argmax(frozen(64, VOCAB))


def in_place() -> None:
    """Gradients that are added to .grad in the backward: those of a loss are scaled, and written in another dtype."""
    weight = nn.Parameter(new(VOCAB, 4096))
    accumulate_in_place(nn.ParameterList([weight]))
    for _ in range(2):
        backward(kernels.linear_cross_entropy(new(4096, 4096), weight, frozen(4096, dtype=torch.int64)))


# ---- Linear layers ----


def mlps() -> None:
    x, gate_up, down = new(2, 4096, 4096), new(2 * 14336, 4096), new(4096, 14336)
    backward(kernels.gated_mlp(x, gate_up, down))


def adapters() -> None:
    """LoRA in fp32 beside bf16, as PEFT has it by default."""
    adapter = Adapter(new(16, 4096, dtype=FP32), new(4096, 16, dtype=FP32), 2.0, FP32)
    backward(linears(new(4096, 4096), [LinearOperand(frozen(4096, 4096), None, adapter)]))


def one_row(dtype: torch.dtype = BF16) -> None:
    x = frozen(1, 4096, dtype=dtype)
    gate, up, down = (frozen(*shape, dtype=dtype) for shape in ((14336, 4096), (14336, 4096), (4096, 14336)))
    gemv(gemv(x, gate, up=up, activation="silu"), down)
    gemv(x, frozen(6144, 4096, dtype=dtype))


def few_rows() -> None:
    gemv(frozen(3, 4096), frozen(6144, 4096))


def quantised(kind: str, rows: int, columns: int = 4096, dtype: torch.dtype = BF16, *, glu: bool = False) -> None:
    x = frozen(rows, columns, dtype=dtype)

    def weight(out: int) -> QuantizedWeight:
        if kind == "int4":
            words, scale = frozen(out, WORDS * columns // GROUP, dtype=INT32), frozen(out, columns // GROUP)
        else:
            kinds = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
            words, scale = frozen(out, columns, dtype=kinds[kind]), frozen(out, dtype=FP32)
        return QuantizedWeight(kind, (out, columns), BF16, 0, words, scale)

    with torch.no_grad():
        linears(x, [LinearOperand(weight(6144))])
        if glu:
            down = frozen(4096, 14336)
            kernels.gated_mlp(x, [weight(14336), weight(14336)], LinearOperand(down).weight)
            weight(14336).dequantize()


def nf4() -> None:
    blocks = 4096 * 4096 // 64
    packed, absmax = frozen(blocks * 32, 1, dtype=torch.uint8), frozen(blocks, dtype=torch.uint8)
    nested = frozen(blocks // 256, dtype=FP32), frozen(256, dtype=FP32), frozen(1, dtype=FP32)
    NF4Weight("nf4", (4096, 4096), BF16, 64, packed, absmax, frozen(16, dtype=FP32), *nested).dequantize()


def mxfp4(*shape: int) -> MXFP4Weight:
    *count, rows, columns = shape
    lead = math.prod((*count, rows))
    packed, scale = frozen(lead, columns // 2, dtype=torch.uint8), frozen(lead, columns // 32, dtype=torch.uint8)
    return MXFP4Weight("mxfp4", shape, BF16, 32, packed, scale)


def quantised_to_fp8() -> None:
    x, fp32 = frozen(16384, 4096), frozen(14336, dtype=FP32)
    quantize_rows(x)
    quantize_rows(frozen(16384, 14336), "e5m2", powers_of_two=True, factor=fp32)
    quantize_transposed(x)
    scale = tensor_scale([x], "e4m3", False)
    quantize_rows(x, scale=scale)
    quantize_transposed(x, scale=scale)
    quantize_both(frozen(16384, 28672), factor=frozen(28672, dtype=FP32))
    quantize_rows(frozen(16384, 28672))
    quantize_both(x, "e5m2", scale=scale)
    transposed(frozen(6144, 4096, dtype=torch.float8_e4m3fn))


def unpacked_mxfp4() -> None:
    mxfp4(5760, 2880).dequantize()


def int2() -> None:
    scales = dict(scale_w=frozen(1, dtype=FP32))
    for rows in (1, 16, 4096):
        a, packed = frozen(rows, 2560, dtype=torch.int8), frozen(640, 2560, dtype=torch.uint8)
        int2_matmul(a, packed, scale_a=frozen(rows, dtype=FP32), **scales)


# ---- Experts ----


def routes() -> None:
    backward(kernels.route(new(16384, 128), top_k=8))
    bias = frozen(256, dtype=FP32)
    options = dict(score="sigmoid", groups=8, groups_kept=4, scale=2.5, eps=1e-20)
    backward(kernels.route(new(16384, 256), top_k=8, bias=bias, **options))


def experts(
    rows: int, hidden: int = 2048, inner: int = 768, count: int = 128, top_k: int = 8, dtype: torch.dtype = BF16,
    *, bias: bool = False, rank: int = 0, activation: Activation = "silu", total: int | None = None,
) -> None:  # fmt: skip
    """total: the experts are the last of this number, and a token has one row."""

    def operand(columns: int, width: int) -> LinearOperand:
        adapter = None
        if rank:
            adapter = Adapter(new(count, rank, width), new(count, columns, rank), 2.0)
        weight = new(count, columns, width, dtype=dtype, train=not rank)
        return LinearOperand(weight, new(count, columns, dtype=dtype) if bias else None, adapter)

    chosen = frozen(rows, top_k, dtype=INT32)
    weights = new(rows, top_k, dtype=FP32)
    layers = operand(2 * inner, hidden), operand(hidden, inner)
    part: Any = {} if total is None else dict(first_expert=total - count, total_experts=total)
    with mock.patch.object(torch.Tensor, "item", lambda x: rows):
        y = experts_of(new(rows, hidden, dtype=dtype), weights, chosen, *layers, activation=activation, **part)
    backward(y)


def decoded_experts(rows: int, dtype: torch.dtype = BF16) -> None:
    chosen, weights = frozen(rows, 8, dtype=INT32), frozen(rows, 8, dtype=FP32)
    projections = frozen(128, 2 * 768, 2048, dtype=dtype), frozen(128, 2048, 768, dtype=dtype)
    kernels.moe_experts(frozen(rows, 2048, dtype=dtype), weights, chosen, *projections)


def decoded_experts_of_gpt_oss(rows: int, *, few_bits: bool, gap: int = 0) -> None:
    """gap: elements between the rows of x."""
    chosen, weights = frozen(rows, 4, dtype=INT32), frozen(rows, 4, dtype=FP32)
    make = mxfp4 if few_bits else frozen
    layers = [LinearOperand(make(32, n, 2880), frozen(32, n), None) for n in (5760, 2880)]
    experts_of(frozen(rows, 2880 + gap)[:, :2880], weights, chosen, *layers, activation=CLAMPED)


# ---- The optimizer ----


def optimizer() -> None:
    options: dict[str, Any] = dict(lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    state = [frozen(4096, 4096) for _ in range(4)]
    adamw(*state, frozen(4096, 4096, dtype=torch.int16), step=3, **options)
    adamw(*state, step=3, factor=frozen(1, dtype=FP32), **options)
    adamw(*(frozen(4096, 4096, dtype=FP32) for _ in range(4)), step=3, **options)
    moments = [frozen(4096, 4096, dtype=torch.uint8) for _ in range(2)]
    exponents = frozen(4096, 64, dtype=torch.uint8), frozen(4096, 64, dtype=torch.uint8)
    for dtype in (BF16, FP32):
        adamw(*(frozen(4096, 4096, dtype=dtype) for _ in range(2)), *moments, None, exponents, step=3, **options)
    adamw(*state[:2], *moments, frozen(4096, 4096, dtype=torch.int16), exponents, step=3, **options)
    masters = frozen(4096, 4096, dtype=torch.int16)
    for kind in (
        Parameter(*state),
        Parameter(*state, masters),
        Parameter(*(frozen(4096, 4096, dtype=FP32) for _ in range(4))),
        Parameter(*state[:2], *moments, masters, exponents),
    ):
        adamw_many([kind, kind._replace(number=1)], Tables(), step=3, **options)


CASES: dict[str, Callable[[], None]] = {
    "norms 4096": lambda: norms(BF16, 4096),
    "norms 2048 fp32": lambda: norms(FP32, 2048),
    "norms 8192": lambda: norms(BF16, 8192),
    "decoding, around": decoded_norms,
    "gated norms": gated_norms,
    "activations": activations,
    "rope": rope,
    "attention 64 packed": lambda: attention(64, packed=True),
    "attention 72 packed": lambda: attention(72, packed=True),
    "attention 80 window": lambda: attention(80, window=1024),
    "attention 96 window": lambda: attention(96, window=2047),
    "attention 128 packed": lambda: attention(128, packed=True),
    "attention 128 window, short": lambda: attention(128, window=1024, length=1024),
    "attention 128 padded": lambda: attention(128, padded=True, window=1024),
    "attention 128 softcap fp32": lambda: attention(128, FP32, softcap=50.0),
    "attention 256 softcap": lambda: attention(256, softcap=50.0),
    "attention 256 window": lambda: attention(256, window=512),
    "attention 256 softcap fp32": lambda: attention(256, FP32, softcap=50.0),
    "attention 64 sinks": lambda: attention(64, sinks=True, packed=True),
    "attention 64 sinks, window": lambda: attention(64, sinks=True, window=128),
    "attention 64 sinks, padded": lambda: attention(64, sinks=True, padded=True),
    "attention 512": lambda: attention(512),
    "attention 512 packed, padded": lambda: attention(512, packed=True, padded=True),
    "decode 64": lambda: decoded(64),
    "decode 128": lambda: decoded(128),
    "decode 128 eight rows": lambda: decoded(128, rows=8),
    "decode 128 window": lambda: decoded(128, window=1024, ring=True),
    "decode 128 fp8": lambda: decoded(128, fp8=True),
    "decode 128 fp32": lambda: decoded(128, dtype=FP32),
    "decode 256 softcap": lambda: decoded(256, heads=16, softcap=50.0),
    "decode 64 sinks": lambda: decoded(64, heads=64, sinks=True),
    "decode 64 sinks, window": lambda: decoded(64, heads=64, sinks=True, window=128, ring=True),
    "decode 64 norms": lambda: decoded(64, offset=0.0),
    "decode 128 norms": lambda: decoded(128, offset=0.0),
    "decode 128 norms, window, eight rows": lambda: decoded(128, rows=8, window=1024, ring=True, offset=0.0),
    "decode 256 norms": lambda: decoded(256, heads=16, offset=1.0),
    "decode 512": lambda: decoded(512, heads=16),
    "decode 256 fp32": lambda: decoded(256, heads=16, dtype=FP32),
    "decode keys as values": keys_as_values,
    "rope to cache": appended,
    "delta rule": delta_rule,
    "delta rule packed": lambda: delta_rule(packed=True),
    "delta rule fp32": lambda: delta_rule(FP32),
    "delta rule 256": lambda: delta_rule(dim=256),
    "delta rule's parts": delta_parts,
    "delta step": delta_step,
    "losses": losses,
    "losses softcap": lambda: losses(softcap=30.0, label_smoothing=0.1),
    "divergences": divergences,
    "vocabulary on two": vocabulary_on_two,
    "embedding": table,
    "argmax": greedy,
    "gradients in place": in_place,
    "mlp": mlps,
    "LoRA fp32": adapters,
    "gemv": one_row,
    "gemv fp32": lambda: one_row(FP32),
    "gemv of three rows": few_rows,
    **{f"{kind}, one row": lambda kind=kind: quantised(kind, 1, glu=True) for kind in ("int8", "fp8", "int4")},
    **{
        f"{kind}, {rows} rows": lambda kind=kind, rows=rows: quantised(kind, rows)
        for kind in ("int8", "fp8", "int4") for rows in (8, 32, 64)
    },
    "int8, 64 rows fp32": lambda: quantised("int8", 64, dtype=FP32),
    "int4, 64 rows fp32": lambda: quantised("int4", 64, dtype=FP32),
    "nf4": nf4,
    "mxfp4": unpacked_mxfp4,
    "fp8": quantised_to_fp8,
    "int2": int2,
    "route": routes,
    "experts": lambda: experts(4096),
    "experts of gpt-oss": lambda: experts(4096, 2880, 2880, 32, 4, bias=True, activation=CLAMPED),
    "experts of gpt-oss, LoRA": lambda: experts(4096, 2880, 2880, 32, 4, bias=True, rank=16, activation=CLAMPED),
    **{
        f"experts of gpt-oss{' mxfp4' * few_bits}, {rows} tokens": lambda rows=rows, few_bits=few_bits:
            decoded_experts_of_gpt_oss(rows, few_bits=few_bits)
        for few_bits in (False, True) for rows in (1, 12, 64)
    },
    "experts of gpt-oss mxfp4, by tl.dot_scaled": lambda: decoded_experts_of_gpt_oss(12, few_bits=True, gap=4),
    "experts of a rank": lambda: experts(4096, count=16, total=128),
    "experts of a rank, one": lambda: experts(4096, count=1, top_k=2, total=8, bias=True, activation=CLAMPED),
    "experts fp32": lambda: experts(1024, dtype=FP32),
    "experts LoRA": lambda: experts(4096, rank=16),
    "experts, one token": lambda: decoded_experts(1),
    "experts, eight tokens": lambda: decoded_experts(8),
    "experts, 256 tokens": lambda: decoded_experts(256),
    "experts, 256 tokens fp32": lambda: decoded_experts(256, FP32),
    "adamw": optimizer,
}  # fmt: skip
"""{name: call inside `pretend.gpu`}. The first case of a variant gives the variant its name."""


def cases(capability: int) -> dict[str, Callable[[], None]]:
    """CASES, less what GPUs before Ada do not have: Triton has no e4m3 there."""
    return {name: call for name, call in CASES.items() if capability >= 89 or "fp8" not in name}
