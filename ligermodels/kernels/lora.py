"""Frozen linear layers with LoRA adapters as one op: for all layers of one input, and for a whole MLP.

    y_i = x W_i^T + b_i + s_i (x A_i^T) B_i^T        for layers i side by side in one buffer, as in linear.py

What differs from separate modules:
- One matmul for all W_i (see linear.py) and one for all A_i. The matmul with B_i adds to its columns of y, scaled, in
  its epilogue, so that no other tensor of y's size is written.
- W_i and b_i are frozen and get no gradient. The backward needs x for A alone; if a norm computed x, the norm's inputs
  are saved instead (`_recompute`). H = x A^T, [T, r], is saved too.
- The MLP saves what `gated_mlp` saves: x, or the inputs of the norm, and gate and up unless they are recomputed.
- W_i may be a `LowBitWeight`: saved as it is, and dequantised for each matmul, or once for all chunks of an MLP. With
  few rows, the kernels of quantized.py read int8, fp8 and int4 directly.
- A and B may be fp32 beside 16-bit layers: they are cast once per use, and their gradients are summed in fp32.

Where a layer is not frozen, under torch.compile and in transforms, the PyTorch formula runs.

Source: Hu et al. 2021, https://arxiv.org/abs/2106.09685.
"""

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ligermodels.kernels._chunks import slices
from ligermodels.kernels._gradients import accumulate
from ligermodels.kernels._recompute import handle_of, may_overwrite, recomputed
from ligermodels.kernels._triton import accumulator, once_differentiable
from ligermodels.kernels.activation import activate
from ligermodels.kernels.glu import glu, glu_backward, glu_forward
from ligermodels.kernels.linear import input_gradient, linears, matmul
from ligermodels.kernels.low_bit import dequantized, flatten_weights, frozen_linear, unflatten_weights
from ligermodels.kernels.operand import LinearOperand, LowBitWeight, Weight, check, choose, kernel_of
from ligermodels.kernels.quantized import quantized_linear


class _Branch:
    """The adapters of layers side by side, in x's dtype: what they add to y, and the sums of their gradients.

    weights: of the layers, [N_i, K]; a, b, scales: of each layer, or None where it has no adapter.
    """

    def __init__(self, weights: Sequence[Weight], a: Sequence[Any], b: Sequence[Any], scales: Sequence[Any], x: Tensor):
        self.given = [None if one is None else (one, b[i]) for i, one in enumerate(a)]
        present = [one.detach() for one in a if one is not None]
        self.a: Any = torch.cat(present).to(x.dtype) if present else None  # [sum r_i, K]
        ends = list(itertools.accumulate((w.shape[0] for w in weights), initial=0))
        ranks = list(itertools.accumulate((0 if one is None else one.shape[0] for one in a), initial=0))
        self.parts = [
            (slice(ends[i], ends[i + 1]), slice(ranks[i], ranks[i + 1]), b[i].detach().to(x.dtype), scales[i])
            for i, one in enumerate(a)
            if one is not None
        ]
        self._da: Tensor | None = None
        self._db: list[Tensor] = []

    def add_to(self, y: Tensor, x: Tensor) -> Tensor | None:
        """Adds the adapters' outputs for x [T, K] to y [T, sum N_i]. Returns H = x A^T."""
        if self.a is None:
            return None
        h = x @ self.a.t()
        for columns, ranks, b, scale in self.parts:
            part = y[:, columns]
            torch.addmm(part, h[:, ranks], b.t(), alpha=scale, out=part)
        return h

    def inner_gradient(self, dy: Tensor) -> Tensor | None:
        """dH [T, sum r_i] from dy [T, sum N_i]."""
        if self.a is None:
            return None
        dh = dy.new_empty(dy.shape[0], self.a.shape[0])
        for columns, ranks, b, scale in self.parts:
            part = dh[:, ranks]
            torch.addmm(part, dy[:, columns], b, beta=0, alpha=scale, out=part)
        return dh

    def add_input_gradient(self, dx: Tensor, dh: Tensor | None) -> None:
        if dh is not None:
            torch.addmm(dx, dh, self.a, out=dx)

    def add_gradients(self, dy: Tensor, h: Tensor | None, dh: Tensor | None, x: Tensor) -> None:
        """Adds the gradients of A and B for some tokens; x [T, K]; h = x A^T, or None to compute it here."""
        if self.a is None or dh is None:
            return
        h = x @ self.a.t() if h is None else h
        first, dtype = self._da is None, accumulator(x.dtype)
        if self._da is None:
            self._da = x.new_empty(self.a.shape, dtype=dtype)
            self._db = [x.new_empty(b.shape, dtype=dtype) for _, _, b, _ in self.parts]
        accumulate(self._da, dh, x, first)
        for db, (columns, ranks, _, _) in zip(self._db, self.parts, strict=True):
            accumulate(db, dy[:, columns], h[:, ranks], first)

    def take(self, need_a: Sequence[bool], need_b: Sequence[bool]) -> tuple[list[Tensor | None], list[Tensor | None]]:
        """The gradients of each A and of each B, in their dtypes, or None."""
        da: list[Tensor | None] = [None] * len(self.given)
        db = list(da)
        at = 0
        for i, pair in enumerate(self.given):
            if pair is None or self._da is None:
                continue
            _, ranks, _, scale = self.parts[at]
            da[i] = self._da[ranks].to(pair[0].dtype) if need_a[i] else None
            db[i] = self._db[at].mul_(scale).to(pair[1].dtype) if need_b[i] else None
            at += 1
        return da, db


