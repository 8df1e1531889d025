"""Dataset.take: the first elements."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, final

from raydist.pipelines.elements.blocks import Block
from raydist.pipelines.engine.op import DatasetOp, IterContext, OpIterator, State
from raydist.values import INFINITE_CARDINALITY, UNKNOWN_CARDINALITY

__all__ = ["TakeOp"]


@final
@dataclass(frozen=True, eq=False)
class TakeOp(DatasetOp):
    """The first `count` elements of `input`; a negative count takes all."""

    content_blind: ClassVar[bool] = True
    state_is_recent: ClassVar[bool] = True
    input: DatasetOp
    count: int

    @property
    def inputs(self) -> tuple[DatasetOp, ...]:
        return (self.input,)

    @property
    def label(self) -> str:
        return f"take({self.count})"

    @property
    def is_noop(self) -> bool:
        return self.count < 0

    @property
    def is_pure(self) -> bool:
        return True

    def cardinality(self) -> int:
        count = self.input.cardinality()
        if self.count < 0 or (count == UNKNOWN_CARDINALITY and self.count > 0):
            return count
        return self.count if count == INFINITE_CARDINALITY else min(self.count, max(0, count))

    def element_spec(self) -> Any:
        return self.input.element_spec()

    def make_iterator(self, ctx: IterContext) -> OpIterator:
        source = ctx.build(self.input)
        return source if self.count < 0 else _TakeIterator(source, self.count)


@final
class _TakeIterator(OpIterator):
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

    def state_dict(self) -> State:
        return {"left": self._left, "input": self._source.state_dict()}

    def load_state_dict(self, state: State) -> None:
        self._left = int(state["left"])
        self._source.load_state_dict(state["input"])

    def close(self) -> None:
        self._source.close()
