"""Columns of blocks: arrays in memory, and columns of row ids, whose values are stored elsewhere.

A pool of workers keeps large results in the object store. The pipeline then moves *row ids*: a :class:`RemoteColumn`
names, for each row, a :class:`StoredColumn` and a row of it. Operations that do not look at values (`shuffle`, `batch`,
`take`, ...) work on ids, and a reader gathers the values (:meth:`RemoteColumn.values`).
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, Self, cast, final

import numpy as np

from raydist.pipelines.elements.recycled_memory import RecycledMemory

Column = np.ndarray[Any, np.dtype[Any]]
"""One leaf of the elements of a block. May be a :class:`RemoteColumn`, which has the same length, slices and shape."""

_Ids = np.ndarray[Any, np.dtype[np.int64]]

_ROW_BITS = 32
_ROW_MASK = (1 << _ROW_BITS) - 1
_numbers = itertools.count(1)
_gathered = RecycledMemory(most_idle_bytes=64 << 20)  # the memory of gathered columns
_LONG_RUN = 4  # rows: longer runs are copied as slices
_FEW_STORED = 4  # stored columns that a column may refer to without need


def object_column(rows: Sequence[Any]) -> Column:
    """Return a column of any Python objects, including arrays."""
    column = np.empty(len(rows), dtype=object)
    for index, row in enumerate(rows):  # `column[:] = rows` would iterate over arrays
        column[index] = row
    return column


class StoredColumn(ABC):
    """A column that is stored outside of the blocks that name its rows. It is freed with the last object that names it.

    Attributes:
        dtype: Dtype of the column: object for bytes, str, and arrays of different shapes.
        shape: (rows, *shape of a row).
        row_bytes: Mean bytes of a row.
        shapes: Shape of each row if they differ; None if all have `shape[1:]`.
    """

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    row_bytes: int
    shapes: Sequence[tuple[int, ...]] | None = None

    @abstractmethod
    def load(self) -> Column:
        """Return the values; the caller must not write to them. May block; raises the errors of the store."""

    def pick(self, rows: _Ids) -> Column:
        """Return the values of some rows in a new array. May block; raises the errors of the store."""
        return self.load()[rows]

    @cached_property
    def number(self) -> int:
        """The number that row ids of this process contain."""
        return next(_numbers)

    @cached_property
    def rows(self) -> RowsOfColumn:
        """The column of which each row is a row of a row of this column."""
        return RowsOfColumn(self)

    def with_stored(self, change: Callable[[StoredColumn], StoredColumn]) -> StoredColumn:
        """Return this column with `change` applied to the stored columns that hold values: this one, or its parts."""
        return change(self)

    @property
    def can_shrink(self) -> bool:
        """Return True if a column of some of the rows is cheaper to send than this one; see `only`."""
        return False

    def only(self, rows: _Ids) -> StoredColumn:
        """Return a column of some rows; the whole column unless `can_shrink`."""
        return self


@final
class KeptColumn(StoredColumn):
    """A stored column in the memory of this process, for rows that stand beside stored ones. Pickles by value."""

    def __init__(self, values: Column) -> None:
        self.dtype, self.shape = values.dtype, values.shape
        self.row_bytes = _row_bytes(values)
        self._values = values
        if values.dtype == object and values.ndim == 1 and len(values) and isinstance(values[0], np.ndarray):
            self.shapes = [row.shape for row in values]

    def __reduce__(self) -> tuple[Any, ...]:
        return KeptColumn, (self._values,)

    def load(self) -> Column:
        view = self._values.view()
        view.flags.writeable = False
        return view

    @property
    def can_shrink(self) -> bool:
        return True

    def only(self, rows: _Ids) -> StoredColumn:
        return KeptColumn(self._values[rows])


def _row_bytes(values: Column) -> int:
    if values.dtype != object:
        return values.nbytes // len(values) if len(values) else 0
    sizes = [len(row) if isinstance(row, bytes | str) else getattr(row, "nbytes", 0) for row in values.flat]
    return 8 + sum(sizes) // len(values) if len(values) else 0


@final
class RowsOfColumn(StoredColumn):
    """The rows of the rows of a stored column of dense arrays: those of its batches, say."""

    def __init__(self, base: StoredColumn) -> None:
        self._base = base
        num_rows, size, *inner = base.shape
        self.dtype = base.dtype
        self.shape = (num_rows * size, *inner)
        self.row_bytes = base.row_bytes // max(1, size)

    def __reduce__(self) -> tuple[Any, ...]:
        return RowsOfColumn, (self._base,)

    def load(self) -> Column:
        return self._base.load().reshape(self.shape)

    def with_stored(self, change: Callable[[StoredColumn], StoredColumn]) -> StoredColumn:
        return RowsOfColumn(self._base.with_stored(change))

    @cached_property
    def _inner(self) -> RemoteColumn | None:
        return self._base.column.unbatched() if isinstance(self._base, NestedColumn) else None

    @property
    def can_shrink(self) -> bool:
        return self._inner is not None

    def only(self, rows: _Ids) -> StoredColumn:
        return self if self._inner is None else NestedColumn(self._inner[rows])


@final
class NestedColumn(StoredColumn):
    """A column of row ids as a stored column, so that batches of different sizes can stand in one column."""

    def __init__(self, column: RemoteColumn) -> None:
        self.column = column
        self.dtype = column.dtype
        shapes = column.row_shapes
        self.shape = (*column.ids.shape, *(shapes[0] if len(shapes) == 1 else ()))
        self.row_bytes = column.nbytes // max(1, len(column))
        if len(shapes) > 1:
            self.shapes = column.shapes_by_row()

    def __reduce__(self) -> tuple[Any, ...]:
        return NestedColumn, (self.column,)

    def with_stored(self, change: Callable[[StoredColumn], StoredColumn]) -> StoredColumn:
        return NestedColumn(self.column.with_stored(change))

    def load(self) -> Column:
        return self.column.values()

    def pick(self, rows: _Ids) -> Column:
        return self.column[rows].values()

    @property
    def can_shrink(self) -> bool:
        return True

    def only(self, rows: _Ids) -> StoredColumn:
        return NestedColumn(self.column[rows])


@final
class RemoteColumn:
    """A column of row ids: each names a row of a stored column. Has the part of an array's interface that blocks need.

    A column that was batched has ids of shape (rows, batch size).

    Args:
        ids: int64, (number of the stored column << 32) + row.
        stored: The stored columns by number; may hold more than `ids` names.
    """

    __slots__ = ("_most_stored", "ids", "stored")

    def __init__(self, ids: _Ids, stored: Mapping[int, StoredColumn]) -> None:
        self.ids = ids
        self.stored = stored
        self._most_stored = _FEW_STORED

    @classmethod
    def of(cls, column: StoredColumn, start: int = 0, stop: int | None = None) -> Self:
        """Return rows `start` .. `stop` - 1 of a stored column."""
        rows = np.arange(start, column.shape[0] if stop is None else stop, dtype=np.int64)
        return cls((column.number << _ROW_BITS) + rows, {column.number: column})

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the stored columns that the ids name; those in this process's memory with the named rows only."""
        kinds, places = np.unique(self.numbers, return_inverse=True)
        places, rows = places.reshape(self.ids.shape), self.ids & _ROW_MASK
        sent: list[StoredColumn] = []
        for place, number in enumerate(kinds.tolist()):
            column = self.stored[number]
            if column.can_shrink:
                used, rows[places == place] = np.unique(rows[places == place], return_inverse=True)
                column = column.only(used)
            sent.append(column)
        return _arrived, (places.astype(np.int32), rows.astype(np.uint32), sent, self._example)

    @property
    def _example(self) -> StoredColumn | None:
        """A stored column for the dtype and row shape of a column without rows."""
        if self.ids.size:
            return None
        example = next(iter(self.stored.values()))
        return KeptColumn(np.empty((0, *example.shape[1:]), example.dtype))

    @property
    def dtype(self) -> np.dtype[Any]:
        """Dtype of the values."""
        return next(iter(self.stored.values())).dtype

    @property
    def numbers(self) -> _Ids:
        """For each id, the number of the stored column, a key of `stored`."""
        return self.ids >> _ROW_BITS

    @property
    def row_shapes(self) -> list[tuple[int, ...]]:
        """The different shapes of stored rows, in order of appearance."""
        columns = iter(self.stored.values())
        first = next(columns)
        if first.shapes is None and all(each.shapes is None and each.shape[1:] == first.shape[1:] for each in columns):
            return [first.shape[1:]]
        return list(dict.fromkeys(self._shapes())) or [first.shape[1:]]

    def _shapes(self) -> Iterable[tuple[int, ...]]:
        numbers = self.ids.reshape(-1) >> _ROW_BITS
        used = dict.fromkeys(numbers.tolist())
        if all(self.stored[number].shapes is None for number in used):
            return (self.stored[number].shape[1:] for number in used)
        rows = (self.ids.reshape(-1) & _ROW_MASK).tolist()
        columns = [self.stored[number] for number in numbers.tolist()]
        return (
            column.shape[1:] if column.shapes is None else column.shapes[row]
            for column, row in zip(columns, rows, strict=True)
        )

    def shapes_by_row(self) -> list[tuple[int, ...]]:
        """Return the shape of every stored row, in order."""
        return [self[row].row_shapes[0] for row in range(len(self))]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the values; without the dimensions of a stored row if rows differ."""
        shapes = self.row_shapes
        return (*self.ids.shape, *(shapes[0] if len(shapes) == 1 else ()))

    @property
    def ndim(self) -> int:
        """Number of dimensions, see `shape`."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of stored rows that are named."""
        return self.ids.size

    @property
    def nbytes(self) -> int:
        """Approximate bytes of the values, wherever they are."""
        if not self.ids.size:
            return 0
        mean = sum(column.row_bytes for column in self.stored.values()) // len(self.stored)
        return int(mean * self.ids.size)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, key: Any) -> Self:
        ids = self.ids[key]
        if isinstance(key, slice) or not isinstance(ids, np.ndarray):
            return type(self)(np.asarray(ids), self.stored)
        return type(self)(ids, self._named(ids))

    def _named(self, ids: _Ids) -> Mapping[int, StoredColumn]:
        """Return the stored columns that `ids` names; at least one, which tells the dtype."""
        if len(self.stored) == 1:
            return self.stored
        named = {number: self.stored[number] for number in np.unique(ids >> _ROW_BITS).tolist()}
        return named or dict(itertools.islice(self.stored.items(), 1))

    def __setitem__(self, key: Any, rows: RemoteColumn) -> None:
        self.ids[key] = rows.ids
        self.stored = {**self.stored, **rows.stored}
        if len(self.stored) > self._most_stored:  # let go of stored columns that no id names any more
            self.stored = self._named(self.ids)
            self._most_stored = _FEW_STORED + len(self.stored) * 5 // 4

    def with_stored(self, change: Callable[[StoredColumn], StoredColumn]) -> Self:
        """Return a column of the same ids, with `change` applied to the stored columns that hold values."""
        named = self._named(self.ids)
        return type(self)(self.ids, {number: column.with_stored(change) for number, column in named.items()})

    def copy(self) -> Self:
        """Return a column whose ids can be changed."""
        return type(self)(self.ids.copy(), self.stored)

    def batched(self, count: int, size: int) -> Self:
        """Return `count` rows of `size` rows each."""
        return type(self)(self.ids.reshape(count, size, *self.ids.shape[1:]), self.stored)

    def unbatched(self) -> Self | None:
        """Return the rows of all rows; None if they cannot be named: rows without dimensions or of different shapes."""
        if self.ids.ndim > 1:
            return type(self)(self.ids.reshape(self.ids.shape[0] * self.ids.shape[1], *self.ids.shape[2:]), self.stored)
        if len(self.row_shapes) > 1 or not self.row_shapes[0] or self.dtype == object:
            return None
        named = self._named(self.ids)
        size = self.row_shapes[0][0]
        inner = {column.rows.number: column.rows for column in named.values()}
        ids = np.empty((len(self), size), np.int64)
        for number, column in named.items():
            mine: Any = slice(None) if len(named) == 1 else np.flatnonzero(self.numbers == number)
            first = (column.rows.number << _ROW_BITS) + (self.ids[mine] & _ROW_MASK) * size
            ids[mine] = first[:, None] + np.arange(size)
        return type(self)(ids.reshape(-1), inner)

    def element(self, row: int) -> Any:
        """Return one row as a column of its rows; its value where that cannot be."""
        only = self[row : row + 1]
        rows = only.unbatched()
        if rows is not None:
            return rows
        values = only.values()
        return values[0] if values.dtype == object else values[0, ...]

    def values(self) -> Column:
        """Gather the values. Blocks while they are fetched, and raises the errors of the store.

        Returns:
            A read-only view of a stored column where the rows are consecutive; otherwise a new array.
        """
        rows = self.ids.reshape(-1)
        found = _gather(rows, self.stored, self.dtype)
        return found if self.ids.ndim == 1 else found.reshape(*self.ids.shape, *found.shape[1:])


