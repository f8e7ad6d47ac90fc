"""The texts: a card for each family, docs/models/README.md, docs/results.md, and the blocks of README.md."""

import re
import textwrap
from collections.abc import Callable, Iterable, Sequence

from benchmarks.cards import tables
from benchmarks.cards.families import RELEASED, Family, bounds, families, gpu_run, properties, text_of
from benchmarks.cards.records import Measurement, Record
from benchmarks.cards.tables import Comparison, baseline_name, link, model_name, number, shape, speed_and_gib, times
from benchmarks.harness import PACKAGES

NOTICE = "<!-- Written by `python -m benchmarks.cards` from benchmarks/results. Do not edit. -->"
WIDTH = 120


# What README and the charts show: (kind, model, case, trained, recompute, device)
HEADLINES = (
    ("train", "llama-3.2-1b", "8 x 2048", "full", "none", "H200"),
    ("train", "llama-3.1-8b", "4 x 4096", "full", "block", "H200"),
    ("train", "gemma-2-2b", "4 x 4096", "full", "block", "H200"),
    ("train", "qwen3.5-9b", "4 x 4096", "full", "block", "H200"),
    ("train", "gemma-4-e4b", "4 x 4096", "full", "block", "H200"),
    ("train", "gemma-4-31b", "4 x 4096", "lora", "block", "H200"),
    ("train", "qwen3-30b-a3b-6-layers", "4 x 4096", "lora", "none", "H200"),
    ("train", "gpt-oss-20b", "4 x 4096", "lora", "block", "H200"),
    ("train", "llama-3.1-8b", "4 x 4096", "lora", "none", "H200"),
    ("train", "llama-3.1-8b", "1 x 2048", "nf4", "none", "H200"),
    ("command", "llama-3.2-1b", "16,384 tokens a forward", "full", "none", "H200"),
    ("gpus", "llama-3.1-8b", "2 x 4096, fp32 weights", "full", "none", "2 x H200"),
    ("decode", "llama-3.2-1b", "1x128+256", "bf16", "", "H200"),
    ("rollout", "llama-3.2-1b", "64x8x128+256", "full", "", "H200"),
)
IN_CHARTS = ("train", "command")
FITS = (
    ("train", "llama-3.1-8b", "1 x 2048", "nf4", "block", "H200"),
    ("train", "qwen3.5-4b", "1 x 8192", "lora", "block", "H200"),
    ("train", "gpt-oss-20b", "1 x 8192", "mxfp4", "block", "H200"),
    ("train", "llama-3.1-8b", "4 x 4096", "lora", "block", "H200"),
    ("train", "qwen3-30b-a3b", "4 x 4096", "nf4", "block", "H200"),
    ("train", "qwen3.5-9b", "4 x 4096", "lora", "block", "H100"),
    ("train", "llama-3.1-70b", "1 x 4096", "nf4", "block", "H200"),
    ("train", "llama-3.1-8b", "4 x 4096", "full", "block", "H200"),
)
"""What README says of the memory that training takes."""


def headlines(found: Sequence[Comparison], keys: Iterable[tuple[str, ...]] = HEADLINES) -> list[Comparison]:
    """Raises ValueError where no record has one of them."""
    by_case = {comparison.ours.measured: comparison for comparison in found}
    if missing := [key for key in keys if key not in by_case]:
        raise ValueError(f"no record has {missing}; change HEADLINES or FITS in benchmarks/cards/pages.py")
    return [by_case[key] for key in keys]


# Tables


def table(titles: Sequence[str], rows: Iterable[Sequence[str]], right: int = 1) -> str:
    """Markdown; columns from the `right`-th on are aligned to the right, unless their title ends in a space."""
    sides = ["---:" if i >= right and not title.endswith(" ") else "---" for i, title in enumerate(titles)]
    lines = [[title.strip() for title in titles], sides, *rows]
    return "\n".join(re.sub(r"\|  (?=\|)", "| ", f"| {' | '.join(line)} |") for line in lines)


def percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.0f} %"


def what(row: Measurement) -> str:
    """The case of a measurement in words."""
    name = model_name(row.model)
    if row.kind == "command":
        capture = " --capture" * ("capture" in row.baseline.split("+"))
        return f"`ligermodels train sft{capture}`, {name}, {tables.TRAINED[row.trained]}, packed, {row.case}"
    if row.kind == "decode":
        return f"{name}, greedy decoding, {shape(row)}" + (f", {row.trained}" if row.trained != "bf16" else "")
    if row.kind == "rollout":
        return f"{name}, a GRPO step, {shape(row)}"
    trained = tables.TRAINED[row.trained].replace(" of rank 16", "")
    first, _, rest = tables.recomputed(row).partition(";")
    policy = "" if row.recompute == "none" else f", {first} recomputed{rest and ','}{rest}"
    return f"{name}, {trained}, {shape(row)}{policy}"


def value(row: Measurement | None) -> str:
    """The figure that decides, and the memory."""
    if row is None:
        return ""
    if tables.decides(row) == "tokens/s":
        return speed_and_gib(row)
    figure = tables.decides(row)
    unit = {"s": " s", "step s": " s", "first token ms": " ms"}.get(figure, "")
    peak = row.figures.get("peak GiB")
    return f"{number(row.figures[figure], figure)}{unit}" + (f" / {tables.gib(peak)}" if peak else "")


def headline_table(found: Sequence[Comparison], up: str) -> str:
    rows = []
    for one in headlines(found):
        peer = f"{value(one.peer)} ({baseline_name(one.peer)})" if one.peer else "not measured"
        ratio = times(one.speedup) + (f", {times(one.memory)}" if one.memory else "")
        how = f", {one.ours.device.replace(' x ', ' ')}s" if one.ours.kind == "gpus" else ""
        how += ", as one CUDA graph" * (one.ours.kind == "train" and "captured" in one.ours.baseline.split("+"))
        rows.append([what(one.ours) + how, f"**{value(one.ours)}**", peer, ratio, percent(tables.mfu(one.ours)),
                     link(one.ours.record, up, "record")])  # fmt: skip
    return table(["case", "ligermodels", "strongest peer", "speed, memory", "MFU", " "], rows)


def fits_table(found: Sequence[Comparison], up: str) -> str:
    ours = [[row for row in one.all if tables.ran(row)] for one in headlines(found, FITS)]
    leanest = [min(rows, key=lambda row: row.figures["peak GiB"]) for rows in ours]
    rows = []
    for row in sorted(leanest, key=lambda row: row.figures["peak GiB"]):
        how = baseline_name(row).partition(", ")[2]
        rows.append([tables.gib(row.figures["peak GiB"]),
                     f"{what(row)}{how and ', '}{how} ({link(row.record, up, 'record')})"])  # fmt: skip
    return table(["peak GiB", "what trains, on one GPU "], rows, right=0)


# Cards


def card(family: Family, found: Sequence[Comparison], rows: Sequence[Measurement]) -> str:
    up = "../../"
    ours = [one for one in found if one.ours.family == family.model_type]
    parts = [
        f"# `ligermodels.{family.arch.__name__}`", NOTICE, f"{family.title}.",
        wrap(f"model_type of config.json: `{family.model_type}`; code: [{family.file}]({up}{family.file}). "
             + _relatives(family)),
        "## Sizes", _sizes(family),
        "## Parity", _parity(family, up),
    ]  # fmt: skip
    used: dict[str, Record] = {}
    for title, kinds in (
        ("Training", ("train",)), ("`ligermodels train sft`", ("command",)), ("The longest sequence", ("longest",)),
        ("Several GPUs", ("gpus",)), ("Generation", ("decode", "drafted")), ("The first token", ("first token",)),
        ("GRPO", ("rollout",)), ("Loading", ("load",)),
    ):  # fmt: skip
        if chosen := [one for one in ours if one.ours.kind in kinds]:
            parts += [f"## {title}", _measured(chosen, rows, used)]
    if used:
        parts += ["## Records", _records(used.values(), up)]
    return "\n\n".join([*parts, "## What was not checked", _unchecked(family, ours, rows)]) + "\n"


