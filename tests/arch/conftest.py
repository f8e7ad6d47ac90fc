"""Runs each property of a Suite on each of its tiny configurations."""

import pytest
import torch


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    """Matrices this small only wait for a second thread: where it has no core of its own, ten times as long."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def pytest_generate_tests(metafunc):
    if metafunc.cls is None:
        return
    if "tiny" in metafunc.fixturenames:
        metafunc.parametrize("tiny", metafunc.cls.TINY.values(), ids=metafunc.cls.TINY.keys())
    if "real" in metafunc.fixturenames:
        metafunc.parametrize("real", metafunc.cls.REAL.items(), ids=metafunc.cls.REAL.keys())
