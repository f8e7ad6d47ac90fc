"""What only hardware can show of an op: that it compiles whole, is captured in a CUDA graph, and never waits."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def forward_backward(op: Callable, inputs: Sequence[Tensor], grads: Sequence[Tensor]) -> list[Tensor]:
    """Outputs of op(*inputs), which are as many as `grads`, and the gradients of the inputs that require one."""
    outputs = op(*inputs)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    trained = [x for x in inputs if x.requires_grad]
    return [*(y.detach() for y in outputs), *torch.autograd.grad(outputs, trained, grads)]


def assert_compiles(op: Callable, inputs: Sequence[Tensor], grads: Sequence[Tensor], **options) -> None:
    """torch.compile(fullgraph=True) of op gives what op gives, forward and backward."""
    torch.compiler.reset()
    compiled = forward_backward(torch.compile(op, fullgraph=True, **options), inputs, grads)
    for actual, expected in zip(compiled, forward_backward(op, inputs, grads), strict=True):
        torch.testing.assert_close(actual, expected)


def assert_captures(op: Callable, inputs: Sequence[Tensor], grads: Sequence[Tensor]) -> None:
    """A CUDA graph of op, forward and backward, replayed on other values, gives what op gives on them."""
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
            x.copy_(torch.randn_like(x))
    graph.replay()
    for actual, expected in zip(captured, forward_backward(op, inputs, grads), strict=True):
        assert torch.equal(actual, expected)


def assert_never_waits(op: Callable, inputs: Sequence[Tensor], grads: Sequence[Tensor]) -> None:
    """Neither direction of op makes the host wait for the device."""
    forward_backward(op, inputs, grads)  # compiles the kernels, which may wait
    torch.cuda.set_sync_debug_mode("error")
    try:
        forward_backward(op, inputs, grads)
    finally:
        torch.cuda.set_sync_debug_mode("default")
