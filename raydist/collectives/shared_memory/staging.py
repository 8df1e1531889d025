"""Tensors that pass through the staging memory of a segment, window by window.

A rank loads the part of a window that others need, makes its own part of the result once all have loaded, and takes the
others' parts home while the next window is being loaded.

Nobody asks whether a buffer is free. Who loads window w has served w - 2, for which all had loaded w - 2, and before
that they were done with w - 4: the last whose buffer it was.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Protocol, final

import torch

from raydist.collectives.reducing import reduce_parts
from raydist.collectives.shared_memory.board import Board, Count
from raydist.collectives.shared_memory.layout import NUM_BUFFERS, Layout, Window, cut
from raydist.collectives.shared_memory.segment import Segment
from raydist.collectives.shared_memory.task import Reached, Steps
from raydist.values import ReduceOp

__all__ = ["Gather", "PairReduction", "Reduction", "Staging", "Swap", "Transfer"]


class Transfer(Protocol):
    """What a collective does with one window; `buffer` is one of `NUM_BUFFERS`."""

    def load(self, window: Window, buffer: int) -> None:
        """Write what others need into this rank's buffer."""

    def serve(self, window: Window, buffer: int) -> None:
        """Make this rank's part of the result; all have loaded."""

    def unload(self, window: Window, buffer: int) -> None:
        """Take the others' parts home; all have served."""


