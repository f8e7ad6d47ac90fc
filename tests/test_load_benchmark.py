"""benchmarks/load.py on the CPU: every variant runs, and weights that differ from the files get no figures."""

import json

import pytest
import torch

from benchmarks import load
from ligermodels.checkpoint import transfer
from tests.checkpoint.test_transfer import Prompt


@pytest.fixture(autouse=True)
def in_this_process(monkeypatch):
    """A process for each load costs seconds of imports. What would go to a GPU goes through its ring of buffers."""

    def spawn(job, timeout):
        try:
            return load.work(dict(job))
        except ImportError as error:
            raise RuntimeError(str(error)) from error

    monkeypatch.setattr(load, "spawn", spawn)
    monkeypatch.setattr(load.gc, "collect", lambda: 0)  # takes long among all that a suite holds
    monkeypatch.setattr(transfer, "serves", lambda device: True)
    monkeypatch.setattr(transfer, "Copies", Prompt)


def run(tmp_path, *arguments):
    out = tmp_path / "result.json"
    code = load.main(["--dry", "--scratch", str(tmp_path), "--runs", "1", "--out", str(out), *arguments])
    return code, json.loads(out.read_text())


@pytest.mark.parametrize("other", ["safetensors", pytest.param("transformers", marks=pytest.mark.slow)])
def test_every_loader_and_variant_is_measured_and_written(tmp_path, capsys, other):
    variants = ["1:1:1", "2:3:1:mmap", "2:3:1:reserve"]
    code, record = run(tmp_path, "--ours", ",".join(variants), "--loaders", f"ligermodels,{other}")
    printed = capsys.readouterr().out
    assert code == 0, record["rows"]
    assert [row["variant"] for row in record["rows"]] == ["", *variants, ""]
    for row in record["rows"]:
        assert row["seconds"] > 0 and row["again"] > 0 and row["gb_per_s"] > 0
        assert ("copy_s" in row) == ("allocate_s" in row) == (row["loader"] == "ligermodels")
    assert not list(tmp_path.glob("load-*")), "the checkpoint is removed"
    assert load.main(["--render", str(tmp_path / "result.json")]) == 0 and capsys.readouterr().out == printed


def test_wrong_weights_get_no_figures(tmp_path, monkeypatch, capsys):
    def wrong(folder, device):
        label, tensors = load._ours(folder, device)
        with torch.no_grad():
            tensors["model.norm.weight"][:2] = tensors["model.norm.weight"][:2].flip(0)
        return label, tensors

    monkeypatch.setitem(load._LOADERS, "ligermodels", wrong)
    code, record = run(tmp_path, "--loaders", "ligermodels", "--checkpoint", str(tmp_path / "kept"))
    assert code == 1 and record["rows"][0]["note"] == "the weights are not those of the files"
    assert "gb_per_s" not in record["rows"][0] and (tmp_path / "kept" / "model" / "config.json").is_file()
