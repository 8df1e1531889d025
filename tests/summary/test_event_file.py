"""Records: merging those of replicas, converting arguments, encoding and writing them."""

from __future__ import annotations

import io
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensorboardX.proto.event_pb2 import Event, SessionLog

import raydist as rd
from raydist.summary.event_file import EventFile, event_of, first_events, open_event_file
from raydist.summary.histograms import counted
from raydist.summary.media import Text
from raydist.summary.record import Record, SummaryData, as_array, merge, step_number
from raydist.summary.runs import GraphData, Hyperparameters
from tests.summary.reading import curves, record_of


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


def event(name: str, shown: SummaryData | float) -> Event:
    return Event.FromString(event_of(record_of(name, shown, step=3)))


def test_a_file_says_its_version_and_what_it_replaces() -> None:
    version, start = (Event.FromString(data) for data in first_events(1.0, purge_step=5))
    assert version.file_version == "brain.Event:2"
    assert (start.step, start.session_log.status) == (5, SessionLog.SessionStatus.Value("START"))
    assert len(list(first_events(1.0))) == 1


def test_a_histogram_of_nothing_has_numbers() -> None:
    histogram = event("values", counted(np.zeros(0))).summary.value[0].histo
    assert (histogram.min, histogram.max, histogram.num) == (0.0, 0.0, 0.0)
    assert len(histogram.bucket) == len(histogram.bucket_limit) == 1


def test_a_table_of_texts_has_its_shape() -> None:
    tensor = event("t", Text(("a", "b"), (1, 2))).summary.value[0].tensor
    assert [dim.size for dim in tensor.tensor_shape.dim] == [1, 2]
    assert list(tensor.string_val) == [b"a", b"b"]


def test_hyperparameters_are_three_values_and_a_graph_is_no_summary() -> None:
    tags = [value.tag for value in event("_hparams_", Hyperparameters({"lr": 0.1}, ("loss",))).summary.value]
    assert tags == ["_hparams_/experiment", "_hparams_/session_start_info", "_hparams_/session_end_info"]
    assert event("graph", GraphData(b"")).WhichOneof("what") == "graph_def"


def brief(records: list[Record]) -> list[tuple[str, int, object]]:
    return [(record.name, record.step, getattr(record.data, "value", record.data)) for record in records]


def test_calls_of_one_name_and_step_belong_together_by_their_order() -> None:
    first = [record_of("loss", 1.0), record_of("loss", 2.0), record_of("loss", 7.0, step=1)]
    second = [record_of("loss", 3.0), record_of("loss", 4.0), record_of("loss", 9.0, step=1)]
    assert brief(merge([first, second])) == [("loss", 0, 2.0), ("loss", 0, 3.0), ("loss", 1, 8.0)]


def test_a_replica_may_leave_some_out() -> None:
    assert brief(merge([[], [record_of("only here", 3.0)]])) == [("only here", 0, 3.0)]
    assert brief(merge([[record_of("a", 1.0)], [record_of("b", 3.0), record_of("a", 2.0)]])) == [
        ("a", 0, 1.5),
        ("b", 0, 3.0),
    ]


def test_kinds_of_one_name_stay_apart() -> None:
    text = Text(("hello",))
    assert brief(merge([[record_of("x", 1.0)], [record_of("x", text)]])) == [("x", 0, 1.0), ("x", 0, text)]


@pytest.mark.parametrize("step", [3, np.int32(3), np.array(3), torch.tensor(3), torch.tensor([3])])
def test_whole_numbers_of_all_kinds_are_steps(step: Any) -> None:
    assert step_number(step) == 3
    assert type(step_number(step)) is int


@pytest.mark.parametrize("step", [1.5, "3", True, torch.tensor(1.5), torch.tensor([1, 2]), [3], 2**63, -(2**63) - 1])
def test_other_things_are_not(step: Any) -> None:
    with pytest.raises(rd.InvalidArgumentError, match="The step of a summary must be a whole number, got"):
        step_number(step)


def test_tensors_of_all_kinds_are_arrays() -> None:
    assert as_array(torch.eye(2).to_sparse()).tolist() == [[1, 0], [0, 1]]
    assert as_array(torch.ones(1, dtype=torch.float16)).dtype == np.float32
    assert as_array(torch.nn.Parameter(torch.ones(1))).tolist() == [1]
    assert as_array([1, 2]).tolist() == [1, 2]
