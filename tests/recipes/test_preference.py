"""Recipes of preferences: what is trained, batches, losses against plain formulas, references, runs and refusals."""

import itertools
import json
import math

import pytest
import torch
import torch.nn.functional as F

import ligermodels
from ligermodels.cli import main
from ligermodels.layers.preference import DPO_LOSS_TYPES
from ligermodels.processes import Processes
from ligermodels.recipes.formats import read
from ligermodels.recipes.masking import encode_answers
from ligermodels.recipes.preference import DPO_TYPES
from ligermodels.recipes.steps import shard_batches
from tests.recipes.runs import CHATS, PAIRS, batches_of, data_of, metrics, run


def trained(tokenizer, sequence):
    return tokenizer.decode([label for label in sequence.labels if label != -100])


# ---- rows ----


def test_what_is_trained_of_messages(tokenizer):
    found = encode_answers(read(PAIRS[1]), tokenizer)
    chosen, rejected = found.sequences
    asked = tokenizer.apply_chat_template(PAIRS[1]["prompt"], add_generation_prompt=True)
    assert chosen.ids == tokenizer.apply_chat_template(PAIRS[1]["prompt"] + PAIRS[1]["chosen"])
    assert chosen.ids[: found.prompt] == rejected.ids[: found.prompt] == asked
    assert trained(tokenizer, chosen) == "bcd<|im_end|>\n" and chosen.ends
    assert trained(tokenizer, rejected) == "no, bcdbcd<|im_end|>\n"
    assert found.size == chosen.size + rejected.size and found.trained == chosen.trained + rejected.trained
    longer = PAIRS[1] | {"chosen": PAIRS[1]["chosen"] + CHATS[0]}  # of several turns what the assistant says
    assert trained(tokenizer, encode_answers(read(longer), tokenizer).sequences[0]) == "bcd<|im_end|>\na<|im_end|>\n"


def rows_of(write, *rows):
    return str(write("rows.jsonl", list(rows)))


def text_of(batch, tokenizer, prefix=""):
    bounds = batch[prefix + "cu_seqlens"].tolist()
    ids = batch[prefix + "input_ids"][0].tolist()
    return [tokenizer.decode(ids[start:end]) for start, end in itertools.pairwise(bounds)]


@pytest.mark.filterwarnings("ignore:rows are")
def test_long_answers_are_cut_and_long_prompts_left_out(write, tokenizer):
    texts = [("p" * 40, " a" * 30, " b"), ("q" * 64, " c", " d"), *[("r", " e", " f")] * 8]
    rows = [dict(zip(("prompt", "chosen", "rejected"), row, strict=True)) for row in texts]
    data = data_of("dpo", tokenizer, data=rows_of(write, *rows))
    found = data.batches(epochs=1)
    with pytest.warns(UserWarning, match=r"rows are cut or left out, such as:"):
        texts = {text for batch in map(data.recipe.collate, found) for text in text_of(batch, tokenizer)}
    assert texts == {"p" * 40 + " a" * 12, "p" * 40 + " b<|im_end|>", "r e<|im_end|>", "r f<|im_end|>"}
    report = found.counts.numbers
    assert report["truncated"] == 2 and report["cut_away"] == 1 and report["tokens_cut"] == 61 - 24 + 3 + 3


# ---- losses ----


