"""The benchmarks on the CPU: each runs from end to end, and refuses to print figures where its parity check is red."""

import dataclasses
import importlib
import importlib.machinery
import inspect
import json
import os
import re
import sys
import types
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.utils.flop_counter import FlopCounterMode

import ligermodels
from benchmarks import (
    decode,
    decode_experts,
    distributed,
    fp8,
    fp8_curves,
    harness,
    kernels as kernel_benchmark,
    load,
    quantized,
    run as run_benchmarks,
    train_command,
    train_step,
    train_unsloth,
)
from benchmarks.train_cases import CASES, MODELS, ours
from ligermodels.checkpoint.weights import named_weights
from ligermodels.generation import graphs
from ligermodels.training import lora
from tests.parallel.ranks import results_of_ranks

RESULTS = sorted((harness.ROOT / "benchmarks" / "results").rglob("*.json"))
PARAMETERS = {
    "smollm2-135m": 134_515_008,
    "llama-3.2-1b": 1_235_814_400, "llama-3.1-8b": 8_030_261_248, "llama-3.1-70b": 70_553_706_496,
    "gemma-2-2b": 2_614_341_888, "qwen2-1.5b": 1_543_714_304, "qwen3-8b": 8_190_735_360, "phi-3-mini": 3_821_079_552,
    "qwen3.5-4b": 4_205_751_296, "qwen3.5-9b": 8_953_803_264,
    "qwen3-30b-a3b": 30_532_122_624, "qwen3-30b-a3b-2-layers": 1_868_573_184, "qwen3-30b-a3b-6-layers": 4_361_055_744,
    "gpt-oss-20b": 20_914_757_184, "gemma-4-e2b": 4_628_569_344, "gemma-4-e4b": 7_463_013_376,
    "gemma-4-31b": 30_697_345_280, "gemma-4-31b-6-layers": 4_338_096_896, "gemma-4-31b-12-layers": 7_266_902_272,
}  # fmt: skip
slow = pytest.mark.slow


@pytest.fixture
def in_this_process(monkeypatch):
    """Workers run here, one after the other: a process each costs seconds of imports."""
    signature = inspect.signature(harness.spawn)

    def spawn(module, job, *given, **named):
        signature.bind(module, job, *given, **named)
        try:
            return importlib.import_module(f"benchmarks.{module}").work(json.loads(json.dumps(job)))
        except Exception as error:
            return {"note": harness.summary(error)}

    monkeypatch.setattr(harness, "spawn", spawn)


@pytest.fixture
def in_forks(monkeypatch, tmp_path):
    """Ranks are forks of this process, which import nothing again."""

    def spawn(module, job, timeout, ranks):
        def work():
            torch.set_num_threads(1)
            rows = {}
            with (
                mock.patch.object(harness, "report", rows.update),
                mock.patch.object(dist, "destroy_process_group"),  # the ranks do that themselves
                mock.patch("faulthandler.dump_traceback_later"),  # it is pytest's
                mock.patch("faulthandler.cancel_dump_traceback_later"),
            ):
                rows |= importlib.import_module(f"benchmarks.{module}").work(job) or {}
            return rows

        folder = tmp_path / f"ranks-{len(list(tmp_path.glob('ranks-*')))}"
        folder.mkdir()
        return results_of_ranks(folder, work, ranks, seconds=timeout)[0]

    monkeypatch.setattr(harness, "spawn", spawn)


@pytest.fixture
def run(tmp_path, capsys):
    """Runs a benchmark dry: (exit status, record, what it printed)."""

    def run(module, *arguments):
        code = module.main(["--dry", "--out", str(tmp_path / "out.json"), *arguments])
        return code, json.loads((tmp_path / "out.json").read_text()), capsys.readouterr().out

    return run


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_earlier_results_are_printed(path, capsys):
    record = json.loads(path.read_text())
    assert decode.main(["--render", str(path)]) == 0
    tables = re.findall(r"### (.*)\n\n((?:\|.*\n?)+)", capsys.readouterr().out)
    assert tables or path.stem == "gpu"  # which has counts of tests alone
    for name, table in tables:
        lines = table.splitlines()
        assert len(lines) == 2 + len(record[name]) and len({len(line) for line in lines}) == 1


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_the_command_of_an_earlier_result_does_not_write_over_it(path):
    command = json.loads(path.read_text())["environment"].get("command") or ""
    assert not command.startswith("python -m benchmarks.") or "--out" not in command


def test_a_worker_that_fails_or_hangs_leaves_a_note():
    job = {"baseline": "ligermodels", "model": "gpt-2", "batch": 1, "seq": 8, "recompute": "none", "baselines": []}
    assert harness.spawn("train_step", job, timeout=100)["note"] == "KeyError: 'gpt-2'"
    assert harness.spawn("train_step", job, timeout=0.01)["note"] == "did not finish in 0.01 s"


