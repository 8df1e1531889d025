"""SyncWithBackups on server 0, which decides for all servers: workers with a closure, and gradients of steps.

Single-threaded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import final

from raydist.parameter_servers.consistency import Consistency, SyncWithBackups
from raydist.parameter_servers.requests import PushKey, Sender
from raydist.parameter_servers.serving.quorum import Accepted, Quorum

__all__ = ["ArrivedGradient", "Turns"]


@final
@dataclass(frozen=True, slots=True)
class ArrivedGradient:
    """The arrival of a worker's gradient.

    Attributes:
        sender: The worker.
        change: Closure and index of the gradient's key.
        step: The step of the gradient.
    """

    sender: Sender
    change: tuple[int, int]
    step: int


@final
class Turns:
    """The workers that hold a closure, and the steps that their gradients make up.

    Args:
        consistency: The consistency model.
    """

    def __init__(self, consistency: Consistency) -> None:
        self._quorum = Quorum(consistency.num_backups) if isinstance(consistency, SyncWithBackups) else None
        self._present: dict[int, tuple[int, int]] = {}  # generation and closure of each worker
        self._arrivals: dict[int, ArrivedGradient] = {}  # the last of each worker
        self._left_behind: dict[Sender, Accepted] = {}  # steps of which dead workers were part
        self._owed: set[tuple[int, int]] = set()  # changes of dead workers that some servers may have

    @property
    def in_steps(self) -> bool:
        """True if workers arrive, as under SyncWithBackups."""
        return self._quorum is not None

    @property
    def open_step(self) -> int:
        """The step for which arrivals are accepted; present values may still be of the step before."""
        return 0 if self._quorum is None else self._quorum.step

    def begin(self, sender: Sender, closure: int) -> None:
        """Record that a worker begins a closure; repeated, it counts once."""
        if self._present.get(sender.worker) == (sender.generation, closure):
            return
        self._present[sender.worker] = sender.generation, closure
        if self._quorum is not None:
            self._quorum.begin(sender.worker)

    def end(self, sender: Sender) -> None:
        """Record that a worker holds no closure any more."""
        self._leave(sender, lambda quorum: quorum.end(sender.worker))

    def fence(self, sender: Sender) -> Accepted | None:
        """Remove a dead worker; return the last step for which its gradient was accepted, pushed or not."""
        generation, _ = self._present.get(sender.worker, (sender.generation, -1))
        if generation > sender.generation:  # a later generation is at work: this is a repetition
            return self._left_behind.get(sender)
        arrival = self._arrivals.pop(sender.worker, None)
        accepted = None if arrival is None else self.accepted(arrival)
        if arrival is not None and accepted is not None:
            self._left_behind[sender] = accepted
            self._owed.add(arrival.change)
        self._leave(sender, lambda quorum: quorum.forget(sender.worker))
        return self._left_behind.get(sender)

    def arrive(self, sender: Sender, key: PushKey, step: int) -> ArrivedGradient | None:
        """Record a worker's gradient of a step; None if it is late. Repeated, it counts once."""
        if self._quorum is None:
            return None
        change = key.closure, key.index
        arrival = self._arrivals.get(sender.worker)
        if arrival is None or (arrival.sender, arrival.change) != (sender, change):
            self._owed = {owed for owed in self._owed if owed[0] >= key.finished_below}
            arrival = ArrivedGradient(sender, change, max(step, self._quorum.step) if change in self._owed else step)
        if self._quorum.arrive(sender.worker, arrival.step) == "late":
            return None
        self._arrivals[sender.worker] = arrival
        return arrival

    def accepted(self, arrival: ArrivedGradient) -> Accepted | None:
        """Return the step of which an arrival is part, once decided."""
        accepted = None if self._quorum is None else self._quorum.accepted(arrival.sender.worker)
        return accepted if accepted is not None and accepted.step == arrival.step else None

    def decide(self) -> Accepted | None:
        """Decide the present step with the arrivals so far; None if there are none."""
        return None if self._quorum is None else self._quorum.decide()

    def _leave(self, sender: Sender, leave: Callable[[Quorum], None]) -> None:
        self._present.pop(sender.worker, None)
        if self._quorum is not None:
            leave(self._quorum)
