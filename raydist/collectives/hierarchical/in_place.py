"""Large tensors, reduced in three steps: within each host, between hosts, and back to its ranks.

They pass in windows. Of each window, every lane reduces a slice; while one is on its way between hosts, the next is
reduced at home. How a tensor is cut depends on nothing that differs between hosts. Here: tensors that every rank of a
host can reach where they lie.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import final
from weakref import WeakKeyDictionary

import torch

from raydist.collectives.hierarchical.lane import BlockExchange, BlockExchanges, HostReduction
from raydist.collectives.hierarchical.plan import HostPlan
from raydist.collectives.hierarchical.windows import AHEAD, BlockWindows
from raydist.collectives.shared_memory.board import Board, Count
from raydist.collectives.shared_memory.in_place import SharedTensor
from raydist.collectives.shared_memory.layout import NUM_BUFFERS
from raydist.collectives.shared_memory.task import Reached, Steps

__all__ = ["InPlaceReductions"]


@final
class InPlaceReductions:
    """One rank's part in them.

    Args:
        plan: Who shares memory with whom.
        board: Of this rank's host.
        exchanges: With other hosts.
        windows: How tensors are cut.
    """

    def __init__(self, plan: HostPlan, board: Board, exchanges: BlockExchanges, windows: BlockWindows) -> None:
        self._plan = plan
        self._board = board
        self._exchanges = exchanges
        self._windows = windows
        self._known: WeakKeyDictionary[SharedTensor, dict[HostReduction, list[_Block]]] = WeakKeyDictionary()

    def blocks_of(self, shared: SharedTensor, reduction: HostReduction) -> list[_Block]:
        """The blocks of a tensor that lies in memory of all ranks of this host: worked out once, while it is known."""
        known = self._known.setdefault(shared, {})
        blocks = known.get(reduction)
        if blocks is None:
            blocks = known[reduction] = self.blocks(shared.copies, reduction)
        return blocks

    def blocks(self, copies: Sequence[torch.Tensor], reduction: HostReduction) -> list[_Block]:
        """What this rank's lane does of flat tensors, one a rank of this host, all of which it can reach."""
        lane = self._plan.lane
        if lane is None:
            return []
        slices = [window.slice_of(lane) for window in self._windows.of(copies[0].numel(), copies[0].element_size())]
        parts = [[copy[start : start + count] for copy in copies] for start, count in slices if count]
        return [
            _Block(self._exchanges.make(index % NUM_BUFFERS, own[0], reduction), reduction, own)
            for index, own in enumerate(parts)
        ]

    def reduce(self, number: int, blocks: Sequence[_Block]) -> Steps:
        """Reduce tensors where they lie, in collective `number`."""
        for index, block in enumerate(blocks):
            block.begin()
            if index >= AHEAD:
                yield from blocks[index - AHEAD].finish()
        for block in blocks[max(len(blocks) - AHEAD, 0) :]:
            yield from block.finish()
        board = self._board
        board.reach(Count.REDUCED, number + 1)
        yield Reached(board, Count.REDUCED, number + 1, last=True)


@final
class _Block:
    """A part of a tensor of which every rank of this host has a copy where it can be reached.

    Args:
        exchange: Of the first copy, with other hosts.
        reduction: How copies are reduced.
        copies: By rank.
    """

    def __init__(self, exchange: BlockExchange, reduction: HostReduction, copies: Sequence[torch.Tensor]) -> None:
        self._exchange = exchange
        self._reduction = reduction
        self._copies = list(copies)

    def begin(self) -> None:
        if len(self._copies) > 1:
            self._reduction.at_home(self._copies, self._copies[0])
        self._exchange.begin()

    def finish(self) -> Steps:
        yield from self._exchange.finish()
        first = self._copies[0]
        for copy in self._copies[1:]:
            ctypes.memmove(copy.data_ptr(), first.data_ptr(), first.nbytes)
