"""What a run leaves beside the weights for people: the card and the picture."""

import json
import re
import sys

import pytest
import yaml

import ligermodels
from ligermodels.recipes import card, curves
from tests.recipes.runs import metrics, options_of, run, train

FEW = "--max-length 64 --accumulation 2 --max-steps 3 --learning-rate 3e-3 --warmup-steps 0 --eval-share 0.3".split()


def head_of(text):
    return yaml.safe_load(text.split("---\n")[1])


BASES = {  # what the folder of the base is called and has -> the repository that the card names
    "models--owner--some-model/snapshots/0a1b": ({}, "owner/some-model"),
    "plain": ({}, ""),
    "written": ({"config.json": '{"_name_or_path": "owner/base"}'}, "owner/base"),
    "of a path": ({"config.json": '{"_name_or_path": "/home/me/base"}'}, ""),
    "tuned": ({"README.md": '---\nbase_model: "owner/root"\ntags: ["sft", "ligermodels"]\n---\n'}, "owner/root"),
    "of others": ({"README.md": '---\nbase_model: owner/root\ntags: ["x"]\n---\n'}, ""),
}


@pytest.mark.parametrize("name", BASES)
def test_the_base_is_named_by_its_repository(tmp_path, name):
    files, expected = BASES[name]
    (folder := tmp_path / name).mkdir(parents=True)
    for file, text in files.items():
        (folder / file).write_text(text)
    (saved := tmp_path / "out" / "model").mkdir(parents=True)
    card.write_card(options_of("sft", model=str(folder)), {}, saved, folder)
    text = (saved / "README.md").read_text()
    assert head_of(text).get("base_model", "") == expected
    assert head_of(text).get("base_model_relation") == ("finetune" if expected else None)
    if expected:
        assert f"[{expected}](https://huggingface.co/{expected})" in text
    else:
        assert f"Supervised fine-tuning of {folder}, by `ligermodels train sft`" in text


def test_the_card_of_a_model_in_memory_names_where_it_came_from(home, tmp_path):
    model = ligermodels.load(home / "model", device="cpu")
    model.name_or_path = "owner/base"
    rows = [json.loads(line) for line in (home / "chats.jsonl").read_text().splitlines()]
    folder, lines = ligermodels.train(
        "sft", model=model, data=rows, output_dir=tmp_path / "out", run_name="Pip 2", max_steps=2, lora_r=2
    )
    text = (folder / "README.md").read_text()
    assert head_of(text)["base_model"] == "owner/base" and "\n# Pip 2\n" in text
    losses = [line["loss"] for line in lines if "loss" in line]
    assert f"| loss | {losses[0]:.4g} (step 1) | {losses[1]:.4g} (step 2) |" in text
    assert "ligermodels.load('owner/base')" in text and "load_adapter(model, " in text
    assert json.loads((folder / "adapter_config.json").read_text())["base_model_name_or_path"] == "owner/base"


def test_the_picture_has_what_was_measured(home, teacher, tmp_path):
    pytest.importorskip("matplotlib")
    for recipe, titles in (
        ("dpo", ["loss", "learning rate", "rewards of answers", "reward margin", "accuracy"]),
        ("grpo", ["loss", "learning rate", "reward", "KL", "tokens of completions"]),
        ("medusa", ["loss", "learning rate", "accuracy"]),
    ):
        out = tmp_path / recipe
        assert run(home, out, recipe, *(("--beta", "0.1") if recipe == "grpo" else ())) == 0
        lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        panels = curves.curves_of(lines)
        assert list(panels) == titles
        for panel in panels.values():
            for name, (steps, values) in panel.items():
                assert dict(zip(steps, values, strict=True)) == metrics(out, name)
        result = next(out / name for name in ("model", "medusa") if (out / name).is_dir())
        picture = (out / "loss.png").read_bytes()
        assert picture.startswith(b"\x89PNG") and (result / "loss.png").read_bytes() == picture
        assert "![curves of the run](loss.png)" in (result / "README.md").read_text()


def test_without_matplotlib_one_line_says_so(home, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert train(home, tmp_path / "out", *FEW) == 0
    said = re.findall(r".*loss\.png.*", capsys.readouterr().err)
    assert said == ["no loss.png, which needs matplotlib: pip install 'ligermodels[train]'"]
    assert not (tmp_path / "out" / "loss.png").exists()
    assert "loss.png" not in (tmp_path / "out" / "model" / "README.md").read_text()


def test_a_curve_is_smoothed_by_as_many_neighbours_on_each_side():
    assert curves.smoothed([float(n) for n in range(100)]) == pytest.approx(range(100))  # a line stays as it is
    noisy = curves.smoothed([float(n % 2) for n in range(200)])
    assert noisy[0] == 0 and all(0.4 < x < 0.6 for x in noisy[10:-10])
