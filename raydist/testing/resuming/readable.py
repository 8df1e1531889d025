"""Waiting for what another process says. `select` would know no file numbers from 1,024 on."""

from __future__ import annotations

import select
from typing import Protocol

__all__ = ["is_readable"]


class _HasFileNumber(Protocol):
    def fileno(self) -> int: ...


def is_readable(file: int | _HasFileNumber, wait_s: float) -> bool:
    """Whether there is something to read, or the end, within so many seconds.

    >>> import os
    >>> reading, writing = os.pipe()
    >>> is_readable(reading, 0.0)
    False
    >>> os.close(writing)
    >>> is_readable(reading, 1.0)
    True
    >>> os.close(reading)
    """
    poll = select.poll()
    poll.register(file, select.POLLIN)
    return bool(poll.poll(max(0.0, wait_s) * 1000))
