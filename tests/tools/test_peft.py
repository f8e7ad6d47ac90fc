"""PEFT's adapters on our models: the parameters, the losses and the files that transformers' own model gives.

The expectation is transformers' model of the same checkpoint, wrapped, trained, saved and merged in the same test.
"""

import copy
import json
import warnings

import pytest
import torch
from safetensors.torch import load_file

peft = pytest.importorskip("peft")

from ligermodels.integrations.transformers import AutoModelForCausalLM  # noqa: E402
from ligermodels.layers import LMHead  # noqa: E402
from tests.tools import models  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning:peft.*"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning:peft.*"),
    pytest.mark.filterwarnings("ignore::FutureWarning:transformers.*"),
]

USUAL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
IDS = models.make_ids(2, 9)
SEEN = [1, int(IDS[0, 0]), int(IDS[1, 4]), 60]
"""Tokens to train one by one: some of the batch, some not."""

# fp32 rounding: of losses near 5, where 1e-6 was seen, and of logits up to 10 after three large steps, where 2e-6 was
# seen. An adapter at the wrong place, a table that is not tied, a scale left out change over 1e-2.
LOSS = dict(rtol=0, atol=1e-5)
LOGITS = dict(rtol=1e-5, atol=2e-4)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """{family: its checkpoint}"""
    return {family: models.write_checkpoint(tmp_path_factory.mktemp(family), family) for family in models.OWN}


def both(folders, family):
    """(ours, transformers') of the family's checkpoint."""
    return models.ours(folders[family]), models.theirs(folders[family], attn_implementation="eager")


def trainable(model):
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def wrap(model, config, seed=0):
    torch.manual_seed(seed)
    return peft.get_peft_model(model, copy.deepcopy(config))


def wrapped_alike(folders, family, config):
    """Both models wrapped, ours with the other's adapter; both have the same names and shapes to train."""
    ours, theirs = (wrap(model, config) for model in both(folders, family))
    mine, expected = trainable(ours), trainable(theirs)
    assert {name: p.shape for name, p in mine.items()} == {name: p.shape for name, p in expected.items()} != {}
    with torch.no_grad():
        for name, parameter in ours.named_parameters():
            if name in expected:
                parameter.copy_(expected[name])
    return ours, theirs


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


def lora(**options):
    return peft.LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=8, **options)


def beside_q(**options):
    return lora(target_modules=["q_proj"], **options)


