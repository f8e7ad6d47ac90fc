"""What of the benchmarks a CPU can judge: parity comes before time, and every harness runs from end to end."""

import json
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import ligermodels
from benchmarks import convergence, decode, rollout, train_command, train_step
from benchmarks import kernels as harness
from benchmarks.kernel_cases import OPS
from benchmarks.train_cases import CASES, MODELS
from benchmarks.train_step import LOGITS_FACTOR, disagreement
from ligermodels import kernels
from ligermodels.generation import graph
from ligermodels.training import lora

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


def wrong_output(x, weight, *, eps):
    return RIGHT(x, weight, eps=eps) * 1.05


RIGHT = kernels.rms_norm


def test_a_red_parity_refuses_every_figure_of_its_op(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(kernels, "rms_norm", wrong_output)
    out = tmp_path / "deep" / "result.json"
    assert harness.main(["--dry", "--ops", "rms_norm,glu", "--baselines", "eager", "--out", str(out)]) == 1
    record, printed = json.loads(out.read_text()), capsys.readouterr().out
    assert record["red"] == ["rms_norm"] and {row["op"] for row in record["rows"]} == {"glu"}
    assert "rms error" in printed and "RED" in printed and "### rms_norm" not in printed


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
        "smollm2-135m": 134_515_008,
        "llama-3.2-1b": 1_235_814_400,
        "llama-3.1-8b": 8_030_261_248,
        "llama-3.1-70b": 70_553_706_496,
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


FAST = ("llama-1b", "llama-70b-qlora", "qwen2-vl-2b")
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in CASES if name not in FAST]


@pytest.mark.parametrize("name", [*FAST, *SLOW])
def test_a_training_step_is_measured_and_written(name, tmp_path, capsys, in_this_process):
    if "lora" in name:
        pytest.importorskip("peft")
    if name == "llama-8b-qlora":
        pytest.importorskip("bitsandbytes")
    code, rows = run_case(tmp_path, name)
    assert code == 0, rows
    needs_gpu = {"liger", "compile", "captured"}
    named = {b: train_step.Baseline.of(b, CASES[name].recompute) for b in CASES[name].baselines}
    assert [row["baseline"] for row in rows] == [b for b, known in named.items() if not needs_gpu & known.options]
    theirs = next((row for row in rows if not named[row["baseline"]].ours), rows[0])
    for row in rows:
        assert "note" not in row and row["tokens_per_s"] > 0 and row["recompute"] == named[row["baseline"]].recompute
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


@pytest.mark.parametrize("wrong", ["the base in bf16", "the scale", "no adapter"])
def test_parity_sees_the_adapters_and_the_4_bits(wrong, tmp_path, monkeypatch, in_this_process):
    pytest.importorskip("peft")
    load, load_adapter = ligermodels.load, lora.load_adapter

    def load_wrongly(folder, quantization_config=None, **options):
        assert quantization_config == "nf4"
        return load(folder, quantization_config=None if wrong == "the base in bf16" else "nf4", **options)

    def adapt_wrongly(model, folder):
        if wrong == "no adapter":
            return lora.add_lora(model)
        for module in load_adapter(model, folder).modules():
            if isinstance(module, lora.Adapted) and wrong == "the scale":
                module.alpha = 28

    monkeypatch.setattr(ligermodels, "load", load_wrongly)
    monkeypatch.setattr(lora, "load_adapter", adapt_wrongly)
    code, (row,) = run_case(tmp_path, "llama-8b-qlora", "--baselines", "ligermodels+nf4:block")
    assert code == 1 and "logits err" in row["note"] and "tokens_per_s" not in row


@pytest.mark.parametrize("case", ["llama-70b-qlora", "llama-1b"])
def test_what_cannot_be_measured_is_refused(case, capsys):
    name = "hf+nf4" if case == "llama-70b-qlora" else "hf+captured"
    with pytest.raises(SystemExit):
        train_step.main(["--dry", "--case", case, "--baselines", name])
    assert name in capsys.readouterr().err


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


def test_a_first_step_is_compared_with_the_plainest_peer_that_trains_the_same():
    names = ("ligermodels+lora", "ligermodels+lora:block", "ligermodels+nf4", "hf", "hf+liger+lora", "hf+lora:block")
    losses = (6.0, 7.0, 9.0, 8.0, 6.03, 6.0)
    rows = [
        {"baseline": name, "losses": [loss], "first_gradient_norm": 2.0, "tokens_per_s": 1.0}
        for name, loss in zip(names, losses, strict=True)
    ]
    train_step.compare_first_steps(rows)
    assert [row["baseline"] for row in rows if "note" in row] == ["ligermodels+lora:block"]
    assert "hf+lora:block has 6" in rows[1]["note"] and "tokens_per_s" not in rows[1]


