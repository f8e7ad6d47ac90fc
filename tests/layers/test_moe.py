"""The mixture of experts: its load balancing loss, jitter, and which modules are called."""

import copy

import pytest
import torch
from torch import nn
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

import ligermodels.layers as L

HIDDEN, INNER, EXPERTS, TOP_K = 16, 24, 5, 2


@pytest.fixture
def moe():
    module = L.MoE(HIDDEN, INNER, num_experts=EXPERTS, top_k=TOP_K)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.5)
    return module


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_load_balancing_loss(masked, dtype):
    logits = [torch.randn(20, EXPERTS).add(torch.arange(EXPERTS) / 2).to(dtype).requires_grad_() for _ in range(3)]
    mask = (torch.rand(4, 5) < 0.6).long() if masked else None
    actual = L.load_balancing_loss(logits, top_k=TOP_K, attention_mask=mask)
    expected = load_balancing_loss_func(tuple(logits), EXPERTS, TOP_K, mask)
    torch.testing.assert_close(actual, expected)
    for a, b in zip(torch.autograd.grad(actual, logits), torch.autograd.grad(expected, logits), strict=True):
        torch.testing.assert_close(a, b)
        assert a.abs().sum() > 0
    if masked:
        assert not torch.equal(actual, L.load_balancing_loss(logits, top_k=TOP_K))


def test_jitter(moe):
    """In training alone; the router and the experts see the same jittered x, and x itself stays as it was."""
    noisy = copy.deepcopy(moe)
    noisy.jitter_noise = 0.3
    x = torch.randn(2, 6, HIDDEN)
    before = x.clone()
    seen = []
    for module in (noisy.gate, noisy.experts):
        module.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    y, logits = noisy(x)
    assert torch.equal(x, before) and torch.equal(seen[0], seen[1])
    factor = seen[0].view_as(x) / x
    assert 0.69 < factor.min() < 0.8 and 1.2 < factor.max() < 1.31
    expected, expected_logits = moe(seen[0].view_as(x))
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(logits, expected_logits)
    assert not torch.allclose(y, moe(x)[0])
    assert torch.equal(noisy.eval()(x)[0], moe(x)[0])


def test_modules_are_called(moe):
    """Adapters, sharding and probes hang on modules: each that holds parameters is called, once a forward."""
    calls = []
    for name, module in moe.named_modules():
        module.register_forward_hook(lambda module, args, output, name=name: calls.append(name))
    moe(torch.randn(1, 3, HIDDEN))
    assert calls == ["gate", "experts", ""]
