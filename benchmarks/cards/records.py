"""The records of benchmarks/results, of every form that they have had, as measurements of one form.

A measurement is one row of one record. Rows that a person wrote without naming a baseline, and those of an older commit
that a record has beside its commit (its name says which), are left to the pages that cite the record.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import distributed
from benchmarks.harness import PACKAGES, ROOT
from benchmarks.train_cases import CASES, MODELS, whole_and_layers
from benchmarks.train_step import FP8, TORCHAO

RESULTS = ROOT / "benchmarks" / "results"
OTHER_FORMS = ("ablations", "decode-experts", "decode-qwen3.5-step", "fp8", "gpu", "kernels", "quantized")
"""What the names of records begin with that have no measurements of models, or none with a baseline's name."""
FAMILY_OF = {"smollm2": "llama"}
"""First part of a model's name -> its model_type, for models that benchmarks/train_cases.py does not have."""
RECOMPUTED = ("none", "mlp", "block")
"""In the order of tables."""
LOWER_IS_BETTER = ("peak GiB", "s", "step s", "first token ms")


@dataclass(frozen=True)
class Record:
    """A file of benchmarks/results. gpus: how many one run used."""

    name: str
    contents: Mapping[str, Any]

    @property
    def environment(self) -> Mapping[str, Any]:
        return self.contents["environment"]

    @property
    def date(self) -> str:
        """Of the latest row where the rows have dates."""
        rows = self.contents.get("rows") or [{}]
        return self.environment.get("date") or max(row.get("date", "") for row in rows)

    @property
    def gpus(self) -> int:
        if stated := re.search(r"--gpus (\d+)", self.environment.get("command") or ""):
            return int(stated[1])
        named = re.search(r"-(\d+)x", self.name)
        return self.contents.get("gpus") or (int(named[1]) if named else 1)

    @property
    def versions(self) -> str:
        known = ((package, self.environment.get(package)) for package in ("python", *PACKAGES))
        return ", ".join(f"{package} {version}" for package, version in known if version)


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One row of one record.

    kind: "train", "longest" (the longest sequence), "command" (`ligermodels train`), "gpus" (training on several),
        "decode", "drafted", "first token", "load" or "rollout". case: the shape, in the record's words.
    trained: "full", "lora", "nf4" or "mxfp4" (LoRA on weights in 4 bits), and "full fp8" or "lora fp8", which are not
    beside peers in bf16; of generation, the format of the weights.
    figures: by name, with units; none where it did not run, which `note` explains.
    """

    kind: str
    model: str
    case: str
    trained: str
    baseline: str
    recompute: str = ""
    figures: Mapping[str, float] = field(hash=False)
    note: str = ""
    record: Record = field(hash=False)
    commit: str
    date: str

    @property
    def is_ours(self) -> bool:
        return is_ours(self.baseline)

    @property
    def device(self) -> str:
        name = self.record.environment["device"].removeprefix("NVIDIA ").removesuffix(" 80GB HBM3")
        return name if self.record.gpus == 1 else f"{self.record.gpus} x {name}"

    @property
    def measured(self) -> tuple[str, ...]:
        """What was measured: two measurements with this in common can be compared."""
        return self.kind, self.model, self.case, self.trained, self.recompute, self.device

    @property
    def key(self) -> str:
        return " | ".join((*self.measured, self.baseline))

    @property
    def family(self) -> str:
        """The model_type of the card that shows it."""
        whole, _ = whole_and_layers(self.model)
        if whole in MODELS:
            return MODELS[whole].config["model_type"]
        if (start := self.model.split("-")[0]) in FAMILY_OF:
            return FAMILY_OF[start]
        raise ValueError(
            f"{self.record.name}: the model {self.model} is of no family; add it to benchmarks.train_cases"
        )


def is_ours(baseline: str) -> bool:
    return re.split(r"[+:-]", baseline)[0] in ("ligermodels", "captured", "host")


def records(folder: Path = RESULTS) -> list[Record]:
    """All records, the oldest first."""
    found = [Record(path.stem, json.loads(path.read_text("utf-8"))) for path in sorted(folder.glob("*.json"))]
    return sorted(found, key=lambda record: (record.date, record.name))


def measurements(found: list[Record]) -> list[Measurement]:
    """Of all records, the oldest first. Raises ValueError for a record of which no row can be read."""
    rows = []
    for record in found:
        if not record.name.startswith(OTHER_FORMS):
            read = list(_rows(record))
            if not read:
                raise ValueError(f"{record.name}.json has no row that benchmarks/cards/records.py can read")
            rows += read
    return rows


def newest(rows: list[Measurement]) -> dict[str, Measurement]:
    """{key: its newest measurement that has figures}."""
    return {row.key: row for row in rows if row.figures}


def _rows(record: Record) -> Iterator[Measurement]:
    beside = re.search(r"-beside-([0-9a-f]{7,})", record.name)
    for title, rows in record.contents.items():
        if isinstance(rows, list) and title != "ids":
            for row in rows:
                found = _measurement(record, title, row) if isinstance(row, Mapping) else None
                if found is not None and not (beside and found.commit == beside[1]):
                    yield found


def _measurement(record: Record, title: str, row: Mapping[str, Any]) -> Measurement | None:
    common: dict[str, Any] = {
        "record": record, "commit": row.get("commit") or record.environment["commit"],
        "date": row.get("date") or record.date, "note": row.get("note", ""),
    }  # fmt: skip
    figures = {
        "tokens/s": _first(row, "tokens/s", "tokens_per_s", "tokens/s a GPU"),
        "peak GiB": _first(row, "peak GiB", "peak_gib"),
    }
    if "side" in row:
        return _of_several_gpus(row, figures, common)
    if "loader" in row:
        figures = {"s": _first(row, "s", "seconds"), "GB/s": _first(row, "GB/s", "gb_per_s")}
        case = f"{row['cache']}, {record.contents['scratch'].split(',')[0]}"
        return _made(kind="load", model=record.contents["model"], case=case, trained="bf16", baseline=row["loader"],
                     figures=figures, **common)  # fmt: skip
    if "rollout s" in row:
        figures = {name: row[name] for name in ("step s", "rollout s", "update s", "peak GiB")}
        return _made(kind="rollout", model=row["model"], case=row["case"], trained="full",
                     baseline="ligermodels" if row["baseline"] == "ours" else row["baseline"],
                     figures=figures, **common)  # fmt: skip
    if "tokens a forward" in row and "baseline" in row:
        return _made(kind="command", model=row["model"].lower(), case=f"{row['tokens a forward']:,} tokens a forward",
                     trained=row["trained"], baseline=row["baseline"], recompute="none", figures=figures,
                     **common)  # fmt: skip
    if "batch tokens" in row and row["options"] in ("", "--capture"):
        return _made(kind="command", model=row["model"].lower(), case=f"{row['batch tokens']:,} tokens a forward",
                     trained="full", baseline="ligermodels" + row["options"].replace("--", "+"), recompute="none",
                     figures=figures, **common)  # fmt: skip
    if title in ("first token", "drafted") and "model" in row:
        case = f"{row['prompt']} tokens" if "prompt" in row else f"{row['case']}, {row['proposals']} proposals"
        if title == "first token":
            figures = {"first token ms": row["first token ms"]}
        return _made(kind=title, model=row["model"], case=case, trained="bf16",
                     baseline=row.get("baseline", "captured"), figures=figures, **common)  # fmt: skip
    if re.fullmatch(r"\d+x\d+\+\d+", str(row.get("case", ""))) and "baseline" in row:
        figures |= {"of limit": row.get("of limit"), "first token ms": row.get("first token ms")}
        return _made(kind="decode", model=row["model"], case=row["case"], trained=row.get("weights", "bf16"),
                     baseline=row["baseline"], figures=figures, **common)  # fmt: skip
    if (baseline := row.get("baseline") or row.get("provider")) is not None:
        return _of_training(record, title, row, baseline, figures, common)
    return None


def _of_training(
    record: Record, title: str, row: Mapping[str, Any], baseline: str, figures: dict[str, Any], common: dict[str, Any]
) -> Measurement | None:
    """A row of benchmarks.train_step, of today or of its first versions."""
    settings = record.contents.get("settings") or {}
    default = "none"
    if named := re.fullmatch(r"(?P<name>\S+): (?P<model>\S+), (?P<case>.*)", title):
        model, case = named["model"], named["case"]
        if named["name"] in CASES:  # a row that did not run does not say what it would have recomputed
            default = CASES[named["name"]].recompute
    elif named := re.fullmatch(r"(?P<name>\S+), (?P<case>in \S+ GiB)", title):
        model, case = CASES[named["name"]].model, named["case"]
    elif settings:
        model = settings.get("model") or settings["case"]
        longest = settings.get("longest")
        case = f"in {longest:g} GiB" if longest else f"{settings['batch']} x {settings['seq']}"
    else:
        return None
    if stated := re.search(r"--accumulation (\d+)", record.environment.get("command") or ""):
        case += f", {stated[1]} micro-batches"
    kind, _, policy = baseline.replace("inbackward", "in_backward").partition(":")
    options = set(kind.split("+"))
    recompute = row.get("recompute") or row.get("checkpointing") or policy or default
    if "*" in policy:
        recompute = f"{policy.partition('*')[2]} blocks"
    if "length" in row:
        figures = {"length": row["length"], **figures}
    return _made(
        kind="longest" if case.startswith("in ") else "train", model=model, case=case, baseline=kind,
        trained=_trained(options), recompute=recompute, figures=figures, **common,
    )  # fmt: skip


def _trained(options: set[str]) -> str:
    for name in ("nf4", "mxfp4"):
        if name in options:
            return name
    how = "lora" if options & {"lora", "peft"} else "full"
    return f"{how} fp8" if options & {*FP8, *TORCHAO} else how


def _of_several_gpus(row: Mapping[str, Any], figures: dict[str, Any], common: dict[str, Any]) -> Measurement | None:
    if "save_s" in row:
        return None
    name, shape, rest = re.fullmatch(r"(.+?) (\d+ x \d+)(?:, (.*))?", row["case"]).groups()  # type: ignore[union-attr]
    known = distributed.CASES.get(row["case"], {})
    policy, fp8, in_fp32 = known.get("recompute", "none"), known.get("fp8"), known.get("weights", "fp32") == "fp32"
    options = (rest or "").split(", ")
    recompute = next(
        (option for option in options if option.startswith(RECOMPUTED)), policy if isinstance(policy, str) else "none"
    )
    case = ", ".join([shape, *(option for option in options if option and option not in (recompute, fp8))])
    case += ", fp32 weights" * in_fp32
    return _made(
        kind="gpus", model=distributed.NAMES[name], case=case, trained=_trained({fp8}), recompute=recompute,
        baseline=f"{row['side']}+{fp8}" if fp8 else row["side"], figures=figures, **common,
    )  # fmt: skip


def _made(*, figures: Mapping[str, float | None], **values: Any) -> Measurement:
    return Measurement(figures={name: value for name, value in figures.items() if value is not None}, **values)


def _first(row: Mapping[str, Any], *names: str) -> float | None:
    return next((row[name] for name in names if row.get(name) is not None), None)
