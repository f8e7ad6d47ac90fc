"""Conversions of every family, by the script and by the function: same bits, one tensor in memory, errors."""

import importlib.util
import shutil
import weakref
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

import ligermodels
from ligermodels.arch import ARCHS
from ligermodels.checkpoint import saving
from ligermodels.checkpoint.files import json_bytes, read_json
from ligermodels.checkpoint.reading import SafetensorsReader
from ligermodels.conversion import MismatchError, Options, convert, inspect, verify
from ligermodels.conversion.layouts import FolderSource
from ligermodels.conversion.source import View
from ligermodels.errors import CheckpointError, HubError, InputError
from ligermodels.layers import moe
from tests.checkpoint.fixtures import make_model
from tests.conversion.gguf_files import small_model
from tests.conversion.layouts import FILES, a_checkpoint, names, same, stored, write_dcp, write_own
from tests.tiny import ExactRouter

SCRIPT = Path(__file__).parents[2] / "convert" / "convert_checkpoint.py"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("convert_checkpoint", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return lambda *argv: module.main([str(word) for word in argv])


@pytest.mark.parametrize("family", ARCHS)
@pytest.mark.parametrize("tied, shards, dtype", [(False, 3, torch.bfloat16), (True, 1, torch.float32)], ids=str)
def test_round_trips_return_the_same_bits(tmp_path, script, capsys, family, tied, shards, dtype):
    """Through the names of memory, with what is stacked there, and back; in one file, and divided otherwise."""
    tensors = a_checkpoint(tmp_path / "hf", family, dtype=dtype, tied=tied, shards=shards)
    (tmp_path / "hf" / "consolidated.safetensors").write_text("not to be looked at")
    write_dcp(tmp_path / "hf", tmp_path / "dcp")
    assert script(tmp_path / "dcp", tmp_path / "back", "--max-shard-size", f"{9 // shards}KB", "--verify", "bytes") == 0
    assert same(stored(tmp_path / "back"), tensors)
    for name in ("config.json", *FILES):
        assert (tmp_path / "back" / name).read_bytes() == (tmp_path / "hf" / name).read_bytes()
    assert names(tmp_path) == ["back", "dcp", "hf"] and "consolidated.safetensors" not in names(tmp_path / "back")
    assert f"back: {len(tensors)} tensors, " in capsys.readouterr().out


def test_a_cast(tmp_path):
    tensors = a_checkpoint(tmp_path / "hf", shards=7, dtype=torch.bfloat16)
    convert(tmp_path / "hf", tmp_path / "out", Options(dtype="fp32"))
    assert same(stored(tmp_path / "out"), {name: x.float() for name, x in tensors.items()})
    config = read_json(tmp_path / "hf" / "config.json")
    assert read_json(tmp_path / "out" / "config.json") == {**config, "dtype": "float32", "torch_dtype": "float32"}


def test_a_cast_to_16_bits_leaves_what_stays_in_fp32(tmp_path, monkeypatch):
    monkeypatch.setattr(moe, "Router", ExactRouter)
    make_model(model_type="mixtral", num_local_experts=4).save_pretrained(tmp_path / "model")
    convert(tmp_path / "model", tmp_path / "out", Options(dtype="bf16", verify="bytes"))
    tensors, made = stored(tmp_path / "model"), stored(tmp_path / "out")
    assert same(made, {name: x if ".gate." in name else x.bfloat16() for name, x in tensors.items()})


def test_over_the_source_itself_and_what_transformers_makes_of_it(tmp_path, script):
    transformers = pytest.importorskip("transformers")
    tensors = a_checkpoint(tmp_path / "hf", shards=2)
    for options in (["--max-shard-size", "9KB"], []):
        assert script(tmp_path / "hf", tmp_path / "hf", "--overwrite", *options) == 0
    assert same(stored(tmp_path / "hf"), tensors) and names(tmp_path) == ["hf"]
    _, report = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "hf", output_loading_info=True)
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")), report


def test_a_dry_run_reads_headers_only(tmp_path, script, capsys, monkeypatch):
    a_checkpoint(tmp_path / "hf", shards=2)
    monkeypatch.setattr(SafetensorsReader, "read", None)
    for options in ([], [tmp_path / "out"]):
        assert script(tmp_path / "hf", *options, "--dry-run") == 0
        output = capsys.readouterr().out
        assert "21 tensors, 21.8 kB would be written" in output and "architecture: Llama" in output
    assert names(tmp_path) == ["hf"]


