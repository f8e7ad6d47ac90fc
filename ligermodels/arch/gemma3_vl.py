"""Gemma 3 with images (4B, 12B, 27B): Gemma 3 and a SigLIP vision tower.

- An image is always `image_size` x `image_size` pixels, and becomes `mm_tokens_per_image` tokens, 256: the tower's
  patches, averaged 4 x 4, normed and projected. They take the places of `image_token_index`, and are not multiplied by
  the scale of the embedding.
- The tokens of an image see each other both ways, in sliding blocks within the window. An image is a run of
  `image_token_index`: the chat template puts text between two of them.
- The released files have no pooling head in the tower; `vision_use_head` is refused. So is final_logit_softcapping,
  which transformers reads and leaves out with images.

Papers: Gemma Team 2025, https://arxiv.org/abs/2503.19786; Zhai et al. 2023, "SigLIP", https://arxiv.org/abs/2303.15343.
Checked against: models/gemma3/modeling_gemma3.py and models/siglip of transformers 5.24.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ligermodels.arch.base import CausalLM, CausalLMOutput
from ligermodels.arch.config import ACTIVATIONS, NestedFields, VisionConfig
from ligermodels.arch.decoder import BaseModel, Decoder
from ligermodels.arch.gemma3 import NORM, Gemma3, Gemma3Config
from ligermodels.arch.inputs import TextInputs
from ligermodels.arch.llama_vision_tower import patches
from ligermodels.checkpoint.weights import Table
from ligermodels.errors import InputError
from ligermodels.layers import MLP, Attention, Batch, Embedding, LayerNorm, RMSNorm
from ligermodels.layers.base import Draw, Layer, normal
from ligermodels.layers.multimodal import Modality, PatchEmbedding, VisionInputs
from ligermodels.training.recompute import Checkpointing


@dataclass(kw_only=True)
class SiglipConfig(VisionConfig):
    """vision_config of a config.json of model_type gemma3."""

    hidden_size: int = 768
    hidden_act: str = "gelu_pytorch_tanh"
    intermediate_size: int = 3072
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    num_channels: int = 3
    image_size: int = 224
    patch_size: int = 16
    layer_norm_eps: float = 1e-6
    attention_dropout: float = 0.0
    vision_use_head: bool = False

    @classmethod
    def label(cls) -> str:
        return "gemma3: vision_config"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_choice("hidden_act", ACTIVATIONS)
        if self.hidden_size % self.num_attention_heads:
            raise self._error("num_attention_heads", f"must divide hidden_size {self.hidden_size}")
        for name in ("vision_use_head", "attention_dropout"):
            if getattr(self, name):
                raise self._error(name, "is not supported: Gemma 3 has none")

    def to_hf(self) -> dict[str, Any]:
        return {"model_type": "siglip_vision_model", **super().to_hf()}

    @property
    def side(self) -> int:
        """Patches in a row of an image."""
        return self.image_size // self.patch_size


@dataclass(kw_only=True)
class Gemma3VLConfig(NestedFields, Gemma3Config):
    """config.json of model_type gemma3: the fields of its text_config, and vision_config."""

    model_type: ClassVar[str] = "gemma3"
    architecture: ClassVar[str] = "Gemma3ForConditionalGeneration"
    text_type: ClassVar[str] = "gemma3_text"
    vision_class: ClassVar = SiglipConfig
    root_fields: ClassVar = ("boi_token_index", "eoi_token_index", "image_token_index", "mm_tokens_per_image")

    vision_config: SiglipConfig = field(default_factory=SiglipConfig)
    boi_token_index: int = 255999
    eoi_token_index: int = 256000
    image_token_index: int = 262144
    mm_tokens_per_image: int = 256

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Any:
        """A config from the contents of a config.json, which is tied unless it says otherwise."""
        return super().from_hf({"tie_word_embeddings": True, **config})

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.final_logit_softcapping is not None:
            raise self._error("final_logit_softcapping", "is not supported with images; set it to null")
        side = math.isqrt(self.mm_tokens_per_image)
        if side**2 != self.mm_tokens_per_image or self.vision_config.side % side:
            raise self._error(
                "mm_tokens_per_image", f"must be the square of a divisor of {self.vision_config.side}, patches in a row"
            )


class SiglipBlock(nn.Module):
    """Attention within an image and an MLP, each on the normed residual stream."""

    def __init__(self, config: SiglipConfig):
        super().__init__()
        size, heads, eps = config.hidden_size, config.num_attention_heads, config.layer_norm_eps
        shape: Any = dict(num_heads=heads, num_kv_heads=heads, head_dim=size // heads, causal=False, rope=None)
        names = ("q_proj", "k_proj", "v_proj", "out_proj")
        self.layer_norm1 = LayerNorm(size, eps=eps)
        self.self_attn = Attention(size, **shape, qkv_bias=True, o_bias=True, projections=names)
        modules = self.self_attn._modules  # the order of parameters in checkpoints
        self.self_attn._modules = {name: modules[name] for name in ("k_proj", "v_proj", "q_proj")} | modules
        self.layer_norm2 = LayerNorm(size, eps=eps)
        self.mlp = MLP(size, config.intermediate_size, activation=ACTIVATIONS[config.hidden_act])

    def forward(self, x: Tensor, residual: Tensor | None, batch: Batch) -> tuple[Tensor, Tensor]:
        x, residual = self.layer_norm1(x, residual)
        x = self.self_attn(x, batch)
        x, residual = self.layer_norm2(x, residual)
        return self.mlp(x), residual


class SiglipTower(nn.Module):
    """Images [N, channels, S, S] -> the states of their patches [N, patches, hidden_size].

    `checkpointing`, an attribute: what the blocks save for the backward.
    """

    def __init__(self, config: SiglipConfig):
        super().__init__()
        self.checkpointing = Checkpointing()
        size, kernel = config.hidden_size, (config.patch_size,) * 2
        self.embeddings = nn.ModuleDict({
            "patch_embedding": PatchEmbedding(config.num_channels, size, kernel, bias=True),
            "position_embedding": Embedding(config.side**2, size),
        })  # fmt: skip
        self.encoder = nn.ModuleDict(
            {"layers": nn.ModuleList(SiglipBlock(config) for _ in range(config.num_hidden_layers))}
        )
        self.post_layernorm = LayerNorm(size, eps=config.layer_norm_eps)
        self.patch_size = config.patch_size

    def forward(self, pixels: Tensor) -> Tensor:
        x = self.embeddings["patch_embedding"](patches(pixels, self.patch_size))
        x = x + self.embeddings["position_embedding"](torch.arange(x.shape[1], device=x.device))
        blocks: Any = self.encoder["layers"]
        residual, batch, run = None, Batch(), self.checkpointing.start(x, len(blocks))
        for i, block in enumerate(blocks):
            x, residual = run(i, block, x, residual, batch)
        return self.post_layernorm(x, residual)[0]


class Projector(Layer):
    """The states of patches, averaged over squares, normed and projected: [N, tokens, hidden_size of the text]."""

    def __init__(self, config: Gemma3VLConfig):
        super().__init__()
        vision = config.vision_config
        self.side, self.std = math.isqrt(config.mm_tokens_per_image), config.initializer_range
        self.mm_input_projection_weight = nn.Parameter(torch.empty(vision.hidden_size, config.hidden_size))
        self.mm_soft_emb_norm = RMSNorm(vision.hidden_size, eps=vision.layer_norm_eps, **NORM)

    def init_weights(self, draw: Draw) -> None:
        draw(self.mm_input_projection_weight, normal(self.std))

    def forward(self, x: Tensor) -> Tensor:
        side = math.isqrt(x.shape[1]) // self.side
        squares = x.view(len(x), self.side, side, self.side, side, -1).mean((2, 4)).flatten(1, 2)
        return self.mm_soft_emb_norm(squares) @ self.mm_input_projection_weight


class ImageDecoder(Decoder):
    """Hands its blocks the numbers of the images that tokens belong to."""

    def _batch(self, tokens: Tensor, inputs: TextInputs) -> Batch:
        batch = super()._batch(tokens, inputs)
        if (together := inputs.images.get("together")) is not None:
            together = together.reshape(tokens.shape[:2])
            batch.together = F.pad(together, (inputs.past_length, 0), value=-1)
        return batch


class Gemma3VLModel(BaseModel):
    """Tower, projector and text model: ids and pixels to the last hidden state."""

    def __init__(self, config: Gemma3VLConfig):
        super().__init__()
        self.config = config
        self.vision_tower = SiglipTower(config.vision_config)
        self.multi_modal_projector = Projector(config)
        self.language_model = ImageDecoder(
            config, Gemma3.block_class, norm=NORM, embedding_scale=config.hidden_size**0.5
        )

    def run(self, inputs: TextInputs, *, pixel_values: Tensor | None = None, **options: Any) -> CausalLMOutput:
        """As `Decoder.run`, with images; see `Gemma3VL.forward`."""
        ids, embeds, token = inputs.input_ids, inputs.inputs_embeds, self.config.image_token_index
        images, check, for_text = self._images(pixel_values), None, inputs.images
        # Not in a step of decoding: a token that the model has drawn is text, whatever its id.
        if ids is not None and (pixel_values is not None or not inputs.past_length or ids.shape[1] > 1):
            check = images.check_count(ids)
        if pixel_values is not None:
            if ids is None:
                raise InputError("images need input_ids, which say where they stand, and no inputs_embeds")
            states = self.multi_modal_projector(self.vision_tower(pixel_values))
            embeds = self.language_model.embed_tokens(ids.masked_fill(ids == token, 0))  # it may have no row
            places = images.places(ids)
            embeds = embeds.flatten(0, 1).index_copy(0, places, states.flatten(0, 1).to(embeds.dtype)).view_as(embeds)
            for_text = {"together": runs_of(ids == token, packed=inputs.cu_seqlens is not None)}
        elif self.always_runs_tower and inputs.cache is None:
            weight = self.multi_modal_projector.mm_input_projection_weight
            empty = torch.zeros(1, *self._pixels, device=inputs.tokens.device, dtype=weight.dtype)
            nothing = 0 * self.multi_modal_projector(self.vision_tower(empty)).sum()
            embeds = nothing + (self.language_model.embed_tokens(ids) if embeds is None else embeds)
        output = self.language_model(replace(inputs, inputs_embeds=embeds, images=for_text), **options)
        if check:
            check()
        return output

    @property
    def _pixels(self) -> tuple[int, int, int]:
        vision = self.config.vision_config
        return vision.num_channels, vision.image_size, vision.image_size

    def _images(self, pixel_values: Tensor | None) -> VisionInputs:
        """Where the tokens of the images are. Raises InputError for pixels of another shape."""
        if pixel_values is not None and (pixel_values.shape[1:] != self._pixels or not len(pixel_values)):
            raise InputError(
                f"pixel_values have shape {list(pixel_values.shape)}, expected [images, "
                f"{', '.join(map(str, self._pixels))}]. Were they made for another model?"
            )
        side, count = self.multi_modal_projector.side, 0 if pixel_values is None else len(pixel_values)
        images = Modality("image", self.config.image_token_index, [(1, side, side)] * count)
        return VisionInputs([images], merge=1)


def runs_of(is_image: Tensor, *, packed: bool = False) -> Tensor:
    """The number of the run of True that a token is in, -1 outside: [B, S]. packed: a run may go on in the next row."""
    rows = is_image.reshape(1, -1) if packed else is_image
    starts = rows & ~F.pad(rows[:, :-1], (1, 0))
    return torch.where(rows, starts.cumsum(1) - 1, -1).view_as(is_image)


class Gemma3VL(CausalLM):
    """Gemma 3 with images. `Gemma3VL.from_hub("google/gemma-3-4b-it")` loads one."""

    config_class = Gemma3VLConfig
    model: Gemma3VLModel
    make_model = Gemma3VLModel
    _no_split_modules: ClassVar = ["Gemma3Block", "SiglipBlock"]

    def forward(  # type: ignore[override]
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        labels: Tensor | None = None,
        *,
        pixel_values: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        **inputs: Any,
    ) -> CausalLMOutput:
        """`CausalLM.forward`, with images.

        pixel_values: [images, channels, image_size, image_size], of all images in the order of their tokens.
        labels: -100 at images: the text is not to predict their tokens.
        past_key_values: images may come with any call, each whole.
        token_type_ids: ignored, since the ids say the same; transformers' processor returns it.

        Raises InputError where images and ids do not fit together. On a GPU, tokens are counted while the forward runs,
        and the error comes after it.
        """
        return super().forward(input_ids, attention_mask, position_ids, labels, pixel_values=pixel_values, **inputs)

    DISK_NAMES: ClassVar[Table] = {
        "model.language_model.{rest}": "language_model.model.{rest}",
        "model.vision_tower.{rest}": "vision_tower.vision_model.{rest}",
        "model.multi_modal_projector.{rest}": "multi_modal_projector.{rest}",
        "lm_head.weight": "language_model.lm_head.weight",
    }
    OTHER_LAYOUTS = (
        {**DISK_NAMES, "model.vision_tower.{rest}": "vision_tower.{rest}"},
        {},
        {"model.vision_tower.{rest}": "model.vision_tower.vision_model.{rest}"},
    )
    """Of transformers: what 5 saves of a new model, what it has in memory, and that with the tower's older names."""
