"""The gradient of a weight, returned to autograd, or added in the backward itself to the .grad that is there.

    dweight [N, K] = dy [T, N].T @ x [T, K]

autograd adds what a backward returns to weight.grad in a pass of its own: from the second micro-batch on, or where a
weight is used twice, a second [N, K] buffer is written, read, and added, and its sum is rounded twice. Where the user
asked for it (`ligermodels.training.gradients.accumulate_in_place`), the product is added by cuBLAS in its epilogue
instead: no second buffer, 2 itemsize bytes per parameter moved instead of 4, and one rounding of the fp32 sum.

A backward that does this returns None. autograd then runs the leaf's AccumulateGrad node all the same, once all that
lead to it have run, and with it the hooks that others have put on that node.
"""

from typing import Any

import torch
from torch import Tensor, nn

from ligermodels.kernels._launch import launch
from ligermodels.kernels._triton import cdiv, device_guard, num_sms, tl, triton, use_triton

MARK = "_adds_in_place"
"""The attribute of a parameter whose user asked for sums in place."""


@triton.jit
def _give_kernel(out, x, factor, size, ADD: tl.constexpr, ACC: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + at, mask=at < size).to(ACC)
    if factor is not None:
        value *= tl.load(factor).to(ACC)
    if ADD:
        value += tl.load(out + at, mask=at < size).to(ACC)
    tl.store(out + at, value.to(out.dtype.element_ty), mask=at < size)


@triton.jit
def _scale_kernel(x, factor, size, BLOCK: tl.constexpr):
    f = tl.load(factor)
    if f != 1.0:
        step = tl.cast(tl.num_programs(0), tl.int64) * BLOCK
        for start in range(tl.program_id(0).to(tl.int64) * BLOCK, size, step):
            at = start + tl.arange(0, BLOCK)
            value = tl.load(x + at, mask=at < size)
            tl.store(x + at, (value.to(f.dtype) * f).to(value.dtype), mask=at < size)


def is_marked(weight: Tensor) -> bool:
    """True if the user asked for sums in place; whether one is possible is only known in the backward."""
    return not torch.compiler.is_compiling() and type(weight) is nn.Parameter and getattr(weight, MARK, False)


def target(weight: Tensor) -> Tensor | None:
    """In a backward: the leaf whose .grad this backward may add to, or make where it is None; None where it may not.

    It may where the user marked the leaf, no hook wants to see the gradient before it is added or has it done, and the
    backward that runs will add to .grad, which torch.autograd.grad, and backward(inputs=...) for others, do not. weight
    is as ctx.saved_tensors gives it: checkpointing and offloading make another tensor of it, of the same leaf.
    """
    if torch.compiler.is_compiling() or torch.is_grad_enabled() or not (weight.is_leaf and weight.requires_grad):
        return None
    if type(weight) is not Tensor and not is_marked(weight):
        return None
    with torch.enable_grad():
        view: Any = weight.view_as(weight).grad_fn
    if view is None:  # inside a custom op, which returns what it computes
        return None
    node = view.next_functions[0][0]
    leaf = node.variable
    if not is_marked(leaf) or leaf._backward_hooks or leaf._post_accumulate_grad_hooks:
        return None
    grad = leaf.grad
    if grad is not None and (type(grad) is not Tensor or grad.dtype != leaf.dtype or grad.layout != torch.strided):
        return None
    try:
        return leaf if torch._C._will_engine_execute_node(node) else None
    except RuntimeError:  # it does not answer where torch.autograd.grad asks for this very gradient
        return None


def adds_in_place(weight: Tensor) -> bool:
    """In a backward: True if `weight_gradient` and `accumulate_grad` will add to weight.grad and return None."""
    return target(weight) is not None


def accumulate(total: Tensor, a: Tensor, b: Tensor, first: bool) -> None:
    """total = a.T @ b if first, else total += a.T @ b; total may be wider than a and b."""
    a = a.t()
    if total.dtype != a.dtype and not (a.is_cuda and torch.version.hip is None):
        a, b = a.to(total.dtype), b.to(total.dtype)  # only cuBLAS multiplies narrow numbers into a wide matrix
    if total.dtype == a.dtype:
        torch.mm(a, b, out=total) if first else torch.addmm(total, a, b, out=total)
    elif first:
        torch.mm(a, b, out_dtype=total.dtype, out=total)
    else:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)


def weight_gradient(weight: Tensor, dy: Tensor, x: Tensor) -> Tensor | None:
    """dy [T, N].T @ x [T, K] in the dtype of weight [N, K], or None after it was added to weight.grad."""
    leaf = target(weight)
    if leaf is None or not (dy.dtype == x.dtype == leaf.dtype):
        product = dy.t() @ x
        return product.to(weight.dtype) if leaf is None else accumulate_grad(weight, product)
    total = torch.empty_like(leaf) if leaf.grad is None else leaf.grad
    accumulate(total, dy, x, leaf.grad is None)
    leaf.grad = total
    return None


def accumulate_grad(weight: Tensor, gradient: Tensor, factor: Tensor | None = None) -> Tensor | None:
    """gradient times factor, in the dtype of weight, or None after it was added to weight.grad; rounded once.

    gradient: of any dtype, contiguous, a buffer of the caller's own, not to be read afterwards. factor: one number on
    its device, or None for 1.
    """
    leaf = target(weight)
    grad = None if leaf is None else leaf.grad
    if grad is not None:
        _write(grad, gradient, factor, add=True)
        return None
    if gradient.dtype != weight.dtype:
        gradient = _write(torch.empty_like(gradient, dtype=weight.dtype), gradient, factor, add=False)
    elif factor is not None:
        gradient = scale_(gradient, factor)
    if leaf is None:
        return gradient
    leaf.grad = gradient
    return None


def scale_(x: Tensor, factor: Tensor) -> Tensor:
    """x, contiguous, times one number on its device, in place; where that is 1, x is not touched."""
    blocks = -(-x.numel() // 8192)
    if blocks:
        grid = (min(blocks, 8 * num_sms(x.device.index)),)
        launch(_scale_kernel, grid, x, factor, x.numel(), 8192, num_warps=8)
    return x


def _write(out: Tensor, x: Tensor, factor: Tensor | None, add: bool) -> Tensor:
    """out = [out +] x * factor."""
    wide = torch.promote_types(torch.promote_types(x.dtype, out.dtype), torch.float32)
    if not (use_triton(x) and out.is_contiguous()):
        x = x.to(wide) if factor is None else x.to(wide) * factor
        return out.copy_(out + x if add else x)
    if x.numel():
        acc = tl.float64 if wide == torch.float64 else tl.float32
        with device_guard(x):
            launch(_give_kernel, (cdiv(x.numel(), 4096),), out, x, factor, x.numel(), add, acc, 4096, num_warps=8)
    return out
