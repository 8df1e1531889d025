"""The number of elements in the blocks of a stage, and the number that a prefetch keeps ready."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import final

from raydist.pipelines.elements.blocks import Block
from raydist.pipelines.elements.items import StageResult

_FIRST_ROWS = 64  # elements of the first block, before the size of an element is known
_MAX_ROWS = 4096  # enough that the cost of a block is negligible beside the cost of its elements
_MAX_BYTES = 8 << 20
_MAX_BYTES_AWAY = 16 << 20  # a call of another process costs 1 to 2 ms
_MAX_BATCH_BYTES = 32 << 20  # a batch is made whole in a worker: this process joins no parts
_WORTH_S = 0.01  # seconds of work that justify a round trip to another process (1 to 2 ms)
_SLOW_S = 0.02  # an input that needs longer for a block makes the stage wait: use smaller blocks


@final
class BlockSize:
    """The block size of one stage: as many elements as the consumer wants, within a number of bytes.

    Blocks for other processes are larger where a worker would otherwise get less than some milliseconds of work, and
    only while the input is fast. The stage keeps elements that the consumer has not asked for yet. The block size
    changes how early elements are made, never their values or their order.

    Args:
        away: True if blocks go to another process.
        together: Elements that the consumer takes at a time. Blocks of at least this size are multiples of it.
        element_bytes: Bytes of an element, if known.
    """

    def __init__(self, *, away: bool, together: int = 1, element_bytes: int | None = None) -> None:
        self._away = away
        self._together = together
        self._least = 1
        self._most = self._most_whole = _FIRST_ROWS
        if element_bytes is not None:
            self._know([element_bytes])

    def rows(self, limit: int, window: int, least: int) -> int:
        """Return the size of the next block, for a consumer of `limit` elements and `window` blocks in flight."""
        rows = max(1, min(max(-(-limit // window), least, self._least), self._most))
        fitting = self._most_whole // self._together * self._together
        whole = min(fitting, -(-rows // self._together) * self._together)
        # A request for less than `together` elements completes a batch that has begun; later blocks are whole again.
        return rows if not whole or rows <= limit < whole else whole

    def learn_input(self, seconds: float) -> None:
        """Note that the input took `seconds` to make a block."""
        if seconds > _SLOW_S:
            self._least = max(1, self._least // 2)

    def learn(self, block: Block, result: StageResult) -> None:
        """Note the size and the cost of the elements that `block` gave."""
        sizes = [item.num_bytes // item.num_rows for item in result.items if isinstance(item, Block) and item.num_rows]
        if sizes:
            self._know(sizes)
        if self._away and result.busy_s > 0.0:
            worth = math.ceil(_WORTH_S * block.num_rows / result.busy_s)
            self._least = max(1, min(worth, 2 * max(self._least, block.num_rows)))

    def _know(self, sizes: Sequence[int]) -> None:
        """Limit the block size by the bytes of an element."""
        most_bytes = _MAX_BYTES_AWAY if self._away else _MAX_BYTES
        self._most = max(1, min(_MAX_ROWS, most_bytes // max(1, *sizes)))
        is_whole = self._away and self._together * max(sizes) <= _MAX_BATCH_BYTES
        self._most_whole = max(self._most, self._together) if is_whole else self._most


_MOST = 1024
_WATCHED = 64  # requests of the consumer between two checks for unused room


@final
class BufferSize:
    """A buffer size that doubles when a bursty consumer empties a buffer that was full.

    A buffer that is never full would not be fuller if it were larger. A buffer that is always more than half full is
    halved.
    """

    def __init__(self, first: int, *, tuned: bool) -> None:
        self.size = first
        self._first = first
        self._tuned = tuned
        self._was_full = False
        self._asked = 0
        self._least_found = _MOST

    def filled(self) -> None:
        """Note that the buffer holds `size` elements."""
        self._was_full = True

    def asked(self, found: int) -> None:
        """Note that the consumer wants an element while `found` elements are ready."""
        if not self._tuned:
            return
        self._asked += 1
        self._least_found = min(self._least_found, found)
        if found == 0 and self._was_full:
            self.size = max(self.size, min(_MOST, 2 * self.size))
            self._look_anew()
        elif self._asked == _WATCHED:
            if self._least_found > self.size // 2:
                self.size = max(self._first, self.size // 2)
            self._look_anew()

    def _look_anew(self) -> None:
        self._was_full = False
        self._asked, self._least_found = 0, max(_MOST, self.size)
