"""benchmarks/load.py on the CPU: every variant runs, and weights that differ from the files get no figures."""

import argparse
import functools
import json
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from benchmarks import load, load_ranks
from ligermodels.checkpoint import transfer
from ligermodels.parallel import make_mesh
from tests.checkpoint.test_transfer import Prompt
from tests.parallel.ranks import on_ranks


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


def ranks_find(folder, name, mesh, loaders, *, change=None, tmp_path):
    """The record of two ranks. change: what happens to the tensors of the loaders on rank 1."""

    def work():
        made = make_mesh(tp=2 if mesh == "tp" else 1, device_type="cpu")
        if change is not None and dist.get_rank() == 1:
            for loader, read in load_ranks._LOADERS.items():

                def changed(*given, read=read):
                    label, tensors = read(*given)
                    change(tensors)
                    return label, tensors

                load_ranks._LOADERS[loader] = changed
        options = argparse.Namespace(dry=True, model=name, mesh=mesh, runs=2)
        record = load_ranks.measure(options, folder, made, ["warm"], loaders, [""])
        if dist.get_rank() == 0:
            (tmp_path / "record.json").write_text(json.dumps(record))

    on_ranks(tmp_path, work)
    return json.loads((tmp_path / "record.json").read_text())


def test_ranks_load_one_model_and_compare_their_parts_with_the_files(tmp_path, monkeypatch):
    monkeypatch.undo()  # what goes to a CPU goes the way of a CPU
    folder = tmp_path / "kept"
    find = functools.partial(ranks_find, folder, "llama-3.1-70b", tmp_path=tmp_path)
    record = find("tp", ["ligermodels"])
    (row,) = record["rows"]
    assert "note" not in row and min(row[key] for key in ("seconds", "again", "gb_per_s", "construct_s")) > 0
    assert len(row["runs"]) == 2 and record["ranks"] == 2
    assert "onto 2 ranks (tp)" in load.render(record) and "| ligermodels | a model | warm " in load.render(record)
    assert len(list((folder / "model").glob("*.safetensors"))) > 2

    # The files are those of the formula, by the library that defines the format.
    values = torch.empty(2**16 - 1, dtype=torch.bfloat16).normal_(0, 0.02, generator=torch.Generator().manual_seed(0))
    for path in (folder / "model").glob("*.safetensors"):
        for name, tensor in load_file(path).items():
            places = torch.arange(tensor.numel()) + load_ranks.start(name, len(values))
            assert torch.equal(tensor.flatten(), values[places % len(values)])

    assert "note" not in find("dp_shard", ["ligermodels"])["rows"][0]

    def turn(tensors):
        local = tensors["model.layers.1.mlp.down_proj.weight"].to_local()
        local.copy_(local.roll(1, 1))

    (row,) = find("tp", ["ligermodels"], change=turn)["rows"]
    assert "the weights are not those of the files: model.layers.1.mlp.down_proj.weight" in row["note"]
    (row,) = find("tp", ["ligermodels"], change=lambda tensors: tensors.pop("lm_head.weight"))["rows"]
    assert row["note"].endswith("lm_head.weight") and "seconds" not in row

    path = next((folder / "model").glob("*.safetensors"))
    save_file(load_file(path), path, {"format": "pt"})
    with pytest.raises(AssertionError, match="the ranks failed"):
        find("tp", ["ligermodels"])


def test_a_checkpoint_without_room_is_refused(tmp_path, monkeypatch):
    load_ranks.check_room(tmp_path, 1, 1)
    with pytest.raises(RuntimeError, match="1000000 GB on the file system"):
        load_ranks.check_room(tmp_path, 10**15, 1)
    monkeypatch.setattr(load, "_is_in_memory", lambda folder: True)
    monkeypatch.setattr(load_ranks, "memory_left", lambda: 20 * 10**9)
    load_ranks.check_room(tmp_path, 1, 2)
    with pytest.raises(RuntimeError, match="26 GB of memory, and 20 GB are free"):
        load_ranks.check_room(tmp_path, 1, 3)
    monkeypatch.undo()
    assert 0 < load_ranks.memory_left() < 2**50


@pytest.mark.slow
def test_torchrun_compares_with_transformers(tmp_path):
    out, module = tmp_path / "result.json", ["-m", "benchmarks.load_ranks", "--dry", "--scratch", str(tmp_path)]
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run([*launch, *module, "--out", str(out)], cwd=load.ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = json.loads(out.read_text())["rows"]
    assert [row["loader"] for row in rows] == ["ligermodels", "transformers"] and not any("note" in row for row in rows)
    assert "onto 2 ranks" in done.stdout and not list(tmp_path.glob("load-*")), "the checkpoint is removed"
