"""What a server has done so far, in numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import final

__all__ = ["ServerMeter", "ServerStats"]


@final
@dataclass(frozen=True, slots=True)
class ServerStats:
    """Counts of one parameter server since it started.

    Attributes:
        server: Its number.
        pulls: Reads that it has answered with tensors; what workers read from its memory is not in it.
        pushes: Changes that it has applied: gradients, and values written by hand.
        repeated: Changes that it knew already, and did not apply again.
        fenced: Changes of workers that count as dead.
        late: SyncWithBackups: gradients that came after their step, and were dropped.
        steps: SyncWithBackups: steps applied.
        bytes_pulled: Of tensors in answers.
        bytes_pushed: Of tensors in changes.
        bytes_held: Of slices, embedding tables and what optimizers remember.
        apply_seconds: Spent in applying changes.
        staleness: How many changes were applied between a gradient's read and its application, and how often.
        version: How often values have been changed.
    """

    server: int
    pulls: int = 0
    pushes: int = 0
    repeated: int = 0
    fenced: int = 0
    late: int = 0
    steps: int = 0
    bytes_pulled: int = 0
    bytes_pushed: int = 0
    bytes_held: int = 0
    apply_seconds: float = 0.0
    staleness: Mapping[int, int] = field(default_factory=dict)
    version: int = 0


@final
@dataclass(slots=True)
class ServerMeter:
    """The same while it is counted; see `ServerStats`."""

    pulls: int = 0
    pushes: int = 0
    repeated: int = 0
    fenced: int = 0
    late: int = 0
    steps: int = 0
    bytes_pulled: int = 0
    bytes_pushed: int = 0
    apply_seconds: float = 0.0
    staleness: dict[int, int] = field(default_factory=dict)

    def note_staleness(self, versions: int) -> None:
        """A gradient was applied, so many changes after it was read."""
        self.staleness[versions] = self.staleness.get(versions, 0) + 1

    def stats(self, server: int, *, bytes_held: int, version: int) -> ServerStats:
        """As they are now."""
        return ServerStats(
            server,
            *(self.pulls, self.pushes, self.repeated, self.fenced, self.late, self.steps),
            *(self.bytes_pulled, self.bytes_pushed, bytes_held, self.apply_seconds),
            dict(sorted(self.staleness.items())),
            version,
        )
