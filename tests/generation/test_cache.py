"""The KV cache against concatenation, and transformers' caches against ours."""

import itertools

import pytest
import torch

import ligermodels
from ligermodels.errors import InputError
from ligermodels.kernels.attention import attention
from ligermodels.kernels.rope import rope_qk_reference
from ligermodels.layers import cache as cache_file
from ligermodels.layers.batch import NextToken
from ligermodels.layers.cache import SLACK, CrossCache, KVCache, LayerCache, as_kv_cache


def tokens(length, batch_size=2, **options):
    return torch.randn(batch_size, length, 3, 4, **options), torch.randn(batch_size, length, 3, 4, **options)


def make(max_length=8, layers=2, **options):
    return KVCache(layers, 2, max_length, 3, 4, **{"dtype": torch.float32, "device": "cpu", **options})


def with_window(window, max_length=64):
    return LayerCache(2, max_length, 3, 4, window=window, dtype=torch.float32, device="cpu")


def assert_concatenates(layer, lengths, batch_size=2, history=None, grad=False):
    """Appends tokens call by call; each call returns the last keys and values in order, as concatenation does."""
    seen = history[0].shape[1] if history else 0
    for length in lengths:
        new = tokens(length, batch_size, requires_grad=grad)
        history = [torch.cat(pair, 1) for pair in zip(history, new, strict=True)] if history else list(new)
        start = 0 if layer.window is None else seen - min(seen, layer.window - 1)
        seen += length
        for found, expected in zip(layer.update(*new), history, strict=True):
            assert torch.equal(found, expected[:, start:])
        assert layer.length == seen
    return history


CALLS = [
    [5] + [1] * 30,
    [4, 4, 4, 1, 1, 6, 1, 1, 1, 5, 1, 1],
    [1, 40, 2, 40, 1, 1, 3],
    [7, 2, 9, 3, 8, 1, 11, 1, 1, 14, 2, 2, 2, 2, 2],
]


@pytest.mark.parametrize("lengths", CALLS, ids=str)
@pytest.mark.parametrize("window", [None, 1, 5, 17])
@pytest.mark.parametrize("slack, max_length", [(0, 64), (4, 7), (SLACK, 64)])
@pytest.mark.parametrize("grad", [False, True])
def test_update_is_concatenation(lengths, window, slack, max_length, grad, poison, monkeypatch):
    """Small slack makes the buffers move every few tokens; with SLACK itself they do not fill up here."""
    monkeypatch.setattr(cache_file, "SLACK", slack)
    layer = with_window(window, max_length)
    assert_concatenates(layer, lengths, grad=grad)
    assert window is None or layer.keys.shape[1] <= max(max_length, window - 1 + slack)


@pytest.mark.parametrize("window", [None, 1, 4, 17])
@pytest.mark.parametrize("lengths", [[5], [1], [9, 3, 22]], ids=str)
def test_attend_is_attention_to_what_update_returns(window, lengths, monkeypatch, poison):
    """After prompts in one call and in several, over many moves, back from crops, and over a copy of its rows."""
    monkeypatch.setattr(cache_file, "SLACK", 3)
    starts, attended = torch.tensor([0, 4]), make(sum(lengths), windows=[window, None])
    expected, order = make(windows=[window, None]), torch.tensor([1, 0])
    for length in lengths:
        for mine, layer in zip(attended, expected, strict=True):
            k, v = tokens(length)
            mine.update(k, v), layer.update(k, v)
    copied = make(60, windows=[window, None])
    copied.take(attended, order)
    expected.reorder(order)
    starts, attended = starts[order], copied
    attended.reserve(80)
    places = [x.data_ptr() for x in attended.memory() if x.dim() == 4]
    attended.place(starts)
    for step in range(40):
        if step == 20:
            for cache in (attended, expected):
                cache.crop(cache.length - 1)
            attended.place(starts)
        attended.advance()
        with attended.step():
            angles = torch.randn(2, 1, 2)
            token = NextToken(cos=angles.cos(), sin=angles.sin(), starts=attended.starts, ends=attended.ends)
            for mine, layer, own in zip(attended, expected, [window, None], strict=True):
                (k, v), q = tokens(1), torch.randn(2, 1, 6, 4)
                found = mine.attend(q, k, v, token, window=own, softcap=2.0, scale=0.7)
                q, k = rope_qk_reference(q, k, token.cos, token.sin)
                keys, values = layer.update(k, v)
                positions = layer.length - keys.shape[1] + torch.arange(keys.shape[1])
                mask = positions >= starts[:, None]
                if own == 1 or layer.length > 4:  # a row of padding sees itself there, and nothing here
                    wanted = attention(q, keys, values, window=own, softcap=2.0, scale=0.7, key_mask=mask)
                    torch.testing.assert_close(found[mask[:, -1]], wanted[mask[:, -1]])
    assert attended.length == expected.length
    assert places == [x.data_ptr() for x in attended.memory() if x.dim() == 4], "a graph knows no other place"


