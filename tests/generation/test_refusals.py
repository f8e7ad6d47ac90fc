"""What generate and generate_many do not take: an error that says so, at the call."""

import pytest
import torch
from transformers import DynamicCache, GenerationConfig, LlamaConfig, StaticCache

import ligermodels
from ligermodels.errors import InputError
from ligermodels.generation import generate, generate_iter, generate_many_iter
from ligermodels.generation.options import KNOWN_NAMES
from ligermodels.training import add_medusa
from ligermodels.training.lora import add_lora
from tests.arch import llama_vision
from tests.generation.models import VOCAB, family, llama

ONE, TWO = torch.ones(1, 5, dtype=torch.int64), torch.ones(2, 5, dtype=torch.int64)
LOOKUP, FP8 = dict(prompt_lookup_num_tokens=2), dict(kv_cache_dtype="fp8")


def embeds(*shape):
    return dict(inputs_embeds=torch.zeros(shape))


def filled(rows):
    """A cache of transformers with five tokens."""
    past = DynamicCache()
    for layer in range(2):
        past.update(*torch.zeros(2, rows, 2, 5, 8), layer)
    return past


@pytest.mark.parametrize("ids, options, message", [
    (TWO, dict(max_new_token=3), "neither an option of generate nor an input of Llama; did you mean 'max_new_tokens'"),
    (TWO, dict(max_length=5, max_new_tokens=None), "prompt has 5 tokens, padding included, and max_length=5"),
    (TWO, dict(max_new_tokens=0), "at least 1"),
    (TWO, dict(num_return_sequences=2), "num_return_sequences=2 needs do_sample=True"),
    (TWO, dict(temperature=-0.1), "temperature"),
    (TWO, dict(temperature=float("nan")), "temperature=nan must be a number of 0, or at least 1e-20 and at most 1e"),
    (TWO, dict(do_sample=True, temperature=0.0), "do_sample=True and temperature=0 contradict"),
    (TWO, dict(temperature=1.0, top_p=1.1), "top_p"),
    (TWO, dict(no_repeat_ngram_size=-1), "no_repeat_ngram_size=-1 must be an integer of at least 0"),
    (TWO, dict(min_length=-1), "min_length=-1 must be an integer of at least 0"),
    (TWO, dict(suppress_tokens=7), "suppress_tokens=7 must be a list of token ids"),
    (TWO, dict(begin_suppress_tokens=[7, 0.5]), r"begin_suppress_tokens=\[7, 0.5\] must be a list of token ids"),
    (TWO, dict(typical_p=0.9), r"^typical_p=0.9 is not supported.*logits_processor=TypicalLogitsWarper\(...\) of tr"),
    (TWO, dict(max_time=9), "stopping_criteria=MaxTimeCriteria"),
    (TWO, dict(eos_token_id=VOCAB + 3), "pass pad_token_id"),
    (TWO, dict(pad_token_id=VOCAB), "outside the vocabulary"),
    (TWO, dict(stop_strings="x"), "pass tokenizer"),
    (TWO, dict(stop_strings=["x", ""]), "non-empty strings"),
    (TWO, dict(prefill_chunk_size=2, use_cache=False), "use_cache=False contradicts prefill_chunk_size"),
    (TWO, dict(attention_mask=torch.ones(2, 6)), r"\[2, 6\].*\[2, 5\]"),
    (TWO, dict(attention_mask=torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])), "row 1.*pad on the left"),
    (TWO, dict(attention_mask=1e9 - torch.ones(2, 5)), "other values"),
    (TWO, dict(input_ids=TWO), "two names"),
    (ONE[0], {}, r"are torch.int64 \[5\];.*pass input_ids\[None\]"),
    ([[3]], {}, "input_ids is a list"),
    (ONE.float(), {}, "must be torch.int64 or torch.int32"),
    (None, {}, "pass input_ids"),
    (TWO + VOCAB, {}, "the vocabulary from 0"),
    (TWO[:, :0], {}, "the bos token for an empty one"),
    (TWO, embeds(2, 4, 32), r"inputs_embeds is \[2, 4, 32\]; it must be .*of the same tokens as input_ids"),
    (None, embeds(2, 4, 31), r"must be a tensor \[batch, length of at least 1, 32\]"),
    (None, embeds(1, 4, 32) | LOOKUP, "prompt_lookup_num_tokens contradicts inputs_embeds"),
    (TWO, LOOKUP, r"a batch of 2 rows \(call generate for each"),
    (ONE, LOOKUP | dict(do_sample=True, num_return_sequences=3), "a batch of 3 rows"),
    (ONE, LOOKUP | dict(attention_mask=torch.tensor([[0, 1, 1, 1, 1]])), "contradicts padding"),
    (ONE, LOOKUP | dict(use_cache=False), "use_cache=False contradicts prompt_lookup_num_tokens"),
    (ONE, LOOKUP | dict(past_key_values=DynamicCache()), "model.new_cache"),
    (ONE, LOOKUP | dict(medusa=True), "prompt_lookup_num_tokens contradicts medusa"),
    (ONE, LOOKUP | dict(synced_gpus=True), "synced_gpus=True contradicts prompt_lookup_num_tokens"),
    (ONE, dict(prompt_lookup_num_tokens=0), "at least 1"),
    (ONE, dict(prompt_lookup_num_tokens=129), "=129 must be an integer of at least 1 and at most 128"),
    (ONE, LOOKUP | dict(max_matching_ngram_size=0), "at least 1"),
    (ONE, dict(medusa=True), "medusa is a bool and must be the heads of a model with 32 hidden"),
    (ONE, dict(kv_cache_dtype="int8"), "'auto', the dtype of the model, or 'fp8'"),
    (ONE, dict(kv_cache_dtype=torch.float8_e4m3fn), "'auto', the dtype of the model, or 'fp8'"),
    (ONE, dict(use_cache=False, **FP8), "use_cache=False contradicts"),
    (ONE, dict(past_key_values=DynamicCache(), **FP8), r"new_cache\(..., kv_cache_dtype='fp8'\)"),
    (ONE, dict(past_key_values=filled(1)), "has 5 tokens and input_ids 5"),
    (torch.ones(2, 9, dtype=torch.int64), dict(past_key_values=filled(1)), "of 1 rows, input_ids of 2"),
    (ONE, dict(past_key_values=((ONE, ONE),)), "past_key_values is a tuple"),
    (ONE, dict(max_new_tokens=10**11), r"^1 x 100000000005 tokens need a cache of [\d,]+ GB.*: lower max_new_tokens"),
    (TWO, dict(max_length=10**18, max_new_tokens=None), "^2 x 1000000000000000000 tokens need a cache of"),
    (ONE, dict(past_key_values=filled(1), cache=filled(1)), "two names for one cache"),
    (ONE, dict(num_beams=4), "^num_beams=4 is not supported by generate; leave num_beams out"),
    (ONE, dict(generation_config=dict(penalty_alpha=0.6)), "^penalty_alpha=.*not supported by generate; leave pen"),
])  # fmt: skip
def test_generate(ids, options, message):
    model, seen = llama(), []
    model.config.pad_token_id = None
    model.register_forward_pre_hook(lambda *a: seen.append(a))
    for call in (generate, generate_iter):  # the latter at the call, not when it is read
        with pytest.raises(InputError, match=message):
            call(model, ids, **{"max_new_tokens": 3, **options})
    assert not seen