def lora_linear_reference(x: Tensor, operands: Sequence[LinearOperand]) -> Tensor:
    found = []
    for weight, bias, adapter in operands:
        y = (frozen_linear if isinstance(weight, LowBitWeight) else F.linear)(x, weight, bias)
        if adapter is not None:
            h = F.linear(x, adapter.a.to(x.dtype))
            y = y + adapter.scale * F.linear(h, adapter.b.to(h.dtype))
        found.append(y)
    return found[0] if len(found) == 1 else torch.cat(found, -1)


class _LoRALinear(torch.autograd.Function):
    """x: [..., K], of two dims or more; handle: x's, or None; weights [N_i, K], biases, scales: of each layer;
    factors: the A of each layer, then the B of each, or None -> [..., sum N_i]."""

    @staticmethod
    def forward(ctx, x, handle, weights, biases, scales, *factors):
        count = len(weights)
        y, h = _forward(x, weights, biases, factors[:count], factors[count:], scales)
        ctx.function, made_of = (None, (x,)) if handle is None else handle
        trains = any(ctx.needs_input_grad[5:])
        # The weights themselves, not their joint view: FSDP may move them before the backward.
        tensors, ctx.weights = flatten_weights(weights)
        ctx.scales = scales
        ctx.save_for_backward(*factors, *tensors, h if trains else None, *(made_of if trains else ()))
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        count, saved = len(ctx.scales), iter(ctx.saved_tensors)
        a, b = _next(saved, count), _next(saved, count)
        weights = unflatten_weights(saved, ctx.weights)
        h, *made_of = saved
        need_x, _, _, _, _, *needs = ctx.needs_input_grad
        rows = dy.flatten(0, -2)
        branch = _Branch(weights, a, b, ctx.scales, rows)
        dh, dx = branch.inner_gradient(rows), None
        if made_of:  # before dx, so that x and dx are not in memory together
            branch.add_gradients(rows, h, dh, recomputed(ctx.function, made_of).flatten(0, -2))
        if need_x:
            dx = _input_gradient(rows, weights)
            branch.add_input_gradient(dx, dh)
            dx = dx.view(*dy.shape[:-1], weights[0].shape[1])
        da, db = branch.take(needs[:count], needs[count:])
        return dx, None, None, None, None, *da, *db


def _next(tensors: Iterator[Any], count: int) -> list[Any]:
    return list(itertools.islice(tensors, count))


def _matmul(x: Tensor, weights: Sequence[Weight], biases: Sequence[Tensor | None], out: Tensor | None = None) -> Tensor:
    """`matmul` with weights that may be LowBitWeights."""
    if kernel_of(x, weights, biases) == "bits":
        return quantized_linear(x, weights, biases, out)  # type: ignore[arg-type]
    with dequantized(weights, x.dtype) as tensors:
        return matmul(x, tensors, biases, out)


def _input_gradient(dy: Tensor, weights: Sequence[Weight], out: Tensor | None = None) -> Tensor:
    """`input_gradient` with weights that may be LowBitWeights."""
    with dequantized(weights, dy.dtype) as tensors:
        return input_gradient(dy, tensors, out)


