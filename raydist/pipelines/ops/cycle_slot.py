"""One slot of an interleave: an open dataset that is read in turn with others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from raydist.errors import FailedPreconditionError
from raydist.pipelines.elements.blocks import Block
from raydist.pipelines.elements.columns import columns_in_turn
from raydist.pipelines.elements.items import Item, IteratorState, count_items, drop_items, keep_items
from raydist.pipelines.engine.op_iterator import OpIterator
from raydist.pipelines.engine.producers import read_item
from raydist.pipelines.engine.resume import read_items

__all__ = ["CycleSlot", "weave"]


@final
class CycleSlot:
    """A reader of one dataset, which reads ahead at most as far as its next turns reach.

    Attributes:
        index: Number of the input for which the dataset was made.
        position: Position from which the input can be read again: see `Opener.position`.
        items_out: Number of elements and errors handed out.
    """

    def __init__(self, index: int, position: tuple[IteratorState, int], source: OpIterator) -> None:
        self.index = index
        self.position = position
        self.items_out = 0
        self._source = source
        self._held: list[Item] = []
        self._before: IteratorState = {}  # the source's state before the first held item
        self._passed = 0  # items handed out since `_before`

    def take(self, count: int) -> list[Item]:
        """Return the next `count` items; fewer only at the end."""
        missing = count - count_items(self._held)
        if missing > 0:
            self._read(missing)
        items = keep_items(self._held, count)
        self._drop(count_items(items))
        return items

    def take_some(self, limit: int) -> list[Item]:
        """Return a block of at most `limit` elements, or an error; nothing at the end. Waits for a thread."""
        if not self._held:
            self._before, self._passed = self._source.state_dict(), 0
            try:
                self._held = [read_item(self._source, limit)]
            except StopIteration:
                return []
        items = keep_items(self._held[:1], limit)
        self._drop(count_items(items))
        return items

    def has_ready(self) -> bool:
        """Return True if `take_some` would not wait for a thread."""
        return bool(self._held) or self._source.has_ready()

    def ready(self, wanted: int, needed: int) -> Block | None:
        """Return the first block if it has at least `needed` elements, else None; reads up to `wanted`.

        The elements stay in the slot.
        """
        held = count_items(self._held)
        if held < needed:
            self._read(wanted - held)
        first = self._held[0] if self._held else None
        return first if isinstance(first, Block) and first.num_rows >= needed else None

    def _read(self, count: int) -> None:
        if not self._held:
            self._before, self._passed = self._source.state_dict(), 0
        self._held += read_items(self._source, count)

    def _drop(self, count: int) -> None:
        self._held = drop_items(self._held, count)
        self._passed += count
        self.items_out += count

    def state_dict(self) -> IteratorState:
        """Return the source's state, and the number of items to skip after it."""
        if self._held:
            return {"at": self._before, "skip": self._passed}
        return {"at": self._source.state_dict(), "skip": 0}

    def restore(self, items_out: int, state: IteratorState | None) -> None:
        """Continue at `state`; without a state, read everything again that was handed out."""
        if state is not None:
            self._source.load_state_dict(state["at"])
        to_pass = items_out if state is None else int(state["skip"])
        if count_items(self.take(to_pass)) < to_pass:
            raise FailedPreconditionError(
                f"Input {self.index} must give the same elements again to resume after {items_out} of them, "
                "and it has fewer. Resume with the data that the state was saved with."
            )
        self.items_out = int(items_out)

    def close(self) -> None:
        """Close the dataset."""
        self._source.close()


def weave(slots: Sequence[CycleSlot], block_length: int, rounds: int) -> Block | None:
    """Return the next whole rounds of turns of all `slots`, up to `rounds`, by joining columns.

    None if a slot ends or has an error within its next turn, or if shapes differ.
    """
    found = [slot.ready(rounds * block_length, block_length) for slot in slots]
    blocks = [block for block in found if block is not None]
    if len(blocks) < len(slots) or any(not _alike(blocks[0], other) for other in blocks[1:]):
        return None
    rounds = min(rounds, *(block.num_rows // block_length for block in blocks))
    rows = rounds * block_length
    for slot in slots:
        slot.take(rows)
    columns = zip(*(block.slice(0, rows).columns for block in blocks), strict=True)
    first = blocks[0]
    woven = tuple(columns_in_turn(column, block_length) for column in columns)
    return Block(first.structure, first.specs, woven, rows * len(slots))


def _alike(first: Block, second: Block) -> bool:
    if first.structure != second.structure or first.specs != second.specs:
        return False
    pairs = zip(first.columns, second.columns, strict=True)
    return all(mine.dtype == theirs.dtype and mine.shape[1:] == theirs.shape[1:] for mine, theirs in pairs)
