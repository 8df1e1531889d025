"""From devices to running replicas: what to ask the cluster for (pure), and asking for it."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import final

from raydist.actors.replica import ReplicaActors
from raydist.cluster import Cluster, Node, place
from raydist.collectives.rendezvous import RendezvousStore
from raydist.context.devices import Device
from raydist.options import Timeouts
from raydist.replicas.group import ReplicaGroup
from raydist.replicas.step import ReplicaSetup

__all__ = ["LaunchPlan", "launch", "plan_one_node"]

_BUCKET_BYTES = (
    25 * 1024 * 1024
)  # DistributedDataParallel's default: enough for full bandwidth, small enough to overlap

log = logging.getLogger("raydist")


@final
@dataclass(frozen=True, slots=True)
class LaunchPlan:
    """What to start.

    Attributes:
        setups: One per replica, in rank order.
        bundles: The Ray resources of each.
        placement: Ray's placement strategy for the bundles.
        env: Environment variables of the replicas' processes.
        store_host: Address on this machine at which the replicas reach the driver's rendezvous store.
        node_id: The node of the replicas.
    """

    setups: tuple[ReplicaSetup, ...]
    bundles: tuple[Mapping[str, float], ...]
    placement: str
    env: Mapping[str, str]
    store_host: str
    node_id: str


def plan_one_node(
    name: str,
    devices: Sequence[Device],
    cluster: Cluster,
    node: Node,
    *,
    resources: Mapping[str, float] | None,
    timeouts: Timeouts,
    backend: str = "auto",
) -> LaunchPlan:
    """One replica per device, all on `node`'s kind of machine, its cores shared between them.

    `backend` names the collective backend that connects them.
    """
    on_gpu = devices[0].kind == "GPU"
    wanted = dict(resources) if resources else ({"GPU": 1.0} if on_gpu else cluster.cpu_replica_resources())
    threads = max(1, node.num_cpus // len(devices))
    setups = tuple(
        ReplicaSetup(
            name=name,
            rank=rank,
            world_size=len(devices),
            # Ray shows each actor its own GPU only, as number 0.
            device="cuda:0" if on_gpu else "cpu",
            worker_devices=tuple(map(str, devices)),
            num_threads=threads,
            collective_timeout_s=timeouts.collective_s,
            bucket_bytes=_BUCKET_BYTES,
            backend=backend,
        )
        for rank in range(len(devices))
    )
    here = cluster.nodes[0]
    return LaunchPlan(
        setups=setups,
        bundles=(wanted,) * len(devices),
        placement="STRICT_PACK",
        env={"OMP_NUM_THREADS": str(threads)},
        store_host="127.0.0.1" if len(cluster.nodes) == 1 else here.address,
        node_id=node.node_id,
    )


def warn_if_crowded(num_replicas: int, node: Node) -> None:
    """One line where replicas outnumber cores: correct, but slower than fewer replicas."""
    if num_replicas > node.num_cpus:
        log.warning(
            "%d CPU replicas share the %d cores of this machine: results are the same, but fewer would be faster.",
            num_replicas,
            node.num_cpus,
        )


def launch(plan: LaunchPlan, timeouts: Timeouts) -> ReplicaGroup:
    """Reserve, start the actors' processes, and return before they answer (`ReplicaGroup.start` waits for that).

    Blocks until the reservation is made (limit: `Timeouts.start_s`).
    """
    reservation = place(plan.bundles, strategy=plan.placement, timeout_s=timeouts.start_s)
    actors = ReplicaActors(reservation, plan.bundles, name=plan.setups[0].name, env=plan.env)
    return ReplicaGroup(plan.setups, actors, RendezvousStore(plan.store_host), timeouts)
