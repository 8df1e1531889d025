"""What is asked of a parameter server, and what it answers: plain data, whatever carries it.

A request and its tensors travel apart: the request as a pickle, the tensors as memory. Every tensor is dense,
contiguous and on the CPU; a gradient of some rows is two of them, the rows (int64, counted from the slice's first one)
and their values. Nothing of a request's tensors is kept after it is answered, so they may lie in memory that is used
again. Those of an answer may be the server's own values: copy them before its next request is handled.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, final

from raydist.parameter_servers.slices import ServedSlice

__all__ = [
    "ServerAnswer",
    "Assign",
    "BeginSave",
    "CreateSlices",
    "DropObjects",
    "LocateSlices",
    "Pull",
    "Push",
    "PushKey",
    "ServerRequest",
    "SaveReport",
    "Sender",
    "Statistics",
    "Verdict",
]


Verdict = Literal["applied", "known", "late", "fenced", "done"]
"""What became of a change; see `ServerAnswer.verdict`."""


@final
@dataclass(frozen=True, slots=True)
class Sender:
    """Who asks: a worker as it is since its process started.

    Attributes:
        worker: Its number; -1 is the driver.
        generation: How often the worker was started before. Once a generation is fenced, nothing that it asks changes
            anything any more.
    """

    worker: int
    generation: int


@final
@dataclass(frozen=True, slots=True)
class PushKey:
    """Which of all changes this is: the same when its closure runs again. Applied once on every server.

    Attributes:
        closure: Number of the closure, unique in the strategy and rising.
        index: Which of the closure's changes.
        finished_below: Closures with a lower number have ended for good: their keys need not be remembered.
    """

    closure: int
    index: int
    finished_below: int = 0


class ServerRequest:
    """Anything asked of a server."""

    __slots__ = ()


@final
@dataclass(frozen=True, slots=True)
class CreateSlices(ServerRequest):
    """Have these slices; tensors: their values, in this order. Known numbers are overwritten."""

    slices: tuple[ServedSlice, ...]


@final
@dataclass(frozen=True, slots=True)
class DropObjects(ServerRequest):
    """Let go of what the program has dropped: nobody asks for it any more. What is not known is passed over.

    Attributes:
        slices: Numbers of slices.
        handles: Of optimizers and tables.
    """

    slices: tuple[int, ...]
    handles: tuple[int, ...]


@final
@dataclass(frozen=True, slots=True)
class LocateSlices(ServerRequest):
    """Say where the slices lie, for workers of the same host; answer: `value` is a `SlicesAddress`."""


@final
@dataclass(frozen=True, slots=True)
class Pull(ServerRequest):
    """Give present values, never half of one update and half of another; tensors of the answer: in this order.

    Attributes:
        slices: Their numbers.
        sender: The worker that reads, so that its death ends the wait for `at_least_step`; None for the driver.
        unless: A version: where the server still has that one, nothing is sent and the answer has no tensors.
        at_least_step: Under SyncWithBackups: wait until that step was applied.
    """

    slices: tuple[int, ...]
    sender: Sender | None = None
    unless: int = -1
    at_least_step: int = 0


@final
@dataclass(frozen=True, slots=True)
class Push(ServerRequest):
    """Apply gradients by an optimizer; tensors: for each slice one ("dense") or two ("rows": int64 rows, values).

    Attributes:
        sender: Who pushes.
        key: Which change it is.
        optimizer: Handle of the optimizer.
        slices: Numbers of the slices that have a gradient.
        forms: Of each.
        tables: Handles of embedding tables, whose rows and values are the last tensors, two for each.
        options: Of the optimizer's groups as the worker has them now; None where they are as told last.
        read_version: The version of this server's values that the gradients were computed from.
        step: Under SyncWithBackups the step it is for; -1 else.
        completes: Under SyncWithBackups: how many gradients make up that step, as `Arrive` was answered; 0 else.
        pull: Slices whose values the answer is to have, as a `Pull` after it would.
    """

    sender: Sender
    key: PushKey
    optimizer: int
    slices: tuple[int, ...]
    forms: tuple[Literal["dense", "rows"], ...]
    tables: tuple[int, ...] = ()
    options: tuple[Mapping[str, Any], ...] | None = None
    read_version: int = 0
    step: int = -1
    completes: int = 0
    pull: tuple[int, ...] = ()


@final
@dataclass(frozen=True, slots=True)
class Assign(ServerRequest):
    """Write values that a step, or the driver, gave variables by hand; tensors: one for each slice.

    Attributes:
        sender: Who writes.
        key: Which change it is.
        slices: Numbers of the slices.
        adds: Whether each tensor is added to the value (counters), or replaces it.
    """

    sender: Sender
    key: PushKey
    slices: tuple[int, ...]
    adds: tuple[bool, ...]


@final
@dataclass(frozen=True, slots=True)
class BeginSave(ServerRequest):
    """Copy this server's part of a checkpoint, and write it beside all else; tensors: others that it is to write.

    Attributes:
        order: What a `SliceSaver` takes.
    """

    order: Any


@final
@dataclass(frozen=True, slots=True)
class SaveReport(ServerRequest):
    """Say what has become of a save; answer: `value` is what `SliceSaver.report` gives."""

    token: str


@final
@dataclass(frozen=True, slots=True)
class Statistics(ServerRequest):
    """What this server has done so far; answer: `value` is a `ServerStats`."""


@final
@dataclass(frozen=True, slots=True)
class ServerAnswer:
    """What a server says to a request. Its tensors travel apart, as a request's do.

    Attributes:
        version: Of the server's values: how often they were changed.
        verdict: Of a change: "applied" (or waiting for its step's others), "known" (applied before), "late"
            (SyncWithBackups: dropped), "fenced" (dropped: another generation goes on). "done" for all else.
        step: SyncWithBackups: the step that reads are of now.
        completes: See `Arrive`, `Finish` and `FenceWorker`.
        value: What was asked for, where it is no tensor.
    """

    version: int = 0
    verdict: Verdict = "done"
    step: int = 0
    completes: int = 0
    value: Any = None
