from __future__ import annotations

import logging
from typing import Any

import pytest

from raydist.cluster.nodes import Cluster, Node
from raydist.context.devices import parse_devices
from raydist.core.errors import InvalidArgumentError
from raydist.options import CommunicationOptions, Timeouts
from raydist.replicas.launch import LaunchPlan, launch, plan_one_node, plan_slice, settle, warn_if_crowded
from raydist.strategies.multi_worker import choose_placement, choose_workers, plan_workers
from raydist.tpu_slices.inventory import SliceShape

NODE = Node("a", "10.0.0.1", {"CPU": 8.0, "GPU": 2.0})

OTHER = Node("b", "10.0.0.2", {"CPU": 4.0})


def plan(
    devices: object, *, started_here: bool = False, nodes: tuple[Node, ...] = (NODE,), **extra: float
) -> LaunchPlan:
    cluster = Cluster(started_here, nodes)
    return plan_one_node(
        "m",
        parse_devices(devices, gpus_on_node=0),
        cluster,
        NODE,
        resources=extra or None,
        timeouts=Timeouts(),
        communication=CommunicationOptions(),
    )


def test_cores_are_shared_between_the_replicas() -> None:
    made = plan(["cpu:0", "cpu:1", "cpu:2"])
    assert [setup.num_threads for setup in made.setups] == [2, 2, 2]
    assert [(setup.rank, setup.world_size) for setup in made.setups] == [(0, 3), (1, 3), (2, 3)]
    assert plan(20).setups[0].num_threads == 1


def test_cores_are_those_of_the_node_that_a_replica_got() -> None:
    setups = plan(4).setups
    nodes = {"a": NODE, "b": Node("b", "10.0.0.2", {"CPU": 7.0})}
    settled = settle(setups, ["b", "a", "b", "b"], nodes)
    assert [it.num_threads for it in settled] == [2, 8, 2, 2]
    assert [it.host for it in settled][:2] == ["node 10.0.0.2 (b)", "node 10.0.0.1 (a)"]
    crowd = settle(setups, ["b", "new", "b", "b"], {"b": Node("b", "10.0.0.2", {"CPU": 2.0})})
    assert [(it.num_threads, it.host) for it in crowd[:2]] == [(1, "node 10.0.0.2 (b)"), (2, "")]


def test_a_reservation_whose_node_is_lost_meanwhile_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    released: list[Any] = []

    def lost(*_: Any) -> Any:
        raise KeyError(0)

    monkeypatch.setattr("raydist.replicas.launch.place", lambda bundles, **how: "reservation")
    monkeypatch.setattr("raydist.replicas.launch._start_actors", lost)
    monkeypatch.setattr("raydist.replicas.launch.release", released.append)
    with pytest.raises(KeyError):
        launch(plan(2), Timeouts(), "a strategy")
    assert released == ["reservation"]


def test_what_a_replica_asks_for() -> None:
    assert plan(2).bundles == ({"CPU": 1.0},) * 2
    assert plan(["cuda:0", "cuda:1"]).bundles == ({"GPU": 1.0},) * 2
    assert plan(2, CPU=0.5, memory=10.0).bundles[0] == {"CPU": 0.5, "memory": 10.0}
    assert 100 * plan(100, started_here=True).bundles[0]["CPU"] < 1


def test_each_gpu_replica_sees_its_gpu_as_the_first() -> None:
    made = plan(["cuda:0", "cuda:1"])
    assert [setup.device for setup in made.setups] == ["cuda:0", "cuda:0"]
    assert made.setups[0].worker_devices == ("GPU:0", "GPU:1")


def test_every_replica_is_told_how_to_communicate() -> None:
    wanted = CommunicationOptions(bytes_per_pack=64, timeout_seconds=7.0, implementation="gloo", compression="bf16")
    devices = parse_devices(2, gpus_on_node=0)
    cluster = Cluster(False, (NODE,))
    made = plan_one_node("m", devices, cluster, NODE, resources=None, timeouts=Timeouts(), communication=wanted)
    told = {(it.bucket_bytes, it.collective_timeout_s, it.backend, it.compression) for it in made.setups}
    assert told == {(64, 7.0, "gloo", "bf16")}
    default = plan(2).setups[0]
    assert (default.bucket_bytes, default.collective_timeout_s) == (25 * 1024 * 1024, Timeouts().collective_s)
    assert (default.backend, default.compression, default.worker) == ("auto", None, 0)


def test_the_store_is_on_loopback_only_on_one_machine() -> None:
    assert plan(2).store_host == "127.0.0.1"
    assert plan(2, nodes=(OTHER, NODE)).store_host == "10.0.0.2"


def test_crowded_cores_are_told_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="raydist"):
        warn_if_crowded(8, NODE)
        assert not caplog.records
        warn_if_crowded(9, NODE)
    assert "9 CPU replicas share the 8 cores" in caplog.text


def test_each_host_of_a_slice_has_a_process_for_all_of_its_chips() -> None:
    shape = SliceShape.of("v4", "2x2x2")
    cluster = Cluster(False, (OTHER, NODE))
    made = plan_slice("t", shape, cluster, timeouts=Timeouts(), communication=CommunicationOptions())
    assert [setup.device for setup in made.setups] == [f"xla:{chip}" for _ in range(2) for chip in range(4)]
    assert [setup.worker for setup in made.setups] == [0] * 4 + [1] * 4
    assert made.setups[5].worker_devices == tuple(f"TPU:{number}" for number in range(8))
    assert made.bundles == ({"CPU": 1.0, "TPU": 4.0},) * 2
    assert [made.bundle_of(setup) for setup in made.setups[:: made.per_process]] == [0, 1]
    assert (made.num_workers, made.per_process, made.tpu_slice) == (2, 4, shape)
    assert made.store_host == "10.0.0.2"


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


def plan_of(num_workers: int, devices: int, *nodes: Node, **resources: float) -> LaunchPlan:
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
    made = plan_of(2, 2, HEAD, SMALL, BIG)
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


def test_input_begins_on_a_node_that_holds_a_worker() -> None:
    assert plan_of(1, 4, HEAD, SMALL, BIG).node_id == BIG.node_id
    assert plan_of(1, 64, HEAD, SMALL, BIG).node_id == HEAD.node_id
