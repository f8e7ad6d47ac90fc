"""Mistral's own layout, dense and with experts: the logits of its rotation, the files it comes in, what is refused."""

import json
import math
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F

from ligermodels import Mistral, Mixtral
from ligermodels.checkpoint import weights
from ligermodels.checkpoint.reading import json_bytes
from ligermodels.checkpoint.saving import write_checkpoint
from ligermodels.checkpoint.weights import same_bits
from ligermodels.conversion.mistral import MistralSource
from ligermodels.errors import CheckpointError, HubError

PARAMS = {
    "dim": 24, "n_layers": 2, "head_dim": 8, "hidden_dim": 40, "n_heads": 4, "n_kv_heads": 2, "norm_eps": 1e-5,
    "vocab_size": 36, "rope_theta": 1000000.0,
}  # fmt: skip
MOE = {"moe": {"num_experts": 3, "num_experts_per_tok": 2}}


def mistral_weights(params: dict, dtype=torch.float32) -> dict[str, Tensor]:
    """A model under Mistral's names."""
    dim, inner, width = params["dim"], params["hidden_dim"], params["head_dim"]
    rows, kv_rows = params["n_heads"] * width, params["n_kv_heads"] * width
    shapes = {"tok_embeddings": (params["vocab_size"], dim), "norm": (dim,), "output": (params["vocab_size"], dim)}
    for i in range(params["n_layers"]):
        unit = {"w1": (inner, dim), "w2": (dim, inner), "w3": (inner, dim)}
        experts = (params.get("moe") or {}).get("num_experts", 0)
        block = {f"feed_forward.experts.{e}.{w}": s for e in range(experts) for w, s in unit.items()}
        block |= {"feed_forward.gate": (experts, dim)} if experts else {f"feed_forward.{w}": s for w, s in unit.items()}
        block |= {
            "attention.wq": (rows, dim), "attention.wk": (kv_rows, dim), "attention.wv": (kv_rows, dim),
            "attention.wo": (dim, rows), "attention_norm": (dim,), "ffn_norm": (dim,),
        }  # fmt: skip
        shapes |= {f"layers.{i}.{name}": shape for name, shape in block.items()}
    return {f"{name}.weight": (torch.randn(s) * s[-1] ** -0.5).to(dtype) for name, s in shapes.items()}


def a_folder(folder: Path, state: dict[str, Tensor] | None = None, params: dict | None = None, parts: int = 1) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    params = PARAMS if params is None else params
    state = mistral_weights(PARAMS | {k: v for k, v in params.items() if k == "moe"}) if state is None else state
    (folder / "params.json").write_text(json.dumps({k: v for k, v in params.items() if v is not ...}))
    names = sorted(state)
    for n in range(parts):
        file = f"consolidated-{n + 1:05}-of-{parts:05}.safetensors" if parts > 1 else "consolidated.safetensors"
        save_file({name: state[name] for name in names[n::parts]}, folder / file)
    return folder


def read_all(source: MistralSource) -> dict[str, Tensor]:
    return {name: source.read(name) for name in source.headers}