def _arrived(places: Any, rows: Any, sent: Sequence[StoredColumn], example: StoredColumn | None) -> RemoteColumn:
    numbers = np.array([column.number for column in sent], dtype=np.int64)
    ids = (numbers[places] << _ROW_BITS) + rows if len(numbers) else np.empty(places.shape, np.int64)
    stored = {column.number: column for column in sent}
    if example is not None:
        stored[example.number] = example
    return RemoteColumn(ids.astype(np.int64), stored)


def _gather(ids: _Ids, stored: Mapping[int, StoredColumn], dtype: np.dtype[Any]) -> Column:
    if not len(ids):
        return np.empty((0, *next(iter(stored.values())).shape[1:]), dtype)
    parts = list(_runs(ids))
    if len(parts) == 1 and not dtype.hasobject:
        number, start, stop, _ = parts[0]
        return stored[number].load()[start:stop]
    numbers, rows = ids >> _ROW_BITS, ids & _ROW_MASK
    columns = {number: stored[number] for number in np.unique(numbers).tolist()}
    first = next(iter(columns.values()))
    if len(columns) == 1:
        return first.pick(rows) if dtype.hasobject else _gathered.take(first.load(), rows)
    if not all(column.dtype == dtype and column.shape[1:] == first.shape[1:] for column in columns.values()):
        return _gather_objects(numbers, rows, columns)
    out = _gathered.empty((len(ids), *first.shape[1:]), dtype)
    if not dtype.hasobject and len(parts) * _LONG_RUN < len(ids):
        for number, start, stop, at in parts:
            out[at : at + stop - start] = columns[number].load()[start:stop]
        return out
    for number, column in columns.items():
        mine = np.flatnonzero(numbers == number)
        out[mine] = column.pick(rows[mine])
    return out


