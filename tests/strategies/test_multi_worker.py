"""Workers on several nodes: where replicas are, that they train as one device does, what the loss of a node does."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import raydist as rd
from raydist.testing.strategy_checks import check_errors
from raydist.testing.strategy_contract import CHECKS, check_batches, check_collectives, check_training, check_values
from tests.contracts.exchange_program import check_exchanges
from tests.distributed_dataset import on_nodes
from tests.several_nodes import LIMITS, Nodes, cluster, descendants, shared_strategy
from tests.strategies import test_gradient_kinds as kinds
from tests.strategies import test_nonfinite as nonfinite

pytestmark = [pytest.mark.ray, pytest.mark.timeout(120)]


# All of them run on workers that share a node (test_contract.py); these come out otherwise where memory is not shared.
ACROSS_NODES = (check_values, check_batches, check_collectives, check_errors, check_training)
EACH = [pytest.param(check, marks=() if check in ACROSS_NODES else pytest.mark.long) for check in CHECKS]


@pytest.mark.parametrize("check", EACH, ids=lambda check: str(check.__name__))
def test_contract_on_two_nodes(check: Callable[[rd.Strategy], None], nodes: Nodes) -> None:
    nodes.check(check, workers=2, devices=2)


@pytest.mark.timeout(240)
def test_gradients_on_two_nodes_of_two_replicas_are_those_of_one_device(nodes: Nodes) -> None:
    nodes.check(check_exchanges, 8, workers=2, devices=2)


KINDS: tuple[tuple[Callable[..., None], tuple[bool, ...]], ...] = (
    (kinds.test_sparse_gradients_are_coalesced_and_can_be_read_on_the_driver, (True,)),
    (kinds.test_a_scaler_skips_the_same_steps_everywhere_and_the_driver_has_its_state, ()),
    (kinds.test_dropout_masks_differ_by_replica_and_step_and_repeat_by_seed, (True,)),
    (nonfinite.test_raise_names_who_and_what_and_the_strategy_goes_on, ()),
)


@pytest.mark.parametrize(("check", "args"), KINDS, ids=lambda value: getattr(value, "__name__", "")[5:])
def test_kinds_of_gradients_on_two_nodes(check: Callable[..., None], args: tuple[bool, ...], nodes: Nodes) -> None:
    nodes.check(check, *args, workers=2, devices=2)


def where() -> tuple[str, int]:
    import ray

    return ray.get_runtime_context().get_node_id(), torch.get_num_threads()


def places() -> list[tuple[str, int]]:
    strategy = shared_strategy(2, 2)
    return list(strategy.local_results(strategy.run(where)))


def test_a_worker_is_on_one_node_and_workers_on_different_ones(nodes: Nodes) -> None:
    (first, threads), (second, _), (third, _), (fourth, _) = nodes.run(places)
    assert first == second != third == fourth
    assert threads == 2


def nodes_of(placement: str) -> tuple[str, ...]:
    """Return the nodes of two workers that a ScalingConfig of Ray Train places; they train as one device does."""
    from ray.train import ScalingConfig

    asked = ScalingConfig(num_workers=2, resources_per_worker={"CPU": 0.5}, placement_strategy=placement)
    with rd.MultiWorkerMirroredStrategy(cluster_resolver=asked, timeouts=LIMITS) as strategy:
        check_exchanges(strategy, 2)
        return tuple(node for node, _ in strategy.local_results(strategy.run(where)))


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


@pytest.mark.parametrize("check", on_nodes.IN_A_FOLDER, ids=lambda check: str(check.__name__))
def test_files_on_two_nodes(check: Callable[[str], None], nodes: Nodes, tmp_path: Path) -> None:
    nodes.run(check, str(tmp_path))


@pytest.mark.parametrize("check", on_nodes.ELSEWHERE, ids=lambda check: str(check.__name__))
def test_input_on_two_nodes(check: Callable[[], None], nodes: Nodes) -> None:
    nodes.run(check)


@pytest.mark.parametrize("check", on_nodes.FROM_A_POOL, ids=lambda check: str(check.__name__))
def test_input_from_a_pool_on_two_nodes(check: Callable[..., None], nodes: Nodes, tmp_path: Path) -> None:
    nodes.run(on_nodes.from_a_pool, check, *([str(tmp_path)] if check in on_nodes.IN_A_FOLDER else []))


def test_without_a_word_all_nodes_with_cpus_are_taken(nodes: Nodes) -> None:
    count, workers = nodes.run(chosen)
    assert (count, workers) == (8, {"worker": [nodes.run(own_address)] * 2})


def test_machines_of_a_resolver_are_nodes(nodes: Nodes) -> None:
    address = nodes.run(own_address)
    resolver = spec(f"{address}:2222", "localhost:2222")
    assert nodes.run(chosen, None, 1, cluster_resolver=resolver)[0] == 2
    with pytest.raises(
        rd.InvalidArgumentError, match=r"3 workers on 10\.9\.9\.9, .* the nodes are .*: no node is left"
    ):
        nodes.run(chosen, None, 1, cluster_resolver=spec("10.9.9.9", address, address))


def chosen_by_tf_config(text: str) -> tuple[int, dict[str, list[str]]]:
    os.environ["TF_CONFIG"] = text
    try:
        return chosen(None, 1)
    finally:
        del os.environ["TF_CONFIG"]


def test_tf_config_names_the_workers(nodes: Nodes) -> None:
    text = '{"cluster": {"worker": ["localhost:1", "localhost:2"]}, "task": {"type": "worker", "index": %d}}'
    assert nodes.run(chosen_by_tf_config, text % 0) == (2, {"worker": ["localhost:1", "localhost:2"]})
    with pytest.raises(rd.InvalidArgumentError, match="is task worker 1. On the other machines"):
        nodes.run(chosen_by_tf_config, text % 1)


def crowded() -> list[tuple[str, int]]:
    with rd.MultiWorkerMirroredStrategy(3, 1, resources_per_replica={"CPU": 1.5}) as strategy:
        return list(strategy.local_results(strategy.run(where)))


def test_more_workers_than_nodes_share_them(nodes: Nodes) -> None:
    found = nodes.run(crowded)
    assert len({node for node, _ in found}) == 2
    assert sorted(threads for _, threads in found) == [2, 2, 4]


def with_another_version(folder: str) -> None:
    node = cluster().add_node(num_cpus=1, resources={"old": 1}, env_vars={"PYTHONPATH": folder})
    try:
        wanted = {"old": 0.1, "CPU": 0.01}
        with rd.MultiWorkerMirroredStrategy(1, 1, resources_per_replica=wanted) as strategy:
            strategy.run(Path(folder, "ran").touch)
    finally:
        cluster().remove_node(node)


def test_a_node_with_another_version_is_named_before_anything_runs(nodes: Nodes, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import raydist; raydist.__version__ = '0.0.9'")
    said = rf"replica 0 of multi-worker-\w+ on node \S+ \(\w+\) has raydist 0\.0\.9, not {re.escape(rd.__version__)}\."
    with pytest.raises(rd.FailedPreconditionError, match=said):
        nodes.run(with_another_version, str(tmp_path))
    assert not (tmp_path / "ran").exists()


def lose_a_node(how: signal.Signals, implementation: str) -> tuple[str, str, float]:
    """Train on three nodes and lose one; the error, the name of the node, and how long it took."""
    node = cluster().add_node(num_cpus=1)
    strategy = rd.MultiWorkerMirroredStrategy(
        3,
        1,
        rd.CommunicationOptions(timeout_seconds=5, implementation=implementation),  # type: ignore[arg-type]  # a name
        timeouts=rd.Timeouts(start_s=60, step_s=40, close_s=5),
        resources_per_replica={"CPU": 0.01},
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


def train_again() -> int:
    with rd.MultiWorkerMirroredStrategy(2, 1, resources_per_replica={"CPU": 0.01}) as strategy:
        total = strategy.run(lambda: rd.get_replica_context().all_reduce("SUM", 1))
        return int(strategy.local_results(total)[0])


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
    assert nodes.run(train_again) == 2


def lose_a_process(rank: int) -> tuple[str, float]:
    """Kill one of four replicas on two nodes within a step; the error, and how long it took."""
    with rd.MultiWorkerMirroredStrategy(
        2,
        2,
        rd.CommunicationOptions(timeout_seconds=15),
        timeouts=rd.Timeouts(start_s=60, step_s=40, close_s=5),
        resources_per_replica={"CPU": 0.01},
    ) as strategy:

        def step() -> int:
            rd.get_replica_context().all_reduce("SUM", 1)
            return os.getpid()

        pids = strategy.local_results(strategy.run(step))
        began = time.monotonic()
        os.kill(pids[rank], signal.SIGKILL)
        try:
            while True:
                strategy.local_results(strategy.run(step))
        except rd.UnavailableError as error:
            return str(error), time.monotonic() - began
        finally:
            strategy._abort(fetch=True)


# Messages to the third come by the fourth.
@pytest.mark.parametrize("rank", [pytest.param(2, marks=pytest.mark.long), 3])
def test_a_lost_process_is_named_whether_or_not_messages_came_by_it(nodes: Nodes, rank: int) -> None:
    said, took = nodes.run(lose_a_process, rank)
    assert said.startswith(f"replica {rank} of multi-worker-")
    assert took < 20
    assert nodes.run(train_again) == 2


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


def test_results_of_all_sizes_come_in_their_order(nodes: Nodes) -> None:
    assert nodes.run(results_of_all_sizes) == [[0, 1, 2, 3]] * 45
