"""Dataset.take, skip and take_while: the first elements, or all but these."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, final

from raydist.errors import InvalidArgumentError
from raydist.foreign_errors import annotate
from raydist.pipelines.elements.blocks import Block
from raydist.pipelines.elements.functions import function_label
from raydist.pipelines.elements.items import ElementError, Item, IteratorState
from raydist.pipelines.engine.op import IterContext
from raydist.pipelines.engine.op_iterator import ClosesInput, OpIterator
from raydist.pipelines.engine.op_kinds import UnaryOp
from raydist.pipelines.engine.producers import BorderIterator, ResumableProducer, read_item
from raydist.pipelines.ops.filter import ask_rows
from raydist.values import INFINITE_CARDINALITY, UNKNOWN_CARDINALITY

__all__ = ["SkipOp", "TakeOp", "TakeWhileOp"]

_ASKED_ROWS = 256  # elements per call of the predicate: some after the end may be read for nothing
_ROWS = 1024  # elements read at a time while skipping


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
class TakeWhileOp(UnaryOp):
    """The elements of `input` before the first for which `predicate` returns False."""

    passes_elements: ClassVar[bool] = True

    predicate: Callable[..., Any]

    def __post_init__(self) -> None:
        if not callable(self.predicate):
            raise InvalidArgumentError(f"take_while needs a function, got {self.predicate!r}.")

    @property
    def name(self) -> str:
        return "take_while"

    @property
    def label(self) -> str:
        return f"take_while({function_label(self.predicate)})"

    def cardinality(self) -> int:
        return 0 if self.input.cardinality() == 0 else UNKNOWN_CARDINALITY

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
