"""The numbers 0 .. n - 1 in random order, each computed on demand.

A Feistel network is a permutation of 2^(2h) numbers for any round function. Numbers beyond n are permuted again until
they fall below n, which keeps it a permutation ("cycle walking": Black and Rogaway, "Ciphers with Arbitrary Finite
Domains", CT-RSA 2002). So neither the order nor a position in it takes memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, final

import numpy as np

from raydist.nest import LEAF
from raydist.pipelines.elements.blocks import Block
from raydist.pipelines.elements.items import IteratorState
from raydist.pipelines.elements.seeds import RandomKey
from raydist.pipelines.elements.spec import TensorSpec
from raydist.pipelines.engine.op import IterContext
from raydist.pipelines.engine.op_iterator import OpIterator
from raydist.pipelines.engine.op_kinds import SourceOp

__all__ = ["PermutationOp", "permuted"]

_MAX_ROWS = 4096
_ROUNDS = 8
_MIX = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))  # the finaliser of splitmix64

_Words = np.ndarray[Any, np.dtype[np.uint64]]


@final
@dataclass(frozen=True, eq=False)
class PermutationOp(SourceOp):
    """The numbers 0 .. `count` - 1 in a random order, per epoch or for all epochs."""

    count: int
    seed: int | None
    reshuffle_each_iteration: bool

    @property
    def name(self) -> str:
        return "global_shuffle"

    @property
    def label(self) -> str:
        return f"global_shuffle({'' if self.seed is None else f'seed={self.seed}'})"

    def cardinality(self) -> int:
        return self.count

    def element_spec(self) -> Any:
        return TensorSpec((), np.int64)

    def make_iterator(self, ctx: IterContext) -> OpIterator:
        return _Permutation(self.count, ctx.key(self, self.seed, every_epoch=self.reshuffle_each_iteration))


@final
class _Permutation(OpIterator):
    def __init__(self, count: int, key: RandomKey) -> None:
        self._count = count
        self._keys = key.words(0, _ROUNDS)
        self._next = 0

    def next_block(self, limit: int) -> Block:
        stop = min(self._next + min(limit, _MAX_ROWS), self._count)
        if stop <= self._next:
            raise StopIteration
        numbers = permuted(np.arange(self._next, stop, dtype=np.uint64), self._count, self._keys)
        self._next = stop
        return Block(LEAF, (TensorSpec((), np.int64),), (numbers.astype(np.int64),), len(numbers))

    def state_dict(self) -> IteratorState:
        return {"next": self._next}

    def load_state_dict(self, state: IteratorState) -> None:
        self._next = int(state["next"])


def permuted(positions: _Words, count: int, keys: _Words) -> _Words:
    """Return the numbers at these positions of the permutation of 0 .. `count` - 1 with these `keys`.

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
