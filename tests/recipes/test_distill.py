"""Distillation: its loss beside plain formulas and TRL's, what is compared with what, and whole runs."""

import dataclasses
import json
import shutil

import pytest
import torch
import torch.nn.functional as F

import ligermodels
from ligermodels import recipes
from ligermodels.errors import InputError
from ligermodels.processes import Processes
from ligermodels.recipes import rollout
from ligermodels.recipes.data import Data
from ligermodels.recipes.distill import Distill, DistillOptions, check_same_tokens, distill_loss
from ligermodels.recipes.formats import read
from ligermodels.recipes.masking import encode
from ligermodels.text import Tokenizer
from tests.arch import qwen2_vl
from tests.recipes import losses
from tests.recipes.runs import FEW, metrics, train
from tests.recipes.test_grpo import fake
from tests.recipes.test_train_command import check_same, on_two

OPTIONS = dict(beta=1.0, temperature=1.0, hard_weight=0.0)


def plain(student, teacher, batch, *, beta, temperature, hard_weight):
    """The sum of the loss over the labels, from all logits."""
    given = {name: value for name, value in batch.items() if name != "labels"}
    with torch.no_grad():
        target = teacher(**given).logits[:, :-1, : student.vocab_size]
    logits, labels = student(**given).logits[:, :-1, : target.shape[-1]], batch["labels"][:, 1:]
    counts = labels != -100
    x, y = ((z[counts] / temperature).log_softmax(-1) for z in (logits, target))
    p, q = x.exp(), y.exp()
    if beta in (0.0, 1.0):
        soft = (q * (y - x)).sum() if beta == 0 else (p * (x - y)).sum()
    else:
        mixed = (beta * q + (1 - beta) * p).log()
        soft = beta * (q * (y - mixed)).sum() + (1 - beta) * (p * (x - mixed)).sum()
    hard = F.cross_entropy(logits[counts], labels[counts], reduction="sum")
    return (1 - hard_weight) * soft + hard_weight * hard, soft, hard


@pytest.mark.parametrize("options", [
    {}, {"beta": 0.0, "temperature": 2.0}, {"beta": 0.5, "hard_weight": 0.3}, {"beta": 0.1, "temperature": 0.7},
], ids=str)  # fmt: skip
@pytest.mark.parametrize("teacher", [
    dict(hidden_size=48), dict(family="Gemma2"), dict(vocab_size=70), dict(vocab_size=58, hidden_size=16),
], ids=str)  # fmt: skip
def test_loss_and_gradients_are_those_of_the_formula(teacher, options):
    """Of a teacher of another width, with a softcap, with more and with fewer rows of padding; ids are below 58."""
    options, teacher = OPTIONS | options, losses.model(seed=1, **teacher)
    student = losses.model("Gemma2" if options["temperature"] != 1 else "Llama")
    packed, padded = losses.batches(9, 14, 5)
    for batch in (packed, padded):
        for name in ("input_ids", "labels"):
            batch[name] = batch[name].clamp(max=57)
    count = torch.tensor(7.0)
    expected, soft, hard = plain(student, teacher, padded, **options)
    gradients = losses.gradients(student, expected / 7)
    for batch in (packed, padded):
        loss, _ = distill_loss(student, batch, count, teacher=teacher, **options)
        torch.testing.assert_close(loss, expected / 7)
        losses.assert_same(losses.gradients(student, loss), gradients)
    student.eval()
    with torch.no_grad():
        loss, sums = distill_loss(student, packed | {"return_logits": False}, count, teacher=teacher, **options)
    torch.testing.assert_close(loss, expected / 7)
    number = (padded["labels"] != -100).sum()
    for name, value in (("divergence", soft), ("cross_entropy", hard)):
        torch.testing.assert_close(sums[name], (value.detach(), number))


def test_images_that_the_teacher_does_not_read_are_refused():
    student = ligermodels.Qwen2VL.from_config(qwen2_vl.tiny(), device="cpu")
    batch = {"input_ids": torch.arange(5)[None], "labels": torch.arange(5)[None], "pixel_values": torch.zeros(1)}
    with pytest.raises(InputError, match=r"images \(pixel_values\), which the teacher does not read"):
        distill_loss(student, batch, torch.tensor(4.0), teacher=losses.model(), **OPTIONS)


