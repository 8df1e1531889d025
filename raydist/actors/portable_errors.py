"""Exceptions that cross process boundaries as values: type, message, notes and traceback arrive for any class.

Any method of a user's exception class may raise; a part of the exception that raises is left out.
"""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, final

from raydist.actors.class_tracking import cloudpickle
from raydist.core.errors import Preempted, RaydistError
from raydist.core.exception_utils import (
    LEAVING,
    RemoteTraceback,
    annotate,
    as_exception,
    format_folded,
    message_of,
    shown,
    what_was_raised,
)


@final
@dataclass(frozen=True, slots=True)
class _Parts:
    """An exception in parts, for a class whose constructor or pickling does not produce an equal exception."""

    kind: type[BaseException]
    args: tuple[Any, ...]
    state: Mapping[str, Any]

    @classmethod
    def of(cls, error: BaseException) -> _Parts:
        state = {name: _that_travels(value) for name, value in error.__dict__.items()}
        return cls(type(error), tuple(_that_travels(value) for value in error.args), state)

    def build(self) -> BaseException:
        error = self.kind.__new__(self.kind, *self.args)  # without calling the constructor
        error.args = self.args
        error.__dict__.update(self.state)
        return error


@final
@dataclass(frozen=True, slots=True)
class PortableError:
    """A pickled exception on its way to another process.

    Attributes:
        pickled: The pickled exception or its parts; empty if the class cannot be pickled.
        title: Type and message, used if `pickled` is empty.
        notes: The notes of the exception.
        text: The whole traceback with causes.
    """

    pickled: bytes
    title: str
    notes: tuple[str, ...]
    text: str

    def restore(self) -> Exception:
        """Return the exception with its type and notes, or a RaydistError that shows both if pickling failed.

        An exception that would end this process (`LEAVING`) is returned as a RaydistError, except `Preempted`, which is
        meant to end the process. An object that is no Exception is wrapped in one: see `what_was_raised`.
        """
        error = _load(self.pickled)
        if error is None:
            error = RaydistError(f"{self.title} (this exception does not survive pickling, so its type stayed behind).")
        elif isinstance(error, LEAVING) and not isinstance(error, Preempted):
            error = RaydistError(f"{self.title} (raised in another process, it does not end this one).")
        for note in self.notes:
            annotate(error, note)
        BaseException.__setattr__(error, "__cause__", RemoteTraceback(f"\n{self.text}"))
        return as_exception(error)


def pack_error(error: BaseException, *notes: str) -> PortableError:
    """Convert `error` to a `PortableError`, with further notes on where the error was raised. Never raises."""
    error = what_was_raised(error)
    for note in notes:
        annotate(error, note)
    pickled, message = _dump(error), message_of(error)
    found = _load(pickled)
    own = _notes_of(error)
    if found is not None and message_of(found) != message:
        own = (f"Its message was: {message}", *own)
    return PortableError(
        pickled=pickled,
        title=f"{type(error).__module__}.{type(error).__qualname__}: {message}",
        notes=(*own, *(note for note in notes if note not in own)),
        text=_traceback_of(error),
    )


def _notes_of(error: BaseException) -> tuple[str, ...]:
    try:
        return tuple(str(note) for note in getattr(error, "__notes__", ()))
    except Exception:
        return ()


def _traceback_of(error: BaseException) -> str:
    try:
        return format_folded(error)
    except Exception:
        return "".join(traceback.format_tb(error.__traceback__))


def _dump(error: BaseException) -> bytes:
    """Return the pickled exception or its parts, or b"" if the class cannot be pickled.

    Classes with unusual constructors can be pickled but then fail while being unpickled, so the result is tried here.
    """
    whole, found = _dumped(lambda: error)
    if found is not None and type(found) is type(error) and message_of(found) == message_of(error):
        return whole
    parts, found = _dumped(lambda: _Parts.of(error))
    return parts if type(found) is type(error) else b""


def _dumped(what: Callable[[], Any]) -> tuple[bytes, BaseException | None]:
    """Return a pickle and the exception that it unpickles to, or None if pickling or unpickling fails."""
    try:
        data: bytes = cloudpickle.dumps(what())
    except Exception:  # any error of a user's class means the same here
        return b"", None
    return data, _load(data)


def _that_travels(value: Any) -> Any:
    try:
        pickle.loads(cloudpickle.dumps(value))
    except Exception:
        return shown(value)
    return value


def _load(data: bytes) -> BaseException | None:
    try:
        found = pickle.loads(data) if data else None
        found = found.build() if isinstance(found, _Parts) else found
    except Exception:  # the class may not be importable in this process
        return None
    return found if isinstance(found, BaseException) else None
