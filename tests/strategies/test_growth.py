"""When an elastic strategy asks for room, and how many replicas it may have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import pytest

import raydist as rd
from raydist.strategies.growth import Growth

BUNDLE = {"CPU": 1.0}


class Request:
    """A request that is placed when the test says so."""

    def __init__(self, bundle: Mapping[str, float]) -> None:
        assert bundle == BUNDLE
        self.is_placed = self.is_cancelled = False

    def take(self) -> Any:
        return self

    def cancel(self) -> None:
        self.is_cancelled = True


class Cluster:
    def __init__(self, elastic: rd.Elastic, num_replicas: int, unit: int = 1) -> None:
        self.now_s = 0.0
        self.requests: list[Request] = []
        self.growth = Growth(elastic, num_replicas, unit, request=self._request, clock=lambda: self.now_s)

    def _request(self, bundle: Mapping[str, float]) -> Any:
        self.requests.append(Request(bundle))
        return self.requests[-1]

    def look(self, num_replicas: int, ready: int = 0, idle: int = 0) -> int:
        return self.growth.look(num_replicas, ready, max(ready, idle), lambda: BUNDLE)


def test_room_is_asked_for_after_a_while_and_taken_once_it_is_there() -> None:
    cluster = Cluster(rd.Elastic(1, 4, grow_after_s=30), 4)
    assert not cluster.growth.is_due(2)
    cluster.now_s = 31
    assert cluster.growth.is_due(2)
    assert not cluster.growth.is_due(4)
    assert [cluster.look(2), cluster.look(2), len(cluster.requests)] == [2, 2, 2]
    cluster.requests[1].is_placed = True
    assert cluster.look(2) == 3
    assert cast("list[Any]", cluster.growth.take(1)) == [cluster.requests[1]]
    cluster.growth.note_change()
    assert [each.is_cancelled for each in cluster.requests] == [True, False]
    cluster.now_s = 60
    assert not cluster.growth.is_due(3)
    cluster.now_s = 62
    assert cluster.growth.is_due(3)


@pytest.mark.parametrize(("ready", "idle", "replicas", "requests"), [(0, 0, 2, 2), (2, 2, 4, 1), (0, 2, 2, 1)])
def test_reserved_places_are_used_first_and_nobody_asks_for_them_twice(
    ready: int, idle: int, replicas: int, requests: int
) -> None:
    cluster = Cluster(rd.Elastic(max_replicas=7), 2, unit=2)  # workers of two replicas: six at most
    assert cluster.look(2, ready, idle) == replicas
    assert len(cluster.requests) == requests


def test_invalid_limits_are_refused() -> None:
    for wrong in ({"min_replicas": 0}, {"min_replicas": 3, "max_replicas": 2}, {"grow_after_s": 0}):
        with pytest.raises(rd.InvalidArgumentError, match="must be"):
            rd.Elastic(**cast("dict[str, Any]", wrong))
