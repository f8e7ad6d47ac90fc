"""TRL's trainers: the losses and metrics of our models are those of transformers' own."""

import importlib

import pytest
import torch

from ligermodels.integrations.transformers import AutoModelForSequenceClassification
from tests.tools.models import FAMILIES, assert_same_logs, make_ids, make_tokenizer, ours, theirs, write_checkpoint

transformers = pytest.importorskip("transformers")
datasets = pytest.importorskip("datasets")
peft = pytest.importorskip("peft")
trl = pytest.importorskip("trl")
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request, tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("checkpoints") / request.param, request.param)


def words(seed, length):
    return " ".join("abcdefghijklmnopqrstuvwxyz"[i % 26] for i in make_ids(1, length, seed)[0].tolist())


def chat(*turns):
    return [{"role": ("user", "assistant")[i % 2], "content": turn} for i, turn in enumerate(turns)]


TEXTS = [{"text": words(i, 5 + i % 4)} for i in range(16)]
CHATS = [{"messages": chat(words(i, 3), words(i + 50, 4), words(i + 60, 2), words(i + 70, 5))} for i in range(16)]
PAIRS = [
    {"prompt": words(i, 3), "chosen": " " + words(i + 50, 4), "rejected": " " + words(i + 90, 5)} for i in range(8)
]
SINGLES = [{"prompt": words(i, 3), "completion": " " + words(i + 50, 4), "label": i % 2 == 0} for i in range(8)]
PROMPTS = [{"prompt": words(i, 2 + i % 3)} for i in range(8)]


def train(trainer_class, config_class, model, folder, data, *, options=None, **arguments):
    """The trainer after training."""
    defaults = dict(
        max_steps=3, per_device_train_batch_size=2, learning_rate=1e-2, report_to=[], save_strategy="no", use_cpu=True,
        bf16=False, disable_tqdm=True, logging_steps=1, seed=1, gradient_checkpointing=False,
    )  # fmt: skip
    trainer = trainer_class(
        model, args=config_class(str(folder), **{**defaults, **arguments}),
        train_dataset=datasets.Dataset.from_list(data), **{"processing_class": make_tokenizer(), **(options or {})},
    )  # fmt: skip
    trainer.train()
    return trainer


SFT = {
    "text": (TEXTS, dict()),
    "chat": (CHATS, dict()),
    "assistant only": (CHATS, dict(assistant_only_loss=True)),
    "padding-free": (TEXTS, dict(padding_free=True, max_length=None)),
    "checkpointing": (TEXTS, dict(gradient_checkpointing=True, gradient_accumulation_steps=2)),
}


@pytest.mark.parametrize(("data", "options"), SFT.values(), ids=SFT.keys())
def test_sft(folder, tmp_path, data, options):
    def run(make):
        return train(trl.SFTTrainer, trl.SFTConfig, make(folder), tmp_path, data, **options)

    assert_same_logs(run(ours), run(theirs), "loss", "grad_norm", "entropy", "mean_token_accuracy", "num_tokens")


def test_sft_of_an_adapter(folder, tmp_path):
    def run(make):
        adapter = peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj", "up_proj"], init_lora_weights=False)
        options = {"peft_config": adapter}
        arguments = dict(packing=True, max_length=16, gradient_checkpointing=True)
        return train(trl.SFTTrainer, trl.SFTConfig, make(folder), tmp_path, TEXTS, options=options, **arguments)

    assert_same_logs(run(ours), run(theirs), "loss", "grad_norm", "entropy")


def test_sft_of_a_mixture_of_experts(tmp_path):
    folder = write_checkpoint(tmp_path / "model", "mixtral")

    def run(make):
        return train(trl.SFTTrainer, trl.SFTConfig, make(folder), tmp_path, TEXTS)

    assert_same_logs(run(ours), run(theirs), "loss", "aux_loss", "entropy")


@pytest.mark.parametrize("by_name", [False, True])
def test_dpo(folder, tmp_path, by_name):
    def run(make):
        options = {"processing_class": None} if by_name else {"ref_model": make(folder)}
        return train(trl.DPOTrainer, trl.DPOConfig, make(folder), tmp_path, PAIRS, options=options)

    names = ("loss", "grad_norm", "rewards/chosen", "rewards/margins", "logps/rejected", "logits/chosen")
    assert_same_logs(run(ours), run(theirs), *names)


