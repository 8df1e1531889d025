"""The `state` of an optimizer on a worker, read from the servers when a closure first accesses it."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable
from typing import Any, final

__all__ = ["ServedState"]

_LOOKS = (
    *("__contains__", "__delitem__", "__eq__", "__getitem__", "__ior__", "__iter__", "__len__", "__ne__", "__or__"),
    *("__repr__", "__reversed__", "__ror__", "__setitem__", "clear", "get", "items", "keys", "pop", "popitem"),
    *("setdefault", "update", "values"),
)


@final
class ServedState(defaultdict[Any, Any]):
    """A dict like torch's optimizer state that calls `ask`, if there is one, before the first access of any kind.

    Attributes:
        ask: Fills the dict with the servers' state.

    >>> state = ServedState()
    >>> state.ask = lambda: state.update(a={"step": 1})
    >>> "a" in state, state.ask
    (True, None)
    """

    ask: Callable[[], None] | None = None

    def __init__(self, default_factory: Callable[[], Any] | None = dict, content: Any = ()) -> None:
        super().__init__(default_factory, content)  # torch's own defaultdict copies itself with these arguments

    def open(self) -> None:
        """Fill the dict, if it is not filled yet."""
        ask, self.ask = self.ask, None
        if ask is not None:
            ask()

    def shut(self, ask: Callable[[], None] | None) -> None:
        """Empty the dict, and call `ask` at the next access."""
        self.ask = None
        self.clear()
        self.ask = ask

    def copy(self) -> ServedState:
        """Return a copy without `ask`."""
        return ServedState(self.default_factory, self.items())

    __copy__ = copy

    def __reduce__(self) -> tuple[Any, ...]:
        return defaultdict, (dict,), None, None, iter(self.items())


def _opening(name: str) -> Callable[..., Any]:
    plain = getattr(defaultdict, name)

    @functools.wraps(plain)
    def look(state: ServedState, *args: Any, **kwargs: Any) -> Any:
        state.open()
        return plain(state, *args, **kwargs)

    return look


for _name in _LOOKS:
    setattr(ServedState, _name, _opening(_name))
