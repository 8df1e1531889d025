"""The `state` of an optimizer on a worker: what servers remember, asked for where a closure first looks."""

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
    """As torch has it, but that `ask` is called before the first access of any kind, where there is one.

    Attributes:
        ask: Lets it hold what it is to show.

    >>> state = ServedState()
    >>> state.ask = lambda: state.update(a={"step": 1})
    >>> "a" in state, state.ask
    (True, None)
    """

    ask: Callable[[], None] | None = None

    def __init__(self, default_factory: Callable[[], Any] | None = dict, content: Any = ()) -> None:
        super().__init__(default_factory, content)  # as torch's own, which copies itself so

    def open(self) -> None:
        """Have it hold what it is to show."""
        ask, self.ask = self.ask, None
        if ask is not None:
            ask()

    def shut(self, ask: Callable[[], None] | None) -> None:
        """Hold nothing, and ask for it again when somebody looks."""
        self.ask = None
        self.clear()
        self.ask = ask

    def copy(self) -> ServedState:
        """Another one, which asks nobody."""
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
