"""A group of replicas and its steps, against actors that answer in this process; `tests/strategies` has real ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from raydist.actors.supervision import root_cause
from raydist.actors.version_check import Software, installed_software
from raydist.collectives.rendezvous import RendezvousStore
from raydist.core.errors import CancelledError, FailedPreconditionError
from raydist.mirroring.messages import StepPayload
from raydist.options import Timeouts
from raydist.replicas.dispatched_steps import DispatchedSteps
from raydist.replicas.group import ReplicaGroup
from raydist.replicas.results import StepOutcome, pack_result
from raydist.replicas.step import ReplicaSetup, StepHeader
from raydist.replicas.step_message import GroupResult, PlannedStep, StepMessage


class Actors:
    """Two replicas; a step returns its number, but for the one that fails on a replica."""

    names = ("replica 0", "replica 1")

    def __init__(self) -> None:
        self.messages: list[tuple[int, list[int]]] = []
        self.calls: list[str] = []
        self.aborted: list[int] = []
        self.failing: tuple[int, int] | None = None  # step, rank
        self.broken = False
        self.ready = True
        self.interrupted = False  # while replica 1 is sent something
        self.software: dict[int, Software] = {}

    def about(self, rank: int) -> Any:
        return self.software.get(rank, installed_software())

    def start(self, rank: int, make_runner: Callable[..., Any], *args: Any) -> Any:
        return "started"

    def call(self, rank: int, method: str, *args: Any) -> Any:
        self.calls.append(method)
        self.broken = self.broken and method != "join"
        return method

    def control_all(self, method: str, *args: Any) -> None:
        self.calls.append(method)
        self.aborted += args

    def send(self, rank: int, message: StepMessage, objects: Sequence[Any]) -> GroupResult:
        if self.interrupted and rank == 1:
            raise KeyboardInterrupt
        results, error = [], None
        for header in message.steps():
            if (header.step, rank) == self.failing or (self.broken and rank == 0):
                error = error or (CancelledError("refused") if self.broken else ValueError(f"step {header.step}"))
                self.broken = True
            if error is None:
                results.append(pack_result((header.step, rank), absent=False))
        self.messages.append((rank, [header.step for header in message.steps()]))
        return GroupResult(tuple(results), 0.001 * len(results), error)

    def wait(
        self, refs: Sequence[Any], names: Sequence[str], *, on_error: Callable[[], None], **limits: Any
    ) -> list[Any]:
        errors = [ref.error for ref in refs if isinstance(ref, GroupResult) and ref.error is not None]
        if errors:
            on_error()
            raise root_cause([error for error in errors if isinstance(error, Exception)])
        return list(refs)

    def done_before_failure(self, refs: Sequence[Any]) -> list[Any]:
        return list(refs)

    def are_ready(self, refs: Sequence[Any], within_s: float) -> bool:
        return self.ready

    def discard(self, refs: Sequence[Any]) -> None:
        self.calls.append("discard")

    def kill(self) -> None:
        self.calls.append("kill")


@pytest.fixture
def actors() -> Actors:
    return Actors()


def group_on(actors: Actors) -> ReplicaGroup:
    setups = [ReplicaSetup("test", rank, 2, "cpu", ("cpu", "cpu"), 1, 10.0, 1 << 20) for rank in range(2)]
    found: Any = actors  # takes the place of `ReplicaActors`
    return ReplicaGroup(setups, found, RendezvousStore(), Timeouts())


def planned(step: int) -> PlannedStep:
    return PlannedStep(StepHeader(step, 0, StepPayload(digest=b"step")))


def values(outcome: StepOutcome) -> list[Any]:
    return [result.leaf(0) for result in outcome.results()]


@pytest.fixture
def group(actors: Actors) -> Any:
    group = group_on(actors)
    group.start()
    yield group
    group.close(gently=False)


def test_another_version_is_said_before_anything_runs(actors: Actors) -> None:
    actors.software[1] = Software((("torch", "0.1"),))
    group = group_on(actors)
    with pytest.raises(FailedPreconditionError, match="replica 1 has torch 0.1, not"):
        group.start()
    assert "join" not in actors.calls
    group.close(gently=False)


def test_an_interrupt_while_steps_are_sent_ends_them_on_the_replicas_that_have_them(
    group: ReplicaGroup, actors: Actors
) -> None:
    actors.interrupted = True
    with pytest.raises(KeyboardInterrupt):
        group.steps.dispatch(planned(0))
    assert actors.messages == [(0, [0])]
    assert (group.steps.failed, actors.aborted) == (True, [0])  # replica 0 would wait for replica 1 otherwise
    actors.interrupted = False
    group.rebuild()
    assert values(group.steps.dispatch(planned(1))) == [1, 1]


def test_a_rebuild_tells_of_a_failure_before_it_forgets_it(group: ReplicaGroup, actors: Actors) -> None:
    learn(group.steps)
    actors.ready = False
    actors.failing = (5, 0)
    outcomes = [group.steps.dispatch(planned(step)) for step in range(1, 12)]
    values(outcomes[3])
    with pytest.raises(ValueError, match="step 5"):
        group.rebuild()
    group.rebuild()
    assert not group.steps.failed


def test_an_abort_names_the_generation_that_it_is_meant_for(group: ReplicaGroup, actors: Actors) -> None:
    actors.failing = (0, 0)
    with pytest.raises(ValueError, match="step 0"):
        values(group.steps.dispatch(planned(0)))
    assert actors.aborted == [0]
    group.rebuild()
    actors.failing = (1, 1)
    with pytest.raises(ValueError, match="step 1"):
        values(group.steps.dispatch(planned(1)))
    assert actors.aborted == [0, 1]


def learn(steps: DispatchedSteps) -> None:
    """Let it know that steps are short."""
    values(steps.dispatch(planned(0)))
