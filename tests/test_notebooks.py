"""The notebooks of examples/, run as Jupyter would."""

import pytest

pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")


def executed(name, monkeypatch, *last):
    """The notebook, run again: cells have outputs of the kinds that are stored in its file, and none is an error."""
    from tests import notebooks

    for variable, value in notebooks.ON_CPU.items():
        monkeypatch.setenv(variable, value)
    notebook = notebooks.executed(name, *last)
    for before, now in zip(notebooks.stored(name).cells, notebook.cells, strict=False):
        assert notebooks.pieces(before) == notebooks.pieces(now), "store its outputs: python -m tests.notebooks"
    return notebook


def drawn(notebook):
    """The HTML of runs, and the text on stdout and stderr."""
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    pages = [str(output.data.get("text/html", "")) for output in outputs if "data" in output]
    streams = {
        name: "".join(output.text for output in outputs if output.get("name") == name) for name in ("stdout", "stderr")
    }
    return [page for page in pages if "<svg" in page], streams


def pictures(notebook):
    return sum("image/png" in output.get("data", ()) for cell in notebook.cells for output in cell.get("outputs", ()))


def value_of(cell):
    return next(output.data["text/plain"] for output in cell.outputs if output.output_type == "execute_result")


@pytest.mark.slow
def test_chats_are_tuned_in_a_notebook(monkeypatch):
    notebook = executed("tune_chats", monkeypatch, "losses[-1] < 0.1", "said", "now")
    pages, streams = drawn(notebook)
    assert [value_of(cell) for cell in notebook.cells[-3:]] == ["True", "'I am Pip.'", "'Arr, Pip!'"]
    assert pictures(notebook) == 1
    assert len(pages) == 2 and 'value="60" max="60"' in pages[0] and "eval loss" in pages[0]
    assert "step 60/60: loss" in pages[0] and "step 60/60" not in streams["stdout"]
    assert "[I am Pip.<|im_end|>" in streams["stdout"] and "ligermodels chat" in streams["stdout"]
    assert "trained" not in streams["stderr"] and "step" not in streams["stderr"]


@pytest.mark.slow
def test_a_hybrid_is_composed_in_a_notebook(monkeypatch):
    notebook = executed("compose_hybrid", monkeypatch, "losses[0] > 5 and losses[-1] < 3.2", "same")
    assert [value_of(cell) for cell in notebook.cells[-2:]] == ["True", "True"]
    assert len(drawn(notebook)[0]) == 1 and pictures(notebook) == 1
