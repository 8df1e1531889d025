"""The iterator that users hold: one element at a time over the engine's blocks."""

from __future__ import annotations

import itertools
import operator
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Generic, Self, TypeVar, final

from raydist.errors import FailedPreconditionError, InvalidArgumentError, OutOfRangeError
from raydist.foreign_errors import what_was_raised
from raydist.options import Options
from raydist.owning_process import OwningProcess, note_inherited
from raydist.pipelines.elements.blocks import Block
from raydist.pipelines.elements.items import State
from raydist.pipelines.elements.key_order import KeyOrder
from raydist.pipelines.elements.saved_state import require_state, state_errors
from raydist.pipelines.engine.arrival_order import ArrivalOrders
from raydist.pipelines.engine.build import Plan, start
from raydist.pipelines.engine.executor import Executor
from raydist.pipelines.engine.op import DatasetOp
from raydist.pipelines.engine.op_iterator import MACHINERY_ERRORS, OpIterator
from raydist.pipelines.engine.request_size import RequestSize
from raydist.pipelines.metering.iteration_meters import IterationMeters
from raydist.pipelines.metering.stats import PipelineStats, stats_of
from raydist.pipelines.run.chain_length import explain_recursion
from raydist.pipelines.run.executors import local_executor
from raydist.pipelines.run.optional import Optional
from raydist.pipelines.run.plan import make_nested_plan, make_plan

__all__ = ["DatasetIterator"]

_T = TypeVar("_T")
_STATE_VERSION = 1
_CLOSE_S = 4.0  # how long close() waits for another thread's `next`; then it stops what that one waits for


