"""`generate_many`: the ids of `generate` for each prompt alone, in a batch that stays full."""

import math
from types import SimpleNamespace

import pytest
import torch

import ligermodels
from ligermodels.errors import InputError
from ligermodels.generation import continuous, generate, generate_many, generate_many_iter, graphs
from tests.arch import gemma3_vl, gemma4_vl, llama_vision, qwen2_vl, qwen3_vl
from tests.generation import models
from tests.generation.models import family, with_large_weights
from tests.tiny import FAMILIES

LENGTHS = [9, 4, 13, 1, 6, 22, 3, 8, 2, 17, 5]


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    monkeypatch.setattr(continuous, "REFILL_FRACTION", 4)
    monkeypatch.setattr(graphs, "BUCKET", 1)


def prompts(lengths=LENGTHS):
    return [models.prompt(1, length)[0] for length in lengths]


def alone(model, texts, **options):
    """Each prompt by `generate`, without lengths on the device."""
    found = []
    for text in texts:
        ids = text[None].to(model.device)
        ids = generate(model, ids, attention_mask=torch.ones_like(ids), disable_compile=True, **options)
        found.append(ids[0, len(text) :].cpu())
    return found


def stop_ids(model, texts, new=30, share=0.15):
    """The stop ids that end about half of the texts early, each at another length."""
    every = torch.cat(alone(model, texts, max_new_tokens=new, eos_token_id=()))
    counts = every.bincount()
    order, total, chosen = counts.argsort(descending=True).tolist(), 0, []
    for token in reversed([i for i in order if counts[i]]):
        if total < share * len(every) / 2:
            chosen.append(token)
            total += int(counts[token])
    return chosen


def assert_equal(found, expected):
    assert [x.tolist() for x in found] == [x.tolist() for x in expected]


@pytest.mark.parametrize(
    "name", [name if name in ("gemma2", "phi3") else pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES]
)
def test_every_family_writes_what_it_writes_alone(name, device, steps):
    model, texts = family(name).to(device), prompts()
    new = 20 if name != "phi3" else 10
    options = dict(max_new_tokens=new, eos_token_id=stop_ids(model, texts, new))
    expected = alone(model, texts, **options)
    assert len({len(x) for x in expected}) > 3, "rows must end at different times"
    for size, chunk in ((3, 4), (64, None)):
        assert_equal(generate_many(model, texts, batch_size=size, prefill_chunk_size=chunk, **options), expected)
        assert {min(size, len(texts))} == {len(step.ids) for step in steps}
        steps.clear()


def test_text_alone_in_models_that_read_images(device):
    of_qwen = qwen2_vl.windowed(), qwen3_vl.qwen3_vl(), qwen3_vl.qwen3_5()
    for config in (*of_qwen, gemma3_vl.tiny(), gemma4_vl.tiny(), gemma4_vl.unified(), llama_vision.tiny()):
        model = with_large_weights(ligermodels.ARCHS[config["model_type"]].from_config(config, seed=0)).to(device)
        texts = [text.clamp(max=qwen2_vl.IMAGE - 1) for text in prompts(LENGTHS[:6])]
        options = dict(max_new_tokens=12, eos_token_id=stop_ids(model, texts, 12))
        assert_equal(generate_many(model, texts, batch_size=2, **options), alone(model, texts, **options))
        with pytest.raises(InputError, match="reads text alone: leave pixel_values out"):
            generate_many(model, texts, max_new_tokens=3, pixel_values=torch.zeros(1, 3))


# Its purpose.


def test_the_batch_stays_full(device, steps):
    model, texts = models.llama().to(device), prompts([3, 9, 5, 2, 7, 4, 8, 6] * 5)
    free = torch.cat(generate_many(model, texts, batch_size=8, max_new_tokens=48, eos_token_id=()))
    often = free.bincount(minlength=models.VOCAB)
    order = often.argsort()
    options = dict(max_new_tokens=48, eos_token_id=order[often[order].cumsum(0) < 0.08 * len(free)].tolist())
    steps.clear()
    counts = [len(ids) for ids in generate_many(model, texts, batch_size=8, **options)]
    padded = sum(max(counts[i : i + 8]) for i in range(0, 40, 8))  # batches that end with their longest row
    assert max(counts) > 40 and sorted(counts)[20] < 24, "lengths must be unequal"
    # A row waits until a second is free, and computes one token too many; at the end no prompt is left.
    assert len(steps) * 7 <= sum(counts) + 40 + 8 * max(counts)
    assert len(steps) < 0.7 * padded


