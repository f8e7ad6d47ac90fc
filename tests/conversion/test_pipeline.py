"""Conversions of every family: the same bits, whole or resumed, and what is left behind when one fails."""

import errno
import hashlib
import json
import math
import random
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import ligermodels
from ligermodels.arch import ARCHS
from ligermodels.checkpoint import weights
from ligermodels.checkpoint.reading import SafetensorsReader, json_bytes, read_json
from ligermodels.checkpoint.weights import same_bits
from ligermodels.conversion import MismatchError, Options, convert, inspect, pipeline, verify
from ligermodels.conversion.dcp import DcpSource
from ligermodels.conversion.sources import FolderSource, View
from ligermodels.errors import CheckpointError, HubError, InputError
from tests.conversion.layouts import SIZES, write_mistral, write_native
from tests.processes import Child

EXTRA = {
    "mixtral": {"num_local_experts": 2}, "gemma2": {"sliding_window": 8, "query_pre_attn_scalar": 4},
    "qwen2_vl": {
        "hidden_size": 32, "head_dim": 8, "rope_scaling": {"type": "mrope", "mrope_section": [2, 1, 1]},
        "image_token_id": 40, "video_token_id": 41, "vision_start_token_id": 42, "vision_end_token_id": 43,
        "vision_config": {
            "depth": 1, "embed_dim": 16, "hidden_size": 32, "num_heads": 2, "mlp_ratio": 2, "patch_size": 2,
            "spatial_merge_size": 2, "temporal_patch_size": 2, "in_channels": 3,
        },
    },
    "mllama": {
        "cross_attention_layers": [1], "image_token_index": 48,
        "vision_config": {
            "hidden_size": 16, "attention_heads": 2, "num_hidden_layers": 2, "num_global_layers": 1, "image_size": 8,
            "patch_size": 4, "intermediate_size": 24, "intermediate_layers_indices": [0], "vision_output_dim": 32,
        },
    },
}  # fmt: skip
FILES = {"tokenizer.json": b"{}", "chat_template.jinja": b"{{ x }}", "generation_config.json": b'{"eos_token_id": 2}'}


def a_checkpoint(folder, family="llama", *, dtype=torch.float32, tied=False, shards=1, seed=0):
    """Every bit pattern, NaN among them, in shuffled order over `shards` files."""
    arch = ARCHS[family]
    config = {"model_type": family, **SIZES, **EXTRA.get(family, {}), "tie_word_embeddings": tied}
    config["torch_dtype"] = str(dtype).removeprefix("torch.")
    draw = random.Random(f"{family} {dtype} {tied} {shards} {seed}")
    torch.manual_seed(draw.randrange(1 << 30))
    model = arch.from_config(config, device="meta")
    params = dict(model.named_parameters())
    tensors = {}
    for region in weights.regions(model, arch.DISK_NAMES):
        shape = params[region.param][region.index].shape
        bits = torch.randint(0, 256, (*shape, dtype.itemsize), dtype=torch.uint8)
        tensors[region.source] = bits.view(dtype).reshape(shape)
    names = draw.sample(sorted(tensors), len(tensors))
    folder.mkdir()
    for name, content in {"config.json": json_bytes(config), **FILES}.items():
        (folder / name).write_bytes(content)
    if shards == 1:
        save_file({name: tensors[name] for name in names}, folder / "model.safetensors")
    else:
        files = {name: f"model-{i % shards + 1:05}-of-{shards:05}.safetensors" for i, name in enumerate(names)}
        for file in set(files.values()):
            save_file({name: tensors[name] for name in names if files[name] == file}, folder / file)
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    return tensors


def stored(folder):
    """All tensors, as the safetensors library reads the files: a second opinion on what was written."""
    found = {}
    for path in folder.glob("*.safetensors"):
        found |= load_file(path)
    return found


def same(a, b):
    return a.keys() == b.keys() and all(same_bits(a[name], b[name]) for name in a)


