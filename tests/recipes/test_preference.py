"""Recipes of preferences: what is trained, batches, losses against plain formulas, references, runs and refusals."""

import itertools
import math

import pytest
import torch

import ligermodels
from ligermodels.layers import preference
from ligermodels.processes import Processes
from ligermodels.recipes.data.examples import Example, encode_answers
from ligermodels.recipes.data.formats import read
from tests.parallel.ranks import results_of_ranks
from tests.recipes.runs import CHATS, PAIRS, batches_of, data_of, metrics, run, train

# ---- rows ----


def trained(tokenizer, sequence):
    return tokenizer.decode([label for label in sequence.labels if label != -100])


def test_what_is_trained_of_messages(tokenizer):
    row = PAIRS[1] | {"chosen": PAIRS[1]["chosen"] + CHATS[0]}  # of several turns what the assistant says
    found = encode_answers(read(row), tokenizer)
    chosen, rejected = found.sequences
    asked = tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True)
    assert chosen.ids == tokenizer.apply_chat_template(row["prompt"] + row["chosen"])
    assert chosen.ids[: found.prompt] == rejected.ids[: found.prompt] == asked
    assert trained(tokenizer, chosen) == "bcd<|im_end|>\na<|im_end|>\n" and chosen.ends
    assert trained(tokenizer, rejected) == "no, bcdbcd<|im_end|>\n"


def text_of(batch, tokenizer, prefix=""):
    bounds = batch[prefix + "cu_seqlens"].tolist()
    ids = batch[prefix + "input_ids"][0].tolist()
    return [tokenizer.decode(ids[start:end]) for start, end in itertools.pairwise(bounds)]


@pytest.mark.filterwarnings("ignore:rows are")
def test_long_answers_are_cut_and_long_prompts_left_out(write, tokenizer):
    texts = [("p" * 40, " a" * 30, " b"), ("q" * 64, " c", " d"), *[("r", " e", " f")] * 8]
    rows = [dict(zip(("prompt", "chosen", "rejected"), row, strict=True)) for row in texts]
    data = data_of("dpo", tokenizer, data=str(write("rows.jsonl", rows)))
    found = data.batches(epochs=1)
    with pytest.warns(UserWarning, match=r"rows are cut at --max-length 64, or dropped:"):
        texts = {text for batch in map(data.recipe.collate, found) for text in text_of(batch, tokenizer)}
    assert texts == {"p" * 40 + " a" * 12, "p" * 40 + " b<|im_end|>", "r e<|im_end|>", "r f<|im_end|>"}
    report = found.counts.numbers
    assert report["truncated"] == 1 and report["cut_away"] == 1 and report["tokens_cut"] == 61 - 24


# ---- losses ----


def logprobs(model, sequence):
    """(log probability of the answer, its tokens, that of all tokens, these), from the logits of the sequence alone."""
    ids, labels = torch.tensor([sequence.ids]), torch.tensor(sequence.labels[1:])
    logs = model(ids).logits[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
    return logs[labels != -100].sum(), int((labels != -100).sum()), logs.sum(), len(logs)


def mismatched(row, other):
    """The prompt of one row with the answer of another."""
    ids = row.sequences[0].ids[: row.prompt] + other.sequences[0].ids[other.prompt :]
    return Example(ids, [-100] * row.prompt + ids[row.prompt :])


def expected_of_kto(o, model, before, batches):
    """The loss of a step over the rows of its batches, which have one point of comparison."""
    rows = [row for batch in batches for row in batch]
    others = [mismatched(row, batch[n - 1]) for batch in batches for n, row in enumerate(batch) if len(batch) > 1]
    own, ref = (torch.stack([logprobs(which, row.sequences[0])[0] for row in rows]) for which in (model, before))
    kl = preference.kto_kl(*(torch.stack([logprobs(which, one)[0] for one in others]) for which in (model, before)))
    assert kl > 0
    return preference.kto_loss(
        own, torch.tensor([row.label for row in rows]), ref, kl=kl, beta=o.beta, loss_type=o.loss_type,
        desirable_weight=o.desirable_weight, undesirable_weight=o.undesirable_weight,
    ).mean()  # fmt: skip


def expected_of_pairs(o, model, before, rows):
    """The loss of a step over the rows."""
    own, ref = ([[logprobs(which, one) for one in row.sequences] for row in rows] for which in (model, before))
    is_mean = o.recipe in ("orpo", "simpo") or o.loss_type in ("sigmoid_norm", "ipo")
    chosen, rejected, ref_chosen, ref_rejected = (
        torch.stack([row[side][0] / (row[side][1] if is_mean else 1) for row in rows_of])
        for rows_of in (own, ref)
        for side in (0, 1)
    )
    if o.recipe == "dpo":
        how = dict(beta=o.beta, loss_type=o.loss_type, label_smoothing=o.label_smoothing)
        losses = preference.dpo_loss(chosen, rejected, ref_chosen, ref_rejected, **how)
    elif o.recipe == "orpo":
        losses = preference.orpo_loss(chosen, rejected, beta=o.beta)
    else:
        how = dict(beta=o.beta, loss_type="simpo", gamma=o.simpo_gamma) if o.recipe == "simpo" else dict(beta=o.beta)
        losses = preference.cpo_loss(chosen, rejected, **how)
    counts_prompts, weight = o.recipe == "orpo", 1.0 if o.recipe == "orpo" else o.sft_weight
    total, number = (sum(row[0][index + 2 * counts_prompts] for row in own) for index in (0, 1))
    return losses.mean() - weight * total / number


CASES = [
    ("dpo", {}), ("dpo", {"loss_type": "sigmoid_norm"}), ("dpo", {"loss_type": "apo_zero", "beta": 0.3}),
    ("dpo", {"label_smoothing": 0.1, "sft_weight": 0.7}),
    ("kto", {"desirable_weight": 1.5, "undesirable_weight": 0.5}), ("kto", {"loss_type": "apo_zero_unpaired"}),
    ("orpo", {}), ("cpo", {}), ("simpo", {"beta": 2.0, "simpo_gamma": 1.0, "sft_weight": 0.5}),
]  # fmt: skip


def load(home):
    return ligermodels.load(home / "model", device="cpu", dtype=torch.float64)


@pytest.mark.parametrize(("recipe", "given"), CASES, ids=str)
def test_a_step_is_that_of_its_sequences_one_by_one(home, tokenizer, recipe, given):
    """Loss and gradient of a step of two batches; tests/layers has the formulas of the losses."""
    file = home / ("single.jsonl" if recipe == "kto" else "pairs.jsonl")
    data = data_of(recipe, tokenizer, data=str(file), batch_tokens=256, **given)
    model, before, of = load(home), load(home), data.recipe
    of.frozen_model = before
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.01)
        model.model.norm.weight.mul_(0.5)  # answers are more likely than before: KTO's point of comparison is not 0
    model.train()
    examples = [next(data.train) for _ in range(2)]
    examples += [examples[1][:1]] if recipe == "kto" else []  # a row that is alone
    steps = [*map(of.collate, [*examples, []])]  # the last counts nothing
    count = of.total(model, steps, Processes(torch.device("cpu")))
    losses, metrics = zip(*(of.loss(model, batch, count) for batch in steps), strict=True)
    found = sum(losses)
    if recipe == "kto":
        expected = expected_of_kto(of.options, model, before, examples)
    else:
        expected = expected_of_pairs(of.options, model, before, examples[0] + examples[1])
    assert "nll_loss" not in metrics[0] or sum(one["nll_loss"][1] for one in metrics) == count[2]
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-9)  # divisors are fp32
    weight = model.lm_head.weight
    slopes = [torch.autograd.grad(loss, weight)[0] for loss in (found, expected)]
    torch.testing.assert_close(*slopes, rtol=1e-5, atol=1e-9)