@pytest.mark.parametrize("name", run_benchmarks.RECORDS)
def test_the_command_of_each_record_is_one_that_its_benchmark_takes(name):
    """And its cases exist."""
    module, options = run_benchmarks.arguments_of(name, 2)
    benchmark = importlib.import_module(f"benchmarks.{module}")
    parsed = harness.parser_of(None, benchmark.add_options).parse_args(options)
    if module == "train_step":
        assert all(train_step.settings_of(case, parsed).baselines for case in parsed.case)


@pytest.mark.parametrize("name, short", [
    ("NVIDIA H200", "h200"), ("NVIDIA H100 80GB HBM3", "h100"), ("NVIDIA A100-SXM4-80GB", "a100"),
    ("NVIDIA GeForce RTX 4090", "rtx-4090"),
])  # fmt: skip
def test_records_have_the_short_name_of_the_gpu(name, short, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: name)
    assert run_benchmarks._gpu() == short


def test_records_are_measured_in_turn_and_what_fails_replaces_none(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(run_benchmarks, "RECORDS", {
        "kernels-norm": "kernels --ops rms_norm --baselines ligermodels",
        "decode-none": "decode --models no-model", "distributed": "distributed --cases x",
    })  # fmt: skip
    (tmp_path / "decode-none-cpu.json").write_text("as it was")
    assert run_benchmarks.main(["kernels-*", "decode-*", "--folder", str(tmp_path), "--dry"]) == 1
    record = json.loads((tmp_path / "kernels-norm-cpu.json").read_text())
    assert record["rms_norm"] and record["environment"]["command"].endswith("--baselines ligermodels --dry")
    assert (tmp_path / "decode-none-cpu.json").read_text() == "as it was"
    assert "no-model" in (tmp_path / "unfinished" / "decode-none-cpu.txt").read_text()
    assert "not finished: decode-none;" in capsys.readouterr().err
    assert run_benchmarks.main(["kernels-*", "--folder", str(tmp_path), "--dry", "--minutes", "0.01"]) == 1
    assert "stopped for lack of time" in capsys.readouterr().err
    inside_a_file = tmp_path / "decode-none-cpu.json" / "records"
    assert run_benchmarks.main(["kernels-*", "decode-*", "--folder", str(inside_a_file), "--dry"]) == 1
    assert "not finished: kernels-norm, decode-none;" in capsys.readouterr().err
    for wrong, says in ((["step-none"], "no record is called step-none"), ([], "give --folder")):
        with pytest.raises(SystemExit):
            run_benchmarks.main([*wrong, "--dry"])
        assert says in capsys.readouterr().err


@slow
def test_every_op_is_measured_and_a_red_parity_refuses_its_figures(monkeypatch, run):
    tested = kernel_benchmark.TESTED["rms_norm"]
    wrong = dataclasses.replace(tested, call=lambda x, weight: tested.call(x, weight) * 1.05)
    monkeypatch.setitem(kernel_benchmark.TESTED, "rms_norm", wrong)
    code, record, printed = run(kernel_benchmark)
    assert code == 1 and record["rms_norm"] == [] and len(record["red"]) == 1
    assert "RED: rms_norm: AssertionError: " in printed and "### rms_norm" not in printed
    for name, op in kernel_benchmark.OPS.items():
        found = [row for row in record[name] if row["baseline"] == "ligermodels"]
        assert name == "rms_norm" or (len(found) == len(op.dry) and all(row["fwd + bwd ms"] > 0 for row in found)), name


def test_layers_in_fp8_are_measured_unless_their_error_is_not_that_of_fp8(run, monkeypatch):
    code, record, _ = run(fp8, "--baselines", "bf16,rowwise")
    assert code == 0 and [row["baseline"] for row in record["layers"]] == ["bf16", "rowwise"] * 4
    assert all(row["ms"] > 0 for row in (*record["layers"], *record["quantising"]))
    monkeypatch.setitem(fp8.RECIPES, "rowwise", dataclasses.replace(fp8.RECIPES["rowwise"], grad_dtype="e5m2"))
    monkeypatch.setitem(fp8.ROUNDINGS, "e5m2", fp8.ROUNDINGS["e4m3"])
    code, record, printed = run(fp8, "--baselines", "bf16,rowwise")
    assert code == 1 and len(record["red"]) == 4 and "RED: qkv, rowwise: the error of dx is 0.0" in printed
    assert not any("ms" in row for row in record["layers"] if row["baseline"] == "rowwise")


def test_a_block_in_fp8_is_measured_beside_transformers_unless_it_is_another_block(run, monkeypatch):
    options = ["--block", "--baselines", "bf16,rowwise"]
    code, record, _ = run(fp8, *options)
    sides = [(row["side"], row["baseline"]) for row in record["block"]]
    assert code == 0 and sides == [("transformers", "bf16"), ("ligermodels", "bf16"), ("ligermodels", "rowwise")]
    assert all(row["ms"] > 0 and row["of bf16"] > 0 for row in record["block"])
    monkeypatch.setitem(MODELS["llama-3.1-8b"].tiny, "rms_norm_eps", 0.1)  # of both
    assert run(fp8, *options)[0] == 0
    load = torch.nn.Module.load_state_dict
    monkeypatch.setattr(torch.nn.Module, "load_state_dict", lambda module, state, *rest, **named: load(
        module, {name: x * (0.5 if "down_proj" in name and "ligermodels" in type(module).__module__ else 1)
                 for name, x in state.items()}, *rest, **named))  # fmt: skip
    code, record, printed = run(fp8, *options)
    assert code == 1 and "RED: bf16: errs by" in printed and "ms" not in record["block"][1]


@slow
def test_curves_in_fp8_are_compared_with_those_of_bf16(run, tmp_path):
    pytest.importorskip("matplotlib")
    code, record, _ = run(fp8_curves, "--recipes", "bf16,rowwise", "--picture", str(tmp_path / "curves-{}.svg"))
    assert code == 0 and record["text"]["bytes"] == 200_000
    light, dark = ((tmp_path / f"curves-{name}.svg").read_text() for name in ("light", "dark"))
    assert len(light) > 1000 and light != dark
    fp8_curves.draw(record, str(tmp_path / "curves.png"))
    assert (tmp_path / "curves.png").stat().st_size > 1000
    assert [(curve["recipe"], curve["seed"]) for curve in record["curves"]] == [
        ("bf16", 0), ("rowwise", 0), ("bf16", 1), ("rowwise", 1)
    ]  # fmt: skip
    exact, low = record["curves"][:2]
    assert exact["losses"][0] == pytest.approx(low["losses"][0], abs=0.01) and exact["losses"] != low["losses"]
    assert exact["losses"][-1] < exact["losses"][0]
    bf16, rowwise = record["differences"]
    assert bf16["difference"] == 0 and 0 < abs(rowwise["difference"]) < 0.05


@pytest.mark.parametrize("name", MODELS)
def test_the_configs_are_the_models_they_name(name):
    config = MODELS[name].config
    model = ligermodels.ARCHS[config["model_type"]].from_config(config, device="meta")
    assert model.num_parameters() == PARAMETERS[name]


QUICK = ("llama-1b", "llama-70b-qlora", "gpt-oss-20b-mxfp4", "gemma-4-31b-lora")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in QUICK else slow)
        for name in CASES
        if not re.search(r"-\d+k$|-(6|12)(-|$)", name)  # dry, all sequences are short, and all models are shallow
    ],
)
def test_training_is_measured(name, run, in_this_process):
    for package in ("peft", "bitsandbytes") if "lora" in name or "mxfp4" in name else ():
        pytest.importorskip(package)
    code, record, _ = run(train_step, "--case", name)
    (rows,) = [rows for title, rows in record.items() if title.startswith(f"{name}:")]
    assert code == 0 and all("note" not in row and row["tokens/s"] > 0 for row in rows), rows
    assert rows[0]["ours is"] == "1.00x"


