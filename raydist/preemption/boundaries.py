"""Step boundaries: the points between steps at which training can be interrupted and a checkpoint taken.

One registry per process, because SIGTERM is sent to the process. It holds weak references only.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, final

from raydist.errors import Preempted
from raydist.preemption.notice import Notice

__all__ = [
    "Boundaries",
    "GivenUp",
    "StepQueue",
    "StepWatcher",
    "add_step_queue",
    "boundary_number",
    "end_reason",
    "is_to_leave",
    "leave",
    "leave_at_last",
    "note_draws",
    "pass_boundary",
    "pass_draw",
    "step_watchers",
    "undivided_run",
    "unwatch_steps",
    "watch_steps",
]


class StepWatcher(Protocol):
    """An observer of steps that saves the process's progress before the process ends."""

    def before_step(self, boundary: int) -> None:
        """Record the state at a boundary: a step is about to begin, and all batches for it were drawn."""

    @property
    def first_undoable(self) -> int:
        """The first boundary for which `save_to_leave` can undo the draws."""

    def save_to_leave(self, reason: str, *, undone: int | None) -> Preempted:
        """Save now, because the process is to end. Never raises; return the exception that ends the process.

        Args:
            reason: Reason for the end of the process.
            undone: Boundary from which on drawn batches count as not drawn; None: all drawn batches were used.
        """

    def nodes(self) -> Collection[str]:
        """Ids of the nodes that the watcher's objects need."""


@final
@dataclass(frozen=True, slots=True)
class GivenUp:
    """Scheduled functions that will not run.

    Attributes:
        boundary: Boundary of the first of these functions.
        count: Number of these functions.
    """

    boundary: int
    count: int


class StepQueue(Protocol):
    """A queue of scheduled functions that wait to begin."""

    def give_up_from(self, boundary: int) -> GivenUp | None:
        """Drop the functions of this boundary and later ones that have not begun. Never raises."""


@final
class Boundaries:
    """The registry of step watchers and step queues, and the preemption flag."""

    def __init__(self) -> None:
        self.known: tuple[weakref.ref[StepWatcher], ...] = ()
        self.notice = Notice(self._nodes)
        self._leaving = False
        self._has_left = False
        self._undivided = False
        self._queues: tuple[weakref.ref[StepQueue], ...] = ()
        self.number = 0
        """Number of the last boundary that was passed."""

    def watchers(self) -> list[StepWatcher]:
        """Return the watchers that still exist."""
        return [watcher for ref in self.known if (watcher := ref()) is not None]

    def _nodes(self) -> set[str]:
        return {node for watcher in self.watchers() for node in watcher.nodes()}

    def watch(self, watcher: StepWatcher) -> None:
        """Register a watcher and start to watch for preemption. May be called repeatedly."""
        if watcher not in self.watchers():
            self.known = (*self.known, weakref.ref(watcher))
        self.notice.start()

    def unwatch(self, watcher: StepWatcher | None = None) -> None:
        """Remove a watcher, and those that no longer exist. Without watchers, stop to watch for preemption."""
        self.known = tuple(ref for ref in self.known if ref() not in (None, watcher))
        if not self.known:
            self.notice.stop()
            self._has_left = False

    @property
    def is_leaving(self) -> bool:
        """True while watchers are saving before the end of the process."""
        return self._leaving

    @property
    def divides_runs(self) -> bool:
        """True if each draw inside a run is a boundary, too."""
        return not self._undivided

    @contextlib.contextmanager
    def undivided(self) -> Iterator[None]:
        """Make draws inside a run no boundaries during the `with` block."""
        before, self._undivided = self._undivided, True
        try:
            yield
        finally:
            self._undivided = before

    def pass_one(self) -> None:
        """Pass a boundary before a step. Raise Preempted if the process is to end, once all watchers have saved."""
        if self._leaving:
            return  # saving runs steps, too
        if self.notice.reason is not None:
            self.leave(before_draw=True)
        self.number += 1
        for watcher in self.watchers():
            watcher.before_step(self.number)

    def note_draws(self) -> None:
        """Count batches drawn since the last boundary as drawn for that boundary's step."""
        for watcher in self.watchers():
            watcher.before_step(self.number)

    def add_queue(self, queue: StepQueue) -> None:
        """Register a queue of scheduled functions, by weak reference."""
        self._queues = (*(ref for ref in self._queues if ref() is not None), weakref.ref(queue))

    def _give_up(self) -> list[GivenUp]:
        first = max((watcher.first_undoable for watcher in self.watchers()), default=0)
        queues = [queue for ref in self._queues if (queue := ref()) is not None]
        return [given for queue in queues if (given := queue.give_up_from(first)) is not None]

    def leave(self, *, before_draw: bool) -> None:
        """Let watchers save, run the previous SIGTERM handlers, raise Preempted. Do nothing without a reason."""
        reason = self.notice.reason
        if reason is None or self._leaving:
            return
        self._leaving = True
        try:
            given_up = self._give_up()
            undone = [given.boundary for given in given_up] + ([self.number + 1] if before_draw else [])
            if given_up:
                count = sum(given.count for given in given_up)
                reason += f", before {count} functions that were scheduled had begun: they are to be scheduled again"
            first = min(undone, default=None)
            ends = [watcher.save_to_leave(reason, undone=first) for watcher in self.watchers()]
            self.notice.run_found()
        finally:
            self._leaving = False
        self._has_left = True
        if ends:
            raise ends[0]

    def leave_at_last(self) -> None:
        """Leave if preemption was noticed after the last step, when no boundary follows."""
        if not self._has_left:
            self.leave(before_draw=False)