def names(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("family", ARCHS)
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("shards, dtype", [(1, torch.float32), (2, torch.bfloat16), (7, torch.float16)], ids=str)
def test_round_trips_return_the_same_bits(tmp_path, family, tied, shards, dtype):
    """Through the names of memory, with what is stacked there, and back; in one file, and divided otherwise."""
    tensors = a_checkpoint(tmp_path / "hf", family, dtype=dtype, tied=tied, shards=shards)
    quiet = {"progress": False, "verify": "bytes"}
    convert(tmp_path / "hf", tmp_path / "dcp", Options(to="dcp", **quiet))
    model = ARCHS[family].from_config(read_json(tmp_path / "hf" / "config.json"), device="meta")
    with DcpSource(tmp_path / "dcp") as held:
        assert {n: x.shape for n, x in held.headers.items()} == {n: tuple(p.shape) for n, p in model.named_parameters()}
    convert(tmp_path / "dcp", tmp_path / "back", Options(max_shard_size=1 + 9000 // shards, **quiet))
    assert same(stored(tmp_path / "back"), tensors)
    for name in ("config.json", *FILES):
        assert (tmp_path / "back" / name).read_bytes() == (tmp_path / "hf" / name).read_bytes()
    assert names(tmp_path) == ["back", "dcp", "hf"]


def test_like_the_source(tmp_path):
    tensors = a_checkpoint(tmp_path / "hf", shards=7, dtype=torch.bfloat16)
    convert(tmp_path / "hf", tmp_path / "out", Options(like=True, dtype="fp32"))
    weight_map = {n: read_json(tmp_path / n / "model.safetensors.index.json")["weight_map"] for n in ("hf", "out")}
    assert weight_map["hf"] == weight_map["out"]
    assert same(stored(tmp_path / "out"), {name: x.float() for name, x in tensors.items()})


def test_the_receipt_says_what_was_made_from_what(tmp_path):
    a_checkpoint(tmp_path / "hf", shards=2)
    convert(tmp_path / "hf", tmp_path / "out", Options(dtype="bf16", max_shard_size="5KB"))
    receipt = read_json(tmp_path / "out" / "conversion.json")
    assert receipt.keys() == {"ligermodels", "torch", "safetensors", "source", "options", "shards"}
    assert receipt["options"] == {"to": "hf", "dtype": "bf16"} and receipt["ligermodels"] == ligermodels.__version__
    assert receipt["source"]["folder"] == "hf" and str(tmp_path) not in json.dumps(receipt)
    for listed, folder in [
        (receipt["shards"], tmp_path / "out"),
        (receipt["source"]["files"], tmp_path / "hf"),
    ]:
        assert {path.name for path in folder.glob("*.safetensors")} <= listed.keys()
        for name, digest in listed.items():
            assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == digest


# The other layouts, through the one entrance


def finite(folder, family="llama", **fields):
    config = {"model_type": family, **SIZES, **EXTRA.get(family, {}), **fields}
    model = ARCHS[family].from_config(config, device="cpu", dtype=torch.bfloat16, seed=4)
    saved = model.save_pretrained(folder)
    (saved / "tokenizer.json").write_bytes(FILES["tokenizer.json"])
    return stored(saved)


@pytest.mark.parametrize("options", [{"ranks": 2}, {"ranks": 1, "dtype": "fp32"}], ids=str)
def test_meta_and_back(tmp_path, options):
    tensors = finite(tmp_path / "hf", rope_theta=500000.0)
    quiet = {"progress": False, "verify": "logits"}
    convert(tmp_path / "hf", tmp_path / "meta", Options(to="meta", **options, **quiet))
    shards = [f"consolidated.{n:02}.pth" for n in range(options["ranks"])]
    assert names(tmp_path / "meta") == sorted([*shards, "conversion.json", "params.json", "tokenizer.json"])
    assert list(read_json(tmp_path / "meta" / "conversion.json")["shards"]) == shards
    with pytest.raises(CheckpointError, match="allow_pickle"):
        convert(tmp_path / "meta", tmp_path / "back")
    convert(tmp_path / "meta", tmp_path / "back", Options(allow_pickle=True, dtype="bf16", **quiet))
    assert same(stored(tmp_path / "back"), tensors)
    assert read_json(tmp_path / "back" / "conversion.json")["source"]["files"].keys() == {*shards, "params.json"}


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_distributed_and_back(tmp_path, family):
    tensors = finite(tmp_path / "hf", family)
    convert(tmp_path / "hf", tmp_path / "dcp", Options(to="dcp", progress=False, verify="logits"))
    assert {".metadata", "config.json", "tokenizer.json", "conversion.json"} < set(names(tmp_path / "dcp"))
    (tmp_path / "dcp" / "config.json").unlink()
    options = Options(config=tmp_path / "hf", progress=False, verify="bytes")
    convert(tmp_path / "dcp", tmp_path / "back", options)
    assert same(stored(tmp_path / "back"), tensors)
    with pytest.raises(InputError, match="its own configuration"):
        convert(tmp_path / "hf", tmp_path / "again", options)


@pytest.mark.parametrize("kind", ["safetensors", "pickle", "packed"])
def test_a_state_dict_that_a_trainer_left_alone(tmp_path, kind):
    tensors = finite(tmp_path / "hf")
    left = tmp_path / "left"
    write_native(left, tmp_path / "hf") if kind == "packed" else shutil.copytree(tmp_path / "hf", left)
    for name in ("chat_template.jinja", "generation_config.json"):
        (tmp_path / "hf" / name).write_bytes(FILES[name])
    for name in ("config.json", "tokenizer.json", "generation_config.json"):
        (left / name).unlink(missing_ok=True)
    if kind == "pickle":
        torch.save({f"module.{n}": x for n, x in tensors.items()}, left / "pytorch_model.bin")
        (left / "model.safetensors").unlink()
    (left / "tokenizer.json").write_text('{"added": 1}')
    with pytest.raises(CheckpointError, match=r"config\.json is not there. Weights alone.*--config"):
        convert(left, tmp_path / "out", Options(allow_pickle=True))
    options = {"config": tmp_path / "hf", "allow_pickle": True}
    found = inspect(left, **options)
    assert found.ok and "--config" in found.use
    convert(left, tmp_path / "out", Options(verify="bytes", progress=False, **options))
    assert same(stored(tmp_path / "out"), tensors)
    assert verify(left, tmp_path / "out", level="bytes", progress=False, **options).ok
    assert (tmp_path / "out" / "tokenizer.json").read_text() == '{"added": 1}'
    assert not (tmp_path / "out" / "chat_template.jinja").exists()  # that of another tokenizer
    assert ligermodels.load(tmp_path / "out").generation_config["eos_token_id"] == 2


def test_mistrals_own_files(tmp_path):
    tensors = finite(tmp_path / "hf", "mistral", sliding_window=None, rope_theta=10000.0)
    write_mistral(tmp_path / "own", tensors)
    convert(tmp_path / "own", tmp_path / "back", Options(progress=False, verify="bytes"))
    assert same(stored(tmp_path / "back"), tensors)


@pytest.mark.parametrize("layout", ["hf", "dcp", "native"])
def test_an_adapter_is_merged(tmp_path, layout):
    tensors = finite(tmp_path / "hf")
    if layout == "native":
        write_native(tmp_path / "base", tmp_path / "hf")
    else:
        convert(tmp_path / "hf", tmp_path / "base", Options(to=layout, progress=False))
    (tmp_path / "adapter").mkdir()
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 6, "target_modules": ["q_proj"], "bias": "none"}
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(config))
    factors, expected = {}, dict(tensors)
    for layer in range(2):
        module = f"model.layers.{layer}.self_attn.q_proj"
        a, b = torch.randn(2, 16), torch.randn(16, 2)
        factors |= {f"base_model.model.{module}.lora_{k}.weight": x for k, x in (("A", a), ("B", b))}
        expected[f"{module}.weight"] = (tensors[f"{module}.weight"].double() + 3 * b.double() @ a.double()).bfloat16()
    save_file(factors, tmp_path / "adapter" / "adapter_model.safetensors")
    options = Options(adapter=tmp_path / "adapter", progress=False, verify="logits")
    convert(tmp_path / "base", tmp_path / "merged", options)
    merged = stored(tmp_path / "merged")
    assert merged.keys() == expected.keys()
    for name, x in merged.items():
        torch.testing.assert_close(x, expected[name], rtol=2**-8, atol=0)
        assert same_bits(x, tensors[name]) != ("q_proj" in name)
    receipt = read_json(tmp_path / "merged" / "conversion.json")["source"]
    assert receipt["adapter"] == "adapter" and "adapter_model.safetensors" in receipt["files"]
    with pytest.raises(CheckpointError, match="holds an adapter"):
        convert(tmp_path / "adapter", tmp_path / "out")


# Interruptions


def interrupted(monkeypatch, source, target, options, *, after, error=KeyboardInterrupt):
    """Ends a conversion when it begins its shard number `after`, from 0 on."""
    write, count = pipeline._write_shard, iter(range(100))

    def some(*arguments):
        if next(count) == after:
            raise error
        write(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(pipeline, "_write_shard", some)
        with pytest.raises((error, HubError)) as caught:
            convert(source, target, options)
    return caught.value


def reads(monkeypatch):
    found, read = [], View.read
    monkeypatch.setattr(View, "read", lambda self, name: found.append(name) or read(self, name))
    return found


SMALL = Options(max_shard_size="3KB", progress=False)
RESUMED = Options(max_shard_size="3KB", progress=False, resume=True)


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_resume_keeps_the_shards_that_are_done(tmp_path, monkeypatch, error):
    tensors = a_checkpoint(tmp_path / "hf")
    caught = interrupted(monkeypatch, tmp_path / "hf", tmp_path / "out", SMALL, after=3, error=error)
    assert "--resume" in caught.__notes__[0] and names(tmp_path) == [".out.converting", "hf"]
    found = reads(monkeypatch)
    report = convert(tmp_path / "hf", tmp_path / "out", RESUMED)
    assert report.details["kept"] == 3 and 0 < len(found) < len(tensors)
    assert same(stored(tmp_path / "out"), tensors) and names(tmp_path) == ["hf", "out"]
    assert read_json(tmp_path / "out" / "conversion.json")["shards"].keys() == {
        path.name for path in (tmp_path / "out").glob("*.safetensors")
    }


@pytest.mark.parametrize("change", ["a shard", "the source", "the options", "not asked"])
def test_resume_keeps_nothing_else(tmp_path, monkeypatch, change):
    tensors = a_checkpoint(tmp_path / "hf")
    interrupted(monkeypatch, tmp_path / "hf", tmp_path / "out", SMALL, after=3)
    options, kept = RESUMED, 0
    if change == "a shard":
        path = sorted((tmp_path / ".out.converting").glob("*.safetensors"))[1]
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)
        kept = 2
    elif change == "the source":
        tensors = {name: x.roll(1) for name, x in tensors.items()}
        save_file(tensors, tmp_path / "hf" / "model.safetensors")
    elif change == "the options":
        options = Options(max_shard_size="3KB", progress=False, resume=True, dtype="fp16")
        tensors = {name: x.half() for name, x in tensors.items()}
    else:
        options = SMALL
    assert convert(tmp_path / "hf", tmp_path / "out", options).details["kept"] == kept
    assert same(stored(tmp_path / "out"), tensors)


def test_killed_at_any_instant(tmp_path):
    """A child converts over an old checkpoint and is killed; the folder holds the old or the new one, whole."""
    old = a_checkpoint(tmp_path / "out", seed=1)
    new = a_checkpoint(tmp_path / "hf", shards=2, seed=2)
    draw, seen, whole = random.Random(0), set(), math.inf  # whole: the shortest time of a conversion that ended
    for trial in range(200):
        if trial >= 25 and len(seen) == 2:
            break
        options = Options(max_shard_size="3KB", progress=False, overwrite=True, resume=bool(trial % 2))
        start = time.perf_counter()
        child = Child(lambda: convert(tmp_path / "hf", tmp_path / "out", options))  # noqa: B023
        if trial:
            time.sleep(draw.random() * whole * 1.2)
            child.signal(signal.SIGKILL)
        status = child.wait()
        assert status in (0, -signal.SIGKILL)
        if status == 0:
            whole = min(whole, time.perf_counter() - start)
        with SafetensorsReader(tmp_path / "out") as reader:
            found = {name: reader.read(name).clone() for name in reader.headers}
        assert same(found, old) or same(found, new)
        seen.add(same(found, new))
        if same(found, new):  # the old one again
            convert(tmp_path / "out", tmp_path / "spare", Options(overwrite=True, progress=False))
            save_file(old, tmp_path / "spare" / "model.safetensors")
            (tmp_path / "spare" / "model.safetensors.index.json").unlink(missing_ok=True)
            convert(tmp_path / "spare", tmp_path / "out", Options(overwrite=True, progress=False))
    convert(tmp_path / "hf", tmp_path / "out", Options(overwrite=True, progress=False, verify="bytes"))
    assert seen == {False, True} and same(stored(tmp_path / "out"), new)
    assert names(tmp_path) == ["hf", "out", "spare"]


def test_into_the_current_folder(tmp_path, monkeypatch):
    """It cannot be swapped for another: the files go in one by one."""
    tensors = a_checkpoint(tmp_path / "hf", shards=2)
    (tmp_path / "out").mkdir()
    monkeypatch.chdir(tmp_path / "out")
    interrupted(monkeypatch, tmp_path / "hf", ".", SMALL, after=2)
    assert names(tmp_path / "out") == [".out.converting"]
    assert convert(tmp_path / "hf", ".", RESUMED).details["kept"] == 2
    assert same(stored(tmp_path / "out"), tensors) and ".out.converting" not in names(tmp_path / "out")


def test_two_conversions_into_one_folder(tmp_path, monkeypatch):
    tensors = a_checkpoint(tmp_path / "hf")
    write, errors = pipeline._write_shard, []

    def write_while_another_begins(*arguments):
        if not errors:
            with pytest.raises(HubError, match="in use") as caught:
                convert(tmp_path / "hf", tmp_path / "out", Options(progress=False))
            errors.append(caught)
        write(*arguments)

    monkeypatch.setattr(pipeline, "_write_shard", write_while_another_begins)
    convert(tmp_path / "hf", tmp_path / "out", SMALL)
    assert errors and same(stored(tmp_path / "out"), tensors) and names(tmp_path) == ["hf", "out"]


# What fails leaves nothing


def test_a_result_that_is_not_the_source_does_not_take_its_place(tmp_path, monkeypatch):
    old = a_checkpoint(tmp_path / "out", seed=1)
    a_checkpoint(tmp_path / "hf", seed=2)
    write = pipeline._write_shard

    def one_bit_wrong(path, *arguments):
        write(path, *arguments)
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)

    monkeypatch.setattr(pipeline, "_write_shard", one_bit_wrong)
    with pytest.raises(MismatchError, match="values differ"):
        convert(tmp_path / "hf", tmp_path / "out", Options(verify="bytes", overwrite=True, progress=False))
    assert same(stored(tmp_path / "out"), old) and names(tmp_path) == ["hf", "out"]