# The other layouts, through the one entrance


THEIR_OWN = {
    "meta": ("llama", {"rope_theta": 500000.0}),
    "meta, columns": ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}),
    "mistral": ("mistral", {}),  # config.json names no window, and it is 4096
    "mistral, window": ("mistral", {"sliding_window": 5, "rope_theta": 1e6, "rms_norm_eps": 1e-5}),
    "mistral, tied": ("mistral", {"sliding_window": None, "tied": True, "head_dim": 8, "bos_token_id": 3}),
    "mixtral": ("mixtral", {"num_local_experts": 3, "num_experts_per_tok": 1}),
    "mixtral, tied": ("mixtral", {"sliding_window": 7, "tied": True, "router_aux_loss_coef": 0.5}),
}


@pytest.mark.parametrize("case", THEIR_OWN)
def test_their_own_layout(tmp_path, case):
    """Beside a config.json, which says what params.json does not, and without one."""
    to, (family, fields) = case.split(",")[0].replace("mixtral", "mistral"), THEIR_OWN[case]
    hf, theirs, back = (tmp_path / name for name in ("hf", "theirs", "back"))
    fields = {"max_position_embeddings": 300, "eos_token_id": [7, 9], "id2label": {"0": "mine"}, **fields}
    tensors = a_checkpoint(hf, family, dtype=torch.bfloat16, finite=True, **fields)
    (hf / "generation_config.json").write_text('{"eos_token_id": [7, 9], "temperature": 0.6}')
    write_own(theirs, hf, to, ranks=2 if to == "meta" else 1)
    assert verify(hf, theirs, level="bytes", allow_pickle=True, progress=False).ok
    convert(theirs, back, Options(allow_pickle=True, verify="bytes", progress=False))
    assert same(stored(back), tensors)
    for name in ("config.json", *FILES):
        assert (back / name).read_bytes() == (hf / name).read_bytes()
    # What params.json says of the model, alone.
    (theirs / "config.json").unlink()
    lost = [f"config: {field} is " for field in ("bos_token_id", "eos_token_id", "id2label", "max_position_embeddings")]
    found = verify(hf, theirs, level="bytes", allow_pickle=True, progress=False)
    lost += ["config: router_aux_loss_coef "]
    assert not [line for line in found.mismatches if not line.startswith(tuple(lost))]


def test_params_that_contradict_the_config_beside_them(tmp_path):
    a_checkpoint(tmp_path / "hf", "mistral", finite=True, sliding_window=8, eos_token_id=7)
    write_own(tmp_path / "theirs", tmp_path / "hf", "mistral")
    params = read_json(tmp_path / "theirs" / "params.json")
    (tmp_path / "theirs" / "params.json").write_bytes(json_bytes({**params, "sliding_window": 6}))
    found = verify(tmp_path / "hf", tmp_path / "theirs", level="bytes", progress=False)
    assert found.mismatches == ["config: sliding_window is 8 and 6"]


@pytest.mark.parametrize("kind", ["safetensors", "pickle", "dcp"])
def test_a_state_dict_that_a_trainer_left_alone(tmp_path, kind):
    tensors, left = a_checkpoint(tmp_path / "hf", dtype=torch.bfloat16, finite=True), tmp_path / "left"
    (write_dcp if kind == "dcp" else shutil.copytree)(tmp_path / "hf", left)
    for name in ("config.json", *FILES):
        (left / name).unlink()
    if kind == "pickle":
        torch.save({f"module.{n}": x for n, x in tensors.items()}, left / "pytorch_model.bin")
        (left / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"(?s)config\.json.*--config"):
        convert(left, tmp_path / "out", Options(allow_pickle=True))
    options = {"config": tmp_path / "hf", "allow_pickle": True}
    found = inspect(left, **options)
    assert found.ok and "--config" in found.use
    convert(left, tmp_path / "out", Options(verify="bytes", progress=False, **options))
    assert same(stored(tmp_path / "out"), tensors)
    assert verify(left, tmp_path / "out", level="bytes", progress=False, **options).ok
    assert ligermodels.load(tmp_path / "out").generation_config["eos_token_id"] == 2
    with pytest.raises(InputError, match="its own configuration"):
        convert(tmp_path / "hf", tmp_path / "again", Options(config=tmp_path / "hf"))


# Memory


