"""What of Gemma 4 differs from block to block, in a GGUF file's metadata and in config.json.

- `attention.sliding_window_pattern` says of each block whether it has a window. Head sizes, key heads and rope of those
  that have one are in keys that end in `_swa`, in a list with one value per block, or as in other models.
- The rope of full blocks is "proportional", which llama.cpp has as a table of divisors, rope_freqs: 1 for the pairs of
  dimensions that rotate, 1e30 for the others.
- Blocks from `block_count` - `attention.shared_kv_layers` on read the keys of the last block before them or, with a
  window, of the one before that. `feed_forward_length` is a list where their MLPs are twice as wide.
- Where keys are values (attention_k_eq_v), full blocks have no attn_v.

Checked against: conversion/gemma.py and src/models/gemma4.cpp of llama.cpp.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ligermodels.errors import ConfigError

KEYS = {
    "context_length": "max_position_embeddings", "embedding_length": "hidden_size", "block_count": "num_hidden_layers",
    "attention.head_count": "num_attention_heads", "attention.key_length": "global_head_dim",
    "attention.key_length_swa": "head_dim", "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.shared_kv_layers": "num_kv_shared_layers",
    "embedding_length_per_layer_input": "hidden_size_per_layer_input", "attention.sliding_window": "sliding_window",
}  # fmt: skip
"""{key of the metadata, after the architecture: field of config.json}."""
EXPERTS = {
    "expert_count": "num_experts", "expert_used_count": "top_k_experts",
    "expert_feed_forward_length": "moe_intermediate_size",
}  # fmt: skip
DEFAULTS = {"attention.shared_kv_layers": 0, "embedding_length_per_layer_input": 0}
_STILL = 1e30
_FULL, _SLIDING = "full_attention", "sliding_attention"


def sizes_of(metadata: Any) -> dict[str, Any]:
    """{field of config.json: value} of the sizes. metadata: `config.Metadata`. Raises ConfigError."""
    where, keys = metadata.where, KEYS | (EXPERTS if metadata.get("expert_count") else {})
    fields = {field: metadata.required(key, DEFAULTS.get(key)) for key, field in keys.items()}
    blocks = fields["num_hidden_layers"]
    pattern = metadata.by_layer("attention.sliding_window_pattern", blocks)
    fields["layer_types"] = kinds = [_SLIDING if sliding else _FULL for sliding in pattern]
    heads, widths = (metadata.by_layer(name, blocks) for name in ("attention.head_count_kv", "feed_forward_length"))
    of_kind = {kind: {heads[i] for i in range(blocks) if kinds[i] == kind} for kind in (_SLIDING, _FULL)}
    if any(len(of) > 1 for of in of_kind.values()):
        raise ConfigError(f"{where}: attention.head_count_kv {heads[:8]} differs between blocks of one kind")
    full = next(iter(of_kind[_FULL]), None)
    fields |= {"num_key_value_heads": next(iter(of_kind[_SLIDING]), full), "num_global_key_value_heads": full}
    fields["intermediate_size"], fields["use_double_wide_mlp"] = widths[0], widths[-1] != widths[0]
    first = blocks - fields["num_kv_shared_layers"]
    if widths != [widths[0] * (1 + (fields["use_double_wide_mlp"] and i >= first)) for i in range(blocks)]:
        raise ConfigError(
            f"{where}: feed_forward_length {widths[:8]} is not double from block {first} on, and no other"
        )
    for name, field in (("", "global_head_dim"), ("_swa", "head_dim")):
        for key in (f"attention.value_length{name}", f"rope.dimension_count{name}"):
            if (size := metadata.get(key, fields[field])) != fields[field]:
                raise ConfigError(f"{where}: {key} {size} is not attention.key_length{name}, which is not supported")
    fields["enable_moe_block"] = "num_experts" in fields
    return fields


def config_of(
    metadata: Any, fields: Mapping[str, Any], headers: Mapping[str, Any], tables: Mapping[str, Tensor]
) -> dict[str, Any]:
    """What else config.json has. fields: of `sizes_of`. headers, tables: as for config.py. Raises ConfigError."""
    kinds, first = fields["layer_types"], fields["num_hidden_layers"] - fields["num_kv_shared_layers"]
    full = [i for i in range(first) if kinds[i] == _FULL]
    without_values = {f"model.layers.{i}.self_attn.v_proj.weight" not in headers for i in full}
    if len(without_values) > 1:
        raise ConfigError(f"{metadata.where}: some full blocks have attn_v and some not, which is not supported")
    heads, keys_are_values = fields["num_global_key_value_heads"], True in without_values
    if not keys_are_values and heads != fields["num_key_value_heads"]:
        raise ConfigError(f"{metadata.where}: full blocks with attn_v have {heads} key heads, as no Gemma 4 has")
    rope = {"rope_type": "proportional", "rope_theta": float(metadata.required("rope.freq_base"))}
    rope["partial_rotary_factor"] = _rotating(metadata.where, tables, fields["global_head_dim"] // 2)
    sliding = {"rope_type": "default", "rope_theta": float(metadata.required("rope.freq_base_swa"))}
    return {
        "attention_k_eq_v": keys_are_values,
        "num_global_key_value_heads": heads if keys_are_values else None,
        "vocab_size_per_layer_input": headers["model.embed_tokens.weight"].shape[0],
        "final_logit_softcapping": metadata.get("final_logit_softcapping"),
        "rope_parameters": {_FULL: rope, _SLIDING: sliding},
    }


def _rotating(where: str, tables: Mapping[str, Tensor], pairs: int) -> float:
    """The share of the pairs of dimensions that rotate."""
    divisors = tables.get("rope_freqs.weight", torch.empty(0))
    count = int((divisors == 1).sum())
    if divisors.shape != (pairs,) or not (divisors[:count] == 1).all() or not (divisors[count:] >= _STILL / 10).all():
        raise ConfigError(
            f"{where}: rope_freqs.weight is not {pairs} numbers, of which the first are 1 and the others {_STILL:g}"
        )
    return count / pairs


def metadata_of(config: Any) -> dict[str, Any]:
    """{key, after the architecture: value} of a model's config, beside those that other models have, too."""
    layers = [config.layer(i) for i in range(config.num_hidden_layers)]
    metadata = {key: getattr(config, field) for key, field in (KEYS | EXPERTS).items()}
    metadata["attention.sliding_window_pattern"] = [kind == _SLIDING for kind in config.layer_types]
    for key, field in (
        ("attention.head_count_kv", "num_key_value_heads"),
        ("feed_forward_length", "intermediate_size"),
    ):
        values = [getattr(layer, field) for layer in layers]
        metadata[key] = values if len({*values}) > 1 else values[0]
    for name, size in (("", config.global_head_dim), ("_swa", config.head_dim)):
        metadata |= {f"attention.value_length{name}": size, f"rope.dimension_count{name}": size}
    metadata["rope.freq_base_swa"] = float(config.ropes["sliding"]["rope_theta"])
    if config.final_logit_softcapping is not None:
        metadata["final_logit_softcapping"] = float(config.final_logit_softcapping)
    if not config.enable_moe_block:
        metadata = {key: value for key, value in metadata.items() if key not in EXPERTS}
    return metadata


