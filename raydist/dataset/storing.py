"""Elements kept: in memory, in files, for a moment."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

from raydist.dataset.running import Running
from raydist.pipelines.formats.containers import Container
from raydist.pipelines.formats.saved import save_blocks
from raydist.pipelines.ops.cache import CacheOp
from raydist.pipelines.ops.prefetch import PrefetchOp

__all__ = ["Storing"]


class Storing(Running):
    """Elements kept: in memory, in files, for a moment."""

    def cache(self) -> Self:
        """Keep the elements of a first whole pass in memory; later passes and epochs read them there.

        What is random before the cache is the same in every epoch. A pass that is left early, or has an error in it, is
        not kept. Each process keeps its own; datasets derived from this one share it if they have one `Options.seed`.
        The state of an iterator is a count: resuming in a new process reads the input again from the beginning.

        >>> ds = rd.Dataset.range(3).map(lambda x: x * 2).cache()
        >>> [[int(x) for x in ds] for epoch in (0, 1)]
        [[0, 2, 4], [0, 2, 4]]
        """
        return type(self)(CacheOp(self._op))

    def prefetch(self, buffer_size: int | None = None) -> Self:
        """Let a background thread make up to `buffer_size` elements ahead; 0 does nothing, None or AUTOTUNE adapts.

        The state of an iterator is that of the elements handed out. The thread ends with the iterator.

        Raises:
            InvalidArgumentError: `buffer_size` is below AUTOTUNE.

        >>> [int(x) for x in rd.Dataset.range(3).prefetch(2)]
        [0, 1, 2]
        """
        return type(self)(PrefetchOp(self._op, buffer_size))

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
