"""How many elements to ask for at a time, where the consumer takes them one by one."""

from __future__ import annotations

import time
from typing import final

from raydist.pipelines.elements.blocks import Block
from raydist.pipelines.elements.items import count_bytes, count_items
from raydist.pipelines.engine.op_iterator import OpIterator

__all__ = ["RequestSize"]

_QUICK_S = 0.002  # a block that takes less may as well be larger
_SLOW_S = 0.02  # one that takes more delays the first of its elements too much
_MAX_BYTES = 1 << 20
_FEW, _FEW_BYTES = 8, 4 << 20  # large elements come a few at a time: a request costs 50 to 100 us
_FEWER = 16  # a filter may leave so few of the elements that it was asked for: one in so many


@final
class RequestSize:
    """Begins with one element, doubles while blocks are quick and small, and halves when they are slow.

    What it chooses changes how early elements are made, never which or in what order.
    """

    def __init__(self, most: int = 4096, first: int = 1) -> None:
        self._most = most
        self.rows = min(first, most)

    def read(self, source: OpIterator, limit: int) -> Block:
        """The next block of `source`, of at most `limit` elements, watched."""
        begin = time.perf_counter()
        block = source.next_block(min(limit, self.rows))
        self._learn(block.num_rows, block.num_bytes, time.perf_counter() - begin)
        return block

    def read_together(self, source: OpIterator, limit: int) -> list[Block]:
        """As `read`, in several blocks where they lie ready."""
        begin = time.perf_counter()
        blocks = source.next_blocks(min(limit, self.rows))
        seconds = time.perf_counter() - begin
        self._learn(count_items(blocks), count_bytes(blocks), seconds)
        return blocks

    def _learn(self, num_rows: int, num_bytes: int, seconds: float) -> None:
        if seconds > _SLOW_S:
            self.rows = max(1, self.rows // 2)
        elif seconds < _QUICK_S and self.rows <= _FEWER * num_rows:
            rows = min(self._most, self.rows * 2)
            if rows * num_bytes <= _most_bytes(rows) * num_rows:  # twice as many like these
                self.rows = rows
        if num_bytes > _most_bytes(num_rows):
            self.rows = max(1, self.rows // 2)


def _most_bytes(rows: int) -> int:
    return _MAX_BYTES if rows > _FEW else _FEW_BYTES
