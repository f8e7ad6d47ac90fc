"""Qwen3-VL, and Qwen3.5 with its tower: as models of text, and with images and videos, against transformers."""

import json
import warnings

import pytest
import torch
import transformers
from hypothesis import given, settings, strategies as st
from transformers.models.qwen3_vl import modeling_qwen3_vl

import ligermodels
from ligermodels.errors import ConfigError
from tests.arch.images import ROWS, ImageSuite, check_positions
from tests.arch.qwen2_vl import IMAGE, VIDEO, image, inputs, load, video
from tests.arch.qwen3_vl import qwen3_5, qwen3_vl, rope
from tests.arch.suite import FIXTURES, GRADIENTS, LOGITS, Suite, relative, theirs

QWEN3_VL = {
    "plain": qwen3_vl(),
    "tied": qwen3_vl(dict(deepstack_visual_indexes=[2], num_position_embeddings=4), tie_word_embeddings=True),
    "mergers_in_another_order": qwen3_vl(dict(deepstack_visual_indexes=[2, 0]), num_key_value_heads=1),
    "biases_and_yarn": qwen3_vl(
        attention_bias=True, rope_parameters=rope("yarn", factor=4.0, original_max_position_embeddings=16)
    ),
    "one_frame_and_channel": qwen3_vl(
        dict(temporal_patch_size=1, in_channels=1, deepstack_visual_indexes=[], hidden_act="gelu")
    ),
    "larger_merge": qwen3_vl(dict(spatial_merge_size=3, num_heads=1), rope_parameters=rope(numbers=(1, 1, 2))),
}
QWEN3_5 = {
    "plain": qwen3_5(),
    "tied": qwen3_5(tie_word_embeddings=True, layer_types=["full_attention", "linear_attention"]),
    "heads_of_72": qwen3_5(dict(hidden_size=72, num_heads=1, depth=2)),
}


class Nested(Suite):
    """Of text: what differs for a config.json with a text_config."""

    GIVEN: dict = {}
    """Fields of the text beside its sizes, where their defaults fit no tower."""

    def earlier_generation(self, config):
        text, vision = dict(config["text_config"]), dict(config["vision_config"])
        parameters = dict(text.pop("rope_parameters"))
        text["rope_theta"] = parameters.pop("rope_theta")
        text["rope_scaling"] = parameters
        del text["dtype"], vision["dtype"], vision["rope_parameters"]
        vision["model_type"] = config["model_type"]
        root = {key: value for key, value in config.items() if key != "dtype"}
        return {**root, "torch_dtype": config["dtype"], "text_config": text, "vision_config": vision}

    def training_batch(self, tiny, seed=0):
        torch.manual_seed(seed)
        batch = inputs([[3, image(2, 2), 2, video(2, 1, 2), 2]], tiny)
        return {**batch, "labels": batch["input_ids"]}

    def shallow(self, tiny):
        text = tiny["text_config"]
        kinds = {"layer_types": text["layer_types"][:1]} if "layer_types" in text else {}
        return {**tiny, "text_config": {**text, "num_hidden_layers": 1, **kinds}}

    def test_a_bf16_model_keeps_what_must_be_fp32(self, hf, folder, ids):
        """The tables of the text and of the tower, and the positions that are read from the tower's table."""
        model = self.arch.from_hub(folder, dtype=torch.bfloat16, progress=False)
        positions, rotary = torch.randint(30000, (3, 2, 50)), hf.model.language_model.rotary_emb
        for ours, expected in zip(model.decoder.rotary_emb(positions), rotary(torch.zeros(1), positions), strict=True):
            assert ours.dtype == torch.float32 and torch.equal(ours, expected[..., : ours.shape[-1]])
        batch, theirs = inputs([[2, image(12, 20), 1]], json.loads((folder / "config.json").read_text())), hf.bfloat16()
        ours = model.model.visual(batch["pixel_values"], [tuple(batch["image_grid_thw"][0].tolist())])[0]
        exact = self.arch.from_hub(folder, progress=False).model.visual
        exact = exact(batch["pixel_values"], [tuple(batch["image_grid_thw"][0].tolist())])[0]
        expected = theirs.model.get_image_features(batch["pixel_values"], batch["image_grid_thw"]).pooler_output[0]
        assert relative(ours, exact) < 1.05 * relative(expected, exact)  # both round in other orders: 0.96 to 1.02

    def test_the_whole_model_compiles_without_a_graph_break(self, first):
        """Of text: with images the number of their tokens is read on the host."""
        model = self.arch.from_config(self.shallow(first), dtype=torch.float32, seed=0)
        model.model.visual.requires_grad_(False)
        ids = torch.randint(3, IMAGE, (2, 24))
        torch.compiler.reset()
        compiled = torch.compile(model, fullgraph=True, backend="eager")
        torch.testing.assert_close(compiled(ids, labels=ids).loss, model(ids, labels=ids).loss)

    def test_defaults_are_those_of_transformers(self, first):
        sizes = ("vocab_size", "num_hidden_layers", "intermediate_size")
        text = {name: first["text_config"][name] for name in sizes} | dict(hidden_size=3584, num_attention_heads=32)
        text |= self.GIVEN
        given = dict(model_type=first["model_type"], text_config=text, vision_config={})
        ours, expected = self.arch.config_class.from_hf(given), transformers.AutoConfig.for_model(**given)
        for name in ours.field_names() - {"rope_parameters", "dtype", "vision_config", "root"}:
            theirs = getattr(expected, name, getattr(expected.text_config, name, None))
            if theirs is not None:
                assert getattr(ours, name) == theirs, name
        theirs = expected.text_config.rope_parameters
        sections = {"mrope_section": list(self.arch.config_class.mrope_section), "mrope_interleaved": True}
        assert ours.rope_parameters == {**theirs, **sections}
        theirs = {"deepstack_visual_indexes": [], **expected.vision_config.to_dict()}
        assert {name: theirs[name] for name in ours.vision_config.to_hf()} == ours.vision_config.to_hf()

    @pytest.mark.gpu
    def test_a_training_step_passes_the_sync_checker_is_captured_and_compiles(self, model, tiny):
        """Of text: with images the host reads the number of their tokens."""
        model.model.visual.requires_grad_(False)
        model.cuda().model.visual.cpu()
        ids = torch.randint(3, 90, (1, 10), device="cuda")
        self.training_batch = lambda tiny: dict(input_ids=ids, labels=ids)
        super().test_a_training_step_passes_the_sync_checker_is_captured_and_compiles(model, tiny)


