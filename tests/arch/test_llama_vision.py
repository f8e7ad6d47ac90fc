"""Llama-3.2-Vision against transformers: text alone, images of every shape, masks, caches, both layouts."""

import copy
import json
import shutil
import warnings

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from transformers.models.mllama import modeling_mllama
from transformers.models.mllama.processing_mllama import (
    convert_sparse_cross_attention_mask_to_dense,
    get_cross_attention_token_mask,
)

from ligermodels.arch import llama_vision, llama_vision_tower
from ligermodels.arch.llama_vision import LlamaVision, LlamaVisionConfig, cross_mask
from ligermodels.arch.llama_vision_tower import GENERIC, tower_padding
from ligermodels.checkpoint import weights
from ligermodels.errors import ConfigError, InputError
from ligermodels.layers import Batch
from tests.arch import suite
from tests.arch.suite import FIXTURES, GRADIENTS, LOGITS, Suite, read_tensors, relative, saved_bytes, theirs_logits

VOCAB, IMAGE = 97, 97
RATIOS = [[1, 1], [1, 2], [1, 3], [1, 4], [2, 1], [2, 2], [3, 1], [4, 1]]


def tiny(vision=(), rope_parameters=None, **text):
    """A tile has 4 patches of 4 x 4 pixels and the class token."""
    base = dict(
        model_type="mllama_text_model",
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=44,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        cross_attention_layers=[1, 3],
        max_position_embeddings=128,
        rope_parameters=rope_parameters or rope("default"),
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    tower = dict(
        model_type="mllama_vision_model",
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=4,
        num_global_layers=2,
        attention_heads=2,
        image_size=8,
        patch_size=4,
        intermediate_layers_indices=[0, 2, 3],
        vision_output_dim=64,
    )
    return dict(
        model_type="mllama",
        text_config={**base, **text},
        vision_config={**tower, **dict(vision)},
        image_token_index=IMAGE,
    )


def rope(rope_type, **values):
    return {"rope_type": rope_type, "rope_theta": 500.0, **values}


LLAMA3 = rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=16)
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


def write_checkpoint(config, folder, seed=0):
    """Random weights; those of norms around 1, gates far from 0."""
    torch.manual_seed(seed)
    model = transformers.AutoModelForImageTextToText.from_config(
        transformers.AutoConfig.for_model(**config), dtype=torch.float32
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(float("norm" in name and parameter.dim() == 1), 0.3)
            if "gate" in name and "proj" not in name:
                parameter.copy_(parameter.sign() * (0.3 + parameter.abs()))
    model.save_pretrained(folder)
    return folder


def theirs(folder):
    return transformers.AutoModelForImageTextToText.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )


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


def compare_gradients(hf, model, allowed=GRADIENTS):
    """None and zero are one: which of them an unused parameter gets is for the framework to say."""
    wanted = on_disk({name: p.grad for name, p in hf.named_parameters()})
    parameters = dict(model.named_parameters())
    regions = weights.regions(model, LlamaVision.DISK_NAMES)
    assert {region.source for region in regions} == set(wanted)
    used = 0
    for region in regions:
        grad, expected = parameters[region.param].grad, wanted[region.source]
        if expected is None or not expected.any():
            assert grad is None or not grad[region.index].any(), region.source
        else:
            found = relative(grad[region.index], expected)
            assert found < allowed, f"{region.source}: relative error {found:.1e}"
            used += 1
    return used


