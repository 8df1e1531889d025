"""The prefetch that raydist puts at the end of a pipeline: a thread only while it makes the whole faster."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

from raydist.pipelines.engine.op import IterContext
from raydist.pipelines.engine.op_iterator import OpIterator
from raydist.pipelines.engine.op_kinds import UnaryOp
from raydist.pipelines.engine.read_ahead import OptionalReadAhead

__all__ = ["PrefetchWhereItPaysOp"]


@final
@dataclass(frozen=True, eq=False)
class PrefetchWhereItPaysOp(UnaryOp):
    """`input`, made by the consumer's thread or by another one, as the autotuner finds out."""

    passes_elements: ClassVar[bool] = True

    state_is_recent: ClassVar[bool] = True

    @property
    def name(self) -> str:
        return "prefetch"

    @property
    def label(self) -> str:
        return "prefetch(where it pays)"

    def make_iterator(self, ctx: IterContext) -> OpIterator:
        source = ctx.build(self.input)
        part = ctx.executor.for_prefetch(ctx.meter(self), ctx.meters, ctx.budgets)
        return OptionalReadAhead(source, part)
