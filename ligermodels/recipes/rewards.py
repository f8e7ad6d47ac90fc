"""Reward functions: plain Python functions with the arguments of TRL's, which work here unchanged.

    def reward(prompts, completions, completion_ids, **columns) -> list[float | None]

Each argument is a list with an entry for each completion: the prompt as in the row, the completion (a text, or, if the
prompt has messages, [{"role": "assistant", "content": text}]), its ids, and the row's other columns by their names. A
function may leave out arguments that it does not read. None: this function does not judge the completion.

Of an answer in the harmony format (gpt-oss) the content is the channel "final". The message also has `thinking`, the
channel "analysis", and `tool_calls`, where there are some: as TRL gives it with its response template of gpt-oss.
"""

import inspect
import math
import runpy
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Real
from pathlib import Path
from reprlib import repr as short
from typing import Any

from ligermodels.errors import InputError
from ligermodels.recipes.options import IN_MEMORY, check_named

Function = Callable[..., Sequence[float | None]]
_OTHERS = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


class Rewards:
    """Several reward functions, whose weighted sum is the reward.

    functions: by the names that logs and errors use. weights: of the functions, by default 1 each.
    """

    def __init__(self, functions: Mapping[str, Function], weights: Sequence[float] = ()):
        self.functions, self.weights = dict(functions), list(weights) or [1.0] * len(functions)

    @classmethod
    def load(
        cls, sources: Sequence[str], weights: Sequence[float] = (), in_memory: Mapping[str, Function] | None = None
    ) -> "Rewards":
        """Runs files and takes their functions: "FILE.py:function", or "FILE.py" for `reward`. Raises InputError.

        in_memory: functions that Python gave, by the sources that stand for them.
        """
        functions: dict[str, Function] = {}
        for source in sources:
            if in_memory and source in in_memory:
                functions[source.removeprefix(IN_MEMORY)] = in_memory[source]
                continue
            check_named(source, "reward_funcs")
            path, _, name = (source, "", "reward") if source.endswith(".py") else source.rpartition(":")
            file = Path(path).expanduser()
            if not source or file.suffix != ".py" or not file.is_file():
                raise InputError(f"reward_funcs={source}: there is no file {file}; give FILE.py, or FILE.py:function")
            try:
                values = runpy.run_path(str(file), run_name=f"reward_{file.stem}")
            except Exception as error:
                what = f"{type(error).__name__}: {error}"
                raise InputError(f"reward_funcs={source}: {file} cannot be imported: {what}") from error
            if not callable(function := values.get(name)):
                known = ", ".join(key for key, value in values.items() if inspect.isfunction(value)) or "none"
                raise InputError(f"reward_funcs={source}: {file} has no function {name}; it has {known}")
            functions[name if name not in functions else source] = function
        return cls(functions, weights)

    def judge(self, completions: Sequence[Any], *, chat: bool) -> None:
        """Sets `rewards`, by function, and `reward` of each completion. Raises InputError."""
        if not completions:
            return
        prompts = [completion.prompt for completion in completions]
        texts = [completion.text for completion in completions]
        where = [prompt.where for prompt in prompts]
        names = dict.fromkeys(name for prompt in prompts for name in prompt.columns if name != "completion")
        arguments: dict[str, list[Any]] = {name: [prompt.columns.get(name) for prompt in prompts] for name in names}
        arguments["prompts"] = [prompt.prompt for prompt in prompts]
        arguments["completions"] = [[completion.message] for completion in completions] if chat else texts
        arguments["completion_ids"] = [completion.ids for completion in completions]
        numbers = {name: _numbers(name, function, arguments, where) for name, function in self.functions.items()}
        for n, completion in enumerate(completions):
            completion.rewards = {name: numbers[name][n] for name in numbers}
            if set(completion.rewards.values()) == {None}:
                raise InputError(f"{where[n]}: no reward function gave its completion {short(texts[n])} a number")
            weighted = zip(self.weights, completion.rewards.values(), strict=True)
            completion.reward = sum(weight * value for weight, value in weighted if value is not None)


def _numbers(
    name: str, function: Function, arguments: dict[str, list[Any]], where: Sequence[str]
) -> list[float | None]:
    """The result of one function: a number or None for each completion. Raises InputError."""
    parameters, rows = inspect.signature(function).parameters, f"{where[0]} to {where[-1]}"
    named = {key: parameter for key, parameter in parameters.items() if parameter.kind not in _OTHERS}
    needed = {key for key, parameter in named.items() if parameter.default is parameter.empty}
    if missing := sorted(needed - arguments.keys()):
        raise InputError(
            f"the reward {name} needs the columns {', '.join(missing)}; the rows have {', '.join(arguments)}"
        )
    if not any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
        arguments = {key: values for key, values in arguments.items() if key in parameters}
    try:
        returned: Any = function(**arguments)
        numbers: list[Any] = list(returned) if isinstance(returned, Iterable) else []
    except Exception as error:
        frame, what = traceback.extract_tb(error.__traceback__)[-1], f"{type(error).__name__}: {error}"
        raise InputError(
            f"the reward {name} failed at {frame.filename}:{frame.lineno}, for completions of {rows}: {what}"
        ) from error
    if len(numbers) != len(where):
        what = f"{short(returned)} for completions of {rows}, not a list of {len(where)} numbers"
        raise InputError(f"the reward {name} returned {what}")
    for n, value in enumerate(numbers):
        value = value.item() if math.prod(getattr(value, "shape", (0,))) == 1 else value  # of numpy and torch
        if value is not None and not (isinstance(value, Real) and math.isfinite(value)):
            raise InputError(f"the reward {name} returned {short(value)} for {where[n]}, not a finite number or None")
        numbers[n] = None if value is None else float(value)
    return numbers
