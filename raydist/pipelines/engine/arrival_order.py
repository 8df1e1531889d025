"""In which order the blocks of stages were handed out, where any order is allowed.

The state of an iterator is a state of the past and the items handed out since. Going on from there gives the same items
again only in the same order: so a stage that does not keep the order notes it, and the notes since that past state are
part of the iterator's state. A stage that resumes follows the notes first.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any, final

__all__ = ["ArrivalOrder", "ArrivalOrders"]

_LONG = 2000  # characters
_MAX_NOTES = 1 << 20  # of a state from outside
_MAX_TEXT = 1 << 24


@final
class ArrivalOrder:
    """Of one stage: sizes of its blocks, which are numbered as they are read, and their numbers as they were given."""

    def __init__(self, first: int = 0, sizes: Iterable[int] = (), given: int = 0, numbers: Iterable[int] = ()) -> None:
        self._first = first  # number of the block of the first size
        self._sizes = list(sizes)
        self._given = given  # blocks given before the first number
        self._numbers = list(numbers)

    def size_of(self, number: int) -> int | None:
        """Items of a block that was read before; None for a new one."""
        at = number - self._first
        return self._sizes[at] if 0 <= at < len(self._sizes) else None

    def was_read(self, number: int, size: int) -> None:
        """Note the size of a new block."""
        if number == self._first + len(self._sizes):
            self._sizes.append(size)

    def number_at(self, given: int) -> int | None:
        """Which block was given after so many others; None if that is open."""
        at = given - self._given
        return self._numbers[at] if 0 <= at < len(self._numbers) else None

    def was_given(self, given: int, number: int) -> None:
        """Note that a block was given after so many others."""
        if given == self._given + len(self._numbers):
            self._numbers.append(number)

    def since(self, first: int, given: int) -> list[Any]:
        """The notes from block `first` on, and since `given` blocks were given, in short."""
        numbers = self._numbers[given - self._given :]
        distances = [number - place for place, number in enumerate(numbers, given)]  # few different ones: see `_short`
        return [first, _counted(self._sizes[first - self._first :]), given, _counted(distances)]

    @classmethod
    def parse(cls, notes: list[Any]) -> ArrivalOrder:
        """From what `since` gave."""
        first, sizes, given, distances = notes
        numbers = [place + distance for place, distance in enumerate(_repeated(distances), int(given))]
        return cls(int(first), _repeated(sizes), int(given), numbers)


def _counted(values: Iterable[int]) -> list[list[int]]:
    return [[value, len(list(same))] for value, same in groupby(values)]


def _repeated(counted: Iterable[Sequence[int]]) -> list[int]:
    pairs = [(int(value), int(count)) for value, count in counted]
    if sum(max(0, count) for _, count in pairs) > _MAX_NOTES:
        raise ValueError(f"there may be at most {_MAX_NOTES} notes of one order")
    return [value for value, count in pairs for _ in range(count)]


@final
class ArrivalOrders:
    """Of all stages of one iterator."""

    def __init__(self) -> None:
        self._orders: dict[str, ArrivalOrder] = {}

    def of(self, name: str) -> ArrivalOrder:
        """The order of the stage `name`."""
        return self._orders.setdefault(name, ArrivalOrder())

    def since(self, state: Any) -> dict[str, Any]:
        """What has to be kept with `state`: for each stage in it, the notes since the oldest state of it.

        A state at the end of one pass says nothing of the next ones, which may have given elements since: the notes of
        later passes over a stage that is in it are kept whole.
        """
        oldest: dict[str, tuple[int, int]] = {}
        for name, first, given in _marks(state):
            known = oldest.get(name, (first, given))
            oldest[name] = (min(first, known[0]), min(given, known[1]))
        found = oldest | dict.fromkeys(self._later(oldest), (0, 0))
        return {name: _short(self.of(name).since(*since)) for name, since in found.items()}

    def _later(self, names: Collection[str]) -> list[str]:
        """Orders made after the last of `names` of the same stage, in another of its passes."""
        made = list(self._orders)
        last = {_stage(name): number for number, name in enumerate(made) if name in names}
        return [name for number, name in enumerate(made) if number > last.get(_stage(name), number)]

    def load(self, notes: dict[str, Any]) -> None:
        """Forget all orders but those that `since` gave."""
        self._orders = {name: ArrivalOrder.parse(_long(order)) for name, order in notes.items()}


def _stage(name: str) -> str:
    """The name of a stage without that of a pass: "map-1" of "map-1@0.2"."""
    return name.rpartition("@")[0]


def _short(notes: list[Any]) -> list[Any] | str:
    """Long notes as text that is short: thousands of turns are some kilobytes."""
    text = json.dumps(notes)
    return notes if len(text) < _LONG else base64.b85encode(zlib.compress(text.encode())).decode()


def _long(notes: list[Any] | str) -> list[Any]:
    if isinstance(notes, list):
        return notes
    inflater = zlib.decompressobj()
    try:
        text = inflater.decompress(base64.b85decode(notes), _MAX_TEXT)
        found: list[Any] = json.loads(text)
    except (ValueError, TypeError, RecursionError, zlib.error) as error:
        raise ValueError(f"notes of an order must be whole, and have at most {_MAX_TEXT} bytes: {error}") from error
    return found


def _marks(state: Any) -> Iterator[tuple[str, int, int]]:
    """Name, first block and number of given ones in each state of a stage that lies in `state`."""
    if isinstance(state, dict):
        if "order" in state:
            yield state["order"], state["first"], state["given"]
        state = list(state.values())
    if isinstance(state, list | tuple):
        for part in state:
            yield from _marks(part)
