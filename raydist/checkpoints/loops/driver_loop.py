"""The driver's half of a run that draws batches itself: a thread polls the replicas for wanted saves."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar, TypeVarTuple, final

from torch import nn

from raydist.actors.portable_errors import PortableError
from raydist.checkpoints.loops.managed_loop import ManagedLoop, RemoteObjects
from raydist.checkpoints.loops.orders import LoopNews, LoopOrder, WantedSave
from raydist.checkpoints.loops.replica_loops import ReplicaLoops
from raydist.checkpoints.sharing.dispatched_save import DispatchedSave
from raydist.checkpoints.sharing.shares import Share, ShareRequest
from raydist.preemption.boundaries import end_reason

__all__ = ["DriverLoop", "LoopHost"]

_T = TypeVar("_T")
_Args = TypeVarTuple("_Args")

_LOOK_S = 0.05  # between two polls of the first replica, each of which costs 1 ms of the replica's CPU time


class LoopHost(RemoteObjects, Protocol):
    """A strategy whose replicas draw batches themselves."""

    @property
    def limit_s(self) -> float:
        """Limit in seconds of a step, and of a save."""

    def ask(self, rank: int | None, method: Callable[[ReplicaLoops, *_Args], _T], *args: *_Args) -> list[_T]:
        """Call a method on one replica or all, concurrently with their steps; return the results. Thread-safe."""

    def shares(self, step: int, token: str) -> Sequence[Share | PortableError | None]:
        """Return the progress of a save on each replica. Thread-safe."""

    def drain(self) -> None:
        """Block until all dispatched work has ended; raise its errors. Called by the program's threads."""


@final
class DriverLoop:
    """The saves of one run. Call `order` and `start` in the program's thread, before and after the dispatch.

    Args:
        host: The strategy that runs the function.
        parts: One part for each manager.
    """

    def __init__(self, host: LoopHost, parts: Sequence[ManagedLoop]) -> None:
        self._host = host
        self._parts = {part.key: part for part in parts}
        self._step = -1
        self._is_stopping = False
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def order(self) -> LoopOrder:
        """Return the order for the replicas. Objects that the run uses must be sent, or about to be sent."""
        return LoopOrder(tuple(part.order(self._host) for part in self._parts.values()), self._host.limit_s)

    def unreached(self) -> list[nn.Module]:
        """Return saved modules that the run does not use but replicas need. Call after the run's objects are sent."""
        return [module for part in self._parts.values() for module in part.unreached(self._host)]

    def start(self, step: int) -> None:
        """Start to poll the replicas; `step` is the number under which the run was dispatched."""
        self._step = step
        self._thread = threading.Thread(target=self._watch, name="raydist-loop", daemon=True)
        self._thread.start()

    def settle(self) -> None:
        """Block until the run has ended and its saves are written; raise the run's error."""
        if self._thread is not None and self._thread is not threading.current_thread():
            try:
                self._host.drain()
            finally:
                self._thread.join()
                self._thread = None

    def close(self) -> None:
        """Stop polling, because the replicas are gone."""
        self._closed.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
            self._thread = None

    def _watch(self) -> None:
        try:
            while not self._closed.is_set() and not self._look():
                self._closed.wait(_LOOK_S)
        except Exception:  # replicas are gone or the run failed; the caller that waits for the run gets the error
            return

    def _look(self) -> bool:
        if end_reason() is not None and not self._is_stopping:
            self._is_stopping = self._stop()
        (news,) = self._host.ask(0, ReplicaLoops.news, self._step)
        if news is None:
            return False
        for wanted in news.wanted:
            self._save(wanted)
        if news.ended and not news.wanted:
            self._follow(news)
            return True
        return False

    def _stop(self) -> bool:
        """Make all replicas stop before the same draw; return False if some replica is not drawing."""
        drawn = self._host.ask(None, ReplicaLoops.hold, self._step)
        known = [num_draws for num_draws in drawn if num_draws is not None]
        last = max(known) if len(known) == len(drawn) else None
        self._host.ask(None, ReplicaLoops.stop_after, self._step, last)
        return last is not None

    def _save(self, wanted: WantedSave) -> None:
        outcome = self._parts[wanted.key].write(wanted, self._begin_shares, end_reason())
        self._host.ask(None, ReplicaLoops.end_save, self._step, wanted.token, outcome)

    def _begin_shares(self, request: ShareRequest) -> DispatchedSave:
        self._host.ask(None, ReplicaLoops.write, request)
        ask = functools.partial(self._host.shares, self._step, request.token)
        return DispatchedSave(ask, self._host.limit_s)

    def _follow(self, news: LoopNews) -> None:
        for key, count in news.counts.items():
            self._parts[key].follow(count)
