"""Recompute handles: what they recompute, to the bit, and when a tensor has none."""

import pytest
import torch

from ligermodels.kernels._recompute import attach_to_view, handle_of, recomputed
from ligermodels.kernels.layer_norm import add_layer_norm, layer_norm
from ligermodels.kernels.rms_norm import add_rms_norm, rms_norm

NORMS = {
    "rms": (rms_norm, add_rms_norm, dict(cast_before_weight=True)),
    "rms, gemma": (rms_norm, add_rms_norm, dict(cast_before_weight=False, offset=1.0, eps=0.5)),
    "layer": (layer_norm, add_layer_norm, dict(eps=0.5)),
}


def parameters(name, width, device, dtype, kind="all"):
    weight, bias = torch.randn(2, width, dtype=dtype, device=device)
    return {"none": (), "weight": (weight,), "all": (weight,) if name.startswith("rms") else (weight, bias)}[kind]


def assert_recomputed(y, rtol=0.0, atol=0.0):
    recipe = handle_of(y)
    with torch.no_grad():
        again = recomputed(recipe.function, recipe.tensors)
    torch.testing.assert_close(again, y.detach(), rtol=rtol, atol=atol)


half, single, double = torch.float16, torch.float32, torch.float64
MIXTURES = [
    ("all", half, half, half), ("all", half, single, single), ("all", single, half, single),
    ("weight", half, single, half), ("none", single, single, single), ("all", double, double, double),
]  # fmt: skip
"""Which parameters, and the dtypes of x, of the residual and of the parameters."""


@pytest.mark.parametrize("name", NORMS)
def test_a_norm_is_recomputed_to_the_bit(device, poison, name):
    """After an add and alone, of each mixture of dtypes, and rows of several tiles."""
    norm, add_norm, options = NORMS[name]
    for kind, dtype, other, of_weight in MIXTURES:
        x = torch.randn(3, 2, 60, device=device).to(dtype).requires_grad_()
        residual, rest = torch.randn_like(x).to(other), parameters(name, 60, device, of_weight, kind)
        y, total = add_norm(x, residual, *rest, **options)
        assert handle_of(y).tensors[0] is total
        # Compiled for loads of two widths, a kernel may add up a row in another order: the statistics move by some ulp.
        assert_recomputed(y, **dict(rtol=1e-6, atol=1e-6) if device == "cuda" and dtype != other else {})
        assert_recomputed(norm(x.transpose(0, 1), *rest, **options))


@pytest.mark.parametrize(
    "change", [lambda y: y.mul_(2), lambda y: y.view(-1).zero_(), lambda y: y.detach().add_(1), torch.relu_]
)
def test_a_change_in_place_ends_it(device, change):
    y = rms_norm(torch.randn(4, 8, device=device, requires_grad=True))
    view = attach_to_view(y, y.view(2, 2, 8))
    with torch.no_grad():
        change(y)
    assert handle_of(y) is None and handle_of(view) is None