def test_a_baseline_recomputes_its_first_blocks(run, in_this_process, monkeypatch):
    policies = []

    def look(baseline, settings, model, optimizer):
        policies.append(model.model.checkpointing)
        return {"tokens/s": 1.0, "losses": [1.0]}

    monkeypatch.setattr(train_step, "time_steps", look)
    run(train_step, "--case", "llama-1b", "--baselines", "ligermodels:block*1,ligermodels:block*99,ligermodels:block")
    assert [(policy.recompute, policy.blocks) for policy in policies] == [("block", 1), ("block", 2), ("block", None)]
    with pytest.raises(ValueError, match=r"unknown baseline 'hf:block\*1'"):
        train_step.Baseline.of("hf:block*1", CASES["llama-1b"])


def test_both_sides_draw_the_same_large_checkpoint(tmp_path):
    case = dict(dry=True, folder=str(tmp_path))
    settings = train_step.Settings(**dataclasses.asdict(CASES["gemma-4-31b-lora"]), **case)
    here, there = train_step.drawn_ours(settings), train_step.drawn_theirs(settings, "sdpa")
    drawn = dict(named_weights(here))
    assert all(torch.equal(drawn[name], weight) for name, weight in named_weights(there))
    assert len({weight.flatten()[0].item() for weight in drawn.values() if weight.dim() > 1}) > 10
    settings = dataclasses.replace(settings, model="qwen3-30b-a3b")
    with pytest.raises(ValueError, match=r"transformers has others: model\.layers\.0\.mlp\.experts"):
        train_step.drawn_theirs(settings, "sdpa")
    plain, packed = (train_step.drawn_ours(settings, kind) for kind in (None, "nf4"))
    for name in ("gate_up_proj", "down_proj"):
        weight = plain.model.layers[1].mlp.experts.get_parameter(name)
        rounded = packed.model.layers[1].mlp.experts.operand(name).weight.dequantize()
        assert (rounded - weight).norm() < 0.15 * weight.norm()


