"""Fixtures of the kernels' tests, and an interpreter that does not do twice what takes it half of its time."""

import contextlib
import functools
import inspect
import re
import sys

import pytest
import torch

from ligermodels.kernels._triton import INTERPRET, tl
from tests.kernels.on_gpu import alone, give_back

if INTERPRET:
    from triton.runtime import interpreter


@functools.cache
def languages(fn) -> list:
    """The modules of Triton's language that `fn` sees under a name of their own."""
    return [m for m in fn.__globals__.values() if inspect.ismodule(m) and m in (tl, tl.core)]


def patched_once(patch):
    """`patch` of Triton's interpreter, which makes the language one of numpy, for the kernel and what else that lacks.

    The interpreter calls it for each call of a function inside a kernel too, where it finds all as the kernel left it.
    """
    done: list = []

    @functools.wraps(patch)
    def wrapper(fn):
        missing = [m for m in languages(fn) if m not in done]
        if not missing:
            return None  # inside a kernel, where nobody asks for it
        scope, of_kernel = patch(fn), not done
        done.extend(missing)
        if of_kernel:
            restore = scope.restore
            scope.restore = lambda: (done.clear(), restore())
        return scope

    return wrapper


if INTERPRET and hasattr(interpreter, "_LangPatchScope"):  # elsewhere tests take longer, and are the same
    interpreter._patch_lang = patched_once(interpreter._patch_lang)


LARGE = re.compile("2_31|beyond_int32|wide_strides|memory")
"""In the name of a test: on a GPU it takes tens of GiB."""


@pytest.fixture(autouse=True)
def memory_of_the_gpu(request):
    """One large test at a time, whatever the process that runs it; none leaves memory taken that others want."""
    if not torch.cuda.is_available():
        yield
        return
    on_gpu = request.node.get_closest_marker("gpu") is not None
    with alone() if on_gpu and LARGE.search(request.node.name) else contextlib.nullcontext():
        yield
    give_back()


@pytest.fixture
def products(monkeypatch):
    """The shapes (rows, inner, columns) of the matrix products that the op asks for."""
    seen = []

    def record(name, first):
        real = getattr(torch, name)

        def product(*args, **kwargs):
            a, b = args[first : first + 2]
            seen.append((*a.shape, b.shape[1]))
            return real(*args, **kwargs)

        monkeypatch.setattr(torch, name, product)

    record("mm", 0)
    record("addmm", 1)
    return seen


@pytest.fixture
def without_triton(monkeypatch):
    """Ops run what they run where there is no Triton."""
    for name, module in list(sys.modules.items()):
        if name.startswith("ligermodels.kernels") and hasattr(module, "use_triton"):
            monkeypatch.setattr(module, "use_triton", lambda x: False)
