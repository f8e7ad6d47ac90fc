"""Reward functions: plain Python, in the manner of TRL, so that its functions serve as they are.

    def reward(prompts, completions, completion_ids, **columns) -> list[float | None]

Each argument is a list with an entry for each completion: the prompt as the row has it, the completion (a text, or of a
prompt of messages [{"role": "assistant", "content": text}]), its ids, and the row's other columns by their names. A
function may leave out what it does not read. None: this function says nothing of the completion.
"""

import importlib.util
import inspect
import math
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from pathlib import Path
from reprlib import repr as short
from typing import Any

from ligermodels.errors import InputError

Function = Callable[..., Sequence[float | None]]


class Rewards:
    """Several reward functions, whose weighted sum is the reward.

    functions: by the names that logs and errors use. weights: default 1 each.
    """

    def __init__(self, functions: Mapping[str, Function], weights: Sequence[float] = ()):
        self.functions, self.weights = dict(functions), list(weights) or [1.0] * len(functions)

    @classmethod
    def load(cls, sources: Sequence[str], weights: Sequence[float] = ()) -> "Rewards":
        """Of files, "FILE.py:function", or "FILE.py" for its function `reward`. Runs them. Raises InputError."""
        functions: dict[str, Function] = {}
        for source in sources:
            path, _, name = (source, "", "reward") if source.endswith(".py") else source.rpartition(":")
            functions[name if name not in functions else source] = _load(source, Path(path).expanduser(), name)
        return cls(functions, weights)

    def judge(self, completions: Sequence[Any], *, chat: bool) -> None:
        """Sets `rewards`, by function, and `reward` of each completion of `rollout`. Raises InputError."""
        prompts = [one.prompt for one in completions]
        names = dict.fromkeys(name for prompt in prompts for name in prompt.columns if name != "completion")
        given = {name: [prompt.columns.get(name) for prompt in prompts] for name in names}
        texts: list[Any] = [one.text for one in completions]
        if chat:
            texts = [[{"role": "assistant", "content": text}] for text in texts]
        ids = [one.ids for one in completions]
        given |= dict(prompts=[prompt.prompt for prompt in prompts], completions=texts, completion_ids=ids)
        where = [prompt.where for prompt in prompts]
        numbers = {name: _numbers(name, function, given, where) for name, function in self.functions.items()}
        for n, one in enumerate(completions):
            one.rewards = {name: numbers[name][n] for name in numbers}
            if set(one.rewards.values()) == {None}:
                raise InputError(f"{where[n]}: no reward function gave its completion {short(texts[n])} a number")
            weighted = zip(self.weights, one.rewards.values(), strict=True)
            one.reward = sum(weight * value for weight, value in weighted if value is not None)


def _numbers(name: str, function: Function, given: dict[str, list[Any]], where: Sequence[str]) -> list[float | None]:
    """The numbers of one function, a number or None for each completion. Raises InputError."""
    parameters, rows = inspect.signature(function).parameters, f"{where[0]} to {where[-1]}"
    columns = list(given)
    if not any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
        given = {key: values for key, values in given.items() if key in parameters}
    positional = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    needed = [key for key, one in parameters.items() if one.kind in positional and one.default is one.empty]
    if missing := [key for key in needed if key not in given]:
        raise InputError(f"the reward {name} takes {', '.join(missing)}, and the rows have {', '.join(columns)}")
    try:
        found: list[Any] = list(function(**given))
    except Exception as error:
        lines = [f"{frame.filename}:{frame.lineno}" for frame in traceback.extract_tb(error.__traceback__)]
        what = f"{type(error).__name__}: {error}"
        raise InputError(f"the reward {name} failed at {lines[-1]}, for completions of {rows}: {what}") from error
    if len(found) != len(where):
        raise InputError(f"the reward {name} returned {len(found)} numbers for {len(where)} completions of {rows}")
    for n, value in enumerate(found):
        value = value.item() if math.prod(getattr(value, "shape", (0,))) == 1 else value  # of numpy and torch
        if value is not None and not (isinstance(value, Real) and math.isfinite(value)):
            raise InputError(
                f"the reward {name} returned {short(value)} for a completion of {where[n]}, not a finite number or None"
            )
        found[n] = None if value is None else float(value)
    return found


def _load(source: str, file: Path, name: str) -> Function:
    if file.suffix != ".py":
        raise InputError(f"reward_funcs={source}: expected FILE.py, or FILE.py:function")
    if not file.is_file():
        raise InputError(f"reward_funcs={source}: there is no file {file}; give FILE.py, or FILE.py:function")
    spec = importlib.util.spec_from_file_location(f"reward_{file.stem}", file)
    assert spec is not None and spec.loader is not None, "the file ends in .py"
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their modules up
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise InputError(
            f"reward_funcs={source}: {file} cannot be imported: {type(error).__name__}: {error}"
        ) from error
    function: Function | None = getattr(module, name, None)
    if not callable(function):
        names = [key for key, value in vars(module).items() if inspect.isfunction(value)]
        raise InputError(f"reward_funcs={source}: {file} has no function {name}; it has {', '.join(names) or 'none'}")
    return function