def test_a_large_checkpoint_is_written_for_those_who_read_files_alone(tmp_path):
    pytest.importorskip("peft")
    for baselines in (("ligermodels+lora", "hf+lora"), ("ligermodels+lora", "unsloth+lora")):
        case = dict(baselines=baselines, batch=1, seq=32, dry=True, folder=str(tmp_path))
        train_step.prepare(train_step.Settings(**dataclasses.asdict(CASES["gpt-oss-20b-lora"]) | case))
        assert train_step.is_drawn(tmp_path / "model") == ("hf+lora" in baselines)
        assert (tmp_path / "model-adapters").exists() and not train_step.is_drawn(tmp_path / "parity")


@pytest.mark.parametrize("wrong", ["a weight", "the base in bf16", "the scale", "the experts in bf16"])
def test_a_red_parity_refuses_the_figures_of_a_model(wrong, monkeypatch, run, in_this_process):
    pytest.importorskip("peft")
    load_model, load_adapter = ligermodels.load, lora.load_adapter

    def load_wrongly(folder, quantization_config=None, **options):
        model = load_model(folder, **options, quantization_config=None if "bf16" in wrong else quantization_config)
        if wrong == "a weight":
            model.model.layers[0].self_attn.v_proj.weight.data.mul_(1.3)
        return model

    def adapt_wrongly(model, folder):
        for module in load_adapter(model, folder).modules():
            if isinstance(module, lora.Adapted) and wrong == "the scale":
                module.lora_scale *= 0.875

    monkeypatch.setattr(ligermodels, "load", load_wrongly)
    monkeypatch.setattr(lora, "load_adapter", adapt_wrongly)
    case = {
        "a weight": ("llama-1b", "ligermodels,hf"), "the experts in bf16": ("gpt-oss-20b-mxfp4", "ligermodels+mxfp4"),
    }.get(wrong, ("llama-8b-qlora", "ligermodels+nf4:block"))  # fmt: skip
    code, record, printed = run(train_step, "--case", case[0], "--baselines", case[1])
    row, *peers = next(rows for title, rows in record.items() if title.startswith(case[0]))
    assert code == 1 and "logits err" in row["note"] and "tokens/s" not in row and "RED: " in printed
    assert all(peer["tokens/s"] > 0 for peer in peers)


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
    reasons = train_step.disagreement(found, expected, train_step.LOGITS_FACTOR)
    assert [reason.split()[0] for reason in reasons] == ([name] if name else [])


def test_a_first_step_is_compared_with_the_plainest_peer_that_trains_the_same():
    names = ("ligermodels+lora", "ligermodels+lora:block", "ligermodels+nf4", "hf", "hf+liger+lora", "hf+lora:block")
    rows = [
        {"baseline": name, "losses": [loss], "first gradient norm": 2.0, "tokens/s": 1.0}
        for name, loss in zip(names, (6.0, 7.0, 9.0, 8.0, 6.03, 6.0), strict=True)
    ]
    train_step.compare_first_steps(rows, CASES["llama-8b-lora"])
    assert [row["baseline"] for row in rows if "note" in row] == ["ligermodels+lora:block"]
    assert "hf+lora:block has 6" in rows[1]["note"] and "tokens/s" not in rows[1]


def test_a_peer_has_the_delta_rule_that_it_names(monkeypatch):
    for name in ("FLA_TILELANG", "FLA_FLASH_QLA"):
        monkeypatch.setenv(name, "")  # restored afterwards
    monkeypatch.setitem(sys.modules, "fla", None)
    with pytest.raises(ModuleNotFoundError, match="fla"):  # never transformers' own in its place
        train_step.choose_delta_rule({"hf", "tilelang"})
    for name in ("fla", "fla.ops", "fla.ops.gated_delta_rule"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    train_step.choose_delta_rule({"hf", "liger", "flashqla"})
    assert (os.environ["FLA_TILELANG"], os.environ["FLA_FLASH_QLA"]) == ("0", "1")
    train_step.choose_delta_rule({"hf", "liger"})
    with pytest.raises(ModuleNotFoundError, match="fla"):
        importlib.import_module("fla.ops.gated_delta_rule.chunk")


@pytest.fixture
def unsloth(monkeypatch):
    """A package of that name, which needs no GPU: transformers and PEFT by unsloth's functions. `calls` has what they
    were given."""
    pytest.importorskip("peft")
    calls = []

    class FastLanguageModel:
        @staticmethod
        def from_pretrained(name, *, dtype, device_map, full_finetuning, **options):
            from transformers import AutoModelForCausalLM, AutoTokenizer

            calls.append({"full_finetuning": full_finetuning, **options})
            tokenizer = AutoTokenizer.from_pretrained(name)
            return AutoModelForCausalLM.from_pretrained(name, dtype=dtype).to(device_map[""]), tokenizer

        @staticmethod
        def get_peft_model(model, *, use_gradient_checkpointing, **options):
            from peft import LoraConfig, get_peft_model

            calls.append({"use_gradient_checkpointing": use_gradient_checkpointing, **options})
            return get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **options))

        @staticmethod
        def for_training(model, use_gradient_checkpointing):
            model.train()

    package = types.ModuleType("unsloth")
    package.__spec__ = importlib.machinery.ModuleSpec("unsloth", None)
    package.FastLanguageModel = FastLanguageModel
    package.calls = calls
    monkeypatch.setitem(sys.modules, "unsloth", package)
    monkeypatch.setitem(sys.modules, "fla", None)  # as choose_delta_rule leaves it
    return package


