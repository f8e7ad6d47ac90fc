"""A training step of a whole model: tokens per second and peak memory, beside transformers and its patches.

Every provider runs in a fresh process, so that neither patches nor memory leak, and loads checkpoints that
transformers wrote, so that all have the same weights. Before it is timed it has to agree with transformers in fp32
on a shallow model of the same widths and the same sequence length, whose attention is drawn sharp, so that a mask,
window, softcap or bias that is left out shows: logits, loss and gradient norm. One that does not is not timed, unless
the case says what it leaves out (`inexact`); if it is ours, the exit code is 1. The steps are AdamW (fused, states in
the weights' dtype) on random tokens, the same for all, and the first of them must agree at full depth as well.

    python -m benchmarks.train_step --case llama-3.2-1b --out benchmarks/results/train_step.json
    python -m benchmarks.train_step --case gemma-2-2b --providers ligermodels,ligermodels:none,hf+eager,hf+liger
    python -m benchmarks.train_step --render benchmarks/results/train_step.json --markdown
    python -m benchmarks.train_step --case gemma-2-2b --dry   # a tiny model on the CPU: does everything run?

A provider is `ligermodels`, or `hf` with any of: +eager, +sdpa, +flex (its attention; sdpa where none is named, and
for +liger and +compile the case's own), +loop, +grouped_mm (its experts), +liger, +compile (its patch). Behind a
colon its checkpointing, where that is not the run's: `ligermodels:none`; `ligermodels:mlp-9` computes the gated units
of the first 9 blocks again.
"""

import argparse
import gc
import importlib
import importlib.util
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from benchmarks.common import PACKAGES, environment, table, write_json
from benchmarks.pictures import for_transformers, with_pictures
from benchmarks.train_cases import CASES, Case, changed

GIB = 2**30
CHECKPOINTING = ("none", "mlp", "block")
"""What is computed again in backward: nothing, the gated units or experts (ours alone can), whole blocks."""
ATTENTION = {"eager": "eager", "sdpa": "sdpa", "flex": "flex_attention"}
EXPERTS = {"loop": "eager", "grouped_mm": "grouped_mm"}
"""The word in a provider's name -> what transformers calls it."""
PATCHES = ("liger", "compile")

PARITY_LOGITS = 64
"""Parity is checked on one sequence of the run's length, its logits on the last positions: beyond any window."""
PARITY_DRAWS = 4
"""Sequences that say what transformers in bf16 errs by: rms of its error in loss and gradient norm."""
SHARP_SCORES = 8.0
"""Standard deviation of the attention scores of the parity model. Those of a model just initialised are below 1:
all keys weigh the same, and neither a window nor a softcap of 50 would be missed."""
LOGITS_FACTOR, PEERS_LOGITS_FACTOR = 1.25, 4.0
"""Error of the logits over that of transformers in bf16. Ours rounds at places of its own, no more often;
a peer may be less exact and only has to be the same model."""
RELATIVE = 2**-8
"""For the loss and the gradient norm, beyond three times what transformers in bf16 errs by: one bf16 rounding. A mean
over tokens and a norm over all gradients average roundings out, so right models agree more closely; a wrong
rotation, mask or residual moves the norm by percents."""


@dataclass(frozen=True)
class Provider:
    """What is behind a provider's name."""

    ours: bool
    checkpointing: str
    attention: str = ""
    experts: str = ""
    patches: tuple[str, ...] = ()

    @classmethod
    def of(cls, name: str, case: Case, checkpointing: str) -> Self:
        """Raises ValueError for a name that means nothing."""
        kind, _, own = name.partition(":")
        base, *words = kind.split("+")
        known = {"ligermodels": (), "hf": (*ATTENTION, *EXPERTS, *PATCHES)}.get(base)
        can = CHECKPOINTING if base == "ligermodels" else ("none", "block")
        what, _, blocks = (own or checkpointing).partition("-")
        known_blocks = not blocks or (blocks.isdecimal() and base == "ligermodels" and what != "none")
        if known is None or not set(words) <= set(known) or what not in can or not known_blocks:
            raise ValueError(
                f"unknown provider {name!r}; known: ligermodels with :none, :mlp or :block behind it (:mlp-9: the "
                "first 9 blocks only), hf with :none or :block and any of "
                f"+{', +'.join((*ATTENTION, *EXPERTS, *PATCHES))} before that"
            )
        patches = tuple(word for word in words if word in PATCHES)
        attention = next((word for word in words if word in ATTENTION), case.attention if patches else "sdpa")
        experts = next((word for word in words if word in EXPERTS), "")
        return cls(base == "ligermodels", own or checkpointing, attention, experts, patches)


