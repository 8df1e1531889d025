from __future__ import annotations

from raydist.pipelines.sources.pieces import Piece, PieceReader
from tests.pipelines.sources.lists import ListReader


def test_pieces_know_where_reading_goes_on() -> None:
    reader = PieceReader(lambda: ListReader([b"a", b"bc", b"d"]))
    assert reader.read(2) == Piece([b"a", b"bc"], None, 3, 2, ended=False)
    assert reader.read(2) == Piece([b"d"], None, 4, 3, ended=True)
    reader.close()


def test_a_file_that_cannot_be_opened_is_one_error() -> None:
    failure = FileNotFoundError("x")

    def fail() -> ListReader:
        raise failure

    reader = PieceReader(fail)
    assert reader.read(2) == Piece((), failure, 0, 0, ended=True)
    reader.close()


def test_an_error_stands_behind_the_records_before_it() -> None:
    failure = ValueError("x")
    reader = PieceReader(lambda: ListReader([b"a", failure, b"b"]))
    assert reader.read(5) == Piece([b"a"], failure, 1, 2, ended=False)
    assert reader.read(5) == Piece([b"b"], None, 2, 3, ended=True)