def _forward(x, weights, biases, a, b, scales) -> tuple[Tensor, Tensor | None]:
    """y [..., sum N_i] and H [T, sum r_i], without autograd."""
    rows = x.reshape(-1, x.shape[-1])
    y = _matmul(rows, weights, biases)
    h = _Branch(weights, a, b, scales, x).add_to(y, rows)
    return y.view(*x.shape[:-1], y.shape[1]), h


def _split(operands: Sequence[LinearOperand]) -> tuple[tuple[Any, ...], ...]:
    """(weights, biases, A of each layer, B of each, scale of each), the last three None where there is no adapter."""
    return tuple(zip(*((w, b, *(adapter or (None, None, None))) for w, b, adapter in operands), strict=True))


def lora_linear(x: Tensor, operands: Sequence[LinearOperand]) -> Tensor:
    """Linear layers of one input side by side: [..., K] -> [..., sum N_i], contiguous.

    The caller may overwrite the result of several. Raises InputError for operands that do not fit x.
    """
    if not any(operand.is_frozen for operand in operands):
        return linears(x, operands)
    how = choose(x, operands)
    if how == "formula":
        return lora_linear_reference(x, operands)
    weights, biases, a, b, scales = _split([check("linear", "x", x, x.shape[-1], one) for one in operands])
    if how == "frozen":
        return _LoRALinear.apply(x, handle_of(x), weights, biases, scales, *a, *b)
    return _forward(x, weights, biases, a, b, scales)[0]


# ---- The MLP ----


def lora_mlp_reference(
    x: Tensor, first: Sequence[LinearOperand], last: LinearOperand, *, gated: bool, activation: str
) -> Tensor:
    h = (glu if gated else activate)(lora_linear_reference(x, first), activation=activation)
    return lora_linear_reference(h, [last])


class _LoRAMLP(torch.autograd.Function):
    """`_MLP` of gated_mlp.py for frozen layers with adapters.

    weights, biases, scales: of the layers w1, then of w2; factors: the A of each layer, then the B of each, or None.
    H is recomputed rather than saved: the gradients of A need x and h anyway, and h exists only after the point where
    activation checkpointing ends its second run.
    """

    @staticmethod
    def forward(ctx, x, z, handle, weights, biases, scales, gated, activation, rows, *factors):
        need_first, *_ = _needs(ctx.needs_input_grad, len(weights))
        make_x, inputs = (None, (x,)) if handle is None else handle
        if not (need_first or z is None):
            make_x, inputs = None, ()
        tensors, ctx.weights = flatten_weights(weights)
        ctx.save_for_backward(z, *factors, *biases, *tensors, *inputs)
        ctx.options = make_x, gated, activation, rows, scales
        return x.new_empty((*x.shape[:-1], weights[-1].shape[0]))

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        make_x, gated, activation, rows, scales = ctx.options
        count, tensors = len(scales), iter(ctx.saved_tensors)
        saved = next(tensors)
        a, b, biases = _next(tensors, count), _next(tensors, count), _next(tensors, count)
        weights, inputs = unflatten_weights(tensors, ctx.weights), list(tensors)
        need_x, (need_first, need_last, need_a, need_b) = ctx.needs_input_grad[0], _needs(ctx.needs_input_grad, count)
        hidden, width = weights[0].shape[1], sum(w.shape[0] for w in weights[:-1])
        shape, dy = (*dy.shape[:-1], hidden), dy.reshape(-1, dy.shape[-1])
        first = _Branch(weights[:-1], a[:-1], b[:-1], scales[:-1], dy)
        last = _Branch(weights[-1:], a[-1:], b[-1:], scales[-1:], dy)
        need_z = need_x or need_first
        chunks = slices(len(dy), rows)
        overwrite = need_z and (rows is not None or (saved.is_contiguous() and may_overwrite(saved)))
        x: Any = None
        dx, dz, workspace = x, x, x
        if inputs:
            x = (inputs[0] if make_x is None else make_x(*inputs)).reshape(-1, hidden)
        if need_x:  # dx is written over a recomputed x: of each chunk, x is read before dx is written
            dx = dy.new_empty(len(dy), hidden) if make_x is None else x
        if chunks and rows is not None:
            workspace = dy.new_empty(min(rows, len(dy)), width)
        with _for_chunks(weights, dy.dtype, chunks) as (*w1, w2):
            for chunk in chunks:
                dy_chunk = dy[chunk]
                z, inner = saved, None
                if workspace is None:
                    z = saved.reshape(-1, width)
                else:
                    z = _matmul(x[chunk], w1, biases[:-1], out=workspace[: len(dy_chunk)])
                    inner = first.add_to(z, x[chunk])
                d_inner = last.inner_gradient(dy_chunk)
                if need_z:
                    h = _input_gradient(dy_chunk, [w2])  # dh, until the kernel leaves h in its place
                    last.add_input_gradient(h, d_inner)
                    dz, _ = glu_backward(h, z, None, gated, activation, emit=need_last, overwrite=overwrite)
                else:
                    h = glu_forward(z, None, gated, activation)
                if need_last:
                    last.add_gradients(dy_chunk, None, d_inner, h)
                del h
                if not need_z:
                    continue
                d_inner = first.inner_gradient(dz)
                if need_first:
                    first.add_gradients(dz, inner, d_inner, x[chunk])
                if need_x:
                    _input_gradient(dz, w1, out=dx[chunk])
                    first.add_input_gradient(dx[chunk], d_inner)
        da, db = first.take(need_a[:-1], need_b[:-1])
        da2, db2 = last.take(need_a[-1:], need_b[-1:])
        dx = None if dx is None else dx.view(shape)
        return dx, *[None] * 8, *da, *da2, *db, *db2


