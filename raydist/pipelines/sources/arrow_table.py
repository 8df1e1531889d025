"""Dataset.from_arrow: the rows of an Arrow table in memory."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, final

import numpy as np
import pyarrow as pa

from raydist.errors import InvalidArgumentError, SpecError
from raydist.pipelines.elements.arrow_rows import RowSchema, null_rows
from raydist.pipelines.elements.blocks import Block
from raydist.pipelines.engine.op import IterContext
from raydist.pipelines.engine.op_iterator import OpIterator
from raydist.pipelines.engine.op_kinds import SourceOp
from raydist.pipelines.engine.random_access import RandomAccess
from raydist.pipelines.sources.indexed import IndexedIterator

__all__ = ["ArrowTableOp"]


@final
@dataclass(frozen=True, eq=False)
class ArrowTableOp(SourceOp):
    """The rows of a table without nulls."""

    pure: ClassVar[bool] = True

    table: pa.Table

    @classmethod
    def of(cls, source: Any) -> ArrowTableOp:
        """From a table, or from whatever can be read into one."""
        op = cls(_table(source))
        op.element_spec()  # finds out whether every column can be a leaf
        op._require_no_nulls()
        return op

    def _require_no_nulls(self) -> None:
        passed = 0
        for batch in self.table.to_batches():
            for row, column in null_rows(batch).items():
                raise InvalidArgumentError(
                    f"Elements must not have nulls, but column {column!r} has one in row {passed + row}. Fill them "
                    "(pyarrow.compute.fill_null) or drop the rows (table.drop_null())."
                )
            passed += batch.num_rows

    @property
    def name(self) -> str:
        return "from_arrow"

    @property
    def label(self) -> str:
        return f"from_arrow({', '.join(self.table.schema.names):.60})"

    def cardinality(self) -> int:
        count: int = self.table.num_rows
        return count

    def element_spec(self) -> Any:
        return RowSchema(self.table.schema).spec

    def random_access(self) -> RandomAccess:
        return _TableAccess(self.table)

    def with_columns(self, names: Collection[str]) -> ArrowTableOp | None:
        kept = [name for name in self.table.column_names if name in names]
        return ArrowTableOp(self.table.select(kept)) if len(kept) == len(names) < self.table.num_columns else None

    def make_iterator(self, ctx: IterContext) -> OpIterator:
        return IndexedIterator(self.random_access())


@final
@dataclass(frozen=True, eq=False)
class _TableAccess(RandomAccess):
    table: pa.Table

    def __len__(self) -> int:
        count: int = self.table.num_rows
        return count

    def __getstate__(self) -> dict[str, Any]:
        return {"table": self.table}

    @cached_property
    def _rows(self) -> RowSchema:
        return RowSchema(self.table.schema)

    def gather(self, indices: Any) -> Block:
        neighbours = len(indices) > 0 and bool((np.diff(indices) == 1).all())
        rows = self.table.slice(int(indices[0]), len(indices)) if neighbours else self.table.take(pa.array(indices))
        return self._rows.block(_one_batch(rows))


def _one_batch(table: pa.Table) -> pa.RecordBatch:
    batches = table.combine_chunks().to_batches()
    if batches:
        return batches[0]
    return pa.RecordBatch.from_arrays([pa.nulls(0, field.type) for field in table.schema], schema=table.schema)


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
