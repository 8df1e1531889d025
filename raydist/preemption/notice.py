"""What this process knows of its end: that it was asked to end, by a signal or because its node goes away."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection
from typing import final

from raydist.draining import draining_nodes
from raydist.preemption.sigterm import SigtermNote

__all__ = ["Notice"]

_LOOK_S = 1.0  # between two looks at which nodes are drained

_log = logging.getLogger("raydist")


@final
class Notice:
    """Watches from `start` to `stop`.

    Args:
        nodes: Ids of the nodes that this process needs, as they are now.
        draining: Ids of those that go away.
        look_s: Between two looks at them.
    """

    def __init__(
        self,
        nodes: Callable[[], Collection[str]],
        draining: Callable[[], Collection[str]] = draining_nodes,
        look_s: float = _LOOK_S,
    ) -> None:
        self._nodes, self._draining, self._look_s = nodes, draining, look_s
        self._sigterm = SigtermNote(lambda: self._note("it received SIGTERM"))
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        self._is_told = False
        self.reason: str | None = None
        """Why the process is to end, once it is."""

    def _note(self, reason: str) -> None:
        self.reason = self.reason or reason

    def start(self) -> None:
        """Begin to watch, or see that SIGTERM still comes here."""
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
        """Run the handlers of SIGTERM that were there before."""
        self._sigterm.run_found()

    def stop(self) -> None:
        """Watch no more, and leave SIGTERM as it was. May be called twice."""
        self._sigterm.restore()
        thread, self._thread = self._thread, None
        self._stopped.set()
        if thread is not None and thread is not threading.current_thread():
            thread.join()
        self.reason = None