class TestTextOfQwen3VL(Nested):
    arch = ligermodels.Qwen3VL
    TINY = QWEN3_VL
    REAL = {
        "Qwen3-VL-2B-Instruct": 2_127_532_032,
        "Qwen3-VL-4B-Instruct": 4_437_815_808,
        "Qwen3-VL-8B-Instruct": 8_767_123_696,
        "Qwen3-VL-32B-Instruct": 33_357_390_064,
    }


class TestTextOfQwen3_5(Nested):
    arch = ligermodels.Qwen3_5VL
    TINY = QWEN3_5
    NORM = 0.0
    GAPS_DIFFER = True  # there the state decays in a gap of the mask, and here it stays
    REAL = {}  # every release is of one generation: below


class TestImagesOfQwen3VL(ImageSuite):
    arch = ligermodels.Qwen3VL
    TINY = QWEN3_VL


class TestImagesOfQwen3_5(ImageSuite):
    arch = ligermodels.Qwen3_5VL
    TINY = QWEN3_5
    NORM = 0.0


@settings(max_examples=40, deadline=None, derandomize=True)
@given(ROWS, st.sampled_from(["left", "right"]))
def test_positions_of_any_text(rows, pad):
    """Qwen3.5's are the same."""
    config = ligermodels.Qwen3VLConfig.from_hf(qwen3_vl())
    check_positions(rows, pad, qwen3_vl(), config, modeling_qwen3_vl.Qwen3VLModel)


@pytest.mark.parametrize(("name", "count"), [("Qwen3.5-0.8B", 852_985_920), ("Qwen3.5-9B", 9_409_813_744)])
def test_released_configurations_of_qwen3_5(name, count):
    values = json.loads((FIXTURES / "v5" / f"{name}.json").read_text())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        config = ligermodels.Qwen3_5VLConfig.from_hf(values)
    assert ligermodels.Qwen3_5VLConfig.from_hf(json.loads(json.dumps(config.to_hf()))) == config
    model = ligermodels.Qwen3_5VL.from_config(config, device="meta")
    assert model.num_parameters() == count and model.dtype == torch.bfloat16


