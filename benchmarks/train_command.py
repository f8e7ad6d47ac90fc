"""Whole runs of `ligermodels train sft` beside TRL's SFTTrainer, on the same packed rows in the same order.

    python -m benchmarks.train_command --scratch /dev/shm --out result.json
    python -m benchmarks.train_command --case llama-3.2-1b:16384 --trained lora --baselines ligermodels,trl
    python -m benchmarks.train_command --dry

A case is MODEL:TOKENS, the tokens of a packed forward. Weights are random, of the config's sizes; a row has some 200
random ids, a third of which are not trained. "full" trains all weights, "lora" adapters of rank 16 on all linear
modules, which are the same for all. Optimizer, learning rate and what is recomputed (nothing) are the same. A baseline
is

    ligermodels   the command, with +capture: --capture
    trl           SFTTrainer, whose loss is computed in chunks, on torch's sdpa; with +flex on flex_attention, and with
                  +liger (use_liger_kernel) on Liger's layers: its loss stays TRL's

Weights and states are in bf16; TRL holds adapters in fp32, under autocast. Each baseline runs in a process of its own.
Loss and gradient norm of step 1 must agree with those of `trl`. A baseline that differs gets no figures; if it is ours,
the exit status is 1.

"tokens/s" is the median of the last half of the steps; "mean tokens/s" counts all after the first WARMUP, since a user
pays for all of them. A step's time has its data and its log, as each trainer reads its loss. Preparing TRL's rows is
not counted.
"""

import argparse
import contextlib
import importlib
import importlib.util
import io
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import harness
from benchmarks.harness import Record, Row
from benchmarks.train_cases import ALPHA, MODELS, RANK, changed, theirs, write_tokenizer

CASES = ("smollm2-135m:8192", "llama-3.2-1b:16384")
OPTIONS = {"ligermodels": {"capture"}, "trl": {"liger", "flex"}}
NEEDS_GPU = {"capture", "liger", "flex"}
LEARNING_RATES = {"full": 2e-5, "lora": 2e-4}
WARMUP, IGNORED = 10, -100
RELATIVE = {"cuda": 2**-7, "cpu": 1e-4}
"""Allowed difference of the first loss and gradient norm. On a GPU both are in bf16 and err by one rounding each; on a
CPU they are in fp32, where documents that see each other change the norm by 4e-3 and more."""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--case", default=",".join(CASES), help=f"MODEL:TOKENS, of {', '.join(MODELS)}")
    parser.add_argument("--trained", type=harness.names(*LEARNING_RATES), default=[*LEARNING_RATES], help="full,lora")
    parser.add_argument("--baselines", default="ligermodels,ligermodels+capture,trl,trl+flex,trl+liger+flex")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--timeout", type=float, default=180.0, help="seconds that a run may take")
    parser.add_argument("--scratch", help="where the model and the runs are written, e.g. /dev/shm")


def measure(options: argparse.Namespace, record: Record) -> None:
    baselines = options.baselines.split(",")
    for baseline in baselines:
        base, *chosen = baseline.split("+")
        if base not in OPTIONS or not {*chosen} <= OPTIONS[base]:
            known = "; ".join(f"{base} with any of +{', +'.join(sorted(known))}" for base, known in OPTIONS.items())
            raise ValueError(f"unknown baseline {baseline!r}; known: {known}")
    cases = [case.partition(":")[::2] for case in options.case.split(",")]
    for model, tokens in cases:
        if model not in MODELS or not tokens.isdigit():
            raise ValueError(f"--case {model}:{tokens}: expected MODEL:TOKENS, of the models {', '.join(MODELS)}")
    if options.dry:
        cases, options.steps = [(model, "512") for model, _ in cases], 4  # several documents a row
        baselines = [baseline for baseline in baselines if not NEEDS_GPU & {*baseline.split("+")}]
    record["red"], record["runs"] = [], []
    with tempfile.TemporaryDirectory(dir=options.scratch, prefix="train_command-") as scratch:
        for model, tokens in cases:
            folder = Path(scratch, model)
            if not folder.exists():
                write_model(folder, model, options.device, options.dry)
            write_rows(folder, int(tokens), options.steps)
            for trained in options.trained:
                rows = runs(str(folder), model, int(tokens), trained, baselines, options)
                compare(rows, RELATIVE[options.device])
                record["runs"] += rows
                record["red"] += [
                    f"{model}, {trained}, {row['baseline']}: {row['note']}"
                    for row in rows
                    if "note" in row and row["baseline"].startswith("ligermodels")
                ]