def prepare(case: Case, options: argparse.Namespace, folder: Path) -> None:
    """Writes the checkpoints that all load, and parity.pt: what transformers computes with the shallow one."""
    device, config = _device(options), _config(case, options)
    torch.manual_seed(options.seed)
    _initialised(config, case, device).save_pretrained(folder / "model")
    shallow = config if options.dry else changed(config, case.shallow)
    model = _initialised(shallow, case, device)
    _sharpen(model)
    model.save_pretrained(folder / "parity")
    draws = _batches(case, options, PARITY_DRAWS, 1, seed=options.seed + 1)
    in_bf16 = [probe(model.train(), for_transformers(model, inputs)) for inputs in draws]
    exact = [probe(model.float(), for_transformers(model, inputs)) for inputs in draws]
    pairs = list(zip(in_bf16, exact, strict=True))
    errors = {"logits": statistics.mean(_typical_error(a["logits"], b["logits"]) for a, b in pairs)}
    for name in ("loss", "gradient_norm"):
        errors[name] = statistics.mean((a[name] - b[name]) ** 2 for a, b in pairs) ** 0.5
    torch.save({"inputs": draws[0], "exact": exact[0], "errors_in_bf16": errors}, folder / "parity.pt")


def _config(case: Case, options: argparse.Namespace) -> dict[str, Any]:
    return case.dry() if options.dry else case.config


def _auto(case: Case) -> Any:
    import transformers

    return transformers.AutoModelForImageTextToText if case.picture else transformers.AutoModelForCausalLM


def _initialised(config: Mapping[str, Any], case: Case, device: str) -> nn.Module:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    with torch.device(device):
        return _auto(case).from_config(
            CONFIG_MAPPING[config["model_type"]].from_dict(config),
            dtype=torch.bfloat16,
            attn_implementation=ATTENTION[case.attention],
        )


@torch.no_grad()
def _sharpen(model: nn.Module) -> None:
    """Draws the rows of q and k anew, so that scores have a deviation of SHARP_SCORES, and all biases."""
    for name, parameter in model.named_parameters():
        rows = len(parameter)
        if ".qkv_proj." in name:
            heads, kv_heads = model.config.num_attention_heads, model.config.num_key_value_heads
            rows = rows * (heads + kv_heads) // (heads + 2 * kv_heads)
        if name.endswith(".bias"):
            parameter.normal_()
        elif any(f".{part}_proj." in name for part in ("q", "k", "qkv")):
            # Of normed inputs, q and k then have a deviation of SHARP_SCORES ** 0.5, and q k / sqrt(D) its square.
            parameter[:rows].normal_(0, (SHARP_SCORES / parameter.shape[1]) ** 0.5)


def probe(model: nn.Module, inputs: Mapping[str, Tensor]) -> dict[str, Any]:
    """Logits of the last positions, loss and gradient norm of one forward and backward on one sequence."""
    output = model(**inputs)
    output["loss"].backward()
    norm = _gradient_norm(model)
    model.zero_grad(set_to_none=True)
    logits = output.logits
    if logits is None:  # a fused loss does not make them
        with torch.no_grad():
            logits = model(**{name: x for name, x in inputs.items() if name != "labels"}).logits
    logits = logits[:, -PARITY_LOGITS:].detach().float()
    return {"logits": logits, "loss": output["loss"].item(), "gradient_norm": norm}


def disagreement(found: Mapping[str, Any], expected: Mapping[str, Any], logits_factor: float) -> list[str]:
    """What `found` has wrong beside the contents of parity.pt, in words; empty if it agrees."""
    exact, errors, reasons = expected["exact"], expected["errors_in_bf16"], []
    error, allowed = _typical_error(found["logits"], exact["logits"]), logits_factor * errors["logits"]
    if not error <= allowed:
        reasons.append(f"logits err by {error:.3e} against fp32, allowed {allowed:.3e}")
    for name in ("loss", "gradient_norm"):
        allowed = RELATIVE * abs(exact[name]) + 3 * errors[name]
        if not abs(found[name] - exact[name]) <= allowed:
            reasons.append(f"{name} is {found[name]:.6g}, in fp32 {exact[name]:.6g}, allowed {allowed:.2g} off")
    return reasons