@pytest.mark.parametrize("case", ["llama-1b", "llama-8b-lora", "qwen3.5-9b-lora"])
def test_unsloth_trains_the_weights_or_adapters_of_the_others(case, unsloth, run, in_this_process):
    names = {"llama-1b": "unsloth,hf"}.get(case, "unsloth+lora:none,hf+lora:none")
    code, record, _ = run(train_step, "--case", case, "--baselines", names)
    unsloths, theirs = next(rows for title, rows in record.items() if title.startswith(case))
    assert code == 0 and unsloths["losses"] == theirs["losses"]
    assert unsloths["first gradient norm"] == theirs["first gradient norm"]
    loaded = [call for call in unsloth.calls if "full_finetuning" in call]
    assert {call["full_finetuning"] for call in loaded} == {case == "llama-1b"}
    assert {call["max_seq_length"] for call in loaded} == {64}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"r": 8}, "loading state_dict"),
        ({"target_modules": ["q_proj"]}, "the file has"),
        ({"lora_alpha": 8}, "logits err"),
    ],
)
def test_other_adapters_than_the_file_s_get_no_figures(change, says, unsloth, run, in_this_process, monkeypatch):
    make = unsloth.FastLanguageModel.get_peft_model
    monkeypatch.setattr(
        unsloth.FastLanguageModel, "get_peft_model", lambda model, **given: make(model, **{**given, **change})
    )
    code, record, _ = run(train_step, "--case", "llama-8b-lora", "--baselines", "unsloth+lora")
    (row,) = next(rows for title, rows in record.items() if title.startswith("llama-8b-lora"))
    assert code == 0 and says in row["note"] and "tokens/s" not in row


def test_unsloth_that_loads_no_weight_in_4_bits_gets_no_figures(unsloth, run, in_this_process):
    _, record, _ = run(train_step, "--case", "llama-8b-qlora", "--baselines", "unsloth+nf4")
    (row,) = next(rows for title, rows in record.items() if title.startswith("llama-8b-qlora"))
    assert "no weight in 4 bits" in row["note"] or "bitsandbytes is not installed" in row["note"]


def test_unsloth_is_on_the_path_of_its_own_process_alone(monkeypatch, tmp_path):
    monkeypatch.setenv("PYTHONPATH", "/here")
    known = train_unsloth.variables("/there", str(tmp_path))
    assert known["PYTHONPATH"] == f"/there{os.pathsep}/here" and known["HF_HUB_OFFLINE"] == "1"
    assert known["UNSLOTH_COMPILE_LOCATION"].startswith(str(tmp_path))
    seen = {}

    def spawn(module, job, timeout, **variables):
        seen[job["baseline"]] = variables
        return {}

    monkeypatch.setattr(harness, "spawn", spawn)
    names = "hf+lora,unsloth+lora,unsloth+offload+lora:block"
    train_step.main(["--dry", "--case", "llama-8b-lora", "--baselines", names, "--unsloth-path", "/there"])
    assert seen.pop("prepare") == seen.pop("hf+lora") == {}
    assert len(seen) == 2 and all(variables["PYTHONPATH"].startswith("/there") for variables in seen.values())


def test_what_is_not_installed_is_a_note(run, in_this_process, monkeypatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "unsloth" else find_spec(name))
    code, record, _ = run(train_step, "--case", "llama-1b", "--baselines", "ligermodels,unsloth")
    ours, theirs = next(rows for title, rows in record.items() if title.startswith("llama-1b"))
    assert code == 0 and ours["tokens/s"] > 0 and theirs["note"] == "unsloth is not installed"


def test_unsloth_does_not_search_the_longest_sequence(capsys):
    options = ["--dry", "--longest", "1", "--case", "llama-1b"]
    with pytest.raises(SystemExit):
        train_step.main([*options, "--baselines", "unsloth"])
    assert "--longest: unsloth cuts off" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["hf+captured", "trl", "ligermodels:all", "unsloth+offload:none"])
