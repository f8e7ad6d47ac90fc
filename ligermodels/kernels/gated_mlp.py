"""The MLP as one op: two linear layers and the activation between them, gated or not.

    gated_mlp:  z = x Wgu^T + bgu = [gate | up]     h = act(gate) * up     y = h Wd^T + bd
    mlp:        z = x W1^T + b1                     h = act(z)             y = h W2^T + b2

What differs from separate layers:
- Wgu is one matrix [2F, H], or two [F, H] for gate and up. z is one buffer in either case, and so is its gradient. Two
  weights that are `joint` are read as one matrix (see linear.py).
- x and z are saved, never h: the kernels of glu.py recompute h while they read z for the gradient. If a norm computed
  x, the norm's inputs are saved instead (`_recompute`).
- recompute=True does not save z either. Forward and backward then run over chunks of tokens, with z and h of one chunk
  in memory at a time: sequences may be 40 % longer at 131,072 tokens.
- The gradient of z is written over z, and dx over a recomputed x, except where z may be read again: under retain_graph
  and in CUDA graphs.
- A frozen weight or input costs nothing.
- Activation checkpointing ends the second run of a region that ends with this op after z, or with recompute=True before
  z.

Saved bytes per token at 2-byte dtypes for the intermediate size I: 4 I gated, 2 I plain, 0 with recompute=True, which
takes one more matmul with the first weight. Element-wise bytes: as in glu.py.

Source: as glu.py. Recomputation: Chen et al. 2016, https://arxiv.org/abs/1604.06174.
"""

import functools
import itertools
import operator
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ligermodels.errors import InputError
from ligermodels.kernels._chunks import chunk_rows, slices
from ligermodels.kernels._gradients import accumulate, accumulate_grad
from ligermodels.kernels._recompute import handle_of, may_overwrite
from ligermodels.kernels._triton import accumulator, once_differentiable, use_triton
from ligermodels.kernels.activation import activate_reference
from ligermodels.kernels.gemv import gemv, gemv_glu
from ligermodels.kernels.glu import check_glu, glu_forward, glu_linear_backward, glu_reference
from ligermodels.kernels.linear import (
    as_one_layer,
    bias_gradients,
    cat_linear,
    input_gradient,
    joint_matmul,
    matmul,
    weight_gradients,
)
from ligermodels.kernels.lora import lora_mlp, lora_mlp_reference
from ligermodels.kernels.operand import Adapters, LinearOperand, Weight, autocast_dtype, check, choose_mlp
from ligermodels.kernels.quantized import quantized_glu, quantized_linear


def gated_mlp_reference(
    x: Tensor, gate_up_weight: Tensor | Sequence[Tensor], down_weight: Tensor,
    gate_up_bias: Tensor | Sequence[Tensor | None] | None = None, down_bias: Tensor | None = None, *,
    activation: str = "silu",
) -> Tensor:  # fmt: skip
    weights = _several(gate_up_weight)
    biases = [None] * len(weights) if gate_up_bias is None else _several(gate_up_bias)
    first = list(map(LinearOperand, weights, biases))
    return _reference(x, first, LinearOperand(down_weight, down_bias), gated=True, activation=activation)


def mlp_reference(
    x: Tensor, fc1_weight: Tensor, fc2_weight: Tensor, fc1_bias: Tensor | None = None,
    fc2_bias: Tensor | None = None, *, activation: str,
) -> Tensor:  # fmt: skip
    first, last = LinearOperand(fc1_weight, fc1_bias), LinearOperand(fc2_weight, fc2_bias)
    return _reference(x, [first], last, gated=False, activation=activation)


def _reference(
    x: Tensor, first: Sequence[LinearOperand], last: LinearOperand, *, gated: bool, activation: str
) -> Tensor:
    z = cat_linear(x, [w for w, _, _ in first], [b for _, b, _ in first])
    h = (glu_reference if gated else activate_reference)(z, activation=activation)
    return F.linear(h, last.weight, last.bias)


def _several(tensors: Any) -> tuple:
    """A tuple of one tensor, or of several."""
    return (tensors,) if isinstance(tensors, Weight) else tuple(tensors)


