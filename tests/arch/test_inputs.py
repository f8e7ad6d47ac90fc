"""Arguments of forward that cannot work end in an InputError; unusual ones that can are computed.

Values are checked on the CPU; of tensors on a GPU only what costs no synchronisation.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.loss.loss_utils import ForCausalLMLoss

from ligermodels.errors import InputError
from ligermodels.layers.state import Cache, KeyValues
from tests.checkpoint.fixtures import CONFIG, make_model

V, H, B, S = CONFIG["vocab_size"], CONFIG["hidden_size"], 2, 5
IDS = torch.arange(B * S).view(B, S)
POSITIONS = torch.arange(S)[None]
ONES = torch.ones(B, S, dtype=torch.long)


def embeds(size: int = H, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.ones(B, S, size, dtype=dtype)


def bounds(*ends: int) -> Tensor:
    return torch.tensor(ends, dtype=torch.int32)


def cache(layers: int = 1, batch: int = B) -> Cache:
    return Cache([KeyValues(batch, 8, 1, 8, dtype=torch.float32, device="cpu") for _ in range(layers)], batch)


# Name -> (arguments of forward, words of the InputError).
FORWARD: dict[str, tuple[dict[str, Any], str]] = {
    "nothing": (dict(), "either input_ids"),
    "ids and embeddings": (dict(input_ids=IDS, inputs_embeds=embeds()), "not both"),
    "ids: a list": (dict(input_ids=[[1, 2]]), "is a list"),
    "ids: the vocabulary's size": (dict(input_ids=IDS + V - 9), f"to {V}"),
    "embeddings: float16": (dict(inputs_embeds=embeds(dtype=torch.float16)), "model.dtype"),
    "labels: too short": (dict(input_ids=IDS, labels=IDS[:, :4]), "that of the ids"),
    "labels: the vocabulary's size": (dict(input_ids=IDS, labels=IDS + V - 9), "neither a class"),
    "labels: and a part of the logits": (dict(input_ids=IDS, labels=IDS, logits_to_keep=2), "all positions"),
    "items: -1": (dict(input_ids=IDS, labels=IDS, num_items_in_batch=-1), "zero or more"),
    "mask: additive": (dict(input_ids=IDS, attention_mask=ONES * -1e9), "Additive masks"),
    "mask: numbers of packed sequences": (
        dict(input_ids=IDS, attention_mask=torch.tensor([[1, 1, 2, 2, 3]] * B)), "packed sequences"),
    "positions: too short": (dict(input_ids=IDS, position_ids=POSITIONS[:, :4]), "position_ids have shape"),
    "packing: descending": (dict(input_ids=IDS, cu_seqlens=bounds(0, 6, 5, 10)), "ascend from 0"),
    "packing: with a mask": (dict(input_ids=IDS, cu_seqlens=bounds(0, 5, 10), attention_mask=ONES), "with neither"),
    "packing: that asks for a cache": (dict(input_ids=IDS, cu_seqlens=bounds(0, 5, 10), use_cache=True), "neither"),
    "packing: other bounds for keys than for queries": (
        dict(input_ids=IDS, cu_seq_lens_q=bounds(0, 5, 10), cu_seq_lens_k=bounds(0, 4, 10)), "k differ"),
    "cache: of another batch size": (dict(input_ids=IDS, past_key_values=cache(batch=3)), "another batch"),
    "cache: of more layers": (dict(input_ids=IDS, past_key_values=cache(layers=2)), "another model"),
    "ignored label: a float": (dict(input_ids=IDS, labels=IDS, ignore_index=0.0), "whole number"),
    "shifted labels: too short": (dict(input_ids=IDS, shift_labels=IDS[:, 1:]), "that of the ids"),
    "cache position: not after the cache": (dict(input_ids=IDS, cache_position=POSITIONS[0] + 1), "0 to 4 of the new"),
    "router of a model without": (dict(input_ids=IDS, output_router_logits=True), "no router"),
    "loss function: without labels": (dict(input_ids=IDS, loss_function=print), "needs labels, neither logits"),
    "loss function: and logits": (
        dict(input_ids=IDS, labels=IDS, loss_function=print, return_logits=True), "needs labels, neither logits"),
    "loss function: and log probabilities": (
        dict(input_ids=IDS, labels=IDS, loss_function=print, return_logprobs=True), "needs labels, neither logits"),
    "attention weights": (dict(input_ids=IDS, output_attentions=True), "never in memory"),
    "a tuple for an output": (dict(input_ids=IDS, return_dict=False), "not supported"),
    "two caches": (dict(input_ids=IDS, past_key_values=cache(), cache=cache()), "two names for one cache"),
    "a misspelt name": (dict(input_ids=IDS, use_caches=True), "no argument 'use_caches'; did you mean 'use_cache'"),
    "a name of no meaning": (dict(input_ids=IDS, foo=1), "no argument 'foo'$"),
}  # fmt: skip


@pytest.fixture(scope="module")
def model():
    return make_model().eval()


def refused(work: Callable[[], object], words: str) -> None:
    with pytest.raises(InputError, match=f"(?s){words}"):
        work()


@pytest.mark.parametrize("name", list(FORWARD))
def test_a_bad_forward_is_refused(model, name):
    options, words = FORWARD[name]
    refused(lambda: model(**options), words)


@pytest.mark.parametrize("name", ["labels", "shift_labels", "loss_function", "return_logits"])
def test_the_base_model_has_no_head(model, name):
    refused(lambda: model.base_model(IDS, **{name: IDS}), f"^{name} is an argument of the head.*call the whole model$")
    refused(lambda: model.base_model(IDS, label=IDS), "no argument 'label'; did you mean")


def test_a_loss_function_of_a_head_that_is_wrapped_is_refused():
    model = make_model()
    model.lm_head = torch.nn.Linear(H, V)
    refused(lambda: model(IDS, labels=IDS, loss_function=print), "a head that no adapter wraps")


def test_a_cache_of_fewer_layers_is_refused_before_it_changes():
    short = cache()
    refused(lambda: make_model(num_hidden_layers=2)(IDS, past_key_values=short), "another model")
    assert short.length == 0


def test_unusual_arguments_that_can_work_are_computed(model):
    expected = model(IDS).logits
    theirs = DynamicCache()
    assert model(IDS, past_key_values=theirs).past_key_values is theirs and theirs.get_seq_length() == S
    equal = torch.testing.assert_close
    equal(model(IDS.int()).logits, expected)
    equal(model(IDS.t().contiguous().t()).logits, expected)
    equal(model(IDS, attention_mask=torch.ones(B, S)).logits, expected)
    equal(model(IDS, attention_mask=ONES.bool()).logits, expected)
    equal(model(IDS, position_ids=POSITIONS.int()).logits, expected)
    equal(model(IDS, cache_position=POSITIONS[0], token_type_ids=IDS).logits, expected)
    equal(model(IDS, logits_to_keep=100).logits, expected)
    equal(model(IDS, past_key_values=model.new_cache(B, 1)).logits, expected)  # grows
    equal(model(IDS, cu_seqlens=bounds(0, 5, 5, 10), max_seqlen=99).logits, expected)  # an empty sequence
    equal(model(IDS, position_ids=POSITIONS + 1000).logits, expected)  # past the limit: only distances count
    left = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    places = left.cumsum(1) - 1  # -1 at padding, as many callers compute them
    equal(model(IDS, attention_mask=left, position_ids=places).logits[0, 2:], model(IDS[:1, 2:]).logits[0])


def test_arguments_without_effect(model):
    """Of the base model also those that ask a head for less, as transformers' base models take them."""
    beside = dict(length=torch.tensor([S, S]), special_tokens_mask=ONES, token_type_ids=ONES, seq_idx=ONES)
    assert torch.equal(model(IDS, **beside).logits, model(IDS).logits)
    found = model.base_model(IDS, logits_to_keep=3, num_items_in_batch=4, skip_logits=True, **beside)
    assert torch.equal(found.last_hidden_state, model.base_model(IDS).last_hidden_state)


