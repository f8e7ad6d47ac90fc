"""The block of Llama, which most architectures share, and functions that build its modules from a config."""

from typing import Any, ClassVar

from torch import Tensor, nn

from ligermodels.arch.config import ACTIVATIONS, ModelConfig
from ligermodels.layers import Attention, Batch, GatedMLP, RMSNorm
from ligermodels.layers.state import KeyValues


class Block(nn.Module):
    """Attention and an MLP, each on the normed residual stream:

        h = h + self_attn(input_layernorm(h))
        h = h + mlp(post_attention_layernorm(h))

    The hidden state h is passed on as two tensors, h = x + residual, so that the next norm adds them in its kernel.
    A block maps (x, residual, batch, cache) to (x, residual); residual is None before the first block.
    norm: keyword arguments of the RMSNorms beside size and eps.
    """

    last_mlp: ClassVar[str | None] = "mlp"  # see recompute.py

    def __init__(self, config: ModelConfig, self_attn: nn.Module, mlp: nn.Module, **norm: Any):
        super().__init__()
        self.self_attn = self_attn
        self.mlp = mlp
        self.input_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps, **norm)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps, **norm)

    def forward(
        self, x: Tensor, residual: Tensor | None, batch: Batch, cache: KeyValues | None = None
    ) -> tuple[Tensor, ...]:
        x, residual = self.input_layernorm(x, residual)
        x = self.self_attn(x, batch, cache)
        x, residual = self.post_attention_layernorm(x, residual)
        return self.mlp(x), residual


def attention(config: ModelConfig, layer: int, **options: Any) -> Attention:
    """The attention of block `layer`, with the heads and the window of the config. options: those of `Attention`."""
    return Attention(
        config.hidden_size,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        window=config.window(layer),
        **options,
    )


def gated_mlp(config: ModelConfig, **options: Any) -> GatedMLP:
    """The MLP of a block, with the size and the activation of the config. options: those of `GatedMLP`."""
    activation = ACTIVATIONS[config.hidden_act]
    return GatedMLP(config.hidden_size, config.intermediate_size, activation=activation, **options)
