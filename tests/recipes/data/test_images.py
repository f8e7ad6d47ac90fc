"""Images in training rows: ids, labels and pixels are those of our processor, and the loss of a batch that of its rows.

tests/vision compares processors with transformers', and tests/arch models.
"""

import base64
import json
import shutil

import pytest
import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file

import ligermodels
from ligermodels.errors import InputError
from ligermodels.recipes import find
from ligermodels.recipes.data.batches import Batches
from ligermodels.recipes.data.examples import IGNORED, best_fit, encode, packed_batch, show
from ligermodels.recipes.data.formats import read
from ligermodels.recipes.data.rows import open_rows
from ligermodels.text import Tokenizer
from tests.arch.suite import auto_class, save_as_released
from tests.recipes.runs import check_same, metrics, on_two, options_of, train
from tests.vision import folders, test_use

FAMILIES = ("qwen2_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe", "mllama")
NAMES = ("red.png", "wide.png", "deep/tall.png")


@pytest.fixture(scope="module", params=FAMILIES)
def home(request, tmp_path_factory):
    """model, a tiny checkpoint that transformers wrote, and images of three sizes beside it."""
    home = tmp_path_factory.mktemp(request.param)
    config = transformers.AutoConfig.for_model(**getattr(test_use, request.param)(home / "model"))
    torch.manual_seed(0)
    model = auto_class(config).from_config(config, dtype=torch.float32)
    for name, gate in model.named_parameters():
        if "gate" in name and gate.numel() == 1:
            torch.nn.init.constant_(gate, 0.7)
    save_as_released(model, home / "model")
    (home / "deep").mkdir()
    for number, (name, size) in enumerate(zip(NAMES, [(60, 60), (40, 100), (90, 50)], strict=True)):
        folders.draw(*size, seed=number).save(home / name)
    return home


@pytest.fixture
def encode_row(home):
    """encode_row(row): its example."""
    tokenizer = Tokenizer.from_folder(home / "model")
    return lambda row: encode(read(row), tokenizer)


def said(text):
    return {"role": "assistant", "content": text}


def asked(*parts):
    parts = [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]
    return {"role": "user", "content": parts}


def image(**source):
    return {"type": "image", **source}


HERE = image()
TWO = [asked("is", HERE, "like", HERE), said("a cat"), asked("why"), said("the cat sat")]
"""Of which `images` are red.png and deep/tall.png."""


