"""Gradients that are added to .grad in the backward: equal to autograd's sums, and only where that is right."""

import functools

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ligermodels.kernels import _gradients
from ligermodels.kernels._gradients import MARK, accumulate_grad, target, weight_gradient
from ligermodels.kernels.loss.embedding import embedding, embedding_reference
from ligermodels.kernels.loss.linear_cross_entropy import linear_cross_entropy, linear_cross_entropy_reference
from tests.parallel.ranks import one_rank


class Product(torch.autograd.Function):
    """x @ weight.T, whose backward says whether it added in place."""

    @staticmethod
    def forward(ctx, x, weight, seen):
        ctx.save_for_backward(x, weight)
        ctx.seen = seen
        return x @ weight.t()

    @staticmethod
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        if ctx.seen is not None:
            ctx.seen.append(target(weight) is not None)
        return dy @ weight, weight_gradient(weight, dy, x), None


@pytest.fixture
def problem(device):
    """(x [6, 5], the weight [5, 5] that is marked, what backward said)."""
    x = torch.randn(6, 5, dtype=torch.float64, device=device, requires_grad=True)
    weight = nn.Parameter(torch.randn(5, 5, dtype=torch.float64, device=device))
    setattr(weight, MARK, True)
    return x, weight, []


def plain(f, *tensors):
    """The gradients by autograd of f(*copies of tensors)."""
    copies = [t.detach().clone().requires_grad_() for t in tensors]
    return torch.autograd.grad(f(*copies), copies)


def second_use(x, weight, seen):
    return Product.apply(Product.apply(x, weight, seen).tanh(), weight, seen)


def second_use_by_torch(x, weight, seen):
    return Product.apply(x, weight, seen).tanh() @ weight.t()


def checkpointed(x, weight, seen, **options):
    return checkpoint(lambda x: second_use(x, weight, seen), x, **options)


def offloaded(x, weight, seen):
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t.clone()):
        return second_use(x, weight, seen)


