"""Sources with random access, and data in memory: from_tensor_slices, from_tensors, and from_arrow of a table."""

from __future__ import annotations

import itertools
from abc import abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import pyarrow as pa

from raydist.core.errors import InvalidArgumentError, SpecError
from raydist.core.nest import unflatten
from raydist.pipelines.elements.arrow_fields import Conversion, null_error
from raydist.pipelines.elements.arrow_rows import RowSchema
from raydist.pipelines.elements.blocks import Block, Column
from raydist.pipelines.elements.element_nests import flatten_element
from raydist.pipelines.elements.leaf_values import as_leaf
from raydist.pipelines.elements.rows import block_of_rows
from raydist.pipelines.elements.spec import TensorSpec, spec_of_value
from raydist.pipelines.engine.op_iterator import OpIterator
from raydist.pipelines.engine.op_kinds import SourceOp
from raydist.pipelines.engine.random_access import RandomAccess

if TYPE_CHECKING:
    from collections.abc import Callable

    from raydist.pipelines.elements.items import IteratorState
    from raydist.pipelines.engine.op import IterContext

_RUNS_A_BATCH = 4  # with more runs of consecutive rows per batch, `take` is faster than slices


class IndexedIterator(OpIterator):
    """An iterator over elements 0, 1, 2, ..., `at_once` of them at most; its state is the next index."""

    def __init__(self, access: RandomAccess, at_once: int = 1 << 62) -> None:
        self._access = access
        self._at_once = at_once
        self._next = 0

    def next_block(self, limit: int) -> Block:
        stop = min(self._next + min(limit, self._at_once), len(self._access))
        if stop <= self._next:
            raise StopIteration
        try:
            block = self._access.read(self._next, stop)
        except Exception:
            if stop - self._next > 1:  # find the element that raises
                return self.next_block((stop - self._next) // 2)
            self._next = stop
            raise
        self._next = stop
        return block

    def state_dict(self) -> IteratorState:
        return {"next": self._next}

    def load_state_dict(self, state: IteratorState) -> None:
        self._next = int(state["next"])


class IndexedSourceOp(SourceOp):
    """A source with random access to its elements."""

    @abstractmethod
    def random_access(self) -> RandomAccess: ...

    def cardinality(self) -> int:
        return len(self.random_access())

    def make_iterator(self, ctx: IterContext) -> OpIterator:
        return IndexedIterator(self.random_access())


@dataclass(frozen=True, eq=False)
class MemoryOp(IndexedSourceOp):
    """The rows of one block in memory."""

    pure: ClassVar[bool] = True

    block: Block
    made_by: str

    @classmethod
    def of_slices(cls, tensors: Any) -> MemoryOp:
        """Make one element per entry of the first dimension of every leaf. Arrays are not copied."""
        leaves, structure = flatten_element(tensors)
        columns = [_column(leaf, path) for leaf, path in zip(leaves, structure.paths(), strict=True)]
        if not columns:
            raise InvalidArgumentError(f"from_tensor_slices needs at least one tensor, got {tensors!r}.")
        lengths = {path: len(column) for path, column in zip(structure.paths(), columns, strict=True)}
        if len(set(lengths.values())) > 1:
            raise InvalidArgumentError(f"All tensors must have the same first dimension, got {lengths}.")
        specs = tuple(TensorSpec(column.shape[1:], spec_of_value(column).dtype) for column in columns)
        return cls(Block(structure, specs, tuple(columns), len(columns[0])), "from_tensor_slices")

    @classmethod
    def of_tensors(cls, tensors: Any) -> MemoryOp:
        return cls(block_of_rows([tensors]), "from_tensors")

    @property
    def name(self) -> str:
        return self.made_by

    @property
    def gives_rows(self) -> bool:
        return self.made_by == "from_tensor_slices"

    def element_spec(self) -> Any:
        return unflatten(self.block.structure, self.block.specs)

    def random_access(self) -> RandomAccess:
        return _BlockAccess(self.block)

    @property
    def held(self) -> Block:
        return self.block


def _column(leaf: Any, path: str) -> Column:
    array = as_leaf(leaf)
    if not isinstance(array, np.ndarray) or array.ndim == 0:
        where = f" {path!r}" if path else ""
        raise InvalidArgumentError(
            f"from_tensor_slices needs tensors with a first dimension to slice, got a scalar{where}: {leaf!r:.100}. "
            "Use from_tensors for one element."
        )
    return array


@dataclass(frozen=True, eq=False)
class _BlockAccess(RandomAccess):
    block: Block

    def __len__(self) -> int:
        return self.block.num_rows

    def gather(self, indices: Any) -> Block:
        if is_consecutive(indices):
            return self.read(int(indices[0]), int(indices[-1]) + 1)
        taken = self.block.take(indices)
        return taken.shared() if any(column.dtype.hasobject for column in taken.columns) else taken

    def read(self, start: int, stop: int) -> Block:
        return self.block.slice(start, stop).shared()  # every time: an unpickled array is writable


def is_consecutive(indices: Any) -> bool:
    """Return True for indices n, n + 1, n + 2, ..., at least one."""
    if not len(indices) or indices[-1] - indices[0] != len(indices) - 1:
        return False
    return bool((np.diff(indices) == 1).all())


@dataclass(frozen=True, eq=False)
class ArrowTableOp(IndexedSourceOp):
    """The rows of a table. Every null has a fill value or a mask."""

    pure: ClassVar[bool] = True

    table: pa.Table
    conversion: Conversion = Conversion()
    name = "from_arrow"
    gives_rows = True

    @classmethod
    def of(cls, source: Any, conversion: Conversion) -> ArrowTableOp:
        """Return the operation for a table, or for any object that Arrow can read as a table."""
        op = cls(_table(source), conversion)
        conversion.check(op.table.schema)
        op._require_no_nulls()
        return op

    def _require_no_nulls(self) -> None:
        rows, passed = RowSchema(self.table.schema, self.conversion), 0
        for batch in self.table.to_batches():
            for row, column in rows.null_rows(batch).items():
                raise null_error(column, f"row {passed + row}", "drop the rows (table.drop_null())")
            passed += batch.num_rows

    @property
    def label(self) -> str:
        return f"from_arrow({', '.join(self.table.schema.names):.60})"

    def element_spec(self) -> Any:
        return RowSchema(self.table.schema, self.conversion).spec

    def random_access(self) -> RandomAccess:
        return _TableAccess(self.table, self.conversion)


@dataclass(frozen=True, eq=False)
class _TableAccess(RandomAccess):
    table: pa.Table
    conversion: Conversion

    def __len__(self) -> int:
        count: int = self.table.num_rows
        return count

    def __getstate__(self) -> dict[str, Any]:
        return {"table": self.table, "conversion": self.conversion}

    @cached_property
    def _rows(self) -> RowSchema:
        return RowSchema(self.table.schema, self.conversion)

    def gather(self, indices: Any) -> Block:
        block, _ = self._rows.block(self._batch(indices))
        return block

    def _batch(self, indices: Any) -> pa.RecordBatch:
        if is_consecutive(indices):
            return _one_batch(self.table.slice(int(indices[0]), len(indices)))
        try:
            return _one_batch(self.table.take(pa.array(indices)))
        except pa.ArrowNotImplementedError:  # for views and run-end encoded columns
            return TableRows(self.table.schema, self.table.to_batches()).gather(indices)


def _one_batch(table: pa.Table) -> pa.RecordBatch:
    batches = table.combine_chunks().to_batches()
    if batches:
        return batches[0]
    return pa.RecordBatch.from_arrays([pa.nulls(0, field.type) for field in table.schema], schema=table.schema)


class TableRows:
    """Random access to a table in many record batches, larger than memory if mapped. Reads only the needed batches.

    (`Table.take` may join all chunks of a column first.)

    Attributes:
        schema: Schema of all batches.
        batches: The record batches.
        num_rows: Number of rows of all batches.
    """

    def __init__(
        self, schema: pa.Schema, batches: list[pa.RecordBatch], check: Callable[[int], object] | None = None
    ) -> None:
        """Set up the access. `check` is called with the number of a batch before its first row is read."""
        self.schema = schema
        self.batches = batches
        self._ends = np.cumsum([0, *(batch.num_rows for batch in self.batches)])
        self.num_rows = int(self._ends[-1])
        self._check = check
        self._checked: set[int] = set()

    def gather(self, indices: Any) -> pa.RecordBatch:
        """Return the rows at `indices`, in that order. Consecutive rows of one batch are not copied."""
        if not len(indices):
            return _one_batch(self.schema.empty_table())
        rows = np.asarray(indices)
        places = np.searchsorted(self._ends, rows, side="right") - 1
        numbers = np.unique(places).tolist()
        if self._check is not None:
            for number in set(numbers) - self._checked:
                self._check(number)
                self._checked.add(number)
        within = rows - self._ends[places]
        cuts = [0, *(np.flatnonzero((np.diff(rows) != 1) | (np.diff(places) != 0)) + 1).tolist(), len(rows)]
        if len(cuts) - 1 <= _RUNS_A_BATCH * len(numbers):
            return self._slices(places, within, cuts)
        try:
            return self._taken(places, within, numbers)
        except pa.ArrowNotImplementedError:  # for views and run-end encoded columns
            return self._slices(places, within, cuts)

    def _slices(self, places: Any, within: Any, cuts: list[int]) -> pa.RecordBatch:
        """Return runs of consecutive rows as slices: 4 us per run and column, for any size of batch."""
        runs = itertools.pairwise(cuts)
        return _joined([self.batches[places[start]].slice(int(within[start]), end - start) for start, end in runs])

    def _taken(self, places: Any, within: Any, numbers: list[int]) -> pa.RecordBatch:
        """Return rows with `take`: 20 us per batch and column."""
        order = np.argsort(places, kind="stable")
        groups = np.split(within[order], np.flatnonzero(np.diff(places[order])) + 1)
        found = _joined(
            [self.batches[number].take(pa.array(group)) for number, group in zip(numbers, groups, strict=True)]
        )
        return found.take(pa.array(np.argsort(order))) if len(groups) > 1 else found


def _joined(batches: list[pa.RecordBatch]) -> pa.RecordBatch:
    return batches[0] if len(batches) == 1 else _one_batch(pa.Table.from_batches(batches))


def _table(source: Any) -> pa.Table:
    if isinstance(source, pa.Table):
        return source
    if isinstance(source, pa.RecordBatchReader):
        return source.read_all()
    if isinstance(source, pa.RecordBatch) or hasattr(source, "__arrow_c_stream__"):
        return pa.table(source)
    raise SpecError(
        "from_arrow needs a pyarrow Table, RecordBatch or RecordBatchReader, or a table that speaks Arrow's C stream "
        f"interface (pandas, Polars, DuckDB, ...), got {source!r:.100} ({type(source).__name__})."
    )
