"""Bundles for the processes of a strategy: in a placement group of its own, or in the group that captures its actor."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import final

import ray
from ray.util.placement_group import PlacementGroup, get_current_placement_group, placement_group_table
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from raydist.cluster.placement import describe_amounts
from raydist.compat.ray_internals import free_resources
from raydist.core.errors import DeadlineExceededError, FailedPreconditionError

_LOOK_S = 0.1


@final
@dataclass(frozen=True, slots=True)
class Reservation:
    """The bundles of a placement group that a strategy uses, in the order of its request.

    Attributes:
        group: The placement group.
        bundles: The index of each bundle in the group. One bundle may hold several requests.
        hosts: The node id of each bundle.
        is_captured: True if the group captures the children of the actor or task that this process runs: whoever made
            the group removes it.
    """

    group: PlacementGroup
    bundles: tuple[int, ...]
    hosts: tuple[str, ...]
    is_captured: bool = False

    @classmethod
    def of_group(cls, group: PlacementGroup) -> Reservation:
        """Return the reservation of all bundles of a group that was placed."""
        hosts = _hosts_of(group)
        return cls(group, tuple(range(len(hosts))), hosts)

    def present_host(self, bundle: int) -> str:
        """Return the node id of a bundle now: Ray moves bundles of a lost node to another one."""
        return _hosts_of(self.group)[self.bundles[bundle]]


def captured_group() -> PlacementGroup | None:
    """Return the placement group that captures the children of the actor or task of this process, if there is one."""
    captures = ray.get_runtime_context().should_capture_child_tasks_in_placement_group
    group: PlacementGroup | None = get_current_placement_group() if captures else None
    return group


def on_node(node_id: str) -> tuple[str, NodeAffinitySchedulingStrategy | PlacementGroupSchedulingStrategy]:
    """Return the node and Ray's scheduling strategy of an actor that takes no resources.

    Without a captured group, the node is `node_id`. Else the actor and its children are in the group: in a bundle on
    that node or, where the group has none, in the first bundle.
    """
    group = captured_group()
    if group is None:
        return node_id, NodeAffinitySchedulingStrategy(node_id, soft=False)
    hosts = _hosts_of(group)
    bundle = hosts.index(node_id) if node_id in hosts else 0
    return hosts[bundle], PlacementGroupSchedulingStrategy(group, bundle, placement_group_capture_child_tasks=True)


def reserve_within(
    group: PlacementGroup, wanted: Sequence[Mapping[str, float]], *, strategy: str, timeout_s: float
) -> Reservation:
    """Find room for a request in a placement group. Blocks until resources in use are free.

    Raises:
        FailedPreconditionError: The group can never hold the request.
        DeadlineExceededError: Others use the group for longer than `timeout_s` seconds.
    """
    hosts = _hosts_of(group)
    sizes = [dict(bundle) for bundle in group.bundle_specs]
    asked = f"Asked: {describe_amounts(wanted)} ({strategy}). The group has: {describe_amounts(sizes)}."
    if assign(wanted, sizes, hosts, strategy) is None:
        raise FailedPreconditionError(
            f"The placement group of this actor, which captures its children, must have room for {len(wanted)} "
            f"replicas and servers, but it is too small. {asked} Give the group more bundles, ask for less, or make "
            "the actor with placement_group_capture_child_tasks=False: then the strategy reserves its own resources."
        )
    deadline = time.monotonic() + timeout_s
    while (found := assign(wanted, _free_in(group, hosts), hosts, strategy)) is None:
        if time.monotonic() > deadline:
            raise DeadlineExceededError(
                f"The placement group of this actor must have free room for {len(wanted)} replicas and servers within "
                f"{timeout_s:g} s (Timeouts.start_s), but the actor and others use it. {asked} Close other strategies "
                "of the group, or give it more bundles."
            )
        time.sleep(_LOOK_S)
    return Reservation(group, found, tuple(hosts[bundle] for bundle in found), is_captured=True)


def has_room(group: PlacementGroup, wanted: Sequence[Mapping[str, float]]) -> bool:
    """Return True if a placement group has room for a request now."""
    hosts = _hosts_of(group)
    return assign(wanted, _free_in(group, hosts), hosts, "PACK") is not None


def assign(
    wanted: Sequence[Mapping[str, float]], free: Sequence[Mapping[str, float]], hosts: Sequence[str], strategy: str
) -> tuple[int, ...] | None:
    """Choose a bundle for each request; None if they do not fit.

    Args:
        wanted: The resources of each request.
        free: The free resources of each bundle.
        hosts: The node of each bundle.
        strategy: Ray's placement strategy. STRICT_PACK uses the bundles of one node, STRICT_SPREAD a node for each
            request; others fill the bundles in order.

    >>> free, hosts = [{"CPU": 0.0}, {"CPU": 1.0}, {"CPU": 2.0}], ["a", "a", "b"]
    >>> assign([{"CPU": 1.0}] * 2, free, hosts, "PACK"), assign([{"CPU": 1.0}] * 2, free, hosts, "STRICT_PACK")
    ((1, 2), (2, 2))
    >>> assign([{"CPU": 1.0}] * 2, free, hosts, "STRICT_SPREAD"), assign([{"CPU": 3.0}], free, hosts, "PACK")
    ((1, 2), None)
    """
    for allowed in _allowed(hosts, strategy):
        left = [dict(bundle) for bundle in free]
        chosen: list[int] = []
        for request in wanted:
            used = {hosts[bundle] for bundle in chosen} if strategy == "STRICT_SPREAD" else set()
            fitting = (bundle for bundle in allowed if hosts[bundle] not in used and _fits(request, left[bundle]))
            bundle = next(fitting, None)
            if bundle is None:
                break
            chosen.append(bundle)
            left[bundle] = {name: left[bundle][name] - request.get(name, 0.0) for name in left[bundle]}
        else:
            return tuple(chosen)
    return None


def _allowed(hosts: Sequence[str], strategy: str) -> Iterator[Sequence[int]]:
    if strategy != "STRICT_PACK":
        yield range(len(hosts))
        return
    for host in dict.fromkeys(hosts):
        yield [bundle for bundle, where in enumerate(hosts) if where == host]


def _fits(request: Mapping[str, float], free: Mapping[str, float]) -> bool:
    return all(amount <= free.get(name, 0.0) + 1e-9 for name, amount in request.items())


def _free_in(group: PlacementGroup, hosts: Sequence[str]) -> list[dict[str, float]]:
    """Return the free resources of each bundle: Ray names them `CPU_group_<bundle>_<group>`."""
    free = free_resources()
    ending = group.id.hex()
    return [
        {name: free.get(host, {}).get(f"{name}_group_{bundle}_{ending}", 0.0) for name in group.bundle_specs[bundle]}
        for bundle, host in enumerate(hosts)
    ]


def _hosts_of(group: PlacementGroup) -> tuple[str, ...]:
    nodes = placement_group_table(group)["bundles_to_node_id"]
    return tuple(nodes[index] for index in range(len(nodes)))
