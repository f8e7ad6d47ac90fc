"""The KV cache against concatenation."""

import itertools

import pytest
import torch

from ligermodels.errors import InputError
from ligermodels.layers import cache as cache_file
from ligermodels.layers.cache import SLACK, BorrowedCache, CrossCache, KVCache, LayerCache, as_kv_cache


def tokens(length, batch_size=2, **options):
    return torch.randn(batch_size, length, 3, 4, **options), torch.randn(batch_size, length, 3, 4, **options)


def make(max_length=8, **options):
    return KVCache(2, 2, max_length, 3, 4, **{"dtype": torch.float32, "device": "cpu", **options})


@pytest.mark.parametrize("max_length", [0, 1, 5, 64])
@pytest.mark.parametrize("lengths", [[5], [3, 1, 1, 1], [1] * 9, [4, 7, 2]])
def test_update_is_concatenation(lengths, max_length, poison):
    cache = make(max_length)
    past = [([], []) for _ in cache]
    for step, length in enumerate(lengths):
        assert cache.length == cache.get_seq_length() == sum(lengths[:step])
        for layer, (keys, values) in zip(cache, past, strict=True):
            k, v = tokens(length)
            keys.append(k)
            values.append(v)
            k_all, v_all = layer.update(k, v)
            assert torch.equal(k_all, torch.cat(keys, 1)) and torch.equal(v_all, torch.cat(values, 1))


def test_memory_is_set_aside_once_and_then_doubles():
    cache = make(4)
    buffers = [layer.keys.data_ptr() for layer in cache]
    for layer in cache:
        layer.update(*tokens(3))
        k, _ = layer.update(*tokens(1))
        assert k.data_ptr() == layer.keys.data_ptr()
    assert [layer.keys.data_ptr() for layer in cache] == buffers
    sizes = []
    for _ in range(8):
        cache[0].update(*tokens(1))
        sizes.append(cache[0].keys.shape[1])
    assert sizes == [8] * 4 + [16] * 4
    cache[0].update(*tokens(40))
    assert cache[0].keys.shape[1] == cache[0].length == 52


def test_reset_forgets_and_keeps_the_memory():
    cache = make()
    for layer in cache:
        layer.update(*tokens(6))
    buffers = [layer.keys.data_ptr() for layer in cache]
    cache.reset()
    assert cache.length == 0 and [layer.keys.data_ptr() for layer in cache] == buffers
    k, v = tokens(2)
    cache[0].update(k[:, :1], v[:, :1])
    assert torch.equal(cache[0].update(k[:, 1:], v[:, 1:])[0], k)
    cache[0].update(*tokens(6))
    assert cache[0].keys.data_ptr() == buffers[0], "8 tokens fit"


@pytest.mark.parametrize("rows", [[1, 0], [0, 0], [1], [1, 0, 1]])
def test_reorder_moves_rows(rows):
    cache, history = make(), []
    for layer in cache:
        layer.update(*tokens(2))
        history.append(layer.update(*tokens(1)))
    history = [(k.clone(), v.clone()) for k, v in history]
    cache.reorder(torch.tensor(rows))
    assert cache.batch_size == len(rows) and cache.length == 3
    for layer, (k, v) in zip(cache, history, strict=True):
        new_k, new_v = tokens(1, batch_size=len(rows))
        k_all, v_all = layer.update(new_k, new_v)
        assert torch.equal(k_all, torch.cat([k[rows], new_k], 1))
        assert torch.equal(v_all, torch.cat([v[rows], new_v], 1))


def test_gradients_reach_the_new_tokens_and_no_buffer():
    layer = make()[0]
    first, second = tokens(3, requires_grad=True), tokens(2, requires_grad=True)
    prompt = layer.update(*first)
    both = layer.update(*second)
    assert not layer.keys.requires_grad and not layer.values.requires_grad
    with torch.no_grad():
        layer.update(*tokens(1))  # writes on: what autograd saved must not have been a view of the buffer
    sum(x.square().sum() for x in (*prompt, *both)).backward()
    for x in (*first, *second):
        torch.testing.assert_close(x.grad, 2 * x)
    torch.testing.assert_close(both[0], torch.cat([first[0], second[0]], 1))


