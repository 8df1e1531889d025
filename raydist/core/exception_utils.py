"""Operations on arbitrary exceptions: `__str__` may raise, and `__notes__` may not be a list."""

from __future__ import annotations

import functools
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import FrameType, TracebackType
from typing import ParamSpec, TypeVar, final

from raydist.core.errors import Preempted, RaydistError

_P = ParamSpec("_P")
_T = TypeVar("_T")

TRACEBACKS = "RAYDIST_TRACEBACKS"
"""Name of the environment variable that, set to "full", keeps raydist's own frames in tracebacks."""

_PACKAGE = str(Path(__file__).parent.parent) + os.sep

LEAVING = (SystemExit, KeyboardInterrupt, GeneratorExit)
"""Exceptions that end the caller. Every other exception is an error, even if it is not an `Exception`."""


@final
class RemoteTraceback(Exception):
    """The traceback of another process, shown as the cause of the error (as in concurrent.futures)."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text

    def __str__(self) -> str:
        return self.text


@final
class Carried(Exception):
    """A wrapper of an exception that is not an `Exception`, so that error handlers pass it on to the user.

    Args:
        original: The wrapped exception.
    """

    def __init__(self, original: BaseException) -> None:
        super().__init__(original)
        self.original = original


def as_exception(error: BaseException) -> Exception:
    """Return `error` if it is an `Exception`, else a `Carried` that wraps it.

    >>> as_exception(ValueError("bad"))
    ValueError('bad')
    """
    return error if isinstance(error, Exception) else Carried(error)


def what_was_raised(error: BaseException) -> BaseException:
    """Return the exception of the user's function: `error`, or the one that `error` wraps.

    >>> class Odd(BaseException): ...
    >>> what_was_raised(as_exception(Odd("bad")))
    Odd('bad')
    """
    return error.original if isinstance(error, Carried) else error


def annotate(error: BaseException, note: str) -> None:
    """Add a note to an exception, unless it has that note or allows none. Never raises.

    >>> error = ValueError("bad")
    >>> error.__notes__ = "odd: no list"
    >>> annotate(error, "In map-1.")
    >>> error.__notes__
    ['odd: no list', 'In map-1.']
    """
    error = what_was_raised(error)
    try:
        notes = _listed(getattr(error, "__notes__", None))
        if note not in notes:
            # Not add_note or setattr: the class of the exception may override both.
            BaseException.__setattr__(error, "__notes__", [*notes, note])
    except Exception:  # e.g. a property that raises: the error itself matters more
        return


def _listed(notes: object) -> list[object]:
    if isinstance(notes, list | tuple):
        return list(notes)
    return [] if notes is None else [str(notes)]


def message_of(error: BaseException) -> str:
    """Return `str(error)`; if `__str__` raises, return a description instead.

    >>> message_of(KeyError("x"))
    "'x'"
    """
    try:
        return str(error)
    except Exception as failure:
        return f"<its __str__ raised {type(failure).__name__}; its arguments: {shown(error.args)}>"


def describe(error: BaseException) -> str:
    """Return the class and the first line of the message, for the message of another error.

    >>> describe(ValueError("bad\\nand worse"))
    'ValueError: bad'
    """
    error = what_was_raised(error)
    return f"{type(error).__name__}: {message_of(error).partition(chr(10))[0]}"


def shown(value: object) -> str:
    """Return `repr(value)`; if `__repr__` raises, return the name of the class.

    >>> shown(3)
    '3'
    """
    try:
        return repr(value)
    except Exception:
        return f"<{type(value).__qualname__}>"


def user_line() -> str:
    """Return the file and line of the program that called raydist."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and _is_ours(frame.f_code.co_filename):
        frame = frame.f_back
    return "an unknown line" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _is_ours(filename: str) -> bool:
    return filename.startswith(_PACKAGE)


def _keeps_frames(error: BaseException) -> bool:
    """Return True if raydist's frames are of use: on request, and for errors of raydist itself."""
    return os.environ.get(TRACEBACKS) == "full" or "raydist bug" in message_of(error)


def fold(error: BaseException) -> None:
    """Drop raydist's frames from the traceback of an error, so that the user's frames are visible.

    An error that raydist did not raise on purpose keeps its frames if all of them are raydist's.
    """
    frames = list(_walk(error.__traceback__))
    others = [frame for frame in frames if not _is_ours(frame.tb_frame.f_code.co_filename)]
    is_told = isinstance(error, RaydistError | Preempted) or isinstance(error.__cause__, RemoteTraceback)
    if (not others and not is_told) or _keeps_frames(error):
        return
    kept: TracebackType | None = None
    for frame in reversed(others):
        kept = TracebackType(kept, frame.tb_frame, frame.tb_lasti, frame.tb_lineno)
    BaseException.__setattr__(error, "__traceback__", kept)


def _walk(trace: TracebackType | None) -> Iterator[TracebackType]:
    while trace is not None:
        yield trace
        trace = trace.tb_next


def folded(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Decorate a public function so that errors that leave it show the user's frames only.

    >>> try:
    ...     rd.OneDeviceStrategy("cpu").run(lambda: 1 / 0)
    ... except ZeroDivisionError as error:
    ...     [frame.name for frame in traceback.extract_tb(error.__traceback__)]
    ['<module>', '<lambda>']
    """

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        try:
            return function(*args, **kwargs)
        except BaseException as error:
            fold(error)
            raise  # adds no frame: Python uses the error's present traceback

    return call


def format_folded(error: BaseException) -> str:
    """Format the traceback of an error and its causes as Python does, without raydist's frames."""
    found = traceback.TracebackException.from_exception(error)
    if not _keeps_frames(error):
        _fold_text(found)
    return "".join(found.format())


def _fold_text(found: traceback.TracebackException | None) -> None:
    while found is not None:
        kept = [frame for frame in found.stack if not _is_ours(frame.filename)]
        if kept:  # a stack of raydist's frames alone is kept: the fault is there
            found.stack = traceback.StackSummary.from_list(kept)
        for each in found.exceptions or ():
            _fold_text(each)
        _fold_text(found.__cause__)
        found = found.__context__


def collect_errors(calls: Iterable[Callable[[], object]]) -> None:
    """Make every call in order, even if an earlier one raises; then raise the first error.

    >>> collect_errors([lambda: print("first"), lambda: print("second")])
    first
    second
    """
    errors: list[Exception] = []
    for call in calls:
        try:
            call()
        except Exception as error:  # raised below
            errors.append(error)
    if errors:
        raise errors[0]
