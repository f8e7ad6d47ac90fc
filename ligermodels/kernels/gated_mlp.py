"""The MLP as one op: two linear layers and the activation between them, gated or not.

    gated_mlp:  z = x Wgu^T + bgu = [gate | up]     h = act(gate) * up     y = h Wd^T + bd
    mlp:        z = x W1^T + b1                     h = act(z)             y = h W2^T + b2

What differs from the layers one by one:
- Wgu is one matrix [2F, H], or two [F, H], of gate and of up. z is one buffer in either case, and so are the gradients
  of the two. Two that are `joint` are one matrix here too; see linear.py.
- It saves x and z, never h: the kernels of glu.py recompute it as they read z for the gradient. Where x is a norm's
  output, it saves the inputs of the norm instead (`_recompute`).
- recompute=True saves x alone, or only the inputs of the norm. Forward and backward then take the tokens in chunks, and
  z and h exist for one chunk at a time: that allows 40 % longer texts at 131,072 tokens.
- In the backward the gradient of z is written over z, and dx over a recomputed x, unless someone may read a saved z
  again: under retain_graph, and in a CUDA graph, which may be replayed.
- Nothing is computed or saved for a frozen weight or input.
- Under activation checkpointing the second run of a region that ends with this op ends with z, or with recompute=True
  before z.

Bytes per token at 2-byte dtypes for the intermediate size I, gated (plain): 4 I (2 I) of z are saved, and none with
recompute=True, for one more matmul with the first weight. Element-wise: as in glu.py.

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
from ligermodels.kernels.gemv import gemv, gemv_glu, use_gemv
from ligermodels.kernels.glu import check_glu, glu_forward, glu_linear_backward, glu_reference, linear_operands
from ligermodels.kernels.linear import (
    as_one_layer,
    autocast_dtype,
    bias_gradients,
    input_gradient,
    matmul,
    pack,
    side_by_side,
    weight_gradients,
)
from ligermodels.kernels.lora import Adapters, lora_mlp, lora_mlp_reference
from ligermodels.kernels.low_bit import LowBitWeight, Weight
from ligermodels.kernels.quantized import quantized_glu, quantized_linear, use_quantized


def gated_mlp_reference(
    x: Tensor, gate_up_weight: Tensor | Sequence[Tensor], down_weight: Tensor,
    gate_up_bias: Tensor | Sequence[Tensor | None] | None = None, down_bias: Tensor | None = None, *,
    activation: str = "silu",
) -> Tensor:  # fmt: skip
    weights = _several(gate_up_weight)
    biases = [None] * len(weights) if gate_up_bias is None else _several(gate_up_bias)
    return _reference(x, weights, down_weight, biases, down_bias, packed=True, activation=activation)


def mlp_reference(
    x: Tensor, fc1_weight: Tensor, fc2_weight: Tensor, fc1_bias: Tensor | None = None,
    fc2_bias: Tensor | None = None, *, activation: str,
) -> Tensor:  # fmt: skip
    return _reference(x, [fc1_weight], fc2_weight, [fc1_bias], fc2_bias, packed=False, activation=activation)


def _reference(
    x: Tensor, w1: Sequence[Tensor], w2: Tensor, b1: Sequence[Tensor | None], b2: Tensor | None, *, packed: bool,
    activation: str,
) -> Tensor:  # fmt: skip
    z = side_by_side(x, w1, b1)
    return F.linear((glu_reference if packed else activate_reference)(z, activation=activation), w2, b2)


def _several(tensors: Any) -> tuple:
    """One tensor, or several, as several."""
    return (tensors,) if isinstance(tensors, Weight) else tuple(tensors)


class _Gradients:
    """The gradients of weights [N_i, K] that need one, dy^T x of dy [T, sum N_i] and x [T, K]; of several chunks their
    sum in fp32, in one buffer where all need it."""

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
        """Each weight's, or None where it was added to its .grad."""
        if not self.sums:
            return self.found
        totals = [total for _, total in self.sums]
        if all(self.needs):
            totals = list(totals[0].split([w.shape[0] for w in self.weights]))
        self.sums, left = [], iter(totals)
        return [accumulate_grad(w, next(left)) if n else None for w, n in zip(self.weights, self.needs, strict=True)]


