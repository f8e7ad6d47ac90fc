"""Processors and draws against those of transformers."""

import pytest
import torch

from ligermodels.generation import generate
from ligermodels.generation.processors import (
    ban_repeated_ngrams,
    draw,
    keep_min_p,
    keep_top_k,
    keep_top_p,
    penalize_repetition,
)
from tests.generation.models import llama, prompt

transformers = pytest.importorskip("transformers")


def assert_same(found, expected):
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize("ours, theirs, values", [
    (keep_top_k, transformers.TopKLogitsWarper, [1, 2, 50, 200, 999]),
    (keep_top_p, transformers.TopPLogitsWarper, [1e-6, 0.1, 0.5, 0.9, 0.999]),
    (keep_min_p, transformers.MinPLogitsWarper, [0.0, 0.05, 0.5, 1.0]),
], ids=["top_k", "top_p", "min_p"])  # fmt: skip
@pytest.mark.parametrize("spread", [0.01, 3.0, 30.0])
def test_cuts_are_those_of_transformers(ours, theirs, values, spread):
    logits = torch.randn(8, 200) * spread
    if ours is keep_top_k:
        logits = logits.round(decimals=1)  # ties
    for value in values:
        assert_same(ours(None, logits, value), theirs(value)(None, logits))


def test_top_p_keeps_the_smallest_set_that_reaches_p():
    logits = torch.tensor([[0.5, 0.25, 0.125, 0.125]]).log()
    for p, kept in [(0.4, 1), (0.5, 1), (0.51, 2), (0.75, 2), (0.8, 3), (1e-9, 1)]:
        assert keep_top_p(None, logits, p).isfinite().sum() == kept, p


@pytest.mark.parametrize("penalty", [0.5, 1.3])
def test_repetition_penalty_is_that_of_transformers(penalty):
    logits, ids = torch.randn(8, 200) * 3, torch.randint(0, 200, (8, 30))
    expected = transformers.RepetitionPenaltyLogitsProcessor(penalty)(ids, logits)
    assert_same(penalize_repetition(ids, logits, penalty), expected)
    padded = torch.cat([torch.full((8, 4), 7), ids], 1)
    mask = torch.ones(8, 50, dtype=torch.bool)
    mask[:, :4] = False
    assert_same(penalize_repetition(padded, logits, penalty, mask), expected)


@pytest.mark.parametrize("size", [1, 2, 3, 9])
def test_banned_ngrams_are_those_of_transformers(size):
    logits, banned = torch.randn(8, 5), 0
    for length in range(1, 14):
        ids = torch.randint(0, 5, (8, length))
        expected = transformers.NoRepeatNGramLogitsProcessor(size)(ids, logits.clone())
        assert_same(ban_repeated_ngrams(ids, logits, size), expected)
        banned += expected.isinf().sum()
    assert banned > 0 or size == 9


def test_draws_follow_the_distribution():
    logits = torch.tensor([1.0, 0.0, -1.0, 2.0, -torch.inf]).repeat(20000, 1)
    drawn = draw(logits, torch.Generator().manual_seed(0)).bincount(minlength=5) / 20000
    expected = logits[0].softmax(-1)
    # 5 standard deviations of a share estimated from 20000 draws
    assert ((drawn - expected).abs() <= 5 * (expected * (1 - expected) / 20000).sqrt()).all()


def test_a_seed_repeats_and_leaves_the_global_generator_alone():
    model, ids, state = llama(), prompt(), torch.get_rng_state()
    a, b, c = (generate(model, ids, max_new_tokens=20, temperature=2.0, seed=s) for s in (1, 1, 2))
    assert torch.equal(a, b) and not torch.equal(a, c)
    assert torch.equal(state, torch.get_rng_state())


def test_a_processor_sees_all_ids_and_comes_after_the_penalty():
    lengths = []

    def only_three(ids, logits):
        lengths.append(ids.shape[1])
        return torch.full_like(logits, -torch.inf).index_fill(1, torch.tensor([3]), 0.0)

    ids = generate(llama(), prompt(), max_new_tokens=4, temperature=1.0, repetition_penalty=9.0,
                   logits_processor=only_three)  # fmt: skip
    assert ids[0, 5:].tolist() == [3, 3, 3, 3] and lengths == [5, 6, 7, 8]