def test_no_room_is_found_before_anything_is_written(tmp_path, monkeypatch):
    a_checkpoint(tmp_path / "hf")
    monkeypatch.setattr(View, "read", None)
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 9000}))
    with pytest.raises(HubError, match="are free") as caught:
        convert(tmp_path / "hf", tmp_path / "out")
    assert caught.value.errno == 28 and names(tmp_path) == ["hf"]


LAYOUTS_OF_FOLDERS = ["hf", "meta", "dcp"]


@pytest.mark.parametrize("to", LAYOUTS_OF_FOLDERS)
@pytest.mark.parametrize("step", ["a tensor", "a digest", "a file"])
def test_a_source_that_fails_midway_is_named_and_not_the_destination(tmp_path, monkeypatch, to, step):
    finite(tmp_path / "hf")
    old = a_checkpoint(tmp_path / "out", seed=1)
    fault = OSError(errno.ESTALE, "Stale file handle")
    if step == "a tensor":
        read = FolderSource.read

        def fail(source, name):
            if name == "model.norm.weight":
                raise fault
            return read(source, name)

        monkeypatch.setattr(FolderSource, "read", fail)
    elif step == "a digest":
        digest = hashlib.file_digest

        def fail_to_digest(file, name):
            if "/hf/" in file.name:
                raise fault
            return digest(file, name)

        monkeypatch.setattr(hashlib, "file_digest", fail_to_digest)
    else:
        failing(monkeypatch, tmp_path / "hf" / "tokenizer.json", fault)
    with pytest.raises(HubError, match=r"/hf.* cannot be read: Stale file handle") as caught:
        convert(tmp_path / "hf", tmp_path / "out", Options(to=to, overwrite=True, progress=False))
    assert "/out" not in str(caught.value) and "written" not in str(caught.value)
    assert same(stored(tmp_path / "out"), old) and set(names(tmp_path)) <= {"hf", "out", ".out.converting"}


