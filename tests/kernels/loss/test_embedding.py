"""Embedding: its scale is rounded first, and its backward writes no row without an id."""

import importlib

import pytest
import torch

from ligermodels.kernels.loss.embedding import embedding
from tests.kernels.seen import adding_in_place

module = importlib.import_module("ligermodels.kernels.loss.embedding")


def run(op, ids, weight, dy, **options):
    weight = weight.detach().clone().requires_grad_()
    y = op(ids, weight, **options)
    return [y, *torch.autograd.grad(y, weight, dy)]


@pytest.mark.parametrize("triton_path", [True, False])
def test_scale_is_rounded_before_it_multiplies(device, monkeypatch, triton_path):
    """2048 ** 0.5 is 45.2548; in half precision 45.25, and 1100 times that rounds to another multiple of 32."""
    if not triton_path:
        monkeypatch.setattr(module, "use_triton", lambda x: False)
    weight, ids = torch.full((1, 1), 1100.0, device=device), torch.zeros(1, dtype=torch.int32, device=device)
    for dtype, expected in ((torch.float16, 49760.0), (torch.float64, 1100 * 2048**0.5)):
        for result in run(embedding, ids, weight.to(dtype), weight.to(dtype), scale=2048**0.5):
            assert result.item() == expected


@pytest.mark.parametrize("tokens", [0, 70])
def test_rows_without_an_id_are_not_written(device, poison, tokens):
    ids = torch.randint(6, (tokens,), device=device)
    (weight,) = adding_in_place(torch.randn(9, 5, device=device))
    weight.grad = torch.full((9, 5), -0.0, device=device)  # which would be 0.0 if 0.0 were added
    embedding(ids, weight, scale=0.5, padding_idx=2).sum().backward()
    assert weight.grad[2].signbit().all() and weight.grad[6:].signbit().all()