# Commits, convergence


def test_convergence_is_measured_and_written(tmp_path, capsys):
    out = tmp_path / "result.json"
    assert convergence.main(["--dry", "--families", "llama", "--out", str(out)]) == 0
    apart = {row["recipe"]: row["apart"] for row in json.loads(out.read_text())["rows"]}
    assert apart["transformers, fp32"] == 0 < apart["ligermodels, fp32"] < 1e-6 < apart["ligermodels, bf16"] < 0.1
    assert capsys.readouterr().out.count("| llama") == 4


# Decoding


@pytest.mark.slow
def test_decoding_runs_dry_and_refuses_other_ids(tmp_path, monkeypatch, capsys):
    out, few = tmp_path / "decode.json", ["--dry", "--models", "llama-3.2-1b", "--cases", "2x16+8"]
    assert decode.main([*few, "--baselines", "captured,captured-fp8,host,hf", "--out", str(out)]) == 0
    written = json.loads(out.read_text())
    rows, (ids,) = written["rows"], written["ids"]
    assert [row["baseline"] for row in rows] == ["captured", "captured-fp8", "host", "hf"]
    assert ids["the host's"] + ids["ties"] == 5 * 32 and ids["wrong"] == 0 and ids["apart"] <= decode.TIE
    assert all(row["tokens/s"] > 0 for row in rows) and set(graph.DEVICES) == {"cuda"}
    run = graph.Decode._run
    monkeypatch.setattr(graph.Decode, "_run", lambda self, *inputs: (run(self, *inputs), self._logits.neg_()))
    assert decode.main(few) == 1 and "RED" in capsys.readouterr().out
    monkeypatch.setattr(decode, "same_ids", lambda *arguments: True)
    assert decode.main([*few, "--baselines", "host"]) == 1 and "the host finds less likely" in capsys.readouterr().out
    for wrong in (["--baselines", "captured8"], ["--baselines", "captured-fp8", "--first-token", "16"]):
        with pytest.raises(SystemExit):
            decode.main([*few, *wrong])
        assert f"--baselines: {wrong[1]!r} is unknown" in capsys.readouterr().err


