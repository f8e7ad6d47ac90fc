"""Folders that earlier versions packed under names of their own: what `convert` makes of them, what refuses them."""

import pytest
import torch

import ligermodels
from ligermodels.conversion import Options, convert, inspect, verify
from ligermodels.errors import CheckpointError
from tests.conversion.layouts import NATIVE, a_checkpoint, names, same, stored, write_native


@pytest.mark.parametrize("family", NATIVE)
def test_what_was_packed_comes_back_to_the_bit(tmp_path, family):
    tensors = a_checkpoint(tmp_path / "hf", family, dtype=torch.bfloat16)
    write_native(tmp_path / "old", tmp_path / "hf")
    convert(tmp_path / "old", tmp_path / "new", Options(verify="bytes", progress=False))
    assert same(stored(tmp_path / "new"), tensors) and names(tmp_path / "new") == names(tmp_path / "hf")
    convert(tmp_path / "old", tmp_path / "halves", Options(like=True, dtype="fp16", progress=False))
    assert same(stored(tmp_path / "halves"), {name: x.half() for name, x in tensors.items()})
    assert verify(tmp_path / "old", tmp_path / "hf", level="bytes", progress=False).ok


@pytest.fixture
def old(tmp_path):
    a_checkpoint(tmp_path / "hf", "llama", tied=True)
    write_native(tmp_path / "old", tmp_path / "hf")
    return tmp_path / "old"


def test_it_is_not_loaded_and_the_command_that_makes_it_so_is_named(old):
    tensors = stored(old.parent / "hf")
    with pytest.raises(CheckpointError, match=r"(?s)unexpected \(14\).*`ligermodels convert OLD NEW`"):
        ligermodels.load(old)
    found = inspect(old)
    assert found.ok and "packed" in found.layout and found.use.startswith("ligermodels convert")
    convert(old, old, Options(progress=False, overwrite=True))
    assert "Hugging Face" in inspect(old).layout and same(stored(old), tensors)
