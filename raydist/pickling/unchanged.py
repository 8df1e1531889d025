"""A short look that tells whether a step function would be pickled to the same bytes as last time.

Pickling a closure takes some 100 us, and almost always gives what it gave before. A function is *settled* where all
that its pickle depends on are variables with fixed objects in them (numbers, text, what travels as a handle or as a
name): then it is enough to see that every variable still holds the very same object.
"""

from __future__ import annotations

import dis
import functools
import types
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, final

from raydist.pickling.by_value import is_library, is_users

__all__ = ["SettledFunctions", "loaded_globals"]

_FIXED = (bool, int, float, complex, str, bytes, type(None), type(Ellipsis), types.CodeType)
_UNSET = object()


@final
@dataclass(frozen=True, slots=True)
class _Variable:
    """What a variable held: the object itself where it is fixed, else a weak reference to it."""

    read: Callable[[], Any]
    fixed: Any = _UNSET
    seen: Callable[[], Any] | None = None

    def same(self) -> bool:
        now = self.read()
        if self.seen is None:
            return now is self.fixed
        return now is not None and now is self.seen()  # of what died, a weak reference gives None


@final
class SettledFunctions:
    """Functions whose pickle is known, by the digest of it."""

    def __init__(self) -> None:
        self._known: weakref.WeakKeyDictionary[Any, tuple[bytes, list[_Variable]]] = weakref.WeakKeyDictionary()

    def digest_of(self, fn: Any) -> bytes:
        """What was remembered of `fn`, if its pickle would be the same now; empty if nobody knows."""
        known = self._known.get(fn) if type(fn) is types.FunctionType else None
        return known[0] if known is not None and all(variable.same() for variable in known[1]) else b""

    def remember(self, fn: Any, digest: bytes, is_fixed: Callable[[Any], bool]) -> None:
        """Take note of the digest of the pickle of `fn`, unless it depends on what cannot be compared.

        Args:
            fn: The function.
            digest: Of its pickle; an empty one stands for none.
            is_fixed: Whether an object travels as what every replica has already, and always as the same.
        """
        if type(fn) is types.FunctionType and digest:
            look = _Look(is_fixed)
            if look.settles(fn, frozenset()):
                self._known[fn] = digest, look.variables

    def forget(self) -> None:
        """What travels as a handle may travel otherwise now."""
        self._known.clear()


@final
class _Look:
    """One walk through what the pickle of a function depends on."""

    def __init__(self, is_fixed: Callable[[Any], bool]) -> None:
        self._is_fixed = is_fixed
        self.variables: list[_Variable] = []

    def settles(self, fn: types.FunctionType, above: frozenset[int]) -> bool:
        """Whether the pickle of `fn` depends on nothing but variables that can be compared; adds them."""
        if fn.__kwdefaults__ or vars(fn):
            return False
        readers = _readers(weakref.ref(fn), fn)  # weakly: what is remembered of a function must not keep it
        return all(self._settles_in(read, read(), above | {id(fn)}) for read in readers)

    def _settles_in(self, read: Callable[[], Any], value: Any, above: frozenset[int]) -> bool:
        if value is _UNSET or _is_plain(value):
            self.variables.append(_Variable(read, value))
            return True
        if not self._is_settled(value, above):
            return False
        try:
            self.variables.append(_Variable(read, seen=weakref.ref(value)))
        except TypeError:
            return False
        return True

    def _is_settled(self, value: Any, above: frozenset[int]) -> bool:
        if id(value) in above or self._is_fixed(value) or _is_named(value):
            return True
        return type(value) is types.FunctionType and self.settles(value, above)


def _readers(weak: weakref.ref[types.FunctionType], fn: types.FunctionType) -> list[Callable[[], Any]]:
    """Each reads one of the variables that the pickle of a function depends on."""
    return [
        lambda: getattr(weak(), "__code__", _UNSET),
        lambda: getattr(weak(), "__defaults__", _UNSET),
        *(functools.partial(_read_cell, weak, index) for index in range(len(fn.__closure__ or ()))),
        *(functools.partial(_read_global, weak, name) for name in loaded_globals(fn.__code__)),
    ]


def _read_cell(weak: weakref.ref[types.FunctionType], index: int) -> Any:
    fn = weak()
    try:
        return _UNSET if fn is None or not fn.__closure__ else fn.__closure__[index].cell_contents
    except ValueError:  # a variable that has no value yet
        return _UNSET


def _read_global(weak: weakref.ref[types.FunctionType], name: str) -> Any:
    fn = weak()
    return _UNSET if fn is None else fn.__globals__.get(name, _UNSET)


@functools.lru_cache(maxsize=4096)
def loaded_globals(code: types.CodeType) -> tuple[str, ...]:
    """The globals that code, and code nested in it, reads or writes: what a pickle by value takes along."""
    names = {step.argval: None for step in dis.get_instructions(code) if step.opname.endswith(("_GLOBAL", "_NAME"))}
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names.update(dict.fromkeys(loaded_globals(constant)))
    return tuple(names)


def _is_plain(value: Any) -> bool:
    return all(map(_is_plain, value)) if type(value) is tuple else isinstance(value, _FIXED)


def _is_named(value: Any) -> bool:
    """Whether pickle writes a name that means the same on every replica: what libraries hold at their top level."""
    if isinstance(value, types.ModuleType):
        return not is_users(value)
    if isinstance(value, types.FunctionType) and hasattr(value, "__wrapped__"):
        return False
    if isinstance(value, types.BuiltinFunctionType) and not isinstance(value.__self__, type | types.ModuleType | None):
        return False  # a method of some object, which travels with it
    if isinstance(value, types.FunctionType | types.BuiltinFunctionType | type):
        name = getattr(value, "__qualname__", "<")
        return is_library(getattr(value, "__module__", None) or "builtins") and "<" not in name
    return False
