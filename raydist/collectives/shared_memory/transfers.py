"""Collectives on tensors that are too large for a slot, by way of staging buffers, one window after the other.

Each function is a generator that does one rank's part and yields the conditions of its waits. A rank writes window w
into buffer w % 4, which held window w - 4. By then the rank has seen all ranks load w - 2, and a rank loads w - 2 only
when it is done with w - 4, so no rank still reads the old content.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, final

import torch

from raydist.collectives.shared_memory.control import ControlBlock, Count
from raydist.collectives.tensors import reduce_parts
from raydist.core.values import ReduceOp
from raydist.utils.shared_segment import Segment

_LINE = 64
_BLOCK_BYTES = 512 << 10  # of each rank's shared tensor: the blocks of all ranks fit into a core's cache
_MOST_VIEWS = 4096


class Wait(NamedTuple):
    """A condition on the counters of all ranks, before an operation goes on."""

    counter: Count
    value: int  # minimum value on all ranks
    last: bool = False  # no other rank waits for further steps of this operation, so the next collective may proceed


Steps = Iterator[Wait]


class _Window(NamedTuple):
    """Elements `start` to `stop` of a tensor, divided into slices of `step` elements, one per rank."""

    start: int
    stop: int
    step: int

    def slice_of(self, rank: int) -> tuple[int, int]:
        """Return start and number of elements of a rank's slice, which may be empty for the last ranks."""
        begin = min(self.start + rank * self.step, self.stop)
        return begin, min(begin + self.step, self.stop) - begin


