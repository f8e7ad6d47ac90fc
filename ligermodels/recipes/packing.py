"""Examples into batches of tensors: packed one after another without padding, or padded rows."""

from bisect import bisect_left, insort
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ligermodels.recipes import images
from ligermodels.recipes.masking import IGNORED, Example

Batch = dict[str, Any]
"""The arguments of a model's forward."""


def best_fit(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Bins of indices whose lengths add up to at most `capacity`, by best fit: longest first, into the fullest bin.

    No length may exceed the capacity.
    """
    bins: list[list[int]] = []
    spaces: list[tuple[int, int]] = []  # (space left, bin) in order, of bins that are not full
    for index in sorted(range(len(lengths)), key=lambda n: -lengths[n]):
        at = bisect_left(spaces, (lengths[index], -1))
        if at < len(spaces):
            space, bin = spaces.pop(at)
        else:
            space, bin = capacity, len(bins)
            bins.append([])
        bins[bin].append(index)
        if space > lengths[index]:
            insort(spaces, (space - lengths[index], bin))
    return bins


def spread(bins: list[list[int]], ranks: int) -> list[list[int]]:
    """The bins, some of them halved, so that their number is a multiple of `ranks`.

    Where all hold a single index, halves are empty.
    """
    bins = list(bins)
    while len(bins) % ranks:
        fullest = max(range(len(bins)), key=lambda n: len(bins[n]))
        halves = bins[fullest][::2], bins[fullest][1::2]
        bins[fullest : fullest + 1] = halves
    return bins


def packed_batch(examples: Sequence[Example], pad_id: int = 0, multiple: int = 1) -> Batch:
    """input_ids and labels, int64 [1, T], cu_seqlens, int32 [N + 1], and max_seqlen of N examples.

    Padding up to a multiple of `multiple` is a sequence of its own. Without examples all is padding. Images add their
    tensors (`images.batch`); raises InputError where they cannot be packed.
    """
    ids = [index for example in examples for index in example.ids]
    labels = [label for example in examples for label in example.labels]
    lengths = [len(example.ids) for example in examples]
    if padding := -len(ids) % multiple if ids else multiple:
        ids += [pad_id] * padding
        labels += [IGNORED] * padding
        lengths.append(padding)
    input_ids = torch.tensor([ids])
    return {
        "input_ids": input_ids,
        "labels": torch.tensor([labels]),
        "cu_seqlens": torch.tensor([0, *lengths]).cumsum(0).int(),
        "max_seqlen": max(lengths),
        **images.batch([example.images for example in examples], input_ids, packed=True),
    }


def filled_batch(batch: Mapping[str, Any], length: int) -> dict[str, Any]:
    """A packed batch of text, padded to `length` tokens and length + 1 bounds, so that all batches have one shape.

    Each token of padding is a sequence of its own, which no other token attends to. Further bounds are those of empty
    sequences at the end.
    """
    ids, labels, bounds = (batch[name] for name in ("input_ids", "labels", "cu_seqlens"))
    tokens = ids.shape[1]
    alone = torch.arange(tokens + 1, length + 1, dtype=bounds.dtype, device=bounds.device)
    bounds = torch.cat([bounds, alone])
    return {
        "input_ids": F.pad(ids, (0, length - tokens)),
        "labels": F.pad(labels, (0, length - tokens), value=IGNORED),
        "cu_seqlens": F.pad(bounds, (0, length + 1 - len(bounds)), value=length),
        "max_seqlen": length,
    }


def padded_batch(examples: Sequence[Example], pad_id: int = 0, multiple: int = 1) -> Batch:
    """input_ids, labels and attention_mask, int64 [B, T], padded on the right up to a multiple of `multiple`.

    Without examples there is one row of padding, whose attention mask is 1: no row may be without a token.
    """
    ids = [example.ids for example in examples] or [[pad_id] * multiple]
    labels = [example.labels for example in examples] or [[IGNORED] * multiple]
    width = max(map(len, ids))
    width += -width % multiple

    def padded(rows: Sequence[list[int]], value: int) -> Tensor:
        return torch.tensor([row + [value] * (width - len(row)) for row in rows])

    input_ids = padded(ids, pad_id)
    return {
        "input_ids": input_ids,
        "labels": padded(labels, IGNORED),
        "attention_mask": padded([[1] * len(row) for row in ids], 0),
        **images.batch([example.images for example in examples], input_ids, packed=False),
    }
