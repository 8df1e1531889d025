from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, final

import pytest

import raydist as rd
from raydist.pipelines.elements.items import ElementError
from raydist.pipelines.formats.byte_streams import ByteStream
from raydist.pipelines.formats.records import RecordReader
from raydist.pipelines.sources.file_format import RecordFormat
from raydist.pipelines.sources.record_files import RecordFilesOp, RecordSlot
from tests.contracts.op import check_op
from tests.pipelines.sources.lists import ListReader


class ByteReader(RecordReader):
    """Every byte is a record; a capital one is an error, and X the end of what can be read."""

    def __init__(self, stream: ByteStream, offset: int, index: int) -> None:
        super().__init__(stream, offset, index)

    def read(self, limit: int) -> tuple[list[bytes], Exception | None]:
        byte = self._stream.read(1)
        self.ended = byte in (b"", b"X")
        self.offset += len(byte)
        self.index += len(byte)
        if byte.isupper():
            return [], rd.DataLossError(f"{byte!r} at {self.offset}")
        return [byte] if byte else [], None

    def _advance(self, records: list[bytes], limit: int) -> None:
        raise AssertionError("`read` does not call it")


@final
@dataclass(frozen=True)
class ByteFormat(RecordFormat):
    name: ClassVar[str] = "ByteDataset"
    compression_type: str | None = None

    def reader(self, stream: ByteStream, offset: int, index: int) -> ByteReader:
        if index == 0 and stream.path.endswith("locked"):
            raise rd.FailedPreconditionError("locked")
        return ByteReader(stream, offset, index)


@pytest.mark.parametrize("cycle", [None, 1, 2, 5])
def test_any_format_keeps_the_contract(tmp_path: Path, cycle: int | None) -> None:
    contents = {"a": b"abc", "b": b"", "locked": b"z", "d": b"dEf", "e": b"gXh", "f": b"i"}
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    paths = [tmp_path / name for name in contents]
    make = partial(RecordFilesOp.of, paths, ByteFormat(), cycle)
    check_op(lambda: rd.Dataset(make()))
    if cycle == 1:
        locked = ("FailedPreconditionError", "locked")
        errors = ("DataLossError", "b'E' at 2"), ("DataLossError", "b'X' at 2")
        check_op(lambda: rd.Dataset(make()), [b"a", b"b", b"c", locked, b"d", errors[0], b"f", b"g", errors[1], b"i"])


def test_names_its_format() -> None:
    op = RecordFilesOp.of("x", ByteFormat(), 3)
    assert (op.name, op.label) == ("ByteDataset", "ByteDataset(compression_type=None, files in turn: 3)")
    assert len(op.inputs) == 1


def test_bad_number_of_files_in_turn() -> None:
    with pytest.raises(rd.InvalidArgumentError, match="num_parallel_reads must be >= 1, AUTOTUNE or None, got -2"):
        RecordFilesOp.of("x", ByteFormat(), -2)


@final
@dataclass(frozen=True)
class MeetingFormat(RecordFormat):
    """Every file waits at its beginning until `files` of them are being read."""

    name: ClassVar[str] = "MeetingDataset"
    meeting: threading.Barrier
    compression_type: str | None = None

    def reader(self, stream: ByteStream, offset: int, index: int) -> ByteReader:
        self.meeting.wait(20)
        return ByteReader(stream, offset, index)


def test_files_are_read_at_the_same_time(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in "abcd"]
    for path in paths:
        path.write_bytes(path.name.encode() * 3)
    meeting = MeetingFormat(threading.Barrier(4))
    assert b"".join(rd.Dataset(RecordFilesOp.of(paths, meeting, 4))) == b"abcd" * 3


def test_autotune_reads_ahead_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    threads = set()
    read = ByteReader.read

    def noted(reader: ByteReader, limit: int) -> tuple[list[bytes], Exception | None]:
        threads.add(threading.current_thread().name)
        return read(reader, limit)

    monkeypatch.setattr(ByteReader, "read", noted)
    paths = [tmp_path / name for name in "ab"]
    for path in paths:
        path.write_bytes(path.name.encode() * 3)
    iterator = iter(rd.Dataset(RecordFilesOp.of(paths, ByteFormat(), rd.AUTOTUNE)))
    assert next(iterator) == b"a"
    assert b"".join(iterator) == b"aabbb"
    assert threads == {"raydist-read"}


ITEMS: list[bytes | Exception] = [b"a", b"bb", ValueError("x"), b"c", b"d", b"e"]


def slot(items: Sequence[bytes | Exception], position: tuple[int, int, int] = (0, 0, 0), *, ahead: bool) -> RecordSlot:
    return RecordSlot(lambda path, offset, index: ListReader(items, offset, index), 7, "path", position, ahead=ahead)


def drain(source: RecordSlot, limit: int) -> list[Any]:
    found: list[Any] = []
    while True:
        records, error = source.read(limit)
        if not len(records) and error is None:
            assert source.ended
            source.close()
            return found
        found += records.tolist() if error is None else [error]


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("limit", [1, 2, 10])
def test_all_records_and_errors_in_order(ahead: bool, limit: int) -> None:
    assert drain(slot(ITEMS, ahead=ahead), limit) == ITEMS
    assert drain(slot([], ahead=ahead), limit) == []


@pytest.mark.parametrize("ahead", [False, True])
def test_goes_on_at_every_state(ahead: bool) -> None:
    for done in range(len(ITEMS) + 1):
        first = slot(ITEMS, ahead=ahead)
        for _ in range(done):
            first.read(1)
        number, *position = first.state()
        first.close()
        resumed = slot(ITEMS, (position[0], position[1], position[2]), ahead=ahead)
        assert resumed.state() == [number, *position]
        assert drain(resumed, 2) == ITEMS[done:]


@pytest.mark.parametrize("ahead", [False, True])
def test_a_state_behind_the_end_is_the_end(ahead: bool) -> None:
    assert drain(slot(ITEMS[:2], (0, 0, 5), ahead=ahead), 3) == []


def test_records_at_hand_are_taken_without_waiting() -> None:
    source = slot([b"a", b"b", b"c"], ahead=True)
    assert source.ready() == 0
    assert source.read(1)[0].tolist() == [b"a"]
    assert source.ready() == 2
    assert source.take(5).tolist() == [b"b", b"c"]
    assert drain(source, 1) == []


def test_an_error_in_the_place_of_the_name() -> None:
    error = ValueError("no name")
    source = RecordSlot(lambda *_: ListReader([]), 0, ElementError(error), ahead=True)
    source.start()
    assert source.read(3)[1] is error
    assert source.ended
    source.close()