def rows_of(home, *rows, name="data.jsonl"):
    (home / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return open_rows(home / name)


def batches_of(home, rows, length, *, skip_bad=False):
    """Batches of one row, in order."""
    options = options_of("sft", max_length=length, batch_tokens=length, skip_bad=skip_bad)
    recipe = find("sft")(options, Tokenizer.from_folder(home / "model"))
    return Batches(recipe, rows, shuffle=False, epochs=1)


def data_uri(path):
    return f"data:image/png;base64,{base64.b64encode(path.read_bytes()).decode()}"


def forms(home):
    """The same row as people write it."""
    red, tall = home / NAMES[0], home / NAMES[2]
    given = [NAMES[0], NAMES[2]]
    yield {"messages": TWO, "images": given}
    yield {"messages": TWO, "images": [str(red), {"path": NAMES[2]}]}
    for first, second in (
        (image(image=NAMES[0]), image(path=NAMES[2])),
        (image(url=f"file://{red}"), {"type": "image_url", "image_url": {"url": data_uri(tall)}}),
        (image(base64=base64.b64encode(red.read_bytes()).decode()), image(image=NAMES[2], path=None)),
    ):
        yield {"messages": [asked("is", first, "like", second), *TWO[1:]]}
    turns = [("human", "is<image>like<image>"), ("gpt", "a cat"), ("human", "why"), ("gpt", "the cat sat")]
    yield {"conversations": [{"from": who, "value": text} for who, text in turns], "images": given}
    history = [["is<image>like<image>", "a cat"]]
    yield {"instruction": "why", "output": "the cat sat", "history": history, "images": given}
    yield {"prompt": TWO[:3], "completion": TWO[3:], "images": given}
    yield {"messages": TWO, "images": [{"bytes": path.read_bytes(), "path": None} for path in (red, tall)]}


def test_every_form_of_a_row_is_what_the_processor_makes(home, encode_row):
    processor = ligermodels.Processor.from_folder(home / "model")

    def expected_of(messages, *names):
        return processor.apply_chat_template(messages, [home / name for name in names])

    whole = expected_of(TWO, NAMES[0], NAMES[2])
    end = "<|eot_id|>" if home.name.startswith("mllama") else "<|im_end|>"
    for number, row in enumerate(forms(home)):
        example = encode_row(row if number == 8 else rows_of(home, row)[0])
        batch = packed_batch([example])
        assert example.ids == whole["input_ids"][0].tolist(), row
        trained = [index if label != IGNORED else -1 for index, label in zip(example.ids, example.labels, strict=True)]
        text = "".join("#" if index < 0 else processor.tokenizer.decode([index]) for index in trained)
        runs = [run.strip() for run in text.split("#") if run]
        assert runs == ([f"a cat{end}"] if number != 7 else []) + [f"the cat sat{end}"]
        for name in set(whole) - {"input_ids", "attention_mask"}:
            torch.testing.assert_close(batch[name], whole[name], rtol=0, atol=0, msg=name)
    # Without a mark they stand before the first question, as TRL places them.
    row = {"messages": [{"role": "user", "content": "why"}, said("the cat")], "images": NAMES[:2]}
    expected = expected_of([asked(HERE, HERE, "why"), said("the cat")], *NAMES[:2])
    assert encode_row(rows_of(home, row)[0]).ids == expected["input_ids"][0].tolist()


def mixed(home):
    """Rows with two images, with none, with one in the answer, and with one."""
    answer = {"role": "assistant", "content": [image(image=NAMES[0]), {"type": "text", "text": "dog"}]}
    return rows_of(
        home,
        {"messages": TWO, "images": [NAMES[0], NAMES[2]]},
        {"messages": [{"role": "user", "content": "why"}, said("the cat")]},
        {"messages": [asked("draw", image(image=NAMES[1])), answer]},
        {"messages": [asked(image(image=NAMES[1]), "why"), said("a dog")]},
    )


def test_a_batch_has_the_losses_of_its_rows(home, encode_row):
    rows = mixed(home)
    examples = [encode_row(rows[n]) for n in range(4)]
    token = examples[0].images.token
    assert all(label == IGNORED for e in examples for i, label in zip(e.ids, e.labels, strict=True) if i == token)
    batches = best_fit([example.space for example in examples], 10_000)
    assert len(batches) == (4 if home.name.startswith("mllama") else 1)  # each with images is alone
    model, one = ligermodels.load(home / "model", progress=False), torch.tensor(1.0)
    batches = [packed_batch([examples[n] for n in batch]) for batch in batches]
    loss = sum(model(**batch, num_items_in_batch=one).loss for batch in batches)
    expected = 0.0
    for example in examples:
        alone = {k: x for k, x in packed_batch([example]).items() if k not in ("labels", "cu_seqlens", "max_seqlen")}
        labels = torch.tensor(example.labels[1:])
        expected += F.cross_entropy(model(**alone).logits[0, :-1], labels, ignore_index=IGNORED, reduction="sum").item()
    assert loss.item() == pytest.approx(expected, rel=2e-5)


def test_what_is_wrong_with_an_image_is_said_with_file_and_line(home):
    good = (home / NAMES[0]).read_bytes()
    (home / "cut.png").write_bytes(good[: len(good) // 2])
    (home / "page.png").write_text("<!doctype html><p>not found")
    ok = {"messages": [asked(HERE, "why"), said("a cat")], "images": [NAMES[0]]}
    question = ok["messages"]
    for wrong, message in (
        (ok | {"images": ["gone.png"]}, r"gone.png is not there"),
        (ok | {"images": ["cut.png"]}, "cut.png is damaged"),
        (ok | {"images": ["page.png"]}, "page.png is not an image that can be read: it is an HTML page"),
        (ok | {"images": ["http://somewhere/a.png"]}, "is a URL, and nothing is fetched"),
        (ok | {"images": NAMES[:2]}, "there are 2, and the messages have places for 1"),
        ({"messages": question}, "there are 0, and the messages have places for 1"),
        ({"messages": [asked(image(image=NAMES[0])), said("x")], "images": [NAMES[0]]}, "Give them in one place"),
        ({"messages": [asked(HERE, "<|image_pad|><|image|>"), said("x")], "images": [NAMES[0]]}, r"texts have \[2\]"),
        ({"messages": [asked(image(video="x")), said("x")]}, "a part of the messages|places"),
    ):
        rows = rows_of(home, ok, wrong)
        with pytest.raises(InputError, match=rf"data.jsonl:2: .*{message}"):
            list(batches_of(home, rows, 400))
        batches = batches_of(home, rows, 400, skip_bad=True)
        assert sum(map(len, batches)) == 1 and batches.counts.numbers["bad"] == 1


def test_a_cut_goes_through_no_image(home, encode_row):
    rows = rows_of(home, {"messages": [asked("a cat " * 20, image(image=NAMES[1]), "why"), said("x")]})
    with pytest.raises(InputError, match=r"data.jsonl:1: .* would cut its images.* a larger --max-length"):
        next(batches_of(home, rows, 24))
    long, short = ({"messages": [asked(image(image=NAMES[0]), "why"), said("a cat " * n)]} for n in (30, 1))
    rows = rows_of(home, long, short)
    whole = encode_row(rows[0])
    (example,) = next(batches_of(home, rows, len(whole.ids) - 9))
    batch = packed_batch([example])
    assert example.ids == whole.ids[:-9] and "pixel_values" in batch
    assert batch.get("cross_attention_mask", batch["input_ids"]).shape[1] == example.size


def test_rows_with_images_need_a_model_that_takes_them(home, encode_row, tmp_path):
    (tmp_path / "text").mkdir()
    for path in (home / "model").glob("tokenizer*"):
        (tmp_path / "text" / path.name).write_bytes(path.read_bytes())
    (tmp_path / "text" / "chat_template.jinja").write_text(folders.QWEN_TEMPLATE)
    rows = mixed(home)
    with pytest.raises(InputError, match="the row has images, and the model takes none"):
        encode(read(rows[0]), Tokenizer.from_folder(tmp_path / "text"))
    pairs = rows_of(home, {"chosen": TWO[:2], "rejected": [TWO[0], said("x")], "images": list(NAMES[:2])})
    with pytest.raises(InputError, match="images: rows of pairs train on text only"):
        encode_row(pairs[0])


def test_show_counts_the_tokens_of_an_image(home, encode_row):
    example = encode_row(mixed(home)[0])
    text = show(example, Tokenizer.from_folder(home / "model"))
    assert len(text) < 900 and "[a cat<|" in text.replace("[ ", "[")
    if home.name.startswith("qwen"):
        sizes = example.images.tensors["image_grid_thw"].prod(1) // 4
        assert [f"<|image_pad|> x {size}" in text for size in sizes.tolist()] == [True, True]


@pytest.fixture
def home_of_texts(home, tmp_path):
    """A copy of the model, whose template is for texts too, and an image."""
    shutil.copytree(home / "model", tmp_path / "model")
    shutil.copy(home / NAMES[0], tmp_path)
    settings = tmp_path / "model" / "tokenizer_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"chat_template": folders.QWEN_TEMPLATE}))
    return tmp_path


@pytest.mark.parametrize("home", ["qwen3_5", "qwen3_5_moe"], indirect=True)
@pytest.mark.filterwarnings("ignore:qwen3_5(_moe)?. only the text model is read")
def test_the_text_of_a_model_that_reads_images_trains_alone(home_of_texts):
    home = home_of_texts
    rows_of(home, {"messages": [{"role": "user", "content": "why"}, said("a cat")]}, name="texts.jsonl")
    flags = ["--max-length", "64", "--accumulation", "1", "--max-steps", "2"]
    before = load_file(home / "model" / "model.safetensors")
    tower = {key for key in before if ".visual." in key}
    whole = json.loads((home / "model" / "config.json").read_text())["model_type"]
    for name, more, kind in (("whole", [], whole), ("text", ["--text-only"], f"{whole}_text")):
        assert train(home, name, *flags, *more, data="texts.jsonl") == 0
        after = load_file(home / name / "model" / "model.safetensors")
        assert json.loads((home / name / "model" / "config.json").read_text())["model_type"] == kind
        assert len(after) == len(before) - len(tower) * (name == "text")
        assert name == "text" or all(torch.equal(after[key], before[key]) for key in tower)


@pytest.mark.parametrize("home", ["qwen3_5"], indirect=True)
def test_weight_decay_on_two_processes_is_that_of_one(home_of_texts):
    """Of four steps some have no image, in which what reads images has no gradient and stays. Texts are evaluated, and
    an image."""
    home = home_of_texts
    picture = {"messages": [asked(image(image=NAMES[0]), "What?"), said("a cat")]}
    texts = [{"messages": [{"role": "user", "content": "why"}, said(f"a {word}")]} for word in ("cat", "dog")]
    rows_of(home, *texts * 8, picture, *texts * 8, name="mixed.jsonl")
    rows_of(home, texts[0], picture, texts[1], name="evaluated.jsonl")
    flags = ["--max-length", "64", "--accumulation", "2", "--max-steps", "4", "--weight-decay", "0.5"]
    flags += ["--eval-steps", "2", "--eval-data", home / "evaluated.jsonl", "--learning-rate", "1e-2"]
    assert train(home, "one", *flags, data="mixed.jsonl") == 0
    assert metrics(home / "one", "eval_loss")[4] < metrics(home / "one", "eval_loss")[0]
    on_two(home, lambda: train(home, "two", *flags, data="mixed.jsonl"))
    check_same(home / "two", home / "one")


def test_images_of_a_data_set(home, encode_row, tmp_path):
    datasets = pytest.importorskip("datasets")
    messages = [{"role": "user", "content": "why"}, said("a cat")]
    expected = encode_row(rows_of(home, {"messages": messages, "images": [NAMES[0]]})[0])
    text = datasets.Value("string")
    features = {"messages": [{"role": text, "content": text}], "images": datasets.List(datasets.Image())}
    values = {"messages": [messages], "images": [[str(home / NAMES[0])]]}
    datasets.Dataset.from_dict(values, datasets.Features(features)).to_parquet(tmp_path / "rows.parquet")
    example = encode_row(open_rows(tmp_path / "rows.parquet")[0])
    assert example.ids == expected.ids
    assert torch.equal(example.images.tensors["pixel_values"], expected.images.tensors["pixel_values"])
