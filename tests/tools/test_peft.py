"""PEFT's adapters on our models, and our own LoRA: parameters, losses and files of PEFT on transformers' own model.

The expectation is transformers' model of the same checkpoint, wrapped, trained, saved and merged in the same test.
"""

import contextlib
import copy
import itertools
import json
import warnings

import pytest
import torch
from safetensors.torch import load_file, save_file

peft = pytest.importorskip("peft")

from ligermodels import CheckpointError  # noqa: E402
from ligermodels.cli import main  # noqa: E402
from ligermodels.integrations.transformers import AutoModelForCausalLM  # noqa: E402
from ligermodels.layers import LMHead  # noqa: E402
from ligermodels.libraries import integration  # noqa: E402
from ligermodels.training import adapters_off, add_lora, load_adapter, merge_lora, save_adapter  # noqa: E402
from tests.arch import test_toy_family  # noqa: E402
from tests.arch.toy_family import Toy  # noqa: E402
from tests.parallel.runs import run  # noqa: E402
from tests.tools import models  # noqa: E402
from tests.tools.models import ours_and_theirs, theirs  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning:peft.*"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning:peft.*"),
    pytest.mark.filterwarnings("ignore::FutureWarning:transformers.*"),
]

USUAL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
IDS = models.make_ids(2, 9)
MASK = torch.ones_like(IDS).index_fill(1, torch.arange(2), 0)  # prompts to continue, padded on the left
SEEN = [1, int(IDS[0, 0]), int(IDS[1, 4]), 60]
"""Tokens to train one by one: some of the batch, some not."""

# fp32 rounding: of losses near 5, where 1e-6 was seen, and of logits up to 10 after three large steps, where 2e-6 was
# seen. An adapter at the wrong place, a table that is not tied, a scale left out change over 1e-2.
LOSS = dict(rtol=0, atol=1e-5)
LOGITS = dict(rtol=1e-5, atol=2e-4)


def trainable(model):
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def wrap(model, config, seed=0):
    torch.manual_seed(seed)
    return peft.get_peft_model(model, copy.deepcopy(config))


def name_of(name):
    """Ours for PEFT's name of a parameter."""
    return name.removeprefix("base_model.model.").replace(".modules_to_save.default", "").replace(".default", "")


def copy_trained(source, target, name_of=str):
    """Both have the same names, by name_of, and shapes to train."""
    expected = {name_of(name): parameter for name, parameter in trainable(source).items()}
    assert {name: p.shape for name, p in trainable(target).items()} == {n: p.shape for n, p in expected.items()} != {}
    with torch.no_grad():
        for name, parameter in expected.items():
            target.get_parameter(name).copy_(parameter)


def losses(model, steps=3, ids=IDS, **inputs):
    model.train()
    optimizer, found = torch.optim.SGD(trainable(model).values(), lr=0.3), []
    for step in range(steps):
        torch.manual_seed(step)
        loss = model(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids, **inputs).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.detach())
    model.eval()
    return torch.stack(found)


@torch.no_grad()
def logits(model):
    return model(input_ids=IDS).logits


def greedy(model, ids=IDS, mask=MASK):
    return model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=6, do_sample=False).tolist()


def greedy_by_forwards(model, ids):
    with torch.no_grad():
        for _ in range(6):
            ids = torch.cat([ids, model(input_ids=ids).logits[:, -1:].argmax(-1)], 1)
    return ids.tolist()


