"""A context manager that sets a context variable."""

from __future__ import annotations

from contextvars import ContextVar, Token
from typing import Any, TypeVar, final

__all__ = ["SetInside"]

_T = TypeVar("_T")


@final
class SetInside:
    """A context manager that sets a context variable. An instance may be used again after the block.

    Some instances surround every step. A generator with `contextlib.contextmanager` takes eight Python calls, this
    class takes three; with 64 processes on two cores, a call takes 5 us.

    Args:
        variable: The context variable.
        value: The value within the block.
        *others: Further instances to enter in the same block; they must not be in use otherwise.

    >>> from contextvars import ContextVar
    >>> color = ContextVar("color", default="white")
    >>> with SetInside(color, "red"):
    ...     color.get()
    'red'
    >>> color.get()
    'white'
    """

    __slots__ = ("_pairs", "_tokens")

    def __init__(self, variable: ContextVar[_T], value: _T, *others: SetInside) -> None:
        self._pairs: tuple[tuple[ContextVar[Any], Any], ...] = (
            (variable, value),
            *(pair for other in others for pair in other._pairs),
        )
        self._tokens: list[Token[Any]] = []

    def __enter__(self) -> None:
        for variable, value in self._pairs:
            self._tokens.append(variable.set(value))

    def __exit__(self, *_: object) -> None:
        while self._tokens:
            token = self._tokens.pop()
            token.var.reset(token)