def test_what_cannot_be_measured_is_refused(name, capsys):
    with pytest.raises(SystemExit):
        train_step.main(["--dry", "--case", "llama-70b-qlora", "--baselines", name])
    assert name in capsys.readouterr().err


@slow
def test_decoding_is_measured_and_other_ids_are_refused(monkeypatch, run):
    few = ["--models", "llama-3.2-1b", "--cases", "1x16+8"]
    code, record, _ = run(decode, *few, "--weights", "int8", "--baselines", "captured-fp8,host,hf")
    assert code == 0 and [row["baseline"] for row in record["rows"]] == ["captured-fp8", "host", "hf"]
    assert all(row["the host's"] + row["ties"] == 5 * 32 and row["wrong"] == 0 for row in record["ids"])
    assert "cpu" not in graphs.DEVICES
    forward = graphs.DecodeStep._forward
    monkeypatch.setattr(
        graphs.DecodeStep, "_forward", lambda self, *inputs: (forward(self, *inputs), self.logits.neg_())
    )
    code, record, _ = run(decode, *few)
    assert code == 1 and "those without" in record["red"][0] and "rows" not in record
    monkeypatch.setattr(decode, "same_ids", lambda *arguments: True)
    code, record, _ = run(decode, *few)
    assert code == 1 and "less likely to the host" in record["red"][0] and "rows" not in record


@pytest.mark.parametrize("name", ["gemma-4-31b", "qwen3.5-4b"])
def test_a_model_in_fp32_for_a_while_is_the_same_afterwards(name):
    model = ours(name, "cpu", torch.bfloat16, tiny=True)
    before = {key: (x.dtype, x.clone()) for key, x in model.state_dict().items()}
    with decode.precise(model):
        assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    after = model.state_dict()
    assert before.keys() == after.keys() and all(after[key].dtype == dtype for key, (dtype, _) in before.items())
    assert all(torch.equal(after[key], x) for key, (_, x) in before.items())
    gate, up = (model.model.layers[0].mlp.get_parameter(f"{part}_proj.weight") for part in ("gate", "up"))
    assert gate.data_ptr() + gate.nbytes == up.data_ptr()  # one matmul computes both


def test_a_step_reads_the_experts_that_are_chosen_and_rows_of_tables_but_a_tied_head_whole():
    """Counted over random choices."""
    changes = {"num_local_experts": 6, "num_experts_per_tok": 2}
    model = ours("gpt-oss-20b", "cpu", torch.float32, tiny=True, **changes)
    other = sum(p.nbytes for name, p in model.named_parameters() if ".experts." not in name and "embed" not in name)
    row = model.model.embed_tokens.weight[0].nbytes
    expert = sum(p.nbytes for name, p in model.named_parameters() if ".experts." in name) / 6
    for batch in (1, 5):
        chosen = [len(torch.rand(batch, 6).topk(2).indices.unique()) for _ in range(2000)]
        expected = other + batch * row + expert * sum(chosen) / len(chosen)
        assert decode.weights_read(model, batch) == pytest.approx(expected, rel=0.01)
    assert decode.weights_read(model, 1) == pytest.approx(other + row + 2 * expert, rel=1e-9)
    decode.quantise(model, "mxfp4")
    assert decode.weights_read(model, 1) < other + 0.6 * expert
    tied = ours("qwen3.5-4b", "cpu", torch.float32, tiny=True)
    assert decode.weights_read(tied, 1) == sum(x.nbytes for x in (*tied.parameters(), *tied.buffers()))


def test_first_tokens_are_measured_beside_their_matmuls(monkeypatch, run):
    few = ["--models", "llama-3.2-1b", "--first-token", "16", "--baselines", "captured,host,hf"]
    code, record, _ = run(decode, *few)
    assert code == 0 and [row["baseline"] for row in record["first token"]] == few[-1].split(",")
    assert all(row["of matmuls"] == row["first token ms"] / row["matmuls ms"] > 0 for row in record["first token"])
    export = decode.export  # transformers gets other weights
    monkeypatch.setattr(decode, "export", lambda *given: {name: x.flip(0) for name, x in export(*given)})
    code, record, _ = run(decode, *few)
    assert code == 1 and "llama-3.2-1b, 16 tokens" in record["red"][0] and not record["first token"]


