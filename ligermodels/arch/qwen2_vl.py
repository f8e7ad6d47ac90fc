"""Qwen2-VL: Qwen2 that reads images and videos, whose number of tokens depends on their size.

- Text: Qwen2's blocks. A token has three positions (time, row, column), and each section of the rotary frequencies
  rotates by one of them (`mrope_section`); for text the three are equal, as in plain Qwen2.
- Vision tower: patches of 2 frames of 14 x 14 pixels through one matrix; blocks with LayerNorm, biases everywhere and
  quick_gelu; rotary by row and column; a patch sees the patches of its own frame. The merger maps 2 x 2 patches to
  one token, with exact gelu; patches are ordered by these tokens.
- The embeddings of `image_token_id` and `video_token_id` are replaced by the tower's tokens, in order.
- After a video of more frames than rows and columns, the generations of transformers differ: see `video_rule`.

Paper: Wang et al. 2024, https://arxiv.org/abs/2409.12191.
Checked against: models/qwen2_vl/modeling_qwen2_vl.py of transformers 5.23; positions against 4.57 as well.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from ligermodels.arch.base import CausalLM, CausalLMOutput
from ligermodels.arch.config import VisionConfig
from ligermodels.arch.decoder import BaseModel, Decoder
from ligermodels.arch.inputs import TextInputs
from ligermodels.arch.qwen2 import Qwen2Block, Qwen2Config
from ligermodels.errors import ConfigError, InputError
from ligermodels.layers import MLP, Attention, Batch, LayerNorm, VisionRotary
from ligermodels.layers.multimodal import Grids, PatchEmbedding, VisionInputs, patch_cells
from ligermodels.training.recompute import Checkpointing

VISION_ACTIVATIONS = {"quick_gelu": "quick_gelu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh"}
VIDEO_RULES = ("4.x", "5.x")


@dataclass(kw_only=True)
class Qwen2VLVisionConfig(VisionConfig):
    """vision_config of a config.json of model_type qwen2_vl; hidden_size is the width of the tower's output."""

    dropped: ClassVar = VisionConfig.dropped | {"in_chans", "initializer_range"}
    unused: ClassVar = frozenset({"spatial_patch_size"})

    hidden_size: int = 3584
    depth: int = 32
    embed_dim: int = 1280
    num_heads: int = 16
    mlp_ratio: float = 4
    hidden_act: str = "quick_gelu"
    in_channels: int = 3
    patch_size: int = 14
    temporal_patch_size: int = 2
    spatial_merge_size: int = 2
    rope_parameters: dict[str, Any] = field(default_factory=lambda: {"rope_type": "axial", "rope_theta": 10000.0})

    @classmethod
    def label(cls) -> str:
        return "qwen2_vl: vision_config"

    @classmethod
    def from_hf(cls, config: Any) -> Self:
        if isinstance(config, Mapping) and "in_chans" in config:  # the Hub's name for it
            config = {"in_channels": config["in_chans"], **config}
        return super().from_hf(config)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_choice("hidden_act", VISION_ACTIVATIONS)
        if self.embed_dim % (4 * self.num_heads):
            raise self._error("embed_dim", f"must be a multiple of 4 for each of num_heads={self.num_heads} heads")
        rope = self.rope_parameters
        if rope.get("rope_type", "axial") != "axial" or not isinstance(rope.get("rope_theta"), int | float):
            raise self._error("rope_parameters", "is not supported; supported: rope_type axial, with a rope_theta")


