"""What reads a source ahead, made with what an operation knows: a thread, or one where it pays."""

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

_FIRST_BUFFER = 2  # elements of a buffer whose size is left to raydist

Ahead = Callable[[OpIterator], OpIterator]
"""Makes the iterator that reads a source ahead. Starts nothing."""


def ahead_in_a_thread(ctx: IterContext, meter: Meter, name: str, size: int | None = None) -> Ahead:
    """A thread for each source.

    Args:
        ctx: What the pass is run with.
        meter: Shows the buffer.
        name: Of the operation.
        size: Elements of each buffer; None to let it grow while its consumer waits.
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
    """A thread for each source, or none for any, as its blocks show; a thread in any case without autotuning.

    Args:
        ctx: What the pass is run with.
        meter: Shows the buffer.
        name: Of the operation.
        show: Told whether there are threads, when that changes.
        most: Sources that are open at a time, all read by one thread in turn.
    """
    if not ctx.options.autotune.enabled:
        show(True)
        return ahead_in_a_thread(ctx, meter, name)
    judge, watch = AheadJudge(threads=most), _watch(meter, ctx)
    part = EagerPrefetch(judge, meter, ctx.budgets, name=name, watch=watch, show=show)
    return lambda source: OptionalReadAhead(source, part)


def _watch(meter: Meter, ctx: IterContext) -> Callable[[float], None]:
    """Who wants to know how long blocks took: nobody where each stage of the input has a meter."""
    return _nothing if ctx.meters.enabled else meter.read_ahead


def _nothing(seconds: float) -> None:
    """It is counted already."""
