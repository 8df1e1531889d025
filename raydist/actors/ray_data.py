"""`Dataset.from_ray` reads the rows of a Ray Data dataset. `Dataset.to_ray` makes a pipeline a Ray Data dataset."""

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

_PREFETCHED_ROWS = 1024
_RAY_TENSORS = "ray.data.arrow_tensor"  # prefix of the names of Ray's extension types for tensors of one shape


def ray_data_op(dataset: Any) -> DatasetOp:
    """Create the op for the argument of `from_ray`. A thread reads the rows, so that a wait for Ray can time out."""
    if not isinstance(dataset, RayDataset):
        raise SpecError(
            f"from_ray needs a ray.data.Dataset, got {dataset!r:.100} ({type(dataset).__name__}). "
            "Make one with ray.data.from_items or ray.data.read_parquet."
        )
    return PrefetchOp(RayDataOp(dataset), _PREFETCHED_ROWS)


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
        # Ray would execute any other dataset to count its rows.
        return int(self.dataset.count()) if isinstance(self.dataset, MaterializedDataset) else UNKNOWN_CARDINALITY

    def element_spec(self) -> Any:
        return self._rows.spec

    @cached_property
    def _rows(self) -> RowSchema:
        schema = self.dataset.schema()
        if schema is None:
            raise FailedPreconditionError(
                f"from_ray needs a dataset with a schema, got {self.dataset!r:.100}. The dataset is empty, or Ray does "
                "not know its schema. Check the files that the dataset reads, and its filters."
            )
        if not isinstance(schema.base_schema, pa.Schema):
            raise SpecError(
                f"from_ray needs a dataset with an Arrow schema, got one with {type(schema.base_schema).__name__}. "
                "Map the dataset with batch_format='pyarrow' or 'numpy'."
            )
        return RowSchema(_arrow_schema(schema.base_schema))

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
        except RayTaskError as error:  # a user's function has raised, which ends the execution
            self._batches = iter(())
            annotate(error, "Ray raised this error when it executed the dataset of from_ray.")
            return [ElementError(error)]
        first = self._num_rows
        self._num_rows += batch.num_rows
        return self._op._rows.items(batch, lambda row, column: _null_error(first + row, column))

    def _execute(self) -> Iterator[pa.RecordBatch]:
        # `preserve_order` is a setting of the dataset. A copy gets it, because the user's dataset must not change.
        dataset = copy_of_dataset(self._op.dataset)
        dataset.context.execution_options.preserve_order = True
        # `iter_batches` would leave one running thread for each iterator (seen with Ray 2.60).
        for bundle in dataset.iter_internal_ref_bundles():
            for ref in bundle.block_refs:
                yield from self._record_batches(ray.get(ref, timeout=Timeouts().input_s))

    def _record_batches(self, block: Any) -> list[pa.RecordBatch]:
        table = BlockAccessor.for_block(block).to_arrow()
        if not table.num_rows:
            return []
        converted = pa.table([_arrow_column(column) for column in table.columns], names=table.schema.names)
        batches: list[pa.RecordBatch] = converted.cast(self._op._rows.schema).combine_chunks().to_batches()
        return batches

    def close(self) -> None:
        stop = getattr(self._batches, "close", None)
        self._batches = iter(())
        if stop is not None:
            stop()


def _null_error(row: int, column: str) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"Elements must not have nulls, but column {column!r} of the Ray dataset has a null in row {row}. Replace "
        "nulls in a map of the Ray dataset."
    )


def _arrow_schema(schema: pa.Schema) -> pa.Schema:
    return pa.schema([pa.field(field.name, _arrow_type(field.type)) for field in schema])


def _is_ray_tensor(kind: pa.DataType) -> bool:
    return isinstance(kind, pa.BaseExtensionType) and kind.extension_name.startswith(_RAY_TENSORS)


def _arrow_type(kind: Any) -> pa.DataType:
    """Return Arrow's own tensor type for Ray's tensor type; other types unchanged."""
    return pa.fixed_shape_tensor(kind.storage_type.value_type, kind.shape) if _is_ray_tensor(kind) else kind


def _arrow_column(column: pa.ChunkedArray) -> pa.ChunkedArray:
    if not _is_ray_tensor(column.type):
        return column
    kind = _arrow_type(column.type)
    return pa.chunked_array([_tensor_array(chunk, kind) for chunk in column.chunks], kind)


def _tensor_array(chunk: Any, kind: Any) -> pa.Array:
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
        op: The pipeline, not yet optimized.
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
    """Convert elements to Ray rows. The path of a leaf is the name of its column; an element without keys is `item`."""
    structure = block.of_tensors("to_ray").structure
    paths = structure.paths()
    columns = {_column_name(paths[place]): _column(block, place) for place in structure.places()}
    arrays = {name: column for name, column in columns.items() if isinstance(column, np.ndarray)}
    if len(arrays) == len(columns):
        return BlockAccessor.batch_to_block(arrays)
    converted = BlockAccessor.for_block(BlockAccessor.batch_to_block(arrays)).to_arrow() if arrays else {}
    return pa.table({name: converted[name] if name in arrays else column for name, column in columns.items()})


def _column(block: Block, place: int) -> Any:
    """Return a column in a type for Ray. Arrays of text become lists of Arrow, because Ray would pickle the arrays."""
    column, spec = block.columns[place], block.specs[place]
    if is_small_float(spec.dtype):
        raise SpecError(
            f"to_ray needs dtypes that Arrow has, got a leaf of {spec.dtype.name}. Map it to float32 before to_ray."
        )
    is_text = spec.dtype.kind in "SU" and spec.shape != () and isinstance(column[0], np.ndarray)
    return _text_lists(list(column), spec.dtype.kind == "U") if is_text else column


def _text_lists(rows: Sequence[np.ndarray[Any, Any]], is_str: bool) -> Any:
    values = column_to_arrow(np.concatenate(rows))
    if not len(values):
        values = values.cast(pa.large_string() if is_str else pa.large_binary())
    return pa.LargeListArray.from_arrays(pa.array(np.cumsum([0, *map(len, rows)]), pa.int64()), values)


def _column_name(path: str) -> str:
    return _NAME if not path else f"{_NAME}_{path}" if path[0].isdigit() else path
