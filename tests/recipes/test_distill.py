"""Distillation: its loss beside plain formulas and TRL's, what is compared with what, and whole runs."""

import dataclasses
import json
import shutil

import pytest
import torch
import torch.nn.functional as F

from ligermodels.errors import InputError
from ligermodels.kernels.loss.jsd import jsd
from ligermodels.processes import Processes
from ligermodels.recipes.data.examples import encode
from ligermodels.recipes.data.formats import read
from ligermodels.recipes.distill import OnPolicy, distill_loss
from tests.recipes import losses, runs
from tests.recipes.runs import SAMPLED, run


def plain(student, teacher, batch, o):
    """The sum of the loss over the labels, from all logits."""
    given = {name: value for name, value in batch.items() if name != "labels"}
    with torch.no_grad():
        target = teacher(**given).logits[:, :-1, : student.vocab_size]
    logits, labels = student(**given).logits[:, :-1, : target.shape[-1]], batch["labels"][:, 1:]
    counts = labels != -100
    z, u = logits[counts], target[counts]
    log_p, log_q = ((t / o.temperature).log_softmax(-1) for t in (z, u))
    soft = {
        "jsd": lambda: jsd(log_p, log_q, beta=o.beta, reduction="sum"),
        "tv": lambda: (log_p.exp() - log_q.exp()).abs().sum() / 2,
        "cosine": lambda: (1 - F.cosine_similarity(z, u)).sum(),
    }[o.loss_type]()
    hard = F.cross_entropy(logits[counts], labels[counts], reduction="sum")
    soft_weight = 1 - o.hard_weight if o.soft_weight is None else o.soft_weight
    return soft_weight * soft + o.hard_weight * hard, soft, hard


@pytest.mark.parametrize("options", [
    {}, {"beta": 0.0, "temperature": 2.0}, {"beta": 0.5, "hard_weight": 0.3}, {"beta": 0.1, "temperature": 0.7},
    {"loss_type": "tv", "temperature": 2.0, "hard_weight": 0.3}, {"loss_type": "cosine"},
    {"loss_type": "cosine", "soft_weight": 2.0, "hard_weight": 1.5},
], ids=str)  # fmt: skip
@pytest.mark.parametrize("teacher", [
    dict(hidden_size=48), dict(family="Gemma2"), dict(vocab_size=70), dict(vocab_size=58, hidden_size=16),
], ids=str)  # fmt: skip
def test_loss_and_gradients_are_those_of_the_formula(teacher, options):
    """Of a teacher of another width, with a softcap, with more and with fewer rows of padding; ids are below 58."""
    options, teacher = runs.options_of("distill", **options), losses.model(seed=1, **teacher)
    student = losses.model("Gemma2" if options.temperature != 1 else "Llama")
    packed, padded = losses.batches(9, 14, 5)
    for batch in (packed, padded):
        for name in ("input_ids", "labels"):
            batch[name] = batch[name].clamp(max=57)
    count = torch.tensor(7.0)
    expected, soft, hard = plain(student, teacher, padded, options)
    for batch in (packed, padded):
        loss, _ = distill_loss(student, batch, count, teacher, options)
        losses.check(student, loss, expected / 7)
    student.eval()
    with torch.no_grad():
        loss, sums = distill_loss(student, packed, count, teacher, options)
    torch.testing.assert_close(loss, expected / 7)
    number = (padded["labels"] != -100).sum()
    for name, value in (("divergence", soft), ("cross_entropy", hard)):
        torch.testing.assert_close(sums[name], (value.detach(), number))


