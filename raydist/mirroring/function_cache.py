"""The step functions that the driver has sent to a replica, and the check that they do not mutate captured copies.

A step that appends to a captured list changes the replica's copy, which nobody reads. That is worth one warning. The
check takes some ten microseconds, so it runs after the first, the tenth, the hundredth, ... run of a function.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import itertools
import sys
import types
import zlib
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping
from typing import Any, final

import numpy as np
import torch

from raydist.compat.torch_internals import num_writes
from raydist.core.errors import FailedPreconditionError
from raydist.mirroring.messages import StepPayload
from raydist.pickling.attribute_table import attributes, is_plain
from raydist.pickling.by_value import closure_variables, is_installed, referenced_globals

_MOST_CONTAINERS = 1_000
_MOST_ITEMS = 200
_MOST_BYTES = 1 << 16


@final
class FunctionCache:
    """The unpickled step functions of one replica: the other end of `SentFunctions`.

    Rank 0 checks after runs whether the function has changed copies.

    `is_shared` returns True for an object that is not a copy (a mirrored one, the strategy).
    """

    def __init__(self, loads: Callable[[bytes], Any], is_shared: Callable[[Any], bool], rank: int) -> None:
        self._loads = loads
        self._is_shared = is_shared
        self._rank = rank
        self._functions: dict[bytes, Any] = {}
        self._pickles: dict[bytes, bytes] = {}
        self._checks: dict[bytes, ClosureMutationCheck] = {}
        self._running: ClosureMutationCheck | None = None
        self._remarks: dict[str, bool] = {}  # with True until the driver is told

    def function_of(self, payload: StepPayload) -> Any:
        """Return the function of a payload, which runs next."""
        self._running = None
        digest = payload.digest
        if not digest:
            return self._loads(payload.function)
        if payload.function:
            self._add(digest, payload.function)
        if digest in self._pickles and digest not in self._functions:
            self._add(digest, self._pickles[digest])
        if digest not in self._functions:
            raise FailedPreconditionError(
                f"raydist bug: replica {self._rank} was sent the digest of a function that it does not have."
            )
        self._running = self._checks.get(digest)
        return self._functions[digest]

    def _add(self, digest: bytes, pickled: bytes) -> None:
        self._pickles[digest] = pickled
        self._functions[digest] = function = self._loads(pickled)
        if self._rank == 0:
            self._checks[digest] = ClosureMutationCheck(function, self._is_shared)

    def pickles(self) -> dict[bytes, bytes]:
        """Return the functions as they were sent, by digest."""
        return dict(self._pickles)

    def load(self, pickles: Mapping[bytes, bytes]) -> None:
        """Take over the functions of another replica. Some refer to objects that are gone, and will not be used."""
        self._pickles.update(pickles)

    def after_run(self) -> None:
        """Record the changes that the function, which has run to its end, made to copies."""
        remark = self._running.after_run() if self._running is not None else ""
        if remark:
            self._remarks.setdefault(remark, True)

    def take_remarks(self) -> tuple[str, ...]:
        """Return the new warnings for the program, each once."""
        told = tuple(remark for remark, untold in self._remarks.items() if untold)
        self._remarks.update(dict.fromkeys(told, False))
        return told

    def forget(self, digests: Collection[bytes]) -> None:
        """Drop functions that the driver will not name again."""
        for digest in digests:
            for held in (self._functions, self._pickles, self._checks):
                held.pop(digest, None)

    def clear(self) -> None:
        """Drop all functions, which refer to objects that are gone; the driver sends the functions again."""
        self.forget(list(self._pickles))


class _Size(enum.Enum):
    """The key of a change that concerns a container as a whole."""

    SIZE = enum.auto()


@final
class ClosureMutationCheck:
    """A snapshot of the objects that an unpickled step function holds as copies, compared ever more rarely."""

    def __init__(self, function: Any, is_shared: Callable[[Any], bool]) -> None:
        self._title = _title(function)
        self._is_shared = is_shared
        self._held: list[tuple[str, Any, dict[Hashable, Hashable]]] = []
        with contextlib.suppress(Exception):  # an odd object must not fail the step
            self._held = [(name, held, self._marks(held)) for name, held in self._containers(function)]
        self._runs = 0
        self._next_look = 1

    def after_run(self) -> str:
        """Count a run; return a warning the first time that a change is found, else an empty string."""
        self._runs += 1
        if self._runs < self._next_look or not self._held:
            return ""
        self._next_look *= 10
        changed = ""
        with contextlib.suppress(Exception):  # an odd object must not fail the step
            changed = self.changed()
        if not changed:
            return ""
        self._held = []
        return (
            f"Changes of a step to Python objects that it captured must not be needed outside: each replica has its "
            f"own copies. {self._title} changed {changed}: the program's own stays as it is. Return the value from the "
            f"step and keep it there, or count in an attribute of a module made under the scope."
        )

    def changed(self) -> str:
        """Return the name of a changed object, as the function's author would write it; empty if there is none."""
        for name, container, before in self._held:
            now = self._marks(container)
            if now != before:
                keys = [key for key in (*now, *before) if now.get(key) != before.get(key)]
                return _name(container, name, keys[0])
        return ""

    def _containers(self, function: Any) -> Iterator[tuple[str, Any]]:
        """Yield the mutable objects that a function reaches with their names, breadth first."""
        waiting: deque[tuple[str, Any]] = deque([("", function)])
        seen: set[int] = set()
        while waiting and len(seen) < _MOST_CONTAINERS:
            name, obj = waiting.popleft()
            if id(obj) in seen or is_plain(obj) or self._is_shared(obj):
                continue
            seen.add(id(obj))
            items = _items(obj)
            if items is not None:
                yield name, obj
                waiting.extend((_name(obj, name, key), value) for key, value in items)

    def _marks(self, container: Any) -> dict[Hashable, Hashable]:
        return {key: self._mark(value) for key, value in _items(container) or ()}

    def _mark(self, value: Any) -> Hashable:
        """Return a mark that differs for another object and, where a write leaves a trace, after a write."""
        if is_plain(value):
            return type(value), value
        if isinstance(value, torch.Tensor):
            return id(value), None if self._is_shared(value) else num_writes(value)
        if isinstance(value, np.ndarray) and value.nbytes <= _MOST_BYTES and not value.dtype.hasobject:
            return id(value), zlib.crc32(value.tobytes())
        return id(value)


