"""Statements of the user about a dataset, which change no element: options, and the number of elements."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, final

from raydist.core.errors import FailedPreconditionError, InvalidArgumentError
from raydist.core.values import INFINITE_CARDINALITY, UNKNOWN_CARDINALITY
from raydist.options import Options
from raydist.pipelines.elements.items import ElementError, Item, IteratorState, keep_items
from raydist.pipelines.engine.op import IterContext
from raydist.pipelines.engine.op_iterator import ClosesInput, OpIterator
from raydist.pipelines.engine.op_kinds import UnaryOp
from raydist.pipelines.engine.producers import BorderIterator, ResumableProducer, read_item


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
