"""The conversion script, and the command that it calls: the same bits both ways, little memory, and exit codes."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from ligermodels import Llama, Mixtral
from ligermodels.checkpoint import weights
from ligermodels.checkpoint.reading import SafetensorsReader, read_json
from ligermodels.checkpoint.weights import same_bits
from ligermodels.conversion.dcp import DcpSource

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "convert" / "convert_checkpoint.py"
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 64, "hidden_size": 32,
    "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": False,
    "torch_dtype": "float32",
}  # fmt: skip
COMPANIONS = ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"]


def load_script():
    spec = importlib.util.spec_from_file_location("convert_checkpoint", SCRIPT)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    return script


@pytest.fixture(scope="module")
def script():
    return load_script()


def on_meta(config: dict) -> Llama:
    with torch.device("meta"):
        return Llama(Llama.config_class.from_hf(config))


def a_checkpoint(
    folder: Path, *, dtype=torch.float32, tied=False, shards=1, pickled=False, **fields
) -> dict[str, Tensor]:
    """A Llama with every bit pattern in its weights, in `shards` files without any order."""
    config = {
        **CONFIG,
        "tie_word_embeddings": tied,
        "torch_dtype": str(dtype).removeprefix("torch."),
        **fields,
    }
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    for name in COMPANIONS:
        (folder / name).write_text(json.dumps({"file": name}))
    (folder / "consolidated.safetensors").write_text("not to be looked at")
    tensors = {
        name: torch.randint(0, 256, (*x.shape, dtype.itemsize), dtype=torch.uint8).view(dtype).reshape(x.shape)
        for name, x in on_meta(config).named_parameters()
    }
    names = sorted(tensors, key=lambda name: hash((name, shards)))
    if pickled:
        torch.save(tensors, folder / "pytorch_model.bin")
    elif shards == 1:
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    else:
        files = [f"model-{k:05}-of-{shards:05}.safetensors" for k in range(1, shards + 1)]
        for k, file in enumerate(files):
            save_file({name: tensors[name] for name in names[k::shards]}, folder / file, {"format": "pt"})
        weight_map = {name: files[i % shards] for i, name in enumerate(names)}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return tensors


def bits_agree(folder: Path, tensors: dict[str, Tensor]) -> bool:
    reader = SafetensorsReader(folder)
    return reader.headers.keys() == tensors.keys() and all(same_bits(reader.read(n), tensors[n]) for n in tensors)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("shards", [1, 2, 7])
def test_another_layout_and_back_returns_the_same_bits(tmp_path, script, capsys, dtype, tied, shards):
    """Safetensors of any division, a distributed checkpoint, safetensors."""
    tensors = a_checkpoint(tmp_path / "hf", dtype=dtype, tied=tied, shards=shards)
    assert script.main([str(tmp_path / "hf"), str(tmp_path / "dcp"), "--to", "dcp"]) == 0
    assert script.main([str(tmp_path / "dcp"), str(tmp_path / "back"), "--max-shard-size", "9KB"]) == 0
    assert bits_agree(tmp_path / "back", tensors)
    for name in (*COMPANIONS, "config.json"):
        assert (tmp_path / "back" / name).read_bytes() == (tmp_path / "hf" / name).read_bytes()
    assert not (tmp_path / "back" / "consolidated.safetensors").exists()
    assert f"back: {len(tensors)} tensors, " in capsys.readouterr().out


def test_a_loaded_model_saves_the_same_bits(tmp_path):
    tensors = a_checkpoint(tmp_path / "hf", shards=2)
    Llama.from_hub(tmp_path / "hf").save_pretrained(tmp_path / "saved")
    assert bits_agree(tmp_path / "saved", tensors)


def test_resharding_keeps_every_bit(tmp_path, script):
    tensors = a_checkpoint(tmp_path / "hf", shards=2, dtype=torch.bfloat16)
    assert script.main([str(tmp_path / "hf"), str(tmp_path / "out"), "--max-shard-size", "5KB"]) == 0
    assert len(list((tmp_path / "out").glob("model-*"))) > 5 and bits_agree(tmp_path / "out", tensors)


def test_casting(tmp_path, script):
    tensors = a_checkpoint(tmp_path / "hf")
    assert script.main([str(tmp_path / "hf"), str(tmp_path / "out"), "--dtype", "bf16"]) == 0
    config = read_json(tmp_path / "out" / "config.json")
    assert config == {**CONFIG, "dtype": "bfloat16", "torch_dtype": "bfloat16"}
    model = Llama.from_hub(tmp_path / "out")
    assert model.dtype == torch.bfloat16
    for name, tensor in weights.export(model, Llama.DISK_NAMES):
        assert torch.equal(tensor.nan_to_num(), tensors[name].bfloat16().nan_to_num()), name


def test_pickles(tmp_path, script, capsys):
    tensors = a_checkpoint(tmp_path / "bin", pickled=True)
    source, target = str(tmp_path / "bin"), str(tmp_path / "out")
    assert script.main([source, target]) == 3 and "--allow-pickle" in capsys.readouterr().err
    assert script.main([source, target, "--allow-pickle"]) == 0 and bits_agree(tmp_path / "out", tensors)


def test_over_the_source_itself(tmp_path, script):
    tensors = a_checkpoint(tmp_path / "hf", shards=2)
    folder = str(tmp_path / "hf")
    assert script.main([folder, folder, "--max-shard-size", "9KB", "--overwrite"]) == 0
    assert script.main([folder, folder, "--overwrite"]) == 0
    assert bits_agree(tmp_path / "hf", tensors) and [path.name for path in tmp_path.iterdir()] == ["hf"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts_stacked_or_each_its_own_give_the_same_bits(tmp_path, script, capsys, dtype):
    config = {
        **CONFIG,
        "model_type": "mixtral",
        "num_local_experts": 3,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }
    with torch.device("meta"):
        shapes = Mixtral(Mixtral.config_class.from_hf(config)).to(dtype)
    whole = {  # by our names
        name: torch.randint(0, 256, (*x.shape, dtype.itemsize), dtype=torch.uint8).view(dtype).reshape(x.shape)
        for name, x in shapes.named_parameters()
    }
    layouts = {}
    for name, table in (("each", Mixtral.DISK_NAMES), ("stacked", {})):
        layouts[name] = {r.source: whole[r.param][r.index].clone() for r in weights.regions(shapes, table)}
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
        save_file(layouts[name], tmp_path / name / "model.safetensors")
    for name, count in (("each", 51), ("stacked", 30)):
        assert len(layouts[name]) == count
        assert script.main([str(tmp_path / name), "--dry-run"]) == 0
        assert ": 51 tensors, " in capsys.readouterr().out
        memory, back = tmp_path / f"{name}-memory", tmp_path / f"{name}-back"
        assert script.main([str(tmp_path / name), str(memory), "--to", "dcp"]) == 0
        assert script.main([str(memory), str(back)]) == 0 and bits_agree(back, layouts["each"])
        with DcpSource(memory) as held:
            assert held.headers.keys() == whole.keys() and all(same_bits(held.read(n), whole[n]) for n in whole)
        assert script.main([str(tmp_path / name), str(back), "--overwrite"]) == 0 and bits_agree(back, layouts["each"])


# Exit codes


def test_a_dry_run_reads_headers_only(tmp_path, script, capsys, monkeypatch):
    a_checkpoint(tmp_path / "hf", shards=2)
    monkeypatch.setattr(SafetensorsReader, "read", None)
    assert script.main([str(tmp_path / "hf"), str(tmp_path / "out"), "--dry-run"]) == 0
    output = capsys.readouterr().out
    assert "30 tensors, 109 kB would be written" in output and "architecture: Llama" in output
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


@pytest.mark.parametrize("arguments", [["--dry-run"], ["out"]])
def test_weights_that_do_not_match(tmp_path, script, capsys, arguments, monkeypatch):
    monkeypatch.chdir(tmp_path)
    a_checkpoint(tmp_path / "hf")
    (tmp_path / "hf" / "config.json").write_text(json.dumps({**CONFIG, "num_hidden_layers": 4}))
    assert script.main(["./hf", *arguments]) == 1
    output = capsys.readouterr()
    assert "missing (9 of 39)" in output.err and "3 layers on disk, 4 expected" in output.err and output.out == ""
    assert not (tmp_path / "out").exists()


def test_a_head_that_is_not_the_embedding(tmp_path, script, capsys):
    tensors = a_checkpoint(tmp_path / "hf", tied=True)
    source, target = str(tmp_path / "hf"), str(tmp_path / "out")
    embedding = tensors["model.embed_tokens.weight"]
    save_file({**tensors, "lm_head.weight": embedding.clone()}, tmp_path / "hf" / "model.safetensors")
    assert script.main([source, target]) == 0 and bits_agree(tmp_path / "out", tensors)
    save_file({**tensors, "lm_head.weight": embedding.flip(0)}, tmp_path / "hf" / "model.safetensors")
    assert script.main([source, target, "--overwrite"]) == 3
    assert "lm_head.weight differs from model.embed_tokens.weight" in capsys.readouterr().err
    assert bits_agree(tmp_path / "out", tensors)


def test_wrong_arguments(tmp_path, script, capsys):
    a_checkpoint(tmp_path / "hf")
    source, target = str(tmp_path / "hf"), str(tmp_path / "out")
    for arguments, words in [
        ([source], "DST is missing"),
        ([source, source], "--overwrite"),
        ([source, target, "--max-shard-size", "much"], "max_shard_size='much'"),
    ]:
        assert script.main(arguments) == 2 and words in capsys.readouterr().err
    for arguments, words in [
        ([source, target, "--dtype", "int8"], "invalid choice"),
        ([source, target, "--like", "--max-shard-size", "1GB"], "not allowed with"),
        ([source, target, "--verif", "keys"], "unrecognized"),
    ]:
        with pytest.raises(SystemExit) as caught:
            script.main(arguments)
        assert caught.value.code == 2 and words in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_configs_and_files_that_cannot_be_used(tmp_path, script, capsys):
    for name, change, words in [
        (
            "model_type",
            lambda f: (f / "config.json").write_text('{"model_type": "nobody"}'),
            "model_type 'nobody'",
        ),
        ("json", lambda f: (f / "config.json").write_text("{"), "not JSON"),
        ("weights", lambda f: (f / "model.safetensors").write_bytes(b"\0" * 9), "not a safetensors file"),
        ("none", lambda f: (f / "model.safetensors").unlink(), "holds neither"),
    ]:
        a_checkpoint(tmp_path / name)
        change(tmp_path / name)
        assert script.main([str(tmp_path / name), str(tmp_path / "out")]) == 3, name
        assert words in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_no_space_and_no_source(tmp_path, script, capsys, monkeypatch):
    a_checkpoint(tmp_path / "hf")
    assert script.main([str(tmp_path / "nothing"), str(tmp_path / "out")]) == 5

    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=1000))
    assert script.main([str(tmp_path / "hf"), str(tmp_path / "out")]) == 4
    assert "0.00 GB are free" in capsys.readouterr().err and [path.name for path in tmp_path.iterdir()] == ["hf"]


# As a process

WATCHED = """if True:
    import runpy, sys, threading
    peak, done = 0, threading.Event()
    def anonymous():
        with open("/proc/self/status") as status:
            return next(int(line.split()[1]) << 10 for line in status if line.startswith("RssAnon"))
    def watch():
        global peak
        while not done.wait(0.001):
            peak = max(peak, anonymous())
    main = runpy.run_path(sys.argv[1])["main"]
    assert main([*sys.argv[2:-1], "20MB"]) == 0  # what torch imports on first use is not counted
    start = peak = anonymous()
    watcher = threading.Thread(target=watch)
    watcher.start()
    assert main(sys.argv[2:]) == 0
    done.set()
    watcher.join()
    print(peak - start)
