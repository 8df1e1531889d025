"""The driver's half of what steps show: what it tells them, and what becomes of their records."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, final

from raydist.actors.metric_counters import TrainingMetrics
from raydist.errors import FailedPreconditionError
from raydist.replicas.results import StepResult
from raydist.summaries.destination import condition, destination, noting
from raydist.summaries.merging import merge
from raydist.summaries.order import SummaryOrder

__all__ = ["StepSummaries", "counting"]


@final
class StepSummaries:
    """Of one strategy with replicas elsewhere. It holds the writers that its steps may use, until it is dropped.

    Args:
        finish: Waits for all dispatched steps, whose results come by `take_results` meanwhile. A weak reference: what
            stops the strategy's processes holds this, and must not hold the strategy.
        until_now: Returns what waits for the steps that have been dispatched so far. A weak reference as well.
    """

    def __init__(
        self,
        finish: Callable[[], Callable[[], None] | None],
        until_now: Callable[[], Callable[[], Callable[[], None]] | None],
    ) -> None:
        self._finish = finish
        self._until_now = until_now
        self._writers: dict[str, Any] = {}

    def finish(self) -> None:
        """Wait for all dispatched steps."""
        finish = self._finish()
        if finish is not None:
            finish()

    def until_now(self) -> Callable[[], None]:
        """Return what waits for the steps that have been dispatched so far. See `StepsUnderWay.until_now`."""
        until_now = self._until_now()
        return (lambda: None) if until_now is None else until_now()

    def order(self) -> SummaryOrder | None:
        """What a step that is dispatched now must know; None for nothing."""
        place, wanted = destination(), condition()
        if place is None or place.here is None:
            return None if wanted else SummaryOrder(wanted=False)
        self._note(place.here)
        place.here.warn()
        return SummaryOrder(place.writer, place.step, wanted)

    def noting(self) -> contextlib.AbstractContextManager[None]:
        """A step is pickled inside, which may hold writers."""
        return noting(self._note)

    def _note(self, writer: Any) -> None:
        if writer.key not in self._writers:
            self._writers[writer.key] = writer
            writer.follow(self)

    def take_results(self, results: Sequence[StepResult]) -> None:
        """A step has ended: write what its replicas recorded together. From any thread; neither waits nor raises."""
        for record in merge([result.summaries for result in results]):
            with contextlib.suppress(FailedPreconditionError):  # dispatched after its writer was closed
                self._writers[record.writer].take(record)


def counting(metrics: TrainingMetrics) -> Callable[[Sequence[StepResult]], None]:
    """What is told of each step that has ended, and counts it."""

    def count(results: Sequence[StepResult]) -> None:
        metrics.step_ended(sum(result.rows or 0 for result in results))

    return count
