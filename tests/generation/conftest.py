import pytest

from ligermodels.generation import graphs


@pytest.fixture(autouse=True)
def _warns_again(monkeypatch):
    """What warns once in a process warns once in each test."""
    monkeypatch.setattr("ligermodels.errors._warned", set())


@pytest.fixture
def steps(monkeypatch):
    """Every device decodes by `DecodeStep`, as a CUDA graph on a GPU; the list has an entry for each of its runs."""
    seen, run = [], graphs.DecodeStep.run
    monkeypatch.setattr(graphs, "DEVICES", {"cpu", "cuda"})
    monkeypatch.setattr(graphs.DecodeStep, "run", lambda self, *a: (seen.append(self), run(self, *a))[1])
    return seen


@pytest.fixture(params=[False, True], ids=["by host", "as a graph would"])
def captured(request, monkeypatch):
    monkeypatch.setattr(graphs, "DEVICES", {"cpu", "cuda"} if request.param else set())
    return request.param
