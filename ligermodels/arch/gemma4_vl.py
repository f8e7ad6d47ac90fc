"""Gemma 4 with images (E2B, E4B, 26B-A4B, 31B; "unified": 12B): Gemma 4's text and what gemma4_tower.py reads.

- The tokens of an image take the places of `image_token_id`, and are not multiplied by the scale of the embedding. In
  the second table, where there is one, the pad token stands for them: it is looked up by ids, beside the embeddings.
- With use_bidirectional_attention "vision" (12B and larger) the tokens of an image see each other both ways in sliding
  blocks, within the window. Full blocks are causal, unlike Gemma 3's. An image is a run of `image_token_id`: the chat
  template puts text between two of them.
- A plain forward of transformers 5.24 computes gemma4_unified otherwise: full blocks see an image both ways, sliding
  ones beyond the window. Its masks for static caches, gemma4 and google-deepmind/gemma have it as here
  (https://github.com/huggingface/transformers/issues/46711).
- Audio and videos are refused. The weights of E2B and E4B that read audio are left out, here and in what is saved.

Checked against: models/gemma4/modeling_gemma4.py and models/gemma4_unified of transformers 5.24.
"""

import copy
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from ligermodels.arch.base import CausalLM, CausalLMOutput
from ligermodels.arch.config import NestedFields, VisionConfig
from ligermodels.arch.decoder import BaseModel
from ligermodels.arch.gemma3_vl import ImageDecoder, runs_of
from ligermodels.arch.gemma4 import Gemma4Config, Gemma4Decoder
from ligermodels.arch.gemma4_tower import (
    Gemma4Tower,
    Gemma4UnifiedVisionConfig,
    Gemma4VisionConfig,
    SoftTokens,
    UnifiedEmbedder,
)
from ligermodels.arch.inputs import TextInputs
from ligermodels.checkpoint.weights import Table
from ligermodels.errors import ConfigError, InputError
from ligermodels.layers.multimodal import Grids, Modality, VisionInputs

REFUSED = {
    **dict.fromkeys(("pixel_values_videos", "video_position_ids", "num_frames_per_video"), "videos are"),
    **dict.fromkeys(("input_features", "input_features_mask"), "audio is"),
}
"""Arguments of transformers' forward -> what of them is not supported."""


@dataclass(kw_only=True)
class Gemma4VLConfig(NestedFields, Gemma4Config):
    """config.json of model_type gemma4."""

    model_type: ClassVar[str] = "gemma4"
    architecture: ClassVar[str] = "Gemma4ForConditionalGeneration"
    text_type: ClassVar[str] = "gemma4_text"
    vision_class: ClassVar[type[VisionConfig]] = Gemma4VisionConfig
    unused: ClassVar = frozenset({"eoa_token_id", "vision_soft_tokens_per_image"})
    root_fields: ClassVar = (
        "boi_token_id", "eoi_token_id", "image_token_id", "video_token_id", "boa_token_id", "eoa_token_index",
        "audio_token_id",
    )  # fmt: skip

    vision_config: Gemma4VisionConfig = field(default_factory=Gemma4VisionConfig)
    boi_token_id: int | None = 255999
    eoi_token_id: int | None = 258882
    image_token_id: int = 258880
    video_token_id: int | None = 258884
    boa_token_id: int | None = 256000
    eoa_token_index: int | None = 258883
    audio_token_id: int | None = 258881

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Any:
        """A config from the contents of a config.json, which is tied unless it says otherwise."""
        if config.get("vision_config") is None:
            raise ConfigError(f"{cls.model_type}: there is no vision_config; of a model of text, load gemma4_text")
        if config.get("audio_config") is not None:
            what = "audio is not read: what reads it is left out, here and in what is saved"
            warnings.warn(f"{cls.model_type}: {what}", stacklevel=4)
        rest = {name: value for name, value in config.items() if name != "audio_config"}
        return super().from_hf({"tie_word_embeddings": True, **rest})

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.image_token_id in (self.video_token_id, self.audio_token_id):
            raise self._error("image_token_id", "stands for videos or audio, too")

    @property
    def pad(self) -> int:
        """The id in whose place tokens of images stand in the tables."""
        return self.padding_idx or 0


