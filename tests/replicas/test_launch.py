from __future__ import annotations

import logging
import sys
from typing import Any

import pytest
import torch

from raydist.cluster.nodes import Cluster, Node
from raydist.context.devices import parse_devices
from raydist.core.errors import DeadlineExceededError, FailedPreconditionError, InvalidArgumentError
from raydist.options import CommunicationOptions, Timeouts
from raydist.replicas.device_copies import Accelerator, Copying, DeviceCopies
from raydist.replicas.launch import LaunchPlan, launch, plan_one_node, plan_slice, warn_if_crowded
from raydist.replicas.step import with_hosts
from raydist.strategies.multi_worker import choose_placement, choose_workers, plan_workers
from raydist.tpu_slices.inventory import SliceShape
from raydist.utils.torch_modes import TorchModes, TorchSettings
from tests.xla_world import IS_REAL, chips_here

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


def test_cores_are_those_of_the_node_that_a_replica_got() -> None:
    setups = plan(4).setups
    nodes = {"a": NODE, "b": Node("b", "10.0.0.2", {"CPU": 7.0})}
    settled = with_hosts(setups, ["b", "a", "b", "b"], nodes)
    assert [it.num_threads for it in settled] == [2, 8, 2, 2]
    assert [it.host for it in settled][:2] == ["node 10.0.0.2 (b)", "node 10.0.0.1 (a)"]
    crowd = with_hosts(setups, ["b", "new", "b", "b"], {"b": Node("b", "10.0.0.2", {"CPU": 2.0})})
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


def test_what_a_replica_asks_for_and_gets() -> None:
    made = plan(["cpu:0", "cpu:1", "cpu:2"])
    assert [setup.num_threads for setup in made.setups] == [2, 2, 2]  # cores are shared
    assert [(setup.rank, setup.world_size) for setup in made.setups] == [(0, 3), (1, 3), (2, 3)]
    assert plan(20).setups[0].num_threads == 1
    assert plan(2).bundles == ({"CPU": 1.0},) * 2
    assert plan(2, CPU=0.5, memory=10.0).bundles[0] == {"CPU": 0.5, "memory": 10.0}
    assert 100 * plan(100, started_here=True).bundles[0]["CPU"] < 1
    gpus = plan(["cuda:0", "cuda:1"])
    assert gpus.bundles == ({"GPU": 1.0},) * 2
    assert [setup.device for setup in gpus.setups] == ["cuda:0", "cuda:0"]  # each sees its own alone
    assert gpus.setups[0].worker_devices == ("GPU:0", "GPU:1")
    assert plan(2).store_host == "127.0.0.1"
    assert plan(2, nodes=(OTHER, NODE)).store_host == "10.0.0.2"


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


def test_how_many_workers_and_with_which_devices() -> None:
    eight_cpus, gpus = [f"CPU:{index}" for index in range(8)], [f"GPU:{index}" for index in range(8)]
    cases: list[tuple[list[Node], int | None, Any, tuple[int, list[str]]]] = [
        ([HEAD, SMALL, BIG], None, None, (2, eight_cpus[:2])),  # one for each node with CPUs
        ([HEAD, BIG], None, None, (1, eight_cpus)),
        ([HEAD, BIG, TWO_GPUS, FOUR_GPUS], None, None, (2, gpus[:2])),  # GPUs are taken before CPUs
        ([HEAD, BIG, TWO_GPUS, FOUR_GPUS], 1, None, (1, gpus[:4])),  # and all of a node
        ([FOUR_GPUS], 2, None, (2, gpus[:2])),  # more workers than nodes share their devices
        ([SMALL], 5, None, (5, ["CPU:0"])),
        ([HEAD, SMALL, BIG], 3, 4, (3, eight_cpus[:4])),  # what the user says is taken
        ([BIG, TWO_GPUS, FOUR_GPUS], None, 2, (2, gpus[:2])),
        ([BIG, TWO_GPUS, FOUR_GPUS], None, ["cpu:0"], (3, ["CPU:0"])),
        ([TWO_GPUS, FOUR_GPUS], 1, ["GPU:2", "GPU:3"], (1, gpus[2:4])),
        ([TWO_GPUS], 1, 8, (1, gpus)),  # a larger node may come
        ([HEAD], 2, "GPU:0", (2, gpus[:1])),  # a cluster that grows brings them
    ]
    for nodes, num_workers, devices, expected in cases:
        count, found = choose_workers(nodes, num_workers, devices)
        assert (count, [str(device) for device in found]) == expected, (nodes, num_workers, devices)
    refused: list[tuple[list[Node], Any, str]] = [
        ([HEAD], None, "none of the 1 nodes has any now. Give num_workers"),
        ([HEAD, BIG], "GPU:0", r"take the GPUs .* none of the 2 nodes"),
        (
            [HEAD, TWO_GPUS, FOUR_GPUS],
            ["GPU:0", "GPU:4"],
            r"but GPU:4 was asked for.* more than 4 GPUs: GPU:0 to GPU:3\. Name",
        ),
    ]
    for nodes, devices, message in refused:
        with pytest.raises(InvalidArgumentError, match=message):
            choose_workers(nodes, None, devices)


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
    assert plan_of(1, 4, HEAD, SMALL, BIG).node_id == BIG.node_id  # input begins where a worker is
    assert plan_of(1, 64, HEAD, SMALL, BIG).node_id == HEAD.node_id