@pytest.mark.parametrize("to", LAYOUTS_OF_FOLDERS)
@pytest.mark.parametrize("step", ["weights", "a file"])
def test_a_destination_that_fails_midway_is_named_and_not_the_source(tmp_path, monkeypatch, to, step):
    finite(tmp_path / "hf")
    (weights,) = {"meta": ["consolidated.00.pth"], "dcp": ["__0_0.distcp"]}.get(to, ["model.safetensors"])
    file = tmp_path / ".out.converting" / {"weights": weights, "a file": "tokenizer.json"}[step]
    failing(monkeypatch, file, OSError(errno.ENOSPC, "No space left on device"))
    with pytest.raises(HubError, match=r"(?s)/out cannot be written: .*Next: free some space") as caught:
        convert(tmp_path / "hf", tmp_path / "out", Options(to=to, progress=False))
    assert caught.value.errno == errno.ENOSPC and "/hf" not in str(caught.value)
    assert set(names(tmp_path)) <= {"hf", ".out.converting"}  # the latter with shards that are done


def failing(monkeypatch, path, error):
    """Opening this file raises `error`, through pathlib, or when torch saves to it."""
    opened, save = Path.open, torch.save

    def fail(file, *arguments, **options):
        if file == path:
            raise error
        return opened(file, *arguments, **options)

    def fail_to_save(state, file, **options):
        if file == path:
            raise error
        return save(state, file, **options)

    monkeypatch.setattr(Path, "open", fail)
    monkeypatch.setattr(torch, "save", fail_to_save)


@pytest.mark.parametrize(
    "options, words",
    [
        ({"to": "onnx"}, "to='onnx'"),
        ({"dtype": "int4"}, "dtype='int4'"),
        ({"verify": "all"}, "verify='all'"),
        ({"max_shard_size": "no"}, "max_shard_size='no'"),
        ({"to": "meta", "resume": True}, "not for meta"),
        ({"to": "dcp", "max_shard_size": "1GB"}, "not for dcp"),
        ({"ranks": 2}, "for the layout meta"),
        ({"embedding_axis": 0}, "for the layout meta"),
        ({"to": "meta", "embedding_axis": 2}, "embedding_axis=2"),
    ],
)
def test_options(tmp_path, options, words):
    with pytest.raises(InputError, match=words):
        convert(tmp_path, tmp_path / "out", Options(**options))


def test_a_folder_of_something_else(tmp_path):
    with pytest.raises(CheckpointError, match=r"config\.json"):
        convert(tmp_path, tmp_path / "out")
