"""Tensors side by side in one storage, which one matmul reads as one matrix.

Decoding takes 25 to 35 % longer with one matmul for each weight (docs/ablations.md).
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

_PLAIN = (nn.Parameter, Tensor)


def joint(tensors: Sequence[Tensor]) -> Tensor | None:
    """The tensors, [N_i, K] or [N_i] each, as one view of their memory; None if they are not joint.

    Joint: each tensor starts where the previous one ends in one storage; all are contiguous, of one dtype and one K.
    Always None under torch.compile, and for subclasses and meta tensors. The view has no gradient and must not outlive
    the call, since FSDP frees and refills storages.
    """
    if torch.compiler.is_compiling():
        return None
    first, rows = tensors[0], 0  # few calls for each tensor: this takes most of the host time of a small layer
    if type(first) not in _PLAIN or first.layout is not torch.strided or not first.is_contiguous():
        return None
    dtype, width, dims = first.dtype, first.shape[-1], first.dim()
    start = end = first.data_ptr()
    stride = (width, 1) if dims == 2 else (1,)
    row_bytes = first.itemsize * (width if dims == 2 else 1)
    for t in tensors:
        shape = t.shape
        if type(t) not in _PLAIN or t.data_ptr() != end or t.dtype != dtype or not t.is_contiguous():
            return None
        if len(shape) != dims or (dims == 2 and shape[1] != width):
            return None
        rows += shape[0]
        end = start + rows * row_bytes
    storage = first.untyped_storage()
    if first.is_meta or end > storage.data_ptr() + storage.nbytes():  # two storages may be neighbours in memory
        return None
    whole = first.detach() if torch.is_grad_enabled() else first
    return whole.as_strided((rows, width) if dims == 2 else (rows,), stride)


def make_joint(parameters: Sequence[Tensor]) -> None:
    """Moves parameters, [N_i, K] or [N_i] each, into one storage, so that they are `joint`, without changing a bit.

    The parameter objects stay, with their gradients and optimizer states. Nothing happens where they are joint already,
    or cannot be: where one is neither exactly a tensor nor an nn.Parameter, is on meta, is mapped from a file, shares
    its storage with another tensor, or differs from the others in dtype, device or K.
    """
    for p in parameters:
        if (
            type(p) not in _PLAIN
            or p.is_meta
            or p.layout is not torch.strided
            or p.dim() not in (1, 2)
            or not p.numel()
        ):
            return
        if p.device.type == "cpu" and (p.is_shared() or not p.untyped_storage().resizable()):  # such as a mapped file's
            return
    if len({(p.dtype, p.device, p.shape[1:], p.dim(), p.is_inference()) for p in parameters}) > 1:
        return
    unused: dict[int, int] = {}  # bytes of each storage that belong to no parameter
    for p in parameters:
        storage = p.untyped_storage()
        unused[storage._cdata] = unused.get(storage._cdata, storage.nbytes()) - p.nbytes
    if any(unused.values()) or joint(parameters) is not None:
        return
    with torch.inference_mode(parameters[0].is_inference()), torch.no_grad():
        whole = torch.cat([p.data for p in parameters])
        for p, part in zip(parameters, whole.split(rows_of(parameters)), strict=True):
            p.data = part


def rows_of(weights: Sequence[Any]) -> list[int]:
    return [w.shape[0] for w in weights]


def as_one(weights: Sequence[Any]) -> Any:
    """All weights (tensors, or quantised) as one weight if they are joint or there is only one; else None."""
    first = weights[0]
    if len(weights) == 1:
        return first
    return joint(weights) if isinstance(first, Tensor) else first.joint(weights)


def as_one_layer(weights: Sequence[Any], biases: Sequence[Tensor | None] | None) -> tuple[Any, Tensor | None] | None:
    """(weight, bias) of one linear layer equal to all of these; None where the weights are not joint."""
    weight = as_one(weights)
    if weight is None or biases is None:
        return None if weight is None else (weight, None)
    if len(weights) == 1:
        return weight, biases[0]
    if any(b is None for b in biases):
        return None
    bias = joint(biases)  # type: ignore[arg-type]
    return weight, torch.cat(biases) if bias is None else bias  # type: ignore[arg-type]
