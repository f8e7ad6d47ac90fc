"""Layers against plain compositions of torch.nn, and what may not slip past them: hooks, adapters, ties."""

import copy
import functools
import importlib
import inspect
import io

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ligermodels.layers as L
from ligermodels.errors import InputError
from ligermodels.kernels.attention import attention_reference
from ligermodels.kernels.cross_entropy import CrossEntropyOutput, cross_entropy
from ligermodels.kernels.linear_cross_entropy import linear_cross_entropy
from ligermodels.kernels.rope import rope_qk_reference
from ligermodels.layers import attention, head, losses, mlp
from ligermodels.layers.cache import KVCache
from ligermodels.layers.linear import is_fusable


def batch_of(length, head_dim=8, start=0, **options):
    cos, sin = L.RotaryEmbedding(head_dim)(torch.arange(start, start + length)[None])
    return L.Batch(cos=cos, sin=sin, **options)


def gradients(module, loss):
    return dict(zip(dict(module.named_parameters()), torch.autograd.grad(loss, list(module.parameters())), strict=True))


def assert_same(module, actual, expected):
    """Same output, same gradient of every parameter."""
    torch.testing.assert_close(actual, expected)
    weights = torch.randn(actual.shape).to(actual)
    ours, theirs = (gradients(module, (y * weights).sum()) for y in (actual, expected))
    torch.testing.assert_close(ours, theirs)
    assert all(grad.abs().sum() > 0 for grad in ours.values())


@pytest.mark.parametrize("offset, cast_before_weight", [(0.0, True), (1.0, False)])
@pytest.mark.parametrize("affine", [True, False])
def test_rms_norm_adds_and_normalises(offset, cast_before_weight, affine):
    norm = L.RMSNorm(6, eps=1e-3, offset=offset, cast_before_weight=cast_before_weight, elementwise_affine=affine)
    x, residual = torch.randn(2, 3, 6), torch.randn(2, 3, 6)
    if affine:
        assert (norm.weight + offset == 1).all()
        nn.init.normal_(norm.weight)
    weight = norm.weight + offset if affine else 1.0

    def plain(x):
        return x / (x.square().mean(-1, keepdim=True) + 1e-3).sqrt() * weight

    first, stream = norm(x)
    assert stream is x
    torch.testing.assert_close(first, plain(x))
    second, stream = norm(x, residual)
    torch.testing.assert_close(stream, x + residual)
    torch.testing.assert_close(second, plain(x + residual))
    assert len(list(norm.parameters())) == affine


def plain_attention(layer, x, batch):
    """The same weights, op by op."""
    q, k, v = (
        F.linear(x, projection.weight, projection.bias).unflatten(-1, (-1, layer.head_dim))
        for projection in (layer.q_proj, layer.k_proj, layer.v_proj)
    )
    q, k = rope_qk_reference(q, k, batch.cos, batch.sin)
    options = {"window": layer.window, "softcap": layer.softcap, "scale": layer.scale}
    out = attention_reference(q, k, v, key_mask=batch.key_mask, cu_seqlens=batch.cu_seqlens, **options)
    return F.linear(out.flatten(2), layer.o_proj.weight, layer.o_proj.bias)


ATTENTION_OPTIONS = [
    {},
    {"qkv_bias": True, "o_bias": True},
    {"window": 3},
    {"softcap": 2.0, "scale": 0.2},
]


def make_attention(**options):
    return L.Attention(16, **{"num_heads": 4, "num_kv_heads": 2, "head_dim": 8, **options}).double()


@pytest.mark.parametrize("options", ATTENTION_OPTIONS, ids=str)
@pytest.mark.parametrize("rotated", [8, 4])
def test_attention(options, rotated):
    layer, x = make_attention(**options), torch.randn(2, 7, 16, dtype=torch.float64)
    for key_mask in (None, torch.ones(2, 7, dtype=torch.bool).tril(4)):
        batch = batch_of(7, rotated, key_mask=key_mask)
        assert_same(layer, layer(x, batch), plain_attention(layer, x, batch))