def load_adapter_of_all(model, folder):
    """PEFT's model, after no warning that keys are missing."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        warnings.filterwarnings("ignore", message=".*tie_word_embeddings.*|Unsupported layer type")
        return peft.PeftModel.from_pretrained(model, folder)


def lora(**options):
    return peft.LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=8, **options)


def beside_q(**options):
    return lora(target_modules=["q_proj"], **options)


PROMPT = dict(task_type="CAUSAL_LM", num_virtual_tokens=3)
CASES = {
    "usual names, biases": ("qwen2", lora(target_modules=USUAL)),
    "all-linear, caps and windows": ("gemma2", lora(target_modules="all-linear")),
    "rsLoRA, dropout": ("llama", lora(target_modules=USUAL, use_rslora=True, lora_dropout=0.3)),
    "q and v of experts": ("mixtral", lora(target_modules=["q_proj", "v_proj"])),
    "down of one block": ("llama", lora(target_modules=["layers.1.mlp.down_proj"])),
    "a pattern": ("llama", lora(target_modules=r".*\.1\.mlp\.(gate|down)_proj")),
    "all-linear, experts": ("mixtral", lora(target_modules="all-linear")),
    "all-linear, joint": ("phi3", lora(target_modules="all-linear")),
    "experts": ("mixtral", beside_q(target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"])),
    "DoRA": ("llama", lora(target_modules=USUAL, use_dora=True)),
    "IA3": ("llama", peft.IA3Config(task_type="CAUSAL_LM")),
    "OFT": ("llama", peft.OFTConfig(task_type="CAUSAL_LM", oft_block_size=4, target_modules=USUAL)),
    "norms": ("gemma2", beside_q(modules_to_save=["input_layernorm", "norm"])),
    "head, tied and capped": ("gemma2", beside_q(modules_to_save=["lm_head"])),
    "table and head, untied": ("qwen2", beside_q(modules_to_save=["embed_tokens", "lm_head"])),
    "table and head, tied": ("llama", beside_q(modules_to_save=["embed_tokens", "lm_head"])),
    "table, kept tied": ("llama", beside_q(modules_to_save=["embed_tokens"], ensure_weight_tying=True)),
    "tokens, tied, scaled and capped": ("gemma2", beside_q(trainable_token_indices=SEEN)),
    "tokens of both, untied": ("qwen2", beside_q(trainable_token_indices={"embed_tokens": SEEN, "lm_head": [2, 5]})),
    "LoRA of a table that is scaled": ("gemma2", lora(target_modules=["q_proj", "embed_tokens"])),
    "prompt": ("llama", peft.PromptTuningConfig(**PROMPT)),
    "p-tuning": ("llama", peft.PromptEncoderConfig(**PROMPT, encoder_hidden_size=8)),
    "prefix, windows": ("gemma2", peft.PrefixTuningConfig(**PROMPT)),
    "prefix, projected": ("llama", peft.PrefixTuningConfig(**PROMPT, prefix_projection=True, encoder_hidden_size=8)),
}
"""Family and config."""


@pytest.mark.parametrize("case", CASES)
def test_adapters_train_travel_and_merge_as_on_transformers_model(folders, case, tmp_path):
    family, config = CASES[case]
    model, expected_model = (wrap(base, config) for base in ours_and_theirs(folders[family]))
    copy_trained(expected_model, model)
    torch.testing.assert_close(losses(model), losses(expected_model), **LOSS)
    expected = logits(expected_model)
    torch.testing.assert_close(logits(model), expected, **LOGITS)
    plain = logits(theirs(folders[family]))
    assert (expected[:, -plain.shape[1] :] - plain).abs().max() > 1e-2  # it has learnt something
    with model.disable_adapter(), expected_model.disable_adapter():
        torch.testing.assert_close(logits(model), logits(expected_model), **LOGITS)
    if config.is_prompt_learning:  # over PEFT 0.21's prompts, transformers 5.24 generates what its forwards do not
        assert greedy(model, IDS, torch.ones_like(IDS)) == greedy_by_forwards(expected_model, IDS)
    elif family != "mixtral":  # transformers' balancing loss does not know a mask over a cache
        assert greedy(model) == greedy(expected_model)

    # What one has saved gives the same on the other's base.
    model.save_pretrained(tmp_path / "ours")
    expected_model.save_pretrained(tmp_path / "theirs")
    files, expected_files = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("ours", "theirs"))
    assert {name: t.shape for name, t in files.items()} == {name: t.shape for name, t in expected_files.items()}
    said = [json.loads((tmp_path / name / "adapter_config.json").read_text()) for name in ("ours", "theirs")]
    for settings in said:
        settings["target_modules"] = sorted(settings.get("target_modules") or [])
    assert said[0] == said[1] and said[0]["base_model_name_or_path"] == str(folders[family])
    new_ours, new_theirs = ours_and_theirs(folders[family])
    on_theirs = load_adapter_of_all(new_theirs, tmp_path / "ours")
    on_ours = load_adapter_of_all(new_ours, tmp_path / "theirs")
    torch.testing.assert_close(logits(on_theirs), expected, **LOGITS)
    if config.is_prompt_learning:
        return torch.testing.assert_close(logits(on_ours), expected, **LOGITS)

    # Merged, and saved so: ours opens in transformers, with a head of its own where the adapter has untied it.
    on_ours = on_ours.merge_and_unload()  # without a forward before
    torch.testing.assert_close(logits(on_ours), logits(on_theirs.merge_and_unload()), **LOGITS)
    model, expected_model = model.merge_and_unload(), expected_model.merge_and_unload()
    merged = logits(expected_model)
    torch.testing.assert_close(logits(model), merged, **LOGITS)
    model.save_pretrained(tmp_path / "merged")
    settings = json.loads((tmp_path / "merged" / "config.json").read_text())
    assert settings["tie_word_embeddings"] == expected_model.config.tie_word_embeddings
    for opened in ours_and_theirs(tmp_path / "merged"):
        torch.testing.assert_close(logits(opened), merged, **LOGITS)
    return None


OURS = [
    "usual names, biases", "all-linear, caps and windows", "rsLoRA, dropout", "q and v of experts", "down of one block",
    "all-linear, joint", "DoRA", "norms", "table and head, untied",
]  # fmt: skip
"""The cases that `add_lora` has too."""


@pytest.mark.parametrize("case", OURS)
def test_add_lora_trains_travels_and_merges_as_peft(folders, case, tmp_path):
    family, config = CASES[case]
    targets = config.target_modules if isinstance(config.target_modules, str) else sorted(config.target_modules)
    expected_model = wrap(theirs(folders[family]), config)
    model = add_lora(
        models.ours(folders[family]), 4, 8, targets=targets, dropout=config.lora_dropout,
        rslora=config.use_rslora, dora=config.use_dora, modules_to_save=config.modules_to_save or [],
    )  # fmt: skip
    copy_trained(expected_model, model, name_of)
    torch.testing.assert_close(losses(model), losses(expected_model), **LOSS)
    expected = logits(expected_model)
    torch.testing.assert_close(logits(model), expected, **LOGITS)
    if config.modules_to_save is None:  # these are trained in place: the base is gone
        with adapters_off(model):
            assert torch.equal(logits(model), logits(models.ours(folders[family])))

    # The files: names, dtypes, the config; each loads on the other's base.
    expected_model.save_pretrained(tmp_path / "theirs")
    save_adapter(model, tmp_path / "ours")
    mine, wanted = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("ours", "theirs"))
    assert {n: (t.shape, t.dtype) for n, t in mine.items()} == {n: (t.shape, t.dtype) for n, t in wanted.items()}
    said, known = (json.loads((tmp_path / name / "adapter_config.json").read_text()) for name in ("ours", "theirs"))
    linears = [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
    ends = [one.pop("target_modules") for one in (said, known)]
    meant = [{name for name in linears if any(f".{name}".endswith(f".{end}") for end in some)} for some in ends]
    assert meant[0] == meant[1] == {name_of(name).split(".lora_")[0] for name in mine if "lora_" in name}
    assert (said.pop("target_parameters") or None) == (known["target_parameters"] or None)
    assert said == {name: known[name] for name in said}
    on_theirs = load_adapter_of_all(theirs(folders[family]), tmp_path / "ours")
    on_ours = load_adapter(models.ours(folders[family]), tmp_path / "theirs").eval()
    again = load_adapter(models.ours(folders[family]), tmp_path / "ours").eval()
    torch.testing.assert_close(logits(on_theirs), logits(model), **LOGITS)
    torch.testing.assert_close(logits(on_ours), expected, **LOGITS)
    assert torch.equal(logits(again), logits(model))

    # Trained on, merged, saved.
    torch.testing.assert_close(losses(on_ours, 2), losses(expected_model, 2), **LOSS)
    merged = logits(expected_model.merge_and_unload())
    torch.testing.assert_close(logits(merge_lora(on_ours)), merged, **LOGITS)
    on_ours.save_pretrained(tmp_path / "merged")
    torch.testing.assert_close(logits(theirs(tmp_path / "merged")), merged, **LOGITS)


def test_patterns_of_other_files_count(folders, tmp_path):
    patterns = dict(rank_pattern={"q_proj": 2, "v": 7, r"layers\.1\.mlp\.up_proj": 6}, alpha_pattern={"v_proj": 3})
    expected = wrap(theirs(folders["llama"]), lora(target_modules=USUAL, init_lora_weights=False, **patterns))
    expected.save_pretrained(tmp_path / "theirs")
    ours = load_adapter(models.ours(folders["llama"]), tmp_path / "theirs").eval()
    torch.testing.assert_close(logits(ours), logits(expected), **LOGITS)
    save_adapter(ours, tmp_path / "ours")
    again = peft.PeftModel.from_pretrained(theirs(folders["llama"]), tmp_path / "ours")
    torch.testing.assert_close(logits(again), logits(expected), **LOGITS)


def lose_a_tensor(folder):
    tensors = load_file(folder / "adapter_model.safetensors")
    tensors.pop("base_model.model.model.layers.1.self_attn.v_proj.lora_B.weight")
    save_file(tensors, folder / "adapter_model.safetensors")


def with_settings(**changes):
    def change(folder):
        path = folder / "adapter_config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return change


@pytest.mark.parametrize("family, change, message", [
    ("qwen2", with_settings(lora_bias=True), "lora_bias"),
    ("qwen2", with_settings(bias="all"), "bias='all'"),
    ("qwen2", with_settings(trainable_token_indices=[1]), "trainable_token_indices"),
    ("qwen2", with_settings(r=5), "expected"),
    ("phi3", lambda folder: None, r"self_attn\.q_proj, which is not there"),
    ("qwen2", lose_a_tensor, "partial copy"),
], ids=lambda value: value if isinstance(value, str) else "")  # fmt: skip
def test_files_that_do_not_fit_are_refused_by_name(folders, tmp_path, family, change, message):
    adapted = add_lora(models.ours(folders["qwen2"]), 4, 8, targets=["q_proj", "v_proj"])
    change(save_adapter(adapted, tmp_path / "a"))
    model = models.ours(folders[family])
    before = [(name, parameter.requires_grad) for name, parameter in model.named_parameters()]
    with pytest.raises(CheckpointError, match=message):
        load_adapter(model, tmp_path / "a")
    assert [(name, parameter.requires_grad) for name, parameter in model.named_parameters()] == before


@pytest.mark.parametrize("options, part", [
    (dict(target_modules=["q_proj", "lm_head"]), "adapter for lm_head"),
    (dict(target_modules=["q_proj", "embed_tokens"]), "adapter for model.embed_tokens"),
    (dict(target_modules=["q_proj"], bias="all"), "bias='all'"),
])  # fmt: skip
def test_what_only_a_merge_can_use_is_named_with_the_command_that_does(folders, tmp_path, options, part):
    base, adapter, output = folders["qwen2"], tmp_path / "adapter", tmp_path / "merged"
    expected = wrap(theirs(base), lora(init_lora_weights=False, **options))
    expected.save_pretrained(adapter)
    with pytest.raises(CheckpointError, match=rf"{part}.*\n.*`ligermodels convert BASE OUTPUT --adapter ADAPTER`"):
        load_adapter(models.ours(base), adapter)
    assert main(["convert", str(base), str(output), "--adapter", str(adapter)]) == 0
    torch.testing.assert_close(logits(models.ours(output)), logits(expected), **LOGITS)


@pytest.mark.parametrize("early", [False, True])
def test_gradient_checkpointing(folders, early):
    """The first block's input has no gradient where the table is frozen, unless PEFT asks for it."""
    expected = losses(wrap(theirs(folders["llama"]), lora(target_modules=USUAL)))
    model = models.ours(folders["llama"])
    if early:
        model.gradient_checkpointing_enable()
    model = wrap(model, lora(target_modules=USUAL))
    if not early:
        model.gradient_checkpointing_enable()
    model.enable_input_require_grads()
    torch.testing.assert_close(losses(model), expected, **LOSS)
    assert model.is_gradient_checkpointing


