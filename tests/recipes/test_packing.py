"""Packing by invariants and a slow packer."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ligermodels.recipes.masking import IGNORED, Example
from ligermodels.recipes.packing import best_fit, packed_batch

LENGTHS = st.integers(1, 60).flatmap(lambda top: st.tuples(st.just(top), st.lists(st.integers(1, top), max_size=40)))


def slow_best_fit(lengths, capacity):
    """The space left in each bin, by trying all bins."""
    spaces = []
    for length in sorted(lengths, reverse=True):
        fitting = [space for space in spaces if space >= length]
        if fitting:
            spaces.remove(min(fitting))
        spaces.append((min(fitting) if fitting else capacity) - length)
    return sorted(spaces)


@settings(max_examples=200, deadline=None)
@given(LENGTHS, st.integers(0, 100))
def test_best_fit(case, more):
    top, lengths = case
    bins = best_fit(lengths, top + more)
    assert sorted(index for bin in bins for index in bin) == list(range(len(lengths)))
    spaces = [top + more - sum(lengths[index] for index in bin) for bin in bins]
    assert sorted(spaces) == slow_best_fit(lengths, top + more)
    assert best_fit(lengths, top + more) == bins


def test_packed_batch():
    batch = packed_batch([Example([5, 6], [IGNORED, 6]), Example([7], [IGNORED])], pad_id=9, multiple=4)
    assert {k: v.tolist() if isinstance(v, torch.Tensor) else v for k, v in batch.items()} == {
        "input_ids": [[5, 6, 7, 9]],
        "labels": [[IGNORED, 6, IGNORED, IGNORED]],
        "cu_seqlens": [0, 2, 3, 4],
        "max_seqlen": 2,
    }
    assert batch["cu_seqlens"].dtype == torch.int32 and batch["input_ids"].dtype == torch.int64
    empty = packed_batch([], pad_id=9, multiple=3)
    assert empty["input_ids"].tolist() == [[9, 9, 9]] and empty["cu_seqlens"].tolist() == [0, 3]
