from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest

import raydist as rd
from raydist.summary.writer import pending_summaries
from tests.summary.reading import curves


def test_a_writer_that_is_dropped_is_closed(tmp_path: Path) -> None:
    with rd.summary.create_file_writer(tmp_path).as_default(step=1):
        rd.summary.scalar("loss", 0.5)
    assert curves(tmp_path).scalars("loss") == [(1, 0.5)]


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


def test_a_step_that_advances_is_none(tmp_path: Path) -> None:
    with rd.summary.create_file_writer(tmp_path) as writer, writer.as_default():
        for step in range(30):
            rd.summary.scalar("loss", 0.5, step=step)


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
