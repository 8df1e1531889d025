"""Dataset.prefetch: a background thread makes elements before the consumer asks for them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

from raydist.errors import InvalidArgumentError
from raydist.pipelines.engine.op import IterContext
from raydist.pipelines.engine.op_iterator import OpIterator
from raydist.pipelines.engine.op_kinds import UnaryOp
from raydist.pipelines.engine.read_ahead import OptionalReadAhead
from raydist.pipelines.ops.reading_ahead import ahead_in_a_thread, ahead_where_it_pays
from raydist.values import AUTOTUNE

__all__ = ["PrefetchOp", "PrefetchWhereItPaysOp"]


@final
@dataclass(frozen=True, eq=False)
class PrefetchWhereItPaysOp(UnaryOp):
    """`input`, prefetched by a thread or not, as the autotuner decides."""

    passes_elements: ClassVar[bool] = True
    takes_row_ids: ClassVar[bool] = True

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


@final
@dataclass(frozen=True, eq=False)
class PrefetchOp(UnaryOp):
    """`input`, prefetched up to `buffer_size` elements; for None and AUTOTUNE, raydist chooses the number."""

    passes_elements: ClassVar[bool] = True
    takes_row_ids: ClassVar[bool] = True

    state_is_recent: ClassVar[bool] = True

    buffer_size: int | None = None

    def __post_init__(self) -> None:
        if self.buffer_size is not None and self.buffer_size < AUTOTUNE:
            raise InvalidArgumentError(f"buffer_size must be >= 0, AUTOTUNE or None, got {self.buffer_size}.")

    @property
    def label(self) -> str:
        return f"prefetch({'AUTOTUNE' if self.is_tuned else self.buffer_size})"

    @property
    def is_noop(self) -> bool:
        return self.buffer_size == 0

    @property
    def is_tuned(self) -> bool:
        return self.buffer_size is None or self.buffer_size == AUTOTUNE

    def make_iterator(self, ctx: IterContext) -> OpIterator:
        source = ctx.build(self.input)
        if self.buffer_size == 0:
            return source
        meter, name = ctx.meter(self), ctx.operation_names[id(self)]

        def show(is_on: bool) -> None:
            meter.kind = "prefetch" if is_on else "stage"

        if self.is_tuned:
            return ahead_where_it_pays(ctx, meter, name, show=show)(source)
        show(True)
        return ahead_in_a_thread(ctx, meter, name, self.buffer_size or 0)(source)
