from __future__ import annotations

from typing import Any

import pytest

from raydist.cluster.nodes import Cluster, Node
from raydist.context.devices import parse_devices
from raydist.core.errors import InvalidArgumentError
from raydist.options import CommunicationOptions, Timeouts
from raydist.replicas.launch import LaunchPlan
from raydist.strategies.multi_worker import choose_placement, choose_workers, plan_workers


def node(name: str, **resources: float) -> Node:
    return Node(name, f"10.0.0.{ord(name) - 96}", resources)


HEAD = node("h")
SMALL = node("s", CPU=2)
BIG = node("b", CPU=8)
TWO_GPUS = node("t", CPU=8, GPU=2)
FOUR_GPUS = node("f", CPU=8, GPU=4)


def chosen(nodes: list[Node], num_workers: int | None = None, devices: Any = None) -> tuple[int, list[str]]:
    count, found = choose_workers(nodes, num_workers, devices)
    return count, [str(device) for device in found]


def test_a_worker_for_each_node_with_cpus() -> None:
    assert chosen([HEAD, SMALL, BIG]) == (2, ["CPU:0", "CPU:1"])
    assert chosen([HEAD, BIG]) == (1, [f"CPU:{index}" for index in range(8)])


def test_gpus_are_taken_before_cpus_and_all_of_a_node() -> None:
    assert chosen([HEAD, BIG, TWO_GPUS, FOUR_GPUS]) == (2, ["GPU:0", "GPU:1"])
    assert chosen([HEAD, BIG, TWO_GPUS, FOUR_GPUS], 1) == (1, [f"GPU:{index}" for index in range(4)])


def test_more_workers_than_nodes_share_their_devices() -> None:
    assert chosen([FOUR_GPUS], 2) == (2, ["GPU:0", "GPU:1"])
    assert chosen([SMALL], 5) == (5, ["CPU:0"])


def test_what_the_user_says_is_taken() -> None:
    assert chosen([HEAD, SMALL, BIG], 3, 4) == (3, [f"CPU:{index}" for index in range(4)])
    assert chosen([BIG, TWO_GPUS, FOUR_GPUS], None, 2) == (2, ["GPU:0", "GPU:1"])
    assert chosen([BIG, TWO_GPUS, FOUR_GPUS], None, ["cpu:0"]) == (3, ["CPU:0"])


def test_what_is_left_open_needs_a_node_with_devices() -> None:
    with pytest.raises(InvalidArgumentError, match="none of the 1 nodes has any now. Give num_workers"):
        choose_workers([HEAD], None, None)
    with pytest.raises(InvalidArgumentError, match=r"take the GPUs .* none of the 2 nodes"):
        choose_workers([HEAD, BIG], None, "GPU:0")
    assert choose_workers([HEAD], 2, "GPU:0")[0] == 2  # a cluster that grows brings them


def test_a_gpu_that_no_node_has_is_named() -> None:
    with pytest.raises(
        InvalidArgumentError, match=r"but GPU:7 was asked for.* more than 4 GPUs: GPU:0 to GPU:3\. Name"
    ):
        choose_workers([HEAD, TWO_GPUS, FOUR_GPUS], None, ["GPU:0", "GPU:7"])
    assert chosen([TWO_GPUS, FOUR_GPUS], 1, ["GPU:2", "GPU:3"]) == (1, ["GPU:2", "GPU:3"])
    assert chosen([TWO_GPUS], 1, 8) == (1, [f"GPU:{index}" for index in range(8)])  # a larger node may come


def test_workers_have_nodes_of_their_own_where_there_are_enough() -> None:
    assert choose_placement({"CPU": 2}, 2, [HEAD, SMALL, BIG]) == "STRICT_SPREAD"
    assert choose_placement({"CPU": 4}, 2, [HEAD, SMALL, BIG]) == "SPREAD"
    assert choose_placement({"CPU": 4}, 3, [HEAD, SMALL, BIG]) == "STRICT_SPREAD"  # new nodes are to come
    assert choose_placement({"GPU": 0.0}, 2, [HEAD]) == "SPREAD"


def plan(num_workers: int, devices: int, *nodes: Node, **resources: float) -> LaunchPlan:
    num_gpus = max(node.num_gpus for node in nodes)
    return plan_workers(
        "m",
        num_workers,
        parse_devices(devices, gpus_on_node=num_gpus),
        Cluster(False, nodes),
        resources=resources or None,
        timeouts=Timeouts(),
        communication=CommunicationOptions(implementation="nccl" if num_gpus else "gloo"),
    )


def test_replicas_are_numbered_worker_by_worker_and_reserved_with_their_worker() -> None:
    made = plan(2, 2, HEAD, SMALL, BIG)
    assert [setup.worker for setup in made.setups] == [0, 0, 1, 1]
    assert [made.bundle_of(setup) for setup in made.setups] == [0, 0, 1, 1]
    assert (made.num_workers, made.placement) == (2, "STRICT_SPREAD")
    assert made.bundles == ({"CPU": 2.0},) * 2
    assert made.resources == {"CPU": 1.0}
    assert made.setups[0].backend == "gloo"
    assert made.setups[2].worker_devices == (
        "/job:worker/replica:0/task:0/device:CPU:0",
        "/job:worker/replica:0/task:0/device:CPU:1",
        "/job:worker/replica:0/task:1/device:CPU:0",
        "/job:worker/replica:0/task:1/device:CPU:1",
    )


def test_what_a_replica_asks_for_is_reserved_as_often_as_a_worker_has_one() -> None:
    made = plan(2, 3, HEAD, BIG, CPU=0.5, memory=10.0)
    assert made.bundles == ({"CPU": 1.5, "memory": 30.0},) * 2
    assert plan(2, 2, HEAD, TWO_GPUS, FOUR_GPUS).bundles == ({"GPU": 2.0},) * 2


def test_others_reach_the_store_at_the_address_of_this_node() -> None:
    assert plan(1, 1, BIG).store_host == "127.0.0.1"
    assert plan(2, 1, HEAD, SMALL, BIG).store_host == HEAD.address


def test_input_begins_on_a_node_that_holds_a_worker() -> None:
    assert plan(1, 4, HEAD, SMALL, BIG).node_id == BIG.node_id
    assert plan(1, 64, HEAD, SMALL, BIG).node_id == HEAD.node_id
