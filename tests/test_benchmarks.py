"""What of the benchmarks a CPU can judge: parity comes before time, results are written and shown."""

import argparse
import dataclasses
import itertools
import json
import threading
import time
from pathlib import Path

import pytest
import torch

from benchmarks import common, convergence
from benchmarks.common import Error, Job, Timer
from benchmarks.kernels import __main__ as command
from benchmarks.kernels import attention, report, suite, turn
from benchmarks.kernels.case import UNITS, Bound, Case, Place, Provider, exact_results
from benchmarks.kernels.losses import linear_cross_entropy_case
from benchmarks.kernels.pointwise import glu_case
from benchmarks.train_step import __main__ as train_step
from ligermodels import kernels
from tests.kernels.oracle import assert_as_exact


class NoTimer(Timer):
    """A timer for runs in which nothing may be timed."""

    def device(self, jobs):
        raise AssertionError("timed although parity is red")

    def wall(self, jobs):
        raise AssertionError("timed although parity is red")

    def host_us(self, call):
        raise AssertionError("timed although parity is red")


@pytest.fixture
def place():
    return Place("cpu", torch.float32)


def limits():
    return dict.fromkeys(UNITS.values(), 1.0)


def run(ops, place, *, peers=frozenset(), timer=None, **options):
    return suite.run(ops, "dry", set(peers), place, timer or Timer("cpu", budget_ms=1), limits, **options)


@pytest.mark.parametrize("noise", [0.0, 0.5, 0.98, 1.02, 1.5, 40.0])
@pytest.mark.parametrize("one_element", [False, True])
def test_the_rule_is_at_least_as_strict_as_the_one_that_judges_the_kernels(noise, one_element):
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
        assert one_element or not why  # of one element, what tests allow by chance is not allowed where time follows


def test_nan_is_never_as_exact():
    exact = torch.ones(4, dtype=torch.float64)
    actual = torch.tensor([1.0, float("nan"), 1.0, 1.0])
    assert Error.of(actual, exact).worse_than(Error.of(exact.float() + 1, exact), slack=1e9, floor=1e9)


def test_a_wrong_output_stops_every_timing_of_its_op(place, monkeypatch):
    right = kernels.rms_norm
    monkeypatch.setattr(kernels, "rms_norm", lambda *a, **k: right(*a, **k) * 1.001)
    record = run(["rms_norm"], place, peers={"eager", "torch"}, timer=NoTimer("cpu"))
    assert record["red"] == ["rms_norm"]
    assert record["rows"] == record["host"] == []
    assert any("rms error" in row["why"] for row in record["parity"] if row["provider"] == "ligermodels")


def test_a_wrong_gradient_is_enough(place, monkeypatch):
    right = kernels.rms_norm

    def detached(x, weight, *, eps):
        return right(x, weight, eps=eps) + 0.01 * (weight - weight.detach())

    monkeypatch.setattr(kernels, "rms_norm", detached)
    record = run(["rms_norm"], place, timer=NoTimer("cpu"))
    assert {row["tensor"] for row in record["parity"] if row["why"]} == {"d_weight"}


def test_an_error_of_ours_is_red_and_the_other_ops_still_run(place, monkeypatch):
    def broken(*args, **options):
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(kernels, "glu", broken)
    record = run(["glu", "rms_norm"], place)
    assert record["red"] == ["glu"]
    assert {row["op"] for row in record["rows"]} == {"rms_norm"}
    assert "no such kernel" in command.render({**record, **_heading()})


def test_a_wrong_peer_is_left_out_and_ours_is_timed(place, monkeypatch):
    monkeypatch.setattr(torch.nn.functional, "rms_norm", lambda x, shape, weight, eps: x * weight)
    record = run(["rms_norm"], place, peers={"eager", "torch"})
    rows = {row["provider"]: row for row in record["rows"]}
    assert record["red"] == []
    assert "full_ms" in rows["ligermodels"] and "full_ms" in rows["eager"]
    assert "full_ms" not in rows["F.rms_norm"]


def test_what_no_longer_fits_into_the_budget_is_left_out(place, monkeypatch):
    now = itertools.count()
    clock = argparse.Namespace(monotonic=lambda: float(next(now)), perf_counter=time.perf_counter)
    monkeypatch.setattr(suite, "time", clock)
    saved = []
    # The clock is read once before an op is checked, and once before each of its shapes, of which glu has two.
    record = run(["rms_norm", "glu", "layer_norm"], place, deadline=3.0, save=lambda r: saved.append(len(r["rows"])))
    assert [(row["op"], row["shape"]) for row in record["rows"]][-1] == ("glu", "silu T=5 F=24")
    assert record["left_out"] == ["glu gelu_tanh T=5 F=24", "layer_norm"] and record["red"] == []
    assert saved == [1, 3]  # after each op; glu has two providers of ours
    assert "glu gelu_tanh T=5 F=24, layer_norm" in command.render({**record, **_heading()})


