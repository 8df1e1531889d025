"""Strategies that many tests share: replica processes cost seconds to start, a new scope on them costs nothing."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

import raydist as rd
from tests.conftest import live_actors


@pytest.fixture(scope="session")
def mirrored(
    ray_cluster: None, shared_actors: set[str], shared_threads: set[threading.Thread]
) -> Iterator[Callable[[int], rd.MirroredStrategy]]:
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
                before = live_actors()
                for batch in made[num_replicas].distribute_dataset(rd.Dataset.range(1).batch(1)):
                    made[num_replicas].run(len, args=(batch,))
                shared_actors.update(live_actors() - before)
                shared_threads.add(dispatching_thread(made[num_replicas]))
            return made[num_replicas]

        yield strategy


def dispatching_thread(strategy: rd.MirroredStrategy) -> threading.Thread:
    """The thread that sends steps while the program does something else; started here, and kept for all tests."""
    group = strategy._launched
    assert group is not None
    dispatcher = group._dispatcher
    with dispatcher._changed:
        dispatcher._wake_thread()
    assert dispatcher._thread is not None
    return dispatcher._thread


@pytest.fixture
def two(mirrored: Callable[[int], rd.MirroredStrategy]) -> rd.MirroredStrategy:
    return mirrored(2)
