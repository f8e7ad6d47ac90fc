"""A result as text: a summary, a table per op, the host's cost, and what is not as exact as it must be."""

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.common import PACKAGES, table

Row = Mapping[str, Any]
RATES = ("forward", "backward", "both")
COLUMNS = [
    "shape",
    "provider",
    "device ms fwd",
    "fwd+bwd",
    "of ceiling fwd / bwd / both",
    "wall ms fwd",
    "wall fwd+bwd",
    "MiB",
    "wall / ours",
    "error",
]
CEILINGS = {
    "copy": ("copy_tb_per_s", "{:.2f} TB/s"),
    "read": ("read_tb_per_s", "{:.2f} TB/s"),
    "bf16 product": ("matmul_bf16_tflop_per_s", "{:.0f} TFLOP/s"),
    "int8 product": ("matmul_int8_top_per_s", "{:.0f} TOP/s"),
}
LEGEND = """\
Device ms: replays of a CUDA graph, inputs not in the L2; with * by the profiler, since the call makes the host wait:
the sum of its kernels, without their gaps. Wall ms: of one eager call, idle device to idle device. MiB: peak beyond the
inputs, gradients included. Of the ceiling, in device time: the fewest bytes (GB in brackets) at the copy's rate, or the
fewest operations (TFLOP) at that of one large product; where products of the op's own shapes are in the table, these.
"Wall / ours": of forward and backward. Error: the largest rms error over eager's, of all outputs and gradients."""


def render(record: Mapping[str, Any], *, markdown: bool = False) -> str:
    """The tables of a result as text."""
    env, limits = record["environment"], record["ceilings"]
    versions = ", ".join(f"{package} {env[package]}" for package in PACKAGES if env[package])
    measured = (f"{name} {form.format(limits[key])}" for name, (key, form) in CEILINGS.items() if key in limits)
    parts = [
        f"{env['device']}, {record['dtype']}, {versions}; commit {env['commit']}, {env['date']}",
        f"`{env['command']}`" if markdown else env["command"],
        f"ceilings in this run: {', '.join(measured)}",
    ]

    def add(title: str, columns: Sequence[str], lines: Sequence[Sequence[Any]]) -> None:
        parts.append(f"### {title}\n\n{table(columns, lines, markdown=markdown)}")

    if "seconds" in record:
        parts.append(LEGEND)
    if summary := [_summary(row, record) for row in record["rows"] if row["ours"] and wall(row) is not None]:
        add("Summary", SUMMARY, summary)
    for op in dict.fromkeys(row["op"] for row in record["rows"]):
        rows = [row for row in record["rows"] if row["op"] == op]
        worst = _worst_errors(record["parity"], op)
        lines = [_line(row, rows, worst) for row in rows]
        rates = [[row.get("tflop_per_s", {}).get(name) for name in RATES] for row in rows]
        shown = [n for n in range(len(RATES)) if any(rate[n] is not None for rate in rates)]
        columns = [*COLUMNS, *(f"TFLOP/s {RATES[n]}" for n in shown)]
        lines = [[*line, *(rate[n] for n in shown)] for line, rate in zip(lines, rates, strict=True)]
        empty = {n for n in range(len(columns)) if all(line[n] in (None, "") for line in lines)}
        keep = [n for n in range(len(columns)) if n not in empty]
        seconds = record.get("seconds", {}).get(op)
        title = op if seconds is None else f"{op} ({seconds:.0f} s)"
        lines = [[line[n] for n in keep] for line in lines]
        add(title, [columns[n] for n in keep], lines)
    if record["host"]:
        lines = [[row["op"], row["provider"], row.get("forward_us"), row.get("full_us")] for row in record["host"]]
        add("Host time per call, tiny shapes", ["op", "provider", "forward us", "fwd+bwd us"], lines)
    if bad := [row for row in record["parity"] if row["why"]]:
        lines = [[row["op"], row["shape"], row["provider"], row.get("tensor"), row["why"]] for row in bad]
        add("Parity: what is not as exact as it must be", ["op", "shape", "provider", "tensor", "why"], lines)
    if record.get("left_out"):
        parts.append(f"Left out, since the time was over: {', '.join(record['left_out'])}")
    if record["red"]:
        parts.append(f"RED, parity failed or ours did not run: {', '.join(record['red'])}")
    return "\n\n".join(parts)


