"""Run several calls although some may fail: a variable that cannot be refreshed must not keep the others stale."""

from __future__ import annotations

from collections.abc import Callable, Iterable

__all__ = ["attempt_all"]


def attempt_all(calls: Iterable[Callable[[], object]]) -> None:
    """Make every call in order, even if an earlier one raises; then raise the first error.

    >>> attempt_all([lambda: print("first"), lambda: print("second")])
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
