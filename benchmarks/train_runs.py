"""Whole runs of `ligermodels train sft` beside TRL's SFTTrainer with Liger's kernels, on the same rows.

    python -m benchmarks.train_step --case sft-smollm2-135m,sft-llama-1b

A case is a model and the tokens of a packed forward. Weights are random, of the config's sizes; rows are ids, some 200
a row, a third of them masked. Optimizer, learning rate, packing and what is recomputed (nothing) are the same.

    sft   the command, with any of +capture (--capture), and +masters or +fp32 (--precision; else bf16)
    trl   SFTTrainer, with any of +liger (use_liger_kernel), +flash or +flex (attention; else torch's sdpa), and +fp32:
          weights and states in fp32 under autocast to bf16, its default, which is that of ours of that name

Both train all weights, with +lora adapters of rank 16 on all projections, or with +nf4 those on weights in 4 bits. All
else is in bf16: weights and states where all are trained; the frozen weights below TRL's adapters, which are in fp32
under autocast, and in bf16 on 4 bits; ours have fp32 masters.

Before a case is timed, TRL in fp32 takes 5 steps on a shallow model of its widths, and so does every baseline, on the
same rows in the same order, from the same adapters: losses and gradient norms must agree. What does not agree gets no
figures. On the CPU both compute in fp32; the command computes in bf16 on a GPU, so that there only what is larger than
the roundings of bf16 is a mistake.

Every run is a process of its own, ours the command itself, which is ended once it has taken its steps, before it saves
the model. "tokens/s" is the median of the last half of the steps, as the run reports it; "mean tokens/s" counts all
time between the ends of step 10 and of the last, by the clock of this process. Padding is not counted. "first step s"
begins with the process. "peak GiB" is what was in tensors, as the run reports it, without the memory of CUDA graphs;
"GPU GiB" is what the process took of the device.
"""

import dataclasses
import functools
import importlib.util
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from benchmarks import harness
from benchmarks.harness import ROOT, Row
from benchmarks.train_cases import ALPHA, IGNORED, MODELS, RANK, ours

if TYPE_CHECKING:
    from benchmarks.train_step import Settings

PACKAGES = {"trl": "trl", "liger": "liger_kernel", "flash": "flash_attn", "lora": "peft", "nf4": "bitsandbytes"}
"""What TRL needs for an option."""
WARMUP, PARITY_STEPS, PARITY_TOKENS = 10, 5, 512
TOLERANCES = {"fp32": (1e-5, 1e-4), "nf4": (5e-4, 5e-3), "bf16": (2**-8, 2**-6)}
"""Relative, of a loss and of a gradient norm, of runs that compute in fp32, in fp32 on 4 bits, and in bf16. Measured on
a CPU: 2e-7 and 7e-7; 6e-5 and 7e-4, since scales of 4 bits are summed in another order; 7e-4 and 4e-3. Documents that
see each other change them by 1e-2 and 2e-2."""


@dataclasses.dataclass(frozen=True)
class Job:
    """A run of a baseline. folder: of the model, with rows.jsonl. parity: takes our rows in our order, and starts from
    our adapters. exact: computed in fp32 on every device, by TRL."""

    trl: bool
    options: Sequence[str]
    folder: str
    out: str
    tokens: int
    steps: int
    accumulation: int
    lr: float
    device: str
    parity: bool = False
    exact: bool = False

    @property
    def kind(self) -> str:
        """What is trained: "nf4", "lora" or "full"."""
        return next((kind for kind in ("nf4", "lora") if kind in self.options), "full")

    @property
    def missing(self) -> str:
        """The package that is not installed, or ""."""
        needed = [PACKAGES[name] for name in ("trl", *self.options) if self.trl and name in PACKAGES]
        return next((name for name in needed if importlib.util.find_spec(name) is None), "")


