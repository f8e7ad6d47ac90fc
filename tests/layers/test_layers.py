"""Norms, MLPs and blocks against plain compositions of torch.nn, and what must be called: hooks and adapters."""

import copy
import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ligermodels.layers as L
from ligermodels.layers.linear import is_fusable
from tests.layers.test_attention import assert_same, batch_of


@pytest.mark.parametrize("offset, cast_before_weight", [(0.0, True), (1.0, False)])
@pytest.mark.parametrize("affine", [True, False])
def test_rms_norm_adds_and_normalises(offset, cast_before_weight, affine):
    layer = L.RMSNorm(6, eps=1e-3, offset=offset, cast_before_weight=cast_before_weight, elementwise_affine=affine)
    x, residual = torch.randn(2, 3, 6), torch.randn(2, 3, 6)
    if affine:
        assert (layer.weight + offset == 1).all()
        nn.init.normal_(layer.weight)
    weight = layer.weight + offset if affine else 1.0

    def plain(x):
        return x / (x.square().mean(-1, keepdim=True) + 1e-3).sqrt() * weight

    first, stream = layer(x)
    assert stream is x
    torch.testing.assert_close(first, plain(x))
    second, stream = layer(x, residual)
    torch.testing.assert_close(stream, x + residual)
    torch.testing.assert_close(second, plain(x + residual))
    assert len(list(layer.parameters())) == affine


@pytest.mark.parametrize("options", [{}, {"eps": 0.1}, {"bias": False}, {"elementwise_affine": False}], ids=str)
def test_layer_norm_is_that_of_torch(options):
    ours, theirs = L.LayerNorm(6, **options).double(), nn.LayerNorm(6, **options).double()
    assert {k: v.tolist() for k, v in ours.state_dict().items()} == {
        k: v.tolist() for k, v in theirs.state_dict().items()
    }
    for parameter in ours.parameters():
        nn.init.normal_(parameter)
    theirs.load_state_dict(ours.state_dict())
    x, residual = torch.randn(2, 4, 3, 6, dtype=torch.float64)
    y, stream = ours(x)
    assert stream is x
    torch.testing.assert_close(y, theirs(x))
    y, stream = ours(x, residual)
    torch.testing.assert_close(stream, x + residual)
    torch.testing.assert_close(y, theirs(x + residual))


ACTIVATIONS = {
    "silu": F.silu,
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "gelu": F.gelu,
    "gelu_tanh": functools.partial(F.gelu, approximate="tanh"),
}


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
@pytest.mark.parametrize("bias", [False, True])
def test_gated_mlp(activation, bias):
    layer = L.GatedMLP(6, 10, activation=activation, bias=bias).double()
    x = torch.randn(2, 3, 6, dtype=torch.float64, requires_grad=True)

    def plain():
        return layer.down_proj(ACTIVATIONS[activation](layer.gate_proj(x)) * layer.up_proj(x))

    for recompute in (False, True):
        layer.recompute = recompute
        assert_same(layer, layer(x), plain(), x)
    layer.down_proj.register_forward_hook(lambda *_: None)  # not fusable any more
    assert_same(layer, layer(x), plain(), x)


@pytest.mark.parametrize("activation", ["quick_gelu", "gelu", "gelu_tanh"])
@pytest.mark.parametrize("bias, out_features", [(True, None), (False, 3)])
def test_mlp(activation, bias, out_features):
    layer = L.MLP(6, 10, activation=activation, bias=bias, out_features=out_features).double()
    x = torch.randn(2, 3, 6, dtype=torch.float64, requires_grad=True)

    def plain():
        return layer.fc2(ACTIVATIONS[activation](layer.fc1(x)))

    assert plain().shape[-1] == (out_features or 6)
    for recompute in (False, True):
        layer.recompute = recompute
        assert_same(layer, layer(x), plain(), x)
    layer.fc2.register_forward_hook(lambda module, inputs, output: 2 * output)  # not fusable any more
    assert_same(layer, layer(x), plain(), x)


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


@pytest.mark.parametrize("wrap", [None, add_forward_hook])
def test_a_block_compiles_to_one_graph(wrap):
    torch._dynamo.reset()
    block, x, residual = Block(), torch.randn(2, 6, 16), torch.randn(2, 6, 16)
    if wrap is not None:
        wrap(block.mlp.down_proj)
    eager, compiled = block, torch.compile(block, fullgraph=True, backend="aot_eager")
    batch = batch_of(6)
    assert_same(block, sum(compiled(x, residual, batch)), sum(eager(x, residual, batch)))


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


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {"window": 20}], ids=str)
def test_a_block_on_a_gpu(options):
    """bf16 forward and backward on the fused kernels, against fp64 references, without a synchronisation."""
    block = Block(**options)
    x, residual, batch = torch.randn(2, 70, 16), torch.randn(2, 70, 16), batch_of(70)
    exact_block = copy.deepcopy(block).to(torch.bfloat16).double()
    exact = sum(exact_block(x.bfloat16().double(), residual.bfloat16().double(), batch))
    block.to("cuda", torch.bfloat16)
    there = L.Batch(cos=batch.cos.cuda(), sin=batch.sin.cuda())
    inputs = (x.to("cuda", torch.bfloat16), residual.to("cuda", torch.bfloat16), there)
    weights = torch.randn(x.shape).bfloat16()
    weights_there = weights.cuda()
    (sum(block(*inputs)) * weights_there).sum().backward()
    block.zero_grad()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        out = sum(block(*inputs))
        (out * weights_there).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    (exact * weights.double()).sum().backward()
    # A dozen bf16 roundings in a row, each half of 2 ** -8.
    torch.testing.assert_close(out.double().cpu(), exact, rtol=5e-2, atol=5e-2)
    for ours, theirs in zip(block.parameters(), exact_block.parameters(), strict=True):
        error = (ours.grad.double().cpu() - theirs.grad).norm() / theirs.grad.norm()
        assert error < 2e-2
