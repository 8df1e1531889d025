"""The preemption flag: set by SIGTERM, or when a needed node is drained."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable, Collection
from types import FrameType
from typing import Any, final

from raydist.draining import draining_nodes

__all__ = ["Notice", "SigtermNote"]


@final
class SigtermNote:
    """A SIGTERM handler, active from `install` to `restore`. Python runs signal handlers in the main thread only.

    Args:
        on_signal: Called in the handler, so it must be trivial.
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
        """True if this object's handler is installed."""
        return bool(self._found) and signal.getsignal(signal.SIGTERM) is self._handler

    def install(self) -> bool:
        """Install the handler; again if other code has replaced it, as `ray.init` does.

        Returns:
            True if the handler is installed. Only the main thread can install it.
        """
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
class Notice:
    """A watch for preemption, active from `start` to `stop`.

    Args:
        nodes: Returns the ids of the nodes that this process needs now.
        draining: Returns the ids of nodes that are being drained.
        look_s: Seconds between two checks.
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
