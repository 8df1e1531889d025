"""Passes over a source, each in the order of one permutation: what a repeated shuffle of all of it is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, final

import numpy as np

from raydist.errors import FailedPreconditionError
from raydist.pipelines.elements.blocks import Block
from raydist.pipelines.elements.items import IteratorState
from raydist.pipelines.engine.op import IterContext
from raydist.pipelines.engine.op_iterator import OpIterator
from raydist.pipelines.engine.op_kinds import UnaryOp
from raydist.pipelines.engine.random_access import RandomAccess
from raydist.pipelines.ops.repeat import RepeatOp
from raydist.pipelines.ops.shuffle import ShuffleOp

__all__ = ["ShuffledPassesOp"]


@final
@dataclass(frozen=True, eq=False)
class ShuffledPassesOp(UnaryOp):
    """`input`, which can be read by index, as `shuffle` and `repeat` one after the other would give it."""

    passes_elements: ClassVar[bool] = True

    shuffle: ShuffleOp
    repeat: RepeatOp

    @property
    def name(self) -> str:
        return "shuffle_and_repeat"

    @property
    def label(self) -> str:
        return f"{self.shuffle.label} and {self.repeat.label}"

    def cardinality(self) -> int:
        return self.repeat.cardinality()

    def make_iterator(self, ctx: IterContext) -> OpIterator:
        access = self.input.random_access()
        if access is None:
            raise FailedPreconditionError(f"raydist bug: {self.input.label} has no random access.")
        return _Passes(self, access, ctx)


@final
class _Passes(OpIterator):
    """Its state is a pass and a position."""

    def __init__(self, op: ShuffledPassesOp, access: RandomAccess, ctx: IterContext) -> None:
        self._op = op
        self._access = access
        self._ctx = ctx
        self._pass = 0
        self._next = 0
        self._order: np.ndarray[Any, Any] | None = None  # of this pass

    def next_block(self, limit: int) -> Block:
        if self._next >= len(self._access):
            self._pass, self._next, self._order = self._pass + 1, 0, None
        if len(self._access) == 0 or self._pass >= self._op.repeat.passes:
            raise StopIteration
        if self._order is None:
            self._order = self._op.shuffle.key(self._ctx.inner_epoch(self._pass)).permutation(len(self._access))
        indices = self._order[self._next : self._next + limit]
        self._next += len(indices)
        return self._access.gather(indices)

    def state_dict(self) -> IteratorState:
        return {"pass": self._pass, "next": self._next}

    def load_state_dict(self, state: IteratorState) -> None:
        self._pass, self._next = int(state["pass"]), int(state["next"])
        self._order = None
