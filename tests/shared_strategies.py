"""Strategies that many tests share: replica processes cost seconds to start, a new scope on them costs nothing."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any, TypeVar

import pytest

import raydist as rd
from raydist.strategies.synchronous import SynchronousStrategy
from tests.conftest import live_actors
from tests.several_nodes import Nodes, several_nodes
from tests.tpu_nodes import tpu_slice
from tests.xla_world import IS_REAL, TPU_LIMIT_S

S = TypeVar("S", bound=rd.Strategy)

# Of a replica or server that several tests share: on the node that stays, and little of it.
_SHARE = {"CPU": 0.01, "session": 0.01}
_FEW: Any = {
    "resources_per_replica": _SHARE,
    "timeouts": rd.Timeouts(start_s=60, collective_s=20, step_s=40, input_s=30),
}
# Replicas and workers that are kept, because each that starts anew takes seconds: of half a GB each, once tests have
# had them load what some of them use.
_MOST_KEPT = 10


class KeptStrategies:
    """Strategies by their class and size: made when they are asked for, kept while few others are."""

    def __init__(self, stack: ExitStack, actors: set[str], threads: set[threading.Thread]) -> None:
        self._stack = stack
        self._actors, self._threads = actors, threads
        self._made: dict[tuple[type[rd.Strategy], int], rd.Strategy] = {}

    def get(self, cls: type[S], start: Callable[[int], S], size: int) -> S:
        """The strategy of this class and size."""
        made = self._made.pop((cls, size), None)
        while made is None and self._made and sum(number for _, number in self._made) + size > _MOST_KEPT:
            self._made.pop(next(iter(self._made))).close()
        strategy = keep(start(size), self._actors, self._threads, self._stack) if made is None else made
        self._made[cls, size] = strategy
        assert isinstance(strategy, cls)
        return strategy


def keep(strategy: S, actors: set[str], threads: set[threading.Thread], stack: ExitStack) -> S:
    """Have everything started that a strategy needs, as what several tests share; closed by `stack`."""
    stack.callback(strategy.close)
    before = live_actors()
    use_once(strategy)
    actors.update(live_actors() - before)
    kept = coordinating_thread if isinstance(strategy, rd.ParameterServerStrategy) else dispatching_thread
    threads.add(kept(strategy))
    return strategy


@pytest.fixture(scope="session")
def kept(ray_cluster: None, shared_actors: set[str], shared_threads: set[threading.Thread]) -> Iterator[KeptStrategies]:
    """Those of all classes."""
    with ExitStack() as stack:
        yield KeptStrategies(stack, shared_actors, shared_threads)


@pytest.fixture(scope="session")
def mirrored(kept: KeptStrategies) -> Callable[[int], rd.MirroredStrategy]:
    """`mirrored(n)`: a MirroredStrategy of n CPU replicas, kept for the next tests."""
    return partial(kept.get, rd.MirroredStrategy, partial(rd.MirroredStrategy, **_FEW))


@pytest.fixture(scope="session")
def central(kept: KeptStrategies) -> Callable[[int], rd.CentralStorageStrategy]:
    """`central(n)`: a CentralStorageStrategy of n CPU replicas, kept for the next tests."""
    return partial(kept.get, rd.CentralStorageStrategy, partial(rd.CentralStorageStrategy, **_FEW))


@pytest.fixture(scope="session")
def workers(kept: KeptStrategies) -> Callable[[int], rd.MultiWorkerMirroredStrategy]:
    """`workers(n)`: n workers of one CPU replica, which share the only node; tests/several_nodes.py has more."""
    start = partial(rd.MultiWorkerMirroredStrategy, devices_per_worker=1, **_FEW)
    return partial(kept.get, rd.MultiWorkerMirroredStrategy, start)


@pytest.fixture(scope="session")
def served(kept: KeptStrategies) -> Callable[[int], rd.ParameterServerStrategy]:
    """`served(n)`: a ParameterServerStrategy of n workers and a server, kept for the next tests."""
    return partial(kept.get, rd.ParameterServerStrategy, few_workers)


def few_workers(num_workers: int, num_ps: int = 1) -> rd.ParameterServerStrategy:
    """A strategy that leaves room for others on the session's cluster; nothing is started."""
    return rd.ParameterServerStrategy(
        num_workers,
        num_ps,
        resources_per_server=_SHARE,
        resources_per_replica=_SHARE,
        timeouts=rd.Timeouts(start_s=60, collective_s=20, step_s=40, input_s=30, close_s=5),
    )


def coordinating_thread(strategy: rd.Strategy) -> threading.Thread:
    """The thread that gives closures to workers."""
    assert isinstance(strategy, rd.ParameterServerStrategy)
    assert strategy._cluster.launched is not None
    thread = strategy._cluster.launched.coordinator._thread
    assert thread is not None
    return thread


@pytest.fixture(scope="module")
def tpu_slices(ray_cluster: None) -> Iterator[None]:
    """Two slices without TPUs: a v4 one for `tpu`, and a v5litepod one of one chip that is free."""
    with tpu_slice("slice-a", "v4", "2x2x1", chips=4 if IS_REAL else 2), tpu_slice("slice-b", "v5litepod", "1x1"):
        yield


@pytest.fixture(scope="module")
def tpu(tpu_slices: None, shared_actors: set[str], shared_threads: set[threading.Thread]) -> Iterator[rd.TPUStrategy]:
    """A strategy on the four chips of the v4 slice."""
    limits = rd.Timeouts(start_s=TPU_LIMIT_S / 2, collective_s=TPU_LIMIT_S / 9, step_s=TPU_LIMIT_S / 4, input_s=30)
    strategy = rd.TPUStrategy(accelerator_version="v4", timeouts=limits)
    with ExitStack() as stack:
        yield keep(strategy, shared_actors, shared_threads, stack)


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    """A cluster of two nodes of 4 CPUs beside a head without any, and the process that drives strategies on them."""
    with several_nodes((4, 4)) as started:
        yield started


def use_once(strategy: rd.Strategy) -> None:
    """Have everything started that a strategy needs."""
    for batch in strategy.distribute_dataset(rd.Dataset.range(1).batch(1)):
        strategy.run(len, args=(batch,))
    for batch in strategy.distribute_datasets_from_function(lambda _: rd.Dataset.range(1).batch(1)):  # in every worker
        strategy.run(len, args=(batch,))


def dispatching_thread(strategy: rd.Strategy) -> threading.Thread:
    """The thread that sends steps while the program does something else; started here, and kept for all tests."""
    assert isinstance(strategy, SynchronousStrategy)
    group = strategy._launched
    assert group is not None
    steps = group.steps
    with steps._changed:
        steps._wake_thread()
    assert steps._thread is not None
    return steps._thread


@pytest.fixture
def two(mirrored: Callable[[int], rd.MirroredStrategy]) -> rd.MirroredStrategy:
    return mirrored(2)
