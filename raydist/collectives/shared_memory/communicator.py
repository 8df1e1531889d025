"""A group whose ranks share a machine, and meet in memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch

from raydist.collectives.base import Membership, Work
from raydist.collectives.parts import check_parts, check_rows, check_swapped, describe_tensor, rows_name
from raydist.collectives.reducing import reduce_parts
from raydist.collectives.shared_memory.bays import SMALL_BYTES, CombiningTree
from raydist.collectives.shared_memory.comparing import ComparingCommunicator
from raydist.collectives.shared_memory.generation import SharedGeneration, TaskWork
from raydist.collectives.shared_memory.in_place import (
    SharedTensor,
    SharedTensors,
    allocation_bytes,
    allocation_name,
    offer_segment,
    open_offered,
)
from raydist.collectives.shared_memory.joining import Meeting
from raydist.collectives.shared_memory.large_tensors import gather_large, reduce_large, scatter_large, swap_large
from raydist.collectives.shared_memory.layout import CALL_BYTES
from raydist.collectives.shared_memory.segment import Segment
from raydist.collectives.shared_memory.sequence import BayUse, Body, Brought
from raydist.collectives.shared_memory.slots import flat_view, reduce_slots, slot_of
from raydist.collectives.shared_memory.task import Steps
from raydist.collectives.wire import Staged, stage_bytes, stage_reduction
from raydist.values import ReduceOp

__all__ = ["SharedMemoryCommunicator"]


@final
class SharedMemoryCommunicator(ComparingCommunicator):
    """Ranks of one machine. Not for use by several threads at once, `abort` aside.

    Nothing works in the background: a collective goes on while its rank is inside a call of this object, starting
    another one included. So a rank that starts a large collective should wait for it before it does something long.

    Args:
        membership: This rank's place.
        device: Of the CPU.
        timeout_s: The limit of every wait.
    """

    def __init__(self, membership: Membership, device: torch.device, timeout_s: float) -> None:
        self._generation: SharedGeneration | None = None
        super().__init__(membership, device, timeout_s)

    def _prepare(self) -> None:
        self._meeting = Meeting(self.membership, self.timeout_s)
        self._shared = SharedTensors()

    def start(self) -> None:
        """Meet the other members. Blocking: until all have come, at most `timeout_s`.

        Raises:
            Declined: Not all of them can open one segment; on every rank alike.
        """
        self.enter(SharedGeneration(self.membership, self._meeting.join(), self.timeout_s))

    def enter(self, generation: SharedGeneration) -> None:
        """Use a segment that its ranks have joined already."""
        self._generation = generation

    def allocate(self, sizes: Sequence[tuple[int, torch.dtype]]) -> list[torch.Tensor]:
        name = allocation_name(sizes)
        size = allocation_bytes(sizes, self.world_size)
        offer = torch.zeros(CALL_BYTES, dtype=torch.uint8)
        segment: Segment | None = None
        try:
            if self.rank == 0:
                segment = offer_segment(size, offer)
            self._broadcast(name, offer, 0).wait()
            if self.rank != 0:
                segment = open_offered(size, offer)
            agreed = torch.tensor([segment is not None], dtype=torch.uint8)
            self.all_reduce(agreed, ReduceOp.MIN).wait()
        finally:
            if segment is not None:
                segment.close()
                if self.rank == 0:
                    segment.unlink()
        if segment is None or not agreed.item():
            return super().allocate(sizes)
        return self._shared.add(segment, sizes, self.rank, self.world_size)

    def find(self, flat: torch.Tensor) -> SharedTensor | None:
        """What is known of a tensor, if it is one of :meth:`allocate`."""
        return self._shared.find(flat)

    def all_gather(self, outputs: list[torch.Tensor], tensor: torch.Tensor) -> Work:
        check_parts("all_gather", outputs, tensor, self.world_size)
        mine = stage_bytes(tensor)
        staged = [stage_bytes(output) for output in outputs]
        targets = {rank: one.carrier for rank, one in enumerate(staged)}
        return self._gather("all_gather", tensor, mine.carrier, targets, staged)

    def all_gather_rows(self, outputs: list[torch.Tensor], tensor: torch.Tensor) -> Work:
        check_rows(outputs, tensor, self.rank, self.world_size)
        staged = [stage_bytes(output) for output in outputs]
        targets = {rank: one.carrier for rank, one in enumerate(staged)}
        longest = max(output.nbytes for output in outputs)
        mine = stage_bytes(tensor).carrier
        return self._gather(rows_name(outputs), tensor[:0], mine, targets, staged, longest=longest)

    def all_to_all(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor]) -> Work:
        check_swapped(outputs, inputs, self.world_size)
        generation = self.opened("all_to_all")
        staged = [stage_bytes(output) for output in outputs]
        parts = [stage_bytes(value).carrier for value in inputs]
        num_bytes = parts[0].numel()
        small = num_bytes * self.world_size <= generation.board.layout.contribution_bytes

        def body(number: int) -> Steps | None:
            if not small:
                return swap_large(generation, parts, staged)
            for rank, output in enumerate(staged):
                output.carrier.copy_(slot_of(generation, rank, number, output.carrier, self.rank * num_bytes))
                output.deliver()
            return None

        brought = tuple((part.data_ptr(), part.nbytes) for part in parts) if small else ()
        return self._start(generation, "all_to_all", inputs[0], body, brings_all=small, brought=brought)

    def broadcast(self, tensor: torch.Tensor, root: int) -> Work:
        self._check_rank("root", root)
        return self._broadcast(f"broadcast(root={root})", tensor, root)

    def reduce_scatter(self, output: torch.Tensor, inputs: list[torch.Tensor], op: ReduceOp) -> Work:
        check_parts("reduce_scatter", inputs, output, self.world_size)
        staged = stage_reduction(output, op, 1)
        parts = [stage_reduction(value, op, 1).values.view(-1) for value in inputs]
        flat = flat_view(staged.values)
        name = f"reduce_scatter({op.value})"
        generation = self.opened(name)
        small = flat.nbytes * self.world_size <= generation.board.layout.contribution_bytes

        def body(number: int) -> Steps | None:
            if not small:
                return scatter_large(generation, staged, parts, flat, op)
            offset = self.rank * flat.nbytes
            slots = [slot_of(generation, rank, number, flat, offset) for rank in range(self.world_size)]
            reduce_parts(slots, flat, op)
            staged.deliver()
            return None

        brought = tuple((part.data_ptr(), part.nbytes) for part in parts) if small else ()
        return self._start(generation, name, output, body, brings_all=small, brought=brought)

    def send(self, tensor: torch.Tensor, destination: int) -> Work:
        self._check_rank("destination", destination)
        operation = f"send(to={destination})"
        generation = self.opened(operation)
        task = generation.mailboxes.send(operation, stage_bytes(tensor).carrier, describe_tensor(tensor), destination)
        return TaskWork(generation, task)

    def recv(self, tensor: torch.Tensor, source: int) -> Work:
        self._check_rank("source", source)
        operation = f"recv(from={source})"
        generation = self.opened(operation)
        staged = stage_bytes(tensor)
        task = generation.mailboxes.recv(operation, staged.carrier, describe_tensor(tensor), source, staged.deliver)
        return TaskWork(generation, task)

    def barrier(self) -> None:
        self._start(self.opened("barrier"), "barrier", None, lambda number: None, brings_all=True).wait()

    def abort(self) -> None:
        self._meeting.abort()
        if self._generation is not None:
            self._generation.abort()

    def close(self) -> None:
        generation, self._generation = self._generation, None
        if generation is not None:
            generation.leave()

    # --- how collectives are carried out ------------------------------------------------------------------------------

    def _reduce(self, name: str, tensor: torch.Tensor, op: ReduceOp, *, everywhere: bool) -> Work:
        staged = stage_reduction(tensor, op, 1)
        flat = flat_view(staged.values)
        generation = self.opened(name)
        layout = generation.board.layout
        bay_bytes = layout.bay_bytes
        small = flat.nbytes <= (SMALL_BYTES if bay_bytes else layout.contribution_bytes)
        if not small and flat.nbytes <= bay_bytes:
            return self._reduce_in_bays(generation, name, tensor, staged, flat, op, everywhere=everywhere)
        memory = None if small else self._shared.find(flat)

        def body(number: int) -> Steps | None:
            if not small:
                return reduce_large(generation, number, staged, flat, op, everywhere=everywhere, memory=memory)
            if everywhere:
                reduce_slots(generation, number, flat, op)
                staged.deliver()
            return None

        brought = ((flat.data_ptr(), flat.nbytes),) if small else ()
        place = 0 if memory is None else memory.number
        return self._start(generation, name, tensor, body, brings_all=small, memory=place, brought=brought)

    def _reduce_in_bays(
        self,
        generation: SharedGeneration,
        name: str,
        tensor: torch.Tensor,
        staged: Staged,
        flat: torch.Tensor,
        op: ReduceOp,
        *,
        everywhere: bool,
    ) -> Work:
        bay = generation.sequence.next_bay()
        meeting = CombiningTree(generation, bay, flat, op)

        def body(number: int) -> None:
            if everywhere:
                meeting.copy_total()
                staged.deliver()

        brought = ((flat.data_ptr(), flat.nbytes),)
        use = BayUse(bay, meeting)
        return self._start(generation, name, tensor, body, brings_all=True, brought=brought, bay=use)

    def _broadcast(self, name: str, tensor: torch.Tensor, root: int) -> Work:
        staged = stage_bytes(tensor)
        source, targets = (staged.carrier, {}) if self.rank == root else (None, {root: staged.carrier})
        return self._gather(name, tensor, source, targets, [staged])

    def _gather(
        self,
        name: str,
        tensor: torch.Tensor,
        source: torch.Tensor | None,
        targets: dict[int, torch.Tensor],
        staged: list[Staged],
        *,
        longest: int | None = None,
    ) -> Work:
        generation = self.opened(name)
        num_bytes = tensor.nbytes if longest is None else longest
        small = num_bytes <= generation.board.layout.contribution_bytes

        def body(number: int) -> Steps | None:
            if not small:
                return gather_large(generation, num_bytes, source, targets, deliver)
            for rank, target in targets.items():
                target.copy_(slot_of(generation, rank, number, target, 0))
            deliver()
            return None

        def deliver() -> None:
            for one in staged:
                one.deliver()

        brought = ((source.data_ptr(), source.nbytes),) if small and source is not None else ()
        return self._start(generation, name, tensor, body, brings_all=small, brought=brought)

    def _start(
        self,
        generation: SharedGeneration,
        name: str,
        tensor: torch.Tensor | None,
        body: Body,
        *,
        brings_all: bool,
        memory: int = 0,
        brought: Brought = (),
        bay: BayUse | None = None,
    ) -> Work:
        call = self._calls.next_call(name, tensor)
        task = generation.sequence.call(
            name, call, body, brings_all=brings_all, memory=memory, brought=brought, bay=bay
        )
        if generation.sequence.num_begun > 1:
            generation.advance()  # perhaps others have come far enough for what was started earlier
        return TaskWork(generation, task)

    def opened(self, operation: str) -> SharedGeneration:
        """The present generation; raises where it has failed, or was left."""
        generation = self._generation
        if generation is None:
            raise self._closed(operation)
        generation.check(operation)
        return generation
