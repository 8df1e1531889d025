"""Dataset.prefetch: a background thread makes elements before the consumer asks for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar, final

from raydist.core.errors import InvalidArgumentError
from raydist.core.values import AUTOTUNE
from raydist.pipelines.engine.block_size import BufferSize
from raydist.pipelines.engine.op import IterContext
from raydist.pipelines.engine.op_iterator import OpIterator
from raydist.pipelines.engine.op_kinds import UnaryOp
from raydist.pipelines.engine.prefetch_thread import PrefetchThread
from raydist.pipelines.engine.read_ahead import ReadAhead, SteadyPrefetch
from raydist.pipelines.metering.meter import Meter
from raydist.pipelines.stored.fingerprint import NOT_IN_FINGERPRINT

_FIRST_BUFFER = 2  # elements of a buffer whose size raydist chooses

Prefetcher = Callable[[OpIterator], OpIterator]
"""Function that returns a prefetching iterator over a source. Starts nothing."""


def prefetcher(
    ctx: IterContext,
    meter: Meter,
    name: str,
    *,
    size: int | None = None,
    tuned: bool = False,
    threads: int = 1,
    inside: Meter | None = None,
) -> Prefetcher:
    """Return a function that gives each source a prefetch thread: always, or while the autotuner finds it faster.

    Args:
        ctx: Context of the pass.
        meter: Meter of the operation.
        name: Name of the operation.
        size: Elements of each buffer; None for a buffer that grows while its consumer waits.
        tuned: True to let the autotuner decide.
        threads: Number of sources that are open at a time.
        inside: Meter of the work of the threads, for sources without meters.
    """
    if tuned:
        part = ctx.executor.for_prefetch(meter, ctx.meters, ctx.budgets, threads=threads, requested=True, inside=inside)
        if part is not None:
            return lambda source: ReadAhead(source, part)
    if threads == 1:
        meter.kind = "prefetch"
    else:
        meter.place, meter.parallelism = "threads", threads
    grows = size is None and ctx.options.autotune.enabled
    watch = inside.read_ahead if inside else _ignore if ctx.meters.enabled else meter.read_ahead

    def thread(source: OpIterator) -> PrefetchThread:
        buffer = BufferSize(_FIRST_BUFFER if size is None else size, tuned=grows)
        return PrefetchThread(source, buffer, ctx.budgets.ram, inside or meter, name=name, watch=watch)

    return lambda source: ReadAhead(source, SteadyPrefetch(thread))


def _ignore(seconds: float) -> None:
    """Ignore the duration of a block: a meter of the input counts it."""


@final
@dataclass(frozen=True, eq=False)
class PrefetchOp(UnaryOp):
    """`input`, prefetched up to `buffer_size` elements; for None and AUTOTUNE, raydist chooses the number.

    If `injected`, the optimiser added the operation: there is no thread unless the autotuner decides for one.
    """

    passes_elements: ClassVar[bool] = True
    takes_row_ids: ClassVar[bool] = True
    state_is_recent: ClassVar[bool] = True

    buffer_size: int | None = None
    injected: bool = field(default=False, metadata=NOT_IN_FINGERPRINT)

    def __post_init__(self) -> None:
        if self.buffer_size is not None and self.buffer_size < AUTOTUNE:
            raise InvalidArgumentError(f"buffer_size must be >= 0, AUTOTUNE or None, got {self.buffer_size}.")

    @property
    def label(self) -> str:
        size = "AUTOTUNE" if self.is_tuned else self.buffer_size
        return f"prefetch({'where it pays' if self.injected else size})"

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
        if self.injected:
            return ReadAhead(source, ctx.executor.for_prefetch(ctx.meter(self), ctx.meters, ctx.budgets))
        size = None if self.is_tuned else self.buffer_size
        return prefetcher(ctx, ctx.meter(self), ctx.operation_names[id(self)], size=size, tuned=self.is_tuned)(source)
