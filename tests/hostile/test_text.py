"""Mutated tokenizer files: nothing but typed errors, and some of every outcome."""

import pytest

from tests.hostile.fuzz_text import Fuzz


@pytest.mark.slow
def test_mutated_files(tmp_path):
    fuzz = Fuzz(tmp_path)
    for target in fuzz.targets(1000, derandomize=True):
        target()
    for kind, counts in fuzz.counts.items():
        assert counts["TokenizerError"] > counts.total() / 8 and counts["worked"], (kind, counts)
    assert sum(counts.total() for counts in fuzz.counts.values()) > 800


def test_an_uncaught_error_is_found(tmp_path, monkeypatch):
    """The fuzzer's own control: a reader that trips over a damaged file is told."""
    fuzz = Fuzz(tmp_path)
    monkeypatch.setattr("ligermodels.text.json_backend._diagnose", lambda text: {}["missing"])
    with pytest.raises(KeyError):
        fuzz.targets(200, derandomize=True, report_multiple_bugs=False)[0]()
