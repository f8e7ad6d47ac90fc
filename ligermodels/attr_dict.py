"""A dict with attributes: the outputs of models and of `generate`, and generation configs."""

from collections.abc import Mapping
from typing import Any, ClassVar


class AttrDict(dict):
    """A dict whose `fields` are attributes too, None where absent; an integer indexes the values by position.

    aliases: {another name of a field: the field}, for reading.
    """

    fields: ClassVar[frozenset[str]] = frozenset()
    aliases: ClassVar[Mapping[str, str]] = {}

    def __getattr__(self, name: str) -> Any:
        if name in type(self).fields or name in type(self).aliases:
            return self.get(name)
        raise AttributeError(f"{type(self).__name__} has no field {name!r}")

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, int | slice):
            return self.to_tuple()[key]
        return super().__getitem__(self.aliases.get(key, key))

    def __contains__(self, key: object) -> bool:
        return super().__contains__(self.aliases.get(key, key))  # type: ignore[call-overload]

    def get(self, key: str, default: Any = None) -> Any:
        return super().get(self.aliases.get(key, key), default)

    def to_tuple(self) -> tuple[Any, ...]:
        """The values that are there, in order."""
        return tuple(self.values())
