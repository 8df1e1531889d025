"""What a manager is inside of a replica."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

import raydist as rd
from raydist.checkpoints.loops.manager_here import ManagerHere, lending_managers
from raydist.context.current import enter_replica
from raydist.context.replica_context import Alone, ReplicaContext
from raydist.strategies.one_device import OneDeviceStrategy


def test_a_manager_travels_only_to_who_draws_batches_itself(tmp_path: Path) -> None:
    manager = rd.CheckpointManager(rd.Checkpoint(state=rd.State()), tmp_path, 1)
    with lending_managers():
        assert isinstance(pickle.loads(pickle.dumps(manager)), ManagerHere)
    with pytest.raises(rd.FailedPreconditionError, match="must stay in the process"):
        pickle.dumps(manager)


def test_a_step_that_is_given_its_batch_cannot_save() -> None:
    with pytest.raises(rd.FailedPreconditionError, match="after a draw from a distributed iterator"):
        ManagerHere("key").save()


def test_it_saves_by_the_run_that_it_is_in() -> None:
    class Loop:
        """Notes what it is asked for."""

        def save(self, *asked: object) -> tuple[object, ...]:
            return asked

    strategy = OneDeviceStrategy("cpu")
    peers = Alone(strategy.run(rd.get_replica_context).device)
    peers.loop = Loop()
    with enter_replica(ReplicaContext(strategy, peers)):
        assert ManagerHere("key").save(3, False, {"loss": 1.0}) == ("key", 3, False, {"loss": 1.0})


def test_all_else_is_the_drivers() -> None:
    with pytest.raises(rd.FailedPreconditionError, match="'checkpoints' was asked for"):
        _ = ManagerHere("key").checkpoints
    assert not hasattr(ManagerHere("key"), "_missing")