@pytest.mark.parametrize("to", ["hf", "gguf"])
def test_one_tensor_is_in_memory(tmp_path, monkeypatch, to):
    """At each read, the memory of no tensor that was read before is still in use: all in one file, and cast."""
    small_model(tmp_path / "hf", "mixtral", "mixtral", num_local_experts=2)
    alive, read = [], View.read

    def watched(view, name):
        # The writer of GGUF has an expert while it reads the next one.
        most = 0 if to == "hf" else 1
        assert sum(tensor() is not None for tensor in alive) <= most, f"still there at {name}"
        tensor = read(view, name)
        alive.append(weakref.ref(tensor.untyped_storage()))
        return tensor

    monkeypatch.setattr(View, "read", watched)
    target = tmp_path / ("out.gguf" if to == "gguf" else "out")
    convert(tmp_path / "hf", target, Options(dtype="fp16", progress=False))
    assert len(alive) > 10


# What fails or is refused leaves the destination as it was


@pytest.mark.parametrize("how", ["disk", "bit", "space"])
def test_a_conversion_that_fails_leaves_the_old_folder(tmp_path, monkeypatch, how):
    a_checkpoint(tmp_path / "hf", seed=2)
    old, read, write, count = a_checkpoint(tmp_path / "out", seed=1), View.read, saving.write_shards, iter(range(1000))

    def fail(view, name):
        if next(count) == 5:
            raise OSError(28, "No space left on device")
        return read(view, name)

    def one_bit_wrong(folder, *arguments):
        write(folder, *arguments)
        content = bytearray((folder / "model.safetensors").read_bytes())
        content[-1] ^= 1
        (folder / "model.safetensors").write_bytes(content)

    if how == "bit":
        monkeypatch.setattr(saving, "write_shards", one_bit_wrong)
    elif how == "disk":
        monkeypatch.setattr(View, "read", fail)
    else:
        monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=1000))
        monkeypatch.setattr(FolderSource, "read", None)
    message = {"bit": "values differ", "disk": "free some space", "space": r"it takes [\d.]+ kB and 1 kB are free"}[how]
    options = Options(verify="bytes" if how == "bit" else "none", overwrite=True, progress=False)
    with pytest.raises(MismatchError if how == "bit" else HubError, match=message) as caught:
        convert(tmp_path / "hf", tmp_path / "out", options)
    assert how == "bit" or caught.value.errno == 28
    assert same(stored(tmp_path / "out"), old) and names(tmp_path) == ["hf", "out"]


def test_a_head_that_is_the_embedding_is_dropped(tmp_path):
    tensors = a_checkpoint(tmp_path / "hf", tied=True)
    head = {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}
    save_file({**tensors, **head}, tmp_path / "hf" / "model.safetensors")
    convert(tmp_path / "hf", tmp_path / "out", Options(progress=False))
    assert same(stored(tmp_path / "out"), tensors)


@pytest.mark.parametrize(
    "arguments, status, message",
    [
        (["hf", "out", "--max-shard-size", "much"], 2, "max_shard_size='much'"),
        (["hf", "out", "--verif", "keys"], 2, "unrecognized arguments: --verif keys; did you mean --verify"),
        (["unfit", "out"], 1, "missing (9 of 30)"),
        (["unfit", "--dry-run"], 1, "2 layers on disk, 3 expected"),
        (["other", "out"], 3, "model_type 'nobody'"),
        (["listed", "out"], 3, "model_type ['llama']"),
        (["listed", "out.gguf"], 3, "model_type ['llama']"),
        (["tied", "out"], 3, "lm_head.weight differs from model.embed_tokens.weight"),
    ],
)  # fmt: skip
def test_wrong_arguments(tmp_path, script, capsys, monkeypatch, arguments, status, message):
    monkeypatch.chdir(tmp_path)
    a_checkpoint(tmp_path / "hf")
    config = read_json(tmp_path / "hf" / "config.json")
    others = {
        "other": {"model_type": "nobody"},
        "listed": {"model_type": ["llama"]},
        "unfit": {"num_hidden_layers": 3},
        "tied": {"tie_word_embeddings": True},
    }
    for name, changes in others.items():
        shutil.copytree(tmp_path / "hf", tmp_path / name)
        (tmp_path / name / "config.json").write_bytes(json_bytes({**config, **changes}))
    try:
        assert script(*arguments) == status
    except SystemExit as stopped:
        assert stopped.code == status
    assert message in capsys.readouterr().err and not (tmp_path / "out").exists()
