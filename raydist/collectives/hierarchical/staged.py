"""Large tensors that lie anywhere, reduced through the staging memory of their host.

What a window needs beyond the tensor itself is worked out once for each buffer of that memory: of 100 MB among 4 ranks
on 2 cores, Python then takes 14 % of all time, where it took 25.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import torch

from raydist.collectives.hierarchical.lane import BlockExchange, BlockExchanges, HostReduction
from raydist.collectives.hierarchical.plan import HostPlan
from raydist.collectives.hierarchical.windows import AHEAD, BlockWindows
from raydist.collectives.shared_memory.board import Count
from raydist.collectives.shared_memory.generation import SharedGeneration
from raydist.collectives.shared_memory.layout import NUM_BUFFERS, Window
from raydist.collectives.shared_memory.task import Reached, Steps

__all__ = ["StagedReductions"]

_MOST_KNOWN = 64  # kinds of tensors; and blocks, of which each kind has two sizes in every buffer


@final
@dataclass(frozen=True, slots=True)
class _Portion:
    """What one rank does of a window.

    Attributes:
        start: First element of its block.
        count: Elements of that; 0 where it has no lane, or nothing is left for it.
        others: Of each other lane's block: the lane, its first byte in the tensor, and its bytes.
    """

    start: int
    count: int
    others: tuple[tuple[int, int, int], ...]


@final
class _BufferBlock:
    """The block of this rank's lane in one buffer of the staging memory.

    Args:
        parts: Where the ranks of this host write what they have of it; this rank's own lies in its tensor.
        lane: Which of them is this rank's: the result of the host is made there.
        reduction: How the parts are reduced.
        exchange: Of the result, with other hosts.
    """

    def __init__(self, parts: list[torch.Tensor], lane: int, reduction: HostReduction, exchange: BlockExchange) -> None:
        self._parts = parts
        self._lane = lane
        self._reduction = reduction
        self._exchange = exchange
        self._result = parts[lane]
        self._num_bytes = parts[lane].nbytes

    def begin(self, own: torch.Tensor) -> None:
        """Reduce the parts and send the result to other hosts; `own` is this rank's part."""
        parts = self._parts.copy()  # nothing here is to keep the user's tensor
        parts[self._lane] = own
        self._reduction.at_home(parts, self._result)
        self._exchange.begin()

    def finish(self, address: int) -> Steps:
        """Wait for the result of all hosts; it is copied to `address` as well."""
        yield from self._exchange.finish()
        ctypes.memmove(address, self._result.data_ptr(), self._num_bytes)


@final
class StagedReductions:
    """One rank's part in them.

    Args:
        plan: Who shares memory with whom.
        generation: Of this rank's host.
        exchanges: With other hosts.
        windows: How tensors are cut.
    """

    def __init__(
        self, plan: HostPlan, generation: SharedGeneration, exchanges: BlockExchanges, windows: BlockWindows
    ) -> None:
        self._plan = plan
        self._exchanges = exchanges
        self._windows = windows
        self._portions: dict[tuple[int, int], list[_Portion]] = {}
        self._blocks: dict[tuple[int, int, torch.dtype, HostReduction], _BufferBlock] = {}
        self.board = generation.board
        self.staging = generation.staging

    def reduce(self, flat: torch.Tensor, reduction: HostReduction, *, everywhere: bool) -> Steps:
        """Reduce a flat tensor of each rank.

        Args:
            flat: This rank's, replaced by the result where that is wanted; other ranks' too in part.
            reduction: How.
            everywhere: Whether this rank wants the result.
        """
        portions = self._portions_of(flat.numel(), flat.element_size())
        yield from _Passing(self, flat, portions, everywhere=everywhere).steps(reduction)

    def _portions_of(self, numel: int, itemsize: int) -> list[_Portion]:
        known = self._portions.get((numel, itemsize))
        if known is None:
            _make_room(self._portions)
            windows = self._windows.of(numel, itemsize)
            known = self._portions[numel, itemsize] = [_portion(self._plan, window, itemsize) for window in windows]
        return known

    def block(self, buffer: int, count: int, dtype: torch.dtype, reduction: HostReduction) -> _BufferBlock:
        """The first `count` elements of this lane's chunks in that buffer."""
        key = (buffer, count, dtype, reduction)
        known = self._blocks.get(key)
        if known is None:
            _make_room(self._blocks)
            known = self._blocks[key] = self._new_block(buffer, count, dtype, reduction)
        return known

    def _new_block(self, buffer: int, count: int, dtype: torch.dtype, reduction: HostReduction) -> _BufferBlock:
        lane = self._plan.place
        parts = [self.staging.view(place, buffer, lane, count, dtype) for place in range(len(self._plan.members))]
        exchange = self._exchanges.make(buffer, parts[lane], reduction)
        return _BufferBlock(parts, lane, reduction, exchange)

    @property
    def place(self) -> int:
        """This rank's, within its host."""
        return self._plan.place


