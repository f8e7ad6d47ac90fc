"""Folders that earlier versions packed under names of their own: what `convert` makes of them, what refuses them."""

import pytest
import torch
from safetensors.torch import load_file, save_file

import ligermodels
from ligermodels.arch import ARCHS
from ligermodels.conversion import Options, convert, inspect, native, verify
from ligermodels.errors import CheckpointError
from tests.conversion.layouts import write_native
from tests.conversion.test_pipeline import a_checkpoint, names, same, stored


@pytest.mark.parametrize("family", [family for family in ARCHS if family != "qwen3"])  # younger than the layout
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_what_was_packed_comes_back_to_the_bit(tmp_path, family, tied):
    tensors = a_checkpoint(tmp_path / "hf", family, dtype=torch.bfloat16, tied=tied)
    write_native(tmp_path / "old", tmp_path / "hf")
    assert native.is_native(stored(tmp_path / "old")) and not native.is_native(tensors)
    for where, options in (("new", {"verify": "bytes"}), ("like", {"like": True}), ("halves", {"dtype": "fp16"})):
        convert(tmp_path / "old", tmp_path / where, Options(progress=False, **options))
        expected = {name: x.half() for name, x in tensors.items()} if where == "halves" else tensors
        assert same(stored(tmp_path / where), expected)
    assert not verify(tmp_path / "old", tmp_path / "hf", level="bytes", progress=False).mismatches
    assert names(tmp_path / "new") == [*sorted(["conversion.json", *names(tmp_path / "hf")])]


@pytest.fixture
def old(tmp_path):
    a_checkpoint(tmp_path / "hf", "llama")
    write_native(tmp_path / "old", tmp_path / "hf")
    return tmp_path / "old"


def test_it_is_not_loaded_and_the_command_that_makes_it_so_is_named(old):
    with pytest.raises(CheckpointError, match=r"(?s)unexpected \(14\).*`ligermodels convert OLD NEW`"):
        ligermodels.load(old)
    found = inspect(old)
    assert found.ok and "packed" in found.layout and found.use.startswith("ligermodels convert")
    convert(old, old, Options(progress=False, overwrite=True))
    assert "Hugging Face" in inspect(old).layout


def test_a_state_dict_without_its_metadata_is_told_by_its_names(old, tmp_path):
    """As a Trainer of that time wrote it, the config.json put beside it."""
    save_file(load_file(old / "model.safetensors"), old / "model.safetensors")
    convert(old, tmp_path / "new", Options(progress=False))
    assert same(stored(tmp_path / "new"), stored(tmp_path / "hf"))


@pytest.mark.parametrize(
    "spoil",
    [
        lambda held: held.pop("layers.0.attn.o_proj.weight"),
        lambda held: held.update({"layers.0.attn.qkv_proj.weight": torch.zeros(15, 16)}),
        lambda held: held.update({"layers.0.attn.qkv_proj.weight": torch.zeros(())}),
        lambda held: held.update({"layers.0.attn.o_proj.weight": torch.zeros(())}),
        lambda held: held.update({"layers.0.mlp.gate_up_proj.weight": torch.zeros(3, 16)}),
    ],
)
def test_packed_tensors_that_do_not_hold_their_parts(old, tmp_path, spoil):
    held = load_file(old / "model.safetensors")
    spoil(held)
    save_file(held, old / "model.safetensors")
    with pytest.raises(
        CheckpointError, match=r"layers\.0\.(attn\.qkv|mlp\.gate_up)_proj\.weight .* does not hold . proj"
    ):
        convert(old, tmp_path / "new", Options(progress=False))
    assert not (tmp_path / "new").exists()


def test_names_that_are_missing_or_more(old, tmp_path):
    held = load_file(old / "model.safetensors")
    held["layers.0.attn.extra"] = held.pop("norm.weight")
    save_file(held, old / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"(?s)model\.norm\.weight.*model\.layers\.0\.self_attn\.extra"):
        convert(old, tmp_path / "new", Options(progress=False))


def test_what_is_packed_and_on_the_hub_too_stays_so():
    assert native.names_of("layers.3.attn.qkv_proj.weight", "llama") == [
        f"model.layers.3.self_attn.{part}_proj.weight" for part in "qkv"
    ]
    assert native.names_of("layers.3.attn.qkv_proj.weight", "phi3") == ["model.layers.3.self_attn.qkv_proj.weight"]
