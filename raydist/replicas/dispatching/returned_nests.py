"""What step functions return, as far as it is known before they do: by their code, and from earlier calls."""

from __future__ import annotations

import dis
import functools
import inspect
from collections.abc import Callable, Iterable
from types import CodeType
from typing import Any, final

from raydist.nest import Structure, leaves_in
from raydist.replicas.dispatching.nest_keys import nest_key

__all__ = ["StructureMemory", "returns_nothing"]


_MOST = 1024
"""Functions that are remembered, and nests of one function that returns others for other numbers."""


@final
class StructureMemory:
    """Remembers what nest each step function returned, so that a later call need not wait to know it.

    Only functions that can end in one place are remembered: with several `return`s each call may differ. And only where
    all that may shape the nest is told apart: what a function encloses, its defaults and its arguments (`nest_key`).
    """

    def __init__(self) -> None:
        self._known: dict[tuple[Any, ...], _NestsByNumbers] = {}

    def expected(self, fn: Callable[..., Any], given: Iterable[Any] = ()) -> Structure | None:
        """The structure that `fn` will return as far as is known; None where only the result itself can tell.

        Args:
            fn: The function.
            given: Its arguments.
        """
        key = nest_key(fn, given) if self._known else None
        known = None if key is None else self._known.get(key.parts)
        return None if key is None or known is None else known.expected(key.numbers)

    def learn(self, fn: Callable[..., Any], structure: Structure, nest: Any, given: Iterable[Any] = ()) -> None:
        """Remember that `fn` returned `nest`; a None in it may be a value next time."""
        code = _code_of(fn)
        if code is None or not _ends_in_one_place(code) or any(leaf is None for leaf in leaves_in(nest)):
            return
        key = nest_key(fn, given)
        if key is not None:
            _make_room(self._known)
            self._known.setdefault(key.parts, _NestsByNumbers()).learn(key.numbers, structure)


@final
class _NestsByNumbers:
    """The nests of calls that differ in numbers alone: as long as all are alike, by what has been another number."""

    def __init__(self) -> None:
        self._known: dict[tuple[Any, ...], Structure] = {}
        self._seen: list[set[Any]] = []  # the numbers in each place

    def expected(self, numbers: tuple[Any, ...]) -> Structure | None:
        """That of the same numbers; or that of all, where each number is in a place where it did not matter."""
        exact = self._known.get(numbers)
        if exact is not None or not self._seen:
            return exact
        known = all(len(seen) > 1 or number in seen for seen, number in zip(self._seen, numbers, strict=True))
        return next(iter(self._known.values())) if known else None

    def learn(self, numbers: tuple[Any, ...], structure: Structure) -> None:
        _make_room(self._known)
        self._known[numbers] = structure
        if all(structure == other for other in self._known.values()):
            self._seen = [set(seen) for seen in zip(*self._known, strict=True)]
        else:
            self._seen = []  # one of them shapes the nest


def _make_room(known: dict[Any, Any]) -> None:
    if len(known) >= _MOST:
        del known[next(iter(known))]  # the eldest


def returns_nothing(fn: Callable[..., Any]) -> bool:
    """Whether `fn` can return only None, going by its code: then a call's result is known before it ends.

    >>> def train_step(batch):
    ...     print(batch)
    >>> returns_nothing(train_step), returns_nothing(lambda batch: batch)
    (True, False)
    """
    code = _code_of(fn)
    return code is not None and _code_returns_nothing(code)


@functools.lru_cache(maxsize=1024)
def _code_returns_nothing(code: CodeType) -> bool:
    if code.co_flags & (inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR):
        return False
    steps = list(dis.get_instructions(code))
    for before, step in zip(steps, steps[1:], strict=False):
        is_none = before.opname == "LOAD_CONST" and before.argval is None and not step.is_jump_target
        if step.opname == "RETURN_VALUE" and not is_none:
            return False
    return all(step.argval is None for step in steps if step.opname == "RETURN_CONST")


def _code_of(fn: Callable[..., Any]) -> CodeType | None:
    code = getattr(_plain_function(fn), "__code__", None)
    return code if isinstance(code, CodeType) else None


def _plain_function(fn: Callable[..., Any]) -> Callable[..., Any]:
    """The function inside of partials and of a bound method."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    function: Callable[..., Any] = getattr(fn, "__func__", fn)
    return function


def _ends_in_one_place(code: CodeType) -> bool:
    """One return that nothing jumps to: `return a if b else c` jumps to it and may give two kinds of nest."""
    returns = [step for step in dis.get_instructions(code) if step.opname in ("RETURN_VALUE", "RETURN_CONST")]
    return len(returns) == 1 and not returns[0].is_jump_target
