"""Llama-3.2-Vision against transformers: text alone, images of every shape, masks, caches, both layouts."""

import json

import pytest
import torch
import transformers

from ligermodels.arch.config import KNOWN_WITHOUT_EFFECT
from ligermodels.arch.llama_vision import LlamaVision, LlamaVisionConfig
from ligermodels.errors import InputError
from tests.arch.llama_vision import images, placements, tiny
from tests.arch.suite import (
    GRADIENTS,
    LLAMA3,
    LOGITS,
    Suite,
    Tiny,
    check_checkpointing,
    check_compiled,
    check_gradients,
    check_other_layout,
    relative,
    rope,
    theirs,
    theirs_logits,
)

TINY = {
    "grouped": tiny(),
    "plain": tiny(num_key_value_heads=4, vision=dict(num_global_layers=1)),
    "one_key_head_llama3": tiny(num_key_value_heads=1, rope_parameters=LLAMA3),
    "cross_first": tiny(cross_attention_layers=[0, 1, 3], rms_norm_eps=1e-3, vision=dict(norm_eps=1e-2)),
    "states_out_of_order": tiny(vision=dict(intermediate_layers_indices=[2, 0], vision_output_dim=48)),
    "two_tiles_quick_gelu": tiny(
        vision=dict(hidden_act="quick_gelu", max_num_tiles=2, supported_aspect_ratios=[[1, 1], [1, 2], [2, 1]])
    ),
    "odd_pixels": tiny(vision=dict(image_size=14, num_channels=1), cross_attention_layers=[2]),
    "no_cross_blocks": tiny(cross_attention_layers=[], rope_parameters=rope("linear", factor=2.0)),
}


ON_DISK = (
    ("model.language_model.", "language_model.model."),
    ("model.vision_model.", "vision_model."),
    ("model.multi_modal_projector.", "multi_modal_projector."),
    ("lm_head.", "language_model.lm_head."),
)


def on_disk(tensors):
    """By transformers' names in memory -> by those on disk."""

    def hub(name):
        return next(there + name.removeprefix(here) for here, there in ON_DISK if name.startswith(here))

    return {hub(name): tensor for name, tensor in tensors.items()}


class TestText(Suite):
    """Without images: the cross blocks and the tower are skipped."""

    arch = LlamaVision
    TINY = TINY
    GENERATE = dict(use_cache=False)  # transformers counts the cached tokens in block 0, which may be a cross block
    # Counted by transformers 5.23 on the meta device.
    REAL = {"Llama-3.2-11B-Vision": 10_642_941_475, "Llama-3.2-11B-Vision-Instruct": 10_670_220_835}

    def named_on_disk(self, tensors):
        return on_disk(tensors)

    def earlier_generation(self, config):
        text, vision = dict(config["text_config"]), dict(config["vision_config"])
        for part in (text, vision):  # as transformers 4 writes them
            part |= {name: None for name in KNOWN_WITHOUT_EFFECT - part.keys()} | {"top_k": 50, "is_decoder": False}
        text = super().earlier_generation({"dtype": None, **text, "torch_dtype": None})
        text["torch_dtype"] = vision["torch_dtype"] = "float32"
        root = {key: value for key, value in config.items() if key != "dtype"}
        return {**root, "torch_dtype": config["dtype"], "text_config": text, "vision_config": vision}

    def training_batch(self, tiny, seed=0):
        ids, labels, shown = images(tiny, placements(tiny), seed=seed)
        return dict(input_ids=ids, labels=labels, **shown)

    def comparable_states(self, model, states):
        """transformers leaves out those of the cross blocks."""
        return [state for i, state in enumerate(states) if i not in model.config.cross_attention_layers]

    @pytest.mark.slow
    def test_the_whole_model_compiles_without_a_graph_break(self):
        tower = dict(num_hidden_layers=1, num_global_layers=1, intermediate_layers_indices=[0], vision_output_dim=32)
        config = tiny(num_hidden_layers=2, cross_attention_layers=[1], initializer_range=0.3, vision=tower)
        model = LlamaVision.from_config(config, dtype=torch.float32, seed=0)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.add_(0.5 if name.endswith("gate") else 0)
        ids, labels, shown = images(config, placements(config))
        check_compiled(model, ids, labels, **shown)

    def test_defaults_are_those_of_transformers(self):
        given = {"vocab_size": 100, "hidden_size": 64, "intermediate_size": 8, "num_hidden_layers": 40}
        given |= {"num_attention_heads": 8}
        ours = LlamaVisionConfig.from_hf({"model_type": "mllama", "text_config": given})
        expected = transformers.AutoConfig.for_model("mllama", text_config=given)
        for name in ("num_key_value_heads", "rms_norm_eps", "max_position_embeddings", "hidden_act", "rope_parameters"):
            assert getattr(ours, name) == getattr(expected.text_config, name), name
        for name in ("bos_token_id", "eos_token_id", "pad_token_id", "cross_attention_layers"):
            assert getattr(ours, name) == getattr(expected.text_config, name), name
        text = {**given, "use_cache": False}
        assert LlamaVisionConfig.from_hf({"model_type": "mllama", "text_config": text}).use_cache is False
        theirs_of_the_tower = expected.vision_config.to_dict()
        for name, value in ours.vision_config.to_hf().items():
            assert theirs_of_the_tower[name] == value, name


