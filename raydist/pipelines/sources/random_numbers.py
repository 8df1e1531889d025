"""Dataset.random: random whole numbers without an end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, final

import numpy as np

from raydist.nest import LEAF
from raydist.pipelines.elements.blocks import Block
from raydist.pipelines.elements.items import IteratorState
from raydist.pipelines.elements.seeds import RandomKey
from raydist.pipelines.elements.spec import TensorSpec
from raydist.pipelines.engine.op import IterContext
from raydist.pipelines.engine.op_iterator import OpIterator
from raydist.pipelines.engine.op_kinds import SourceOp
from raydist.values import INFINITE_CARDINALITY

__all__ = ["RandomOp"]

_MAX_ROWS = 4096
_BOUND = 1 << 32  # the numbers of tf.data's random: 32 bits in an int64


@final
@dataclass(frozen=True, eq=False)
class RandomOp(SourceOp):
    """int64 numbers below 2^32; the same ones in every epoch unless `rerandomize_each_iteration`."""

    seed: int | None
    rerandomize_each_iteration: bool

    @property
    def label(self) -> str:
        return f"random({'' if self.seed is None else f'seed={self.seed}'})"

    @property
    def gives_rows(self) -> bool:
        return True

    def cardinality(self) -> int:
        return INFINITE_CARDINALITY

    def element_spec(self) -> Any:
        return TensorSpec((), np.int64)

    def make_iterator(self, ctx: IterContext) -> OpIterator:
        return _Random(ctx.key(self, self.seed, every_epoch=self.rerandomize_each_iteration))


@final
class _Random(OpIterator):
    def __init__(self, key: RandomKey) -> None:
        self._key = key
        self._next = 0

    def next_block(self, limit: int) -> Block:
        rows = min(limit, _MAX_ROWS)
        numbers = self._key.integers(self._next, rows, _BOUND)
        self._next += rows
        return Block(LEAF, (TensorSpec((), np.int64),), (numbers,), rows)

    def state_dict(self) -> IteratorState:
        return {"next": self._next}

    def load_state_dict(self, state: IteratorState) -> None:
        self._next = int(state["next"])
