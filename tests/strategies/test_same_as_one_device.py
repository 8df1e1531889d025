"""N replicas are one device: whatever a program does with its gradients, under every strategy and on every backend.

A new strategy is one line in `MAKERS`, a new backend one in `BACKENDS`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import raydist as rd
from raydist.collectives.base import Communicator
from raydist.collectives.opening import open_communicator
from raydist.collectives.rendezvous import RendezvousStore
from tests.collectives.threads import T, begin_threads, run_ranks
from tests.contracts.exchange_program import (
    ALL_AT_ONCE,
    ExchangeProgram,
    OnRanks,
    assert_same,
    check_exchanges,
    exchange_programs,
    train_bare,
    train_on_ranks,
)

ON_RAY = (pytest.mark.ray, pytest.mark.timeout(240))


def replicas(count: int, fixture: str = "mirrored") -> Callable[[pytest.FixtureRequest], rd.Strategy]:
    def make(request: pytest.FixtureRequest) -> rd.Strategy:
        on_replicas: Callable[[int], rd.Strategy] = request.getfixturevalue(fixture)
        return on_replicas(count)

    return make


MAKERS = {
    "OneDevice": pytest.param(lambda request: rd.OneDeviceStrategy("cpu")),
    "Mirrored-2": pytest.param(replicas(2), marks=ON_RAY),
    "CentralStorage-2": pytest.param(replicas(2, "central"), marks=ON_RAY),
    "MultiWorker-2": pytest.param(replicas(2, "workers"), marks=(*ON_RAY, pytest.mark.long)),
}

FEW_MAKERS = ("OneDevice", "Mirrored-2", "CentralStorage-2")
"""For tests to which several workers add nothing; test_multi_worker.py checks their gradients on two nodes."""


def on_backend(name: str, hosts: str = "") -> OnRanks:
    """Ranks that are threads, with the communicators that replicas have; `hosts` says by rank where they are."""

    def run(world_size: int, body: Callable[[Communicator], T]) -> list[T]:
        with RendezvousStore() as store:

            def main(rank: int) -> T:
                here = tuple(hosts[:world_size])
                place = store.membership("same", generation=0, rank=rank, world_size=world_size, hosts=here)
                group = open_communicator(place, device=torch.device("cpu"), timeout_s=30.0, backend=name)
                try:
                    return body(group)
                except BaseException:
                    group.abort()
                    raise
                finally:
                    group.close()

            found = begin_threads({rank: functools.partial(main, rank) for rank in range(world_size)})()
        for rank in range(world_size):
            if isinstance(found[rank], BaseException):
                raise found[rank]
        return [found[rank] for rank in range(world_size)]

    return run


BACKENDS: dict[str, OnRanks] = {
    "threads": run_ranks,
    "shm": on_backend("shm"),
    "gloo": on_backend("gloo"),
    "hierarchical": on_backend("hierarchical", "aba"),
}


@pytest.fixture(scope="module", params=list(MAKERS.values()), ids=list(MAKERS))
def strategy(request: pytest.FixtureRequest) -> rd.Strategy:
    """A fixture of the module, so that Ray is up before a test begins."""
    made: rd.Strategy = request.param(request)
    return made


def test_under_a_strategy(strategy: rd.Strategy) -> None:
    check_exchanges(strategy)


@pytest.mark.parametrize(
    ("backend", "world_size"),
    [("threads", 2), ("shm", 3), ("gloo", 2), pytest.param("hierarchical", 3, marks=pytest.mark.long)],
)
def test_on_a_backend(backend: str, world_size: int) -> None:
    @settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
    @given(exchange_programs(), st.sampled_from([1, 100, 300, 1 << 20]))
    @example(ALL_AT_ONCE, 100)
    def each(program: ExchangeProgram, bucket_bytes: int) -> None:
        expected = train_bare(program)
        first, *others = train_on_ranks(program, world_size, BACKENDS[backend], bucket_bytes=bucket_bytes)
        assert_same(first, expected)
        for other in others:
            torch.testing.assert_close(other, first, rtol=0, atol=0)

    each()
