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
import operator
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ligermodels.errors import InputError
from ligermodels.kernels._chunks import chunk_rows, slices
from ligermodels.kernels._math import Activation, activation_name
from ligermodels.kernels._recompute import handle_of, may_overwrite
from ligermodels.kernels._triton import apply, once_differentiable, use_triton
from ligermodels.kernels.linear._gemv import gemv
from ligermodels.kernels.linear.activation import activate_reference
from ligermodels.kernels.linear.glu import GLULinear, check_glu, glu_backward, glu_forward, glu_reference
from ligermodels.kernels.linear.joint import rows_of
from ligermodels.kernels.linear.linear import JointLinears, flatten, linears, linears_reference, without_biases
from ligermodels.kernels.linear.low_bit import Weight
from ligermodels.kernels.linear.operand import LinearOperand, autocast_dtype, check, choose_mlp, without_fp8
from ligermodels.kernels.linear.quantized import quantized_glu, quantized_linear


def gated_mlp_reference(
    x: Tensor, gate_up_weight: Tensor | Sequence[Tensor], down_weight: Tensor,
    gate_up_bias: Tensor | Sequence[Tensor | None] | None = None, down_bias: Tensor | None = None, *,
    activation: Activation = "silu",
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
    x: Tensor, first: Sequence[LinearOperand], last: LinearOperand, *, gated: bool, activation: Activation
) -> Tensor:
    h = (glu_reference if gated else activate_reference)(_layers(x, first), activation=activation)
    return _layers(h, [last])


def _layers(x: Tensor, operands: Sequence[LinearOperand]) -> Tensor:
    """By PyTorch's functions; those in FP8 by their op, whose weights are quantised once a step."""
    return (linears if operands[0].is_fp8 else linears_reference)(x, operands)


def _traced(x: Tensor, first: Sequence[LinearOperand], last: LinearOperand, *, gated: bool, activation: str) -> Tensor:
    """For torch.compile, which cannot trace `_MLP`; of dense layers."""
    gate, *up = [F.linear(x, weight, bias) for weight, bias, _ in first]
    joint = gated and len(first) == 1
    return GLULinear.apply(gate, up[0] if up else None, last.weight, last.bias, joint, activation)


def _several(tensors: Any) -> tuple:
    """The tensors as a tuple; a single tensor, or None, becomes a tuple of one."""
    return (tensors,) if tensors is None or isinstance(tensors, Weight) else tuple(tensors)


class _MLP(torch.autograd.Function):
    """y [..., N] from x [..., H]. leaves: of the first layers, [F, H] (gated: 2F rows in all), and of the last, [N, F].

    options: z, or None if rows is given; the recompute handle of x, or None; rows: tokens per chunk if z is recomputed,
    else None; `flatten`'s rest of first and last; gated; activation; N; the number of leaves of the first layers.
    It returns empty memory that `_run` fills after everything is saved: activation checkpointing reruns a region only
    until its last tensor is saved, and so does not compute h again. H = x A^T of the adapters is computed only then, so
    the backward recomputes it.
    """

    @staticmethod
    def forward(ctx, x, options, *leaves):
        z, handle, rows, first, last, gated, activation, width, count = options
        need_x, _, *needs = ctx.needs_input_grad
        recompute_x, recompute_args = (None, (x,)) if handle is None else handle
        reads_z = need_x or True in needs[:count] or True in without_biases(needs[count:], 1)
        if not (True in without_biases(needs[:count], first[0]) or (reads_z and z is None)):
            recompute_x, recompute_args = None, ()
        of_first = leaves[:count] if z is None else without_biases(leaves[:count], first[0])
        ctx.save_for_backward(*of_first, *without_biases(leaves[count:], 1), z if reads_z else None, *recompute_args)
        ctx.options = recompute_x, rows, first, last, gated, activation, count
        return x.new_empty((*x.shape[:-1], width))

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        recompute_x, rows, first, last, gated, activation, count = ctx.options
        (need_x, _, *needs), saved = ctx.needs_input_grad, ctx.saved_tensors
        total, lead, dy = len(needs), dy.shape[:-1], dy.reshape(-1, dy.shape[-1])
        chunks = slices(len(dy), rows)
        several = len(chunks) > 1
        need_z, need_h = need_x or True in needs[:count], True in without_biases(needs[count:], 1)
        first = JointLinears(saved[:count], first, dy.dtype, needs[:count], several, need_x)
        last = JointLinears(saved[count:total], last, dy.dtype, needs[count:], several, need_z)
        saved_z, *recompute_args = saved[total:]
        if not (need_z or need_h):
            chunks = []
        hidden, width = first.weights[0].shape[1], sum(rows_of(first.weights))
        overwrite = need_z and (rows is not None or (saved_z.is_contiguous() and may_overwrite(saved_z)))
        x: Any = None
        x_chunk, dx, z, dz, workspace = x, x, x, x, x
        if recompute_args:
            x = (recompute_args[0] if recompute_x is None else recompute_x(*recompute_args)).reshape(-1, hidden)
        if need_x and (several or recompute_x is not None):
            dx = x.new_empty(x.shape) if recompute_x is None else x  # of each chunk, x is read before dx is written
        if chunks and rows is not None:
            workspace = dy.new_empty(min(rows, len(dy)), width)
        if several:  # once for all chunks: dequantising takes more time than a matmul of 128 tokens
            first.dequantize(dy.dtype)
            last.dequantize(dy.dtype)
        for chunk in chunks:
            dy_chunk, inner = dy[chunk], None
            if x is not None:
                x_chunk = x[chunk]
            if workspace is not None:
                z, inner = first.run(x_chunk, out=workspace[: len(dy_chunk)])
            elif saved_z is not None:
                z = saved_z.reshape(-1, width)
            d_inner = last.inner_gradient(dy_chunk)
            if need_z:
                h = last.input_gradient(dy_chunk, d_inner)  # dh at first; the kernel writes h over it
                dz, _ = glu_backward(h, z, None, gated, activation, emit=need_h, overwrite=overwrite)
            elif need_h:
                h = glu_forward(z, None, gated, activation)
            if need_h:
                last.add_gradients(dy_chunk, h, None, d_inner)
            if not need_z:
                continue
            del h
            d_inner = first.inner_gradient(dz)
            first.add_gradients(dz, x_chunk, inner, d_inner)
            first.add_bias_gradients(dz)
            if need_x:
                part = first.input_gradient(dz, d_inner, None if dx is None else dx[chunk])
                dx = part if dx is None else dx
        del workspace, z, dz  # before sums of several chunks are rounded, which is a peak
        last.add_bias_gradients(dy)
        dx = None if dx is None else dx.view(*lead, hidden)
        return dx, None, *first.gradients(dy.dtype), *last.gradients(dy.dtype)


