"""The number of elements to request at a time when the consumer takes elements one by one."""

from __future__ import annotations

import time
from typing import final

from raydist.pipelines.elements.blocks import Block
from raydist.pipelines.engine.op_iterator import OpIterator

_QUICK_S = 0.002  # a faster block may be larger
_SLOW_S = 0.02  # a slower block delays its first element too much
_MAX_BYTES = 1 << 20
_FEW, _FEW_BYTES = 8, 4 << 20  # large elements come a few at a time: a request costs 50 to 100 us
_FEWER = 16  # a filter may return few of the requested elements; larger requests are fine down to one in so many


@final
class RequestSize:
    """A request size that doubles while blocks are fast and small, and halves when they are slow.

    The size changes how early elements are made, never their values or their order.
    """

    def __init__(self, most: int = 4096, first: int = 1) -> None:
        self._most = most
        self.rows = min(first, most)

    def read(self, source: OpIterator, limit: int) -> Block:
        """Return the next block of `source`, of at most `limit` elements, and adapt the size."""
        begin = time.perf_counter()
        block = source.next_block(min(limit, self.rows))
        self._learn(block.num_rows, block.bytes_here, time.perf_counter() - begin)
        return block

    def _learn(self, num_rows: int, num_bytes: int, seconds: float) -> None:
        if seconds > _SLOW_S:
            self.rows = max(1, self.rows // 2)
        elif seconds < _QUICK_S and self.rows <= _FEWER * num_rows:
            rows = min(self._most, self.rows * 2)
            if rows * num_bytes <= _most_bytes(rows) * num_rows:  # twice as many elements of this size
                self.rows = rows
        if num_bytes > _most_bytes(num_rows):
            self.rows = max(1, self.rows // 2)


def _most_bytes(rows: int) -> int:
    return _MAX_BYTES if rows > _FEW else _FEW_BYTES
