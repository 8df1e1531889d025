"""StepPayloads that a replica applies, and changes of attributes that it reports."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from raydist.mirroring.apply_update import ControlCollector
from raydist.mirroring.handles import ReplicaTable
from raydist.mirroring.messages import StepPayload
from raydist.pickling.pickler import loads
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
    replica.take(StepPayload(released=(handles[1],)))
    assert replica.parameters() == (kept,)


def table_of(*objects: Any) -> ReplicaTable:
    table = ReplicaTable()
    for handle, obj in enumerate(objects):
        table.add(handle, obj)
    return table


def collected(collector: ControlCollector, *, modules: bool = True) -> tuple[dict[int, Any], dict[int, bool]]:
    found: tuple[dict[int, Any], dict[int, bool]] = loads(collector.collect(modules=modules), lambda pid: pid)
    return found


def test_control_changes_are_reported_once() -> None:
    layer: Any = nn.Linear(1, 1)
    layer.first = layer.second = layer.third = 0
    collector = ControlCollector(table_of(layer), lambda obj: None)
    collector.mark_known(0)
    layer.first = layer.second = 1
    changes, _ = collected(collector)
    assert changes == {0: {("first",): 1, ("second",): 1}}
    layer.second = 2
    layer.third = 3
    layer.third = 0
    assert collected(collector) == ({0: {("second",): 2}}, {})
    assert collected(collector) == ({}, {})


def test_flags_and_families() -> None:
    parameter = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    table = table_of(parameter, optimizer)
    collector = ControlCollector(
        table, lambda obj: None if table.handle_of(obj) is None else ("object", table.handle_of(obj))
    )
    collector.mark_known(1)
    collector.mark_known(0)
    parameter.requires_grad_(False)
    optimizer.param_groups[0]["lr"] = 2.0
    assert collected(collector) == ({}, {0: False})
    changes, flags = collected(collector, modules=False)
    assert (changes[1], flags) == ({("param_groups", 0, "lr"): 2.0}, {})