@dataclass(kw_only=True)
class Gemma4UnifiedConfig(Gemma4VLConfig):
    """config.json of model_type gemma4_unified, whose text has neither a second table nor experts."""

    model_type: ClassVar[str] = "gemma4_unified"
    architecture: ClassVar[str] = "Gemma4UnifiedForConditionalGeneration"
    text_type: ClassVar[str] = "gemma4_unified_text"
    vision_class: ClassVar[type[VisionConfig]] = Gemma4UnifiedVisionConfig
    NOT_WRITTEN: ClassVar = (
        "vocab_size_per_layer_input", "hidden_size_per_layer_input", "enable_moe_block", "num_experts",
        "top_k_experts", "moe_intermediate_size",
    )  # fmt: skip

    vision_config: Gemma4UnifiedVisionConfig = field(default_factory=Gemma4UnifiedVisionConfig)  # type: ignore[assignment]
    max_position_embeddings: int = 262144
    sliding_window: int | None = 1024
    use_bidirectional_attention: str | None = "vision"
    hidden_size_per_layer_input: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("hidden_size_per_layer_input", "enable_moe_block"):
            if getattr(self, name):
                raise self._error(name, "is not supported: gemma4_unified has neither a second table nor experts")

    def to_hf(self) -> dict[str, Any]:
        config = super().to_hf()
        config["text_config"] = {k: x for k, x in config["text_config"].items() if k not in self.NOT_WRITTEN}
        return config


class Gemma4ImageDecoder(ImageDecoder, Gemma4Decoder):
    """Numbers the images for its sliding blocks alone."""

    def runner(self, tokens: Tensor, inputs: TextInputs, x: Tensor) -> Callable[..., Any]:
        run = super().runner(tokens, inputs, x)

        def run_by_kind(i: int, block: Any, x: Tensor, residual: Tensor | None, batch: Any, *more: Any) -> Any:
            if self.config.window(i) is None:
                batch = copy.copy(batch)
                batch.together = None
            return run(i, block, x, residual, batch, *more)

        return run_by_kind if inputs.images else run


class Gemma4UnifiedModel(BaseModel):
    """Text model and embedder of patches: ids and pixels to the last hidden state."""

    def __init__(self, config: Gemma4UnifiedConfig):
        super().__init__()
        self.config: Any = config
        self.language_model = Gemma4ImageDecoder(config)
        self.embed_vision: Any = UnifiedEmbedder(config.vision_config, config.hidden_size, config.initializer_range)

    def soft_tokens(self, pixels: Tensor, grids: Grids) -> Tensor:
        """The embeddings of the images' tokens [N, hidden_size]."""
        return self.embed_vision(pixels, grids)

    def run(
        self,
        inputs: TextInputs,
        *,
        pixel_values: Tensor | None = None,
        image_position_ids: Tensor | None = None,
        **options: Any,
    ) -> CausalLMOutput:
        """As `Decoder.run`, with images; see `Gemma4VL.forward`."""
        ids, embeds, check, config = inputs.input_ids, inputs.inputs_embeds, None, self.config
        images, for_text = self._images(pixel_values, image_position_ids), inputs.images
        if ids is not None:
            # Not in a step of decoding: a token that the model has drawn is text, whatever its id.
            if pixel_values is not None or not inputs.past_length or ids.shape[1] > 1:
                check = images.check_count(ids)
            masked = ids
            for media in images.modalities:  # in a step of decoding, too, as in transformers
                masked = masked.masked_fill(ids == media.token_id, config.pad)
            inputs = replace(inputs, input_ids=masked)
        if pixel_values is not None:
            if ids is None:
                raise InputError("images need input_ids, which say where they stand, and no inputs_embeds")
            tokens = self.soft_tokens(pixel_values, images.grids)  # before the embedding, as below
            embeds, places = self.language_model.embed_tokens(inputs.input_ids), images.places(ids)
            embeds = embeds.flatten(0, 1).index_copy(0, places, tokens.to(embeds.dtype)).view_as(embeds)
            if config.use_bidirectional_attention == "vision":
                for_text = {"together": runs_of(ids == config.image_token_id, packed=inputs.cu_seqlens is not None)}
        elif self.always_runs_tower and inputs.cache is None:
            merge, width = config.vision_config.merge, config.vision_config.patch_width
            empty = torch.zeros(1, merge**2, width, device=inputs.tokens.device)
            nothing = 0 * self.soft_tokens(empty, [(1, merge, merge)]).sum()
            embeds = nothing + (self.language_model.embed_tokens(inputs.input_ids) if embeds is None else embeds)
        output = self.language_model(replace(inputs, inputs_embeds=embeds, images=for_text), **options)
        if check:
            check()
        return output

    def _images(self, pixels: Tensor | None, places: Tensor | None) -> VisionInputs:
        """Where the tokens of the images are. Raises InputError for pixels and places that do not fit."""
        config, grids = self.config, []
        vision = config.vision_config
        if (pixels is None) != (places is None):
            raise InputError("pixel_values and image_position_ids go together; take both from the processor")
        if pixels is not None and places is not None:
            expected = [*pixels.shape[:2], 2]
            fits = len(pixels) and pixels.shape[2:] == (vision.patch_width,) and [*places.shape] == expected
            if not fits or places.is_floating_point():
                raise InputError(
                    f"pixel_values have shape {list(pixels.shape)} and image_position_ids are {places.dtype} "
                    f"{list(places.shape)}, expected [images, patches, {vision.patch_width}] and integers "
                    "[images, patches, 2]. Were they made for another model?"
                )
            grids = [_grid(i, image, vision) for i, image in enumerate(places.cpu())]  # waits for a GPU
        counts = {"image": grids, "video": [], "audio": []}
        tokens = {name: getattr(config, f"{name}_token_id") for name in counts}
        given = [Modality(name, token, counts[name]) for name, token in tokens.items() if token is not None]
        return VisionInputs(given, merge=vision.merge)


