"""MLPs and activations: what they save and recompute, in how many matmuls, and in which memory."""

import functools

import pytest
import torch

from ligermodels.kernels import gated_mlp, mlp
from ligermodels.kernels.linear.gated_mlp import _traced
from ligermodels.kernels.linear.joint import make_joint
from ligermodels.kernels.linear.operand import LinearOperand
from ligermodels.kernels.norm.rms_norm import add_rms_norm
from tests.kernels.interpreter import CHUNK
from tests.kernels.seen import Seen, saved_by

HIDDEN, INNER, OUT = 6, 20, 5
MODES = {"saved": {}, "recomputed": {"recompute": True}, "tiles": {"recompute": True, "workspace_bytes": 1}}
"""tiles: the smallest chunks, of CHUNK tokens."""
each_mlp = pytest.mark.parametrize("gated", [True, False], ids=["gated", "plain"])


def op_of(gated, mode="saved"):
    op, activation = (gated_mlp, "silu") if gated else (mlp, "quick_gelu")
    return functools.partial(op, activation=activation, **MODES[mode])


def make(device, gated, *lead, dtype=torch.float32, hidden=HIDDEN, inner=INNER, out=OUT):
    """x, both weights and both biases, and dy; values as a trained model's, so that nothing overflows in fp16."""
    width = (1 + gated) * inner
    inputs = [
        torch.randn(*lead, hidden), torch.randn(width, hidden) * hidden**-0.5, torch.randn(out, inner) * inner**-0.5,
        torch.randn(width), torch.randn(out),
    ]  # fmt: skip
    return [t.to(device, dtype).requires_grad_() for t in inputs], torch.randn(*lead, out).to(device, dtype)


def run(op, inputs, dy):
    y = op(*inputs)
    return [y.detach(), *torch.autograd.grad(y, [t for t in inputs if t.requires_grad], dy)]


def two_weights(device, *lead, **sizes):
    """x, gate, up, down and their biases, where gate and up are slices of one tensor; and dy."""
    (x, w1, w2, b1, b2), dy = make(device, True, *lead, **sizes)
    parameters = [torch.nn.Parameter(t.detach().clone()) for t in (*w1.chunk(2), w2, *b1.chunk(2), b2)]
    make_joint(parameters[:2])
    make_joint(parameters[3:5])
    return [x, *parameters], dy


def of_two(x, gate, up, down, gate_bias, up_bias, down_bias, **options):
    return gated_mlp(x, (gate, up), down, (gate_bias, up_bias), down_bias, **options)


# Saved, and recomputed.


@pytest.mark.parametrize("trained", [(0, 1, 2, 3, 4), (2,), (4,), (0, 3)], ids=str)
@pytest.mark.parametrize("kind", ["gated", "two weights", "plain"])
def test_what_torch_compile_traces_is_the_op(device, poison, kind, trained):
    """By the same kernels, saving gate and up, but never h."""
    inputs, dy = make(device, kind != "plain", 3, 17, dtype=torch.float64)
    inputs = [t.detach().requires_grad_(i in trained) for i, t in enumerate(inputs)]
    x, w1, w2, b1, b2 = inputs
    parts = 2 if kind == "two weights" else 1
    first = list(map(LinearOperand, w1.chunk(parts), b1.chunk(parts)))
    op = op_of(kind != "plain")
    options = dict(gated=kind != "plain", activation=op.keywords["activation"])
    y, saved = saved_by(lambda: _traced(x, first, LinearOperand(w2, b2), **options), *inputs)
    assert sum(t.shape[-1] for t in saved if t.shape[:-1] == (3, 17)) == (1 + (kind != "plain")) * INNER
    actual = [y, *torch.autograd.grad(y, [inputs[i] for i in trained], dy)]
    for a, b in zip(actual, run(op, inputs, dy), strict=True):
        torch.testing.assert_close(a, b)


@each_mlp
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_what_is_saved(device, gated, normed, mode):
    """x, or what the norm saves anyway; and z, unless it is recomputed. Never h. After a norm: the same bits."""
    (x, *parameters), dy = make(device, gated, 3, 47)
    norm, residual = torch.randn(HIDDEN, device=device).requires_grad_(), torch.randn(3, 47, HIDDEN, device=device)
    op = op_of(gated, mode)
    y, total = add_rms_norm(x, residual, norm) if normed else (x, x)
    out, saved = saved_by(lambda: op(y, *parameters), *parameters, norm)
    activations = [t for t in saved if t.dim() > 1]
    assert sum(t.data_ptr() == total.data_ptr() for t in activations) == 1
    others = [tuple(t.shape) for t in activations if t.data_ptr() != total.data_ptr()]
    assert others == ([(3, 47, (1 + gated) * INNER)] if mode == "saved" else [])
    copied = op(y.view_as(y), *parameters)
    leaves = [x, *parameters]
    for a, b in zip(*(torch.autograd.grad(t, leaves, dy, retain_graph=True) for t in (out, copied)), strict=True):
        assert torch.equal(a, b)


TRAINED = {
    (0,): (2, ["z"]), (1,): (2, ["x", "z"]), (2,): (1, ["z"]), (3,): (1, ["z"]), (4,): (0, []),
    (0, 1, 2, 3, 4): (4, ["x", "z"]),
}  # fmt: skip
"""By which of x, w1, w2, b1, b2 are trained: the matmuls of the backward, and what is saved beside parameters."""


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("trained", TRAINED, ids=str)
def test_what_is_frozen_costs_nothing(device, poison, mode, trained):
    inputs, dy = make(device, True, CHUNK + 2)
    whole = run(op_of(True, mode), inputs, dy)
    inputs = [t.detach().requires_grad_(i in trained) for i, t in enumerate(inputs)]
    y, saved = saved_by(lambda: op_of(True, mode)(*inputs))
    with Seen() as backward:
        grads = torch.autograd.grad(y, [inputs[i] for i in trained], dy)
    for i, grad in zip(trained, grads, strict=True):  # of 130 terms of fp32 below 32, in another order
        torch.testing.assert_close(grad, whole[1 + i], rtol=1e-5, atol=5e-5)
    matmuls, kept = TRAINED[trained]
    if mode != "saved":
        matmuls, kept = (matmuls + 1 if kept else 0), (["x"] if kept else [])
    assert len(backward.matmuls) == matmuls * (2 if mode == "tiles" else 1)
    kinds = {(CHUNK + 2, HIDDEN): "x", (CHUNK + 2, 2 * INNER): "z"}
    assert sorted(kinds[tuple(t.shape)] for t in saved if tuple(t.shape) in kinds) == kept


def test_tiles_bound_what_exists_at_once(device):
    """With recompute no tensor has z or h of all tokens; one tile where they fit twice."""
    inputs, dy = make(device, True, 6 * CHUNK, inner=100)
    workspace = 2 * CHUNK * 2 * 100 * 4
    with Seen() as seen:
        torch.autograd.grad(gated_mlp(*inputs, recompute=True, workspace_bytes=workspace), inputs, dy)
    assert seen.largest == workspace and len(seen.matmuls) == 3 * (2 + 5)
    inputs, _ = make(device, True, 2 * CHUNK + 4)
    fits = (CHUNK + 2) * 160  # a row of z takes 160 bytes
    for workspace in (1, fits - 1, fits, 10**9):
        with Seen() as seen, torch.no_grad():
            gated_mlp(*inputs, recompute=True, workspace_bytes=workspace)
        assert len(seen.matmuls) == 2 * (3 if workspace < fits else 1)
