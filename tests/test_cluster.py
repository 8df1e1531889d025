from __future__ import annotations

import re
import subprocess
import sys

import pytest

from raydist.cluster import Cluster, Node, connect, place, release
from raydist.errors import DeadlineExceededError
from tests.ray_head import free_ports, ray_home


def node(name: str, **resources: float) -> Node:
    return Node(name, f"10.0.0.{len(name)}", resources)


def cluster(*nodes: Node) -> Cluster:
    return Cluster(started_here=False, nodes=nodes)


def test_a_gpu_node_is_best() -> None:
    found = cluster(node("own", CPU=64), node("one", CPU=8, GPU=1), node("four", CPU=8, GPU=4)).best_node()
    assert (found.node_id, found.num_gpus, found.num_cpus) == ("four", 4, 8)


def test_without_gpus_ones_own_node_is_best() -> None:
    assert cluster(node("own", CPU=2), node("big", CPU=64)).best_node().node_id == "own"


def test_a_driver_on_a_head_without_cpus_uses_the_largest_node() -> None:
    assert cluster(node("own"), node("small", CPU=2), node("big", CPU=64)).best_node().node_id == "big"


def test_cpu_replicas_share_the_cores_of_a_ray_that_was_started_for_them() -> None:
    assert cluster(node("own", CPU=2)).cpu_replica_resources() == {"CPU": 1.0}
    assert Cluster(started_here=True, nodes=()).cpu_replica_resources()["CPU"] * 1000 <= 1.0


@pytest.mark.ray
def test_joins_the_running_ray(ray_cluster: None) -> None:
    joined = connect()
    assert not joined.started_here
    assert [living.num_cpus for living in joined.nodes] == [4]


@pytest.mark.ray
def test_a_reservation_is_given_back(ray_cluster: None) -> None:
    for _ in range(2):  # the second one fits only if the first is gone
        release(place([{"CPU": 3.0}], strategy="STRICT_PACK", timeout_s=20))
    with pytest.raises(DeadlineExceededError, match=r"could not place 2 replicas within 0\.2 s.*2 x .*4 CPU"):
        place([{"CPU": 3.0}] * 2, strategy="STRICT_PACK", timeout_s=0.2)


@pytest.mark.ray
@pytest.mark.timeout(120)
def test_an_address_without_a_ray_is_an_error_that_says_what_to_do() -> None:
    (port,) = free_ports(1)
    with ray_home() as home:
        done = subprocess.run(
            [sys.executable, "-c", "from raydist.cluster import connect; connect()"],
            env={**home.environment, "RAY_ADDRESS": f"127.0.0.1:{port}"},
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
    assert done.returncode != 0
    assert re.search(rf"UnavailableError: RAY_ADDRESS='127.0.0.1:{port}' .*unset RAY_ADDRESS", done.stderr), done.stderr
