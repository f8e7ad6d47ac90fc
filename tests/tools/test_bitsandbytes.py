"""bitsandbytes quantises our linear modules as it does transformers': at load, by converters, under adapters, saved."""

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn

import ligermodels
from ligermodels import CheckpointError, ConfigError, InputError
from ligermodels.checkpoint.weights import same_bits
from tests.tools import models
from tests.tools.models import FAMILIES, make_ids, theirs

bnb = pytest.importorskip("bitsandbytes")
pytest.importorskip("accelerate")
pytestmark = pytest.mark.filterwarnings("ignore:MatMul8bitLt")

SETTINGS = {
    "nf4": dict(load_in_4bit=True, bnb_4bit_quant_type="nf4"),
    "fp4": dict(load_in_4bit=True),
    "nested": dict(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
        bnb_4bit_quant_storage=torch.bfloat16,
    ),
    "int8": dict(load_in_8bit=True),
}
# Equal integers on both sides; what is left is fp32's rounding in norms, softmax and head, as without quantisation.
FP32 = dict(rtol=1e-5, atol=1e-5)


def quantised(model):
    return {name for name, module in model.named_modules() if type(module).__module__.startswith("bitsandbytes")}


def ours(folder, **options):
    return ligermodels.load(folder, device="cpu", progress=False, **options)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    made = tmp_path_factory.mktemp("models")
    sizes = dict(hidden_size=64, intermediate_size=128)  # on some CPUs bitsandbytes takes multiples of its 64 alone
    return {family: models.write_checkpoint(made / family, family, **sizes) for family in FAMILIES}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("settings", SETTINGS)
def test_loading_quantises_what_transformers_quantises(folders, family, settings):
    config = transformers.BitsAndBytesConfig(**SETTINGS[settings])
    hf = theirs(folders[family], quantization_config=config, device_map="cpu")
    ids = make_ids(2, 12)
    expected, plain = hf(ids).logits, ours(folders[family])(ids).logits
    for given in (config, SETTINGS[settings]):
        model = ours(folders[family], quantization_config=given)
        assert quantised(model) == quantised(hf) and len(quantised(model)) == 14
        torch.testing.assert_close(model(ids).logits, expected, **FP32)
        assert (expected - plain).abs().max() > 100 * FP32["atol"]
        state, wanted = model.state_dict(), hf.state_dict()
        if model.config.tie_word_embeddings:
            del wanted["lm_head.weight"]
        assert state.keys() == wanted.keys()
        assert all(same_bits(state[name], wanted[name]) for name in state)


def test_modules_are_skipped_by_name(folders):
    options = dict(load_in_4bit=True, llm_int8_skip_modules=["lm_head", "down_proj", "model.layers.1", "q_.roj"])
    hf = theirs(folders["qwen2"], quantization_config=transformers.BitsAndBytesConfig(**options), device_map="cpu")
    model = ours(folders["qwen2"], quantization_config=options)
    assert quantised(model) == quantised(hf)
    assert {"model.layers.0.mlp.up_proj", "model.layers.0.self_attn.q_proj"} <= quantised(model)
    assert not any("down_proj" in name or "layers.1" in name for name in quantised(model))
    ids = make_ids(2, 12)
    torch.testing.assert_close(model(ids).logits, hf(ids).logits, **FP32)


def test_a_device_never_holds_two_weights_that_wait_to_be_quantised(folders, monkeypatch):
    seen = []
    convert = ligermodels.checkpoint.quantization.BitsAndBytes.convert

    def watched(self, linear, weight, bias, device):
        made = convert(self, linear, weight, bias, device)
        seen.append((linear.weight.is_meta, made.weight.dtype))
        return made

    monkeypatch.setattr(ligermodels.checkpoint.quantization.BitsAndBytes, "convert", watched)
    ours(folders["llama"], quantization_config=SETTINGS["nf4"])
    assert seen == [(True, torch.uint8)] * 14