def test_memory_is_allocated_once_and_then_doubles():
    layer, sizes = make(4)[0], []
    for _ in range(12):
        layer.update(*tokens(1))
        sizes.append(layer.keys.shape[1])
    assert sizes == [4] * 4 + [8] * 4 + [16] * 4
    k, _ = layer.update(*tokens(1))
    assert k.data_ptr() == layer.keys.data_ptr(), "a view, no copy"


@pytest.mark.parametrize("rows", [[1, 0], [0, 0], [1], [1, 0, 1]])
@pytest.mark.parametrize("window", [None, 4])
def test_reorder_moves_rows(rows, window, monkeypatch, poison):
    monkeypatch.setattr(cache_file, "SLACK", 3)
    cache, order = make(windows=[window] * 2), torch.tensor(rows)
    histories = [assert_concatenates(layer, [5, 1, 1, 1, 1, 1]) for layer in cache]
    cache.reorder(order)
    assert cache.batch_size == len(rows) and cache.length == 10
    for layer, history in zip(cache, histories, strict=True):
        assert_concatenates(layer, [1] * 6, len(rows), [x[order] for x in history])


@pytest.mark.parametrize("window, lengths, least", [
    (None, [5, 1, 1, 1, 1, 1], 0), (1, [5, 1, 1, 1, 1], 8), (4, [5, 1, 1], 6), (4, [3, 40], 43), (40, [9], 0)
], ids=str)  # fmt: skip
def test_crop_goes_back_as_far_as_the_windows_reach_and_else_forgets_all(window, lengths, least, monkeypatch, poison):
    monkeypatch.setattr(cache_file, "SLACK", 3)
    for crop in range(sum(lengths) + 1):
        cache = make(windows=[None, window])
        cache.state["deltas"] = 1
        histories = [assert_concatenates(layer, lengths) for layer in cache]
        cache.crop(crop)
        length = crop if crop >= least else 0
        assert cache.length == length and bool(cache.state) == bool(length)
        for layer, history in zip(cache, histories, strict=True):
            assert_concatenates(layer, [1, 2, 1, 7], history=[x[:, :length] for x in history])


@pytest.mark.parametrize("window", [None, 4])
def test_gradients_reach_the_new_tokens_and_no_buffer(window, monkeypatch):
    monkeypatch.setattr(cache_file, "SLACK", 2)
    layer, calls, seen = with_window(window, 20), [], []
    for length in (3, 2, 1, 1, 9, 1):
        calls.append(tokens(length, requires_grad=True))
        seen += layer.update(*calls[-1])
    assert not layer.keys.requires_grad and not layer.values.requires_grad
    with torch.no_grad():
        for _ in range(9):  # writes on: what autograd saved must not have been a view of the buffer
            layer.update(*tokens(1))
    sum(x.square().sum() for x in seen).backward()
    for x in itertools.chain(*calls):
        torch.testing.assert_close(x.grad, 2 * x)


@pytest.mark.parametrize("k, message", [
    (torch.zeros(3, 1, 3, 4), "another batch size or model"),
    (torch.zeros(2, 1, 3, 5), "another batch size or model"),
])  # fmt: skip
def test_what_does_not_fit_is_named(k, message):
    with pytest.raises(InputError, match=message):
        make()[0].update(k, k)


def test_the_first_tokens_decide_the_dtype():
    """new_cache goes after the weights, which autocast and fp32 embeddings make others than keys and values."""
    layer = make()[0]
    keys = torch.randn(2, 5, 3, 4, dtype=torch.bfloat16)
    layer.update(keys[:, :3], keys[:, :3])
    assert torch.equal(layer.update(keys[:, 3:], keys[:, 3:])[0], keys) and layer.keys.dtype == torch.bfloat16
    with pytest.raises(InputError, match=r"in torch.float32 do not fit a cache of .* in torch.bfloat16.*autocast on"):
        layer.update(*tokens(1))


