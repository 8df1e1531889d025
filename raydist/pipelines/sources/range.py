"""Sources of numbers: Dataset.range, counter and random, and random indices for global_shuffle and samples."""

from __future__ import annotations

import functools
import hashlib
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from raydist.core.errors import InvalidArgumentError
from raydist.core.nest import LEAF
from raydist.core.values import INFINITE_CARDINALITY
from raydist.pipelines.elements.arguments import whole_number
from raydist.pipelines.elements.blocks import Block, Column
from raydist.pipelines.elements.leaf_values import as_leaf
from raydist.pipelines.elements.spec import TensorSpec
from raydist.pipelines.engine.op_iterator import OpIterator
from raydist.pipelines.engine.op_kinds import SourceOp
from raydist.pipelines.engine.random_access import RandomAccess
from raydist.pipelines.sources.memory import IndexedSourceOp

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from raydist.pipelines.elements.items import IteratorState
    from raydist.pipelines.elements.seeds import RandomKey
    from raydist.pipelines.engine.op import IterContext

_ROUNDS = 8
_MIX = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))  # the finaliser of splitmix64
_WORD = 2.0**-64
_Numbers = np.ndarray[Any, np.dtype[np.int64]]
_Weights = np.ndarray[Any, np.dtype[np.float64]]
_Words = np.ndarray[Any, np.dtype[np.uint64]]
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


@dataclass(frozen=True, eq=False)
class PermutationOp(NumbersOp):
    """The numbers 0 .. `count` - 1 in a random order, per epoch or for all epochs: see :func:`permuted`."""

    count: int
    seed: int | None
    reshuffle_each_iteration: bool
    name = "global_shuffle"

    @property
    def label(self) -> str:
        return f"global_shuffle({'' if self.seed is None else f'seed={self.seed}'})"

    def cardinality(self) -> int:
        return self.count

    def make_iterator(self, ctx: IterContext) -> OpIterator:
        keys = ctx.key(self, self.seed, every_epoch=self.reshuffle_each_iteration).words(0, _ROUNDS)

        def make(first: int, stop: int) -> _Numbers:
            return permuted(np.arange(first, stop, dtype=np.uint64), self.count, keys).astype(np.int64)

        return NumbersIterator(self.element_spec(), make, self.count)


