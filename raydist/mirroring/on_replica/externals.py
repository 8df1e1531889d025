"""The objects that functions reference by name and each replica has by itself: strategy, iterators, saves."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, final

__all__ = ["Externals"]


@final
class Externals:
    """Values by name, made when they are first reached.

    Args:
        values: Those that are there.

    >>> found = Externals({"strategy": 1})
    >>> found.add("numbers", list)
    >>> found.value("strategy"), found.value("numbers"), found.drop("numbers"), found.drop("numbers")
    (1, [], [], None)
    """

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = dict(values)
        self._makers: dict[str, Callable[[], Any]] = {}

    def add(self, name: str, make: Callable[[], Any]) -> None:
        """Something may be reached by this name from now on.

        Args:
            name: Of the value.
            make: Makes it, when it is first reached. What this raises, whoever reaches it raises.
        """
        self._makers[name] = make

    def drop(self, name: str) -> Any:
        """Nothing will be reached by this name any more; the value, None where it was never reached."""
        self._makers.pop(name, None)
        return self._values.pop(name, None)

    def value(self, name: str) -> Any:
        """The value of this name."""
        if name not in self._values:
            self._values[name] = self._makers[name]()
        return self._values[name]

    def holds(self, obj: Any) -> bool:
        """Return True if an object is one of the values."""
        return any(obj is known for known in self._values.values())
