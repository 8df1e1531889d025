"""What several replicas recorded in one step becomes what the step shows. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import replace

from raydist.summaries.record import Record

__all__ = ["merge"]


def merge(replicas: Sequence[Sequence[Record]]) -> list[Record]:
    """The records of a step: of each name one for all replicas, in the order in which the first of them called.

    The k-th record of a name at a step belongs to the k-th of all others. A replica may leave some out.

    Args:
        replicas: What each replica recorded, in rank order; settled.
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
