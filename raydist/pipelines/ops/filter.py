"""Dataset.filter, unique and ignore_errors: elements left out."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, final

import numpy as np

from raydist.core.errors import InvalidArgumentError, SpecError
from raydist.core.exception_utils import message_of, what_was_raised
from raydist.pipelines.elements.blocks import Block
from raydist.pipelines.elements.functions import call_rows, function_label
from raydist.pipelines.elements.items import ElementError, Item, IteratorState
from raydist.pipelines.elements.leaf_values import as_leaf
from raydist.pipelines.elements.spec import TensorSpec
from raydist.pipelines.engine.kernel import Kernel
from raydist.pipelines.engine.op import IterContext
from raydist.pipelines.engine.op_iterator import ClosesInput, OpIterator
from raydist.pipelines.engine.op_kinds import ElementwiseOp, UncountedOp
from raydist.pipelines.engine.producers import BorderIterator, Producer, ReplayIterator, ResumableProducer, read_item

_LOG = logging.getLogger(__name__)


@final
@dataclass(frozen=True, eq=False)
class FilterOp(UncountedOp, ElementwiseOp):
    """The elements of `input` for which `predicate` returns True."""

    passes_elements: ClassVar[bool] = True
    pure: ClassVar[bool] = True

    predicate: Callable[..., Any]

    def __post_init__(self) -> None:
        if not callable(self.predicate):
            raise InvalidArgumentError(f"filter needs a function, got {self.predicate!r}.")

    @property
    def label(self) -> str:
        return f"filter({function_label(self.predicate)})"

    def kernel(self, ctx: IterContext) -> Kernel:
        return _FilterKernel(self.predicate, f"{ctx.operation_names[id(self)]} ({function_label(self.predicate)})")


@final
@dataclass(frozen=True, eq=False)
class _FilterKernel(Kernel):
    preserves_count: ClassVar[bool] = False
    predicate: Callable[..., Any]
    label: str

    def run(self, block: Block, start: int) -> Sequence[Item]:
        answers, failed = ask_rows(self.predicate, block, start)
        items: list[Item] = []
        first = 0
        for row in failed:
            items += [*_kept(block.slice(first, row), answers[first:row]), answers[row]]
            first = row + 1
        return items + _kept(block.slice(first, block.num_rows), answers[first:])


def ask_rows(predicate: Callable[..., Any], block: Block, start: int) -> tuple[list[Any], list[int]]:
    """Return `predicate` of every element, with an ElementError where it fails, and the rows of these errors.

    The predicate receives copies, so it cannot change the elements.
    """
    answers, failed = call_rows(predicate, block.shared(), start)
    if not set(map(type, answers)) <= {bool, np.bool_}:
        answers = [_truth(answer, start + row) for row, answer in enumerate(answers)]
        failed = [row for row, answer in enumerate(answers) if isinstance(answer, ElementError)]
    return answers, failed


def _kept(block: Block, answers: list[Any]) -> list[Item]:
    mask = np.array(answers, dtype=bool)
    if mask.all():
        return [block] if block.num_rows else []
    kept = np.flatnonzero(mask)
    return [block.take(kept)] if len(kept) else []


def _truth(answer: Any, index: int) -> bool | np.bool_ | ElementError:
    if isinstance(answer, ElementError):
        return answer
    try:
        leaf = as_leaf(answer)
    except SpecError:
        leaf = None
    if getattr(leaf, "dtype", None) == np.bool_ and np.ndim(leaf) == 0:
        return bool(leaf)
    return ElementError(SpecError(f"A predicate must return one bool, got {answer!r:.100}."), index)


@final
@dataclass(frozen=True, eq=False)
class UniqueOp(UncountedOp):
    """The elements of `input` without repetitions; scalars of integers, bools, bytes or str."""

    passes_elements: ClassVar[bool] = True

    def element_spec(self) -> Any:
        spec = self.input.element_spec()
        if not isinstance(spec, TensorSpec) or not _can_be_told_apart(spec):
            raise _refusal(spec)
        return spec

    def make_iterator(self, ctx: IterContext) -> OpIterator:
        return ReplayIterator(_Unique(ctx.build(self.input)))


def _can_be_told_apart(spec: TensorSpec) -> bool:
    return spec.shape == () and spec.dtype.kind in "iubSU"


def _refusal(got: Any) -> SpecError:
    return SpecError(f"unique needs elements that are single integers, bools, bytes or str, got {got}.")


@final
class _Unique(Producer):
    """A producer that remembers every value."""

    def __init__(self, source: OpIterator) -> None:
        self._source = source
        self._seen: set[Hashable] = set()

    def make(self, limit: int) -> Sequence[Item]:
        item = read_item(self._source, limit)
        if isinstance(item, ElementError):
            return [item]
        if len(item.specs) != 1 or item.structure.kind is not None or not _can_be_told_apart(item.specs[0]):
            return [ElementError(_refusal(item.signature)) for _ in range(item.num_rows)]
        return self._fresh(item)

    def _fresh(self, block: Block) -> list[Item]:
        kept: list[int] = []
        for row, value in enumerate(block.columns[0].tolist()):
            if value not in self._seen:
                self._seen.add(value)
                kept.append(row)
        return [block.take(np.array(kept, np.int64))] if kept else []

    def close(self) -> None:
        self._seen.clear()
        self._source.close()


@final
@dataclass(frozen=True, eq=False)
class IgnoreErrorsOp(UncountedOp):
    """The elements of `input` without errors, which are logged as warnings if `log_warning`."""

    passes_elements: ClassVar[bool] = True
    state_is_recent: ClassVar[bool] = True

    log_warning: bool = False

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
