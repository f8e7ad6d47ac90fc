"""The KV cache in fp8: a cache of transformers that rounds by itself, and the plain one over rounded tokens."""

import pytest
import torch
from transformers import DynamicCache

from ligermodels.errors import InputError
from ligermodels.generation import generate, generate_many, graph
from ligermodels.layers import cache as cache_file
from ligermodels.layers.batch import NextToken
from ligermodels.layers.cache import KVCache
from ligermodels.training.lora import add_lora
from tests.arch import llama_vision
from tests.generation.models import llama, padded, prompt
from tests.generation.test_graph import family

FP8 = {"kv_cache_dtype": "fp8"}


def rounded(x):
    """Each head by itself, as the cache says that it rounds."""
    scale = (x.abs().amax(-1, keepdim=True) / 448).bfloat16().float()
    scale = scale.where(scale > 0, 1)
    return (x / scale).to(torch.float8_e4m3fn).float() * scale


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


@pytest.fixture(params=[False, True], ids=["by host", "as a graph would"])
def captured(request, monkeypatch):
    monkeypatch.setattr(graph, "DEVICES", {"cpu", "cuda"} if request.param else {"cuda"})
    monkeypatch.setattr(cache_file, "SLACK", 3)  # windows move every few tokens
    return request.param


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


@pytest.mark.parametrize("name", ["gemma2", "phi3"])
def test_families_write_the_same_as_a_graph(name, device, monkeypatch):
    """Softcaps and windows; another set of frequencies past a length."""
    monkeypatch.setattr(graph, "DEVICES", {"cpu", "cuda"})
    model, (ids, mask) = family(name).to(device), (x.to(device) for x in padded([9, 4, 13]))
    options = dict(attention_mask=mask, max_new_tokens=20, eos_token_id=(), **FP8)
    assert torch.equal(generate(model, ids, **options), generate(model, ids, disable_compile=True, **options))


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
def test_calls_of_several_tokens_see_what_the_cache_holds(windows, monkeypatch, poison):
    """A prompt in chunks: as the cache that rounds, and off from the whole prompt by the rounding alone."""
    monkeypatch.setattr(cache_file, "SLACK", 3)
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


def test_guesses_change_nothing(captured, monkeypatch):
    monkeypatch.setattr(cache_file, "SLACK", 256)  # with less, windows forget and the text is read again
    model, ids = llama((9, None)), prompt(length=6).repeat(1, 4)
    expected = generate(model, ids, max_new_tokens=40, **FP8)
    assert torch.equal(generate(model, ids, max_new_tokens=40, prompt_lookup_num_tokens=3, **FP8), expected)


def test_keys_of_images_stay_as_they_are(captured):
    config = llama_vision.tiny()
    model = family_of_images(config)
    ids, _, inputs = llama_vision.images(config, [[(2, 3)], [(5, 1)]], length=12, seed=3)
    out = generate(model, ids, max_new_tokens=12, eos_token_id=(), return_dict_in_generate=True, **FP8, **inputs)
    held = {type(layer).__name__: layer.keys.dtype for layer in out.past_key_values}
    assert held == {"CrossCache": torch.float32, "LayerCache": torch.uint8}
    other = generate(model, ids, max_new_tokens=12, eos_token_id=(), disable_compile=True, **FP8, **inputs)
    assert torch.equal(out.sequences, other)


def family_of_images(config):
    from ligermodels import LlamaVision
    from tests.generation.test_graph import with_large_weights

    return with_large_weights(LlamaVision.from_config(config))


def make(windows, **options):
    return KVCache(len(windows), 2, 4, 3, 4, windows=windows, dtype=torch.float32, device="cpu", **options)


