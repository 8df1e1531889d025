"""How the members of a group of several hosts meet: all of them, then those of each host, then the lanes."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import final

from raydist.collectives.backend import Declined
from raydist.collectives.base import Membership
from raydist.collectives.bulletin import Bulletin
from raydist.collectives.hierarchical.other_hosts import OtherHosts
from raydist.collectives.hierarchical.plan import HostPlan
from raydist.collectives.rendezvous.signed_store import SignedStore
from raydist.collectives.rendezvous.store import connect_store
from raydist.collectives.shared_memory.awaited_members import AwaitedMembers
from raydist.collectives.shared_memory.generation import SharedGeneration
from raydist.collectives.shared_memory.joining import Meeting
from raydist.collectives.shared_memory.segment import Segment
from raydist.collectives.wires.wires import Wires

__all__ = ["HostsMeeting", "Joined"]

_YES = "yes"


@final
@dataclass(frozen=True, slots=True)
class Joined:
    """What a member has after it has joined."""

    generation: SharedGeneration
    others: OtherHosts


@final
class HostsMeeting:
    """The members of one generation on their way into it.

    Args:
        membership: This rank's place.
        plan: Who shares memory with whom.
        timeout_s: The limit of :meth:`join`.
    """

    def __init__(self, membership: Membership, plan: HostPlan, timeout_s: float) -> None:
        self._membership = membership
        self._plan = plan
        self._timeout_s = timeout_s
        self._awaited = AwaitedMembers(membership, timeout_s)
        self._layout = plan.layout(plan.host)
        self._home = Meeting(plan.at_home(membership), timeout_s, self._layout)

    def join(self) -> Joined:
        """Blocking: until all members have come and are connected, at most the limit.

        Raises:
            Declined: The ranks of some host share no memory; on every rank alike.
            DeadlineExceededError: A member did not come; the message says which.
        """
        deadline = time.monotonic() + self._timeout_s
        store = connect_store(self._membership, self._timeout_s)
        bulletin = Bulletin(store, self._membership)
        self._awaited.arrive(bulletin)
        segment = self._meet_at_home(store, deadline)
        try:
            return self._connect(store, bulletin, segment)
        except BaseException:
            segment.close()
            raise

    def abort(self) -> None:
        """End :meth:`join` with an error. May come from another thread."""
        self._awaited.abort()
        self._home.abort()

    def _meet_at_home(self, store: SignedStore, deadline: float) -> Segment:
        segment: Segment | None = None
        answer = _YES
        try:
            segment = self._home.join()
        except Declined as reason:
            answer = str(reason)
        store.set(f"home/{self._membership.rank}", answer)
        try:
            refusals = self._refusals(store, deadline)
            if refusals or segment is None:
                raise Declined("; ".join(refusals))
        except BaseException:
            if segment is not None:
                segment.close()
            raise
        return segment

    def _refusals(self, store: SignedStore, deadline: float) -> list[str]:
        refusals = []
        for members in self._plan.hosts:
            for rank in members:
                answer = self._awaited.answer(store, f"home/{rank}", rank, deadline)
                if answer != _YES and rank == members[0]:
                    refusals.append(f"host of rank {rank}: {answer}")
        return refusals

    def _connect(self, store: SignedStore, bulletin: Bulletin, segment: Segment) -> Joined:
        membership, plan = self._membership, self._plan
        wires = Wires(membership, self._timeout_s)
        others = OtherHosts(membership, plan, bulletin, wires)
        generation = SharedGeneration(plan.at_home(membership), segment, self._timeout_s, others, self._layout)
        peers = [rank for rank in plan.lane_ranks if rank != membership.rank]
        try:
            wires.start(store, peers, settled=generation.board.ring, check=self._awaited.check)
        except BaseException:
            wires.close()
            raise
        return Joined(generation, others)