def _relatives(family: Family) -> str:
    if (text := text_of(family)) is not None:
        return f"The text alone: [{text}]({text}.md), where speed was measured."
    return ""


def _sizes(family: Family) -> str:
    if not family.sizes:
        return "No configuration of a released size is in the tests."
    rows = []
    for size in family.sizes:
        text = size.config.get("text_config", size.config)
        fields = [text.get(name) for name in ("num_hidden_layers", "hidden_size", "max_position_embeddings")]
        experts = next((text[name] for name in ("num_experts", "num_local_experts", "n_routed_experts")
                        if text.get(name)), None)  # fmt: skip
        chosen = text.get("num_experts_per_tok") or text.get("top_k_experts")
        rows.append([size.name, f"{size.parameters:,}", *(f"{x:,}" if x else "" for x in fields),
                     f"{chosen} of {experts}" if experts else ""])  # fmt: skip
    titles = ["configuration", "parameters", "blocks", "hidden size", "positions", "experts a token"]
    used = [i for i in range(len(titles)) if any(row[i] for row in rows)]
    return table([titles[i] for i in used], [[row[i] for i in used] for row in rows])


def _parity(family: Family, up: str) -> str:
    held = ", ".join(f"{name} within {bound:.0e}".replace("e-0", "e-") for name, bound in bounds().items())
    tests = ", ".join(f"[{path.rpartition('/')[2]}]({up}{path})" for path in family.tests)
    run, env = gpu_run(), gpu_run()["environment"]
    failed = [test for test in run["failures"] if family.is_named(test)]
    missed = [test for test in run["not reached"] if family.is_named(test)]
    text = (
        f"On the CPU {tests} holds it beside transformers in fp32: {held} of their norm, saved tensors equal to the "
        f"bit, and [all other properties](README.md#parity) of a family, on tiny checkpoints that transformers "
        f"writes: {', '.join(family.options)}."
    )
    gpu = (
        f"On a GPU ([gpu.json]({up}benchmarks/results/gpu.json): {env['device']}, torch {env['torch']}, triton "
        f"{env['triton']}, transformers {env['transformers']}, commit {env['commit']}, {env['date'][:10]}), "
        + (f"{_count(failed)} of this family failed" if failed or missed else "all tests of this family passed")
        + (f", and {_count(missed)} {'was' if len(missed) == 1 else 'were'} not reached." if missed else ".")
    )
    shown = [wrap(f"- {kind}: `{name}`{which}", "  ") for kind, tests in (("failed", failed), ("not reached", missed))
             for name, which in _grouped(tests)]  # fmt: skip
    if failed and run.get("note"):
        shown.append(wrap(f"- Note of the record: {run['note']}", "  "))
    return "\n\n".join([wrap(text), wrap(gpu), *(["\n".join(shown)] if shown else [])])


def _count(tests: Sequence[str]) -> str:
    return f"{len(tests) or 'no'} test{'s' * (len(tests) != 1)}"


def _grouped(tests: Sequence[str]) -> list[tuple[str, str]]:
    """(a test's file and name, the parameters of all of its cases)."""
    cases: dict[str, list[str]] = {}
    for test in tests:
        name, _, parameters = test.rpartition("/")[2].partition("[")
        cases.setdefault(name, []).append(parameters.removesuffix("]"))
    return [(name, f": {', '.join(values)}" if any(values) else "") for name, values in cases.items()]