def logits(state: dict[str, Tensor], ids: Tensor, params: dict) -> Tensor:
    """Mistral's forward pass in fp64: neighbouring dimensions turned together, a window, experts weighed by softmax."""
    heads, groups, width = params["n_heads"], params["n_heads"] // params["n_kv_heads"], params["head_dim"]
    batch, length = ids.shape
    angles = torch.arange(length).double()[:, None] * params["rope_theta"] ** -(torch.arange(0, width, 2) / width)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    ago = torch.arange(length)[:, None] - torch.arange(length)
    hidden = (ago < 0) | (ago >= (params.get("sliding_window") or length))

    def rotated(x: Tensor) -> Tensor:
        even, odd = x[..., 0::2], x[..., 1::2]
        return torch.stack([even * cos - odd * sin, even * sin + odd * cos], -1).flatten(-2)

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return x * (x.square().mean(-1, keepdim=True) + params["norm_eps"]).rsqrt() * weight

    def unit(x: Tensor, prefix: str) -> Tensor:
        w1, w2, w3 = (state[f"{prefix}.w{n}.weight"] for n in (1, 2, 3))
        return (F.silu(x @ w1.T) * (x @ w3.T)) @ w2.T

    state = {name: tensor.double() for name, tensor in state.items()}
    x = state["tok_embeddings.weight"][ids]
    for i in range(params["n_layers"]):
        at = f"layers.{i}."
        h = norm(x, state[at + "attention_norm.weight"])
        q, k, v = ((h @ state[f"{at}attention.w{n}.weight"].T).unflatten(-1, (-1, width)) for n in "qkv")
        k, v = (t.repeat_interleave(groups, 2) for t in (rotated(k), v))
        scores = torch.einsum("bqhd,bkhd->bhqk", rotated(q), k) / math.sqrt(width)
        mixed = torch.einsum("bhqk,bkhd->bqhd", scores.masked_fill(hidden, -math.inf).softmax(-1), v)
        x = x + mixed.reshape(batch, length, heads * width) @ state[at + "attention.wo.weight"].T
        h = norm(x, state[at + "ffn_norm.weight"])
        if params.get("moe"):
            best = (h @ state[at + "feed_forward.gate.weight"].T).topk(params["moe"]["num_experts_per_tok"])
            shares = torch.zeros(*h.shape[:2], params["moe"]["num_experts"]).double()
            shares = shares.scatter(-1, best.indices, best.values.softmax(-1))
            for e in range(params["moe"]["num_experts"]):
                x = x + shares[..., e, None] * unit(h, f"{at}feed_forward.experts.{e}")
        else:
            x = x + unit(h, at + "feed_forward")
    return norm(x, state["norm.weight"]) @ state.get("output.weight", state["tok_embeddings.weight"]).T


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@pytest.mark.parametrize(
    "changes", [{}, {"sliding_window": 5}, {"n_kv_heads": 4}, {"n_kv_heads": 1}, {"tied_embeddings": True}, MOE],
    ids=["grouped", "window", "as many keys", "one key head", "tied", "experts"],
)  # fmt: skip
def test_logits_are_mistrals_and_not_without_the_permutation(tmp_path, changes, monkeypatch):
    params = PARAMS | changes
    state, ids = mistral_weights(params), torch.randint(36, (2, 17))
    if "tied_embeddings" in changes:
        del state["output.weight"]
    expected = logits(state, ids, params)
    folder = a_folder(tmp_path, state, params)
    arch = Mixtral if "moe" in changes else Mistral

    def error() -> Tensor:
        with MistralSource(folder) as source, torch.no_grad():
            with torch.device("meta"):
                model = arch(arch.config_class.from_hf(source.config()))
            weights.load(
                model,
                arch.DISK_NAMES,
                source,
                device="cpu",
                progress=False,
                ignore=arch.IGNORE,
                tied=model.tied_weights,
            )
            return (model.eval()(ids).logits - expected).abs().max() / expected.abs().max()

    assert error() < 2e-5
    monkeypatch.setattr("ligermodels.conversion.mistral.to_halves", lambda x, heads: x)
    assert error() > 1e-3


@pytest.mark.parametrize("changes", [{"sliding_window": 5}, MOE], ids=["dense", "experts"])
def test_transformers_loads_what_comes_out(tmp_path, changes):
    transformers = pytest.importorskip("transformers")
    params = PARAMS | changes
    state, ids = mistral_weights(params), torch.randint(36, (2, 17))
    with MistralSource(a_folder(tmp_path / "in", state, params)) as source:
        files = {"config.json": json_bytes(source.config())}
        write_checkpoint(tmp_path / "out", read_all(source).items(), files=files)
    arch = transformers.MixtralForCausalLM if "moe" in changes else transformers.MistralForCausalLM
    model, info = arch.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info.values())
    expected = logits(state, ids, params)
    with torch.no_grad():
        assert (model(ids).logits - expected).abs().max() < 2e-5 * expected.abs().max()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("changes", [{}, MOE], ids=["dense", "experts"])
