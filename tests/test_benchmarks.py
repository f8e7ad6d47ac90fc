"""What of the benchmarks a CPU can judge: parity comes before time, results are written and shown."""

import argparse
import json

import pytest
import torch
from torch import nn

from benchmarks import common, kernels, train_step
from benchmarks.common import Error, Timer
from tests.kernels.oracle import assert_as_exact


class NoTimer(Timer):
    """A timer for runs in which nothing may be timed."""

    def time(self, call, prepare=lambda: None):
        raise AssertionError("timed although parity is red")

    def host_us(self, call):
        raise AssertionError("timed although parity is red")


@pytest.fixture
def place():
    return kernels.Place("cpu", torch.float32)


def run(ops, place, *, peers=frozenset(), timer=None):
    limits = {"copy_tb_per_s": 1.0, "matmul_bf16_tflop_per_s": 1.0}
    return kernels.run(ops, "dry", set(peers), place, timer or Timer("cpu", budget_ms=1), limits)


@pytest.mark.parametrize("noise", [0.0, 0.5, 0.98, 1.02, 1.5, 40.0])
@pytest.mark.parametrize("one_element", [False, True])
def test_the_rule_is_the_one_that_judges_the_kernels(noise, one_element):
    exact = torch.randn(64, 64, dtype=torch.float64)
    error = torch.randn(64, 64, dtype=torch.float64) * 1e-5
    eager, actual = (exact + error).float(), exact + noise * error
    if one_element:
        actual[3, 5] += noise * 1e-4
    actual = actual.float()
    why = Error.of(actual, exact).worse_than(Error.of(eager, exact))
    try:
        assert_as_exact(actual, eager, exact)
    except AssertionError:
        assert why
    else:
        assert not why


def test_nan_is_never_as_exact():
    exact = torch.ones(4, dtype=torch.float64)
    actual = torch.tensor([1.0, float("nan"), 1.0, 1.0])
    assert Error.of(actual, exact).worse_than(Error.of(exact.float() + 1, exact), slack=1e9, floor=1e9)


def test_a_wrong_output_stops_every_timing_of_its_op(place, monkeypatch):
    right = kernels.kernels.rms_norm
    monkeypatch.setattr(kernels.kernels, "rms_norm", lambda *a, **k: right(*a, **k) * 1.001)
    record = run(["rms_norm"], place, peers={"eager", "torch"}, timer=NoTimer("cpu"))
    assert record["red"] == ["rms_norm"]
    assert record["rows"] == record["host"] == []
    assert any("rms error" in row["why"] for row in record["parity"] if row["provider"] == "ligermodels")


def test_a_wrong_gradient_is_enough(place, monkeypatch):
    right = kernels.kernels.rms_norm

    def detached(x, weight, *, eps):
        return right(x, weight, eps=eps) + 0.01 * (weight - weight.detach())

    monkeypatch.setattr(kernels.kernels, "rms_norm", detached)
    record = run(["rms_norm"], place, timer=NoTimer("cpu"))
    assert {row["tensor"] for row in record["parity"] if row["why"]} == {"d_weight"}


def test_an_error_of_ours_is_red_and_the_other_ops_still_run(place, monkeypatch):
    def broken(*args, **options):
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(kernels.kernels, "glu", broken)
    record = run(["glu", "rms_norm"], place)
    assert record["red"] == ["glu"]
    assert {row["op"] for row in record["rows"]} == {"rms_norm"}
    assert "no such kernel" in kernels.render({**record, **_heading()})


def test_a_wrong_peer_is_left_out_and_ours_is_timed(place, monkeypatch):
    monkeypatch.setattr(torch.nn.functional, "rms_norm", lambda x, shape, weight, eps: x * weight)
    record = run(["rms_norm"], place, peers={"eager", "torch"})
    rows = {row["provider"]: row for row in record["rows"]}
    assert record["red"] == []
    assert "full_ms" in rows["ligermodels"] and "full_ms" in rows["eager"]
    assert "full_ms" not in rows["F.rms_norm"]


