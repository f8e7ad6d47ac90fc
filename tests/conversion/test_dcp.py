"""Distributed checkpoints: sharded by FSDP or not, ours or Hugging Face's, read and written; and hostile ones."""

import json
import os
import pickle
import random
import shutil
import time

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from ligermodels.arch import ARCHS
from ligermodels.checkpoint import weights
from ligermodels.checkpoint.reading import SafetensorsReader
from ligermodels.conversion.dcp import DcpSource, write_dcp
from ligermodels.errors import CheckpointError, ConfigError, HubError, LigermodelsError

SIZES = dict(
    vocab_size=61, hidden_size=32, intermediate_size=44, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2,
)  # fmt: skip


def make(family="llama", dtype=torch.float32, **changes):
    torch.manual_seed(3)
    return ARCHS[family].from_config({**SIZES, **changes}, dtype=dtype, device="cpu")


def configured(folder, model):
    folder.mkdir(parents=True, exist_ok=True)
    config = {**model.config.to_hf(), "model_type": model.config.model_type}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def save(state, folder):
    dcp.save(state, storage_writer=dcp.FileSystemWriter(folder), no_dist=True)


def check_equal(source, expected):
    assert set(source.headers) == set(expected)
    for name, tensor in expected.items():
        assert source.headers[name] == weights.TensorInfo(tensor.dtype, tuple(tensor.shape))
        assert weights.same_bits(source.read(name), tensor.detach())


@pytest.mark.parametrize("prefix", ["", "model.", "app.model."])
@pytest.mark.parametrize("names", ["memory", "disk"])
@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_names_are_found_behind_any_prefix(tmp_path, prefix, names, family):
    model = make(family, torch.bfloat16)
    held = dict(model.named_parameters() if names == "memory" else weights.export(model, model.DISK_NAMES))
    state = {prefix + name: tensor.detach() for name, tensor in held.items()}
    beside = {"optimizer.state.norm.weight.exp_avg": torch.ones(32), "lr_scheduler": {"step": 3}, "step": 7}
    save({**state, **beside}, tmp_path)
    configured(tmp_path, model)
    (tmp_path / "tokenizer.json").write_text("{}")
    with DcpSource(tmp_path) as source:
        check_equal(source, held)
        assert source.config()["model_type"] == family
        assert source.files() == {name: tmp_path / name for name in ("tokenizer.json", "config.json")}


def on_two_ranks(rank, folder):
    dist.init_process_group("gloo", init_method=f"file://{folder / 'meeting'}", rank=rank, world_size=2)
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
    if rank == 0:
        plain = make(vocab_size=63)
        torch.save({name: p.detach() for name, p in plain.named_parameters()}, folder / "expected.pt")
    dist.barrier()
    dist.destroy_process_group()


def test_shards_of_fsdp_are_joined(tmp_path):
    mp.spawn(on_two_ranks, args=(tmp_path,), nprocs=2)
    configured(tmp_path / "config", make(vocab_size=63))
    assert len(list((tmp_path / "saved").glob("*.distcp"))) == 2
    source = DcpSource(tmp_path / "saved", tmp_path / "config")
    check_equal(source, torch.load(tmp_path / "expected.pt"))
    (tmp_path / "saved" / "__1_0.distcp").unlink()
    with pytest.raises(CheckpointError, match=r"__1_0\.distcp is not there"):
        DcpSource(tmp_path / "saved", tmp_path / "config")


@pytest.mark.parametrize("names", ["memory", "disk"])
def test_what_is_written_is_loaded_by_torch(tmp_path, names):
    model = make()
    model.save_pretrained(tmp_path / "hf")
    reader = Reader(dict(model.named_parameters())) if names == "memory" else SafetensorsReader(tmp_path / "hf")
    path = tmp_path / "dcp"
    write_dcp(reader, path)
    assert sorted(os.listdir(path)) == [".metadata", "__0_0.distcp"]
    check_equal(DcpSource(path, tmp_path / "hf"), {name: reader.read(name) for name in reader.headers})
    if names == "memory":
        other = ARCHS["llama"].from_config(SIZES, dtype=torch.float32, device="cpu")
        state = {name: torch.zeros_like(tensor) for name, tensor in other.state_dict().items()}
        dcp.load(state, checkpoint_id=path, no_dist=True)
        other.load_state_dict(state)
        for one, two in zip(other.parameters(), model.parameters(), strict=True):
            assert torch.equal(one, two)


class Reader:
    source = "memory"

    def __init__(self, tensors):
        self.tensors = {name: tensor.detach() for name, tensor in tensors.items()}
        self.headers = {n: weights.TensorInfo(x.dtype, tuple(x.shape)) for n, x in self.tensors.items()}
        self.calls = []

    def read(self, name):
        self.calls.append(name)
        return self.tensors[name]


