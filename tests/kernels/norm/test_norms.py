"""RMSNorm and LayerNorm: mixed dtypes, and what a backward recomputes of them."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ligermodels.kernels import (
    add_layer_norm,
    add_layer_norm_reference,
    add_rms_norm,
    add_rms_norm_reference,
    gated_norm,
    glu,
    layer_norm,
    rms_norm,
)
from ligermodels.kernels._recompute import handle_of, recomputed
from ligermodels.kernels.norm import _norm

ADDS = {"rms": (add_rms_norm, add_rms_norm_reference, 1), "layer": (add_layer_norm, add_layer_norm_reference, 2)}
each_norm = pytest.mark.parametrize("name", ADDS)


def run(op, inputs, grads):
    leaves = [t.detach().requires_grad_() for t in inputs]
    outputs = op(*leaves)
    return [*(t.detach() for t in outputs), *torch.autograd.grad(outputs, leaves, grads)]


@each_norm
def test_mixed_dtypes(device, poison, name):
    """Autocast's mixtures: fp32 weights, and an fp32 residual stream, with half precision x."""
    op, reference, count = ADDS[name]
    x, weights = torch.randn(9, 60, device=device).half(), torch.randn(count, 60, device=device)
    residual, dy, dtotal = torch.randn(3, 9, 60, device=device)
    single = torch.float32
    for inputs, grads, expected in (
        ([x, residual, *weights], [dy, dtotal], [single, single, torch.float16, single] + [single] * count),
        ([x, x, *weights], [dy.half(), dtotal.half()], [torch.float16] * 4 + [single] * count),
    ):
        actual = run(op, inputs, grads)
        assert [t.dtype for t in actual] == expected
        exact = run(reference, [t.double() for t in inputs], [g.double() for g in grads])
        for a, b in zip(actual, exact, strict=True):
            half = a.dtype == torch.float16 or grads[0].dtype == torch.float16
            torch.testing.assert_close(a.double(), b, rtol=2e-3 if half else 1e-5, atol=4e-3 if half else 1e-5)


# Parts of heads.


class NoCopies(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func.overloadpacket is not torch.ops.aten.clone  # of contiguous() and reshape()
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ["rms_norm", "layer_norm", "gated_norm", "glu"])
def test_parts_of_heads(device, poison, name):
    """Where two strides describe the rows, as of the query in each head's [query | gate]: the same bits, uncopied."""
    ops = {
        "rms_norm": lambda x, y, w: rms_norm(x, w), "layer_norm": lambda x, y, w: layer_norm(x, w, w),
        "gated_norm": lambda x, y, w: gated_norm(x, y, w, 1e-6), "glu": lambda x, y, w: glu(x, y, activation="sigmoid"),
    }  # fmt: skip
    joint = torch.randn(3, 2, 5, 3 * 128 + 64, device=device)  # and something after the heads, as keys
    x, y, dy = joint[..., : 3 * 128].unflatten(-1, (3, 2, 64))[..., 0, :].unbind(0)
    if name == "glu":  # of which the gate alone is a part of something
        y, dy = y.contiguous(), dy.contiguous()
    found, weight = [], torch.randn(64, device=device)
    for given in ((x, y, weight, dy), [t.contiguous() for t in (x, y, weight, dy)]):
        *leaves, upstream = (t.detach().requires_grad_() for t in given)
        with NoCopies():
            out = ops[name](*leaves)
            found.append([out.detach(), *torch.autograd.grad(out, leaves, upstream.detach(), allow_unused=True)])
    for a, b in zip(*found, strict=True):
        assert a is b is None or torch.equal(a, b)


def test_each_length_of_transposed_heads_runs_the_same_kernels(device, monkeypatch):
    """Two lengths, in all but the numbers of rows and the strides that depend on them."""
    constants, launched, found = [], _norm.launch, {}

    def spy(kernel, grid, *args, **options):
        named = zip(kernel.arg_names, args, strict=True)
        found[kernel.fn.__name__] = {n: v for n, v in named if n.isupper() or n in ("eps", "offset")} | options
        launched(kernel, grid, *args, **options)

    monkeypatch.setattr(_norm, "launch", spy)
    for length in (150, 151):
        x = torch.randn(2, length, 3, 8, device=device).transpose(1, 2)
        expected = rms_norm(x.contiguous())
        found.clear()
        y = rms_norm(x.requires_grad_())
        y.backward(torch.ones_like(y))
        assert torch.equal(y, expected)
        constants.append(found.copy())
    assert constants[0] == constants[1] and len(constants[0]) == 2  # forward and backward


# What is recomputed.

NORMS = {
    "rms": (rms_norm, add_rms_norm, dict(cast_before_weight=True)),
    "rms, gemma": (rms_norm, add_rms_norm, dict(cast_before_weight=False, offset=1.0, eps=0.5)),
    "layer": (layer_norm, add_layer_norm, dict(eps=0.5)),
}


def assert_recomputed(y, rtol=0.0, atol=0.0):
    recipe = handle_of(y)
    with torch.no_grad():
        again = recomputed(recipe.function, recipe.tensors)
    torch.testing.assert_close(again, y.detach(), rtol=rtol, atol=atol)


half, single = torch.float16, torch.float32
MIXTURES = [
    (2, half, half, half), (2, half, single, single), (2, single, half, single), (1, half, single, half),
    (0, single, single, single),
]  # fmt: skip
"""How many parameters, and the dtypes of x, of the residual and of the parameters."""


@pytest.mark.parametrize("name", NORMS)
def test_a_norm_is_recomputed_to_the_bit(device, poison, name):
    """After an add and alone, of each mixture of dtypes, and rows of several tiles."""
    norm, add_norm, options = NORMS[name]
    for count, dtype, other, of_weight in MIXTURES:
        x = torch.randn(3, 2, 60, device=device).to(dtype).requires_grad_()
        residual = torch.randn_like(x).to(other)
        rest = torch.randn(min(count, 1 if name.startswith("rms") else 2), 60, device=device).to(of_weight)
        y, total = add_norm(x, residual, *rest, **options)
        assert handle_of(y).tensors[0] is total
        # Compiled for loads of two widths, a kernel may add up a row in another order: the statistics move by some ulp.
        assert_recomputed(y, **dict(rtol=1e-6, atol=1e-6) if device == "cuda" and dtype != other else {})
        assert_recomputed(norm(x.transpose(0, 1), *rest, **options))
