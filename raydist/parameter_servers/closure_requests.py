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
    """SyncWithBackups, server 0 only: a worker has gradients of `step`, that of the values they come from.

    Answered once it is decided which gradients make up the step: with `verdict` "applied", `step` and `completes` (push
    to all servers then, with both), or with "late" (drop them, and wait for the values of `step` + 1). The step is the
    one that was asked for, or a later one where another worker died with this key after it was accepted: some servers
    may have its gradient, so the others must get theirs.
    """

    sender: Sender
    key: PushKey
    step: int


@final
@dataclass(frozen=True, slots=True)
class DropArrival(ServerRequest):
    """SyncWithBackups: do not wait for the gradients of a worker that has died, where they have not come yet.

    To be sent to all servers after `FenceWorker`, whose answer by server 0 says whether it is needed.

    Attributes:
        sender: Who has died.
        step: The step that it was accepted for (`ServerAnswer.step` of that answer).
        completes: How many gradients were to make up that step (`ServerAnswer.completes` of that answer).
    """

    sender: Sender
    step: int
    completes: int = 0


@final
@dataclass(frozen=True, slots=True)
class Finish(ServerRequest):
    """SyncWithBackups: apply an incomplete step with what has come (`join`, reads, `close`).

    Seldom needed: a step waits only for workers that hold a closure, so it is decided when those end.

    Attributes:
        step: Which; -1 has server 0 decide the present one, and say which that is and of how many gradients
            (`ServerAnswer.step`, `completes`; 0: there are none, nothing else is to be done). With a step, a server
            answers once it has applied that.
        completes: How many gradients it has.
    """

    step: int = -1
    completes: int = 0


@final
@dataclass(frozen=True, slots=True)
class FenceWorker(ServerRequest):
    """Generations of a worker up to this one are dead: refuse them from now on, and wait for them no more.

    Where server 0 answers with `completes` > 0, the worker was one of so many that make up `step`, and may have pushed
    to some servers only: send a `DropArrival` to all of them, after this.
    """

    sender: Sender
