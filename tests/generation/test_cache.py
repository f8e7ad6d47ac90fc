"""States and caches against keys and values in one tensor, and transformers' caches against ours."""

import itertools
import random

import pytest
import torch

import ligermodels
from ligermodels.errors import InputError
from ligermodels.kernels.attention.attention import attention
from ligermodels.kernels.attention.rope import rope_qk_reference
from ligermodels.layers.batch import NextToken
from ligermodels.layers.state import Cache, ImageKeyValues, KeyValues, as_cache

WINDOWS = [None, 1, 5, 17]


def tokens(length, rows=2, **options):
    return torch.randn(rows, length, 3, 4, **options), torch.randn(rows, length, 3, 4, **options)


def state(max_length=8, window=None, rows=2, **options):
    return KeyValues(rows, max_length, 3, 4, window=window, **{"dtype": torch.float32, "device": "cpu", **options})


def make(max_length=8, windows=(None, None), rows=2, **options):
    return Cache([state(max_length, window, rows, **options) for window in windows], rows)


def rounded(x):
    """Each head by itself, as the cache in fp8 rounds it."""
    scale = (x.abs().amax(-1, keepdim=True) / 448).bfloat16().float()
    scale = scale.where(scale > 0, 1)
    return (x / scale).to(torch.float8_e4m3fn).float() * scale


def append(cache, histories, length, stored=lambda x: x, grad=False):
    """Appends tokens to each state. histories: [2, B, tokens, 3, 4] of each, what it stores; extended in place."""
    for i, (layer, past) in enumerate(zip(cache, histories, strict=True)):
        new = torch.stack(tokens(length, cache.rows, requires_grad=grad))
        histories[i] = torch.cat([past, stored(new).detach()], 2)
        start = 0 if layer.window is None else max(0, cache.length - layer.window + 1)
        expected = histories[i][:, :, start:] if cache.length else new  # the first see each other as they are
        assert torch.equal(torch.stack(layer.append(*new, cache.length)), expected)
    cache.advance(length)


def take_step(cache, histories, starts, stored, spread):
    """A token by `attend` is attention to what `append` would return."""
    angles, ends = spread * torch.randn(cache.rows, 1, 2), torch.full((cache.rows,), cache.length + 1)
    token, tables = NextToken(starts=starts.int(), ends=ends.int()), (angles.cos(), angles.sin())
    for i, (layer, past) in enumerate(zip(cache, histories, strict=True)):
        (k, v), q = tokens(1, cache.rows), torch.randn(cache.rows, 1, 6, 4)
        options = dict(window=layer.window, softcap=2.0, scale=0.7)
        found = layer.attend(q.clone(), k.clone(), v, token, tables, **options)
        q, k = rope_qk_reference(q, k, *tables)
        histories[i] = keys, values = torch.cat([past, stored(torch.stack([k, v]))], 2)
        mask = torch.arange(cache.length + 1) >= starts[:, None]
        wanted = attention(q, keys, values, key_mask=mask, **options)
        torch.testing.assert_close(found[mask[:, -1]], wanted[mask[:, -1]])
    cache.advance(1)


