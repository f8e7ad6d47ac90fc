"""Linear layers of one input as one op, with their outputs side by side in one buffer.

    y = [x @ weights[0].T + biases[0] | x @ weights[1].T + biases[1] | ...]

What differs from separate layers and torch.cat:
- Weights that follow each other in one storage (`joint`; `make_joint` puts them there) are read as one matrix: one
  matmul for y, one for dx, one for all weight gradients, which are views of one buffer. Decoding takes 25 to 35 %
  longer without. With other weights, each matmul writes its own columns of y, and adds to dx in its epilogue.
- If a norm computed x, the op saves the norm's inputs instead of x, and recomputes x for the weight gradients
  (`_recompute`): 2 H bytes per token less in 16 bits, for one more run of the norm's kernel.
- Gradients are added to each weight.grad in place where the user asked for it (`_gradients`).

`linear` does this for one weight. Both are F.linear where there is nothing to gain, and `gemv` for a single row without
a gradient.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ligermodels.errors import InputError
from ligermodels.kernels._gradients import accumulate, target, weight_gradient
from ligermodels.kernels._recompute import Handle, handle_of, recomputed
from ligermodels.kernels._triton import once_differentiable
from ligermodels.kernels.gemv import gemv
from ligermodels.kernels.operand import LinearOperand, check, choose, kernel_of

_PLAIN = (nn.Parameter, Tensor)


def joint(tensors: Sequence[Tensor]) -> Tensor | None:
    """The tensors [N_i, ...] as one view [sum N_i, ...] of their memory; None if they are not joint.

    Joint: each tensor starts where the previous one ends in one storage; all are contiguous, of one dtype, and of one
    shape apart from N_i. Always None under torch.compile, and for subclasses and meta tensors. The view has no gradient
    and must not outlive the call, since FSDP frees and refills storages.
    """
    if torch.compiler.is_compiling():
        return None
    first, end, rows = tensors[0], -1, 0
    for t in tensors:
        if type(t) not in _PLAIN or t.layout is not torch.strided:
            return None
        start = t.data_ptr()
        if (end >= 0 and start != end) or not t.is_contiguous() or t.dtype != first.dtype:
            return None
        end = start + t.nbytes
    if first.is_meta:
        return None
    if len(tensors) == 1:
        return first.detach()
    rest = first.shape[1:]
    for t in tensors:
        if t.shape[1:] != rest:
            return None
        rows += t.shape[0]
    storage = first.untyped_storage()
    if end > storage.data_ptr() + storage.nbytes():  # two storages may be neighbours in memory
        return None
    # first.stride(0) may be anything if first has one row.
    return first.detach().as_strided((rows, *rest), (rest.numel(), *first.stride()[1:]))


def make_joint(parameters: Sequence[nn.Parameter]) -> None:
    """Moves the parameters [N_i, ...] into one storage, so that they are `joint`, without changing a bit of them.

    The parameter objects stay, with their gradients and optimizer states. Nothing happens where they are joint already,
    or cannot be: where one is not exactly an nn.Parameter, is on meta, is mapped from a file, shares its storage with
    another tensor, or differs from the others in dtype, device or the dims after the first.
    """
    first = parameters[0]
    if any(type(p) is not nn.Parameter or p.is_meta or p.layout is not torch.strided for p in parameters):
        return
    if len({(p.dtype, p.device, p.shape[1:], p.dim(), p.is_inference()) for p in parameters}) > 1 or not first.dim():
        return
    if any(p.numel() == 0 or (p.device.type == "cpu" and _is_foreign(p)) for p in parameters):
        return
    left: dict[int, int] = {}  # bytes of each storage that belong to no parameter
    for p in parameters:
        storage = p.untyped_storage()
        left[storage._cdata] = left.get(storage._cdata, storage.nbytes()) - p.nbytes
    if any(left.values()) or joint(parameters) is not None:
        return
    with torch.inference_mode(first.is_inference()), torch.no_grad():
        whole = torch.cat([p.data for p in parameters])
        for p, part in zip(parameters, whole.split(_sizes(parameters)), strict=True):
            p.data = part


def _is_foreign(x: Tensor) -> bool:
    """True for CPU memory that is shared with other processes or not allocated by torch, as that of a mapped file."""
    return x.is_shared() or not x.untyped_storage().resizable()


def _as_one(tensors: Sequence[Tensor]) -> Tensor | None:
    """`joint`, or the tensor itself, of any layout, where there is only one."""
    return tensors[0] if len(tensors) == 1 else joint(tensors)


def _sizes(weights: Sequence[Tensor]) -> list[int]:
    return [w.shape[0] for w in weights]


def matmul(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], out: Tensor | None = None) -> Tensor:
    """Linear layers of rows x [T, K], side by side: [T, sum N_i], into `out` where given; without autograd."""
    whole = as_one_layer(weights, biases)
    if whole is not None:
        return (gemv if kernel_of(x, whole[:1], whole[1:]) == "gemv" else _by_torch)(x, *whole, out)
    out = x.new_empty(x.shape[0], sum(_sizes(weights))) if out is None else out
    return _one_by_one(x, weights, biases, out)


def _one_by_one(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], out: Tensor) -> Tensor:
    run = gemv if kernel_of(x, weights, biases) == "gemv" else _by_torch
    for w, b, columns in zip(weights, biases, out.split_with_sizes(_sizes(weights), 1), strict=True):
        run(x, w, b, columns)
    return out


def as_one_layer(weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> tuple[Tensor, Tensor | None] | None:
    """(weight, bias) of one linear layer equal to all of these; None where the weights are not joint."""
    weight = _as_one(weights)
    if weight is None or len(weights) == 1:
        return None if weight is None else (weight, biases[0])
    if all(b is None for b in biases):
        return weight, None
    if any(b is None for b in biases):
        return None
    bias = joint(biases)  # type: ignore[arg-type]
    return weight, torch.cat(biases) if bias is None else bias  # type: ignore[arg-type]


def linear_or_gemv(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """F.linear(x, weight, bias), by `gemv` where it can run."""
    return gemv(x, weight, bias) if kernel_of(x, (weight,), (bias,)) == "gemv" else F.linear(x, weight, bias)


def _by_torch(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor | None = None) -> Tensor:
    if bias is None:
        return torch.mm(x, weight.t(), out=out)
    return torch.addmm(bias, x, weight.t(), out=out)


def joint_matmul(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> Tensor:
    """`matmul` for x [..., K]: [..., sum N_i], contiguous."""
    if torch.compiler.is_compiling():
        return cat_linear(x, weights, biases)
    whole = as_one_layer(weights, biases)
    if whole is not None:
        return linear_or_gemv(x, *whole)
    y = x.new_empty((*x.shape[:-1], sum(_sizes(weights))))
    _one_by_one(_rows(x), weights, biases, _rows(y))
    return y


def _rows(x: Tensor) -> Tensor:
    return x.flatten(0, -2) if x.dim() > 1 else x[None]


def cat_linear(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> Tensor:
    found = [F.linear(x, w, b) for w, b in zip(weights, biases, strict=True)]
    return found[0] if len(found) == 1 else torch.cat(found, -1)


def input_gradient(dy: Tensor, weights: Sequence[Tensor], out: Tensor | None = None) -> Tensor:
    """dx [T, K] from dy [T, sum N_i], into `out` where given."""
    whole = _as_one(weights)
    if whole is not None:
        return torch.mm(dy, whole, out=out)
    parts = dy.split(_sizes(weights), 1)
    dx = torch.mm(parts[0], weights[0], out=out)
    for part, weight in zip(parts[1:], weights[1:], strict=True):
        dx = torch.addmm(dx, part, weight, out=None if torch.compiler.is_compiling() and out is None else dx)
    return dx


def weight_gradients(weights: Sequence[Tensor], needs: Sequence[bool], dy: Tensor, x: Tensor) -> list[Tensor | None]:
    """`weight_gradient` of each weight [N_i, K] that needs one, from dy [T, sum N_i] and x [T, K].

    One matmul if all need one: the gradients are then views of one buffer, also as the .grad of weights whose gradients
    are added in place. One matmul each if every .grad exists and they are not joint.
    """
    sizes = _sizes(weights)
    if len(weights) > 1 and all(needs):
        leaves = [target(w) for w in weights]
        if all(leaf is None for leaf in leaves):
            return [g.to(w.dtype) for g, w in zip((dy.t() @ x).split(sizes), weights, strict=True)]
        if _add_to_all(leaves, dy, x):
            return [None] * len(weights)
    parts = [dy] if len(weights) == 1 else dy.split(sizes, 1)
    each = zip(weights, needs, parts, strict=True)
    return [weight_gradient(weight, part, x) if need else None for weight, need, part in each]


def _add_to_all(leaves: Sequence[Tensor | None], dy: Tensor, x: Tensor) -> bool:
    """Adds the gradients to the .grad of all leaves, or sets them, by one matmul; False if that is not possible."""
    found = [leaf for leaf in leaves if leaf is not None and leaf.dtype == dy.dtype == x.dtype]
    grads = [leaf.grad for leaf in found if leaf.grad is not None]
    if len({id(leaf) for leaf in found}) < len(leaves) or len(grads) not in (0, len(leaves)):
        return False
    if grads:
        whole = joint(grads)
        if whole is not None:
            accumulate(whole, dy, x, first=False)
        return whole is not None
    whole = dy.new_empty(dy.shape[1], x.shape[1])
    accumulate(whole, dy, x, first=True)
    for leaf, part in zip(found, whole.split(_sizes(found)), strict=True):
        leaf.grad = part
    return True


def bias_gradients(total: Tensor, weights: Sequence[Tensor], needs: Sequence[bool]) -> list[Tensor | None]:
    """The gradient of each bias that needs one, from the sum [sum N_i] of dy over all tokens."""
    return [part if need else None for part, need in zip(total.split(_sizes(weights)), needs, strict=True)]


class _Linear(torch.autograd.Function):
    """x: [..., K], of two dims or more; handle: x's, or None; parameters: `count` weights [N_i, K], then a bias [N_i]
    or None for each -> [..., sum N_i]."""

    @staticmethod
    def forward(ctx, x: Tensor, handle: Handle | None, count: int, *parameters):
        weights, biases = parameters[:count], parameters[count:]
        ctx.function, made_of = (None, (x,)) if handle is None else handle
        ctx.count = count
        # The weights themselves, not their joint view: FSDP may move them before the backward.
        ctx.save_for_backward(*weights, *(made_of if any(ctx.needs_input_grad[3 : 3 + count]) else ()))
        return joint_matmul(x, weights, biases)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        count, saved = ctx.count, ctx.saved_tensors
        weights, made_of = saved[:count], saved[count:]
        need_x, _, _, *needs = ctx.needs_input_grad
        rows = dy.flatten(0, -2)
        nothing: list[Tensor | None] = [None] * count
        dx, dweights, dbiases = None, nothing, nothing
        if made_of:  # before dx, so that x and dx are not in memory together
            dweights = weight_gradients(weights, needs[:count], rows, recomputed(ctx.function, made_of).flatten(0, -2))
        if need_x:
            dx = input_gradient(rows, weights).view(*dy.shape[:-1], weights[0].shape[1])
        if any(needs[count:]):
            dbiases = bias_gradients(rows.sum(0), weights, needs[count:])
        return dx, None, None, *dweights, *dbiases


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """F.linear(x, weight, bias) that does not save an x that a norm of this package computed.

    x: [..., K]; weight: [N, K]; bias: [N] or None. Returns [..., N].
    The backward recomputes x if the weight needs a gradient and x has not changed since the norm returned it. Under
    autocast and torch.compile, and for tensor subclasses, this is F.linear.
    """
    return linears(x, [LinearOperand(weight, bias)])


def joint_linear(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None] | None = None) -> Tensor:
    """torch.cat([F.linear(x, w, b) for w, b in zip(weights, biases)], -1), written into one buffer.

    x: [..., K]; weights: [N_i, K] each; biases: [N_i] or None for each weight, or None.
    Returns [..., sum N_i], contiguous. One matmul where the weights are `joint` and all or none have a bias. x is saved
    as by `linear`, and only if a weight needs a gradient; there is no second derivative. Under autocast, torch.compile
    and transforms, and for tensor subclasses, it runs the formula itself.
    Raises InputError for no weight, or another number of biases.
    """
    biases = [None] * len(weights) if biases is None else biases
    if len(biases) != len(weights) or not weights:
        raise InputError(
            f"joint_linear: {len(weights)} weights and {len(biases)} biases; expected at least one weight, and for "
            "each weight a bias or None."
        )
    return linears(x, list(map(LinearOperand, weights, biases)))


def linears(x: Tensor, operands: Sequence[LinearOperand]) -> Tensor:
    """`joint_linear` for dense operands without adapters."""
    weights, biases = [w for w, _, _ in operands], [b for _, b, _ in operands]
    how = choose(x, operands)
    if how == "formula":
        return cat_linear(x, weights, biases)
    if how == "op":
        for operand in operands:
            check("linear", "x", x, x.shape[-1], operand)
        return _Linear.apply(x, handle_of(x), len(weights), *weights, *biases)
    return joint_matmul(x, weights, biases)