@pytest.mark.parametrize("options", ATTENTION_OPTIONS[:2], ids=str)
def test_heads_that_take_turns_are_kept_once(options, monkeypatch):
    """By the backward of each; the output projection's joins them again."""
    layer, x = make_attention(**options), torch.randn(2, 7, 16, dtype=torch.float64)
    kept, gradients = [], []
    for turn in (2**26, 1):
        monkeypatch.setattr(importlib.import_module("ligermodels.kernels.attention"), "_CHUNK_ELEMENTS", turn)
        memories = {}

        def pack(t, memories=memories):
            memories[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
            return t

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            y = layer(x, batch_of(7))
        gradients.append(torch.autograd.grad(y, list(layer.parameters()), torch.ones_like(y)))
        kept.append((sum(memories.values()), len(memories)))
    assert kept[1] == (kept[0][0], kept[0][1] + 2)  # output and statistics of two heads of keys, not of one
    torch.testing.assert_close(*gradients)
    layer.o_proj.register_forward_hook(lambda *_: None)  # who may keep the whole
    module, calls = importlib.import_module("ligermodels.kernels.attention"), []
    monkeypatch.setattr(module, "_by_head_chunks", lambda *_: calls.append(1))
    layer(x, batch_of(7))
    assert not calls


@pytest.mark.parametrize("options", ATTENTION_OPTIONS, ids=str)
def test_cached_steps_are_the_full_forward(options):
    """A prompt in two pieces and then tokens one by one, the first row left-padded."""
    layer, x = make_attention(**options), torch.randn(2, 9, 16, dtype=torch.float64)
    mask = torch.ones(2, 9, dtype=torch.bool)
    mask[0, :2] = False
    cache = KVCache(1, 2, 4, 2, 8, dtype=torch.float64, device="cpu")
    with torch.no_grad():
        whole = layer(x, batch_of(9, key_mask=mask))
        steps = [
            layer(x[:, start:end], batch_of(end - start, start=start, key_mask=mask[:, :end]), cache[0])
            for start, end in [(0, 3), (3, 6), (6, 7), (7, 8), (8, 9)]
        ]
    torch.testing.assert_close(torch.cat(steps, 1)[mask], whole[mask])


def test_packed_sequences_do_not_see_each_other():
    layer, x = make_attention(window=3), torch.randn(1, 9, 16, dtype=torch.float64)
    parts = [batch_of(length) for length in (4, 5)]
    cos, sin = (torch.cat([getattr(part, name) for part in parts], 1) for name in ("cos", "sin"))
    batch = L.Batch(cos=cos, sin=sin, cu_seqlens=torch.tensor([0, 4, 9], dtype=torch.int32), max_seqlen=5)
    separate = torch.cat([layer(x[:, :4], parts[0]), layer(x[:, 4:], parts[1])], 1)
    assert_same(layer, layer(x, batch), separate)
    with pytest.raises(InputError, match="packed sequences cannot go into a KV cache"):
        layer(x, batch, KVCache(1, 1, 9, 2, 8, dtype=torch.float64, device="cpu")[0])


def test_heads_that_do_not_divide_are_named():
    with pytest.raises(InputError, match="num_heads=4 must be a multiple of num_kv_heads=3"):
        L.Attention(16, num_heads=4, num_kv_heads=3, head_dim=8)


ACTIVATIONS = {"silu": F.silu, "gelu": F.gelu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh")}


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("bias", [False, True])
def test_gated_mlp(activation, bias):
    layer = L.GatedMLP(6, 10, activation=activation, bias=bias).double()
    x = torch.randn(2, 3, 6, dtype=torch.float64)

    def plain():
        gate, up = (F.linear(x, p.weight, p.bias) for p in (layer.gate_proj, layer.up_proj))
        return F.linear(ACTIVATIONS[activation](gate) * up, layer.down_proj.weight, layer.down_proj.bias)

    for recompute in (False, True):
        layer.recompute = recompute
        assert_same(layer, layer(x), plain())
    layer.down_proj.register_forward_hook(lambda *_: None)  # no longer plain: the unfused way
    assert_same(layer, layer(x), plain())


class Adapter(nn.Module):
    """LoRA's shape: the wrapped layer plus a low-rank product."""

    def __init__(self, base):
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, 2, bias=False)
        self.up = nn.Linear(2, base.out_features, bias=False)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))

    def merged(self):
        linear = nn.Linear(self.base.in_features, self.base.out_features, bias=self.base.bias is not None)
        linear.weight = nn.Parameter(self.base.weight.detach() + self.up.weight @ self.down.weight)
        linear.bias = self.base.bias
        return linear


