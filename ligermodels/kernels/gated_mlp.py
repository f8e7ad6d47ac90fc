"""The feed-forward unit as one op: two linear layers and what stands between them, gated or not.

    gated_mlp:  z = x Wgu^T + bgu = [gate | up]     h = act(gate) * up     y = h Wd^T + bd
    mlp:        z = x W1^T + b1                     h = act(z)             y = h W2^T + b2

What differs from the layers one by one:
- It keeps x and z, never h: the kernels of glu.py make it again from z as they read z for the gradient. Where x is a
  norm's output, it keeps what the norm keeps anyway, and makes x again: then of the whole unit z alone is held.
- recompute=True keeps x alone, or nothing at all beside the norm. Forward and backward then walk over tiles of tokens,
  and z and h exist for one tile at a time: for long texts the unit needs a fixed amount of memory.
- In the backward the gradient of z is written over z, and dx over an x that was made again. A kept z is left as it is
  where someone may read it once more: under retain_graph, and in a CUDA graph, which may be replayed.
- Nothing is computed or kept for a frozen weight or input.
- Under activation checkpointing the second run of a region that ends with this op ends with what it keeps: with z, or
  with recompute=True before z.

Bytes per token at 2-byte dtypes for the intermediate size I, gated (plain): 4 I (2 I) of z are kept, and none with
recompute=True, for one more product with the first weight, two ninths (a sixth) of the unit's work. Element-wise: as in
glu.py.

Source: as glu.py. Kept tensors: Chen et al. 2016, https://arxiv.org/abs/1604.06174.
"""

import functools
import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ligermodels.errors import InputError
from ligermodels.kernels._chunks import chunk_rows
from ligermodels.kernels._gradients import accumulate, give_gradient, weight_gradient
from ligermodels.kernels._recipes import read_last, recipe_of
from ligermodels.kernels._triton import accumulator, once_differentiable, use_triton
from ligermodels.kernels.activation import activate_reference
from ligermodels.kernels.glu import check_unit, glu_reference, linear_operands, product, unit, unit_linear_backward


def gated_mlp_reference(
    x: Tensor, gate_up_weight: Tensor, down_weight: Tensor, gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None, *, activation: str = "silu",
) -> Tensor:  # fmt: skip
    gate_up = F.linear(x, gate_up_weight, gate_up_bias)
    return F.linear(glu_reference(gate_up, activation=activation), down_weight, down_bias)


def mlp_reference(
    x: Tensor, fc1_weight: Tensor, fc2_weight: Tensor, fc1_bias: Tensor | None = None,
    fc2_bias: Tensor | None = None, *, activation: str,
) -> Tensor:  # fmt: skip
    h = activate_reference(F.linear(x, fc1_weight, fc1_bias), activation=activation)
    return F.linear(h, fc2_weight, fc2_bias)


def _tiles(tokens: int, rows: int | None) -> list[slice]:
    """All tokens at once, or `rows` at a time."""
    return [slice(None)] if rows is None or rows >= tokens else [slice(i, i + rows) for i in range(0, tokens, rows)]


def _add(total: Tensor | None, weight: Tensor, dy: Tensor, x: Tensor, several: bool) -> Tensor | None:
    """The gradient of weight, dy^T x; of several tiles their sum in fp32, total, to which this adds one."""
    if not several:
        return weight_gradient(weight, dy, x)
    first = total is None
    if total is None:
        wide = torch.promote_types(weight.dtype, torch.float32)
        total = torch.empty(weight.shape, dtype=wide, device=weight.device)
    accumulate(total, dy, x, first)
    return total


