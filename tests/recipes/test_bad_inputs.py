"""`ligermodels train` on inputs that are wrong: an error that says what and where, and nothing half-written.

Beside what test_train_command.py refuses, and what the tests of rows, formats and masks do.
"""

import gzip
import json
import shutil

import pytest

from ligermodels.cli import main
from tests.recipes.runs import train

ROW = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
CHAT = json.dumps(ROW)


def said(role, text):
    return {"role": role, "content": text}


FILES = {  # name, content, what the error says
    "packed": ("a.jsonl.gz", gzip.compress(CHAT.encode()), "a.jsonl.gz is compressed, which allows no random access"),
    "utf-16": ("a.jsonl", CHAT.encode("utf-16"), "a.jsonl is UTF-16 or UTF-32. Next step: save it as UTF-8"),
    "latin-1": ("a.jsonl", CHAT.replace('"a"', '"\xe4"').encode("latin-1"), "a.jsonl:1: not UTF-8: 0xe4 is its byte"),
    "parquet of 0 bytes": ("a.parquet", "", "a.parquet is empty"),
    "parquet that is none": ("a.parquet", "PAR1", "a.parquet cannot be read"),
    "blank lines": ("a.jsonl", "\n \n\r\n", "a.jsonl has no rows"),
    "git-lfs": ("a.parquet", "version https://git-lfs.github.com/spec/v1\noid 0", "it is a git-lfs pointer; run"),
    "a page": ("a.jsonl", "<!DOCTYPE html>\n<title>404", "a.jsonl has no rows: it is an HTML page, saved instead of"),
    "json to read": ("a.jsonl", json.dumps(ROW, indent=2), "a.jsonl has its first object over several lines"),
    "nan": ("a.jsonl", '{"text": NaN}', "a.jsonl:1: text: expected a text, not nan"),
    "a list of texts": ("a.json", '["a", "b"]', "a.json: item 1: a row is a JSON object with keys, not str ('a')"),
    "null": ("a.jsonl", '{"prompt": "a", "completion": null}', "a.jsonl:1: completion is null; rows in the"),
    "rows under a key": ("a.json", '{"data": [{"text": "a"}]}', "a.json:1: no format has the keys ['data']"),
    "csv with more fields": ("a.csv", "prompt,completion\na,b,c\n", "a.csv:2: the row has 3 fields, the line of head"),
    "csv headers twice": ("a.csv", "text,text\na,b\n", "a.csv: the headers must be different names"),
    "images": ("a.jsonl", json.dumps({**ROW, "images": ["a.png"]}), "the row has images, and the model takes none"),
    "only masked": ("a.jsonl", '{"input_ids": [1, 2], "labels": [-100, -100]}', "1 of 1 rows have no token to train"),
    "shifted labels": ("a.jsonl", '{"input_ids": [1, 2], "labels": [2, 3]}', "Labels are not shifted; the model does"),
    "foreign ids": ("a.jsonl", '{"input_ids": [1, 999]}', "input_ids: 999 is not an id of the tokenizer, which has 26"),
    "negative ids": ("a.jsonl", '{"input_ids": [1, -2]}', "input_ids: -2 is not an id of the tokenizer"),
    "two formats": ("a.jsonl", f'{CHAT}\n{{"text": "a"}}', "a.jsonl:2: the row is in the format 'text', but "),
    "another role": ("a.jsonl", '{"conversations": [{"from": "humann", "value": "a"}]}', "'humann' is none"),
    "keys of sharegpt": ("a.jsonl", '{"messages": [{"from": "human", "value": "a"}]}', "from and value are the keys"),
    "assistant begins": ("a.jsonl", json.dumps({"messages": [said("assistant", "a")]}), "[0]: the first message"),
}  # fmt: skip
VALUES = {  # others are in test_options.WRONG
    "negative rate": (("--lr", "-1"), "learning_rate=-1: expected more than 0"),
    "seed beyond 64 bits": (("--seed", "9" * 20), f"seed={'9' * 20}: expected less than"),
    "near 4 bits": (("--quantize", "nf", "--lora", "4"), "quantize='nf': expected one of none, nf4; did you mean nf4?"),
    "merge alone": (("--merge",), "merge is given, but no rank of adapters: add --lora-r 16"),
}  # fmt: skip
FLAGS = {
    "rows of two tokens": (("--length", "2"), "16 of 16 rows have no token to train: in 0 there is none, in 16 no"),
    "template that is nowhere": (("--chat-template", "odd"), "chat_template=odd: there is no such file"),
    "template of bytes": (("--chat-template", "BYTES"), "bytes.jinja is not UTF-8"),
    "template with a syntax error": (("--chat-template", "SYNTAX"), "syntax.jinja, line 2: syntax error: "),
    "template with an error": (
        ("--chat-template", "UNDEFINED"), "undefined.jinja, line 3: UndefinedError: 'odd' is undefined. Next",
    ),
    "evaluation missing": (("--eval-data", "nowhere.jsonl"), "there is no file or folder nowhere.jsonl"),
    "targets": (
        ("--lora", "2", "--lora-target-modules", "q_proj,qproj"),
        "the model has no qproj; it has q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj",
    ),
    "out in a file": (("--out", "FILE/out"), "cannot be written, since "),
}  # fmt: skip
TEMPLATES = {
    "BYTES": b"\xff",
    "SYNTAX": b"{{ messages[0].content }}\n{% if %}",
    "UNDEFINED": b"{{ messages[0].content }}\n\n{{ odd.content }}",
}
YAML = {"twice": ("lr: 1\nlr: 2", "lr is there twice")}