def registered(config):
    config = copy.deepcopy(config)
    config._register_custom_module({LMHead: peft.tuners.lora.Linear})
    return config


@pytest.mark.parametrize("family", ["qwen2", "gemma2"])
@pytest.mark.parametrize("make, prepared", [
    (models.ours, registered), (AutoModelForCausalLM.from_pretrained, copy.deepcopy),
], ids=["native", "integration"])  # fmt: skip
def test_lora_on_the_head(folders, family, make, prepared, tmp_path):
    config = lora(target_modules=["q_proj", "lm_head"], init_lora_weights=False)
    expected = wrap(theirs(folders[family]), config)
    model = wrap(make(folders[family]), prepared(config))
    copy_trained(expected, model)
    assert any("lm_head.lora_B" in name for name in trainable(model))
    torch.testing.assert_close(losses(model), losses(expected), **LOSS)
    torch.testing.assert_close(logits(model), logits(expected), **LOGITS)
    model.save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(theirs(folders[family]), tmp_path)
    torch.testing.assert_close(logits(again), logits(expected), **LOGITS)
    torch.testing.assert_close(logits(model.merge_and_unload()), logits(expected.merge_and_unload()), **LOGITS)


def test_a_whole_model_by_the_name_of_its_adapter(folders, tmp_path):
    """And "all-linear" leaves the head of the integration alone, as that of transformers."""
    model = wrap(AutoModelForCausalLM.from_pretrained(folders["qwen2"]), lora(target_modules="all-linear"))
    assert (
        trainable(model).keys() == trainable(wrap(theirs(folders["qwen2"]), lora(target_modules="all-linear"))).keys()
    )
    model.save_pretrained(tmp_path)
    assert peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path).peft_config["default"].r == 4


