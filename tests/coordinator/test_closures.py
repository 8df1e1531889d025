"""Closures: their header, their queue, the clocks of BoundedStaleness, and the log that workers follow."""

from __future__ import annotations

import random
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

import raydist as rd
from raydist.coordinator.closures import Closure, ClosureQueue
from raydist.coordinator.worker_pool import PayloadLog
from raydist.core.nest import flatten
from raydist.replicas.ps.work_message import PlannedWork
from raydist.replicas.results import StepResult

WORKERS = st.integers(0, 2)


def closure(queue: ClosureQueue) -> Closure:
    number = queue.next_number()
    return Closure(number, PlannedWork(number, b""))


RESULT = StepResult(flatten(0)[1], (0,))


class Queue(RuleBasedStateMachine):
    """Adds, takes, ends and loses closures in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = ClosureQueue()
        self.added: list[Closure] = []
        self.begun: list[int] = []

    @rule()
    def add(self) -> None:
        if self.queue.error is None:
            self.added.append(closure(self.queue))
            self.queue.add(self.added[-1])

    @precondition(lambda self: self.queue.num_waiting and self.queue.error is None)
    @rule(worker=WORKERS)
    def take(self, worker: int) -> None:
        first = min(each.number for each in self.added if not each.ended and each not in self.running())
        assert self.queue.take(worker).number == first

    @rule(worker=WORKERS, how=st.sampled_from(["succeed", "fail", "skip"]))
    def end(self, worker: int, how: str) -> None:
        for each in self.queue.running_on(worker)[:1]:
            if how == "succeed":
                self.queue.succeed(worker, each, RESULT)
            elif how == "fail":
                self.queue.fail(worker, each, ValueError(f"of {each.number}"))
                assert self.queue.num_waiting == 0
            else:
                self.queue.skip(worker, each)
            assert each.ended
            assert (each.error is None) == (how == "succeed")

    @rule(worker=WORKERS)
    def lose(self, worker: int) -> None:
        orphans = self.queue.running_on(worker)
        self.queue.lost(worker, rd.UnavailableError("gone"))
        assert not self.queue.running_on(worker)
        if self.queue.error is None and orphans:
            first = self.queue.peek()
            assert first is not None
            assert first.number <= orphans[0].number

    @rule()
    def tell(self) -> None:
        epoch, error = self.queue.epoch, self.queue.error
        assert self.queue.take_error() is error
        assert self.queue.epoch == epoch + (error is not None)

    def running(self) -> list[Closure]:
        return [each for worker in range(3) for each in self.queue.running_on(worker)]

    @invariant()
    def all_are_somewhere(self) -> None:
        alive = [each.number for each in self.added if not each.ended]
        assert self.queue.num_open == len(alive)
        assert self.queue.num_running == len(self.running())
        assert self.queue.finished_below == min(alive, default=len(self.added))
        assert all(each.work is None for each in self.added if each.ended)
        assert all(each.error is not None or each.result is not None for each in self.added if each.ended)


Queue.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)

TestQueue = Queue.TestCase


def test_what_has_not_begun_is_given_up_but_for_what_lies_before_what_has_or_is_alone() -> None:
    queue = ClosureQueue()
    closures = [Closure(number, PlannedWork(number, b""), alone=number == 4, boundary=number) for number in range(8)]
    for closure in closures:
        queue.add(closure)
    first = queue.take(0)
    queue.take(1)
    queue.put_back(0, [first])  # an interrupt left it unsent: what is behind it has begun
    assert queue.peek() is first
    assert queue.num_running == 1
    error = ValueError("the end")
    assert queue.give_up_from(6, error) == closures[6:]
    assert queue.give_up_from(0, error) == [closures[5]]
    assert [closure.ended for closure in closures] == [False] * 5 + [True] * 3
    assert all(closure.error is error for closure in closures[5:])
    assert queue.num_open == 5


def finish_one(queue: ClosureQueue, worker: int) -> None:
    queue.succeed(worker, queue.running_on(worker)[0], RESULT)


@given(st.integers(0, 4), st.integers(1, 4), st.integers(0, 2**32))
def test_one_worker_can_always_go_on_and_no_clock_is_too_far_ahead(bound: int, num_workers: int, seed: int) -> None:
    """Workers take, finish and die in any order."""
    draw = random.Random(seed)
    queue, living = ClosureQueue(bound), list(range(num_workers))
    clocks: Counter[int] = Counter()
    for _ in range(200):
        queue.add(closure(queue))
    while queue.num_waiting:
        worker = draw.choice(living)
        capacity = queue.capacity_of(worker, living)
        assert capacity is not None
        held = len(queue.running_on(worker))
        assert clocks[worker] + held + capacity <= min(clocks[each] for each in living) + bound + 1 or not capacity
        if capacity and draw.random() < 0.5:
            queue.take(worker)
        elif held and draw.random() < 0.9:
            finish_one(queue, worker)
            clocks[worker] += 1
        elif draw.random() < 0.02 and len(living) > 1:
            queue.lost(worker, RuntimeError("gone"))
            clocks[worker] = min(clocks[each] for each in living if each != worker)
            queue.error = None
        assert any(queue.running_on(each) or queue.capacity_of(each, living) for each in living)


def test_clocks_begin_again_when_the_queue_was_empty_and_a_new_worker_starts_at_the_smallest() -> None:
    queue = ClosureQueue(0)
    for _ in range(2):
        queue.add(closure(queue))
    queue.take(0)
    assert (queue.capacity_of(0, [0, 1]), queue.capacity_of(1, [0, 1])) == (0, 1)
    finish_one(queue, 0)
    assert queue.capacity_of(0, [0, 1]) == 0  # worker 1 has done none, and one waits for it
    queue.take(1)
    finish_one(queue, 1)
    for _ in range(20):
        queue.add(closure(queue))
    assert queue.capacity_of(0, [0, 1]) == 1
    for _ in range(10):
        assert queue.capacity_of(0, [0]) == 1
        queue.take(0)
        finish_one(queue, 0)
    assert queue.capacity_of(2, [0, 2]) == queue.capacity_of(0, [0, 2]) == 1


def test_a_learning_rate_that_is_set_for_every_step_leaves_a_short_log() -> None:
    log = PayloadLog(2)
    log.append(b"model")
    log.append(b"decay", frozenset({"decay"}))
    for number in range(100):
        log.append(str(number).encode(), frozenset({"lr"}))
        for worker in range(2):
            log.due(worker, log.end)
    assert log.num_held <= 5
    for number in (100, 101):
        log.append(str(number).encode(), frozenset({"lr"}))
    assert log.due(1, log.end - 1) == [b"100"], "what somebody has not received stays"
    log.restarted(0)
    assert log.due(0, 1)[:2] == [b"model", b"decay"]
    assert [log.due(1, log.end), log.due(1, log.end)] == [[b"101"], []]
