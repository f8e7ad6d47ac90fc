"""Examples into batches of tensors: packed one after another, without padding."""

from bisect import bisect_left, insort
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from ligermodels.recipes import images
from ligermodels.recipes.masking import IGNORED, Example

Batch = dict[str, Any]
"""The arguments of a model's forward."""


def best_fit(lengths: Sequence[float], capacity: int) -> list[list[int]]:
    """Bins of indices whose lengths add up to at most `capacity`, by best fit: longest first, into the fullest bin.

    What is longer than the capacity has a bin of its own.
    """
    bins: list[list[int]] = []
    spaces: list[tuple[float, int]] = []  # (space left, bin) in order, of bins that are not full
    for index in sorted(range(len(lengths)), key=lambda n: -lengths[n]):
        at = bisect_left(spaces, (lengths[index], -1))
        if at < len(spaces):
            space, bin = spaces.pop(at)
        else:
            space, bin = float(capacity), len(bins)
            bins.append([])
        bins[bin].append(index)
        if space > lengths[index]:
            insort(spaces, (space - lengths[index], bin))
    return bins


def packed_batch(examples: Sequence[Example], pad_id: int = 0, multiple: int = 1) -> Batch:
    """input_ids and labels, int64 [1, T], cu_seqlens, int32 [N + 1], and max_seqlen of N examples.

    Padding up to a multiple of `multiple` is a sequence of its own. Without examples all is padding. Images add their
    tensors; an example of Llama-3.2-Vision's is alone, a row without bounds.
    """
    size = sum(example.size for example in examples)
    padding = -size % multiple if size else multiple
    if padding:
        examples = [*examples, Example([pad_id] * padding, [IGNORED] * padding)]
    lengths = [example.size for example in examples]
    input_ids = torch.tensor([[index for example in examples for index in example.ids]])
    batch = {
        "input_ids": input_ids,
        "labels": torch.tensor([[label for example in examples for label in example.labels]]),
        "cu_seqlens": torch.tensor([0, *lengths]).cumsum(0).int(),
        "max_seqlen": max(lengths),
    }
    found = [example.images for example in examples if example.images is not None]
    if any(one.is_alone for one in found):
        del batch["cu_seqlens"], batch["max_seqlen"]
    return batch | images.batch(found, input_ids.shape[1])


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
