"""Dataset.take: the first elements."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

from raydist.pipelines.elements.blocks import Block
from raydist.pipelines.elements.items import IteratorState
from raydist.pipelines.engine.op import IterContext
from raydist.pipelines.engine.op_iterator import ClosesInput, OpIterator
from raydist.pipelines.engine.op_kinds import UnaryOp
from raydist.values import INFINITE_CARDINALITY, UNKNOWN_CARDINALITY

__all__ = ["TakeOp"]


@final
@dataclass(frozen=True, eq=False)
class TakeOp(UnaryOp):
    """The first `count` elements of `input`; a negative count takes all."""

    pure: ClassVar[bool] = True
    content_blind: ClassVar[bool] = True
    state_is_recent: ClassVar[bool] = True
    count: int

    @property
    def label(self) -> str:
        return f"take({self.count})"

    @property
    def is_noop(self) -> bool:
        return self.count < 0

    def cardinality(self) -> int:
        count = self.input.cardinality()
        if self.count < 0 or (count == UNKNOWN_CARDINALITY and self.count > 0):
            return count
        return self.count if count == INFINITE_CARDINALITY else min(self.count, max(0, count))

    def make_iterator(self, ctx: IterContext) -> OpIterator:
        source = ctx.build(self.input)
        return source if self.count < 0 else _TakeIterator(source, self.count)


@final
class _TakeIterator(ClosesInput, OpIterator):
    """Counts elements; errors pass and are not counted."""

    def __init__(self, source: OpIterator, count: int) -> None:
        self._source = source
        self._left = count

    def next_block(self, limit: int) -> Block:
        if self._left <= 0:
            raise StopIteration
        block = self._source.next_block(min(limit, self._left))
        self._left -= block.num_rows
        return block

    def state_dict(self) -> IteratorState:
        return {"left": self._left, "input": self._source.state_dict()}

    def load_state_dict(self, state: IteratorState) -> None:
        self._left = int(state["left"])
        self._source.load_state_dict(state["input"])
