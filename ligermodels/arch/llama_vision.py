"""Llama-3.2-Vision (mllama): Llama whose cross-attention blocks look at images cut into tiles.

- Text: Llama's blocks, and at `cross_attention_layers` blocks that attend to the images in place of the text; their
  attention and their MLP are multiplied by tanh of a gate, q and k are normed head by head, without rotary embedding.
  Without an image, in the call or in the cache, these blocks are skipped. Keys and values of images are cached.
- `cross_attention_mask` [B, S, images, tiles] says which token sees which tile. A token that sees none attends to
  all of them, and the block does not add its MLP; Meta's code does not add the attention either, which
  `zero_masked_attention` asks for.
- The embedding has 8 rows more than the head, the first of them for <|image|>. The head is never tied.
- The tower computes `num_patches` states for each tile of an image (llama_vision_tower.py); the projector maps them
  to the text's hidden_size.

Paper: Dubey et al. 2024, https://arxiv.org/abs/2407.21783, section 7.
Checked against: models/mllama/modeling_mllama.py of transformers 5.23.
"""

from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ligermodels.arch.base import CausalLM, CausalLMOutput
from ligermodels.arch.block import ResidualBlock
from ligermodels.arch.config import ACTIVATIONS, NestedFields
from ligermodels.arch.decoder import BaseModel, Decoder
from ligermodels.arch.inputs import TextInputs
from ligermodels.arch.llama import LlamaBlock, LlamaConfig
from ligermodels.arch.llama_vision_tower import LlamaVisionTowerConfig, VisionTower
from ligermodels.errors import InputError
from ligermodels.layers import Batch, CrossAttention, GatedMLP, RMSNorm
from ligermodels.layers.base import Draw, saved_per_token, zeros
from ligermodels.layers.state import ImageKeyValues

EXTRA_ROWS = 8
"""Rows of the embedding beyond the vocabulary of the head."""
_BIASES = ("attention_bias", "mlp_bias")


@dataclass(kw_only=True)
class LlamaVisionConfig(NestedFields, LlamaConfig):
    """config.json of model_type mllama: the fields of its text_config, and vision_config.

    zero_masked_attention, ours: a token that sees no image gets nothing from a cross block's attention, as in Meta's
    code.
    """

    model_type: ClassVar[str] = "mllama"
    architecture: ClassVar[str] = "MllamaForConditionalGeneration"
    text_type: ClassVar[str] = "mllama_text_model"
    vision_class: ClassVar = LlamaVisionTowerConfig
    root_fields: ClassVar = ("image_token_index",)
    default_rope_theta: ClassVar[float] = 500000.0

    num_key_value_heads: int = 8
    max_position_embeddings: int = 131072
    rms_norm_eps: float = 1e-5
    dropout: float = 0.0
    bos_token_id: int | None = 128000
    eos_token_id: int | list[int] | None = 128001
    pad_token_id: int | None = 128004
    cross_attention_layers: list[int] = field(default_factory=lambda: [3, 8, 13, 18, 23, 28, 33, 38])
    vision_config: LlamaVisionTowerConfig = field(default_factory=LlamaVisionTowerConfig)
    image_token_index: int = 128256
    zero_masked_attention: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in _BIASES:
            if getattr(self, name):
                raise self._error(name, "is not supported: this architecture has none")
        if self.head_dim * self.num_attention_heads != self.hidden_size:
            raise self._error("head_dim", f"must be hidden_size {self.hidden_size} / num_attention_heads")
        cross_layers, blocks = self.cross_attention_layers, self.num_hidden_layers
        if not all(0 <= i < blocks for i in cross_layers) or len({*cross_layers}) == blocks:
            raise self._error("cross_attention_layers", f"must be of the blocks 0 to {blocks - 1}, and leave one out")
        self.tie_word_embeddings = False  # whatever the file says, as in transformers

    def to_hf(self) -> dict[str, Any]:
        values = super().to_hf()
        for name in _BIASES:
            del values["text_config"][name]
        if not self.zero_masked_attention:  # as every reader has it
            del values["text_config"]["zero_masked_attention"]
        return values


