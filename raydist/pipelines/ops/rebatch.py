"""Dataset.rebatch: the rows of batches in batches of other sizes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, final

import numpy as np

from raydist.errors import FailedPreconditionError, InvalidArgumentError
from raydist.nest import Structure
from raydist.pipelines.elements.blocks import Block
from raydist.pipelines.elements.element_nests import flatten_element, map_element
from raydist.pipelines.elements.items import Item, IteratorState, count_items, drop_items, keep_items
from raydist.pipelines.elements.spec import TensorSpec
from raydist.pipelines.engine.op import IterContext
from raydist.pipelines.engine.op_iterator import ClosesInput, OpIterator
from raydist.pipelines.engine.op_kinds import UnaryOp
from raydist.pipelines.engine.producers import BorderIterator, ResumableProducer
from raydist.pipelines.engine.resume import read_items
from raydist.pipelines.ops.batch import cut_into_batches
from raydist.values import UNKNOWN_CARDINALITY

__all__ = ["RebatchOp"]

_MAX_BATCHES = 64  # made at a time


@final
@dataclass(frozen=True, eq=False)
class RebatchOp(UnaryOp):
    """The rows in `input` as batches with the sizes `sizes`, repeatedly; 0 gives an empty batch."""

    state_is_recent: ClassVar[bool] = True
    takes_row_ids: ClassVar[bool] = True

    sizes: tuple[int, ...]
    drop_remainder: bool = False

    def __post_init__(self) -> None:
        if not self.sizes or min(self.sizes) < 0 or max(self.sizes) == 0:
            raise InvalidArgumentError(
                f"The sizes of a rebatch must be >= 0, and one of them > 0, got {list(self.sizes)}."
            )

    @property
    def label(self) -> str:
        return f"rebatch({list(self.sizes)}{', drop_remainder' if self.drop_remainder else ''})"

    def cardinality(self) -> int:
        return UNKNOWN_CARDINALITY

    def element_spec(self) -> Any:
        size = self.sizes[0] if self.drop_remainder and len(set(self.sizes)) == 1 else None
        return map_element(lambda spec: spec.batched(size), self.input.element_spec())

    def make_iterator(self, ctx: IterContext) -> OpIterator:
        return BorderIterator(_Batches(self, ctx.build(self.input)))


@final
class _Batches(ClosesInput, ResumableProducer):
    def __init__(self, op: RebatchOp, source: OpIterator) -> None:
        self._op = op
        self._source = source
        self._at = 0  # index of the next size
        self._ended = False
        self._seen: Block | None = None  # any block of rows

    def make(self, limit: int) -> Sequence[Item]:
        if self._ended:
            raise StopIteration
        count = min(limit, _MAX_BATCHES)
        sizes = [self._op.sizes[(self._at + k) % len(self._op.sizes)] for k in range(count)]
        rows: Sequence[Item] = read_items(self._source, sum(sizes))
        batches: list[Item] = []
        for size in sizes:
            count = count_items(rows)
            if count:
                self._seen = next((item for item in rows if isinstance(item, Block)), self._seen)
            if size and not count:
                self._ended = True
                break
            batches += (
                cut_into_batches(keep_items(rows, size), size, self._op.drop_remainder) if size else [self._empty()]
            )
            rows = drop_items(rows, size)
            self._at = (self._at + 1) % len(self._op.sizes)
            if count < size:  # the input ended within this batch, so no empty batch follows
                self._ended = True
                break
        return batches

    def _empty(self) -> Block:
        specs, structure = self._row_specs
        shapes = [(0, *(dim or 0 for dim in spec.shape or ())) for spec in specs]
        columns = tuple(
            np.empty((1, *shape), object if spec.dtype.kind in "SU" else spec.dtype)
            for spec, shape in zip(specs, shapes, strict=True)
        )
        found = tuple(TensorSpec(shape, spec.dtype) for spec, shape in zip(specs, shapes, strict=True))
        return Block(structure, found, columns, 1)

    @cached_property
    def _row_specs(self) -> tuple[Sequence[TensorSpec], Structure]:
        try:
            return flatten_element(self._op.input.element_spec())
        except FailedPreconditionError:  # no spec: use the specs of the rows, if there are any
            if self._seen is None:
                raise
            return self._seen.specs, self._seen.structure

    def border(self) -> IteratorState:
        return {"at": self._at, "ended": self._ended, "input": self._source.state_dict()}

    def restore(self, border: IteratorState) -> None:
        self._at, self._ended = int(border["at"]), bool(border["ended"])
        self._source.load_state_dict(border["input"])