def test_what_belongs_to_another_model():
    model, other = llama(), family("llama")
    fp8, static = model.new_cache(1, 20, **FP8), StaticCache(LlamaConfig(), max_cache_len=30)
    for options, message in [
        (dict(medusa=add_medusa(other, 2)), "must be the heads of a model with 32 hidden"),
        (dict(medusa=add_medusa(llama(), 2).to("meta")), "on meta, the model on cpu"),
        (dict(past_key_values=fp8, kv_cache_dtype="auto"), "contradicts past_key_values, which is of 'fp8'"),
        (dict(past_key_values=static), "StaticCache.*not a cache of a fixed size"),
    ]:
        with pytest.raises(InputError, match=message):
            generate(model, ONE, max_new_tokens=3, **options)
    with pytest.raises(InputError, match="must be one of auto, fp8"):
        model.new_cache(1, 20, kv_cache_dtype="e5m2")
    with pytest.raises(InputError, match=r"^1 x 100000000000 tokens need a cache of 26,400 GB"):
        # keys and values of two layers in fp32, and ids
        model.new_cache(1, 10**11)
    with pytest.raises(InputError, match="no_grad"):
        add_lora(model, 2)(ONE, past_key_values=fp8)
    plain = model.new_cache(1, 20)
    generate(llama(), ONE, max_new_tokens=3, past_key_values=plain)
    with pytest.raises(InputError, match=r"do not fit a cache of .* in torch\.float32"):
        plain[0].append(*torch.zeros(2, 1, 1, 2, 8, dtype=torch.bfloat16), plain.length)


