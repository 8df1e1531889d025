"""Reductions of medium tensors among many ranks: each brings all it has, and whoever comes last adds up.

There ranks outnumber cores, so that being woken costs a rank a turn on a core, and its peers the wait for that: they
wait once. A rank that has brought its part looks whether its group of eight is complete; then it leaves their subtotal
to all. Whoever finds all subtotals leaves the total and wakes the others: a combining tree (Yew and others, 1987).
Two that come at the same time may both add up. They write the same bits, so that this needs no lock.
"""

from __future__ import annotations

import ctypes
from typing import final

import torch

from raydist.collectives.reducing import HALVES, reduce_rows
from raydist.collectives.shared_memory.board import Count
from raydist.collectives.shared_memory.calls import is_same_call
from raydist.collectives.shared_memory.generation import SharedGeneration
from raydist.collectives.shared_memory.layout import GROUP, NUM_BAYS
from raydist.collectives.shared_memory.sequence import Gathering
from raydist.values import ReduceOp

__all__ = ["SMALL_BYTES", "CombiningTree"]

SMALL_BYTES = 2 << 10
"""Up to here each of many ranks reduces all of it, which takes less time than to have it from another."""
_DONE, _AGREED = -64, -56
"""Words before a subtotal or the total: for which bay it is, and the same if all calls are equal."""


@final
class CombiningTree(Gathering):
    """One rank's part in the reduction of what all bring to a bay.

    Args:
        generation: Of the group.
        bay: Number of the bay.
        flat: What this rank brings, as one row; replaced by the total where that is wanted.
        op: How it is reduced.
    """

    last = True

    def __init__(self, generation: SharedGeneration, bay: int, flat: torch.Tensor, op: ReduceOp) -> None:
        self._generation = generation
        self._board = generation.board
        self._layout = generation.board.layout
        self._bay = bay
        self._flat = flat
        self._op = op
        self._total = generation.board.totals[bay % NUM_BAYS]
        self._number = 0
        self._call = b""
        self._error: Exception | None = None

    # --- what the sequence asks ---------------------------------------------------------------------------------------

    def come(self, number: int, call: bytes) -> None:
        self._number, self._call = number, call
        try:
            self._add_up()
        except Exception as error:  # raised where the others are told
            self._error = error
        self._board.reach(Count.SETTLED, self._bay + 1, waking=0)

    def met(self) -> bool:
        if self._error is not None:
            raise self._error
        if self._board.load(self._total + _DONE) > self._bay:
            return True
        return self._board.all_reached(Count.ENTERED, self._number + 1) and not self._all_call_the_same()

    def missing(self) -> tuple[int, ...]:
        """Those who have not come; where all have, those who may be adding up."""
        if self._board.load(self._total + _DONE) > self._bay:
            return ()
        absent = self._board.missing(Count.ENTERED, self._number + 1)
        return absent or self._board.missing(Count.SETTLED, self._bay + 1)

    @property
    def agreed(self) -> bool:
        return self._board.load(self._total + _AGREED) > self._bay

    def copy_total(self) -> None:
        """Take the result home."""
        ctypes.memmove(self._flat.data_ptr(), self._generation.segment.address + self._total, self._flat.nbytes)

    # --- adding up ----------------------------------------------------------------------------------------------------

    def _add_up(self) -> None:
        board, layout = self._board, self._layout
        group = board.rank // GROUP
        members = slice(group * GROUP, (group + 1) * GROUP)
        if not board.all_reached(Count.ENTERED, self._number + 1, members):
            return
        place = layout.subtotal(group, self._bay)
        self._leave(self._subtotal(members), place)
        board.store(place + _DONE, self._bay + 1)
        places = [layout.subtotal(other, self._bay) for other in range(layout.num_groups)]
        if all(board.load(other + _DONE) > self._bay for other in places):
            self._conclude()

    def _subtotal(self, members: slice) -> torch.Tensor:
        layout = self._layout
        count = min(members.stop, layout.world_size) - members.start
        rows = self._rows(layout.bay(members.start, self._bay), layout.bay(1, 0) - layout.bay(0, 0), count, self._flat)
        return reduce_rows(rows.float() if self._flat.dtype in HALVES else rows, self._partial_op)

    def _conclude(self) -> None:
        """Leave the total where all calls are the same. If not, each rank finds that out for itself."""
        board, layout = self._board, self._layout
        agreed = board.all_call(self._number, self._call, 0)
        if agreed or self._all_call_the_same():
            first = layout.subtotal(0, self._bay)
            like = self._flat.float() if self._flat.dtype in HALVES else self._flat
            rows = self._rows(first, layout.subtotal(1, 0) - layout.subtotal(0, 0), layout.num_groups, like)
            total = reduce_rows(rows, self._partial_op)
            if self._op is ReduceOp.MEAN:
                total.div_(layout.world_size)
            self._leave(total.to(self._flat.dtype), self._total)
            if agreed:
                board.store(self._total + _AGREED, self._bay + 1)
            board.store(self._total + _DONE, self._bay + 1)
        board.wake_others()

    @property
    def _partial_op(self) -> ReduceOp:
        return ReduceOp.SUM if self._op is ReduceOp.MEAN else self._op

    def _rows(self, first: int, stride: int, count: int, like: torch.Tensor) -> torch.Tensor:
        return self._generation.stacked(first, stride, count, like.numel(), like.dtype)

    def _leave(self, values: torch.Tensor, place: int) -> None:
        ctypes.memmove(self._generation.segment.address + place, values.data_ptr(), values.nbytes)

    def _all_call_the_same(self) -> bool:
        return all(is_same_call(self._call, other) for other in self._board.calls_of(self._number))
