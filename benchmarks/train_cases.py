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
    parity_layers: depth of the model that parity is checked on, one layer of each kind at least.
    tiny: what `--dry` changes beside _TINY.
    """

    config: dict[str, Any]
    batch: int = 4
    seq: int = 4096
    checkpointing: str = "none"
    steps: int = 10
    attention: str = "sdpa"
    providers: tuple[str, ...] = ("ligermodels", "hf", "hf+liger")
    inexact: Mapping[str, str] = field(default_factory=dict)
    parity_layers: int = 2
    tiny: Mapping[str, Any] = field(default_factory=dict)

    def dry(self) -> dict[str, Any]:
        """The config at a size for a CPU."""
        return {**self.config, **_TINY, **self.tiny}


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
}
