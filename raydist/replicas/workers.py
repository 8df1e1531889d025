"""How many workers of how many devices, and where they are to run: decided from what the cluster has. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from raydist.cluster import Cluster, Node
from raydist.context.devices import Device, parse_devices
from raydist.errors import InvalidArgumentError
from raydist.options import CommunicationOptions, Timeouts
from raydist.replicas.launch import LaunchPlan, make_setups

__all__ = ["choose_placement", "choose_workers", "plan_workers"]

_MARK = 0.001  # of the resource "node:<address>", of which each node has 1: asking for it takes nothing else


def choose_workers(
    nodes: Sequence[Node], num_workers: int | None, devices_per_worker: int | Sequence[Any] | Any
) -> tuple[int, tuple[Device, ...]]:
    """The number of workers and the devices of each, where the user has left them open.

    One worker a node that has GPUs, or CPUs where no node has any GPU. All workers have as many devices as the smallest
    of their nodes has; more workers than nodes share what these have.

    Raises:
        InvalidArgumentError: Something was left open, and no node has a device; or a GPU is named that no node has.

    >>> nodes = [Node("a", "10.0.0.1", {"CPU": 8, "GPU": 4}), Node("b", "10.0.0.2", {"CPU": 8, "GPU": 2})]
    >>> count, devices = choose_workers([*nodes, Node("c", "10.0.0.3", {"CPU": 64})], None, None)
    >>> count, [str(device) for device in devices]
    (2, ['GPU:0', 'GPU:1'])
    """
    most_gpus = max((node.num_gpus for node in nodes), default=0)
    if devices_per_worker is not None:
        devices = parse_devices(devices_per_worker, gpus_on_node=most_gpus)
        _require_named(devices, most_gpus)
        return num_workers or len(_with_devices(nodes, devices[0].kind)), devices
    kind = "GPU" if most_gpus else "CPU"
    counts = _with_devices(nodes, kind)
    count = num_workers or len(counts)
    crowd = math.ceil(count / len(counts))
    return count, parse_devices(max(1, counts[:count][-1] // crowd), gpus_on_node=most_gpus)


def _require_named(devices: Sequence[Device], most_gpus: int) -> None:
    """Ray gives a worker as many GPUs as it has devices: one whose number no node has would be another one.

    Where they are more than any node has, larger nodes may come: Ray says whether they can.
    """
    last = max(devices, key=lambda device: device.index)
    if last.kind == "GPU" and len(devices) <= most_gpus <= last.index:
        raise InvalidArgumentError(
            f"The devices of a worker must be on its node, but {last} was asked for, and no node has more than "
            f"{most_gpus} GPUs: GPU:0 to GPU:{most_gpus - 1}. Name these, or give their number."
        )


def _with_devices(nodes: Sequence[Node], kind: str) -> list[int]:
    """How many devices of a kind each node has that has any, most first."""
    counts = sorted((node.num_gpus if kind == "GPU" else node.num_cpus for node in nodes), reverse=True)
    if not any(counts):
        raise InvalidArgumentError(
            f"Workers take the {kind}s of the nodes, but none of the {len(nodes)} nodes has any now. Give num_workers "
            "and devices_per_worker (a cluster that grows by itself then adds nodes), or add nodes."
        )
    return [count for count in counts if count]


def choose_placement(bundle: Mapping[str, float], num_workers: int, nodes: Sequence[Node]) -> str:
    """Ray's placement strategy: STRICT_SPREAD has a node for each worker, with SPREAD they share as many as there are.

    They share where fewer nodes than workers are large enough for one, but all fit on these. Where they do not, it is
    for new nodes to come, one for each worker that has none.

    >>> node = Node("a", "10.0.0.1", {"CPU": 4})
    >>> [choose_placement({"CPU": 2}, count, [node]) for count in (1, 2, 3)]
    ['STRICT_SPREAD', 'SPREAD', 'STRICT_SPREAD']
    """
    room = [_times(bundle, node) for node in nodes]
    enough_nodes = sum(count > 0 for count in room) >= num_workers
    return "SPREAD" if not enough_nodes and sum(room) >= num_workers else "STRICT_SPREAD"


def _times(bundle: Mapping[str, float], node: Node) -> float:
    """How often a bundle fits on an empty node."""
    wanted = {name: amount for name, amount in bundle.items() if amount}
    return min((node.resources.get(name, 0) // amount for name, amount in wanted.items()), default=math.inf)


def plan_workers(
    name: str,
    num_workers: int,
    devices: Sequence[Device],
    cluster: Cluster,
    *,
    resources: Mapping[str, float] | None,
    timeouts: Timeouts,
    communication: CommunicationOptions,
    placement: str | None = None,
    addresses: Sequence[str] = (),
) -> LaunchPlan:
    """`num_workers` workers with one replica per device; the replicas of a worker are on one node.

    Args:
        name: The strategy's unique name.
        num_workers: How many.
        devices: Of each worker.
        cluster: What there is now.
        resources: Of one replica; None for the default.
        timeouts: The limit of every wait.
        communication: How replicas communicate.
        placement: Ray's placement strategy; None for :func:`choose_placement`.
        addresses: The node of each worker; empty: any.
    """
    kind = devices[0].kind
    wanted = dict(resources) if resources else cluster.replica_resources(kind)
    bundle = {resource: amount * len(devices) for resource, amount in wanted.items()}
    return LaunchPlan(
        setups=make_setups(
            name,
            tuple(_title(worker, device) for worker in range(num_workers) for device in devices),
            kind=kind,
            per_worker=len(devices),
            num_threads=1,  # until it is known which nodes they are on
            timeouts=timeouts,
            communication=communication,
        ),
        bundles=tuple({**bundle, f"node:{address}": _MARK} for address in addresses) or (bundle,) * num_workers,
        placement=placement or choose_placement(bundle, num_workers, cluster.nodes),
        resources=wanted,
        store_host=cluster.store_host(),
        node_id=next((node for node in cluster.nodes if _times(bundle, node) >= 1), cluster.nodes[0]).node_id,
        num_workers=num_workers,
    )


def _title(worker: int, device: Device) -> str:
    """TensorFlow's name of a worker's device."""
    return f"/job:worker/replica:0/task:{worker}/device:{device}"
