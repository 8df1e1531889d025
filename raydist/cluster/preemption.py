"""Step boundaries: the points between steps at which training can be interrupted and a checkpoint taken.

The preemption flag is set by SIGTERM, or when a needed node is drained. One registry per process, because SIGTERM is
sent to the process. It holds weak references only.
"""

from __future__ import annotations

import contextlib
import logging
import signal
import threading
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from types import FrameType
from typing import Any, Protocol, final

from raydist.cluster.ray_session import draining_nodes
from raydist.core.errors import Preempted

_MOST = 256  # larger than the number of functions that may wait for workers


@final
class Positions:
    """The latest distinct positions, each with the first boundary at which it was recorded.

    >>> positions = Positions()
    >>> for boundary, place in ((3, "a"), (4, "b"), (5, "b")):
    ...     positions.note(boundary, place)
    >>> positions.before(3), positions.before(4), positions.before(9), positions.last_change
    (None, 'a', 'b', 4)
    """

    def __init__(self) -> None:
        self._places: deque[tuple[int, Any]] = deque(maxlen=_MOST)
        self.num_forgotten = 0
        """Number of positions that were dropped."""

    def note(self, boundary: int, place: Any) -> None:
        """Record the position at a boundary; None if unknown."""
        if not self._places or place is None or self._places[-1][1] != place:
            self.num_forgotten += len(self._places) == _MOST
            self._places.append((boundary, place))

    def before(self, boundary: int) -> Any:
        """Return the position when the last step before this boundary began; None if unknown."""
        return next((place for number, place in reversed(self._places) if number < boundary), None)

    @property
    def first(self) -> int | None:
        """The boundary of the first known position; None if there is none."""
        return self._places[0][0] if self._places else None

    @property
    def last_change(self) -> int:
        """The first boundary with the current position; -1 if there is none."""
        return self._places[-1][0] if self._places else -1


@final
class SigtermHandler:
    """A SIGTERM handler, active from `install` to `restore`. Python runs signal handlers in the main thread only.

    The handler calls `on_signal`, which must therefore be trivial.
    """

    def __init__(self, on_signal: Callable[[], None]) -> None:
        self._on_signal = on_signal
        self._handler = self._handle  # one object: each access creates a new bound method
        self._found: list[Any] = []  # previous handlers, oldest first
        self._received: tuple[int, FrameType | None] | None = None
        self._watches = False

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._watches and self._received is None:  # a second signal changes nothing
            self._received = number, None
            self._on_signal()
        if not self._watches and self.is_installed:  # another thread asked to restore the previous handler
            self._put_back()
            signal.raise_signal(number)

    @property
    def is_installed(self) -> bool:
        return bool(self._found) and signal.getsignal(signal.SIGTERM) is self._handler

    def install(self) -> bool:
        """Install the handler, also if `ray.init` has replaced it; return False if only the main thread could do so."""
        now = signal.getsignal(signal.SIGTERM)
        self._watches = self._watches or now is self._handler
        if now is self._handler:
            return True
        if threading.current_thread() is not threading.main_thread():
            return False
        self._found.append(now)
        self._watches = True
        signal.signal(signal.SIGTERM, self._handler)
        return True

    def run_found(self) -> None:
        """Call the previous handlers, except Ray's, as if the signal came now."""
        number, frame = self._received or (int(signal.SIGTERM), None)
        for handler in self._found:
            if callable(handler) and not _is_rays(handler):
                handler(number, frame)

    def restore(self) -> None:
        """Restore the previous handler unless other code replaced ours; in other threads, at the next SIGTERM."""
        self._received, self._watches = None, False
        if threading.current_thread() is threading.main_thread():
            self._put_back()

    def _put_back(self) -> None:
        found, self._found = self._found, []
        if found and signal.getsignal(signal.SIGTERM) is self._handler:
            signal.signal(signal.SIGTERM, signal.SIG_DFL if found[-1] is None else found[-1])


def _is_rays(handler: Any) -> bool:
    return str(getattr(handler, "__module__", "")).split(".")[0] == "ray"


_LOOK_S = 1.0  # between two checks for drained nodes

_log = logging.getLogger("raydist")