def main_pass(row: Row) -> str:
    """Forward and backward, or the forward of an op that has no more."""
    return "full" if "full_ms" in row else "forward"


def wall(row: Row) -> float | None:
    time = row.get(f"{main_pass(row)}_wall_ms")
    return time and time["median"]


def _line(row: Row, rows: Sequence[Row], worst: Mapping[tuple, float]) -> list[Any]:
    if "note" in row:
        return [row["shape"], row["provider"], None, None, row["note"], *[None] * 5]
    ours = next((r for r in rows if r["shape"] == row["shape"] and r["ours"] and "note" not in r), None)
    waits = any(row.get(f"{name}_ms", {}).get("by") == "profiler" for name in ("forward", "full"))
    ratio = wall(row) and ours and wall(ours) and wall(row) / wall(ours)

    def median(name: str) -> float | None:
        return row[name]["median"] if name in row else None

    return [
        row["shape"] + (_least(row) if row is ours else ""),
        row["provider"] + (" *" if waits else ""),
        median("forward_ms"),
        median("full_ms"),
        _shares(row),
        median("forward_wall_ms"),
        median("full_wall_ms"),
        None if row.get("peak_mib") is None else round(row["peak_mib"]),
        ratio,
        worst.get((row["shape"], row["provider"])),
    ]


def _shares(row: Row) -> str:
    shares = [row.get(f"{name}_share") for name in ("forward", "backward", "full")]
    shown = ["-" if share is None else f"{share:.0%}" for share in shares]
    known = [share for share in shown if share != "-"]
    return " / ".join(shown if len(known) > 1 else known)


def _least(row: Row) -> str:
    """The fewest bytes or operations: GB or TFLOP of the forward and of both passes."""
    work = [work for name in ("forward", "full") if (work := row.get(f"{name}_work")) is not None]
    if not work:
        return ""
    scale, name = (1e9, "GB") if "bytes" in row["unit"] else (1e12, "TFLOP")
    return f" ({' / '.join(f'{each / scale:.3g}' for each in work)} {name})"


SUMMARY = [
    "op",
    "shape",
    "provider",
    "of ceiling fwd / bwd / both",
    "fastest peer, wall",
    "its wall / ours",
    "Liger's wall / ours",
    "Liger's MiB / ours",
    "host us",
    "Liger's host / ours",
]


def _summary(row: Row, record: Mapping[str, Any]) -> list[Any]:
    same = [r for r in record["rows"] if (r["op"], r["shape"]) == (row["op"], row["shape"]) and not r["ours"]]
    peers = {r["provider"]: r for r in same if wall(r) is not None}
    best = min(peers, key=lambda name: wall(peers[name]), default=None)
    liger = next((r for name, r in peers.items() if name.startswith("Liger")), None)
    host = {r["provider"]: r.get("full_us", r.get("forward_us")) for r in record["host"] if r["op"] == row["op"]}
    own = host.get(row["provider"])
    theirs = next((us for name, us in host.items() if name.startswith("Liger") and us), None)
    return [
        row["op"],
        row["shape"],
        row["provider"],
        _shares(row),
        best,
        wall(peers[best]) / wall(row) if best else None,
        wall(liger) / wall(row) if liger else None,
        liger["peak_mib"] / row["peak_mib"] if liger and liger.get("peak_mib") and row["peak_mib"] else None,
        own,
        theirs / own if theirs and own else None,
    ]


def _worst_errors(parity: Sequence[Row], op: str) -> dict[tuple[str, str], float]:
    """(shape, provider) -> largest rms error over eager's. The loss is one draw, whose ratio says nothing."""
    worst: dict[tuple[str, str], float] = {}
    for row in parity:
        ratio = row.get("rms_over_eager")
        if row["op"] == op and ratio is not None and row["tensor"] != "loss":
            key = (row["shape"], row["provider"])
            worst[key] = max(worst.get(key, 0.0), ratio)
    return worst
