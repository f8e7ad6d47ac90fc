"""The same call gives what transformers' own model gives, on one checkpoint."""

import contextlib
import json
import warnings

import pytest
import torch
import torch.nn.functional as F

import ligermodels
from ligermodels.errors import InputError
from ligermodels.layers.state import Cache


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """transformers' Llama and ours, of a checkpoint that transformers wrote. Its weights make text that varies."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(3)
    folder = tmp_path_factory.mktemp("llama")
    LlamaForCausalLM(LlamaConfig(
        vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, initializer_range=0.3, bos_token_id=1, eos_token_id=2,
        pad_token_id=0, tie_word_embeddings=False,
    )).save_pretrained(folder)  # fmt: skip
    return LlamaForCausalLM.from_pretrained(folder), ligermodels.load(folder, progress=False)


@contextlib.contextmanager
def checkpoint_says(pair, **values):
    """As if generation_config.json said these."""
    from transformers import GenerationConfig

    before = [model.generation_config for model in pair]
    values = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, **values}
    pair[0].generation_config = GenerationConfig(**values)
    pair[1].generation_config = type(before[1])(values)
    try:
        yield
    finally:
        for model, config in zip(pair, before, strict=True):
            model.generation_config = config


def padded(*lengths, width=9):
    """(ids, mask): padded on the left with 0; no other token is special."""
    ids = torch.randint(3, 97, (len(lengths), width), generator=torch.Generator().manual_seed(width))
    mask = (torch.arange(width) >= width - torch.tensor(lengths)[:, None]).long()
    return ids * mask, mask


def same(pair, *args, seed=5, **options):
    """Our result of the call, found equal to theirs: ids, and with return_dict_in_generate scores and logits."""
    results = []
    for model in pair:
        torch.manual_seed(seed)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            results.append(model.generate(*args, **options))
    theirs, ours = results
    if isinstance(ours, torch.Tensor):
        assert torch.equal(ours, theirs), (ours, theirs)
        return ours
    assert torch.equal(ours.sequences, theirs.sequences)
    for name in ("scores", "logits"):
        assert (getattr(ours, name) is None) == (getattr(theirs, name) is None), name
        for found, expected in zip(getattr(ours, name) or (), getattr(theirs, name) or (), strict=True):
            # logits are about 5; fp32 sums in another order
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    return ours


CALLS = {
    "nothing": dict(),
    "length": dict(max_length=15),
    "in chunks, several": dict(prefill_chunk_size=4, do_sample=True, num_return_sequences=3),
    "all of them": dict(max_new_tokens=30, min_new_tokens=11, repetition_penalty=1.3),
    "sampling": dict(do_sample=True),
    "a length with the prompt": dict(max_new_tokens=30, min_length=20, eos_token_id=[*range(3, 90)]),
    "two least lengths": dict(max_new_tokens=30, min_length=25, min_new_tokens=3, eos_token_id=[*range(3, 90)]),
    "no least length": dict(max_new_tokens=30, min_length=25, min_new_tokens=0, eos_token_id=[*range(3, 25)]),
    "no n-gram twice": dict(max_new_tokens=40, no_repeat_ngram_size=2),
    "no token twice": dict(max_new_tokens=40, no_repeat_ngram_size=1),
    "suppressed": dict(suppress_tokens=[*range(40), 96, 97, 500, -1]),
    "suppressed at first": dict(begin_suppress_tokens=[*range(90), 97, -1]),
    "normalised": dict(renormalize_logits=True, suppress_tokens=(), begin_suppress_tokens=[]),
    "all bans, drawn": dict(do_sample=True, num_return_sequences=3, max_new_tokens=20, min_length=14, top_k=7,
                            no_repeat_ngram_size=2, suppress_tokens=[5, 6, 7], begin_suppress_tokens=[*range(50)],
                            renormalize_logits=True, repetition_penalty=1.2),
    "sampling, all off": dict(do_sample=True, temperature=None, top_k=None, top_p=None, min_p=None, typical_p=None,
                              epsilon_cutoff=0, eta_cutoff=0, repetition_penalty=None, bad_words_ids=None,
                              no_repeat_ngram_size=0, min_length=0),
    "what does nothing": dict(
        num_beams=1, num_return_sequences=1, typical_p=1.0, synced_gpus=False, assistant_model=None,
        prefix_allowed_tokens_fn=None, disable_compile=True, length_penalty=1.0, early_stopping=False,
        output_attentions=False, output_hidden_states=False, streamer=None, negative_prompt_ids=None),
}  # fmt: skip
"""Calls whose options test_random_cases.py does not draw, and some of those that it does."""
CHECKPOINTS = {
    "nothing": dict(),
    "a sampler": dict(do_sample=True, temperature=0.6, top_k=12, top_p=0.9),
    "lengths": dict(max_length=21, min_new_tokens=4, repetition_penalty=1.2),
    "new tokens": dict(max_new_tokens=7, eos_token_id=[2, 40]),
    "bans": dict(
        min_length=18,
        no_repeat_ngram_size=2,
        suppress_tokens=[*range(3, 60, 2)],
        eos_token_id=[2, 40, 50],
        begin_suppress_tokens=[*range(30)],
        renormalize_logits=True,
    ),
    "cuts without sampling": dict(temperature=0.6, top_p=0.5, cache_implementation="hybrid", transformers_version="4"),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_call_gives_what_it_gives_in_transformers(pair, call):
    ids, mask = padded(9, 4, 6)
    options = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True, **CALLS[call]}
    found = same(pair, ids, attention_mask=mask, **options)
    assert len(found.sequences[:, 9:].unique()) > 5 or call == "new tokens", "a model that repeats itself proves little"


@pytest.mark.parametrize(
    "call",
    ["nothing", "all of them", "sampling", "a length with the prompt", "no n-gram twice", "suppressed at first"],
)
@pytest.mark.parametrize("with_ids", [True, False])
def test_embeddings_of_a_prompt_give_what_its_ids_give(pair, call, with_ids):
    """Without the ids, the result and what processors see are the new ones alone."""
    ids, mask = padded(9, 9, 6)
    if not with_ids:  # the padding of transformers' penalty would count new tokens
        ids, mask = ids[:2], mask[:2]
    given = dict(inputs_embeds=pair[1].get_input_embeddings()(ids), attention_mask=mask)
    given |= dict(input_ids=ids) if with_ids else {}
    found = same(pair, return_dict_in_generate=True, output_scores=True, **given, **CALLS[call])
    assert torch.equal(found.sequences[:, :9], ids) == with_ids
    options = dict(max_new_tokens=5, do_sample=True, num_return_sequences=2, **given)
    several = same(pair, **options)
    for own in (dict(use_cache=False), dict(prefill_chunk_size=4)):
        torch.manual_seed(5)
        assert torch.equal(pair[1].generate(**own, **options), several)


@pytest.mark.parametrize("checkpoint", list(CHECKPOINTS)[1:])
def test_a_checkpoint_says_what_the_call_does_not(pair, checkpoint):
    ids, mask = padded(9, 4, 6)
    for call in ("nothing", "length", "sampling", "sampling, all off"):
        options = {"return_dict_in_generate": True, "output_scores": True, **CALLS[call]}
        with checkpoint_says(pair, **CHECKPOINTS[checkpoint]):
            same(pair, ids, attention_mask=mask, **options)


@pytest.mark.parametrize("passed", list(CHECKPOINTS)[1:])
def test_a_passed_generation_config_wins_over_the_checkpoint_and_loses_to_keywords(pair, passed):
    from transformers import GenerationConfig

    ids, mask = padded(9, 4, 6)
    for checkpoint in ("a sampler", "new tokens"):
        for options in ({}, {"max_new_tokens": 4, "do_sample": True}, {"do_sample": False}):
            with checkpoint_says(pair, **CHECKPOINTS[checkpoint]):
                found = same(pair, ids, GenerationConfig(**CHECKPOINTS[passed]), attention_mask=mask, **options)
                torch.manual_seed(5)
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    as_dict = pair[1].generate(ids, CHECKPOINTS[passed], attention_mask=mask, **options)
                assert torch.equal(as_dict, found)


def test_a_temperature_alone_says_whether_to_sample(pair):
    ours, (ids, _) = pair[1], padded(9)
    options = dict(return_dict_in_generate=True, output_scores=True, max_new_tokens=6, seed=1)

    def kept(**call):
        """How many tokens could have been drawn at the first step, of 97."""
        return int(ours.generate(ids, **options, **call).scores[0].isfinite().sum())

    sampled = ours.generate(ids, do_sample=True, top_k=0, temperature=1.5, **options)
    assert torch.equal(ours.generate(ids, temperature=1.5, **options).sequences, sampled.sequences)
    assert kept(temperature=1.5) == 97 and kept(temperature=1.5, do_sample=True) == 50 and kept(do_sample=True) == 50
    assert kept(temperature=1.5, top_k=4) == 4 and kept(temperature=1.5, generation_config={"top_k": 4}) == 4
    with checkpoint_says(pair, do_sample=True, top_k=7):
        assert kept() == kept(temperature=1.5) == 7
        greedy = ours.generate(ids, temperature=0, **options).sequences
        assert torch.equal(greedy, ours.generate(ids, do_sample=False, **options).sequences)
    with checkpoint_says(pair, do_sample=True):
        assert kept() == kept(temperature=1.5) == 50


def test_the_prompt_has_two_names_and_without_one_is_the_bos_token(pair):
    ids, mask = padded(9, 4)
    first = same(pair, ids, attention_mask=mask, max_new_tokens=4)
    for options in (dict(inputs=ids), dict(input_ids=ids)):
        assert torch.equal(same(pair, attention_mask=mask, max_new_tokens=4, **options), first)
    assert same(pair, max_new_tokens=4)[0, 0] == 1
    assert same(pair, input_ids=None, attention_mask=None, max_new_tokens=4, bos_token_id=7)[0, 0] == 7


def test_padding_without_a_mask_is_what_is_the_pad_id(pair):
    ids, mask = padded(9, 4)
    found = same(pair, ids, max_new_tokens=8)
    assert torch.equal(found, same(pair, ids, attention_mask=mask, max_new_tokens=8))
    unpadded = same(pair, ids, max_new_tokens=8, eos_token_id=[2, 0])  # a stop id is a token like others
    assert torch.equal(unpadded, same(pair, ids, attention_mask=torch.ones(2, 9), max_new_tokens=8))
    assert torch.equal(unpadded, same(pair, ids, max_new_tokens=8, pad_token_id=3))
    assert not torch.equal(found, unpadded)
    with pytest.raises(InputError, match=r"row 1 of input_ids \(pad_token_id=0, and no attention_mask\) ends"):
        pair[1].generate(ids.flip(1), max_new_tokens=8)


IDS_OF_A_CONFIG = [
    dict(), dict(pad_token_id=5), dict(eos_token_id=40), dict(eos_token_id=40, pad_token_id=5),
    dict(eos_token_id=[40, 5]),
]  # fmt: skip
IDS_OF_A_GENERATION_CONFIG = [
    None, dict(), dict(do_sample=False), dict(pad_token_id=6), dict(eos_token_id=[6, 30]),
    dict(eos_token_id=41, pad_token_id=7),
]  # fmt: skip


@pytest.mark.parametrize("of_config", IDS_OF_A_CONFIG, ids=str)
@pytest.mark.parametrize("of_generation", IDS_OF_A_GENERATION_CONFIG, ids=str)
def test_which_of_a_checkpoints_ids_count(pair, of_config, of_generation, tmp_path):
    """None: without the file generation_config.json. A prompt without a mask holds the ids 5, 6 and 7."""
    pair[0].save_pretrained(tmp_path)
    none = dict(bos_token_id=1, eos_token_id=None, pad_token_id=None)
    values = json.loads((tmp_path / "config.json").read_text()) | none | of_config
    (tmp_path / "config.json").write_text(json.dumps(values))
    (tmp_path / "generation_config.json").unlink()
    if of_generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(of_generation))
    ours = ligermodels.load(tmp_path, progress=False)
    models = type(pair[0]).from_pretrained(tmp_path), ours
    ids, _ = padded(9, 9)
    ids[0, :3], ids[1, 0], ids[0, 4] = 5, 6, 7
    for options in ({}, dict(pad_token_id=5), dict(eos_token_id=[33, 12, 6]), dict(eos_token_id=5)):
        same(models, ids, max_new_tokens=30, **options)
    ours.save_pretrained(tmp_path / "again")
    again = tmp_path / "again" / "generation_config.json"
    assert (json.loads(again.read_text()) if again.is_file() else None) == of_generation


# Processors, criteria and caches of the caller


class BanOdd:
    def __call__(self, ids, scores):
        scores[:, 1::2] = -torch.inf  # in place, as many write them
        return scores


def test_processors_come_as_one_as_a_list_and_as_transformers_list(pair):
    from transformers import LogitsProcessorList, TemperatureLogitsWarper

    ids, mask = padded(9, 4)
    options = dict(attention_mask=mask, max_new_tokens=20, do_sample=True, temperature=1.3, repetition_penalty=1.2,
                   return_dict_in_generate=True, output_scores=True, output_logits=True)  # fmt: skip
    processors = [BanOdd(), TemperatureLogitsWarper(0.5)]
    for value in (processors, LogitsProcessorList(processors)):
        found = same(pair, ids, logits_processor=value, **options)
        assert (found.sequences[:, 9:] % 2 == 0).all() and found.logits[0].isfinite().all()
    only = same(pair, ids, logits_processor=LogitsProcessorList(processors[:1]), **options)
    alone = pair[1].generate(ids, logits_processor=BanOdd(), seed=5, **options)
    assert torch.equal(alone.sequences, only.sequences) and alone.logits[0].isfinite().all()
    assert found.attentions is None and found["sequences"] is found.sequences
    with pytest.raises(AttributeError, match="beam_indices"):
        _ = found.beam_indices


def test_options_that_are_processors_of_transformers(pair):
    """Those that generate refuses, each with the class that does the same."""
    from transformers import (
        MaxTimeCriteria,
        NoBadWordsLogitsProcessor,
        PrefixConstrainedLogitsProcessor,
        SequenceBiasLogitsProcessor,
        TypicalLogitsWarper,
    )

    ids, mask = padded(9, 4)
    options = dict(attention_mask=mask, max_new_tokens=12, do_sample=True, top_k=0)
    bias = {(5,): 4.0, (44, 5): -9.0}

    def even(row, ids):
        return [*range(2 * row, 97, 2)]

    for option, processor in (
        (dict(sequence_bias=bias), SequenceBiasLogitsProcessor(bias)),
        (dict(typical_p=0.5), TypicalLogitsWarper(0.5)),
        (dict(prefix_allowed_tokens_fn=even), PrefixConstrainedLogitsProcessor(even, 1)),
        (dict(bad_words_ids=[[20], [30, 31]]), NoBadWordsLogitsProcessor([[20], [30, 31]], eos_token_id=2)),
    ):
        with pytest.raises(InputError, match=type(processor).__name__):
            pair[1].generate(ids, **option, **options)
        torch.manual_seed(5)
        expected = pair[0].generate(ids, **option, **options)
        torch.manual_seed(5)
        assert torch.equal(pair[1].generate(ids, logits_processor=processor, **options), expected)
    ended = pair[1].generate(ids, stopping_criteria=MaxTimeCriteria(0.0), **options)
    assert ended.shape[1] == 10


class StopAt:
    """Rows whose last token is one of `ids` are done, in the shapes that transformers and its users return."""

    def __init__(self, ids, form):
        self.ids, self.form, self.seen = ids, form, []

    def __call__(self, ids, scores, **kwargs):
        self.seen.append((ids.shape[1], None if scores is None else len(scores)))
        done = torch.isin(ids[:, -1], torch.tensor(self.ids))
        return {"tensor": done, "bool": bool(done.any()), "one": done.any()}[self.form]


@pytest.mark.parametrize("form, scores", [("tensor", True), ("tensor", False), ("bool", False), ("one", False)])
def test_criteria_end_rows_as_in_transformers(pair, form, scores):
    from transformers import MaxLengthCriteria, StoppingCriteriaList

    ids, mask = padded(9, 4, 6)
    options = dict(attention_mask=mask, max_new_tokens=30, return_dict_in_generate=scores, output_scores=scores)
    stop, most = StopAt(range(30, 50) if form == "tensor" else [55, 70], form), MaxLengthCriteria(25)
    found = same(pair, ids, stopping_criteria=StoppingCriteriaList([stop, most]), **options)
    found = found.sequences if scores else found
    assert 10 < found.shape[1] <= 25 and (form != "tensor" or (found[:, -1] == 0).any())
    calls = len(stop.seen) // 2
    assert stop.seen[:calls] == stop.seen[calls:], "the same arguments"
    ours = pair[1].generate(ids, stopping_criteria=stop, attention_mask=mask, max_new_tokens=16)
    assert torch.equal(ours, found[:, :25])
    with pytest.raises(InputError, match=r"criterion returned \[2\] for 3 rows"):
        pair[1].generate(ids, stopping_criteria=[lambda ids, scores: torch.ones(2)], max_new_tokens=3)


@pytest.mark.parametrize("kind, copies", [("ours", 1), ("ours", 2), ("transformers'", 2)])
def test_a_cache_of_part_of_the_prompt_goes_on(pair, kind, copies):
    """As in a conversation: what generate returned is given back with the next question after it."""
    from transformers import DynamicCache

    theirs, ours = pair
    ids, mask = padded(9, 4)
    more, options = torch.full((2, 3), 33), dict(do_sample=True, num_return_sequences=copies, max_new_tokens=5)
    torch.manual_seed(2)
    first = ours.generate(ids, attention_mask=mask, max_new_tokens=4, eos_token_id=(), return_dict_in_generate=True,
                          past_key_values=DynamicCache() if kind == "transformers'" else None)  # fmt: skip
    assert isinstance(first.past_key_values, DynamicCache if kind == "transformers'" else Cache)
    assert first.past_key_values.get_seq_length() == 12
    text, mask = torch.cat([first.sequences, more], 1), F.pad(mask, (0, 7), value=1)
    torch.manual_seed(2)
    expected = theirs.generate(text, attention_mask=mask, **options)
    widths = []
    handle = ours.register_forward_pre_hook(
        lambda module, args, kwargs: widths.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    torch.manual_seed(2)
    found = ours.generate(text, attention_mask=mask, past_key_values=first.past_key_values, **options)
    handle.remove()
    assert torch.equal(found, expected) and widths[:2] == [(2, 4), (2 * copies, 1)]
