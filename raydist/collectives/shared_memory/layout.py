"""Where things lie in a group's segment, and how tensors are cut to pass through it. Only arithmetic."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

__all__ = ["CONTRIBUTION_BYTES", "Layout", "NUM_SLOTS", "Window", "cut", "pieces"]

CONTRIBUTION_BYTES = 16 << 10
"""Tensors up to here are written whole by each rank and reduced by all: one meeting, no copy out."""
NUM_SLOTS = 32
"""Collectives of which the segment holds the descriptions at once."""
CALL_BYTES = 256
WORDS_A_RANK = 16
FAILURE_BYTES = 2048

_PAGE = 4096
_LINE = 64
_MOST_STAGING = 24 << 20
_MOST_MAIL = 8 << 20


@final
@dataclass(frozen=True, slots=True)
class Layout:
    """Offsets in bytes, for a group of `world_size` ranks.

    A page of proof and locks; then for each rank: its counters (two cache lines of its own), its slots, its report of a
    failure, and its staging memory; then a mailbox for every ordered pair of ranks.

    >>> Layout(2).size <= Layout(3).size <= 64 << 20
    True
    """

    world_size: int

    @property
    def chunk_bytes(self) -> int:
        """How much of one slice passes through the staging memory at once."""
        most = _MOST_STAGING // (NUM_BUFFERS * self.world_size**2)
        return max(_PAGE, min(512 << 10, _down(most, _PAGE)))

    @property
    def mail_bytes(self) -> int:
        """Half of a mailbox: one piece of a message."""
        return max(_PAGE, min(128 << 10, _down(_MOST_MAIL // (2 * self.world_size**2), _PAGE)))

    def words(self, rank: int) -> int:
        return _PAGE + rank * WORDS_A_RANK * 8

    def failure(self, rank: int) -> int:
        return self._failures + rank * FAILURE_BYTES

    def slot(self, rank: int, number: int) -> int:
        """The slot of one collective: the rank's call, then what it brings."""
        return self._slots + (rank * NUM_SLOTS + number % NUM_SLOTS) * SLOT_BYTES

    def staging(self, rank: int, buffer: int) -> int:
        """One of a rank's buffers: a chunk for every rank's slice."""
        return self._staging + (rank * NUM_BUFFERS + buffer) * self.chunk_bytes * self.world_size

    def mail_words(self, source: int, destination: int) -> int:
        return self._mail_words + (source * self.world_size + destination) * 2 * _LINE

    def mail(self, source: int, destination: int, half: int) -> int:
        pair = source * self.world_size + destination
        return self._mail + (pair * 2 + half) * self.mail_bytes

    @property
    def size(self) -> int:
        return self._mail + 2 * self.world_size**2 * self.mail_bytes

    @property
    def _failures(self) -> int:
        return _up(self.words(self.world_size), _PAGE)

    @property
    def _slots(self) -> int:
        return _up(self.failure(self.world_size), _PAGE)

    @property
    def _staging(self) -> int:
        return _up(self.slot(self.world_size, 0), _PAGE)

    @property
    def _mail_words(self) -> int:
        return self.staging(self.world_size, 0)

    @property
    def _mail(self) -> int:
        return _up(self.mail_words(self.world_size, 0), _PAGE)


NUM_BUFFERS = 3
"""Of staging memory: a rank fills one while another is read by those that lag behind, and a third is being reduced."""
SLOT_BYTES = CALL_BYTES + CONTRIBUTION_BYTES


@final
@dataclass(frozen=True, slots=True)
class Window:
    """A part of a tensor, cut into one slice a rank.

    Attributes:
        start: Its first element.
        step: Elements of a slice.
        stop: Behind its last element.
    """

    start: int
    step: int
    stop: int

    def slice_of(self, rank: int) -> tuple[int, int]:
        """First element and number of elements of a rank's slice; the last ranks may have none."""
        begin = min(self.start + rank * self.step, self.stop)
        return begin, min(begin + self.step, self.stop) - begin


def cut(numel: int, itemsize: int, *, chunk_bytes: int, world_size: int) -> list[Window]:
    """Windows of about equal size whose slices fit a chunk.

    >>> [window.slice_of(1) for window in cut(100, 4, chunk_bytes=128, world_size=2)]
    [(32, 18), (82, 18)]
    """
    most = chunk_bytes // itemsize * world_size
    count = -(-numel // most) if numel else 0
    width = -(-numel // count) if count else 0
    step = min(_up(-(-width // world_size), max(_LINE // itemsize, 1)), chunk_bytes // itemsize)
    return [Window(start, step, min(start + width, numel)) for start in range(0, numel, width or 1)]


def pieces(num_bytes: int, most: int) -> list[tuple[int, int]]:
    """Start and length of the pieces of so many bytes; an empty message has one.

    >>> pieces(10, 4), pieces(0, 4)
    ([(0, 4), (4, 4), (8, 2)], [(0, 0)])
    """
    return [(start, min(most, num_bytes - start)) for start in range(0, max(num_bytes, 1), most)]


def _up(value: int, unit: int) -> int:
    return -(-value // unit) * unit


def _down(value: int, unit: int) -> int:
    return value // unit * unit
