"""Statistics of a parameter server."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import final


@final
@dataclass(slots=True)
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
    staleness: dict[int, int] = field(default_factory=dict)
    version: int = 0
