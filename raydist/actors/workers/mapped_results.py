"""A registry of workers' results that are mapped in this process, so that parts of them can be sent by reference."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any, final

import numpy as np

from raydist.pipelines.elements.blocks import Block
from raydist.pipelines.elements.items import StageResult

__all__ = ["MappedResults", "ResultView"]

_Array = np.ndarray[Any, np.dtype[Any]]


@final
@dataclass(frozen=True, slots=True)
class ResultView:
    """The position of an array in a result: item, column, offset in bytes, shape and strides."""

    item: int
    column: int
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def of(self, result: StageResult) -> _Array:
        block = result.items[self.item]
        if not isinstance(block, Block):
            raise TypeError(f"raydist bug: a piece lies in item {self.item} of a result, which is {block!r:.100}.")
        whole = _root(block.columns[self.column])
        dtype = block.columns[self.column].dtype
        return np.ndarray(self.shape, dtype, whole.data, self.offset, self.strides)


@final
class MappedResults:
    """The results whose arrays are in use in this process, by the memory of the arrays."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[_Array], Any, int, int]] = {}

    def remember(self, ref: Any, result: StageResult) -> None:
        """Record the arrays of a result that was fetched from the object store."""
        for item, block in enumerate(result.items):
            for column, array in enumerate(block.columns if isinstance(block, Block) else ()):
                if array.dtype != object and not array.flags.writeable:  # a writable array came with the answer
                    self._note(_root(array), ref, item, column)

    def _note(self, root: _Array, ref: Any, item: int, column: int) -> None:
        key = id(root)

        def forget(_: object, known: dict[int, Any] = self._known) -> None:
            known.pop(key, None)

        self._known[key] = (weakref.ref(root, forget), ref, item, column)

    def find(self, array: _Array) -> tuple[Any, ResultView] | None:
        """Return the reference of the result that `array` is a part of, and its position; None if there is none."""
        root = _root(array)
        known = self._known.get(id(root))
        if known is None or known[0]() is not root or array.dtype == object:
            return None
        _, ref, item, column = known
        offset = array.__array_interface__["data"][0] - root.__array_interface__["data"][0]
        return ref, ResultView(item, column, offset, array.shape, array.strides)


def _root(array: _Array) -> _Array:
    """Return the array that owns the memory of `array`."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array