def _measured(chosen: Sequence[Comparison], rows: Sequence[Measurement], used: dict[str, Record]) -> str:
    """A table for each model, shape and kind of training."""
    groups: dict[str, list[list[str]]] = {}
    newest = {row.key: row for row in rows if row.figures}
    for one in chosen:
        here = {row.key for row in one.all}
        others = [row for key, row in newest.items() if row.measured == one.ours.measured and (
            key not in here or (row.is_ours and row.record.date > one.ours.record.date))]  # fmt: skip
        for row in sorted((*one.all, *others), key=lambda row: not row.is_ours):
            used[row.record.name] = row.record
            generation = row.kind in ("decode", "drafted", "first token", "load")  # it is the format of the weights
            trained = None if generation else tables.TRAINED[row.trained]
            title = ", ".join(filter(None, (model_name(row.model), trained)))
            groups.setdefault(title, []).append(_cells(row, one))
    titles = {
        "train": ["shape", "recomputed", "baseline", "tokens/s", "peak GiB", "ours is", "MFU"],
        "command": ["forward", "baseline", "tokens/s", "peak GiB", "ours is"],
        "longest": ["memory", "recomputed", "baseline", "tokens", "tokens/s", "peak GiB", "ours is"],
        "gpus": ["shape a GPU", "recomputed", "baseline", "tokens/s a GPU", "peak GiB", "ours is"],
        "decode": ["case", "weights", "baseline", "tokens/s", "of the limit", "ours is"],
        "drafted": ["case", "weights", "baseline", "tokens/s", "of the limit", "ours is"],
        "first token": ["prompt", "baseline", "ms", "ours is"],
        "rollout": ["case", "baseline", "s a step", "of it the rollout", "peak GiB", "ours is"],
        "load": ["files", "baseline", "s", "GB/s", "ours is"],
    }[chosen[0].ours.kind]  # fmt: skip
    right = titles.index("baseline") + 1
    return "\n\n".join(
        f"{title}:\n\n" + table([*titles, "GPU ", "commit ", "date ", "record "], cells, right)
        for title, cells in groups.items()
    )


def _cells(row: Measurement, one: Comparison) -> list[str]:
    def figure(name: str) -> str:
        return number(row.figures[name], name) if name in row.figures else ""

    ratio = ""
    if not row.is_ours and row.figures and row.record is one.ours.record:
        ratio = times(Comparison(one.ours, row, ()).speedup)
    name, speed, peak = baseline_name(row), figure("tokens/s"), figure("peak GiB")
    if not row.figures:
        speed = f"did not run: {short(row.note)}"
    cells = {
        "train": [shape(row), tables.recomputed(row), name, speed, peak, ratio,
                  percent(tables.mfu(row) if row.figures else None)],
        "command": [shape(row), name, speed, peak, ratio],
        "longest": [shape(row), tables.recomputed(row), name, figure("length"), speed, peak, ratio],
        "gpus": [shape(row), tables.recomputed(row), name, speed, peak, ratio],
        "decode": [shape(row), row.trained, name, speed, percent(row.figures.get("of limit")), ratio],
        "drafted": [shape(row).replace("1x128+257", "1 row, prompt 128"), row.trained, name, speed, "", ratio],
        "first token": [shape(row), name, figure("first token ms"), ratio],
        "rollout": [shape(row), name, figure("step s"), figure("rollout s"), peak, ratio],
        "load": [shape(row), name, figure("s"), figure("GB/s"), ratio],
    }[row.kind]  # fmt: skip
    return [*cells, row.device, row.commit, row.date[:10], f"[{row.record.name}](#{anchor(row.record)})"]


def anchor(record: Record) -> str:
    return record.name.replace(".", "")


def short(note: str) -> str:
    return re.split(r"[.;(]", note)[0].strip() or "no note"


