"""How the ranks of a lane, one a host, reduce a block of numbers: each sends each what it needs, directly.

Two hosts give each other all they have and both add it up: one trip. More reduce a part each and hand it out: two
trips, and as few bytes as a ring has, which would take as many trips as there are hosts, twice. What is added up is
added in the order of hosts, so that all get the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch

from raydist.collectives.hierarchical.plan import HostPlan, rounds
from raydist.collectives.reducing import reduce_parts, reduce_rows
from raydist.collectives.shared_memory.task import Steps
from raydist.collectives.wires.channel import bytes_of
from raydist.collectives.wires.landed import Landed
from raydist.collectives.wires.wires import Wires
from raydist.values import ReduceOp

__all__ = ["BlockExchange", "BlockExchanges", "HostReduction", "halves"]

_MANY_ROWS = 8  # 16 rows of 64 KB: 65 to 98 us at once, 136 to 158 us one by one
_Loads = Sequence[tuple[int, torch.Tensor]]
"""Ranks, and contiguous memory that goes there or comes from there."""


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

    def at_home(self, parts: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        """Of the ranks of one host; `out` may be one of the first two."""
        reduce_parts(parts, out, self.op)

    def rows_at_home(self, rows: torch.Tensor, out: torch.Tensor) -> None:
        """The same for what they bring as the rows of one tensor, of which `out` is no part."""
        if len(rows) < _MANY_ROWS:
            self.at_home(rows.unbind(), out)
        else:
            reduce_rows(rows, self.op, out)

    def between(self, parts: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        """Of all hosts, in their order; `out` may be any of them."""
        later = len(parts) > 2 and any(part.data_ptr() == out.data_ptr() for part in parts[2:])
        result = torch.empty_like(out) if later else out
        reduce_parts(parts, result, self.op)
        if self._divisor != 1:
            result.div_(self._divisor)
        if later:
            out.copy_(result)


@final
class _Trip:
    """Bytes that go to other hosts and come from them at the same time, as often as they are wanted.

    Args:
        wires: Between them.
        outgoing: By rank, what is sent.
        incoming: By rank, what is filled.
    """

    __slots__ = ("_loads",)

    def __init__(self, wires: Wires, outgoing: _Loads, incoming: _Loads) -> None:
        self._loads = [
            *[(wires.channel_to(rank), bytes_of(data)) for rank, data in outgoing],
            *[(wires.channel_from(rank), bytes_of(data)) for rank, data in incoming],
        ]

    def begin(self) -> Landed:
        """Start it. Ranks begin their trips in the same order."""
        return Landed([channel.start(data) for channel, data in self._loads])


@final
class BlockExchange:
    """The exchange of one block: made once, done as often as the same memory is reduced.

    Args:
        plan: Who else has a part.
        wires: To them.
        reduction: How the parts are reduced.
        block: This host's part, replaced by the reduction.
        arrivals: As long as the block, for what comes in.
        adds_up: Whether the block is replaced between two hosts, too; where not, see `halves`.
    """

    def __init__(
        self,
        plan: HostPlan,
        wires: Wires,
        reduction: HostReduction,
        block: torch.Tensor,
        arrivals: torch.Tensor,
        *,
        adds_up: bool = True,
    ) -> None:
        num_hosts, mine, ranks = len(plan.hosts), plan.host, plan.lane_ranks
        self._reduction = reduction
        self._adds_up = adds_up or num_hosts > 2
        self._landing = Landed([])  # nothing is under way
        pairs = rounds(num_hosts, mine)
        if num_hosts == 2:
            other = ranks[1 - mine]
            self._result = block
            self._parts = halves(plan, block, arrivals)
            self._gather = _Trip(wires, [(other, block)], [(other, arrivals)])
            self._hand_out: _Trip | None = None
            return
        parts = _cut(block, num_hosts)
        self._result = result = parts[mine]
        incoming = _by_host(arrivals, result.numel(), num_hosts, mine)
        self._parts = [*incoming[:mine], result, *incoming[mine + 1 :]]
        self._gather = _Trip(
            wires,
            [(ranks[to], parts[to]) for to, _ in pairs],
            [(ranks[source], incoming[source]) for _, source in pairs],
        )
        self._hand_out = _Trip(
            wires,
            [(ranks[to], result) for to, _ in pairs],
            [(ranks[source], parts[source]) for _, source in pairs],
        )

    def begin(self) -> None:
        """Send what others need for their parts of the result. Ranks begin their blocks in the same order."""
        self._landing = self._gather.begin()

    def finish(self) -> Steps:
        """Reduce this host's part, and get the others'. Ranks finish their blocks in the same order."""
        yield self._landing
        if self._adds_up:
            self._reduction.between(self._parts, self._result)
        if self._hand_out is not None:
            yield self._hand_out.begin()


@final
class BlockExchanges:
    """Makes exchanges. Those of one turn share the memory for what comes in, and are not under way together.

    Args:
        plan: Who else has a part.
        wires: To them.
        most_bytes: Of a block.
    """

    def __init__(self, plan: HostPlan, wires: Wires, most_bytes: int) -> None:
        self._plan = plan
        self._wires = wires
        self._most_bytes = most_bytes
        self._scratch: dict[int, torch.Tensor] = {}

    def make(self, turn: int, block: torch.Tensor, reduction: HostReduction) -> BlockExchange:
        """The exchange of a block, in that turn."""
        if turn not in self._scratch:
            self._scratch[turn] = torch.empty(self._most_bytes, dtype=torch.uint8)
        arrivals = self._scratch[turn][: block.nbytes].view(block.dtype)
        return BlockExchange(self._plan, self._wires, reduction, block, arrivals)

    def make_halved(self, block: torch.Tensor, arrivals: torch.Tensor, reduction: HostReduction) -> BlockExchange:
        """The exchange of a block whose `halves` are added up by whoever wants the result."""
        return BlockExchange(self._plan, self._wires, reduction, block, arrivals, adds_up=False)


def halves(plan: HostPlan, block: torch.Tensor, arrivals: torch.Tensor) -> list[torch.Tensor]:
    """Of what the result is made: what each of two hosts brought, in their order; of more, the block is the result."""
    if len(plan.hosts) > 2:
        return [block]
    return [arrivals, block] if plan.host else [block, arrivals]


def _cut(block: torch.Tensor, num_hosts: int) -> list[torch.Tensor]:
    """The part of each host: of equal length, the last ones aside."""
    step = -(-block.numel() // num_hosts)
    return [block[host * step : (host + 1) * step] for host in range(num_hosts)]


def _by_host(arrivals: torch.Tensor, size: int, num_hosts: int, mine: int) -> list[torch.Tensor]:
    """Where the contribution of each host to this one's part arrives; nothing comes from this one."""
    places = []
    for host in range(num_hosts):
        place = host if host < mine else host - 1
        places.append(arrivals[:0] if host == mine else arrivals[place * size : (place + 1) * size])
    return places
