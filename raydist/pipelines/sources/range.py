"""Sources of numbers: Dataset.range, counter and random."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from raydist.core.errors import InvalidArgumentError
from raydist.core.nest import LEAF
from raydist.core.values import INFINITE_CARDINALITY
from raydist.pipelines.elements.blocks import Block, Column
from raydist.pipelines.elements.items import IteratorState
from raydist.pipelines.elements.spec import TensorSpec
from raydist.pipelines.engine.op import IterContext
from raydist.pipelines.engine.op_iterator import OpIterator
from raydist.pipelines.engine.op_kinds import SourceOp
from raydist.pipelines.engine.random_access import RandomAccess
from raydist.pipelines.sources.memory import IndexedSourceOp

_MAX_ROWS = 4096
_BOUND = 1 << 32  # range of tf.data's random: 32 bits in an int64
_FEW = 1024  # up to this many numbers are made at once


@dataclass(frozen=True, eq=False)
class RangeOp(IndexedSourceOp):
    """The numbers of `range(start, stop, step)`."""

    pure: ClassVar[bool] = True

    start: int
    stop: int
    step: int = 1
    dtype: np.dtype[Any] = np.dtype(np.int64)
    gives_rows = True

    def __post_init__(self) -> None:
        if self.step == 0:
            raise InvalidArgumentError("The step of a range must not be 0, got 0. Use repeat() for equal numbers.")

    @classmethod
    def of(cls, args: Sequence[int], dtype: np.dtype[Any]) -> RangeOp:
        """Return the operation for the arguments of `range`: stop, or start and stop, or start, stop and step."""
        if not 1 <= len(args) <= 3:
            raise InvalidArgumentError(f"range takes stop, or start, stop and step, got {len(args)} arguments.")
        bounds = (0, *args) if len(args) == 1 else tuple(args)
        start, stop, step = (int(bound) for bound in (*bounds, 1)[:3])
        return cls(start, stop, step, dtype)

    @property
    def label(self) -> str:
        return f"range({self.start}, {self.stop}, {self.step})"

    def element_spec(self) -> Any:
        return TensorSpec((), self.dtype)

    def random_access(self) -> RandomAccess:
        return _RangeAccess(range(self.start, self.stop, self.step), self.dtype)

    @property
    def held(self) -> Block | None:
        count = self.cardinality()
        return self.random_access().gather(np.arange(count)) if count <= _FEW else None


@dataclass(frozen=True, eq=False)
class _RangeAccess(RandomAccess):
    cheap: ClassVar[bool] = True
    numbers: range
    dtype: np.dtype[Any]

    def __len__(self) -> int:
        return len(self.numbers)

    def gather(self, indices: Any) -> Block:
        column = (indices * self.numbers.step + self.numbers.start).astype(self.dtype, copy=False)
        return Block(LEAF, (TensorSpec((), self.dtype),), (column,), len(indices))


class NumbersOp(SourceOp):
    """A source of int64 numbers, endless unless a subclass says otherwise."""

    def cardinality(self) -> int:
        return INFINITE_CARDINALITY

    def element_spec(self) -> Any:
        return TensorSpec((), np.int64)


class NumbersIterator(OpIterator):
    """An iterator over numbers, whose state is the number of numbers handed out.

    Args:
        spec: Spec of a number.
        make: Returns the numbers from one index up to another.
        count: Number of numbers; None for an endless iterator.
    """

    def __init__(self, spec: TensorSpec, make: Callable[[int, int], Column], count: int | None = None) -> None:
        self._spec = spec
        self._make = make
        self._count = count
        self._next = 0

    def next_block(self, limit: int) -> Block:
        stop = self._next + min(limit, _MAX_ROWS)
        stop = stop if self._count is None else min(stop, self._count)
        if stop <= self._next:
            raise StopIteration
        numbers = self._make(self._next, stop)
        self._next = stop
        return Block(LEAF, (self._spec,), (numbers,), len(numbers))

    def state_dict(self) -> IteratorState:
        return {"next": self._next}

    def load_state_dict(self, state: IteratorState) -> None:
        self._next = int(state["next"])


@dataclass(frozen=True, eq=False)
class CounterOp(NumbersOp):
    """The numbers `start`, `start + step`, ..."""

    start: int
    step: int
    dtype: np.dtype[Any]
    gives_rows = True

    @property
    def label(self) -> str:
        return f"counter({self.start}, {self.step})"

    def element_spec(self) -> Any:
        return TensorSpec((), self.dtype)

    def make_iterator(self, ctx: IterContext) -> OpIterator:
        return NumbersIterator(self.element_spec(), self._numbers)

    def _numbers(self, first: int, stop: int) -> Column:
        numbers = self.start + first * self.step + np.arange(stop - first, dtype=np.int64) * self.step
        return numbers.astype(self.dtype, copy=False)


@dataclass(frozen=True, eq=False)
class RandomOp(NumbersOp):
    """Random int64 numbers below 2^32; the same in every epoch unless `rerandomize_each_iteration`."""

    seed: int | None
    rerandomize_each_iteration: bool
    gives_rows = True

    @property
    def label(self) -> str:
        return f"random({'' if self.seed is None else f'seed={self.seed}'})"

    def make_iterator(self, ctx: IterContext) -> OpIterator:
        key = ctx.key(self, self.seed, every_epoch=self.rerandomize_each_iteration)
        return NumbersIterator(self.element_spec(), lambda first, stop: key.integers(first, stop - first, _BOUND))
