"""Recipes beside TRL's trainers: the same rows or completions, in the same order, on the same tiny model, in fp32."""

import importlib
import json
import random

import pytest

import ligermodels
from ligermodels.recipes import find, rollout
from ligermodels.recipes.data.batches import Data
from ligermodels.recipes.data.rows import open_rows
from ligermodels.recipes.trainer import train
from tests.recipes.runs import PAIRS, SINGLE, WORDS, fake_sample, metrics

datasets = pytest.importorskip("datasets")
transformers = pytest.importorskip("transformers")
trl = pytest.importorskip("trl")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning", "ignore::DeprecationWarning"),
]

IMPLICIT = [{key: row["prompt"] + row[key] for key in ("chosen", "rejected")} for row in PAIRS]
TEXTS = [
    {"prompt": f"{word} and", "chosen": f" {word}", "rejected": " no" * (n % 3 + 1)} for n, word in enumerate(WORDS)
]
PROMPTS = [{"prompt": f"Say {n}", "level": n % 3} for n in range(9)]
ASKED = [{**row, "prompt": [{"role": "user", "content": row["prompt"]}]} for row in PROMPTS]
REWARD = """
def total(completion_ids, **unused):
    return [float(sum(ids) % 7) for ids in completion_ids]

def length(prompts, completions, level, **unused):
    said = [one if isinstance(one, str) else one[0]["content"] for one in completions]
    return [None if n == 1 else n + len(text) / 5 for n, text in zip(level, said)]
"""


@pytest.fixture(scope="module")
def files(home):
    files = {"chats": PAIRS, "implicit": IMPLICIT, "texts": TEXTS, "single": SINGLE, "prompts": PROMPTS, "asked": ASKED}
    for name, rows in files.items():
        (home / f"trl-{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (home / "rewards.py").write_text(REWARD)
    return home


def options_of(files, out, recipe, data, **given):
    """A rate that stays, without a rise. A batch has all rows or completions, as a step of theirs."""
    return find(recipe).Options(
        model=str(files / "model"), data=str(files / f"trl-{data}.jsonl"), output_dir=str(out), learning_rate=1e-3,
        lr_scheduler_type="constant_with_warmup", warmup_steps=0, report_to="none", show=0, batch_tokens=4096, **given,
    )  # fmt: skip


def trainer(files, tmp_path, kind, rows, steps, *, given=None, **options):
    """TRL's trainer, before training. kind: such as "trl.DPO".."""
    module, _, name = kind.rpartition(".")
    module = importlib.import_module(module)
    arguments = getattr(module, f"{name}Config")(
        str(tmp_path / "trl"), max_steps=steps, learning_rate=1e-3, report_to=[], lr_scheduler_type="constant",
        save_strategy="no", use_cpu=True, bf16=False, disable_tqdm=True, logging_steps=1, gradient_checkpointing=False,
        **options,
    )  # fmt: skip
    return getattr(module, f"{name}Trainer")(
        transformers.AutoModelForCausalLM.from_pretrained(files / "model"), args=arguments,
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=transformers.AutoTokenizer.from_pretrained(files / "model"), **(given or {}),
    )  # fmt: skip


def logged(of, name):
    return [entry[name] for entry in of.state.log_history if name in entry]


def check_weights(out, of):
    trained = of.model.state_dict()
    for name, weight in ligermodels.load(out / "model").state_dict().items():
        assert (weight - trained[name]).abs().max() < 2e-4, name


# ---- preferences ----


def rows_in_order(options):
    """The rows as our run takes them, found by the ids of their sequences."""
    rows = open_rows(options.data[0])
    recipe = find(options.recipe)(options, ligermodels.Tokenizer.from_hub(options.model))
    known = {
        tuple(one.cut(options.max_length).ids): rows[n]
        for n in range(len(rows))
        for one in recipe.process(rows[n]).sequences
    }
    batches = Data(options, recipe).train
    return [known[tuple(one.sequences[0].ids)] for _ in range(options.max_steps) for one in next(batches)]


REWARDS = {"reward_chosen": "rewards/chosen", "reward_margin": "rewards/margins"}
WEIGHTS = {"desirable_weight": 1.2, "undesirable_weight": 0.8}
SMOOTHED = {"loss_type": ["robust"], "label_smoothing": 0.1}
FEWER = {"max_steps": 20}
ORPO, CPO = "trl.experimental.orpo.ORPO", "trl.experimental.cpo.CPO"
RUNS = [  # recipe, data, TRL's trainer, our options, its options, metrics: ours and its
    ("dpo", "chats", "trl.DPO", {}, {}, REWARDS),
    *(("dpo", data, "trl.DPO", FEWER, {}, REWARDS) for data in ("implicit", "texts")),
    ("dpo", "chats", "trl.DPO", {"max_length": 30, **FEWER}, {}, {}),  # what is too long is cut
    ("dpo", "chats", "trl.DPO", {"loss_type": "ipo", "beta": 1.0, **FEWER}, {"loss_type": ["ipo"], "beta": 1.0}, {}),
    ("dpo", "chats", "trl.DPO", {"loss_type": "sigmoid_norm", "beta": 2.0, **FEWER},
     {"loss_type": ["sigmoid_norm"], "beta": 2.0}, {}),
    ("dpo", "chats", "trl.DPO", {**SMOOTHED, "loss_type": "robust", **FEWER}, SMOOTHED, {}),
    ("dpo", "chats", "trl.DPO", {"sft_weight": 0.3, **FEWER},
     {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.3]}, {}),
    ("kto", "single", "trl.KTO", WEIGHTS, WEIGHTS, {"kl": "kl"}),
    # one step of texts, since these trainers tokenise chats otherwise
    ("orpo", "texts", ORPO, {"max_steps": 1}, {}, {}),
    ("cpo", "texts", CPO, {"max_steps": 1}, {}, {}),
    ("simpo", "texts", CPO, {"max_steps": 1}, {"loss_type": "simpo", "cpo_alpha": 0.0}, {}),
]  # fmt: skip


