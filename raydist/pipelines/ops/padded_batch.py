"""Dataset.padded_batch: batches of elements of differing shapes, filled up to one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, final

from raydist.errors import InvalidArgumentError, RaydistError
from raydist.foreign_errors import annotate
from raydist.nest import unflatten
from raydist.pipelines.elements.blocks import Block, concat_blocks
from raydist.pipelines.elements.element_nests import flatten_element
from raydist.pipelines.elements.items import ElementError, Item, IteratorState, count_items, drop_items, keep_items
from raydist.pipelines.engine.op import IterContext
from raydist.pipelines.engine.op_iterator import ClosesInput, OpIterator
from raydist.pipelines.engine.op_kinds import UnaryOp
from raydist.pipelines.engine.producers import BorderIterator, ResumableProducer
from raydist.pipelines.engine.resume import read_items
from raydist.pipelines.ops.padding import Padding

__all__ = ["PaddedBatchOp"]

_MAX_BATCHES = 64  # made at a time


@final
@dataclass(frozen=True, eq=False)
class PaddedBatchOp(UnaryOp):
    """Batches of `batch_size` elements of `input`, each leaf padded to one shape."""

    state_is_recent: ClassVar[bool] = True

    batch_size: int
    padding: Padding
    drop_remainder: bool = False

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise InvalidArgumentError(f"batch_size must be >= 1, got {self.batch_size}.")

    @property
    def name(self) -> str:
        return "padded_batch"

    @property
    def label(self) -> str:
        return f"padded_batch({self.batch_size}{', drop_remainder' if self.drop_remainder else ''})"

    def cardinality(self) -> int:
        count = self.input.cardinality()
        if count < 0:
            return count
        return count // self.batch_size if self.drop_remainder else -(-count // self.batch_size)

    def element_spec(self) -> Any:
        specs, structure = flatten_element(self.input.element_spec())
        size = self.batch_size if self.drop_remainder else None
        return unflatten(structure, [spec.batched(size) for spec in self.padding.specs(structure, specs)])

    def make_iterator(self, ctx: IterContext) -> OpIterator:
        return BorderIterator(_PaddedBatches(self, ctx.build(self.input), ctx.operation_names[id(self)]))


@final
class _PaddedBatches(ClosesInput, ResumableProducer):
    def __init__(self, op: PaddedBatchOp, source: OpIterator, name: str) -> None:
        self._op = op
        self._source = source
        self._name = name

    def make(self, limit: int) -> Sequence[Item]:
        size = self._op.batch_size
        wanted = min(limit, _MAX_BATCHES) * size
        items: Sequence[Item] = read_items(self._source, wanted)
        batches: list[Item] = []
        ended = count_items(items) < wanted
        while count_items(items) >= (size if self._op.drop_remainder else 1):
            batches.append(self._batch(keep_items(items, size)))
            items = drop_items(items, size)
        if ended and not batches:
            raise StopIteration
        return batches

    def _batch(self, items: Sequence[Item]) -> Item:
        """One batch; a bad element spoils it."""
        blocks: list[Block] = []
        for item in items:
            if isinstance(item, ElementError):
                return item
            blocks.append(item)
        try:
            return self._op.padding.batch(concat_blocks(blocks))
        except RaydistError as error:
            annotate(error, f"In {self._name}.")
            return ElementError(error)

    def border(self) -> IteratorState:
        return self._source.state_dict()

    def restore(self, border: IteratorState) -> None:
        self._source.load_state_dict(border)
