"""Meta's layout: both ways to the same bits, the same logits by Meta's own rotation, and what is refused."""

import base64
import contextlib
import json
import math
import os
import subprocess
import sys
import warnings
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from ligermodels import Llama
from ligermodels.checkpoint import weights
from ligermodels.checkpoint.reading import json_bytes
from ligermodels.checkpoint.saving import write_checkpoint
from ligermodels.checkpoint.weights import TensorInfo, same_bits
from ligermodels.conversion.meta import MetaSource, to_halves, to_pairs, write_meta
from ligermodels.errors import CheckpointError, ConfigError, HubError, InputError, LigermodelsError

PARAMS = {
    "dim": 32, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "vocab_size": -1, "multiple_of": 16, "norm_eps": 1e-5,
    "rope_theta": 10000.0,
}  # fmt: skip
VOCAB, INTERMEDIATE = 40, 96
SCALED = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip


class Held:
    """A weights.Reader over a dictionary."""

    source = "a dictionary"

    def __init__(self, tensors: dict[str, Tensor]):
        self.tensors = tensors
        self.headers = {name: TensorInfo(x.dtype, tuple(x.shape)) for name, x in tensors.items()}

    def read(self, name: str) -> Tensor:
        return self.tensors[name]


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


def cut(state: dict[str, Tensor], shards: int, table_axis: int) -> list[dict[str, Tensor]]:
    """The ranks' dictionaries, by Meta's rules."""
    ranks: list[dict[str, Tensor]] = [{} for _ in range(shards)]
    for name, tensor in state.items():
        axis = 1 if name.endswith(("wo.weight", "w2.weight")) else table_axis if "tok_" in name else 0
        parts = [tensor] * shards if tensor.ndim == 1 else tensor.chunk(shards, axis)
        for rank, part in zip(ranks, parts, strict=True):
            rank[name] = part.clone()
    return ranks


def a_folder(folder: Path, ranks: list[dict], params: dict | None = None) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for number, rank in enumerate(ranks):
        torch.save(rank, folder / f"consolidated.{number:02}.pth")
    (folder / "params.json").write_text(json.dumps(PARAMS if params is None else params))
    return folder


def opened(folder: Path, **options) -> MetaSource:
    return MetaSource(folder, allow_pickle=True, **options)


def read_all(source) -> dict[str, Tensor]:
    return {name: source.read(name) for name in source.headers}


def loaded(folder: Path) -> list[dict[str, Tensor]]:
    return [torch.load(path, weights_only=True) for path in sorted(folder.glob("*.pth"))]


