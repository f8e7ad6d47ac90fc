"""Gemma 4 with images against transformers: as a model of text, and with images, every switch of text and tower."""

import contextlib
import json
import warnings

import pytest
import torch
import transformers

import ligermodels
from ligermodels.arch.gemma4 import Gemma4Config
from ligermodels.errors import ConfigError, InputError
from tests.arch import test_gemma4
from tests.arch.gemma4_vl import BOTH_WAYS, FULL, IMAGE, SLIDING, inputs, mask_as_gemma4, tiny, unified
from tests.arch.suite import (
    FIXTURES,
    GRADIENTS,
    LOGITS,
    Suite,
    Tiny,
    check_checkpointing,
    check_gradients,
    check_other_layout,
    read_tensors,
    relative,
    theirs,
    theirs_logits,
    write_checkpoint,
)

SHARED = dict(
    num_hidden_layers=4, layer_types=[SLIDING, FULL] * 2, num_kv_shared_layers=2, use_double_wide_mlp=True,
    num_key_value_heads=1, hidden_size_per_layer_input=10,
)  # fmt: skip
EXPERTS = dict(enable_moe_block=True, num_experts=6, top_k_experts=2, moe_intermediate_size=20, attention_k_eq_v=True)
TINY = {
    "keys_as_values": tiny(
        dict(standardize=True), attention_k_eq_v=True, num_global_key_value_heads=1, final_logit_softcapping=2.5,
        **BOTH_WAYS,
    ),
    "shared_keys": tiny(dict(use_clipped_linears=True), **SHARED),
    "shared_keys_both_ways": tiny(dict(use_clipped_linears=True, num_key_value_heads=1), **BOTH_WAYS, **SHARED),
    "experts": tiny(dict(standardize=True, hidden_activation="gelu"), **EXPERTS, **BOTH_WAYS),
    "window_shorter_than_an_image": tiny(
        dict(pooling_kernel_size=2, rms_norm_eps=0.05), sliding_window=3, tie_word_embeddings=False, **BOTH_WAYS
    ),
}  # fmt: skip
UNIFIED = {
    "keys_as_values": unified(attention_k_eq_v=True, num_global_key_value_heads=1, final_logit_softcapping=2.5),
    "window_shorter_than_an_image": unified(dict(rms_norm_eps=0.05), sliding_window=3, tie_word_embeddings=False),
    "causal": unified(use_bidirectional_attention=None, num_kv_shared_layers=2, num_hidden_layers=4,
                      layer_types=[SLIDING, FULL] * 2),
}  # fmt: skip
CASES = {
    None: [[3, ("image", 2, 3), 5, ("image", 1, 2), 2]],
    "left": [[("image", 1, 2), 4], [2, ("image", 2, 2), 5, ("image", 2, 1), 4]],
    "right": [[3, ("image", 2, 2), 4], [2, ("image", 2, 2), 5, ("image", 2, 2), 4], [6]],
}
"""The side of the padding -> rows. In the last one all images are of one size."""


def refused(when, words):
    return pytest.raises(InputError, match=words) if when else contextlib.nullcontext()


