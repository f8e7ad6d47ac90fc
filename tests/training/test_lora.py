"""add_lora and its companions: what they change, refuse, keep and save; under FSDP2 as in one process."""

import copy
import json
import operator
import re

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn

from ligermodels import CheckpointError, InputError, layers as L
from ligermodels.arch import ARCHS
from ligermodels.checkpoint.weights import same_bits
from ligermodels.conversion.layouts import FolderSource
from ligermodels.conversion.merging import MergedSource
from ligermodels.conversion.source import View
from ligermodels.layers import attention, linear
from ligermodels.layers.lora import LoRALinear
from ligermodels.layers.quantized import QuantizedLinear
from ligermodels.parallel import make_mesh, parallelize
from ligermodels.training import AdamW, adapters_off, add_lora, load_adapter, merge_lora, save_adapter
from tests.arch import qwen2_vl, qwen3_vl
from tests.parallel.ranks import results_of_ranks
from tests.parallel.train import CONFIG
from tests.quantized import quantized

FAMILIES = {
    "llama": dict(tie_word_embeddings=True),
    "qwen2": dict(tie_word_embeddings=False),
    "gemma2": dict(head_dim=8, query_pre_attn_scalar=12, sliding_window=6, tie_word_embeddings=True),
    "phi3": dict(tie_word_embeddings=False, pad_token_id=0),
    "mixtral": dict(num_local_experts=4),
    "qwen3_moe": dict(
        num_experts=4, num_experts_per_tok=2, moe_intermediate_size=20, head_dim=8, mlp_only_layers=[0],
        norm_topk_prob=True,
    ),
    "gpt_oss": dict(
        num_local_experts=4, num_experts_per_tok=2, intermediate_size=20, head_dim=8, sliding_window=6,
        swiglu_limit=0.5, rope_parameters={"rope_type": "default", "rope_theta": 1e4},
    ),
    "qwen3_5_text": dict(
        head_dim=8, linear_key_head_dim=8, linear_value_head_dim=8, linear_num_key_heads=2, linear_num_value_heads=4,
        full_attention_interval=2,
    ),
}  # fmt: skip
MODEL_TYPE = operator.itemgetter("model_type")
IDS = torch.randint(97, (2, 9), generator=torch.Generator().manual_seed(0))


def make(family="llama", dtype=torch.float32, **changes):
    model = ARCHS[family].from_config(
        {**CONFIG, "model_type": family, **FAMILIES.get(family, {}), **changes}, dtype=dtype, device="cpu", seed=0
    )
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(parameter, std=0.2, generator=torch.Generator().manual_seed(0))
    return model


def adapted(family="llama", dtype=torch.float32, r=4, alpha=8, bits=16, sizes=None, **options):
    """With a B that is not zero."""
    base = make(family, dtype, **(sizes or {}))
    model = add_lora(quantized(base) if bits == 4 else base, r, alpha, **options)
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1, generator=generator)
    return model


def train_once(model):
    model.train()(IDS, labels=IDS).loss.backward()
    return model


def logits(model):
    with torch.no_grad():
        return model(IDS).logits


def test_what_is_added_and_trained():
    base, model = make("qwen2"), add_lora(make("qwen2"), r=4, alpha=8)
    assert torch.equal(logits(model), logits(base))  # B is zero
    names = set(base.state_dict())
    added = {name for name in model.state_dict() if name not in names}
    assert names < set(model.state_dict()) and len(added) == 2 * 2 * 7
    assert "model.layers.0.self_attn.q_proj.lora_A.weight" in added
    assert {name for name, p in model.named_parameters() if p.requires_grad} == added
    module = model.model.layers[1].mlp.down_proj
    assert type(module) is LoRALinear and module.lora_A.weight.dtype == torch.float32
    bound = 44**-0.5
    assert 0.9 * bound < module.lora_A.weight.abs().max() <= bound
    again = add_lora(make("qwen2"), r=4, alpha=8).state_dict()
    assert all(torch.equal(t, again[name]) for name, t in model.state_dict().items())
    other = add_lora(make("qwen2"), r=4, alpha=8, seed=1).state_dict()
    assert not torch.equal(other[min(added)], again[min(added)])


