"""Meta's and Mistral's own files: every bit arrives, the logits are those of their code, and what is refused."""

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoTokenizer

from ligermodels.arch import ARCHS
from ligermodels.checkpoint import weights
from ligermodels.conversion import Options, convert
from ligermodels.conversion.layouts import open_source
from ligermodels.conversion.original import MetaSource
from ligermodels.errors import CheckpointError, LigermodelsError, TokenizerError
from ligermodels.text import Tokenizer, tiktoken
from tests.conversion.layouts import cut, logits, write_meta
from tests.text import folders

META = {
    "dim": 32, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "vocab_size": -1, "multiple_of": 16, "norm_eps": 1e-5,
    "rope_theta": 10000.0,
}  # fmt: skip
MISTRAL = {
    "dim": 24, "n_layers": 2, "head_dim": 8, "hidden_dim": 40, "n_heads": 4, "n_kv_heads": 2, "norm_eps": 1e-5,
    "vocab_size": 36, "rope_theta": 1000000.0,
}  # fmt: skip
MOE = {"moe": {"num_experts": 3, "num_experts_per_tok": 2}}
SCALED = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
QUIET = Options(allow_pickle=True, progress=False)
DRY = Options(allow_pickle=True, dry_run=True)


def own_state(params: dict, *, rows: int = 36, dtype=torch.float32) -> dict[str, Tensor]:
    """A model under Meta's and Mistral's names, whole. rows: of the embedding, where params does not say."""
    dim, inner = params["dim"], params.get("hidden_dim", 48)
    rows = rows if params.get("vocab_size", -1) == -1 else params["vocab_size"]
    width = params.get("head_dim") or dim // params["n_heads"]
    q, kv = params["n_heads"] * width, params["n_kv_heads"] * width
    shapes = {"tok_embeddings": (rows, dim), "norm": (dim,), "output": (rows, dim)}
    for i in range(params["n_layers"]):
        mlp = {"w1": (inner, dim), "w2": (dim, inner), "w3": (inner, dim)}
        experts = (params.get("moe") or {}).get("num_experts", 0)
        block = {f"feed_forward.experts.{e}.{w}": s for e in range(experts) for w, s in mlp.items()}
        block |= {"feed_forward.gate": (experts, dim)} if experts else {f"feed_forward.{w}": s for w, s in mlp.items()}
        block |= {
            "attention.wq": (q, dim), "attention.wk": (kv, dim), "attention.wv": (kv, dim), "attention.wo": (dim, q),
            "attention_norm": (dim,), "ffn_norm": (dim,),
        }  # fmt: skip
        shapes |= {f"layers.{i}.{name}": shape for name, shape in block.items()}
    return {f"{name}.weight": (torch.randn(s) * s[-1] ** -0.5).to(dtype) for name, s in shapes.items()}


def a_folder(folder: Path, params: dict, state: dict[str, Tensor] | None = None, *, parts: int = 1, axis: int = 0):
    """Mistral's files (with head_dim) or Meta's, cut into parts. axis: along which Meta's embedding is cut."""
    state = own_state(params) if state is None else state
    if "head_dim" not in params:
        return write_meta(folder, cut(state, parts, axis), params)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "params.json").write_text(json.dumps(params))
    for n in range(parts):
        file = f"consolidated-{n + 1:05}-of-{parts:05}.safetensors" if parts > 1 else "consolidated.safetensors"
        save_file({name: state[name] for name in sorted(state)[n::parts]}, folder / file)
    return folder


def opened(folder: Path, **options):
    return open_source(folder, allow_pickle=True, **options)


# The same bits and logits


@pytest.mark.parametrize(
    "params, parts, axis",
    [
        (META, 2, 1), ({**MISTRAL, "sliding_window": 5}, 1, 0), ({**MISTRAL, "tied_embeddings": True}, 1, 0),
        (MISTRAL | MOE, 1, 0),
        ({**META, "rope_theta": 500000.0, "use_scaled_rope": True, "rope_scaling_factor": 8.0}, 2, 0),
    ],
)  # fmt: skip
def test_logits_are_theirs_and_not_without_the_permutation(tmp_path, params, parts, axis, monkeypatch):
    state, ids, frequencies = own_state(params), torch.randint(36, (2, 33)), None
    if params.get("tied_embeddings"):
        del state["output.weight"]
    if params.get("use_scaled_rope"):
        # Meta's scaling, from its description: long waves slower by the factor, those between blended.
        plain = 500000.0 ** -(torch.arange(0, 8, 2).double() / 8)
        blend = ((8192 * plain / (2 * math.pi) - 1) / (4 - 1)).clamp(0, 1)
        frequencies = plain * (blend + (1 - blend) / 8)
    expected = logits(state, ids, params, frequencies)
    source = opened(a_folder(tmp_path, params, state, parts=parts, axis=axis))

    def error() -> Tensor:
        model = ARCHS[source.config["model_type"]].from_config(source.config, device="meta", dtype=torch.float32)
        weights.load(model, model.names_on_disk, source, device="cpu", progress=False)
        with torch.no_grad():
            return (model.eval()(ids).logits - expected).abs().max() / expected.abs().max()

    assert error() < 2e-5
    monkeypatch.setattr("ligermodels.conversion.original.to_halves", lambda x, heads: x)
    assert error() > 1e-3


