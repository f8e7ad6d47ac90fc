"""`ligermodels train sft` beside TRL's SFTTrainer with Liger's kernels: tokens/s and memory of whole runs on the same
rows, and the seconds from the start of the process to the end of the first step.

    python -m benchmarks.train_command --out benchmarks/results/train-command.json
    python -m benchmarks.train_command --case llama-3.2-1b:16384 --kinds lora,nf4
    python -m benchmarks.train_command --kinds full --baselines ligermodels+capture,trl+liger+flash,trl+liger+flex
    python -m benchmarks.train_command --dry                                     # tiny models on the CPU
    python -m benchmarks.train_command --render benchmarks/results/train-command.json

A case is MODEL:TOKENS, so many a packed forward, and a kind is what is trained: all weights ("full"), adapters of rank
16 on all projections ("lora"), or those on weights in 4 bits ("nf4"). Weights are random, of the config's sizes; rows
are ids, of some 200 a row, a third of them masked. Optimizer, learning rate, packing and what is recomputed (nothing)
are the same. A baseline is

    ligermodels   the command, with any of +capture (--capture), and +masters or +fp32 (--precision; else bf16)
    trl           SFTTrainer, with any of +liger (use_liger_kernel), +flash or +flex (attention; else torch's sdpa), and
                  +fp32: weights and states in fp32 under autocast to bf16, its default, which is ours of that name

Everything else is in bf16: weights and states of "full"; the frozen weights below TRL's adapters, which it holds in
fp32 under autocast, and in bf16 on 4 bits; ours have fp32 masters.

Before a model is timed, TRL in fp32 takes 5 steps on a shallow model of its widths, and so does every baseline, on the
same rows in the same order, from the same adapters: losses and gradient norms must agree. Where one of ours does not,
nothing of the model is timed, and the exit status is 1. On the CPU both compute in fp32; our command computes in bf16
on a GPU, so that there only what is larger than the roundings of bf16 is a mistake.

Every run is a process of its own, ours the command itself, which is ended once it has taken its steps, before it saves
the model. "tokens/s" is the median of the last half of the steps, as the run itself tells; "mean tokens/s" counts what
was between the ends of step 10 and of the last, as the clock of this process saw them, since a user pays for all of it.
Padding is not counted. "peak GiB" is what was in tensors, as the run tells, without the memory of CUDA graphs; "GPU
GiB" is what the process took of the device.
"""

import argparse
import dataclasses
import importlib.util
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import environment, heading, table, write_json
from benchmarks.train_cases import IGNORED, MODELS

ROOT = Path(__file__).parent.parent
CASES = "smollm2-135m:8192,llama-3.2-1b:1024,llama-3.2-1b:16384"
PAIR = ("ligermodels", "ligermodels+capture", "trl+liger")
BASELINES = {
    "full": (*PAIR, "ligermodels+masters+capture", "ligermodels+fp32+capture", "trl+liger+fp32"), "lora": PAIR,
    "nf4": PAIR,
}  # fmt: skip
OPTIONS = {"ligermodels": {"capture", "masters", "fp32"}, "trl": {"liger", "flash", "flex", "fp32"}}
PACKAGES = {"trl": "trl", "liger": "liger_kernel", "flash": "flash_attn", "lora": "peft", "nf4": "bitsandbytes"}
"""What TRL needs for an option or a kind."""
COLUMNS = (
    "model", "tokens a forward", "kind", "baseline", "tokens/s", "mean tokens/s", "of trl", "first step s", "peak GiB",
    "GPU GiB", "note",
)  # fmt: skip
RANK, ALPHA, WARMUP, PARITY_STEPS, PARITY_TOKENS = 16, 32, 10, 5, 512
TOLERANCES = {"fp32": (1e-5, 1e-4), "nf4": (5e-4, 5e-3), "bf16": (2**-8, 2**-6)}
"""Relative, of a loss and of a gradient norm, of runs that compute in fp32, in fp32 on 4 bits, and in bf16. Measured on
a CPU: 2e-7 and 7e-7; 6e-5 and 7e-4, since scales of 4 bits are summed in another order; 7e-4 and 4e-3. Documents that
see each other change them by 1e-2 and 2e-2."""
DRY = {"intermediate_size": 192}
"""bitsandbytes reads rows on a CPU wrongly that are no multiple of 64 wide."""


