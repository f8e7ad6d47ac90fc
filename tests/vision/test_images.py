"""VisionInputs of every origin, good and bad: right, or an InputError that says what, where, why and what to do."""

import base64
import io
import os
import random
import re
import struct
import time
import warnings
import zlib

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


def chunk(kind, data):
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(width, height, *chunks, depth=8, colour=2):
    """A PNG file with the size that it claims and the chunks given, as no encoder would write it."""
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + b"".join(chunks) + chunk(b"IEND", b"")


def bmp(width, height):
    return b"BM" + struct.pack("<IHHIIiiHHIIiiII", 54, 0, 0, 54, 40, width, height, 1, 24, 0, 0, 0, 0, 0, 0)


def gif(width, height):
    size = struct.pack("<HH", width, height)
    return b"GIF89a" + size + bytes(3) + b"," + bytes(4) + size + bytes(1) + b"\x02\x02\x4c\x01\x00;"


def pixels(image):
    return np.asarray(image).tolist()


PICTURE = draw(40, 60)
PNG, JPEG, TIFF = (encoded(PICTURE, form) for form in ("PNG", "JPEG", "TIFF"))
NEXT = "fetch it again, or save it anew"
BAD_FILES = {
    "empty": (b"", "is not an image that can be read: it is empty"),
    "text": (b"not an image\n", "it is text"),
    "HTML page": (b"<!DOCTYPE html><title>404</title>", "it is an HTML page"),
    "git-lfs pointer": (b"version https://git-lfs.github.com/spec/v1\n", "run `git lfs pull`"),
    "SVG": (b'<?xml version="1.0"?>\n<svg width="4">', "SVG drawing: render it"),
    "PDF": (b"%PDF-1.7\n\x80", "PDF or PostScript"),
    "EPS": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n\x80", "PDF or PostScript"),
    "MP4": (b"\x00\x00\x00\x20ftypisom\x00\x00\x02\x00", "it is a video: decode it and pass a list of frames"),
    "HEIC": (b"\x00\x00\x00\x20ftypheic\x00\x00\x00\x00", "pillow-heif"),
    "random bytes": (bytes(range(128, 256)), "its first bytes are"),
    "PNG without data": (png(8, 8), NEXT),
    "PNG header only": (PNG[:20], "header is damaged or cut off|is damaged"),
    "PNG cut off": (PNG[: len(PNG) // 2], NEXT),
    "PNG with wrong data": (png(8, 8, chunk(b"IDAT", b"\x00" * 99)), NEXT),
    "PNG of no width": (png(0, 8, chunk(b"IDAT", zlib.compress(b""))), "is empty|is damaged|can be read"),
    "PNG bomb": (png(60_000, 60_000, chunk(b"IDAT", b"")), "Nothing was decoded.*PIL.Image.MAX_IMAGE_PIXELS"),
    "PNG text bomb": (
        png(8, 8, chunk(b"zTXt", b"a\x00\x00" + zlib.compress(b"\x00" * 2**27)), chunk(b"IDAT", b"")), NEXT),
    "BMP bomb": (bmp(2**30, 2**30), "Nothing was decoded"),
    "GIF bomb": (gif(65535, 65535), "Nothing was decoded"),
    "JPEG cut off": (JPEG[: len(JPEG) // 2], NEXT),
    "JPEG header only": (JPEG[:4], "header is damaged or cut off|is damaged"),
    "WEBP cut off": (encoded(PICTURE, "WEBP")[:60], "header is damaged or cut off|is damaged"),
    "GIF header cut off": (encoded(PICTURE, "GIF")[:200], "header is damaged or cut off: fetch it again"),
    "GIF cut off": (encoded(PICTURE, "GIF")[:-200], NEXT),
    "TIFF cut off": (TIFF[:200], "header is damaged or cut off|is damaged"),
    "TIFF that claims more": (
        TIFF.replace(struct.pack("<HHII", 257, 4, 1, 40), struct.pack("<HHII", 257, 4, 1, 41)), "60 x 40 of 60 x 41"),
    "floats": (encoded(Image.new("F", (4, 4)), "TIFF"), "has float pixels, and how they become red"),
    "32 bits": (encoded(Image.new("I", (4, 4), 2**30), "TIFF"), "has 32-bit pixels, and how"),
}  # fmt: skip


@pytest.mark.parametrize("form", ["path", "bytes", "file"])
@pytest.mark.parametrize("case", BAD_FILES)
def test_bad_files(case, form, tmp_path):
    data, message = BAD_FILES[case]
    path = tmp_path / "the image.png"
    path.write_bytes(data)
    source = {"path": path, "bytes": data, "file": io.BytesIO(data)}[form]
    start = time.process_time()
    with pytest.raises(InputError, match=f"(?s)({message})") as caught:
        load_image(source)
    assert time.process_time() - start < 5
    named = {"path": "the image.png", "bytes": f"the image of {len(data):,} bytes", "file": "the file BytesIO"}
    assert named[form] in str(caught.value)


def test_whatever_the_damage_a_picture_or_an_input_error():
    forms = ("PNG", "JPEG", "GIF", "BMP", "TIFF", "WEBP", "PPM", "TGA", "ICO", "JPEG2000")
    files = [encoded(draw(24, 24), form) for form in forms] + [encoded(draw(9, 9).convert("P"), "PNG")]
    generator, refused = random.Random(0), 0
    for _ in range(600):
        data = bytearray(generator.choice(files))
        if generator.random() < 0.3:
            del data[generator.randrange(len(data)) :]
        for _ in range(generator.choice((1, 2, 5, 20)) if data else 0):
            reach = min(len(data), generator.choice((40, 200, len(data))))
            data[generator.randrange(reach)] = generator.choice((0, 127, 128, 255, generator.randrange(256)))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                assert load_image(bytes(data)).mode == "RGB"
            except InputError:
                refused += 1
    assert 200 < refused < 600


class Endless:
    def read(self, size):
        return b"\x00" * min(size, 2**20)


BAD_SOURCES = {
    "missing": ("nowhere/cat.png", r"nowhere/cat\.png is not there; an image must be a file \(working folder: /"),
    "folder": (".", r"\. is a folder"),
    "device": ("/dev/zero", "/dev/zero is not a regular file"),
    "name that is none": ("a\0b", r"'a\\x00b' is not a path"),
    "name too long": ("a" * 5000, "is not a path|is not there"),
    "URL": ("https://example.com/cat.png", r"is a URL, and nothing is fetched.*urlopen"),
    "bucket": ("s3://bucket/cat.png", "is a URL"),
    "data URI that is none": ("data:image/png,abc", "has no ';base64,'"),
    "data URI cut off": ("data:image/png;base64,iVBORw0KGgo", "Is it cut off|is not an image that can be read"),
    "None": (None, "an image must be a path, .* not NoneType"),
    "list": ([1, 2], "not list"),
    "text file": (io.StringIO("text"), "the stream gives str, not bytes"),
    "float array": (np.zeros((4, 4, 3)), r"must be uint8, 0 to 255; this one is float64 \(4, 4, 3\)"),
    "bool array": (np.zeros((4, 4, 3), dtype=bool), "must be uint8"),
    "array channels first": (np.zeros((3, 40, 40), dtype=np.uint8), r"must be \[H, W, channels\].*other side"),
    "array of several": (np.zeros((2, 4, 4, 3), dtype=np.uint8), "several images in one: pass a list"),
    "empty array": (np.zeros((0, 4, 3), dtype=np.uint8), r"is empty: its shape is \(0, 4, 3\)"),
    "float tensor": (torch.zeros(3, 4, 4), r"this one is torch.float32 \(3, 4, 4\)"),
    "tensor channels last": (torch.zeros(40, 40, 3, dtype=torch.uint8), r"must be \[channels, H, W\]"),
    "empty tensor": (torch.zeros(3, 4, 0, dtype=torch.uint8), "is empty"),
    "PIL image of no size": (Image.new("RGB", (0, 5)), r"the PIL image \(no file, RGB\) is empty: it is 0 x 5 pixels"),
    "PIL image of floats": (Image.new("F", (4, 4)), "float pixels"),
    "PIL image in LAB": (Image.new("LAB", (4, 4)), "pixels in LAB.*Next step: convert it"),
}


@pytest.mark.parametrize("case", BAD_SOURCES)
def test_bad_sources(case):
    source, message = BAD_SOURCES[case]
    start = time.process_time()
    with pytest.raises(InputError, match=f"(?s){message}") as caught:
        load_image(source)
    assert time.process_time() - start < 5
    assert len(str(caught.value)) < 700


def test_a_pipe_is_refused_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(InputError, match="pipe is not a regular file"):
        load_image(tmp_path / "pipe")


def test_an_endless_stream(monkeypatch):
    monkeypatch.setattr("ligermodels.vision.images.MAX_STREAM_BYTES", 2**20 - 1)
    with pytest.raises(InputError, match="more than 1,048,575 bytes"):
        load_image(Endless())


def test_a_file_that_may_not_be_read(tmp_path):
    path = tmp_path / "secret.png"
    path.write_bytes(PNG)
    path.chmod(0)
    if os.access(path, os.R_OK):
        pytest.skip("this user may read everything")
    with pytest.raises(InputError, match=r"secret\.png cannot be read: Permission denied"):
        load_image(path)


def test_the_limit_of_a_bomb_is_pillows(monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)
    with pytest.raises(InputError, match="Nothing was decoded"):
        load_image(PNG)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 2400)
    assert load_image(PNG).size == (60, 40)


# --- Good ones --------------------------------------------------------------------------------------------------


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
    with path.open("rb") as file, Image.open(path) as opened:
        for source in [*sources, uri, file, opened, PICTURE]:
            image = load_image(source)
            assert image.mode == "RGB" and pixels(image) == pixels(PICTURE), type(source)


@pytest.mark.parametrize("form", ["PNG", "BMP", "TIFF", "PPM", "TGA", "WEBP", "ICO", "JPEG2000"])
def test_formats(form):
    image = draw(32, 32)
    options = {"WEBP": {"lossless": True}, "ICO": {"sizes": [(32, 32)]}}.get(form, {})
    assert pixels(load_image(encoded(image, form, **options))) == pixels(image)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_the_orientation_of_a_camera(orientation, tmp_path):
    exif = Image.Exif()
    exif[0x0112] = orientation
    (tmp_path / "photo.jpg").write_bytes(encoded(PICTURE, "JPEG", exif=exif, quality=95))
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
    for mode in ("RGBa", "PA"):
        converted = load_image(image.convert(mode))
        assert pixels(converted)[0][1] == [255, 255, 255] and pixels(converted)[0][0] != [255, 255, 255], mode
    palette = Image.new("P", (2, 1))
    palette.putpalette([9, 8, 7, 1, 2, 3])
    palette.putpixel((1, 0), 1)
    assert pixels(load_image(encoded(palette, transparency=1))) == [[[9, 8, 7], [255, 255, 255]]]
    assert pixels(load_image(encoded(palette, "GIF", transparency=0))) == [[[255, 255, 255], [1, 2, 3]]]


@pytest.mark.parametrize("mode", ["1", "L", "P", "CMYK", "YCbCr", "HSV"])
def test_other_modes(mode):
    image = PICTURE.convert(mode)
    assert pixels(load_image(image)) == pixels(image.convert("RGB"))


def test_cmyk_of_a_jpeg(tmp_path):
    (tmp_path / "print.jpg").write_bytes(encoded(PICTURE.convert("CMYK"), "JPEG", quality=95))
    assert pixels(load_image(tmp_path / "print.jpg")) == pixels(their_load_image(str(tmp_path / "print.jpg")))
    difference = np.asarray(load_image(tmp_path / "print.jpg"), dtype=float) - np.asarray(PICTURE)
    assert abs(difference).mean() < 20  # right way round: inverted it would be above 80


@pytest.mark.parametrize("form", ["PNG", "TIFF", "PPM"])
def test_sixteen_bits_keep_their_range(form):
    values = np.array([[0, 255, 256, 32767, 65535]], dtype=np.uint16)
    image = load_image(encoded(Image.fromarray(values), form))
    assert pixels(image) == [[[value] * 3 for value in (0, 0, 1, 127, 255)]]


@pytest.mark.parametrize("form", ["GIF", "PNG", "WEBP", "TIFF"])
def test_of_an_animation_the_first_picture_with_a_warning(form, tmp_path):
    frames = [Image.new("RGB", (8, 8), colour) for colour in ("red", "lime", "blue")]
    options = {"lossless": True} if form == "WEBP" else {}
    path = tmp_path / "moving"
    path.write_bytes(encoded(frames[0], form, save_all=True, append_images=frames[1:], **options))
    with pytest.warns(UserWarning, match="moving holds several images: the first is taken"):
        image = load_image(path)
    assert set(image.get_flattened_data() if hasattr(image, "get_flattened_data") else image.getdata()) == {(255, 0, 0)}
    with Image.open(path) as opened, warnings.catch_warnings():
        warnings.simplefilter("error")
        opened.seek(2)
        assert pixels(load_image(opened))[0][0] == [0, 0, 255]  # the frame that the caller chose


def test_a_pil_image_whose_file_is_cut_off():
    opened = Image.open(io.BytesIO(PNG[: len(PNG) // 2]))
    with pytest.raises(InputError, match=r"the PIL image \(PNG, RGB\) is damaged: OSError: image file is truncated"):
        load_image(opened)


@pytest.mark.filterwarnings("ignore:Corrupt EXIF:UserWarning")
def test_a_note_of_the_orientation_that_is_garbage_is_passed_over():
    data = encoded(PICTURE, "JPEG", exif=b"Exif\x00\x00II*\x00\x08\x00\x00\x00\xff\xff" + b"\x12\x01" * 40)
    assert load_image(data).size == (60, 40)
    assert load_image(encoded(PICTURE, "JPEG", exif=b"Exif\x00\x00garbage")).size == (60, 40)


def test_a_photograph_with_previews_is_no_animation(tmp_path, recwarn):
    data = encoded(PICTURE, "MPO", save_all=True, append_images=[draw(20, 30)])
    assert load_image(data).size == (60, 40)
    assert not recwarn


def test_the_picture_of_the_caller_stays_as_it_is():
    image = draw(8, 8).convert("RGBA")
    before = image.copy()
    load_image(image)
    assert image.mode == "RGBA" and pixels(image) == pixels(before)
    array = np.asarray(PICTURE).copy()
    loaded = load_image(array)
    array[:] = 0
    assert pixels(loaded) == pixels(PICTURE)


def test_pillow_that_is_not_there():
    import subprocess
    import sys

    code = "import sys; sys.modules['PIL'] = None\nimport ligermodels\nligermodels.Processor"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode and re.search(r"needs pillow.*pip install 'ligermodels\[vision\]'", done.stderr)
