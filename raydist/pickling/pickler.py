"""Pickling between the driver and its replicas: mirrored objects are sent as handles, functions by value.

A *handle* is the number of a mirrored object on both sides. A persistent id replaces an object that exists on the other
side already:

    ("object", handle)       a mirrored module, parameter, optimizer, ...
    ("part", k)              this replica's part of the k-th PerReplica leaf
    ("external", name)       an object that every replica has by itself (the strategy, ...)
    ("device",)              the device of the replica that reads
"""

from __future__ import annotations

import copyreg
import functools
import importlib
import io
import operator
import pickle
import sys
import types
import weakref
from collections.abc import Callable, Sequence
from typing import Any, final

import torch

from raydist.actors.class_tracking import cloudpickle
from raydist.pickling.by_value import (
    ByValuePolicy,
    closure_variables,
    globals_are_installed,
    has_name,
    is_installed_name,
    replaced_methods,
)
from raydist.pickling.torch_objects import (
    DeferredReduction,
    ReplicaDevice,
    TensorReducer,
    reduce_compiled,
    reduce_parametrized,
    require_step_of_class,
)

PersistentId = tuple[Any, ...]
_PROTOCOL = 5
_FUNCTION_SLOTS = ("__annotations__", "__kwdefaults__", "__defaults__", "__module__", "__doc__", "__closure__")


@final
class HandlePickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle ships no types
    """A pickler for one or more objects with a common memo.

    Args:
        file: The file to write to.
        identify: Returns the persistent id of an object, or None to pickle the object by value.
        policy: Decides which functions and classes are pickled by value although replicas could import them.
        to_replica: Device of the tensors afterwards, see `TensorReducer`.
    """

    def __init__(
        self,
        file: io.BytesIO,
        identify: Callable[[Any], PersistentId | None],
        *,
        policy: ByValuePolicy | None = None,
        to_replica: bool = False,
    ) -> None:
        super().__init__(file, protocol=_PROTOCOL)
        self._identify = identify
        self._policy = policy
        self._tensors = TensorReducer(to_replica=to_replica)

    def persistent_id(self, obj: Any) -> PersistentId | None:
        if type(obj) is ReplicaDevice:
            return ("device",)
        return self._identify(obj)

    def reducer_override(self, obj: Any) -> Any:
        reduced = self._reduce_torch(obj)
        if reduced is not None:
            return reduced
        if self._policy is not None:
            reduced = self._reduce_by_value(obj, self._policy)
        return super().reducer_override(obj) if reduced is None else reduced

    def _reduce_by_value(self, obj: Any, policy: ByValuePolicy) -> Any:
        """Reduce an object that cloudpickle would write as a name although replicas must not use their own import."""
        if isinstance(obj, types.ModuleType):
            values = policy.module_values(obj)
            return (_module_with, (obj.__name__, values)) if values else None
        if isinstance(obj, types.FunctionType) and policy.by_value(obj):
            return self._dynamic_function_reduce(obj)
        if isinstance(obj, type) and policy.by_value(obj):
            return cloudpickle.cloudpickle._dynamic_class_reduce(obj)
        if isinstance(obj, functools._lru_cache_wrapper):  # pickle would write the name
            by_value = obj.__module__ == "__main__" or not has_name(obj) or policy.reaches(obj)
            return (_cache_again, (obj.__wrapped__, obj.cache_parameters())) if by_value else None
        return _reduce_patched(obj) if isinstance(obj, type) else None

    def _dynamic_function_reduce(self, func: types.FunctionType) -> Any:
        """Reduce as cloudpickle does, but let a function of an installed package use the replica's import's globals."""
        own = cloudpickle.cloudpickle
        code, globals_there, *others = self._function_getnewargs(func)
        here = func.__globals__
        used = {name: here[name] for name in own._extract_code_globals(code) if name in here}
        submodules = _submodules_of(code, [*used.values(), *closure_variables(func).values()])
        if globals_are_installed(func):
            globals_there, used = DeferredReduction(lambda: (_globals_of, (here["__name__"],))), {}
        slots = {
            # New strings, so that the pickle does not depend on which strings are interned: see cloudpickle.
            "__name__": "".join(func.__name__),
            "__qualname__": "".join(func.__qualname__),
            **{name: getattr(func, name) for name in _FUNCTION_SLOTS},
            "_cloudpickle_submodules": submodules,
            "__globals__": used,
        }
        attributes = {"".join(name): value for name, value in vars(func).items()}
        make = own._make_function
        return make, (code, globals_there, *others), (attributes, slots), None, None, own._function_setstate

    def _reduce_torch(self, obj: Any) -> Any:
        if isinstance(obj, torch.Tensor):
            return self._tensors.reduce(obj)
        if isinstance(obj, torch.Generator):
            return _rebuild_generator, (str(obj.device), obj.get_state())
        if isinstance(obj, torch.optim.Optimizer):
            require_step_of_class(obj)
            # The optimizer's own __getstate__ drops the hooks; `step` is a bound wrapper by a scheduler.
            state = {name: value for name, value in vars(obj).items() if name != "step" and not _stays_here(value)}
            return copyreg.__newobj__, (type(obj),), state  # type: ignore[attr-defined]  # not in typeshed
        if type(obj) is functools.cached_property:  # of Python 3.11 it holds a lock
            return _cached_property, (obj.func, obj.attrname)
        if type(obj) is weakref.ReferenceType and obj.__callback__ is None and obj() is not None:
            return weakref.ref, (obj(),)
        if _is_special_module(obj):
            return importlib.import_module, (obj.__name__,)
        return reduce_compiled(obj) or reduce_parametrized(obj)


