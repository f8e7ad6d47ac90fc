"""MXFP4 on disk, as gpt-oss was released: experts in 4 bits, read as they are or dequantised, and written again.

A stacked weight that is [E, K, N] on disk in floats, under its name, is there as two tensors in 4 bits:

    NAME_blocks   uint8 [E, N, K / 32, 16]   codes of 32 neighbours of a row, the first in the low bits
    NAME_scales   uint8 [E, N, K / 32]       the exponents of blocks

`MXFP4Reader` shows them as NAME in bf16, so that the table of names describes both. A row moves with its scales: an
order of rows in the table (gpt-oss has gate and up in turn) applies to both tensors, and back when they are saved.
"""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, Self

import torch
from torch import Tensor

from ligermodels.checkpoint.weights import Region, TensorInfo
from ligermodels.errors import CheckpointError, InputError
from ligermodels.kernels.linear.mxfp4 import BLOCK, MXFP4Weight as MXFP4Weight
from ligermodels.layers.quantized import QuantizedLinear


def is_mxfp4(config: Any) -> bool:
    """Whether the contents of a config.json say that the checkpoint is in MXFP4."""
    saved = config.get("quantization_config") if isinstance(config, Mapping) else None
    return isinstance(saved, Mapping) and saved.get("quant_method") == "mxfp4"


def dequantized_config(config: Any) -> Any:
    """The contents of a config.json, of a checkpoint in MXFP4 those of a dequantised one."""
    return {k: v for k, v in config.items() if k != "quantization_config"} if is_mxfp4(config) else config


def dequantized_headers(
    headers: Mapping[str, TensorInfo], where: str
) -> tuple[dict[str, TensorInfo], dict[str, tuple[str, str]]]:
    """(the headers with weights in 4 bits as [E, K, N] in bf16, {name of such a weight: names of blocks and scales}).

    Raises CheckpointError for blocks and scales that do not fit.
    """
    shown: dict[str, TensorInfo] = {}
    packed: dict[str, tuple[str, str]] = {}
    for name, info in headers.items():
        weight, _, part = name.rpartition("_")
        if part not in ("blocks", "scales") or info.dtype != torch.uint8:
            shown[name] = info
        elif weight not in packed:
            packed[weight] = f"{weight}_blocks", f"{weight}_scales"
            blocks, scales = map(headers.get, packed[weight])
            shown[weight] = _dequantized(weight, blocks, scales, where)
    return shown, packed


def _dequantized(name: str, blocks: TensorInfo | None, scales: TensorInfo | None, where: str) -> TensorInfo:
    shapes = [() if info is None or info.dtype != torch.uint8 else info.shape for info in (blocks, scales)]
    if len(shapes[1]) != 3 or shapes[0] != (*shapes[1], BLOCK // 2):
        parts = ("missing" if info is None else f"{info.dtype} {list(info.shape)}" for info in (blocks, scales))
        raise CheckpointError(
            f"{where}: {name}_blocks is {next(parts)}, {name}_scales {next(parts)}; expected uint8 [E, N, K / {BLOCK}, "
            f"{BLOCK // 2}] and [E, N, K / {BLOCK}] of MXFP4"
        )
    experts, rows, groups = shapes[1]
    return TensorInfo(torch.bfloat16, (experts, groups * BLOCK, rows))


class MXFP4Reader:
    """A `weights.Reader` of another one, with its weights in 4 bits as [E, K, N] in bf16, which is exact.

    packed: {name: (name of its blocks, of its scales)}. types: {name: "MXFP4"}, and those of a GGUF file.
    device: where they are dequantised.
    Raises CheckpointError for blocks and scales that do not fit.
    """

    def __init__(self, reader: Any, device: torch.device | None = None):
        self._reader, self._device = reader, device or torch.device("cpu")
        self.source, self.is_mapped = reader.source, reader.is_mapped
        self.headers, self.packed = dequantized_headers(reader.headers, reader.source)
        types = getattr(reader, "types", {})  # of a GGUF file
        self.types = {n: types[n] for n in self.headers if n in types} | dict.fromkeys(self.packed, "MXFP4")

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
