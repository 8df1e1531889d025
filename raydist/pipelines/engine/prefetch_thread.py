"""A thread that prefetches from an iterator, and the buffer between this thread and the consumer."""

from __future__ import annotations

import threading
import time
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import final

from raydist.core.errors import DeadlineExceededError
from raydist.core.thread_shutdown import end_at_exit
from raydist.options import Timeouts
from raydist.pipelines.elements.items import ElementError, Item, IteratorState, count_bytes, count_items
from raydist.pipelines.engine.block_size import BufferSize
from raydist.pipelines.engine.budget import Budget
from raydist.pipelines.engine.op_iterator import MACHINERY_ERRORS, OpIterator
from raydist.pipelines.engine.request_size import RequestSize
from raydist.pipelines.metering.meter import Meter

_RAM_POLL_S = 0.05  # interval at which a thread checks if another buffer has freed memory

CLOSE_S = 4.0
"""Seconds that closing waits for running functions. All threads of one executor share this limit."""


def join_threads(threads: Sequence[threading.Thread], work_of: Callable[[str], str], limit_s: float) -> bool:
    """Wait until all `threads` have ended, up to `limit_s` seconds; warn about each that has not.

    Returns:
        True if all threads have ended.
    """
    deadline = time.monotonic() + limit_s
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    stuck = [thread.name for thread in threads if thread.is_alive()]
    for name in stuck:
        warnings.warn(
            f"Thread {name} must end within {limit_s:g} s of close(), and is still busy with {work_of(name)}. It was "
            "left behind, and ends when the function returns. Only functions on input workers "
            "(Options.num_input_workers) can be stopped.",
            RuntimeWarning,
            stacklevel=2,
        )
    return not stuck


