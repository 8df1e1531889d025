"""Which node's devices a strategy gets: decided from what the nodes have. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from raydist.cluster import Cluster, Node
from raydist.context.devices import Device, parse_devices
from raydist.errors import InvalidArgumentError

__all__ = ["choose_devices"]


def choose_devices(
    wanted: int | Sequence[Any] | Any, cluster: Cluster, *, may_grow: Callable[[], bool]
) -> tuple[Node, tuple[Device, ...]]:
    """The node and its devices for a strategy on one node.

    Args:
        wanted: What the user said; None for all GPUs of the node with most of them, else its cores.
        cluster: What there is.
        may_grow: Whether there may be more: GPUs that an autoscaler may bring are waited for when replicas are placed.

    Raises:
        InvalidArgumentError: `wanted` names no devices, or GPUs that no node has nor will have.

    >>> from raydist.cluster import Node
    >>> cluster = Cluster(False, (Node("a", "10.0.0.1", {"CPU": 8.0, "GPU": 2.0}),))
    >>> [str(device) for device in choose_devices(None, cluster, may_grow=bool)[1]]
    ['GPU:0', 'GPU:1']
    """
    node = cluster.best_node()
    devices = parse_devices(
        node.num_gpus or node.num_cpus or 1 if wanted is None else wanted, gpus_on_node=node.num_gpus
    )
    needed = max(device.index for device in devices) + 1
    if devices[0].kind == "GPU" and needed > node.num_gpus and not may_grow():
        asked = f"{len(devices)} GPUs" if isinstance(wanted, int) else ", ".join(map(str, devices))
        there = "; ".join(f"node {each.address}: {each.num_cpus} CPU, {each.num_gpus} GPU" for each in cluster.nodes)
        raise InvalidArgumentError(
            f"All devices must be there, on one node, but {asked} {'was' if len(devices) == 1 else 'were'} asked for. "
            f"There is: {there}. {_advice(node)}"
        )
    return node, devices


def _advice(node: Node) -> str:
    if not node.num_gpus:
        return 'Name CPUs ("CPU:0", "CPU:1", or a count), or add a node with GPUs (ray start --num-gpus).'
    names = ", ".join(f"GPU:{index}" for index in range(node.num_gpus))
    return f"Leave devices out to take {names}, or name fewer."
