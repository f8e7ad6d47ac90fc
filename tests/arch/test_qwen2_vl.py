"""Qwen2-VL: as a model of text, and with images and videos, against transformers."""

import json

import pytest
import torch
import transformers
from hypothesis import given, settings, strategies as st
from transformers.models.qwen2_vl import modeling_qwen2_vl

import ligermodels
from ligermodels import InputError
from ligermodels.arch.qwen2_vl import Qwen2VLConfig
from tests.arch.images import ROWS, ImageSuite, check_positions
from tests.arch.qwen2_vl import CASES, IMAGE, VOCAB, image, inputs, load, rope, tiny, video, windowed
from tests.arch.suite import (
    LOGITS,
    Suite,
    check_other_layout,
    read_tensors,
    relative,
)
from tests.kernels.on_gpu import never_waits

TINY = {
    "plain": tiny(num_key_value_heads=4),
    "tied": tiny(tie_word_embeddings=True, vocab_size=120),
    "one_key_head": tiny(num_key_value_heads=1, rope_parameters=rope("default", (2, 1, 1))),
    "window_in_the_last_block": windowed(),
    "window_switched_off": windowed(use_sliding_window=False, max_window_layers=0),
    "yarn": tiny(rope_parameters=rope("yarn", factor=4.0, original_max_position_embeddings=16)),
    "dynamic": tiny(max_position_embeddings=16, rope_parameters=rope("dynamic", factor=3.0)),
    "one_frame_and_channel": tiny(dict(temporal_patch_size=1, in_channels=1, depth=1, spatial_merge_size=1)),
    "larger_merge": tiny(dict(spatial_merge_size=3, num_heads=1, mlp_ratio=3, hidden_act="gelu_pytorch_tanh")),
}


def on_disk(tensors):
    """Names of transformers in memory -> those on disk."""
    return {
        name.replace("model.visual.", "visual.").replace("model.language_model.", "model."): tensor
        for name, tensor in tensors.items()
    }


def flat(config):
    """The config.json of the Hub, from the one that transformers 5 writes."""
    config = dict(config)
    text = {**config.pop("text_config"), "tie_word_embeddings": config["tie_word_embeddings"]}
    parameters = dict(text.pop("rope_parameters"))
    text["rope_theta"] = parameters.pop("rope_theta")
    kind = parameters.pop("rope_type")
    text["rope_scaling"] = {"type": "mrope" if kind == "default" else kind, **parameters}
    vision = dict(config["vision_config"])
    vision["in_chans"] = vision.pop("in_channels")
    for name in ("rope_parameters", "model_type", "dtype"):
        vision.pop(name)
    dtype = config.pop("dtype")
    return {**text, **config, "vision_config": vision, "torch_dtype": dtype}


