"""GRPO beside TRL's trainer: the same prompts and completions, on the same tiny model, in fp32, for several steps."""

import json
import random

import pytest

import ligermodels
from ligermodels.recipes import rollout
from ligermodels.recipes.data import Data
from ligermodels.recipes.grpo import GRPO, GRPOOptions
from ligermodels.recipes.trainer import train
from tests.recipes.runs import metrics

datasets = pytest.importorskip("datasets")
transformers = pytest.importorskip("transformers")
trl = pytest.importorskip("trl")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning", "ignore::DeprecationWarning"),
]

STEPS, PROMPTS, GROUP, NEW = 8, 3, 4, 9
REWARD = """
def total(completion_ids, **unused):
    return [float(sum(ids) % 7) for ids in completion_ids]

def length(prompts, completions, level, **unused):
    said = [one if isinstance(one, str) else one[0]["content"] for one in completions]
    return [None if n == 1 else n + len(text) / 5 for n, text in zip(level, said)]
"""


def completions(prompt, copies, stop):
    """Some end, others are truncated."""
    draw = random.Random(sum(prompt))
    found = []
    for _ in range(copies):
        ids = [draw.randrange(97, 120) for _ in range(draw.randrange(1, NEW))] + [stop]
        found.append(ids if draw.random() < 0.7 else (ids * NEW)[:NEW])
    return [ids if stop in ids[-1:] else [index for index in ids if index != stop] for ids in found]


def sampled(model, prompts, copies, *, stop_ids, **unused):
    return [ids for prompt in prompts for ids in completions(prompt, copies, stop_ids[0])]


@pytest.fixture(scope="module")
def files(home):
    rows = [{"prompt": f"Say {n}", "level": n % 3} for n in range(9)]
    (home / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    chats = [{**row, "prompt": [{"role": "user", "content": row["prompt"]}]} for row in rows]
    (home / "asked.jsonl").write_text("\n".join(map(json.dumps, chats)))
    (home / "rewards.py").write_text(REWARD)
    return home


def options(files, out, data="prompts", **given):
    return GRPOOptions(
        model=str(files / "model"), data=str(files / f"{data}.jsonl"), output_dir=str(out), prompts=PROMPTS,
        num_generations=GROUP,
        reward_funcs=(f"{files / 'rewards.py'}:total", f"{files / 'rewards.py'}:length"), reward_weights=(1.0, 0.5),
        max_completion_length=NEW, temperature=0.9, max_length=128, batch_tokens=4096, learning_rate=1e-3,
        lr_scheduler_type="constant_with_warmup", warmup_steps=0,
        report_to="none", show=0, max_steps=STEPS, **given,
    )  # fmt: skip


def theirs(files, tmp_path, ours, **given):
    """TRL's trainer of the prompts in our order."""
    data = Data(ours, GRPO(ours, ligermodels.Tokenizer.from_hub(ours.model)))
    rollouts = STEPS // ours.num_iterations
    prompts = [next(data.train)["prompts"][0] for _ in range(rollouts * PROMPTS)]
    rows = [{"prompt": prompt.prompt, **prompt.columns} for prompt in prompts]
    functions: dict = {}
    exec(REWARD, functions)
    arguments = trl.GRPOConfig(
        str(tmp_path / "trl"), max_steps=STEPS, per_device_train_batch_size=PROMPTS * GROUP, num_generations=GROUP,
        learning_rate=1e-3, lr_scheduler_type="constant", max_completion_length=NEW, temperature=0.9, use_cpu=True,
        bf16=False, gradient_checkpointing=False, disable_tqdm=True, report_to=[], save_strategy="no", logging_steps=1,
        shuffle_dataset=False, num_iterations=ours.num_iterations, reward_weights=[1.0, 0.5], beta=ours.beta,
        epsilon=ours.clip["low"], epsilon_high=ours.clip["high"], scale_rewards=ours.scale, **given,
    )  # fmt: skip
    trainer = trl.GRPOTrainer(
        transformers.AutoModelForCausalLM.from_pretrained(files / "model"), args=arguments,
        reward_funcs=[functions["total"], functions["length"]], train_dataset=datasets.Dataset.from_list(rows),
        processing_class=transformers.AutoTokenizer.from_pretrained(files / "model"),
    )  # fmt: skip

    def generated(prompt_ids, images, fields, copies):
        stop = trainer.processing_class.eos_token_id
        return [completions(prompt, copies, stop)[n % copies] for n, prompt in enumerate(prompt_ids)], None

    trainer._generate_single_turn = generated
    return trainer


NAMES = {
    "loss": "loss", "grad_norm": "grad_norm", "reward": "reward", "reward_std": "reward_std", "entropy": "entropy",
    "completion_length": "completions/mean_length", "truncated": "completions/clipped_ratio",
    "reward_length": "rewards/length/mean", "tied": "frac_reward_zero_std",
}  # fmt: skip
CLIPPED = {"clipped": "clip_ratio/region_mean"}
CASES = {
    "grpo": ({"beta": 0.1}, {}, {"kl": "kl"}),
    "bnpo": ({"num_iterations": 4, "scale_rewards": "batch"}, {}, CLIPPED),
    "dr_grpo": (
        {"num_iterations": 2, "mask_truncated_completions": True},
        {"mask_truncated_completions": True},
        CLIPPED,
    ),
    "dapo": ({"num_iterations": 4, "beta": 0.3}, {}, {**CLIPPED, "kl": "kl"}),
    "cispo": ({"num_iterations": 4, "epsilon_high": 1.1}, {}, {"clipped": "cispo_clip_ratio"}),
    "gspo": ({"num_iterations": 4, "beta": 0.1}, {"loss_type": "grpo", "importance_sampling_level": "sequence"}, {}),
}


@pytest.mark.parametrize("data", ["prompts", "asked"])
@pytest.mark.parametrize("loss", CASES)
def test_steps_are_trls(files, tmp_path, monkeypatch, loss, data):
    given, other, names = CASES[loss]
    if data == "asked":
        given = {**given, "beta": 0.0 if given.get("beta") else 0.2, "packing": False}
        names = {name: key for name, key in names.items() if name != "kl"}
    ours = options(files, tmp_path / "ours", data, loss_type=loss, **given)
    trainer = theirs(files, tmp_path, ours, **{"loss_type": loss, **other})
    trainer.train()
    monkeypatch.setattr(rollout, "sample", sampled)
    assert train(GRPO, ours) == 0
    for own, their in {**NAMES, **names}.items():
        found = list(metrics(tmp_path / "ours", own).values())
        expected = [entry[their] for entry in trainer.state.log_history if their in entry]
        if own in ("reward", "reward_std", "reward_length", "completion_length", "truncated", "tied"):  # of the rollout
            expected = [expected[n // ours.num_iterations] for n in range(STEPS)] if len(expected) < STEPS else expected
        assert len(found) == len(expected) == STEPS, own
        assert found == pytest.approx(expected, rel=2e-4, abs=2e-5), own
    if "clipped" in names:
        assert max(metrics(tmp_path / "ours", "clipped").values()) > 0
    trained = trainer.model.state_dict()
    for name, weight in ligermodels.load(tmp_path / "ours" / "model").state_dict().items():
        assert (weight - trained[name]).abs().max() < 2e-4, name
