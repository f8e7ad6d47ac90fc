"""Linear layers of one input as one op, with their outputs side by side in one buffer.

    y = [y_0 | y_1 | ...]        y_i = x W_i^T + b_i + s_i (x A_i^T) B_i^T

What differs from separate layers and torch.cat:
- Weights that are `joint` are read as one matrix: one matmul for y, one for dx. With other weights, each matmul writes
  its own columns of y, and adds to dx in its epilogue. One matmul computes all weight gradients, views of one buffer.
- W_i may be a `LowBitWeight`, which is saved as it is and dequantised for each matmul (low_bit.py). With few rows, the
  kernels of quantized.py read int8, fp8 and int4 directly.
- All W_i may be `FP8Weight`s, whose products are in FP8, forward and backward (fp8_matmul.py).
- A layer may have a LoRA adapter (lora.py). One matmul computes H = x A^T, [T, r], for all A_i; H is saved.
- x is saved only where a weight or an adapter is trained. If a norm computed x, the op saves the norm's inputs instead,
  and recomputes x in the backward (`_recompute`): 2 H bytes per token less in 16 bits, for one more run of the norm's
  kernel.
- Gradients are added to each weight.grad in place where the user asked for it (`_gradients`), by a matmul for each.

Where that gains nothing, F.linear runs, and for a few rows without a gradient `gemv`: see `choose` in operand.py.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ligermodels.kernels._gradients import accumulate, accumulate_grad, target, weight_gradient
from ligermodels.kernels._recompute import Handle, handle_of, recomputed
from ligermodels.kernels._triton import accumulator, apply, once_differentiable, use_triton
from ligermodels.kernels.linear import fp8_matmul
from ligermodels.kernels.linear._gemv import MAX_ROWS, gemv
from ligermodels.kernels.linear._lora import LoRABranch, flatten_adapters
from ligermodels.kernels.linear.fp8_weight import FP8Weight, frozen_numbers, quantized_weights
from ligermodels.kernels.linear.joint import as_one, as_one_layer, joint, rows_of
from ligermodels.kernels.linear.low_bit import LowBitWeight, dequantized, has_bits
from ligermodels.kernels.linear.operand import (
    Biases,
    LinearOperand,
    autocast_dtype,
    check,
    choose,
    kernel_of,
    without_fp8,
)
from ligermodels.kernels.linear.quantized import quantized_linear


def linears_reference(x: Tensor, operands: Sequence[LinearOperand]) -> Tensor:
    """The layers one after the other, by PyTorch's own functions, which autograd, autocast and transforms see."""
    outputs = []
    for weight, bias, adapter in operands:
        if isinstance(weight, FP8Weight):
            y = fp8_matmul.fp8_linear_reference(x.to(autocast_dtype(x) or x.dtype), weight, bias)
        else:
            y = F.linear(x, weight, bias) if isinstance(weight, Tensor) else _frozen_linear(x, weight, bias)
        if adapter is not None:
            dtype = adapter.dtype or x.dtype
            h = F.linear(x.to(dtype), adapter.a.to(dtype))
            y = (y + adapter.scale * F.linear(h, adapter.b.to(h.dtype))).to(y.dtype)
        outputs.append(y)
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, -1)


def _frozen_linear(x: Tensor, weight: LowBitWeight, bias: Tensor | None) -> Tensor:
    """F.linear whose backward dequantises the weight again instead of saving it."""
    x = x.to(autocast_dtype(x) or x.dtype)

    def run(x: Tensor) -> Tensor:
        return F.linear(x, weight.dequantize(x.dtype), None if bias is None else bias.to(x.dtype))

    return checkpoint(run, x, use_reentrant=False, preserve_rng_state=False)  # type: ignore[no-any-return]


# ---- Without autograd ----


