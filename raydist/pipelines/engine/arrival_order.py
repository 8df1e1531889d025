"""The order in which stages hand out blocks when any order is allowed.

The state of an iterator is a past state and the number of items handed out since. Resuming from this state gives the
same items only in the same order. So a stage that does not keep the order notes it, and the notes made since the past
state are part of the iterator's state. A stage that resumes follows the notes first.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any, final

_LONG = 2000  # characters
_MAX_NOTES = 1 << 20  # of a state that a user loads
_MAX_TEXT = 1 << 24


@final
class ArrivalOrder:
    """The order of one stage: the sizes of its blocks in reading order, and the order in which it handed them out."""

    def __init__(self, first: int = 0, sizes: Iterable[int] = (), given: int = 0, numbers: Iterable[int] = ()) -> None:
        self._first = first  # number of the block of the first size
        self._sizes = list(sizes)
        self._given = given  # blocks given before the first number
        self._numbers = list(numbers)

    def size_of(self, number: int) -> int | None:
        """Return the number of items of a block that was read before; None for a new block."""
        at = number - self._first
        return self._sizes[at] if 0 <= at < len(self._sizes) else None

    def was_read(self, number: int, size: int) -> None:
        """Note the size of a new block."""
        if number == self._first + len(self._sizes):
            self._sizes.append(size)

    def number_at(self, given: int) -> int | None:
        """Return the number of the block that was handed out after `given` others; None if none is noted."""
        at = given - self._given
        return self._numbers[at] if 0 <= at < len(self._numbers) else None

    def was_given(self, given: int, number: int) -> None:
        """Note that block `number` was handed out after `given` others."""
        if given == self._given + len(self._numbers):
            self._numbers.append(number)

    def since(self, first: int, given: int) -> list[Any]:
        """Return, run-length encoded, the sizes from block `first` on and the numbers from place `given` on."""
        numbers = self._numbers[given - self._given :]
        distances = [number - place for place, number in enumerate(numbers, given)]  # few different ones: see `_short`
        return [first, _counted(self._sizes[first - self._first :]), given, _counted(distances)]

    @classmethod
    def parse(cls, notes: list[Any]) -> ArrivalOrder:
        """Return the order that `since` has encoded."""
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
    """The orders of all stages of one iterator."""

    def __init__(self) -> None:
        self._orders: dict[str, ArrivalOrder] = {}

    def of(self, name: str) -> ArrivalOrder:
        """Return the order of the stage `name`."""
        return self._orders.setdefault(name, ArrivalOrder())

    def since(self, state: Any) -> dict[str, Any]:
        """Return the notes to save with `state`: for each stage in the state, the notes since its oldest state there.

        A state at the end of one pass says nothing about later passes, which may have handed out elements since. The
        notes of later passes of such a stage are kept whole.
        """
        oldest: dict[str, tuple[int, int]] = {}
        for name, first, given in _marks(state):
            known = oldest.get(name, (first, given))
            oldest[name] = (min(first, known[0]), min(given, known[1]))
        found = oldest | dict.fromkeys(self._later(oldest), (0, 0))
        return {name: _short(self.of(name).since(*since)) for name, since in found.items()}

    def _later(self, names: Collection[str]) -> list[str]:
        """Return the orders that the same stages made after the last of `names`, in later passes."""
        made = list(self._orders)
        last = {_stage(name): number for number, name in enumerate(made) if name in names}
        return [name for number, name in enumerate(made) if number > last.get(_stage(name), number)]

    def load(self, notes: dict[str, Any]) -> None:
        """Replace all orders with the notes that `since` returned."""
        self._orders = {name: ArrivalOrder.parse(_long(order)) for name, order in notes.items()}


def _stage(name: str) -> str:
    """Return the name of a stage without its pass: "map-1" of "map-1@0.2"."""
    return name.rpartition("@")[0]


def _short(notes: list[Any]) -> list[Any] | str:
    """Compress long notes to text: thousands of blocks take some kilobytes."""
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
    """Yield the name, first block and number of blocks handed out of each stage state inside `state`."""
    if isinstance(state, dict):
        if "order" in state:
            yield state["order"], state["first"], state["given"]
        state = list(state.values())
    if isinstance(state, list | tuple):
        for part in state:
            yield from _marks(part)
