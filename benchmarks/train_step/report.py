"""Results as tables, and a profile as an image."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import PACKAGES, table
from benchmarks.train_step.memory import GIB

LEAST_SHARE = 0.004
"""Of the step or the peak: lines below it are one, "the rest"."""


def render(record: Mapping[str, Any], *, markdown: bool = False) -> str:
    """The tables of a result as text."""
    env, settings = record["environment"], record["settings"]
    left_out = [{"provider": name, "note": f"left out: {why}"} for name, why in record.get("left_out", {}).items()]
    rows = [*record["rows"], *left_out]
    versions = ", ".join(f"{package} {env[package]}" for package in PACKAGES if env[package])
    if settings.get("longest"):
        what = f"{settings['case']}, the longest sequence that trains in {settings['longest']:g} GiB, AdamW"
        body = _longest(rows, settings, markdown)
    else:
        what = f"{settings['case']}, B {settings['batch']} x S {settings['seq']}, AdamW"
        body = _steps(rows, settings, markdown)
    profiles = [text for row in rows if "profile" in row for text in _profile(row, settings, markdown)]
    return "\n\n".join(
        [
            f"{env['device']}, bfloat16, {versions}; commit {env['commit']}, {env['date']}",
            f"`{env['command']}`" if markdown else env["command"],
            f"### {what}",
            body,
            *profiles,
        ]
    )


def _steps(rows: Sequence[Mapping[str, Any]], settings: Mapping[str, Any], markdown: bool) -> str:
    timed = [row for row in rows if "tokens_per_s" in row and ("inexact" in row or not row["parity"]["red"])]
    ours = next((row for row in timed if row["provider"].startswith("ligermodels")), None)
    columns = ["provider", "checkpointing", "tokens/s", "ours is", "peak GiB", "step 1 loss", "note"]
    lines: list[list[Any]] = []
    for row in rows:
        start = [row["provider"], _checkpointing(row, settings)]
        notes = [row.get("note", ""), *(row["parity"]["red"] if "parity" in row else [])]
        if "inexact" in row:
            notes.insert(0, f"inexact: {row['inexact']}")
        if "experts" in row:
            notes.append(f"experts {row['experts']}")
        if row.get("pinned_gib", 0) >= 0.1:
            notes.append(f"{row['pinned_gib']:.1f} GiB of the host")
        note = "; ".join(filter(None, notes))
        if row not in timed:
            lines.append([*start, None, None, None, None, note])
            continue
        over = f"{ours['tokens_per_s'] / row['tokens_per_s']:.2f}x" if ours else None
        loss = f"{row['losses'][0]:.4f}"
        lines.append([*start, round(row["tokens_per_s"]), over, row.get("peak_gib"), loss, note])
    return table(columns, lines, markdown=markdown)


def _longest(rows: Sequence[Mapping[str, Any]], settings: Mapping[str, Any], markdown: bool) -> str:
    ours = next((row for row in rows if row["provider"].startswith("ligermodels") and "length" in row), None)
    lines: list[list[Any]] = []
    for row in rows:
        start = [row["provider"], _checkpointing(row, settings)]
        if "length" not in row:
            lines.append([*start, None, None, None, None, row.get("note", "")])
            continue
        failed = min((t["length"] for t in row["trials"] if t["peak_gib"] is None), default=None)
        over = f"{ours['length'] / row['length']:.2f}x" if ours else None
        notes = [row.get("note", ""), f"{failed:,} did not fit" if failed else "nothing longer was tried"]
        note = "; ".join(filter(None, notes))
        lines.append([*start, row["length"], over, round(row["tokens_per_s"]), row["peak_gib"], note])
    columns = ["provider", "checkpointing", "longest", "ours is", "tokens/s there", "peak GiB", "note"]
    return table(columns, lines, markdown=markdown)


def _checkpointing(row: Mapping[str, Any], settings: Mapping[str, Any]) -> str:
    return row.get("checkpointing") or row["provider"].partition(":")[2] or settings["checkpointing"]


def _profile(row: Mapping[str, Any], settings: Mapping[str, Any], markdown: bool) -> list[str]:
    """Two tables: time by op beside what it must cost, and the peak's memory by who holds it."""
    profile = row["profile"]
    title = f"### {_full_name(row)}"
    note = f" ({profile['note']})" if profile["note"] else ""
    head = (
        f"{title}: a step of {profile['step_ms']:.1f} ms{note}; kernels run in {profile['busy_ms']:.1f} ms of it, the "
        f"host queues it in {profile['host_ms']:.1f} ms with {profile['launches']:,} launches and "
        f"{profile['waits']:,} waits"
    )
    time_lines = [
        [*start, ms, f"{ms / profile['step_ms']:.1%}", floor, f"{floor / ms:.0%}" if floor and ms else None]
        for *start, ms, floor in op_lines(profile)
    ]
    tokens = settings["batch"] * settings["seq"]
    lines = [
        [what, detail, count, size / 2**20, f"{size / profile['peak_bytes']:.1%}", round(size / tokens)]
        for what, detail, count, size in held_lines(profile)
    ]
    lines.append(["peak", "", None, profile["peak_bytes"] / 2**20, "100.0%", round(profile["peak_bytes"] / tokens)])
    tail = f"peak {profile['peak_bytes'] / GIB:.2f} GiB"
    if abs(profile.get("allocators_peak_bytes", profile["peak_bytes"]) - profile["peak_bytes"]) > 2**20:
        tail += f" (the allocator says {profile['allocators_peak_bytes'] / GIB:.2f}: not all was seen)"
    if "kept_bytes_per_token_and_block" in profile:
        tail += (
            f"; kept per token and block: {profile['kept_bytes_per_token_and_block']:,.0f} bytes, of which the leanest "
            f"backward needs {profile['least_kept_bytes_per_token_and_block']:,.0f}"
        )
    return [
        head,
        table(["op", "calls", "kernels", "ms", "share", "floor ms", "floor / time"], time_lines, markdown=markdown),
        tail,
        table(["held for", "where", "blocks", "MiB", "share", "bytes/token"], lines, markdown=markdown),
    ]