def matmul(x: Tensor, weight: Tensor, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """F.linear(x, weight, bias), into `out` [T, N] for x [T, K] where given, by the fastest kernel."""
    return JointLinears((weight, bias), (1, None, None, None), x.dtype).run(x, out)[0]


def _side_by_side(
    x: Tensor, weights: Sequence[Any], biases: Biases, out: Tensor | None, run: Callable[..., Tensor]
) -> Tensor:  # fmt: skip
    """The outputs side by side: `run` once where the weights are joint, else once for each."""
    layer = as_one_layer(weights, biases)
    if layer is not None:
        return run(x, *layer, out)
    sizes = rows_of(weights)
    y = x.new_empty(*x.shape[:-1], sum(sizes)) if out is None else out
    x, parts = x.reshape(-1, x.shape[-1]), y.view(-1, y.shape[-1]).split_with_sizes(sizes, 1)
    for weight, bias, columns in zip(weights, biases or [None] * len(sizes), parts, strict=True):
        run(x, weight, bias, columns)
    return y


def _by_torch(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor | None) -> Tensor:
    if out is None:
        return F.linear(x, weight, bias)
    return torch.mm(x, weight.t(), out=out) if bias is None else torch.addmm(bias, x, weight.t(), out=out)


def _input_gradient(dy: Tensor, weights: Sequence[Tensor], out: Tensor | None) -> Tensor:
    """dx [T, K] from dy [T, sum N_i], into `out` where given."""
    whole = as_one(weights)
    if whole is not None:
        return torch.mm(dy, whole, out=out)
    first, *others = dy.split_with_sizes(rows_of(weights), 1)
    dx = torch.mm(first, weights[0], out=out)
    for part, weight in zip(others, weights[1:], strict=True):
        torch.addmm(dx, part, weight, out=dx)
    return dx


def weight_gradients(weights: Sequence[Any], needs: Sequence[bool], dy: Tensor, x: Tensor) -> Sequence[Tensor | None]:
    """`weight_gradient` of each weight [N_i, K] that needs one, from dy [T, sum N_i] and x [T, K].

    One matmul if all need one, and none is added to .grad in place: the gradients are then views of one buffer.
    """
    if len(weights) == 1:
        return [weight_gradient(weights[0], dy, x)]
    rows = rows_of(weights)
    if all(needs) and all([target(weight) is None for weight in weights]):
        return (dy.t() @ x).split_with_sizes(rows)
    each = zip(weights, needs, dy.split_with_sizes(rows, 1), strict=True)
    return [weight_gradient(weight, part, x) if need else None for weight, need, part in each]


Rest = tuple[int, Any, Any, Any]


def flatten(operands: Sequence[LinearOperand]) -> tuple[Sequence[Tensor | None], Rest]:
    """(leaves, rest), from which a forward and its backward each build `JointLinears`.

    leaves: the tensors that may be trained: a weight for each layer (None if quantised); a bias for each layer, left
    out if no layer has a bias or an adapter; the factors of the adapters. An autograd.Function saves them as they are,
    since FSDP may move them before the backward. rest: number of layers; quantised weights or None; `Parts` or None;
    the recipe and the cache of FP8 or None.
    """
    weights, biases, adapters = zip(*operands, strict=True)
    count, bits, parts, fp8 = len(weights), None, None, None
    if operands[0].is_fp8:
        fp8 = weights[0].recipe, weights[0].cache
        weights = tuple([weight.source for weight in weights])
    factors: tuple[Tensor, ...] = ()
    if _none_if_empty(adapters) is not None:
        factors, parts = flatten_adapters(weights, adapters)
    if has_bits(weights):
        bits = [None if isinstance(weight, Tensor) else weight for weight in weights]
        weights = tuple([weight if isinstance(weight, Tensor) else None for weight in weights])
    biases = biases if factors or _none_if_empty(biases) is not None else ()
    return weights + biases + factors, (count, bits, parts, fp8)


def _none_if_empty(values: Sequence[Any]) -> Any:
    """The values, or None if all are None."""
    for value in values:
        if value is not None:
            return values
    return None


def without_biases(leaves: Sequence[Any], count: int) -> Sequence[Any]:
    """The leaves of `count` layers, or a list with a value for each leaf, with None in place of each bias."""
    if len(leaves) == count:
        return leaves
    return *leaves[:count], *(None,) * count, *leaves[2 * count :]


def _one_bias(biases: Sequence[Tensor | None], weights: Sequence[Any], dtype: torch.dtype) -> Tensor:
    """The biases of all layers in one, with zeros for layers that have none."""
    each = zip(biases, weights, strict=True)
    parts = [torch.zeros(w.shape[0], dtype=dtype, device=w.device) if b is None else b for b, w in each]
    whole = parts[0] if len(parts) == 1 else joint(parts)
    return torch.cat(parts) if whole is None else whole


class JointLinears:
    """Linear layers of one input, with outputs side by side: computes outputs and gradients without autograd.

    leaves, rest: from `flatten`. dtype: of x; adapters compute in it by default. needs: whether each leaf needs a
    gradient. several: gradients are summed over several chunks of tokens, in fp32. need_x: whether `input_gradient`
    will be called.
    """

    _sums: Sequence[Tensor | None] = ()
    _bias_sum: Tensor | None = None
    _numbers: tuple[Tensor, Tensor] | None = None
    _transposed: Tensor | None = None
    _gradient: tuple[Tensor, dict[str, Any]] | None = None

    def __init__(
        self, leaves: Sequence[Any], rest: Rest, dtype: torch.dtype, needs: Sequence[bool] = (),
        several: bool = False, need_x: bool = True,
    ):  # fmt: skip
        count, bits, parts, fp8 = rest
        self.weights: Any = leaves[:count]
        self.has_bits, self.branch = bits is not None, None
        if bits is not None:
            self.weights = [w if low is None else low for w, low in zip(self.weights, bits, strict=True)]
        self.biases = _none_if_empty(leaves[count : 2 * count]) if len(leaves) > count else None
        if parts is not None:
            self.branch = LoRABranch(leaves[2 * count :], parts, dtype)
        self.needs, self.several, self.need_x = needs, several, need_x
        self.recipe: Any = None if fp8 is None else fp8[0]
        self._cache: Any = None if fp8 is None else fp8[1]

    def _in_fp8(self, product: str) -> bool:
        return self.recipe is not None and getattr(self.recipe, product) == "fp8"

    def _quantized(self) -> tuple[Tensor, Tensor]:
        """The numbers and scales of all weights in FP8."""
        if self._numbers is None:
            if self.has_bits:
                self._numbers = frozen_numbers(self.weights)
            elif self._cache is None:
                self._numbers = quantized_weights(self.weights, self.recipe)
            else:
                self._numbers = self._cache.get(self.weights, self.recipe)
        return self._numbers

    def _quantized_gradient(self, dy: Tensor, part: str) -> tuple[Tensor, Tensor]:
        """dy in FP8, its "rows" or "columns": whoever needs one of them first quantises for all that will be needed."""
        if self._gradient is None or self._gradient[0] is not dy:
            scale = self._quantized()[1] if self.need_x and self._in_fp8("dx") else None
            columns = self._in_fp8("dw") and True in self.needs[: len(self.weights)]
            self._gradient = dy, fp8_matmul.quantize_gradient(dy, scale, self.recipe, columns=columns)
        numbers = self._gradient[1].pop(part)
        if not self._gradient[1]:
            self._gradient = None
        return numbers

    def _plain(self, dtype: torch.dtype) -> Sequence[Any]:
        """The weights as tensors, for products that are not in FP8; in this dtype where others are."""
        if self.has_bits:
            return dequantized(self.weights, dtype)
        return self.weights if self.recipe is None else [weight.to(dtype) for weight in self.weights]

    def run(self, x: Tensor, out: Tensor | None = None, kernel: str = "") -> tuple[Tensor, Tensor | None]:
        """y [..., sum N_i] of x [..., K], into `out` [T, sum N_i] where given; and H [T, sum r_i] of the adapters.

        kernel: the result of `kernel_of`, if the caller has it.
        """
        weights: Any = self.weights
        if self._in_fp8("forward"):
            rows, numbers = x.reshape(-1, x.shape[-1]), self._quantized()
            bias = None if self.biases is None else _one_bias(self.biases, weights, x.dtype)
            y = fp8_matmul.forward(rows, numbers, bias, out, self.recipe)
            y = y.view(*x.shape[:-1], y.shape[1])
            return y, None if self.branch is None else self.branch.add_to(y.view(-1, y.shape[-1]), rows)
        if not kernel and (self.has_bits or x.numel() <= MAX_ROWS * x.shape[-1]):
            kernel = kernel_of(x, weights, self.biases)
        if kernel == "low_bit":
            y = _side_by_side(x.reshape(-1, x.shape[-1]), weights, self.biases, out, quantized_linear)
            y = y.view(*x.shape[:-1], y.shape[1])
        elif self.has_bits:
            y = _side_by_side(x, dequantized(weights, x.dtype), self.biases, out, _by_torch)
        else:
            weights = self._plain(x.dtype)
            y = _side_by_side(x, weights, self.biases, out, gemv if kernel == "gemv" else _by_torch)
        if self.branch is None:
            return y, None
        return y, self.branch.add_to(y.view(-1, y.shape[-1]), x.reshape(-1, x.shape[-1]))

    def dequantize(self, dtype: torch.dtype) -> None:
        """Dequantises quantised weights once, for several calls; those in FP8 are kept."""
        if self.recipe is not None:
            return
        self.weights, self.has_bits = dequantized(self.weights, dtype), False

    def inner_gradient(self, dy: Tensor) -> Tensor | None:
        """dH, from dy [T, sum N_i]."""
        return None if self.branch is None else self.branch.inner_gradient(dy)

    def input_gradient(self, dy: Tensor, dh: Tensor | None, out: Tensor | None = None) -> Tensor:
        """dx [T, K] from dy [T, sum N_i] and dH, into `out` where given."""
        if self._in_fp8("dx"):
            numbers = self._quantized()
            if self.several and self._transposed is None:  # for all chunks
                self._transposed = fp8_matmul.transposed(numbers[0])
            rows = self._quantized_gradient(dy, "rows")
            dx = fp8_matmul.input_gradient(rows, numbers, out, self.recipe, self._transposed)
        else:
            dx = _input_gradient(dy, self._plain(dy.dtype), out)
        return dx if self.branch is None else self.branch.add_input_gradient(dx, dh)  # type: ignore[arg-type]

    def add_gradients(self, dy: Tensor, x: Tensor, h: Tensor | None, dh: Tensor | None) -> None:
        """Adds the gradients of weights and adapters for dy [T, sum N_i] and x [T, K]; h: `run`'s, or None."""
        count = len(self.weights)
        needs = self.needs[:count]
        if True in needs and self._in_fp8("dw"):
            self._add_fp8_gradients(dy, x, needs)
        elif not self.several:
            self._sums = weight_gradients(self.weights, needs, dy, x) if True in needs else ()
        else:
            first, dtype = not self._sums, accumulator(x.dtype)
            if first:
                each = zip(self.weights, needs, strict=True)
                self._sums = [x.new_empty(weight.shape, dtype=dtype) if need else None for weight, need in each]
            for total, part in zip(self._sums, dy.split_with_sizes(rows_of(self.weights), 1), strict=True):
                if total is not None:
                    accumulate(total, part, x, first)
        if self.branch is not None and dh is not None and True in self.needs[2 * count :]:
            self.branch.add_gradients(dy, x, h, dh)

    def _add_fp8_gradients(self, dy: Tensor, x: Tensor, needs: Sequence[bool]) -> None:
        columns = self._quantized_gradient(dy, "columns")
        parts = fp8_matmul.weight_gradients(columns, x, rows_of(self.weights), needs, self.recipe)
        each = zip(self.weights, parts, strict=True)
        if not self.several:
            self._sums = [None if part is None else accumulate_grad(weight, part) for weight, part in each]
        elif not self._sums:
            self._sums = [None if part is None else part.float() for part in parts]
        else:
            for total, part in zip(self._sums, parts, strict=True):
                if total is not None and part is not None:
                    total.add_(part)

    def add_bias_gradients(self, dy: Tensor) -> None:
        """Adds the gradients of the biases for dy [T, sum N_i]."""
        count = len(self.weights)
        if True in self.needs[count : 2 * count]:
            part = dy.sum(0, dtype=accumulator(dy.dtype) if self.several else None)
            self._bias_sum = part if self._bias_sum is None else self._bias_sum + part

    def gradients(self, dtype: torch.dtype) -> tuple[Tensor | None, ...]:
        """The gradient of each leaf; biases in `dtype`; None where it was added to weight.grad. Call it only once."""
        count = len(self.weights)
        sums: Any = self._sums or (None,) * count
        needs = self.needs[count : 2 * count]
        biases: Any = (None,) * len(needs)
        if self.several:
            each = zip(self.weights, sums, strict=True)
            sums = [None if total is None else accumulate_grad(weight, total) for weight, total in each]
        if self._bias_sum is not None:
            parts = self._bias_sum.to(dtype).split_with_sizes(rows_of(self.weights))
            biases = [part if need else None for part, need in zip(parts, needs, strict=True)]
        return *sums, *biases, *(() if self.branch is None else self.branch.gradients())


class _Linear(torch.autograd.Function):
    """[..., sum N_i] from x [..., K], of two dims or more. rest, leaves: from `flatten`. handle: of x, or None."""

    @staticmethod
    def forward(ctx, x: Tensor, rest: Rest, handle: Handle | None, *leaves):
        layers, saved = JointLinears(leaves, rest, x.dtype), without_biases(leaves, rest[0])
        y, h = layers.run(x)
        if True in without_biases(ctx.needs_input_grad[3:], rest[0]):
            saved = (*saved, h, x) if handle is None else (*saved, h, *handle.tensors)
        ctx.save_for_backward(*saved)
        ctx.options = rest, None if handle is None else handle.function
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        saved, (need_x, _, _, *needs) = ctx.saved_tensors, ctx.needs_input_grad
        rest, recompute_x = ctx.options
        count, rows, dx = len(needs), dy.flatten(0, -2), None
        layers = JointLinears(saved[:count], rest, dy.dtype, needs, need_x=need_x)
        dh = layers.inner_gradient(rows)
        if len(saved) > count:  # else before dx, so that x and dx are not in memory together
            h, *recompute_args = saved[count:]
            layers.add_gradients(rows, recomputed(recompute_x, recompute_args).flatten(0, -2), h, dh)
        if need_x:
            dx = layers.input_gradient(rows, dh).view(*dy.shape[:-1], layers.weights[0].shape[1])
        layers.add_bias_gradients(rows)
        return dx, None, None, *layers.gradients(dy.dtype)


def linears(x: Tensor, operands: Sequence[LinearOperand]) -> Tensor:
    """Linear layers of one input side by side: [..., sum N_i], contiguous, from x [..., K]; see the top of the file.

    The caller may overwrite the result of several. Raises InputError for operands that do not fit x.
    """
    operands = without_fp8(x, operands)
    how = choose(operands, x)
    if how == "torch" or (how == "matmul" and len(operands) == 1 and operands[0].is_dense):
        return linears_reference(x, operands)
    if how not in ("gemv", "low_bit"):  # `choose` has checked the others: decoding is host-bound
        operands = check("linear", "x", x, x.shape[-1], operands)
    if how == "op" and not use_triton(x) and not has_bits([weight for weight, _, _ in operands]):
        return linears_reference(x, operands)  # which has a second derivative
    if len(operands) > 1 and len({operand.is_fp8 for operand in operands}) > 1:
        runs = itertools.groupby(operands, lambda operand: operand.is_fp8)
        return torch.cat([linears(x, [*run]) for _, run in runs], -1)
    leaves, rest = flatten(operands)
    if how == "op":
        return apply(_Linear, x, rest, handle_of(x), *leaves)
    return JointLinears(leaves, rest, x.dtype).run(x, kernel=how)[0]