_BOUNDARIES = Boundaries()


def watch_steps(watcher: StepWatcher) -> None:
    """Register a watcher until `unwatch_steps`, or until the watcher no longer exists."""
    _BOUNDARIES.watch(watcher)


def unwatch_steps(watcher: StepWatcher | None = None) -> None:
    """Remove a watcher if it is registered."""
    _BOUNDARIES.unwatch(watcher)


def pass_boundary() -> None:
    """Pass a boundary before a step. Costs 40 ns if no watcher is registered.

    Raises:
        Preempted: The process is to end, and a checkpoint is saved.

    >>> pass_boundary()
    """
    if _BOUNDARIES.known:
        _BOUNDARIES.pass_one()


def pass_draw() -> None:
    """Pass a boundary inside a run: a function that runs in this process is about to draw a batch.

    Raises:
        Preempted: The process is to end, and a checkpoint is saved.

    >>> pass_draw()
    """
    if _BOUNDARIES.known and _BOUNDARIES.divides_runs and _BOUNDARIES.notice.reason is not None:
        _BOUNDARIES.leave(before_draw=False)


def note_draws() -> None:
    """Record that a run in this process drew batches itself and ended: its draws belong to no later step.

    >>> note_draws()
    """
    if _BOUNDARIES.known:
        _BOUNDARIES.note_draws()


def step_watchers() -> Sequence[StepWatcher]:
    """Return the watchers of a run's draws; none if draws are no boundaries."""
    if not _BOUNDARIES.known or not _BOUNDARIES.divides_runs:
        return ()
    return _BOUNDARIES.watchers()


def undivided_run() -> contextlib.AbstractContextManager[None]:
    """Make draws inside a run no boundaries during the `with` block: the program's own count of runs would not fit."""
    return _BOUNDARIES.undivided()


def boundary_number() -> int:
    """Return the number of the last boundary that was passed."""
    return _BOUNDARIES.number


def is_to_leave() -> bool:
    """Return True if the process is to end and no watcher is saving yet: loops that wait for steps then leave."""
    return _BOUNDARIES.notice.reason is not None and not _BOUNDARIES.is_leaving


def add_step_queue(queue: StepQueue) -> None:
    """Register a queue of scheduled functions; see `Boundaries.add_queue`."""
    _BOUNDARIES.add_queue(queue)


def end_reason() -> str | None:
    """Return the reason why this process is to end; None if it is not, or if no watcher is registered."""
    return _BOUNDARIES.notice.reason


def leave(*, before_draw: bool) -> None:
    """Let all watchers save and raise Preempted if this process is to end; see `Boundaries.leave`."""
    _BOUNDARIES.leave(before_draw=before_draw)


def leave_at_last() -> None:
    """Leave like `leave`, unless that has happened. Called when no step follows.

    >>> leave_at_last()
    """
    _BOUNDARIES.leave_at_last()
