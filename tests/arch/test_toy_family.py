"""The toy family, which uses all that a family may ask of the package, through everything that a model goes through.

What it is compared with is `reference`: the same model in plain PyTorch, on the tensors of the disk. Loading, drawing,
saving and training over several ranks stand with those of the other families, in tests/parallel.
"""

import json
import re

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from ligermodels.checkpoint.weights import same_bits
from ligermodels.errors import ConfigError, InputError
from ligermodels.generation import generate_many, graphs
from ligermodels.layers import Attention, QuantizedLinear
from ligermodels.layers.lora import LoRALinear
from ligermodels.parallel.tensor import check_context, check_tensor
from ligermodels.recipes import memory
from ligermodels.training import add_lora, merge_lora
from tests.arch.suite import GRADIENTS, LOGITS, check_compiled, read_tensors, relative
from tests.arch.toy_family import SIZES, Gain, Toy, ToyBlock, WeightedMLP
from tests.recipes.runs import options_of

VOCAB, HIDDEN, INNER, TYPES = 96, 32, 48, SIZES["block_types"]
WIDTHS = {"full": 8, "sliding": 16}
IDS = torch.randint(VOCAB, (2, 11), generator=torch.Generator().manual_seed(1))


def tensors():
    """The weights of a checkpoint, with the names and the order of rows of the disk."""
    shapes = {
        "model.embed_tokens.weight": (VOCAB, HIDDEN),
        "model.embed_blocks.weight": (VOCAB, len(TYPES) * HIDDEN),
    }
    for i, kind in enumerate(TYPES):
        layer = f"model.layers.{i}."
        shapes |= {layer + "norm.weight": (HIDDEN,), layer + "layer_scalar": (1,)}
        if kind == "mlp":
            shapes[layer + "mlp.gain.weight"] = (INNER,)
            shapes[layer + "mlp.gate_up_proj.weight"] = (2 * INNER, HIDDEN)
            shapes[layer + "mlp.down_proj.weight"] = (HIDDEN, INNER)
        else:
            shapes[layer + "self_attn.qkv_proj.weight"] = (8 * WIDTHS[kind], HIDDEN)
            shapes[layer + "self_attn.o_proj.weight"] = (HIDDEN, 4 * WIDTHS[kind])
            shapes[layer + "self_attn.sinks"] = (4,)
    shapes |= {"model.norm.weight": (HIDDEN,), "lm_head.weight": (VOCAB, HIDDEN)}
    draw = torch.Generator().manual_seed(0)
    return {name: 0.3 * torch.randn(shape, generator=draw) + (len(shape) == 1) for name, shape in shapes.items()}


def rotated(x, theta):
    """x [B, heads, S, D] by its positions."""
    half = x.shape[-1] // 2
    angles = torch.arange(x.shape[2])[:, None] * theta ** -(torch.arange(half) / half)
    a, b = x.split(half, -1)
    return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], -1)


def reference(weights, ids):
    """The logits."""
    added = h = weights["model.embed_tokens.weight"][ids]
    inputs = weights["model.embed_blocks.weight"][ids].chunk(len(TYPES), -1)
    distance = torch.arange(ids.shape[1])[:, None] - torch.arange(ids.shape[1])
    for i, kind in enumerate(TYPES):
        w = {name.removeprefix(f"model.layers.{i}."): x for name, x in weights.items() if f".layers.{i}." in name}
        x = F.rms_norm(h, (HIDDEN,), w["norm.weight"], 1e-6) + inputs[i]
        if kind == "mlp":
            gate, up = F.linear(x + added, w["mlp.gate_up_proj.weight"]).unflatten(-1, (-1, 2)).unbind(-1)
            added = F.linear(F.silu(gate) * up * w["mlp.gain.weight"], w["mlp.down_proj.weight"])
        else:
            heads = F.linear(x, w["self_attn.qkv_proj.weight"]).unflatten(-1, (8, -1)).transpose(1, 2)
            theta, window = (100.0, 99) if kind == "full" else (10.0, 5)
            q, k = (rotated(part, theta) for part in (heads[:, :4], heads[:, 4:6]))
            mask = (distance >= 0) & (distance < window)
            k, v = (x.repeat_interleave(2, 1) for x in (k, heads[:, 6:]))
            scores = (q @ k.mT * WIDTHS[kind] ** -0.5).masked_fill(~mask, -torch.inf)
            sinks = w["self_attn.sinks"][:, None, None].expand(*scores.shape[:3], 1)
            y = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1] @ v
            added = F.linear(y.transpose(1, 2).flatten(2), w["self_attn.o_proj.weight"])
        added = added * w["layer_scalar"]
        h = h + added
    return F.linear(F.rms_norm(h, (HIDDEN,), weights["model.norm.weight"], 1e-6), weights["lm_head.weight"])