class TestText(Suite):
    arch = ligermodels.Qwen2VL
    TINY = {name: config for name, config in TINY.items() if name != "larger_merge"}
    REAL = {"Qwen2-VL-2B-Instruct": 2_208_985_600, "Qwen2-VL-7B-Instruct": 8_291_375_616}

    def earlier_generation(self, config):
        config = flat(config)
        del config["layer_types"]
        if not config["use_sliding_window"]:
            config["sliding_window"] = 5
        return config

    def named_on_disk(self, tensors):
        return on_disk(tensors)

    def training_batch(self, tiny, seed=0):
        torch.manual_seed(seed)
        batch = inputs([[3, image(2, 2), 2, video(2, 1, 2), 2]], tiny)
        return {**batch, "labels": batch["input_ids"]}

    def test_a_bf16_model_keeps_what_must_be_fp32(self, hf, folder, ids):
        """The tables of the text and of the tower."""
        model = self.arch.from_hub(folder, dtype=torch.bfloat16, progress=False)
        positions, rotary = torch.randint(30000, (3, 2, 50)), hf.model.language_model.rotary_emb
        for ours, expected in zip(model.decoder.rotary_emb(positions), rotary(torch.zeros(1), positions), strict=True):
            assert ours.dtype == torch.float32 and torch.equal(ours, expected[..., : ours.shape[-1]])

        positions = torch.randint(500, (2, 300))
        expected = hf.model.visual.rotary_pos_emb(positions, positions.T)
        for ours, one in zip(model.model.visual.rotary_pos_emb(positions), expected, strict=True):
            assert ours.dtype == torch.float32 and torch.equal(ours, one[..., : ours.shape[-1]])

    def test_the_whole_model_compiles_without_a_graph_break(self):
        """Of text: with images the number of their tokens is read on the host."""
        config = tiny(dict(depth=1), initializer_range=0.3, num_hidden_layers=1)
        model = ligermodels.Qwen2VL.from_config(config, dtype=torch.float32, seed=0)
        model.model.visual.requires_grad_(False)
        ids = torch.randint(3, IMAGE, (2, 24))
        torch.compiler.reset()
        compiled = torch.compile(model, fullgraph=True, backend="eager")
        torch.testing.assert_close(compiled(ids, labels=ids).loss, model(ids, labels=ids).loss)

    def test_defaults_are_those_of_transformers(self):
        given = dict(vocab_size=VOCAB, hidden_size=1024, intermediate_size=64, num_hidden_layers=2)
        given |= dict(model_type="qwen2_vl", num_attention_heads=8, vision_config=dict(hidden_size=1024))
        ours, expected = Qwen2VLConfig.from_hf(given), transformers.AutoConfig.for_model(**given)
        names = ("rms_norm_eps", "max_position_embeddings", "hidden_act", "num_key_value_heads", "sliding_window")
        for name in (*names, "max_window_layers"):
            assert getattr(ours, name) == getattr(expected.text_config, name)
        assert ours.rope_parameters == {"rope_theta": 1e6, "rope_type": "default", "mrope_section": [16, 24, 24]}
        for name in ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id"):
            assert getattr(ours, name) == getattr(expected, name)
        theirs = expected.vision_config.to_dict()
        assert {name: theirs[name] for name in ours.vision_config.to_hf()} == ours.vision_config.to_hf()

    @pytest.mark.gpu
    def test_a_training_step_passes_the_sync_checker_is_captured_and_compiles(self, model, tiny):
        """Of text: with images the host reads the number of their tokens."""
        model.model.visual.requires_grad_(False)
        model.cuda().model.visual.cpu()
        ids = torch.randint(3, 90, (1, 10), device="cuda")
        self.training_batch = lambda tiny: dict(input_ids=ids, labels=ids)
        super().test_a_training_step_passes_the_sync_checker_is_captured_and_compiles(model, tiny)


class TestImages(ImageSuite):
    arch = ligermodels.Qwen2VL
    TINY = TINY

    def named_on_disk(self, tensors):
        return on_disk(tensors)


@pytest.fixture
def folder(written):
    return written(TINY["plain"])


@pytest.fixture
def model(folder):
    return load(folder)


def test_rows_of_a_cache_change_places(model):
    batch, rows = inputs(CASES["padded"]), torch.tensor([1, 0, 1])
    step, mask = torch.tensor([[7], [8], [9]]), torch.cat([batch["attention_mask"], torch.ones(2, 1).long()], 1)
    cache = model(**batch, use_cache=True).past_key_values
    assert cache.values["rope_deltas"][0] != cache.values["rope_deltas"][1]
    cache.reorder(rows)
    found = model(step, mask[rows], past_key_values=cache).logits
    for row, old in enumerate(rows.tolist()):
        cache = model(**batch, use_cache=True).past_key_values
        expected = model(step[[row, row]], mask, past_key_values=cache).logits
        assert relative(found[row], expected[old]) < LOGITS
    cache = model(step, position_ids=torch.full((3, 1, 1), 4), use_cache=True).past_key_values
    assert cache.values["rope_deltas"].tolist() == [[4], [4], [4]]


