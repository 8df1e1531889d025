"""Dataset.take, skip, take_while and shard: elements picked by their index, or up to a first refusal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, final

import numpy as np

from raydist.core.errors import InvalidArgumentError
from raydist.core.exception_utils import annotate
from raydist.core.values import INFINITE_CARDINALITY, UNKNOWN_CARDINALITY
from raydist.pipelines.elements.blocks import Block
from raydist.pipelines.elements.functions import function_label
from raydist.pipelines.elements.items import ElementError, Item, IteratorState
from raydist.pipelines.engine.op import IterContext
from raydist.pipelines.engine.op_iterator import ClosesInput, OpIterator
from raydist.pipelines.engine.op_kinds import UnaryOp, UncountedOp
from raydist.pipelines.engine.producers import BorderIterator, ResumableProducer, read_item
from raydist.pipelines.ops.filter import ask_rows
from raydist.pipelines.stored.fingerprint import NOT_IN_FINGERPRINT

_ASKED_ROWS = 256  # elements per call of the predicate: some after the end may be read for nothing
_ROWS = 1024  # elements read at a time while skipping
_SHARD_ROWS = 8192  # elements read at a time, at most


class _CountedIterator(ClosesInput, OpIterator):
    """An iterator that counts elements of its input; errors pass and are not counted."""

    def __init__(self, source: OpIterator, count: int) -> None:
        self._source = source
        self._left = count

    def state_dict(self) -> IteratorState:
        return {"left": self._left, "input": self._source.state_dict()}

    def load_state_dict(self, state: IteratorState) -> None:
        self._left = int(state["left"])
        self._source.load_state_dict(state["input"])


@final
@dataclass(frozen=True, eq=False)
class TakeOp(UnaryOp):
    """The first `count` elements of `input`; a negative count takes all."""

    pure: ClassVar[bool] = True
    content_blind: ClassVar[bool] = True
    takes_row_ids: ClassVar[bool] = True
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
class _TakeIterator(_CountedIterator):
    def next_block(self, limit: int) -> Block:
        if self._left <= 0:
            raise StopIteration
        block = self._source.next_block(min(limit, self._left))
        self._left -= block.num_rows
        return block


@final
@dataclass(frozen=True, eq=False)
class SkipOp(UnaryOp):
    """`input` without its first `count` elements; a negative count skips all."""

    pure: ClassVar[bool] = True
    content_blind: ClassVar[bool] = True
    takes_row_ids: ClassVar[bool] = True
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
class _SkipIterator(_CountedIterator):
    def next_block(self, limit: int) -> Block:
        if self._left < 0:
            raise StopIteration
        while self._left:
            self._left -= self._source.next_block(min(_ROWS, self._left)).num_rows
        return self._source.next_block(limit)


@final
@dataclass(frozen=True, eq=False)
class TakeWhileOp(UncountedOp):
    """The elements of `input` before the first for which `predicate` returns False."""

    passes_elements: ClassVar[bool] = True

    predicate: Callable[..., Any]

    def __post_init__(self) -> None:
        if not callable(self.predicate):
            raise InvalidArgumentError(f"take_while needs a function, got {self.predicate!r}.")

    @property
    def label(self) -> str:
        return f"take_while({function_label(self.predicate)})"

    def make_iterator(self, ctx: IterContext) -> OpIterator:
        label = f"{ctx.operation_names[id(self)]} ({function_label(self.predicate)})"
        return BorderIterator(_Taking(self.predicate, ctx.build(self.input), label))


@final
class _Taking(ClosesInput, ResumableProducer):
    """A producer in which an error, of the input or of the predicate, keeps its place and ends nothing."""

    def __init__(self, predicate: Callable[..., Any], source: OpIterator, label: str) -> None:
        self._predicate = predicate
        self._source = source
        self._label = label
        self._index = 0
        self._ended = False

    def make(self, limit: int) -> Sequence[Item]:
        if self._ended:
            raise StopIteration
        item = read_item(self._source, min(limit, _ASKED_ROWS))
        if isinstance(item, ElementError):
            self._index += 1
            return [item]
        return self._before_refusal(item)

    def _before_refusal(self, block: Block) -> list[Item]:
        answers, failed = ask_rows(self._predicate, block, self._index)
        end = next((row for row, answer in enumerate(answers) if not answer), block.num_rows)
        self._ended = end < block.num_rows
        self._index += block.num_rows
        items: list[Item] = []
        first = 0
        for row in (row for row in failed if row < end):
            annotate(answers[row].error, f"In {self._label}, element {answers[row].index} of its input.")
            items += [block.slice(first, row), answers[row]]
            first = row + 1
        return [*items, block.slice(first, end)]

    def border(self) -> IteratorState:
        return {"index": self._index, "ended": self._ended, "input": self._source.state_dict()}

    def restore(self, border: IteratorState) -> None:
        self._index, self._ended = int(border["index"]), bool(border["ended"])
        self._source.load_state_dict(border["input"])


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
        wanted = min(ahead + 1 + (limit - 1) * self._op.num_shards, max(_SHARD_ROWS, ahead + 1))
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
