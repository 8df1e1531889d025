"""Large tensors that lie anywhere, reduced through the staging memory of their host.

What a window needs beyond the tensor itself is worked out once for each buffer of that memory: Python's caches are cold
whenever a block of a tensor has passed, and of 100 MB among 4 ranks on 2 cores it took 25 % of all time.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import final

import torch

from raydist.collectives.hierarchical.lane import BlockExchange, BlockExchanges, HostReduction, halves
from raydist.collectives.hierarchical.plan import HostPlan
from raydist.collectives.hierarchical.windows import AHEAD, BlockWindows
from raydist.collectives.shared_memory.board import Count
from raydist.collectives.shared_memory.generation import SharedGeneration
from raydist.collectives.shared_memory.layout import NUM_BUFFERS, Window
from raydist.collectives.shared_memory.task import Reached, Steps

__all__ = ["StagedReductions"]

_MOST_KNOWN = 64  # tensors have windows of two sizes, each of which lies in every buffer
_Known = tuple[int, int, int, torch.dtype, HostReduction]
"""A buffer, elements of a window and of a lane's slice of it, their type, and how they are reduced."""


@final
class _Outcome:
    """What one lane leaves in a buffer for all ranks of its host: the result, or what each of two hosts brought.

    That is added up by everyone on the way home, which writes the result once: to make it here and to copy it from
    here wrote it twice.

    Args:
        place: Where in the window the lane's slice lies.
        parts: One or two, in the order of hosts.
        reduction: How two are reduced.
    """

    def __init__(self, place: slice, parts: list[torch.Tensor], reduction: HostReduction) -> None:
        self._place = place
        self._parts = parts
        self._reduction = reduction

    def take_home(self, window: torch.Tensor) -> None:
        target = window[self._place]
        if len(self._parts) == 1:
            ctypes.memmove(target.data_ptr(), self._parts[0].data_ptr(), target.nbytes)
        else:
            self._reduction.between(self._parts, target)


@final
class _Block:
    """The block of this rank's lane in one buffer.

    Args:
        place: Where in the window it lies.
        parts: Where the ranks of this host write what they have of it; this rank's own lies in its tensor.
        lane: Which of them is this rank's.
        total: Which of them is replaced by what the host brings.
        reduction: How the parts are reduced.
        exchange: Of that, with other hosts.
    """

    def __init__(
        self,
        place: slice,
        parts: list[torch.Tensor],
        *,
        lane: int,
        total: int,
        reduction: HostReduction,
        exchange: BlockExchange,
    ) -> None:
        self._place = place
        self._parts = parts
        self._lane = lane
        self._total = parts[total]
        self._reduction = reduction
        self.exchange = exchange

    def begin(self, window: torch.Tensor) -> None:
        """Reduce the parts, of which this rank's is in its window, and send the result to other hosts."""
        parts = self._parts.copy()  # nothing here is to keep the user's tensor
        parts[self._lane] = window[self._place]
        self._reduction.at_home(parts, self._total)
        self.exchange.begin()


