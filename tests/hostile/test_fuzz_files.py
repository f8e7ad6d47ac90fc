"""A short run of fuzz_files: nothing but typed errors, and some of every outcome."""

import pytest

from ligermodels.checkpoint import reading
from tests.hostile.fuzz_files import Fuzz


def test_mutated_headers_and_indexes(tmp_path):
    fuzz = Fuzz(tmp_path)
    for target in fuzz.targets(600, derandomize=True):
        target()
    for kind, counts in fuzz.counts.items():
        assert counts["CheckpointError"] > counts.total() / 4, (kind, counts)
    assert sum(counts["loaded"] for counts in fuzz.counts.values()) > 4
    assert sum(counts.total() for counts in fuzz.counts.values()) > 400


def test_an_uncaught_error_is_found(tmp_path, monkeypatch):
    """The fuzzer's own control: a reader that trips over damaged files is told."""
    monkeypatch.setattr(reading, "_kind", lambda start: {}["missing"])
    with pytest.raises(KeyError):
        Fuzz(tmp_path).targets(200, derandomize=True)[0]()
