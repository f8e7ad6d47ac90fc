"""launch(kernel, grid, ...): kernel[grid](...) in less time of the host.

kernel[grid](*args) works out in Python, at every call, which compiled variant the arguments need: their dtypes, the
alignment of pointers, which integers are 1 or multiples of 16, constants and options. `launch` does the same
in one function generated for the kernel, and calls the C launcher of a variant that it has seen before. Decoding and
eager steps of few tokens are limited by the host: without this file an eager step of 1 x 1024 tokens takes 45 to 60 %
longer, and decoding 20 to 40 %.

Everything else falls back on kernel[grid](*args): the first call of a variant, torch.compile, the interpreter, devices
other than CUDA, versions of Triton other than 3.6 to 3.9, whose private names are used here, grids that are functions,
annotated arguments, tensor descriptors, autotuned kernels, kernels that need scratch memory, and hooks, profilers and
debug modes, which watch launches.
It does not notice that a global constant of a kernel changed after the first launch, where Triton raises an error.
"""

import re
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from ligermodels.kernels._triton import HAS_TRITON, INTERPRET, triton

_VERSION = tuple(map(int, re.findall(r"\d+", triton.__version__)[:2])) if HAS_TRITON else (0, 0)
_KNOWN = (3, 6) <= _VERSION <= (3, 9)
_DIRECT = _KNOWN and not INTERPRET and torch.version.cuda is not None

if _KNOWN:
    from triton import knobs
    from triton.runtime.jit import JITFunction, native_specialize_impl

_KERNELS: dict[int, tuple] = {}
"""By a kernel's id: its generated function, its variants, and itself, so that no other kernel gets that id."""


def launch(kernel: Any, grid: Any, *args: Any, **options: Any) -> None:
    """kernel[grid](*args, **options) on the device of its tensors, on the current stream."""
    if torch.compiler.is_compiling():  # which sees a plain launch, and chooses the device itself
        kernel[grid](*args, **options)
        return
    for x in args:
        if isinstance(x, Tensor):
            break
    if x.is_cuda and x.get_device() != torch.cuda.current_device():
        with torch.cuda.device(x.device):
            launch(kernel, grid, *args, **options)
        return
    if not _DIRECT or type(grid) is not tuple or _watched(kernel):
        kernel[grid](*args, **options)
        return
    try:
        missed = _KERNELS[id(kernel)][0](grid, *args, **options)
    except (KeyError, AttributeError):  # a new kernel, or no tensor where there has always been one
        missed = _generate(kernel, args)(grid, *args, **options)
    if missed:
        _KERNELS[id(kernel)][1][missed] = _variant(kernel[grid](*args, **options))


def _watched(kernel: Any) -> bool:
    """True if a hook, a profiler or a debug mode has to see each launch, or it is compiled in another way."""
    runtime = knobs.runtime
    return (
        type(kernel) is not JITFunction
        or kernel.pre_run_hooks
        or runtime.debug
        or knobs.compilation.instrumentation_mode
        or runtime.add_stages_inspection_hook is not None
        or getattr(runtime.launch_enter_hook, "calls", runtime.launch_enter_hook)
        or getattr(runtime.launch_exit_hook, "calls", runtime.launch_exit_hook)
    )


def _generate(kernel: Any, args: tuple) -> Callable:
    """A function of (grid, *args, **options) that launches a variant seen before, and else returns its key.

    The key holds of a tensor its dtype, device and alignment, of any other argument what Triton's own function says of
    it, and the constants and options. A tensor goes to the launcher as an address. An argument that is a tensor in one
    call and None in another is left to Triton's function.
    """
    _, variants, tensors, _ = _KERNELS.get(id(kernel), (None, {}, set(kernel.arg_names), kernel))
    tensors = tensors & {name for name, arg in zip(kernel.arg_names, args, strict=False) if isinstance(arg, Tensor)}
    scope = dict(
        _device=torch._C._cuda_getDevice,
        _stream=torch._C._cuda_getCurrentRawStream,
        _specialize=native_specialize_impl,
        _backend=kernel.device_caches[torch._C._cuda_getDevice()][3],
        _variants=variants,
        _rest=((), (1, 1), (1,), ()),  # the dims that a grid of that length lacks
    )
    names, key, values = [], ["_device()"], []
    for param in kernel.params:
        name = value = param.name
        if param.is_constexpr:
            key.append(name)
        elif name in tensors:
            value = f"_{name}"
            key += [f"{name}.dtype", f"{name}.get_device()", f"({value} := {name}.data_ptr()) & 15"]
        else:
            specialize, align = not param.do_not_specialize, not param.do_not_specialize_on_alignment
            key.append(f"_specialize(_backend, {name}, {param.is_const}, {specialize}, {align})")
        names.append(f"{name}=_default_{name}" if param.has_default else name)
        values.append(value)
        scope[f"_default_{name}"] = param.default
    tail = f"*_head, ({', '.join(values)},)" if _VERSION > (3, 6) else f"*_head, {', '.join(values)}"
    source = f"""def run(_grid, {", ".join(names)}, **_options):
    _key = ({", ".join(key)}, *_options.items())
    _variant = _variants.get(_key)
    if _variant is None:
        return _key
    _launch, _head, _ = _variant
    _launch(*_grid, *_rest[len(_grid)], _stream(_key[0]), {tail})
"""
    exec(source, scope)
    run = scope["run"]
    if any((not p.is_constexpr and p.annotation_type) or p._param.kind != p._param.POSITIONAL_OR_KEYWORD
           for p in kernel.params):  # fmt: skip
        run = lambda *args, **options: ("always missed",)  # noqa: E731
    _KERNELS[id(kernel)] = run, variants, tensors, kernel
    return run


def _variant(compiled: Any) -> tuple | None:
    """The C launcher of a compiled kernel, its arguments before the kernel's own, and their owner, to stay alive.

    None where a launch takes more than that: the variant is then missed each time.
    """
    from triton.backends.nvidia.driver import CudaLauncher

    run: Any = getattr(compiled, "run", None)
    if (
        type(run) is not CudaLauncher
        or type(run.launch) is FunctionType  # around the C launcher, where an argument is a descriptor
        or run.global_scratch_size
        or run.profile_scratch_size
        or getattr(run, "gsan_enabled", False)
    ):
        return None
    head: tuple = (compiled.function, run.launch_cooperative_grid, run.launch_pdl)
    if _VERSION > (3, 6):
        head += compiled.packed_metadata, None, None, None, None, None, run.arg_annotations, run.kernel_signature
    else:
        head += None, None, compiled.packed_metadata, None, None, None
    return run.launch, head, compiled
