"""Checks of arguments that many ops share."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ligermodels.errors import InputError


def describe(x: Tensor) -> str:
    return f"shape {tuple(x.shape)} and dtype {x.dtype} on {x.device}"


def check_operand(where: str, name: str, x: Tensor, shape: Sequence[int], beside: str, other: Tensor) -> None:
    """Raises InputError unless x is floating point, of this shape and on the device of `other`, which is called
    `beside`."""
    if x.shape != shape or x.device != other.device or not x.is_floating_point():
        expected = f"floating point {tuple(shape)} on {other.device}"
        raise InputError(
            f"{where}: {name} has {describe(x)}; expected {expected}, beside {beside} {tuple(other.shape)}."
        )


def check_bounds(where: str, cu_seqlens: Tensor, x: Tensor, *, also_on_cpu: bool = False) -> None:
    """Raises InputError unless cu_seqlens are bounds of sequences that lie end to end in the one row of x [1, T, ...].

    also_on_cpu: they may be there, wherever x is. Only there are values checked: elsewhere that would synchronise.
    """
    (rows, length), on_cpu = x.shape[:2], cu_seqlens.device.type == "cpu"
    is_on_device = cu_seqlens.device == x.device or (on_cpu and also_on_cpu)
    if rows != 1 or cu_seqlens.dim() != 1 or len(cu_seqlens) < 2 or cu_seqlens.dtype != torch.int32 or not is_on_device:
        raise InputError(
            f"{where}: cu_seqlens has {describe(cu_seqlens)} for {rows} rows; expected torch.int32 [N + 1] with N >= 1 "
            f"on {x.device}{' or the CPU' if also_on_cpu else ''}, and packed sequences end to end in one row"
        )
    if on_cpu and not torch.compiler.is_compiling():
        bounds = cu_seqlens.tolist()
        if bounds != sorted(bounds) or (bounds[0], bounds[-1]) != (0, length):
            raise InputError(
                f"{where}: cu_seqlens runs from {bounds[0]} to {bounds[-1]}; it must ascend from 0 to the number of "
                f"tokens, {length}"
            )


def check_label_tensor(where: str, labels: Tensor, tokens: Sequence[int], device: torch.device) -> None:
    """Raises InputError unless labels are int64 or int32 of shape `tokens`, on `device` or on the CPU."""
    if labels.shape != tokens:
        raise InputError(
            f"{where}: labels {tuple(labels.shape)} need one entry per token, {tuple(tokens)}; "
            "if labels are shifted by one, the hidden states or logits lose their last position too."
        )
    if labels.dtype not in (torch.int64, torch.int32):
        raise InputError(f"{where}: labels are {labels.dtype}; they are class indices (int64, int32).")
    if labels.device != device and (labels.device.type != "cpu" or device.type == "meta"):
        raise InputError(f"{where}: labels are on {labels.device}; they must be on {device} or on the CPU.")


def check_labels(labels: Tensor, valid: Tensor, vocab: int, ignore_index: int) -> None:
    """Raises InputError for a valid label outside [0, vocab). For references only: it synchronises."""
    wrong = valid & ((labels < 0) | (labels >= vocab))
    if not torch.compiler.is_compiling() and not wrong.is_meta and bool(wrong.any()):
        raise InputError(
            f"labels contain {labels[wrong][0].item()}, which is neither a class in [0, {vocab}) nor "
            f"ignore_index={ignore_index}. Do the tokenizer and the head have the same vocabulary?"
        )
