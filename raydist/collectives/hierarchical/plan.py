"""Who of a group shares memory with whom, and who speaks for whom between hosts. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import final

from raydist.collectives.base import Membership
from raydist.collectives.shared_memory.layout import Layout

__all__ = ["HostPlan", "rounds"]


@final
@dataclass(frozen=True, slots=True)
class HostPlan:
    """The ranks of each host, as one rank sees them. Made by :meth:`of`.

    The first rank of a host is its leader. The k-th ranks of all hosts are lane k, as far as every host has one: each
    lane carries its slice of a large tensor.

    Attributes:
        hosts: The ranks of each host in ascending order; hosts in the order of their first ranks, the same everywhere.
        host: The index of this rank's host.
        place: This rank's index within its host.
    """

    hosts: tuple[tuple[int, ...], ...]
    host: int
    place: int

    @staticmethod
    def of(membership: Membership) -> HostPlan:
        """The plan for one member, whose membership knows the hosts.

        >>> plan = HostPlan.of(Membership("g", 0, rank=3, world_size=4, hosts=("a", "b", "a", "a")))
        >>> plan.hosts, plan.host, plan.place, plan.num_lanes, plan.lane
        (((0, 2, 3), (1,)), 0, 2, 1, None)
        """
        ranks: dict[str, list[int]] = {}
        for rank, name in enumerate(membership.hosts):
            ranks.setdefault(name, []).append(rank)
        hosts = tuple(map(tuple, ranks.values()))
        host = next(index for index, members in enumerate(hosts) if membership.rank in members)
        return HostPlan(hosts, host, hosts[host].index(membership.rank))

    @property
    def members(self) -> tuple[int, ...]:
        """The ranks of this host."""
        return self.hosts[self.host]

    @property
    def leads(self) -> bool:
        """Whether this rank speaks for its host."""
        return self.place == 0

    @property
    def num_lanes(self) -> int:
        return min(map(len, self.hosts))

    @property
    def lane(self) -> int | None:
        """This rank's lane, None where it has none."""
        return self.place if self.place < self.num_lanes else None

    @property
    def lane_ranks(self) -> tuple[int, ...]:
        """The ranks of this rank's lane, by host; its own where it has no lane."""
        if self.lane is None:
            return (self.members[self.place],)
        return tuple(members[self.lane] for members in self.hosts)

    def host_of(self, rank: int) -> int:
        """The index of a rank's host."""
        return next(index for index, members in enumerate(self.hosts) if rank in members)

    def receiver(self, rank: int, host: int) -> int:
        """The rank of another host that takes what `rank` sends to all of it; they share that work.

        >>> plan = HostPlan(((0, 1, 2), (3, 4)), 0, 0)
        >>> [plan.receiver(rank, 1) for rank in (0, 1, 2)]
        [3, 4, 3]
        """
        members = self.hosts[host]
        return members[self.hosts[self.host_of(rank)].index(rank) % len(members)]

    def layout(self, host: int) -> Layout:
        """How the memory of a host's ranks is laid out."""
        return Layout.of(len(self.hosts[host]), roomy=True)

    def at_home(self, membership: Membership) -> Membership:
        """This rank's place among those of its host, in a group of their own."""
        return replace(
            membership,
            group=f"{membership.group}/host-{self.host}",
            rank=self.place,
            world_size=len(self.members),
            hosts=(),
        )


def rounds(num_hosts: int, host: int) -> list[tuple[int, int]]:
    """Whom a host sends to and receives from, round by round: in none of them two send to one.

    >>> rounds(3, 0), rounds(3, 1)
    ([(1, 2), (2, 1)], [(2, 0), (0, 2)])
    """
    return [((host + step) % num_hosts, (host - step) % num_hosts) for step in range(1, num_hosts)]