@pytest.mark.parametrize("values, count, tower", [
    ((2048, 6144, 24, 8, 2, 16, True, 24, 1024, 4096), 2_213_241_664, 331_416_576),
    ((2560, 9216, 32, 16, 4, 32, True, 24, 1024, 4096), 4_539_265_536, 333_514_240),
    ((5120, 17408, 64, 24, 4, 48, False, 27, 1152, 4304), 27_356_728_560, 460_730_096),
], ids=["2B", "4B", "27B"])  # fmt: skip
def test_exact_number_of_parameters(values, count, tower):
    names = "hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads"
    names = [*names.split(), "linear_num_value_heads", "tie_word_embeddings"]
    text, sizes = dict(zip(names, values[:7], strict=True)), ("depth", "hidden_size", "intermediate_size")
    vision = dict(zip(sizes, values[7:], strict=True)) | {"out_hidden_size": values[0]}
    values = dict(model_type="qwen3_5", text_config={"vocab_size": 248320, **text}, vision_config=vision)
    model = ligermodels.Qwen3_5VL.from_config(ligermodels.Qwen3_5VLConfig.from_hf(values), device="meta")
    assert model.num_parameters() == count
    assert sum(parameter.numel() for parameter in model.model.visual.parameters()) == tower


def changed(make, text=None, vision=None, **root):
    values = make()
    return {**values, "text_config": {**values["text_config"], **(text or {})},
            "vision_config": {**values["vision_config"], **(vision or {})}, **root}  # fmt: skip


PLAIN = {"rope_type": "default", "rope_theta": 5e5, "mrope_section": [2, 1, 1], "mrope_interleaved": False}
REFUSED = {
    "frequencies one after the other": (changed(qwen3_vl, dict(rope_parameters=PLAIN)), "mrope_interleaved is False"),
    "too few frequencies": (
        changed(qwen3_vl, dict(rope_parameters=rope(numbers=(1, 1, 1)))), r"\[1, 1, 1\], expected .* together 4"
    ),
    "a window": (
        changed(qwen3_vl, dict(use_sliding_window=True, sliding_window=4, max_window_layers=0)), "sliding_window=4 is"
    ),
    "a table that is no square": (changed(qwen3_vl, vision=dict(num_position_embeddings=24)), "must be a square"),
    "a block that is not there": (changed(qwen3_vl, vision=dict(deepstack_visual_indexes=[3])), "blocks, 0 to 2"),
    "a block twice": (changed(qwen3_vl, vision=dict(deepstack_visual_indexes=[1, 1])), "different blocks"),
    "tokens of another width": (changed(qwen3_vl, vision=dict(out_hidden_size=48)), "that of vision_config, 48"),
    "heads that cannot rotate": (changed(qwen3_vl, vision=dict(num_heads=8)), "hidden_size=16 must be a multiple of 4"),
    "another rope of the tower": (
        changed(qwen3_vl, vision=dict(rope_parameters=dict(rope_type="mrope", rope_theta=1e4))), "rope_type axial"
    ),
    "DeepStack in Qwen3.5": (changed(qwen3_5, vision=dict(deepstack_visual_indexes=[0])), "qwen3_5: vision_config"),
    "the text of another hybrid": (changed(qwen3_5, dict(model_type="qwen3_next")), "has model_type 'qwen3_next'"),
    "mixtures of experts": (changed(qwen3_5, model_type="qwen3_5_moe"), "model_type 'qwen3_5_moe'"),
    "Qwen3-VL's mixtures": (changed(qwen3_vl, model_type="qwen3_vl_moe"), "model_type 'qwen3_vl_moe'"),
    "text alone": (qwen3_5()["text_config"] | {"model_type": "qwen3_5_text"}, "model_type 'qwen3_5_text'"),
    "no gate": (changed(qwen3_5, dict(attn_output_gate=False)), "attn_output_gate=False is not supported"),
    "quantised": (changed(qwen3_5, quantization_config=dict(quant_method="fp8")), "'fp8'"),
    "no object": (changed(qwen3_vl) | {"text_config": "x"}, "text_config is"),
}  # fmt: skip


@pytest.mark.parametrize(("values", "message"), REFUSED.values(), ids=REFUSED)
def test_what_is_not_computed_is_refused(values, message):
    classes = {"qwen3_5": ligermodels.Qwen3_5VLConfig, "qwen3_vl": ligermodels.Qwen3VLConfig}
    family = next(name for name in classes if values["model_type"].startswith(name))
    with pytest.raises(ConfigError, match=message):
        classes[family].from_hf(values)


