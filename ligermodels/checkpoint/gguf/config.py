"""A GGUF file's metadata as config.json (`config_of`), and a model's config as metadata (`metadata_of`).

A field that the model needs is there or is an error. A list with one value per layer must have one value for all
layers, but for Gemma 4, of which gemma4.py reads and writes what differs.
"""

import math
import warnings
from collections.abc import Mapping
from reprlib import repr as short
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ligermodels.checkpoint.gguf import gemma4, gpt_oss
from ligermodels.checkpoint.gguf.layout import DELTA_NETS
from ligermodels.checkpoint.gguf.tokenizer import token_ids
from ligermodels.checkpoint.weights import TensorInfo
from ligermodels.errors import CheckpointError, ConfigError

_SILU, _GELU = ("silu", "swish"), ("gelu_pytorch_tanh", "gelu_new")
FAMILIES = {
    "llama": ("llama", _SILU), "mistral": ("llama", _SILU), "mixtral": ("llama", _SILU), "gemma": ("gemma", _GELU),
    "gemma2": ("gemma2", _GELU), "gemma3_text": ("gemma3", _GELU), "gemma4_text": ("gemma4", _GELU),
    "qwen2": ("qwen2", _SILU), "qwen3": ("qwen3", _SILU), "qwen3_moe": ("qwen3moe", _SILU),
    "qwen3_next": ("qwen3next", _SILU), "qwen3_5_text": ("qwen35", _SILU), "qwen3_5_moe_text": ("qwen35moe", _SILU),
    "phi3": ("phi3", _SILU), "glm4_moe": ("glm4moe", _SILU), "qwen3_vl": ("qwen3vl", _SILU),
    "qwen3_vl_moe": ("qwen3vlmoe", _SILU), "qwen2_vl": ("qwen2vl", _SILU), "gpt_oss": ("gpt-oss", _SILU),
}  # fmt: skip
"""{model_type: (llama.cpp's architecture, the names of the activation that llama.cpp computes)}."""

_TEXTS = {"qwen2vl": "qwen2", "qwen3vl": "qwen3", "qwen3vlmoe": "qwen3_moe"}
"""{llama.cpp's architecture of the text of a model that reads images: the model_type that computes the same}."""

ROPE_TABLES = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
"""Tensors that are not weights: divisors of the rotary frequencies."""

