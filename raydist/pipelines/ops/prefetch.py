"""Dataset.prefetch: elements made by a background thread before they are asked for."""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from dataclasses import dataclass
from typing import Any, final

from raydist.errors import DeadlineExceededError, InvalidArgumentError
from raydist.options import Timeouts
from raydist.pipelines.abandonment import join_threads
from raydist.pipelines.blocks import Block
from raydist.pipelines.demand import Demand
from raydist.pipelines.meters import Meter
from raydist.pipelines.op import MACHINERY_ERRORS, DatasetOp, ElementError, Item, IterContext, OpIterator, State
from raydist.pipelines.resume import Outbox
from raydist.values import AUTOTUNE

__all__ = ["PrefetchOp"]

_FIRST_BUFFER = 2  # elements of a buffer whose size is left to raydist
_MAX_BUFFER = 1024


@final
@dataclass(frozen=True, eq=False)
class PrefetchOp(DatasetOp):
    """`input`, up to `buffer_size` elements ahead; None or AUTOTUNE grows the buffer while the consumer waits."""

    input: DatasetOp
    buffer_size: int | None = None

    def __post_init__(self) -> None:
        if self.buffer_size is not None and self.buffer_size < AUTOTUNE:
            raise InvalidArgumentError(f"buffer_size must be >= 0, AUTOTUNE or None, got {self.buffer_size}.")

    @property
    def inputs(self) -> tuple[DatasetOp, ...]:
        return (self.input,)

    @property
    def label(self) -> str:
        return f"prefetch({'AUTOTUNE' if self.is_tuned else self.buffer_size})"

    @property
    def is_noop(self) -> bool:
        return self.buffer_size == 0

    @property
    def is_tuned(self) -> bool:
        return self.buffer_size is None or self.buffer_size == AUTOTUNE

    def cardinality(self) -> int:
        return self.input.cardinality()

    def element_spec(self) -> Any:
        return self.input.element_spec()

    def make_iterator(self, ctx: IterContext) -> OpIterator:
        source = ctx.build(self.input)
        if self.buffer_size == 0:
            return source
        autotune = ctx.options.autotune
        size = _FIRST_BUFFER if self.is_tuned else (self.buffer_size or 0)
        growing = self.is_tuned and autotune.enabled
        meter = ctx.meter(self)
        meter.kind = "prefetch"
        buffer = _Buffer(source, size, growing, autotune.ram_budget, meter)
        return _PrefetchIterator(buffer, meter, ctx.operation_names[id(self)])


@final
class _Buffer:
    """What the two threads share. The background thread owns the source and closes it when it ends."""

    def __init__(self, source: OpIterator, size: int, growing: bool, ram_budget: int | None, meter: Meter) -> None:
        self.source = source
        self.changed = threading.Condition()
        self.stopped = False
        self.ended = False
        self._ready: deque[tuple[Item, State]] = deque()
        self._failure: BaseException | None = None
        self._elements = 0
        self._bytes = 0
        self._size = size
        self._growing = growing
        self._meter = meter
        self._ram_budget = ram_budget or float("inf")

    def room(self) -> int:
        """Elements that may be made now; waits for room, and is 0 when stopped."""
        with self.changed:
            self.changed.wait_for(lambda: self.stopped or self._has_room())
            return 0 if self.stopped else self._size - self._elements

    def _has_room(self) -> bool:
        return self._elements == 0 or (self._elements < self._size and self._bytes < self._ram_budget)

    def put(self, item: Item, after: State) -> None:
        with self.changed:
            self._ready.append((item, after))
            self._elements += _rows(item)
            self._bytes += _bytes(item)
            self._show_fill()
            self.changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """End with an error that stands behind everything made so far."""
        with self.changed:
            self._failure = error

    def finish(self) -> None:
        with self.changed:
            self.ended = True
            self.changed.notify_all()

    def get(self, limit_s: float) -> tuple[Item, State] | None:
        """The next item; None at the end. Grows the buffer when the consumer has to wait."""
        with self.changed:
            self._meter.ask()
            if not self._ready and not self.ended and self._growing:
                self._size = min(_MAX_BUFFER, 2 * self._size)
                self.changed.notify_all()
            if not self.changed.wait_for(lambda: self._ready or self.ended or self.stopped, limit_s):
                raise DeadlineExceededError(
                    f"The next element must be made within {limit_s} s, and was not. What reads the input hangs."
                )
            if not self._ready:
                if self._failure is not None:
                    raise self._failure
                return None
            item, after = self._ready.popleft()
            self._elements -= _rows(item)
            self._bytes -= _bytes(item)
            self._show_fill()
            self.changed.notify_all()
            return item, after

    def _show_fill(self) -> None:
        meter = self._meter
        meter.buffered, meter.buffered_bytes, meter.buffer_limit = self._elements, self._bytes, self._size

    def stop(self) -> None:
        with self.changed:
            self.stopped = True
            self._ready.clear()
            self.changed.notify_all()


def _rows(item: Item) -> int:
    return item.num_rows if isinstance(item, Block) else 1


def _bytes(item: Item) -> int:
    return item.num_bytes if isinstance(item, Block) else 0


def _produce(buffer: _Buffer) -> None:
    """The background thread. It knows the buffer only, so that an abandoned iterator is collected and stops it."""
    demand = Demand()
    try:
        while room := buffer.room():
            try:
                item: Item = demand.read(buffer.source, room)
            except StopIteration:
                break
            except MACHINERY_ERRORS:
                raise
            except Exception as error:  # of one element: handed out at its place
                item = ElementError(error)
            buffer.put(item, buffer.source.state_dict())
    except BaseException as error:  # SystemExit too: a thread that died silently would look like the end of the data
        buffer.fail(error)
    finally:
        buffer.source.close()
        buffer.finish()


@final
class _PrefetchIterator(OpIterator):
    """Its state is that of the elements handed out, not of those made."""

    def __init__(self, buffer: _Buffer, meter: Meter, name: str) -> None:
        self._buffer = buffer
        self._meter = meter
        self._name = name
        self._outbox: Outbox | None = None
        self._thread: threading.Thread | None = None
        self._limits = Timeouts()
        self._finalizer = weakref.finalize(self, buffer.stop)

    def next_block(self, limit: int) -> Block:
        outbox = self._open_outbox()
        if self._thread is None:
            self._start()
        while not outbox:
            begin = time.perf_counter()
            ready = self._buffer.get(self._limits.input_s)
            self._meter.awaited_s += time.perf_counter() - begin
            if ready is None:
                raise StopIteration
            outbox.put([ready[0]], ready[1])
        return outbox.take(limit)

    def _start(self) -> None:
        name = f"raydist-{self._name}"
        self._thread = threading.Thread(target=_produce, args=(self._buffer,), name=name, daemon=True)
        self._thread.start()

    def _open_outbox(self) -> Outbox:
        if self._outbox is None:
            self._outbox = Outbox(self._buffer.source.state_dict())
        return self._outbox

    def state_dict(self) -> State:
        return self._open_outbox().state_dict()

    def load_state_dict(self, state: State) -> None:
        self._buffer.source.load_state_dict(self._open_outbox().load_state_dict(state))

    def close(self) -> None:
        self._finalizer()
        if self._thread is None:
            self._buffer.source.close()
        else:
            join_threads([self._thread], lambda name: f"making the input of {self._name}")
