from __future__ import annotations

import weakref
from collections.abc import Callable
from pathlib import Path

import pytest

import raydist as rd
from raydist.core.nest import flatten
from raydist.replicas.results import StepResult
from raydist.replicas.step_summaries import StepSummaries
from raydist.summary.record import Record
from raydist.summary.recording import SummaryOrder
from raydist.summary.scalars import ScalarValue
from tests.summary.reading import curves


def result(*records: Record) -> StepResult:
    return StepResult(flatten(0)[1], (0,), summaries=records)


def record(writer: rd.summary.SummaryWriter, value: float, weight: float = 1.0) -> Record:
    return Record(writer.key, "loss", 3, ScalarValue(value, weight), wall_time=1.0)


def nobody() -> Callable[[], None] | None:
    return None


def nobody_else() -> Callable[[], Callable[[], None]] | None:
    return None


def test_a_step_is_told_of_the_default_writer(tmp_path: Path) -> None:
    summaries = StepSummaries(nobody, nobody_else)
    with rd.summary.create_file_writer(tmp_path) as writer:
        with writer.as_default(step=3), rd.summary.record_if(lambda: 0):
            assert summaries.order() == SummaryOrder(writer.key, 3, wanted=False)
        with writer.as_default():
            assert summaries.order() == SummaryOrder(writer.key)
    assert summaries.order() is None
    with rd.summary.record_if(False):
        assert summaries.order() == SummaryOrder(wanted=False)


def test_what_replicas_recorded_is_written_together(tmp_path: Path) -> None:
    summaries = StepSummaries(nobody, nobody_else)
    with rd.summary.create_file_writer(tmp_path) as writer:
        with writer.as_default():
            summaries.order()
        summaries.take_results([result(record(writer, 1.0, 3.0)), result(record(writer, 5.0, 1.0))])
        summaries.take_results([result(), result()])
    assert curves(tmp_path).scalars("loss") == [(3, 2.0)]
    summaries.take_results([result(record(writer, 1.0))])  # too late: nobody is told, nothing breaks


def test_a_writer_waits_for_the_steps_that_may_use_it(tmp_path: Path) -> None:
    class Strategy:
        def __init__(self) -> None:
            self.waited = 0

        def wait(self) -> None:
            self.waited += 1

    strategy = Strategy()
    summaries = StepSummaries(weakref.WeakMethod(strategy.wait), nobody_else)
    with rd.summary.create_file_writer(tmp_path) as writer, writer.as_default():
        summaries.order()
        summaries.order()
        writer.flush()
        assert strategy.waited == 1
        del strategy
        writer.flush()


def test_what_a_writer_has_to_say_is_said_where_steps_are_dispatched(tmp_path: Path) -> None:
    summaries = StepSummaries(nobody, nobody_else)
    with rd.summary.create_file_writer(tmp_path) as writer, writer.as_default():
        summaries.order()
        for _ in range(10):
            summaries.take_results([result(record(writer, 1.0))])
        with pytest.warns(UserWarning, match="'loss' was recorded 10 times at step 3"):
            summaries.order()
