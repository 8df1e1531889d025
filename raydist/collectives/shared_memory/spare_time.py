"""What a rank of a crowd does while it waits for the others.

Where sixty-four processes share two cores, all wait for what each of them does between the end of a collective and the
next step. Before a rank sleeps in one it has time: it has brought its part, and its peers wait for the last rank.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import final

__all__ = ["use_spare_time", "while_waiting"]


@final
class _SpareTime(threading.local):
    """Of one thread.

    Attributes:
        work: What is done in it; None for nothing.
    """

    work: Callable[[], None] | None = None


_here = _SpareTime()  # waits are deep inside of what a program calls: nobody could hand it down to them


@contextmanager
def while_waiting(work: Callable[[], None]) -> Iterator[None]:
    """Inside, this thread does some work each time before it sleeps in a collective of a group in shared memory.

    Args:
        work: Takes a fraction of a millisecond, and nothing where there is nothing to do. Must not raise, or wait.

    >>> done = []
    >>> with while_waiting(lambda: done.append(1)):
    ...     use_spare_time()
    >>> use_spare_time()
    >>> done
    [1]
    """
    before, _here.work = _here.work, work
    try:
        yield
    finally:
        _here.work = before


def use_spare_time() -> None:
    """This thread has nothing to do: do what it has for such times."""
    if _here.work is not None:
        _here.work()
