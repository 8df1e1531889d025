"""Blocks: consecutive elements as columns, the unit in which a pipeline moves and processes data.

A block of n elements holds one column per leaf. A column of numbers of one shape is a dense array of shape (n,
*leaf_shape); anything else (bytes, str, arrays of varying shape) is an object array whose first axis has n entries. So
`batch` is a reshape, `take` a slice, and a shuffle one gather.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, final

import numpy as np

from raydist.core.errors import SpecError
from raydist.core.nest import Structure, unflatten
from raydist.pipelines.elements.columns import Column, RemoteColumn, concat_columns, in_memory, object_column
from raydist.pipelines.elements.object_leaves import ObjectLeaf
from raydist.pipelines.elements.recycled_memory import RecycledMemory
from raydist.pipelines.elements.spec import (
    CollatedSpec,
    DatasetSpec,
    ObjectSpec,
    RaggedSpec,
    ReplicatedSpec,
    TensorSpec,
    most_specific_common,
)

__all__ = ["Block", "Column", "common_specs", "concat_blocks", "copied", "object_column", "private_column", "same_kind"]

_MAX_SIGNATURE = 400
_OBJECTS = frozenset([CollatedSpec, DatasetSpec, RaggedSpec, ReplicatedSpec])
_taken = RecycledMemory(most_idle_bytes=8 << 20)  # for the blocks that a shuffle makes


@final
@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """Consecutive elements, column by column.

    A column that something else may read too (a user's array, a mapped file) is marked read-only (`writeable` is
    False); a writable column belongs to the block. Read-only columns are copied before elements are handed out, so that
    a user may work in place.

    Attributes:
        structure: The nest of one element.
        specs: Spec of each leaf of one element, in leaf order.
        columns: One array per leaf, first axis `num_rows`. Dense (dtype of the spec) where every element has the same
            shape and holds numbers; otherwise of dtype object, with bytes, str or arrays (of bytes, str, or any shape)
            as rows. Or row ids of values that are stored elsewhere: see `columns.py`.
        num_rows: Number of elements.
    """

    structure: Structure
    specs: tuple[TensorSpec, ...]
    columns: tuple[Column, ...]
    num_rows: int

    @property
    def num_bytes(self) -> int:
        """Bytes of the dense columns, and an estimate from the first row of the others."""
        total = 0
        for column in self.columns:  # runs for every metered block: a generator would take twice as long
            is_local_object = column.dtype.hasobject and not isinstance(column, RemoteColumn)
            total += _object_bytes(column) if is_local_object else column.nbytes
        return total

    @property
    def bytes_here(self) -> int:
        """The part of `num_bytes` that is in this process: row ids count nothing."""
        if not self.is_remote:
            return self.num_bytes
        here = tuple(column for column in self.columns if not isinstance(column, RemoteColumn))
        return Block(self.structure, self.specs, here, self.num_rows).num_bytes

    @property
    def holds_datasets(self) -> bool:
        """Return True if a leaf is a dataset."""
        return DatasetSpec in map(type, self.specs)  # runs for every large result

    @property
    def holds_objects(self) -> bool:
        """Return True if a leaf is a dataset, a list of tensors or another object: no column of tensors or text."""
        return not _OBJECTS.isdisjoint(map(type, self.specs))

    def of_tensors(self, operation: str) -> Block:
        """Return this block; raise SpecError if a leaf is a dataset or another object, for `operation`."""
        if self.holds_objects:
            raise next(spec for spec in self.specs if isinstance(spec, ObjectSpec)).refused(operation)
        return self

    @property
    def signature(self) -> str:
        """Structure and dtypes as text, which must be the same for neighbouring elements."""
        return _signature(self.structure, tuple([spec.dtype for spec in self.specs]))

    def slice(self, start: int, stop: int) -> Block:
        """Return elements `start` .. `stop` - 1, without a copy."""
        start, stop, _ = slice(start, stop).indices(self.num_rows)
        return Block(self.structure, self.specs, tuple(c[start:stop] for c in self.columns), max(0, stop - start))

    def take(self, indices: np.ndarray[Any, np.dtype[np.int64]]) -> Block:
        """Return a copy of the elements at `indices`, in that order."""
        columns = [c[indices] if isinstance(c, RemoteColumn) else _taken.take(c, indices) for c in self.columns]
        return Block(self.structure, self.specs, tuple(columns), len(indices))

    @property
    def is_remote(self) -> bool:
        """Return True if a column holds row ids."""
        return RemoteColumn in map(type, self.columns)

    def in_memory(self) -> Block:
        """Return the elements with their values. Blocks while they are fetched, and raises the errors of the store."""
        if not self.is_remote:
            return self
        return Block(self.structure, self.specs, tuple(map(in_memory, self.columns)), self.num_rows)

    def shared(self) -> Block:
        """Return the same elements, marked read-only."""
        return Block(self.structure, self.specs, tuple(map(_shared_column, self.columns)), self.num_rows)

    def row(self, index: int) -> Any:
        """Return element `index` as transformations see it: a nest of numpy arrays, numpy scalars, bytes and str."""
        return unflatten(self.structure, [column[index] for column in self.columns])

    def rows(self) -> list[Any]:
        """Return every element, see :meth:`row`."""
        return [self.row(i) for i in range(self.num_rows)]


@lru_cache(maxsize=256)  # runs for every block, and the name of a dtype alone takes numpy 5 us
def _signature(structure: Structure, dtypes: tuple[np.dtype[Any], ...]) -> str:
    names = [{"S": "bytes", "U": "str"}.get(dtype.kind, dtype.name) for dtype in dtypes]
    text = f"{structure} of {', '.join(names)}"
    if len(text) <= _MAX_SIGNATURE:
        return text
    # Tables may have thousands of columns, but an iterator's state, which contains signatures, must stay small.
    digest = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
    return f"{text[:_MAX_SIGNATURE]}... ({len(names)} leaves, {digest})"


def same_kind(first: str, second: str) -> bool:
    """Return True if elements with these signatures may follow each other.

    An element with None in the place of a leaf says nothing about that leaf and fits all others. An operation that
    joins elements, such as `batch`, raises if they differ.

    >>> same_kind("('*', None) of int64", "('*', '*') of int64, float32"), same_kind("* of int64", "* of float32")
    (True, False)
    """
    return first == second or "None" in first or "None" in second


def _object_bytes(column: Column) -> int:
    if column.size == 0:
        return 0
    first = column.flat[0]
    if isinstance(first, np.ndarray):
        return column.size * (8 + first.nbytes)
    return column.size * (8 + (len(first) if isinstance(first, bytes | str) else 0))  # otherwise datasets


def _shared_column(column: Column) -> Column:
    is_ragged = column.dtype == object and column.ndim == 1 and len(column) and not isinstance(column[0], bytes | str)
    if is_ragged and any(isinstance(row, np.ndarray) for row in column):
        return object_column([_shared_column(row) if isinstance(row, np.ndarray) else row for row in column])
    view = column.view()
    view.flags.writeable = False
    return view


def private_column(column: Column) -> Column:
    """Return `column`, or a copy if something else reads it too: a user may then write to the rows."""
    if column.dtype != object or column.ndim > 1:
        return column if column.flags.writeable else column.copy()
    if len(column) and isinstance(column[0], ObjectLeaf):
        return object_column([row.for_functions() for row in column])
    if any(isinstance(row, np.ndarray) and not row.flags.writeable for row in column):
        return object_column([row.copy() if isinstance(row, np.ndarray) else row for row in column])
    return column


def copied(block: Block) -> Block:
    """Return the same elements in new memory."""
    return Block(block.structure, block.specs, tuple(map(_copied_column, block.columns)), block.num_rows)


def _copied_column(column: Column) -> Column:
    if isinstance(column, RemoteColumn):  # each reader gathers its own values
        return column
    if column.dtype != object or column.ndim > 1:
        return column.copy()
    return object_column([row.copy() if isinstance(row, np.ndarray) else row for row in column])


def concat_blocks(blocks: Sequence[Block]) -> Block:
    """Return one block of all elements.

    Raises SpecError, which shows both specs, if blocks differ in structure or dtype.
    """
    first = blocks[0]
    if len(blocks) == 1:
        return first
    specs = first.specs
    for other in blocks[1:]:
        if other.specs is not specs or other.structure is not first.structure:  # otherwise the specs are equal
            specs = common_specs(first, specs, other)
    columns = tuple(concat_columns([b.columns[i] for b in blocks]) for i in range(len(specs)))
    return Block(first.structure, specs, columns, sum(b.num_rows for b in blocks))


def common_specs(first: Block, specs: tuple[TensorSpec, ...], other: Block) -> tuple[TensorSpec, ...]:
    """Return specs that cover `specs` of `first` and those of `other`; a SpecError shows any difference."""
    if other.structure != first.structure:
        some_none = "None" in f"{first.structure}{other.structure}"
        raise SpecError(
            f"All elements must have one structure, got {first.structure} and then {other.structure}."
            f"{' Put a value in the place of None in a map before.' if some_none else ''}"
        )
    common = []
    for path, mine, theirs in zip(first.structure.paths(), specs, other.specs, strict=True):
        merged = most_specific_common(mine, theirs)
        if merged is None:
            where = f" of {path!r}" if path else ""
            raise SpecError(f"All elements must have one dtype{where}, got {mine} and then {theirs}.")
        common.append(merged)
    return tuple(common)
