"""Large tensors that are moved: each travels once to every other host, and is shared by that host's ranks there.

Those of a host share the work: its k-th rank takes what the k-th ranks of other hosts send.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch

from raydist.collectives.hierarchical.lane import HostReduction
from raydist.collectives.hierarchical.plan import HostPlan
from raydist.collectives.shared_memory.generation import SharedGeneration
from raydist.collectives.shared_memory.staging import Gather, Reduction, Swap
from raydist.collectives.shared_memory.task import Steps
from raydist.collectives.wires.landed import Landed
from raydist.collectives.wires.wires import Wires

__all__ = ["LargeMoves"]


@final
class LargeMoves:
    """One rank's part in them.

    Args:
        plan: Who shares memory with whom.
        rank: This rank.
        generation: Of its host.
        wires: To the other hosts.
    """

    def __init__(self, plan: HostPlan, rank: int, generation: SharedGeneration, wires: Wires) -> None:
        self._plan = plan
        self._rank = rank
        self._staging = generation.staging
        self._wires = wires
        self._size = len(plan.members)
        self._other_hosts = [host for host in range(len(plan.hosts)) if host != plan.host]

    def broadcast(self, data: torch.Tensor, root: int) -> Steps:
        """Fill every rank's flat bytes with the root's."""
        plan = self._plan
        sent = []
        if self._rank == root:
            sent = [self._wires.send(plan.receiver(root, host), data) for host in self._other_hosts]
        source = root if root in plan.members else plan.receiver(root, plan.host)
        if source == self._rank != root:
            yield Landed([self._wires.receive(root, data)])
        yield from self._share({plan.members.index(source): data}, data.numel())
        yield Landed(sent)

    def all_gather(self, outputs: Sequence[torch.Tensor], mine: torch.Tensor) -> Steps:
        """Fill `outputs`, flat bytes by rank, with everybody's; they need not be equally long."""
        plan = self._plan
        own = outputs[self._rank]
        own.copy_(mine)  # before anything arrives: `mine` may be the place of another rank's
        sent = [self._wires.send(plan.receiver(self._rank, host), own) for host in self._other_hosts]
        arriving = {
            rank: self._wires.receive(rank, outputs[rank])
            for host in self._other_hosts
            for rank in plan.hosts[host]
            if plan.receiver(rank, plan.host) == self._rank
        }
        yield from self._share_group(outputs, plan.members)
        for host in self._other_hosts:
            members = plan.hosts[host]
            for start in range(0, len(members), self._size):
                group = members[start : start + self._size]
                yield Landed([arriving[rank] for rank in group if rank in arriving])
                yield from self._share_group(outputs, group)
        yield Landed(sent)

    def all_to_all(self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> Steps:
        """Fill `outputs[r]`, flat bytes, with what rank r has for this one; all are equally long."""
        plan = self._plan
        others = [rank for host in self._other_hosts for rank in plan.hosts[host]]
        transfers = [self._wires.send(rank, inputs[rank]) for rank in others]
        transfers += [self._wires.receive(rank, outputs[rank]) for rank in others]
        at_home = [inputs[rank] for rank in plan.members], [outputs[rank] for rank in plan.members]
        windows = self._staging.whole(inputs[0].numel(), 1, num_tensors=self._size)
        yield from self._staging.exchange(windows, Swap(self._staging, *at_home))
        yield Landed(transfers)

    def reduce_scatter(self, output: torch.Tensor, inputs: Sequence[torch.Tensor], reduction: HostReduction) -> Steps:
        """Fill `output` with the reduction of everybody's part for this rank; flat tensors of one length."""
        plan = self._plan
        parts = [torch.empty_like(output) for _ in plan.hosts]
        transfers = [self._wires.receive(plan.receiver(self._rank, host), parts[host]) for host in self._other_hosts]
        for host in (*self._other_hosts, plan.host):
            members = plan.hosts[host]
            for start in range(0, len(members), self._size):
                group = members[start : start + self._size]
                # Where a host has fewer ranks than this one, some reduce what nobody asks for.
                asked = [inputs[group[min(place, len(group) - 1)]] for place in range(self._size)]
                partial = parts[host] if host == plan.host else torch.empty_like(output)
                yield from self._reduce_at_home(asked, partial, reduction)
                if host != plan.host and plan.place < len(group):
                    transfers.append(self._wires.send(group[plan.place], partial))
        yield Landed(transfers)
        reduction.between(parts, output)

    def _reduce_at_home(self, asked: list[torch.Tensor], partial: torch.Tensor, reduction: HostReduction) -> Steps:
        if self._size == 1:
            partial.copy_(asked[0])
            return
        windows = self._staging.whole(partial.numel(), partial.element_size(), num_tensors=self._size)
        yield from self._staging.exchange(
            windows, Reduction(self._staging, asked, partial, reduction.op, scattered=True)
        )

    def _share_group(self, outputs: Sequence[torch.Tensor], group: Sequence[int]) -> Steps:
        """The ranks of this host have each one of these outputs, in this order, and get the others."""
        longest = max(outputs[rank].numel() for rank in group)
        yield from self._share({place: outputs[rank] for place, rank in enumerate(group)}, longest)

    def _share(self, tensors: dict[int, torch.Tensor], longest: int) -> Steps:
        if self._size == 1 or not longest:
            return
        mine = self._plan.place
        windows = self._staging.whole(longest, 1, num_tensors=1)
        targets = {place: tensor for place, tensor in tensors.items() if place != mine}
        yield from self._staging.exchange(windows, Gather(self._staging, tensors.get(mine), targets))
