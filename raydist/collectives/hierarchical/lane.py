"""How the ranks of a lane, one a host, reduce a block of numbers: each sends each what it needs, directly.

Two hosts give each other all they have and both add it up: one trip. More reduce a part each and hand it out: two
trips, and as few bytes as a ring has, which would take as many trips as there are hosts, twice. What is added up is
added in the order of hosts, so that all get the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import final

import torch

from raydist.collectives.hierarchical.plan import HostPlan, rounds
from raydist.collectives.reducing import reduce_parts
from raydist.collectives.shared_memory.task import Steps
from raydist.collectives.wires.channel import Passage
from raydist.collectives.wires.landed import Landed
from raydist.collectives.wires.wires import Wires
from raydist.values import ReduceOp

__all__ = ["BlockExchange", "HostReduction"]


@final
class HostReduction:
    """Reducing what hosts bring.

    Args:
        op: How. A MEAN is one over all ranks of the group.
        world_size: Their number.
    """

    def __init__(self, op: ReduceOp, world_size: int) -> None:
        self._divisor = world_size if op is ReduceOp.MEAN else 1
        self.op = ReduceOp.SUM if op is ReduceOp.MEAN else op

    def at_home(self, parts: list[torch.Tensor], out: torch.Tensor) -> None:
        """Of the ranks of one host; `out` may be one of the first two."""
        reduce_parts(parts, out, self.op)

    def between(self, parts: list[torch.Tensor], out: torch.Tensor) -> None:
        """Of all hosts, in their order; `out` may be any of them."""
        later = any(part.data_ptr() == out.data_ptr() for part in parts[2:])
        result = torch.empty_like(out) if later else out
        reduce_parts(parts, result, self.op)
        if self._divisor != 1:
            result.div_(self._divisor)
        if later:
            out.copy_(result)


@final
class BlockExchange:
    """One block under way.

    Args:
        plan: Who else has a part.
        wires: To them.
        reduction: How the parts are reduced.
        block: This host's part, replaced by the reduction.
        scratch: As long as the block, for what comes in.
    """

    def __init__(
        self, plan: HostPlan, wires: Wires, reduction: HostReduction, block: torch.Tensor, scratch: torch.Tensor
    ) -> None:
        self._plan = plan
        self._wires = wires
        self._reduction = reduction
        self._block = block
        self._scratch = scratch
        self._num_hosts = len(plan.hosts)
        self._step = -(-block.numel() // self._num_hosts)
        self._transfers: list[Passage] = []

    def begin(self) -> None:
        """Send what others need for their parts of the result. Ranks begin their blocks in the same order."""
        for to, source in self._rounds():
            if self._num_hosts == 2:
                self._transfers += [self._send(to, self._block), self._receive(source, self._scratch)]
            else:
                self._transfers += [
                    self._send(to, self._part(self._block, to)),
                    self._receive(source, self._incoming(source)),
                ]

    def finish(self) -> Steps:
        """Reduce this host's part, and get the others'. Ranks finish their blocks in the same order."""
        yield Landed(self._transfers)
        mine = self._plan.host
        if self._num_hosts == 2:
            parts = [self._scratch, self._scratch]
            parts[mine] = self._block
            self._reduction.between(parts, self._block)
            return
        reduced = self._part(self._block, mine)
        self._reduction.between(
            [reduced if host == mine else self._incoming(host) for host in range(self._num_hosts)], reduced
        )
        transfers = []
        for to, source in self._rounds():
            transfers += [self._send(to, reduced), self._receive(source, self._part(self._block, source))]
        yield Landed(transfers)

    def _rounds(self) -> Iterator[tuple[int, int]]:
        return iter(rounds(self._num_hosts, self._plan.host))

    def _send(self, host: int, data: torch.Tensor) -> Passage:
        return self._wires.send(self._plan.lane_ranks[host], data)

    def _receive(self, host: int, into: torch.Tensor) -> Passage:
        return self._wires.receive(self._plan.lane_ranks[host], into)

    def _part(self, block: torch.Tensor, host: int) -> torch.Tensor:
        return block[host * self._step : (host + 1) * self._step]

    def _incoming(self, host: int) -> torch.Tensor:
        """Where a host's contribution to this host's part arrives: parts are of equal length, the last ones aside."""
        size = self._part(self._block, self._plan.host).numel()
        place = host if host < self._plan.host else host - 1
        return self._scratch[place * size : (place + 1) * size]
