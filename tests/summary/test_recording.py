"""Writers, steps, conditions, and recording on replicas."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import raydist as rd
from raydist.summary.recording import (
    StepRecorder,
    SummaryOrder,
    destination,
    step_sink,
)
from raydist.summary.scalars import ScalarValue
from raydist.summary.writer import pending_summaries
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


def test_writers_may_be_within_each_other(tmp_path: Path) -> None:
    a, b = rd.summary.create_file_writer(tmp_path / "a"), rd.summary.create_file_writer(tmp_path / "b")
    with a, b, a.as_default(step=1):
        with b.as_default():
            rd.summary.scalar("inner", 1.0, step=5)
        rd.summary.scalar("outer", 2.0)
    assert curves(tmp_path / "a").scalars("outer") == [(1, 2.0)]
    assert curves(tmp_path / "b").scalars("inner") == [(5, 1.0)]


def test_a_step_that_does_not_advance_is_one_warning(tmp_path: Path) -> None:
    writer = rd.summary.create_file_writer(tmp_path)
    with writer.as_default(step=7):
        for _ in range(30):
            rd.summary.scalar("loss", 0.5)
            rd.summary.scalar("other", 0.5)
    with pytest.warns(UserWarning, match="must advance, but 'loss' was recorded 10 times at step 7") as caught:
        writer.close()
    assert len(caught) == 1


def test_nan_in_a_histogram_is_left_out_with_a_warning(tmp_path: Path) -> None:
    writer = rd.summary.create_file_writer(tmp_path)
    with writer.as_default(step=3):
        rd.summary.histogram("weights", [1.0, float("nan")])
    with pytest.warns(UserWarning, match="Histogram 'weights' must be of finite numbers.* but 1 at step 3"):
        writer.close()
    assert curves(tmp_path).histograms("weights")[0].num == 1


def test_a_closed_writer_says_so(tmp_path: Path) -> None:
    writer = rd.summary.create_file_writer(tmp_path)
    with writer.as_default(step=0):
        writer.close()
        with pytest.raises(rd.FailedPreconditionError, match="must be open to take summaries"):
            rd.summary.scalar("loss", 0.5)
    with pytest.raises(rd.FailedPreconditionError, match="must be open to be used"), writer.as_default():
        pass
    with pytest.raises(rd.FailedPreconditionError, match="must be open"):
        writer.flush()


def test_an_error_of_the_program_is_not_hidden(tmp_path: Path) -> None:
    def program() -> None:
        with rd.summary.create_file_writer(tmp_path) as writer, writer.as_default(step=0):
            rd.summary.scalar("loss", 1 / 2)
            rd.summary.scalar("loss", 1 / 0)

    with pytest.raises(ZeroDivisionError):
        program()
    assert curves(tmp_path).scalars("loss") == [(0, 0.5)]


def test_a_writer_stays_in_its_process(tmp_path: Path) -> None:
    with rd.summary.create_file_writer(tmp_path) as writer:
        for go in (pickle.dumps, copy.deepcopy):
            with pytest.raises(rd.FailedPreconditionError, match="A writer must stay in the process that made it"):
                go(writer)


def test_flush_millis_must_be_a_time(tmp_path: Path) -> None:
    with pytest.raises(rd.InvalidArgumentError, match="flush_millis must be .*got -1"):
        rd.summary.create_file_writer(tmp_path, flush_millis=-1)


class Steps:
    """Stands for the dispatched steps of a strategy."""

    def __init__(self) -> None:
        self.finished = 0

    def finish(self) -> None:
        self.finished += 1

    def until_now(self) -> Callable[[], None]:
        return self.finish


def test_steps_are_waited_for_before_the_file_is_closed(tmp_path: Path) -> None:
    steps = Steps()
    writer = rd.summary.create_file_writer(tmp_path)
    writer.follow(steps)
    writer.flush()
    writer.close()
    writer.close()
    assert steps.finished == 2


def test_pending_summaries_are_on_disk_before_the_writer_would_write_them(tmp_path: Path) -> None:
    steps = Steps()
    writer = rd.summary.create_file_writer(tmp_path, flush_millis=10**6)
    writer.follow(steps)
    with writer.as_default(step=1):
        rd.summary.scalar("loss", 0.5)
        flush = pending_summaries()
        flush()
    assert curves(tmp_path).scalars("loss") == [(1, 0.5)]
    assert steps.finished == 1
    writer.close()
