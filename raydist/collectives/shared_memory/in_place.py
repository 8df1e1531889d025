"""Tensors that lie in a segment of their own, one copy a rank, and are reduced where they are."""

from __future__ import annotations

import ctypes
import hashlib
import logging
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch

from raydist.collectives.reducing import reduce_parts
from raydist.collectives.shared_memory.board import Board, Count
from raydist.collectives.shared_memory.layout import cut
from raydist.collectives.shared_memory.segment import TOKEN_BYTES, Segment
from raydist.collectives.shared_memory.task import Reached, Steps
from raydist.values import ReduceOp

__all__ = [
    "Portion",
    "SharedTensor",
    "SharedTensors",
    "allocation_bytes",
    "allocation_name",
    "offer_segment",
    "open_offered",
    "reduce_in_place",
]

_log = logging.getLogger("raydist")

_LINE = 64
_PAGE = 4096
# Of one rank's part: parts of all ranks stay in a core's cache while they are added up and handed out.
_BLOCK_BYTES = 128 << 10
_LARGE_BYTES = 8 << 20  # of a segment whose pages are joined: less is in a core's reach through small ones, too


@final
@dataclass(frozen=True, slots=True, eq=False)
class Portion:
    """A part of what one rank reduces of a tensor that all have: worked out once, for each time that it is reduced.

    Attributes:
        parts: Of all ranks.
        result: Where the result comes up: one of the parts, or memory of this rank's.
        source: Its address.
        targets: Addresses of the parts that it is copied to.
    """

    parts: Sequence[torch.Tensor]
    result: torch.Tensor
    source: int
    targets: Sequence[int]

    def reduce(self, op: ReduceOp) -> None:
        """Make all parts the reduction of them."""
        reduce_parts(self.parts, self.result, op)
        for target in self.targets:
            ctypes.memmove(target, self.source, self.result.nbytes)


@final
@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class SharedTensor:
    """A tensor that lies in shared memory, one copy a rank.

    Attributes:
        number: The same on every rank, from 1 on.
        copies: Of all ranks, each flat and whole.
        portions: What this rank reduces of them.
    """

    number: int
    copies: Sequence[torch.Tensor]
    portions: Sequence[Portion]


@final
class SharedTensors:
    """The tensors of a group that lie in shared memory, by where they begin."""

    def __init__(self) -> None:
        self._known: dict[int, SharedTensor] = {}
        self._num_tensors = 0

    def add(
        self, segment: Segment, sizes: Sequence[tuple[int, torch.dtype]], rank: int, world_size: int
    ) -> list[torch.Tensor]:
        """This rank's tensors in a segment of `allocation_bytes(sizes, world_size)` bytes.

        They are forgotten when they are dropped.
        """
        offsets = _offsets(sizes)
        mine = []
        for (numel, dtype), offset in zip(sizes, offsets, strict=False):
            places = [_PAGE + other * offsets[-1] + offset for other in range(world_size)]
            tensor = segment.view(places[rank], numel, dtype)
            mine.append(tensor)
            self._num_tensors += 1
            if numel:
                # Tensors of their own, not views of the one that is given away: those would keep it.
                copies = [segment.view(place, numel, dtype) for place in places]
                self._known[tensor.data_ptr()] = SharedTensor(self._num_tensors, copies, _portions(copies, rank))
                weakref.finalize(tensor, self._known.pop, tensor.data_ptr(), None).atexit = False
        return mine

    def find(self, tensor: torch.Tensor) -> SharedTensor | None:
        """What is known of a tensor, if it is one of these, whole."""
        known = self._known.get(tensor.data_ptr())
        if known is None or known.copies[0].dtype != tensor.dtype or known.copies[0].numel() != tensor.numel():
            return None
        return known


def allocation_bytes(sizes: Sequence[tuple[int, torch.dtype]], world_size: int) -> int:
    """Bytes of a segment for these tensors, once a rank."""
    return _PAGE + world_size * _offsets(sizes)[-1]


def allocation_name(sizes: Sequence[tuple[int, torch.dtype]]) -> str:
    """What allocating tensors of these sizes is called: another name for other sizes."""
    layout = hashlib.sha256(repr([(numel, dtype) for numel, dtype in sizes]).encode()).hexdigest()[:16]
    return f"allocate({len(sizes)} tensors, layout {layout})"


def offer_segment(size: int, offer: torch.Tensor) -> Segment | None:
    """A new segment, and in `offer` how others open it; None where there is no room, and then nothing is offered."""
    try:
        segment = Segment.create(size)
        if size >= _LARGE_BYTES:
            segment.join_pages()
    except OSError as error:
        _log.warning("Tensors of %d bytes cannot be shared by ranks: %s. Reducing them takes longer.", size, error)
        return None
    text = segment.token + segment.name.encode()
    offer[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    return segment


def open_offered(size: int, offer: torch.Tensor) -> Segment | None:
    """The segment that another rank offers; None where there is none, or it cannot be opened."""
    text = bytes(offer.tolist()).rstrip(b"\0")
    try:
        return Segment.open(text[TOKEN_BYTES:].decode(), size, text[:TOKEN_BYTES]) if text else None
    except OSError:
        return None


def _offsets(sizes: Sequence[tuple[int, torch.dtype]]) -> list[int]:
    """Where each tensor of a rank begins, and the length of all."""
    offsets = [0]
    for numel, dtype in sizes:
        offsets.append(offsets[-1] + -(-numel * dtype.itemsize // _LINE) * _LINE)
    offsets[-1] = -(-offsets[-1] // _PAGE) * _PAGE
    return offsets


def _portions(copies: Sequence[torch.Tensor], rank: int) -> list[Portion]:
    """A rank's slice, part by part."""
    itemsize = copies[0].element_size()
    (whole,) = cut(copies[0].numel(), itemsize, chunk_bytes=1 << 62, world_size=len(copies))
    first, count = whole.slice_of(rank)
    length = _BLOCK_BYTES // itemsize
    ranges = [slice(start, min(start + length, first + count)) for start in range(first, first + count, length)]
    # In rank order the first two are added first, so that only these may hold the result.
    own = None if rank < 2 else torch.empty(min(length, count), dtype=copies[0].dtype)
    return [_portion([copy[place] for copy in copies], rank, own) for place in ranges]


def _portion(parts: Sequence[torch.Tensor], rank: int, own: torch.Tensor | None) -> Portion:
    result = parts[rank] if own is None else own[: parts[rank].numel()]
    targets = [part.data_ptr() for part in parts if part is not result]
    return Portion(parts, result, result.data_ptr(), targets)


def reduce_in_place(board: Board, number: int, shared: SharedTensor, op: ReduceOp) -> Steps:
    """Reduce this rank's slice of all ranks' copies; the others do theirs."""
    for portion in shared.portions:
        portion.reduce(op)
    board.reach(Count.REDUCED, number + 1)
    yield Reached(board, Count.REDUCED, number + 1, last=True)
