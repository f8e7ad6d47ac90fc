"""What Qwen's models that read images share: fields of the config, blocks of the tower, and the whole forward.

- An image of any size is cut into patches. A patch attends to those of its own frame; a merger maps merge x merge
  neighbours to one token, and patches are ordered by these tokens.
- The embeddings of `image_token_id` and `video_token_id` are replaced by the tower's tokens, in order.
- A token has three positions (time, row, column), and each rotary frequency of the text rotates by one of them
  (`mrope_section`); for text the three are equal, as without images.

Source: Wang et al. 2024, https://arxiv.org/abs/2409.12191.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ligermodels.arch.base import CausalLM, CausalLMOutput
from ligermodels.arch.config import CheckedFields
from ligermodels.arch.decoder import BaseModel, Decoder
from ligermodels.arch.inputs import TextInputs
from ligermodels.errors import ConfigError, InputError
from ligermodels.layers import MLP, Attention, Batch, LayerNorm
from ligermodels.layers.multimodal import Grids, Modality, VisionInputs, patch_cells, read_grids
from ligermodels.training.recompute import Checkpointing

VISION_ACTIVATIONS = {"quick_gelu": "quick_gelu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh"}


@dataclass(kw_only=True)
class ImageTokens(CheckedFields):
    """The fields for tokens of images, and their positions; a mixin before the config of the text."""

    mrope_section: ClassVar[tuple[int, int, int]]
    """The default of this key of the rope dict: how many frequencies rotate by time, row and column."""
    mrope_interleaved: ClassVar[bool] = False
    """Whether frequencies take the three positions in turn; see `RotaryEmbedding`."""
    frames_apart: ClassVar[bool] = False
    """Whether each frame of a video stands alone in the text, after its time."""

    image_token_id: int = 151655
    video_token_id: int = 151656
    vision_start_token_id: int = 151652
    vision_end_token_id: int = 151653

    def __post_init__(self) -> None:
        super().__post_init__()
        config: Any = self  # with the fields of the text
        rope, interleaved = config.rope_parameters, self.mrope_interleaved
        if rope.get("mrope_interleaved", interleaved) != interleaved:
            raise ConfigError(f"{self.label()}: mrope_interleaved is {not interleaved}, supported: {interleaved}")
        if interleaved:
            rope["mrope_interleaved"] = True
        rotated = int(config.head_dim * rope.get("partial_rotary_factor", 1.0)) // 2
        sections = rope.setdefault("mrope_section", list(self.mrope_section))
        if not isinstance(sections, list) or len(sections) != 3 or sum(sections) != rotated:
            expected = f"three numbers of frequencies, together {rotated}, half of the dims of a head that rotate"
            raise ConfigError(f"{self.label()}: mrope_section is {sections!r}, expected {expected}")
        if config.vision_config.token_size != config.hidden_size:
            raise self._error("hidden_size", f"differs from that of vision_config, {config.vision_config.token_size}")

    @property
    def frames_count(self) -> bool:
        """Whether the position of the text after a video counts its frames; see `VisionInputs.positions`."""
        return True

    def images(self: Any, image_grid_thw: Tensor | None, video_grid_thw: Tensor | None) -> VisionInputs:
        """The images and videos of a call, from their sizes [images, 3] in patches."""
        merge = self.vision_config.spatial_merge_size
        images = read_grids("image", image_grid_thw, merge, frames_apart=self.frames_apart)
        videos = read_grids("video", video_grid_thw, merge, frames_apart=self.frames_apart)
        modalities = Modality("image", self.image_token_id, images), Modality("video", self.video_token_id, videos)
        return VisionInputs(modalities, merge=merge, frames_count=self.frames_count)

    def get_rope_index(
        self,
        input_ids: Tensor,
        image_grid_thw: Tensor | None = None,
        video_grid_thw: Tensor | None = None,
        attention_mask: Tensor | None = None,
        *,
        cu_seqlens: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """(position_ids [3, B, S], rope_deltas [B, 1]), for a data loader; arguments as in `VisionInputs.positions`.

        rope_deltas: by how much positions after the text exceed its number of tokens, padding not counted.
        """
        images = self.images(image_grid_thw, video_grid_thw)
        positions = images.positions(input_ids, attention_mask, cu_seqlens=cu_seqlens)
        tokens = input_ids.shape[1] if attention_mask is None else attention_mask.long().sum(1, keepdim=True)
        return positions, positions.amax((0, 2))[:, None] + 1 - tokens


class VisionBlock(nn.Module):
    """Attention within a frame and an MLP, each on the normed residual stream. mlp: further arguments of the MLP."""

    def __init__(self, size: int, intermediate_size: int, num_heads: int, **mlp: Any):
        super().__init__()
        shape: Any = dict(num_heads=num_heads, num_kv_heads=num_heads, head_dim=size // num_heads)
        self.norm1 = LayerNorm(size, eps=1e-6)
        self.norm2 = LayerNorm(size, eps=1e-6)
        self.attn = Attention(size, **shape, qkv_bias=True, o_bias=True, causal=False, projections=("qkv", "proj"))
        self.mlp = MLP(size, intermediate_size, **mlp)

    def forward(self, x: Tensor, residual: Tensor | None, batch: Batch) -> tuple[Tensor, Tensor]:
        x, residual = self.norm1(x, residual)
        x = self.attn(x, batch)
        x, residual = self.norm2(x, residual)
        return self.mlp(x), residual


class VisionTower(nn.Module):
    """Patches of images -> tokens; see `forward`. A subclass makes the modules.

    patch_embed["proj"]: the `PatchEmbedding`. rotary_pos_emb: a `VisionRotary`. merger: (x, residual), merge^2
    neighbours after each other, -> tokens. picked: {block: module that maps x after it to states for the text model}.
    `checkpointing`, an attribute: what the blocks save for the backward.
    """

    patch_embed: nn.ModuleDict
    rotary_pos_emb: nn.Module
    blocks: nn.ModuleList
    merger: nn.Module

    def __init__(self, merge: int):
        super().__init__()
        self.checkpointing = Checkpointing()
        self.merge = merge

    @property
    def patch_width(self) -> int:
        """The number of pixels, in all channels, of a patch."""
        return self.patch_embed["proj"].width  # type: ignore[return-value]

    @property
    def picked(self) -> dict[int, nn.Module]:
        return {}

    def add_positions(self, x: Tensor, grids: Grids, cells: Tensor) -> Tensor:
        """The patches x [N, size] and their learned positions, if there are any. cells: of `patch_cells`, [2, N]."""
        return x

    def forward(self, pixels: Tensor, grids: Grids) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Rows of pixels [N, patch_width] -> (tokens [N / merge^2, hidden_size], and as many states per picked block).

        grids: the frames, rows and columns of each image.
        """
        x, picked = self.patch_embed["proj"](pixels), self.picked
        cells = patch_cells(grids, self.merge, x.device)
        x = self.add_positions(x, grids, cells)
        cos, sin = self.rotary_pos_emb(cells)
        frames = [rows * columns for count, rows, columns in grids for _ in range(count)]
        if len(set(frames)) == 1:  # a batch, for which there are faster kernels than for sequences of all lengths
            x, cos, sin = (t.unflatten(0, (len(frames), -1)) for t in (x, cos, sin))
            batch = Batch(rotary={"full": (cos, sin)})
        else:
            bounds = torch.tensor([0, *frames], device="cpu").cumsum(0, dtype=torch.int32)  # attention wants them there
            tables = {"full": (cos[None], sin[None])}
            x, batch = x[None], Batch(rotary=tables, cu_seqlens=bounds, max_seqlen=max(frames))
        residual, states, run = None, [], self.checkpointing.start(x, len(self.blocks))
        for i, block in enumerate(self.blocks):
            x, residual = run(i, block, x, residual, batch)
            if i in picked:
                x, residual = x if residual is None else x + residual, None
                states.append(picked[i](x))
        return self.merger(x, residual), tuple(states)


