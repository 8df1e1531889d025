"""Requests to a parameter server, and its answers: plain data, independent of the transport.

A request and its tensors travel apart: the request as a pickle, the tensors as memory. Every tensor is dense,
contiguous and on the CPU; a gradient of some rows is two tensors, the rows (int64, counted from the slice's first row)
and their values. A server keeps none of a request's tensors after the answer, so their memory may be reused. Tensors of
an answer may be the server's own values: copy them before the server handles its next request.
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
"""The outcome of a change; see `ServerAnswer.verdict`."""


@final
@dataclass(frozen=True, slots=True)
class Sender:
    """The sender of a request: one generation of a worker.

    Attributes:
        worker: Number of the worker; -1 is the driver.
        generation: Number of earlier starts of the worker. Once a generation is fenced, servers refuse its changes.
    """

    worker: int
    generation: int


@final
@dataclass(frozen=True, slots=True)
class PushKey:
    """The identity of a change: the same when its closure runs again. Every server applies the change once.

    Attributes:
        closure: Number of the closure, unique in the strategy and rising.
        index: Number of the change within the closure.
        finished_below: All closures with a lower number have ended: servers may forget their keys.
    """

    closure: int
    index: int
    finished_below: int = 0


class ServerRequest:
    """Base class of all requests."""

    __slots__ = ()


@final
@dataclass(frozen=True, slots=True)
class CreateSlices(ServerRequest):
    """Create slices; tensors: their values, in this order. Slices with known numbers are overwritten."""

    slices: tuple[ServedSlice, ...]


@final
@dataclass(frozen=True, slots=True)
class DropObjects(ServerRequest):
    """Drop objects that the program has dropped and that nobody asks for any more. Unknown objects are ignored.

    Attributes:
        slices: Numbers of the slices.
        handles: Handles of the optimizers and tables.
    """

    slices: tuple[int, ...]
    handles: tuple[int, ...]


@final
@dataclass(frozen=True, slots=True)
class Pull(ServerRequest):
    """Read present values, never half of one update and half of another; tensors of the answer: in this order.

    Attributes:
        slices: Numbers of the slices.
        sender: The reading worker, so that its death ends the wait for `at_least_step`; None for the driver.
        unless: A version: if the server still has this version, the answer has no tensors.
        at_least_step: Under SyncWithBackups: wait until this step was applied.
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
        sender: The pushing worker.
        key: Key of the change.
        optimizer: Handle of the optimizer.
        slices: Numbers of the slices that have a gradient.
        forms: Form of each gradient.
        tables: Handles of embedding tables; their rows and values are the last tensors, two for each table.
        options: Present options of the optimizer's groups; None: unchanged.
        read_version: The version of this server's values that the gradients were computed from.
        step: Under SyncWithBackups the step of the gradients; -1 otherwise.
        completes: Under SyncWithBackups the number of gradients in that step, from the answer to `Arrive`; 0 otherwise.
        pull: Slices whose new values the answer contains, as if a `Pull` followed.
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
        sender: The writing worker.
        key: Key of the change.
        slices: Numbers of the slices.
        adds: For each tensor, True to add it to the value (counters), False to replace the value.
    """

    sender: Sender
    key: PushKey
    slices: tuple[int, ...]
    adds: tuple[bool, ...]


@final
@dataclass(frozen=True, slots=True)
class BeginSave(ServerRequest):
    """Copy this server's part of a checkpoint, and write the copy in the background; tensors: further ones to write.

    Attributes:
        order: An order for the `SliceSaver`.
    """

    order: Any


@final
@dataclass(frozen=True, slots=True)
class SaveReport(ServerRequest):
    """Return the state of a save; answer: `value` is the result of `SliceSaver.report`."""

    token: str


@final
@dataclass(frozen=True, slots=True)
class Statistics(ServerRequest):
    """Return the server's statistics; answer: `value` is a `ServerStats`."""


@final
@dataclass(frozen=True, slots=True)
class ServerAnswer:
    """A server's answer to a request. Its tensors travel apart, like a request's.

    Attributes:
        version: Version of the server's values: the number of changes so far.
        verdict: Outcome of a change: "applied" (or waiting for its step's others), "known" (applied before), "late"
            (SyncWithBackups: dropped), "fenced" (dropped: another generation goes on). "done" for other requests.
        step: SyncWithBackups: the step of the present values.
        completes: See `Arrive`, `Finish` and `FenceWorker`.
        value: The result of a request, if it is no tensor.
    """

    version: int = 0
    verdict: Verdict = "done"
    step: int = 0
    completes: int = 0
    value: Any = None
