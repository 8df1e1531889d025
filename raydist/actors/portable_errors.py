"""Errors that cross process borders as values: type, message, notes and traceback arrive, whatever their class.

A user's class may raise from everything that is asked of it; what fails here is left out, and never raised.
"""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, final

from raydist.actors.class_tracking import cloudpickle
from raydist.errors import Preempted, RaydistError
from raydist.foreign_errors import (
    LEAVING,
    RemoteTraceback,
    annotate,
    as_exception,
    format_folded,
    message_of,
    shown,
    what_was_raised,
)

__all__ = ["PortableError", "pack_error"]


@final
@dataclass(frozen=True, slots=True)
class _Parts:
    """An exception in pieces: of a class whose constructor or pickling does not give an equal one."""

    kind: type[BaseException]
    args: tuple[Any, ...]
    state: Mapping[str, Any]

    @classmethod
    def of(cls, error: BaseException) -> _Parts:
        state = {name: _that_travels(value) for name, value in error.__dict__.items()}
        return cls(type(error), tuple(_that_travels(value) for value in error.args), state)

    def build(self) -> BaseException:
        error = self.kind.__new__(self.kind, *self.args)  # its constructor is passed over
        error.args = self.args
        error.__dict__.update(self.state)
        return error


@final
@dataclass(frozen=True, slots=True)
class PortableError:
    """An exception on its way to another process.

    Attributes:
        pickled: The exception, or its pieces; empty where its class cannot travel.
        title: Its type and message, for that case.
        notes: Its notes.
        text: The whole traceback with causes.
    """

    pickled: bytes
    title: str
    notes: tuple[str, ...]
    text: str

    def restore(self) -> Exception:
        """The exception with its type and notes; a RaydistError that shows both where the type cannot travel.

        One that would end this process (`LEAVING`) comes as a RaydistError as well, but for `Preempted`, which is to
        end it. What is no Exception is carried by one: see `what_was_raised`.
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
    """Make `error` ready to travel, with further notes on where it was raised. Never raises."""
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
    """Empty where not even its class arrives. Classes with odd constructors pickle well and fail on arrival."""
    whole, found = _dumped(lambda: error)
    if found is not None and type(found) is type(error) and message_of(found) == message_of(error):
        return whole
    parts, found = _dumped(lambda: _Parts.of(error))
    return parts if type(found) is type(error) else b""


def _dumped(what: Callable[[], Any]) -> tuple[bytes, BaseException | None]:
    """A pickle, and the exception that it gives; None where it gives none."""
    try:
        data: bytes = cloudpickle.dumps(what())
    except Exception:  # whatever a user's class raises here means the same
        return b"", None
    return data, _load(data)


def _that_travels(value: Any) -> Any:
    """`value`, or text in its place if it cannot be pickled."""
    try:
        pickle.loads(cloudpickle.dumps(value))
    except Exception:
        return shown(value)
    return value


def _load(data: bytes) -> BaseException | None:
    try:
        found = pickle.loads(data) if data else None
        found = found.build() if isinstance(found, _Parts) else found
    except Exception:  # its class may not be importable here
        return None
    return found if isinstance(found, BaseException) else None
