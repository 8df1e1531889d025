"""Which functions and classes must be shipped by value: those that reach a mirrored object.

Pickle writes a function of an importable module as its name, and the replica would import the module and train *that*
import's model. So the globals, closure, defaults and attributes of a function are walked, through containers,
instances, methods and further functions, until a mirrored object is met. Libraries that cannot hold a user's objects
are not entered.
"""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any, final

__all__ = ["Reach", "is_library", "is_users", "referenced_globals", "references_of"]

_LIBRARIES = frozenset(
    {"torch", "torchvision", "torchmetrics", "torchaudio", "numpy", "pyarrow", "pandas", "scipy", "sklearn", "ray"}
    | {"raydist", "cloudpickle", "tqdm", "matplotlib", "PIL", "pytest", "_pytest"}
)
_SUITES = "raydist.testing."  # models and steps in there stand for a user's
_LEAVES = (bool, int, float, complex, str, bytes, type(None), types.CodeType)


def is_library(module_name: str | None) -> bool:
    """Whether a module belongs to a library, which cannot hold a user's objects.

    >>> is_library("raydist.values"), is_library("raydist.testing.value_checks"), is_library("my_model")
    (True, False, False)
    """
    name = module_name or ""
    if name.startswith(_SUITES):
        return False
    top = name.partition(".")[0]
    return top in _LIBRARIES or (top in sys.stdlib_module_names and top != "__main__")


def is_users(module: types.ModuleType) -> bool:
    """Whether a module is the user's own: installed packages are large, and hold no model of the program's."""
    path = getattr(module, "__file__", None) or ""
    return not is_library(module.__name__) and "site-packages" not in path and "dist-packages" not in path


def referenced_globals(function: types.FunctionType) -> dict[str, Any]:
    """The globals that the code of `function`, and of functions nested in it, names."""
    names = _global_names(function.__code__)
    return {name: function.__globals__[name] for name in names if name in function.__globals__}


@functools.lru_cache(maxsize=4096)
def _global_names(code: types.CodeType) -> tuple[str, ...]:
    # Attribute names are among co_names too: a few needless look-ups, never a missed one.
    names = dict.fromkeys(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names.update(dict.fromkeys(_global_names(constant)))
    return tuple(names)


@final
class Reach:
    """Answers for one pickling; the answers may change with the next assignment to a global.

    Args:
        is_mirrored: Whether an object is, or would become, a mirrored one.
    """

    def __init__(self, is_mirrored: Callable[[Any], bool]) -> None:
        self._is_mirrored = is_mirrored
        self._answers: dict[int, bool] = {}
        self._kept: list[Any] = []  # so that no id is used twice

    def by_value(self, obj: types.FunctionType | type) -> bool:
        """Whether a function or class must not be pickled as a name."""
        name = getattr(obj, "__module__", None)
        if name == "__main__" or is_library(name):  # cloudpickle ships what is in __main__ by value anyway
            return False
        return self.reaches(obj)

    def module_values(self, module: types.ModuleType) -> dict[str, Any]:
        """The globals of a user's module that must not be the ones of the replica's own import."""
        if not is_users(module):
            return {}
        return {name: value for name, value in vars(module).items() if name[:2] != "__" and self.reaches(value)}

    def reaches(self, root: Any) -> bool:
        """Whether a mirrored object can be reached from `root`."""
        if id(root) in self._answers:
            return self._answers[id(root)]
        seen: set[int] = set()
        stack = [root]
        found = False
        while stack and not found:
            obj = stack.pop()
            if isinstance(obj, _LEAVES) or id(obj) in seen:
                continue
            seen.add(id(obj))
            found = self._answers.get(id(obj), False) or self._is_mirrored(obj)
            if id(obj) not in self._answers:
                stack.extend(references_of(obj))
        self._kept.append(root)
        self._answers[id(root)] = found
        if not found:
            self._answers.update(dict.fromkeys(seen, False))
        return found


def references_of(obj: Any) -> Iterator[Any]:
    """What `obj` leads to."""
    for kind, references in _REFERENCES:
        if isinstance(obj, kind):
            yield from references(obj)
            return
    if not is_library(type(obj).__module__):
        yield type(obj)
        yield from getattr(obj, "__dict__", {}).values()


def _function_references(function: types.FunctionType) -> Iterator[Any]:
    if is_library(function.__module__) and not hasattr(function, "__wrapped__"):
        return
    yield from referenced_globals(function).values()
    for cell in function.__closure__ or ():
        yield from _cell(cell)
    yield from function.__defaults__ or ()
    yield from (function.__kwdefaults__ or {}).values()
    yield from vars(function).values()


def _cell(cell: types.CellType) -> Iterator[Any]:
    try:
        yield cell.cell_contents
    except ValueError:  # a variable that has no value yet
        return


def _class_references(cls: type) -> Iterator[Any]:
    if is_library(cls.__module__):
        return
    for value in vars(cls).values():
        if isinstance(value, staticmethod | classmethod):
            yield value.__func__
        elif isinstance(value, property):
            yield from (accessor for accessor in (value.fget, value.fset, value.fdel) if accessor is not None)
        else:
            yield value
    yield from cls.__bases__


def _module_references(module: types.ModuleType) -> Iterator[Any]:
    if is_users(module):
        yield from (value for name, value in vars(module).items() if name[:2] != "__")


_REFERENCES: tuple[tuple[Any, Callable[[Any], Iterable[Any]]], ...] = (
    (types.FunctionType, _function_references),
    (types.MethodType, lambda method: (method.__func__, method.__self__)),
    (functools.partial, lambda partial: (partial.func, partial.args, partial.keywords)),
    (type, _class_references),
    (types.ModuleType, _module_references),
    (dict, lambda held: list(held.values())),
    ((list, tuple, set, frozenset), list),
    (types.CellType, _cell),
)