@pytest.mark.parametrize(("recipe", "data", "kind", "ours", "theirs", "names"), RUNS, ids=str)
def test_the_steps_of_preferences_are_trls(files, tmp_path, recipe, data, kind, ours, theirs, names):
    ours = {"max_length": 64, "max_steps": 50, **ours}
    options = options_of(files, tmp_path / "ours", recipe, data, accumulation=1, **ours)
    reference = transformers.AutoModelForCausalLM.from_pretrained(files / "model")
    of = trainer(
        files, tmp_path, kind, rows_in_order(options), options.max_steps, max_length=options.max_length,
        per_device_train_batch_size=len(open_rows(options.data[0])), train_sampling_strategy="sequential",
        given={"ref_model": reference} if options.compares else {}, **theirs,
    )  # fmt: skip
    of.train()
    train(find(recipe), options)
    for own, other in {"loss": "loss", "grad_norm": "grad_norm", **names}.items():
        found, expected = list(metrics(tmp_path / "ours", own).values()), logged(of, other)
        assert len(found) == len(expected) == options.max_steps
        assert found == pytest.approx(expected, rel=1e-4, abs=1e-5), own
    losses = logged(of, "loss")
    assert len(losses) == 1 or max(losses) > 1.02 * min(losses)  # something was learned


# ---- rollouts ----

ROLLOUTS, GROUP, NEW = 3, 4, 9
SAMPLING = dict(prompts=ROLLOUTS, max_completion_length=NEW, max_length=128)


def prompts_in_order(options, rollouts):
    data = Data(options, find(options.recipe).of(options)(options, ligermodels.Tokenizer.from_hub(options.model)))
    prompts = [next(data.train)[0] for _ in range(rollouts * ROLLOUTS)]
    return [{"prompt": prompt.prompt, **prompt.columns} for prompt in prompts]


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


NAMES = {
    "loss": "loss", "grad_norm": "grad_norm", "reward": "reward", "reward_std": "reward_std", "entropy": "entropy",
    "completion_length": "completions/mean_length", "truncated": "completions/clipped_ratio",
    "reward_length": "rewards/length/mean", "tied": "frac_reward_zero_std",
}  # fmt: skip
CLIPPED = {"clipped": "clip_ratio/region_mean"}
MASKED = {"mask_truncated_completions": True}
SAPO, VESPO = {"sapo_temperature_pos": 2.0}, {"vespo_k_neg": 2.0, "vespo_lambda_pos": 4.0}
TWO_SIDED = {"loss_type": "dapo", "delta": 1.06}
SEQUENCE = {"loss_type": "grpo", "importance_sampling_level": "sequence"}
CASES = {  # by loss: our options, TRL's, and more metrics
    "grpo": ({"beta": 0.1}, {}, {"kl": "kl"}),
    "bnpo": ({"num_iterations": 4, "scale_rewards": "batch"}, {}, CLIPPED),
    "dr_grpo": ({"num_iterations": 2, **MASKED}, MASKED, CLIPPED),
    "dapo": ({"num_iterations": 4, "beta": 0.3}, {}, {**CLIPPED, "kl": "kl"}),
    "cispo": ({"num_iterations": 4, "epsilon_high": 1.1}, {}, {"clipped": "cispo_clip_ratio"}),
    "gspo": ({"num_iterations": 4, "beta": 0.1}, SEQUENCE, {}),
    "sapo": ({"num_iterations": 4, "beta": 0.1, **SAPO}, SAPO, {"kl": "kl"}),
    "luspo": ({"num_iterations": 4, "beta": 0.1}, {"importance_sampling_level": "sequence"}, {}),
    "vespo": ({"num_iterations": 4, "beta": 0.1, **VESPO}, VESPO, {"kl": "kl"}),
    "two-sided": ({**TWO_SIDED, "num_iterations": 4, "epsilon_high": 0.05}, TWO_SIDED, {}),
}


