from __future__ import annotations

import logging

import pytest

from raydist.cluster import Cluster, Node
from raydist.context.devices import parse_devices
from raydist.options import Timeouts
from raydist.replicas.launch import LaunchPlan, plan_one_node, warn_if_crowded

NODE = Node("a", "10.0.0.1", {"CPU": 8.0, "GPU": 2.0})
OTHER = Node("b", "10.0.0.2", {"CPU": 4.0})


def plan(
    devices: object, *, started_here: bool = False, nodes: tuple[Node, ...] = (NODE,), **extra: float
) -> LaunchPlan:
    cluster = Cluster(started_here, nodes)
    return plan_one_node(
        "m", parse_devices(devices, gpus_on_node=0), cluster, NODE, resources=extra or None, timeouts=Timeouts()
    )


def test_cores_are_shared_between_the_replicas() -> None:
    made = plan(["cpu:0", "cpu:1", "cpu:2"])
    assert [setup.num_threads for setup in made.setups] == [2, 2, 2]
    assert [(setup.rank, setup.world_size) for setup in made.setups] == [(0, 3), (1, 3), (2, 3)]
    assert plan(20).setups[0].num_threads == 1


def test_what_a_replica_asks_for() -> None:
    assert plan(2).bundles == ({"CPU": 1.0},) * 2
    assert plan(["cuda:0", "cuda:1"]).bundles == ({"GPU": 1.0},) * 2
    assert plan(2, CPU=0.5, memory=10.0).bundles[0] == {"CPU": 0.5, "memory": 10.0}
    assert 100 * plan(100, started_here=True).bundles[0]["CPU"] < 1


def test_each_gpu_replica_sees_its_gpu_as_the_first() -> None:
    made = plan(["cuda:0", "cuda:1"])
    assert [setup.device for setup in made.setups] == ["cuda:0", "cuda:0"]
    assert made.setups[0].worker_devices == ("GPU:0", "GPU:1")


def test_every_replica_is_told_the_collective_backend() -> None:
    cluster, devices = Cluster(False, (NODE,)), parse_devices(2, gpus_on_node=0)
    made = plan_one_node("m", devices, cluster, NODE, resources=None, timeouts=Timeouts(), backend="gloo")
    assert [setup.backend for setup in made.setups] == ["gloo", "gloo"]
    assert plan(2).setups[0].backend == "auto"


def test_the_store_is_on_loopback_only_on_one_machine() -> None:
    assert plan(2).store_host == "127.0.0.1"
    assert plan(2, nodes=(OTHER, NODE)).store_host == "10.0.0.2"


def test_crowded_cores_are_told_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="raydist"):
        warn_if_crowded(8, NODE)
        assert not caplog.records
        warn_if_crowded(9, NODE)
    assert "9 CPU replicas share the 8 cores" in caplog.text


def test_the_best_node_has_gpus_or_is_this_one() -> None:
    assert Cluster(False, (OTHER, NODE)).best_node() is NODE
    small = Node("c", "10.0.0.3", {"CPU": 1.0})
    assert Cluster(False, (small, OTHER)).best_node() is small
    assert Cluster(False, (Node("d", "10.0.0.4", {}), OTHER)).best_node() is OTHER