@pytest.mark.parametrize("error", [HubError("of the source"), OSError(28, "full"), KeyboardInterrupt()], ids=repr)
def test_writing_reads_each_tensor_once_and_raises_what_reading_raises(tmp_path, monkeypatch, error):
    reader = Reader(dict(make().named_parameters()))
    write_dcp(reader, tmp_path / "dcp")
    assert sorted(reader.calls) == sorted(reader.headers)

    def broken(name):
        raise error

    monkeypatch.setattr(reader, "read", broken)
    with pytest.raises(type(error)) as caught:
        write_dcp(reader, tmp_path / "other")
    assert caught.value is error


class Evil:
    def __init__(self, call, *args):
        self.reduced = call, args

    def __reduce__(self):
        return self.reduced


def edited(change):
    def apply(folder):
        held = pickle.loads((folder / ".metadata").read_bytes())
        (folder / ".metadata").write_bytes(pickle.dumps(change(held) or held))

    return apply


def written(data):
    return lambda folder: (folder / ".metadata").write_bytes(data)


def entry(held):
    return held.state_dict_metadata["model.norm.weight"]


def info(held):
    return next(value for key, value in held.storage_data.items() if key.fqn == "model.norm.weight")


def cut(folder):
    file = folder / "__0_0.distcp"
    file.write_bytes(file.read_bytes()[:-9])


def zeroed(folder):
    file = folder / "__0_0.distcp"
    file.write_bytes(bytes(file.stat().st_size))


def swapped(held):
    keys = [
        key
        for key in held.storage_data
        if key.fqn in ("model.layers.0.input_layernorm.weight", "model.embed_tokens.weight")
    ]
    a, b = (held.storage_data[key] for key in keys)
    for name in ("offset", "length"):
        x, y = getattr(a, name), getattr(b, name)
        setattr(a, name, y), setattr(b, name, x)


def overlapping(held):
    box = metadata.ChunkStorageMetadata
    entry(held).chunks[:] = [
        box(torch.Size([0]), torch.Size([20])), box(torch.Size([10]), torch.Size([12])),
    ]  # fmt: skip
    stored = info(held)
    del held.storage_data[next(key for key in held.storage_data if key.fqn == "model.norm.weight")]
    for offset in (0, 10):
        held.storage_data[metadata.MetadataIndex("model.norm.weight", [offset])] = stored


def elsewhere(path):
    path.rename(path.parents[1] / path.name)
    path.symlink_to(path.parents[1] / path.name)


BAD = {
    "no metadata": (lambda f: (f / ".metadata").unlink(), "is not there"),
    "empty metadata": (written(b""), "is not the metadata"),
    "metadata is text": (written(b"version https://git-lfs.github.com/spec/v1"), "is not the metadata"),
    "metadata is HTML": (written(b"<!doctype html>"), "is not the metadata"),
    "metadata cut short": (lambda f: written((f / ".metadata").read_bytes()[:300])(f), "is not the metadata"),
    "a dictionary": (written(pickle.dumps({})), "is not the metadata"),
    "a class as the state": (written(pickle.dumps(metadata.Metadata)), "is not the metadata"),
    "a shell command": (written(pickle.dumps(Evil(os.system, "touch hacked"))), "posix.system"),
    "eval": (written(pickle.dumps(Evil(eval, "open('hacked', 'w')"))), "builtins.eval"),
    "a command inside": (edited(lambda h: h.state_dict_metadata.update(x=Evil(os.system, "touch hacked"))), "posix"),
    "torch.load inside": (edited(lambda h: h.state_dict_metadata.update(x=Evil(torch.load, "x"))), "torch"),
    "attribute by a dotted name": (written(b"\x80\x04\x8c\x05torch\x8c\x0aSize.index\x93."), "Size.index"),
    "a memo of 64 GB": (written(b"\x80\x04Nr\xff\xff\xff\x7f."), "is not the metadata"),
    "a frame of 64 GB": (written(b"\x80\x04\x95" + (2**36).to_bytes(8, "little") + b"N."), "is not the metadata"),
    "text of 64 GB": (written(b"\x80\x04\x8d" + (2**36).to_bytes(8, "little") + b"N."), "is not the metadata"),
    "nested without end": (written(b"(" * 10**5 + b"."), "is not the metadata"),
    "another class of torch": (written(pickle.dumps(Evil(torch.Generator))), "Generator"),
    "a path that leaves": (edited(lambda h: setattr(info(h), "relative_path", "../x.distcp")), "no .distcp file"),
    "an absolute path": (edited(lambda h: setattr(info(h), "relative_path", "/etc/passwd")), "no .distcp file"),
    "a path that is a number": (edited(lambda h: setattr(info(h), "relative_path", 3)), "no .distcp file"),
    "a negative offset": (edited(lambda h: setattr(info(h), "offset", -1)), "lies at -1"),
    "a length of nothing": (edited(lambda h: setattr(info(h), "length", 0)), "has 0 bytes"),
    "a length beyond the file": (edited(lambda h: setattr(info(h), "length", 10**12)), "is cut short"),
    "compressed": (edited(lambda h: setattr(info(h), "transform_descriptors", ["zstd"])), "compressed"),
    "a shape beyond all": (edited(lambda h: setattr(entry(h), "size", torch.Size([2**62]))), "do not make up"),
    "a shape of text": (edited(lambda h: setattr(entry(h), "size", "32")), "is not the metadata"),
    "no chunks": (edited(lambda h: entry(h).chunks.clear()), "is not the metadata"),
    "a lost shard": (
        edited(lambda h: h.storage_data.pop(next(k for k in h.storage_data if k.fqn == "model.norm.weight")) and None),
        "do not make up",
    ),
    "shards that overlap": (edited(overlapping), "do not make up"),
    "no dtype": (edited(lambda h: setattr(entry(h).properties, "dtype", "float32")), "dtype"),
    "another dtype": (edited(lambda h: setattr(entry(h).properties, "dtype", torch.float16)), "torch.float32"),
    "places swapped": (edited(swapped), "two checkpoints|bytes for a shard"),
    "packed by an earlier version": (
        lambda f: save({"model.layers.0.attn.qkv_proj.weight": torch.ones(64, 32)}, f),
        "an earlier ligermodels",
    ),
    "no tensor of a model": (
        edited(lambda h: [h.state_dict_metadata.pop(k) for k in list(h.state_dict_metadata)] and None),
        "holds no Llama",
    ),
    "a shard cut short": (cut, "is cut short"),
    "a shard of zeros": (zeroed, "is damaged"),
    "a shard is a folder": (lambda f: ((f / "__0_0.distcp").unlink(), (f / "__0_0.distcp").mkdir()), "not a regular"),
    "a shard is a pipe": (lambda f: ((f / "__0_0.distcp").unlink(), os.mkfifo(f / "__0_0.distcp")), "not a regular"),
    "a shard is a link that leaves": (lambda f: elsewhere(f / "__0_0.distcp"), "leaves its folder"),
    "metadata is a link that leaves": (lambda f: elsewhere(f / ".metadata"), "leaves its folder"),
    "metadata is a pipe": (lambda f: ((f / ".metadata").unlink(), os.mkfifo(f / ".metadata")), "not a regular"),
}


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    folder, model = tmp_path_factory.mktemp("good"), make()
    save({name: tensor.detach() for name, tensor in model.named_parameters()}, folder)
    return configured(folder, model)


