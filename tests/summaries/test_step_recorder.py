from __future__ import annotations

import torch

import raydist as rd
from raydist.summaries.destination import destination, taker
from raydist.summaries.order import SummaryOrder
from raydist.summaries.scalar_values import ScalarValue
from raydist.summaries.step_recorder import StepRecorder


def test_a_step_records_for_the_writer_of_its_order_with_its_share() -> None:
    recorder = StepRecorder(lambda: 3.0)
    with recorder.recording(), recorder.following(SummaryOrder("writer", 7)):
        rd.summary.scalar("loss", torch.tensor(0.5))
    (record,) = recorder.take_records()
    assert (record.writer, record.name, record.step) == ("writer", "loss", 7)
    assert record.shown == ScalarValue(0.5, 3.0)


def test_without_an_order_only_writers_of_the_step_itself_record() -> None:
    recorder = StepRecorder(lambda: 1.0)
    with recorder.recording():
        assert taker() is recorder
        assert destination() is None
        assert not rd.summary.scalar("loss", 0.5, step=0)
    assert recorder.take_records() == ()


def test_what_the_driver_does_not_want_is_not_recorded() -> None:
    recorder = StepRecorder(lambda: 1.0)
    with recorder.recording(), recorder.following(SummaryOrder("writer", 7, wanted=False)):
        assert not rd.summary.scalar("loss", 0.5)
    assert recorder.take_records() == ()


def test_a_replica_that_works_on_rows_of_others_records_nothing() -> None:
    recorder = StepRecorder(lambda: None)
    with recorder.recording(), recorder.following(SummaryOrder("writer", 7)):
        assert rd.summary.scalar("loss", float("nan"))
        assert rd.summary.histogram("values", [1.0])
    assert recorder.take_records() == ()


def test_records_are_those_of_one_run() -> None:
    recorder = StepRecorder(lambda: 1.0)
    for value in (1.0, 2.0, 3.0):
        with recorder.recording(), recorder.following(SummaryOrder("writer", 7)):
            rd.summary.scalar("loss", value)
        if value == 1.0:
            recorder.drop_records()  # it has failed
        else:
            assert [record.shown for record in recorder.take_records()] == [ScalarValue(value, 1.0)]
