"""Dataset.filter, take, skip, take_while, shard, unique and ignore_errors: some of the elements, unchanged."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, final

import numpy as np

from raydist.core.errors import InvalidArgumentError, SpecError
from raydist.core.exception_utils import annotate, message_of, what_was_raised
from raydist.core.values import INFINITE_CARDINALITY, UNKNOWN_CARDINALITY
from raydist.pipelines.elements.functions import call_rows, function_label
from raydist.pipelines.elements.items import ElementError, Item, IteratorState
from raydist.pipelines.elements.leaf_values import as_leaf
from raydist.pipelines.elements.spec import TensorSpec
from raydist.pipelines.engine.kernel import Kernel
from raydist.pipelines.engine.op_iterator import ClosesInput, OpIterator
from raydist.pipelines.engine.op_kinds import ElementwiseOp, UnaryOp, UncountedOp
from raydist.pipelines.engine.producers import BorderIterator, Producer, ReplayIterator, ResumableProducer, read_item
from raydist.pipelines.stored.fingerprint import NOT_IN_FINGERPRINT

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

    from raydist.pipelines.elements.blocks import Block
    from raydist.pipelines.engine.op import IterContext

_ASKED_ROWS = 256  # elements per call of the predicate: some after the end may be read for nothing
_ROWS = 1024  # elements read at a time while skipping
_SHARD_ROWS = 8192  # elements read at a time, at most
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


class _CountedIterator(ClosesInput, OpIterator):
    """An iterator that counts elements of its input; errors pass and are not counted."""

    def __init__(self, source: OpIterator, count: int) -> None:
        self._source = source
        self._left = count

    def state_dict(self) -> IteratorState:
        return {"left": self._left, "input": self._source.state_dict()}

    def load_state_dict(self, state: IteratorState) -> None:
        self._left = int(state["left"])
        self._source.load_state_dict(state["input"])


@dataclass(frozen=True, eq=False)
class _CountOp(UnaryOp):
    """An operation with a number of elements of its input."""

    pure: ClassVar[bool] = True
    content_blind: ClassVar[bool] = True
    takes_row_ids: ClassVar[bool] = True
    state_is_recent: ClassVar[bool] = True
    count: int


@final
@dataclass(frozen=True, eq=False)
class TakeOp(_CountOp):
    """The first `count` elements of `input`; a negative count takes all."""

    @property
    def label(self) -> str:
        return f"take({self.count})"

    @property
    def is_noop(self) -> bool:
        return self.count < 0

    def cardinality(self) -> int:
        count = self.input.cardinality()
        if self.count < 0 or (count == UNKNOWN_CARDINALITY and self.count > 0):
            return count
        return self.count if count == INFINITE_CARDINALITY else min(self.count, max(0, count))

    def make_iterator(self, ctx: IterContext) -> OpIterator:
        source = ctx.build(self.input)
        return source if self.count < 0 else _TakeIterator(source, self.count)


@final
class _TakeIterator(_CountedIterator):
    def next_block(self, limit: int) -> Block:
        if self._left <= 0:
            raise StopIteration
        block = self._source.next_block(min(limit, self._left))
        self._left -= block.num_rows
        return block


@final
@dataclass(frozen=True, eq=False)
class SkipOp(_CountOp):
    """`input` without its first `count` elements; a negative count skips all."""

    @property
    def label(self) -> str:
        return f"skip({self.count})"

    @property
    def is_noop(self) -> bool:
        return self.count == 0

    def cardinality(self) -> int:
        count = self.input.cardinality()
        if self.count < 0:
            return 0
        return count if count < 0 else max(0, count - self.count)

    def make_iterator(self, ctx: IterContext) -> OpIterator:
        return _SkipIterator(ctx.build(self.input), self.count)


@final
class _SkipIterator(_CountedIterator):
    def next_block(self, limit: int) -> Block:
        if self._left < 0:
            raise StopIteration
        while self._left:
            self._left -= self._source.next_block(min(_ROWS, self._left)).num_rows
        return self._source.next_block(limit)


@final
@dataclass(frozen=True, eq=False)
class TakeWhileOp(UncountedOp):
    """The elements of `input` before the first for which `predicate` returns False."""

    passes_elements: ClassVar[bool] = True

    predicate: Callable[..., Any]

    def __post_init__(self) -> None:
        if not callable(self.predicate):
            raise InvalidArgumentError(f"take_while needs a function, got {self.predicate!r}.")

    @property
    def label(self) -> str:
        return f"take_while({function_label(self.predicate)})"

    def make_iterator(self, ctx: IterContext) -> OpIterator:
        label = f"{ctx.operation_names[id(self)]} ({function_label(self.predicate)})"
        return BorderIterator(_Taking(self.predicate, ctx.build(self.input), label))


@final
class _Taking(ClosesInput, ResumableProducer):
    """A producer in which an error, of the input or of the predicate, keeps its place and ends nothing."""

    def __init__(self, predicate: Callable[..., Any], source: OpIterator, label: str) -> None:
        self._predicate = predicate
        self._source = source
        self._label = label
        self._index = 0
        self._ended = False

    def make(self, limit: int) -> Sequence[Item]:
        if self._ended:
            raise StopIteration
        item = read_item(self._source, min(limit, _ASKED_ROWS))
        if isinstance(item, ElementError):
            self._index += 1
            return [item]
        return self._before_refusal(item)

    def _before_refusal(self, block: Block) -> list[Item]:
        answers, failed = ask_rows(self._predicate, block, self._index)
        end = next((row for row, answer in enumerate(answers) if not answer), block.num_rows)
        self._ended = end < block.num_rows
        self._index += block.num_rows
        items: list[Item] = []
        first = 0
        for row in (row for row in failed if row < end):
            annotate(answers[row].error, f"In {self._label}, element {answers[row].index} of its input.")
            items += [block.slice(first, row), answers[row]]
            first = row + 1
        return [*items, block.slice(first, end)]

    def border(self) -> IteratorState:
        return {"index": self._index, "ended": self._ended, "input": self._source.state_dict()}

    def restore(self, border: IteratorState) -> None:
        self._index, self._ended = int(border["index"]), bool(border["ended"])
        self._source.load_state_dict(border["input"])


@final
@dataclass(frozen=True, eq=False)
class ShardOp(UnaryOp):
    """The elements of `input` whose index modulo `num_shards` is `index`.

    `wants_element` is the message of an error if the shard has no element; None to allow that.
    """

    pure: ClassVar[bool] = True
    content_blind: ClassVar[bool] = True
    takes_row_ids: ClassVar[bool] = True
    num_shards: int
    index: int
    wants_element: str | None = field(default=None, metadata=NOT_IN_FINGERPRINT)

    def __post_init__(self) -> None:
        if self.num_shards < 1:
            raise InvalidArgumentError(f"num_shards must be >= 1, got {self.num_shards}.")
        if not 0 <= self.index < self.num_shards:
            raise InvalidArgumentError(
                f"index must be in 0 .. {self.num_shards - 1} (num_shards - 1), got {self.index}."
            )

    @property
    def label(self) -> str:
        return f"shard({self.num_shards}, {self.index})"

    @property
    def is_noop(self) -> bool:
        return self.num_shards == 1

    def cardinality(self) -> int:
        count = self.input.cardinality()
        return count if count < 0 else max(0, -(-(count - self.index) // self.num_shards))

    def make_iterator(self, ctx: IterContext) -> OpIterator:
        return BorderIterator(_Sharding(self, ctx.build(self.input)))


@final
class _Sharding(ClosesInput, ResumableProducer):
    """A producer that counts an error like an element: it comes out of one shard."""

    def __init__(self, op: ShardOp, source: OpIterator) -> None:
        self._op = op
        self._source = source
        self._number = 0  # index of the next input

    def make(self, limit: int) -> Sequence[Item]:
        ahead = (self._op.index - self._number) % self._op.num_shards  # elements before the next element of this shard
        wanted = min(ahead + 1 + (limit - 1) * self._op.num_shards, max(_SHARD_ROWS, ahead + 1))
        try:
            item = read_item(self._source, wanted)
        except StopIteration:
            return [self._missing()]
        if isinstance(item, ElementError):
            self._number += 1
            return [] if ahead else [item]
        self._number += item.num_rows
        kept = np.arange(ahead, item.num_rows, self._op.num_shards)
        return [item.take(kept)] if len(kept) else []

    def _missing(self) -> ElementError:
        """Return the error for a shard that must have an element; raise StopIteration if it had one."""
        if self._op.wants_element is None or self._number > self._op.index:
            raise StopIteration
        self._number = self._op.index + 1
        return ElementError(InvalidArgumentError(self._op.wants_element))

    def border(self) -> IteratorState:
        return {"number": self._number, "input": self._source.state_dict()}

    def restore(self, border: IteratorState) -> None:
        self._number = int(border["number"])
        self._source.load_state_dict(border["input"])
