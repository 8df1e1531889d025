"""A group of several hosts: shared memory inside each, connections between them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import final

import torch

from raydist.collectives.base import Work
from raydist.collectives.hierarchical.joining import HostsMeeting
from raydist.collectives.hierarchical.lane import HostReduction
from raydist.collectives.hierarchical.plan import HostPlan
from raydist.collectives.hierarchical.ranks import HostedRank
from raydist.collectives.parts import check_parts, check_rows, check_swapped, describe_tensor, rows_name
from raydist.collectives.shared_memory.communicator import SharedMemoryCommunicator
from raydist.collectives.shared_memory.comparing import ComparingCommunicator
from raydist.collectives.shared_memory.generation import TaskWork
from raydist.collectives.shared_memory.in_place import allocation_name
from raydist.collectives.shared_memory.layout import CONTRIBUTION_BYTES
from raydist.collectives.shared_memory.sequence import BayUse, Brought
from raydist.collectives.shared_memory.slots import flat_view
from raydist.collectives.shared_memory.task import Steps
from raydist.collectives.wire import Staged, stage_bytes, stage_reduction
from raydist.values import ReduceOp

__all__ = ["HierarchicalCommunicator"]


@final
class HierarchicalCommunicator(ComparingCommunicator):
    """Ranks of several hosts. Not for use by several threads at once, `abort` aside.

    What passes between hosts goes on by itself; what is done inside a host goes on while its ranks are inside calls of
    this object.

    Args:
        membership: This rank's place; it says who is on which host, and there are at least two.
        device: Of the CPU.
        timeout_s: The limit of every wait.
    """

    def _prepare(self) -> None:
        self._plan = HostPlan.of(self.membership)
        self._leads = self._plan.leads
        self._meeting = HostsMeeting(self.membership, self._plan, self.timeout_s)
        self._home = SharedMemoryCommunicator(self._plan.at_home(self.membership), self.device, self.timeout_s)
        self._joined: HostedRank | None = None
        self._reductions = {op: HostReduction(op, self.world_size) for op in ReduceOp}

    def start(self) -> None:
        joined = self._meeting.join()
        self._home.enter(joined.generation)
        self._joined = HostedRank(self._plan, self.membership, joined)

    def allocate(self, sizes: Sequence[tuple[int, torch.dtype]]) -> list[torch.Tensor]:
        rank = self._open("allocate")
        name = allocation_name(sizes)
        self._start(rank, name, None, lambda number: rank.agree(number)).wait()
        return self._home.allocate(sizes)

    def all_gather(self, outputs: list[torch.Tensor], tensor: torch.Tensor) -> Work:
        check_parts("all_gather", outputs, tensor, self.world_size)
        return self._gather("all_gather", tensor, stage_bytes(tensor), [stage_bytes(output) for output in outputs])

    def all_gather_rows(self, outputs: list[torch.Tensor], tensor: torch.Tensor) -> Work:
        check_rows(outputs, tensor, self.rank, self.world_size)
        staged = [stage_bytes(output) for output in outputs]
        return self._gather(rows_name(outputs), tensor[:0], stage_bytes(tensor), staged, uneven=True)

    def all_to_all(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor]) -> Work:
        check_swapped(outputs, inputs, self.world_size)
        rank, staged = self._open("all_to_all"), [stage_bytes(output) for output in outputs]
        parts = [stage_bytes(value).carrier for value in inputs]

        def body(number: int) -> Steps:
            yield from rank.agree(number)
            if parts[0].numel():
                yield from rank.moves.all_to_all([output.carrier for output in staged], parts)
            for output in staged:
                output.deliver()

        return self._start(rank, "all_to_all", inputs[0], body)

    def broadcast(self, tensor: torch.Tensor, root: int) -> Work:
        self._check_rank("root", root)
        rank, staged, name = self._open("broadcast"), stage_bytes(tensor), f"broadcast(root={root})"
        data = staged.carrier
        small = data.nbytes <= CONTRIBUTION_BYTES

        def body(number: int) -> Steps:
            if small:
                yield from rank.broadcast_small(number, data, root)
            else:
                yield from rank.agree(number)
                yield from rank.moves.broadcast(data, root)
            staged.deliver()

        brought = ((data.data_ptr(), data.nbytes),) if small and self.rank == root else ()
        return self._start(rank, name, tensor, body, brought=brought)

    def reduce_scatter(self, output: torch.Tensor, inputs: list[torch.Tensor], op: ReduceOp) -> Work:
        check_parts("reduce_scatter", inputs, output, self.world_size)
        rank, staged = self._open("reduce_scatter"), stage_reduction(output, op, 1)
        parts = [stage_reduction(value, op, 1).values.view(-1) for value in inputs]
        flat, reduction = staged.values.view(-1), self._reductions[op]
        small = flat.nbytes * self.world_size <= CONTRIBUTION_BYTES

        def body(number: int) -> Steps:
            if small:
                whole = torch.empty(flat.numel() * self.world_size, dtype=flat.dtype)
                yield from rank.reduce_small(number, whole, reduction)
                flat.copy_(whole[self.rank * flat.numel() : (self.rank + 1) * flat.numel()])
            else:
                yield from rank.agree(number)
                yield from rank.moves.reduce_scatter(flat, parts, reduction)
            staged.deliver()

        brought = tuple((part.data_ptr(), part.nbytes) for part in parts) if small else ()
        return self._start(rank, f"reduce_scatter({op.value})", output, body, brought=brought)

    def send(self, tensor: torch.Tensor, destination: int) -> Work:
        self._check_rank("destination", destination)
        if destination in self._plan.members:
            return self._home.send(tensor, self._plan.members.index(destination))
        rank, operation = self._open("send"), f"send(to={destination})"
        data = stage_bytes(tensor).carrier
        task = rank.messages.send(operation, data, describe_tensor(tensor), destination)
        return TaskWork(rank.generation, task)

    def recv(self, tensor: torch.Tensor, source: int) -> Work:
        self._check_rank("source", source)
        if source in self._plan.members:
            return self._home.recv(tensor, self._plan.members.index(source))
        rank, operation, staged = self._open("recv"), f"recv(from={source})", stage_bytes(tensor)
        task = rank.messages.recv(operation, staged.carrier, describe_tensor(tensor), source, staged.deliver)
        return TaskWork(rank.generation, task)

    def barrier(self) -> None:
        rank = self._open("barrier")
        self._start(rank, "barrier", None, lambda number: rank.agree(number)).wait()

    def abort(self) -> None:
        self._meeting.abort()
        self._home.abort()

    def close(self) -> None:
        self._joined = None
        self._home.close()

    # --- how collectives are carried out ------------------------------------------------------------------------------

    def _reduce(self, name: str, tensor: torch.Tensor, op: ReduceOp, *, everywhere: bool) -> Work:
        rank, staged = self._open(name), stage_reduction(tensor, op, 1)
        flat, reduction = flat_view(staged.values), self._reductions[op]
        small = flat.nbytes <= CONTRIBUTION_BYTES
        bay = BayUse(rank.generation.sequence.next_bay()) if not small and flat.nbytes <= rank.most_by_leaders else None
        brings = small or bay is not None
        shared = None if brings else self._home.find(flat)

        def body(number: int) -> Steps:
            if brings:
                yield from rank.reduce_small(number, flat, reduction, everywhere=everywhere, bay=bay)
            else:
                yield from rank.reduce_large(number, flat, reduction, shared, everywhere=everywhere)
            if everywhere:
                staged.deliver()

        brought = ((flat.data_ptr(), flat.nbytes),) if brings else ()
        place = 0 if shared is None else shared.number
        return self._start(rank, name, tensor, body, memory=place, brought=brought, bay=bay)

    def _gather(
        self, name: str, tensor: torch.Tensor, mine: Staged, staged: list[Staged], *, uneven: bool = False
    ) -> Work:
        rank = self._open(name)
        small = not uneven and mine.carrier.nbytes * self.world_size <= CONTRIBUTION_BYTES
        carriers = [output.carrier for output in staged]

        def body(number: int) -> Steps:
            if small:
                yield from rank.gather_small(number, carriers)
            else:
                yield from rank.agree(number)
                yield from rank.moves.all_gather(carriers, mine.carrier)
            for output in staged:
                output.deliver()

        brought = ((mine.carrier.data_ptr(), mine.carrier.nbytes),) if small else ()
        return self._start(rank, name, tensor, body, brought=brought)

    def _start(
        self,
        rank: HostedRank,
        name: str,
        tensor: torch.Tensor | None,
        body: Callable[[int], Steps],
        *,
        memory: int = 0,
        brought: Brought = (),
        bay: BayUse | None = None,
    ) -> Work:
        generation = rank.generation
        left_at = generation.bell_where_idle() if brought and not self._leads else None

        def steps(number: int) -> Steps:
            yield from body(number)
            task.noted = rank.take_note(number)

        task = generation.sequence.call(
            name,
            self._calls.next_call(name, tensor),
            steps,
            brings_all=False,
            memory=memory,
            brought=brought,
            bay=bay,
            led=True,
        )
        task.left_at = left_at  # what ranks have brought, their leader takes further
        if left_at is None:
            generation.advance()
        return TaskWork(generation, task)

    def _open(self, operation: str) -> HostedRank:
        joined = self._joined
        if joined is None:
            raise self._closed(operation)
        joined.generation.check(operation)
        return joined
