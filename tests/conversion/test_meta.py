"""Meta's layout: every bit arrives, Meta's own logits, and what is refused."""

import math
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoTokenizer

from ligermodels import Llama
from ligermodels.checkpoint import weights
from ligermodels.conversion import Options, convert
from ligermodels.conversion.original import MetaSource
from ligermodels.errors import CheckpointError, LigermodelsError, TokenizerError
from ligermodels.text import Tokenizer, ranks
from tests.conversion.layouts import cut, logits, own_weights, same, write_meta
from tests.text import folders

PARAMS = {
    "dim": 32, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "vocab_size": -1, "multiple_of": 16, "norm_eps": 1e-5,
    "rope_theta": 10000.0,
}  # fmt: skip
VOCAB, INTERMEDIATE = 40, 96
SCALED = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip


def random_weight(*shape: int, dtype=torch.float32) -> Tensor:
    return (torch.randn(shape) * shape[-1] ** -0.5).to(dtype)


def meta_weights(dim=32, layers=2, heads=4, kv_heads=2, inner=INTERMEDIATE, vocab=VOCAB, dtype=torch.float32):
    """A Llama under Meta's names, whole."""
    kv = dim // heads * kv_heads
    state = {"tok_embeddings.weight": random_weight(vocab, dim, dtype=dtype)}
    for i in range(layers):
        shapes = {
            "attention.wq": (dim, dim), "attention.wk": (kv, dim), "attention.wv": (kv, dim),
            "attention.wo": (dim, dim), "feed_forward.w1": (inner, dim), "feed_forward.w2": (dim, inner),
            "feed_forward.w3": (inner, dim), "attention_norm": (dim,), "ffn_norm": (dim,),
        }  # fmt: skip
        state |= {f"layers.{i}.{name}.weight": random_weight(*s, dtype=dtype) for name, s in shapes.items()}
    state["norm.weight"] = random_weight(dim, dtype=dtype) + 1
    return state | {"output.weight": random_weight(vocab, dim, dtype=dtype)}


def a_folder(folder: Path, ranks: list[dict], params: dict | None = None) -> Path:
    return write_meta(folder, ranks, PARAMS if params is None else params)


def opened(folder: Path, **options) -> MetaSource:
    return MetaSource(folder, allow_pickle=True, **options)


def read_all(source) -> dict[str, Tensor]:
    return {name: source.read(name) for name in source.headers}


def as_model(source: MetaSource) -> Llama:
    model = Llama.from_config(source.config(), device="meta", dtype=torch.float32)
    weights.load(
        model, {}, source, device="cpu", progress=False, ignore=Llama.IGNORE, tied=model.tied_weights
    )  # fmt: skip
    return model.eval()


# The same bits.


@pytest.mark.parametrize(
    "kv_heads, groups, half, ranks, axis, dtype",
    [
        (2, 1, 1, 1, 0, torch.float32), (3, 2, 4, 1, 1, torch.bfloat16), (2, 4, 2, 2, 0, torch.bfloat16),
        (2, 2, 4, 2, 1, torch.float16), (4, 1, 2, 4, 0, torch.float32), (3, 2, 2, 3, 1, torch.bfloat16),
    ],
)  # fmt: skip
def test_every_bit_arrives_however_the_ranks_are_cut(tmp_path, kv_heads, groups, half, ranks, axis, dtype):
    heads, width = kv_heads * groups, 2 * half
    params = {**PARAMS, "dim": heads * width, "n_heads": heads, "n_kv_heads": kv_heads}
    state = meta_weights(heads * width, 2, heads, kv_heads, 24, 24, dtype)
    folder = a_folder(tmp_path / "in", cut(state, ranks, axis), params)
    hf = read_all(opened(folder))
    assert same(own_weights(hf, head_dim=width), state)
    convert(folder, tmp_path / "hf", Options(allow_pickle=True, verify="bytes", progress=False))
    assert same(load_file(tmp_path / "hf" / "model.safetensors"), hf)