def test_runs_beside_each_other_are_timed_one_by_one(place, tmp_path, monkeypatch):
    fcntl = pytest.importorskip("fcntl")
    mine, other = (turn.Turn(tmp_path / "lock") for _ in range(2))
    order, check, waiting = [], suite.check, threading.Event()

    def cannot_lock(kind):
        with pytest.raises(BlockingIOError), (tmp_path / "lock").open("a") as file:
            fcntl.flock(file, kind | fcntl.LOCK_NB)

    def checked(case):
        order.append(f"checked {case.op}")
        cannot_lock(fcntl.LOCK_EX)
        with other.together():  # does not wait
            return check(case)

    def finish():
        with other.together():
            waiting.set()
            time.sleep(0.2)
            order.append("the other one has checked")

    thread = threading.Thread(target=finish)

    def measured(case, *rest):
        order.append(f"timed {case.op}")
        cannot_lock(fcntl.LOCK_SH)
        return iter([])

    def begun(ops):
        yield ops[0]
        thread.start()
        assert waiting.wait(60)
        yield from ops[1:]

    monkeypatch.setattr(suite, "check", checked)
    monkeypatch.setattr(suite, "measure", measured)
    run(begun(["rms_norm", "add_rms_norm"]), place, turn=mine)
    thread.join()
    assert order == [
        "checked rms_norm",
        "checked add_rms_norm",
        "the other one has checked",
        "timed rms_norm",
        "timed add_rms_norm",
    ]


def test_the_exit_code_and_the_file_say_what_is_red(tmp_path, monkeypatch, capsys):
    right = kernels.rms_norm
    monkeypatch.setattr(kernels, "rms_norm", lambda *a, **k: right(*a, **k) + 1)
    out = tmp_path / "deep" / "result.json"
    assert command.main(["--dry", "--ops", "rms_norm", "--out", str(out)]) == 1
    assert json.loads(out.read_text())["red"] == ["rms_norm"]
    assert "RED" in capsys.readouterr().out


