"""GGUF files: written as formulas of this file say, read back to the bit, and what is refused in either direction.

Where xllamacpp, a build of llama.cpp, is installed, its logits and token ids are compared too.
"""

import json
import math
import re
import shutil
import struct
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import ligermodels
from ligermodels import cli
from ligermodels.arch import ARCHS
from ligermodels.checkpoint.files import read_json
from ligermodels.checkpoint.gguf import writer as gguf_writer
from ligermodels.checkpoint.gguf.reader import TYPES, GgufReader
from ligermodels.checkpoint.gguf.writer import GgufTarget
from ligermodels.checkpoint.weights import same_bits
from ligermodels.conversion import MismatchError, Options, convert, inspect, verify
from ligermodels.errors import CheckpointError, ConfigError, HubError, InputError, TokenizerError
from ligermodels.text import Tokenizer
from ligermodels.training import load_mtp
from tests import llama_cpp
from tests.arch import gemma3_vl, gemma4_vl
from tests.arch.qwen3_vl import qwen3_vl, qwen3_vl_moe
from tests.arch.test_qwen3_5 import with_images
from tests.arch.test_qwen3_5_moe import mtp_tensors as mtp_tensors_with_experts
from tests.arch.test_qwen3_5_mtp import mtp_tensors
from tests.conversion import gguf_files
from tests.conversion.gguf_files import (
    SIZES,
    add_tokenizer,
    fields_of,
    gguf,
    rewritten,
    rows_of,
    small_model,
    tensors_of,
    to_gguf,
)

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3["original_max_position_embeddings"] = 8192
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 16.0}
LONGROPE = {"type": "longrope", "short_factor": [1.0, 1.5, 2.0], "long_factor": [2.0, 3.0, 4.0]}
GEMMA = {"head_dim": 8, "tie_word_embeddings": True}
GEMMA2 = {**GEMMA, "query_pre_attn_scalar": 8}
GEMMA3 = {
    **GEMMA2, "sliding_window": 8, "num_hidden_layers": 7, "rope_scaling": {"rope_type": "linear", "factor": 8.0}
}  # fmt: skip
PHI3_LONG = {"partial_rotary_factor": 0.75, "original_max_position_embeddings": 64, "rope_scaling": LONGROPE}
QWEN3_MOE = {
    "head_dim": 16,
    "num_experts": 3,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "norm_topk_prob": True,
}
QWEN3_5 = {
    "head_dim": 16, "layer_types": ["linear_attention", "full_attention"], "full_attention_interval": 2,
    "linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "rope_parameters": {
        "rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
    },
}  # fmt: skip
QWEN3_5_MOE = QWEN3_5 | {
    "num_experts": 12, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 20,
}  # fmt: skip
QWEN3_NEXT = {key: value for key, value in QWEN3_5_MOE.items() if key != "rope_parameters"} | {
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
}  # fmt: skip
FULL, SLIDING = "full_attention", "sliding_attention"
GEMMA4 = {
    "head_dim": 8, "global_head_dim": 16, "sliding_window": 8, "layer_types": [SLIDING, FULL],
    "hidden_size_per_layer_input": 0, "rope_parameters": {
        FULL: {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.5},
        SLIDING: {"rope_type": "default", "rope_theta": 1e4},
    },
}  # fmt: skip
GEMMA4_SHARED = GEMMA4 | {
    "num_hidden_layers": 6, "layer_types": [SLIDING, FULL] * 3, "num_kv_shared_layers": 2, "use_double_wide_mlp": True,
    "hidden_size_per_layer_input": 10, "final_logit_softcapping": 2.5,
}  # fmt: skip
GEMMA4_EXPERTS = GEMMA4 | {
    "attention_k_eq_v": True, "num_global_key_value_heads": 1, "enable_moe_block": True, "num_experts": 6,
    "top_k_experts": 2, "moe_intermediate_size": 24,
}  # fmt: skip
GLM4_MOE = {
    "head_dim": 16, "n_routed_experts": 12, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
    "attention_bias": True, "routed_scaling_factor": 1.5, "num_nextn_predict_layers": 0,
}  # fmt: skip
GPT_OSS = {
    "head_dim": 8, "num_local_experts": 12, "num_experts_per_tok": 2, "sliding_window": 8, "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 64,
        "beta_fast": 8.0, "beta_slow": 1.0, "truncate": False,
    },
}  # fmt: skip
GPT_OSS_ROUNDED = GPT_OSS | {"rope_parameters": {**GPT_OSS["rope_parameters"], "truncate": True}}
MODELS = {
    "llama": ("llama", {"rope_theta": 500000.0, "rope_scaling": LLAMA3}),
    "llama, tied": ("llama", {"tie_word_embeddings": True, "rope_scaling": {"rope_type": "linear", "factor": 2.0}}),
    "llama, biases": ("llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 16}),
    "mistral": ("mistral", {"head_dim": 16, "sliding_window": None}),
    "mistral, window": ("mistral", {"sliding_window": 64}),
    "mixtral": ("mixtral", {"num_local_experts": 3, "head_dim": 8}),
    "gemma": ("gemma", GEMMA),
    "gemma2": ("gemma2", {**GEMMA2, "sliding_window": 8}),
    "gemma3": ("gemma3_text", GEMMA3),
    "gemma4": ("gemma4_text", GEMMA4),
    "gemma4, shared keys": ("gemma4_text", GEMMA4_SHARED),
    "gemma4, experts": ("gemma4_text", GEMMA4_EXPERTS),
    "qwen2": ("qwen2", {"rope_scaling": YARN}),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "qwen3_moe": ("qwen3_moe", QWEN3_MOE),
    "qwen3_next": ("qwen3_next", QWEN3_NEXT),
    "qwen3.5": ("qwen3_5_text", QWEN3_5),
    "qwen3.5, one key head": ("qwen3_5_text", QWEN3_5 | {"linear_num_key_heads": 1, "tie_word_embeddings": True}),
    "qwen3.5 with experts": ("qwen3_5_moe_text", QWEN3_5_MOE),
    "glm4_moe": ("glm4_moe", GLM4_MOE),
    "glm4_moe, norms": ("glm4_moe", GLM4_MOE | {"use_qk_norm": True, "attention_bias": False, "norm_topk_prob": False}),
    "gpt_oss": ("gpt_oss", GPT_OSS),
    "gpt_oss, rounded": ("gpt_oss", GPT_OSS_ROUNDED),
    "phi3": ("phi3", {"sliding_window": 300}),
    "phi3, long": ("phi3", PHI3_LONG),
}
OF_FAMILY = {"llama": "llama 3", "mistral": "mistral 0.3", "gemma": "gemma 1", "gemma2": "gemma 2", "qwen2": "qwen 2"}
OF_FAMILY |= {"gemma3_text": "gemma 2", "gemma4_text": "gemma 4", "qwen3_next": "qwen 2"}
OF_FAMILY |= {"mixtral": "mixtral", "phi3": "llama 2", "qwen3": "qwen 2", "qwen3_5_text": "qwen 3.5"}
OF_FAMILY |= {"gpt_oss": "harmony", "glm4_moe": "llama 3", "qwen3_moe": "qwen 2", "qwen3_5_moe_text": "qwen 3.5"}
QUIET = {"progress": False}


@pytest.fixture(scope="session")
def model_of(tmp_path_factory):
    """(name of a model, dtype) -> a folder that transformers wrote, with eight rows more than there are tokens."""
    transformers = pytest.importorskip("transformers")
    built = {}

    def build(name: str, dtype: torch.dtype = torch.bfloat16) -> Path:
        if (name, dtype) not in built:
            family, fields = MODELS[name]
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                rows = rows_of(OF_FAMILY[family])
                sizes = SIZES | {"vocab_size": rows}
                sizes |= {"vocab_size_per_layer_input": rows} if family == "gemma4_text" else {}
                config = transformers.AutoConfig.for_model(family, **{**sizes, **fields})
                torch.manual_seed(0)
                model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.copy_(torch.randn_like(parameter) * (0.2 if parameter.dim() > 1 else 0.5))
                for buffer_name, buffer in model.named_buffers():
                    if buffer_name.endswith(("correction_bias", "layer_scalar")):
                        buffer.normal_()
            folder = built[name, dtype] = tmp_path_factory.mktemp("model") / "tiny"
            model.save_pretrained(folder)
            add_tokenizer(folder, OF_FAMILY[family])
        return built[name, dtype]

    return build


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A GGUF file of a Llama of one layer."""
    folder = tmp_path_factory.mktemp("gguf")
    to_gguf(small_model(folder / "hf", "llama 3"), folder / "tiny.gguf")
    return folder / "tiny.gguf"


def load(path, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return ligermodels.load(path, progress=False, **options)


# What is written

NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output", "model.layers": "blk",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm", "self_attn.o_proj": "attn_output",
    "self_attn.qkv_proj": "attn_qkv", "mlp.gate_proj": "ffn_gate",
    "mlp.gate_up_proj": "ffn_up", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    "block_sparse_moe.gate": "ffn_gate_inp", "mlp.gate": "ffn_gate_inp", "input_layernorm": "attn_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm", "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_z": "attn_gate", "linear_attn.in_proj_a": "ssm_alpha", "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.conv1d": "ssm_conv1d", "linear_attn.norm": "ssm_norm", "linear_attn.out_proj": "ssm_out",
    "mlp.shared_experts.gate_proj": "ffn_gate_shexp",
    "mlp.shared_experts.up_proj": "ffn_up_shexp", "mlp.shared_experts.down_proj": "ffn_down_shexp",
    "ffn_gate_inp.e_score_correction_bias": "exp_probs_b.bias",
    "linear_attn.A_log": "ssm_a", "linear_attn.dt_bias": "ssm_dt.bias",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp", "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp", "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "linear_attn.in_proj_ba": "ssm_ba", "model.embed_tokens_per_layer": "per_layer_token_embd",
    "model.per_layer_model_projection": "per_layer_model_proj",
    "model.per_layer_projection_norm": "per_layer_proj_norm", "per_layer_input_gate": "inp_gate",
    "per_layer_projection": "proj", "post_per_layer_input_norm": "post_norm",
    "layer_scalar": "layer_output_scale.weight", "router.proj": "ffn_gate_inp", "router.scale": "ffn_gate_inp.scale",
    "router.per_expert_scale": "ffn_down_exps.scale", "experts.gate_up_proj": "ffn_gate_up_exps.weight",
    "experts.down_proj": "ffn_down_exps.weight", "pre_feedforward_layernorm_2": "pre_ffw_norm_2",
    "post_feedforward_layernorm_1": "post_ffw_norm_1", "post_feedforward_layernorm_2": "post_ffw_norm_2",
    "mlp.router": "ffn_gate_inp", "self_attn.sinks": "attn_sinks.weight",
}  # fmt: skip
QWEN35 = ("qwen3_5_text", "qwen3_5_moe_text")
PLUS_ONE = ("gemma", "gemma2", "gemma3_text", "qwen3_next", *QWEN35)
AFTER = ("gemma2", "gemma3_text", "gemma4_text", "qwen3_next", *QWEN35, "glm4_moe", "gpt_oss")
EXPERTS = {"w1": "ffn_gate_exps", "w2": "ffn_down_exps", "w3": "ffn_up_exps"}
EXPERTS |= {"gate_proj": "ffn_gate_exps", "down_proj": "ffn_down_exps", "up_proj": "ffn_up_exps"}


def expected(folder: Path, family: str, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    config, found, experts = read_json(folder / "config.json"), {}, {}
    for name, x in load_file(folder / "model.safetensors").items():
        if match := re.fullmatch(r"model\.layers\.(\d+)\.\w+\.experts\.(\d+)\.(\w+)\.weight", name):
            experts.setdefault(f"blk.{match[1]}.{EXPERTS[match[3]]}.weight", {})[int(match[2])] = x.to(dtype)
            continue
        if family == "gpt_oss" and (
            match := re.fullmatch(r"model(\.layers\.\d+\.)mlp\.experts\.(\w+_proj)(_bias)?", name)
        ):
            x = x.float() if match[3] else x.mT.to(dtype)
            parts = {"gate": x[:, ::2], "up": x[:, 1::2]} if match[2] == "gate_up_proj" else {"down": x}
            kind, blk = "bias" if match[3] else "weight", match[1].replace(".layers", "blk")
            found |= {f"{blk}ffn_{part}_exps.{kind}": values.contiguous() for part, values in parts.items()}
            continue
        after = "post_attention_norm" if family in AFTER else "ffn_norm"
        ours = name.replace("post_attention_layernorm", after)
        for theirs, its in NAMES.items():
            ours = re.sub(rf"\b{re.escape(theirs)}\b", its, ours)
        if family in PLUS_ONE and name.endswith("norm.weight") and "linear_attn" not in name:
            x = x.float() + 1
        if name.endswith("in_proj_qkvz.weight"):  # the rows of two key heads: 16 of q, 16 of k, 3 x 16 of v and of z
            q, k, v, z = (torch.cat([x[at : at + n], x[128 + at : 128 + at + n]]).to(dtype) for at, n in Q_TO_Z)
            found[ours.replace("linear_attn.in_proj_qkvz", "attn_qkv")] = torch.cat([q, k, v])
            found[ours.replace("linear_attn.in_proj_qkvz", "attn_gate")] = z
            continue
        if family == "qwen3_next" and name.endswith("A_log"):
            x = -x.double().exp().float()
        elif family == "qwen3_next" and name.endswith("conv1d.weight"):
            x = x.flatten(1)
        elif ".linear_attn." in name and family != "qwen3_next":
            x = as_stored(name.rpartition("linear_attn.")[2], x, config["linear_num_key_heads"])
        if name.endswith("shared_expert_gate.weight"):
            x = x[0]
        if family in ("llama", "mistral", "mixtral") and ("q_proj" in name or "k_proj" in name):
            heads = config["num_attention_heads" if "q_proj" in name else "num_key_value_heads"]
            size = len(x) // heads  # row 2 j + s of each head is row j + s D / 2 of the source's head
            x = x[[h * size + j + s * size // 2 for h in range(heads) for j in range(size // 2) for s in (0, 1)]]
        found[ours] = x.float() if x.dim() == 1 or "gate_inp" in ours or "conv1d" in ours else x.to(dtype)
    return found | {name: torch.stack([parts[e] for e in sorted(parts)]) for name, parts in experts.items()}


Q_TO_Z = ((0, 16), (16, 16), (32, 48), (80, 48))


def as_stored(name: str, x: torch.Tensor, keys: int) -> torch.Tensor:
    """Head k + r K of the file, K = 2 or 1 key heads, is value head r + k 6 / K of the checkpoint."""
    heads = [r + k * 6 // keys for r in range(6 // keys) for k in range(keys)]
    if name == "A_log":
        return -x.double().exp().float()[heads]
    if name in ("dt_bias", "in_proj_a.weight", "in_proj_b.weight"):
        return x[heads]
    columns = [16 * head + i for head in heads for i in range(16)]
    if name == "in_proj_z.weight":
        return x[columns]
    if name == "out_proj.weight":
        return x[:, columns]
    if name in ("in_proj_qkv.weight", "conv1d.weight"):
        return torch.cat([x[: 32 * keys], x[32 * keys :][columns]]).flatten(1)
    return x


def divisor(i: int, dim: int, theta: float = 500000.0) -> float:
    """Llama 3.1's rule as its code has it: by the wavelength of frequency i."""
    wavelength = 2 * math.pi * theta ** (2 * i / dim)
    if wavelength < 8192 / 4:
        return 1.0
    if wavelength > 8192:
        return 8.0
    smooth = (8192 / wavelength - 1) / (4 - 1)
    return 1 / ((1 - smooth) / 8.0 + smooth)


def wanted_fields(name: str, rows: int) -> dict:
    family, fields = MODELS[name]
    arch = {
        "mistral": "llama",
        "mixtral": "llama",
        "gemma3_text": "gemma3",
        "qwen3_5_text": "qwen35",
        "qwen3_5_moe_text": "qwen35moe",
        "glm4_moe": "glm4moe",
        "qwen3_moe": "qwen3moe",
        "qwen3_next": "qwen3next",
        "gemma4_text": "gemma4",
        "gpt_oss": "gpt-oss",
    }
    arch = arch.get(family, family)
    size = fields.get("head_dim") or 8
    rotated = {"phi3, long": 6, "qwen3_next": 8, "qwen3_5_text": 8, "qwen3_5_moe_text": 8, "glm4_moe": 8}
    of_gemma4 = {
        "attention.key_length": 16, "attention.value_length": 16, "attention.key_length_swa": 8,
        "attention.value_length_swa": 8, "rope.dimension_count": 16, "rope.dimension_count_swa": 8,
        "rope.freq_base": 1e6, "rope.freq_base_swa": 1e4, "attention.sliding_window": 8,
        "attention.sliding_window_pattern": [True, False], "attention.shared_kv_layers": 0,
        "embedding_length_per_layer_input": 0,
    }  # fmt: skip
    own = {
        "vocab_size": rows, "context_length": 256, "embedding_length": 32,
        "block_count": fields.get("num_hidden_layers", 2), "feed_forward_length": 48,
        "attention.head_count": 4, "attention.head_count_kv": 2, "attention.key_length": size,
        "attention.value_length": size, "rope.dimension_count": rotated.get(name) or rotated.get(family) or size,
        "rope.freq_base": {"llama": 500000.0, "mixtral": 1000000.0, "gemma3": 1000000.0, "gpt_oss": 100.0}.get(
            name.partition(",")[0] if family == "gpt_oss" else name, 10000.0
        ),
        "attention.layer_norm_rms_epsilon": 1e-5 if family in ("mixtral", "phi3", "glm4_moe", "gpt_oss") else 1e-6,
    } | {
        "llama, tied": {"rope.scaling.type": "linear", "rope.scaling.factor": 2.0},
        "mistral, window": {"attention.sliding_window": 64},
        "mixtral": {"expert_count": 3, "expert_used_count": 2},
        "qwen3_moe": {"expert_count": 3, "expert_used_count": 2, "expert_feed_forward_length": 24},
        "gemma2": {"attention.sliding_window": 8, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
        "gemma3": {"attention.sliding_window": 8, "rope.scaling.type": "linear", "rope.scaling.factor": 8.0},
        "qwen3_next": {
            "ssm.conv_kernel": 4, "ssm.state_size": 16, "ssm.group_count": 2, "ssm.time_step_rank": 6,
            "ssm.inner_size": 96, "full_attention_interval": 2, "expert_count": 12, "expert_used_count": 2,
            "expert_feed_forward_length": 24, "expert_shared_feed_forward_length": 20,
        },
        "gemma4": of_gemma4,
        "gemma4, shared keys": of_gemma4 | {
            "attention.sliding_window_pattern": [True, False] * 3, "attention.shared_kv_layers": 2,
            "feed_forward_length": [48, 48, 48, 48, 96, 96], "embedding_length_per_layer_input": 10,
            "final_logit_softcapping": 2.5,
        },
        "gemma4, experts": of_gemma4 | {
            "attention.head_count_kv": [2, 1], "expert_count": 6, "expert_used_count": 2,
            "expert_feed_forward_length": 24,
        },
        "qwen2": {
            "rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 64,
            "rope.scaling.yarn_beta_fast": 16.0, "rope.scaling.yarn_beta_slow": 1.0,
        },
        **{
            one: {
                "ssm.conv_kernel": 4, "ssm.state_size": 16, "ssm.group_count": keys, "ssm.time_step_rank": 6,
                "ssm.inner_size": 96, "full_attention_interval": 2, "rope.dimension_sections": [2, 1, 1, 0],
            }
            for one, keys in (("qwen3.5", 2), ("qwen3.5, one key head", 1))
        },
        "qwen3.5 with experts": {
            "ssm.conv_kernel": 4, "ssm.state_size": 16, "ssm.group_count": 2, "ssm.time_step_rank": 6,
            "ssm.inner_size": 96, "full_attention_interval": 2, "rope.dimension_sections": [2, 1, 1, 0],
            "expert_count": 12, "expert_used_count": 2, "expert_feed_forward_length": 24,
            "expert_shared_feed_forward_length": 20,
        },
        **{
            one: {
                "expert_count": 12, "expert_used_count": 2, "expert_feed_forward_length": 24, "expert_shared_count": 1,
                "expert_weights_norm": normalised, "expert_weights_scale": 1.5, "expert_gating_func": 2,
                "leading_dense_block_count": 1,
            }
            for one, normalised in (("glm4_moe", True), ("glm4_moe, norms", False))
        },
        **{
            one: {
                "expert_count": 12, "expert_used_count": 2, "expert_feed_forward_length": 48,
                "attention.sliding_window": 8, "rope.scaling.type": "yarn", "rope.scaling.factor": 4.0,
                "rope.scaling.original_context_length": 64, "rope.scaling.yarn_beta_fast": 8.0,
                "rope.scaling.yarn_beta_slow": 1.0, **rounded,
            }
            for one, rounded in (("gpt_oss", {}), ("gpt_oss, rounded", {"rope.scaling.yarn_truncate": True}))
        },
        "phi3": {"attention.sliding_window": 300, "rope.scaling.original_context_length": 4096},
        "phi3, long": {
            "attention.sliding_window": 0, "rope.scaling.original_context_length": 64,
            "rope.scaling.attn_factor": math.sqrt(1 + math.log(4) / math.log(64)),
        },
    }.get(name, {})  # fmt: skip
    general = {"architecture": arch, "type": "model", "name": "tiny", "quantization_version": 2}
    return {f"{arch}.{key}": value for key, value in own.items()} | {f"general.{k}": v for k, v in general.items()}


def names_of_llama_cpp(family: str) -> set[str]:
    """The tensors that the gguf package knows of an architecture."""
    archs = {"mistral": "LLAMA", "mixtral": "LLAMA", "qwen3_moe": "QWEN3MOE", "gemma3_text": "GEMMA3"}
    archs |= {"gemma4_text": "GEMMA4", "qwen3_next": "QWEN3NEXT", "gpt_oss": "GPT_OSS"}
    archs |= {"qwen3_5_text": "QWEN35", "qwen3_5_moe_text": "QWEN35MOE"}
    archs |= {"qwen3_vl": "QWEN3VL", "qwen3_vl_moe": "QWEN3VLMOE"}
    arch = archs.get(family, family.upper())
    patterns = [gguf.TENSOR_NAMES[one] for one in gguf.MODEL_TENSORS[gguf.MODEL_ARCH[arch]]]
    names = {pattern.format(bid=layer) for pattern in patterns for layer in range(7)}
    return names | {f"{name}.{kind}" for name in names for kind in ("weight", "bias", "scale")}


@pytest.mark.parametrize("name, dtype", [*((name, "bf16") for name in MODELS), ("llama", "fp32"), ("mixtral", "fp16")])
def test_tensors_and_keys(tmp_path, model_of, name, dtype):
    folder, family = model_of(name), MODELS[name][0]
    report = to_gguf(folder, tmp_path / "out.gguf", dtype=dtype, verify="bytes")
    assert report.details["verified"] == "bytes" and report.ok
    found = tensors_of(tmp_path / "out.gguf")
    wanted = expected(folder, family, {"bf16": torch.bfloat16, "fp32": torch.float32, "fp16": torch.float16}[dtype])
    assert report.tensors == len(found)
    if name == "llama":
        divisors = torch.tensor([divisor(i, 8) for i in range(4)])
        torch.testing.assert_close(found.pop("rope_freqs.weight"), divisors)
    if name == "phi3, long":
        for length in ("long", "short"):
            wanted[f"rope_factors_{length}.weight"] = torch.tensor(LONGROPE[f"{length}_factor"])
    if family == "gemma4_text":  # half of the 8 pairs rotates
        wanted["rope_freqs.weight"] = torch.tensor([1.0] * 4 + [1e30] * 4)
    tied = name in ("llama, tied", "qwen3.5, one key head") or family.startswith("gemma")
    assert ("output.weight" in found) is not tied
    assert found.keys() <= names_of_llama_cpp(family)
    assert found.keys() == wanted.keys() and all(same_bits(found[tensor], wanted[tensor]) for tensor in wanted)
    fields = {k: v for k, v in fields_of(tmp_path / "out.gguf").items() if not k.startswith("tokenizer.")}
    wanted = wanted_fields(name, read_json(folder / "config.json")["vocab_size"])
    wanted["general.file_type"] = {"bf16": 32, "fp32": 0, "fp16": 1}[dtype]
    assert fields == {k: pytest.approx(v, rel=1e-6) if isinstance(v, float) else v for k, v in wanted.items()}


@pytest.mark.parametrize("name, arch", [("qwen3_moe", "qwen3moe"), ("qwen3.5 with experts", "qwen35moe")])
@pytest.mark.filterwarnings("ignore:.*1 . weight")
def test_experts_need_no_size_of_dense_blocks(tmp_path, name, arch):
    family, fields = MODELS[name]
    fields = {**fields, "num_hidden_layers": 2, "intermediate_size": None}
    source = small_model(tmp_path / "source", OF_FAMILY[family], family, **fields)
    to_gguf(source, tmp_path / "out.gguf", verify="bytes")
    assert f"{arch}.feed_forward_length" not in fields_of(tmp_path / "out.gguf")
    ids = torch.tensor([[5, 6, 7]])
    assert torch.equal(load(tmp_path / "out.gguf")(ids).logits, load(source)(ids).logits)


@pytest.mark.filterwarnings("ignore:.*1 . weight")
def test_experts_whose_gate_and_up_are_one_tensor(tmp_path):
    """As newer builds of llama.cpp write them where they are asked to; here with quantised rows."""
    sizes = QWEN3_5_MOE | {"num_hidden_layers": 2, "hidden_size": 64, "moe_intermediate_size": 32}
    to_gguf(small_model(tmp_path / "hf", "qwen 3.5", "qwen3_5_moe_text", **sizes), tmp_path / "float.gguf")
    gguf_files.quantised(tmp_path / "float.gguf", tmp_path / "apart.gguf", "Q8_0")
    ups = {x.name: np.array(x.data) for x in gguf.GGUFReader(tmp_path / "apart.gguf").tensors if "_up_exps" in x.name}

    def joined(tensor):
        kind, values = tensor.tensor_type, np.array(tensor.data)
        if "_gate_exps" in tensor.name:
            values = np.concatenate([values, ups[tensor.name.replace("gate", "up")]], axis=1)
        return values, kind if kind == gguf.GGMLQuantizationType.Q8_0 else None

    def name_of(name):
        return None if name in ups else name.replace("gate_exps", "gate_up_exps")

    rewritten(tmp_path / "apart.gguf", tmp_path / "joined.gguf", values_of=joined, name_of=name_of)
    apart, joint = load(tmp_path / "apart.gguf"), load(tmp_path / "joined.gguf")
    assert all(same_bits(a, b) for a, b in zip(apart.parameters(), joint.parameters(), strict=True))


def test_phi_3_in_the_name():
    """llama.cpp looks for Phi-3's special tokens in models with this name, and ends where there are none."""
    assert [gguf_writer._named(name, False) for name in ("My-Phi3", "tuned")] == ["My-phi", "tuned"]
    assert [gguf_writer._named(name, True) for name in ("my-phi-3", "tuned")] == ["my-phi-3", "tuned (Phi-3)"]


@pytest.mark.parametrize("folders, name", [
    ("Tiny-1B", "Tiny-1B"), ("runs/chat/model", "chat"), ("Tiny-1B.Q4_0.gguf", "Tiny-1B.Q4_0"),
    ("hub/models--someone--Tiny-1B/snapshots/0123456789abcdef", "Tiny-1B"),
])  # fmt: skip
def test_the_name_of_a_model(tmp_path, monkeypatch, folders, name):
    monkeypatch.chdir(tmp_path)
    place = tmp_path / folders
    place.parent.mkdir(parents=True, exist_ok=True)
    place.touch() if place.suffix == ".gguf" else place.mkdir()
    assert gguf_writer.model_name(folders) == gguf_writer.model_name(place) == name
    (tmp_path / "tuned" / "adapter").mkdir(parents=True)
    assert gguf_writer.model_name(place, "tuned/adapter") == f"{name}-tuned"
    assert gguf_writer.model_name("someone/Tiny-1B-Instruct") == "Tiny-1B-Instruct"


def test_the_command(tmp_path, model_of, capsys):
    command = ["convert", str(model_of("llama")), str(tmp_path / "new" / "out.gguf"), "--json"]
    assert cli.main([*command, "--dry-run"]) == 0 and not (tmp_path / "new").exists()
    planned = json.loads(capsys.readouterr().out)
    assert cli.main([*command, "--verify", "bytes"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] and (report["tensors"], report["bytes"]) == (planned["tensors"], planned["bytes"])
    assert left(tmp_path / "new") == ["out.gguf"] and (report["to"], report["name"]) == ("gguf", "tiny")
    assert set(report["dtypes"]) == {"bfloat16", "float32"}  # the norms
    assert cli.main(command) == 2 and "--overwrite" in capsys.readouterr().err
    assert cli.main([*command[:-1], "--overwrite", "--name", "Tiny"]) == 0 and "name: Tiny\n" in capsys.readouterr().out
    assert fields_of(tmp_path / "new" / "out.gguf")["general.name"] == "Tiny"


@pytest.mark.parametrize("name", ["out.GGUF", "out.Gguf"])
def test_the_ending_of_a_file_in_another_case(tmp_path, model_of, name):
    with pytest.raises(InputError, match="max_shard_size is for folders"):
        to_gguf(model_of("llama"), tmp_path / name, max_shard_size="1GB")
    to_gguf(model_of("llama"), tmp_path / "lower.gguf")
    to_gguf(model_of("llama"), tmp_path / name, verify="bytes")
    assert (tmp_path / name).read_bytes() == (tmp_path / "lower.gguf").read_bytes()
    assert gguf_writer.model_name(tmp_path / name) == "out"
    for src in (tmp_path / name, str(tmp_path / name)):
        assert type(ligermodels.load(src)).__name__ == "Llama"
    with pytest.raises(InputError, match="has the name of a vision tower's file"):
        to_gguf(model_of("llama"), tmp_path / f"mmproj-{name}")


def test_a_link_to_a_file_of_another_name(tmp_path, model_of):
    (tmp_path / "out.gguf").symlink_to(tmp_path / "blob")
    to_gguf(model_of("llama"), tmp_path / "out.gguf")
    assert (tmp_path / "blob").read_bytes()[:4] == b"GGUF"


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
    (tmp_path / "out.gguf").write_bytes(b"old")
    with pytest.raises(MismatchError, match="values differ" if where == "a tensor" else "context_length"):
        to_gguf(model_of("llama"), tmp_path / "out.gguf", overwrite=True, verify=level)
    assert (tmp_path / "out.gguf").read_bytes() == b"old" and left(tmp_path) == ["out.gguf"]


LOSSES = {
    "llama": (), "gemma": ("as 1 + weight, in fp32",), "gemma2": ("as 1 + weight, in fp32",), "phi3": (),
    "phi3, long": ("by its context size",), "qwen2": ("ignores the NFC",),
    "gemma4": (), "gpt_oss": ("rounds the ends of YaRN",), "gpt_oss, rounded": (),
    "qwen3_next": ("as 1 + weight and A_log as -exp(A_log), in fp32",),
    **dict.fromkeys(("qwen3.5", "qwen3.5 with experts"), ("as 1 + weight and A_log as -exp(A_log), in fp32",)),
}  # fmt: skip


@pytest.mark.filterwarnings("always::UserWarning")
@pytest.mark.parametrize("name", LOSSES)
def test_each_loss_is_a_line_on_stderr(tmp_path, model_of, capsys, name):
    source = shutil.copytree(model_of(name), tmp_path / "source")
    if name == "qwen2":
        state = read_json(source / "tokenizer.json") | {"normalizer": {"type": "NFC"}}
        (source / "tokenizer.json").write_text(json.dumps(state))
    sampling = ({"temperature": 0.6, "top_k": 7}, ("temperature, top_k of generation_config.json",))
    for settings, named in (sampling, ({"eos_token_id": 2, "top_p": None}, ())):
        (source / "generation_config.json").write_text(json.dumps(settings))
        assert cli.main(["convert", str(source), str(tmp_path / "out.gguf"), "--overwrite"]) == 0
        lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("warning: ")]
        assert len(lines) == len(LOSSES[name] + named)
        assert all(any(message in line for line in lines) for message in LOSSES[name] + named)


# What is not written

ROPE = {"factor": 2.0, "original_max_position_embeddings": 64}
OTHER_ROPE = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4, **ROPE}
REFUSED = [
    ("llama", {"hidden_act": "gelu"}, "hidden_act gelu"),
    ("gemma2", {"hidden_activation": "gelu", **GEMMA2}, "hidden_act gelu"),
    ("gemma", {"tie_word_embeddings": False, "head_dim": 8}, "a head of its own"),
    ("gemma", {**GEMMA, "attention_bias": True}, "attention_bias"),
    ("gemma2", {**GEMMA, "query_pre_attn_scalar": 144}, "query_pre_attn_scalar 144"),
    ("gemma2", {**GEMMA2, "attn_logit_softcapping": None}, "softcapping null"),
    ("gemma2", {**GEMMA2, "layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
    ("gemma3_text", {**GEMMA3, "final_logit_softcapping": 30.0}, "final_logit_softcapping 30"),
    ("gemma3_text", {**GEMMA3, "layer_types": ["full_attention"] * 7}, "layer_types other than full attention in"),
    ("gemma3_text", {**GEMMA3, "rope_local_base_freq": 2e4}, "the rope .*20000.* of sliding layers"),
    ("gemma4_text", {**GEMMA4, "attention_bias": True}, "attention_bias"),
    ("gemma4_text", {**GEMMA4, "layer_types": [FULL, FULL], "sliding_window": None}, "sliding_window null"),
    ("gemma4_text", {**GEMMA4, "rope_parameters": {**GEMMA4["rope_parameters"], FULL: {"rope_theta": 1e6}}},
     "the rope .*default.* of full blocks"),
    ("gemma4_text", {**GEMMA4, "rope_parameters": {**GEMMA4["rope_parameters"], SLIDING: {
        "rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}}, "the rope .*linear.* of sliding blocks"),
    ("gemma4_text", {**GEMMA4_SHARED, "num_kv_shared_layers": 3}, "num_kv_shared_layers without"),
    ("gemma4_text", {**GEMMA4_SHARED, "vocab_size_per_layer_input": 99}, "vocab_size_per_layer_input 99"),
    ("llama", {"rope_scaling": {"rope_type": "proportional"}}, "rope_type proportional"),
    ("qwen3_next", {**QWEN3_NEXT, "norm_topk_prob": False}, "norm_topk_prob false"),
    ("qwen3_next", {**QWEN3_NEXT, "mlp_only_layers": [1]}, "blocks without experts"),
    ("qwen3_next", {**QWEN3_NEXT, "linear_value_head_dim": 8}, r"linear_value_head_dim 8 \(it takes 16"),
    ("qwen3_next", {**QWEN3_NEXT, "layer_types": ["full_attention", "linear_attention"]}, "layer_types other than"),
    ("qwen3_moe", {**QWEN3_MOE, "norm_topk_prob": False}, "norm_topk_prob false"),
    ("qwen3_moe", {**QWEN3_MOE, "mlp_only_layers": [1]}, "blocks without experts"),
    ("qwen3_moe", {**QWEN3_MOE, "attention_bias": True}, "attention_bias"),
    ("qwen3_5_text", {**QWEN3_5, "attention_bias": True}, "attention_bias"),
    ("qwen3_5_text", {**QWEN3_5, "linear_value_head_dim": 8}, r"linear_value_head_dim 8 \(it takes 16"),
    ("qwen3_5_text", {**QWEN3_5, "layer_types": ["full_attention", "linear_attention"]}, "layer_types other than"),
    ("qwen3_5_moe_text", {**QWEN3_5_MOE, "attention_bias": True}, "attention_bias"),
    ("qwen3_5_moe_text", {**QWEN3_5_MOE, "linear_value_head_dim": 8}, r"linear_value_head_dim 8 \(it takes 16"),
    ("phi3", {"head_dim": 16}, "head_dim 16"),
    ("glm4_moe", {**GLM4_MOE, "n_routed_experts": 4, "n_group": 2}, "n_group 2"),
    ("gpt_oss", {**GPT_OSS, "swiglu_limit": 9.0}, r"swiglu_limit 9.0 \(it takes 7\)"),
    ("gpt_oss", {**GPT_OSS, "swiglu_alpha": 1.0}, r"swiglu_alpha 1.0 \(it takes 1.702\)"),
    ("gpt_oss", {**GPT_OSS, "attention_bias": False}, "attention_bias false"),
    ("gpt_oss", {**GPT_OSS, "tie_word_embeddings": True}, "a tied head"),
    ("gpt_oss", {**GPT_OSS, "sliding_window": None, "layer_types": [FULL, FULL]}, "sliding_window null; layer_types"),
    ("gpt_oss", {**GPT_OSS, "layer_types": [FULL, SLIDING]}, "layer_types other than sliding, full"),
    ("gpt_oss", {**GPT_OSS, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, "rope_type default"),
    ("gpt_oss", {**GPT_OSS, "rope_parameters": {"rope_type": "linear", "factor": 2.0}}, "rope_type linear"),
    ("llama", {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type dynamic"),
    ("qwen2", {"rope_scaling": LLAMA3}, "rope_type llama3"),
    ("llama", {"rope_scaling": OTHER_ROPE}, "rope_type longrope"),
    ("llama", {"rope_scaling": {**YARN, "attention_factor": 1.5}}, "attention_factor 1.5"),
    ("qwen2", {"rope_scaling": {**YARN, "truncate": False}}, "truncate false"),
]  # fmt: skip


@pytest.mark.parametrize("family, fields, message", REFUSED)
@pytest.mark.filterwarnings("ignore")
def test_what_llama_cpp_does_not_compute(tmp_path, family, fields, message):
    source = small_model(tmp_path / "source", "llama 3", family, **{"num_hidden_layers": 2, **fields})
    with pytest.raises(ConfigError, match=f"llama.cpp does not compute .*{message}"):
        to_gguf(source, tmp_path / "out.gguf", dry_run=True)


FIXTURES = [
    path
    for path in sorted((Path(__file__).parents[1] / "fixtures" / "configs").glob("*.json"))
    if read_json(path)["model_type"] in gguf_writer.FAMILIES
]


@pytest.mark.parametrize("path", FIXTURES, ids=lambda path: path.stem)
def test_every_released_model_is_computed(path):
    """Nothing is refused; a warning names the windows of Mistral 0.1 and Phi-3."""
    model = ARCHS[read_json(path)["model_type"]].from_config(read_json(path), device="meta")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        gguf_writer.check(model, path.stem)
    windows = ("Mistral-7B-v0.1", "Phi-3-mini-4k-instruct", "Phi-3-medium-4k-instruct")
    assert any("window" in str(warning.message) for warning in caught) == (path.stem in windows)


def test_a_missing_package_an_unknown_family_and_options(tmp_path, model_of, monkeypatch):
    source, target = model_of("llama"), tmp_path / "out.gguf"
    (tmp_path / "folder.gguf").mkdir()
    for place, options, message in (
        (target, {"max_shard_size": "1GB"}, "is for folders"),
        (tmp_path / "folder.gguf", {}, r"give its name, such as .*model\.gguf"),
    ):
        with pytest.raises(InputError, match=message):
            to_gguf(source, place, **options)
    with monkeypatch.context() as patch, pytest.raises(ConfigError, match=r"pip install 'ligermodels\[gguf\]'"):
        patch.setitem(sys.modules, "gguf", None)
        to_gguf(source, target)
    monkeypatch.delitem(gguf_writer.FAMILIES, "llama")
    with pytest.raises(ConfigError, match=r"is a llama, and GGUF files are written for mistral, .* alone"):
        to_gguf(source, target)


def test_float64_is_cast_only_when_asked(tmp_path, model_of):
    source = shutil.copytree(model_of("llama", torch.float32), tmp_path / "source")
    content = load_file(source / "model.safetensors")
    save_file({name: x.double() for name, x in content.items()}, source / "model.safetensors")
    with pytest.raises(InputError, match="--dtype fp32"):
        to_gguf(source, tmp_path / "out.gguf")
    to_gguf(source, tmp_path / "out.gguf", dtype="fp32")
    assert all(x.dtype == torch.float32 for x in tensors_of(tmp_path / "out.gguf").values())


# What is read


@pytest.mark.parametrize("name, dtype", [*((name, "fp32") for name in MODELS), ("gemma2", "fp16"), ("mixtral", "bf16"),
    ("qwen3.5", "bf16"),
])  # fmt: skip
def test_every_family_there_and_back(tmp_path, model_of, name, dtype):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        convert(model_of(name, torch.float32), tmp_path / "cast", Options(dtype=dtype, **QUIET))
        to_gguf(tmp_path / "cast", tmp_path / "model.gguf")
        convert(tmp_path / "model.gguf", tmp_path / "back", Options(**QUIET))
    there, back = (load_file(tmp_path / folder / "model.safetensors") for folder in ("cast", "back"))
    assert there.keys() == back.keys()
    for tensor, values in there.items():
        if MODELS[name][0] in PLUS_ONE and tensor.endswith("norm.weight") and "linear_attn" not in tensor:
            values = ((values.float() + 1) - 1).to(values.dtype)  # the sum in the file is rounded to fp32
        if tensor.endswith("A_log") and dtype == "fp32":
            values = values.double().exp().float().double().log().float()
        assert same_bits(back[tensor], values), tensor
    a, b = (ligermodels.load(tmp_path / folder, progress=False) for folder in ("cast", "model.gguf"))
    ids = torch.arange(90).reshape(1, 90) % 97
    with torch.no_grad():
        difference = (a(ids).logits - b(ids).logits).abs().max()
    assert difference <= (1e-5 if MODELS[name][0] in PLUS_ONE or name == "llama" else 0), difference
    # A Mistral without a window is a Llama; LongRoPE's factor follows from the two lengths.
    left_out = {"dtype", "initializer_range", "pad_token_id", "bos_token_id", "eos_token_id", "sliding_window"}
    left_out |= {"router_aux_loss_coef", "max_window_layers", "use_sliding_window", "layer_types", "head_dim"}
    one, other = ({k: v for k, v in model.config.values().items() if k not in left_out} for model in (a, b))
    assert {key: other[key] for key in one} == one
    assert [a.config.window(i) for i in (0, 1)] == [b.config.window(i) for i in (0, 1)]


@pytest.mark.parametrize("family, layers", [("gemma2", 46), ("gemma3_text", 62)])
def test_the_27b_of_gemma_is_known_by_its_number_of_layers(tmp_path, family, layers):
    """Its queries alone are scaled by the width of the model, which no key of the file says."""
    sizes = {"num_hidden_layers": layers, "head_dim": 16, "query_pre_attn_scalar": 8}
    small_model(tmp_path / "hf", "gemma 2", family, tie_word_embeddings=True, **sizes)
    to_gguf(tmp_path / "hf", tmp_path / "model.gguf")
    assert load(tmp_path / "model.gguf").config.query_pre_attn_scalar == 8


def test_the_layer_after_the_last_of_glm(tmp_path, model_of):
    """With its copies of the embedding and the head; both sides count it among the blocks."""
    source = shutil.copytree(model_of("glm4_moe", torch.float32), tmp_path / "tiny")
    tensors = load_file(source / "model.safetensors")
    ahead = {
        "model.layers.2." + name[15:]: x.clone() for name, x in tensors.items() if name.startswith("model.layers.1.")
    }
    shapes = {"eh_proj": (32, 64), "enorm": (32,), "hnorm": (32,), "shared_head.norm": (32,)}
    shapes |= dict.fromkeys(("embed_tokens", "shared_head.head"), tuple(tensors["lm_head.weight"].shape))
    tensors |= ahead | {f"model.layers.2.{name}.weight": torch.randn(shape) for name, shape in shapes.items()}
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    config = read_json(source / "config.json") | {"num_nextn_predict_layers": 1}
    (source / "config.json").write_text(json.dumps(config))
    to_gguf(source, tmp_path / "out.gguf", verify="bytes")
    fields, found = fields_of(tmp_path / "out.gguf"), tensors_of(tmp_path / "out.gguf")
    assert (fields["glm4moe.block_count"], fields["glm4moe.nextn_predict_layers"]) == (3, 1)
    names = {"eh_proj": "eh_proj", "enorm": "enorm", "hnorm": "hnorm", "embed_tokens": "embed_tokens"}
    names |= {"shared_head_norm": "shared_head.norm", "shared_head_head": "shared_head.head"}
    for theirs, ours in names.items():
        assert same_bits(found[f"blk.2.nextn.{theirs}.weight"], tensors[f"model.layers.2.{ours}.weight"])
    convert(tmp_path / "out.gguf", tmp_path / "back", Options(**QUIET))
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert back.keys() == tensors.keys() and all(same_bits(back[name], tensors[name]) for name in tensors)
    assert load(tmp_path / "back").config.num_hidden_layers == 2
    load_mtp(load(tmp_path / "out.gguf"))


@pytest.mark.filterwarnings("ignore:.*1 . weight")
def test_the_layer_for_multi_token_prediction(tmp_path, model_of):
    """llama.cpp counts it among the blocks, as the last one."""
    source = shutil.copytree(model_of("qwen3.5", torch.float32), tmp_path / "tiny")
    mtp = mtp_tensors(read_json(source / "config.json"))
    save_file(load_file(source / "model.safetensors") | mtp, source / "model.safetensors")
    to_gguf(source, tmp_path / "out.gguf", verify="bytes")
    fields, found = fields_of(tmp_path / "out.gguf"), tensors_of(tmp_path / "out.gguf")
    assert (fields["qwen35.block_count"], fields["qwen35.nextn_predict_layers"]) == (3, 1)
    names = {
        "eh_proj": "fc",
        "enorm": "pre_fc_norm_embedding",
        "hnorm": "pre_fc_norm_hidden",
        "shared_head_norm": "norm",
    }
    assert {name for name in found if "nextn" in name} == {f"blk.2.nextn.{name}.weight" for name in names}
    for theirs, ours in names.items():
        wanted = mtp[f"mtp.{ours}.weight"]
        assert same_bits(found[f"blk.2.nextn.{theirs}.weight"], wanted if ours == "fc" else wanted + 1)
    assert same_bits(found["blk.2.attn_q.weight"], mtp["mtp.layers.0.self_attn.q_proj.weight"])
    assert same_bits(found["blk.2.attn_norm.weight"], mtp["mtp.layers.0.input_layernorm.weight"] + 1)
    convert(tmp_path / "out.gguf", tmp_path / "back", Options(**QUIET))
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert back.keys() == load_file(source / "model.safetensors").keys()
    assert all(torch.allclose(back[name], mtp[name], rtol=0, atol=1.2e-7) for name in mtp)
    assert load(tmp_path / "out.gguf").config.extra["mtp_num_hidden_layers"] == 1


@pytest.mark.parametrize("apart", [False, True], ids=["stacked", "by expert"])
@pytest.mark.filterwarnings("ignore:.*1 . weight")
def test_the_experts_of_the_layer_for_multi_token_prediction(tmp_path, model_of, apart):
    """Twelve of them: in a file of safetensors, expert 10 stands before expert 2."""
    source = shutil.copytree(model_of("qwen3.5 with experts", torch.float32), tmp_path / "tiny")
    config = read_json(source / "config.json") | {"mtp_num_hidden_layers": 1}
    (source / "config.json").write_text(json.dumps(config))
    mtp = mtp_tensors_with_experts(config)
    gate_up, down = (mtp[f"mtp.layers.0.mlp.experts.{name}"] for name in ("gate_up_proj", "down_proj"))
    parts = {"gate": gate_up[:, :24], "up": gate_up[:, 24:], "down": down}
    if apart:
        mtp = {name: x for name, x in mtp.items() if ".experts." not in name}
        for name, whole in parts.items():
            mtp |= {f"mtp.layers.0.mlp.experts.{e}.{name}_proj.weight": x.clone() for e, x in enumerate(whole)}
    save_file(load_file(source / "model.safetensors") | mtp, source / "model.safetensors")
    to_gguf(source, tmp_path / "out.gguf", verify="bytes")
    fields, found = fields_of(tmp_path / "out.gguf"), tensors_of(tmp_path / "out.gguf")
    assert (fields["qwen35moe.block_count"], fields["qwen35moe.nextn_predict_layers"]) == (3, 1)
    assert all(same_bits(found[f"blk.2.ffn_{name}_exps.weight"], x) for name, x in parts.items())
    assert same_bits(found["blk.2.ffn_gate_inp_shexp.weight"], mtp["mtp.layers.0.mlp.shared_expert_gate.weight"][0])
    assert same_bits(found["blk.2.nextn.eh_proj.weight"], mtp["mtp.fc.weight"])
    a, b = (load_mtp(load(path)).state_dict() for path in (source, tmp_path / "out.gguf"))
    assert a.keys() == b.keys() and len(a) > 15
    assert all(torch.allclose(a[name], b[name], rtol=0, atol=1.2e-7 * ("norm" in name)) for name in a)


@pytest.mark.parametrize("name", ["qwen3.5", "qwen3.5 with experts"])
@pytest.mark.filterwarnings("ignore:.*only the text model is read", "ignore:.*1 . weight")
def test_the_text_of_a_model_that_reads_images(tmp_path, model_of, name):
    text, images = model_of(name), with_images(model_of(name), tmp_path / "tiny")
    tensors = load_file(images / "model.safetensors")
    del tensors["mtp.fc.weight"]
    save_file(tensors, images / "model.safetensors")
    add_tokenizer(images, "qwen 3.5")
    shutil.copy(text / "generation_config.json", images)
    for source, kind in ((text, "text"), (images, "images")):
        to_gguf(source, tmp_path / f"{kind}.gguf", name="tiny", verify="bytes")
    assert (tmp_path / "text.gguf").read_bytes() == (tmp_path / "images.gguf").read_bytes()


@pytest.mark.filterwarnings("ignore:.*1 . weight")
def test_the_layer_of_qwen3_next_for_multi_token_prediction_is_left_out(tmp_path, model_of):
    source = shutil.copytree(model_of("qwen3_next", torch.float32), tmp_path / "tiny")
    to_gguf(source, tmp_path / "without.gguf")
    mtp = mtp_tensors_with_experts(read_json(source / "config.json"))
    save_file(load_file(source / "model.safetensors") | mtp, source / "model.safetensors")
    with pytest.warns(UserWarning, match=r"multi-token prediction \(mtp\.\*\) is left out"):
        to_gguf(source, tmp_path / "out.gguf", verify="bytes")
    assert (tmp_path / "out.gguf").read_bytes() == (tmp_path / "without.gguf").read_bytes()


def test_a_part_of_a_projection_of_qwen3_next_that_is_missing(tmp_path, model_of):
    to_gguf(model_of("qwen3_next", torch.float32), tmp_path / "model.gguf")
    gate = "blk.0.attn_gate.weight"
    rewritten(tmp_path / "model.gguf", tmp_path / "bad.gguf", name_of=lambda name: None if name == gate else name)
    with pytest.raises(CheckpointError, match=r"lacks blk\.0\.attn_gate\.weight, a part of .*in_proj_qkvz"):
        ligermodels.load(tmp_path / "bad.gguf", **QUIET)


@pytest.mark.parametrize("family, config, kind", [
    ("gemma3", gemma3_vl.tiny(num_hidden_layers=6, query_pre_attn_scalar=8, head_dim=8, layer_types=None), "gemma 2"),
    ("gemma4", gemma4_vl.tiny(), "gemma 4"),
])  # fmt: skip
@pytest.mark.filterwarnings("ignore:.*(1 . weight|only the text model is read)")
def test_the_text_of_gemma_with_images(tmp_path, family, config, kind):
    text = config["text_config"] | {"vocab_size": rows_of(kind), "model_type": f"{family}_text"}
    text |= {"vocab_size_per_layer_input": rows_of(kind)} if family == "gemma4" else {"rope_parameters": None}
    text = {name: value for name, value in text.items() if value is not None}
    whole = ARCHS[family].from_config({**config, "text_config": text}, device="cpu", seed=1)
    whole.save_pretrained(tmp_path / "images")
    add_tokenizer(tmp_path / "images", kind)
    to_gguf(tmp_path / "images", tmp_path / "out.gguf", verify="bytes")
    assert fields_of(tmp_path / "out.gguf")["general.architecture"] == family
    back, ids = load(tmp_path / "out.gguf"), torch.arange(40).reshape(1, 40)
    assert back.config.model_type == f"{family}_text"
    torch.testing.assert_close(back(ids).logits, whole(ids).logits, rtol=0, atol=1e-5)


def test_a_cap_of_gemma_3(tmp_path, model_of):
    """No released file has one; newer builds of llama.cpp compute it."""
    to_gguf(model_of("gemma3"), tmp_path / "model.gguf", dtype="fp32")
    put("gemma3.final_logit_softcapping", 0.5)(tmp_path / "model.gguf", tmp_path / "capped.gguf")
    plain, capped, ids = load(tmp_path / "model.gguf"), load(tmp_path / "capped.gguf"), torch.arange(9).reshape(1, 9)
    torch.testing.assert_close(capped(ids).logits, 0.5 * (plain(ids).logits / 0.5).tanh())


def other_table(tensor):
    return np.array(tensor.data) * (0.5 if tensor.name == "rope_freqs.weight" else 1), None


@pytest.mark.parametrize("name, change, message", [
    ("gemma4", {"rope.dimension_count_swa": 4}, "rope.dimension_count_swa 4 is not attention.key_length_swa"),
    ("gemma4", {"attention.head_count_kv": [2, 1]}, "full blocks with attn_v have 1 key heads"),
    ("gemma4", {"attention.sliding_window_pattern": [True]}, "has 1 values for 2 layers"),
    ("gemma4, shared keys", {"attention.head_count_kv": [2, 1, 1, 1, 1, 1]}, "differs between blocks of one kind"),
    ("gemma4, shared keys", {"feed_forward_length": [48, 48, 48, 96, 96, 96]}, "is not double from block 4 on"),
    ("gemma4", other_table, "rope_freqs.weight is not 8 numbers, of which the first are 1"),
])  # fmt: skip
def test_a_file_of_gemma_4_that_is_not_computed(tmp_path, model_of, name, change, message):
    to_gguf(model_of(name, torch.float32), tmp_path / "model.gguf")
    if callable(change):
        rewritten(tmp_path / "model.gguf", tmp_path / "bad.gguf", values_of=change)
    else:
        arrays = [gguf.GGUFValueType.ARRAY, gguf.GGUFValueType.INT32]
        values = {f"gemma4.{key}": (x, arrays if isinstance(x, list) else NEW[int]) for key, x in change.items()}
        rewritten(tmp_path / "model.gguf", tmp_path / "bad.gguf", lambda fields: fields.update(values))
    with pytest.raises(ConfigError, match=message):
        ligermodels.load(tmp_path / "bad.gguf", **QUIET)


def with_tower(folder: Path, family: str, **fields) -> Path:
    """A model of the family that reads images, with a tokenizer. DeepStack adds to the first two of its blocks."""
    fields = {"vocab_size": rows_of("qwen 2"), "num_hidden_layers": 3, "max_position_embeddings": 256, **fields}
    config = {"qwen3_vl": qwen3_vl, "qwen3_vl_moe": qwen3_vl_moe}[family](**fields)
    ARCHS[family].from_config(config, device="cpu", seed=1).save_pretrained(folder)
    add_tokenizer(folder, "qwen 2")
    return folder


@pytest.mark.parametrize("family, text", [("qwen3_vl", "qwen3"), ("qwen3_vl_moe", "qwen3_moe")])
def test_the_text_of_qwen3_vl(tmp_path, family, text):
    """It is read as a Qwen3, or a Qwen3-MoE: without images they compute the same."""
    source, arch = with_tower(tmp_path / "source", family), family.replace("_", "")
    with pytest.warns(UserWarning, match=r"only the text is written\. --mmproj"):
        to_gguf(source, tmp_path / "out.gguf", verify="bytes")
    fields, found = fields_of(tmp_path / "out.gguf"), tensors_of(tmp_path / "out.gguf")
    assert fields["general.architecture"] == arch and found.keys() <= names_of_llama_cpp(family)
    assert (fields[f"{arch}.rope.dimension_sections"], fields[f"{arch}.n_deepstack_layers"]) == ([2, 1, 1, 0], 2)
    assert (fields[f"{arch}.block_count"], fields[f"{arch}.rope.dimension_count"]) == (3, 8)
    if "moe" in family:
        whole, experts = load_file(source / "model.safetensors"), "model.language_model.layers.1.mlp.experts."
        gate_up, down = whole[f"{experts}gate_up_proj"], whole[f"{experts}down_proj"]
        assert gate_up.shape == (4, 32, 40)  # transposed, as in released files
        for part, x in {"gate": gate_up[..., :20], "up": gate_up[..., 20:], "down": down}.items():
            assert same_bits(found[f"blk.1.ffn_{part}_exps.weight"], x.transpose(1, 2))
    model, back, ids = load(source), load(tmp_path / "out.gguf"), torch.arange(90).reshape(1, 90)
    assert back.config.model_type == text
    assert torch.equal(back(ids).logits, model(ids).logits)


@pytest.mark.parametrize("family, fields, message", [
    ("qwen3_vl", {"num_hidden_layers": 2}, "deepstack_visual_indexes of 2 blocks"),
    ("qwen3_vl", {"attention_bias": True}, "attention_bias"),
    ("qwen3_vl_moe", {"mlp_only_layers": [1]}, "blocks without experts"),
])  # fmt: skip
def test_the_text_of_qwen3_vl_that_llama_cpp_does_not_compute(tmp_path, family, fields, message):
    source = with_tower(tmp_path / "source", family, **fields)
    with pytest.raises(ConfigError, match=f"llama.cpp does not compute .*{message}"):
        to_gguf(source, tmp_path / "out.gguf", dry_run=True)


def test_a_file_of_qwen3_5_that_is_not_computed(tmp_path, model_of):
    to_gguf(model_of("qwen3.5", torch.float32), tmp_path / "model.gguf")

    def positive(tensor):
        return np.array(tensor.data) * (-1 if tensor.name.endswith("ssm_a") else 1), None

    rewritten(tmp_path / "model.gguf", tmp_path / "positive.gguf", values_of=positive)
    put("qwen35.ssm.inner_size", 48)(tmp_path / "model.gguf", tmp_path / "sizes.gguf")
    for name, error, message in (
        ("positive", CheckpointError, r"A_log in the file are above 0"),
        ("sizes", ConfigError, "ssm.inner_size 48 is not ssm.time_step_rank heads of 16"),
    ):
        with pytest.raises(error, match=message):
            ligermodels.load(tmp_path / f"{name}.gguf", progress=False)


def test_norms_that_a_half_does_not_hold_stay_fp32(tmp_path, model_of):
    source = model_of("qwen3", torch.float32)
    to_gguf(source, tmp_path / "model.gguf", dtype="fp16")
    convert(tmp_path / "model.gguf", tmp_path / "back", Options(**QUIET))
    there, back = (load_file(folder / "model.safetensors") for folder in (source, tmp_path / "back"))
    assert all(same_bits(back[name], x if x.dim() == 1 else x.half()) for name, x in there.items())
    assert load(tmp_path / "model.gguf").dtype == torch.float16


QUANTISED = [name for name in TYPES.values() if name not in ("F32", "F16", "BF16")]


@pytest.mark.parametrize("type_name, family", [*((name, "llama") for name in QUANTISED), ("Q8_0", "mixtral")])
def test_quantised_tensors_are_those_of_the_gguf_package(tmp_path, type_name, family):
    sizes = {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 8, "num_key_value_heads": 4}
    sizes |= {"head_dim": 32, "num_local_experts": 2} if family == "mixtral" else {}
    to_gguf(small_model(tmp_path / "hf", OF_FAMILY[family], family, **sizes), tmp_path / "float.gguf", dtype="fp32")
    wanted = gguf_files.quantised(tmp_path / "float.gguf", tmp_path / "model.gguf", type_name)
    found = inspect(tmp_path / "model.gguf")
    assert found.ok and set(found.dtypes) == {"F32", type_name} and found.layout == "GGUF"
    model = load(tmp_path / "model.gguf")
    assert model.dtype == torch.float32
    to_gguf(tmp_path / "model.gguf", tmp_path / "again.gguf")  # the writer puts rows back where they were
    again = tensors_of(tmp_path / "again.gguf")
    assert again.keys() == wanted.keys() and all(same_bits(again[name], wanted[name]) for name in wanted)
    half = load(tmp_path / "model.gguf", dtype="bfloat16")
    assert all(same_bits(a.bfloat16(), b) for a, b in zip(model.parameters(), half.parameters(), strict=True))


def test_it_opens_by_its_name_and_by_its_folder(tiny, tmp_path, monkeypatch):
    shutil.copy(tiny, tmp_path / "x.gguf")
    monkeypatch.chdir(tmp_path)
    for name in ("x.gguf", str(tmp_path), tmp_path / "x.gguf"):
        loaded = ligermodels.Llama.from_hub(name, progress=False)
        assert loaded.name_or_path == str(name)
        # The ends of a text and of a turn.
        assert loaded.generation_config == {"bos_token_id": 420, "eos_token_id": [421, 422], "pad_token_id": None}
        assert Tokenizer.from_hub(name).encode("the the")
    loaded.save_pretrained(tmp_path / "saved")
    assert ligermodels.load(tmp_path / "saved", progress=False).generation_config == loaded.generation_config
    assert Tokenizer.from_hub(tmp_path / "saved").encode("the the") == Tokenizer.from_hub("x.gguf").encode("the the")
    assert verify("x.gguf", tmp_path / "saved", **QUIET).ok
    reader = GgufReader(tiny)
    assert len({reader.read("model.embed_tokens.weight").data_ptr() for _ in range(2)}) == 1, "mapped from the file"
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"config\.json is a file\. Give the folder of a checkpoint, such as \."):
        ligermodels.load("config.json")  # no name of a repository, where such a file is
    with pytest.raises(HubError, match=r"z\.gguf is not there"):
        ligermodels.load("z.gguf")
    shutil.copy("x.gguf", "y.gguf")
    with pytest.raises(CheckpointError, match=r"holds 2 GGUF files: x\.gguf, y\.gguf"):
        ligermodels.load(tmp_path)


# What is not read

NEW = {float: [gguf.GGUFValueType.FLOAT32], int: [gguf.GGUFValueType.UINT32], str: [gguf.GGUFValueType.STRING]}


def put(key, value):
    def change(fields):
        fields[key] = value, fields[key][1] if key in fields else NEW[type(value)]

    return lambda model, target: rewritten(model, target, change)


def replace(key, value):
    """As `put`, with a type of the value's own; of a list, the type of its items."""

    def change(fields):
        is_list = isinstance(value, list)
        types = NEW[type(value[0] if is_list else value)]
        fields[key] = value, [gguf.GGUFValueType.ARRAY, *types] if is_list else types

    return lambda model, target: rewritten(model, target, change)


def without(key):
    return lambda model, target: rewritten(model, target, lambda fields: fields.pop(key))


def data(change):
    return lambda model, target: target.write_bytes(change(model.read_bytes()))


def other_type(blob: bytes) -> bytes:
    name = b"token_embd.weight"
    at = blob.index(name) + len(name) + 4 + 16
    return blob[:at] + struct.pack("<I", 40) + blob[at + 4 :]


OTHER_RULE = {**LLAMA3, "factor": 6.1, "low_freq_factor": 0.5, "original_max_position_embeddings": 4096}


def other_rule(model, target):
    """A file with other numbers than usual, which it does not name."""
    own, file = small_model(target.with_suffix(""), "llama 3", rope_scaling=OTHER_RULE), target.with_name("own.gguf")
    to_gguf(own, file)
    assert (
        ligermodels.load(file, **QUIET).config.rope_parameters == ligermodels.load(own, **QUIET).config.rope_parameters
    )
    without("llama.rope.llama3.low_freq_factor")(file, target)


def test_sections_for_images_come_back_where_they_are_of_the_model(tmp_path):
    """llama.cpp reads no file without them."""
    for at, (sections, comes_back) in enumerate([({}, False), ({"mrope_section": [2, 1, 1]}, True)]):
        rope = QWEN3_5["rope_parameters"] | {"mrope_section": None} | sections
        rope = {name: value for name, value in rope.items() if value is not None}
        config = QWEN3_5 | {"layer_types": ["full_attention"], "full_attention_interval": 1, "rope_parameters": rope}
        model = small_model(tmp_path / f"{at}", "qwen 3.5", "qwen3_5_text", **config)
        to_gguf(model, file := tmp_path / f"{at}.gguf")
        assert ("mrope_section" in ligermodels.load(file, **QUIET).config.rope_parameters) is comes_back


BAD = [
    (put("general.architecture", "mamba"), ConfigError, "'mamba'.*supported: llama, gemma"),
    (without("llama.embedding_length"), ConfigError, "lacks llama.embedding_length"),
    (put("split.count", 2), CheckpointError, "one of 2 parts.*\n.*llama-gguf-split"),
    (put("split.count", "2"), CheckpointError, r"bad\.gguf: split\.count is '2', expected a whole number"),
    (put("general.alignment", 0), CheckpointError, r"bad\.gguf: general\.alignment is 0, expected a whole number"),
    (put("general.alignment", "x"), CheckpointError, r"general\.alignment is 'x', expected a whole number"),
    (put("llama.attention.head_count", 0), CheckpointError, r"bad\.gguf: llama\.attention\.head_count is 0, expected"),
    (replace("llama.attention.head_count_kv", "x"), CheckpointError, r"llama\.attention\.head_count_kv is 'x'"),
    (replace("llama.block_count", [1.5]), CheckpointError, r"llama\.block_count is 1\.5, expected"),
    (put("llama.rope.freq_base", 0.0), CheckpointError, r"llama\.rope\.freq_base is 0\.0, expected a number above 0"),
    (replace("tokenizer.ggml.eos_token_id", [1, 2]), TokenizerError, r"eos_token_id is \[1, 2\], not an id"),
    (put("llama.rope.scaling.type", "longrope"), ConfigError, "longrope as it is set there"),
    (put("llama.rope.dimension_count", 4), ConfigError, "rotates 4 of a head's 8"),
    (put("llama.attention.value_length", 4), ConfigError, "other sizes"),
    (put("tokenizer.ggml.pre", "chatglm-bpe"), TokenizerError, "'chatglm-bpe'.*supported: "),
    (put("tokenizer.ggml.model", "bert"), TokenizerError, "'bert' is not supported"),
    (without("tokenizer.ggml.merges"), TokenizerError, "its tokenizer is damaged"),
    (other_rule, ConfigError, "not Llama 3's rule"),
    (data(lambda blob: blob[:-40]), CheckpointError, "is cut short"),
    (data(lambda blob: blob[:1000]), CheckpointError, "header is damaged or cut short"),
    (data(lambda blob: b"<html>" + blob), CheckpointError, "is not a GGUF file"),
    (data(lambda blob: blob[:4] + b"\1" + blob[5:]), CheckpointError, "2 and 3 are read"),
    (data(other_type), CheckpointError, "quantised as type 40, which is not read; supported: F32"),
    (put("llama.attention.scale", 0.5), UserWarning, "not used here: llama.attention.scale"),
]  # fmt: skip


@pytest.mark.parametrize("spoil, error, message", BAD)
@pytest.mark.filterwarnings("error")
def test_files_that_are_damaged_or_not_supported(tmp_path, tiny, spoil, error, message):
    spoil(tiny, tmp_path / "bad.gguf")
    with pytest.raises(error, match=message):
        ligermodels.load(tmp_path / "bad.gguf", progress=False)


# llama.cpp itself


def compared(folder: Path, file: Path, lengths: list[int]) -> tuple[float, list[str]]:
    """The largest difference of a log probability from the model of `folder`, and the texts that it cuts otherwise."""
    model, tokenizer = ligermodels.load(folder, dtype="float32", **QUIET).eval(), Tokenizer.from_folder(folder)
    force, texts = tokenizer.encode("the the", add_special_tokens=False)[-1], gguf_files.TEXTS
    prompts = [(torch.arange(length) * 37 % 300 + 10).tolist() for length in lengths]
    cuts = [("/tokenize", {"content": text, "add_special": True, "parse_special": True}) for text in texts]
    answers = llama_cpp.ask(file, *(llama_cpp.next_token(ids, force, 200) for ids in prompts), *cuts)
    worst = 0.0
    for ids, answer in zip(prompts, answers, strict=False):
        with torch.no_grad():
            ours = model(torch.tensor([ids])).logits[0, -1].log_softmax(-1)
        worst = max(worst, *(abs(float(ours[token]) - value) for token, value in llama_cpp.logprobs(answer).items()))
    cut = zip(texts, answers[len(prompts) :], strict=True)
    return worst, [text for text, answer in cut if answer["tokens"] != tokenizer.encode(text)]


OTHERS = ("qwen3.5, multi-token", "qwen3.5 with experts, multi-token", "qwen3_vl", "qwen3_vl_moe")


@pytest.mark.slow
@pytest.mark.parametrize("name", [*MODELS, *OTHERS])
@pytest.mark.filterwarnings("ignore:.*only the text is written")
def test_what_llama_cpp_says(tmp_path, model_of, name):
    pytest.importorskip("xllamacpp")
    if name.endswith(", multi-token"):
        name = name.removesuffix(", multi-token")
        folder = shutil.copytree(model_of(name, torch.float32), tmp_path / "tiny")
        layer = mtp_tensors_with_experts if "experts" in name else mtp_tensors
        tensors = load_file(folder / "model.safetensors") | layer(read_json(folder / "config.json"))
        save_file(tensors, folder / "model.safetensors")
    elif name.startswith("qwen3_vl"):
        folder = with_tower(tmp_path / "tiny", name)
    else:
        folder = model_of(name, torch.float32)
    to_gguf(folder, tmp_path / "out.gguf")
    if name == "gpt_oss":  # what it computes for one that does not round, as the warning says
        folder = shutil.copytree(folder, tmp_path / "rounded")
        (folder / "config.json").write_bytes((model_of("gpt_oss, rounded", torch.float32) / "config.json").read_bytes())
    # The context of 256 is beyond the length up to which the short frequencies hold, whatever the text's own.
    lengths = [65, 100] if name == "phi3, long" else [1, 2, 7, 100]
    if name == "mistral, window":
        lengths = [1, 2, 7, 64]  # llama.cpp ignores the window of 64
    worst, odd = compared(folder, tmp_path / "out.gguf", lengths)
    assert worst < (5e-3 if name.startswith("gemma") else 1e-4)  # GELU is a table of fp16 there
    # Its tokenizer.json has no dummy prefix before a text that begins with a space, nor after a special token.
    assert odd == (["▁already▁there", "</s>the"] if name.startswith("mistral") else []), odd