@pytest.mark.parametrize("seed", range(4))
def test_it_is_the_plain_cache_of_rounded_tokens(seed, monkeypatch, poison):
    """Whatever is done with the cache: the plain one, given what is rounded, holds and attends to the same."""
    monkeypatch.setattr(cache_file, "SLACK", 3)
    windows = [None, 1, 5]
    mine, plain = make(windows, **FP8), make(windows)
    choose = torch.Generator().manual_seed(seed)

    def any_of(n):
        return int(torch.randint(n, (1,), generator=choose))

    for _ in range(40):
        kind, rows = any_of(8), torch.tensor([any_of(2), any_of(2)])
        if kind < 3 or not mine.length:
            first, length = not mine.length, 1 + any_of(9)
            for a, b in zip(mine, plain, strict=True):
                k, v = torch.randn(2, 2, length, 3, 4).unbind()
                found, expected = a.update(k, v), b.update(rounded(k), rounded(v))
                if first:
                    expected = k, v
                torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)  # NaN before a row begins
        elif kind == 3:
            mine.reorder(rows), plain.reorder(rows)
        elif kind == 4:
            length = max(1, mine.length - any_of(3))
            mine.crop(length), plain.crop(length)
        elif kind == 5:
            old, mine, plain = (mine, plain), make(windows, **FP8), make(windows)
            for new, source in zip((mine, plain), old, strict=True):
                new.reserve(source.length)
                new.take(source, rows)
        elif kind == 6:
            length = mine.length + any_of(5)
            k, v = torch.randn(2, 1, length, 3, 4).unbind()
            for cache, make_one, change in ((mine, FP8, lambda x: x), (plain, {}, rounded)):
                other = KVCache(3, 1, 4, 3, 4, windows=windows, dtype=torch.float32, device="cpu", **make_one)
                cache.reserve(length)
                cache.shift(length)
                for layer in other:
                    layer.update(change(k), change(v))
                cache.put(other, torch.tensor([0]), rows[:1])
        else:
            angles, q, new, out = torch.zeros(2, 1, 2), torch.randn(2, 1, 6, 4), torch.randn(2, 2, 1, 3, 4), []
            for cache, (k, v) in ((mine, new), (plain, (rounded(new[0]), rounded(new[1])))):
                cache.reserve(cache.length + 4)
                cache.place(None)
                cache.advance()
                with cache.step():
                    token = NextToken(cos=angles.cos(), sin=angles.sin(), starts=cache.starts, ends=cache.ends)
                    out.append([
                        layer.attend(q.clone(), k, v, token, window=window, softcap=None, scale=None)
                        for layer, window in zip(cache, windows, strict=True)
                    ])  # fmt: skip
            torch.testing.assert_close(*out, rtol=1e-6, atol=1e-6, equal_nan=True)
        assert mine.length == plain.length


def test_under_autocast_the_first_tokens_decide_what_it_gives():
    layer, keys = make([None], **FP8)[0], torch.randn(2, 2, 3, 4).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        layer.update(keys[:, :1], keys[:, :1])
        assert torch.equal(layer.update(keys[:, 1:], keys[:, 1:])[0], rounded(keys.float()).bfloat16())


def test_memory_is_half(device):
    for dtype, size in ((torch.bfloat16, 128), (torch.float16, 64), (torch.float32, 64)):
        sizes = []
        for kind in ("fp8", None):
            cache = KVCache(2, 3, 100, 4, size, dtype=dtype, device=device, kv_cache_dtype=kind)
            sizes.append(sum(x.nbytes for x in cache.memory()))
        assert sizes[1] == 2 * 2 * 3 * 100 * 4 * size * dtype.itemsize
        assert sizes[0] == 2 * 2 * 3 * 100 * 4 * (size + 2)


def test_what_cannot_be_is_said(captured):
    model, ids = llama(), prompt()
    fp8, plain = model.new_cache(1, 20, **FP8), model.new_cache(1, 20)
    for options, message in [
        (dict(kv_cache_dtype="int8"), "'auto', the dtype of the model, or 'fp8'"),
        (dict(kv_cache_dtype=torch.float8_e4m3fn), "'auto', the dtype of the model, or 'fp8'"),
        (dict(use_cache=False, **FP8), "use_cache=False contradicts"),
        (dict(past_key_values=plain, **FP8), r"new_cache\(..., kv_cache_dtype='fp8'\)"),
        (dict(past_key_values=DynamicCache(), **FP8), r"new_cache\(..., kv_cache_dtype='fp8'\)"),
        (dict(past_key_values=fp8, kv_cache_dtype="auto"), "contradicts past_key_values, which is of 'fp8'"),
    ]:
        with pytest.raises(InputError, match=message):
            generate(model, ids, max_new_tokens=3, **options)
    with pytest.raises(InputError, match="must be one of auto, fp8"):
        model.new_cache(1, 20, kv_cache_dtype="e5m2")
    with pytest.raises(InputError, match="no_grad"):
        add_lora(model, 2)(ids, past_key_values=fp8)
    assert torch.equal(generate(llama(), ids, max_new_tokens=3, past_key_values=fp8, **FP8)[:, :5], ids)
    with pytest.raises(InputError, match=r"do not fit a cache of .* in torch\.float32"):
        fp8[0].update(*torch.zeros(2, 1, 1, 2, 8, dtype=torch.bfloat16))
