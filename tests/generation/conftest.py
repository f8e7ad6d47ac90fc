import pytest


@pytest.fixture(autouse=True)
def _warns_again(monkeypatch):
    """What warns once in a process warns once in each test."""
    monkeypatch.setattr("ligermodels.errors._warned", set())
