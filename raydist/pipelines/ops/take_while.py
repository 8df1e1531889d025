"""Dataset.take_while: the elements before the first that a predicate refuses."""

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
from raydist.values import UNKNOWN_CARDINALITY

__all__ = ["TakeWhileOp"]

_ROWS = 256  # elements asked about at a time: some behind the end may be read in vain


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
    """An error, of the input or of the predicate, keeps its place and ends nothing."""

    def __init__(self, predicate: Callable[..., Any], source: OpIterator, label: str) -> None:
        self._predicate = predicate
        self._source = source
        self._label = label
        self._index = 0
        self._ended = False

    def make(self, limit: int) -> Sequence[Item]:
        if self._ended:
            raise StopIteration
        item = read_item(self._source, min(limit, _ROWS))
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
