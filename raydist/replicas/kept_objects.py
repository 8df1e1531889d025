"""Objects of the store that a replica keeps for the steps to come, and the driver's picture of them. Pure.

An object holds the rows of several steps, and steps that are sent one by one would each have it mapped anew: 1.5 ms for
each replica. Both sides number the objects as they are sent and keep the last ones, so they need not tell each other.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, final

from raydist.errors import FailedPreconditionError

__all__ = ["KeptObjects", "SentObjects"]

_KEPT = 2  # one that is in use, and the one before it, for whoever holds a batch back


@final
class SentObjects:
    """What the driver has sent to one replica, by reference."""

    def __init__(self) -> None:
        self._numbers: dict[Any, int] = {}
        self._next = 0

    def send(self, refs: Iterable[Any]) -> tuple[tuple[int, ...], list[Any]]:
        """The numbers of the objects of `refs`, and those refs that must travel, in the order of their numbers."""
        numbers, travelling = [], []
        for ref in refs:
            if ref not in self._numbers:
                self._numbers[ref] = self._next
                self._next += 1
                travelling.append(ref)
            numbers.append(self._numbers[ref])
        self._numbers = {ref: number for ref, number in self._numbers.items() if number >= self._next - _KEPT}
        return tuple(numbers), travelling

    def forget(self) -> None:
        """Who knows what has arrived: everything must travel again."""
        self._numbers.clear()


@final
class KeptObjects:
    """What a replica was sent, by number."""

    def __init__(self) -> None:
        self._objects: dict[int, Any] = {}

    def receive(self, numbers: Sequence[int], arrived: Sequence[Any]) -> list[Any]:
        """The objects of these numbers.

        Args:
            numbers: As `SentObjects.send` gave them.
            arrived: The objects that travelled.

        Raises:
            FailedPreconditionError: One was sent in a message that did not arrive.
        """
        if not numbers and not arrived:
            return []
        new = sorted(number for number in numbers if number not in self._objects)
        if len(new) != len(arrived):
            raise FailedPreconditionError(
                f"A step must come with the objects that it uses; of {list(numbers)}, {new} are not here and "
                f"{len(arrived)} came along. A message before it was lost."
            )
        self._objects.update(zip(new, arrived, strict=True))
        found = [self._objects[number] for number in numbers]
        newest = max(self._objects, default=0)
        self._objects = {number: value for number, value in self._objects.items() if number > newest - _KEPT}
        return found
