"""Gemma 4's text (E2B, E4B, 26B-A4B, 31B) and fine-tunes: Gemma 2's four norms around attention of two kinds.

- Blocks with a window and full ones differ in head_dim, in the number of key heads and in rope. With
  `attention_k_eq_v` a full one has no v_proj: the values are the keys before their norm and rotation, and a cache has
  the values, and of the keys the dims that rotate.
- Each head of q, k and v is normed, v without a weight; scores are not scaled. Norm weights act as they are.
- The rope of full blocks is "proportional": a quarter of the pairs rotates, by exponents that count the whole head.
- The last `num_kv_shared_layers` blocks have no keys: they read those of the last block of their kind before them, and
  with `use_double_wide_mlp` have an MLP twice as wide. A file may have weights for their keys, which are not read.
  Where the logits of the last tokens are wanted alone, as after a prompt, these blocks run for those tokens alone.
- Per-layer embeddings: a second table and a projection of the embeddings give each block an input of its own. The table
  is looked up by ids, so that `inputs_embeds` are refused.
- What leaves a block is multiplied by `layer_scalar`, a buffer, which is not trained.
- With `enable_moe_block` (26B-A4B) experts stand beside the MLP: they and their router read the residual stream, and
  the norms of both outputs are added. There is no balancing loss.

The sizes of full blocks are `global_head_dim` and `num_global_key_value_heads`, which are written, or in files of
transformers 5 `per_layer_config`.

Checked against: models/gemma4/modeling_gemma4.py of transformers 5.24.
"""

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self, cast

import torch
from torch import Tensor, nn

from ligermodels.arch.base import CausalLM
from ligermodels.arch.block import ResidualBlock, attention, gated_mlp
from ligermodels.arch.config import ACTIVATIONS, LayerTypesConfig, TextAlone
from ligermodels.arch.decoder import Decoder
from ligermodels.arch.inputs import TextInputs
from ligermodels.errors import ConfigError, InputError
from ligermodels.kernels.linear.glu import glu
from ligermodels.layers import Batch, Embedding, Experts, RMSNorm, ScaledRouter
from ligermodels.layers.base import REPLICATED, Draw, Layer, Shard, ones, saved_per_token
from ligermodels.layers.linear import apply_linear

NORM: dict[str, Any] = dict(cast_before_weight=False)


