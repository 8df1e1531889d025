"""Devices and replicas of strategies on one node."""

from __future__ import annotations

from typing import Any

import pytest

import raydist as rd
from raydist.cluster.nodes import Cluster, Node
from raydist.strategies import one_node
from raydist.strategies.one_node import choose_devices

CPUS = Node("a", "10.0.0.1", {"CPU": 4.0})
ONE = Node("b", "10.0.0.2", {"CPU": 8.0, "GPU": 1.0})
FOUR = Node("c", "10.0.0.3", {"CPU": 16.0, "GPU": 4.0})


def chosen(wanted: Any, *nodes: Node, grows: bool = False) -> tuple[str, list[str]]:
    node, devices = choose_devices(wanted, Cluster(False, nodes), may_grow=lambda: grows)
    return node.node_id, [str(device) for device in devices]


def test_by_default_all_gpus_of_the_node_with_most_else_what_is_named() -> None:
    assert chosen(None, CPUS, ONE, FOUR) == ("c", ["GPU:0", "GPU:1", "GPU:2", "GPU:3"])
    assert chosen(None, CPUS) == ("a", ["CPU:0", "CPU:1", "CPU:2", "CPU:3"])
    assert chosen(None, Node("d", "10.0.0.4", {})) == ("d", ["CPU:0"])
    assert chosen(["cuda:1", "GPU:3"], CPUS, FOUR) == ("c", ["GPU:1", "GPU:3"])
    assert chosen(2, CPUS, FOUR) == ("c", ["GPU:0", "GPU:1"])
    assert chosen(["CPU:0", "CPU:1"], FOUR) == ("c", ["CPU:0", "CPU:1"])
    assert chosen(8, CPUS)[1][-1] == "CPU:7"
    assert chosen(["GPU:0", "GPU:1"], CPUS, ONE, grows=True) == ("b", ["GPU:0", "GPU:1"])  # an autoscaler brings them


def test_what_is_not_there_is_told() -> None:
    wrong: tuple[tuple[Any, tuple[Node, ...], str], ...] = (
        ("cuda:1", (CPUS,), r"GPU:1 was asked for. There is: node 10.0.0.1: 4 CPU, 0 GPU. Name CPUs"),
        (["GPU:0", "GPU:4"], (CPUS, FOUR), r"GPU:0, GPU:4 were asked for.*10.0.0.3: 16 CPU, 4 GPU. Leave devices out"),
        (5, (ONE, FOUR), r"5 GPUs were asked for"),
    )
    for wanted, nodes, message in wrong:
        with pytest.raises(rd.InvalidArgumentError, match=message):
            chosen(wanted, *nodes)
    with pytest.raises(rd.InvalidArgumentError, match="must differ"):
        chosen(["GPU:9", "GPU:9"], CPUS, grows=True)


GPUS = Cluster(False, (Node("a", "10.0.0.1", {"CPU": 4.0}), Node("b", "10.0.0.2", {"CPU": 8.0, "GPU": 2.0})))


@pytest.fixture
def gpu_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process is connected to a cluster with GPUs. Nothing is started on it."""
    monkeypatch.setattr(one_node, "connected", lambda: GPUS)
    monkeypatch.setattr(one_node, "connect", lambda: GPUS)
    monkeypatch.setattr(one_node, "may_grow", lambda: False)


@pytest.mark.usefixtures("gpu_machines")
def test_by_default_a_replica_on_each_gpu_of_the_best_node() -> None:
    strategy = rd.MirroredStrategy()
    assert strategy.worker_devices == ("GPU:0", "GPU:1")
    plan = strategy._plan()
    assert [setup.device for setup in plan.setups] == ["cuda:0", "cuda:0"]
    assert plan.bundles == ({"GPU": 1.0},) * 2
    assert plan.placement == "STRICT_PACK"
    assert plan.node_id == "b"
    strategy.close()
    with pytest.raises(rd.InvalidArgumentError, match=r"GPU:7 was asked for. There is: node"):
        rd.CentralStorageStrategy("cuda:7")  # at once


class Local(rd.StrategyHooks):
    """Keeps gradients here."""

    exchanges_gradients = False


class LocalStrategy(rd.OneNodeStrategy):
    """A strategy of one's own."""

    def replica_rules(self) -> rd.StrategyHooks:
        return Local()


@pytest.mark.usefixtures("gpu_machines")
def test_a_strategy_of_ones_own_gives_its_replicas_rules() -> None:
    strategy = LocalStrategy(["CPU:0", "CPU:1"])
    assert [type(setup.rules) for setup in strategy._plan().setups] == [Local, Local]
    assert rd.MirroredStrategy("cpu").replica_rules().exchanges_gradients
    strategy.close()
