"""Reading folders: which files are read, and that each kind of damage ends in an error that names it."""

import json
import os
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import ligermodels
from ligermodels.checkpoint.files import lenient_json
from ligermodels.checkpoint.reading import SafetensorsReader, open_checkpoint
from ligermodels.checkpoint.weights import TensorInfo
from ligermodels.errors import CheckpointError
from tests.checkpoint.fixtures import (
    EMBEDDING,
    INDEX,
    LAST,
    NORM,
    SHARDS,
    WEIGHTS,
    join,
    make_good,
    split,
    spoiled,
)

Spoil = Callable[[Path], object]
LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"
OUTSIDE = Path("/etc/hostname")


def index(folder: Path, weight_map: object, single: str = WEIGHTS) -> None:
    (folder / f"{single}.index.json").write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}))


# What is read


def test_only_what_the_index_names_is_read(tmp_path):
    for file, value in [(WEIGHTS, 3.0), ("consolidated.safetensors", 4.0)]:
        save_file({"a": torch.tensor(value), "b": torch.tensor(value)}, tmp_path / file)
    save_file({"a": torch.tensor(1.0), "left_out": torch.tensor(0.0)}, tmp_path / SHARDS[0])
    save_file({"a": torch.tensor(5.0), "b": torch.tensor(2.0)}, tmp_path / SHARDS[1])
    index(tmp_path, {"a": SHARDS[0], "b": SHARDS[1]})
    reader = open_checkpoint(tmp_path)
    assert reader.places == {"a": SHARDS[0], "b": SHARDS[1]}
    assert (reader.read("a"), reader.read("b")) == (1.0, 2.0)


@pytest.mark.parametrize("wrapper", ["module._orig_mod.", "base_model.model."])
def test_names_that_a_wrapper_has_changed(tmp_path, wrapper):
    """A folder with weights alone, as a trainer leaves it; no config.json."""
    held = {f"{wrapper}model.a": torch.ones(2), f"{wrapper}model._checkpoint_wrapped_module.b": torch.zeros(3)}
    for name, file in zip(held, SHARDS, strict=True):
        save_file({name: held[name]}, tmp_path / file)
    index(tmp_path, dict(zip(held, SHARDS, strict=True)))
    reader = open_checkpoint(tmp_path)
    assert set(reader.headers) == set(reader.places) == {"model.a", "model.b"}
    assert torch.equal(reader.read("model.a"), torch.ones(2)) and torch.equal(reader.read("model.b"), torch.zeros(3))


def test_json_with_wrong_commas():
    assert lenient_json('{"a": 1 "b": [2, ], }') == {"a": 1, "b": [2]}
    with pytest.raises(ValueError):
        lenient_json('{"a": 1 2}')


def test_links_of_the_hub_cache_are_followed(good, tmp_path):
    storage = tmp_path / "models--owner--name"
    snapshot = storage / "snapshots" / ("1" * 40)
    (storage / "blobs").mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for number, path in enumerate(sorted(good["single"].iterdir())):
        (storage / "blobs" / str(number)).write_bytes(path.read_bytes())
        (snapshot / path.name).symlink_to(f"../../blobs/{number}")
    ligermodels.load(snapshot, progress=False)


# Damage


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    return make_good(tmp_path_factory.mktemp("good"))


def put(file: str, content: bytes | object) -> Spoil:
    """`file` holds these bytes, or this as JSON."""
    blob = content if isinstance(content, bytes) else json.dumps(content).encode()
    return lambda folder: (folder / file).write_bytes(blob)


def change(function: Callable[[bytes], bytes], file: str = WEIGHTS) -> Spoil:
    return lambda folder: (folder / file).write_bytes(function((folder / file).read_bytes()))


def header(function: Callable[[dict], object]) -> Spoil:
    """The header of the only file, changed in place."""

    def spoil(folder: Path) -> None:
        entries, data = split((folder / WEIGHTS).read_bytes())
        function(entries)
        (folder / WEIGHTS).write_bytes(join(entries, data))

    return spoil


def tensors(function: Callable[[dict], object], file: str = WEIGHTS) -> Spoil:
    def spoil(folder: Path) -> None:
        state = {name: tensor.clone() for name, tensor in load_file(folder / file).items()}
        function(state)
        save_file(state, folder / file)

    return spoil


def place(file: str, make: Callable[[Path], object]) -> Spoil:
    """Something else in the place of a file."""

    def spoil(folder: Path) -> None:
        (folder / file).unlink(missing_ok=True)
        make(folder / file)

    return spoil