class TestImages(Tiny):
    arch = LlamaVision
    TINY = {name: TINY[name] for name in TINY if name not in ("plain", "no_cross_blocks")}

    @pytest.fixture
    def batch(self, tiny):
        return images(tiny, placements(tiny))

    def test_logits_loss_and_every_gradient(self, hf, model, batch):
        ids, labels, shown = batch
        expected = hf(ids, labels=labels, **shown)
        output = model(ids, labels=labels, return_logits=True, output_hidden_states=True, **shown)
        assert relative(output.logits, expected.logits) < LOGITS
        assert relative(model(ids).logits, expected.logits) > 0.01, "the images must leave their mark"
        assert abs(output.loss - expected.loss) < LOGITS * expected.loss
        states = hf(ids, output_hidden_states=True, **shown).hidden_states
        assert all(relative(a, b) < LOGITS for a, b in zip(output.hidden_states, states, strict=True))
        model(ids, labels=labels, **shown).loss.backward()
        expected.loss.backward()
        check_gradients(hf, model, on_disk, allowed=2 * GRADIENTS)  # through text and tower
        assert all(parameter.grad.any() for parameter in model.parameters())

    def test_without_a_mask_all_see_all(self, hf, model, batch):
        ids, _, shown = batch
        del shown["cross_attention_mask"]
        assert relative(model(ids, **shown).logits, theirs_logits(hf, ids, **shown)) < LOGITS

    def test_greedy_tokens_batched_and_left_padded(self, hf, model, tiny):
        ids, _, shown = images(tiny, [[(3, 2), (8, 1)], [(0, 0), (7, 2)], [(4, 1)], []], length=12)
        mask = torch.ones_like(ids)
        mask[0, :3] = mask[2, :4] = mask[3, :7] = 0
        # transformers counts the cached tokens in block 0, which must then be none of the cross blocks
        cached = 0 not in tiny["text_config"]["cross_attention_layers"]
        options = dict(do_sample=False, eos_token_id=None, pad_token_id=0, use_cache=cached)
        for options_of_padding in ({}, {"attention_mask": mask}):
            inputs = {**shown, **options_of_padding}
            expected = hf.generate(ids, max_new_tokens=16, **inputs, **options)
            assert torch.equal(model.generate(ids, max_new_tokens=16, eos_token_id=[], **inputs), expected)
        blind = model.generate(ids, max_new_tokens=16, eos_token_id=[], attention_mask=mask)
        assert not torch.equal(blind, expected)

    def test_cached_decoding_equals_the_full_forward(self, model, batch):
        ids, _, shown = batch
        mask = shown.pop("cross_attention_mask")
        full = model(ids, cross_attention_mask=mask, **shown).logits
        cache = model.new_cache(len(ids), 24)
        parts, seen = [], 0
        for length in (13, 3, 1, 1, 1, 1, 4):
            if seen == 0:
                given = {**shown, "cross_attention_mask": mask[:, :length]}
            else:  # of these tokens, of all tokens, or left out
                given = [dict(cross_attention_mask=mask[:, seen : seen + length]), {}][seen % 2]
                given = dict(cross_attention_mask=mask[:, : seen + length]) if seen == 16 else given
            parts.append(model(ids[:, seen : seen + length], past_key_values=cache, **given).logits)
            seen += length
        assert relative(torch.cat(parts, 1), full) < LOGITS

    def test_rows_of_a_cache_move_with_their_images(self, model, batch):
        ids, _, shown = batch
        order = torch.tensor([2, 0, 0])
        cache = model.new_cache(4, 24)
        model(
            ids[:, :20],
            past_key_values=cache,
            **{**shown, "cross_attention_mask": shown["cross_attention_mask"][:, :20]},
        )
        cache.reorder(order)
        moved = model(ids[order, 20:], past_key_values=cache).logits
        assert relative(moved, model(ids, **shown).logits[order, 20:]) < LOGITS
        cache.reset()
        assert torch.equal(model(ids[order], past_key_values=cache).logits, model(ids[order]).logits)

    def test_packed_samples_in_one_row_equal_the_samples(self, model, tiny):
        ids, _, shown = images(tiny, [[(0, 1)], [(0, 2)]], length=12)
        separate = model(ids, **shown).logits
        mask = shown["cross_attention_mask"]
        joined = torch.zeros(1, 24, 2, mask.shape[-1], dtype=torch.long)
        joined[0, :12, 0], joined[0, 12:, 1] = mask[0, :, 0], mask[1, :, 0]
        packed = {name: shown[name].transpose(0, 1) for name in ARGUMENTS}
        bounds = torch.tensor([0, 12, 24], dtype=torch.int32)
        found = model(ids.view(1, -1), cu_seqlens=bounds, cross_attention_mask=joined, **packed).logits
        assert relative(found.view_as(separate), separate) < LOGITS
        with pytest.raises(InputError, match="batch of one row"):
            model(ids, cu_seqlens=bounds, **shown)

    @pytest.mark.parametrize("recompute", ["block", "mlp"])
    def test_checkpointing_of_tower_and_text_gives_the_same_gradients(self, model, batch, recompute):
        ids, labels, shown = batch
        tower = model.model.vision_model
        check_checkpointing(
            model, tower, tower.transformer.layers, dict(input_ids=ids, labels=labels, **shown), recompute
        )

    def test_the_other_layout(self, hf, folder, model, batch, tmp_path):
        ids, _, shown = batch
        tensors = {name: parameter.detach().clone() for name, parameter in hf.named_parameters()}
        check_other_layout(model, folder, tensors, dict(input_ids=ids, **shown), tmp_path / "ours")


