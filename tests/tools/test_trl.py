"""TRL's trainers: the losses and metrics of our models are those of transformers' own."""

import importlib

import pytest
import torch

from ligermodels.errors import InputError
from ligermodels.integrations.transformers import AutoModelForCausalLM, AutoModelForSequenceClassification
from tests.tools import models
from tests.tools.models import FAMILIES, assert_same_logs, letters, make_ids, make_tokenizer, ours, theirs

transformers = pytest.importorskip("transformers")
datasets = pytest.importorskip("datasets")
peft = pytest.importorskip("peft")
trl = pytest.importorskip("trl")
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")


def chat(*turns):
    return [{"role": ("user", "assistant")[i % 2], "content": turn} for i, turn in enumerate(turns)]


TEXTS = [{"text": letters(i, 5 + i % 4)} for i in range(16)]
CHATS = [
    {"messages": chat(letters(i, 3), letters(i + 50, 4), letters(i + 60, 2), letters(i + 70, 5))} for i in range(16)
]
PAIRS = [
    {"prompt": letters(i, 3), "chosen": " " + letters(i + 50, 4), "rejected": " " + letters(i + 90, 5)}
    for i in range(8)
]
SINGLES = [{"prompt": letters(i, 3), "completion": " " + letters(i + 50, 4), "label": i % 2 == 0} for i in range(8)]
PROMPTS = [{"prompt": letters(i, 2 + i % 3)} for i in range(8)]


def train(kind, model, folder, data, options=None, **arguments):
    """The trainer after training."""
    module = (
        trl if hasattr(trl, f"{kind}Trainer") else importlib.import_module(f"trl.experimental.{EXPERIMENTAL[kind]}")
    )
    defaults = dict(
        max_steps=3, per_device_train_batch_size=2, learning_rate=1e-2, report_to=[], save_strategy="no", use_cpu=True,
        bf16=False, disable_tqdm=True, logging_steps=1, seed=1, gradient_checkpointing=False,
    )  # fmt: skip
    trainer = getattr(module, f"{kind}Trainer")(
        model, args=getattr(module, f"{kind}Config")(str(folder), **{**defaults, **arguments}),
        train_dataset=datasets.Dataset.from_list(data), **{"processing_class": make_tokenizer(), **(options or {})},
    )  # fmt: skip
    trainer.train()
    return trainer


def adapter(make, folder):
    targets = ["q_proj", "up_proj"]
    return {"peft_config": peft.LoraConfig(task_type="CAUSAL_LM", target_modules=targets, init_lora_weights=False)}


def reference(make, folder):
    return {"ref_model": make(folder)}


def teacher(make, folder):
    """The model with other weights."""
    model = make(folder)
    for parameter in model.requires_grad_(False).parameters():
        parameter += 0.1 * torch.sin(torch.arange(parameter.numel())).view_as(parameter)
    return {"teacher_model": model}


def by_name(make, folder):
    """TRL finds reference and tokenizer by the model's name_or_path."""
    return {"processing_class": None}


def reward_of_text(make, folder):
    return {"reward_funcs": lambda completions, **unused: [float(len(text) % 5) for text in completions]}


def reward_of_ids(make, folder):
    return {"reward_funcs": lambda completion_ids, **unused: [float(sum(ids) % 7) for ids in completion_ids]}


EXPERIMENTAL = {"ORPO": "orpo", "CPO": "cpo", "OnlineDPO": "online_dpo"}
SFT = "loss grad_norm entropy mean_token_accuracy num_tokens"
DPO = "loss grad_norm rewards/chosen rewards/margins logps/rejected logits/chosen"
CPO = "loss grad_norm rewards/margins logps/rejected"  # not logits/chosen, which CPOTrainer averages over padding too
ONLINE = "loss grad_norm objective/kl objective/entropy rewards/margins"
GRPO = "loss grad_norm entropy reward completions/mean_length"
SAMPLED = dict(per_device_train_batch_size=4, num_generations=4, max_completion_length=6)
CASES = {
    "sft": ("SFT", TEXTS, SFT, None, {}),
    "sft, chats": ("SFT", CHATS, SFT, None, {}),
    "sft, assistant only": ("SFT", CHATS, SFT, None, dict(assistant_only_loss=True)),
    "sft, padding-free": ("SFT", TEXTS, SFT, None, dict(padding_free=True, max_length=None)),
    "sft, checkpointing": ("SFT", TEXTS, SFT, None, dict(gradient_checkpointing=True, gradient_accumulation_steps=2)),
    "sft, adapter": ("SFT", TEXTS, "loss grad_norm entropy", adapter,
        dict(packing=True, max_length=16, gradient_checkpointing=True)),
    "sft, experts": ("SFT", TEXTS, "loss aux_loss entropy", None, {}),
    "dpo": ("DPO", PAIRS, DPO, reference, {}),
    "dpo, by name": ("DPO", PAIRS, DPO, by_name, {}),
    "kto": ("KTO", SINGLES, "loss grad_norm kl", reference, {}),
    "kto, by name": ("KTO", SINGLES, "loss grad_norm kl", by_name, {}),
    "orpo": ("ORPO", PAIRS, CPO, None, dict(max_length=32)),
    "orpo, experts": ("ORPO", PAIRS, "loss rewards/margins", None, dict(max_length=32)),
    "cpo": ("CPO", PAIRS, CPO, None, dict(max_length=32)),
    "simpo": ("CPO", PAIRS, CPO, None, dict(max_length=32, loss_type="simpo", cpo_alpha=0.5)),
    # Completions are sampled: the same ones from the same seed.
    "distillation": ("Distillation", PROMPTS, "loss grad_norm entropy", teacher, dict(max_completion_length=6)),
    "online dpo": ("OnlineDPO", PROMPTS, ONLINE, reward_of_text, dict(max_new_tokens=6, max_length=32)),
    "grpo": ("GRPO", PROMPTS, GRPO, reward_of_ids, SAMPLED),
    "grpo, kl": ("GRPO", PROMPTS, f"{GRPO} kl", reward_of_ids,
        dict(SAMPLED, beta=0.1, gradient_checkpointing=True, top_k=0, top_p=0.9)),
}  # fmt: skip
"""{name: (trainer, data, names of logs, further arguments of the trainer, of its config)}"""
FAMILIES_OF = [(case, one) for case in CASES for one in (("mixtral",) if "experts" in case else FAMILIES)]