def with_window(window, max_length=64, batch_size=2):
    return LayerCache(batch_size, max_length, 3, 4, window=window, dtype=torch.float32, device="cpu")


CALLS = [
    [1] * 40,
    [5] + [1] * 30,
    [4, 4, 4, 1, 1, 6, 1, 1, 1, 5, 1, 1],
    [40] + [1] * 20,
    [1, 40, 2, 40, 1, 1, 3],
    [3, 0, 1, 0, 1],
    [7, 2, 9, 3, 8, 1, 11, 1, 1, 14, 2, 2, 2, 2, 2],
]


@pytest.mark.parametrize("lengths", CALLS, ids=str)
@pytest.mark.parametrize("window", [1, 2, 3, 5, 6, 17])
@pytest.mark.parametrize("slack, max_length", [(0, 64), (1, 64), (4, 64), (4, 7), (9, 0), (SLACK, 64), (SLACK, 1)])
@pytest.mark.parametrize("grad", [False, True])
def test_a_window_returns_the_last_keys_in_order(lengths, window, slack, max_length, grad, poison, monkeypatch):
    """Small slack makes the buffers move every few tokens; with SLACK itself they do not fill up here."""
    monkeypatch.setattr(cache_file, "SLACK", slack)
    layer, keys, values, seen = with_window(window, max_length), [], [], 0
    for length in lengths:
        k, v = tokens(length, requires_grad=grad)
        keys.append(k)
        values.append(v)
        k_all, v_all = layer.update(k, v)
        start = seen - min(seen, window - 1)
        seen += length
        assert layer.length == seen
        assert torch.equal(k_all, torch.cat(keys, 1)[:, start:]) and torch.equal(v_all, torch.cat(values, 1)[:, start:])
        assert layer.keys.shape[1] <= max(max_length, window - 1 + slack)


@pytest.mark.parametrize("window", [3, SLACK + 500])
def test_a_window_moves_once_in_slack_steps_and_its_memory_stays(window, poison):
    """The large window overlaps with the place that it moves to."""
    layer, keys = with_window(window, 10**4), []
    assert layer.keys.shape[1] == layer.values.shape[1] == window - 1 + SLACK
    buffers, moves, offset = (layer.keys.data_ptr(), layer.values.data_ptr()), 0, -1
    for step in range(window + 3 * SLACK):
        k, v = tokens(1)
        keys.append(k)
        k_all, _ = layer.update(k, v)
        if step:
            moves, offset = moves + (k_all.storage_offset() < offset), k_all.storage_offset()
            assert k_all.untyped_storage().data_ptr() == buffers[0], "a copy"
        if step % 16 == 0 or step > window + 2 * SLACK:
            assert torch.equal(k_all, torch.cat(keys[-window:], 1))
    assert (layer.keys.data_ptr(), layer.values.data_ptr()) == buffers
    assert moves == 3


def test_memory_of_a_window_is_never_more_than_max_length_and_grows_to_its_limit():
    assert with_window(4096, 100).keys.shape[1] == 100
    layer, sizes = with_window(7, 2), []
    for _ in range(3 * SLACK):
        layer.update(*tokens(1))
        sizes.append(layer.keys.shape[1])
    assert sorted(set(sizes)) == [2, 4, 8, 16, 32, 64, 128, 256, 6 + SLACK] and sizes == sorted(sizes)


def test_a_window_forgets_on_reset_and_keeps_the_memory():
    layer = with_window(3)
    for length in (30, 30, 30, 1):
        layer.update(*tokens(length))
    buffers = layer.keys.data_ptr()
    layer.reset()
    k, v = tokens(3)
    assert torch.equal(layer.update(k[:, :1], v[:, :1])[0], k[:, :1]) and layer.length == 1
    assert torch.equal(layer.update(k[:, 1:], v[:, 1:])[0], k)
    assert layer.keys.data_ptr() == buffers and layer._end == 3