class QwenVLModel(BaseModel):
    """Vision tower and text model: ids and pixels to the last hidden state."""

    def __init__(self, config: Any, visual: VisionTower, language_model: Decoder):
        super().__init__()
        self.config = config
        self.visual = visual
        self.language_model = language_model

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
        """As `Decoder.run`, with images; see `QwenVL.forward`."""
        inputs.check_own_cache()
        ids, embeds, for_text = inputs.input_ids, inputs.inputs_embeds, inputs.images
        images = self.config.images(image_grid_thw, video_grid_thw)
        pixels = images.pixels(pixel_values, pixel_values_videos, width=self.visual.patch_width)
        # Not in a step of decoding: a token that the model has drawn is text, whatever its id.
        counts = ids is not None and (pixels is not None or not inputs.past_length or ids.shape[1] > 1)
        check = images.check_count(ids) if counts else None
        if pixels is not None:
            if ids is None:
                raise InputError("images need input_ids, which say where they stand, and no inputs_embeds")
            tokens, states = self.visual(pixels, images.grids)
            embeds, places = self.language_model.embed_tokens(ids), images.places(ids)
            embeds = embeds.flatten(0, 1).index_copy(0, places, tokens.to(embeds.dtype)).view_as(embeds)
            for_text = {"states": states, "places": places}
        elif self.always_runs_tower and inputs.cache is None:
            merge = self.visual.merge
            empty = torch.zeros(merge * merge, self.visual.patch_width, device=inputs.tokens.device)
            tokens, states = self.visual(empty, ((1, merge, merge),))
            nothing = 0 * torch.stack([part.sum() for part in (tokens, *states)]).sum()
            # before the embedding, as with images
            embeds = nothing + (self.language_model.embed_tokens(ids) if embeds is None else embeds)
        positions = self._positions(inputs, images)
        inputs = replace(inputs, inputs_embeds=embeds, position_ids=positions, images=for_text)
        output = self.language_model(inputs, **options)
        if check:
            check()
        return output

    def _positions(self, inputs: TextInputs, images: VisionInputs) -> Tensor | None:
        """The positions for the text model: [3, B, S], or [B, S] or None where the three are equal.

        The cache stores rope_deltas [B, 1], by how much positions exceed the number of tokens.
        """
        ids, mask, cache, past = inputs.tokens, inputs.attention_mask, inputs.cache, inputs.past_length
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
            positions = images.positions(ids, mask, past=past, deltas=deltas, cu_seqlens=inputs.cu_seqlens)
        if cache is not None:
            num_tokens = past + ids.shape[1] if mask is None else mask.long().sum(1, keepdim=True)
            cache.values["rope_deltas"] = (positions.amax((0, 2))[:, None] + 1 - num_tokens).expand(len(ids), 1)
        return positions


class QwenVL(CausalLM):
    """A model of Qwen that reads images, with a language-model head; a base class of Qwen2-VL, Qwen3-VL and Qwen3.5."""

    model: QwenVLModel

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


def check_axial_rope(name: str, rope: Mapping[str, Any]) -> None:
    """Raises ConfigError for a rope dict of a tower other than the one that is computed; name: of the vision_config."""
    if rope.get("rope_type", "axial") != "axial" or not isinstance(rope.get("rope_theta"), int | float):
        raise ConfigError(
            f"{name}: rope_parameters={rope!r} is not supported; supported: rope_type axial, with a rope_theta"
        )
