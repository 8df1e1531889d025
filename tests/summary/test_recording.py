"""Writers, steps, conditions, recording on replicas, and event files."""

from __future__ import annotations

import copy
import functools
import io
import os
import pickle
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

import raydist as rd
from raydist.summary.event_file import EventFile, first_events, open_event_file
from raydist.summary.media import Text
from raydist.summary.record import Record, merge, step_number
from raydist.summary.scalars import ScalarValue
from raydist.summary.writer import pending_summaries
from tests.refused import check_refused
from tests.summary.reading import curves, record_of
from tests.waiting import wait_until


def test_a_step_is_named_by_the_call_or_the_writer_or_is_the_global_one(tmp_path: Path) -> None:
    strategy = rd.OneDeviceStrategy("cpu")

    def step() -> None:
        rd.summary.scalar("before", 1.0)
        rd.get_global_step().add_(1)
        rd.summary.scalar("after", 1.0)

    with strategy.scope(), rd.summary.create_file_writer(tmp_path) as writer:
        with writer.as_default(step=5):
            rd.summary.scalar("call", 1.0, step=9)
            rd.summary.scalar("writer", 1.0)
        with writer.as_default():
            rd.get_global_step().fill_(3)
            rd.summary.scalar("global", 1.0)
            for _ in range(2):
                strategy.run(step)
    found = curves(tmp_path)
    steps = {name: [step for step, _ in found.scalars(name)] for name in found.names("scalars")}
    assert steps == {"call": [9], "writer": [5], "global": [3], "before": [3, 4], "after": [4, 5]}


def test_without_anybody_who_counts_steps_are_0_and_that_is_said(tmp_path: Path) -> None:
    strategy = rd.OneDeviceStrategy("cpu")
    with rd.summary.create_file_writer(tmp_path) as writer:
        with writer.as_default():
            for value in range(10):
                strategy.run(lambda value: rd.summary.scalar("loss", value), args=(value,))
                rd.summary.scalar("another", value)
        with pytest.warns(UserWarning, match=r"must advance, but 'loss' was recorded 10 times at step 0") as caught:
            writer.flush()
        assert len(caught) == 1
    assert curves(tmp_path).scalars("loss") == [(0, float(value)) for value in range(10)]


def test_a_condition_is_asked_at_each_call(tmp_path: Path) -> None:
    with rd.summary.create_file_writer(tmp_path) as writer, writer.as_default():
        for step in range(5):
            with rd.summary.record_if(lambda: step % 2 == 0):  # noqa: B023  # it is asked inside
                assert rd.summary.scalar("even", 1.0, step=step) == (step % 2 == 0)
        rd.summary.flush()
        assert [step for step, _ in curves(tmp_path).scalars("even")] == [0, 2, 4]


def test_writers_may_be_within_each_other(tmp_path: Path) -> None:
    a, b = rd.summary.create_file_writer(tmp_path / "a"), rd.summary.create_file_writer(tmp_path / "b")
    with a, b, a.as_default(step=1):
        with b.as_default():
            rd.summary.scalar("inner", 1.0, step=5)
        rd.summary.scalar("outer", 2.0)
    assert curves(tmp_path / "a").scalars("outer") == [(1, 2.0)]
    assert curves(tmp_path / "b").scalars("inner") == [(5, 1.0)]


def test_nan_in_a_histogram_is_left_out_with_a_warning(tmp_path: Path) -> None:
    writer = rd.summary.create_file_writer(tmp_path)
    with writer.as_default(step=3):
        rd.summary.histogram("weights", [1.0, float("nan")])
    with pytest.warns(UserWarning, match="Histogram 'weights' must be of finite numbers.* but 1 at step 3"):
        writer.close()
    assert curves(tmp_path).histograms("weights")[0].num == 1


