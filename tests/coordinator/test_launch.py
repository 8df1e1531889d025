from __future__ import annotations

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


@pytest.mark.parametrize(
    ("cluster", "request_", "workers", "servers"),
    [
        (ONE, PsRequest(), 3, 1),
        (TWO, PsRequest(), 2, 1),
        (GPUS, PsRequest(), 2, 1),
        (ONE, PsRequest(num_workers=9), 9, 2),
        (ONE, PsRequest(num_workers=1, num_ps=3), 1, 3),
    ],
)
def test_how_many_where_that_is_left_open(cluster: Any, request_: Any, workers: int, servers: int) -> None:
    plan = plan_ps("name", request_, cluster, rd.Timeouts())
    assert (len(plan.setups), plan.num_ps, len(plan.bundles)) == (workers, servers, workers + servers)
    assert [(setup.rank, setup.world_size, len(setup.worker_devices)) for setup in plan.setups] == [
        (number, 1, 1) for number in range(workers)
    ]
    assert plan.setups[0].device == ("cuda:0" if cluster is GPUS else "cpu")


@pytest.mark.parametrize("num_cores", [2, 3, 5, 9, 64])
def test_workers_and_servers_that_nobody_asked_for_fit_one_node(num_cores: int) -> None:
    plan = plan_ps("name", PsRequest(), Cluster(False, (Node("a", "b", {"CPU": num_cores}),)), rd.Timeouts())
    assert sum(bundle["CPU"] for bundle in plan.bundles) in (num_cores, num_cores - 1)


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


@pytest.mark.parametrize(
    ("jobs", "task", "message"),
    [
        ({"worker": ["a:1"]}, (None, None), r'jobs "worker" and "ps"'),
        ({"worker": ["a:1"], "ps": ["b:1"], "cook": ["c:1"]}, (None, None), r"leave other jobs out"),
        ({"worker": ["a:1"], "ps": ["b:1"]}, ("ps", 0), r"this process is task ps 0.*no program"),
    ],
)
def test_what_a_resolver_must_not_say(jobs: Any, task: Any, message: str) -> None:
    with pytest.raises(rd.InvalidArgumentError, match=message):
        PsRequest().with_resolver(resolver(jobs, *task))


def test_numbers_and_resolver_must_agree() -> None:
    with pytest.raises(rd.InvalidArgumentError, match=r"num_ps is 2, but the cluster resolver names 1: b\. Leave"):
        PsRequest(num_ps=2).with_resolver(resolver({"worker": ["a:1"], "ps": ["b:1"]}))


@pytest.mark.parametrize("bad", [0, -1, 1.5, True])
def test_there_is_at_least_one_of_each(bad: Any) -> None:
    with pytest.raises(rd.InvalidArgumentError, match=r"num_workers must be >= 1.*at least one worker"):
        PsRequest(num_workers=bad)
    with pytest.raises(rd.InvalidArgumentError, match=r"num_ps must be >= 1.*at least one parameter server"):
        PsRequest(num_ps=bad)
