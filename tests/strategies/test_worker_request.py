"""Workers of a multi-worker strategy as resolvers and scaling configurations name them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

import raydist as rd
from raydist.cluster.nodes import Node
from raydist.core.errors import InvalidArgumentError
from raydist.strategies.worker_request import WorkerRequest, assign_hosts

NODES = [Node("a", "10.0.0.1", {}), Node("b", "10.0.0.2", {}), Node("c", "10.0.0.2", {})]


@dataclass(frozen=True)
class Config:
    """The fields of a ray.train.ScalingConfig."""

    num_workers: Any = 2
    use_gpu: bool = False
    resources_per_worker: dict[str, float] | None = None
    placement_strategy: str = "PACK"
    use_tpu: bool = False


def resolver(task: tuple[str, int] | None = None, **jobs: list[str]) -> rd.SimpleClusterResolver:
    return rd.SimpleClusterResolver(rd.ClusterSpec(jobs), *(task or ()))


def test_a_resolver_names_the_workers_chief_first_and_their_devices() -> None:
    found = WorkerRequest().with_resolver(resolver(worker=["b:1", "[fe80::2]:7", "fe80::3"], chief=["a"]))
    assert found.hosts == ("a", "b", "fe80::2", "fe80::3")
    assert (found.num_workers, found.placement, found.devices) == (4, "STRICT_SPREAD", None)
    assert WorkerRequest(devices=3).with_resolver(resolver(worker=["a"])).devices == 3
    with_gpus = rd.SimpleClusterResolver(rd.ClusterSpec({"worker": ["a"]}), num_accelerators={"GPU": 2})
    assert WorkerRequest().with_resolver(with_gpus).devices == ["GPU:0", "GPU:1"]
    assert WorkerRequest(devices=1).with_resolver(with_gpus).devices == 1


ALL = {"chief": ["a:1"], "worker": ["b:1", "c:1"], "evaluator": ["d:1"]}
WRONG: tuple[tuple[Any, dict[str, list[str]], str], ...] = (
    (("worker", 1), ALL, r"as task chief 0 \(a:1\).* is task worker 1\. On the"),
    (("evaluator", 0), ALL, r"as task chief 0 \(a:1\).* is task evaluator 0\. On the"),
    (("worker", 2), {"worker": ["a", "b"]}, r"is task worker 2 \(TF_CONFIG\?\), and of that job there are 2: a, b\."),
    ((None, 1), {"worker": ["a", "b"]}, r"the index 1 alone .*Name its type"),
    (("chief", 0), {"chief": ["a", "b"]}, r"one chief, .* got \['a', 'b'\]\. Make workers"),
    (("worker", 1), {}, r"task worker 1 .*, and no cluster is named\. Name it"),
    (None, {"worker": ["a"], "ps": ["b"]}, r"jobs \"chief\" and \"worker\", got \{'worker': .*'ps'"),
    (None, {"evaluator": ["a"]}, "must have tasks"),
)


def test_tasks_and_jobs_that_are_not_the_chiefs_or_workers_are_errors() -> None:
    for task, jobs, told in WRONG:
        with pytest.raises(InvalidArgumentError, match=told):
            WorkerRequest().with_resolver(resolver(task, **jobs))


def test_two_numbers_of_workers_are_an_error_that_shows_both() -> None:
    with pytest.raises(
        InvalidArgumentError, match=r"it is 3, and the cluster resolver \(TF_CONFIG\?\) names 2: a, b\. Leave"
    ):
        WorkerRequest(num_workers=3).with_resolver(resolver(worker=["a", "b"]))
    with pytest.raises(InvalidArgumentError, match=r"it is 3, and the ScalingConfig has 2\. Leave"):
        WorkerRequest(num_workers=3).with_scaling_config(Config())
    assert WorkerRequest(num_workers=2).with_scaling_config(Config()).num_workers == 2


def test_a_scaling_config_has_a_replica_a_worker() -> None:
    found = WorkerRequest().with_scaling_config(Config(placement_strategy="SPREAD"))
    assert found == WorkerRequest(2, ["CPU:0"], None, "SPREAD")
    found = WorkerRequest().with_scaling_config(Config(use_gpu=True))
    assert found == WorkerRequest(2, ["GPU:0"], None, "PACK")
    found = WorkerRequest().with_scaling_config(Config(use_gpu=True, resources_per_worker={"GPU": 2, "CPU": 4}))
    assert found == WorkerRequest(2, ["GPU:0", "GPU:1"], {"GPU": 1.0, "CPU": 2.0}, "PACK")


def test_rays_own_scaling_config_is_one_and_what_is_none_is_an_error() -> None:
    from ray.train import ScalingConfig

    given = ScalingConfig(num_workers=3, resources_per_worker={"CPU": 0.5}, placement_strategy="STRICT_SPREAD")
    assert WorkerRequest().with_scaling_config(given) == WorkerRequest(3, ["CPU:0"], {"CPU": 0.5}, "STRICT_SPREAD")
    wrong: tuple[tuple[Any, str], ...] = (
        ("grpc://", "must be an rd.ClusterResolver, or .* got 'grpc://'"),
        (Config(num_workers=(1, 4)), r"its number of workers, got Config\(num_workers=\(1, 4\)"),
        (Config(num_workers=0), "its number of workers"),
        (Config(placement_strategy="WIDE"), "placement_strategy of PACK, .*'WIDE'"),
        (Config(use_tpu=True), "must have no TPUs"),
    )
    for other, said in wrong:
        with pytest.raises(InvalidArgumentError, match=said):
            rd.MultiWorkerMirroredStrategy(cluster_resolver=other)


def test_a_host_is_the_node_of_its_address() -> None:
    known = {"one": "10.0.0.1"}
    assert assign_hosts(["10.0.0.2", "one", "10.0.0.2"], NODES, lambda host: known.get(host, host)) == (
        "10.0.0.2",
        "10.0.0.1",
        "10.0.0.2",
    )
    assert assign_hosts([], NODES, str) == ()
    nodes = r"10\.0\.0\.1, 10\.0\.0\.2, 10\.0\.0\.2"
    for hosts, surplus in (
        (["10.0.0.1", "elsewhere"], "elsewhere"),
        (["one", "10.0.0.1"], r"one \(10\.0\.0\.1\), 10\.0\.0\.1"),
    ):
        said = rf"names 2 workers on {', '.join(hosts)}, and the nodes are {nodes}: .* {surplus}\."
        with pytest.raises(InvalidArgumentError, match=said):
            assign_hosts(hosts, NODES, lambda host: known.get(host, host))
