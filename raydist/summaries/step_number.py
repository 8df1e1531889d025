"""Conversion of step arguments."""

from __future__ import annotations

import operator
from typing import Any

from raydist.errors import InvalidArgumentError

__all__ = ["step_number"]

_FIRST_TOO_LARGE = 1 << 63  # event files hold 64 bits


def step_number(step: Any) -> int | None:
    """Return `step` as a plain int, or None. Reads a tensor at once.

    Raises:
        InvalidArgumentError: The step is not a whole number.

    >>> step_number(3), step_number(None)
    (3, None)
    """
    if step is None:
        return None
    try:
        if isinstance(step, bool):
            raise TypeError
        number = operator.index(step.item() if hasattr(step, "item") else step)
        if not -_FIRST_TOO_LARGE <= number < _FIRST_TOO_LARGE:
            raise ValueError
        return number
    except (TypeError, ValueError, RuntimeError):
        raise InvalidArgumentError(
            f"The step of a summary must be a whole number, got {step!r:.80}. Pass e.g. step=epoch; it has 64 bits."
        ) from None
