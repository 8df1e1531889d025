"""The coordinator's record of one worker."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import final

from raydist.replicas.step_message import SentObjects

__all__ = ["WorkerRecord", "WorkerState"]


@final
class WorkerState(enum.Enum):
    """State of a worker's process. A STARTED worker becomes READY once all workers' versions are known to agree."""

    STARTING = enum.auto()
    STARTED = enum.auto()
    READY = enum.auto()
    GONE = enum.auto()


@final
@dataclass
class WorkerRecord:
    """The state of one worker.

    Attributes:
        number: Number of the worker.
        generation: Number of earlier starts.
        state: State of the process; only a READY worker gets closures.
        compared: True once the worker has reported its versions, now or in an earlier generation.
        deadline: Time (monotonic) by which the worker must have started.
        starts: Number of starts since the worker last completed a message.
        under_way: Number of messages that the worker has not answered.
        objects: Objects of the object store that the worker has.
        drawn: See `WorkResult`.
        drawn_before: `drawn` at the worker's last start.
    """

    number: int
    generation: int = 0
    state: WorkerState = WorkerState.STARTING
    compared: bool = False
    deadline: float = 0.0
    starts: int = 0
    under_way: int = 0
    objects: SentObjects = field(default_factory=SentObjects)
    drawn: dict[str, int] = field(default_factory=dict)
    drawn_before: dict[str, int] = field(default_factory=dict)

    @property
    def is_ready(self) -> bool:
        """True if the worker can be sent closures."""
        return self.state is WorkerState.READY
