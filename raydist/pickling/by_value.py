"""Find the functions and classes that must be pickled by value: the user's ones that reference a mirrored object.

Pickle writes a function of an importable module as its name; a replica would import the module and train the model of
*that* import. This module therefore walks the globals, closure, defaults and attributes of a function, through
containers, instances, methods and further functions, until it meets a mirrored object.

Functions of installed packages are the same on every replica: they are pickled by name and not walked.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import gc
import os
import sys
import sysconfig
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, final

_SUITES = "raydist.testing."  # models and steps in there count as a user's
_PACKAGE_FOLDERS = frozenset({"site-packages", "dist-packages"})
_STANDARD_LIBRARY = tuple(os.path.join(sysconfig.get_path(kind), "") for kind in ("stdlib", "platstdlib"))
_RAYDIST = os.path.join(os.path.dirname(os.path.dirname(__file__)), "")  # may be an editable install
_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_LEAVES = (*_PLAIN, types.CodeType)


def is_installed(module_name: str | None) -> bool:
    """Return True if a module belongs to an installed package, the standard library, Python or raydist.

    Modules beside the script and editable installs are the user's own.

    >>> is_installed("torch.nn"), is_installed("math"), is_installed("raydist.core.values"), is_installed("__main__")
    (True, True, True, False)
    """
    name = module_name or ""
    if name not in sys.modules or name == "__main__" or name.startswith(_SUITES):
        return False
    held = _namespace(sys.modules[name])
    file = held.get("__file__") or next(iter(held.get("__path__") or ()), None)
    if isinstance(file, str):
        return _is_package_file(file) or _is_in_distribution(file)
    if getattr(held.get("__spec__"), "origin", None) in ("built-in", "frozen"):
        return True
    parent = name.rpartition(".")[0]  # a module made by the parent's C code or at run time (torch.ops)
    return bool(parent) and is_installed(parent)


@functools.lru_cache(maxsize=4096)
def _is_package_file(file: str) -> bool:
    if not _PACKAGE_FOLDERS.isdisjoint(file.replace(os.sep, "/").split("/")):
        return True
    return file.startswith((*_STANDARD_LIBRARY, _RAYDIST))


@functools.lru_cache(maxsize=4096)
def _is_in_distribution(file: str) -> bool:
    """Return True if pip has installed the file, as with `--target`, into a folder of any name."""
    path = Path(file)
    return any(path.relative_to(folder).parts[0] in _installed_into(folder) for folder in path.parents)


@functools.lru_cache(maxsize=4096)
def _installed_into(folder: Path) -> frozenset[str]:
    """Return the top-level names in the RECORD files of a folder's distributions; none for an editable install."""
    records = [record.read_text(errors="replace") for record in folder.glob("*.dist-info/RECORD")]
    return frozenset(line.split(",")[0].split("/")[0] for record in records for line in record.splitlines())


def _is_importable(name: str | None) -> bool:
    """Return False for a module that no import finds: one made at run time, or loaded from a file by its path."""
    held = _namespace(sys.modules.get(name or ""))
    file = held.get("__file__")
    return not isinstance(file, str) or _is_found(held["__name__"], file)


@functools.lru_cache(maxsize=4096)
def _is_found(name: str, file: str) -> bool:
    path = _namespace(sys.modules.get(name.rpartition(".")[0])).get("__path__")
    finders = (finder for finder in sys.meta_path if hasattr(finder, "find_spec"))  # very old finders have none
    specs = (finder.find_spec(name, path) for finder in finders)
    return any(spec is not None and spec.origin == file for spec in specs)


def is_installed_name(obj: types.FunctionType | type) -> bool:
    """Return True if the name of a function or class gives the same object wherever its package is installed.

    False for a class that a package creates at run time, and for a user's function that replaces a package's function
    (it may have the name, but not the code).
    """
    module = getattr(obj, "__module__", None)
    return isinstance(module, str) and is_installed(module) and not _is_users_function(obj) and has_name(obj)


def has_name(obj: Any) -> bool:
    """Return True if an object is found in its module under its name."""
    found: Any = sys.modules.get(obj.__module__)
    for part in obj.__qualname__.split("."):
        found = _namespace(found).get(part)  # not by `__getattr__`: a lazy module would import the name
        found = found.__func__ if isinstance(found, staticmethod | classmethod) else found
    return found is obj


