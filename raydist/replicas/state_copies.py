"""Copies of the whole state of all replicas, from which all of them can start again.

Recovery takes the state of a lost replica from the others. Where these do not have it, all replicas go back to the last
copy, and the steps since then run again: with one replica, under `CentralStorageStrategy`, where each replica holds
parts of modules, and after a loop inside the replicas has drawn batches. Replicas copy their state between two steps,
into Ray's object store, where a copy outlives its replica.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, final

from raydist.actors.readers.driver_epoch import EpochStart
from raydist.actors.replica import ReplicaActors
from raydist.actors.supervision import may_be_loss
from raydist.core.exception_utils import annotate
from raydist.distributed_dataset import DistributedIterator
from raydist.replicas.dispatched_steps import DispatchedSteps
from raydist.replicas.runner import ReplicaRunner

_MOST_STEPS = 200  # that run again; `DispatchedSteps` keeps some more
_LEAST_S = 10.0  # between two copies, unless there are so many steps
_COST = 20  # the time between two copies is at least this many times as long as one of them takes


@final
@dataclass(slots=True, eq=False)
class CopyPoint:
    """A place between two steps, and the state of the replicas there.

    Attributes:
        step: The step after it.
        copies: References of each replica's copy; empty before the first step, when there is nothing to copy.
        reports: References of the seconds that each copy took; None if a replica could make none.
        taken_at: Time of the request.
        starts: The places at which the replicas began to read epochs, by the key of the epoch.
        loops: The keys of the epochs that the replicas read in each later step.
    """

    step: int
    copies: Sequence[Any] = ()
    reports: Sequence[Any] = ()
    taken_at: float = 0.0
    starts: dict[str, EpochStart] = field(default_factory=dict)
    loops: dict[int, Sequence[str]] = field(default_factory=dict)

    def begin_again(self, before: int) -> None:
        """Make all epochs begin again at their places here, for the loops before a step."""
        self.loops = {step: keys for step, keys in self.loops.items() if step < before}
        lent = [key for each in self.loops.values() for key in each]
        for key, start in self.starts.items():
            start.begin_again(lent.count(key))


@final
class StateCopies:
    """The copies of one group of replicas. Thread-safe.

    Args:
        limit_s: Limit of a wait for copies.
        always: See the attribute.

    Attributes:
        always: True if copies are needed before any step: no other replica has the state of a lost one. Else they are
            needed only before loops that draw batches inside the replicas.
    """

    def __init__(self, steps: DispatchedSteps, actors: ReplicaActors, limit_s: float, *, always: bool) -> None:
        self._steps = steps
        self._actors = actors
        self._limit_s = limit_s
        self.always = always
        self._point: CopyPoint | None = None
        self._coming: CopyPoint | None = None
        self._cost_s = 0.0
        self._lock = threading.RLock()

    def before_step(self, iterators: Sequence[DistributedIterator]) -> None:
        """Copy the state before the next step if it is time. `iterators` are those that the step draws batches from.

        Blocks only if the driver has to wait for the replicas to know the place of an iterator.
        """
        with self._lock:
            self._settle(0.0)
            if not (self.always or iterators):
                return
            reading = [each._reading() for each in iterators]
            between = any(key in point.starts and not lent for key, lent in reading for point in self._points())
            if between:  # the driver has read batches between two loops: the first one cannot run again
                self.forget()
            if self._is_due():
                self._take()
            points = self._points()
            known = all(key in point.starts for key, _ in reading for point in points)
        # Without the lock: the thread that uses an iterator may be the one that recovers.
        starts = [] if known else [start for each in iterators if (start := each._start()) is not None]
        new = {start.link.key: start for start in starts}
        keys = list(new) or [key for key, _ in reading if key is not None]
        with self._lock:
            for point in points if iterators else ():
                point.starts = {**new, **point.starts}
                point.loops[self._steps.last + 1] = keys

    def forget(self) -> None:
        """Drop all copies: the state was changed by something that cannot run again."""
        with self._lock:
            self._point = self._coming = None
            self._steps.keep_from = None

    def point(self) -> CopyPoint | None:
        """Return the last point that all replicas can go back to; None if there is none. Blocks for the last copies."""
        with self._lock:
            self._settle(self._limit_s)
            point = self._point
            kept = point is not None and self._steps.keep_from == point.step and self._steps.can_go_back_to(point.step)
            return point if kept else None

    def is_needed(self, step: int) -> bool:
        """Return True if replicas draw batches in this step or a later one: a lost one's place is not known."""
        with self._lock:
            return self._has_loops(step)

    def _has_loops(self, step: int = 0) -> bool:
        return any(number >= step for point in self._points() for number in point.loops)

    def _points(self) -> list[CopyPoint]:
        return [each for each in (self._point, self._coming) if each is not None]

    def _is_due(self) -> bool:
        if self._coming is not None:
            return False
        point = self._point
        if point is None or self._steps.keep_from != point.step:
            return True
        number, seconds = self._steps.last + 1 - point.step, time.monotonic() - point.taken_at
        return number >= _MOST_STEPS or (number > 0 and seconds > max(_LEAST_S, _COST * self._cost_s))

    def _take(self) -> None:
        step, at = self._steps.last + 1, time.monotonic()
        if step == 0:
            self._use(CopyPoint(step, taken_at=at))
            return
        self._steps.send_all()
        ranks = range(self._steps.num_replicas)
        copies = [self._actors.call(rank, ReplicaRunner.copy_state.__name__) for rank in ranks]
        reports = [self._actors.call(rank, ReplicaRunner.copy_seconds.__name__) for rank in ranks]
        self._coming = CopyPoint(step, copies, reports, at)
        if self._point is None or self._steps.keep_from is None:
            self._point, self._steps.keep_from = None, step

    def _settle(self, within_s: float) -> None:
        """Use the copies that were requested last if they are there; wait for them."""
        coming = self._coming
        if coming is None or not self._actors.are_ready([*coming.copies, *coming.reports], within_s):
            return
        self._coming = None
        try:
            seconds = self._actors.wait(
                coming.reports,
                self._actors.names,
                timeout_s=self._limit_s,
                doing="copying its state",
                limit="Timeouts.step_s",
                on_error=lambda: None,
            )
        except Exception as error:
            if not may_be_loss(error):  # an object that cannot be pickled
                annotate(error, "A replica's state must be copied so that it can be replaced: FailureOptions.recover.")
                raise
            seconds = [None]
        if None not in seconds:
            self._cost_s = max(seconds)
            self._use(coming)
        elif self._point is None:
            self._steps.keep_from = None

    def _use(self, point: CopyPoint) -> None:
        self._point, self._steps.keep_from = point, point.step
