"""Decoding with lengths on the device, as a CUDA graph on a GPU and step by step on a CPU: the ids without it."""

import copy
import gc
import pickle
import warnings
import weakref

import pytest
import torch
from torch import nn
from transformers import DynamicCache

import ligermodels
from ligermodels.generation import generate, generate_iter, graphs
from ligermodels.layers.state import as_cache
from ligermodels.training.lora import add_lora
from tests.arch import gemma3_vl, gemma4_vl, llama_vision, qwen2_vl, qwen3_vl
from tests.generation.models import family, llama, padded, prompt, with_large_weights
from tests.tiny import FAMILIES

CLOSE = dict(rtol=1e-4, atol=1e-4)  # fp32 sums in another order


def assert_same_ids(model, steps, ids, recomputed=0, **options):
    """Returns the ids, which decoding without lengths on the device gives as well.

    recomputed: steps that run the whole text, for another set of rotary frequencies.
    """
    options = {"max_new_tokens": 30, "eos_token_id": (), **options}
    expected = generate(model, ids, disable_compile=True, **options)
    assert not steps
    found = generate(model, ids, **options)
    assert torch.equal(found, expected) and len(steps) == found.shape[1] - ids.shape[1] - 1 - recomputed
    assert found[:, ids.shape[1] :].unique().numel() > 4, "a model that repeats itself proves little"
    steps.clear()
    return found


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_writes_the_same(name, device, steps):
    model, recomputed = family(name).to(device), int(name == "phi3")
    for lengths, own in (([9], {}), ([9, 4, 13], {}), ([9, 4, 13], dict(kv_cache_dtype="fp8"))):
        ids, mask = (x.to(device) for x in padded(lengths))
        assert_same_ids(model, steps, ids, attention_mask=mask, recomputed=recomputed, **own)
    own = dict(prefill_chunk_size=4)
    if not getattr(model.config, "hidden_size_per_layer_input", 0):  # ids are looked up in a second table
        own["inputs_embeds"] = model.get_input_embeddings()(ids)
    assert_same_ids(model, steps, ids, attention_mask=mask, recomputed=recomputed, **own)


def test_images_of_gemma_3(device, steps):
    config = gemma3_vl.tiny(tie_word_embeddings=False)
    model = with_large_weights(ligermodels.Gemma3VL.from_config(config, seed=0)).to(device)
    for rows in ([[3, "image", 4]], [[3, "image", 2], [5], [2, "image", 1, "image"]]):
        batch = {name: x.to(device) for name, x in gemma3_vl.inputs(rows, config, "left").items()}
        assert_same_ids(model, steps, batch.pop("input_ids"), **batch)


@pytest.mark.parametrize("build", [gemma4_vl.tiny, gemma4_vl.unified])
def test_images_of_gemma_4(build, device, steps):
    config = build(use_bidirectional_attention="vision", tie_word_embeddings=False, hidden_size_per_layer_input=6)
    model = with_large_weights(ligermodels.ARCHS[config["model_type"]].from_config(config, seed=0)).to(device)
    one, other = ("image", 1, 2), ("image", 2, 2)
    for rows in ([[3, one, 4]], [[3, other, 2], [5], [2, one, 1, other]]):
        batch = gemma4_vl.inputs(rows, config, "left")
        batch = {name: x if name == "image_position_ids" else x.to(device) for name, x in batch.items()}
        assert_same_ids(model, steps, batch.pop("input_ids"), **batch)


@pytest.mark.parametrize(
    "build", [qwen2_vl.windowed, qwen3_vl.qwen3_vl, qwen3_vl.qwen3_vl_moe, qwen3_vl.qwen3_5, qwen3_vl.qwen3_5_moe]
)
def test_images_of_qwen(build, device, steps):
    config = build()
    model = with_large_weights(ligermodels.ARCHS[config["model_type"]].from_config(config, seed=0)).to(device)
    image, video = ("image", (1, 2, 3)), ("video", (2, 1, 2))
    for rows in ([[3, image, 4]], [[1, image, 6]], [[3, image, 4], [5], [2, video, 1]]):  # the graph has seen others
        batch = {name: x if "grid" in name else x.to(device) for name, x in qwen2_vl.inputs(rows, config).items()}
        assert_same_ids(model, steps, batch.pop("input_ids"), **batch)
        assert_same_ids(model, steps, prompt(length=7).clamp(max=qwen2_vl.IMAGE - 1).to(device))


def test_images_of_llama_vision(device, steps):
    config = llama_vision.tiny()
    model = with_large_weights(ligermodels.LlamaVision.from_config(config, seed=0)).to(device)
    for seed in (3, 4):
        ids, _, inputs = llama_vision.images(config, [[(2, 3)], [(5, 1)]], length=12, seed=seed)
        inputs = {name: x.to(device) for name, x in inputs.items()}
        assert_same_ids(model, steps, ids.to(device), **inputs)
    assert_same_ids(model, steps, prompt(2, 7).to(device))


