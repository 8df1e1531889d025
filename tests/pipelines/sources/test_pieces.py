from __future__ import annotations

from typing import Any

from raydist.pipelines.sources.pieces import PieceReader
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
