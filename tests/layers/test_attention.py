"""Attention and cross-attention against plain compositions: masks, windows, packing, gradients."""

import pytest
import torch
import torch.nn.functional as F

import ligermodels.layers as L
from ligermodels.errors import InputError
from ligermodels.kernels.attention import attention_reference
from ligermodels.kernels.rope import rope_qk_reference
from ligermodels.layers import attention
from ligermodels.layers.state import KeyValues


def batch_of(length, head_dim=8, start=0, **options):
    tables = L.RotaryEmbedding(head_dim)(torch.arange(start, start + length)[None])
    return L.Batch(rotary={"full": tables}, **options)


def assert_same(layer, actual, expected, *inputs):
    """Same output, same gradient of every parameter and of the inputs, none of them zero."""
    torch.testing.assert_close(actual, expected)
    weights, inputs = torch.randn_like(actual), [*inputs, *layer.parameters()]
    ours, theirs = (torch.autograd.grad(y, inputs, weights) for y in (actual, expected))
    torch.testing.assert_close(ours, theirs)
    assert all(grad.abs().sum() > 0 for grad in ours)


def plain_attention(layer, x, batch):
    """The same weights, op by op."""
    q, k, v = (p(x).unflatten(-1, (-1, layer.head_dim)) for p in (layer.q_proj, layer.k_proj, layer.v_proj))
    if layer.rope is not None:
        q, k = rope_qk_reference(q, k, *batch.rotary[layer.rope])
    options = {name: getattr(layer, name) for name in ("causal", "window", "softcap", "scale")}
    masks = {name: getattr(batch, name) for name in ("key_mask", "cu_seqlens", "padding")}
    return layer.o_proj(attention_reference(q, k, v, **options, **masks).flatten(2))


def make_attention(**options):
    return L.Attention(16, **{"num_heads": 4, "num_kv_heads": 2, "head_dim": 8, **options}).double()


def tokens(batch_size=2, length=9):
    return torch.randn(batch_size, length, 16, dtype=torch.float64, requires_grad=True)


OPTIONS = [{}, {"qkv_bias": True, "o_bias": True}, {"window": 3}, {"softcap": 2.0, "scale": 0.2}]
PADDING = torch.tensor([[False] * 5 + [True] * 4, [True, False, True] * 3])
BATCHES = {
    "alone": {},
    "masked keys": {"key_mask": torch.ones(2, 9, dtype=torch.bool).tril(4)},
    "padding": {"padding": PADDING},
    "packed": {"cu_seqlens": torch.tensor([0, 1, 6, 6, 9], dtype=torch.int32), "max_seqlen": 5},
}


@pytest.mark.parametrize("options", [*OPTIONS, {"causal": False}, {"num_kv_heads": 4, "causal": False}], ids=str)
@pytest.mark.parametrize("rotated", [8, 4, None])
@pytest.mark.parametrize("name", BATCHES)
def test_attention(options, rotated, name):
    """With every mask, whole, partial and no rotation; each mask changes what comes out."""
    layer = make_attention(**options, rope="full" if rotated else None)
    x, masks = tokens(1 if name == "packed" else 2), BATCHES[name]
    if name == "padding" and layer.causal:
        with pytest.raises(InputError, match="padding is for attention of all to all"):
            layer(x, batch_of(9, rotated or 8, **masks))
        return
    batch = batch_of(9, rotated, **masks) if rotated else L.Batch(**masks)
    actual = layer(x, batch)
    assert_same(layer, actual, plain_attention(layer, x, batch), x)
    unmasked = L.Batch(rotary=batch.rotary)
    assert torch.allclose(actual, layer(x, unmasked)) == (not masks)


def test_rotation_is_in_place_only_where_no_hook_holds_the_buffer(monkeypatch):
    rope, asked = attention.rope, []
    monkeypatch.setattr(
        attention, "rope", lambda *args, **options: asked.append(options["inplace"]) or rope(*args, **options)
    )
    layer, x, kept = make_attention(), torch.randn(1, 5, 16, dtype=torch.float64), []
    layer(x, batch_of(5))
    layer.k_proj.register_forward_hook(lambda module, inputs, output: kept.append(output))
    layer(x, batch_of(5))  # by rope_qk, which writes new memory
    packed = make_attention(projections=("qkv_proj", "o_proj"))
    packed.qkv_proj.register_forward_hook(lambda module, inputs, output: kept.append(output))
    packed(x, batch_of(5))
    assert asked == [True, False]
    assert torch.equal(kept[0], F.linear(x, layer.k_proj.weight))
    assert torch.equal(kept[1], F.linear(x, packed.qkv_proj.weight))


def test_what_does_not_go_together_is_named():
    x, cache = tokens(1), KeyValues(1, 9, 2, 8, dtype=torch.float64, device="cpu")
    with pytest.raises(InputError, match="not causal cannot be cached"):
        make_attention(causal=False, rope=None)(x, L.Batch(), cache)
    with pytest.raises(InputError, match="packed sequences cannot go into a KV cache"):
        make_attention(rope=None)(x, L.Batch(**BATCHES["packed"]), cache)
    with pytest.raises(InputError, match="has no tables 'local'"):
        make_attention(rope="local")(x, batch_of(9))


# ---- cross-attention ----


def make_cross(num_kv_heads=2, **options):
    layer = L.CrossAttention(12, num_heads=4, num_kv_heads=num_kv_heads, head_dim=6, eps=1e-2, **options).double()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(std=0.5)
    return layer


def plain_cross(layer, x, states, mask=None):
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


def random_mask(batch_size, length, num_states):
    mask = torch.rand(batch_size, length, num_states) < 0.4
    mask[..., 0] |= ~mask.any(-1)
    return mask


@pytest.mark.parametrize("num_kv_heads", [1, 4])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("length", [1, 5])
@pytest.mark.parametrize("states_size", [None, 9])
def test_cross_attention(num_kv_heads, masked, length, states_size, poison):
    layer = make_cross(num_kv_heads, states_size=states_size)
    x = torch.randn(2, length, 12, dtype=torch.float64, requires_grad=True)
    states = torch.randn(2, 7, states_size or 12, dtype=torch.float64, requires_grad=True)
    mask = random_mask(2, length, 7) if masked else None
    wrt = [x, states, *layer.parameters()]
    weight = torch.randn(2, length, 12, dtype=torch.float64)
    outputs = layer(x, L.Batch(cross=L.CrossStates(states=states, mask=mask))), plain_cross(layer, x, states, mask)
    torch.testing.assert_close(*outputs)
    ours, theirs = (torch.autograd.grad((y * weight).sum(), wrt) for y in outputs)
    torch.testing.assert_close(ours, theirs)
    assert all(grad.any() for grad in ours)
    if masked:
        assert not torch.allclose(outputs[0], plain_cross(layer, x, states))


def test_cross_states_that_do_not_fit_are_named():
    layer = make_cross()
    x, states = torch.randn(2, 3, 12, dtype=torch.float64), torch.randn(2, 7, 12, dtype=torch.float64)
    for message, given in {
        "no states of images, and none in the cache": {"states": None},
        r"\[2, 3\] tokens, \[1, 7\] states .* batch of one row": {"states": states[:1]},
    }.items():
        with pytest.raises(InputError, match=message):
            layer(x, L.Batch(cross=L.CrossStates(**given)))
