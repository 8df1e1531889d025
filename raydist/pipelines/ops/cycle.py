"""A producer that reads several datasets in turn, for `interleave`, `flat_map` and files of records.

It has a fixed number of slots. A slot reads one dataset, and returns up to `block_length` elements in each turn.
"""

from __future__ import annotations

import json
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, final

from raydist.core.errors import FailedPreconditionError
from raydist.options import Timeouts
from raydist.pipelines.elements.blocks import Block
from raydist.pipelines.elements.columns import columns_in_turn
from raydist.pipelines.elements.items import (
    ElementError,
    Item,
    IteratorState,
    count_items,
    drop_items,
    join_items,
    keep_items,
)
from raydist.pipelines.engine.arrival_order import ArrivalOrder
from raydist.pipelines.engine.op_iterator import OpIterator
from raydist.pipelines.engine.producers import ResumableProducer, SpecGuard, read_item
from raydist.pipelines.engine.resume import read_items

WHOLE = 1 << 62  # a `block_length` with which each turn lasts until its dataset ends
_FIRST_SLEEP_S = 0.0002  # between two checks for a ready slot; doubled up to the longest
_LONGEST_SLEEP_S = 0.005
_MAX_ROWS = 4096  # elements joined at a time
_MAX_STATE = 4096  # characters of state for all slots; a dataset with a longer state is read again from its beginning


class Opener(ABC):
    """Interface of a reader that opens one dataset for each input.

    Attributes:
        name: Name of the operation.
        next_index: Number of the next input.
        num_opened: Number of inputs that were opened before the restored state was saved.
        ended: True once no input is left.
    """

    def __init__(self, source: OpIterator, name: str) -> None:
        self.name = name
        self.next_index = 0
        self.num_opened = 0
        self.ended = False
        self._source = source

    @abstractmethod
    def open_next(self) -> OpIterator | ElementError:
        """Open the dataset of the next input; return an error if the input or its dataset has one.

        Raises:
            StopIteration: No input is left.
        """

    @abstractmethod
    def position(self) -> tuple[IteratorState, int]:
        """Return a state of the input iterator and the number of the first input after it, at most `next_index`."""

    def next_groups(self, limit: int) -> Block | None:
        """Return all elements of the next few datasets, about `limit`, if they can be computed at once; else None.

        Raises:
            StopIteration: No input is left.
        """
        return None

    def skip_input(self) -> None:
        """Skip the next input, whose dataset had ended before the state was saved."""
        self._read(1)
        self.next_index += 1

    def _read(self, count: int) -> Item:
        if self.ended:
            raise StopIteration
        try:
            return read_item(self._source, count)
        except StopIteration:
            self.ended = True
            raise

    def go_to(self, state: IteratorState, first: int, next_index: int) -> None:
        """Continue with input `next_index`. `position` has returned `state` and `first`."""
        self._source.load_state_dict(state)
        self.next_index = first
        while self.next_index < next_index:
            self.skip_input()

    def close(self) -> None:
        """Close the input."""
        self._source.close()


