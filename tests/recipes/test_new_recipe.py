"""The recipe of docs/adding.md, as it is printed."""

import re
from pathlib import Path

import pytest

from ligermodels import recipes
from tests.recipes.runs import FEW, metrics, train

PAGE = Path(__file__).parents[2] / "docs" / "adding.md"


def test_the_recipe_of_the_documentation_trains_and_resumes(home, tmp_path, monkeypatch):
    code = re.findall(r"```python\n(\"\"\"Focal.*?)```", PAGE.read_text(), re.DOTALL)[0]
    assert len(code.splitlines()) <= 60
    (tmp_path / "focal.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    from focal import Focal

    monkeypatch.setitem(recipes.RECIPES, "focal", ("focal:Focal", "Focal loss."))
    find = recipes.find
    monkeypatch.setattr("ligermodels.cli.train.find", lambda name: Focal if name == "focal" else find(name))
    flags = (*FEW, "--save-steps", "3", "--eval-steps", "3")
    assert train(home, tmp_path / "sft", *flags) == 0
    assert train(home, tmp_path / "plain", *flags, "--gamma", "0", recipe="focal") == 0
    assert metrics(tmp_path / "plain") == pytest.approx(metrics(tmp_path / "sft"), rel=1e-5)  # (1 - p)^0 is 1
    assert train(home, tmp_path / "focal", *flags, recipe="focal") == 0
    losses = metrics(tmp_path / "focal")
    assert losses[6] < losses[1] <= metrics(tmp_path / "plain")[1] and metrics(tmp_path / "focal", "eval_probability")