def test_the_exit_code_and_the_file_say_what_is_red(tmp_path, monkeypatch, capsys):
    right = kernels.kernels.rms_norm
    monkeypatch.setattr(kernels.kernels, "rms_norm", lambda *a, **k: right(*a, **k) + 1)
    out = tmp_path / "deep" / "result.json"
    assert kernels.main(["--dry", "--ops", "rms_norm", "--out", str(out)]) == 1
    assert json.loads(out.read_text())["red"] == ["rms_norm"]
    assert "RED" in capsys.readouterr().out


def test_a_run_is_written_and_rendered(tmp_path, capsys):
    out = tmp_path / "result.json"
    assert kernels.main(["--dry", "--ops", "rms_norm,add_rms_norm,glu", "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    record = json.loads(out.read_text())
    assert {row["op"] for row in record["rows"]} == {"rms_norm", "add_rms_norm", "glu"}
    for row in record["rows"]:
        assert row["forward_ms"]["median"] > 0 and row["full_ms"]["p20"] <= row["full_ms"]["p80"]
    assert record["environment"]["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert kernels.main(["--render", str(out)]) == 0
    assert capsys.readouterr().out == printed
    assert kernels.main(["--render", str(out), "--markdown"]) == 0
    tables = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert len([line for line in tables if "ligermodels" in line]) == 6  # a time and a host cost for each op


@pytest.mark.parametrize("arguments", [["--ops", "rmsnorm"], ["--peers", "eager,vllm"], []])
def test_what_cannot_run_is_said_at_once(arguments, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as stop:
        kernels.main([*arguments, *(["--dry"] if arguments else [])])
    assert stop.value.code == 2
    assert "known" in capsys.readouterr().err if arguments else True


@pytest.mark.parametrize("op", sorted(kernels.CASES))
def test_every_case_has_the_results_that_its_eager_form_has(op, place):
    for numbers in kernels.SHAPES["dry"][op]:
        case = kernels.CASES[op](place, {"eager", "torch"}, *numbers)
        inputs, cotangents = case.make()
        exact = kernels.exact_results(case, inputs, cotangents)
        for provider in case.providers:
            results = kernels.Bound(case, provider, inputs, cotangents).results()
            assert results.keys() == exact.keys()
            for name, result in results.items():
                torch.testing.assert_close(result.detach().double(), exact[name], rtol=1e-4, atol=1e-5)


def test_the_exact_loss_by_hand_is_autograds(place):
    case = kernels.linear_cross_entropy_case(place, set(), 33, 32, 131, 0.7)
    inputs, _ = case.make()
    by_hand = case.exact(inputs)
    double = {name: x.double() if x.is_floating_point() else x for name, x in inputs.items()}
    by_autograd = kernels.Bound(case, kernels.Provider("eager", case.eager), double, ()).results()
    for name, result in by_autograd.items():
        torch.testing.assert_close(by_hand[name], result.detach(), rtol=1e-12, atol=1e-15)


def test_inputs_that_a_provider_overwrites_are_restored(place):
    def overwrite(t):
        y = t["gate"] * t["up"]
        t["gate"].data.zero_()
        return (y,)

    case = kernels.glu_case(place, set(), 3, 4)
    inputs, cotangents = case.make()
    before = {name: x.clone() for name, x in inputs.items()}
    bound = kernels.Bound(case, kernels.Provider("overwrites", overwrite, mutates=True), inputs, cotangents)
    bound.forward()
    assert not bound.tensors["gate"].any()
    bound.restore()
    for name, x in before.items():
        assert torch.equal(bound.tensors[name], x) and torch.equal(inputs[name], x)


def test_a_table_is_aligned():
    rows = [["a", 12345.6, 0.01234, None], ["longer", 7, 99.96, "x"]]
    lines = common.table(["name", "n", "share", "note"], rows, markdown=True).splitlines()
    assert len({len(line) for line in lines}) == 1
    assert [line.count("|") for line in lines] == [5] * 4
    assert "12,346" in lines[2] and "0.0123" in lines[2] and "100" in lines[3]


def _heading():
    return {
        "environment": common.environment("cpu"),
        "dtype": "float32",
        "ceilings": {"copy_tb_per_s": 1.0, "matmul_bf16_tflop_per_s": 1.0},
    }


def expected(**changes):
    exact = {"logits": torch.randn(1, 64, 32), "loss": 6.0, "gradient_norm": 2.0}
    return {"exact": exact, "errors_in_bf16": {"logits": 1e-2, "loss": 0.0, "gradient_norm": 0.0, **changes}}


def test_a_model_that_agrees_may_be_timed():
    parity = expected()
    logits = parity["exact"]["logits"]
    found = {"logits": logits + 1e-2 * torch.randn_like(logits), "loss": 6.01, "gradient_norm": 1.995}
    assert train_step.disagreement(found, parity, 1.25) == []


@pytest.mark.parametrize(
    ("name", "change"), [("logits", 2e-2), ("loss", 0.05), ("gradient_norm", -0.02), ("loss", float("nan"))]
)
def test_a_model_that_disagrees_may_not(name, change):
    parity = expected()
    found = {**parity["exact"], name: parity["exact"][name] + change}
    (reason,) = train_step.disagreement(found, parity, 1.25)
    assert name in reason


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
    ids = torch.randint(32, (1, train_step.PARITY_TOKENS))
    torch.save({"ids": ids, **expected()}, tmp_path / "parity.pt")
    monkeypatch.setattr(train_step, "build", lambda *arguments: Wrong())
    monkeypatch.setattr(torch.optim, "AdamW", None)
    row = train_step.measure("hf", argparse.Namespace(dry=True, checkpointing="none"), tmp_path)
    assert len(row["parity"]["red"]) == 3
    assert "tokens_per_s" not in row


def test_the_configs_are_the_models_they_name(monkeypatch):
    import ligermodels

    counts = {"llama-3.2-1b": 1_235_814_400, "llama-3.1-8b": 8_030_261_248}
    for name, count in counts.items():
        assert ligermodels.Llama.from_config(train_step.CONFIGS[name], device="meta").num_parameters() == count


def test_a_training_step_is_measured_and_written(tmp_path, capsys, monkeypatch):
    pytest.importorskip("transformers")

    def in_this_process(options, folder, what):
        assert train_step.main(train_step._arguments(options, folder, what)) == 0
        return ""

    monkeypatch.setattr(train_step, "_child", in_this_process)
    out = tmp_path / "result.json"
    code = train_step.main(["--dry", "--providers", "ligermodels,hf", "--markdown", "--out", str(out)])
    rows = {row["provider"]: row for row in json.loads(out.read_text())["rows"]}
    assert code == 0, rows
    assert rows.keys() == {"ligermodels", "hf"}
    for row in rows.values():
        assert row["parity"]["red"] == [] and row["tokens_per_s"] > 0
    assert rows["ligermodels"]["losses"] == pytest.approx(rows["hf"]["losses"], rel=train_step.RELATIVE)
    assert "| ligermodels |" in capsys.readouterr().out


def test_a_provider_whose_process_fails_gets_a_note(tmp_path, monkeypatch, capsys):
    real = train_step._child
    monkeypatch.setattr(
        train_step, "_child", lambda o, folder, what: "" if what == "prepare" else real(o, folder, what)
    )
    out = tmp_path / "result.json"
    assert train_step.main(["--dry", "--providers", "ligermodels", "--out", str(out)]) == 1
    (row,) = json.loads(out.read_text())["rows"]
    assert "config.json" in row["note"]
    assert row["note"] in capsys.readouterr().out


def test_the_first_step_is_compared_too():
    def row(provider, loss, norm):
        return {"provider": provider, "losses": [loss], "first_gradient_norm": norm, "parity": {"red": []}}

    rows = [row("ligermodels", 6.0, 2.1), row("hf", 6.0, 2.0), row("hf+liger", 6.01, 2.0)]
    train_step._compare_first_steps(rows)
    assert [len(r["parity"]["red"]) for r in rows] == [1, 0, 0]
