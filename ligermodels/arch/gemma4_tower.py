"""What reads images in Gemma 4: a vision tower, or in the 12B ("unified") one projection of patches.

An image of h x w patches, in any proportion, becomes h * w / 9 tokens. Patches come padded to one number, with their
places (x, y), as the image processor makes them.

The tower (E2B, E4B, 26B-A4B, 31B):
- Two learned tables, of columns and of rows, are added to the patches.
- Blocks with four norms, as Gemma's text. Each head of q, k and v is normed, v without a weight; scores are not scaled.
- The first half of a head turns by the column, the second by the row, each as a head of its own.
- In E2B and E4B the inputs and outputs of linear modules are clamped to bounds in the file, which are not trained.
- 3 x 3 neighbours are averaged and multiplied by hidden_size ** 0.5; the larger ones then standardise by two buffers.

Unified: patches of 48 x 48 pixels, projected between two layer norms; then the places are added, and a third one.

Checked against: models/gemma4/modeling_gemma4.py and models/gemma4_unified of transformers 5.24.
"""

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ligermodels.arch.config import ACTIVATIONS, VisionConfig
from ligermodels.arch.gemma4 import NORM
from ligermodels.arch.qwen_vl import check_axial_rope
from ligermodels.kernels.loss.embedding import embedding
from ligermodels.layers import Attention, Batch, GatedMLP, LayerNorm, RMSNorm, VisionRotary
from ligermodels.layers.base import Draw, Layer, Shard, normal, ones, zeros
from ligermodels.layers.linear import JointProjections, apply_linear
from ligermodels.layers.multimodal import Grids, num_tokens, patch_cells
from ligermodels.training.recompute import Checkpointing

BOUNDS = {"input_min": -math.inf, "input_max": math.inf, "output_min": -math.inf, "output_max": math.inf}


@dataclass(kw_only=True)
class Gemma4VisionConfig(VisionConfig):
    """vision_config of a config.json of model_type gemma4."""

    unused: ClassVar = frozenset({"max_position_embeddings", "initializer_range", "default_output_length"})

    hidden_size: int = 768
    intermediate_size: int = 3072
    num_hidden_layers: int = 16
    num_attention_heads: int = 12
    num_key_value_heads: int = 12
    head_dim: int = 64
    hidden_activation: str = "gelu_pytorch_tanh"
    rms_norm_eps: float = 1e-6
    attention_bias: bool = False
    attention_dropout: float = 0.0
    rope_parameters: dict[str, Any] = field(default_factory=lambda: {"rope_type": "axial", "rope_theta": 100.0})
    pooling_kernel_size: int = 3
    patch_size: int = 16
    position_embedding_size: int = 10240
    use_clipped_linears: bool = False
    standardize: bool = False

    @classmethod
    def label(cls) -> str:
        return "gemma4: vision_config"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_choice("hidden_activation", ACTIVATIONS)
        if self.num_attention_heads % self.num_key_value_heads:
            raise self._error("num_key_value_heads", f"must divide num_attention_heads {self.num_attention_heads}")
        if self.head_dim % 4:
            raise self._error("head_dim", "must be a multiple of 4: each half rotates in pairs")
        for name in ("attention_bias", "attention_dropout"):
            if getattr(self, name):
                raise self._error(name, "is not supported: this tower has none")
        if self.rope_parameters.get("rope_type") == "default":  # as in released files; transformers renames it, too
            self.rope_parameters = self.rope_parameters | {"rope_type": "axial"}
        check_axial_rope(self.label(), self.rope_parameters)

    def to_hf(self) -> dict[str, Any]:
        return {"model_type": "gemma4_vision", **super().to_hf()}

    @property
    def merge(self) -> int:
        """The patches in a row that become one token."""
        return self.pooling_kernel_size

    @property
    def patch_width(self) -> int:
        """The pixels of a patch, in all channels."""
        return 3 * self.patch_size**2

    @property
    def places(self) -> int:
        """The patches that a row or a column of an image may have."""
        return self.position_embedding_size


@dataclass(kw_only=True)
class Gemma4UnifiedVisionConfig(VisionConfig):
    """vision_config of a config.json of model_type gemma4_unified. Patches come merged from the image processor."""

    unused: ClassVar = frozenset({"initializer_range", "model_patch_size"})
    merge: ClassVar[int] = 1

    patch_size: int = 16
    pooling_kernel_size: int = 3
    mm_embed_dim: int = 3840
    mm_posemb_size: int = 1120
    rms_norm_eps: float = 1e-6
    output_proj_dims: int = 3840

    @classmethod
    def label(cls) -> str:
        return "gemma4_unified: vision_config"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.output_proj_dims != self.mm_embed_dim:
            raise self._error("output_proj_dims", f"must be mm_embed_dim {self.mm_embed_dim}: nothing is between them")
        side = self.patch_size * self.pooling_kernel_size
        if self.extra.get("model_patch_size", side) != side:
            raise self._error("patch_size", f"and pooling_kernel_size make {side}, and model_patch_size differs")

    def to_hf(self) -> dict[str, Any]:
        return {"model_type": "gemma4_unified_vision", **super().to_hf()}

    @property
    def patch_width(self) -> int:
        return 3 * (self.patch_size * self.pooling_kernel_size) ** 2

    @property
    def places(self) -> int:
        return self.mm_posemb_size


