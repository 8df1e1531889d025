"""Dataset.interleave and Dataset.flat_map: the elements of datasets that a function makes from elements.

Slots are visited in a cycle. At each visit a slot hands out up to `block_length` elements. A slot whose dataset ends
becomes empty, passes its turn on, and takes the next input at its next visit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, final

from raydist.core.errors import InvalidArgumentError
from raydist.core.values import AUTOTUNE, UNKNOWN_CARDINALITY
from raydist.pipelines.elements.functions import function_label
from raydist.pipelines.engine.op import DatasetOp, IterContext
from raydist.pipelines.engine.op_iterator import OpIterator
from raydist.pipelines.engine.op_kinds import UnaryOp
from raydist.pipelines.engine.producers import BorderIterator
from raydist.pipelines.ops.cycle import WHOLE, Cycle, CycleTurns, SlotAhead
from raydist.pipelines.ops.map import parse_parallelism
from raydist.pipelines.ops.nested import DatasetOpener, probe_nested
from raydist.pipelines.ops.prefetch import prefetcher
from raydist.pipelines.stored.fingerprint import NOT_IN_FINGERPRINT

_CYCLE_LENGTH = 4  # the default: one number for every machine, because the order of elements depends on it


@final
@dataclass(frozen=True, eq=False)
class InterleaveOp(UnaryOp):
    """The elements of the datasets `fn(element)`, `cycle_length` of them open at a time.

    `num_threads` slots are prefetched by a thread each; none by default. If `tuned`, the autotuner decides for all.
    """

    state_is_recent: ClassVar[bool] = True
    takes_row_ids: ClassVar[bool] = True

    fn: Callable[..., Any]
    cycle_length: int
    block_length: int
    num_threads: int = 0
    made_by: str = "interleave"
    deterministic: bool | None = None
    tuned: bool = field(default=False, metadata=NOT_IN_FINGERPRINT)

    def __post_init__(self) -> None:
        if not callable(self.fn):
            raise InvalidArgumentError(f"{self.made_by} needs a function, got {self.fn!r}.")
        for name in ("cycle_length", "block_length"):
            if getattr(self, name) < 1:
                raise InvalidArgumentError(f"{name} must be >= 1, got {getattr(self, name)}.")
        if self.num_threads > self.cycle_length:
            raise InvalidArgumentError(
                f"num_parallel_calls must be at most cycle_length ({self.cycle_length}), got {self.num_threads}."
            )

    @classmethod
    def of(
        cls,
        source: DatasetOp,
        fn: Callable[..., Any],
        cycle_length: int | None,
        block_length: int | None,
        num_parallel_calls: int | None,
        deterministic: bool | None = None,
    ) -> InterleaveOp:
        """Return the operation for the arguments of `interleave`."""
        calls = parse_parallelism(num_parallel_calls)
        if cycle_length is None or cycle_length == AUTOTUNE:
            cycle_length = max(_CYCLE_LENGTH, calls or 0)
        tuned = num_parallel_calls == AUTOTUNE
        threads = cycle_length if tuned else calls or 0
        length = 1 if block_length is None else block_length
        return cls(source, fn, cycle_length, length, threads, deterministic=deterministic, tuned=tuned)

    @classmethod
    def flat_map(cls, source: DatasetOp, fn: Callable[..., Any]) -> InterleaveOp:
        """Return the operation that reads one dataset after the other."""
        return cls(source, fn, 1, WHOLE, made_by="flat_map")

    @property
    def name(self) -> str:
        return self.made_by

    @property
    def label(self) -> str:
        turns = "" if self.cycle_length == 1 else f", cycle_length={self.cycle_length}"
        return f"{self.made_by}({function_label(self.fn)}{turns})"

    @property
    def order_settings(self) -> str:
        return f"cycle_length={self.cycle_length}, block_length={self.block_length}"

    @property
    def has_declared_shapes(self) -> bool:
        return False

    def cardinality(self) -> int:
        return UNKNOWN_CARDINALITY

    def element_spec(self) -> Any:
        return probe_nested(self.input, self.fn, self.label)

    def make_iterator(self, ctx: IterContext) -> OpIterator:
        # The number of an input identifies its dataset, so inputs must come in order.
        source = replace(ctx, any_order=False, row_ids=False).build(self.input)
        opener = DatasetOpener(source, self.fn, ctx, ctx.operation_names[id(self)])
        turns = self._turns(ctx) if ctx.any_order and self.num_threads else None
        ahead = self._ahead(ctx) if self.num_threads else None
        return BorderIterator(Cycle(opener, self.cycle_length, self.block_length, ahead, turns))

    def _ahead(self, ctx: IterContext) -> SlotAhead:
        """Return the function that prefetches the slots at the first places. Its work counts as this operation's."""
        name, threads = ctx.operation_names[id(self)], self.num_threads
        meter = ctx.meter(self)
        inside = ctx.meters.inside(name).shared
        ahead = prefetcher(ctx, meter, name, tuned=self.tuned, threads=threads, inside=inside)
        return lambda place, source: ahead(source) if place < threads else source

    def _turns(self, ctx: IterContext) -> CycleTurns | None:
        if ctx.options.deterministic if self.deterministic is None else self.deterministic:
            return None
        name = f"{ctx.operation_names[id(self)]}@{'.'.join(map(str, ctx.epoch))}"
        return CycleTurns(ctx.orders.of(name), name)
