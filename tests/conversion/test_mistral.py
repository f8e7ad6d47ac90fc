"""Mistral's own layout, dense and with experts: the logits of its rotation, the files it comes in, what is refused."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from ligermodels import Mistral, Mixtral
from ligermodels.checkpoint import weights
from ligermodels.checkpoint.weights import same_bits
from ligermodels.conversion import Options, convert
from ligermodels.conversion.original import MistralSource
from ligermodels.errors import CheckpointError
from ligermodels.text import Tokenizer
from tests.conversion.layouts import logits, same
from tests.conversion.test_meta import assert_same_tokenizer, read_all
from tests.text import folders

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


@pytest.mark.parametrize(
    "changes", [{}, {"sliding_window": 5}, {"n_kv_heads": 1}, {"tied_embeddings": True}, MOE],
    ids=["grouped", "window", "one key head", "tied", "experts"],
)  # fmt: skip
def test_logits_are_mistrals_and_not_without_the_permutation(tmp_path, changes, monkeypatch):
    params = PARAMS | changes
    state, ids = mistral_weights(params), torch.randint(36, (2, 17))
    if "tied_embeddings" in changes:
        del state["output.weight"]
    expected = logits(state, ids, params)
    source = MistralSource(a_folder(tmp_path, state, params))
    arch = Mixtral if "moe" in changes else Mistral

    def error() -> Tensor:
        model = arch.from_config(source.config(), device="meta")
        weights.load(model, arch.DISK_NAMES, source, device="cpu", progress=False, tied=model.tied_weights)
        with torch.no_grad():
            return (model.eval()(ids).logits - expected).abs().max() / expected.abs().max()

    assert error() < 2e-5
    monkeypatch.setattr("ligermodels.conversion.original.to_halves", lambda x, heads: x)
    assert error() > 1e-3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("changes", [{}, MOE], ids=["dense", "experts"])
def test_every_bit_arrives_however_the_files_are_cut(tmp_path, dtype, changes):
    params = PARAMS | changes
    state = mistral_weights(params, dtype)
    whole = MistralSource(a_folder(tmp_path / "1", state, params))
    expected = read_all(whole)
    assert whole.config()["torch_dtype"] == str(dtype).removeprefix("torch.")
    theirs = "layers.1.feed_forward." + ("experts.2.w2.weight" if changes else "w2.weight")
    ours = "model.layers.1." + ("block_sparse_moe.experts.2.w2.weight" if changes else "mlp.down_proj.weight")
    assert same_bits(expected[ours], state[theirs])
    for heads, letter in ((4, "q"), (2, "k")):
        rows = state[f"layers.0.attention.w{letter}.weight"].chunk(heads)
        halves = torch.cat([x for head in rows for x in (head[0::2], head[1::2])])
        assert same_bits(expected[f"model.layers.0.self_attn.{letter}_proj.weight"], halves)
    found = read_all(MistralSource(a_folder(tmp_path / "3", state, params, parts=3)))
    assert same(found, expected)
    convert(tmp_path / "3", tmp_path / "hf", Options(progress=False, verify="bytes"))
    assert same(load_file(tmp_path / "hf" / "model.safetensors"), expected)


# What is refused.

BAD_PARAMS = {
    **{f"no {name}": ({name: ...}, f"lacks {name}") for name in ("dim", "head_dim", "hidden_dim", "vocab_size")},
    "no theta": ({"rope_theta": ...}, "neither rope_theta nor sliding_window"),
    "another width": ({"dim": 32}, "wrong shape"),
    "experts of none": (MOE, r"missing \(20 of 35\)"),
    "vision": ({"vision_encoder": {"hidden_size": 8}}, "'vision_encoder'"),
    "longer rope": ({"yarn": {"factor": 16}}, "'yarn'"),
}


@pytest.mark.parametrize("case", BAD_PARAMS)
def test_bad_params(tmp_path, case):
    changes, message = BAD_PARAMS[case]
    a_folder(tmp_path, mistral_weights(PARAMS), PARAMS | changes)
    with pytest.raises(CheckpointError, match=message):
        convert(tmp_path, None, Options(dry_run=True))


BAD_WEIGHTS = {
    "missing": (lambda s: s.pop("layers.0.attention.wo.weight"), r"missing \(1 of 21\): .*layers.0.self_attn.o_proj"),
    "no head": (lambda s: s.pop("output.weight"), r"missing \(1 of 21\): lm_head.weight"),
    "nothing": (lambda s: s.clear(), "lacks tok_embeddings"),
}


@pytest.mark.parametrize("case", BAD_WEIGHTS)
def test_bad_weights(tmp_path, case):
    change, message = BAD_WEIGHTS[case]
    state = mistral_weights(PARAMS)
    change(state)
    with pytest.raises(CheckpointError, match=message):
        convert(a_folder(tmp_path, state), None, Options(dry_run=True))


def test_parts_that_are_missing_or_of_two_checkpoints(tmp_path):
    state = mistral_weights(PARAMS)
    folder = a_folder(tmp_path / "a", state, parts=3)
    save_file(state, folder / "consolidated.safetensors")
    with pytest.raises(CheckpointError, match=r"consolidated\.safetensors and .* both hold"):
        MistralSource(folder)
    (folder / "consolidated.safetensors").unlink()
    (folder / "consolidated-00002-of-00003.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"missing \(7 of 21\)"):
        convert(folder, None, Options(dry_run=True))


@pytest.mark.parametrize(("kind", "text"), [("tekken.json", " the [REF]x"), ("tokenizer.model.v3", "the [REF]x")])
def test_the_tokenizer_loads(tmp_path, kind, text):
    if kind == "tekken.json":
        rows = 30 + len(folders.tekken_file(tmp_path / kind))
    else:
        pieces = {"control_symbols": ["[INST]", "[/INST]"], "user_defined_symbols": ["[REF]"]}
        rows = 420
        (tmp_path / kind).write_bytes(folders.sentencepiece_model(vocab_size=rows, **pieces))
    params = PARAMS | {"vocab_size": rows}
    a_folder(tmp_path, mistral_weights(params), params)
    convert(tmp_path, tmp_path / "hf", Options(progress=False))
    assert_same_tokenizer(tmp_path, tmp_path / "hf")
    tokenizer = Tokenizer.from_folder(tmp_path / "hf")
    ids = tokenizer.encode("[INST] the [REF]x")
    assert ids == Tokenizer.from_folder(tmp_path).encode("[INST] the [REF]x")
    assert tokenizer.decode(ids, skip_special_tokens=True) == text
    kept = kind if kind == "tekken.json" else "tokenizer.model"
    assert (tmp_path / "hf" / kept).read_bytes() == (tmp_path / kind).read_bytes()
