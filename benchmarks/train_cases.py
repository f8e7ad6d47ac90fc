"""The models that `train_step` trains: their config.json, the batch, and what of transformers is exact on them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

_LLAMA_3 = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "attention_bias": False,
    "mlp_bias": False,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
}
_LLAMA_3_ROPE = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_TINY = {
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
"""What `--dry` puts in place of a case's sizes."""


@dataclass(frozen=True)
class Case:
    """A model and how it is trained where the command line does not say otherwise.

    attention: of transformers, one that computes this model; `hf+liger` and `hf+compile` take it. inexact: provider
    -> what it leaves out; it is timed all the same, and marked.
    image: height and width, in pixels, of the one that each sequence begins with.
    shallow: what makes the model that parity is checked on out of config: one layer of each kind at least.
    tiny: what `--dry` changes beside _TINY.
    Both reach into nested dicts.
    """

    config: dict[str, Any]
    batch: int = 4
    seq: int = 4096
    checkpointing: str = "none"
    steps: int = 10
    attention: str = "sdpa"
    providers: tuple[str, ...] = ("ligermodels", "hf", "hf+liger")
    inexact: Mapping[str, str] = field(default_factory=dict)
    image: tuple[int, int] | None = None
    shallow: Mapping[str, Any] = field(default_factory=lambda: {"num_hidden_layers": 2})
    tiny: Mapping[str, Any] = field(default_factory=dict)

    def dry(self) -> dict[str, Any]:
        """The config at a size for a CPU."""
        return changed(self.config if "text_config" in self.config else {**self.config, **_TINY}, self.tiny)


