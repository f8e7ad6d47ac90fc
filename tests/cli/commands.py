"""Runs a command in this process, on the checkpoint that the demo makes."""

from pathlib import Path
from types import SimpleNamespace

import ligermodels
from ligermodels.cli import demo, main


def write_checkpoint(folder: Path) -> Path:
    """The demo's checkpoint before training, its weights enlarged so that its text does not repeat."""
    demo.write_checkpoint(folder)
    model = ligermodels.load(folder, progress=False)
    for parameter in model.parameters():
        parameter.data.mul_(3 if parameter.dim() > 1 else 1)
    model.save_pretrained(folder)
    return folder


def run(capsys, *argv) -> tuple[int, str, str]:
    """(exit status, stdout, stderr)."""
    capsys.readouterr()  # what the test has printed; deepspeed does as it is imported, which accelerate does
    status = main([str(argument) for argument in argv])
    return (status, *capsys.readouterr())


def stdin_of(text: str) -> SimpleNamespace:
    """What takes the place of sys.stdin: a pipe that holds `text`."""
    lines = iter(text.splitlines(keepends=True))
    return SimpleNamespace(isatty=lambda: False, read=lambda: text, readline=lambda: next(lines, ""))
