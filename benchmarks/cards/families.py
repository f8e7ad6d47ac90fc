"""The families of the registry, and what the tests and benchmarks/results/gpu.json say of each.

Bounds, configurations and parameter counts are read from the test classes, which hold them. Needs the group `test`.
"""

import functools
import importlib
import inspect
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.cards.records import RESULTS
from benchmarks.cards.tables import model_name, on_meta
from benchmarks.harness import ROOT
from benchmarks.train_cases import MODELS
from ligermodels.arch import ARCHS, TEXTS

CONFIGS = ROOT / "tests" / "fixtures" / "configs"
COUNTED = {
    "gemma4": ("test_gemma4_vl", "count"), "qwen3_5": ("test_qwen3_vl", "count"),
    "qwen3_5_moe": ("test_qwen3_5_moe", "whole"), "qwen3_5_moe_text": ("test_qwen3_5_moe", "text"),
}  # fmt: skip
"""model_type -> the module of tests/arch whose test_exact_number_of_parameters counts it, and the argument's name."""
RELEASED = {"llama": "SmolLM2-135M-Instruct, its weights from GGUF"}
"""Families of which the weights of a released model are tested (tests/real_files.py unpacks it)."""


@dataclass(frozen=True)
class Size:
    """A configuration: its name, number of parameters, and config.json where the tests have it."""

    name: str
    parameters: int
    config: Mapping[str, Any]


@dataclass(frozen=True)
class Family:
    model_type: str
    arch: Any
    suites: tuple[type, ...]
    sizes: tuple[Size, ...]

    @property
    def file(self) -> str:
        return self.arch.__module__.replace(".", "/") + ".py"

    @property
    def title(self) -> str:
        """The first line of the file's docstring."""
        return inspect.getdoc(inspect.getmodule(self.arch)).splitlines()[0].rstrip(".")  # type: ignore[union-attr]

    @property
    def tests(self) -> list[str]:
        return sorted({suite.__module__.replace(".", "/") + ".py" for suite in self.suites})

    @property
    def options(self) -> list[str]:
        """The names of its tiny configurations."""
        return list(dict.fromkeys(name.replace("_", " ") for suite in self.suites for name in suite.TINY if name))

    def is_named(self, test: str) -> bool:
        """Whether a pytest id is of a test of this family."""
        path, *parts = test.split("::")
        if not path.startswith("tests/arch/"):
            return re.search(rf"\[(?:.*-)?{self.model_type}(?:-.*)?\]$", parts[-1]) is not None
        module = ROOT / path
        named = (
            getattr(importlib.import_module(path.removesuffix(".py").replace("/", ".")), parts[0], None)
            if (module.exists())
            else None
        )  # a record may be of a file that has gone
        arch = getattr(named, "arch", None)
        return path in self.tests if arch is None else arch is self.arch


@functools.cache
def families() -> tuple[Family, ...]:
    """All of the registry, in its order."""
    suites = _suites()
    return tuple(
        Family(model_type, arch, tuple(suites[model_type]), tuple(_sizes(model_type, suites[model_type])))
        for model_type, arch in ARCHS.items()
    )


def gpu_run() -> Mapping[str, Any]:
    """The record of `make gpu`."""
    return json.loads((RESULTS / "gpu.json").read_text("utf-8"))


def text_of(family: Family) -> str | None:
    """The model_type of the family of its text."""
    return TEXTS.get(family.model_type)


def bounds() -> dict[str, float]:
    """How far from transformers' the Suite lets logits and gradients be, relative to their norm, in fp32."""
    suite = importlib.import_module("tests.arch.suite")
    return {"logits and loss": suite.LOGITS, "each gradient": suite.GRADIENTS}


def properties() -> list[str]:
    """What the Suite checks of every family, in the words of its tests' names."""
    suite = importlib.import_module("tests.arch.suite").Suite
    return [name.removeprefix("test_").replace("_", " ") for name in vars(suite) if name.startswith("test_")]


def _suites() -> dict[str, list[type]]:
    found: dict[str, list[type]] = {model_type: [] for model_type in ARCHS}
    for path in sorted((ROOT / "tests" / "arch").glob("test_*.py")):
        for name, value in vars(importlib.import_module(f"tests.arch.{path.stem}")).items():
            arch = getattr(value, "arch", None)
            if name.startswith("Test") and arch in ARCHS.values() and value not in found[arch.config_class.model_type]:
                found[arch.config_class.model_type].append(value)
    return found


def _sizes(model_type: str, suites: list[type]) -> list[Size]:
    counted = {name: count for suite in suites for name, count in getattr(suite, "REAL", {}).items()}
    found = [Size(name, count, _config(name)) for name, count in counted.items()]
    for path in sorted((CONFIGS / "v5").glob("*.json")):
        config = _config(path.stem)
        if config["model_type"] == model_type and path.stem not in counted:
            found.append(Size(path.stem, on_meta(config).num_parameters(), config))
    if model_type in COUNTED:
        names = {size.name for size in found}
        found += [size for size in _counted(model_type, *COUNTED[model_type]) if size.name not in names]
    if not found:  # the text alone of a model that reads images
        for name, model in MODELS.items():
            if model.config["model_type"] == model_type:
                found.append(Size(model_name(name), on_meta(model.config).num_parameters(), model.config))
    return sorted(found, key=lambda size: size.parameters)


def _counted(model_type: str, module: str, argument: str) -> list[Size]:
    """From the arguments of a parametrised test."""
    test = importlib.import_module(f"tests.arch.{module}").test_exact_number_of_parameters
    (mark,) = (mark for mark in test.pytestmark if mark.name == "parametrize")
    names, values = mark.args[:2]
    names = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
    ids = mark.kwargs.get("ids") or [row[names.index("name")] for row in values]
    family = {"qwen3_5": "Qwen3.5-", "qwen3_5_moe": "Qwen3.5-", "qwen3_5_moe_text": "Qwen3.5-"}.get(model_type, "")
    return [Size(f"{family}{one}", row[names.index(argument)], {}) for one, row in zip(ids, values, strict=True)]


def _config(name: str) -> dict[str, Any]:
    path = CONFIGS / "v5" / f"{name}.json"
    return json.loads((path if path.exists() else Path(CONFIGS, f"{name}.json")).read_text("utf-8"))