def test_the_last_positions_alone(model):
    """Of the logits, or in their place of the last hidden state; a balancing loss stays that of all tokens."""
    states = model(IDS, return_logits=False).last_hidden_state
    for keep in (1, 3, 100):
        torch.testing.assert_close(model(IDS, logits_to_keep=keep).logits, model.logits_of(states)[:, -keep:])
        found = model(IDS, logits_to_keep=keep, return_logits=False).last_hidden_state
        assert torch.equal(found, states[:, -keep:])
    output = model(IDS, logits_to_keep=2, output_hidden_states=True)
    assert torch.equal(output.last_hidden_state, states) and output.logits.shape[1] == 2
    mixture = make_model(model_type="mixtral", num_local_experts=4, num_experts_per_tok=2)
    options = dict(attention_mask=torch.tensor([[0, 0, 1, 1, 1], [1] * 5]), output_router_logits=True)
    expected = mixture(IDS, **options).aux_loss
    assert torch.equal(mixture(IDS, logits_to_keep=2, **options).aux_loss, expected)


def test_a_cache_has_two_names(model):
    """past_key_values, and since transformers 5.24 cache: as an argument and in the output."""
    expected = model(IDS).logits
    for kind in (lambda: model.new_cache(B, S), DynamicCache):
        for name, forward in (("cache", model), ("past_key_values", model), ("cache", model.base_model)):
            past = kind()
            output = forward(IDS[:, :3], **{name: past})
            assert output.cache is output.past_key_values is output["cache"] is output.get("cache") is past
            assert "cache" in output and "past_key_values" in output and output[1] is past
            if forward is model:
                found = model(IDS[:, 3:], cache=past, past_key_values=past).logits
                torch.testing.assert_close(found, expected[:, 3:])
    output = model(IDS, use_cache=False)
    assert output.cache is output.get("cache") is None and "cache" not in output
    past = model.new_cache(1, 9)
    found = model.generate(IDS[:1], cache=past, max_new_tokens=3, eos_token_id=(), return_dict_in_generate=True)
    assert found.cache is found["cache"] is found.past_key_values is past and past.length == S + 2
    refused(lambda: model.generate(IDS[:1], cache=past, past_key_values=cache(), max_new_tokens=3), "two names")


