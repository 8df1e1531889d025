"""Detection of deadlocks between ranks within seconds, instead of after the time limit of a collective.

A thread of each rank looks at the rank's progress twice a second, and publishes it in the rendezvous store if nothing
has happened since the last look: the rank waits, computes, or is idle. Rank 0 reads the progress of all ranks whenever
it has none itself. A collective only updates `Progress`.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import final

import torch

from raydist.collectives.base import Communicator, FinishingWork, Membership, Work
from raydist.collectives.delegating import DelegatingCommunicator, T
from raydist.collectives.rendezvous import connect_store, peek
from raydist.collectives.translation import describe_odd_ones
from raydist.compat.torch_internals import Store
from raydist.core.errors import CancelledError, CollectiveMismatchError, RaydistError

_LOOK_S = 0.5
_CONNECT_S = 30.0
_STATUS, _VERDICT = "deadlock/status/{}", "deadlock/verdict"

Verdict = Callable[[], CollectiveMismatchError | None]


@final
@dataclass(frozen=True, slots=True)
class RankStatus:
    """Status of a rank at one time."""

    events: int  # number of events so far; two statuses with the same number are equal
    step: int = -1  # number of the present or last step; -1 before the first step
    running: bool = False  # True if the step is running
    # number of collectives that the rank has called, for each group
    calls: Mapping[str, int] = field(default_factory=dict)
    waits_in: str = ""  # name of the group in whose collective the rank waits; empty if the rank does not wait
    number: int = 0  # number of that collective in the group
    doing: str = ""  # description of that collective, for messages
    look: int = 0  # number of this status, which increases with time

    def __str__(self) -> str:
        if self.waits_in:
            return f"waits in {self.doing} ({self.waits_in}, call {self.number}) in step {self.step}"
        if self.running:
            return f"is at work in step {self.step}"
        return "has run no step yet" if self.step < 0 else f"has ended step {self.step}"


@final
class Progress:
    """Progress of a rank in its program. The thread that runs the steps writes it; other threads read it.

    Updates surround every collective, and take a fraction of a microsecond.
    """

    def __init__(self) -> None:
        self.events = 0  # number of events so far
        self._num_looks = 0
        self.restart()

    def restart(self) -> None:
        """Begin a new generation, in which collectives are counted from 0."""
        self.events += 1
        self._step, self._running = -1, False
        self._calls: dict[str, int] = {}
        self._waits: tuple[str, int, str, torch.Tensor | None] | None = None

    def begin_step(self, step: int) -> None:
        self.events += 1
        self._step, self._running = step, True

    def end_step(self) -> None:
        self.events += 1
        self._running = False

    @property
    def step(self) -> int:
        """The present or last step in this generation; -1 before the first."""
        return self._step

    @property
    def num_calls(self) -> int:
        """Number of collectives in this generation."""
        return sum(self._calls.values())

    def call(self, group: str) -> int:
        """Count a collective of `group`, and return its number."""
        self.events += 1
        number = self._calls.get(group, 0)
        self._calls[group] = number + 1
        return number

    def wait(self, group: str, number: int, name: str, tensor: torch.Tensor | None) -> None:
        """Record that the rank waits for a collective, until `go_on`."""
        self.events += 1
        self._waits = (group, number, name, tensor)

    def go_on(self) -> None:
        self.events += 1
        self._waits = None

    def look(self) -> RankStatus:
        """Return the status of the rank; running and not waiting, if an event occurs meanwhile."""
        events, waits, self._num_looks = self.events, self._waits, self._num_looks + 1
        status = RankStatus(events, self._step, self._running, dict(self._calls), look=self._num_looks)
        if waits is not None:
            group, number, name, tensor = waits
            about = "" if tensor is None else f" of {tensor.dtype} {tuple(tensor.shape)}"
            status = replace(status, waits_in=group, number=number, doing=name + about)
        return status if events == self.events else RankStatus(self.events, self._step, True, look=self._num_looks)


def diagnose(before: Mapping[int, RankStatus], now: Mapping[int, RankStatus]) -> str | None:
    """Return a description of the ranks if some of them wait forever, and None if the ranks may still go on.

    Args:
        before: Earlier status of each rank that has answered.
        now: Later status. Only ranks without events in between count, since other ranks may be slow.

    >>> waits = [RankStatus(7, 3, True, {"g": 1}, "g", 0, "all_reduce(SUM)", look) for look in (1, 2)]
    >>> ended = [RankStatus(9, 3, False, {}, look=look) for look in (4, 5)]
    >>> diagnose({0: waits[0], 1: ended[0]}, {0: waits[1], 1: ended[1]})
    'rank 0 waits in all_reduce(SUM) (g, call 0) in step 3; rank 1 has ended step 3'
    """
    still = {
        rank: status
        for rank, status in now.items()
        if rank in before and before[rank].events == status.events and before[rank].look < status.look
    }
    awaited = {
        rank: {other for other in still if other != rank and still[other].calls.get(mine.waits_in, 0) <= mine.number}
        for rank, mine in still.items()
        if mine.waits_in
    }
    left = [rank for rank, others in awaited.items() if any(_has_left(still[one], still[rank].step) for one in others)]
    if not left and not any(rank in _reached(awaited, rank) for rank in awaited):
        return None
    said = "; ".join(f"rank {rank} {status}" for rank, status in sorted(now.items()))
    return said + describe_odd_ones({rank: (it.waits_in, it.number, it.running) for rank, it in now.items()})


def _has_left(status: RankStatus, step: int) -> bool:
    """Return True if a rank has ended a step, or runs a later one."""
    return status.step > step or (status.step == step and not status.running)


def _reached(awaited: Mapping[int, set[int]], rank: int) -> set[int]:
    """Return the ranks that `rank` waits for, directly or through other ranks."""
    found, left = set[int](), [rank]
    while left:
        new = awaited.get(left.pop(), set()) - found
        found |= new
        left.extend(new)
    return found


@final
class DeadlockDetector:
    """The deadlock detector of one rank in one generation of a group.

    Args:
        end: Called in the detector's thread on a deadlock; must abort the rank's collectives.
    """

    def __init__(self, membership: Membership, progress: Progress, end: Callable[[], None]) -> None:
        self._membership = membership
        self._progress = progress
        self._end = end
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, name="raydist-deadlock-detector", daemon=True)
        self._store: Store | None = None
        self._mine = progress.look()
        self._before: Mapping[int, RankStatus] = {}

    def start(self) -> DeadlockDetector:
        """Connect to the store and start the thread."""
        self._store = connect_store(self._membership, _CONNECT_S)
        self._publish(self._store)
        self._thread.start()
        return self

    def close(self) -> None:
        """Stop the thread. May be called twice."""
        self._stop.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(_CONNECT_S)

    def verdict(self) -> CollectiveMismatchError | None:
        """Return the deadlock that any rank's detector has found, if any."""
        with contextlib.suppress(RuntimeError):  # the store is closed
            said = peek(self._store, _VERDICT) if self._store is not None else None
            if said is not None:
                return CollectiveMismatchError(
                    "All replicas must call the same collectives, equally often, and here some wait for others that "
                    f"will not come: {said.decode()}. Look for a branch that only some replicas take: a skipped "
                    "backward(), another number of closure calls, one all_reduce more."
                )
        return None

    def _work(self) -> None:
        with contextlib.suppress(RuntimeError, RaydistError):  # the owner of the group has closed the store
            while not self._stop.wait(_LOOK_S):
                self._look()

    def _look(self) -> None:
        store, before, self._mine = self._store, self._mine, self._progress.look()
        if store is None or self._mine.events != before.events:
            return
        self._publish(store)
        if self._membership.rank == 0:
            self._judge(store)

    def _publish(self, store: Store) -> None:
        store.set(_STATUS.format(self._membership.rank), json.dumps(asdict(self._mine)))

    def _judge(self, store: Store) -> None:
        keys = [_STATUS.format(rank) for rank in range(self._membership.world_size)]
        if not store.check(keys):
            return  # a rank has not joined yet
        before, self._before = (
            self._before,
            {rank: RankStatus(**json.loads(said)) for rank, said in enumerate(store.multi_get(keys))},
        )
        found = diagnose(before, self._before)
        if found is not None and self._progress.events == self._mine.events:
            store.set(_VERDICT, found)
            self._stop.set()
            self._end()


