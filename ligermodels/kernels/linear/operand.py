"""What a linear layer computes with, and which kernel computes it: all of these decisions are taken here.

    y = x @ weight.T + bias + adapter.scale * (x @ adapter.a.T) @ adapter.b.T

`choose` decides how layers of one input run, `choose_mlp` the same for an MLP, and `kernel_of` which kernel computes a
product without autograd. docs/operations.md has their tables.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ligermodels.errors import InputError
from ligermodels.kernels._check import describe
from ligermodels.kernels._gradients import is_marked
from ligermodels.kernels._recompute import handle_of, in_transform
from ligermodels.kernels._triton import use_triton
from ligermodels.kernels.linear._gemv import MAX_ROWS, gemv_takes
from ligermodels.kernels.linear.fp8 import OTHER_KINDS, check_e4m3
from ligermodels.kernels.linear.fp8_matmul import check_fp8
from ligermodels.kernels.linear.fp8_weight import FP8Weight
from ligermodels.kernels.linear.low_bit import LowBitWeight, has_bits

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_PLAIN = (Tensor, nn.Parameter)


class Adapter(NamedTuple):
    """Adds scale * (x a^T) b^T to a linear layer [N, K]; a: [r, K]; b: [N, r]; both floating point, of any dtype.

    dtype: of the computation, whose result is then added and rounded to the dtype of x. None: the dtype of x.
    """

    a: Tensor
    b: Tensor
    scale: float
    dtype: torch.dtype | None = None


Biases = Sequence[Tensor | None] | None
"""The bias of each layer, or None; None where no layer has one."""


class LinearOperand(NamedTuple):
    """A linear layer [N, K] for an op; bias: [N]."""

    weight: Any  # a tensor, a LowBitWeight or an FP8Weight
    bias: Tensor | None = None
    adapter: Adapter | None = None

    @property
    def is_dense(self) -> bool:
        """True if the weight is a tensor, and there is no adapter."""
        return self.adapter is None and isinstance(self.weight, Tensor)

    @property
    def is_fp8(self) -> bool:
        """True if its products are in FP8."""
        return type(self.weight) is FP8Weight


FEW_FP8_ROWS = 64
"""Without a gradient, FP8 is for more rows of x: up to these, as in decoding, weights are read in their own format,
since to quantise them would take longer than the matmul."""


def without_fp8(x: Tensor, operands: Sequence[LinearOperand]) -> Sequence[LinearOperand]:
    """The operands, with weights in place of `FP8Weight`s for few rows of x without a gradient."""
    for weight, _, _ in operands:
        if type(weight) is FP8Weight:
            break
    else:
        return operands
    if x.numel() > FEW_FP8_ROWS * x.shape[-1]:
        return operands
    if torch.is_grad_enabled() and (x.requires_grad or needs_gradient(operands)):
        return operands
    return [operand._replace(weight=operand.weight.source) if operand.is_fp8 else operand for operand in operands]


def choose(operands: Sequence[LinearOperand], x: Tensor, *, routed_rows: int = 0) -> str:
    """How linear layers of one input x [..., K] run; operands: one or more, which `check` accepts.

    "torch": PyTorch's own functions, layer by layer, where torch must see each: see `_needs_torch`.
    "op": one autograd.Function, where something needs a gradient. A single dense layer needs it only to recompute x, or
        to add to .grad in place; else "matmul", an F.linear that autograd sees. Products in FP8 are always in it.
    Else nothing needs a gradient, and `kernel_of` says which kernel runs.

    For experts, the operands are gate_up and down, with weights [E, N, K], and routed_rows is the number of their rows:
    "experts": one op.
    "selected_experts": few rows and no gradient: only the quantised weights that some row chose are dequantised.
    """
    if len(operands[0].weight.shape) == 3:
        return _choose_experts(operands, x, routed_rows)
    if _needs_torch(x, operands):
        return "torch"
    if not (torch.is_grad_enabled() and (x.requires_grad or needs_gradient(operands))):
        return kernel_of(x, [w for w, _, _ in operands], [b for _, b, _ in operands])
    if len(operands) == 1 and operands[0].is_dense:
        weight = operands[0].weight
        saves = handle_of(x) is not None or (is_marked(weight) and use_triton(x))
        return "op" if saves and weight.requires_grad else "matmul"
    return "op"


def _choose_experts(operands: Sequence[LinearOperand], x: Tensor, routed_rows: int) -> str:
    # Selecting and dequantising the bits of a layer moves 1.4 to 1.7 times the bytes of dequantising it alone.
    few = 0 < 2 * routed_rows <= operands[0].weight.shape[0] and not torch.compiler.is_compiling()
    if not few or (torch.is_grad_enabled() and (x.requires_grad or needs_gradient(operands))):
        return "experts"
    return "selected_experts" if has_bits([weight for weight, _, _ in operands]) else "experts"


def choose_mlp(x: Tensor, first: Sequence[LinearOperand], last: LinearOperand, *, gated: bool) -> str:
    """How an MLP runs: layers `first` of x [..., K], an activation, and the layer `last`.

    "gemv" and "low_bit": the gated kernels, without a gradient; "low_bit" for one row. "torch": PyTorch's own, without
    Triton and in transforms, and under torch.compile with adapters or quantised weights. "op": one autograd.Function,
    or without gradients the same computation. "traced": under torch.compile, F.linear, then one op for activation and
    last layer.
    """
    layers = (*first, last)
    if torch.compiler.is_compiling():
        dense = use_triton(x) and all(operand.is_dense for operand in layers)
        return "traced" if dense else "torch"
    if gated and x.numel() <= MAX_ROWS * x.shape[-1] and not any(adapter for _, _, adapter in layers):
        kernel = kernel_of(x, [w for w, _, _ in first], [b for _, b, _ in first])
        inner = sum(w.shape[0] for w, _, _ in first)
        of_last = kernel_of(x, (last.weight,), (last.bias,), columns=inner // 2)
        fits = kernel != "low_bit" or (x.numel() == x.shape[-1] and len({w.kind for w, _, _ in first}) == 1)
        if kernel == of_last != "matmul" and fits and inner % 2 == 0:
            return kernel
    mixed = len({operand.is_fp8 for operand in first}) > 1
    return "op" if use_triton(x) and not (mixed or in_transform()) else "torch"


def needs_gradient(operands: Sequence[LinearOperand]) -> bool:
    """True if a weight, a bias or an adapter requires a gradient."""
    for weight, bias, adapter in operands:
        if weight.requires_grad or (bias is not None and bias.requires_grad):
            return True
        if adapter is not None and (adapter.a.requires_grad or adapter.b.requires_grad):
            return True
    return False


def kernel_of(x: Tensor, weights: Sequence[Any], biases: Biases = None, *, columns: int | None = None) -> str:
    """The kernel for linear layers of x [..., K] where nothing needs a gradient.

    "gemv": dense weights, one row, or in 16 bits up to three: see `gemv_takes`. "low_bit": up to `max_rows` rows and
    quantised weights, which are not dequantised. "matmul", by torch: everything else, also tensor subclasses,
    transforms, autocast, torch.compile, strided biases or rows of weights, and shapes and dtypes that do not fit.
    columns: K for layers that read the result of other layers instead of x.
    """
    if torch.compiler.is_compiling():
        return "matmul"
    width, size, first = x.shape[-1], x.numel(), weights[0]
    of_bits = isinstance(first, LowBitWeight)
    if not 0 < size <= (first.max_rows if of_bits else MAX_ROWS) * width:
        return "matmul"
    one_row = size == width
    if not use_triton(x):
        if of_bits or not one_row or x.dtype != torch.bfloat16 or x.device.type != "cpu" or not _has_amx():
            return "matmul"
    elif not (of_bits or one_row) and x.dtype == torch.float32:
        return "matmul"
    if x.dtype not in _DTYPES or torch.is_autocast_enabled(x.device.type) or in_transform():
        return "matmul"
    dtype, device, with_gradients = x.dtype, x.device, torch.is_grad_enabled()
    if type(x) not in _PLAIN or (with_gradients and x.requires_grad):
        return "matmul"
    columns = width if columns is None else columns
    biases = biases or (None,) * len(weights)
    for w, b in zip(weights, biases, strict=True):  # a loop, not generators, which would take most of the host time
        shape = w.shape
        if len(shape) != 2 or shape[1] != columns or not shape[0] or w.device != device:
            return "matmul"
        if of_bits:
            if type(w) is not type(first):
                return "matmul"
        elif (
            type(w) not in _PLAIN or w.dtype != dtype or w.stride(-1) != 1 or (with_gradients and w.requires_grad)
        ):  # fmt: skip
            return "matmul"
        if b is None:
            continue
        if type(b) not in _PLAIN or b.shape != shape[:1] or b.device != device or b.stride(0) != 1:
            return "matmul"
        if (b.dtype != dtype and not of_bits) or (with_gradients and b.requires_grad):
            return "matmul"
    if of_bits:
        return "low_bit"
    return "gemv" if one_row or gemv_takes(size // width, sum([w.shape[0] for w in weights]), columns) else "matmul"


@functools.cache
def _has_amx() -> bool:
    return torch.cpu._is_amx_tile_supported()


def _needs_torch(x: Tensor, operands: Sequence[LinearOperand]) -> bool:
    """True where torch must see each F.linear: under torch.compile, transforms, autocast to another dtype, and for
    subclasses."""
    if torch.compiler.is_compiling() or type(x) is not Tensor or x.dim() < 2 or in_transform():
        return True
    cast = autocast_dtype(x)
    if cast is not None and x.dtype != cast:
        return True
    for weight, bias, adapter in operands:
        if type(weight) not in _PLAIN and isinstance(weight, Tensor):
            return True
        if cast is not None and weight.dtype != cast and isinstance(weight, Tensor):
            return True
        if bias is not None and type(bias) not in _PLAIN:
            return True
        if adapter is not None and not (type(adapter.a) in _PLAIN and type(adapter.b) in _PLAIN):
            return True
    return False


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """The dtype to which autocast would cast x in F.linear, or None."""
    kind = x.device.type
    if kind == "meta" or not torch.is_autocast_enabled(kind) or x.dtype == torch.float64:
        return None
    return torch.get_autocast_dtype(kind)


def check(
    where: str, name: str, x: Tensor, width: int, operands: Sequence[LinearOperand], layers: Sequence[str] = (),
    groups: int = 0,
) -> Sequence[LinearOperand]:  # fmt: skip
    """The operands of layers with `width` inputs, checked: their shapes, dtypes and devices fit x [..., K].

    Under autocast weight and bias are cast as by F.linear; beside a quantised weight only the bias, to x's dtype. All
    strides are valid. layers: prefixes of weight and bias in errors, "fc1_" or "gate_up_proj " (gate_up_proj_bias).
    groups: the number E of layers in a group: weights are [E, N, width], biases [E, N], factors [E, r, width] and
    [E, N, r]. Raises InputError.
    """
    dtype, device, cast = x.dtype, x.device, autocast_dtype(x)
    changed, dims = None, 3 if groups else 2
    for i, (weight, bias, adapter) in enumerate(operands):
        shape, layer = weight.shape, layers[i] if layers else ""
        if len(shape) != dims or shape[-1] != width or weight.device != device or (groups and shape[0] != groups):
            expected = f"{groups}, N, {width}" if groups else f"N, {width}"
            raise InputError(
                f"{where}: {layer}weight {tuple(shape)} on {weight.device} does not fit {name} {tuple(x.shape)} on "
                f"{device}; expected [{expected}] there. Are the layers before and after of one intermediate_size?"
            )
        if bias is not None and (bias.shape != shape[:-1] or bias.device != device):
            name_of_bias = f"{layer}bias".replace(" ", "_")
            raise InputError(f"{where}: {name_of_bias} has {describe(bias)}; expected {tuple(shape[:-1])} on {device}.")
        if adapter is not None:
            (*lead, rows, _), a, b = shape, adapter.a, adapter.b
            rank = a.shape[-2] if a.dim() == dims else 0
            fits = a.shape == (*lead, rank, width) and b.shape == (*lead, rows, rank)
            if not (fits and a.device == b.device == device):
                raise InputError(
                    f"{where}: {layer}adapter has A of {describe(a)} and B of {describe(b)}; expected "
                    f"{(*lead, 'r', width)} and {(*lead, rows, 'r')} on {device}."
                )
        if type(weight) is FP8Weight:
            check_fp8([weight], cast or dtype, device)
        elif not isinstance(weight, Tensor) and weight.kind == "fp8":
            check_e4m3(device, f"{where}: {layer}weight in fp8", OTHER_KINDS)
        if not isinstance(weight, Tensor):
            if bias is None or bias.dtype == (cast or dtype):
                continue
        elif cast is None:
            if dtype != weight.dtype or (bias is not None and bias.dtype != dtype):
                name_of_bias = f"{layer}bias".replace(" ", "_")
                raise InputError(
                    f"{where}: {name} is {dtype}, {layer}weight {weight.dtype}, {name_of_bias} "
                    f"{None if bias is None else bias.dtype}; outside torch.autocast they must be one dtype."
                )
            continue
        else:
            weight = weight.to(cast)
        changed = list(operands) if changed is None else changed
        changed[i] = LinearOperand(weight, None if bias is None else bias.to(cast or dtype), adapter)
    return operands if changed is None else changed