_KEYS = {
    "context_length": "max_position_embeddings", "embedding_length": "hidden_size", "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size", "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads", "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}  # fmt: skip
"""{key of the metadata, after the architecture: field of config.json}."""
_EXPERTS = {
    "expert_count": "num_experts", "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
}  # fmt: skip
_LINEAR = {
    "ssm.conv_kernel": "linear_conv_kernel_dim", "ssm.state_size": "linear_key_head_dim",
    "ssm.group_count": "linear_num_key_heads", "ssm.time_step_rank": "linear_num_value_heads",
    "full_attention_interval": "full_attention_interval",
}  # fmt: skip
_SHARED_EXPERT = {**_LINEAR, **_EXPERTS, "expert_shared_feed_forward_length": "shared_expert_intermediate_size"}
_KEYS_OF = {
    "mixtral": {"expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok"},
    "qwen3_moe": _EXPERTS,
    "qwen3_vl_moe": _EXPERTS,
    "gemma2": {name: name for name in ("attn_logit_softcapping", "final_logit_softcapping")},
    "qwen3_5_text": _LINEAR,
    "qwen3_5_moe_text": _SHARED_EXPERT,
    "qwen3_next": _SHARED_EXPERT,
    "gpt_oss": gpt_oss.KEYS,
    "glm4_moe": {
        "expert_count": "n_routed_experts", "expert_used_count": "num_experts_per_tok",
        "expert_feed_forward_length": "moe_intermediate_size", "expert_shared_count": "n_shared_experts",
        "expert_weights_norm": "norm_topk_prob", "expert_weights_scale": "routed_scaling_factor",
        "leading_dense_block_count": "first_k_dense_replace",
    },
}  # fmt: skip
_ARCHITECTURES = {
    "gemma3_text": "Gemma3ForCausalLM",
    "gemma4_text": "Gemma4ForCausalLM",
    "qwen3_next": "Qwen3NextForCausalLM",
    "qwen3_5_text": "Qwen3_5ForCausalLM",
    "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
    "glm4_moe": "Glm4MoeForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
}
_CAPS = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
_FRACTIONS = (*_CAPS, "expert_weights_scale")
_DEFAULTS = {
    **_CAPS, "full_attention_interval": 4, "expert_weights_norm": False, "expert_weights_scale": 1.0,
    "leading_dense_block_count": 0,
}  # fmt: skip
_SIGMOID = 2  # expert_gating_func
_WIDE_HEADS = {"gemma2": 46, "gemma3_text": 62}
"""Layers of the model of each family whose query_pre_attn_scalar is not head_dim."""
_LOCAL_ROPE = {"rope_type": "default", "rope_theta": 1e4}
"""Of Gemma 3's sliding layers; no file says it."""
_QWEN3_5 = ("qwen3_5_text", "qwen3_5_moe_text")
_AHEAD = {
    **dict.fromkeys((*_QWEN3_5, "qwen3_next"), "mtp_num_hidden_layers"), "glm4_moe": "num_nextn_predict_layers",
}  # fmt: skip
_SECTIONS = [11, 11, 10]
"""mrope_section of every released Qwen3.5; llama.cpp reads no file without it, and text does not depend on it."""
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""The numbers of Llama 3's rope in all released files; a file with others has them as rope.llama3.*, for us alone."""
_UNUSED = (
    "vocab_size", "tensor_data_layout", "rope.scaling.finetuned", "attention.value_length",
    "rope.dimension_sections", "n_deepstack_layers",  # of images
)  # fmt: skip
_SIZES = {
    "context_length": 1, "embedding_length": 1, "block_count": 1, "attention.head_count": 1,
    "attention.head_count_kv": 1, "attention.key_length": 1, "attention.key_length_swa": 1,
    "expert_feed_forward_length": 1, "rope.dimension_count": 1, "ssm.state_size": 1, "ssm.group_count": 1,
    "ssm.time_step_rank": 1, "nextn_predict_layers": 0, "attention.shared_kv_layers": 0,
    "rope.scaling.original_context_length": 0,
}  # fmt: skip
"""{key of a whole number that is needed to compute others: the least that it may be}."""
_NUMBERS = ("rope.freq_base", "rope.freq_base_swa", "rope.scaling.attn_factor")
"""Keys of such numbers above 0."""


def whole(value: Any, key: str, where: object, least: int = 1) -> int:
    """The value of a key. Raises CheckpointError if it is no whole number of at least `least`."""
    if type(value) is not int or value < least:
        raise _damaged(value, key, where, f"a whole number of at least {least}")
    return value


def _damaged(value: Any, key: str, where: object, expected: str) -> CheckpointError:
    return CheckpointError(
        f"{where}: {key} is {short(value)}, expected {expected}. Likely: a damaged header; fetch the file again."
    )


class Metadata:
    """The metadata of one architecture. Raises ConfigError for an architecture that is not supported.

    Its methods raise CheckpointError for a number of _SIZES or _NUMBERS that cannot be right.
    """

    def __init__(self, values: Mapping[str, Any], where: str):
        self.where, self.values = where, values
        self.arch = values.get("general.architecture")
        known = dict.fromkeys(arch for arch, _ in FAMILIES.values())
        if self.arch not in known:
            raise ConfigError(
                f"{where} has the architecture {self.arch!r} (general.architecture); supported: {', '.join(known)}"
            )
        self._used = {f"{self.arch}.{key}" for key in _UNUSED}

    def get(self, key: str, default: Any = None) -> Any:
        """A value of the architecture. Raises ConfigError for a list whose values differ between layers."""
        name = f"{self.arch}.{key}"
        self._used.add(name)
        value = self.values.get(name, default)
        if isinstance(value, list):
            if not value or any(item != value[0] for item in value):
                raise ConfigError(f"{self.where}: {name} differs between layers, which is not supported: {value[:8]}")
            value = value[0]
        if name in self.values:
            self._check(key, value)
        return value

    def _check(self, key: str, value: Any) -> None:
        name = f"{self.arch}.{key}"
        if key in _SIZES:
            whole(value, name, self.where, _SIZES[key])
        if key in _NUMBERS and (type(value) not in (int, float) or not 0 < value < math.inf):
            raise _damaged(value, name, self.where, "a number above 0")

    def by_layer(self, key: str, layers: int) -> list[Any]:
        """The value of each layer, which may be one for all. Raises ConfigError if there is none, or another number."""
        value = self.values.get(f"{self.arch}.{key}")
        if not isinstance(value, list):
            return [self.required(key)] * layers
        self._used.add(f"{self.arch}.{key}")
        if len(value) < layers:
            raise ConfigError(f"{self.where}: {self.arch}.{key} has {len(value)} values for {layers} layers")
        for item in value[:layers]:
            self._check(key, item)
        return value[:layers]

    def items_of(self, key: str, default: list[Any]) -> list[Any]:
        """A list of whole numbers that is not one value per layer."""
        name = f"{self.arch}.{key}"
        self._used.add(name)
        value = self.values.get(name, default)
        if not isinstance(value, list) or any(type(item) is not int for item in value):
            raise _damaged(value, name, self.where, "a list of whole numbers")
        return value

    def required(self, key: str, default: Any = None) -> Any:
        """As `get`. Raises ConfigError if there is neither a value nor a default."""
        value = self.get(key, default)
        if value is None:
            raise ConfigError(f"{self.where} lacks {self.arch}.{key}, which a {self.arch} needs. Is the file whole?")
        return value

    @property
    def model_type(self) -> str:
        """As in config.json. A Mistral without a window is read as a Llama, and the text of Qwen2-VL and Qwen3-VL as a
        Qwen2, Qwen3 or Qwen3-MoE, which compute the same."""
        if self.arch in _TEXTS:
            return _TEXTS[self.arch]
        if self.arch != "llama":
            return next(model_type for model_type, (arch, _) in FAMILIES.items() if arch == self.arch)
        if self.get("expert_count"):
            return "mixtral"
        return "mistral" if self.get("attention.sliding_window") else "llama"

    def unused(self) -> list[str]:
        """Keys that are set and that nothing has asked for."""
        keys = [key for key in self.values if key.startswith(f"{self.arch}.") and key not in self._used]
        return [key for key in keys if self.values[key] not in (None, False, 0, 0.0, "")]


def sizes_of(metadata: Metadata) -> dict[str, Any]:
    """{field of config.json: value} of the sizes. Raises CheckpointError and ConfigError."""
    if metadata.arch == "gemma4":
        return gemma4.sizes_of(metadata)
    heads, width = metadata.required("attention.head_count"), metadata.required("embedding_length")
    defaults = {"attention.head_count_kv": heads, "attention.key_length": width // heads, **_DEFAULTS}
    keys = _KEYS | _KEYS_OF.get(metadata.model_type, {})
    if metadata.model_type in (
        "qwen3_moe",
        "qwen3_next",
        "qwen3_5_moe_text",
        "gpt_oss",
    ):  # of dense blocks, which llama.cpp does not compute
        defaults["feed_forward_length"] = metadata.required("expert_feed_forward_length")
    fields = {field: metadata.required(key, defaults.get(key)) for key, field in keys.items()}
    if metadata.get("attention.value_length", fields["head_dim"]) != fields["head_dim"]:
        raise ConfigError(f"{metadata.where}: values and keys of a head have other sizes, which is not supported")
    if ahead := metadata.get("nextn_predict_layers", 0):
        fields[_AHEAD[metadata.model_type]] = ahead
        fields["num_hidden_layers"] -= ahead
    if metadata.arch in DELTA_NETS:
        fields["linear_value_head_dim"] = size = fields["linear_key_head_dim"]
        if (inner := metadata.required("ssm.inner_size")) != fields["linear_num_value_heads"] * size:
            raise ConfigError(f"{metadata.where}: ssm.inner_size {inner} is not ssm.time_step_rank heads of {size}")
    return fields


def config_of(metadata: Metadata, headers: Mapping[str, TensorInfo], tables: Mapping[str, Tensor]) -> dict[str, Any]:
    """The contents of config.json.

    headers: under Hugging Face's names. tables: {name: values} of those in ROPE_TABLES that the file has.
    Raises CheckpointError, ConfigError and TokenizerError. Warns of metadata that nothing here reads.
    """
    where, model_type = metadata.where, metadata.model_type
    embedding = headers.get("model.embed_tokens.weight")
    if embedding is None:
        raise ConfigError(f"{where} lacks token_embd.weight. Is it a whole language model?")
    fields = sizes_of(metadata)
    head_dim, context = fields["head_dim"], fields["max_position_embeddings"]
    activation = FAMILIES[model_type][1][0]
    dtype = str(embedding.dtype).removeprefix("torch.")
    config = {
        "architectures": [_ARCHITECTURES.get(model_type, f"{model_type.capitalize()}ForCausalLM")],
        "model_type": model_type,
        "vocab_size": embedding.shape[0],
        **fields,
        "hidden_act": activation,
        "rope_theta": float(metadata.get("rope.freq_base", 10000.0)),
        "rope_scaling": _rope_scaling(metadata, tables, head_dim)
        if model_type not in ("gemma4_text", "gpt_oss")
        else None,
        "tie_word_embeddings": "lm_head.weight" not in headers,
        **token_ids(metadata.values, where, only_eos=True),
        "dtype": dtype,
        "torch_dtype": dtype,
    }
    window = metadata.get("attention.sliding_window") or None
    rotated = metadata.get("rope.dimension_count", head_dim)
    if model_type == "gpt_oss":
        config["rope_scaling"] = gpt_oss.rope_of(metadata)
    if model_type in ("llama", "qwen3"):
        config["attention_bias"] = "model.layers.0.self_attn.q_proj.bias" in headers
    if model_type == "llama":
        config["mlp_bias"] = "model.layers.0.mlp.up_proj.bias" in headers
    if model_type in ("qwen3_moe", "qwen3_next"):
        config["norm_topk_prob"] = True  # as llama.cpp computes it
    if model_type.startswith("gemma"):
        config["hidden_activation"] = activation
    if model_type in _WIDE_HEADS:
        config["query_pre_attn_scalar"] = _gemma_scalar(model_type, fields)
    if model_type == "gemma2":
        window = window or 4096
    if model_type == "gemma3_text":
        config["rope_local_base_freq"] = float(metadata.get("rope.freq_base_swa", 10000.0))
        config["sliding_window_pattern"] = metadata.get("attention.sliding_window_pattern", 6)
        config["final_logit_softcapping"] = metadata.get("final_logit_softcapping")
    if model_type == "gemma4_text":
        del config["rope_theta"], config["rope_scaling"]
        config |= gemma4.config_of(metadata, fields, headers, tables)
    elif metadata.arch in DELTA_NETS:
        config["rope_parameters"] = {
            "rope_type": "default",
            **(config.pop("rope_scaling") or {}),
            "rope_theta": config.pop("rope_theta"),
            "partial_rotary_factor": rotated / head_dim,
        }
        sections = metadata.items_of("rope.dimension_sections", _SECTIONS)[:3]
        if (
            sum(sections) == rotated // 2 and model_type in _QWEN3_5
        ):  # else they are those that llama.cpp asks of any file
            config["rope_parameters"] |= {"mrope_section": sections, "mrope_interleaved": True}
    elif model_type == "glm4_moe":
        config["partial_rotary_factor"] = rotated / head_dim
        config |= {"n_group": metadata.get("expert_group_count", 1), "topk_group": 1}
        config["attention_bias"] = "model.layers.0.self_attn.q_proj.bias" in headers
        config["use_qk_norm"] = "model.layers.0.self_attn.q_norm.weight" in headers
        if (kind := metadata.get("expert_gating_func", _SIGMOID)) != _SIGMOID or config["n_group"] != 1:
            raise ConfigError(f"{where}: experts in groups, or an expert_gating_func {kind}, are not supported")
    elif model_type == "phi3":
        config["original_max_position_embeddings"] = metadata.get("rope.scaling.original_context_length", context)
        config["partial_rotary_factor"] = rotated / head_dim
    elif rotated != head_dim:
        raise ConfigError(f"{where} rotates {rotated} of a head's {head_dim} dimensions, which a {model_type} does not")
    if model_type in ("mistral", "mixtral", "gemma2", "gemma3_text", "gemma4_text", "phi3", "gpt_oss"):
        config["sliding_window"] = window
    elif window is not None:
        raise ConfigError(f"{where} has a window of {window}, and does not say which layers of a {model_type} have it")
    if unknown := metadata.unused():
        warnings.warn(
            f"{where} has metadata that is not used here: {', '.join(unknown)}. If one of them changes what the "
            "model computes, do not trust its output.",
            stacklevel=2,
        )
    return config


def _rope_scaling(metadata: Metadata, tables: Mapping[str, Tensor], head_dim: int) -> dict[str, Any] | None:
    """rope_scaling of config.json."""
    get = metadata.get
    kind, factor = get("rope.scaling.type", "none"), get("rope.scaling.factor")
    original, scale = get("rope.scaling.original_context_length"), get("rope.scaling.attn_factor")
    if "rope_freqs.weight" in tables:
        return _llama3_rule(metadata, tables["rope_freqs.weight"], head_dim)
    if len(tables) == 2:
        longrope: dict[str, Any] = {"type": "longrope"}
        for name, table in zip(("long_factor", "short_factor"), ROPE_TABLES[1:], strict=True):
            longrope[name] = [float(str(np.float32(value))) for value in tables[table].tolist()]
        context, usual = metadata.required("context_length"), 1.0
        if original and context > original:
            usual = math.sqrt(1 + math.log(context / original) / math.log(original))
        if scale is not None and not math.isclose(scale, usual, rel_tol=1e-6):
            longrope["attention_factor"] = scale
        return longrope
    if kind == "linear" or (kind == "none" and get("rope.scale_linear", 1.0) != 1.0):
        return {"rope_type": "linear", "factor": factor or get("rope.scale_linear")}
    if kind == "yarn" and scale in (None, 1.0):
        betas = {"beta_fast": 32.0, "beta_slow": 1.0}
        stored = {name: get(f"rope.scaling.yarn_{name}", usual) for name, usual in betas.items()}
        unusual = {name: beta for name, beta in stored.items() if beta != betas[name]}
        return {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original, **unusual}
    if kind != "none":
        raise ConfigError(
            f"{metadata.where}: rope.scaling.type {kind} as it is set there is not supported; linear and yarn are"
        )
    return None


def _llama3_rule(metadata: Metadata, divisors: Tensor, head_dim: int) -> dict[str, Any]:
    """The rope_scaling that has these divisors."""
    rule = {"rope_type": "llama3", "factor": divisors.max().item(), **_LLAMA3}
    rule |= {name: value for name in rule if (value := metadata.get(f"rope.llama3.{name}")) is not None}
    rule |= {name: float(str(np.float32(value))) for name, value in rule.items() if isinstance(value, float)}
    theta = float(metadata.get("rope.freq_base", 10000.0))
    expected = torch.tensor(llama3_divisors({**rule, "rope_theta": theta}, head_dim))
    if divisors.shape != expected.shape or not torch.allclose(divisors, expected, rtol=1e-5, atol=0.0):
        raise ConfigError(
            f"{metadata.where}: rope_freqs.weight is not Llama 3's rule with its usual numbers (1, 4, 8192), and the "
            "file has no others.\n  Next: use the checkpoint in Hugging Face's layout."
        )
    return rule


def llama3_divisors(rope: Mapping[str, Any], dim: int) -> list[float]:
    """The divisor of each frequency: 1 for short waves, `factor` for long ones, a blend between them."""
    low, high, factor = rope["low_freq_factor"], rope["high_freq_factor"], rope["factor"]
    divisors = []
    for i in range(0, dim, 2):
        rotations = rope["original_max_position_embeddings"] * rope["rope_theta"] ** (-i / dim) / (2 * math.pi)
        share = min(1.0, max(0.0, (rotations - low) / (high - low)))
        divisors.append(1.0 / ((1.0 - share) / factor + share))
    return divisors


def _gemma_scalar(model_type: str, fields: Mapping[str, Any]) -> int:
    """query_pre_attn_scalar as llama.cpp takes it: the 27B alone, known by its layers, is scaled by its width."""
    if fields["num_hidden_layers"] == _WIDE_HEADS[model_type]:
        return fields["hidden_size"] // fields["num_attention_heads"]
    return fields["head_dim"]


def metadata_of(config: Any, rotary: Any, mtp_layers: int) -> dict[str, int | float | str | list[int]]:
    """{key, after the architecture: value} of a model's config.

    rotary: its RotaryEmbedding. mtp_layers: number of layers for multi-token prediction, which llama.cpp counts too.
    """
    rope, kind = config.ropes["full"], config.model_type
    keys = _KEYS | _KEYS_OF.get(kind, {})
    metadata: dict[str, int | float | str | list[int]] = {"vocab_size": config.vocab_size}
    for key, field in keys.items():
        if (value := getattr(config, field)) is None:  # intermediate_size where all blocks have experts
            continue
        metadata[key] = float(value) if key in _FRACTIONS else value  # a cap may be a whole number in config.json
    if mtp_layers:
        metadata |= {"block_count": config.num_hidden_layers + mtp_layers, "nextn_predict_layers": mtp_layers}
    if kind == "glm4_moe":
        metadata["expert_gating_func"] = _SIGMOID
    if "linear_num_value_heads" in keys.values():
        metadata["full_attention_interval"] = _interval(config.layer_types) or 0
        metadata["ssm.inner_size"] = config.linear_num_value_heads * config.linear_value_head_dim
    if kind in _QWEN3_5:
        metadata["rope.dimension_sections"] = [*rope.get("mrope_section", _SECTIONS), 0]
    if kind in ("qwen2_vl", "qwen3_vl", "qwen3_vl_moe"):
        metadata["rope.dimension_sections"] = [*rope["mrope_section"], 0]
    if kind in ("qwen3_vl", "qwen3_vl_moe"):
        metadata["n_deepstack_layers"] = len(config.vision_config.deepstack_visual_indexes)
    metadata |= {"attention.value_length": config.head_dim, "rope.dimension_count": rotary.dim}
    metadata["rope.freq_base"] = float(rope["rope_theta"])
    window = getattr(config, "sliding_window", None)
    if kind == "phi3":
        metadata["rope.scaling.original_context_length"] = config.original_max_position_embeddings
        window = window or 0  # llama.cpp takes a missing key for a window
    if window is not None:
        metadata["attention.sliding_window"] = window
    if rope["rope_type"] in ("linear", "yarn"):
        metadata |= {"rope.scaling.type": rope["rope_type"], "rope.scaling.factor": float(_factor(config))}
    if rope["rope_type"] == "yarn":
        metadata["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
        metadata["rope.scaling.yarn_beta_fast"] = float(rope.get("beta_fast") or 32)
        metadata["rope.scaling.yarn_beta_slow"] = float(rope.get("beta_slow") or 1)
        if kind == "gpt_oss" and rope.get("truncate", True):
            metadata[gpt_oss.TRUNCATE] = True
    if rope["rope_type"] == "llama3":
        usual = {**_LLAMA3, "factor": np.float32(max(llama3_divisors(rope, rotary.dim)))}
        numbers = {"factor": float(rope["factor"]), **{name: type(x)(rope[name]) for name, x in _LLAMA3.items()}}
        if any(np.float32(numbers[name]) != value for name, value in usual.items()):
            metadata |= {f"rope.llama3.{name}": value for name, value in numbers.items()}
    if rope["rope_type"] == "longrope":
        metadata["rope.scaling.attn_factor"] = float(rotary.attention_scaling)
    return metadata | (gemma4.metadata_of(config) if kind == "gemma4_text" else {})


def _interval(layer_types: list[str]) -> int | None:
    """n if every n-th layer, and no other, has full attention; None if there is no such n."""
    full = [kind == "full_attention" for kind in layer_types]
    n = full.index(True) + 1 if any(full) else len(full) + 1
    return n if full == [(layer + 1) % n == 0 for layer in range(len(full))] else None


def check(model: Any, where: str) -> None:
    """Raises ConfigError if llama.cpp computes a model otherwise. Warns of a window that it ignores."""
    c = model.config
    if c.model_type not in FAMILIES:
        raise ConfigError(
            f"{where} is a {c.model_type}, and GGUF files are written for {', '.join(FAMILIES)} alone.\n"
            "  Next: keep another layout."
        )
    arch, activations = FAMILIES[c.model_type]
    layers = range(c.num_hidden_layers)
    odd = [f"hidden_act {c.hidden_act}"] * (c.hidden_act not in activations)
    if arch in ("gemma", "gemma2", "gemma3"):
        odd += ["a head of its own (tie_word_embeddings false)"] * (not c.tie_word_embeddings)
    normed = ("qwen3", "qwen3moe", "qwen3vl", "qwen3vlmoe", *DELTA_NETS)
    if arch in ("gemma", "gemma2", "gemma3", "gemma4", *normed):
        odd += ["attention_bias"] * c.attention_bias
    if c.model_type in _WIDE_HEADS and c.query_pre_attn_scalar != (scalar := _gemma_scalar(c.model_type, c.values())):
        odd.append(f"query_pre_attn_scalar {c.query_pre_attn_scalar} (it takes {scalar} for these sizes)")
    if arch == "gemma3":
        if c.layer_types != ["sliding_attention" if (i + 1) % 6 else "full_attention" for i in layers]:
            odd.append("layer_types other than full attention in every sixth layer")
        odd += [f"the rope {c.ropes['sliding']} of sliding layers"] * (c.ropes["sliding"] != _LOCAL_ROPE)
        odd += [f"final_logit_softcapping {c.final_logit_softcapping}"] * (c.final_logit_softcapping is not None)
    if arch == "gemma2":
        odd += [f"{name} null" for name in _CAPS if getattr(c, name) is None]
        if c.layer_types != ["full_attention" if i % 2 else "sliding_attention" for i in layers]:
            odd.append("layer_types other than sliding, full, sliding, full, ...")
    odd += gemma4.odd(c) if arch == "gemma4" else []
    odd += gpt_oss.odd(c) if arch == "gpt-oss" else []
    if arch in DELTA_NETS:
        if c.linear_value_head_dim != c.linear_key_head_dim:
            odd.append(f"linear_value_head_dim {c.linear_value_head_dim} (it takes {c.linear_key_head_dim}, the key's)")
        if _interval(c.layer_types) is None:
            odd.append("layer_types other than full attention in every n-th layer")
    if arch == "glm4moe" and c.n_group != 1:
        odd.append(f"n_group {c.n_group}")
    if arch in ("qwen3vl", "qwen3vlmoe") and len(added := c.vision_config.deepstack_visual_indexes) >= len(layers):
        odd.append(f"deepstack_visual_indexes of {len(added)} blocks (it takes fewer than num_hidden_layers)")
    if arch in ("qwen3moe", "qwen3vlmoe", "qwen3next"):
        odd += ["norm_topk_prob false"] * (not c.norm_topk_prob)
        odd += ["blocks without experts"] * (not all(map(c.has_experts, layers)))
    if arch == "phi3" and c.head_dim * c.num_attention_heads != c.hidden_size:
        odd.append(f"head_dim {c.head_dim} (it takes hidden_size / num_attention_heads)")
    odd += _odd_rope(c, model.decoder.rotary_emb, arch)
    if odd:
        raise ConfigError(
            f"{where}: llama.cpp does not compute {'; '.join(odd)} of a {c.model_type}.\n  Next: keep another layout."
        )
    windows = [window for i in layers if (window := c.window(i)) is not None]
    if windows and arch not in ("gemma2", "gemma3", "gemma4", "gpt-oss") and min(windows) < c.max_position_embeddings:
        warnings.warn(
            f"{where}: llama.cpp ignores the window of {min(windows)} tokens of a {c.model_type}: its output differs "
            "for longer texts. Run it with a context of that size (-c) where this matters.",
            stacklevel=5,
        )


def _odd_rope(config: Any, rotary: Any, arch: str) -> list[str]:
    rope = config.ropes["full"]
    kind, scaling = rope["rope_type"], rotary.attention_scaling
    if (
        kind == "dynamic"
        or (kind == "proportional" and arch != "gemma4")
        or (arch == "gemma3" and kind not in ("default", "linear"))
        or (kind == "llama3" and arch != "llama")
        or (kind == "longrope" and arch != "phi3")
    ):
        return [f"rope_type {kind}"]
    if kind != "yarn":
        return []
    usual = 1.0 + 0.1 * math.log(max(1.0, _factor(config)))
    odd = ["rope_type yarn with truncate false"] * (arch != "gpt-oss" and not rope.get("truncate", True))
    return odd + [f"rope_type yarn with attention_factor {scaling:.6g}"] * (abs(scaling - usual) > 1e-6)


def _factor(config: Any) -> float:
    rope = config.ropes["full"]
    return rope.get("factor") or config.max_position_embeddings / rope["original_max_position_embeddings"]
