from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from raydist.core.errors import FailedPreconditionError
from raydist.core.values import PerReplica
from raydist.replicas.replica_view import ReplicaView


def enter_scope(view: ReplicaView) -> None:
    with view.scope():
        pass


def test_numbers_and_arithmetic_are_those_of_the_strategy() -> None:
    view = ReplicaView(("CPU:0", "CPU:1", "CPU:2"))
    assert view.num_replicas_in_sync == 3
    assert view.worker_devices == ("CPU:0", "CPU:1", "CPU:2")
    assert view.reduce("SUM", PerReplica([torch.tensor(1), torch.tensor(2), torch.tensor(3)])) == 6


@pytest.mark.parametrize(
    "call",
    [
        enter_scope,
        lambda view: view.run(len),
        lambda view: view.distribute_dataset(None),
        lambda view: view.distribute_datasets_from_function(len),
        lambda view: view.distribute_values_from_function(len),
        lambda view: view.close(),
    ],
    ids=["scope", "run", "dataset", "datasets from function", "values from function", "close"],
)
def test_what_is_the_drivers_is_refused(call: Callable[[ReplicaView], None]) -> None:
    with pytest.raises(FailedPreconditionError, match="is for the driver"):
        call(ReplicaView(("CPU:0",)))
