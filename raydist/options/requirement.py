"""What settings must hold, checked where they are made."""

from __future__ import annotations

from raydist.errors import InvalidArgumentError

__all__ = ["require"]


def require(ok: bool, what: str, got: object) -> None:
    """Raise InvalidArgumentError with what must hold and what was got, unless it holds.

    >>> require(False, "n must be > 0", -1)
    Traceback (most recent call last):
    raydist.errors.InvalidArgumentError: n must be > 0, got -1.
    """
    if not ok:
        raise InvalidArgumentError(f"{what}, got {got!r}.")
