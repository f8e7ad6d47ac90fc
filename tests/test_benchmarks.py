"""What of the benchmarks a CPU can judge: parity comes before time, and every harness runs from end to end."""

import dataclasses
import itertools
import json
import os

import pytest
import torch
from torch import nn

import ligermodels
from benchmarks import commits, common, convergence, kernel_cases, train_step
from benchmarks import kernels as harness
from benchmarks.kernel_cases import OPS, Place
from benchmarks.train_cases import CASES, MODELS
from benchmarks.train_step import LOGITS_FACTOR, Baseline, compare_first_steps, disagreement
from ligermodels import kernels

# Kernels


@pytest.mark.parametrize(
    ("noise", "ok"), [(0.0, True), (0.98, True), (1.2, False), (40.0, False), (float("nan"), False)]
)
def test_an_op_may_err_as_much_as_the_eager_one_and_no_more(noise, ok):
    exact = torch.randn(64, 64, dtype=torch.float64)
    error = 1e-5 * torch.randn(64, 64, dtype=torch.float64)
    actual, eager = ((exact + factor * error).float() for factor in (noise, 1.0))
    _, why = harness.judge(actual, eager, exact, 0.0, 1.0)
    assert (why == "") == ok
    _, why = harness.judge(actual, eager, exact, 0.0, 50.0)
    assert (why == "") == (noise == noise)
    actual[3, 5] += 1e-3
    assert harness.judge(actual, eager, exact, 0.0, 1.0)[1]


def dry(op, baselines="eager,F."):
    return harness.main(["--dry", "--ops", op, "--baselines", baselines])


def wrong_output(x, weight, *, eps):
    return RIGHT(x, weight, eps=eps) * 1.05


def wrong_gradient(x, weight, *, eps):
    return RIGHT(x, weight, eps=eps) + 0.05 * (weight - weight.detach())


def broken(x, weight, *, eps):
    raise RuntimeError("no such kernel")


RIGHT = kernels.rms_norm