@dataclass(kw_only=True)
class Qwen2VLConfig(Qwen2Config):
    """config.json of model_type qwen2_vl: the text's fields at the top, as on the Hub, and vision_config.

    video_rule, ours: the position of the text after a video that began at p. "4.x", the default, as in the models' own
    code and transformers 4: p + max(frames, rows, columns). "5.x", as in transformers 5: p + max(rows, columns).
    """

    model_type: ClassVar[str] = "qwen2_vl"
    architecture: ClassVar[str] = "Qwen2VLForConditionalGeneration"
    default_rope_theta: ClassVar[float] = 1000000.0
    rope_aliases: ClassVar = {"mrope": "default"}
    unused: ClassVar = frozenset({"vision_token_id"})

    num_key_value_heads: int = 8
    rms_norm_eps: float = 1e-5
    max_window_layers: int = 80
    vision_config: Qwen2VLVisionConfig
    image_token_id: int = 151655
    video_token_id: int = 151656
    vision_start_token_id: int = 151652
    vision_end_token_id: int = 151653
    video_rule: str = "4.x"

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Self:
        """A config from the contents of a config.json, flat or with a text_config. Raises as `ModelConfig.from_hf`."""
        if "text_config" in config:
            config = dict(config)
            text = config.pop("text_config") or {}
            if not isinstance(text, Mapping) or text.get("model_type", "qwen2_vl") not in ("qwen2_vl", "qwen2_vl_text"):
                raise ConfigError(f"qwen2_vl: text_config is {text!r}, expected an object of qwen2_vl_text")
            tied = config.get("tie_word_embeddings") or text.get("tie_word_embeddings") or False
            of_the_root = {"model_type", "architectures"}
            if config.keys() & {"dtype", "torch_dtype"}:
                of_the_root |= {"dtype", "torch_dtype"}
            text = {key: value for key, value in text.items() if key not in of_the_root}
            config = {**config, **text, "tie_word_embeddings": tied}
        return super().from_hf(config)

    def __post_init__(self) -> None:
        if not isinstance(self.vision_config, Qwen2VLVisionConfig):
            self.vision_config = Qwen2VLVisionConfig.from_hf(self.vision_config)
        super().__post_init__()
        sections = self.rope_parameters.setdefault("mrope_section", [16, 24, 24])
        if not isinstance(sections, list) or len(sections) != 3 or sum(sections) != self.head_dim // 2:
            half = f"three numbers of frequencies, together {self.head_dim // 2}, half of head_dim"
            raise ConfigError(f"qwen2_vl: mrope_section is {sections!r}, expected {half}")
        if self.vision_config.hidden_size != self.hidden_size:
            raise self._error("hidden_size", f"differs from that of vision_config, {self.vision_config.hidden_size}")
        self._check_choice("video_rule", VIDEO_RULES)

    def images(self, image_grid_thw: Tensor | None, video_grid_thw: Tensor | None) -> VisionInputs:
        """The images and videos of a call, from their sizes [images, 3] in patches."""
        kinds = (("image", self.image_token_id, image_grid_thw), ("video", self.video_token_id, video_grid_thw))
        return VisionInputs(kinds, merge=self.vision_config.spatial_merge_size)

    def get_rope_index(
        self,
        input_ids: Tensor,
        image_grid_thw: Tensor | None = None,
        video_grid_thw: Tensor | None = None,
        attention_mask: Tensor | None = None,
        *,
        cu_seqlens: Tensor | None = None,
        video_rule: str | None = None,
    ) -> tuple[Tensor, Tensor]:
        """(position_ids [3, B, S], rope_deltas [B, 1]), for a data loader; arguments as in `VisionInputs.positions`.

        rope_deltas: by how much positions after the text exceed its number of tokens, padding not counted.
        """
        rule, images = video_rule or self.video_rule, self.images(image_grid_thw, video_grid_thw)
        if rule not in VIDEO_RULES:
            raise InputError(f"video_rule={rule!r} is not supported; supported: {', '.join(VIDEO_RULES)}")
        positions = images.positions(input_ids, attention_mask, cu_seqlens=cu_seqlens, frames_count=rule == "4.x")
        tokens = input_ids.shape[1] if attention_mask is None else attention_mask.long().sum(1, keepdim=True)
        return positions, positions.amax((0, 2))[:, None] + 1 - tokens

    def to_hf(self) -> dict[str, Any]:
        values, rope = super().to_hf(), self.rope_parameters
        scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
        scaling["type"] = "mrope" if rope["rope_type"] == "default" else rope["rope_type"]  # for early readers
        values |= {"vision_config": self.vision_config.to_hf(), "rope_scaling": scaling}
        if self.video_rule == "4.x":
            del values["video_rule"]
        return values


