"""SyncWithBackups: which gradients make up a step. Pure; server 0 decides."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, final

__all__ = ["Accepted", "Quorum"]


@final
@dataclass(frozen=True, slots=True)
class Accepted:
    """A worker's gradient is part of a step.

    Attributes:
        step: Which.
        completes: How many gradients it has.
    """

    step: int
    completes: int


@final
class Quorum:
    """Collects arrivals for one step after the other.

    A step is decided as soon as all workers that hold a closure but `num_backups` have arrived, at least one: by an
    arrival, or because somebody who was waited for ends its closure or dies.

    Args:
        num_backups: How many workers are not waited for.

    >>> quorum = Quorum(num_backups=1)
    >>> for worker in (0, 1, 2):
    ...     quorum.begin(worker)
    >>> [quorum.arrive(worker, step=0) for worker in (2, 0, 1)]
    ['waiting', 'accepted', 'late']
    >>> quorum.accepted(2)
    Accepted(step=0, completes=2)
    """

    def __init__(self, num_backups: int) -> None:
        self._num_backups = num_backups
        self._holding: set[int] = set()
        self._arrived: set[int] = set()
        self._accepted: dict[int, Accepted] = {}  # the last of each worker
        self.step = 0

    def begin(self, worker: int) -> None:
        """A worker holds a closure: it counts."""
        self._holding.add(worker)

    def end(self, worker: int) -> None:
        """A worker holds no closure any more, or is dead: nobody waits for it. What it has arrived with stays."""
        self._holding.discard(worker)
        self._decide()

    def forget(self, worker: int) -> None:
        """A worker is dead: it counts no more, and what it has arrived with is no part of an undecided step."""
        self._arrived.discard(worker)
        self._accepted.pop(worker, None)
        self.end(worker)

    def arrive(self, worker: int, step: int) -> Literal["waiting", "accepted", "late"]:
        """A worker has a gradient of this step. Awaited again, it answers the same, or what has become of it since."""
        accepted = self._accepted.get(worker)
        if accepted is not None and accepted.step == step:
            return "accepted"
        if step < self.step:
            return "late"
        self._arrived.add(worker)
        self._decide()
        return "waiting" if worker in self._arrived else "accepted"

    def accepted(self, worker: int) -> Accepted | None:
        """The last step that this worker is part of."""
        return self._accepted.get(worker)

    def decide(self) -> Accepted | None:
        """Let what has arrived be the present step; None where nothing has."""
        if not self._arrived:
            return None
        decided = Accepted(self.step, len(self._arrived))
        self._accepted |= dict.fromkeys(self._arrived, decided)
        self._arrived.clear()
        self.step += 1
        return decided

    def _decide(self) -> None:
        if len(self._arrived) >= max(1, len(self._holding | self._arrived) - self._num_backups):
            self.decide()