class _Gradients:
    """dy^T x, the gradients of the weights [N_i, K] that need one, from dy [T, sum N_i] and x [T, K]; summed in fp32 if
    there are several chunks, in one buffer if all weights need one."""

    def __init__(self, weights: Sequence[Tensor], needs: Sequence[bool], several: bool):
        self.weights, self.needs, self.several = weights, needs, several
        self.found: list[Tensor | None] = [None] * len(weights)
        self.sums: list[tuple[slice, Tensor]] = []

    def add(self, dy: Tensor, x: Tensor) -> None:
        if not self.several:
            self.found = weight_gradients(self.weights, self.needs, dy, x)
            return
        first = not self.sums
        if first:
            ends = [0, *itertools.accumulate(w.shape[0] for w in self.weights)]
            columns = [slice(*span) for span, need in zip(itertools.pairwise(ends), self.needs, strict=True) if need]
            dtype = torch.promote_types(self.weights[0].dtype, torch.float32)
            for part in [slice(0, ends[-1])] if all(self.needs) else columns:
                total = torch.empty(part.stop - part.start, x.shape[1], dtype=dtype, device=x.device)
                self.sums.append((part, total))
        for part, total in self.sums:
            accumulate(total, dy[:, part], x, first)

    def take(self) -> list[Tensor | None]:
        """The gradient of each weight, or None where it was added to .grad."""
        if not self.sums:
            return self.found
        totals = [total for _, total in self.sums]
        if all(self.needs):
            totals = list(totals[0].split([w.shape[0] for w in self.weights]))
        self.sums, left = [], iter(totals)
        return [accumulate_grad(w, next(left)) if n else None for w, n in zip(self.weights, self.needs, strict=True)]


class _MLP(torch.autograd.Function):
    """x: [..., H]; first: `count` weights w1, together [F, H] or, gated, [2F, H], then the bias b1 of each, or None;
    w2: [N, F]; z: x w1^T + b1 -> y [..., N].

    handle: x's, or None. rows: tokens per chunk, of which z is recomputed; None: z is given and saved.
    Run eagerly, it returns empty memory that `_apply` fills after everything is saved: see GLULinear in glu.py.
    """

    @staticmethod
    def forward(ctx, x, z, handle, gated, activation, rows, w2, b2, count, *first):
        need_x, need_w2, _, need_w1, need_b1 = _needs(ctx.needs_input_grad, count)
        reads_z = need_x or need_w2 or any(need_w1) or any(need_b1)
        make_x, inputs = (None, (x,)) if handle is None else handle
        if not (any(need_w1) or (reads_z and z is None)):
            make_x, inputs = None, ()
        ctx.save_for_backward(w2, z if reads_z else None, *first, *inputs)
        ctx.options = make_x, gated, activation, rows, count
        if torch.compiler.is_compiling():
            return F.linear(glu_forward(z, None, gated, activation), w2, b2)
        return x.new_empty((*x.shape[:-1], w2.shape[0]))

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        make_x, gated, activation, rows, count = ctx.options
        w2, saved, *rest = ctx.saved_tensors
        w1, b1, inputs = rest[:count], rest[count : 2 * count], rest[2 * count :]
        need_x, need_w2, need_b2, need_w1, need_b1 = _needs(ctx.needs_input_grad, count)
        hidden, width = w1[0].shape[1], sum(w.shape[0] for w in w1)
        need_z = need_x or any(need_w1) or any(need_b1)
        shape, dy = (*dy.shape[:-1], hidden), dy.reshape(-1, w2.shape[0])
        chunks = slices(len(dy), rows) if need_z or need_w2 else []
        several = len(chunks) > 1
        overwrite = need_z and (rows is not None or (saved.is_contiguous() and may_overwrite(saved)))
        of_w1, of_w2 = _Gradients(w1, need_w1, several), _Gradients([w2], [need_w2], several)
        x: Any = None
        dx, db1, workspace = x, x, x
        if inputs:
            x = (inputs[0] if make_x is None else make_x(*inputs)).reshape(-1, hidden)
        if need_x and (several or make_x is not None):
            dx = x.new_empty(x.shape) if make_x is None else x
        if chunks and rows is not None:
            workspace = w2.new_empty(min(rows, len(dy)), width)
        for chunk in chunks:
            dy_chunk = dy[chunk]
            if workspace is None:
                z = saved.reshape(-1, width)
            else:
                z = matmul(x[chunk], w1, b1, out=workspace[: len(dy_chunk)])
            needs = dict(need_x=need_z, need_h=need_w2)
            dz, _, h = glu_linear_backward(dy_chunk, z, None, w2, gated, activation, overwrite=overwrite, **needs)
            if need_w2:
                of_w2.add(dy_chunk, h)
            del h
            if any(need_w1):
                of_w1.add(dz, x[chunk])
            if any(need_b1):
                part = dz.sum(0, dtype=accumulator(dz.dtype) if several else None)
                db1 = part if db1 is None else db1 + part
            if need_x:
                part = input_gradient(dz, w1, out=None if dx is None else dx[chunk])
                dx = part if dx is None else dx
        if several:
            del workspace, z, dz  # before the sums are rounded, which is a peak
        dw1, dw2 = of_w1.take(), of_w2.take()
        db1 = [None] * count if db1 is None else bias_gradients(db1.to(w2.dtype), w1, need_b1)
        db2 = dy.sum(0) if need_b2 else None
        dx = None if dx is None else dx.view(shape)
        return dx, None, None, None, None, None, *dw2, db2, None, *dw1, *db1