@pytest.mark.parametrize("seed", range(30))
def test_it_is_one_tensor_whatever_is_done(seed, poison):
    r, kind = random.Random(seed), ["auto", "fp8", "gradients"][seed % 3]
    options = dict(kv_cache_dtype="fp8") if kind == "fp8" else {}
    stored, spread = (rounded, 0) if kind == "fp8" else (lambda x: x, 1)
    cache, starts = make(r.choice([3, 7, 64]), WINDOWS, **options), torch.tensor([0, 4])
    histories = [torch.zeros(2, 2, 0, 3, 4) for _ in WINDOWS]
    for _ in range(40):
        rows = torch.tensor(r.choices(range(cache.rows), k=r.randint(1, 3)))
        what = r.choice(["append", "step", "step", "reserve", "reorder", "take", "put", "crop"])
        if what == "append" or not cache.length:
            append(cache, histories, r.choice([1, 1, 2, 5, 9, 40]), stored, kind == "gradients")
        elif what == "step":
            cache.reserve(cache.length + 4)
            places = [x.data_ptr() for x in cache.tensors()]
            for _ in range(r.randint(1, 4)):
                take_step(cache, histories, starts, stored, spread)
            assert places == [x.data_ptr() for x in cache.tensors()], "a graph knows no other place"
        elif what == "reserve":
            cache.reserve(cache.length + r.randint(0, 9), r.choice([1, 4]))
        elif what == "crop":
            drop = r.randint(1, min(4, cache.length))
            length = cache.length - drop
            cache.crop(r.choice([length, -drop]) or -drop)
            assert cache.length in (0, length)
            histories = [x[:, :, : cache.length] for x in histories]
        elif what == "put":
            other, new = make(cache.length, [None] * 4, 1, **options), [torch.zeros(2, 1, 0, 3, 4) for _ in WINDOWS]
            append(other, new, cache.length, stored)
            cache.copy_rows_from(other, torch.tensor([0]), rows[:1])
            histories = [x.index_copy(1, rows[:1], row) for x, row in zip(histories, new, strict=True)]
        elif what == "take":
            other, new = make(cache.length, [None] * 4, **options), [torch.zeros(2, 2, 0, 3, 4) for _ in WINDOWS]
            append(other, new, cache.length, stored)
            rows = rows % 2
            cache = make(r.choice([3, 90]), WINDOWS, len(rows), **options)
            cache.copy_rows_from(other, rows)
            histories, starts = [x[:, rows] for x in new], torch.tensor([0, 4])[rows]
        else:
            cache.reorder(rows)
            histories, starts = [x[:, rows] for x in histories], starts[rows]
        assert cache.rows == len(starts) and not any(x.requires_grad for x in cache.tensors())


def test_memory_is_allocated_once_and_then_doubles():
    cache, sizes = make(4, [None]), []
    for _ in range(12):
        cache[0].append(*tokens(1), cache.length)
        cache.advance(1)
        sizes.append(cache[0].capacity)
    assert sizes == [4] * 4 + [8] * 4 + [16] * 4
    k, _ = cache[0].append(*tokens(1), cache.length)
    assert k.data_ptr() == cache[0].buffers[0].data_ptr(), "a view, no copy"


@pytest.mark.parametrize("window, step, lengths, least", [
    (None, 1, [5, 1, 1, 1, 1, 1], 0), (1, 3, [5, 1, 1, 1, 1], 6), (4, 1, [5, 1, 1], 6), (4, 3, [3, 40], 40),
    (40, 1, [9], 0),
], ids=str)  # fmt: skip
def test_crop_goes_back_as_far_as_the_windows_reach_and_else_forgets_all(window, step, lengths, least, poison):
    total = sum(lengths)
    for length in (*range(1, total + 1), *range(-total, 0)):
        cache = make(windows=[None, window])
        cache.reserve(8, step)
        cache.values["deltas"], histories = 1, [torch.zeros(2, 2, 0, 3, 4)] * 2
        for new in lengths:
            append(cache, histories, new)
        cache.crop(length)
        kept = length if length > 0 else total + length
        assert cache.length == (kept if kept >= least else 0) and bool(cache.values) == bool(cache.length)


def test_a_crop_that_cannot_be_meant_leaves_a_cache_as_it_was():
    cache = make()
    append(cache, [torch.zeros(2, 2, 0, 3, 4)] * 2, 7)
    for length, message in ((8, r"crop\(8\): the cache has 7 tokens"), (-8, "has 7 tokens"), (0, "cache.reset()")):
        with pytest.raises(InputError, match=message):
            cache.crop(length)
    assert cache.length == 7