class _MLP(torch.autograd.Function):
    """x: [..., H]; w1: [F, H], or [2F, H] if packed; w2: [N, F]; z: x w1^T + b1 -> y [..., N].

    recipe: of x, or None. rows: of a tile, for which z is made where it is read; None: z is given, and kept.
    Run eagerly it leaves y to `_apply`, which writes it once all is saved: see UnitLinear in glu.py.
    """

    @staticmethod
    def forward(ctx, x, w1, w2, b1, b2, z, recipe, packed, activation, rows):
        need_x, need_w1, need_w2, need_b1, *_ = ctx.needs_input_grad
        reads_z = need_x or need_w1 or need_w2 or need_b1
        make_x, inputs = (None, (x,)) if recipe is None else recipe
        if not (need_w1 or (reads_z and z is None)):
            make_x, inputs = None, ()
        ctx.save_for_backward(w1, w2, b1, z if reads_z else None, *inputs)
        ctx.options = make_x, packed, activation, rows
        if torch.compiler.is_compiling():
            return F.linear(unit(z, None, packed, activation), w2, b2)
        return x.new_empty((*x.shape[:-1], w2.shape[0]))

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        w1, w2, b1, kept, *inputs = ctx.saved_tensors
        make_x, packed, activation, rows = ctx.options
        need_x, need_w1, need_w2, need_b1, need_b2, *_ = ctx.needs_input_grad
        need_z = need_x or need_w1 or need_b1
        shape, dy = (*dy.shape[:-1], w1.shape[1]), dy.reshape(-1, w2.shape[0])
        tiles = _tiles(len(dy), rows) if need_z or need_w2 else []
        several = len(tiles) > 1
        over = need_z and (rows is not None or (kept.is_contiguous() and read_last(kept)))
        x: Any = None
        dx, dw1, dw2, db1, room = x, x, x, x, x
        if inputs:
            x = (inputs[0] if make_x is None else make_x(*inputs)).reshape(-1, w1.shape[1])
        if need_x and (several or make_x is not None):
            dx = x.new_empty(x.shape) if make_x is None else x
        if tiles and rows is not None:
            room = w1.new_empty(min(rows, len(dy)), w1.shape[0])
        for tile in tiles:
            dyt = dy[tile]
            z = kept.reshape(-1, w1.shape[0]) if room is None else product(x[tile], w1, b1, out=room[: len(dyt)])
            dz, h = unit_linear_backward(dyt, z, w2, packed, activation, need_x=need_z, need_h=need_w2, over=over)
            if need_w2:
                dw2 = _add(dw2, w2, dyt, h, several)
            del h
            if need_w1:
                dw1 = _add(dw1, w1, dz, x[tile], several)
            if need_b1:
                part = dz.sum(0, dtype=accumulator(dz.dtype) if several else None)
                db1 = part if db1 is None else db1 + part
            if need_x:
                part = torch.mm(dz, w1, out=None if dx is None else dx[tile])
                dx = part if dx is None else dx
        if several:
            del room, z, dz  # before the sums are rounded, one behind the other
            dw1 = None if dw1 is None else give_gradient(w1, dw1)
            dw2 = None if dw2 is None else give_gradient(w2, dw2)
            db1 = None if db1 is None else db1.to(b1.dtype)
        db2 = dy.sum(0) if need_b2 else None
        return None if dx is None else dx.view(shape), dw1, dw2, db1, db2, None, None, None, None, None


def _apply(
    x: Tensor, w1: Tensor, w2: Tensor, b1: Tensor | None, b2: Tensor | None, *, packed: bool, activation: str,
    rows: int | None = None,
) -> Tensor:  # fmt: skip
    with torch.no_grad():
        z = F.linear(x, w1, b1) if rows is None else None
    y = _MLP.apply(x, w1, w2, b1, b2, z, recipe_of(x), packed, activation, rows)
    if not torch.compiler.is_compiling():
        with torch.no_grad():
            _write(y.detach().view(-1, w2.shape[0]), x, w1, w2, b1, b2, z, packed, activation, rows)
    return y


def _write(
    y: Tensor, x: Tensor, w1: Tensor, w2: Tensor, b1: Tensor | None, b2: Tensor | None, z: Tensor | None, packed: bool,
    activation: str, rows: int | None,
) -> None:  # fmt: skip
    if z is not None:
        product(unit(z.view(-1, w1.shape[0]), None, packed, activation), w2, b2, out=y)
        return
    x = x.reshape(-1, w1.shape[1])
    for tile in _tiles(len(x), rows):
        product(unit(product(x[tile], w1, b1), None, packed, activation), w2, b2, out=y[tile])


