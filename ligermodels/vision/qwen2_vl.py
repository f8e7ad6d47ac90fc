"""Image processor of Qwen2-VL, Qwen3-VL and Qwen3.5: images and videos to rows of patches.

- Each image is resized to multiples of patch_size * merge_size (28, from Qwen3-VL on 32) with a number of pixels
  between min_pixels and max_pixels; the aspect ratio stays about the same.
- A patch covers temporal_patch_size frames; an image is repeated to fill them.
- Patches are in the order in which the tower merges them: blocks of merge_size x merge_size patches, row of blocks by
  row of blocks. The order inside a patch is channel, frame, line, column.
- Frames of a video have their own limits, see `Qwen2VLImageProcessor.from_config`; from Qwen3-VL on the limits are of
  all frames together, see `Qwen3VLVideoProcessor`.

Checked against transformers 5.23, models/qwen2_vl/image_processing_pil_qwen2_vl.py, and video_processing_qwen2_vl.py
and qwen3_vl/video_processing_qwen3_vl.py (frames are resized by pillow here, as in transformers up to 4.51, by
torchvision there).
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
from ligermodels.vision.settings import PixelSettings, boolean, integer, read_settings

MAX_RATIO = 200
IMAGE_LIMITS, VIDEO_LIMITS = (56 * 56, 28 * 28 * 1280), (28 * 28 * 128, 28 * 28 * 768)
"""Default (min_pixels, max_pixels) of transformers' image processor and, from 4.52 on, video processor."""

_SIZES = ("patch_size", "temporal_patch_size", "merge_size", "max_video_tokens")
_FAMILY_KEYS = {*_SIZES, "min_pixels", "max_pixels", "size", "cap_pixels_per_frame"}


def smart_resize(
    height: int, width: int, factor: int, min_pixels: int, max_pixels: int, *, frames: int = 1, patched_frames: int = 1
) -> tuple[int, int]:
    """(height, width) in multiples of `factor`. Raises InputError for a ratio above 200.

    The limits are of all frames together; patched_frames: their number as it is compared with the limits.
    """
    if max(height, width) > MAX_RATIO * min(height, width):
        raise InputError(
            f"{width} x {height} pixels: one side is more than {MAX_RATIO} times the other. Next step: crop it, or pad "
            "the short side."
        )
    # Python's round, to even at .5, as in transformers.
    new_height, new_width = (round(side / factor) * factor for side in (height, width))
    if patched_frames * new_height * new_width > max_pixels:
        shrink = math.sqrt(frames * height * width / max_pixels)
        return (
            max(factor, math.floor(height / shrink / factor) * factor),
            max(factor, math.floor(width / shrink / factor) * factor),
        )
    if patched_frames * new_height * new_width < min_pixels:
        grow = math.sqrt(min_pixels / (frames * height * width))
        return math.ceil(height * grow / factor) * factor, math.ceil(width * grow / factor) * factor
    return new_height, new_width


