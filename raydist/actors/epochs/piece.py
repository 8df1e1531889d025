"""The rows of one replica in consecutive steps, stored as one Arrow record batch.

Pickling passes the buffers of a record batch out of band, so a piece is written into the object store once and read in
place: by replicas with `GroupPiece.leaf`, by other Arrow readers with `GroupPiece.batch`.

Where input workers have stored the rows already, a piece holds row ids, and the replica gathers the rows.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast, final

import numpy as np
import pyarrow as pa

from raydist.actors.packed_columns import (
    PICKLED,
    ArrowColumn,
    ConcatenatedParts,
    pack_column,
    pickle_rows,
    unpack_column,
)
from raydist.pipelines.elements.arrow import DTYPE_KEY, maps
from raydist.pipelines.elements.columns import RemoteColumn, concat_columns
from raydist.pipelines.elements.object_leaves import Box, boxed, handed_out
from raydist.pipelines.elements.recycled_memory import RecycledMemory
from raydist.pipelines.elements.small_floats import dtype_named, tensor_of_array
from raydist.pipelines.run.split import PADDING_ROWS

if TYPE_CHECKING:
    from raydist.pipelines.run.split import Columns

_Array = np.ndarray[Any, np.dtype[Any]]
_Packed = ConcatenatedParts | ArrowColumn | Box | RemoteColumn
_Column = _Array | _Packed

BeginAssembly = Callable[[Sequence[_Array]], Callable[[], list[_Array]]]
"""Starts to copy columns of row ids, and returns a function that waits for the copies: see `Assembly.begin`."""

Ref = Any  # a ray.ObjectRef of a GroupPiece, or a small GroupPiece itself; None for none

INLINE_BYTES = 16 << 10
"""Smaller pieces are sent inside their group: storing one costs 0.8 ms, whatever the size."""

FIRST_ROWS = 1 << 40
"""Added to a place: the first rows of the piece there, for a replica without an object with its own padding rows."""
NO_ROWS = 1 << 41
"""Added to a place: none of the rows of the piece there."""

# Copies for users reuse the memory of earlier copies. Without this, the first batches of each epoch took 30 ms for 8 MB
# instead of 0.7: each epoch has its own reader thread, whose allocations do not reuse the last thread's memory.
_copies = RecycledMemory(most_idle_bytes=32 << 20)


@final
class GroupPiece:
    """One replica's pieces of consecutive steps in the object store (implements `values.Leaves`).

    Args:
        names: Names of the columns.
        columns: One column per leaf: the rows of all steps, then the padding rows.
        ranges: First and end row of the piece at each place, then of the padding rows if any piece has some.
        whole: True if each piece is one entry of each column: for leaves that are not equally many rows.
        zero_copy: Return the object store's memory instead of a private copy.
        padding: The padding piece of a `whole` piece, which has other shapes.
    """

    def __init__(
        self,
        names: Sequence[str],
        columns: Sequence[_Column],
        ranges: tuple[tuple[int, int], ...],
        *,
        whole: bool = False,
        zero_copy: bool = False,
        padding: GroupPiece | None = None,
    ) -> None:
        self._names = tuple(names)
        self._columns = [pack_column(each) if isinstance(each, np.ndarray) else each for each in columns]
        self._arrow: dict[int, ArrowColumn] = {}
        self._ranges = ranges
        self._whole = whole
        self._padding = padding
        self._batch: pa.RecordBatch | None = None
        self._mapped: dict[int, _Array] = {}  # whole columns of numbers: a step's part of one is a slice
        self.zero_copy = zero_copy
        self.absent = False  # input is always present, perhaps with zero rows

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickle, (self._names, self._columns, self._ranges, self._whole, self.zero_copy, self._padding)

    @functools.cached_property  # asked for before every step of a replica
    def num_bytes(self) -> int:
        """The number of bytes of the columns, wherever they are."""
        return sum(map(_bytes_of, self._columns))

    @property
    def bytes_here(self) -> int:
        """The number of bytes that are stored or sent with this object."""
        return sum(
            column.ids.nbytes if isinstance(column, RemoteColumn) else _bytes_of(column) for column in self._columns
        )

    @property
    def is_worth_a_put(self) -> bool:
        """Return True for a large piece of values. A stored piece of row ids would leave its blocks to Ray alone."""
        has_ids = any(isinstance(column, RemoteColumn) for column in self._columns)
        return self.bytes_here > INLINE_BYTES and not has_ids

    def begin_assembly(self, begin: BeginAssembly) -> Callable[[], None]:
        """Start to replace the columns of row ids by what `begin` makes of them; see `Assembly.begin`.

        Returns:
            A function that waits for the new columns.
        """
        places = [place for place, column in enumerate(self._columns) if isinstance(column, RemoteColumn)]
        finish = begin([cast(_Array, self._columns[place]) for place in places])

        def put() -> None:
            for place, column in zip(places, finish(), strict=True):
                self._columns[place] = column if isinstance(column, RemoteColumn) else pack_column(column)

        return put

    @property
    def batch(self) -> pa.RecordBatch:
        """The columns as an Arrow record batch, without a copy of what is stored here."""
        if self._batch is None:
            packed = [self._as_arrow(index) for index in range(len(self._columns))]
            fields = [
                pa.field(name or "value", array.type, metadata={DTYPE_KEY: dtype})
                for name, (array, dtype) in zip(self._names, packed, strict=True)
            ]
            self._batch = pa.RecordBatch.from_arrays([array for array, _ in packed], schema=pa.schema(fields))
        return self._batch

    def _as_arrow(self, index: int) -> ArrowColumn:
        if index not in self._arrow:
            self._arrow[index] = _packed(self._columns[index])
        return self._arrow[index]

    def array(self, index: int, place: int = 0) -> _Array:
        """Return leaf `index` of the piece at `place`; numbers are a read-only view without a copy."""
        if place >= FIRST_ROWS:
            return few_rows(lambda inner: self.array(index, inner), place)
        if place >= len(self._ranges):  # padding rows
            place -= len(self._ranges)
            if self._padding is not None:
                return self._padding.array(index)
        column = self._columns[index]
        if isinstance(column, Box):
            return boxed(column)
        start, stop = self._ranges[place]
        found = self._rows(index, start, stop)
        return _only_entry(found) if self._whole else found

    def _rows(self, index: int, start: int, stop: int) -> _Array:
        mapped = self._mapped.get(index)
        if mapped is not None:
            return mapped[start:stop]
        remote = self._columns[index]
        if isinstance(remote, RemoteColumn):
            return remote[start:stop].values()
        column, name = self._as_arrow(index)
        if name != PICKLED and maps(column, dtype_named(name.decode())):
            self._mapped[index] = unpack_column(column, name)
            return self._mapped[index][start:stop]
        return unpack_column(column.slice(start, stop - start), name)

    def leaf(self, index: int, place: int = 0) -> Any:
        """Return leaf `index` as a CPU tensor; bytes and text as a numpy object array (a scalar as itself).

        The tensor is private and writable. With `zero_copy` it is the object store's memory, shared with every process
        that maps this piece: the program must not write to it, which torch does not check.
        """
        array = self.array(index, place)
        is_private = isinstance(self._columns[index], RemoteColumn) and array.flags.writeable
        return hand_out(array, zero_copy=self.zero_copy or is_private)


def few_rows(piece: Callable[[int], _Array], place: int) -> _Array:
    """Return no rows or the first rows of a piece, depending on `place`; a scalar is returned whole, as by `deal`."""
    some, at = divmod(place, FIRST_ROWS)
    array = piece(at)
    num_rows = PADDING_ROWS if some == 1 else 0
    if (box := _box_in(array)) is not None:
        return boxed(box.first(num_rows))
    return array if array.ndim == 0 and num_rows else array.reshape(array.shape or 1)[:num_rows]


def hand_out(array: _Array, *, zero_copy: bool) -> Any:
    """Return an array of the object store in the form that users get; see `GroupPiece.leaf`."""
    box = _box_in(array)
    if array.dtype == object and box is None:
        return array if array.ndim else array.item()
    import torch  # an input pipeline handles pieces too and has no use for torch

    if box is not None:
        return handed_out(box.value, torch.from_numpy)
    if not zero_copy:
        return tensor_of_array(_copies.copy(array), torch.from_numpy)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return tensor_of_array(array, torch.from_numpy)


def _only_entry(column: _Array) -> _Array:
    if column.dtype != object:
        return column[0, ...]
    entry = column[0]
    if isinstance(entry, np.ndarray):
        return entry
    boxed = np.empty((), dtype=object)
    boxed[()] = entry
    return boxed


def is_regular(columns: Columns) -> bool:
    """Return True if all leaves have the same number of rows, so that several steps can be concatenated."""
    return all(column.ndim and len(column) == len(columns[0]) for column in columns)


def num_bytes_of(columns: Columns) -> int:
    """Return the approximate number of bytes of the leaves in the store."""
    return sum(
        _text_bytes(column) if column.dtype == object and not isinstance(column, RemoteColumn) else column.nbytes
        for column in columns
    )


def _text_bytes(column: _Array) -> int:
    sizes = (len(entry) if isinstance(entry, bytes | str) else getattr(entry, "nbytes", 0) for entry in column.flat)
    return sum(sizes) + 8 * column.size


def pack_piece(
    pieces: Sequence[Columns],
    names: Sequence[str],
    *,
    paddings: Mapping[int, Columns] | None = None,
    zero_copy: bool = False,
) -> GroupPiece:
    """Pack one replica's pieces of consecutive steps into one.

    Args:
        pieces: The leaves of each step; several steps only if all are regular, with the same dtypes and row shapes.
        names: Names of the leaves.
        paddings: Padding rows by step; with the same dtypes and row shapes as a regular piece.
        zero_copy: See `GroupPiece`.
    """
    paddings = paddings or {}
    if not all(map(is_regular, [*pieces, *paddings.values()])):
        (piece,) = pieces
        padding = _pack_whole(paddings[0], names, zero_copy, None) if paddings else None
        return _pack_whole(piece, names, zero_copy, padding)
    parts = [*pieces, *paddings.values()]
    sizes = [len(part[0]) if part else 0 for part in parts]
    stops = np.cumsum(sizes).tolist()
    ranges = [(stop - size, stop) for size, stop in zip(sizes, stops, strict=True)]
    places = ranges[: len(pieces)]
    if paddings:
        padding_of = dict(zip(paddings, ranges[len(pieces) :], strict=True))
        places += [padding_of.get(step, places[step]) for step in range(len(pieces))]
    columns = [_in_order(leaves) for leaves in zip(*parts, strict=True)]
    return GroupPiece(names, columns, tuple(places), zero_copy=zero_copy)


def _pack_whole(piece: Columns, names: Sequence[str], zero_copy: bool, padding: GroupPiece | None) -> GroupPiece:
    columns = [_box_in(column) or column[None] for column in piece]
    return GroupPiece(names, columns, ((0, 1),), whole=True, zero_copy=zero_copy, padding=padding)


def _box_in(column: _Array) -> Box | None:
    entry = column.item() if column.dtype == object and not column.ndim else None
    return entry if isinstance(entry, Box) else None


def _bytes_of(column: _Packed) -> int:
    if isinstance(column, Box | RemoteColumn):
        return column.nbytes
    return column.num_bytes if isinstance(column, ConcatenatedParts) else int(column[0].nbytes)


def _packed(column: _Packed) -> ArrowColumn:
    if isinstance(column, RemoteColumn):
        return pack_column(column.values())
    if isinstance(column, Box):
        return pickle_rows([column.value]), PICKLED
    return pack_column(column.join()) if isinstance(column, ConcatenatedParts) else column


def _in_order(parts: Sequence[_Array]) -> _Array | ConcatenatedParts:
    parts = [part for part in parts if len(part)] or parts[:1]
    if any(isinstance(part, RemoteColumn) for part in parts):
        return concat_columns(parts)
    if ConcatenatedParts.saves_time(parts):
        return ConcatenatedParts(parts)
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _unpickle(
    names: tuple[str, ...],
    columns: Sequence[_Column],
    ranges: tuple[tuple[int, int], ...],
    whole: bool,
    zero_copy: bool,
    padding: GroupPiece | None,
) -> GroupPiece:
    return GroupPiece(names, columns, ranges, whole=whole, zero_copy=zero_copy, padding=padding)
