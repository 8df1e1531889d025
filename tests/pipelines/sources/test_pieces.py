from __future__ import annotations

import gc
import threading
import weakref
from typing import Any

import pytest

from raydist.core.errors import DeadlineExceededError
from raydist.options import Timeouts
from raydist.pipelines.sources import pieces
from raydist.pipelines.sources.pieces import PieceReader, PiecesAhead
from tests.pipelines.sources.lists import ListReader


def read(reader: PieceReader, limit: int) -> tuple[Any, ...]:
    piece = reader.read(limit)
    return piece.records.tolist(), piece.error, piece.offset, piece.index, piece.ended


def test_pieces_know_where_reading_goes_on() -> None:
    reader = PieceReader(lambda: ListReader([b"a", b"bc", b"d"]))
    assert read(reader, 2) == ([b"a", b"bc"], None, 3, 2, False)
    assert read(reader, 2) == ([b"d"], None, 4, 3, True)
    reader.close()


def test_a_file_that_cannot_be_opened_is_one_error() -> None:
    failure = FileNotFoundError("x")

    def fail() -> ListReader:
        raise failure

    reader = PieceReader(fail)
    assert read(reader, 2) == ([], failure, 0, 0, True)
    reader.close()


def test_an_error_stands_behind_the_records_before_it() -> None:
    failure = ValueError("x")
    reader = PieceReader(lambda: ListReader([b"a", failure, b"b"]))
    assert read(reader, 5) == ([b"a"], failure, 1, 2, False)
    assert read(reader, 5) == ([b"b"], None, 2, 3, True)


def test_pieces_come_in_order_and_a_few_ahead() -> None:
    reader = ListReader([b"%d" % i * 100 for i in range(5000)])
    ahead = PiecesAhead(lambda: reader, "x")
    found: list[bytes] = []
    ended = False
    while not ended:
        piece = ahead.read()
        found += piece.records.tolist()
        assert len(found) <= reader.index <= len(found) + 4 * 1024
        ended = piece.ended
    assert found == [b"%d" % i * 100 for i in range(5000)]
    ahead.close()
    assert reader.closed


def test_large_records_come_in_small_pieces() -> None:
    ahead = PiecesAhead(lambda: ListReader([bytes(400_000)] * 40), "x")
    assert [len(ahead.read().records) for _ in range(3)] == [16, 2, 2]
    ahead.close()


def test_closing_stops_the_thread_and_closes_the_file() -> None:
    reader = ListReader([b"x"] * 100_000)
    ahead = PiecesAhead(lambda: reader, "x")
    ahead.close()
    ahead = PiecesAhead(lambda: reader, "x")
    ahead.start()
    ahead.close()
    ahead.close()
    assert reader.closed
    assert reader.index < 100_000


def test_who_is_dropped_stops_too() -> None:
    reader = ListReader([b"x"] * 100_000)
    ahead = PiecesAhead(lambda: reader, "x")
    ahead.read()
    gone = weakref.ref(ahead)
    del ahead
    for thread in threading.enumerate():
        if thread.name == "raydist-read":
            thread.join(10)
    del thread
    gc.collect()
    assert gone() is None
    assert reader.index <= 16 + 1024


def test_what_kills_the_thread_is_raised() -> None:
    def leave() -> ListReader:
        raise SystemExit(3)

    ahead = PiecesAhead(leave, "x")
    for _ in range(2):
        with pytest.raises(SystemExit):
            ahead.read()
    ahead.close()


def test_a_file_system_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "Timeouts", lambda: Timeouts(input_s=0.05))
    answer = threading.Event()

    def wait() -> ListReader:
        answer.wait(20)
        return ListReader([b"late"])

    ahead = PiecesAhead(wait, "far")
    with pytest.raises(DeadlineExceededError, match="records of 'far' must be read within 0.05 s"):
        ahead.read()
    answer.set()
    ahead.close()
