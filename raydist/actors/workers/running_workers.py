"""Which workers of a pool may be given blocks: those that run. Others may wait for nodes that are yet to come."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, final

from raydist.placement import Request, await_placed

if TYPE_CHECKING:
    from raydist.actors.workers.handle import WorkerHandle, WorkerKind

__all__ = ["RunningWorkers"]

_log = logging.getLogger("raydist")

_POLL_S = 0.05


@final
class RunningWorkers:
    """Watches the workers of one pool start.

    Args:
        name: Of the pool.
        kind: Of the workers.
    """

    def __init__(self, name: str, kind: WorkerKind) -> None:
        self._name = name
        self._kind = kind
        self._waiting = threading.Lock()
        self._one_has_run = self._told = False
        self._began = 0.0

    def await_first(self, start: Callable[[], Sequence[WorkerHandle]], closed: Callable[[], bool]) -> None:
        """Where workers need resources: return once one of them runs, or `closed()`, or after `start_s`.

        Raises:
            FailedPreconditionError: The cluster can never hold one.
        """
        if self._one_has_run or not self._kind.resources:
            return
        with self._waiting:  # of several threads with blocks, one waits and tells
            if not self._one_has_run:
                self._await(start(), closed)
                self._one_has_run = True

    def _await(self, workers: Sequence[WorkerHandle], closed: Callable[[], bool]) -> None:

        def wait(limit_s: float) -> bool:
            end = time.monotonic() + limit_s
            while not closed() and not any(worker.runs for worker in workers):
                if time.monotonic() >= end:
                    return False
                time.sleep(_POLL_S)
            return True

        request = Request((self._kind.resources,), "PACK", key="", what="input workers")
        await_placed(request, wait, timeout_s=self._kind.start_s)

    def place_of_next(self, workers: Sequence[WorkerHandle], loads: Sequence[int]) -> int:
        """Of the worker that gets the next block: the least loaded of those that run, or of all where none does."""
        self._began = self._began or time.monotonic()
        running = [place for place, worker in enumerate(workers) if worker.runs]
        if running and len(running) < len(workers):
            self._tell(len(workers) - len(running), len(workers))
        return min(running or range(len(loads)), key=loads.__getitem__)

    def _tell(self, missing: int, num_workers: int) -> None:
        if self._told or time.monotonic() - self._began < self._kind.start_s:
            return
        self._told = True
        _log.warning(
            "%d of %d input workers of %s have not started within %g s (Timeouts.start_s); the others work. Each "
            "asks for %s: the cluster may have nothing left.",
            *(missing, num_workers, self._name, self._kind.start_s, dict(self._kind.resources) or "no resources"),
        )