def _records(used: Iterable[Record], up: str) -> str:
    parts = []
    for record in sorted(used, key=lambda record: record.name):
        env = record.environment
        known = ", ".join(f"{package} {env[package]}" for package in PACKAGES if env.get(package))
        device = env["device"] + (f", {env['driver and power limit']}" if env.get("driver and power limit") else "")
        lines = [f"### {record.name}", wrap(f"{link(record, up, record.name + '.json')}: {device}; {known}; commit "
                 f"{env['commit']}, {record.date[:10]}.")]  # fmt: skip
        tables_of_rows = (rows for rows in record.contents.values() if isinstance(rows, list))
        if versions := {row["versions"] for rows in tables_of_rows for row in rows if "versions" in row}:
            lines.append(f"The rows of unsloth ran with {'; '.join(sorted(versions))}.")
        if env.get("command"):
            lines.append(f"    {env['command']}")
        if record.contents.get("note"):
            lines.append(wrap(f"Note of the record: {record.contents['note']}."))
        parts.append("\n\n".join(lines))
    return "\n\n".join(parts)


def _unchecked(family: Family, ours: Sequence[Comparison], rows: Sequence[Measurement]) -> str:
    points = []
    if (released := RELEASED.get(family.model_type)) is None:
        points.append("Weights of a released model: the tests draw random weights.")
    else:
        points.append(f"Weights of released models but for {released}: the tests draw random weights.")
    measured = {(one.ours.kind, one.ours.trained) for one in ours}
    missing = [name for key, name in {
        ("train", "full"): "training of all weights", ("train", "lora"): "LoRA", ("train", "nf4"): "QLoRA",
        ("decode", "bf16"): "decoding",
    }.items() if key not in measured]  # fmt: skip
    if not ours:
        points.append("Speed and memory: no record has a model of this family.")
    elif missing:
        points.append(f"Speed and memory of {' and of '.join(missing)}.")
    for kind, name in (("train", "training"), ("decode", "decoding")):
        cases = [one for one in ours if one.ours.kind == kind]
        if alone := sum(one.peer is None for one in cases):
            points.append(f"A peer beside {alone} of the {len(cases)} cases of {name} above.")
    if ours:
        gpus = sorted({one.ours.device.rpartition(" ")[2] for one in ours})
        points.append(f"Speed on GPUs other than {' and '.join(gpus)}.")
        if not any(one.ours.kind == "gpus" for one in ours):
            points.append("Speed on several GPUs.")
        if family.arch.extra_inputs:
            points.append("Speed with images.")
    env = gpu_run()["environment"]
    points.append(f"Kernels on GPUs other than {env['device'].removeprefix('NVIDIA ')}.")
    return "\n".join(wrap(f"- {point}", "  ") for point in points)


def index(found: Sequence[Comparison]) -> str:
    """docs/models/README.md."""
    env, run = gpu_run()["environment"], gpu_run()
    rows = []
    for family in families():
        ours = [one for one in found if one.ours.family == family.model_type]
        names = [size.name for size in family.sizes]
        shown = ", ".join(dict.fromkeys([names[0], names[-1]])) if names else ""
        failed = sum(family.is_named(test) for test in run["failures"])
        rows.append([f"[{family.arch.__name__}]({family.model_type}.md)", family.model_type, str(len(names)) if names
                     else "none", " to ".join(shown.split(", ")) if shown else "",
                     f"{failed} failed" if failed else "none failed",
                     str(len(ours)) if ours else "none"])  # fmt: skip
    titles = ["card", "model_type ", "configurations", "smallest and largest ", "tests on a GPU ", "cases measured"]
    parts = [
        "# Models", NOTICE,
        wrap("A card says of a family: its sizes, what its tests hold, speed and memory beside peers, what was not "
             "checked. `python -m benchmarks.cards` writes all of them from the tests and the records."),
        table(titles, rows),
        "## Parity",
        wrap("Every family has these tests, beside transformers' model of the same weights: "
             + ", ".join(properties()) + "."),
        wrap(f"The last complete run on a GPU: {env['device']}, torch {env['torch']}, triton {env['triton']}, commit "
             f"{env['commit']}, {env['date'][:10]}: {run['passed']:,} passed, {run['failed']} failed, {run['skipped']} "
             f"skipped, {len(run['not reached'])} not reached. {run.get('note', '')}"),
    ]  # fmt: skip
    return "\n\n".join(parts) + "\n"


