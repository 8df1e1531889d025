"""Dataset.repeat, and statements of the user that change no element: options, and the number of elements."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, final

from raydist.core.errors import FailedPreconditionError, InvalidArgumentError
from raydist.core.values import INFINITE_CARDINALITY, UNKNOWN_CARDINALITY
from raydist.pipelines.elements.items import ElementError, Item, IteratorState, keep_items
from raydist.pipelines.engine.op_iterator import ClosesInput, OpIterator
from raydist.pipelines.engine.op_kinds import UnaryOp
from raydist.pipelines.engine.producers import BorderIterator, ResumableProducer, read_item

if TYPE_CHECKING:
    from collections.abc import Sequence

    from raydist.options import Options
    from raydist.pipelines.elements.blocks import Block
    from raydist.pipelines.engine.op import IterContext


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


@final
@dataclass(frozen=True, eq=False)
class WithOptionsOp(UnaryOp):
    """`input`, with options for the whole pipeline."""

    content_blind: ClassVar[bool] = True
    takes_row_ids: ClassVar[bool] = True
    state_is_recent: ClassVar[bool] = True
    given: Options

    @property
    def options(self) -> Options:
        return self.given

    @property
    def is_noop(self) -> bool:
        return True

    @property
    def label(self) -> str:
        return f"with_options({self.given!r})"

    def make_iterator(self, ctx: IterContext) -> OpIterator:
        return ctx.build(self.input)


@final
@dataclass(frozen=True, eq=False)
class AssertCardinalityOp(UnaryOp):
    """`input`, declared to have `count` elements (or INFINITE_CARDINALITY)."""

    passes_elements: ClassVar[bool] = True
    takes_row_ids: ClassVar[bool] = True

    count: int

    def __post_init__(self) -> None:
        if self.count < UNKNOWN_CARDINALITY:
            raise InvalidArgumentError(
                f"expected_cardinality must be >= 0, INFINITE_CARDINALITY or UNKNOWN_CARDINALITY, got {self.count}."
            )

    @property
    def label(self) -> str:
        return f"assert_cardinality({self.count})"

    def cardinality(self) -> int:
        return self.count

    def make_iterator(self, ctx: IterContext) -> OpIterator:
        source = ctx.build(self.input)
        return source if self.count == UNKNOWN_CARDINALITY else BorderIterator(_Counting(self.count, source))


@final
class _Counting(ClosesInput, ResumableProducer):
    """A producer that counts elements and errors. A wrong number is one error, and then the end."""

    def __init__(self, count: int, source: OpIterator) -> None:
        self._expected = count
        self._source = source
        self._count = 0
        self._over = False

    def make(self, limit: int) -> Sequence[Item]:
        if self._over:
            raise StopIteration
        try:
            item = read_item(self._source, limit)
        except StopIteration:
            self._over = True
            if self._count == self._expected:
                raise
            return [self._complaint(f"contained only {self._count}")]
        rows = 1 if isinstance(item, ElementError) else item.num_rows
        self._count += rows
        if self._expected == INFINITE_CARDINALITY or self._count <= self._expected:
            return [item]
        self._over = True
        left = self._expected - (self._count - rows)
        return [*keep_items([item], left), self._complaint(f"contained at least {self._expected + 1}")]

    def _complaint(self, got: str) -> ElementError:
        expected = "infinitely many" if self._expected == INFINITE_CARDINALITY else self._expected
        return ElementError(
            FailedPreconditionError(
                f"The dataset must have {expected} elements, as assert_cardinality says, but it {got}. "
                "Correct the number, or the data."
            )
        )

    def border(self) -> IteratorState:
        return {"count": self._count, "over": self._over, "input": self._source.state_dict()}

    def restore(self, border: IteratorState) -> None:
        self._count, self._over = int(border["count"]), bool(border["over"])
        self._source.load_state_dict(border["input"])
