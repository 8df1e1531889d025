"""Where things lie in a group's segment, and how tensors are cut to pass through it. Only arithmetic."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

__all__ = ["CONTRIBUTION_BYTES", "GROUP", "Layout", "NUM_BAYS", "NUM_SLOTS", "Window", "cut", "pieces"]

CONTRIBUTION_BYTES = 16 << 10
"""Tensors up to here are written whole by each rank and reduced by all, however many: one meeting, no copy out."""
NUM_SLOTS = 32
"""Collectives of which the segment holds the descriptions at once."""
CALL_BYTES = 256
"""What is said about the call."""
NUM_BUFFERS = 4
"""Of staging memory, used in turn; `staging.py` says why as many are needed."""
NUM_BAYS = 4
"""Of one rank, used in turn; `sequence.py` says why as many are needed."""
GROUP = 8
"""So many of many ranks have what they brought to a bay added up before all is."""
WORDS_A_RANK = 16
FAILURE_BYTES = 2048

_PAGE = 4096
_LINE = 64
_MOST_STAGING = 32 << 20
_MOST_CHUNK = 512 << 10
_ROOMY_STAGING = 64 << 20
_ROOMY_CHUNK = 2 << 20
_MOST_MAIL = 8 << 20
_MOST_PIECE = 128 << 10
_NARROW = 4
_NARROW_CONTRIBUTION = 64 << 10  # a few ranks add this up in less time than a second meeting takes
_BAY_BYTES = 128 << 10
_APART = 256  # between two slots: those of one number would else lie in the same few lines of a cache


@final
@dataclass(frozen=True, slots=True)
class Layout:
    """Offsets in bytes. Made by :meth:`of`.

    A page of proof and locks; then for each rank: its counters (two cache lines of its own), its report of a failure;
    what all ranks call as one collective, side by side; then each rank's slots, and its staging memory; where there are
    other hosts, a chunk beside each buffer for what comes from there; then a mailbox for every ordered pair of ranks;
    then, in groups of many ranks, each rank's bays, and what becomes of them: for every bay, a subtotal of each so many
    ranks, and the total.

    Attributes:
        world_size: Number of ranks.
        chunk_bytes: How much of one rank's slice passes through the staging memory at once.
        mail_bytes: Half of a mailbox: one piece of a message.
        failures_at: Where the reports of failures begin.
        calls_at: Where the calls begin.
        slots_at: Where the slots begin.
        staging_at: Where the staging memory begins.
        arrivals_at: Where the chunks for what comes from other hosts begin.
        mail_words_at: Where the counters of mailboxes begin.
        mail_at: Where the mailboxes begin.
        bays_at: Where the bays begin.
        totals_at: Where subtotals and totals begin.
        bay_bytes: A tensor that a rank brings whole, where many ranks or other hosts are met; 0 where not.
        contribution_bytes: Tensors up to here are written whole by each rank of this group and reduced by all.
        size: All of it.
    """

    world_size: int
    chunk_bytes: int
    mail_bytes: int
    failures_at: int
    calls_at: int
    slots_at: int
    staging_at: int
    arrivals_at: int
    mail_words_at: int
    mail_at: int
    bays_at: int
    totals_at: int
    bay_bytes: int
    contribution_bytes: int
    size: int

    @staticmethod
    def of(world_size: int, *, roomy: bool = False) -> Layout:
        """The layout for so many ranks.

        Args:
            world_size: Their number.
            roomy: With larger chunks, arrivals, and bays for few ranks too: for ranks that wait for other hosts.

        >>> [Layout.of(world_size).size >> 20 for world_size in (1, 2, 4, 8)]
        [4, 13, 44, 50]
        """
        pairs = world_size**2
        most, staging_bytes = (_ROOMY_CHUNK, _ROOMY_STAGING) if roomy else (_MOST_CHUNK, _MOST_STAGING)
        chunk = max(_PAGE, min(most, _down(staging_bytes // (NUM_BUFFERS * pairs), _PAGE)))
        mail = max(_PAGE, min(_MOST_PIECE, _down(_MOST_MAIL // (2 * pairs), _PAGE)))
        failures = _up(_PAGE + world_size * WORDS_A_RANK * 8, _PAGE)
        calls = _up(failures + world_size * FAILURE_BYTES, _PAGE)
        slots = _up(calls + world_size * NUM_SLOTS * CALL_BYTES, _PAGE)
        few = world_size <= _NARROW and not roomy
        contribution = _NARROW_CONTRIBUTION if few else CONTRIBUTION_BYTES
        staging = _up(slots + world_size * NUM_SLOTS * (contribution + _APART), _PAGE)
        arrivals = staging + NUM_BUFFERS * pairs * chunk
        mail_words = arrivals + (NUM_BUFFERS * world_size * chunk if roomy else 0)
        mails = _up(mail_words + pairs * 2 * _LINE, _PAGE)
        bays = mails + 2 * pairs * mail
        bay = 0 if few else _BAY_BYTES
        totals = bays + NUM_BAYS * world_size * bay
        size = totals + (0 if roomy or few else NUM_BAYS * (_num_groups(world_size) + 1) * (_LINE + 2 * bay))
        return Layout(
            world_size,
            chunk,
            mail,
            failures,
            calls,
            slots,
            staging,
            arrivals,
            mail_words,
            mails,
            bays,
            totals,
            bay,
            contribution,
            size,
        )

    @property
    def num_groups(self) -> int:
        """Of at most `GROUP` ranks each, in rank order."""
        return _num_groups(self.world_size)

    @staticmethod
    def words(rank: int) -> int:
        """A rank's counters."""
        return _PAGE + rank * WORDS_A_RANK * 8

    def failure(self, rank: int) -> int:
        """A rank's report."""
        return self.failures_at + rank * FAILURE_BYTES

    def call(self, rank: int, number: int) -> int:
        """What a rank calls as one collective; behind it stands what the next rank does."""
        return self.calls_at + (number % NUM_SLOTS * self.world_size + rank) * CALL_BYTES

    def slot(self, rank: int, number: int) -> int:
        """The slot of one collective: what the rank brings."""
        return self.slots_at + (rank * NUM_SLOTS + number % NUM_SLOTS) * (self.contribution_bytes + _APART)

    def staging(self, rank: int, buffer: int) -> int:
        """One of a rank's buffers: a chunk for every rank's slice."""
        return self.staging_at + (rank * NUM_BUFFERS + buffer) * self.chunk_bytes * self.world_size

    def arrivals(self, rank: int, buffer: int) -> int:
        """A chunk beside one of a rank's buffers; of roomy layouts alone."""
        return self.arrivals_at + (rank * NUM_BUFFERS + buffer) * self.chunk_bytes

    def bay(self, rank: int, number: int) -> int:
        """Where a rank puts what it brings to collective `number` of those that go through bays."""
        return self.bays_at + (rank * NUM_BAYS + number % NUM_BAYS) * self.bay_bytes

    def subtotal(self, group: int, number: int) -> int:
        """The sum of what a group of ranks has brought to that bay, up to twice as wide; its words lie before it."""
        places = self.num_groups + 1
        return self.totals_at + (number % NUM_BAYS * places + group) * (_LINE + 2 * self.bay_bytes) + _LINE

    def total(self, number: int) -> int:
        """What all have brought to that bay; its words lie before."""
        return self.subtotal(self.num_groups, number)

    def mail_words(self, source: int, destination: int) -> int:
        """The sender's counter; the receiver's follows on a cache line of its own."""
        return self.mail_words_at + (source * self.world_size + destination) * 2 * _LINE

    def mail(self, source: int, destination: int, half: int) -> int:
        """One half of a mailbox."""
        return self.mail_at + ((source * self.world_size + destination) * 2 + half) * self.mail_bytes


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


def _num_groups(world_size: int) -> int:
    return -(-world_size // GROUP)


def _up(value: int, unit: int) -> int:
    return -(-value // unit) * unit


def _down(value: int, unit: int) -> int:
    return value // unit * unit