def test_drafting_is_measured_where_it_writes_the_text_of_plain_decoding(monkeypatch, run):
    few = ["--models", "qwen3.5-4b", "--mtp", "1,2", "--accepted"]
    for share, turns in (("1", (15, 8, 5)), ("0", (15, 14, 14))):  # the last token may need no draft
        code, record, _ = run(decode, *few, share)
        assert code == 0 and [row["proposals"] for row in record["drafted"]] == [0, 1, 2]
        assert [15 / row["tokens a turn"] for row in record["drafted"]] == pytest.approx(turns)
    forward = graphs.DecodeStep._forward
    wrong = lambda self, *inputs: (forward(self, *inputs), self.tokens == 3 and self.logits.neg_())  # noqa: E731
    monkeypatch.setattr(graphs.DecodeStep, "_forward", wrong)
    code, record, _ = run(decode, *few, "0.5")
    assert code == 1 and "not that of plain decoding" in record["red"][0] and not record["drafted"]


@pytest.mark.parametrize("name", ["llama-3.2-1b", "gemma-4-e2b", "gemma-4-31b"])
def test_the_matmuls_are_all_of_those_of_a_forward_pass(name):
    """Counted by torch, which sees the multiplications of both."""
    model = ours(name, "cpu", torch.float32, tiny=True)
    ids, counts = torch.randint(3, 512, (1, 24)), []
    for call in (decode.matmuls(model, 24), lambda: model(ids, logits_to_keep=1)):
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            call()
        counts.append(sum(n for op, n in counter.get_flop_counts()["Global"].items() if "attention" not in str(op)))
    assert counts[0] == counts[1] > 0


@slow
def test_loading_is_measured_and_wrong_weights_get_no_figures(monkeypatch, run, in_this_process):
    few = ["--runs", "1", "--loaders", "ligermodels,transformers"]
    code, record, _ = run(load, *few, "--save")
    assert code == 0 and all(row["s"] > 0 and row["again s"] > 0 for row in record["rows"])
    assert record["rows"][0]["save s"] > 0

    def wrong(*given):
        what, tensors, model = load._ours(*given)
        with torch.no_grad():
            tensors["model.norm.weight"][:2] = tensors["model.norm.weight"][:2].flip(0)
        return what, tensors, model

    monkeypatch.setitem(load.LOADERS, "ligermodels", wrong)
    code, record, _ = run(load, *few)
    assert code == 1 and record["rows"][0]["note"].endswith("not those of the files: model.norm.weight")
    assert "s" not in record["rows"][0] and record["rows"][1]["s"] > 0


@slow
@pytest.mark.parametrize(
    ("module", "arguments"),
    [
        (load, "--gpus 2 --runs 1"),
        (decode, "--models llama-3.2-1b --rollout 2x2x8+8"),
        (quantized, "--rows 1,3 --kinds int8,fp8"),
    ],
    ids=lambda value: str(value)[-12:],
)
def test_several_ranks_rollouts_and_quantised_matmuls_are_measured(module, arguments, run):
    if "--rollout" in arguments:
        pytest.importorskip("trl")
    code, record, _ = run(module, *arguments.split())
    assert code == 0 and not any("note" in row for row in record.get("rows", record.get("matmuls")))


def test_the_kernels_of_a_step_of_decoding_are_counted(run):
    code, record, _ = run(decode, *"--models qwen3-30b-a3b --cases 1x16+8 --baselines captured --kernels".split())
    *kernels, busy, idle = record["kernels"]
    assert code == 0 and (busy["kernel"], idle["kernel"]) == ("busy", "idle")
    assert all(row["launches"] >= 0.125 and row["us"] >= 0 for row in kernels)
    assert kernels[0]["us"] == max(row["us"] for row in kernels) and 0 < busy["us"] <= busy["us"] + idle["us"]


def test_experts_of_a_few_rows_are_measured_in_both_formats(run):
    code, record, _ = run(decode_experts, "--rows", "1,3")
    assert code == 0 and not record["red"]
    cases = [(row["model"], row["weights"], row["rows"]) for row in record["experts"]]
    kinds = [("qwen3-30b-a3b", "bf16"), ("gpt-oss-20b", "bf16"), ("gpt-oss-20b", "mxfp4")]
    assert cases == [(*kind, rows) for kind in kinds for rows in (1, 3)]
    read = {row["weights"]: row["MB"] for row in record["experts"] if row["model"] == "gpt-oss-20b"}
    assert 3 < read["bf16"] / read["mxfp4"] < 4  # 16 bits for 4.25, and biases


def test_experts_that_are_wrong_get_no_figures(run, monkeypatch):
    monkeypatch.setattr(decode_experts.Mixture, "error", lambda mixture, rows: 1.0)
    code, record, _ = run(decode_experts, "--rows", "1")
    assert code == 1 and not record["experts"] and len(record["red"]) == 3


@slow
@pytest.mark.parametrize(
    ("module", "arguments"),
    [
        (load, ["--gpus", "2", "--runs", "1", "--mesh", "dp_shard", "--save"]),
        (distributed, ["--cases", "8B 2 x 4096", "8B 1 x 8192, tp", "1B 1 x 262144, cp"]),
    ],
    ids=["load", "distributed"],
)
def test_more_of_several_ranks_is_measured(module, arguments, run, in_forks):
    code, record, _ = run(module, *arguments)
    assert code == 0 and not any("note" in row for row in record["rows"])


