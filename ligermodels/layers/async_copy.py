"""Copies of small tensors to the host that nobody waits for until they are read."""

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
