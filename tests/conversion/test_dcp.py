"""Distributed checkpoints: sharded or not, ours or Hugging Face's names; and hostile ones."""

import json
import os
import pickle
import shutil

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from ligermodels.checkpoint import weights
from ligermodels.conversion.distributed import DcpSource
from ligermodels.errors import CheckpointError
from tests.checkpoint.fixtures import make_model
from tests.parallel.ranks import on_ranks

NORM = "model.norm.weight"


def make(**changes):
    return make_model(num_hidden_layers=2, **changes)


def configured(folder, model):
    folder.mkdir(parents=True, exist_ok=True)
    config = {**model.config.to_hf(), "model_type": model.config.model_type}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def save(state, folder):
    dcp.save(state, storage_writer=dcp.FileSystemWriter(folder), no_dist=True)


def check_equal(source, expected):
    wanted = {name: weights.TensorInfo(tensor.dtype, tuple(tensor.shape)) for name, tensor in expected.items()}
    assert source.headers == wanted
    assert all(weights.same_bits(source.read(name), tensor.detach()) for name, tensor in expected.items())


@pytest.mark.parametrize("prefix", ["", "model.", "app.model."])
@pytest.mark.parametrize("names", ["memory", "disk"])
@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_names_are_found_after_any_prefix(tmp_path, prefix, names, family):
    model = make(model_type=family).bfloat16()
    named = dict(model.named_parameters() if names == "memory" else weights.export(model, model.names_on_disk))
    state = {prefix + name: tensor.detach() for name, tensor in named.items()}
    beside = {"optimizer.state.norm.weight.exp_avg": torch.ones(16), "lr_scheduler": {"step": 3}, "step": 7}
    save({**state, **beside}, tmp_path)
    configured(tmp_path, model)
    (tmp_path / "tokenizer.json").write_text("{}")
    source = DcpSource(tmp_path)
    check_equal(source, named)
    assert source.config["model_type"] == family
    assert source.files() == {name: tmp_path / name for name in ("tokenizer.json", "config.json")}


def on_two_ranks(folder):
    model, mesh = make(vocab_size=63), init_device_mesh("cpu", (2,))  # an odd count of rows: uneven shards
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
    ids = torch.arange(20).reshape(2, 10)
    model(ids, labels=ids).loss.backward()
    optimizer.step()
    state, optimizer_state = get_state_dict(model, optimizer)
    dcp.save({"model": state, "optim": optimizer_state}, checkpoint_id=folder / "saved")


def test_shards_of_fsdp_are_joined(tmp_path):
    on_ranks(tmp_path, lambda: on_two_ranks(tmp_path))
    model = make(vocab_size=63)
    configured(tmp_path / "config", model)
    assert len(list((tmp_path / "saved").glob("*.distcp"))) == 2
    check_equal(DcpSource(tmp_path / "saved", tmp_path / "config"), dict(model.named_parameters()))
    (tmp_path / "saved" / "__1_0.distcp").unlink()
    with pytest.raises(CheckpointError, match=r"__1_0\.distcp is not there"):
        DcpSource(tmp_path / "saved", tmp_path / "config")


# What is refused


class Evil:
    def __reduce__(self):
        return os.system, ("touch hacked",)


class Attribute:
    def __reduce__(self):
        return getattr, (torch.Size, "index")


def edited(change):
    def apply(folder):
        metadata = pickle.loads((folder / ".metadata").read_bytes())
        change(metadata, next(place for key, place in metadata.storage_data.items() if key.fqn == NORM))
        (folder / ".metadata").write_bytes(pickle.dumps(metadata))

    return apply


def written(data, file=".metadata"):
    return lambda folder: (folder / file).write_bytes(data((folder / file).read_bytes()))


BAD = {
    "no metadata": (lambda f: (f / ".metadata").unlink(), "cannot be read as the metadata"),
    "metadata cut short": (written(lambda blob: blob[:300]), "cannot be read as"),
    "a shell command": (written(lambda blob: pickle.dumps(Evil())), "posix.system"),
    "a command inside": (edited(lambda h, place: h.state_dict_metadata.update(x=Evil())), "posix"),
    "an attribute": (edited(lambda h, place: h.state_dict_metadata.update(x=Attribute())), "the attribute index of"),
    "attribute by a dotted name": (written(lambda blob: b"\x80\x04\x8c\x05torch\x8c\x0aSize.index\x93."), "Size.index"),
    "a path that leaves": (edited(lambda h, place: setattr(place, "relative_path", "../x.distcp")), "in its folder"),
    "a lost shard": (edited(lambda h, place: h.state_dict_metadata[NORM].chunks.clear()), "not whole in its 0 shards"),
    "no tensor of a model": (edited(lambda h, place: h.state_dict_metadata.clear()), "holds no Llama"),
    "a shard cut short": (written(lambda blob: blob[:-9000], "__0_0.distcp"), "cannot be read"),
}  # fmt: skip


def test_members_of_enums_as_python_3_11_0_to_3_11_3_pickle_them(tmp_path, good, monkeypatch):
    folder = shutil.copytree(good, tmp_path / "old")
    monkeypatch.setattr(_MEM_FORMAT_ENCODING, "__reduce_ex__", lambda self, _: (getattr, (type(self), self.name)))
    edited(lambda h, place: None)(folder)
    assert b"getattr" in (folder / ".metadata").read_bytes()
    assert DcpSource(folder).headers == DcpSource(good).headers


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    folder, model = tmp_path_factory.mktemp("good"), make()
    save({name: tensor.detach() for name, tensor in model.named_parameters()}, folder)
    return configured(folder, model)


@pytest.mark.parametrize("case", BAD)
def test_bad_checkpoints(tmp_path, monkeypatch, good, case):
    folder = shutil.copytree(good, tmp_path / "bad")
    monkeypatch.chdir(tmp_path)
    spoil, message = BAD[case]
    spoil(folder)
    with pytest.raises(CheckpointError, match=message):
        source = DcpSource(folder)
        for name in source.headers:
            source.read(name)
    assert not (tmp_path / "hacked").exists()
