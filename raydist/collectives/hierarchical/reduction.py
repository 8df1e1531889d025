"""Large tensors, reduced in three steps: within each host, between hosts, and back to its ranks.

They pass in windows. Of each window, every lane reduces a slice; while one is on its way between hosts, the next is
reduced at home. How a tensor is cut depends on nothing that differs between hosts.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import final
from weakref import WeakKeyDictionary

import torch

from raydist.collectives.hierarchical.lane import BlockExchange, HostReduction
from raydist.collectives.hierarchical.plan import HostPlan
from raydist.collectives.shared_memory.board import Count
from raydist.collectives.shared_memory.generation import SharedGeneration
from raydist.collectives.shared_memory.in_place import SharedTensor
from raydist.collectives.shared_memory.layout import NUM_BUFFERS, Window, cut
from raydist.collectives.shared_memory.task import Reached, Steps
from raydist.collectives.wires.wires import Wires

__all__ = ["LargeReductions"]

# Smaller ones cost: what Python does for each took a third of the time at 512 KB, measured between 4 ranks.
_MOST_BLOCK = 1 << 20
# So many are on their way while the next one is begun: `_Passing` says why no more.
_AHEAD = 2


@final
class LargeReductions:
    """One rank's part in them.

    Args:
        plan: Who shares memory with whom.
        generation: Of this rank's host.
        wires: To the other hosts.
    """

    def __init__(self, plan: HostPlan, generation: SharedGeneration, wires: Wires) -> None:
        self._plan = plan
        self._generation = generation
        self._board = generation.board
        self._wires = wires
        self._block_bytes = min(_MOST_BLOCK, *(plan.layout(host).chunk_bytes for host in range(len(plan.hosts))))
        self._scratch = [torch.empty(0, dtype=torch.uint8) for _ in range(_AHEAD + 1)]
        self._known: WeakKeyDictionary[SharedTensor, dict[HostReduction, list[_Block]]] = WeakKeyDictionary()

    def windows(self, tensor: torch.Tensor) -> list[Window]:
        return cut(
            tensor.numel(), tensor.element_size(), chunk_bytes=self._block_bytes, world_size=self._plan.num_lanes
        )

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
        slices = [window.slice_of(lane) for window in self.windows(copies[0])]
        parts = [[copy[start : start + count] for copy in copies] for start, count in slices if count]
        return [_Block(self.exchange(index, own[0], reduction), reduction, own) for index, own in enumerate(parts)]

    def in_place(self, number: int, blocks: Sequence[_Block]) -> Steps:
        """Reduce tensors where they lie, in collective `number`."""
        for index, block in enumerate(blocks):
            block.begin()
            if index >= _AHEAD:
                yield from blocks[index - _AHEAD].finish()
        for block in blocks[max(len(blocks) - _AHEAD, 0) :]:
            yield from block.finish()
        board = self._board
        board.reach(Count.REDUCED, number + 1)
        yield Reached(board, Count.REDUCED, number + 1, last=True)

    def staged(self, flat: torch.Tensor, reduction: HostReduction, *, everywhere: bool) -> Steps:
        """Reduce a flat tensor of each rank, through the staging memory of this host.

        Args:
            flat: This rank's, replaced by the result where that is wanted.
            reduction: How.
            everywhere: Whether this rank wants the result.
        """
        passing = _Passing(self, flat, self.windows(flat), everywhere=everywhere)
        yield from passing.steps(reduction)

    def exchange(self, index: int, block: torch.Tensor, reduction: HostReduction) -> BlockExchange:
        """The exchange of the block of this index, with memory for what comes in."""
        turn = index % len(self._scratch)
        if self._scratch[turn].numel() < block.nbytes:
            self._scratch[turn] = torch.empty(block.nbytes, dtype=torch.uint8)
        scratch = self._scratch[turn][: block.nbytes].view(block.dtype)
        return BlockExchange(self._plan, self._wires, reduction, block, scratch)

    @property
    def plan(self) -> HostPlan:
        return self._plan

    @property
    def generation(self) -> SharedGeneration:
        return self._generation


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


@final
class _Passing:
    """One tensor on its way through the staging memory.

    The buffer of window w was last used by w - 4. Who loads w has seen all load w - 1: they have reduced w - 4 at home,
    and need what was loaded for it no more. Who writes its part of the result has seen all load w: they have taken
    those of w - 4 home. Who has seen all serve the last window knows that all but the last two results are at home.
    """

    def __init__(
        self, reductions: LargeReductions, flat: torch.Tensor, windows: list[Window], *, everywhere: bool
    ) -> None:
        self._reductions = reductions
        self._plan = reductions.plan
        self._board = reductions.generation.board
        self._staging = reductions.generation.staging
        self._flat = flat
        self._size = flat.element_size()
        self._windows = windows
        self._everywhere = everywhere
        self._first = self._staging.claim(len(windows))
        self._exchanges: list[BlockExchange | None] = []

    def steps(self, reduction: HostReduction) -> Steps:
        board = self._board
        for index in range(len(self._windows)):
            self._load(index)
            board.reach(Count.LOADED, self._first + index + 1)
            yield Reached(board, Count.LOADED, self._first + index + 1)
            self._exchanges.append(self._begin(index, reduction))
            if index >= _AHEAD:
                yield from self._finish(index - _AHEAD)
            if index > _AHEAD:
                yield from self._unload(index - _AHEAD - 1)
        count = len(self._windows)
        for index in range(max(count - _AHEAD, 0), count):
            yield from self._finish(index)
            if index > 0:
                yield from self._unload(index - 1)
        if count:
            yield from self._unload(count - 1)

    def _load(self, index: int) -> None:
        for lane in range(self._plan.num_lanes):
            if lane != self._plan.place:
                start, count = self._windows[index].slice_of(lane)
                target = self._staging.address(self._plan.place, self._buffer(index), lane)
                ctypes.memmove(target, self._flat.data_ptr() + start * self._size, count * self._size)

    def _begin(self, index: int, reduction: HostReduction) -> BlockExchange | None:
        lane = self._plan.lane
        if lane is None:
            return None
        start, count = self._windows[index].slice_of(lane)
        if not count:
            return None
        places = range(len(self._plan.members))
        parts = [self._staging.view(place, self._buffer(index), lane, count, self._flat.dtype) for place in places]
        result = parts[lane]
        parts[lane] = self._flat[start : start + count]
        reduction.at_home(parts, result)
        exchange = self._reductions.exchange(index, result, reduction)
        exchange.begin()
        return exchange

    def _finish(self, index: int) -> Steps:
        exchange, lane = self._exchanges[index], self._plan.lane
        if exchange is not None and lane is not None:
            yield from exchange.finish()
            start, count = self._windows[index].slice_of(lane)
            source = self._staging.address(lane, self._buffer(index), lane)
            ctypes.memmove(self._flat.data_ptr() + start * self._size, source, count * self._size)
        self._board.reach(Count.SERVED, self._first + index + 1)

    def _unload(self, index: int) -> Steps:
        yield Reached(self._board, Count.SERVED, self._first + index + 1)
        if not self._everywhere:
            return
        for lane in range(self._plan.num_lanes):
            if lane != self._plan.place:
                start, count = self._windows[index].slice_of(lane)
                source = self._staging.address(lane, self._buffer(index), lane)
                ctypes.memmove(self._flat.data_ptr() + start * self._size, source, count * self._size)

    def _buffer(self, index: int) -> int:
        return (self._first + index) % NUM_BUFFERS
