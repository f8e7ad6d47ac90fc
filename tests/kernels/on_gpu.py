"""What only a GPU can show of an op: it compiles whole, is captured in a CUDA graph, and never synchronises."""

import contextlib
import fcntl
import functools
import gc
import os
import tempfile
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor


def large(test: Callable) -> Callable:
    """Marks a test that needs most of a GPU of 80 GB. One of them runs at a time, over all processes of the run."""

    @functools.wraps(test)
    def alone(*args, **options):
        with open(os.path.join(tempfile.gettempdir(), "ligermodels-large-gpu-test"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            try:
                test(*args, **options)
            finally:
                gc.collect()
                torch.cuda.empty_cache()

    small = torch.cuda.is_available() and torch.cuda.get_device_properties(0).total_memory < 70 * 2**30
    return pytest.mark.skipif(small, reason="needs a GPU of 80 GB")(alone)


@contextlib.contextmanager
def never_waits():
    """Whatever synchronises inside raises."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def forward_backward(op: Callable, inputs: Sequence[Tensor], grads: Sequence[Tensor]) -> list[Tensor]:
    """Outputs of op(*inputs), and the gradients of the inputs that require one; `grads` are those of the outputs."""
    outputs = op(*inputs)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    trained = [x for x in inputs if x.requires_grad]
    found = torch.autograd.grad([y for y in outputs if y.requires_grad], trained, grads) if trained else ()
    return [*(y.detach() for y in outputs), *found]


def assert_compiles(op: Callable, inputs: Sequence[Tensor], grads: Sequence[Tensor], **options) -> None:
    """torch.compile(fullgraph=True) of op gives what op gives, forward and backward."""
    torch.compiler.reset()
    _spoil_free_memory()
    compiled = forward_backward(torch.compile(op, fullgraph=True, **options), inputs, grads)
    for actual, expected in zip(compiled, forward_backward(op, inputs, grads), strict=True):
        # Where terms cancel, an element is as exact as they are, which are at most as large as the largest element.
        # Compiled, the weights of one storage are separate matmuls, which add up in another order.
        eps = torch.finfo(actual.dtype).eps if actual.is_floating_point() else 0.0
        atol = max(1e-5, (4 if eps < 1e-6 else 0.5) * eps * expected.abs().max().item()) if actual.numel() else 0.0
        torch.testing.assert_close(actual, expected, rtol=max(1.3e-6, 2 * eps), atol=atol)


def _spoil_free_memory() -> None:
    """Fills free GPU memory with NaN: what a kernel never writes must not be right because of an earlier run."""
    if torch.cuda.is_available():
        spoiled = [torch.full((size,), float("nan"), device="cuda") for size in [2**16] * 64 + [2**23] * 8]
        del spoiled


def assert_captures(op: Callable, inputs: Sequence[Tensor], grads: Sequence[Tensor], *, same_bits: bool = True) -> None:
    """A CUDA graph of op, forward and backward, replayed on other values, gives what op gives on them.

    same_bits: the op adds in a fixed order, and so the bits are the same.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        forward_backward(op, inputs, grads)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = forward_backward(op, inputs, grads)
    with torch.no_grad():
        for x in (*inputs, *grads):
            x.copy_(x.flip(tuple(range(x.dim()))))  # labels stay classes, and probabilities
    graph.replay()
    for actual, expected in zip(captured, forward_backward(op, inputs, grads), strict=True):
        assert actual.isfinite().all()
        if same_bits:
            assert torch.equal(actual, expected)
        else:
            assert (actual - expected).norm() <= 2 * torch.finfo(actual.dtype).eps * expected.norm()


def assert_never_waits(op: Callable, inputs: Sequence[Tensor], grads: Sequence[Tensor]) -> None:
    """Neither the forward nor the backward of op synchronises."""
    forward_backward(op, inputs, grads)  # compiles the kernels, which may synchronise
    with never_waits():
        forward_backward(op, inputs, grads)
