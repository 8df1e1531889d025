"""The iterator of every source with random access."""

from __future__ import annotations

from typing import final

from raydist.pipelines.elements.blocks import Block
from raydist.pipelines.elements.items import IteratorState
from raydist.pipelines.engine.op_iterator import OpIterator
from raydist.pipelines.engine.random_access import RandomAccess

__all__ = ["IndexedIterator"]


@final
class IndexedIterator(OpIterator):
    """An iterator over elements 0, 1, 2, ...; its state is the next index."""

    def __init__(self, access: RandomAccess) -> None:
        self._access = access
        self._next = 0

    def next_block(self, limit: int) -> Block:
        stop = min(self._next + limit, len(self._access))
        if stop <= self._next:
            raise StopIteration
        try:
            block = self._access.read(self._next, stop)
        except Exception:
            if stop - self._next > 1:  # find the element that raises
                return self.next_block((stop - self._next) // 2)
            self._next = stop
            raise
        self._next = stop
        return block

    def state_dict(self) -> IteratorState:
        return {"next": self._next}

    def load_state_dict(self, state: IteratorState) -> None:
        self._next = int(state["next"])
