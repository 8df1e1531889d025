"""What `merge_call` hands to its function: the values of all replicas, without those that stand in for others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

from raydist.values import PerReplica

__all__ = ["MergedValue", "value_on"]


@final
class MergedValue(PerReplica):
    """A value of every replica. Those of replicas without rows are passed over, as results of steps are.

    Args:
        everybody: One value per replica, in rank order.
        ranks: The replicas that have rows.

    >>> merged = MergedValue(["a", "b", "b"], [0, 1])
    >>> merged.values, merged.everybody
    (('a', 'b'), ('a', 'b', 'b'))
    """

    def __init__(self, everybody: Sequence[Any], ranks: Sequence[int]) -> None:
        super().__init__([everybody[rank] for rank in ranks])
        self.everybody = tuple(everybody)
        self._of = tuple(ranks)

    def _ranks(self) -> Sequence[int]:
        return self._of


def value_on(leaf: Any, rank: int, ranks: Sequence[int]) -> Any:
    """What one replica gets of a leaf of the merged function's result.

    Args:
        leaf: A PerReplica, with a value for each replica or for each of `ranks`, or what all get.
        rank: The replica. One without rows gets the first value where it has none of its own.
        ranks: The replicas that have rows.

    >>> value_on(PerReplica([5, 6]), 1, [0, 1]), value_on(PerReplica([5, 6]), 2, [0, 1]), value_on(7, 2, [0, 1])
    (6, 5, 7)
    """
    if isinstance(leaf, MergedValue):
        return leaf.everybody[rank]
    if not isinstance(leaf, PerReplica):
        return leaf
    values = leaf.values
    if len(values) != len(ranks):
        return values[rank]
    return values[ranks.index(rank)] if rank in ranks else values[0]