@pytest.mark.parametrize("rows", [[1, 0], [0, 0], [1], [1, 0, 1]])
def test_reorder_moves_rows_of_a_window(rows, monkeypatch, poison):
    monkeypatch.setattr(cache_file, "SLACK", 3)
    layer, keys = with_window(4), []
    for length in (5, 1, 1, 1, 1, 1):
        keys.append(tokens(length))
        layer.update(*keys[-1])
    layer.reorder(torch.tensor(rows))
    history = [torch.cat(x, 1)[rows] for x in zip(*keys, strict=True)]
    for _ in range(6):
        new = tokens(1, batch_size=len(rows))
        history = [torch.cat([old, x], 1) for old, x in zip(history, new, strict=True)]
        for actual, expected in zip(layer.update(*new), history, strict=True):
            assert torch.equal(actual, expected[:, -4:])


def test_gradients_with_a_window_reach_the_new_tokens_and_survive_moves(monkeypatch):
    monkeypatch.setattr(cache_file, "SLACK", 2)
    layer, calls, seen = with_window(4), [], []
    for length in (3, 2, 1, 1, 9, 1):
        calls.append(tokens(length, requires_grad=True))
        seen += layer.update(*calls[-1])
    assert not layer.keys.requires_grad
    with torch.no_grad():
        for _ in range(9):
            layer.update(*tokens(1))
    sum(x.square().sum() for x in seen).backward()
    for x in itertools.chain(*calls):
        torch.testing.assert_close(x.grad, 2 * x)


@pytest.mark.parametrize("windows", [(3, None), (None, 3)])
def test_length_is_of_the_tokens_seen_whichever_layer_has_the_window(windows):
    cache = make(64, windows=windows)
    for layer, window in zip(cache, windows, strict=True):
        layer.update(*tokens(20))
        k, _ = layer.update(*tokens(2))
        assert layer.window == window and k.shape[1] == (22 if window is None else 4)
    assert cache.length == cache.get_seq_length() == 22 and cache.batch_size == 2
    cache.reset()
    assert cache.length == 0


def test_impossible_windows_are_named():
    with pytest.raises(InputError, match="windows has 3 entries for 2 layers"):
        make(windows=[4, None, 4])
    with pytest.raises(InputError, match="window=0 must be at least 1"):
        make(windows=[4, 0])