def images(config, placed, length=24, seed=3):
    """ids with an image token at each place, the images' arguments, and labels.

    placed: for each row a list of (place, index of the aspect ratio).
    """
    generator = torch.Generator().manual_seed(seed)
    text, vision = config["text_config"], config["vision_config"]
    ratios, tiles = vision.get("supported_aspect_ratios", RATIOS), vision.get("max_num_tiles", 4)
    side, most = vision["image_size"], max(1, *(len(row) for row in placed))
    ids = torch.randint(3, text["vocab_size"], (len(placed), length), generator=generator)
    shape = (len(placed), most, tiles, vision.get("num_channels", 3), side, side)
    pixels = torch.zeros(shape)
    ratio_ids = torch.zeros(len(placed), most, dtype=torch.long)
    there = torch.zeros(len(placed), most, tiles, dtype=torch.long)
    there[..., 0] = 1
    counts = []
    for row, found in enumerate(placed):
        counts.append([ratios[kind][0] * ratios[kind][1] for _, kind in found])
        for image, ((place, kind), count) in enumerate(zip(found, counts[-1], strict=True)):
            ids[row, place] = IMAGE
            pixels[row, image, :count] = torch.randn(shape[2:], generator=generator)[:count]
            ratio_ids[row, image] = 1 + kind
            there[row, image, :count] = 1
    spans = [get_cross_attention_token_mask(row, IMAGE) for row in ids.tolist()]
    mask = torch.from_numpy(convert_sparse_cross_attention_mask_to_dense(spans, counts, tiles, length))
    mask = torch.nn.functional.pad(mask, (0, 0, 0, most - mask.shape[2]))
    return ids, ids.masked_fill(ids == IMAGE, -100), dict(
        pixel_values=pixels, aspect_ratio_ids=ratio_ids, aspect_ratio_mask=there, cross_attention_mask=mask
    )  # fmt: skip


def placements(config):
    """Every aspect ratio once; text before the first image, neighbours, rows with fewer and with none."""
    kinds = len(config["vision_config"].get("supported_aspect_ratios", RATIOS))
    kinds = list(range(kinds)) * 2
    return [[(0, kinds[0]), (1, kinds[1]), (9, kinds[2])], [(4, kinds[3]), (11, kinds[4])], [(7, kinds[5])], []]


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    return {}, tmp_path_factory.mktemp("written")


def copied(tiny, written, tmp_path):
    """The checkpoint of this configuration, free to be changed."""
    made, root = written
    key = json.dumps(tiny)
    if key not in made:
        made[key] = write_checkpoint(tiny, root / str(len(made)))
    return shutil.copytree(made[key], tmp_path / "hf")


class WithPictures(torch.nn.Module):
    """A model that is shown the same images in every call."""

    def __init__(self, model, shown):
        super().__init__()
        self.inner, self.shown = model, shown

    def forward(self, ids, **inputs):
        return self.inner(ids, **self.shown, **inputs)


