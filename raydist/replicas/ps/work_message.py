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
    """The identity of a closure: the same when the closure runs again."""

    number: int  # unique in the strategy, and rising
    finished_below: int = 0  # all closures with a lower number have ended
    # By server, the version of its values that the driver knew when it scheduled the closure. The closure must see
    # these versions or newer ones.
    seen: Sequence[int] = ()


@final
@dataclass(frozen=True, slots=True)
class LogEntry:
    """A change by the driver that every worker makes before closures scheduled after it."""

    payload: StepPayload | None = None  # the program's changes of mirrored objects, without a step
    plan: Any = None  # placement of new variables; None if there are none
    values: tuple[tuple[str, bytes], ...] = ()  # by name, pickled functions that make the worker's per-worker values
    dropped: tuple[str, ...] = ()  # names of per-worker values that nothing uses any more

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
    """A closure as the driver holds it until it ends."""

    number: int  # see `ClosureLabel`
    header: bytes  # pickle of the `StepHeader`: it has the arguments as they were when the closure was scheduled
    parts: tuple[PerReplica, ...] = ()  # the PerReplica arguments
    seen: tuple[int, ...] = ()  # see `ClosureLabel`
    after: int = 0  # number of log entries that come before the closure
    epoch: int = 0  # number of errors that the program had been told when it scheduled the closure

    @property
    def num_bytes(self) -> int:
        """Return the approximate size of the closure in a message."""
        return len(self.header) + 200 * len(self.parts)


@final
@dataclass(frozen=True, slots=True)
class WorkItem:
    """One closure for one worker."""

    label: ClosureLabel  # identifies the closure
    epoch: int  # see `PlannedWork`
    header: bytes  # see `PlannedWork`
    sources: tuple[PartSource, ...]  # where the worker finds the PerReplica arguments
    # packed log entries that come before the closure and that the worker has not received
    entries: tuple[bytes, ...] = ()

    def step(self, generation: int) -> StepHeader:
        """Return the step to run, for a worker in this generation."""
        header: StepHeader = pickle.loads(self.header)
        return header.in_group(generation, self.sources)


@final
@dataclass(frozen=True, slots=True)
class WorkMessage:
    """Some closures for one worker, in order. New objects of the object store travel beside the message."""

    items: tuple[WorkItem, ...]  # the closures
    objects: tuple[int, ...] = ()  # numbers of the objects to which the sources refer, see `KeptObjects`
    # by name of a per-worker iterator, the number of batches that ended closures are known to have used
    used: Mapping[str, int] = field(default_factory=dict)


@final
@dataclass(frozen=True, slots=True)
class ClosureResult:
    """The outcome of one closure."""

    result: StepResult | None = None  # the packed return value; None after an error
    error: PortableError | None = None  # the error that the closure raised
    cancelled: bool = False  # the closure did not begin, because an earlier one raised


@final
@dataclass(frozen=True, slots=True, eq=False)
class WorkResult:
    """A worker's answer to a message (implements only what a group's result needs of `values.Leaves`)."""

    results: tuple[ClosureResult, ...]  # outcomes in the order of the closures
    versions: tuple[int, ...] = ()  # see `WorkerRules.versions`
    remarks: tuple[str, ...] = ()  # warnings for the program
    seconds: float = 0.0  # duration of all closures together
    error: None = None  # None: a worker's answer is never an error as a whole
    # by name of a per-worker iterator, the number of batches that ended closures have drawn
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
