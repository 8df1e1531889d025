"""A replica's runner by itself; with its peers it is run by `tests/strategies`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import raydist as rd
from raydist.actors.class_tracking import cloudpickle
from raydist.actors.portable_errors import PortableError
from raydist.collectives.base import Communicator, Membership
from raydist.mirroring.messages import StepPayload
from raydist.replicas.rules import StrategyHooks
from raydist.replicas.runner import ReplicaRunner
from raydist.replicas.step import ReplicaSetup, StepHeader
from raydist.replicas.step_message import PlannedStep, SentObjects, address_steps
from tests.collectives.local_group import LocalGroup, LocalHub

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


def test_a_gpu_that_torch_does_not_see_is_an_error_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(rd.FailedPreconditionError, match=r"Replica 0 was given a GPU.*sees none"):
        ReplicaRunner(replace(SETUP, device="cuda:0"))


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