@dataclass(frozen=True, kw_only=True)
class Qwen2VLImageProcessor(PixelSettings):
    """min_pixels, max_pixels: limits of one image, or of one frame of a video.

    cap_pixels_per_frame: shrinks the frames of a long video, to about 0.9 * max_video_tokens tokens for the video; off
    by default, as in transformers 5.23.
    """

    limits: ClassVar = {"image": IMAGE_LIMITS, "video": VIDEO_LIMITS}
    family_keys: ClassVar[set[str]] = _FAMILY_KEYS
    image_token: ClassVar[str] = "<|image_pad|>"
    other_tokens: ClassVar[tuple[str, ...]] = ()

    min_pixels: int = IMAGE_LIMITS[0]
    max_pixels: int = IMAGE_LIMITS[1]
    patch_size: int = 14
    temporal_patch_size: int = 2
    merge_size: int = 2
    cap_pixels_per_frame: bool = False
    max_video_tokens: int = 128_000

    @classmethod
    def from_config(
        cls, config: Mapping[str, Any], *, video: bool = False, where: str = "preprocessor_config.json"
    ) -> Self:
        """From the object in preprocessor_config.json, or in video_preprocessor_config.json with video=True.

        Limits are read from min_pixels and max_pixels (transformers 4), else from size (transformers 5: shortest_edge
        and longest_edge, as numbers of pixels; 4.45: min_pixels and max_pixels). The defaults are transformers': 3,136
        and 1,003,520 for images, 100,352 and 602,112 for frames (versions before 4.52 used those of images). A
        checkpoint without a file for videos uses the file for images, with its limits, as in every version.
        Raises ConfigError.
        """
        fields = read_settings(config, where, cls.family_keys)
        fields |= {key: integer(config, key, where) for key in _SIZES if config.get(key) is not None}
        fields |= zip(
            ("min_pixels", "max_pixels"), _limits(config, cls.limits["video" if video else "image"], where), strict=True
        )
        if config.get("cap_pixels_per_frame") is not None:
            fields["cap_pixels_per_frame"] = boolean(config, "cap_pixels_per_frame", where)
        return cls(**fields)

    @property
    def factor(self) -> int:
        return self.patch_size * self.merge_size

    def num_tokens(self, grid: Sequence[int] | Tensor) -> int:
        """The number of placeholder tokens of an image or video. grid: its row of image_grid_thw or video_grid_thw."""
        return math.prod(int(side) for side in grid) // self.merge_size**2

    def __call__(self, images: Sequence[Any], names: Sequence[str] | None = None) -> dict[str, Tensor]:
        """pixel_values fp32 [patches, C * frames * patch_size^2] and image_grid_thw int64 [images, 3], in patches.

        images: as `load_image` takes them. names: their names in errors. Raises InputError.
        """
        sized = []
        for index, image in enumerate(images):
            with named(names[index] if names else f"image {index}"):
                sized.append(self._sized([load_image(image)]))
        pixels, grids = self._patches(sized)
        return {"pixel_values": pixels, "image_grid_thw": grids}

    def videos(self, videos: Sequence[Sequence[Any]]) -> dict[str, Tensor]:
        """pixel_values_videos and video_grid_thw, as above. A video is a list of frames of one size.

        The last frame is repeated to fill the last patch.
        """
        sized = []
        for index, video in enumerate(videos):
            frames = []
            for place, frame in enumerate(video):
                with named(f"frame {place} of video {index}"):
                    frames.append(load_image(frame))
            if len(sizes := {frame.size for frame in frames}) != 1:
                raise InputError(
                    f"video {index} has frames of different sizes, such as {sorted(sizes)[:2]} (width, height). Likely "
                    "cause: single images, which go into images=."
                    if sizes
                    else f"video {index} has no frames."
                )
            with named(f"video {index}"):
                sized.append(self._sized(frames))
        pixels, grids = self._patches(sized)
        return {"pixel_values_videos": pixels, "video_grid_thw": grids}

    def _sized(self, frames: list[Image.Image]) -> list[Image.Image]:
        """The frames of one image or video, resized and padded to whole patches."""
        height, width = frames[0].height, frames[0].width
        if self.do_resize:
            size = self._size(len(frames), height, width)
            frames = [self.resize(frame, *size) for frame in frames]
        elif height % self.factor or width % self.factor:
            raise InputError(
                f"{width} x {height} pixels: with do_resize false both sides must be multiples of {self.factor}."
            )
        return frames + frames[-1:] * (-len(frames) % self.temporal_patch_size)

    def _patches(self, clips: list[list[Image.Image]]) -> tuple[Tensor, Tensor]:
        """Rows of patches of all images (or videos), and the grid (time, height, width) of each."""
        p, m, t = self.patch_size, self.merge_size, self.temporal_patch_size
        grids = [(len(frames) // t, frames[0].height // p, frames[0].width // p) for frames in clips]
        rows = np.empty((sum(map(math.prod, grids)), 3 * t * p * p), dtype=np.float32)
        end = 0
        for frames, (time, height, width) in zip(clips, grids, strict=True):
            pixels = np.stack([np.asarray(frame) for frame in frames])
            pixels = pixels.reshape(time, t, height // m, m, p, width // m, m, p, 3)
            pixels = pixels.transpose(8, 0, 2, 5, 3, 6, 1, 4, 7)  # channel; time, block, patch; frame, line, column
            start, end = end, end + time * height * width
            out = rows[start:end].reshape(*pixels.shape[1:6], 3, *pixels.shape[6:])
            for channel, numbers in enumerate(self.table()):
                out[:, :, :, :, :, channel] = numbers[pixels[channel]]
        return torch.from_numpy(rows), torch.tensor(grids, dtype=torch.int64).reshape(-1, 3)

    def _size(self, num_frames: int, height: int, width: int) -> tuple[int, int]:
        max_pixels = self.max_pixels
        if self.cap_pixels_per_frame:
            budget = int(self.max_video_tokens * self.factor**2 * 0.9) * self.temporal_patch_size
            max_pixels = max(min(max_pixels, budget // num_frames), int(self.min_pixels * 1.05))
        return smart_resize(height, width, self.factor, self.min_pixels, max_pixels)


@dataclass(frozen=True, kw_only=True)
class Qwen3VLVideoProcessor(Qwen2VLImageProcessor):
    """The processor for videos of Qwen3-VL and Qwen3.5; min_pixels, max_pixels: limits of all frames together.

    cap_pixels_per_frame: shrinks frames to max_video_tokens tokens each, and to their share of max_pixels.
    """

    limits: ClassVar = {"video": (128 * 32 * 32, 32 * 32 * 768)}
    family_keys: ClassVar[set[str]] = _FAMILY_KEYS | {"do_sample_frames"}  # frames are taken as they are given

    min_pixels: int = limits["video"][0]
    max_pixels: int = limits["video"][1]
    image_mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    image_std: tuple[float, ...] = (0.5, 0.5, 0.5)
    patch_size: int = 16
    max_video_tokens: int = 768

    def times(self, num_frames: int, fps: float) -> list[float]:
        """The second in the middle of each patch's frames, of frames that were taken `fps` times a second."""
        last, length = num_frames - 1, self.temporal_patch_size
        spans = [(first, min(first + length - 1, last)) for first in range(0, num_frames, length)]
        return [(first / fps + end / fps) / 2 for first, end in spans]

    def _size(self, num_frames: int, height: int, width: int) -> tuple[int, int]:
        factor, length, max_pixels = self.factor, self.temporal_patch_size, self.max_pixels
        if num_frames < length:
            raise InputError(
                f"a video needs {length} frames or more, not {num_frames}. Next step: pass it as an image."
            )
        if self.cap_pixels_per_frame:
            share = min(self.max_video_tokens * factor**2, max_pixels // num_frames)
            max_pixels = max(share, int(self.min_pixels * 1.05)) * num_frames
        if min(height, width) < factor:
            scale = max(factor / height, factor / width)
            height, width = int(height * scale), int(width * scale)
        patched = round(num_frames / length) * length  # to even at .5, as in transformers
        limits = self.min_pixels, max_pixels
        return smart_resize(height, width, factor, *limits, frames=num_frames, patched_frames=patched)


def _limits(config: Mapping[str, Any], defaults: tuple[int, int], where: str) -> tuple[int, int]:
    size = config.get("size") or {}
    if not isinstance(size, Mapping) or (size and not {"min_pixels", "shortest_edge"} & set(size)):
        raise ConfigError(f"{where}: size must have shortest_edge and longest_edge (numbers of pixels), not {size!r}.")

    def limit(key: str, key_in_size: str, default: int) -> int:
        places = ((config, key), (size, key), (size, key_in_size))
        return next((integer(at, name, where) for at, name in places if at.get(name) is not None), default)

    smallest = limit("min_pixels", "shortest_edge", defaults[0])
    largest = limit("max_pixels", "longest_edge", defaults[1])
    if smallest > largest:
        raise ConfigError(f"{where}: min_pixels {smallest:,} is above max_pixels {largest:,}.")
    return smallest, largest
