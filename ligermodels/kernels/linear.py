"""Linear layers of one input as one op, with their outputs side by side in one buffer.

    y = [y_0 | y_1 | ...]        y_i = x W_i^T + b_i + s_i (x A_i^T) B_i^T

What differs from separate layers and torch.cat:
- Weights that are `joint` are read as one matrix: one matmul for y, one for dx, one for all weight gradients, which are
  views of one buffer. With other weights, each matmul writes its own columns of y, and adds to dx in its epilogue.
- W_i may be a `LowBitWeight`: saved as it is, and dequantised for each matmul (low_bit.py). With few rows, the kernels
  of quantized.py read int8, fp8 and int4 directly.
- A layer may have a LoRA adapter (lora.py): one matmul for all A_i; H = x A^T, [T, r], is saved.
- x is saved only where a weight or an adapter is trained. If a norm computed x, the op saves the norm's inputs instead,
  and recomputes x in the backward (`_recompute`): 2 H bytes per token less in 16 bits, for one more run of the norm's
  kernel.
- Gradients are added to each weight.grad in place where the user asked for it (`_gradients`).

Both ops are F.linear where there is nothing to gain, and `gemv` for a single row without a gradient: see `choose` in
operand.py.
"""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from ligermodels.errors import InputError
from ligermodels.kernels._early import listener_of
from ligermodels.kernels._gradients import accumulate, accumulate_grad, target, weight_gradient
from ligermodels.kernels._recompute import Handle, handle_of, recomputed
from ligermodels.kernels._triton import accumulator, once_differentiable
from ligermodels.kernels.gemv import gemv
from ligermodels.kernels.joint import as_one, as_one_layer, joint, rows_of
from ligermodels.kernels.lora import Branch
from ligermodels.kernels.low_bit import dequantized, flatten_weights, frozen_linear, unflatten_weights
from ligermodels.kernels.operand import LinearOperand, LowBitWeight, Weight, check, choose, has_bits, kernel_of
from ligermodels.kernels.quantized import quantized_linear


def linears_reference(x: Tensor, operands: Sequence[LinearOperand]) -> Tensor:
    """The layers one after the other, by PyTorch's own functions, which autograd, autocast and transforms see."""
    found = []
    for weight, bias, adapter in operands:
        y = (frozen_linear if isinstance(weight, LowBitWeight) else F.linear)(x, weight, bias)
        if adapter is not None:
            h = F.linear(x, adapter.a.to(x.dtype))
            y = y + adapter.scale * F.linear(h, adapter.b.to(h.dtype))
        found.append(y)
    return found[0] if len(found) == 1 else torch.cat(found, -1)


# ---- Without adapters and autograd ----


def matmul(
    x: Tensor, weights: Sequence[Weight], biases: Sequence[Tensor | None], out: Tensor | None = None, kernel: str = ""
) -> Tensor:
    """Linear layers of x [..., K], side by side: [..., sum N_i], contiguous; without autograd.

    out: [T, sum N_i] for x [T, K], where the result is written. kernel: what `kernel_of` says, where the caller knows.
    """
    kernel = kernel or kernel_of(x, weights, biases)
    if kernel == "bits":
        rows = quantized_linear(x.reshape(-1, x.shape[-1]), weights, biases, out)  # type: ignore[arg-type]
        return rows.view(*x.shape[:-1], rows.shape[1])
    if has_bits(weights):
        with dequantized(weights, x.dtype) as tensors:
            return matmul(x, tensors, biases, out)
    run = gemv if kernel == "gemv" else _by_torch
    whole = as_one_layer(weights, biases)  # type: ignore[arg-type]
    if whole is not None:
        return run(x, *whole, out)
    y = x.new_empty(*x.shape[:-1], sum(rows_of(weights))) if out is None else out
    x, parts = x.reshape(-1, x.shape[-1]), y.view(-1, y.shape[-1]).split_with_sizes(rows_of(weights), 1)
    for weight, bias, columns in zip(weights, biases, parts, strict=True):
        run(x, weight, bias, columns)  # type: ignore[arg-type]
    return y


def _by_torch(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor | None) -> Tensor:
    if out is None:
        return F.linear(x, weight, bias)
    return torch.mm(x, weight.t(), out=out) if bias is None else torch.addmm(bias, x, weight.t(), out=out)


