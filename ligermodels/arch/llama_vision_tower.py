"""The vision tower of Llama-3.2-Vision: images, cut into tiles, to the features that the text attends to.

- A class token and the patches of up to 4 tiles are one sequence, with gated embeddings of the positions and, by
  aspect ratio, of the tiles. LayerNorm, exact gelu, no biases in attention; 32 blocks, then 8 gated ones.
- Absent tiles, and the padding of each tile to a multiple of 8 states, are not masked out: they attend to all other
  states and are attended to, but not among themselves (`TowerAttention`).
- The states of `intermediate_layers_indices` are appended to the last ones, interleaved: feature c of state j is at
  c * n + j.

Implementations disagree on index i of `intermediate_layers_indices`: it is the input of block i in Meta's code, with
which the models were trained, and in transformers 4.45, but its output in later ones (4.57, 5.23).
`intermediate_states` "after", the default, agrees with today's transformers; "before" with the training.

Paper: Dubey et al. 2024, https://arxiv.org/abs/2407.21783, section 7.
Checked against: models/mllama/modeling_mllama.py of transformers 5.23.
"""

import math
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ligermodels.arch.config import KNOWN_WITHOUT_EFFECT, VisionConfig
from ligermodels.kernels.attention.attention import attention
from ligermodels.layers import MLP, Attention, Embedding, LayerNorm
from ligermodels.layers.base import Draw, Layer, normal, zeros
from ligermodels.layers.linear import apply_linear
from ligermodels.layers.multimodal import PatchEmbedding
from ligermodels.training.recompute import Checkpointing

ACTIVATIONS = {"gelu": "gelu", "quick_gelu": "quick_gelu", "gelu_pytorch_tanh": "gelu_tanh"}
RATIOS = ((1, 1), (1, 2), (1, 3), (1, 4), (2, 1), (2, 2), (3, 1), (4, 1))
"""Rows and columns of tiles."""


@dataclass(kw_only=True)
class LlamaVisionTowerConfig(VisionConfig):
    """vision_config of a config.json of model_type mllama."""

    dropped: ClassVar = KNOWN_WITHOUT_EFFECT

    hidden_size: int = 1280
    hidden_act: str = "gelu"
    num_hidden_layers: int = 32
    num_global_layers: int = 8
    attention_heads: int = 16
    num_channels: int = 3
    intermediate_size: int = 5120
    vision_output_dim: int = 7680
    image_size: int = 448
    patch_size: int = 14
    norm_eps: float = 1e-5
    max_num_tiles: int = 4
    intermediate_layers_indices: list[int] = field(default_factory=lambda: [3, 7, 15, 23, 30])
    supported_aspect_ratios: list[list[int]] = field(default_factory=lambda: [list(ratio) for ratio in RATIOS])
    initializer_range: float = 0.02
    intermediate_states: str = "after"

    @classmethod
    def label(cls) -> str:
        return "mllama: vision_config"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_choice("hidden_act", ACTIVATIONS)
        self._check_choice("intermediate_states", ("after", "before"))
        if self.hidden_size % self.attention_heads:
            raise self._error("hidden_size", f"must be a multiple of attention_heads={self.attention_heads}")
        if self.image_size < self.patch_size:
            raise self._error("image_size", f"must be at least patch_size={self.patch_size}")
        blocks, picked, tiles = self.num_hidden_layers, self.intermediate_layers_indices, self.max_num_tiles
        if not all(0 <= i < blocks for i in picked):
            raise self._error("intermediate_layers_indices", f"must be blocks, 0 to {blocks - 1}")
        ratios = self.supported_aspect_ratios
        if not all(len(ratio) == 2 and min(ratio) > 0 and math.prod(ratio) <= tiles for ratio in ratios):
            raise self._error("supported_aspect_ratios", f"must be pairs of sizes, of at most {tiles} tiles each")
        width = self.hidden_size * (1 + len(picked))
        if self.vision_output_dim != width:
            raise self._error("vision_output_dim", f"must be {width}, for all features")

    def to_hf(self) -> dict[str, Any]:
        values = super().to_hf()
        if self.intermediate_states == "after":  # as every reader has it
            del values["intermediate_states"]
        return {"model_type": "mllama_vision_model", **values}

    @property
    def num_patches(self) -> int:
        """States of a tile: its patches and the class token."""
        return (self.image_size // self.patch_size) ** 2 + 1


def patches(tiles: Tensor, size: int) -> Tensor:
    """Rows of pixels [N, patches, channels * size^2] of tiles [N, channels, S, S], row by row.

    Pixels beyond the last whole patch, at the right and at the bottom, are dropped.
    """
    rows, columns = tiles.shape[-2] // size, tiles.shape[-1] // size
    tiles = tiles[..., : rows * size, : columns * size].unflatten(-1, (columns, size)).unflatten(-3, (rows, size))
    return tiles.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)  # from [N, channels, rows, p, columns, p]


