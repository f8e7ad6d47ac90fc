"""Text and images to the inputs of a model, against transformers' processors; and calls that do not fit."""

import base64
import io
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil
from transformers.models.mllama.image_processing_pil_mllama import MllamaImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.video_utils import VideoMetadata

import ligermodels
from ligermodels.errors import ConfigError, InputError
from ligermodels.recipes.data.images import add
from ligermodels.vision import Processor
from tests.vision import folders
from tests.vision.folders import draw

CAT, DOG, OWL = draw(60, 90, 1), draw(120, 50, 2), draw(33, 200, 3)
FILM = [draw(64, 80, seed) for seed in range(5)]
SMALL = {"min_pixels": 784, "max_pixels": 784 * 12}
TILE = {"size": {"height": 28, "width": 28}}


class TheirQwen(transformers.Qwen2VLProcessor):
    """Without the check of classes, which needs a video processor and with it torchvision."""

    def check_argument_for_proper_class(self, name, argument):
        return type(argument)


class TheirVideos:
    """Replaces the video processor: the grid of frames of one size, from the image processor."""

    merge_size = 2

    def __init__(self, image_processor):
        self.images = image_processor

    def __call__(self, videos, **_):
        found = [self.images(video, return_tensors="pt")["image_grid_thw"] for video in videos]
        grids = [[(len(grid) + 1) // 2, *grid[0].tolist()[1:]] for grid in found]
        return {"video_grid_thw": torch.tensor(grids)}


class TheirQwen3(transformers.Qwen3VLProcessor):
    def check_argument_for_proper_class(self, name, argument):
        return type(argument)


class TheirTimedVideos:
    """Replaces the video processor: grids from ours, and what times are made from."""

    merge_size = temporal_patch_size = 2

    def __init__(self, ours):
        self.ours = ours

    def __call__(self, videos, fps=2.0, **_):
        rates = fps if isinstance(fps, list) else [fps] * len(videos)
        metadata = [
            VideoMetadata(total_num_frames=len(video), fps=rate, frames_indices=list(range(len(video))))
            for video, rate in zip(videos, rates, strict=True)
        ]
        return {**self.ours.videos(videos), "video_metadata": metadata}


class TheirGemma3:
    """transformers' processor, which has pan and scan off unless each call asks for it."""

    def __init__(self, processor):
        self.processor, self.save_pretrained = processor, processor.save_pretrained

    def __call__(self, images=None, **options):
        scan = {"do_pan_and_scan": True, "pan_and_scan_min_crop_size": 16}
        return self.processor(images=images, **options, **(scan if images is not None else {}))

    def apply_chat_template(self, messages, **options):
        options["processor_kwargs"] = {"do_pan_and_scan": True, "pan_and_scan_min_crop_size": 16}
        return self.processor.apply_chat_template(messages, **options)


@pytest.fixture(scope="module")
def qwen_folder(tmp_path_factory):
    return folders.qwen2_vl(tmp_path_factory.mktemp("qwen"), **SMALL)


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory):
    """(ours, transformers')"""
    size = {"shortest_edge": 1024, "longest_edge": 1024 * 12}
    folder = folders.qwen3_vl(tmp_path_factory.mktemp("qwen3"), {"size": size}, size=size)
    ours = Processor.from_folder(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    images, videos = Qwen2VLImageProcessorPil.from_pretrained(folder), TheirTimedVideos(ours.video_processor)
    return ours, TheirQwen3(images, tokenizer, videos, chat_template=folders.QWEN_TEMPLATE)


@pytest.fixture(scope="module")
def mllama_folder(tmp_path_factory):
    return folders.mllama(tmp_path_factory.mktemp("mllama"), **TILE)


@pytest.fixture(scope="module")
def qwen(qwen_folder):
    """(ours, transformers')"""
    tokenizer = transformers.AutoTokenizer.from_pretrained(qwen_folder)
    images = Qwen2VLImageProcessorPil.from_pretrained(qwen_folder)
    videos = TheirVideos(images)
    theirs = TheirQwen(images, tokenizer, videos, chat_template=folders.QWEN_TEMPLATE)
    return Processor.from_folder(qwen_folder), theirs


@pytest.fixture(scope="module")
def mllama(mllama_folder):
    tokenizer = transformers.AutoTokenizer.from_pretrained(mllama_folder)
    images = MllamaImageProcessorPil.from_pretrained(mllama_folder)
    theirs = transformers.MllamaProcessor(images, tokenizer, chat_template=folders.MLLAMA_TEMPLATE)
    return Processor.from_folder(mllama_folder), theirs


@pytest.fixture(scope="module")
def gemma3_folder(tmp_path_factory):
    size = {"height": 32, "width": 32}
    scan = dict(do_pan_and_scan=True, pan_and_scan_min_crop_size=16, pan_and_scan_max_num_crops=4)
    scan["pan_and_scan_min_ratio_to_activate"] = 1.2
    return folders.gemma3(tmp_path_factory.mktemp("gemma3"), size=size, **scan)


@pytest.fixture(scope="module")
def gemma3(gemma3_folder):
    tokenizer = transformers.AutoTokenizer.from_pretrained(gemma3_folder)
    images = Gemma3ImageProcessorPil.from_pretrained(gemma3_folder)
    theirs = transformers.Gemma3Processor(images, tokenizer, chat_template=folders.GEMMA3_TEMPLATE)
    return Processor.from_folder(gemma3_folder), TheirGemma3(theirs)


@pytest.fixture(scope="module")
def gemma4(tmp_path_factory):
    try:
        theirs_of = transformers.Gemma4Processor
    except ImportError:
        pytest.importorskip("torchvision", reason="this version of transformers has no Gemma4Processor without it")
        raise

    class TheirGemma4(theirs_of):
        """Without the check of classes, which needs a video processor and one of audio."""

        def check_argument_for_proper_class(self, name, argument):
            return type(argument)

    folder = folders.gemma4(tmp_path_factory.mktemp("gemma4"), patch_size=4, max_soft_tokens=70)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    images = Gemma4ImageProcessorPil(patch_size=4, max_soft_tokens=70)
    theirs = TheirGemma4(None, images, tokenizer, None, chat_template=folders.GEMMA4_TEMPLATE)
    return Processor.from_folder(folder), theirs


def same(actual, expected, names):
    assert set(actual) == set(names)
    for name in names:
        assert actual[name].dtype == expected[name].dtype, name
        assert torch.equal(actual[name], expected[name]), name


PAD = "<|vision_start|><|image_pad|><|vision_end|>"
CLIP = "<|vision_start|><|video_pad|><|vision_end|>"
IMAGE = "<|image|>"
OF_QWEN = {
    "batch": ([f"a {PAD}", f"{PAD}{PAD} are these two the same, do you think?"], [[DOG], [CAT, OWL]]),
    "some without": (["plain text, and more of it", f"x {PAD}", "short"], [[], [DOG], []]),
    "none": (["plain", "a longer plain text"], None),
}
START = "<start_of_image>"
BATCHES = {
    "gemma4": {
        "batch": ([f"a {IMAGE}", f"{IMAGE}\n\n{IMAGE}are these two the same?"], [[DOG], [CAT, OWL]]),
        "some without": (["plain text, and more of it", f"x\n{IMAGE}\n", "short"], [[], [DOG], []]),
        "none": (["plain", "a longer plain text"], None),
    },
    "gemma3": {
        "batch": ([f"a {START}", f"{START}\n\n{START}are these two the same?"], [[DOG], [CAT, OWL]]),
        "some without": (["plain text, and more of it", f"x\n{START}\n", "short"], [[], [DOG], []]),
        "none": (["plain", "a longer plain text"], None),
    },
    "qwen3": OF_QWEN,
    "qwen": OF_QWEN,
    "mllama": {
        "several": ([IMAGE + IMAGE + "The same? " + IMAGE + "No."], [[CAT, DOG, OWL]]),
        "batch": ([f"{IMAGE}a", f"Two: {IMAGE} and {IMAGE} here are they"], [[DOG], [CAT, OWL]]),
        "some without": (["plain text, and more of it than below", f"{IMAGE}{IMAGE}x", "short"], [[], [DOG, CAT], []]),
        "none": (["plain", "a longer plain text"], None),
        "BOS in the text": (["<|begin_of_text|>Here: " + IMAGE], [[CAT]]),
        "BOS after the image": ([IMAGE + "<|begin_of_text|>A haiku"], [[CAT]]),
    },
}
PIXELS = {
    "gemma4": ["pixel_values", "image_position_ids"],
    "gemma3": ["pixel_values"],
    "qwen3": ["pixel_values", "image_grid_thw"],
    "qwen": ["pixel_values", "image_grid_thw"],
    "mllama": ["pixel_values", "aspect_ratio_ids", "aspect_ratio_mask", "cross_attention_mask"],
}


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize(("family", "case"), [(family, case) for family, cases in BATCHES.items() for case in cases])
def test_inputs_are_those_of_transformers(family, case, side, request):
    ours, theirs = request.getfixturevalue(family)
    text, images = BATCHES[family][case]
    actual = ours(text, images, padding_side=side)
    if family not in ("mllama", "gemma3", "gemma4") and images is not None:
        images = [image for batch in images for image in batch]
    expected = theirs(text=list(text), images=images, padding=True, padding_side=side, return_tensors="pt")
    same(actual, expected, ["input_ids", "attention_mask", *(PIXELS[family] if images is not None else [])])
    if family == "mllama":
        assert (actual["input_ids"] == ours.tokenizer.bos_token_id).sum(1).tolist() == [1] * len(text)


def test_qwen_videos_and_images_in_one_batch(qwen):
    ours, theirs = qwen
    text = [f"{CLIP} and {PAD}", f"{PAD}{PAD}", f"{CLIP}{CLIP}!"]
    images, videos = [[CAT], [DOG, OWL], []], [[FILM], [], [FILM[:2], FILM[1:4]]]
    actual = ours(text, images, videos)
    flat = {"images": [CAT, DOG, OWL], "videos": [FILM, FILM[:2], FILM[1:4]]}
    # Their check of the layout wants videos as arrays.
    flat["videos"] = [np.stack([np.asarray(frame) for frame in video]) for video in flat["videos"]]
    expected = theirs(text=text, **flat, padding=True, padding_side="left", return_tensors="pt")
    names = ["input_ids", "attention_mask", "pixel_values", "image_grid_thw", "video_grid_thw"]
    video_pixels = actual.pop("pixel_values_videos")
    same(actual, expected, names)
    assert len(video_pixels) == expected["video_grid_thw"].prod(1).sum()


@pytest.mark.parametrize("fps", [None, 1.0, [24, 0.3, 2.5]])
def test_videos_of_qwen3_vl_have_times(qwen3, fps):
    """Where a text has the placeholder alone, transformers puts in what it was trained with."""
    ours, theirs = qwen3
    text = [f"{CLIP} and {PAD}", f"{PAD}{PAD}", f"a film:{CLIP}{CLIP}!"]
    images, videos = [[CAT], [DOG, OWL], []], [[FILM], [], [FILM[:2], FILM[1:4]]]
    actual = ours(text, images, videos, fps=fps)
    flat = [np.stack([np.asarray(frame) for frame in video]) for video in (FILM, FILM[:2], FILM[1:4])]
    options = dict(padding=True, padding_side="left", return_tensors="pt", videos_kwargs={"fps": fps or 2.0})
    alone = [one.replace(CLIP, "<|video_pad|>") for one in text]
    expected = theirs(text=alone, images=[CAT, DOG, OWL], videos=flat, **options)
    names = ["input_ids", "attention_mask", "pixel_values", "image_grid_thw", "pixel_values_videos", "video_grid_thw"]
    same(actual, expected, names)
    same(ours(alone, images, videos, fps=fps), actual, names)
    written = ours.tokenizer.decode(actual["input_ids"][0], skip_special_tokens=False)
    if fps is None:
        assert [part[:13] for part in written.split("<")[1:] if "seconds" in part] == [
            "0.2 seconds>", "1.2 seconds>", "2.0 seconds>"
        ]  # fmt: skip


def asked(*parts):
    return [{"role": "user", "content": list(parts)}]


def text(content):
    return {"type": "text", "text": content}


CHATS = {
    "turns": [
        {"role": "system", "content": "Be kind."},
        *asked({"type": "image", "image": CAT}, {"type": "image", "image": DOG}, text("Which is the dog?")),
        {"role": "assistant", "content": [text("The second.")]},
        *asked(text("And this?"), {"type": "image", "image": OWL}),
    ],
    "plain": [{"role": "user", "content": "Hi"}],
}


@pytest.mark.parametrize("family", ["qwen", "qwen3", "mllama", "gemma3", "gemma4"])
@pytest.mark.parametrize("case", CHATS)
def test_conversations_are_those_of_transformers(family, case, request):
    ours, theirs = request.getfixturevalue(family)
    chat = CHATS[case]
    before = json.dumps(chat, default=str)
    options = {"add_generation_prompt": True, "tokenize": False}
    assert ours.apply_chat_template(chat, **options) == theirs.apply_chat_template(json_copy(chat), **options)
    expected = theirs.apply_chat_template(
        json_copy(chat), add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
    )
    for name in ("mm_token_type_ids", "token_type_ids"):
        expected.pop(name, None)
    actual = ours.apply_chat_template(chat, add_generation_prompt=True, return_dict=True, return_tensors="pt")
    same(actual, expected, list(expected))
    assert json.dumps(chat, default=str) == before


def json_copy(chat):
    """transformers changes what it is given."""
    return [
        {**turn, "content": list(turn["content"]) if isinstance(turn["content"], list) else turn["content"]}
        for turn in chat
    ]


def test_images_in_every_form_of_a_part(qwen, tmp_path):
    ours, _ = qwen
    file = io.BytesIO()
    CAT.save(file, "PNG")
    (tmp_path / "cat.png").write_bytes(file.getvalue())
    code = base64.b64encode(file.getvalue()).decode()
    expected = ours.apply_chat_template(asked({"type": "image", "image": CAT}))
    parts = [
        {"type": "image", "path": tmp_path / "cat.png"},
        {"type": "image", "base64": code},
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{code}"}},
        {"type": "image", "image": CAT, "text": None, "video": None},
    ]
    for part in parts:
        same(ours.apply_chat_template(asked(part)), expected, list(expected))
    row = {"type": "text", "text": "Hi", "image": None}  # as a table of parts holds it
    assert "image_pad" not in ours.apply_chat_template(asked(row), tokenize=False)
    bare = asked({"type": "image"})
    for images in (CAT, [CAT]):
        same(ours.apply_chat_template(bare, images), expected, list(expected))


def test_images_nested_or_flat(qwen):
    ours, _ = qwen
    texts = [f"{PAD}{PAD}", "none", PAD]
    expected = ours(texts, [[CAT, DOG], [], [OWL]])
    same(ours(texts, [CAT, DOG, OWL]), expected, list(expected))
    assert set(ours(["a", "b"], [[], []], [])) == {"input_ids", "attention_mask"}


TWICE = asked({"type": "image", "image": CAT, "path": "x"})
REFUSED = {
    "none given": (
        lambda qwen, _: qwen(PAD),
        r"have \[1\] <\|image_pad\|>, but \[0\] images are given; each image needs",
    ),
    "videos": (lambda qwen, _: qwen(CLIP + CLIP, None, [FILM]), r"\[2\] <\|video_pad\|>, but \[1\] videos"),
    "video file": (lambda qwen, _: qwen(CLIP, None, "film.mp4"), "Video files are not decoded"),
    "videos of mllama": (lambda _, mllama: mllama("a", None, [FILM]), "this model takes no videos"),
    "times": (lambda qwen, _: qwen(CLIP, None, [FILM], fps=2), "reads no times of frames"),
    "bad image": (lambda qwen, _: qwen([PAD, PAD], [[CAT], ["x.png"]]), "image 0 of text 1: x.png is not there"),
    "two sources": (lambda qwen, _: qwen.apply_chat_template(TWICE), "image and path. Next step"),
    "both ways": (lambda qwen, _: qwen.apply_chat_template(CHATS["turns"], [CAT]), "the messages have images too"),
    "lists of ids": (lambda qwen, _: qwen.apply_chat_template(CHATS["turns"], return_dict=False), "return_dict True"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit(case, qwen, mllama):
    call, message = REFUSED[case]
    with pytest.raises(InputError, match=message):
        call(qwen[0], mllama[0])


@pytest.mark.parametrize(
    "name", ["qwen3_vl", "qwen3_5_think", "qwen3_5_nothink", "qwen3_6", "qwen3_8", "qwen3_vl_training"]
)
def test_released_templates_have_places_for_images(qwen3, name):
    trl = pytest.importorskip("trl")
    template = (Path(trl.__file__).parent / "chat_templates" / f"{name}.jinja").read_text()
    ours, theirs = qwen3
    film = {"type": "video", "video": FILM}
    chat = [*CHATS["turns"], {"role": "assistant", "content": "A bird."}, *asked(film, text("And this?"))]
    options = dict(chat_template=template, add_generation_prompt=True, tokenize=False)
    written = ours.apply_chat_template(chat, **options)
    assert written == theirs.apply_chat_template(json_copy(chat), **options)
    assert written.count(PAD) == 3 and written.count(CLIP) == 1
    inputs = ours.apply_chat_template(chat, chat_template=template, add_generation_prompt=True)
    assert len(inputs["image_grid_thw"]) == 3 and inputs["video_grid_thw"].tolist()[0][0] == 3


def test_files_as_transformers_5_saves_them(qwen3, tmp_path):
    """With `do_sample_frames`, which does nothing here: frames are taken as they are given."""
    ours, theirs = qwen3
    video = json.loads((ours.tokenizer.files.folder / "video_preprocessor_config.json").read_text())
    nested = {"image_processor": theirs.image_processor.to_dict(), "processor_class": "Qwen3VLProcessor"}
    nested["video_processor"] = video | {"do_sample_frames": True, "fps": 2, "max_frames": 768, "min_frames": 4}
    (tmp_path / "processor_config.json").write_text(json.dumps(nested))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_5"}))
    theirs.tokenizer.save_pretrained(tmp_path)
    again = Processor.from_folder(tmp_path)
    assert again.image_processor == ours.image_processor and again.video_processor == ours.video_processor


@pytest.mark.parametrize("fps", [0, "2", [1.0, 2.0]])
def test_rates_that_are_none(qwen3, fps):
    with pytest.raises(InputError, match="fps must be a positive number, or one for each of 1 videos"):
        qwen3[0](CLIP, None, [FILM], fps=fps)


@pytest.mark.parametrize("family", ["qwen", "mllama", "gemma3"])
def test_both_generations_of_files(family, request, tmp_path):
    """processor_config.json as transformers 5 saves it gives the same processor as the files of the Hub."""
    ours, theirs = request.getfixturevalue(family)
    if family == "qwen":
        nested = {"image_processor": theirs.image_processor.to_dict(), "processor_class": "Qwen2VLProcessor"}
        nested["video_processor"] = {
            "video_processor_type": "Qwen2VLVideoProcessor",
            "size": {"longest_edge": 602112, "shortest_edge": 100352},
            "resample": 3, "do_sample_frames": False, "do_convert_rgb": True, "max_video_tokens": 128000,
        }  # fmt: skip
        (tmp_path / "processor_config.json").write_text(json.dumps(nested))
        theirs.tokenizer.save_pretrained(tmp_path)
        (tmp_path / "chat_template.jinja").write_text(folders.QWEN_TEMPLATE)
    else:
        theirs.save_pretrained(tmp_path)
    assert not (tmp_path / "preprocessor_config.json").exists()
    again = ligermodels.Processor.from_hub(str(tmp_path))
    assert again.image_processor == ours.image_processor
    written = ours.apply_chat_template(CHATS["turns"], tokenize=False)
    assert again.apply_chat_template(CHATS["turns"], tokenize=False) == written
    images = [[CAT, DOG, OWL]]
    same(again([written], images), ours([written], images), list(ours([written], images)))
    if family == "qwen":
        assert (again.video_processor.min_pixels, again.video_processor.max_pixels) == (100352, 602112)
        assert (ours.video_processor.min_pixels, ours.video_processor.max_pixels) == (784, 784 * 12)


@pytest.mark.parametrize("family", ["qwen", "mllama", "gemma3", "gemma4"])
def test_saved_folders_are_whole(family, request, tmp_path):
    ours = request.getfixturevalue(family)[0]
    ours.save(tmp_path)
    again = Processor.from_folder(tmp_path)
    assert again.image_processor == ours.image_processor
    expected = ours(ours.image_token, CAT)
    same(again(ours.image_token, CAT), expected, list(expected))
    again.save(tmp_path)  # over itself


@pytest.mark.parametrize("family", ["gemma3", "gemma4"])
def test_rows_with_images_that_cannot_be_trained_on_are_refused(family, request):
    ours = request.getfixturevalue(family)[0]
    with pytest.raises(InputError, match=rf"cannot be trained on with a {type(ours.image_processor).__name__} yet"):
        add(ours.image_token, [1], [CAT], ours)


def test_bad_folders(qwen_folder, tmp_path):
    shutil.copytree(qwen_folder, tmp_path / "q")
    folders.write(tmp_path / "q", "config.json", {"model_type": "mllama"})
    with pytest.raises(ConfigError, match=r"Qwen2VLImageProcessor.*'mllama'"):
        Processor.from_folder(tmp_path / "q")
    (tmp_path / "q" / "preprocessor_config.json").unlink()
    with pytest.raises(ConfigError, match=r"has no preprocessor_config\.json and no"):
        Processor.from_folder(tmp_path / "q")


def test_inputs_move_and_only_pixels_change_their_dtype(qwen):
    inputs = qwen[0](PAD, CAT)
    moved = inputs.to("meta", torch.bfloat16)
    assert type(moved) is type(inputs) and set(moved) == set(inputs)
    assert {name for name, x in moved.items() if x.dtype == torch.bfloat16} == {"pixel_values"}
    assert {name for name, x in moved.items() if x.device.type == "cpu"} == {"image_grid_thw"}  # read by the host
    assert all(x.device.type == "cpu" for x in inputs.values())
