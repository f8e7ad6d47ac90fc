"""Image processors against transformers' (those on pillow): sizes, grids, ids and pixels."""

import ast
import importlib.util
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings, strategies as st
from PIL import Image
from transformers.models.gemma4 import image_processing_pil_gemma4 as theirs_gemma4
from transformers.models.mllama import image_processing_pil_mllama as theirs_mllama
from transformers.models.qwen2_vl import image_processing_pil_qwen2_vl as theirs_qwen

from ligermodels.errors import ConfigError, InputError
from ligermodels.vision import (
    Gemma4ImageProcessor,
    Gemma4UnifiedImageProcessor,
    MllamaImageProcessor,
    Qwen2VLImageProcessor,
    Qwen3VLVideoProcessor,
)
from ligermodels.vision.qwen2_vl import smart_resize
from tests.vision.folders import GEMMA4, MLLAMA, QWEN, QWEN3, QWEN3_VIDEO, draw

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
        {key: value for key, value in QWEN3.items() if "type" not in key and key != "size"},
    ],
    ids=str,
)
def test_qwen_switches_are_those_of_transformers(config):
    image = draw(112, 84) if config.get("do_resize") is False else draw(150, 99)
    expected = theirs_qwen.Qwen2VLImageProcessorPil(**(QWEN | config))(image, return_tensors="pt")
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
    _, grid_height, grid_width = single["image_grid_thw"][0].tolist()
    times = (count + 1) // 2
    assert actual["video_grid_thw"].tolist() == [[times, grid_height, grid_width], [1, grid_height, grid_width]]
    patches = single["pixel_values"].reshape(count, grid_height * grid_width, 3, 2, 14 * 14)[:, :, :, 0]
    rows = actual["pixel_values_videos"][: times * grid_height * grid_width].reshape(
        times, grid_height * grid_width, 3, 2, 14 * 14
    )
    for place in range(2 * times):
        assert torch.equal(rows[place // 2, :, :, place % 2], patches[min(place, count - 1)]), place
    assert torch.equal(
        actual["pixel_values_videos"][times * grid_height * grid_width :],
        single["pixel_values"][: grid_height * grid_width],
    )


def theirs_of(family, file, name):
    """A function of a module of transformers that cannot be imported without torchvision."""
    [folder] = importlib.util.find_spec(f"transformers.models.{family}").submodule_search_locations
    tree = ast.parse((Path(folder) / f"{file}.py").read_text())
    found = next(node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name)
    names = {"math": math, "torch": torch}
    exec(compile(ast.Module([found], []), name, "exec"), names)
    return names[name]


LIMITS = [(4096, 25165824), (128 * 32 * 32, 32 * 32 * 768), (1, 32 * 32 * 4)]


@given(st.integers(2, 800), sides, sides, st.sampled_from(LIMITS))
@settings(max_examples=100, deadline=None)
def test_sizes_of_frames_are_those_of_transformers(frames, height, width, limits):
    theirs = theirs_of("qwen3_vl", "video_processing_qwen3_vl", "smart_resize")
    processor = Qwen3VLVideoProcessor(min_pixels=limits[0], max_pixels=limits[1])
    try:
        expected = theirs(frames, height, width, factor=32, min_pixels=limits[0], max_pixels=limits[1])
    except ValueError:
        with pytest.raises(InputError, match="200 times"):
            processor._size(frames, height, width)
    else:
        assert processor._size(frames, height, width) == expected


def test_frames_within_a_cap():
    """Of 768 tokens a frame, and an even share of the limit of the video, but the least size at any rate."""
    theirs = theirs_of("qwen3_vl", "video_processing_qwen3_vl", "smart_resize")
    processor = Qwen3VLVideoProcessor.from_config(QWEN3_VIDEO | {"cap_pixels_per_frame": True}, video=True)
    for frames, most in ((4, 768 * 32 * 32), (100, 25165824 // 100), (768, 25165824 // 768), (8000, int(4096 * 1.05))):
        options = dict(factor=32, min_pixels=4096, max_pixels=most * frames)
        assert processor._size(frames, 1080, 1920) == theirs(frames, 1080, 1920, **options)


def test_frames_within_the_budget_of_a_video():
    """Of qwen2_vl: 0.9 * 128,000 tokens of 28 x 28 pixels for each two frames, but the least size at any rate."""
    processor = Qwen2VLImageProcessor.from_config(QWEN | {"cap_pixels_per_frame": True}, video=True)
    least, most = processor.min_pixels, processor.max_pixels
    for frames, pixels in ((1, most), (60_000, 180_633_600 // 60_000), (10**8, int(least * 1.05))):
        assert processor._size(frames, 1080, 1920) == theirs_qwen.smart_resize(1080, 1920, 28, least, pixels), frames


@pytest.mark.parametrize("count", [2, 5])
def test_a_video_of_qwen3_vl_is_its_frames_two_by_two(count):
    config = QWEN3_VIDEO | {"size": {"shortest_edge": 32 * 32 * 8 * count, "longest_edge": 32 * 32 * 12 * count}}
    ours = Qwen3VLVideoProcessor.from_config(config, video=True)
    frames = [draw(90, 131, seed) for seed in range(count)]
    actual, (height, width) = ours.videos([frames]), ours._size(count, 90, 131)
    options = {**{key: value for key, value in QWEN3.items() if key != "size"}, "do_resize": False}
    sized = [frame.resize((width, height), resample=Image.Resampling.BICUBIC) for frame in frames]
    single = theirs_qwen.Qwen2VLImageProcessorPil(**options)(sized, return_tensors="pt")
    grid_height, grid_width, times = height // 16, width // 16, (count + 1) // 2
    assert actual["video_grid_thw"].tolist() == [[times, grid_height, grid_width]]
    patches = single["pixel_values"].reshape(count, grid_height * grid_width, 3, 2, 16 * 16)[:, :, :, 0]
    rows = actual["pixel_values_videos"].reshape(times, grid_height * grid_width, 3, 2, 16 * 16)
    for place in range(2 * times):
        assert torch.equal(rows[place // 2, :, :, place % 2], patches[min(place, count - 1)]), place


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


def config_of(family, **change):
    base, processor = (QWEN, Qwen2VLImageProcessor) if family == "qwen" else (MLLAMA, MllamaImageProcessor)
    return processor.from_config(base | change, where="some/file.json")


QWEN_DEFAULT = Qwen2VLImageProcessor()
REFUSED = [
    (lambda: QWEN_DEFAULT.videos([[draw(28, 28)], []]), "video 1 has no frames"),
    (lambda: QWEN_DEFAULT.videos([[draw(28, 28), draw(28, 56)]]), r"frames of different sizes, such as \[\(28, 28\)"),
    (lambda: QWEN_DEFAULT([draw(28, 28), draw(1, 201)]), "image 1: 201 x 1 pixels: one side is more than 200 times"),
    (lambda: Qwen3VLVideoProcessor().videos([[draw(32, 32)]]), "video 0: a video needs 2 frames or more, not 1"),
    (lambda: Qwen2VLImageProcessor(do_resize=False)([draw(30, 56)]), "do_resize false .* multiples of 28"),
    (lambda: config_of("qwen", min_pixels=0), "some/file.json.*min_pixels must be an integer of at least 1, not 0"),
    (lambda: config_of("qwen", do_center_crop=True), "do_center_crop is True, and cropping is not done"),
    (lambda: config_of("qwen", image_std=[0.5, 0, 0.5]), "image_std must not have a 0"),
    (lambda: config_of("mllama", do_pad=False), "do_pad is false"),
    (lambda: config_of("mllama", image_mean=None, image_std=None), "has no image_mean and no image_std"),
]


@pytest.mark.parametrize(("call", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_refused(call, message):
    with pytest.raises((ConfigError, InputError), match=message):
        call()


@given(sides, sides, st.sampled_from([(16, 280, 3), (14, 70, 4), (4, 1120, 1)]))
@settings(max_examples=100, deadline=None)
def test_sizes_of_gemma_4_are_those_of_transformers(height, width, sizes):
    patch, tokens, merge = sizes
    processor = Gemma4ImageProcessor(patch_size=patch, max_soft_tokens=tokens, pooling_kernel_size=merge)
    expected = theirs_gemma4.get_aspect_ratio_preserving_size(height, width, patch, tokens * merge**2, merge)
    assert processor._size(height, width) == expected


@pytest.mark.parametrize("changes", [{}, dict(max_soft_tokens=70, patch_size=4, resample=2, pooling_kernel_size=2)])
def test_patches_of_gemma_4_are_those_of_transformers(changes):
    config, images = GEMMA4 | changes, [draw(60, 90, 1), draw(480, 480, 2), draw(33, 700, 3), draw(900, 7, 4)]
    inputs, counts = Gemma4ImageProcessor.from_config(config)(images, ["a", "b", "c", "d"])
    expected = theirs_gemma4.Gemma4ImageProcessorPil(**config)(images, return_tensors="pt")
    assert counts == expected.pop("num_soft_tokens_per_image").tolist()
    assert inputs.keys() == expected.keys() and all(torch.equal(inputs[name], expected[name]) for name in inputs)
    # The 12B's patches are those of a token, put together: in transformers from the ones above, image by image.
    merged, again = Gemma4UnifiedImageProcessor.from_config(config)(images, ["a", "b", "c", "d"])
    assert again == counts and merged["pixel_values"].shape[1] == config["max_soft_tokens"]
    merge = theirs_of("gemma4_unified", "image_processing_gemma4_unified", "patches_merge")
    for i, count in enumerate(counts):
        patches = [inputs[name][i, : count * config["pooling_kernel_size"] ** 2][None] for name in inputs]
        pixels, places = merge(*patches, count)
        assert torch.equal(merged["pixel_values"][i, :count], pixels[0]) and not merged["pixel_values"][i, count:].any()
        assert torch.equal(merged["image_position_ids"][i, :count], places[0])
        assert (merged["image_position_ids"][i, count:] == -1).all()


def test_what_the_processor_of_gemma_4_refuses():
    with pytest.raises(ConfigError, match=r"max_soft_tokens is 100, not one of \(70, 140"):
        Gemma4ImageProcessor.from_config(GEMMA4 | {"max_soft_tokens": 100})
    as_they_are = Gemma4ImageProcessor.from_config(GEMMA4 | {"do_resize": False, "max_soft_tokens": 70})
    assert as_they_are([draw(48, 96)], ["a"])[1] == [2]
    for size in ((48, 90), (48 * 7, 48 * 11)):
        with pytest.raises(InputError, match=r"a: .* with do_resize false both sides must be multiples of 48"):
            as_they_are([draw(*size)], ["a"])