@pytest.mark.parametrize("axis", [0, 1])
def test_a_tied_head_is_left_out(tmp_path, axis):
    state = meta_weights()
    state["output.weight"] = state["tok_embeddings.weight"].clone()
    source = opened(a_folder(tmp_path / "in", cut(state, 2, axis)))
    assert source.config()["tie_word_embeddings"] and "lm_head.weight" not in source.headers
    del state["output.weight"]
    config = opened(a_folder(tmp_path / "bare", cut(state, 2, axis))).config()
    assert config["tie_word_embeddings"] and config["vocab_size"] == VOCAB


# The same logits.


@pytest.mark.parametrize("ranks, axis", [(1, 0), (2, 0), (2, 1)])
def test_logits_are_metas_and_not_without_the_permutation(tmp_path, ranks, axis, monkeypatch):
    state, ids = meta_weights(), torch.randint(VOCAB, (2, 17))
    expected = logits(state, ids, PARAMS)
    source = opened(a_folder(tmp_path, cut(state, ranks, axis)))
    with torch.no_grad():
        right = (as_model(source)(ids).logits - expected).abs().max()
        monkeypatch.setattr("ligermodels.conversion.original.to_halves", lambda x, heads: x)
        wrong = (as_model(source)(ids).logits - expected).abs().max()
    assert right < 2e-5 * expected.abs().max()
    assert wrong > 1e-3 * expected.abs().max()


def test_logits_of_a_scaled_rope_are_metas(tmp_path):
    params = {**PARAMS, "rope_theta": 500000.0, "use_scaled_rope": True, "rope_scaling_factor": 8.0}
    state, ids = meta_weights(), torch.randint(VOCAB, (1, 33))
    # Meta's scaling, from its description: long waves slower by the factor, those between blended.
    plain = 500000.0 ** -(torch.arange(0, 8, 2).double() / 8)
    turns = 8192 * plain / (2 * math.pi)
    blend = ((turns - 1) / (4 - 1)).clamp(0, 1)
    expected = logits(state, ids, params, plain * (blend + (1 - blend) / 8))
    with torch.no_grad():
        found = as_model(opened(a_folder(tmp_path, cut(state, 2, 0), params)))(ids).logits
    assert (found - expected).abs().max() < 2e-5 * expected.abs().max()


# What params.json does not say.


