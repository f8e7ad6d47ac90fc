"""What of the benchmark of training steps a CPU can judge: parity before time, profiles that add up, the search."""

import argparse
import concurrent.futures
import contextlib
import dataclasses
import itertools
import json
import math
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from torch import nn

import ligermodels.arch
from benchmarks.train_cases import CASES
from benchmarks.train_step import __main__ as command
from benchmarks.train_step import children, longest, measure, memory, parity, profile, providers, report, rows, trace
from benchmarks.train_step.floors import Sizes, kept_bytes, operations, traffic
from benchmarks.train_step.longest import Trial
from benchmarks.train_step.parity import LOGITS_FACTOR, RELATIVE, compare_first_steps, disagreement
from benchmarks.train_step.providers import Provider
from benchmarks.train_step.trace import Held
from ligermodels.errors import LigermodelsError


@pytest.fixture
def in_this_process(monkeypatch):
    """Providers run here, one after the other: a process each costs seconds of imports."""

    class Child:
        def __init__(self, arguments, environment):
            self.arguments = arguments

        def ready(self, timeout=None):
            return self

        def proceed(self):
            pass

        def go(self, timeout):
            try:
                assert command.main(self.arguments) == 0
            except LigermodelsError as error:
                return str(error)
            return ""

        def stop(self):
            pass

    monkeypatch.setattr(children, "Child", Child)
    monkeypatch.setattr(children, "wait", lambda: None)
    pytest.importorskip("transformers")


def run(tmp_path, *arguments):
    out = tmp_path / "result.json"
    code = command.main(["--dry", "--out", str(out), *arguments])
    return code, json.loads(out.read_text())["rows"]


def expected(**changes):
    exact = {"logits": torch.randn(1, 64, 32), "loss": 6.0, "gradient_norm": 2.0}
    return {"exact": exact, "errors_in_bf16": {"logits": 1e-2, "loss": 0.0, "gradient_norm": 0.0, **changes}}


def test_a_model_that_agrees_may_be_timed():
    right = expected()
    logits = right["exact"]["logits"]
    found = {"logits": logits + 1e-2 * torch.randn_like(logits), "loss": 6.01, "gradient_norm": 1.995}
    assert disagreement(found, right, 1.25) == []


@pytest.mark.parametrize(
    ("name", "change"), [("logits", 2e-2), ("loss", 0.05), ("gradient_norm", -0.02), ("loss", float("nan"))]
)
def test_a_model_that_disagrees_may_not(name, change):
    right = expected()
    found = {**right["exact"], name: right["exact"][name] + change}
    (reason,) = disagreement(found, right, 1.25)
    assert name in reason


def test_one_token_that_goes_to_another_expert_is_no_disagreement():
    right = expected()
    found = {**right["exact"], "logits": right["exact"]["logits"].clone()}
    found["logits"][0, 5] += 10
    assert disagreement(found, right, 1.25) == []
    found["logits"][0, 5] = float("nan")
    assert disagreement(found, right, 1.25) != []


class Output(dict):
    __getattr__ = dict.__getitem__