def test_cross_layers_hold_images_and_count_no_tokens():
    cache = make(layers=3, cross_layers=[0, 2])
    assert [isinstance(layer, CrossCache) for layer in cache] == [True, False, True] and len(cache) == 3
    first, second = tokens(7, requires_grad=True), tokens(5, requires_grad=True)
    assert all(a is b for a, b in zip(cache[0].update(*first), first, strict=True))
    assert cache.length == 0 and cache[2].keys is None and not cache[0].keys.requires_grad
    cache[1].update(*tokens(4))
    assert cache.length == 4 and cache.batch_size == 2
    both = cache[0].update(*second)
    for found, held, old, new in zip(both, (cache[0].keys, cache[0].values), first, second, strict=True):
        assert torch.equal(found, torch.cat([old, new], 1)) and torch.equal(held, found)
    sum(x.square().sum() for x in both).backward()
    assert all(x.grad is None for x in first) and all(torch.equal(x.grad, 2 * x) for x in second)
    for k in (torch.zeros(3, 1, 3, 4), torch.zeros(2, 1, 3, 5), torch.zeros(2, 1, 3, 4, dtype=torch.bfloat16)):
        with pytest.raises(InputError, match="another batch size"):
            cache[0].update(k, k)

    deltas, held, rows = torch.randn(2, 1), cache[0].keys, [1, 0, 1]
    cache.state.update(deltas=deltas, images=3)
    cache.reorder(torch.tensor(rows))
    assert torch.equal(cache[0].keys, held[rows]) and cache[2].keys is None and cache.batch_size == 3
    assert torch.equal(cache.state["deltas"], deltas[rows]) and cache.state["images"] == 3
    cache.reset()
    assert cache.length == 0 and cache[0].keys is None and cache[0].values is None and cache.state == {}


# Caches of transformers


def of_transformers(prefix=None, **config):
    """A DynamicCache: empty, made of a prefix (k, v) a layer, or of a config with windows."""
    from transformers import DynamicCache, MistralConfig

    return DynamicCache(config=MistralConfig(num_hidden_layers=2, **config)) if config else DynamicCache(prefix)


@pytest.mark.parametrize("lengths", [[3, 1, 1, 1], [4, 7, 2]], ids=str)
@pytest.mark.parametrize("window", [None, 2, 4])
def test_a_borrowed_cache_returns_what_ours_does_and_fills_theirs(lengths, window):
    theirs = of_transformers() if window is None else of_transformers(sliding_window=window)
    ours, past = make(windows=[window, window]), []
    for length in lengths:
        k, v = tokens(length)
        borrowed = as_kv_cache(theirs, 2)  # anew for each call, as forward does
        assert borrowed.length == borrowed.get_seq_length() == ours.length == sum(x.shape[2] for x in past)
        assert borrowed.batch_size == (2 if past else 0) and len(borrowed) == 2
        past.append(k.transpose(1, 2))
        for mine, layer in zip(ours, borrowed, strict=True):
            for expected, found in zip(mine.update(k, v), layer.update(k, v), strict=True):
                assert torch.equal(expected, found)
            assert layer.length == mine.length and layer.window == window
    kept = torch.cat(past, 2) if window is None else torch.cat(past, 2)[:, :, -(window - 1) :]
    assert torch.equal(theirs.layers[0].keys, kept) and theirs.get_seq_length() == sum(lengths)
    assert as_kv_cache(ours, 2) is ours and as_kv_cache(borrowed, 2) is borrowed


@pytest.mark.parametrize("padded", [False, True])
def test_prefix_tuning_trains_as_transformers_does(padded, tmp_path):
    """PEFT gives trained prompts as a DynamicCache, with labels for the tokens after them."""
    from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

    theirs = LlamaForCausalLM(LlamaConfig(
        vocab_size=40, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, initializer_range=0.2, pad_token_id=0,
    ))  # fmt: skip
    theirs.save_pretrained(tmp_path)
    ours = ligermodels.load(tmp_path, progress=False)
    ids, prefix = torch.randint(1, 40, (2, 7)), torch.randn(4, 2, 2, 3, 8)  # [k and v of layers, B, HK, S, D]
    mask = torch.ones(2, 10) if padded else None
    labels = ids.clone()
    if padded:
        mask[1, 8:] = 0
        labels[1, 5:] = -100
    losses, gradients = [], []
    for model in (theirs, ours):
        prompt = prefix.clone().requires_grad_()
        cache = DynamicCache([(prompt[0], prompt[1]), (prompt[2], prompt[3])])
        output = model(ids, attention_mask=mask, past_key_values=cache, labels=labels)
        output.loss.backward()
        losses.append(output.loss.detach())
        gradients.append(prompt.grad)
        assert cache.get_seq_length() == 10
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-5, atol=0)  # fp32 sums in another order
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-4, atol=1e-6)  # as above
    assert gradients[0].abs().amax((1, 2, 3, 4)).min() > 1e-4
