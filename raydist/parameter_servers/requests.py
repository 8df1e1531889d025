"""Requests to a parameter server, and its answers: plain data, independent of the transport.

A request and its tensors travel apart: the request as a pickle, the tensors as memory. Every tensor is dense and on the
CPU; a gradient of some rows is two tensors, the rows (int64, counted from the slice's first row) and their values. A
server keeps none of a request's tensors after the answer. Tensors of an answer may be the server's own values: the
transport copies them before the server handles its next request.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, final

from raydist.parameter_servers.slices import PsSlice

Verdict = Literal["applied", "known", "late", "fenced", "done"]
"""The outcome of a change; see `ServerAnswer.verdict`."""


@final
@dataclass(frozen=True, slots=True)
class Sender:
    """The sender of a request: one generation of a worker."""

    worker: int  # number of the worker; -1 is the driver
    generation: int  # Number of earlier starts of the worker. Once a generation is fenced, servers refuse its changes.


@final
@dataclass(frozen=True, slots=True)
class PushKey:
    """The identity of a change: the same when its closure runs again. Every server applies the change once."""

    closure: int  # number of the closure, unique in the strategy and rising
    index: int  # number of the change within the closure
    finished_below: int = 0  # all closures with a lower number have ended: servers may forget their keys


class ServerRequest:
    """Base class of all requests."""

    __slots__ = ()


@final
@dataclass(frozen=True, slots=True)
class CreateSlices(ServerRequest):
    """Create slices; tensors: their values, in this order. Slices with known numbers are overwritten."""

    slices: tuple[PsSlice, ...]


@final
@dataclass(frozen=True, slots=True)
class DropObjects(ServerRequest):
    """Drop objects that the program has dropped and that nobody asks for any more. Unknown objects are ignored."""

    slices: tuple[int, ...]
    handles: tuple[int, ...]  # handles of the optimizers and tables


@final
@dataclass(frozen=True, slots=True)
class Pull(ServerRequest):
    """Read present values, never half of one update and half of another; tensors of the answer: in this order."""

    slices: tuple[int, ...]
    # the reading worker, so that its death ends the wait for `at_least_step`; None for the driver
    sender: Sender | None = None
    unless: int = -1  # a version: if the server still has this version, the answer has no tensors
    at_least_step: int = 0  # under SyncWithBackups: wait until this step was applied


@final
@dataclass(frozen=True, slots=True)
class Push(ServerRequest):
    """Apply gradients by an optimizer; tensors: for each slice one ("dense") or two ("rows": int64 rows, values)."""

    sender: Sender
    key: PushKey
    optimizer: int
    slices: tuple[int, ...]  # numbers of the slices that have a gradient
    forms: tuple[Literal["dense", "rows"], ...]  # form of each gradient
    # handles of embedding tables; their rows and values are the last tensors, two for each table
    tables: tuple[int, ...] = ()
    options: tuple[Mapping[str, Any], ...] | None = None  # present options of the optimizer's groups; None: unchanged
    read_version: int = 0  # the version of this server's values that the gradients were computed from
    step: int = -1  # under SyncWithBackups the step of the gradients; -1 otherwise
    # under SyncWithBackups the number of gradients in that step, from the answer to `Arrive`; 0 otherwise
    completes: int = 0
    pull: tuple[int, ...] = ()  # slices whose new values the answer contains, as if a `Pull` followed


@final
@dataclass(frozen=True, slots=True)
class Assign(ServerRequest):
    """Write values that a step, or the driver, gave variables by hand; tensors: one for each slice."""

    sender: Sender
    key: PushKey
    slices: tuple[int, ...]
    adds: tuple[bool, ...]  # for each tensor, True to add it to the value (counters), False to replace the value


@final
@dataclass(frozen=True, slots=True)
class BeginSave(ServerRequest):
    """Copy this server's part of a checkpoint, and write the copy in the background; tensors: further ones to write."""

    order: Any  # an order for the `ServerSaver`


@final
@dataclass(frozen=True, slots=True)
class SaveReport(ServerRequest):
    """Return the state of a save; answer: `value` is the result of `ServerSaver.report`."""

    token: str


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


@final
@dataclass(frozen=True, slots=True)
class Statistics(ServerRequest):
    """Return the server's statistics; answer: `value` is a `ServerStats`."""


@final
@dataclass(frozen=True, slots=True)
class ServerAnswer:
    """A server's answer to a request. Its tensors travel apart, like a request's."""

    version: int = 0  # version of the server's values: the number of changes so far
    # Outcome of a change: "applied" (or waiting for its step's others), "known" (applied before), "late"
    # (SyncWithBackups: dropped), "fenced" (dropped: another generation goes on). "done" for other requests.
    verdict: Verdict = "done"
    step: int = 0  # SyncWithBackups: the step of the present values
    completes: int = 0  # see `Arrive`, `Finish` and `FenceWorker`
    value: Any = None  # the result of a request, if it is no tensor


@final
@dataclass(frozen=True, slots=True)
class BeginClosure(ServerRequest):
    """SyncWithBackups, server 0 only: a worker begins a closure, so steps wait for its gradient.

    `step` of the answer is the step whose values the worker must read at least (`Pull.at_least_step`): gradients of
    earlier values would be late.
    """

    sender: Sender
    closure: int