def _full_name(row: Mapping[str, Any]) -> str:
    return row["provider"] if ":" in row["provider"] else f"{row['provider']}:{row['checkpointing']}"


OpLine = tuple[str, int | None, int | None, float, float | None]


def op_lines(profile: Mapping[str, Any]) -> list[OpLine]:
    """(name, calls, kernels, ms, floor) of each op, the longest first, below products their shapes; then what the
    kernels leave of the step, and what lies between those of the profiled one: profile.py says how they differ.

    The floor of a shape is that of its own operations, the floor of all products that of what cannot be left out.
    """
    floors, rate = profile.get("floors_ms", {}), profile.get("ceilings", {}).get("matmul_bf16_tflop_per_s")
    by_op: dict[str, list[Mapping[str, Any]]] = {}
    for work in profile["ops"]:
        by_op.setdefault(work["op"], []).append(work)
    lines: list[OpLine] = []
    for op in sorted(by_op, key=lambda op: -sum(work["ms"] for work in by_op[op])):
        works = by_op[op]
        lines.append((op, *_sums(works), floors.get(op)))
        details = [work for work in works if work["detail"]]
        shown = [work for work in details if work["ms"] >= LEAST_SHARE * profile["step_ms"]]
        for work in shown:
            floor = work["flops"] / rate / 1e9 if rate and work["flops"] else None
            lines.append((f"  {work['detail']}", *_sums([work]), floor))
        rest = [work for work in details if work not in shown]
        if shown and rest:
            lines.append(("  the rest", *_sums(rest), None))
    lines.append(("step less kernels", None, None, profile["rest_ms"], None))
    if abs(profile["rest_ms"] - profile["between_ms"]) >= LEAST_SHARE * profile["step_ms"]:
        lines.append(("between kernels, profiled", None, None, profile["between_ms"], None))
    return lines


def _sums(works: Sequence[Mapping[str, Any]]) -> tuple[int, int, float]:
    """Calls, kernels, ms."""
    kernels = sum(n for work in works for n in work["kernels"].values())
    return sum(work["count"] for work in works), kernels, sum(work["ms"] for work in works)


def held_lines(profile: Mapping[str, Any]) -> list[tuple[str, str, int, int]]:
    """(what, where, blocks, bytes), the largest first; what is small is "the rest" of its kind."""
    lines: dict[tuple[str, str], list[int]] = {}
    for held in profile["held"]:
        small = held["bytes"] < LEAST_SHARE * profile["peak_bytes"] and held["detail"]
        entry = lines.setdefault((held["what"], "the rest" if small else held["detail"]), [0, 0])
        entry[0] += held["count"]
        entry[1] += held["bytes"]
    return sorted(((*key, count, size) for key, (count, size) in lines.items()), key=lambda line: -line[3])


def plot(record: Mapping[str, Any], folder: str | Path) -> list[Path]:
    """A PNG per profile: time by op beside its floor, and the peak's memory. Returns where they are."""
    from matplotlib.figure import Figure  # a figure by itself needs no display

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for row in record["rows"]:
        if "profile" not in row:
            continue
        profile = row["profile"]
        ops = [line for line in op_lines(profile) if not line[0].startswith("  ")]
        held = held_lines(profile)
        figure = Figure(figsize=(14, 1.5 + 0.32 * max(len(ops), len(held))), layout="constrained")
        times, memory = figure.subplots(1, 2)
        bars = times.barh(range(len(ops)), [ms for *_, ms, _ in ops], 0.7, label="measured")
        times.bar_label(bars, fmt="%.1f", padding=2, fontsize=7)
        times.barh(range(len(ops)), [floor or 0.0 for *_, floor in ops], 0.35, label="at least")
        times.set_yticks(range(len(ops)), [name for name, *_ in ops], fontsize=8)
        times.set_xlabel(f"ms of a step of {profile['step_ms']:.1f}")
        times.legend(fontsize=8)
        bars = memory.barh(range(len(held)), [size / 2**20 for *_, size in held], 0.7)
        memory.bar_label(bars, fmt="%.0f", padding=2, fontsize=7)
        memory.set_yticks(range(len(held)), [f"{what} {where}".strip() for what, where, *_ in held], fontsize=8)
        memory.set_xlabel(f"MiB of a peak of {profile['peak_bytes'] / GIB:.2f} GiB")
        for axes in (times, memory):
            axes.invert_yaxis()
            axes.margins(x=0.12)
        settings, device = record["settings"], record["environment"]["device"]
        size = f"{settings['case']}, B {settings['batch']} x S {settings['seq']}"
        figure.suptitle(f"{_full_name(row)}, {size}, {device}", fontsize=10)
        paths.append(folder / f"{settings['case']}-{_full_name(row).replace(':', '-')}.png")
        figure.savefig(paths[-1], dpi=130)
    return paths
