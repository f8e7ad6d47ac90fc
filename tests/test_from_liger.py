"""docs/from_liger.md: our names can be imported, Liger's are all there, and the code runs."""

import importlib
import inspect
import os
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest

import ligermodels

PAGE = (Path(__file__).parents[1] / "docs" / "from_liger.md").read_text("utf-8")
ROWS = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in PAGE.splitlines() if line.startswith("| `")]
NAMES = sorted(set(re.findall(r"`(ligermodels(?:\.\w+)+)`", PAGE)))


@pytest.mark.parametrize("name", NAMES)
def test_our_names_can_be_imported(name):
    if "integrations.transformers" in name:
        pytest.importorskip("transformers")
    assert pkgutil.resolve_name(name) is not None


def test_each_row_names_something_or_says_why_not():
    assert len(ROWS) > 60
    for row in ROWS:
        liger, here, differs = row
        assert "`" in liger and ("ligermodels" in here or (here == "-" and differs)), row


def functions(module, start=""):
    module = importlib.import_module(module)
    return {
        name for name, value in vars(module).items()
        if inspect.isfunction(value) and value.__module__ == module.__name__ and name.startswith(start)
    }  # fmt: skip


def test_every_name_of_liger_is_there():
    """Of its public modules; a new one of a later version has to get a row."""
    transformers = pytest.importorskip("liger_kernel.transformers")
    chunked, ops = importlib.import_module("liger_kernel.chunked_loss"), importlib.import_module("liger_kernel.ops")
    public = {*transformers.__all__} - {"is_transformers_available"}
    public |= {name for name in vars(chunked) if name.startswith("Liger")}
    public |= {name for name in vars(ops) if name.endswith("Function")}
    public |= functions("liger_kernel.functional") | functions("liger_kernel.transformers.functional", "liger_")
    public |= {
        n for n in vars(importlib.import_module("liger_kernel.chunked_loss.functional")) if n.startswith("liger_")
    }
    public = {name.removeprefix("apply_liger_kernel_to_") for name in public}
    named = set(re.findall(r"`(\w+)`", " ".join(row[0] for row in ROWS)))
    assert not public - named, sorted(public - named)


def test_models_are_missing_only_if_they_are():
    """The row of each of Liger's functions names our class of its model types, where there is one."""
    patches = pytest.importorskip("liger_kernel.transformers.monkey_patch").MODEL_TYPE_TO_APPLY_LIGER_FN
    ours = {row[0]: row[1] for row in ROWS}
    for kind, patch in patches.items():
        name = patch.__name__.removeprefix("apply_liger_kernel_to_")
        (here,) = (cell for names, cell in ours.items() if f"`{name}`" in names)
        if kind in ligermodels.ARCHS:
            assert f"`ligermodels.{ligermodels.ARCHS[kind].__name__}`" in here, kind
        elif name == kind:
            assert here == "-", kind


def test_a_script_of_somebody_elses(tmp_path):
    """Through the page's file of four lines, with its arguments."""
    transformers = pytest.importorskip("transformers")
    launcher = next(code for code in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL) if "runpy" in code)
    (tmp_path / "with_ours.py").write_text(launcher)
    config = dict(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1,
    )  # fmt: skip
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**config)).save_pretrained(tmp_path / "model")
    (tmp_path / "script.py").write_text(
        "import sys\nfrom transformers import AutoModelForCausalLM\n"
        "model = AutoModelForCausalLM.from_pretrained(sys.argv[1])\nprint(__name__, type(model).__module__, sys.argv)\n"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "with_ours.py", "script.py", "model"], cwd=tmp_path, env=environment, text=True,
        capture_output=True, timeout=300, check=True,
    )  # fmt: skip
    assert done.stdout.strip().endswith("__main__ ligermodels.integrations.transformers ['script.py', 'model']")