# docs/results.md

INTRODUCTION = """
Speed and memory beside peers, each in one run. [benchmarks.md](benchmarks.md) has the commands and says how it is
measured. A row has our fastest setting and the strongest peer of a record; the [cards](models/README.md) have all
settings and peers, versions, commits and dates, and the records in [benchmarks/results](../benchmarks/results) the
rest. All sides of a row recompute the same activations and have the same batch, weights and dtype (bf16).
""".strip()
NOTES = {
    "train": """
MFU: the FLOPs that a step needs (recomputation does not count) over those of the GPU's peak in bf16, {peak:.0f}
TFLOP/s dense, of dense models whose layers attend to all tokens. The peers use torch's fused AdamW, ours its own where
a card says so: in the backward it needs no memory for gradients. Gemma 2 runs on eager attention in transformers, since
sdpa has no softcap. LoRA has rank 16 on all projections; PEFT runs as TRL runs it. Steps of QLoRA over 1 x 2048 tokens
wait for the host, whose speed changes, unless they are captured as a CUDA graph.
""",
    "command": """
`ligermodels train sft` beside TRL's SFTTrainer with packing, on rows of 200 tokens on average. TRL's model attended by
torch's sdpa, which computes a packed row with a mask; flex_attention and FlashAttention were not measured. Other
benchmarks ran on the host's other GPUs, which slowed both sides where they are not captured: small models most.
""",
    "longest": """
The longest sequence of one row that trains in the given memory. A peak far below it is that of a search that ended at
the longest length that it tried.
""",
    "gpus": """
Tokens/s and peak GiB of each GPU. "Not resharded": FSDP2 keeps the blocks whole from the forward to the backward. "fp32
weights" are computed with in bf16, and have torch's AdamW. All other weights are in bf16, with our AdamW, in the
backward where there are no masters. [distributed.md](distributed.md#measured) has communication times and says
more.
""",
    "decode": """
Greedy, tokens/s of all rows together. Ours runs as a CUDA graph, as `generate` and `chat` do. "of the limit": of the
tokens/s at which the memory's bandwidth lets weights and cache be read. [generation.md](generation.md) covers drafting.
""",
    "load": "From files onto the GPU: from the page cache of a disk or a tmpfs (warm), or from the disk itself (cold).",
    "rollout": "A step of GRPO, rollout and update, beside TRL's GRPOTrainer with transformers' `generate`.",
}  # fmt: skip
SECTIONS = (
    ("Training", "train", lambda row: row.trained.startswith("full")),
    ("LoRA and QLoRA", "train", lambda row: not row.trained.startswith("full")),
    ("The command", "command", None), ("The longest sequence", "longest", None), ("Several GPUs", "gpus", None),
    ("Generation", "decode", None), ("GRPO", "rollout", None), ("Loading", "load", None),
)  # fmt: skip


def results(found: Sequence[Comparison], records: Sequence[Record]) -> str:
    up, noted = "../", set[str]()
    parts = ["# Results", NOTICE, INTRODUCTION]
    for title, kind, chosen in SECTIONS:
        ours = [one for one in found if one.ours.kind == kind and (chosen is None or chosen(one.ours))]
        parts.append(f"## {title}")
        if kind not in noted:
            peak = tables.PEAK_TFLOPS["H200"]
            parts.append(wrap(NOTES[kind].strip().replace("\n", " ").format(peak=peak)))
            noted.add(kind)
        parts.append(_result_table(kind, ours, up))
    for record in records:
        if record.name.startswith("kernels-"):
            parts += [f"## {_kernel_title(record)}", _kernels(record, up)]
    return "\n\n".join(parts) + "\n"


