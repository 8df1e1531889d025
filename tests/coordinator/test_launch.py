from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

import raydist as rd
from raydist.cluster.nodes import Cluster, Node
from raydist.coordinator.launch import PsRequest, plan_ps

ONE = Cluster(started_here=False, nodes=(Node("a", "10.0.0.1", {"CPU": 4}),))
TWO = Cluster(started_here=False, nodes=(Node("a", "10.0.0.1", {"CPU": 4}), Node("b", "10.0.0.2", {"CPU": 4})))
GPUS = Cluster(started_here=False, nodes=(Node("a", "10.0.0.1", {"CPU": 4, "GPU": 2}),))


def resolver(jobs: dict[str, list[str]], kind: str | None = None, index: int | None = None) -> Any:
    return rd.SimpleClusterResolver(rd.ClusterSpec(jobs), kind, index)


def test_how_many_where_that_is_left_open() -> None:
    cases: list[tuple[Cluster, PsRequest, int, int]] = [
        (ONE, PsRequest(), 3, 1),
        (TWO, PsRequest(), 2, 1),
        (GPUS, PsRequest(), 2, 1),
        (ONE, PsRequest(num_workers=9), 9, 2),
        (ONE, PsRequest(num_workers=1, num_ps=3), 1, 3),
    ]
    for cluster, request, workers, servers in cases:
        plan = plan_ps("name", request, cluster, rd.Timeouts())
        assert (len(plan.setups), plan.num_ps, len(plan.bundles)) == (workers, servers, workers + servers)
        found = [(setup.rank, setup.world_size, len(setup.worker_devices)) for setup in plan.setups]
        assert found == [(number, 1, 1) for number in range(workers)]
        assert plan.setups[0].device == ("cuda:0" if cluster is GPUS else "cpu")
    for num_cores in (2, 3, 5, 9, 64):
        plan = plan_ps("name", PsRequest(), Cluster(False, (Node("a", "b", {"CPU": num_cores}),)), rd.Timeouts())
        assert sum(bundle["CPU"] for bundle in plan.bundles) in (num_cores, num_cores - 1), "they fit one node"


def test_servers_have_bundles_of_their_own_with_what_was_asked_for() -> None:
    request = PsRequest(1, 2, {"CPU": 2}, {"CPU": 1, "memory": 1e9})
    plan = plan_ps("name", request, TWO, rd.Timeouts(), worker_addresses=("10.0.0.2",))
    assert plan.bundles[:2] == ({"CPU": 1, "memory": 1e9},) * 2
    assert plan.bundles[2]["CPU"] == 2
    assert plan.bundles[2]["node:10.0.0.2"] > 0


def test_a_resolver_names_workers_and_servers() -> None:
    found = PsRequest().with_resolver(resolver({"chief": ["c:1"], "worker": ["a:1", "b:1"], "ps": ["d:2"]}))
    assert (found.num_workers, found.num_ps) == (2, 1)
    assert (found.worker_hosts, found.server_hosts) == (("a", "b"), ("d",))


def test_what_cannot_be_asked_for() -> None:
    both = {"worker": ["a:1"], "ps": ["b:1"]}
    bad: list[Any] = [0, -1, 1.5, True]
    cases: list[tuple[Callable[[], Any], str]] = [
        (lambda: PsRequest().with_resolver(resolver({"worker": ["a:1"]})), r'jobs "worker" and "ps"'),
        (lambda: PsRequest().with_resolver(resolver({**both, "cook": ["c:1"]})), r"leave other jobs out"),
        (lambda: PsRequest().with_resolver(resolver(both, "ps", 0)), r"this process is task ps 0.*no program"),
        (
            lambda: PsRequest(num_ps=2).with_resolver(resolver(both)),
            r"num_ps is 2, but the cluster resolver names 1: b\. Leave",
        ),
        *((partial(PsRequest, num_workers=each), r"num_workers must be >= 1.*at least one worker") for each in bad),
        *((partial(PsRequest, num_ps=each), r"num_ps must be >= 1.*at least one parameter server") for each in bad),
    ]
    for make, message in cases:
        with pytest.raises(rd.InvalidArgumentError, match=message):
            make()
