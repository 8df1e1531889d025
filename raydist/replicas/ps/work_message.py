"""Messages between driver and worker: closures, each with the log entries that come before it, and their results."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, final

from raydist.actors.portable_errors import PortableError
from raydist.core.values import PerReplica
from raydist.mirroring.messages import StepPayload
from raydist.replicas.results import StepResult
from raydist.replicas.step import PartSource, StepHeader, address_parts
from raydist.replicas.step_message import SentObjects


@final
@dataclass(frozen=True, slots=True)
class ClosureLabel:
    """The identity of a closure: the same when the closure runs again.

    Attributes:
        number: Unique in the strategy, and rising.
        finished_below: All closures with a lower number have ended.
        seen: By server, the version of its values that the driver knew when it scheduled the closure. The closure must
            see these versions or newer ones.
    """

    number: int
    finished_below: int = 0
    seen: Sequence[int] = ()


@final
@dataclass(frozen=True, slots=True)
class LogEntry:
    """A change by the driver that every worker makes before closures scheduled after it.

    Attributes:
        payload: The program's changes of mirrored objects, without a step.
        plan: Placement of new variables; None if there are none.
        values: By name, pickled functions that make the worker's per-worker values.
        dropped: Names of per-worker values that nothing uses any more.
    """

    payload: StepPayload | None = None
    plan: Any = None
    values: tuple[tuple[str, bytes], ...] = ()
    dropped: tuple[str, ...] = ()

    def packed(self) -> bytes:
        """Return the entry as bytes."""
        return pickle.dumps(self, pickle.HIGHEST_PROTOCOL)

    @staticmethod
    def unpacked(data: bytes) -> LogEntry:
        """Return the entry that `packed` made into these bytes."""
        entry: LogEntry = pickle.loads(data)
        return entry


@final
@dataclass(frozen=True, slots=True, eq=False)
class PlannedWork:
    """A closure as the driver holds it until it ends.

    Attributes:
        number: See `ClosureLabel`.
        header: Pickle of the `StepHeader`: it has the arguments as they were when the closure was scheduled.
        parts: The PerReplica arguments.
        seen: See `ClosureLabel`.
        after: Number of log entries that come before the closure.
        epoch: Number of errors that the program had been told when it scheduled the closure.
    """

    number: int
    header: bytes
    parts: tuple[PerReplica, ...] = ()
    seen: tuple[int, ...] = ()
    after: int = 0
    epoch: int = 0

    @property
    def num_bytes(self) -> int:
        """Return the approximate size of the closure in a message."""
        return len(self.header) + 200 * len(self.parts)


@final
@dataclass(frozen=True, slots=True)
class WorkItem:
    """One closure for one worker.

    Attributes:
        label: Identifies the closure.
        epoch: See `PlannedWork`.
        header: See `PlannedWork`.
        sources: Where the worker finds the PerReplica arguments.
        entries: Packed log entries that come before the closure and that the worker has not received.
    """

    label: ClosureLabel
    epoch: int
    header: bytes
    sources: tuple[PartSource, ...]
    entries: tuple[bytes, ...] = ()

    def step(self, generation: int) -> StepHeader:
        """Return the step to run, for a worker in this generation."""
        header: StepHeader = pickle.loads(self.header)
        return header.in_group(generation, self.sources)


@final
@dataclass(frozen=True, slots=True)
class WorkMessage:
    """Some closures for one worker, in order. New objects of the object store travel beside the message.

    Attributes:
        items: The closures.
        objects: Numbers of the objects to which the sources refer, see `KeptObjects`.
        used: By name of a per-worker iterator, the number of batches that ended closures are known to have used.
    """

    items: tuple[WorkItem, ...]
    objects: tuple[int, ...] = ()
    used: Mapping[str, int] = field(default_factory=dict)


@final
@dataclass(frozen=True, slots=True)
class ClosureResult:
    """The outcome of one closure.

    Attributes:
        result: The packed return value; None after an error.
        error: The error that the closure raised.
        cancelled: The closure did not begin, because an earlier one raised.
    """

    result: StepResult | None = None
    error: PortableError | None = None
    cancelled: bool = False


@final
@dataclass(frozen=True, slots=True, eq=False)
class WorkResult:
    """A worker's answer to a message (implements only what a group's result needs of `values.Leaves`).

    Attributes:
        results: Outcomes in the order of the closures.
        told: See `WorkerRules.told`.
        remarks: Warnings for the program.
        seconds: Duration of all closures together.
        error: None: a worker's answer is never an error as a whole.
        drawn: By name of a per-worker iterator, the number of batches that ended closures have drawn.
    """

    results: tuple[ClosureResult, ...]
    told: tuple[int, ...] = ()
    remarks: tuple[str, ...] = ()
    seconds: float = 0.0
    error: None = None
    drawn: Mapping[str, int] = field(default_factory=dict)


def address_work(
    works: Iterable[tuple[PlannedWork, Sequence[bytes]]],
    sent: SentObjects,
    *,
    finished_below: int,
    used: Mapping[str, int] | None = None,
) -> tuple[WorkMessage, list[Any]]:
    """Return the message for a worker, and the object refs to send along.

    Args:
        finished_below: See `ClosureLabel`.
        used: See `WorkMessage`.
    """
    refs: dict[Any, int] = {}
    items = tuple(
        WorkItem(
            ClosureLabel(work.number, finished_below, work.seen),
            work.epoch,
            work.header,
            address_parts(work.parts, 0, padding=False, refs=refs),
            tuple(entries),
        )
        for work, entries in works
    )
    numbers, travelling = sent.send(refs)
    return WorkMessage(items, numbers, dict(used or {})), travelling