@dataclass(kw_only=True)
class Gemma4Config(TextAlone, LayerTypesConfig):
    """config.json of model_type gemma4_text, or the text_config of one of model_type gemma4."""

    model_type: ClassVar[str] = "gemma4_text"
    architecture: ClassVar[str] = "Gemma4ForCausalLM"
    left_out: ClassVar[str] = "what reads images and audio"
    partial_rotary: ClassVar[bool] = True
    default_ropes: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "full_attention": {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }

    vocab_size: int = 262144
    hidden_size: int = 2304
    intermediate_size: int = 9216
    num_hidden_layers: int = 30
    num_attention_heads: int = 8
    num_key_value_heads: int = 4
    head_dim: int = 256
    global_head_dim: int = 512
    num_global_key_value_heads: int | None = None  # read with attention_k_eq_v alone, as in transformers
    hidden_act: str = "gelu_pytorch_tanh"
    hidden_activation: str = "gelu_pytorch_tanh"
    max_position_embeddings: int = 131072
    tie_word_embeddings: bool = True
    attention_bias: bool = False
    bos_token_id: int | None = 2
    eos_token_id: int | list[int] | None = 1
    pad_token_id: int | None = 0
    sliding_window: int | None = 512
    final_logit_softcapping: float | None = None
    use_bidirectional_attention: str | None = None  # "vision": of the tokens of an image
    attention_k_eq_v: bool = False
    num_kv_shared_layers: int = 0
    use_double_wide_mlp: bool = False
    vocab_size_per_layer_input: int = 262144
    hidden_size_per_layer_input: int = 256
    enable_moe_block: bool = False
    num_experts: int | None = None
    top_k_experts: int | None = None
    moe_intermediate_size: int | None = None

    @classmethod
    def _without_aliases(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        values = super()._without_aliases(config)
        if (by_layer := values.pop("per_layer_config", None)) is None:
            return values
        names = {"head_dim": "global_head_dim"}
        if values.get("attention_k_eq_v"):
            names["num_key_value_heads"] = "num_global_key_value_heads"
        full = {i for i, kind in enumerate(values.get("layer_types") or []) if kind == "full_attention"}
        try:
            sizes = {int(i): {names[name]: size for name, size in of.items()} for i, of in by_layer.items()}
            first = next(iter(sizes.values()))
            fits = sizes == dict.fromkeys(full, first) and all(values.get(n) in (None, x) for n, x in first.items())
        except (AttributeError, KeyError, StopIteration, ValueError):
            fits = False
        if not fits:
            raise ConfigError(
                f"{cls.model_type}: per_layer_config={by_layer!r:.200} may give {' and '.join(names)} to the blocks of "
                "full_attention, the same to each, and nothing else"
            )
        return values | first

    def default_layer_type(self, layer: int) -> str:
        return "full_attention" if (layer + 1) % 6 == 0 or layer + 1 == self.num_hidden_layers else "sliding_attention"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_choice("hidden_activation", ACTIVATIONS)
        self.hidden_act = self.hidden_activation
        if self.use_bidirectional_attention not in (None, "vision"):
            raise self._error("use_bidirectional_attention", "is not supported: this is a causal language model")
        if self.enable_moe_block and None in (self.num_experts, self.top_k_experts, self.moe_intermediate_size):
            raise self._error("enable_moe_block", "needs num_experts, top_k_experts and moe_intermediate_size")
        if self.layer_types[-1] != "full_attention":
            raise self._error("layer_types", "must end with full_attention")
        if not {*self.layer_types} <= {*self.layer_types[: self.first_reader]}:
            raise self._error(
                "num_kv_shared_layers", "leaves blocks no block of their kind before them to read keys of"
            )
        if self.global_head_dim % 2:
            raise self._error("global_head_dim", "must be even: the rotary embedding rotates pairs of dimensions")
        if self.attention_k_eq_v and self.num_attention_heads % (self.num_global_key_value_heads or 1):
            raise self._error(
                "num_global_key_value_heads", f"must divide num_attention_heads {self.num_attention_heads}"
            )

    @property
    def first_reader(self) -> int:
        """The first block that reads the keys of another."""
        return max(self.num_hidden_layers - self.num_kv_shared_layers, 0)

    def layer(self, layer: int) -> Self:
        config = copy.copy(self)
        if self.layer_types[layer] == "full_attention":
            config.head_dim = self.global_head_dim
            if self.attention_k_eq_v and self.num_global_key_value_heads is not None:
                config.num_key_value_heads = self.num_global_key_value_heads
        if self.use_double_wide_mlp and layer >= self.first_reader:
            config.intermediate_size = 2 * self.intermediate_size
        return config

    def rotating(self, layer: int) -> int | None:
        """With keys as values the number of dims of a head that rotate; None in other blocks, and for another rope."""
        rope = self.ropes[self.rope(layer)]
        if not self.attention_k_eq_v or self.rope(layer) != "full" or rope["rope_type"] != "proportional":
            return None
        return 2 * int(self.global_head_dim * rope.get("partial_rotary_factor", 1.0) // 2) or None

    def sharing(self, layer: int) -> dict[str, bool]:
        """Whether block `layer` reads the keys of an earlier one, and whether later ones read its own."""
        kind, readers = self.layer_types[layer], self.layer_types[self.first_reader :]
        if layer >= self.first_reader:
            return {"reads_keys": True}
        return {"gives_keys": kind in readers and kind not in self.layer_types[layer + 1 : self.first_reader]}


class Gemma4Block(ResidualBlock):
    """Attention and gated MLP, each between two norms, and the block's own embedding of the token."""

    carries, last_mlp = True, None  # a product ends the block; see recompute.py
    recompute = False  # of the experts, as in `MoE`
    layer_scalar: Tensor

    def __init__(self, config: Gemma4Config, layer: int):
        super().__init__()
        size, norm = config.hidden_size, dict(eps=config.rms_norm_eps, **NORM)
        self.keys_name, self.input_name = config.rope(layer), f"input {layer}"  # their names in `carry`
        options: dict[str, Any] = dict(qkv_bias=config.attention_bias, o_bias=config.attention_bias, scale=1.0)
        options |= dict(qk_norm=norm, v_norm=norm | {"elementwise_affine": False}, **config.sharing(layer))
        options["keys_as_values"] = config.attention_k_eq_v and self.keys_name == "full"
        options["rotating"] = config.rotating(layer)
        self.self_attn = attention(config, layer, **options)
        for name in ("k_proj", "v_proj", "o_proj"):  # after the norms, as in transformers' order of parameters
            if (module := self.self_attn._modules.pop(name, None)) is not None:
                self.self_attn.add_module(name, module)
        self.mlp = gated_mlp(config.layer(layer))
        self.input_layernorm = RMSNorm(size, **norm)
        self.post_attention_layernorm = RMSNorm(size, **norm)
        self.pre_feedforward_layernorm = RMSNorm(size, **norm)
        self.post_feedforward_layernorm = RMSNorm(size, **norm)
        self.register_buffer("layer_scalar", torch.ones(1))
        self.width, self.activation = config.hidden_size_per_layer_input, ACTIVATIONS[config.hidden_act]
        if self.width:
            self.per_layer_input_gate = nn.Linear(size, self.width, bias=False)
            self.per_layer_projection = nn.Linear(self.width, size, bias=False)
            self.post_per_layer_input_norm = RMSNorm(size, **norm)
        self.router = None
        if config.enable_moe_block:
            inner, experts = cast(Any, config.moe_intermediate_size), cast(Any, config.num_experts)
            self.router = ScaledRouter(size, experts, top_k=cast(Any, config.top_k_experts), **norm)
            self.experts = Experts(size, inner, num_experts=experts, activation=self.activation)
            self.post_feedforward_layernorm_1 = RMSNorm(size, **norm)
            self.post_feedforward_layernorm_2 = RMSNorm(size, **norm)
            self.pre_feedforward_layernorm_2 = RMSNorm(size, **norm)

    def forward(
        self, x: Tensor, residual: Tensor | None, batch: Batch, cache: Any = None, carry: Any = None
    ) -> tuple[Any, ...]:
        x, residual = self.input_layernorm(x, residual)
        x, added = self._attended(x, batch, cache, carry or {})
        x, residual = self.pre_feedforward_layernorm(self.post_attention_layernorm(x), residual)
        x = self.post_feedforward_layernorm(self._mixed(self.mlp(x), residual)) + residual
        return self._with_input(x, carry or {}) * self.layer_scalar, None, added

    def _attended(self, x: Tensor, batch: Batch, cache: Any, carry: Mapping[str, Any]) -> tuple[Tensor, dict[str, Any]]:
        """The output of attention, and its keys if later blocks read them."""
        y = self.self_attn(x, batch, cache, carry.get(self.keys_name) if self.self_attn.reads_keys else None)
        return (y[0], {self.keys_name: y[1]}) if self.self_attn.gives_keys else (y, {})

    def _mixed(self, y: Tensor, residual: Tensor) -> Tensor:
        """The MLP's output y, with that of the experts."""
        if self.router is None:
            return y
        normed, x = self.pre_feedforward_layernorm_2(residual), residual
        if self.tp is not None:
            normed, x = self.tp.all_gather(normed, 1), self.tp.all_gather(x, 1)
        z = self.experts(normed.flatten(0, 1), *self.router(x.flatten(0, 1)), recompute=self.recompute).view(x.shape)
        z = z if self.tp is None else self.tp.reduce_scatter(z, 1)
        return self.post_feedforward_layernorm_1(y) + self.post_feedforward_layernorm_2(z)

    def _with_input(self, x: Tensor, carry: Mapping[str, Any]) -> Tensor:
        """x with what the block makes of its own embedding of the token."""
        if not self.width:
            return x
        if self.input_name not in carry:
            raise InputError("a block with an embedding of its own for each token runs in its model, not alone")
        y = glu(apply_linear(self.per_layer_input_gate, x), carry[self.input_name], activation=self.activation)
        return x + self.post_per_layer_input_norm(apply_linear(self.per_layer_projection, y))

    def init_weights(self, draw: Draw) -> None:
        draw(self.layer_scalar, ones)

    def shards(self) -> Mapping[str, Shard]:
        return dict.fromkeys(("per_layer_input_gate", "per_layer_projection"), REPLICATED) if self.width else {}

    def saved_per_token(self, policy: str) -> int:
        """What is inside; of the own input the sum that the gate reads, the gate, the input, their product, and before
        it was normed; of the chosen experts gate and up."""
        saved = sum(saved_per_token(child, policy) for child in self.children())
        if self.router is not None and policy == "none":
            saved += self.router.top_k * self.experts.saved_per_row
        return saved + (self.input_layernorm.hidden_size + 4 * self.width if self.width else 0)

    def unread_bytes(self, rows: int) -> float:
        return 0.0 if self.router is None else self.experts.unchosen_bytes(self.router.top_k, rows)


class Gemma4Decoder(Decoder, Layer):
    """The decoder with the second table."""

    def __init__(self, config: Gemma4Config):
        super().__init__(config, Gemma4Block, norm=NORM, embedding_scale=config.hidden_size**0.5)
        self.first_reader = config.first_reader
        self.width = width = config.hidden_size_per_layer_input
        if width:
            columns, rows = config.num_hidden_layers * width, config.vocab_size_per_layer_input
            options: dict[str, Any] = dict(embed_scale=width**0.5, padding_idx=config.padding_idx)
            self.embed_tokens_per_layer = Embedding(rows, columns, **options)
            self.per_layer_model_projection = nn.Linear(config.hidden_size, columns, bias=False)
            self.per_layer_projection_norm = RMSNorm(width, config.rms_norm_eps, **NORM)

    def shards(self) -> Mapping[str, Shard]:
        return {"per_layer_model_projection": REPLICATED} if self.width else {}

    def first_carry(self, tokens: Tensor, inputs: TextInputs, x: Tensor) -> dict[str, Any]:
        if not self.width:
            return {}
        if inputs.input_ids is None:  # beside the embeddings, where images are among them
            raise InputError("inputs_embeds: this model looks ids up in a second table; pass input_ids")
        ids = inputs.input_ids.reshape(tokens.shape[:2])
        projected = apply_linear(self.per_layer_model_projection, x) * self.config.hidden_size**-0.5
        projected = self.per_layer_projection_norm(projected.unflatten(-1, (-1, self.width)))
        looked_up = self.own_tokens(self.embed_tokens_per_layer(ids)).view_as(projected)
        by_block = ((projected + looked_up) * 2**-0.5).unbind(2)  # one op, whose backward stacks the gradients
        return {f"input {i}": x for i, x in enumerate(by_block)}

    def inputs_of(self, layer: int, carry: dict[str, Any]) -> dict[str, Any]:
        return {name: carry[name] for name in ("full", "sliding", f"input {layer}") if name in carry}

    def carry_of_last(self, carry: dict[str, Any], count: int) -> dict[str, Any]:
        return {name: x[:, -count:] if name.startswith("input") else x for name, x in carry.items()}


class Gemma4(CausalLM):
    """Gemma 4's text with a language-model head. `Gemma4.from_hub(...)` loads one."""

    config_class = Gemma4Config
    block_class = Gemma4Block

    OTHER_LAYOUTS = ({"model.{rest}": "model.language_model.{rest}"},)
    IGNORE = (
        *CausalLM.IGNORE,
        r"\.self_attn\.(k_proj|v_proj|k_norm)\.weight$",  # of blocks that read an earlier one's keys
        r"^model\.(vision_tower|embed_vision|audio_tower|embed_audio)\.",
    )

    @classmethod
    def make_model(cls, config: Any) -> Decoder:
        return Gemma4Decoder(config)
