from __future__ import annotations

import io
import threading
from pathlib import Path

import pytest

import raydist as rd
from raydist.summaries.event_file import EventFile, open_event_file
from raydist.summaries.said_once import Text
from tests.summaries.reading import curves
from tests.summaries.records import record_of


def opened(logdir: Path) -> EventFile:
    return EventFile(*open_event_file(str(logdir)), flush_s=30.0)


def test_what_was_added_is_there_after_a_flush_and_after_the_end(tmp_path: Path) -> None:
    file = opened(tmp_path / "new" / "folder")
    file.add(record_of("loss", 0.5))
    file.flush()
    assert curves(tmp_path / "new" / "folder").scalars("loss") == [(0, 0.5)]
    file.add(record_of("loss", 0.25, step=1))
    file.close()
    file.close()
    assert curves(tmp_path / "new" / "folder").scalars("loss") == [(0, 0.5), (1, 0.25)]


def test_no_thread_before_the_first_record_and_none_after_the_end(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    file = opened(tmp_path)
    file.flush()
    assert set(threading.enumerate()) == before
    file.add(record_of("loss", 0.5))
    assert len(set(threading.enumerate()) - before) == 1
    file.close()
    assert set(threading.enumerate()) == before


def test_a_file_without_records_is_one_of_tensorboard(tmp_path: Path) -> None:
    opened(tmp_path).close()
    assert curves(tmp_path).names("scalars") == set()
    assert next(tmp_path.iterdir()).stat().st_size > 0


def test_after_the_end_nothing_is_taken(tmp_path: Path) -> None:
    file = opened(tmp_path)
    file.close()
    with pytest.raises(rd.FailedPreconditionError, match="The writer must be open"):
        file.add(record_of("loss", 0.5))


@pytest.mark.parametrize("logdir", ["file", "file/below", "/proc/raydist", "with\0zero"])
def test_a_directory_that_cannot_be_written(logdir: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(rd.InvalidArgumentError, match=r"must be one that this program can write, got .*Give another"):
        open_event_file(logdir if logdir.startswith("/") else str(tmp_path / logdir))


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
    monkeypatch.setattr("raydist.summaries.event_file._MOST_BYTES", 3000)
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