class TestText(Suite):
    """Without images: the cross blocks and the tower are as if they were not there."""

    arch = LlamaVision
    TINY = TINY
    # Counted by transformers 5.23 on the meta device.
    GENERATE = dict(use_cache=False)  # transformers counts the cached tokens in block 0, which may be a cross block
    REAL = {"Llama-3.2-11B-Vision": 10_642_941_475, "Llama-3.2-11B-Vision-Instruct": 10_670_220_835}

    @pytest.fixture(autouse=True)
    def _of_pictures(self, monkeypatch):
        monkeypatch.setattr(suite, "theirs", theirs)

    @pytest.fixture
    def folder(self, tiny, written, tmp_path):
        return copied(tiny, written, tmp_path)

    @pytest.fixture
    def hf(self, folder):
        return theirs(folder)

    @pytest.fixture
    def ids(self):
        return torch.randint(3, VOCAB, (2, 24))

    def named_on_disk(self, tensors):
        return on_disk(tensors)

    def compare_gradients(self, hf, model):
        cross, gates = len(model.config.cross_attention_layers), 0
        used = compare_gradients(hf, model)
        assert used == 3 + 9 * (len(model.decoder.layers) - cross) + gates

    def earlier_generation(self, config):
        text, vision = dict(config["text_config"]), dict(config["vision_config"])
        for part in (text, vision):  # as transformers 4 fills them
            part |= {name: None for name in GENERIC - part.keys()} | {"top_k": 50, "is_decoder": False}
        text = super().earlier_generation({"dtype": None, **text, "torch_dtype": None})
        text["torch_dtype"] = vision["torch_dtype"] = "float32"
        root = {key: value for key, value in config.items() if key != "dtype"}
        return {**root, "torch_dtype": config["dtype"], "text_config": text, "vision_config": vision}

    def test_the_embedding_leaves_the_row_of_the_pad_token_alone(self, folder, ids):
        config = json.loads((folder / "config.json").read_text())
        config["text_config"]["pad_token_id"] = ids[0, 3].item()
        (folder / "config.json").write_text(json.dumps(config))
        hf, model = theirs(folder), self.arch.from_hub(folder, progress=False)
        hf(ids, labels=ids).loss.backward()
        model(ids, labels=ids).loss.backward()
        self.compare_gradients(hf, model)
        assert not model.decoder.embed_tokens.weight.grad[ids[0, 3]].any()

    def test_a_cast_model_is_saved_and_loaded_as_what_it_is(self, folder, model, tmp_path):
        model.to(torch.float16).save_pretrained(tmp_path / "half")
        again = self.arch.from_hub(tmp_path / "half", progress=False)
        assert again.dtype == torch.float16
        config = json.loads((tmp_path / "half" / "config.json").read_text())
        assert config["dtype"] == config["text_config"]["dtype"] == "float16"
        widened = self.arch.from_hub(folder, dtype=torch.float64, progress=False).state_dict()
        exact = read_tensors(folder)["vision_model.class_embedding"].double()
        assert torch.equal(widened["model.vision_model.class_embedding"], exact)

    def test_wrong_weights_and_a_wrong_base_are_seen(self, hf, model, ids):
        expected = theirs_logits(hf, ids)
        other = copy.deepcopy(model.config)
        other.rope_parameters["rope_theta"] *= 1.1
        wrong = self.arch.from_config(other, dtype=torch.float32)
        wrong.load_state_dict(model.state_dict())
        assert relative(wrong(ids).logits, expected) > 100 * LOGITS
        own = next(layer for layer in model.decoder.layers if hasattr(layer, "self_attn"))
        q = own.self_attn.q_proj.weight[: model.config.head_dim]
        with torch.no_grad():
            q.copy_(q.view(2, -1, q.shape[1]).transpose(0, 1).reshape(q.shape))
        assert relative(model(ids).logits, expected) > 100 * LOGITS

    def test_logits_beside_the_loss_hidden_states_and_the_last_positions(self, hf, model, ids):
        output = model(ids, labels=ids, return_logits=True, output_hidden_states=True)
        assert abs(output.loss - model(ids, labels=ids).loss) < LOGITS * output.loss
        expected = hf(ids, output_hidden_states=True).hidden_states
        cross = model.config.cross_attention_layers
        found = [
            state for i, state in enumerate(output.hidden_states) if i not in cross
        ]  # transformers' leave them out
        assert all(relative(a, b) < LOGITS for a, b in zip(found, expected, strict=True))
        assert relative(model(ids, logits_to_keep=3).logits, output.logits[:, -3:]) < LOGITS
        embedded = model.get_input_embeddings()(ids)
        assert relative(model(inputs_embeds=embedded).logits, output.logits) < LOGITS

    def test_names_that_trainers_pass(self, model, ids):
        output = model(**model.prepare_inputs_for_generation(ids, use_cache=True))
        assert output.past_key_values.get_seq_length() == 24
        table, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
        assert model.num_parameters(exclude_embeddings=True) == model.num_parameters() - table.numel()
        assert (len(table), len(head)) == (VOCAB + 8, VOCAB)

    @pytest.mark.parametrize("recompute", ["block", "mlp"])
    def test_checkpointing_gives_the_same_gradients_and_keeps_less(self, model, ids, recompute):
        def step():
            model.zero_grad()
            model(ids, labels=ids).loss.backward()

        kept = saved_bytes(step)
        expected = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        model.gradient_checkpointing_enable({"recompute": recompute})
        assert saved_bytes(step) < kept
        found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)
        model.gradient_checkpointing_disable()
        assert saved_bytes(step) == kept

    @pytest.mark.gpu
    def test_bf16_on_a_gpu_is_as_near_to_fp32_as_transformers(self, hf, folder, tiny):
        """Logits with images, and the gradient of the class token: it has been through text, projector and tower."""
        if not tiny["text_config"]["cross_attention_layers"]:
            pytest.skip("images leave no mark")
        ours = self.arch.from_hub(folder, dtype=torch.bfloat16, device="cuda", progress=False)
        eager = theirs(folder).to("cuda", torch.bfloat16)
        errors = []
        for seed in range(15):
            ids, labels, shown = images(tiny, placements(tiny), seed=seed)
            results = []
            for model in (hf, ours, eager):
                place = next(model.parameters()).device
                model.zero_grad()
                given = {name: tensor.to(place) for name, tensor in (shown | dict(labels=labels)).items()}
                output = model(ids.to(place), **given, **(dict(return_logits=True) if model is ours else {}))
                output.loss.backward()
                tower = model.model.vision_model
                results.append([x.detach().double().cpu() for x in (output.logits, tower.class_embedding.grad)])
            errors.append([[(a - b).norm() for a, b in zip(one, results[0], strict=True)] for one in results[1:]])
        actual, allowed = torch.tensor(errors).median(0).values
        assert (actual < torch.tensor([1.25, 1.5]) * allowed).all(), f"{actual} against {allowed} in transformers"

    @pytest.mark.gpu
    def test_a_training_step_passes_the_sync_checker_is_captured_and_compiles(self, model, tiny):
        ids, _, shown = images(tiny, placements(tiny))
        if not tiny["text_config"]["cross_attention_layers"]:
            pytest.skip("no gradient reaches the tower")
        shown = {name: value.cuda() for name, value in shown.items()}
        # The labels of image tokens take the place of their ids, which the head has no logit for.
        ids = ids.clamp(max=VOCAB - 1)
        super().test_a_training_step_passes_the_sync_checker_is_captured_and_compiles(
            WithPictures(model.cuda(), shown), ids
        )


