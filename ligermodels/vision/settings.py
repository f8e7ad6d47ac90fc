"""The settings of preprocessor_config.json that all families share, and how they map pixels to floats.

transformers rescales in fp64, rounds to fp32, then normalises in fp32. A pixel has 256 values, so the same arithmetic
on a table of 256 entries gives the same bits.
Checked against transformers 5.23, image_processing_backends.PilBackend.
"""

import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image

from ligermodels.errors import ConfigError

CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)

_BOOLEANS = ("do_resize", "do_rescale", "do_normalize")
_NO_EFFECT = {
    *("image_processor_type", "video_processor_type", "feature_extractor_type", "processor_class", "auto_map"),
    *("do_convert_rgb", "default_to_square", "return_tensors", "device", "disable_grouping", "return_metadata"),
    *("data_format", "input_data_format", "num_frames", "fps", "min_frames", "max_frames", "video_metadata"),
    *("crop_size", "pad_size"),
}
"""Keys that some version of transformers writes and that have no effect here."""
_MUST_BE_OFF = {
    "do_center_crop": "cropping is not done",
    "do_sample_frames": "frames are taken as they are given: choose them before",
}


@dataclass(frozen=True, kw_only=True)
class PixelSettings:
    """do_resize, resample (a filter of pillow), do_rescale, rescale_factor, do_normalize, image_mean, image_std."""

    do_resize: bool = True
    resample: int = Image.Resampling.BICUBIC
    do_rescale: bool = True
    rescale_factor: float = 1 / 255
    do_normalize: bool = True
    image_mean: tuple[float, ...] = CLIP_MEAN
    image_std: tuple[float, ...] = CLIP_STD

    def resize(self, image: Image.Image, height: int, width: int) -> Image.Image:
        return image.resize((width, height), resample=Image.Resampling(self.resample))

    def table(self) -> np.ndarray:
        """fp32 [3, 256]: the float for each value of each channel."""
        values = np.arange(256, dtype=np.float64)
        values = (values * self.rescale_factor if self.do_rescale else values).astype(np.float32)
        if not self.do_normalize:
            return np.stack([values] * 3)
        mean, std = (np.array(three, dtype=np.float32)[:, None] for three in (self.image_mean, self.image_std))
        return (values - mean) / std


def read_settings(config: Mapping[str, Any], where: str, family_keys: set[str]) -> dict[str, Any]:
    """The fields of `PixelSettings` in `config`. family_keys: the keys that the family reads itself.

    Unknown keys are named in one warning. Raises ConfigError.
    """
    present = {key: value for key, value in config.items() if value is not None}
    for key, reason in _MUST_BE_OFF.items():
        if present.get(key) and key not in family_keys:
            raise ConfigError(f"{where}: {key} is {present[key]!r}, and {reason}. Next step: set it to false.")
    fields: dict[str, Any] = {key: boolean(present, key, where) for key in _BOOLEANS if key in present}
    if "resample" in present:
        fields["resample"] = integer(present, "resample", where, minimum=0)
        if fields["resample"] > 5:
            raise ConfigError(f"{where}: resample is {present['resample']}; pillow's filters are 0 to 5 (3: bicubic).")
    if "rescale_factor" in present:
        fields["rescale_factor"] = _number(present["rescale_factor"], f"{where}: rescale_factor")
    for key in ("image_mean", "image_std"):
        if key in present:
            value = present[key] if isinstance(present[key], list | tuple) else [present[key]] * 3
            if len(value) != 3:
                raise ConfigError(f"{where}: {key} must be three numbers, for red, green and blue, not {value!r}.")
            fields[key] = tuple(_number(number, f"{where}: {key}") for number in value)
    if 0 in fields.get("image_std", ()):
        raise ConfigError(f"{where}: image_std must not have a 0.")
    known = {*fields, *family_keys, *_NO_EFFECT, *_MUST_BE_OFF}
    if unknown := sorted(key for key, value in present.items() if key not in known and value is not False):
        warnings.warn(f"{where}: unknown keys are ignored: {unknown}", stacklevel=4)
    return fields


def integer(config: Mapping[str, Any], key: str, where: str, minimum: int = 1) -> int:
    value = config[key]
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise ConfigError(f"{where}: {key} must be an integer of at least {minimum}, not {value!r}.")
    return value


def boolean(config: Mapping[str, Any], key: str, where: str) -> bool:
    if not isinstance(config[key], bool):
        raise ConfigError(f"{where}: {key} must be true or false, not {config[key]!r}.")
    return config[key]


def _number(value: Any, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ConfigError(f"{where} must be a number, not {value!r}.")
    return float(value)
