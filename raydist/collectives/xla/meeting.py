"""Ranks tell each other what they are about to do, and go on once all of them are about to do the same.

A collective of XLA that not all chips enter never ends, and cannot be stopped. So nobody enters one before all have
said that they will; and whether those that have said so do it, even where one of them gives up meanwhile, is decided
once, in the store.
"""

from __future__ import annotations

import time
from typing import final

from torch._C._distributed_c10d import Store

from raydist.collectives.base import Membership
from raydist.collectives.rendezvous import peek
from raydist.collectives.translation import mismatch_error
from raydist.collectives.xla.neighbour import Neighbour

__all__ = ["XlaMeeting"]

_POLL_S = 0.0005
_LONGEST_POLL_S = 0.01


@final
class XlaMeeting:
    """One rank's view of the calls of all.

    Each rank's call stands in one of two entries that it writes in turn. Who writes its third call has seen everyone's
    second, so everyone has seen the first: no entry is lost, and the store does not grow.

    Args:
        store: Of this generation of the group.
        membership: This rank's place.
        neighbour: The next rank.
    """

    def __init__(self, store: Store, membership: Membership, neighbour: Neighbour) -> None:
        self._store = store
        self._membership = membership
        self._neighbour = neighbour
        self._number = 0
        self._calls: dict[int, str] = {}
        self._decided = ""  # the decision before the present one

    def announce(self, call: str) -> None:
        """Say what this rank is about to do."""
        self._number += 1
        self._calls = {self._membership.rank: call}
        self._store.set(self._key(self._membership.rank), f"{self._number} {call}")

    def all_agree(self, deadline: float) -> bool:
        """Whether all ranks have said that they do the same; waits until then, or until `deadline`.

        Raises:
            CollectiveMismatchError: On every rank alike: they are about to do different things.
            ConnectionError: A rank that has not said anything is gone.
        """
        poll_s = _POLL_S
        while not self._look():
            if self._neighbour.rank not in self._calls and self._neighbour.is_gone() and not self._look():
                raise ConnectionError(f"connection closed by rank {self._neighbour.rank}.")
            if time.monotonic() >= deadline:
                return False
            time.sleep(poll_s)
            poll_s = min(2 * poll_s, _LONGEST_POLL_S)
        calls = [self._calls[rank] for rank in range(self._membership.world_size)]
        if any(call != calls[0] for call in calls):
            raise mismatch_error(calls)
        return True

    def decide(self, *, go: bool) -> bool:
        """Whether all ranks go on with what they have said: as the first that was asked has answered."""
        mine = f"{self._number} {'go' if go else 'no'}"
        decision = self._store.compare_set("decision", self._decided, mine)
        if decision != f"{self._number} go".encode():
            return False
        self._decided = decision.decode()
        return True

    def _look(self) -> bool:
        for rank in range(self._membership.world_size):
            if rank not in self._calls:
                number, _, call = (peek(self._store, self._key(rank)) or b"0 ").decode().partition(" ")
                if int(number) == self._number:
                    self._calls[rank] = call
        return len(self._calls) == self._membership.world_size

    def _key(self, rank: int) -> str:
        return f"call/{self._number % 2}/{rank}"
