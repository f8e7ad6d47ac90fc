"""Mutated safetensors headers and indexes, by hypothesis: each loads, or ends in a CheckpointError or HubError.

The longer run: python -m tests.hostile.fuzz_files --count 20000
"""

import collections
import copy
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

import ligermodels
from ligermodels.errors import CheckpointError, HubError
from tests.hostile.folders import EMBEDDING, INDEX, NORM, SHARDS, WEIGHTS, join, make_good, split
from tests.hostile.fuzzing import bounded, run

SIZES = st.sampled_from([-1, 0, 1, 2, 15, 16, 17, 64, 2**31, 2**32, 2**53, 2**62, 2**63 - 1, 2**63, 2**64 - 1, 2**64])
TEXTS = st.one_of(
    st.text(st.characters(exclude_categories=()), max_size=8),
    st.sampled_from(["F32", "F16", "BF16", "F4", "U8", "BOOL", "C64", "__metadata__", "dtype", "shape"]),
    st.sampled_from([EMBEDDING, NORM, *SHARDS, WEIGHTS, "../x.safetensors", "weight_map", "data_offsets"]),
)  # fmt: skip
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), SIZES, st.floats(), TEXTS),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=5,
)
PLACES = st.integers(0, 2**32)
TREE_STEP = st.tuples(st.sampled_from(["replace", "rename", "delete", "add", "swap"]), PLACES, PLACES, VALUES, TEXTS)
BYTE_STEP = st.tuples(st.sampled_from(["flip", "cut", "insert", "delete", "repeat"]), PLACES, st.binary(max_size=9))


def slots(tree: Any) -> list[tuple[Any, Any]]:
    """(container, key) of every value in a JSON tree."""
    found, queue = [], [tree]
    for container in queue:
        keys = list(container) if isinstance(container, dict) else range(len(container))
        found += [(container, key) for key in keys]
        queue += [container[key] for key in keys if isinstance(container[key], dict | list)]
    return found


def change_tree(tree: Any, steps: list[tuple]) -> Any:
    tree = copy.deepcopy(tree)
    for what, place, other, value, text in steps:
        found = slots(tree)
        if not found:
            return value
        container, key = found[place % len(found)]
        if what == "replace":
            container[key] = copy.deepcopy(value)
        elif what == "delete":
            del container[key]
        elif what == "swap":
            second, its_key = found[other % len(found)]
            moved = copy.deepcopy(container[key])
            container[key] = copy.deepcopy(second[its_key])
            second[its_key] = moved
        elif isinstance(container, dict):
            container[text] = container.pop(key) if what == "rename" else copy.deepcopy(value)
        else:
            container.insert(key, copy.deepcopy(value))
    return tree


def change_bytes(blob: bytes, steps: list[tuple], within: int) -> bytes:
    """Steps in the first `within` bytes, which hold the header."""
    for what, place, extra in steps:
        at = place % max(1, min(within, len(blob)))
        if what == "flip" and blob:
            blob = blob[:at] + bytes([blob[at] ^ (1 << place % 8)]) + blob[at + 1 :]
        elif what == "cut":
            blob = blob[:at]
        elif what == "insert":
            blob = blob[:at] + extra + blob[at:]
        elif what == "delete":
            blob = blob[:at] + blob[at + len(extra) :]
        elif what == "repeat":
            blob = blob[:at] + blob[at : at + 40] + blob[at:]
    return blob


class Fuzz:
    """A good checkpoint of which one file is mutated, loaded and counted by its outcome."""

    def __init__(self, root: Path):
        good = make_good(root)
        self.single, self.sharded = good["single"], good["sharded"]
        self.blob = (self.single / WEIGHTS).read_bytes()
        self.header, self.data = split(self.blob)
        self.index = (self.sharded / INDEX).read_bytes()
        self.counts: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)

    def attempt(self, kind: str, path: Path, content: bytes) -> None:
        """Whatever else than these two errors comes, passes through to hypothesis."""
        path.unlink(missing_ok=True)
        path.write_bytes(content)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                ligermodels.load(path.parent, progress=False)
            except (CheckpointError, HubError) as error:
                assert len(str(error)) < 5000 and str(path.parent) in str(error)
                self.counts[kind][type(error).__name__] += 1
            else:
                self.counts[kind]["loaded"] += 1

    def targets(self, count: int, **options: Any) -> list[Callable[[], None]]:
        """A function of hypothesis for each kind of mutation, `count` examples in all."""
        shares = {"headers as JSON": 0.4, "headers as bytes": 0.2, "index as JSON": 0.3, "index as bytes": 0.1}
        many = {kind: max(1, round(count * share)) for kind, share in shares.items()}

        def limited(kind: str) -> settings:
            return bounded(many[kind], **options)

        @limited("headers as JSON")
        @given(st.lists(TREE_STEP, min_size=1, max_size=3))
        def header_tree(steps):
            text = json.dumps(change_tree(self.header, steps)).encode()
            self.attempt("headers as JSON", self.single / WEIGHTS, join(text, self.data))

        @limited("headers as bytes")
        @given(st.lists(BYTE_STEP, min_size=1, max_size=3))
        def header_bytes(steps):
            within = len(self.blob) - len(self.data)
            self.attempt("headers as bytes", self.single / WEIGHTS, change_bytes(self.blob, steps, within))

        @limited("index as JSON")
        @given(st.lists(TREE_STEP, min_size=1, max_size=3))
        def index_tree(steps):
            text = json.dumps(change_tree(json.loads(self.index), steps)).encode()
            self.attempt("index as JSON", self.sharded / INDEX, text)

        @limited("index as bytes")
        @given(st.lists(BYTE_STEP, min_size=1, max_size=3))
        def index_bytes(steps):
            self.attempt("index as bytes", self.sharded / INDEX, change_bytes(self.index, steps, len(self.index)))

        return [header_tree, header_bytes, index_tree, index_bytes]


if __name__ == "__main__":
    run(Fuzz, "Loads mutated checkpoints", count=20_000)
