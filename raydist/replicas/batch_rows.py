"""Batch rows and weights of each replica, and per-replica values that skip replicas without rows. Does no I/O."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

from raydist.core.values import PerReplica


@final
class MergedValue(PerReplica):
    """A value of every replica. `values` leaves out the replicas without rows, as results of steps do.

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
    """Return the value that one replica gets for a leaf of the merged function's result.

    Args:
        leaf: A PerReplica with one value for each replica or for each of `ranks`, or one value for all replicas.
        rank: The replica. A replica without rows gets the first value if the leaf has none for that replica.
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


@final
@dataclass(frozen=True, slots=True)
class BatchRows:
    """The rows of one batch on all replicas."""

    counts: tuple[int, ...] | None  # number of rows on each replica; None without a batch
    shares: tuple[float, ...]  # fraction of the global batch on each replica
    # for each replica, True if it has no rows, so it runs on padding rows; all True for an empty batch
    padding: tuple[bool, ...]
    present: tuple[bool, ...]  # for each replica, True if its results count: no padding rows, or no replica has rows
    all_present: bool  # True if the results of all replicas count

    @staticmethod
    @functools.lru_cache(maxsize=64)  # a program has few batch sizes: the full one and that of the last batch
    def of(counts: tuple[int, ...] | None, world_size: int, *, padding: bool) -> BatchRows:
        """Return the rows of a batch; with `padding`, replicas without rows run on padding rows.

        >>> BatchRows.of((3, 0), 2, padding=True).present, BatchRows.of((3, 0), 2, padding=False).present
        ((True, False), (True, True))
        """
        nobody, everybody = (False,) * world_size, (True,) * world_size
        paddings = tuple(count == 0 for count in counts) if padding and counts is not None else nobody
        present = everybody if all(paddings) else tuple(not absent for absent in paddings)
        return BatchRows(counts, weights_of(counts, world_size), paddings, present, all(present))

    def weights(self, *, adds_up: bool) -> tuple[float, ...] | None:
        """Return the weight of each replica in the global objective, or None if contributions are summed unweighted.

        >>> BatchRows.of((3, 0), 2, padding=True).weights(adds_up=True)
        (1.0, 0.0)
        """
        if not adds_up:
            return self.shares
        return None if self.all_present else tuple(map(float, self.present))


def weights_of(rows: tuple[int, ...] | None, world_size: int) -> tuple[float, ...]:
    """Return the fraction of the global batch on each replica; without rows, all fractions are equal.

    >>> weights_of((3, 1), 2), weights_of(None, 2)
    ((0.75, 0.25), (0.5, 0.5))
    """
    total = sum(rows) if rows else 0
    if not rows or not total:
        return (1.0 / world_size,) * world_size
    return tuple(count / total for count in rows)
