"""The block of Llama, which most architectures share, and functions that build its modules from a config."""

import functools
from collections.abc import Callable
from typing import Any, ClassVar

from torch import Tensor, nn

from ligermodels.arch.config import ACTIVATIONS, ModelConfig, RoutedConfig
from ligermodels.errors import ConfigError, InputError
from ligermodels.layers import Attention, Batch, GatedMLP, MoE, RMSNorm
from ligermodels.layers.base import Layer
from ligermodels.layers.state import KeyValues

_NOT_GIVEN: Any = object()


class ResidualBlock(Layer):
    """The base of all blocks, whose `forward` maps (x, residual, batch, cache) to (x, residual).

    carries: the block takes one more argument, the dict of what the blocks before it have added (`Decoder.first_carry`
    begins it), which it must not change, and may return a third value, a dict of what it adds: tensors or tuples of
    tensors by name. They have gradients, also where blocks are recomputed. "router_logits", a tuple of tensors
    [tokens, experts], is for the balancing loss, and reaches no other block.

    Called without `residual`, as by code that runs a model block by block, the block returns x + residual alone.
    """

    carries: ClassVar[bool] = False

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "forward" in vars(cls):
            cls.forward = _or_hidden_state(cls.forward)  # type: ignore[method-assign]


def _or_hidden_state(forward: Callable[..., Any]) -> Callable[..., Any]:
    """The forward of a block, which returns the hidden state where `residual` is not given.

    `others`, which `HookedLayer` passes, is filled with what the block returns beside x and residual.
    """

    @functools.wraps(forward)
    def wrapped(
        self: nn.Module, x: Tensor, residual: Any = _NOT_GIVEN, *inputs: Any, others: Any = None, **options: Any
    ) -> Any:
        if residual is not _NOT_GIVEN and others is None:
            return forward(self, x, residual, *inputs, **options)
        if others is None and options.get("cache") is not None:
            raise InputError(
                f"a {type(self).__name__} that is called alone takes no cache: it would have to be that of this block. "
                "Set use_cache=False where its inputs are collected"
            )
        x, residual, *more = forward(self, x, None if residual is _NOT_GIVEN else residual, *inputs, **options)
        if others is not None:
            others[:] = more
        return x if residual is None else x + residual

    return wrapped


class Block(ResidualBlock):
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
        self, x: Tensor, residual: Tensor | None, batch: Batch, cache: KeyValues | None = None, **of_mlp: Any
    ) -> tuple[Any, ...]:
        x, residual = self.input_layernorm(x, residual)
        x = self.self_attn(x, batch, cache)
        x, residual = self.post_attention_layernorm(x, residual)
        return self.mlp(x, **of_mlp), residual


class Routed(ResidualBlock):
    """A mixin before a block whose `mlp` is a `MoE`, or in some blocks of a model a `GatedMLP`: it adds what a router
    says of the tokens, for the balancing loss. The block's forward hands its keyword arguments on to `mlp`.

    carry["replayed"]: experts that the tokens take, see `MoE`. carry["records"]: adds the experts that were chosen.
    """

    carries = True

    def forward(
        self, x: Tensor, residual: Tensor | None, batch: Batch, cache: Any = None, carry: Any = None, **of_mlp: Any
    ) -> tuple[Any, ...]:
        mlp: Any = self.mlp
        carry = carry or {}
        if "replayed" in carry and hasattr(mlp, "choose"):  # not a dense MLP
            of_mlp["experts"] = carry["replayed"]
        y, residual = super().forward(x, residual, batch, cache, **of_mlp)
        x, *router_logits = y if isinstance(y, tuple) else (y,)
        added: dict[str, Any] = {"router_logits": tuple(router_logits)}
        if carry.get("records"):
            added["experts"] = tuple(mlp.choose(logits)[1] for logits in router_logits)
        return x, residual, added


class RoutedBlock(Routed, Block):
    """A `Block` with experts."""


def attention(config: ModelConfig, layer: int, **options: Any) -> Attention:
    """The attention of block `layer`, with the heads, the window and the rope of the config.

    options: those of `Attention`; they replace the config's.
    """
    sizes = config.layer(layer)
    heads = dict(num_heads=sizes.num_attention_heads, num_kv_heads=sizes.num_key_value_heads, head_dim=sizes.head_dim)
    reads = dict(window=config.window(layer), rope=config.rope(layer))
    return Attention(sizes.hidden_size, **{**heads, **reads, **options})


def gated_mlp(config: ModelConfig, **options: Any) -> GatedMLP:
    """The MLP of a block, with the size and the activation of the config, which may be that of a layer.

    options: those of `GatedMLP`; they replace the config's. Raises ConfigError where there is no size.
    """
    sizes: dict[str, Any] = dict(intermediate_size=config.intermediate_size, activation=ACTIVATIONS[config.hidden_act])
    sizes |= options
    if sizes["intermediate_size"] is None:
        raise ConfigError(
            f"{config.model_type}: config.json lacks intermediate_size, the size of the blocks' dense MLPs"
        )
    return GatedMLP(config.hidden_size, **sizes)


def by_expert(block: str = "model.layers.{i}.", on_disk: str | None = None) -> dict[str, str | tuple[str, ...]]:
    """The rows of a table of names for experts that are three tensors each on disk. on_disk: the block there."""
    ours, theirs = f"{block}mlp.experts.", f"{on_disk or block}mlp.experts.{{e}}."
    gate_up = theirs + "gate_proj.weight", theirs + "up_proj.weight"
    return {ours + "gate_up_proj": gate_up, ours + "down_proj": theirs + "down_proj.weight"}


def mixture(config: RoutedConfig, **options: Any) -> MoE:
    """The experts of a block and their router, with the numbers and the activation of the config.

    options: those of `MoE`; they replace the config's.
    """
    sizes = dict(num_experts=config.num_experts, top_k=config.num_experts_per_tok)
    inner = dict(intermediate_size=config.intermediate_size, activation=ACTIVATIONS[config.hidden_act])
    return MoE(config.hidden_size, **{**sizes, **inner, **options})