def _items(obj: Any) -> list[tuple[Hashable, Any]] | None:
    """Return the items of a mutable object (some of them, if there are many); None for other objects."""
    if isinstance(obj, types.FunctionType):
        return None if is_installed(obj.__module__) else _variables(obj)
    if isinstance(obj, types.MethodType):
        return [("self", obj.__self__), ("", obj.__func__)]
    if isinstance(obj, functools.partial):
        return [("", obj.func), *enumerate(obj.args), *obj.keywords.items()]
    if isinstance(obj, set):
        return [(_Size.SIZE, frozenset(map(id, obj)) if len(obj) <= _MOST_ITEMS else len(obj))]
    if isinstance(obj, dict | list | tuple | deque):
        items = obj.items() if isinstance(obj, dict) else enumerate(obj)
        return [(_Size.SIZE, len(obj)), *itertools.islice(items, _MOST_ITEMS)]
    if isinstance(obj, type | types.ModuleType) or is_installed(type(obj).__module__):
        return None
    if hasattr(obj, "__dict__"):
        return list(attributes(obj).items())
    slots = [name for cls in type(obj).__mro__ for name in vars(cls).get("__slots__", ())]
    return [(name, getattr(obj, name)) for name in slots if hasattr(obj, name)] or None


def _variables(function: types.FunctionType) -> list[tuple[Hashable, Any]]:
    """Return the globals (unless the function is this process's own import), closure variables and defaults."""
    found: dict[Hashable, Any] = {}
    if getattr(sys.modules.get(function.__module__), function.__name__, None) is not function:
        found.update(referenced_globals(function))
    found.update(closure_variables(function))
    defaults = function.__defaults__ or ()
    arguments = function.__code__.co_varnames[: function.__code__.co_argcount]
    found.update(zip(arguments[len(arguments) - len(defaults) :], defaults, strict=True))
    found.update(function.__kwdefaults__ or {})
    return list(found.items())


def _name(container: Any, name: str, key: Hashable) -> str:
    if isinstance(container, types.FunctionType | types.MethodType | functools.partial):
        return str(key) if key else name
    if isinstance(container, dict | list | tuple | deque | set):
        return name if key is _Size.SIZE else f"{name}[{key!r}]"
    return f"{name}.{key}" if name else str(key)


def _title(function: Any) -> str:
    inner = function
    while isinstance(inner, functools.partial | types.MethodType):
        inner = inner.func if isinstance(inner, functools.partial) else inner.__func__
    if not isinstance(inner, types.FunctionType):
        return f"The step function, a {type(inner).__name__},"
    return f"The step function {inner.__name__!r} ({inner.__code__.co_filename}:{inner.__code__.co_firstlineno})"
