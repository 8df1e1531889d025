from __future__ import annotations

import ctypes
from collections.abc import Iterator

import pytest
import torch

from raydist.collectives.shared_memory.board import Board, Count
from raydist.collectives.shared_memory.layout import NUM_SLOTS, Layout
from raydist.collectives.shared_memory.segment import Segment
from raydist.collectives.shared_memory.sequence import Body, CollectiveSequence
from raydist.collectives.shared_memory.task import Condition, Reached, Steps, Task
from raydist.errors import CollectiveMismatchError


@pytest.fixture
def ranks() -> Iterator[list[CollectiveSequence]]:
    layout = Layout.of(2)
    segment = Segment.create(layout.size)
    segment.unlink()
    yield [CollectiveSequence(segment, Board(segment, layout, rank)) for rank in range(2)]
    segment.close()


def call(sequence: CollectiveSequence, text: str, body: Body = lambda number: None, *, brings_all: bool = True) -> Task:
    return sequence.call("work", text.encode(), body, brings_all=brings_all, memory=0, brought=())


def test_a_collective_ends_once_all_have_called_it(ranks: list[CollectiveSequence]) -> None:
    first = call(ranks[0], "a")
    ranks[0].advance()
    assert not first.done
    assert ranks[0].missing(first) == {1}
    second = call(ranks[1], "a")
    for sequence in ranks:
        sequence.advance()
    assert (first.done, second.done, first.error, ranks[0].missing(first)) == (True, True, None, set())


class Far(Condition):
    """What a rank of another host has to say."""

    last = False

    def met(self) -> bool:
        return False

    def missing(self) -> tuple[int, ...]:
        return ()

    def outside(self) -> tuple[int, ...]:
        return (2,)


def test_who_waits_inside_is_known_of_the_only_collective(ranks: list[CollectiveSequence]) -> None:
    def body(number: int) -> Steps:
        yield Far()

    assert not ranks[0].waits_inside(Task("of somebody else"))
    first = call(ranks[0], "a", body)
    ranks[0].advance()
    assert ranks[0].waits_inside(first)
    second = call(ranks[0], "b")
    assert not ranks[0].waits_inside(first)
    assert not ranks[0].waits_inside(second)
    call(ranks[1], "a")
    ranks[0].advance()
    assert not ranks[0].waits_inside(first)
    assert not ranks[0].waits_inside(second)


def test_of_a_led_collective_the_first_rank_alone_waits_for_all(ranks: list[CollectiveSequence]) -> None:
    def led(rank: int, text: bytes) -> Task:
        def body(number: int) -> None:
            begun.append(rank)

        return ranks[rank].call("work", text, body, brings_all=False, memory=0, brought=(), led=True)

    begun: list[int] = []
    bells = [sequence._board.bell.count() for sequence in ranks]
    tasks = [led(0, b"a")]
    ranks[0].advance()
    assert (begun, ranks[0].missing(tasks[0])) == ([], {1})
    tasks.append(led(1, b"b"))
    ranks[1].advance()
    assert (begun, [sequence._board.bell.count() for sequence in ranks]) == ([1], [bells[0] + 1, bells[1]])
    ranks[0].advance()
    assert begun == [1, 0]
    assert [(task.done, task.error) for task in tasks] == [(True, None)] * 2  # to compare is left to the body


def test_a_led_collective_does_not_wake_those_who_only_wait_for_the_first_rank(
    ranks: list[CollectiveSequence],
) -> None:
    ranks[1].call("work", b"a", lambda number: None, brings_all=False, memory=0, brought=(), led=True)
    rung = ranks[1]._board.bell.count()
    ranks[0].call("work", b"a", lambda number: None, brings_all=False, memory=0, brought=(), led=True)
    assert ranks[1]._board.bell.count() == rung


def test_ranks_that_call_something_else(ranks: list[CollectiveSequence]) -> None:
    tasks = [call(ranks[0], "a"), call(ranks[1], "b")]
    for sequence in ranks:
        sequence.advance()
    assert all(isinstance(task.error, CollectiveMismatchError) for task in tasks)
    assert "rank 0: a as call 0; rank 1: b as call 0" in str(tasks[0].error)


def test_what_is_brought_lies_in_the_slot(ranks: list[CollectiveSequence]) -> None:
    parts = [torch.tensor([1.0, 2.0]), torch.tensor([3.0])]
    brought = tuple((part.data_ptr(), part.nbytes) for part in parts)
    ranks[1].call("work", b"a", lambda number: None, brings_all=True, memory=7, brought=brought)
    board = ranks[0]._board
    place = ranks[0]._address + board.layout.slot(1, 0)
    assert list((ctypes.c_float * 3).from_address(place)) == [1.0, 2.0, 3.0]
    assert board.memory_of(1, 0) == 7


def test_a_rank_that_never_waits_holds_nobody_up_until_the_slots_are_used(ranks: list[CollectiveSequence]) -> None:
    for number in range(NUM_SLOTS):
        call(ranks[0], f"call {number}")  # starting one also ends earlier ones that all have called
        task = call(ranks[1], f"call {number}")
        ranks[1].advance()
        assert task.done
        ranks[0].advance()


def test_no_more_are_begun_than_there_are_slots(ranks: list[CollectiveSequence]) -> None:
    tasks = [call(ranks[0], str(number)) for number in range(3 * NUM_SLOTS)]
    begun = ranks[0]._board.load(ranks[0]._board.layout.words(0) + 8 * Count.ENTERED)
    assert begun == NUM_SLOTS // 2
    for number in range(3 * NUM_SLOTS):
        task = call(ranks[1], str(number))
        ranks[0].advance()
        ranks[1].advance()
        assert task.done
    assert all(task.done for task in tasks)
    assert all(task.error is None for task in tasks)


def test_what_others_wait_for_is_done_in_order(ranks: list[CollectiveSequence]) -> None:
    done: list[str] = []

    def body(name: str, count: Count) -> Body:
        def steps(number: int) -> Steps:
            done.append(name)
            yield Reached(ranks[0]._board, count, number + 1)
            done.append(f"{name} ended")

        return steps

    call(ranks[0], "a", body("a", Count.LOADED), brings_all=False)
    call(ranks[0], "b", body("b", Count.SERVED), brings_all=False)
    call(ranks[1], "a")
    call(ranks[1], "b")
    ranks[0].advance()
    assert done == ["a"]  # b may not overtake it
    for sequence in ranks:
        sequence._board.reach(Count.LOADED, 1)
    ranks[0].advance()
    assert done == ["a", "a ended", "b"]


def test_dropped_ones_do_nothing_more(ranks: list[CollectiveSequence]) -> None:
    task = call(ranks[0], "a")
    ranks[0].drop()
    call(ranks[1], "a")
    ranks[0].advance()
    assert not task.done
    assert ranks[0].missing(task) == set()
