"""Dataset.rejection_resample: drop elements at random to reach a distribution of classes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, final

import numpy as np

from raydist.core.errors import InvalidArgumentError, SpecError
from raydist.core.exception_utils import annotate
from raydist.core.nest import LEAF, Structure
from raydist.pipelines.elements.blocks import Block
from raydist.pipelines.elements.functions import call_rows, function_label
from raydist.pipelines.elements.items import ElementError, Item, IteratorState
from raydist.pipelines.elements.seeds import RandomKey
from raydist.pipelines.engine.op import IterContext
from raydist.pipelines.engine.op_iterator import ClosesInput, OpIterator
from raydist.pipelines.engine.op_kinds import UncountedOp
from raydist.pipelines.engine.producers import (
    BorderIterator,
    ReplayIterator,
    ResumableProducer,
    SpecGuard,
    read_watched,
)
from raydist.pipelines.engine.request_size import RequestSize
from raydist.pipelines.ops.map import MapOp, items_of_results

_SEEN_BEFORE = 10  # pseudo-count of each class, which smooths the estimate after few elements
_MAX_ROWS = 4096  # elements classified at a time
_MAX_CELLS = 1 << 20  # and at most this many counts: one for each element and class
_MAX_COUNTS = 256  # largest number of classes whose counts go into a state: with more, resuming counts again
_Floats = np.ndarray[Any, np.dtype[np.float64]]
_Counts = np.ndarray[Any, np.dtype[np.int64]]


@final
@dataclass(frozen=True, slots=True)
class ClassBalance:
    """A target distribution of classes, and the distribution of the input where known.

    Keeping with probability (target / initial) / max(target / initial) gives the largest share that independent choices
    per element can keep.

    Attributes:
        target: One weight per class; the sum need not be 1.
        initial: One weight per class for the input; None to estimate the weights while reading.
    """

    target: tuple[float, ...]
    initial: tuple[float, ...] | None

    @classmethod
    def of(cls, target: Any, initial: Any) -> ClassBalance:
        """Check the arguments of `rejection_resample`.

        Raises:
            InvalidArgumentError: Invalid weights, different lengths, or a wanted class that never comes.
        """
        wanted = _weights("target_dist", target)
        if initial is None:
            return cls(wanted, None)
        known = _weights("initial_dist", initial)
        if len(known) != len(wanted):
            raise InvalidArgumentError(
                "target_dist and initial_dist must have one entry for each class, got "
                f"{len(wanted)} and {len(known)} entries."
            )
        missing = [index for index, pair in enumerate(zip(wanted, known, strict=True)) if pair[0] > 0 == pair[1]]
        if missing:
            raise InvalidArgumentError(
                f"initial_dist must be > 0 where target_dist is, got 0 for class {missing[0]}, which is wanted."
            )
        return cls(wanted, known)

    @property
    def num_classes(self) -> int:
        """Number of classes."""
        return len(self.target)

    def kept(self, classes: _Counts, seen: _Counts) -> tuple[_Floats, _Counts]:
        """Return the probability of keeping each of some consecutive elements, and `seen` after them.

        Args:
            classes: Classes of the elements.
            seen: Number of earlier elements of each class.
        """
        target = np.array(self.target)
        if self.initial is not None:
            ratios = np.divide(target, self.initial, out=np.zeros_like(target), where=target > 0)
            return (ratios / ratios.max())[classes], seen
        # The estimate for an element includes the element (as in TensorFlow).
        ones = np.zeros((len(classes), self.num_classes), np.int64)
        ones[np.arange(len(classes)), classes] = 1
        counts = seen + np.cumsum(ones, axis=0)
        ratios = target / (counts + _SEEN_BEFORE)
        return ratios[np.arange(len(classes)), classes] / ratios.max(axis=1), counts[-1]


def _weights(name: str, values: Any) -> tuple[float, ...]:
    if not isinstance(values, Sequence) and not hasattr(values, "__array__"):
        raise InvalidArgumentError(f"{name} must be a list of weights, one for each class, got {values!r:.100}.")
    array = np.asarray(values)
    if array.ndim != 1 or array.dtype.kind not in "iuf" or not len(array):
        raise InvalidArgumentError(f"{name} must be a list of weights, one for each class, got {values!r:.100}.")
    if not np.isfinite(array).all() or array.min() < 0 or array.sum() <= 0:
        raise InvalidArgumentError(f"{name} must hold weights >= 0, not all of them 0, got {values!r:.100}.")
    return tuple(float(value) for value in array)


@final
@dataclass(frozen=True, eq=False)
class RejectionResampleOp(UncountedOp):
    """Pairs (class, element) of the elements of `input` that a random choice keeps."""

    passes_elements: ClassVar[bool] = True

    class_func: Callable[..., Any]
    balance: ClassBalance
    seed: int | None = None

    def __post_init__(self) -> None:
        if not callable(self.class_func):
            raise InvalidArgumentError(f"class_func must be a function, got {self.class_func!r:.100}.")

    @property
    def label(self) -> str:
        return f"rejection_resample({function_label(self.class_func)}, {self.balance.num_classes} classes)"

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
        self._kind = SpecGuard(label)
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
