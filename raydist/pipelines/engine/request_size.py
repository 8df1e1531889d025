"""How many elements to ask for at a time, where the consumer takes them one by one."""

from __future__ import annotations

import time
from typing import final

from raydist.pipelines.elements.blocks import Block
from raydist.pipelines.engine.op_iterator import OpIterator

__all__ = ["RequestSize"]

_QUICK_S = 0.002  # a block that takes less may as well be larger
_SLOW_S = 0.02  # one that takes more delays the first of its elements too much
_MAX_BYTES = 1 << 20


@final
class RequestSize:
    """Begins with one element, doubles while blocks are quick and small, and halves when they are slow.

    What it chooses changes how early elements are made, never which or in what order.
    """

    def __init__(self, most: int = 4096) -> None:
        self._most = most
        self.rows = 1

    def read(self, source: OpIterator, limit: int) -> Block:
        """The next block of `source`, of at most `limit` elements, watched."""
        begin = time.perf_counter()
        block = source.next_block(min(limit, self.rows))
        self._learn(block, time.perf_counter() - begin)
        return block

    def _learn(self, block: Block, seconds: float) -> None:
        if seconds > _SLOW_S:
            self.rows = max(1, self.rows // 2)
        elif seconds < _QUICK_S and block.num_bytes * 2 <= _MAX_BYTES and block.num_rows == self.rows:
            self.rows = min(self._most, self.rows * 2)
        if block.num_bytes > _MAX_BYTES:
            self.rows = max(1, self.rows // 2)
