"""A cache given to `model.forward`: after a forward pass that failed, after `crop`, and in torch.inference_mode."""

import itertools

import pytest
import torch

from ligermodels.errors import InputError
from ligermodels.generation import generate, generate_iter, graphs
from tests.generation.models import LONGROPE, family, llama, prompt
from tests.generation.test_recurrent import qwen3_5

ORIGINAL = LONGROPE["original_max_position_embeddings"]
CLOSE = dict(rtol=1e-4, atol=1e-4)  # fp32 sums in another order


@pytest.fixture(params=["llama", "gemma2", "qwen3_5"])
def model(request):
    model = qwen3_5().eval() if request.param == "qwen3_5" else family(request.param)
    return model.requires_grad_(False)


def logits(model, ids, cache):
    return model(ids[:, cache.length :], past_key_values=cache).logits[:, -1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_cache_may_leave_inference_mode(model, dtype):
    """However its buffers were made there; and enter it."""
    cache, rows, ids = model.new_cache(1, 4), torch.tensor([0, 0]), prompt(1, 14)
    with torch.inference_mode():
        inside = model.new_cache(1, 4)
    model = model.to(dtype)
    expected = model(ids, use_cache=False).logits[:, -1]
    with torch.inference_mode():
        for change in (
            lambda: logits(model, ids[:, :3], inside),  # moves them to another dtype
            lambda: inside.reserve(6, 3),
            lambda: logits(model, ids[:, :9], inside),  # enlarges them
            lambda: inside.reorder(rows),
        ):
            assert not any(x.is_inference() for x in inside.tensors())
            change()
    for one in (cache, inside):
        one.reset()
        text = ids.expand(one.rows, -1)
        logits(model, text[:, :9], one)
        with torch.inference_mode():
            logits(model, text[:, :12], one)
        torch.testing.assert_close(logits(model, text, one), expected.expand(one.rows, -1), **CLOSE)


def test_a_pass_that_failed_is_not_continued(model):
    """The first layers have its tokens, the last does not."""
    ids = prompt(1, 16)
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits[:, -1]
    for mend, before in itertools.product(("reset", "crop", "generate"), ([9, 11], [])):
        cache = model.new_cache(1, 40)
        cache.reserve(40, 8)
        with torch.no_grad():
            for end in before:
                logits(model, ids[:, :end], cache)
            hook = model.model.layers[-1].mlp.register_forward_pre_hook(lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                logits(model, ids[:, :14], cache)
            hook.remove()
            for _ in range(2):
                with pytest.raises(InputError, match=r"failed midway.*call cache.reset\(\) and pass the whole text"):
                    logits(model, ids, cache)
            if mend == "generate":  # which has the whole text
                found = generate(model, ids, max_new_tokens=8, past_key_values=cache)
                assert torch.equal(found, generate(model, ids, max_new_tokens=8)) and cache.length
                continue
            cache.reset() if mend == "reset" or not cache.length else cache.crop(10)
            assert cache.length == 0
            torch.testing.assert_close(logits(model, ids, cache), expected, **CLOSE)


def test_arguments_that_are_refused_leave_a_cache_as_it_was(model):
    ids, cache = prompt(1, 9), model.new_cache(1, 20)
    with pytest.raises(InputError, match="attention_mask"):
        model(ids[:, :4], attention_mask=torch.ones(1, 7), past_key_values=cache)
    found = [logits(model, ids[:, :end], cache) for end in (4, 9)][-1]
    torch.testing.assert_close(found, model(ids, use_cache=False).logits[:, -1], **CLOSE)


@pytest.mark.filterwarnings("ignore:prompt and new tokens may reach")
@pytest.mark.parametrize("longest", [ORIGINAL, ORIGINAL + 1, ORIGINAL + 8])
def test_a_cut_back_to_other_rotary_frequencies_forgets_all(longest):
    model, ids = llama(rope="longrope"), prompt(1, ORIGINAL + 8)
    for length in {ORIGINAL - 6, ORIGINAL, ORIGINAL + 1, longest - 1} - {*range(longest, 99)}:
        cache = model.new_cache(1, longest)
        logits(model, ids[:, :longest], cache)
        cache.crop(length)
        assert cache.length == (length if (length > ORIGINAL) == (longest > ORIGINAL) else 0)
        found = logits(model, ids[:, : length + 1], cache)
        torch.testing.assert_close(found, model(ids[:, : length + 1], use_cache=False).logits[:, -1], **CLOSE)


def test_a_stream_left_at_a_switch_of_frequencies_is_continued(monkeypatch):
    """The step that runs ahead has the frequencies of one more token than the text."""
    monkeypatch.setattr(graphs, "DEVICES", {"cpu", "cuda"})
    model, ids = llama(rope="longrope"), prompt(1, ORIGINAL - 4)
    expected = generate(model, ids, max_new_tokens=6)
    for new in range(1, 7):
        cache = model.new_cache(1, 40)
        stream = generate_iter(model, ids, max_new_tokens=9, past_key_values=cache)
        text = torch.cat([ids, torch.stack([next(stream) for _ in range(new)], 1)], 1)
        stream.close()
        assert torch.equal(text, expected[:, : text.shape[1]])
        cache.crop(min(cache.length, text.shape[1] - 1))
        found = logits(model, text, cache)
        torch.testing.assert_close(found, model(text, use_cache=False).logits[:, -1], **CLOSE)