def write(folder, dtype="float32"):
    """A checkpoint that nothing of ours has written; its gains are in fp32."""
    weights = {name: x if "gain" in name else x.to(getattr(torch, dtype)) for name, x in tensors().items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps({**SIZES, "dtype": dtype}))
    return folder


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    return write(tmp_path_factory.mktemp("toy"))


@pytest.fixture
def model(written):
    return Toy.from_hub(written, progress=False)


def gradients(model):
    model.zero_grad()
    model(IDS, labels=IDS).loss.backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def test_logits_and_gradients_are_those_of_plain_pytorch(model, tmp_path):
    weights = {name: x.requires_grad_() for name, x in tensors().items()}
    logits = reference(weights, IDS)
    F.cross_entropy(logits[:, :-1].flatten(0, 1), IDS[:, 1:].flatten()).backward()
    assert relative(model(IDS).logits, logits) < LOGITS
    state = {**model.state_dict(), **gradients(model.train())}  # a buffer has none
    model.save_pretrained(tmp_path / "gradients", state_dict=state)
    found = read_tensors(tmp_path / "gradients")
    assert found.keys() == weights.keys()
    for name, wanted in weights.items():
        assert relative(found[name], wanted if "scalar" in name else wanted.grad) < GRADIENTS, name


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_was_loaded_is_saved(tmp_path, dtype):
    model = Toy.from_hub(write(tmp_path, dtype), progress=False)
    dtypes = {name.endswith("gain.weight"): x.dtype for name, x in model.state_dict().items()}
    assert dtypes == {False: getattr(torch, dtype), True: torch.float32}
    model.save_pretrained(tmp_path / "saved", max_shard_size="20KB")
    found, expected = read_tensors(tmp_path / "saved"), read_tensors(tmp_path)
    assert found.keys() == expected.keys() and all(same_bits(found[name], x) for name, x in expected.items())
    assert Toy.from_hub(tmp_path / "saved", progress=False).config == model.config


@pytest.mark.parametrize("policy", ["mlp", "block"])
def test_recomputed_gradients_are_the_same(model, policy):
    expected = gradients(model.train())
    assert all(gradient.any() for gradient in expected.values())
    model.gradient_checkpointing_enable({"recompute": policy})
    found = gradients(model)
    assert all(torch.equal(found[name], gradient) for name, gradient in expected.items())


@torch.no_grad()
def test_a_text_in_parts_packed_and_with_a_hook(model):
    whole = model(IDS, use_cache=False).logits
    out = model(IDS[:, :7])
    assert [len(state.buffers) for state in out.past_key_values] == [2, 0, 2, 0]
    rest = model(IDS[:, 7:], past_key_values=out.past_key_values).logits
    torch.testing.assert_close(torch.cat([out.logits, rest], 1), whole)
    packed = model(IDS.reshape(1, -1), cu_seqlens=torch.tensor([0, 11, 22], dtype=torch.int32)).logits
    torch.testing.assert_close(packed.view_as(whole), whole)
    for block in model.model.layers:
        block.register_forward_hook(lambda block, inputs, output: output * 1.0)
    torch.testing.assert_close(model(IDS).logits, whole)


@pytest.mark.parametrize("captured", [False, True], ids=["by host", "as a graph would"])
def test_generated_tokens_are_those_of_the_whole_text(model, monkeypatch, captured):
    run, steps = graphs.DecodeStep.run, []
    monkeypatch.setattr(graphs, "DEVICES", {"cpu", "cuda"} if captured else set())
    monkeypatch.setattr(graphs, "obstacle_to_capture", lambda model: None)  # classes of another package
    monkeypatch.setattr(graphs.DecodeStep, "run", lambda self, *inputs: (steps.append(1), run(self, *inputs))[1])
    found = model.generate(IDS, max_new_tokens=20)
    assert len(steps) == 19 * captured
    expected = IDS
    for _ in range(20):
        expected = torch.cat([expected, model(expected, use_cache=False).logits[:, -1:].argmax(-1)], 1)
    assert torch.equal(found, expected) and found[:, 11:].unique().numel() > 9
    many = generate_many(model, [IDS[0], IDS[1, 4:]], max_new_tokens=20)
    assert torch.equal(many[0], found[0, 11:])
    assert torch.equal(many[1], model.generate(IDS[1:, 4:], max_new_tokens=20)[0, 7:])


def test_compiles_as_one_graph(model):
    check_compiled(model.train(), IDS)


def test_lora_on_every_projection(model):
    base = model(IDS).logits
    add_lora(model, r=2)
    names = [name for name, module in model.named_modules() if isinstance(module, LoRALinear)]
    assert len(names) == 2 * len(TYPES)
    assert torch.equal(model(IDS).logits, base)
    optimizer = torch.optim.SGD([p for p in model.train().parameters() if p.requires_grad], lr=1.0)
    for _ in range(2):  # the first step moves B alone, which is 0
        model(IDS, labels=IDS).loss.backward()
        optimizer.step()
    assert all(p.grad.any() for p in model.parameters() if p.requires_grad)
    adapted = model.eval()(IDS).logits
    assert relative(adapted, base) > 0.01
    torch.testing.assert_close(
        merge_lora(model)(IDS).logits, adapted, rtol=1e-4, atol=1e-4
    )  # fp32 sums in another order


