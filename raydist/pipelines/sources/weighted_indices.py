"""Dataset.sample_by_weight: random indices of elements with given weights.

Without replacement, index i gets the key E_i / w_i with E_i exponentially distributed. The smallest keys, in ascending
order, have the distribution of successive draws (Efraimidis and Spirakis, "Weighted random sampling with a reservoir",
2006). `torch.multinomial` does the same.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any, final

import numpy as np

from raydist.errors import InvalidArgumentError
from raydist.nest import LEAF
from raydist.pipelines.elements.arguments import whole_number
from raydist.pipelines.elements.blocks import Block
from raydist.pipelines.elements.items import IteratorState
from raydist.pipelines.elements.leaf_values import as_leaf
from raydist.pipelines.elements.seeds import RandomKey
from raydist.pipelines.elements.spec import TensorSpec
from raydist.pipelines.engine.op import IterContext
from raydist.pipelines.engine.op_iterator import OpIterator
from raydist.pipelines.engine.op_kinds import SourceOp

__all__ = ["WeightedIndicesOp"]

_MAX_ROWS = 4096
_WORD = 2.0**-64

_Weights = np.ndarray[Any, np.dtype[np.float64]]


@final
@dataclass(frozen=True, eq=False)
class WeightedIndicesOp(SourceOp):
    """`num_samples` indices below len(weights), with probabilities proportional to the weights; new in every epoch."""

    weights: _Weights
    num_samples: int
    replacement: bool
    seed: int | None

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
    def name(self) -> str:
        return "sample_by_weight"

    @property
    def label(self) -> str:
        return f"sample_by_weight({self.num_samples} of {len(self.weights)})"

    @property
    def order_settings(self) -> str:
        digest = hashlib.blake2b(self.weights.tobytes(), digest_size=8).hexdigest()
        return f"weights={digest}, num_samples={self.num_samples}, replacement={self.replacement}"

    def cardinality(self) -> int:
        return self.num_samples

    def element_spec(self) -> Any:
        return TensorSpec((), np.int64)

    def make_iterator(self, ctx: IterContext) -> OpIterator:
        return _Indices(self, ctx.key(self, self.seed))


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


@final
class _Indices(OpIterator):
    """An iterator whose state is the number of indices; resuming repeats a draw without replacement."""

    def __init__(self, op: WeightedIndicesOp, key: RandomKey) -> None:
        self._op = op
        self._key = key
        self._next = 0
        self._table: np.ndarray[Any, Any] | None = None

    def next_block(self, limit: int) -> Block:
        stop = min(self._next + min(limit, _MAX_ROWS), self._op.num_samples)
        if stop <= self._next:
            raise StopIteration
        if self._table is None:
            self._table = _bounds(self._op.weights) if self._op.replacement else self._drawn_once()
        chosen = self._drawn(self._table, stop) if self._op.replacement else self._table[self._next : stop]
        self._next = stop
        return Block(LEAF, (TensorSpec((), np.int64),), (chosen,), len(chosen))

    def _drawn(self, bounds: _Weights, stop: int) -> np.ndarray[Any, Any]:
        drawn = self._key.words(self._next, stop - self._next).astype(np.float64) * _WORD
        return np.searchsorted(bounds, drawn, side="right").astype(np.int64)

    def _drawn_once(self) -> np.ndarray[Any, Any]:
        indices = np.flatnonzero(self._op.weights)
        # (word + 1) / 2^64 is in (0, 1], so the logarithm is finite.
        uniform = (self._key.words(0, len(indices)).astype(np.float64) + 1.0) * _WORD
        keys = -np.log(uniform) / self._op.weights[indices]
        return indices[np.argsort(keys, kind="stable")[: self._op.num_samples]].astype(np.int64)

    def state_dict(self) -> IteratorState:
        return {"next": self._next}

    def load_state_dict(self, state: IteratorState) -> None:
        self._next = int(state["next"])


def _bounds(weights: _Weights) -> _Weights:
    """Return the upper bound of each index's share of [0, 1). A number that rounds to 1 gets the last weight > 0."""
    shares = np.cumsum(weights)
    shares /= shares[-1]
    return np.where(shares >= 1.0, np.inf, shares)
