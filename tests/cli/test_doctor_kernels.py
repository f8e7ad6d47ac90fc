"""When the kernels are checked, and when a warning says that they were not tested: on machines that are made up."""

import json
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from ligermodels.cli import doctor_kernels
from ligermodels.kernels import _tested
from tests.cli.commands import run, write_checkpoint

GPU_RECORD = Path(__file__).parents[2] / "benchmarks" / "results" / "gpu.json"
GOOD, BAD = doctor_kernels.Result("glu", 0.001, 0.008), doctor_kernels.Result("rope", 0.1, 0.008)


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """A machine with a GPU of which everything can be changed; `runs` counts the checks."""
    here = SimpleNamespace(name="NVIDIA GeForce RTX 5090", capability=120, triton="3.9.0", found=[GOOD], runs=0)

    def check(device, show=print):
        here.runs += 1
        for result in here.found:
            show(f"{'ok  ' if result.ok else 'FAIL'} {result.name}")
        return here.found

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(_tested.SWITCH, raising=False)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    for name, value in {
        "is_available": lambda: True, "current_device": lambda: 0, "get_device_name": lambda index=None: here.name,
        "empty_cache": lambda: None,
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(doctor_kernels, "cuda_capability", lambda index: here.capability)
    monkeypatch.setattr(doctor_kernels, "use_triton", lambda x: True)
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *shape, device=None, **rest: empty(
        *shape, device="cpu" if str(device).startswith("cuda") else device, **rest
    ))  # fmt: skip
    monkeypatch.setattr(doctor_kernels, "triton", SimpleNamespace(__version__=here.triton))
    monkeypatch.setattr(doctor_kernels, "run", check)
    return here


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("model"))


def test_an_unknown_gpu_is_checked_once(machine, monkeypatch, tmp_path, capsys):
    for _ in range(2):
        doctor_kernels.check_once()
    assert machine.runs == 1
    err = capsys.readouterr().err
    assert "never on NVIDIA GeForce RTX 5090; checking them once" in err and "all 1 checks passed" in err
    (report,) = tmp_path.rglob("*.json")
    assert report.parent == tmp_path / "ligermodels" and "nvidia-geforce-rtx-5090-3.9.0-" in report.name
    assert json.loads(report.read_text())["checks"][0]["error"] == GOOD.error
    monkeypatch.setattr(doctor_kernels, "triton", SimpleNamespace(__version__="3.9.1"))
    doctor_kernels.check_once()
    assert machine.runs == 2


def test_an_unknown_triton_is_checked(machine, monkeypatch, capsys):
    machine.name, machine.capability = "NVIDIA H200", 90
    monkeypatch.setattr(doctor_kernels, "triton", SimpleNamespace(__version__="3.6.1"))
    doctor_kernels.check_once()
    assert machine.runs == 0
    monkeypatch.setattr(doctor_kernels, "triton", SimpleNamespace(__version__="3.10.0"))
    doctor_kernels.check_once()
    assert machine.runs == 1 and "never with 3.10.0" in capsys.readouterr().err


TRAIN = ("train", "sft", "x/y", "--data", "z", "--output-dir", "{folder}/run")


@pytest.mark.parametrize("argv", [("generate", "{folder}", "--prompt", "x"), ("bench", "{folder}"), TRAIN])
def test_a_command_does_not_start_on_wrong_kernels(machine, monkeypatch, capsys, folder, argv):
    machine.found = [GOOD, BAD]
    argv = [text.format(folder=folder) for text in argv]
    for _ in range(2):  # a report of a failure does not end the checks
        status, _, err = run(capsys, *argv)
        assert status == 3 and "FAIL rope" in err and "ok   glu" not in err
        assert "give wrong results, or none, on NVIDIA GeForce RTX 5090 with Triton 3.9.0: rope. " in err
    assert machine.runs == 2
    monkeypatch.setenv(_tested.SWITCH, "0")
    doctor_kernels.check_once()
    assert machine.runs == 2


@pytest.mark.parametrize("options", [("--device", "cpu"), ("--top-p", "7")])
def test_what_needs_no_kernels_checks_none(machine, folder, options, capsys):
    run(capsys, "generate", folder, "--prompt", "x", *options)
    assert machine.runs == 0


def test_one_rank_of_a_machine_checks(machine, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "1")
    doctor_kernels.check_once()
    assert machine.runs == 0


def test_a_report_that_cannot_be_written_is_a_warning(machine, monkeypatch, tmp_path):
    (tmp_path / "ligermodels").write_text("a file")
    with pytest.warns(UserWarning, match="cannot be written"):
        doctor_kernels.check_once()


def test_the_library_warns_until_they_are_checked(machine):
    with pytest.warns(UserWarning, match="never on NVIDIA GeForce RTX 5090. `ligermodels doctor --kernels`"):
        _tested.warn_if_untested(0, 120, "3.9.0")
    doctor_kernels.check_once()
    with warnings.catch_warnings(action="error"):
        _tested.warn_if_untested(0, 120, "3.9.0")
        _tested.warn_if_untested(0, 90, "3.6.0")


def test_the_first_question_for_a_capability_warns(machine, monkeypatch):
    from ligermodels.kernels import _triton

    monkeypatch.setattr(_triton, "HAS_TRITON", True)
    monkeypatch.setattr(_triton, "triton", SimpleNamespace(__version__="3.9.0"))
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (12, 0))
    _triton._capability.cache_clear()
    try:
        with pytest.warns(UserWarning, match="RTX 5090"):
            assert _triton.cuda_capability(0) == 120
    finally:
        _triton._capability.cache_clear()


def test_without_kernels_there_is_nothing_to_check(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(doctor_kernels, "use_triton", lambda x: False)
    status, out, _ = run(capsys, "doctor", "--kernels")
    assert status == 0 and "plain PyTorch; nothing to check" in out
    status, _, err = run(capsys, "doctor", "--kernels", "some/model")
    assert status == 2 and "leave MODEL out" in err


def test_the_gpu_of_the_record_needs_no_check():
    record = json.loads(GPU_RECORD.read_text())["environment"]
    assert record["device"] in ("NVIDIA H200", "NVIDIA H100 80GB HBM3")
    assert _tested.why_untested(90, record["device"], record["triton"]) is None
    assert "never with 3.60.0" in _tested.why_untested(90, record["device"], "3.60.0")


@pytest.mark.gpu
def test_on_a_gpu(capsys):
    """All checks pass, in bf16."""
    status, out, _ = run(capsys, "doctor", "--kernels")
    assert status == 0, out
