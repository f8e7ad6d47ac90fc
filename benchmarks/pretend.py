"""Ops run as on a GPU of any capability, on a machine without one: nothing is computed, and launches are recorded.

Tensors are on meta, without memory. In the frames of ligermodels they say that they are on a CUDA device, so that ops
choose kernels, tiles and options as they would there; Triton's own code then specialises the arguments of a launch.

Triton must not be interpreted: TRITON_INTERPRET=0 in the environment of a process that has not imported ligermodels.
"""

import contextlib
import inspect
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple
from unittest import mock

import torch
import triton
from torch.overrides import TorchFunctionMode
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime import jit

from ligermodels.kernels import _launch, _triton

MULTIPROCESSORS = {80: 108, 89: 128, 90: 132, 100: 148, 120: 170}
"""Of an A100, RTX 4090, H100 and H200, B200, RTX 5090."""


class Launch(NamedTuple):
    """A variant of a kernel: what Triton compiles."""

    kernel: Any
    signature: dict[str, str]
    constants: dict[tuple[int, ...], Any]
    attributes: dict[tuple[int, ...], Any]
    options: dict[str, Any]

    @property
    def key(self) -> str:
        """Equal for equal variants, on every machine."""
        options = {name: value for name, value in self.options.items() if name != "extern_libs"}  # has paths
        return repr((self.kernel._fn_name, self.signature, self.constants, self.attributes, options))


class _OnMeta(TorchFunctionMode):
    """What would be allocated on a CUDA device is on meta."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.pin_memory:
            return args[0]
        if kwargs.get("device") is not None:
            kwargs = {**kwargs, "device": "meta"}
        return func(*("meta" if isinstance(x, torch.device) else x for x in args), **kwargs)


def _seen_by_us(name: str, value: Any) -> property:
    """An attribute of tensors that has this value in the frames of ligermodels, and the true one in others."""
    true = inspect.getattr_static(torch._C.TensorBase, name)

    def get(x: torch.Tensor) -> Any:
        ours = sys._getframe(1).f_globals.get("__name__", "").startswith("ligermodels")
        return value if ours else true.__get__(x)

    return property(get)


def _address(x: torch.Tensor) -> int:
    """Distinct storages are far apart, and each begins at a multiple of 256."""
    return x.untyped_storage()._cdata * 2**12 + x.storage_offset() * x.element_size()


@contextlib.contextmanager
def gpu(capability: int) -> Iterator[list[Launch]]:
    """Inside, tensors without memory (torch.empty(..., device="meta")) are those of a GPU of this capability.

    Yields the list of launches, which grows; launches of one variant are one.
    """
    backend = make_backend(target(capability))
    launches: dict[str, Launch] = {}
    binders: dict[Any, Any] = {}

    found: list[Launch] = []

    def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        binder = binders.get(kernel)
        if binder is None:
            binder = binders[kernel] = jit.create_function_from_signature(kernel.signature, kernel.params, backend)
        bound, specialization, rest = binder(*args, **options)
        parsed, signature, constants, attributes = kernel._pack_args(backend, options, bound, specialization, rest)
        launch = Launch(kernel, signature, constants, attributes, parsed.__dict__)
        if launch.key not in launches:
            launches[launch.key] = launch
            found.append(launch)

    attributes = {
        "device": _seen_by_us("device", torch.device("cuda", 0)), "is_cuda": _seen_by_us("is_cuda", True),
        "is_meta": _seen_by_us("is_meta", False), "get_device": lambda x: 0, "data_ptr": _address,
    }  # fmt: skip
    with contextlib.ExitStack() as stack:
        for name, value in attributes.items():
            stack.enter_context(mock.patch.object(torch.Tensor, name, value))
        stack.enter_context(mock.patch.object(torch.version, "cuda", torch.version.cuda or "12.8"))
        stack.enter_context(mock.patch.object(torch.cuda, "current_device", lambda: 0))
        stack.enter_context(mock.patch.object(torch.cuda, "is_current_stream_capturing", lambda: False))
        stack.enter_context(mock.patch.object(_triton, "_capability", lambda index: capability))
        stack.enter_context(mock.patch.object(_triton, "_num_sms", lambda index: MULTIPROCESSORS[capability]))
        stack.enter_context(mock.patch.object(_launch, "_DIRECT", False))
        stack.enter_context(mock.patch.object(jit.JITFunction, "run", run))
        stack.enter_context(_OnMeta())
        yield found


def target(capability: int) -> GPUTarget:
    return GPUTarget("cuda", capability, 32)


assert _triton.HAS_TRITON and not _triton.INTERPRET, f"triton {triton.__version__} is interpreted: TRITON_INTERPRET=0"
