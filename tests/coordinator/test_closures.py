"""Closures: their header and their queue."""

from __future__ import annotations

import pickle

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

import raydist as rd
from raydist.coordinator.closures import Closure, ClosureQueue, closure_header
from raydist.core.nest import flatten
from raydist.core.values import PerReplica, ReduceOp
from raydist.mirroring.messages import StepPayload
from raydist.options import RunOptions
from raydist.replicas.ps.work_message import PlannedWork
from raydist.replicas.results import StepResult
from raydist.replicas.step import StepHeader

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

    @rule(worker=WORKERS, how=st.sampled_from(["succeed", "fail", "cancel"]))
    def end(self, worker: int, how: str) -> None:
        for each in self.queue.running_on(worker)[:1]:
            if how == "succeed":
                self.queue.succeed(worker, each, RESULT)
            elif how == "fail":
                self.queue.fail(worker, each, ValueError(f"of {each.number}"))
                assert self.queue.num_waiting == 0
            else:
                self.queue.cancel(worker, each)
            assert each.ended
            assert (each.error is None) == (how == "succeed")

    @rule(worker=WORKERS)
    def lose(self, worker: int) -> None:
        orphans = self.queue.running_on(worker)
        self.queue.lost(worker, rd.UnavailableError("gone"))
        assert not self.queue.running_on(worker)
        if self.queue.error is None and orphans:
            assert self.queue.peek() is orphans[0]

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


def test_a_closure_in_which_five_workers_died_is_an_error_that_says_so() -> None:
    queue = ClosureQueue()
    queue.add(first := closure(queue))
    queue.add(second := closure(queue))
    for _ in range(5):
        assert not first.ended
        queue.take(0)
        queue.lost(0, rd.UnavailableError("killed by the kernel."))
    with pytest.raises(rd.UnavailableError, match=r"5 workers died while they had it.*killed by the kernel"):
        raise first.error or AssertionError
    assert isinstance(second.error, rd.CancelledError)


def test_what_an_interrupt_left_unsent_is_next() -> None:
    queue = ClosureQueue()
    queue.add(first := closure(queue))
    queue.add(closure(queue))
    queue.put_back(1, [queue.take(1)])
    assert queue.peek() is first
    assert queue.num_running == 0


def test_when_nobody_is_left_everything_has_that_error() -> None:
    queue = ClosureQueue()
    for _ in range(3):
        queue.add(closure(queue))
    queue.take(0)
    error = rd.UnavailableError("No worker is left.")
    queue.abandon(error)
    assert queue.num_open == queue.num_waiting == 0
    assert queue.take_error() is error


def test_one_that_is_alone_begins_when_all_before_it_have_ended_and_holds_up_those_behind_it() -> None:
    queue = ClosureQueue()
    first, second, third = (Closure(number, PlannedWork(number, b""), alone=number == 1) for number in range(3))
    for each in (first, second, third):
        queue.add(each)
    assert queue.may_begin
    queue.take(0)
    assert not queue.may_begin
    queue.succeed(0, first, RESULT)
    assert queue.may_begin
    queue.take(0)
    assert not queue.may_begin
    queue.lost(0, rd.UnavailableError("gone"))
    assert queue.peek() is second
    assert queue.may_begin
    queue.take(1)
    queue.succeed(1, second, RESULT)
    assert queue.may_begin
    assert queue.take(0) is third


def test_what_is_cancelled_tells_of_the_error_before_it() -> None:
    queue = ClosureQueue()
    first, waiting = closure(queue), closure(queue)
    queue.add(first)
    queue.add(waiting)
    error = ArithmeticError("no")
    queue.fail(0, queue.take(0), error)
    assert waiting.error is not None
    assert waiting.error.__cause__ is error


def test_what_has_not_begun_is_given_up_but_for_what_lies_before_what_has_or_is_alone() -> None:
    queue = ClosureQueue()
    closures = [Closure(number, PlannedWork(number, b""), alone=number == 4, boundary=number) for number in range(8)]
    for closure in closures:
        queue.add(closure)
    first = queue.take(0)
    queue.take(1)
    queue.put_back(0, [first])  # its worker has died: what is behind it has begun
    error = ValueError("the end")
    assert queue.give_up_from(6, error) == closures[6:]
    assert queue.give_up_from(0, error) == [closures[5]]
    assert [closure.ended for closure in closures] == [False] * 5 + [True] * 3
    assert all(closure.error is error for closure in closures[5:])
    assert queue.num_open == 5


def test_a_worker_gets_its_step_with_the_seed_of_the_program() -> None:
    torch.manual_seed(7)
    payload = StepPayload(digest=b"step", arguments=b"args", per_replica=(PerReplica([1]),))
    header = pickle.loads(
        closure_header(payload, RunOptions(on_nonfinite="skip"), ReduceOp.SUM, None, 5, looks_only=True)
    )
    assert isinstance(header, StepHeader)
    assert (header.step, header.generation, header.seed[0]) == (5, 0, 7)
    assert (header.gradient_reduce_op, header.on_nonfinite) == (ReduceOp.SUM, "skip")
    assert (header.padding, header.looks_only, header.summaries) == (False, True, None)
    assert header.payload == payload.of_step()
    assert header.payload.per_replica == (), "its parts travel apart"
