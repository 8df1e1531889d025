"""Results of stages in the object store: a worker stores the large columns, and the pipeline gets row ids of them.

A call of a worker has two return values, so that the caller owns both: the answer, in which a :class:`ColumnPlace`
stands for each stored column, and a :class:`StoredColumns`, which the pipeline never fetches. Results that are small,
or whose rows are, travel with the answer.
"""

from __future__ import annotations

import itertools
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast, final

import numpy as np
import pyarrow as pa
import ray
from ray.exceptions import GetTimeoutError, RayError

from raydist.actors.packed_columns import ArrowColumn, LaidParts, pack_column, unpack_column
from raydist.actors.supervision import first_line
from raydist.errors import DeadlineExceededError, UnavailableError
from raydist.options import Timeouts
from raydist.pipelines.elements.blocks import Block
from raydist.pipelines.elements.columns import Column, StoredColumn, concat_columns, remote_of
from raydist.pipelines.elements.items import Item, StageResult

__all__ = ["ColumnPlace", "ResultColumn", "StoredColumns", "store_result", "with_row_ids"]

_Packed = LaidParts | ArrowColumn | Column

_LEAST_ROW_BYTES = 512  # the values of smaller rows cost no more than row ids and the search for the rows
_LEAST_BYTES = 32 << 10  # of a column
_KEPT_BYTES = 512 << 20  # of results that this process has mapped and may need again: the buffer of a shuffle, say
_KEPT_RESULTS = 256


@final
@dataclass(frozen=True, slots=True)
class ColumnPlace:
    """The place of a stored column in an answer.

    Attributes:
        index: Number of the column in the stored result.
        dtype: Dtype of the column.
        shape: Shape of the column.
        row_bytes: Mean bytes of a row.
        shapes: Shapes of the rows if they differ.
    """

    index: int
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    row_bytes: int
    shapes: tuple[tuple[int, ...], ...] | None = None


@final
class StoredColumns:
    """The stored columns of one result, read in place.

    Args:
        columns: The columns, packed for the object store.
    """

    def __init__(self, columns: Sequence[_Packed]) -> None:
        self._columns = tuple(columns)
        self._unpacked: dict[int, Column] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return StoredColumns, (self._columns,)

    @property
    def num_bytes(self) -> int:
        """The number of bytes of the columns."""
        return sum(
            column.num_bytes if isinstance(column, LaidParts) else int(_array_of(column).nbytes)
            for column in self._columns
        )

    def load(self, index: int) -> Column:
        """Return a column; numbers are a read-only view of the object store."""
        known = self._unpacked.get(index)
        if known is not None:
            return known
        column = self._columns[index]
        if isinstance(column, LaidParts):
            values = column.join().view()
        else:
            values = unpack_column(*column) if isinstance(column, tuple) else column.view()
        values.setflags(write=False)
        if not values.dtype.hasobject:
            self._unpacked[index] = values
        return values

    def pick(self, index: int, rows: np.ndarray[Any, np.dtype[np.int64]]) -> Column:
        """Return some rows of a column in a new array."""
        column = self._columns[index]
        if isinstance(column, tuple) and index not in self._unpacked:
            array, dtype = column
            if not _is_fixed(array):
                return unpack_column(array.take(pa.array(rows)), dtype)
        chosen: Column = self.load(index)[rows]
        return chosen


def _is_fixed(array: pa.Array) -> bool:
    return isinstance(array.type, pa.FixedShapeTensorType) or bool(pa.types.is_primitive(array.type))


def _array_of(column: ArrowColumn | Column) -> Any:
    return column[0] if isinstance(column, tuple) else column


@final
class ResultColumn(StoredColumn):
    """One stored column of a result, by reference. The result is freed when nothing names its columns any more.

    Args:
        ref: Reference to the `StoredColumns`.
        place: The column in it.
    """

    def __init__(self, ref: Any, place: ColumnPlace) -> None:
        self.dtype, self.shape, self.row_bytes, self.shapes = place.dtype, place.shape, place.row_bytes, place.shapes
        self._ref = ref
        self._place = place
        self._result: StoredColumns | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return ResultColumn, (self._ref, self._place)

    def load(self) -> Column:
        return self._fetched().load(self._place.index)

    def pick(self, rows: np.ndarray[Any, np.dtype[np.int64]]) -> Column:
        return self._fetched().pick(self._place.index, rows)

    def _fetched(self) -> StoredColumns:
        if self._result is None:
            self._result = _mapped.get(self._ref)
        return self._result


