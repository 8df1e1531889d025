"""What a coordinator notes of one worker."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import final

from raydist.replicas.step_message import SentObjects

__all__ = ["WorkerRecord", "WorkerState"]


@final
class WorkerState(enum.Enum):
    """What a worker's process is up to. One that has STARTED is READY once it is known that all fit together."""

    STARTING = enum.auto()
    STARTED = enum.auto()
    READY = enum.auto()
    GONE = enum.auto()


@final
@dataclass
class WorkerRecord:
    """One worker.

    Attributes:
        number: Its own.
        generation: How often it was started before.
        state: Whether it can be sent something.
        compared: Whether it has said, now or in an earlier generation, which versions it runs.
        deadline: Until when it must have started.
        starts: Since a closure was done there.
        under_way: Messages that it has not answered.
        objects: Of the store, that it has.
        drawn: See `WorkResult`.
        drawn_before: The same when it was started.
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
        """Whether it can be sent something."""
        return self.state is WorkerState.READY
