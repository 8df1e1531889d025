from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from raydist.collectives.base import Membership
from raydist.collectives.shared_memory import generation as generation_module
from raydist.collectives.shared_memory.generation import SharedGeneration, TaskWork
from raydist.collectives.shared_memory.layout import Layout
from raydist.collectives.shared_memory.segment import Segment
from raydist.collectives.shared_memory.sequence import Body
from raydist.collectives.shared_memory.spare_time import while_waiting
from raydist.collectives.shared_memory.task import Condition, Steps, Task
from raydist.errors import CancelledError, DeadlineExceededError, RaydistError, UnavailableError


@pytest.fixture
def pair() -> Iterator[list[SharedGeneration]]:
    size = Layout.of(2).size
    first = Segment.create(size)
    segments = [first, Segment.open(first.name, size, first.token)]
    first.unlink()
    for rank, segment in enumerate(segments):
        segment.hold(rank)
    generations = [SharedGeneration(Membership("g", 3, rank, 2), segments[rank], 0.3) for rank in range(2)]
    yield generations
    for generation in generations:
        generation.leave()


def call(generation: SharedGeneration, body: Body = lambda number: None, *, brings_all: bool = True) -> Task:
    return generation.sequence.call("work", b"work", body, brings_all=brings_all, memory=0, brought=())


def failure_of(generation: SharedGeneration, task: Task, timeout_s: float | None = None) -> RaydistError:
    with pytest.raises(RaydistError) as caught:
        TaskWork(generation, task).wait(timeout_s)
    return caught.value


def test_a_limit_of_one_wait_ends_the_wait_alone(pair: list[SharedGeneration]) -> None:
    task = call(pair[0])
    error = failure_of(pair[0], task, 0.05)
    assert isinstance(error, DeadlineExceededError)
    assert "work by rank 0 of 2 (group 'g', generation 3) timed out after 0.05 s. It goes on" in str(error)
    call(pair[1])
    TaskWork(pair[0], task).wait(0.0)


def test_the_limit_of_the_group_fails_it_for_all(pair: list[SharedGeneration]) -> None:
    error = failure_of(pair[0], call(pair[0]))
    assert isinstance(error, DeadlineExceededError)
    assert "timed out after 0.3 s. No sign of rank 1. Raise the limit (Timeouts.collective_s)" in str(error)
    with pytest.raises(DeadlineExceededError, match=r"other by rank 1 .* was given up: .*Reconfigure the group"):
        pair[1].check("other")


def test_an_abort_is_heard_by_all(pair: list[SharedGeneration]) -> None:
    pair[1].abort()
    pair[1].abort()
    for generation in pair:
        with pytest.raises(CancelledError, match="rank 1 aborted group 'g', generation 3"):
            generation.check("work")
    assert isinstance(failure_of(pair[0], call(pair[0])), CancelledError)


def test_what_all_have_called_ends_well_after_an_abort(pair: list[SharedGeneration]) -> None:
    tasks = [call(generation) for generation in pair]
    pair[1].abort()
    TaskWork(pair[0], tasks[0]).wait()


def test_a_rank_that_has_left_is_gone_and_no_longer_waited_for(pair: list[SharedGeneration]) -> None:
    ended, pending = call(pair[0]), call(pair[0])
    call(pair[1])
    pair[1].leave()
    TaskWork(pair[0], ended).wait()
    start = time.monotonic()
    error = failure_of(pair[0], pending, 30.0)
    assert isinstance(error, UnavailableError)
    assert "failed: rank 1 is gone." in str(error)
    assert time.monotonic() - start < 5.0


def test_a_collective_behind_another_waits_for_the_same_ranks(pair: list[SharedGeneration]) -> None:
    tasks = [call(pair[0]) for _ in range(50)]  # more than can be begun at once
    pair[1].leave()
    assert isinstance(failure_of(pair[0], tasks[-1]), UnavailableError)


def test_what_breaks_inside_a_collective_fails_the_group(pair: list[SharedGeneration]) -> None:
    def body(number: int) -> Steps:
        raise MemoryError("no room")
        yield

    task = call(pair[0], body, brings_all=False)
    call(pair[1])
    with pytest.raises(MemoryError):
        pair[0].wait(task, None)
    with pytest.raises(UnavailableError, match=r"rank 0 failed inside a collective \(MemoryError: no room\)"):
        pair[1].check("work")


def test_who_does_its_part_and_leaves_at_once_is_not_missed(
    pair: list[SharedGeneration], monkeypatch: pytest.MonkeyPatch
) -> None:
    def leave_now(rank: int) -> bool:
        call(pair[1])
        return False

    monkeypatch.setattr(pair[0].segment, "holds", leave_now)
    task = call(pair[0])
    pair[0].advance()
    pair[0]._look_for_the_dead(task)
    assert task.done