def _mlp(
    where: str, reference: Callable[..., Tensor], layers: tuple[str, str], packed: bool, x: Tensor, w1: Tensor,
    w2: Tensor, b1: Tensor | None, b2: Tensor | None, activation: str, recompute: bool, workspace_bytes: int,
) -> Tensor:  # fmt: skip
    """Checks and dispatches; layers: how the names of each one's weight and bias begin."""
    hidden = check_unit(where, "x", x, activation)
    w1, b1 = linear_operands(where, "x", x, hidden, w1, b1, layers[0])
    inner = operator.index(w1.shape[0])
    if inner == 0 or (packed and inner % 2) or workspace_bytes <= 0:
        raise InputError(
            f"{where}: {layers[0]}weight has {inner} rows and workspace_bytes is {workspace_bytes}; expected "
            + ("an even number of rows, [gate | up]," if packed else "rows")
            + " and a positive number of bytes."
        )
    w2, b2 = linear_operands(where, "x", x, inner // 2 if packed else inner, w2, b2, layers[1])
    x = x.to(w1.dtype)  # under autocast, as F.linear would
    triton, run = use_triton(x), functools.partial(reference, activation=activation)
    if triton:
        run = functools.partial(_apply, packed=packed, activation=activation)
    if recompute and triton and not torch.compiler.is_compiling():
        tokens, row_bytes = x.numel() // hidden, inner * x.element_size()
        one = tokens * row_bytes <= 2 * workspace_bytes  # sums over two tiles cost more than that memory is worth
        return run(x, w1, w2, b1, b2, rows=tokens if one else chunk_rows(tokens, row_bytes, workspace_bytes))
    if recompute and torch.is_grad_enabled():
        return checkpoint(run, x, w1, w2, b1, b2, use_reentrant=False, preserve_rng_state=False)
    return run(x, w1, w2, b1, b2)


def gated_mlp(
    x: Tensor, gate_up_weight: Tensor, down_weight: Tensor, gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None, *, activation: str = "silu", recompute: bool = False,
    workspace_bytes: int = 512 * 2**20,
) -> Tensor:  # fmt: skip
    """F.linear(glu(F.linear(x, gate_up_weight, gate_up_bias)), down_weight, down_bias).

    x: [..., H]; gate_up_weight: [2F, H], rows [gate | up]; down_weight: [N, F]; gate_up_bias: [2F] or None; down_bias:
    [N] or None; activation: as in `glu`.
    recompute: the backward makes gate_up = [gate | up] of x once more instead of keeping it, for a tile of tokens at a
        time. The gradients of the weights are summed over several tiles in fp32, so that they differ by rounding from
        those of one tile.
    workspace_bytes: what gate_up of a tile takes at most (of 128 tokens at least), or of the only tile twice that; h
        takes half as much beside it.
    Returns [..., N] of x's dtype; under torch.autocast of the autocast dtype, to which all inputs are cast as F.linear
    would cast them.
    Raises InputError for shapes, dtypes or devices that do not fit.
    """
    if not isinstance(gate_up_weight, Tensor):
        gate_up_weight = torch.cat(list(gate_up_weight))
        gate_up_bias = None if gate_up_bias is None or gate_up_bias[0] is None else torch.cat(list(gate_up_bias))
    return _mlp(
        "gated_mlp", gated_mlp_reference, ("gate_up_", "down_"), True,
        x, gate_up_weight, down_weight, gate_up_bias, down_bias, activation, recompute, workspace_bytes,
    )  # fmt: skip


def mlp(
    x: Tensor, fc1_weight: Tensor, fc2_weight: Tensor, fc1_bias: Tensor | None = None,
    fc2_bias: Tensor | None = None, *, activation: str, recompute: bool = False, workspace_bytes: int = 512 * 2**20,
) -> Tensor:  # fmt: skip
    """F.linear(activate(F.linear(x, fc1_weight, fc1_bias)), fc2_weight, fc2_bias): `gated_mlp` without a gate.

    x: [..., H]; fc1_weight: [F, H]; fc2_weight: [N, F]; fc1_bias: [F] or None; fc2_bias: [N] or None; activation: as in
    `activate`; recompute and workspace_bytes as in `gated_mlp`, of fc1's output.
    Returns [..., N], and raises InputError, as `gated_mlp` does.
    """
    return _mlp(
        "mlp", mlp_reference, ("fc1_", "fc2_"), False,
        x, fc1_weight, fc2_weight, fc1_bias, fc2_bias, activation, recompute, workspace_bytes,
    )  # fmt: skip
