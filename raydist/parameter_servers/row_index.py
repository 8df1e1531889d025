"""Rows of an embedding table in memory, and vectorized indexes that map row numbers to positions."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, final

import numpy as np
import torch

from raydist.parameter_servers.table_spec import hash_mix

Numbers = np.ndarray[Any, np.dtype[np.int64]]

_MAX_DIRECT_ROWS = 1 << 24  # 64 MB of entries; a direct index is 3 times as fast as a hash index
_INITIAL_ENTRIES = 1 << 10
_MAX_LOAD = 0.5  # maximum load factor of a hash index: a lookup then takes 1.5 probes


@final
class GrowingRows:
    """Consecutive rows in memory that grows by half when it is full."""

    def __init__(self, width: int, dtype: torch.dtype) -> None:
        self.count = 0  # number of rows
        self.width = width  # number of values in a row
        self._memory = torch.empty((0, width), dtype=dtype)

    @property
    def values(self) -> torch.Tensor:
        """A view of all rows. Adding rows may move them to other memory."""
        return self._memory[: self.count]

    @property
    def num_bytes(self) -> int:
        """Size of the rows in bytes."""
        return self.values.nbytes

    def take(self, positions: torch.Tensor) -> torch.Tensor:
        """Return copies of the rows at these positions."""
        return self._memory.index_select(0, positions)

    def put(self, positions: torch.Tensor, values: torch.Tensor) -> None:
        """Replace the rows at these positions. Takes half the time of `index_copy_`: a row is copied as one element."""
        _cells(self._memory)[positions.numpy()] = _cells(values.detach().contiguous())

    def append(self, values: torch.Tensor) -> None:
        """Add rows."""
        begin = self.count
        self._make_room(begin + len(values))
        self.count = begin + len(values)
        self._memory[begin : self.count] = values

    def extend(self, count: int, fill: float = 0.0) -> None:
        """Grow to `count` rows; all values of new rows are `fill`."""
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
    """An index that maps row numbers to positions. The n-th added row has position n."""

    @abstractmethod
    def find(self, rows: Numbers) -> Numbers:
        """Return the positions of rows; -1 for unknown rows."""

    @abstractmethod
    def add(self, rows: Numbers) -> Numbers:
        """Add distinct, unknown rows; return their positions."""

    @abstractmethod
    def rows(self) -> Numbers:
        """Return all rows, by position."""

    @property
    @abstractmethod
    def num_bytes(self) -> int:
        """Size of the index in bytes."""


def index_for(num_rows: int) -> RowIndex:
    """Return an index for a table of `num_rows` rows."""
    return DirectIndex(num_rows) if num_rows <= _MAX_DIRECT_ROWS else HashIndex()


@final
class _AddedRows:
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
        self._entries = np.zeros(num_rows, np.int32)  # position + 1; 0 for unknown rows
        self._added = _AddedRows()

    def find(self, rows: Numbers) -> Numbers:
        return self._entries[rows].astype(np.int64) - 1

    def add(self, rows: Numbers) -> Numbers:
        positions = self._added.append(rows)
        self._entries[rows] = positions + 1
        return positions

    def rows(self) -> Numbers:
        return self._added.all

    @property
    def num_bytes(self) -> int:
        return self._entries.nbytes + 8 * self._added.count


@final
class HashIndex(RowIndex):
    """A hash index with open addressing and linear probing: an entry is a position + 1, or 0 if the entry is free.

    Entries hold no row numbers: lookups compare the numbers in `_added`. A row takes 2 to 4 entries of 4 bytes each,
    and 8 bytes for its number.
    """

    def __init__(self) -> None:
        self._entries = np.zeros(_INITIAL_ENTRIES, np.uint32)
        self._added = _AddedRows()

    def find(self, rows: Numbers) -> Numbers:
        found = np.full(len(rows), -1, np.int64)
        at, pending, known = self._first_entries(rows), np.arange(len(rows)), self._added.all
        if not len(known):
            return found
        while len(pending):
            positions = self._entries[at].astype(np.int64) - 1
            taken = positions >= 0
            matches = known[positions] == rows
            matches &= taken
            found[pending[matches]] = positions[matches]
            others = np.flatnonzero(taken & ~matches)
            pending, rows, at = pending[others], rows[others], self._next_entries(at[others])
        return found

    def add(self, rows: Numbers) -> Numbers:
        positions = self._added.append(rows)
        if self._added.count > _MAX_LOAD * len(self._entries):
            self._grow()
        else:
            self._insert(rows, positions)
        return positions

    def _grow(self) -> None:
        size = len(self._entries)
        while self._added.count > _MAX_LOAD * size:
            size *= 2
        self._entries = np.zeros(size, np.uint32 if size <= 1 << 32 else np.uint64)
        step = 1 << 20  # rows at a time: temporary arrays stay small
        for begin in range(0, self._added.count, step):
            rows = self._added.all[begin : begin + step]
            self._insert(rows, np.arange(begin, begin + len(rows)))

    def _insert(self, rows: Numbers, positions: Numbers) -> None:
        at, entries = self._first_entries(rows), (positions + 1).astype(self._entries.dtype)
        while len(at):
            free = self._entries[at] == 0
            self._entries[at[free]] = entries[free]  # if several rows hash to a free entry, one of them gets it
            others = np.flatnonzero(self._entries[at] != entries)
            at, entries = self._next_entries(at[others]), entries[others]

    def _first_entries(self, rows: Numbers) -> Numbers:
        mask = np.uint64(len(self._entries) - 1)
        return (hash_mix(rows.view(np.uint64)) & mask).view(np.int64)

    def _next_entries(self, at: Numbers) -> Numbers:
        return (at + 1) & (len(self._entries) - 1)

    def rows(self) -> Numbers:
        return self._added.all

    @property
    def num_bytes(self) -> int:
        return self._entries.nbytes + 8 * self._added.count
