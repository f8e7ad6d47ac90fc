"""Converts checkpoints between layouts, and compares and inspects them. Imported on first use, with torch."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ligermodels.conversion.comparison import Report, verify
    from ligermodels.conversion.inspection import Inspection, inspect
    from ligermodels.conversion.options import Options
    from ligermodels.conversion.pipeline import convert
    from ligermodels.conversion.source import MismatchError

__all__ = ["Inspection", "MismatchError", "Options", "Report", "convert", "inspect", "verify"]

_HOMES = {
    "Inspection": "inspection",
    "MismatchError": "source",
    "Options": "options",
    "Report": "comparison",
    "convert": "pipeline",
    "inspect": "inspection",
    "verify": "comparison",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'ligermodels.conversion' has no attribute {name!r}")
    return getattr(importlib.import_module(f"ligermodels.conversion.{_HOMES[name]}"), name)
