"""What may shape the nest that a step function returns, as a key: calls with equal keys return equal nests."""

from __future__ import annotations

import dataclasses
import enum
import functools
import weakref
from collections.abc import Callable, Iterable, Sized
from types import (
    BuiltinFunctionType,
    CodeType,
    FunctionType,
    MethodDescriptorType,
    MethodType,
    ModuleType,
    WrapperDescriptorType,
)
from typing import Any, NamedTuple, final

import numpy as np
import torch

from raydist.actors.readers.batch_iterator import BatchIterator
from raydist.class_memory import remembered_by_class
from raydist.context.strategy import Strategy
from raydist.mirroring.kinds import kind_of_class
from raydist.values import PerReplica

__all__ = ["NestKey", "nest_key"]

_PLAIN = frozenset({bool, str, bytes, type(None), range})
"""Immutable, and compared by value. Their subclasses may be something else."""

_NUMBERS = frozenset({int, float, complex})
"""Kept apart: a learning rate or the number of a step is another one in every call."""

_CONSTANT = (
    *(enum.Enum, np.generic, np.ufunc, torch.dtype, torch.device, torch.layout, torch.memory_format),
    *(CodeType, MethodDescriptorType, WrapperDescriptorType),
)
"""The same, with their subclasses."""

_SHAPELESS = (
    *(torch.Tensor, np.ndarray, PerReplica, BatchIterator, Strategy, ModuleType),
    *(torch.autocast, torch.no_grad, torch.enable_grad, torch.inference_mode, torch.set_grad_enabled),
)
"""What steps hold and compute with; the nest that they return is another one for another of these at most in theory."""


_FEW = 16  # entries of a list or a dict that is not an argument


class NestKey(NamedTuple):
    """What may shape a nest."""

    parts: tuple[Any, ...]
    numbers: tuple[Any, ...]
    """In the order in which they were met. Few steps return another nest for another number."""


def nest_key(fn: Callable[..., Any], given: Iterable[Any]) -> NestKey | None:
    """A key of `fn` and its arguments; None where something that may shape the nest cannot be told apart.

    Calling another function or module, `fn` may return another nest: so what it encloses counts (a decorator's wrapper
    is one code for many functions), and so do the attributes of its `self`. A long list and the inside of other things
    may have changed since. Attributes are read of functions and of objects of the program's own only: reading one of a
    mirrored object waits for all dispatched steps.

    Args:
        fn: The function.
        given: Its arguments. Dicts and dataclasses among them are nests, made anew by every call.

    >>> def step(batch, keys=("a",)):
    ...     return {key: batch for key in keys}
    >>> nest_key(step, [torch.ones(1)]) == nest_key(step, [torch.zeros(2)])
    True
    >>> nest_key(step, [torch.ones(1), ("b",)]) == nest_key(step, [torch.ones(1)])
    False
    >>> nest_key(step, [torch.ones(1), {"b", "c"}]) is None
    True
    >>> nest_key(step, [torch.ones(1), 0.5, {"rate": 2}]).numbers
    (0.5, 2)
    """
    key = _Key()
    try:
        _add(key, fn)
        key.in_arguments = True
        _add_all(key, given)
    except (_UnknownError, RecursionError):  # a list may hold itself
        return None
    return NestKey(tuple(key.parts), tuple(key.numbers))


class _UnknownError(Exception):
    """What cannot be told apart was found."""


@final
class _Key:
    """One key as it is made. What is added says first what it is, so that no two values add the same parts."""

    __slots__ = ("functions", "in_arguments", "in_object", "numbers", "parts")

    def __init__(self) -> None:
        self.parts: list[Any] = []
        self.numbers: list[Any] = []
        self.functions: dict[int, int] = {}  # by id: those that have been added, as one may enclose itself
        self.in_arguments = self.in_object = False


def _add(key: _Key, value: Any) -> None:
    _adder_for(type(value))(key, value)


def _add_all(key: _Key, values: Iterable[Any]) -> None:
    parts = key.parts
    for value in values:
        cls: Any = type(value)
        if cls in _PLAIN:  # most defaults: a call less for each
            parts += (cls, value)
        else:
            _adder_for(cls)(key, value)