CASES = {
    "usual names, biases": ("qwen2", lora(target_modules=USUAL)),
    "a pattern": ("llama", lora(target_modules=r".*\.1\.mlp\.(gate|down)_proj")),
    "None": ("llama", lora()),
    "all-linear": ("llama", lora(target_modules="all-linear")),
    "all-linear, experts": ("mixtral", lora(target_modules="all-linear")),
    "all-linear, packed": ("phi3", lora(target_modules="all-linear")),
    "experts": ("mixtral", beside_q(target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"])),
    "DoRA": ("llama", lora(target_modules=USUAL, use_dora=True)),
    "IA3": ("llama", peft.IA3Config(task_type="CAUSAL_LM")),
    "OFT": ("llama", peft.OFTConfig(task_type="CAUSAL_LM", oft_block_size=4, target_modules=USUAL)),
    "norms": ("gemma2", beside_q(modules_to_save=["input_layernorm", "norm"])),
    "head, tied and capped": ("gemma2", beside_q(modules_to_save=["lm_head"])),
    "table and head, tied": ("llama", beside_q(modules_to_save=["embed_tokens", "lm_head"])),
    "table, kept tied": ("llama", beside_q(modules_to_save=["embed_tokens"], ensure_weight_tying=True)),
    "tokens, tied, scaled and capped": ("gemma2", beside_q(trainable_token_indices=SEEN)),
    "tokens of both, untied": ("qwen2", beside_q(trainable_token_indices={"embed_tokens": SEEN, "lm_head": [2, 5]})),
    "LoRA of a table that is scaled": ("gemma2", lora(target_modules=["q_proj", "embed_tokens"])),
}
"""Family and config."""


@pytest.mark.parametrize("case", CASES)
def test_adapters_train_travel_and_merge_as_on_transformers_model(folders, case, tmp_path):
    family, config = CASES[case]
    ours, theirs = wrapped_alike(folders, family, config)
    torch.testing.assert_close(losses(ours), losses(theirs), **LOSS)
    expected = logits(theirs)
    torch.testing.assert_close(logits(ours), expected, **LOGITS)
    assert (expected - logits(both(folders, family)[1])).abs().max() > 1e-2  # it has learnt something
    with ours.disable_adapter(), theirs.disable_adapter():
        torch.testing.assert_close(logits(ours), logits(theirs), **LOGITS)

    # What one has saved gives the same on the other's base.
    ours.save_pretrained(tmp_path / "ours")
    theirs.save_pretrained(tmp_path / "theirs")
    mine, expected_files = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("ours", "theirs"))
    assert {name: t.shape for name, t in mine.items()} == {name: t.shape for name, t in expected_files.items()}
    new_ours, new_theirs = both(folders, family)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # that keys are missing is a warning
        warnings.filterwarnings("ignore", message=".*tie_word_embeddings.*|Unsupported layer type")
        on_theirs = peft.PeftModel.from_pretrained(new_theirs, tmp_path / "ours")
        on_ours = peft.PeftModel.from_pretrained(new_ours, tmp_path / "theirs")
    torch.testing.assert_close(logits(on_theirs), expected, **LOGITS)
    torch.testing.assert_close(logits(on_ours), expected, **LOGITS)

    # Merged, and saved so: ours opens in transformers, with a head of its own where the adapter has untied it.
    ours, theirs, on_ours = (model.merge_and_unload() for model in (ours, theirs, on_ours))
    merged = logits(theirs)
    torch.testing.assert_close(logits(ours), merged, **LOGITS)
    torch.testing.assert_close(logits(on_ours), merged, **LOGITS)  # without a forward in between
    ours.save_pretrained(tmp_path / "merged")
    said = json.loads((tmp_path / "merged" / "config.json").read_text())
    assert said["tie_word_embeddings"] == theirs.config.tie_word_embeddings
    for model in (models.theirs(tmp_path / "merged", attn_implementation="eager"), models.ours(tmp_path / "merged")):
        torch.testing.assert_close(logits(model), merged, **LOGITS)


def test_the_adapter_names_its_base(folders, tmp_path):
    ours, theirs = wrapped_alike(folders, "llama", lora())
    for name, model in (("ours", ours), ("theirs", theirs)):
        model.save_pretrained(tmp_path / name)
    said = [json.loads((tmp_path / name / "adapter_config.json").read_text()) for name in ("ours", "theirs")]
    assert said[0].pop("target_modules").sort() == said[1].pop("target_modules").sort()
    assert said[0] == said[1] and said[0]["base_model_name_or_path"] == str(folders["llama"])
    assert peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "ours").peft_config["default"].r == 4


@pytest.mark.parametrize("family", models.FAMILIES)
def test_gradient_checkpointing(folders, family):
    """The first block's input has no gradient where the table is frozen, unless PEFT asks for it."""
    expected = losses(wrap(models.theirs(folders[family]), lora(target_modules=USUAL)))
    for early in (False, True):
        model = models.ours(folders[family])
        model.gradient_checkpointing_enable() if early else None
        model = wrap(model, lora(target_modules=USUAL))
        model.gradient_checkpointing_enable() if not early else None
        model.enable_input_require_grads()
        torch.testing.assert_close(losses(model), expected, **LOSS)
        assert model.is_gradient_checkpointing


# ---- LoRA on the head ----