def changed(config: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of config with `changes`, dict by dict."""
    nested = {name: changed(config[name], value) for name, value in changes.items() if isinstance(value, Mapping)}
    return {**config, **changes, **nested}


_NO_SOFTCAP = "sdpa leaves the softcap of the scores out"

CASES: dict[str, Case] = {
    "llama-3.2-1b": Case(
        {
            **_LLAMA_3,
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 16,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "tie_word_embeddings": True,
            "rope_scaling": {**_LLAMA_3_ROPE, "factor": 32.0},
        },
        batch=8,
        seq=2048,
        tiny={"head_dim": 16},
    ),
    "llama-3.1-8b": Case(
        {
            **_LLAMA_3,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "tie_word_embeddings": False,
            "rope_scaling": {**_LLAMA_3_ROPE, "factor": 8.0},
        },
        checkpointing="block",
        steps=6,
        tiny={"head_dim": 16},
    ),
    "mistral-7b": Case(
        {
            "architectures": ["MistralForCausalLM"],
            "model_type": "mistral",
            "vocab_size": 32000,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "hidden_act": "silu",
            "initializer_range": 0.02,
            "max_position_embeddings": 32768,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "sliding_window": 4096,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
        batch=2,
        checkpointing="block",
        steps=6,
        tiny={"sliding_window": 24},
    ),
    "mixtral-12l": Case(
        # No released model: Mixtral-8x7B at half its width and 12 of its 32 layers, so that one card trains it. Heads
        # keep their size, 128; 16 and 8 of them.
        {
            "architectures": ["MixtralForCausalLM"],
            "model_type": "mixtral",
            "vocab_size": 32000,
            "hidden_size": 2048,
            "intermediate_size": 7168,
            "num_hidden_layers": 12,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "hidden_act": "silu",
            "initializer_range": 0.02,
            "max_position_embeddings": 32768,
            "output_router_logits": False,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e6,
            "router_aux_loss_coef": 0.02,
            "sliding_window": None,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
        checkpointing="block",
        providers=("ligermodels", "hf", "hf+loop", "hf+liger"),
    ),
    "gemma-2-2b": Case(
        {
            "architectures": ["Gemma2ForCausalLM"],
            "model_type": "gemma2",
            "vocab_size": 256000,
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "num_hidden_layers": 26,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "hidden_act": "gelu_pytorch_tanh",
            "hidden_activation": "gelu_pytorch_tanh",
            "attention_bias": False,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
            "query_pre_attn_scalar": 256,
            "sliding_window": 4096,
            "initializer_range": 0.02,
            "max_position_embeddings": 8192,
            "rms_norm_eps": 1e-6,
            "rope_theta": 10000.0,
            "tie_word_embeddings": True,
            "torch_dtype": "bfloat16",
            "bos_token_id": 2,
            "eos_token_id": 1,
            "pad_token_id": 0,
        },
        checkpointing="block",
        attention="eager",
        providers=("ligermodels", "hf+eager", "hf+liger", "hf+liger+sdpa"),
        inexact={"hf": _NO_SOFTCAP, "hf+sdpa": _NO_SOFTCAP, "hf+liger+sdpa": _NO_SOFTCAP},
        tiny={"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 24},
    ),
    "qwen2-1.5b": Case(
        {
            "architectures": ["Qwen2ForCausalLM"],
            "model_type": "qwen2",
            "vocab_size": 151936,
            "hidden_size": 1536,
            "intermediate_size": 8960,
            "num_hidden_layers": 28,
            "num_attention_heads": 12,
            "num_key_value_heads": 2,
            "hidden_act": "silu",
            "initializer_range": 0.02,
            "max_position_embeddings": 131072,
            "max_window_layers": 28,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1e6,
            "sliding_window": 131072,
            "use_sliding_window": False,
            "tie_word_embeddings": True,
            "torch_dtype": "bfloat16",
            "bos_token_id": 151643,
            "eos_token_id": 151643,
        },
    ),
    "phi-3-mini": Case(
        {
            "architectures": ["Phi3ForCausalLM"],
            "model_type": "phi3",
            "vocab_size": 32064,
            "hidden_size": 3072,
            "intermediate_size": 8192,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 32,
            "hidden_act": "silu",
            "initializer_range": 0.02,
            "max_position_embeddings": 4096,
            "original_max_position_embeddings": 4096,
            "attention_dropout": 0.0,
            "embd_pdrop": 0.0,
            "resid_pdrop": 0.0,
            "rms_norm_eps": 1e-5,
            "rope_scaling": None,
            "rope_theta": 10000.0,
            "sliding_window": 2047,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
            "bos_token_id": 1,
            "eos_token_id": 32000,
            "pad_token_id": 32000,
        },
        checkpointing="block",
        steps=6,
        tiny={"sliding_window": 24},
    ),
    "qwen2-vl-2b": Case(
        {
            "architectures": ["Qwen2VLForConditionalGeneration"],
            "model_type": "qwen2_vl",
            "vocab_size": 151936,
            "hidden_size": 1536,
            "intermediate_size": 8960,
            "num_hidden_layers": 28,
            "num_attention_heads": 12,
            "num_key_value_heads": 2,
            "hidden_act": "silu",
            "initializer_range": 0.02,
            "max_position_embeddings": 32768,
            "max_window_layers": 28,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1e6,
            "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
            "sliding_window": 32768,
            "use_sliding_window": False,
            "tie_word_embeddings": True,
            "torch_dtype": "bfloat16",
            "bos_token_id": 151643,
            "eos_token_id": 151645,
            "vision_start_token_id": 151652,
            "vision_end_token_id": 151653,
            "vision_token_id": 151654,
            "image_token_id": 151655,
            "video_token_id": 151656,
            "vision_config": {
                "depth": 32,
                "embed_dim": 1280,
                "mlp_ratio": 4,
                "num_heads": 16,
                "in_chans": 3,
                "hidden_size": 1536,
                "patch_size": 14,
                "spatial_merge_size": 2,
                "temporal_patch_size": 2,
            },
        },
        seq=1883,  # 74 x 74 patches are 1369 tokens; two more around them, and 512 of text
        image=(1036, 1036),
        shallow={"num_hidden_layers": 2, "vision_config": {"depth": 2}},
        tiny={
            "rope_scaling": {"mrope_section": [2, 3, 3]},
            "vision_start_token_id": 3,
            "vision_end_token_id": 4,
            "vision_token_id": 5,
            "image_token_id": 6,
            "video_token_id": 7,
            "vision_config": {"depth": 2, "embed_dim": 32, "num_heads": 2, "hidden_size": 64},
        },
    ),
    "llama-3.2-11b-vision": Case(
        {
            "architectures": ["MllamaForConditionalGeneration"],
            "model_type": "mllama",
            "image_token_index": 128256,
            "torch_dtype": "bfloat16",
            "text_config": {
                "model_type": "mllama_text_model",
                "bos_token_id": 128000,
                "eos_token_id": 128001,
                "pad_token_id": 128004,
                "cross_attention_layers": [3, 8, 13, 18, 23, 28, 33, 38],
                "dropout": 0,
                "hidden_act": "silu",
                "hidden_size": 4096,
                "initializer_range": 0.02,
                "intermediate_size": 14336,
                "max_position_embeddings": 131072,
                "num_attention_heads": 32,
                "num_hidden_layers": 40,
                "num_key_value_heads": 8,
                "rms_norm_eps": 1e-5,
                "rope_scaling": {**_LLAMA_3_ROPE, "factor": 8.0},
                "rope_theta": 500000.0,
                "tie_word_embeddings": False,
                "torch_dtype": "bfloat16",
                "vocab_size": 128256,
            },
            "vision_config": {
                "model_type": "mllama_vision_model",
                "attention_heads": 16,
                "hidden_act": "gelu",
                "hidden_size": 1280,
                "image_size": 560,
                "intermediate_layers_indices": [3, 7, 15, 23, 30],
                "intermediate_size": 5120,
                "max_num_tiles": 4,
                "norm_eps": 1e-5,
                "num_channels": 3,
                "num_global_layers": 8,
                "num_hidden_layers": 32,
                "patch_size": 14,
                "supported_aspect_ratios": [[1, 1], [1, 2], [1, 3], [1, 4], [2, 1], [2, 2], [3, 1], [4, 1]],
                "torch_dtype": "bfloat16",
                "vision_output_dim": 7680,
            },
        },
        batch=2,
        seq=2048,
        image=(1120, 1120),
        checkpointing="block",
        steps=6,
        shallow={
            "text_config": {"num_hidden_layers": 3, "cross_attention_layers": [1]},
            "vision_config": {
                "num_hidden_layers": 2,
                "num_global_layers": 1,
                "intermediate_layers_indices": [0],
                "vision_output_dim": 2560,
            },
        },
        tiny={
            "image_token_index": 512,
            "text_config": {**_TINY, "num_hidden_layers": 3, "cross_attention_layers": [1]},
            "vision_config": {
                "attention_heads": 2,
                "hidden_size": 32,
                "image_size": 28,
                "intermediate_layers_indices": [0],
                "intermediate_size": 48,
                "num_global_layers": 1,
                "num_hidden_layers": 2,
                "vision_output_dim": 64,
            },
        },
    ),
}