@final
class PreemptionFlag:
    """A watch for preemption, active from `start` to `stop`.

    Every `look_s` seconds it compares the ids of nodes that this process needs with those that are being drained.
    """

    def __init__(
        self,
        nodes: Callable[[], Collection[str]],
        draining: Callable[[], Collection[str]] = draining_nodes,
        look_s: float = _LOOK_S,
    ) -> None:
        self._nodes, self._draining, self._look_s = nodes, draining, look_s
        self._sigterm = SigtermHandler(lambda: self._note("it received SIGTERM"))
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        self._is_told = False
        self.reason: str | None = None
        """Reason why the process is to end; None before."""

    def _note(self, reason: str) -> None:
        self.reason = self.reason or reason

    def start(self) -> None:
        """Start to watch, or check that the SIGTERM handler is still installed."""
        if not self._sigterm.install() and not self._is_told:
            self._is_told = True
            _log.warning(
                "SIGTERM is not watched: only the main thread may do that, this is %s. Save in the main thread, or let "
                "its handler end the loop.",
                threading.current_thread().name,
            )
        if self._thread is None:
            self._stopped.clear()
            self._thread = threading.Thread(target=self._watch_nodes, name="raydist-preemption", daemon=True)
            self._thread.start()

    def _watch_nodes(self) -> None:
        while not self._stopped.wait(self._look_s):
            going = self._draining()
            needed = sorted(set(going) & set(self._nodes())) if going else []
            if needed:
                self._note(f"its node {needed[0][:8]} is being drained")

    def run_found(self) -> None:
        """Call the previous SIGTERM handlers."""
        self._sigterm.run_found()

    def stop(self) -> None:
        """Stop to watch and restore the SIGTERM handler. May be called twice."""
        self._sigterm.restore()
        thread, self._thread = self._thread, None
        self._stopped.set()
        if thread is not None and thread is not threading.current_thread():
            thread.join()
        self.reason = None


class StepWatcher(Protocol):
    """An observer of steps that saves the process's progress before the process ends."""

    def before_step(self, boundary: int) -> None:
        """Record the state at a boundary: a step is about to begin, and all batches for it were drawn."""

    @property
    def first_undoable(self) -> int:
        """The first boundary for which `save_before_exit` can undo the draws."""

    def save_before_exit(self, reason: str, *, undone: int | None) -> Preempted:
        """Save now, because the process is to end. Never raises; return the exception that ends the process.

        Batches drawn from the boundary `undone` on count as not drawn; None: all drawn batches were used.
        """

    def nodes(self) -> Collection[str]:
        """Ids of the nodes that the watcher's objects need."""


class StepQueue(Protocol):
    """A queue of scheduled functions that wait to begin."""

    def cancel_pending(self, boundary: int) -> list[int]:
        """Cancel the functions of this boundary and later ones that have not begun; return the boundary of each.

        Never raises.
        """