@pytest.mark.parametrize("kind", ["int8", "nf4"])
def test_quantised(written, model, kind, tmp_path):
    quantised = Toy.from_hub(written, quantization_config=kind, progress=False)
    linears = {name: one for name, one in quantised.named_modules() if isinstance(one, QuantizedLinear)}
    assert len(linears) == 2 * len(TYPES)
    for name, linear in linears.items():
        assert relative(linear.operand.dequantize(torch.float32), model.get_submodule(name).weight) < 0.1
        model.get_submodule(name).weight.data = linear.operand.dequantize(torch.float32)
    assert relative(quantised(IDS).logits, model(IDS).logits) < LOGITS
    if kind == "nf4":  # rows that have another order on disk are plain there
        kind = {"quant_method": "nf4", "skip_modules": ["gate_up_proj"]}
        quantised = Toy.from_hub(written, quantization_config=kind, progress=False)
        again = Toy.from_hub(quantised.save_pretrained(tmp_path / "nf4"), quantization_config="nf4", progress=False)
        assert torch.equal(again(IDS).logits, quantised(IDS).logits)


def test_the_report_lists_the_parts_of_its_layers(model):
    rows = {(row.modules, row.part): row.runs for row in model.train().fusion_report().rows}
    mlps = ("model.layers.1.mlp", "model.layers.3.mlp")
    assert rows[mlps, "gate_up_proj"] == rows[mlps, "down_proj"] == "one matmul"
    assert rows[("model.layers.0.self_attn", "model.layers.2.self_attn"), "qkv_proj"] == "one matmul"


def sizes_of(model):
    return memory.Sizes.of(model, options_of("sft"))


def test_the_plan_counts_all_of_it(model):
    sizes = sizes_of(model)
    assert sizes.parameters == sum(x.numel() for name, x in tensors().items() if "scalar" not in name)
    assert sizes.not_counted == ()
    attentions = sum(2 * (4 + 2) * width for width in WIDTHS.values())
    assert sizes.saved["none"] == (4 * HIDDEN + attentions + 2 * (HIDDEN + 4 * INNER)) // 4


WALKS = {
    "init_weights": lambda model: model.init_weights(),
    "tensor parallel": lambda model: check_tensor(model, 2),
    "context parallel": lambda model: check_context(model, 2, 1),
    "plan": lambda model: [f"not counted: {name}" for name in sizes_of(model).not_counted],
    "cache": lambda model: model.new_cache(2, 16),
    "report": lambda model: model.fusion_report(),
    "training": lambda model: model.train()(IDS, labels=IDS).loss.backward(),
}
LACKS = {
    (ToyBlock, "init_weights"): ("init_weights", r"layers\.0\.layer_scalar has no values.* let the init_weights of"),
    (Gain, "init_weights"): ("init_weights", r"layers\.1\.mlp\.gain\.weight has no values.* let the init_weights of"),
    (WeightedMLP, "shards"): ("tensor parallel", r"WeightedMLP\.shards\(\) does not name gate_up_proj\.weight, "),
    (WeightedMLP, "saved_per_token"): ("plan", "not counted: WeightedMLP$"),
    (WeightedMLP, "fusion_parts"): (None, ""),
    (Attention, "new_state"): (
        "cache",
        r"layers\.attention\.Attention .* takes a batch, and it has no method new_state",
    ),
}
"""{(layer, the method that it lacks): (the walk that says so, what it says)}."""


@pytest.mark.parametrize(("layer", "method"), LACKS, ids=lambda x: getattr(x, "__name__", x))
def test_what_a_layer_does_not_answer_is_said_where_it_is_asked_and_nowhere_else(model, monkeypatch, layer, method):
    assert [said(walk, model) for walk in WALKS] == [""] * len(WALKS)
    monkeypatch.delattr(layer, method)
    where, what = LACKS[layer, method]
    for walk in WALKS:
        assert re.search(what, said(walk, model)) if walk == where else not said(walk, model), walk


def said(walk, model):
    """What a walk over the model says of what is missing."""
    try:
        result = WALKS[walk](model)
    except InputError as error:
        return str(error)
    return ", ".join(result) if isinstance(result, list) else ""


def test_a_config_that_cannot_work_is_refused():
    for types in (["full", "mlp"], ["full", "mlp", "sliding", "linear"]):
        with pytest.raises(ConfigError, match=r"toy: block_types=.* must name full, sliding or mlp for each block"):
            Toy.from_config({**SIZES, "block_types": types}, device="meta")
