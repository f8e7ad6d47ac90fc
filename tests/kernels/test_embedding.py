"""Embedding: runs of equal ids, a rounded scale, gradients that are added in place."""

import importlib

import pytest
import torch

from ligermodels.kernels._gradients import MARK
from ligermodels.kernels.embedding import embedding, embedding_reference

module = importlib.import_module("ligermodels.kernels.embedding")


def run(op, ids, weight, dy, **options):
    weight = weight.detach().clone().requires_grad_()
    y = op(ids, weight, **options)
    return [y, *torch.autograd.grad(y, weight, dy)]


def whole_numbers(*shape, **options):
    """Whose sums are exact in any order."""
    return torch.randint(-8, 9, shape, **options).float()


@pytest.mark.parametrize("triton_path", [True, False])
def test_scale_is_rounded_before_it_multiplies(device, monkeypatch, triton_path):
    """2048 ** 0.5 is 45.2548; in half precision 45.25, and 1100 times that rounds to another multiple of 32."""
    if not triton_path:
        monkeypatch.setattr(module, "use_triton", lambda x: False)
    weight, ids = torch.full((1, 1), 1100.0, device=device), torch.zeros(1, dtype=torch.int32, device=device)
    for dtype, expected in ((torch.float16, 49760.0), (torch.float64, 1100 * 2048**0.5)):
        for result in run(embedding, ids, weight.to(dtype), weight.to(dtype), scale=2048**0.5):
            assert result.item() == expected


def marked(*shape, **options):
    weight = torch.nn.Parameter(torch.randn(*shape, **options))
    setattr(weight, MARK, True)
    return weight


@pytest.mark.parametrize("options", [{}, dict(scale=0.5, padding_idx=2)], ids=str)
@pytest.mark.parametrize("tokens", [0, 70])
def test_adds_to_the_gradient_that_is_there(device, poison, options, tokens):
    """Micro-batches and two uses of one table: one buffer, whose rows without an id are not even written."""
    ids, weight = torch.randint(6, (tokens,), device=device), marked(9, 5, device=device)
    dy = whole_numbers(tokens, 5, device=device)
    once = run(embedding_reference, ids, weight, dy, **options)[1]

    def backward(weight):
        halves = ids[: tokens // 2], ids[tokens // 2 :]
        torch.cat([embedding(part, weight, **options) for part in halves]).backward(dy)

    backward(weight)
    assert torch.equal(weight.grad, once)
    start = whole_numbers(9, 5, device=device)
    start[6:] = -0.0  # and would be 0.0 if 0.0 were added
    weight.grad, expected = start.clone(), start + once
    pointer = weight.grad.data_ptr()
    for _ in range(2):
        backward(weight)
        assert weight.grad.data_ptr() == pointer and torch.equal(weight.grad, expected)
        expected += once
    assert weight.grad[6:].signbit().all()
    kept = weight.grad.clone()
    grad = torch.autograd.grad(embedding(ids, weight, **options), weight, dy)[0]
    assert torch.equal(grad, once) and torch.equal(weight.grad, kept)
