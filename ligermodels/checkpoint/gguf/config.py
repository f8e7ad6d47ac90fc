"""A GGUF file's metadata as config.json.

Each field that a model needs is there or is an error; a per-layer list must be the same for all layers, since the
models here have no other. Floats are stored as fp32: the shortest decimal that rounds to the stored number is taken.
Checked against: gguf 0.19 (constants.py), convert_hf_to_gguf.py and src/llama-model.cpp of llama.cpp.
"""

import math
import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ligermodels.checkpoint.gguf.tokenizer import token_ids
from ligermodels.checkpoint.weights import TensorInfo
from ligermodels.errors import ConfigError

_SILU, _GELU = ("silu", "swish"), ("gelu_pytorch_tanh", "gelu_new")
FAMILIES = {
    "llama": ("llama", _SILU), "mistral": ("llama", _SILU), "mixtral": ("llama", _SILU), "gemma": ("gemma", _GELU),
    "gemma2": ("gemma2", _GELU), "qwen2": ("qwen2", _SILU), "qwen3": ("qwen3", _SILU), "phi3": ("phi3", _SILU),
}  # fmt: skip
"""model_type -> (llama.cpp's architecture, the names in config.json of the activation that it computes)."""

TABLES = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
"""The tensors that are no weights: divisors of the rotary frequencies."""
_UNUSED = ("vocab_size", "tensor_data_layout", "rope.scaling.finetuned", "attention.value_length")


class Fields:
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

    @property
    def model_type(self) -> str:
        """That of config.json."""
        if self.arch != "llama":
            return str(self.arch)
        if self.get("expert_count"):
            return "mixtral"
        return "mistral" if self.get("attention.sliding_window") else "llama"

    def unused(self) -> list[str]:
        """Keys that nothing has asked for and that are switched on."""
        keys = [key for key in self.metadata if key.startswith(f"{self.arch}.") and key not in self._used]
        return [key for key in keys if self.metadata[key] not in (None, False, 0, 0.0, "")]


def config_of(fields: Fields, headers: Mapping[str, TensorInfo], tables: Mapping[str, Tensor]) -> dict[str, Any]:
    """The contents of a config.json.

    headers: under Hugging Face's names. tables: {name: values} of those in TABLES that the file has.
    Raises ConfigError; warns of metadata that nothing here reads.
    """
    model_type = fields.model_type
    embedding = headers.get("model.embed_tokens.weight")
    if embedding is None:
        raise ConfigError(f"{fields.where} lacks token_embd.weight. Is it a whole language model?")
    layers, heads, width = (fields.number(key) for key in ("block_count", "attention.head_count", "embedding_length"))
    head_dim = fields.get("attention.key_length", width // heads)
    if fields.get("attention.value_length", head_dim) != head_dim:
        raise ConfigError(f"{fields.where}: values and keys of a head have other sizes, which is not supported")
    activation = FAMILIES[model_type][1][0]
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
        "rope_scaling": _rope_scaling(fields, tables, head_dim),
        "tie_word_embeddings": "lm_head.weight" not in headers,
        **token_ids(fields.metadata, only_eos=True),
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
        raise ConfigError(
            f"{fields.where} rotates {rotated} of a head's {head_dim} dimensions, which a {model_type} here does not"
        )
    if model_type in ("mistral", "mixtral", "gemma2", "phi3"):
        config["sliding_window"] = window
    elif window is not None:
        raise ConfigError(
            f"{fields.where} has a window of {window}, and does not say which layers of a {model_type} have it"
        )
    if unknown := fields.unused():
        warnings.warn(
            f"{fields.where} has metadata that is not used here: {', '.join(unknown)}. If one of them changes what the "
            "model computes, do not trust its output.",
            stacklevel=2,
        )
    return config


def _rope_scaling(fields: Fields, tables: Mapping[str, Tensor], head_dim: int) -> dict[str, Any] | None:
    """config.json's rope_scaling."""
    kind, factor = fields.get("rope.scaling.type", "none"), fields.get("rope.scaling.factor")
    original, scale = fields.get("rope.scaling.original_context_length"), fields.get("rope.scaling.attn_factor")
    if "rope_freqs.weight" in tables:
        return _llama3_rule(fields, tables["rope_freqs.weight"], head_dim)
    if len(tables) == 2:
        longrope: dict[str, Any] = {"type": "longrope"}
        for name, table in zip(("long_factor", "short_factor"), TABLES[1:], strict=True):
            longrope[name] = [float(str(np.float32(value))) for value in tables[table].tolist()]
        context, usual = fields.number("context_length"), 1.0
        if original and context > original:
            usual = math.sqrt(1 + math.log(context / original) / math.log(original))
        if scale is not None and not math.isclose(scale, usual, rel_tol=1e-6):
            longrope["attention_factor"] = scale
        return longrope
    if kind == "linear" or (kind == "none" and fields.get("rope.scale_linear", 1.0) != 1.0):
        return {"rope_type": "linear", "factor": factor or fields.get("rope.scale_linear")}
    if kind == "yarn" and scale in (None, 1.0):
        rope = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
        for name, usual_beta in (("beta_fast", 32.0), ("beta_slow", 1.0)):
            if (beta := fields.get(f"rope.scaling.yarn_{name}", usual_beta)) != usual_beta:
                rope[name] = beta
        return rope
    if kind != "none":
        raise ConfigError(
            f"{fields.where}: rope.scaling.type {kind} as it is set there is not supported; linear and yarn are"
        )
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


def _llama3_rule(fields: Fields, divisors: Tensor, head_dim: int) -> dict[str, Any]:
    """The rope_scaling that has these divisors; low, high and original length are the same in all released files."""
    rule = {"rope_type": "llama3", "factor": float(str(np.float32(divisors.max().item()))), "low_freq_factor": 1.0}
    rule |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    theta = float(fields.get("rope.freq_base", 10000.0))
    expected = torch.tensor(llama3_divisors({**rule, "rope_theta": theta}, head_dim))
    if divisors.shape != expected.shape or not torch.allclose(divisors, expected, rtol=1e-5, atol=0.0):
        raise ConfigError(
            f"{fields.where}: rope_freqs.weight is not Llama 3's rule with its usual numbers (1, 4, 8192), and no "
            "other one is supported.\n  Next: use the checkpoint in Hugging Face's layout."
        )
    return rule
