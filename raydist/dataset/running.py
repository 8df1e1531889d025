"""Properties of a dataset, and iterating over it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from raydist.dataset.base import DatasetBase, named
from raydist.options import Options
from raydist.pipelines.elements.arrow import arrow_batches
from raydist.pipelines.elements.blocks import Block
from raydist.pipelines.elements.convert import numpy_rows, torch_rows
from raydist.pipelines.elements.seeds import draw_seed
from raydist.pipelines.engine.merged_options import merged_options
from raydist.pipelines.engine.op import DatasetOp
from raydist.pipelines.metering.iteration_meters import IterationMeters
from raydist.pipelines.metering.stats import PipelineStats, stats_of
from raydist.pipelines.ops.with_options import WithOptionsOp
from raydist.pipelines.run.explain import explain
from raydist.pipelines.run.iterator import DatasetIterator
from raydist.pipelines.run.plan import begin_epoch, make_plan
from raydist.values import INFINITE_CARDINALITY, UNKNOWN_CARDINALITY

if TYPE_CHECKING:
    from raydist.pipelines.run.profile import Profile

__all__ = ["Running"]


class Running(DatasetBase):
    """Properties of a dataset, and iterating over it."""

    def with_options(self, options: Options, name: str | None = None) -> Self:
        """Set options for the whole pipeline; what is set explicitly wins over what was set before.

        Args:
            options: Copied: later changes to the object do nothing.
            name: What you call the operation, for `explain` and `stats`.

        Raises:
            TypeError: It is no `rd.Options`.

        Source: tf.data.Dataset.with_options.

        >>> rd.Dataset.range(3).with_options(rd.Options(seed=7)).options().seed
        7
        """
        if not isinstance(options, Options):
            raise TypeError(f"with_options takes rd.Options, got {options!r:.100}. Write rd.Options(seed=7), say.")
        return type(self)(named(WithOptionsOp(self._op, options.frozen()), name))

    def options(self) -> Options:
        """The options of the pipeline, merged over all inputs; they cannot be changed.

        Source: tf.data.Dataset.options.

        >>> rd.Dataset.range(3).options().deterministic
        True
        """
        return merged_options(self._op).frozen()

    @property
    def element_spec(self) -> Any:
        """Nest of `rd.TensorSpec` of one element; None for a dimension that is not known.

        May call a map function on up to three first elements, while that is quick (a dimension in which they differ is
        None): give the map `output_spec=` where that must not be.

        Raises:
            FailedPreconditionError: It is found on a first element, and there is none.
            Exception: The function's error on that element.

        Source: tf.data.Dataset.element_spec.

        >>> rd.Dataset.range(4).batch(2).element_spec
        TensorSpec(shape=(None,), dtype=int64)
        """
        return self._op.element_spec()

    def cardinality(self) -> int:
        """Number of elements, INFINITE_CARDINALITY or UNKNOWN_CARDINALITY. Runs nothing, and never blocks.

        Source: tf.data.Dataset.cardinality.

        >>> ds = rd.Dataset.range(10).batch(4)
        >>> ds.cardinality(), ds.unbatch().cardinality() == rd.UNKNOWN_CARDINALITY
        (3, True)
        """
        return self._op.cardinality()

    def __len__(self) -> int:
        """Number of elements, where it is known.

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
        """The graph as written, as optimised, and where each stage runs, as text.

        Once something ran: also where each stage ran last, the bottleneck, and what the autotuner did; see `stats`.

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
        """What every stage did in the iteration over this object that was begun last, running or ended; `str()` of it
        is a table: elements a second, busy share, queues, who waits for whom, and the bottleneck. Blocks never.

        Without an iteration it is empty. Every epoch begins anew; an iterator has a `stats()` of its own.

        Source: tf.data.experimental.StatsAggregator; the shape of the summary is grain's execution summary.

        >>> ds = rd.Dataset.range(100).map(lambda x: x + 1).batch(10)
        >>> for batch in ds:
        ...     pass
        >>> [(stage.name, stage.elements) for stage in ds.stats().stages]
        [('range-0', 100), ('map-1', 100), ('batch-2', 10), ('batch-2-prefetch', 10)]
        """
        return stats_of(self._meters)

    def profile(self, seconds: float = 5.0, path: str | Path | None = None) -> Profile:
        """Iterate for a while, print where the time went, and write a page and a timeline of it.

        The table shows each stage: elements and bytes a second, how busy its workers were, how full its queue was, and
        whom it waited for. The page has the graph with the bottleneck marked; it is one file that needs nothing else.
        The timeline is a Chrome trace: one row a thread or input worker, with their last blocks. An epoch that ends
        sooner is followed by the next. Later iterations get the epochs that they would have got.

        Args:
            seconds: For how long from the first element on, > 0. Blocks that long, and until the element under way then
                is made. What comes before (starting workers, filling a shuffle) is told, and left out of the numbers.
            path: Where to write the page, "<name>.html" in a directory that exists; the trace goes beside it, to
                "<name>.trace.json". None for a new directory for temporary files.

        Raises:
            InvalidArgumentError: `seconds` or `path` is not as above.
            UnavailableError, DeadlineExceededError: What runs the pipeline failed. Errors of elements are counted.

        Source: the pages of tf.data's profiler (input pipeline analyzer) and of torch.profiler; Chrome's Trace Event
        Format.

        >>> profile = rd.Dataset.range(1000).map(lambda x: x + 1).batch(10).profile(seconds=0.2)  # doctest: +ELLIPSIS
        Profile of <Dataset batch(10), cardinality 100>
        ...
        >>> profile.html_path.name, profile.trace_path.name
        ('profile.html', 'profile.trace.json')
        """
        # Rendering is not needed where nobody profiles.
        from raydist.pipelines.run.profile import run_profile

        open_epoch = functools.partial(self._open, _to_torch())
        profile = run_profile(open_epoch, title=f"Profile of {self!r}", seconds=seconds, path=path)
        print(profile)
        return profile

    def __iter__(self) -> DatasetIterator[Any]:
        """A new epoch; elements are nests of torch tensors (scalar bytes and str as Python objects).

        Nothing runs before the first element is asked for. Each `next` blocks until an element is there.
        """
        return self._iterate(_to_torch())

    def as_numpy_iterator(self) -> DatasetIterator[Any]:
        """A new epoch; elements are nests of numpy arrays and scalars, bytes and str. Needs no torch.

        Returns:
            What `iter(dataset)` gives, with the same methods and the same state.

        Source: tf.data.Dataset.as_numpy_iterator.

        >>> list(rd.Dataset.range(2).as_numpy_iterator())
        [np.int64(0), np.int64(1)]
        """
        return self._iterate(numpy_rows)

    def arrow_batches(self) -> DatasetIterator[Any]:
        """A new epoch; each element (a batch) as a `pyarrow.RecordBatch` with one row per entry of its first dimension.

        Leaves are columns, tensors of fixed shape Arrow's `fixed_shape_tensor`.

        Returns:
            What `iter(dataset)` gives, with the same methods and the same state.

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
        """That of the options, else one drawn for this object when it is iterated first."""
        seed = self.options().seed
        if seed is not None:
            return seed
        if self._drawn_seed is None:
            self._drawn_seed = draw_seed()
        return self._drawn_seed


def _to_torch() -> Callable[[Block], list[Any]]:
    # Torch is imported by the first iteration that hands out tensors: building and pickling pipelines needs none.
    from torch import from_numpy

    return functools.partial(torch_rows, from_numpy=from_numpy)
