"""Which entries of its argument a function looks at, as far as its bytecode proves it.

Nothing is called. What is not the plain pattern `element["name"]` proves nothing: an element that is handed on, bound
to another name or captured by an inner function, a computed name, a function that looks at its caller's variables.
"""

from __future__ import annotations

import dis
import inspect
from collections.abc import Callable, Sequence
from types import CodeType, FunctionType
from typing import Any

__all__ = ["columns_read"]

_LOADS = {"LOAD_FAST", "LOAD_FAST_BORROW"}
_SEES_ALL = {"locals", "vars", "eval", "exec", "_getframe", "currentframe"}


def columns_read(fn: Callable[..., Any]) -> frozenset[str] | None:
    """The names by which `fn` reads its only positional argument; None where it may use it in another way.

    >>> sorted(columns_read(lambda row: row["a"] + len(row["b"])))
    ['a', 'b']
    >>> columns_read(lambda row: sum(row.values())) is None
    True
    """
    if not isinstance(fn, FunctionType):
        return None
    code = fn.__code__
    takes_more = code.co_flags & (inspect.CO_VARARGS | inspect.CO_VARKEYWORDS)
    if code.co_argcount != 1 or takes_more or _SEES_ALL & set(code.co_names):
        return None
    return _subscripts(code, code.co_varnames[0])


def _subscripts(code: CodeType, element: str) -> frozenset[str] | None:
    if element in code.co_cellvars:
        return None
    steps = list(dis.get_instructions(code))
    names = [_subscript(steps[at : at + 3]) for at, step in enumerate(steps) if _uses(step, element)]
    return None if None in names else frozenset(name for name in names if name is not None)


def _uses(step: dis.Instruction, element: str) -> bool:
    """Whether an instruction touches the local variable; newer Pythons have some that touch two."""
    if "FAST" not in step.opname:
        return False
    return element in (step.argval if isinstance(step.argval, tuple) else (step.argval,))


def _subscript(steps: Sequence[dis.Instruction]) -> str | None:
    """The constant name of `element["name"]`, given the instructions from the use of `element` on."""
    if len(steps) < 3:
        return None
    load, name, get = steps
    is_get = get.opname == "BINARY_SUBSCR" or (get.opname == "BINARY_OP" and get.argrepr == "[]")
    if load.opname not in _LOADS or name.opname != "LOAD_CONST" or not is_get:
        return None
    return name.argval if isinstance(name.argval, str) else None