# --- devices of replicas ----------------------------------------------------------------------------------------------

CPU, META = torch.device("cpu"), torch.device("meta")


class Recorded:
    """Stands for `CudaStreams`: notes what is asked of it."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def copy(self, value: torch.Tensor) -> Copying:
        self.calls.append("copy")
        return Copying(value.to(META), event="there")

    def join(self, copying: Copying) -> torch.Tensor:
        self.calls.append(f"join {copying.event}")
        return copying.tensor


def test_a_copy_begins_early_and_is_joined_where_it_is_used() -> None:
    streams: Any = Recorded()
    copies = DeviceCopies(META, streams)
    for value in (torch.ones(2, device=META), "text", 3):  # which need no copy
        assert copies.finish(copies.begin(value)) is value
    assert streams.calls == []
    begun = copies.begin(torch.ones(2))
    assert streams.calls == ["copy"]
    assert copies.finish(begun).device == META
    assert copies.finish(begun) is copies.finish(begun)
    assert streams.calls == ["copy", *["join there"] * 3]
    assert copies.overlap
    plain, value = DeviceCopies.to(CPU), torch.ones(2)  # a device without streams
    assert plain.finish(plain.begin(value)) is value
    assert not plain.overlap
    assert DeviceCopies(META).begin(value).device == META


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu() -> None:
    copies = DeviceCopies.to(torch.device("cuda:0"))
    values = [torch.full((1 << 20,), float(number)) for number in range(8)]
    begun = [copies.begin(value) for value in values]
    assert [float(copies.finish(each).sum()) for each in begun] == [float(value.sum()) for value in values]


@pytest.mark.skipif(IS_REAL, reason="a process has its chips for its life")
def test_chips_of_one_process_take_turns_with_its_settings() -> None:
    double = TorchModes(settings=TorchSettings(torch.float64))
    with chips_here(2):
        first, second = Accelerator("xla:0"), Accelerator("xla:1")
        with first.working(double, 1.0), second.working(double, 1.0):
            assert torch.ones(1).dtype is torch.float64
            with pytest.raises(DeadlineExceededError), first.working(None, 0.01):
                pass
        with first.working(None, 0.01):
            assert torch.ones(1).dtype is torch.float32


@pytest.mark.skipif(IS_REAL, reason="a process has its chips for its life")
def test_a_chip_is_torch_xlas(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "torch_xla", None)
        with pytest.raises(FailedPreconditionError, match="need torch_xla"):
            Accelerator("xla:0")
    with chips_here(2):
        chip = Accelerator("xla:1")
        chip.enter()
        chip.seed(3)
        assert torch.equal(torch.ones(2, device=chip.device) * 2, torch.full((2,), 2.0))
        chip.leave()
