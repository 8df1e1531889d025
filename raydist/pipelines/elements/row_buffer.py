"""The buffer of a shuffle: numbered slots for elements, stored column by column."""

from __future__ import annotations

from typing import Any, cast, final

import numpy as np

from raydist.core.nest import Structure
from raydist.pipelines.elements.blocks import Block, common_specs, concat_blocks
from raydist.pipelines.elements.columns import Column, RemoteColumn, alike, as_remote, object_column
from raydist.pipelines.elements.spec import TensorSpec

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