def mapped(function: Callable[[dict], object]) -> Spoil:
    """The weight_map of the index, changed in place."""

    def spoil(folder: Path) -> None:
        content = json.loads((folder / INDEX).read_text())
        function(content["weight_map"])
        (folder / INDEX).write_text(json.dumps(content))

    return spoil


def renamed(function: Callable[[str], str]) -> Spoil:
    return header(lambda h: [h.update({function(name): h.pop(name)}) for name in list(h) if name[0] != "_"])


def tied(function: Callable[[torch.Tensor], torch.Tensor]) -> Spoil:
    """The config ties head and embedding, and the file has a head of its own, made of the embedding."""

    def spoil(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
        tensors(lambda t: t.update({LAST: function(t[EMBEDDING]).clone()}))(folder)

    return spoil


Q = "model.layers.0.self_attn.q_proj.weight"
SINGLE: dict[str, tuple[Spoil, str]] = {
    "header cut": (change(lambda b: b[:100]), "not a safetensors file.*cut short"),
    "git-lfs pointer": (put(WEIGHTS, LFS), "git lfs pull"),
    "pickle renamed": (lambda f: torch.save({"a": torch.ones(1)}, f / WEIGHTS), "pickle under another name"),
    "not there": (lambda f: (f / WEIGHTS).unlink(), "holds neither.*adapter"),
    "a link out of the folder": (place(WEIGHTS, lambda p: p.symlink_to(OUTSIDE)), "leaves its folder"),
    "a name twice after unwrapping": (
        header(lambda h: h.update({"module.model.norm.weight": h.pop("lm_head.weight")})), "one name"),
    "fp8 weights": (tensors(lambda t: t.update({Q: t[Q].to(torch.float8_e4m3fn)})), "quantised .*float8"),
    "another shape": (
        tensors(lambda t: t.update({Q: t[Q][:8].clone()})), rf"wrong shape \(1\): {Q} is \[8, 16\].*another model's"),
    "a resized vocabulary": (
        tensors(lambda t: t.update({EMBEDDING: torch.zeros(40, 16)})), "vocabulary was resized"),
    "both directions": (
        tensors(lambda t: [t.pop(name) for name in list(t) if "_proj" in name] and t.update(extra=torch.ones(1))),
        r"does not match Llama.*missing \(7 of 12\): .*, \.\.\..*unexpected \(1\): extra"),
    "bitsandbytes": (renamed(lambda n: n.replace("q_proj.weight", "q_proj.weight.absmax")), "Likely: .*bitsandbytes"),
    "an adapter": (renamed(lambda n: n.replace("q_proj.weight", "q_proj.lora_A.weight")), "Likely: an adapter"),
    "Meta's names": (renamed(lambda n: n.replace("self_attn.q_proj", "attention.wq")), "Meta's or Mistral's"),
    "a part": (renamed(lambda n: "language_model." + n), "larger model that holds this one under 'language_model.'"),
    "a bare model": (renamed(lambda n: n.removeprefix("model.")), "its names lack 'model.'"),
    "more layers": (renamed(lambda n: n.replace("layers.0", "layers.5")), "6 layers on disk, 1 expected"),
    "another head": (renamed(lambda n: n.replace("lm_head", "score")), "set tie_word_embeddings"),
    "a tied head that differs": (tied(lambda head: head.index_fill(0, torch.tensor(5), 0)), "head.weight differs from"),
    "a tied head of another dtype": (tied(lambda head: head.half()), "head.weight differs from model.embed"),
    "a tied head of another size": (tied(lambda head: torch.zeros(40, 16)), r"lm_head.weight is \[40, 16\]"),
}  # fmt: skip

SHARDED: dict[str, tuple[Spoil, str]] = {
    "a shard lost": (lambda f: (f / SHARDS[1]).unlink(), "00002-of-00002.safetensors is not there.*Fetch"),
    "a shard twice": (lambda f: (f / SHARDS[1]).write_bytes((f / SHARDS[0]).read_bytes()), "lacks .*index"),
    **{
        f"the index names {file!r}": (
            mapped(lambda m, file=file: m.update({NORM: file})), r"index\.json names .*; expected a \.safetensors file")
        for file in ("../x.safetensors", "/etc/x.safetensors", "C:\\x.safetensors", "model.bin", 3)
    },
    "the index names a shard that lacks the tensor": (mapped(lambda m: m.update(x=SHARDS[0])), "lacks x, which"),
    "the index leaves a tensor out": (mapped(lambda m: m.pop(NORM)), "missing .*model.norm"),
}  # fmt: skip


@pytest.mark.parametrize(
    "layout, name", [("single", name) for name in SINGLE] + [("sharded", name) for name in SHARDED]
)
def test_damage_ends_in_a_typed_error(good, layout, name):
    spoil, words = {"single": SINGLE, "sharded": SHARDED}[layout][name]
    with spoiled(good[layout], spoil) as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(CheckpointError, match=f"(?s){words}") as caught:
            ligermodels.load(folder, progress=False)
        assert str(folder) in str(caught.value), "a message says where"


def test_a_tied_head_that_is_the_embedding(good):
    with spoiled(good["single"], tied(lambda head: head)) as folder:
        model = ligermodels.load(folder, progress=False)
    assert model.lm_head.weight is model.get_parameter(EMBEDDING)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_nan_and_infinity_are_named_in_one_warning(good, value):
    broken = spoiled(good["single"], tensors(lambda t: t[Q][3:5, 2].fill_(value)))
    words = rf"1 of 12 tensors hold NaN or infinity: {Q}"
    with broken as folder, pytest.warns(UserWarning, match=words) as caught:
        ligermodels.load(folder, progress=False)
    assert len(caught) == 1


def test_a_companion_that_is_a_link_out_is_not_saved_along(good, tmp_path):
    """Else a folder from elsewhere could have a secret of this machine uploaded with the next push."""
    with spoiled(good["single"], lambda f: (f / "tokenizer.json").symlink_to(OUTSIDE)) as folder:
        model = ligermodels.load(folder, progress=False)
        with pytest.raises(CheckpointError, match=r"tokenizer\.json is a link that leaves its folder"):
            model.save_pretrained(tmp_path / "out")
    assert not (tmp_path / "out").exists()


# Pickles


class Payload:
    """Makes a folder when unpickled by anything that runs what it reads."""

    def __init__(self, path: str):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


@pytest.mark.parametrize("legacy", [False, True], ids=["zip", "before torch 1.6"])
def test_pickles_only_when_allowed_and_never_run(tmp_path, legacy):
    path, options = tmp_path / "pytorch_model.bin", dict(_use_new_zipfile_serialization=not legacy)
    torch.save({"a": torch.ones(2), "b": torch.zeros(3, dtype=torch.bfloat16)}, path, **options)
    with pytest.raises(CheckpointError, match=r"(?s)allow_pickle=True.*--allow-pickle"):
        open_checkpoint(tmp_path)
    with open_checkpoint(tmp_path, allow_pickle=True) as reader:
        assert reader.headers == {"a": TensorInfo(torch.float32, (2,)), "b": TensorInfo(torch.bfloat16, (3,))}
        assert torch.equal(reader.read("a"), torch.ones(2))
    torch.save({"a": Payload(str(tmp_path / "run"))}, path, **options)
    with pytest.raises(CheckpointError, match="cannot be read as a file of plain tensors") as caught:
        open_checkpoint(tmp_path, allow_pickle=True)
    assert not (tmp_path / "run").exists() and "weights_only" not in str(caught.value)
    save_file({"a": torch.ones(5)}, tmp_path / WEIGHTS)
    assert isinstance(open_checkpoint(tmp_path, allow_pickle=True), SafetensorsReader)


def test_pickles_in_shards(tmp_path):
    files = {f"x{k}": f"pytorch_model-{k:05}-of-00002.bin" for k in (1, 2)}
    for k, (name, file) in enumerate(files.items(), 1):
        torch.save({name: torch.full((2,), float(k))}, tmp_path / file)
    index(tmp_path, files, "pytorch_model.bin")
    reader = open_checkpoint(tmp_path, allow_pickle=True)
    assert {name: float(reader.read(name)[0]) for name in reader.headers} == {"x1": 1.0, "x2": 2.0}


@pytest.mark.parametrize("how", ["cut", "keys", "nested", "text", "link"])
def test_bad_pickles(tmp_path, how):
    path, state = tmp_path / "pytorch_model.bin", {"a": torch.ones(100)}
    torch.save({"keys": {3: torch.ones(1)}, "nested": {"model": state}}.get(how, state), path)
    if how == "cut":
        path.write_bytes(path.read_bytes()[:-200])
    if how == "text":
        path.write_bytes(b"hello")
    if how == "link":
        path.unlink()
        path.symlink_to(OUTSIDE)
    with pytest.raises(CheckpointError, match=r"plain tensor|not a flat|leaves its"):
        open_checkpoint(tmp_path, allow_pickle=True)
