"""Batches of token ids: truncated, padded, as tensors.

A batch is a dict of columns, {"input_ids": [[1, 5], [1]], "attention_mask": ...}, each with an entry per token. torch
is imported only where tensors are made.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ligermodels.errors import InputError

if TYPE_CHECKING:
    import torch

# The padding value of each column; of input_ids it is the pad token.
_FILLS = {"attention_mask": 0, "assistant_masks": 0, "offset_mapping": (0, 0)}

Columns = Mapping[str, list[Any]]


class BatchEncoding(dict[str, Any]):
    """The result of a tokenizer's call, for `model(**batch)`. `batch.input_ids` is `batch["input_ids"]`."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"this batch has no {name}; it has {list(self)}") from None

    def to(self, device: "str | torch.device | int", *, non_blocking: bool = False) -> "BatchEncoding":
        """Moves its tensors to `device`. Returns this batch."""
        for name, value in self.items():
            if hasattr(value, "to"):
                self[name] = value.to(device, non_blocking=non_blocking)
        return self


def truncate(columns: Columns, length: int, side: str, around: tuple[int, int]) -> Columns:
    """Rows of at most `length` tokens.

    side: where tokens are removed. around: the number of special tokens before and after each text, which stay.
    """
    before, after = around
    if length < before + after:
        raise InputError(f"max_length={length} is less than the {before + after} special tokens around a text.")

    def shorter(row: Sequence[Any]) -> Sequence[Any]:
        inner, size = row[before : len(row) - after], length - before - after
        inner = inner[:size] if side == "right" else inner[len(inner) - size :]
        return [*row[:before], *inner, *row[len(row) - after :]]

    return {name: [shorter(row) if len(row) > length else row for row in rows] for name, rows in columns.items()}


def pad(columns: Columns, width: int, side: str, pad_token_id: int) -> Columns:
    """Pads every row to `width` tokens, on the given side."""

    def padded_row(row: Sequence[Any], fill: Any) -> list[Any]:
        padding = [fill] * (width - len(row))
        return [*padding, *row] if side == "left" else [*row, *padding]

    fills = {**_FILLS, "input_ids": pad_token_id}
    return {name: [padded_row(row, fills[name]) for row in rows] for name, rows in columns.items()}


def padded(rows: list[list[int]], side: str, pad_token_id: int) -> BatchEncoding:
    """input_ids and attention_mask of rows of ids, int64 [B, S]; S is the longest row."""
    width = max(map(len, rows), default=0)
    columns = {"input_ids": rows, "attention_mask": [[1] * len(row) for row in rows]}
    tensors = as_tensors(pad(columns, width, side, pad_token_id))
    return BatchEncoding({name: tensor.reshape(len(rows), width) for name, tensor in tensors.items()})


def as_tensors(columns: Columns) -> BatchEncoding:
    """The columns as int64 tensors. Raises InputError for rows of different lengths."""
    import torch

    try:
        return BatchEncoding({name: torch.tensor(rows, dtype=torch.int64) for name, rows in columns.items()})
    except ValueError as error:
        raise InputError(
            f"rows of different lengths cannot become a tensor: {error}. Next step: padding=True, truncation=True with "
            "max_length, or return_tensors=None."
        ) from error


def mask_of(offsets: Sequence[tuple[int, int]], spans: Sequence[tuple[int, int]]) -> list[int]:
    """1 for each token that has a character of one of the spans, 0 for the others.

    offsets, spans: (start, end) in the text, each in order. A token without characters counts as the next one,
    and as 0 at the end.
    """
    end = len(offsets)
    while end and offsets[end - 1] == (0, 0):  # special tokens that were added after the text
        end -= 1
    mask = [0] * len(offsets)
    for start, stop in spans:
        first = bisect_right(offsets, start, hi=end, key=lambda token: max(token[1], token[0] + 1))
        last = bisect_left(offsets, stop, hi=end, key=lambda token: token[0])
        mask[first:last] = [1] * (last - first)
    return mask
