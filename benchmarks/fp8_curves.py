"""Loss curves of FP8 beside bf16: the same weights and the same batches, with several seeds, on real text.

    python -m benchmarks.fp8_curves --out curves.json --picture curves.png
    python -m benchmarks.fp8_curves --steps 2000 --hidden 2048 --layers 16 --recipes bf16,rowwise
    python -m benchmarks.fp8_curves --dry

The text is the Python standard library of the interpreter that runs this: all .py files, in the order of their paths,
without site-packages. Its tokens are those of a byte-level BPE that is trained on it; the record has the bytes, their
SHA-256 and the number of tokens. The last 2 % of the tokens are held out. The model is a Llama, drawn from the seed,
which also decides the order of the batches; weights in bf16 with fp32 masters, AdamW, a cosine schedule.

curves: the training loss of every run, as means of --every steps. ends: the held-out loss of every run at the end, in
the run's own precision and, of the same weights, in bf16. difference: from bf16 with the same seed, in the mean;
spread: the standard deviation of bf16 over seeds. "leaves the spread": the mean difference is larger than the spread.
"""

import argparse
import hashlib
import math
import multiprocessing
import re
import statistics
import sys
import sysconfig
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import ligermodels
from benchmarks import harness
from benchmarks.harness import Record
from ligermodels.layers.fp8 import RECIPES
from ligermodels.training import AdamW

HELD_OUT = 0.02
BF16 = "bf16"


def add_options(parser: argparse.ArgumentParser) -> None:
    option = parser.add_argument
    option("--recipes", type=harness.names(BF16, *RECIPES), default="all")
    option("--seeds", type=harness.numbers, default="0,1,2")
    option("--steps", type=int, default=1000)
    option("--rows", type=int, default=8, help="of a step")
    option("--length", type=int, default=1024, help="tokens of a row")
    option("--hidden", type=int, default=1024)
    option("--layers", type=int, default=12)
    option("--vocab", type=int, default=8192)
    option("--lr", type=float, default=1e-3)
    option("--every", type=int, default=10, help="steps of a point of a curve")
    option("--processes", type=int, default=1, help="seeds that run at a time")
    option("--max-bytes", type=int, help="of the text")
    option("--picture", metavar="FILE", help="PNG or SVG; with {} in its name one for light pages and one for dark")


def measure(options: argparse.Namespace, record: Record) -> None:
    if options.dry:
        small = dict(steps=6, rows=2, length=64, hidden=64, layers=2, vocab=384, every=2, max_bytes=200_000)
        vars(options).update(small, seeds=options.seeds[:2])
    if BF16 not in options.recipes:
        raise ValueError(f"--recipes: {BF16} is what the others are compared with; add it")
    tokens, record["text"] = text_tokens(options.vocab, options.max_bytes)
    held = int(len(tokens) * HELD_OUT)
    trained, held_out = tokens[:-held], tokens[-held:]
    record["model"] = vars(options) | {"tokens of a run": options.steps * options.rows * options.length}
    record["curves"], record["ends"] = [], []
    with ProcessPoolExecutor(options.processes, multiprocessing.get_context("spawn")) as pool:
        work = partial(train_all, trained=trained, held_out=held_out, options=options)
        for curves, ends in pool.map(work, options.seeds):
            record["curves"] += curves
            record["ends"] += ends
    record["differences"] = differences(record["ends"])
    if options.picture:
        draw(record, options.picture)


def text_tokens(vocab: int, limit: int | None) -> tuple[Tensor, dict[str, Any]]:
    """The tokens of the text, and what it is."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    root = Path(sysconfig.get_path("stdlib"))
    files = sorted(path for path in root.rglob("*.py") if "site-packages" not in path.parts)
    text = b"\n".join(path.read_bytes() for path in files)[:limit].decode(errors="replace")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        text.splitlines(keepends=True),
        trainers.BpeTrainer(vocab_size=vocab, initial_alphabet=alphabet, show_progress=False),
    )
    parts = [text[i : i + 2**20] for i in range(0, len(text), 2**20)]
    ids = [i for part in tokenizer.encode_batch(parts) for i in part.ids]
    what = {
        "source": f"the .py files of Python {sys.version.split()[0]}'s standard library",
        "files": len(files),
        "bytes": len(text.encode()),
        "sha256": hashlib.sha256(text.encode()).hexdigest(),
        "tokens": len(ids),
    }
    return torch.tensor(ids), what


def train_all(
    seed: int, trained: Tensor, held_out: Tensor, options: argparse.Namespace
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The curves and the ends of a seed's runs."""
    curves, ends = [], []
    for name in options.recipes:
        curve, end = train(name, seed, trained, held_out, options)
        curves.append({"recipe": name, "seed": seed, "losses": curve})
        ends.append({"recipe": name, "seed": seed, **end})
        harness.announce(ends[-1])
        harness.free(options.device)
    return curves, ends


