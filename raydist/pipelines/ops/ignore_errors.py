"""Dataset.ignore_errors: drop errors among the elements."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, final

from raydist.foreign_errors import message_of, what_was_raised
from raydist.pipelines.elements.items import ElementError, Item, IteratorState
from raydist.pipelines.engine.op import IterContext
from raydist.pipelines.engine.op_iterator import ClosesInput, OpIterator
from raydist.pipelines.engine.op_kinds import UnaryOp
from raydist.pipelines.engine.producers import BorderIterator, ResumableProducer, read_item
from raydist.values import UNKNOWN_CARDINALITY

__all__ = ["IgnoreErrorsOp"]

_LOG = logging.getLogger(__name__)


@final
@dataclass(frozen=True, eq=False)
class IgnoreErrorsOp(UnaryOp):
    """The elements of `input` without errors, which are logged as warnings if `log_warning`."""

    passes_elements: ClassVar[bool] = True

    state_is_recent: ClassVar[bool] = True

    log_warning: bool = False

    @property
    def name(self) -> str:
        return "ignore_errors"

    def cardinality(self) -> int:
        return 0 if self.input.cardinality() == 0 else UNKNOWN_CARDINALITY

    def make_iterator(self, ctx: IterContext) -> OpIterator:
        name = ctx.operation_names[id(self)]
        return BorderIterator(_WithoutErrors(ctx.build(self.input), name if self.log_warning else None))


@final
class _WithoutErrors(ClosesInput, ResumableProducer):
    def __init__(self, source: OpIterator, log_as: str | None) -> None:
        self._source = source
        self._log_as = log_as

    def make(self, limit: int) -> Sequence[Item]:
        item = read_item(self._source, limit)
        if not isinstance(item, ElementError):
            return [item]
        if self._log_as is not None:
            error = what_was_raised(item.error)
            notes = " ".join(map(str, getattr(error, "__notes__", ())))
            what = f"{type(error).__name__}: {message_of(error)}"
            _LOG.warning("%s left out an element: %s %s", self._log_as, what, notes)
        return []

    def border(self) -> IteratorState:
        return self._source.state_dict()

    def restore(self, border: IteratorState) -> None:
        self._source.load_state_dict(border)
