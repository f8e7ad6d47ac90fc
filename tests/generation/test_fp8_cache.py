"""The KV cache in fp8: a cache of transformers that rounds by itself, and the plain one over rounded tokens."""

import pytest
import torch
from transformers import DynamicCache

from ligermodels import LlamaVision
from ligermodels.generation import generate, generate_many
from ligermodels.layers.state import KeyValues
from tests.arch import llama_vision
from tests.generation.models import llama, padded, prompt, with_large_weights
from tests.generation.test_cache import rounded, state

FP8 = {"kv_cache_dtype": "fp8"}


class Rounding(DynamicCache):
    """The first call returns what it gets, and all hold and return later what is rounded."""

    def update(self, k, v, layer, *args, **options):
        first = self.get_seq_length(layer) == 0
        held = super().update(rounded(k), rounded(v), layer, *args, **options)
        return (k, v) if first else held


def by_hand(model, ids, mask, steps):
    """Greedy ids over a cache that rounds."""
    cache, new = Rounding(), ids
    for _ in range(steps):
        positions = (mask.long().cumsum(1) - 1).clamp(min=0)[:, -new.shape[1] :]
        with torch.no_grad():
            logits = model(new, attention_mask=mask, position_ids=positions, past_key_values=cache).logits
        new = logits[:, -1:].argmax(-1)
        ids, mask = torch.cat([ids, new], 1), torch.cat([mask, torch.ones_like(mask[:, :1])], 1)
    return ids


@pytest.mark.parametrize("windows", [(None, None), (4, None), (1, 9)], ids=str)
@pytest.mark.parametrize("lengths", [[9], [9, 3, 13]], ids=str)
def test_generate_writes_what_a_cache_that_rounds_does(windows, lengths, captured, poison):
    model, (ids, mask) = llama(windows), padded(lengths)
    found = model.generate(ids, attention_mask=mask, max_new_tokens=25, **FP8)
    assert torch.equal(found, by_hand(model, ids, mask, 25))
    plain = model.generate(ids, attention_mask=mask, max_new_tokens=25)
    assert not torch.equal(found, plain) or len(lengths) == 1, "the rounding decides here"
    assert found[:, ids.shape[1] :].unique().numel() > 4
    assert torch.equal(model.generate(ids, attention_mask=mask, max_new_tokens=25, kv_cache_dtype="auto"), plain)
    for row, length in enumerate(lengths):
        alone = model.generate(ids[row : row + 1, -length:], max_new_tokens=25, **FP8)
        assert torch.equal(alone[0, length:], found[row, ids.shape[1] :]), "padding changes nothing"


def test_copies_of_a_prompt_take_their_cache(captured):
    model, ids = llama((4, None)), prompt(2, 7)
    options = dict(max_new_tokens=12, do_sample=True, seed=3)
    found = generate(model, ids, num_return_sequences=3, **options, **FP8)
    assert torch.equal(found, generate(model, ids.repeat_interleave(3, 0), **options, **FP8))


def test_many_prompts_write_what_each_does_alone(captured, poison):
    model, prompts = llama((6, None)), [prompt(length=n)[0] for n in (5, 11, 3, 9, 12, 4, 7)]
    found = generate_many(model, prompts, batch_size=3, max_new_tokens=30, **FP8)
    for ids, new in zip(prompts, found, strict=True):
        expected = generate(model, ids[None], max_new_tokens=30, **FP8)
        assert torch.equal(new, expected[0, len(ids) :])


@pytest.mark.parametrize("windows", [(None, None), (5, None)], ids=str)
def test_calls_of_several_tokens_see_what_the_cache_holds(windows, poison):
    """A prompt in chunks: as the cache that rounds, and off from the whole prompt by the rounding alone."""
    model, ids = llama(windows), prompt(2, 40)
    ours, theirs, logits = model.new_cache(2, 8, **FP8), Rounding(), []
    with torch.no_grad():
        for part in ids.split([7, 9, 1, 1, 12, 10], 1):
            logits.append(model(part, past_key_values=ours).logits)
            expected = model(part, past_key_values=theirs).logits
            torch.testing.assert_close(logits[-1], expected, rtol=1e-5, atol=1e-5)
        whole, found = model(ids).logits, torch.cat(logits, 1)
    torch.testing.assert_close(found[:, :7], whole[:, :7], rtol=1e-5, atol=1e-5)  # the first reads keys as they are
    error = (found - whole)[:, 7:].square().mean().sqrt() / whole.std()
    assert 1e-3 < error < 0.1
    cache = model.new_cache(2, 40, **FP8)
    with torch.no_grad():
        torch.testing.assert_close(model(ids, past_key_values=cache).logits, whole, rtol=1e-5, atol=1e-5)


def test_guesses_change_nothing(captured):
    model, ids = llama((9, None)), prompt(length=6).repeat(1, 4)
    expected = generate(model, ids, max_new_tokens=40, **FP8)
    assert torch.equal(generate(model, ids, max_new_tokens=40, prompt_lookup_num_tokens=3, **FP8), expected)


def test_keys_of_images_stay_as_they_are(captured):
    config = llama_vision.tiny()
    model = with_large_weights(LlamaVision.from_config(config, seed=0))
    ids, _, inputs = llama_vision.images(config, [[(2, 3)], [(5, 1)]], length=12, seed=3)
    out = generate(model, ids, max_new_tokens=12, eos_token_id=(), return_dict_in_generate=True, **FP8, **inputs)
    dtypes = {type(state).__name__: state.tensors()[0].dtype for state in out.past_key_values}
    assert dtypes == {"ImageKeyValues": torch.float32, "KeyValues": torch.uint8}
    other = generate(model, ids, max_new_tokens=12, eos_token_id=(), disable_compile=True, **FP8, **inputs)
    assert torch.equal(out.sequences, other)


def test_under_autocast_the_first_tokens_decide_what_it_gives():
    layer, keys = state(**FP8), torch.randn(2, 2, 3, 4).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        layer.append(keys[:, :1], keys[:, :1], 0)
        assert torch.equal(layer.append(keys[:, 1:], keys[:, 1:], 1)[0], rounded(keys.float()).bfloat16())


def test_memory_is_half(device):
    for dtype, size in ((torch.bfloat16, 128), (torch.float16, 64), (torch.float32, 64)):
        sizes = []
        for kind in ("fp8", "auto"):
            state = KeyValues(3, 100, 4, size, dtype=dtype, device=device, kv_cache_dtype=kind)
            sizes.append(sum(x.nbytes for x in state.tensors()))
        assert sizes[1] == 2 * 3 * 100 * 4 * size * dtype.itemsize
        assert sizes[0] == 2 * 3 * 100 * 4 * (size + 2)