class VisionBlock(nn.Module):
    """Attention within a frame and an MLP, each on the normed residual stream."""

    def __init__(self, config: Qwen2VLVisionConfig):
        super().__init__()
        size, heads = config.embed_dim, config.num_heads
        shape: Any = dict(num_heads=heads, num_kv_heads=heads, head_dim=size // heads)
        self.norm1 = LayerNorm(size, eps=1e-6)
        self.norm2 = LayerNorm(size, eps=1e-6)
        self.attn = Attention(size, **shape, qkv_bias=True, o_bias=True, causal=False, projections=("qkv", "proj"))
        self.mlp = MLP(size, int(size * config.mlp_ratio), activation=VISION_ACTIVATIONS[config.hidden_act])

    def forward(self, x: Tensor, residual: Tensor | None, batch: Batch) -> tuple[Tensor, Tensor]:
        x, residual = self.norm1(x, residual)
        x = self.attn(x, batch)
        x, residual = self.norm2(x, residual)
        return self.mlp(x), residual


class PatchMerger(nn.Module):
    """States of merge x merge neighbours, [..., embed_dim] one after the other, -> one token [N, hidden_size]."""

    def __init__(self, config: Qwen2VLVisionConfig):
        super().__init__()
        size = config.embed_dim * config.spatial_merge_size**2
        self.ln_q = LayerNorm(config.embed_dim, eps=1e-6)
        self.mlp = MLP(size, size, activation="gelu", out_features=config.hidden_size, projections=("0", "2"))
        self.size = size

    def forward(self, x: Tensor, residual: Tensor | None) -> Tensor:
        x, _ = self.ln_q(x, residual)
        return self.mlp(x.reshape(-1, self.size))


class VisionTower(nn.Module):
    """Patches of images -> tokens: forward(rows of pixels [N, ...], grids) -> [N / merge^2, hidden_size].

    `checkpointing`, an attribute: what the blocks save for the backward.
    """

    def __init__(self, config: Qwen2VLVisionConfig):
        super().__init__()
        self.checkpointing = Checkpointing()
        self.merge = config.spatial_merge_size
        kernel = (config.temporal_patch_size, config.patch_size, config.patch_size)
        embedding = PatchEmbedding(config.in_channels, config.embed_dim, kernel)
        self.patch_embed, self.patch_width = nn.ModuleDict({"proj": embedding}), embedding.width
        self.rotary_pos_emb = VisionRotary(
            config.embed_dim // config.num_heads, theta=config.rope_parameters["rope_theta"]
        )
        self.blocks = nn.ModuleList(VisionBlock(config) for _ in range(config.depth))
        self.merger = PatchMerger(config)

    def forward(self, pixels: Tensor, grids: Grids) -> Tensor:
        x = self.patch_embed["proj"](pixels)
        cos, sin = self.rotary_pos_emb(patch_cells(grids, self.merge).to(x.device, non_blocking=True))
        frames = [rows * columns for count, rows, columns in grids for _ in range(count)]
        if len(set(frames)) == 1:  # a batch, for which there are faster kernels than for sequences of all lengths
            x, cos, sin = (t.unflatten(0, (len(frames), -1)) for t in (x, cos, sin))
            batch = Batch(rotary={"full": (cos, sin)})
        else:
            bounds = torch.tensor([0, *frames], device="cpu").cumsum(0, dtype=torch.int32)  # attention wants them there
            tables = {"full": (cos[None], sin[None])}
            x, batch = x[None], Batch(rotary=tables, cu_seqlens=bounds, max_seqlen=max(frames))
        residual, run = None, self.checkpointing.start(x, len(self.blocks))
        for i, block in enumerate(self.blocks):
            x, residual = run(i, block, x, residual, batch)
        return self.merger(x, residual)


class Qwen2VLModel(BaseModel):
    """Vision tower and text model: ids and pixels to the last hidden state."""

    def __init__(self, config: Qwen2VLConfig):
        super().__init__()
        self.config = config
        self.visual = VisionTower(config.vision_config)
        self.language_model = Decoder(config, Qwen2Block, position_axes=3)

    def run(
        self,
        inputs: TextInputs,
        *,
        pixel_values: Tensor | None = None,
        pixel_values_videos: Tensor | None = None,
        image_grid_thw: Tensor | None = None,
        video_grid_thw: Tensor | None = None,
        mm_token_type_ids: Tensor | None = None,
        **options: Any,
    ) -> CausalLMOutput:
        """As `Decoder.run`, with images; see `Qwen2VL.forward`."""
        inputs.check_own_cache()
        ids, embeds = inputs.input_ids, inputs.inputs_embeds
        images = self.config.images(image_grid_thw, video_grid_thw)
        pixels = images.pixels(pixel_values, pixel_values_videos, width=self.visual.patch_width)
        check = images.check_count(ids) if ids is not None and (images or not inputs.past) else None
        if pixels is not None:
            if ids is None:
                raise InputError("images need input_ids, which say where they stand, and no inputs_embeds")
            tokens = self.visual(pixels, images.grids)
            embeds = images.merge_embeddings(self.language_model.embed_tokens(ids), ids, tokens)
        elif self.always_runs_tower and inputs.cache is None:
            merge = self.visual.merge
            empty = torch.zeros(merge * merge, self.visual.patch_width, device=inputs.tokens.device)
            nothing = 0 * self.visual(empty, ((1, merge, merge),)).sum()  # before the embedding, as with images
            embeds = nothing + (self.language_model.embed_tokens(ids) if embeds is None else embeds)
        positions = self._positions(inputs, images)
        output = self.language_model(replace(inputs, inputs_embeds=embeds, position_ids=positions), **options)
        if check:
            check()
        return output

    def _positions(self, inputs: TextInputs, images: VisionInputs) -> Tensor | None:
        """The positions for the text model: [3, B, S], or [B, S] or None where the three are equal.

        The cache stores rope_deltas [B, 1], by how much positions exceed the number of tokens.
        """
        ids, mask, cache, past = inputs.tokens, inputs.attention_mask, inputs.cache, inputs.past
        text, positions = inputs.position_ids, None
        if text is not None and text.dim() == 3:
            positions, text = text[-3:], None
        deltas = None if cache is None else cache.values.get("rope_deltas")
        if positions is None and not images:
            if deltas is None:
                return text
            if text is None and mask is None:
                text = torch.arange(past, past + ids.shape[1], device=ids.device)
            if text is not None:
                return text + deltas
        if positions is None:
            counts = self.config.video_rule == "4.x"
            positions = images.positions(
                ids, mask, past=past, deltas=deltas, cu_seqlens=inputs.cu_seqlens, frames_count=counts
            )
        if cache is not None:
            num_tokens = past + ids.shape[1] if mask is None else mask.long().sum(1, keepdim=True)
            cache.values["rope_deltas"] = (positions.amax((0, 2))[:, None] + 1 - num_tokens).expand(len(ids), 1)
        return positions


class Qwen2VL(CausalLM):
    """Qwen2-VL with a language-model head. `Qwen2VL.from_hub("Qwen/Qwen2-VL-7B-Instruct")` loads one."""

    config_class = Qwen2VLConfig
    model: Qwen2VLModel
    make_model = Qwen2VLModel
    _no_split_modules: ClassVar = ["Qwen2Block", "VisionBlock"]

    def forward(  # type: ignore[override]  # the others by name only
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        labels: Tensor | None = None,
        *,
        pixel_values: Tensor | None = None,
        pixel_values_videos: Tensor | None = None,
        image_grid_thw: Tensor | None = None,
        video_grid_thw: Tensor | None = None,
        mm_token_type_ids: Tensor | None = None,
        **inputs: Any,
    ) -> CausalLMOutput:
        """`CausalLM.forward`, with images.

        pixel_values, pixel_values_videos: [patches, channels * frames * side^2], of all images and of all videos.
        image_grid_thw, video_grid_thw: [images, 3], frames, rows and columns in patches. The host needs their values:
            leave them on the CPU; on a GPU each costs a host synchronisation.
        position_ids: [3, B, S], by default those of `config.get_rope_index`, which a data loader can make beforehand;
            with `cu_seqlens` for packed sequences. [B, S] are the text's alone, as `CausalLM.forward` has them: they
            mark packed sequences. [4, B, S], as transformers has it: the text's, and the three.
        past_key_values: images may come with any call; the cache stores by how much positions differ from token counts.
        mm_token_type_ids: ignored; transformers' processors return it.

        Raises InputError where images, sizes and ids do not fit together. On a GPU, tokens are counted while the
        forward runs, and the error comes after it.
        """
        return super().forward(
            input_ids,
            attention_mask,
            position_ids,
            labels,
            pixel_values=pixel_values,
            pixel_values_videos=pixel_values_videos,
            image_grid_thw=image_grid_thw,
            video_grid_thw=video_grid_thw,
            mm_token_type_ids=mm_token_type_ids,
            **inputs,
        )

    DISK_NAMES: ClassVar = {
        "model.visual.{rest}": "visual.{rest}",
        "model.language_model.{rest}": "model.{rest}",
    }
    ALSO_READ: ClassVar = ({}, {"model.language_model.{rest}": "model.language_model.model.{rest}"})