ARGUMENTS = ("pixel_values", "aspect_ratio_ids", "aspect_ratio_mask")


@pytest.fixture
def checkpoint(written):
    return written(TINY["grouped"])


@pytest.fixture
def loaded(checkpoint):
    return LlamaVision.from_hub(checkpoint, progress=False)


def shown_logits(model):
    ids, _, shown = images(TINY["grouped"], placements(TINY["grouped"]))
    with torch.no_grad():
        return model(ids, **shown).logits


def test_states_before_the_blocks_are_those_after_the_previous_ones(written, tmp_path):
    """What Meta's code and transformers 4.45 read: the input of block i, which is what 5.23 has for block i - 1."""
    after = tiny(vision=dict(intermediate_layers_indices=[0, 2], vision_output_dim=48))
    folder = written(after)
    expected = shown_logits(theirs(folder))
    config = json.loads((folder / "config.json").read_text())
    config["vision_config"] |= {"intermediate_layers_indices": [1, 3], "intermediate_states": "before"}
    (folder / "config.json").write_text(json.dumps(config))
    model = LlamaVision.from_hub(folder, progress=False)
    assert relative(shown_logits(model), expected) < LOGITS
    model.save_pretrained(tmp_path / "ours")
    again = LlamaVision.from_hub(tmp_path / "ours", progress=False)
    assert again.config == model.config and again.config.vision_config.intermediate_states == "before"


def test_meta_s_rule_leaves_out_the_attention_of_rows_without_an_image(checkpoint, loaded):
    hf = theirs(checkpoint)
    _, _, shown = images(TINY["grouped"], placements(TINY["grouped"]))
    rows = shown["cross_attention_mask"].any(-1).any(-1)
    for layer in hf.model.language_model.layers:
        if hasattr(layer, "cross_attn"):
            layer.cross_attn.register_forward_hook(
                lambda module, args, output: (output[0] * rows[..., None], output[1])
            )
    loaded.config.zero_masked_attention = True
    expected = shown_logits(hf)
    assert relative(shown_logits(loaded), expected) < LOGITS
    saved = LlamaVisionConfig.from_hf(loaded.config.to_hf())
    assert saved == loaded.config and saved.zero_masked_attention
    loaded.config.zero_masked_attention = False
    assert relative(shown_logits(loaded), expected) > 100 * LOGITS


def test_arguments_that_do_not_fit_are_named(loaded):
    ids, _, shown = images(TINY["grouped"], [[(0, 1)], []], length=5)
    with pytest.raises(InputError, match="need their aspect_ratio_ids and aspect_ratio_mask"):
        loaded(ids, pixel_values=shown["pixel_values"])
    for name, value, words in [
        ("pixel_values", shown["pixel_values"][0], "expected .batch, images, 4, 3, 8, 8."),
        ("aspect_ratio_mask", shown["aspect_ratio_mask"][:, :, :2], "aspect_ratio_mask .2, 1, 2."),
        ("cross_attention_mask", shown["cross_attention_mask"][:, :3], "expected .2, 5, 1, 4."),
        ("cross_attention_mask", shown["cross_attention_mask"].repeat(1, 1, 2, 1), "all images so far"),
    ]:
        with pytest.raises(InputError, match=words):
            loaded(ids, **{**shown, name: value})