@final
class _Buffer:
    """State shared by two threads. The background thread owns the source and closes it unless it was only paused."""

    def __init__(self, source: OpIterator, size: BufferSize, ram: Budget, meter: Meter) -> None:
        self.source = source
        self._changed = threading.Condition()
        self._stopped = False
        self._paused = False
        self._ended = False
        self._ready: deque[tuple[Sequence[Item], IteratorState]] = deque()
        self._failure: BaseException | None = None
        self._elements = 0
        self._bytes = 0
        self._reserved = 0  # bytes reserved for the elements in production
        self._row_bytes = 0  # of the largest elements so far
        self._size = size
        self._ram = ram
        self._meter = meter

    def room(self) -> int:
        """Wait for room and return the number of elements to make; 0 after `stop` or `pause`."""
        with self._changed:
            while not (self._stopped or self._paused):
                if self._elements < self._size.size and (rows := self._reserve(self._size.size - self._elements)):
                    return rows
                self._changed.wait(_RAM_POLL_S if self._elements < self._size.size else None)
            return 0

    def _reserve(self, rows: int) -> int:
        """Return how many of `rows` elements the memory budget allows; at least one while no element is ready."""
        if not self._row_bytes:
            return 1
        self._reserved = self._ram.take(rows * self._row_bytes)
        granted = self._reserved // self._row_bytes
        if not granted:
            self._release()
        return granted or int(self._elements == 0)

    def _release(self) -> None:
        self._ram.give(self._reserved)
        self._reserved = 0

    def put(self, items: Sequence[Item], after: IteratorState) -> None:
        rows, num_bytes = count_items(items), count_bytes(items)
        with self._changed:
            self._release()
            if self._stopped:
                return
            self._ram.charge(num_bytes)
            self._row_bytes = max(self._row_bytes, num_bytes // rows)
            self._ready.append((items, after))
            self._count(rows, num_bytes)
            if self._elements >= self._size.size:
                self._size.filled()
            self._changed.notify_all()

    def finish(self, failure: BaseException | None) -> bool:
        """End production, with the error that follows the elements made so far, or at the end of the source.

        Returns True if the source is not needed any more.
        """
        with self._changed:
            self._release()
            self._failure = failure
            self._ended = True
            self._changed.notify_all()
            return self._stopped or not self._paused

    @property
    def has_ready(self) -> bool:
        """Return True if `get` does not block."""
        return bool(self._ready) or self._ended

    def get(self, limit_s: float) -> tuple[Sequence[Item], IteratorState] | None:
        """Return the next items; None at the end, and after the last items of a paused thread. Blocks."""
        with self._changed:
            self._meter.ask()
            self._size.asked(self._elements)
            self._changed.notify_all()
            if not self._changed.wait_for(lambda: self._ready or self._ended or self._stopped, limit_s):
                raise DeadlineExceededError(
                    f"The next element must be made within {limit_s} s, and was not. What reads the input hangs."
                )
            if not self._ready:
                if self._failure is not None:
                    raise self._failure
                return None
            items, after = self._ready.popleft()
            rows, num_bytes = count_items(items), count_bytes(items)
            self._ram.give(num_bytes)
            self._count(-rows, -num_bytes)
            self._changed.notify_all()
            return items, after

    def _count(self, rows: int, num_bytes: int) -> None:
        self._elements += rows
        self._bytes += num_bytes
        meter = self._meter
        meter.buffered, meter.buffered_bytes, meter.buffer_limit = self._elements, self._bytes, self._size.size

    @property
    def was_paused(self) -> bool:
        """Return True if the thread has stopped before the end of the source."""
        return self._paused and self._failure is None

    def pause(self) -> None:
        """Stop after the elements in production."""
        with self._changed:
            self._paused = self._paused or not self._ended
            self._changed.notify_all()

    def stop(self) -> None:
        with self._changed:
            self._stopped = True
            self._ready.clear()
            self._ram.give(self._bytes)
            self._count(-self._elements, -self._bytes)
            self._changed.notify_all()


def _produce(buffer: _Buffer, first: int, watch: Callable[[float], None], on_end: Callable[[], None]) -> None:
    """Run the background thread. It refers only to the buffer: an abandoned iterator is collected and stops it."""
    request = RequestSize(first=first)
    failure: BaseException | None = None
    try:
        while room := buffer.room():
            begin = time.perf_counter()
            try:
                items: Sequence[Item] = (request.read(buffer.source, room),)
            except StopIteration:
                break
            except MACHINERY_ERRORS:
                raise
            except Exception as error:  # of one element: handed out in its place
                items = (ElementError(error),)
            watch(time.perf_counter() - begin)
            buffer.put(items, buffer.source.state_dict())
    except BaseException as error:  # SystemExit too: a thread that ends silently would look like the end of the data
        failure = error
    finally:
        if buffer.finish(failure):
            buffer.source.close()
        on_end()


def _nothing(seconds: float = 0.0) -> None:
    """Ignore the report."""


@final
class PrefetchThread:
    """A thread that reads `source` into a buffer from `start` on, until the end, `pause` or `stop`."""

    def __init__(
        self,
        source: OpIterator,
        size: BufferSize,
        ram: Budget,
        meter: Meter,
        *,
        name: str,
        first: int = 1,
        watch: Callable[[float], None] = _nothing,
        on_end: Callable[[], None] = _nothing,
    ) -> None:
        self._name = name
        self._meter = meter
        self._buffer = _Buffer(source, size, ram, meter)
        self._limits = Timeouts()
        args = (self._buffer, first, watch, on_end)
        self._thread = threading.Thread(target=_produce, args=args, name=f"raydist-{name}", daemon=True)
        self._finalizer = weakref.finalize(self, self._buffer.stop)

    def start(self) -> None:
        """Start the thread."""
        end_at_exit(self._thread, self._finalizer)
        self._thread.start()

    def get(self) -> tuple[Sequence[Item], IteratorState] | None:
        """Return the next items, made together, and the source's state after them; None at the end or after a pause.

        Raises:
            DeadlineExceededError: The items take longer than `Timeouts.input_s`.
            Exception: A pipeline error that ended the thread.
        """
        begin = time.perf_counter()
        ready = self._buffer.get(self._limits.input_s)
        self._meter.awaited_s += time.perf_counter() - begin
        return ready

    @property
    def has_ready(self) -> bool:
        """Return True if `get` does not block."""
        return self._buffer.has_ready

    @property
    def was_paused(self) -> bool:
        """Return True, after `get` returned None, if the source has more elements. The caller owns the source again."""
        return self._buffer.was_paused

    def pause(self) -> None:
        """Stop reading. `get` still returns the items made before."""
        self._buffer.pause()

    def stop(self) -> None:
        """End the thread, which closes the source. May be called twice."""
        self._finalizer()
        if self._thread.ident is not None:
            join_threads([self._thread], lambda name: f"making the input of {self._name}", CLOSE_S)