@pytest.mark.parametrize(
    "make, inputs", [(models.ours, dict(return_logits=True)), (AutoModelForCausalLM.from_pretrained, {})]
)
def test_cpt_which_computes_the_loss_from_the_logits(folders, make, inputs):
    config = peft.CPTConfig(
        task_type="CAUSAL_LM", cpt_token_ids=[5, 9, 11, 20, 30], cpt_mask=[1] * 5, cpt_tokens_type_mask=[1, 2, 2, 3, 4],
        opt_weighted_loss_type="decay", opt_loss_decay_factor=0.9, opt_projection_epsilon=3.0,
    )  # fmt: skip
    model, expected = (wrap(base, config) for base in (make(folders["gemma2"]), theirs(folders["gemma2"])))
    torch.testing.assert_close(losses(model, **inputs), losses(expected), **LOSS)
    torch.testing.assert_close(logits(model), logits(expected), **LOGITS)


def test_an_adapter_trains_under_parallelize_as_in_one_process(tmp_path):
    """LoRA is refused under tensor parallel."""
    jobs = [(split, "adapted", dict(split=split)) for split in ("fsdp2", "cp2", "tp2")]
    found = run(2, tmp_path, [*jobs, ("lora", "refused", dict(model=("llama", {}), split="tp2", lora=True))])
    assert all("peft.tuners.lora" in said and "in place of a projection" in said for said in found.pop("lora"))
    for errors in itertools.chain(*found.values()):
        assert max(errors.values()) <= 2e-5  # fp32, sums of some hundred products in another order


