"""What a replica reports."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from raydist.mirroring.handles import ReplicaTable
from raydist.mirroring.on_replica.report import ControlCollector
from raydist.pickling.pickler import loads


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
    collector.mark_flag_known(0)
    parameter.requires_grad_(False)
    optimizer.param_groups[0]["lr"] = 2.0
    assert collected(collector) == ({}, {0: False})
    changes, flags = collected(collector, modules=False)
    assert (changes[1], flags) == ({("param_groups", 0, "lr"): 2.0}, {})
