"""Rows of ids into what a model is called with: cut to a length, padded to one, as tensors.

A batch is a dict of columns, {"input_ids": [[1, 5], [1]], "attention_mask": ...}; those that `FILLS` names have an
entry for each token. Checked against transformers 5.23, `PreTrainedTokenizerBase.pad` and `BatchEncoding`.
"""

from collections.abc import Mapping, Sequence
from reprlib import repr as short
from typing import Any

import torch

from ligermodels.errors import InputError

# What padding is in each column; for input_ids it is the pad token.
FILLS: Mapping[str, Any] = {
    "input_ids": None,
    "attention_mask": 0,
    "token_type_ids": 0,
    "special_tokens_mask": 1,
    "assistant_masks": 0,
    "offset_mapping": (0, 0),
}


class BatchEncoding(dict[str, Any]):
    """What a tokenizer returns: `model(**batch)`. `batch.input_ids` is `batch["input_ids"]`."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"this batch has no {name}; it has {list(self)}") from None

    def to(self, device: str | torch.device | int, *, non_blocking: bool = False) -> "BatchEncoding":
        """This batch, its tensors moved to `device`."""
        for name, value in self.items():
            if isinstance(value, torch.Tensor):
                self[name] = value.to(device, non_blocking=non_blocking)
        return self


def cut(columns: Mapping[str, list[Any]], length: int, side: str, edges: tuple[int, int]) -> dict[str, list[Any]]:
    """Rows of at most `length` tokens; of the tokens that stand around a text, `edges` on either side, none is cut.

    side: the one that loses tokens.
    """
    before, after = edges
    if length < before + after:
        raise InputError(f"max_length={length} has no room for the {before + after} special tokens around a text.")
    check_side("truncation_side", side)

    def shorter(row: Sequence[Any]) -> Sequence[Any]:
        inner, room = row[before : len(row) - after], length - before - after
        inner = inner[:room] if side == "right" else inner[max(0, len(inner) - room) :]
        return [*row[:before], *inner, *row[len(row) - after :]]

    return {name: [shorter(row) if len(row) > length else row for row in rows] for name, rows in columns.items()}


def pad(columns: Mapping[str, list[Any]], width: int, side: str, pad_token_id: int | None) -> dict[str, list[Any]]:
    """Every row of the columns in `FILLS` at least `width` long; the other columns as they are. side: of padding."""
    check_side("padding_side", side)
    fills = {**FILLS, "input_ids": pad_token_id}

    def wider(row: Sequence[Any], fill: Any) -> list[Any]:
        more = [fill] * (width - len(row))
        return [*more, *row] if side == "left" else [*row, *more]

    return {
        name: [wider(row, fills[name]) for row in rows] if name in fills else rows for name, rows in columns.items()
    }


def within(offsets: Sequence[tuple[int, int]], spans: Sequence[tuple[int, int]]) -> list[int]:
    """1 for each token that has a character of one of the spans, which stand in order; a token without any counts as
    the character that it stands before."""
    found, rest = [], list(reversed(spans))
    for start, end in offsets:
        while rest and rest[-1][1] <= start:
            rest.pop()
        found.append(int(bool(rest) and max(end, start + 1) > rest[-1][0]))
    return found


def collect(encoded: Any) -> tuple[dict[str, Any], str | None]:
    """({column: lists of numbers}, "pt" or "np" if it came as tensors or arrays) of what is handed to be padded.

    encoded: a dict of columns, or a list of dicts, one for each row. Raises InputError.
    """
    if isinstance(encoded, list | tuple) and encoded and all(isinstance(row, Mapping) for row in encoded):
        if any(row.keys() != encoded[0].keys() for row in encoded):
            raise InputError(f"pad takes rows with the same keys, not {short([sorted(row) for row in encoded])}.")
        encoded = {name: [row[name] for row in encoded] for name in encoded[0]}
    if not isinstance(encoded, Mapping) or "input_ids" not in encoded:
        given = sorted(map(str, encoded)) if isinstance(encoded, Mapping) else encoded
        raise InputError(f"pad takes a dict with input_ids, or a list of such dicts, not {short(given)}.")
    ids = encoded["input_ids"]
    first = ids[0] if isinstance(ids, list | tuple) and ids else ids
    kind = "pt" if isinstance(first, torch.Tensor) else "np" if hasattr(first, "tolist") else None
    return {name: _plain(value) for name, value in encoded.items()}, kind


def as_tensors(columns: Mapping[str, Any], kind: str | None) -> BatchEncoding:
    """kind: "pt" for tensors, "np" for arrays, None for the lists as they are. Raises InputError."""
    if kind not in (None, "pt", "np"):
        raise InputError(f"return_tensors can be 'pt' (torch), 'np' (numpy) or None, not {short(kind)}.")
    if kind is None:
        return BatchEncoding(columns)
    made = BatchEncoding()
    for name, rows in columns.items():
        try:
            # [0, S] of no rows at all is int64 too.
            made[name] = torch.tensor(rows, dtype=None if rows and rows != [[]] else torch.int64)
        except (TypeError, ValueError) as error:
            raise InputError(
                f"{name} cannot become a tensor: {error}. Likely cause: rows of different lengths. Next step: "
                "padding=True, truncation=True with max_length, or return_tensors=None."
            ) from error
    return BatchEncoding({name: tensor.numpy() for name, tensor in made.items()}) if kind == "np" else made


def check_side(name: str, side: Any) -> None:
    if side not in ("left", "right"):
        raise InputError(f"{name} must be 'left' or 'right', not {short(side)}.")


def _plain(value: Any) -> Any:
    """Tensors and arrays, also those in a list, as lists of numbers."""
    if isinstance(value, list | tuple):
        return [_plain(item) if hasattr(item, "tolist") else item for item in value]
    return value.tolist() if hasattr(value, "tolist") else value
