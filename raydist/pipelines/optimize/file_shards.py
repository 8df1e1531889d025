"""Whole files for each worker: the part of a pipeline that one of several workers reads under `AutoShardPolicy.FILE`.

The shard comes before the operation that reads the files: worker w of W reads files w, w + W, ... Shuffles of file
names move after the shard, so that the workers' files are disjoint for any order.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from raydist.core.errors import InvalidArgumentError, NotFoundError
from raydist.core.values import UNKNOWN_CARDINALITY
from raydist.pipelines.engine.build import name_operations
from raydist.pipelines.engine.op import DatasetOp
from raydist.pipelines.engine.probe import open_probe
from raydist.pipelines.ops.cache import FileCacheOp, SnapshotOp
from raydist.pipelines.ops.combine import ChooseOp
from raydist.pipelines.ops.interleave import InterleaveOp
from raydist.pipelines.ops.nested import call_on_element, graph_of
from raydist.pipelines.ops.record_files import RecordFilesOp
from raydist.pipelines.ops.repeat import AssertCardinalityOp
from raydist.pipelines.ops.selection import ShardOp, UniqueOp
from raydist.pipelines.ops.shuffle import ShuffleOp
from raydist.pipelines.optimize.rewrites import Names, rewrite_each, with_inputs
from raydist.pipelines.sources.numpy_files import NumpyFileOp
from raydist.pipelines.sources.table_files import SplitFilesOp, TableFilesOp

_USE_DATA = "Use AutoShardPolicy.DATA, which reads everything once and gives each worker its part"


def obstacle_to_files(op: DatasetOp) -> str | None:
    """Return the reason why workers cannot share the files of a pipeline; None if they can.

    May call the function of an `interleave` on a first element, to find out if it reads files.
    """
    if isinstance(op, RecordFilesOp | TableFilesOp | SplitFilesOp | NumpyFileOp):
        return None
    if isinstance(op, UniqueOp):
        return f"{op.full_label} must see the elements of all files"
    if isinstance(op, FileCacheOp | SnapshotOp):
        return f"{op.full_label} would keep the elements of one worker's files where the others look for theirs"
    if isinstance(op, InterleaveOp) and _opens_files(op):
        return None
    if not op.inputs:
        return f"{op.full_label} reads no files"
    return next(filter(None, map(obstacle_to_files, _read_by(op))), None)


def _read_by(op: DatasetOp) -> tuple[DatasetOp, ...]:
    """Return the inputs whose elements come out. The choices between datasets are the same for all workers."""
    return op.datasets if isinstance(op, ChooseOp) else op.inputs


def _opens_files(op: InterleaveOp) -> bool:
    """Return True if the function of `op` makes datasets that read files. Calls it on the first element."""
    iterator = open_probe(op.input)
    try:
        made = graph_of(call_on_element(op.fn, iterator.next_block(1), 0), op.label)
    except StopIteration:
        return False
    except FileNotFoundError:  # the function has looked for a file, which exists only on the workers' nodes
        return True
    finally:
        iterator.close()
    return obstacle_to_files(made) is None


def shard_files(op: DatasetOp, num_workers: int, worker: int) -> DatasetOp:
    """Return the part of the pipeline `op` that reads files worker, worker + num_workers, ... of each of its sources.

    Raises:
        NotFoundError: The pipeline reads no files, or has an operation that needs all of them.
        InvalidArgumentError: There are fewer files than workers.
    """
    obstacle = obstacle_to_files(op)
    if obstacle is not None:
        raise NotFoundError(
            f"AutoShardPolicy.FILE needs a pipeline that can be run on each worker's own files (of TFRecordDataset, "
            f"from_csv, from_parquet, an interleave over file names, ...), but {obstacle}. {_USE_DATA}, or OFF."
        )
    return _Share(num_workers, worker, name_operations(op)).of(op)


@dataclass(frozen=True, slots=True)
class _Share:
    """The rewrite for one worker's files. An operation at several places stays one object with one random order."""

    num_workers: int
    worker: int
    names: Names
    done: dict[DatasetOp, DatasetOp] = field(default_factory=dict)
    done_names: dict[DatasetOp, DatasetOp] = field(default_factory=dict)

    def of(self, op: DatasetOp) -> DatasetOp:
        """Return the part of `op` that reads the worker's files."""
        if op not in self.done:
            self.done[op] = new = self._of(op)
            self.names.setdefault(id(new), self.names[id(op)])
        return self.done[op]

    def _of(self, op: DatasetOp) -> DatasetOp:
        if isinstance(op, RecordFilesOp):
            return replace(op, names=self._of_names(op.names))
        if isinstance(op, TableFilesOp):
            self._require(len(op.paths))
            return replace(op, paths=op.paths[self.worker :: self.num_workers], num_rows=UNKNOWN_CARDINALITY)
        if isinstance(op, SplitFilesOp):
            self._require(len(op.paths))
            return op.every(self.num_workers, self.worker)
        if isinstance(op, NumpyFileOp):
            self._require(1)
        if isinstance(op, InterleaveOp) and _opens_files(op):
            return replace(op, input=self._of_names(op.input))
        if isinstance(op, AssertCardinalityOp):
            return self.of(op.input)
        read = _read_by(op)
        return with_inputs(op, self.names, lambda source: self.of(source) if source in read else source)

    def _of_names(self, names: DatasetOp) -> DatasetOp:
        """Return the names of this worker's files, shuffled after the shard instead of before it."""
        if names not in self.done_names:
            self.done_names[names] = self._shard_of(names)
        return self.done_names[names]

    def _shard_of(self, names: DatasetOp) -> DatasetOp:
        shuffles: list[ShuffleOp] = []

        def without_order(node: DatasetOp) -> DatasetOp:
            if isinstance(node, ShuffleOp):
                shuffles.append(node)
            return node.inputs[0] if isinstance(node, ShuffleOp | AssertCardinalityOp) else node

        bare = rewrite_each(names, self.names, without_order)
        self._require(bare.cardinality())
        shard = ShardOp(bare, self.num_workers, self.worker, wants_element=_few(self.num_workers, "fewer than that"))
        return replace(shuffles[-1], input=shard) if shuffles else shard

    def _require(self, num_files: int) -> None:
        if 0 <= num_files < self.num_workers:
            raise InvalidArgumentError(_few(self.num_workers, f"{num_files} in this dataset"))


def _few(num_workers: int, found: str) -> str:
    return (
        f"AutoShardPolicy.FILE, which AUTO is for files, needs at least one file for each of {num_workers} workers, "
        f"but there are {found}. "
        f"{_USE_DATA}, or write more files."
    )
