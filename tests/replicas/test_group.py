"""A group of replicas and its steps, against actors that answer in this process; `tests/strategies` has real ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from raydist.actors.class_tracking import cloudpickle
from raydist.actors.portable_errors import PortableError
from raydist.actors.supervision import root_cause
from raydist.actors.version_check import Software, installed_software
from raydist.collectives.base import Communicator, Membership
from raydist.collectives.rendezvous import RendezvousStore
from raydist.core.errors import CancelledError, FailedPreconditionError
from raydist.mirroring.messages import StepPayload
from raydist.options import Timeouts
from raydist.replicas.group import ReplicaGroup
from raydist.replicas.results import StepOutcome, pack_result
from raydist.replicas.rules import StrategyHooks
from raydist.replicas.runner import ReplicaRunner
from raydist.replicas.step import ReplicaSetup, StepHeader
from raydist.replicas.step_message import GroupResult, PlannedStep, SentObjects, StepMessage, address_steps
from tests.collectives.local_group import LocalGroup, LocalHub


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


# --- the runner of a replica ------------------------------------------------------------------------------------------

SETUP = ReplicaSetup("alone", 0, 1, "cpu", ("cpu",), torch.get_num_threads(), 10.0, 1 << 20, host="node here")


class Alone:
    """Joins groups of one rank, and keeps them."""

    def __init__(self) -> None:
        self.hub = LocalHub()
        self.joined: list[LocalGroup] = []

    def __call__(self, membership: Membership, **terms: Any) -> Communicator:
        self.joined.append(LocalGroup(self.hub, membership, 10.0).start())
        return self.joined[-1]

    def works(self) -> bool:
        """Return True if every group of the latest generation can still be used."""
        try:
            for group in self.joined:
                if group.membership.generation == self.joined[-1].membership.generation:
                    group.barrier()
        except Exception:  # what an aborted group raises
            return False
        return True


def generation(number: int) -> Membership:
    return Membership("alone", number, 0, 1)


def steps(*numbers: int, of: int) -> Any:
    return address_steps([PlannedStep(StepHeader(number, of, StepPayload())) for number in numbers], [SentObjects()])[
        0
    ][0]


def test_an_abort_that_comes_late_leaves_the_next_generation_alone() -> None:
    groups = Alone()
    runner = ReplicaRunner(SETUP, groups)
    runner.join(generation(0))
    runner.join(generation(1))
    runner.abort(0)
    assert groups.works()
    runner.abort(1)
    assert not groups.works()


def test_a_gpu_that_torch_does_not_see_is_an_error_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(FailedPreconditionError, match=r"Replica 0 was given a GPU.*sees none"):
        ReplicaRunner(replace(SETUP, device="cuda:0"))


def test_steps_behind_one_that_fails_are_refused_and_those_before_it_told() -> None:
    runner = ReplicaRunner(SETUP, Alone())
    runner.join(generation(0))
    result = runner.steps(steps(3, 4, of=0), [])  # there is no function in the payload
    assert result.results == ()
    assert result.error is not None
    assert "In step 3 on replica 0 (cpu) of node here." in result.error.__notes__


def looks(number: int, of: int) -> Any:
    payload = StepPayload(function=cloudpickle.dumps(len), arguments=cloudpickle.dumps((("text",), {})))
    step = PlannedStep(StepHeader(number, of, payload, looks_only=True))
    return address_steps([step], [SentObjects()])[0][0]


def told(runner: ReplicaRunner, step: int) -> str:
    found = runner.shard_of(step, "token")
    assert isinstance(found, PortableError)
    return repr(found.restore())


def test_a_save_behind_a_failed_step_has_its_error_also_in_the_next_generation() -> None:
    runner = ReplicaRunner(SETUP, Alone())
    runner.join(generation(0))
    failed = runner.steps(steps(3, of=0), []).error
    refused = runner.steps(looks(4, of=0), []).error
    assert str(refused) == "Step 4 was given up on replica 0, because step 3 failed."
    assert told(runner, 4) == repr(failed)
    assert (runner.shard_of(3, "token"), runner.shard_of(5, "token")) == (None, None)
    runner.join(generation(1))
    assert told(runner, 4) == repr(failed)
    assert runner.steps(looks(5, of=1), []).results[0].leaves == (4,)
    runner.steps(looks(6, of=0), [])
    assert "Step 6 was given up: another replica failed." in told(runner, 6)


class CountsBatches(StrategyHooks):
    """Notes what it is told."""

    exchanges_gradients = False

    def __init__(self) -> None:
        self.told: list[str] = []

    def restart(self) -> None:
        self.told.append("restart")

    def close(self) -> None:
        self.told.append("close")


def test_rules_are_told_of_each_generation_and_of_the_end() -> None:
    rules, groups = CountsBatches(), Alone()
    runner = ReplicaRunner(replace(SETUP, rules=rules), groups)
    runner.join(generation(0))
    runner.join(generation(1))
    runner.close()
    assert rules.told == ["restart", "restart", "close"]
    assert [group.membership.group for group in groups.joined] == ["alone-values"] * 2, (
        "gradients that stay here need no group"
    )
