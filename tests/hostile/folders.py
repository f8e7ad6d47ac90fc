"""For the tests of this folder; tests/checkpoint/fixtures.py has it."""

import contextlib

from tests.checkpoint.fixtures import CONFIG, INDEX, NORM, SHARDS, make_good, make_model, spoiled

__all__ = ["CONFIG", "INDEX", "NORM", "SHARDS", "limited", "make_good", "make_model", "spoiled"]
limited = contextlib.nullcontext
