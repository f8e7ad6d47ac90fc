"""Converts checkpoints between layouts, and compares and inspects them."""

from ligermodels.conversion.inspection import Inspection, inspect
from ligermodels.conversion.pipeline import Options, convert
from ligermodels.conversion.source import MismatchError
from ligermodels.conversion.verify import Report, verify

__all__ = ["Inspection", "MismatchError", "Options", "Report", "convert", "inspect", "verify"]