def rows_of(settings: "Settings", timeout: float) -> list[Row]:
    """The rows of a case: parity first, then the times of each baseline that has passed it."""
    from benchmarks.train_step import Baseline

    named = {name: Baseline.of(name, settings) for name in settings.baselines}
    if settings.dry:  # Liger's kernels need a GPU
        named = {name: b for name, b in named.items() if not b.options & {"liger", "flash", "flex"}}
    checked = Path(settings.folder, "parity")
    changes = (
        {}
        if settings.dry
        else {**MODELS[settings.model].shallow, "vocab_size": 8192, "bos_token_id": 1, "eos_token_id": 2}
    )
    write(checked, settings, PARITY_TOKENS, 3 * PARITY_STEPS * PARITY_TOKENS, **changes)
    timed = Path(settings.folder, f"timed-{settings.seq}")
    write(timed, settings, settings.seq, settings.steps * settings.accumulation * settings.seq)

    def job(name: str, **changes: Any) -> Job:
        lr = 2e-4 if named[name].adapters else 2e-5
        out = str(timed / f"run-{name}")
        steps, tokens = settings.steps, settings.seq
        options = sorted(named[name].options)
        found = Job(
            not named[name].ours, options, str(timed), out, tokens, steps, settings.accumulation, lr, settings.device
        )
        return dataclasses.replace(found, **changes)

    in_parity = dict(
        folder=str(checked), tokens=PARITY_TOKENS, steps=PARITY_STEPS, accumulation=2, lr=5e-3, parity=True,
    )  # fmt: skip

    @functools.cache
    def of_parity(options: tuple[str, ...], trl: bool, exact: bool) -> Row:
        out = str(checked / f"run-{'-'.join(options)}-{trl}-{exact}")
        return run(job(settings.baselines[0], **in_parity, options=options, trl=trl, exact=exact, out=out), timeout)

    rows: list[Row] = []
    for name, baseline in named.items():
        # the parity is that of TRL's default precision
        options = tuple(sorted({*baseline.options, "fp32"} - {"masters"}))
        expected = of_parity(tuple(sorted({*baseline.options} & {"lora", "nf4"})), True, True)
        # TRL rounds adapters on 4 bits to bf16 on any device
        low = not settings.dry or (baseline.adapters == "nf4" and not baseline.ours)
        limits = TOLERANCES["bf16" if low else "nf4" if baseline.adapters == "nf4" else "fp32"]
        row = compared(of_parity(options, not baseline.ours, False), expected, limits)
        row = row if "note" in row else {**row, **figures(run(job(name), timeout))}
        rows.append({"baseline": name, **row})
        harness.announce(rows[-1])
    return rows


