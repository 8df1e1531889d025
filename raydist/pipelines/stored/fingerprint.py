"""Fingerprints of graphs of operations: short texts that are equal in every process, and change with the graph.

A function's fingerprint covers its code, constants, defaults, closure and the globals that it names, but not its place.
For library functions, it covers the name and the code; for classes of libraries, the name.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import os
import pickle
import sysconfig
import types
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from raydist.core import errors
from raydist.options import Options
from raydist.pipelines.elements.leaf_values import as_leaf, is_torch
from raydist.pipelines.elements.small_floats import is_small_float
from raydist.pipelines.engine.op import DatasetOp

NOT_IN_FINGERPRINT = {"fingerprint": False}
"""Metadata of fields that do not affect the elements."""

_RAYDIST = os.path.dirname(os.path.dirname(os.path.abspath(errors.__file__)))  # not of this file, which may move
_LIBRARIES = (_RAYDIST, *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")))
_PLAIN = (type(None), bool, int, float, complex, str, bytes, type(Ellipsis))
_MAX_DEPTH = 60

# Moved classes keep the module in which they were when fingerprints were first written.
_FORMER_MODULE_OF = {
    "TensorSpec": "raydist.pipelines.spec",
    "FixedLenFeature": "raydist.pipelines.formats.features",
    "VarLenFeature": "raydist.pipelines.formats.features",
    "FixedLenSequenceFeature": "raydist.pipelines.formats.composite_features",
    "RaggedFeature": "raydist.pipelines.formats.composite_features",
    "RaggedTensorValue": "raydist.pipelines.formats.composite_features",
    "SparseFeature": "raydist.pipelines.formats.composite_features",
    "SparseTensorValue": "raydist.pipelines.formats.composite_features",
}
# Renamed classes, whose objects are part of graphs, keep their old name.
_FORMER_NAME_OF = {"StoredFile": "Part"}


def fingerprint(*values: Any) -> str:
    """Return the fingerprint of any values, such as operations, functions and arrays.

    >>> fingerprint(lambda x: x + 1) == fingerprint(lambda x: x + 1)
    True
    >>> fingerprint(lambda x: x + 1) == fingerprint(lambda x: x + 2)
    False
    """
    return _Fingerprint().of(values).hex()


class _Fingerprint:
    """The digests of values. Tracks open values, because a value may contain itself."""

    def __init__(self) -> None:
        self._open: list[int] = []

    def of(self, value: Any) -> bytes:
        """Return the digest of a value."""
        if id(value) in self._open:
            return f"the value {len(self._open) - self._open.index(id(value))} above".encode()
        if len(self._open) > _MAX_DEPTH:
            return type(value).__qualname__.encode()
        self._open.append(id(value))
        try:
            digest = hashlib.blake2b(_kind_name(type(value)).encode(), digest_size=16)
            for part in self._parts(value):
                digest.update(len(part).to_bytes(8, "little"))
                digest.update(part)
            return digest.digest()
        finally:
            self._open.pop()

    def _parts(self, value: Any) -> list[Any]:
        if isinstance(value, _PLAIN):
            return [repr(value).encode()]
        for kind, parts in _KINDS:
            if isinstance(value, kind):
                return parts(self, value)
        if is_torch(value):
            return self._array(np.asarray(as_leaf(value)))
        graph = getattr(value, "_op", None)  # the user's dataset over a graph
        if isinstance(graph, DatasetOp):
            return [self.of(graph)]
        if dataclasses.is_dataclass(value):
            return self._dataclass(value)
        return self._object(value)

    def _array(self, array: np.ndarray[Any, Any]) -> list[Any]:
        if array.dtype == object:
            return [str(array.shape).encode(), *map(self.of, array.flat)]
        head = f"{_dtype_text(array.dtype)}{array.shape}".encode()
        return [head, np.ascontiguousarray(array).reshape(-1).view(np.uint8).data] if array.size else [head]

    def _sequence(self, values: Any) -> list[Any]:
        return [self.of(value) for value in values]

    def _mapping(self, values: Mapping[Any, Any]) -> list[Any]:
        return sorted(self.of(key) + self.of(value) for key, value in values.items())

    def _dataclass(self, value: Any) -> list[Any]:
        counted = [field.name for field in dataclasses.fields(value) if _counts(field, value)]
        return [part for name in counted for part in (name.encode(), self.of(getattr(value, name)))]

    def _function(self, value: types.FunctionType) -> list[Any]:
        if value.__code__.co_filename.startswith(_LIBRARIES):
            return [*_name(value), *self._code(value.__code__)]
        cells = [self._cell(cell) for cell in value.__closure__ or ()]
        known = {name: value.__globals__[name] for name in _names(value.__code__) if name in value.__globals__}
        return [*map(self.of, (value.__code__, value.__defaults__, value.__kwdefaults__, known)), *cells]

    def _cell(self, cell: types.CellType) -> bytes:
        try:
            return self.of(cell.cell_contents)
        except ValueError:  # not filled yet
            return b"empty"

    def _code(self, code: types.CodeType) -> list[Any]:
        names = (code.co_names, code.co_varnames, code.co_freevars, code.co_argcount, code.co_kwonlyargcount)
        return [code.co_code, self.of(names), self.of(code.co_consts)]

    def _object(self, value: Any) -> list[Any]:
        calls = [vars(kind).get("__call__") for kind in type(value).__mro__]
        parts = [*_name(type(value)), *(self.of(call) for call in calls if isinstance(call, types.FunctionType))]
        if hasattr(value, "__dict__"):
            return [*parts, self.of(vars(value))]
        try:
            return [*parts, pickle.dumps(value)]
        except Exception:  # a lock or an open file: only the type counts
            return parts


def _dtype_text(dtype: np.dtype[Any]) -> str:
    return dtype.name if is_small_float(dtype) else dtype.str  # all float8 types have one `str`


def _kind_name(kind: type) -> str:
    name = kind.__qualname__
    return _FORMER_NAME_OF.get(name, name) if kind.__module__.startswith("raydist.") else name


def _names(code: types.CodeType) -> set[str]:
    """Return the global names that a function uses, including those of inner functions."""
    inner = [_names(part) for part in code.co_consts if isinstance(part, types.CodeType)]
    return set(code.co_names).union(*inner)


def _name(value: Any) -> list[Any]:
    module, name = getattr(value, "__module__", ""), getattr(value, "__qualname__", value)
    if str(module).startswith("raydist."):
        module = _FORMER_MODULE_OF.get(name, module)
    return [f"{module}.{name}".encode()]


def _counts(field: dataclasses.Field[Any], value: Any) -> bool:
    """Return True if a field counts. Fields that an earlier version lacked count "if given"."""
    counted = field.metadata.get("fingerprint", True)
    return counted is True or (counted == "if given" and getattr(value, field.name) != field.default)


# Options count as nothing: the caller adds those that affect elements, merged.
_KINDS: tuple[tuple[Any, Callable[[_Fingerprint, Any], list[Any]]], ...] = (
    (np.ndarray, _Fingerprint._array),
    (np.generic, lambda fingerprint, value: fingerprint._array(np.asarray(value))),
    (np.dtype, lambda fingerprint, value: [_dtype_text(value).encode()]),
    (Options, lambda fingerprint, value: []),
    (tuple | list, _Fingerprint._sequence),
    (set | frozenset, lambda fingerprint, value: sorted(map(fingerprint.of, value))),
    (Mapping, _Fingerprint._mapping),
    (functools.partial, lambda fingerprint, value: fingerprint._sequence((value.func, value.args, value.keywords))),
    (types.MethodType, lambda fingerprint, value: fingerprint._sequence((value.__func__, value.__self__))),
    (types.FunctionType, _Fingerprint._function),
    (types.CodeType, _Fingerprint._code),
    (types.ModuleType, lambda fingerprint, value: [value.__name__.encode()]),
    (type | types.BuiltinFunctionType | np.ufunc, lambda fingerprint, value: _name(value)),
)
