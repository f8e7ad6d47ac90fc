"""Converts checkpoints between layouts, and compares and inspects them. Imported on first use, with torch.

source           `Source`: an open checkpoint under Hugging Face's names; `View`: checked against its model
layouts          detects the layout of a folder and opens it; original (Meta, Mistral), distributed and merging
                 (LoRA) are its sources
options          the options of convert
pipeline         convert
comparison       verify
inspection       inspect
"""

import importlib
from typing import TYPE_CHECKING, Any

from ligermodels.conversion.options import Options as Options
from ligermodels.errors import MismatchError as MismatchError

if TYPE_CHECKING:
    from ligermodels.conversion.comparison import Report as Report, verify as verify
    from ligermodels.conversion.inspection import Inspection as Inspection, inspect as inspect
    from ligermodels.conversion.pipeline import convert as convert

_MODULES = {
    "Inspection": "inspection", "inspect": "inspection", "Report": "comparison", "verify": "comparison",
    "convert": "pipeline",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'ligermodels.conversion' has no attribute {name!r}")
    return getattr(importlib.import_module(f"ligermodels.conversion.{_MODULES[name]}"), name)
