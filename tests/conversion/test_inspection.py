"""What is said of a checkpoint in every layout, and that no weight is read for it."""

import json
import shlex
import shutil

import pytest

import ligermodels
from ligermodels.checkpoint import reading
from ligermodels.cli import main
from ligermodels.conversion import inspect, original
from ligermodels.conversion.distributed import DcpSource
from ligermodels.conversion.layouts import FolderSource
from ligermodels.errors import InputError
from tests.conversion import layouts
from tests.conversion.layouts import PARAMETERS

LAYOUTS = {
    "hf": "Hugging Face", "sharded": "Hugging Face", "bin": "Hugging Face, pickled",
    "meta": "Meta's own (consolidated.NN.pth, params.json)", "dcp": "torch distributed checkpoint",
    "mistral": "Mistral's own (consolidated*.safetensors, params.json)",
}  # fmt: skip


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return layouts.write_all(tmp_path_factory.mktemp("layouts"))


@pytest.fixture
def unread(monkeypatch):
    """Reading a tensor fails."""
    for source in (FolderSource, DcpSource, original.MetaSource, original.MistralSource, reading.SafetensorsReader):
        monkeypatch.setattr(source, "read", None)


def run(capsys, *argv):
    status = main([str(word) for word in argv])
    return (status, *capsys.readouterr())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_says_the_same_of_its_model(folders, layout, unread):
    folder = folders[layout]
    found = inspect(folder, allow_pickle=True)
    assert found.ok and found.layout == LAYOUTS[layout] and found.folder == str(folder)
    assert found.parts == PARAMETERS and found.parameters == sum(PARAMETERS.values())
    assert found.tensors == 21
    assert found.dtypes == {"bfloat16" if layout == "mistral" else "float32": sum(PARAMETERS.values())}
    weights = {path.name: path.stat().st_size for path in folder.iterdir() if "json" not in path.suffix and path.suffix}
    assert found.files == weights and len(found.files) == {
        "sharded": len(weights),
        "meta": 2,
        "mistral": 2,
    }.get(layout, 1)
    assert len(found.files) > 3 or layout != "sharded"
    says = {"tied": False, "layers": 2, "hidden_size": 16, "heads": 4, "kv_heads": 2, "head_dim": 4, "vocab_size": 48}
    assert found.model == {**found.model, **says, "intermediate_size": 24, "mlps": ["MLP 24"]}
    assert found.model["architecture"] == ("Mistral" if layout == "mistral" else "Llama")
    assert found.model["rope"] == {"rope_type": "default", "rope_theta": 10000.0 if layout == "mistral" else 500000.0}
    assert found.tokenizer is None


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_is_to_be_used_works_as_it_is_printed(folders, layout, capsys, tmp_path):
    use = inspect(folders[layout], allow_pickle=True).use
    if use.startswith("ligermodels.load"):
        model = eval(use, {"ligermodels": ligermodels})
    else:
        program, *argv = shlex.split(use)
        argv[argv.index("DST")] = tmp_path / "out"
        assert program == "ligermodels" and run(capsys, *argv)[0] == 0
        model = ligermodels.load(tmp_path / "out", progress=False)
    assert model.num_parameters() == sum(PARAMETERS.values())


def test_an_adapter(folders, unread, tmp_path):
    found = inspect(folders["adapter"])
    assert found.layout == "LoRA adapter, as PEFT saves it" and found.model == {} and found.ok
    assert found.use == f"ligermodels chat {folders['adapter']}"
    assert found.load == f"ligermodels.training.load_adapter(ligermodels.load('someone/base'), '{folders['adapter']}')"
    assert found.merge == f"ligermodels convert someone/base DST --adapter {folders['adapter']}"
    assert found.parts == {"q_proj": 2 * (2 * 16 + 16 * 2)} and found.parameters == 128 and found.tensors == 4
    said = {"base": "someone/base", "peft_type": "LORA", "r": 2, "lora_alpha": 6, "target_modules": ["q_proj"]}
    assert found.adapter == said
    layouts.write_adapter(tmp_path / "dora", use_dora=True)
    found = inspect(tmp_path / "dora")
    assert found.ok and found.load and found.merge is None and found.adapter["use_dora"]
    layouts.write_adapter(tmp_path / "biases", bias="all", base_model_name_or_path=None)
    found = inspect(tmp_path / "biases")
    assert found.load is None and found.use == f"ligermodels convert BASE DST --adapter {tmp_path / 'biases'}"
    layouts.write_adapter(tmp_path / "odd", alora_invocation_tokens=[1], base_model_name_or_path=None)
    found = inspect(tmp_path / "odd")
    assert not found.ok and "alora_invocation_tokens" in found.problem and found.parameters == 128
    assert found.use == f"ligermodels chat BASE --adapter {tmp_path / 'odd'}"
    with pytest.raises(InputError, match="for models"):
        inspect(folders["adapter"], config=folders["hf"])


def test_a_scaled_rope_of_a_size_without_a_factor(folders, capsys, tmp_path):
    shutil.copytree(folders["meta"], tmp_path / "meta", ignore=shutil.ignore_patterns("config.json"))
    params = json.loads((tmp_path / "meta" / "params.json").read_text())
    (tmp_path / "meta" / "params.json").write_text(json.dumps({**params, "use_scaled_rope": True}))
    status, _, err = run(capsys, "inspect", tmp_path / "meta", "--allow-pickle")
    assert status == 3 and "add rope_scaling_factor" in err
    params |= {"use_scaled_rope": True, "rope_scaling_factor": 32}
    (tmp_path / "meta" / "params.json").write_text(json.dumps(params))
    status, out, _ = run(capsys, "inspect", tmp_path / "meta", "--allow-pickle")
    assert status == 0 and "factor 32.0" in out
    assert run(capsys, "convert", tmp_path / "meta", tmp_path / "hf", "--allow-pickle")[0] == 0
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["rope_scaling"]["factor"] == 32.0


def test_a_model_type_that_is_a_list(folders, capsys, tmp_path):
    shutil.copytree(folders["hf"], tmp_path / "hf")
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    (tmp_path / "hf" / "config.json").write_text(json.dumps({**config, "model_type": ["llama"]}))
    status, _, err = run(capsys, "inspect", tmp_path / "hf")
    assert status == 3 and "has model_type ['llama']; supported: " in err


def test_metas_files_are_described_without_their_pickles(folders, capsys, monkeypatch):
    monkeypatch.setattr(reading, "read_pickle", None)
    status, out, err = run(capsys, "inspect", folders["meta"])
    assert (status, err) == (0, "") and "not read without --allow-pickle" in out
    for line in ("layout          Meta's own", "dim             16", "n_layers        2", "2 shards of "):
        assert line in out
    found = json.loads(run(capsys, "inspect", folders["meta"], "--json")[1])
    assert found["use"].endswith("DST --allow-pickle") and found["params"]["n_heads"] == 4
