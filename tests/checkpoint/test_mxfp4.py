"""Experts in MXFP4, in the layout of the released gpt-oss: read as they are or dequantised, trained over, saved."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

import ligermodels
from ligermodels import CheckpointError, InputError
from ligermodels.arch.mixtral import Mixtral
from ligermodels.checkpoint.quantizers import MXFP4
from ligermodels.checkpoint.weights import Rearranged, same_bits, to_halves
from ligermodels.conversion import convert, inspect
from ligermodels.kernels.linear.mxfp4 import quantize_mxfp4
from ligermodels.layers import Experts, QuantizedLinear
from ligermodels.parallel import make_mesh, parallelize
from ligermodels.training import add_lora, merge_lora
from tests.checkpoint.fixtures import CONFIG
from tests.conversion.layouts import same, stored
from tests.parallel.ranks import on_ranks

IDS = torch.tensor([[1, 5, 9, 2, 30, 7]])
E, H, INNER = 3, 64, 32
EXPERTS = "model.layers.{i}.mlp.experts."
GATE_UP, DOWN = (EXPERTS.format(i=1) + name for name in ("gate_up_proj", "down_proj"))
SIZES = dict(hidden_size=H, intermediate_size=INNER, num_hidden_layers=2, num_local_experts=E, num_attention_heads=4,
             num_key_value_heads=2, num_experts_per_tok=2, dtype="bfloat16")  # fmt: skip
DEQUANTIZE = {"quant_method": "mxfp4", "dequantize": True}
SKIPPED = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]


class Interleaved(Mixtral):
    """Mixtral with gpt-oss's experts on disk: [E, K, N], the rows of gate and up in turn."""

    DISK_NAMES = {
        EXPERTS + "gate_up_proj": Rearranged(
            EXPERTS + "gate_up_proj", order=lambda rows, config: to_halves(rows, 1), dim=1, transposed=True
        ),
        EXPERTS + "down_proj": Rearranged(EXPERTS + "down_proj", transposed=True),
    }


def write(folder, tensors, config, **quantization):
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    settings = {"quantization_config": quantization} if quantization else {}
    (folder / "config.json").write_text(json.dumps({**config, **settings}))
    return folder