def refused(capsys, out, words, *argv, expected=3):
    """Runs the command, whose error must say `words` and which must write nothing. expected: the exit status."""
    status = main([str(argument) for argument in ("train", "sft", *argv, "--show", "0", "--report-to", "none")])
    text = capsys.readouterr().err
    assert status == expected and words in text, text
    assert sum(line.startswith("error: ") for line in text.splitlines()) == 1 and "Traceback" not in text
    assert not out.exists()
    return text


@pytest.mark.parametrize("case", FILES)
def test_wrong_data(home, write, tmp_path, capsys, case):
    name, content, words = FILES[case]
    if case == "parquet that is none":
        pytest.importorskip("datasets")
    file = write(name, content)
    argv = (home / "model", "--data", file, "--out", tmp_path / "out", "--steps", "1")
    assert refused(capsys, tmp_path / "out", words, *argv).count("Parquet") == (case == "parquet that is none")


@pytest.mark.parametrize("case", [*VALUES, *FLAGS])
def test_wrong_flags(home, tmp_path, capsys, case):
    """Exit status 2 where a value is wrong by itself, 3 where it does not fit data, model or folder."""
    flags, words = {**VALUES, **FLAGS}[case]
    good = home / "chats.jsonl"
    for name, text in TEMPLATES.items():
        (tmp_path / f"{name.lower()}.jinja").write_bytes(text)
        flags = [flag.replace(name, str(tmp_path / f"{name.lower()}.jinja")) for flag in flags]
    flags = [flag.replace("FILE", str(good)) for flag in flags]
    status = 2 if case in VALUES else 3
    argv = (home / "model", "--data", good, "--out", tmp_path / "out", *flags)
    said = refused(capsys, tmp_path / "out", words, *argv, expected=status)
    assert "--skip-bad" not in said
    assert ("chats.jsonl:" in said) == (case in ("rows of two tokens", "template with an error"))


@pytest.mark.parametrize("case", YAML)
def test_wrong_files_of_options(home, write, tmp_path, capsys, case):
    text, words = YAML[case]
    argv = (home / "model", "--data", home / "chats.jsonl", "--out", tmp_path / "out")
    refused(capsys, tmp_path / "out", words, *argv, "--config", write("options.yaml", text), expected=2)


def test_a_resume_that_is_refused_keeps_the_options(home, tmp_path, capsys):
    out = tmp_path / "out"
    assert train(home, out, "--length", "64", "--steps", "2") == 0
    before = (out / "options.yaml").read_text()
    assert train(home, out, "--length", "64", "--steps", "1", "--resume") == 3
    assert "has a checkpoint after step 2, and this run is to have 1" in capsys.readouterr().err
    assert (out / "options.yaml").read_text() == before
    assert train(home, out, "--length", "64", "--steps", "1", "--resume", recipe="pretrain", data="texts.jsonl") == 3
    assert "options.yaml is of `train sft`, and this is `train pretrain`" in capsys.readouterr().err
    assert (out / "options.yaml").read_text() == before
    assert train(home, out, "--length", "64", "--steps", "3", "--lr", "0.5", "--resume") == 0
    assert "changed since the run began: max_steps 2 -> 3, learning_rate default -> 0.5\n" in capsys.readouterr().err
    assert "max_steps: 3" in (out / "options.yaml").read_text()
    assert train(home, out, "--length", "64", "--steps", "3", "--lr", "0.5", "--resume") == 0
    said = capsys.readouterr().err
    assert "resumed after step 3\n" in said and "changed since" not in said and "has no run" not in said


def test_resuming_where_nothing_is_says_that_a_run_begins(home, tmp_path, capsys):
    assert train(home, tmp_path / "new", "--length", "64", "--steps", "1", "--resume") == 0
    assert capsys.readouterr().err.startswith(f"warning: --resume, but {tmp_path / 'new'} has no run: a new one begins")


def edited(file, **changes):
    values = json.loads(file.read_text())
    file.write_text(json.dumps({key: x for key, x in {**values, **changes}.items() if x is not None}))


def change_template(text):
    return lambda folder: edited(folder / "tokenizer_config.json", chat_template=text)


