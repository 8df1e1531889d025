"""Properties of a dataset, and iteration over it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from raydist.core.values import INFINITE_CARDINALITY, UNKNOWN_CARDINALITY
from raydist.dataset.base import DatasetBase, named
from raydist.options import Options
from raydist.pipelines.elements.arrow import arrow_batches
from raydist.pipelines.elements.blocks import Block
from raydist.pipelines.elements.convert import numpy_rows, torch_rows
from raydist.pipelines.elements.seeds import draw_seed
from raydist.pipelines.engine.op import DatasetOp, merged_options
from raydist.pipelines.metering.iteration_meters import IterationMeters
from raydist.pipelines.metering.stats import PipelineStats, stats_of
from raydist.pipelines.ops.repeat import WithOptionsOp
from raydist.pipelines.run.iterator import DatasetIterator
from raydist.pipelines.run.plan import begin_epoch, explain, make_plan

if TYPE_CHECKING:
    from raydist.pipelines.run.profile import Profile


class Running(DatasetBase):
    """The methods that inspect a dataset and iterate over it."""

    def with_options(self, options: Options, name: str | None = None) -> Self:
        """Set options for the whole pipeline. Explicitly set values override values that were set before.

        Args:
            options: The options; copied, so that later changes to the object have no effect.
            name: Name of the operation in `explain` and `stats`.

        Raises:
            TypeError: `options` is not an `rd.Options`.

        Source: tf.data.Dataset.with_options.

        >>> rd.Dataset.range(3).with_options(rd.Options(seed=7)).options().seed
        7
        """
        if not isinstance(options, Options):
            raise TypeError(f"with_options takes rd.Options, got {options!r:.100}. Write rd.Options(seed=7), say.")
        return type(self)(named(WithOptionsOp(self._op, options.frozen()), name))

    def options(self) -> Options:
        """Return the options of the pipeline, merged over all inputs and read-only.

        Source: tf.data.Dataset.options.

        >>> rd.Dataset.range(3).options().deterministic
        True
        """
        return merged_options(self._op).frozen()

    @property
    def element_spec(self) -> Any:
        """Nest of `rd.TensorSpec` of one element; None for an unknown dimension.

        May call a map function on up to three first elements if that is quick (a dimension in which the results differ
        is None): give the map `output_spec=` to avoid the calls.

        Raises:
            FailedPreconditionError: A first element is needed, and there is none.
            Exception: The function's error for that element.

        Source: tf.data.Dataset.element_spec.

        >>> rd.Dataset.range(4).batch(2).element_spec
        TensorSpec(shape=(None,), dtype=int64)
        """
        return self._op.element_spec()

    def cardinality(self) -> int:
        """Return the number of elements, INFINITE_CARDINALITY or UNKNOWN_CARDINALITY. Runs nothing and never blocks.

        Source: tf.data.Dataset.cardinality.

        >>> ds = rd.Dataset.range(10).batch(4)
        >>> ds.cardinality(), ds.unbatch().cardinality() == rd.UNKNOWN_CARDINALITY
        (3, True)
        """
        return self._op.cardinality()

    def __len__(self) -> int:
        """Return the number of elements.

        Raises:
            TypeError: The dataset is infinite, or its length is unknown.
        """
        count = self.cardinality()
        if count == INFINITE_CARDINALITY:
            raise TypeError("The dataset is infinite and has no length. Use take(n) or cardinality().")
        if count == UNKNOWN_CARDINALITY:
            raise TypeError("The dataset's length is unknown before it is read. Use cardinality().")
        return count

    def explain(self) -> str:
        """Return, as text, the graph as written, the optimised graph, and the process or thread of each stage.

        After an iteration: also the last placement of each stage, the bottleneck, and the autotuner's choices; see
        `stats`.

        Source: EXPLAIN of databases; polars.LazyFrame.explain.

        >>> print(rd.Dataset.range(3).take(-1).batch(2).explain())
        as written:
          batch-2: batch(2)
            take-1: take(-1)
              range-0: range(0, 3, 1)
        as optimised (noop_elimination):
          batch-2: batch(2)
            range-0: range(0, 3, 1)
        stages:
          range-0: in the consumer's process
          batch-2: in the consumer's process
        """
        return explain(make_plan(self._op, self.options()), self.stats())

    def stats(self) -> PipelineStats:
        """Return statistics of every stage in the latest iteration over this object, running or ended. Never blocks.

        `str()` of them is a table: elements per second, busy share, queues, waits between stages, and the bottleneck.
        Empty without an iteration. Every epoch starts new statistics; an iterator has its own `stats()`.

        Source: tf.data.experimental.StatsAggregator; the shape of the summary is grain's execution summary.

        >>> ds = rd.Dataset.range(100).map(lambda x: x + 1).batch(10)
        >>> for batch in ds:
        ...     pass
        >>> [(stage.name, stage.elements) for stage in ds.stats().stages]
        [('range-0', 100), ('map-1', 100), ('batch-2', 10), ('batch-2-prefetch', 10)]
        """
        return stats_of(self._meters)

    def profile(self, seconds: float = 5.0, path: str | Path | None = None) -> Profile:
        """Iterate for some time, print where the time was spent, and write an HTML page and a timeline.

        The table shows for each stage elements and bytes per second, how busy its workers were, how full its queue was,
        and which stages it waited for. The page shows the graph with the bottleneck marked; it is one self-contained
        file. The timeline is a Chrome trace: one row per thread or input worker, with the last blocks. An epoch that
        ends sooner is followed by the next. Later iterations get the epochs that they would have got.

        Args:
            seconds: Time to profile from the first element on, > 0. Blocks for that time, and until the element under
                way is complete. Earlier work (starting workers, filling a shuffle) is reported, but not in the numbers.
            path: File for the page, "<name>.html" in an existing directory; the trace goes to "<name>.trace.json"
                beside it. None for a new directory for temporary files.

        Raises:
            InvalidArgumentError: `seconds` or `path` is invalid.
            UnavailableError, DeadlineExceededError: The machinery of the pipeline failed. Errors of elements are
                counted.

        Source: the pages of tf.data's profiler (input pipeline analyzer) and of torch.profiler; Chrome's Trace Event
        Format.

        >>> profile = rd.Dataset.range(1000).map(lambda x: x + 1).batch(10).profile(seconds=0.2)  # doctest: +ELLIPSIS
        Profile of <Dataset batch(10), cardinality 100>
        ...
        >>> profile.html_path.name, profile.trace_path.name
        ('profile.html', 'profile.trace.json')
        """
        # Imported here, because only profiling needs the rendering code.
        from raydist.pipelines.run.profile import run_profile

        open_epoch = functools.partial(self._open, _to_torch())
        profile = run_profile(open_epoch, title=f"Profile of {self!r}", seconds=seconds, path=path)
        print(profile)
        return profile

    def __iter__(self) -> DatasetIterator[Any]:
        """Begin a new epoch; elements are nests of torch tensors (scalar bytes and str as Python objects).

        Nothing runs before the first `next`. Each `next` blocks until an element is ready.
        """
        return self._iterate(_to_torch())

    def as_numpy_iterator(self) -> DatasetIterator[Any]:
        """Begin a new epoch; elements are nests of numpy arrays and scalars, bytes and str. Does not need torch.

        Returns:
            An iterator with the methods and the state of `iter(dataset)`.

        Source: tf.data.Dataset.as_numpy_iterator.

        >>> list(rd.Dataset.range(2).as_numpy_iterator())
        [np.int64(0), np.int64(1)]
        """
        return self._iterate(numpy_rows)

    def arrow_batches(self) -> DatasetIterator[Any]:
        """Begin a new epoch; each element (a batch) is a `pyarrow.RecordBatch` of the rows of its first dimension.

        Leaves are columns, tensors of fixed shape become Arrow's `fixed_shape_tensor`.

        Returns:
            An iterator with the methods and the state of `iter(dataset)`.

        Raises:
            InvalidArgumentError: The leaves of an element have no common first dimension (at iteration): use `batch`.

        Source: pyarrow.RecordBatchReader; ray.data.Dataset.iter_batches(batch_format="pyarrow").

        >>> [batch.num_rows for batch in rd.Dataset.range(5).batch(2).arrow_batches()]
        [2, 2, 1]
        """
        return self._iterate(arrow_batches)

    def _iterate(self, convert: Callable[[Block], list[Any]]) -> DatasetIterator[Any]:
        epoch = next(self._epochs)
        return self._open(convert, epoch, IterationMeters(), begin_epoch(self._op, epoch))

    def _open(
        self,
        convert: Callable[[Block], list[Any]],
        epoch: int,
        meters: IterationMeters,
        begun: DatasetOp | None = None,
    ) -> DatasetIterator[Any]:
        self._meters = meters
        return DatasetIterator(
            begun or self._op,
            options=self.options(),
            seed=self._root_seed(),
            epoch=epoch,
            convert=convert,
            make_executor=self._executors.open,
            meters=meters,
        )

    def _root_seed(self) -> int:
        seed = self.options().seed
        if seed is not None:
            return seed
        if self._drawn_seed is None:
            self._drawn_seed = draw_seed()
        return self._drawn_seed


def _to_torch() -> Callable[[Block], list[Any]]:
    # The first iteration that returns tensors imports torch: building and pickling pipelines must not.
    from torch import from_numpy

    return functools.partial(torch_rows, from_numpy=from_numpy)
