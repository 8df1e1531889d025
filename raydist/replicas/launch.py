"""Launch of replicas: planning the resources (does no I/O), reserving them, and starting the actors."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import final

import torch

from raydist.actors.replica import Place, ReplicaActors, ReplicaSlot, console_settings
from raydist.cluster.nodes import NODE_MARK, Cluster, Node, address_for, living_nodes, place, release
from raydist.cluster.reservation import Reservation, captured_group
from raydist.collectives.opening import backends_for, open_communicator
from raydist.collectives.ray_backend import create_group
from raydist.collectives.rendezvous import RendezvousStore
from raydist.context.devices import Device
from raydist.options import CommunicationOptions, Timeouts
from raydist.replicas.group import NewSize, ReplicaGroup
from raydist.replicas.step import ReplicaSetup, with_hosts
from raydist.tpu_slices.inventory import SliceShape
from raydist.tpu_slices.reservation import place_slice

_BUCKET_BYTES = (
    25 * 1024 * 1024
)  # DistributedDataParallel's default: large enough for full bandwidth, small enough to overlap

log = logging.getLogger("raydist")


@final
@dataclass(frozen=True, slots=True)
class LaunchPlan:
    """Resources and setups of the replicas to start."""

    setups: tuple[ReplicaSetup, ...]  # one per replica, in rank order
    # the Ray resources to reserve, one bundle for each replica or for each worker
    bundles: tuple[Mapping[str, float], ...]
    placement: str  # Ray's placement strategy for the bundles
    resources: Mapping[str, float]  # resources of each replica within its bundle
    store_host: str  # address of this machine at which the replicas reach the driver's rendezvous store
    node_id: str  # a node that the replicas may run on, known before the placement
    num_workers: int = 1  # number of workers (nodes)
    tpu_slice: SliceShape | None = None  # the kind of TPU slice whose hosts the bundles are; None without a TPU slice
    per_process: int = 1  # number of consecutive replicas in one process, each in a thread

    @property
    def per_bundle(self) -> int:
        """The number of replicas in each bundle."""
        return len(self.setups) // len(self.bundles)

    def bundle_of(self, setup: ReplicaSetup) -> int:
        """Return the index of a replica's bundle."""
        return setup.rank if len(self.bundles) == len(self.setups) else setup.worker


