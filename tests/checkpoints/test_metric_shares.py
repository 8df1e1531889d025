from __future__ import annotations

import raydist as rd
from raydist.checkpoints.metric_shares import metric_shares


class Owner:
    """Mirrors a metric over some replicas."""

    def __init__(self, num_replicas: int) -> None:
        self._num_replicas = num_replicas

    def metric_shares(self, metric: rd.Mean) -> list[dict[str, object]]:
        return [{"total": rank} for rank in range(self._num_replicas)]


def test_shares_are_those_of_several_replicas() -> None:
    for num_replicas, expected in [(1, 0), (2, 2)]:
        metric = rd.Mean()
        kind = type("Mirrored", (rd.Mean,), {"_raydist_owner": Owner(num_replicas)})
        metric.__class__ = kind
        assert len(metric_shares(metric)) == expected
    assert metric_shares(rd.Mean()) == []