@pytest.mark.parametrize("window", [None, 1, 4, 9])
@pytest.mark.parametrize("lengths", [[7, 3], [1, 6]], ids=str)
def test_rows_that_come_are_those_of_each_prompt_alone(window, lengths, poison):
    """Of two batches, padded on the left, in the steps that follow."""
    cache, alone = make(24, [window]), []
    for row, length in enumerate(lengths):
        batch, history = make(9, [None]), [torch.zeros(2, 2, 0, 3, 4)]
        append(batch, history, length + row)  # the second has padding
        cache.copy_rows_from(batch, torch.tensor([1]), torch.tensor([row]))
        alone.append(history[0][:, 1:, row:])
    cache.reserve(24)
    starts = torch.arange(2, dtype=torch.int32)
    for step in range(12):
        (k, v), q, no_angles = tokens(1), torch.randn(2, 1, 6, 4), (torch.ones(2, 1, 2), torch.zeros(2, 1, 2))
        ends, options = (
            starts + torch.tensor(lengths, dtype=torch.int32) + step + 1,
            dict(window=window, softcap=None, scale=None),
        )
        token = NextToken(starts=starts, ends=ends)
        found = cache[0].attend(q.clone(), k, v, token, no_angles, **options)
        for row, new in enumerate(torch.stack([k, v]).unbind(1)):
            alone[row] = torch.cat([alone[row], new[:, None]], 2)
            torch.testing.assert_close(found[row : row + 1], attention(q[row : row + 1], *alone[row], **options))


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
    assert not cache[2].buffers and not cache[0].buffers[0].requires_grad
    both = cache[0].append(*second)
    for found, stored, old, new in zip(both, cache[0].buffers, first, second, strict=True):
        assert torch.equal(found, torch.cat([old, new], 1)) and torch.equal(stored, found)
    sum(x.square().sum() for x in both).backward()
    assert all(x.grad is None for x in first) and all(torch.equal(x.grad, 2 * x) for x in second)
    for k in (torch.zeros(3, 1, 3, 4), torch.zeros(2, 1, 3, 5), torch.zeros(2, 1, 3, 4, dtype=torch.bfloat16)):
        with pytest.raises(InputError, match="another batch size"):
            cache[0].append(k, k)

    deltas, stored, rows = torch.randn(2, 1), cache[0].buffers[0], [1, 0, 1]
    cache.values.update(deltas=deltas, images=3)
    cache.reorder(torch.tensor(rows))
    assert torch.equal(cache[0].buffers[0], stored[rows]) and not cache[2].buffers and cache.rows == 3
    assert torch.equal(cache.values["deltas"], deltas[rows]) and cache.values["images"] == 3
    cache.reset()
    assert cache.length == 0 and not cache[0].buffers and cache.values == {}


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


@pytest.mark.parametrize("name, argument", [
    ("reorder_cache", torch.tensor([1, 1, 0])), ("batch_select_indices", torch.tensor([1])),
    ("batch_select_indices", torch.tensor([False, True])), ("batch_repeat_interleave", 3),
], ids=str)  # fmt: skip
def test_rows_move_as_in_a_cache_of_transformers(name, argument):
    theirs, ours = of_transformers(), make()
    k, v = tokens(5)
    for i, layer in enumerate(ours):
        layer.append(k, v, 0)
        theirs.update(k.transpose(1, 2), v.transpose(1, 2), i)
    ours.advance(5)
    for cache in (theirs, ours):
        getattr(cache, name)(argument)
    for layer, expected in zip(ours, theirs.layers, strict=True):
        found = layer.append(*tokens(1, ours.rows), 5)[0][:, :5]
        assert torch.equal(found.transpose(1, 2), expected.keys)
    assert ours.batch_size == len(theirs.layers[0].keys) and ours.get_seq_length(1) == theirs.get_seq_length(1)
    assert not hasattr(ours, "layers")
    with pytest.raises(AttributeError, match=r"cache\[i\] is the state of layer i.*DynamicCache"):
        ours.layers  # noqa: B018


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
