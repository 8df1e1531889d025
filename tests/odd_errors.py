"""Errors as users have them, of which much that is usual does not hold."""

from __future__ import annotations


class Departure(BaseException):
    """No Exception, and does not end its process."""


class Mute(Exception):
    """Wants two arguments, has no message, and its notes are no list."""

    def __init__(self, first: int, second: int) -> None:
        super().__init__(first)
        self.__notes__ = "odd"  # type: ignore[assignment]  # what users do

    def __str__(self) -> str:
        raise RuntimeError("no words")
