"""The loop: what runs when, padding, stopping, streaming, warnings, and what raises."""

import itertools
import warnings

import pytest
import torch

from ligermodels.errors import InputError
from ligermodels.generation import generate, generate_iter
from ligermodels.generation.engine import PaddedEngine
from ligermodels.generation.request import Request
from tests.generation.models import VOCAB, llama, padded, prompt


@pytest.fixture
def model():
    return llama()


@pytest.fixture
def calls(model):
    """The shape of the ids and logits_to_keep of each forward."""
    seen = []
    model.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append((tuple(kwargs["input_ids"].shape), kwargs.get("logits_to_keep"))),
        with_kwargs=True,
    )
    return seen


def test_greedy_equals_the_full_forward_with_one_prefill_and_one_token_a_step(model, calls):
    expected = ids = prompt(rows=2)
    for _ in range(12):
        expected = torch.cat([expected, model(input_ids=expected).logits[:, -1:].argmax(-1)], 1)
    calls.clear()
    for options in ({}, dict(use_cache=None)):
        calls.clear()
        found = generate(model, ids, max_new_tokens=12, **options)
        assert torch.equal(found, expected)
        assert calls == [((2, 5), 1)] + [((2, 1), 1)] * 11
    assert len(set(found[0, 5:].tolist())) > 3, "a model that repeats itself proves little"


def test_stream_and_streamer_say_what_generate_returns(model):
    class Log:
        def __init__(self):
            self.ids, self.ended = [], False

        def put(self, value):
            assert value.device.type == "cpu" and not self.ended
            self.ids.append(value)

        def end(self):
            self.ended = True

    log, ids = Log(), prompt(rows=2)
    eos = generate(model, ids, max_new_tokens=9)[0, 8].item()
    found = generate(model, ids, max_new_tokens=9, eos_token_id=eos, streamer=log)
    assert torch.equal(log.ids[0], ids) and torch.equal(torch.stack(log.ids[1:], 1), found[:, 5:]) and log.ended
    steps = list(generate_iter(model, ids, max_new_tokens=9, eos_token_id=eos))
    assert torch.equal(torch.stack(steps, 1), found[:, 5:])
    assert len(list(itertools.islice(generate_iter(model, ids, max_new_tokens=9), 2))) == 2


def test_reads_the_device_once_a_step(model, monkeypatch):
    reads = []
    for name in ("cpu", "item", "__bool__", "__int__"):
        original = getattr(torch.Tensor, name)
        monkeypatch.setattr(torch.Tensor, name, lambda x, *a, f=original, n=name: (reads.append(n), f(x, *a))[1])
    generate(model, prompt(rows=2), max_new_tokens=6, eos_token_id=VOCAB + 5, pad_token_id=0)
    assert reads == ["cpu"] * 6  # which brings the NaN verdict along


@pytest.mark.gpu
def test_a_step_does_not_wait_for_the_device(device):
    model, ids = llama().to(device), prompt(rows=2).to(device)
    options = dict(
        max_new_tokens=8, temperature=0.8, top_k=5, top_p=0.9, min_p=0.01, repetition_penalty=1.1, min_new_tokens=2,
        seed=0,
    )  # fmt: skip
    generate(model, ids, **options)  # compiles and allocates
    steps = PaddedEngine(Request(model, ids, **options)).decode()
    next(steps)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(7):
            next(steps)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_nan_logits_are_an_error_and_not_token_zero(model):
    def no_token(ids, logits):
        return logits - torch.inf

    with pytest.raises(InputError, match="all -inf"):
        generate(model, prompt(), max_new_tokens=3, logits_processor=no_token)
    with pytest.raises(InputError, match=rf"logits_processor must return logits of shape \[1, {VOCAB}\]"):
        generate(model, prompt(), max_new_tokens=3, logits_processor=lambda ids, logits: logits[:, :9])
    model.lm_head.weight[3] = torch.nan
    for call in (generate, lambda *args, **options: list(generate_iter(*args, **options))):
        with pytest.raises(InputError, match="float16 overflow"):
            call(model, prompt(), max_new_tokens=3)


def test_warnings_name_the_line_of_the_call_and_come_for_mistakes_alone():
    model = llama(positions=10)
    ids, mask = padded([5, 4], extra=3)  # padding does not count
    for options, message in [
        (dict(max_new_tokens=6), "11 positions.*made for 10"),
        (dict(max_new_tokens=2, top_p=0.9), "top_p changes nothing in greedy decoding"),
    ]:
        with pytest.warns(UserWarning, match=message) as caught:
            generate(model, ids, attention_mask=mask, **options)
        assert caught[0].filename == __file__
    model.generation_config.update(max_length=40, temperature=0, top_p=0.0)  # as some checkpoints have it
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        generate(model, ids, attention_mask=mask, max_new_tokens=5, top_p=1.0, top_k=0)
        generate(model, ids, attention_mask=mask, max_new_tokens=5, generation_config=dict(top_k=50))  # the default


def test_none_switches_an_option_off_and_leaves_token_ids_and_do_sample_to_the_checkpoint():
    model, ids = llama(), prompt()
    text = generate(model, ids, max_new_tokens=20)[0, 5:].tolist()
    eos = next(token for i, token in enumerate(text) if i > 3 and token not in text[:i])
    model.generation_config.update(eos_token_id=eos, do_sample=True, top_k=1, repetition_penalty=1e9, max_new_tokens=20)
    expected = generate(model, ids, repetition_penalty=1.0)
    assert expected[0, 5:].tolist() == text[: text.index(eos) + 1]
    options = dict(eos_token_id=None, do_sample=None, repetition_penalty=None)
    assert torch.equal(generate(model, ids, **options), expected)
    assert not torch.equal(generate(model, ids), expected)


def test_the_default_length_is_twenty_and_ends_at_the_positions_of_the_model():
    model = llama(positions=64)
    for length, end in ((9, 29), (50, 64)):
        with pytest.warns(UserWarning, match="at most 20 tokens are added; pass max_new_tokens"):
            assert generate(model, prompt(length=length)).shape == (1, end)