def _cut(numel: int, itemsize: int, chunk_bytes: int, num_slices: int) -> list[_Window]:
    """Divide a tensor into windows of about equal size, whose slices fit into a chunk.

    >>> [window.slice_of(1) for window in _cut(100, 4, 128, 2)]
    [(32, 18), (82, 18)]
    """
    most = chunk_bytes // itemsize * num_slices
    count = -(-numel // most) if numel else 0
    width = -(-numel // count) if count else 0
    line = max(_LINE // itemsize, 1)
    num_lines = -(-width // (num_slices * line))
    step = min(num_lines * line, chunk_bytes // itemsize)
    return [_Window(start, min(start + width, numel), step) for start in range(0, numel, width or 1)]


_Part = Callable[[_Window, int], None]


@final
class Transfers:
    """Transfers of large tensors by one rank, one at a time and in the same order on every rank."""

    def __init__(self, segment: Segment, control: ControlBlock) -> None:
        self._segment = segment
        self._control = control
        self._layout = control.layout
        self._rank = control.rank
        self._others = [rank for rank in range(control.layout.world_size) if rank != control.rank]
        self._num_windows = 0
        self._views: dict[tuple[int, int, torch.dtype], torch.Tensor] = {}

    def all_reduce(self, flat: torch.Tensor, op: ReduceOp) -> Steps:
        """Replace `flat` by the reduction. Two ranks exchange whole windows; more ranks, slices."""
        if len(self._others) == 1:
            return self._reduce_pair(flat, op)
        return self._reduce_slices(flat, op)

    def _reduce_pair(self, flat: torch.Tensor, op: ReduceOp) -> Steps:
        size, other = flat.element_size(), self._others[0]

        def load(window: _Window, number: int) -> None:
            source = flat.data_ptr() + window.start * size
            ctypes.memmove(self._address(self._rank, number), source, (window.stop - window.start) * size)

        def serve(window: _Window, number: int) -> None:
            mine = flat[window.start : window.stop]
            theirs = self.view(self._layout.chunk(other, number, 0), mine.numel(), mine.dtype)
            reduce_parts([theirs, mine] if self._rank else [mine, theirs], mine, op)

        return self._exchange(_cut(flat.numel(), size, 2 * self._layout.chunk_bytes, 1), load, serve)

    def _reduce_slices(self, flat: torch.Tensor, op: ReduceOp) -> Steps:
        size, mine = flat.element_size(), self._rank

        def load(window: _Window, number: int) -> None:
            for rank in self._others:
                start, count = window.slice_of(rank)
                ctypes.memmove(self._address(mine, number, rank), flat.data_ptr() + start * size, count * size)

        def serve(window: _Window, number: int) -> None:
            start, count = window.slice_of(mine)
            if count:
                chunks = [self._layout.chunk(rank, number, mine) for rank in range(self._layout.world_size)]
                parts = [self.view(chunk, count, flat.dtype) for chunk in chunks]
                result = parts[mine]
                parts[mine] = flat[start : start + count]
                reduce_parts(parts, result, op)
                ctypes.memmove(flat.data_ptr() + start * size, result.data_ptr(), result.nbytes)

        def unload(window: _Window, number: int) -> None:
            for rank in self._others:
                start, count = window.slice_of(rank)
                ctypes.memmove(flat.data_ptr() + start * size, self._address(rank, number, rank), count * size)

        windows = _cut(flat.numel(), size, self._layout.chunk_bytes, self._layout.world_size)
        return self._exchange(windows, load, serve, unload)

    def gather(self, num_bytes: int, source: torch.Tensor | None, targets: dict[int, torch.Tensor]) -> Steps:
        """Send `source` to all ranks and fill each target from its rank. Tensors are at most `num_bytes` flat bytes."""

        def load(window: _Window, number: int) -> None:
            if source is not None:
                length = min(window.stop, source.numel()) - window.start
                ctypes.memmove(self._address(self._rank, number), source.data_ptr() + window.start, max(length, 0))

        def serve(window: _Window, number: int) -> None:
            for rank, target in targets.items():
                length = min(window.stop, target.numel()) - window.start
                ctypes.memmove(target.data_ptr() + window.start, self._address(rank, number), max(length, 0))

        return self._exchange(_cut(num_bytes, 1, self._layout.chunk_bytes * self._layout.world_size, 1), load, serve)

    def _exchange(self, windows: Sequence[_Window], load: _Part, serve: _Part, unload: _Part | None = None) -> Steps:
        """Run a transfer by windows: each rank calls `load`, then `serve` once all ranks have loaded the window.

        A rank loads the next window before it waits for the other ranks, so that it waits less often. With `unload`, a
        rank reduces its slice of the window in `serve`, and calls `unload` once all ranks have served.
        """
        first, end = self._num_windows, self._num_windows + len(windows)
        self._num_windows = end
        for number in range(first, end + 1):
            if number < end:
                load(windows[number - first], number)
                self._control.reach(Count.LOADED, number + 1)
            if number > first:
                yield Wait(Count.LOADED if unload is None else Count.SERVED, number)
                (unload or serve)(windows[number - first - 1], number - 1)
            if number < end and unload is not None:
                yield Wait(Count.LOADED, number + 1)
                serve(windows[number - first], number)
                self._control.reach(Count.SERVED, number + 1)

    def view(self, offset: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a flat tensor in the segment. Tensors are cached, since a new one takes 2 us."""
        key = (offset, numel, dtype)
        known = self._views.get(key)
        if known is None:
            if len(self._views) >= _MOST_VIEWS:
                self._views.clear()
            known = self._views[key] = self._segment.view(offset, numel, dtype)
        return known

    def _address(self, rank: int, number: int, place: int = 0) -> int:
        return self._segment.address + self._layout.chunk(rank, number, place)


@final
class SharedTensor:
    """A flat tensor of which every rank has a copy in shared memory. Each rank reduces its slice, block by block.

    Args:
        number: Number of the tensor, from 1 on, the same on every rank.
    """

    def __init__(self, number: int, copies: Sequence[torch.Tensor], rank: int) -> None:
        self.number = number
        self.copies = copies
        itemsize, dtype = copies[0].element_size(), copies[0].dtype
        (whole,) = _cut(copies[0].numel(), itemsize, 1 << 62, len(copies))
        first, count = whole.slice_of(rank)
        length = min(_BLOCK_BYTES // itemsize, count)
        # `reduce_parts` may write into one of the first two parts only.
        own = torch.empty(length, dtype=dtype) if rank >= 2 else None
        self._blocks: list[tuple[list[torch.Tensor], torch.Tensor]] = []
        for start in range(first, first + count, length or 1):
            parts = [copy[start : min(start + length, first + count)] for copy in copies]
            self._blocks.append((parts, parts[rank] if own is None else own[: len(parts[0])]))

    def reduce(self, control: ControlBlock, number: int, op: ReduceOp) -> Steps:
        """Replace this rank's slice in all copies by the reduction, then wait for the slices of the other ranks."""
        for parts, result in self._blocks:
            reduce_parts(parts, result, op)
            for part in parts:
                if part is not result:
                    ctypes.memmove(part.data_ptr(), result.data_ptr(), result.nbytes)
        control.reach(Count.REDUCED, number + 1)
        yield Wait(Count.REDUCED, number + 1, last=True)