@slow
def test_runs_of_the_command_are_measured_beside_trl_s(run, in_this_process):
    for package in ("trl", "peft", "datasets"):
        pytest.importorskip(package)
    code, record, _ = run(train_command, "--case", "llama-3.2-1b:1", "--baselines", "ligermodels,trl,trl+liger")
    assert code == 0 and [row["baseline"] for row in record["runs"]] == ["ligermodels", "trl"] * 2
    # the same rows, in the same order, from the same weights
    for mine, theirs in zip(record["runs"][::2], record["runs"][1::2], strict=True):
        assert mine["losses"] == pytest.approx(theirs["losses"], rel=1e-5) and len(mine["losses"]) == 4
        assert mine["gradient norms"] == pytest.approx(theirs["gradient norms"], rel=1e-4)
        assert mine["mean tokens/s"] > 0 and theirs["ours is"].endswith("x")


def test_a_run_of_the_command_that_begins_otherwise_than_trl_s_gets_no_figures(monkeypatch, run):
    norms = {"ligermodels": 1.02, "trl+liger": 1.00001, "trl": 1.0}

    def spawn(module, job, *given, **named):
        return {"tokens/s": 2.0, "mean tokens/s": 2.0, "losses": [6.0], "gradient norms": [norms[job["baseline"]]]}

    monkeypatch.setattr(harness, "spawn", spawn)
    monkeypatch.setattr(train_command, "write_model", lambda folder, *given: folder.mkdir())
    monkeypatch.setattr(train_command, "write_rows", lambda *given: None)
    monkeypatch.setattr(train_command, "NEEDS_GPU", set())
    code, record, printed = run(train_command, "--trained", "full", "--case", "llama-3.2-1b:64", "--baselines",
                                "ligermodels,trl,trl+liger")  # fmt: skip
    assert code == 1 and [("tokens/s" in row) for row in record["runs"]] == [False, True, True]
    assert "RED: llama-3.2-1b, full, ligermodels: gradient norms of step 1: 1.02, TRL has 1" in printed


@pytest.mark.parametrize("options", [["--baselines", "trl+capture"], ["--case", "gpt-2:64"]])
def test_a_run_that_is_not_known_is_refused(options, capsys):
    with pytest.raises(SystemExit):
        train_command.main(["--dry", *options])
    assert options[1].partition(":")[0] in capsys.readouterr().err


def test_sides_that_train_differently_get_no_figures(monkeypatch, run):
    losses = iter([6.0, 6.1])

    def spawn(module, job, *given, **named):
        return {case: {"first loss": next(losses), "first norm": 1.0} for case in job["cases"]}

    monkeypatch.setattr(harness, "spawn", spawn)
    code, record, _ = run(distributed, "--cases", "8B 2 x 4096")
    assert code == 1 and "the first loss is 6.0, that of 8B 2 x 4096, hf+liger, 6.1" in record["red"][0]
    assert "6.1" not in str(record["rows"])


def test_meshes_that_train_differently_get_no_figures(monkeypatch, run):
    cases = [f"6 layers of 30B-A3B 4 x 4096{name}" for name in ("", ", whole", ", ep", ", one GPU")]
    norms = dict(zip(cases, (1.0, 1.001, 1.01, 1.4), strict=True))

    def spawn(module, job, *given, **named):
        return {case: {"first loss": 6.0, "first norm": norms[case]} for case in job["cases"]}

    monkeypatch.setattr(harness, "spawn", spawn)
    code, record, _ = run(distributed, "--cases", *cases)
    assert code == 1 and len(record["red"]) == 1 and record["red"][0].startswith(f"{cases[2]}: the first norm is 1.01")
    assert [row.get("first norm") for row in record["rows"]] == [1.0, 1.001, None, 1.4]


def test_processes_that_end_early_are_followed_by_others(monkeypatch, run):
    cases, jobs = ["8B 4 x 4096", "8B 8 x 4096, mlp", "8B 1 x 8192, tp", "8B 1 x 32768, mlp"], []
    row = {"first loss": 1.0, "first norm": 1.0, "s a step": 1.0}

    def spawn(module, job, *given, **named):  # memory stays allocated; then it runs out; then it goes on
        jobs.append(job["cases"])
        return [{cases[0]: row}, {"note": "OutOfMemoryError: none"}, dict.fromkeys(cases[2:], row)][len(jobs) - 1]

    monkeypatch.setattr(harness, "spawn", spawn)
    code, record, _ = run(distributed, "--cases", *cases)
    assert code == 0 and jobs == [cases, cases[1:], cases[2:]]
    assert [found.get("note") for found in record["rows"]] == [None, "OutOfMemoryError: none", None, None]
