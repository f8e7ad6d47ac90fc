"""The models of the benchmarks by their config.json, and the table of cases of `benchmarks.train_step`.

A case compares baselines on one model, batch size, sequence length, recomputation and optimizer. A baseline's name may
change the last two: see `benchmarks.train_step --help`.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

RANK, ALPHA = 16, 32
"""Of all adapters."""


@dataclass(frozen=True)
class Model:
    """A model's config.json, and settings of the benchmarks.

    attention: the implementation of transformers that computes this model. Gemma 2's is eager, as sdpa has no softcap,
    and so is gpt-oss', as it has no sinks.
    shallow: changes of the config for the parity check, with a layer of each kind. tiny: changes for a dry run.
    drawn: no checkpoint of the whole model is written unless a baseline reads files alone; see train_step.Drawn.
    parity_length: maximum tokens of the parity check, longer than any window. In fp32, torch's attention with grouped
    heads stores all scores, and eager attention stores them some six times.
    """

    config: dict[str, Any]
    attention: str = "sdpa"
    shallow: Mapping[str, Any] = field(default_factory=lambda: {"num_hidden_layers": 2})
    tiny: Mapping[str, Any] = field(default_factory=dict)
    drawn: bool = False
    parity_length: int = 8192


@dataclass(frozen=True)
class Case:
    """A row of the table. The optimizer is torch's fused AdamW with bf16 states, unless a baseline names another.

    recompute: what all baselines recompute in the backward, "none" or "block". accumulation: micro-batches per step.
    """

    model: str
    batch: int
    seq: int
    recompute: str
    baselines: tuple[str, ...]
    steps: int = 10
    accumulation: int = 1


def ours(name: str, device: str, dtype: torch.dtype, *, tiny: bool = False, **changes: Any) -> Any:
    """Our model with random weights, three times the initial ones, so that the text that it generates varies."""
    import ligermodels

    model = MODELS[name]
    config = changed(model.config, {**(model.tiny if tiny else {}), **changes})
    torch.manual_seed(0)
    made = ligermodels.ARCHS[config["model_type"]].from_config(config, dtype=dtype, device=device, seed=0).eval()
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.dim() > 1:
                parameter.mul_(3)
    return made


def theirs(name: str, device: str, dtype: torch.dtype, config: Mapping[str, Any], attention: str | None = None) -> Any:
    """transformers' model of a config.json, with weights as it initialises them. attention: by default the model's."""
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    made = CONFIG_MAPPING[config["model_type"]].from_dict(config)
    torch.manual_seed(0)
    with torch.device(device):
        attention = attention or MODELS[name].attention
        return AutoModelForCausalLM.from_config(made, dtype=dtype, attn_implementation=attention)


def changed(config: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of config with `changes`, dict by dict."""
    nested = {name: changed(config[name], value) for name, value in changes.items() if isinstance(value, Mapping)}
    return {**config, **changes, **nested}


def whole_and_layers(name: str) -> tuple[str, int | None]:
    """("qwen3-30b-a3b", 6) of "qwen3-30b-a3b-6-layers", the first layers of a model; (name, None) of a whole one."""
    whole, layers = re.fullmatch(r"(.*?)(?:-(\d+)-layers)?", name).groups()  # type: ignore[union-attr]
    return whole, None if layers is None else int(layers)


