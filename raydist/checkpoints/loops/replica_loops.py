"""The runs of one replica that draw batches themselves, for the replica's steps and for the driver."""

from __future__ import annotations

import contextlib
import threading
from collections import OrderedDict
from collections.abc import Iterator
from typing import final

from raydist.checkpoints.loops.orders import LoopNews, LoopOrder, SaveOutcome
from raydist.checkpoints.loops.replica_loop import ReplicaLoop, ReplicaSide
from raydist.checkpoints.sharing.share_writer import ShareWriter
from raydist.checkpoints.sharing.shares import ShareRequest

__all__ = ["ReplicaLoops"]

_KEPT = 4  # runs that the driver may still ask for


@final
class ReplicaLoops:
    """The current and the latest runs. Methods that take a run's number are called by the control thread.

    Args:
        writer: Writer of the replica's shares.
    """

    def __init__(self, writer: ShareWriter) -> None:
        self._writer = writer
        self._lock = threading.Lock()
        self._current: ReplicaLoop | None = None
        self._known: OrderedDict[int, ReplicaLoop] = OrderedDict()
        self._passed = -1  # runs up to this number have ended

    @contextlib.contextmanager
    def running(self, step: int, order: LoopOrder, side: ReplicaSide) -> Iterator[ReplicaLoop]:
        """Track a run that draws batches itself during the `with` block."""
        loop = ReplicaLoop(step, order, side)
        with self._lock:
            self._current = self._known[step] = loop
            while len(self._known) > _KEPT:
                self._known.popitem(last=False)
        try:
            yield loop
        finally:
            self._current = None
            self.pass_by(step)

    def pass_by(self, step: int) -> None:
        """Record that a run has ended or was refused."""
        with self._lock:
            self._passed = max(self._passed, step)

    def draw(self) -> None:
        """Pass a step boundary before a draw; see `ReplicaLoop.draw`."""
        if self._current is not None:
            self._current.draw()

    def news(self, step: int) -> LoopNews | None:
        """Return a run's news, or None if the run has not begun."""
        with self._lock:
            loop, ended = self._known.get(step), self._passed >= step
        if loop is None:
            return LoopNews(ended=True) if ended else None
        return loop.news(ended=ended)

    def hold(self, step: int) -> int | None:
        """Block further draws of a run; return the number of draws so far, or None if the run is not under way."""
        with self._lock:
            loop, ended = self._known.get(step), self._passed >= step
        return None if loop is None or ended else loop.gate.hold()

    def stop_after(self, step: int, num_draws: int | None) -> None:
        """Make a held run stop after so many draws; None lets the run continue."""
        loop = self._known.get(step)
        if loop is not None and num_draws is not None:
            loop.gate.stop_after(num_draws)
        elif loop is not None:
            loop.gate.go_on()

    def write(self, request: ShareRequest) -> None:
        """Write shares that were copied, or will be copied soon."""
        self._writer.write(request)

    def end_save(self, step: int, token: str, outcome: SaveOutcome) -> None:
        """Record that a save of a run has completed or failed."""
        loop = self._known.get(step)
        if loop is not None:
            loop.end_save(token, outcome)