@pytest.mark.parametrize("family", FAMILIES)
def test_the_converter_of_transformers_finds_the_same_modules(folders, family):
    from transformers.integrations.bitsandbytes import replace_with_bnb_linear

    config = transformers.BitsAndBytesConfig(**SETTINGS["nf4"])
    made = [
        replace_with_bnb_linear(model, modules_to_not_convert=["lm_head"], quantization_config=config)
        for model in (ours(folders[family]), theirs(folders[family]))
    ]
    assert quantised(made[0]) == quantised(made[1]) and len(quantised(made[0])) == 14


def test_modules_converted_by_hand_compute_the_same(folders):
    """What a user does without transformers: each linear replaced, its weight quantised by `.to`."""

    def convert(model):
        for name, linear in list(model.named_modules()):
            if type(linear) is nn.Linear and "lm_head" not in name:
                made = bnb.nn.Linear4bit(
                    linear.in_features, linear.out_features, linear.bias is not None, torch.float32, quant_type="nf4"
                )
                made.load_state_dict(linear.state_dict())
                model.set_submodule(name, made.to("cpu"))
        return model

    model, hf = convert(ours(folders["qwen2"])), convert(theirs(folders["qwen2"]))
    ids = make_ids(2, 12)
    torch.testing.assert_close(model(ids).logits, hf(ids).logits, **FP32)
    with pytest.raises(CheckpointError, match=r"q_proj\.weight is quantised|not the model's"):
        model.save_pretrained(folders["qwen2"].parent / "by-hand")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("settings", ["nested", "int8"])
def test_qlora_trains_as_on_transformers(folders, family, settings):
    peft = pytest.importorskip("peft")
    losses = []
    for load in (ours, theirs):
        model = load(folders[family], quantization_config=transformers.BitsAndBytesConfig(**SETTINGS[settings]))
        model = peft.prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
        torch.manual_seed(0)
        model = peft.get_peft_model(model, peft.LoraConfig(r=4, task_type="CAUSAL_LM", target_modules="all-linear"))
        kinds = {type(module).__name__ for module in model.modules() if isinstance(module, peft.tuners.lora.LoraLayer)}
        assert kinds == {"Linear8bitLt" if settings == "int8" else "Linear4bit"}
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
        losses.append([])
        ids = make_ids(4, 12)
        for _ in range(5):
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[-1].append(loss.item())
    # Five steps of AdamW carry the roundings of fp32 (int8: of its fp16 sums) from one to the next.
    torch.testing.assert_close(*(torch.tensor(run) for run in losses), rtol=1e-3, atol=0)
    assert losses[0][-1] < losses[0][0]


def test_trainer_takes_a_quantised_model_with_an_adapter_and_no_other(folders, tmp_path):
    peft = pytest.importorskip("peft")
    losses = []
    options = dict(output_dir=tmp_path, max_steps=2, report_to=[], use_cpu=True, logging_steps=1, disable_tqdm=True)
    arguments = transformers.TrainingArguments(**options, per_device_train_batch_size=4, save_strategy="no")
    for load in (ours, theirs):
        model = load(folders["llama"], quantization_config=transformers.BitsAndBytesConfig(**SETTINGS["nf4"]))
        with pytest.raises(ValueError, match="purely quantized"):
            transformers.Trainer(model, arguments)
        torch.manual_seed(0)
        model = peft.get_peft_model(model, peft.LoraConfig(r=4, task_type="CAUSAL_LM", target_modules=["q_proj"]))
        trainer = transformers.Trainer(model, arguments, train_dataset=models.Texts())
        trainer.train()
        losses.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
    torch.testing.assert_close(*(torch.tensor(run) for run in losses), rtol=1e-5, atol=0)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("settings", SETTINGS)