_submodules: weakref.WeakKeyDictionary[types.CodeType, tuple[Any, list[types.ModuleType]]] = weakref.WeakKeyDictionary()


def _submodules_of(code: types.CodeType, values: Sequence[Any]) -> list[types.ModuleType]:
    """Return the imported submodules that a function of these globals and closure uses, as cloudpickle finds them.

    The search takes 1 to 2 ms once torch is imported, so it is repeated only after imports.
    """
    packages = [value for value in values if isinstance(value, types.ModuleType)]
    key = (len(sys.modules), packages)
    known = _submodules.get(code)
    if known is None or known[0] != key:
        known = _submodules[code] = (key, cloudpickle.cloudpickle._find_imported_submodules(code, packages))
    return known[1]


def _cached_property(function: Callable[[Any], Any], name: str | None) -> functools.cached_property[Any]:
    made = functools.cached_property(function)
    made.attrname = name
    return made


def _cache_again(function: Callable[..., Any], parameters: dict[str, Any]) -> Any:
    return functools.lru_cache(**parameters)(function)


def _reduce_patched(cls: type) -> tuple[Any, ...] | None:
    """Return the reduction of an installed class if the program has replaced methods in it or its bases; else None."""
    patches = [(base.__module__, base.__qualname__, replaced_methods(base)) for base in cls.__mro__]
    patches = [patch for patch in patches if patch[2]]
    if not patches or not is_installed_name(cls):
        return None
    return _patched, (cls.__module__, cls.__qualname__, patches)


def _patched(module: str, name: str, patches: list[tuple[str, str, dict[str, Any]]]) -> type:
    """Return the replica's own import of a class, after setting the methods that the driver's program replaced."""
    for patch_module, patch_name, methods in patches:
        base = operator.attrgetter(patch_name)(importlib.import_module(patch_module))
        for method, value in methods.items():
            setattr(base, method, value)
    found: type = operator.attrgetter(name)(importlib.import_module(module))
    return found


def with_globals(function: Any, policy: ByValuePolicy) -> Any:
    """Return a stand-in that unpickles as the function, after setting the globals from `ByValuePolicy.settings`."""
    settings = DeferredReduction(lambda: (_set_globals, (policy.settings(),)))  # known once the function is pickled
    return DeferredReduction(lambda: (_function_of, (function, settings)))


def _set_globals(settings: list[tuple[str, dict[str, Any]]]) -> None:
    for module, values in settings:
        vars(importlib.import_module(module)).update(values)


def _function_of(function: Any, _: None) -> Any:
    return function


def _globals_of(name: str) -> dict[str, Any]:
    return vars(importlib.import_module(name))


def _stays_here(value: Any) -> bool:
    """Return True for a method that a replica has put into its own optimizer."""
    return getattr(value, "stays_here", False) is True


def _is_special_module(obj: Any) -> bool:
    """Return True for a module of a special class (`torch.ops`, `torch.backends.cudnn`), unknown to cloudpickle."""
    is_one = isinstance(obj, types.ModuleType) and type(obj) is not types.ModuleType
    return is_one and sys.modules.get(obj.__name__) is obj


def _module_with(name: str, values: dict[str, Any]) -> types.ModuleType:
    """Return a copy of the module of this name with the driver's values; the replica's own import stays unchanged."""
    module = types.ModuleType(name)
    vars(module).update(vars(importlib.import_module(name)))
    vars(module).update(values)
    return module


def _rebuild_generator(device: str, state: torch.Tensor) -> torch.Generator:
    generator = torch.Generator(device)
    generator.set_state(state)
    return generator


@final
class HandleUnpickler(pickle.Unpickler):
    """The unpickler for a :class:`HandlePickler`; `resolve` returns the object of a persistent id."""

    def __init__(self, file: io.BytesIO, resolve: Callable[[PersistentId], Any]) -> None:
        super().__init__(file)
        self._resolve = resolve

    def persistent_load(self, pid: PersistentId) -> Any:
        return self._resolve(pid)


def dumps(obj: Any, identify: Callable[[Any], PersistentId | None], **how: Any) -> bytes:
    """Return the pickle of an object as bytes; `how` as in :class:`HandlePickler`."""
    file = io.BytesIO()
    HandlePickler(file, identify, **how).dump(obj)
    return file.getvalue()


def loads(data: bytes, resolve: Callable[[PersistentId], Any]) -> Any:
    """Return the object that :func:`dumps` pickled."""
    return HandleUnpickler(io.BytesIO(data), resolve).load()
