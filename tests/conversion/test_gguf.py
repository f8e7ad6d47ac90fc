"""GGUF files, read back by the gguf package: every tensor, key and token by formulas of this file, and what is refused.

Where xllamacpp, a build of llama.cpp, is installed, llama.cpp itself is asked for its logits and ids.
"""

import itertools
import json
import math
import os
import re
import shutil
import struct
import subprocess
import sys
import warnings
import weakref
from pathlib import Path
from types import SimpleNamespace

import gguf
import numpy as np
import pytest
import sentencepiece
import tokenizers
import torch
from safetensors.torch import load_file, save_file

from ligermodels import cli
from ligermodels.arch import ARCHS
from ligermodels.checkpoint.reading import read_json
from ligermodels.checkpoint.weights import same_bits
from ligermodels.conversion import MismatchError, Options, convert, gguf_tokenizer
from ligermodels.conversion import gguf as gguf_layout
from ligermodels.conversion.gguf import GgufTarget
from ligermodels.conversion.view import View
from ligermodels.errors import CheckpointError, ConfigError, HubError, InputError, TokenizerError
from ligermodels.layers import RotaryEmbedding
from ligermodels.text import Tokenizer
from tests.conversion.layouts import write_native
from tests.text import families, folders

SIZES = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "pad_token_id": None,
}  # fmt: skip
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3["original_max_position_embeddings"] = 8192
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 16.0}
LONGROPE = {"type": "longrope", "short_factor": [1.0, 1.5, 2.0], "long_factor": [2.0, 3.0, 4.0]}
GEMMA = {"head_dim": 8, "tie_word_embeddings": True}
MODELS = {
    "llama": ("llama", {"rope_theta": 500000.0, "rope_scaling": LLAMA3}),
    "llama, tied": ("llama", {"tie_word_embeddings": True, "rope_scaling": {"rope_type": "linear", "factor": 2.0}}),
    "llama, biases": ("llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 16}),
    "mistral": ("mistral", {"head_dim": 16, "sliding_window": None}),
    "mixtral": ("mixtral", {"num_local_experts": 3, "head_dim": 8}),
    "gemma": ("gemma", GEMMA),
    "gemma2": ("gemma2", {**GEMMA, "sliding_window": 8, "query_pre_attn_scalar": 8}),
    "qwen2": ("qwen2", {"rope_scaling": YARN}),
    "phi3": ("phi3", {"sliding_window": 300}),
    "phi3, long": (
        "phi3",
        {"partial_rotary_factor": 0.75, "original_max_position_embeddings": 64, "rope_scaling": LONGROPE},
    ),
}
TEXTS = (*folders.TEXTS, "the the", "the  the", "a\n\n\nb", "314 it's I'LL", "</s>the")


# Tokenizers, small ones of every kind. Built once.

SPECIALS = ("<|begin|>", "<|end|>", "<|eot|>")


def byte_level(folder: Path, split: str = families.LLAMA_3_SPLIT, **options) -> Path:
    """In the manner of Llama 3 and Qwen, with the special ids behind 420 tokens and one token that is not special."""
    special = {420 + at: folders.added(name) for at, name in enumerate(SPECIALS)}
    special[423] = folders.added("<tool call>", special=False)
    state = families._byte_level(split, special, bos="<|begin|>", **options)
    folders.write(folder, "tokenizer.json", state)
    config = {"bos_token": "<|begin|>", "eos_token": "<|end|>", "chat_template": CHAT}
    folders.write(folder, "tokenizer_config.json", config)
    return folder


CHAT = "{% for m in messages %}<|begin|>{{ m.content }}<|eot|>{% endfor %}"
KINDS = {
    "llama 2": families.FAMILIES["llama 2"].build,
    "llama 3": lambda folder: byte_level(folder, ignore_merges=True),
    "mistral 0.3": families.FAMILIES["mistral 0.3"].build,
    "mixtral": families.FAMILIES["mixtral"].build,
    "nemo": families.FAMILIES["nemo"].build,
    "gemma 1": families.FAMILIES["gemma 1"].build,
    "gemma 2": families.FAMILIES["gemma 2"].build,
    "qwen 2": lambda folder: byte_level(folder, families.QWEN_SPLIT),
    "phi 4": lambda folder: byte_level(folder, behavior="removed"),
    "phi 4 mini": lambda folder: byte_level(folder, families.O200K_SPLIT),
}
OF_FAMILY = {"llama": "llama 3", "mistral": "mistral 0.3", "gemma": "gemma 1", "gemma2": "gemma 2", "qwen2": "qwen 2"}
OF_FAMILY |= {"mixtral": "mixtral", "phi3": "llama 2"}


@pytest.fixture(scope="session")
def tokenizer_of(tmp_path_factory):
    """name of a kind -> its folder."""
    built = {}

    def build(kind: str) -> Path:
        if kind not in built:
            built[kind] = KINDS[kind](tmp_path_factory.mktemp("tokenizer") / "folder")
        return built[kind]

    return build


def with_tokenizer(folder: Path, tokenizer: Path, without: tuple[str, ...] = ()) -> None:
    for path in tokenizer.iterdir():
        if path.name not in ("config.json", "generation_config.json", *without):
            shutil.copy(path, folder / path.name)


@pytest.fixture(scope="session")
def model_of(tmp_path_factory, tokenizer_of):
    """(name of a model, dtype) -> a folder that transformers wrote, with a vocabulary of eight rows too many."""
    transformers = pytest.importorskip("transformers")
    built = {}

    def build(name: str, dtype: torch.dtype = torch.bfloat16) -> Path:
        if (name, dtype) not in built:
            family, fields = MODELS[name]
            tokenizer = tokenizer_of(OF_FAMILY[family])
            rows = Tokenizer.from_folder(tokenizer).vocab_size + 8
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                config = transformers.AutoConfig.for_model(family, **SIZES, vocab_size=rows, **fields)
                torch.manual_seed(0)
                model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.copy_(torch.randn_like(parameter) * (0.2 if parameter.dim() > 1 else 0.5))
            folder = tmp_path_factory.mktemp("model") / "tiny"
            model.save_pretrained(folder)
            with_tokenizer(folder, tokenizer)
            built[name, dtype] = folder
        return built[name, dtype]

    return build


def to_gguf(source: Path, target: Path, **options):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*window.*")
        return convert(source, target, Options(to="gguf", progress=False, **options))


def tensors_of(path: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a file, as the gguf package reads it."""
    types = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
    found = {}
    for tensor in gguf.GGUFReader(path).tensors:
        data = torch.from_numpy(np.array(tensor.data).reshape(-1).view(np.uint8))
        found[tensor.name] = data.view(types[tensor.tensor_type.name]).reshape(tensor.shape.tolist()[::-1])
    return found


def fields_of(path: Path) -> dict:
    fields = gguf.GGUFReader(path).fields
    return {name: field.contents() for name, field in fields.items() if not name.startswith("GGUF.")}


# Tensors

NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output", "model.layers": "blk",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.qkv_proj": "attn_qkv", "mlp.gate_proj": "ffn_gate",
    "mlp.gate_up_proj": "ffn_up", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    "block_sparse_moe.gate": "ffn_gate_inp", "input_layernorm": "attn_norm", "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}  # fmt: skip
EXPERTS = {"w1": "ffn_gate_exps", "w2": "ffn_down_exps", "w3": "ffn_up_exps"}


def swapped(x: torch.Tensor, heads: int) -> torch.Tensor:
    """Row 2 j + s of a head is row j + s D / 2 of the source's head, one by one."""
    size = len(x) // heads
    rows = [h * size + j + s * size // 2 for h in range(heads) for j in range(size // 2) for s in (0, 1)]
    return x[rows]


def expected(folder: Path, family: str, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    config, source = read_json(folder / "config.json"), {}
    for path in folder.glob("*.safetensors"):
        source |= load_file(path)
    found, experts = {}, {}
    for name, x in source.items():
        if match := re.fullmatch(r"model\.layers\.(\d+)\.block_sparse_moe\.experts\.(\d+)\.(w\d)\.weight", name):
            experts.setdefault(f"blk.{match[1]}.{EXPERTS[match[3]]}.weight", {})[int(match[2])] = x.to(dtype)
            continue
        after = "post_attention_norm" if family == "gemma2" else "ffn_norm"
        ours = name.replace("post_attention_layernorm", after)
        for theirs, its in NAMES.items():
            ours = re.sub(rf"\b{re.escape(theirs)}\b", its, ours)
        if family.startswith("gemma") and name.endswith("norm.weight"):
            x = x.float() + 1
        if family in ("llama", "mistral", "mixtral") and ("q_proj" in name or "k_proj" in name):
            x = swapped(x, config["num_attention_heads" if "q_proj" in name else "num_key_value_heads"])
        found[ours] = x.float() if x.dim() == 1 or "gate_inp" in ours else x.to(dtype)
    return found | {name: torch.stack([parts[e] for e in sorted(parts)]) for name, parts in experts.items()}


@pytest.mark.parametrize("name, dtype", [*((name, "keep") for name in MODELS), ("llama", "fp32"), ("mixtral", "fp16")])
def test_every_tensor(tmp_path, model_of, name, dtype):
    folder, family = model_of(name), MODELS[name][0]
    report = to_gguf(folder, tmp_path / "out.gguf", dtype=dtype, verify="bytes")
    assert report.details["verified"] == "bytes" and report.ok
    found = tensors_of(tmp_path / "out.gguf")
    made = {"keep": torch.bfloat16, "fp32": torch.float32, "fp16": torch.float16}[dtype]
    wanted = expected(folder, family, made)
    if name == "llama":
        rope = LLAMA3 | {"theta": 500000.0}
        wanted["rope_freqs.weight"] = torch.tensor([divisor(rope, i, 8) for i in range(4)])
        torch.testing.assert_close(found.pop("rope_freqs.weight"), wanted.pop("rope_freqs.weight"))
    if name == "phi3, long":
        for length in ("long", "short"):
            wanted[f"rope_factors_{length}.weight"] = torch.tensor(LONGROPE[f"{length}_factor"])
    assert found.keys() == wanted.keys() and report.tensors == len(wanted) + (name == "llama")
    assert ("output.weight" in found) is (
        name in ("llama", "llama, biases", "mistral", "mixtral", "qwen2", "phi3", "phi3, long")
    )
    for tensor in wanted:
        assert same_bits(found[tensor], wanted[tensor]), tensor
    file_type = {"keep": 32, "fp32": 0, "fp16": 1}[dtype]
    assert fields_of(tmp_path / "out.gguf")["general.file_type"] == file_type


def divisor(rope: dict, i: int, dim: int) -> float:
    """Llama 3.1's rule in its own words: by the wavelength of frequency i."""
    original, low, high = (
        rope[key] for key in ("original_max_position_embeddings", "low_freq_factor", "high_freq_factor")
    )
    wavelength = 2 * math.pi * rope["theta"] ** (2 * i / dim)
    if wavelength < original / high:
        return 1.0
    if wavelength > original / low:
        return rope["factor"]
    smooth = (original / wavelength - low) / (high - low)
    return 1 / ((1 - smooth) / rope["factor"] + smooth)


@pytest.mark.parametrize("name", ["llama", "mixtral", "qwen2"])
def test_rows_turn_as_llama_cpp_turns_them(tmp_path, model_of, name):
    """Scores of q and k from the file, neighbours or halves turned as its architecture does, are the source's.

    The control: turned the other way, or with the source's own rows under neighbours, they are not.
    """
    folder = model_of(name, torch.float32)
    to_gguf(folder, tmp_path / "out.gguf")
    found, source = tensors_of(tmp_path / "out.gguf"), load_file(folder / "model.safetensors")
    fields = fields_of(tmp_path / "out.gguf")
    arch = fields["general.architecture"]
    size, theta = fields[f"{arch}.attention.key_length"], fields[f"{arch}.rope.freq_base"]
    torch.manual_seed(1)
    x = torch.randn(5, 32).double()
    angles = torch.arange(5).double()[:, None] * theta ** -(torch.arange(0, size, 2).double() / size)

    def turned(rows: torch.Tensor, neighbours: bool) -> torch.Tensor:
        h = (x @ rows.double().T).unflatten(-1, (-1, size)).transpose(0, 1)
        a, b = (h[..., 0::2], h[..., 1::2]) if neighbours else h.chunk(2, -1)
        c, s = angles.cos(), angles.sin()
        return torch.cat([a * c - b * s, a * s + b * c], -1)

    def scores(q: torch.Tensor, k: torch.Tensor, neighbours: bool) -> torch.Tensor:
        q, k = turned(q, neighbours), turned(k, neighbours)
        return q @ k.repeat_interleave(len(q) // len(k), 0).transpose(1, 2)

    own = [source[f"model.layers.0.self_attn.{x}_proj.weight"] for x in "qk"]
    written = [found[f"blk.0.attn_{x}.weight"] for x in "qk"]
    right = scores(*own, neighbours=False)
    torch.testing.assert_close(scores(*written, neighbours=arch == "llama"), right)
    for wrong in (scores(*written, neighbours=arch != "llama"), scores(*own, neighbours=True)):
        assert (wrong - right).abs().max() > 0.1 * right.abs().max()


# Metadata


def wanted_fields(name: str, rows: int) -> dict:
    family, fields = MODELS[name]
    arch = {"mistral": "llama", "mixtral": "llama"}.get(family, family)
    size = fields.get("head_dim") or 8
    own = {
        "vocab_size": rows, "context_length": 256, "embedding_length": 32, "block_count": 2, "feed_forward_length": 48,
        "attention.head_count": 4, "attention.head_count_kv": 2, "attention.key_length": size,
        "attention.value_length": size, "rope.dimension_count": 6 if name == "phi3, long" else size,
    }  # fmt: skip
    own["rope.freq_base"] = 500000.0 if name == "llama" else 1000000.0 if family == "mixtral" else 10000.0
    own["attention.layer_norm_rms_epsilon"] = {"mixtral": 1e-5, "phi3": 1e-5}.get(family, 1e-6)
    own |= {
        "llama, tied": {"rope.scaling.type": "linear", "rope.scaling.factor": 2.0},
        "mixtral": {"expert_count": 3, "expert_used_count": 2},
        "gemma2": {
            "attention.sliding_window": 8, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0,
        },
        "qwen2": {
            "rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 64,
            "rope.scaling.yarn_beta_fast": 16.0, "rope.scaling.yarn_beta_slow": 1.0,
        },
        "phi3": {"attention.sliding_window": 300, "rope.scaling.original_context_length": 4096},
        "phi3, long": {
            "attention.sliding_window": 0, "rope.scaling.original_context_length": 64,
            "rope.scaling.attn_factor": math.sqrt(1 + math.log(4) / math.log(64)),
        },
    }.get(name, {})  # fmt: skip
    return {f"{arch}.{key}": value for key, value in own.items()} | {
        "general.architecture": arch, "general.type": "model", "general.name": "tiny", "general.file_type": 32,
        "general.quantization_version": 2,
    }  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_every_key(tmp_path, model_of, name):
    to_gguf(model_of(name), tmp_path / "out.gguf", verify="keys")
    found = {k: v for k, v in fields_of(tmp_path / "out.gguf").items() if not k.startswith("tokenizer.")}
    wanted = wanted_fields(name, read_json(model_of(name) / "config.json")["vocab_size"])
    assert found == {k: pytest.approx(v, rel=1e-6) if isinstance(v, float) else v for k, v in wanted.items()}


# Tokenizers

TYPES = {"normal": 1, "unknown": 2, "control": 3, "user defined": 4, "unused": 5, "byte": 6}


@pytest.fixture
def words(tmp_path, tokenizer_of):
    """(kind, files to leave out) -> (the tokenizer, the keys of a file with it)."""

    def write(kind: str, without: tuple[str, ...] = (), change=None):
        folder = tmp_path / "source"
        rows = Tokenizer.from_folder(tokenizer_of(kind)).vocab_size + 8
        config = {"model_type": "llama", **SIZES, "num_hidden_layers": 1, "vocab_size": rows}
        ARCHS["llama"].from_config(config, device="cpu", seed=1).save_pretrained(folder)
        with_tokenizer(folder, tokenizer_of(kind), without)
        if change:
            change(folder)
        to_gguf(folder, tmp_path / "out.gguf")
        return Tokenizer.from_folder(folder), fields_of(tmp_path / "out.gguf")

    return write


@pytest.mark.parametrize("kind", ["llama 2", "mistral 0.3", "gemma 2"])
@pytest.mark.parametrize("without", [(), ("tokenizer.json",), ("tokenizer.model",)], ids=["both", "model", "json"])
def test_sentencepiece(words, tokenizer_of, kind, without):
    tokenizer, fields = words(kind, without)
    native = sentencepiece.SentencePieceProcessor(str(tokenizer_of(kind) / "tokenizer.model"))
    tokens, types, scores = (fields[f"tokenizer.ggml.{key}"] for key in ("tokens", "token_type", "scores"))
    assert len(tokens) == len(types) == len(scores) == tokenizer.vocab_size + 8 == len(set(tokens))
    assert tokens[-8:] == [f"[PAD{len(tokens) - 8 + i}]" for i in range(8)] and types[-8:] == [TYPES["unused"]] * 8
    assert (fields["tokenizer.ggml.model"], fields["tokenizer.ggml.pre"]) == ("llama", "default")
    for index in range(native.get_piece_size()):
        text = tokenizer.backend.id_to_token(index)
        if native.is_unknown(index):
            kinds = {"unknown"}
        elif native.is_byte(index):
            kinds = {"byte"}
        elif native.is_control(index) or index in tokenizer.backend.special_ids:
            kinds = {"control"}
        else:
            kinds = {"normal", "user defined"}
        assert types[index] in {TYPES[kind] for kind in kinds}, text
        own = text.replace("▁", " ") if types[index] == TYPES["user defined"] else text
        assert tokens[index] == own
        if types[index] == TYPES["normal"] and not without:
            assert scores[index] == native.get_score(index)
    gemma = kind.startswith("gemma")
    assert fields["tokenizer.ggml.add_space_prefix"] is not gemma
    assert fields["tokenizer.ggml.add_bos_token"] is True and fields["tokenizer.ggml.add_eos_token"] is False
    ids = {key: fields.get(f"tokenizer.ggml.{key}_token_id") for key in ("bos", "eos", "unknown", "padding", "eot")}
    assert ids == {
        "bos": native.bos_id(), "eos": native.eos_id(), "unknown": native.unk_id(), "padding": 0 if gemma else None,
        "eot": 107 if gemma else None,
    }  # fmt: skip
    assert fields["tokenizer.chat_template"] == tokenizer.files.templates["default"]


def merged(fields: dict, text: str) -> list[int]:
    """The ids that llama.cpp finds by tokens, scores and types: special ones are cut out, then pairs are merged, the
    one with the best score first and the leftmost of equals; what is no token becomes bytes."""
    tokens, types, scores = (fields[f"tokenizer.ggml.{key}"] for key in ("tokens", "token_type", "scores"))
    table = {token: index for index, token in enumerate(tokens)}
    cut = [t for t, kind in zip(tokens, types, strict=True) if kind in (2, 3, 4)]
    pattern = "|".join(map(re.escape, sorted(cut, key=len, reverse=True)))
    ids = [fields["tokenizer.ggml.bos_token_id"]] if fields["tokenizer.ggml.add_bos_token"] else []
    after_special = True
    for part in re.split(f"({pattern})", text):
        if part in cut:
            ids.append(table[part])
            after_special = True
            continue
        if not part:
            continue
        prefix = " " if after_special and fields["tokenizer.ggml.add_space_prefix"] else ""
        symbols, after_special = list((prefix + part).replace(" ", "▁")), False
        while True:
            pairs = [
                (scores[table[a + b]], -i) for i, (a, b) in enumerate(itertools.pairwise(symbols)) if a + b in table
            ]
            if not pairs:
                break
            at = -max(pairs)[1]
            symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]
        for symbol in symbols:
            ids += [table[symbol]] if symbol in table else [table[f"<0x{byte:02X}>"] for byte in symbol.encode()]
    return ids


@pytest.mark.parametrize("kind", ["llama 2", "gemma 2"])
@pytest.mark.parametrize("without", [(), ("tokenizer.model",)], ids=["scores of the model", "scores from merges"])
def test_texts_are_cut_alike(words, kind, without):
    tokenizer, fields = words(kind, without)
    for text in TEXTS:
        assert merged(fields, text) == tokenizer.encode(text), text
    scores = fields["tokenizer.ggml.scores"]
    fields["tokenizer.ggml.scores"] = [-score for score in scores]
    assert any(merged(fields, text) != tokenizer.encode(text) for text in TEXTS)


@pytest.mark.parametrize(
    "kind, pre",
    [("llama 3", "llama-bpe"), ("nemo", "tekken"), ("qwen 2", "qwen2"), ("phi 4", "dbrx"), ("phi 4 mini", "gpt-4o")],
)  # fmt: skip
def test_byte_level(words, tokenizer_of, kind, pre):
    _, fields = words(kind)
    native = tokenizers.Tokenizer.from_file(str(tokenizer_of(kind) / "tokenizer.json"))
    model = json.loads((tokenizer_of(kind) / "tokenizer.json").read_text())["model"]
    tokens, types = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    assert (fields["tokenizer.ggml.model"], fields["tokenizer.ggml.pre"]) == ("gpt2", pre)
    assert tokens[:-8] == [native.id_to_token(index) for index in range(native.get_vocab_size())]
    added = native.get_added_tokens_decoder()
    for index, kind_of in enumerate(types[:-8]):
        wanted = ("control" if added[index].special else "user defined") if index in added else "normal"
        assert kind_of == TYPES[wanted], tokens[index]
    assert types[-8:] == [TYPES["unused"]] * 8
    assert fields["tokenizer.ggml.merges"] == [" ".join(pair) for pair in model["merges"]]
    assert "tokenizer.ggml.scores" not in fields and "tokenizer.ggml.add_space_prefix" not in fields
    ids = (fields["tokenizer.ggml.bos_token_id"], fields["tokenizer.ggml.eos_token_id"])
    assert ids == ((1, 2) if kind == "nemo" else (420, 421))
    assert fields.get("tokenizer.ggml.eot_token_id") == (None if kind == "nemo" else 422)
    assert fields["tokenizer.ggml.add_bos_token"] is True and fields["tokenizer.ggml.add_eos_token"] is False


def split_by(pattern: dict | None):
    def change(folder: Path) -> None:
        state = read_json(folder / "tokenizer.json")
        byte = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
        state["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [pattern, byte]} if pattern else byte
        state["model"]["ignore_merges"] = False
        (folder / "tokenizer.json").write_text(json.dumps(state))

    return change


@pytest.mark.parametrize(
    "pattern, pre",
    [(None, "gpt-2"), ({"type": "Digits", "individual_digits": True}, "smollm")],
    ids=["words", "digits"],
)
def test_older_ways_to_cut(words, pattern, pre):
    assert words("llama 3", change=split_by(pattern))[1]["tokenizer.ggml.pre"] == pre


@pytest.mark.parametrize("name, wanted", [("My-Phi3", "My-phi"), ("tuned", "tuned")])
def test_names_that_llama_cpp_reads_more_into(tmp_path, model_of, name, wanted):
    """With "phi-3" in its name, a model has Phi-3's tokens there, or ends."""
    shutil.copytree(model_of("phi3"), tmp_path / name)
    to_gguf(tmp_path / name, tmp_path / "out.gguf")
    assert fields_of(tmp_path / "out.gguf")["general.name"] == wanted
    assert gguf_layout._named(os.fsdecode(b"a\xff"), strips=False) == "a?"


@pytest.mark.slow  # a vocabulary of 32064
def test_phi_3_is_named(tmp_path):
    """Its special tokens take the white space behind them, which llama.cpp knows by the name alone."""
    tokenizer = families.FAMILIES["phi 3"].build(tmp_path / "tokenizer")
    config = {"model_type": "phi3", **SIZES, "num_hidden_layers": 1, "vocab_size": 32064}
    ARCHS["phi3"].from_config(config, device="cpu", seed=1).save_pretrained(tmp_path / "tuned")
    with_tokenizer(tmp_path / "tuned", tokenizer)
    to_gguf(tmp_path / "tuned", tmp_path / "out.gguf")
    fields = fields_of(tmp_path / "out.gguf")
    assert fields["general.name"] == "tuned (Phi-3)" and fields["tokenizer.ggml.add_bos_token"] is False
    assert [fields[f"tokenizer.ggml.{key}_token_id"] for key in ("bos", "eos", "unknown", "padding")] == [
        1,
        32000,
        0,
        32000,
    ]
    types = fields["tokenizer.ggml.token_type"]
    assert [types[index] for index in (0, 1, 2, 3, 32000, 32010, 32063)] == [2, 3, 3, 6, 3, 3, 5]


def test_templates_and_tokens_without_a_row(tmp_path, tokenizer_of):
    rows = Tokenizer.from_folder(tokenizer_of("llama 3")).vocab_size - 1
    config = {"model_type": "llama", **SIZES, "num_hidden_layers": 1, "vocab_size": rows}
    ARCHS["llama"].from_config(config, device="cpu", seed=1).save_pretrained(tmp_path / "source")
    with_tokenizer(tmp_path / "source", tokenizer_of("llama 3"))
    (tmp_path / "source" / "additional_chat_templates").mkdir()
    (tmp_path / "source" / "chat_template.jinja").write_text(CHAT)
    (tmp_path / "source" / "additional_chat_templates" / "tool_use.jinja").write_text("{{ 1 }}")
    with pytest.warns(UserWarning, match="from id 423 on.*no rows"):
        convert(tmp_path / "source", tmp_path / "out.gguf", Options(to="gguf", progress=False))
    fields = fields_of(tmp_path / "out.gguf")
    assert len(fields["tokenizer.ggml.tokens"]) == rows and fields["tokenizer.chat_template"] == CHAT
    assert fields["tokenizer.chat_templates"] == ["tool_use"]
    assert fields["tokenizer.chat_template.tool_use"] == "{{ 1 }}"


# The pipeline


@pytest.mark.parametrize("layout", ["native", "dcp"])
def test_from_every_layout(tmp_path, model_of, layout):
    """The same file to the byte."""
    source = model_of("llama")
    folder = tmp_path / layout / "tiny"
    if layout == "native":
        write_native(folder, source)
    else:
        convert(source, folder, Options(to=layout, progress=False))
    to_gguf(source, tmp_path / "a.gguf")
    to_gguf(folder, tmp_path / "b.gguf")
    assert (tmp_path / "a.gguf").read_bytes() == (tmp_path / "b.gguf").read_bytes()


def test_the_command(tmp_path, model_of, capsys):
    command = ["convert", str(model_of("llama")), str(tmp_path / "new" / "out.gguf"), "--to", "gguf", "--json"]
    assert cli.main([*command, "--dry-run"]) == 0 and not (tmp_path / "new").exists()
    planned = json.loads(capsys.readouterr().out)
    assert cli.main([*command, "--verify", "bytes"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] and (report["tensors"], report["bytes"]) == (planned["tensors"], planned["bytes"])
    assert left(tmp_path / "new") == ["out.gguf"]
    assert cli.main(command) == 2 and "--overwrite" in capsys.readouterr().err
    assert cli.main([*command, "--overwrite", "--dtype", "fp16"]) == 0
    assert fields_of(tmp_path / "new" / "out.gguf")["general.file_type"] == 1


def old_file(tmp_path: Path) -> Path:
    (tmp_path / "out.gguf").write_bytes(b"old")
    return tmp_path / "out.gguf"


def left(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in tmp_path.iterdir())


@pytest.mark.parametrize("where, level", [("a tensor", "bytes"), ("a key", "keys")])
def test_a_file_that_is_not_what_was_to_be_written(tmp_path, model_of, monkeypatch, where, level):
    write = GgufTarget.write

    def one_bit_wrong(self, folder):
        write(self, folder)
        content = bytearray((folder / "model.gguf").read_bytes())
        at = content.index(b"llama.context_length") + 24 if where == "a key" else len(content) - 100
        content[at] ^= 1
        (folder / "model.gguf").write_bytes(content)

    monkeypatch.setattr(GgufTarget, "write", one_bit_wrong)
    target = old_file(tmp_path)
    with pytest.raises(MismatchError, match="values differ" if where == "a tensor" else "context_length"):
        to_gguf(model_of("llama"), target, overwrite=True, verify=level)
    assert target.read_bytes() == b"old" and left(tmp_path) == ["out.gguf"]


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError(28, "full")])
def test_an_interruption_leaves_the_old_file(tmp_path, model_of, monkeypatch, error):
    read, count = View.read, iter(range(1000))

    def stop(self, name):
        if next(count) == 9:
            raise error
        return read(self, name)

    monkeypatch.setattr(View, "read", stop)
    target = old_file(tmp_path)
    with pytest.raises((KeyboardInterrupt, HubError)):
        to_gguf(model_of("llama"), target, overwrite=True)
    assert target.read_bytes() == b"old" and left(tmp_path) == ["out.gguf"]


def test_one_tensor_is_in_memory(tmp_path, model_of, monkeypatch):
    alive, read = [], GgufTarget._read

    def watched(target, name):
        assert not [name for name, tensor in alive if tensor() is not None], f"still there at {name}"
        tensor = read(target, name)
        alive.append((name, weakref.ref(tensor)))
        return tensor

    monkeypatch.setattr(GgufTarget, "_read", watched)
    to_gguf(model_of("mixtral"), tmp_path / "out.gguf", dtype="fp32", verify="bytes")
    assert len(alive) > 40  # once to write, once to compare


# What is refused

ROPE = {"factor": 2.0, "original_max_position_embeddings": 64}
REFUSED = {
    "another activation": ("llama", {"hidden_act": "gelu"}, "hidden_act gelu"),
    "gelu in Qwen": ("qwen2", {"hidden_act": "gelu_pytorch_tanh"}, "hidden_act"),
    "exact gelu": ("gemma2", {"hidden_activation": "gelu", **GEMMA, "query_pre_attn_scalar": 8}, "hidden_act gelu"),
    "a head of Gemma's own": ("gemma", {"tie_word_embeddings": False, "head_dim": 8}, "a head of its own"),
    "biases in Gemma": ("gemma", {**GEMMA, "attention_bias": True}, "attention_bias"),
    "another scale": ("gemma2", {**GEMMA, "query_pre_attn_scalar": 144}, "query_pre_attn_scalar 144"),
    "no cap": ("gemma2", {**GEMMA, "query_pre_attn_scalar": 8, "attn_logit_softcapping": None}, "softcapping null"),
    "no last cap": ("gemma2", {**GEMMA, "query_pre_attn_scalar": 8, "final_logit_softcapping": None}, "final.* null"),
    "another order": (
        "gemma2",
        {**GEMMA, "query_pre_attn_scalar": 8, "layer_types": ["full_attention", "sliding_attention"]},
        "layer_types",
    ),
    "a head size in Phi-3": ("phi3", {"head_dim": 16}, "head_dim 16"),
    "dynamic": ("llama", {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type dynamic"),
    "llama3 in Qwen": ("qwen2", {"rope_scaling": LLAMA3}, "rope_type llama3"),
    "longrope in Llama": (
        "llama",
        {"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4, **ROPE}},
        "rope_type longrope",
    ),
    "a factor of YaRN's": ("llama", {"rope_scaling": {**YARN, "attention_factor": 1.5}}, "attention_factor 1.5"),
    "a ramp of YaRN's": ("qwen2", {"rope_scaling": {**YARN, "truncate": False}}, "truncate false"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_llama_cpp_does_not_compute(tmp_path, tokenizer_of, case):
    family, fields, message = REFUSED[case]
    config = {"model_type": family, **SIZES, "vocab_size": 440, **fields}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ARCHS[family].from_config(config, device="cpu", seed=1).save_pretrained(tmp_path / "source")
        with_tokenizer(tmp_path / "source", tokenizer_of("llama 3"))
        with pytest.raises(ConfigError, match=f"llama.cpp does not compute .*{message}"):
            to_gguf(tmp_path / "source", tmp_path / "out.gguf", dry_run=True)


def test_a_family_without_a_name_there(tmp_path, model_of, monkeypatch):
    monkeypatch.delitem(gguf_layout.FAMILIES, "llama")
    with pytest.raises(ConfigError, match=r"is a llama, and GGUF files are written for mistral, .* alone"):
        to_gguf(model_of("llama"), tmp_path / "out.gguf")


FIXTURES = sorted((Path(__file__).parents[1] / "fixtures" / "configs").glob("*.json"))


@pytest.mark.parametrize("path", FIXTURES, ids=lambda path: path.stem)
def test_every_released_model_is_computed(path):
    """With the one exception of windows, which Mistral 0.1 and Phi-3 have."""
    state = read_json(path)
    if state["model_type"] not in gguf_layout.FAMILIES:
        pytest.skip("another family")
    config = ARCHS[state["model_type"]].config_class.from_hf(state)
    rope = config.rope_parameters
    rotary = RotaryEmbedding(
        config.head_dim, theta=rope["rope_theta"], scaling=rope,
        max_position_embeddings=config.max_position_embeddings,
        partial_rotary_factor=rope.get("partial_rotary_factor", 1.0),
    )  # fmt: skip
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        gguf_layout.check(SimpleNamespace(config=config, decoder=SimpleNamespace(rotary_emb=rotary)), path.stem)
    windows = ("Mistral-7B-v0.1", "Phi-3-mini-4k-instruct", "Phi-3-medium-4k-instruct")
    assert len(told) == (path.stem in windows)


def test_a_window_that_is_left_out_is_named(tmp_path, tokenizer_of):
    config = {"model_type": "mistral", **SIZES, "vocab_size": 440, "sliding_window": 64}
    ARCHS["mistral"].from_config(config, device="cpu", seed=1).save_pretrained(tmp_path / "source")
    with_tokenizer(tmp_path / "source", tokenizer_of("llama 3"))
    with pytest.warns(UserWarning, match="leaves out the window of 64 tokens"):
        convert(tmp_path / "source", tmp_path / "out.gguf", Options(to="gguf", progress=False))
    assert fields_of(tmp_path / "out.gguf")["llama.attention.sliding_window"] == 64


def edited(change):
    def apply(folder: Path) -> None:
        state = read_json(folder / "tokenizer.json")
        change(state)
        (folder / "tokenizer.json").write_text(json.dumps(state))

    return apply


def no_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()


def tiktoken(folder: Path) -> None:
    no_tokenizer(folder)
    (folder / "original").mkdir()
    (folder / "original" / "tokenizer.model").write_bytes(b"IQ== 0\nIg== 1\n")


def unigram(folder: Path) -> None:
    for path in (*folder.glob("tokenizer*"), *folder.glob("special*")):
        path.unlink()
    folders.sentencepiece_folder(folder, folders.sentencepiece_model(model_type="unigram", vocab_size=400))


def a_merge_less(state: dict) -> None:
    """Two of the ways to make one token: without one of them, these are not sentencepiece's merges."""
    ways = {}
    for pair in state["model"]["merges"]:
        ways.setdefault("".join(pair), []).append(pair)
    state["model"]["merges"].remove(next(pairs for pairs in ways.values() if len(pairs) > 1)[1])


def word_level(state: dict) -> None:
    vocab = {token: index for index, token in enumerate(("a", "b", *SPECIALS, "<tool call>"))}
    state["model"] = {"type": "WordLevel", "vocab": vocab, "unk_token": "a"}
    for token in state["added_tokens"]:
        token["id"] = vocab[token["content"]]
    state["post_processor"] = None


BAD_WORDS = {
    "none": ("llama 3", no_tokenizer, CheckpointError, "no tokenizer.json and no tokenizer.model"),
    "tiktoken alone": ("llama 3", tiktoken, CheckpointError, "only a tiktoken file"),
    "unigram": ("llama 3", unigram, TokenizerError, "not of sentencepiece's BPE"),
    "another pattern": (
        "llama 3",
        edited(lambda s: s["pre_tokenizer"]["pretokenizers"][0].update(pattern={"Regex": r"\w+|\W+"})),
        TokenizerError,
        r"no name for how tokenizer.json splits texts: .*\\W",
    ),
    "another step": (
        "llama 3",
        edited(lambda s: s["pre_tokenizer"]["pretokenizers"].insert(0, {"type": "Whitespace"})),
        TokenizerError,
        "no name for how",
    ),
    "no bytes": ("llama 3", edited(lambda s: s.update(pre_tokenizer=None)), TokenizerError, "no name for how"),
    "words": ("llama 3", edited(word_level), TokenizerError, "of type 'WordLevel'"),
    "merges of another kind": (
        "llama 2", lambda f: ((f / "tokenizer.model").unlink(), edited(a_merge_less)(f)), TokenizerError, "merges are",
    ),
    "another normalizer": (
        "llama 3",
        edited(lambda s: s.update(normalizer={"type": "Sequence", "normalizers": [{"type": "Lowercase"}]})),
        TokenizerError,
        "the normalizer Lowercase",
    ),
    "a row twice": (
        "llama 3",
        edited(lambda s: s["added_tokens"].append({"id": 424, **folders.added("[PAD425]")})),
        TokenizerError,
        "424 and 425 are both",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_WORDS)
def test_tokenizers_that_llama_cpp_has_no_words_for(tmp_path, words, case):
    kind, change, error, message = BAD_WORDS[case]
    with pytest.raises(error, match=message) as caught:
        words(kind, change=change)
    assert str(tmp_path / "source") in str(caught.value) or "tokenizer." in str(caught.value)
    assert "/tmp/tmp" not in str(caught.value) and left(tmp_path) == ["source"]


def test_a_model_that_squeezes_spaces_is_named(words):
    def change(folder: Path) -> None:
        for path in (*folder.glob("tokenizer*"), *folder.glob("special*")):
            path.unlink()
        folders.sentencepiece_folder(folder, folders.sentencepiece_model(remove_extra_whitespaces=True))

    with pytest.warns(UserWarning, match="merges runs of spaces"):
        words("llama 3", change=change)


def test_all_types_and_scores_of_a_model_file():
    """Against a protobuf written here, field by field."""

    def piece(text: bytes, score: float, kind: int) -> bytes:
        body = b"\x0a" + bytes([len(text)]) + text + b"\x15" + struct.pack("<f", score) + b"\x18" + bytes([kind])
        return b"\x0a" + bytes([len(body)]) + body

    data = b"".join(piece(f"▁{kind}".encode(), -1.5 * kind, kind) for kind in range(1, 7)) + b"\x0a\x03\x0a\x01a"
    found = gguf_tokenizer._sentencepiece(data + b"\x12\x02\x18\x02" + b"\x1a\x02\x20\x00")
    assert [(p.text, p.score, p.type) for p in list(found.values())[:6]] == [
        (f"▁{k}", -1.5 * k, k) for k in range(1, 7)
    ]
    assert (found[6].text, found[6].score, found[6].type) == ("a", 0.0, 1)


@pytest.mark.parametrize(
    "options, words",
    [
        ({"verify": "logits"}, "run in llama.cpp"),
        ({"max_shard_size": "1GB"}, "not for gguf"),
        ({"ranks": 2}, "not for gguf"),
    ],
)
def test_options(tmp_path, model_of, options, words):
    with pytest.raises(InputError, match=words):
        to_gguf(model_of("llama"), tmp_path / "out.gguf", **options)


def test_a_folder_in_its_place(tmp_path, model_of):
    with pytest.raises(InputError, match=r"give its name, such as .*model\.gguf"):
        to_gguf(model_of("llama"), tmp_path)


def test_float64_is_not_kept(tmp_path, model_of):
    shutil.copytree(model_of("llama", torch.float32), tmp_path / "source")
    content = load_file(tmp_path / "source" / "model.safetensors")
    save_file({name: x.double() for name, x in content.items()}, tmp_path / "source" / "model.safetensors")
    with pytest.raises(InputError, match="--dtype fp32"):
        to_gguf(tmp_path / "source", tmp_path / "out.gguf")
    to_gguf(tmp_path / "source", tmp_path / "out.gguf", dtype="fp32")
    assert all(x.dtype == torch.float32 for x in tensors_of(tmp_path / "out.gguf").values())


def test_without_the_package(tmp_path, model_of, monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ConfigError, match=r"pip install 'ligermodels\[gguf\]'"):
        to_gguf(model_of("llama"), tmp_path / "out.gguf")


# llama.cpp itself

ASKED = """
import json, os, sys, urllib.request
from pathlib import Path
import torch
import xllamacpp
import ligermodels
from tests.conversion.test_gguf import TEXTS
folder, file, force = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
params = xllamacpp.CommonParams()
params.model.path, params.n_ctx, params.n_parallel, params.warmup, params.port = file, 256, 1, False, 0
params.use_jinja = params.fit_params = False
params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
server = xllamacpp.Server(params)
def ask(path, **body):
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(server.listening_address + path, json.dumps(body).encode(), headers)
    return json.load(urllib.request.urlopen(request, timeout=60))
model, worst = ligermodels.load(folder, dtype="float32").eval(), 0.0
for length in json.loads(sys.argv[4]):
    ids = (torch.arange(length) * 37 % 300 + 10).tolist()
    # A token is forced, since no probabilities are told of one that is half a character; they are those before that.
    answer = ask("/completion", prompt=ids, n_predict=1, n_probs=200, temperature=-1, logit_bias=[[force, 1000.0]])
    told = answer["completion_probabilities"][0]["top_logprobs"]
    with torch.no_grad():
        ours = model(torch.tensor([ids])).logits[0, -1].log_softmax(-1)
    worst = max(worst, *(abs(float(ours[token["id"]]) - token["logprob"]) for token in told))
words = ligermodels.Tokenizer.from_folder(folder)
cut = {text: ask("/tokenize", content=text, add_special=True, parse_special=True)["tokens"] for text in TEXTS}
print(json.dumps([worst, [text for text in TEXTS if cut[text] != words.encode(text)]]), flush=True)
os._exit(0)
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_what_llama_cpp_says(tmp_path, model_of, name):
    pytest.importorskip("xllamacpp")
    folder = model_of(name, torch.float32)
    to_gguf(folder, tmp_path / "out.gguf")
    force = Tokenizer.from_folder(folder).encode("the the", add_special_tokens=False)[-1]
    # The context of 256 is beyond the length up to which the short frequencies hold, whatever the text's own.
    lengths = [65, 100] if name == "phi3, long" else [1, 2, 7, 100]
    command = [sys.executable, "-c", ASKED, str(folder), str(tmp_path / "out.gguf"), str(force), str(lengths)]
    found = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=Path(__file__).parents[2])
    assert found.returncode == 0, found.stderr
    worst, odd = json.loads(found.stdout.splitlines()[-1])
    assert worst < (5e-3 if name.startswith("gemma") else 1e-4)  # GELU is a table of fp16 there
    # Its tokenizer.json has no dummy prefix before a text that begins with a space, nor behind a special token.
    assert odd == (["▁already▁there", "</s>the"] if name == "mistral" else []), odd