def test_a_quantised_model_is_saved_as_transformers_saves_it(folders, family, settings, tmp_path):
    config = transformers.BitsAndBytesConfig(**SETTINGS[settings])
    model = ours(folders[family], quantization_config=config)
    hf = theirs(folders[family], quantization_config=config, device_map="cpu")
    ids = make_ids(2, 12)
    logits, expected = model(ids).logits, hf(ids).logits  # before saving: bitsandbytes casts biases in its forward
    model.save_pretrained(tmp_path / "ours", max_shard_size="50KB")
    hf.save_pretrained(tmp_path / "theirs")
    written = {}
    for shard in (tmp_path / "ours").glob("*.safetensors"):
        written |= load_file(shard)
    wanted = load_file(tmp_path / "theirs" / "model.safetensors")
    assert written.keys() == wanted.keys()
    assert all(same_bits(written[name], wanted[name]) for name in written)
    found, wanted_config = (
        json.loads((tmp_path / name / "config.json").read_text())["quantization_config"] for name in ("ours", "theirs")
    )
    assert found == {key: value for key, value in wanted_config.items() if not key.startswith("_")}
    for folder in ("ours", "theirs"):
        again = ours(tmp_path / folder)
        assert quantised(again) == quantised(model) and again.is_quantized
        assert torch.equal(again(ids).logits, logits)
    assert torch.equal(theirs(tmp_path / "ours", device_map="cpu")(ids).logits, expected)
    ours(tmp_path / "ours").save_pretrained(tmp_path / "twice")
    twice = load_file(tmp_path / "twice" / "model.safetensors")
    assert all(same_bits(twice[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize("settings", ["nf4", "int8"])
def test_a_model_that_transformers_quantised_is_ours_and_saved(folders, settings, tmp_path):
    hf = theirs(
        folders["qwen2"], quantization_config=transformers.BitsAndBytesConfig(**SETTINGS[settings]), device_map="cpu"
    )
    model = ligermodels.from_transformers(hf)
    ids = make_ids(2, 12)
    torch.testing.assert_close(model(ids).logits, hf(ids).logits, **FP32)
    model.save_pretrained(tmp_path)
    assert torch.equal(ours(tmp_path)(ids).logits, model(ids).logits)


def test_what_cannot_be_saved_says_so(folders, tmp_path):
    peft = pytest.importorskip("peft")
    model = ours(folders["llama"], quantization_config=SETTINGS["nf4"])
    with pytest.raises(CheckpointError, match="leave state_dict out"):
        model.save_pretrained(tmp_path / "x", state_dict=model.state_dict())
    adapted = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"]))
    with pytest.raises(CheckpointError, match="merge them first"):
        model.save_pretrained(tmp_path / "x")
    merged = adapted.merge_and_unload()
    merged.save_pretrained(tmp_path / "x")
    ids = make_ids(1, 8)
    with torch.no_grad():  # which decides how bitsandbytes computes on some CPUs
        assert torch.equal(ours(tmp_path / "x")(ids).logits, merged(ids).logits)


@pytest.fixture(scope="module")
def saved(folders, tmp_path_factory):
    made = tmp_path_factory.mktemp("saved")
    for name in ("nf4", "int8"):
        ours(folders["qwen2"], quantization_config=SETTINGS[name]).save_pretrained(made / name)
    return made


Q = "model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    "settings, damage, words",
    [
        ("nf4", lambda t: t.pop(f"{Q}.weight.absmax"), "q_proj is no module"),
        ("nf4", lambda t: t.pop(f"{Q}.weight"), "q_proj is no module"),
        ("nf4", lambda t: t.pop(f"{Q}.bias"), "has a bias"),
        ("nf4", lambda t: t.update({f"{Q}.weight": t[f"{Q}.weight"][:7]}), "holds 7 bytes"),
        ("nf4", lambda t: t.update({f"{Q}.weight.quant_state.bitsandbytes__nf4": torch.zeros(9, dtype=torch.uint8)}),
         "q_proj is no module"),
        ("int8", lambda t: t.update({f"{Q}.SCB": t[f"{Q}.SCB"][:5]}), "its SCB"),
        ("int8", lambda t: t.update({f"{Q}.weight": t[f"{Q}.weight"][:, :5].contiguous()}), "its weight is torch.int8"),
        ("int8", lambda t: [t.pop(name) for name in list(t) if name.startswith(Q)], "missing"),
    ],
)  # fmt: skip
def test_damage_is_told(saved, tmp_path, settings, damage, words):
    tensors = load_file(saved / settings / "model.safetensors")
    damage(tensors)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_text((saved / settings / "config.json").read_text())
    with pytest.raises(CheckpointError, match=words):
        ours(tmp_path)


def test_settings_are_checked(folders, saved, tmp_path):
    for given, words in (
        (dict(load_in_4bit=True, load_in_8bit=True), "one of load_in_4bit"),
        (dict(load_in_4bit=True, bnb_4bit_typ="nf4"), "no 'bnb_4bit_typ'; it has .*bnb_4bit_quant_type"),
        (dict(load_in_4bit=True, bnb_4bit_quant_type="nf5"), "nf5"),
        (dict(load_in_4bit=True, bnb_4bit_compute_dtype="b16"), "b16"),
        (dict(load_in_8bit=True, llm_int8_has_fp16_weight=True), "not supported; leave it out"),
        (dict(quant_method="gptq", bits=4), "'gptq'"),
        (transformers.GPTQConfig(bits=4), "'gptq'"),
    ):
        with pytest.raises(InputError, match=words):
            ours(folders["llama"], quantization_config=given)
    config = json.loads((saved / "nf4" / "config.json").read_text())
    config["quantization_config"]["bnb_4bit_quant_type"] = "nf5"
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").write_bytes((saved / "nf4" / "model.safetensors").read_bytes())
    with pytest.raises(ConfigError, match=r"quantised by bitsandbytes: .*nf5"):
        ours(tmp_path)
    with pytest.warns(UserWarning, match="quantised already: its own settings"):
        assert ours(saved / "nf4", quantization_config=dict(load_in_8bit=True)).is_loaded_in_4bit
    with pytest.raises(InputError, match=r"cannot be offloaded, and device_map puts model\.layers\.0"):
        ligermodels.load(
            folders["llama"],
            progress=False,
            quantization_config=SETTINGS["nf4"],
            device_map={"model.embed_tokens": "cpu", "model": "disk", "lm_head": "cpu"},
        )


@pytest.mark.parametrize(
    "damage, words",
    [
        (lambda tensors: tensors[f"{Q}.weight"][3].fill_(float("nan")), "q_proj holds NaN or infinity"),
        (lambda tensors: tensors.pop(f"{Q}.weight"), rf"missing \(1 of 27\): {Q}"),
        (lambda tensors: tensors.update({f"{Q}.weight": torch.ones(3, 3)}), rf"wrong shape \(1\): {Q}"),
    ],
    ids=["nan", "missing", "shape"],
)
def test_a_weight_that_cannot_be_quantised(folders, tmp_path, damage, words):
    tensors = load_file(folders["qwen2"] / "model.safetensors")
    damage(tensors)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_text((folders["qwen2"] / "config.json").read_text())
    with pytest.raises(CheckpointError, match=words):
        ours(tmp_path, quantization_config=SETTINGS["nf4"])


def test_without_the_library_the_error_says_what_to_install(folders, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "bitsandbytes", None)
    with pytest.raises(InputError, match="pip install -U bitsandbytes"):
        ours(folders["llama"], quantization_config=SETTINGS["nf4"])


@pytest.mark.gpu
@pytest.mark.parametrize("settings", SETTINGS)
def test_on_a_gpu(tmp_path, settings):
    """Outputs of transformers' model, and memory: of all weights that wait, one at a time is on the GPU."""
    sizes = dict(hidden_size=512, intermediate_size=2048, num_hidden_layers=8, initializer_range=0.02)
    folder = models.write_checkpoint(tmp_path, "llama", **sizes)
    config = transformers.BitsAndBytesConfig(**SETTINGS[settings])
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    model = ligermodels.load(folder, quantization_config=config, dtype=torch.float32, progress=False)
    held, peak = torch.cuda.memory_allocated() - before, torch.cuda.max_memory_allocated() - before
    assert model.device.type == "cuda"
    largest = 2048 * 512 * 4
    assert peak < held + 4 * largest  # the weight, its integers, and what bitsandbytes needs to make them
    hf = theirs(folder, quantization_config=config, dtype=torch.float32)
    ids = make_ids(2, 12).cuda()
    with torch.no_grad():
        error, plain = (model(ids).logits - hf(ids).logits).norm(), hf(ids).logits.norm()
    # fp32 in eight layers; where bitsandbytes computes in bf16 or fp16, a few of their roundings, 2^-9 and 2^-11.
    assert error < (1e-4 if settings in ("nf4", "fp4") else 0.02) * plain
