"""Randomly changed safetensors headers and indexes: each loads, or ends in a CheckpointError or HubError."""

import collections
import json

import pytest
from hypothesis import given, strategies as st

import ligermodels
from ligermodels.errors import CheckpointError, HubError
from tests.checkpoint.fixtures import INDEX, WEIGHTS, join, make_good, split
from tests.fuzzing import BYTE_STEP, TREE_STEP, bounded, change_bytes, change_tree

CHANGES = {
    "header tree": ("single", WEIGHTS, TREE_STEP, 800),
    "header bytes": ("single", WEIGHTS, BYTE_STEP, 400),
    "index tree": ("sharded", INDEX, TREE_STEP, 600),
    "index bytes": ("sharded", INDEX, BYTE_STEP, 200),
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", CHANGES)
def test_changed_headers_and_indexes(tmp_path, kind):
    layout, file, step, count = CHANGES[kind]
    path = make_good(tmp_path)[layout] / file
    blob = path.read_bytes()
    header, data = split(blob) if file == WEIGHTS else (json.loads(blob), b"")
    outcomes: collections.Counter[str] = collections.Counter()

    @bounded(count, derandomize=True)
    @given(st.lists(step, min_size=1, max_size=3))
    def attempt(steps):
        if step is BYTE_STEP:
            changed = change_bytes(blob, steps, len(blob) - len(data))
        else:
            tree = change_tree(header, steps)
            changed = join(tree, data) if file == WEIGHTS else json.dumps(tree).encode()
        path.unlink(missing_ok=True)
        path.write_bytes(changed)
        try:
            ligermodels.load(path.parent, progress=False)
        except (CheckpointError, HubError) as error:
            assert str(path.parent) in str(error)
            outcomes[type(error).__name__] += 1
        else:
            outcomes["loaded"] += 1

    attempt()
    assert outcomes["CheckpointError"] > outcomes.total() / 4, outcomes