def _run(
    x: Tensor, first: Sequence[LinearOperand], last: LinearOperand, *, gated: bool, activation: str,
    rows: int | None = None,
) -> Tensor:  # fmt: skip
    """The MLP by the Triton kernels. rows: see `_MLP`."""
    (leaves, of_first), (more, of_last), width = flatten(first), flatten([last]), last.weight.shape[0]
    with torch.no_grad():
        inner, outer = JointLinears(leaves, of_first, x.dtype), JointLinears(more, of_last, x.dtype)
        z = inner.run(x)[0] if rows is None else None
    if torch.is_grad_enabled():
        options = z, handle_of(x), rows, of_first, of_last, gated, activation, width, len(leaves)
        y = apply(_MLP, x, options, *leaves, *more)
    elif z is not None:
        return outer.run(glu_forward(z, None, gated, activation))[0]
    else:
        y = x.new_empty((*x.shape[:-1], width))
    with torch.no_grad():
        out = y.detach().view(-1, y.shape[-1])
        if z is not None:
            outer.run(glu_forward(z.view(-1, z.shape[-1]), None, gated, activation), out)
            return y
        x = x.reshape(-1, x.shape[-1])
        chunks = slices(len(x), rows)
        if len(chunks) > 1:
            inner.dequantize(x.dtype)
            outer.dequantize(x.dtype)
        for chunk in chunks:
            outer.run(glu_forward(inner.run(x[chunk])[0], None, gated, activation), out[chunk])
    return y


