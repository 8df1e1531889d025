"""Merging of the records of several replicas in one step. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import replace

from raydist.summaries.record import Record

__all__ = ["merge"]


def merge(replicas: Sequence[Sequence[Record]]) -> list[Record]:
    """Return the merged records of a step: one per name for all replicas, in the order of the first call.

    The k-th record of a name at a step is merged with the k-th of all other replicas. A replica may skip some.

    Args:
        replicas: Settled records of each replica, in rank order.
    """
    if len(replicas) == 1:
        return list(replicas[0])
    together: dict[Hashable, list[Record]] = {}
    for records in replicas:
        seen: Counter[Hashable] = Counter()
        for record in records:
            place = record.place
            together.setdefault((place, seen[place]), []).append(record)
            seen[place] += 1
    return [_joined(records) for records in together.values()]


def _joined(records: Sequence[Record]) -> Record:
    first, *others = records
    if not others:
        return first
    return replace(first, shown=first.shown.joined([other.shown for other in others]))
