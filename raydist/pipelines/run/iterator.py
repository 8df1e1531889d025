"""The iterator over a dataset's elements, which takes blocks from the engine and returns elements."""

from __future__ import annotations

import operator
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Generic, Self, TypeVar, final

from raydist.core.errors import OutOfRangeError
from raydist.core.fork_guard import OwningProcess, register_after_fork
from raydist.options import Options
from raydist.pipelines.autotune.tuned_executor import local_executor
from raydist.pipelines.elements.blocks import Block
from raydist.pipelines.elements.items import IteratorState
from raydist.pipelines.elements.key_order import KeyOrder
from raydist.pipelines.elements.saved_state import state_errors
from raydist.pipelines.engine.executor import Executor
from raydist.pipelines.engine.op import DatasetOp
from raydist.pipelines.metering.iteration_meters import IterationMeters
from raydist.pipelines.metering.stats import PipelineStats, stats_of
from raydist.pipelines.run.lazy_iterator import LazyIterator
from raydist.pipelines.run.optional import Optional
from raydist.pipelines.run.plan import explain_recursion, make_plan

_T = TypeVar("_T")
_CLOSE_S = 4.0  # seconds that close() waits for `next` in another thread; then it closes the engine anyway


@final
class DatasetIterator(Generic[_T]):
    """An iterator over one epoch of a dataset: the result of `iter(dataset)` (tf.data.Iterator).

    The first element opens the pipeline; the end, `close()` or garbage collection closes it. `next` blocks until an
    element is ready. The error of an element is raised in its place, and iteration continues after it. Errors of the
    pipeline itself (UnavailableError, DeadlineExceededError) lose no element: the next call tries again from there.

    Several threads may share the iterator: each element goes to exactly one of them, and `state_dict` and `close`
    happen between two elements. (A state saved while another thread processes its element counts that element as handed
    out.)

    Args:
        op: The pipeline as written.
        options: Merged options of the pipeline.
        seed: Root seed.
        epoch: Number of the epoch.
        convert: Function that returns the elements of a block.
        make_executor: Function that returns the executor of the stages.
        meters: Meters to continue; None for new ones.
        row_ids: True if `convert` takes blocks of row ids.

    >>> iterator = iter(rd.Dataset.range(4).shuffle(4, seed=1))
    >>> first, state = [int(next(iterator)), int(next(iterator))], iterator.state_dict()
    >>> rest = [int(x) for x in iterator]
    >>> iterator.load_state_dict(state)
    >>> [int(x) for x in iterator] == rest
    True
    """

    def __init__(
        self,
        op: DatasetOp,
        *,
        options: Options,
        seed: int,
        epoch: int,
        convert: Callable[[Block], list[_T]],
        make_executor: Callable[[Options], Executor] = local_executor,
        meters: IterationMeters | None = None,
        row_ids: bool = False,
    ) -> None:
        self._op = op
        self._convert = convert
        plan = make_plan(op, options)
        self.meters = meters or IterationMeters()
        """Statistics of every stage since the iteration began."""
        self._engine = LazyIterator(plan, options, make_executor, self.meters, seed=seed, epoch=epoch, row_ids=row_ids)
        self._to_skip = 0  # elements after the resumed state that were handed out before
        # The iterator of a list returns each row once, to any thread: taking a row needs no lock.
        self._rows: Iterator[_T] = iter([])
        self._num_rows = 0  # of the last block, up to the end of `_rows`
        self._unconverted: Block | None = None  # elements after `_rows`
        self._lock = threading.RLock()  # for all else; reentrant, because a user's function may call its own iterator
        self._order = KeyOrder()
        self._process = OwningProcess("This iterator")
        register_after_fork(self)

    def after_fork_in_child(self) -> None:
        """Drop the elements in memory after a fork: they belong to the parent."""
        self._rows, self._unconverted = iter([]), None

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> _T:
        for row in self._rows:
            return row
        return self._next_of_refill()

    def _next_of_refill(self) -> _T:
        self._process.require("read")
        with self._lock:
            while True:
                for row in self._rows:  # another thread may have refilled the rows meanwhile
                    return row
                self._refill()

    def _refill(self) -> None:
        self.meters.consumer_asks()
        try:
            self._fill()
        except RecursionError as error:
            explain_recursion(error, self._op)
            raise
        finally:
            self.meters.consumer_goes()

    def _fill(self) -> None:
        if self._unconverted is None:
            self._unconverted = self._read()
        begin, rest = time.perf_counter(), None
        try:
            rows = self._converted(self._unconverted)
        except Exception:  # of one element, whose neighbours must not be lost
            rows, rest = self._converted_singly(self._unconverted)
        self.meters.convert_s += time.perf_counter() - begin
        self._engine.require_open()  # close() does not wait for a slow element
        self._unconverted = rest
        self._num_rows += len(rows)
        self._rows = iter(rows)

    def _read(self) -> Block:
        """Return the next block, without the elements to skip, which count as handed out."""
        while True:
            block = self._engine.read()
            skipped = min(self._to_skip, block.num_rows)
            self._to_skip -= skipped
            if skipped < block.num_rows:
                self._num_rows = skipped
                return block.slice(skipped, block.num_rows) if skipped else block

    def _converted(self, block: Block) -> list[_T]:
        return self._convert(self._order.of(block))

    def _converted_singly(self, block: Block) -> tuple[list[_T], Block | None]:
        """Convert up to the first failing element; return the rows and the rest. Raise the error if it is the first."""
        rows: list[_T] = []
        for row in range(block.num_rows):
            try:
                rows += self._converted(block.slice(row, row + 1))
            except Exception:
                if rows:
                    return rows, block.slice(row, block.num_rows)
                self._num_rows += 1
                self._unconverted = block.slice(1, block.num_rows) if block.num_rows > 1 else None
                raise
        return rows, None

    def has_ready(self) -> bool:
        """Return True if `next` would not wait for a thread or a worker, as far as the iterator knows.

        >>> iterator = iter(rd.Dataset.range(3))
        >>> iterator.has_ready()
        False
        >>> _ = next(iterator)
        >>> iterator.has_ready()
        True
        """
        with self._lock:
            return operator.length_hint(self._rows) > 0 or self._unconverted is not None or self._engine.has_ready()

    def get_next(self) -> _T:
        """Return the next element. Blocks until it is ready.

        Raises:
            OutOfRangeError: The dataset has ended.
            FailedPreconditionError: The iterator is closed.
            Exception: The error of the element at this place.

        >>> int(iter(rd.Dataset.range(3, 9)).get_next())
        3
        """
        try:
            return next(self)
        except StopIteration:
            raise OutOfRangeError("The dataset has ended. Take a new iterator with iter(dataset).") from None

    def get_next_as_optional(self) -> Optional[_T]:
        """Return the next element, or an empty Optional at the end. Blocks until the element is ready.

        Raises:
            FailedPreconditionError: The iterator is closed.
            Exception: The error of the element at this place.

        >>> iter(rd.Dataset.range(0)).get_next_as_optional()
        Optional.empty()
        """
        try:
            return Optional.from_value(next(self))
        except StopIteration:
            return Optional.empty()

    def stats(self) -> PipelineStats:
        """Return the statistics of every stage since the first element, and the bottleneck.

        Any thread may call this at any time; costs some microseconds per stage.

        >>> iterator = iter(rd.Dataset.range(10).batch(5))
        >>> _ = list(iterator)
        >>> iterator.stats().elements
        2
        """
        return stats_of(self.meters)

    @property
    def element_spec(self) -> Any:
        """Nest of `rd.TensorSpec` of one element, like `dataset.element_spec`. May call a map function."""
        return self._op.element_spec()

    @property
    def has_ended(self) -> bool:
        """True once the end was reached, or the iterator was closed.

        >>> iterator = iter(rd.Dataset.range(2))
        >>> _ = list(iterator)
        >>> iterator.has_ended
        True
        """
        return self._engine.ended or self._engine.closed

    def state_dict(self) -> IteratorState:
        """Return the JSON-able state after the last element handed out, at most 10 KB, for :meth:`load_state_dict`.

        The state contains neither prefetched elements nor the buffer of a shuffle: restoring reads them again. Opens
        the pipeline if no element was requested yet.

        Raises:
            FailedPreconditionError: The iterator is closed.

        >>> iterator = iter(rd.Dataset.range(3))
        >>> _ = next(iterator)
        >>> sorted(iterator.state_dict())
        ['at', 'epoch', 'pipeline', 'seed', 'skip', 'version']
        """
        self._process.require("saved")
        with self._lock:
            return self._state_at(self._position())

    def _state_at(self, place: tuple[IteratorState, int]) -> IteratorState:
        return self._engine.saved(*place)

    def _position(self) -> tuple[IteratorState, int]:
        left = operator.length_hint(self._rows)  # read once: other threads may take rows meanwhile
        if left or self._unconverted is not None:
            return self._engine.border, self._num_rows - left
        if self._engine.resume_at is not None:
            return self._engine.resume_at, self._to_skip
        return self._engine.state_dict(), self._to_skip

    def _place(self) -> tuple[IteratorState, int] | None:
        """Return the position, without calling the engine; None before the first element."""
        with self._lock:
            left = operator.length_hint(self._rows)
            if not left and self._unconverted is None and self._engine.resume_at is not None:
                return self._engine.resume_at, self._to_skip
            return (self._engine.border, self._num_rows - left) if self._num_rows else None

    def load_state_dict(self, state: IteratorState) -> None:
        """Continue after the element at which `state` was saved. Opens a closed iterator again.

        Args:
            state: State of an iterator over the same pipeline, in any process. Sets the seed and the epoch, too.

        Raises:
            InvalidArgumentError: The state belongs to another pipeline, or is invalid. Parts that an operation cannot
                read raise the error with the next element.

        >>> ds = rd.Dataset.range(5)
        >>> saved = iter(ds)
        >>> _ = next(saved), next(saved)
        >>> iterator = iter(ds)
        >>> iterator.load_state_dict(saved.state_dict())
        >>> int(next(iterator))
        2
        """
        self._process.require("loaded")
        self._engine.require_own(state)
        with self._lock, state_errors():
            self.close()
            skip = int(state["skip"])
            self._engine.load(state)
            self._to_skip, self._num_rows = skip, 0

    def close(self) -> None:
        """Stop threads and close files. Later calls of `next` raise FailedPreconditionError. May be called twice.

        Blocks some seconds at most, while another thread waits for an element.

        >>> import contextlib
        >>> with contextlib.closing(iter(rd.Dataset.range(3))) as iterator:
        ...     int(next(iterator))
        0
        """
        self._process.require("closed")
        alone = self._lock.acquire(timeout=_CLOSE_S)
        try:
            self._engine.closed = True
            self._rows, self._unconverted = iter([]), None
            self._engine.suspend(None)
        finally:
            if alone:
                self._lock.release()
