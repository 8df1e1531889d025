"""Protection of objects after a fork: a forked child has copies of them, but not their threads and connections."""

from __future__ import annotations

import ctypes
import os
import sys
import traceback
import weakref
from collections.abc import Callable
from typing import Any, Protocol, TypeVar, final

from raydist.core.errors import FailedPreconditionError

_T = TypeVar("_T")


@final
class OwningProcess:
    """The process that made an object.

    Args:
        what: Description of the object, for messages.

    >>> OwningProcess("This iterator").require("read")
    """

    __slots__ = ("_pid", "_what")

    def __init__(self, what: str) -> None:
        self._what = what
        self._pid = os.getpid()

    @property
    def is_this(self) -> bool:
        """True in the process that made the object."""
        return os.getpid() == self._pid

    def require(self, doing: str) -> None:
        """Raise FailedPreconditionError in a forked child, which lacks the object's threads and connections."""
        if os.getpid() != self._pid:
            raise FailedPreconditionError(
                f"{self._what} must be {doing} by the process that made it ({self._pid}), but this is its forked child "
                f"{os.getpid()}. A forked child has none of its parent's threads and connections. Make a new one in "
                'the child, or start the child with the method "spawn".'
            )


class ForkAware(Protocol):
    """An object with a method that a forked child calls after the fork."""

    def after_fork_in_child(self) -> None:
        """Drop the state that belongs to the parent process."""


@final
class _ForkAwareObjects:
    """The objects of which a forked child calls `after_fork_in_child`."""

    def __init__(self) -> None:
        self._objects: weakref.WeakSet[ForkAware] = weakref.WeakSet()
        os.register_at_fork(after_in_child=self._call_all)

    def add(self, obj: ForkAware) -> None:
        self._objects.add(obj)

    def _call_all(self) -> None:
        for obj in tuple(self._objects):
            obj.after_fork_in_child()


_fork_aware = _ForkAwareObjects()  # one per process: callbacks for forks cannot be unregistered


def register_after_fork(obj: ForkAware) -> None:
    """Call `obj.after_fork_in_child` in each forked child. `obj` then need not check the process id at each use."""
    _fork_aware.add(obj)


def never_free(obj: object) -> None:
    """Keep a C++ object alive in a forked child: its destructor would need threads of the parent."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(obj))


def call_here(fn: Callable[..., _T], *args: Any, **kwargs: Any) -> _T:
    """Call a user's function. If the function forks, end the child process when the function returns in the child.

    >>> call_here(max, 2, 3)
    3
    """
    pid = os.getpid()
    try:
        result = fn(*args, **kwargs)
    except BaseException as error:
        end_forked_child(pid, error)
        raise
    if os.getpid() != pid:
        end_forked_child(pid)
    return result


def end_forked_child(pid: int, error: BaseException | None = None) -> None:
    """End this process if it is a child that a user's function has forked. The child must not run the caller's code.

    Args:
        pid: The process that called the function. Any other process ends.
        error: The error that the function raised. It is printed, because nothing else reports it.
    """
    if os.getpid() == pid:
        return
    if error is not None:
        traceback.print_exception(error)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(0 if error is None else 1)