@pytest.mark.parametrize(
    ("ours", "reason"), [(wrong_output, "rms error"), (wrong_gradient, "d weight"), (broken, "no such kernel")]
)
def test_a_red_parity_refuses_every_figure_of_its_op(ours, reason, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(kernels, "rms_norm", ours)
    out = tmp_path / "deep" / "result.json"
    assert harness.main(["--dry", "--ops", "rms_norm,glu", "--baselines", "eager", "--out", str(out)]) == 1
    record, printed = json.loads(out.read_text()), capsys.readouterr().out
    assert record["red"] == ["rms_norm"] and {row["op"] for row in record["rows"]} == {"glu"}
    assert reason in printed and "RED" in printed and "### rms_norm" not in printed


def test_a_wrong_peer_is_not_timed(monkeypatch, capsys):
    monkeypatch.setattr(torch.nn.functional, "rms_norm", lambda x, shape, weight, eps: x * weight)
    assert dry("rms_norm") == 0
    timed, failed = capsys.readouterr().out.split("### Failed parity")
    assert "| eager" in timed and "F.rms_norm" not in timed and "computes something else" in failed


def test_every_op_runs_and_is_written(tmp_path, capsys):
    out = tmp_path / "result.json"
    assert harness.main(["--dry", "--baselines", "eager,F.,add,three,four", "--out", str(out)]) == 0
    record, printed = json.loads(out.read_text()), capsys.readouterr().out
    for op, entry in OPS.items():
        rows = [row for row in record["rows"] if row["op"] == op]
        for baseline in {row["baseline"] for row in rows}:
            found = [row for row in rows if row["baseline"] == baseline]
            assert len(found) == len(entry.dry) or baseline not in ("ligermodels", "eager"), (op, baseline)
        assert all(row["full_ms"] > 0 and "note" not in row for row in rows)
        assert f"### {op}\n" in printed
    assert record["environment"]["torch"] == torch.__version__ and record["environment"]["commit"]
    assert harness.main(["--render", str(out)]) == 0
    assert capsys.readouterr().out == printed
    for block in printed.split("\n\n"):
        if block.startswith("|"):
            assert len({line.count("|") for line in block.splitlines()}) == 1


@pytest.mark.parametrize("main", [harness.main, train_step.main, convergence.main])
def test_a_gpu_is_asked_for(main, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as stop:
        main([])
    assert stop.value.code == 2 and "needs a CUDA device" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("main", "arguments"),
    [
        (harness.main, ["--ops", "norm"]),
        (train_step.main, ["--case", "llama"]),
        (train_step.main, ["--baselines", "hf+fast"]),
        (train_step.main, ["--baselines", "hf:mlp"]),
        (train_step.main, ["--baselines", "ligermodels+liger"]),
        (convergence.main, ["--families", "gpt"]),
    ],
)
def test_an_unknown_name_is_said_at_once(main, arguments, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["--dry", *arguments])
    assert stop.value.code == 2 and "known: " in capsys.readouterr().err


@pytest.mark.parametrize("shape", OPS["attention"].dry)
def test_masks_and_work_of_attention_are_what_a_query_sees(shape):
    case = kernel_cases.attention(Place("cpu", torch.float32), **shape)
    batch, length, window, layout = (shape.get(name) for name in ("batch", "length", "window", "layout"))
    ends = itertools.accumulate(kernel_cases.DOCUMENTS, initial=0) if layout == "packed" else (0, 64)
    starts = [length * end // 64 for end in ends]
    pairs, rows = 0, torch.zeros(batch, length, length, dtype=torch.bool)
    for row, query, key in itertools.product(range(batch), range(length), range(length)):
        real = length * kernel_cases.REAL_TOKENS[row % 4] // 8 if layout == "padded" else length
        same = any(start <= key <= query < end for start, end in itertools.pairwise(starts))
        rows[row, query, key] = same and query - key < (window or length) and key >= length - real
    pairs = rows.sum().item()
    assert case.forward_flops == 4 * pairs * shape["heads"] * shape["head_dim"]
    key_mask = rows.any(1) if layout == "padded" else None
    sees = kernel_cases._sees(starts, key_mask, window, length, "cpu")
    index = torch.arange(length)
    found = torch.stack([sees(torch.tensor(n), None, index[:, None], index) for n in range(batch)])
    assert torch.equal(found, rows | torch.eye(length, dtype=torch.bool))  # padding sees itself


def test_inputs_that_a_baseline_overwrites_are_restored():
    def overwrite(t):
        y = t["gate"] * t["up"]
        t["gate"].data.zero_()
        return y

    case = kernel_cases.glu(Place("cpu", torch.float32), 3, 4)
    before = {name: x.clone() for name, x in case.leaves.items()}
    run = harness.Run(overwrite, case.leaves, {}, [], copy=True)
    run.forward()
    assert not run.leaves["gate"].any()
    run.restore()
    assert all(torch.equal(run.leaves[name], x) and torch.equal(case.leaves[name], x) for name, x in before.items())


def test_a_table_is_aligned():
    rows = [["a", 12345.6, 0.01234, None], ["longer", 7, 99.96, "x"]]
    lines = common.table(["name", "n", "share", "note"], rows).splitlines()
    assert len({len(line) for line in lines}) == 1 and [line.count("|") for line in lines] == [5] * 4
    assert "12,346" in lines[2] and "0.0123" in lines[2] and "100" in lines[3]


# Training steps


@pytest.fixture
def in_this_process(monkeypatch):
    """Baselines run here, one after the other: a process each costs seconds of imports."""

    def spawn(baseline, folder, timeout, longest):
        try:
            train_step.work(baseline, folder)
        except RuntimeError as error:
            return str(error)
        return ""

    monkeypatch.setattr(train_step, "spawn", spawn)


def run_case(tmp_path, name, *arguments):
    code = train_step.main(["--dry", "--case", name, "--out", str(tmp_path), *arguments])
    (path,) = tmp_path.glob("step-*.json")
    return code, json.loads(path.read_text())["rows"]


@pytest.mark.parametrize("name", sorted(MODELS))
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
    }
    config = MODELS[name].config
    model = ligermodels.ARCHS[config["model_type"]].from_config(config, device="meta")
    assert model.num_parameters() == counts[name]


def test_everyone_in_a_row_recomputes_the_same():
    for case in CASES.values():
        assert {Baseline.of(name, case.recompute).recompute for name in case.baselines} == {case.recompute}
        assert any(name.startswith("hf+liger") for name in case.baselines)


FAST = ("llama-1b", "qwen2-vl-2b")
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in CASES if name not in FAST]


