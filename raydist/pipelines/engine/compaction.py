"""Copies of the rows that a shuffle still holds of stored blocks, so that blocks with few such rows can be freed.

A shuffle draws rows at random: without copies, the blocks of which it holds a last row take 5 to 7 times the memory of
its rows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np

from raydist.pipelines.elements.blocks import Block
from raydist.pipelines.elements.columns import RemoteColumn
from raydist.pipelines.elements.items import Item
from raydist.pipelines.elements.row_buffer import RowBuffer
from raydist.pipelines.engine.executor import Executor, Pending
from raydist.pipelines.engine.kernel import Kernel, StageSpec

_Slots = np.ndarray[Any, np.dtype[np.int64]]

_SPARE_BYTES = 128 << 20  # of blocks beyond `_MOST_TIMES` the rows in use: small shuffles are never copied
_MOST_TIMES = 1.6
_MOST_SHARE = 0.6  # of the rows of a block that are copied
_COPY_BYTES = 16 << 20  # copied by one call
_MOST_COPIES = 8  # found in one search
_SEARCHES = 16  # in the time in which all rows are exchanged once: a search among 100,000 rows takes 6 ms


@final
@dataclass(frozen=True, eq=False)
class CopyRows(Kernel):
    """Work that returns its rows, which the executor stores as a new block."""

    label: str

    @property
    def uses_index(self) -> bool:
        return False

    def run(self, block: Block, start: int) -> Sequence[Item]:
        return [block]


def sparse_slots(column: RemoteColumn, spare_bytes: int) -> list[_Slots]:
    """Return groups of rows to copy: those of the stored columns with the smallest shares of rows in use.

    Empty while the stored columns take little more memory than the rows in use, and `spare_bytes` more.
    """
    if column.ids.ndim > 1 or not len(column):
        return []
    numbers, kinds, counts = np.unique(column.numbers, return_inverse=True, return_counts=True)
    stored = [column.stored[number] for number in numbers.tolist()]
    row_bytes = np.array([each.row_bytes for each in stored])
    num_rows = np.array([max(1, each.shape[0]) for each in stored])
    if (row_bytes * num_rows).sum() <= _MOST_TIMES * (row_bytes * counts).sum() + spare_bytes:
        return []
    share = counts / num_rows
    groups: dict[int, list[int]] = {}
    bytes_before = 0
    for kind in np.argsort(share, kind="stable").tolist():
        if share[kind] < _MOST_SHARE:
            groups.setdefault(bytes_before // _COPY_BYTES, []).append(kind)
            bytes_before += int(row_bytes[kind] * counts[kind])
    return [np.flatnonzero(np.isin(kinds, group)) for group in list(groups.values())[:_MOST_COPIES]]


@final
@dataclass(frozen=True, slots=True, eq=False)
class _Underway:
    slots: _Slots
    rows: Block
    work: Pending


@final
class Compaction:
    """The copies for the buffer of one shuffle, made by an executor while the shuffle goes on.

    Args:
        executor: Stores results.
        name: Name of the shuffle and its epoch, unique in the iteration.
    """

    def __init__(self, executor: Executor, name: str) -> None:
        self._executor = executor
        self._spec = StageSpec(f"{name}-compaction", (CopyRows(name),))
        self._exchanged = 0  # rows since the last search
        self._found: deque[_Slots] = deque()
        self._underway: _Underway | None = None

    def step(self, buffer: RowBuffer, exchanged: int) -> None:
        """Put finished copies into the buffer, and begin others. Called after each `exchanged` rows. Does not block."""
        self._exchanged += exchanged
        if self._underway is not None and self._underway.work.done():
            copied, self._underway = self._underway, None
            items = copied.work.result().items
            if len(items) == 1 and isinstance(items[0], Block) and items[0].num_rows == len(copied.slots):
                buffer.replace(copied.slots, copied.rows, items[0])
        if not self._found and self._underway is None and self._exchanged * _SEARCHES >= buffer.count:
            self._exchanged = 0
            column = buffer.largest_remote_column()
            self._found.extend(sparse_slots(column, _SPARE_BYTES) if column is not None else ())
        if self._found and self._underway is None:
            slots = self._found.popleft()
            rows = buffer.take(slots)
            self._underway = _Underway(slots, rows, self._executor.submit(self._spec, rows, (0,)))

    def close(self) -> None:
        """Drop the copy that is under way."""
        if self._underway is not None:
            self._underway.work.cancel()
            self._underway = None
