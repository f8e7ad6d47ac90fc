"""Compares two checkpoints: configs, names, shapes, dtypes and bits."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from ligermodels.checkpoint import hub, weights
from ligermodels.checkpoint.weights import TensorInfo
from ligermodels.conversion.layouts import open_source, takes_config
from ligermodels.conversion.options import LEVELS, Level
from ligermodels.conversion.source import View
from ligermodels.errors import InputError


@dataclass
class Report:
    """The result of a conversion or comparison. No `mismatches`: all agreed. No destination: nothing was written.

    casts: {(dtype in a, dtype in b): number of tensors that are equal bit for bit after a cast}; not mismatches.
    """

    source: str
    destination: str | None
    tensors: int = 0
    bytes: int = 0
    mismatches: list[str] = field(default_factory=list)
    casts: Counter[tuple[str, str]] = field(default_factory=Counter)
    details: dict[str, Any] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        return not self.mismatches

    def to_json(self) -> dict[str, Any]:
        fields = {name: getattr(self, name) for name in ("source", "destination", "tensors", "bytes")}
        casts = [{"a": of_a, "b": of_b, "tensors": count} for (of_a, of_b), count in self.casts.items()]
        return {"ok": self.ok, **fields, **self.details, "casts": casts, "mismatches": self.mismatches}


def verify(
    a: str | Path,
    b: str | Path,
    *,
    level: Level = "bytes",
    allow_pickle: bool = False,
    config: str | Path | None = None,
    progress: bool = True,
) -> Report:
    """Compares two checkpoints of any layout; each is a folder or a repository of the Hub.

    level: "keys" compares names, shapes and dtypes from the headers, and every field of config.json and
        generation_config.json, but for initializer_range, on which loaded weights do not depend. "bytes" also compares
        every bit; two dtypes are compared after a cast.
    config: as in `Options`, for those of the two that have no config.
    Raises MismatchError if one of them does not fit its own config. Differences between the two are in the report.
    """
    folders = [hub.resolve(checkpoint, allow_pickle=allow_pickle) for checkpoint in (a, b)]
    if config and not any(map(takes_config, folders)):
        raise InputError(f"--config is for weights without one, and {a} and {b} have their own")

    def view(folder: Path) -> View:
        own_config = config if takes_config(folder) else None
        return View(open_source(folder, allow_pickle=allow_pickle, config=own_config))

    first, second = map(view, folders)
    size = sum(info.nbytes for info in first.headers.values())
    report = Report(str(a), str(b), len(first.headers), size)
    return compare(first, second, level=level, report=report, progress=progress)


def compare(a: View, b: View, *, level: Level, report: Report, progress: bool = True) -> Report:
    """Adds to `report` the differences between two checkpoints under the same names; see `verify`."""
    if level not in LEVELS:
        raise InputError(f"verify={level!r} is not known; known: {', '.join(LEVELS)}")
    report.details["verified"] = level
    if level == "none":
        return report
    report.mismatches += _keys(a, b, dtypes=level == "keys")
    if level == "bytes":
        report.mismatches += _bytes(a, b, report, progress)
    return report


def _keys(a: View, b: View, *, dtypes: bool) -> Iterator[str]:
    """Differences of architecture, configs, names, shapes and, if asked, dtypes."""
    if type(a.model) is not type(b.model):
        yield f"architecture: {type(a.model).__name__} and {type(b.model).__name__}"
    else:
        unread = {"dtype": None, "initializer_range": None}
        configs = [{**view.model.config.extra, **view.model.config.values(), **unread} for view in (a, b)]
        generation = [view.generation_config() for view in (a, b)]
        for where, (of_a, of_b) in (("config", configs), ("generation_config.json", generation)):
            for name in {**of_a, **of_b}:
                if of_a.get(name) != of_b.get(name):
                    yield f"{where}: {name} is {of_a.get(name)} and {of_b.get(name)}"
    counts = Counter[tuple[str, str]]()
    for name in {**a.headers, **b.headers}:
        first, second = a.headers.get(name), b.headers.get(name)
        if first is None or second is None:
            yield f"{name}: only in {a.source if second is None else b.source}"
            continue
        if first.shape != second.shape:
            yield f"{name}: shape {list(first.shape)} and {list(second.shape)}"
        if dtypes and first.dtype != second.dtype:
            counts[_name(first.dtype), _name(second.dtype)] += 1
    for pair, count in counts.items():
        yield f"{count} tensors are {pair[0]} and {pair[1]}; the level bytes compares them after a cast"


def dtype_counts(headers: Mapping[str, TensorInfo], types: Mapping[str, str] | None = None) -> dict[str, int]:
    """{dtype: number of elements}. types: {tensor: the name of its type}, if that is not a dtype of torch."""
    counts = Counter[str]()
    for name, info in headers.items():
        counts[(types or {}).get(name) or _name(info.dtype)] += math.prod(info.shape)
    return dict(counts)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _bytes(a: View, b: View, report: Report, progress: bool) -> Iterator[str]:
    """Tensors with other values; those that a cast makes equal are counted in the report."""
    total = sum(info.nbytes for info in a.headers.values())
    with tqdm(None, "Comparing", total, unit="B", unit_scale=True, disable=None if progress else True) as bar:
        for name, info in a.headers.items():
            bar.update(info.nbytes)
            if name not in b.headers or b.headers[name].shape != info.shape:
                continue
            first, second = a.read(name), b.read(name)
            pair = _name(first.dtype), _name(second.dtype)
            if first.dtype == second.dtype:
                if not weights.same_bits(first, second):
                    yield f"{name}: values differ"
            elif _is_cast(first, second):
                report.casts[pair] += 1
            else:
                yield f"{name}: values differ by more than a cast ({pair[0]} and {pair[1]})"


def _is_cast(a: Tensor, b: Tensor) -> bool:
    """Whether one tensor is a cast of the other, without an overflow."""
    same = weights.same_bits(a.to(b.dtype), b) or weights.same_bits(a, b.to(a.dtype))
    a, b = (x.float() if x.itemsize < 4 else x for x in (a, b))  # isfinite does not take float8
    return same and torch.equal(a.isfinite(), b.isfinite())