def runs(
    folder: str, model: str, tokens: int, trained: str, baselines: Sequence[str], options: argparse.Namespace
) -> list[Row]:  # fmt: skip
    """A row of each baseline."""
    rows = []
    for baseline in baselines:
        job = {"baseline": baseline, "trained": trained, "folder": folder, "tokens": tokens, "steps": options.steps,
               "device": options.device}  # fmt: skip
        gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0] if options.device == "cuda" else ""
        variables = {"CUDA_VISIBLE_DEVICES": gpu, "HF_HUB_OFFLINE": "1"}
        found = harness.spawn("train_command", job, options.timeout, **variables)
        row = {"model": model, "tokens a forward": tokens, "trained": trained, "baseline": baseline, **found}
        rows.append(row)
        harness.announce({key: value for key, value in row.items() if not isinstance(value, list)})
    return rows


def compare(rows: Sequence[Row], relative: float) -> None:
    """Compares the first step with TRL's. A row that differs loses its figures and gets a note.

    "ours is": how many times as fast as the row our first baseline is, by mean tokens/s.
    """
    reference = next((row for row in rows if row["baseline"] == "trl" and "losses" in row), None)
    for row in rows:
        for key in ("losses", "gradient norms") if reference and "losses" in row else ():
            found, expected = row[key][0], reference[key][0]  # type: ignore[index]
            if not abs(found - expected) <= relative * abs(expected):
                row["note"] = f"{key} of step 1: {found:.6g}, TRL has {expected:.6g}"
                row.pop("tokens/s", None), row.pop("mean tokens/s", None)
    ours = next((row for row in rows if row["baseline"].startswith("ligermodels") and "mean tokens/s" in row), None)
    for row in rows:
        if ours is not None and "mean tokens/s" in row:
            row["ours is"] = f"{ours['mean tokens/s'] / row['mean tokens/s']:.2f}x"


# Model and rows


def write_model(folder: Path, name: str, device: str, dry: bool) -> None:
    """A model of random weights in bf16, with a tokenizer of a word per id, and adapters that our command draws."""
    config = changed(MODELS[name].config, MODELS[name].tiny if dry else {})
    theirs(name, device, torch.bfloat16, config).save_pretrained(folder)
    write_tokenizer(folder, config)
    harness.free(device)


