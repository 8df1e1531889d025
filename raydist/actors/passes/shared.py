"""A worker's result handed on to the replicas as it lies in the object store, where a piece of a batch is a part of it.

A batch that a worker made whole, or that is a run of the elements of one of its blocks, is a view of memory that every
process of the machine can map. To store the piece would only copy it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import ray

from raydist.actors.passes.piece import BatchPiece
from raydist.options import Timeouts
from raydist.pipelines.elements.blocks import Block
from raydist.pipelines.elements.items import StageResult

__all__ = ["MappedResults", "SharedPiece", "hand_on"]

Array = np.ndarray[Any, np.dtype[Any]]


@final
@dataclass(frozen=True, slots=True)
class _View:
    """Where an array lies in a result: in which column of which item, and how."""

    item: int
    column: int
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def of(self, result: StageResult) -> Array:
        block = result.items[self.item]
        if not isinstance(block, Block):
            raise TypeError(f"raydist bug: a piece lies in item {self.item} of a result, which is {block!r:.100}.")
        whole = _root(block.columns[self.column])
        dtype = block.columns[self.column].dtype
        return np.ndarray(self.shape, dtype, whole.data, self.offset, self.strides)


@final
class SharedPiece:
    """A piece of a batch that is a part of a worker's result: `BatchPiece` for who maps the result.

    Args:
        ref: The result's.
        views: Of the leaves.
        num_rows: Rows of the first leaf.
        zero_copy: As for `BatchPiece`.
    """

    def __init__(self, ref: Any, views: tuple[_View, ...], num_rows: int, zero_copy: bool) -> None:
        self._ref = ref
        self._views = views
        self._num_rows = num_rows
        self._zero_copy = zero_copy
        self._piece: BatchPiece | None = None
        self.absent = False

    def __reduce__(self) -> tuple[Any, ...]:
        return SharedPiece, (self._ref, self._views, self._num_rows, self._zero_copy)

    def fetch(self, limit_s: float) -> BatchPiece:
        """The piece, mapped. Waits up to `limit_s` seconds; raises what Ray raises."""
        if self._piece is None:
            result = ray.get(self._ref, timeout=limit_s)
            columns = tuple(view.of(result) for view in self._views)
            self._piece = BatchPiece(columns, self._num_rows, self._zero_copy)
        return self._piece

    def leaf(self, index: int) -> Any:
        """See `BatchPiece.leaf`."""
        return self.fetch(Timeouts().input_s).leaf(index)


@final
class MappedResults:
    """Which memory of this process maps which worker's result: as long as an array of it is in use."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[Array], Any, int, int]] = {}

    def remember(self, ref: Any, result: StageResult) -> None:
        """Note the arrays of a result that was fetched from the object store."""
        for item, block in enumerate(result.items):
            for column, array in enumerate(block.columns if isinstance(block, Block) else ()):
                if array.dtype != object and not array.flags.writeable:  # a writable one came with the answer
                    self._note(_root(array), ref, item, column)

    def _note(self, root: Array, ref: Any, item: int, column: int) -> None:
        key = id(root)

        def forget(_: object, known: dict[int, Any] = self._known) -> None:
            known.pop(key, None)

        self._known[key] = (weakref.ref(root, forget), ref, item, column)

    def find(self, array: Array) -> tuple[Any, _View] | None:
        """The result that `array` is a part of, and where it lies in it."""
        root = _root(array)
        known = self._known.get(id(root))
        if known is None or known[0]() is not root or array.dtype == object:
            return None
        _, ref, item, column = known
        offset = array.__array_interface__["data"][0] - root.__array_interface__["data"][0]
        return ref, _View(item, column, offset, array.shape, array.strides)


def _root(array: Array) -> Array:
    """The array that `array` is a view of, over all of its memory."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array


def hand_on(mapped: MappedResults, put: Callable[[BatchPiece], Any], piece: BatchPiece) -> Any:
    """A reference to `piece`: to the result that it is a part of, else `put(piece)`."""
    found = [mapped.find(column) if isinstance(column, np.ndarray) else None for column in piece.columns]
    places = [place for place in found if place is not None]
    if len(places) < len(found) or len({ref for ref, _ in places}) != 1:
        return put(piece)
    return SharedPiece(places[0][0], tuple(view for _, view in places), piece.num_rows, piece.zero_copy)
