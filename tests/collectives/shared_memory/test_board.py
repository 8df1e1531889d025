from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from raydist.collectives.shared_memory.board import Board, Count
from raydist.collectives.shared_memory.layout import CALL_BYTES, FAILURE_BYTES, NUM_SLOTS, Layout
from raydist.collectives.shared_memory.segment import Segment

SIZE = 3


@pytest.fixture
def boards() -> Iterator[list[Board]]:
    layout = Layout.of(SIZE)
    segment = Segment.create(layout.size)
    segment.unlink()
    yield [Board(segment, layout, rank) for rank in range(SIZE)]
    segment.close()


def test_only_the_last_one_wakes_the_others(boards: list[Board]) -> None:
    counts = []
    for board in (boards[1], boards[2], boards[0]):
        board.reach(Count.LOADED, 5)
        counts.append([other.bell.count() for other in boards])
    assert counts == [[0, 0, 0], [0, 0, 0], [0, 1, 1]]


def test_who_is_missing(boards: list[Board]) -> None:
    boards[1].reach(Count.SERVED, 2)
    assert boards[0].missing(Count.SERVED, 2) == (0, 2)
    assert boards[0].missing(Count.LOADED, 2) == (0, 1, 2)
    assert not boards[2].all_reached(Count.SERVED, 1)
    for board in (boards[0], boards[2]):
        board.reach(Count.SERVED, 7)
    assert boards[1].all_reached(Count.SERVED, 2)
    assert not boards[1].all_reached(Count.SERVED, 3)


def test_calls_of_a_rank_are_its_own(boards: list[Board]) -> None:
    for rank, board in enumerate(boards):
        board.write_call(4, f"call {rank}".encode().ljust(CALL_BYTES - 8), rank + 10)
    assert [boards[0].call_of(rank, 4).strip() for rank in range(SIZE)] == [b"call 0", b"call 1", b"call 2"]
    assert [boards[0].memory_of(rank, 4) for rank in range(SIZE)] == [10, 11, 12]


def test_all_read_what_the_first_one_says_of_a_call(boards: list[Board]) -> None:
    for number, verdict in ((0, b"agreed"), (NUM_SLOTS - 1, b"refused"), (NUM_SLOTS + 2, b"agreed, noted")):
        boards[0].write_verdict(number, verdict)
        assert [board.verdict_of(number) for board in boards] == [verdict] * SIZE
    assert boards[1].verdict_of(0) == b"agreed"


def test_calls_are_compared_together(boards: list[Board]) -> None:
    text = b"all_reduce".ljust(CALL_BYTES - 8)
    for board in boards:
        board.write_call(4, text, 7)
    assert all(board.all_call(4, text, 7) for board in boards)
    assert not boards[0].all_call(4, text, 8)
    assert not boards[0].all_call(5, text, 7)
    boards[1].write_call(4, b"barrier".ljust(CALL_BYTES - 8), 7)
    assert not any(board.all_call(4, text, 7) for board in boards)


@pytest.mark.parametrize("rank", range(SIZE))
def test_whoever_fails_is_heard(boards: list[Board], rank: int) -> None:
    boards[rank].post(b"why")
    assert [board.posted() for board in boards] == [b"why"] * SIZE


def test_a_failure_wakes_everybody(boards: list[Board]) -> None:
    assert boards[0].posted() is None
    seen = boards[2].bell.count()
    boards[1].post(b"x" * 3 * FAILURE_BYTES)
    boards[2].sleep(seen, 30.0)
    assert boards[2].posted() == b"x" * (FAILURE_BYTES - 8)
    assert [board.bell.count() for board in boards] == [1, 1, 1]


def test_sleep_ends_with_the_bell_whether_it_watches_or_sleeps(boards: list[Board]) -> None:
    start = time.monotonic()
    for _ in range(200):
        seen = boards[0].bell.count()
        threading.Thread(target=boards[1].wake, args=([0],)).start()
        boards[0].sleep(seen, 30.0)
        assert boards[0].bell.count() == seen + 1
    assert time.monotonic() - start < 25.0


def test_counts_of_some_ranks_and_who_is_woken(boards: list[Board]) -> None:
    boards[1].reach(Count.SETTLED, 1, waking=0)
    assert boards[2].missing(Count.SETTLED, 1) == (0, 2)
    boards[0].reach(Count.SETTLED, 1, waking=0)
    assert boards[2].all_reached(Count.SETTLED, 1, slice(2))
    assert not boards[2].all_reached(Count.SETTLED, 1)
    boards[2].reach(Count.SETTLED, 1, waking=0)
    assert [board.bell.count() for board in boards] == [0, 0, 0]
    boards[0].wake_others()
    assert [board.bell.count() for board in boards] == [0, 1, 1]
    for rank in (0, 1, 2):
        boards[rank].reach(Count.ENTERED, 1, waking=1)  # only the first waits for all
    assert [board.bell.count() for board in boards] == [1, 1, 1]
