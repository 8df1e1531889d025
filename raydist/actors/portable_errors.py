"""Exceptions as values that other processes can unpickle, with type, message, notes and traceback.

Any method of a user's exception class may itself raise an error. The value then lacks what that method would return.
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
    """The class, the arguments and the attributes of an exception that pickle cannot copy as a whole."""

    kind: type[BaseException]
    args: tuple[Any, ...]
    state: Mapping[str, Any]

    @classmethod
    def of(cls, error: BaseException) -> _Parts:
        state = {name: _value_or_repr(value) for name, value in error.__dict__.items()}
        return cls(type(error), tuple(_value_or_repr(value) for value in error.args), state)

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
        text: The complete traceback, with the causes of the exception.
    """

    pickled: bytes
    title: str
    notes: tuple[str, ...]
    text: str

    def restore(self) -> Exception:
        """Return the exception with its type and notes.

        Return a RaydistError with the same text if the exception cannot be pickled, or if it would end this process
        (see `LEAVING`). `Preempted` keeps its type, because it must end the process. A BaseException that is not an
        Exception is returned inside of an Exception; `what_was_raised` unwraps it.
        """
        error = _load(self.pickled)
        if error is None:
            error = RaydistError(f"{self.title} (this exception cannot be pickled, so its type is lost).")
        elif isinstance(error, LEAVING) and not isinstance(error, Preempted):
            error = RaydistError(f"{self.title} (raised in another process; the exception does not end this process).")
        for note in self.notes:
            annotate(error, note)
        BaseException.__setattr__(error, "__cause__", RemoteTraceback(f"\n{self.text}"))
        return as_exception(error)


def pack_error(error: BaseException, *notes: str) -> PortableError:
    """Convert `error` to a `PortableError`, and add notes about the place of the error. Never raises."""
    error = what_was_raised(error)
    for note in notes:
        annotate(error, note)
    pickled, message = _dump(error), message_of(error)
    restored = _load(pickled)
    own_notes = _notes_of(error)
    if restored is not None and message_of(restored) != message:
        own_notes = (f"Its message was: {message}", *own_notes)
    return PortableError(
        pickled=pickled,
        title=f"{type(error).__module__}.{type(error).__qualname__}: {message}",
        notes=(*own_notes, *(note for note in notes if note not in own_notes)),
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

    Unpickle the result as a test: exceptions with unusual constructors may pickle and then fail to unpickle.
    """
    whole, restored = _pickle_and_load(lambda: error)
    if restored is not None and type(restored) is type(error) and message_of(restored) == message_of(error):
        return whole
    parts, restored = _pickle_and_load(lambda: _Parts.of(error))
    return parts if type(restored) is type(error) else b""


def _pickle_and_load(make: Callable[[], Any]) -> tuple[bytes, BaseException | None]:
    """Pickle the result of `make`; return the pickle, and the unpickled exception or None if one of both fails."""
    try:
        data: bytes = cloudpickle.dumps(make())
    except Exception:  # a user's class may raise any error while it is pickled
        return b"", None
    return data, _load(data)


def _value_or_repr(value: Any) -> Any:
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
