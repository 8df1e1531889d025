"""Errors that cross process borders as values: type, message, notes and traceback arrive, whatever their class."""

from __future__ import annotations

import pickle
import traceback
from dataclasses import dataclass
from typing import final

import cloudpickle

from raydist.errors import RaydistError

__all__ = ["PortableError", "RemoteTraceback", "pack_error"]


@final
class RemoteTraceback(Exception):
    """The traceback of another process, shown as the cause of the error (as concurrent.futures does)."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text

    def __str__(self) -> str:
        return self.text


@final
@dataclass(frozen=True, slots=True)
class PortableError:
    """An exception on its way to another process.

    Attributes:
        pickled: The exception, or empty where it does not survive pickling.
        title: Its type and message, for that case.
        notes: Its notes, for that case.
        text: The whole traceback with causes.
    """

    pickled: bytes
    title: str
    notes: tuple[str, ...]
    text: str

    def restore(self) -> Exception:
        """The exception with its type and notes; a RaydistError that shows both where the type cannot travel."""
        error = _load(self.pickled)
        if error is None:
            error = RaydistError(f"{self.title} (this exception does not survive pickling, so its type stayed behind).")
            for note in self.notes:
                error.add_note(note)
        error.__cause__ = RemoteTraceback(f"\n{self.text}")
        return error


def pack_error(error: BaseException, *notes: str) -> PortableError:
    """Make `error` ready to travel, with further notes on where it was raised."""
    for note in notes:
        if note not in getattr(error, "__notes__", ()):
            error.add_note(note)
    return PortableError(
        pickled=_dump(error),
        title=f"{type(error).__module__}.{type(error).__qualname__}: {error}",
        notes=tuple(getattr(error, "__notes__", ())),
        text="".join(traceback.format_exception(error)),
    )


def _dump(error: BaseException) -> bytes:
    """Empty unless unpickling gives an equal error: classes with odd constructors pickle well and fail on arrival."""
    try:
        data: bytes = cloudpickle.dumps(error)
    except Exception:  # whatever a user's class raises here means the same
        return b""
    found = _load(data)
    return data if type(found) is type(error) and str(found) == str(error) else b""


def _load(data: bytes) -> Exception | None:
    try:
        found = pickle.loads(data) if data else None
    except Exception:  # its class may not be importable here
        return None
    return found if isinstance(found, Exception) else None
