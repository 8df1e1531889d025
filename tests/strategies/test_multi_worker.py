"""Workers on several nodes: where replicas are, that they train as one device does, what the loss of a node does."""

from __future__ import annotations

import contextlib
import importlib
import itertools
import os
import re
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import raydist as rd
from raydist.testing.strategy_contract import CHECKS
from tests.contracts.exchange_program import check_exchanges
from tests.distributed_dataset import on_nodes
from tests.several_nodes import LIMITS, Nodes, cluster, descendants, shared_strategy
from tests.strategies import test_gradient_kinds as kinds
from tests.strategies import test_nonfinite as nonfinite

pytestmark = [pytest.mark.ray, pytest.mark.timeout(120)]


KINDS: tuple[Callable[[rd.Strategy], None], ...] = (
    kinds.test_a_scaler_skips_the_same_steps_everywhere_and_the_driver_has_its_state,
    kinds.test_what_replicas_draw_differs_by_replica_and_step_and_repeats_by_seed,
    nonfinite.test_raise_names_who_and_what_and_pass_hands_it_to_all,
)


@pytest.mark.long
@pytest.mark.timeout(400)
def test_contract_and_kinds_of_gradients_on_two_nodes(nodes: Nodes) -> None:
    for check in (*CHECKS, *KINDS):
        nodes.check(check, workers=2, devices=2)
    nodes.check(check_exchanges, 15, workers=2, devices=2)


def where() -> tuple[str, int]:
    import ray

    return ray.get_runtime_context().get_node_id(), torch.get_num_threads()


def places() -> list[tuple[str, int]]:
    strategy = shared_strategy(2, 2)
    return list(strategy.local_results(strategy.run(where)))


