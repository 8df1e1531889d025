"""Statistics of a parameter server."""

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
        server: Number of the server.
        pulls: Reads answered with tensors.
        pushes: Applied changes: gradients, and values written by hand.
        repeated: Changes that the server knew already, and did not apply again.
        fenced: Refused changes of dead workers.
        late: SyncWithBackups: gradients that came after their step, and were dropped.
        steps: SyncWithBackups: steps applied.
        bytes_pulled: Bytes of tensors in answers.
        bytes_pushed: Bytes of tensors in changes.
        bytes_held: Bytes of slices, embedding tables and optimizer states.
        apply_seconds: Time spent applying changes.
        staleness: By number of changes between a gradient's read and its application, the number of such gradients.
        version: Number of changes of the values.
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
    """The running counts of a server; see `ServerStats`."""

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
        """Count a gradient that was applied this many versions after its read."""
        self.staleness[versions] = self.staleness.get(versions, 0) + 1

    def stats(self, server: int, *, bytes_held: int, version: int) -> ServerStats:
        """Return the present counts."""
        return ServerStats(
            server,
            *(self.pulls, self.pushes, self.repeated, self.fenced, self.late, self.steps),
            *(self.bytes_pulled, self.bytes_pushed, bytes_held, self.apply_seconds),
            dict(sorted(self.staleness.items())),
            version,
        )