def permuted(positions: _Words, count: int, keys: _Words) -> _Words:
    """Return the numbers at these positions of the permutation of 0 .. `count` - 1 with these `keys`.

    Neither the order nor a position in it takes memory: a Feistel network is a permutation of 2^(2h) numbers for any
    round function. Numbers beyond `count` are permuted again until they fall below it, which keeps it a permutation
    ("cycle walking": Black and Rogaway, "Ciphers with Arbitrary Finite Domains", CT-RSA 2002).

    >>> from raydist.pipelines.elements.seeds import RandomKey
    >>> keys = RandomKey(seed=1, operation="global_shuffle-1").words(0, 8)
    >>> sorted(permuted(np.arange(10, dtype=np.uint64), 10, keys).tolist()) == list(range(10))
    True
    """
    half = max(1, ((count - 1).bit_length() + 1) // 2)
    numbers = _encrypted(positions, half, keys)
    while (outside := np.flatnonzero(numbers >= np.uint64(count))).size:
        numbers[outside] = _encrypted(numbers[outside], half, keys)
    return numbers


def _encrypted(numbers: _Words, half: int, keys: _Words) -> _Words:
    """Apply a Feistel network over two halves of `half` bits."""
    shift, mask = np.uint64(half), np.uint64((1 << half) - 1)
    left, right = numbers >> shift, numbers & mask
    for key in keys:
        left, right = right, left ^ (_mixed(right ^ key) & mask)
    return (left << shift) | right


def _mixed(words: _Words) -> _Words:
    words = (words ^ (words >> np.uint64(30))) * _MIX[0]
    words = (words ^ (words >> np.uint64(27))) * _MIX[1]
    return words ^ (words >> np.uint64(31))


@dataclass(frozen=True, eq=False)
class DrawsOp(NumbersOp):
    """An endless source of numbers 0 .. len(weights) - 1, with probabilities proportional to the weights."""

    weights: tuple[float, ...]
    seed: int | None
    rerandomize_each_iteration: bool

    @classmethod
    def of(cls, weights: Sequence[Any] | None, count: int, seed: int | None, rerandomize: bool) -> DrawsOp:
        """Return the operation for the arguments of `sample_from_datasets`. Negative weights count as 0."""
        given = [1.0] * count if weights is None else [float(weight) for weight in weights]
        if len(given) != count:
            raise InvalidArgumentError(f"weights must hold one number per dataset, got {len(given)} for {count}.")
        if not all(map(math.isfinite, given)) or max(given) <= 0:
            raise InvalidArgumentError(f"weights must be finite, and one of them > 0, got {given}.")
        return cls(tuple(max(0.0, weight) for weight in given), seed, rerandomize)

    @property
    def label(self) -> str:
        return f"draws({', '.join(f'{weight:g}' for weight in self.weights)})"

    def make_iterator(self, ctx: IterContext) -> OpIterator:
        key = ctx.key(self, self.seed, every_epoch=self.rerandomize_each_iteration)
        bounds = _bounds(np.array(self.weights))
        return NumbersIterator(self.element_spec(), functools.partial(_drawn, key, bounds))


@dataclass(frozen=True, eq=False)
class WeightedIndicesOp(NumbersOp):
    """`num_samples` indices below len(weights), with probabilities proportional to the weights; new in every epoch.

    Without replacement, index i gets the key E_i / w_i with E_i exponentially distributed. The smallest keys, in
    ascending order, have the distribution of successive draws (Efraimidis and Spirakis, "Weighted random sampling with
    a reservoir", 2006). `torch.multinomial` does the same. Resuming repeats the draw.
    """

    weights: _Weights
    num_samples: int
    replacement: bool
    seed: int | None
    name = "sample_by_weight"

    @classmethod
    def of(cls, weights: Any, num_samples: Any, replacement: Any, seed: int | None, count: int) -> WeightedIndicesOp:
        """Return the operation for the arguments of `sample_by_weight` of a dataset with `count` elements."""
        if not isinstance(replacement, bool):
            raise InvalidArgumentError(f"replacement must be True or False, got {replacement!r:.80}.")
        given = _parse_weights(weights, count)
        number = count if num_samples is None else whole_number("num_samples", num_samples)
        if number < 1:
            raise InvalidArgumentError(f"num_samples must be >= 1, got {number}.")
        drawable = int(np.count_nonzero(given))
        if not replacement and number > drawable:
            raise InvalidArgumentError(
                "Without replacement an element is drawn once at most, and only if its weight is > 0: num_samples must "
                f"be <= {drawable}, got {number}. Give a smaller num_samples, or replacement=True."
            )
        return cls(given, number, replacement, seed)

    @property
    def label(self) -> str:
        return f"sample_by_weight({self.num_samples} of {len(self.weights)})"

    @property
    def order_settings(self) -> str:
        digest = hashlib.blake2b(self.weights.tobytes(), digest_size=8).hexdigest()
        return f"weights={digest}, num_samples={self.num_samples}, replacement={self.replacement}"

    def cardinality(self) -> int:
        return self.num_samples

    def make_iterator(self, ctx: IterContext) -> OpIterator:
        key = ctx.key(self, self.seed)

        @functools.cache
        def table() -> Any:
            return _bounds(self.weights) if self.replacement else _drawn_once(self, key)

        def make(first: int, stop: int) -> _Numbers:
            return _drawn(key, table(), first, stop) if self.replacement else table()[first:stop]

        return NumbersIterator(self.element_spec(), make, self.num_samples)


def _parse_weights(weights: Any, count: int) -> _Weights:
    given = np.array(as_leaf(weights if hasattr(weights, "__array__") else list(weights)))
    if given.dtype.kind not in "biuf" or given.shape != (count,):
        raise InvalidArgumentError(
            f"weights must be one number for each of the {count} elements, got {given.dtype} of shape {given.shape}."
        )
    given = given.astype(np.float64)
    bad = np.flatnonzero(~(np.isfinite(given) & (given >= 0)))
    if bad.size:
        raise InvalidArgumentError(f"weights must be finite and >= 0, got {given[bad[0]]} for element {bad[0]}.")
    if not given.any():
        raise InvalidArgumentError(f"One of the weights must be > 0, got {count} zeros.")
    scaled: _Weights = given / given.max()  # so that the sum is finite
    return scaled


def _bounds(weights: _Weights) -> _Weights:
    """Return the upper bound of each index's share of [0, 1). A number that rounds to 1 gets the last weight > 0."""
    shares = np.cumsum(weights)
    shares /= shares[-1]
    return np.where(shares >= 1.0, np.inf, shares)


def _drawn(key: RandomKey, bounds: _Weights, first: int, stop: int) -> _Numbers:
    drawn = key.words(first, stop - first).astype(np.float64) * _WORD
    return np.searchsorted(bounds, drawn, side="right").astype(np.int64)


def _drawn_once(op: WeightedIndicesOp, key: RandomKey) -> _Numbers:
    indices = np.flatnonzero(op.weights)
    # (word + 1) / 2^64 is in (0, 1], so the logarithm is finite.
    uniform = (key.words(0, len(indices)).astype(np.float64) + 1.0) * _WORD
    keys = -np.log(uniform) / op.weights[indices]
    return indices[np.argsort(keys, kind="stable")[: op.num_samples]].astype(np.int64)