class TestPictures:
    TINY = {name: TINY[name] for name in TINY if name not in ("plain", "no_cross_blocks")}

    @pytest.fixture
    def folder(self, tiny, written, tmp_path):
        return copied(tiny, written, tmp_path)

    @pytest.fixture
    def hf(self, folder):
        return theirs(folder)

    @pytest.fixture
    def model(self, folder):
        return LlamaVision.from_hub(folder, progress=False)

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
        used = compare_gradients(hf, model, allowed=2 * GRADIENTS)  # through both towers
        assert used == len(load_names(model))

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

    def test_a_cache_takes_up_pictures_of_a_later_turn(self, hf, model, tiny):
        ids, _, shown = images(tiny, [[(0, 1), (10, 0)], [(0, 2), (10, 1)]])
        full = model(ids, **shown).logits
        for each in (model, hf) if 0 not in tiny["text_config"]["cross_attention_layers"] else (model,):
            cache = model.new_cache(2, 24) if each is model else transformers.DynamicCache(config=hf.config.text_config)
            first, second = (
                {name: value[:, i : i + 1] for name, value in shown.items() if name != "cross_attention_mask"}
                for i in range(2)
            )
            mask = shown["cross_attention_mask"]
            early = each(ids[:, :10], past_key_values=cache, cross_attention_mask=mask[:, :10, :1], **first).logits
            late = each(ids[:, 10:], past_key_values=cache, cross_attention_mask=mask[:, 10:], **second).logits
            assert relative(torch.cat([early, late], 1), full) < LOGITS
        cache.reset()

    def test_rows_of_a_cache_move_with_their_pictures(self, model, batch):
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
        apart = model(ids, **shown).logits
        mask = shown["cross_attention_mask"]
        joined = torch.zeros(1, 24, 2, mask.shape[-1], dtype=torch.long)
        joined[0, :12, 0], joined[0, 12:, 1] = mask[0, :, 0], mask[1, :, 0]
        packed = {name: shown[name].transpose(0, 1) for name in ARGUMENTS}
        bounds = torch.tensor([0, 12, 24], dtype=torch.int32)
        found = model(ids.view(1, -1), cu_seqlens=bounds, cross_attention_mask=joined, **packed).logits
        assert relative(found.view_as(apart), apart) < LOGITS
        with pytest.raises(InputError, match="batch of one row"):
            model(ids, cu_seqlens=bounds, **shown)

    @pytest.mark.parametrize("recompute", ["block", "mlp"])
    def test_checkpointing_of_tower_and_text_gives_the_same_gradients(self, model, batch, recompute, monkeypatch):
        monkeypatch.setattr("ligermodels.training.offload.SMALLEST", 1)
        ids, labels, shown = batch

        def step():
            model.zero_grad()
            model(ids, labels=labels, **shown).loss.backward()

        kept = saved_bytes(step)
        expected = {name: p.grad.clone() for name, p in model.named_parameters()}
        for offload in (True, False):
            model.gradient_checkpointing_enable({"recompute": recompute, "offload": offload})
            whole = saved_bytes(step)
            assert all(torch.equal(p.grad, expected[name]) for name, p in model.named_parameters())
        # A gate behind the unit of a block keeps what the unit makes: its second run may not end before the unit.
        gated = [block.mlp.recompute for block in model.model.vision_model.global_transformer.layers]
        assert (
            gated == [recompute == "mlp"] * len(gated) and model.model.vision_model.transformer.layers[0].mlp.recompute
        )
        tower = model.model.vision_model.checkpointing
        model.gradient_checkpointing_disable()
        assert saved_bytes(step) == kept
        model.model.vision_model.checkpointing = tower
        tower.prepare(model.model.vision_model.transformer.layers)
        assert whole < saved_bytes(step) < kept  # the tower alone

    def test_a_frozen_tower_keeps_nothing_and_the_rest_has_its_gradients(self, model, batch):
        ids, labels, shown = batch
        model(ids, labels=labels, **shown).loss.backward()
        expected = {
            name: p.grad.clone() for name, p in model.named_parameters() if not name.startswith("model.vision_model.")
        }
        model.zero_grad()
        model.model.vision_model.requires_grad_(False)
        assert not model.model.vision_model(*(shown[name][0] for name in ARGUMENTS)).requires_grad
        model(ids, labels=labels, **shown).loss.backward()
        for name, parameter in model.named_parameters():
            if name in expected:
                assert torch.equal(parameter.grad, expected[name]), name
            else:
                assert parameter.grad is None

    def test_round_trip_and_the_other_layout(self, folder, model, batch, tmp_path):
        ids, _, shown = batch
        model.save_pretrained(tmp_path / "ours")
        before, after = read_tensors(folder), read_tensors(tmp_path / "ours")
        assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
        expected = theirs_logits(theirs(folder), ids, **shown)
        assert torch.equal(theirs_logits(theirs(tmp_path / "ours"), ids, **shown), expected)
        hf = theirs(folder)
        tensors = {name: parameter.detach().clone() for name, parameter in hf.named_parameters()}
        assert tensors.keys().isdisjoint(before) and on_disk(tensors).keys() == before.keys()
        (folder / "model.safetensors").unlink()
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        other = LlamaVision.from_hub(folder, progress=False)
        assert torch.equal(other(ids, **shown).logits, model(ids, **shown).logits)
        other.save_pretrained(tmp_path / "again")
        again = read_tensors(tmp_path / "again")
        assert before.keys() == again.keys() and all(torch.equal(before[name], again[name]) for name in before)