@final
@dataclass(frozen=True, slots=True)
class EndClosure(ServerRequest):
    """SyncWithBackups, server 0 only: a worker has ended its closure and holds no other. No step waits for it."""

    sender: Sender
    closure: int


@final
@dataclass(frozen=True, slots=True)
class Arrive(ServerRequest):
    """SyncWithBackups, server 0 only: a worker has gradients of `step`, the step of the values they come from.

    The server answers once it is decided which gradients make up the step: with `verdict` "applied", `step` and
    `completes` (the worker then pushes to all servers, with both), or with "late" (the worker drops the gradients, and
    waits for the values of `step` + 1). The step is the requested one, or a later one if another worker died with this
    key after its gradient was accepted: some servers may have that gradient, so the others must get theirs.
    """

    sender: Sender
    key: PushKey
    step: int


@final
@dataclass(frozen=True, slots=True)
class DropArrival(ServerRequest):
    """SyncWithBackups: do not wait for the gradients of a worker that has died, where they have not come yet.

    The driver sends it to all servers after `FenceWorker`, if server 0's answer to that says so.
    """

    sender: Sender  # the dead worker
    step: int  # the step for which the gradient was accepted (`ServerAnswer.step` of that answer)
    completes: int = 0  # number of gradients in that step (`ServerAnswer.completes` of that answer)


@final
@dataclass(frozen=True, slots=True)
class Finish(ServerRequest):
    """SyncWithBackups: apply an incomplete step with the gradients that have come (`join`, reads, `close`).

    Seldom needed: a step waits only for workers that hold a closure, so it is decided when these closures end.
    """

    # Number of the step; -1 makes server 0 decide the present step, and answer with its number and number of gradients
    # (`ServerAnswer.step`, `completes`; 0: there are none, nothing else is to be done). With a step, a server answers
    # once it has applied this step.
    step: int = -1
    completes: int = 0  # number of gradients in the step


@final
@dataclass(frozen=True, slots=True)
class FenceWorker(ServerRequest):
    """Refuse requests of a worker's generations up to this one from now on, and wait for them no more.

    If server 0 answers with `completes` > 0, the worker's gradient is one of so many in `step`, and the worker may have
    pushed it to some servers only: the driver then sends a `DropArrival` to all servers.
    """

    sender: Sender


@final
@dataclass(frozen=True, slots=True)
class OptimizerGroup:
    """One server's part of one of an optimizer's `param_groups`."""

    options: Mapping[str, Any]  # everything but `params`: lr, weight_decay, ...
    slices: tuple[int, ...] = ()  # numbers of the group's slices
    tables: tuple[int, ...] = ()  # handles of the group's embedding tables


@final
@dataclass(frozen=True, slots=True)
class AddOptimizer(ServerRequest):
    """Add an optimizer, or change the groups of a known one: new slices are added, states are kept."""

    handle: int  # handle of the optimizer, the same on the driver and all workers
    kind: bytes  # pickle (cloudpickle) of the optimizer's class
    groups: tuple[OptimizerGroup, ...]  # groups in the optimizer's order


@final
@dataclass(frozen=True, slots=True)
class OptimizerState(ServerRequest):
    """Read an optimizer's state; answer: `value` is a dict slice number -> `state` of the slice, tensors included."""

    optimizer: int


@final
@dataclass(frozen=True, slots=True)
class SetOptimizerState(ServerRequest):
    """Replace an optimizer's state."""

    optimizer: int
    states: Mapping[int, Mapping[str, Any]]  # states by slice number, tensors included


@final
@dataclass(frozen=True, slots=True)
class WriteStates(ServerRequest):
    """Write the optimizer states that a step has changed by hand."""

    sender: Sender
    key: PushKey
    # by optimizer and slice number, the slice's new state; other slices keep their states
    states: Mapping[int, Mapping[int, Mapping[str, Any]]]


@final
@dataclass(frozen=True, slots=True)
class CreateTable(ServerRequest):
    """Create this server's rows of an embedding table."""

    handle: int  # handle of the table, the same on the driver and all workers
    spec: Any  # an `EmbeddingTableSpec`


@final
@dataclass(frozen=True, slots=True)
class PullRows(ServerRequest):
    """Read rows of a table; rows are made when first touched. Tensors: int64 row numbers, unique."""

    handle: int
    sender: Sender | None = None


@final
@dataclass(frozen=True, slots=True)
class RowState(ServerRequest):
    """Read all rows of a table, and their optimizer states; see `RowTable.state`."""

    handle: int


@final
@dataclass(frozen=True, slots=True)
class SetRowState(ServerRequest):
    """Replace all rows of a table; `value`: results of `RowTable.state`, of any number of servers."""

    handle: int
    value: Any


@final
@dataclass(frozen=True, slots=True)
class BeginRestore(ServerRequest):
    """Read this server's part of a checkpoint in the background, and hold it aside. Drops what was held before."""

    order: Any  # an order for the `ServerRestorer`


@final
@dataclass(frozen=True, slots=True)
class ReadReport(ServerRequest):
    """Return the state of the restore; answer: `value` is the result of `ServerRestorer.report`."""

    token: str


@final
@dataclass(frozen=True, slots=True)
class CommitRestore(ServerRequest):
    """Replace the present values by the ones that were read."""

    token: str


@final
@dataclass(frozen=True, slots=True)
class DiscardRestore(ServerRequest):
    """Drop what was read, if anything."""