@final
class _MappedResults:
    """The results that this process has mapped most recently. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: OrderedDict[Any, StoredColumns] = OrderedDict()

    def get(self, ref: Any) -> StoredColumns:
        """Map a result. Blocks for at most `Timeouts.input_s`.

        Raises:
            DeadlineExceededError: The result did not come in time.
            UnavailableError: The result is lost.
        """
        with self._lock:
            found = self._kept.get(ref)
            if found is not None:
                self._kept.move_to_end(ref)
                return found
        result = _get(ref)
        with self._lock:
            self._kept[ref] = result
            total = sum(each.num_bytes for each in self._kept.values())
            while len(self._kept) > 1 and (total > _KEPT_BYTES or len(self._kept) > _KEPT_RESULTS):
                total -= self._kept.popitem(last=False)[1].num_bytes
        return result


def _get(ref: Any) -> StoredColumns:
    limit_s = Timeouts().input_s
    try:
        result: StoredColumns = ray.get(ref, timeout=limit_s)
    except GetTimeoutError:
        raise DeadlineExceededError(
            f"A block of elements that an input worker made must come from the object store within {limit_s:g} s, and "
            "has not. The machine may be overloaded, or the network slow."
        ) from None
    except RayError as error:
        raise UnavailableError(
            f"A block of elements that an input worker made is lost: {first_line(error)} Iterate again, or load the "
            "last saved state."
        ) from error
    return result


_mapped = _MappedResults()


def store_result(result: StageResult) -> tuple[StageResult, StoredColumns | None]:
    """Take the large columns out of a result.

    Neighbouring blocks of one kind become one block: each large element is a block of its own after a map.

    Returns:
        The answer, and the columns to store; None if there are none.
    """
    stored: list[_Packed] = []
    items: list[Item] = []
    for kind, run in itertools.groupby(result.items, _kind):
        blocks = list(run)
        if kind is None:
            items += blocks
        else:
            items.append(_without_large_columns(cast(list[Block], blocks), stored))
    if not stored:
        return result, None
    return replace(result, items=tuple(items)), StoredColumns(stored)


def _kind(item: Item) -> Any:
    """Return a key that is equal for blocks that can be concatenated; None for other items."""
    if not isinstance(item, Block) or item.holds_objects:
        return None
    return item.structure, item.specs, tuple((column.dtype, column.shape[1:]) for column in item.columns)


def _without_large_columns(blocks: Sequence[Block], stored: list[_Packed]) -> Block:
    num_rows = sum(block.num_rows for block in blocks)
    columns: list[Any] = []
    for number in range(len(blocks[0].columns)):
        parts = [block.columns[number] for block in blocks]
        place = _place_of(parts, num_rows, len(stored))
        if place is not None:
            stored.append(LaidParts(parts) if LaidParts.suit(parts) else pack_column(_joined(parts)))
        columns.append(_joined(parts) if place is None else place)
    return Block(blocks[0].structure, blocks[0].specs, tuple(columns), num_rows)


def _joined(parts: Sequence[Column]) -> Column:
    return parts[0] if len(parts) == 1 else concat_columns(parts, np.concatenate)


def _place_of(parts: Sequence[Column], num_rows: int, index: int) -> ColumnPlace | None:
    """Return the place of a column that is worth storing; None for one that is not."""
    first = parts[0]
    is_text = first.dtype.hasobject
    if is_text and first.ndim > 1:
        return None
    num_bytes = sum(map(_object_bytes if is_text else _dense_bytes, parts))
    if num_bytes < max(_LEAST_BYTES, _LEAST_ROW_BYTES * num_rows):
        return None
    shapes = None
    if any(isinstance(part[0], np.ndarray) for part in parts if is_text and len(part)):
        shapes = tuple(row.shape for part in parts for row in part)
    return ColumnPlace(index, first.dtype, (num_rows, *first.shape[1:]), num_bytes // num_rows, shapes)


def _dense_bytes(column: Column) -> int:
    return column.nbytes


def _object_bytes(column: Column) -> int:
    return sum(len(row) if isinstance(row, bytes | str) else getattr(row, "nbytes", 0) for row in column)


def with_row_ids(result: StageResult, ref: Any) -> StageResult:
    """Return the result of an answer, with row ids of the columns stored under `ref`."""
    return replace(result, items=tuple(_with_ids(item, ref) for item in result.items))


def _with_ids(item: Item, ref: Any) -> Item:
    if not isinstance(item, Block) or ColumnPlace not in map(type, item.columns):
        return item
    columns: list[Any] = list(item.columns)  # places stand among them
    named = [remote_of(ResultColumn(ref, each)) if isinstance(each, ColumnPlace) else each for each in columns]
    return Block(item.structure, item.specs, tuple(named), item.num_rows)