def replaced_methods(cls: type) -> dict[str, Any]:
    """Return the functions that the user's program has put into an installed class."""
    held = vars(cls) if is_installed_name(cls) else {}
    return {name: value for name, value in held.items() if _is_users_function(getattr(value, "__func__", value))}


def _is_users_function(obj: Any) -> bool:
    """Return True for a function whose globals are those of a user's module, whatever its `__module__` says."""
    if type(obj) is not types.FunctionType:
        return False
    module = _module_of_globals(obj)
    return bool(module) and not is_installed(module)


def globals_are_installed(function: types.FunctionType) -> bool:
    """Return True if the globals of a function are those of a module of an installed package."""
    return is_installed(_module_of_globals(function))


def _module_of_globals(function: types.FunctionType) -> str:
    """Return the name of the module whose globals a function has; empty if they belong to no module."""
    name = function.__globals__.get("__name__", "")
    return name if _namespace(sys.modules.get(name)) is function.__globals__ else ""


def _namespace(obj: Any) -> Mapping[str, Any]:
    """Return the `__dict__` of an object without calling `__getattr__` or `__getattribute__`; empty if it has none."""
    try:
        held: Mapping[str, Any] = object.__getattribute__(obj, "__dict__")
    except AttributeError:
        return {}
    return held


def referenced_globals(function: types.FunctionType) -> dict[str, Any]:
    """Return the globals that the code of `function`, and of functions nested in it, names."""
    names, _ = global_names(function.__code__)
    return {name: function.__globals__[name] for name in names if name in function.__globals__}


def closure_variables(function: types.FunctionType) -> dict[str, Any]:
    """Return the variables in the closure of `function` that have a value already."""
    found: dict[str, Any] = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):
            found[name] = cell.cell_contents
    return found


@functools.lru_cache(maxsize=4096)
def global_names(code: types.CodeType) -> tuple[tuple[str, ...], frozenset[str]]:
    """Return the names of all globals that code and nested code use, and of the globals that they write."""
    steps = [step for step in dis.get_instructions(code) if step.opname.endswith(("_GLOBAL", "_GLOBALS", "_NAME"))]
    names = {step.argval: None for step in steps}
    written = {step.argval for step in steps if step.opname.startswith(("STORE_", "DELETE_"))}
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names.update(dict.fromkeys(global_names(constant)[0]))
            written |= global_names(constant)[1]
    return tuple(names), frozenset(written)


@final
class ByValuePolicy:
    """The decisions about by-value pickling in one pickle; an assignment to a global may change them later.

    `is_mirrored` returns True for an object that is, or would become, mirrored.
    """

    def __init__(self, is_mirrored: Callable[[Any], bool]) -> None:
        self._is_mirrored = is_mirrored
        self._answers: dict[int, bool] = {}
        self._kept: list[Any] = []  # keeps objects alive, so that no id is reused
        self._named: dict[str, set[str]] = {}  # by module: globals that the user's functions in it name

    def by_value(self, obj: types.FunctionType | type) -> bool:
        """Return True if a function or class must not be pickled as a name."""
        name = getattr(obj, "__module__", None)
        if name == "__main__" or is_installed_name(obj):  # cloudpickle pickles __main__ by value anyway
            return False
        # By the name of a replaced function, a replica would find the package's own function.
        taken_over = is_installed(name) and _is_users_function(obj)
        return taken_over or not _is_importable(name) or self.reaches(obj)

    def module_values(self, module: types.ModuleType) -> dict[str, Any]:
        """Return the globals of a user's module that must be pickled by value."""
        if is_installed(module.__name__):
            return {}
        self._note_globals(module)
        return {name: value for name, value in vars(module).items() if name[:2] != "__" and self.reaches(value)}

    def settings(self) -> list[tuple[str, dict[str, Any]]]:
        """Return numbers and strings in the user's modules that the functions met so far name.

        Functions are pickled by name, and the replicas' own imports do not have values that the program has set since.
        A global that a function of the module writes is left to the replica.
        """
        found = []
        for module, names in sorted(self._named.items()):
            held = _namespace(sys.modules.get(module))
            functions = [value for value in list(held.values()) if type(value) is types.FunctionType]
            own = {name for function in functions for name in global_names(function.__code__)[1]}
            values = {name: held[name] for name in sorted(names - own) if type(held.get(name, held)) in _PLAIN}
            found += [(module, values)] if values else []
        return found

    def _note_globals(self, obj: Any) -> None:
        """Record the globals that a function names (all globals for a module), if replicas import the module."""
        if type(obj) is types.FunctionType:
            module, names = _module_of_globals(obj), global_names(obj.__code__)[0]
        elif type(obj) is types.ModuleType:
            module, names = obj.__name__, tuple(name for name in vars(obj) if name[:2] != "__")
        else:
            return
        if module and module != "__main__" and not is_installed(module) and _is_importable(module):
            self._named.setdefault(module, set()).update(names)

    def reaches(self, root: Any) -> bool:
        """Return True if a mirrored object can be reached from `root`."""
        if id(root) in self._answers:
            return self._answers[id(root)]
        seen: set[int] = set()
        stack = [root]
        found = False
        while stack and not found:
            obj = stack.pop()
            if type(obj) in _LEAVES or id(obj) in seen:
                continue
            seen.add(id(obj))
            found = self._answers.get(id(obj), False) or self._is_mirrored(obj)
            if id(obj) not in self._answers:
                self._note_globals(obj)
                stack.extend(references_of(obj))
        self._kept.append(root)
        self._answers[id(root)] = found
        if not found:
            self._answers.update(dict.fromkeys(seen, False))
        return found


