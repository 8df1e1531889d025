"""Dataset.rejection_resample: drop elements at random to reach a distribution of classes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, final

import numpy as np

from raydist.errors import InvalidArgumentError, SpecError
from raydist.foreign_errors import annotate
from raydist.nest import LEAF, Structure
from raydist.pipelines.elements.blocks import Block
from raydist.pipelines.elements.functions import call_rows, function_label
from raydist.pipelines.elements.items import ElementError, Item, IteratorState
from raydist.pipelines.elements.seeds import RandomKey
from raydist.pipelines.engine.op import IterContext
from raydist.pipelines.engine.op_iterator import ClosesInput, OpIterator
from raydist.pipelines.engine.op_kinds import UnaryOp
from raydist.pipelines.engine.producers import (
    BorderIterator,
    OneKind,
    ReplayIterator,
    ResumableProducer,
    read_watched,
)
from raydist.pipelines.engine.request_size import RequestSize
from raydist.pipelines.ops.class_balance import ClassBalance
from raydist.pipelines.ops.map import MapOp, items_of_results
from raydist.values import UNKNOWN_CARDINALITY

__all__ = ["RejectionResampleOp"]

_MAX_ROWS = 4096  # elements classified at a time
_MAX_CELLS = 1 << 20  # and at most this many counts: one for each element and class
_MAX_COUNTS = 256  # largest number of classes whose counts go into a state: with more, resuming counts again


@final
@dataclass(frozen=True, eq=False)
class RejectionResampleOp(UnaryOp):
    """Pairs (class, element) of the elements of `input` that a random choice keeps."""

    passes_elements: ClassVar[bool] = True

    class_func: Callable[..., Any]
    balance: ClassBalance
    seed: int | None = None

    def __post_init__(self) -> None:
        if not callable(self.class_func):
            raise InvalidArgumentError(f"class_func must be a function, got {self.class_func!r:.100}.")

    @property
    def name(self) -> str:
        return "rejection_resample"

    @property
    def label(self) -> str:
        return f"rejection_resample({function_label(self.class_func)}, {self.balance.num_classes} classes)"

    def cardinality(self) -> int:
        return 0 if self.input.cardinality() == 0 else UNKNOWN_CARDINALITY

    def element_spec(self) -> Any:
        return self._class_spec, self.input.element_spec()

    @cached_property
    def _class_spec(self) -> Any:
        return MapOp(self.input, self.class_func).element_spec()

    def make_iterator(self, ctx: IterContext) -> OpIterator:
        label = f"{ctx.operation_names[id(self)]} ({function_label(self.class_func)})"
        producer = _Resampling(self, ctx.build(self.input), ctx.key(self, self.seed), label)
        small = self.balance.initial is not None or self.balance.num_classes <= _MAX_COUNTS
        return BorderIterator(producer) if small else ReplayIterator(producer)


@final
class _Resampling(ClosesInput, ResumableProducer):
    """A producer that decides on elements in order. Its state is the count of elements and of each class."""

    def __init__(self, op: RejectionResampleOp, source: OpIterator, key: RandomKey, label: str) -> None:
        self._op = op
        self._source = source
        self._key = key
        self._label = label
        self._kind = OneKind(label)
        self._request = RequestSize(min(_MAX_ROWS, max(1, _MAX_CELLS // op.balance.num_classes)))
        self._index = 0
        self._seen = np.zeros(op.balance.num_classes, np.int64)

    def make(self, limit: int) -> Sequence[Item]:
        # Few of the elements may be kept, so the consumer's limit does not tell how many to read.
        item = read_watched(self._source, self._request)
        start = self._index
        if isinstance(item, ElementError):
            self._index += 1
            return [item]
        self._index += item.num_rows
        answers, failed = call_rows(self._op.class_func, item.shared(), start)
        items: list[Item] = []
        row = 0
        for part in items_of_results(answers, failed, start):
            rows = part.num_rows if isinstance(part, Block) else 1
            items += self._judged(part, item.slice(row, row + rows), start + row)
            row += rows
        return self._kind.checked(items)

    def _judged(self, answers: Item, elements: Block, start: int) -> list[Item]:
        """Return the kept elements, with classes `answers`; an error in place of each element without a class."""
        if isinstance(answers, ElementError):
            return [self._noted(answers.error, start)]
        if answers.structure != LEAF or answers.specs[0].shape != () or answers.specs[0].dtype.kind not in "iu":
            message = f"A class must be one whole number, got {answers.signature} of shape {answers.specs[0].shape}."
            return [self._noted(SpecError(message), start + row) for row in range(answers.num_rows)]
        classes = answers.columns[0].astype(np.int64)
        unknown = np.flatnonzero((classes < 0) | (classes >= self._op.balance.num_classes))
        items: list[Item] = []
        begin = 0
        for row in [*map(int, unknown), len(classes)]:
            if row > begin:
                known = answers.slice(begin, row), classes[begin:row], elements.slice(begin, row)
                items += self._kept(*known, start + begin)
            if row < len(classes):
                message = f"A class must be in 0 .. {self._op.balance.num_classes - 1}, got {classes[row]}."
                items.append(self._noted(InvalidArgumentError(message), start + row))
            begin = row + 1
        return items

    def _noted(self, error: Exception, index: int) -> ElementError:
        annotate(error, f"In {self._label}, element {index} of its input.")
        return ElementError(error, index)

    def _kept(self, answers: Block, classes: Any, elements: Block, start: int) -> list[Item]:
        probabilities, self._seen = self._op.balance.kept(classes, self._seen)
        # The upper 53 bits of a word: the precision of a float64 in [0, 1).
        draws = (self._key.words(start, len(classes)) >> np.uint64(11)) * 2.0**-53
        rows = np.flatnonzero(draws < probabilities)
        if not len(rows):
            return []
        kept, numbers = elements.take(rows), answers.take(rows)
        structure = Structure(tuple, (0, 1), (LEAF, elements.structure))
        return [Block(structure, numbers.specs + kept.specs, numbers.columns + kept.columns, len(rows))]

    def border(self) -> IteratorState:
        return {"index": self._index, "seen": self._seen.tolist(), "input": self._source.state_dict()}

    def restore(self, border: IteratorState) -> None:
        self._index = int(border["index"])
        self._seen = np.array(border["seen"], np.int64)
        self._source.load_state_dict(border["input"])
