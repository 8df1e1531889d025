"""Dataset.prefetch: elements made by a background thread before they are asked for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, final

from raydist.errors import InvalidArgumentError
from raydist.pipelines.elements.blocks import Block
from raydist.pipelines.elements.items import State
from raydist.pipelines.engine.buffer_size import BufferSize
from raydist.pipelines.engine.op import IterContext, UnaryOp
from raydist.pipelines.engine.op_iterator import OpIterator
from raydist.pipelines.engine.prefetch_thread import PrefetchThread
from raydist.pipelines.engine.resume import Outbox
from raydist.pipelines.metering.meter import Meter
from raydist.values import AUTOTUNE

__all__ = ["PrefetchOp"]

_FIRST_BUFFER = 2  # elements of a buffer whose size is left to raydist


@final
@dataclass(frozen=True, eq=False)
class PrefetchOp(UnaryOp):
    """`input`, up to `buffer_size` elements ahead; None or AUTOTUNE grows the buffer while the consumer waits."""

    state_is_recent: ClassVar[bool] = True

    buffer_size: int | None = None

    def __post_init__(self) -> None:
        if self.buffer_size is not None and self.buffer_size < AUTOTUNE:
            raise InvalidArgumentError(f"buffer_size must be >= 0, AUTOTUNE or None, got {self.buffer_size}.")

    @property
    def label(self) -> str:
        return f"prefetch({'AUTOTUNE' if self.is_tuned else self.buffer_size})"

    @property
    def is_noop(self) -> bool:
        return self.buffer_size == 0

    @property
    def is_tuned(self) -> bool:
        return self.buffer_size is None or self.buffer_size == AUTOTUNE

    def make_iterator(self, ctx: IterContext) -> OpIterator:
        source = ctx.build(self.input)
        if self.buffer_size == 0:
            return source
        meter = ctx.meter(self)
        meter.kind = "prefetch"
        size = _FIRST_BUFFER if self.is_tuned else (self.buffer_size or 0)
        buffer_size = BufferSize(size, tuned=self.is_tuned and ctx.options.autotune.enabled)
        name = ctx.operation_names[id(self)]
        ahead = PrefetchThread(source, buffer_size, ctx.budgets.ram, meter, name=name, watch=_watch(meter, ctx))
        return _PrefetchIterator(source, ahead)


def _watch(meter: Meter, ctx: IterContext) -> Callable[[float], None]:
    """Who wants to know how long blocks took: nobody where each stage of the input has a meter."""
    return _nothing if ctx.meters.enabled else meter.read_ahead


def _nothing(seconds: float) -> None:
    """It is counted already."""


@final
class _PrefetchIterator(OpIterator):
    """Its state is that of the elements handed out, not of those made."""

    def __init__(self, source: OpIterator, ahead: PrefetchThread) -> None:
        self._source = source
        self._ahead = ahead
        self._outbox: Outbox | None = None
        self._started = False

    def next_block(self, limit: int) -> Block:
        outbox = self._open_outbox()
        self._start()
        while not outbox:
            ready = self._ahead.get()
            if ready is None:
                raise StopIteration
            outbox.put([ready[0]], ready[1])
        return outbox.take(limit)

    def _start(self) -> None:
        if not self._started:
            self._started = True
            self._ahead.start()

    def has_ready(self) -> bool:
        outbox = self._open_outbox()
        self._start()
        return bool(outbox) or self._ahead.has_ready

    def _open_outbox(self) -> Outbox:
        if self._outbox is None:
            self._outbox = Outbox(self._source.state_dict())
        return self._outbox

    def state_dict(self) -> State:
        return self._open_outbox().state_dict()

    def load_state_dict(self, state: State) -> None:
        self._source.load_state_dict(self._open_outbox().load_state_dict(state))

    def close(self) -> None:
        self._ahead.stop()
        if not self._started:
            self._source.close()
