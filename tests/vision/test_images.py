"""Images of every origin: the right pixels, or an InputError that says what is wrong and what to do."""

import base64
import io
import re
import subprocess
import sys

import numpy as np
import pytest
import torch
from PIL import Image
from transformers.image_utils import load_image as their_load_image

from ligermodels.errors import InputError
from ligermodels.vision import load_image
from tests.vision.folders import draw


def encoded(image, form="PNG", **options):
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


def pixels(image):
    return np.asarray(image).tolist()


IMAGE = draw(40, 60)
PNG = encoded(IMAGE)
NEXT = "fetch it again, or save it with another program"
REFUSED = {
    "HTML page": (b"<!DOCTYPE html><title>404</title>", "it is an HTML page"),
    "git-lfs pointer": (b"version https://git-lfs.github.com/spec/v1\n", "run `git lfs pull`"),
    "MP4": (b"\x00\x00\x00\x20ftypisom\x00\x00\x02\x00", "it is a video: decode it and pass a list of frames"),
    "PNG cut off": (PNG[: len(PNG) // 2], "fetch it again, or save it with another program"),
    "missing": ("nowhere/cat.png", r"nowhere/cat\.png is not there; an image must be a file \(working folder: /"),
    "URL": ("https://example.com/cat.png", r"is a URL, and nothing is fetched.*urlopen"),
    "float array": (np.zeros((4, 4, 3)), r"must be uint8, 0 to 255; this one is float64 \(4, 4, 3\)"),
    "array channels first": (np.zeros((3, 40, 40), dtype=np.uint8), r"must be \[H, W, channels\].*other axis"),
    "tensor channels last": (torch.zeros(40, 40, 3, dtype=torch.uint8), r"must be \[channels, H, W\]"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case, tmp_path):
    source, message = REFUSED[case]
    sources = {type(source).__name__: source}
    if isinstance(source, bytes):
        (tmp_path / "the image.png").write_bytes(source)
        sources = {"the image.png": tmp_path / "the image.png", f"{len(source):,} bytes": source}
        sources["file BytesIO"] = io.BytesIO(source)
    for name, given in sources.items():
        with pytest.raises(InputError, match=f"(?s){message}") as caught:
            load_image(given)
        assert len(str(caught.value)) < 700 and (name in str(caught.value) or given is source)


def test_the_limit_of_a_bomb_is_pillows(monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)
    with pytest.raises(InputError, match=r"Nothing was decoded.*PIL.Image.MAX_IMAGE_PIXELS"):
        load_image(PNG)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 2400)
    assert load_image(PNG).size == (60, 40)


class Stream:
    """Cannot be rewound, as a response of the network."""

    def __init__(self, data):
        self.data = io.BytesIO(data)

    def read(self, size=-1):
        return self.data.read(size)


def test_every_form_of_one_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "a cat.png"
    path.write_bytes(PNG)
    read = io.BytesIO(PNG)
    read.read(7)
    uri = "data:image/png;base64," + base64.b64encode(PNG).decode()
    sources = [path, str(path), "a cat.png", path.as_uri(), PNG, bytearray(PNG), memoryview(PNG), read, Stream(PNG)]
    array = np.asarray(IMAGE)
    sources += [array, torch.from_numpy(array.copy()).permute(2, 0, 1), array[::-1][::-1]]
    with path.open("rb") as file, Image.open(path) as opened:
        for source in [*sources, uri, file, opened, IMAGE]:
            image = load_image(source)
            assert image.mode == "RGB" and pixels(image) == pixels(IMAGE), type(source)
    assert pixels(load_image(array[:, :, 0])) == pixels(Image.fromarray(array[:, :, 0]).convert("RGB"))


@pytest.mark.parametrize("orientation", [1, 3, 6])
def test_the_orientation_of_a_camera(orientation, tmp_path):
    exif = Image.Exif()
    exif[0x0112] = orientation
    (tmp_path / "photo.jpg").write_bytes(encoded(IMAGE, "JPEG", exif=exif, quality=95))
    expected = pixels(their_load_image(str(tmp_path / "photo.jpg")))
    assert pixels(load_image(tmp_path / "photo.jpg")) == expected
    with Image.open(tmp_path / "photo.jpg") as opened:
        assert pixels(load_image(opened)) == expected
    assert (len(expected) == 60) == (orientation > 4)


def test_transparency_lies_on_white():
    image = Image.new("RGBA", (3, 1))
    for place, colour in enumerate([(10, 20, 30, 255), (10, 20, 30, 0), (0, 0, 0, 128)]):
        image.putpixel((place, 0), colour)
    expected = [[[10, 20, 30], [255, 255, 255], [127, 127, 127]]]
    assert pixels(load_image(image)) == expected
    assert pixels(load_image(encoded(image))) == expected
    assert pixels(load_image(np.asarray(image))) == expected
    assert pixels(load_image(torch.from_numpy(np.array(image)).permute(2, 0, 1))) == expected


@pytest.mark.parametrize("form", ["PNG", "TIFF"])
def test_sixteen_bits_keep_their_range(form):
    values = np.array([[0, 255, 256, 32767, 65535]], dtype=np.uint16)
    image = load_image(encoded(Image.fromarray(values), form))
    assert pixels(image) == [[[value] * 3 for value in (0, 0, 1, 127, 255)]]


def test_pillow_that_is_not_there():
    code = "import sys; sys.modules['PIL'] = None\nimport ligermodels\nligermodels.Processor"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode and re.search(r"needs pillow.*pip install 'ligermodels\[vision\]'", done.stderr)