@dataclasses.dataclass(frozen=True)
class Job:
    """A run of a baseline. folder: of the model, with rows.jsonl. exact: computed in fp32 on every device, by TRL.
    ordered: takes our rows in our order, and starts from our adapters."""

    baseline: str
    kind: str
    folder: str
    tokens: int
    steps: int
    accumulation: int
    lr: float
    device: str
    ordered: bool = False
    exact: bool = False

    @property
    def options(self) -> set[str]:
        return set(self.baseline.split("+")[1:])

    @property
    def ours(self) -> bool:
        return self.baseline.startswith("ligermodels")

    @property
    def missing(self) -> str:
        """The package that is not installed, or ""."""
        needed = set() if self.ours else {"trl", self.kind} | self.options
        names = [PACKAGES[name] for name in sorted(needed & PACKAGES.keys())]
        return next((name for name in names if importlib.util.find_spec(name) is None), "")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", default=CASES, help="MODEL:TOKENS, comma-separated")
    parser.add_argument("--kinds", default="full,lora,nf4", help="of full, lora, nf4")
    parser.add_argument("--baselines", help=f"comma-separated; default: {'; '.join(map(','.join, BASELINES.values()))}")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--accumulation", type=int, default=1, help="forwards a step")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds that a run may take")
    parser.add_argument("--scratch", help="where checkpoints are written for the run, e.g. /dev/shm")
    parser.add_argument("--dry", action="store_true", help="tiny models on the CPU; the times mean nothing")
    parser.add_argument("--out", help="a JSON file for the figures")
    parser.add_argument("--render", metavar="FILE.json", help="print an earlier result instead of measuring")
    parser.add_argument("--worker", nargs=2, metavar=("JOB", "FOLDER"), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.render:
        print(render(json.loads(Path(options.render).read_text())))
        return 0
    if options.worker:
        train_trl(Job(**json.loads(options.worker[0])), Path(options.worker[1]))
        return 0
    kinds = options.kinds.split(",")
    wanted = {kind: tuple(options.baselines.split(",")) if options.baselines else BASELINES[kind] for kind in kinds}
    for name in {name for names in wanted.values() for name in names}:
        base, *chosen = name.split("+")
        if base not in OPTIONS or not set(chosen) <= OPTIONS[base]:
            parser.error(f"unknown baseline {name}; known: {', '.join(f'{b} with +{o}' for b, o in OPTIONS.items())}")
    cases = [case.split(":") for case in options.case.split(",")]
    if wrong := [":".join(case) for case in cases if case[0] not in MODELS or not case[-1].isdigit()]:
        parser.error(f"case {wrong[0]}: expected MODEL:TOKENS, of the models {', '.join(MODELS)}")
    if not options.dry and not torch.cuda.is_available():
        parser.error("needs a CUDA device; --dry runs tiny models on the CPU")
    options.device = "cpu" if options.dry else "cuda"
    if options.dry:
        cases, options.steps = [(model, 256) for model, _ in cases], 4
        if not options.baselines:  # Liger's kernels need a GPU
            wanted = {kind: tuple(name.replace("+liger", "") for name in names) for kind, names in wanted.items()}
    record: dict[str, Any] = {"environment": environment(options.device), "parity": [], "rows": []}
    checked: dict[str, list[dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory(dir=options.scratch, prefix="train_command-") as scratch:
        for model, tokens in cases:
            if model not in checked:
                checked[model] = parity(model, wanted, options, Path(scratch))
                record["parity"] += checked[model]
            if not reds(checked[model]):
                record["rows"] += measured(model, int(tokens), wanted, checked[model], options, Path(scratch))
            if options.out:
                write_json(options.out, record)
    print(render(record))
    return int(bool(reds(record["parity"])))


def reds(checked: Sequence[Mapping[str, Any]]) -> list[str]:
    """What is wrong with ours, of the rows of `parity`."""
    wrong = [row for row in checked if row["note"] and row["baseline"].startswith("ligermodels")]
    return [f"RED: {row['model']}, {row['kind']}, {row['baseline']}: {row['note']}" for row in wrong]


def measured(
    model: str, tokens: int, wanted: Mapping[str, Sequence[str]], checked: Sequence[Mapping[str, Any]],
    options: argparse.Namespace, scratch: Path,
) -> list[dict[str, Any]]:  # fmt: skip
    """The rows of a case. checked: those of `parity`."""
    folder, rows = scratch / f"{model}-{tokens}", []
    write(folder, model, options.device, tokens, options.steps * options.accumulation * tokens)
    notes = {(one["kind"], one["baseline"]): one["note"] for one in checked}
    for kind, baseline in ((kind, name) for kind, names in wanted.items() for name in names):
        note, lr = notes[kind, in_parity(baseline)], 2e-5 if kind == "full" else 2e-4
        job = Job(baseline, kind, str(folder), tokens, options.steps, options.accumulation, lr, options.device)
        found = {"note": note} if note else run(job, folder / f"run-{kind}-{baseline}", options.timeout)
        row = {"model": model, "tokens a forward": tokens, "kind": kind, "baseline": baseline}
        rows.append(row | figures(found))
        print(rows[-1], file=sys.stderr, flush=True)
    return rows


# Model and rows


def write(folder: Path, model: str, device: str, most: int, total: int, **changes: Any) -> None:
    """A model in bf16 with random weights, a tokenizer of as many words, and rows of ids: `total` tokens and some more,
    at most `most` a row."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    from benchmarks.decode import make

    dry = device == "cpu"
    found = make(model, device, torch.bfloat16, tiny=dry, **(DRY if dry else {}), **changes)
    found.save_pretrained(folder)
    config = found.config
    del found
    if device == "cuda":
        torch.cuda.empty_cache()
    backend = Tokenizer(models.WordLevel({f"w{n}": n for n in range(config.vocab_size)}, unk_token="w0"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.save(str(folder / "tokenizer.json"))
    special = {"eos_token": f"w{config.eos_token_id}", "pad_token": "w0", "unk_token": "w0"}
    write_json(folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", **special})
    draw = random.Random(0)
    with (folder / "rows.jsonl").open("w") as lines:
        while total > 0:
            size = min(most, 1024, max(8, round(draw.lognormvariate(5.3, 0.7))))
            ids = [*draw.choices(range(3, config.vocab_size), k=size - 1), config.eos_token_id]
            lines.write(json.dumps({"input_ids": ids, "labels": [IGNORED] * (size // 3) + ids[size // 3 :]}) + "\n")
            total -= size


# Runs


def command(job: Job, out: Path) -> list[str]:
    """The command line of a run."""
    if not job.ours:
        worker = json.dumps(dataclasses.asdict(job))
        return [sys.executable, "-m", "benchmarks.train_command", "--worker", worker, str(out)]
    precision = {"masters": "bf16-masters", "fp32": "fp32"}
    flags: dict[str, Any] = {
        "data": Path(job.folder, "rows.jsonl"), "out": out, "length": job.tokens, "batch-tokens": job.tokens,
        "steps": job.steps, "accumulation": job.accumulation, "lr": job.lr, "schedule": "constant", "warmup": 0,
        "save-every": 0, "eval-every": 0, "logger": "none", "show": 0, "activations": "none",
        "precision": next((precision[name] for name in sorted(job.options & {*precision})), "bf16"),
    }  # fmt: skip
    flags |= {} if job.kind == "full" else {"lora": RANK, "lora-alpha": ALPHA}
    flags |= {"quantize": "nf4"} if job.kind == "nf4" else {}
    words = [str(word) for name, value in flags.items() for word in (f"--{name}", value)]
    capture = ["--capture"] * ("capture" in job.options)
    return [sys.executable, "-m", "ligermodels", "train", "sft", job.folder, *words, *capture]


def run(job: Job, out: Path, timeout: float) -> dict[str, Any]:
    """The lines of the run's metrics.jsonl, the seconds from its start at which each was there, and the most GiB that
    it took of the device; or a note that says why there are none."""
    if job.missing:
        return {"note": f"{job.missing} is not installed"}
    cuda, metrics, log = job.device == "cuda", out / "metrics.jsonl", out.with_name(f"{out.name}.log")
    variables = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(out.with_name(f"{out.name}-cache"))}
    if not cuda:
        variables["CUDA_VISIBLE_DEVICES"] = ""
    else:  # TRL's trainer would take all that it sees
        variables.setdefault("CUDA_VISIBLE_DEVICES", "0")
    free = torch.cuda.mem_get_info()[0] if cuda else 0
    seen: list[float] = []
    taken, ticks, started, over = 0, 0, time.perf_counter(), False
    with log.open("w") as told:
        process = subprocess.Popen(
            command(job, out), cwd=ROOT, env=variables, stdout=told, stderr=told, start_new_session=True
        )
    try:
        while len(seen) < job.steps and not over:
            over = process.poll() is not None or time.perf_counter() - started > timeout
            lines = metrics.read_bytes().splitlines(keepends=True) if metrics.exists() else []
            complete = sum(line.endswith(b"\n") for line in lines)
            seen += [time.perf_counter() - started] * (complete - len(seen))
            if cuda and ticks % 10 == 0:
                taken = max(taken, free - torch.cuda.mem_get_info()[0])
            ticks += 1
            time.sleep(0.005)
    finally:
        if process.poll() is None:  # its model is not saved, and its processes that encode end with it
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if len(seen) < job.steps:
        print(log.read_text(), file=sys.stderr)
        last = (log.read_text().strip().splitlines() or [f"exit code {process.returncode}"])[-1]
        return {"note": f"{len(seen)} of {job.steps} steps in {time.perf_counter() - started:.0f} s: {last}"[:160]}
    return {"lines": [json.loads(line) for line in lines], "seen": seen, **({"gpu_gib": taken / 2**30} if cuda else {})}


def figures(found: Mapping[str, Any]) -> dict[str, Any]:
    """The figures of what `run` found."""
    if "lines" not in found:
        return dict(found)
    lines, seen = found["lines"], found["seen"]
    skipped = min(WARMUP, len(lines) // 2)
    return {
        "tokens/s": statistics.median(line["tokens_per_second"] for line in lines[len(lines) // 2 :]),
        "mean tokens/s": (lines[-1]["tokens"] - lines[skipped - 1]["tokens"]) / (seen[-1] - seen[skipped - 1]),
        "tokens a step": lines[-1]["tokens"] / len(lines), "first step s": seen[0],
        "peak GiB": max(line["gib"] for line in lines), "GPU GiB": found.get("gpu_gib"),
    }  # fmt: skip


def train_trl(job: Job, out: Path) -> None:
    """A run of TRL's trainer, in a process of its own, that writes the lines that our command writes."""
    import datasets
    import peft
    import transformers
    import trl

    cuda, out = job.device == "cuda", out.resolve()
    out.mkdir(parents=True)
    attention = {"flash": "flash_attention_2", "flex": "flex_attention"}
    low = not (job.exact or "fp32" in job.options)
    how: dict[str, Any] = {"dtype": "bfloat16" if low else "float32"}
    how["attn_implementation"] = next((attention[name] for name in sorted(job.options & {*attention})), "sdpa")
    given: dict[str, Any] = {"model": job.folder}
    if job.kind == "nf4":
        given["quantization_config"] = transformers.BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=torch.bfloat16 if cuda and not job.exact else torch.float32,
        )  # fmt: skip
    if job.kind != "full" and not job.ordered:
        given["peft_config"] = peft.LoraConfig(
            r=RANK, lora_alpha=ALPHA, lora_dropout=0.0, target_modules="all-linear", task_type="CAUSAL_LM"
        )
    elif job.kind != "full":
        quantized = {name: given.pop(name) for name in ("quantization_config",) if name in given}
        placed = {"device_map": {"": 0}} if cuda else {}
        base = transformers.AutoModelForCausalLM.from_pretrained(job.folder, **how, **quantized, **placed)
        given["model"] = peft.PeftModel.from_pretrained(base, our_adapters(job, out / "start"), is_trainable=True)
    rows = our_rows(job) if job.ordered else None
    settings = trl.SFTConfig(
        str(out / "trl"), max_length=job.tokens, packing=True, packing_strategy="bfd", per_device_train_batch_size=1,
        gradient_accumulation_steps=job.accumulation, max_steps=job.steps, learning_rate=job.lr,
        lr_scheduler_type="constant", warmup_steps=0, weight_decay=0.0, max_grad_norm=1.0, optim="adamw_torch_fused",
        # autocast is for what is in fp32: between weights and inputs in bf16 it would only cost the host time
        bf16=cuda and not job.exact and (not low or job.kind != "full"), use_liger_kernel="liger" in job.options,
        gradient_checkpointing=False, use_cpu=not cuda, report_to=[], save_strategy="no", disable_tqdm=True,
        logging_steps=1 if job.ordered else 10, model_init_kwargs=how if isinstance(given["model"], str) else None,
        dataset_kwargs={"skip_prepare_dataset": True} if job.ordered else None,
        train_sampling_strategy="sequential" if job.ordered else "random",
    )  # fmt: skip
    lines = (out / "metrics.jsonl").open("w", buffering=1)
    line: dict[str, Any] = {"tokens": 0, "loss": 0.0}

    class Trainer(trl.SFTTrainer):  # type: ignore[misc]
        def training_step(self, model: Any, inputs: dict[str, Any], *others: Any, **named: Any) -> Any:
            line["tokens"] += inputs["input_ids"].numel()  # packed: no padding
            loss = super().training_step(model, inputs, *others, **named)
            line["loss"] = line["loss"] + loss.detach()
            return loss

    class Lines(transformers.TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, *given: Any, **named: Any) -> None:
            self.last = time.perf_counter(), 0

        def on_step_end(self, args: Any, state: Any, *given: Any, **named: Any) -> None:
            if cuda:
                torch.cuda.synchronize()
            (before, tokens), self.last = self.last, (time.perf_counter(), line["tokens"])
            line["tokens_per_second"] = (self.last[1] - tokens) / (self.last[0] - before)
            line["gib"] = torch.cuda.max_memory_allocated() / 2**30 if cuda else 0.0
            if not job.ordered:
                self.tell(state.global_step)

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **named: Any) -> None:
            if job.ordered and "grad_norm" in logs:
                self.tell(state.global_step, grad_norm=float(logs["grad_norm"]))

        def tell(self, step: int, **more: float) -> None:
            print(json.dumps({"step": step, **line, "loss": float(line["loss"]), **more}), file=lines)
            line["loss"] = 0.0

    data = datasets.Dataset.from_json(str(Path(job.folder, "rows.jsonl"))) if rows is None else rows
    trainer = Trainer(
        args=settings, train_dataset=data, callbacks=[Lines()], **given,
        processing_class=transformers.AutoTokenizer.from_pretrained(job.folder),
    )  # fmt: skip
    for parameter in trainer.model.parameters() if job.exact else ():
        if parameter.requires_grad:  # TRL rounds adapters on 4 bits to bf16
            parameter.data = parameter.data.float()
    trainer.train()


# Parity


def in_parity(baseline: str) -> str:
    """The baseline in the precision of the parity, that of TRL's default."""
    base, *options = baseline.split("+")
    return "+".join([base, *(name for name in options if name not in ("fp32", "masters")), "fp32"])


def parity(
    model: str, wanted: Mapping[str, Sequence[str]], options: argparse.Namespace, scratch: Path
) -> list[dict[str, Any]]:
    """How far each baseline lies from TRL in fp32 in losses and gradient norms; its note says where that is too far."""
    changes = {**MODELS[model].shallow, "vocab_size": 8192, "bos_token_id": 1, "eos_token_id": 2}
    folder = scratch / f"{model}-parity"
    total = 3 * PARITY_STEPS * PARITY_TOKENS
    write(folder, model, options.device, PARITY_TOKENS, total, **({} if options.dry else changes))

    def one(kind: str, baseline: str, exact: bool = False) -> Any:
        how = (PARITY_TOKENS, PARITY_STEPS, 2, 5e-3, options.device)
        job = Job(baseline, kind, str(folder), *how, ordered=True, exact=exact)
        return executor.submit(run, job, folder / f"run-{kind}-{baseline}-{exact}", options.timeout)

    rows: list[dict[str, Any]] = []
    # nothing of them is timed, so that some run at once
    with ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // 2)) as executor:
        expected = {kind: one(kind, "trl", exact=True) for kind in wanted}
        pairs = [(kind, name) for kind, names in wanted.items() for name in dict.fromkeys(map(in_parity, names))]
        for kind, name, future in [(*pair, one(*pair)) for pair in pairs]:
            # TRL rounds adapters on 4 bits to bf16 on any device
            low = not options.dry or (kind == "nf4" and name.startswith("trl"))
            limits = TOLERANCES["bf16" if low else "nf4" if kind == "nf4" else "fp32"]
            apart = compared(future.result(), expected[kind].result(), limits)
            rows.append({"model": model, "kind": kind, "baseline": name, **apart})
            print(rows[-1], file=sys.stderr, flush=True)
    return rows


def compared(found: Mapping[str, Any], expected: Mapping[str, Any], limits: Sequence[float]) -> dict[str, Any]:
    """The largest relative differences over the steps; and a note, empty where they are within the limits."""
    for run in (found, expected):
        if "note" in run:  # without TRL, ours is timed unchecked
            unchecked = run is expected and run["note"].endswith("is not installed")
            return {"note": "", "unchecked": run["note"]} if unchecked else {"note": run["note"]}
    apart: dict[str, Any] = {"note": ""}
    for key, limit in zip(("loss", "grad_norm"), limits, strict=True):
        pairs = [(a[key], b[key]) for a, b in zip(found["lines"], expected["lines"], strict=True)]
        apart[key] = max(abs(a - b) / abs(b) for a, b in pairs)
        if not apart[key] <= limit:
            apart["note"] = f"{key}: {[a for a, _ in pairs]}, TRL in fp32 has {[b for _, b in pairs]}"
    return apart


def our_rows(job: Job) -> Any:
    """The packed rows that our command takes, in its order, as TRL's collator takes them."""
    import datasets

    from ligermodels.recipes.batches import Batches
    from ligermodels.recipes.formats import detect
    from ligermodels.recipes.masking import Encoder
    from ligermodels.recipes.rows import open_rows
    from ligermodels.text import Tokenizer

    rows = open_rows(Path(job.folder, "rows.jsonl"))
    encoder = Encoder(Tokenizer.from_hub(job.folder), detect(rows))
    batches = Batches(rows, encoder, length=job.tokens, prefetch=False)
    taken = [next(batches) for _ in range(job.steps * job.accumulation)]
    names = ("input_ids", "labels")
    return datasets.Dataset.from_list(
        [
            {name: b[name][0].tolist() for name in names} | {"seq_lengths": b["cu_seqlens"].diff().tolist()}
            for b in taken
        ]
    )


def our_adapters(job: Job, folder: Path) -> str:
    """A folder with the adapters that our command starts from."""
    import ligermodels
    from ligermodels.training.lora import add_lora, save_adapter

    model = ligermodels.load(job.folder, device="cpu", progress=False)
    save_adapter(add_lora(model, r=RANK, alpha=ALPHA, targets="all-linear", seed=0), folder)
    return str(folder)


def render(record: Mapping[str, Any]) -> str:
    """The table of a result."""
    rows = [dict(row) for row in record["rows"]]
    for row in rows:
        same = [one for one in rows if all(one[name] == row[name] for name in COLUMNS[:3])]
        theirs = [one["mean tokens/s"] for one in same if one["baseline"].startswith("trl") and "mean tokens/s" in one]
        if theirs and "mean tokens/s" in row:
            row["of trl"] = f"{row['mean tokens/s'] / max(theirs):.2f}x"
    shown = table(COLUMNS, [[row.get(column) for column in COLUMNS] for row in rows]) if rows else ""
    return "\n\n".join(filter(None, [heading(record["environment"]), *reds(record["parity"]), shown]))


if __name__ == "__main__":
    sys.exit(main())
