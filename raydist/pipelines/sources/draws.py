"""Random indices of datasets with given weights, for sample_from_datasets."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np

from raydist.errors import InvalidArgumentError
from raydist.nest import LEAF
from raydist.pipelines.elements.blocks import Block
from raydist.pipelines.elements.items import IteratorState
from raydist.pipelines.elements.seeds import RandomKey
from raydist.pipelines.elements.spec import TensorSpec
from raydist.pipelines.engine.op import IterContext
from raydist.pipelines.engine.op_iterator import OpIterator
from raydist.pipelines.engine.op_kinds import SourceOp
from raydist.values import INFINITE_CARDINALITY

__all__ = ["DrawsOp"]

_MAX_ROWS = 4096
_WORD = 2.0**-64


@final
@dataclass(frozen=True, eq=False)
class DrawsOp(SourceOp):
    """An infinite source of numbers 0 .. len(weights) - 1, with probabilities proportional to the weights."""

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

    def cardinality(self) -> int:
        return INFINITE_CARDINALITY

    def element_spec(self) -> Any:
        return TensorSpec((), np.int64)

    def make_iterator(self, ctx: IterContext) -> OpIterator:
        return _Draws(self.weights, ctx.key(self, self.seed, every_epoch=self.rerandomize_each_iteration))


@final
class _Draws(OpIterator):
    def __init__(self, weights: Sequence[float], key: RandomKey) -> None:
        shares = np.cumsum(weights) / np.sum(weights)
        # A word that rounds up to 1 belongs to the last dataset with a weight > 0.
        self._bounds = np.where(shares >= 1.0, np.inf, shares)
        self._key = key
        self._next = 0

    def next_block(self, limit: int) -> Block:
        rows = min(limit, _MAX_ROWS)
        drawn = self._key.words(self._next, rows).astype(np.float64) * _WORD
        self._next += rows
        chosen = np.searchsorted(self._bounds, drawn, side="right").astype(np.int64)
        return Block(LEAF, (TensorSpec((), np.int64),), (chosen,), rows)

    def state_dict(self) -> IteratorState:
        return {"next": self._next}

    def load_state_dict(self, state: IteratorState) -> None:
        self._next = int(state["next"])