@pytest.mark.parametrize("dim, factor", [(2048, 32.0), (4096, 8.0)])
def test_the_factor_of_scaled_rope_goes_by_size(tmp_path, dim, factor):
    params = {"dim": dim, "n_layers": 1, "n_heads": dim // 64, "n_kv_heads": 1, "norm_eps": 1e-5}
    params |= {"rope_theta": 5e5, "use_scaled_rope": True}
    a_folder(tmp_path, [meta_weights(dim, 1, dim // 64, 1, 4, 8, torch.bfloat16)], params)
    config = opened(tmp_path).config()
    assert config["rope_scaling"] == {**SCALED, "factor": factor}
    assert config["max_position_embeddings"] == 131072 and config["torch_dtype"] == "bfloat16"
    assert opened(tmp_path, rope_factor=5).config()["rope_scaling"]["factor"] == 5.0


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
    rows = len(tokens) + 256
    folder = a_folder(tmp_path, [meta_weights(vocab=rows)])
    with pytest.raises(TokenizerError, match=r"tiktoken file of .*take tokenizer.json"):
        convert(folder, folder / "hf", Options(allow_pickle=True, progress=False))
    assert not (folder / "hf").exists()
    monkeypatch.setattr(ranks, "LLAMA_3_SIZE", len(tokens))
    convert(folder, folder / "hf", Options(allow_pickle=True, progress=False))
    assert_same_tokenizer(folder, folder / "hf")
    assert Tokenizer.from_folder(folder / "hf").eos_token_ids == Tokenizer.from_folder(folder).eos_token_ids
    assert not (folder / "hf" / "tokenizer.model").exists()
    assert (folder / "hf" / "original/tokenizer.model").read_bytes() == (folder / "tokenizer.model").read_bytes()
    # A tokenizer.json beside tokenizer.model is kept.
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(folder / "hf" / name, folder)
    convert(folder, folder / "again", Options(allow_pickle=True, progress=False))
    for name in ("tokenizer.json", "tokenizer_config.json", "original/tokenizer.model"):
        assert (folder / "again" / name).read_bytes() == (folder / "hf" / name).read_bytes()


def test_a_sentencepiece_tokenizer(tmp_path):
    (tmp_path / "tokenizer.model").write_bytes(folders.merged_last(folders.sentencepiece_model(), "er"))
    with pytest.raises(TokenizerError, match="420 ids, the model's embedding 40 rows"):
        convert(a_folder(tmp_path, [meta_weights()]), tmp_path / "hf", Options(allow_pickle=True, progress=False))
    folder = a_folder(tmp_path, [meta_weights(vocab=420)])
    convert(folder, folder / "hf", Options(allow_pickle=True, progress=False))
    assert_same_tokenizer(folder, folder / "hf")
    assert (folder / "hf" / "tokenizer.model").read_bytes() == (folder / "tokenizer.model").read_bytes()


# What is refused.


def one(change) -> list[dict]:
    state = meta_weights()
    change(state)
    return [state]


BAD_WEIGHTS = {
    "missing tensor": (lambda: one(lambda s: s.pop("layers.1.ffn_norm.weight")), r"missing \(1 of 21\): model.lay"),
    "no embedding": (lambda: one(lambda s: s.pop("tok_embeddings.weight")), "no Llama in Meta's layout"),
    "last shard lost": (lambda: cut(meta_weights(), 2, 1)[:1], "32 rows of wq are cut into parts of 16"),
    "unequal shards": (
        lambda: [a | ({"layers.0.attention.wo.weight": torch.ones(32, 8)} if n else {})
                 for n, a in enumerate(cut(meta_weights(), 2, 1))],
        "two checkpoints",
    ),
    "integers": (lambda: one(lambda s: s.update({"norm.weight": torch.ones(32).int()})), "quantised"),
    "nested": (lambda: [{"model": meta_weights()}], "flat dictionary"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_WEIGHTS)
def test_bad_weights(tmp_path, case):
    ranks, message = BAD_WEIGHTS[case]
    folder = a_folder(tmp_path, ranks())
    with pytest.raises(CheckpointError, match=message):
        convert(folder, None, Options(dry_run=True, allow_pickle=True))


BAD_PARAMS = {
    "no dim": ({"dim": ...}, "lacks dim"),
    "another width": ({"dim": 64}, "64 rows of wq are cut into parts of 32"),
    "fewer layers": ({"n_layers": 1}, r"unexpected \(9\)"),
    "vision": ({"vision_chunk_size": 560}, "holds 'vision_chunk_size'"),
    "scaled rope of an unknown size": ({"use_scaled_rope": True}, "no Llama of dim 32 is known"),
}


@pytest.mark.parametrize("case", BAD_PARAMS)
def test_bad_params(tmp_path, case):
    changes, message = BAD_PARAMS[case]
    params = {name: value for name, value in {**PARAMS, **changes}.items() if value is not ...}
    a_folder(tmp_path, [meta_weights()], params)
    with pytest.raises(LigermodelsError, match=message):
        convert(tmp_path, None, Options(dry_run=True, allow_pickle=True))


def test_pickles_only_when_asked_for_and_no_code_then(tmp_path):
    class Attack:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "was here",))

    folder = a_folder(tmp_path / "in", [{"norm.weight": Attack()}])
    with pytest.raises(CheckpointError, match="allow_pickle"):
        MetaSource(folder, allow_pickle=False)
    with pytest.raises(CheckpointError, match="do not trust"):
        opened(folder)
    assert not (tmp_path / "was here").exists()