class TileEmbedding(Layer):
    """Adds to the states of each tile, [N, tiles, patches, hidden_size], a gated vector by aspect ratio and tile."""

    def __init__(self, config: LlamaVisionTowerConfig):
        super().__init__()
        self.gate = nn.Parameter(torch.zeros(1))
        num_ids = len(config.supported_aspect_ratios) + 1  # 0: no image
        self.embedding = Embedding(num_ids, config.max_num_tiles * config.hidden_size)

    def init_weights(self, draw: Draw) -> None:
        draw(self.gate, zeros)

    def forward(self, x: Tensor, aspect_ratio_ids: Tensor) -> Tensor:
        return x + self.embedding(aspect_ratio_ids).view(len(x), -1, 1, x.shape[-1]) * self.gate.tanh()


class PositionEmbedding(Layer):
    """Adds to states [N, tiles, P, hidden_size] an embedding of the patch, and a gated one of patch, tile and ratio."""

    def __init__(self, config: LlamaVisionTowerConfig):
        super().__init__()
        size = config.num_patches * config.hidden_size
        self.std, self.gate = config.initializer_range, nn.Parameter(torch.zeros(1))
        self.embedding = nn.Parameter(torch.empty(config.num_patches, config.hidden_size))
        self.tile_embedding = Embedding(len(config.supported_aspect_ratios) + 1, config.max_num_tiles * size)

    def init_weights(self, draw: Draw) -> None:
        draw(self.gate, zeros)
        draw(self.embedding, normal(self.std))

    def forward(self, x: Tensor, aspect_ratio_ids: Tensor) -> Tensor:
        gate = self.gate.tanh()
        x = x + (1 - gate) * self.embedding
        return x + gate * self.tile_embedding(aspect_ratio_ids).view_as(x)


class TowerAttention(Attention):
    """Attention of all states to all, but not of padding to padding.

    The heads of q and k get one more dim, -1024 and 1024 at padding and 0 elsewhere. Its product is added to the scores
    of two states of padding alone, whose weights it makes 0, so that engines without masks compute the rest as it is.
    They take dims in multiples of 8.
    """

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:  # type: ignore[override]
        """x [N, S, hidden_size], padding bool [N, S] -> [N, S, hidden_size]."""
        q, k, v, _ = self._qkv(x, None)
        mark = F.pad(padding[:, :, None, None].to(q.dtype) * 1024, (0, 7)).expand(-1, -1, self.num_heads, -1)
        q, k, v = torch.cat([q, -mark], dim=-1), torch.cat([k, mark], dim=-1), F.pad(v, (0, 8))
        out = attention(q, k, v, causal=False, scale=self.head_dim**-0.5)[..., : self.head_dim]
        return apply_linear(self.output_module, out.flatten(2))

    def saved_per_token(self, policy: str) -> int:
        """Also the further dims of q, k, v and the output, and the output without them."""
        return super().saved_per_token(policy) + self.num_heads * (4 * 8 + self.head_dim)