def _needs(needs: tuple[bool, ...], count: int) -> tuple[bool, bool, bool, tuple[bool, ...], tuple[bool, ...]]:
    """ctx.needs_input_grad of _MLP: x's, w2's, b2's, each w1's, each b1's."""
    return needs[0], needs[6], needs[7], needs[9 : 9 + count], needs[9 + count :]


def _apply(
    x: Tensor, first: Sequence[LinearOperand], last: LinearOperand, *, gated: bool, activation: str,
    rows: int | None = None,
) -> Tensor:  # fmt: skip
    w1, b1 = [w for w, _, _ in first], [b for _, b, _ in first]
    w2, b2, _ = last
    with torch.no_grad():
        z = joint_matmul(x, w1, b1) if rows is None else None
    if z is not None and not torch.is_grad_enabled():
        return F.linear(glu_forward(z, None, gated, activation), w2, b2)
    y = _MLP.apply(x, z, handle_of(x), gated, activation, rows, w2, b2, len(w1), *w1, *b1)
    if not torch.compiler.is_compiling():
        with torch.no_grad():
            _write(y.detach().view(-1, w2.shape[0]), x, w1, w2, b1, b2, z, gated, activation, rows)
    return y


def _write(
    y: Tensor, x: Tensor, w1: Sequence[Tensor], w2: Tensor, b1: Sequence[Tensor | None], b2: Tensor | None,
    z: Tensor | None, gated: bool, activation: str, rows: int | None,
) -> None:  # fmt: skip
    if z is not None:
        matmul(glu_forward(z.view(-1, z.shape[-1]), None, gated, activation), [w2], [b2], out=y)
        return
    x = x.reshape(-1, x.shape[-1])
    for chunk in slices(len(x), rows):
        matmul(glu_forward(matmul(x[chunk], w1, b1), None, gated, activation), [w2], [b2], out=y[chunk])


