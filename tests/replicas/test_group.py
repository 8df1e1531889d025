"""The driver's end against actors that answer in this process; on a cluster it is run by `tests/strategies`."""

from __future__ import annotations

from typing import Any

import pytest

from raydist.actors.version_check import Software
from raydist.collectives.rendezvous import RendezvousStore
from raydist.core.errors import FailedPreconditionError
from raydist.options import Timeouts
from raydist.replicas.group import ReplicaGroup
from raydist.replicas.step import ReplicaSetup
from tests.replicas.answering_actors import Actors, actors, planned, values

__all__ = ["actors"]


@pytest.fixture
def group(actors: Actors) -> Any:
    setups = [ReplicaSetup("test", rank, 2, "cpu", ("cpu", "cpu"), 1, 10.0, 1 << 20) for rank in range(2)]
    found: Any = actors  # takes the place of `ReplicaActors`
    group = ReplicaGroup(setups, found, RendezvousStore(), Timeouts())
    group.start()
    yield group
    group.close(gently=False)


def learn(group: ReplicaGroup) -> None:
    """Let the group know that steps are short."""
    values(group.steps.dispatch(planned(0)))


def test_another_version_is_said_before_anything_runs(actors: Actors) -> None:
    actors.software[1] = Software((("torch", "0.1"),))
    setups = [ReplicaSetup("test", rank, 2, "cpu", ("cpu", "cpu"), 1, 10.0, 1 << 20) for rank in range(2)]
    found: Any = actors
    group = ReplicaGroup(setups, found, RendezvousStore(), Timeouts())
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
    learn(group)
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