class TestText(Suite):
    arch = ligermodels.Gemma4VL
    TINY = TINY
    ALSO = ("shared_keys",)

    def earlier_generation(self, config):
        text = test_gemma4.TestGemma4().earlier_generation(config["text_config"])
        rope = config["vision_config"]["rope_parameters"] | {"rope_type": "default"}  # as released files have it
        return {**config, "text_config": text, "vision_config": config["vision_config"] | {"rope_parameters": rope}}

    def shallow(self, tiny):
        text = {**tiny["text_config"], "num_hidden_layers": 1, "layer_types": [FULL], "num_kv_shared_layers": 0}
        return {**tiny, "text_config": text}

    def training_batch(self, tiny, seed=0):
        batch = inputs([[3, ("image", 1, 2), 2]], tiny, seed=seed)
        return {**batch, "labels": batch["input_ids"]}

    @pytest.mark.gpu
    def test_a_training_step_passes_the_sync_checker_is_captured_and_compiles(self, model, tiny):
        """Of text: with images the host reads their sizes."""
        ids = torch.randint(3, 90, (1, 10))
        self.training_batch = lambda tiny: dict(input_ids=ids, labels=ids)
        super().test_a_training_step_passes_the_sync_checker_is_captured_and_compiles(model, tiny)

    def test_blocks_run_one_by_one_as_calibration_runs_them(self, hf, model, ids):
        config = model.config
        with refused(config.hidden_size_per_layer_input or config.num_kv_shared_layers, "runs in its model, not alone"):
            super().test_blocks_run_one_by_one_as_calibration_runs_them(hf, model, ids)

    def test_embeddings_stand_for_ids(self, model, ids):
        with refused(model.config.hidden_size_per_layer_input, "looks ids up in a second table; pass input_ids"):
            super().test_embeddings_stand_for_ids(model, ids)

    test_real_configurations = None  # see test_exact_number_of_parameters

    def test_the_whole_model_compiles_without_a_graph_break(self, first):
        """Of text, as in the other models with images."""
        model = self.arch.from_config(self.shallow(first), dtype=torch.float32, seed=0)
        ids = torch.randint(3, 90, (2, 24))
        torch.compiler.reset()
        compiled = torch.compile(model, fullgraph=True, backend="eager")
        torch.testing.assert_close(compiled(ids, labels=ids).loss, model(ids, labels=ids).loss)

    def test_defaults_are_those_of_transformers(self):
        model_type = self.arch.config_class.model_type
        given = dict(model_type=model_type, text_config={}, vision_config={"patch_size": 8})
        ours, expected = self.arch.config_class.from_hf(given), transformers.AutoConfig.for_model(**given)
        expected.text_config.allow_global_per_layer_attribute_access = True
        saved = ours.to_hf()
        assert saved["tie_word_embeddings"] and ours.ropes == Gemma4Config.from_hf({"model_type": "gemma4_text"}).ropes
        for part in ("text_config", "vision_config"):
            wanted = getattr(expected, part)
            for name, value in saved[part].items():
                assert getattr(wanted, name, value) == value or name in ("dtype", "torch_dtype"), name
        assert [getattr(expected, name) for name in ours.root_fields] == [saved[name] for name in ours.root_fields]


class TestTextOfUnified(TestText):
    arch = ligermodels.Gemma4Unified
    TINY = UNIFIED
    ALSO = ()

    @pytest.fixture(autouse=True)
    def _masks(self, monkeypatch):
        mask_as_gemma4(monkeypatch)

    def named_on_disk(self, tensors):
        return on_disk(tensors)

    def earlier_generation(self, config):
        text = test_gemma4.TestGemma4().earlier_generation(config["text_config"])
        return {**config, "text_config": text}


def on_disk(tensors):
    """By transformers' names in memory -> by those of released files; of gemma4 they are the same."""
    projection = "model.embed_vision.multimodal_embedder.embedding_projection.weight"
    if projection not in tensors:
        return tensors
    named = {name.replace("embed_vision", "vision_embedder"): x for name, x in tensors.items() if name != projection}
    return {**named, "model.embed_vision.embedding_projection.weight": tensors[projection]}