def _grid(number: int, places: Tensor, vision: Any) -> tuple[int, int, int]:
    """Frames, rows and columns of an image from the places (x, y) of its patches, row by row, then -1."""
    columns, rows = (places.amax(0) + 1).tolist()
    count, merge = rows * columns, vision.merge
    fits = 0 < count <= len(places) and max(rows, columns) <= vision.places and not (rows % merge or columns % merge)
    if fits:
        grid, patch = torch.full_like(places, -1), torch.arange(count, device="cpu")
        grid[:count] = torch.stack([patch % columns, patch // columns], 1)
        fits = torch.equal(places, grid)
    if not fits:
        raise InputError(
            f"image_position_ids of image {number} are not those of a grid: x, y of each patch row by row, multiples "
            f"of {merge} in both directions and at most {vision.places}, then -1 and -1 at padding"
        )
    return 1, rows, columns


class Gemma4VLModel(Gemma4UnifiedModel):
    """Tower, text model and projection: ids and pixels to the last hidden state."""

    def __init__(self, config: Gemma4VLConfig):
        BaseModel.__init__(self)
        self.config, vision = config, config.vision_config
        self.vision_tower = Gemma4Tower(vision)
        self.language_model = Gemma4ImageDecoder(config)
        self.embed_vision = SoftTokens(vision.hidden_size, config.hidden_size, vision.rms_norm_eps)

    def soft_tokens(self, pixels: Tensor, grids: Grids) -> Tensor:
        return self.embed_vision(self.vision_tower(pixels, grids))


class Gemma4VL(CausalLM):
    """Gemma 4 with images. `Gemma4VL.from_hub("google/gemma-4-E2B-it")` loads one."""

    config_class: ClassVar[Any] = Gemma4VLConfig
    make_model: ClassVar[Any] = Gemma4VLModel
    model: Gemma4UnifiedModel
    _no_split_modules: ClassVar = ["Gemma4Block", "Gemma4VisionBlock"]
    IGNORE = (
        *CausalLM.IGNORE,
        r"language_model\.layers\.\d+\.self_attn\.(k_proj|v_proj|k_norm)\.weight$",  # of blocks that read others' keys
        r"^model\.(audio_tower|embed_audio)\.",
    )

    def forward(  # type: ignore[override]
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        labels: Tensor | None = None,
        *,
        pixel_values: Tensor | None = None,
        image_position_ids: Tensor | None = None,
        mm_token_type_ids: Tensor | None = None,
        **inputs: Any,
    ) -> CausalLMOutput:
        """`CausalLM.forward`, with images.

        pixel_values: [images, patches, 3 * side^2], of all images in the order of their tokens, padded to one number
            of patches.
        image_position_ids: integers [images, patches, 2], the column and row of each patch, -1 at padding. The host
            needs them: leave them on the CPU; on a GPU they cost a host synchronisation.
        labels: -100 at images: the text is not to predict their tokens.
        past_key_values: images may come with any call, each whole.
        mm_token_type_ids: ignored, since the ids say the same; transformers' processor returns it.

        Raises InputError where images and ids do not fit together, and for audio and videos. On a GPU, tokens are
        counted while the forward runs, and the error comes after it.
        """
        for name in REFUSED.keys() & inputs.keys():
            if inputs.pop(name) is not None:
                raise InputError(f"{name}: {REFUSED[name]} not supported, text and images are; leave it out")
        inputs |= dict(pixel_values=pixel_values, image_position_ids=image_position_ids)
        return super().forward(input_ids, attention_mask, position_ids, labels, **inputs)


class Gemma4Unified(Gemma4VL):
    """Gemma 4 12B, with images. `Gemma4Unified.from_hub("google/gemma-4-12B-it")` loads one."""

    config_class: ClassVar = Gemma4UnifiedConfig
    make_model: ClassVar = Gemma4UnifiedModel
    _no_split_modules: ClassVar = ["Gemma4Block"]
    DISK_NAMES: ClassVar[Table] = {
        "model.embed_vision.multimodal_embedder.{rest}": "model.embed_vision.{rest}",
        "model.embed_vision.{rest}": "model.vision_embedder.{rest}",
    }
    OTHER_LAYOUTS = ({},)
