"""SIGTERM as a note that is read later. Handlers that were there run then, but for Ray's, which ends the process."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, final

__all__ = ["SigtermNote"]


@final
class SigtermNote:
    """Notes SIGTERM from `install` to `restore`. Signals come to the main thread only.

    Args:
        on_signal: Called in the handler, so it must do next to nothing.
    """

    def __init__(self, on_signal: Callable[[], None]) -> None:
        self._on_signal = on_signal
        self._handler = self._handle  # one object: a bound method is another one each time
        self._found: list[Any] = []  # handlers that were there, the first one first
        self._received: tuple[int, FrameType | None] | None = None
        self._watches = False

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._watches and self._received is None:  # a second one changes nothing
            self._received = number, None
            self._on_signal()
        if not self._watches and self.is_installed:  # another thread was to restore what had been there
            self._put_back()
            signal.raise_signal(number)

    @property
    def is_installed(self) -> bool:
        """Whether SIGTERM comes here."""
        return bool(self._found) and signal.getsignal(signal.SIGTERM) is self._handler

    def install(self) -> bool:
        """Have SIGTERM come here; again where somebody has taken it since, as `ray.init` does.

        Returns:
            Whether it does: only the main thread may say so.
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
        """Run the handlers that were there, as if the signal came now; Ray's own not."""
        number, frame = self._received or (int(signal.SIGTERM), None)
        for handler in self._found:
            if callable(handler) and not _is_rays(handler):
                handler(number, frame)

    def restore(self) -> None:
        """Leave SIGTERM as it was: in another thread than the main one once it comes. What took it since keeps it."""
        self._received, self._watches = None, False
        if threading.current_thread() is threading.main_thread():
            self._put_back()

    def _put_back(self) -> None:
        found, self._found = self._found, []
        if found and signal.getsignal(signal.SIGTERM) is self._handler:
            signal.signal(signal.SIGTERM, signal.SIG_DFL if found[-1] is None else found[-1])


def _is_rays(handler: Any) -> bool:
    return str(getattr(handler, "__module__", "")).split(".")[0] == "ray"