@pytest.mark.parametrize("case", BAD)
def test_bad_checkpoints(tmp_path, monkeypatch, good, case):
    folder = tmp_path / "bad"
    shutil.copytree(good, folder)
    monkeypatch.chdir(tmp_path)
    spoil, message = BAD[case]
    spoil(folder)
    start = time.process_time()
    with pytest.raises(CheckpointError, match=message):
        source = DcpSource(folder)
        for name in source.headers:
            source.read(name)
    assert time.process_time() - start < 5
    assert not (tmp_path / "hacked").exists()


def test_mutated_files_raise_our_errors_or_nothing(tmp_path, good):
    folder, chance, refused = tmp_path / "bad", random.Random(0), 0
    shutil.copytree(good, folder)
    files = [folder / ".metadata", folder / "__0_0.distcp"]
    whole = [file.read_bytes() for file in files]
    for _ in range(200):
        for file, data in zip(files, whole, strict=True):
            changed = bytearray(data)
            for _ in range(chance.randint(0, 3)):
                at, kind = chance.randrange(len(changed)), chance.randrange(3)
                changed[at : at + (0, 1, 9)[kind]] = chance.randbytes((5, 1, 0)[kind])
            file.write_bytes(changed)
        try:
            source = DcpSource(folder)
            for name in source.headers:
                source.read(name)
        except LigermodelsError:
            refused += 1
    assert refused > 100


def test_a_state_pushed_into_a_class_stays_in_its_load(tmp_path, good):
    """BUILD on a class sets its attributes: on a record of this load, never on torch's class."""
    folder = tmp_path / "bad"
    shutil.copytree(good, folder)
    name = b"torch.distributed.checkpoint.metadata"
    attack = b"\x80\x04\x8c" + bytes([len(name)]) + name + b"\x8c\x08Metadata\x93N}\x8c\x04evilK\x01s\x86b."
    written(attack)(folder)
    with pytest.raises(CheckpointError, match="is not the metadata"):
        DcpSource(folder)
    assert not hasattr(metadata.Metadata, "evil")


def test_a_path_in_storage_meta_is_no_reason_to_refuse(tmp_path, good):
    held = pickle.loads((good / ".metadata").read_bytes())
    assert isinstance(held.storage_meta.checkpoint_id, os.PathLike)
    assert isinstance(next(iter(held.storage_data.values())), filesystem._StorageInfo)
    check_equal(DcpSource(good), dict(make().named_parameters()))


def test_a_config_of_no_family_is_refused(tmp_path, good):
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    with pytest.raises(ConfigError, match="bert"):
        DcpSource(good, tmp_path)
