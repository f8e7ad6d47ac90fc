"""Experts of 1 to 64 tokens, without gradients: each kernel with tiles smaller and larger than the weights."""

import pytest
import torch

import ligermodels.kernels.experts._decode as decode_file
from ligermodels.kernels._math import ClampedSwiGLU, activation_name
from ligermodels.kernels.experts._decode import Tile, decode_experts, decode_takes
from ligermodels.kernels.experts.experts import moe_experts_reference
from tests.kernels.on_gpu import never_waits
from tests.kernels.oracle import assert_as_exact

CLAMPED = ClampedSwiGLU(1.702, 0.9)
SMALL = (Tile(1, 8, 16, 4), Tile(1, 16, 16, 4)), (Tile(16, 16, 16, 4, 3), Tile(16, 16, 16, 4, 3))
LARGE = (Tile(1, 32, 64, 4), Tile(1, 64, 64, 4)), (Tile(32, 32, 64, 4, 3), Tile(32, 64, 64, 4, 3))
RELEASED = {
    "Qwen3-30B-A3B": (2048, 768, 128, 8), "Qwen3.5-35B-A3B": (2048, 512, 256, 8), "Qwen3-Next": (2048, 512, 512, 10),
    "gpt-oss-20b": (2880, 2880, 32, 4), "Mixtral-8x7B": (4096, 14336, 8, 2),
}  # fmt: skip
"""H, I, E and K."""


def inputs_of(tokens, hidden=40, inner=24, count=5, top_k=2, *, biased=False, dtype=torch.float32, device="cpu"):
    """x, whose rows have gaps that hold NaN; weights; experts, each token's K in any order; the projections, and their
    biases if `biased`."""
    x = torch.full((tokens, hidden + 8), torch.nan, device=device, dtype=dtype)[:, :hidden].normal_()
    weights = torch.rand(tokens, top_k, device=device)
    experts = torch.rand(tokens, count, device=device).argsort(1)[:, :top_k].int().contiguous()
    gate_up = torch.randn(count, 2 * inner, hidden, device=device, dtype=dtype) * hidden**-0.5
    down = torch.randn(count, hidden, inner, device=device, dtype=dtype) * inner**-0.5
    biases = [torch.randn(count, n, device=device, dtype=dtype) for n in (2 * inner, hidden) if biased]
    return x, weights, experts, gate_up, down, *biases


def assert_exact(tensors, activation="silu"):
    """`decode_experts` is as exact as eager."""
    x, weights, experts, *projections = tensors
    assert decode_takes(*tensors)
    name = activation_name("test", activation, gated=True)
    eager = moe_experts_reference(*tensors, activation=activation)
    weights, chosen = weights.double(), experts.unique()  # in fp64 the chosen experts alone fit any GPU
    places = torch.searchsorted(chosen, experts)
    exact = moe_experts_reference(
        x.double(), weights, places, *(None if p is None else p[chosen.long()].double() for p in projections),
        activation=activation,
    )  # fmt: skip
    actual = decode_experts(*tensors, activation=name)
    assert actual.dtype == x.dtype
    assert_as_exact(actual, eager, exact, terms=x.shape[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)])
@pytest.mark.parametrize("tiles", [*SMALL, *LARGE], ids=str)
@pytest.mark.parametrize(
    "tokens, shape, activation",
    [(1, (40, 24), "silu"), (7, (33, 21, 5, 3), "gelu_tanh"), (24, (16, 16, 1, 1), "silu"), (9, (90, 90), CLAMPED)],
    ids=str,
)
def test_as_exact_as_eager(device, poison, monkeypatch, tiles, tokens, shape, activation, dtype):
    """The third has more tokens of one expert than a program multiplies; the last has biases."""
    monkeypatch.setattr(decode_file, "_tiles", lambda *args: tiles)
    assert_exact(inputs_of(tokens, *shape, biased=activation is CLAMPED, dtype=dtype, device=device), activation)