@pytest.mark.parametrize("by_name", [False, True])
def test_kto(folder, tmp_path, by_name):
    def run(make):
        options = {"processing_class": None} if by_name else {"ref_model": make(folder)}
        return train(trl.KTOTrainer, trl.KTOConfig, make(folder), tmp_path, SINGLES, options=options)

    assert_same_logs(run(ours), run(theirs), "loss", "grad_norm", "kl")


def experimental(name):
    """(trainer, its config) of a module of trl.experimental."""
    module = importlib.import_module(f"trl.experimental.{name.lower().replace('onlinedpo', 'online_dpo')}")
    return getattr(module, f"{name}Trainer"), getattr(module, f"{name}Config")


@pytest.mark.parametrize(
    "name, arguments", [("ORPO", {}), ("CPO", {}), ("CPO", dict(loss_type="simpo", cpo_alpha=0.5))], ids=str
)
def test_orpo_and_cpo(folder, tmp_path, name, arguments):
    def run(make):
        return train(*experimental(name), make(folder), tmp_path, PAIRS, max_length=32, **arguments)

    # Not logits/chosen, which CPOTrainer averages over padding too.
    assert_same_logs(run(ours), run(theirs), "loss", "grad_norm", "rewards/margins", "logps/rejected")


def test_orpo_of_a_mixture_of_experts(tmp_path):
    folder = write_checkpoint(tmp_path / "model", "mixtral")

    def run(make):
        return train(*experimental("ORPO"), make(folder), tmp_path, PAIRS, max_length=32)

    assert_same_logs(run(ours), run(theirs), "loss", "rewards/margins")


def test_online_dpo(folder, tmp_path):
    """Completions are sampled: the same ones from the same seed."""

    def run(make):
        options = {"reward_funcs": lambda completions, **unused: [float(len(text) % 5) for text in completions]}
        arguments = dict(max_new_tokens=6, max_length=32)
        return train(*experimental("OnlineDPO"), make(folder), tmp_path, PROMPTS, options=options, **arguments)

    names = ("loss", "grad_norm", "objective/kl", "objective/entropy", "rewards/margins")
    assert_same_logs(run(ours), run(theirs), *names)


def test_reward_of_the_integrations_classifier(folder, tmp_path):
    theirs_class = transformers.AutoModelForSequenceClassification
    torch.manual_seed(0)
    theirs_class.from_pretrained(folder, num_labels=1).save_pretrained(tmp_path / "reward")

    def run(auto_class):
        model = auto_class.from_pretrained(tmp_path / "reward")
        return train(trl.RewardTrainer, trl.RewardConfig, model, tmp_path / "run", PAIRS)

    found, expected = run(AutoModelForSequenceClassification), run(theirs_class)
    assert_same_logs(found, expected, "loss", "grad_norm", "accuracy", "margin")
    found.save_model(tmp_path / "saved")
    again, ids = theirs_class.from_pretrained(tmp_path / "saved"), make_ids(2, 6)
    with torch.no_grad():
        torch.testing.assert_close(again(ids).logits, found.model.eval()(ids).logits, rtol=0, atol=1e-5)  # fp32


@pytest.mark.parametrize("options", [{}, dict(beta=0.1, gradient_checkpointing=True, top_k=0, top_p=0.9)], ids=str)
def test_grpo(folder, tmp_path, options):
    """Completions are sampled: the same ones from the same seed."""

    def reward(completions, completion_ids, **unused):
        return [float(sum(ids) % 7) for ids in completion_ids]

    def run(make):
        arguments = dict(per_device_train_batch_size=4, num_generations=4, max_completion_length=6, **options)
        return train(
            trl.GRPOTrainer, trl.GRPOConfig, make(folder), tmp_path, PROMPTS, options={"reward_funcs": reward},
            **arguments,
        )  # fmt: skip

    found, expected = run(ours), run(theirs)
    names = ("loss", "grad_norm", "entropy", "reward", "completions/mean_length")
    assert_same_logs(found, expected, *names, *(["kl"] if options.get("beta") else []))