def test_a_prompt_runs_once_for_all_its_continuations(device, monkeypatch):
    model, texts = family("qwen3").to(device), prompts([7, 3, 5])
    ran, prefill = [], continuous.ContinuousEngine._run_prompts
    monkeypatch.setattr(
        continuous.ContinuousEngine,
        "_run_prompts",
        lambda self, n: (prefill(self, n), ran.append(len(self.prompt_logits))),
    )
    options = dict(max_new_tokens=9, do_sample=True, num_return_sequences=5, seed=3, eos_token_id=())
    found = generate_many(model, texts, batch_size=4, **options)
    assert len(found) == 15 and sum(ran) == 3
    greedy = generate_many(model, texts, batch_size=4, **{**options, "top_k": 1})
    assert_equal(greedy, [ids for ids in alone(model, texts, max_new_tokens=9, eos_token_id=()) for _ in range(5)])


def test_draws_have_the_distribution_and_the_seed_repeats_them(device):
    model, texts = models.llama().to(device), prompts([4, 2, 6])
    options = dict(max_new_tokens=2, do_sample=True, top_k=4, temperature=3.0, eos_token_id=())
    many = dict(options, num_return_sequences=2000, batch_size=600)
    found = generate_many(model, texts, seed=1, **many)
    assert_equal(generate_many(model, texts, seed=1, **many), found)
    other = generate_many(model, texts, seed=2, **many)
    for i, text in enumerate(texts):
        ids = text[None].to(device)
        expected = generate(model, ids, seed=5, num_return_sequences=2000, **options)[:, len(text) :].cpu()
        expected, *counts = (
            (x[:, 0] * models.VOCAB + x[:, 1]).bincount(minlength=models.VOCAB**2)
            for x in (expected, torch.stack(found[i * 2000 : i * 2000 + 2000]), torch.stack(other[2000 * i :][:2000]))
        )
        assert not torch.equal(*counts)
        for count in counts:  # the distance of two samples of 2,000 among 16 pairs
            assert (count - expected).abs().sum() / 4000 < 0.08


# Options of `generate`.


@pytest.mark.parametrize("options", [
    dict(repetition_penalty=1.6, min_new_tokens=7),
    dict(min_new_tokens=2, max_new_tokens=None, max_length=24, eos_token_id=list(range(3, 80))),
    dict(no_repeat_ngram_size=1, min_length=14, suppress_tokens=[3, 4, 5], begin_suppress_tokens=list(range(60))),
    dict(no_repeat_ngram_size=3, renormalize_logits=True),
    dict(top_k=1, do_sample=True),
    dict(max_new_tokens=1),
    dict(stop_strings=["7", "31"], tokenizer=SimpleNamespace(decode=lambda ids, **_: " ".join(map(str, ids)))),
], ids=lambda options: next(iter(options)))  # fmt: skip
def test_options_count_each_rows_own_tokens(options, device):
    model, texts = models.llama((None, 5)).to(device), prompts()
    options = {"max_new_tokens": 24, "eos_token_id": stop_ids(model, texts, 12), **options}
    expected = alone(model, texts, **options)
    assert_equal(generate_many(model, [text.tolist() for text in texts], batch_size=3, **options), expected)
    assert len({len(ids) for ids in expected}) > (options["max_new_tokens"] != 1)


def test_continuations_come_as_they_end_and_the_cache_serves_the_next_call(device):
    model, texts = models.llama().to(device), prompts()
    options = dict(max_new_tokens=20, eos_token_id=stop_ids(model, texts, 20))
    expected = alone(model, texts, **options)
    stream = generate_many_iter(model, texts, batch_size=3, **options)
    first = [next(stream) for _ in range(4)]
    stream.close()
    assert all(ids.tolist() == expected[i].tolist() for i, ids in first)
    (_, cache), *_ = model.kept_caches.entries
    for _ in range(2):
        found = list(generate_many_iter(model, texts, batch_size=3, **options))
        assert [i for i, _ in found] != sorted(i for i, _ in found)
        assert_equal([ids for _, ids in sorted(found, key=lambda pair: pair[0])], expected)
    assert len(model.kept_caches.entries) == 1 and model.kept_caches.entries[0][1] is cache
    with torch.inference_mode():
        assert_equal(generate_many(model, texts, batch_size=3, **options), expected)
    assert_equal(generate_many(model, texts, batch_size=3, **options), expected)


