"""examples/pretrain.py and slurm.sh as torchrun and Slurm start them, and docs/distributed.md, on the CPU."""

import os
import re
import runpy
import subprocess
import sys
import textwrap
from pathlib import Path
from unittest import mock

import numpy
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

import ligermodels
from ligermodels.parallel import make_mesh
from tests.parallel.ranks import on_ranks, results_of_ranks
from tests.processes import CPU, losses_in, torchrun

pytestmark = pytest.mark.slow  # each start of torchrun takes some 5 s
ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "distributed.md").read_text("utf-8")
SNIPPETS = [textwrap.dedent(code) for code in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)]
TINY = dict(
    model_type="llama", vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, initializer_range=0.1,
)  # fmt: skip
PRETRAIN = ROOT / "examples" / "pretrain.py"


def one_process(steps: int):
    """The losses of a plain loop over the same rows, and the trained model."""
    model = ligermodels.Llama.from_config(TINY, device="cpu", seed=0).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for step in range(steps):
        begins = torch.randint(10_000 - 63, (8,), generator=torch.Generator().manual_seed(step))
        ids = (begins[:, None] + torch.arange(64)) % 256
        optimizer.param_groups[0]["lr"] = 3e-3 * (step + 1) / 10
        loss = model(ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model


def pretrain(folder, *arguments):
    """The losses of examples/pretrain.py on two processes, which are forks: torchrun's would import all again."""
    folder.mkdir()
    main = runpy.run_path(str(PRETRAIN))["main"]

    def work():
        torch.set_num_threads(1)
        with mock.patch.object(dist, "destroy_process_group"):  # the ranks do that themselves
            return main([str(argument) for argument in arguments])

    losses, others = results_of_ranks(folder, work)
    assert losses == others
    return losses


def test_pretraining_computes_what_one_process_does_and_resumes_on_another_mesh(tmp_path):
    losses, model = one_process(6)
    out = ("--out", tmp_path / "run")
    begun = torchrun(PRETRAIN, "--steps", 3, "--micro", 1, "--dp-replicate", 2, "--save-every", 2, *out)
    resumed = pretrain(tmp_path / "resumed", "--steps", 6, "--tp", 2, "--recompute", "block", *out)
    assert list(begun) == [0, 1, 2] and len(resumed) == 3
    assert [*begun.values(), *resumed] == pytest.approx(losses, abs=2e-4)  # four digits are printed
    saved = ligermodels.load(tmp_path / "run" / "model", device="cpu")
    for found, expected in zip(saved.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)  # a tenth of one step's update

    numpy.save(tmp_path / "tokens.npy", (numpy.arange(10_000) % 256).astype(numpy.uint16))
    files = ("--model", tmp_path / "run" / "model", "--data", tmp_path / "tokens.npy")
    (further,) = pretrain(tmp_path / "further", "--steps", 1, "--cp", 2, *files)
    in_bf16 = pretrain(tmp_path / "bf16", "--steps", 2, "--bf16", *files)
    begins = torch.randint(10_000 - 63, (8,), generator=torch.Generator().manual_seed(0))
    ids = (begins[:, None] + torch.arange(64)) % 256
    assert further == pytest.approx(saved(ids, labels=ids).loss.item(), abs=2e-4)
    assert len(in_bf16) == 2 and in_bf16[0] == pytest.approx(further, rel=3e-2)


def test_the_slurm_script_starts_a_torchrun_on_each_node(tmp_path):
    """Slurm's commands are stand-ins: two nodes are two torchruns here."""
    stand_ins = {
        "scontrol": 'test "$*" = "show hostnames nodes[0-1]" && echo localhost && echo elsewhere',
        "srun": f'shift\n"$@" >{tmp_path}/0.log 2>&1 & "$@" >{tmp_path}/1.log 2>&1 & wait',
        "torchrun": f'exec {sys.executable} -m torch.distributed.run "$@"',
    }
    for name, line in stand_ins.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{line}\n")
        (tmp_path / name).chmod(0o755)
    slurm = dict(SLURM_JOB_NODELIST="nodes[0-1]", SLURM_JOB_NUM_NODES="2", SLURM_GPUS_ON_NODE="1", SLURM_JOB_ID="7")
    environment = os.environ | CPU | slurm | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    command = ["bash", "examples/slurm.sh", "--steps", "3"]
    subprocess.run(command, cwd=ROOT, env=environment, check=True, timeout=300)
    outputs = [(tmp_path / f"{node}.log").read_text() for node in (0, 1)]
    assert list(losses_in("".join(outputs)).values()) == pytest.approx(one_process(3)[0], abs=2e-4), outputs


def snippet(text: str) -> str:
    (code,) = [code for code in SNIPPETS if text in code]
    return code


def make_batches():
    """Two micro-batches of four rows, some of whose labels do not count."""
    batches = []
    for seed in range(2):
        ids = torch.randint(256, (4, 16), generator=torch.Generator().manual_seed(seed))
        labels = ids.clone()
        labels[: seed + 1, 5:] = -100
        batches.append({"input_ids": ids, "labels": labels})
    return batches


def of_rank(batches, rank, ranks):
    return [{name: value.chunk(ranks)[rank] for name, value in batch.items()} for batch in batches]


def run_the_page(folder):
    torch.set_num_threads(1)
    rank = dist.get_rank()
    expected = ligermodels.load(folder / "tiny", device="cpu", dtype=torch.float32)
    whole = {name: torch.cat([batch[name] for batch in make_batches()]) for name in ("input_ids", "labels")}
    loss = expected(**whole).loss
    loss.backward()

    def check(model):
        for found, one in zip(model.parameters(), expected.parameters(), strict=True):
            torch.testing.assert_close(found.grad.full_tensor(), one.grad, rtol=1e-4, atol=1e-6)
        model.zero_grad()

    for dims in ({}, {"tp": 2}, {"cp": 2}, {"dp_replicate": 2}):
        mesh = make_mesh(**dims, device_type="cpu")
        model = ligermodels.load(folder / "tiny", mesh=mesh, dtype=torch.float32)
        names = {"mesh": mesh, "model": model, "F": F}
        exec(snippet("batch_rank"), names)
        mine = of_rank(make_batches(), names["rank"], names["ranks"])
        joined = {name: torch.cat([batch[name] for batch in mine]) for name in whole}
        found = model(**joined).loss
        torch.testing.assert_close(found, loss)
        found.backward()
        check(model)
        names["batches"] = mine
        exec(snippet("for batch in batches"), names)
        check(model)
        names |= {"logits": model(joined["input_ids"]).logits, "labels": joined["labels"]}
        exec(snippet("cross_entropy"), names)
        names["loss"].backward()
        check(model)

    code = snippet("import Checkpoints").replace('"meta-llama/Llama-3.1-8B"', repr(str(folder / "tiny")))
    for shown, small in (("1000", "3"), ("100", "2"), ('"runs/a"', repr(str(folder / "runs"))), ('"out"', "out")):
        assert shown in code
        code = code.replace(shown, small)
    names = {"ligermodels": ligermodels, "torch": torch, "out": folder / "out"}
    names["batch_of"] = lambda step: of_rank(make_batches(), rank, 2)[step % 2]
    exec(code, names)
    if rank == 0:
        assert [path.name for path in (folder / "runs").iterdir()] == ["step-00000002"]
        saved = ligermodels.load(folder / "out", device="cpu")
        for found, one in zip(saved.parameters(), expected.parameters(), strict=True):
            assert found.dtype == torch.float32 and not torch.equal(found, one)


def test_the_page_is_right(tmp_path):
    ligermodels.Llama.from_config(TINY, device="cpu", seed=1).save_pretrained(tmp_path / "tiny")
    on_ranks(tmp_path, lambda: run_the_page(tmp_path))