@pytest.mark.parametrize("change, autocast, runs_as_one", [
    ({}, False, True),
    ({}, True, True),
    ("16 bits", False, True),
    (dict(use_rslora=True), False, True),
    (dict(lora_dropout=0.5), False, False),
    (dict(use_dora=True), False, False),
    (dict(lora_bias=True), False, False),
    ("off", False, False),
    ("two", False, False),
    ("merged", False, False),
], ids=str)  # fmt: skip
def test_plain_adapters_run_in_the_ops_of_their_layers(folders, change, autocast, runs_as_one, monkeypatch):
    """With the numbers of PEFT's modules, which run where an adapter is anything else."""
    model = ours_and_theirs(folders["llama"])[0]
    changes = change if isinstance(change, dict) else {}
    model = wrap(model, peft.LoraConfig(r=4, target_modules=USUAL, task_type="CAUSAL_LM", **changes)).train()
    in_16_bits = autocast or change == "16 bits"
    if in_16_bits:
        model.base_model.model.bfloat16()
    if change == "two":
        model.add_adapter("other", peft.LoraConfig(r=2, target_modules=USUAL, task_type="CAUSAL_LM"))
        model.base_model.set_adapter(["default", "other"])
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.05)
        if "lora_" in name and in_16_bits:  # as PEFT leaves them
            parameter.data = parameter.data.float()
    if change == "merged":
        model.merge_adapter()
    ours = integration("peft")
    found, read = [], ours.operand_of
    for one in (lambda module: (found.append(read(module)), found[-1])[1], lambda module: None):
        monkeypatch.setattr(ours, "operand_of", one)
        model.zero_grad()
        torch.manual_seed(0)
        off = model.disable_adapter() if change == "off" else contextlib.nullcontext()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast), off:
            loss = model(IDS, labels=IDS).loss
        if loss.requires_grad:
            loss.backward()
        found.append({"loss": loss.detach(), **{n: p.grad for n, p in trainable(model).items() if p.grad is not None}})
    *operands, fused, alone = found
    assert {operand is not None for operand in operands} == {runs_as_one}
    assert fused.keys() == alone.keys() and (len(fused) > 20 or change in ("off", "merged"))
    for name, value in alone.items():
        assert (fused[name] - value).norm() <= (0.1 if in_16_bits else 1e-5) * value.norm(), name


def test_a_users_family_trains_saves_and_merges_adapters(tmp_path):
    """With layers of its own, a carry and buffers."""
    folder, ids = test_toy_family.write(tmp_path), test_toy_family.IDS
    adapters = peft.LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False)
    model = wrap(Toy.from_hub(folder, progress=False), adapters).train()
    model(ids, labels=ids).loss.backward()
    assert len(trainable(model)) == 16 and all(parameter.grad.any() for parameter in trainable(model).values())
    logits, tokens = model.eval()(ids).logits, model.generate(input_ids=ids, max_new_tokens=6)
    model.save_pretrained(tmp_path / "adapter")
    again = peft.PeftModel.from_pretrained(Toy.from_hub(folder, progress=False), tmp_path / "adapter")
    assert torch.equal(again(ids).logits, logits)
    merged = model.merge_and_unload().save_pretrained(tmp_path / "merged")
    merged = Toy.from_hub(merged, progress=False)
    torch.testing.assert_close(merged(ids).logits, logits, **LOGITS)
    assert torch.equal(merged.generate(ids, max_new_tokens=6), tokens)
