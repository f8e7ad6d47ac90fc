"""The KV cache against concatenation, and transformers' caches against ours."""

import itertools

import pytest
import torch

import ligermodels
from ligermodels.errors import InputError
from ligermodels.kernels.attention import attention
from ligermodels.kernels.rope import rope_qk_reference
from ligermodels.layers.batch import NextToken
from ligermodels.layers.state import Cache, ImageKeyValues, KeyValues, as_cache


def tokens(length, batch_size=2, **options):
    return torch.randn(batch_size, length, 3, 4, **options), torch.randn(batch_size, length, 3, 4, **options)


def state(max_length=8, window=None, rows=2, **options):
    return KeyValues(rows, max_length, 3, 4, window=window, **{"dtype": torch.float32, "device": "cpu", **options})


def make(max_length=8, windows=(None, None), rows=2, **options):
    return Cache([state(max_length, window, rows, **options) for window in windows], rows)


def append(cache, lengths, histories=None, grad=False):
    """Appends tokens call by call; each call returns the last keys and values in order, as concatenation does."""
    histories = histories or [None] * len(cache)
    for length in lengths:
        for i, layer in enumerate(cache):
            new = tokens(length, cache.rows, requires_grad=grad)
            old = histories[i]
            histories[i] = list(new) if old is None else [torch.cat(pair, 1) for pair in zip(old, new, strict=True)]
            start = 0 if layer.window is None else max(0, cache.length - layer.window + 1)
            for found, expected in zip(layer.append(*new, cache.length), histories[i], strict=True):
                assert torch.equal(found, expected[:, start:])
        cache.advance(length)
    return histories


CALLS = [
    [5] + [1] * 30,
    [4, 4, 4, 1, 1, 6, 1, 1, 1, 5, 1, 1],
    [1, 40, 2, 40, 1, 1, 3],
    [7, 2, 9, 3, 8, 1, 11, 1, 1, 14, 2, 2, 2, 2, 2],
]


@pytest.mark.parametrize("lengths", CALLS, ids=str)
@pytest.mark.parametrize("window", [1, 5, 17])
@pytest.mark.parametrize("max_length, step", [(64, 1), (7, 1), (3, 4)])
@pytest.mark.parametrize("grad", [False, True])
def test_append_is_concatenation(lengths, window, max_length, step, grad, poison):
    cache = make(max_length, [window, None])
    cache.reserve(max_length, step)
    append(cache, lengths, grad=grad)
    assert cache[0].capacity <= window - 1 + step and cache.length == sum(lengths)


@pytest.mark.parametrize("window", [None, 1, 4, 17])
@pytest.mark.parametrize("lengths", [[5], [1], [9, 3, 22]], ids=str)
def test_attend_is_attention_to_what_append_returns(window, lengths, poison):
    """After prompts in one call and in several, over many turns of the ring, a crop, and over a copy of its rows."""
    starts, attended = torch.tensor([0, 4]), make(sum(lengths), [window, None])
    expected, order = make(windows=[window, None]), torch.tensor([1, 0])
    for length in lengths:
        for mine, layer in zip(attended, expected, strict=True):
            k, v = tokens(length)
            mine.append(k, v, attended.length), layer.append(k, v, expected.length)
        attended.advance(length), expected.advance(length)
    copied = make(60, [window, None])
    copied.take(attended, order)
    expected.reorder(order)
    starts, attended = starts[order], copied
    attended.reserve(80)
    places = [x.data_ptr() for x in attended.tensors()]
    for step in range(40):
        if step == 20:
            for cache in (attended, expected):
                cache.crop(cache.length - 1)
        past = expected.length
        angles, ends = torch.randn(2, 1, 2), torch.full((2,), past + 1, dtype=torch.int32)
        token, tables = NextToken(starts=starts.int(), ends=ends), (angles.cos(), angles.sin())
        for mine, layer, own in zip(attended, expected, [window, None], strict=True):
            (k, v), q = tokens(1), torch.randn(2, 1, 6, 4)
            found = mine.attend(q, k, v, token, tables, window=own, softcap=2.0, scale=0.7)
            q, k = rope_qk_reference(q, k, *tables)
            keys, values = layer.append(k, v, past)
            mask = past + 1 - keys.shape[1] + torch.arange(keys.shape[1]) >= starts[:, None]
            if own == 1 or past >= 4:  # a row of padding sees itself there, and nothing here
                wanted = attention(q, keys, values, window=own, softcap=2.0, scale=0.7, key_mask=mask)
                torch.testing.assert_close(found[mask[:, -1]], wanted[mask[:, -1]])
        attended.advance(1), expected.advance(1)
    assert attended.length == expected.length
    assert places == [x.data_ptr() for x in attended.tensors()], "a graph knows no other place"


