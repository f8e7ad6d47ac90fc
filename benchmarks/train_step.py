"""A training step of a whole Llama: tokens per second and peak memory, beside transformers and its patches.

Every provider runs in a fresh process, so that neither patches nor memory leak, and loads one checkpoint that
transformers wrote, so that all have the same weights. Before it is timed it has to agree with transformers in
fp32 on a small batch: logits, loss and gradient norm. One that does not is not timed; if it is ours, the exit
code is 1. The steps are AdamW (fused, states in the weights' dtype) on random tokens, the same for all.

    python -m benchmarks.train_step --case llama-3.2-1b --out benchmarks/results/train_step.json
    python -m benchmarks.train_step --case llama-3.1-8b --batch 4 --seq 4096 --checkpointing block
    python -m benchmarks.train_step --render benchmarks/results/train_step.json --markdown
    python -m benchmarks.train_step --dry                     # a tiny model on the CPU: does everything run?
"""

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.common import PACKAGES, environment, table, write_json

GIB = 2**30

_LLAMA_3 = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "attention_bias": False,
    "mlp_bias": False,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
}
_LLAMA_3_ROPE = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama-3.2-1b": {
        **_LLAMA_3,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "tie_word_embeddings": True,
        "rope_scaling": {**_LLAMA_3_ROPE, "factor": 32.0},
    },
    "llama-3.1-8b": {
        **_LLAMA_3,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "tie_word_embeddings": False,
        "rope_scaling": {**_LLAMA_3_ROPE, "factor": 8.0},
    },
    "tiny": {
        **_LLAMA_3,
        "hidden_size": 64,
        "intermediate_size": 160,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 512,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "tie_word_embeddings": True,
        "rope_scaling": {**_LLAMA_3_ROPE, "factor": 32.0},
    },
}
PROVIDERS = ("ligermodels", "hf", "hf+liger", "hf+compile")

PARITY_TOKENS, PARITY_LOGITS = 512, 64
"""Parity is checked on one sequence of the first length, its logits on the last positions."""
LOGITS_FACTOR, PEERS_LOGITS_FACTOR = 1.25, 4.0
"""Rms error of the logits over that of transformers in bf16. Ours rounds at places of its own, no more often;
a peer may be less exact and only has to be the same model."""
RELATIVE = 2**-8
"""For the loss and the gradient norm, beyond what transformers in bf16 errs by: one bf16 rounding. A mean
over tokens and a norm over all gradients average roundings out, so right models agree more closely; a wrong
rotation, mask or residual moves the norm by percents."""


def prepare(case: str, folder: Path, device: str, seed: int) -> None:
    """Writes the checkpoint that all load, and parity.pt: what transformers computes with it."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    torch.manual_seed(seed)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(LlamaConfig.from_dict(CONFIGS[case]), dtype=torch.bfloat16)
    model.save_pretrained(folder)
    ids = _tokens(case, 1, 1, PARITY_TOKENS, device, seed=seed + 1)[0]
    in_bf16 = probe(model.train(), ids)
    exact = probe(model.float(), ids)
    errors = {name: abs(in_bf16[name] - exact[name]) for name in ("loss", "gradient_norm")}
    errors["logits"] = _rms(in_bf16["logits"] - exact["logits"])
    torch.save({"ids": ids, "exact": exact, "errors_in_bf16": errors}, folder / "parity.pt")


def probe(model: nn.Module, ids: Tensor) -> dict[str, Any]:
    """Logits of the last positions, loss and gradient norm of one forward and backward on ids [1, S]."""
    output = model(input_ids=ids, labels=ids)
    output["loss"].backward()
    norm = _gradient_norm(model)
    model.zero_grad(set_to_none=True)
    logits = output.logits
    if logits is None:  # a fused loss does not make them
        with torch.no_grad():
            logits = model(input_ids=ids).logits
    logits = logits[:, -PARITY_LOGITS:].detach().float()
    return {"logits": logits, "loss": output["loss"].item(), "gradient_norm": norm}


def disagreement(found: Mapping[str, Any], expected: Mapping[str, Any], logits_factor: float) -> list[str]:
    """What `found` has wrong beside the contents of parity.pt, in words; empty if it agrees."""
    exact, errors, reasons = expected["exact"], expected["errors_in_bf16"], []
    error, allowed = _rms(found["logits"] - exact["logits"]), logits_factor * errors["logits"]
    if not error <= allowed:
        reasons.append(f"logits err by {error:.3e} (rms) against fp32, allowed {allowed:.3e}")
    for name in ("loss", "gradient_norm"):
        allowed = RELATIVE * abs(exact[name]) + errors[name]
        if not abs(found[name] - exact[name]) <= allowed:
            reasons.append(f"{name} is {found[name]:.6g}, in fp32 {exact[name]:.6g}, allowed {allowed:.2g} off")
    return reasons


def _rms(x: Tensor) -> float:
    return x.double().square().mean().sqrt().item()


def _gradient_norm(model: nn.Module) -> float:
    norms = [p.grad.float().norm() for p in model.parameters() if p.grad is not None]
    return torch.stack(norms).norm().item()


def _tokens(case: str, steps: int, batch: int, length: int, device: str, *, seed: int) -> Tensor:
    """Random ids [steps, B, S], the same on every device."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(CONFIGS[case]["vocab_size"], (steps, batch, length), generator=generator).to(device)