@pytest.mark.parametrize("family, dtype", [
    ("llama", torch.bfloat16), ("phi3", torch.float32), ("mixtral", torch.float32),
])  # fmt: skip
def test_files(family, dtype, tmp_path):
    model = adapted(family, dtype, rslora=True)
    assert save_adapter(model, tmp_path / "a") == tmp_path / "a"
    (tmp_path / "a" / "notes.txt").write_text("kept")
    save_adapter(model, tmp_path / "a")
    assert {path.name for path in (tmp_path / "a").iterdir()} == {
        "adapter_config.json", "adapter_model.safetensors", "notes.txt",
    }  # fmt: skip
    again = load_adapter(make(family, dtype), tmp_path / "a")
    assert torch.equal(logits(again), logits(model))
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert {name for name, p in again.named_parameters() if p.requires_grad} == trained
    assert set(load_file(tmp_path / "a" / "adapter_model.safetensors")) == {f"base_model.model.{n}" for n in trained}
    # What converts adapters on disk reads it too, to the same bits.
    make(family, dtype).save_pretrained(tmp_path / "base")
    source = MergedSource(View(FolderSource(tmp_path / "base")), tmp_path / "a")
    modes = [{path.stat().st_mode for path in (tmp_path / folder).iterdir()} for folder in ("a", "base")]
    assert modes[0] == modes[1] and len(modes[0]) == 1  # the umask's
    merge_lora(model).save_pretrained(tmp_path / "merged")
    merged = {}
    for path in (tmp_path / "merged").glob("*.safetensors"):
        merged |= load_file(path)
    assert merged.keys() == source.headers.keys()
    assert all(torch.equal(merged[name], source.read(name)) for name in merged)


def test_modules_to_save(tmp_path):
    """A tied head that is trained gets a weight of its own, and is saved so."""
    model = adapted("llama", targets=["q_proj"], modules_to_save=["lm_head"])
    assert not model.lm_head.is_tied and model.lm_head.weight.requires_grad
    assert not model.model.embed_tokens.weight.requires_grad
    with torch.no_grad():
        model.lm_head.weight += 1
    save_adapter(model, tmp_path / "a")
    again = load_adapter(make("llama"), tmp_path / "a")
    assert torch.equal(logits(again), logits(model)) and again.lm_head.weight.requires_grad
    with pytest.raises(InputError, match=r"lm_head .*trained in place"), adapters_off(model):
        pass
    merge_lora(again).save_pretrained(tmp_path / "merged")
    loaded = ARCHS["llama"].from_hub(tmp_path / "merged", device="cpu", progress=False)
    torch.testing.assert_close(logits(loaded), logits(model), rtol=1e-4, atol=1e-4)
    other = load_adapter(make("llama"), tmp_path / "a")
    with pytest.raises(CheckpointError, match="differ from this Llama in name"):
        load_adapter(make("llama", vocab_size=64), tmp_path / "a")
    assert other.config.tie_word_embeddings is False


def test_a_head_that_peft_keeps_tied_is_refused_by_name(tmp_path):
    """PEFT saves both tensors and names one."""
    save_adapter(adapted("llama", targets=["q_proj"], modules_to_save=["lm_head", "embed_tokens"]), tmp_path)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    config |= {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"lm_head.weight differ(.*\n)*.*a tied head \(ensure_weight_tying\)"):
        load_adapter(make("llama"), tmp_path)


def test_off_and_copied():
    model, base = adapted("gemma2", dora=True), make("gemma2")
    on = logits(model)
    copied = copy.deepcopy(model)
    with pytest.raises(ZeroDivisionError), adapters_off(model):
        assert torch.equal(logits(model), logits(base))
        assert torch.equal(logits(copied), on)
        raise ZeroDivisionError
    assert torch.equal(logits(model), on)


def test_the_fusion_report_names_what_is_not_fused():
    for options, why in (({}, ""), ({"dora": True}, ": DoRA"), ({"dropout": 0.1}, ": its adapter's dropout")):
        rows = [row for row in adapted(**options).train().fusion_report().rows if "proj" in row.part]
        assert rows and all(row.fused == (not options) and row.why.endswith(why) for row in rows)


