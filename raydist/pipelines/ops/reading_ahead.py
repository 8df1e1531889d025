"""Functions that wrap a source in a prefetching iterator: always, or while that is faster."""

from __future__ import annotations

from collections.abc import Callable

from raydist.pipelines.autotune.ahead_judge import AheadJudge
from raydist.pipelines.autotune.eager_prefetch import EagerPrefetch
from raydist.pipelines.engine.buffer_size import BufferSize
from raydist.pipelines.engine.op import IterContext
from raydist.pipelines.engine.op_iterator import OpIterator
from raydist.pipelines.engine.prefetch_thread import PrefetchThread
from raydist.pipelines.engine.read_ahead import OptionalReadAhead, ReadAhead
from raydist.pipelines.metering.meter import Meter

__all__ = ["Ahead", "ahead_in_a_thread", "ahead_where_it_pays"]

_FIRST_BUFFER = 2  # elements of a buffer whose size raydist chooses

Ahead = Callable[[OpIterator], OpIterator]
"""Function that returns a prefetching iterator over a source. Starts nothing."""


def ahead_in_a_thread(ctx: IterContext, meter: Meter, name: str, size: int | None = None) -> Ahead:
    """Return a function that gives each source a prefetch thread.

    Args:
        ctx: Context of the pass.
        meter: Reports the fill level of the buffer.
        name: Name of the operation.
        size: Elements of each buffer; None for a buffer that grows while its consumer waits.
    """
    tuned = size is None and ctx.options.autotune.enabled
    watch = _watch(meter, ctx)

    def ahead(source: OpIterator) -> OpIterator:
        buffer_size = BufferSize(_FIRST_BUFFER if size is None else size, tuned=tuned)
        thread = PrefetchThread(source, buffer_size, ctx.budgets.ram, meter, name=name, watch=watch)
        return ReadAhead(source, thread)

    return ahead


def ahead_where_it_pays(
    ctx: IterContext, meter: Meter, name: str, *, show: Callable[[bool], None], most: int = 1
) -> Ahead:
    """Return a function that gives each source a prefetch thread while that is faster; always without autotuning.

    Args:
        ctx: Context of the pass.
        meter: Reports the fill level of the buffer.
        name: Name of the operation.
        show: Called with True when threads start to prefetch, with False when they stop.
        most: Number of sources that are open at a time, which one thread would read in turn.
    """
    if not ctx.options.autotune.enabled:
        show(True)
        return ahead_in_a_thread(ctx, meter, name)
    judge, watch = AheadJudge(threads=most), _watch(meter, ctx)
    part = EagerPrefetch(judge, meter, ctx.budgets, name=name, watch=watch, show=show)
    return lambda source: OptionalReadAhead(source, part)


def _watch(meter: Meter, ctx: IterContext) -> Callable[[float], None]:
    """Return the callback for the duration of blocks; none is needed if each stage of the input has a meter."""
    return _nothing if ctx.meters.enabled else meter.read_ahead


def _nothing(seconds: float) -> None:
    """Ignore the duration: a meter of the input counts it."""