@pytest.mark.parametrize("data", ["prompts", "asked"])
@pytest.mark.parametrize("loss", CASES)
def test_steps_of_grpo_are_trls(files, tmp_path, monkeypatch, loss, data):
    (given, other, names), steps = CASES[loss], 8
    if data == "asked":
        given = {**given, "beta": 0.0 if given.get("beta") else 0.2}
        names = {name: key for name, key in names.items() if name != "kl"}
    ours = options_of(
        files, tmp_path / "ours", "grpo", data, max_steps=steps, num_generations=GROUP, temperature=0.9,
        reward_funcs=(f"{files / 'rewards.py'}:total", f"{files / 'rewards.py'}:length"), reward_weights=(1.0, 0.5),
        **SAMPLING, **{"loss_type": loss, **given},
    )  # fmt: skip
    functions: dict = {}
    exec(REWARD, functions)
    of = trainer(
        files, tmp_path, "trl.GRPO", prompts_in_order(ours, steps // ours.num_iterations), steps,
        given={"reward_funcs": [functions["total"], functions["length"]]}, num_generations=GROUP, temperature=0.9,
        per_device_train_batch_size=ROLLOUTS * GROUP, max_completion_length=NEW, shuffle_dataset=False, beta=ours.beta,
        num_iterations=ours.num_iterations, reward_weights=[1.0, 0.5], epsilon=ours.clip["low"],
        epsilon_high=ours.clip["high"], scale_rewards=ours.scale_rewards, **{"loss_type": loss, **other},
    )  # fmt: skip

    def generated(prompt_ids, images, fields, copies):
        stop = of.processing_class.eos_token_id
        return [completions(prompt, copies, stop)[n % copies] for n, prompt in enumerate(prompt_ids)], None

    of._generate_single_turn = generated
    of.train()
    monkeypatch.setattr(rollout, "sample", sampled)
    train(find("grpo"), ours)
    for own, their in {**NAMES, **names}.items():
        found, expected = list(metrics(tmp_path / "ours", own).values()), logged(of, their)
        if len(expected) < steps:  # once for each rollout
            expected = [expected[n // ours.num_iterations] for n in range(steps)]
        assert len(found) == steps and found == pytest.approx(expected, rel=2e-4, abs=2e-5), own
    assert "clipped" not in names or max(metrics(tmp_path / "ours", "clipped").values()) > 0
    check_weights(tmp_path / "ours", of)


@pytest.mark.parametrize("beta, temperature", [(1.0, 1.0), (0.5, 0.8), (0.0, 1.0)])
def test_steps_of_distillation_on_policy_are_trls(files, teacher, tmp_path, monkeypatch, beta, temperature):
    steps, how = 5, dict(beta=beta, temperature=temperature)
    given = dict(teacher=str(teacher), on_policy=True, max_steps=steps)
    ours = options_of(files, tmp_path / "ours", "distill", "asked", **given, **SAMPLING, **how)
    rows = [{"prompt": row["prompt"]} for row in prompts_in_order(ours, steps)]
    of = trainer(
        files, tmp_path, "trl.Distillation", rows, steps, per_device_train_batch_size=ROLLOUTS, shuffle_dataset=False,
        max_completion_length=NEW, **how,
        given={"teacher_model": transformers.AutoModelForCausalLM.from_pretrained(teacher)},
    )  # fmt: skip
    stop = of.processing_class.eos_token_id
    of._generate_single_turn = lambda prompts, *others, **more: fake_sample(None, prompts, 1, stop_ids=(stop,))
    of.train()
    monkeypatch.setattr(rollout, "sample", fake_sample)
    train(find("distill"), ours)
    for name in ("loss", "grad_norm"):
        assert list(metrics(tmp_path / "ours", name).values()) == pytest.approx(logged(of, name), rel=2e-4), name
    check_weights(tmp_path / "ours", of)
