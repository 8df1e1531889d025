"""How many closures go into one message. Pure."""

from __future__ import annotations

from typing import final

__all__ = ["ClosurePace"]

_MESSAGE_S = 0.004  # of work in a message: a worker has two, so what is sent ahead is done soon
_MOST = 16


@final
class ClosurePace:
    """Learns how long closures take, by their function."""

    def __init__(self) -> None:
        self._seconds: dict[bytes, float] = {}

    def learn(self, key: bytes, seconds: float) -> None:
        """A closure of this function took so long."""
        before = self._seconds.pop(key, seconds)
        self._seconds[key] = 0.8 * before + 0.2 * seconds
        if len(self._seconds) > 256:
            del self._seconds[next(iter(self._seconds))]

    def most(self, key: bytes) -> int:
        """How many closures of this function a message may have.

        >>> pace = ClosurePace()
        >>> pace.learn(b"f", 0.001)
        >>> pace.most(b"f"), pace.most(b"never seen")
        (4, 1)
        """
        seconds = self._seconds.get(key)
        return 1 if seconds is None else max(1, min(_MOST, int(_MESSAGE_S / max(seconds, 1e-9))))
