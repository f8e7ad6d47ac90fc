"""The KV cache against concatenation."""

import pytest
import torch

from ligermodels.cache import KVCache
from ligermodels.errors import InputError


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


@pytest.mark.parametrize("k, message", [
    (torch.zeros(3, 1, 3, 4), "was it made for another batch size or model"),
    (torch.zeros(2, 1, 3, 5), "was it made for another batch size or model"),
    (torch.zeros(2, 1, 3, 4, dtype=torch.bfloat16), "k is torch.bfloat16 on cpu, the cache torch.float32"),
])  # fmt: skip
def test_what_does_not_fit_is_named(k, message):
    with pytest.raises(InputError, match=message):
        make()[0].update(k, k)


def test_impossible_sizes_are_named():
    with pytest.raises(InputError, match="num_layers=0"):
        KVCache(0, 2, 8, 3, 4, dtype=torch.float32, device="cpu")
    with pytest.raises(InputError, match="max_length=-1"):
        make(-1)
