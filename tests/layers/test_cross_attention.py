"""Cross-attention against a plain composition with the scores in memory."""

import pytest
import torch
import torch.nn.functional as F

import ligermodels.layers as L
from ligermodels.errors import InputError
from ligermodels.layers.cache import CrossCache


def make(num_kv_heads=2, **options):
    layer = L.CrossAttention(12, num_heads=4, num_kv_heads=num_kv_heads, head_dim=6, eps=1e-2, **options).double()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(std=0.5)
    return layer


def plain(layer, x, states, mask=None):
    """One head, one token at a time, from the definition."""
    groups, size = layer.num_heads // layer.num_kv_heads, layer.head_dim
    keys, values = layer.k_proj.weight, layer.v_proj.weight

    def normed(x, norm):
        return x / (x.square().mean(-1, keepdim=True) + norm.eps).sqrt() * norm.weight

    rows = []
    for b in range(len(x)):
        for s in range(x.shape[1]):
            seen = states[b] if mask is None else states[b, mask[b, s]]
            heads = []
            for head in range(layer.num_heads):
                q = layer.q_proj.weight[head * size : (head + 1) * size] @ x[b, s]
                part = slice(head // groups * size, (head // groups + 1) * size)
                k, v = seen @ keys[part].T, seen @ values[part].T
                scores = normed(k, layer.k_norm) @ normed(q, layer.q_norm) * size**-0.5
                heads.append(scores.softmax(0) @ v)
            rows.append(F.linear(torch.cat(heads), layer.o_proj.weight))
    return torch.stack(rows).view(*x.shape[:2], -1)


def masks(batch_size, length, num_states):
    mask = torch.rand(batch_size, length, num_states) < 0.4
    mask[..., 0] |= ~mask.any(-1)
    return mask


@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("length", [1, 5])
@pytest.mark.parametrize("states_size", [None, 9])
def test_output_and_every_gradient(num_kv_heads, masked, length, states_size, poison):
    layer = make(num_kv_heads, states_size=states_size)
    x = torch.randn(2, length, 12, dtype=torch.float64, requires_grad=True)
    states = torch.randn(2, 7, states_size or 12, dtype=torch.float64, requires_grad=True)
    mask = masks(2, length, 7) if masked else None
    wrt = [x, states, *layer.parameters()]
    weight = torch.randn(2, length, 12, dtype=torch.float64)
    outputs = layer(x, L.Batch(cross=L.CrossStates(states=states, mask=mask))), plain(layer, x, states, mask)
    torch.testing.assert_close(*outputs)
    ours, theirs = (torch.autograd.grad((y * weight).sum(), wrt) for y in outputs)
    torch.testing.assert_close(ours, theirs)
    assert all(grad.any() for grad in ours)
    if masked:
        assert not torch.allclose(outputs[0], plain(layer, x, states))


def test_cached_states_are_projected_once_and_new_ones_come_behind():
    layer, cache = make(), CrossCache()
    x = torch.randn(2, 3, 12, dtype=torch.float64)
    states = torch.randn(2, 7, 12, dtype=torch.float64)
    mask = masks(2, 3, 7)
    calls = []
    layer.k_proj.register_forward_hook(lambda *call: calls.append(call[1][0].shape[1]))
    first = layer(x, L.Batch(cross=L.CrossStates(states=states[:, :4], mask=mask[..., :4] | True)), cache)
    torch.testing.assert_close(first, plain(layer, x, states[:, :4]))
    for given in (None, mask[..., :4] | ~mask[..., :4].any(-1, keepdim=True)):
        again = layer(x, L.Batch(cross=L.CrossStates(states=None, mask=given)), cache)
        torch.testing.assert_close(again, plain(layer, x, states[:, :4], given))
    both = layer(x, L.Batch(cross=L.CrossStates(states=states[:, 4:], mask=mask)), cache)
    torch.testing.assert_close(both, plain(layer, x, states, mask))
    one = layer(x[:, :1], L.Batch(cross=L.CrossStates(states=None, mask=mask[:, :1])), cache)
    torch.testing.assert_close(one, plain(layer, x[:, :1], states, mask[:, :1]))
    assert calls == [4, 3]


def test_hooks_and_adapters_on_its_projections_are_not_passed_by():
    layer = make()
    x, states = torch.randn(1, 2, 12, dtype=torch.float64), torch.randn(1, 7, 12, dtype=torch.float64)
    batch = L.Batch(cross=L.CrossStates(states=states))
    before = layer(x, batch)
    for name in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm"):
        module = getattr(layer, name)
        seen = []
        handle = module.register_forward_hook(lambda module, inputs, output, seen=seen: seen.append(1))
        layer(x, batch)
        handle.remove()
        assert seen == [1], name
    torch.testing.assert_close(layer(x, batch), before)


def test_what_does_not_fit_is_named():
    layer = make()
    x, states = torch.randn(2, 3, 12, dtype=torch.float64), torch.randn(2, 7, 12, dtype=torch.float64)
    with pytest.raises(InputError, match="neither states of images nor a cache that holds some"):
        layer(x, L.Batch(cross=L.CrossStates(states=None)))
    with pytest.raises(InputError, match="neither states"):
        layer(x, L.Batch(cross=L.CrossStates(states=None)), CrossCache())
    with pytest.raises(InputError, match=r"\[2, 3\] tokens, \[1, 7\] states .* batch of one row"):
        layer(x, L.Batch(cross=L.CrossStates(states=states[:1])))
    for shape in ((2, 3, 6), (2, 2, 7), (1, 3, 7)):
        with pytest.raises(InputError, match="do not fit"):
            layer(x, L.Batch(cross=L.CrossStates(states=states, mask=torch.ones(shape, dtype=torch.bool))))
    with pytest.raises(InputError, match="num_heads=4 must be a multiple of num_kv_heads=3"):
        make(3)
