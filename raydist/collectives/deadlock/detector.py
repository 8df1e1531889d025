"""Find out within seconds that ranks wait for each other, instead of after the limit of a collective.

A rank that waits asks all others, through the rendezvous store, where they stand. Each has a thread that looks twice a
second whether somebody asks, so that a rank answers which is at work, or has nothing to do; one that
has come through a collective since its last look need not: all others were there. Of many that wait the lowest asks,
and judges for all: else the answers read would be the square of the ranks. Nothing of this is on the way of a
collective that goes well.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping
from typing import final

from torch._C._distributed_c10d import Store

from raydist.collectives.base import Membership
from raydist.collectives.deadlock.diagnosis import diagnose
from raydist.collectives.deadlock.status import Progress, RankStatus
from raydist.collectives.rendezvous import connect_store, peek, write
from raydist.errors import CollectiveMismatchError, RaydistError

__all__ = ["DeadlockDetector"]

_LOOK_S = 0.5
_PATIENCE = 3  # looks without a question of a lower rank, after which a rank asks for itself
_CONNECT_S = 30.0
_QUESTION, _VERDICT = "deadlock/question", "deadlock/verdict"


@final
class DeadlockDetector:
    """One rank's part in it, for one generation of a group.

    Args:
        membership: The rank's place, with the address of the store.
        progress: What it is doing.
        end: Called, from the detector's thread, when the group can not go on: must end the rank's collectives.
    """

    def __init__(self, membership: Membership, progress: Progress, end: Callable[[], None]) -> None:
        self._membership = membership
        self._progress = progress
        self._end = end
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, name="raydist-deadlock-detector", daemon=True)
        self._store: Store | None = None
        self._seen: bytes | None = None
        self._left_to_others = 0
        self._mine = progress.look()
        self._waits = progress.num_waits
        self._before: Mapping[int, RankStatus] = {}

    def start(self) -> DeadlockDetector:
        """Connect and look from now on."""
        self._store = connect_store(self._membership, _CONNECT_S)
        self._thread.start()
        return self

    def close(self) -> None:
        """Look no more. May be called twice."""
        self._stop.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(_CONNECT_S)

    def verdict(self) -> CollectiveMismatchError | None:
        """Why the group was ended, where a detector of it has ended it."""
        with contextlib.suppress(RuntimeError):  # the store is gone: nobody can say
            said = peek(self._store, _VERDICT) if self._store is not None else None
            if said is not None:
                return CollectiveMismatchError(
                    "All replicas must call the same collectives, equally often, and here some wait for others that "
                    f"will not come: {said.decode()}. Look for a branch that only some replicas take: a skipped "
                    "backward(), another number of closure calls, one all_reduce more."
                )
        return None

    def _work(self) -> None:
        with contextlib.suppress(RuntimeError, RaydistError):  # the store is gone, and with it the group's owner
            while not self._stop.wait(_LOOK_S):
                self._look()

    def _look(self) -> None:
        store = self._store
        before, mine = self._mine, self._progress.look()
        self._mine = mine
        waits, self._waits = self._waits, self._progress.num_waits
        if store is None or waits != self._waits:  # asking cost 64 ranks and their driver 100 ms of CPU a second
            self._before = {}
            return
        stuck = bool(mine.waits_in) and mine.events == before.events
        asker = self._asker(store)
        lower_asks = asker is not None and asker < self._membership.rank
        self._left_to_others = _PATIENCE if lower_asks else self._left_to_others - 1
        asks = stuck and self._left_to_others <= 0
        if asks:
            self._seen = f"{self._membership.rank} {mine.look}".encode()
            store.set(_QUESTION, self._seen.decode())
        if asks or asker is not None:
            write(store, self._place(self._membership.rank), mine.encode())
        if asks:
            self._judge(store, mine)
        else:
            self._before = {}

    def _asker(self, store: Store) -> int | None:
        """The rank that has asked since the last look; None where nobody has."""
        question = peek(store, _QUESTION)
        new, self._seen = question != self._seen, question
        return int(question.split()[0]) if new and question is not None else None

    def _judge(self, store: Store, mine: RankStatus) -> None:
        answers = {rank: peek(store, self._place(rank)) for rank in range(self._membership.world_size)}
        now = {rank: RankStatus.decode(data) for rank, data in answers.items() if data is not None}
        found = diagnose(self._before, now)
        self._before = now
        if found is not None and self._progress.events == mine.events and peek(store, _VERDICT) is None:
            store.set(_VERDICT, found)
            self._end()

    @staticmethod
    def _place(rank: int) -> str:
        return f"deadlock/status/{rank}"
