"""What a rank of a group of several hosts does in a collective, once it has joined."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch

from raydist.collectives.base import Membership
from raydist.collectives.hierarchical.conference import Conference
from raydist.collectives.hierarchical.in_place import InPlaceReductions
from raydist.collectives.hierarchical.joining import Joined
from raydist.collectives.hierarchical.lane import BlockExchanges, HostReduction
from raydist.collectives.hierarchical.moves import LargeMoves
from raydist.collectives.hierarchical.plan import HostPlan
from raydist.collectives.hierarchical.small_loads import SmallBroadcast, SmallGather, SmallReduction
from raydist.collectives.hierarchical.staged import StagedReductions
from raydist.collectives.hierarchical.windows import BlockWindows
from raydist.collectives.shared_memory.in_place import SharedTensor
from raydist.collectives.shared_memory.layout import NUM_BAYS
from raydist.collectives.shared_memory.sequence import BayUse
from raydist.collectives.shared_memory.task import Steps

__all__ = ["HostedRank"]

# To all other hosts together. Leaders take one trip where lanes take three, but carry all of it.
_MOST_BY_LEADERS = 512 << 10


@final
class HostedRank:
    """One rank's part in collectives.

    Small tensors go by way of leaders: these reduce or collect what their hosts' ranks have written, tell each other,
    and announce the result.

    Args:
        plan: Who shares memory with whom.
        membership: This rank's place.
        joined: What it has joined.

    Attributes:
        generation: Of its host.
        messages: To other hosts.
        moves: Of large tensors.
        take_note: Whether any rank has marked a call, by its number, that was agreed on; to be asked once.
        most_by_leaders: Bytes of a tensor that is reduced by way of leaders, through bays.
    """

    def __init__(self, plan: HostPlan, membership: Membership, joined: Joined) -> None:
        wires = joined.others.wires
        self.generation = joined.generation
        self.messages = joined.others.messages
        self.moves = LargeMoves(plan, membership.rank, joined.generation, wires)
        self._plan = plan
        self._conference = Conference(plan, joined.generation, wires)
        self.take_note = self._conference.take_note
        windows = BlockWindows(plan)
        exchanges = BlockExchanges(plan, wires, windows.most_bytes)
        self._in_place = InPlaceReductions(plan, joined.generation.board, exchanges, windows)
        self._staged = StagedReductions(plan, joined.generation, exchanges, windows)
        num_others = max(len(plan.hosts) - 1, 1)
        self.most_by_leaders = min(_MOST_BY_LEADERS // num_others, joined.generation.board.layout.bay_bytes)

    def agree(self, number: int) -> Steps:
        """Find out that all ranks have called the same."""
        yield from self._conference.confer(number)

    def reduce_small(
        self,
        number: int,
        flat: torch.Tensor,
        reduction: HostReduction,
        *,
        everywhere: bool = True,
        bay: BayUse | None = None,
    ) -> Steps:
        """Reduce what the ranks have brought, into their slots or into bays, to `flat`."""
        place = None if bay is None else self.generation.board.bays[0][bay.number % NUM_BAYS]
        load = SmallReduction(flat, reduction, lambda: self._brought(number, flat, bay), place)
        yield from self._conference.confer(number, load)
        if everywhere:
            flat.copy_(self._conference.announced(number, load))

    def broadcast_small(self, number: int, data: torch.Tensor, root: int) -> Steps:
        """Fill `data` with what the root has brought."""
        plan = self._plan
        load = SmallBroadcast(plan, data.numel(), root, lambda: self._brought(number, data)[plan.members.index(root)])
        yield from self._conference.confer(number, load)
        data.copy_(self._conference.announced(number, load))

    def gather_small(self, number: int, outputs: Sequence[torch.Tensor]) -> Steps:
        """Fill `outputs` with what the ranks have brought, each as much."""
        plan, size = self._plan, outputs[0].numel()
        load = SmallGather(plan, size, lambda: self._brought(number, outputs[0]))
        yield from self._conference.confer(number, load)
        whole = self._conference.announced(number, load)
        order = [rank for members in plan.hosts for rank in members]
        for place, rank in enumerate(order):
            outputs[rank].copy_(whole[place * size : (place + 1) * size])

    def reduce_large(
        self,
        number: int,
        flat: torch.Tensor,
        reduction: HostReduction,
        shared: SharedTensor | None,
        *,
        everywhere: bool,
    ) -> Steps:
        """Reduce a flat tensor; `shared` is what is known of it where it lies in shared memory."""
        board, size = self.generation.board, len(self._plan.members)
        yield from self.agree(number)
        places = {board.memory_of(member, number) for member in range(size)}
        if shared is not None and places == {shared.number}:
            yield from self._in_place.reduce(number, self._in_place.blocks_of(shared, reduction))
        elif size == 1:
            yield from self._in_place.reduce(number, self._in_place.blocks([flat], reduction))
        else:
            yield from self._staged.reduce(flat, reduction, everywhere=everywhere)

    def _brought(self, number: int, like: torch.Tensor, bay: BayUse | None = None) -> torch.Tensor:
        """What the ranks of this host have written, as the rows of one tensor."""
        layout = self.generation.board.layout
        if bay is None:
            first, stride = layout.slot(0, number), layout.slot(1, 0) - layout.slot(0, 0)
        else:
            first, stride = layout.bay(0, bay.number), layout.bay(1, 0) - layout.bay(0, 0)
        return self.generation.stacked(first, stride, len(self._plan.members), like.numel(), like.dtype)