ARGUMENTS = ("pixel_values", "aspect_ratio_ids", "aspect_ratio_mask")


def load_names(model):
    return [region.source for region in weights.regions(model, LlamaVision.DISK_NAMES)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_checkpoint(TINY["grouped"], tmp_path_factory.mktemp("mllama") / "hf")


@pytest.fixture
def loaded(checkpoint):
    return LlamaVision.from_hub(checkpoint, progress=False)


def shown_logits(model, **changes):
    ids, _, shown = images(TINY["grouped"], placements(TINY["grouped"]))
    return model(ids, **{**shown, **changes}).logits


def expected_logits(hf):
    with torch.no_grad():
        return shown_logits(hf)


def stacked(model, monkeypatch):
    """Features of state j at j * C + c: the columns of the projector as that order would have them."""
    vision = model.config.vision_config
    size, n = vision.hidden_size, len(vision.intermediate_layers_indices)
    weight = model.model.multi_modal_projector.weight[:, size:]
    weight.copy_(weight.unflatten(1, (n, size)).transpose(1, 2).flatten(1).clone())


def class_last(model, monkeypatch):
    """The class token behind the patches instead of before them."""
    position, size = model.model.vision_model.gated_positional_embedding, model.config.vision_config.hidden_size
    position.embedding.copy_(position.embedding.roll(1, 0))
    tiles = position.tile_embedding.weight.unflatten(1, (4, -1, size))
    position.tile_embedding.weight.copy_(tiles.roll(1, 2).flatten(1))


WRONG = {
    "features_stacked_and_not_interleaved": stacked,
    "class_token_last": class_last,
    "no_tanh_of_the_gates": lambda model, monkeypatch: monkeypatch.setattr(
        llama_vision, "_opening", lambda gate, rows: gate if rows is None else gate * rows
    ),
    "no_tanh_in_the_tower": lambda model, monkeypatch: [
        gate.copy_(gate.atanh())
        for block in model.model.vision_model.global_transformer.layers
        for gate in (block.gate_attn, block.gate_ffn)
    ],
    "padding_hidden_from_all": lambda model, monkeypatch: monkeypatch.setattr(
        llama_vision_tower, "Batch", lambda padding: Batch(key_mask=~padding)
    ),
    "padding_hidden_from_none": lambda model, monkeypatch: monkeypatch.setattr(
        llama_vision_tower, "Batch", lambda padding: Batch()
    ),
    "filling_left_out": lambda model, monkeypatch: monkeypatch.setattr(
        llama_vision_tower, "tower_padding", lambda mask, length, padded: tower_padding(mask, padded, padded)
    ),
    "states_before_the_blocks": lambda model, monkeypatch: setattr(
        model.model.vision_model.config, "intermediate_states", "before"
    ),
    "rows_without_a_picture_keep_their_unit": lambda model, monkeypatch: monkeypatch.setattr(
        llama_vision, "_opening", lambda gate, rows: gate.tanh()
    ),
    "tanh_gelu": lambda model, monkeypatch: [
        setattr(block.mlp, "activation", "gelu_tanh") for block in model.model.vision_model.transformer.layers
    ],
    "aspect_ratios_off_by_one": lambda model, monkeypatch: [
        table.weight.copy_(table.weight.roll(1, 0))
        for table in (
            model.model.vision_model.pre_tile_positional_embedding.embedding,
            model.model.vision_model.gated_positional_embedding.tile_embedding,
        )
    ],
}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG.keys())
def test_what_is_easily_got_wrong_is_seen(checkpoint, loaded, wrong, monkeypatch):
    expected = expected_logits(theirs(checkpoint))
    with torch.no_grad():
        assert relative(shown_logits(loaded), expected) < LOGITS
        wrong(loaded, monkeypatch)
        assert relative(shown_logits(loaded), expected) > 10 * LOGITS