def assert_same(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    assert all(same_bits(a[name], b[name]) for name in a)


def as_model(source: MetaSource, dtype=torch.float32) -> Llama:
    with torch.device("meta"):
        model = Llama(Llama.config_class.from_hf(source.config()))
    weights.load(
        model, Llama.DISK_NAMES, source, device="cpu", dtype=dtype, progress=False, ignore=Llama.IGNORE,
        tied=model.tied_weights,
    )  # fmt: skip
    return model.eval()


def meta_logits(state: dict[str, Tensor], ids: Tensor, params: dict, frequencies: Tensor | None = None) -> Tensor:
    """Meta's forward pass, written from its description: neighbours are one complex number, turned by m * theta_j."""
    heads, kv_heads = params["n_heads"], params["n_kv_heads"]
    batch, length, width = *ids.shape, params["dim"] // heads
    if frequencies is None:
        frequencies = params["rope_theta"] ** -(torch.arange(0, width, 2).double() / width)
    angles = torch.outer(torch.arange(length).double(), frequencies.double())
    turns = torch.polar(torch.ones_like(angles), angles)[:, None]

    def rotated(x: Tensor) -> Tensor:
        pairs = torch.view_as_complex(x.double().unflatten(-1, (-1, 2)).contiguous())
        return torch.view_as_real(pairs * turns).flatten(-2)

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return x * (x.square().mean(-1, keepdim=True) + params["norm_eps"]).rsqrt() * weight

    state = {name: tensor.double() for name, tensor in state.items()}
    x = state["tok_embeddings.weight"][ids]
    for i in range(params["n_layers"]):
        w = {name.split(".")[-2]: tensor for name, tensor in state.items() if name.startswith(f"layers.{i}.")}
        h = norm(x, w["attention_norm"])
        q = rotated((h @ w["wq"].T).view(batch, length, heads, width))
        k = rotated((h @ w["wk"].T).view(batch, length, kv_heads, width))
        k, v = (t.repeat_interleave(heads // kv_heads, 2) for t in (k, (h @ w["wv"].T).view(*k.shape)))
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(width)
        scores = scores.masked_fill(torch.ones(length, length).triu(1).bool(), -math.inf)
        x = x + torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v).flatten(2) @ w["wo"].T
        h = norm(x, w["ffn_norm"])
        x = x + (F.silu(h @ w["w1"].T) * (h @ w["w3"].T)) @ w["w2"].T
    return norm(x, state["norm.weight"]) @ state.get("output.weight", state["tok_embeddings.weight"]).T


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


# The same bits.


@settings(max_examples=25, deadline=None)
@given(
    kv_heads=st.sampled_from([1, 2, 3, 4]), groups=st.sampled_from([1, 2, 4]), half=st.sampled_from([1, 2, 4]),
    shards=st.sampled_from([1, 2, 3, 4]), axis=st.sampled_from([0, 1]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)  # fmt: skip
def test_there_and_back_both_ways(tmp_path_factory, kv_heads, groups, half, shards, axis, dtype):
    kv_heads, folder = kv_heads * shards, tmp_path_factory.mktemp("round")
    heads, width = kv_heads * groups, 2 * half
    params = {**PARAMS, "dim": heads * width, "n_heads": heads, "n_kv_heads": kv_heads, "multiple_of": 12}
    inner = 12 * math.ceil(int(8 * heads * width / 3) / 12)
    state = meta_weights(heads * width, 2, heads, kv_heads, inner, 24, dtype)
    ranks = cut(state, shards, axis)
    with opened(a_folder(folder / "a", ranks, params)) as source:
        hf, config = read_all(source), source.config()
        write_meta(source, config, folder / "b", shards=shards, embedding_axis=axis)
    for there, back in zip(ranks, loaded(folder / "b"), strict=True):
        assert_same(there, back)
    # Onto another number of ranks, and back.
    write_meta(Held(hf), config, folder / "c", shards=1)
    assert_same(state, loaded(folder / "c")[0])
    with opened(folder / "b") as again:
        assert_same(hf, read_all(again))
        assert again.config() == config
    with opened(folder / "c") as again:
        assert_same(hf, read_all(again))
        assert again.config() == config


def test_the_rows_move_as_in_the_public_rule():
    """Row 2 j + p of a head becomes row p D / 2 + j: transformers' view(h, D / 2, 2, n).transpose(1, 2)."""
    heads, width, columns = 3, 8, 5
    weight = torch.randn(heads * width, columns)
    expected = torch.empty_like(weight)
    for head in range(heads):
        for j in range(width // 2):
            for p in range(2):
                expected[head * width + p * width // 2 + j] = weight[head * width + 2 * j + p]
    moved = to_halves(weight, heads).reshape(weight.shape)
    assert torch.equal(moved, expected)
    assert torch.equal(to_pairs(moved, heads).reshape(weight.shape), weight)


def test_the_ranks_are_joined_as_meta_cuts_them(tmp_path):
    state = meta_weights()
    with opened(a_folder(tmp_path, cut(state, 2, 1))) as source:
        hf = read_all(source)
    assert torch.equal(hf["model.layers.1.self_attn.o_proj.weight"], state["layers.1.attention.wo.weight"])
    assert torch.equal(hf["model.layers.1.mlp.down_proj.weight"], state["layers.1.feed_forward.w2.weight"])
    assert torch.equal(hf["model.layers.0.mlp.up_proj.weight"], state["layers.0.feed_forward.w3.weight"])
    assert torch.equal(hf["model.embed_tokens.weight"], state["tok_embeddings.weight"])
    assert torch.equal(hf["model.layers.0.input_layernorm.weight"], state["layers.0.attention_norm.weight"])


def test_a_tied_head_is_left_out_and_written_back(tmp_path):
    state = meta_weights()
    state["output.weight"] = state["tok_embeddings.weight"].clone()
    for axis in (0, 1):
        with opened(a_folder(tmp_path / f"in{axis}", cut(state, 2, axis))) as source:
            assert source.config()["tie_word_embeddings"] and "lm_head.weight" not in source.headers
            write_meta(source, source.config(), tmp_path / f"out{axis}", shards=2, embedding_axis=axis)
        for there, back in zip(cut(state, 2, axis), loaded(tmp_path / f"out{axis}"), strict=True):
            assert_same(there, back)
    del state["output.weight"]
    with opened(a_folder(tmp_path / "bare", cut(state, 2, 1))) as source:
        assert source.config()["tie_word_embeddings"] and source.config()["vocab_size"] == VOCAB


# The same logits.


@pytest.mark.parametrize("shards, axis", [(1, 0), (2, 0), (2, 1)])
def test_logits_are_metas_and_not_without_the_permutation(tmp_path, shards, axis, monkeypatch):
    state, ids = meta_weights(), torch.randint(VOCAB, (2, 17))
    expected = meta_logits(state, ids, PARAMS)
    folder = a_folder(tmp_path, cut(state, shards, axis))
    with opened(folder) as source, torch.no_grad():
        assert source.config()["head_dim"] == 8 and source.config()["num_key_value_heads"] == 2
        right = (as_model(source)(ids).logits - expected).abs().max()
    monkeypatch.setattr("ligermodels.conversion.meta.to_halves", lambda x, heads: x.unflatten(0, (heads, 2, -1)))
    with opened(folder) as source, torch.no_grad():
        wrong = (as_model(source)(ids).logits - expected).abs().max()
    assert right < 2e-5 * expected.abs().max()
    assert wrong > 1e-3 * expected.abs().max()


def test_a_model_of_ours_written_for_meta_gives_its_logits(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        config = Llama.config_class(
            vocab_size=VOCAB, hidden_size=32, intermediate_size=52, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, rms_norm_eps=1e-5, rope_parameters={"rope_theta": 500000.0, **SCALED},
        )  # fmt: skip
    model = Llama.from_config(config.to_hf(), device="cpu").eval()
    write_meta(Held(dict(weights.export(model, Llama.DISK_NAMES))), config.to_hf(), tmp_path / "out", shards=2)
    params = json.loads((tmp_path / "out" / "params.json").read_text())
    assert params["use_scaled_rope"] and params["rope_scaling_factor"] == 8.0
    first, second = loaded(tmp_path / "out")
    assert first["tok_embeddings.weight"].shape == (VOCAB // 2, 32)  # by rows, as Llama 3
    whole = {
        name: first[name] if first[name].ndim == 1
        else torch.cat([first[name], second[name]], int(name.endswith(("wo.weight", "w2.weight"))))
        for name in first
    }  # fmt: skip
    # Meta's scaling, from its description: long waves slower by the factor, those between blended.
    plain = 500000.0 ** -(torch.arange(0, 8, 2).double() / 8)
    turns = 8192 * plain / (2 * math.pi)
    blend = ((turns - 1) / (4 - 1)).clamp(0, 1)
    ids = torch.randint(VOCAB, (1, 33))
    expected = meta_logits(whole, ids, params, plain * (blend + (1 - blend) / 8))
    with torch.no_grad():
        assert (model(ids).logits - expected).abs().max() < 2e-5 * expected.abs().max()


def test_transformers_loads_what_comes_out(tmp_path):
    transformers = pytest.importorskip("transformers")
    state, ids = meta_weights(), torch.randint(VOCAB, (2, 17))
    with opened(a_folder(tmp_path / "in", cut(state, 2, 1))) as source:
        files = {"config.json": json_bytes(source.config())}
        write_checkpoint(tmp_path / "out", read_all(source).items(), files=files)
    model, info = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info.values())
    expected = meta_logits(state, ids, PARAMS)
    with torch.no_grad():
        assert (model(ids).logits - expected).abs().max() < 2e-5 * expected.abs().max()


# What params.json does not say.


def test_the_sizes_that_meta_published():
    from ligermodels.conversion.meta import _intermediate, _rounding

    published = {  # (dim, multiple_of, ffn_dim_multiplier): intermediate_size of config.json
        (4096, 256, 1.0): 11008, (5120, 256, 1.0): 13824, (8192, 4096, 1.3): 28672, (4096, 1024, 1.3): 14336,
        (2048, 256, 1.5): 8192, (3072, 256, 1.0): 8192, (16384, 4096, 1.2): 53248,
    }  # fmt: skip
    for (dim, multiple, scale), expected in published.items():
        assert _intermediate(dim, multiple, scale) == expected
    for dim in (1, 8, 32, 100, 2048, 4096):
        for inner in (1, 7, 48, 52, 53, 96, 1000, 8192, 11008):
            assert _intermediate(dim, *_rounding(dim, inner)) == inner


@pytest.mark.parametrize("dim, factor", [(2048, 32.0), (3072, 32.0), (4096, 8.0), (8192, 8.0)])
def test_the_factor_of_scaled_rope_goes_by_size(tmp_path, dim, factor):
    params = {"dim": dim, "n_layers": 1, "n_heads": 32 * 128, "n_kv_heads": 1, "norm_eps": 1e-5, "multiple_of": 4}
    params = {**params, "n_heads": dim // 64, "ffn_dim_multiplier": 1e-3, "rope_theta": 5e5, "use_scaled_rope": True}
    inner = 4 * math.ceil(int(1e-3 * int(8 * dim / 3)) / 4)
    state = meta_weights(dim, 1, dim // 64, 1, inner, 8, torch.bfloat16)
    with opened(a_folder(tmp_path, [state], params)) as source:
        config = source.config()
    assert config["rope_scaling"] == {**SCALED, "factor": factor}
    assert config["max_position_embeddings"] == 131072 and config["torch_dtype"] == "bfloat16"
    with opened(tmp_path, rope_factor=5) as source:
        assert source.config()["rope_scaling"]["factor"] == 5.0


def test_tokenizers_keep_what_they_are(tmp_path):
    folder = a_folder(tmp_path, [meta_weights()])
    (folder / "tokenizer.model").write_bytes(base64.b64encode(b"!") + b" 0\n" + base64.b64encode(b"ab") + b" 1\n")
    with opened(folder) as source:
        assert source.files() == {"original/tokenizer.model": folder / "tokenizer.model"}
    (folder / "tokenizer.model").write_bytes(b"\n\x0e\n\x05<unk>\x15\x00\x00\x00\x00\x18\x02")
    with opened(folder) as source:
        assert source.files() == {"tokenizer.model": folder / "tokenizer.model"}


def test_ranks_with_different_norms_are_warned_of(tmp_path):
    ranks = cut(meta_weights(), 2, 1)
    ranks[1]["norm.weight"] += 1
    with opened(a_folder(tmp_path, ranks)) as source, pytest.warns(UserWarning, match=r"different norm\.weight"):
        assert torch.equal(source.read("model.norm.weight"), ranks[0]["norm.weight"])


def test_memory_is_the_tensor_asked_for(tmp_path):
    """Both ways, on two files of 105 MB whose largest tensor is 17 MB: anonymous memory, in a process of its own."""
    params = {**PARAMS, "dim": 1024, "n_heads": 8, "n_kv_heads": 8, "multiple_of": 2048, "n_layers": 3}
    a_folder(tmp_path / "in", cut(meta_weights(1024, 3, 8, 8, 4096, 1024), 2, 1), params)
    code = """
import sys, torch
from ligermodels.conversion.meta import MetaSource, write_meta
torch.set_num_threads(1)
def held(): return next(int(l.split()[1]) for l in open("/proc/self/status") if l.startswith("RssAnon")) / 1e3
source = MetaSource(sys.argv[1], allow_pickle=True)
before, most, read = held(), 0.0, source.read
def watched(name):
    global most
    tensor = read(name)
    most = max(most, held())
    return tensor
source.read = watched
write_meta(source, source.config(), sys.argv[2], shards=4)
print(most - before)
"""
    # Freed tensors go back to the system at once: else malloc's heap, of up to 32 MB a piece, is what is measured.
    done = subprocess.run(
        [sys.executable, "-c", code, tmp_path / "in", tmp_path / "out"],
        capture_output=True, text=True, check=False, env={**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    largest = 1024 * 4096 * 4 / 1e6
    assert float(done.stdout) < 1.25 * largest


# What is refused.

JUNK = [0, -1, 1, 3, 7, 16, 0.5, 1e308, 10**30, math.nan, None, True, "8", "x", [], [1], {}, {"a": 1}]


@settings(max_examples=150, deadline=None)
@given(changes=st.dictionaries(
    st.sampled_from([*PARAMS, "ffn_dim_multiplier", "use_scaled_rope", "rope_scaling_factor", "model", "max_seq_len"]),
    st.sampled_from(JUNK), min_size=1, max_size=3,
))  # fmt: skip
def test_any_params_are_read_or_refused(good, changes):
    damage(good, **changes)
    with contextlib.suppress(LigermodelsError), opened(good) as source:
        Llama.config_class.from_hf(source.config())


@settings(max_examples=150, deadline=None)
@given(where=st.floats(0, 1), at_end=st.booleans(), new=st.binary(max_size=4), cut_out=st.integers(0, 4))
def test_any_bytes_are_read_or_refused(good, tmp_path_factory, where, at_end, new, cut_out):
    whole = (good / "consolidated.00.pth").read_bytes()
    place = int(where * 3999) + (len(whole) - 4000 if at_end else 0)  # the pickle, or the zip's directory
    folder = damage(tmp_path_factory.mktemp("bytes"))
    (folder / "consolidated.00.pth").write_bytes(whole[:place] + new + whole[place + cut_out :])
    with contextlib.suppress(LigermodelsError), opened(folder) as source:
        read_all(source)


def damage(folder: Path, **params) -> Path:
    (folder / "params.json").write_text(json.dumps({k: v for k, v in {**PARAMS, **params}.items() if v is not ...}))
    return folder


def one(change) -> list[dict]:
    state = meta_weights()
    change(state)
    return [state]


BAD_WEIGHTS = {
    "missing tensor": (lambda: one(lambda s: s.pop("layers.1.ffn_norm.weight")), r"missing \(1 of 21\): layers.1.ffn"),
    "unknown tensor": (lambda: one(lambda s: s.update(extra=torch.ones(1))), r"unknown \(1\): extra"),
    "unknown tensor of one rank": (
        lambda: [a | ({"x": torch.ones(1)} if n else {}) for n, a in enumerate(cut(meta_weights(), 2, 1))],
        r"consolidated.01.pth.*\n.*unknown \(1\): x",
    ),
    "wrong shape": (lambda: one(lambda s: s.update({"norm.weight": torch.ones(31)})), r"norm.weight is \[31\]"),
    "wrong width": (
        lambda: one(lambda s: s.update({"layers.0.feed_forward.w2.weight": torch.ones(32, 90)})),
        r"params.json makes it \[32, 96\]",
    ),
    "last shard lost": (lambda: cut(meta_weights(), 2, 1)[:1], "are cut for 2 shards, and 1 are here"),
    "unequal shards": (
        lambda: [a | ({"layers.0.attention.wo.weight": torch.ones(32, 8)} if n else {})
                 for n, a in enumerate(cut(meta_weights(), 2, 1))],
        "the shards are unequal",
    ),
    "two dtypes": (
        lambda: [{k: v.half() if n else v for k, v in a.items()} for n, a in enumerate(cut(meta_weights(), 2, 1))],
        "in different shards",
    ),
    "more shards than heads": (lambda: cut(meta_weights(), 4, 1), "4 shards, which cannot share"),
    "integers": (lambda: one(lambda s: s.update({"norm.weight": torch.ones(32).int()})), "not floating"),
    "stride of zero": (
        lambda: one(lambda s: s.update({"output.weight": torch.ones(1).expand(1 << 20, 32)})), "claims 134,217,728",
    ),
    "a list": (lambda: [[1, 2]], "flat dictionary"),
    "nested": (lambda: [{"model": meta_weights()}], "flat dictionary"),
    "numbers": (lambda: [{"a": 1}], "flat dictionary"),
    "names that are no text": (lambda: [{1: torch.ones(1)}], "with the name 1"),
    "nothing": (lambda: [{}], "holds 0 tensors"),
    "code": (lambda: [OrderedDict(a=subprocess.Popen)], "plain tensors"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_WEIGHTS)
def test_bad_weights(tmp_path, case):
    ranks, words = BAD_WEIGHTS[case]
    folder = a_folder(tmp_path, ranks())
    with pytest.raises(CheckpointError, match=words):
        opened(folder)


BAD_PARAMS = {
    "no dim": ({"dim": ...}, "lacks dim"),
    "no n_layers": ({"n_layers": ...}, "lacks n_layers"),
    "no n_heads": ({"n_heads": ...}, "lacks n_heads"),
    "no norm_eps": ({"norm_eps": ...}, "lacks norm_eps"),
    "text": ({"dim": "32"}, "dim is '32', expected a positive integer"),
    "true": ({"n_heads": True}, "n_heads is 'True'"),
    "negative": ({"n_layers": -1}, "n_layers is '-1'"),
    "zero": ({"n_kv_heads": 0}, "n_kv_heads is '0'"),
    "nan": ({"norm_eps": math.nan}, "norm_eps is 'nan', expected a positive number"),
    "infinite": ({"rope_theta": math.inf}, "rope_theta is 'inf'"),
    "huge": ({"n_layers": 10**12}, "too few for n_layers"),
    "beyond numbers": ({"dim": 10**40}, "dim is '1000"),
    "heads that do not divide": ({"n_heads": 5}, "multiple of n_heads 5"),
    "key heads that do not divide": ({"n_kv_heads": 3}, "multiple of n_kv_heads 3"),
    "odd heads": ({"n_heads": 32, "n_kv_heads": 32}, "even"),
    "another vocabulary": ({"vocab_size": 41}, r"tok_embeddings.weight is \[40, 32\].*\[41, 32\]"),
    "another width": ({"multiple_of": 256}, "another model's"),
    "fewer layers": ({"n_layers": 1}, r"unknown \(9\)"),
    "more layers": ({"n_layers": 3}, r"missing \(9 of 30\)"),
    "vision": ({"vision_chunk_size": 560}, "holds 'vision_chunk_size'"),
    "quantised": ({"quantization_args": {"group_size": 32}}, "holds 'quantization_args'"),
    "Mistral's": ({"head_dim": 8, "hidden_dim": 96}, "holds 'head_dim', 'hidden_dim'"),
    "scaled rope of an unknown size": ({"use_scaled_rope": True}, "no Llama of dim 32 is known"),
    "scaled rope as a word": ({"use_scaled_rope": "yes"}, "use_scaled_rope is 'yes'"),
}


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    return a_folder(tmp_path_factory.mktemp("good"), [meta_weights()])


@pytest.mark.parametrize("case", BAD_PARAMS)
def test_bad_params(good, case):
    params, words = BAD_PARAMS[case]
    with pytest.raises(CheckpointError, match=words):
        opened(damage(good, **params))
    opened(damage(good))


@pytest.mark.parametrize(
    "content, words",
    [
        (b"", "is not JSON"), (b"[1]", "expected an object"), (b"{", "is not JSON"),
        (b"version https://git-lfs.github.com/spec/v1", "git lfs pull"), (None, "is not there"),
    ],
)  # fmt: skip
def test_a_params_file_that_is_none(tmp_path, content, words):
    folder = a_folder(tmp_path, [meta_weights()])
    (folder / "params.json").unlink()
    if content is not None:
        (folder / "params.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=words):
        opened(folder)


@pytest.mark.parametrize(
    "content, words",
    [
        (b"", "plain tensors"), (b"PK\x03\x04" + bytes(100), "plain tensors"), (b"\x80\x02\0\0", "plain tensors"),
        (b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"), (b"<!doctype html>", "HTML"),
    ],
)  # fmt: skip
def test_a_weight_file_that_is_none(tmp_path, content, words):
    folder = a_folder(tmp_path, [meta_weights()])
    (folder / "consolidated.00.pth").write_bytes(content)
    with pytest.raises(CheckpointError, match=words):
        opened(folder)


def test_a_weight_file_cut_at_any_length(good, tmp_path):
    whole = (good / "consolidated.00.pth").read_bytes()
    damage(tmp_path)
    for length in range(1, len(whole) - 1, len(whole) // 12):
        (tmp_path / "consolidated.00.pth").write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match="plain tensors"):
            opened(tmp_path)


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


def test_files_that_are_missing_or_too_many(tmp_path):
    folder = a_folder(tmp_path / "in", cut(meta_weights(), 2, 1))
    (folder / "consolidated.00.pth").unlink()
    with pytest.raises(CheckpointError, match=r"lacks consolidated\.00\.pth"):
        opened(folder)
    (folder / "consolidated.00.pth").mkdir()
    with pytest.raises(CheckpointError, match="not a regular file"):
        opened(folder)
    (folder / "consolidated.00.pth").rmdir()
    (folder / "consolidated.00.pth").symlink_to(tmp_path / "in" / ".." / "elsewhere")
    with pytest.raises(CheckpointError, match="link to nothing"):
        opened(folder)
    (tmp_path / "elsewhere").touch()
    with pytest.raises(CheckpointError, match="leaves its folder"):
        opened(folder)
    (folder / "consolidated.safetensors").touch()
    with pytest.raises(CheckpointError, match="both consolidated"):
        opened(folder)
    with pytest.raises(HubError, match="cannot be read"):
        opened(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match=r"lacks consolidated\.00\.pth"):
        opened(tmp_path / "empty")


def test_a_file_that_changes_meanwhile(tmp_path):
    folder = a_folder(tmp_path, cut(meta_weights(), 2, 1))
    with opened(folder) as source:
        (folder / "consolidated.01.pth").write_bytes(b"new")
        with pytest.raises(CheckpointError, match=r"consolidated\.01\.pth changed while it was read"):
            source.read("model.layers.0.mlp.up_proj.weight")


def hf_config(**changes) -> dict:
    config = {
        "model_type": "llama", "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 96,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-5,
    }  # fmt: skip
    return config | changes


BAD_WRITES = {
    "bias": ({"attention_bias": True}, {}, CheckpointError, "does not compute attention_bias"),
    "activation": ({"hidden_act": "gelu"}, {}, CheckpointError, "does not compute hidden_act"),
    "head_dim": ({"head_dim": 16}, {}, CheckpointError, "does not compute head_dim"),
    "rope": ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, {}, CheckpointError, "compute rope_scaling"),
    "architecture": ({"model_type": "qwen2"}, {}, ConfigError, "qwen2"),
    "sizes": ({"intermediate_size": 100}, {}, CheckpointError, "another model's"),
    "layers": ({"num_hidden_layers": 3}, {}, CheckpointError, "missing"),
    "shards": ({}, {"shards": 4}, InputError, "must divide"),
    "no shards": ({}, {"shards": 0}, InputError, "expected 1 to 99"),
    "tie": ({"tie_word_embeddings": True}, {}, CheckpointError, r"unknown \(1\): lm_head\.weight"),
}


@pytest.mark.parametrize("case", BAD_WRITES)
def test_what_cannot_be_written_leaves_nothing(good, tmp_path, case):
    changes, options, error, words = BAD_WRITES[case]
    with opened(damage(good)) as source, pytest.raises(error, match=words):
        write_meta(source, hf_config(**changes), tmp_path / "out", **options)
    assert not list(tmp_path.iterdir())