def test_load_takes_the_whole_or_the_text(written):
    folder = written(qwen3_5(), norm=0.0)
    whole = ligermodels.load(folder, progress=False)
    with pytest.warns(UserWarning, match=r"the vision tower .* left out, here and in what is saved"):
        text = ligermodels.load(folder, text_only=True, progress=False)
    assert (type(whole), type(text)) == (ligermodels.Qwen3_5VL, ligermodels.Qwen3_5)
    with pytest.raises(ConfigError, match="no class for the text of a qwen3_vl alone"):
        ligermodels.load(written(qwen3_vl()), text_only=True)
    ids = torch.randint(3, IMAGE, (2, 9))
    assert torch.equal(text(ids).logits, whole(ids).logits)
    counts = [sum(parameter.numel() for parameter in model.parameters()) for model in (whole, text, whole.model.visual)]
    assert counts[0] == counts[1] + counts[2]


def test_frames_of_a_video_are_images_to_the_tower_and_the_positions():
    """Their pixels and sizes as those of images give the same tokens."""
    model = ligermodels.Qwen3VL.from_config(qwen3_vl(initializer_range=0.3), dtype=torch.float32, seed=0)
    batch = inputs([[2, video(3, 2, 1), 1]], qwen3_vl())
    frames, (t, h, w) = batch["video_grid_thw"].clone(), batch["video_grid_thw"][0].tolist()
    as_images = dict(
        input_ids=batch["input_ids"].masked_fill(batch["input_ids"] == VIDEO, IMAGE),
        pixel_values=batch["pixel_values_videos"], image_grid_thw=torch.tensor([[1, h, w]] * t),
    )  # fmt: skip
    found, expected = (model(**one, output_hidden_states=True, use_cache=True) for one in (batch, as_images))
    assert torch.equal(batch["video_grid_thw"], frames)
    assert torch.equal(found.past_key_values.values["rope_deltas"], expected.past_key_values.values["rope_deltas"])
    assert relative(found.last_hidden_state, expected.last_hidden_state) < LOGITS


def test_a_hook_on_a_block_sees_the_text_before_states_of_images_are_added(written):
    folder, batch, seen = written(qwen3_vl()), inputs([[3, image(2, 2), 2]], qwen3_vl()), []
    for model in (load(folder), theirs(folder)):
        for layer in model.model.language_model.layers:
            layer.register_forward_hook(lambda layer, inputs, output: seen.append(output))
        model(**batch)
    for ours, expected in zip(seen[:2], seen[2:], strict=True):
        assert relative(ours, expected) < LOGITS


@pytest.mark.parametrize("grids", [[(1, 6, 10), (2, 14, 4), (1, 2, 2)], [(1, 8, 8), (3, 8, 8)]], ids=["mixed", "alike"])
def test_heads_of_72_in_bf16_are_as_near_to_fp32_as_transformers(grids, device, monkeypatch):
    """Tokens, states for DeepStack, and each gradient, of a tower of a quarter of the released width."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)  # of their convolution, by default in tf32
    sizes = dict(depth=2, hidden_size=288, num_heads=4, intermediate_size=1076, out_hidden_size=64)
    config = qwen3_vl(hidden_size=64) | {"vision_config": {**sizes, "deepstack_visual_indexes": [0]}}
    model = ligermodels.Qwen3VL.from_config(config, dtype=torch.float32, seed=0).model.visual.to(device)
    theirs = transformers.AutoModel.from_config(transformers.AutoConfig.for_model(**config).vision_config).to(device)
    theirs.load_state_dict(model.state_dict())
    pixels = torch.randn(sum(t * h * w for t, h, w in grids), model.patch_width, device=device)

    def results(tower, dtype):
        tower.to(dtype).zero_grad()
        if tower is model:
            tokens, [states] = tower(pixels, grids)
        else:
            output = tower(pixels.to(dtype), grid_thw=torch.tensor(grids, device=device))
            tokens, [states] = output.pooler_output, output.deepstack_features
        (tokens.float().square().sum() + states.float().square().sum()).backward()
        found = {name: parameter.grad.float() for name, parameter in tower.named_parameters()}
        return {"tokens": tokens.float(), "states": states.float(), **found}

    exact, expected = results(model, torch.float32), results(theirs, torch.float32)
    for name in exact:
        assert relative(exact[name], expected[name]) < 10 * GRADIENTS, name  # sums over hundreds of patches
    ours, expected = results(model, torch.bfloat16), results(theirs, torch.bfloat16)
    for name in exact:
        # Up to 1.09 on a CPU.
        assert relative(ours[name], exact[name]) < 1.25 * relative(expected[name], exact[name]), name