def mlp_of(
    where: str, x: Tensor, first: Sequence[LinearOperand], last: LinearOperand, layers: Sequence[str], *, gated: bool,
    activation: str, recompute: bool = False, workspace_bytes: int = 512 * 2**20,
) -> Tensor:  # fmt: skip
    """The MLP of operands: see `gated_mlp`. layers: prefixes of the names of weight and bias of each, in errors."""
    hidden = check_glu(where, "x", x, activation)
    how = choose_mlp(x, first, last, gated=gated)
    if how == "gemv":  # unchecked, since decoding is bound by the host
        return _gemv_mlp(x, first, last, activation)
    inner = sum(operator.index(one.weight.shape[0]) for one in first)
    if inner == 0 or (gated and inner % 2) or workspace_bytes <= 0:
        raise InputError(
            f"{where}: {layers[0]}weight has {first[0].weight.shape[0]} rows and workspace_bytes is {workspace_bytes}; "
            f"expected {'an even number of' if gated and len(first) == 1 else 'some'} rows and a positive number of "
            "bytes."
        )
    first = [check(where, "x", x, hidden, one, layer) for one, layer in zip(first, layers, strict=False)]
    last = check(where, "x", x, inner // 2 if gated else inner, last, layers[-1])
    x = x.to(autocast_dtype(x) or x.dtype)
    if how == "bits":
        return _quantized_mlp(x, first, last, activation)
    frozen = any(one.is_frozen for one in (*first, last))
    op = (lora_mlp if frozen else _apply) if how != "formula" else lora_mlp_reference if frozen else _reference
    run: Any = functools.partial(op, gated=gated, activation=activation)
    if recompute and how != "formula" and not torch.compiler.is_compiling():
        tokens, row_bytes = x.numel() // hidden, inner * x.element_size()
        one_chunk = tokens * row_bytes <= 2 * workspace_bytes  # two would save little memory for the time of fp32 sums
        return run(x, first, last, rows=tokens if one_chunk else chunk_rows(tokens, row_bytes, workspace_bytes))
    if recompute and torch.is_grad_enabled():
        return checkpoint(run, x, first, last, use_reentrant=False, preserve_rng_state=False)
    return run(x, first, last)


def _gemv_mlp(x: Tensor, first: Sequence[LinearOperand], last: LinearOperand, activation: str) -> Tensor:
    w1: Any = [w for w, _, _ in first]
    b1: Any = [b for _, b, _ in first]
    if not use_triton(x):
        layer = as_one_layer(w1, b1)
        z = map(gemv, (x, x), w1, b1) if layer is None else (gemv(x, *layer),)
        return gemv(glu_reference(*z, activation=activation), last.weight, last.bias)
    if len(w1) == 1:
        w1, b1 = w1[0].chunk(2), (None, None) if b1[0] is None else b1[0].chunk(2)
    return gemv(gemv_glu(x, *w1, *b1, activation=activation), last.weight, last.bias)


def _quantized_mlp(x: Tensor, first: Sequence[LinearOperand], last: LinearOperand, activation: str) -> Tensor:
    w1: Any = [w for w, _, _ in first]
    b1: Any = [b for _, b, _ in first]
    if len(w1) == 1:
        w1, b1 = w1[0].halves(), (None, None) if b1[0] is None else b1[0].chunk(2)
    h = quantized_glu(x, *w1, *b1, activation=activation)
    return quantized_linear(h.view(1, -1), [last.weight], [last.bias]).view(*x.shape[:-1], -1)


def gated_mlp(
    x: Tensor, gate_up_weight: Weight | Sequence[Weight], down_weight: Weight,
    gate_up_bias: Tensor | Sequence[Tensor | None] | None = None, down_bias: Tensor | None = None, *,
    activation: str = "silu", recompute: bool = False, workspace_bytes: int = 512 * 2**20,
    adapters: Adapters | None = None,
) -> Tensor:  # fmt: skip
    """F.linear(glu(F.linear(x, gate_up_weight, gate_up_bias)), down_weight, down_bias).

    x: [..., H]; gate_up_weight: [2F, H], rows [gate | up], or the two weights (gate [F, H], up [F, H]); down_weight:
    [N, F]; gate_up_bias: [2F] or None, or for two weights (gate [F] or None, up [F] or None); down_bias: [N] or None;
    activation: as in `glu`. A weight may be a `LowBitWeight`; unless all weights and biases are then frozen, the
    PyTorch formula runs. recompute: gate_up = [gate | up] is not saved; the backward recomputes it from x, a chunk of
    tokens at a time. Weight
        gradients are summed over the chunks in fp32, and so differ by rounding from those of one chunk.
    workspace_bytes: maximum size of gate_up of a chunk (which has 128 tokens at least), or half that of a single chunk;
        h takes half as much beside it.
    adapters: an `Adapter` or None for each weight of gate and up, and for that of down; see lora.py.
    Returns [..., N] of x's dtype; under torch.autocast of autocast's, to which all inputs are cast as by F.linear.
    Raises InputError for shapes, dtypes or devices that do not fit.
    """
    weights = _several(gate_up_weight)
    biases = (None,) * len(weights) if gate_up_bias is None else _several(gate_up_bias)
    one = isinstance(gate_up_weight, Weight)
    if (
        len(weights) != (1 if one else 2)
        or len(biases) != len(weights)
        or tuple(weights[0].shape[:1]) != tuple(weights[-1].shape[:1])
        or (gate_up_bias is not None and isinstance(gate_up_bias, Tensor) is not one)
    ):
        raise InputError(
            f"gated_mlp: gate_up_weight is {[tuple(w.shape) for w in weights]}, gate_up_bias "
            f"{[b if b is None else tuple(b.shape) for b in biases]}; expected one weight [2F, H] and bias [2F], "
            "or two weights of as many rows (gate, up) and two biases."
        )
    layers = ("gate_up_", "down_") if one else ("gate_", "up_", "down_")
    *of_first, of_last = [None] * len(layers) if adapters is None else adapters
    return mlp_of(
        "gated_mlp", x, list(map(LinearOperand, weights, biases, of_first)),
        LinearOperand(down_weight, down_bias, of_last), layers, gated=True, activation=activation,
        recompute=recompute, workspace_bytes=workspace_bytes,
    )  # fmt: skip


def mlp(
    x: Tensor, fc1_weight: Weight, fc2_weight: Weight, fc1_bias: Tensor | None = None,
    fc2_bias: Tensor | None = None, *, activation: str, recompute: bool = False, workspace_bytes: int = 512 * 2**20,
    adapters: Adapters | None = None,
) -> Tensor:  # fmt: skip
    """F.linear(activate(F.linear(x, fc1_weight, fc1_bias)), fc2_weight, fc2_bias): `gated_mlp` without a gate.

    x: [..., H]; fc1_weight: [F, H]; fc2_weight: [N, F]; fc1_bias: [F] or None; fc2_bias: [N] or None; activation: as in
    `activate`; recompute, workspace_bytes, adapters and a `LowBitWeight` as in `gated_mlp`, of fc1's output.
    Returns [..., N], and raises InputError, as `gated_mlp` does.
    """
    first, last = adapters or (None, None)
    return mlp_of(
        "mlp", x, [LinearOperand(fc1_weight, fc1_bias, first)], LinearOperand(fc2_weight, fc2_bias, last),
        ("fc1_", "fc2_"), gated=False, activation=activation, recompute=recompute, workspace_bytes=workspace_bytes,
    )  # fmt: skip