def without_padding(pixels: Tensor, grids: Grids, merge: int) -> tuple[Tensor, Tensor]:
    """Patches [images, patches, width], padded -> (those of the images [N, width], their columns and rows [2, N]).

    The merge * merge neighbours of a token follow each other.
    """
    of_images = [(rows * columns, columns, i * pixels.shape[1]) for i, (_, rows, columns) in enumerate(grids)]
    table = torch.tensor(of_images, device="cpu").to(pixels.device, non_blocking=True)  # see `VisionInputs`
    _, widths, starts = table.repeat_interleave(table[:, 0], 0, output_size=num_tokens(grids, 1)).T
    rows, columns = patch_cells(grids, merge, pixels.device)
    return pixels.flatten(0, 1)[starts + rows * widths + columns], torch.stack([columns, rows])


class ClippableLinear(Layer):
    """A linear module, whose inputs and outputs may be clamped to bounds, which are buffers."""

    input_min: Tensor
    input_max: Tensor
    output_min: Tensor
    output_max: Tensor

    def __init__(self, linear: nn.Linear, *, clips: bool):
        super().__init__()
        self.linear, self.clips = linear, clips
        for name, bound in BOUNDS.items() if clips else ():
            self.register_buffer(name, torch.tensor(bound))

    @property
    def weight(self) -> Tensor:
        return self.linear.weight

    @property
    def in_features(self) -> int:
        return self.linear.in_features

    def init_weights(self, draw: Draw) -> None:
        for name, bound in BOUNDS.items() if self.clips else ():
            draw(getattr(self, name), functools.partial(_fill, bound))

    def forward(self, x: Tensor) -> Tensor:
        if not self.clips:
            return apply_linear(self.linear, x)
        x = apply_linear(self.linear, x.clamp(self.input_min, self.input_max))
        return x.clamp(self.output_min, self.output_max)


def _fill(bound: float, values: Tensor, generator: torch.Generator | None) -> None:
    values.fill_(bound)


def clippable(layer: JointProjections, clips: bool) -> Any:
    """The layer, whose linear modules are `ClippableLinear`."""
    for name in (*layer.joint_names, layer.output_name):
        layer._modules[name] = ClippableLinear(getattr(layer, name), clips=clips)
    return layer


class AxialNorm(RMSNorm):
    """The norm of a head with the dims in the order in which attention rotates them: the first half of each half, which
    turns by the column or by the row, then the second ones. Scores are the same in any order that q and k share."""

    def shards(self) -> Mapping[str, Shard]:
        return {}  # a tower is whole on each rank

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x).unflatten(-1, (2, 2, -1)).transpose(-3, -2).flatten(-3)


class Gemma4VisionBlock(nn.Module):
    """Attention within an image and gated MLP, each between two norms."""

    def __init__(self, config: Gemma4VisionConfig):
        super().__init__()
        size, clips, norm = config.hidden_size, config.use_clipped_linears, dict(eps=config.rms_norm_eps, **NORM)
        shape: Any = dict(num_heads=config.num_attention_heads, num_kv_heads=config.num_key_value_heads)
        norms: Any = dict(qk_norm=norm, v_norm=norm | {"elementwise_affine": False})
        attention = Attention(size, **shape, **norms, head_dim=config.head_dim, scale=1.0, causal=False)
        attention.q_norm, attention.k_norm = AxialNorm(config.head_dim, **norm), AxialNorm(config.head_dim, **norm)
        mlp = GatedMLP(size, config.intermediate_size, activation=ACTIVATIONS[config.hidden_activation])
        self.self_attn, self.mlp = clippable(attention, clips), clippable(mlp, clips)
        self.input_layernorm = RMSNorm(size, **norm)
        self.post_attention_layernorm = RMSNorm(size, **norm)
        self.pre_feedforward_layernorm = RMSNorm(size, **norm)
        self.post_feedforward_layernorm = RMSNorm(size, **norm)

    def forward(self, x: Tensor, residual: Tensor | None, batch: Batch) -> tuple[Tensor, Tensor]:
        x, residual = self.input_layernorm(x, residual)
        x = self.post_attention_layernorm(self.self_attn(x, batch))
        x, residual = self.pre_feedforward_layernorm(x, residual)
        return self.post_feedforward_layernorm(self.mlp(x)), residual


class PatchEmbedder(Layer):
    """Patches of pixels, 0 to 1, and their places [2, N] -> the states of the first block [N, hidden_size]."""

    def __init__(self, config: Gemma4VisionConfig):
        super().__init__()
        shape = 2, config.position_embedding_size, config.hidden_size
        self.position_embedding_table = nn.Parameter(torch.empty(shape))
        self.input_proj = nn.Linear(config.patch_width, config.hidden_size, bias=False)

    def init_weights(self, draw: Draw) -> None:
        draw(self.position_embedding_table, ones)

    def forward(self, pixels: Tensor, places: Tensor) -> Tensor:
        x = apply_linear(self.input_proj, (2 * (pixels - 0.5)).to(self.input_proj.weight.dtype))
        return x + at_places(places, self.position_embedding_table.unbind(0))


