"""Image processor of Llama-3.2-Vision: images to tiles, and the cross-attention mask of tokens and tiles.

- An image is placed on a canvas of up to max_image_tiles square tiles: the one that needs the least upscaling, else
  the least downscaling. It is resized to fit, but only upscaled to one tile; the rest of the canvas is black.
- The padding is black before normalisation. Unused tiles are 0 after it.
- One token stands for an image of any size; the text sees it through a mask over tokens, images and tiles.

Checked against transformers 5.23, models/mllama/image_processing_pil_mllama.py and processing_mllama.py.
"""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from ligermodels.errors import ConfigError
from ligermodels.vision.images import load_image, named
from ligermodels.vision.settings import PixelSettings, integer, read_settings


@functools.cache
def canvases(max_tiles: int) -> tuple[tuple[int, int], ...]:
    """(rows, columns) of tiles of every canvas; the index plus 1 is the aspect ratio's id."""
    counts = range(1, max_tiles + 1)
    return tuple((rows, columns) for rows in counts for columns in counts if rows * columns <= max_tiles)


def choose_canvas(height: int, width: int, max_tiles: int, tile: int) -> tuple[int, int]:
    """(rows, columns) of tiles of an image's canvas: the least upscaling, else the least downscaling.

    Of canvases with the same scale it has the fewest tiles. tile: the side of a tile, in pixels.
    """
    scales = {shape: min(shape[0] * tile / height, shape[1] * tile / width) for shape in canvases(max_tiles)}
    upscaling = [scale for scale in scales.values() if scale >= 1]
    best = min(upscaling) if upscaling else max(scales.values())
    return min((shape for shape, scale in scales.items() if scale == best), key=lambda shape: shape[0] * shape[1])


def fit(height: int, width: int, canvas: tuple[int, int], tile: int) -> tuple[int, int]:
    """(height, width) of the resized image on a canvas of (rows, columns) of tiles."""
    # The image's own size, clamped to at least one tile and at most the canvas.
    max_height, max_width = (min(max(side, tile), n * tile) for side, n in zip((height, width), canvas, strict=True))
    if max_width / width < max_height / height:
        return min(int(height * (max_width / width)) or 1, max_height), max_width
    return max_height, min(int(width * (max_height / height)) or 1, max_width)


@dataclass(frozen=True, kw_only=True)
class MllamaImageProcessor(PixelSettings):
    """tile_size: `size` of preprocessor_config.json, 560 in -Instruct, 448 in the base model."""

    image_token: ClassVar[str] = "<|image|>"
    other_tokens: ClassVar[tuple[str, ...]] = ()

    resample: int = Image.Resampling.BILINEAR
    tile_size: int
    max_image_tiles: int = 4

    @classmethod
    def from_config(
        cls, config: Mapping[str, Any], *, where: str = "preprocessor_config.json"
    ) -> "MllamaImageProcessor":
        """From the object in preprocessor_config.json. Raises ConfigError."""
        fields = read_settings(config, where, {"size", "max_image_tiles", "do_pad"})
        for key in ("do_resize", "do_pad"):
            if config.get(key) is False:
                raise ConfigError(f"{where}: {key} is false, but tiles need it.")
        if config.get("max_image_tiles") is not None:
            fields["max_image_tiles"] = integer(config, "max_image_tiles", where)
        size = config.get("size")
        if not isinstance(size, Mapping) or not {"height", "width"} <= set(size) or size["height"] != size["width"]:
            raise ConfigError(f"{where}: size must have an equal height and width, not {size!r}.")
        # Required, because transformers' default of 0.5 fits no released model.
        if missing := [key for key in ("image_mean", "image_std") if config.get(key) is None]:
            raise ConfigError(f"{where} has no {' and no '.join(missing)}. Is it the file of the checkpoint?")
        return cls(**fields, tile_size=integer(size, "height", where))

    def __call__(self, samples: Sequence[Sequence[Any]]) -> tuple[dict[str, Tensor], list[list[int]]]:
        """(the inputs of the model, the number of tiles of each image of each sample).

        samples: the images of each sample, as `load_image` takes them; a sample may have none.
        pixel_values fp32 [B, images, tiles, 3, S, S], aspect_ratio_ids int64 [B, images] (0: no image there),
        aspect_ratio_mask int64 [B, images, tiles] (the first tile is 1 even where there is no image).
        Without any image there are no inputs. Raises InputError.
        """
        counts: list[list[int]] = [[] for _ in samples]
        max_images = max(map(len, samples), default=0)
        if not max_images:
            return {}, counts
        shape, size = (len(samples), max_images, self.max_image_tiles), self.tile_size
        pixels = np.zeros((*shape, 3, size, size), dtype=np.float32)
        ids, mask = torch.zeros(shape[:2], dtype=torch.int64), torch.zeros(shape, dtype=torch.int64)
        mask[..., 0] = 1
        for row, sources in enumerate(samples):
            for place, source in enumerate(sources):
                with named(f"image {place} of text {row}"):
                    image = load_image(source)
                canvas = choose_canvas(image.height, image.width, self.max_image_tiles, size)
                tiles = canvas[0] * canvas[1]
                pixels[row, place, :tiles] = self._tiles(image, canvas)
                ids[row, place] = canvases(self.max_image_tiles).index(canvas) + 1
                mask[row, place, :tiles] = 1
                counts[row].append(tiles)
        values = torch.from_numpy(pixels)
        return {"pixel_values": values, "aspect_ratio_ids": ids, "aspect_ratio_mask": mask}, counts

    def _tiles(self, image: Image.Image, canvas: tuple[int, int]) -> np.ndarray:
        """fp32 [tiles, 3, S, S], row by row."""
        (rows, columns), size = canvas, self.tile_size
        resized = np.asarray(self.resize(image, *fit(image.height, image.width, canvas, size)))
        placed = np.zeros((rows * size, columns * size, 3), dtype=np.uint8)
        placed[: resized.shape[0], : resized.shape[1]] = resized
        pixels = placed.reshape(rows, size, columns, size, 3).transpose(4, 0, 2, 1, 3)
        tiles = np.empty((rows, columns, 3, size, size), dtype=np.float32)
        for channel, numbers in enumerate(self.table()):
            tiles[:, :, channel] = numbers[pixels[channel]]
        return tiles.reshape(-1, 3, size, size)


def cross_attention_mask(
    input_ids: Tensor, image_token_id: int, num_tiles: Sequence[Sequence[int]], max_image_tiles: int
) -> Tensor:
    """int64 [B, S, images, tiles]: 1 where a token attends to a tile.

    Tokens attend to an image from its own token up to the next image's. Images whose tokens are adjacent all end with
    the last of them. The last image is attended to up to the end of the row, including padding.
    """
    length, max_images = input_ids.shape[1], max(map(len, num_tiles), default=0)
    mask = input_ids.new_zeros(len(num_tiles), length, max_images, max_image_tiles)
    for row, (ids, tiles) in enumerate(zip(input_ids.tolist(), num_tiles, strict=True)):
        starts = [place for place, token in enumerate(ids) if token == image_token_id]
        end = next_start = length
        for image in reversed(range(len(starts))):
            if starts[image] + 1 != next_start:
                end = next_start
            mask[row, starts[image] : end, image, : tiles[image]] = 1
            next_start = starts[image]
    return mask