class TestImages(Tiny):
    arch = ligermodels.Gemma4VL
    TINY = TINY
    ALSO = tuple(TINY)

    def test_logits_loss_and_every_gradient(self, hf, model, tiny):
        for pad, rows in CASES.items():
            # A text that tips no softmax: with some, transformers' gradients are 5e-4 off those in fp64, and ours 2e-4.
            batch = inputs(rows, tiny, pad, seed=3)
            tokens = batch.get("attention_mask", torch.ones_like(batch["input_ids"])).bool()
            labels = batch["input_ids"].masked_fill(~tokens | (batch["input_ids"] == IMAGE), -100)
            labels[torch.arange(len(labels)), tokens.int().argmax(1)] = -100
            expected, output = hf(**batch, labels=labels), model(**batch, labels=labels, return_logits=True)
            assert relative(output.logits[tokens], expected.logits[tokens]) < LOGITS
            assert abs(output.loss - expected.loss) < LOGITS * expected.loss
            hf.zero_grad()
            model.zero_grad()
            expected.loss.backward()
            model(**batch, labels=labels).loss.backward()
            check_gradients(hf, model, on_disk, allowed=3 * GRADIENTS)  # 2.2 on a CPU with AMX

    def test_greedy_tokens(self, hf, model, tiny):
        for rows in (CASES[None], CASES["left"], CASES["right"]):
            batch = inputs(rows, tiny, "left")
            expected = hf.generate(**batch, max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0)
            assert torch.equal(model.generate(**batch, max_new_tokens=12, eos_token_id=[]), expected)

    def test_an_image_after_a_cache_and_what_does_not_fit(self, model, tiny):
        rows = [[3, ("image", 2, 3), 2], [4, ("image", 1, 2), 2]]
        whole = inputs([rows[0] + rows[1]], tiny)
        first, length = len(inputs(rows[:1], tiny)["input_ids"][0]), whole["input_ids"].shape[1]
        cache, ids = model.new_cache(1, length), whole["input_ids"]
        pixels, places = whole["pixel_values"], whole["image_position_ids"]
        images = [dict(pixel_values=pixels[i : i + 1], image_position_ids=places[i : i + 1]) for i in (0, 1)]
        parts = [model(ids[:, :first], **images[0], past_key_values=cache).logits]
        with pytest.raises(InputError, match=r"image_token_id 93, and the images of this call make 0"):
            model(ids[:, first:], past_key_values=cache)
        parts.append(model(ids[:, first:], **images[1], past_key_values=cache).logits)
        assert relative(torch.cat(parts, 1), model(**whole).logits) < LOGITS
        assert model(torch.tensor([[IMAGE]]), past_key_values=cache).logits.isfinite().all()
        for changes, words in (
            (dict(pixel_values=pixels[..., :-1]), r"expected \[images, patches, "),
            (dict(pixel_values=pixels[:1]), r"expected \[images, patches, "),
            (dict(pixel_values=None), "pixel_values and image_position_ids go together"),
            (dict(image_position_ids=places.flip(-1)), "image_position_ids of image 0 are not those of a grid"),
            (dict(image_position_ids=places.clamp(min=0)), "image_position_ids of image 0 are not those of a grid"),
            (dict(image_position_ids=places.clamp(max=0)), "image_position_ids of image 0 are not those of a grid"),
            (dict(pixel_values_videos=pixels), "pixel_values_videos: videos are not supported"),
            (dict(input_features=pixels), "input_features: audio is not supported"),
            (dict(input_ids=ids.masked_fill(ids == 5, 94)), None),
        ):  # fmt: skip
            if words:
                with pytest.raises(InputError, match=words):
                    model(**{**whole, **changes})
        ids[0, 0] = 95
        with pytest.raises(InputError, match=r"1 tokens with the audio_token_id 95, and the audios of this call make"):
            model(**whole)
        with pytest.raises(InputError, match="images need input_ids"):
            model(inputs_embeds=model.get_input_embeddings()(ids), **images[0])

    def test_packed_rows_equal_separate_ones(self, model, tiny):
        rows = [3, ("image", 2, 2), 4], [("image", 1, 3), 4], [4], [("image", 2, 1)]
        parts = [inputs([row], tiny, seed=n) for n, row in enumerate(rows)]
        ids = torch.cat([part["input_ids"] for part in parts], 1)
        some = [part for part in parts if "pixel_values" in part]
        most = max(part["pixel_values"].shape[1] for part in some)
        fill = lambda x, value: torch.nn.functional.pad(x, (0, 0, 0, most - x.shape[1]), value=value)  # noqa: E731
        images = dict(
            pixel_values=torch.cat([fill(part["pixel_values"], 0) for part in some]),
            image_position_ids=torch.cat([fill(part["image_position_ids"], -1) for part in some]),
        )
        bounds = torch.tensor([0, *(part["input_ids"].shape[1] for part in parts)]).cumsum(0, dtype=torch.int32)
        expected = torch.cat([model(**part).logits for part in parts], 1)
        assert relative(model(ids, **images, cu_seqlens=bounds).logits, expected) < LOGITS
        in_two_rows = model(ids.view(2, -1), **images, cu_seqlens=bounds).logits  # the second image goes on in the next
        assert relative(in_two_rows.view_as(expected), expected) < LOGITS
        positions = torch.cat([torch.arange(part["input_ids"].shape[1]) for part in parts])[None]
        assert relative(model(ids, **images, position_ids=positions).logits, expected) < LOGITS

    @pytest.mark.parametrize("recompute", ["block", "mlp"])
    def test_checkpointing_gives_the_same_gradients_and_saves_less(self, recompute, model, tiny):
        tower, batch = model.model.vision_tower, inputs(CASES["right"], tiny, "right")
        batch["labels"] = batch["input_ids"]
        check_checkpointing(model, tower, tower.encoder["layers"], batch, recompute)

    def test_saved_with_its_buffers(self, model, folder, tiny, tmp_path):
        batch = inputs(CASES[None], tiny)
        model.save_pretrained(tmp_path / "again")
        found, expected = (theirs_logits(theirs(place), **batch) for place in (tmp_path / "again", folder))
        assert relative(found, expected) < 1e-6  # experts are not summed in one order
        config = json.loads((tmp_path / "again" / "config.json").read_text())
        assert (
            transformers.AutoConfig.for_model(**config).to_dict()["vision_config"].items()
            >= {name: value for name, value in tiny["vision_config"].items() if name != "model_type"}.items()
        )