@final
class Boundaries:
    """The registry of step watchers and step queues, and the preemption flag."""

    def __init__(self) -> None:
        self.flag = PreemptionFlag(self._nodes)
        self._known: tuple[weakref.ref[StepWatcher], ...] = ()
        self._is_ending = False
        self._has_ended = False
        self._ignores_draws = False
        self._queues: tuple[weakref.ref[StepQueue], ...] = ()
        self._number = 0

    def _watchers(self) -> list[StepWatcher]:
        return [watcher for ref in self._known if (watcher := ref()) is not None]

    def _nodes(self) -> set[str]:
        return {node for watcher in self._watchers() for node in watcher.nodes()}

    def boundary_number(self) -> int:
        return self._number

    def end_reason(self) -> str | None:
        """Return the reason why this process is to end; None if it is not, or if no watcher is registered."""
        return self.flag.reason

    def is_preempted(self) -> bool:
        """Return True if the process is to end and no watcher saves yet: loops that wait for steps then end."""
        return self.flag.reason is not None and not self._is_ending

    def watch(self, watcher: StepWatcher) -> None:
        """Register a watcher, by weak reference, and start to watch for preemption. May be called repeatedly."""
        if watcher not in self._watchers():
            self._known = (*self._known, weakref.ref(watcher))
        self.flag.start()

    def unwatch(self, watcher: StepWatcher | None = None) -> None:
        """Remove a watcher, and those that no longer exist. Without watchers, stop to watch for preemption."""
        self._known = tuple(ref for ref in self._known if ref() not in (None, watcher))
        if not self._known:
            self.flag.stop()
            self._has_ended = False

    def add_queue(self, queue: StepQueue) -> None:
        """Register a queue of scheduled functions, by weak reference."""
        self._queues = (*(ref for ref in self._queues if ref() is not None), weakref.ref(queue))

    def step_watchers(self) -> Sequence[StepWatcher]:
        """Return the watchers of a run's draws; none if draws are no boundaries."""
        return () if self._ignores_draws or not self._known else self._watchers()

    @contextlib.contextmanager
    def ignore_draws(self) -> Iterator[None]:
        """Let draws inside a run pass no boundary in the `with` block: the program counts whole runs."""
        before, self._ignores_draws = self._ignores_draws, True
        try:
            yield
        finally:
            self._ignores_draws = before

    def pass_boundary(self) -> None:
        """Pass a boundary before a step. Raise Preempted if the process is to end, once all watchers have saved."""
        if not self._known or self._is_ending:  # saving runs steps, too
            return
        if self.flag.reason is not None:
            self.end_if_preempted(before_draw=True)
        self._number += 1
        for watcher in self._watchers():
            watcher.before_step(self._number)

    def pass_draw(self) -> None:
        """Pass a boundary inside a run: a function that runs in this process is about to draw a batch.

        Raises:
            Preempted: The process is to end, and a checkpoint is saved.
        """
        if self._known and not self._ignores_draws:
            self.end_if_preempted(before_draw=False)

    def note_draws(self) -> None:
        """Record that a run in this process drew batches itself and ended: its draws belong to no later step."""
        for watcher in self._watchers():
            watcher.before_step(self._number)

    def _cancel_pending(self) -> list[int]:
        """Cancel scheduled functions whose batches can count as not drawn; return the boundary of each."""
        first = max((watcher.first_undoable for watcher in self._watchers()), default=0)
        queues = [queue for ref in self._queues if (queue := ref()) is not None]
        return [boundary for queue in queues for boundary in queue.cancel_pending(first)]

    def end_if_preempted(self, *, before_draw: bool) -> None:
        """Let watchers save, run the previous SIGTERM handlers, raise Preempted. Do nothing without a reason."""
        reason = self.flag.reason
        if reason is None or self._is_ending:
            return
        self._is_ending = True
        try:
            cancelled = self._cancel_pending()
            if cancelled:
                count = len(cancelled)
                reason += f", before {count} functions that were scheduled had begun: they are to be scheduled again"
            first = min([*cancelled, *([self._number + 1] if before_draw else [])], default=None)
            ends = [watcher.save_before_exit(reason, undone=first) for watcher in self._watchers()]
            self.flag.run_found()
        finally:
            self._is_ending = False
        self._has_ended = True
        if ends:
            _log.warning("%s Start the program again to continue from there.", ends[0])
            raise ends[0]

    def end_after_last_step(self) -> None:
        """End the process if preemption was noticed after the last step, when no boundary follows."""
        if not self._has_ended:
            self.end_if_preempted(before_draw=False)


_BOUNDARIES = Boundaries()

watch_steps = _BOUNDARIES.watch
unwatch_steps = _BOUNDARIES.unwatch
pass_boundary = _BOUNDARIES.pass_boundary  # costs 40 ns if no watcher is registered
pass_draw = _BOUNDARIES.pass_draw
note_draws = _BOUNDARIES.note_draws
step_watchers = _BOUNDARIES.step_watchers
registered_watchers = _BOUNDARIES._watchers  # also of runs whose draws are no boundaries
ignore_draws = _BOUNDARIES.ignore_draws
boundary_number = _BOUNDARIES.boundary_number
is_preempted = _BOUNDARIES.is_preempted
add_step_queue = _BOUNDARIES.add_queue
end_reason = _BOUNDARIES.end_reason
end_if_preempted = _BOUNDARIES.end_if_preempted
end_after_last_step = _BOUNDARIES.end_after_last_step
