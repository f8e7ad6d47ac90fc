"""The layers of vision towers against torch.nn, and attention of all to all against masks written out."""

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ligermodels.layers as L
from ligermodels.errors import InputError
from ligermodels.kernels.rope import rope_qk_reference
from ligermodels.layers.cache import KVCache


def gradients(y, inputs):
    weights = torch.randn(y.shape, generator=torch.Generator().manual_seed(1), dtype=y.dtype)
    return torch.autograd.grad(y, inputs, weights)


def assert_same(layer, actual, expected, x):
    """Same output, same gradient of every parameter and of the input, none of them zero."""
    torch.testing.assert_close(actual, expected)
    inputs = [x, *layer.parameters()]
    ours, theirs = gradients(actual, inputs), gradients(expected, inputs)
    torch.testing.assert_close(ours, theirs)
    assert all(grad.abs().sum() > 0 for grad in ours)


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
    for other in (nn.LayerNorm(6, eps=1e-2), nn.RMSNorm(6, eps=1e-5)):  # negative controls
        assert not torch.allclose(L.LayerNorm(6)(x.float())[0], other(x.float()), atol=1e-4)


def test_layer_norm_of_a_stream_has_every_gradient():
    """Three layers on one stream, as a block chains them, against additions written out."""
    norms = [L.LayerNorm(6).double() for _ in range(3)]
    for parameter in (parameters := [p for norm in norms for p in norm.parameters()]):
        nn.init.normal_(parameter)
    x = torch.randn(2, 3, 6, dtype=torch.float64, requires_grad=True)
    y, residual = norms[0](x)
    for norm in norms[1:]:
        y, residual = norm(y.sin(), residual)
    plain, stream = F.layer_norm(x, (6,), norms[0].weight, norms[0].bias), x
    for norm in norms[1:]:
        stream = stream + plain.sin()
        plain = F.layer_norm(stream, (6,), norm.weight, norm.bias)
    torch.testing.assert_close(y + residual, plain + stream)
    torch.testing.assert_close(gradients(y + residual, [x, *parameters]), gradients(plain + stream, [x, *parameters]))


ACTIVATIONS = {
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "gelu": F.gelu,
    "gelu_tanh": functools.partial(F.gelu, approximate="tanh"),
}


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("bias, out_features", [(True, None), (True, 3), (False, None)])
def test_mlp(activation, bias, out_features):
    layer = L.MLP(6, 10, activation=activation, bias=bias, out_features=out_features).double()
    assert set(dict(layer.named_parameters())) == {
        f"fc{i}.{name}" for i in (1, 2) for name in ("weight", "bias")[: 1 + bias]
    }
    x = torch.randn(2, 3, 6, dtype=torch.float64, requires_grad=True)

    def plain(activation=activation):
        return layer.fc2(ACTIVATIONS[activation](layer.fc1(x)))

    assert layer(x).shape[-1] == (out_features or 6)
    assert_same(layer, layer(x), plain(), x)
    assert not any(torch.allclose(layer(x), plain(other)) for other in ACTIVATIONS if other != activation)
    layer.recompute = True
    assert_same(layer, layer(x), plain(), x)
    layer.fc2.register_forward_hook(lambda module, inputs, output: 2 * output)  # no longer plain: the unfused way
    assert_same(layer, layer(x), plain(), x)


def test_mlp_of_an_unknown_activation_is_named():
    with pytest.raises(InputError, match="activation='relu'; supported are 'silu', 'gelu_tanh'"):
        L.MLP(6, 10, activation="relu")(torch.randn(2, 6))


def make(**options):
    options = {"num_heads": 4, "num_kv_heads": 4, "head_dim": 8, "causal": False, **options}
    return L.Attention(16, **options).double()


def plain_attention(layer, x, visible, cos=None, sin=None):
    """The projections apart, and torch's attention with a mask written out: bool [B or 1, S, S]."""
    q, k, v = (p(x).unflatten(-1, (-1, layer.head_dim)) for p in (layer.q_proj, layer.k_proj, layer.v_proj))
    if cos is not None:
        q, k = rope_qk_reference(q, k, cos, sin)
    groups = layer.num_heads // layer.num_kv_heads
    k, v = k.repeat_interleave(groups, 2), v.repeat_interleave(groups, 2)
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=visible[:, None], scale=layer.scale)
    return layer.o_proj(out.transpose(1, 2).flatten(2))


def tokens(batch_size=2, length=9):
    return torch.randn(batch_size, length, 16, dtype=torch.float64, requires_grad=True)


PADDING = torch.tensor([[False] * 5 + [True] * 4, [True, False, True] * 3])


@pytest.mark.parametrize("options", [
    {}, {"qkv_bias": True, "o_bias": True}, {"num_kv_heads": 2, "scale": 0.2},
], ids=str)  # fmt: skip
def test_attention_of_all_to_all(options):
    layer, x = make(**options), tokens()
    everything = torch.ones(1, 9, 9, dtype=torch.bool)
    assert_same(layer, layer(x, L.Batch()), plain_attention(layer, x, everything), x)
    assert not torch.allclose(layer(x, L.Batch()), plain_attention(layer, x, everything.tril()))  # negative control
    key_mask = ~PADDING
    assert_same(layer, layer(x, L.Batch(key_mask=key_mask)), plain_attention(layer, x, key_mask[:, None]), x)


