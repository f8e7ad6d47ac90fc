"""Launch a Triton kernel in less host time.

    launch(kernel, grid, *args, **options)        does what        kernel[grid](*args, **options)        does

Why: at every call, kernel[grid](...) works out in Python which compiled variant the arguments need, from their dtypes,
the alignment of pointers, the integers that are 1 or multiples of 16, the constants and the options. Decoding and eager
steps of few tokens are bound by that: with kernel[grid] an eager step of 1 x 1024 tokens takes 45 to 60 % longer, and
decoding 20 to 40 %.

How: the first call of a variant goes through Triton, which compiles it. `launch` then stores the variant's C launcher
in a dict, under a key made of the arguments; later calls look the key up and call the C launcher. The key and the call
are one Python function per kernel, whose source `_generate` writes and executes, as dataclasses and Triton itself do:
loops over *args would take as long as what they replace. For kernel(x, n, BLOCK: tl.constexpr) the source is

    def run(_grid, x, n, BLOCK, **_options):
        _key = (_device(), x.dtype, x.get_device(), (_x := x.data_ptr()) & 15, _specialize(_backend, n, ...), BLOCK,
                *_options.items())
        _variant = _variants.get(_key)
        if _variant is None:
            return _key
        _launch, _head, _ = _variant
        _launch(*_grid, *_rest[len(_grid)], _stream(_key[0]), *_head, (_x, n, BLOCK))

Everything else goes through kernel[grid](*args): torch.compile, the interpreter, devices other than CUDA, versions of
Triton other than 3.6 to 3.9 (private names are used), grids that are functions, annotated arguments, autotuned
kernels, kernels with scratch memory, and hooks, profilers and debug modes that watch launches.
A global constant of a kernel that changes after its first launch goes unnoticed; Triton would raise an error.
"""

import re
from collections.abc import Callable
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
"""id(kernel) -> generated function, variants, arguments that are tensors, and the kernel, which keeps its id taken."""


def launch(kernel: Any, grid: Any, *args: Any, **options: Any) -> None:
    """kernel[grid](*args, **options) on the device of its tensors, on the current stream."""
    if torch.compiler.is_compiling():  # Inductor needs a plain launch, and chooses the device itself
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
    except (KeyError, AttributeError):  # a new kernel, or None where there has always been a tensor
        missed = _generate(kernel, args)(grid, *args, **options)
    if missed:
        _KERNELS[id(kernel)][1][missed] = _variant(kernel[grid](*args, **options))


def why_through_triton() -> str | None:
    """Why kernels are launched by kernel[grid]; None where a launch has found their C launcher."""
    if not _KNOWN:
        return f"Triton {triton.__version__} is none of 3.6 to 3.9"
    if not _DIRECT:
        return "kernels are interpreted" if INTERPRET else "torch is not built for CUDA"
    if not any(variant for _, variants, *_ in _KERNELS.values() for variant in variants.values()):
        return "a hook, a profiler or a debug mode of Triton watches launches"
    return None


def _watched(kernel: Any) -> bool:
    """True if a hook, a profiler or a debug mode watches launches, or the kernel is no plain JITFunction."""
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
    """A function of (grid, *args, **options) that launches a known variant, or returns the key of an unknown one.

    Key: dtype, device and alignment of each tensor; Triton's own specialisation of other arguments; constants and
    options. An argument that is a tensor in one call and None in another is specialised by Triton's function too.
    """
    _, variants, tensors, _ = _KERNELS.get(id(kernel), (None, {}, set(kernel.arg_names), kernel))
    tensors = tensors & {name for name, arg in zip(kernel.arg_names, args, strict=False) if isinstance(arg, Tensor)}
    scope = dict(
        _device=torch._C._cuda_getDevice,
        _stream=torch._C._cuda_getCurrentRawStream,
        _specialize=native_specialize_impl,
        _backend=kernel.device_caches[torch._C._cuda_getDevice()][3],
        _variants=variants,
        _rest=((), (1, 1), (1,), ()),  # pads a grid to three dims
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
    """(C launcher, its arguments before the kernel's own, the compiled kernel, which owns them). Where an argument is a
    tensor descriptor, the launcher is Triton's function around it, which encodes the descriptor.

    None where a launch needs more than that; every call of the variant then goes through Triton.
    """
    from triton.backends.nvidia.driver import CudaLauncher

    run: Any = getattr(compiled, "run", None)
    if (
        type(run) is not CudaLauncher
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