def test_gradients_are_those_of_each_way_to_recompute():
    model = adapted(dropout=0.5, targets=["q_proj", "up_proj"]).train()
    for recompute in ("none", "mlp", "block"):
        model.gradient_checkpointing_enable({"recompute": recompute})
        found = []
        for _ in range(2):
            torch.manual_seed(3)
            model.zero_grad()
            train_once(model)
            found.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
        if recompute == "none":
            expected = found[0]
        for name in expected:
            for one in found:
                torch.testing.assert_close(one[name], expected[name])
    assert not torch.equal(logits(model), logits(model))
    assert torch.equal(logits(model.eval()), logits(model))


def test_hooks_and_autocast_are_honoured():
    model, seen = adapted("qwen2"), []
    expected = logits(model)
    handles = [
        model.model.layers[0].mlp.up_proj.register_forward_hook(lambda *_: seen.append("up")),
        model.model.layers[1].self_attn.k_proj.lora_A.register_forward_hook(lambda *_: seen.append("A of k")),
    ]
    torch.testing.assert_close(logits(model), expected, rtol=1e-5, atol=1e-5)
    assert seen == ["up", "A of k"] and len(model.fusion_report().unfused) >= 2
    for handle in handles:
        handle.remove()
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(logits(model).float(), expected, rtol=0.1, atol=0.2)
        model(IDS, labels=IDS).loss.backward()
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)


