"""Strategies that many tests share: replica processes cost seconds to start, a new scope on them costs nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

import raydist as rd


@pytest.fixture(scope="session")
def mirrored(ray_cluster: None) -> Iterator[Callable[[int], rd.MirroredStrategy]]:
    """`mirrored(n)`: a MirroredStrategy of n CPU replicas, started once a session."""
    made: dict[int, rd.MirroredStrategy] = {}
    with ExitStack() as stack:

        def strategy(num_replicas: int) -> rd.MirroredStrategy:
            if num_replicas not in made:
                made[num_replicas] = rd.MirroredStrategy(
                    num_replicas,
                    resources_per_replica={"CPU": 0.01},
                    timeouts=rd.Timeouts(start_s=60, collective_s=20, step_s=40, input_s=30),
                )
                stack.callback(made[num_replicas].close)
            return made[num_replicas]

        yield strategy


@pytest.fixture
def two(mirrored: Callable[[int], rd.MirroredStrategy]) -> rd.MirroredStrategy:
    return mirrored(2)