class Wrong(nn.Module):
    """A model that always answers the same."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(32))

    def forward(self, input_ids, labels):
        logits = self.weight.expand(*input_ids.shape, -1)
        return Output(loss=logits.sum(), logits=logits)


def test_a_wrong_model_makes_no_step(tmp_path, monkeypatch):
    ids = torch.randint(32, (1, 100))
    torch.save({"inputs": {"input_ids": ids, "labels": ids}, **expected()}, tmp_path / "parity-100.pt")
    monkeypatch.setattr(measure, "build", lambda *arguments, **options: Wrong())
    monkeypatch.setattr(measure, "optimizer_of", None)
    options = argparse.Namespace(dry=True, checkpointing="none", seq=100)
    case = CASES["llama-3.2-1b"]
    row = measure.measure(measure.check("hf", case, options, tmp_path), case, options, tmp_path)
    assert len(row["parity"]["red"]) == 3
    assert "tokens_per_s" not in row


@pytest.mark.parametrize("name", sorted(CASES))
def test_the_configs_are_the_models_they_name(name):
    attention = 2048 * 128 * (16 + 8 + 8 + 16)
    mixture = 8 * 3 * 2048 * 7168 + 8 * 2048  # experts and router
    counts = {
        "llama-3.2-1b": 1_235_814_400,
        "llama-3.1-8b": 8_030_261_248,
        "mistral-7b": 7_241_732_096,
        "mixtral-12l": 2 * 32000 * 2048 + 12 * (attention + mixture + 2 * 2048) + 2048,
        "gemma-2-2b": 2_614_341_888,
        "qwen2-1.5b": 1_543_714_304,
        "phi-3-mini": 3_821_079_552,
        "qwen2-vl-2b": 2_208_985_600,
        "llama-3.2-11b-vision": 10_670_220_835,
    }
    config = CASES[name].config
    model = ligermodels.arch.ARCHS[config["model_type"]].from_config(config, device="meta")
    assert model.num_parameters() == counts[name]


MORE = {
    "llama-3.2-1b": {
        "ligermodels+adamw:mlp-1": "mlp-1",
        "ligermodels+inbackward:block": "block",
        "ligermodels+offload": "none",
        "ligermodels+chunks+offload:none-1": "none-1",
        "ligermodels+captured": "none",
    },
    "gemma-2-2b": {"ligermodels:none": "none"},  # the case has "block"
}
"""Ways of ours to train, and what is computed again in them; one case each is enough."""


@pytest.mark.parametrize("name", sorted(CASES.keys() - {"llama-3.1-8b"}))  # that is profiled below
def test_a_training_step_is_measured_and_written(name, tmp_path, capsys, in_this_process):
    names = [provider for provider in CASES[name].providers if "liger" not in provider.split("+")]
    more = MORE.get(name, {})
    names += more
    code, found = run(tmp_path, "--case", name, "--markdown", "--providers", ",".join(names))
    assert code == 0, found
    assert [row["provider"] for row in found] == names and len(names) > 1
    theirs = next(row for row in found if not row["provider"].startswith("ligermodels"))
    for row in found:
        assert row["parity"]["red"] == [] and row["tokens_per_s"] > 0
        assert row["losses"] == pytest.approx(theirs["losses"], rel=RELATIVE)
        assert row["checkpointing"] == more.get(row["provider"], CASES[name].checkpointing)
    assert "| ligermodels |" in re.sub(" +", " ", capsys.readouterr().out)


def test_the_first_gradients_are_read_off_the_optimizer():
    model = nn.Linear(30, 40)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.8, 0.99))
    model(torch.randn(5, 30)).square().sum().backward()
    norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm().item()
    optimizer.step()
    assert parity.first_gradient_norm(optimizer) == pytest.approx(norm, rel=1e-5)


@pytest.mark.parametrize(
    ("name", "attention", "experts", "words"),
    [
        ("hf", "sdpa", "", ()),
        ("hf+eager:none", "eager", "", ()),
        ("hf+loop", "sdpa", "loop", ()),
        ("hf+liger", "eager", "", ("liger",)),
        ("hf+liger+flex+compile", "flex", "", ("liger", "compile")),
        ("ligermodels+adamw+captured:none", None, "", ("adamw", "captured")),
    ],
)
def test_a_providers_name_says_what_it_is(name, attention, experts, words):
    provider = Provider.of(name, CASES["gemma-2-2b"], "block")
    assert (provider.experts, provider.words) == (experts, words)
    assert provider.attention == attention or provider.ours
    assert provider.checkpointing == ("none" if name.endswith(":none") else "block")


@pytest.mark.parametrize("name", ["vllm", "hf+fast", "ligermodels+eager", "hf:layer", "hf+captured", "hf:mlp"])
def test_an_unknown_provider_is_said_at_once(name, capsys):
    with pytest.raises(SystemExit) as stop:
        command.main(["--dry", "--providers", name])
    assert stop.value.code == 2 and repr(name) in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [
        ("gemma-2-2b", "attn_logit_softcapping", None),
        ("gemma-2-2b", "sliding_window", 64),
        ("mistral-7b", "sliding_window", None),
        ("phi-3-mini", "sliding_window", None),
        ("mixtral-12l", "num_experts_per_tok", 1),
        ("qwen2-1.5b", "rope_theta", 1e4),
    ],
)
def test_parity_sees_what_is_left_out(name, field, value, tmp_path):
    pytest.importorskip("transformers")
    case, options = CASES[name], argparse.Namespace(dry=True, seed=0, seq=64)
    parity.prepare(case, options, tmp_path)
    right = torch.load(parity.parity_file(options, tmp_path))
    ours = Provider.of("ligermodels", case, "none")

    def red():
        found = parity.probe(providers.build(ours, case, tmp_path / "parity", "cpu"), right["inputs"])
        return disagreement(found, right, LOGITS_FACTOR)

    assert red() == []
    path = tmp_path / "parity" / "config.json"
    config = json.loads(path.read_text())
    if field == "rope_theta":
        config["rope_parameters"]["rope_theta"] = value
    path.write_text(json.dumps({**config, field: value}))
    assert any("logits" in reason for reason in red())


def test_a_case_may_time_what_it_calls_inexact(tmp_path, monkeypatch, capsys, in_this_process):
    case = CASES["mistral-7b"]
    monkeypatch.setitem(CASES, "mistral-7b", dataclasses.replace(case, inexact={"hf": "no window"}))
    monkeypatch.setattr(measure, "disagreement", lambda *a: disagreement(*a) if a[2] == 1.25 else ["other logits"])
    code, found = run(tmp_path, "--case", "mistral-7b", "--providers", "ligermodels,hf,hf+eager")
    by_name = {row["provider"]: row for row in found}
    assert code == 0
    assert "tokens_per_s" in by_name["hf"] and "tokens_per_s" not in by_name["hf+eager"]
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines() if line}
    assert "inexact: no window; other logits" in lines["hf"]
    assert "inexact" not in lines["hf+eager"] and "other logits" in lines["hf+eager"]


def test_the_first_step_is_compared_too():
    def row(provider, loss, norm):
        return {"provider": provider, "losses": [loss], "first_gradient_norm": norm, "parity": {"red": []}}

    found = [row("ligermodels", 6.0, 2.1), row("hf", 6.0, 2.0), row("hf+liger", 6.01, 2.0)]
    compare_first_steps(found)
    assert [len(r["parity"]["red"]) for r in found] == [1, 0, 0]


def test_a_provider_whose_process_fails_gets_a_note(tmp_path, monkeypatch, capsys, in_this_process):
    monkeypatch.setattr(command, "prepare", lambda *arguments: {})
    code, (row,) = run(tmp_path, "--providers", "ligermodels")
    assert code == 1 and "parity is not there" in row["note"]
    assert row["note"] in capsys.readouterr().out


def test_a_process_waits_works_fails_or_is_stopped(tmp_path, monkeypatch):
    script = tmp_path / "benchmarks" / "train_step" / "__main__.py"
    script.parent.mkdir(parents=True)
    script.write_text(f"""if True:
        import os, sys, time
        print("noise of imports")
        print({children.READY!r}, flush=True)
        assert sys.stdin.readline() == "go\\n"
        if sys.argv[1] in ("twice", "ends", "late"):
            print("x" * 100_000, file=sys.stderr)
            if sys.argv[1] == "ends":
                sys.exit("in the middle")
            if sys.argv[1] == "late":
                time.sleep(60)
            print({children.READY!r}, flush=True)
            assert sys.stdin.readline() == "go\\n"
        print("x" * 100_000)
        if sys.argv[1] == "hang":
            time.sleep(60)
        if sys.argv[1] == "fail":
            sys.exit("because of " + os.environ["WHY"])
    """)
    monkeypatch.setattr(children, "ROOT", tmp_path)
    names = ("work", "fail", "hang", "never", "twice", "ends", "late")
    runs = {name: children.Child([name], {"WHY": "this"}) for name in names}
    for name in names[-3:]:  # all go on before any is waited for
        runs[name].ready().proceed()
    assert runs["twice"].ready(60).waits and not runs["late"].ready(0.2).waits and not runs["ends"].ready(60).waits
    assert [runs[name].go(60) for name in names[-3:]] == ["", "in the middle", "did not finish in 0.2 s"]
    assert runs["work"].ready().ready().go(60) == ""
    assert runs["fail"].ready().go(60) == "because of this"
    assert runs["hang"].ready().go(0.2) == "did not finish in 0.2 s"
    runs["never"].stop()
    assert all(child.process.returncode is not None for child in runs.values())


def kernel(name, start, duration, correlation):
    return {
        "cat": "kernel",
        "ph": "X",
        "name": name,
        "ts": start,
        "dur": duration,
        "args": {"correlation": correlation},
    }


def op(name, start, duration, thread=1, **args):
    return {"cat": "cpu_op", "ph": "X", "name": name, "ts": start, "dur": duration, "tid": thread, "args": args}


def call(name, time, correlation, thread=1):
    args = {"correlation": correlation}
    return {"cat": "cuda_driver", "ph": "X", "name": name, "ts": time, "dur": 1, "tid": thread, "args": args}


def mark(name, time, thread=1):
    return {"cat": "user_annotation", "ph": "X", "name": name, "ts": time, "dur": 0, "tid": thread, "args": {}}


def test_kernels_are_the_time_of_the_op_that_launched_them():
    node = "autograd::engine::evaluate_function: "
    dims = {"Input Dims": [[100, 20], [20, 30]]}
    events = [
        op("aten::linear", 0, 10),
        op("aten::mm", 1, 8, **dims),
        call("cudaMemsetAsync", 1.5, 6),  # of cuBLAS: one call, whose operations count once
        {**kernel("Memset (Device)", 98, 1, 6), "cat": "gpu_memset"},
        call("cuLaunchKernelEx", 2, 7),
        kernel("nvjet_sm90_tst", 100, 50, 7),
        # A norm's output made anew within a product's backward, on the thread of backward.
        op(f"{node}_LinearBackward", 20, 20, thread=2),
        call("cuLaunchKernelEx", 25, 8, thread=2),
        kernel("forward_kernel", 140, 20, 8),  # 10 of them beside the product
        op("aten::copy_", 30, 5, thread=2),
        call("cudaMemcpyAsync", 31, 9, thread=2),
        {**kernel("Memcpy DtoD", 200, 5, 9), "cat": "gpu_memcpy"},
        # The same name in two files: who launched it says what it is.
        op(f"{node}_FlashBackward", 50, 9, thread=2),
        call("cuLaunchKernel", 51, 10, thread=2),
        kernel("_dkdv_kernel", 300, 40, 10),
        op("UnitLinear", 70, 9),
        call("cuLaunchKernel", 71, 11),
        kernel("_forward_kernel", 400, 3, 11),
        op("_Flash", 80, 9),
        call("cuLaunchKernel", 81, 12),
        kernel("_forward_kernel", 500, 4, 12),
        # Behind the op that keeps its input, in the module's own name.
        {**mark("module|layers.3.mlp", 90), "dur": 4},
        call("cuLaunchKernel", 91, 14),
        kernel("_forward_kernel", 510, 2, 14),
        call("cudaStreamSynchronize", 95, 13),
        kernel("some_kernel", 600, 1, 99),  # launched by nobody known
    ]
    found = trace.times(events)
    by_op = {work.op: work for work in found.work}
    milliseconds = {name: work.ms for name, work in by_op.items()}
    assert milliseconds == pytest.approx({
        "products": 0.051,
        "norms": 0.020,
        "copies, casts, fills": 0.005,
        "attention backward": 0.040,
        "gated units": 0.005,
        "attention forward": 0.004,
        "other": 0.001,
    })  # fmt: skip
    assert by_op["products"].detail == "100 x 20 x 30" and by_op["products"].flops == 2 * 100 * 20 * 30
    assert by_op["products"].count == 1 and by_op["gated units"].count == 2
    assert by_op["products"].kernels == {"Memset (Device)": 1, "nvjet_sm90_tst": 1}
    assert by_op["other"].detail == "some_kernel"
    assert found.busy_ms == pytest.approx(0.116)  # the norm runs beside the product for 10 us
    assert found.between_ms == pytest.approx(0.601 - 0.098 - 0.116)
    assert (found.launches, found.waits) == (8, 1)


def test_a_call_is_all_that_its_op_runs():
    node = "autograd::engine::evaluate_function: "
    events = [
        # A norm's backward and the sum of its parts, then another norm's.
        *(op(f"{prefix}_NormBackward", start, 9) for start in (0, 10) for prefix in (node, "")),
        *(call("cuLaunchKernel", time, i) for i, time in enumerate((1, 2, 11, 12))),
        *(kernel(f"{('backward', 'sum_parts')[i % 2]}_kernel", 100 + 10 * i, 5, i) for i in range(4)),
        # One step of the optimizer, in parts.
        {**mark("Optimizer.step#AdamW.step", 30), "dur": 20},
        *(op("aten::_fused_adamw_", start, 5) for start in (31, 40)),
        *(call("cudaLaunchKernel", time, i) for i, time in ((4, 32), (5, 33), (6, 41))),
        *(kernel("multi_tensor_apply_kernel", 100 + 10 * i, 5, i) for i in (4, 5, 6)),
    ]
    work = {w.op: (w.count, sum(w.kernels.values()), w.kernels) for w in trace.times(events).work}
    assert work == {
        "norms": (2, 4, {"backward_kernel": 2, "sum_parts_kernel": 2}),
        "optimizer": (1, 3, {"multi_tensor_apply_kernel": 3}),
    }


def test_what_the_kernels_leave_is_said_once_where_both_ways_agree():
    def lines(rest, between):
        work = dataclasses.asdict(trace.Work("products", "2 x 3 x 4", 5, 90.0, 5e9, {"a": 5, "b": 5}))
        profile = {"step_ms": 100.0, "rest_ms": rest, "between_ms": between, "ops": [work]}
        return report.op_lines(
            {**profile, "ceilings": {"matmul_bf16_tflop_per_s": 0.1}, "floors_ms": {"products": 60.0}}
        )

    assert lines(10.0, 10.2)[:-1] == [("products", 5, 10, 90.0, 60.0), ("  2 x 3 x 4", 5, 10, 90.0, 50.0)]
    assert [line[0] for line in lines(10.0, 10.2)[2:]] == ["step less kernels"]
    assert lines(-1.0, 3.0)[2:] == [
        ("step less kernels", None, None, -1.0, None),
        ("between kernels, profiled", None, None, 3.0, None),
    ]


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["NormBackward", "aten::copy_"], "norms"),
        (["LigerRMSNormFunction"], "norms"),
        (["ScaledDotProductCudnnAttentionBackward0"], "attention backward"),
        (["aten::_scaled_dot_product_cudnn_attention"], "attention forward"),
        (["Optimizer.step#AdamW.step", "aten::_fused_adamw_"], "optimizer"),
        (["_LinearCrossEntropy", "aten::copy_"], "cross entropy rows"),
        (["_RopeBackward"], "rope"),
        (["EmbeddingBackward0", "aten::embedding_dense_backward"], "embedding"),
        (["LigerSiLUMulFunction"], "gated units"),
        (["_MLPBackward"], "gated units"),
        (["_ExpertsBackward"], "gated units"),
        (["torch::autograd::AccumulateGrad", "_adamw_kernel"], "optimizer"),
        (["aten::add_"], "additions"),
        (["aten::mul"], "other"),
    ],
)
def test_ops_are_known_by_their_names(names, expected):
    chain = [{"cat": "user_annotation" if n.startswith("Opt") else "cpu_op", "name": n, "args": {}} for n in names]
    assert trace.classify("a_kernel", chain[::-1])[0] == expected


@pytest.mark.parametrize(
    ("name", "dims", "expected"),
    [
        ("addmm", [[30], [100, 20], [20, 30]], ("100 x 20 x 30", 120_000)),
        ("addmm", [[100, 30], [100, 20], [20, 30], [], []], ("100 x 20 x 30", 120_000)),
        ("bmm", [[4, 5, 6], [4, 6, 7]], ("4 x 5 x 6 x 7", 1680)),
        ("_grouped_mm", [[100, 20], [8, 20, 30], [8]], ("100 x 20 x 30 of 8 experts", 120_000)),
        ("mm", [], None),
    ],
)
def test_products_have_operations(name, dims, expected):
    assert trace._product(op(f"aten::{name}", 0, 1, **{"Input Dims": dims})) == expected


def changed(bytes_, address, time, total=None, thread=1):
    args = {"Device Type": 1, "Bytes": bytes_, "Addr": address, "Total Allocated": total}
    return {"ph": "i", "name": "[memory]", "ts": time, "tid": thread, "args": args}


def test_the_peak_is_held_by_those_who_hold_it():
    events = [
        {**mark("module|layers.3.mlp", 0), "dur": 100},
        changed(10, 0xA, 1, total=1010),  # kept
        mark("kept|layers.3.mlp|10", 2),
        changed(500, 0xB, 3),  # kept, and gone before the peak
        mark("kept|layers.1.attn|11", 3.5),
        changed(-500, 0xB, 4),
        changed(20, 0xB, 5),  # at its address: what the first was kept for is not the second's
        changed(40, 0xC, 6),
        mark("kept|layers.0.attn|12", 7),
        op("autograd::engine::evaluate_function: FooBackward", 200, 300, thread=2),
        changed(-30, 0xF, 201, thread=2),  # of what was there before
        changed(700, 0xD, 210, thread=2),  # the peak: 10 + 20 + 40 + 700 of the step, 970 from before
        mark("gradient|w|13", 250, thread=2),
        changed(-10, 0xA, 300, thread=2),
        changed(5, 0xA, 301, thread=2),
        mark("kept|late|10", 302),
    ]
    before = {"parameters": 600, "optimizer states": 300}
    peak, held = trace.memory(events, before, cuda=True)
    assert peak == 1740 == sum(h.bytes for h in held)
    assert sorted(held, key=lambda h: h.bytes) == [
        Held("kept for backward", "layers.*.mlp", 10, 1),
        Held("workspaces and other", "layers.*.mlp", 20, 1),
        Held("kept for backward", "layers.*.attn", 40, 1),
        Held("other, before the step", "", 70, 1),
        Held("optimizer states", "", 300, 1),
        Held("parameters", "", 600, 1),
        Held("gradients", "", 700, 1),
    ]


class Toy(nn.Module):
    """Two products of which autograd keeps the inputs, the second of them also by the sigmoid before it."""

    def __init__(self, device):
        super().__init__()
        self.first = nn.Linear(512, 1024, bias=False, device=device)
        self.second = nn.Linear(1024, 256, bias=False, device=device)

    def forward(self, x):
        return self.second(self.first(x).sigmoid())


def recorded(device, rows=2048):
    model = Toy(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    x = torch.randn(rows, 512, device=device)

    def step():
        model(x).square().mean().backward()
        profile._mark_gradients(model)
        optimizer.step()
        optimizer.zero_grad()

    step()
    before = profile._before(model, optimizer, {"x": x}, device)
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    events = profile.record(model, step, device, marked=True)
    return (*trace.memory(events, before, cuda=device == "cuda"), trace.times(events))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_the_profile_of_a_known_model(device):
    peak, held, found = recorded(device)
    sizes = {(h.what, h.detail): h.bytes for h in held}
    assert sum(sizes.values()) == peak
    weights, hidden = 4 * (512 * 1024 + 1024 * 256), 4 * 2048 * 1024
    assert sizes["parameters", ""] == sizes["optimizer states", ""] == weights
    assert sizes["inputs", ""] == 4 * 2048 * 512
    # At the peak, the sigmoid's backward makes its gradient out of what comes from above.
    assert sizes["kept for backward", ""] == hidden  # the sigmoid's output, which no module's call made
    assert sizes["gradients", ""] == 4 * 1024 * 256
    assert sizes["workspaces and other", "SigmoidBackward0"] == hidden
    shapes = {work.detail: work.count for work in found.work if work.op == "products"}
    assert {"2048 x 512 x 1024", "2048 x 1024 x 256"} <= shapes.keys()
    if device == "cuda":
        assert peak == torch.cuda.max_memory_allocated()


def test_a_profile_is_written_shown_and_drawn(tmp_path, capsys, in_this_process):
    code, rows_ = run(tmp_path, "--case", "llama-3.1-8b", "--profile", "--providers", "ligermodels:none,hf")
    assert code == 0 and rows_[0]["losses"] == pytest.approx(rows_[1]["losses"], rel=RELATIVE)
    for row in rows_:
        assert row["profile"]["peak_bytes"] == sum(h["bytes"] for h in row["profile"]["held"])
    found = rows_[0]["profile"]
    model = ligermodels.arch.ARCHS["llama"].from_config(CASES["llama-3.1-8b"].dry(), device="meta")
    held = {h["what"]: h["bytes"] for h in found["held"]}
    assert held["parameters"] == 2 * model.num_parameters()
    # AdamW's two moments, and its step count of 4 bytes, of each parameter
    assert held["optimizer states"] == 2 * held["parameters"] + 4 * len(list(model.parameters()))
    products = {work["detail"] for work in found["ops"] if work["op"] == "products"}
    assert "128 x 64 x 160" in products  # B 2 x S 64 tokens, gate or up: on a CPU each by itself
    out = capsys.readouterr().out
    assert "floor / time" in out and "optimizer states" in out and "kept per token and block" in out
    pytest.importorskip("matplotlib")
    record = json.loads((tmp_path / "result.json").read_text())
    images = report.plot(record, tmp_path)
    assert [image.name for image in images] == ["llama-3.1-8b-ligermodels-none.png", "llama-3.1-8b-hf-block.png"]
    assert all(image.stat().st_size > 10_000 for image in images)


def test_a_graphs_memory_is_in_the_peak(monkeypatch):
    def segment(pool, total, allocated):
        return {"segment_pool_id": pool, "total_size": total, "allocated_size": allocated}

    segments = [segment((0, 0), 500, 400), segment((0, 1), 300, 20), segment((0, 1), 100, 0)]
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: segments)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 450)
    assert memory.peak_bytes() == 450 - 20 + 400


@pytest.mark.gpu
def test_what_a_replayed_graph_uses_is_in_the_peak():
    x, graph = torch.randn(2**24, device="cuda"), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = x.sigmoid().sum()
    torch.cuda.reset_peak_memory_stats()
    graph.replay()
    others = torch.cuda.memory_allocated()
    assert others <= memory.peak_bytes() - x.nbytes < others + 2**25  # the sigmoid's output; segments are larger
    assert torch.cuda.max_memory_allocated() < others + x.nbytes and y.numel() == 1


def test_floors_are_those_of_the_models():
    llama = Sizes.of(CASES["llama-3.2-1b"].config)
    assert operations(llama, 8, 2048)["products"] == pytest.approx(121.5e12, rel=1e-3)
    assert llama.weights == 1_235_814_400 - 33 * 2048  # all but the norms: the table is the head too
    large = Sizes.of(CASES["llama-3.1-8b"].config)
    bytes_ = traffic(large, 1, 1, optimizer_bytes=7)
    assert bytes_["norms"] == 18 * 4096 * 65 and bytes_["optimizer"] == 7
    assert bytes_["rope"] == 32 * 8 * (4096 + 1024) and bytes_["gated units"] == 32 * 18 * 14336
    assert bytes_["embedding"] == 6 * 4096 + 2 * 128256 * 4096
    # 0.82 and 3.0 MB per token in all blocks, with gate and up made anew 0.30 and 1.2
    assert kept_bytes(llama, "none") * 16 == pytest.approx(0.82e6, rel=0.01)
    assert kept_bytes(large, "none") * 32 == pytest.approx(3.0e6, rel=0.01)
    assert kept_bytes(llama, "mlp") * 16 == pytest.approx(0.30e6, rel=0.02)
    assert kept_bytes(large, "block") * 32 == pytest.approx(0.26e6, rel=0.02)


@pytest.mark.parametrize("name", ["gemma-2-2b", "mistral-7b", "qwen2-1.5b"])
@pytest.mark.parametrize("length", [5, 30])
def test_pairs_in_sight_are_counted(name, length):
    sizes = Sizes.of(CASES[name].dry())
    visible = sum(
        k <= q and q - k < (window or length)
        for window in sizes.windows
        for q, k in itertools.product(range(length), repeat=2)
    )
    assert sizes.pairs(length) == visible
    assert any(sizes.windows) == (name != "qwen2-1.5b") and (None in sizes.windows) == (name != "mistral-7b")


@pytest.mark.parametrize(
    ("fixed", "slope", "square", "longest_there_is"),
    [(7.0, 1e-4, 0.0, 170_000), (9.0, 1.5e-3, 0.0, 10_000), (5.0, 1e-4, 2e-7, 9_500), (5.0, 0.0, 3e-9, 79_582)],
)
def test_the_search_ends_at_the_limit_after_few_trials(fixed, slope, square, longest_there_is):
    def trial(length):
        need = fixed + slope * length + square * length**2
        return Trial(length, need, 1.0) if need <= 24 else Trial(length, None)

    trials = longest.search(trial, 24.0)
    best = max(t.length for t in trials if t.peak_gib is not None)
    finest = max(1024, best // 64)
    assert longest_there_is - finest - 1024 < best <= longest_there_is + 1
    assert min(t.length for t in trials if t.peak_gib is None) - best <= finest
    assert len(trials) <= 9 and all(t.length % 1024 == 0 for t in trials)
    assert len({t.length for t in trials}) == len(trials)


def test_a_search_that_comes_to_no_end_keeps_its_trials(tmp_path, monkeypatch, capsys, in_this_process):
    found = iter([Trial(512, 0.25, 2.0), Trial(1024, None)])

    def trial(*arguments):
        if (next_one := next(found, None)) is None:
            raise LigermodelsError("did not finish in 9 s")
        return next_one

    monkeypatch.setattr(longest, "_trial", trial)
    code, (row,) = run(tmp_path, "--longest", "1", "--most", "9999", "--providers", "ligermodels:block")
    assert code == 1 and (row["length"], row["tokens_per_s"], len(row["trials"])) == (512, 256.0, 2)
    assert "did not finish in 9 s; 1,024 did not fit" in capsys.readouterr().out
    other = {"provider": "other", "length": 100}
    ours = row["provider"]
    claims = [rows.Claim(ours, "other", length=2.0), rows.Claim("other", ours, length=0.1)]
    assert [line[-1] for line in rows.verdicts({"rows": [row, other]}, claims)] == ["yes", "not known"]


def test_the_search_stops_where_it_is_told_and_where_nothing_fits():
    assert [t.length for t in longest.search(lambda n: Trial(n, None), 24.0)] == [16384, 8192, 4096, 2048, 1024]
    trials = longest.search(lambda n: Trial(n, 1.0 + n / 1e6, 1.0), 24.0, most=65536)
    assert max(t.length for t in trials) == 65536


def test_the_longest_sequence_is_searched_and_written(tmp_path, capsys, in_this_process):
    code, found = run(tmp_path, "--longest", "1", "--providers", "ligermodels:block")
    assert code == 0 and [row["length"] for row in found] == [128]
    assert "nothing longer was tried" in capsys.readouterr().out


def test_what_a_provider_sends_to_the_host_and_how_large_its_chunks_are(tmp_path):
    case = CASES["llama-3.2-1b"]
    options = argparse.Namespace(dry=True, seed=0, seq=64, checkpointing="none")
    parity.prepare(case, options, tmp_path)
    folder, build = tmp_path / "model", providers.build
    plain = build(Provider.of("ligermodels", case, "none"), case, folder, "cpu")
    assert plain.lm_head.workspace_bytes is None and not plain.is_gradient_checkpointing
    model = build(Provider.of("ligermodels+chunks+offload:none-1", case, "none"), case, folder, "cpu")
    policy = model.decoder.checkpointing
    assert model.lm_head.workspace_bytes == 2**28
    assert (policy.recompute, policy.blocks, policy.offload is not None) == ("none", 1, True)
    many = Provider.of("ligermodels:mlp-99", case, "none")
    assert build(many, case, folder, "cpu", shallow=True).decoder.checkpointing.blocks == len(model.decoder.layers)
    with pytest.raises(LigermodelsError, match="blocks=99"):
        build(many, case, folder, "cpu")
    with pytest.raises(ValueError, match="unknown provider"):
        Provider.of("ligermodels:none-1", case, "none")  # nothing is done with the first block


@pytest.mark.parametrize("kind", ["ligermodels", "ligermodels+inbackward", "ligermodels+inbackward+offload"])
def test_a_trial_that_breaks_off_in_the_backward_is_no_hindrance(kind, tmp_path, in_this_process, monkeypatch):
    def step_of(provider, model, *others):
        step = providers.step_of(provider, model, *others)

        def limited(**inputs):
            def fail(*_):
                if inputs["input_ids"].shape[1] > 64:
                    raise RuntimeError("CUDA out of memory")

            handle = model.decoder.layers[0].input_layernorm.register_full_backward_hook(fail)
            try:
                return step(**inputs)
            finally:
                handle.remove()

        return limited

    monkeypatch.setattr(longest, "step_of", step_of)
    code, (row,) = run(tmp_path, "--longest", "1", "--providers", f"{kind}:block")
    assert code == 0 and row["length"] == 64 and [t["length"] for t in row["trials"]] == [128, 64, 96]


def _longest_in_a_gib(kind, folder):
    options = argparse.Namespace(dry=True, seed=0, seq=64, longest=1.0, most=None, checkpointing="none")
    case = dataclasses.replace(CASES["llama-3.2-1b"], tiny={"vocab_size": 32768, "head_dim": 16})
    parity.prepare(case, options, folder)
    options.dry = False
    return longest.longest(kind, dataclasses.replace(case, config=case.dry()), options, folder)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["ligermodels", "ligermodels+inbackward", "ligermodels+inbackward+offload:block"])
def test_a_trial_that_does_not_fit_leaves_nothing_behind(kind, tmp_path):
    """In a process of its own, where no other test holds memory."""
    with concurrent.futures.ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        row = pool.submit(_longest_in_a_gib, kind, tmp_path).result()
    assert any(t["peak_gib"] is None for t in row["trials"])
    assert 0.5 < row["peak_gib"] <= 1.0


def test_rows_are_commands_and_fit_into_their_budget():
    parser = command._parser()
    for row in rows.ROWS.values():
        options = parser.parse_args([*row.arguments, "--providers", ",".join(row.providers)])
        command._complete(options, parser)
    names = list(rows.ROWS)
    assert rows.within(names, math.inf) == names
    assert rows.within(names, rows.ROWS[names[0]].seconds) == names[:1]
    assert rows.within([names[1]], 1.0) == []


KILLED = """if True:
    import sys
    from pathlib import Path
    from benchmarks.train_step import __main__ as command
    from benchmarks.train_step import children, rows

    class Child(children.Child):  # those of "hf" are what ROOT has; the others work here
        def __init__(self, arguments, environment):
            self.arguments, self.here = arguments, arguments[1] != "hf"
            if not self.here:
                super().__init__(arguments, environment)

        def ready(self, timeout=None):
            return self if self.here else super().ready(timeout)

        def proceed(self):
            return None if self.here else super().proceed()

        def go(self, timeout):
            return "" if self.here and command.main(self.arguments) == 0 else super().go(timeout)

        def stop(self):
            return None if self.here else super().stop()

    def measured(row, case, options, folder):
        return {**row, "tokens_per_s": 100.0, "losses": [6.0], "first_gradient_norm": 1.0}

    children.Child, children.ROOT, children.wait = Child, Path(sys.argv.pop(1)), lambda: None
    command.preload = command.prepare = lambda *arguments: {}
    command.check = lambda name, *arguments: {"provider": name, "checkpointing": "none", "parity": {"red": []}}
    command.measure = measured
    claims = (rows.Claim("ligermodels", "hf", speed=1.1),)
    command.ROWS.clear()
    command.ROWS["a"] = rows.Row(("--case", "llama-3.2-1b"), claims, 1, others=("hf+eager",))
    sys.exit(command.main(sys.argv[1:]))