@pytest.mark.parametrize("of", ["gate_up", "down"])
@pytest.mark.parametrize("tiles", SMALL, ids=str)
def test_one_projection_has_a_bias(device, poison, monkeypatch, tiles, of):
    monkeypatch.setattr(decode_file, "_tiles", lambda *args: tiles)
    *tensors, first, last = inputs_of(6, biased=True, device=device)
    assert_exact((*tensors, *((first, None) if of == "gate_up" else (None, last))), CLAMPED)


@pytest.mark.parametrize("tiles", SMALL, ids=str)
def test_an_expert_that_there_is_not_makes_its_token_nan(device, poison, monkeypatch, tiles):
    monkeypatch.setattr(decode_file, "_tiles", lambda *args: tiles)
    x, weights, experts, *projections = inputs_of(6, device=device)
    expected = decode_experts(x, weights, experts, *projections, activation="silu")
    for dtype in (torch.int32, torch.int64):
        wrong = experts.to(dtype)
        wrong[1, 0], wrong[3, 1], wrong[4, 0] = -1, 5, torch.iinfo(dtype).max
        y = decode_experts(x, weights, wrong, *projections, activation="silu")
        assert y[[1, 3, 4]].isnan().all()
        torch.testing.assert_close(y[[0, 2, 5]], expected[[0, 2, 5]])


@pytest.mark.parametrize("tiles", SMALL, ids=str)
def test_a_token_may_name_an_expert_twice(device, poison, monkeypatch, tiles):
    monkeypatch.setattr(decode_file, "_tiles", lambda *args: tiles)
    x, weights, experts, *projections = inputs_of(12, device=device)
    experts[:] = 3
    assert_exact((x, weights, experts, *projections))


def test_what_is_taken(device):
    names = "x", "weights", "experts", "gate_up_proj", "down_proj", "gate_up_proj_bias", "down_proj_bias"
    tensors = dict(zip(names, inputs_of(64, biased=True, device=device), strict=True))
    assert decode_takes(**tensors) and decode_takes(**tensors | dict.fromkeys(names[5:]))
    x, _, experts, gate_up, down, _, bias = tensors.values()
    for name, other in [
        ("x", x.double()), ("x", x.half()), ("x", x.clone().requires_grad_()), ("x", x[:, :1].expand(-1, 40)),
        ("experts", experts.t().contiguous().t()), ("gate_up_proj", gate_up.half()),
        ("down_proj", down.mT.contiguous().mT), ("down_proj", down.clone().requires_grad_()),
        ("down_proj_bias", bias.half()), ("down_proj_bias", bias.t().contiguous().t()),
        ("down_proj_bias", bias.clone().requires_grad_()),
    ]:  # fmt: skip
        assert not decode_takes(**tensors | {name: other}), name
    with torch.no_grad():
        assert decode_takes(**tensors | {"down_proj": down.clone().requires_grad_()})
    for tokens in (0, 65):
        assert not decode_takes(*inputs_of(tokens, device=device))


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 2, 5, 8, 33, 64])
@pytest.mark.parametrize("name", RELEASED)
def test_released_shapes(device, name, tokens):
    """In bf16, and as a CUDA graph over other experts; gpt-oss' with biases and its unit."""
    biased = name.startswith("gpt-oss")
    tensors = inputs_of(tokens, *RELEASED[name], biased=biased, dtype=torch.bfloat16, device=device)
    x, experts, (count, top_k) = tensors[0], tensors[2], RELEASED[name][2:]
    activation = ClampedSwiGLU(1.702, 7.0) if biased else "silu"
    assert_exact(tensors, activation)
    activation = activation_name("test", activation, gated=True)
    with never_waits():
        decode_experts(*tensors, activation=activation)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = decode_experts(*tensors, activation=activation)
    for _ in range(20):
        experts.copy_(torch.rand(tokens, count, device=device).argsort(1)[:, :top_k])
        x.normal_()
        graph.replay()
        assert torch.equal(captured, decode_experts(*tensors, activation=activation))
