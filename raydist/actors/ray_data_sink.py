"""The data source behind Dataset.to_ray: a pipeline as a Ray Data datasource."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, final

import numpy as np
import pyarrow as pa
import ray.data
from ray.data.block import Block as RayBlock
from ray.data.block import BlockAccessor, BlockMetadata
from ray.data.datasource import Datasource, ReadTask

from raydist.actors.workers.executors import open_executor
from raydist.cluster.nodes import connect
from raydist.core.errors import SpecError
from raydist.options import Options
from raydist.pipelines.elements.arrow import column_to_arrow
from raydist.pipelines.elements.blocks import Block
from raydist.pipelines.elements.small_floats import is_small_float
from raydist.pipelines.engine.op import DatasetOp
from raydist.pipelines.run.iterator import DatasetIterator

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
