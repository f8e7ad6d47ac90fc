"""Tiny models of every family, and training them on a text.

Each family has all that sets it apart switched on: softcaps, windows shorter than the sequence, biases, experts with
their balancing loss, rotary embeddings beyond their original length. The text is the bytes of the LICENSE file.
"""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ligermodels.layers import Router
from ligermodels.layers.base import REPLICATED, Layer, zeros
from ligermodels.layers.parallel import replicated
from tests.arch.suite import suites

TEXT = Path(__file__).parent.parent / "LICENSE"
BATCH, LENGTH = 4, 48
LEARNING_RATE = 1e-3
"""Twice that lets one mixture in six send a token to another expert than transformers does within 200 steps: two
experts tie to within fp32's rounding, and from there on the curves are two."""

TINY = dict(
    vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=128, bos_token_id=None, eos_token_id=None, pad_token_id=None,
    use_cache=False,
)  # fmt: skip
_ROPE = {"rope_type": "default", "rope_theta": 1e4}
_LLAMA_3 = {
    **_ROPE, "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
_YARN = {**_ROPE, "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
_SHORT, _LONG = [1.0, 1.1, 1.2, 1.3, 1.4, 1.5], [1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
_LONGROPE = {
    **_ROPE, "rope_type": "longrope", "short_factor": _SHORT, "long_factor": _LONG, "partial_rotary_factor": 0.75,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": dict(attention_bias=True, mlp_bias=True, rope_parameters=_LLAMA_3),
    "mistral": dict(head_dim=24, sliding_window=12),
    "mixtral": dict(
        num_local_experts=4, num_experts_per_tok=2, intermediate_size=64, sliding_window=20, output_router_logits=True,
        router_aux_loss_coef=0.05,
    ),
    "gemma": dict(head_dim=24, num_key_value_heads=1, attention_bias=True),
    "gemma2": dict(
        head_dim=24, query_pre_attn_scalar=10, sliding_window=12, attn_logit_softcapping=2.0,
        final_logit_softcapping=8.0,
    ),
    "qwen3_5_text": dict(
        head_dim=16, layer_types=["linear_attention", "full_attention"], linear_key_head_dim=16,
        linear_value_head_dim=16, linear_num_key_heads=2, linear_num_value_heads=4,
    ),
    "qwen2": dict(
        use_sliding_window=True, sliding_window=12, max_window_layers=1, tie_word_embeddings=True,
        rope_parameters=_YARN,
    ),
    "qwen3": dict(head_dim=24, attention_bias=True, use_sliding_window=True, sliding_window=12, max_window_layers=1),
    "phi3": dict(sliding_window=30, original_max_position_embeddings=32, rope_parameters=_LONGROPE),
}  # fmt: skip
"""model_type -> what its config has beside TINY."""
NORMS_AROUND_ZERO = ("gemma", "gemma2", "gemma3_text")
"""Families whose norms' weights act as 1 + weight."""
SUITES = suites(FAMILIES)
"""Families that have in their tests what the others have here."""
FAMILIES |= {family: suite.SWITCHED_ON for family, suite in SUITES.items()}


def write_checkpoint(family: str, folder: Path, seed: int = 0) -> Path:
    """A checkpoint by transformers: weights of deviation 0.1, so that scores leave the flat part of softmax, softcap
    and gate, norms 0.1 around theirs, and biases that are not zero."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    config = AutoConfig.for_model(family, **{**TINY, **FAMILIES[family]})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(0.0, 0.1)
            if "norm" in name and family not in NORMS_AROUND_ZERO:
                parameter.add_(1.0)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(0.0, 0.1)
            if name.endswith("layer_scalar"):
                buffer.uniform_(0.5, 1.5)
    model.save_pretrained(folder)
    return folder


def theirs(folder: Path, dtype: torch.dtype, device: str) -> nn.Module:
    """transformers' model with eager attention and experts, the forms that compute every family in every dtype."""
    from transformers import AutoConfig, AutoModelForCausalLM

    options: dict[str, Any] = {"attn_implementation": "eager"}
    if hasattr(AutoConfig.from_pretrained(folder), "num_local_experts"):
        options["experts_implementation"] = "eager"
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **options).to(device)


def ours(folder: Path, dtype: torch.dtype, device: str) -> nn.Module:
    import ligermodels

    return ligermodels.load(folder, dtype=dtype, device=device, progress=False)


def text_batches(steps: int, device: str, seed: int = 0) -> Tensor:
    """Token ids [steps, BATCH, LENGTH]: parts of TEXT from random places, one token a byte."""
    text = torch.frombuffer(bytearray(TEXT.read_bytes()), dtype=torch.uint8).long()
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(text) - LENGTH, (steps, BATCH, 1), generator=generator)
    return text[starts + torch.arange(LENGTH)].to(device)


def losses(
    model: nn.Module,
    batches: Tensor,
    optimizer_of: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] | None = None,
) -> Tensor:
    """The loss of each step [steps] of training `model` with AdamW on batches [steps, B, S].

    Without optimizer_of, torch's AdamW works on fp32 copies of the weights. In bf16 its small steps would be lost in
    rounding otherwise, in the same way for every model, and drown what the models compute differently: both curves
    would lie 2 % from fp32's, and within 1 % of that from one another.
    """
    weights = [p for p in model.train().parameters() if p.requires_grad]
    masters = [p.detach().float().clone() for p in weights] if optimizer_of is None else weights
    optimizer = (optimizer_of or torch_adamw)(masters)
    found = []
    for ids in batches:
        loss = model(input_ids=ids, labels=ids)["loss"]
        loss.backward()
        if optimizer_of is None:
            for weight, master in zip(weights, masters, strict=True):
                master.grad, weight.grad = weight.grad.float(), None
        optimizer.step()
        optimizer.zero_grad()
        if optimizer_of is None:
            with torch.no_grad():
                torch._foreach_copy_(weights, masters)
        found.append(loss.detach())
    return torch.stack(found).double().cpu()


def torch_adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=LEARNING_RATE, weight_decay=0.01, fused=True)


class Offsets(Layer):
    """A number for each expert, which a router adds to its logits."""

    keep_fp32 = True

    def __init__(self, num_experts: int):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(num_experts))

    def init_weights(self, draw: Any) -> None:
        draw(self.weight, zeros)

    def shards(self) -> Any:
        return {"weight": REPLICATED}

    def forward(self) -> Tensor:
        return replicated(self.weight, self.tp)


class ExactRouter(Router):
    """A router in fp32, or in fp64, whatever the dtype of the model; put in the place of `layers.moe.Router`."""

    def __init__(self, hidden_size: int, num_experts: int, **options: Any):
        super().__init__(hidden_size, num_experts, **options)
        self.keep_fp32 = True
        self.offsets = Offsets(num_experts)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(self.weight.dtype)) + self.offsets()
