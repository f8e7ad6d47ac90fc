"""Recipes of preferences beside TRL's trainers: the same rows, in the same order, on the same tiny model, in fp32."""

import importlib
import json

import pytest

import ligermodels
from ligermodels.recipes import find
from ligermodels.recipes.data import Data
from ligermodels.recipes.rows import open_rows
from ligermodels.recipes.trainer import train
from tests.recipes.runs import metrics

datasets = pytest.importorskip("datasets")
transformers = pytest.importorskip("transformers")
trl = pytest.importorskip("trl")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning", "ignore::DeprecationWarning"),
]

STEPS, ROWS = 50, 4
WORDS = ("a", "bcd", "efg", "hij", "klm", "nop", "qrs", "tuv", "wx", "y z", "0", "12")


def user(text):
    return [{"role": "user", "content": text}]


def assistant(text):
    return [{"role": "assistant", "content": text}]


_NUMBERED = list(enumerate(WORDS))
CHATS = [
    {"prompt": user(f"Say {word}."), "chosen": assistant(word), "rejected": assistant("no " * (n % 3 + 1) + word)}
    for n, word in enumerate(WORDS)
]
IMPLICIT = [{key: row["prompt"] + row[key] for key in ("chosen", "rejected")} for row in CHATS]
TEXTS = [
    {"prompt": f"{word} and", "chosen": f" {word}", "rejected": " no" * (n % 3 + 1)} for n, word in enumerate(WORDS)
]
SINGLE = [
    {"prompt": row["prompt"], "completion": row["chosen" if n % 3 else "rejected"], "label": bool(n % 3)}
    for n, row in enumerate(CHATS)
]


@pytest.fixture(scope="module")
def files(home):
    for name, rows in {"chats": CHATS, "implicit": IMPLICIT, "texts": TEXTS, "single": SINGLE}.items():
        (home / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return home


def settings(home, out, recipe, data, length=64, **options):
    """Batches of ROWS rows, at a rate that stays, without a rise."""
    kind = find(recipe).Options
    return kind(
        model=str(home / "model"), data=str(home / f"{data}.jsonl"), output_dir=str(out), max_length=length,
        packing=False,
        batch_tokens=kind.sequences * ROWS * length, accumulation=1, learning_rate=1e-3,
        lr_scheduler_type="constant_with_warmup", warmup_steps=0,
        report_to="none", show=0, **{"max_steps": STEPS, **options},
    )  # fmt: skip


def rows_in_order(options, steps):
    """The rows in the order of our run, found by the ids of their sequences."""
    tokenizer = ligermodels.Tokenizer.from_hub(options.model)
    rows = open_rows(options.data[0])
    recipe = find(options.recipe)(options, tokenizer)
    known = {
        tuple(one.cut(options.max_length).ids): rows[n]
        for n in range(len(rows))
        for one in recipe.process(rows[n]).sequences
    }
    batches, found = Data(options, recipe).train, []
    for batch in (next(batches) for _ in range(steps)):
        ids = [tuple(row[mask.bool()].tolist()) for row, mask in
               zip(batch["input_ids"], batch["attention_mask"], strict=True)]  # fmt: skip
        found += [known[one] for one in ids[:ROWS]]
    return found


def trainer(kind, home, tmp_path, rows, *, reference=False, steps=STEPS, **options):
    """TRL's trainer, before training. kind: such as "trl.DPO"."""
    module, _, name = kind.rpartition(".")
    module = importlib.import_module(module)
    model, other = (transformers.AutoModelForCausalLM.from_pretrained(home / "model") for _ in range(2))
    arguments = getattr(module, f"{name}Config")(
        str(tmp_path / "trl"), max_steps=steps, per_device_train_batch_size=ROWS, learning_rate=1e-3, report_to=[],
        lr_scheduler_type="constant", save_strategy="no", use_cpu=True, bf16=False, disable_tqdm=True, logging_steps=1,
        gradient_checkpointing=False, train_sampling_strategy="sequential", **options,
    )  # fmt: skip
    given = {"ref_model": other} if reference else {}
    return getattr(module, f"{name}Trainer")(
        model, args=arguments, train_dataset=datasets.Dataset.from_list(rows),
        processing_class=transformers.AutoTokenizer.from_pretrained(home / "model"), **given,
    )  # fmt: skip


def logged(of, name):
    return [entry[name] for entry in of.state.log_history if name in entry]


def check_run(files, tmp_path, recipe, data, kind, *, ours=None, theirs=None, names=None, **more):
    options = settings(files, tmp_path / "ours", recipe, data, **more, **(ours or {}))
    of = trainer(kind, files, tmp_path, rows_in_order(options, STEPS), reference=True,
                 max_length=options.max_length, **(theirs or {}))  # fmt: skip
    of.train()
    assert train(find(recipe), options) == 0
    for own, other in {"loss": "loss", "grad_norm": "grad_norm", **(names or {})}.items():
        found, expected = list(metrics(tmp_path / "ours", own).values()), logged(of, other)
        assert len(found) == len(expected) == STEPS
        assert found == pytest.approx(expected, rel=1e-4, abs=1e-5), own
    assert max(logged(of, "loss")) > 1.02 * min(logged(of, "loss"))  # something was learned


REWARDS = {
    "reward_chosen": "rewards/chosen", "reward_margin": "rewards/margins", "reward_accuracy": "rewards/accuracies",
}  # fmt: skip


@pytest.mark.parametrize("data", ["chats", "implicit", "texts"])
def test_dpo_is_trls_for_fifty_steps(files, tmp_path, data):
    names = {name: REWARDS[name] for name in ("reward_chosen", "reward_margin")}
    check_run(files, tmp_path, "dpo", data, "trl.DPO", names=names)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ({"loss_type": "ipo"}, {"loss_type": ["ipo"]}),
        ({"loss_type": "sigmoid_norm", "beta": 2.0}, {"loss_type": ["sigmoid_norm"], "beta": 2.0}),
        ({"loss_type": "robust", "label_smoothing": 0.1}, {"loss_type": ["robust"], "label_smoothing": 0.1}),
        ({"sft_weight": 0.3}, {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.3]}),
    ],
    ids=str,
)
def test_other_losses_of_dpo_are_trls(files, tmp_path, ours, theirs):
    check_run(files, tmp_path, "dpo", "chats", "trl.DPO", ours=ours, theirs=theirs)


