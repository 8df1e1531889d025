"""Setting up the relays of replicas on other hosts than the driver's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ray

from raydist.actors.relayed_hub import RelayedHub

__all__ = ["open_relays"]


def open_relays(replicas: Sequence[Any], nodes: Sequence[str], within_s: float) -> RelayedHub | None:
    """Have the last replica of each node pass on what all of the node are sent: the first has most to do otherwise.

    Args:
        replicas: Handles of the actors (see `ReplicaHost`), in rank order.
        nodes: Where each is.
        within_s: The limit of each of three calls.

    Returns:
        The driver's hub; None where processes of a node cannot share memory.

    Raises:
        RayError: A replica is gone, or did not answer in time.
    """
    hosts = ranks_by_node(nodes)
    relays = [replicas[ranks[-1]] for ranks in hosts]
    asked = [relay.open_relay.remote(len(ranks)) for relay, ranks in zip(relays, hosts, strict=True)]
    tickets = [ticket for some in ray.get(asked, timeout=within_s) for ticket in some]
    ranks = [rank for ranks in hosts for rank in ranks]
    if len(tickets) < len(ranks):
        return None
    opened = [replicas[rank].open_channel.remote(ticket) for rank, ticket in zip(ranks, tickets, strict=True)]
    if not all(ray.get(opened, timeout=within_s)):
        return None
    ray.get([relay.begin_relay.remote() for relay in relays], timeout=within_s)
    return RelayedHub(
        hosts,
        carry=lambda host, number, messages: relays[host].carry.remote(number, messages).future(),
        collect=lambda host: relays[host].collect.remote().future(),
    )


def ranks_by_node(nodes: Sequence[str]) -> list[list[int]]:
    """The ranks that are on each node, in the order of their first ones.

    >>> ranks_by_node(["a", "b", "a"])
    [[0, 2], [1]]
    """
    found: dict[str, list[int]] = {}
    for rank, node in enumerate(nodes):
        found.setdefault(node, []).append(rank)
    return list(found.values())