def tables_of(config: Any) -> dict[str, list[float]]:
    """{tensor: values} of the rope of full blocks; {} for another model."""
    rope = config.ropes["full"]
    if rope["rope_type"] != "proportional":
        return {}
    pairs = config.global_head_dim // 2
    count = int(config.global_head_dim * rope.get("partial_rotary_factor", 1.0) // 2)
    return {"rope_freqs.weight": [1.0] * count + [_STILL] * (pairs - count)}


def odd(config: Any) -> list[str]:
    """What of a model llama.cpp computes otherwise."""
    first, kinds, rope = config.first_reader, config.layer_types, config.ropes["full"]
    sliding = {**config.ropes["sliding"], "rope_theta": None}
    found = [f"the rope {rope} of full blocks"] * (
        rope["rope_type"] != "proportional" or rope.get("factor", 1.0) != 1.0
    )
    found += [f"the rope {config.ropes['sliding']} of sliding blocks"] * (
        sliding != {"rope_type": "default", "rope_theta": None}
    )
    if config.num_kv_shared_layers and kinds[max(first - 2, 0) : first] != [_SLIDING, _FULL]:
        found.append("num_kv_shared_layers without a sliding and a full block right before those layers")
    if config.hidden_size_per_layer_input and config.vocab_size_per_layer_input != config.vocab_size:
        found.append(f"vocab_size_per_layer_input {config.vocab_size_per_layer_input} (it takes vocab_size)")
    return found + ["sliding_window null"] * (config.sliding_window is None)