def input_gradient(dy: Tensor, weights: Sequence[Weight], out: Tensor | None = None) -> Tensor:
    """dx [T, K] from dy [T, sum N_i], into `out` where given; without autograd."""
    if has_bits(weights):
        with dequantized(weights, dy.dtype) as tensors:
            return input_gradient(dy, tensors, out)
    whole = as_one(weights)  # type: ignore[arg-type]
    if whole is not None:
        return torch.mm(dy, whole, out=out)
    parts = dy.split(rows_of(weights), 1)
    dx = torch.mm(parts[0], weights[0], out=out)  # type: ignore[arg-type]
    for part, weight in zip(parts[1:], weights[1:], strict=True):
        torch.addmm(dx, part, weight, out=dx)  # type: ignore[arg-type]
    return dx


def weight_gradients(weights: Sequence[Any], needs: Sequence[bool], dy: Tensor, x: Tensor) -> list[Tensor | None]:
    """`weight_gradient` of each weight [N_i, K] that needs one, from dy [T, sum N_i] and x [T, K].

    One matmul if all need one: the gradients are then views of one buffer, also as the .grad of weights whose gradients
    are added in place. One matmul each if every .grad exists and they are not joint.
    """
    rows = rows_of(weights)
    if len(weights) > 1 and all(needs):
        leaves = [target(w) for w in weights]
        if all(leaf is None for leaf in leaves):
            parts = (dy.t() @ x).split(rows)
            return [g if g.dtype == w.dtype else g.to(w.dtype) for g, w in zip(parts, weights, strict=True)]
        if _add_to_all(leaves, dy, x):
            return [None] * len(weights)
    parts = [dy] if len(weights) == 1 else dy.split(rows, 1)
    each = zip(weights, needs, parts, strict=True)
    return [weight_gradient(weight, part, x) if need else None for weight, need, part in each]


def _add_to_all(leaves: Sequence[Tensor | None], dy: Tensor, x: Tensor) -> bool:
    """Adds the gradients to the .grad of all leaves, or sets them, by one matmul; False if that is not possible."""
    found = [leaf for leaf in leaves if leaf is not None and leaf.dtype == dy.dtype == x.dtype]
    grads = [leaf.grad for leaf in found if leaf.grad is not None]
    if len({id(leaf) for leaf in found}) < len(leaves) or len(grads) not in (0, len(leaves)):
        return False
    if grads:
        whole = joint(grads)
        if whole is not None:
            accumulate(whole, dy, x, first=False)
        return whole is not None
    whole = dy.new_empty(dy.shape[1], x.shape[1])
    accumulate(whole, dy, x, first=True)
    for leaf, part in zip(found, whole.split(rows_of(found)), strict=True):
        leaf.grad = part
    return True


def needs_x(needs: Sequence[bool], count: int) -> bool:
    """True if a weight or an adapter needs a gradient, which takes x; needs: of the `leaves` of `count` layers."""
    return True in needs[:count] or True in needs[2 * count :]