@final
class DatasetIterator(Generic[_T]):
    """One epoch of a dataset: what `iter(dataset)` gives (tf.data.Iterator).

    Opened by the first element; closed at the end, by `close()`, or when it is dropped. `next` blocks until an element
    is there. An element's error is raised in its place, and iteration goes on after it. Errors of what runs the
    pipeline (UnavailableError, DeadlineExceededError) lose no element: the next call tries again from there.

    Threads may share it: each element goes to exactly one of them, and `state_dict` and `close` fall between two of
    them. (A state that is saved while another thread works on its element counts that element as handed out.)

    Args:
        op: The pipeline as written.
        options: Its merged options.
        seed: Root seed.
        epoch: Which epoch this is.
        convert: Makes a block the elements to hand out.
        make_executor: Where the stages run.
        meters: To go on with; None for new ones.

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
    ) -> None:
        self._make_executor = make_executor
        self._op = op
        self._options = options
        self._seed = seed
        self._epoch = epoch
        self._convert = convert
        self._plan: Plan = make_plan(op, options)
        self._known_fingerprint: str | None = None
        self.meters = meters or IterationMeters()
        """What every stage has done since the iteration began."""
        self._executor: Executor | None = None
        self._source: OpIterator | None = None
        self._request = RequestSize()
        self._orders = ArrivalOrders()
        self._resume_at: State | None = None  # where the engine goes on when it is opened again
        self._to_skip = 0  # elements behind that which were handed out before
        self._border: State = {}  # the engine's state before the block of `_rows`
        # A list's iterator hands out each of its rows once, whoever asks: what threads share needs no lock.
        self._rows: Iterator[_T] = iter([])
        self._num_rows = 0  # of the block of `_rows`
        self._lock = threading.RLock()  # for all else; a user's function may ask its own iterator for something
        self._order = KeyOrder()
        self._ended = False
        self._closed = False
        self._process = OwningProcess("This iterator")
        note_inherited(self)

    def became_a_copy(self) -> None:
        """This is a forked child: what was made already is the parent's to hand out."""
        self._rows = iter([])

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
                for row in self._rows:  # the other thread that held the lock may have refilled it
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
        block = self._read(1 << 62)
        skipped = 0
        while self._to_skip:
            skipped = min(self._to_skip, block.num_rows)
            self._to_skip -= skipped
            if skipped == block.num_rows:
                skipped = 0
                block = self._read(1 << 62)
        begin = time.perf_counter()
        rows = self._convert(self._order.of(block))
        self.meters.convert_s += time.perf_counter() - begin
        self._hand_out(rows, skipped)

    def _hand_out(self, rows: list[_T], skipped: int) -> None:
        self._require_open()  # close() does not wait for an element that takes long
        fresh = iter(rows)
        for _ in itertools.islice(fresh, skipped):
            pass
        self._num_rows, self._rows = len(rows), fresh

    def _read(self, limit: int) -> Block:
        """The next block of the engine, and its state before that."""
        if self._ended:
            raise StopIteration
        source = self._open()
        self._border = source.state_dict()
        try:
            return self._request.read(source, limit)
        except StopIteration:
            self._ended = True
            self._suspend(source.state_dict())
            raise
        except Exception as error:
            if isinstance(error, MACHINERY_ERRORS):
                self._suspend(self._border)  # no element is lost: the next call tries again from here
            failure = error
        except BaseException:  # Ctrl-C in a user's function: as above
            self._suspend(self._border)
            raise
        raise what_was_raised(failure)

    def _require_open(self) -> None:
        if self._closed:
            raise FailedPreconditionError("This iterator is closed. Take a new one with iter(dataset).")

    def _open(self) -> OpIterator:
        self._require_open()
        if self._source is None:
            self._executor = self._make_executor(self._options)
            self._source = start(
                self._plan,
                make_nested_plan,
                seed=self._seed,
                epoch=self._epoch,
                executor=self._executor,
                meters=self.meters,
                orders=self._orders,
            )
            self._resume(self._source)
        return self._source

    def _resume(self, source: OpIterator) -> None:
        if self._resume_at is None:
            return
        try:
            with state_errors(self._resume_at):
                source.load_state_dict(self._resume_at)
        except BaseException:
            self._suspend(self._resume_at)  # the next call must not go on in the middle of a state
            raise
        self._resume_at = None

    def _suspend(self, state: State | None) -> None:
        """Close the engine; what comes next opens it again at `state`."""
        self._resume_at = state
        if self._executor is not None:
            self._executor.close()  # first: a prefetching thread may wait for a function that never returns
            self._executor = None
        if self._source is not None:
            self._source.close()
            self._source = None

    def get_next(self) -> _T:
        """The next element. Blocks until it is there.

        Raises:
            OutOfRangeError: There is none.
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
        """The next element, or an empty Optional at the end. Blocks until it is known.

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
        """What every stage did since the first element was asked for, and which of them limits the others.

        Any thread may ask, at any time; costs some microseconds a stage.

        >>> iterator = iter(rd.Dataset.range(10).batch(5))
        >>> _ = list(iterator)
        >>> iterator.stats().elements
        2
        """
        return stats_of(self.meters)

    @property
    def element_spec(self) -> Any:
        """Nest of `rd.TensorSpec` of one element, as `dataset.element_spec`. May call a map function."""
        return self._op.element_spec()

    def state_dict(self) -> State:
        """JSON-able state after the last element handed out, at most 10 KB: for :meth:`load_state_dict`.

        Elements that were made ahead are no part of it, nor is what a shuffle holds: restoring reads it again. Opens
        the pipeline if no element was asked for yet.

        Raises:
            FailedPreconditionError: The iterator is closed.

        >>> iterator = iter(rd.Dataset.range(3))
        >>> _ = next(iterator)
        >>> sorted(iterator.state_dict())
        ['at', 'epoch', 'pipeline', 'seed', 'skip', 'version']
        """
        self._process.require("saved")
        with self._lock:
            at, skip = self._position()
            orders = self._orders.since(at)
        return {
            "version": _STATE_VERSION,
            "pipeline": self._fingerprint(),
            "seed": self._seed,
            "epoch": self._epoch,
            "at": at,
            "skip": skip,
            **({"orders": orders} if orders else {}),
        }

    def _fingerprint(self) -> str:
        """The plan's, found out once: a state is asked for with every step of a distributed dataset."""
        if self._known_fingerprint is None:
            self._known_fingerprint = self._plan.fingerprint
        return self._known_fingerprint

    def _position(self) -> tuple[State, int]:
        left = operator.length_hint(self._rows)  # asked once: other threads may take rows meanwhile
        if left:
            return self._border, self._num_rows - left
        if self._resume_at is not None:
            return self._resume_at, self._to_skip
        return self._open().state_dict(), self._to_skip

    def load_state_dict(self, state: State) -> None:
        """Go on after the element that `state` was saved behind. Opens a closed iterator again.

        Args:
            state: Of an iterator of the same pipeline, in any process; it brings its seed and epoch with it.

        Raises:
            InvalidArgumentError: The state was saved by another pipeline, or is none. What an operation cannot read in
                it is found with the next element.

        >>> ds = rd.Dataset.range(5)
        >>> saved = iter(ds)
        >>> _ = next(saved), next(saved)
        >>> iterator = iter(ds)
        >>> iterator.load_state_dict(saved.state_dict())
        >>> int(next(iterator))
        2
        """
        self._process.require("loaded")
        found = (require_state(state).get("version"), state.get("pipeline"))
        if found != (_STATE_VERSION, self._fingerprint()):
            raise InvalidArgumentError(
                f"The state must be of this pipeline ({self._fingerprint()}), got one of {state.get('pipeline')!r} "
                f"(version {state.get('version')!r}). Build the dataset as it was when the state was saved."
            )
        with self._lock, state_errors(state):
            self.close()
            self._closed = self._ended = False
            self._seed, self._epoch = int(state["seed"]), int(state["epoch"])
            self._resume_at, self._to_skip = dict(state["at"]), int(state["skip"])
            self._orders.load(state.get("orders", {}))

    def close(self) -> None:
        """Stop threads and let go of files. Further elements are a FailedPreconditionError. May be called twice.

        Waits for an element that another thread is asking for, some seconds at most.

        >>> import contextlib
        >>> with contextlib.closing(iter(rd.Dataset.range(3))) as iterator:
        ...     int(next(iterator))
        0
        """
        self._process.require("closed")
        alone = self._lock.acquire(timeout=_CLOSE_S)
        try:
            self._closed = True
            self._rows = iter([])
            self._suspend(None)
        finally:
            if alone:
                self._lock.release()