def _periods(windows: int, layers: int) -> list[str]:
    """The types of layers: `windows` with a window, then a full one, and so on."""
    return [*["sliding_attention"] * windows, "full_attention"] * (layers // (windows + 1))


_LLAMA_ROPE = dict(
    rope_type="llama3", factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192
)
_LLAMA_1B = dict(
    model_type="llama", vocab_size=128256, hidden_size=2048, intermediate_size=8192, num_hidden_layers=16,
    num_attention_heads=32, num_key_value_heads=8, head_dim=64, rms_norm_eps=1e-5, hidden_act="silu",
    max_position_embeddings=131072, rope_theta=5e5, rope_scaling=_LLAMA_ROPE, tie_word_embeddings=True,
    bos_token_id=128000, eos_token_id=128001,
)  # fmt: skip
_SMOLLM2_135M = dict(
    model_type="llama", vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30,
    num_attention_heads=9, num_key_value_heads=3, head_dim=64, rms_norm_eps=1e-5, hidden_act="silu",
    max_position_embeddings=8192, rope_theta=1e5, tie_word_embeddings=True, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
_LLAMA_8B = {
    **_LLAMA_1B, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "head_dim": 128,
    "rope_scaling": {**_LLAMA_ROPE, "factor": 8.0}, "tie_word_embeddings": False,
}  # fmt: skip
_LLAMA_70B = {
    **_LLAMA_8B, "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64,
}  # fmt: skip
_GEMMA_2_2B = dict(
    model_type="gemma2", vocab_size=256000, hidden_size=2304, intermediate_size=9216, num_hidden_layers=26,
    num_attention_heads=8, num_key_value_heads=4, head_dim=256, rms_norm_eps=1e-6,
    hidden_act="gelu_pytorch_tanh", hidden_activation="gelu_pytorch_tanh", attn_logit_softcapping=50.0,
    final_logit_softcapping=30.0, query_pre_attn_scalar=256, sliding_window=4096, max_position_embeddings=8192,
    rope_theta=1e4, tie_word_embeddings=True, bos_token_id=2, eos_token_id=1, pad_token_id=0,
)  # fmt: skip
_QWEN2_1_5B = dict(
    model_type="qwen2", vocab_size=151936, hidden_size=1536, intermediate_size=8960, num_hidden_layers=28,
    num_attention_heads=12, num_key_value_heads=2, rms_norm_eps=1e-6, hidden_act="silu", rope_theta=1e6,
    max_position_embeddings=131072, max_window_layers=28, sliding_window=131072, use_sliding_window=False,
    tie_word_embeddings=True, bos_token_id=151643, eos_token_id=151643,
)  # fmt: skip
_QWEN3_8B = dict(
    model_type="qwen3", vocab_size=151936, hidden_size=4096, intermediate_size=12288, num_hidden_layers=36,
    num_attention_heads=32, num_key_value_heads=8, head_dim=128, rms_norm_eps=1e-6, hidden_act="silu", rope_theta=1e6,
    max_position_embeddings=40960, tie_word_embeddings=False, bos_token_id=151643, eos_token_id=151645,
)  # fmt: skip
_PHI_3_MINI = dict(
    model_type="phi3", vocab_size=32064, hidden_size=3072, intermediate_size=8192, num_hidden_layers=32,
    num_attention_heads=32, num_key_value_heads=32, rms_norm_eps=1e-5, hidden_act="silu", rope_theta=1e4,
    max_position_embeddings=4096, original_max_position_embeddings=4096, sliding_window=2047,
    tie_word_embeddings=False, bos_token_id=1, eos_token_id=32000, pad_token_id=32000,
)  # fmt: skip
_QWEN3_5_9B = dict(
    model_type="qwen3_5_text", vocab_size=248320, hidden_size=4096, intermediate_size=12288, num_hidden_layers=32,
    num_attention_heads=16, num_key_value_heads=4, head_dim=256, linear_conv_kernel_dim=4, linear_key_head_dim=128,
    linear_value_head_dim=128, linear_num_key_heads=16, linear_num_value_heads=32, rms_norm_eps=1e-6,
    hidden_act="silu", max_position_embeddings=262144, tie_word_embeddings=False, bos_token_id=248044,
    eos_token_id=248046, layer_types=[*["linear_attention"] * 3, "full_attention"] * 8,
    rope_parameters=dict(
        rope_type="default", rope_theta=1e7, partial_rotary_factor=0.25, mrope_section=[11, 11, 10],
        mrope_interleaved=True,
    ),
)  # fmt: skip
_QWEN3_5_4B = {**_QWEN3_5_9B, "hidden_size": 2560, "intermediate_size": 9216, "tie_word_embeddings": True}
_QWEN3_30B_A3B = dict(
    model_type="qwen3_moe", vocab_size=151936, hidden_size=2048, intermediate_size=6144, moe_intermediate_size=768,
    num_experts=128, num_experts_per_tok=8, norm_topk_prob=True, decoder_sparse_step=1, mlp_only_layers=[],
    num_hidden_layers=48, num_attention_heads=32, num_key_value_heads=4, head_dim=128, rms_norm_eps=1e-6,
    hidden_act="silu", rope_theta=1e6, max_position_embeddings=40960, tie_word_embeddings=False,
    output_router_logits=False, router_aux_loss_coef=0.001, bos_token_id=151643, eos_token_id=151645,
)  # fmt: skip
_GPT_OSS_20B = dict(
    model_type="gpt_oss", vocab_size=201088, hidden_size=2880, intermediate_size=2880, num_hidden_layers=24,
    num_attention_heads=64, num_key_value_heads=8, head_dim=64, num_local_experts=32, num_experts_per_tok=4,
    rms_norm_eps=1e-5, hidden_act="silu", attention_bias=True, sliding_window=128, swiglu_limit=7.0, rope_theta=150000,
    rope_scaling=dict(
        rope_type="yarn", factor=32.0, beta_fast=32.0, beta_slow=1.0, truncate=False,
        original_max_position_embeddings=4096,
    ),
    max_position_embeddings=131072, layer_types=_periods(1, 24),
    tie_word_embeddings=False, output_router_logits=False, router_aux_loss_coef=0.9, bos_token_id=199998,
    eos_token_id=200002, pad_token_id=199999,
)  # fmt: skip
_GEMMA_4_E4B = dict(
    model_type="gemma4_text", vocab_size=262144, hidden_size=2560, intermediate_size=10240, num_hidden_layers=42,
    num_attention_heads=8, num_key_value_heads=2, head_dim=256, global_head_dim=512, attention_k_eq_v=False,
    num_kv_shared_layers=18, use_double_wide_mlp=False, hidden_size_per_layer_input=256,
    vocab_size_per_layer_input=262144, enable_moe_block=False, hidden_activation="gelu_pytorch_tanh",
    final_logit_softcapping=30.0, rms_norm_eps=1e-6, sliding_window=512, max_position_embeddings=131072,
    layer_types=_periods(5, 42), tie_word_embeddings=True, bos_token_id=2, eos_token_id=1, pad_token_id=0,
    rope_parameters=dict(
        full_attention=dict(rope_type="proportional", rope_theta=1e6, partial_rotary_factor=0.25),
        sliding_attention=dict(rope_type="default", rope_theta=1e4),
    ),
)  # fmt: skip
_GEMMA_4_E2B = {
    **_GEMMA_4_E4B, "hidden_size": 1536, "intermediate_size": 6144, "num_hidden_layers": 35, "num_key_value_heads": 1,
    "num_kv_shared_layers": 20, "use_double_wide_mlp": True, "layer_types": _periods(4, 35),
}  # fmt: skip
_GEMMA_4_31B = {
    **_GEMMA_4_E4B, "hidden_size": 5376, "intermediate_size": 21504, "num_hidden_layers": 60,
    "num_attention_heads": 32, "num_key_value_heads": 16, "num_global_key_value_heads": 4, "attention_k_eq_v": True,
    "num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0, "sliding_window": 1024,
    "max_position_embeddings": 262144, "layer_types": _periods(5, 60),
}  # fmt: skip
_TWO_WINDOWS = {"num_hidden_layers": 2, "layer_types": _periods(1, 2)}
_TWO_MIXERS = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
_TINY = dict(
    hidden_size=64, intermediate_size=160, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    vocab_size=512, bos_token_id=1, eos_token_id=2, pad_token_id=0,
)  # fmt: skip

_QWEN3_5 = dict[str, Any](
    shallow=_TWO_MIXERS,
    tiny={
        **_TINY, **_TWO_MIXERS, "head_dim": 32, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
        "linear_num_key_heads": 2, "linear_num_value_heads": 4, "rope_parameters": {"mrope_section": [2, 1, 1]},
    },
)  # fmt: skip

_GEMMA_4_TINY = {
    **_TINY, "head_dim": 16, "global_head_dim": 32, "sliding_window": 24, "vocab_size_per_layer_input": 512,
}  # fmt: skip
_SHARED_KEYS = {"num_hidden_layers": 4, "layer_types": _periods(1, 4), "num_kv_shared_layers": 2}
_GEMMA_4_E = dict[str, Any](
    drawn=True, parity_length=4096, shallow=_SHARED_KEYS,
    tiny={**_GEMMA_4_TINY, **_SHARED_KEYS, "hidden_size_per_layer_input": 16},
)  # fmt: skip
_GEMMA_4_BIG = dict[str, Any](
    parity_length=4096, shallow=_TWO_WINDOWS, tiny={**_GEMMA_4_TINY, **_TWO_WINDOWS, "num_global_key_value_heads": 1}
)
_MIXTURE = dict[str, Any](  # a token takes all experts of the dry run: in bf16 it may choose others than a peer
    tiny={**_TINY, "head_dim": 16, "moe_intermediate_size": 48, "num_experts": 4, "num_experts_per_tok": 4}
)

MODELS: dict[str, Model] = {
    "smollm2-135m": Model(_SMOLLM2_135M, tiny={**_TINY, "head_dim": 16}),
    "llama-3.2-1b": Model(_LLAMA_1B, tiny={**_TINY, "head_dim": 16}),
    "llama-3.1-8b": Model(_LLAMA_8B, tiny={**_TINY, "head_dim": 16}),
    "llama-3.1-70b": Model(_LLAMA_70B, tiny={**_TINY, "head_dim": 16}, drawn=True),
    "gemma-2-2b": Model(
        _GEMMA_2_2B, "eager", tiny={**_TINY, "head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 24},
    ),
    "qwen2-1.5b": Model(_QWEN2_1_5B, tiny=_TINY),
    "qwen3-8b": Model(_QWEN3_8B, tiny={**_TINY, "head_dim": 16}),
    "phi-3-mini": Model(_PHI_3_MINI, tiny={**_TINY, "sliding_window": 24}),
    "qwen3-30b-a3b": Model(_QWEN3_30B_A3B, drawn=True, **_MIXTURE),
    **{
        f"qwen3-30b-a3b-{n}-layers": Model({**_QWEN3_30B_A3B, "num_hidden_layers": n}, **_MIXTURE) for n in (2, 6)
    },
    "gemma-4-e2b": Model(_GEMMA_4_E2B, **_GEMMA_4_E),
    "gemma-4-e4b": Model(_GEMMA_4_E4B, **_GEMMA_4_E),
    "gemma-4-31b": Model(_GEMMA_4_31B, drawn=True, **_GEMMA_4_BIG),
    **{
        f"gemma-4-31b-{n}-layers": Model(
            {**_GEMMA_4_31B, "num_hidden_layers": n, "layer_types": _periods(5, n)}, **_GEMMA_4_BIG
        )
        for n in (6, 12)
    },
    "gpt-oss-20b": Model(
        _GPT_OSS_20B, "eager", drawn=True, shallow=_TWO_WINDOWS, parity_length=4096,
        tiny={
            **_TINY, **_TWO_WINDOWS, "head_dim": 16, "sliding_window": 24, "num_local_experts": 4,
            "num_experts_per_tok": 4,
        },
    ),
    "qwen3.5-4b": Model(_QWEN3_5_4B, **_QWEN3_5),
    "qwen3.5-9b": Model(_QWEN3_5_9B, **_QWEN3_5),
}  # fmt: skip

_DELTA_RULES = ("", "+fla", "+tilelang", "+flashqla")
_SHAPES = {"": (4, 4096), "-16k": (1, 16384), "-32k": (1, 32768)}
_OURS_AND_PEERS = ("ligermodels", "ligermodels+adamw+in_backward", "hf", "hf+liger")
CASES: dict[str, Case] = {
    "llama-1b": Case(
        "llama-3.2-1b", 8, 2048, "none", ("ligermodels", "ligermodels+adamw", "hf", "hf+liger", "unsloth")
    ),
    "llama-1b-small": Case(
        "llama-3.2-1b", 1, 1024, "none",
        ("ligermodels", "ligermodels+captured", "ligermodels+adamw+captured", "hf", "hf+liger", "hf+compile"), steps=20,
    ),
    "llama-8b": Case("llama-3.1-8b", 4, 4096, "block", _OURS_AND_PEERS),
    "llama-8b-lora": Case(
        "llama-3.1-8b", 4, 4096, "none",
        ("ligermodels+lora", "ligermodels+lora:mlp", "ligermodels+lora:block", "hf+liger+lora:block", "hf+liger+lora",
         "unsloth+lora", "unsloth+lora:block", "unsloth+offload+lora:block"),
    ),
    "llama-8b-lora-small": Case(
        "llama-3.1-8b", 1, 2048, "none", ("ligermodels+lora", "ligermodels+lora+captured", "hf+lora", "hf+liger+lora"),
    ),
    "llama-8b-qlora": Case(
        "llama-3.1-8b", 1, 2048, "none",
        ("ligermodels+nf4", "ligermodels+nf4+captured", "ligermodels+nf4:block", "hf+nf4", "hf+liger+nf4",
         "hf+liger+nf4:block", "unsloth+nf4", "unsloth+nf4:block"),
    ),
    "llama-8b-fp8": Case(
        "llama-3.1-8b", 4, 4096, "none",
        (*(f"ligermodels+adamw+in_backward{kind}" for kind in ("", "+rowwise", "+tensorwise", "+rowwise_bf16_dw")),
         *(f"hf+compile_blocks{kind}:block" for kind in ("", "+ao_rowwise", "+ao_tensorwise"))),
    ),
    "llama-8b-fp8-lora": Case(
        "llama-3.1-8b", 4, 4096, "none",
        ("ligermodels+lora", "ligermodels+lora+fp8", "ligermodels+lora+rowwise", "ligermodels+lora+fp8:block"),
    ),
    "llama-1b-fp8": Case(
        "llama-3.2-1b", 8, 2048, "none",
        (*(f"ligermodels+adamw{kind}" for kind in ("", "+rowwise", "+tensorwise", "+rowwise_bf16_dw")),
         *(f"hf+compile{kind}" for kind in ("", "+ao_rowwise", "+ao_tensorwise"))),
    ),
    "qwen3.5-9b-fp8": Case(
        "qwen3.5-9b", 4, 4096, "none",
        tuple(f"ligermodels+adamw+in_backward{kind}" for kind in ("", "+rowwise", "+tensorwise", "+rowwise_bf16_dw")),
        steps=5,
    ),
    "qwen3.5-9b-fp8-lora": Case(
        "qwen3.5-9b", 4, 4096, "none", ("ligermodels+lora", "ligermodels+lora+fp8", "ligermodels+lora+rowwise"),
        steps=5,
    ),
    "llama-70b-qlora": Case("llama-3.1-70b", 1, 4096, "block", ("ligermodels+nf4",), steps=5),
    "phi-3-mini": Case("phi-3-mini", 4, 4096, "block", _OURS_AND_PEERS),
    "qwen2-1.5b": Case("qwen2-1.5b", 4, 4096, "none", _OURS_AND_PEERS),
    "gemma-2-2b": Case("gemma-2-2b", 4, 4096, "block", _OURS_AND_PEERS),
    **{
        f"qwen3-30b-a3b-{n}{kind}": Case(
            f"qwen3-30b-a3b-{n}-layers", 4, 4096, "none", tuple(f"{base}{kind.replace('-', '+')}" for base in bases),
            steps=5,
        )
        for n in (2, 6)
        for kind, bases in (("", ("ligermodels", "hf", "hf+liger")), ("-lora", ("ligermodels", "hf", "unsloth")))
    },
    "qwen3-30b-a3b-lora": Case(
        "qwen3-30b-a3b", 4, 4096, "block", tuple(f"ligermodels+lora:{policy}" for policy in ("none", "mlp", "block")),
        steps=5,
    ),
    "qwen3-30b-a3b-qlora": Case(
        "qwen3-30b-a3b", 4, 4096, "block",
        ("ligermodels+nf4:none", "ligermodels+nf4", "ligermodels+nf4+in_backward+8bit_moments+offload"), steps=5,
    ),
    **{
        f"gemma-4-e4b{name}": Case("gemma-4-e4b", *shape, "block", (*_OURS_AND_PEERS, "hf+flex+liger"), steps=5)
        for name, shape in _SHAPES.items()
    },
    **{
        f"gemma-4-31b{layers}-lora{name}": Case(
            f"gemma-4-31b{layers}{'-layers' if layers else ''}", *shape, "block",
            ("ligermodels+lora", "hf+lora", "hf+liger+lora", "hf+flex+liger+lora", *unsloth),
            steps=3,
        )
        for layers, unsloth in (("", ()), ("-6", ("unsloth+lora",)), ("-12", ("unsloth+lora",)))
        for name, shape in _SHAPES.items()
    },
    "gpt-oss-20b-lora": Case(
        "gpt-oss-20b", 4, 4096, "block",
        (*(f"ligermodels+lora:{policy}" for policy in ("none", "mlp", "block")), "hf+lora", "hf+flex+lora",
         "hf+liger+lora", "hf+flex+liger+lora"),
        steps=5,
    ),
    "gpt-oss-20b-mxfp4": Case(
        "gpt-oss-20b", 1, 8192, "block", ("ligermodels+mxfp4", "ligermodels+mxfp4:none"), steps=5,
    ),
    "qwen3.5-4b": Case(
        "qwen3.5-4b", 4, 4096, "block",
        ("ligermodels+adamw", "ligermodels+adamw+in_backward:mlp", *(f"hf{r}+liger" for r in _DELTA_RULES)), steps=5,
    ),
    "qwen3.5-9b": Case(
        "qwen3.5-9b", 4, 4096, "block",
        (*(f"ligermodels+adamw+in_backward:{n}" for n in ("none", "mlp")), "hf+flashqla+liger", "hf+liger"), steps=5,
    ),
    "qwen3.5-9b-lora": Case(
        "qwen3.5-9b", 4, 4096, "block",
        ("ligermodels+lora", "ligermodels+lora:mlp", *(f"hf{rule}+liger+lora" for rule in _DELTA_RULES),
         "unsloth+lora", "unsloth+offload+lora"),
        steps=5,
    ),
    "qwen3.5-4b-lora": Case(
        "qwen3.5-4b", 1, 8192, "none",
        ("ligermodels+lora", "ligermodels+lora:mlp", "ligermodels+lora:block", "ligermodels+lora+offload:block"),
        steps=5,
    ),
}  # fmt: skip
"""Where a case recomputes "block", that is also the peers' best setting: none of theirs recomputes less."""


def batches_of(config: Mapping[str, Any], steps: int, batch: int, seq: int, device: str, seed: int = 0) -> list[Any]:
    """Inputs for each step, the same for everyone on every device: random ids, none of which is padding."""
    ids = torch.randint(config["vocab_size"], (steps, batch, seq), generator=torch.Generator().manual_seed(seed))
    ids = ids.masked_fill(ids == config.get("pad_token_id", -1), config["bos_token_id"]).to(device)
    return [{"input_ids": rows, "labels": rows} for rows in ids]


def write_tokenizer(folder: Path, config: Mapping[str, Any]) -> None:
    """Writes a tokenizer of one word per id beside a checkpoint without one: some tools load no model without it."""
    if (folder / "tokenizer.json").exists():
        return
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    words = {f"w{index}": index for index in range(config["vocab_size"])}
    pad = config["vocab_size"] - 1 if config.get("pad_token_id") is None else config["pad_token_id"]
    tokenizer = Tokenizer(WordLevel(words, unk_token="w3"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="w3", pad_token=f"w{pad}",
        bos_token=f"w{config['bos_token_id']}", eos_token=f"w{config['eos_token_id']}",
    ).save_pretrained(folder)  # fmt: skip
