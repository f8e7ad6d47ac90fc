"""GGUF, llama.cpp's one file of weights, configuration and tokenizer, read as a folder in Hugging Face's layout.

`folder_of` gives that folder: config.json and the tokenizer's files are made from the metadata, the weights are read
from the file, one tensor at a time. conversion/gguf.py writes such files and says how they differ from a checkpoint;
this is its inverse:
- "llama" holds Llama, Mistral and Mixtral: with experts it is a mixtral, with a window a mistral, else a llama, which
  computes the same as a Mistral without a window. Its rows of q and k are permuted back, so are their biases.
- 1 is subtracted from Gemma's norm weights. Stacked experts are one tensor each. No output.weight means a tied head.
- rope_freqs must be Llama 3's rule with its usual numbers; rope_factors_long and _short are LongRoPE's tables.
- Quantised tensors are dequantised by the gguf package, to fp32. The dtype of a checkpoint is that of its matrices;
  vectors and routers, which are fp32 in every file, are given in that dtype where it holds their values exactly.

Checked against: gguf 0.19 (constants.py, quants.py), convert_hf_to_gguf.py and src/llama-model.cpp of llama.cpp.
"""

import functools
import math
import mmap
import os
import re
import struct
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from ligermodels.checkpoint.gguf_tokenizer import token_ids, tokenizer_files
from ligermodels.checkpoint.reading import json_bytes, read_errors
from ligermodels.checkpoint.weights import TensorInfo, same_bits, to_halves
from ligermodels.errors import CheckpointError, ConfigError, HubError

MODEL = "model.gguf"
"""The link to the file in the folder of `folder_of`."""

FAMILIES = {
    "llama": ("llama", "silu"), "mistral": ("llama", "silu"), "mixtral": ("llama", "silu"),
    "gemma": ("gemma", "gelu_tanh"), "gemma2": ("gemma2", "gelu_tanh"), "qwen2": ("qwen2", "silu"),
    "qwen3": ("qwen3", "silu"), "phi3": ("phi3", "silu"),
}  # fmt: skip
"""model_type -> (llama.cpp's architecture, the activation that it computes)."""

FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
TYPES = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 10: "Q2_K", 11: "Q3_K", 12: "Q4_K",
    13: "Q5_K", 14: "Q6_K", 20: "IQ4_NL", 23: "IQ4_XS", 30: "BF16",
}  # fmt: skip
"""The number of a tensor's type -> its name."""

