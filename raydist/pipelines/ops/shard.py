"""Dataset.shard: every n-th element."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, final

import numpy as np

from raydist.errors import InvalidArgumentError
from raydist.pipelines.elements.items import ElementError, Item, IteratorState
from raydist.pipelines.engine.op import IterContext
from raydist.pipelines.engine.op_iterator import ClosesInput, OpIterator
from raydist.pipelines.engine.op_kinds import UnaryOp
from raydist.pipelines.engine.producers import BorderIterator, ResumableProducer, read_item
from raydist.pipelines.stored.fingerprint import NOT_IN_FINGERPRINT

__all__ = ["ShardOp"]

_ROWS = 8192  # elements read at a time, at most


@final
@dataclass(frozen=True, eq=False)
class ShardOp(UnaryOp):
    """The elements of `input` whose index modulo `num_shards` is `index`.

    `wants_element` is the message of an error if the shard has no element; None to allow that.
    """

    pure: ClassVar[bool] = True
    content_blind: ClassVar[bool] = True
    takes_row_ids: ClassVar[bool] = True
    num_shards: int
    index: int
    wants_element: str | None = field(default=None, metadata=NOT_IN_FINGERPRINT)

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
    """A producer that counts an error like an element: it comes out of one shard."""

    def __init__(self, op: ShardOp, source: OpIterator) -> None:
        self._op = op
        self._source = source
        self._number = 0  # index of the next input

    def make(self, limit: int) -> Sequence[Item]:
        ahead = (self._op.index - self._number) % self._op.num_shards  # elements before the next element of this shard
        wanted = min(ahead + 1 + (limit - 1) * self._op.num_shards, max(_ROWS, ahead + 1))
        try:
            item = read_item(self._source, wanted)
        except StopIteration:
            return [self._missing()]
        if isinstance(item, ElementError):
            self._number += 1
            return [] if ahead else [item]
        self._number += item.num_rows
        kept = np.arange(ahead, item.num_rows, self._op.num_shards)
        return [item.take(kept)] if len(kept) else []

    def _missing(self) -> ElementError:
        """Return the error for a shard that must have an element; raise StopIteration if it had one."""
        if self._op.wants_element is None or self._number > self._op.index:
            raise StopIteration
        self._number = self._op.index + 1
        return ElementError(InvalidArgumentError(self._op.wants_element))

    def border(self) -> IteratorState:
        return {"number": self._number, "input": self._source.state_dict()}

    def restore(self, border: IteratorState) -> None:
        self._number = int(border["number"])
        self._source.load_state_dict(border["input"])
