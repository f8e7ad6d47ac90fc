"""MXFP4 on disk, as gpt-oss was released: experts in 4 bits, read as they are or dequantised, and written again.

A stacked weight that is [E, K, N] on disk in floats, under its name, is there as two tensors in 4 bits:

    NAME_blocks   uint8 [E, N, K / 32, 16]   codes of 32 neighbours of a row, the first in the low bits
    NAME_scales   uint8 [E, N, K / 32]       the exponents of blocks

`MXFP4Reader` shows them as NAME in bf16, so that the table of names describes both. A row moves with its scales: an
order of rows in the table (gpt-oss has gate and up in turn) applies to both tensors, and back when they are saved.
"""

import dataclasses
from collections.abc import Iterable
from typing import Any, Self

import torch
from torch import Tensor

from ligermodels.checkpoint.weights import Region, TensorInfo
from ligermodels.errors import CheckpointError, InputError
from ligermodels.kernels.linear.mxfp4 import BLOCK, MXFP4Weight
from ligermodels.layers.quantized import QuantizedLinear


class MXFP4Reader:
    """A `weights.Reader` of another one, with its weights in 4 bits as [E, K, N] in bf16, which is exact.

    packed: {name: (name of its blocks, of its scales)}. device: where they are dequantised.
    Raises CheckpointError for blocks and scales that do not fit.
    """

    def __init__(self, reader: Any, device: torch.device | None = None):
        self._reader, self._device = reader, device or torch.device("cpu")
        self.source, self.metadata, self.is_mapped = reader.source, reader.metadata, reader.is_mapped
        self.packed: dict[str, tuple[str, str]] = {}
        self.headers: dict[str, TensorInfo] = {}
        for name, info in reader.headers.items():
            weight, _, part = name.rpartition("_")
            if part not in ("blocks", "scales") or info.dtype != torch.uint8:
                self.headers[name] = info
            elif weight not in self.packed:
                self.packed[weight] = f"{weight}_blocks", f"{weight}_scales"
                self.headers[weight] = self._header(weight)

    def _header(self, name: str) -> TensorInfo:
        found = [self._reader.headers.get(part, TensorInfo(torch.uint8, ())) for part in self.packed[name]]
        (*lead, size), scales = found[0].shape or (0,), found[1].shape
        if tuple(lead) != scales or len(scales) != 3 or size != BLOCK // 2 or found[0].dtype != found[1].dtype:
            blocks, scales = (f"{info.dtype} {list(info.shape)}" if info.shape else "missing" for info in found)
            raise CheckpointError(
                f"{self.source}: {name}_blocks is {blocks}, {name}_scales {scales}; expected uint8 [E, N, K / {BLOCK}, "
                f"{BLOCK // 2}] and [E, N, K / {BLOCK}] of MXFP4"
            )
        experts, rows, groups = scales
        return TensorInfo(torch.bfloat16, (experts, groups * BLOCK, rows))

    def weight(self, name: str, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> MXFP4Weight:
        """The weight [E, N, K] in 4 bits, in memory on the device. dtype: that it stands for. Raises CheckpointError
        for scales that are NaN."""
        blocks, scales = (self._reader.read(part).to(device, copy=True) for part in self.packed[name])
        try:
            return MXFP4Weight.of_blocks(blocks, scales, dtype)
        except InputError as error:
            raise CheckpointError(f"{self.source}: {name}_scales: {error}") from error

    def read(self, name: str) -> Tensor:
        """The tensor; one in 4 bits is dequantised on the device of the reader."""
        return self.weight(name, self._device).dequantize().mT if name in self.packed else self._reader.read(name)

    def locate(self, name: str) -> Any:
        """The file and offset of a tensor that is not in 4 bits."""
        return self._reader.locate(name)

    def __enter__(self) -> Self:
        self._reader.__enter__()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._reader.__exit__(*exc_info)


def stacks(boxes: Iterable[Region], packed: Iterable[str], where: str) -> dict[str, Region]:
    """{stacked weight of experts: its region on disk} of those that are `packed` there.

    Raises CheckpointError for a weight that is not one tensor on disk, or that has another order of columns there.
    """
    names, stored = set(packed), {}
    for box in boxes:
        if box.source not in names:
            continue
        if box.index or not box.transposed or (box.order is not None and box.dim != 1):
            raise CheckpointError(
                f"{where}: {box.source} is a part of {box.param}, or in another order than MXFP4 has on disk, where a "
                "row is a neuron of all experts in one tensor"
            )
        stored[box.param] = dataclasses.replace(box, transposed=False)
    return stored


def restored(reader: MXFP4Reader, box: Region, device: torch.device, dtype: torch.dtype) -> QuantizedLinear:
    """The weight of a region of `stacks`, its rows in our order: those of one expert after the other."""
    weight = reader.weight(box.source, device, dtype)
    experts, rows, columns = weight.shape
    tensors = [box.from_disk(x.unflatten(0, (experts, rows))).flatten(0, 1) for x in (weight.packed, weight.scale)]
    return QuantizedLinear(MXFP4Weight("mxfp4", (experts * rows, columns), dtype, BLOCK, *tensors))


def exported(module: Any, experts: int, box: Region) -> tuple[dict[str, Any], dict[str, Region]]:
    """({name on disk: (tensor, index)}, {name: its region}) of a weight of a region of `stacks`, as `Exported.add`
    takes them."""
    weight = module.operand
    shape = experts, weight.shape[0] // experts, weight.shape[1] // BLOCK
    parts = {"blocks": weight.packed.view(*shape, BLOCK // 2), "scales": weight.scale.view(shape)}
    tensors = {f"{box.source}_{part}": (tensor, ()) for part, tensor in parts.items()}
    return tensors, {name: dataclasses.replace(box, source=name) for name in tensors}