class CrossBlock(ResidualBlock):
    """Attention to the images and gated MLP, both multiplied by tanh of a gate.

    batch.images: states and mask of `CrossAttention`; attn_rows, mlp_rows [B, S, 1], 0 for tokens to which the block
    adds no attention, or no MLP, else 1. All but states may be absent or None. Without images the block is skipped.
    """

    def __init__(self, config: LlamaVisionConfig, layer: int):
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.cross_attn = CrossAttention(
            size,
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            eps=eps,
        )
        self.input_layernorm = RMSNorm(size, eps=eps)
        self.cross_attn_attn_gate = nn.Parameter(torch.zeros(1))
        self.mlp = GatedMLP(size, config.intermediate_size, activation=ACTIVATIONS[config.hidden_act])
        self.post_attention_layernorm = RMSNorm(size, eps=eps)
        self.cross_attn_mlp_gate = nn.Parameter(torch.zeros(1))

    def init_weights(self, draw: Draw) -> None:
        draw(self.cross_attn_attn_gate, zeros)
        draw(self.cross_attn_mlp_gate, zeros)

    def saved_per_token(self, policy: str) -> int:
        """What the layers inside of it save, and the two outputs that the gates multiply."""
        inside = sum(saved_per_token(child, policy) for child in self.children())
        return inside + 2 * self.input_layernorm.hidden_size

    def forward(
        self, x: Tensor, residual: Tensor | None, batch: Batch, cache: ImageKeyValues | None = None
    ) -> tuple[Tensor, Tensor | None]:
        if not (images := batch.images):
            return x, residual
        x, residual = self.input_layernorm(x, residual)
        x = self.cross_attn(x, images["states"], images.get("mask"), cache)
        x = x * _opening(self.cross_attn_attn_gate, images.get("attn_rows"))
        x, residual = self.post_attention_layernorm(x, residual)
        return self.mlp(x) * _opening(self.cross_attn_mlp_gate, images.get("mlp_rows")), residual


def _opening(gate: Tensor, rows: Tensor | None) -> Tensor:
    return gate.tanh() if rows is None else gate.tanh() * rows


def cross_mask(tiles: Tensor, num_patches: int) -> tuple[Tensor, Tensor]:
    """(which states a token sees [B, S, N], whether it sees any [B, S, 1]), both bool, of [B, S, images, tiles].

    Each tile has `num_patches` states, N in all. A token that may see none sees all.
    """
    tiles = tiles.flatten(2) != 0
    rows = tiles.any(-1, keepdim=True)
    return (tiles | ~rows)[..., None].expand(*tiles.shape, num_patches).flatten(2), rows


def _block(config: LlamaVisionConfig, layer: int) -> nn.Module:
    return (CrossBlock if layer in config.cross_attention_layers else LlamaBlock)(config, layer)


class CrossDecoder(Decoder):
    """Hands the images of its inputs to its blocks."""

    def _batch(self, tokens: Tensor, inputs: TextInputs) -> Batch:
        batch = super()._batch(tokens, inputs)
        batch.images = dict(inputs.images)
        if self.cp is not None:  # it shards the tokens, not the states
            rows = {name: x for name, x in inputs.images.items() if name != "states" and x is not None}
            batch.images |= {name: self.cp.shard(x, 1) for name, x in rows.items()}
        return batch