class Layers:
    """Linear layers of one input, side by side: their outputs, and in a backward their gradients, without autograd.

    weights [N_i, K] and biases [N_i] or None: of each layer. branch: their adapters, or None.
    """

    need_x: bool
    need_weights: Sequence[bool]
    need_biases: Sequence[bool]
    need_factors: Sequence[bool]
    several: bool
    _found: list[Tensor | None] | None = None
    _sums: list[tuple[slice, Tensor]] | None = None
    _bias_sum: Tensor | None = None

    def __init__(self, weights: Sequence[Weight], biases: Sequence[Tensor | None], branch: Branch | None):
        self.weights, self.biases, self.branch = weights, biases, branch

    @classmethod
    def of(cls, operands: Sequence[LinearOperand], dtype: torch.dtype) -> Self:
        """dtype: that of x, in which adapters compute."""
        weights, adapters = [w for w, _, _ in operands], [adapter for _, _, adapter in operands]
        branch = Branch.of(weights, adapters, dtype) if any(adapters) else None
        return cls(weights, [b for _, b, _ in operands], branch)

    @property
    def leaves(self) -> tuple[Tensor | None, ...]:
        """The tensors that may be trained: each weight, or None where it is of few bits, then each bias; with a branch
        then each A and each B, or None where a layer has no adapter."""
        weights = self.weights
        if has_bits(weights):
            weights = [weight if isinstance(weight, Tensor) else None for weight in weights]  # type: ignore[misc]
        leaves = (*weights, *self.biases)
        return leaves if self.branch is None else (*leaves, *self.branch.leaves(len(weights)))  # type: ignore[arg-type,return-value]

    @property
    def number_of_leaves(self) -> int:
        return len(self.weights) * (2 if self.branch is None else 4)

    def flatten(self, *, biases: bool) -> tuple[list[Tensor | None], tuple[Any, ...]]:
        """The tensors, for ctx.save_for_backward, and the rest that `unflatten` needs. The weights themselves, not
        their joint view: FSDP may move them before the backward."""
        tensors, kinds = flatten_weights(self.weights)
        if biases:
            tensors += self.biases
        if self.branch is None:
            return tensors, (kinds, biases, None)
        return [*tensors, *self.branch.factors], (kinds, biases, self.branch.parts)

    @classmethod
    def unflatten(
        cls, tensors: Iterator[Any], rest: tuple[Any, ...], dtype: torch.dtype, needs: Sequence[bool], *, several: bool
    ) -> Self:
        """In a backward: from the rest and the next of `tensors`, which `flatten` returned.

        needs: whether each of the `leaves` needs a gradient. several: they are sums over chunks of tokens, in fp32.
        """
        kinds, biases, parts = rest
        weights = unflatten_weights(tensors, kinds)
        count = len(weights)
        found = list(itertools.islice(tensors, count)) if biases else [None] * count
        branch = None if parts is None else Branch(parts, list(itertools.islice(tensors, 2 * len(parts))), dtype)
        layers = cls(weights, found, branch)
        layers.several, layers.need_x = several, needs_x(needs, count)
        layers.need_weights, layers.need_biases = needs[:count], needs[count : 2 * count]
        layers.need_factors = needs[2 * count :]
        return layers

    def run(self, x: Tensor, out: Tensor | None = None, kernel: str = "") -> tuple[Tensor, Tensor | None]:
        """y [..., sum N_i] of x [..., K], as `matmul`; and H [T, sum r_i] of the adapters."""
        y = matmul(x, self.weights, self.biases, out, kernel)
        if self.branch is None:
            return y, None
        return y, self.branch.add_to(y.view(-1, y.shape[-1]), x.reshape(-1, x.shape[-1]))

    def inner_gradient(self, dy: Tensor) -> Tensor | None:
        """dH, from dy [T, sum N_i]."""
        return None if self.branch is None else self.branch.inner_gradient(dy)

    def input_gradient(self, dy: Tensor, dh: Tensor | None, out: Tensor | None = None) -> Tensor:
        """dx [T, K] from dy [T, sum N_i] and dH, into `out` where given."""
        dx = input_gradient(dy, self.weights, out)
        return dx if self.branch is None else torch.addmm(dx, dh, self.branch.a, out=dx)  # type: ignore[arg-type]

    def add_gradients(self, dy: Tensor, x: Tensor, h: Tensor | None, dh: Tensor | None) -> None:
        """Adds the gradients of weights and adapters for dy [T, sum N_i] and x [T, K]; h: `run`'s, or None."""
        if True in self.need_weights:
            if self.several:
                self._add_weight_gradients(dy, x)
            else:
                self._found = weight_gradients(self.weights, self.need_weights, dy, x)
        if dh is not None and self.branch is not None and True in self.need_factors:
            self.branch.add_gradients(dy, x, h, dh)

    def _add_weight_gradients(self, dy: Tensor, x: Tensor) -> None:
        """Into one buffer if all weights need a gradient."""
        needs, first = self.need_weights, self._sums is None
        if self._sums is None:
            self._sums = []
            ends = [0, *itertools.accumulate(rows_of(self.weights))]
            columns = [slice(*span) for span, need in zip(itertools.pairwise(ends), needs, strict=True) if need]
            dtype = torch.promote_types(dy.dtype, torch.float32)
            for part in [slice(0, ends[-1])] if all(needs) else columns:
                total = torch.empty(part.stop - part.start, x.shape[1], dtype=dtype, device=x.device)
                self._sums.append((part, total))
        for part, total in self._sums:
            accumulate(total, dy[:, part], x, first)

    def add_bias_gradients(self, dy: Tensor) -> None:
        """Adds the gradients of the biases for dy [T, sum N_i]."""
        if True in self.need_biases:
            part = dy.sum(0, dtype=accumulator(dy.dtype) if self.several else None)
            self._bias_sum = part if self._bias_sum is None else self._bias_sum + part

    def take(self, dtype: torch.dtype) -> list[Tensor | None]:
        """The gradients of the `leaves`, once, biases' in `dtype`; None where one is not needed, or added to .grad."""
        found = self._found if self._sums is None else self._take_sums(self._sums)
        nothing: list[Tensor | None] = [None] * len(self.weights)
        found = nothing if found is None else found
        if self._bias_sum is None:
            found = found + nothing
        else:
            parts = self._bias_sum.to(dtype).split(rows_of(self.weights))
            found = found + [p if need else None for p, need in zip(parts, self.need_biases, strict=True)]
        return found if self.branch is None else found + self.branch.take(self.need_factors)

    def _take_sums(self, sums: list[tuple[slice, Tensor]]) -> list[Tensor | None]:
        needs, totals = self.need_weights, [total for _, total in sums]
        if all(needs):
            totals = list(totals[0].split(rows_of(self.weights)))
        self._sums, left = None, iter(totals)
        each = zip(self.weights, needs, strict=True)
        return [accumulate_grad(w, next(left)) if need else None for w, need in each]  # type: ignore[arg-type]


