"""Find the object that makes a pickle fail, with the path to it from the step function."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import types
from collections.abc import Callable, Iterator
from typing import Any

from raydist.pickling.attribute_table import attributes
from raydist.pickling.by_value import referenced_globals

__all__ = ["find_culprit"]

_DEPTH = 12


def find_culprit(root: Any, can_pickle: Callable[[Any], bool]) -> str:
    """Return the path from `root` to the innermost object that cannot be pickled, and the object's type.

    >>> import threading
    >>> find_culprit({"a": 1, "locks": [threading.Lock()]}, lambda obj: "lock" not in repr(obj))
    "['locks'], [0]: _thread.lock"
    """
    way: list[str] = []
    obj, seen = root, {id(root)}
    while len(way) < _DEPTH:
        for name, child in _named_children(obj):
            if id(child) not in seen and not can_pickle(child):
                seen.add(id(child))
                way.append(name)
                obj = child
                break
        else:
            break
    cls = type(obj)
    return f"{', '.join(way) or 'the object itself'}: {cls.__module__}.{cls.__qualname__}"


def _named_children(obj: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(obj, types.FunctionType):
        yield from _of_function(obj)
    elif isinstance(obj, types.MethodType):
        yield f"self of {obj.__func__.__qualname__}", obj.__self__
        yield f"method {obj.__func__.__qualname__}", obj.__func__
    elif isinstance(obj, functools.partial):
        yield "function of a partial", obj.func
        yield "arguments of a partial", obj.args
        yield "keyword arguments of a partial", obj.keywords
    elif isinstance(obj, dict):
        yield from ((f"[{key!r}]", value) for key, value in obj.items())
    elif isinstance(obj, list | tuple | set | frozenset):
        yield from ((f"[{index}]", value) for index, value in enumerate(obj))
    elif not isinstance(obj, type | types.ModuleType):
        yield from ((f"attribute {key!r} of {type(obj).__name__}", value) for key, value in _attributes(obj).items())


def _attributes(obj: Any) -> dict[str, Any]:
    with contextlib.suppress(AttributeError):  # hasattr would be answered by the referent of a weak proxy
        return attributes(obj)
    names = [field.name for field in dataclasses.fields(obj)] if dataclasses.is_dataclass(obj) else []
    return {name: getattr(obj, name) for name in names if hasattr(obj, name)}


def _of_function(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    name = function.__name__
    for variable, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield f"closure variable {variable!r} of {name}", cell.cell_contents
        except ValueError:  # a variable without a value yet
            continue
    for variable, value in referenced_globals(function).items():
        yield f"global {variable!r} of {name}", value
    for value in function.__defaults__ or ():
        yield f"a default of {name}", value
    for keyword, value in (function.__kwdefaults__ or {}).items():
        yield f"default of {keyword!r} of {name}", value
