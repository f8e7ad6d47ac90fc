"""Helpers of all kernels: rows of any strides, backwards that run once."""

import pytest
import torch

from ligermodels.kernels._triton import as_rows, once_differentiable

LAYOUTS = {
    "contiguous": (lambda t: t, False),
    "transposed": (lambda t: t.transpose(0, 1), True),
    "part of wider rows": (lambda t: t[..., 2:5], False),
    "every other row": (lambda t: t[0, ::2], False),
    "a column": (lambda t: t[..., 0], True),
    "expanded": (lambda t: t[:1, :1].expand(4, 6, 8), False),
    "one row": (lambda t: t[1, 2], False),
    "no row": (lambda t: t[:0], False),
    "gaps in the last dim": (lambda t: t[..., ::2], True),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_as_rows(layout):
    make, copies = LAYOUTS[layout]
    x = torch.randn(4, 6, 8)
    y = make(x)
    rows, count, stride = as_rows(y)
    assert count == y.numel() // y.shape[-1]
    assert torch.equal(rows.as_strided((count, y.shape[-1]), (stride, 1)), y.reshape(-1, y.shape[-1]))
    assert copies == (rows.untyped_storage().data_ptr() != x.untyped_storage().data_ptr())
    if layout == "contiguous":
        assert rows is y


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        assert torch.is_grad_enabled() is False
        return 2 * ctx.saved_tensors[0] * dy


def test_once_differentiable():
    x = torch.randn(3, requires_grad=True)
    (plain,) = torch.autograd.grad(Square.apply(x).sum(), x)
    assert torch.equal(plain, 2 * x) and not plain.requires_grad
    (graph,) = torch.autograd.grad(Square.apply(x).square().sum(), x, create_graph=True)
    torch.testing.assert_close(graph, 4 * x**3)
    with pytest.raises(RuntimeError, match="twice"):
        graph.sum().backward()