def registered(config):
    config = copy.deepcopy(config)
    config._register_custom_module({LMHead: peft.tuners.lora.Linear})
    return config


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma2"])
@pytest.mark.parametrize("make, prepared", [
    (models.ours, registered), (AutoModelForCausalLM.from_pretrained, copy.deepcopy),
], ids=["native", "integration"])  # fmt: skip
def test_lora_on_the_head(folders, family, make, prepared, tmp_path):
    config = lora(target_modules=["q_proj", "lm_head"], init_lora_weights=False)
    theirs = wrap(models.theirs(folders[family], attn_implementation="eager"), config)
    ours = wrap(make(folders[family]), prepared(config))
    with torch.no_grad():
        for name, parameter in trainable(theirs).items():
            ours.get_parameter(name).copy_(parameter)
    assert any("lm_head.lora_B" in name for name in trainable(ours))
    torch.testing.assert_close(losses(ours), losses(theirs), **LOSS)
    torch.testing.assert_close(logits(ours), logits(theirs), **LOGITS)
    ours.save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(models.theirs(folders[family]), tmp_path)
    torch.testing.assert_close(logits(again), logits(theirs), **LOGITS)
    torch.testing.assert_close(logits(ours.merge_and_unload()), logits(theirs.merge_and_unload()), **LOGITS)


def test_all_linear_leaves_the_integrations_head_alone(folders):
    model = wrap(AutoModelForCausalLM.from_pretrained(folders["qwen2"]), lora(target_modules="all-linear"))
    expected = wrap(models.theirs(folders["qwen2"]), lora(target_modules="all-linear"))
    assert trainable(model).keys() == trainable(expected).keys()


# ---- prompts ----


def prompts():
    options = dict(task_type="CAUSAL_LM", num_virtual_tokens=3)
    return {
        "prompt": peft.PromptTuningConfig(**options),
        "p-tuning": peft.PromptEncoderConfig(**options, encoder_hidden_size=8),
        "prefix": peft.PrefixTuningConfig(**options),
        "prefix, projected": peft.PrefixTuningConfig(**options, prefix_projection=True, encoder_hidden_size=8),
    }


@pytest.mark.parametrize("kind, family", [*((kind, "llama") for kind in prompts()), ("prefix", "gemma2")])
def test_prompts_train_and_travel(folders, kind, family, tmp_path):
    ours, theirs = wrapped_alike(folders, family, prompts()[kind])
    torch.testing.assert_close(losses(ours), losses(theirs), **LOSS)
    expected = logits(theirs)
    torch.testing.assert_close(logits(ours), expected, **LOGITS)
    for name, model, base in (("a", ours, models.theirs), ("b", theirs, models.ours)):
        model.save_pretrained(tmp_path / name)
        loaded = peft.PeftModel.from_pretrained(base(folders[family]), tmp_path / name)
        torch.testing.assert_close(logits(loaded), expected, **LOGITS)


@pytest.mark.parametrize("make, inputs", [
    (models.ours, dict(return_logits=True)), (AutoModelForCausalLM.from_pretrained, {}),
], ids=["native", "integration"])  # fmt: skip
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_cpt_which_computes_the_loss_from_the_logits(folders, family, make, inputs):
    config = peft.CPTConfig(
        task_type="CAUSAL_LM", cpt_token_ids=[5, 9, 11, 20, 30], cpt_mask=[1] * 5, cpt_tokens_type_mask=[1, 2, 2, 3, 4],
        opt_weighted_loss_type="decay", opt_loss_decay_factor=0.9, opt_projection_epsilon=3.0,
    )  # fmt: skip
    model, theirs = (
        wrap(base, config)
        for base in (make(folders[family]), models.theirs(folders[family], attn_implementation="eager"))
    )
    torch.testing.assert_close(losses(model, **inputs), losses(theirs), **LOSS)
    torch.testing.assert_close(logits(model), logits(theirs), **LOGITS)


@pytest.mark.parametrize("kind", ["LoRA", "LoRA of the table", "prompt", "prefix"])
def test_adapted_models_generate(folders, kind):
    """Greedy tokens after prompts of which one is padded on the left; they are not those of the base."""
    configs = prompts() | {
        "LoRA": lora(target_modules=USUAL),
        "LoRA of the table": lora(target_modules=["q_proj", "embed_tokens"]),
    }
    ours, theirs = wrapped_alike(folders, "llama", configs[kind])
    losses(ours), losses(theirs)
    mask = torch.ones_like(IDS)
    mask[0, :3] = 0
    options = dict(input_ids=IDS, attention_mask=mask, max_new_tokens=6, do_sample=False)
    expected = theirs.generate(**options)
    assert ours.generate(**options).tolist() == expected.tolist()
    assert models.theirs(folders["llama"]).generate(**options).tolist() != expected.tolist()