def _gather_objects(numbers: _Ids, rows: _Ids, columns: Mapping[int, StoredColumn]) -> Column:
    out = np.empty(len(rows), dtype=object)
    for number, column in columns.items():
        mine = np.flatnonzero(numbers == number)
        for place, value in zip(mine.tolist(), column.pick(rows[mine]), strict=True):
            out[place] = value
    return out


def _runs(ids: _Ids) -> Iterator[tuple[int, int, int, int]]:
    """Yield (number of the stored column, first row, end row, place) for each run of consecutive rows."""
    breaks = np.flatnonzero(np.diff(ids) != 1) + 1
    starts = [0, *breaks.tolist()]
    for at, end in zip(starts, [*starts[1:], len(ids)], strict=True):
        number, row = divmod(int(ids[at]), 1 << _ROW_BITS)
        yield number, row, row + end - at, at


def remote_of(column: StoredColumn, start: int = 0, stop: int | None = None) -> Column:
    """Return rows of a stored column in the form that a block holds."""
    return cast(Column, RemoteColumn.of(column, start, stop))


def in_memory(column: Column) -> Column:
    """Return the values of any column. Blocks while they are fetched, and raises the errors of the store."""
    return column.values() if isinstance(column, RemoteColumn) else column


def as_remote(column: Column) -> RemoteColumn:
    """Return any column as row ids."""
    return column if isinstance(column, RemoteColumn) else RemoteColumn.of(KeptColumn(column))


