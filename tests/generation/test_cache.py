"""The KV cache against concatenation, and transformers' caches against ours."""

import pytest
import torch

from ligermodels.errors import InputError
from ligermodels.layers import cache as cache_file
from ligermodels.layers.cache import SLACK, KVCache, LayerCache, as_kv_cache


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


@pytest.mark.parametrize("k, message", [
    (torch.zeros(3, 1, 3, 4), "another batch size or model"),
    (torch.zeros(2, 1, 3, 5), "another batch size or model"),
    (torch.zeros(2, 1, 3, 4, dtype=torch.bfloat16), "in torch.bfloat16 do not fit a cache of .* in torch.float32"),
])  # fmt: skip
def test_what_does_not_fit_is_named(k, message):
    with pytest.raises(InputError, match=message):
        make()[0].update(k, k)


def test_under_autocast_the_first_tokens_decide_the_dtype():
    """new_cache goes after the weights, and may be called before autocast begins, as in GRPO."""
    layer = make()[0]
    keys = torch.randn(2, 5, 3, 4, dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        layer.update(keys[:, :3], keys[:, :3])
        assert torch.equal(layer.update(keys[:, 3:], keys[:, 3:])[0], keys) and layer.keys.dtype == torch.bfloat16
        with pytest.raises(InputError, match="with autocast on"):
            layer.update(*tokens(1))


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
