"""What a model is called with, bad in every way by name: each ends in an InputError, or in what its documentation says.

Values are looked at on the CPU; where the tensors are on a GPU, only what costs no wait is.
"""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from ligermodels.errors import InputError
from ligermodels.layers.cache import KVCache
from tests.hostile.folders import CONFIG, make_model

NAN, INF = float("nan"), float("inf")
V, H, B, S = CONFIG["vocab_size"], CONFIG["hidden_size"], 2, 5
IDS = torch.arange(B * S).view(B, S)
POSITIONS = torch.arange(S)[None]
ONES = torch.ones(B, S, dtype=torch.long)


def embeds(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Tensor:
    return torch.ones(*(shape or (B, S, H)), dtype=dtype, device=device)


def bounds(*ends: Any, dtype: torch.dtype = torch.int32, device: str = "cpu") -> Tensor:
    return torch.tensor(ends, dtype=dtype, device=device)


def cache(layers: int = 1, batch: int = B, heads: int = 1, dim: int = 8, **options: Any) -> KVCache:
    return KVCache(layers, batch, 8, heads, dim, **{"dtype": torch.float32, "device": "cpu", **options})


# Name -> (arguments of forward, words of the InputError).
FORWARD: dict[str, tuple[dict[str, Any], str]] = {
    "nothing": (dict(), "either input_ids"),
    "ids and embeddings": (dict(input_ids=IDS, inputs_embeds=embeds()), "not both"),
    "ids: a list": (dict(input_ids=[[1, 2]]), "is a list"),
    "ids: negative": (dict(input_ids=IDS - 1), "from -1"),
    "ids: the vocabulary's size": (dict(input_ids=IDS + V - 9), f"to {V}"),
    "ids: floats": (dict(input_ids=IDS.float()), "torch.float32"),
    "ids: on another device": (dict(input_ids=IDS.to("meta")), "on meta"),
    "ids: one dimension": (dict(input_ids=IDS[0]), "expected .batch"),
    "ids: no column": (dict(input_ids=IDS[:, :0]), "no token"),
    "embeddings: too wide": (dict(inputs_embeds=embeds(B, S, H + 1)), f"sequence, {H}"),
    "embeddings: float16": (dict(inputs_embeds=embeds(dtype=torch.float16)), "model.dtype"),
    "embeddings: of one row without a batch": (dict(inputs_embeds=embeds(S, H)), "expected .batch"),
    "embeddings: on another device": (dict(inputs_embeds=embeds(device="meta")), "on meta"),
    "labels: too short": (dict(input_ids=IDS, labels=IDS[:, :4]), "that of the ids"),
    "labels: floats": (dict(input_ids=IDS, labels=IDS.float()), "torch.float32"),
    "labels: the vocabulary's size": (dict(input_ids=IDS, labels=IDS + V - 9), "neither a class"),
    "labels: -1": (dict(input_ids=IDS, labels=IDS - 2), "neither a class"),
    "labels: out of range, with logits": (
        dict(input_ids=IDS, labels=IDS + V, return_logits=True), "neither a class"),
    "labels: on another device": (dict(input_ids=IDS, labels=IDS.to("meta")), "on meta"),
    "labels: a list": (dict(input_ids=IDS, labels=IDS.tolist()), "is a list"),
    "labels: and a part of the logits": (dict(input_ids=IDS, labels=IDS, logits_to_keep=2), "all positions"),
    "items: -1": (dict(input_ids=IDS, labels=IDS, num_items_in_batch=-1), "zero or more"),
    "items: a negative tensor": (dict(input_ids=IDS, labels=IDS, num_items_in_batch=torch.tensor(-8)), "zero or more"),
    "items: two": (dict(input_ids=IDS, labels=IDS, num_items_in_batch=torch.tensor([4, 4])), "one number"),
    "items: -1, with logits": (
        dict(input_ids=IDS, labels=IDS, num_items_in_batch=-1, return_logits=True), "zero or more"),
    "mask: too short": (dict(input_ids=IDS, attention_mask=ONES[:, :4]), "expected .2, 5"),
    "mask: additive": (dict(input_ids=IDS, attention_mask=(ONES - 1) * 1e9 + torch.tensor([-1e9, 0, 0, 0, 0])),
                       "Additive masks"),
    "mask: a half": (dict(input_ids=IDS, attention_mask=ONES / 2), "holds 0.5"),
    "mask: numbers of packed sequences": (
        dict(input_ids=IDS, attention_mask=torch.tensor([[1, 1, 2, 2, 3]] * B)), "packed sequences"),
    "mask: on another device": (dict(input_ids=IDS, attention_mask=ONES.to("meta")), "on meta"),
    "mask: a list": (dict(input_ids=IDS, attention_mask=ONES.tolist()), "is a list"),
    "positions: floats": (dict(input_ids=IDS, position_ids=POSITIONS.float()), "torch.float32"),
    "positions: too short": (dict(input_ids=IDS, position_ids=POSITIONS[:, :4]), "position_ids have shape"),
    "positions: of three rows": (dict(input_ids=IDS, position_ids=POSITIONS.expand(3, S)), "position_ids have shape"),
    "positions: on another device": (dict(input_ids=IDS, position_ids=POSITIONS.to("meta")), "on meta"),
    "positions: a list": (dict(input_ids=IDS, position_ids=POSITIONS.tolist()), "is a list"),
    "packing: from 1": (dict(input_ids=IDS, cu_seqlens=bounds(1, 5, 10)), "ascend from 0"),
    "packing: to less than all": (dict(input_ids=IDS, cu_seqlens=bounds(0, 5, 9)), "ascend from 0"),
    "packing: beyond the end": (dict(input_ids=IDS, cu_seqlens=bounds(0, 5, 11)), "ascend from 0"),
    "packing: descending": (dict(input_ids=IDS, cu_seqlens=bounds(0, 6, 5, 10)), "ascend from 0"),
    "packing: int64": (dict(input_ids=IDS, cu_seqlens=bounds(0, 5, 10, dtype=torch.int64)), "torch.int32"),
    "packing: one bound": (dict(input_ids=IDS, cu_seqlens=bounds(0)), "torch.int32"),
    "packing: on another device": (dict(input_ids=IDS, cu_seqlens=bounds(0, 5, 10, device="meta")), "on meta"),
    "packing: a list": (dict(input_ids=IDS, cu_seqlens=[0, 5, 10]), "is a list"),
    "packing: with a mask": (dict(input_ids=IDS, cu_seqlens=bounds(0, 5, 10), attention_mask=ONES), "with neither"),
    "packing: with a cache": (
        dict(input_ids=IDS, cu_seqlens=bounds(0, 5, 10), past_key_values=cache()), "neither attention"),
    "packing: that asks for a cache": (dict(input_ids=IDS, cu_seqlens=bounds(0, 5, 10), use_cache=True), "neither"),
    "packing: longest too short": (dict(input_ids=IDS, cu_seqlens=bounds(0, 4, 10), max_seqlen=5), "has 6"),
    "packing: longest alone": (dict(input_ids=IDS, max_seqlen=5), "cu_seqlens too"),
    "packing: of keys alone": (dict(input_ids=IDS, cu_seq_lens_k=bounds(0, 5, 10)), "given together"),
    "packing: of queries alone": (dict(input_ids=IDS, cu_seq_lens_q=bounds(0, 5, 10)), "given together"),
    "packing: of keys and queries apart": (
        dict(input_ids=IDS, cu_seq_lens_q=bounds(0, 5, 10), cu_seq_lens_k=bounds(0, 4, 10)), "k differ"),
    "cache: of another batch size": (dict(input_ids=IDS, past_key_values=cache(batch=3)), "another batch"),
    "cache: of another dtype": (dict(input_ids=IDS, past_key_values=cache(dtype=torch.float16)), "torch.float16"),
    "cache: of other heads": (dict(input_ids=IDS, past_key_values=cache(heads=2)), "another batch"),
    "cache: of another head_dim": (dict(input_ids=IDS, past_key_values=cache(dim=4)), "another batch"),
    "cache: of more layers": (dict(input_ids=IDS, past_key_values=cache(layers=2)), "another model"),
    "cache: true": (dict(input_ids=IDS, past_key_values=True), "is a bool"),
    "keep: -1": (dict(input_ids=IDS, logits_to_keep=-1), "number of positions"),
    "keep: a tensor": (dict(input_ids=IDS, logits_to_keep=torch.tensor([0, 1])), "number of positions"),
    "router of a model without": (dict(input_ids=IDS, output_router_logits=True), "no router"),
    "attention weights": (dict(input_ids=IDS, output_attentions=True), "never in memory"),
    "a tuple for an output": (dict(input_ids=IDS, return_dict=False), "not supported"),
}  # fmt: skip

# Name -> (arguments of generate, words of the InputError).
GENERATE: dict[str, tuple[dict[str, Any], str]] = {
    "ids: a list": (dict(input_ids=[[1]]), "is a list"),
    "ids: out of range": (dict(input_ids=IDS + V), "the vocabulary"),
    "ids: no column": (dict(input_ids=IDS[:, :0]), "empty prompt"),
    "ids: on another device": (dict(input_ids=IDS.to("meta")), "on meta"),
    "ids: floats": (dict(input_ids=IDS.float()), "int64 or"),
    "mask: additive": (dict(attention_mask=(1.0 - ONES) * 1e9 - 1.0), "something else"),
    "mask: padding on the right": (dict(attention_mask=torch.tensor([[1, 1, 1, 0, 0]] * B)), "ends in padding"),
    "tokens: 0": (dict(max_new_tokens=0), "at least 1"),
    "tokens: 1.5": (dict(max_new_tokens=1.5), "an integer"),
    "tokens: text": (dict(max_new_tokens="3"), "an integer"),
    "temperature: NaN": (dict(temperature=NAN), "finite positive"),
    "top_k: NaN": (dict(temperature=1.0, top_k=NAN), "positive integer"),
    "top_p: NaN": (dict(temperature=1.0, top_p=NAN), "at most 1"),
    "min_p: NaN": (dict(temperature=1.0, min_p=NAN), "from 0"),
    "penalty: NaN": (dict(repetition_penalty=NAN), "finite and"),
    "seed: text": (dict(temperature=1.0, seed="x"), "64 bits"),
    "eos: text": (dict(eos_token_id="</s>"), "must be integers"),
    "eos: with text": (dict(eos_token_id=[1, "2"]), "must be integers"),
    "eos: and nothing to fill with": (dict(eos_token_id=V + 3), "pass pad_token_id"),
    "pad: out of range": (dict(pad_token_id=V), "outside the vocabulary"),
    "pad: -1": (dict(pad_token_id=-1), "outside the vocabulary"),
    "stop: without a tokenizer": (dict(stop_strings="x"), "pass tokenizer"),
    "stop: empty": (dict(stop_strings=[""], tokenizer=1), "empty string"),
    "processor: that returns nothing": (dict(logits_processor=lambda ids, logits: None), "must return"),
    "processor: that cuts": (dict(logits_processor=lambda ids, logits: logits[:, :3]), "must return"),
    "processor: that makes NaN": (dict(logits_processor=lambda ids, logits: logits * NAN), "are NaN"),
    "processor: that leaves no token": (dict(logits_processor=lambda ids, logits: logits - INF), "all -inf"),
}  # fmt: skip


@pytest.fixture(scope="module")
def model():
    return make_model().eval()


def refused(work: Callable[[], object], words: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(InputError, match=f"(?s){words}") as caught:
            work()
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("name", list(FORWARD))
def test_a_bad_forward_is_refused(model, name):
    options, words = FORWARD[name]
    refused(lambda: model(**options), words)


@pytest.mark.parametrize("name", list(GENERATE))
def test_a_bad_generate_is_refused(model, name):
    options, words = GENERATE[name]
    refused(lambda: model.generate(**{"input_ids": IDS, "max_new_tokens": 3, **options}), words)


def test_a_cache_of_fewer_layers_is_refused_before_it_changes():
    short = cache()
    refused(lambda: make_model(num_hidden_layers=2)(IDS, past_key_values=short), "another model")
    assert short.length == 0


@pytest.mark.parametrize("part", ["embed_tokens", "norm", "lm_head"])
@pytest.mark.parametrize("value", [NAN, INF])
@pytest.mark.parametrize("options", [{}, {"eos_token_id": 3}, {"temperature": 1.0}], ids=str)
def test_weights_without_meaning_choose_no_token(part, value, options):
    """At the first token and at a later one, whether or not the host reads every step."""
    broken = make_model()
    getattr(broken if part == "lm_head" else broken.decoder, part).weight.data[9:].fill_(
        value
    )  # a row of the tables, or dims of the norm
    refused(lambda: broken.generate(IDS[:1], max_new_tokens=30, **options), "are NaN")


def test_nan_in_embeddings_stays_in_sight(model):
    """Nothing is looked at that would cost a wait: NaN goes through to the logits of its row, and of no other."""
    x = torch.ones(B, S, H)
    x[0, 2, 3] = NAN
    logits = model(inputs_embeds=x).logits
    assert logits[0, 2:].isnan().all() and logits[1].isfinite().all()


def test_what_is_odd_and_has_a_meaning_is_computed(model):
    expected = model(IDS).logits
    equal = torch.testing.assert_close
    equal(model(IDS.int()).logits, expected)
    equal(model(IDS.t().contiguous().t()).logits, expected)
    equal(model(IDS, attention_mask=torch.ones(B, S)).logits, expected)
    equal(model(IDS, attention_mask=ONES.bool()).logits, expected)
    equal(model(IDS, position_ids=POSITIONS.int()).logits, expected)
    equal(model(IDS, logits_to_keep=100).logits, expected)
    equal(model(IDS, past_key_values=model.new_cache(B, 1)).logits, expected)  # grows
    equal(model(IDS, cu_seqlens=bounds(0, 5, 5, 10), max_seqlen=99).logits, expected)  # an empty sequence
    equal(model(IDS, position_ids=POSITIONS + 1000).logits, expected)  # past the limit: only distances count
    left = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    places = left.cumsum(1) - 1  # -1 at padding, as many make them
    assert places.min() == -1
    equal(model(IDS, attention_mask=left, position_ids=places).logits[0, 2:], model(IDS[:1, 2:]).logits[0])


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


def test_ids_that_stop_nothing(model):
    """-1 for none in the checkpoint, and ids beyond the vocabulary, never come: there is nothing to fill up."""
    free = model.generate(IDS, max_new_tokens=4)
    odd = make_model().eval()
    odd.generation_config.update(eos_token_id=[-1, V + 7], pad_token_id=-1)
    assert torch.equal(odd.generate(IDS, max_new_tokens=4), free)
    assert torch.equal(model.generate(IDS[:1], max_new_tokens=4, eos_token_id=V + 3), free[:1])
    stops = torch.tensor([int(free[0, S])])
    assert torch.equal(model.generate(IDS[:1], max_new_tokens=4, eos_token_id=stops), free[:1, : S + 1])


def test_a_bad_call_leaves_the_model_as_it_was(model):
    expected = model.generate(IDS, max_new_tokens=4)
    for options, words in (*FORWARD.values(),):
        refused(lambda options=options: model(**options), words)
    assert torch.equal(model.generate(IDS, max_new_tokens=4), expected)


def test_checks_of_values_wait_for_no_device(model, monkeypatch):
    """A forward without a mask and positions reads no tensor at all, wherever it lies."""
    reads: list[str] = []
    for name in ("item", "tolist", "__bool__", "__int__", "__float__", "cpu"):
        original = getattr(Tensor, name)
        monkeypatch.setattr(Tensor, name, lambda x, *a, f=original, n=name: (reads.append(n), f(x, *a))[1])
    model(IDS, logits_to_keep=1)
    model(inputs_embeds=embeds())
    assert not reads


def test_checks_are_traced_without_a_break():
    """torch.compile sees one graph, with ids, labels, a mask and positions."""
    model = make_model()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    for options in (dict(labels=IDS, num_items_in_batch=7), dict(attention_mask=ONES, position_ids=POSITIONS)):
        expected, found = model(IDS, **options), compiled(IDS, **options)
        for name in found:
            torch.testing.assert_close(found[name], expected[name])
