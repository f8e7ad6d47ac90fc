"""Loads images from files, bytes, PIL images and arrays.

- The orientation of the camera (EXIF) is applied to files and PIL images.
- Transparent images get a white background.
- 16 bits per channel are reduced to the high 8; pillow's convert would clip values above 255 to white.
- Of an animation or several pages the first image is used, with a warning; of a PIL image the current frame.

Checked against transformers 5.23, `image_utils.load_image` and `image_transforms.convert_to_rgb`, which apply EXIF
only to files, the white background only to PIL images, and clip 16 bits.
"""

import base64
import contextlib
import io
import os
import re
import urllib.parse
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from PIL import Image, ImageOps, UnidentifiedImageError

from ligermodels.errors import InputError

_NOT_IMAGES = (
    (rb"^version https://git-lfs", "it is a git-lfs pointer, not the file itself: run `git lfs pull`"),
    (rb"(?i)^\s*(<!doctype html|<html)", "it is an HTML page: a link to a page was saved in place of the image"),
    (rb"^.{4}ftyp(hei|hev|mif)", "it is HEIC: `pip install pillow-heif`, then pillow_heif.register_heif_opener()"),
    (rb"^.{4}ftyp(?!avi)|^\x1aE\xdf\xa3|^RIFF.{4}AVI ", "it is a video: decode it and pass a list of frames as videos"),
)


def load_image(source: Any) -> Image.Image:
    """The image as RGB, 8 bits per channel.

    source: the path of a file (also file://...), the bytes of a file (also data:image/...;base64,...), a file opened
    in binary mode, a PIL image, a numpy array uint8 [H, W], [H, W, 1], [H, W, 3] or [H, W, 4], or a torch tensor
    uint8 [3, H, W] (or 1 or 4 channels). Nothing is fetched from the network.
    Raises InputError, which names the source.
    """
    if isinstance(source, np.ndarray | torch.Tensor):
        return _rgb(_from_array(source), "the array")
    if isinstance(source, Image.Image):
        return _rgb(source, f"the PIL image ({source.format or 'no file'}, {source.mode})")
    if isinstance(source, str) and source[:5].lower() == "data:":
        return _decode(io.BytesIO(_data_uri(source)), f"the data URI {source[:30]}...")
    if isinstance(source, bytes | bytearray | memoryview):
        data = bytes(source)
        return _decode(io.BytesIO(data), f"the image of {len(data):,} bytes")
    if isinstance(source, str | os.PathLike):
        path = _path(source)
        try:
            with open(path, "rb") as file:
                return _decode(file, str(path))
        except OSError as error:
            raise InputError(f"{path} cannot be read: {error.strerror}.") from error
    if hasattr(source, "read"):
        return _decode(_rewindable(source), f"the file {getattr(source, 'name', type(source).__name__)}")
    raise InputError(
        f"an image must be a path, the bytes of a file, an open file, a PIL image, a numpy array or a torch tensor, "
        f"not {type(source).__name__} ({str(source)[:60]})."
    )


@contextlib.contextmanager
def named(name: str) -> Iterator[None]:
    """Adds `name` to the beginning of InputErrors raised inside."""
    try:
        yield
    except InputError as error:
        raise InputError(f"{name}: {error}") from error


def _path(source: str | os.PathLike[str]) -> Path:
    """The path of a regular file, or an InputError."""
    text = os.fsdecode(source)
    if scheme := re.match(r"(?i)([a-z][a-z0-9+.-]+)://", text):
        if scheme[1].lower() != "file":
            raise InputError(
                f"{text[:200]} is a URL, and nothing is fetched from the network. Next step: download it (curl "
                "-O, or urllib.request.urlopen(url).read()) and pass the file or its bytes."
            )
        text = urllib.parse.unquote(urllib.parse.urlsplit(text).path)
    path = Path(os.path.expanduser(text))
    try:
        if path.is_file():
            return path
        kind = "not a regular file" if path.exists() else "not there"
    except (OSError, ValueError):
        kind = "not a path"
    hint = " Base64 text must begin with data:image/...;base64," if len(text) > 255 else ""
    raise InputError(f"{text[:200]} is {kind}; an image must be a file (working folder: {Path.cwd()}).{hint}")