def test_writers_and_flush_say_where_they_may_be_used(tmp_path: Path) -> None:
    writer = rd.summary.create_file_writer(tmp_path)
    for go in (pickle.dumps, copy.deepcopy):
        with pytest.raises(rd.FailedPreconditionError, match="A writer must stay in the process that made it"):
            go(writer)
    with writer.as_default(step=0):
        with pytest.raises(rd.FailedPreconditionError, match="rd.summary.flush is for the driver"):
            rd.OneDeviceStrategy("cpu").run(rd.summary.flush)
        writer.close()
        with pytest.raises(rd.FailedPreconditionError, match="must be open to take summaries"):
            rd.summary.scalar("loss", 0.5)
    with pytest.raises(rd.FailedPreconditionError, match="must be open to be used"), writer.as_default():
        pass
    with pytest.raises(rd.FailedPreconditionError, match="must be open"):
        writer.flush()
    with pytest.raises(rd.InvalidArgumentError, match="flush_millis must be .*got -1"):
        rd.summary.create_file_writer(tmp_path, flush_millis=-1)


def test_an_error_of_the_program_is_not_hidden(tmp_path: Path) -> None:
    def program() -> None:
        with rd.summary.create_file_writer(tmp_path) as writer, writer.as_default(step=0):
            rd.summary.scalar("loss", 1 / 2)
            rd.summary.scalar("loss", 1 / 0)

    with pytest.raises(ZeroDivisionError):
        program()
    assert curves(tmp_path).scalars("loss") == [(0, 0.5)]


def test_an_error_of_the_program_is_not_hidden_by_one_of_a_step(tmp_path: Path) -> None:
    steps, writer = Steps(fails=True), rd.summary.create_file_writer(tmp_path)
    writer.follow(steps)
    with pytest.raises(ZeroDivisionError), writer:
        _ = 1 / 0


class Steps:
    """Stands for the dispatched steps of a strategy."""

    def __init__(self, *, fails: bool = False) -> None:
        self.finished, self.fails = 0, fails

    def finish(self) -> None:
        self.finished += 1
        if self.fails:
            raise KeyError

    def until_now(self) -> Callable[[], None]:
        return self.finish


def test_steps_are_waited_for_before_summaries_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps, on_disk = Steps(), list[int]()
    monkeypatch.setattr(os, "fsync", on_disk.append)
    writer = rd.summary.create_file_writer(tmp_path, flush_millis=10**6, filename_suffix=".v2")
    writer.follow(steps)
    with writer.as_default(step=1):
        rd.summary.scalar("loss", 0.5)
        flush = pending_summaries()
        flush()
    assert curves(tmp_path).scalars("loss") == [(1, 0.5)]
    assert (steps.finished, len(on_disk)) == (1, 1)
    assert [path.suffix for path in tmp_path.iterdir()] == [".v2"]
    writer.flush()
    writer.close()
    writer.close()
    assert steps.finished == 3


def test_records_are_in_the_file_soon_and_when_their_writer_is_dropped(tmp_path: Path) -> None:
    for name, flush_millis in (("soon", 10), ("dropped", 10**6)):
        writer = rd.summary.create_file_writer(tmp_path / name, flush_millis)
        with writer.as_default():
            rd.summary.scalar("loss", 0.5, step=1)
        if name == "dropped":
            del writer
        wait_until(functools.partial(has_records, tmp_path / name))


def has_records(logdir: Path) -> bool:
    return bool(curves(logdir).names("scalars"))


def opened(logdir: Path) -> EventFile:
    return EventFile(*open_event_file(str(logdir)), flush_s=30.0)