"""

KEEPING = """if True:
    from ligermodels.conversion.sources import View
    read, kept = View.read, []
    View.read = lambda self, name: kept.append(read(self, name)) or kept[-1]
"""


def run(*arguments: object) -> subprocess.CompletedProcess:
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    environment["MALLOC_MMAP_THRESHOLD_"] = "1000000"  # so that freed tensors leave RssAnon at once
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads RssAnon")
def test_memory_is_a_tensor_and_what_it_is_made_from(tmp_path):
    """88 MB, all in one shard: kept, they are mapped; cast, memory holds twice the largest of the result at most."""
    sizes = {"hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 16, "num_key_value_heads": 16}
    a_checkpoint(tmp_path / "hf", **sizes)
    largest = 4096 * 1024 * 2

    def peak(dtype: str, before: str = "") -> int:
        arguments = [tmp_path / "hf", tmp_path / "out", "--overwrite", "--dtype", dtype, "--max-shard-size", "1GB"]
        result = run("-c", before + WATCHED, SCRIPT, *arguments)
        assert result.returncode == 0, result.stderr
        return int(result.stdout.splitlines()[-1])

    assert peak("keep") < 2e6
    assert 0.9 * largest < peak("bf16") < 2 * largest + 2e6
    assert len(list((tmp_path / "out").glob("*.safetensors"))) == 1
    assert peak("bf16", KEEPING) > 60e6, "negative control: a tensor that is kept must show"


def test_as_a_command(tmp_path):
    a_checkpoint(tmp_path / "hf")
    result = run(SCRIPT, tmp_path / "hf", tmp_path / "out")
    assert result.returncode == 0 and f"{tmp_path / 'out'}: 30 tensors, 109 kB written" in result.stdout
    assert result.stderr == ""


def test_transformers_loads_what_comes_back(tmp_path, script):
    transformers = pytest.importorskip("transformers")
    a_checkpoint(tmp_path / "hf", shards=2)
    for to in ("dcp", "hf"):
        assert script.main([str(tmp_path / "hf"), str(tmp_path / "hf"), "--to", to, "--overwrite"]) == 0
    _, report = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "hf", output_loading_info=True)
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")), report
