"""The gradient of a weight: returned to autograd, or added to weight.grad inside the backward.

    dweight [N, K] = dy [T, N].T @ x [T, K]

Autograd adds a returned gradient to weight.grad in a pass of its own: from the second micro-batch on, or where a weight
is used twice, it needs a second [N, K] buffer, which is written, read and added. After
`ligermodels.training.accumulate_in_place`, cuBLAS adds in the matmul's epilogue instead: no second buffer, half the
bytes, and one rounding of the fp32 sum. With 8 micro-batches of 1 x 2048 tokens an 8B model takes 4 % less time.

A backward that does this returns None; autograd still runs the leaf's AccumulateGrad node and its hooks. The user's
wish is an attribute of the parameter (MARK), because a backward sees the parameter and nothing else of the model.
"""

from typing import Any

import torch
from torch import Tensor, nn

from ligermodels.kernels._launch import launch
from ligermodels.kernels._triton import cdiv, num_sms, tl, triton, use_triton

MARK = "_accumulates_in_place"
"""The attribute of parameters whose gradients are added in place."""


@triton.jit(do_not_specialize=["n_parts"])
def sum_parts_kernel(
    first_ptr, second_ptr, parts_ptr, n_parts, N: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    """Sums n_parts rows of N into first, and the next n_parts rows into second, if the grid's second dim is 2.

    first and second are two tensors, since torch.compile loses a write where two arguments share one memory.
    """
    cols = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    parts_ptr += tl.program_id(1).to(tl.int64) * n_parts * N
    total = tl.zeros([ROWS, BLOCK], parts_ptr.dtype.element_ty)
    for start in range(0, n_parts, ROWS):
        rows = start + tl.arange(0, ROWS)
        mask = (rows < n_parts)[:, None] & (cols < N)[None, :]
        total += tl.load(parts_ptr + rows.to(tl.int64)[:, None] * N + cols, mask=mask, other=0.0)
    grad = tl.sum(total, 0)
    if second_ptr is not None:
        if tl.program_id(1) == 1:
            tl.store(second_ptr + cols, grad.to(second_ptr.dtype.element_ty), mask=cols < N)
        else:
            tl.store(first_ptr + cols, grad.to(first_ptr.dtype.element_ty), mask=cols < N)
    else:
        tl.store(first_ptr + cols, grad.to(first_ptr.dtype.element_ty), mask=cols < N)


@triton.jit
def _write_kernel(out, x, factor, size, ADD: tl.constexpr, ACC: tl.constexpr, BLOCK: tl.constexpr):
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
    """True if gradients of weight are to be added in place; the backward finds out whether they can be."""
    return not torch.compiler.is_compiling() and type(weight) is nn.Parameter and getattr(weight, MARK, False)


def target(weight: Tensor) -> Tensor | None:
    """In a backward: the leaf whose .grad this backward may add to (or set, where it is None); None if it may not.

    It may if the leaf is marked, no hook needs the gradient, and the running backward accumulates into .grad, which
    torch.autograd.grad does not; only a private function of torch's engine knows that. weight comes from
    ctx.saved_tensors: checkpointing and offloading make it another tensor of the same leaf.
    """
    if type(weight) is nn.Parameter:
        if not getattr(weight, MARK, False):
            return None
    elif type(weight) is not Tensor:
        return None
    if torch.compiler.is_compiling() or torch.is_grad_enabled() or not (weight.is_leaf and weight.requires_grad):
        return None
    with torch.enable_grad():
        view: Any = weight.view_as(weight).grad_fn
    if view is None:  # inside a custom op, which has to return the gradient
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
    except RuntimeError:  # torch.autograd.grad asks for this very gradient
        return None


def accumulate(total: Tensor, a: Tensor, b: Tensor, first: bool) -> None:
    """total = a.T @ b if first, else total += a.T @ b; total may be fp32 where a and b are low precision."""
    a = a.t()
    if total.dtype != a.dtype and not (a.is_cuda and torch.version.hip is None):
        a, b = a.to(total.dtype), b.to(total.dtype)  # only cuBLAS multiplies low precision into fp32
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
        if leaf is not None:
            return accumulate_grad(weight, product)
        return product if product.dtype == weight.dtype else product.to(weight.dtype)
    total = torch.empty_like(leaf) if leaf.grad is None else leaf.grad
    accumulate(total, dy, x, leaf.grad is None)
    leaf.grad = total
    return None


def accumulate_grad(weight: Tensor, gradient: Tensor, factor: Tensor | None = None) -> Tensor | None:
    """gradient times factor, in the dtype of weight, or None after it was added to weight.grad; rounded once.

    gradient: contiguous, of any dtype; it may be overwritten. factor: one number on its device, or None.
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
    """x *= factor for a contiguous x and one number on its device; a factor of 1 leaves x untouched."""
    blocks = -(-x.numel() // 8192)
    if blocks:
        grid = (min(blocks, 8 * num_sms(x.device.index)),)
        launch(_scale_kernel, grid, x, factor, x.numel(), 8192, num_warps=8)
    return x


def _write(out: Tensor, x: Tensor, factor: Tensor | None, add: bool) -> Tensor:
    """out = [out +] x * factor."""
    dtype = torch.promote_types(torch.promote_types(x.dtype, out.dtype), torch.float32)
    if not (use_triton(x) and out.is_contiguous()):
        x = x.to(dtype) if factor is None else x.to(dtype) * factor
        return out.copy_(out + x if add else x)
    if x.numel():
        acc = tl.float64 if dtype == torch.float64 else tl.float32
        launch(_write_kernel, (cdiv(x.numel(), 4096),), out, x, factor, x.numel(), add, acc, 4096, num_warps=8)
    return out