@pytest.mark.parametrize("existing", [False, True])
@pytest.mark.parametrize(
    "use",
    [
        second_use,
        second_use_by_torch,
        functools.partial(checkpointed, use_reentrant=False),
        functools.partial(checkpointed, use_reentrant=True),
        offloaded,
    ],
    ids=["twice", "torch", "checkpoint", "reentrant", "offload"],
)
def test_second_use(problem, use, existing):
    x, weight, seen = problem
    expected = plain(lambda x, w: ((x @ w.t()).tanh() @ w.t()).square().sum(), x, weight)
    start = torch.randn_like(weight) if existing else torch.zeros_like(weight)
    weight.grad = start.clone() if existing else None
    loss = use(x, weight, seen).square().sum()
    for times in (1, 2) if use is second_use else (1,):
        loss.backward(retain_graph=use is second_use)
        torch.testing.assert_close(weight.grad, start + times * expected[1], rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(x.grad, times * expected[0], rtol=1e-12, atol=1e-12)
    assert seen and all(seen)


@pytest.mark.filterwarnings("ignore:Using backward:UserWarning")  # of create_graph=True
def test_grad_that_others_ask_for_leaves_grad_alone(problem):
    x, weight, seen = problem
    weight.grad = torch.ones_like(weight)
    expected = plain(lambda x, w: (x @ w.t()).square().sum(), x, weight)

    def loss():
        return Product.apply(x, weight, seen).square().sum()

    torch.testing.assert_close(torch.autograd.grad(loss(), [weight])[0], expected[1])
    torch.testing.assert_close(torch.autograd.grad(loss(), [x])[0], expected[0])
    torch.testing.assert_close(torch.autograd.grad(loss(), [x, weight])[1], expected[1])
    loss().backward(inputs=[x])
    assert torch.equal(weight.grad, torch.ones_like(weight)) and seen == [False] * 4
    loss().backward(inputs=[weight])
    torch.testing.assert_close(weight.grad, 1 + expected[1])
    loss().backward(create_graph=True)
    assert seen == [False] * 4 + [True, False] and weight.grad.requires_grad


def test_what_is_not_added_in_place(problem):
    """No mark, a tensor made of the leaf, another dtype of .grad, hooks: autograd adds, and hooks see the gradient."""
    x, weight, seen = problem
    expected = plain(lambda w: (x.detach() @ w.t()).square().sum(), weight)[0]
    found = []
    hooks = [
        lambda: weight.register_hook(lambda g: found.append(g)),
        lambda: weight.register_post_accumulate_grad_hook(lambda p: found.append(p.grad)),
    ]
    for hook in hooks:
        weight.grad, handle = None, hook()
        Product.apply(x, weight, seen).square().sum().backward()
        handle.remove()
        torch.testing.assert_close(found.pop(), expected)
    Product.apply(x, weight * 1, seen).square().sum().backward()
    delattr(weight, MARK)
    Product.apply(x, weight, seen).square().sum().backward()
    torch.testing.assert_close(weight.grad, 3 * expected)
    assert seen == [False] * 4
    setattr(weight, MARK, True)
    Product.apply(x, weight, seen).square().sum().backward()
    assert seen[-1]


def test_ddp(problem, tmp_path):
    """Its reducer copies each gradient into a bucket once it is complete; gloo, one rank."""
    x, weight, seen = problem

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = weight

        def forward(self, x):
            return second_use(x, self.weight, seen).square().sum()

    expected = plain(lambda w: ((x.detach() @ w.t()).tanh() @ w.t()).square().sum(), weight)[0]
    with one_rank(tmp_path):
        for view in (False, True):
            weight.grad = None
            model = nn.parallel.DistributedDataParallel(Model(), gradient_as_bucket_view=view)
            with model.no_sync():
                model(x.detach()).backward()
            model(x.detach()).backward()
            torch.testing.assert_close(weight.grad, 2 * expected)
            del model  # before the group that its reducer works with
    assert all(seen)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("weight_dtype", [torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("factor", [None, 0.5])
def test_give(device, poison, dtype, weight_dtype, factor, monkeypatch):
    """Any dtype into any other, with and without a .grad and a leaf; whole numbers, so that all sums are exact."""
    gradient = torch.randint(-8, 9, (37, 5), device=device).to(dtype)
    scale = None if factor is None else torch.tensor(factor, device=device)
    expected = gradient.to(weight_dtype) * (factor or 1.0)
    for layout in (lambda t: t, lambda t: t.t().contiguous().t()):
        weight = nn.Parameter(layout(torch.randn(37, 5, device=device).to(weight_dtype)))
        unmarked = accumulate_grad(weight, gradient.clone(), scale)
        assert unmarked.dtype == weight_dtype and torch.equal(unmarked, expected)
        with monkeypatch.context() as patch:
            patch.setattr(_gradients, "target", lambda weight: weight)
            for times in (1, 2, 3):
                assert accumulate_grad(weight, gradient.clone(), scale) is None
                assert torch.equal(weight.grad, times * expected)


@pytest.mark.parametrize("table_last", [True, False])
def test_tied_table_and_head(device, poison, table_last):
    """Whichever runs first in the backward, both add to one buffer, micro-batch after micro-batch."""
    ids, more, labels = (torch.randint(9, (12,), device=device) for _ in range(3))
    tied = nn.Parameter(torch.randn(9, 4, dtype=torch.float64, device=device))
    setattr(tied, MARK, True)

    def loss(weight, embedding, linear_cross_entropy):
        head = linear_cross_entropy(embedding(ids, weight).tanh(), weight, labels, reduction="sum")
        return head if table_last else head + embedding(more, weight).square().sum()  # what came last runs first

    (once,) = plain(lambda w: loss(w, embedding_reference, linear_cross_entropy_reference), tied)
    pointer = None
    for i in (1, 2, 3):
        (2 * loss(tied, embedding, linear_cross_entropy)).backward()
        torch.testing.assert_close(tied.grad, 2 * i * once, rtol=1e-12, atol=1e-12)
        pointer = pointer or tied.grad.data_ptr()
        assert tied.grad.data_ptr() == pointer
