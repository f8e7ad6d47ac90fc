"""`demo` and `doctor`."""

import errno
import json
import os
import shlex
import subprocess
import sys
from itertools import count
from types import SimpleNamespace

import pytest
import torch

from ligermodels import cli
from ligermodels.cli import demo, main
from tests.cli.commands import run, stdin_of


@pytest.fixture
def on_cpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.mark.parametrize(
    ("found", "called", "program"),
    [
        ("/usr/bin/ligermodels", "/usr/bin/ligermodels", "ligermodels"),
        (None, ".venv/bin/ligermodels", ".venv/bin/ligermodels"),
        (None, "/a b/ligermodels/__main__.py", f"{sys.executable} -m ligermodels"),
    ],
)
def test_demo_names_a_program_that_the_shell_finds(found, called, program, monkeypatch):
    monkeypatch.setattr("shutil.which", lambda name: found)
    monkeypatch.setattr(sys, "argv", [called, "demo"])
    assert demo._program() == program


def test_demo_proves_what_it_says_and_its_next_commands_work(on_cpu, tmp_path, capsys, monkeypatch):
    # A clock that goes on by being read: 25 steps, however long each takes.
    monkeypatch.setattr("shutil.which", lambda name: f"/bin/{name}")
    monkeypatch.setattr(demo, "time", SimpleNamespace(perf_counter=map(float, count()).__next__))
    status, out, _ = run(capsys, "demo", "--seconds", 25, "--keep", tmp_path / "kept")
    assert status == 0 and "FAILED" not in out and out.count("\nok ") == 3, out
    losses = [float(line.split()[3]) for line in out.splitlines() if line.startswith("step ")]
    assert losses[0] > 6.5 and losses[-1] < losses[0] - 1
    commands = out[out.index("Next") :].splitlines()[1:]
    assert len(commands) == 3
    monkeypatch.setattr(sys, "stdin", stdin_of(""))
    for command in commands:
        program, *argv = shlex.split(command, comments=True)
        assert program == "ligermodels" and str(tmp_path / "kept") in argv
        assert main(argv) == 0


def test_doctor_has_a_line_for_everything_and_never_shows_the_token(on_cpu, capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("HF_TOKEN", "hf_verysecret")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "not" / "yet"))
    status, out, err = run(capsys, "doctor")
    lines = {line[5:19].strip(): line for line in out.splitlines()}
    assert {"ligermodels", "python", "torch", "triton", "GPU", "kernels", "HF token", "cache"} <= set(lines)
    assert "verysecret" not in out + err and "present" in lines["HF token"]
    assert str(tmp_path) in lines["cache"] and "GB free" in lines["cache"]
    assert status == any(line.startswith("FIX") for line in out.splitlines())


def test_doctor_says_how_to_fix_what_is_off(on_cpu, capsys, monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.4.0")
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=5e9))
    status, out, _ = run(capsys, "doctor")
    assert status == 1 and "-> pip install -U 'torch>=2.11'" in out and "HF_HOME" in out and "5.0 GB free" in out


def test_doctor_says_what_of_a_model_is_fused_without_reading_weights(on_cpu, capsys, tmp_path):
    sizes = dict(vocab_size=99, hidden_size=32, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma2", "head_dim": 512, **sizes}))
    _, out, _ = run(capsys, "doctor", tmp_path)
    assert "gate_proj | up_proj | down_proj" in out and "one op" in out and "there is no GPU" in out
    status, _, err = run(capsys, "doctor", tmp_path / "nowhere")
    assert status == 3 and "nowhere" in err


def test_doctor_wants_a_model(on_cpu, capsys, tmp_path):
    adapter, trained = tmp_path / "adapter", tmp_path / "run"
    adapter.mkdir()
    trained.mkdir()
    (adapter / "adapter_config.json").write_text("{}")
    (trained / "options.yaml").touch()
    for folder, words in ((adapter, f"{adapter} is an adapter; give the model"), (trained, "the folder of a run")):
        status, _, err = run(capsys, "doctor", folder)
        assert status == 2 and words in err


def test_output_to_a_full_disk_is_one_message(monkeypatch):
    """Of a process of its own: Python writes what is left in stdout when it ends, and must not fail again."""
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    with open("/dev/full", "w") as full:
        argv = [sys.executable, "-m", "ligermodels", "doctor"]
        ended = subprocess.run(argv, stdout=full, stderr=subprocess.PIPE, text=True, timeout=120)
    assert ended.returncode == 3
    assert ended.stderr == "error: the output cannot be written: no space is left on its disk\n"


@pytest.mark.parametrize("file, named", [("/cache/weights", "error: /cache/weights "), (None, "error: a file (of")])
def test_a_full_disk_of_another_file_is_not_said_of_the_output(file, named, capsys, monkeypatch):
    def fail(args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), file)

    monkeypatch.setattr(cli, "_demo", fail)
    status, _, err = run(capsys, "demo")
    assert status == 3 and err.startswith(named) and "no space is left" in err


@pytest.mark.gpu
def test_doctor_tries_a_kernel_on_the_gpu():
    done = subprocess.run([sys.executable, "-m", "ligermodels", "doctor"], capture_output=True, text=True, timeout=120)
    assert "tried on this GPU; fast launches" in done.stdout, done.stdout + done.stderr