class _Linear(torch.autograd.Function):
    """x: [..., K], of two dims or more; handle: x's, or None; leaves: of the layers -> [..., sum N_i]."""

    @staticmethod
    def forward(ctx, x: Tensor, handle: Handle | None, layers: Layers, *leaves):
        y, h = layers.run(x)
        ctx.function, made_of = (None, (x,)) if handle is None else handle
        ctx.listener = listener_of(x)
        tensors, ctx.rest = layers.flatten(biases=False)
        saves_x = needs_x(ctx.needs_input_grad[3:], len(layers.weights))
        ctx.save_for_backward(*tensors, *((h, *made_of) if saves_x else ()))
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        saved, needs = iter(ctx.saved_tensors), ctx.needs_input_grad
        layers = Layers.unflatten(saved, ctx.rest, dy.dtype, needs[3:], several=False)
        rows, dx = dy.flatten(0, -2), None
        dh = layers.inner_gradient(rows)
        if needs[0] and ctx.listener is not None:
            dx = layers.input_gradient(rows, dh).view(*dy.shape[:-1], layers.weights[0].shape[1])
            ctx.listener(dx)
        if layers.need_x:  # else before dx, so that x and dx are not in memory together
            h, *made_of = saved
            layers.add_gradients(rows, recomputed(ctx.function, made_of).flatten(0, -2), h, dh)
        if needs[0] and dx is None:
            dx = layers.input_gradient(rows, dh).view(*dy.shape[:-1], layers.weights[0].shape[1])
        layers.add_bias_gradients(rows)
        return dx, None, None, *layers.take(dy.dtype)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """F.linear(x, weight, bias) that does not save an x that a norm of this package computed.

    x: [..., K]; weight: [N, K]; bias: [N] or None. Returns [..., N].
    The backward recomputes x if the weight needs a gradient and x has not changed since the norm returned it. Under
    autocast and torch.compile, and for tensor subclasses, this is F.linear.
    """
    return linears(x, [LinearOperand(weight, bias)])


def joint_linear(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None] | None = None) -> Tensor:
    """torch.cat([F.linear(x, w, b) for w, b in zip(weights, biases)], -1), written into one buffer.

    x: [..., K]; weights: [N_i, K] each; biases: [N_i] or None for each weight, or None.
    Returns [..., sum N_i], contiguous. One matmul where the weights are `joint` and all or none have a bias. x is saved
    as by `linear`, and only if a weight needs a gradient; there is no second derivative. Under autocast, torch.compile
    and transforms, and for tensor subclasses, it runs the formula itself.
    Raises InputError for no weight, or another number of biases.
    """
    biases = [None] * len(weights) if biases is None else biases
    if len(biases) != len(weights) or not weights:
        raise InputError(
            f"joint_linear: {len(weights)} weights and {len(biases)} biases; expected at least one weight, and for "
            "each weight a bias or None."
        )
    return linears(x, list(map(LinearOperand, weights, biases)))


def linears(x: Tensor, operands: Sequence[LinearOperand]) -> Tensor:
    """Linear layers of one input side by side: [..., sum N_i], contiguous, from x [..., K]; see the top of the file.

    The caller may overwrite the result of several. Raises InputError for operands that do not fit x.
    """
    how = choose(x, operands)
    if how == "formula":
        return linears_reference(x, operands)
    if how == "op":
        operands = check("linear", "x", x, x.shape[-1], operands)
        layers = Layers.of(operands, x.dtype)
        return _Linear.apply(x, handle_of(x), layers, *layers.leaves)
    if not all(operand.is_dense for operand in operands):
        operands = check("linear", "x", x, x.shape[-1], operands)
    return Layers.of(operands, x.dtype).run(x, kernel=how)[0]
