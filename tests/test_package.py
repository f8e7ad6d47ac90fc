"""What the installed package says of files that only a clone has, and what the project's files say of each other."""

import ast
import re
import tomllib
from pathlib import Path

import pytest

import ligermodels
from ligermodels.errors import page

ROOT = Path(__file__).parents[1]
FILES = sorted((ROOT / "ligermodels").rglob("*.py"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))


def texts(path):
    """The strings of a file, but for docstrings: what it may print."""
    tree = ast.parse(path.read_text("utf-8"))
    bodies = [node.body for node in ast.walk(tree) if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)]
    unread = {id(line.value) for body in bodies for line in body if isinstance(line, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in unread:
            yield node.value


def test_no_message_names_a_file_that_only_a_clone_has():
    for path in FILES:
        for text in texts(path):
            assert not re.search(r"(?<![\w/])(docs|examples|tests|benchmarks|convert)/", text), f"{path}: {text}"


def test_messages_name_extras_and_pages_that_are_there():
    extras = PROJECT["project"]["optional-dependencies"]
    for path in FILES:
        named = re.findall(r"ligermodels\[([\w,]+)\]", path.read_text("utf-8"))
        assert {extra for names in named for extra in names.split(",")} <= set(extras), path
        for name in re.findall(r"\bpage\(['\"]([^'\"]+)['\"]\)", path.read_text("utf-8")):
            assert (ROOT / "docs" / name).is_file() or name == "...", f"{path}: {name}"
    assert page("options.md").endswith("/ligermodels/blob/main/docs/options.md")


def test_the_version_is_in_one_place():
    assert "version" in PROJECT["project"]["dynamic"] and "version" not in PROJECT["project"]
    holding = [path.name for path in FILES if ligermodels.__version__ in path.read_text("utf-8")]
    assert holding == ["__init__.py"]
    heads = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text("utf-8"), re.MULTILINE)
    assert heads[0] == "Unreleased" or heads[0] == ligermodels.__version__


@pytest.mark.parametrize(
    "name", re.findall(r"^([\w.-]+)==", (ROOT / "constraints.txt").read_text("utf-8"), re.MULTILINE)
)
def test_a_pinned_package_is_one_that_the_project_asks_for(name):
    """So that constraints.txt does not go on naming what nothing installs."""
    groups = PROJECT["dependency-groups"].values()
    asked = [
        *PROJECT["project"]["dependencies"],
        *(line for lines in groups for line in lines if isinstance(line, str)),
    ]
    asked += [line for lines in PROJECT["project"]["optional-dependencies"].values() for line in lines]
    normal = {re.split(r"[\[<>=;! ]", line)[0].lower().replace("_", "-") for line in asked}
    assert name.lower().replace("_", "-") in normal
