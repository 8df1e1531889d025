"""The points between two steps, at which a process may be left: all that runs steps passes them.

One list for the process, as SIGTERM is the process's. Whoever is not held any more leaves it.
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
    """Somebody who saves what a process has reached before it is left."""

    def before_step(self, boundary: int) -> None:
        """A step is about to begin at this boundary, with all that was drawn for it."""

    @property
    def first_undoable(self) -> int:
        """The first boundary of which `save_to_leave` can be told that its step is undone."""

    def save_to_leave(self, reason: str, *, undone: int | None) -> Preempted:
        """Save now: the process is to end. Never raises.

        Args:
            reason: Why.
            undone: What was drawn for the step of this boundary, and for later ones, counts as not drawn; None: all
                that was drawn was used.
        """

    def nodes(self) -> Collection[str]:
        """Ids of the nodes that it needs."""


@final
@dataclass(frozen=True, slots=True)
class GivenUp:
    """Functions that were to run, and will not.

    Attributes:
        boundary: Of the first one.
        count: How many.
    """

    boundary: int
    count: int


class StepQueue(Protocol):
    """Somebody with functions that wait to be begun."""

    def give_up_from(self, boundary: int) -> GivenUp | None:
        """Begin nothing more of this boundary and later ones, as the process is to end. Never raises."""


@final
class Boundaries:
    """Who is told of boundaries, and whether the process is to be left at the next one."""

    def __init__(self) -> None:
        self.known: tuple[weakref.ref[StepWatcher], ...] = ()
        self.notice = Notice(self._nodes)
        self._leaving = False
        self._has_left = False
        self._undivided = False
        self._queues: tuple[weakref.ref[StepQueue], ...] = ()
        self.number = 0
        """Of the last boundary that was passed."""

    def watchers(self) -> list[StepWatcher]:
        """Who is told."""
        return [watcher for ref in self.known if (watcher := ref()) is not None]

    def _nodes(self) -> set[str]:
        return {node for watcher in self.watchers() for node in watcher.nodes()}

    def watch(self, watcher: StepWatcher) -> None:
        """Tell somebody of each step, and watch for the end of the process. May be called again and again."""
        if watcher not in self.watchers():
            self.known = (*self.known, weakref.ref(watcher))
        self.notice.start()

    def unwatch(self, watcher: StepWatcher | None = None) -> None:
        """Tell it no more, nor who was dropped; without anybody left the process's end is not watched."""
        self.known = tuple(ref for ref in self.known if ref() not in (None, watcher))
        if not self.known:
            self.notice.stop()
            self._has_left = False

    @property
    def is_leaving(self) -> bool:
        """Whether those who watch save just now."""
        return self._leaving

    @property
    def divides_runs(self) -> bool:
        """Whether a draw within a run is a boundary, too."""
        return not self._undivided

    @contextlib.contextmanager
    def undivided(self) -> Iterator[None]:
        """Inside, draws within a run are no boundaries."""
        before, self._undivided = self._undivided, True
        try:
            yield
        finally:
            self._undivided = before

    def pass_one(self) -> None:
        """A step is about to begin. Raises Preempted where the process is to end, once all have saved."""
        if self._leaving:
            return  # saving runs steps, too
        if self.notice.reason is not None:
            self.leave(before_draw=True)
        self.number += 1
        for watcher in self.watchers():
            watcher.before_step(self.number)

    def note_draws(self) -> None:
        """What was drawn since the last boundary belongs to its step."""
        for watcher in self.watchers():
            watcher.before_step(self.number)

    def add_queue(self, queue: StepQueue) -> None:
        """Functions that were scheduled wait there, until it is dropped."""
        self._queues = (*(ref for ref in self._queues if ref() is not None), weakref.ref(queue))

    def _give_up(self) -> list[GivenUp]:
        first = max((watcher.first_undoable for watcher in self.watchers()), default=0)
        queues = [queue for ref in self._queues if (queue := ref()) is not None]
        return [given for queue in queues if (given := queue.give_up_from(first)) is not None]

    def leave(self, *, before_draw: bool) -> None:
        """Have everybody save; handlers of SIGTERM that were there run; raises Preempted. Nothing without a reason."""
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
        """Leave where a notice came behind the last step: nobody else would ever look at it."""
        if not self._has_left:
            self.leave(before_draw=False)


_BOUNDARIES = Boundaries()


def watch_steps(watcher: StepWatcher) -> None:
    """Have somebody told of each step, until `unwatch_steps` or until it is dropped."""
    _BOUNDARIES.watch(watcher)


def unwatch_steps(watcher: StepWatcher | None = None) -> None:
    """Tell it no more. Does nothing where it is not told."""
    _BOUNDARIES.unwatch(watcher)


def pass_boundary() -> None:
    """A step is about to begin. Costs 40 ns where nobody watches.

    Raises:
        Preempted: The process is to end, and a checkpoint was saved.

    >>> pass_boundary()
    """
    if _BOUNDARIES.known:
        _BOUNDARIES.pass_one()


def pass_draw() -> None:
    """A function that runs in this process is about to draw a batch: a boundary within its run.

    Raises:
        Preempted: The process is to end, and a checkpoint was saved.

    >>> pass_draw()
    """
    if _BOUNDARIES.known and _BOUNDARIES.divides_runs and _BOUNDARIES.notice.reason is not None:
        _BOUNDARIES.leave(before_draw=False)


def note_draws() -> None:
    """A run in this process is over that drew batches itself: they were not drawn for a later step.

    >>> note_draws()
    """
    if _BOUNDARIES.known:
        _BOUNDARIES.note_draws()


def step_watchers() -> Sequence[StepWatcher]:
    """Who is told of the draws of a run; nobody where these are no boundaries."""
    if not _BOUNDARIES.known or not _BOUNDARIES.divides_runs:
        return ()
    return _BOUNDARIES.watchers()


def undivided_run() -> contextlib.AbstractContextManager[None]:
    """Inside, draws within a run are no boundaries: what the program counts by runs would not fit."""
    return _BOUNDARIES.undivided()


def boundary_number() -> int:
    """Of the last boundary that was passed."""
    return _BOUNDARIES.number


def is_to_leave() -> bool:
    """Whether the process is to end, and nobody saves yet: who waits for steps stops waiting, and leaves."""
    return _BOUNDARIES.notice.reason is not None and not _BOUNDARIES.is_leaving


def add_step_queue(queue: StepQueue) -> None:
    """Where functions wait that were scheduled; see `Boundaries.add_queue`."""
    _BOUNDARIES.add_queue(queue)


def end_reason() -> str | None:
    """Why this process is to end soon; None where it is not, or where nobody watches."""
    return _BOUNDARIES.notice.reason


def leave(*, before_draw: bool) -> None:
    """Have all who watch save and raise Preempted, where this process is to end; see `Boundaries.leave`."""
    _BOUNDARIES.leave(before_draw=before_draw)


def leave_at_last() -> None:
    """As `leave`, unless that has been done: nothing comes after this.

    >>> leave_at_last()
    """
    _BOUNDARIES.leave_at_last()