def test_states_before_the_blocks_are_those_behind_the_ones_before_them(tmp_path):
    """What Meta's code and transformers 4.45 read: the input of block i, which is what 5.23 has for block i - 1."""
    after = tiny(vision=dict(intermediate_layers_indices=[0, 2], vision_output_dim=48))
    folder = write_checkpoint(after, tmp_path / "hf")
    expected = expected_logits(theirs(folder))
    config = json.loads((folder / "config.json").read_text())
    config["vision_config"] |= {"intermediate_layers_indices": [1, 3], "intermediate_states": "before"}
    (folder / "config.json").write_text(json.dumps(config))
    model = LlamaVision.from_hub(folder, progress=False)
    assert relative(shown_logits(model), expected) < LOGITS
    model.save_pretrained(tmp_path / "ours")
    again = LlamaVision.from_hub(tmp_path / "ours", progress=False)
    assert again.config == model.config and again.config.vision_config.intermediate_states == "before"


def test_meta_s_rule_leaves_out_the_attention_of_rows_without_a_picture(checkpoint, loaded):
    hf = theirs(checkpoint)
    _, _, shown = images(TINY["grouped"], placements(TINY["grouped"]))
    rows = shown["cross_attention_mask"].any(-1).any(-1)
    for layer in hf.model.language_model.layers:
        if hasattr(layer, "cross_attn"):
            layer.cross_attn.register_forward_hook(
                lambda module, args, output: (output[0] * rows[..., None], output[1])
            )
    loaded.config.zero_masked_attention = True
    expected = expected_logits(hf)
    assert relative(shown_logits(loaded), expected) < LOGITS
    saved = LlamaVisionConfig.from_hf(loaded.config.to_hf())
    assert saved == loaded.config and saved.zero_masked_attention
    loaded.config.zero_masked_attention = False
    assert relative(shown_logits(loaded), expected) > 100 * LOGITS


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_masks_are_those_of_transformers(data):
    batch, length, images, tiles, patches = (data.draw(st.integers(1, most)) for most in (3, 6, 3, 4, 9))
    density = data.draw(st.sampled_from([0.0, 0.1, 0.5, 0.9, 1.0]))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**32)))
    seen = (torch.rand(batch, length, images, tiles, generator=generator) < density).long()
    mask, rows = cross_mask(seen, patches)
    expected, their_rows = modeling_mllama._prepare_cross_attention_mask(seen, patches, torch.float32)
    assert torch.equal(mask, expected[:, 0] == 0) and torch.equal(rows.float(), their_rows[:, 0])
    there = seen[:, 0, 0]
    padded = patches + data.draw(st.integers(1, 7))
    padding = tower_padding(there, patches, padded)
    expected = modeling_mllama._prepare_aspect_ratio_attention_mask(there, patches, padded, torch.float32)
    assert torch.equal(padding[:, :, None] & padding[:, None], expected[:, 0] != 0)


