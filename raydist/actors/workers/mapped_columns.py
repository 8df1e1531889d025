"""Results of stages in the object store: their columns, read in place."""

from __future__ import annotations

import functools
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import pyarrow as pa
import ray
from ray.exceptions import GetTimeoutError, ObjectLostError, RayError

from raydist.actors.packed_columns import ArrowColumn, ConcatenatedParts, unpack_column
from raydist.actors.supervision import first_line
from raydist.core.errors import DeadlineExceededError, RaydistError, UnavailableError
from raydist.pipelines.elements.columns import Column

PackedResultColumn = ConcatenatedParts | ArrowColumn | Column

_KEPT_BYTES = 512 << 20  # of results that this process has mapped and may need again: the buffer of a shuffle, say
_KEPT_RESULTS = 256


@final
class LostResultError(RaydistError):
    """A stored result is lost with its node. The pipeline that owns the result can make it again.

    Args:
        message: See :class:`RaydistError`.
        result: The reference, as text.
    """

    def __init__(self, message: str = "", result: str = "") -> None:
        super().__init__(message)
        self.result = result


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

    def __init__(self, columns: Sequence[PackedResultColumn]) -> None:
        self._columns = tuple(columns)
        self._unpacked: dict[int, Column] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return StoredColumns, (self._columns,)

    @functools.cached_property
    def num_bytes(self) -> int:
        return sum(
            column.num_bytes if isinstance(column, ConcatenatedParts) else int(_array_of(column).nbytes)
            for column in self._columns
        )

    def load(self, index: int) -> Column:
        """Return a column; numbers are a read-only view of the object store."""
        known = self._unpacked.get(index)
        if known is not None:
            return known
        column = self._columns[index]
        if isinstance(column, ConcatenatedParts):
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
class _MappedResults:
    """The results that this process has mapped most recently. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: OrderedDict[Any, StoredColumns] = OrderedDict()
        self._kept_bytes = 0

    def get(self, ref: Any, limit_s: float) -> StoredColumns:
        """Map a result. Blocks for at most `limit_s`.

        Raises:
            DeadlineExceededError: The result did not come in time.
            UnavailableError: The result is lost.
        """
        with self._lock:
            found = self._kept.get(ref)
            if found is not None:
                self._kept.move_to_end(ref)
                return found
        result = _get(ref, limit_s)
        with self._lock:
            known = self._kept.pop(ref, None)  # another thread may have mapped the result meanwhile
            self._kept[ref] = result
            self._kept_bytes += result.num_bytes - (known.num_bytes if known is not None else 0)
            while len(self._kept) > 1 and (self._kept_bytes > _KEPT_BYTES or len(self._kept) > _KEPT_RESULTS):
                self._kept_bytes -= self._kept.popitem(last=False)[1].num_bytes
        return result


def _get(ref: Any, limit_s: float) -> StoredColumns:
    try:
        result: StoredColumns = ray.get(ref, timeout=limit_s)
    except GetTimeoutError:
        raise DeadlineExceededError(
            f"A block of elements that an input worker made must come from the object store within {limit_s:g} s, and "
            "has not. The machine may be overloaded, or the network slow."
        ) from None
    except RayError as error:
        message = (
            f"A block of elements that an input worker made is lost: {first_line(error)} Iterate again, or load the "
            "last saved state."
        )
        if isinstance(error, ObjectLostError):
            raise LostResultError(message, str(ref.hex())) from error
        raise UnavailableError(message) from error
    return result


_mapped = _MappedResults()


def mapped_result(ref: Any, limit_s: float) -> StoredColumns:
    """Map the result under `ref`, which this process may have mapped before. Blocks for at most `limit_s`.

    Raises:
        DeadlineExceededError: The result did not come in time.
        LostResultError: The result is lost with its node.
        UnavailableError: The result is lost with the pipeline that had it made.
    """
    return _mapped.get(ref, limit_s)
