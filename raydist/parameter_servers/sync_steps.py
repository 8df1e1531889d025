"""SyncWithBackups: the choice of the gradients that make up each step, on server 0 for all servers. Single-threaded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from raydist.parameter_servers.requests import PushKey, Sender


@final
@dataclass(slots=True)
class Arrival:
    """A worker's gradient that is ready to be pushed."""

    sender: Sender
    change: tuple[int, int]  # closure and index of the gradient's key
    step: int  # the step of the gradient
    completes: int = 0  # number of gradients in the step; 0 until this is decided


@final
class SyncSteps:
    """The workers that hold a closure, and the gradients that make up one step after the other.

    A step is decided as soon as all workers that hold a closure but `num_backups` have arrived, at least one: by an
    arrival, or because an awaited worker ends its closure or dies.

    >>> steps, workers = SyncSteps(num_backups=1), [Sender(number, 0) for number in range(3)]
    >>> for number, worker in enumerate(workers):
    ...     steps.begin(worker, closure=number)
    >>> first = steps.arrive(workers[2], PushKey(2, 0), step=0)
    >>> first.completes
    0
    >>> steps.arrive(workers[0], PushKey(0, 0), step=0).completes, first.completes
    (2, 2)
    >>> steps.arrive(workers[1], PushKey(1, 0), step=0)  # late
    """

    def __init__(self, num_backups: int) -> None:
        # The undecided step, for which arrivals are accepted. Present values may still be of the step before.
        self.step = 0
        self._num_backups = num_backups
        self._holding: dict[int, tuple[int, int]] = {}  # generation and closure of each worker
        self._arrivals: dict[int, Arrival] = {}  # the last of each worker
        self._waiting: set[int] = set()  # workers that have arrived for the undecided step
        self._of_dead: dict[Sender, Arrival] = {}  # gradients of dead workers that are part of steps
        self._owed: set[tuple[int, int]] = set()  # changes of dead workers that some servers may have

    def begin(self, sender: Sender, closure: int) -> None:
        """Record that a worker begins a closure; repeated, it counts once."""
        self._holding[sender.worker] = sender.generation, closure

    def end(self, sender: Sender) -> None:
        """Record that a worker holds no closure any more. Its arrival stays."""
        self._holding.pop(sender.worker, None)
        self._decide_if_complete()

    def fence(self, sender: Sender) -> Arrival | None:
        """Remove a dead worker; return its last gradient that is part of a step, pushed or not."""
        generation, _ = self._holding.get(sender.worker, (sender.generation, -1))
        if generation <= sender.generation:  # else a later generation is at work: this is a repetition
            arrival = self._arrivals.pop(sender.worker, None)
            if arrival is not None and arrival.completes:
                self._of_dead[sender] = arrival
                self._owed.add(arrival.change)
            self._waiting.discard(sender.worker)
            self.end(sender)
        return self._of_dead.get(sender)

    def arrive(self, sender: Sender, key: PushKey, step: int) -> Arrival | None:
        """Record a worker's gradient of a step; None if it is late. Repeated, it counts once."""
        change = key.closure, key.index
        arrival = self._arrivals.get(sender.worker)
        if arrival is not None and (arrival.sender, arrival.change) == (sender, change):
            return arrival
        self._owed = {owed for owed in self._owed if owed[0] >= key.finished_below}
        arrival = Arrival(sender, change, max(step, self.step) if change in self._owed else step)
        if arrival.step < self.step:
            return None
        self._arrivals[sender.worker] = arrival
        self._waiting.add(sender.worker)
        self._decide_if_complete()
        return arrival

    def decide(self) -> int:
        """Decide the step with the arrivals so far, and return their number; 0 decides nothing."""
        arrived, self._waiting = self._waiting, set()
        for worker in arrived:
            self._arrivals[worker].completes = len(arrived)
        self.step += bool(arrived)
        return len(arrived)

    def _decide_if_complete(self) -> None:
        if len(self._waiting) >= max(1, len(self._holding.keys() | self._waiting) - self._num_backups):
            self.decide()