@pytest.mark.parametrize(("says", "change"), [
    ("the teacher has another tokenizer (2 tokens differ", lambda vocab, _: vocab.update(zz=vocab.pop("A"))),
    ("the teacher has another tokenizer (0 tokens differ", lambda _, splits: splits.update(add_prefix_space=True)),
], ids=["ids", "splits"])  # fmt: skip
def test_a_teacher_of_another_tokenizer_is_refused(home, tmp_path, capsys, says, change):
    shutil.copytree(home / "model", tmp_path / "teacher")
    values = json.loads((tmp_path / "teacher" / "tokenizer.json").read_text())
    change(values["model"]["vocab"], values["pre_tokenizer"])
    (tmp_path / "teacher" / "tokenizer.json").write_text(json.dumps(values))
    for flags in ((), (*SAMPLED, "--on-policy")):
        assert run(home, tmp_path / "out", "distill", "--teacher", tmp_path / "teacher", *flags) == 3
        assert says in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_the_teachers_context_is_warned_of_as_the_models_is(home, tmp_path, capsys):
    shutil.copytree(home / "model", tmp_path / "teacher")
    values = json.loads((tmp_path / "teacher" / "config.json").read_text())
    (tmp_path / "teacher" / "config.json").write_text(json.dumps(values | {"max_position_embeddings": 100}))
    for length, warned in ((100, 0), (101, 1)):
        flags = ("--teacher", tmp_path / "teacher", "--max-length", length, "--dry-run")
        assert run(home, tmp_path / "out", "distill", *flags) == 0
        words = f"warning: --max-length {length} is more than the teacher's context of 100 tokens"
        said = capsys.readouterr().err
        assert said.count(words) == said.count("context of") == warned


# ---- on-policy ----

ASKED = [{"role": "user", "content": "Say a."}]
SAID = [{"role": "assistant", "content": "a"}]
LONGER = [*ASKED, *SAID, {"role": "user", "content": "Again."}]
ROWS = {  # the row, what is asked, and whether it has an answer for evaluations
    "messages": ({"messages": ASKED + SAID}, ASKED, True),
    "prompt-completion": ({"prompt": ASKED, "completion": SAID}, ASKED, True),
    "prompt": ({"prompt": ASKED}, ASKED, False),
    "turns": ({"messages": LONGER + SAID}, LONGER, True),
    "no answer": ({"messages": LONGER}, LONGER, False),
    "text": ({"prompt": "Say", "completion": " a"}, "Say", True),
}


def data_of(tokenizer, home, write, *rows, **options):
    model, data = str(home / "model"), str(write("rows.jsonl", list(rows)))
    given = dict(model=model, teacher=model, data=data, max_completion_length=9, on_policy=True)
    return runs.data_of("distill", tokenizer, **given, **options)


@pytest.mark.parametrize("name", ROWS)
def test_what_is_asked_and_what_an_evaluation_reads(home, tokenizer, write, name):
    """The last answer is cut off, where there is one; evaluations read what sft trains on."""
    row, asked, has_answer = ROWS[name]
    data = data_of(tokenizer, home, write, row)
    prompt = next(data.train)[0]
    is_text = isinstance(asked, str)
    ids = tokenizer.encode(asked) if is_text else tokenizer.apply_chat_template(asked, add_generation_prompt=True)
    assert prompt.ids == ids and prompt.where.endswith("rows.jsonl:1")
    if has_answer:
        evaluated = data.recipe.evaluation.process(row)
        assert evaluated == encode(read(row), tokenizer) and evaluated.ids[: len(ids)] == ids


def test_what_a_step_samples(home, tokenizer, write):
    """By the seed, the rollout and the temperature."""
    data = data_of(tokenizer, home, write, {"messages": ASKED + SAID})
    prompt, model = next(data.train)[0], losses.model(vocab_size=600).float()

    def drawn(rollout=0, **options):
        recipe = OnPolicy(dataclasses.replace(data.options, **options), tokenizer)
        recipe.chat, recipe.processes, recipe.model = True, Processes(torch.device("cpu")), model
        (found,) = recipe.roll_out([prompt], rollout)
        assert found.example.ids == prompt.ids + found.ids and len(found.ids) <= 9
        return found.ids

    others = [drawn(1), drawn(seed=1), drawn(temperature=0.5)]
    assert drawn() == drawn() and drawn() not in others


def test_rows_that_cannot_be_asked_are_named(home, tokenizer, write):
    """Those that differ from grpo's, which are in test_bad_inputs.py."""
    with pytest.raises(InputError, match=r"rows.jsonl:[12]: .*"):
        data_of(tokenizer, home, write, {"prompt": "a"}, {"prompt": "b"}, eval_share=0.5).evaluation()
    with pytest.raises(InputError, match=r"rows.jsonl:2: prompt: expected messages, as in the first row"):
        data_of(tokenizer, home, write, {"messages": ASKED}, {"messages": SAID}).count()
