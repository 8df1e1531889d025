"""Dataset.shard: every n-th element."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, final

import numpy as np

from raydist.errors import InvalidArgumentError
from raydist.pipelines.elements.items import ElementError, Item, State
from raydist.pipelines.engine.op import IterContext, UnaryOp
from raydist.pipelines.engine.op_iterator import ClosesInput, OpIterator
from raydist.pipelines.engine.producers import BorderIterator, ResumableProducer, read_item

__all__ = ["ShardOp"]

_ROWS = 8192  # elements read at a time, at most


@final
@dataclass(frozen=True, eq=False)
class ShardOp(UnaryOp):
    """The elements of `input` whose number leaves the remainder `index` when divided by `num_shards`."""

    pure: ClassVar[bool] = True
    content_blind: ClassVar[bool] = True
    num_shards: int
    index: int

    def __post_init__(self) -> None:
        if self.num_shards < 1:
            raise InvalidArgumentError(f"num_shards must be >= 1, got {self.num_shards}.")
        if not 0 <= self.index < self.num_shards:
            raise InvalidArgumentError(
                f"index must be in 0 .. {self.num_shards - 1} (num_shards - 1), got {self.index}."
            )

    @property
    def label(self) -> str:
        return f"shard({self.num_shards}, {self.index})"

    @property
    def is_noop(self) -> bool:
        return self.num_shards == 1

    def cardinality(self) -> int:
        count = self.input.cardinality()
        return count if count < 0 else max(0, -(-(count - self.index) // self.num_shards))

    def make_iterator(self, ctx: IterContext) -> OpIterator:
        return BorderIterator(_Sharding(self, ctx.build(self.input)))


@final
class _Sharding(ClosesInput, ResumableProducer):
    """An error has a number like an element: it comes out of one shard."""

    def __init__(self, op: ShardOp, source: OpIterator) -> None:
        self._op = op
        self._source = source
        self._number = 0  # of the next input

    def make(self, limit: int) -> Sequence[Item]:
        ahead = (self._op.index - self._number) % self._op.num_shards  # elements before the next one of this shard
        item = read_item(self._source, min(ahead + 1 + (limit - 1) * self._op.num_shards, max(_ROWS, ahead + 1)))
        if isinstance(item, ElementError):
            self._number += 1
            return [] if ahead else [item]
        self._number += item.num_rows
        kept = np.arange(ahead, item.num_rows, self._op.num_shards)
        return [item.take(kept)] if len(kept) else []

    def border(self) -> State:
        return {"number": self._number, "input": self._source.state_dict()}

    def restore(self, border: State) -> None:
        self._number = int(border["number"])
        self._source.load_state_dict(border["input"])
