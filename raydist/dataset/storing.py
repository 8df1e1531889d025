"""Methods of Dataset that keep its elements, or hand them to other libraries."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

from raydist.core.errors import InvalidArgumentError
from raydist.dataset.base import named
from raydist.dataset.running import Running
from raydist.pipelines.formats.files import path_text
from raydist.pipelines.ops.cache import CacheOp, FileCacheOp, SnapshotOp
from raydist.pipelines.ops.prefetch import PrefetchOp
from raydist.pipelines.stored.containers import Container
from raydist.pipelines.stored.write import save_blocks

if TYPE_CHECKING:
    from collections.abc import Callable


class Storing(Running):
    """The methods that store elements."""

    def cache(self, filename: Any = None, name: str | None = None) -> Self:
        """Keep the elements of the first complete pass; later passes and epochs read them from the cache.

        Random results before the cache are the same in every epoch. A pass that is left early, or has an error, is not
        kept.

        In memory, each process keeps its own copy; datasets derived from this one share it if they have one
        `Options.seed`. In a file, later processes and programs read the same elements, even if the pipeline before the
        cache has changed: remove the file then (or use :meth:`snapshot`). The file appears atomically when the pass
        ends; chunks of some MB have checksums. One iterator at a time can fill it.

        The state of an iterator is a count, and a position in the file once it exists; resuming before that reads the
        input again from the beginning.

        Args:
            filename: Path of a directory that raydist creates, local or a URI that fsspec supports (without locks
                there: of several writers the first to finish wins). None keeps the elements in memory.
            name: Name of the operation in `explain` and `stats`.

        Raises:
            FailedPreconditionError: Another iterator is filling the file, or the path has other content (at iteration).
            InvalidArgumentError: Elements of named tuples or dataclasses cannot be kept in a file (at iteration).
            DataLossError: The file is damaged (at iteration).

        Source: tf.data.Dataset.cache.

        >>> ds = rd.Dataset.range(3).map(lambda x: x * 2).cache()
        >>> [[int(x) for x in ds] for epoch in (0, 1)]
        [[0, 2, 4], [0, 2, 4]]
        >>> import os, tempfile
        >>> path = os.path.join(tempfile.mkdtemp(), "cache")
        >>> [[int(x) for x in rd.Dataset.range(n).cache(path)] for n in (3, 99)]
        [[0, 1, 2], [0, 1, 2]]
        """
        return type(self)(
            named(CacheOp(self._op) if filename is None else FileCacheOp(self._op, path_text(filename)), name)
        )

    def snapshot(
        self,
        path: Any,
        compression: str | None = "AUTO",
        reader_func: Callable[[Any], Any] | None = None,
        shard_func: Callable[..., Any] | None = None,
        name: str | None = None,
    ) -> Self:
        """Cache elements in files that are written anew when the pipeline before the cache changes.

        The elements of a first complete pass are kept in a directory below `path`, named by a fingerprint of the
        pipeline: functions (their code, constants, defaults, closures, the globals that they name), data in memory,
        file names, arguments, seeds; not the content of files. Random results are frozen. A pass that is left early or
        has an error is not kept; while one iterator writes, others read their input. State and resuming are those of
        :meth:`cache` with a file name.

        With `reader_func` or `shard_func` all elements are written before the first is returned, so that every epoch
        reads the shards in the same order; an error in the input then ends the iteration, and a second iterator that
        would write is an error. The state of an iterator is the reader's.

        Args:
            path: Local or a URI that fsspec supports; created if missing. Directories of old pipelines stay there.
            compression: "AUTO", None, "GZIP", "ZSTD", "LZ4" or "SNAPPY".
            reader_func: Receives a dataset of datasets, one for each shard, and returns the dataset of all their
                elements. Called in every epoch. None: one shard after the other.
            shard_func: Receives the arguments of a map function and returns the shard of an element, a whole number >=
                0.
                None: one shard, in the order of the elements.
            name: Name of the operation in `explain` and `stats`.

        Raises:
            InvalidArgumentError: Another compression; shards of an endless dataset. Elements of named tuples or
                dataclasses (at iteration).
            SpecError: `shard_func` returns no whole number, `reader_func` no dataset (at iteration).
            DataLossError: A file is damaged (at iteration).

        Source: tf.data.Dataset.snapshot.

        >>> import os, tempfile
        >>> path = os.path.join(tempfile.mkdtemp(), "snapshots")
        >>> ds = rd.Dataset.range(20).shuffle(20).snapshot(path)
        >>> [int(x) for x in ds] == [int(x) for x in ds]
        True
        >>> [int(x) for x in rd.Dataset.range(3).snapshot(path)], len(os.listdir(path))
        ([0, 1, 2], 2)
        """
        for argument, function in (("reader_func", reader_func), ("shard_func", shard_func)):
            if function is not None and not callable(function):
                raise InvalidArgumentError(f"{argument} must be a function or None, got {function!r:.100}.")
        container = SnapshotOp.compression(compression)
        return type(self)(
            named(SnapshotOp(self._op, path_text(path), container, type(self), reader_func, shard_func), name)
        )

    def prefetch(self, buffer_size: int | None = None, name: str | None = None) -> Self:
        """Let a background thread produce up to `buffer_size` elements ahead.

        The thread starts with the first `next`, and ends with the iterator. With an adaptive buffer the thread starts
        only if it pays: when blocks of elements take 0.5 ms and more, the consumer works too, and a trial was faster;
        it ends when a later trial without it is not slower. The buffer doubles (up to 1,024) when the consumer finds
        it empty after it was full, and is halved while more than half of it is never needed.
        `Options.autotune.ram_budget` limits the bytes in all buffers of a pipeline. Pipelines with functions are read
        ahead without a `prefetch`, too, while that pays: `Options.optimization.inject_prefetch`. The state of an
        iterator is that of the returned elements.

        Args:
            buffer_size: Elements (batches, after a `batch`); 0 does nothing; None or AUTOTUNE adapts. (With
                `Options.autotune.enabled` False there is always a thread, and a buffer of 2.)
            name: Name of the operation in `explain` and `stats`.

        Raises:
            InvalidArgumentError: `buffer_size` is below AUTOTUNE.

        Source: tf.data.Dataset.prefetch.

        >>> [int(x) for x in rd.Dataset.range(3).prefetch(2)]
        [0, 1, 2]
        """
        return type(self)(named(PrefetchOp(self._op, buffer_size), name))

    def save(
        self,
        path: Any,
        compression: str | None = None,
        shard_func: Callable[..., Any] | None = None,
        format: str = "arrow",  # noqa: A002 - the term of Arrow and Parquet
    ) -> None:
        """Write the elements of one new epoch into a new directory, for :meth:`load`.

        Blocks until everything is on disk. The directory appears atomically at the end: a crash leaves no partial
        directory under this name, and of two writers the first to finish wins. Every chunk of some MB has a checksum.
        pandas, Polars, DuckDB, ... can read the files: they are Arrow IPC streams or Parquet.

        Args:
            path: A path that does not exist yet: local, or a URI that fsspec supports.
            compression: None, "GZIP", "ZSTD", "LZ4" or "SNAPPY".
            shard_func: Receives the arguments of a map function and returns the shard of an element, a whole number >=
                0: elements of different shards go into different files. None: one shard, in the order of the elements.
            format: "arrow" or "parquet".

        Raises:
            InvalidArgumentError: Another compression or format; elements of named tuples or dataclasses (map them to
                dicts).
            FailedPreconditionError: The path exists.
            NotFoundError: The parent directory does not exist.
            SpecError: `shard_func` returns no whole number; elements that differ in structure, dtype or rank.
            Exception: The error of an element: nothing is saved.

        Source: tf.data.Dataset.save.

        >>> import os, tempfile
        >>> path = os.path.join(tempfile.mkdtemp(), "squares")
        >>> rd.Dataset.range(4).map(lambda x: x * x).save(path, compression="GZIP")
        >>> [int(x) for x in rd.Dataset.load(path)]
        [0, 1, 4, 9]
        """
        container = Container.of(format, compression)
        blocks = self._iterate(lambda block: [block])
        try:
            save_blocks(path, self.element_spec, blocks, container, shard_func)
        finally:
            blocks.close()


class Exporting(Running):
    """The methods that convert datasets to those of other libraries."""

    def to_torch(self) -> Any:
        """Return this dataset as a `torch.utils.data.IterableDataset`, for a plain `DataLoader`.

        With n workers each returns every n-th element, so that no element comes twice. But each worker runs the whole
        pipeline to find its elements: prefer `num_workers=0` and raydist's own parallelism. Every iteration is a new
        epoch, the same one with workers as without.

        Source: torch.utils.data.IterableDataset.

        >>> from torch.utils.data import DataLoader
        >>> [x.tolist() for x in DataLoader(rd.Dataset.range(5).to_torch(), batch_size=2)]
        [[0, 1], [2, 3], [4]]
        """
        # The class inherits from a torch class, but building and pickling pipelines must not import torch.
        from raydist.dataset.to_torch import TorchDataset

        return TorchDataset(self)

    def to_ray(self) -> Any:
        """Return one new epoch of this dataset as a `ray.data.Dataset`, in order. Connects to Ray; reads nothing yet.

        Dict elements become rows; other elements get a column `item` (`item_0`, `item_1`, ... for tuples). One Ray Data
        task runs the pipeline each time Ray executes the dataset: the same epoch again. Repartition the result
        (`.repartition(n)`) for more parallelism after it.

        Source: ray.data.from_torch, ray.data.Dataset.

        >>> rows = rd.Dataset.range(3).map(lambda x: {"x": x, "y": x * x}).to_ray()  # doctest: +SKIP
        >>> rows.take_all()  # doctest: +SKIP
        [{'x': 0, 'y': 0}, {'x': 1, 'y': 1}, {'x': 2, 'y': 4}]
        """
        from raydist.actors.ray_data import ray_dataset  # imports Ray Data

        return ray_dataset(self._op, self.options(), self._root_seed(), next(self._epochs))
