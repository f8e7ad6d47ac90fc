"""Weights that stay mapped from their files on the CPU: no copy of them is made, and the files never change."""

import shutil

import pytest
import torch

import ligermodels
from tests.checkpoint.fixtures import make_model

IDS = torch.arange(12).reshape(2, 6)


def copied(model) -> list[str]:
    """The parameters whose memory torch has allocated."""
    return [name for name, x in model.named_parameters() if x.untyped_storage().resizable()]


def contents(folder) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tied, shards", [(False, 1), (True, 1), (False, 4)])
def test_a_model_that_trains_and_is_saved_over_its_own_files(tmp_path, tied, shards, dtype):
    made = make_model(tie_word_embeddings=tied).to(dtype)
    size = sum(x.nbytes for x in made.parameters())
    folder = made.save_pretrained(tmp_path / "model", max_shard_size=size // shards + 1)
    assert (len(list(folder.glob("*.safetensors"))) > 1) == (shards > 1)
    before, model = contents(folder), ligermodels.load(folder, progress=False)
    assert not copied(model)
    model.to("cpu", dtype)
    assert not copied(model), "what changes nothing must not copy"
    assert len({x.untyped_storage().data_ptr() for x in model.parameters()}) == len([*model.parameters()])
    for ours, theirs in zip(model.parameters(), made.parameters(), strict=True):
        assert torch.equal(ours, theirs)

    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model(IDS, labels=IDS).loss.backward()
    optimizer.step()
    trained = model(IDS).logits
    assert not torch.equal(trained, made(IDS).logits)
    assert contents(folder) == before, "training in place wrote into the file"
    other = ligermodels.load(folder, progress=False)
    assert torch.equal(other.lm_head.weight, made.lm_head.weight), "training in place shows in another model"

    model.save_pretrained(folder)
    assert torch.equal(model(IDS).logits, trained)
    assert torch.equal(ligermodels.load(folder, progress=False)(IDS).logits, trained)
    assert torch.equal(other.lm_head.weight, made.lm_head.weight), "its files were replaced"
    shutil.rmtree(folder)
    assert torch.equal(model(IDS).logits, trained)


def test_what_is_copied(tmp_path):
    """Another dtype, pickles, whose tensors may share memory, and weights that are not aligned."""
    model = make_model()
    names = [name for name, _ in model.named_parameters()]
    folder = model.save_pretrained(tmp_path / "model")
    assert copied(ligermodels.load(folder, dtype="bfloat16", progress=False)) == names
    weights = folder / "model.safetensors"
    blob = weights.read_bytes()
    length = int.from_bytes(blob[:8], "little")
    weights.write_bytes((length + 2).to_bytes(8, "little") + blob[8 : 8 + length] + b"  " + blob[8 + length :])
    shifted = ligermodels.load(folder, progress=False)
    assert copied(shifted) == names and torch.equal(shifted.lm_head.weight, model.lm_head.weight)
    weights.unlink()
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    assert copied(ligermodels.load(folder, allow_pickle=True, progress=False)) == names
