"""Dataset.skip: all but the first elements."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

from raydist.pipelines.elements.blocks import Block
from raydist.pipelines.elements.items import IteratorState
from raydist.pipelines.engine.op import IterContext
from raydist.pipelines.engine.op_iterator import ClosesInput, OpIterator
from raydist.pipelines.engine.op_kinds import UnaryOp

__all__ = ["SkipOp"]

_ROWS = 1024  # elements read at a time while skipping


@final
@dataclass(frozen=True, eq=False)
class SkipOp(UnaryOp):
    """`input` without its first `count` elements; a negative count skips all."""

    pure: ClassVar[bool] = True
    content_blind: ClassVar[bool] = True
    state_is_recent: ClassVar[bool] = True
    count: int

    @property
    def label(self) -> str:
        return f"skip({self.count})"

    @property
    def is_noop(self) -> bool:
        return self.count == 0

    def cardinality(self) -> int:
        count = self.input.cardinality()
        if self.count < 0:
            return 0
        return count if count < 0 else max(0, count - self.count)

    def make_iterator(self, ctx: IterContext) -> OpIterator:
        return _SkipIterator(ctx.build(self.input), self.count)


@final
class _SkipIterator(ClosesInput, OpIterator):
    """Errors among the skipped elements are raised, and not counted."""

    def __init__(self, source: OpIterator, count: int) -> None:
        self._source = source
        self._left = count

    def next_block(self, limit: int) -> Block:
        if self._left < 0:
            raise StopIteration
        while self._left:
            self._left -= self._source.next_block(min(_ROWS, self._left)).num_rows
        return self._source.next_block(limit)

    def state_dict(self) -> IteratorState:
        return {"left": self._left, "input": self._source.state_dict()}

    def load_state_dict(self, state: IteratorState) -> None:
        self._left = int(state["left"])
        self._source.load_state_dict(state["input"])