class _MLP(torch.autograd.Function):
    """x: [..., H]; first: `count` weights w1 of [F, H] together, or [2F, H] if packed, and to each its bias b1 or None;
    w2: [N, F]; z: x w1^T + b1 -> y [..., N].

    handle: of x, or None. rows: of a chunk, for which z is computed where it is read; None: z is given, and saved.
    Run eagerly it leaves y to `_apply`, which writes it after all is saved: see GLULinear in glu.py.
    """

    @staticmethod
    def forward(ctx, x, z, handle, packed, activation, rows, w2, b2, count, *first):
        need_x, need_w2, _, need_w1, need_b1 = _needs(ctx.needs_input_grad, count)
        reads_z = need_x or need_w2 or any(need_w1) or any(need_b1)
        make_x, inputs = (None, (x,)) if handle is None else handle
        if not (any(need_w1) or (reads_z and z is None)):
            make_x, inputs = None, ()
        ctx.save_for_backward(w2, z if reads_z else None, *first, *inputs)
        ctx.options = make_x, packed, activation, rows, count
        if torch.compiler.is_compiling():
            return F.linear(glu_forward(z, None, packed, activation), w2, b2)
        return x.new_empty((*x.shape[:-1], w2.shape[0]))

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        make_x, packed, activation, rows, count = ctx.options
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
            dz, _, h = glu_linear_backward(dy_chunk, z, None, w2, packed, activation, overwrite=overwrite, **needs)
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
    """Of ctx.needs_input_grad of _MLP: x's, w2's, b2's, those of each w1 and of each b1."""
    return needs[0], needs[6], needs[7], needs[9 : 9 + count], needs[9 + count :]


def _apply(
    x: Tensor, w1: Sequence[Tensor], w2: Tensor, b1: Sequence[Tensor | None], b2: Tensor | None, *, packed: bool,
    activation: str, rows: int | None = None,
) -> Tensor:  # fmt: skip
    with torch.no_grad():
        z = pack(x, w1, b1) if rows is None else None
    if z is not None and not torch.is_grad_enabled():
        return F.linear(glu_forward(z, None, packed, activation), w2, b2)
    y = _MLP.apply(x, z, handle_of(x), packed, activation, rows, w2, b2, len(w1), *w1, *b1)
    if not torch.compiler.is_compiling():
        with torch.no_grad():
            _write(y.detach().view(-1, w2.shape[0]), x, w1, w2, b1, b2, z, packed, activation, rows)
    return y


def _write(
    y: Tensor, x: Tensor, w1: Sequence[Tensor], w2: Tensor, b1: Sequence[Tensor | None], b2: Tensor | None,
    z: Tensor | None, packed: bool, activation: str, rows: int | None,
) -> None:  # fmt: skip
    if z is not None:
        matmul(glu_forward(z.view(-1, z.shape[-1]), None, packed, activation), [w2], [b2], out=y)
        return
    x = x.reshape(-1, x.shape[-1])
    for chunk in slices(len(x), rows):
        matmul(glu_forward(matmul(x[chunk], w1, b1), None, packed, activation), [w2], [b2], out=y[chunk])