@pytest.mark.parametrize("name", ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"])
@pytest.mark.parametrize("bias", [False, True])
def test_an_adapter_equals_its_merged_weight(name, bias):
    if name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        layer = L.Attention(16, num_heads=4, num_kv_heads=2, head_dim=8, qkv_bias=bias, o_bias=bias)
        inputs = (torch.randn(2, 5, 16), batch_of(5))
    else:
        layer, inputs = L.GatedMLP(16, 24, bias=bias), (torch.randn(2, 5, 16),)
    before = layer(*inputs)
    adapter = Adapter(getattr(layer, name))
    setattr(layer, name, adapter)
    wrapped = layer(*inputs)
    grads = torch.autograd.grad(wrapped.sum(), list(adapter.parameters()))
    assert all(grad.abs().sum() > 0 for grad in grads)
    setattr(layer, name, adapter.merged())
    torch.testing.assert_close(wrapped, layer(*inputs))
    assert not torch.allclose(wrapped, before)


class Halved(nn.Module):
    def forward(self, weight):
        return weight / 2


class Quantized(torch.Tensor):
    pass


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
@pytest.mark.parametrize("name", ["gate_proj", "up_proj", "down_proj"])
@pytest.mark.parametrize("wrap", WRAPPINGS)
def test_whatever_halves_a_projection_halves_what_it_gives(wrap, name, recompute):
    layer, x = L.GatedMLP(6, 10), torch.randn(2, 3, 6)
    layer.recompute, plain = recompute, copy.deepcopy(layer)
    with torch.no_grad():
        getattr(plain, name).weight /= 2
    wrap(getattr(layer, name))
    torch.testing.assert_close(layer(x), plain(x))


@pytest.mark.parametrize("wrap", WRAPPINGS)
def test_is_plain(wrap):
    linear = nn.Linear(2, 3)
    assert is_fusable(linear)
    wrap(linear)
    assert not is_fusable(linear)


def test_is_plain_sees_backward_hooks_tensor_subclasses_and_global_hooks():
    linear = nn.Linear(2, 3)
    linear.register_full_backward_hook(lambda *_: None)
    assert not is_fusable(linear)
    linear = nn.Linear(2, 3)
    linear.weight = nn.Parameter(torch.zeros(3, 2).as_subclass(Quantized))
    assert not is_fusable(linear)
    linear = nn.Linear(2, 3)
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        assert not is_fusable(linear)
    finally:
        handle.remove()
    assert is_fusable(linear)


@pytest.mark.parametrize(
    "fused, linear, make, hooked",
    [
        ("gated_mlp", "glu_linear", L.GatedMLP, ("gate_proj", "down_proj")),
        ("mlp", "activation_linear", functools.partial(L.MLP, activation="gelu"), ("fc1", "fc2")),
    ],
)
def test_the_unit_is_one_op_when_both_projections_are_plain(monkeypatch, fused, linear, make, hooked):
    """With a hook on the first the second is still fused with what it reads, and with one on that nothing is."""
    calls = []

    def record(name):
        real = getattr(mlp, name)
        monkeypatch.setattr(
            mlp,
            name,
            lambda *args, **options: (
                calls.append((name, {k: v for k, v in options.items() if k != "up"})) or real(*args, **options)
            ),
        )

    record(fused)
    record(linear)
    layer, x = make(6, 10), torch.randn(2, 6)
    layer(x)
    layer.recompute = True
    layer(x)
    options = {"activation": layer.activation}
    assert calls == [(fused, {**options, "recompute": recompute}) for recompute in (False, True)]
    getattr(layer, hooked[0]).register_forward_hook(lambda *_: None)
    layer(x)
    assert calls[2:] == [(linear, options)]
    getattr(layer, hooked[1]).register_forward_hook(lambda *_: None)
    layer(x)
    assert len(calls) == 3


def test_rotation_is_in_place_only_where_nobody_kept_the_buffer(monkeypatch):
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


def tied_head(embedding):
    owner = nn.Module()
    owner.embed_tokens = embedding
    return L.LMHead(embedding.embedding_dim, embedding.num_embeddings, tied_to=owner)


def make_head(kind):
    return tied_head(L.Embedding(13, 6)) if kind == "tied" else L.LMHead(6, 13, bias=kind == "bias")


@pytest.mark.parametrize("kind", ["plain", "bias", "tied"])
@pytest.mark.parametrize("softcap", [None, 0.5])
@pytest.mark.parametrize("given", [False, True])
def test_head_gives_logits_or_the_loss(kind, softcap, given):
    """given: with another weight than its own."""
    lm_head = make_head(kind)
    nn.init.normal_(lm_head.weight)
    weight = torch.randn(13, 6, requires_grad=True) if given else lm_head.weight
    settings = {"softcap": softcap, "weight": weight if given else None}
    x = torch.randn(2, 5, 6, requires_grad=True)
    labels = torch.randint(13, (2, 5))
    labels[0, 1] = -100
    logits = F.linear(x, weight, lm_head.bias)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    torch.testing.assert_close(lm_head(x, **settings), logits)

    total = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    leaves = [x, weight] if lm_head.bias is None else [x, weight, lm_head.bias]
    for options, expected in [
        ({}, total / 9),
        ({"num_items_in_batch": 20}, total / 20),
        ({"num_valid": 9}, total / 9),
    ]:
        loss = lm_head(x, labels=labels, **settings, **options)
        torch.testing.assert_close(loss, expected)
        grads = [torch.autograd.grad(y, leaves, retain_graph=True) for y in (loss, expected)]
        torch.testing.assert_close(*grads)


OPTIONS = {
    "class_weight": torch.rand(13),
    "ignore_index": 7,
    "label_smoothing": 0.1,
    "z_loss": 0.01,
    "reduction": "sum",
    "token_scaling": True,
    "return_z_loss": True,
    "return_token_accuracy": True,
    "return_predicted_tokens": True,
    "return_entropy": True,
}
FUSED_OPTIONS = {"accum_dtype": None, "workspace_bytes": 4096}
PER_CALL = {"num_items_in_batch": 3, "num_valid": 4}


def recorder(monkeypatch, module, name):
    calls = []
    monkeypatch.setattr(module, name, lambda *args, **options: calls.append((args, options)))
    return calls


def test_every_option_reaches_the_op(monkeypatch):
    """And there is none that the heads and losses do not know."""
    x, labels, weight = torch.randn(2, 6), torch.zeros(2, dtype=torch.int64), torch.randn(13, 6)
    everything = OPTIONS | FUSED_OPTIONS | PER_CALL | {"softcap": 5.0, "bias": None}
    names = list(inspect.signature(linear_cross_entropy).parameters)
    assert set(names) == {"x", "weight", "labels", *everything}
    assert set(inspect.signature(cross_entropy).parameters) == {
        "logits", "labels", "softcap", "num_items_in_batch", *OPTIONS,
    }  # fmt: skip

    calls = recorder(monkeypatch, head, "linear_cross_entropy")
    for kind in ("plain", "tied"):
        lm_head = make_head(kind)
        lm_head.workspace_bytes = 128
        lm_head(x, labels, softcap=5.0, **OPTIONS, **FUSED_OPTIONS, **PER_CALL)
        assert calls.pop()[1] == everything
        lm_head(x, labels)
        assert calls.pop()[1]["workspace_bytes"] == 128

    calls = recorder(monkeypatch, losses, "linear_cross_entropy")
    L.LinearCrossEntropyLoss(**OPTIONS, **FUSED_OPTIONS, softcap=5.0)(x, weight, labels, **PER_CALL)
    assert calls.pop()[1] == everything

    calls = recorder(monkeypatch, losses, "cross_entropy")
    of_torch = {name: value for name, value in OPTIONS.items() if name != "class_weight"}
    L.CrossEntropyLoss(OPTIONS["class_weight"], **of_torch, softcap=5.0)(x, labels, num_items_in_batch=3)
    assert calls.pop()[1] == OPTIONS | {"softcap": 5.0, "num_items_in_batch": 3}


def test_defaults_are_those_of_the_op():
    op = inspect.signature(linear_cross_entropy).parameters
    for call in (L.LMHead.forward, L.LinearCrossEntropyLoss.__init__, L.CrossEntropyLoss.__init__):
        for name, parameter in inspect.signature(call).parameters.items():
            if name in OPTIONS | FUSED_OPTIONS | PER_CALL:
                assert parameter.default == op[name].default, name


def test_loss_modules():
    x, weight, labels = torch.randn(4, 6), torch.randn(13, 6), torch.tensor([1, 12, -100, 3])
    class_weight = torch.rand(13)
    expected = F.cross_entropy(x @ weight.T, labels, class_weight, label_smoothing=0.1)
    torch.testing.assert_close(L.CrossEntropyLoss(class_weight, label_smoothing=0.1)(x @ weight.T, labels), expected)
    linear = L.LinearCrossEntropyLoss(class_weight, label_smoothing=0.1)
    torch.testing.assert_close(linear(x, weight, labels), expected)
    module = L.CrossEntropyLoss(weight=class_weight, label_smoothing=0.1, return_token_accuracy=True)
    assert module.state_dict() == {} and module.double().weight.dtype == torch.float64
    assert isinstance(L.CrossEntropyLoss(return_token_accuracy=True)(x @ weight.T, labels), CrossEntropyOutput)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed_tokens = L.Embedding(13, 6)
        self.lm_head = L.LMHead(6, 13, tied_to=self)

    def forward(self, ids, labels=None):
        return self.lm_head(self.embed_tokens(ids), labels)


def through_a_file(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("change", [
    lambda model: model,
    copy.deepcopy,
    through_a_file,
    lambda model: model.to(torch.float64),
    lambda model: model.to("meta").to_empty(device="cpu"),
], ids=["as built", "deepcopy", "pickle", "cast", "to_empty"])  # fmt: skip
def test_a_tie_holds(change):
    model = change(Tied())
    assert list(model.state_dict()) == ["embed_tokens.weight"] == [name for name, _ in model.named_parameters()]
    assert [name for name, _ in model.named_modules()] == ["", "embed_tokens", "lm_head"]
    assert model.lm_head.weight is model.embed_tokens.weight and model.lm_head.bias is None
    nn.init.normal_(model.embed_tokens.weight)
    ids = torch.randint(13, (2, 3))
    table = model.embed_tokens.weight.detach().clone().requires_grad_()
    model(ids).square().sum().backward()
    F.linear(F.embedding(ids, table), table).square().sum().backward()
    torch.testing.assert_close(model.embed_tokens.weight.grad, table.grad)


def test_a_replaced_table_stays_tied():
    """What FSDP and loading do: the parameter becomes another, on the module that owns it."""
    model = Tied()
    model.embed_tokens.weight = nn.Parameter(torch.randn(13, 6))
    assert model.lm_head.weight is model.embed_tokens.weight


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


def test_heads_compile_to_one_graph():
    torch._dynamo.reset()
    model, ids, labels = Tied(), torch.randint(13, (2, 3)), torch.randint(13, (2, 3))
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(ids), model(ids))
    torch.testing.assert_close(compiled(ids, labels), model(ids, labels))


def test_autocast_computes_as_torch_would():
    """fp32 weights and stream, bf16 products: what a trainer's bf16=True asks for."""
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