def train(
    name: str, seed: int, tokens: Tensor, held_out: Tensor, options: argparse.Namespace
) -> tuple[list[float], dict[str, Any]]:  # fmt: skip
    """(means of the training loss, the result) of a run."""
    config = dict(
        model_type="llama", vocab_size=options.vocab, hidden_size=options.hidden, num_hidden_layers=options.layers,
        intermediate_size=-(-options.hidden * 8 // 3 // 64) * 64, num_attention_heads=max(1, options.hidden // 64),
        num_key_value_heads=max(1, options.hidden // 128), max_position_embeddings=options.length,
        tie_word_embeddings=True,
    )  # fmt: skip
    how: dict[str, Any] = dict(dtype=torch.bfloat16, device=options.device, seed=seed)
    model = ligermodels.Llama.from_config(config, fp8=None if name == BF16 else name, **how).train()
    optimizer = AdamW(model.parameters(), lr=options.lr, weight_decay=0.1, betas=(0.9, 0.95), master_weights=True,
                      state_dtype=torch.float32, max_grad_norm=1.0)  # fmt: skip
    order, warmup = torch.Generator().manual_seed(seed), max(1, options.steps // 20)
    losses: list[Tensor] = []
    start = time.perf_counter()
    for step in range(options.steps):
        done = (step - warmup) / max(1, options.steps - warmup)
        factor = (step + 1) / warmup if step < warmup else 0.1 + 0.45 * (1 + math.cos(math.pi * done))
        for group in optimizer.param_groups:
            group["lr"] = options.lr * factor
        first = torch.randint(len(tokens) - options.length, (options.rows,), generator=order)
        rows = tokens[first[:, None] + torch.arange(options.length)].to(options.device)
        loss = model(rows, labels=rows).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    harness.synchronize(options.device)
    seconds = time.perf_counter() - start
    points = torch.stack(losses).float().split(options.every)
    end = {"held-out loss": evaluate(model, held_out, options), "seconds": seconds}
    if name != BF16:
        model.use_fp8(None)
    end["held-out loss in bf16"] = evaluate(model, held_out, options)
    return [point.mean().item() for point in points], end


@torch.no_grad()
def evaluate(model: Any, tokens: Tensor, options: argparse.Namespace) -> float:
    """The mean loss over the held-out tokens, at most 64 batches of them."""
    model.eval()
    rows = tokens[: len(tokens) // options.length * options.length].view(-1, options.length)
    batches = rows.split(options.rows)[:64]
    losses = [model(batch.to(options.device), labels=batch.to(options.device)).loss.item() for batch in batches]
    model.train()
    return statistics.fmean(losses)


def differences(ends: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of each recipe: its held-out loss, in the mean over seeds, and the difference from bf16."""
    names = list(dict.fromkeys(end["recipe"] for end in ends))
    found = {name: [end["held-out loss"] for end in ends if end["recipe"] == name] for name in names}
    spread = statistics.stdev(found[BF16]) if len(found[BF16]) > 1 else 0.0
    rows = []
    for name in names:
        off = [a - b for a, b in zip(found[name], found[BF16], strict=True)]
        rows.append(
            {"recipe": name, "held-out loss": statistics.fmean(found[name]), "difference": statistics.fmean(off),
             "largest difference": max(off, key=abs), "spread of bf16": spread,
             "leaves the spread": "yes" if abs(statistics.fmean(off)) > spread and name != BF16 else "no"}
        )  # fmt: skip
    return rows


def draw(record: Record, picture: str) -> None:
    """Training losses, and below them the differences from bf16 with the same seed.

    picture: a file; with {} in its name one for light pages and one for dark.
    """
    import matplotlib

    from benchmarks.cards.charts import THEMES

    matplotlib.use("Agg")
    for name, theme in THEMES.items():
        if name == "light" or "{}" in picture:
            colors = dict.fromkeys(("text.color", "axes.labelcolor", "xtick.color", "ytick.color"), theme.text)
            fixed = {"svg.hashsalt": "ligermodels", "legend.frameon": False, "axes.edgecolor": theme.muted}
            with matplotlib.rc_context({**colors, **fixed}):
                _draw(record, Path(picture.format(name)), transparent="{}" in picture)


def _draw(record: Record, picture: Path, *, transparent: bool) -> None:
    from matplotlib import pyplot

    options = record["model"]
    figure, (above, below) = pyplot.subplots(2, 1, sharex=True, figsize=(8, 7), height_ratios=(2, 1))
    exact = {curve["seed"]: curve["losses"] for curve in record["curves"] if curve["recipe"] == BF16}
    colors = {name: f"C{i}" for i, name in enumerate(options["recipes"])}
    for curve in record["curves"]:
        name, losses = curve["recipe"], curve["losses"]
        steps = [(i + 1) * options["every"] for i in range(len(losses))]
        label = name if curve["seed"] == options["seeds"][0] else None
        above.plot(steps, losses, color=colors[name], linewidth=0.8, label=label)
        if name != BF16:
            off = [a - b for a, b in zip(losses, exact[curve["seed"]], strict=True)]
            below.plot(steps, off, color=colors[name], linewidth=0.8)
    spread = record["differences"][0]["spread of bf16"]
    below.axhspan(-spread, spread, color="0.5", alpha=0.2, linewidth=0, label="spread of bf16 over seeds, at the end")
    above.set_ylabel("training loss")
    below.set(xlabel="step", ylabel="less bf16's")
    above.legend()
    below.legend(fontsize="small")
    figure.tight_layout()
    svg = picture.suffix == ".svg"
    figure.savefig(picture, dpi=150, transparent=transparent, metadata={"Date": None} if svg else None)
    pyplot.close(figure)
    if svg:
        picture.write_text(re.sub(r"[ \t]+$", "", picture.read_text("utf-8"), flags=re.MULTILINE), "utf-8")


def main(arguments: Sequence[str] | None = None) -> int:
    return harness.main(__doc__, arguments, add_options, measure)


if __name__ == "__main__":
    sys.exit(main())
