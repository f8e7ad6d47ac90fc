"""Image processors against transformers' (those on pillow): sizes, grids, ids and pixels."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from transformers.models.mllama import image_processing_pil_mllama as theirs_mllama
from transformers.models.qwen2_vl import image_processing_pil_qwen2_vl as theirs_qwen

from ligermodels.errors import ConfigError, InputError
from ligermodels.vision import MllamaImageProcessor, Qwen2VLImageProcessor
from ligermodels.vision.mllama import choose_canvas, cross_attention_mask, fit
from ligermodels.vision.qwen2_vl import smart_resize
from tests.vision.folders import MLLAMA, QWEN, draw

# (height, width): one pixel, thin and flat up to 1:200, around multiples of 28 and of 14, halves that round to even.
SIZES = [
    (1, 1), (1, 200), (200, 1), (3, 600), (13, 14), (14, 14), (14, 42), (27, 28), (28, 29), (42, 42), (42, 70),
    (56, 57), (63, 91), (70, 70), (77, 301), (98, 84), (100, 99), (112, 113), (120, 400), (126, 126), (150, 17),
    (20, 1000), (1000, 20), (224, 224), (238, 266), (250, 333), (300, 200), (433, 77), (480, 640), (56, 160), (110, 56),
]  # fmt: skip
sides = st.integers(1, 6000)


@pytest.mark.parametrize("generation", ["4.x", "5.x"])
def test_qwen_pixels_and_grids_are_those_of_transformers(generation):
    """Bit by bit, with limits that many of the sizes reach."""
    limits = 28 * 28 * 4, 28 * 28 * 60
    sizes = {"min_pixels": limits[0], "max_pixels": limits[1]}
    if generation == "5.x":
        sizes = {"size": {"shortest_edge": limits[0], "longest_edge": limits[1]}, "min_pixels": None}
    config = QWEN | {"max_pixels": None} | sizes
    ours = Qwen2VLImageProcessor.from_config(config)
    theirs = theirs_qwen.Qwen2VLImageProcessorPil(**{key: value for key, value in config.items() if value is not None})
    images = [draw(*size, seed=place) for place, size in enumerate(SIZES)]
    actual, expected = ours(images), theirs(images, return_tensors="pt")
    assert torch.equal(actual["image_grid_thw"], expected["image_grid_thw"])
    assert actual["pixel_values"].dtype == torch.float32
    assert torch.equal(actual["pixel_values"], expected["pixel_values"])


@pytest.mark.parametrize(
    "config",
    [
        {"patch_size": 7, "merge_size": 3, "temporal_patch_size": 1, "min_pixels": 441, "max_pixels": 40000},
        {"do_rescale": False, "image_mean": [100.0, 110.0, 120.0], "image_std": [40.0, 50.0, 60.0]},
        {"do_resize": False},
    ],
    ids=str,
)
def test_qwen_switches_are_those_of_transformers(config):
    image = draw(112, 84) if config.get("do_resize") is False else draw(150, 99)
    # Their PIL back end takes one number for all channels only as three.
    three = {key: [value] * 3 if key.startswith("image_") and isinstance(value, float) else value
             for key, value in config.items()}  # fmt: skip
    expected = theirs_qwen.Qwen2VLImageProcessorPil(**(QWEN | three))(image, return_tensors="pt")
    actual = Qwen2VLImageProcessor.from_config(QWEN | config)([image])
    assert torch.equal(actual["image_grid_thw"], expected["image_grid_thw"])
    assert torch.equal(actual["pixel_values"], expected["pixel_values"])


@given(sides, sides, st.sampled_from([(3136, 12845056), (3136, 1003520), (100352, 602112), (1, 784), (4096, 4096)]))
@settings(max_examples=100, deadline=None)
def test_smart_resize_is_that_of_transformers(height, width, limits):
    if max(height, width) > 200 * min(height, width):
        with pytest.raises(InputError, match="200 times"):
            smart_resize(height, width, 28, *limits)
        with pytest.raises(ValueError, match="200"):
            theirs_qwen.smart_resize(height, width, 28, *limits)
    else:
        assert smart_resize(height, width, 28, *limits) == theirs_qwen.smart_resize(height, width, 28, *limits)


@pytest.mark.parametrize("count", [2, 5])
def test_a_video_is_its_frames_two_by_two(count):
    """Against transformers' processor of single images, frame by frame; their own for videos needs torchvision."""
    config = QWEN | {"min_pixels": 28 * 28 * 6, "max_pixels": 28 * 28 * 20}
    frames = [draw(90, 131, seed) for seed in range(count)]
    actual = Qwen2VLImageProcessor.from_config(config, video=True).videos([frames, frames[:1]])
    single = theirs_qwen.Qwen2VLImageProcessorPil(**config)(frames, return_tensors="pt")
    _, high, wide = single["image_grid_thw"][0].tolist()
    times = (count + 1) // 2
    assert actual["video_grid_thw"].tolist() == [[times, high, wide], [1, high, wide]]
    patches = single["pixel_values"].reshape(count, high * wide, 3, 2, 14 * 14)[:, :, :, 0]
    rows = actual["pixel_values_videos"][: times * high * wide].reshape(times, high * wide, 3, 2, 14 * 14)
    for place in range(2 * times):
        assert torch.equal(rows[place // 2, :, :, place % 2], patches[min(place, count - 1)]), place
    assert torch.equal(actual["pixel_values_videos"][times * high * wide :], single["pixel_values"][: high * wide])


def test_limits_without_any_in_the_file():
    """transformers' own, which differ for images and frames."""
    hub = Qwen2VLImageProcessor.from_config(QWEN, video=True)
    assert (hub.min_pixels, hub.max_pixels) == (3136, 12845056)
    silent = {key: value for key, value in QWEN.items() if key not in ("min_pixels", "max_pixels")}
    video, image = (Qwen2VLImageProcessor.from_config(silent, video=flag) for flag in (True, False))
    assert (video.min_pixels, video.max_pixels) == (128 * 28 * 28, 768 * 28 * 28)
    assert (image.min_pixels, image.max_pixels) == (56 * 56, 1280 * 28 * 28)
    saved_by_445 = silent | {"size": {"min_pixels": 6272, "max_pixels": 12544}}
    processor = Qwen2VLImageProcessor.from_config(saved_by_445)
    assert (processor.min_pixels, processor.max_pixels) == (6272, 12544)


def test_images_and_videos_that_cannot_be_taken():
    processor = Qwen2VLImageProcessor()
    for call, message in (
        (lambda: processor.videos([[draw(28, 28)], []]), "video 1 has no frames"),
        (lambda: processor.videos([[draw(28, 28), draw(28, 56)]]), r"frames of different sizes, such as \[\(28, 28\)"),
        (lambda: processor([draw(28, 28), draw(1, 201)]), "image 1: 201 x 1 pixels: one side is more than 200 times"),
        (lambda: Qwen2VLImageProcessor(do_resize=False)([draw(30, 56)]), "do_resize false .* multiples of 28"),
    ):
        with pytest.raises(InputError, match=message):
            call()


def _mllama(tile, **config):
    config = MLLAMA | {"size": {"height": tile, "width": tile}} | config
    return MllamaImageProcessor.from_config(config), theirs_mllama.MllamaImageProcessorPil(**config)


@pytest.mark.parametrize("config", [{}, {"max_image_tiles": 6, "resample": 3}], ids=str)
def test_mllama_tiles_ids_and_masks_are_those_of_transformers(config):
    """All sizes, in samples of none to three images."""
    ours, theirs = _mllama(56, **config)
    images = [draw(*size, seed=place) for place, size in enumerate(SIZES)]
    samples = []
    while images:
        count = 1 + len(samples) % 4
        samples.append(images[: count % 4])
        images = images[count % 4 :]
    assert [] in samples and max(map(len, samples)) == 3
    actual, tiles = ours(samples)
    expected = theirs(samples, return_tensors="pt")
    assert tiles == expected["num_tiles"]
    for name in ("aspect_ratio_ids", "aspect_ratio_mask", "pixel_values"):
        assert actual[name].dtype == expected[name].dtype
        assert torch.equal(actual[name], expected[name]), name
    assert len(set(actual["aspect_ratio_ids"].flatten().tolist())) >= 8
    assert actual["pixel_values"].is_contiguous()


@given(sides, sides, st.sampled_from([560, 448, 224, 28]), st.integers(1, 9))
@settings(max_examples=100, deadline=None)
def test_canvas_and_size_are_those_of_transformers(height, width, tile, most):
    canvas = choose_canvas(height, width, most, tile)
    theirs = theirs_mllama.get_optimal_tiled_canvas(height, width, most, tile)
    assert (canvas[0] * tile, canvas[1] * tile) == tuple(map(int, theirs))
    expected = theirs_mllama.get_image_size_fit_to_canvas(height, width, *map(int, theirs), tile)
    assert fit(height, width, canvas, tile) == tuple(map(int, expected))


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_cross_attention_masks_are_those_of_transformers(data):
    from transformers.models.mllama import processing_mllama as theirs

    rows = data.draw(st.lists(st.lists(st.sampled_from([5, 5, 1, 2]), min_size=9, max_size=9), min_size=1, max_size=3))
    tiles = [[data.draw(st.integers(1, 4)) for token in row if token == 5] for row in rows]
    sparse = [theirs.get_cross_attention_token_mask(row, 5) for row in rows]
    expected = theirs.convert_sparse_cross_attention_mask_to_dense(sparse, tiles, 4, 9)
    actual = cross_attention_mask(torch.tensor(rows), 5, tiles, 4)
    assert actual.dtype == torch.int64 and np.array_equal(actual.numpy(), expected)


@pytest.mark.parametrize("mode", ["L", "LA", "P", "RGBA", "1", "CMYK"])
def test_other_modes_are_those_of_transformers(mode):
    rgba = draw(60, 80).convert("RGBA")
    rgba.putalpha(Image.linear_gradient("L").resize(rgba.size))
    image = rgba if mode == "RGBA" else rgba.convert("RGB").convert(mode) if mode == "CMYK" else rgba.convert(mode)
    assert image.mode == mode
    expected = theirs_qwen.Qwen2VLImageProcessorPil(**QWEN)(image, return_tensors="pt")["pixel_values"]
    assert torch.equal(Qwen2VLImageProcessor.from_config(QWEN)([image])["pixel_values"], expected)
    ours, theirs = _mllama(28)
    assert torch.equal(ours([[image]])[0]["pixel_values"], theirs([[image]], return_tensors="pt")["pixel_values"])


BAD_CONFIGS = [
    ("qwen", {"min_pixels": 0}, "min_pixels must be an integer of at least 1, not 0"),
    ("qwen", {"do_center_crop": True}, "do_center_crop is True, and cropping is not done"),
    ("qwen", {"image_std": [0.5, 0, 0.5]}, "image_std must not have a 0"),
    ("mllama", {"do_pad": False}, "do_pad is false"),
    ("mllama", {"image_mean": None, "image_std": None}, "has no image_mean and no image_std"),
]


@pytest.mark.parametrize(("family", "change", "message"), BAD_CONFIGS, ids=[f"{c[0]}-{c[2][:30]}" for c in BAD_CONFIGS])
def test_bad_configs(family, change, message):
    base, processor = (QWEN, Qwen2VLImageProcessor) if family == "qwen" else (MLLAMA, MllamaImageProcessor)
    with pytest.raises(ConfigError, match=f"some/file.json.*{message}"):
        processor.from_config(base | change, where="some/file.json")