@pytest.mark.parametrize("name", [*FAST, *SLOW])
def test_a_training_step_is_measured_and_written(name, tmp_path, capsys, in_this_process):
    code, rows = run_case(tmp_path, name)
    assert code == 0, rows
    needs_gpu = {"liger", "compile", "captured"}
    assert [row["baseline"] for row in rows] == [b for b in CASES[name].baselines if not needs_gpu & {*b.split("+")}]
    theirs = next((row for row in rows if row["baseline"] == "hf"), rows[0])
    for row in rows:
        assert "note" not in row and row["tokens_per_s"] > 0 and row["recompute"] == CASES[name].recompute
        assert row["losses"] == pytest.approx(theirs["losses"], rel=2**-8)
    table = capsys.readouterr().out
    assert table.count("\n| ligermodels") == sum(row["baseline"].startswith("ligermodels") for row in rows)
    (path,) = tmp_path.glob("*.json")
    assert train_step.main(["--render", str(path)]) == 0 and capsys.readouterr().out == table


def test_a_red_parity_refuses_the_figures_of_a_model(tmp_path, monkeypatch, capsys, in_this_process):
    build = train_step.build

    def wrong(baseline, settings, folder):
        model = build(baseline, settings, folder)
        if baseline.ours:
            model.model.layers[0].self_attn.v_proj.weight.data.mul_(1.3)
        return model

    monkeypatch.setattr(train_step, "build", wrong)
    code, (ours, theirs) = run_case(tmp_path, "llama-1b", "--baselines", "ligermodels,hf")
    assert code == 1 and "logits err" in ours["note"] and "tokens_per_s" not in ours
    assert "note" not in theirs and theirs["tokens_per_s"] > 0
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("| ligermodels"))
    assert ours["note"] in line and line.split("|")[4].strip() == ""  # tokens/s


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [
        ("gemma-2-2b", "attn_logit_softcapping", None),
        ("mixtral-12l", "num_experts_per_tok", 1),
        pytest.param("gemma-2-2b", "sliding_window", 64, marks=pytest.mark.slow),
        pytest.param("qwen2-1.5b", "rope_theta", 1e4, marks=pytest.mark.slow),
    ],
)
def test_parity_sees_what_is_left_out(name, field, value, tmp_path):
    case = next(case for case in CASES.values() if case.model == name)
    settings = train_step.Settings(**{**dataclasses.asdict(case), "seq": 64}, dry=True)
    train_step.prepare(settings, tmp_path)
    ours = Baseline.of("ligermodels", "none")
    assert train_step.parity(ours, settings, tmp_path) == []
    path = tmp_path / "parity" / "config.json"
    config = json.loads(path.read_text())
    if field == "rope_theta":
        config["rope_parameters"]["rope_theta"] = value
    path.write_text(json.dumps({**config, field: value}))
    assert any("logits" in reason for reason in train_step.parity(ours, settings, tmp_path))


def test_a_baseline_is_built_as_its_name_says(tmp_path):
    settings = dataclasses.replace(train_step.Settings(**dataclasses.asdict(CASES["llama-1b"]), dry=True), seq=64)
    train_step.prepare(settings, tmp_path)
    saved: dict[str, int] = {}
    for name in ("ligermodels", "ligermodels:mlp", "ligermodels:block", "hf", "hf:block"):
        baseline = Baseline.of(name, "none")
        model = train_step.build(baseline, settings, tmp_path / "model")
        (inputs,) = train_step.batches(settings, model, 1, 1, 64)

        def count(x, name=name):
            saved[name] = saved.get(name, 0) + x.nbytes
            return x

        with torch.autograd.graph.saved_tensors_hooks(count, lambda x: x):
            model(**inputs)
    assert saved["ligermodels"] > saved["ligermodels:mlp"] > saved["ligermodels:block"]
    assert saved["hf"] > saved["hf:block"]
    for name, module in (("hf", "torch.optim"), ("ligermodels", "torch.optim"), ("ligermodels+adamw", "ligermodels")):
        assert type(train_step.optimizer_of(Baseline.of(name, "none"), model)).__module__.startswith(module)


@pytest.mark.parametrize(
    ("name", "change"), [("", 0.0), ("logits", 2e-2), ("loss", 0.05), ("gradient_norm", -0.02), ("loss", float("nan"))]
)
def test_logits_loss_and_gradient_norm_are_compared(name, change):
    exact = {"logits": torch.randn(1, 64, 32), "loss": 6.0, "gradient_norm": 2.0}
    expected = {"exact": exact, "errors_in_bf16": {"logits": 1e-2, "loss": 0.0, "gradient_norm": 0.0}}
    logits = exact["logits"] + 1e-2 * torch.randn(1, 64, 32)
    logits[0, 5] += 10  # one token that goes to another expert is no disagreement
    found = {"logits": logits, "loss": 6.01, "gradient_norm": 1.995}
    if name:
        found[name] = exact[name] + change
    reasons = disagreement(found, expected, LOGITS_FACTOR)
    assert [reason.split()[0] for reason in reasons] == ([name] if name else [])