@pytest.mark.parametrize(("crowd", "slice_s"), [(False, 0.05), (True, 0.25)])
def test_ranks_of_a_crowd_look_for_the_dead_less_often(
    crowd: bool, slice_s: float, pair: list[SharedGeneration], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[float] = []
    monkeypatch.setattr(generation_module, "is_crowd", lambda num_ranks: crowd)
    waiting = SharedGeneration(Membership("g", 3, 0, 2), pair[0].segment, 0.3)
    monkeypatch.setattr(waiting.board, "sleep", lambda seen, seconds: asked.append(seconds))
    assert isinstance(failure_of(waiting, call(waiting), 0.26), DeadlineExceededError)
    assert asked[0] == slice_s


def left_to(pair: list[SharedGeneration], body: Body = lambda number: None) -> Task:
    """What the second rank has left to the first one."""
    left_at = pair[1].bell_where_idle()
    task = pair[1].sequence.call("work", b"work", body, brings_all=False, memory=0, brought=(), led=True)
    task.left_at = left_at
    return task


def test_who_leaves_the_rest_to_another_sleeps_until_that_one_rings(
    pair: list[SharedGeneration], monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[tuple[int, float]] = []
    task = left_to(pair)
    monkeypatch.setattr(pair[1].board, "sleep", lambda seen, seconds: slept.append((seen, seconds)))
    pair[1].wait(task, 10.0)
    assert (slept, task.done, task.left_at) == ([(0, 0.05)], True, None)


def test_a_ring_before_the_wait_is_not_slept_through(pair: list[SharedGeneration]) -> None:
    task = left_to(pair)
    pair[1].board.ring()
    begin = time.monotonic()
    pair[1]._slice_s = 20.0
    pair[1].wait(task, None)
    assert task.done
    assert time.monotonic() - begin < 10.0


def test_nothing_is_left_to_another_while_something_is_under_way(pair: list[SharedGeneration]) -> None:
    assert pair[0].bell_where_idle() == pair[0].board.bell.count()
    call(pair[0])
    assert pair[0].bell_where_idle() is None
    call(pair[1])
    pair[0].advance()
    assert pair[0].bell_where_idle() is not None


@pytest.mark.parametrize("leaves_it", [True, False])
def test_before_it_sleeps_a_rank_does_what_it_has_for_such_times(
    leaves_it: bool, pair: list[SharedGeneration], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once its part is there; and what comes meanwhile is not slept through."""
    done: list[str] = []
    pair[1]._slice_s = 20.0
    sleep = pair[1].board.sleep

    def noted_sleep(seen: int, seconds: float) -> None:
        done.append("slept")
        sleep(seen, seconds)

    monkeypatch.setattr(pair[1].board, "sleep", noted_sleep)

    def bring() -> None:
        done.append("brought")
        call(pair[0])
        pair[1].board.ring()

    task = left_to(pair) if leaves_it else call(pair[1])
    begin = time.monotonic()
    with while_waiting(bring):
        pair[1].wait(task, None)
    assert done == ["brought", "slept"]
    assert time.monotonic() - begin < 10.0


def test_who_need_not_sleep_has_no_spare_time(pair: list[SharedGeneration]) -> None:
    call(pair[0])
    task = call(pair[1])
    with while_waiting(lambda: pytest.fail("there was nothing to wait for")):
        pair[1].wait(task, 10.0)


class Never(Condition):
    """What the first rank does not say."""

    last = False

    def met(self) -> bool:
        return False

    def missing(self) -> tuple[int, ...]:
        return (0,)


def unsaid(number: int) -> Steps:
    yield Never()


def test_who_leaves_the_rest_to_one_that_is_gone_learns_of_it(pair: list[SharedGeneration]) -> None:
    task = left_to(pair, unsaid)
    pair[0].leave()
    begin = time.monotonic()
    assert "failed: rank 0 is gone." in str(failure_of(pair[1], task, 30.0))
    assert time.monotonic() - begin < 5.0


def test_who_leaves_the_rest_to_another_keeps_to_its_limit(pair: list[SharedGeneration]) -> None:
    task = left_to(pair, unsaid)
    assert "timed out after 0.02 s. It goes on" in str(failure_of(pair[1], task, 0.02))
    begin = time.monotonic()
    assert "timed out after 0.3 s. No sign of rank 0." in str(failure_of(pair[1], task))
    assert time.monotonic() - begin < 5.0


def test_who_leaves_the_rest_to_another_hears_of_a_failure(pair: list[SharedGeneration]) -> None:
    task = left_to(pair, unsaid)
    pair[0].abort()
    assert "rank 0 aborted group" in str(failure_of(pair[1], task, 30.0))
