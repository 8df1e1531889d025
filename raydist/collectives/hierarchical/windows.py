"""How large tensors are cut, on all hosts alike: whether a host has them in shared memory or not."""

from __future__ import annotations

from typing import final

from raydist.collectives.hierarchical.plan import HostPlan
from raydist.collectives.shared_memory.layout import Window, cut

__all__ = ["AHEAD", "BlockWindows"]

AHEAD = 2
"""So many blocks are on their way between hosts while the next one is begun: `staged.py` says why no more."""

# 256 and 512 KB take 4 ranks as long, within what other work on the machine changes; and Python does more for them.
_MOST_BLOCK = 1 << 20


@final
class BlockWindows:
    """Windows of which each lane reduces a slice, its block.

    Args:
        plan: Who shares memory with whom.

    Attributes:
        block_bytes: Of a block at most.
    """

    def __init__(self, plan: HostPlan) -> None:
        self._num_lanes = plan.num_lanes
        self.block_bytes = min(_MOST_BLOCK, *(plan.layout(host).chunk_bytes for host in range(len(plan.hosts))))

    def of(self, numel: int, itemsize: int) -> list[Window]:
        """Those of a flat tensor."""
        return cut(numel, itemsize, chunk_bytes=self.block_bytes, world_size=self._num_lanes)