def build(provider: str, folder: Path, device: str, checkpointing: bool) -> nn.Module:
    """The provider's model with the checkpoint's weights in bf16, ready to train."""
    if provider == "ligermodels":
        import ligermodels

        model = ligermodels.Llama.from_hub(folder, dtype=torch.bfloat16, device=device, progress=False)
    else:
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, attn_implementation="sdpa")
        model.config.use_cache = False
        model.to(device)
        if provider == "hf+liger":
            from liger_kernel.transformers import apply_liger_kernel_to_llama

            apply_liger_kernel_to_llama(model=model)
    model.train()
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if provider == "hf+compile":
        model.compile(dynamic=False)
    return model


def measure(provider: str, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """One provider's row, computed in this process: parity, then the times of the steps."""
    device = _device(options)
    started = time.perf_counter()
    model = build(provider, folder, device, options.checkpointing == "block")
    expected = torch.load(folder / "parity.pt", map_location=device)
    found = probe(model, expected["ids"])
    factor = LOGITS_FACTOR if provider == "ligermodels" else PEERS_LOGITS_FACTOR
    row: dict[str, Any] = {
        "provider": provider,
        "parity": {
            "logits_rms_error": _rms(found["logits"] - expected["exact"]["logits"]),
            **{name: found[name] for name in ("loss", "gradient_norm")},
            "in_fp32": {name: expected["exact"][name] for name in ("loss", "gradient_norm")},
            "errors_of_transformers_in_bf16": expected["errors_in_bf16"],
            "red": disagreement(found, expected, factor),
        },
    }
    if row["parity"]["red"]:
        return row
    del found, expected

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    total = options.warmup + options.steps
    ids = _tokens(options.case, total, options.batch, options.seq, device, seed=options.seed)
    marks, losses = [], []
    for step in range(total):
        if step == options.warmup:
            if device == "cuda":
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
            row["setup_s"] = time.perf_counter() - started
            marks.append(_now(device))
        loss = model(input_ids=ids[step], labels=ids[step])["loss"]
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
    for name in ("case", "batch", "seq", "steps", "warmup", "seed", "checkpointing"):
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
    reference = next((row for row in rows if row["provider"] == "hf" and "losses" in row), None)
    for row in rows:
        if reference is None or "losses" not in row:
            continue
        for name in ("loss", "gradient_norm"):
            found, expected = (r["losses"][0] if name == "loss" else r["first_gradient_norm"] for r in (row, reference))
            if not abs(found - expected) <= RELATIVE * abs(expected):
                row["parity"]["red"].append(f"{name} of step 1 is {found:.6g}, transformers has {expected:.6g}")


def render(record: Mapping[str, Any], *, markdown: bool = False) -> str:
    """The table of a result as text."""
    env, rows = record["environment"], record["rows"]
    versions = ", ".join(f"{package} {env[package]}" for package in PACKAGES if env[package])
    timed = {row["provider"]: row for row in rows if "tokens_per_s" in row and not row["parity"]["red"]}
    columns = ["provider", "tokens/s", "over hf", "over hf+liger", "peak GiB", "step 1 loss", "note"]
    lines = []
    for row in rows:
        note = row.get("note") or "; ".join(row["parity"]["red"])
        shown = timed.get(row["provider"])
        if shown is None:
            lines.append([row["provider"], None, None, None, None, None, note])
            continue
        over = [
            shown["tokens_per_s"] / timed[other]["tokens_per_s"] if other in timed else None
            for other in ("hf", "hf+liger")
        ]
        start = [row["provider"], round(shown["tokens_per_s"]), *over]
        lines.append([*start, shown.get("peak_gib"), f"{shown['losses'][0]:.4f}", note])
    settings = record["settings"]
    return "\n\n".join(
        [
            f"{env['device']}, bfloat16, {versions}; commit {env['commit']}, {env['date']}",
            f"`{env['command']}`" if markdown else env["command"],
            f"### {settings['case']}, B {settings['batch']} x S {settings['seq']}, "
            f"checkpointing {settings['checkpointing']}, AdamW",
            table(columns, lines, markdown=markdown),
        ]
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--case", choices=sorted(CONFIGS), default="llama-3.2-1b")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--seq", type=int, default=2048)
    parser.add_argument("--checkpointing", choices=("none", "block"), default="none")
    parser.add_argument("--providers", default=",".join(PROVIDERS[:3]), help=f"of {','.join(PROVIDERS)}")
    parser.add_argument("--steps", type=int, default=10, help="timed steps; the median counts")
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds that a provider may take in all")
    parser.add_argument("--scratch", help="where the checkpoint is written for the run; default the temp folder")
    parser.add_argument("--out", help="JSON file for the result")
    parser.add_argument("--markdown", action="store_true", help="print Markdown tables")
    parser.add_argument("--render", metavar="FILE.json", help="print an earlier result instead of measuring")
    parser.add_argument("--dry", action="store_true", help="the tiny case on the CPU; the times mean nothing")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.render:
        print(render(json.loads(Path(options.render).read_text()), markdown=options.markdown))
        return 0
    if options.child == "prepare":
        prepare(options.case, options.folder, _device(options), options.seed)
        return 0
    if options.child:
        write_json(options.folder / "row.json", measure(options.child, options, options.folder))
        return 0
    if unknown := sorted(set(options.providers.split(",")) - set(PROVIDERS)):
        parser.error(f"unknown: {', '.join(unknown)}; known: {', '.join(PROVIDERS)}")
    if options.dry:
        options.case, options.batch, options.seq, options.steps = "tiny", 2, 64, 2
        if options.providers == parser.get_default("providers"):
            options.providers = "ligermodels,hf"
    elif not torch.cuda.is_available():
        parser.error("needs a CUDA device; --dry runs a tiny model on the CPU")
    with tempfile.TemporaryDirectory(dir=options.scratch, prefix="train_step-") as folder:
        rows = run(options, Path(folder))
    names = ("case", "batch", "seq", "checkpointing", "steps", "warmup", "seed")
    record = {
        "benchmark": "train_step",
        "environment": environment(_device(options)),
        "settings": {name: getattr(options, name) for name in names},
        "rows": rows,
    }
    if options.out:
        write_json(options.out, record)
    print(render(record, markdown=options.markdown))
    ours = [row for row in rows if row["provider"] == "ligermodels"]
    return 1 if any("note" in row or row["parity"]["red"] for row in ours) else 0


if __name__ == "__main__":
    sys.exit(main())