class VisionBlock(Layer):
    """Attention and MLP, each on the normed residual stream."""

    last_mlp: str | None = "mlp"  # see recompute.py

    def __init__(self, config: LlamaVisionTowerConfig):
        super().__init__()
        size, heads, eps = config.hidden_size, config.attention_heads, config.norm_eps
        shape: Any = dict(num_heads=heads, num_kv_heads=heads, head_dim=size // heads)
        self.self_attn = TowerAttention(size, **shape, causal=False, rope=None)
        self.mlp = MLP(size, config.intermediate_size, activation=ACTIVATIONS[config.hidden_act])
        self.input_layernorm = LayerNorm(size, eps=eps)
        self.post_attention_layernorm = LayerNorm(size, eps=eps)

    def forward(self, x: Tensor, residual: Tensor | None, padding: Tensor) -> tuple[Tensor, Tensor]:
        x, residual = self.input_layernorm(x, residual)
        x = self.self_attn(x, padding)
        x, residual = self.post_attention_layernorm(x, residual)
        return self.mlp(x), residual


class GlobalBlock(VisionBlock):
    """A block whose attention and MLP enter by tanh of a gate."""

    last_mlp = None

    def __init__(self, config: LlamaVisionTowerConfig):
        super().__init__(config)
        self.gate_attn = nn.Parameter(torch.full((1,), math.pi / 4))
        self.gate_ffn = nn.Parameter(torch.full((1,), math.pi / 4))
        self.std = config.initializer_range

    def init_weights(self, draw: Draw) -> None:
        draw(self.gate_attn, normal(self.std))
        draw(self.gate_ffn, normal(self.std))

    def forward(self, x: Tensor, residual: Tensor | None, padding: Tensor) -> tuple[Tensor, Tensor]:
        x, residual = self.input_layernorm(x, residual)
        x = self.self_attn(x, padding) * self.gate_attn.tanh()
        x, residual = self.post_attention_layernorm(x, residual)
        return self.mlp(x) * self.gate_ffn.tanh(), residual


class Encoder(nn.Module):
    """A stack of blocks under the checkpoint's names."""

    def __init__(self, config: LlamaVisionTowerConfig, block: type[VisionBlock], num_layers: int):
        super().__init__()
        self.layers = nn.ModuleList(block(config) for _ in range(num_layers))


class VisionTower(Layer):
    """Images in tiles -> the features of their patches; see `forward`.

    `checkpointing`, an attribute: what the blocks save for the backward.
    """

    def __init__(self, config: LlamaVisionTowerConfig):
        super().__init__()
        self.checkpointing = Checkpointing()
        self.config = config
        self.patch_embedding = PatchEmbedding(config.num_channels, config.hidden_size, (config.patch_size,) * 2)
        self.class_embedding = nn.Parameter(torch.empty(config.hidden_size))
        self.gated_positional_embedding = PositionEmbedding(config)
        self.pre_tile_positional_embedding = TileEmbedding(config)
        self.post_tile_positional_embedding = TileEmbedding(config)
        self.layernorm_pre = LayerNorm(config.hidden_size)
        self.layernorm_post = LayerNorm(config.hidden_size)
        self.transformer = Encoder(config, VisionBlock, config.num_hidden_layers)
        self.global_transformer = Encoder(config, GlobalBlock, config.num_global_layers)

    def init_weights(self, draw: Draw) -> None:
        draw(self.class_embedding, normal(self.config.initializer_range))

    def forward(self, pixel_values: Tensor, aspect_ratio_ids: Tensor, aspect_ratio_mask: Tensor) -> Tensor:
        """pixel_values [N, tiles, channels, S, S], ids [N], mask [N, tiles] -> [N, tiles, P, vision_output_dim]."""
        num_images, num_tiles = pixel_values.shape[:2]
        x = patches(pixel_values.flatten(0, 1), self.config.patch_size)
        x = self.patch_embedding(x).unflatten(0, (num_images, num_tiles))
        x = self.pre_tile_positional_embedding(x, aspect_ratio_ids)
        x = torch.cat([self.class_embedding.expand(num_images, num_tiles, 1, -1), x], dim=2)
        x = self.layernorm_pre(self.gated_positional_embedding(x, aspect_ratio_ids))
        length = x.shape[2]
        x = F.pad(x, (0, 0, 0, -length % 8))
        padding = tower_padding(aspect_ratio_mask, length, x.shape[2])
        shape, picked = x.shape, self.config.intermediate_layers_indices
        x, states = self._run(self.transformer.layers, x.flatten(1, 2), padding, picked)
        x = self.post_tile_positional_embedding(self.layernorm_post(x).view(shape), aspect_ratio_ids)
        x, _ = self._run(self.global_transformer.layers, x.flatten(1, 2), padding, [])
        features = torch.stack(states, dim=-1).flatten(2) if states else x[..., :0]
        return torch.cat([x, features], dim=-1).view(*shape[:3], -1)[:, :, :length]

    def _run(self, blocks: nn.ModuleList, x: Tensor, padding: Tensor, picked: list[int]) -> tuple[Tensor, list[Tensor]]:
        """The last state, and those before or after the `picked` blocks, in their order."""
        first, residual, states = int(self.config.intermediate_states == "after"), None, {}
        run = self.checkpointing.start(x, len(blocks))
        for i, block in enumerate(blocks):
            if i - first in picked:
                x, residual = x if residual is None else x + residual, None
                states[i - first] = x
            x, residual = run(i, block, x, residual, padding)
        x = x if residual is None else x + residual
        return x, [states.get(i, x) for i in picked]


def tower_padding(aspect_ratio_mask: Tensor, length: int, padded: int) -> Tensor:
    """bool [N, tiles * padded]: tokens of tiles that mask [N, tiles] lacks, or beyond the first `length` of a tile."""
    filling = torch.arange(padded, device=aspect_ratio_mask.device) >= length
    return ((aspect_ratio_mask == 0)[..., None] | filling).flatten(1)