def test_models_with_images():
    model = ligermodels.LlamaVision.from_config(llama_vision.tiny())
    with pytest.raises(InputError, match="prompt_lookup_num_tokens contradicts a model with cross-attention"):
        generate(model, ONE, max_new_tokens=3, **LOOKUP)
    with pytest.raises(InputError, match="pixel_values contradicts prefill_chunk_size"):
        generate(model, ONE, max_new_tokens=3, pixel_values=torch.zeros(1), prefill_chunk_size=2)


def test_what_a_checkpoint_sets():
    model = llama()
    for name, value in (("num_beams", 4), ("force_words_ids", [[3]]), ("assistant_model", "small")):
        model.generation_config = type(model.generation_config)({name: value})
        with pytest.raises(InputError, match=f"^model.generation_config sets {name}=.*, which generate does not supp"):
            generate(model, ONE, max_new_tokens=2)
    own = dict(use_cache=False, return_dict_in_generate=True, output_logits=True, prompt_lookup_num_tokens=2)
    model.generation_config = type(model.generation_config)(own)  # of one batch
    assert len(list(generate_many_iter(model, [[3], [4, 5]], max_new_tokens=3))) == 2


def test_every_option_of_transformers_is_known():
    """One that is new in transformers must not be taken for an input of the model, or pass unseen in a config."""
    unknown = {name for name in vars(GenerationConfig()) if not name.startswith("_")} - KNOWN_NAMES
    assert unknown == {"transformers_version"}


@pytest.mark.parametrize("prompts, options, message", [
    ([[3]], dict(batch_size=0), "batch_size=0 must be"),
    ([[3]], dict(prefill_chunk_size=0), "prefill_chunk_size=0 must be"),
    ([[3]], dict(num_return_sequences=2), "num_return_sequences=2 needs do_sample=True"),
    ([[3]], embeds(1, 3, 32), "does not take inputs_embeds: prompts and results are lists of ids"),
    ([[3]], dict(streamer=object()), "does not take streamer.*use `generate`"),
    ([[3]], dict(stopping_criteria=lambda ids, scores: False), "does not take stopping_criteria"),
    ([[3]], dict(output_scores=True), "does not take output_scores"),
    ([[3]], dict(use_cache=False), "needs its cache"),
    ([[3]], dict(pixel_values=1), "neither an option of generate nor an input of Llama"),
    ([[3]], dict(max_new_tokens=10**11), "tokens need a cache of"),
    ([[3]], dict(cache=1), "does not take cache"),
    ([[3]], dict(num_beams=2), "num_beams=2 is not supported"),
    ([[3], []], {}, r"prompt 1 is \[0\]"),
    ([[[3, 4]], [5]], {}, r"prompt 0 is \[1, 2\]"),
    (["text"], {}, "prompt 0 is a str"),
    ([[3], [VOCAB, 4]], {}, f"reach from 3 to {VOCAB}, the vocabulary from 0 to {VOCAB - 1}"),
])  # fmt: skip
def test_generate_many(prompts, options, message):
    with pytest.raises(InputError, match=message):
        generate_many_iter(llama(), prompts, **{"max_new_tokens": 3, **options})
    with pytest.raises(InputError, match="not a DataParallel around one"):
        generate_many_iter(torch.nn.DataParallel(llama()), [[3]], max_new_tokens=3)