def _data_uri(source: str) -> bytes:
    head, _, body = source.partition(",")
    try:
        if not head.lower().endswith(";base64"):
            raise ValueError("it has no ';base64,'")
        return base64.b64decode(body)
    except ValueError as error:
        raise InputError(f"the data URI {source[:60]} cannot be decoded: {error}. Is it cut off?") from error


def _rewindable(file: Any) -> BinaryIO:
    """The file, or its bytes if it cannot seek, such as a network response."""
    if getattr(file, "seekable", lambda: False)() and isinstance(file.read(0), bytes):
        return file
    data = file.read()
    if not isinstance(data, bytes):
        raise InputError(f"the file returns {type(data).__name__}, not bytes. Next step: open it in mode 'rb'.")
    return io.BytesIO(data)


def _decode(file: BinaryIO, where: str) -> Image.Image:
    try:
        image = Image.open(file)
    except UnidentifiedImageError as error:
        file.seek(0)
        start = file.read(512)
        known = (reason for pattern, reason in _NOT_IMAGES if re.search(pattern, start, re.DOTALL))
        reason = next(known, f"unknown to pillow, or cut off; its first bytes are {start[:12]!r}")
        raise InputError(f"{where} is not an image that can be read: {reason}.") from error
    except Exception as error:
        raise _damaged(where, error) from error
    if getattr(image, "is_animated", False) and image.format != "MPO":  # MPO: a photograph and its previews
        text = f"{where} has several images: the first is used, the others are ignored."
        warnings.warn(f"{text} For a video, pass a list of frames as videos.", stacklevel=3)
    return _rgb(image, where)


def _damaged(where: str, error: Exception) -> InputError:
    """The InputError for an error of pillow."""
    if isinstance(error, Image.DecompressionBombError):
        return InputError(
            f"{where}: {error} Nothing was decoded. Likely cause: a decompression bomb, or a very large scan. Next "
            "step: make it smaller, or, if you trust it, raise the limit, which is twice PIL.Image.MAX_IMAGE_PIXELS."
        )
    return InputError(
        f"{where} is damaged: {type(error).__name__}: {str(error)[:200].rstrip('.')}. Likely cause: an interrupted "
        "download or copy. Next step: fetch it again, or save it with another program."
    )


def _from_array(array: np.ndarray | torch.Tensor) -> Image.Image:
    is_tensor = isinstance(array, torch.Tensor)
    kind, axis = ("tensor", 0) if is_tensor else ("array", -1)
    shape = tuple(array.shape)
    if str(array.dtype).removeprefix("torch.") != "uint8":
        raise InputError(
            f"an image as {kind} must be uint8, 0 to 255; this one is {array.dtype} {shape}. Next step: for floats "
            f"from 0 to 1, (x * 255).round() as uint8. Normalised pixels are not images."
        )
    layout = "[channels, H, W]" if is_tensor else "[H, W, channels]"
    if len(shape) not in (2, 3) or (len(shape) == 3 and shape[axis] not in (1, 3, 4)):
        raise InputError(
            f"an image as {kind} must be {layout} with 1, 3 or 4 channels, not {shape}. Likely cause: the channels are "
            "the other axis, or several images are in one array: pass a list of them."
        )
    if isinstance(array, torch.Tensor):
        array = array.detach().cpu()
        array = (array.permute(1, 2, 0) if len(shape) == 3 else array).numpy()
    return Image.fromarray(np.ascontiguousarray(array[..., 0] if array.shape[2:] == (1,) else array))


def _rgb(image: Image.Image, where: str) -> Image.Image:
    if 0 in image.size:
        raise InputError(f"{where} is empty: it is {image.width} x {image.height} pixels.")
    form, mode, bands = image.format, image.mode, image.getbands()
    try:
        image = ImageOps.exif_transpose(image)
        if mode.startswith("I;16") or (mode == "I" and form in ("PNG", "PPM")):
            return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8)).convert("RGB")
        if mode not in ("I", "F"):
            if {"A", "a"} & set(bands) or image.info.get("transparency") is not None:
                image = image.convert("RGBA")
                image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
            return image.convert("RGB")
    except Exception as error:  # decoders raise errors of many kinds
        raise _damaged(where, error) from error
    raise InputError(
        f"{where} has {'float' if mode == 'F' else '32-bit'} pixels, whose range is unknown. Next "
        "step: convert it to uint8 RGB."
    )
