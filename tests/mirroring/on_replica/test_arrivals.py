"""What a replica takes in of a shipment; what the driver puts into one is in `tests/mirroring`."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from raydist.mirroring.shipment import Shipment
from tests.mirroring.in_process import Mirror


def test_optimizers_whose_state_was_replaced_are_told_once() -> None:
    mirror = Mirror(1)
    with mirror.scope():
        model = nn.Linear(1, 1)
        optimizer = torch.optim.Adam(model.parameters())

    def step() -> None:
        model(torch.ones(1, 1)).sum().backward()
        optimizer.step()

    mirror.run(step)
    saved = copy.deepcopy(optimizer.state_dict())
    mirror.run(step)
    replica: Any = mirror.replicas[0]
    assert replica.take_loaded_states() == frozenset()
    optimizer.load_state_dict(saved)
    mirror.run(step)
    (handle,) = replica.take_loaded_states()
    assert isinstance(replica.object_of(handle), torch.optim.Adam)
    assert replica.take_loaded_states() == frozenset()


def test_what_was_released_and_what_was_written_without_a_step() -> None:
    mirror = Mirror(1)
    with mirror.scope():
        model, dropped = nn.Linear(1, 1, bias=False), nn.Linear(2, 1, bias=False)
    mirror.run(lambda: (model.training, dropped.training))
    replica: Any = mirror.replicas[0]
    handles = [handle for handle, obj in replica.items() if isinstance(obj, nn.Parameter)]
    assert len(handles) == 2
    kept = replica.object_of(handles[0])
    replica.take(Shipment(released=(handles[1],)))
    assert replica.parameters() == (kept,)
