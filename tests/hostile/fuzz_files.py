"""For the fuzzers of this folder; tests/fuzzing.py has it."""

from tests.fuzzing import BYTE_STEP, PLACES, TREE_STEP, change_bytes, change_tree

__all__ = ["BYTE_STEP", "PLACES", "TREE_STEP", "change_bytes", "change_tree"]
