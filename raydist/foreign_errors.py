"""What can be done with any exception, whatever its class does: `__str__` may raise, `__notes__` be no list."""

from __future__ import annotations

from typing import final

__all__ = ["LEAVING", "Carried", "annotate", "as_exception", "describe", "message_of", "shown", "what_was_raised"]

LEAVING = (SystemExit, KeyboardInterrupt, GeneratorExit)
"""What ends whoever it is raised in. All else is an error of what raised it, also where it is no `Exception`."""


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