def test_every_bit_arrives_however_the_files_are_cut(tmp_path, dtype, changes):
    params = PARAMS | changes
    state = mistral_weights(params, dtype)
    with MistralSource(a_folder(tmp_path / "1", state, params)) as whole:
        expected = read_all(whole)
        assert whole.config()["torch_dtype"] == str(dtype).removeprefix("torch.")
    unit = "layers.1.feed_forward." + ("experts.2.w2.weight" if changes else "w2.weight")
    ours = "model.layers.1." + ("block_sparse_moe.experts.2.w2.weight" if changes else "mlp.down_proj.weight")
    assert same_bits(expected[ours], state[unit])
    for heads, letter in ((4, "q"), (2, "k")):
        theirs, moved = state[f"layers.0.attention.w{letter}.weight"], f"model.layers.0.self_attn.{letter}_proj.weight"
        for head in range(heads):
            block = expected[moved][head * 8 : head * 8 + 8]
            assert same_bits(
                torch.cat([theirs[head * 8 : head * 8 + 8 : 2], theirs[head * 8 + 1 : head * 8 + 8 : 2]]), block
            )
    for indexed in (False, True):
        folder = a_folder(tmp_path / f"3{indexed}", state, params, parts=3)
        if indexed:
            files = [f"consolidated-{n + 1:05}-of-00003.safetensors" for n in range(3)]
            weight_map = {name: files[n] for n in range(3) for name in sorted(state)[n::3]}
            (folder / "consolidated.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
        with MistralSource(folder) as source:
            found = read_all(source)
        assert found.keys() == expected.keys()
        assert all(same_bits(found[name], expected[name]) for name in expected)


def test_the_config_says_what_params_say(tmp_path):
    params = PARAMS | {"sliding_window": "4096", "rope_theta": ..., "max_seq_len": 8192, "model_type": "transformer"}
    with MistralSource(a_folder(tmp_path / "a", params=params)) as source:
        config = source.config()
    assert config["sliding_window"] == 4096 and config["rope_theta"] == 10000.0
    assert config["max_position_embeddings"] == 8192 and config["model_type"] == "mistral"
    assert config["head_dim"] == 8 and config["intermediate_size"] == 40 and config["rms_norm_eps"] == 1e-5
    with MistralSource(a_folder(tmp_path / "b", params=PARAMS | MOE)) as source:
        config = source.config()
    assert config["model_type"] == "mixtral" and config["sliding_window"] is None
    assert config["num_local_experts"] == 3 and config["num_experts_per_tok"] == 2


def test_tokenizers_keep_their_names(tmp_path):
    folder = a_folder(tmp_path)
    for name in ("tokenizer.model.v3", "tekken.json", "tokenizer_config.json", "README.md"):
        (folder / name).write_text(name)
    with MistralSource(folder) as source:
        assert source.files() == {
            name: folder / name for name in ("tokenizer_config.json", "tekken.json", "tokenizer.model.v3")
        }


# What is refused.

BAD_PARAMS = {
    **{f"no {name}": ({name: ...}, f"lacks {name}")
       for name in ("dim", "n_layers", "head_dim", "hidden_dim", "n_heads", "norm_eps", "vocab_size")},
    "no theta": ({"rope_theta": ...}, "neither rope_theta nor sliding_window"),
    "theta as text": ({"rope_theta": "1e6"}, "rope_theta is '1e6'"),
    "window of zero": ({"sliding_window": 0}, "sliding_window is '0'"),
    "window as words": ({"sliding_window": "all"}, "sliding_window is 'all'"),
    "windows": ({"sliding_window": [8, None]}, "sliding_window is"),
    "key heads": ({"n_kv_heads": 3}, "multiple of n_kv_heads 3"),
    "odd heads": ({"head_dim": 7}, "7 even"),
    "another width": ({"dim": 32}, r"is \[\d+(, \d+)?\], and params.json makes it \[.*32"),
    "more heads": ({"n_heads": 8}, r"makes it \[\d+, \d+\]"),
    "layers": ({"n_layers": 3}, r"missing \(9 of 30\)"),
    "endless layers": ({"n_layers": 10**13}, "too few for n_layers"),
    "experts of none": (MOE, r"missing \(20 of 35\)"),
    "endless experts": ({"moe": {"num_experts": 10**13, "num_experts_per_tok": 2}}, "too few"),
    "more chosen than there are": ({"moe": {"num_experts": 2, "num_experts_per_tok": 3}}, "3 is more than"),
    "experts in a list": ({"moe": [3, 2]}, "moe is a list"),
    "experts of another kind": ({"moe": {**MOE["moe"], "num_shared_experts": 1}}, "'num_shared_experts'"),
    "vision": ({"vision_encoder": {"hidden_size": 8}}, "'vision_encoder'"),
    "longer rope": ({"yarn": {"factor": 16}}, "'yarn'"),
    "no transformer": ({"model_type": "mamba"}, "'model_type'"),
    "tied as text": ({"tied_embeddings": "yes"}, "tied_embeddings is 'yes'"),
}  # fmt: skip


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    return a_folder(tmp_path_factory.mktemp("good"), mistral_weights(PARAMS))


@pytest.mark.parametrize("case", BAD_PARAMS)
def test_bad_params(good, case):
    changes, words = BAD_PARAMS[case]
    params = {name: value for name, value in {**PARAMS, **changes}.items() if value is not ...}
    (good / "params.json").write_text(json.dumps(params))
    with pytest.raises(CheckpointError, match=words):
        MistralSource(good)


BAD_WEIGHTS = {
    "missing": (lambda s: s.pop("layers.0.attention.wo.weight"), r"missing \(1 of 21\): layers.0.attention.wo"),
    "unknown": (lambda s: s.update({"vision_encoder.ln.weight": torch.ones(1)}), r"unknown \(1\): vision_encoder"),
    "a name that leaves": (lambda s: s.update({"../../x": torch.ones(1)}), r"unknown \(1\): \.\./"),
    "shape": (lambda s: s.update({"norm.weight": torch.ones(23)}), r"norm.weight is \[23\].*\[24\]"),
    "integers": (lambda s: s.update({"norm.weight": torch.ones(24).to(torch.int8)}), "quantised"),
    "fp8": (lambda s: s.update({"norm.weight": torch.ones(24).to(torch.float8_e4m3fn)}), "quantised"),
    "no head": (lambda s: s.pop("output.weight"), r"missing \(1 of 21\): output.weight"),
    "nothing": (lambda s: s.clear(), "holds 0 tensors"),
}


@pytest.mark.parametrize("case", BAD_WEIGHTS)
def test_bad_weights(tmp_path, case):
    change, words = BAD_WEIGHTS[case]
    state = mistral_weights(PARAMS)
    change(state)
    with pytest.raises(CheckpointError, match=words):
        MistralSource(a_folder(tmp_path, state))


def test_both_kinds_of_weights(tmp_path):
    (a_folder(tmp_path) / "consolidated.00.pth").touch()
    with pytest.raises(CheckpointError, match=r"both consolidated\.00\.pth and consolidated\.safetensors"):
        MistralSource(tmp_path)


def test_parts_that_are_missing_or_of_two_checkpoints(tmp_path):
    state = mistral_weights(PARAMS)
    folder = a_folder(tmp_path / "a", state, parts=3)
    (folder / "consolidated-00002-of-00003.safetensors").rename(folder / "consolidated-00002-of-00004.safetensors")
    with pytest.raises(CheckpointError, match="parts of 3 and of 4 files"):
        MistralSource(folder)
    (folder / "consolidated-00002-of-00004.safetensors").unlink()
    with pytest.raises(CheckpointError, match="lacks consolidated-00002-of-00003"):
        MistralSource(folder)
    save_file(state, folder / "consolidated-00002-of-00003.safetensors")
    with pytest.raises(CheckpointError, match="which another file"):
        MistralSource(folder)
    save_file(state, folder / "consolidated.safetensors")
    with pytest.raises(CheckpointError, match="nothing says which"):
        MistralSource(folder)


@pytest.mark.parametrize(
    "index, words",
    [
        ({"norm.weight": "../consolidated.safetensors"}, "expected a .safetensors file in its folder"),
        ({"norm.weight": "consolidated.safetensors", "x": "consolidated.safetensors"}, "lacks x"),
        ({"norm.weight": "elsewhere.safetensors"}, "is not there"),
        ({"norm.weight": 3}, "names 3"), ([], "no weight_map"),
    ],
)  # fmt: skip
def test_bad_indexes(tmp_path, index, words):
    folder = a_folder(tmp_path)
    (folder / "consolidated.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    with pytest.raises(CheckpointError, match=words):
        MistralSource(folder)


@pytest.mark.parametrize(
    "content, words",
    [
        (b"", "not a safetensors file"), (bytes(99), "not a safetensors file"), (b"<!doctype html>", "HTML"),
        (b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"), (b"\xff" * 16, "not a safetensors file"),
    ],
)  # fmt: skip
def test_files_that_are_no_weights(tmp_path, content, words):
    folder = a_folder(tmp_path)
    (folder / "consolidated.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match=words):
        MistralSource(folder)


def test_folders_that_are_none(tmp_path):
    with pytest.raises(HubError, match="cannot be read"):
        MistralSource(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match=r"lacks consolidated\.safetensors"):
        MistralSource(tmp_path)
    folder = a_folder(tmp_path / "a")
    (folder / "params.json").unlink()
    with pytest.raises(CheckpointError, match="is not there"):
        MistralSource(folder)


def test_links_that_leave_and_files_that_change(tmp_path):
    state = mistral_weights(PARAMS)
    folder, weight_file = a_folder(tmp_path / "a", state), tmp_path / "a" / "consolidated.safetensors"
    with MistralSource(folder) as source:
        weight_file.write_bytes(weight_file.read_bytes()[:-8])
        with pytest.raises(CheckpointError, match="changed while it was read"):
            source.read("model.norm.weight")
    weight_file.unlink()
    weight_file.symlink_to(a_folder(tmp_path / "b", state) / "consolidated.safetensors")
    with pytest.raises(CheckpointError, match="leaves its folder"):
        MistralSource(folder)
    weight_file.unlink()
    os.mkfifo(weight_file)
    with pytest.raises(CheckpointError, match="not a regular file"):
        MistralSource(folder)