def _portion(plan: HostPlan, window: Window, itemsize: int) -> _Portion:
    slices = [window.slice_of(lane) for lane in range(plan.num_lanes)]
    others = [
        (lane, start * itemsize, count * itemsize)
        for lane, (start, count) in enumerate(slices)
        if lane != plan.place and count
    ]
    start, count = (0, 0) if plan.lane is None else slices[plan.lane]
    return _Portion(start, count, tuple(others))


def _make_room(known: dict[Any, Any]) -> None:
    if len(known) >= _MOST_KNOWN:
        known.clear()


@final
class _Passing:
    """One tensor on its way through the staging memory.

    The buffer of window w was last used by w - 4. Who loads w has seen all load w - 1: they have reduced w - 4 at home,
    and need what was loaded for it no more. Who writes its part of the result has seen all load w: they have taken
    those of w - 4 home. Who has seen all serve the last window knows that all but the last two results are at home.
    """

    def __init__(
        self, reductions: StagedReductions, flat: torch.Tensor, portions: Sequence[_Portion], *, everywhere: bool
    ) -> None:
        self._reductions = reductions
        self._board = reductions.board
        self._staging = reductions.staging
        self._flat = flat
        self._address = flat.data_ptr()
        self._portions = portions
        self._everywhere = everywhere
        self._first = self._staging.claim(len(portions))
        self._under_way: dict[int, _BufferBlock] = {}

    def steps(self, reduction: HostReduction) -> Steps:
        board, first = self._board, self._first
        for index in range(len(self._portions)):
            self._load(index)
            board.reach(Count.LOADED, first + index + 1)
            yield Reached(board, Count.LOADED, first + index + 1)
            self._begin(index, reduction)
            if index >= AHEAD:
                yield from self._finish(index - AHEAD)
            if index > AHEAD:
                yield from self._unload(index - AHEAD - 1)
        count = len(self._portions)
        for index in range(max(count - AHEAD, 0), count):
            yield from self._finish(index)
            if index > 0:
                yield from self._unload(index - 1)
        if count:
            yield from self._unload(count - 1)

    def _load(self, index: int) -> None:
        place, buffer = self._reductions.place, self._buffer(index)
        for lane, offset, num_bytes in self._portions[index].others:
            ctypes.memmove(self._staging.address(place, buffer, lane), self._address + offset, num_bytes)

    def _begin(self, index: int, reduction: HostReduction) -> None:
        portion = self._portions[index]
        if portion.count:
            block = self._reductions.block(self._buffer(index), portion.count, self._flat.dtype, reduction)
            block.begin(self._flat[portion.start : portion.start + portion.count])
            self._under_way[index] = block

    def _finish(self, index: int) -> Steps:
        block = self._under_way.pop(index, None)
        if block is not None:
            yield from block.finish(self._address + self._portions[index].start * self._flat.element_size())
        self._board.reach(Count.SERVED, self._first + index + 1)

    def _unload(self, index: int) -> Steps:
        yield Reached(self._board, Count.SERVED, self._first + index + 1)
        if self._everywhere:
            buffer = self._buffer(index)
            for lane, offset, num_bytes in self._portions[index].others:
                ctypes.memmove(self._address + offset, self._staging.address(lane, buffer, lane), num_bytes)

    def _buffer(self, index: int) -> int:
        return (self._first + index) % NUM_BUFFERS
