"""Dataset.repeat: repeat a dataset; each pass is a new epoch of the operations inside."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, final

from raydist.core.values import INFINITE_CARDINALITY
from raydist.pipelines.elements.blocks import Block
from raydist.pipelines.elements.items import IteratorState
from raydist.pipelines.engine.op import IterContext
from raydist.pipelines.engine.op_iterator import OpIterator
from raydist.pipelines.engine.op_kinds import UnaryOp


@final
@dataclass(frozen=True, eq=False)
class RepeatOp(UnaryOp):
    """`count` passes over `input`; None or a negative count repeats without end."""

    content_blind: ClassVar[bool] = True
    takes_row_ids: ClassVar[bool] = True
    state_is_recent: ClassVar[bool] = True
    count: int | None = None

    @property
    def label(self) -> str:
        return f"repeat({'' if self.count is None else self.count})"

    @property
    def is_noop(self) -> bool:
        return self.count == 1

    @property
    def passes(self) -> float:
        """Number of passes; infinity without a limit."""
        return math.inf if self.count is None or self.count < 0 else self.count

    def cardinality(self) -> int:
        count = self.input.cardinality()
        if count == 0 or self.count == 0:
            return 0
        if self.count is None or self.count < 0:
            return INFINITE_CARDINALITY
        return count if count < 0 else count * self.count

    def make_iterator(self, ctx: IterContext) -> OpIterator:
        return _RepeatIterator(self, ctx)


@final
class _RepeatIterator(OpIterator):
    """An iterator that ends endless repetition after an empty pass, which would hang; counted passes may be empty."""

    def __init__(self, op: RepeatOp, ctx: IterContext) -> None:
        self._op = op
        self._ctx = ctx
        self._pass = 0
        self._gave = False  # True if this pass handed out anything
        self._ended = op.count == 0
        self._source: OpIterator | None = None

    def next_block(self, limit: int) -> Block:
        while not self._ended:
            try:
                block = self._open().next_block(limit)
            except StopIteration:
                self._next_pass()
            except Exception:
                self._gave = True
                raise
            else:
                self._gave = True
                return block
        raise StopIteration

    def _open(self) -> OpIterator:
        if self._source is None:
            self._source = self._ctx.inner_epoch(self._pass).build(self._op.input)
        return self._source

    def _next_pass(self) -> None:
        last = self._pass + 1 >= self._op.passes
        if last or (not self._gave and self._would_hang()):
            self._ended = True
            return
        self.close()
        self._pass += 1
        self._gave = False

    def _would_hang(self) -> bool:
        return self._op.passes == math.inf or self._op.input.cardinality() == 0

    def state_dict(self) -> IteratorState:
        return {"pass": self._pass, "gave": self._gave, "ended": self._ended, "input": self._open().state_dict()}

    def load_state_dict(self, state: IteratorState) -> None:
        self.close()
        self._pass, self._gave, self._ended = int(state["pass"]), bool(state["gave"]), bool(state["ended"])
        self._open().load_state_dict(state["input"])

    def close(self) -> None:
        if self._source is not None:
            self._source.close()
            self._source = None