def results_of_all_sizes() -> list[list[int]]:
    strategy = shared_strategy(2, 2)

    def step(size: int) -> torch.Tensor:
        replica = rd.get_replica_context()
        replica.all_reduce("SUM", 1)
        return torch.full((size,), replica.replica_id_in_sync_group)

    sizes = (1, 100_000, 1, 10, 100_000, *[1] * 40)  # those of 800 KB go by the object store
    results = [strategy.run(step, args=(size,)) for size in sizes]
    return [
        [int(one.sum()) // size for one in strategy.local_results(r)] for r, size in zip(results, sizes, strict=True)
    ]


def test_workers_are_on_different_nodes_and_results_of_all_sizes_come_in_their_order(nodes: Nodes) -> None:
    (first, threads), (second, _), (third, _), (fourth, _) = nodes.run(places)
    assert first == second != third == fourth
    assert threads == 2
    assert nodes.run(results_of_all_sizes) == [[0, 1, 2, 3]] * 45


def nodes_of(placement: str) -> tuple[str, ...]:
    """Return the nodes of two workers that a ScalingConfig of Ray Train places; they train as one device does."""
    from ray.train import ScalingConfig

    asked = ScalingConfig(num_workers=2, resources_per_worker={"CPU": 0.5}, placement_strategy=placement)
    with rd.MultiWorkerMirroredStrategy(cluster_resolver=asked, timeouts=LIMITS) as strategy:
        check_exchanges(strategy, 2)
        return tuple(node for node, _ in strategy.local_results(strategy.run(where)))


@pytest.mark.long
@pytest.mark.parametrize(("placement", "num_nodes"), [("PACK", 1), ("STRICT_SPREAD", 2)])
def test_a_scaling_config_says_how_workers_are_placed(placement: str, num_nodes: int, nodes: Nodes) -> None:
    assert len(set(nodes.run(nodes_of, placement))) == num_nodes


def chosen(*args: Any, **settings: Any) -> tuple[int, dict[str, list[str]]]:
    with rd.MultiWorkerMirroredStrategy(*args, resources_per_replica={"CPU": 0.01}, **settings) as strategy:
        resolver = strategy.cluster_resolver
        assert resolver is not None
        return len(strategy.worker_devices), resolver.cluster_spec().as_dict()


def own_address() -> str:
    from raydist.cluster.nodes import connect

    return connect().nodes[0].address


def spec(*workers: str) -> rd.SimpleClusterResolver:
    return rd.SimpleClusterResolver(rd.ClusterSpec({"worker": list(workers)}), "worker", 0)


SOON = (
    on_nodes.files_are_read_once_where_their_rows_go,
    on_nodes.data_gives_the_batches_of_one_device,
    on_nodes.gradients_are_means_over_the_rows_of_all_workers,
    on_nodes.a_missing_file_is_named_with_its_node,
)


def folder_for(check: Callable[..., None], root: Path) -> list[str]:
    """The argument of a check that needs a folder of its own."""
    folder = root / check.__name__
    folder.mkdir()
    return [str(folder)] if check in on_nodes.IN_A_FOLDER else []


def test_input_on_two_nodes(nodes: Nodes, tmp_path: Path) -> None:
    for check in SOON:
        nodes.run(check, *folder_for(check, tmp_path))


@pytest.mark.long
@pytest.mark.timeout(240)
def test_more_of_input_on_two_nodes(nodes: Nodes, tmp_path: Path) -> None:
    for check in (*on_nodes.IN_A_FOLDER, *on_nodes.ELSEWHERE):
        if check not in SOON:
            nodes.run(check, *folder_for(check, tmp_path))
    (tmp_path / "pool").mkdir()
    for check in on_nodes.FROM_A_POOL:
        nodes.run(on_nodes.from_a_pool, check, *folder_for(check, tmp_path / "pool"))


def chosen_by_tf_config(text: str) -> tuple[int, dict[str, list[str]]]:
    os.environ["TF_CONFIG"] = text
    try:
        return chosen(None, 1)
    finally:
        del os.environ["TF_CONFIG"]


def test_workers_are_all_nodes_with_cpus_or_those_that_a_resolver_names(nodes: Nodes) -> None:
    address = nodes.run(own_address)
    assert nodes.run(chosen) == (8, {"worker": [address] * 2})
    assert nodes.run(chosen, None, 1, cluster_resolver=spec(f"{address}:2222", "localhost:2222"))[0] == 2
    with pytest.raises(
        rd.InvalidArgumentError, match=r"3 workers on 10\.9\.9\.9, .* the nodes are .*: no node is left"
    ):
        nodes.run(chosen, None, 1, cluster_resolver=spec("10.9.9.9", address, address))
    text = '{"cluster": {"worker": ["localhost:1", "localhost:2"]}, "task": {"type": "worker", "index": %d}}'
    assert nodes.run(chosen_by_tf_config, text % 0) == (2, {"worker": ["localhost:1", "localhost:2"]})
    with pytest.raises(rd.InvalidArgumentError, match="is task worker 1. On the other machines"):
        nodes.run(chosen_by_tf_config, text % 1)


def crowded() -> list[tuple[str, int]]:
    with rd.MultiWorkerMirroredStrategy(3, 1, resources_per_replica={"CPU": 1.5}) as strategy:
        return list(strategy.local_results(strategy.run(where)))


@pytest.mark.long
def test_more_workers_than_nodes_share_them(nodes: Nodes) -> None:
    found = nodes.run(crowded)
    assert len({node for node, _ in found}) == 2
    assert sorted(threads for _, threads in found) == [2, 2, 4]


def lose_a_node(how: signal.Signals, implementation: str) -> tuple[str, str, float]:
    """Train on three nodes and lose one; the error, the name of the node, and how long it took."""
    node = cluster().add_node(num_cpus=1)
    strategy = rd.MultiWorkerMirroredStrategy(
        3,
        1,
        rd.CommunicationOptions(timeout_seconds=5, implementation=implementation),  # type: ignore[arg-type]  # a name
        timeouts=rd.Timeouts(start_s=60, step_s=40, close_s=5),
        resources_per_replica={"CPU": 0.01},
        failure_options=rd.FailureOptions(recover=False),
    )
    with strategy.scope():
        model = nn.Linear(1, 1)

    def step() -> tuple[int, str]:
        import ray

        model(torch.ones(1, 1)).sum().backward()
        return os.getpid(), ray.get_runtime_context().get_node_id()

    replicas = dict(strategy.local_results(strategy.run(step)))
    raylet = node.all_processes["raylet"][0].process.pid
    for pid in (raylet, *descendants(raylet)):
        os.kill(pid, how)
    began = time.monotonic()
    try:
        while True:
            strategy.local_results(strategy.run(step))
    except (rd.UnavailableError, rd.DeadlineExceededError) as error:
        took = time.monotonic() - began
        said = "\n".join([str(error), *getattr(error, "__notes__", ())])
    finally:
        strategy._abort(fetch=True)
        cluster().remove_node(node, allow_graceful=False)
    survivors = [pid for pid, host in replicas.items() if host != node.node_id]
    assert len(survivors) == 2
    await_end(survivors)
    return said, node.node_id[:8], took


def await_end(pids: list[int]) -> None:
    deadline = time.monotonic() + 10
    with contextlib.suppress(ProcessLookupError):
        while time.monotonic() < deadline:
            for pid in pids:
                os.kill(pid, 0)
            time.sleep(0.1)
        raise AssertionError(f"one of the processes {pids} still lives")


def sum_of_ones() -> int:
    strategy = shared_strategy(2, 2)
    return int(strategy.local_results(strategy.run(lambda: rd.get_replica_context().all_reduce("SUM", 1)))[0])


@pytest.mark.parametrize(
    ("how", "implementation"),
    [
        (signal.SIGKILL, "auto"),
        *(pytest.param(signal.SIGSTOP, name, marks=pytest.mark.long) for name in ("auto", "gloo")),
    ],
)
def test_a_lost_node_is_an_error_that_names_it_and_the_rest_goes_on(
    nodes: Nodes, how: signal.Signals, implementation: str
) -> None:
    said, node, took = nodes.run(lose_a_node, how, implementation)
    assert re.search(rf"replica \d of multi-worker-\w+ on node \S+ \({node}\)", said), said
    assert took < 20  # 5 s for a collective, as long again until a peer of it says so, and 5 s of grace
    assert nodes.run(sum_of_ones) == 4


def drain_node(node: Any) -> None:
    """As who is going to take a machine away does."""
    raylet: Any = importlib.import_module("ray._raylet")
    messages: Any = importlib.import_module("ray.core.generated.autoscaler_pb2")
    deadline_ms = int((time.time() + 60) * 1000)
    accepted, why = raylet.GcsClient(cluster().address).drain_node(
        node.node_id, messages.DrainNodeReason.DRAIN_NODE_REASON_PREEMPTION, "taken away", deadline_ms
    )
    assert accepted, why


def kill_node(node: Any) -> None:
    raylet = node.all_processes["raylet"][0].process.pid
    for pid in (raylet, *descendants(raylet)):
        os.kill(pid, signal.SIGKILL)


@dataclass
class Trained:
    """What training on nodes that go has given, by step: replicas, their nodes, rows; and all failures."""

    sizes: list[int]
    places: list[int]
    rows: list[list[int]]
    failures: list[rd.ReplicaFailure]


def train_while_nodes_go(how: str) -> Trained:
    """Train on three nodes. One is "lost" while a fourth has room, or before it comes ("elastic"), or "drained"."""
    node, another = cluster().add_node(num_cpus=1), None
    elastic = rd.Elastic(min_replicas=2, grow_after_s=1) if how == "elastic" else None
    options = rd.FailureOptions(replace_s=1 if elastic else 60, elastic=elastic)
    strategy = rd.MultiWorkerMirroredStrategy(
        3,
        1,
        rd.CommunicationOptions(timeout_seconds=10),
        timeouts=rd.Timeouts(start_s=60, step_s=60, close_s=5),
        resources_per_replica={"CPU": 0.01},
        failure_options=options,
    )
    try:
        with strategy.scope():
            model = nn.Linear(1, 1)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(batch: torch.Tensor) -> list[int]:
            time.sleep(0.02)
            optimizer.zero_grad()
            model(torch.ones(1, 1)).sum().backward()
            optimizer.step()
            return list(batch.tolist())

        found, results = Trained([], [], [], []), []
        for number, batch in enumerate(
            strategy.distribute_dataset(rd.Dataset.range(30_000).shuffle(50, seed=1).batch(6))
        ):
            results.append(strategy.run(step, args=(batch,)))
            found.sizes.append(strategy.num_replicas_in_sync)
            found.places.append(len(set(strategy._launch().hosts)))
            if number == 20:
                another = cluster().add_node(num_cpus=1) if how == "lost" else None
                (drain_node if how == "drained" else kill_node)(node)
            if another is None and found.places[-1] == 2:
                if how == "drained":
                    kill_node(node)
                another = cluster().add_node(num_cpus=1)
            hosts = strategy._launch().hosts
            if another is not None and another.node_id in hosts and len(set(hosts)) == 3:
                break
        found.rows = [sum(strategy.local_results(each), []) for each in results]
        found.failures = strategy.failures()
        return found
    finally:
        strategy._abort(fetch=True)
        cluster().remove_node(node, allow_graceful=False)
        if another is not None:
            cluster().remove_node(another)


def check_training_while_nodes_go(nodes: Nodes, how: str) -> None:
    found = nodes.run(train_while_nodes_go, how)
    changes = [[value for value, _ in itertools.groupby(each)] for each in (found.sizes, found.places)]
    assert changes == {"lost": [[3], [3]], "elastic": [[3, 2, 3]] * 2, "drained": [[3], [3, 2, 3]]}[how]
    seen = [row for each in found.rows for row in each]
    num_lost = sum(each.num_lost_results for each in found.failures)
    assert 6 * len(found.rows) - 2 * num_lost <= len(seen) == len(set(seen)) <= 6 * len(found.rows)
    assert bool(found.failures) == (how != "drained")


@pytest.mark.long
@pytest.mark.parametrize("how", ["lost", "elastic", "drained"])
def test_training_goes_on_when_a_node_goes_and_another_one_comes(nodes: Nodes, how: str) -> None:
    check_training_while_nodes_go(nodes, how)