@final
class WatchedCommunicator(DelegatingCommunicator):
    """A communicator that records the waits of another one for a `DeadlockDetector`.

    Args:
        name: Name of the group for messages, unique among the groups of the rank.
        verdict: Returns the deadlock that a detector has found, if any.
    """

    def __init__(self, inner: Communicator, name: str, progress: Progress, verdict: Verdict) -> None:
        super().__init__(inner)
        self._name = name
        self._progress = progress
        self._verdict = verdict
        self._about = ""

    def announce(self, what: str) -> None:
        self._about = what
        self._inner.announce(what)

    def during(self, what: str, call: Callable[[], T]) -> T:
        return self._watch(call, self._progress.call(self._name), what)

    def around(self, what: str, tensor: torch.Tensor | None, start: Callable[[], Work]) -> Work:
        number = self._progress.call(self._name)
        about, self._about = self._about, ""
        name, shown, work = about or what, None if about else tensor, start()
        return FinishingWork(lambda limit_s: self._watch(lambda: work.wait(limit_s), number, name, shown))

    def _watch(self, wait: Callable[[], T], number: int, name: str, tensor: torch.Tensor | None = None) -> T:
        """Call `wait`, which blocks until collective `number` of the rank has run."""
        self._progress.wait(self._name, number, name, tensor)
        try:
            return wait()
        except CancelledError as error:
            verdict = self._verdict()
            if verdict is None:
                raise
            raise verdict from error
        finally:
            self._progress.go_on()