def plain(model, sequence):
    """(log probability of the answer, its tokens, that of all tokens, these), from the logits of the sequence alone."""
    ids, labels = torch.tensor([sequence.ids]), torch.tensor(sequence.labels[1:])
    logs = model(ids).logits[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
    return logs[labels != -100].sum(), int((labels != -100).sum()), logs.sum(), len(logs)


def expected(options, model, before, rows):
    """The loss of a step over the rows, in the words of the papers. before: the same of the model as it was."""
    s, log_s = torch.sigmoid, F.logsigmoid
    beta, losses = options.beta, []
    own = [[plain(model, one) for one in row.sequences] for row in rows]
    ref = [[plain(before, one) for one in row.sequences] for row in rows]
    if options.recipe == "kto":
        kls = []
        for n, row in enumerate(rows):
            other = rows[n - 1]
            ids = row.sequences[0].ids[: row.prompt] + other.sequences[0].ids[other.prompt :]
            labels = [-100] * row.prompt + ids[row.prompt :]
            kls.append(plain(model, type(row.sequences[0])(ids, labels))[0])
            kls[-1] -= plain(before, type(row.sequences[0])(ids, labels))[0]
        kl = torch.stack(kls).mean().clamp(min=0).detach() if options.loss_type == "kto" else 0
        for row, ((a, *_),), ((b, *_),) in zip(rows, own, ref, strict=True):
            ratio = a - b - kl
            weight = options.desirable_weight if row.label else options.undesirable_weight
            losses.append(weight * (1 - s(beta * (ratio if row.label else -ratio))))
        return torch.stack(losses).mean()
    for (w, nw, _, _), (l, nl, _, _), (rw, *_), (rl, *_) in [(*o, *r) for o, r in zip(own, ref, strict=True)]:  # noqa: E741
        d = beta * ((w - rw) - (l - rl))
        per_token = (w - rw) / nw - (l - rl) / nl
        if options.recipe == "dpo":
            e = options.label_smoothing
            kinds = {
                "sigmoid": -(1 - e) * log_s(d) - e * log_s(-d),
                "sigmoid_norm": -log_s(beta * per_token),
                "hinge": (1 - d).clamp(min=0),
                "ipo": (per_token - 1 / (2 * beta)) ** 2,
                "apo_zero": 1 - s(beta * (w - rw)) + s(beta * (l - rl)),
            }
            losses.append(kinds[options.loss_type])
        elif options.recipe == "cpo":
            losses.append(-log_s(beta * (w - l)))
        elif options.recipe == "simpo":
            losses.append(-log_s(beta * (w / nw - l / nl) - options.simpo_gamma))
        else:
            odds = (w / nw - torch.log1p(-(w / nw).exp())) - (l / nl - torch.log1p(-(l / nl).exp()))
            losses.append(-beta * log_s(odds))
    loss, orpo = torch.stack(losses).mean(), options.recipe == "orpo"
    weight = 1.0 if orpo else options.sft_weight
    chosen = [row[0] for row in own]
    nll = -sum(one[2 if orpo else 0] for one in chosen) / sum(one[3 if orpo else 1] for one in chosen)
    return loss + weight * nll if weight else loss


CASES = [
    ("dpo", {}), ("dpo", {"loss_type": "sigmoid_norm"}), ("dpo", {"loss_type": "hinge"}), ("dpo", {"loss_type": "ipo"}),
    ("dpo", {"loss_type": "apo_zero", "beta": 0.3}), ("dpo", {"label_smoothing": 0.1, "sft_weight": 0.7}),
    ("kto", {}), ("kto", {"desirable_weight": 1.5, "undesirable_weight": 0.5}),
    ("kto", {"loss_type": "apo_zero_unpaired"}),
    ("orpo", {}), ("cpo", {}), ("simpo", {"beta": 2.0, "simpo_gamma": 1.0}), ("simpo", {"sft_weight": 0.5}),
]  # fmt: skip


def with_reference(data, before):
    """The recipe of the data, with a frozen copy as its reference."""
    data.recipe.frozen_model = before
    return data.recipe


@pytest.mark.parametrize(("recipe", "given"), CASES, ids=str)
@pytest.mark.parametrize("packing", [True, False])
def test_a_step_is_that_of_the_papers_in_fp64(home, tokenizer, recipe, given, packing):
    """Loss and gradient of a step of two batches, packed and padded."""
    file = home / ("single.jsonl" if recipe == "kto" else "pairs.jsonl")
    found = data_of(recipe, tokenizer, data=str(file), batch_tokens=256, packing=packing, **given)
    first, before = (ligermodels.load(home / "model", device="cpu", dtype=torch.float64) for _ in range(2))
    of = with_reference(found, before)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in first.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.01)
    first.train()
    steps = [of.collate(next(found.train)) for _ in range(2)]
    surplus = shard_batches([steps[0]], Processes(torch.device("cpu"), 1, 2))  # counts nothing
    count = sum(of.count(batch) for batch in (*steps, *surplus)).float()
    total = sum(of.loss(first, batch, count)[0] for batch in (*steps, *surplus))
    (own,) = torch.autograd.grad(total, first.lm_head.weight)

    bounds, sequences = [], of.options.sequences
    known = {tuple(sequence.ids): row for row in map(of.process, map(json.loads, file.read_text().splitlines()))
             for sequence in row.sequences}  # fmt: skip
    for batch in steps:
        if packing:
            ends = batch["cu_seqlens"].tolist()
            ids = [tuple(batch["input_ids"][0, a:b].tolist()) for a, b in itertools.pairwise(ends)]
        else:
            ids = [tuple(row[mask.bool()].tolist()) for row, mask in
                   zip(batch["input_ids"], batch["attention_mask"], strict=True)]  # fmt: skip
        bounds.append([known[one] for one in ids[: len(ids) // sequences]])
    if recipe == "kto":  # the point of comparison is that of a batch
        sizes = [len(rows) for rows in bounds]
        parts = [expected(of.options, first, before, rows) for rows in bounds]
        reference = sum(part * size for part, size in zip(parts, sizes, strict=True)) / sum(sizes)
    else:
        reference = expected(of.options, first, before, [row for rows in bounds for row in rows])
    (theirs,) = torch.autograd.grad(reference, first.lm_head.weight)
    torch.testing.assert_close(total, reference, rtol=1e-6, atol=1e-9)  # divisors are fp32
    torch.testing.assert_close(own, theirs, rtol=1e-5, atol=1e-9)


def test_a_row_that_is_alone_in_a_forward_is_compared_with_nothing(home, tokenizer):
    found = data_of("kto", tokenizer, data=str(home / "single.jsonl"))
    first, before = (ligermodels.load(home / "model", device="cpu", dtype=torch.float64) for _ in range(2))
    with torch.no_grad():
        first.model.norm.weight.mul_(0.5)  # so that its answer is more likely than before
    batch = next(batch for batch in batches_of(found) if len(batch["desirable"]) == 1)
    kto = with_reference(found, before)
    value, metrics = kto.loss(first, batch, kto.count(batch).float())
    beta = kto.options.beta
    ratio = (metrics["reward_chosen"][0] + metrics["reward_rejected"][0]) / beta
    assert metrics["kl"][0] == 0 and ratio > 1
    assert value.item() == pytest.approx(torch.sigmoid(beta * ratio * (1 - 2 * batch["desirable"][0].double())))


def test_the_losses_of_the_command_are_those_of_the_layers():
    """All that are a mean over pairs: the others sort a batch, and would depend on how it is packed."""
    assert set(DPO_TYPES) == set(DPO_LOSS_TYPES) - {"aot", "aot_unpaired"}


# ---- runs ----


def test_the_reference_is_the_model_before_the_run(home, tmp_path):
    """A frozen copy, or the model without its adapters, is the model as it was."""
    for recipe, flags in itertools.product(("dpo", "kto"), ((), ("--lora-r", "4"))):
        out, start = tmp_path / "_".join((recipe, *flags)), math.log(2) if recipe == "dpo" else 0.5
        assert run(home, out, recipe, *flags) == 0
        losses = metrics(out)
        assert losses[1] == pytest.approx(start, abs=1e-5) and abs(losses[6] - start) > 1e-3
        assert metrics(out, "eval_loss")[0] == pytest.approx(start, abs=1e-5)


def test_the_plan_counts_a_frozen_copy(home, capsys):
    argv = [
        "train",
        "kto",
        str(home / "model"),
        "--data",
        str(home / "single.jsonl"),
        "--output-dir",
        str(home / "plan"),
    ]
    needs = {}
    for flags in ((), ("--lora-r", "4")):
        assert main([*argv, "--dry-run", "--max-length", "48", *flags]) == 0
        plan = capsys.readouterr().out
        needs[flags] = float(plan.partition("weights ")[2].split()[0])
    assert needs[()] == pytest.approx(2 * 107_584 * 4 / 2**20, abs=0.05) and needs["--lora-r", "4"] < 0.6