@pytest.mark.parametrize(("case", "family"), FAMILIES_OF)
def test_a_trainer_logs_what_it_logs_for_transformers_model(folders, tmp_path, case, family):
    kind, data, names, options, arguments = CASES[case]
    found, expected = (
        train(kind, make(folders[family]), tmp_path, data, options and options(make, folders[family]), **arguments)
        for make in (ours, theirs)
    )
    assert_same_logs(found, expected, *names.split())


def test_grpo_by_continuous_batching_is_grpo(folder, tmp_path):
    """Which is ours: greedy, since draws of other rows differ."""
    found, expected = (
        train("GRPO", ours(folder), tmp_path, PROMPTS, reward_of_ids(ours, folder),
              use_transformers_continuous_batching=batching, **SAMPLED, top_k=1)
        for batching in (True, False)
    )  # fmt: skip
    assert_same_logs(found, expected, *GRPO.split())


def test_grpo_with_images(tmp_path):
    """TRL keeps the model from writing placeholders of images: it passes suppress_tokens."""
    image = pytest.importorskip("PIL.Image")
    folder = models.write_image_checkpoint(tmp_path / "model")
    data = [
        {"prompt": chat(letters(i, 2 + i % 3)), "image": image.effect_noise((8, 8), 50 + i).convert("RGB")}
        for i in range(8)
    ]
    makes = (ours, transformers.AutoModelForImageTextToText.from_pretrained)
    options = {"processing_class": models.make_processor(), **reward_of_ids(None, None)}
    found, expected = (train("GRPO", make(folder), tmp_path / "run", data, options, **SAMPLED) for make in makes)
    assert_same_logs(found, expected, *GRPO.split())


KINDS = {
    "SFT": lambda model, folder: train("SFT", model, folder, TEXTS, use_liger_kernel=True),
    "DPO": lambda model, folder: train("DPO", model, folder, PAIRS, use_liger_kernel=True),
    "GRPO": lambda model, folder: train(
        "GRPO", model, folder, PROMPTS, reward_of_ids(None, None), use_liger_kernel=True, **SAMPLED
    ),
    "Trainer": lambda model, folder: models.make_trainer(model, folder, use_liger_kernel=True).train(),
    "Trainer, bf16": lambda model, folder: models.make_trainer(model, folder, use_liger_kernel=True, bf16=True).train(),
}


@pytest.mark.parametrize("kind", KINDS)
def test_liger_s_patches_of_the_integration_are_refused(folders, tmp_path, monkeypatch, kind):
    pytest.importorskip("liger_kernel")
    from transformers.models.llama import modeling_llama

    for name in ("apply_rotary_pos_emb", "LlamaRMSNorm", "LlamaMLP"):  # which Liger replaces for the whole process
        monkeypatch.setattr(modeling_llama, name, getattr(modeling_llama, name))
    with pytest.raises(InputError, match="leave use_liger_kernel out"):
        KINDS[kind](AutoModelForCausalLM.from_pretrained(folders["llama"]), tmp_path)


@pytest.mark.parametrize("family", [*FAMILIES, "qwen3_5_text"])
def test_reward_of_the_integrations_classifier(folders, tmp_path, family):
    theirs_class = transformers.AutoModelForSequenceClassification
    torch.manual_seed(0)
    theirs_class.from_pretrained(folders[family], num_labels=1).save_pretrained(tmp_path / "reward")
    found, expected = (
        train("Reward", loads.from_pretrained(tmp_path / "reward"), tmp_path / "run", PAIRS)
        for loads in (AutoModelForSequenceClassification, theirs_class)
    )
    assert_same_logs(found, expected, "loss", "grad_norm", "accuracy", "margin")
    found.save_model(tmp_path / "saved")
    again, ids = theirs_class.from_pretrained(tmp_path / "saved"), make_ids(2, 6)
    with torch.no_grad():
        torch.testing.assert_close(again(ids).logits, found.model.eval()(ids).logits, rtol=0, atol=1e-5)  # fp32