@pytest.mark.parametrize("name", TestText.REAL)
def test_real_files_of_both_generations_are_read_alike_and_without_a_warning(name):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        earlier, later = (
            LlamaVisionConfig.from_hf(json.loads(path.read_text()))
            for path in (FIXTURES / f"{name}.json", FIXTURES / "v5" / f"{name}.json")
        )
        assert earlier == later
        assert LlamaVisionConfig.from_hf(earlier.to_hf()).to_hf() == earlier.to_hf()
    assert earlier.vision_config.image_size == (560 if "Instruct" in name else 448)


def test_defaults_are_those_of_transformers():
    given = {"vocab_size": 100, "hidden_size": 64, "intermediate_size": 8, "num_hidden_layers": 40}
    given |= {"num_attention_heads": 8}
    ours = LlamaVisionConfig.from_hf({"model_type": "mllama", "text_config": given})
    expected = transformers.AutoConfig.for_model("mllama", text_config=given)
    for name in ("num_key_value_heads", "rms_norm_eps", "max_position_embeddings", "hidden_act", "rope_parameters"):
        assert getattr(ours, name) == getattr(expected.text_config, name), name
    for name in ("bos_token_id", "eos_token_id", "pad_token_id", "cross_attention_layers"):
        assert getattr(ours, name) == getattr(expected.text_config, name), name
    theirs_of_the_tower = expected.vision_config.to_dict()
    for name, value in ours.vision_config.to_hf().items():
        assert theirs_of_the_tower[name] == value, name


def test_what_is_not_ours_in_the_file_is_named_and_saved_where_it_was():
    config = tiny(vision=dict(of_the_tower=1), of_the_text=2) | {"of_the_root": 3}
    with pytest.warns(UserWarning) as found:
        ours = LlamaVisionConfig.from_hf(config)
    assert "of_the_tower" in str(found[0].message) + str(found[1].message)
    assert "of_the_root, of_the_text" in str(found[0].message) + str(found[1].message)
    saved = ours.to_hf()
    assert (saved["of_the_root"], saved["text_config"]["of_the_text"]) == (3, 2)
    assert saved["vision_config"]["of_the_tower"] == 1 and "of_the_text" not in saved


