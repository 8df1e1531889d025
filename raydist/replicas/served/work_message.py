"""What a worker is sent, and what it answers: closures, each with what the driver has done before it. Pure."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, final

from raydist.actors.portable_errors import PortableError
from raydist.mirroring.shipment import Shipment
from raydist.replicas.results import StepResult
from raydist.replicas.served.worker_rules import ClosureLabel
from raydist.replicas.step import PartSource, StepHeader, address_parts
from raydist.replicas.step_message import SentObjects
from raydist.values import PerReplica

__all__ = ["ClosureResult", "LogEntry", "PlannedWork", "WorkItem", "WorkMessage", "WorkResult", "address_work"]


@final
@dataclass(frozen=True, slots=True)
class LogEntry:
    """Something that every worker must have done before what was scheduled after it.

    Attributes:
        shipment: What the driver's program did to mirrored objects, without a step.
        plan: Where new variables lie; None where there are none.
        values: By name, what functions may reach on a worker: pickles of functions that make it.
        dropped: Names that nothing will reach any more.
    """

    shipment: Shipment | None = None
    plan: Any = None
    values: tuple[tuple[str, bytes], ...] = ()
    dropped: tuple[str, ...] = ()

    def packed(self) -> bytes:
        """Its bytes."""
        return pickle.dumps(self, pickle.HIGHEST_PROTOCOL)

    @staticmethod
    def unpacked(data: bytes) -> LogEntry:
        """The entry of which these are the bytes."""
        entry: LogEntry = pickle.loads(data)
        return entry


@final
@dataclass(frozen=True, slots=True, eq=False)
class PlannedWork:
    """A closure as the driver holds it until it has ended.

    Attributes:
        number: See `ClosureLabel`.
        header: Pickle of its `StepHeader`: the arguments are what they were when it was scheduled.
        parts: Its PerReplica arguments.
        seen: See `ClosureLabel`.
        after: How many entries of the log come before it.
        epoch: How many errors had been told when it was scheduled.
    """

    number: int
    header: bytes
    parts: tuple[PerReplica, ...] = ()
    seen: tuple[int, ...] = ()
    after: int = 0
    epoch: int = 0

    @property
    def num_bytes(self) -> int:
        """About how much it adds to a message."""
        return len(self.header) + 200 * len(self.parts)


@final
@dataclass(frozen=True, slots=True)
class WorkItem:
    """One closure for one worker.

    Attributes:
        label: Which it is.
        epoch: See `PlannedWork`.
        header: See `PlannedWork`.
        sources: Where the worker finds its PerReplica arguments.
        entries: Of the log, packed: those that come before the closure and that the worker has not had.
    """

    label: ClosureLabel
    epoch: int
    header: bytes
    sources: tuple[PartSource, ...]
    entries: tuple[bytes, ...] = ()

    def step(self, generation: int) -> StepHeader:
        """The step to run, for a worker that is in this generation."""
        header: StepHeader = pickle.loads(self.header)
        return header.in_group(generation, self.sources)


@final
@dataclass(frozen=True, slots=True)
class WorkMessage:
    """Some closures for one worker, in order. Objects of the store travel beside it, those that it does not keep.

    Attributes:
        items: The closures.
        objects: Numbers of the objects that their sources count, see `KeptObjects`.
        used: By name of a per-worker iterator, how many batches the driver knows to be used for good.
    """

    items: tuple[WorkItem, ...]
    objects: tuple[int, ...] = ()
    used: Mapping[str, int] = field(default_factory=dict)


@final
@dataclass(frozen=True, slots=True)
class ClosureResult:
    """How one closure ended.

    Attributes:
        result: What it returned; None where it raised.
        error: What it raised.
        cancelled: It was not begun, because one before it raised.
    """

    result: StepResult | None = None
    error: PortableError | None = None
    cancelled: bool = False


@final
@dataclass(frozen=True, slots=True, eq=False)
class WorkResult:
    """What a worker answers to a message (implements `values.Leaves` no more than a group's result needs to).

    Attributes:
        results: In the order of the closures.
        told: See `WorkerRules.told`.
        remarks: What the program should be warned of.
        seconds: What the closures took together.
        error: None: a worker's answer is never an error as a whole.
        drawn: By name of a per-worker iterator, how many batches the closures have drawn that have ended.
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
    """A worker's message, and the object refs to send along.

    Args:
        works: The closures, and the entries of the log that come before each.
        sent: What the worker was sent before.
        finished_below: See `ClosureLabel`.
        used: See `WorkMessage`.
    """
    refs: dict[Any, int] = {}
    items = tuple(
        WorkItem(
            ClosureLabel(work.number, finished_below, work.seen),
            work.epoch,
            work.header,
            address_parts(work.parts, 0, stand_in=False, refs=refs),
            tuple(entries),
        )
        for work, entries in works
    )
    numbers, travelling = sent.send(refs)
    return WorkMessage(items, numbers, dict(used or {})), travelling
