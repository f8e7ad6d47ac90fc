import pytest

from ligermodels.kernels.optimizer import adamw as adamw_file


@pytest.fixture
def where(request, monkeypatch):
    """The path of a step, by name; "pieces on the CPU" is that without Triton."""
    if request.param == "pieces on the CPU":
        monkeypatch.setattr(adamw_file, "use_triton", lambda x: False)
        monkeypatch.setattr(adamw_file, "_CPU_CHUNK", 512)
    return request.param