@final
class Staging:
    """The staging memory of all ranks, as one of them sees it. One transfer at a time, the same on every rank."""

    def __init__(self, segment: Segment, board: Board) -> None:
        self.rank = board.rank
        self.layout: Layout = board.layout
        self._segment = segment
        self._board = board
        self._num_windows = 0
        self._has_small_pages = board.rank == 0  # one joins those of all

    def sliced(self, numel: int, itemsize: int) -> list[Window]:
        """Windows of which each rank reduces a slice."""
        return cut(numel, itemsize, chunk_bytes=self.layout.chunk_bytes, world_size=self.layout.world_size)

    def whole(self, numel: int, itemsize: int, *, num_tensors: int) -> list[Window]:
        """Windows of so many tensors that pass through a buffer side by side."""
        chunk_bytes = self.layout.chunk_bytes * self.layout.world_size // num_tensors
        return cut(numel, itemsize, chunk_bytes=chunk_bytes, world_size=1)

    def address(self, rank: int, buffer: int, chunk: int = 0) -> int:
        """Of one chunk of a rank's buffer."""
        return self._segment.address + self._offset(rank, buffer, chunk)

    def view(self, rank: int, buffer: int, chunk: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """The first elements of a chunk."""
        return self._segment.view(self._offset(rank, buffer, chunk), numel, dtype)

    def arrivals(self, rank: int, buffer: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Where a rank of a host among others puts what comes from there, beside that buffer."""
        return self._segment.view(self.layout.arrivals(rank, buffer), numel, dtype)

    def claim(self, count: int) -> int:
        """The number of the first of so many windows that pass next, in the same order on every rank."""
        if self._has_small_pages and count >= NUM_BUFFERS:  # a tensor that goes through all of the memory
            self._has_small_pages = False
            self._segment.join_pages()
        first = self._num_windows
        self._num_windows += count
        return first

    def transfer(self, windows: Sequence[Window], transfer: Transfer) -> Steps:
        """Pass these windows, of which all ranks have as many."""
        board, first = self._board, self.claim(len(windows))
        for number, window in enumerate(windows, start=first):
            transfer.load(window, number % NUM_BUFFERS)
            board.reach(Count.LOADED, number + 1)
            if number > first:
                yield Reached(board, Count.SERVED, number)
                transfer.unload(windows[number - first - 1], (number - 1) % NUM_BUFFERS)
            yield from self._serve(window, number, transfer)
        end = first + len(windows)
        yield Reached(board, Count.SERVED, end)
        transfer.unload(windows[-1], (end - 1) % NUM_BUFFERS)

    def exchange(self, windows: Sequence[Window], transfer: Transfer) -> Steps:
        """Pass windows of which nothing is taken home after all have served: each rank is done with its own part."""
        board, first = self._board, self.claim(len(windows))
        for number, window in enumerate(windows, start=first):
            transfer.load(window, number % NUM_BUFFERS)
            board.reach(Count.LOADED, number + 1)
            if number > first:
                yield from self._serve(windows[number - first - 1], number - 1, transfer)
        yield from self._serve(windows[-1], first + len(windows) - 1, transfer)

    def _serve(self, window: Window, number: int, transfer: Transfer) -> Steps:
        yield Reached(self._board, Count.LOADED, number + 1)
        transfer.serve(window, number % NUM_BUFFERS)
        self._board.reach(Count.SERVED, number + 1)

    def _offset(self, rank: int, buffer: int, chunk: int) -> int:
        return self.layout.staging(rank, buffer) + chunk * self.layout.chunk_bytes


@final
class Reduction:
    """Each rank reduces its slice of every window.

    Args:
        staging: What it passes through.
        inputs: This rank's flat part for each rank: several tensors where those are scattered, else the same one.
        output: Where the result goes.
        op: How they are reduced.
        scattered: Whether each rank's slice is a whole window, of its own input.
        everywhere: Whether this rank takes the other slices home, into `output`.
    """

    def __init__(
        self,
        staging: Staging,
        inputs: Sequence[torch.Tensor],
        output: torch.Tensor,
        op: ReduceOp,
        *,
        scattered: bool = False,
        everywhere: bool = False,
    ) -> None:
        self._staging = staging
        self._inputs = inputs
        self._output = output
        self._op = op
        self._scattered = scattered
        self._everywhere = everywhere
        self._itemsize = output.element_size()
        self._others = [rank for rank in range(len(inputs)) if rank != staging.rank]

    def load(self, window: Window, buffer: int) -> None:
        staging, size = self._staging, self._itemsize
        for rank in self._others:
            start, count = self._slice(window, rank)
            source = self._inputs[rank].data_ptr() + start * size
            ctypes.memmove(staging.address(staging.rank, buffer, rank), source, count * size)

    def serve(self, window: Window, buffer: int) -> None:
        staging = self._staging
        mine = staging.rank
        start, count = self._slice(window, mine)
        if not count:
            return
        dtype = self._output.dtype
        parts = [staging.view(rank, buffer, mine, count, dtype) for rank in range(len(self._inputs))]
        parts[mine] = self._inputs[mine][start : start + count]
        result = staging.view(mine, buffer, mine, count, dtype)
        reduce_parts(parts, result, self._op)
        ctypes.memmove(self._output.data_ptr() + start * self._itemsize, result.data_ptr(), result.nbytes)

    def unload(self, window: Window, buffer: int) -> None:
        if not self._everywhere:
            return
        staging, size = self._staging, self._itemsize
        for rank in self._others:
            start, count = self._slice(window, rank)
            target = self._output.data_ptr() + start * size
            ctypes.memmove(target, staging.address(rank, buffer, rank), count * size)

    def _slice(self, window: Window, rank: int) -> tuple[int, int]:
        return (window.start, window.stop - window.start) if self._scattered else window.slice_of(rank)


@final
class PairReduction:
    """Two ranks that give each other all they have, and both add it up: one meeting a window instead of two.

    Args:
        staging: What it passes through.
        tensor: Flat; replaced by the reduction.
        op: How.
    """

    def __init__(self, staging: Staging, tensor: torch.Tensor, op: ReduceOp) -> None:
        self._staging = staging
        self._tensor = tensor
        self._op = op

    def load(self, window: Window, buffer: int) -> None:
        size = self._tensor.element_size()
        place = self._staging.address(self._staging.rank, buffer)
        ctypes.memmove(place, self._tensor.data_ptr() + window.start * size, (window.stop - window.start) * size)

    def serve(self, window: Window, buffer: int) -> None:
        mine = self._staging.rank
        result = self._tensor[window.start : window.stop]
        theirs = self._staging.view(1 - mine, buffer, 0, result.numel(), result.dtype)
        reduce_parts([theirs, result] if mine else [result, theirs], result, self._op)

    def unload(self, window: Window, buffer: int) -> None:
        """Nothing is left to be taken home."""


@final
class Gather:
    """Ranks write into their buffers, and all others read them.

    Args:
        staging: What it passes through.
        source: What this rank writes: flat bytes; None where it only reads. May end before the last window.
        targets: Rank -> flat bytes, as many as it writes, that are filled from its buffer.
    """

    def __init__(self, staging: Staging, source: torch.Tensor | None, targets: dict[int, torch.Tensor]) -> None:
        self._staging = staging
        self._source = source
        self._targets = targets

    def load(self, window: Window, buffer: int) -> None:
        if self._source is not None:
            source = self._source.data_ptr() + window.start
            length = min(window.stop, self._source.numel()) - window.start
            ctypes.memmove(self._staging.address(self._staging.rank, buffer), source, max(length, 0))

    def serve(self, window: Window, buffer: int) -> None:
        for rank, target in self._targets.items():
            source = self._staging.address(rank, buffer)
            length = min(window.stop, target.numel()) - window.start
            ctypes.memmove(target.data_ptr() + window.start, source, max(length, 0))

    def unload(self, window: Window, buffer: int) -> None:
        """Nothing is left to be read."""


@final
class Swap:
    """Each rank has something for each other.

    Args:
        staging: What it passes through.
        inputs: What this rank has for each, as flat bytes.
        outputs: What each has for this one; all as long.
    """

    def __init__(self, staging: Staging, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> None:
        self._staging = staging
        self._inputs = inputs
        self._outputs = outputs
        self._others = [rank for rank in range(len(inputs)) if rank != staging.rank]

    def load(self, window: Window, buffer: int) -> None:
        mine = self._staging.rank
        if window.start == 0:
            self._outputs[mine].copy_(self._inputs[mine])
        for rank in self._others:
            source = self._inputs[rank].data_ptr() + window.start
            ctypes.memmove(self._staging.address(mine, buffer, rank), source, window.stop - window.start)

    def serve(self, window: Window, buffer: int) -> None:
        mine = self._staging.rank
        for rank in self._others:
            target = self._outputs[rank].data_ptr() + window.start
            ctypes.memmove(target, self._staging.address(rank, buffer, mine), window.stop - window.start)

    def unload(self, window: Window, buffer: int) -> None:
        """Nothing is left to be read."""