def test_what_was_added_is_there_after_a_flush_and_after_the_end(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    file = opened(tmp_path / "new" / "folder")
    file.flush()
    assert set(threading.enumerate()) == before, "no thread before the first record"
    file.add(record_of("loss", 0.5))
    assert len(set(threading.enumerate()) - before) == 1
    file.flush()
    assert curves(tmp_path / "new" / "folder").scalars("loss") == [(0, 0.5)]
    file.add(record_of("loss", 0.25, step=1))
    file.close()
    file.close()
    assert set(threading.enumerate()) == before
    assert curves(tmp_path / "new" / "folder").scalars("loss") == [(0, 0.5), (1, 0.25)]


def test_what_takes_the_place_of_earlier_files_may_begin_at_step_0() -> None:
    assert [len(list(first_events(0.0, purge_step))) for purge_step in (None, 0, 5)] == [1, 2, 2]


def test_a_directory_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    told = r"must be one that this program can write, got .*Give another"
    places = ("file", "file/below", "/proc/raydist", "with\0zero")
    check_refused(open_event_file, [(str(tmp_path / place), told) for place in places])  # "/proc" stays what it is


class Full(io.BytesIO):
    """A disk without room."""

    def write(self, data: object) -> int:
        raise OSError(28, "No space left on device")


def test_a_full_disk_is_told_once_and_ends_no_training() -> None:
    file = EventFile("/full/events", Full(), flush_s=30.0)
    file.add(record_of("loss", 0.5))
    with pytest.raises(rd.FailedPreconditionError, match=r"'/full/events', which failed: .*No space left"):
        file.flush()
    file.add(record_of("loss", 0.5))
    (remark,) = file.take_remarks()
    assert "Summaries are lost from now on: '/full/events'" in remark
    assert file.take_remarks() == []
    file.close()


class Stuck(io.BytesIO):
    """A disk that does nothing until it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.free = threading.Event()

    def write(self, data: object) -> int:
        self.free.wait(20)
        return 0


def test_what_a_slow_disk_cannot_take_is_left_out_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raydist.summary.event_file._MOST_BYTES", 3000)
    disk = Stuck()
    file = EventFile("/slow/events", disk, flush_s=30.0)
    for _ in range(5):
        file.add(record_of("note", Text(("a" * 1000,))))
    with pytest.raises(rd.DeadlineExceededError, match="must be in '/slow/events' within 0.01 s"):
        file.flush(0.01)
    disk.free.set()
    (remark,) = file.take_remarks()
    assert "Summaries come faster than '/slow/events' can be written" in remark
    file.close()


def test_what_cannot_be_shown_is_left_out_and_nothing_else(tmp_path: Path) -> None:
    file = opened(tmp_path)
    for step in range(2):
        file.add(record_of("text", Text(("no character: \ud800",)), step=step))
        file.add(record_of("loss", 0.5, step=step))
    file.flush()
    told = file.take_remarks()
    file.close()
    assert curves(tmp_path).scalars("loss") == [(0, 0.5), (1, 0.5)]
    assert len(told) == 1
    assert "What is shown as 'text' must be something that event files hold, but at step 0 it is not" in told[0]


def brief(records: list[Record]) -> list[tuple[str, int, object]]:
    return [(record.name, record.step, getattr(record.data, "value", record.data)) for record in records]


def test_calls_of_one_name_step_and_kind_belong_together_by_their_order() -> None:
    first = [record_of("loss", 1.0), record_of("loss", 2.0), record_of("loss", 7.0, step=1)]
    second = [record_of("loss", 3.0), record_of("loss", 4.0), record_of("loss", 9.0, step=1)]
    assert brief(merge([first, second])) == [("loss", 0, 2.0), ("loss", 0, 3.0), ("loss", 1, 8.0)]
    assert brief(merge([[], [record_of("only here", 3.0)]])) == [("only here", 0, 3.0)]
    some = merge([[record_of("a", 1.0)], [record_of("b", 3.0), record_of("a", 2.0)]])
    assert brief(some) == [("a", 0, 1.5), ("b", 0, 3.0)]
    nothing = Record("writer", "loss", 0, ScalarValue(float("nan"), weight=0.0), wall_time=1.0)
    assert brief(merge([[record_of("loss", 2.0)], [nothing]])) == [("loss", 0, 2.0)]
    text = Text(("hello",))
    assert brief(merge([[record_of("x", 1.0)], [record_of("x", text)]])) == [("x", 0, 1.0), ("x", 0, text)]


def test_whole_numbers_of_all_kinds_are_steps() -> None:
    for step in (3, np.int32(3), np.array(3), torch.tensor(3), torch.tensor([3])):
        assert step_number(step) == 3
        assert type(step_number(step)) is int
    others = [1.5, "3", True, torch.tensor(1.5), torch.tensor([1, 2]), [3], 2**63, -(2**63) - 1]
    check_refused(step_number, [(each, "The step of a summary must be a whole number, got") for each in others])
