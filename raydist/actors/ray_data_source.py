"""Dataset.from_ray: the rows of a Ray Data dataset."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, final

import pyarrow as pa
import ray
from ray.data import Dataset as RayDataset
from ray.data.block import BlockAccessor
from ray.data.dataset import MaterializedDataset
from ray.exceptions import RayTaskError

from raydist.compat.ray_internals import copy_of_dataset
from raydist.core.errors import FailedPreconditionError, InvalidArgumentError, SpecError
from raydist.core.exception_utils import annotate
from raydist.core.values import UNKNOWN_CARDINALITY
from raydist.options import Timeouts
from raydist.pipelines.elements.arrow_rows import RowSchema
from raydist.pipelines.elements.items import ElementError, Item
from raydist.pipelines.engine.op import DatasetOp, IterContext
from raydist.pipelines.engine.op_iterator import OpIterator
from raydist.pipelines.engine.op_kinds import SourceOp
from raydist.pipelines.engine.producers import Producer, ReplayIterator
from raydist.pipelines.ops.prefetch import PrefetchOp

_ROWS_AHEAD = 1024
_RAY_TENSORS = "ray.data.arrow_tensor"  # prefix of the names of Ray's extension types for tensors of one shape


def ray_data_op(dataset: Any) -> DatasetOp:
    """Create the op for the argument of `from_ray`. A thread reads the rows, so that waiting for Ray has a limit."""
    if not isinstance(dataset, RayDataset):
        raise SpecError(
            f"from_ray needs a ray.data.Dataset, got {dataset!r:.100} ({type(dataset).__name__}). "
            "Make one with ray.data.from_items or ray.data.read_parquet."
        )
    return PrefetchOp(RayDataOp(dataset), _ROWS_AHEAD)


@final
@dataclass(frozen=True, eq=False)
class RayDataOp(SourceOp):
    """The rows of `dataset`. Ray executes the dataset once per epoch and keeps the order of blocks."""

    dataset: Any

    @property
    def name(self) -> str:
        return "from_ray"

    @property
    def gives_rows(self) -> bool:
        return True

    def cardinality(self) -> int:
        # Only a materialised dataset knows the count without an execution.
        return int(self.dataset.count()) if isinstance(self.dataset, MaterializedDataset) else UNKNOWN_CARDINALITY

    def element_spec(self) -> Any:
        return self._rows.spec

    @cached_property
    def _rows(self) -> RowSchema:
        schema = self.dataset.schema()
        if schema is None:
            raise FailedPreconditionError(
                f"The element_spec of from_ray is that of the dataset's rows, and {self.dataset!r:.100} has no "
                "schema: it is empty, or Ray cannot tell. Check what it reads and filters."
            )
        if not isinstance(schema.base_schema, pa.Schema):
            raise SpecError(
                f"from_ray needs rows that Arrow can hold, got a dataset of {type(schema.base_schema).__name__}. Map "
                "it with batch_format='pyarrow' or 'numpy'."
            )
        return RowSchema(_plain_schema(schema.base_schema))

    def make_iterator(self, ctx: IterContext) -> OpIterator:
        return ReplayIterator(_RayRows(self))


@final
class _RayRows(Producer):
    """One execution of the dataset."""

    def __init__(self, op: RayDataOp) -> None:
        self._op = op
        self._batches: Iterator[pa.RecordBatch] | None = None
        self._num_rows = 0

    def make(self, limit: int) -> Sequence[Item]:
        if self._batches is None:
            self._batches = self._execute()
        try:
            batch = next(self._batches)
        except RayTaskError as error:  # raised by a user's function: the execution has ended
            self._batches = iter(())
            annotate(error, "In the execution of the dataset that was given to from_ray.")
            return [ElementError(error)]
        first = self._num_rows
        self._num_rows += batch.num_rows
        return self._op._rows.items(batch, lambda row, column: _null(first + row, column))

    def _execute(self) -> Iterator[pa.RecordBatch]:
        # A copy, because the order of blocks is a setting of the dataset, and the user's dataset must not change.
        dataset = copy_of_dataset(self._op.dataset)
        dataset.context.execution_options.preserve_order = True
        # References instead of `iter_batches`, which leaves a thread behind for every iterator (seen with Ray 2.60).
        for bundle in dataset.iter_internal_ref_bundles():
            for ref in bundle.block_refs:
                yield from self._read(ray.get(ref, timeout=Timeouts().input_s))

    def _read(self, block: Any) -> list[pa.RecordBatch]:
        table = BlockAccessor.for_block(block).to_arrow()
        if not table.num_rows:
            return []
        plain = pa.table([_plain(column) for column in table.columns], names=table.schema.names)
        batches: list[pa.RecordBatch] = plain.cast(self._op._rows.schema).combine_chunks().to_batches()
        return batches

    def close(self) -> None:
        stop = getattr(self._batches, "close", None)
        self._batches = iter(())
        if stop is not None:
            stop()


def _null(row: int, column: str) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"Elements must not have nulls, but column {column!r} of the Ray dataset has one in row {row}. Fill it in a "
        "map."
    )


def _plain_schema(schema: pa.Schema) -> pa.Schema:
    return pa.schema([pa.field(field.name, _plain_type(field.type)) for field in schema])


def _is_ray_tensor(kind: pa.DataType) -> bool:
    return isinstance(kind, pa.BaseExtensionType) and kind.extension_name.startswith(_RAY_TENSORS)


def _plain_type(kind: Any) -> pa.DataType:
    return pa.fixed_shape_tensor(kind.storage_type.value_type, kind.shape) if _is_ray_tensor(kind) else kind


def _plain(column: pa.ChunkedArray) -> pa.ChunkedArray:
    if not _is_ray_tensor(column.type):
        return column
    kind = _plain_type(column.type)
    return pa.chunked_array([_tensors(chunk, kind) for chunk in column.chunks], kind)


def _tensors(chunk: Any, kind: Any) -> pa.Array:
    values = pa.array(chunk.to_numpy(zero_copy_only=False).reshape(-1), kind.value_type)
    size = kind.storage_type.list_size
    storage = pa.Array.from_buffers(kind.storage_type, len(chunk), [None], children=[values])
    return pa.ExtensionArray.from_storage(kind, storage) if size else pa.nulls(0, kind)
