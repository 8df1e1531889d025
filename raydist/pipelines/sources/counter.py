"""Dataset.counter: whole numbers without an end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, final

import numpy as np

from raydist.nest import LEAF
from raydist.pipelines.elements.blocks import Block
from raydist.pipelines.elements.items import IteratorState
from raydist.pipelines.elements.spec import TensorSpec
from raydist.pipelines.engine.op import IterContext
from raydist.pipelines.engine.op_iterator import OpIterator
from raydist.pipelines.engine.op_kinds import SourceOp
from raydist.values import INFINITE_CARDINALITY

__all__ = ["CounterOp"]

_MAX_ROWS = 4096


@final
@dataclass(frozen=True, eq=False)
class CounterOp(SourceOp):
    """`start`, `start + step`, ..."""

    start: int
    step: int
    dtype: np.dtype[Any]

    @property
    def label(self) -> str:
        return f"counter({self.start}, {self.step})"

    @property
    def gives_rows(self) -> bool:
        return True

    def cardinality(self) -> int:
        return INFINITE_CARDINALITY

    def element_spec(self) -> Any:
        return TensorSpec((), self.dtype)

    def make_iterator(self, ctx: IterContext) -> OpIterator:
        return _Counter(self)


@final
class _Counter(OpIterator):
    def __init__(self, op: CounterOp) -> None:
        self._op = op
        self._next = 0

    def next_block(self, limit: int) -> Block:
        rows = min(limit, _MAX_ROWS)
        first = self._op.start + self._next * self._op.step
        numbers = first + np.arange(rows, dtype=np.int64) * self._op.step
        self._next += rows
        spec = TensorSpec((), self._op.dtype)
        return Block(LEAF, (spec,), (numbers.astype(self._op.dtype, copy=False),), rows)

    def state_dict(self) -> IteratorState:
        return {"next": self._next}

    def load_state_dict(self, state: IteratorState) -> None:
        self._next = int(state["next"])
