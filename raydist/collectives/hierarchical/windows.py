"""How large tensors are cut, on all hosts alike: whether a host has them in shared memory or not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from raydist.collectives.hierarchical.plan import HostPlan
from raydist.collectives.shared_memory.layout import Window, cut

__all__ = ["AHEAD", "BlockWindows"]

AHEAD = 1
"""So many blocks are on their way between hosts while the next one is begun: `staged.py` says why no more."""

# What is on its way is to stay in a cache of 32 MB: two ranks on each of two hosts reduce 100 MB in 106 ms where blocks
# have 2 MB and two are on their way, in 98 where it is one, and in 94 where it has 1 MB. Smaller ones are more work.
_MOST_BLOCK = 1 << 20
# More hosts exchange smaller parts of a block, and more of them: 144 ms with blocks of 2 MB among four, 157 with 1 MB.
# Not where there are so few that the first and the last one, which nothing else is done beside, count.
_LARGE_BLOCK = 2 << 20
_MANY_BLOCKS = 16
_MOST_KNOWN = 64


@final
class BlockWindows:
    """Windows of which each lane reduces a slice, its block.

    Args:
        plan: Who shares memory with whom.

    Attributes:
        most_bytes: Of any block.
    """

    def __init__(self, plan: HostPlan) -> None:
        room = min(plan.layout(host).chunk_bytes for host in range(len(plan.hosts)))
        self._num_lanes = plan.num_lanes
        self._known: dict[tuple[int, int], list[Window]] = {}
        self._block_bytes = min(_MOST_BLOCK, room)
        self.most_bytes = self._block_bytes if len(plan.hosts) == 2 else min(_LARGE_BLOCK, room)

    def of(self, numel: int, itemsize: int) -> Sequence[Window]:
        """Those of a flat tensor."""
        known = self._known.get((numel, itemsize))
        if known is None:
            if len(self._known) >= _MOST_KNOWN:
                self._known.clear()
            known = self._known[numel, itemsize] = self._cut(numel, itemsize)
        return known

    def _cut(self, numel: int, itemsize: int) -> list[Window]:
        is_large = numel * itemsize >= _MANY_BLOCKS * self.most_bytes * self._num_lanes
        block_bytes = self.most_bytes if is_large else self._block_bytes
        return cut(numel, itemsize, chunk_bytes=block_bytes, world_size=self._num_lanes)
