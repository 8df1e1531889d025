"""The order of turns in an interleave that takes ready elements (`deterministic=False`)."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from raydist.options import Timeouts
from raydist.pipelines.elements.items import IteratorState
from raydist.pipelines.engine.arrival_order import ArrivalOrder
from raydist.pipelines.ops.cycle_slot import CycleSlot

__all__ = ["Turn", "CycleTurns"]

_FIRST_NAP_S = 0.0002  # between two checks for a ready slot; doubled up to the last
_LAST_NAP_S = 0.005


@final
@dataclass(frozen=True, slots=True)
class Turn:
    """One turn: the place of the slot, and the number of its elements; None for the elements that are ready."""

    place: int
    size: int | None


@final
class CycleTurns:
    """A policy that gives the turn to the next ready slot and notes it; follows the notes after resuming.

    Args:
        order: Notes of this interleave.
        name: Name of the notes.
    """

    def __init__(self, order: ArrivalOrder, name: str) -> None:
        self._order = order
        self._name = name
        self._given = 0

    def choose(self, next_place: int, slots: Sequence[CycleSlot | None], *, may_fill: bool) -> Turn:
        """Return the next turn, from `next_place` on; an empty slot is ready if `may_fill`. Blocks."""
        noted = self._order.number_at(self._given)
        distance = _wait_for(next_place, slots, may_fill) if noted is None else noted - self._given
        self._order.was_given(self._given, self._given + distance)
        return Turn((next_place + distance) % len(slots), self._order.size_of(self._given))

    def took(self, size: int) -> None:
        """Note the number of items of the current turn."""
        self._order.was_read(self._given, size)
        self._given += 1

    def state_dict(self) -> IteratorState:
        """Return the number of turns, for `ArrivalOrders.since`."""
        return {"order": self._name, "first": self._given, "given": self._given}

    def load_state_dict(self, state: IteratorState) -> None:
        """Continue after that number of turns."""
        self._given = int(state["given"])


def _wait_for(next_place: int, slots: Sequence[CycleSlot | None], may_fill: bool) -> int:
    nap_s, deadline = _FIRST_NAP_S, time.monotonic() + Timeouts().input_s
    in_turn = [*slots[next_place:], *slots[:next_place]]
    while any(in_turn) and time.monotonic() < deadline:
        for distance, slot in enumerate(in_turn):
            if may_fill if slot is None else slot.has_ready():
                return distance
        time.sleep(nap_s)
        nap_s = min(2 * nap_s, _LAST_NAP_S)
    return next((distance for distance, slot in enumerate(in_turn) if slot is not None), 0)  # with its own limit