@final
class CycleSlot:
    """A reader of one dataset. It reads ahead no further than its next turns need.

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
        self._state_before: IteratorState = {}  # the source's state before the first held item
        self._num_passed = 0  # items handed out since `_state_before`

    def take(self, count: int) -> list[Item]:
        """Return the next `count` items; fewer only at the end."""
        missing = count - count_items(self._held)
        if missing > 0:
            self._read(missing)
        items = keep_items(self._held, count)
        self._drop(count_items(items))
        return items

    def take_some(self, limit: int) -> list[Item]:
        """Return one block of at most `limit` elements, or one error; an empty list at the end. Blocks."""
        if not self._held:
            self._state_before, self._num_passed = self._source.state_dict(), 0
            try:
                self._held = [read_item(self._source, limit)]
            except StopIteration:
                return []
        items = keep_items(self._held[:1], limit)
        self._drop(count_items(items))
        return items

    def has_ready(self) -> bool:
        """Return True if `take_some` would not block."""
        return bool(self._held) or self._source.has_ready()

    def peek(self, wanted: int, needed: int) -> Block | None:
        """Return the first block, which stays in the slot; None if the block has fewer than `needed` elements.

        The slot reads up to `wanted` elements.
        """
        held = count_items(self._held)
        if held < needed:
            self._read(wanted - held)
        first = self._held[0] if self._held else None
        return first if isinstance(first, Block) and first.num_rows >= needed else None

    def _read(self, count: int) -> None:
        if not self._held:
            self._state_before, self._num_passed = self._source.state_dict(), 0
        self._held += read_items(self._source, count)

    def _drop(self, count: int) -> None:
        self._held = drop_items(self._held, count)
        self._num_passed += count
        self.items_out += count

    def state_dict(self) -> IteratorState:
        """Return the source's state, and the number of items to skip after it."""
        if self._held:
            return {"at": self._state_before, "skip": self._num_passed}
        return {"at": self._source.state_dict(), "skip": 0}

    def restore(self, items_out: int, state: IteratorState | None) -> None:
        """Continue at `state`. Without a state, read again and drop the first `items_out` items."""
        if state is not None:
            self._source.load_state_dict(state["at"])
        to_skip = items_out if state is None else int(state["skip"])
        if count_items(self.take(to_skip)) < to_skip:
            raise FailedPreconditionError(
                f"Input {self.index} must give the same elements again to resume after {items_out} of them, "
                "but it has fewer now. Resume with the data that the state was saved with."
            )
        self.items_out = int(items_out)

    def close(self) -> None:
        """Close the dataset."""
        self._source.close()


