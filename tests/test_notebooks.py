"""The notebooks of examples/, run as Jupyter would."""

from pathlib import Path

import pytest

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")
EXAMPLES = Path(__file__).parents[1] / "examples"


def executed(name, monkeypatch, *last):
    """The notebook with its outputs, after further lines of code."""
    notebook = nbformat.read(EXAMPLES / f"{name}.ipynb", as_version=4)
    assert all(not cell.get("outputs") for cell in notebook.cells), "notebooks are stored without outputs"
    notebook.cells += [nbformat.v4.new_code_cell(line) for line in last]
    monkeypatch.setenv("PYTHONPATH", str(EXAMPLES.parent))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    client = nbclient.NotebookClient(notebook, timeout=240, resources={"metadata": {"path": str(EXAMPLES)}})
    return client.execute()


def drawn(notebook):
    """The HTML of runs, and the text on stdout and stderr."""
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    pages = [str(output.data.get("text/html", "")) for output in outputs if "data" in output]
    streams = {
        name: "".join(output.text for output in outputs if output.get("name") == name) for name in ("stdout", "stderr")
    }
    return [page for page in pages if "<svg" in page], streams


def value_of(cell):
    return next(output.data["text/plain"] for output in cell.outputs if output.output_type == "execute_result")


@pytest.mark.slow
def test_chats_are_tuned_in_a_notebook(monkeypatch):
    notebook = executed("tune_chats", monkeypatch, "losses[-1] < 0.1", "said", "now")
    pages, streams = drawn(notebook)
    assert [value_of(cell) for cell in notebook.cells[-3:]] == ["True", "'I am Pip.'", "'Arr, Pip!'"]
    assert len(pages) == 2 and 'value="60" max="60"' in pages[0] and "eval loss" in pages[0]
    assert "step 60/60: loss" in pages[0] and "step 60/60" not in streams["stdout"]
    assert "[I am Pip.<|im_end|>" in streams["stdout"] and "ligermodels chat" in streams["stdout"]
    assert "trained" not in streams["stderr"] and "step" not in streams["stderr"]


@pytest.mark.slow
def test_a_hybrid_is_composed_in_a_notebook(monkeypatch):
    notebook = executed("compose_hybrid", monkeypatch, "losses[0] > 5 and losses[-1] < 3.2", "same")
    assert [value_of(cell) for cell in notebook.cells[-2:]] == ["True", "True"]
    assert len(drawn(notebook)[0]) == 1
