"""Images in conversations: their placeholders, their tokens, and their pixels in a batch.

A message gives an image in a part {"type": "image", "image": ...}, or under path, url, base64 or image_url. Parts
without an image take the row's `images`, in order. Messages that are plain texts may mark the places by <image>, as in
LLaMA-Factory; without a mark the images come before the first question, as in TRL. An image is a path, relative to the
row's file, the bytes of a file, {"bytes", "path"} as `datasets` stores it, or a PIL image.

Qwen's models have tokens for each image, which are packed like other tokens. In Llama-3.2-Vision all tokens of a row
attend to all of its images, so an example with images is a batch of its own.
"""

import functools
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ligermodels.errors import ConfigError, InputError

if TYPE_CHECKING:
    from ligermodels.vision import Processor

MARK = "<image>"


@dataclass(frozen=True)
class Images:
    """The images of an example. token: the id that stands for them. tensors: their inputs of the model, by name."""

    token: int
    tensors: dict[str, Tensor]

    @property
    def is_alone(self) -> bool:
        """Whether an example needs a batch of its own, since all tokens of a row attend to its images."""
        return "cross_attention_mask" in self.tensors


# ---- of a row ----


def place(
    messages: Sequence[Mapping[str, Any]], row_images: Any, folder: Path | None
) -> tuple[list[dict[str, Any]], list[Any]]:
    """The messages with {"type": "image"} for each image, and the images in that order.

    row_images: `images` of the row. folder: what relative paths are relative to. Raises InputError.
    """
    if row_images is None and not are_in(messages):
        return [dict(message) for message in messages], []
    from ligermodels.vision.processor import split_media

    placed, images, _ = split_media(messages)
    if row_images is not None and images:
        raise InputError("images: the row has some, and so have parts of its messages. Give them in one place")
    if row_images is not None:
        images = list(row_images) if isinstance(row_images, list | tuple) else [row_images]
        if not any(isinstance(message.get("content"), list) for message in placed):
            placed = _marked(placed, len(images))
    places = [part for message in placed for part in _parts(message) if part.get("type") == "image"]
    if len(places) != len(images):
        raise InputError(f"images: there are {len(images)}, and the messages have places for {len(places)}")
    return placed, [_source(image, folder) for image in images]


def are_in(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a message has a part that is not text."""
    return any(part.get("type") != "text" for message in messages for part in _parts(message))


def _parts(message: Mapping[str, Any]) -> list[Any]:
    content = message.get("content")
    return content if isinstance(content, list) else []


def _marked(messages: list[dict[str, Any]], number: int) -> list[dict[str, Any]]:
    """Messages of plain text with parts for `number` images: at the marks, or before the first question."""
    if not any(MARK in message.get("content", "") for message in messages):
        n = next((n for n, message in enumerate(messages) if message["role"] == "user"), 0)
        question = messages[n] | {"content": MARK * number + messages[n].get("content", "")}
        messages = [*messages[:n], question, *messages[n + 1 :]]
    marked = []
    for message in messages:
        parts: list[dict[str, Any]] = []
        for n, piece in enumerate(message.get("content", "").split(MARK)):
            parts += [{"type": "image"}] * (n > 0) + [{"type": "text", "text": piece}] * (piece != "")
        marked.append(message | {"content": parts} if {"type": "image"} in parts else message)
    return marked


def _source(image: Any, folder: Path | None) -> Any:
    """What `vision.load_image` takes."""
    if isinstance(image, Mapping):
        image = next((image[key] for key in ("bytes", "path", "url") if image.get(key) is not None), image)
    if isinstance(image, str) and not re.match(r"data:|[a-zA-Z][a-zA-Z0-9+.-]+://", image) and folder is not None:
        return folder / os.path.expanduser(image)
    return image


# ---- of an example ----


@functools.cache
def processor_of(folder: Path) -> "Processor":
    """The processor of the checkpoint in a folder. Raises InputError for a model without one."""
    try:
        from ligermodels.vision import Processor

        return Processor.from_folder(folder)
    except ConfigError as error:
        raise InputError(f"the row has images, and the model takes none: {error}") from error


def add(
    text: str, mask: Sequence[int], sources: Sequence[Any], processor: "Processor"
) -> tuple[Any, list[int], Images]:
    """The ids and their mask, with the tokens of each image, which are not trained; and the images.

    text: has a placeholder for each image. mask: of its tokens. Raises InputError for an image that cannot be read.
    """
    if processor.image_processor.other_tokens:
        name = type(processor.image_processor).__name__
        raise InputError(f"images: rows with images cannot be trained on with a {name} yet; leave them out")
    inputs = dict(processor(text, list(sources), add_special_tokens=False))
    ids, token = inputs.pop("input_ids")[0].tolist(), processor.tokenizer.token_to_id(processor.image_token)
    assert token is not None
    placeholders = processor.tokenizer.encode(text, add_special_tokens=False)
    rest = iter([bit for x, bit in zip(placeholders, mask, strict=True) if x != token])
    del inputs["attention_mask"]
    return ids, [0 if x == token else next(rest) for x in ids], Images(token, inputs)


def shorten(text: str, token: str) -> str:
    """The text with one token and a count for all tokens of an image."""
    return re.sub(f"(?:{re.escape(token)}){{2,}}", lambda run: f"{token} x {len(run[0]) // len(token)}", text)


# ---- of a batch ----


def batch(images: Sequence[Images], length: int) -> dict[str, Tensor]:
    """The tensors that images, in the order of their tokens, add to a batch of `length` tokens."""
    names = images[0].tensors if images else ()
    joined = {name: torch.cat([item.tensors[name] for item in images]) for name in names}
    if (mask := joined.get("cross_attention_mask")) is not None:  # [1, tokens, images, tiles], of the whole text
        joined["cross_attention_mask"] = F.pad(mask, (0, 0, 0, 0, 0, length - mask.shape[1]))
    return joined