def _typical_error(logits: Tensor, exact: Tensor) -> float:
    """The rms over the vocabulary, of which the median over positions [1, S, V]: a token that bf16 sends to another
    expert than fp32 does is far off, whoever computes it. NaN if any is."""
    return (logits.double() - exact.double()).square().mean(-1).sqrt().median().item()


def _gradient_norm(model: nn.Module) -> float:
    norms = [p.grad.float().norm() for p in model.parameters() if p.grad is not None]
    return torch.stack(norms).norm().item()


def _batches(case: Case, options: argparse.Namespace, steps: int, batch: int, *, seed: int) -> list[dict[str, Tensor]]:
    """Model inputs for each step: random ids [B, S] and labels, and the case's picture in front.

    The same on every device. Neither padding nor, in the text, ids of pictures: transformers does not train the row of
    the one, and takes the others for pictures.
    """
    config, generator = _config(case, options), torch.Generator().manual_seed(seed)
    text = config.get("text_config", config)
    ids = torch.randint(text["vocab_size"], (steps, batch, options.seq), generator=generator)
    names = {name for name in config if name.endswith("token_id")} - {"bos_token_id", "eos_token_id"} | {"pad_token_id"}
    special = [text[name] for name in names if text.get(name) is not None]
    ids[torch.isin(ids, torch.tensor(special, dtype=torch.int64))] = text["bos_token_id"]
    ids = ids.to(_device(options))
    if case.picture is None:
        return [{"input_ids": row, "labels": row} for row in ids]
    height, width = (56, 56) if options.dry else case.picture
    return [with_pictures(config, row, height, width, seed=seed + i) for i, row in enumerate(ids)]


def build(provider: Provider, case: Case, folder: Path, device: str) -> nn.Module:
    """The provider's model with the checkpoint's weights in bf16, ready to train."""
    if provider.ours:
        import ligermodels

        model: nn.Module = ligermodels.load(folder, dtype=torch.bfloat16, device=device, progress=False)
    else:
        model = _theirs(provider, case, folder, device)
    model.train()
    if provider.checkpointing != "none":
        options: dict[str, Any] = {"use_reentrant": False}
        if provider.ours:
            what, _, blocks = provider.checkpointing.partition("-")
            options = {"recompute": what, **({"blocks": int(blocks)} if blocks else {})}
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
    if "compile" in provider.patches:
        model.compile(dynamic=False)
    return model


def _theirs(provider: Provider, case: Case, folder: Path, device: str) -> nn.Module:
    options: dict[str, Any] = {"attn_implementation": ATTENTION[provider.attention]}
    if provider.experts:
        options["experts_implementation"] = EXPERTS[provider.experts]
    if device == "cuda" and importlib.util.find_spec("accelerate"):
        options["device_map"] = device  # straight to the card
    model = _auto(case).from_pretrained(folder, dtype=torch.bfloat16, **options).to(device)
    model.config.use_cache = False
    if "liger" in provider.patches:
        patches = importlib.import_module("liger_kernel.transformers")
        getattr(patches, f"apply_liger_kernel_to_{model.config.model_type}")(model=model)
    return model