@pytest.mark.parametrize("k, message", [
    (torch.zeros(3, 1, 3, 4), "was it made for another batch size or model"),
    (torch.zeros(2, 1, 3, 5), "was it made for another batch size or model"),
    (torch.zeros(2, 1, 3, 4, dtype=torch.bfloat16), "k is torch.bfloat16 on cpu, the cache torch.float32"),
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
        with pytest.raises(InputError, match=r"k is torch\.float32"):
            layer.update(*tokens(1))
        layer.reset()
        layer.update(*tokens(9))
        assert layer.keys.dtype == torch.float32


def test_impossible_sizes_are_named():
    with pytest.raises(InputError, match="num_layers=0"):
        KVCache(0, 2, 8, 3, 4, dtype=torch.float32, device="cpu")
    with pytest.raises(InputError, match="max_length=-1"):
        make(-1)


def with_pictures(**options):
    return KVCache(3, 2, 8, 3, 4, cross_layers=[0, 2], **{"dtype": torch.float32, "device": "cpu", **options})


def test_cross_layers_hold_pictures_and_count_no_tokens():
    cache = with_pictures()
    assert [isinstance(layer, CrossCache) for layer in cache] == [True, False, True] and len(cache) == 3
    first, second = tokens(7, requires_grad=True), tokens(5, requires_grad=True)
    assert all(a is b for a, b in zip(cache[0].update(*first), first, strict=True))
    assert cache.length == 0 and cache[2].keys is None and not cache[0].keys.requires_grad
    cache[1].update(*tokens(4))
    assert cache.length == cache.get_seq_length() == 4 and cache.batch_size == 2
    both = cache[0].update(*second)
    for found, held, old, new in zip(both, (cache[0].keys, cache[0].values), first, second, strict=True):
        assert torch.equal(found, torch.cat([old, new], 1)) and torch.equal(held, found)
    sum(x.square().sum() for x in both).backward()
    assert all(x.grad is None for x in first) and all(torch.equal(x.grad, 2 * x) for x in second)
    cache.reset()
    assert cache.length == 0 and cache[0].keys is None and cache[0].values is None


@pytest.mark.parametrize("rows", [[1, 0], [0, 0], [1], [1, 0, 1]])
def test_reorder_moves_rows_of_pictures_and_of_what_a_model_remembers(rows):
    cache = with_pictures()
    k, v = tokens(7)
    cache[0].update(k, v)
    for _ in range(2):
        cache[1].update(*tokens(1))
    deltas = torch.randn(2, 1)
    cache.state.update(deltas=deltas, images=3)
    cache.reorder(torch.tensor(rows))
    assert torch.equal(cache[0].keys, k[rows]) and torch.equal(cache[0].values, v[rows])
    assert cache[2].keys is None and cache.batch_size == len(rows)
    assert torch.equal(cache.state["deltas"], deltas[rows]) and cache.state["images"] == 3
    cache.reset()
    assert cache.state == {}


def test_pictures_of_another_batch_are_named():
    cache = with_pictures()
    cache[0].update(*tokens(7))
    for k in (torch.zeros(3, 1, 3, 4), torch.zeros(2, 1, 3, 5), torch.zeros(2, 1, 3, 4, dtype=torch.bfloat16)):
        with pytest.raises(InputError, match="was the cache made for another batch"):
            cache[0].update(k, k)
    with pytest.raises(InputError, match="all 3 layers are cross_layers"):
        KVCache(3, 2, 8, 3, 4, cross_layers=range(3), dtype=torch.float32, device="cpu")


# ---- caches of transformers ----


def of_transformers(prefix=None, **config):
    """A DynamicCache: empty, made of a prefix (k, v) a layer, or of a config with windows."""
    from transformers import DynamicCache, MistralConfig

    if config:
        return DynamicCache(config=MistralConfig(num_hidden_layers=2, **config))
    return DynamicCache(prefix)


def heads_first(x):
    return x.transpose(1, 2)


@pytest.mark.parametrize("lengths", [[5], [3, 1, 1, 1], [4, 7, 2]], ids=str)
@pytest.mark.parametrize("window", [None, 2, 4])
def test_a_borrowed_cache_returns_what_ours_does_and_fills_theirs(lengths, window):
    theirs = of_transformers() if window is None else of_transformers(sliding_window=window)
    ours, past = make(windows=[window, window]), []
    for length in lengths:
        k, v = tokens(length)
        past.append(heads_first(k))
        borrowed = as_kv_cache(theirs, 2)  # anew for each call, as forward does
        assert borrowed.length == borrowed.get_seq_length() == ours.length == sum(x.shape[2] for x in past[:-1])
        assert borrowed.batch_size == (2 if len(past) > 1 else 0) and len(borrowed) == 2
        for mine, layer in zip(ours, borrowed, strict=True):
            expected, found = mine.update(k, v), layer.update(k, v)
            assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
            assert layer.length == mine.length and layer.window == window
    kept = torch.cat(past, 2) if window is None else torch.cat(past, 2)[:, :, -(window - 1) :]
    assert torch.equal(theirs.layers[0].keys, kept) and theirs.get_seq_length() == sum(lengths)
    assert as_kv_cache(ours, 2) is ours and as_kv_cache(borrowed, 2) is borrowed


def test_gradients_reach_the_prefix_of_a_borrowed_cache():
    prefix = [tuple(torch.randn(2, 3, 5, 4, requires_grad=True) for _ in "kv") for _ in range(2)]
    cache, new, total = as_kv_cache(of_transformers(prefix), 2), tokens(3, requires_grad=True), 0
    for layer in cache:
        k, v = layer.update(*new)
        assert k.shape == (2, 8, 3, 4)
        total = total + k.square().sum() + v.square().sum()
    total.backward()
    for x in itertools.chain(*prefix):
        torch.testing.assert_close(x.grad, 2 * x)
    for x in new:  # once a layer
        torch.testing.assert_close(x.grad, 4 * x)


def test_a_borrowed_cache_has_the_dtype_of_the_new_tokens():
    """As under autocast, where the prefix is fp32 and keys are not."""
    prefix = [tuple(torch.randn(2, 3, 5, 4, requires_grad=True) for _ in "kv")]
    k, v = (x.bfloat16() for x in tokens(2))
    keys, values = as_kv_cache(of_transformers(prefix), 1)[0].update(k, v)
    assert keys.dtype == values.dtype == torch.bfloat16
    assert torch.equal(keys[:, :5], heads_first(prefix[0][0]).bfloat16()) and torch.equal(keys[:, 5:], k)


def test_a_borrowed_cache_moves_rows_and_cannot_be_emptied():
    cache, (k, v) = as_kv_cache(of_transformers(), 2), tokens(4)
    for layer in cache:
        layer.update(k, v)
    cache.reorder(torch.tensor([1, 1, 0]))
    more = tokens(1, batch_size=3)
    assert torch.equal(cache[1].update(*more)[0], torch.cat([k[[1, 1, 0]], more[0]], 1)) and cache.batch_size == 3
    with pytest.raises(InputError, match="DynamicCache cannot be emptied"):
        cache.reset()


@pytest.mark.parametrize("make_cache, message", [
    (lambda: ((1, 2), (3, 4)), "past_key_values is a tuple; it must be a KVCache"),
    (lambda: of_transformers([tuple(torch.zeros(2, 3, 1, 4) for _ in "kv")] * 3), "has 3 layers, the model 2"),
])  # fmt: skip
def test_what_cannot_be_borrowed_is_named(make_cache, message):
    with pytest.raises(InputError, match=message):
        BorrowedCache(make_cache(), 2)


def test_a_borrowed_cache_of_another_model_and_one_of_a_fixed_size_are_named():
    from transformers import MistralConfig, StaticCache

    with pytest.raises(InputError, match="StaticCache of a fixed size"):
        as_kv_cache(StaticCache(MistralConfig(num_hidden_layers=2, sliding_window=None), max_cache_len=8), 2)
    cache = as_kv_cache(of_transformers([tuple(torch.zeros(2, 1, 5, 4) for _ in "kv")]), 2)
    with pytest.raises(InputError, match=r"keys \[2, 1, 5, 4\] in layer 0, and the new ones are \[2, 3, 1, 4\]"):
        cache[0].update(*tokens(1))
    assert cache.length == 5


@pytest.mark.parametrize("mask", [False, True])
def test_prefix_tuning_trains_as_transformers_does(mask, tmp_path):
    """PEFT gives trained prompts as a DynamicCache, with labels for the tokens behind them."""
    from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

    import ligermodels

    theirs = LlamaForCausalLM(LlamaConfig(
        vocab_size=40, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, initializer_range=0.2, pad_token_id=0,
    ))  # fmt: skip
    theirs.save_pretrained(tmp_path)
    ours = ligermodels.load(tmp_path, progress=False)
    ids, prefix = torch.randint(1, 40, (2, 7)), torch.randn(4, 2, 2, 3, 8)  # [k and v of layers, B, HK, S, D]
    attention_mask = torch.ones(2, 10) if mask else None
    if mask:
        attention_mask[1, 8:] = 0
    losses, gradients = [], []
    for model in (theirs, ours):
        prompt = prefix.clone().requires_grad_()
        cache = DynamicCache([(prompt[0], prompt[1]), (prompt[2], prompt[3])])
        past = cache if model is theirs else as_kv_cache(cache, 2)
        labels = ids if attention_mask is None else ids.masked_fill(attention_mask[:, 3:] == 0, -100)
        output = model(ids, attention_mask=attention_mask, past_key_values=past, labels=labels)
        output.loss.backward()
        losses.append(output.loss.detach())
        gradients += [prompt.grad]
        assert cache.get_seq_length() == 10
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-5, atol=0)  # fp32 sums in another order
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-4, atol=1e-6)  # as above
    assert gradients[0].abs().amax((1, 2, 3, 4)).min() > 1e-4
