"""Copies between host and device that run beside the caller, which waits only when it reads the result."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class AsyncToHost:
    """An asynchronous copy of a small tensor to the host; `result` waits for it."""

    def __init__(self, x: Tensor):
        self._values, self._copied = x, None
        if x.is_cuda:
            self._values = torch.empty_like(x, device="cpu", pin_memory=True)
            self._values.copy_(x, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record(torch.cuda.current_stream(x.device))  # which may not be the current device

    def result(self) -> Tensor:
        if self._copied is None:
            return self._values.cpu()
        self._copied.synchronize()
        return self._values.clone()  # in memory that is not pinned


def to_device(values: Sequence[Any] | Tensor, device: torch.device, dtype: torch.dtype = torch.int64) -> Tensor:
    """A tensor of host values, copied without waiting for the device."""
    on_host = torch.as_tensor(values, dtype=dtype)
    if device.type == "cuda":
        on_host = on_host.pin_memory()
    return on_host.to(device, non_blocking=True)
