"""Runs the notebooks of examples/ as Jupyter would. `python -m tests.notebooks` stores the outputs in the files."""

import os
from pathlib import Path
from typing import Any

import nbclient
import nbformat

EXAMPLES = Path(__file__).parents[1] / "examples"
NAMES = ("tune_chats", "compose_hybrid")
ON_CPU = {"PYTHONPATH": str(EXAMPLES.parent), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}


def stored(name: str) -> Any:
    return nbformat.read(EXAMPLES / f"{name}.ipynb", as_version=4)


def executed(name: str, *last: str) -> Any:
    """The notebook with its outputs, after further lines of code. Its kernel has the environment of this process."""
    notebook = stored(name)
    notebook.cells += [nbformat.v4.new_code_cell(line) for line in last]
    client = nbclient.NotebookClient(
        notebook, timeout=240, record_timing=False, resources={"metadata": {"path": str(EXAMPLES)}}
    )
    return client.execute()


def pieces(cell: Any) -> list[str]:
    """The kinds of a cell's outputs; text that is printed in several pieces is one."""
    kinds = [next((kind for kind in ("image/png", "text/html") if kind in output.get("data", ())), output.output_type)
             for output in cell.get("outputs", ())]  # fmt: skip
    return [kind for kind, before in zip(kinds, [None, *kinds], strict=False) if kind != before]


if __name__ == "__main__":
    os.environ |= ON_CPU
    for name in NAMES:
        nbformat.write(executed(name), EXAMPLES / f"{name}.ipynb")
        print(f"{name}.ipynb has its outputs")