def test_a_batch_by_the_name_of_transformers(device):
    """As TRL calls it for continuous batching."""
    from transformers import GenerationConfig

    model, texts = models.llama().to(device), [text.tolist() for text in prompts([5, 2, 7])]
    config = GenerationConfig(max_new_tokens=6, do_sample=True, num_return_sequences=2, top_k=1, use_cache=False)
    found = model.generate_batch(texts, generation_config=config, progress_bar=False)
    expected = alone(model, [torch.tensor(text) for text in texts], max_new_tokens=6)
    assert list(found) == [output.request_id for output in found.values()] and len(found) == 6
    for i, output in enumerate(found.values()):
        assert output.generated_tokens == expected[i // 2].tolist() and output.prompt_ids == texts[i // 2]
    assert model.generate_batch([]) == {}


# Where batches cannot be, or not as a graph.


@pytest.mark.parametrize("rope", ["longrope", "dynamic"])
def test_rotary_positions_that_depend_on_the_batch(rope, device, steps, monkeypatch):
    model = models.llama(rope=rope, positions=512 if rope == "longrope" else 24).to(device)
    original = model.decoder.rotary_emb.original_length
    short, long = prompts([3, 9, 6, 2, 5, 8]), prompts([29, 19, 17, 23, 18])

    def check(texts, new, **options):
        stops = stop_ids(model, texts, new)
        found = generate_many(model, texts, batch_size=3, max_new_tokens=new, eos_token_id=stops, **options)
        assert_equal(found, alone(model, texts, max_new_tokens=new, eos_token_id=stops))

    check(short, original - 9)
    assert steps
    if rope == "longrope":
        check(long, 9)  # with the long frequencies, all of them
        for chunk in (1, 7, original, original + 2):
            check(long, 9, prefill_chunk_size=chunk)
    steps.clear()
    model.config.max_position_embeddings = 512  # beyond it there is another warning
    for texts, new in ((short, original), (short[:1] + long[:1], 9), (long + short, original)):
        with pytest.raises(InputError, match=f"rope_type='{rope}' chooses its frequencies by the longest row"):
            generate_many(model, texts, batch_size=3, max_new_tokens=new)
    assert not steps


def test_nan_logits_are_an_error_of_rows_that_have_a_text(device):
    model, texts = models.llama().to(device), prompts([3, 5, 2])
    assert math.isfinite(sum(map(len, generate_many(model, texts, batch_size=2, max_new_tokens=3))))
    with torch.no_grad():
        model.lm_head.weight[3] = torch.nan
    with pytest.raises(InputError, match="float16 overflow"):
        generate_many(model, texts, batch_size=2, max_new_tokens=3)


@pytest.mark.parametrize("many", [True, False], ids=["many", "padded"])
def test_the_experts_of_each_token_are_those_of_one_forward(device, steps, many):
    model, texts = family("qwen3_moe").to(device), prompts([5, 1, 9, 3])
    options = dict(max_new_tokens=12, do_sample=True, seed=1, eos_token_id=stop_ids(model, texts), pad_token_id=0)
    if many:
        rows = [*generate_many(model, texts, batch_size=3, num_return_sequences=2, output_experts=True, **options)]
        rows = [(torch.cat([texts[n // 2], ids]), experts) for n, (ids, experts) in enumerate(rows)]
        assert len({len(ids) for ids, _ in rows}) > 2
    else:
        ids = torch.nn.utils.rnn.pad_sequence(texts, True, 0, "left").to(device)
        mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(x) for x in texts], True, 0, "left").to(device)
        options |= dict(attention_mask=mask, num_return_sequences=2, prefill_chunk_size=4, eos_token_id=())
        out = generate(model, ids, return_dict_in_generate=True, output_experts=True, **options)
        starts = [9 - len(texts[n // 2]) for n in range(8)]
        rows = [(out.sequences[n, at:].cpu(), out.experts[n, at:].cpu()) for n, at in enumerate(starts)]
    for ids, experts in rows:
        expected = model(ids[None].to(device), output_experts=True).experts[:, :-1].cpu()
        assert expected.max() > 1 and torch.equal(experts.transpose(0, 1).int(), expected)


def test_experts_need_a_router():
    with pytest.raises(InputError, match="output_experts needs a mixture of experts"):
        generate_many(models.llama(), prompts([3]), max_new_tokens=2, output_experts=True)
