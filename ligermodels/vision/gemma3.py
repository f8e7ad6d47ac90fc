"""Image processor of Gemma 3: images to squares of one size, and the text that stands for them.

- An image is resized to a square, whatever its shape. With pan and scan, off unless the file asks for it, a wide or a
  tall image also gives 2 to 4 crops along its longer side, each resized likewise; the last one may be narrower.
- Each square has the same number of tokens, `image_seq_length`, between two that mark its start and its end.

Checked against transformers 5.24, models/gemma3/image_processing_pil_gemma3.py and processing_gemma3.py.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from ligermodels.errors import ConfigError
from ligermodels.vision.images import load_image, named
from ligermodels.vision.settings import PixelSettings, boolean, integer, read_settings

_INTEGERS = {
    "image_seq_length": "image_seq_length",
    "pan_and_scan_min_crop_size": "min_crop_size",
    "pan_and_scan_max_num_crops": "max_crops",
}
"""Keys of preprocessor_config.json -> fields."""
_KEYS = {*_INTEGERS, "size", "do_pan_and_scan", "pan_and_scan_min_ratio_to_activate"}


@dataclass(frozen=True, kw_only=True)
class Gemma3ImageProcessor(PixelSettings):
    """side: of the squares, in pixels. pan_and_scan: whether images that are min_ratio times as long as wide, or more,
    are also cut into crops of at least min_crop_size pixels."""

    image_token: ClassVar[str] = "<start_of_image>"
    other_tokens: ClassVar[tuple[str, ...]] = ("<image_soft_token>", "<end_of_image>")

    resample: int = Image.Resampling.BILINEAR
    image_mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    image_std: tuple[float, ...] = (0.5, 0.5, 0.5)
    side: int
    image_seq_length: int = 256
    pan_and_scan: bool = False
    min_crop_size: int = 256
    max_crops: int = 4
    min_ratio: float = 1.2

    @classmethod
    def from_config(cls, config: Mapping[str, Any], *, where: str = "preprocessor_config.json") -> Self:
        """From the object in preprocessor_config.json. Raises ConfigError."""
        fields = read_settings(config, where, _KEYS)
        fields |= {name: integer(config, key, where) for key, name in _INTEGERS.items() if config.get(key) is not None}
        if config.get("do_pan_and_scan") is not None:
            fields["pan_and_scan"] = boolean(config, "do_pan_and_scan", where)
        if (ratio := config.get("pan_and_scan_min_ratio_to_activate")) is not None:
            fields["min_ratio"] = float(ratio)
        if config.get("do_resize") is False:
            raise ConfigError(f"{where}: do_resize is false, but the model reads squares of one size.")
        size = config.get("size")
        if not isinstance(size, Mapping) or not {"height", "width"} <= set(size) or size["height"] != size["width"]:
            raise ConfigError(f"{where}: size must have an equal height and width, not {size!r}.")
        return cls(**fields, side=integer(size, "height", where))

    def __call__(self, images: Sequence[Any], names: Sequence[str]) -> tuple[dict[str, Tensor], list[int]]:
        """(pixel_values fp32 [squares, 3, side, side], the number of crops of each image, after it).

        images: as `load_image` takes them. names: their names in errors. Raises InputError.
        """
        squares, counts = [], []
        for name, source in zip(names, images, strict=True):
            with named(name):
                image = load_image(source)
            crops = [image.crop(box) for box in self.crops(image.height, image.width)]
            squares += [self._pixels(part) for part in (image, *crops)]
            counts.append(len(crops))
        return {"pixel_values": torch.from_numpy(np.stack(squares))}, counts

    def crops(self, height: int, width: int) -> list[tuple[int, int, int, int]]:
        """(left, top, right, bottom) of the crops of an image."""
        longer, shorter = max(height, width), min(height, width)
        if not self.pan_and_scan or longer / shorter < self.min_ratio:
            return []
        count = min(math.floor(longer / shorter + 0.5), longer // self.min_crop_size)
        count = min(max(2, count), self.max_crops)
        length = math.ceil(longer / count)
        if min(length, shorter) < self.min_crop_size:
            return []
        spans = [(length * i, min(length * (i + 1), longer)) for i in range(count)]
        return [(a, 0, b, height) if width >= height else (0, a, width, b) for a, b in spans]

    def text_of(self, crops: int) -> str:
        """What stands in a text for an image with so many crops."""
        soft, end = self.other_tokens
        square = f"\n\n{self.image_token}{soft * self.image_seq_length}{end}\n\n"
        if not crops:
            return square
        more = " ".join([square] * crops)
        return f"Here is the original image {square} and here are some crops to help you see better {more}"

    def _pixels(self, image: Image.Image) -> np.ndarray:
        pixels = np.asarray(self.resize(image, self.side, self.side)).transpose(2, 0, 1)
        return np.stack([numbers[channel] for numbers, channel in zip(self.table(), pixels, strict=True)])
