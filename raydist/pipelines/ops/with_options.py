"""Dataset.with_options: options of the whole pipeline."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

from raydist.options import Options
from raydist.pipelines.engine.op import IterContext
from raydist.pipelines.engine.op_iterator import OpIterator
from raydist.pipelines.engine.op_kinds import UnaryOp

__all__ = ["WithOptionsOp"]


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
