"""Dataset.window: overlapping or spaced groups of elements, each a dataset."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, final

from raydist.core.errors import FailedPreconditionError, InvalidArgumentError, SpecError
from raydist.core.nest import LEAF
from raydist.pipelines.elements.blocks import Block, Column, concat_blocks, object_column
from raydist.pipelines.elements.element_nests import map_element
from raydist.pipelines.elements.items import (
    ElementError,
    Item,
    IteratorState,
    count_items,
    drop_items,
    join_items,
    keep_items,
)
from raydist.pipelines.elements.spec import DatasetSpec, TensorSpec
from raydist.pipelines.engine.op import DatasetOp, IterContext
from raydist.pipelines.engine.op_iterator import ClosesInput, OpIterator
from raydist.pipelines.engine.op_kinds import UnaryOp
from raydist.pipelines.engine.producers import BorderIterator, ResumableProducer
from raydist.pipelines.engine.resume import read_items
from raydist.pipelines.sources.memory import MemoryOp

_WINDOWS = 256  # made at a time, at most


@final
@dataclass(frozen=True, eq=False)
class WindowOp(UnaryOp):
    """Windows of `size` elements of `input`, `stride` apart, one beginning every `shift` elements.

    `make_dataset` makes the user's dataset from the operation of a window.
    """

    size: int
    shift: int
    stride: int
    drop_remainder: bool
    make_dataset: Callable[[DatasetOp], Any]

    def __post_init__(self) -> None:
        for name in ("size", "shift", "stride"):
            if getattr(self, name) < 1:
                raise InvalidArgumentError(f"{name} must be >= 1, got {getattr(self, name)}.")

    @property
    def label(self) -> str:
        drop = ", drop_remainder" if self.drop_remainder else ""
        return f"window({self.size}, shift={self.shift}, stride={self.stride}{drop})"

    @property
    def span(self) -> int:
        """Number of elements from the first to the last of a full window."""
        return (self.size - 1) * self.stride + 1

    def cardinality(self) -> int:
        count = self.input.cardinality()
        if count < 0:
            return count
        last_start = count - (self.span if self.drop_remainder else 1)
        return max(0, last_start // self.shift + 1)

    def element_spec(self) -> Any:
        return map_element(DatasetSpec, self.input.element_spec())

    def make_iterator(self, ctx: IterContext) -> OpIterator:
        return BorderIterator(_Windows(self, ctx.build(self.input)))


@final
class _Windows(ClosesInput, ResumableProducer):
    """A producer that holds the elements from the next window on. Its state: the input before some element."""

    def __init__(self, op: WindowOp, source: OpIterator) -> None:
        self._op = op
        self._source = source
        self._start = 0  # index where the next window starts
        self._held: list[Item] = []  # from `_start` on
        self._marks: deque[tuple[int, IteratorState]] = deque()  # number of an element, the input's state before it

    def make(self, limit: int) -> Sequence[Item]:
        op = self._op
        missing = min(limit, _WINDOWS)
        self._hold((missing - 1) * op.shift + op.span)
        items: list[Item] = []
        while missing and (count := count_items(self._held)) >= (op.span if op.drop_remainder else 1):
            run = min(missing, max(1, (count - op.span) // op.shift + 1))
            items += self._cut(run)
            self._move(run * op.shift)
            missing -= run
        if not items:
            raise StopIteration
        return join_items(items)

    def _hold(self, count: int) -> None:
        """Read until `count` elements are held, or an eighth of a window: joining copies held elements."""
        held = count_items(self._held)
        if held >= count:
            return
        self._marks.append((self._start + held, self._source.state_dict()))
        self._held += read_items(self._source, max(count - held, self._op.span // 8))
        blocks = [item for item in self._held if isinstance(item, Block)]
        if 1 < len(blocks) == len(self._held) and len({block.signature for block in blocks}) == 1:
            self._held = [concat_blocks(blocks)]

    def _move(self, count: int) -> None:
        missing = count - count_items(self._held)
        self._held = drop_items(self._held, count)
        if missing > 0:
            read_items(self._source, missing)
        self._start += count
        while len(self._marks) > 1 and self._marks[1][0] <= self._start:
            self._marks.popleft()

    def _cut(self, run: int) -> list[Item]:
        """Return the next `run` windows. The held elements stay."""
        op = self._op
        if len(self._held) == 1 and isinstance(held := self._held[0], Block):
            return [self._datasets(held, run)]
        return [self._window(drop_items(self._held, k * op.shift)) for k in range(run)]

    def _window(self, items: Sequence[Item]) -> Item:
        """Return the window at the beginning of `items`; an error in the window replaces it."""
        rows: list[Block] = []
        at = 0
        for item in keep_items(items, self._op.span):
            if isinstance(item, Block):
                rows.append(_every(item, -at % self._op.stride, self._op.stride))
            elif at % self._op.stride == 0:
                return item
            at += count_items([item])
        try:
            return self._datasets(concat_blocks(rows), 1, stride=1)
        except SpecError as error:
            return ElementError(error)

    def _datasets(self, block: Block, count: int, stride: int | None = None) -> Block:
        """Return `count` windows of a block: elements whose leaves are datasets of the window's columns."""
        op = self._op
        starts = range(0, count * op.shift, op.shift)
        leaves = []
        for spec, column in zip(block.specs, block.columns, strict=True):
            parts = [column[start : start + op.span : stride or op.stride] for start in starts]
            specs = (spec,)
            leaves.append(object_column([self._dataset(specs, part) for part in parts]))
        return Block(block.structure, tuple(map(DatasetSpec, block.specs)), tuple(leaves), count)

    def _dataset(self, specs: tuple[TensorSpec], column: Column) -> Any:
        return self._op.make_dataset(MemoryOp(Block(LEAF, specs, (column,), len(column)), "window"))

    def border(self) -> IteratorState:
        index, state = self._marks[0] if self._marks and self._held else (self._start, self._source.state_dict())
        return {"start": self._start, "skip": self._start - index, "input": state}

    def restore(self, border: IteratorState) -> None:
        self._source.load_state_dict(border["input"])
        self._start = int(border["start"])
        skip = int(border["skip"])
        self._marks.append((self._start - skip, border["input"]))
        if count_items(read_items(self._source, skip)) < skip:
            raise FailedPreconditionError(
                f"The input of {self._op.label} must be the same again to resume at element {self._start}, and it has "
                "ended before. Resume with the data that the state was saved with."
            )


def _every(block: Block, first: int, stride: int) -> Block:
    columns = tuple(column[first::stride] for column in block.columns)
    return Block(block.structure, block.specs, columns, len(range(first, block.num_rows, stride)))