class TestImagesOfUnified(TestImages):
    arch = ligermodels.Gemma4Unified
    TINY = UNIFIED
    ALSO = tuple(UNIFIED)
    test_checkpointing_gives_the_same_gradients_and_saves_less = None  # there is no tower

    @pytest.fixture(autouse=True)
    def _masks(self, monkeypatch):
        mask_as_gemma4(monkeypatch)

    def test_the_names_in_memory_of_transformers_load_too(self, model, folder, tiny, tmp_path):
        tensors = read_tensors(folder)
        projection = tensors.pop("model.embed_vision.embedding_projection.weight")
        tensors = {name.replace("vision_embedder", "embed_vision"): x for name, x in tensors.items()}
        tensors["model.embed_vision.multimodal_embedder.embedding_projection.weight"] = projection
        check_other_layout(model, folder, tensors, inputs(CASES[None], tiny), tmp_path / "again")


SMALL = dict(use_clipped_linears=True)
LARGE = dict(
    hidden_size=1152, intermediate_size=4304, num_hidden_layers=27, num_attention_heads=16, num_key_value_heads=16,
    head_dim=72, standardize=True,
)  # fmt: skip


@pytest.mark.parametrize(("name", "vision", "count"), [
    ("gemma-4-E2B", SMALL, 4_797_113_600), ("gemma-4-E4B", SMALL, 7_632_344_064),
    ("gemma-4-26B-A4B", LARGE, 25_805_933_872), ("gemma-4-31B", LARGE, 31_273_086_512),
])  # fmt: skip
def test_exact_number_of_parameters(name, vision, count):
    """Without what reads audio; a config of a released model is read without a warning otherwise."""
    text = json.loads((FIXTURES / f"{name}.json").read_text())
    rope = {"rope_type": "default", "rope_theta": 100.0}
    vision = {"model_type": "gemma4_vision", "rope_parameters": rope, "default_output_length": 280, **vision}
    config = dict(model_type="gemma4", text_config=text, vision_config=vision, dtype="bfloat16", eoa_token_id=258883,
                  vision_soft_tokens_per_image=280)  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        read = ligermodels.Gemma4VL.config_class.from_hf(config)
    model = ligermodels.Gemma4VL.from_config(read, device="meta")
    assert model.num_parameters() == count and model.dtype == torch.bfloat16
    assert read == type(read).from_hf(json.loads(json.dumps(read.to_hf())))


