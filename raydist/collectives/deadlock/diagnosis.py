"""Who waits for whom, and whether it can end. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import final

from raydist.collectives.deadlock.status import RankStatus
from raydist.collectives.translation import describe_odd_ones

__all__ = ["diagnose"]


def diagnose(before: Mapping[int, RankStatus], now: Mapping[int, RankStatus]) -> str | None:
    """What is wrong where ranks wait that nobody can help; None where it may still go on.

    Args:
        before: An earlier look at each rank that was seen.
        now: A later one. A rank counts if it has done nothing in between: others may only be slow.

    >>> waits = [RankStatus(7, 3, True, {"g": 1}, "g", 0, "all_reduce(SUM)", look) for look in (1, 2)]
    >>> ended = [RankStatus(9, 3, False, {}, look=look) for look in (4, 5)]
    >>> diagnose({0: waits[0], 1: ended[0]}, {0: waits[1], 1: ended[1]})
    'rank 0 waits in all_reduce(SUM) (g, call 0) in step 3; rank 1 has ended step 3'
    """
    still = {
        rank: status
        for rank, status in now.items()
        if rank in before and before[rank].events == status.events and before[rank].look < status.look
    }
    graph = _Waits(still)
    if not any(graph.in_vain(rank) for rank in still):
        return None
    said = "; ".join(f"rank {rank} {status}" for rank, status in sorted(now.items()))
    return said + describe_odd_ones({rank: (it.waits_in, it.number, it.running) for rank, it in now.items()})


@final
class _Waits:
    """The ranks that stand still, and for whom each of them waits."""

    def __init__(self, still: Mapping[int, RankStatus]) -> None:
        self._still = still

    def in_vain(self, rank: int) -> bool:
        """Whether a rank that it waits for has left the step, or waits for it in turn."""
        status = self._still[rank]
        if not status.waits_in:
            return False
        awaited = self._awaited(rank)
        return any(self._has_left(other, status.step) for other in awaited) or self._leads_to(rank, awaited)

    def _awaited(self, rank: int) -> set[int]:
        status = self._still[rank]
        return {
            other
            for other, theirs in self._still.items()
            if other != rank and theirs.calls.get(status.waits_in, 0) <= status.number
        }

    def _has_left(self, rank: int, step: int) -> bool:
        status = self._still[rank]
        return status.step > step or (status.step == step and not status.running)

    def _leads_to(self, goal: int, start: set[int]) -> bool:
        found, left = set(start), list(start)
        while left:
            rank = left.pop()
            if not self._still[rank].waits_in:
                continue
            new = self._awaited(rank) - found
            found |= new
            left.extend(new)
        return goal in found