def test_attention_without_tables_does_not_rotate():
    layer, x = make(causal=True), tokens()
    causal = torch.ones(1, 9, 9, dtype=torch.bool).tril()
    assert_same(layer, layer(x, L.Batch()), plain_attention(layer, x, causal), x)
    cos, sin = L.RotaryEmbedding(8)(torch.arange(9)[None])
    rotated = plain_attention(layer, x, causal, cos, sin)
    assert_same(layer, layer(x, L.Batch(cos=cos, sin=sin)), rotated, x)
    assert not torch.allclose(layer(x, L.Batch()), rotated)


LENGTHS = [[9], [4, 5], [3, 3, 3], [1, 6, 0, 2]]


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("rotated", [False, True])
def test_attention_within_each_segment(lengths, rotated):
    layer, x = make(qkv_bias=True), tokens(1)
    ends = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32)
    cos, sin = L.RotaryEmbedding(8)(torch.arange(9)[None]) if rotated else (None, None)
    segment = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    own = (segment == segment[:, None])[None]
    batch = L.Batch(cos=cos, sin=sin, cu_seqlens=ends, max_seqlen=max(lengths))
    actual = layer(x, batch)
    assert_same(layer, actual, plain_attention(layer, x, own, cos, sin), x)
    if len(lengths) > 1:  # negative controls: across segments, and with what the text has, causality
        assert not torch.allclose(actual, layer(x, L.Batch(cos=cos, sin=sin)))
        assert not torch.allclose(actual, plain_attention(layer, x, own.tril(), cos, sin))


def outer(padding):
    """Which token sees which: all, but padding not padding, itself included."""
    return ~(padding[:, :, None] & padding[:, None, :])


@pytest.mark.parametrize("options", [{}, {"num_kv_heads": 2, "qkv_bias": True, "scale": 0.3}], ids=str)
def test_padding_tokens_do_not_see_each_other(options):
    """But are seen by the others: an outer product of the padding with itself, not a mask of keys."""
    layer, x = make(**options), tokens()
    actual = layer(x, L.Batch(padding=PADDING))
    assert_same(layer, actual, plain_attention(layer, x, outer(PADDING)), x)
    assert not torch.allclose(actual[~PADDING], layer(x, L.Batch(key_mask=~PADDING))[~PADDING])  # negative controls
    assert not torch.allclose(actual[PADDING], layer(x, L.Batch())[PADDING])
    itself = outer(PADDING) | torch.eye(9, dtype=torch.bool)
    assert not torch.allclose(actual[PADDING], plain_attention(layer, x, itself)[PADDING])
    torch.testing.assert_close(layer(x, L.Batch(padding=torch.zeros_like(PADDING))), layer(x, L.Batch()))


def test_padding_beside_masked_keys_and_segments():
    layer, x = make(), tokens()
    hidden = torch.zeros(2, 9, dtype=torch.bool)
    hidden[:, 1] = True
    visible = outer(PADDING) & ~hidden[:, None]
    assert_same(layer, layer(x, L.Batch(padding=PADDING, key_mask=~hidden)), plain_attention(layer, x, visible), x)
    row, ends = tokens(1), torch.tensor([0, 3, 9], dtype=torch.int32)
    segment = torch.tensor([0] * 3 + [1] * 6)
    visible = outer(PADDING[1:]) & (segment == segment[:, None])
    batch = L.Batch(padding=PADDING[1:], cu_seqlens=ends)
    assert_same(layer, layer(row, batch), plain_attention(layer, row, visible), row)


def test_a_row_of_padding_alone_is_finite():
    layer, x = make(), tokens()
    padding = torch.tensor([[True] * 9, [False] * 9])
    y = layer(x, L.Batch(padding=padding))
    assert y.isfinite().all() and all(grad.isfinite().all() for grad in gradients(y, [x, *layer.parameters()]))
    torch.testing.assert_close(y[1:], layer(x[1:], L.Batch()))


def test_what_does_not_go_together_is_named():
    x, cache = tokens(), KVCache(1, 2, 9, 4, 8, dtype=torch.float64, device="cpu")
    for message, call in {
        "batch.padding is for attention of all to all": lambda: make(causal=True)(x, L.Batch(padding=PADDING)),
        "not causal cannot be cached": lambda: make()(x, L.Batch(), cache[0]),
        r"padding is torch.int64 \[2, 9\], .* expected torch.bool \[2, 9\]": lambda: make()(
            x, L.Batch(padding=PADDING.long())
        ),
        r"padding is torch.bool \[1, 9\]": lambda: make()(x, L.Batch(padding=PADDING[:1])),
    }.items():
        with pytest.raises(InputError, match=message):
            call()


def test_a_block_compiles_to_one_graph():
    """And gives what it gives: norms, attention with padding, and the unit, on one stream."""
    attention, norms = make(), nn.ModuleList([L.LayerNorm(16).double() for _ in range(2)])
    unit, x = L.MLP(16, 24, activation="quick_gelu").double(), tokens()

    def block(x, padding):
        y, residual = norms[0](x)
        y, residual = norms[1](attention(y, L.Batch(padding=padding)), residual)
        return residual + unit(y)

    torch.compiler.reset()
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")(x, PADDING)
    inputs = [x, *attention.parameters(), *norms.parameters(), *unit.parameters()]
    torch.testing.assert_close(compiled, block(x, PADDING))
    torch.testing.assert_close(gradients(compiled, inputs), gradients(block(x, PADDING), inputs))
