"""Random images and text for the vision-language cases: what a processor makes of images, at once as tensors."""

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

IGNORED = -100


def with_pictures(config: Mapping[str, Any], ids: Tensor, height: int, width: int, *, seed: int) -> dict[str, Tensor]:
    """Model inputs of ids [B, S], each row of which begins with an image of height x width random pixels.

    The ids there are replaced, and their labels ignored.
    """
    generator = torch.Generator().manual_seed(seed)
    make = {"qwen2_vl": _qwen2_vl, "mllama": _mllama}[config["model_type"]]
    inputs = make(config, ids, height, width, generator)
    return {name: x.to(ids.device) for name, x in inputs.items()}


def _qwen2_vl(
    config: Mapping[str, Any], ids: Tensor, height: int, width: int, generator: torch.Generator
) -> dict[str, Tensor]:
    """<vision_start>, one placeholder for each 2 x 2 patches, <vision_end>, text."""
    vision = config["vision_config"]
    rows, columns = height // vision["patch_size"], width // vision["patch_size"]
    tokens = rows * columns // vision["spatial_merge_size"] ** 2
    ids = ids.clone()
    ids[:, 0], ids[:, tokens + 1] = config["vision_start_token_id"], config["vision_end_token_id"]
    ids[:, 1 : tokens + 1] = config["image_token_id"]
    labels = ids.clone()
    labels[:, : tokens + 2] = IGNORED
    values = 3 * vision["temporal_patch_size"] * vision["patch_size"] ** 2
    pixels = torch.randn(len(ids) * rows * columns, values, generator=generator)
    grids = torch.tensor([[1, rows, columns]] * len(ids))
    return {"input_ids": ids, "labels": labels, "pixel_values": pixels.bfloat16(), "image_grid_thw": grids}


def _mllama(
    config: Mapping[str, Any], ids: Tensor, height: int, width: int, generator: torch.Generator
) -> dict[str, Tensor]:
    """<image>, text, which all sees the image."""
    vision = config["vision_config"]
    size, tiles = vision["image_size"], [height // vision["image_size"], width // vision["image_size"]]
    ids = ids.clone()
    ids[:, 0] = config["image_token_index"]
    labels = ids.clone()
    labels[:, 0] = IGNORED
    batch, most = len(ids), vision["max_num_tiles"]
    pixels = torch.randn(batch, 1, most, 3, size, size, generator=generator)
    real = torch.arange(most) < tiles[0] * tiles[1]
    pixels[:, :, ~real] = 0
    return {
        "input_ids": ids,
        "labels": labels,
        "pixel_values": pixels.bfloat16(),
        "aspect_ratio_ids": torch.full((batch, 1), vision["supported_aspect_ratios"].index(tiles) + 1),
        "aspect_ratio_mask": real.long().expand(batch, 1, most).clone(),
        "cross_attention_mask": real.long().expand(batch, ids.shape[1], 1, most).clone(),
    }


def for_transformers(model: nn.Module, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """`inputs` with the token types that transformers' Qwen2-VL finds its images by."""
    if "mm_token_type_ids" not in inspect.signature(model.forward).parameters or "image_grid_thw" not in inputs:
        return inputs
    return {**inputs, "mm_token_type_ids": (inputs["input_ids"] == model.config.image_token_id).int()}
