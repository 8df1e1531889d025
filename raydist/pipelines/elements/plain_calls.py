"""Whether a function does the same at every call, as far as its bytecode proves it.

A function that only calls methods of its arguments and functions of raydist, with numbers that are written down, is
known from one call: there is no branch, nothing is kept, and nothing else is asked.
"""

from __future__ import annotations

import dis
import inspect
from collections.abc import Callable, Collection, Mapping
from types import CellType, FunctionType, ModuleType
from typing import Any

__all__ = ["only_plain_calls"]

_STEPS = {
    *("RESUME", "NOP", "CACHE", "PUSH_NULL", "COPY_FREE_VARS", "RETURN_VALUE", "RETURN_CONST"),
    *("LOAD_FAST", "LOAD_FAST_BORROW", "LOAD_FAST_LOAD_FAST", "LOAD_FAST_BORROW_LOAD_FAST_BORROW"),
    *("LOAD_CONST", "LOAD_SMALL_INT", "BUILD_TUPLE"),
    *("PRECALL", "CALL", "CALL_KW", "KW_NAMES"),
}


def only_plain_calls(fn: Callable[..., Any], methods: Collection[str]) -> int | None:
    """How many positional arguments `fn` takes; None where it may do anything but call these methods.

    >>> only_plain_calls(lambda window: window.batch(5), {"batch"})
    1
    >>> only_plain_calls(lambda window: window.batch(next(sizes)), {"batch"}) is None
    True
    """
    if not isinstance(fn, FunctionType) or fn.__defaults__ or fn.__kwdefaults__ or fn.__code__.co_exceptiontable:
        return None
    code = fn.__code__
    if code.co_flags & (inspect.CO_VARARGS | inspect.CO_VARKEYWORDS) or code.co_kwonlyargcount:
        return None
    cells = dict(zip(code.co_freevars, fn.__closure__ or (), strict=True))
    return code.co_argcount if all(_is_plain(step, fn, cells, methods) for step in dis.get_instructions(code)) else None


def _is_plain(step: dis.Instruction, fn: FunctionType, cells: Mapping[str, CellType], methods: Collection[str]) -> bool:
    if step.opname == "LOAD_GLOBAL":
        return _is_fixed(fn.__globals__.get(step.argval, ...))
    if step.opname == "LOAD_DEREF":
        return step.argval in cells and _is_fixed(_content(cells[step.argval]))
    if step.opname in ("LOAD_ATTR", "LOAD_METHOD"):
        return step.argval in methods
    return step.opname in _STEPS


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not set yet
        return ...


def _is_fixed(value: Any) -> bool:
    """Whether a variable is a number, or something of raydist's."""
    if isinstance(value, ModuleType):
        return value.__name__.partition(".")[0] == "raydist"
    if isinstance(value, type):
        return value.__module__.partition(".")[0] == "raydist"
    return value is None or isinstance(value, int)
