"""Distillation: its loss beside plain formulas and TRL's, what is compared with what, and whole runs."""

import json
import shutil

import pytest
import torch
import torch.nn.functional as F

import ligermodels
from ligermodels.errors import InputError
from ligermodels.recipes.distill import check_same_tokens, distill_loss
from ligermodels.recipes.options import DistillOptions
from ligermodels.text import Tokenizer
from tests.arch import qwen2_vl
from tests.recipes import losses
from tests.recipes.runs import metrics, train
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
        loss = distill_loss(student, batch, count, teacher=teacher, **options)
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
    loss = distill_loss(student, batch, torch.tensor(7.0), teacher=teacher.requires_grad_(False), **OPTIONS | options)
    torch.testing.assert_close(loss, expected)
    losses.assert_same(losses.gradients(student, loss), losses.gradients(student, expected))


FEW = ("--length", "64", "--accumulation", "2", "--steps", "6", "--lr", "3e-3", "--warmup", "0", "--eval-share", "0.3")


@pytest.fixture(scope="module")
def teacher(home):
    flags = ("--length", "128", "--accumulation", "1", "--lr", "4e-3", "--epochs", "10")
    assert train(home, "teacher", *flags) == 0
    return home / "teacher" / "model"


def distill(home, out, teacher, *flags):
    return train(home, out, *FEW, "--teacher", teacher, *flags, recipe="distill")


def weights(folder):
    return next(folder.glob("*/*model.safetensors")).read_bytes()


def test_a_run_comes_near_its_teacher_and_resumes_with_the_same_bits(home, teacher, capsys):
    assert distill(home, "distilled", teacher, "--save-every", "3", "--eval-every", "3") == 0
    told = metrics(home / "distilled", "eval_divergence")
    assert told == pytest.approx(metrics(home / "distilled", "eval_loss")) and told[6] < 0.85 * told[0]
    shutil.copytree(home / "distilled", home / "again")
    for gone in ("model", "best", "checkpoints/step-00000006"):
        shutil.rmtree(home / "again" / gone)
    assert distill(home, "again", teacher, "--save-every", "3", "--eval-every", "3", "--resume") == 0
    assert "resumed after step 3" in capsys.readouterr().err
    assert weights(home / "again") == weights(home / "distilled")
    assert metrics(home / "again") == metrics(home / "distilled")
    assert distill(home, "again", teacher, "--resume", "--beta", "0.5") == 3
    assert "had beta=1.0, and this has beta=0.5" in capsys.readouterr().err


def test_two_processes_shard_the_teacher_and_compute_what_one_does(home, teacher, tmp_path):
    flags = ("--eval-every", "2")
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
        DistillOptions(**{"model": "a", "data": "b", "out": "c", "teacher": "d", **options})