def references_of(obj: Any) -> Iterator[Any]:
    """Yield the objects that `obj` references, without running the program's code (`__getattr__`, `__iter__`, ...)."""
    cls: Any = type(obj)  # isinstance would read `obj.__class__`, which a proxy may fake
    for kind, references in _CODE:
        if issubclass(cls, kind):
            yield from references(obj)
            return
    for kind, references in _CONTAINERS:
        if issubclass(cls, kind):
            yield from references(obj)
    if cls.__module__ != "builtins":
        yield cls
        yield from list(_namespace(obj).values())
        yield from _slots(obj)


def _slots(obj: Any) -> Iterator[Any]:
    for base in type(obj).__mro__:
        for slot in list(vars(base).values()) if "__slots__" in vars(base) else ():
            if type(slot) is types.MemberDescriptorType:
                with contextlib.suppress(AttributeError):  # a slot without a value
                    yield slot.__get__(obj)


def _function_references(function: types.FunctionType) -> Iterator[Any]:
    if is_installed_name(function):
        return
    if not globals_are_installed(function):
        yield from referenced_globals(function).values()
    yield from function.__closure__ or ()
    yield from function.__defaults__ or ()
    yield from (function.__kwdefaults__ or {}).values()
    yield from vars(function).values()


def _cell(cell: types.CellType) -> Iterator[Any]:
    with contextlib.suppress(ValueError):  # a variable that has no value yet
        yield cell.cell_contents


def _class_references(cls: type) -> Iterator[Any]:
    if is_installed_name(cls):
        return
    for value in list(vars(cls).values()):
        if isinstance(value, staticmethod | classmethod):
            yield value.__func__
        elif isinstance(value, property):
            yield from (value.fget, value.fset, value.fdel)
        else:
            yield value
    yield from cls.__bases__
    yield type(cls)


def _module_references(module: types.ModuleType) -> Iterator[Any]:
    if not is_installed(module.__name__):
        yield from [value for name, value in vars(module).items() if name[:2] != "__"]


def _dict_references(held: dict[Any, Any]) -> Iterator[Any]:
    if gc.is_tracked(held):  # an untracked dict holds only numbers and strings, as a vocabulary
        yield from list(dict.keys(held))
        yield from list(dict.values(held))


_CODE: tuple[tuple[type, Callable[[Any], Iterable[Any]]], ...] = (
    (types.FunctionType, _function_references),
    (type, _class_references),
    (types.ModuleType, _module_references),
    (types.MethodType, lambda method: (method.__func__, method.__self__)),
    (types.BuiltinFunctionType, lambda method: (method.__self__,)),
    (types.CellType, _cell),
)
_CONTAINERS: tuple[tuple[type, Callable[[Any], Iterable[Any]]], ...] = (
    (dict, _dict_references),
    (list, lambda held: list(list.__iter__(held))),
    (tuple, tuple.__iter__),
    (set, set.__iter__),
    (frozenset, frozenset.__iter__),
    (deque, lambda held: list(deque.__iter__(held))),
    (functools.partial, lambda partial: (partial.func, partial.args, partial.keywords)),
)