@pytest.mark.slow
@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_loss_is_that_of_trl(beta):
    gkd = pytest.importorskip("trl.experimental.gkd")
    student, teacher = losses.model(), losses.model(seed=1, hidden_size=48)
    _, batch = losses.batches(9, 14, 5)
    given = {name: value for name, value in batch.items() if name != "labels"}
    logits = [one(**given).logits[:, :-1] for one in (student, teacher)]
    options = dict(beta=beta, temperature=0.9)
    expected = gkd.GKDTrainer.generalized_jsd_loss(
        *logits, batch["labels"][:, 1:], num_items_in_batch=torch.tensor(7.0), **options
    )
    loss, _ = distill_loss(
        student, batch, torch.tensor(7.0), teacher=teacher.requires_grad_(False), **OPTIONS | options
    )
    torch.testing.assert_close(loss, expected)
    losses.assert_same(losses.gradients(student, loss), losses.gradients(student, expected))


@pytest.fixture(scope="module")
def teacher(home):
    flags = ("--length", "128", "--accumulation", "1", "--lr", "4e-3", "--epochs", "10")
    assert train(home, "teacher", *flags) == 0
    return home / "teacher" / "model"


def distill(home, out, teacher, *flags, data="chats.jsonl"):
    return train(home, out, *FEW, "--teacher", teacher, *flags, recipe="distill", data=data)


def weights(folder):
    return next(folder.glob("*/*model.safetensors")).read_bytes()


def test_a_run_comes_near_its_teacher_and_resumes_with_the_same_bits(home, teacher, capsys):
    assert distill(home, "distilled", teacher, "--save-steps", "3", "--eval-steps", "3") == 0
    told = metrics(home / "distilled", "eval_divergence")
    assert told == pytest.approx(metrics(home / "distilled", "eval_loss")) and told[6] < 0.85 * told[0]
    shutil.copytree(home / "distilled", home / "again")
    for gone in ("model", "best", "checkpoints/step-00000006"):
        shutil.rmtree(home / "again" / gone)
    assert distill(home, "again", teacher, "--save-steps", "3", "--eval-steps", "3", "--resume") == 0
    assert "resumed after step 3" in capsys.readouterr().err
    assert weights(home / "again") == weights(home / "distilled")
    assert metrics(home / "again") == metrics(home / "distilled")
    assert distill(home, "again", teacher, "--resume", "--beta", "0.5") == 3
    assert "had beta=1.0, and this has beta=0.5" in capsys.readouterr().err


def test_two_processes_shard_the_teacher_and_compute_what_one_does(home, teacher, tmp_path):
    flags = ("--eval-steps", "2")
    assert distill(home, "one", teacher, *flags) == 0
    on_two(tmp_path, lambda: distill(home, "two", teacher, *flags))
    check_same(home / "two", home / "one")
    told = [metrics(home / name, "eval_cross_entropy") for name in ("one", "two")]
    assert told[0] == pytest.approx(told[1], rel=1e-5)