def test_the_first_step_must_agree_at_full_depth():
    def row(name, loss, norm):
        return {"baseline": name, "losses": [loss], "first_gradient_norm": norm, "tokens_per_s": 1.0}

    rows = [row("ligermodels", 6.0, 2.1), row("hf+liger", 6.01, 2.0), row("hf", 6.0, 2.0)]
    compare_first_steps(rows)
    assert ["note" in row for row in rows] == ["tokens_per_s" not in row for row in rows] == [True, False, False]
    model = nn.Linear(30, 40)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.8, 0.99))
    model(torch.randn(5, 30)).square().sum().backward()
    norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm().item()
    optimizer.step()
    assert train_step.first_gradient_norm(optimizer) == pytest.approx(norm, rel=1e-5)


def test_every_baseline_has_a_process_of_its_own(tmp_path, monkeypatch):
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "train_step.py").write_text("""if True:
        import os, pathlib, sys, time
        name, folder = sys.argv[2:]
        pathlib.Path(folder, name).write_text(str(os.getpid()))
        if name == "slow":
            time.sleep(60)
        if name == "fails":
            sys.exit("noise\\nbecause of this")
    """)
    monkeypatch.setattr(train_step, "ROOT", tmp_path)
    assert train_step.spawn("works", tmp_path, 60, False) == train_step.spawn("too", tmp_path, 60, False) == ""
    assert train_step.spawn("fails", tmp_path, 60, False) == "because of this"
    assert train_step.spawn("slow", tmp_path, 1, False) == "did not finish in 1 s"
    assert len({str(os.getpid()), *((tmp_path / name).read_text() for name in ("works", "too", "fails"))}) == 4


@pytest.mark.parametrize("limit", [31, 32, 33, 1000, 12345, 10**6])
def test_the_longest_length_is_found(limit):
    tried = []

    def fits(length):
        tried.append(length)
        return length <= limit

    found = train_step.search(fits, 32, 2**20)
    assert found <= limit < found + max(32, found // 32) + 32 or found == 2**20 // 32 * 32
    assert len(tried) < 24 and len(set(tried)) == len(tried) and all(length % 32 == 0 for length in tried)


@pytest.mark.parametrize("baseline", ["ligermodels+in_backward:block", pytest.param("hf", marks=pytest.mark.slow)])
def test_the_search_goes_on_after_a_length_that_does_not_fit(baseline, tmp_path, in_this_process, monkeypatch):
    build = train_step.build

    def limited(*arguments):
        model = build(*arguments)

        def fail(module, *gradients):
            if gradients[0][0].shape[1] > 64:
                raise RuntimeError("CUDA out of memory")

        model.model.layers[0].input_layernorm.register_full_backward_hook(fail)
        return model

    monkeypatch.setattr(train_step, "build", limited)
    code, (row,) = run_case(tmp_path, "llama-1b", "--longest", "1", "--baselines", baseline)
    assert code == 0 and row["length"] == 64 and row["tokens_per_s"] > 0


# Commits, convergence


def test_two_checkouts_are_compared_only_where_they_compute_the_same():
    def run(loss, seconds, gib):
        return {"a": dict(loss=loss, seconds=seconds, gib=gib, tokens=100), "b": dict(seconds=1.0, gib=1.0, tokens=5)}

    runs = {"other": [run(6.0, 2.0, 8.0), run(6.0, 4.0, 8.0)], "this": [run(6.001, 1.0, 4.0), run(6.001, 1.0, 6.0)]}
    (row, _), red = commits.compare(runs)
    assert red == [] and row["speed"] == pytest.approx(3.0) and row["memory"] == 0.75
    runs["this"][0]["a"]["loss"] = 6.1
    assert "a: the first loss is 6.1" in commits.compare(runs)[1][0]


@pytest.mark.slow
def test_two_checkouts_run(capsys):
    assert commits.main([str(commits.HERE), "--dry", "--rounds", "1"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2 + len(commits.CASES) - 1  # all but FSDP2's


def test_convergence_is_measured_and_written(tmp_path, capsys):
    out = tmp_path / "result.json"
    assert convergence.main(["--dry", "--families", "llama", "--out", str(out)]) == 0
    apart = {row["recipe"]: row["apart"] for row in json.loads(out.read_text())["rows"]}
    assert apart["transformers, fp32"] == 0 < apart["ligermodels, fp32"] < 1e-6 < apart["ligermodels, bf16"] < 0.1
    assert capsys.readouterr().out.count("| llama") == 4
