"""One worker by itself: closures one after the other, whatever happens in them."""

from __future__ import annotations

import pickle
from typing import Any

import cloudpickle
import pytest
import torch

import raydist as rd
from raydist.core.values import PerReplica
from raydist.mirroring.messages import StepPayload
from raydist.replicas.ps.work_message import (
    ClosureLabel,
    LogEntry,
    PlannedWork,
    WorkMessage,
    WorkResult,
    address_work,
)
from raydist.replicas.ps.worker_runner import WorkerRules, WorkerRunner
from raydist.replicas.rules import VariablesView
from raydist.replicas.step import ReplicaSetup, StepHeader
from raydist.replicas.step_message import SentObjects


class Notes(WorkerRules):
    """Notes what it is asked for."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def before_run(self, variables: VariablesView, closure: ClosureLabel) -> None:
        self.calls.append(("before", closure.number))

    def after_run(self, variables: Any) -> None:
        self.calls.append("after")

    def after_failure(self, variables: VariablesView) -> None:
        self.calls.append("failure")

    def end_closure(self, variables: VariablesView, *, last: bool) -> None:
        self.calls.append(("end", last))

    def versions(self) -> tuple[int, ...]:
        return (5,)

    def settle(self, variables: VariablesView) -> Any:
        return [handle for handle, _ in variables.items()]

    def place(self, variables: VariablesView, plan: Any, closure: ClosureLabel) -> None:
        self.calls.append(("place", plan))

    def follow(self, variables: VariablesView, plan: Any) -> None:
        self.calls.append(("follow", plan))

    def before_read(self, variables: VariablesView, *, states: bool) -> None:
        self.calls.append(("read", states))


def worker(number: int = 1) -> tuple[WorkerRunner, Notes]:
    notes = Notes()
    setup = ReplicaSetup("here", number, 1, "cpu", ("CPU:0",), torch.get_num_threads(), 10.0, 1 << 20, rules=notes)
    return WorkerRunner(setup, 2), notes


def work(number: int, fn: Any, *, epoch: int = 0) -> PlannedWork:
    payload = StepPayload(function=cloudpickle.dumps(fn), arguments=pickle.dumps(((), {})))
    return PlannedWork(number, pickle.dumps(StepHeader(number, 0, payload, padding=False)), epoch=epoch)


def run(runner: WorkerRunner, *works: PlannedWork, entries: tuple[bytes, ...] = ()) -> WorkResult:
    items = [(each, entries if place == 0 else ()) for place, each in enumerate(works)]
    message, _ = address_work(items, SentObjects(), finished_below=0)
    return runner.steps(pickle.loads(pickle.dumps(message)), ())


def fail() -> None:
    raise ValueError("bad")


def test_rules_are_told_of_each_part_of_a_closure() -> None:
    runner, notes = worker()
    answer = run(runner, work(3, lambda: 1), work(4, lambda: 2), entries=(LogEntry(plan="plan").packed(),))
    assert [each.result.leaf(0) for each in answer.results if each.result is not None] == [1, 2]
    assert answer.versions == (5,)
    assert notes.calls == [
        ("follow", "plan"),
        *(("before", 3), "after", ("end", False)),
        *(("before", 4), "after", ("end", True)),
    ]


def test_what_follows_a_failure_is_given_up_until_the_program_knows() -> None:
    runner, notes = worker()
    answer = run(runner, work(0, fail), work(1, lambda: 1))
    assert answer.results[0].error is not None
    error = answer.results[0].error.restore()
    assert isinstance(error, ValueError)
    assert "In closure 0 on worker 1." in error.__notes__
    assert answer.results[1].cancelled
    assert run(runner, work(2, lambda: 1)).results[0].cancelled
    assert run(runner, work(3, lambda: 1, epoch=1)).results[0].result is not None
    assert notes.calls[:3] == [("before", 0), "failure", ("end", False)]


def test_an_iterator_that_ends_in_a_closure_is_an_error_of_its_own() -> None:
    runner, _ = worker()
    answer = run(runner, work(0, lambda: next(iter(()))))
    assert answer.results[0].error is not None
    with pytest.raises(rd.OutOfRangeError, match="an iterator of it has ended"):
        raise answer.results[0].error.restore()


def test_settling_gives_what_is_new_and_then_carries_out_the_plan() -> None:
    runner, notes = worker()
    assert runner.settle([], LogEntry(StepPayload()).packed()) == []
    assert runner.place("plan", ClosureLabel(7)) == (5,)
    assert notes.calls == [("place", "plan"), ("follow", "plan")]


def planned(number: int, *parts: PerReplica) -> PlannedWork:
    return PlannedWork(number, pickle.dumps(StepHeader(number, 0, StepPayload(arguments=b"args"))), parts, seen=(7,))


def test_a_message_says_of_each_closure_what_it_is_and_what_comes_before_it() -> None:
    entry = LogEntry(StepPayload(writes=b"lr"), plan=["slices"]).packed()
    works = [(planned(4, PerReplica([torch.ones(2)])), [entry]), (planned(5), [])]
    message, refs = address_work(works, SentObjects(), finished_below=3, used={"iterator": 2})
    there: WorkMessage = pickle.loads(pickle.dumps(message))
    assert refs == []
    first, second = there.items
    assert (first.label.number, first.label.finished_below, first.label.seen) == (4, 3, (7,))
    assert LogEntry.unpacked(first.entries[0]).plan == ["slices"]
    assert second.entries == ()
    header = first.step(generation=9)
    assert (header.step, header.generation, header.payload.arguments) == (4, 9, b"args")
    assert torch.equal(header.sources[0].value, torch.ones(2))
    assert there.used == {"iterator": 2}
