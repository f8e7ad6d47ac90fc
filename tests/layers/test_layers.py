"""Layers: hooks and adapters are called, autocast, and arguments that do not fit. tests/arch compares what they compute
with transformers."""

import copy
import importlib
import itertools

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn

import ligermodels.layers as L
from ligermodels.errors import InputError
from ligermodels.kernels import route
from ligermodels.layers import attention
from ligermodels.layers.batch import NextToken
from ligermodels.layers.linear import operands_of
from ligermodels.layers.state import KeyValues


def batch_of(length):
    return L.Batch(rotary={"full": L.RotaryEmbedding(8)(torch.arange(length)[None])})


def make_attention(**options):
    return L.Attention(16, num_heads=4, num_kv_heads=2, head_dim=8, **options)


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
    assert operands_of([getattr(layer, name)])
    wrap(getattr(layer, name))
    assert operands_of([getattr(layer, name)]) is None
    torch.testing.assert_close(layer(x), plain(x))


@pytest.mark.parametrize("gated", [False, True])
def test_every_token_passes_the_shared_expert(gated):
    """As in Qwen3NextSparseMoeBlock of transformers; without a gate as in Glm4MoeMoE."""
    sizes, x = dict(num_experts=5, top_k=2), torch.randn(2, 3, 6)
    layer, plain = L.MoE(6, 10, shared_size=14, shared_gate=gated, **sizes), L.MoE(6, 10, **sizes)
    names = ["gate", "experts", "shared_expert", "shared_expert_gate"]
    assert [name for name, _ in layer.named_children()] == names[: 3 + gated]
    assert not plain.load_state_dict(layer.state_dict(), strict=False).missing_keys
    shared = layer.shared_expert
    added = shared.down_proj(F.silu(shared.gate_proj(x)) * shared.up_proj(x))
    if gated:
        added = added * F.linear(x, layer.shared_expert_gate.weight).sigmoid()
    (y, logits), (expected, expected_logits) = layer(x), plain(x)
    torch.testing.assert_close(y, expected + added)
    assert torch.equal(logits, expected_logits)


