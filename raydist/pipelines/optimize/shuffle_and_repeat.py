"""A repeated shuffle of all of a source draws one permutation a pass, instead of filling a buffer and emptying it.

The order is that of the shuffle: with room for everything, it hands out its buffer in the order of one permutation.
"""

from __future__ import annotations

from raydist.pipelines.engine.op import DatasetOp
from raydist.pipelines.ops.repeat import RepeatOp
from raydist.pipelines.ops.shuffle import ShuffleOp
from raydist.pipelines.ops.shuffled_passes import ShuffledPassesOp
from raydist.pipelines.optimize.graph import Names, named_like, rewrite_each
from raydist.values import UNKNOWN_CARDINALITY

__all__ = ["shuffle_whole_passes"]


def shuffle_whole_passes(op: DatasetOp, names: Names) -> DatasetOp:
    """The graph with `shuffle` and `repeat` as one where the buffer holds the whole source."""

    def change(node: DatasetOp) -> DatasetOp:
        if not isinstance(node, RepeatOp) or not isinstance(node.input, ShuffleOp):
            return node
        shuffle = node.input
        access = shuffle.input.random_access()
        if access is None or not access.cheap:
            return node
        if shuffle.buffer_size != UNKNOWN_CARDINALITY and shuffle.buffer_size < len(access):
            return node
        return named_like(node, ShuffledPassesOp(shuffle.input, shuffle, node), names)

    return rewrite_each(op, names, change)
