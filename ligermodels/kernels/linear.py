"""A linear layer that keeps how its input is made, where the input knows that, instead of the input.

    y = x @ weight.T + bias

The backward needs x for dweight alone. Behind a norm, x is a function of what the norm keeps anyway (`_recipes`): it is
made again for that product, which costs one more run of the norm's kernel, 4 H bytes moved per token in 16 bits, and
2 H bytes per token are not kept. dweight is added to weight.grad in place where the user asked for it (`_gradients`).
Everywhere else this is F.linear itself.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ligermodels.kernels._gradients import is_marked, weight_gradient
from ligermodels.kernels._recipes import backward_alone, make, recipe_of
from ligermodels.kernels._triton import once_differentiable, use_triton


class _Linear(torch.autograd.Function):
    """x: [..., K], of two dims or more; weight: [N, K]; bias: [N] or None; recipe: that of x, or None -> [..., N]."""

    @staticmethod
    def forward(ctx, x, weight, bias, recipe):
        ctx.function, made_of = (None, (x,)) if recipe is None else recipe
        ctx.save_for_backward(weight, *made_of)
        return F.linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        weight, *made_of = ctx.saved_tensors
        need_x, need_weight, need_bias, _ = ctx.needs_input_grad
        rows = dy.flatten(0, -2)
        dx = dweight = None
        if need_weight:  # first, so that x and dx are never there together
            dweight = weight_gradient(weight, rows, make(ctx.function, made_of).flatten(0, -2))
        if need_x:
            dx = (rows @ weight).view(*dy.shape[:-1], weight.shape[1])
        return dx, dweight, rows.sum(0) if need_bias else None, None


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x @ weight.T + bias, as F.linear, that does not keep an x that a norm of this package has just made.

    x: [..., K]; weight: [N, K]; bias: [N] or None. Returns [..., N].
    x is made again in the backward where gradients are on, the weight wants one, and nothing has happened to x since
    the norm returned it. Under autocast and torch.compile, and for tensor subclasses, this is F.linear.
    """
    recipe = recipe_of(x)
    if (
        (recipe is not None or (is_marked(weight) and use_triton(x) and backward_alone()))
        and weight.requires_grad
        and x.dim() >= 2
        and type(x) is Tensor
        and type(weight) in (nn.Parameter, Tensor)
        and not torch.is_autocast_enabled(x.device.type)
    ):
        return _Linear.apply(x, weight, bias, recipe)
    return F.linear(x, weight, bias)


def joint(tensors):
    return None


def lay_together(parameters):
    pass


def packed_linear(x, weights, biases=None):
    biases = [None] * len(weights) if biases is None else biases
    return torch.cat([linear(x, w, b) for w, b in zip(weights, biases)], -1)
