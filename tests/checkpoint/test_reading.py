"""Reading folders: which files are read, which memory the weights have, and the error for each kind of damage."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import ligermodels
from ligermodels.checkpoint.files import lenient_json
from ligermodels.checkpoint.reading import SafetensorsReader, open_checkpoint
from ligermodels.checkpoint.weights import TensorInfo, same_bits
from ligermodels.errors import CheckpointError
from ligermodels.layers import moe
from ligermodels.layers.base import fp32_names
from ligermodels.training import add_lora, merge_lora
from tests.checkpoint.fixtures import (
    EMBEDDING,
    INDEX,
    LAST,
    NORM,
    SHARDS,
    WEIGHTS,
    join,
    make_good,
    make_model,
    split,
    spoiled,
)
from tests.tiny import ExactRouter

Spoil = Callable[[Path], object]
LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"
OUTSIDE = Path("/etc/hostname")
IDS = torch.arange(12).reshape(2, 6)


def load(folder, **options):
    return ligermodels.load(folder, progress=False, **options)


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
    assert (reader.read("a"), reader.read("b")) == (1.0, 2.0)


@pytest.mark.parametrize("pickled", [False, True])
@pytest.mark.parametrize("wrapper", ["module._orig_mod.", "base_model.model."])
def test_names_that_a_wrapper_has_changed(tmp_path, wrapper, pickled):
    """In shards of a folder with weights alone, as a trainer leaves it; no config.json."""
    single, write = ("pytorch_model.bin", torch.save) if pickled else (WEIGHTS, save_file)
    files = [
        file.replace("model", "pytorch_model").replace("safetensors", "bin") if pickled else file for file in SHARDS
    ]
    state = {f"{wrapper}model.a": torch.ones(2), f"{wrapper}model._checkpoint_wrapped_module.b": torch.zeros(3)}
    for name, file in zip(state, files, strict=True):
        write({name: state[name]}, tmp_path / file)
    index(tmp_path, dict(zip(state, files, strict=True)), single)
    reader = open_checkpoint(tmp_path, allow_pickle=True)
    assert set(reader.headers) == {"model.a", "model.b"}
    assert torch.equal(reader.read("model.a"), torch.ones(2)) and torch.equal(reader.read("model.b"), torch.zeros(3))


def test_json_with_wrong_commas():
    assert lenient_json('{"a": 1 "b": [2, ], }') == {"a": 1, "b": [2]}
    with pytest.raises(ValueError):
        lenient_json('{"a": 1 2}')


def test_links_of_the_hub_cache_are_followed(good, tmp_path):
    snapshot, blobs = (
        tmp_path / "models--owner--name" / "snapshots" / ("1" * 40),
        tmp_path / "models--owner--name/blobs",
    )
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, path in enumerate(sorted(good["single"].iterdir())):
        (blobs / str(number)).write_bytes(path.read_bytes())
        (snapshot / path.name).symlink_to(f"../../blobs/{number}")
    load(snapshot)


# Weights that stay mapped from their files on the CPU


def copied(model) -> list[str]:
    """The parameters whose memory torch has allocated."""
    return [name for name, x in model.named_parameters() if x.untyped_storage().resizable()]


def contents(folder) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("tied, shards, dtype", [(False, 1, "float32"), (True, 1, "bfloat16"), (False, 4, "bfloat16")])
def test_a_model_that_trains_and_is_saved_over_its_own_files(tmp_path, tied, shards, dtype):
    dtype = getattr(torch, dtype)
    made = make_model(tie_word_embeddings=tied).to(dtype)
    size = sum(x.nbytes for x in made.parameters())
    folder = made.save_pretrained(tmp_path / "model", max_shard_size=size // shards + 1)
    assert (len(list(folder.glob("*.safetensors"))) > 1) == (shards > 1)
    before, model = contents(folder), load(folder)
    assert not copied(model)
    model.to("cpu", dtype)
    assert not copied(model), "what changes nothing must not copy"
    assert len({x.untyped_storage().data_ptr() for x in model.parameters()}) == len([*model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), made.parameters(), strict=True))

    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model(IDS, labels=IDS).loss.backward()
    optimizer.step()
    trained = model(IDS).logits
    assert not torch.equal(trained, made(IDS).logits)
    assert contents(folder) == before, "training in place wrote into the file"
    other = load(folder)
    assert torch.equal(other.lm_head.weight, made.lm_head.weight), "training in place shows in another model"

    model.save_pretrained(folder)
    assert torch.equal(model(IDS).logits, trained) and torch.equal(load(folder)(IDS).logits, trained)
    assert torch.equal(other.lm_head.weight, made.lm_head.weight), "its files were replaced"
    shutil.rmtree(folder)
    assert torch.equal(model(IDS).logits, trained)


def test_what_is_copied(tmp_path):
    """Another dtype, pickles, whose tensors may share memory, and weights that are not aligned."""
    model = make_model()
    names = [name for name, _ in model.named_parameters()]
    folder = model.save_pretrained(tmp_path / "model")
    assert copied(load(folder, dtype="bfloat16")) == names
    entries, data = split((folder / WEIGHTS).read_bytes())
    text = json.dumps(entries).encode()
    (folder / WEIGHTS).write_bytes(join(text + b" " * (2 - len(text) % 4), data))
    shifted = load(folder)
    assert copied(shifted) == names and torch.equal(shifted.lm_head.weight, model.lm_head.weight)
    (folder / WEIGHTS).unlink()
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    assert copied(load(folder, allow_pickle=True)) == names


# Damage


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16], ids=str)
def test_what_stays_in_fp32(tmp_path, monkeypatch, stored):
    """Whatever the dtype of the model and of the file; by a quantiser, from the disk, and under an adapter too."""
    monkeypatch.setattr(moe, "Router", ExactRouter)
    made = make_model(model_type="mixtral", num_local_experts=4, initializer_range=0.2).to(torch.bfloat16)
    folder, kept = made.save_pretrained(tmp_path / "model"), fp32_names(made)
    tensors = load_file(folder / WEIGHTS)
    on_disk = {name for name, tensor in tensors.items() if tensor.dtype == torch.float32}
    assert len(kept) == len(on_disk) == 2 and {x.dtype for x in tensors.values()} == {torch.float32, torch.bfloat16}
    save_file({n: x.to(stored) if n in on_disk else x for n, x in tensors.items()}, folder / WEIGHTS, {"format": "pt"})
    tensors = load_file(folder / WEIGHTS)

    def dtypes(model):
        return {x.dtype for n, x in model.named_parameters() if n in kept}, model.model.embed_tokens.weight.dtype

    for dtype, config in [
        ("auto", None), (None, None), ("bf16", None), ("fp16", None), ("auto", made.config), (None, made.config)
    ]:  # fmt: skip
        model = load(folder, dtype=dtype, config=config)
        of_model = torch.float16 if dtype == "fp16" else torch.bfloat16
        assert dtypes(model) == ({torch.float32}, of_model) and model.config.torch_dtype == model.dtype == of_model
        saved = load_file(model.save_pretrained(tmp_path / "saved") / WEIGHTS)
        assert all(same_bits(saved[name], tensors[name].float()) for name in on_disk)
    assert dtypes(load(folder, dtype="fp64")) == ({torch.float64}, torch.float64)
    with torch.no_grad():
        expected = load(folder)(IDS).logits
        model = load(folder, quantization_config="nf4")
        assert dtypes(model)[0] == {torch.float32} and model(IDS).logits.dtype == torch.bfloat16
    model = add_lora(load(folder), targets=[], target_parameters=["mlp.gate.weight"])
    model(IDS, labels=IDS).loss.backward()
    assert {p.grad.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}
    assert dtypes(merge_lora(model)) == ({torch.float32}, torch.bfloat16)
    pytest.importorskip("accelerate")
    with torch.no_grad():
        model = load(folder, device_map={"": "disk"})
        assert dtypes(model)[0] == {torch.float32} and torch.equal(model(IDS).logits, expected)


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    return make_good(tmp_path_factory.mktemp("good"))


def put(content: bytes) -> Spoil:
    return lambda folder: (folder / WEIGHTS).write_bytes(content)


def header(function: Callable[[dict], object]) -> Spoil:
    """The header of the only file, changed in place."""

    def spoil(folder: Path) -> None:
        entries, data = split((folder / WEIGHTS).read_bytes())
        function(entries)
        (folder / WEIGHTS).write_bytes(join(entries, data))

    return spoil


def tensors(function: Callable[[dict], object]) -> Spoil:
    def spoil(folder: Path) -> None:
        state = {name: tensor.clone() for name, tensor in load_file(folder / WEIGHTS).items()}
        function(state)
        save_file(state, folder / WEIGHTS)

    return spoil


def link_out(file: str) -> Spoil:
    return lambda folder: ((folder / file).unlink(missing_ok=True), (folder / file).symlink_to(OUTSIDE))


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
BAD: dict[str, tuple[Spoil, str]] = {
    "header cut": (lambda f: put((f / WEIGHTS).read_bytes()[:100])(f), "not a safetensors file.*cut short"),
    "git-lfs pointer": (put(LFS), "git lfs pull"),
    "pickle renamed": (lambda f: torch.save({"a": torch.ones(1)}, f / WEIGHTS), "pickle under another name"),
    "not there": (lambda f: (f / WEIGHTS).unlink(), "holds neither.*adapter"),
    "a link out of the folder": (link_out(WEIGHTS), "leaves its folder"),
    "a name twice after unwrapping": (
        header(lambda h: h.update({"module.model.norm.weight": h.pop("lm_head.weight")})), "one name"),
    "fp8 weights": (tensors(lambda t: t.update({Q: t[Q].to(torch.float8_e4m3fn)})), "quantised .*float8"),
    "another shape": (
        tensors(lambda t: t.update({Q: t[Q][:8].clone()})), rf"wrong shape \(1\): {Q} is \[8, 16\].*another model's"),
    "a resized vocabulary": (
        tensors(lambda t: t.update({EMBEDDING: torch.zeros(40, 16)})), "vocabulary was resized"),
    "another hidden size": (
        tensors(lambda t: t.update({EMBEDDING: t[EMBEDDING][:, :8].clone(), Q: t[Q][:, :8].clone()})),
        r"wrong shape \(2\).*config.json is another model's"),
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
    "shard: lost": (lambda f: (f / SHARDS[1]).unlink(), "00002-of-00002.safetensors is not there.*Fetch"),
    "shard: twice": (lambda f: (f / SHARDS[1]).write_bytes((f / SHARDS[0]).read_bytes()), "lacks .*index"),
    **{
        f"shard: the index names {file!r}": (
            mapped(lambda m, file=file: m.update({NORM: file})), r"index\.json names .*; expected a \.safetensors file")
        for file in ("../x.safetensors", "/etc/x.safetensors", "C:\\x.safetensors", "model.bin", 3)
    },
    "shard: the index names one that lacks the tensor": (mapped(lambda m: m.update(x=SHARDS[0])), "lacks x, which"),
    "shard: the index leaves a tensor out": (mapped(lambda m: m.pop(NORM)), "missing .*model.norm"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
@pytest.mark.filterwarnings("ignore")
def test_damage_ends_in_a_typed_error(good, case):
    spoil, message = BAD[case]
    with spoiled(good["sharded" if case.startswith("shard:") else "single"], spoil) as folder:
        with pytest.raises(CheckpointError, match=f"(?s){message}") as caught:
            load(folder)
        assert str(folder) in str(caught.value), "a message says where"


def test_a_tied_head_that_is_the_embedding(good):
    with spoiled(good["single"], tied(lambda head: head)) as folder:
        model = load(folder)
    assert model.lm_head.weight is model.get_parameter(EMBEDDING)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_nan_and_infinity_are_named_in_one_warning(good, value):
    message = rf"1 of 12 tensors hold NaN or infinity: {Q}"
    broken = spoiled(good["single"], tensors(lambda t: t[Q][3:5, 2].fill_(value)))
    with broken as folder, pytest.warns(UserWarning, match=message) as caught:
        load(folder)
    assert len(caught) == 1


def test_a_companion_that_is_a_link_out_is_not_saved_along(good, tmp_path):
    """Else a folder from elsewhere could have a secret of this machine uploaded with the next push."""
    with spoiled(good["single"], link_out("tokenizer.json")) as folder:
        model = load(folder)
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


PICKLED = {"keys": {3: torch.ones(1)}, "nested": {"model": {"a": torch.ones(1)}}}


@pytest.mark.parametrize("how", ["cut", "keys", "nested", "text", "link"])
def test_bad_pickles(tmp_path, how):
    path = tmp_path / "pytorch_model.bin"
    torch.save(PICKLED.get(how, {"a": torch.ones(100)}), path)
    if how in ("cut", "text"):
        path.write_bytes(path.read_bytes()[:-200] if how == "cut" else b"hello")
    if how == "link":
        link_out(path.name)(tmp_path)
    with pytest.raises(CheckpointError, match=r"plain tensor|not a flat|leaves its"):
        open_checkpoint(tmp_path, allow_pickle=True)
