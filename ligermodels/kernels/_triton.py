"""Triton, or a stand-in for it, so that every kernel file imports on any machine; and the helpers of launches.

`use_triton` decides between a Triton kernel and its PyTorch reference.
"""

import contextlib
import functools
import importlib.util
import operator
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from ligermodels.errors import InputError
from ligermodels.kernels._tested import warn_if_untested

IS_INSTALLED = importlib.util.find_spec("triton") is not None

try:
    # Importing Triton takes 0.3 s, which a build of torch without GPUs skips unless kernels are interpreted.
    if not (torch.version.cuda or torch.version.hip or torch.version.xpu or "TRITON_INTERPRET" in os.environ):
        raise ImportError
    import triton
    import triton.language as tl
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

    HAS_TRITON = True
    INTERPRET = bool(triton.knobs.runtime.interpret)  # TRITON_INTERPRET=1: kernels run in Python, on the CPU
except ImportError:

    class _Absent:
        """Stands in for triton and triton.language, so that decorators and annotations can be evaluated."""

        def __getattr__(self, name: str) -> "_Absent":
            return self

        def __getitem__(self, grid: Any) -> "_Absent":
            return self

        def __call__(self, *args: Any, **kwargs: Any) -> "_Absent":
            return self

    triton: Any = _Absent()  # type: ignore[no-redef]
    tl: Any = triton  # type: ignore[no-redef]
    gdc_launch_dependents = gdc_wait = triton
    HAS_TRITON = False
    INTERPRET = False


def use_triton(x: Tensor) -> bool:
    """True if ops on `x` run as Triton kernels: on a CUDA, HIP or XPU device, or interpreted on the CPU."""
    return HAS_TRITON and (x.is_cuda or x.device.type == "xpu" or (INTERPRET and x.device.type == "cpu"))


FEW_ROWS = 64
"""Norms and activations of at most this number of rows, as in decoding, overlap the kernel before them."""


def overlaps_launches(x: Tensor) -> bool:
    """True where a kernel may start while the one before it ends (programmatic dependent launch): on Hopper and later.

    The kernel is launched with the options `overlapping(True)`, and calls `wait_for_previous(True)` before its first
    load or store; or `let_next_start(True)` and `wait(True)`, with early loads between them. False under torch.compile:
    Inductor cannot analyse such a kernel, and would copy its inputs.
    """
    return x.is_cuda and not (INTERPRET or torch.compiler.is_compiling()) and _capability(x.get_device()) >= 90


def has_ptx(x: Tensor) -> bool:
    """True where a kernel may use inline PTX: on NVIDIA GPUs from Ampere on."""
    return x.is_cuda and not INTERPRET and cuda_capability(x.get_device()) >= 80


def overlapping(overlap: bool) -> dict[str, bool]:
    """Options of a launch that may overlap; only CUDA's backend knows launch_pdl."""
    return {"launch_pdl": True} if overlap else {}


@triton.jit
def let_next_start(OVERLAP: tl.constexpr):
    """Lets the next kernel start. Until `wait`, this one stores nothing, and loads only what is older than the last
    launch that does not overlap, as weights are, and states of earlier steps: the kernels launched since then may all
    be running, and what they write is not yet visible."""
    if OVERLAP:
        gdc_launch_dependents()


@triton.jit
def wait(OVERLAP: tl.constexpr):
    """Waits until the kernel before this one has ended."""
    if OVERLAP:
        gdc_wait()


@triton.jit
def wait_for_previous(OVERLAP: tl.constexpr):
    """Lets the next kernel start, and waits until the kernel before this one has ended."""
    let_next_start(OVERLAP)
    wait(OVERLAP)


def assume_constant_result(function: Callable) -> Callable:
    """torch.compiler.assume_constant_result without its import of torch._dynamo, which takes a second.

    It sets the same mark as torch 2.11 to 2.13; a test compares the two.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums and statistics over `dtype`: fp64 for fp64, else fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up; triton.cdiv takes the host 2 us, and so does triton.next_power_of_2."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The smallest power of two >= n, for n >= 1."""
    return 1 << (n - 1).bit_length()


_as_if_capturing = False


def is_capturing() -> bool:
    """True while a CUDA graph is captured on the current stream, or inside `as_if_capturing`."""
    return _as_if_capturing or torch.cuda.is_current_stream_capturing()


