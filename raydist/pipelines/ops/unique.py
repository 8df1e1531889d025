"""Dataset.unique: every value once, at its first occurrence."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, final

import numpy as np

from raydist.errors import SpecError
from raydist.pipelines.elements.blocks import Block
from raydist.pipelines.elements.items import ElementError, Item
from raydist.pipelines.elements.spec import TensorSpec
from raydist.pipelines.engine.op import IterContext
from raydist.pipelines.engine.op_iterator import OpIterator
from raydist.pipelines.engine.op_kinds import UnaryOp
from raydist.pipelines.engine.producers import Producer, ReplayIterator, read_item
from raydist.values import UNKNOWN_CARDINALITY

__all__ = ["UniqueOp"]


@final
@dataclass(frozen=True, eq=False)
class UniqueOp(UnaryOp):
    """The elements of `input` without repetitions; scalars of integers, bools, bytes or str."""

    passes_elements: ClassVar[bool] = True

    def cardinality(self) -> int:
        return 0 if self.input.cardinality() == 0 else UNKNOWN_CARDINALITY

    def element_spec(self) -> Any:
        spec = self.input.element_spec()
        if not isinstance(spec, TensorSpec) or not _can_be_told_apart(spec):
            raise _refusal(spec)
        return spec

    def make_iterator(self, ctx: IterContext) -> OpIterator:
        return ReplayIterator(_Unique(ctx.build(self.input)))


def _can_be_told_apart(spec: TensorSpec) -> bool:
    return spec.shape == () and spec.dtype.kind in "iubSU"


def _refusal(got: Any) -> SpecError:
    return SpecError(f"unique needs elements that are single integers, bools, bytes or str, got {got}.")


@final
class _Unique(Producer):
    """A producer that remembers every value."""

    def __init__(self, source: OpIterator) -> None:
        self._source = source
        self._seen: set[Hashable] = set()

    def make(self, limit: int) -> Sequence[Item]:
        item = read_item(self._source, limit)
        if isinstance(item, ElementError):
            return [item]
        if len(item.specs) != 1 or item.structure.kind is not None or not _can_be_told_apart(item.specs[0]):
            return [ElementError(_refusal(item.signature)) for _ in range(item.num_rows)]
        return self._fresh(item)

    def _fresh(self, block: Block) -> list[Item]:
        kept: list[int] = []
        for row, value in enumerate(block.columns[0].tolist()):
            if value not in self._seen:
                self._seen.add(value)
                kept.append(row)
        return [block.take(np.array(kept, np.int64))] if kept else []

    def close(self) -> None:
        self._seen.clear()
        self._source.close()
