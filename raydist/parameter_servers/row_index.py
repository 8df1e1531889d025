"""The rows of a table in memory, and indexes from row numbers to their positions, for many rows at once."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, final

import numpy as np
import torch

from raydist.parameter_servers.table_spec import hash_mix

Numbers = np.ndarray[Any, np.dtype[np.int64]]

_MOST_DIRECT = 1 << 24  # rows of a table: 64 MB of entries. A direct index is 3 times as fast as one that hashes
_FIRST_ENTRIES = 1 << 10
_FULLEST = 0.5  # load factor of a hash index: rows are then found after 1.5 probes


@final
class GrowingRows:
    """Consecutive rows in memory that grows by half when it is full."""

    def __init__(self, width: int, dtype: torch.dtype) -> None:
        self.count = 0  # number of rows
        self.width = width  # number of values in a row
        self._memory = torch.empty((0, width), dtype=dtype)

    @property
    def values(self) -> torch.Tensor:
        """A view of all rows; rows that are added later may lie elsewhere."""
        return self._memory[: self.count]

    @property
    def num_bytes(self) -> int:
        """Size of the rows in bytes."""
        return self.values.nbytes

    def take(self, places: torch.Tensor) -> torch.Tensor:
        """Return copies of the rows at these positions."""
        return self._memory.index_select(0, places)

    def put(self, places: torch.Tensor, values: torch.Tensor) -> None:
        """Replace the rows at these positions. Costs half of `index_copy_`: a row is one piece of memory."""
        _cells(self._memory)[places.numpy()] = _cells(values.detach().contiguous())

    def append(self, values: torch.Tensor) -> None:
        """Add rows."""
        begin = self.count
        self._make_room(begin + len(values))
        self.count = begin + len(values)
        self._memory[begin : self.count] = values

    def extend(self, count: int, fill: float = 0.0) -> None:
        """Grow to `count` rows; new rows have this value everywhere."""
        if count > self.count:
            self._make_room(count)
            self._memory[self.count : count] = fill
            self.count = count

    def _make_room(self, count: int) -> None:
        if count > len(self._memory):
            memory = self._memory.new_empty((max(count, len(self._memory) * 3 // 2), self.width))
            memory[: self.count] = self._memory[: self.count]
            self._memory = memory


def _cells(rows: torch.Tensor) -> np.ndarray[Any, np.dtype[np.void]]:
    """Return a view of rows in which each row is one element."""
    cells: np.ndarray[Any, np.dtype[np.void]] = rows.view(torch.uint8).numpy()
    return cells.reshape(-1).view(f"V{rows.shape[1] * rows.element_size()}")


class RowIndex(ABC):
    """An index of positions. The n-th added row has position n."""

    @abstractmethod
    def find(self, rows: Numbers) -> Numbers:
        """Return positions of rows; -1 for unknown rows."""

    @abstractmethod
    def add(self, rows: Numbers) -> Numbers:
        """Add unknown rows, all different; return their positions."""

    @abstractmethod
    def rows(self) -> Numbers:
        """Return all rows, by position."""

    @property
    @abstractmethod
    def num_bytes(self) -> int:
        """Size of the index in bytes."""


def index_for(num_rows: int) -> RowIndex:
    """Return an index for a table of so many rows."""
    return DirectIndex(num_rows) if num_rows <= _MOST_DIRECT else HashIndex()


@final
class _Arrivals:
    """Row numbers in the order in which they were added."""

    def __init__(self) -> None:
        self._held = GrowingRows(1, torch.int64)

    @property
    def count(self) -> int:
        return self._held.count

    def append(self, rows: Numbers) -> Numbers:
        """Append rows; return their positions."""
        begin = self._held.count
        self._held.append(torch.from_numpy(rows).view(-1, 1))
        return np.arange(begin, self._held.count)

    @property
    def all(self) -> Numbers:
        return self._held.values.numpy().reshape(-1)


@final
class DirectIndex(RowIndex):
    """An index with an entry for each row that could exist."""

    def __init__(self, num_rows: int) -> None:
        self._entries = np.zeros(num_rows, np.int32)  # place + 1
        self._arrivals = _Arrivals()

    def find(self, rows: Numbers) -> Numbers:
        return self._entries[rows].astype(np.int64) - 1

    def add(self, rows: Numbers) -> Numbers:
        places = self._arrivals.append(rows)
        self._entries[rows] = places + 1
        return places

    def rows(self) -> Numbers:
        return self._arrivals.all

    @property
    def num_bytes(self) -> int:
        return self._entries.nbytes + 8 * self._arrivals.count


@final
class HashIndex(RowIndex):
    """Open addressing with linear probing: an entry is a position + 1, or 0 if it is free.

    Lookups compare the row numbers where the rows are stored. A row costs 4 bytes for each of 2 to 4 entries, and 8.
    """

    def __init__(self) -> None:
        self._entries = np.zeros(_FIRST_ENTRIES, np.uint32)
        self._arrivals = _Arrivals()

    def find(self, rows: Numbers) -> Numbers:
        found = np.full(len(rows), -1, np.int64)
        at, left, known = self._home(rows), np.arange(len(rows)), self._arrivals.all
        if not len(known):
            return found
        while len(left):
            places = self._entries[at].astype(np.int64) - 1
            taken = places >= 0
            here = known[places] == rows
            here &= taken
            found[left[here]] = places[here]
            others = np.flatnonzero(taken & ~here)
            left, rows, at = left[others], rows[others], self._next(at[others])
        return found

    def add(self, rows: Numbers) -> Numbers:
        places = self._arrivals.append(rows)
        if self._arrivals.count > _FULLEST * len(self._entries):
            self._grow()
        else:
            self._enter(rows, places)
        return places

    def _grow(self) -> None:
        size = len(self._entries)
        while self._arrivals.count > _FULLEST * size:
            size *= 2
        self._entries = np.zeros(size, np.uint32 if size <= 1 << 32 else np.uint64)
        step = 1 << 20  # rows at a time: temporary arrays stay small
        for begin in range(0, self._arrivals.count, step):
            rows = self._arrivals.all[begin : begin + step]
            self._enter(rows, np.arange(begin, begin + len(rows)))

    def _enter(self, rows: Numbers, places: Numbers) -> None:
        at, entries = self._home(rows), (places + 1).astype(self._entries.dtype)
        while len(at):
            free = self._entries[at] == 0
            self._entries[at[free]] = entries[free]  # if several rows want an entry, one of them gets it
            others = np.flatnonzero(self._entries[at] != entries)
            at, entries = self._next(at[others]), entries[others]

    def _home(self, rows: Numbers) -> Numbers:
        mask = np.uint64(len(self._entries) - 1)
        return (hash_mix(rows.view(np.uint64)) & mask).view(np.int64)

    def _next(self, at: Numbers) -> Numbers:
        return (at + 1) & (len(self._entries) - 1)

    def rows(self) -> Numbers:
        return self._arrivals.all

    @property
    def num_bytes(self) -> int:
        return self._entries.nbytes + 8 * self._arrivals.count