def _needs(needs: tuple[bool, ...], count: int) -> tuple[bool, bool, tuple[bool, ...], tuple[bool, ...]]:
    """ctx.needs_input_grad of `_LoRAMLP`: any of the first layers', any of the last's, each A's, each B's."""
    a, b = needs[9 : 9 + count], needs[9 + count :]
    return any((*a[:-1], *b[:-1])), a[-1] or b[-1], a, b


def _for_chunks(
    weights: Sequence[Weight], dtype: torch.dtype, chunks: Sequence[slice]
) -> contextlib.AbstractContextManager[Any]:
    """`dequantized` for all chunks of an MLP, where there are several.

    Dequantising costs 2.5 bytes per weight, a matmul of T tokens 2 T operations per weight: on an H200 dequantising
    takes 200 / T of the matmul's time, 2 % for the default chunks of 9000 tokens of an 8B, and more than 100 % for 128
    tokens. The weights of such an MLP take 352 MB in 16 bits, less than the workspaces. With a single chunk each weight
    is dequantised where it is read, into the memory of the previous one.
    """
    return dequantized(weights, dtype) if len(chunks) > 1 else contextlib.nullcontext(weights)


def lora_mlp(
    x: Tensor, first: Sequence[LinearOperand], last: LinearOperand, *, gated: bool, activation: str,
    rows: int | None = None,
) -> Tensor:  # fmt: skip
    """The MLP of frozen layers, on the Triton kernels. rows: as of `_MLP` in gated_mlp.py."""
    weights, biases, a, b, scales = _split([*first, last])
    b1, b2, w2 = biases[:-1], biases[-1], weights[-1]
    with torch.no_grad():
        z = _forward(x, weights[:-1], b1, a[:-1], b[:-1], scales[:-1])[0] if rows is None else None
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, *a, *b)):
        y = _LoRAMLP.apply(x, z, handle_of(x), weights, biases, scales, gated, activation, rows, *a, *b)
    else:
        y = x.new_empty((*x.shape[:-1], w2.shape[0]))
    out, x = y.detach().view(-1, w2.shape[0]), x.reshape(-1, x.shape[-1])
    chunks = slices(len(x), rows)
    # Written after everything is saved: see GLULinear in glu.py.
    with torch.no_grad(), _for_chunks(weights, x.dtype, chunks) as (*w1, w2):
        inner = _Branch(w1, a[:-1], b[:-1], scales[:-1], x)
        outer = _Branch([w2], a[-1:], b[-1:], scales[-1:], x)
        for chunk in chunks:
            if z is None:
                z_chunk = _matmul(x[chunk], w1, b1)
                inner.add_to(z_chunk, x[chunk])
            else:
                z_chunk = z.view(-1, z.shape[-1])
            h = glu_forward(z_chunk, None, gated, activation)
            outer.add_to(_matmul(h, [w2], [b2], out=out[chunk]), h)
    return y
