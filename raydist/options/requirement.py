"""Validation of option values."""

from __future__ import annotations

from raydist.core.errors import InvalidArgumentError


def require(ok: bool, what: str, got: object) -> None:
    """Raise InvalidArgumentError with the requirement and the value, unless `ok`.

    >>> require(False, "n must be > 0", -1)
    Traceback (most recent call last):
    raydist.core.errors.InvalidArgumentError: n must be > 0, got -1.
    """
    if not ok:
        raise InvalidArgumentError(f"{what}, got {got!r}.")
