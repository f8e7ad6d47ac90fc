"""Weight files, indexes and their match with the config, spoiled in every way by name: each ends in a typed error."""

import functools
import json
import os
import shutil
import threading
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import ligermodels
from ligermodels.checkpoint import reading
from ligermodels.checkpoint.reading import SafetensorsReader
from ligermodels.errors import CheckpointError, HubError
from tests.hostile.folders import (
    EMBEDDING,
    INDEX,
    LAST,
    NORM,
    SHARDS,
    WEIGHTS,
    join,
    limited,
    make_good,
    make_model,
    split,
    spoiled,
)

Spoil = Callable[[Path], object]
LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"
HTML = b"\n<!DOCTYPE html><html><body>Sign in</body></html>" * 9
OUTSIDE = Path("/etc/hostname")


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    return make_good(tmp_path_factory.mktemp("good"))


def put(file: str, content: bytes | object) -> Spoil:
    """`file` holds these bytes, or this as JSON."""
    blob = content if isinstance(content, bytes) else json.dumps(content).encode()
    return lambda folder: (folder / file).write_bytes(blob)


def blob(change: Callable[[bytes], bytes], file: str = WEIGHTS) -> Spoil:
    return lambda folder: (folder / file).write_bytes(change((folder / file).read_bytes()))


def header(change: Callable[[dict], object]) -> Spoil:
    """The header of the only file, changed in place (or replaced, where `change` returns bytes)."""

    def spoil(folder: Path) -> None:
        entries, data = split((folder / WEIGHTS).read_bytes())
        changed = change(entries)
        (folder / WEIGHTS).write_bytes(join(changed if isinstance(changed, bytes) else entries, data))

    return spoil


def entry(name: str = NORM, **fields: object) -> Spoil:
    return header(lambda entries: entries[name].update(fields))


def tensors(change: Callable[[dict], object], file: str = WEIGHTS) -> Spoil:
    def spoil(folder: Path) -> None:
        state = {name: tensor.clone() for name, tensor in load_file(folder / file).items()}
        change(state)
        save_file(state, folder / file)

    return spoil


def place(file: str, make: Callable[[Path], object]) -> Spoil:
    """Something else in the place of a file."""

    def spoil(folder: Path) -> None:
        (folder / file).unlink(missing_ok=True)
        make(folder / file)

    return spoil


def mapped(change: Callable[[dict], object]) -> Spoil:
    """The weight_map of the index, changed in place."""

    def spoil(folder: Path) -> None:
        index = json.loads((folder / INDEX).read_text())
        change(index["weight_map"])
        (folder / INDEX).write_text(json.dumps(index))

    return spoil


def config(**changes: object) -> Spoil:
    def spoil(folder: Path) -> None:
        values = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**values, **changes}))

    return spoil


def duplicate(entries: dict) -> bytes:
    text = json.dumps(entries)
    return f'{text[:-1]}, "{NORM}": {json.dumps(entries[NORM])}}}'.encode()


def many(count: int) -> bytes:
    """A well-formed file with as many one-byte tensors as a header can hold."""
    entries = {f"{i}": {"dtype": "U8", "shape": [1], "data_offsets": [i, i + 1]} for i in range(count)}
    return join(entries, bytes(count))


def twice_other(folder: Path) -> None:
    """A tensor of the first shard, with other values, in the second one as well."""
    name, value = next(iter(load_file(folder / SHARDS[0]).items()))
    tensors(lambda state: state.update({name: value + 1}), SHARDS[1])(folder)


