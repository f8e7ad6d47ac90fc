"""Fixtures: tiny checkpoints of transformers, each written when it is first asked for. No test changes them."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.tools import models


class Checkpoints(dict):
    """{family: the folder of its checkpoint}"""

    def __init__(self, make_folder: Callable[[str], Path], **changes):
        super().__init__()
        self._make_folder, self._changes = make_folder, changes

    def __missing__(self, family: str) -> Path:
        self[family] = models.write_checkpoint(self._make_folder(family) / family, family, **self._changes)
        return self[family]


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    return Checkpoints(tmp_path_factory.mktemp)


@pytest.fixture(scope="session", params=models.FAMILIES)
def folder(request, folders):
    return folders[request.param]


@pytest.fixture(scope="session")
def quantizable(tmp_path_factory):
    """Larger models: on some CPUs bitsandbytes takes multiples of its 64 alone."""
    return Checkpoints(tmp_path_factory.mktemp, hidden_size=64, intermediate_size=128)
