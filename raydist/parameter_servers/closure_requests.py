"""Requests to servers about closures: the synchronous steps of several workers, and deaths of workers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from raydist.parameter_servers.requests import PushKey, Sender, ServerRequest

__all__ = ["Arrive", "BeginClosure", "DropArrival", "EndClosure", "FenceWorker", "Finish"]


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

    Attributes:
        sender: The dead worker.
        step: The step for which the gradient was accepted (`ServerAnswer.step` of that answer).
        completes: Number of gradients in that step (`ServerAnswer.completes` of that answer).
    """

    sender: Sender
    step: int
    completes: int = 0


@final
@dataclass(frozen=True, slots=True)
class Finish(ServerRequest):
    """SyncWithBackups: apply an incomplete step with the gradients that have come (`join`, reads, `close`).

    Seldom needed: a step waits only for workers that hold a closure, so it is decided when these closures end.

    Attributes:
        step: Number of the step; -1 makes server 0 decide the present step, and answer with its number and number of
            gradients (`ServerAnswer.step`, `completes`; 0: there are none, nothing else is to be done). With a step, a
            server answers once it has applied this step.
        completes: Number of gradients in the step.
    """

    step: int = -1
    completes: int = 0


@final
@dataclass(frozen=True, slots=True)
class FenceWorker(ServerRequest):
    """Refuse requests of a worker's generations up to this one from now on, and wait for them no more.

    If server 0 answers with `completes` > 0, the worker's gradient is one of so many in `step`, and the worker may have
    pushed it to some servers only: the driver then sends a `DropArrival` to all servers.
    """

    sender: Sender