@remembered_by_class
def _adder_for(cls: Any) -> Callable[[_Key, Any], None]:
    """What adds the objects of a class. By their class alone, see `nest_key`."""
    if cls in _NUMBERS or issubclass(cls, np.number):
        return _add_number
    if cls in _PLAIN or issubclass(cls, _CONSTANT):
        return _add_constant
    if issubclass(cls, torch.nn.Module):
        return _add_module
    if issubclass(cls, _SHAPELESS) or kind_of_class(cls) is not None:
        return _add_shapeless
    if issubclass(cls, tuple):
        return _add_tuple
    if issubclass(cls, type):
        return _add_class
    return _ADDERS.get(cls, _add_fields if dataclasses.is_dataclass(cls) else _add_object)


def _add_constant(key: _Key, value: Any) -> None:
    key.parts += (type(value), value)  # True is no 1


def _add_number(key: _Key, value: Any) -> None:
    key.parts.append(type(value))
    key.numbers.append(value)


def _add_shapeless(key: _Key, _: Any) -> None:
    key.parts.append(_SHAPELESS)


def _add_module(key: _Key, value: Any) -> None:
    key.parts.append(weakref.ref(value))


def _add_object(key: _Key, value: Any) -> None:
    """One of the program's own, such as the `self` of a step: itself, and what its attributes are now."""
    attributes = getattr(value, "__dict__", None)
    if type(attributes) is not dict:
        raise _UnknownError(type(value))
    try:
        key.parts.append(weakref.ref(value))
    except TypeError as error:
        raise _UnknownError(type(value)) from error
    if not key.in_object:  # an object inside of another counts for itself
        key.in_object = True
        arguments, key.in_arguments = key.in_arguments, False
        _add_named(key, attributes)
        key.in_object, key.in_arguments = False, arguments


def _add_class(key: _Key, value: type) -> None:
    key.parts.append(weakref.ref(value))


def _add_list(key: _Key, value: list[Any]) -> None:
    _require_few(value)
    key.parts += (list, len(value))
    _add_all(key, tuple(value))


def _add_tuple(key: _Key, value: tuple[Any, ...]) -> None:
    key.parts += (type(value), len(value))
    _add_all(key, value)


def _add_dict(key: _Key, value: dict[Any, Any]) -> None:
    if not key.in_arguments:
        _require_few(value)
    _add_named(key, value)


def _require_few(value: Sized) -> None:
    """A long one is a record of what has been, rather than what a step is made by; and takes long to compare."""
    if len(value) > _FEW:
        raise _UnknownError(type(value))


def _add_named(key: _Key, value: dict[Any, Any]) -> None:
    key.parts += (dict, len(value))
    for name, item in value.items():
        key.parts += (type(name), name)
        _adder_for(type(item))(key, item)


def _add_fields(key: _Key, value: Any) -> None:
    """Of a dataclass."""
    key.parts.append(type(value))
    for field in dataclasses.fields(value):
        _add(key, getattr(value, field.name))


def _add_function(key: _Key, value: FunctionType) -> None:
    if id(value) in key.functions:
        key.parts += (FunctionType, key.functions[id(value)])
        return
    key.functions[id(value)] = len(key.functions)
    arguments, key.in_arguments = key.in_arguments, False  # what is enclosed is, whatever the function is
    key.parts += (value.__code__, not value.__defaults__, not value.__kwdefaults__)
    if value.__closure__:
        _add_all(key, _enclosed(value))
    if value.__defaults__:
        _add_tuple(key, value.__defaults__)
    if value.__kwdefaults__:
        _add_named(key, value.__kwdefaults__)
    key.in_arguments = arguments


def _enclosed(value: FunctionType) -> list[Any]:
    """What the function encloses: as many values as its code says."""
    try:
        return [cell.cell_contents for cell in value.__closure__ or ()]
    except ValueError as error:  # one of them has no value yet
        raise _UnknownError from error


def _add_method(key: _Key, value: MethodType) -> None:
    key.parts.append(MethodType)
    _add(key, value.__func__)
    _add(key, value.__self__)


def _add_partial(key: _Key, value: functools.partial[Any]) -> None:
    key.parts.append(functools.partial)
    arguments, key.in_arguments = key.in_arguments, False
    _add(key, value.func)
    _add_tuple(key, value.args)
    _add_named(key, value.keywords)
    key.in_arguments = arguments


def _add_builtin(key: _Key, value: Any) -> None:
    """A function of a module or a class; the method of an object, such as `names.get`, is what this holds."""
    if not isinstance(value.__self__, ModuleType | type | None):
        raise _UnknownError(type(value))
    key.parts.append(value)


_ADDERS: dict[type, Callable[[_Key, Any], None]] = {
    dict: _add_dict,
    list: _add_list,
    FunctionType: _add_function,
    MethodType: _add_method,
    functools.partial: _add_partial,
    BuiltinFunctionType: _add_builtin,
}
