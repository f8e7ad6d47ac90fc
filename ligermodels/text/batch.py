"""Batches of token ids: truncated, padded, as tensors.

A batch is a dict of columns, {"input_ids": [[1, 5], [1]], "attention_mask": ...}; those in `FILLS` have an entry for
each token. Checked against transformers 5.23, `PreTrainedTokenizerBase.pad` and `BatchEncoding`. torch is imported only
where tensors are made.
"""

import warnings
from collections.abc import Mapping, Sequence
from reprlib import repr as short
from typing import TYPE_CHECKING, Any, Protocol

from ligermodels.errors import InputError

if TYPE_CHECKING:
    import torch

# The padding value of each column; for input_ids it is the pad token.
FILLS: Mapping[str, Any] = {
    "input_ids": None,
    "attention_mask": 0,
    "token_type_ids": 0,
    "special_tokens_mask": 1,
    "assistant_masks": 0,
    "offset_mapping": (0, 0),
}


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


class Settings(Protocol):
    """The settings of a tokenizer that apply where a call gives none."""

    padding_side: str
    truncation_side: str
    model_max_length: int
    model_input_names: list[str]
    pad_token_id: int | None


def finish(
    columns: dict[str, list[Any]],
    settings: Settings,
    *,
    flat: bool,
    padding: bool | str,
    truncation: bool | str = False,
    max_length: int | None = None,
    pad_to_multiple_of: int | None = None,
    padding_side: str | None = None,
    return_tensors: str | None = None,
    return_attention_mask: bool | None = None,
    around: tuple[int, int] = (0, 0),
) -> BatchEncoding:
    """Truncates the columns, adds an attention mask, pads, and converts to tensors.

    flat: returns the only row without a batch dimension. around: the number of special tokens before and after a text.
    Raises InputError.
    """
    truncates, pads = _choice("truncation", truncation, _TRUNCATIONS), _choice("padding", padding, _PADDINGS)
    limit = max_length
    if limit is None and settings.model_max_length <= _LONGEST:
        limit = int(settings.model_max_length)
    if truncates and limit is not None:
        columns = truncate(columns, limit, settings.truncation_side, around)
    rows = columns["input_ids"]
    if return_attention_mask is None:
        return_attention_mask = "attention_mask" in settings.model_input_names
    if return_attention_mask and "attention_mask" not in columns:
        columns = {"input_ids": rows, "attention_mask": [[1] * len(row) for row in rows], **columns}
    if pads == "longest" and max_length is not None and not truncates:
        warnings.warn("max_length is ignored: padding=True pads to the longest row, nothing truncates.", stacklevel=3)
    width = limit if pads == "max_length" else max(map(len, rows), default=0)
    if pads and width is not None:
        if settings.pad_token_id is None:
            raise InputError(
                "the tokenizer has no pad token. Next step: tokenizer.pad_token = tokenizer.eos_token, or another "
                "token of the vocabulary."
            )
        multiple = pad_to_multiple_of or 1
        if truncates and limit is not None and limit % multiple:
            raise InputError(f"rows truncated to {limit} tokens cannot be padded to a multiple of {multiple}.")
        side = settings.padding_side if padding_side is None else padding_side
        columns = pad(columns, -(-width // multiple) * multiple, side, settings.pad_token_id)
    return as_tensors({name: rows[0] for name, rows in columns.items()} if flat else columns, return_tensors)


def truncate(columns: Mapping[str, list[Any]], length: int, side: str, around: tuple[int, int]) -> dict[str, list[Any]]:
    """Rows of at most `length` tokens; the special tokens around a text stay. side: where tokens are removed."""
    before, after = around
    if length < before + after:
        raise InputError(f"max_length={length} has no room for the {before + after} special tokens around a text.")
    _check_side("truncation_side", side)

    def shorter(row: Sequence[Any]) -> Sequence[Any]:
        inner, room = row[before : len(row) - after], length - before - after
        inner = inner[:room] if side == "right" else inner[max(0, len(inner) - room) :]
        return [*row[:before], *inner, *row[len(row) - after :]]

    return {name: [shorter(row) if len(row) > length else row for row in rows] for name, rows in columns.items()}


def pad(columns: Mapping[str, list[Any]], width: int, side: str, pad_token_id: int | None) -> dict[str, list[Any]]:
    """Pads the rows of the columns in `FILLS` to `width`; other columns are unchanged. side: of padding."""
    _check_side("padding_side", side)
    fills = {**FILLS, "input_ids": pad_token_id}

    def wider(row: Sequence[Any], fill: Any) -> list[Any]:
        more = [fill] * (width - len(row))
        return [*more, *row] if side == "left" else [*row, *more]

    return {
        name: [wider(row, fills[name]) for row in rows] if name in fills else rows for name, rows in columns.items()
    }


def padded(rows: list[list[int]], side: str, pad_token_id: int) -> BatchEncoding:
    """input_ids and attention_mask of rows of ids, int64 [B, S]; S is the longest row."""
    width = max(map(len, rows), default=0)
    columns = {"input_ids": rows, "attention_mask": [[1] * len(row) for row in rows]}
    tensors = as_tensors(pad(columns, width, side, pad_token_id), "pt")
    return BatchEncoding({name: tensor.reshape(len(rows), width) for name, tensor in tensors.items()})


def mask_of(offsets: Sequence[tuple[int, int]], spans: Sequence[tuple[int, int]]) -> list[int]:
    """1 for each token that has a character of one of the spans, 0 for the others.

    offsets, spans: (start, end) in the text, each in order. A token without characters counts as the next one.
    """
    found, rest = [], list(reversed(spans))
    for start, end in offsets:
        while rest and rest[-1][1] <= start:
            rest.pop()
        found.append(int(bool(rest) and max(end, start + 1) > rest[-1][0]))
    return found


def collect(encoded: Any) -> tuple[dict[str, Any], str | None]:
    """({column: lists of numbers}, "pt" or "np" if the ids are tensors or arrays) of the argument of `pad`.

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
    kind = "pt" if hasattr(first, "numpy") else "np" if hasattr(first, "tolist") else None
    return {name: _plain(value) for name, value in encoded.items()}, kind


def as_tensors(columns: Mapping[str, Any], kind: str | None) -> BatchEncoding:
    """kind: "pt" for tensors, "np" for arrays, None for the lists as they are. Raises InputError."""
    if kind not in (None, "pt", "np"):
        raise InputError(f"return_tensors can be 'pt' (torch), 'np' (numpy) or None, not {short(kind)}.")
    if kind is None:
        return BatchEncoding(columns)
    import torch

    made = BatchEncoding()
    for name, rows in columns.items():
        try:
            # Empty rows are int64 too.
            made[name] = torch.tensor(rows, dtype=None if rows and rows != [[]] else torch.int64)
        except (TypeError, ValueError) as error:
            raise InputError(
                f"{name} cannot become a tensor: {error}. Likely cause: rows of different lengths. Next step: "
                "padding=True, truncation=True with max_length, or return_tensors=None."
            ) from error
    return BatchEncoding({name: tensor.numpy() for name, tensor in made.items()}) if kind == "np" else made


_PADDINGS = {True: "longest", "longest": "longest", "max_length": "max_length", False: None, "do_not_pad": None}
_TRUNCATIONS = {True: True, "longest_first": True, "only_first": True, False: False, "do_not_truncate": False}
# As in transformers, a larger model_max_length means no limit.
_LONGEST = 10**20


def _choice(name: str, value: Any, choices: Mapping[Any, Any]) -> Any:
    if isinstance(value, bool | str) and value in choices:
        return choices[value]
    raise InputError(f"{name} must be one of {list(choices)}, not {short(value)}.")


def _check_side(name: str, side: Any) -> None:
    if side not in ("left", "right"):
        raise InputError(f"{name} must be 'left' or 'right', not {short(side)}.")


def _plain(value: Any) -> Any:
    """Tensors and arrays, also those in a list, as lists of numbers."""
    if isinstance(value, list | tuple):
        return [_plain(item) if hasattr(item, "tolist") else item for item in value]
    return value.tolist() if hasattr(value, "tolist") else value
