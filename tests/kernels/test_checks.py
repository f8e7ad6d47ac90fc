"""`ligermodels doctor --kernels`, interpreted: right kernels pass, a wrong one fails, and none is forgotten."""

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from ligermodels.cli import doctor_kernels, main
from ligermodels.kernels.norm import _norm

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the command itself runs on a GPU, see test_on_a_gpu")


def run(capsys, monkeypatch, *names) -> tuple[int, dict[str, str]]:
    """(exit status, line of each check) of the command with these checks."""
    chosen = {name: doctor_kernels.CHECKS[name] for name in names}
    monkeypatch.setattr(doctor_kernels, "CHECKS", chosen)
    status = main(["doctor", "--kernels"])
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith(("ok  ", "FAIL"))]
    return status, {line[5:29].strip(): line for line in lines}


def test_right_kernels_pass(capsys, monkeypatch):
    names = ["rms_norm", "attention, packed", "decode", "int4, 1 row", "route", "linear_cross_entropy", "adamw"]
    names += ["adamw, many", "adamw, 8 bits"]
    status, lines = run(capsys, monkeypatch, *names)
    assert status == 0 and list(lines) == names
    assert all(line.startswith("ok   ") and "error" in line and "bound" in line for line in lines.values()), lines


@pytest.mark.parametrize("factor", [1.01, float("nan")])
def test_a_wrong_kernel_fails(capsys, monkeypatch, factor):
    launch = _norm.launch

    def wrong(kernel, grid, y, *rest, **options):
        launch(kernel, grid, y, *rest, **options)
        if isinstance(y, Tensor):
            y.mul_(factor)

    monkeypatch.setattr(_norm, "launch", wrong)
    status, lines = run(capsys, monkeypatch, "rms_norm", "glu")
    assert status == 1 and lines["rms_norm"].startswith("FAIL") and lines["glu"].startswith("ok")


def test_a_kernel_that_does_not_compile_fails(capsys, monkeypatch):
    def fail(*args, **options):
        raise RuntimeError("first line\nptxas died")

    monkeypatch.setattr(_norm, "launch", fail)
    status, lines = run(capsys, monkeypatch, "rms_norm", "glu")
    assert status == 1 and lines["rms_norm"].endswith("RuntimeError: ptxas died") and lines["glu"].startswith("ok")


def test_wrong_integers_fail(capsys, monkeypatch):
    check = doctor_kernels.CHECKS["argmax"]
    wrong = check._replace(op=lambda logits: check.op(logits) + 1)
    monkeypatch.setitem(doctor_kernels.CHECKS, "argmax", wrong)
    status, lines = run(capsys, monkeypatch, "argmax")
    assert status == 1 and "other integers" in lines["argmax"]


LEFT_OUT = [
    "_gradients._write_kernel",  # of gradients that are added in place, or have another dtype than the weight
    *(f"attention._unfused_attention._{name}_kernel" for name in ("delta", "dkdv", "dq", "table", "values", "weights")),
    "attention.decode_attention._many_kernel",
    *(f"experts._decode_mxfp4.{name}_kernel" for name in ("_down", "_up")),
    "experts._order._dispatch_kernel",
    *(f"linear._fp8_quantize._{name}_kernel" for name in ("both_maxima", "maxima", "rows", "transpose")),
    "linear._split._split_kernel",
    *(f"loss.vocab_parallel_cross_entropy._{name}_kernel" for name in ("merge", "statistics")),
]
"""Kernels that no check launches interpreted. All but the first and the last two it does launch on a GPU of many
multiprocessors, in bf16."""


@pytest.mark.slow
def test_all_pass_and_launch_every_kernel(capsys, monkeypatch):
    from triton.runtime.interpreter import InterpretedFunction

    launched, of_interpreter = set(), InterpretedFunction.run

    def run(self, *args, **options):
        launched.add(f"{self.fn.__module__.removeprefix('ligermodels.kernels.')}.{self.fn.__name__}")
        return of_interpreter(self, *args, **options)

    monkeypatch.setattr(InterpretedFunction, "run", run)
    status = main(["doctor", "--kernels"])
    assert status == 0, capsys.readouterr().out
    table = json.loads((Path(__file__).parents[1] / "fixtures" / "ptxas.json").read_text())["rows"]
    assert sorted({name.split(":")[0] for name in table} - launched) == LEFT_OUT
