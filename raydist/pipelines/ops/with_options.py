"""Dataset.with_options: settings of the whole pipeline."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, final

from raydist.options import Options
from raydist.pipelines.engine.op import DatasetOp, IterContext, OpIterator

__all__ = ["WithOptionsOp"]


@final
@dataclass(frozen=True, eq=False)
class WithOptionsOp(DatasetOp):
    """`input`, with options for the pipeline that it is part of."""

    content_blind: ClassVar[bool] = True
    state_is_recent: ClassVar[bool] = True
    input: DatasetOp
    given: Options

    @property
    def inputs(self) -> tuple[DatasetOp, ...]:
        return (self.input,)

    @property
    def options(self) -> Options:
        return self.given

    @property
    def is_noop(self) -> bool:
        return True

    @property
    def label(self) -> str:
        return f"with_options({self.given!r})"

    def cardinality(self) -> int:
        return self.input.cardinality()

    def element_spec(self) -> Any:
        return self.input.element_spec()

    def make_iterator(self, ctx: IterContext) -> OpIterator:
        return ctx.build(self.input)
