from __future__ import annotations

from raydist.pipelines.metering.reading import Reading


def test_workers_are_those_of_now_where_they_never_changed() -> None:
    assert Reading("map-1", "map", parallelism=3).workers == 3.0
    assert Reading("map-1", "map", parallelism=3, mean_parallelism=1.5).workers == 1.5
    assert Reading("map-1", "map", parallelism=0).workers == 1.0