_TENSORS = {
    "token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head",
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_qkv": "self_attn.qkv_proj", "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm", "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "block_sparse_moe.gate", "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
    "ffn_down_exps": "block_sparse_moe.experts.{}.w2", "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
}  # fmt: skip
_OF_FAMILY = {
    "phi3": {"ffn_up": "mlp.gate_up_proj"},
    "gemma2": {
        "ffn_norm": "pre_feedforward_layernorm", "post_attention_norm": "post_attention_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    },
}  # fmt: skip
_TABLES = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
_UNUSED = ("vocab_size", "tensor_data_layout", "rope.scaling.finetuned", "attention.value_length")
_ARRAYS = {0: "u1", 1: "i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?", 10: "<u8", 11: "<i8", 12: "<f8"}
_STRING, _ARRAY, _FLOAT32 = 8, 9, 6
_SPLIT = "  Next: join its parts with llama.cpp: llama-gguf-split --merge FIRST_PART WHOLE.gguf"


def package() -> Any:
    """The `gguf` package. Raises ConfigError where it is missing."""
    try:
        import gguf
    except ImportError as error:
        raise ConfigError(
            "Quantised GGUF files are read, and all are written, by the gguf package, which is missing.\n"
            "  Next: pip install 'ligermodels[gguf]'"
        ) from error
    return gguf


def find(path: Path) -> Path | None:
    """`path` if it is a GGUF file, or the one that it holds if it is a folder without other weights; else None.

    Raises CheckpointError for a folder of several.
    """
    if path.is_file():
        return path if path.suffix == ".gguf" else None
    if not path.is_dir():
        return None
    with read_errors(path):
        names = sorted(os.listdir(path))
    files = [name for name in names if name.endswith(".gguf")]
    others = re.compile(r".*\.(safetensors|bin|pth)(\.index\.json)?|\.metadata")
    if not files or any(others.fullmatch(name) for name in names):
        return None
    if len(files) > 1:
        raise CheckpointError(
            f"{path} holds {len(files)} GGUF files: {', '.join(files[:4])}{', ...' * (len(files) > 4)}.\n"
            f"  Next: give one of them, such as {path / files[0]}"
        )
    return path / files[0]


def folder_of(path: Path) -> Path:
    """A folder in Hugging Face's layout for a GGUF file: config.json, the tokenizer's files and a link to the weights.

    It is temporary and made once in a process. Raises CheckpointError, ConfigError, HubError, TokenizerError.
    """
    with read_errors(path):
        path = path.resolve()
        stat = path.stat()
    return _folder_of(path, stat.st_mtime_ns, stat.st_size)


@functools.cache
def _folder_of(path: Path, mtime: int, size: int) -> Path:
    reader = GgufReader(path)
    root = tempfile.TemporaryDirectory(prefix="ligermodels-gguf-")
    _roots.append(root)
    folder = Path(root.name) / path.stem
    for name, content in reader.files().items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    (folder / MODEL).symlink_to(path)
    return folder


_roots: list[tempfile.TemporaryDirectory[str]] = []
"""The folders of `folder_of`, which are deleted when the process ends."""


class _Stored(NamedTuple):
    """A tensor of the file: its type and shape, and where its bytes begin."""

    type: str
    shape: tuple[int, ...]
    start: int

    def part(self, index: int, nbytes: int) -> Self:
        """Box `index` of a stacked tensor, each of `nbytes`."""
        return self._replace(shape=self.shape[1:], start=self.start + index * nbytes)


class GgufFile:
    """The header of a GGUF file: metadata {key: value}, and tensors {name: type, shape, place}; the rest is mapped.

    The gguf package's own reader takes seconds for a vocabulary of usual size.
    Raises CheckpointError for a file that is damaged, cut short, or has a type of tensor that is not read.
    """

    def __init__(self, path: Path):
        self.path, self._at = path, 8
        with read_errors(path), path.open("rb") as file:
            start = file.read(8)
            if start[:4] != b"GGUF":
                raise CheckpointError(f"{path} is not a GGUF file. Likely: a download that failed; fetch it again.")
            if start[4:] not in (b"\2\0\0\0", b"\3\0\0\0"):
                raise CheckpointError(f"{path} is a GGUF file of version {start[4:].hex()}; 2 and 3 are read")
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        try:
            count, keys = self._unpack("<QQ")
            self.metadata = {self._string(): self._value(*self._unpack("<I")) for _ in range(keys)}
            found = [self._tensor() for _ in range(count)]
        except (struct.error, ValueError, KeyError, OverflowError, MemoryError) as error:
            raise CheckpointError(f"{path}: its header is damaged or cut short; fetch it again. ({error})") from error
        if self.metadata.get("split.count", 0) > 1:
            raise CheckpointError(f"{path} is one of {self.metadata['split.count']} parts of a model.\n{_SPLIT}")
        alignment = self.metadata.get("general.alignment", 32)
        data = -(-self._at // alignment) * alignment
        self.tensors = {name: stored._replace(start=data + stored.start) for name, stored in found}
        end = max((stored.start + self.nbytes(stored) for stored in self.tensors.values()), default=0)
        if end > len(self._map):
            raise CheckpointError(f"{path} is cut short: {len(self._map):,} of {end:,} bytes; fetch it again.")

    def nbytes(self, stored: _Stored) -> int:
        """The size of a tensor in the file."""
        elements = math.prod(stored.shape)
        if stored.type in FLOATS:
            return elements * FLOATS[stored.type].itemsize
        gguf = package()
        block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[stored.type]]
        return elements // block * size

    def read(self, stored: _Stored) -> Tensor:
        """A view of the mapped file or, of a quantised tensor, its values as fp32."""
        if stored.type in FLOATS:
            dtype, count = FLOATS[stored.type], math.prod(stored.shape)
            return torch.frombuffer(self._map, dtype=dtype, count=count, offset=stored.start).reshape(stored.shape)
        gguf = package()
        data = np.frombuffer(self._map, np.uint8, self.nbytes(stored), stored.start)
        rows = data.reshape(math.prod(stored.shape[:-1]), -1)
        values = gguf.dequantize(rows, gguf.GGMLQuantizationType[stored.type])
        return torch.from_numpy(values).reshape(stored.shape)

    def _unpack(self, form: str) -> tuple[Any, ...]:
        values = struct.unpack_from(form, self._map, self._at)
        self._at += struct.calcsize(form)
        return values

    def _string(self) -> str:
        (size,) = self._unpack("<Q")
        self._at += size
        if self._at > len(self._map):
            raise ValueError("a text runs beyond the end")
        return self._map[self._at - size : self._at].decode()

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            item, count = self._unpack("<IQ")
            return self._numbers(item, count).tolist() if item in _ARRAYS else [self._value(item) for _ in range(count)]
        value = self._numbers(kind, 1)[0]
        return float(str(value)) if kind == _FLOAT32 else value.item()  # 1e-05, and not 9.99999974738e-06

    def _numbers(self, kind: int, count: int) -> np.ndarray:
        values = np.frombuffer(self._map, _ARRAYS[kind], count, self._at)
        self._at += values.nbytes
        return values

    def _tensor(self) -> tuple[str, _Stored]:
        name, (dims,) = self._string(), self._unpack("<I")
        shape, (kind, start) = self._unpack(f"<{dims}Q"), self._unpack("<IQ")
        if kind not in TYPES:
            raise CheckpointError(
                f"{self.path}: {name} is quantised as type {kind}, which is not read; supported: "
                f"{', '.join(TYPES.values())}.\n  Next: take another file of this model."
            )
        return name, _Stored(TYPES[kind], shape[::-1], start)


class GgufReader:
    """A GGUF file under Hugging Face's names: a context manager and a `weights.Reader` with a config and files.

    headers: {name: TensorInfo}, in the one dtype of the checkpoint; see the module. types: {name: how it is stored}.
    Raises CheckpointError, HubError, and ConfigError for an architecture or a configuration that is not computed here.
    """

    def __init__(self, path: Path):
        self.source, self._file = str(path), GgufFile(path)
        self._fields = _Fields(self._file.metadata, str(path))
        self._model_type = _model_type(self._fields)
        self._boxes: dict[str, _Stored] = {}
        names = _TENSORS | _OF_FAMILY.get(self._model_type, {})
        for name, stored in self._file.tensors.items():
            if name in _TABLES:
                continue
            ours, experts = _renamed(name, names), stored.shape[0] if name.endswith("_exps.weight") else 0
            nbytes = self._file.nbytes(stored) // max(experts, 1)
            for expert in range(experts):
                self._boxes[ours.format(expert)] = stored.part(expert, nbytes)
            if not experts:
                self._boxes[ours] = stored
        self.types = {name: stored.type for name, stored in self._boxes.items()}
        self.headers = self._headers()
        self.places = dict.fromkeys(self.headers, path.name)
        self.metadata: dict[str, str] = {}

    def read(self, name: str) -> Tensor:
        """The tensor on the CPU, mapped from the file where that is possible: not to be written to."""
        tensor = self._values(name)
        projection = name.split(".")[-2]
        if FAMILIES[self._model_type][0] == "llama" and projection in ("q_proj", "k_proj"):
            heads = self._fields.number("attention.head_count")
            tensor = to_halves(tensor, self._fields.number("attention.head_count_kv", heads) if projection[0] == "k" else heads)
        return tensor.to(self.headers[name].dtype)

    def config(self) -> dict[str, Any]:
        """The contents of a config.json."""
        return _config(self._model_type, self._fields, self._file, self.headers)

    def files(self) -> dict[str, bytes]:
        """config.json, generation_config.json and the tokenizer's files."""
        config, ids = self.config(), token_ids(self._file.metadata)
        files = {"config.json": json_bytes(config)}
        if ids:
            files["generation_config.json"] = json_bytes(ids)
        return files | tokenizer_files(self._file.metadata, self._model_type, self.source)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        pass

    def _values(self, name: str) -> Tensor:
        """As stored, but for Gemma's norms."""
        tensor = self._file.read(self._boxes[name])
        return tensor - 1.0 if self._model_type.startswith("gemma") and name.endswith("norm.weight") else tensor

    def _headers(self) -> dict[str, TensorInfo]:
        small = [name for name, box in self._boxes.items() if len(box.shape) == 1 or name.endswith("moe.gate.weight")]
        dtypes = {FLOATS.get(box.type, torch.float32) for name, box in self._boxes.items() if name not in small}
        if not dtypes:
            raise CheckpointError(f"{self.source} holds no matrices. Is it a model, and not a vocabulary alone?")
        dtype = functools.reduce(torch.promote_types, dtypes)
        values = map(self._values, small)
        exact = dtype != torch.float32 and all(same_bits(x.to(dtype).float(), x.float()) for x in values)
        of_small = dtype if exact else torch.float32
        return {
            name: TensorInfo(of_small if name in small else dtype, box.shape) for name, box in self._boxes.items()
        }


def _renamed(name: str, names: Mapping[str, str]) -> str:
    """Hugging Face's name of a tensor; one that is unknown keeps its own."""
    match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", name)
    if match is None or match[2] not in names:
        return name
    prefix = f"model.layers.{match[1]}." if match[1] else ""
    return f"{prefix}{names[match[2]]}.{match[3]}"


# Configuration


class _Fields:
    """The metadata of one architecture. Raises ConfigError for what is missing."""

    def __init__(self, metadata: Mapping[str, Any], where: str):
        self.where, self.metadata = where, metadata
        self.arch = metadata.get("general.architecture")
        known = dict.fromkeys(arch for arch, _ in FAMILIES.values())
        if self.arch not in known:
            raise ConfigError(
                f"{where} has the architecture {self.arch!r} (general.architecture); supported: {', '.join(known)}"
            )
        self._used = {f"{self.arch}.{key}" for key in _UNUSED}

    def get(self, key: str, default: Any = None) -> Any:
        """A value of the architecture; of one for each layer, the one that all have."""
        name = f"{self.arch}.{key}"
        self._used.add(name)
        value = self.metadata.get(name, default)
        if isinstance(value, list):
            if len(set(value)) != 1:
                raise ConfigError(f"{self.where}: {name} differs between layers, which is not supported: {value[:8]}")
            return value[0]
        return value

    def number(self, key: str, default: Any = None) -> Any:
        value = self.get(key, default)
        if value is None:
            raise ConfigError(f"{self.where} lacks {self.arch}.{key}, which a {self.arch} needs. Is the file whole?")
        return value

    def unused(self) -> list[str]:
        """Keys that nothing has asked for and that are switched on."""
        keys = [key for key in self.metadata if key.startswith(f"{self.arch}.") and key not in self._used]
        return [key for key in keys if self.metadata[key] not in (None, False, 0, 0.0, "")]


def _model_type(fields: _Fields) -> str:
    if fields.arch != "llama":
        return str(fields.arch)
    if fields.get("expert_count"):
        return "mixtral"
    return "mistral" if fields.get("attention.sliding_window") else "llama"


def _config(model_type: str, fields: _Fields, file: GgufFile, headers: Mapping[str, TensorInfo]) -> dict[str, Any]:
    """The contents of a config.json. Warns of metadata that nothing here reads."""
    embedding = headers.get("model.embed_tokens.weight")
    if embedding is None:
        raise ConfigError(f"{fields.where} lacks token_embd.weight. Is it a whole language model?")
    layers, heads, width = (
        fields.number(key) for key in ("block_count", "attention.head_count", "embedding_length")
    )
    head_dim = fields.get("attention.key_length", width // heads)
    if fields.get("attention.value_length", head_dim) != head_dim:
        raise ConfigError(f"{fields.where}: values and keys of a head have other sizes, which is not supported")
    activation = "silu" if FAMILIES[model_type][1] == "silu" else "gelu_pytorch_tanh"
    dtype = str(embedding.dtype).removeprefix("torch.")
    context = fields.number("context_length")
    config = {
        "architectures": [f"{model_type.capitalize()}ForCausalLM"],
        "model_type": model_type,
        "vocab_size": embedding.shape[0],
        "hidden_size": width,
        "intermediate_size": fields.number("feed_forward_length"),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": fields.get("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "hidden_act": activation,
        "max_position_embeddings": context,
        "rms_norm_eps": fields.number("attention.layer_norm_rms_epsilon"),
        "rope_theta": float(fields.get("rope.freq_base", 10000.0)),
        "rope_scaling": _rope_scaling(fields, file, head_dim),
        "tie_word_embeddings": "lm_head.weight" not in headers,
        **token_ids(file.metadata, only_eos=True),
        "dtype": dtype,
        "torch_dtype": dtype,
    }
    window = fields.get("attention.sliding_window") or None
    rotated = fields.get("rope.dimension_count", head_dim)
    if model_type in ("llama", "qwen3"):
        config["attention_bias"] = "model.layers.0.self_attn.q_proj.bias" in headers
    if model_type == "llama":
        config["mlp_bias"] = "model.layers.0.mlp.up_proj.bias" in headers
    if model_type == "mixtral":
        config["num_local_experts"] = fields.number("expert_count")
        config["num_experts_per_tok"] = fields.number("expert_used_count")
    if model_type in ("gemma", "gemma2"):
        config["hidden_activation"] = activation
    if model_type == "gemma2":
        # The 27B alone is scaled by its width; llama.cpp tells it by the number of its layers.
        config["query_pre_attn_scalar"] = width // heads if layers == 46 else head_dim
        config["attn_logit_softcapping"] = fields.get("attn_logit_softcapping", 50.0)
        config["final_logit_softcapping"] = fields.get("final_logit_softcapping", 30.0)
        window = window or 4096
    if model_type == "phi3":
        config["original_max_position_embeddings"] = fields.get("rope.scaling.original_context_length", context)
        config["partial_rotary_factor"] = rotated / head_dim
    elif rotated != head_dim:
        raise ConfigError(f"{fields.where} rotates {rotated} of a head's {head_dim} dimensions, which a {model_type} here does not")
    if model_type in ("mistral", "mixtral", "gemma2", "phi3"):
        config["sliding_window"] = window
    elif window is not None:
        raise ConfigError(f"{fields.where} has a window of {window}, and does not say which layers of a {model_type} have it")
    if unknown := fields.unused():
        warnings.warn(
            f"{fields.where} has metadata that is not used here: {', '.join(unknown)}. If one of them changes what the "
            "model computes, do not trust its output.",
            stacklevel=2,
        )
    return config


def _rope_scaling(fields: _Fields, file: GgufFile, head_dim: int) -> dict[str, Any] | None:
    """config.json's rope_scaling."""
    tables = {name: file.read(file.tensors[name]) for name in _TABLES if name in file.tensors}
    kind, factor = fields.get("rope.scaling.type", "none"), fields.get("rope.scaling.factor")
    original, scale = fields.get("rope.scaling.original_context_length"), fields.get("rope.scaling.attn_factor")
    if "rope_freqs.weight" in tables:
        return _llama3_rule(fields, tables["rope_freqs.weight"], head_dim)
    if len(tables) == 2:
        longrope = {"type": "longrope", "short_factor": tables[_TABLES[2]].tolist(), "long_factor": tables[_TABLES[1]].tolist()}
        context = fields.number("context_length")
        usual = math.sqrt(1 + math.log(context / original) / math.log(original)) if original and context > original else 1.0
        longrope["short_factor"], longrope["long_factor"] = (
            [float(str(np.float32(x))) for x in longrope[key]] for key in ("short_factor", "long_factor")
        )
        if scale is not None and not math.isclose(scale, usual, rel_tol=1e-6):
            longrope["attention_factor"] = scale
        return longrope
    if kind == "linear" or (kind == "none" and fields.get("rope.scale_linear", 1.0) != 1.0):
        return {"rope_type": "linear", "factor": factor or fields.get("rope.scale_linear")}
    if kind == "yarn" and scale in (None, 1.0):
        rope = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
        for name in ("beta_fast", "beta_slow"):
            if (value := fields.get(f"rope.scaling.yarn_{name}")) is not None:
                rope[name] = value
        return rope
    if kind != "none":
        raise ConfigError(f"{fields.where}: rope.scaling.type {kind} as it is set there is not supported; linear and yarn are")
    return None


def llama3_divisors(rope: Mapping[str, Any], dim: int) -> list[float]:
    """What each frequency is divided by: 1 for short waves, `factor` for long ones, between them a blend."""
    low, high, factor = rope["low_freq_factor"], rope["high_freq_factor"], rope["factor"]
    divisors = []
    for i in range(0, dim, 2):
        rotations = rope["original_max_position_embeddings"] * rope["rope_theta"] ** (-i / dim) / (2 * math.pi)
        share = min(1.0, max(0.0, (rotations - low) / (high - low)))
        divisors.append(1.0 / ((1.0 - share) / factor + share))
    return divisors


def _llama3_rule(fields: _Fields, divisors: Tensor, head_dim: int) -> dict[str, Any]:
    """The rope_scaling that has these divisors; low, high and original length are the same in all released files."""
    rule = {"rope_type": "llama3", "factor": float(str(np.float32(divisors.max().item()))), "low_freq_factor": 1.0}
    rule |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    theta = float(fields.get("rope.freq_base", 10000.0))
    expected = torch.tensor(llama3_divisors({**rule, "rope_theta": theta}, head_dim))
    if divisors.shape != expected.shape or not torch.allclose(divisors, expected, rtol=1e-5, atol=0.0):
        raise ConfigError(
            f"{fields.where}: rope_freqs.weight is not Llama 3's rule with its usual numbers (1, 4, 8192), and no other "
            "one is supported.\n  Next: use the checkpoint in Hugging Face's layout."
        )
    return rule