def test_memory_is_allocated_once_and_then_doubles():
    cache, sizes = make(4, [None]), []
    for _ in range(12):
        cache[0].append(*tokens(1), cache.length)
        cache.advance(1)
        sizes.append(cache[0].capacity)
    assert sizes == [4] * 4 + [8] * 4 + [16] * 4
    k, _ = cache[0].append(*tokens(1), cache.length)
    assert k.data_ptr() == cache[0].buffers[0].data_ptr(), "a view, no copy"


@pytest.mark.parametrize("rows", [[1, 0], [0, 0], [1], [1, 0, 1]])
@pytest.mark.parametrize("window", [None, 4])
def test_reorder_moves_rows(rows, window, poison):
    cache, order = make(windows=[window] * 2), torch.tensor(rows)
    histories = append(cache, [5, 1, 1, 1, 1, 1])
    cache.reorder(order)
    assert cache.rows == len(rows) and cache.length == 10
    append(cache, [1] * 6, [[x[order] for x in history] for history in histories])


@pytest.mark.parametrize("window, step, lengths, least", [
    (None, 1, [5, 1, 1, 1, 1, 1], 0), (1, 3, [5, 1, 1, 1, 1], 6), (4, 1, [5, 1, 1], 6), (4, 3, [3, 40], 40),
    (40, 1, [9], 0),
], ids=str)  # fmt: skip
def test_crop_goes_back_as_far_as_the_windows_reach_and_else_forgets_all(window, step, lengths, least, poison):
    for crop in range(sum(lengths) + 1):
        cache = make(windows=[None, window])
        cache.reserve(8, step)
        cache.values["deltas"] = 1
        histories = append(cache, lengths)
        cache.crop(crop)
        length = crop if crop >= least else 0
        assert cache.length == length and bool(cache.values) == bool(length)
        append(cache, [1, 2, 1, 7], [[x[:, :length] for x in history] for history in histories])


@pytest.mark.parametrize("window", [None, 1, 4, 9])
@pytest.mark.parametrize("lengths", [[7, 3], [1, 6]], ids=str)
def test_rows_that_come_begin_at_the_left(window, lengths, poison):
    """The rows of a padded batch are those of each prompt alone, for the steps that follow."""
    cache, batch, alone = make(24, [window]), make(7, [None]), [make(24, [window], rows=1) for _ in lengths]
    (history,) = append(batch, [7])
    cache.put(batch, torch.tensor([1, 0]), torch.tensor([0, 1]), torch.tensor(lengths))
    for one, row, length in zip(alone, [1, 0], lengths, strict=True):
        one[0].append(*(x[row : row + 1, :length] for x in history), 0)
        one.advance(length)
        one.reserve(24)
    cache.reserve(24)
    for step in range(12):
        (k, v), q, angles = tokens(1), torch.randn(2, 1, 6, 4), torch.zeros(2, 1, 2)
        ends = torch.tensor(lengths, dtype=torch.int32) + step + 1
        options = dict(window=window, softcap=None, scale=None)
        found = []
        for rows, state in [(slice(0, 2), cache[0]), *((slice(i, i + 1), one[0]) for i, one in enumerate(alone))]:
            token = NextToken(starts=torch.zeros_like(ends[rows]), ends=ends[rows])
            tables = angles.cos()[rows], angles.sin()[rows]
            found.append(state.attend(q[rows].clone(), k[rows], v[rows], token, tables, **options))
        torch.testing.assert_close(found[0], torch.cat(found[1:]))


@pytest.mark.parametrize("window", [None, 4])
def test_gradients_reach_the_new_tokens_and_no_buffer(window):
    cache, calls, seen = make(20, [window]), [], []
    for length in (3, 2, 1, 1, 9, 1):
        calls.append(tokens(length, requires_grad=True))
        seen += cache[0].append(*calls[-1], cache.length)
        cache.advance(length)
    assert not any(x.requires_grad for x in cache.tensors())
    with torch.no_grad():
        for i in range(9):  # what autograd saved must not be a view of the buffers
            cache[0].append(*tokens(1), cache.length + i)
    sum(x.square().sum() for x in seen).backward()
    for x in itertools.chain(*calls):
        torch.testing.assert_close(x.grad, 2 * x)


