"""`train --capture`: padding changes no loss, and a captured run is the uncaptured one, with its checkpoints."""

import contextlib
import re
from typing import ClassVar

import pytest
import torch

import ligermodels
from ligermodels.errors import InputError
from ligermodels.kernels._triton import as_if_capturing
from ligermodels.processes import Processes
from ligermodels.recipes import base, model, trainer
from ligermodels.recipes.base import next_token_loss, num_labels
from ligermodels.recipes.data.examples import filled_batch, packed_batch
from ligermodels.training import CapturedStep
from tests.arch import qwen2_vl
from tests.recipes import losses
from tests.recipes.runs import all_metrics, check_same, metrics, train, weights

LENGTH = 80
FLAGS = (
    "--max-length", str(LENGTH), "--accumulation", "3", "--max-steps", "8", "--learning-rate", "3e-3",
    "--warmup-steps", "2", "--save-steps", "2", "--eval-share", "0.2", "--eval-steps", "3",
)  # fmt: skip


@pytest.mark.parametrize("family, changes", [
    ("Llama", {}),
    ("Llama", {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}),  # whose rotations depend on the longest
    ("Gemma2", {"sliding_window": 6}),
    ("Mixtral", {"num_local_experts": 4}),
], ids=str)  # fmt: skip
def test_padding_changes_no_loss(family, changes):
    model, batch, count = losses.model(family, **changes), packed_batch(losses.examples(9, 30, 5)), torch.tensor(7.0)
    expected = next_token_loss(model, batch, count)
    for length in (44, 45, 200):
        filled = filled_batch(batch, length)
        assert num_labels(filled) == num_labels(batch)
        assert (filled["input_ids"].shape, filled["cu_seqlens"].shape) == ((1, length), (length + 1,))
        losses.check(model, next_token_loss(model, filled, count), expected)


def filled_losses(monkeypatch, *, as_captured=False):
    """Uncaptured runs of sft pad what they train on as captured ones do."""

    def padded(model, batch, count):
        if not model.training:
            return next_token_loss(model, batch, count)
        with as_if_capturing() if as_captured else contextlib.nullcontext():
            return next_token_loss(model, filled_batch(batch, LENGTH), count)

    monkeypatch.setattr(base, "next_token_loss", padded)


class Noted(CapturedStep):
    """Notes the shapes that it was called with."""

    calls: ClassVar = []

    def __call__(self, **inputs):
        self.calls.append((self, inputs["input_ids"].shape, inputs["cu_seqlens"].shape))
        return super().__call__(**inputs)


@pytest.mark.parametrize("more, forwards", [
    ((), 24),
    (("--max-steps", "4", "--lora-r", "4", "--quantize", "nf4", "--accumulation", "1"), 4),
    (("--max-steps", "4", "--precision", "bf16", "--activations", "block", "--max-grad-norm", "0"), 12),
], ids=["all weights", "adapters", "bf16"])  # fmt: skip
def test_a_captured_run_is_the_run(home, tmp_path, more, forwards, monkeypatch):
    """But for the rounding of sums over padding: of an uncaptured run that pads it has the bits."""

    def folder(name, *flags):
        assert train(home, tmp_path / name, *FLAGS, *more, *flags) == 0
        return tmp_path / name

    if not more:
        plain = folder("plain")
    monkeypatch.setattr(trainer, "CapturedStep", Noted)
    monkeypatch.setattr(Noted, "calls", [])
    captured = folder("captured", "--capture")
    assert len(Noted.calls) == forwards, "all forwards of training went through it"
    assert len(set(Noted.calls)) == 1 and Noted.calls[0][1:] == ((1, LENGTH), (LENGTH + 1,))
    if not more:
        check_same(captured, plain)
    filled_losses(monkeypatch)
    padded = folder("padded")
    assert all_metrics(captured) == all_metrics(padded)
    assert weights(captured) == weights(padded) and len(weights(captured)) == 2  # the last and the best


def test_the_plan_prints_the_share_of_padding(home, capsys):
    flags = ("--max-length", "100", "--accumulation", "1", "--num-train-epochs", "1", "--scratch", "--capture")
    assert train(home, "text", *flags, recipe="pretrain", data="texts.jsonl") == 0
    tokens = metrics(home / "text", "tokens")
    padding = 1 - tokens[max(tokens)] / (100 * max(tokens))
    match = re.search(r"forwards are padded to 100 tokens, of which (.*)% are padding\n", capsys.readouterr().err)
    assert float(match[1]) == pytest.approx(100 * padding, abs=0.05) and padding > 0.01


def test_what_cannot_be_captured_is_refused():
    cpu = torch.device("cpu")
    plain, balanced = (losses.model("Mixtral", num_local_experts=4, output_router_logits=on) for on in (False, True))
    sees = ligermodels.Qwen2VL.from_config(qwen2_vl.tiny(), device="meta")
    model.check_capture(plain, Processes(cpu))
    for wrong, processes, says in (
        (balanced, Processes(cpu), "would count the padding; leave --capture out"),
        (sees, Processes(cpu), "the images of a Qwen2VL have no fixed shape; leave --capture out"),
        (plain, Processes(cpu, 0, 2, mesh=object()), "capture: it is for one process"),
    ):
        with pytest.raises(InputError, match=says):
            model.check_capture(wrong, processes)


@pytest.mark.gpu
@pytest.mark.parametrize("more", [(), ("--lora-r", "4", "--accumulation", "1"), ("--precision", "bf16")])
def test_a_run_of_graphs_is_the_run(home, tmp_path, more, monkeypatch):
    """That of a run that pads, computes all rows of the head, and counts its steps on the device; resumed too."""
    replays, replay = [], torch.cuda.CUDAGraph.replay
    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", lambda graph: replays.append(graph) or replay(graph))

    def folder(name):
        return tmp_path / name  # an absolute path is not put under `home`

    flags = (*FLAGS, *more, "--lr-scheduler-type", "constant_with_warmup")
    assert train(home, folder("graph"), *flags, "--capture") == 0
    accumulate = 1 if "--lora-r" in more else 3
    assert len(replays) == 8 * accumulate and len(set(replays)) == accumulate
    assert train(home, folder("resumed"), *flags, "--max-steps", "4", "--capture") == 0
    assert train(home, folder("resumed"), *flags, "--capture", "--resume") == 0
    assert train(home, folder("plain"), *flags) == 0
    optimizer_of = model.make_optimizer

    def counts_on_device(*args, **options):
        optimizer = optimizer_of(*args, **options)
        for group in optimizer.param_groups:
            group["capturable"] = True
        return optimizer

    filled_losses(monkeypatch, as_captured=True)
    monkeypatch.setattr(model, "make_optimizer", counts_on_device)
    assert train(home, folder("padded"), *flags) == 0
    for key in ("loss", "eval_loss", "grad_norm", "lr"):  # the device's learning rate has fewer bits than the host's
        found = metrics(folder("graph"), key)
        assert found == pytest.approx(metrics(folder("padded"), key), rel=0.01)
        assert found == pytest.approx(metrics(folder("plain"), key), rel=0.05)
    assert metrics(folder("resumed"))[8] == pytest.approx(metrics(folder("graph"))[8], rel=1e-3)