def write_rows(folder: Path, tokens: int, steps: int) -> None:
    """rows.jsonl: ids for some more than `steps` packed rows of `tokens`."""
    config = json.loads((folder / "config.json").read_text())
    eos, draw, total = config["eos_token_id"], random.Random(0), (steps + 8) * tokens
    with (folder / "rows.jsonl").open("w") as lines:
        while total > 0:
            size = min(tokens, 1024, max(8, round(draw.lognormvariate(5.3, 0.7))))
            ids = [*draw.choices(range(3, config["vocab_size"]), k=size - 1), eos]
            lines.write(json.dumps({"input_ids": ids, "labels": [IGNORED] * (size // 3) + ids[size // 3 :]}) + "\n")
            total -= size


# Runs


def work(job: dict[str, Any]) -> Row:
    """In the process of one run."""
    with tempfile.TemporaryDirectory(dir=job["folder"]) as out:
        if job["baseline"].startswith("ligermodels"):
            return figures(train_ours(job, Path(out, "run")), job["device"])
        for package in {"trl": "trl", "liger": "liger_kernel"}.items():
            if package[0] in job["baseline"].split("+") and importlib.util.find_spec(package[1]) is None:
                return {"note": f"{package[1]} is not installed"}
        return figures(train_theirs(job, Path(out)), job["device"])


def figures(lines: Sequence[dict[str, float]], device: str) -> Row:
    """Of the lines of metrics.jsonl, or of those that TRL's run leaves."""
    speeds = [line["tokens_per_second"] for line in lines]
    tokens = [b["tokens"] - a["tokens"] for a, b in zip([{"tokens": 0}, *lines], lines, strict=False)]
    skipped = min(WARMUP, len(lines) // 2)
    seconds = [count / speed for count, speed in zip(tokens, speeds, strict=True)]
    return {
        "tokens/s": statistics.median(speeds[len(lines) // 2 :]),
        "mean tokens/s": sum(tokens[skipped:]) / sum(seconds[skipped:]),
        "peak GiB": max(line["gib"] for line in lines) if device == "cuda" else None,
        "losses": [line["loss"] for line in lines], "gradient norms": [line["grad_norm"] for line in lines],
    }  # fmt: skip


def options_of(job: dict[str, Any], out: Path) -> dict[str, Any]:
    """Those of our command."""
    return {
        "model": job["folder"], "data": str(Path(job["folder"], "rows.jsonl")), "output_dir": str(out),
        "max_length": job["tokens"], "batch_tokens": job["tokens"], "max_steps": job["steps"], "accumulation": 1,
        "learning_rate": LEARNING_RATES[job["trained"]], "lr_scheduler_type": "constant_with_warmup",
        "warmup_steps": 0.0, "save_steps": 0, "eval_steps": 0, "report_to": "none", "show": 0, "activations": "none",
        **({"lora_r": RANK, "lora_alpha": float(ALPHA)} if job["trained"] == "lora" else {}),
        **({"precision": "bf16"} if job["device"] == "cuda" else {}),
    }  # fmt: skip


def train_ours(job: dict[str, Any], out: Path) -> list[dict[str, float]]:
    """A run of the command; the lines of its metrics.jsonl."""
    from ligermodels.cli import main as command

    options = options_of(job, out)
    words = [str(word) for key, value in options.items() if key != "model"
             for word in (f"--{key.replace('_', '-')}", value)]  # fmt: skip
    capture = ["--capture"] if job["baseline"].endswith("+capture") else []
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):  # a line of it is not a result
        if command(["train", "sft", options["model"], *words, *capture]) != 0:
            raise RuntimeError(f"the command failed: {printed.getvalue()[-200:]}")
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "tokens_per_second" in line]


def train_theirs(job: dict[str, Any], out: Path) -> list[dict[str, float]]:
    """A run of SFTTrainer on our packed rows; lines as those of our metrics.jsonl."""
    import datasets
    import transformers
    import trl

    cuda, chosen = job["device"] == "cuda", job["baseline"].split("+")
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        job["folder"], dtype=torch.bfloat16 if cuda else torch.float32,
        attn_implementation="flex_attention" if "flex" in chosen else "sdpa",
    )  # fmt: skip
    if job["trained"] == "lora":
        peft = importlib.import_module("peft")
        model = peft.PeftModel.from_pretrained(model, our_adapters(job, out / "adapters"), is_trainable=True)
    settings = trl.SFTConfig(
        str(out / "trl"), max_length=job["tokens"], packing=True, per_device_train_batch_size=1,
        gradient_accumulation_steps=1, max_steps=job["steps"], learning_rate=LEARNING_RATES[job["trained"]],
        lr_scheduler_type="constant", warmup_steps=0, weight_decay=0.0, max_grad_norm=1.0, optim="adamw_torch_fused",
        # autocast is for what is in fp32: between weights and inputs in bf16 it would only cost the host time
        bf16=cuda and job["trained"] == "lora", use_liger_kernel="liger" in chosen, gradient_checkpointing=False,
        use_cpu=not cuda, report_to=[], save_strategy="no", disable_tqdm=True, logging_steps=1,
        dataset_kwargs={"skip_prepare_dataset": True}, train_sampling_strategy="sequential",
    )  # fmt: skip
    rows = our_rows(job)
    lines: list[dict[str, float]] = []

    class Lines(transformers.TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, *given: Any, **named: Any) -> None:
            self.began = getattr(self, "began", time.perf_counter())

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **named: Any) -> None:
            if "grad_norm" not in logs:
                return
            harness.synchronize(job["device"])
            now, tokens = time.perf_counter(), len(rows[len(lines)]["input_ids"])
            lines.append({
                "loss": float(logs["loss"]), "grad_norm": float(logs["grad_norm"]),
                "tokens": tokens + (lines[-1]["tokens"] if lines else 0), "gib": harness.peak_gib(job["device"]) or 0.0,
                "tokens_per_second": tokens / (now - self.began),
            })  # fmt: skip
            self.began = time.perf_counter()

    tokenizer = transformers.AutoTokenizer.from_pretrained(job["folder"])
    with contextlib.redirect_stdout(sys.stderr):
        trl.SFTTrainer(
            model, args=settings, train_dataset=datasets.Dataset.from_list(rows), processing_class=tokenizer,
            callbacks=[Lines()],
        ).train()  # fmt: skip
    return lines


def our_rows(job: dict[str, Any]) -> list[dict[str, list[int]]]:
    """The packed rows that our command takes, in its order, as TRL's collator takes them."""
    from ligermodels.recipes import find
    from ligermodels.recipes.data.batches import Data
    from ligermodels.text import Tokenizer

    recipe = find("sft")
    options = recipe.Options(**options_of(job, Path("out")))
    data = Data(options, recipe.of(options)(options, Tokenizer.from_hub(job["folder"])))
    batches = map(data.recipe.collate, data.batches())
    taken = [next(batches) for _ in range(job["steps"])]
    return [
        {"input_ids": one["input_ids"][0].tolist(), "labels": one["labels"][0].tolist(),
         "seq_lengths": one["cu_seqlens"].diff().tolist()}
        for one in taken
    ]  # fmt: skip


def our_adapters(job: dict[str, Any], folder: Path) -> Path:
    """A folder with the adapters that our command starts from."""
    import ligermodels
    from ligermodels.training.lora import add_lora, save_adapter

    model = ligermodels.load(job["folder"], device="cpu", progress=False)
    save_adapter(add_lora(model, r=RANK, alpha=ALPHA, targets="all-linear", seed=0), folder)
    return folder


def main(arguments: Sequence[str] | None = None) -> int:
    return harness.main(__doc__, arguments, add_options, measure, work)


if __name__ == "__main__":
    sys.exit(main())