@contextlib.contextmanager
def as_if_capturing() -> Iterator[None]:
    """Makes `is_capturing` True: for a warm-up run before the capture itself."""
    global _as_if_capturing
    before, _as_if_capturing = _as_if_capturing, True
    try:
        yield
    finally:
        _as_if_capturing = before


def once_differentiable(backward: Callable) -> Callable:
    """For the backward of an autograd.Function that has no second derivative: raises InputError where one is asked for.

    A backward runs with gradients on only under create_graph=True. torch's function of this name raises later, and only
    if the incoming gradient requires a gradient: after a loss it does not, and the second derivative would be lost.
    """
    op = f"{backward.__module__}.{backward.__qualname__.removesuffix('.backward')}"

    @functools.wraps(backward)
    def wrapper(ctx: Any, *grads: Any) -> Any:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise InputError(
                f"{op} has no second derivative, which create_graph=True asks for. Leave create_graph out, or call the "
                "op's _reference function in its place, or compute on the CPU, in one process: ops are PyTorch there."
            )
        return backward(ctx, *grads)

    return wrapper


def apply(function: Any, *args: Any) -> Any:
    """function.apply(*args) of an autograd.Function, without the Python of torch's own apply, which serves transforms
    of torch.func and takes the host 2 us."""
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return function.apply(*args)
    return super(torch.autograd.Function, function).apply(*args)


def last_dim_contiguous(x: Tensor) -> Tensor:
    """x, copied if its last dim is not contiguous; kernels take any other strides."""
    return x if x.stride(-1) == 1 else x.contiguous()


def as_rows(x: Tensor) -> tuple[Tensor, int, int]:
    """x [..., W] as rows of W: (tensor, number of rows, stride between rows).

    A contiguous x is returned as it is, because a view costs host time. Other tensors are flattened to [T, W], and
    copied only where no strides describe that.
    """
    width = x.shape[-1]
    if x.is_contiguous():
        return x, x.numel() // width, width
    x = last_dim_contiguous(x if x.dim() == 2 else x.reshape(-1, width))
    return x, x.shape[0], x.stride(0)


MAX_HEADS = 128
"""From `heads_of`. H is a constant of kernels, and of transposed heads [..., H, T, W] it would be a length: without a
limit, each length compiles a kernel."""


def heads_of(*tensors: Tensor) -> int:
    """H if kernels need two strides to find the rows of tensors [..., T, H, W], as in a part of each head; else 1, as
    for more than MAX_HEADS, whose rows are then copied."""
    first = tensors[0]
    if first.dim() < 4 or first.shape[-2] > MAX_HEADS:
        return 1
    if all([x.stride(-3) == x.shape[-2] * x.stride(-2) for x in tensors]):
        return 1
    return operator.index(first.shape[-2])


def as_heads(x: Tensor, heads: int) -> tuple[Tensor, int, int, int]:
    """x [..., heads, W] as rows of W: (tensor, number of rows, stride between tokens, stride between heads)."""
    if heads == 1:
        return *as_rows(x), 0
    x = last_dim_contiguous(x.flatten(0, -3))
    return x, x.shape[0] * heads, x.stride(0), x.stride(1)


# Each property of a device has two functions: one that Dynamo treats as a constant, and one that caches.


@assume_constant_result
def cuda_capability(index: int | None) -> int:
    """Compute capability of CUDA device `index`, 10 major + minor; 0 if it is not an NVIDIA GPU."""
    return _capability(index)


@functools.cache
def _capability(index: int | None) -> int:
    if not torch.cuda.is_available():
        return 0
    major, minor = (0, 0) if torch.version.cuda is None else torch.cuda.get_device_capability(index)
    capability = 10 * major + minor  # Dynamo accepts an int as a constant, not a tuple
    if HAS_TRITON:
        warn_if_untested(index, capability, triton.__version__)
    return capability


def is_datacenter(index: int | None) -> bool:
    """True on Hopper and datacenter Blackwell: bulk copies (TMA), and more than 200 KiB of shared memory."""
    return cuda_capability(index) // 10 in (9, 10)


@assume_constant_result
def num_sms(index: int | None) -> int:
    """Multiprocessors of CUDA device `index`; 4 where there is no GPU (CPU, interpreter)."""
    return _num_sms(index)


@functools.cache
def _num_sms(index: int | None) -> int:
    if index is None or not torch.cuda.is_available():
        return 4
    return torch.cuda.get_device_properties(index).multi_processor_count