def test_what_is_too_long_is_cut_as_trl_does(files, tmp_path):
    check_run(files, tmp_path, "dpo", "chats", "trl.DPO", length=30)


def test_kto_is_trls_for_fifty_steps(files, tmp_path):
    names = {"kl": "kl"}
    weights = {"desirable_weight": 1.2, "undesirable_weight": 0.8}
    check_run(files, tmp_path, "kto", "single", "trl.KTO", names=names, ours=weights, theirs=weights)


@pytest.mark.parametrize("data", ["chats", "implicit", "texts"])
def test_the_tokens_are_trls(files, tmp_path, data):
    options = settings(files, tmp_path / "ours", "dpo", data)
    rows = open_rows(options.data[0])
    of = trainer("trl.DPO", files, tmp_path, [rows[n] for n in range(len(rows))], reference=True, max_length=64)
    recipe = find("dpo")(options, ligermodels.Tokenizer.from_hub(options.model))
    for n, theirs in enumerate(of.train_dataset):
        found = recipe.process(rows[n])
        for sequence, answer in zip(found.sequences, (theirs["chosen_ids"], theirs["rejected_ids"]), strict=True):
            assert sequence.ids == theirs["prompt_ids"] + answer and found.prompt == len(theirs["prompt_ids"])
            assert sequence.labels == [-100] * found.prompt + answer


@pytest.mark.parametrize(
    ("recipe", "kind", "theirs"),
    [
        ("orpo", "trl.experimental.orpo.ORPO", {}),
        ("cpo", "trl.experimental.cpo.CPO", {}),
        ("simpo", "trl.experimental.cpo.CPO", {"loss_type": "simpo", "cpo_alpha": 0.0}),
    ],
)
def test_a_step_without_a_reference_is_trls(files, tmp_path, recipe, kind, theirs):
    """Loss and gradient of the first step; of texts, since these trainers tokenise chats otherwise."""
    options = settings(files, tmp_path / "ours", recipe, "texts", max_steps=1)
    of = trainer(kind, files, tmp_path, rows_in_order(options, 1), steps=1, max_length=64, **theirs)
    of.train()
    assert train(find(recipe), options) == 0
    for name in ("loss", "grad_norm"):
        assert metrics(tmp_path / "ours", name)[1] == pytest.approx(logged(of, name)[0], rel=1e-4)
