"""Image processor of Gemma 4: images of any proportion to patches, about as many for each image.

- An image is resized, larger or smaller, to the most patches that keep its proportions and make at most
  `max_soft_tokens` tokens, of `pooling_kernel_size` x `pooling_kernel_size` patches each. Pixels are 0 to 1.
- Patches are in rows, the pixels of one in rows as well, channels last. All images are padded to the same number of
  patches; the places (x, y) of padding are -1.
- Gemma 4 12B ("unified") reads the patches of a token as one.

Checked against transformers 5.24, models/gemma4/image_processing_pil_gemma4.py and processing_gemma4.py, and
models/gemma4_unified/image_processing_gemma4_unified.py.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from ligermodels.errors import ConfigError, InputError
from ligermodels.vision.images import load_image, named
from ligermodels.vision.settings import PixelSettings, integer, read_settings

MAX_SOFT_TOKENS = (70, 140, 280, 560, 1120)
_SIZES = ("patch_size", "max_soft_tokens", "pooling_kernel_size")


@dataclass(frozen=True, kw_only=True)
class Gemma4ImageProcessor(PixelSettings):
    """max_soft_tokens: the most tokens of an image, one of 70, 140, 280, 560 and 1120."""

    image_token: ClassVar[str] = "<|image|>"
    other_tokens: ClassVar[tuple[str, ...]] = ("<|image>", "<image|>")
    """What stands before and after the tokens of an image."""

    do_normalize: bool = False
    image_mean: tuple[float, ...] = (0.0, 0.0, 0.0)
    image_std: tuple[float, ...] = (1.0, 1.0, 1.0)
    patch_size: int = 16
    max_soft_tokens: int = 280
    pooling_kernel_size: int = 3

    @classmethod
    def from_config(cls, config: Mapping[str, Any], *, where: str = "preprocessor_config.json") -> Self:
        """From the object in preprocessor_config.json. Raises ConfigError."""
        fields = read_settings(config, where, {*_SIZES, "size", "image_seq_length"})
        fields |= {name: integer(config, name, where) for name in _SIZES if config.get(name) is not None}
        if fields.get("max_soft_tokens", 280) not in MAX_SOFT_TOKENS:
            raise ConfigError(f"{where}: max_soft_tokens is {fields['max_soft_tokens']}, not one of {MAX_SOFT_TOKENS}.")
        return cls(**fields)

    @property
    def side(self) -> int:
        """The pixels in a row of what becomes a token."""
        return self.patch_size * self.pooling_kernel_size

    @property
    def input_side(self) -> int:
        """The pixels in a row of a patch that the model reads."""
        return self.patch_size

    def __call__(self, images: Sequence[Any], names: Sequence[str]) -> tuple[dict[str, Tensor], list[int]]:
        """(pixel_values fp32 [images, patches, 3 * input_side^2] and image_position_ids int64 [images, patches, 2], the
        number of tokens of each image).

        images: as `load_image` takes them. names: their names in errors. Raises InputError.
        """
        most = self.max_soft_tokens * (self.side // self.input_side) ** 2
        pixels = np.zeros((len(images), most, 3 * self.input_side**2), dtype=np.float32)
        places = np.full((len(images), most, 2), -1, dtype=np.int64)
        counts = []
        for i, (name, source) in enumerate(zip(names, images, strict=True)):
            with named(name):
                image = load_image(source)
                height, width = self._size(image.height, image.width)
            rows, columns = height // self.input_side, width // self.input_side
            pixels[i, : rows * columns] = self._patches(self.resize(image, height, width), rows, columns)
            places[i, : rows * columns] = np.stack(np.meshgrid(np.arange(columns), np.arange(rows)), -1).reshape(-1, 2)
            counts.append(height * width // self.side**2)
        return {"pixel_values": torch.from_numpy(pixels), "image_position_ids": torch.from_numpy(places)}, counts

    def _size(self, height: int, width: int) -> tuple[int, int]:
        """(height, width) in multiples of `side`. Raises InputError where nothing fits."""
        side, most = self.side, self.max_soft_tokens
        if not self.do_resize:
            if height % side or width % side or height * width > most * side**2:
                raise InputError(
                    f"{width} x {height} pixels: with do_resize false both sides must be multiples of {side}, and the "
                    f"image at most {most} squares of them."
                )
            return height, width
        # In the order of transformers, whose roundings decide at exact multiples.
        target = most * self.pooling_kernel_size**2 * self.patch_size**2
        factor = math.sqrt(target / (height * width))
        rows, columns = math.floor(factor * height / side), math.floor(factor * width / side)
        if rows == 0:
            rows, columns = 1, min(width // height, most)
        elif columns == 0:
            rows, columns = min(height // width, most), 1
        return rows * side, columns * side

    def _patches(self, image: Image.Image, rows: int, columns: int) -> np.ndarray:
        side, pixels = self.input_side, np.asarray(image)
        pixels = np.stack([numbers[pixels[..., channel]] for channel, numbers in enumerate(self.table())], -1)
        return pixels.reshape(rows, side, columns, side, 3).swapaxes(1, 2).reshape(rows * columns, -1)


class Gemma4UnifiedImageProcessor(Gemma4ImageProcessor):
    """Whose patches are whole tokens."""

    @property
    def input_side(self) -> int:
        return self.side
