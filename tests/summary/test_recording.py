"""The default writer, steps, conditions, and recording on replicas."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch

import raydist as rd
from raydist.summary.recording import (
    Destination,
    StepRecorder,
    SummaryOrder,
    as_destination,
    condition,
    destination,
    record_if,
    require_driver,
    step_sink,
)
from raydist.summary.scalars import ScalarValue
from tests.summary.reading import curves


def test_a_step_is_named_by_the_call_or_the_writer_or_is_the_global_one(tmp_path: Path) -> None:
    strategy = rd.OneDeviceStrategy("cpu")
    with strategy.scope(), rd.summary.create_file_writer(tmp_path) as writer:
        with writer.as_default(step=5):
            rd.summary.scalar("call", 1.0, step=9)
            rd.summary.scalar("writer", 1.0)
        with writer.as_default():
            rd.get_global_step().fill_(3)
            rd.summary.scalar("global", 1.0)
    found = curves(tmp_path)
    assert [found.scalars(name)[0][0] for name in ("call", "writer", "global")] == [9, 5, 3]


def test_the_global_step_is_that_of_the_step_that_calls(tmp_path: Path) -> None:
    strategy = rd.OneDeviceStrategy("cpu")

    def step() -> None:
        rd.summary.scalar("before", 1.0)
        rd.get_global_step().add_(1)
        rd.summary.scalar("after", 1.0)

    with rd.summary.create_file_writer(tmp_path) as writer, writer.as_default():
        with strategy.scope():
            rd.get_global_step()
        for _ in range(2):
            strategy.run(step)
    assert [step for step, _ in curves(tmp_path).scalars("before")] == [0, 1]
    assert [step for step, _ in curves(tmp_path).scalars("after")] == [1, 2]


def test_without_anybody_who_counts_steps_are_0_and_that_is_said(tmp_path: Path) -> None:
    strategy = rd.OneDeviceStrategy("cpu")
    with rd.summary.create_file_writer(tmp_path) as writer:
        with writer.as_default():
            for value in range(10):
                strategy.run(lambda value: rd.summary.scalar("loss", value), args=(value,))
        with pytest.warns(UserWarning, match=r"must advance, but 'loss' was recorded 10 times at step 0"):
            writer.flush()
    assert curves(tmp_path).scalars("loss") == [(0, float(value)) for value in range(10)]


def test_some_things_are_for_the_driver() -> None:
    require_driver("it")
    with pytest.raises(rd.FailedPreconditionError, match="it is for the driver: this code runs inside of strategy.run"):
        rd.OneDeviceStrategy("cpu").run(require_driver, args=("it",))


def test_a_condition_is_asked_at_each_call(tmp_path: Path) -> None:
    with rd.summary.create_file_writer(tmp_path) as writer, writer.as_default():
        for step in range(5):
            with rd.summary.record_if(lambda: step % 2 == 0):  # noqa: B023  # it is asked inside
                assert rd.summary.scalar("even", 1.0, step=step) == (step % 2 == 0)
        rd.summary.flush()
        assert [step for step, _ in curves(tmp_path).scalars("even")] == [0, 2, 4]


def test_a_step_flushes_nothing(tmp_path: Path) -> None:
    wrong = pytest.raises(rd.FailedPreconditionError, match="rd.summary.flush is for the driver")
    with rd.summary.create_file_writer(tmp_path) as writer, writer.as_default(), wrong:
        rd.OneDeviceStrategy("cpu").run(rd.summary.flush)


def test_the_innermost_counts_and_ends_with_its_block() -> None:
    recorder = StepRecorder(lambda: 1.0)
    place = Destination("writer", recorder)
    with as_destination(place), recorder.recording(), record_if(False):
        assert (destination(), step_sink(), condition()) == (place, recorder, False)
        with as_destination(None), record_if(lambda: True):
            assert (destination(), condition()) == (None, True)
    assert (destination(), step_sink(), condition()) == (None, None, True)


def test_an_order_travels() -> None:
    order = SummaryOrder("writer", 3, wanted=False)
    assert pickle.loads(pickle.dumps(order)) == order


def test_a_step_records_for_the_writer_of_its_order_with_its_share() -> None:
    recorder = StepRecorder(lambda: 3.0)
    with recorder.recording(), recorder.following(SummaryOrder("writer", 7)):
        rd.summary.scalar("loss", torch.tensor(0.5))
    (record,) = recorder.take_records()
    assert (record.writer, record.name, record.step) == ("writer", "loss", 7)
    assert record.data == ScalarValue(0.5, 3.0)


def test_without_an_order_only_writers_of_the_step_itself_record() -> None:
    recorder = StepRecorder(lambda: 1.0)
    with recorder.recording():
        assert step_sink() is recorder
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
            assert [record.data for record in recorder.take_records()] == [ScalarValue(value, 1.0)]
