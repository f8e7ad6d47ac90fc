"""The likeliest token of each row, with ties, NaN and infinities."""

import pytest
import torch

from ligermodels.kernels.loss.argmax import argmax, argmax_reference
from tests.kernels.judge import DTYPES

INF, NAN = float("inf"), float("nan")


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (3, 1000), (2, 1024), (2, 5000), (17, 62_000)], ids=str)
def test_the_first_of_the_largest(device, poison, shape, dtype):
    logits = torch.randn(shape).to(device, dtype)  # in 16 bits there are ties; fp64 is left to torch
    expected = argmax_reference(logits.cpu())
    assert torch.equal(argmax(logits).cpu(), expected)
    gaps = torch.full((shape[0], shape[1] + 9), NAN, device=device, dtype=dtype)
    gaps[:, : shape[1]] = logits
    assert torch.equal(argmax(gaps[:, : shape[1]]).cpu(), expected)
    best = logits.max(-1, keepdim=True).values
    lowest = torch.where(logits == best, torch.arange(shape[1], device=device), shape[1]).min(-1).values
    assert torch.equal(argmax(logits)[0], lowest)


def test_rows_without_a_largest_are_marked_and_keep_to_the_vocabulary(device):
    logits = torch.randn(8, 2500, device=device)
    logits[0] = -INF
    logits[1, 2300] = NAN
    logits[2] = NAN
    logits[3, :2400] = -INF
    logits[4, 7] = INF
    logits[5, [3, 2000]] = INF
    logits[6, 1], logits[6, 2200] = INF, NAN
    ids, broken = argmax(logits)
    assert broken.tolist() == [1, 1, 1, 0, 0, 0, 1, 0]
    assert ids[0] == 0 and ids[3:6].tolist() == [2400 + int(logits[3, 2400:].argmax()), 7, 3]
    assert ((ids >= 0) & (ids < 2500)).all()
    assert torch.equal(argmax_reference(logits)[1], broken)
