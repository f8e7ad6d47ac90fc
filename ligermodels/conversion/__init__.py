"""From one checkpoint layout to another, and the proof that nothing was lost."""

from ligermodels.conversion.inspection import Inspection, inspect
from ligermodels.conversion.pipeline import Options, convert
from ligermodels.conversion.source import MismatchError
from ligermodels.conversion.verify import Report, verify

__all__ = ["Inspection", "MismatchError", "Options", "Report", "convert", "inspect", "verify"]