@final
class _Stage:
    """A window in one buffer of the staging memory, wherever in a tensor it lies.

    Args:
        loads: Of each other lane: where this rank writes what it has of its block, where in the window that begins, and
            how long it is; in bytes.
        block: Of this rank's lane; None where it has none, or nothing is left for it.
        own: What that lane leaves.
        others: What the others leave.
    """

    def __init__(
        self, loads: list[tuple[int, int, int]], block: _Block | None, own: list[_Outcome], others: list[_Outcome]
    ) -> None:
        self._loads = loads
        self._block = block
        self._own = own
        self._others = others

    def load(self, window: torch.Tensor) -> None:
        """Write what the other lanes need."""
        address = window.data_ptr()
        for place, offset, num_bytes in self._loads:
            ctypes.memmove(place, address + offset, num_bytes)

    def begin(self, window: torch.Tensor) -> None:
        """All have loaded: send what this host brings of this rank's block."""
        if self._block is not None:
            self._block.begin(window)

    def finish(self) -> Steps:
        """Wait for what other hosts bring of it."""
        if self._block is not None:
            yield from self._block.exchange.finish()

    def take_own(self, window: torch.Tensor) -> None:
        for outcome in self._own:
            outcome.take_home(window)

    def take_others(self, window: torch.Tensor) -> None:
        """All have finished."""
        for outcome in self._others:
            outcome.take_home(window)


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
        self._board = generation.board
        self._staging = generation.staging
        self._stages: dict[_Known, _Stage] = {}

    def reduce(self, flat: torch.Tensor, reduction: HostReduction, *, everywhere: bool) -> Steps:
        """Reduce a flat tensor of each rank.

        Args:
            flat: This rank's, replaced by the result where that is wanted.
            reduction: How.
            everywhere: Whether this rank wants the result.
        """
        cut = self._windows.of(flat.numel(), flat.element_size())
        first = self._staging.claim(len(cut))
        stages = [
            self._stage((first + index) % NUM_BUFFERS, window, flat.dtype, reduction)
            for index, window in enumerate(cut)
        ]
        windows = flat.split(cut[0].stop) if cut else ()
        yield from self._pass(stages, windows, first, everywhere=everywhere)

    def _pass(
        self, stages: Sequence[_Stage], windows: Sequence[torch.Tensor], first: int, *, everywhere: bool
    ) -> Steps:
        """Pass these windows, of which all ranks have as many; `first` is the number of the first.

        The buffer of window w was last used by w - 4. Who loads w has seen all load w - 1: before that they have
        finished w - 3 and taken w - 4 home, and need nothing that lies there any more.
        """
        board, count = self._board, len(stages)
        for index in range(count + AHEAD):
            if index < count:
                stages[index].load(windows[index])
                board.reach(Count.LOADED, first + index + 1)
                yield Reached(board, Count.LOADED, first + index + 1)
                stages[index].begin(windows[index])
                if everywhere and index > AHEAD:
                    stages[index - AHEAD - 1].take_others(windows[index - AHEAD - 1])
            if index >= AHEAD:
                yield from stages[index - AHEAD].finish()
                if everywhere:
                    stages[index - AHEAD].take_own(windows[index - AHEAD])
        board.reach(Count.SERVED, first + count)
        yield Reached(board, Count.SERVED, first + count)
        for index in range(max(count - AHEAD - 1, 0), count if everywhere else 0):
            stages[index].take_others(windows[index])

    def _stage(self, buffer: int, window: Window, dtype: torch.dtype, reduction: HostReduction) -> _Stage:
        key = (buffer, window.stop - window.start, window.step, dtype, reduction)
        known = self._stages.get(key)
        if known is None:
            if len(self._stages) >= _MOST_KNOWN:
                self._stages.clear()
            known = self._stages[key] = self._new_stage(buffer, window, dtype, reduction)
        return known

    def _new_stage(self, buffer: int, window: Window, dtype: torch.dtype, reduction: HostReduction) -> _Stage:
        plan, staging, size = self._plan, self._staging, dtype.itemsize
        loads, own, others, block = [], [], [], None
        for lane in range(plan.num_lanes):
            start, count = window.slice_of(lane)
            start -= window.start
            if not count:
                continue
            place = slice(start, start + count)
            parts = [staging.view(member, buffer, lane, count, dtype) for member in range(len(plan.members))]
            total = _place_of_total(lane, len(parts))
            arrivals = staging.arrivals(lane, buffer, count, dtype)
            outcome = _Outcome(place, halves(plan, parts[total], arrivals), reduction)
            if lane == plan.lane:
                exchange = self._exchanges.make_halved(parts[total], arrivals, reduction)
                block = _Block(place, parts, lane=lane, total=total, reduction=reduction, exchange=exchange)
                own.append(outcome)
            else:
                loads.append((staging.address(plan.place, buffer, lane), start * size, count * size))
                others.append(outcome)
        return _Stage(loads, block, own, others)


def _place_of_total(lane: int, num_members: int) -> int:
    """Whose part of a lane's block becomes what the host brings: the first that another rank has written.

    A cache has that already; what the lane's own rank would have written there is nowhere but in its tensor. 50 MB are
    added up in 4.5 ms so, in 7.1 where the result goes to memory of its own.
    """
    return 1 if lane == 0 and num_members > 1 else 0