def measure(name: str, case: Case, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """One provider's row, computed in this process: parity, then the times of the steps."""
    device = _device(options)
    started = time.perf_counter()
    provider = Provider.of(name, case, options.checkpointing)
    model = build(provider, case, folder / "parity", device)
    expected = torch.load(folder / "parity.pt", map_location=device)
    found = probe(model, expected["inputs"] if provider.ours else for_transformers(model, expected["inputs"]))
    factor = LOGITS_FACTOR if provider.ours else PEERS_LOGITS_FACTOR
    row: dict[str, Any] = {
        "provider": name,
        "checkpointing": provider.checkpointing,
        "parity": {
            "logits_error": _typical_error(found["logits"], expected["exact"]["logits"]),
            **{key: found[key] for key in ("loss", "gradient_norm")},
            "in_fp32": {key: expected["exact"][key] for key in ("loss", "gradient_norm")},
            "errors_of_transformers_in_bf16": expected["errors_in_bf16"],
            "red": disagreement(found, expected, factor),
        },
    }
    if name.partition(":")[0] in case.inexact:
        row["inexact"] = case.inexact[name.partition(":")[0]]
    elif row["parity"]["red"]:
        return row
    del model, found, expected
    gc.collect()
    torch.compiler.reset()
    if device == "cuda":
        torch.cuda.empty_cache()

    model = build(provider, case, folder / "model", device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    total = options.warmup + options.steps
    batches = _batches(case, options, total, options.batch, seed=options.seed)
    if not provider.ours:
        batches = [for_transformers(model, inputs) for inputs in batches]
    marks, losses = [], []
    for step in range(total):
        if step == options.warmup:
            if device == "cuda":
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
            row["setup_s"] = time.perf_counter() - started
            marks.append(_now(device))
        loss = model(**batches[step])["loss"]
        loss.backward()
        if step == 0:
            row["first_gradient_norm"] = _gradient_norm(model)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.detach())
        if step >= options.warmup:
            marks.append(_now(device))
    milliseconds = _elapsed(marks)
    row["losses"] = torch.stack(losses).tolist()
    row["step_ms"] = milliseconds
    row["tokens_per_s"] = options.batch * options.seq / statistics.median(milliseconds) * 1e3
    if device == "cuda":
        row["peak_gib"] = torch.cuda.max_memory_allocated() / GIB
        row["reserved_gib"] = torch.cuda.max_memory_reserved() / GIB
    if not provider.ours and "num_local_experts" in case.config:
        row["experts"] = model.config._experts_implementation
    return row


def _now(device: str):
    """A mark on the device's own clock: steps stay queued behind one another, as in training."""
    if device != "cuda":
        return time.perf_counter()
    mark = torch.cuda.Event(enable_timing=True)
    mark.record()
    return mark


def _elapsed(marks: Sequence[Any]) -> list[float]:
    """Milliseconds between neighbouring marks."""
    if isinstance(marks[0], float):
        return [(end - start) * 1e3 for start, end in itertools.pairwise(marks)]
    torch.cuda.synchronize()
    return [start.elapsed_time(end) for start, end in itertools.pairwise(marks)]


def _device(options: argparse.Namespace) -> str:
    return "cpu" if options.dry else "cuda"


def run(options: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Every provider in a process of its own. One that fails gets a note in place of figures."""
    rows = []
    error = _child(options, folder, "prepare")
    if error:
        raise SystemExit(f"transformers could not write the checkpoint: {error}")
    for provider in options.providers.split(","):
        started = time.perf_counter()
        error = _child(options, folder, provider)
        result = folder / "row.json"
        rows.append(json.loads(result.read_text()) if not error else {"provider": provider, "note": error})
        result.unlink(missing_ok=True)
        print(f"{provider}: {time.perf_counter() - started:.0f} s", file=sys.stderr, flush=True)
    _compare_first_steps(rows)
    return rows


def _arguments(options: argparse.Namespace, folder: Path, what: str) -> list[str]:
    """What `main` is called with in the process of one provider, or of "prepare"."""
    arguments = ["--child", what, "--folder", str(folder)]
    for name in SETTINGS:
        arguments += [f"--{name}", str(getattr(options, name))]
    return [*arguments, "--dry"] if options.dry else arguments


def _child(options: argparse.Namespace, folder: Path, what: str) -> str:
    """Runs this file once more, for one provider or to prepare. Returns why that failed, or ""."""
    command = [sys.executable, "-m", "benchmarks.train_step", *_arguments(options, folder, what)]
    try:
        done = subprocess.run(
            command,
            cwd=Path(__file__).parent.parent,
            stderr=subprocess.PIPE,
            text=True,
            timeout=options.timeout,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"did not finish in {options.timeout:g} s"
    if done.returncode == 0:
        return ""
    print(done.stderr, file=sys.stderr)
    lines = done.stderr.strip().splitlines()
    return (lines[-1] if lines else f"exit code {done.returncode}")[:160]


def _compare_first_steps(rows: Sequence[dict[str, Any]]) -> None:
    """All start from the same weights on the same batch: step 1 must agree with transformers' too."""
    exact = [row for row in rows if "losses" in row and "inexact" not in row]
    theirs = [row for row in exact if not row["provider"].startswith("ligermodels")]
    reference = next((row for row in theirs if row["provider"] == "hf"), theirs[0] if theirs else None)
    for row in exact:
        if reference is None:
            continue
        for name in ("loss", "gradient_norm"):
            found, expected = (r["losses"][0] if name == "loss" else r["first_gradient_norm"] for r in (row, reference))
            # Both are bf16 and err by one rounding each.
            if not abs(found - expected) <= 2 * RELATIVE * abs(expected):
                row["parity"]["red"].append(
                    f"{name} of step 1 is {found:.6g}, {reference['provider']} has {expected:.6g}"
                )


def render(record: Mapping[str, Any], *, markdown: bool = False) -> str:
    """The table of a result as text."""
    env, rows, settings = record["environment"], record["rows"], record["settings"]
    versions = ", ".join(f"{package} {env[package]}" for package in PACKAGES if env[package])
    timed = [row for row in rows if "tokens_per_s" in row and ("inexact" in row or not row["parity"]["red"])]
    ours = next((row for row in timed if row["provider"].startswith("ligermodels")), None)
    columns = ["provider", "checkpointing", "tokens/s", "ours is", "peak GiB", "step 1 loss", "note"]
    lines: list[list[Any]] = []
    for row in rows:
        start = [row["provider"], row.get("checkpointing", settings["checkpointing"])]
        notes = [row.get("note", ""), *(row["parity"]["red"] if "parity" in row else [])]
        if "inexact" in row:
            notes.insert(0, f"inexact: {row['inexact']}")
        note = "; ".join(filter(None, [*notes, f"experts {row['experts']}" if "experts" in row else ""]))
        if row not in timed:
            lines.append([*start, None, None, None, None, note])
            continue
        over = f"{ours['tokens_per_s'] / row['tokens_per_s']:.2f}x" if ours else None
        loss = f"{row['losses'][0]:.4f}"
        lines.append([*start, round(row["tokens_per_s"]), over, row.get("peak_gib"), loss, note])
    return "\n\n".join(
        [
            f"{env['device']}, bfloat16, {versions}; commit {env['commit']}, {env['date']}",
            f"`{env['command']}`" if markdown else env["command"],
            f"### {settings['case']}, B {settings['batch']} x S {settings['seq']}, AdamW",
            table(columns, lines, markdown=markdown),
        ]
    )


SETTINGS = ("case", "batch", "seq", "checkpointing", "steps", "warmup", "seed")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--case", choices=sorted(CASES), default="llama-3.2-1b")
    parser.add_argument("--batch", type=int, help="sequences a step; default the case's, as of the next three")
    parser.add_argument("--seq", type=int, help="tokens a sequence")
    parser.add_argument("--checkpointing", choices=CHECKPOINTING, help="of providers that do not name their own")
    parser.add_argument("--steps", type=int, help="timed steps; the median counts")
    parser.add_argument("--providers", help="comma-separated; default the case's")
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds that a provider may take in all")
    parser.add_argument("--scratch", help="where checkpoints are written for the run, e.g. /dev/shm; default the temp")
    parser.add_argument("--out", help="JSON file for the result")
    parser.add_argument("--markdown", action="store_true", help="print Markdown tables")
    parser.add_argument("--render", metavar="FILE.json", help="print an earlier result instead of measuring")
    parser.add_argument("--dry", action="store_true", help="the case at a tiny size on the CPU; the times mean nothing")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.render:
        print(render(json.loads(Path(options.render).read_text()), markdown=options.markdown))
        return 0
    case = CASES[options.case]
    if options.dry and not options.child:
        options.batch, options.seq, options.steps = 2, 64, 2
    for name in ("batch", "seq", "checkpointing", "steps"):
        if getattr(options, name) is None:
            setattr(options, name, getattr(case, name))
    if options.child == "prepare":
        prepare(case, options, options.folder)
        return 0
    if options.child:
        write_json(options.folder / "row.json", measure(options.child, case, options, options.folder))
        return 0
    if not options.providers:
        installed = [name for name in case.providers if "liger" not in name.split("+") or not options.dry]
        options.providers = ",".join(installed)
    try:
        for name in options.providers.split(","):
            Provider.of(name, case, options.checkpointing)
    except ValueError as error:
        parser.error(str(error))
    if not options.dry and not torch.cuda.is_available():
        parser.error("needs a CUDA device; --dry runs a tiny model on the CPU")
    with tempfile.TemporaryDirectory(dir=options.scratch, prefix="train_step-") as folder:
        rows = run(options, Path(folder))
    record = {
        "benchmark": "train_step",
        "environment": environment(_device(options)),
        "settings": {name: getattr(options, name) for name in SETTINGS},
        "rows": rows,
    }
    if options.out:
        write_json(options.out, record)
    print(render(record, markdown=options.markdown))
    ours = [row for row in rows if row["provider"].startswith("ligermodels")]
    return 1 if any("note" in row or row["parity"]["red"] for row in ours) else 0


if __name__ == "__main__":
    sys.exit(main())
