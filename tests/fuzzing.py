"""Random changes of JSON and bytes, by hypothesis."""

import copy
from typing import Any

from hypothesis import HealthCheck, Phase, settings, strategies as st

SIZES = st.sampled_from([-1, 0, 1, 2, 15, 16, 17, 64, 2**31, 2**32, 2**53, 2**62, 2**63 - 1, 2**63, 2**64 - 1, 2**64])
TEXTS = st.one_of(
    st.text(st.characters(exclude_categories=()), max_size=8),
    st.sampled_from(["F32", "F16", "BF16", "F4", "U8", "BOOL", "C64", "__metadata__", "dtype", "shape"]),
    st.sampled_from(["model.norm.weight", "model.safetensors", "../x.safetensors", "weight_map", "data_offsets"]),
)
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), SIZES, st.floats(), TEXTS),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=5,
)
PLACES = st.integers(0, 2**32)
TREE_STEP = st.tuples(st.sampled_from(["replace", "rename", "delete", "add", "swap"]), PLACES, PLACES, VALUES, TEXTS)
BYTE_STEP = st.tuples(st.sampled_from(["flip", "cut", "insert", "delete", "repeat"]), PLACES, st.binary(max_size=9))


def bounded(examples: int, **options: Any) -> settings:
    return settings(
        max_examples=examples,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate, Phase.shrink],
        **options,
    )


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
    """Changes the first `within` bytes."""
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
