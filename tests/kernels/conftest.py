"""Without a GPU these tests run the kernels in Triton's interpreter, which a process has for all of its tests or for
none: `pytest tests/kernels` switches it on. The other tests run what a CPU user runs, so in a run with both, these are
skipped. TRITON_INTERPRET in the environment decides for either."""

import os
import warnings
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
HOW = (
    "tests/kernels is skipped: without a GPU its kernels run interpreted, in a run of their own. For all tests, type "
    "`pytest tests/kernels` and `pytest tests --ignore tests/kernels`"
)


def pytest_configure(config):
    paths = [Path(config.invocation_params.dir, argument.split("::")[0]).resolve() for argument in config.args]
    if all(path.is_relative_to(HERE) for path in paths) and not torch.cuda.is_available():
        os.environ.setdefault("TRITON_INTERPRET", "1")
    import tests.kernels.interpreter  # noqa: F401  # imports Triton, or not


def pytest_collection_modifyitems(items):
    from ligermodels.kernels._triton import INTERPRET

    skipped = [item for item in items if item.path.is_relative_to(HERE)]
    if skipped and not (INTERPRET or torch.cuda.is_available() or "TRITON_INTERPRET" in os.environ):
        warnings.warn(pytest.PytestWarning(HOW), stacklevel=1)
        for item in skipped:
            item.add_marker(pytest.mark.skip(reason=HOW))