@pytest.mark.slow
def test_adapters_padding_and_context_parallel(home, teacher, tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    kinds = {
        "adapters": ("--lora", "4", "--merge", "--hard-weight", "0.3"),
        "rows": ("--no-packing", "--beta", "0.5"),
        "cp": ("--cp", "2", "--temperature", "2"),
    }
    on_two(tmp_path, *[lambda name=name: distill(home, f"{name}-2", teacher, *kinds[name]) for name in kinds])
    monkeypatch.delenv("WORLD_SIZE")
    for name, flags in kinds.items():
        assert distill(home, f"{name}-1", teacher, *flags[2 * (name == "cp") :]) == 0
        check_same(home / f"{name}-2", home / f"{name}-1")
        told = [metrics(home / f"{name}-{n}", "eval_divergence") for n in (1, 2)]
        assert told[0] == pytest.approx(told[1], rel=1e-4)


def changed(teacher, folder, change):
    """A copy of the teacher whose tokenizer.json is changed."""
    shutil.copytree(teacher, folder)
    values = json.loads((folder / "tokenizer.json").read_text())
    change(values)
    (folder / "tokenizer.json").write_text(json.dumps(values))
    return folder


def test_a_teacher_that_does_not_fit_is_refused(home, teacher, tmp_path, capsys):
    def other_token(values):
        vocab = values["model"]["vocab"]
        vocab["zz"] = vocab.pop("A")

    def other_split(values):
        values["pre_tokenizer"]["add_prefix_space"] = True

    index = Tokenizer.from_hub(home / "model").token_to_id("A")
    cases = {
        f"id {index} is 'A' for the model and 'zz' for the teacher (1 ids": (tmp_path / "token", other_token),
        "has the same tokens, but splits": (tmp_path / "split", other_split),
    }
    for words, (folder, change) in cases.items():
        assert distill(home, tmp_path / "out", changed(teacher, folder, change)) == 3
        assert words in capsys.readouterr().err
    assert distill(home, tmp_path / "out", teacher, "--length", "4096", "--batch-tokens", "4096") == 3
    assert "positions that the teacher was made for" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    tokenizer = Tokenizer.from_hub(home / "model")
    check_same_tokens(tokenizer, Tokenizer.from_hub(teacher))


@pytest.mark.parametrize("says, options", [
    ("teacher is missing: give --teacher", {"teacher": ""}),
    ("beta=1.5: expected 1 or less", {"beta": 1.5}),
    ("temperature=0: expected more", {"temperature": 0}),
    ("hard_weight=1.0: expected less than 1", {"hard_weight": 1.0}),
    ("FSDP shards both", {"tp": 2}),
])  # fmt: skip
def test_options_that_are_refused(says, options, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(Exception, match=says):
        DistillOptions(**{"model": "a", "data": "b", "output_dir": "c", "teacher": "d", **options})


# ---- on-policy ----

FEW_OF = (
    "--length",
    "64",
    "--steps",
    "6",
    "--lr",
    "3e-3",
    "--warmup-steps",
    "0",
    "--prompts",
    "4",
    "--max-completion-length",
    "9",
)


def on_policy(home, out, teacher, *flags, share=1, data="chats.jsonl"):
    given = (*FEW_OF, "--teacher", teacher, "--lmbda", share, *flags)
    return train(home, out, *given, recipe="distill", data=data)


def sampled(folder):
    return [json.loads(line) for line in (folder / "completions.jsonl").read_text().splitlines()]


def test_on_its_own_samples_a_run_comes_near_its_teacher(home, teacher, capsys):
    flags = ("--eval-data", home / "chats.jsonl", "--eval-steps", "6", "--lr", "6e-3", "--steps", "12", "--show", "2")
    assert on_policy(home, "own", teacher, *flags) == 0
    said, told, losses = capsys.readouterr().err, metrics(home / "own", "eval_divergence"), metrics(home / "own")
    assert losses[12] < 0.75 * losses[1]  # of the samples
    assert told[12] < 0.85 * told[0]  # of the rows' answers, with the line break after them, which no sample has
    lines = sampled(home / "own")
    assert len(lines) == 12 * 4 and lines[-1]["rollout"] == 11 and said.count(", sampled:\n") == 2
    assert lines[0]["prompt"][-1]["role"] == "user" and "reward" not in lines[0]
    lengths = metrics(home / "own", "completion_length")
    assert lengths[1] == sum(line["tokens"] for line in lines[:4]) / 4
    trained = metrics(home / "own", "trained_tokens")
    assert trained[1] == 4 * lengths[1] and metrics(home / "own", "truncated").keys() == losses.keys()
    assert "1 of each prompt, of at most 9 tokens, at temperature 1\n" in said
    assert "12; 1 for each rollout of 4 prompts, in forwards of at most 64 tokens" in said


def test_a_mixed_run_resumes_with_the_same_samples_and_bits(home, teacher, capsys):
    """Half of the steps are of rows' own completions; it is resumed before one that samples."""
    flags = ("--save-steps", "2", "--eval-share", "0.3", "--eval-steps", "3", "--beta", "0.5")
    assert on_policy(home, "mixed", teacher, *flags, share=0.5) == 0
    assert "in 50% of the steps; the others train on the rows' own" in capsys.readouterr().err
    assert list(metrics(home / "mixed", "completion_length")) == [1, 3, 5]
    assert {line["rollout"] for line in sampled(home / "mixed")} == {0, 2, 4}
    shutil.copytree(home / "mixed", home / "mixed-again")
    for gone in ("model", "best", "checkpoints/step-00000006"):
        shutil.rmtree(home / "mixed-again" / gone)
    assert on_policy(home, "mixed-again", teacher, *flags, "--resume", share=0.5) == 0
    assert "resumed after step 4" in capsys.readouterr().err
    assert sampled(home / "mixed-again") == sampled(home / "mixed")
    assert weights(home / "mixed-again") == weights(home / "mixed")
    assert metrics(home / "mixed-again") == metrics(home / "mixed")
    assert on_policy(home, "mixed-again", teacher, *flags, "--resume") == 3
    assert "had lmbda=0.5, and this has lmbda=1.0" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("flags", [
    (), ("--no-packing", "--beta", "0.3"), ("--lora", "4", "--rollout-rows", "1")
], ids=str)  # fmt: skip
def test_on_policy_on_two_processes(home, teacher, tmp_path, monkeypatch, flags):
    """On the same completions what one computes, with forwards that are not equally many; and sampling together."""
    on_two(tmp_path, lambda: on_policy(home, tmp_path / "sampled", teacher, *flags, share=0.5))
    assert len(sampled(tmp_path / "sampled")) == 3 * 2  # rank 0's
    monkeypatch.setattr(rollout, "sample", fake)
    assert on_policy(home, tmp_path / "one", teacher, *flags, share=0.5) == 0
    on_two(tmp_path, lambda: on_policy(home, tmp_path / "two", teacher, *flags, share=0.5))
    for name in ("loss", "grad_norm", "completion_length", "truncated", "trained_tokens"):
        one, two = (metrics(tmp_path / folder, name) for folder in ("one", "two"))
        assert one == pytest.approx(two, rel=2e-4), name


ASKED = [{"role": "user", "content": "Say a."}]
SAID = [{"role": "assistant", "content": "a"}]
ROWS = {
    "messages": {"messages": ASKED + SAID},
    "sharegpt": {"conversations": [{"from": "human", "value": "Say a."}, {"from": "gpt", "value": "a"}]},
    "alpaca": {"instruction": "Say a.", "output": "a"},
    "prompt-completion": {"prompt": ASKED, "completion": SAID},
}


def data_of(home, write, *rows, **options):
    paths = dict(model=str(home / "model"), data=str(write("rows.jsonl", list(rows))), output_dir="out")
    paths["teacher"] = paths["model"]
    found = DistillOptions(**paths, max_length=64, batch_tokens=64, max_completion_length=9, **{"lmbda": 1, **options})
    return Data(found, Distill(found, Tokenizer.from_hub(home / "model")))


@pytest.mark.parametrize("share", [0.5, 1])
@pytest.mark.parametrize("name", ROWS)
def test_what_is_asked_and_what_the_row_says(home, write, name, share):
    """The last answer is cut off, where there is one; steps that do not sample train on what sft trains on."""
    tokenizer, row = Tokenizer.from_hub(home / "model"), ROWS[name]
    prompt = next(data_of(home, write, row, lmbda=share).train)["prompts"][0]
    assert prompt.ids == tokenizer.apply_chat_template(ASKED, add_generation_prompt=True)
    assert prompt.where.endswith("rows.jsonl:1")
    assert prompt.own == (encode(read(row), tokenizer) if share < 1 else None)
    if share < 1:
        assert prompt.own.ids[: len(prompt.ids)] == prompt.ids and set(prompt.own.labels[: len(prompt.ids)]) == {-100}


def test_what_a_step_trains_on(home, write):
    """Samples at their temperature, of ids that the teacher knows; between them the rows' own completions."""
    rows = [{"messages": ASKED + SAID}, {"messages": [{"role": "user", "content": "b"}, *SAID]}]
    data = data_of(home, write, *rows, lmbda=0.5)
    prompts = [next(data.train)["prompts"][0] for _ in rows]
    model = losses.model(vocab_size=600).float()

    def steps(**options):
        recipe = Distill(dataclasses.replace(data.options, **options), data.recipe.tokenizer)
        recipe.chat, recipe.processes, recipe.vocab_size = True, Processes(torch.device("cpu")), 20
        recipe.model = model
        return [recipe.roll_out(prompts, n) for n in range(4)]

    greedy, drawn = steps(sampling_temperature=0.0), steps()
    assert [greedy[1], greedy[3]] == [[prompt.own for prompt in prompts]] * 2 == [drawn[1], drawn[3]]
    assert greedy[0] == greedy[2] and drawn[0] != drawn[2] and drawn == steps() != steps(seed=1)
    assert all(index < 20 and len(one.ids) == 9 for one in greedy[0] + drawn[0] for index in one.ids)
    assert drawn[0][1].example.ids == prompts[1].ids + drawn[0][1].ids
    assert steps(lmbda=0.25)[1:] == [drawn[1]] * 3


def test_a_student_with_more_rows_than_its_teacher(home, teacher, tmp_path):
    """Samples no id that the teacher has no row for."""
    folder = shutil.copytree(home / "model", tmp_path / "model")
    config = json.loads((folder / "config.json").read_text()) | {"vocab_size": 1500}
    ligermodels.Llama.from_config(config, device="cpu", seed=0).save_pretrained(folder)
    (tmp_path / "chats.jsonl").symlink_to(home / "chats.jsonl")
    assert on_policy(tmp_path, "wide", teacher, "--steps", "1") == 0
    assert on_policy(tmp_path, "both", folder, "--steps", "1") == 0  # of the tokenizer's more than it has names for
    assert metrics(tmp_path / "both")[1] == pytest.approx(0, abs=1e-6)


def test_prompts_need_no_answer_and_long_ones_are_cut(home, write):
    tokenizer = Tokenizer.from_hub(home / "model")
    longer = [*ASKED, *SAID, {"role": "user", "content": "Again."}]
    for row, messages in (
        ({"prompt": ASKED}, ASKED),
        ({"messages": longer}, longer),
        ({"messages": longer + SAID}, longer),
    ):
        prompt = next(data_of(home, write, row).train)["prompts"][0]
        assert prompt.ids == tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    rows = [{"prompt": "Say", "completion": "a" * number} for number in (99, 9)]
    batches = data_of(home, write, *rows, lmbda=0.5).train
    found = [next(batches)["prompts"][0].own for _ in rows]
    assert sorted((one.size, one.trained) for one in found) == [(13, 10), (64, 61)]
    with pytest.raises(
        InputError, match=r"none of 1 rows trains a token that stops .*: 1 have one, and are cut before"
    ):
        next(data_of(home, write, rows[0], lmbda=0.5).train)
    text = next(data_of(home, write, {"prompt": "Say", "completion": " a"}, lmbda=0.5).train)["prompts"][0]
    assert text.ids == tokenizer.encode("Say")
    assert text.own.ids == [*tokenizer.encode("Say a"), tokenizer.eos_token_id] and text.own.labels[:3] == [-100] * 3


@pytest.mark.parametrize("says, rows, options", [
    (r"rows.jsonl:1: the row has no completion, and a step that does not sample \(lmbda=0.5\) is on rows' own",
     [{"prompt": "a"}], {"lmbda": 0.5}),
    ("has no completion, and the evaluation is on rows' own completions",
     [{"prompt": "a"}, {"prompt": "b"}], {"eval_share": 0.5}),
    ("rows.jsonl:2: the row has no completion, on which some steps train",
     [{"messages": ASKED + SAID}, {"messages": ASKED}], {"lmbda": 0.5}),
    ("rows.jsonl:1: the row has no prompt to sample completions of", [{"text": "a"}], {}),
    ("rows.jsonl:2: prompt: expected messages, as in the first row", [{"messages": ASKED}, {"messages": SAID}], {}),
    ("rows.jsonl:1: prompt: it has 60 tokens, and with max_completion_length=9 more", [{"prompt": "a" * 60}], {}),
], ids=str)  # fmt: skip
def test_rows_that_cannot_be_asked_are_named(home, write, says, rows, options):
    with pytest.raises(InputError, match=says):
        data = data_of(home, write, *rows, **options)
        data.count()


@pytest.mark.parametrize("says, options", [
    ("lmbda=1.5: expected 1 or less", {"lmbda": 1.5}),
    ("would teach the model its own samples", {"hard_weight": 0.1}),
    ("prompts is given, but nothing is sampled: add --lmbda 1", {"lmbda": 0, "prompts": 4}),
    ("sampling_temperature is given, but nothing", {"lmbda": 0, "sampling_temperature": 0.0}),
    ("a step that samples has prompts; give --prompts", {"accumulation": 3}),
    ("give a multiple of 2", {"prompts": 3}),
    ("a model that is split so does not sample", {"cp": 2}),
])  # fmt: skip
def test_options_of_sampling_that_are_refused(says, options, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(InputError, match=says):
        DistillOptions(**{"model": "a", "data": "b", "output_dir": "c", "teacher": "d", "lmbda": 1, **options})


STEPS, PROMPTS, NEW = 5, 3, 9


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("beta, temperature", [(1.0, 1.0), (0.5, 0.8), (0.0, 1.0)])
def test_steps_on_policy_are_trls(home, teacher, tmp_path, monkeypatch, beta, temperature):
    """On the same completions: losses, norms of gradients and weights of its DistillationTrainer."""
    datasets, transformers = pytest.importorskip("datasets"), pytest.importorskip("transformers")
    trl = pytest.importorskip("trl")
    ours = DistillOptions(
        model=str(home / "model"), data=str(home / "chats.jsonl"), output_dir=str(tmp_path / "ours"),
        teacher=str(teacher), lmbda=1, prompts=PROMPTS, max_completion_length=NEW, max_length=128, batch_tokens=4096,
        learning_rate=1e-3, lr_scheduler_type="constant_with_warmup",
        warmup_steps=0, report_to="none", show=0, max_steps=STEPS, beta=beta, temperature=temperature,
    )  # fmt: skip
    data = Data(ours, Distill(ours, Tokenizer.from_hub(ours.model)))
    rows = [{"prompt": next(data.train)["prompts"][0].prompt} for _ in range(STEPS * PROMPTS)]
    arguments = trl.DistillationConfig(
        str(tmp_path / "trl"), max_steps=STEPS, per_device_train_batch_size=PROMPTS, learning_rate=1e-3, use_cpu=True,
        lr_scheduler_type="constant", max_completion_length=NEW, temperature=temperature, beta=beta, bf16=False,
        gradient_checkpointing=False, disable_tqdm=True, report_to=[], save_strategy="no", logging_steps=1,
        shuffle_dataset=False,
    )  # fmt: skip
    models = [transformers.AutoModelForCausalLM.from_pretrained(folder) for folder in (home / "model", teacher)]
    tokenizer = transformers.AutoTokenizer.from_pretrained(home / "model")
    trainer = trl.DistillationTrainer(
        models[0], models[1], args=arguments, train_dataset=datasets.Dataset.from_list(rows), processing_class=tokenizer
    )  # fmt: skip
    stop = tokenizer.eos_token_id
    trainer._generate_single_turn = lambda prompts, *others, **more: fake(None, prompts, 1, stop_ids=(stop,))
    trainer.train()
    monkeypatch.setattr(rollout, "sample", fake)
    assert recipes.train("distill", **vars(ours) | {"accumulation": None}) == 0
    for name in ("loss", "grad_norm"):
        expected = [entry[name] for entry in trainer.state.log_history if name in entry]
        assert list(metrics(tmp_path / "ours", name).values()) == pytest.approx(expected, rel=2e-4), name
    trained = trainer.model.state_dict()
    for name, weight in ligermodels.load(tmp_path / "ours" / "model").state_dict().items():
        assert (weight - trained[name]).abs().max() < 2e-4, name