LAYOUTS = {
    "in_memory": ("model.language_model.", "model.visual."),
    "twice_nested": ("model.language_model.model.", "model.visual."),
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_other_names_on_disk(layout, folder, model, tmp_path):
    tensors = read_tensors(folder)
    text, tower = layout
    moved = {
        tower + name.removeprefix("visual.") if name.startswith("visual.")
        else text + name.removeprefix("model.") if name.startswith("model.")
        else name: tensor
        for name, tensor in tensors.items()
    }  # fmt: skip
    assert sum(name in tensors for name in moved) == 1
    check_other_layout(model, folder, moved, inputs(CASES["of_one_size"]), tmp_path / "ours")


def change(name, make):
    return lambda batch: {**batch, name: make(batch.get(name))}


def drop(*names):
    return lambda batch: {key: value for key, value in batch.items() if key not in names}


NO_INPUT = {
    "a token too few": (
        change("input_ids", lambda x: x.masked_fill((x == IMAGE).cumsum(1) == 3, 5)),
        ["have", "make 7"],
    ),
    "no image at all": (
        drop("pixel_values", "image_grid_thw", "pixel_values_videos", "video_grid_thw"),
        ["have 7 tokens", "make 0"],
    ),
    "no ids": (
        lambda batch: {**drop("input_ids")(batch), "inputs_embeds": torch.zeros(1, 23, 32)},
        ["input_ids"],
    ),
    "sizes of one image": (change("image_grid_thw", lambda x: x[0]), ["[3]", "integers [images, 3]"]),
    "two axes": (change("position_ids", lambda x: torch.zeros(2, 1, 23).long()), ["position_ids", "(2, 1, 23)"]),
}


@pytest.mark.parametrize(("change", "words"), NO_INPUT.values(), ids=NO_INPUT)
def test_inputs_that_do_not_fit_together(change, words, model):
    batch = inputs([[3, image(2, 3), 2, image(1, 1), 2, video(2, 1, 1), 1]])
    assert model(**batch).logits.shape[1] == 23
    with pytest.raises(InputError) as error:
        model(**change(batch))
    assert all(word in str(error.value) for word in words), str(error.value)


def test_a_config_with_text_config_and_remains_of_a_flat_one(folder, model):
    """As transformers 4.57 writes: the text's fields twice, of which those in text_config hold."""
    written = json.loads((folder / "config.json").read_text())
    text = written["text_config"]
    twice = {**text, "sliding_window": 77, "rms_norm_eps": 0.5, **written, "dtype": None, "torch_dtype": "float32"}
    assert Qwen2VLConfig.from_hf(twice) == Qwen2VLConfig.from_hf(written)
    tied = {**written, "tie_word_embeddings": False, "text_config": {**text, "tie_word_embeddings": True}}
    assert Qwen2VLConfig.from_hf(tied).tie_word_embeddings
    with pytest.warns(UserWarning, match="vision_config has keys that are kept for saving, but not used here: window"):
        Qwen2VLConfig.from_hf({**written, "vision_config": {**written["vision_config"], "window": 3}})


@pytest.mark.gpu
def test_a_training_step_with_images_passes_the_sync_checker(folder):
    """Sizes on the CPU; the checker does not see the one synchronisation, which reads the number of tokens."""
    batch = inputs(CASES["mixed"])
    batch = {name: value if "grid" in name else value.cuda() for name, value in batch.items() if "mask" not in name}
    model = load(folder, device="cuda")
    model(**batch, labels=batch["input_ids"]).loss.backward()
    with never_waits():
        model(**batch, labels=batch["input_ids"]).loss.backward()
    batch["input_ids"] = batch["input_ids"].masked_fill(batch["input_ids"] == IMAGE, 5)
    with pytest.raises(InputError, match="tokens with the image_token_id"):
        model(**batch)


def test_the_rules_differ_after_long_videos():
    """Text after 5 frames of 2 x 1 tokens that began at 9 continues at 14 or at 11: with get_rope_index of transformers
    4.57 and of 5.23."""
    batch = inputs([[8, video(5, 2, 1), 2]])
    for rule, then, delta in (("4.x", 14, -5), ("5.x", 11, -8)):
        config = Qwen2VLConfig.from_hf(tiny(video_rule=rule))
        positions, deltas = config.get_rope_index(batch["input_ids"], None, batch["video_grid_thw"])
        assert positions[:, 0, 19].tolist() == [then] * 3 and deltas.item() == delta
    config = Qwen2VLConfig.from_hf(tiny())
    assert config.video_rule == "4.x" and "video_rule" not in config.to_hf()
    other = Qwen2VLConfig.from_hf(tiny(video_rule="5.x"))
    assert other.to_hf()["video_rule"] == "5.x" and Qwen2VLConfig.from_hf(other.to_hf()) == other
    model = ligermodels.Qwen2VL.from_config(tiny(initializer_range=0.3), dtype=torch.float32, seed=0)
    earlier = model(**batch).logits
    model.config.video_rule = "5.x"
    later = model(**batch).logits
    assert relative(earlier[:, :19], later[:, :19]) < LOGITS < 100 * LOGITS < relative(earlier[:, 19:], later[:, 19:])


@settings(max_examples=40, deadline=None, derandomize=True)
@given(ROWS, st.sampled_from(["left", "right"]))
def test_positions_of_any_text(rows, pad):
    config = Qwen2VLConfig.from_hf(tiny(video_rule="5.x"))
    check_positions(rows, pad, tiny(), config, modeling_qwen2_vl.Qwen2VLModel)
