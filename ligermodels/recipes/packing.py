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


def packed_batch(examples: Sequence[Example], pad_id: int = 0, multiple: int = 1) -> Batch:
    """input_ids and labels, int64 [1, T], cu_seqlens, int32 [N + 1], and max_seqlen of N examples.

    Padding up to a multiple of `multiple` is a sequence of its own. Without examples all is padding. Images add their
    tensors (`images.batch`); raises InputError where they cannot be packed.
    """
    size = sum(example.size for example in examples)
    padding = -size % multiple if size else multiple
    if padding:
        examples = [*examples, Example([pad_id] * padding, [IGNORED] * padding)]
    lengths = [example.size for example in examples]
    input_ids = torch.tensor([[index for example in examples for index in example.ids]])
    return {
        "input_ids": input_ids,
        "labels": torch.tensor([[label for example in examples for label in example.labels]]),
        "cu_seqlens": torch.tensor([0, *lengths]).cumsum(0).int(),
        "max_seqlen": max(lengths),
        **images.batch([example.images for example in examples], input_ids, packed=True),
    }


def padded_batch(examples: Sequence[Example], pad_id: int = 0, multiple: int = 1) -> Batch:
    """input_ids, labels and attention_mask, int64 [B, T], padded on the right up to a multiple of `multiple`.

    Without examples there is one row of padding, whose attention mask is 1: no row may be without a token.
    """
    examples = examples or [Example([pad_id] * multiple, [IGNORED] * multiple)]
    width = max(example.size for example in examples)
    width += -width % multiple

    def padded(rows: Sequence[list[int]], value: int) -> Tensor:
        return torch.tensor([row + [value] * (width - len(row)) for row in rows])

    input_ids = padded([example.ids for example in examples], pad_id)
    return {
        "input_ids": input_ids,
        "labels": padded([example.labels for example in examples], IGNORED),
        "attention_mask": padded([[1] * example.size for example in examples], 0),
        **images.batch([example.images for example in examples], input_ids, packed=False),
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