def cut(file):
    file.write_bytes(file.read_bytes()[:1000])


PLAIN = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
MODELS = {
    "no template": (change_template(None), "has no chat template, and rows of messages need one. Likely: a base model"),
    "broken template": (change_template("{{ messages"), "the chat template 'default' of"),
    "template that refuses": (change_template("{{ raise_exception('no') }}"), "refuses these messages: no"),
    "turns without an end": (change_template(PLAIN), "none of 16 rows trains a token that stops the model"),
    "no tokenizer": (lambda folder: (folder / "tokenizer.json").unlink(), "has neither tokenizer.json nor"),
    "few ids": (lambda folder: edited(folder / "config.json", vocab_size=99), "embedding 99 rows"),
    "unknown kind": (lambda folder: edited(folder / "config.json", model_type="odd"), "model_type 'odd'"),
    "broken config": (lambda folder: (folder / "config.json").write_text("{"), "not JSON"),
    "weights cut short": (lambda folder: cut(folder / "model.safetensors"), "it is damaged or cut short"),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), "holds neither model.safetensors nor"),
    "other shapes": (lambda folder: edited(folder / "config.json", intermediate_size=96), "shape"),
    "adapters": (lambda folder: (folder / "config.json").rename(folder / "adapter_config.json"), "has adapters"),
}  # fmt: skip


@pytest.mark.parametrize("case", MODELS)
def test_wrong_models(home, tmp_path, capsys, case):
    change, words = MODELS[case]
    shutil.copytree(home / "model", tmp_path / "model")
    change(tmp_path / "model")
    argv = (tmp_path / "model", "--data", home / "chats.jsonl", "--out", tmp_path / "out", "--steps", "1")
    refused(capsys, tmp_path / "out", words, *argv)


def test_what_only_looks_wrong_trains(home, write, tmp_path, capsys):
    """Line ends of Windows and a byte order mark; evaluation in another format; no token for padding."""
    text = "\r\n".join([CHAT] * 8).encode()
    evaluation = write("evaluation.csv", "prompt,completion\na,b\n")
    shutil.copytree(home / "model", tmp_path / "model")
    edited(tmp_path / "model" / "tokenizer_config.json", pad_token=None)
    data = write("a.jsonl", b"\xef\xbb\xbf" + text)
    argv = ("train", "sft", tmp_path / "model", "--data", data, "--eval-data", evaluation, "--no-packing")
    flags = ("--out", tmp_path / "out", "--steps", "1", "--show", "0", "--report-to", "none", "--length", "32")
    assert main([str(argument) for argument in (*argv, *flags)]) == 0
    assert "8 rows of messages" in capsys.readouterr().err


def test_only_bad_rows_are_not_skipped_to_nothing(home, write, tmp_path, capsys):
    data = write("bad.jsonl", '{"messages": 3}\n{"messages": []}\n')
    argv = (home / "model", "--data", data, "--out", tmp_path / "out", "--skip-bad")
    refused(capsys, tmp_path / "out", "none of the 2 rows can be read", *argv)


def test_what_cannot_be_resumed(home, capsys):
    """A folder that has no run, a checkpoint that is damaged, and data that has grown."""
    notes, flags = home / "notes", ("--steps", "4", "--save-steps", "2", "--length", "64")
    notes.mkdir()
    (notes / "notes.txt").write_text("mine")
    assert train(home, "notes", *flags, "--resume") == 3
    assert "has no run to resume" in capsys.readouterr().err
    assert [path.name for path in notes.iterdir()] == ["notes.txt"]
    shutil.copy(home / "chats.jsonl", home / "growing.jsonl")
    assert train(home, "resumed", *flags, data="growing.jsonl") == 0
    with (home / "growing.jsonl").open("a") as file:
        file.write(f"\n{CHAT}")
    longer = (*flags, "--steps", "6", "--resume")
    assert train(home, "resumed", *longer, data="growing.jsonl") == 3
    assert "rows was 16, now it is 17. Next step: restore what was before (rows" in capsys.readouterr().err
    other = (home / "chats.jsonl").read_text().replace("Say a.", "Ask a.")
    (home / "growing.jsonl").write_text(other)
    assert train(home, "resumed", *longer, data="growing.jsonl") == 3
    assert "the checkpoint: its files have changed. Next step: restore what was" in capsys.readouterr().err
    shutil.copy(home / "chats.jsonl", home / "growing.jsonl")
    newest = max((home / "resumed" / "checkpoints").glob("step-*/*.distcp"))
    whole = newest.read_bytes()
    cut(newest)
    assert train(home, "resumed", *longer, data="growing.jsonl") == 3
    assert f"{newest} cannot be read: it is cut short" in capsys.readouterr().err
    newest.write_bytes(whole)
    assert train(home, "resumed", *longer, data="growing.jsonl") == 0
