"""What one look at a step finds."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from raydist.mirroring.discovery import Discovery, is_candidate_class
from raydist.mirroring.handles import DriverTable
from raydist.mirroring.origin import Origin
from raydist.mirroring.scope import Scope
from raydist.values import PerReplica


def discovery(scope: Scope, table: DriverTable | None = None, **externals: Any) -> Discovery:
    known = table or DriverTable()
    origin = Origin("TestStrategy", scope, lambda: (), lambda obj: known.handle_of(obj) is not None, lambda: ())
    return Discovery(known, scope, origin, externals)


def test_finds_what_is_reached_and_what_that_leads_to() -> None:
    scope = Scope()
    with scope.enter():
        layer = nn.BatchNorm1d(1)
        optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
    found = discovery(scope)
    found.pickle(lambda: optimizer, "it")
    assert [obj for _, obj in found.new] == [optimizer]
    assert found.bundle()
    assert {id(obj) for _, obj in found.new} == {id(optimizer), *(id(parameter) for parameter in layer.parameters())}
    found.pickle(lambda: layer, "it")
    found.bundle()
    assert {id(obj) for _, obj in found.new} >= {id(layer), *(id(buffer) for buffer in layer.buffers())}


def test_known_objects_are_not_new() -> None:
    scope, table = Scope(), DriverTable()
    with scope.enter():
        layer = nn.Linear(1, 1)
    table.add(layer, table.reserve())
    found = discovery(scope, table)
    found.pickle([layer, layer], "it")
    assert found.new == []
    assert found.bundle() == b""


def test_placeholders_in_order_of_appearance() -> None:
    one, other = PerReplica([1]), PerReplica([2])
    found = discovery(Scope())
    found.pickle((other, one, other), "it")
    assert found.per_replica == [other, one]


def test_externals_are_named() -> None:
    strategy = object()
    assert b"the_strategy" in discovery(Scope(), the_strategy=strategy).pickle([strategy], "it")


def test_ordinary_values_are_passed_over() -> None:
    assert [is_candidate_class(cls) for cls in (int, dict, object, torch.dtype)] == [False] * 4
    assert [is_candidate_class(cls) for cls in (nn.Linear, nn.Parameter, PerReplica, torch.optim.Adam)] == [True] * 4
