"""How many elements the blocks of one stage have."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import final

from raydist.pipelines.elements.blocks import Block
from raydist.pipelines.elements.items import StageResult

__all__ = ["BlockSize"]

_FIRST_ROWS = 64  # elements of a first block, before their size is known
_MAX_ROWS = 4096  # enough to make the cost of a block vanish beside that of its elements
_MAX_BYTES = 8 << 20
_MAX_BATCH_BYTES = (
    32 << 20
)  # a batch is made in one place elsewhere, where it would otherwise be joined from parts here
_WORTH_S = 0.01  # work worth sending to another process and back, which takes 1 to 2 ms
_SLOW_S = 0.02  # an input that takes longer to make a block is waited for: smaller blocks


@final
class BlockSize:
    """As many as the consumer wants, within a number of bytes.

    To other processes go larger blocks, if that is what it takes to give a worker some milliseconds of work, and as
    long as the input is quick: what the consumer did not ask for yet is kept for it. What is chosen here changes how
    early elements are made, never which or in what order.

    Args:
        away: Whether blocks go to another process.
        together: Elements that the consumer takes at a time: blocks are multiples of it where they are no smaller.
        element_bytes: Of each element, if that is known.
    """

    def __init__(self, *, away: bool, together: int = 1, element_bytes: int | None = None) -> None:
        self._away = away
        self._together = together
        self._least = 1
        self._most = self._most_whole = _FIRST_ROWS
        if element_bytes is not None:
            self._know([element_bytes])

    def rows(self, limit: int, window: int, least: int) -> int:
        """Elements of the next block, for a consumer that wants `limit` and a window of so many blocks."""
        rows = max(1, min(max(-(-limit // window), least, self._least), self._most))
        fitting = self._most_whole // self._together * self._together
        whole = min(fitting, -(-rows // self._together) * self._together)
        # A consumer that wants less than a whole one completes what it has: the next blocks are then whole again.
        return rows if not whole or rows <= limit < whole else whole

    def learn_input(self, seconds: float) -> None:
        """The input took so long to make a block."""
        if seconds > _SLOW_S:
            self._least = max(1, self._least // 2)

    def learn(self, block: Block, result: StageResult) -> None:
        """`block` gave `result`."""
        sizes = [item.num_bytes // item.num_rows for item in result.items if isinstance(item, Block) and item.num_rows]
        if sizes:
            self._know(sizes)
        if self._away and result.busy_s > 0.0:
            worth = math.ceil(_WORTH_S * block.num_rows / result.busy_s)
            self._least = max(1, min(worth, 2 * max(self._least, block.num_rows)))

    def _know(self, sizes: Sequence[int]) -> None:
        """Elements have so many bytes."""
        self._most = max(1, min(_MAX_ROWS, _MAX_BYTES // max(1, *sizes)))
        is_whole = self._away and self._together * max(sizes) <= _MAX_BATCH_BYTES
        self._most_whole = max(self._most, self._together) if is_whole else self._most
