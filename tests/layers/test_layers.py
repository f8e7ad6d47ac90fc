"""Norms, MLPs and blocks against plain compositions of torch.nn, and what must be called: hooks and adapters."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ligermodels.layers as L
from ligermodels.layers.linear import is_fusable
from tests.layers.test_attention import batch_of


class Halved(nn.Module):
    def forward(self, weight):
        return weight / 2


def add_forward_hook(linear):
    linear.register_forward_hook(lambda module, inputs, output: output / 2)


def add_forward_pre_hook(linear):
    linear.register_forward_pre_hook(lambda module, inputs: inputs[0] / 2)


def replace_forward(linear):
    forward = linear.forward
    linear.forward = lambda x: forward(x) / 2


def parametrize(linear):
    nn.utils.parametrize.register_parametrization(linear, "weight", Halved())


def replace_class(linear):
    linear.__class__ = type("Sharded", (type(linear),), {"forward": lambda self, x: F.linear(x, self.weight) / 2})


WRAPPINGS = [add_forward_hook, add_forward_pre_hook, replace_forward, parametrize, replace_class]


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("name", ["gate_proj", "down_proj"])
@pytest.mark.parametrize("wrap", WRAPPINGS)
def test_whatever_halves_a_projection_halves_what_it_gives(wrap, name, recompute):
    layer, x = L.GatedMLP(6, 10), torch.randn(2, 3, 6)
    layer.recompute, plain = recompute, copy.deepcopy(layer)
    with torch.no_grad():
        getattr(plain, name).weight /= 2
    assert is_fusable(getattr(layer, name))
    wrap(getattr(layer, name))
    assert not is_fusable(getattr(layer, name))
    torch.testing.assert_close(layer(x), plain(x))


class Block(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.input_layernorm = L.RMSNorm(16)
        self.attn = L.Attention(16, num_heads=4, num_kv_heads=2, head_dim=8, **options)
        self.mlp_norm = L.RMSNorm(16)
        self.mlp = L.GatedMLP(16, 24)

    def forward(self, x, residual, batch):
        x, residual = self.input_layernorm(x, residual)
        x = self.attn(x, batch)
        x, residual = self.mlp_norm(x, residual)
        return self.mlp(x), residual


def test_autocast_computes_as_torch_would():
    """fp32 weights and stream, bf16 matmuls: what a trainer's bf16=True asks for."""
    block, x, residual = Block(), torch.randn(2, 6, 16), torch.randn(2, 6, 16)
    batch = batch_of(6)
    reference = copy.deepcopy(block)
    reference.mlp.down_proj.register_forward_hook(lambda *_: None)  # unfused: torch's own linear
    with torch.autocast("cpu", torch.bfloat16):
        (y, stream), (expected, expected_stream) = block(x, residual, batch), reference(x, residual, batch)
    assert y.dtype == expected.dtype == torch.bfloat16 and stream.dtype == torch.float32
    torch.testing.assert_close((y, stream), (expected, expected_stream))
    y.float().sum().backward()
    expected.float().sum().backward()
    for (name, ours), theirs in zip(block.named_parameters(), reference.parameters(), strict=True):
        assert ours.grad.dtype == torch.float32, name
        # bf16 products of the two routes differ in their rounding only.
        torch.testing.assert_close(
            ours.grad, theirs.grad, rtol=2e-2, atol=2e-2, msg=lambda text, n=name: f"{n}: {text}"
        )