def _result_table(kind: str, ours: Sequence[Comparison], up: str) -> str:
    extra: dict[str, tuple[str, Callable[[Comparison], str]]] = {
        "train": ("MFU", lambda one: percent(tables.mfu(one.ours))),
        "decode": ("of the limit", lambda one: percent(one.ours.figures.get("of limit"))),
        "load": ("GB/s", lambda one: number(one.ours.figures["GB/s"])),
        "longest": ("tokens/s", lambda one: number(one.ours.figures["tokens/s"])),
    }
    title, cell = extra.get(kind, ("", None))
    rows = []
    for one in ours:
        row = one.ours
        if kind in ("load", "longest"):
            policy = f", {tables.TRAINED[row.trained]}, blocks recomputed" if kind == "longest" else ""
            case = f"{model_name(row.model)}{policy}, {shape(row)}"
        else:
            case = what(row)
        peer = f"{value(one.peer)} ({baseline_name(one.peer)})" if one.peer else ""
        ratio = times(one.speedup) + (f", {times(one.memory)}" if one.memory else "")
        rows.append([case, row.device, f"**{value(row)}**", peer, ratio, *([cell(one)] if cell else []),
                     link(row.record, up, "record")])  # fmt: skip
    units = {"gpus": "tokens/s a GPU / GiB", "decode": "tokens/s", "rollout": "a step / GiB", "load": "time",
             "longest": "tokens / GiB"}  # fmt: skip
    unit = units.get(kind, "tokens/s / GiB")
    titles = ["case", "GPU ", f"ligermodels, {unit}", "strongest peer", "ours is", *([title] if title else []), " "]
    return table(titles, rows)


_KERNEL_TITLES = {
    "kernels-attention-512": "Attention with heads of 512",
    "kernels-attention-sinks": "Attention with sinks",
    "kernels-gated-delta-rule": "The gated delta rule",
    "kernels-moe-experts": "Experts",
    "kernels-moe-experts-biased": "Experts with biases",
}


def _kernel_title(record: Record) -> str:
    return _KERNEL_TITLES.get(record.name.rpartition("-")[0], record.name)


def _kernels(record: Record, up: str) -> str:
    parts = []
    for rows in (rows for rows in record.contents.values() if isinstance(rows, list) and rows
                 and isinstance(rows[0], dict) and "forward ms" in rows[0]):  # fmt: skip
        columns = ["forward ms", "fwd + bwd ms", "peak MiB"]
        cells = [[row["shape"], row["baseline"], *(number(row[name]) if row.get(name) is not None else ""
                  for name in columns)] for row in rows]  # fmt: skip
        for cell, row in zip(cells, rows, strict=True):
            if row.get("forward ms") is None:
                cell[2] = f"did not run: {short(row['note'])}"
        parts.append(table(["shape", "baseline", *columns], cells, right=2))
    device, date = record.environment["device"].removeprefix("NVIDIA "), record.date[:10]
    note = (
        f" {record.contents['note'][:1].upper()}{record.contents['note'][1:]}." if record.contents.get("note") else ""
    )
    return "\n\n".join([wrap(f"Device time on one {device}, {date} ({link(record, up, 'record')}).{note}"), *parts])


# README.md


def blocks(found: Sequence[Comparison], url: str) -> dict[str, str]:
    """What README.md has between `<!-- cards: NAME -->` and `<!-- end -->`. url: of the repository's files."""
    return {"results": headline_table(found, url), "memory": fits_table(found, url)}


def fill(text: str, contents: dict[str, str]) -> str:
    """`text` with new contents of its blocks. Raises ValueError where it has other blocks."""
    named = re.findall(r"<!-- cards: (\w+) -->", text)
    if sorted(named) != sorted(contents):
        raise ValueError(f"README.md has the blocks {named}, and not {[*contents]}")
    return re.sub(r"(<!-- cards: (\w+) -->\n).*?(<!-- end -->)",
                  lambda found: f"{found[1]}{contents[found[2]]}\n{found[3]}", text, flags=re.DOTALL)  # fmt: skip


def wrap(text: str, indent: str = "") -> str:
    return textwrap.fill(" ".join(text.split()), WIDTH, subsequent_indent=indent, break_long_words=False,
                         break_on_hyphens=False)  # fmt: skip