# What generate promises.


def test_draws_are_the_same_and_none_is_ahead(device, steps):
    model, (ids, mask) = family("qwen3").to(device), padded([6, 9])
    ids, mask = ids.to(device), mask.to(device)
    options = dict(attention_mask=mask, do_sample=True, temperature=1.2, top_k=20, top_p=0.9, num_return_sequences=3)
    free = assert_same_ids(model, steps, ids, seed=5, repetition_penalty=1.2, **options)
    eos = free[:, 15].tolist()
    after = []
    for off in (True, False):
        torch.manual_seed(7)
        found = generate(model, ids, max_new_tokens=30, eos_token_id=eos, disable_compile=off, **options)
        after.append((found, torch.rand(3, device=device)))
    assert torch.equal(after[0][0], after[1][0]) and torch.equal(after[0][1], after[1][1])


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_the_cache_holds_all_but_the_last_token_however_it_ends(name, device, steps):
    model, ids = family(name).to(device), prompt(2, 7).to(device)
    free = generate(model, ids, max_new_tokens=40, disable_compile=True, eos_token_id=())
    rows = [row.tolist() for row in free[:, 7:]]
    eos = next(token for token in rows[0][3:] if token in rows[1][3:])
    options = dict(max_new_tokens=40, return_dict_in_generate=True, eos_token_id=eos, pad_token_id=0)
    expected = generate(model, ids, disable_compile=True, **options)
    found = generate(model, ids, **options)
    assert torch.equal(found.sequences, expected.sequences) and found.sequences.shape[1] < 40
    caches = [found.past_key_values, expected.past_key_values]
    assert [cache.length for cache in caches] == [found.sequences.shape[1] - 1] * 2
    longer = torch.cat([found.sequences, prompt(2, 3).to(device)], 1)
    mask = torch.ones_like(longer)
    more = [
        generate(model, longer, attention_mask=mask, past_key_values=cache, max_new_tokens=20, eos_token_id=())
        for cache in caches
    ]
    assert torch.equal(more[0], more[1])
    full = generate(model, longer, attention_mask=mask, max_new_tokens=20, disable_compile=True, eos_token_id=())
    assert torch.equal(more[0], full)

    cache = model.new_cache(2, 20)  # too small, and left in the middle
    stream = generate_iter(model, ids, past_key_values=cache, max_new_tokens=40, eos_token_id=())
    start = torch.stack([next(stream) for _ in range(25)], 1)
    stream.close()
    assert torch.equal(start, free[:, 7:32].cpu()) and cache.length == 31


@pytest.mark.parametrize("own, rows", [({}, 2), (dict(prompt_lookup_num_tokens=2), 1)], ids=["graph", "drafter"])
def test_criteria_scores_and_processors_see_what_they_saw(own, rows, device, steps):
    model, ids, kept, outputs = family("mistral").to(device), prompt(rows, 5).to(device).repeat(1, 3), [[], []], []
    for seen, how in zip(kept, (dict(disable_compile=True), own), strict=True):

        def keep(ids, logits, seen=seen):
            seen.append((ids.clone(), logits))
            return logits.index_fill(1, ids[0, -3:] if len(seen) % 2 else ids[0, :1], 3.0)  # some drafts are right

        outputs.append(generate(
            model, ids, max_new_tokens=20, logits_processor=keep, stopping_criteria=lambda ids, s: ids[:, -1] % 7 == 3,
            return_dict_in_generate=True, output_scores=True, output_logits=True, eos_token_id=(), pad_token_id=0,
            repetition_penalty=1.3, **how,
        ))  # fmt: skip
    assert torch.equal(outputs[0].sequences, outputs[1].sequences) and steps
    for name in ("scores", "logits"):
        torch.testing.assert_close(*(torch.stack(output[name]) for output in outputs), **CLOSE)
    for (text, a), (same, b) in zip(*kept, strict=True):
        assert torch.equal(text, same)
        torch.testing.assert_close(a, b, **CLOSE)


# Reuse.


def test_caches_and_graphs_serve_later_calls(device, steps):
    model = family("llama").to(device)
    one, three = prompt(1, 5).to(device), prompt(3, 8).to(device)
    expected = [generate(model, ids, max_new_tokens=9, disable_compile=True) for ids in (one, three)]
    seen = []
    for ids, wanted in [(one, 0), (three, 1), (one, 0), (three, 1)]:
        with torch.inference_mode(len(seen) % 2 == 1):
            assert torch.equal(generate(model, ids, max_new_tokens=9), expected[wanted])
        assert len(set(steps)) == 1
        seen.append((steps[0], steps[0]._graph))
        steps.clear()
    assert seen[0] == seen[2] and seen[1] == seen[3] and seen[0] != seen[1]
    generate(model, one, max_new_tokens=graphs.BUCKET)
    assert steps[0] is not seen[0][0], "another bucket"
    kept = model.kept_caches.entries
    assert len(kept) == 3
    streams = [generate_iter(model, one, max_new_tokens=9) for _ in range(2)]  # at once: two caches
    for tokens in zip(*streams, strict=True):
        assert torch.equal(*tokens)
    given = generate(model, one, max_new_tokens=9, return_dict_in_generate=True).past_key_values
    assert all(cache is not given for _, cache in model.kept_caches.entries), "it is the caller's now"
    for rows in range(1, 8):
        generate(model, prompt(rows, 3).to(device), max_new_tokens=2)
    assert len(model.kept_caches.entries) == graphs.MAX_KEPT


