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
            name, function = _load(source)
            functions[name if name not in functions else source] = function
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


def _numbers(name: str, function: Function, given: Mapping[str, list[Any]], where: Sequence[str]) -> list[float | None]:
    """The numbers of one function, a number or None for each completion. Raises InputError."""
    try:
        returned: Any = _call(function, given)
        found = None if returned is None or isinstance(returned, str | Mapping) else list(returned)
    except Exception as error:
        row = _failing_row(function, given, where)
        what = f"{type(error).__name__}: {error}"
        raise InputError(f"the reward {name} failed{_line(function, error)}{row}: {what}") from error
    own = f"the reward {name}{_line(function)} returned"
    if found is None:
        raise InputError(f"{own} {short(returned)}; it must return a list with a number for each completion")
    if len(found) != len(where):
        raise InputError(f"{own} {len(found)} numbers for {len(where)} completions, the first of {where[0]}")
    for n, value in enumerate(found):
        value = value.item() if math.prod(getattr(value, "shape", (0,))) == 1 else value  # of numpy and torch
        if value is not None and not (isinstance(value, Real) and math.isfinite(value)):
            raise InputError(
                f"{own} {short(value)} for a completion of {where[n]}; it must be a finite number, or None"
            )
        found[n] = None if value is None else float(value)
    return found


def _call(function: Function, given: Mapping[str, list[Any]]) -> Sequence[float | None]:
    parameters = inspect.signature(function).parameters
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
        return function(**given)
    return function(**{name: values for name, values in given.items() if name in parameters})


def _failing_row(function: Function, given: Mapping[str, list[Any]], where: Sequence[str]) -> str:
    """The row whose completion alone makes the function fail."""
    for n, row in enumerate(where):
        try:
            list(_call(function, {key: values[n : n + 1] for key, values in given.items()}))
        except Exception:
            return f" at {row}, for the completion {short(given['completions'][n])}"
    return ""


def _line(function: Function, error: BaseException | None = None) -> str:
    """ " (FILE:LINE)": where in the function's file the error was raised, or where the function begins."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    if code is None:
        return ""
    frames = traceback.extract_tb(error.__traceback__) if error is not None else []
    lines = [frame.lineno for frame in frames if frame.filename == code.co_filename]
    return f" ({code.co_filename}:{(lines or [code.co_firstlineno])[-1]})"


def _load(source: str) -> tuple[str, Function]:
    """The function's name and itself."""
    path, _, name = (source, "", "reward") if source.endswith(".py") else source.rpartition(":")
    file = Path(path).expanduser()
    if not file.is_file():
        raise InputError(f"reward={source}: there is no file {path or source}; give FILE.py, or FILE.py:function")
    spec = importlib.util.spec_from_file_location(f"reward_{file.stem}", file)
    assert spec is not None and spec.loader is not None, "the file ends in .py"
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their modules up
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == spec.origin]
        at = f", line {lines[-1]}" if lines else ""  # a syntax error names its own
        what = f"{type(error).__name__}: {error}"
        raise InputError(f"reward={source}: {path} cannot be imported{at}: {what}") from error
    function = getattr(module, name, None)
    if not callable(function):
        names = [key for key, value in vars(module).items() if inspect.isfunction(value)]
        raise InputError(f"reward={source}: {path} has no function {name}; it has {', '.join(names) or 'none'}")
    return name, function
