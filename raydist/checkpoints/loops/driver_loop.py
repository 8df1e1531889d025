"""The driver's half of a run that draws batches itself: a thread asks the replicas what they want to save."""

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

_LOOK_S = 0.05  # between two questions to the first replica: 1 ms of its processor each


class LoopHost(RemoteObjects, Protocol):
    """A strategy whose replicas draw batches themselves."""

    @property
    def limit_s(self) -> float:
        """How long a step, and a save, may take."""

    def ask(self, rank: int | None, method: Callable[[ReplicaLoops, *_Args], _T], *args: *_Args) -> list[_T]:
        """What a replica answers beside its steps, or all of them. Any thread may ask."""

    def shares(self, step: int, token: str) -> Sequence[Share | PortableError | None]:
        """What has become of a save on each of them. Any thread may ask."""

    def drain(self) -> None:
        """Wait for all that was dispatched; raises its errors. For the program's threads."""


@final
class DriverLoop:
    """See the module. `order` and `start` in the program's thread, around the dispatch of the run.

    Args:
        host: Where it runs.
        parts: Of all managers.
    """

    def __init__(self, host: LoopHost, parts: Sequence[ManagedLoop]) -> None:
        self._host = host
        self._parts = {part.key: part for part in parts}
        self._step = -1
        self._is_stopping = False
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def order(self) -> LoopOrder:
        """What the run must know. What the run uses is on its way already, or is about to be."""
        return LoopOrder(tuple(part.order(self._host) for part in self._parts.values()), self._host.limit_s)

    def unreached(self) -> list[nn.Module]:
        """Modules to be saved that replicas must be sent as well. Asked after it was prepared what the run uses."""
        return [module for part in self._parts.values() for module in part.unreached(self._host)]

    def start(self, step: int) -> None:
        """The run was dispatched as this step."""
        self._step = step
        self._thread = threading.Thread(target=self._watch, name="raydist-loop", daemon=True)
        self._thread.start()

    def settle(self) -> None:
        """Wait until the run is over and its saves are written; raises what the run has raised."""
        if self._thread is not None and self._thread is not threading.current_thread():
            try:
                self._host.drain()
            finally:
                self._thread.join()
                self._thread = None

    def close(self) -> None:
        """The replicas are gone: nothing more is to be asked."""
        self._closed.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
            self._thread = None

    def _watch(self) -> None:
        try:
            while not self._closed.is_set() and not self._look():
                self._closed.wait(_LOOK_S)
        except Exception:  # replicas are gone, or the run has failed: who waits for it is told
            return

    def _look(self) -> bool:
        """Whether the run is over."""
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
        """Have all replicas stop before the same draw; False where not all are drawing."""
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