def concat_columns(columns: Sequence[Column]) -> Column:
    """Return one column of all rows."""
    if any(isinstance(column, RemoteColumn) for column in columns):
        return _concat_ids([as_remote(column) for column in columns])
    is_dense = {column.dtype != object for column in columns}
    if len(is_dense) == 1 and len({column.shape[1:] for column in columns}) == 1:
        return np.concatenate(columns)
    return object_column([row for column in columns for row in column])


def columns_in_turn(columns: Sequence[Column], block_length: int) -> Column:
    """Return the rows of equally long columns in turn, `block_length` rows of each."""
    rounds = len(columns[0]) // block_length
    if not any(isinstance(column, RemoteColumn) for column in columns):
        split = [column.reshape(rounds, block_length, *column.shape[1:]) for column in columns]
        return np.stack(split, axis=1).reshape(sum(map(len, columns)), *columns[0].shape[1:])
    whole = _concat_ids([as_remote(column) for column in columns])
    order = np.arange(len(whole)).reshape(len(columns), rounds, block_length).swapaxes(0, 1).reshape(-1)
    return whole[order]


def alike(first: RemoteColumn, second: RemoteColumn) -> tuple[RemoteColumn, RemoteColumn]:
    """Return two columns of row ids with ids of one shape."""
    if first.ids.shape[1:] == second.ids.shape[1:]:
        return first, second
    return _flat(first), _flat(second)


def _flat(column: RemoteColumn) -> RemoteColumn:
    return column if column.ids.ndim == 1 else RemoteColumn.of(NestedColumn(column))


def _concat_ids(columns: Sequence[RemoteColumn]) -> Column:
    if len({column.ids.shape[1:] for column in columns}) > 1:
        columns = [_flat(column) for column in columns]
    stored: dict[int, StoredColumn] = {}
    for column in columns:
        stored.update(column.stored)
    return cast(Column, RemoteColumn(np.concatenate([column.ids for column in columns]), stored))