def test_first_tokens_are_measured_beside_their_products(tmp_path, monkeypatch, capsys):
    out, few = tmp_path / "first.json", ["--dry", "--models", "llama-3.2-1b", "--cases", "", "--first-token", "4096"]
    assert decode.main([*few, "--baselines", "captured,host,hf", "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    rows = json.loads(out.read_text())["first token"]
    assert [row["baseline"] for row in rows] == ["captured", "host", "hf"]
    for row in rows:
        assert row["of products"] == row["first token ms"] / row["products ms"] > 1 and row["attention ms"] > 0
    assert decode.main(["--render", str(out)]) == 0
    assert capsys.readouterr().out.splitlines()[1:] == printed.split("\n\n")[-1].splitlines()

    export = decode.export  # transformers gets other weights
    monkeypatch.setattr(decode, "export", lambda *given: {name: x.flip(0) for name, x in export(*given)})
    assert decode.main([*few, "--baselines", "host,hf"]) == 1
    assert "RED: llama-3.2-1b, 16 tokens" in capsys.readouterr().out


def test_the_products_are_all_of_those_of_a_forward_pass():
    """Counted by torch, which sees the multiplications of both."""
    model = decode.make("llama-3.2-1b", "cpu", torch.float32, tiny=True)
    ids, counts = torch.randint(3, 512, (1, 24)), []
    run = decode.products(model, 24)
    for call in (run, lambda: model(ids, logits_to_keep=1)):
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            call()
        counts.append(sum(n for op, n in counter.get_flop_counts()["Global"].items() if "attention" not in str(op)))
    assert counts[0] == counts[1] > 0


def test_an_earlier_result_of_decoding_renders(capsys):
    path = Path(decode.__file__).parent / "results" / "decode-h200.json"
    assert decode.main(["--render", str(path)]) == 0
    assert capsys.readouterr().out.count("| llama-3.1-8b |") == 6


@pytest.mark.slow
def test_rollouts_run_dry(tmp_path):
    out = tmp_path / "rollout.json"
    assert rollout.main(["--dry", "--baselines", "ours,trl,hf", "--out", str(out)]) == 0
    rows = json.loads(out.read_text())["rows"]
    assert [row["baseline"] for row in rows] == ["ours", "trl", "hf"] and all(row["rollout s"] > 0 for row in rows)
    assert [row.get("update s", 0) > 0 for row in rows] == [True, True, False]


# The command


def run_of_lines(tokens, seconds, told=1000.0, **first):
    lines = [
        {"tokens": total, "tokens_per_second": told, "loss": 6.0, "grad_norm": 2.0, "gib": 1.5}
        for total in torch.tensor(tokens).cumsum(0).tolist()
    ]
    lines[0] |= first
    return {"lines": lines, "seen": torch.tensor(seconds, dtype=torch.float64).cumsum(0).tolist()}


def test_figures_of_a_run_leave_its_start_out_of_the_mean():
    run = run_of_lines([90] * 30, [7.0] + [1.0] * 9 + [0.5] * 20, tokens_per_second=1.0)
    found = train_command.figures(run)
    assert found["mean tokens/s"] == pytest.approx(180) and found["tokens/s"] == 1000
    assert found["first step s"] == 7 and found["tokens a step"] == 90 and found["peak GiB"] == 1.5
    assert train_command.figures({"note": "no"}) == {"note": "no"}


@pytest.mark.parametrize(
    ("change", "ok"),
    [({}, True), ({"loss": 6.02}, True), ({"loss": 6.03}, False), ({"grad_norm": 1.9}, False),
     ({"loss": float("nan")}, False)],
)  # fmt: skip
def test_losses_and_gradient_norms_of_runs_are_compared(change, ok):
    found, expected = run_of_lines([9] * 5, [1] * 5, **change), run_of_lines([9] * 5, [1] * 5)
    row = train_command.compared(found, expected, train_command.TOLERANCES["bf16"])
    assert (row["note"] == "") == ok
    row |= {"model": "m", "kind": "full"}
    assert bool(train_command.reds([{**row, "baseline": "ligermodels"}])) != ok
    assert not train_command.reds([{**row, "baseline": "trl"}])
    assert train_command.compared({"note": "no"}, expected, (1, 1))["note"] == "no"
    missing = {"note": "trl is not installed"}
    assert train_command.compared(found, missing, (1, 1)) == {"note": "", "unchecked": "trl is not installed"}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["full", "nf4"])
def test_whole_runs_are_measured_and_written(kind, tmp_path, capsys):
    pytest.importorskip("trl")
    pytest.importorskip("bitsandbytes")
    out, few = tmp_path / "command.json", ["--dry", "--case", "smollm2-135m:256", "--kinds", kind]
    names = ["ligermodels", "ligermodels+capture", "trl"]
    assert train_command.main([*few, "--baselines", ",".join(names), "--out", str(out)]) == 0
    printed, record = capsys.readouterr().out, json.loads(out.read_text())
    assert [row["baseline"] for row in record["parity"]] == [f"{name}+fp32" for name in names]
    assert all(0 <= row["loss"] < 5e-4 and row["grad_norm"] < 5e-3 for row in record["parity"])
    assert [row["baseline"] for row in record["rows"]] == names
    for row in record["rows"]:
        assert row["tokens/s"] > 0 and row["mean tokens/s"] > 0 and row["first step s"] > 0
        assert 100 < row["tokens a step"] <= 256  # what is padded to is not counted
    assert train_command.main(["--render", str(out)]) == 0 and capsys.readouterr().out == printed


@pytest.mark.slow
@pytest.mark.parametrize("wrong", ["--lr", "--lora-alpha"])
def test_a_command_that_trains_otherwise_gets_no_figures(wrong, tmp_path, monkeypatch, capsys):
    pytest.importorskip("trl")
    pytest.importorskip("peft")
    command = train_command.command

    def other(job, out):
        words = command(job, out)
        if job.ours:
            words[words.index(wrong) + 1] = {"--lr": "4e-3", "--lora-alpha": "28"}[wrong]
        return words

    monkeypatch.setattr(train_command, "command", other)
    out = tmp_path / "command.json"
    few = ["--dry", "--case", "smollm2-135m:256", "--kinds", "lora", "--baselines", "ligermodels"]
    assert train_command.main([*few, "--out", str(out)]) == 1
    assert json.loads(out.read_text())["rows"] == [] and "RED: smollm2-135m, lora" in capsys.readouterr().out


@pytest.mark.parametrize("given", [["--baselines", "trl+capture"], ["--case", "gpt-2:8"], ["--case", "smollm2-135m"]])
def test_commands_that_are_not_known_are_refused(given, capsys):
    with pytest.raises(SystemExit):
        train_command.main(["--dry", *given])
    assert given[1].split(":")[0] in capsys.readouterr().err
