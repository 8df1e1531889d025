"""The order of interleave: a cycle of slots, each of which hands out some elements per turn."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import final

from raydist.errors import FailedPreconditionError
from raydist.pipelines.elements.blocks import Block
from raydist.pipelines.elements.items import ElementError, Item, IteratorState, count_items, join_items
from raydist.pipelines.engine.op_iterator import OpIterator
from raydist.pipelines.engine.producers import OneKind, ResumableProducer
from raydist.pipelines.ops.cycle_slot import CycleSlot, weave
from raydist.pipelines.ops.cycle_turns import CycleTurns
from raydist.pipelines.ops.nested import Opener

__all__ = ["Cycle", "SlotAhead"]

_MAX_ROWS = 4096  # elements combined at a time
_MAX_STATE = 4096  # characters of state for all slots; datasets with longer states are read again from their beginnings


SlotAhead = Callable[[int, OpIterator], OpIterator]
"""Function that returns a prefetching iterator over the source of the slot at a place, or the source itself."""


@final
class Cycle(ResumableProducer):
    """A producer that visits slots in turn. Its state: the input before the oldest open dataset, and all slots.

    With `turns`, the order of slots depends on which are ready. `ahead` may prefetch slots.
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
        self._kind = OneKind(opener.name)
        self._turn = 0  # place of the current slot
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
        return self._kind.checked(join_items(items))

    def _make_some(self, limit: int) -> Sequence[Item]:
        if self._turns is not None:
            return self._take_turn(self._turns, limit)
        block = self._whole_datasets(limit) if len(self._slots) == 1 else self._whole_rounds(limit)
        return self._visit(limit) if block is None else [block]

    def _whole_datasets(self, limit: int) -> Block | None:
        """Return the elements of the next few datasets, if there is one slot and they can be computed together."""
        return None if self._slots[0] is not None else self._opener.next_groups(limit)

    def _whole_rounds(self, limit: int) -> Block | None:
        """Return some rounds of the whole cycle at once, if no slot has to be filled."""
        if self._used or (None in self._slots and not self._opener.ended):
            return None
        in_turn = [*self._slots[self._turn :], *self._slots[: self._turn]]
        open_slots = [slot for slot in in_turn if slot is not None]
        rounds = min(limit, _MAX_ROWS) // (self._block_length * max(1, len(open_slots)))
        return weave(open_slots, self._block_length, rounds) if open_slots and rounds else None

    def _take_turn(self, turns: CycleTurns, limit: int) -> Sequence[Item]:
        """Return the ready items of a slot; none if it had to be filled, or has ended."""
        turn = turns.choose(self._turn, self._slots, may_fill=not self._opener.ended)
        self._turn = turn.place
        slot = self._slots[turn.place]
        items: Sequence[Item] = ()
        if slot is None:
            opened = self._fill(turn.place)
            items = [opened] if isinstance(opened, ElementError) else ()
        else:
            items = slot.take(turn.size) if turn.size else slot.take_some(limit)
            if not items:
                slot.close()
                self._slots[turn.place] = None
        turns.took(count_items(items))
        self._pass_turn()
        return items

    def _visit(self, limit: int) -> Sequence[Item]:
        """Return the items of one slot at this visit; none if it has ended."""
        slot = self._slots[self._turn]
        if slot is None:
            opened = self._fill(self._turn)
            if not isinstance(opened, CycleSlot):
                self._pass_turn()
                return [] if opened is None else [opened]
            slot = opened
        wanted = min(limit, self._block_length - self._used)
        items = slot.take(wanted)
        self._used += count_items(items)
        if count_items(items) < wanted:
            slot.close()
            self._slots[self._turn] = None
            self._pass_turn()
        elif self._used == self._block_length:
            self._pass_turn()
        return items

    def _fill(self, place: int) -> CycleSlot | ElementError | None:
        """Open the next input in an empty slot. Return None if inputs have run out and other slots are open."""
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
        slot = CycleSlot(index, before, opened if self._ahead is None else self._ahead(place, opened))
        self._slots[place] = slot
        return slot

    def _pass_turn(self) -> None:
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
            **self._kind.border(),
            "slots": [None if slot is None else _slot_state(slot, room) for slot in self._slots],
        }

    def restore(self, border: IteratorState) -> None:
        self._turn, self._used = int(border["turn"]), int(border["used"])
        if len(border["slots"]) != len(self._slots) or self._turn >= len(self._slots):
            raise ValueError(f"it is of another cycle_length than {len(self._slots)}")
        if self._used >= self._block_length:
            raise ValueError(f"it is of another block_length than {self._block_length}")
        if self._turns is not None:
            self._turns.load_state_dict(border["turns"])
        self._kind.restore(border)
        saved = {state[0]: (place, state) for place, state in enumerate(border["slots"]) if state is not None}
        self._opener.go_to(border["input"], int(border["read"]), int(border["first"]))
        while self._opener.next_index < int(border["next"]):
            if self._opener.next_index not in saved:
                self._opener.pass_over()
                continue
            place, (_, items_out, state) = saved[self._opener.next_index]
            slot = self._fill(place)
            if not isinstance(slot, CycleSlot):
                raise FailedPreconditionError(
                    f"{self._opener.name} must make the same dataset of input {self._opener.next_index - 1} again to "
                    f"resume, got {slot}. Resume with the data and functions that the state was saved with."
                )
            slot.restore(items_out, state)
        self._opener.ended = bool(border["ended"])

    def close(self) -> None:
        for slot in self._slots:
            if slot is not None:
                slot.close()
        self._opener.close()


def _slot_state(slot: CycleSlot, room: int) -> list[object]:
    state = slot.state_dict()
    return [slot.index, slot.items_out, state if len(json.dumps(state)) <= room else None]