def test_a_run_is_written_and_rendered(tmp_path, capsys):
    out = tmp_path / "result.json"
    assert command.main(["--dry", "--ops", "rms_norm,add_rms_norm,glu", "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    record = json.loads(out.read_text())
    assert {row["op"] for row in record["rows"]} == {"rms_norm", "add_rms_norm", "glu"}
    for row in record["rows"]:
        for name in ("forward_ms", "full_ms", "forward_wall_ms", "full_wall_ms"):
            assert 0 < row[name]["p20"] <= row[name]["median"] <= row[name]["p80"]
    assert record["environment"]["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert command.main(["--render", str(out)]) == 0
    assert capsys.readouterr().out == printed
    assert command.main(["--render", str(out), "--markdown"]) == 0
    tables = capsys.readouterr().out.split("### ")[1:]
    titles = [text.split("\n")[0].split(" (")[0] for text in tables]
    assert titles == ["Summary", "rms_norm", "add_rms_norm", "glu", "Host time per call, tiny shapes"]
    ours = [sum("| ligermodels" in line for line in text.splitlines()) for text in tables]
    assert ours == [1 + 1 + 2 * 2, 1, 1, 2 * 2, 1 + 1 + 2]  # glu: two providers, two shapes


def test_a_group_is_its_ops(capsys):
    assert command.main(["--dry", "--ops", "norms,layer_norm,activate"]) == 0
    titles = [line.split()[1] for line in capsys.readouterr().out.splitlines() if line.startswith("### ")]
    assert titles[1:-1] == [*suite.GROUPS["norms"], "activate"]
    assert sorted(op for group in suite.GROUPS.values() for op in group) == sorted(suite.CASES)


def test_there_are_shapes_of_every_op():
    for shapes in suite.SHAPES.values():
        assert list(shapes) == list(suite.CASES)


class Known(Timer):
    """Every forward takes 4 ms on the device, forward and backward 12, products 6; on the wall twice that."""

    def __init__(self):
        super().__init__("cpu")

    def device(self, jobs):
        name = getattr(jobs[0].call, "__name__", "")
        return common.Timing.of([{"forward": 4.0, "full": 12.0}.get(name, 6.0)], 1, "profiler")

    def wall(self, jobs):
        return common.Timing.of([8.0 if jobs[0].call.__name__ == "forward" else 24.0], 1, "wall")


def test_shares_are_of_the_ceiling(place):
    rows = {}
    for op, numbers in [("add_rms_norm", (5, 48)), ("linear_cross_entropy", (9, 32, 131))]:
        case = dataclasses.replace(suite.CASES[op](place, set(), *numbers), forward_work=1e9, full_work=9e9)
        rows[op] = list(suite.measure(case, Known(), dict.fromkeys(UNITS.values(), 1.0), set()))
    (row,) = rows["add_rms_norm"]
    assert (row["forward_share"], row["backward_share"], row["full_share"]) == (0.25, 1.0, 0.75)
    products, row, *_ = rows["linear_cross_entropy"]
    assert products["provider"] == "three GEMMs" and not products["ours"] and products["full_ms"]["median"] == 6.0
    assert row["full_share"] == 0.5  # of what the products take, whatever the rate of a large one is
    assert row["tflop_per_s"]["both"] == pytest.approx(9e9 / 12 * 1e-9)


def test_inputs_are_rotated_by_what_a_call_touches(place):
    class Rotating(Known):
        def copies(self, nbytes):
            self.touched = nbytes
            return 3

        def device(self, jobs):
            assert len(jobs) == 3
            owners = {id(x) for job in jobs for x in job.call.__self__.tensors.values()}
            assert len(owners) == 3 * len(jobs[0].call.__self__.tensors)
            return super().device(jobs)

    timer = Rotating()
    case = suite.CASES["int2_matmul"](place, {"eager"}, 1, 16, 64)
    assert len(list(suite.measure(case, timer, dict.fromkeys(UNITS.values(), 1.0), set()))) == 2
    assert timer.touched == 16 * 64 / 4 + 64 + 2 * 16  # packed weights, activations and bf16 results of ours


def test_the_summary_compares_with_the_fastest_peer_and_with_liger(place):
    case = suite.CASES["rms_norm"](place, {"eager", "torch"}, 5, 48)
    rows = list(suite.measure(case, Known(), dict.fromkeys(UNITS.values(), 1.0), set()))
    for row, wall, mib in zip(rows, (10.0, 30.0, 5.0), (4.0, 8.0, 2.0), strict=True):
        row["full_wall_ms"]["median"], row["peak_mib"] = wall, mib
    rows[1]["provider"] = "Liger"
    host = [
        {"op": "rms_norm", "provider": name, "full_us": us} for name, us in (("ligermodels", 50.0), ("Liger", 200.0))
    ]
    record = {"rows": rows, "host": host, "parity": []}
    line = dict(zip(report.SUMMARY, report._summary(rows[0], record), strict=True))
    assert line["fastest peer, wall"] == "F.rms_norm" and line["its wall / ours"] == 0.5
    assert line["Liger's wall / ours"] == 3.0 and line["Liger's MiB / ours"] == 2.0
    assert line["host us"] == 50.0 and line["Liger's host / ours"] == 4.0
    assert "F.rms_norm *" in report._line(rows[2], rows, {})  # timed by the profiler


def test_pictures_are_written_for_every_op(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    assert command.main(["--dry", "--ops", "rms_norm,int2_matmul", "--plot", str(tmp_path / "new")]) == 0
    printed = capsys.readouterr().out
    for path in (tmp_path / "new" / "rms_norm.png", tmp_path / "new" / "int2_matmul.png"):
        assert path.read_bytes().startswith(b"\x89PNG") and str(path) in printed


def test_pictures_without_matplotlib_are_refused_at_once(monkeypatch, capsys):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SystemExit) as stop:
        command.main(["--dry", "--plot", "nowhere"])
    assert stop.value.code == 2 and "pip install matplotlib" in capsys.readouterr().err


@pytest.mark.gpu
def test_the_device_is_timed_by_a_graph_and_what_waits_by_the_profiler():
    timer, x = Timer("cuda"), torch.ones(2**20, device="cuda")
    graph = timer.device([Job(x.clone), Job(x.clone)])
    assert graph.by == "graph" and graph.median > 0 and graph.calls % 2 == 0
    waiting = timer.device([Job(lambda: x.sum().item())])
    assert waiting.by == "profiler" and waiting.median > 0
    assert timer.copies(64 * 2**20) == 16
    assert all(rate > 0 for rate in common.ceilings(timer).values())


@pytest.mark.parametrize("arguments", [["--ops", "rmsnorm"], ["--peers", "eager,vllm"], []])
def test_what_cannot_run_is_said_at_once(arguments, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as stop:
        command.main([*arguments, *(["--dry"] if arguments else [])])
    assert stop.value.code == 2
    assert "known" in capsys.readouterr().err if arguments else True


@pytest.mark.parametrize("op", sorted(suite.CASES))
def test_every_case_has_the_results_that_its_eager_form_has(op, place):
    for numbers in suite.SHAPES["dry"][op]:
        case = suite.CASES[op](place, {"eager", "torch", "transformers"}, *numbers)
        inputs, cotangents = case.make()
        exact = exact_results(case, inputs, cotangents)
        for provider in case.providers:
            results = Bound(case, provider, inputs, cotangents).results()
            assert results.keys() == exact.keys()
            for name, result in results.items():
                torch.testing.assert_close(result.detach().double(), exact[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("numbers", suite.SHAPES["dry"]["attention"])
def test_the_masks_and_the_work_of_attention_are_its_sight(numbers, place):
    from torch.nn.attention.flex_attention import create_mask

    batch, heads, _, length, head_dim, window, _, layout = (*numbers, *(None, None, "full")[len(numbers) - 5 :])
    case = suite.CASES["attention"](place, set(), *numbers)
    inputs, _ = case.make()
    expected = torch.zeros(batch, length, length, dtype=torch.bool)
    starts = attention.bounds(length) if layout == "packed" else [0, length]
    real = attention.real_tokens(batch, length) if layout == "padded" else [length] * batch
    for row, query, key in itertools.product(range(batch), range(length), range(length)):
        same = any(start <= key <= query < end for start, end in itertools.pairwise(starts))
        expected[row, query, key] = same and query - key < (window or length) and key >= length - real[row]
    assert case.forward_work == 4 * head_dim * heads * expected.sum()
    expected |= torch.eye(length, dtype=torch.bool)  # padding sees itself
    sight = {name: inputs[name] for name in ("cu_seqlens", "key_mask") if name in inputs}
    visible = attention._visible(sight, length, window, "cpu").expand(batch, 1, -1, -1)[:, 0]
    assert torch.equal(visible, expected)
    blocks = attention._block_mask(sight, batch, length, window, "cpu")
    assert torch.equal(create_mask(blocks.mask_mod, batch, 1, length, length, device="cpu")[:, 0], expected)


@pytest.mark.parametrize("numbers", suite.SHAPES["dry"]["moe"])
def test_no_token_of_the_mixture_is_near_another_expert(numbers, place):
    inputs, _ = suite.CASES["moe"](place, set(), *numbers).make()
    assert len(inputs["x"]) == numbers[0]
    best = (inputs["x"] @ inputs["router"].T).topk(numbers[4] + 1).values
    assert (best[:, -2] - best[:, -1]).min() > 0.05


def test_products_have_a_rate(capsys):
    case = Case("op", "", None, (), (), None, (), forward_work=2e9, full_work=6e9)
    rates = {"both": pytest.approx(1.2), "forward": pytest.approx(2.0), "backward": pytest.approx(1.0)}
    assert suite._tflop_per_s(case, 1.0, 5.0) == rates
    assert suite._tflop_per_s(dataclasses.replace(case, forward_work=None), 1.0, 5.0).keys() == {"both"}
    assert command.main(["--dry", "--ops", "moe,rms_norm"]) == 0
    headings = [line for line in capsys.readouterr().out.splitlines() if line.startswith("shape")]
    assert ["TFLOP/s forward  TFLOP/s backward  TFLOP/s both" in line for line in headings] == [True, False]


@pytest.mark.parametrize("path", sorted(Path(common.__file__).parent.glob("results/*.json")), ids=lambda p: p.stem)
def test_earlier_results_can_still_be_shown(path, capsys):
    main = {"kernels": command.main, "train_step": train_step.main, "convergence": convergence.main}
    assert main[json.loads(path.read_text())["benchmark"]](["--render", str(path)]) == 0
    assert "ligermodels" in capsys.readouterr().out or "convergence" in path.stem


def test_convergence_is_measured_and_written(tmp_path, capsys):
    pytest.importorskip("transformers")
    out = tmp_path / "result.json"
    assert convergence.main(["--dry", "--families", "llama,mixtral", "--out", str(out)]) == 0
    for row in json.loads(out.read_text())["rows"]:
        assert row["fp32_last"] < 1e-5 < row["bf16_ours"] < 0.1
    printed = capsys.readouterr().out
    assert convergence.main(["--render", str(out)]) == 0 and capsys.readouterr().out == printed


def test_the_exact_loss_by_hand_is_autograds(place):
    case = linear_cross_entropy_case(place, set(), 33, 32, 131, 0.7)
    inputs, _ = case.make()
    by_hand = case.exact(inputs)
    double = {name: x.double() if x.is_floating_point() else x for name, x in inputs.items()}
    by_autograd = Bound(case, Provider("eager", case.eager), double, ()).results()
    for name, result in by_autograd.items():
        torch.testing.assert_close(by_hand[name], result.detach(), rtol=1e-12, atol=1e-15)


def test_inputs_that_a_provider_overwrites_are_restored(place):
    def overwrite(t):
        y = t["gate"] * t["up"]
        t["gate"].data.zero_()
        return (y,)

    case = glu_case(place, set(), 3, 4)
    inputs, cotangents = case.make()
    before = {name: x.clone() for name, x in inputs.items()}
    bound = Bound(case, Provider("overwrites", overwrite, mutates=True), inputs, cotangents)
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
        "ceilings": dict.fromkeys(UNITS.values(), 1.0),
    }
