"""What of gpt-oss is in a GGUF file otherwise than in other models: experts in MXFP4, and YaRN.

- A block of 32 weights is 17 bytes: the scale, then 16 bytes whose low bits are the codes of the first 16 weights and
  whose high bits are those of the other 16. On disk in Hugging Face's layout, neighbours share a byte. The codes and
  scales are the same (kernels/linear/mxfp4.py), so no bit is lost either way.
- llama.cpp rounds the ends of YaRN's ramp to whole frequencies, which released models do not ask for (`truncate`
  false). No key says it: a file is read as `truncate` false, and one of a model that rounds has yarn_truncate, for us
  alone.
- Blocks 0, 2, 4, ... have the window. Alpha is 1.702 and the limit 7 in llama.cpp, whatever the model.

Checked against: conversion/gpt_oss.py, src/models/openai-moe.cpp, src/llama-graph.cpp (LLM_FFN_SWIGLU_OAI_MOE) and
ggml_rope_yarn_corr_dims of llama.cpp; MXFP4 in quants.py of gguf 0.19.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ligermodels.errors import ConfigError

KEYS = {
    "expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "intermediate_size", "attention.sliding_window": "sliding_window",
}  # fmt: skip
"""{key of the metadata, after the architecture: field of config.json}."""
WEIGHTS = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
"""The matrices that are in MXFP4 in released models."""
TRUNCATE = "rope.scaling.yarn_truncate"
_ALPHA, _LIMIT = 1.702, 7.0
_HALF = 16  # codes in the low bits, and in the high bits, of a block in the file


def to_file(blocks: Tensor, scales: Tensor) -> Tensor:
    """The bytes of a tensor of the file, [..., 17 K / 32], of blocks [..., K / 32, 16] and scales [..., K / 32]."""
    codes = torch.stack((blocks & 15, blocks >> 4), -1).flatten(-2)
    pairs = codes[..., :_HALF] | codes[..., _HALF:] << 4
    return torch.cat((scales[..., None], pairs), -1).flatten(-2)


def from_file(data: Tensor) -> tuple[Tensor, Tensor]:
    """The inverse: (blocks, scales)."""
    scales, pairs = data.unflatten(-1, (-1, _HALF + 1)).split((1, _HALF), -1)
    codes = torch.cat((pairs & 15, pairs >> 4), -1)
    return codes[..., ::2] | codes[..., 1::2] << 4, scales.squeeze(-1)


def packed(types: Iterable[tuple[str, set[str]]]) -> list[str]:
    """The matrices of experts that stay in 4 bits: all of a model, or none.

    types: (Hugging Face's name, types of its parts in the file) of each tensor.
    """
    experts = [(name, kinds) for name, kinds in types if name.endswith(WEIGHTS)]
    return [name for name, _ in experts] if all(kinds == {"MXFP4"} for _, kinds in experts) else []


def rope_of(metadata: Any) -> dict[str, Any]:
    """rope_scaling of config.json. metadata: `config.Metadata`. Raises ConfigError for a rope other than YaRN."""
    kind, scale = metadata.get("rope.scaling.type"), metadata.get("rope.scaling.attn_factor", 1.0)
    if kind != "yarn" or scale != 1.0:
        raise ConfigError(
            f"{metadata.where}: rope.scaling.type {kind} with attn_factor {scale:g} is not supported of a gpt-oss; "
            "yarn with attn_factor 1 is"
        )
    return {
        "rope_type": "yarn",
        "factor": metadata.required("rope.scaling.factor"),
        "beta_fast": metadata.get("rope.scaling.yarn_beta_fast", 32.0),
        "beta_slow": metadata.get("rope.scaling.yarn_beta_slow", 1.0),
        "truncate": metadata.get(TRUNCATE, False),
        "original_max_position_embeddings": metadata.required("rope.scaling.original_context_length"),
    }


def odd(config: Any) -> list[str]:
    """What of a model llama.cpp computes otherwise, or has no place for."""
    rope = config.ropes["full"]
    refused = [f"rope_type {rope['rope_type']}"] * (rope["rope_type"] != "yarn")
    refused += ["attention_bias false"] * (not config.attention_bias)
    refused += ["a tied head (tie_word_embeddings)"] * config.tie_word_embeddings
    refused += ["sliding_window null"] * (config.sliding_window is None)
    refused += [f"swiglu_alpha {config.swiglu_alpha} (it takes {_ALPHA})"] * (config.swiglu_alpha != _ALPHA)
    refused += [f"swiglu_limit {config.swiglu_limit} (it takes {_LIMIT:g})"] * (config.swiglu_limit != _LIMIT)
    kinds = [("sliding_attention", "full_attention")[layer % 2] for layer in range(config.num_hidden_layers)]
    return refused + ["layer_types other than sliding, full, sliding, full, ..."] * (config.layer_types != kinds)
