"""Speculation: the text is that without it, whoever guesses and however much of it is right."""

import itertools
import math
import random

import pytest
import torch
from torch import nn
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

import ligermodels
from ligermodels.generation import generate, generate_iter, graphs
from ligermodels.generation.drafters import DraftingEngine, PromptLookup
from ligermodels.training import add_medusa
from tests.arch import qwen2_vl, qwen3_vl
from tests.generation.models import VOCAB, family, llama, prompt, with_large_weights

K = 2
DRAWN = dict(do_sample=True, seed=3, temperature=0.9, top_k=20, top_p=0.95, repetition_penalty=1.2)
DRAWN |= dict(min_new_tokens=3, no_repeat_ngram_size=3, suppress_tokens=[7], begin_suppress_tokens=[*range(40)])


@pytest.fixture(autouse=True, params=["captured", "uncaptured"])
def steps(request, monkeypatch):
    """The tokens that each step reads. Captured: with lengths on the device, and as a CUDA graph on a GPU."""
    monkeypatch.setattr(graphs, "DEVICES", {"cpu", "cuda"} if request.param == "captured" else set())
    seen = []

    place, forward = DraftingEngine.place, DraftingEngine.forward

    def verify(self, step, last, guesses):
        seen.append([last, *map(int, guesses)])
        place(self, step, last, guesses)

    def without_guesses(self):
        if self.length > self.start:
            seen.append(self.text[-1:])
        forward(self)

    monkeypatch.setattr(DraftingEngine, "place", verify)
    monkeypatch.setattr(DraftingEngine, "forward", without_guesses)
    return seen


@pytest.fixture
def guess(monkeypatch):
    """guess(ids, rate): each guess is the token of `ids` with this probability, else another one."""

    def know(ids, rate=1.0):
        text = ids[0].tolist()

        def foresee(self, tokens, states):
            draw = random.Random(len(tokens))
            ahead = text[len(tokens) :][: self.count]
            return [token if draw.random() < rate else (token + 1) % VOCAB for token in ahead]

        monkeypatch.setattr(PromptLookup, "propose", foresee)

    return know


def assert_same_ids(model, steps, guess, ids, rates=(0.6, 1.0), **options):
    """Returns the ids. Of perfect guesses, each step but the last makes K + 1 tokens."""
    options = {"max_new_tokens": 32, "eos_token_id": (), **options}
    expected = generate(model, ids, **options)
    new = expected.shape[1] - ids.shape[1]
    assert expected[:, ids.shape[1] :].unique().numel() > 4, "a model that repeats itself proves little"
    for rate in rates:
        guess(expected, rate)
        steps.clear()
        assert torch.equal(generate(model, ids, prompt_lookup_num_tokens=K, **options), expected)
        fewest = math.ceil((new - 1) / (K + 1))
        assert len(steps) == fewest if rate == 1 else fewest < len(steps) < new - 1
    return expected


@pytest.mark.parametrize("name", ["llama", "gemma2", "mixtral", "qwen3", "qwen3_5_text"])
def test_every_family_writes_the_same(name, device, steps, guess):
    model, ids = family(name).to(device), prompt(1, 9).to(device)
    assert_same_ids(model, steps, guess, ids)
    assert_same_ids(model, steps, guess, ids, **DRAWN)


@pytest.mark.parametrize("rope", ["dynamic", "longrope"])
def test_frequencies_that_change_with_the_length_end_the_guesses(rope, device, steps, guess):
    model, ids = llama(rope=rope, positions=24).to(device), prompt(1, 9).to(device)
    expected = generate(model, ids, max_new_tokens=32)
    guess(expected)
    assert torch.equal(generate(model, ids, max_new_tokens=32, prompt_lookup_num_tokens=K), expected)
    guesses = [len(step) - 1 for step in steps]
    assert guesses[0] == K and 0 in guesses and guesses[-2] == (0 if rope == "dynamic" else K)
    found = generate(model, ids, max_new_tokens=32, prompt_lookup_num_tokens=K, prefill_chunk_size=4)
    assert torch.equal(found, expected)


@pytest.mark.parametrize(
    "build", [qwen2_vl.windowed, qwen3_vl.qwen3_vl, qwen3_vl.qwen3_vl_moe, qwen3_vl.qwen3_5, qwen3_vl.qwen3_5_moe]
)
def test_images_of_qwen(build, device, steps, guess):
    config = build()
    model = with_large_weights(ligermodels.ARCHS[config["model_type"]].from_config(config, seed=0)).to(device)
    made = qwen2_vl.inputs([[3, ("image", (1, 2, 3)), 4]], config)
    batch = {name: x if "grid" in name else x.to(device) for name, x in made.items()}
    batch.pop("attention_mask", None)
    assert_same_ids(model, steps, guess, batch.pop("input_ids"), **batch)
    assert_same_ids(model, steps, guess, prompt(1, 7).to(device))