@pytest.mark.parametrize("options", [{}, {"rslora": True}, {"dora": True}], ids=str)
def test_every_kind_of_layer_computes_its_adapters(options):
    """As it does once they are merged: cross-attention, plain MLPs, a layer of joint weights, one of separate ones."""
    heads = dict(num_heads=4, num_kv_heads=2, head_dim=8, rope=None)
    x, states = torch.randn(2, 5, 16), torch.randn(2, 4, 12)
    for layer, inputs in (
        (L.CrossAttention(16, num_heads=4, num_kv_heads=2, head_dim=8, states_size=12, eps=1e-5), (states,)),
        (L.MLP(16, 24, activation="gelu"), ()),
        (L.Attention(16, **heads, projections=("qkv_proj", "o_proj")), (L.Batch(),)),
        (L.Attention(16, **heads, qk_norm=dict(eps=1e-6)), (L.Batch(),)),
        (L.GatedMLP(16, 24, bias=True, projections=("gate_up_proj", "down_proj")), ()),
    ):
        plain = layer(x, *inputs)
        add_lora(layer, r=3, **options)
        for name, parameter in layer.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(parameter, std=0.3)
        adapted_output = layer(x, *inputs)
        assert not torch.allclose(adapted_output, plain, atol=1e-2)
        # fp32: the product with A and B, or with the sum of the weight and B A, rounds each of some 50 terms.
        torch.testing.assert_close(merge_lora(layer)(x, *inputs), adapted_output, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("config", [qwen2_vl.tiny(), qwen3_vl.qwen3_vl_moe(), qwen3_vl.qwen3_5_moe()], ids=MODEL_TYPE)
def test_vision_towers_are_left_out_unless_named(config, tmp_path):
    def vl():
        return ARCHS[config["model_type"]].from_config(config, dtype=torch.float32, device="cpu", seed=0)

    def names(model):
        return {name for name, module in model.named_modules() if isinstance(module, LoRALinear)}

    assert all("language_model" in name for name in names(add_lora(vl(), 4)))
    tower = [name for name, module in vl().named_modules() if type(module) is nn.Linear and "visual" in name]
    alone = next(name for name in tower if name.endswith(".qkv"))
    with pytest.raises(InputError, match=r"'qkv' is not in the text model; name it with its path, such as"):
        add_lora(vl(), 4, targets=["qkv"])
    model = add_lora(vl(), 4, targets=["q_proj", alone])
    assert alone in names(model) and all(alone == name or name.endswith("q_proj") for name in names(model))
    save_adapter(model, tmp_path / "a")
    assert names(load_adapter(vl(), tmp_path / "a")) == names(model)
    assert alone in json.loads((tmp_path / "a" / "adapter_config.json").read_text())["target_modules"]


REFUSED = [
    ("'experts' is a Experts; targets are linear modules: k_proj, o_proj, q_proj, v_proj", "mixtral",
        {"targets": ["experts"]}),
    ("'gate_up_proj' is not there", "llama", {"targets": ["gate_up_proj"]}),
    ("'lm_head' is a LMHead", "llama", {"targets": ["lm_head"]}),
    ("'proj' is not there", "llama", {"targets": ["proj"]}),
    ("expected 'all-linear' or a list", "llama", {"targets": "q_proj"}),
    ("names 'heads'", "llama", {"modules_to_save": ["heads", "head"]}),
    ("gets an adapter, or parts of it do", "llama", {"modules_to_save": ["mlp"]}),
    ("r=0", "llama", {"r": 0}),
    ("dropout=1", "llama", {"dropout": 1.0}),
]  # fmt: skip


def test_what_does_not_fit_is_refused(tmp_path):
    for says, family, options in REFUSED:
        model = make(family)
        with pytest.raises(InputError, match=says):
            add_lora(model, **options)
        assert all(p.requires_grad for p in model.parameters())
    with pytest.raises(CheckpointError, match=r"merge_lora.*save_adapter"):
        adapted().save_pretrained(tmp_path / "a")
    assert not (tmp_path / "a").exists()
    with pytest.raises(InputError, match="has adapters already"):
        add_lora(adapted())
    for call in (merge_lora, lambda model: save_adapter(model, tmp_path / "a")):
        with pytest.raises(InputError, match="has no adapters"):
            call(make())
    with pytest.raises(InputError, match="on the meta device"):
        add_lora(ARCHS["llama"].from_config(CONFIG, device="meta"))
    hooked = make()
    hooked.model.layers[0].mlp.up_proj.register_forward_hook(print)
    with pytest.raises(InputError, match=r"layers\.0\.mlp\.up_proj cannot get an adapter, because of a hook"):
        add_lora(hooked)


WRONG_VALUES = [
    ("lora_alpha", "16"), ("lora_alpha", None), ("lora_alpha", float("nan")), ("lora_alpha", 0), ("r", 4.0), ("r", 0),
    ("alpha_pattern", {"q_proj": "8"}), ("alpha_pattern", {"q_(": 8}), ("rank_pattern", {"q_proj": 0}),
    ("rank_pattern", 4), ("lora_dropout", 1), ("use_rslora", "false"), ("modules_to_save", "lm_head"),
    ("modules_to_save", [7]),
]  # fmt: skip


def test_wrong_values_in_an_adapter_change_nothing(tmp_path):
    folder = save_adapter(adapted("qwen2", modules_to_save=["lm_head"]), tmp_path / "a")
    config, model = folder / "adapter_config.json", make("qwen2")
    right, before = config.read_text(), copy.deepcopy(model.state_dict())
    for field, value in WRONG_VALUES:
        config.write_text(json.dumps({**json.loads(right), field: value}))
        with pytest.raises(CheckpointError, match=f"{re.escape(str(config))} has {field} "):
            load_adapter(model, folder)
        after = model.state_dict()
        assert before.keys() == after.keys() and all(same_bits(before[name], after[name]) for name in before)
        assert all(parameter.requires_grad for parameter in model.parameters())
    config.write_text(right)
    assert isinstance(load_adapter(model, folder).model.layers[0].mlp.up_proj, LoRALinear)  # it had none


def test_adapters_on_four_bits_compute_as_on_the_dequantised_weights(tmp_path):
    low, dense, plain = adapted("qwen2", bits=4), make("qwen2"), quantized(make("qwen2"))
    for name, module in plain.named_modules():
        if isinstance(module, QuantizedLinear):
            dense.get_submodule(name).weight.data.copy_(module.operand.dequantize(torch.float32))
    with adapters_off(low):
        assert torch.equal(logits(low), logits(plain))
    save_adapter(low, tmp_path / "a")
    load_adapter(dense, tmp_path / "a")
    found = [
        {name: p.grad for name, p in train_once(model).named_parameters() if p.requires_grad} for model in (low, dense)
    ]
    assert found[0].keys() == found[1].keys() and len(found[0]) == 2 * 2 * 7
    for name, grad in found[0].items():
        torch.testing.assert_close(grad, found[1][name], rtol=1e-4, atol=1e-6)
    merge_lora(dense)
    with pytest.raises(InputError, match="rounded to 4 bits"):
        merge_lora(low)
    with pytest.raises(InputError, match="DoRA"):
        add_lora(plain, dora=True)


# ---- Two processes ----

BATCH = torch.randint(97, (4, 8), generator=torch.Generator().manual_seed(5))


def train(model, rows, steps=3):
    optimizer = AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for _ in range(steps):
        loss = model(rows, labels=rows).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def on_two_ranks(folder):
    """{case: (losses, the loss before and after merging)}."""
    rank, found = dist.get_rank(), {}
    fused, real = [], linear.linears
    attention.linears = linear.linears = lambda *args: fused.append(len(args[1])) or real(*args)
    for name, options in CASES.items():
        mesh = dict(cp=2) if name == "cp" else dict(dp_shard=2)
        model = parallelize(adapted(**options), make_mesh(**mesh, device_type="cpu"))
        fused.clear()
        losses = train(model, BATCH if name == "cp" else BATCH.chunk(2)[rank])
        assert fused == ([] if "dora" in options else 3 * 2 * [3, 1])  # of 3 steps and 2 blocks: q, k and v; o
        save_adapter(model, folder / name)
        with torch.no_grad():
            before = after = model(BATCH, labels=BATCH).loss
            if "bits" not in options:
                merge_lora(model)
                after = model(BATCH, labels=BATCH).loss
                model.save_pretrained(folder / f"{name}-merged")
        found[name] = losses, before, after
        with pytest.raises(InputError, match="sharded already" if "bits" not in options else "has adapters already"):
            add_lora(model)
    with pytest.raises(InputError, match="LoRALinear in place of a projection"):
        parallelize(adapted(), make_mesh(tp=2, device_type="cpu"))
    with pytest.raises(InputError, match="tensor parallel"):
        add_lora(parallelize(make(vocab_size=98), make_mesh(tp=2, device_type="cpu")))
    return found


CASES = {
    "bf16": dict(family="llama", dtype=torch.bfloat16),
    "nf4": dict(family="qwen2", bits=4),
    "cp": dict(family="gemma2"),
    "dora": dict(family="qwen2", dora=True, modules_to_save=["lm_head"]),
}


def test_sharded_adapters_train_and_save_as_whole_ones(tmp_path):
    """A frozen bf16 base and fp32 adapters in one group of FSDP2."""
    results, _ = results_of_ranks(tmp_path, lambda: on_two_ranks(tmp_path))
    for name, options in CASES.items():
        model = adapted(**options)
        losses = train(model, BATCH)
        found, before, after = results[name]
        low = options.get("dtype") == torch.bfloat16
        assert found == pytest.approx(losses, rel=2e-2 if low else 1e-5)
        save_adapter(model, tmp_path / f"{name}-whole")
        mine, whole = (load_file(tmp_path / f / "adapter_model.safetensors") for f in (name, f"{name}-whole"))
        assert mine.keys() == whole.keys()
        for key in whole:
            error = (mine[key] - whole[key]).abs().max() / whole[key].abs().max()
            assert mine[key].dtype == torch.float32 and error < (0.3 if low else 1e-4), key
        assert after.item() == pytest.approx(before.item(), rel=2e-2 if low else 1e-5)
        if "bits" in options:
            continue
        loaded = load_adapter(make(options["family"], options.get("dtype", torch.float32)), tmp_path / name)
        merge_lora(loaded).save_pretrained(tmp_path / "again")
        again, merged = (load_file(tmp_path / f / "model.safetensors") for f in ("again", f"{name}-merged"))
        assert all(torch.equal(again[key], merged[key]) for key in merged) and again.keys() == merged.keys()