"""
HANGS = f"""if True:
    import os, pathlib, sys, time
    for _ in "go", "and on":
        print({children.READY!r}, flush=True)
        sys.stdin.readline()
    pathlib.Path("part").write_text(str(os.getpid()))
    os.replace("part", "pid")
    time.sleep(3600)
"""


def test_a_run_that_is_ended_leaves_what_it_has_measured(tmp_path, capsys):
    def begin(name, *arguments):
        script = tmp_path / name / "benchmarks" / "train_step" / "__main__.py"
        script.parent.mkdir(parents=True)
        script.write_text(HANGS)
        command_line = [sys.executable, "-c", KILLED, str(tmp_path / name), "--dry", *arguments]
        folder, pipe = Path(command.__file__).parents[2], subprocess.PIPE
        return subprocess.Popen(command_line, cwd=folder, stdout=pipe, stderr=pipe, text=True)

    out = {"case": tmp_path / "one" / "result.json", "rows": tmp_path / "step-a.json"}
    runs = {
        "case": begin("case", "--providers", "ligermodels,hf,hf+eager", "--out", str(out["case"])),
        "rows": begin("rows", "--rows", "a", "--out", str(tmp_path)),
    }
    try:
        for (name, process), number in zip(runs.items(), (signal.SIGTERM, signal.SIGINT), strict=True):
            while not (tmp_path / name / "pid").exists():  # the second provider works, the first one is done
                assert process.poll() is None, process.communicate()
                time.sleep(0.02)
            (row,) = json.loads(out[name].read_text())["rows"]
            process.send_signal(number)
            process.send_signal(number)  # as `timeout` does
            printed, errors = process.communicate(timeout=300)
            assert process.returncode == 128 + number, errors
            with pytest.raises(ProcessLookupError):
                os.kill(int((tmp_path / name / "pid").read_text()), 0)
            assert command.main(["--render", str(out[name])]) == 0
            text = capsys.readouterr().out
            assert text.strip() in printed
            lines = {line.split()[0]: line for line in text.splitlines() if line}
            assert row["provider"] == "ligermodels" and " 100 " in lines["ligermodels"]
            assert "left out" in lines["hf"] and "left out" in lines["hf+eager"]
    finally:
        for name, process in runs.items():
            process.kill()
            with contextlib.suppress(OSError):
                os.kill(int((tmp_path / name / "pid").read_text()), signal.SIGKILL)
    assert printed.splitlines()[-1].endswith("not known")  # of the row's claims
    assert [path.name for path in out["case"].parent.iterdir()] == ["result.json"]


def test_no_provider_is_begun_that_does_not_fit_into_the_budget(tmp_path, monkeypatch, capsys):
    now, went = [0.0], []

    class Child:
        def __init__(self, arguments, environment):
            self.name, self.folder = arguments[1], Path(arguments[3])

        def ready(self, timeout=None):
            return self

        def proceed(self):
            pass

        def go(self, timeout):
            went.append(self.name)
            now[0] += {"prepare": 5, "ligermodels": 8, "hf+eager": 20}.get(self.name, 10)
            row = {"provider": self.name, "parity": {"red": []}, "tokens_per_s": 1.0}
            children.tell(self.folder, {**row, "losses": [6.0], "first_gradient_norm": 1.0})
            return "broken" if self.name == "hf+eager" else ""

        def stop(self):
            went.append(f"{self.name} stopped")

    clock = argparse.Namespace(monotonic=lambda: now[0], perf_counter=time.perf_counter)
    monkeypatch.setattr(command, "time", clock)
    monkeypatch.setattr(children, "Child", Child)
    monkeypatch.setattr(command, "_say", lambda *arguments: None)
    names = "hf+eager,ligermodels,hf,ligermodels+adamw:block"
    code, found = run(tmp_path, "--budget", "50", "--providers", names)
    # 5 + 20 + 8 + 10 are 43, and 7 are less than the 10 of the slowest that came to its end.
    assert code == 0 and [row["provider"] for row in found] == ["hf+eager", "ligermodels", "hf"]
    assert went[:5] == ["prepare", "hf+eager", "ligermodels", "hf", "ligermodels+adamw:block stopped"]
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("ligermodels+adamw:block"))
    assert line.split()[1] == "block" and "left out: 7 s were left, the slowest before it took 10" in line


def test_what_prepares_is_ended_as_well(tmp_path, monkeypatch, capsys):
    ended = []

    class Child:
        def __init__(self, arguments, environment):
            self.name = arguments[1]

        def ready(self, timeout=None):
            return self

        def go(self, timeout):
            raise command.Stopped(143)

        def stop(self):
            ended.append(self.name)

    monkeypatch.setattr(children, "Child", Child)
    arguments = ["--dry", "--providers", "hf", "--out", str(tmp_path / "result.json")]
    assert command.main(arguments) == 143 and ended == ["prepare", "hf"]
    assert "left out" in capsys.readouterr().out and not list(tmp_path.iterdir())  # an earlier result would stay


def test_a_signal_ends_a_run_once():
    if threading.current_thread() is not threading.main_thread():
        pytest.skip("signals come to the main thread")
    before = signal.getsignal(signal.SIGTERM)
    with command._stoppable():
        with pytest.raises(command.Stopped) as stopped:
            signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGINT)
    assert stopped.value.code == 143 and signal.getsignal(signal.SIGTERM) is before


def test_the_profiler_is_not_touched_before_all_others_wait(tmp_path, monkeypatch, in_this_process):
    def touched(*arguments, **keywords):
        raise AssertionError("several processes at a time would have the device's profiler")

    case = CASES["llama-3.2-1b"]
    options = argparse.Namespace(dry=True, seed=0, seq=64, checkpointing="none", profile=True)
    parity.prepare(case, options, tmp_path)
    monkeypatch.setattr(torch.autograd.profiler.profile, "__init__", touched)
    for name in ("ligermodels", "hf"):
        assert measure.check(name, case, options, tmp_path)["parity"]["red"] == []


def test_claims_are_judged():
    record = {"rows": [
        {"provider": "ours", "tokens_per_s": 110.0, "peak_gib": 20.0},
        {"provider": "peer", "tokens_per_s": 100.0, "peak_gib": 21.0},
    ]}  # fmt: skip
    claims = [
        rows.Claim("ours", "peer", speed=1.1, memory=0.9, gib=30),
        rows.Claim("ours", "gone", speed=1.1, length=2.0),
    ]
    lines = rows.verdicts(record, claims)
    assert [line[-1] for line in lines] == ["yes", "NO", "yes", "not known", "not known"]
    assert lines[1][-2] == pytest.approx(20 / 21)


def test_rows_run_one_after_the_other(tmp_path, capsys, monkeypatch, in_this_process):
    def checked(name, case, options, folder):
        return {"provider": name, "checkpointing": options.checkpointing, "parity": {"red": []}}

    def measured(row, case, options, folder):
        return {**row, "tokens_per_s": 100.0, "losses": [6.0], "first_gradient_norm": 1.0, "seconds": {"steps": 2.5}}

    monkeypatch.setattr(command, "prepare", lambda *arguments: {"checkpoint": 1.25})
    monkeypatch.setattr(command, "check", checked)
    monkeypatch.setattr(command, "measure", measured)
    row = rows.Row(("--case", "llama-3.2-1b"), (rows.Claim("ligermodels", "hf", speed=1.1),), 1)
    other = rows.Row(("--case", "llama-3.2-1b", "--checkpointing", "block"), (), 1, others=("ligermodels",))
    monkeypatch.setattr(command, "ROWS", {"a": row, "b": other, "c": dataclasses.replace(row, seconds=99)})
    monkeypatch.setattr(rows, "ROWS", command.ROWS)
    assert command.main(["--dry", "--rows", "all", "--budget", "60", "--out", str(tmp_path)]) == 0
    assert {path.name for path in tmp_path.iterdir()} == {"step-a.json", "step-b.json"}
    assert json.loads((tmp_path / "step-b.json").read_text())["settings"]["checkpointing"] == "block"
    printed = capsys.readouterr()
    assert printed.out.splitlines()[-1].endswith("NO") and "left out: c\n" in printed.out
    for line in ("a: from 0 s on", "prepare: 0 s (imports 0.0, checkpoint 1.2)", "hf: 0 s (steps 2.5)", "b: from"):
        assert line in printed.err
    with pytest.raises(SystemExit):
        command.main(["--dry", "--rows", "a,z"])


@pytest.mark.parametrize(
    ("gib", "expected"), [(48, ["check"] * 3 + ["wait"] * 3), (47, ["check", "wait"] * 3)], ids=["all fit", "one fits"]
)
def test_parity_is_checked_at_the_same_time_where_all_fit(gib, expected, tmp_path, monkeypatch):
    order = []

    class Child:
        def __init__(self, arguments, environment):
            self.name = arguments[1]

        def ready(self, timeout=None):
            order.append("wait" if timeout else "imported")
            return self

        def proceed(self):
            order.append("check")

    device = argparse.Namespace(total_memory=gib * 2**30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: device)
    monkeypatch.setattr(children, "Child", Child)
    options = command._parser().parse_args(["--case", "llama-3.1-8b"])
    run = command.Run(command._complete(options, command._parser()), tmp_path)
    del run.children["prepare"]
    run.check()
    # 8 GiB, and 16 bytes for each of 4096 x 128256 logits: 15.8 GiB for each of three providers.
    assert order == ["imported"] * 3 + expected


def test_providers_of_a_run_share_nothing_but_its_folder(tmp_path, monkeypatch):
    started = []
    monkeypatch.setattr(children, "Child", lambda arguments, environment: started.append((arguments, environment)))
    options = command._parser().parse_args(["--longest", "24", "--providers", "hf,ligermodels", "--seq", "64"])
    command.Run(command._complete(options, command._parser()), tmp_path)
    assert [arguments[1] for arguments, _ in started] == ["prepare", "hf", "ligermodels"]
    parsed = command._parser().parse_args(started[1][0])
    assert (parsed.longest, parsed.seq, parsed.folder) == (24.0, 64, tmp_path / "llama-3.2-1b-longest")
    assert all("expandable" in environment["PYTORCH_ALLOC_CONF"] for _, environment in started)
