"""The JSON schema of a Python function, for the tools of a chat template.

Checked against transformers 5.23, `get_json_schema`. Besides, the arguments of a docstring may name their type, as in
"x (int): ...". The hints `PIL.Image` and `torch.Tensor` are not converted.
"""

import contextlib
import enum
import inspect
import json
import re
import types
import typing
from collections.abc import Callable, Sequence
from typing import Any

from ligermodels.errors import InputError

_TYPES: dict[Any, dict[str, Any]] = {
    int: {"type": "integer"},
    float: {"type": "number"},
    str: {"type": "string"},
    bool: {"type": "boolean"},
    type(None): {"type": "null"},
    list: {"type": "array"},
    tuple: {"type": "array"},
    dict: {"type": "object"},
    Any: {},
}
_SCALARS = (int, float, str, bool, type(None))


def function_schema(function: Callable[..., Any]) -> dict[str, Any]:
    """{"type": "function", "function": {"name": ..., "description": ..., "parameters": ..., "return": ...}}.

    The descriptions are those of the docstring (Google style: Args, Returns), the types those of the hints: str, int,
    float, bool, None, list, tuple, dict, unions, Literal, Enum and Any. An argument's description may end in
    `(choices: ["a", "b"])`. Raises InputError where a docstring, an argument's description or its hint is missing, or
    a hint has no JSON type.
    """
    name = function.__name__
    docstring = inspect.getdoc(function)
    if not docstring:
        raise InputError(f"the tool {name} has no docstring. Next step: describe it and its arguments, under `Args:`.")
    sections = _sections(docstring)
    descriptions = _argument_descriptions(sections["Args"])
    try:
        hints = typing.get_type_hints(function)
    except (NameError, TypeError) as error:
        raise InputError(f"the type hints of the tool {name} cannot be read: {error}.") from error
    properties, required = {}, []
    for at, parameter in enumerate(inspect.signature(function).parameters.values()):
        if parameter.name not in hints:
            if at == 0 and parameter.name in ("self", "cls"):
                continue
            raise InputError(f"the argument {parameter.name} of the tool {name} has no type hint.")
        if parameter.name not in descriptions:
            raise InputError(
                f"the docstring of the tool {name} does not describe the argument {parameter.name}. Next step: a line "
                f"`{parameter.name}: ...` under `Args:`."
            )
        where = f"the argument {parameter.name} of the tool {name}"
        properties[parameter.name] = {
            **_type_schema(hints[parameter.name], where),
            **_description(descriptions[parameter.name], where),
        }
        if parameter.default is parameter.empty:
            required.append(parameter.name)
    parameters: dict[str, Any] = {"type": "object", "properties": properties}
    if required:
        parameters["required"] = required
    found: dict[str, Any] = {"name": name, "description": "\n".join(sections[""]).strip(), "parameters": parameters}
    if "return" in hints:
        # A hint without a JSON type is dropped here: the model never writes the return value.
        with contextlib.suppress(InputError):
            returns = "\n".join(sections["Returns"]).strip()
            found["return"] = _type_schema(hints["return"], name) | ({"description": returns} if returns else {})
    return {"type": "function", "function": found}


def _sections(docstring: str) -> dict[str, list[str]]:
    """The lines under `Args:`, `Returns:` and `Raises:`, and under "" those before."""
    sections: dict[str, list[str]] = {"": [], "Args": [], "Returns": [], "Raises": []}
    current = sections[""]
    for line in docstring.splitlines():
        if header := re.fullmatch(r"\s*(Args|Returns|Raises):(.*)", line):
            current = sections[header[1]]
            line = header[2]
        current.append(line)
    return sections


def _argument_descriptions(lines: Sequence[str]) -> dict[str, str]:
    """{argument: its description on one line}; lines that are indented deeper than the argument belong to it."""
    found: dict[str, str] = {}
    name, depth = "", 0
    for line in filter(str.strip, lines):
        entry = re.match(r"(\s*)(\w+)(?: \([^)]*\))?:\s*(.*)", line)
        if entry and (not found or len(entry[1]) <= depth):
            name, depth = entry[2], len(entry[1])
            found[name] = entry[3].strip()
        elif found:
            found[name] = f"{found[name]} {line.strip()}".strip()
    return found


def _description(text: str, where: str) -> dict[str, Any]:
    """The description, and before it the enum of `(choices: [...])` at its end."""
    choices = re.search(r"\(choices:\s*(.*?)\)\s*$", text, re.IGNORECASE)
    if choices is None:
        return {"description": text}
    try:
        values = json.loads(choices[1])
    except ValueError as error:
        raise InputError(f"the choices of {where} are not a JSON list: {choices[1]}.") from error
    values = [value.strip() if isinstance(value, str) else value for value in values]
    return {"enum": values, "description": text[: choices.start()].strip()}


def _type_schema(hint: Any, where: str) -> dict[str, Any]:
    """The JSON schema of a type hint."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is None and isinstance(hint, type) and issubclass(hint, enum.Enum):
        return _enum([member.value for member in hint], hint, where)
    if origin is typing.Literal:
        return _enum(list(arguments), hint, where)
    if origin in (typing.Union, types.UnionType):
        return _union(arguments, where)
    if origin is None and isinstance(hint, typing.Hashable) and hint in _TYPES:
        return dict(_TYPES[hint])
    if origin in (list, tuple, dict) and not arguments:
        return dict(_TYPES[origin])
    if origin is list:
        return {"type": "array", "items": _type_schema(arguments[0], where)}
    if origin is tuple and len(arguments) > 1 and ... not in arguments:
        return {"type": "array", "prefixItems": [_type_schema(argument, where) for argument in arguments]}
    if origin is dict:
        return {"type": "object", "additionalProperties": _type_schema(arguments[1], where)}
    raise InputError(
        f"{where} has the type hint {hint!r}, which has no JSON schema. Next step: a list in place of a tuple of any "
        "length, or a schema (dict) in place of the function."
    )


def _union(members: Sequence[Any], where: str) -> dict[str, Any]:
    schemas = [_type_schema(member, where) for member in members if member is not type(None)]
    if len(schemas) == 1:
        found = schemas[0]
    elif all(schema.keys() == {"type"} for schema in schemas):
        names = sorted({schema["type"] for schema in schemas})
        found = {"type": names[0] if len(names) == 1 else names}
    else:
        found = {"anyOf": schemas}
    return found | ({"nullable": True} if type(None) in members else {})


def _enum(values: list[Any], hint: Any, where: str) -> dict[str, Any]:
    if not values or any(type(value) not in _SCALARS for value in values):
        raise InputError(f"{where}: the values of {hint!r} must be str, int, float, bool or None.")
    names = list(dict.fromkeys(_TYPES[type(value)]["type"] for value in values))
    return {"type": names[0] if len(names) == 1 else names, "enum": values}