def write(folder: Path, settings: "Settings", most: int, total: int, **changes: Any) -> None:
    """A model in bf16 with random weights, a tokenizer of as many words, and rows of ids: `total` tokens and some more,
    at most `most` a row."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    # on a CPU, bitsandbytes reads rows wrongly whose length is no multiple of 64
    changes |= {"intermediate_size": 192} if settings.dry else {}
    model = ours(settings.model, settings.device, torch.bfloat16, tiny=settings.dry, **changes)
    model.save_pretrained(folder)
    config = model.config
    del model
    harness.free(settings.device)
    backend = Tokenizer(models.WordLevel({f"w{n}": n for n in range(config.vocab_size)}, unk_token="w0"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.save(str(folder / "tokenizer.json"))
    special = {"eos_token": f"w{config.eos_token_id}", "pad_token": "w0", "unk_token": "w0"}
    harness.write_json(folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", **special})
    draw = random.Random(0)
    with (folder / "rows.jsonl").open("w") as lines:
        while total > 0:
            size = min(most, 1024, max(8, round(draw.lognormvariate(5.3, 0.7))))
            ids = [*draw.choices(range(3, config.vocab_size), k=size - 1), config.eos_token_id]
            lines.write(json.dumps({"input_ids": ids, "labels": [IGNORED] * (size // 3) + ids[size // 3 :]}) + "\n")
            total -= size


# Runs


def command(job: Job) -> list[str]:
    """The command line of a run."""
    if job.trl:
        return [sys.executable, "-m", "benchmarks.train_step", "--worker", json.dumps(dataclasses.asdict(job))]
    precision = {"masters": "bf16-masters", "fp32": "fp32"}
    flags: dict[str, Any] = {
        "data": Path(job.folder, "rows.jsonl"), "out": job.out, "length": job.tokens, "batch-tokens": job.tokens,
        "steps": job.steps, "accumulation": job.accumulation, "lr": job.lr,
        "lr-scheduler-type": "constant_with_warmup", "warmup-steps": 0, "save-steps": 0, "eval-steps": 0,
        "report-to": "none", "show": 0, "activations": "none",
        "precision": next((precision[name] for name in job.options if name in precision), "bf16"),
    }  # fmt: skip
    flags |= {} if job.kind == "full" else {"lora": RANK, "lora-alpha": ALPHA}
    flags |= {"quantize": "nf4"} if job.kind == "nf4" else {}
    given = [str(word) for name, value in flags.items() for word in (f"--{name}", value)]
    return [
        sys.executable,
        "-m",
        "ligermodels",
        "train",
        "sft",
        job.folder,
        *given,
        *["--capture"] * ("capture" in job.options),
    ]


def run(job: Job, timeout: float) -> Row:
    """The lines of the run's metrics.jsonl, the seconds from its start at which each was there, and the most GiB that
    it took of the device; or a note that says why there are none."""
    if job.missing:
        return {"note": f"{job.missing} is not installed"}
    cuda, out = job.device == "cuda", Path(job.out)
    metrics, log = out / "metrics.jsonl", out.with_name(f"{out.name}.log")
    variables = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(out.with_name(f"{out.name}-cache"))}
    if not cuda:
        variables["CUDA_VISIBLE_DEVICES"] = ""
    else:  # TRL's trainer would take all that it sees
        variables.setdefault("CUDA_VISIBLE_DEVICES", "0")
    free = torch.cuda.mem_get_info()[0] if cuda else 0
    seen: list[float] = []
    taken, ticks, started, over = 0, 0, time.perf_counter(), False
    with log.open("w") as output:
        process = subprocess.Popen(
            command(job), cwd=ROOT, env=variables, stdout=output, stderr=output, start_new_session=True
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


def figures(found: Mapping[str, Any]) -> Row:
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


def compared(found: Mapping[str, Any], expected: Mapping[str, Any], limits: Sequence[float]) -> Row:
    """The largest relative differences over the steps, and a note where they are above the limits."""
    for one in (found, expected):
        if "note" in one:  # without TRL, ours is timed unchecked
            unchecked = one is expected and one["note"].endswith("is not installed")
            return {"unchecked": one["note"]} if unchecked else {"note": one["note"]}
    row: Row = {}
    for key, limit in zip(("loss", "grad_norm"), limits, strict=True):
        pairs = [(a[key], b[key]) for a, b in zip(found["lines"], expected["lines"], strict=True)]
        row[f"{key} differs by"] = max(abs(a - b) / abs(b) for a, b in pairs)
        if not row[f"{key} differs by"] <= limit:
            row["note"] = f"{key}: {[a for a, _ in pairs]}, TRL in fp32 has {[b for _, b in pairs]}"
    return row


# TRL


def work(job: dict[str, Any]) -> Row:
    train_trl(Job(**job))
    return {}


def train_trl(job: Job) -> None:
    """A run of TRL's trainer that writes the lines of metrics.jsonl that our command writes."""
    import datasets
    import peft
    import transformers
    import trl

    cuda, out = job.device == "cuda", Path(job.out).resolve()
    out.mkdir(parents=True)
    attention = {"flash": "flash_attention_2", "flex": "flex_attention"}
    low = not (job.exact or "fp32" in job.options)
    how: dict[str, Any] = {"dtype": "bfloat16" if low else "float32"}
    how["attn_implementation"] = next((attention[name] for name in job.options if name in attention), "sdpa")
    given: dict[str, Any] = {"model": job.folder}
    if job.kind == "nf4":
        given["quantization_config"] = transformers.BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=torch.bfloat16 if cuda and not job.exact else torch.float32,
        )  # fmt: skip
    if job.kind != "full" and not job.parity:
        given["peft_config"] = peft.LoraConfig(
            r=RANK, lora_alpha=ALPHA, lora_dropout=0.0, target_modules="all-linear", task_type="CAUSAL_LM"
        )
    elif job.kind != "full":
        quantized = {name: given.pop(name) for name in ("quantization_config",) if name in given}
        placed = {"device_map": {"": 0}} if cuda else {}
        base = transformers.AutoModelForCausalLM.from_pretrained(job.folder, **how, **quantized, **placed)
        given["model"] = peft.PeftModel.from_pretrained(base, our_adapters(job, out / "start"), is_trainable=True)
    rows = our_rows(job) if job.parity else None
    settings = trl.SFTConfig(
        str(out / "trl"), max_length=job.tokens, packing=True, packing_strategy="bfd", per_device_train_batch_size=1,
        gradient_accumulation_steps=job.accumulation, max_steps=job.steps, learning_rate=job.lr,
        lr_scheduler_type="constant", warmup_steps=0, weight_decay=0.0, max_grad_norm=1.0, optim="adamw_torch_fused",
        # autocast is for what is in fp32: between weights and inputs in bf16 it would only cost the host time
        bf16=cuda and not job.exact and (not low or job.kind != "full"), use_liger_kernel="liger" in job.options,
        gradient_checkpointing=False, use_cpu=not cuda, report_to=[], save_strategy="no", disable_tqdm=True,
        logging_steps=1 if job.parity else 10, model_init_kwargs=how if isinstance(given["model"], str) else None,
        dataset_kwargs={"skip_prepare_dataset": True} if job.parity else None,
        train_sampling_strategy="sequential" if job.parity else "random",
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
            if not job.parity:
                self.write(state.global_step)

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **named: Any) -> None:
            if job.parity and "grad_norm" in logs:
                self.write(state.global_step, grad_norm=float(logs["grad_norm"]))

        def write(self, step: int, **more: float) -> None:
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
