"""Python objects in place of names: what `train` may be given in Python, and the command line cannot.

An object is in `options.objects`. The option of its name says what it is, after "in memory: ", for the plan, the card
and options.yaml. A run with objects is resumed by the same call with resume=True.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ligermodels.errors import InputError
from ligermodels.recipes.options import IN_MEMORY, TrainOptions, fields_of

_ROWS = "a list of rows (dicts), a Dataset of `datasets`, or names of files, folders and data sets of the Hub"


def split(options: type[TrainOptions], values: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """(values of options, objects) of the arguments of `train`. Raises InputError."""
    values, objects = dict(values), dict[str, Any]()
    if (model := values.get("model")) is not None and not isinstance(model, str | Path):
        objects["model"], values["model"] = model, IN_MEMORY + _name_of(model)
    if (tokenizer := values.pop("tokenizer", None)) is not None:
        if "model" not in objects:
            raise InputError("tokenizer: it goes with a model in memory, and a folder or repository has its own")
        objects["tokenizer"] = tokenizer
    for name in ("data", "eval_data"):
        if (rows := values.get(name)) is not None and not _are_names(rows):
            objects[name] = rows_of(rows, name)
            values[name] = f"{IN_MEMORY}{len(objects[name]):,} rows"
    if "rewards" in values:
        if "reward_funcs" not in fields_of(options):
            raise InputError(f"rewards: {options.recipe} has no rewards; they are for grpo")
        if "reward_funcs" in values:
            raise InputError("rewards and reward_funcs: give one of the two; rewards may have functions and files")
        rewards = values.pop("rewards")
        objects["rewards"] = {}
        values["reward_funcs"] = tuple(
            _reward(reward, objects["rewards"]) for reward in ([rewards] if callable(rewards) else rewards)
        )
    return values, objects


def rows_of(rows: Any, name: str) -> Any:
    """Rows of Python objects, as `Rows`. name: of the argument. Raises InputError."""
    from ligermodels.recipes.data.rows import DataSet, Rows, split_of  # and torch

    if isinstance(rows, Mapping) and rows and all(hasattr(part, "column_names") for part in rows.values()):
        rows = split_of(rows, None)
    if hasattr(rows, "column_names"):  # of `datasets`
        if not hasattr(rows, "__len__"):
            raise InputError(f"{name} is a data set that streams, and rows are read more than once: give a Dataset")
        opened: Rows = DataSet(rows, f"{name}: row ", None)
    elif isinstance(rows, Iterable) and not isinstance(rows, Mapping | str | bytes) and not hasattr(rows, "columns"):
        opened = Rows([dict(row) if isinstance(row, Mapping) else row for row in rows], f"{name}: row ", None)
    else:
        more = "; rows of a DataFrame are frame.to_dict('records')" if hasattr(rows, "columns") else ""
        raise InputError(f"{name} is a {type(rows).__name__}: expected {_ROWS}{more}")
    if not len(opened):
        raise InputError(f"{name} has no rows")
    return opened


def _are_names(rows: Any) -> bool:
    """Whether they are the names of files, folders or data sets, or wrong in a way that the options name."""
    if isinstance(rows, str | Path):
        return True
    return isinstance(rows, Sequence) and any(isinstance(name, str | Path) for name in rows)


def _name_of(model: Any) -> str:
    """The repository or folder that a model came from, else its class."""
    return str(getattr(model, "name_or_path", "") or type(model).__name__)


def _reward(reward: Any, functions: dict[str, Callable[..., Any]]) -> str:
    """The name of a reward, which is added to `functions` unless it is the name of a file."""
    if isinstance(reward, str | Path):
        return str(reward)
    if not callable(reward):
        raise InputError(f"rewards: {reward!r:.80} is no function; expected functions, or FILE.py:FUNCTION")
    base = name = f"{IN_MEMORY}{getattr(reward, '__name__', type(reward).__name__)}"
    number = 1
    while name in functions:
        number += 1
        name = f"{base} {number}"
    functions[name] = reward
    return name