def test_who_gets_a_cache(model):
    """Whom the config's use_cache serves: no training, no packed rows."""
    assert all("past_key_values" in forward(IDS) for forward in (model, model.model))
    packed = torch.arange(B * S).remainder(3).view(B, S)
    for options in (dict(labels=IDS), dict(use_cache=False), dict(position_ids=packed)):
        assert "past_key_values" not in model(IDS, **options)
    try:
        assert "past_key_values" not in model.train()(IDS) | model.model(IDS)
        model.eval().config.use_cache = False
        assert "past_key_values" not in model(IDS) | model.model(IDS)
    finally:
        model.eval().config.use_cache = True


def test_shifted_labels_and_another_ignored_label(model):
    """transformers' loss_function of the same arguments."""
    labels = IDS.masked_fill(IDS == 3, -100)
    shifted = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=-100)
    packed = dict(cu_seqlens=bounds(0, 5, 7, 10))
    with_logits = dict(num_items_in_batch=3, return_logits=True)
    for options in ({}, dict(num_items_in_batch=3), dict(return_logits=True), with_logits, packed):
        logits = model(IDS, **{name: value for name, value in options.items() if name == "cu_seqlens"}).logits
        loss = partial(ForCausalLMLoss, logits, vocab_size=V, num_items_in_batch=options.get("num_items_in_batch"))
        expected = loss(labels=None, shift_labels=shifted)
        torch.testing.assert_close(model(IDS, shift_labels=shifted, **options).loss, expected)
        torch.testing.assert_close(model(IDS, labels=IDS, shift_labels=shifted, **options).loss, expected)
        given = dict(shift_labels=shifted.masked_fill(shifted == -100, 3), ignore_index=3)
        torch.testing.assert_close(model(IDS, **given, **options).loss, expected)
    expected = ForCausalLMLoss(model(IDS).logits, IDS, vocab_size=V, ignore_index=4)
    torch.testing.assert_close(model(IDS, labels=IDS, ignore_index=4).loss, expected)
    found = model(IDS, shift_labels=shifted, return_logprobs=True).logprobs
    torch.testing.assert_close(found, model(IDS, labels=labels, return_logprobs=True).logprobs)