def released_tensors():
    """All bytes in the codes; every weight of a block of another size than those of its neighbours."""
    torch.manual_seed(0)
    config = {**CONFIG, "model_type": "mixtral", **SIZES}
    model = Interleaved.from_config(config, seed=0, device="cpu", dtype=torch.bfloat16)
    tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items() if ".experts." not in name}
    for i in range(2):
        for name, rows, columns in (("gate_up_proj", 2 * INNER, H), ("down_proj", H, INNER)):
            blocks = torch.randint(0, 256, (E, rows, columns // 32, 16), dtype=torch.uint8)
            tensors[EXPERTS.format(i=i) + name + "_blocks"] = blocks
            scales = torch.randint(115, 125, (E, rows, columns // 32), dtype=torch.uint8)
            tensors[EXPERTS.format(i=i) + name + "_scales"] = scales
    return tensors, config


@pytest.fixture(scope="module")
def released(tmp_path_factory):
    tensors, config = released_tensors()
    settings = dict(modules_to_not_convert=SKIPPED, quant_method="mxfp4")
    return write(tmp_path_factory.mktemp("released") / "model", tensors, config, **settings)


def by_transformers(folder, name, dtype=torch.bfloat16):
    """[E, K, N], as transformers dequantises it."""
    pytest.importorskip("accelerate")
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    tensors = load_file(folder / "model.safetensors")
    return mxfp4.convert_moe_packed_tensors(tensors[f"{name}_blocks"], tensors[f"{name}_scales"], dtype=dtype)


def expected(folder, name, dtype=torch.bfloat16):
    """[E, N, K] with our order of rows, taken row by row."""
    whole = by_transformers(folder, name, dtype).mT
    if name == GATE_UP:
        whole = torch.stack(
            [torch.stack([one[2 * k + half] for half in range(2) for k in range(INNER)]) for one in whole]
        )
    return whole.contiguous()


def load(folder, config=None, **options):
    options = {"device": "cpu", "progress": False, **options}
    return Interleaved.from_hub(folder, quantization_config=config, **options)


def experts_of(model):
    return [module for module in model.modules() if isinstance(module, Experts)]


def test_the_released_bytes_are_kept_in_our_order(released):
    model = load(released)
    modules = {name for name, module in model.named_modules() if type(module) is QuantizedLinear}
    assert modules == {EXPERTS.format(i=i) + name for i in range(2) for name in ("gate_up_proj", "down_proj")}
    experts = experts_of(model)[1]
    for name, wanted in (("gate_up_proj", GATE_UP), ("down_proj", DOWN)):
        weight = experts.operand(name).weight
        assert weight.packed.numel() * 2 == weight.scale.numel() * 32 == torch.Size(weight.shape).numel()
        for dtype in (torch.bfloat16, torch.float32, torch.float16):
            assert same_bits(weight.dequantize(dtype), expected(released, wanted, dtype))
    assert model.hf_quantizer == MXFP4(modules_to_not_convert=SKIPPED) and model.is_quantized
    assert not any(p.requires_grad for one in experts_of(model) for p in one.parameters())
    assert load(released, "mxfp4").hf_quantizer == model.hf_quantizer


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("asked", ["dict", "transformers"])
def test_it_is_dequantised_on_request(released, tmp_path, dtype, asked):
    config = DEQUANTIZE
    if asked == "transformers":  # whose to_dict leaves out dequantize
        config = pytest.importorskip("transformers").Mxfp4Config(dequantize=True)
    model, kept = load(released, config, dtype=dtype), load(released, dtype=dtype)
    assert not hasattr(model, "hf_quantizer") and all(p.requires_grad for p in model.parameters())
    for name in (GATE_UP, DOWN):
        assert same_bits(model.get_parameter(name).detach(), expected(released, name, dtype))
    with torch.no_grad():
        assert torch.equal(model(IDS).logits, kept(IDS).logits)
    folder = model.save_pretrained(tmp_path / "x")
    for name in (GATE_UP, DOWN):
        assert same_bits(stored(folder)[name], by_transformers(released, name, dtype))
    assert "quantization_config" not in json.loads((folder / "config.json").read_text())
    assert not any(name.endswith(("_blocks", "_scales")) for name in stored(folder))
    again = load(folder, DEQUANTIZE)  # nothing to dequantise
    assert torch.equal(again(IDS).logits, model(IDS).logits)


def test_what_is_kept_is_saved_bit_for_bit(released, tmp_path):
    folder = load(released, dtype=torch.bfloat16).save_pretrained(tmp_path / "x", max_shard_size="8KB")
    assert len(list(folder.glob("*.safetensors"))) > 2 and same(stored(folder), stored(released))
    saved, before = (json.loads((one / "config.json").read_text()) for one in (folder, released))
    assert saved["quantization_config"] == before["quantization_config"]
    again = load(folder)
    assert torch.equal(again(IDS).logits, load(released)(IDS).logits)


def test_floats_are_quantised_and_saved_so(released, tmp_path):
    """What was dequantised gets back its values; another s of the same values is allowed."""
    plain = load(released, DEQUANTIZE).save_pretrained(tmp_path / "plain")
    model, kept = load(plain, "mxfp4"), load(released)
    for one, other in zip(experts_of(model), experts_of(kept), strict=True):
        for name in one.stacked:
            assert torch.equal(one.operand(name).weight.dequantize(), other.operand(name).weight.dequantize())
    assert torch.equal(model(IDS).logits, kept(IDS).logits)
    folder = model.save_pretrained(tmp_path / "x")
    wanted = quantize_mxfp4(stored(plain)[GATE_UP].mT.contiguous())
    assert same_bits(stored(folder)[f"{GATE_UP}_blocks"].flatten(0, 1).flatten(1), wanted.packed)
    assert same_bits(stored(folder)[f"{GATE_UP}_scales"].flatten(0, 1), wanted.scale)
    assert torch.equal(load(folder)(IDS).logits, model(IDS).logits)


def test_adapters_are_trained_over_them(released):
    kept, plain = load(released, dtype=torch.float32), load(released, DEQUANTIZE, dtype=torch.float32)
    grads = []
    for model in (kept, plain):
        add_lora(model, 4, targets="all-linear")
        for experts in experts_of(model):
            for name in experts.adaptable:
                experts.add_adapter(name, r=4, alpha=8, rslora=False, dtype=torch.float32)
        torch.manual_seed(1)
        for name, parameter in model.named_parameters():
            if ".lora_" in name:
                torch.nn.init.normal_(parameter, std=0.1)
        model.train()(IDS, labels=IDS).loss.backward()
        grads.append({name: p.grad for name, p in model.named_parameters() if p.requires_grad})
    assert grads[0].keys() == grads[1].keys() and sum(".experts." in name for name in grads[0]) == 8
    for name, found in grads[0].items():
        torch.testing.assert_close(found, grads[1][name], rtol=1e-4, atol=1e-6)
        assert found.abs().max() > 0
    with pytest.raises(InputError, match="4-bit"):
        merge_lora(kept)


def work_on_two_ranks(released, folder):
    mesh = make_mesh(dp_shard=2, device_type="cpu")
    with pytest.raises(InputError, match="mesh= shards plain weights"):
        Interleaved.from_hub(released, mesh=mesh, progress=False)
    model = Interleaved.from_hub(released, mesh=mesh, quantization_config=DEQUANTIZE, progress=False)
    model.save_pretrained(folder / "x")
    kept, whole = (load(released, dtype=torch.float32) for _ in range(2))
    parallelize(kept, mesh, param_dtype=torch.float32)
    weight = experts_of(kept)[1].down_proj
    assert weight.weight.to_local().shape == (E * H // 2, INNER // 2) and weight.scale.to_local().dtype == torch.uint8
    loss, wanted = (model(IDS, labels=IDS).loss for model in (kept, whole))
    torch.testing.assert_close(loss, wanted)
    loss.backward()
    with pytest.raises(CheckpointError, match="quantised and sharded"):
        kept.save_pretrained(folder / "y")


@pytest.mark.slow
def test_several_processes(released, tmp_path):
    """Dequantised each reads its rows; kept, the bytes are sharded after loading."""
    on_ranks(tmp_path, lambda: work_on_two_ranks(released, tmp_path))
    wanted = load(released, DEQUANTIZE).save_pretrained(tmp_path / "y")
    assert same(stored(tmp_path / "x"), stored(wanted))


def test_it_is_converted_to_bf16(released, tmp_path, monkeypatch):
    """Which is also how adapters are merged into it."""
    monkeypatch.setitem(ligermodels.arch.ARCHS, "mixtral", Interleaved)
    facts = inspect(released)
    assert facts.problem is None and facts.dtypes["MXFP4"] == 2 * E * 3 * INNER * H
    convert(released, tmp_path / "x")
    wanted = load(released, DEQUANTIZE).save_pretrained(tmp_path / "y")
    assert same(stored(tmp_path / "x"), stored(wanted))
    assert "quantization_config" not in json.loads((tmp_path / "x" / "config.json").read_text())
    assert torch.equal(load(tmp_path / "x")(IDS).logits, load(wanted)(IDS).logits)


def without(name):
    return lambda tensors: tensors.pop(name)


def nan(tensors):
    tensors[f"{DOWN}_scales"][0, 0, 0] = 255


def short(tensors):
    tensors[f"{DOWN}_blocks"] = tensors[f"{DOWN}_blocks"][..., :8].contiguous()


def other_size(tensors):
    for part in ("blocks", "scales"):
        tensors[f"{DOWN}_{part}"] = tensors[f"{DOWN}_{part}"][:, :32].contiguous()


@pytest.mark.parametrize("config", [None, DEQUANTIZE], ids=["kept", "dequantised"])
@pytest.mark.parametrize("damage, message", [
    (without(f"{GATE_UP}_scales"), r"gate_up_proj_blocks is torch\.uint8 \[3, 64, 2, 16\], .*_scales missing"),
    (without(f"{GATE_UP}_blocks"), r"gate_up_proj_blocks is missing"),
    (nan, r"down_proj_scales: .*255, which is NaN"),
    (short, r"down_proj_blocks is torch\.uint8 \[3, 64, 1, 8\]"),
    (other_size, r"down_proj is \[3, 32, 32\], the model has \[3, 32, 64\]"),
])  # fmt: skip
def test_damaged_checkpoints_are_refused(tmp_path, config, damage, message):
    tensors, values = released_tensors()
    damage(tensors)
    folder = write(tmp_path / "x", tensors, values, quant_method="mxfp4")
    with pytest.raises(CheckpointError, match=message):
        load(folder, config)


def test_what_cannot_be_honoured_raises(released, tmp_path):
    tensors, values = released_tensors()
    with pytest.raises(CheckpointError, match=r"(?s)gate_up_proj.*MXFP4; its config.json lacks"):
        load(write(tmp_path / "a", tensors, values))
    floats = load(released, DEQUANTIZE).save_pretrained(tmp_path / "floats")
    with pytest.raises(CheckpointError, match="no tensor is: remove"):
        load(write(floats, stored(floats), values, quant_method="mxfp4"))
    skipped = write(tmp_path / "b", tensors, values, quant_method="mxfp4", modules_to_not_convert=["experts"])
    with pytest.raises(CheckpointError, match="is quantised, and this quantisation leaves it"):
        load(skipped)
    with pytest.raises(InputError, match="quantised by mxfp4 already"):
        load(released, "nf4")
    plain = Mixtral.from_config(values, seed=0, device="cpu").save_pretrained(tmp_path / "c")
    model = ligermodels.load(plain, quantization_config="mxfp4", device="cpu", progress=False)
    assert len(experts_of(model)) == 2 and type(experts_of(model)[0].down_proj) is QuantizedLinear
    with pytest.raises(CheckpointError, match=r"w1\.weight is a part of .*gate_up_proj"):
        model.save_pretrained(tmp_path / "d")
    dense = ligermodels.Llama.from_config(CONFIG, seed=0, device="cpu").save_pretrained(tmp_path / "e")
    with pytest.raises(InputError, match=r"experts alone, and Llama has none.*'nf4'"):
        ligermodels.load(dense, quantization_config="mxfp4", device="cpu", progress=False)
    odd = Interleaved.from_config({**values, "intermediate_size": 48}, seed=0, device="cpu")
    with pytest.raises(InputError, match="K a multiple of 32"):
        load(odd.save_pretrained(tmp_path / "f"), "mxfp4")