def plan_one_node(
    name: str,
    devices: Sequence[Device],
    cluster: Cluster,
    node: Node,
    *,
    resources: Mapping[str, float] | None,
    timeouts: Timeouts,
    communication: CommunicationOptions,
) -> LaunchPlan:
    """Plan one replica per device on a machine like `node`; the replicas share its cores."""
    kind = devices[0].kind
    wanted = dict(resources) if resources else cluster.replica_resources(kind)
    return LaunchPlan(
        setups=make_setups(
            name,
            tuple(map(str, devices)),
            kind=kind,
            per_worker=len(devices),
            num_threads=max(1, node.num_cpus // len(devices)),
            timeouts=timeouts,
            communication=communication,
        ),
        bundles=(wanted,) * len(devices),
        placement="STRICT_PACK",
        resources=wanted,
        store_host=cluster.store_host(),
        node_id=node.node_id,
    )


def make_setups(
    name: str,
    worker_devices: tuple[str, ...],
    *,
    kind: str,
    per_worker: int,
    num_threads: int,
    timeouts: Timeouts,
    communication: CommunicationOptions,
) -> tuple[ReplicaSetup, ...]:
    """Return the setup of each replica, for `worker_devices` (device names for the user), worker by worker."""
    backends_for(torch.device({"GPU": "cuda", "TPU": "xla"}.get(kind, "cpu")), communication.implementation)
    return tuple(
        ReplicaSetup(
            name=name,
            rank=rank,
            world_size=len(worker_devices),
            # Ray shows each actor its own GPU only, as number 0.
            device={"GPU": "cuda:0", "TPU": f"xla:{rank % per_worker}"}.get(kind, "cpu"),
            worker_devices=worker_devices,
            num_threads=num_threads,
            collective_timeout_s=communication.timeout_seconds or timeouts.collective_s,
            bucket_bytes=communication.bytes_per_pack or _BUCKET_BYTES,
            backend=communication.implementation,
            compression=communication.compression,
            worker=rank // per_worker,
        )
        for rank in range(len(worker_devices))
    )


def plan_slice(
    name: str, shape: SliceShape, cluster: Cluster, *, timeouts: Timeouts, communication: CommunicationOptions
) -> LaunchPlan:
    """Plan one actor per host of a TPU slice, with one replica for each device of torch_xla on the host."""
    per_host = shape.devices_per_host
    world_size = shape.num_hosts * per_host
    setups = make_setups(
        name,
        tuple(f"TPU:{number}" for number in range(world_size)),
        kind="TPU",
        per_worker=per_host,
        num_threads=1,  # `with_hosts` replaces this once the nodes are known
        timeouts=timeouts,
        communication=communication,
    )
    bundle = {"CPU": 1.0, "TPU": float(shape.chips_per_host)}
    return LaunchPlan(
        setups=setups,
        bundles=(bundle,) * shape.num_hosts,
        placement="STRICT_SPREAD",
        resources=bundle,
        store_host=cluster.store_host(),
        node_id=cluster.nodes[0].node_id,
        num_workers=shape.num_hosts,
        tpu_slice=shape,
        per_process=per_host,
    )


def warn_if_crowded(num_replicas: int, node: Node) -> None:
    """Log one warning if there are more replicas than cores: results are correct, but fewer replicas are faster."""
    if num_replicas > node.num_cpus:
        log.warning(
            "%d CPU replicas share the %d cores of this machine: results are the same, but fewer would be faster.",
            num_replicas,
            node.num_cpus,
        )


def launch(plan: LaunchPlan, timeouts: Timeouts, holder: str) -> ReplicaGroup:
    """Reserve resources and start the actors' processes, without waiting for them (see `ReplicaGroup.start`).

    Blocks until the reservation is made (limit: `Timeouts.start_s`). `holder` names the strategy in messages.
    """
    if plan.tpu_slice is None:
        reservation = place(plan.bundles, strategy=plan.placement, timeout_s=timeouts.start_s, holder=holder)
    else:
        reservation = Reservation.of_group(
            place_slice(plan.tpu_slice, name=plan.setups[0].name, timeout_s=timeouts.start_s)
        )
    try:
        return _start_actors(plan, reservation, timeouts)
    except BaseException:
        release(reservation)
        raise


def _slots(plan: LaunchPlan, setups: Sequence[ReplicaSetup], hosts: Sequence[str]) -> list[ReplicaSlot]:
    return [
        ReplicaSlot(
            bundle=plan.bundle_of(setup),
            resources=plan.resources,
            env={"OMP_NUM_THREADS": str(setup.num_threads), **console_settings()},
            host=setup.host,
            node_id=host,
        )
        for setup, host in zip(setups, hosts, strict=True)
    ]


def resize(
    group: ReplicaGroup,
    plan: LaunchPlan,
    timeouts: Timeouts,
    holder: str,
    *,
    keep: Sequence[int] | None = None,
    reserved: Sequence[Reservation] = (),
) -> None:
    """Change a group to the replicas of a plan: reserve room for further ones, or end some. Blocks.

    If there is no room, nothing has changed.

    Args:
        keep: The ranks that stay; None for the first ones.
        reserved: Room for further replicas that was reserved before; released if it is not used.
    """
    keep = range(min(len(plan.setups), len(group.hosts))) if keep is None else keep
    idle = group.idle_places()
    places = idle[: len(idle) // plan.per_bundle * plan.per_bundle]
    places += [place for each in reserved for place in _places(each, plan)]
    del places[len(plan.setups) - len(keep) :]
    missing = len(plan.setups) - len(keep) - len(places)
    made = list(reserved)
    try:
        if missing:
            bundles = further_bundles(group, plan, missing)
            made.append(place(bundles, strategy=plan.placement, timeout_s=timeouts.start_s, holder=holder))
            places += _places(made[-1], plan)
        hosts = [*(group.hosts[rank] for rank in keep), *(each.host for each in places)]
        setups = _on_hosts(plan, hosts)
        slots = _slots(plan, setups[len(keep) :], hosts[len(keep) :])
        added = [(each, replace(slot, bundle=each.bundle)) for each, slot in zip(places, slots, strict=True)]
        group.resize(NewSize(setups, tuple(hosts), tuple(keep), tuple(added)))
    finally:
        for each in made:
            if not group.holds(each):
                release(each)


def _places(reservation: Reservation, plan: LaunchPlan) -> list[Place]:
    return [Place(reservation, bundle) for bundle in range(len(reservation.bundles)) for _ in range(plan.per_bundle)]


def further_bundles(group: ReplicaGroup, plan: LaunchPlan, num_replicas: int) -> list[Mapping[str, float]]:
    """Return the bundles for further replicas of a group that gets the replicas of a plan."""
    bundle = plan.bundles[-1]
    if plan.placement == "STRICT_PACK" and captured_group() is None:  # on the node of the others
        address = next(node.address for node in living_nodes() if node.node_id == group.hosts[0])
        bundle = {**bundle, f"node:{address}": NODE_MARK}
    return [bundle] * (num_replicas // plan.per_bundle)


def _on_hosts(plan: LaunchPlan, hosts: Sequence[str]) -> tuple[ReplicaSetup, ...]:
    return with_hosts(plan.setups, hosts, {node.node_id: node for node in living_nodes()})


def _start_actors(plan: LaunchPlan, reservation: Reservation, timeouts: Timeouts) -> ReplicaGroup:
    """Start one actor for each process, in the reserved bundles."""
    hosts = tuple(reservation.hosts[plan.bundle_of(setup)] for setup in plan.setups)
    setups = _on_hosts(plan, hosts)
    slots = _slots(plan, setups[:: plan.per_process], hosts[:: plan.per_process])
    failures = setups[0].failures
    actors = ReplicaActors(
        reservation,
        slots,
        name=setups[0].name,
        per_process=plan.per_process,
        num_spares=0 if failures is None else failures.spares,
    )
    store = RendezvousStore(address_for(hosts, plan.store_host))
    # Ray's collective groups have one member a process.
    join = create_group if plan.per_process == 1 else open_communicator
    return ReplicaGroup(setups, actors, store, timeouts, hosts=hosts, join_group=join)