@pytest.mark.parametrize(
    "changes, words",
    [
        (dict(text_config=5), ["text_config", "objects"]),
        (dict(vision_config=[1]), ["vision_config", "objects"]),
        (dict(text_config={}), ["lacks", "vocab_size"]),
        (dict(model_type="llama"), ["model_type 'llama'"]),
        (dict(text=dict(dropout=0.1)), ["dropout=0.1", "not supported"]),
        (dict(text=dict(attention_bias=True)), ["attention_bias=True", "has none"]),
        (dict(text=dict(head_dim=6)), ["head_dim=6"]),
        (dict(text=dict(cross_attention_layers=[4])), ["cross_attention_layers=[4]", "0 to 3"]),
        (dict(text=dict(cross_attention_layers=[0, 1, 2, 3])), ["leave one out"]),
        (dict(text=dict(cross_attention_layers="all")), ["cross_attention_layers"]),
        (dict(text=dict(zero_masked_attention=1)), ["zero_masked_attention"]),
        (dict(vision=dict(hidden_act="silu")), ["hidden_act='silu'", "quick_gelu"]),
        (dict(vision=dict(image_size=[8, 8])), ["image_size=[8, 8]"]),
        (dict(vision=dict(image_size=3)), ["image_size=3"]),
        (dict(vision=dict(num_hidden_layers=True)), ["num_hidden_layers=True"]),
        (dict(vision=dict(attention_heads=3)), ["multiple of the heads"]),
        (dict(vision=dict(norm_eps=0)), ["norm_eps=0"]),
        (dict(vision=dict(max_num_tiles=65)), ["max_num_tiles=65"]),
        (dict(vision=dict(intermediate_layers_indices=[4])), ["0 to 3"]),
        (dict(vision=dict(intermediate_layers_indices=3)), ["intermediate_layers_indices=3"]),
        (dict(vision=dict(supported_aspect_ratios=[[3, 2]])), ["at most 4 tiles"]),
        (dict(vision=dict(vision_output_dim=7680)), ["vision_output_dim=7680", "must be 64"]),
        (dict(vision=dict(intermediate_states="inside")), ["neither after nor before"]),
    ],
    ids=str,
)
def test_what_cannot_work_is_refused(changes, words):
    config = tiny()
    for part in ("text", "vision"):
        config[f"{part}_config"].update(changes.pop(part, {}))
    with pytest.raises(ConfigError) as error:
        LlamaVisionConfig.from_hf({**config, **changes})
    assert all(word in str(error.value) for word in words), str(error.value)


def test_arguments_that_do_not_fit_are_named(loaded):
    ids, _, shown = images(TINY["grouped"], [[(0, 1)], []], length=5)
    with pytest.raises(InputError, match="need their aspect_ratio_ids and aspect_ratio_mask"):
        loaded(ids, pixel_values=shown["pixel_values"])
    for name, value, words in [
        ("pixel_values", shown["pixel_values"][..., :-4], "another model"),
        ("pixel_values", shown["pixel_values"][0], "expected .batch, images, 4, 3, 8, 8."),
        ("aspect_ratio_ids", shown["aspect_ratio_ids"][:1], "aspect_ratio_ids .1, 1."),
        ("aspect_ratio_mask", shown["aspect_ratio_mask"][:, :, :2], "aspect_ratio_mask .2, 1, 2."),
        ("cross_attention_mask", shown["cross_attention_mask"][:, :3], "expected .2, 5, 1, 4."),
        ("cross_attention_mask", shown["cross_attention_mask"].repeat(1, 1, 2, 1), "all images so far"),
    ]:
        with pytest.raises(InputError, match=words):
            loaded(ids, **{**shown, name: value})


def test_random_weights_leave_no_memory_as_it_was():
    config = LlamaVisionConfig.from_hf(TINY["grouped"])
    model = LlamaVision.from_config(config, dtype=torch.float32, device="meta").to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float("nan"))
    model.init_weights(seed=1)
    again = LlamaVision.from_config(config, dtype=torch.float32, seed=1)
    for name, parameter in model.named_parameters():
        assert parameter.isfinite().all() and torch.equal(parameter, again.state_dict()[name]), name
        zero = name.endswith("gate") and "global_layers" not in name
        assert zero == (not parameter.any()) or name.endswith("bias"), name
    hf = transformers.AutoModelForImageTextToText.from_config(transformers.AutoConfig.for_model(**TINY["grouped"]))
    expected = on_disk(dict(hf.named_parameters()))
    for name, tensor in weights.export(model, LlamaVision.DISK_NAMES):
        assert tensor.numel() == 1 or (tensor.std() > 0) == (expected[name].std() > 0), name


def test_the_whole_model_compiles_without_a_graph_break():
    tower = dict(num_hidden_layers=1, num_global_layers=1, intermediate_layers_indices=[0], vision_output_dim=32)
    config = tiny(num_hidden_layers=2, cross_attention_layers=[1], initializer_range=0.3, vision=tower)
    model = LlamaVision.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.add_(0.5 if name.endswith("gate") else 0)
    ids, labels, shown = images(config, placements(config))
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    compiled(ids, labels=labels, **shown).loss.backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    model(ids, labels=labels, **shown).loss.backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, msg=name)
