"""Dataset.from_ray: the rows of a Ray Data dataset. Dataset.to_ray: a pipeline as a Ray Data datasource."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, final

import numpy as np
import pyarrow as pa
import ray
import ray.data
from ray.data import Dataset as RayDataset
from ray.data.block import Block as RayBlock
from ray.data.block import BlockAccessor, BlockMetadata
from ray.data.dataset import MaterializedDataset
from ray.data.datasource import Datasource, ReadTask
from ray.exceptions import RayTaskError

from raydist.actors.workers.executors import open_executor
from raydist.cluster.nodes import connect
from raydist.compat.ray_internals import copy_of_dataset
from raydist.core.errors import FailedPreconditionError, InvalidArgumentError, SpecError
from raydist.core.exception_utils import annotate
from raydist.core.values import UNKNOWN_CARDINALITY
from raydist.options import Options, Timeouts
from raydist.pipelines.elements.arrow import column_to_arrow
from raydist.pipelines.elements.arrow_rows import RowSchema
from raydist.pipelines.elements.blocks import Block
from raydist.pipelines.elements.items import ElementError, Item
from raydist.pipelines.elements.small_floats import is_small_float
from raydist.pipelines.engine.op import DatasetOp, IterContext
from raydist.pipelines.engine.op_iterator import OpIterator
from raydist.pipelines.engine.op_kinds import SourceOp
from raydist.pipelines.engine.producers import Producer, ReplayIterator
from raydist.pipelines.ops.prefetch import PrefetchOp
from raydist.pipelines.run.iterator import DatasetIterator

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


_NAME = "item"  # Ray's own column name for rows that are not dicts


def ray_dataset(op: DatasetOp, options: Options, seed: int, epoch: int) -> Any:
    """Return the `ray.data.Dataset` of one epoch of a pipeline. Connects to Ray or starts it; reads no data yet."""
    connect()
    source = PipelineDatasource(op, options, seed, epoch)
    return ray.data.read_datasource(source, override_num_blocks=1)


@final
class PipelineDatasource(Datasource):
    """One epoch of a pipeline, read by a single Ray Data task to keep the order.

    Args:
        op: The pipeline as written.
        options: The merged options of the pipeline.
        seed: Root seed.
        epoch: Index of the epoch that every execution reads.
    """

    def __init__(self, op: DatasetOp, options: Options, seed: int, epoch: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # Ray's is not annotated
        self._op = op
        self._options = options
        self._seed = seed
        self._epoch = epoch

    def get_name(self) -> str:
        return "Raydist"

    def estimate_inmemory_data_size(self) -> int | None:
        return None

    def get_read_tasks(
        self, parallelism: int, per_task_row_limit: int | None = None, data_context: Any = None
    ) -> list[ReadTask]:
        rows = self._op.cardinality()
        metadata = BlockMetadata(num_rows=max(0, rows) or None, size_bytes=None, exec_stats=None)
        return [ReadTask(self._blocks, metadata, per_task_row_limit=per_task_row_limit)]

    def _blocks(self) -> Iterator[RayBlock]:
        """Yield the blocks of the epoch. Runs in a Ray worker."""
        blocks: DatasetIterator[Block] = DatasetIterator(
            self._op,
            options=self._options,
            seed=self._seed,
            epoch=self._epoch,
            convert=lambda block: [block],
            make_executor=open_executor,
        )
        try:
            for block in blocks:
                yield _ray_block(block)
        finally:
            blocks.close()


def _ray_block(block: Block) -> RayBlock:
    """Convert elements to Ray rows. Columns are named by leaf paths, as Ray names columns of non-dict rows."""
    structure = block.of_tensors("to_ray").structure
    paths = structure.paths()
    columns = {_column_name(paths[place]): _column(block, place) for place in structure.places()}
    plain = {name: column for name, column in columns.items() if isinstance(column, np.ndarray)}
    if len(plain) == len(columns):
        return BlockAccessor.batch_to_block(plain)
    rest = BlockAccessor.for_block(BlockAccessor.batch_to_block(plain)).to_arrow() if plain else {}
    return pa.table({name: rest[name] if name in plain else column for name, column in columns.items()})


def _column(block: Block, place: int) -> Any:
    """Return a column in a type that Ray accepts. Arrays of text become Arrow lists, because Ray would pickle them."""
    column, spec = block.columns[place], block.specs[place]
    if is_small_float(spec.dtype):
        raise SpecError(
            f"Ray Data holds numbers that Arrow has, got a leaf of {spec.dtype.name}. Map it to float32 before to_ray."
        )
    is_text = spec.dtype.kind in "SU" and spec.shape != () and isinstance(column[0], np.ndarray)
    return _lists(list(column), spec.dtype.kind == "U") if is_text else column


def _lists(rows: Sequence[np.ndarray[Any, Any]], is_str: bool) -> Any:
    values = column_to_arrow(np.concatenate(rows))
    if not len(values):
        values = values.cast(pa.large_string() if is_str else pa.large_binary())
    return pa.LargeListArray.from_arrays(pa.array(np.cumsum([0, *map(len, rows)]), pa.int64()), values)


def _column_name(path: str) -> str:
    return _NAME if not path else f"{_NAME}_{path}" if path[0].isdigit() else path