def mlp_of(
    x: Tensor, first: Sequence[LinearOperand], last: LinearOperand, *, gated: bool, activation: Activation,
    recompute: bool = False, workspace_bytes: int = 512 * 2**20,
) -> Tensor:  # fmt: skip
    """`gated_mlp` or `mlp` of operands. first: for a gated MLP gate and up, as two layers or joint in one."""
    where, layers = "mlp", ("fc1_", "fc2_")
    if gated:
        where, layers = "gated_mlp", ("gate_up_", "down_") if len(first) == 1 else ("gate_", "up_", "down_")  # type: ignore[assignment]
    activation, hidden = activation_name(where, activation, gated=gated), check_glu(where, "x", x)
    *first, last = without_fp8(x, (*first, last))
    how = choose_mlp(x, first, last, gated=gated)
    if how == "gemv":  # unchecked, since decoding is bound by the host
        return _few_rows(x, first, last, activation)
    rows = rows_of([layer.weight for layer in first])
    inner = operator.index(sum(rows))
    if inner == 0 or (gated and inner % 2) or rows[0] != rows[-1] or workspace_bytes <= 0:
        raise InputError(
            f"{where}: {layers[0]}weight has {' and '.join(map(str, rows))} rows and workspace_bytes is "
            f"{workspace_bytes}; expected {'an even number of' if gated and len(first) == 1 else 'some'} rows, as many "
            "for gate as for up, and a positive number of bytes."
        )
    first = check(where, "x", x, hidden, first, layers)
    (last,) = check(where, "x", x, inner // 2 if gated else inner, [last], layers[-1:])
    if (cast := autocast_dtype(x)) is not None:
        x = x.to(cast)
    if how == "low_bit":
        return _few_rows(x, first, last, activation)
    options: Any = dict(gated=gated, activation=activation)
    if how == "op":
        if recompute:
            tokens, row_bytes = x.numel() // hidden, inner * x.element_size()
            one_chunk = tokens * row_bytes <= 2 * workspace_bytes  # two save little memory for the time of fp32 sums
            options["rows"] = tokens if one_chunk else chunk_rows(tokens, row_bytes, workspace_bytes)
        return _run(x, first, last, **options)
    run: Any = functools.partial(_traced if how == "traced" else _reference, **options)
    if recompute and torch.is_grad_enabled():
        return checkpoint(run, x, first, last, use_reentrant=False, preserve_rng_state=False)
    return run(x, first, last)


def _few_rows(x: Tensor, first: Sequence[LinearOperand], last: LinearOperand, activation: str) -> Tensor:
    """A gated MLP by the kernels of gemv.py, or of one row by that of int4_row.py."""
    (gate, gate_bias, _), (up, up_bias, _) = first if len(first) == 2 else _halves(first[0])
    if not isinstance(gate, Tensor):
        h = quantized_glu(x, gate, up, gate_bias, up_bias, activation=activation)
        return quantized_linear(h.view(1, -1), last.weight, last.bias).view(*x.shape[:-1], -1)
    if use_triton(x):
        h = gemv(x, gate, gate_bias, up=up, up_bias=up_bias, activation=activation)
    else:
        h = glu_reference(JointLinears(*flatten(first), x.dtype).run(x)[0], activation=activation)
    return gemv(h, last.weight, last.bias)


def _halves(layer: LinearOperand) -> list[LinearOperand]:
    """Gate and up as two layers, from one layer with both."""
    weight, bias, _ = layer
    weights = weight.chunk(2) if isinstance(weight, Tensor) else weight.split(2)
    return list(map(LinearOperand, weights, (None, None) if bias is None else bias.chunk(2)))


def gated_mlp(
    x: Tensor, gate_up_weight: Weight | Sequence[Weight], down_weight: Weight,
    gate_up_bias: Tensor | Sequence[Tensor | None] | None = None, down_bias: Tensor | None = None, *,
    activation: Activation = "silu", recompute: bool = False, workspace_bytes: int = 512 * 2**20,
) -> Tensor:  # fmt: skip
    """F.linear(glu(F.linear(x, gate_up_weight, gate_up_bias)), down_weight, down_bias).

    x: [..., H]; gate_up_weight: [2F, H], rows [gate | up], or the two weights (gate [F, H], up [F, H]); down_weight:
    [N, F]; gate_up_bias: [2F] or None, or for two weights (gate [F] or None, up [F] or None); down_bias: [N] or None;
    activation: as in `glu`. A weight may be a `LowBitWeight`.
    recompute: gate_up = [gate | up] is not saved; the backward recomputes it from x, a chunk of tokens at a time.
        Weight gradients are summed over the chunks in fp32, and so differ by rounding from those of one chunk.
    workspace_bytes: maximum size of gate_up of a chunk (which has 128 tokens at least), or half that of a single chunk;
        h takes half as much beside it.
    Returns [..., N] of x's dtype; under torch.autocast of autocast's, to which all inputs are cast as by F.linear.
    Raises InputError for shapes, dtypes or devices that do not fit.
    """
    weights, biases = _several(gate_up_weight), _several(gate_up_bias)
    biases = (None,) * len(weights) if gate_up_bias is None else biases
    if len(weights) > 2 or len(biases) != len(weights):
        raise InputError(
            f"gated_mlp: gate_up_weight has {len(weights)} parts and gate_up_bias {len(biases)}; expected one weight "
            "[2F, H] and bias [2F], or two weights (gate, up) and two biases."
        )
    options: Any = dict(activation=activation, recompute=recompute, workspace_bytes=workspace_bytes)
    first, last = list(map(LinearOperand, weights, biases)), LinearOperand(down_weight, down_bias)
    return mlp_of(x, first, last, gated=True, **options)


def mlp(
    x: Tensor, fc1_weight: Weight, fc2_weight: Weight, fc1_bias: Tensor | None = None,
    fc2_bias: Tensor | None = None, *, activation: str, recompute: bool = False, workspace_bytes: int = 512 * 2**20,
) -> Tensor:  # fmt: skip
    """F.linear(activate(F.linear(x, fc1_weight, fc1_bias)), fc2_weight, fc2_bias): `gated_mlp` without a gate.

    x: [..., H]; fc1_weight: [F, H]; fc2_weight: [N, F]; fc1_bias: [F] or None; fc2_bias: [N] or None; activation: as in
    `activate`; recompute and workspace_bytes (for fc1's output) as in `gated_mlp`. Weights may be `LowBitWeight`s.
    Returns [..., N], and raises InputError, as `gated_mlp` does.
    """
    options: Any = dict(activation=activation, recompute=recompute, workspace_bytes=workspace_bytes)
    first, last = [LinearOperand(fc1_weight, fc1_bias)], LinearOperand(fc2_weight, fc2_bias)
    return mlp_of(x, first, last, gated=False, **options)