def fit(heads, model, text):
    """Makes heads that guess this text, by least squares."""
    hidden = model(text, return_logits=False).last_hidden_state[0]
    for k, head in enumerate(heads):
        x, y = hidden[: -k - 2], nn.functional.one_hot(text[0, k + 2 :], VOCAB).float()
        head[-1].weight.data.copy_(torch.linalg.lstsq(x.cpu(), y.cpu()).solution.T)


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_medusa_heads_guess_from_the_hidden_state_of_the_last_token(name, device, steps):
    model = family(name, vocab_size=VOCAB).to(device)
    heads, ids = add_medusa(model, K), prompt(1, 4).to(device)
    for options in ({}, DRAWN):
        options = {"max_new_tokens": 40, "eos_token_id": (), **options}
        expected = generate(model, ids, **options)
        fit(heads, model, expected[:, :-4])
        steps.clear()
        assert torch.equal(generate(model, ids, medusa=heads, **options), expected)
        assert len(steps) < 25, "most guesses are right"
        hidden = model(expected, return_logits=False).last_hidden_state
        right = torch.stack([y[0].argmax(-1) for y in heads(hidden)], 1).tolist()
        last, text = ids.shape[1], expected[0].tolist()  # the place of the last token, which the one before it gave
        for step in steps:
            assert step == [text[last], *right[last - 1][: max(0, len(text) - last - 2)]]
            wrong = (i for i, guessed in enumerate(step[1:], 1) if guessed != text[last + i])
            last += next(wrong, len(step))


def test_prompt_lookup_guesses_what_that_of_transformers_does():
    draw = random.Random(0)
    for size, count in itertools.product((1, 2, 3), (1, 4)):
        theirs = PromptLookupCandidateGenerator(None, count, size, max_length=10**6)
        tokens, ours = [draw.randrange(6) for _ in range(3)], PromptLookup(count, size)
        for _ in range(60):
            expected, _ = theirs.get_candidates(torch.tensor([tokens]))
            assert ours.propose(tokens, torch.empty(0)) == expected[0, len(tokens) :].tolist()
            tokens += [draw.randrange(6) for _ in range(draw.randrange(1, 3))]


def test_text_that_repeats_takes_fewer_steps(steps):
    model, ids = llama(), prompt(1, 6)
    free = generate(model, ids, max_new_tokens=120)
    found = generate(model, ids, max_new_tokens=120, prompt_lookup_num_tokens=K, max_matching_ngram_size=3)
    assert torch.equal(found, free) and len(steps) < 118


# What generate promises.


@pytest.mark.parametrize("window", [None, 4])
def test_it_ends_where_it_would_and_the_cache_holds_all_but_the_last_token(window, device, steps, guess):
    model, ids = llama((None, window) if window else (None, None)), prompt(1, 5)
    if device == "cuda":
        model, ids = llama().to(device), ids.to(device)
    free = generate(model, ids, max_new_tokens=40)
    guess(free)
    text = free[0, 5:].tolist()
    words = ligermodels_words(text)
    for new in range(1, 12):
        eos = text[new - 1]
        if eos in text[: new - 1]:
            continue
        for end in (
            dict(max_new_tokens=new),
            dict(eos_token_id=eos, max_new_tokens=40),
            dict(stopping_criteria=lambda ids, scores, new=new: ids.shape[1] >= 5 + new, max_new_tokens=40),
            dict(stop_strings=words.decode([eos]), tokenizer=words, max_new_tokens=40),
        ):
            found = generate(model, ids, prompt_lookup_num_tokens=K, return_dict_in_generate=True, **end)
            assert torch.equal(found.sequences, free[:, : 5 + new])
            assert found.past_key_values.length == 5 + new - 1
            more = dict(past_key_values=found.past_key_values, max_new_tokens=12)
            assert torch.equal(generate(model, found.sequences, **more), free[:, : 17 + new])
    cache = model.new_cache(1, 8)
    stream = generate_iter(model, ids, past_key_values=cache, max_new_tokens=40, prompt_lookup_num_tokens=K)
    assert [next(stream).item() for _ in range(10)] == text[:10]
    stream.close()
    assert cache.length == 14
    assert list(map(int, generate_iter(model, ids, max_new_tokens=40, prompt_lookup_num_tokens=K))) == text


def ligermodels_words(ids):
    """A tokenizer of words."""

    class Words:
        def decode(self, ids, **options):
            return "".join(f"<{i}>" for i in ids)

    return Words()