@pytest.mark.parametrize("axis", [0, 1])
def test_a_tied_head_of_metas_is_dropped(tmp_path, axis):
    state = own_state(META)
    state["output.weight"] = state["tok_embeddings.weight"].clone()
    for name in ("tied", "bare"):
        source = opened(a_folder(tmp_path / name, META, state, parts=2, axis=axis))
        assert source.config["tie_word_embeddings"] and "lm_head.weight" not in source.headers
        assert source.config["vocab_size"] == 36
        state.pop("output.weight", None)


@pytest.mark.parametrize("dim, factor", [(2048, 32.0), (4096, 8.0)])
def test_the_factor_of_scaled_rope_goes_by_size(tmp_path, dim, factor):
    params = {"dim": dim, "n_layers": 1, "n_heads": dim // 64, "n_kv_heads": 1, "norm_eps": 1e-5}
    params |= {"rope_theta": 5e5, "use_scaled_rope": True}
    a_folder(tmp_path, params, own_state(params | {"hidden_dim": 4}, rows=8, dtype=torch.bfloat16))
    config = opened(tmp_path).config
    assert config["rope_scaling"] == {**SCALED, "factor": factor} and config["max_position_embeddings"] == 131072


# Tokenizers


def assert_same_tokenizer(source: Path, converted: Path) -> None:
    """Ours and transformers' reading of a converted folder give the ids of the source's own file."""
    ours = Tokenizer.from_folder(source)
    for other in (Tokenizer.from_folder(converted), AutoTokenizer.from_pretrained(converted)):
        for text in (*folders.TEXTS, "<s>[INST] the cat[/INST]</s>", "<|eot_id|>\n the"):
            assert other.encode(text, add_special_tokens=False) == ours.encode(text, False), text
        assert other.encode("the") == ours.encode("the")
        for name in ("bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id"):
            assert getattr(other, name) == getattr(ours, name), name


def test_a_tiktoken_tokenizer(tmp_path, monkeypatch):
    tokens = folders.tiktoken_file(tmp_path / "tokenizer.model")
    folder = a_folder(tmp_path, META, own_state(META, rows=len(tokens) + 256))
    with pytest.raises(TokenizerError, match=r"tiktoken file of .*take tokenizer.json"):
        convert(folder, folder / "hf", QUIET)
    assert not (folder / "hf").exists()
    monkeypatch.setattr(tiktoken, "LLAMA_3_SIZE", len(tokens))
    convert(folder, folder / "hf", QUIET)
    assert_same_tokenizer(folder, folder / "hf")
    assert Tokenizer.from_folder(folder / "hf").eos_token_ids == Tokenizer.from_folder(folder).eos_token_ids
    assert not (folder / "hf" / "tokenizer.model").exists()
    assert (folder / "hf" / "original/tokenizer.model").read_bytes() == (folder / "tokenizer.model").read_bytes()
    # A tokenizer.json beside tokenizer.model is kept.
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(folder / "hf" / name, folder)
    convert(folder, folder / "again", QUIET)
    for name in ("tokenizer.json", "tokenizer_config.json", "original/tokenizer.model"):
        assert (folder / "again" / name).read_bytes() == (folder / "hf" / name).read_bytes()


@pytest.mark.parametrize("kind", ["tokenizer.model", "tekken.json", "tokenizer.model.v3"])
def test_a_tokenizer_is_converted(tmp_path, kind):
    rows, params = 420, META if kind == "tokenizer.model" else MISTRAL
    pieces = {"control_symbols": ["[INST]", "[/INST]"], "user_defined_symbols": ["[REF]"]}
    if kind == "tokenizer.model":
        (tmp_path / kind).write_bytes(folders.merged_last(folders.sentencepiece_model(), "er"))
        with pytest.raises(TokenizerError, match="420 ids, the model's embedding 36 rows"):
            convert(a_folder(tmp_path, META), tmp_path / "hf", QUIET)
    elif kind == "tekken.json":
        rows = 30 + len(folders.tekken_file(tmp_path / kind))
    else:
        (tmp_path / kind).write_bytes(folders.sentencepiece_model(vocab_size=rows, **pieces))
    params = params | {"vocab_size": rows}
    a_folder(tmp_path, params)
    convert(tmp_path, tmp_path / "hf", QUIET)
    assert_same_tokenizer(tmp_path, tmp_path / "hf")
    kept = kind if kind == "tekken.json" else "tokenizer.model"
    assert (tmp_path / "hf" / kept).read_bytes() == (tmp_path / kind).read_bytes()
    if kind != "tokenizer.model":
        ours, converted = Tokenizer.from_folder(tmp_path), Tokenizer.from_folder(tmp_path / "hf")
        ids = converted.encode("[INST] the [REF]x")
        assert ids == ours.encode("[INST] the [REF]x")
        text = " the [REF]x" if kind == "tekken.json" else "the [REF]x"
        assert converted.decode(ids, skip_special_tokens=True) == text


# What is refused

BAD = {
    "a missing tensor": (META, lambda s: s.pop("layers.1.ffn_norm.weight"), {}, r"missing \(1 of 21\): model.lay"),
    "no embedding": (META, lambda s: s.pop("tok_embeddings.weight"), {}, "no Llama in Meta's layout"),
    "integers": (META, lambda s: s.update({"norm.weight": torch.ones(32).int()}), {}, "quantised"),
    "no dim": (META, None, {"dim": ...}, "lacks dim"),
    "another width": (META, None, {"dim": 64}, "64 rows of wq are cut into parts of 32"),
    "fewer layers": (META, None, {"n_layers": 1}, r"unexpected \(9\)"),
    "vision": (META, None, {"vision_chunk_size": 560}, "holds 'vision_chunk_size'"),
    "an unknown size": (META, None, {"use_scaled_rope": True}, "no Llama of dim 32 is known"),
    "a missing tensor of Mistral's": (
        MISTRAL, lambda s: s.pop("layers.0.attention.wo.weight"), {}, r"missing \(1 of 21\): .*layers.0.self_attn.o_"),
    "no head": (MISTRAL, lambda s: s.pop("output.weight"), {}, r"missing \(1 of 21\): lm_head.weight"),
    "nothing": (MISTRAL, lambda s: s.clear(), {}, "lacks tok_embeddings"),
    **{f"no {n}": (MISTRAL, None, {n: ...}, f"lacks {n}") for n in ("head_dim", "hidden_dim", "vocab_size")},
    "no theta": (MISTRAL, None, {"rope_theta": ...}, "neither rope_theta nor sliding_window"),
    "another width of Mistral's": (MISTRAL, None, {"dim": 32}, "wrong shape"),
    "experts of none": (MISTRAL, None, MOE, r"missing \(20 of 35\)"),
    "an encoder": (MISTRAL, None, {"vision_encoder": {"hidden_size": 8}}, "'vision_encoder'"),
    "longer rope": (MISTRAL, None, {"yarn": {"factor": 16}}, "'yarn'"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_weights_and_params_that_are_refused(tmp_path, case):
    params, change, fields, message = BAD[case]
    state = own_state(params)
    if change is not None:
        change(state)
    a_folder(tmp_path, params, state)
    changed = {name: value for name, value in {**params, **fields}.items() if value is not ...}
    (tmp_path / "params.json").write_text(json.dumps(changed))
    with pytest.raises(LigermodelsError, match=message):
        convert(tmp_path, None, DRY)


def test_files_that_are_missing_or_of_two_checkpoints(tmp_path):
    state, parts = own_state(META), cut(own_state(META), 2, 1)
    odd = parts[1] | {"layers.0.attention.wo.weight": torch.ones(32, 8)}
    for name, given, message in (
        ("lost", parts[:1], "32 rows of wq are cut into parts of 16"),
        ("mixed", [parts[0], odd], "two checkpoints"),
        ("nested", [{"model": state}], "flat dictionary"),
    ):
        with pytest.raises(CheckpointError, match=message):
            convert(write_meta(tmp_path / name, given, META), None, DRY)
    (tmp_path / "mixed" / "consolidated.00.pth").unlink()
    with pytest.raises(CheckpointError, match=r"lacks consolidated\.00\.pth, and holds 1 other"):
        opened(tmp_path / "mixed")
    state = own_state(MISTRAL)
    folder = a_folder(tmp_path / "mistral", MISTRAL, state, parts=3)
    save_file(state, folder / "consolidated.safetensors")
    with pytest.raises(CheckpointError, match=r"consolidated\.safetensors and .* both hold"):
        opened(folder)
    (folder / "consolidated.safetensors").unlink()
    (folder / "consolidated-00002-of-00003.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"missing \(7 of 21\)"):
        convert(folder, None, DRY)


def test_pickles_only_when_asked_for_and_no_code_then(tmp_path):
    class Attack:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "was here",))

    folder = write_meta(tmp_path / "in", [{"norm.weight": Attack()}], META)
    with pytest.raises(CheckpointError, match="allow_pickle"):
        MetaSource(folder, allow_pickle=False)
    with pytest.raises(CheckpointError, match="do not trust"):
        opened(folder)
    assert not (tmp_path / "was here").exists()