@pytest.mark.parametrize("k, message", [
    (torch.zeros(3, 1, 3, 4), "another batch size or model"),
    (torch.zeros(2, 1, 3, 5), "another batch size or model"),
])  # fmt: skip
def test_what_does_not_fit_is_named(k, message):
    with pytest.raises(InputError, match=message):
        state().append(k, k, 0)


def test_the_first_tokens_decide_the_dtype():
    """new_cache goes after the weights, which autocast and fp32 embeddings make others than keys and values."""
    layer = state()
    keys = torch.randn(2, 5, 3, 4, dtype=torch.bfloat16)
    layer.append(keys[:, :3], keys[:, :3], 0)
    assert torch.equal(layer.append(keys[:, 3:], keys[:, 3:], 3)[0], keys) and layer.buffers[0].dtype == torch.bfloat16
    with pytest.raises(InputError, match=r"in torch.float32 do not fit a cache of .* in torch.bfloat16.*autocast on"):
        layer.append(*tokens(1), 5)


def test_states_of_images():
    cache = Cache([ImageKeyValues(), state(), ImageKeyValues()], 2)
    first, second = tokens(7, requires_grad=True), tokens(5, requires_grad=True)
    assert all(a is b for a, b in zip(cache[0].append(*first), first, strict=True))
    assert cache[2].keys is None and not cache[0].keys.requires_grad
    both = cache[0].append(*second)
    for found, stored, old, new in zip(both, (cache[0].keys, cache[0].values), first, second, strict=True):
        assert torch.equal(found, torch.cat([old, new], 1)) and torch.equal(stored, found)
    sum(x.square().sum() for x in both).backward()
    assert all(x.grad is None for x in first) and all(torch.equal(x.grad, 2 * x) for x in second)
    for k in (torch.zeros(3, 1, 3, 4), torch.zeros(2, 1, 3, 5), torch.zeros(2, 1, 3, 4, dtype=torch.bfloat16)):
        with pytest.raises(InputError, match="another batch size"):
            cache[0].append(k, k)

    deltas, stored, rows = torch.randn(2, 1), cache[0].keys, [1, 0, 1]
    cache.values.update(deltas=deltas, images=3)
    cache.reorder(torch.tensor(rows))
    assert torch.equal(cache[0].keys, stored[rows]) and cache[2].keys is None and cache.rows == 3
    assert torch.equal(cache.values["deltas"], deltas[rows]) and cache.values["images"] == 3
    cache.reset()
    assert cache.length == 0 and cache[0].keys is None and cache[0].values is None and cache.values == {}


# Caches of transformers


def of_transformers(prefix=None, **config):
    """A DynamicCache: empty, made of a prefix (k, v) a layer, or of a config with windows."""
    from transformers import DynamicCache, MistralConfig

    return DynamicCache(config=MistralConfig(num_hidden_layers=2, **config)) if config else DynamicCache(prefix)


@pytest.mark.parametrize("lengths", [[3, 1, 1, 1], [4, 7, 2]], ids=str)
@pytest.mark.parametrize("window", [None, 2, 4])
def test_a_cache_of_transformers_returns_what_ours_does_and_fills_theirs(lengths, window):
    theirs = of_transformers() if window is None else of_transformers(sliding_window=window)
    ours, past = make(windows=[window, window]), []
    for length in lengths:
        k, v = tokens(length)
        wrapped = as_cache(theirs, 2)  # anew for each call, as forward does
        assert wrapped.length == wrapped.get_seq_length() == ours.length == sum(x.shape[2] for x in past)
        assert wrapped.rows == (2 if past else 0) and len(wrapped) == 2
        past.append(k.transpose(1, 2))
        for mine, layer in zip(ours, wrapped, strict=True):
            pairs = zip(mine.append(k, v, ours.length), layer.append(k, v, ours.length), strict=True)
            assert all(torch.equal(*pair) for pair in pairs) and layer.window == window
        ours.advance(length)
    kept = torch.cat(past, 2) if window is None else torch.cat(past, 2)[:, :, -(window - 1) :]
    assert torch.equal(theirs.layers[0].keys, kept) and theirs.get_seq_length() == sum(lengths)
    assert as_cache(ours, 2) is ours and as_cache(wrapped, 2) is wrapped


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