def test_nothing_stays_alive_or_is_copied(device, steps):
    model = family("llama").to(device)
    generate(model, prompt().to(device), max_new_tokens=3)
    again = copy.deepcopy(model)
    assert not again.kept_caches.entries and len(pickle.dumps(model)) < 10_000_000
    (_, cache), *_ = model.kept_caches.entries
    held = weakref.ref(cache), weakref.ref(cache.steps[1])
    del cache
    steps.clear()
    model.release()
    gc.collect()
    assert [x() for x in held] == [None, None]
    generate(model, prompt().to(device), max_new_tokens=3)
    held = weakref.ref(model), weakref.ref(model.kept_caches.entries[0][1])
    del model
    gc.collect()
    assert [x() for x in held] == [None, None]


def replace_weight(model):
    layer = model.decoder.layers[1].mlp.down_proj
    layer.weight = nn.Parameter(layer.weight.detach().neg(), requires_grad=False)


def write_weight(model):
    with torch.no_grad():
        model.decoder.layers[1].mlp.down_proj.weight.neg_()


def set_adapters(model, on):
    for module in model.modules():
        if hasattr(module, "adapter_on"):
            module.adapter_on = on


CHANGES = {
    "replaced": replace_weight,
    "adapter off": lambda model: set_adapters(model, False),
    "softcap": lambda model: setattr(model.decoder.layers[0].self_attn, "softcap", 0.5),
    "train": lambda model: model.train(),
    "precision": lambda model: model.double(),
    "config": lambda model: setattr(model.config, "final_logit_softcapping", 2.0),
}


@pytest.mark.parametrize("what", [*CHANGES, "written"])
def test_a_change_of_the_model_is_seen(what, device, steps):
    model, ids = family("llama"), prompt(2, 5).to(device)
    add_lora(model, r=4)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0.0, 0.3)
    model.to(device).eval()
    before = assert_same_ids(model, steps, ids)
    (_, cache), *_ = model.kept_caches.entries
    decode = cache.steps[1]
    captured = decode._captured
    CHANGES.get(what, write_weight)(model)
    after = assert_same_ids(model, steps, ids)
    assert torch.equal(before, after) == (what in ("train", "precision", "config"))
    if what != "precision":  # which takes another cache
        assert (decode._captured == captured) == (what == "written")


# Without a graph.


class Other(nn.Linear):
    pass


def own_forward(model):
    attention = model.decoder.layers[0].self_attn
    attention.forward = attention.forward


def own_class(model):
    model.decoder.layers[0].mlp.down_proj.__class__ = Other


def with_dropout(model):
    add_lora(model, r=4, dropout=0.5)
    model.train()


GAPS = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 1, 1]])
OBSTACLES = [
    (lambda m: m.decoder.layers[1].mlp.register_forward_hook(lambda *a: None), {}, "model.layers.1.mlp has a hook"),
    (own_forward, {}, "model.layers.0.self_attn has a hook, or a forward that was replaced"),
    (own_class, {}, "down_proj is a tests.generation.test_graph.Other"),
    (with_dropout, {}, r"draws random numbers in train\(\)"),
    (lambda m: None, dict(attention_mask=GAPS), "attention_mask has gaps between tokens"),
    (lambda m: None, dict(past_key_values=lambda: as_cache(DynamicCache(), 2)), "a cache of transformers"),
]


@pytest.mark.parametrize("change, own, reason", OBSTACLES, ids=[reason for *_, reason in OBSTACLES])
def test_what_the_host_must_run_is_run_by_it_with_one_warning(change, own, reason, steps):
    model, ids = llama(), prompt(2)
    change(model)

    def run(**options):
        torch.manual_seed(3)
        made = {name: value() if callable(value) else value for name, value in own.items()}
        return generate(model, ids, max_new_tokens=6, **made, **options)

    expected = run(disable_compile=True)
    with pytest.warns(UserWarning, match=reason):
        assert torch.equal(run(), expected)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run()
    assert not steps


def test_a_compiled_module_is_an_obstacle():
    model = llama()
    model.decoder.layers[0]._compiled_call_impl = lambda *a: None
    assert "is compiled by torch.compile" in graphs.obstacle_to_capture(model)