FILES: dict[str, tuple[Spoil, type, str]] = {
    "empty": (put(WEIGHTS, b""), CheckpointError, "cut short"),
    "seven bytes": (put(WEIGHTS, b"\0" * 7), CheckpointError, "cut short"),
    "header cut": (blob(lambda b: b[:100]), CheckpointError, "cut short"),
    "data cut": (blob(lambda b: b[:-1]), CheckpointError, "cut short"),
    "half a file": (blob(lambda b: b[: len(b) // 2]), CheckpointError, "cut short"),
    "a byte too many": (blob(lambda b: b + b"\0"), CheckpointError, "cut short"),
    "zeros": (put(WEIGHTS, bytes(10_000)), CheckpointError, "cut short"),
    "header of 2^63": (blob(lambda b: bytes(7) + b"\x80" + b[8:]), CheckpointError, "cut short"),
    "header of 200 MB, absent": (
        blob(lambda b: (2 * 10**8).to_bytes(8, "little") + b[8:]), CheckpointError, "cut short"),
    "header of 101 MB, present": (
        put(WEIGHTS, join(b"{" + b" " * (101 * 10**6) + b"}", b"")), CheckpointError, "more names than"),
    "header of 30 MB, names": (put(WEIGHTS, many(420_000)), CheckpointError, "more names than"),
    "header not JSON": (put(WEIGHTS, join(b"{" * 100, b"")), CheckpointError, "cut short"),
    "header not UTF-8": (put(WEIGHTS, join(b'{"\xff": 1}', b"")), CheckpointError, "cut short"),
    "header a list": (put(WEIGHTS, join(b"[]", b"")), CheckpointError, "cut short"),
    "header nested deeply": (put(WEIGHTS, join(b'{"a":' * 50_000, b"")), CheckpointError, "cut short"),
    "unknown dtype": (entry(dtype="F99"), CheckpointError, "cut short"),
    "dtype a number": (entry(dtype=3), CheckpointError, "cut short"),
    "negative size": (entry(shape=[-16]), CheckpointError, "cut short"),
    "fractional size": (entry(shape=[1.5]), CheckpointError, "cut short"),
    "size of 2^64": (entry(shape=[2**64]), CheckpointError, "cut short"),
    "sizes that overflow": (entry(shape=[2**33, 2**33]), CheckpointError, "cut short"),
    "a huge declared shape": (entry(shape=[2**40]), CheckpointError, "cut short"),
    "shape against offsets": (entry(shape=[15]), CheckpointError, "cut short"),
    "offsets backwards": (entry(data_offsets=[64, 0]), CheckpointError, "cut short"),
    "offsets past the end": (entry(data_offsets=[10**9, 10**9 + 64]), CheckpointError, "cut short"),
    "overlap": (
        header(lambda h: h[NORM].update(data_offsets=h[EMBEDDING]["data_offsets"])), CheckpointError, "cut short"),
    "a hole": (header(lambda h: h.pop(NORM)), CheckpointError, "cut short"),
    "metadata of numbers": (header(lambda h: h.update(__metadata__={"a": 1})), CheckpointError, "cut short"),
    "metadata a list": (header(lambda h: h.update(__metadata__=[])), CheckpointError, "cut short"),
    "a name twice, same range": (header(duplicate), CheckpointError, "tensor twice"),
    "a zero-size dimension of 2^63": (
        header(lambda h: h.update(x={"dtype": "F32", "shape": [0, 2**63], "data_offsets": [0, 0]})),
        CheckpointError, "too many or large"),
    "100 dimensions": (
        header(lambda h: h.update(x={"dtype": "F32", "shape": [0] * 100, "data_offsets": [0, 0]})),
        CheckpointError, "100 dimensions"),
    "four-bit": (
        header(lambda h: h.update(x={"dtype": "F4", "shape": [0], "data_offsets": [0, 0]})),
        CheckpointError, "quantised"),
    "no tensors": (put(WEIGHTS, join({}, b"")), CheckpointError, "missing .*of 12"),
    "name ../../x": (
        tensors(lambda t: t.update({"../../x": torch.ones(1)})), CheckpointError, r"unexpected .*\.\./\.\./x"),
    "name with an escape": (tensors(lambda t: t.update({"\x1b[2Jx": torch.ones(1)})), CheckpointError, "no model has"),
    "name of a megabyte": (tensors(lambda t: t.update({"x" * 10**6: torch.ones(1)})), CheckpointError, "no model has"),
    "name empty": (tensors(lambda t: t.update({"": torch.ones(1)})), CheckpointError, "no model has"),
    "git-lfs pointer": (put(WEIGHTS, LFS), CheckpointError, "git lfs pull"),
    "HTML page": (put(WEIGHTS, HTML), CheckpointError, "HTML page"),
    "pickle renamed": (lambda f: torch.save({"a": torch.ones(1)}, f / WEIGHTS), CheckpointError, "pickle under"),
    "GGUF renamed": (put(WEIGHTS, b"GGUF" + bytes(100)), CheckpointError, "GGUF file"),
    "not there": (lambda f: (f / WEIGHTS).unlink(), CheckpointError, "holds neither"),
    "a directory": (place(WEIGHTS, os.mkdir), CheckpointError, "not a regular"),
    "a pipe": (place(WEIGHTS, os.mkfifo), CheckpointError, "not a regular"),
    "a device": (place(WEIGHTS, lambda p: p.symlink_to("/dev/zero")), CheckpointError, "not a regular"),
    "a link to nothing": (place(WEIGHTS, lambda p: p.symlink_to("none")), CheckpointError, "link to nothing"),
    "a link to itself": (place(WEIGHTS, lambda p: p.symlink_to(p.name)), CheckpointError, "link to nothing"),
    "a link out of the folder": (place(WEIGHTS, lambda p: p.symlink_to(OUTSIDE)), CheckpointError, "leaves its folder"),
    "a shard lost": (lambda f: (f / SHARDS[1]).unlink(), CheckpointError, "is not there"),
    "a shard a pipe": (place(SHARDS[1], os.mkfifo), CheckpointError, "not a regular"),
    "a shard cut": (blob(lambda b: b[:-4], SHARDS[1]), CheckpointError, "cut short"),
    "a shard twice": (
        lambda f: (f / SHARDS[1]).write_bytes((f / SHARDS[0]).read_bytes()), CheckpointError, "lacks .*index"),
    "a tensor in two shards, unequal": (twice_other, CheckpointError, "different tensors"),
    "packed by an earlier version": (
        header(lambda h: h.update({"layers.0.attn.qkv_proj.weight": h.pop("model.layers.0.self_attn.q_proj.weight")})),
        CheckpointError, "ligermodels convert OLD NEW"),
    "a name twice behind a wrapper": (
        header(lambda h: h.update({"module.model.norm.weight": h.pop("lm_head.weight")})), CheckpointError, "one name"),
    "config.json a pipe": (place("config.json", os.mkfifo), CheckpointError, "not a regular"),
    "config.json a directory": (place("config.json", os.mkdir), CheckpointError, "not a regular"),
    "config.json endless": (
        place("config.json", lambda p: p.symlink_to("/dev/zero")), CheckpointError, "not a regular"),
    "config.json a link out": (
        place("config.json", lambda p: p.symlink_to(OUTSIDE)), CheckpointError, "leaves its folder"),
    "config.json lost": (lambda f: (f / "config.json").unlink(), CheckpointError, "is not there"),
    "config.json of 30 MB": (put("config.json", b"[" + b" " * 30 * 2**20 + b"]"), CheckpointError, "too large"),
    "config.json of a million lists": (put("config.json", b"[" + b"[]," * 10**6 + b"1]"), CheckpointError, "too large"),
    "generation_config.json, a comma lost 1000 times": (
        put("generation_config.json", ("{" + " ".join(f'"{i}": 1' for i in range(1000)) + "}").encode()),
        CheckpointError, "not JSON"),
}  # fmt: skip

INDEXES: dict[str, tuple[Spoil, type, str]] = {
    **{
        f"names {file[:40]!r}": (
            mapped(lambda m, file=file: m.update({NORM: file})), CheckpointError, "index.json names")
        for file in ("../x.safetensors", "a/../../x.safetensors", "/etc/x.safetensors", "C:\\x.safetensors",
                     "\\\\host\\share\\x.safetensors", "..\\x.safetensors", "//host/x.safetensors", "model.bin",
                     "model.safetensors.py", "", "a\0.safetensors", "\ud800.safetensors", "\x1b[2J.safetensors",
                     "x" * 100_000 + ".safetensors")
    },
    **{
        f"names {value!r}": (
            mapped(lambda m, value=value: m.update({NORM: value})), CheckpointError, "index.json names")
        for value in (3, None, True, [SHARDS[0]], {"file": SHARDS[0]})
    },
    "empty file": (put(INDEX, b""), CheckpointError, "not JSON"),
    "cut": (put(INDEX, b'{"weight_map": {"a": "mo'), CheckpointError, "not JSON"),
    "not UTF-8": (put(INDEX, b"\xff\xfe{}"), CheckpointError, "not JSON"),
    "nested deeply": (put(INDEX, b"[" * 100_000), CheckpointError, "not JSON"),
    "a number of 10^5 digits": (put(INDEX, b'{"weight_map": ' + b"9" * 100_000 + b"}"), CheckpointError, "not JSON"),
    "a list": (put(INDEX, []), CheckpointError, "an object"),
    "no weight_map": (put(INDEX, {"metadata": {}}), CheckpointError, "no weight_map"),
    "an empty weight_map": (put(INDEX, {"weight_map": {}}), CheckpointError, "no weight_map"),
    "a weight_map of the wrong kind": (put(INDEX, {"weight_map": [SHARDS[0]]}), CheckpointError, "no weight_map"),
    "a million entries": (
        put(INDEX, {"weight_map": dict.fromkeys(map(str, range(10**6)), SHARDS[0])}), CheckpointError, "too large"),
    "190,000 entries": (
        put(INDEX, {"weight_map": dict.fromkeys(map(str, range(190_000)), SHARDS[0])}), CheckpointError, "lacks 0"),
    "git-lfs pointer": (put(INDEX, LFS), CheckpointError, "git lfs pull"),
    "HTML page": (put(INDEX, HTML), CheckpointError, "HTML page"),
    "a pipe": (place(INDEX, os.mkfifo), CheckpointError, "not a regular"),
    "a directory": (place(INDEX, os.mkdir), CheckpointError, "not a regular"),
    "a link out of the folder": (place(INDEX, lambda p: p.symlink_to(OUTSIDE)), CheckpointError, "leaves its folder"),
    "names a shard that lacks the tensor": (mapped(lambda m: m.update(x=SHARDS[0])), CheckpointError, "lacks x"),
    "swaps the shards of a tensor": (
        mapped(lambda m: m.update({LAST: next(s for s in SHARDS if s != m[LAST])})), CheckpointError, "lacks lm_head"),
    "leaves a tensor out": (mapped(lambda m: m.pop(NORM)), CheckpointError, "missing .*model.norm"),
    "names a folder": (
        lambda f: ((f / "x.safetensors").mkdir(), mapped(lambda m: m.update(x="x.safetensors"))(f)),
        CheckpointError, "not a regular"),
    "names a name too long for the disk": (
        mapped(lambda m: m.update(x="x" * 300 + ".safetensors")), CheckpointError, "is not there"),
    "a name with an escape": (mapped(lambda m: m.update({"\x1b[2J": SHARDS[0]})), CheckpointError, "no model has"),
}  # fmt: skip

Q = "model.layers.0.self_attn.q_proj.weight"
MATCH: dict[str, tuple[Spoil, type, str]] = {
    "vocab_size too large": (config(vocab_size=10**6), CheckpointError, "wrong shape.*resized"),
    "hidden_size of another": (config(hidden_size=32), CheckpointError, "wrong shape.*embed_tokens"),
    "a layer too many": (config(num_hidden_layers=2), CheckpointError, "missing.*1 layers on disk, 2"),
    "a layer too few": (
        tensors(lambda t: t.update({Q.replace("0", "1"): t[Q].clone()})), CheckpointError, "unexpected.*2 layers"),
    "more heads than stored": (config(num_key_value_heads=2), CheckpointError, "wrong shape"),
    "tied, with a head of its own": (config(tie_word_embeddings=True), CheckpointError, "config ties"),
    "not tied, without a head": (tensors(lambda t: t.pop(LAST)), CheckpointError, "tie_word_embeddings to true"),
    "biases that the config denies": (
        tensors(lambda t: t.update({Q.replace("weight", "bias"): torch.ones(16)})), CheckpointError, "unexpected"),
    "one shape transposed": (
        tensors(lambda t: t.update({EMBEDDING: t[EMBEDDING].T.contiguous()})), CheckpointError, "wrong shape"),
    "an empty tensor": (tensors(lambda t: t.update({NORM: torch.ones(0)})), CheckpointError, "wrong shape"),
    "a scalar": (tensors(lambda t: t.update({NORM: torch.ones(())})), CheckpointError, "wrong shape"),
    "int8 weights": (tensors(lambda t: t.update({Q: t[Q].to(torch.int8)})), CheckpointError, "quantised .*int8"),
    "fp8 weights": (
        tensors(lambda t: t.update({Q: t[Q].to(torch.float8_e4m3fn)})), CheckpointError, "quantised .*float8"),
    "bool weights": (tensors(lambda t: t.update({Q: t[Q] > 0})), CheckpointError, "quantised .*bool"),
    "complex weights": (tensors(lambda t: t.update({Q: t[Q].to(torch.complex64)})), CheckpointError, "complex64"),
    "GPTQ names": (tensors(lambda t: t.update({"x.qweight": torch.ones(1)})), CheckpointError, "GPTQ"),
    "an adapter": (tensors(lambda t: t.update({"x.lora_A.weight": torch.ones(1)})), CheckpointError, "adapter"),
    "behind a prefix": (
        tensors(lambda t: [t.update({f"language_model.{n}": t.pop(n)}) for n in list(t)]), CheckpointError, "behind"),
    "weights of Qwen2": (config(model_type="qwen2"), CheckpointError, "missing.*q_proj.bias"),
}  # fmt: skip

CASES = {
    f"{kind}: {name}": (("sharded" if kind == "index" or "shard" in name else "single"), *case)
    for kind, table in (("file", FILES), ("index", INDEXES), ("match", MATCH))
    for name, case in table.items()
}


@pytest.mark.parametrize("name", list(CASES))
def test_a_bad_checkpoint_ends_in_a_typed_error(good, name):
    layout, spoil, error, words = CASES[name]
    with spoiled(good[layout], spoil) as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with limited(folder), pytest.raises(error, match=f"(?s){words}") as caught:
            ligermodels.load(folder, progress=False)
        message = str(caught.value)
        assert str(folder) in message and len(message) < 3000, "a message says where, and fits on a screen"


@pytest.mark.parametrize("layout", ["single", "sharded"])
def test_the_good_one_loads_within_the_limits(good, layout):
    with limited(good[layout]):
        ligermodels.load(good[layout], progress=False)


def test_odd_but_sound_checkpoints_load(good):
    """A total_size that is wrong, files beside the index, an equal copy in another shard, a link that stays inside."""

    def spoil(folder: Path) -> None:
        index = json.loads((folder / INDEX).read_text())
        (folder / INDEX).write_text(json.dumps({**index, "metadata": {"total_size": -1}}))
        (folder / WEIGHTS).write_bytes(LFS)
        name, value = next(iter(load_file(folder / SHARDS[0]).items()))
        tensors(lambda state: state.update({name: value}), SHARDS[1])(folder)
        (folder / SHARDS[0]).rename(folder / "x.bin")
        (folder / SHARDS[0]).symlink_to("x.bin")

    expected = ligermodels.load(good["single"], progress=False)
    with spoiled(good["sharded"], spoil) as folder:
        loaded = ligermodels.load(folder, progress=False)
    assert all(torch.equal(a, b) for a, b in zip(loaded.parameters(), expected.parameters(), strict=True))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_nan_and_infinity_are_named_in_one_warning(good, value):
    broken = spoiled(good["single"], tensors(lambda t: t[Q][3:5, 2].fill_(value)))
    words = rf"1 of 12 tensors hold NaN or infinity: {Q}"
    with broken as folder, pytest.warns(UserWarning, match=words) as caught:
        ligermodels.load(folder, progress=False)
    assert len([w for w in caught if "infinity" in str(w.message)]) == 1


def test_a_cast_that_overflows_is_named(good):
    with spoiled(good["single"], tensors(lambda t: t[NORM].fill_(1e5))) as folder:
        with pytest.warns(UserWarning, match="float16 ends"):
            ligermodels.load(folder, dtype="float16", progress=False)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            ligermodels.load(folder, progress=False)


def test_a_file_that_changes_while_it_is_read(good):
    """Cut short below a mapping, reading would end the process with SIGBUS."""
    with spoiled(good["single"], lambda f: None) as folder, SafetensorsReader(folder) as reader:
        with (folder / WEIGHTS).open("r+b") as file:
            file.truncate(9)
        with pytest.raises(CheckpointError, match="changed while it was read"):
            reader.read(NORM)


def test_a_file_that_is_replaced_or_removed_stays_readable(good):
    with spoiled(good["single"], lambda f: None) as folder, SafetensorsReader(folder) as reader:
        expected = reader.read(NORM).clone()
        put("new", b"")(folder)
        os.replace(folder / "new", folder / WEIGHTS)
        assert torch.equal(reader.read(NORM), expected)
        (folder / WEIGHTS).unlink()
        assert torch.equal(reader.read(NORM), expected)


def test_a_folder_that_is_replaced_while_it_is_opened(good, monkeypatch, tmp_path):
    with spoiled(good["sharded"], lambda f: None) as folder:
        check_headers = reading._check_headers

        def swap(sizes):
            other = spoiled(good["sharded"], lambda f: None)
            with other as fresh:
                folder.rename(tmp_path / "old")
                fresh.rename(folder)
            check_headers(sizes)

        monkeypatch.setattr(reading, "_check_headers", swap)
        with pytest.raises(CheckpointError, match="replaced while it was opened"):
            ligermodels.load(folder, progress=False)


@pytest.mark.parametrize("file", [WEIGHTS, "config.json", "", "index"])
def test_files_that_may_not_be_read(good, file):
    """As a user without rights, which root becomes for a moment."""
    layout, file = ("sharded", INDEX) if file == "index" else ("single", file)
    ligermodels.load(good[layout], progress=False)  # what is imported late is imported
    with spoiled(good[layout], lambda f: (f / file).chmod(0)) as folder:
        root = os.geteuid() == 0
        try:
            if root:
                os.seteuid(65534)
            with pytest.raises(HubError, match=r"(?s)cannot be read.*denied"):
                ligermodels.load(folder, progress=False)
        finally:
            if root:
                os.seteuid(0)
            (folder / file).chmod(0o700)


@pytest.mark.parametrize(
    "given", ["~no_such_user/x", "a\0b/c", "x/" * 3000, "/" + "x" * 5000, "\ud800/x/y", "/dev/null", "/etc/hostname"]
)
def test_paths_that_are_no_folders(given):
    with pytest.raises(HubError, match=r"not there|a file"):
        ligermodels.load(given)


@pytest.mark.parametrize(
    "how", ["cut", "pipe", "keys", "sparse", "meta", "nested", "text", "lfs", "link", "legacy cut"]
)
def test_pickles_that_are_allowed_and_bad(good, how):
    state = {"a": torch.ones(100)}
    makes: dict[str, Spoil] = {
        "cut": lambda p: (torch.save(state, p), p.write_bytes(p.read_bytes()[:-200])),
        "pipe": os.mkfifo,
        "keys": lambda p: torch.save({3: torch.ones(1)}, p),
        "sparse": lambda p: torch.save({"a": torch.eye(3).to_sparse()}, p),
        "meta": lambda p: torch.save({"a": torch.ones(1, device="meta")}, p),
        "nested": lambda p: torch.save({"model": state}, p),
        "text": lambda p: p.write_text("hello"),
        "lfs": lambda p: p.write_bytes(LFS),
        "link": lambda p: p.symlink_to(OUTSIDE),
        "legacy cut": lambda p: (
            torch.save(state, p, _use_new_zipfile_serialization=False), p.write_bytes(p.read_bytes()[:200])),
    }  # fmt: skip

    def spoil(folder: Path) -> None:
        (folder / WEIGHTS).unlink()
        makes[how](folder / "pytorch_model.bin")

    refused = pytest.raises(CheckpointError, match=r"plain tensor|name 3|not a flat|not a regular|leaves its")
    with spoiled(good["single"], spoil) as folder, limited(folder), refused as caught:
        ligermodels.load(folder, allow_pickle=True, progress=False)
    assert "weights_only" not in str(caught.value), "no advice to run the code in it"


def test_a_companion_that_is_a_link_out_is_not_saved_along(good, tmp_path):
    """Else a folder from elsewhere could have a secret of this machine uploaded with the next push."""
    with spoiled(good["single"], lambda f: (f / "tokenizer.json").symlink_to(OUTSIDE)) as folder:
        model = ligermodels.load(folder, progress=False)
        with pytest.raises(CheckpointError, match=r"tokenizer\.json is a link that leaves its folder"):
            model.save_pretrained(tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_links_of_the_hub_cache_are_followed(good, tmp_path):
    storage = tmp_path / "models--owner--name"
    snapshot = storage / "snapshots" / ("1" * 40)
    (storage / "blobs").mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for number, path in enumerate(sorted(good["single"].iterdir())):
        (storage / "blobs" / str(number)).write_bytes(path.read_bytes())
        (snapshot / path.name).symlink_to(f"../../blobs/{number}")
    ligermodels.load(snapshot, progress=False)


@pytest.mark.parametrize(
    ("step", "read"),
    [("open_safetensors", SafetensorsReader), ("open_checkpoint", functools.partial(ligermodels.load, progress=False))],
    ids=["weights", "config and weights"],
)
def test_a_folder_that_takes_the_number_of_the_one_it_replaced(step, read, tmp_path, monkeypatch):
    """As saves do that come one soon after the other: a folder's number is free when it is deleted."""
    folder, other, real = tmp_path / "out", tmp_path / "other", getattr(reading, step)
    for seed, place in enumerate((folder, other)):
        make_model(seed).save_pretrained(place)

    def replace_and_go_on(*args, **options):
        shutil.rmtree(folder)
        folder.mkdir()  # on most file systems, under the same number
        for path in other.iterdir():
            path.rename(folder / path.name)
        return real(*args, **options)

    monkeypatch.setattr(reading, step, replace_and_go_on)
    with pytest.raises(CheckpointError, match="was replaced while it was opened"):
        read(folder)


def test_reading_while_another_saves(good, tmp_path):
    """A reader gets one of the checkpoints, whole, or the error that says to try again."""
    models, folder, stop = [make_model(seed) for seed in (0, 1)], tmp_path / "out", threading.Event()
    models[0].save_pretrained(folder, max_shard_size=2000)
    kinds = [[p.clone() for p in model.parameters()] for model in models]

    def write() -> None:
        while not stop.is_set():
            for model in models:
                model.save_pretrained(folder, max_shard_size=2000)

    thread = threading.Thread(target=write)
    thread.start()
    try:
        for _ in range(60):
            try:
                loaded = list(ligermodels.load(folder, progress=False).parameters())
            except (CheckpointError, HubError):
                continue
            assert any(all(torch.equal(a, b) for a, b in zip(loaded, kind, strict=True)) for kind in kinds)
    finally:
        stop.set()
        thread.join()
    ligermodels.load(folder, progress=False)
