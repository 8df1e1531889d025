"""What step functions return, as far as it is known before they do: by their code, and from earlier calls."""

from __future__ import annotations

import dis
import functools
import inspect
import weakref
from collections.abc import Callable, Iterable, Iterator
from types import CodeType, FunctionType
from typing import Any, final

import torch

from raydist.nest import Structure, leaves_in

__all__ = ["StructureMemory", "returns_nothing"]


@final
class StructureMemory:
    """Remembers what nest each step function returned, so that a later call need not wait to know it.

    Only functions that can end in one place are remembered: with several `return`s each call may differ.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[Any, ...], Structure] = {}

    def expected(self, fn: Callable[..., Any], given: Iterable[Any] = ()) -> Structure | None:
        """The structure that `fn` will return as far as is known; None where only the result itself can tell.

        Args:
            fn: The function.
            given: Its arguments.
        """
        code = _code_of(fn)
        return None if code is None else self._known.get((code, *_called_by(fn, given)))

    def learn(self, fn: Callable[..., Any], structure: Structure, nest: Any, given: Iterable[Any] = ()) -> None:
        """Remember that `fn` returned `nest`; a None in it may be a value next time."""
        code = _code_of(fn)
        if code is not None and _ends_in_one_place(code) and not any(leaf is None for leaf in leaves_in(nest)):
            self._known[(code, *_called_by(fn, given))] = structure


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


def _called_by(fn: Callable[..., Any], given: Iterable[Any]) -> Iterator[Any]:
    """What `fn` may call that is not in its code: calling another function or module it may return another nest.

    Of its closure (a decorator's wrapper is one code for many functions), of partials, and of its arguments.
    """
    while isinstance(fn, functools.partial):
        yield from _called(fn.args)
        yield from _called(fn.keywords.values())
        fn = fn.func
    yield from _called(_enclosed(_plain_function(fn)))
    yield from _called(given)


def _called(values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        # Only functions are looked into: reading an attribute of a mirrored object waits for all dispatched steps.
        if type(value) is FunctionType:
            yield value.__code__
        elif issubclass(type(value), torch.nn.Module):
            yield weakref.ref(value)


def _plain_function(fn: Callable[..., Any]) -> Callable[..., Any]:
    """The function inside of partials and of a bound method."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    function: Callable[..., Any] = getattr(fn, "__func__", fn)
    return function


def _enclosed(function: Callable[..., Any]) -> list[Any]:
    """What the closure of a function holds."""
    return [getattr(cell, "cell_contents", None) for cell in getattr(function, "__closure__", None) or ()]


def _ends_in_one_place(code: CodeType) -> bool:
    """One return that nothing jumps to: `return a if b else c` jumps to it and may give two kinds of nest."""
    returns = [step for step in dis.get_instructions(code) if step.opname in ("RETURN_VALUE", "RETURN_CONST")]
    return len(returns) == 1 and not returns[0].is_jump_target
