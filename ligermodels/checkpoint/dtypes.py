"""The names of dtypes that `from_hub`, the commands and their functions accept."""

from collections.abc import Sequence
from typing import Any

from ligermodels.errors import InputError

NAMES = {
    "float32": ("fp32", "f32", "float"),
    "bfloat16": ("bf16",),
    "float16": ("fp16", "f16", "half"),
    "float64": ("fp64", "f64", "double"),
}
"""{torch's name of a dtype: its other names}."""


def dtype_name(dtype: Any, also: Sequence[str] = ("auto",)) -> str:
    """torch's name, such as "bfloat16", of a dtype or of one of its names; names in `also` are returned as they are.

    Raises InputError for other names and dtypes.
    """
    name = str(dtype).removeprefix("torch.")
    if name in also or name in NAMES:
        return name
    for ours, others in NAMES.items():
        if name in others:
            return ours
    known = ", ".join([*also, *(f"{ours} ({', '.join(others)})" for ours, others in NAMES.items())])
    raise InputError(f"dtype={name!r} is not supported; supported: {known}")