def test_a_row_is_compared_with_the_others_of_its_forward(home, tokenizer):
    """By each prompt with the answer of the row before it; one that is alone is compared with nothing."""
    data = data_of("kto", tokenizer, data=str(home / "single.jsonl"))
    model, kto = load(home), data.recipe
    kto.frozen_model = load(home)
    with torch.no_grad():
        model.model.norm.weight.mul_(0.5)  # so that its answer is more likely than before
    batches = list(itertools.islice(batches_of(data), 9))
    whole = next(batch for batch in batches if len(batch["desirable"]) > 1)
    said, other = (text_of(whole, tokenizer, prefix) for prefix in ("", "kl_"))
    answers = [text.partition("assistant\n")[2] for text in said]
    assert [text.partition("assistant\n")[2] for text in other] == [answers[-1], *answers[:-1]]
    batch = next(batch for batch in batches if len(batch["desirable"]) == 1)
    value, metrics = kto.loss(model, batch, kto.total(model, [batch], Processes(torch.device("cpu"))))
    beta = kto.options.beta
    ratio = (metrics["reward_chosen"][0] + metrics["reward_rejected"][0]) / beta
    assert metrics["kl"][0] == 0 and ratio > 1
    assert value.item() == pytest.approx(torch.sigmoid(beta * ratio * (1 - 2 * batch["desirable"][0].double())))


def test_the_point_of_comparison_of_kto_is_that_of_all_ranks(home, tokenizer, tmp_path):
    """Each has another batch, whose own point is another. The loss is compared with plain formulas above."""
    data = data_of("kto", tokenizer, data=str(home / "single.jsonl"), batch_tokens=192)
    model, kto = load(home), data.recipe
    kto.frozen_model = load(home)
    with torch.no_grad():
        model.model.norm.weight.mul_(0.5)
    steps = list(itertools.islice(batches_of(data), 2))

    def total():
        processes = Processes.of_group(torch.distributed.group.WORLD)
        return kto.total(model, steps[processes.rank :: 2], processes)

    whole, *alone = (kto.total(model, some, Processes()) for some in (steps, steps[:1], steps[1:]))
    assert whole[2] > 0 and all(abs(one[2] - whole[2]) > 0.01 * whole[2] for one in alone)
    for found in results_of_ranks(tmp_path, total):
        torch.testing.assert_close(found, whole)


# ---- runs ----


def test_the_reference_is_the_model_before_the_run(home, tmp_path):
    """A frozen copy, or the model without its adapters, is the model as it was."""
    for recipe, start, flags in (("dpo", math.log(2), ()), ("kto", 0.5, ("--lora-r", "4"))):
        out = tmp_path / recipe
        assert run(home, out, recipe, *flags) == 0
        losses = metrics(out)
        assert losses[1] == pytest.approx(start, abs=1e-5) and abs(losses[6] - start) > 1e-3
        assert metrics(out, "eval_loss")[0] == pytest.approx(start, abs=1e-5)


def test_the_plan_counts_a_frozen_copy(home, capsys):
    needs = {}
    for flags in ((), ("--lora-r", "4")):
        assert train(home, "plan", "--dry-run", "--max-length", "48", *flags, recipe="kto", data="single.jsonl") == 0
        needs[flags] = float(capsys.readouterr().out.partition("weights ")[2].split()[0])
    assert needs[()] == pytest.approx(2 * 107_584 * 4 / 2**20, abs=0.05) and needs["--lora-r", "4"] < 0.6
