"""`inspect`, `convert` and `verify`: what they print, and their exit status."""

import json
import shutil
from types import SimpleNamespace

import pytest
import torch

import ligermodels
from ligermodels.checkpoint import hub
from ligermodels.checkpoint.reading import SafetensorsFile, SafetensorsReader
from tests.cli.commands import run, write_checkpoint


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint") / "model")


def test_inspect_reads_headers_only(folder, capsys, monkeypatch):
    monkeypatch.setattr(SafetensorsReader, "read", None)
    monkeypatch.setattr(SafetensorsFile, "read", None)
    status, out, _ = run(capsys, "inspect", folder)
    model = ligermodels.Llama.from_config(json.loads((folder / "config.json").read_text()), device="meta")
    assert status == 0
    for text in (
        f"{model.num_parameters():,}", "ligermodels.Llama", "tied", "float32", "512 tokens", "default",
        "model.safetensors", "tokenizer.json", "4 query and 2 key-value", "as expected",
        f"ligermodels.load('{folder}')",
        f"embedding     {model.get_input_embeddings().weight.numel():,}",
    ):  # fmt: skip
        assert text in out, text


def test_inspect_asks_the_hub_for_headers_and_not_for_weights(folder, capsys, monkeypatch):
    def resolve(repo, *, local_files_only=False, weights=True, **_):
        if local_files_only:
            raise ligermodels.HubError("not in the cache")
        assert not weights
        return folder

    def headers_on_hub(self, repo, *, revision):
        with SafetensorsReader(folder) as reader:
            tensors = {
                name: SimpleNamespace(dtype="F32", shape=list(info.shape), data_offsets=(0, 1000))
                for name, info in reader.headers.items()
            }
        return SimpleNamespace(files_metadata={"model.safetensors": SimpleNamespace(tensors=tensors, metadata={})})

    monkeypatch.setattr(hub, "resolve", resolve)
    monkeypatch.setattr("huggingface_hub.HfApi.get_safetensors_metadata", headers_on_hub)
    status, out, err = run(capsys, "inspect", "someone/something")
    assert status == 0 and "as expected" in out and "ligermodels.load('someone/something')" in out, err


def test_inspect_fails_where_config_and_weights_do_not_fit(folder, capsys, tmp_path):
    shutil.copytree(folder, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 4}))
    status, out, err = run(capsys, "inspect", tmp_path / "model")
    assert status == 1 and "layers.3" in err and "NOT as expected" in out


def test_convert_and_verify(folder, capsys, tmp_path):
    file = folder / "model.safetensors"  # stands for its folder
    status, out, err = run(capsys, "convert", file, tmp_path / "copy", "--verify", "bytes")
    assert (status, err) == (0, "") and "verified: bytes" in out
    status, out, _ = run(capsys, "verify", folder, tmp_path / "copy")
    assert status == 0 and out.endswith("the same\n")
    status, out, _ = run(capsys, "convert", tmp_path / "copy", tmp_path / "half", "--dtype", "bf16", "--json")
    report = json.loads(out)
    assert status == 0 and report["ok"] and report["to"] == "hf" and report["destination"] == str(tmp_path / "half")
    assert ligermodels.load(tmp_path / "half", progress=False).dtype == torch.bfloat16
    status, out, _ = run(capsys, "verify", folder, tmp_path / "half")
    alone = (
        "29 tensors differ in dtype alone (float32 in A, bfloat16 in B); equal after the cast\nthe same after a cast\n"
    )
    assert status == 0 and out.startswith(f"{folder} and ") and out.endswith(alone) and "MISMATCH" not in out
    status, text, _ = run(capsys, "verify", folder, tmp_path / "half", "--json")
    assert status == 0 and json.loads(text)["casts"] == [{"a": "float32", "b": "bfloat16", "tensors": 29}]
    status, out, _ = run(capsys, "verify", folder, tmp_path / "half", "--level", "keys")
    assert status == 1 and out.endswith("after a cast\n1 mismatch\n") and out.count("MISMATCH") == 1


@pytest.mark.parametrize("argv, code, message", [
    (["convert", "MODEL", "MODEL"], 2, "--overwrite"),
    (["convert", "MODEL"], 2, "--dry-run"),
    (["convert", "MODEL", "FILE"], 2, "or of a file that ends in .gguf"),
    (["convert", "MODEL", "OUT", "--name", "x"], 2, "name is for GGUF files"),
    (["convert", "MODEL", "OUT.safetensors"], 2, "has the name of a file of weights, and DST is the folder"),
    (["convert", "MODEL", "OUT.ggml"], 2, "or a GGUF file, whose name ends in .gguf"),
    (["convert", "MODEL", "OUT.gguf", "--config", "MODEL"], 2, "--config is for weights without one"),
    (["verify", "MODEL", "EMPTY"], 3, "config.json"),
    (["convert", "FILE", "OUT"], 3, "is a file. Give the folder of a checkpoint"),
    (["inspect", "nowhere/here", "--local-files-only"], 3, "there is none at"),
])  # fmt: skip
def test_the_exit_status_of_a_conversion(argv, code, message, folder, capsys, tmp_path):
    (tmp_path / "empty").mkdir()
    places = {
        "MODEL": folder,
        "OUT": tmp_path / "out",
        "OUT.gguf": tmp_path / "out.gguf",
        "OUT.safetensors": tmp_path / "out.safetensors",
        "OUT.ggml": tmp_path / "out.ggml",
        "EMPTY": tmp_path / "empty",
        "FILE": folder / "config.json",
    }
    status, out, err = run(capsys, *(places.get(argument, argument) for argument in argv))
    assert (status, out) == (code, "") and err.startswith("error: ") and message in err, err
    assert not (tmp_path / "out").exists() and not (tmp_path / "out.gguf").exists()
    assert not (tmp_path / "out.safetensors").exists() and not (tmp_path / "out.ggml").exists()