class LlamaVisionModel(BaseModel):
    """Vision tower, projector and text model: ids and pixels to the last hidden state."""

    def __init__(self, config: LlamaVisionConfig):
        super().__init__()
        self.config = config
        self.vision_model = VisionTower(config.vision_config)
        self.language_model = CrossDecoder(config, _block, extra_rows=EXTRA_ROWS)
        self.multi_modal_projector = nn.Linear(config.vision_config.vision_output_dim, config.hidden_size)

    def run(
        self,
        inputs: TextInputs,
        *,
        pixel_values: Tensor | None = None,
        aspect_ratio_ids: Tensor | None = None,
        aspect_ratio_mask: Tensor | None = None,
        cross_attention_mask: Tensor | None = None,
        **options: Any,
    ) -> CausalLMOutput:
        """As `Decoder.run`, with images; see `LlamaVision.forward`."""
        inputs.check_own_cache()
        states = None
        if pixel_values is not None:
            if aspect_ratio_ids is None or aspect_ratio_mask is None:
                raise InputError(
                    "pixel_values need their aspect_ratio_ids and aspect_ratio_mask; the processor makes all"
                )
            states = self.image_states(pixel_values, aspect_ratio_ids, aspect_ratio_mask)
        if states is None and self.always_runs_tower and inputs.cache is None:
            images = self._unseen(inputs)
        else:
            images = self._images(states, cross_attention_mask, inputs)
        return self.language_model(replace(inputs, images=images), **options)

    def _unseen(self, inputs: TextInputs) -> dict[str, Any]:
        """The states of an empty image of which the cross blocks add nothing."""
        vision, tokens = self.config.vision_config, inputs.tokens
        dtype = self.language_model.compute_dtype
        tiles = (vision.max_num_tiles, vision.num_channels, vision.image_size, vision.image_size)
        first = torch.zeros(1, 1, vision.max_num_tiles, dtype=torch.int64, device=tokens.device)
        first[..., 0] = 1
        pixels = torch.zeros(1, 1, *tiles, dtype=dtype, device=tokens.device)
        states = self.image_states(pixels, first[..., 0], first)
        rows, length = tokens.shape[:2] if inputs.cu_seqlens is None else (1, tokens.shape[:2].numel())
        none = torch.zeros(rows, length, 1, dtype=dtype, device=tokens.device)
        return dict(states=states.expand(rows, -1, -1), attn_rows=none, mlp_rows=none)

    def image_states(self, pixel_values: Tensor, aspect_ratio_ids: Tensor, aspect_ratio_mask: Tensor) -> Tensor:
        """The states of the images that the text attends to, [B, images * tiles * P, hidden_size]."""
        vision = self.config.vision_config
        tiles = (vision.max_num_tiles, vision.num_channels, vision.image_size, vision.image_size)
        shapes = [tuple(tensor.shape) for tensor in (pixel_values, aspect_ratio_ids, aspect_ratio_mask)]
        if shapes != [(*shapes[1], *tiles), shapes[0][:2], (*shapes[1], tiles[0])]:
            raise InputError(
                f"pixel_values {shapes[0]}, aspect_ratio_ids {shapes[1]} and aspect_ratio_mask {shapes[2]} do not fit; "
                f"expected (batch, images, {', '.join(map(str, tiles))}), (batch, images) and (batch, images, "
                f"{tiles[0]}). Were they made for another model?"
            )
        features = self.vision_model(
            pixel_values.flatten(0, 1), aspect_ratio_ids.flatten(), aspect_ratio_mask.flatten(0, 1)
        )
        return self.multi_modal_projector(features).reshape(len(pixel_values), -1, self.config.hidden_size)

    def _images(self, states: Tensor | None, mask: Tensor | None, inputs: TextInputs) -> dict[str, Any]:
        """The states and masks for the cross blocks; {} without images. The cache stores the last token's mask."""
        state: dict[str, Any] = {} if inputs.cache is None else inputs.cache.values
        if states is None and "images" not in state:
            return {}
        vision, past, images = self.config.vision_config, inputs.past_length, state.get("images", 0)
        batch_size, length = inputs.tokens.shape[:2]
        if states is not None:
            images += states.shape[1] // (vision.max_num_tiles * vision.num_patches)
        if mask is None and states is None and state["cross_mask"] is not None:
            mask = state["cross_mask"].expand(-1, length, -1, -1)
        if mask is not None:
            shape = (batch_size, length, images, vision.max_num_tiles)
            if mask.dim() == 4 and mask.shape[1] == past + length:
                mask = mask[:, past:]
            if mask.shape != shape:
                raise InputError(
                    f"cross_attention_mask has shape {list(mask.shape)}, expected {list(shape)}: the tokens, and all "
                    "images so far with their tiles"
                )
        state |= {"images": images, "cross_mask": None if mask is None else mask[:, -1:].clone()}
        if mask is None:
            return dict(states=states)
        mask, rows = cross_mask(mask, vision.num_patches)
        kept = rows.to(self.language_model.compute_dtype)
        attn_rows = kept if self.config.zero_masked_attention else None
        return dict(states=states, mask=mask, attn_rows=attn_rows, mlp_rows=kept)


class LlamaVision(CausalLM):
    """Llama-3.2-Vision. `LlamaVision.from_hub("meta-llama/Llama-3.2-11B-Vision-Instruct")` loads one."""

    config_class = LlamaVisionConfig
    model: LlamaVisionModel
    make_model = LlamaVisionModel
    _no_split_modules: ClassVar = ["LlamaBlock", "CrossBlock", "VisionBlock", "GlobalBlock"]

    def forward(  # type: ignore[override]
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        labels: Tensor | None = None,
        *,
        pixel_values: Tensor | None = None,
        aspect_ratio_ids: Tensor | None = None,
        aspect_ratio_mask: Tensor | None = None,
        cross_attention_mask: Tensor | None = None,
        **inputs: Any,
    ) -> CausalLMOutput:
        """`CausalLM.forward`, with images. Without an image, in the call or in the cache, it is plain Llama.

        pixel_values: [B, images, tiles, channels, image_size, image_size]; rows with fewer images are filled up.
        aspect_ratio_ids: [B, images], 1 + the index into `supported_aspect_ratios`, 0 where there is no image.
        aspect_ratio_mask: [B, images, tiles], 1 at tiles that are there; the first one always is.
        cross_attention_mask: [B, S or past + S, images, tiles], 1 where a token sees a tile, of the cached images
            first. Default: all tokens see all tiles, and after a cache what its last token saw.
        labels: -100 at images: the head has no logit for them.
        Packed sequences share the images of their one row; the mask must separate them.

        Raises InputError where arguments do not fit together.
        """
        return super().forward(
            input_ids,
            attention_mask,
            position_ids,
            labels,
            pixel_values=pixel_values,
            aspect_ratio_ids=aspect_ratio_ids,
            aspect_ratio_mask=aspect_ratio_mask,
            cross_attention_mask=cross_attention_mask,
            **inputs,
        )

    DISK_NAMES: ClassVar = {
        "model.language_model.{rest}": "language_model.model.{rest}",
        "model.vision_model.{rest}": "vision_model.{rest}",
        "model.multi_modal_projector.{rest}": "multi_modal_projector.{rest}",
        "lm_head.weight": "language_model.lm_head.weight",
    }
    OTHER_LAYOUTS = ({},)
    """The names that transformers has in memory since 4.52."""
