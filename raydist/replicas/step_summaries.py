"""Summaries of steps, on the driver: the settings that steps get, and the writing of their records."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, final

from raydist.actors.metric_counters import TrainingMetrics
from raydist.core.errors import FailedPreconditionError
from raydist.replicas.results import StepResult
from raydist.summary.record import Record, merge
from raydist.summary.recording import SummaryOrder, condition, destination, pickling_a_step


@final
class StepSummaries:
    """Summaries of one strategy with remote replicas. Keeps the writers of its steps until it is dropped.

    Args:
        finish: Returns a function that waits for all dispatched steps; `take_results` gets their results. A weak
            reference, because the object that stops the strategy's processes holds this one, and must not keep the
            strategy alive.
        until_now: Returns a function that waits for the steps dispatched so far. A weak reference as well.
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
        """Return a function that waits for the steps dispatched so far. See `StepsUnderWay.until_now`."""
        until_now = self._until_now()
        return (lambda: None) if until_now is None else until_now()

    def order(self) -> SummaryOrder | None:
        """Return the summary settings of a step that is dispatched now; None for the defaults."""
        place, wanted = destination(), condition()
        if place is None or place.here is None:
            return None if wanted else SummaryOrder(wanted=False)
        self._add_writer(place.here)
        place.here.warn()
        return SummaryOrder(place.writer, place.step, wanted)

    def pickling(self) -> contextlib.AbstractContextManager[None]:
        """Return the context in which a step is pickled: the writers that the step refers to are remembered."""
        return pickling_a_step(self._add_writer)

    def _add_writer(self, writer: Any) -> None:
        if writer.key not in self._writers:
            self._writers[writer.key] = writer
            writer.follow(self)

    def take_results(self, results: Sequence[StepResult]) -> None:
        """Write the summaries of a step that ended. Any thread may call this; it neither blocks nor raises."""
        self.take_records([result.summaries for result in results])

    def take_records(self, by_replica: Sequence[Sequence[Record]]) -> None:
        """Write the records of all replicas. Any thread may call this; it neither blocks nor raises."""
        for record in merge(by_replica):
            with contextlib.suppress(FailedPreconditionError):  # the writer was closed before the step was dispatched
                self._writers[record.writer].take(record)


def counting(metrics: TrainingMetrics) -> Callable[[Sequence[StepResult]], None]:
    """Return a callback for steps that ended, which counts them."""

    def count(results: Sequence[StepResult]) -> None:
        metrics.step_ended(sum(result.rows or 0 for result in results))

    return count
