"""The buffer of a shuffle: numbered slots for elements, and copies of rows of which stored blocks hold few.

A shuffle draws rows at random: without copies, the blocks of which it holds a last row take 5 to 7 times the memory of
its rows. The copies are new blocks, so that the old ones can be freed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast, final

import numpy as np

from raydist.core.nest import Structure
from raydist.pipelines.elements.blocks import Block, common_specs, concat_blocks
from raydist.pipelines.elements.columns import Column, RemoteColumn, alike, as_remote, object_column
from raydist.pipelines.elements.items import Item
from raydist.pipelines.elements.spec import TensorSpec
from raydist.pipelines.engine.executor import Executor, Pending
from raydist.pipelines.engine.kernel import Kernel, StageSpec

_Indices = np.ndarray[Any, Any]


@final
class RowBuffer:
    """Elements in slots 0, 1, 2, ...; filled once, then exchanged for new elements."""

    def __init__(self) -> None:
        self.count = 0
        self._filling: list[Block] = []
        self._structure = Structure()
        self._specs: tuple[TensorSpec, ...] = ()
        self._columns: list[Column] = []
        self._singles: list[Block] | None = None  # one row each, if structures differ (None in place of a leaf)

    @property
    def holds_one_structure(self) -> bool:
        """Return True if elements can be taken several at a time."""
        return self._singles is None

    def holds_one_structure_with(self, block: Block) -> bool:
        """Return True if elements can be exchanged several at a time with those of `block`."""
        if self._singles is None and self._differ(block):
            blocks = self._filling or [Block(self._structure, self._specs, tuple(self._columns), self.count)]
            self._singles = [each.slice(row, row + 1) for each in blocks for row in range(each.num_rows)]
        return self._singles is None

    def _differ(self, block: Block) -> bool:
        return any(each.structure != block.structure for each in self._filling) or (
            bool(self._columns) and block.structure != self._structure
        )

    def append(self, block: Block) -> None:
        """Put elements into the next free slots."""
        if self.holds_one_structure_with(block):
            self._filling.append(block)
        elif self._singles is not None:
            self._singles += [block.slice(row, row + 1) for row in range(block.num_rows)]
        self.count += block.num_rows

    def _settle(self) -> None:
        """Join the appended blocks. The columns are copied, because `exchange` writes to them."""
        if not self._filling:
            return
        joined = concat_blocks(self._filling)
        owned = len(self._filling) > 1
        self._filling = []
        self._structure, self._specs = joined.structure, joined.specs
        self._columns = [column if owned else column.copy() for column in joined.columns]

    def take(self, slots: _Indices) -> Block:
        """Return the elements in these slots; only the first if structures differ."""
        if self._singles is not None:
            return self._singles[int(slots[0])]
        self._settle()
        return Block(self._structure, self._specs, tuple(column[slots] for column in self._columns), len(slots))

    def exchange(self, fresh: Block, drawn: _Indices, previous: _Indices, last: _Indices) -> Block:
        """Return the elements that leave the slots `drawn` while `fresh` goes in; see `shuffle.sources_of_outputs`.

        If structures differ, `fresh` must be one element.
        """
        if self._singles is not None:
            slot = int(drawn[0])
            left, self._singles[slot] = self._singles[slot], fresh
            return left
        self._settle()
        held = Block(self._structure, self._specs, tuple(self._columns), self.count)
        self._specs = common_specs(held, self._specs, fresh)
        inner = np.flatnonzero(previous >= 0)
        outputs = []
        for number, new in enumerate(fresh.columns):
            old, new = _alike(self._columns[number], new)
            out = old[drawn]
            out[inner] = new[previous[inner]]
            old[drawn[last]] = new[last]
            self._columns[number] = old
            outputs.append(out)
        return Block(self._structure, self._specs, tuple(outputs), fresh.num_rows)

    def largest_remote_column(self) -> RemoteColumn | None:
        """Return the column of row ids whose values are largest; None if there is none."""
        if self._singles is not None:
            return None
        self._settle()
        columns: list[Column | RemoteColumn] = list(self._columns)
        remote = [column for column in columns if isinstance(column, RemoteColumn)]
        return max(remote, key=lambda column: column.nbytes, default=None)

    def replace(self, slots: _Indices, before: Block, after: Block) -> None:
        """Put the row ids of `after` into those of the slots that still hold `before`: other ids of equal values."""
        if self._singles is not None or before.structure != self._structure:
            return
        columns = zip(self._columns, before.columns, after.columns, strict=True)
        remote = [
            cast(tuple[RemoteColumn, RemoteColumn, RemoteColumn], each)
            for each in columns
            if all(isinstance(column, RemoteColumn) for column in each)
        ]
        same = np.ones(len(slots), bool)
        for held, old, _ in remote:
            if held.ids.shape[1:] != old.ids.shape[1:]:
                return
            same &= held.ids[slots] == old.ids
        for held, _, new in remote:
            held[slots[same]] = new[same]


def _alike(first: Column, second: Column) -> tuple[Column, Column]:
    """Return both columns as dense ones of one shape, both as row ids, or both as columns of objects."""
    if isinstance(first, RemoteColumn) or isinstance(second, RemoteColumn):
        return cast(tuple[Column, Column], alike(as_remote(first), as_remote(second)))
    if first.dtype == second.dtype and first.shape[1:] == second.shape[1:]:
        return first, second
    return _as_objects(first), _as_objects(second)


def _as_objects(column: Column) -> Column:
    return column if column.dtype == object and column.ndim == 1 else object_column(list(column))


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
    """The copies for the buffer of one shuffle, made by an executor while the shuffle goes on."""

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