def join_rounds(slots: Sequence[CycleSlot], block_length: int, rounds: int) -> Block | None:
    """Return one block of the next `rounds` rounds or fewer. In a round, each of the `slots` has one turn.

    Return None if a slot ends or has an error within its next turn, or if shapes differ.
    """
    found = [slot.peek(rounds * block_length, block_length) for slot in slots]
    blocks = [block for block in found if block is not None]
    if len(blocks) < len(slots) or any(not _have_same_layout(blocks[0], other) for other in blocks[1:]):
        return None
    rounds = min(rounds, *(block.num_rows // block_length for block in blocks))
    rows = rounds * block_length
    for slot in slots:
        slot.take(rows)
    columns = zip(*(block.slice(0, rows).columns for block in blocks), strict=True)
    first = blocks[0]
    joined = tuple(columns_in_turn(column, block_length) for column in columns)
    return Block(first.structure, first.specs, joined, rows * len(slots))


def _have_same_layout(first: Block, second: Block) -> bool:
    if first.structure != second.structure or first.specs != second.specs:
        return False
    pairs = zip(first.columns, second.columns, strict=True)
    return all(mine.dtype == theirs.dtype and mine.shape[1:] == theirs.shape[1:] for mine, theirs in pairs)


@final
@dataclass(frozen=True, slots=True)
class Turn:
    """A turn of one slot.

    Attributes:
        slot_index: Index of the slot.
        size: Number of elements; None for the elements that are ready.
    """

    slot_index: int
    size: int | None


@final
class CycleTurns:
    """A policy that chooses the next ready slot for each turn. It records its choices, and repeats them after resuming.

    Args:
        order: The recorded choices of this interleave.
        name: Name of the record.
    """

    def __init__(self, order: ArrivalOrder, name: str) -> None:
        self._order = order
        self._name = name
        self._num_turns = 0

    def choose(self, next_slot: int, slots: Sequence[CycleSlot | None], *, may_fill: bool) -> Turn:
        """Return the next turn: the first ready slot from `next_slot` on. Empty slots count if `may_fill`. Blocks."""
        recorded = self._order.number_at(self._num_turns)
        distance = _wait_for_slot(next_slot, slots, may_fill) if recorded is None else recorded - self._num_turns
        self._order.was_given(self._num_turns, self._num_turns + distance)
        return Turn((next_slot + distance) % len(slots), self._order.size_of(self._num_turns))

    def end_turn(self, size: int) -> None:
        """Record the number of items of the current turn, and begin the next turn."""
        self._order.was_read(self._num_turns, size)
        self._num_turns += 1

    def state_dict(self) -> IteratorState:
        """Return the number of turns, for `ArrivalOrders.since`."""
        return {"order": self._name, "first": self._num_turns, "given": self._num_turns}

    def load_state_dict(self, state: IteratorState) -> None:
        """Continue after that number of turns."""
        self._num_turns = int(state["given"])


def _wait_for_slot(next_slot: int, slots: Sequence[CycleSlot | None], may_fill: bool) -> int:
    sleep_s, deadline = _FIRST_SLEEP_S, time.monotonic() + Timeouts().input_s
    in_turn = [*slots[next_slot:], *slots[:next_slot]]
    while any(in_turn) and time.monotonic() < deadline:
        for distance, slot in enumerate(in_turn):
            if may_fill if slot is None else slot.has_ready():
                return distance
        time.sleep(sleep_s)
        sleep_s = min(2 * sleep_s, _LONGEST_SLEEP_S)
    # None is ready in time. Reading from an open slot has its own limit, and fails with its own error.
    return next((distance for distance, slot in enumerate(in_turn) if slot is not None), 0)


SlotAhead = Callable[[int, OpIterator], OpIterator]
"""Function of a slot's index and source. It returns a prefetching iterator over the source, or the source itself."""


@final
class Cycle(ResumableProducer):
    """A producer that visits slots in turn.

    Its state consists of a state of the input before the oldest open dataset, and of the states of all slots.

    Args:
        opener: Reader of the inputs; it opens their datasets.
        length: Number of slots.
        block_length: Number of elements of a turn.
        ahead: Function that may prefetch the elements of a slot; None for no prefetching.
        turns: Policy that prefers ready slots; None to visit the slots in order.
    """

    def __init__(
        self,
        opener: Opener,
        length: int,
        block_length: int,
        ahead: SlotAhead | None = None,
        turns: CycleTurns | None = None,
    ) -> None:
        self._turns = turns
        self._opener = opener
        self._slots: list[CycleSlot | None] = [None] * length
        self._block_length = block_length
        self._ahead = ahead
        self._guard = SpecGuard(opener.name)
        self._turn = 0  # index of the current slot
        self._used = 0  # elements handed out in this turn

    def make(self, limit: int) -> Sequence[Item]:
        items: list[Item] = []
        missing = limit
        while missing > 0 and not (items and self._turns):
            try:
                made = self._make_some(missing)
            except StopIteration:
                if not items:
                    raise
                break
            items += made
            missing -= count_items(made)
        return self._guard.checked(join_items(items))

    def _make_some(self, limit: int) -> Sequence[Item]:
        if self._turns is not None:
            return self._take_turn(self._turns, limit)
        block = self._whole_datasets(limit) if len(self._slots) == 1 else self._whole_rounds(limit)
        return self._visit(limit) if block is None else [block]

    def _whole_datasets(self, limit: int) -> Block | None:
        """Return the elements of the next few datasets, if the opener can compute them at once for the only slot."""
        return None if self._slots[0] is not None else self._opener.next_groups(limit)

    def _whole_rounds(self, limit: int) -> Block | None:
        """Return the elements of several rounds at once; None if a slot must be filled first."""
        if self._used or (None in self._slots and not self._opener.ended):
            return None
        in_turn = [*self._slots[self._turn :], *self._slots[: self._turn]]
        open_slots = [slot for slot in in_turn if slot is not None]
        rounds = min(limit, _MAX_ROWS) // (self._block_length * max(1, len(open_slots)))
        return join_rounds(open_slots, self._block_length, rounds) if open_slots and rounds else None

    def _take_turn(self, turns: CycleTurns, limit: int) -> Sequence[Item]:
        """Return the ready items of one slot; nothing if the slot was empty or its dataset has ended."""
        turn = turns.choose(self._turn, self._slots, may_fill=not self._opener.ended)
        self._turn = turn.slot_index
        slot = self._slots[turn.slot_index]
        items: Sequence[Item] = ()
        if slot is None:
            opened = self._fill(turn.slot_index)
            items = [opened] if isinstance(opened, ElementError) else ()
        else:
            items = slot.take(turn.size) if turn.size else slot.take_some(limit)
            if not items:
                slot.close()
                self._slots[turn.slot_index] = None
        turns.end_turn(count_items(items))
        self._next_turn()
        return items

    def _visit(self, limit: int) -> Sequence[Item]:
        """Return items of the current slot; nothing if its dataset has ended."""
        slot = self._slots[self._turn]
        if slot is None:
            opened = self._fill(self._turn)
            if not isinstance(opened, CycleSlot):
                self._next_turn()
                return [] if opened is None else [opened]
            slot = opened
        wanted = min(limit, self._block_length - self._used)
        items = slot.take(wanted)
        self._used += count_items(items)
        if count_items(items) < wanted:
            slot.close()
            self._slots[self._turn] = None
            self._next_turn()
        elif self._used == self._block_length:
            self._next_turn()
        return items

    def _fill(self, slot_index: int) -> CycleSlot | ElementError | None:
        """Open the next input in an empty slot. Return None if no input is left but another slot is open."""
        before = self._opener.position()
        index = self._opener.next_index
        try:
            opened = self._opener.open_next()
        except StopIteration:
            if not any(self._slots):
                raise
            return None
        if isinstance(opened, ElementError):
            return opened
        slot = CycleSlot(index, before, opened if self._ahead is None else self._ahead(slot_index, opened))
        self._slots[slot_index] = slot
        return slot

    def _next_turn(self) -> None:
        self._turn = (self._turn + 1) % len(self._slots)
        self._used = 0

    def border(self) -> IteratorState:
        open_slots = [slot for slot in self._slots if slot is not None]
        oldest = min(open_slots, key=lambda slot: slot.index, default=None)
        state, read = self._opener.position() if oldest is None else oldest.position
        room = _MAX_STATE // max(1, len(open_slots))
        return {
            "input": state,
            "read": read,
            "first": self._opener.next_index if oldest is None else oldest.index,
            "next": self._opener.next_index,
            "ended": self._opener.ended,
            "turn": self._turn,
            "used": self._used,
            **({} if self._turns is None else {"turns": self._turns.state_dict()}),
            **self._guard.border(),
            "slots": [None if slot is None else _slot_state(slot, room) for slot in self._slots],
        }

    def restore(self, border: IteratorState) -> None:
        self._turn, self._used = int(border["turn"]), int(border["used"])
        if len(border["slots"]) != len(self._slots) or self._turn >= len(self._slots):
            raise ValueError(f"it was saved with another cycle_length than {len(self._slots)}")
        if self._used >= self._block_length:
            raise ValueError(f"it was saved with another block_length than {self._block_length}")
        if self._turns is not None:
            self._turns.load_state_dict(border["turns"])
        self._guard.restore(border)
        saved = {state[0]: (slot_index, state) for slot_index, state in enumerate(border["slots"]) if state is not None}
        self._opener.num_opened = int(border["next"])
        try:
            self._opener.go_to(border["input"], int(border["read"]), int(border["first"]))
            while self._opener.next_index < self._opener.num_opened:
                if self._opener.next_index in saved:
                    self._restore_slot(*saved[self._opener.next_index])
                else:
                    self._opener.skip_input()
        except StopIteration:
            raise FailedPreconditionError(
                f"A state must be loaded into the pipeline that it was saved from, but {self._opener.name} had read "
                f"{border['next']} inputs then and finds only {self._opener.next_index} now."
            ) from None
        self._opener.ended = bool(border["ended"])

    def _restore_slot(self, slot_index: int, state: Sequence[Any]) -> None:
        index, items_out, inner = state
        slot = self._fill(slot_index)
        if slot is None:
            raise StopIteration
        if isinstance(slot, ElementError):
            raise FailedPreconditionError(
                f"{self._opener.name} must make the same dataset of input {index} again to resume, got {slot}. Resume "
                "with the data and functions that the state was saved with."
            )
        slot.restore(items_out, inner)

    def close(self) -> None:
        for slot in self._slots:
            if slot is not None:
                slot.close()
        self._opener.close()


def _slot_state(slot: CycleSlot, room: int) -> list[object]:
    state = slot.state_dict()
    return [slot.index, slot.items_out, state if len(json.dumps(state)) <= room else None]