@pytest.mark.parametrize("lengths", [(3, 4, 3), (0, 7, 3), (10,)], ids=str)
def test_a_packed_sequence_may_go_on_in_the_next_row(model, lengths):
    """Its tokens, and their labels, are those of the sequence alone."""
    packed = bounds(*torch.tensor([0, *lengths]).cumsum(0))
    texts = [text[None] for text in IDS.flatten().split(lengths) if len(text)]
    logits = torch.cat([model(text).logits for text in texts], 1)
    torch.testing.assert_close(model(IDS, cu_seqlens=packed).logits, logits.view(B, S, -1))
    expected = sum(model(text, labels=text, num_items_in_batch=1).loss for text in texts)
    torch.testing.assert_close(model(IDS, labels=IDS, cu_seqlens=packed, num_items_in_batch=1).loss, expected)


def test_logits_that_were_not_computed(model):
    """Read as an attribute or by position, they are an error that says how to get them; for tools they are None."""
    output = model(IDS, labels=IDS, output_hidden_states=True)
    assert output.get("logits") is getattr(output, "logits", None) is None and not hasattr(output, "logits")
    assert output[0] is output[:1][0] is output.loss and output.past_key_values is None
    with pytest.raises(AttributeError, match="return_logits=True"):
        output.logits  # noqa: B018
    for position in (1, slice(2), slice(1, None), -1):
        refused(lambda at=position: output[at], "return_logits=True")
    loss, logits = model(IDS, labels=IDS, return_logits=True)[:2]
    torch.testing.assert_close((loss, logits), (output.loss, model(IDS).logits))
    assert model(IDS, return_logits=False).logits is None  # no loss that would have left them out


def test_labels_leave_logits_out_except_in_evaluation(model):
    """Trainers ask for predictions beside the loss there."""
    computed = {}
    for training, gradients in ((True, True), (True, False), (False, True), (False, False)):
        with torch.set_grad_enabled(gradients):
            computed[training, gradients] = "logits" in model.train(training)(IDS, labels=IDS)
    model.eval()
    assert computed == {(True, True): False, (True, False): False, (False, True): False, (False, False): True}
    with torch.no_grad():
        assert torch.equal(model(IDS, labels=IDS).logits, model(IDS).logits)
        assert "logits" not in model(IDS, labels=IDS, return_logits=False)


def test_a_vmap_is_refused(model):
    parameters = dict(model.named_parameters())

    def loss(parameters, row):
        return torch.func.functional_call(model, parameters, (row[None],), {"labels": row[None]}).loss

    for work in (loss, torch.func.grad(loss)):
        refused(lambda work=work: torch.func.vmap(work, (None, 0))(parameters, IDS), "vmap is not supported")
    gradients = torch.func.grad(loss)(parameters, IDS[0])
    expected = torch.autograd.grad(model(IDS[:1], labels=IDS[:1]).loss, list(parameters.values()))
    torch.testing.assert_close(tuple(gradients.values()), expected)


def test_no_label_at_all_is_a_loss_of_zero(model):
    """And of zero gradients; torch's own mean would be NaN."""
    for options in ({}, {"return_logits": True}, {"num_items_in_batch": 0}, {"num_items_in_batch": torch.tensor(0)}):
        model.zero_grad()
        loss = model(IDS, labels=torch.full_like(IDS, -100), **options).loss
        loss.backward()
        assert loss == 0 and all(p.grad is None or (p.grad == 0).all() for p in model.parameters())
    assert model(IDS[:, :1], labels=IDS[:, :1]).loss == 0  # one token has no next


def test_a_row_of_padding_alone_leaves_the_others_as_they_are(model):
    mask = torch.tensor([[0] * S, [1] * S])
    logits = model(IDS, attention_mask=mask).logits
    assert logits.isfinite().all()
    torch.testing.assert_close(logits[1:], model(IDS[1:]).logits)


def test_a_forward_without_mask_and_positions_never_synchronises(model, monkeypatch):
    """It reads no tensor's values, on whichever device they are."""
    reads: list[str] = []
    for name in ("item", "tolist", "__bool__", "__int__", "__float__", "cpu"):
        original = getattr(Tensor, name)
        monkeypatch.setattr(Tensor, name, lambda x, *a, f=original, n=name: (reads.append(n), f(x, *a))[1])
    model(IDS, logits_to_keep=1)
    model(inputs_embeds=embeds())
    assert not reads