def test_what_reads_audio_is_left_out(tmp_path):
    """Of a checkpoint of transformers with an audio tower."""
    audio = dict(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, subsampling_conv_channels=[4, 4])
    config = {**TINY["shared_keys"], "audio_config": {**audio, "output_proj_dims": 12}}
    write_checkpoint(config, tmp_path / "theirs")
    hf, batch = theirs(tmp_path / "theirs"), inputs(CASES[None], config)
    with pytest.warns(UserWarning, match="gemma4: audio is not read: what reads it is left out, here and in"):
        model = ligermodels.load(tmp_path / "theirs", progress=False)
    assert relative(model(**batch).logits, theirs_logits(hf, **batch)) < LOGITS
    model.save_pretrained(tmp_path / "ours")
    assert not any("audio" in name for name in read_tensors(tmp_path / "ours"))
    assert json.loads((tmp_path / "ours" / "config.json").read_text()).get("audio_config") is None
    assert relative(theirs_logits(theirs(tmp_path / "ours"), **batch), theirs_logits(hf, **batch)) < 1e-6


def test_the_text_of_a_model_that_reads_images(tmp_path):
    write_checkpoint(TINY["shared_keys"], tmp_path / "whole")
    model, ids = ligermodels.load(tmp_path / "whole", progress=False), torch.randint(3, 90, (2, 9))
    with pytest.warns(UserWarning, match="gemma4: only the text model is read: what reads images and audio is left"):
        text = ligermodels.load(tmp_path / "whole", text_only=True, progress=False)
    assert type(text) is ligermodels.Gemma4 and relative(text(ids).logits, model(ids).logits) < LOGITS


@pytest.mark.parametrize(("build", "changes", "words"), [
    (tiny, dict(vision=dict(head_dim=6)), "vision_config: head_dim=6 must be a multiple of 4"),
    (tiny, dict(vision=dict(num_key_value_heads=3)), "vision_config: num_key_value_heads=3 must divide"),
    (tiny, dict(vision=dict(attention_bias=True)), "vision_config: attention_bias=True is not supported"),
    (tiny, dict(vision=dict(hidden_activation="relu")), "vision_config: hidden_activation='relu' is not supported"),
    (tiny, dict(vision=dict(rope_parameters={"rope_type": "yarn", "rope_theta": 1.0})), "vision_config: rope_param"),
    (tiny, dict(root=dict(image_token_id=94)), "image_token_id=94 stands for videos or audio, too"),
    (tiny, dict(root=dict(image_token_id=None)), "image_token_id"),
    (tiny, dict(root=dict(vision_config=None)), "gemma4: there is no vision_config"),
    (tiny, dict(use_bidirectional_attention="all"), "use_bidirectional_attention='all' is not supported"),
    (tiny, dict(num_kv_shared_layers=2), "num_kv_shared_layers=2 leaves blocks no block of their kind before them"),
    (unified, dict(enable_moe_block=True, num_experts=2, top_k_experts=1, moe_intermediate_size=8),
     "enable_moe_block=True is not supported: gemma4_unified has neither"),
    (unified, dict(vision=dict(output_proj_dims=8)), "vision_config: output_proj_dims=8 must be mm_embed_dim 20"),
    (unified, dict(vision=dict(model_patch_size=48)), "vision_config: patch_size=2 and pooling_kernel_size make 6"),
])  # fmt: skip
def test_a_config_that_contradicts_itself_is_refused(build, changes, words):
    config = build(**changes)
    with pytest.raises(ConfigError, match=words):
        ligermodels.ARCHS[config["model_type"]].config_class.from_hf(config)