OF_DEEPSEEK = dict(score="sigmoid", correction_bias=True, fp32_router=True, eps=1e-20, scale=2.5)
IN_GROUPS = dict(n_group=4, topk_group=2, norm_topk_prob=False, routed_scaling_factor=1.8)
ROUTERS = {
    "mixtral MixtralTopKRouter": (dict(), dict()),
    "qwen3_moe Qwen3MoeTopKRouter": (dict(norm_topk_prob=True), dict()),
    "qwen3_moe Qwen3MoeTopKRouter, of all": (dict(norm_topk_prob=False), dict(normalize=False)),
    "deepseek_v3 DeepseekV3TopkRouter": (
        dict(n_group=4, topk_group=2, routed_scaling_factor=2.5), OF_DEEPSEEK | dict(groups=4, groups_kept=2),
    ),
    "deepseek_v3 DeepseekV3TopkRouter, no sum": (
        IN_GROUPS, OF_DEEPSEEK | dict(groups=4, groups_kept=2, normalize=False, scale=1.8),
    ),
    "glm4_moe Glm4MoeTopkRouter": (dict(routed_scaling_factor=2.5, n_group=1, topk_group=1), OF_DEEPSEEK),
    "lfm2_moe Lfm2MoeTopKRouter": (
        dict(use_expert_bias=True, norm_topk_prob=True), dict(score="sigmoid", correction_bias=True, eps=1e-6),
    ),
    "mistral4 Mistral4TopkRouter": (
        dict(n_group=4, topk_group=3, norm_topk_prob=True), dict(groups=4, groups_kept=3, dropped=0.0),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", ROUTERS)
def test_routes_as_transformers(case):
    """Experts, weights, and the gradients of x and of the router's weight."""
    (family, name), (changes, options) = case.split(",")[0].split(), ROUTERS[case]
    sizes = dict(hidden_size=32, moe_intermediate_size=8, intermediate_size=8, num_experts_per_tok=5, vocab_size=9)
    experts = "num_experts" if family in ("qwen3_moe", "lfm2_moe") else "num_local_experts"
    config = transformers.AutoConfig.for_model(family, **{experts: 16}, **sizes, **changes)
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    theirs, layer = getattr(module, name)(config), L.MoE(32, 8, num_experts=16, top_k=5, **options)
    x, bias = torch.randn(200, 32, requires_grad=True), layer.gate.e_score_correction_bias
    theirs.load_state_dict({"weight": layer.gate.weight}, strict=False)
    if bias is not None:
        bias.normal_(0, 0.2)
        getattr(theirs, "e_score_correction_bias", bias).copy_(bias)
    _, expected, their_choice = theirs(x, bias) if family == "lfm2_moe" else theirs(x)
    weights, choice = route(layer.gate(x), top_k=5, bias=bias, **layer.routing)

    def of_all(weights, experts):
        return weights.new_zeros(200, 16).scatter(1, experts.long(), weights)

    torch.testing.assert_close(of_all(weights, choice), of_all(expected, their_choice))
    dw = torch.randn(200, 16)
    gradients = torch.autograd.grad(of_all(weights, choice), [x, layer.gate.weight], dw)
    their_gradients = torch.autograd.grad(of_all(expected, their_choice), [x, theirs.weight], dw)
    torch.testing.assert_close(gradients, their_gradients, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("options", [
    dict(), dict(normalize=False), OF_DEEPSEEK, dict(score="sigmoid", normalize=False, groups=2, groups_kept=1),
], ids=["softmax", "softmax over all", "deepseek", "sigmoid"])  # fmt: skip
def test_replayed_experts_are_weighed_by_this_router(options):
    layer, x = L.MoE(6, 10, num_experts=8, top_k=2, **options).double(), torch.randn(1, 5, 6, dtype=torch.double)
    x.requires_grad_()
    replayed = torch.tensor([[0, 7], [6, 1], [-1, -1], [3, 2], [5, 4]], dtype=torch.int16)
    chosen = layer.choose(layer.gate(x[0]))[1]
    experts = torch.where(replayed < 0, chosen, replayed).long()
    y, logits = layer(x, replayed)
    scores = logits.sigmoid() if options.get("score") else logits.softmax(-1)
    weights = scores.gather(1, experts)
    if options.get("normalize", True):
        weights = weights / weights.sum(1, keepdim=True)
    each = [layer.experts(x[0], torch.ones(5, 1).double(), experts[:, j : j + 1].int()) for j in range(2)]
    expected = options.get("scale", 1.0) * (weights[:, :1] * each[0] + weights[:, 1:] * each[1])
    torch.testing.assert_close(y[0], expected, rtol=1e-9, atol=1e-12)
    trained = [x, layer.gate.weight, layer.experts.down_proj]
    for a, b in zip(
        *(torch.autograd.grad(z.square().sum(), trained, retain_graph=True) for z in (y, expected)), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


def test_a_router_in_fp32_computes_in_fp32():
    """In a model of 16 bits; with a correction bias alone it computes in the dtype of x. Its linear bias is added."""
    for fp32, correction, bias in itertools.product((True, False), (True, False), (True, False)):
        router = L.Router(32, 8, fp32=fp32, bias=bias, correction_bias=correction)
        x = torch.randn(5, 32, dtype=torch.bfloat16)
        parameters = [p.detach().clone() for p in (router.weight, router.bias) if p is not None]
        router.to(torch.bfloat16)
        assert {p.dtype for p in router.parameters()} == {torch.float32 if fp32 or correction else torch.bfloat16}
        expected = F.linear(x.float(), *parameters) if fp32 else F.linear(x, *(p.bfloat16() for p in parameters))
        assert torch.equal(router(x), expected)
        names = {"weight": True, "bias": bias, "e_score_correction_bias": correction}
        assert {*router.state_dict()} == {name for name, there in names.items() if there}
        if correction:
            assert router.e_score_correction_bias.dtype == torch.float32
            assert not router.e_score_correction_bias.requires_grad and not router.e_score_correction_bias.any()


def gpt_oss(limit: float = 0.9) -> tuple[nn.Module, L.MoE]:
    """The experts and the router of gpt-oss as transformers have them, and ours with the same weights."""
    config = transformers.GptOssConfig(
        hidden_size=40, intermediate_size=27, num_local_experts=6, num_experts_per_tok=3, swiglu_limit=limit
    )
    theirs = importlib.import_module("transformers.models.gpt_oss.modeling_gpt_oss").GptOssMLP(config)
    clamped = L.ClampedSwiGLU(config.swiglu_alpha, limit)
    ours = L.MoE(40, 27, num_experts=6, top_k=3, activation=clamped, bias=True)
    for parameter in theirs.parameters():
        nn.init.normal_(parameter, std=0.5)
    ours.load_state_dict(of_gpt_oss(dict(theirs.named_parameters())))
    return theirs, ours


def of_gpt_oss(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Parameters, or gradients, under our names: theirs are [in, out], and gate and up are every other column."""

    def ours(name: str, x: torch.Tensor) -> torch.Tensor:
        if "gate_up" in name:
            x = torch.cat([x[..., ::2], x[..., 1::2]], -1)
        return x.mT if name.endswith("proj") else x

    return {name.replace("router", "gate"): ours(name, x) for name, x in tensors.items()}


@pytest.mark.parametrize("recompute", [False, True])
def test_biased_experts_with_the_clamped_unit_as_transformers(recompute):
    """GptOssMLP in fp32: outputs, logits, and all gradients; half of gates and ups are above the limit."""
    theirs, ours = gpt_oss()
    ours.recompute = recompute
    x, dy = torch.randn(2, 9, 40, requires_grad=True), torch.randn(2, 9, 40)
    (expected, _), (y, logits) = theirs(x), ours(x)
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(logits, F.linear(x.flatten(0, 1), theirs.router.weight, theirs.router.bias))
    names, leaves = zip(*theirs.named_parameters(), strict=True)
    dx, *rest = torch.autograd.grad(expected, [x, *leaves], dy)
    of_theirs = of_gpt_oss(dict(zip(names, rest, strict=True)))
    our_dx, *rest = torch.autograd.grad(y, [x, *(ours.get_parameter(name) for name in of_theirs)], dy)
    for actual, correct in zip((our_dx, *rest), (dx, *of_theirs.values()), strict=True):
        torch.testing.assert_close(actual, correct, rtol=1e-5, atol=1e-5 * correct.abs().max().item())


def test_the_balancing_loss_of_biased_logits_as_transformers():
    theirs, ours = gpt_oss()
    module = importlib.import_module("transformers.models.gpt_oss.modeling_gpt_oss")
    x, mask = torch.randn(2, 9, 40), torch.ones(2, 9)
    mask[1, :4] = 0
    logits = [ours(x)[1], ours(2 * x)[1]]
    expected = module.load_balancing_loss_func(tuple(theirs.router(t.flatten(0, 1))[0] for t in (x, 2 * x)), 6, 3, mask)
    loss = L.load_balancing_loss(logits, top_k=3, attention_mask=mask)
    torch.testing.assert_close(loss, expected)
    gradients = torch.autograd.grad(loss, [ours.gate.weight, ours.gate.bias])
    their_gradients = torch.autograd.grad(expected, [theirs.router.weight, theirs.router.bias])
    torch.testing.assert_close(gradients, their_gradients)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.input_layernorm = L.RMSNorm(16)
        self.attn = make_attention()
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


def test_rotation_is_in_place_only_where_no_hook_holds_the_buffer(monkeypatch):
    rope, asked = attention.rope, []
    monkeypatch.setattr(
        attention, "rope", lambda *args, **options: asked.append(options["inplace"]) or rope(*args, **options)
    )
    layer, x, kept = make_attention(), torch.randn(1, 5, 16), []
    layer(x, batch_of(5))
    layer.k_proj.register_forward_hook(lambda module, inputs, output: kept.append(output))
    layer(x, batch_of(5))  # by rope_qk, which writes new memory
    packed = make_attention(projections=("qkv_proj", "o_proj"))
    packed.qkv_proj.register_forward_hook(lambda module, inputs, output: kept.append(output))
    packed(x, batch_of(5))
    assert asked == [True, False]
    assert torch.equal(kept[0], F.linear(x, layer.k_proj.weight))
    assert torch.equal(kept[1], F.linear(x, packed.qkv_proj.weight))


def cross(states):
    layer = L.CrossAttention(16, num_heads=4, num_kv_heads=2, head_dim=8, eps=1e-5)
    return layer(torch.randn(2, 3, 16), states)


@pytest.mark.parametrize("kind", ["sliding_attention", "full_attention"])
@pytest.mark.parametrize("padded", [False, True])
def test_sinks_as_transformers(kind, padded):
    """GptOssAttention: the output, all gradients, and the same a token at a time. A pad sees nothing but the sink here,
    and all tokens alike there."""
    config = transformers.GptOssConfig(
        hidden_size=40, num_attention_heads=4, num_key_value_heads=2, head_dim=16, sliding_window=5,
        num_hidden_layers=1, layer_types=[kind], attn_implementation="eager",
    )  # fmt: skip
    module = importlib.import_module("transformers.models.gpt_oss.modeling_gpt_oss")
    theirs, window = module.GptOssAttention(config, 0), 5 if kind == "sliding_attention" else None
    nn.init.normal_(theirs.sinks, 0.0, 2.0)
    layer = L.Attention(
        40, num_heads=4, num_kv_heads=2, head_dim=16, qkv_bias=True, o_bias=True, window=window, sinks=True
    )
    layer.load_state_dict(theirs.state_dict())
    x, starts = torch.randn(2, 19, 40, requires_grad=True), torch.tensor([0, 7 * padded])
    distance = torch.arange(19)[:, None] - torch.arange(19)
    key_mask = torch.arange(19) >= starts[:, None]
    seen = (distance >= 0) & (distance < (window or 99)) & key_mask[:, None]
    mask = torch.zeros(2, 1, 19, 19).masked_fill(~seen[:, None], torch.finfo(torch.float32).min)
    cos, sin = module.GptOssRotaryEmbedding(config)(x, torch.arange(19)[None])
    expected = theirs(x, position_embeddings=(cos, sin), attention_mask=mask)[0]
    y = layer(x, L.Batch(rotary={"full": (cos, sin)}, key_mask=key_mask if padded else None))
    torch.testing.assert_close(y[key_mask], expected[key_mask], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(y[~key_mask], layer.o_proj.bias.expand_as(y[~key_mask]), rtol=0, atol=0)
    dy = torch.randn_like(y) * key_mask[..., None]
    pairs = zip(
        torch.autograd.grad(y, [x, *layer.parameters()], dy),
        torch.autograd.grad(expected, [x, *(theirs.get_parameter(name) for name, _ in layer.named_parameters())], dy),
        strict=True,
    )
    for found, wanted in pairs:
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    with torch.no_grad():
        cache = layer.new_state(2, 19, whole=False, dtype=torch.float32, device="cpu")
        first = L.Batch(rotary={"full": (cos[:, :9], sin[:, :9])}, key_mask=key_mask[:, :9] if padded else None)
        steps = [layer(x[:, :9], first, cache)]
        cache.reserve(19, 9)
        for i in range(9, 19):
            token = NextToken(starts=starts.int(), ends=torch.full((2,), i + 1, dtype=torch.int32))
            tables = {"full": (cos[:, i : i + 1], sin[:, i : i + 1])}
            steps.append(layer(x[:, i : i + 1], L.Batch(rotary=tables, next_token=token, past_length=i), cache))
    torch.testing.assert_close(torch.cat(steps, 1)[key_mask], y[key_mask], rtol=1e-5, atol=1e-6)


def other_eps(norm):
    norm.eps = 1.0


def double_weight(norm):
    norm.weight = nn.Parameter(norm.weight.detach().double())


@pytest.mark.parametrize("name", ["q_norm", "k_norm"])
@pytest.mark.parametrize("change", [None, other_eps, double_weight, *WRAPPINGS[:4]])
@pytest.mark.parametrize("options", [{}, dict(rope=None, output_gate=True)], ids=["plain", "gate, no rope"])
def test_norms_of_heads_in_decoding(monkeypatch, name, change, options):
    """The op that stores the new token computes them as well, unless the two differ, or a call is more than a norm."""
    passed, attend = [], KeyValues.attend
    monkeypatch.setattr(
        KeyValues, "attend", lambda *args, **rest: passed.append(rest.get("norms")) or attend(*args, **rest)
    )
    layer = make_attention(qk_norm=dict(eps=0.1, offset=1.0, cast_before_weight=False), **options)
    for norm in (layer.q_norm, layer.k_norm):
        nn.init.normal_(norm.weight)
    if change is not None:
        change(layer.get_submodule(name))
    x, rotary = torch.randn(2, 7, 16), batch_of(7).rotary["full"]
    with torch.no_grad():
        expected = layer(x, batch_of(7))
        cache = layer.new_state(2, 7, whole=False, dtype=torch.float32, device="cpu")
        steps = [layer(x[:, :4], L.Batch(rotary={"full": tuple(t[:, :4] for t in rotary)}), cache)]
        cache.reserve(7, 4)
        for i in range(4, 7):
            token = NextToken(starts=torch.zeros(2).int(), ends=torch.full((2,), i + 1).int())
            tables = {"full": tuple(t[:, i : i + 1] for t in rotary)}
            steps.append(layer(x[:, i : i + 1], L.Batch(rotary=tables, next_token=token, past_length=i), cache))
    torch.testing.assert_close(torch.cat(steps, 1), expected)
    assert [norms is None for norms in passed] == [change not in (None, double_weight)] * 3


REFUSED = {
    "not causal cannot be cached": lambda x, cache: make_attention(rope=None, causal=False)(x, L.Batch(), cache),
    "packed sequences cannot go into a KV cache": lambda x, cache: make_attention(rope=None)(
        x, L.Batch(cu_seqlens=torch.tensor([0, 9], dtype=torch.int32), max_seqlen=9), cache
    ),
    "rotating=4 makes keys of values, which decodes without sinks": lambda x, cache: make_attention(
        keys_as_values=True,
        qk_norm=dict(eps=1e-6),
        v_norm=dict(eps=1e-6, elementwise_affine=False),
        rotating=4,
        sinks=True,
    ),
    "rotary is a tuple; expected tables by their names": lambda x, cache: L.Batch(
        rotary=L.RotaryEmbedding(4)(x[..., 0])
    ),
    "has no tables 'local'": lambda x, cache: make_attention(rope="local")(x, batch_of(9)),
    "no states of images, and none in the cache": lambda x, cache: cross(None),
    r"\[2, 3\] tokens, \[1, 7\] states .* batch of one row": lambda x, cache: cross(torch.randn(1, 7, 16)),
}


@pytest.mark.parametrize("build, message", [
    (lambda: L.GatedMLP(16, 32, activation="swish"), r"GatedMLP: activation='swish'; .* 'silu', .*ClampedSwiGLU"),
    (lambda: L.MLP(16, 32, activation=F.gelu), r"MLP: activation=<.*; .* 'gelu', 'quick_gelu'"),
    (lambda: L.MLP(16, 32, activation=L.ClampedSwiGLU(1.702, 7.0)), "MLP: .* there is no gate"),
    (lambda: L.MoE(16, 32, num_experts=4, top_k=2, activation="swish"), "Experts: activation='swish'"),
    (lambda: make_attention(window=0), "Attention: window=0; expected 1 or more"),
    (lambda: make_attention(window=-4), "Attention: window=-4"),
])  # fmt: skip
def test_refused_when_built(build, message):
    with pytest.raises(InputError, match=message):
        build()


@pytest.mark.parametrize("message", REFUSED)
def test_refused(message):
    with pytest.raises(InputError, match=message):
        REFUSED[message](torch.randn(1, 9, 16), KeyValues(1, 9, 2, 8, dtype=torch.float32, device="cpu"))