def _mlp(
    where: str, layers: Sequence[str], packed: bool, x: Tensor, w1: Sequence[Weight], w2: Weight,
    b1: Sequence[Tensor | None], b2: Tensor | None, activation: str, recompute: bool, workspace_bytes: int,
    adapters: Adapters | None,
) -> Tensor:  # fmt: skip
    """Checks and dispatches; layers: how the names of the weight and bias of each begin, those of w1 and of w2."""
    hidden = check_glu(where, "x", x, activation)
    adapted = adapters is not None and any(adapters)
    if packed and not adapted and _takes_one_row(x, w1, w2, b1, b2):  # first, since decoding waits for the host
        return _one_row(x, w1, w2, b1, b2, activation)
    each = zip(w1, b1, layers, strict=False)
    operands = [linear_operands(where, "x", x, hidden, weight, bias, layer) for weight, bias, layer in each]
    w1, b1 = [weight for weight, _ in operands], [bias for _, bias in operands]
    inner = sum(operator.index(w.shape[0]) for w in w1)
    if inner == 0 or (packed and inner % 2) or workspace_bytes <= 0:
        raise InputError(
            f"{where}: {layers[0]}weight has {w1[0].shape[0]} rows and workspace_bytes is {workspace_bytes}; expected "
            f"{'an even number of' if packed and len(w1) == 1 else 'some'} rows and a positive number of bytes."
        )
    w2, b2 = linear_operands(where, "x", x, inner // 2 if packed else inner, w2, b2, layers[-1])
    x = x.to(autocast_dtype(x) or x.dtype)
    triton = use_triton(x)
    run: Any = functools.partial(_apply if triton else _reference, packed=packed, activation=activation)
    if packed and not adapted and _are_quantized(x, w1, w2, b1, b2):
        return _one_quantized_row(x, w1, w2, b1, b2, activation)
    if adapted or any(isinstance(w, LowBitWeight) for w in (*w1, w2)):
        run = lora_mlp if triton else lora_mlp_reference
        adapters = [None] * len(layers) if adapters is None else adapters
        run = functools.partial(run, adapters=adapters, packed=packed, activation=activation)
    if recompute and triton and not torch.compiler.is_compiling():
        tokens, row_bytes = x.numel() // hidden, inner * x.element_size()
        one = tokens * row_bytes <= 2 * workspace_bytes  # sums over two chunks cost more than that memory is worth
        return run(x, w1, w2, b1, b2, rows=tokens if one else chunk_rows(tokens, row_bytes, workspace_bytes))
    if recompute and torch.is_grad_enabled():
        return checkpoint(run, x, w1, w2, b1, b2, use_reentrant=False, preserve_rng_state=False)
    return run(x, w1, w2, b1, b2)


def _takes_one_row(x: Tensor, w1: Any, w2: Any, b1: Any, b2: Tensor | None) -> bool:
    """True if gemv.py runs the gated MLP: of a single row, without gradients, and with operands that fit."""
    if not use_gemv(x, w1, b1):
        return False
    inner = sum(w.shape[0] for w in w1)
    return inner % 2 == 0 and use_gemv(x, (w2,), (b2,), columns=inner // 2)


def _one_row(x: Tensor, w1: Any, w2: Any, b1: Any, b2: Tensor | None, activation: str) -> Tensor:
    """`gated_mlp` where `_takes_one_row`."""
    if not use_triton(x):
        layer = as_one_layer(w1, b1)
        z = map(gemv, (x, x), w1, b1) if layer is None else (gemv(x, *layer),)
        return gemv(glu_reference(*z, activation=activation), w2, b2)
    if len(w1) == 1:
        w1, b1 = w1[0].chunk(2), (None, None) if b1[0] is None else b1[0].chunk(2)
    return gemv(gemv_glu(x, *w1, *b1, activation=activation), w2, b2)


def _are_quantized(x: Tensor, w1: Any, w2: Weight, b1: Any, b2: Tensor | None) -> bool:
    """True if quantized.py has kernels for the MLP of a single row, and no gradient is wanted."""
    if not (use_quantized(x, w1, b1, max_rows=1) and use_quantized(x, (w2,), (b2,), max_rows=1, columns=w2.shape[1])):
        return False
    if len({w.kind for w in w1}) > 1:
        return False
    return not (torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, *b1, b2)))


def _one_quantized_row(x: Tensor, w1: Any, w2: Any, b1: Any, b2: Tensor | None, activation: str) -> Tensor:
    if len(w1) == 1:
        w1, b1 = w1[0].halves(), (None, None) if b1[0] is None else b1[0].chunk(2)
    h = quantized_glu(x, *w1, *b1, activation=activation)
    return quantized_linear(h.view(1, -1), [w2], [b2]).view(*x.shape[:-1], -1)


def gated_mlp(
    x: Tensor, gate_up_weight: Weight | Sequence[Weight], down_weight: Weight,
    gate_up_bias: Tensor | Sequence[Tensor | None] | None = None, down_bias: Tensor | None = None, *,
    activation: str = "silu", recompute: bool = False, workspace_bytes: int = 512 * 2**20,
    adapters: Adapters | None = None,
) -> Tensor:  # fmt: skip
    """F.linear(glu(F.linear(x, gate_up_weight, gate_up_bias)), down_weight, down_bias).

    x: [..., H]; gate_up_weight: [2F, H], rows [gate | up], or the two weights (gate [F, H], up [F, H]); down_weight:
    [N, F]; gate_up_bias: [2F] or None, or for two weights (gate [F] or None, up [F] or None); down_bias: [N] or None;
    activation: as in `glu`. A weight may be a `LowBitWeight`; then all weights and biases are frozen, or torch runs it.
    recompute: the backward recomputes gate_up = [gate | up] from x, a chunk of tokens at a time, and saves none of it.
        The gradients of the weights are summed over several chunks in fp32, and differ by rounding from those of one.
    workspace_bytes: what gate_up of a chunk takes at most (of 128 tokens at least), or of the only chunk twice that; h
        takes half as much beside it.
    adapters: to each weight of gate and up, and to that of down, an `Adapter` or None; see lora.py.
    Returns [..., N] of x's dtype; under torch.autocast of the autocast dtype, to which all inputs are cast as F.linear
    would cast them.
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
    return _mlp(
        "gated_mlp", layers, True, x, weights, down_weight, biases, down_bias, activation, recompute, workspace_bytes,
        adapters,
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
    return _mlp(
        "mlp", ("fc1_", "fc2_"), False, x, (fc1_weight,), fc2_weight, (fc1_bias,), fc2_bias, activation, recompute,
        workspace_bytes, adapters,
    )  # fmt: skip
