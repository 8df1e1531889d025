"""Elements kept: in memory, in files, for a moment."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

from raydist.dataset.base import named
from raydist.dataset.running import Running
from raydist.errors import InvalidArgumentError
from raydist.pipelines.formats.files import path_text
from raydist.pipelines.ops.cache import CacheOp
from raydist.pipelines.ops.file_cache import FileCacheOp
from raydist.pipelines.ops.prefetch import PrefetchOp
from raydist.pipelines.ops.snapshot import SnapshotOp
from raydist.pipelines.stored.containers import Container
from raydist.pipelines.stored.write import save_blocks

__all__ = ["Storing"]


class Storing(Running):
    """Elements kept: in memory, in files, for a moment."""

    def cache(self, filename: Any = None, name: str | None = None) -> Self:
        """Keep the elements of a first whole pass; later passes and epochs read them there.

        What is random before the cache is the same in every epoch. A pass that is left early, or has an error in it, is
        not kept.

        In memory, each process keeps its own; datasets derived from this one share it if they have one `Options.seed`.
        In a file, the elements are there for every process and program after the one that read them, whatever the
        pipeline before the cache is then: remove it when that changes (or use :meth:`snapshot`). They appear in one
        step when the pass ends; chunks of some MB have checksums. One iterator at a time can fill it.

        The state of an iterator is a count, and a place in the file once that is there; resuming before reads the input
        again from the beginning.

        Args:
            filename: A path for a directory that raydist makes, local or a URI that fsspec knows (there nothing
                locks: of several writers the first to finish wins). None keeps the elements in memory.
            name: What you call the operation, for `explain` and `stats`.

        Raises:
            FailedPreconditionError: Another iterator is filling the file, or there is something else (at iteration).
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
        """A cache in files that is made anew when what is before it changes.

        The elements of a first whole pass are kept in a directory below `path`, named by a fingerprint of the pipeline
        before it: functions (their code, constants, defaults, what they close over, the globals that they name), data
        in memory, file names, arguments, seeds; not the content of files. What is random is frozen. A pass that is
        left early or has an error in it is not kept; while one iterator writes, others read their input. State and
        resuming are those of :meth:`cache` with a file name.

        With `reader_func` or `shard_func` all elements are written before the first is handed out, so that their order
        is the same in every epoch that the reader sees them in; an error in the input then ends the iteration, and a
        second iterator that would write is an error. The state of an iterator is the reader's.

        Args:
            path: Local or a URI that fsspec knows; made where it is missing. Directories of old pipelines stay there.
            compression: "AUTO", None, "GZIP", "ZSTD", "LZ4" or "SNAPPY".
            reader_func: Gets a dataset of datasets, one for each shard, and returns the dataset of all their elements.
                Called in every epoch. None: one shard after the other.
            shard_func: Gets what a map function gets and returns the shard of an element, a whole number >= 0. None:
                one shard, in the order of the elements.
            name: What you call the operation, for `explain` and `stats`.

        Raises:
            InvalidArgumentError: Another compression; shards of a dataset without an end. Elements of named tuples or
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
        """Let a background thread make up to `buffer_size` elements ahead.

        The thread starts with the first element asked for, and ends with the iterator. One that adapts starts only
        where it pays: when blocks of elements take 0.2 ms and more, their consumer works too, and either waits (for a
        device, a disk) or a trial was faster; it ends when it pays no more. Its buffer doubles (up to 1,024) when the
        consumer finds it empty after it was full, and is halved while more than half of it is never needed.
        `Options.autotune.ram_budget` bounds the bytes in all buffers of a pipeline. Pipelines with functions are read
        ahead without a `prefetch` too, while that pays: `Options.optimization.inject_prefetch`. The state of an
        iterator is that of the elements handed out.

        Args:
            buffer_size: Elements (batches, behind a `batch`); 0 does nothing; None or AUTOTUNE adapts. (With
                `Options.autotune.enabled` False there is always a thread, and a buffer of 2.)
            name: What you call the operation, for `explain` and `stats`.

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
        format: str = "arrow",  # noqa: A002 - the word of those who know Arrow and Parquet
    ) -> None:
        """Write the elements of one new epoch into a new directory, for :meth:`load`.

        Returns when everything has reached the disk. The directory appears at the end, in one step: a crash leaves
        no half of it under this name, and of two writers the first to finish wins. Every chunk of some MB has a
        checksum. pandas, Polars, DuckDB, ... read the files too: they are Arrow IPC streams or Parquet.

        Args:
            path: A path that does not exist yet: local, or a URI that fsspec knows.
            compression: None, "GZIP", "ZSTD", "LZ4" or "SNAPPY".
            shard_func: Gets what a map function gets and returns the shard of an element, a whole number >= 0: elements
                of different shards go into different files. None: one shard, in the order of the elements.
            format: "arrow" or "parquet".

        Raises:
            InvalidArgumentError: Another compression or format; elements of named tuples or dataclasses (map them to
                dicts).
            FailedPreconditionError: The path exists.
            NotFoundError: Its parent does not.
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