class Gemma4Tower(Layer):
    """Patches of images [images, patches, width] -> tokens [N, hidden_size]; grids: the images' frames, rows, columns.

    `checkpointing`, an attribute: what the blocks save for the backward.
    """

    std_bias: Tensor
    std_scale: Tensor

    def __init__(self, config: Gemma4VisionConfig):
        super().__init__()
        self.checkpointing = Checkpointing()
        self.merge, self.standardize, self.root = config.merge, config.standardize, config.hidden_size**0.5
        self.patch_embedder = PatchEmbedder(config)
        blocks = (Gemma4VisionBlock(config) for _ in range(config.num_hidden_layers))
        self.encoder = nn.ModuleDict({"layers": nn.ModuleList(blocks)})
        self.rotary = VisionRotary(config.head_dim, theta=config.rope_parameters["rope_theta"])
        for name in ("std_bias", "std_scale") if config.standardize else ():
            self.register_buffer(name, torch.empty(config.hidden_size))

    def init_weights(self, draw: Draw) -> None:
        if self.standardize:
            draw(self.std_bias, zeros)
            draw(self.std_scale, ones)

    def forward(self, pixels: Tensor, grids: Grids) -> Tensor:
        pixels, places = without_padding(pixels, grids, self.merge)
        x, (cos, sin) = self.patch_embedder(pixels, places), self.rotary(places)
        counts = [rows * columns for _, rows, columns in grids]
        if len({*counts}) == 1:  # a batch, for which there are faster kernels than for sequences of all lengths
            x, cos, sin = (part.unflatten(0, (len(counts), -1)) for part in (x, cos, sin))
            batch = Batch(rotary={"full": (cos, sin)})
        else:
            bounds = torch.tensor([0, *counts], device="cpu").cumsum(0, dtype=torch.int32)  # attention wants them there
            tables = {"full": (cos[None], sin[None])}
            x, batch = x[None], Batch(rotary=tables, cu_seqlens=bounds, max_seqlen=max(counts))
        blocks: Any = self.encoder["layers"]
        residual, run = None, self.checkpointing.start(x, len(blocks))
        for i, block in enumerate(blocks):
            x, residual = run(i, block, x, residual, batch)
        return self._pooled(x if residual is None else x + residual)

    def _pooled(self, x: Tensor) -> Tensor:
        """The mean of each token's patches. Large, so in fp32, but for transformers' rounding of the mean."""
        squares = x.reshape(-1, self.merge**2, x.shape[-1])
        y = squares.float().mean(1).to(x.dtype).float() * self.root
        return ((y - self.std_bias.float()) * self.std_scale.float() if self.standardize else y).to(x.dtype)


class SoftTokens(nn.Module):
    """States [N, size] -> the embeddings of tokens [N, hidden_size]: normed, without a weight, and projected."""

    def __init__(self, size: int, hidden_size: int, eps: float):
        super().__init__()
        self.embedding_pre_projection_norm = RMSNorm(size, eps, elementwise_affine=False, **NORM)
        self.embedding_projection = nn.Linear(size, hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return apply_linear(self.embedding_projection, self.embedding_pre_projection_norm(x))


class UnifiedEmbedder(Layer):
    """Patches of images [images, patches, width] -> the embeddings of tokens [N, hidden_size], one each."""

    def __init__(self, config: Gemma4UnifiedVisionConfig, hidden_size: int, std: float):
        super().__init__()
        size, self.std = config.mm_embed_dim, std
        self.pos_embedding = nn.Parameter(torch.empty(config.mm_posemb_size, 2, size))
        self.patch_ln1 = LayerNorm(config.patch_width)
        self.patch_dense = nn.Linear(config.patch_width, size)
        self.patch_ln2 = LayerNorm(size)
        self.pos_norm = LayerNorm(size)
        self.multimodal_embedder = SoftTokens(size, hidden_size, config.rms_norm_eps)

    def init_weights(self, draw: Draw) -> None:
        draw(self.pos_embedding, normal(self.std))

    def forward(self, pixels: Tensor, grids: Grids) -> Tensor:
        pixels, places = without_padding(pixels, grids, 1)
        x = apply_linear(self.patch_dense, self.patch_ln1(pixels.to(self.patch_dense.weight.dtype)))
        x = self.patch_ln2(x) + at_places(places, self.pos_embedding.unbind(1))
        return self.multimodal_embedder(self.pos_norm(x))


def at_places(places: Tensor, tables: tuple[Tensor, ...]) -> Tensor:
    """The sum of the rows of the tables of columns and rows at places [2, N]."""
    columns, rows = (embedding(place, table) for place, table in zip(places, tables, strict=True))
    return columns + rows
