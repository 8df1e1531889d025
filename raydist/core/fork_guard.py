"""The process that owns an object: a forked child has a copy of it, without its threads and connections."""

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
                f"{self._what} must be {doing} by the process that made it ({self._pid}), this is its forked child "
                f"{os.getpid()}, which has neither its threads nor its connections. Make a new one in the child, or "
                'start the child with the method "spawn".'
            )


class Inherited(Protocol):
    """An object that is told when it is a copy in a forked child."""

    def became_a_copy(self) -> None:
        """Stop working: this is the forked child."""


@final
class _CopiesInChildren:
    """The objects to tell in a forked child that they are copies."""

    def __init__(self) -> None:
        self._known: weakref.WeakSet[Inherited] = weakref.WeakSet()
        os.register_at_fork(after_in_child=self._tell)

    def add(self, thing: Inherited) -> None:
        self._known.add(thing)

    def _tell(self) -> None:
        for thing in tuple(self._known):
            thing.became_a_copy()


_copies = _CopiesInChildren()  # one per process: callbacks for forks cannot be unregistered


def note_inherited(thing: Inherited) -> None:
    """Tell `thing` in forked children that it is a copy, which saves a check of the process id at each use."""
    _copies.add(thing)


def never_free(thing: object) -> None:
    """Keep a C++ object alive in a forked child: its destructor would need threads of the parent."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


def call_here(fn: Callable[..., _T], *args: Any, **kwargs: Any) -> _T:
    """Call a user's function; a child that the function forks does not return from here.

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
    """End this process if it is not `pid`: a user's function has forked, and the child returns to its caller.

    Args:
        pid: The process in which the function was called.
        error: The error of the function, which is printed: nothing else reports it.
    """
    if os.getpid() == pid:
        return
    if error is not None:
        traceback.print_exception(error)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(0 if error is None else 1)
