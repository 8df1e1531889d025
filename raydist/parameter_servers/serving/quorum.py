"""SyncWithBackups: the choice of the gradients that make up a step, on server 0."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, final

__all__ = ["Accepted", "Quorum"]


@final
@dataclass(frozen=True, slots=True)
class Accepted:
    """The acceptance of a worker's gradient for a step.

    Attributes:
        step: Number of the step.
        completes: Number of gradients in the step.
    """

    step: int
    completes: int


@final
class Quorum:
    """Collects arrivals of gradients for one step after the other.

    A step is decided as soon as all workers that hold a closure but `num_backups` have arrived, at least one: by an
    arrival, or because an awaited worker ends its closure or dies.

    Args:
        num_backups: Number of workers for which no step waits.

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
        """Count a worker, which holds a closure now."""
        self._holding.add(worker)

    def end(self, worker: int) -> None:
        """Stop waiting for a worker that holds no closure any more, or is dead. Its arrival stays."""
        self._holding.discard(worker)
        self._decide()

    def forget(self, worker: int) -> None:
        """Remove a dead worker, and its arrival for an undecided step."""
        self._arrived.discard(worker)
        self._accepted.pop(worker, None)
        self.end(worker)

    def arrive(self, worker: int, step: int) -> Literal["waiting", "accepted", "late"]:
        """Record a worker's gradient of a step. Repeated, it returns the same, or the present outcome."""
        accepted = self._accepted.get(worker)
        if accepted is not None and accepted.step == step:
            return "accepted"
        if step < self.step:
            return "late"
        self._arrived.add(worker)
        self._decide()
        return "waiting" if worker in self._arrived else "accepted"

    def accepted(self, worker: int) -> Accepted | None:
        """Return the last step of which this worker is part."""
        return self._accepted.get(worker)

    def decide(self) -> Accepted | None:
        """Decide the present step with the arrivals so far; None if there are none."""
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
