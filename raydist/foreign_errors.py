"""What can be done with any exception, whatever its class does: `__str__` may raise, `__notes__` be no list."""

from __future__ import annotations

import functools
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType, TracebackType
from typing import ParamSpec, TypeVar, final

from raydist.errors import Preempted, RaydistError

__all__ = [
    "LEAVING",
    "TRACEBACKS",
    "Carried",
    "RemoteTraceback",
    "annotate",
    "as_exception",
    "describe",
    "fold",
    "folded",
    "format_folded",
    "message_of",
    "shown",
    "user_line",
    "what_was_raised",
]

_P = ParamSpec("_P")
_T = TypeVar("_T")

TRACEBACKS = "RAYDIST_TRACEBACKS"
"""The environment variable that keeps raydist's own frames in tracebacks, where it is "full"."""

_PACKAGE = str(Path(__file__).parent) + os.sep

LEAVING = (SystemExit, KeyboardInterrupt, GeneratorExit)
"""What ends whoever it is raised in. All else is an error of what raised it, also where it is no `Exception`."""


@final
class RemoteTraceback(Exception):
    """The traceback of another process, shown as the cause of the error (as concurrent.futures does)."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text

    def __str__(self) -> str:
        return self.text


@final
class Carried(Exception):
    """Carries what is no `Exception` through code that handles errors of elements and steps, up to the user.

    Args:
        original: What was raised.
    """

    def __init__(self, original: BaseException) -> None:
        super().__init__(original)
        self.original = original


def as_exception(error: BaseException) -> Exception:
    """`error` if it is an `Exception`, else one that carries it.

    >>> as_exception(ValueError("bad"))
    ValueError('bad')
    """
    return error if isinstance(error, Exception) else Carried(error)


def what_was_raised(error: BaseException) -> BaseException:
    """What a user's function raised, where `error` may carry it.

    >>> class Odd(BaseException): ...
    >>> what_was_raised(as_exception(Odd("bad")))
    Odd('bad')
    """
    return error.original if isinstance(error, Carried) else error


def annotate(error: BaseException, note: str) -> None:
    """Add a note to an exception; nothing where it has that note, or its class allows none. Never raises.

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
            # Not by add_note: a class may have one of its own, as it may have a __setattr__.
            BaseException.__setattr__(error, "__notes__", [*notes, note])
    except Exception:  # a property that raises, say: the error itself is what matters
        return


def _listed(notes: object) -> list[object]:
    if isinstance(notes, list | tuple):
        return list(notes)
    return [] if notes is None else [str(notes)]


def message_of(error: BaseException) -> str:
    """`str(error)`, also of one that cannot say it.

    >>> message_of(KeyError("x"))
    "'x'"
    """
    try:
        return str(error)
    except Exception as failure:
        return f"<its __str__ raised {type(failure).__name__}; its arguments: {shown(error.args)}>"


def describe(error: BaseException) -> str:
    """Its class and the first line of what it says, for the message of another error.

    >>> describe(ValueError("bad\\nand worse"))
    'ValueError: bad'
    """
    error = what_was_raised(error)
    return f"{type(error).__name__}: {message_of(error).partition(chr(10))[0]}"


def shown(value: object) -> str:
    """`repr(value)`, also of what cannot say it.

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
    """Return True where raydist's frames tell something: on request, and in an error of raydist itself."""
    return os.environ.get(TRACEBACKS) == "full" or "raydist bug" in message_of(error)


def fold(error: BaseException) -> None:
    """Drop raydist's frames from the traceback of an error, so that the user's are seen.

    An error that raydist did not raise on purpose, and that no other frame took part in, keeps them.
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
    """Decorate a public function: errors that leave it show the user's frames only.

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
            raise  # adds no frame: Python takes the traceback that the error has now

    return call


def format_folded(error: BaseException) -> str:
    """The traceback of an error with its causes, as Python prints it, without raydist's frames."""
    found = traceback.TracebackException.from_exception(error)
    if not _keeps_frames(error):
        _fold_text(found)
    return "".join(found.format())


def _fold_text(found: traceback.TracebackException | None) -> None:
    while found is not None:
        kept = [frame for frame in found.stack if not _is_ours(frame.filename)]
        if kept:  # nothing but raydist's: that is where to look
            found.stack = traceback.StackSummary.from_list(kept)
        for each in found.exceptions or ():
            _fold_text(each)
        _fold_text(found.__cause__)
        found = found.__context__
