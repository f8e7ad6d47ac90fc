"""Folders whose config.json or generation_config.json is none, is another model's, or does not fit the weights."""

import json
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

import ligermodels
from ligermodels.errors import CheckpointError, ConfigError
from tests.hostile.folders import INDEX, make_good, spoiled

Spoil = Callable[[Path], object]
CONFIG, GENERATION = "config.json", "generation_config.json"


def written(text: str | bytes, file: str = CONFIG) -> Spoil:
    return lambda folder: (folder / file).write_bytes(text.encode() if isinstance(text, str) else text)


def change(**changes: object) -> Spoil:
    def spoil(folder: Path) -> None:
        values = {**json.loads((folder / CONFIG).read_text()), **changes}
        (folder / CONFIG).write_text(json.dumps(values))

    return spoil


FILES: dict[str, tuple[Spoil, type, str]] = {
    "empty": (written(""), CheckpointError, "not JSON"),
    "cut in half": (lambda f: (f / CONFIG).write_text((f / CONFIG).read_text()[:99]), CheckpointError, "not JSON"),
    "a list": (written("[1]"), CheckpointError, "an object"),
    "git-lfs pointer": (written("version https://git-lfs.github.com/spec/v1\n"), CheckpointError, "git lfs"),
    "HTML page": (written("<!DOCTYPE html><html>"), CheckpointError, "HTML page"),
    "an unknown family": (change(model_type="falcon"), ConfigError, "the zoo holds"),
    "a model_type that is no string": (change(model_type=["llama"]), ConfigError, "the zoo holds"),
    "a model of images": (
        written('{"model_type": "llama", "text_config": {"hidden_size": 16}, "vision_config": {}}'),
        ConfigError,
        "text_config",
    ),
    "an adapter's": (written('{"model_type": "llama", "peft_type": "LORA"}'), ConfigError, "adapter or"),
    "a tokenizer's": (written('{"tokenizer_class": "LlamaTokenizer"}'), ConfigError, "model_type None"),
    "not there": (lambda f: (f / CONFIG).unlink(), CheckpointError, "is not there"),
    "generation: cut": (written('{"eos_token_id": [1', GENERATION), CheckpointError, "not JSON"),
    "generation: eos a string": (written('{"eos_token_id": "</s>"}', GENERATION), ConfigError, "must be a token id"),
    "a larger vocabulary than the shards have": (change(vocab_size=2**20), CheckpointError, "wrong shape"),
    "more layers than the shards have": (change(num_hidden_layers=9), CheckpointError, "1 layers on disk"),
    "tied, and the index names a head": (change(tie_word_embeddings=True), CheckpointError, "config ties"),
    "another family's": (change(model_type="gemma2", head_dim=8), CheckpointError, "missing"),
    "biases that the shards have not": (change(attention_bias=True), CheckpointError, "missing.*q_proj.bias"),
    "in the index's place": (
        lambda f: (f / INDEX).write_bytes((f / CONFIG).read_bytes()),
        CheckpointError,
        "no weight_map",
    ),
}


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    return make_good(tmp_path_factory.mktemp("good"))["sharded"]


@pytest.mark.parametrize("name", FILES)
def test_bad_files_end_in_a_typed_error(good, name):
    spoil, error, words = FILES[name]
    with spoiled(good, spoil) as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(error, match=f"(?s){words}"):
            ligermodels.load(folder, progress=False)


def test_demands_for_code_are_not_met(good, tmp_path, monkeypatch):
    """auto_map, trust_remote_code and a module beside the weights: the model is built from this package's own code."""
    marker = tmp_path / "ran"
    code = f"import pathlib; pathlib.Path({str(marker)!r}).touch()\nclass Model: pass\n"

    def spoil(folder: Path) -> None:
        for name in ("modeling_llama", "configuration_llama", "__init__", "ligermodels", "sitecustomize"):
            (folder / f"{name}.py").write_text(code)
        calls = {"AutoConfig": "configuration_llama.Config", "AutoModelForCausalLM": "evil/repo--modeling_llama.Model"}
        change(auto_map=calls, trust_remote_code=True, architectures=["Model"])(folder)

    with spoiled(good, spoil) as folder:
        monkeypatch.chdir(folder)
        with pytest.warns(UserWarning, match="trust_remote_code"):
            model = ligermodels.load(folder, progress=False)
        assert type(model) is ligermodels.Llama and not marker.exists()
        saved = json.loads((model.save_pretrained(tmp_path / "out") / "config.json").read_text())
        assert "auto_map" not in saved and saved["architectures"] == ["LlamaForCausalLM"]
        assert not list((tmp_path / "out").glob("*.py"))


def test_unusual_but_sound_configs_load(good):
    """Other encodings of JSON, and ids that no text will have."""
    expected = ligermodels.load(good, progress=False).config
    for spoil in (
        lambda f: (f / CONFIG).write_text((f / CONFIG).read_text(), encoding="utf-8-sig"),
        change(eos_token_id=[2, 99], pad_token_id=-1, quantization_config={}),
        written('{"eos_token_id": -1}', GENERATION),
    ):
        with spoiled(good, spoil) as folder:
            config = ligermodels.load(folder, progress=False).config
        assert config.hidden_size == expected.hidden_size and config.rope_parameters == expected.rope_parameters
