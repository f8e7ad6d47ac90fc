"""The comparisons that the README quotes, each a run of its own, and what they are to show: all in one call.

    python -m benchmarks.train_step --rows all --budget 1000 --scratch /dev/shm --out benchmarks/results/step

writes step-ROW.json for each, says which of the claims hold, and on stderr where the seconds went. Rows stand in the
order in which they run, the dearest to leave out first; `seconds` is what a row took, or is thought to take, on one
H200.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.common import table


@dataclass(frozen=True)
class Claim:
    """That `ours` has at least `speed` times the peer's tokens/s, at most `memory` times its peak, at most `gib`, and
    at least `length` times its longest sequence."""

    ours: str
    peer: str
    speed: float | None = None
    memory: float | None = None
    gib: float | None = None
    length: float | None = None


@dataclass(frozen=True)
class Row:
    """A run: what the command line would say, and the claims on it. The providers run in this order: those of the
    claims, the others."""

    arguments: tuple[str, ...]
    claims: tuple[Claim, ...]
    seconds: int
    others: tuple[str, ...] = ()

    @property
    def providers(self) -> list[str]:
        named = [name for claim in self.claims for name in (claim.ours, claim.peer)]
        return list(dict.fromkeys([*named, *self.others]))


def _arguments(text: str) -> tuple[str, ...]:
    return tuple(text.split())


ROWS: dict[str, Row] = {
    "llama-1b": Row(
        _arguments("--case llama-3.2-1b --batch 8 --seq 2048 --checkpointing none --steps 10 --profile"),
        (
            Claim("ligermodels", "hf+liger", speed=1.10, memory=0.80),
            Claim("ligermodels+adamw+inplace", "hf+liger", speed=1.10, memory=0.80),
            Claim("ligermodels+adamw+inplace+offload:none-1", "hf+liger", speed=1.10, memory=0.80),
            Claim("ligermodels", "hf", speed=1.4, memory=0.40),
            Claim("ligermodels+adamw+inplace", "hf", speed=1.4, memory=0.40),
            Claim("ligermodels+adamw+inplace+offload:none-1", "hf", speed=1.4, memory=0.40),
        ),
        80,
        others=("ligermodels+adamw+captured",),
    ),
    "llama-8b": Row(
        _arguments("--case llama-3.1-8b --batch 4 --seq 4096 --checkpointing block --steps 10"),
        (
            Claim("ligermodels+adamw+inbackward+offload:mlp", "hf+liger", speed=1.08, memory=0.85),
            Claim("ligermodels+adamw+inbackward:block", "hf+liger", speed=1.08, memory=0.85),
            Claim("ligermodels+adamw+inbackward:none", "hf+liger", speed=1.28, gib=120),
        ),
        140,
    ),
    "llama-1b-small": Row(
        _arguments("--case llama-3.2-1b --batch 1 --seq 1024 --checkpointing none --steps 20 --warmup 5"),
        (
            Claim("ligermodels+adamw+captured", "hf+compile", speed=1.15, memory=0.95),
            Claim("ligermodels+captured", "hf+compile", speed=1.15, memory=0.95),
            Claim("ligermodels", "hf", speed=1.3),
        ),
        115,
    ),
    "gemma-2-2b": Row(
        _arguments("--case gemma-2-2b --batch 4 --seq 4096 --checkpointing block --steps 10"),
        (
            Claim("ligermodels+adamw+inbackward+offload+chunks:block", "hf+liger", memory=0.60),
            Claim("ligermodels+adamw+inbackward:block", "hf+liger", speed=2.2, memory=0.60),
            Claim("ligermodels+adamw+inbackward:none", "hf+liger", speed=2.2),
            Claim("ligermodels+adamw+inbackward:none", "hf+liger+sdpa", speed=1.4),
        ),
        90,
    ),
    "mixtral": Row(
        _arguments("--case mixtral-12l --batch 4 --seq 4096 --checkpointing block --steps 10"),
        (
            Claim("ligermodels+adamw+inbackward+offload:mlp", "hf", speed=2.0, memory=0.80),
            Claim("ligermodels+adamw+inbackward:none", "hf", speed=2.0, memory=0.80),
        ),
        50,
    ),
    "llama-1b-long": Row(
        _arguments("--case llama-3.2-1b --batch 1 --seq 32768 --checkpointing none --steps 10 --profile"),
        (
            Claim("ligermodels+adamw+inbackward+offload:none-4", "hf+liger", speed=1.05, memory=0.70),
            Claim("ligermodels+adamw+inbackward:none", "hf+liger", speed=1.05),
        ),
        115,
    ),
    "llama-1b-longest": Row(
        _arguments("--case llama-3.2-1b --checkpointing block --longest 24"),
        (
            Claim("ligermodels+adamw+inbackward", "hf+liger", length=1.6),
            Claim("ligermodels+adamw+inbackward", "hf", length=10.0),
            Claim("ligermodels+adamw+inbackward+offload", "hf+liger", length=1.6),
        ),
        400,
    ),
}


def within(names: Sequence[str], budget: float) -> list[str]:
    """Of the rows, in the order of ROWS, those whose seconds fit into the budget one after the other."""
    chosen = []
    for name in (name for name in ROWS if name in names):
        if ROWS[name].seconds <= budget:
            chosen.append(name)
            budget -= ROWS[name].seconds
    return chosen


def verdicts(record: Mapping[str, Any], claims: Sequence[Claim]) -> list[list[Any]]:
    """A line per claim: who, what was found beside what was to be shown, and whether it holds; None if not known."""
    rows = {row["provider"]: row for row in record["rows"]}
    lines = []
    for claim in claims:
        ours, peer = rows.get(claim.ours, {}), rows.get(claim.peer, {})
        for what, target, found, holds in (
            ("tokens/s, times", claim.speed, _ratio(ours, peer, "tokens_per_s"), float.__ge__),
            ("peak memory, times", claim.memory, _ratio(ours, peer, "peak_gib"), float.__le__),
            ("peak memory, GiB", claim.gib, ours.get("peak_gib"), float.__le__),
            ("longest sequence, times", claim.length, _ratio(ours, peer, "length"), float.__ge__),
        ):
            if target is not None:
                met = "not known" if found is None else "yes" if holds(float(found), float(target)) else "NO"
                lines.append([claim.ours, claim.peer, what, float(target), found, met])
    return lines


def _ratio(ours: Mapping[str, Any], peer: Mapping[str, Any], name: str) -> float | None:
    if name == "length" and "note" in peer:  # its search came to no end; ours is at least what was found
        return None
    return ours[name] / peer[name] if ours.get(name) and peer.get(name) else None  # no peak on a CPU


def render_verdicts(lines: Sequence[Sequence[Any]], *, markdown: bool = False) -> str:
    return table(["ours", "peer", "what", "to show", "found", "holds"], lines, markdown=markdown)
