"""What the tests change where Triton is interpreted. Two habits of the interpreter take most of its time, and are
switched off here: it patches Triton's language again at each call of a function inside a kernel, here once per kernel;
and it computes each sum and product of int32 once more in int64, to find an overflow for which no tensor of a test is
large enough. One fault is mended: it rounds fp32 to FP8 without carrying into the exponent, so that 127 becomes 64."""

import dataclasses
import functools
import inspect

import torch

from ligermodels.kernels import _chunks
from ligermodels.kernels._triton import INTERPRET, tl

if INTERPRET:
    _chunks.CHUNK_MULTIPLE = 16  # several chunks of few tokens
CHUNK = _chunks.CHUNK_MULTIPLE
"""Tokens of the smallest chunk."""


@functools.cache
def _languages(fn) -> list:
    """The modules of Triton's language among the globals of `fn`."""
    return [m for m in fn.__globals__.values() if inspect.ismodule(m) and m in (tl, tl.core)]


def _patched_once(patch):
    done: list = []

    @functools.wraps(patch)
    def wrapper(fn):
        missing = [m for m in _languages(fn) if m not in done]
        if not missing:
            return None  # inside a kernel, where nobody uses the result
        scope, of_kernel = patch(fn), not done
        done.extend(missing)
        if of_kernel:
            restore = scope.restore
            scope.restore = lambda: (done.clear(), restore())
        return scope

    return wrapper


def _with_rounded_fp8(convert):
    """The interpreter's conversion of floats, by torch's where fp32 becomes FP8."""

    @functools.wraps(convert)
    def wrapper(values, source, target, rounding_mode):
        low = {"fp8e4nv": torch.float8_e4m3fn, "fp8e5": torch.float8_e5m2}.get(target.name)
        if low is None or source.name != "fp32":
            return convert(values, source, target, rounding_mode)
        floats = torch.from_numpy(values.copy()).view(torch.float32)
        return floats.to(low).view(torch.uint8).numpy()

    return wrapper


if INTERPRET:
    from triton.runtime import interpreter

    interpreter._convert_float = _with_rounded_fp8(interpreter._convert_float)

    if hasattr(interpreter, "_LangPatchScope"):  # in other versions of Triton the tests only take longer
        interpreter._patch_lang = _patched_once(interpreter._patch_lang)
    options = interpreter.interpreter_builder.options
    interpreter.interpreter_builder.options = dataclasses.replace(options, sanitize_overflow=False)
