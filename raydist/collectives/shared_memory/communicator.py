"""A group whose ranks share a machine, and meet in memory."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import final

import torch

from raydist.collectives.backend import JoiningCommunicator
from raydist.collectives.base import Membership, Work
from raydist.collectives.reducing import reduce_parts
from raydist.collectives.shared_memory.calls import CallTexts, check_parts, describe_tensor
from raydist.collectives.shared_memory.generation import SharedGeneration, TaskWork
from raydist.collectives.shared_memory.in_place import (
    SharedTensors,
    allocation_bytes,
    offer_segment,
    open_offered,
    reduce_in_place,
)
from raydist.collectives.shared_memory.joining import Meeting
from raydist.collectives.shared_memory.layout import CALL_BYTES, CONTRIBUTION_BYTES
from raydist.collectives.shared_memory.segment import Segment
from raydist.collectives.shared_memory.sequence import Body, Brought
from raydist.collectives.shared_memory.staging import Gather, PairReduction, Reduction
from raydist.collectives.shared_memory.task import Steps
from raydist.collectives.translation import describe_operation
from raydist.collectives.wire import Staged, stage_bytes, stage_reduction
from raydist.errors import FailedPreconditionError, InvalidArgumentError
from raydist.values import ReduceOp

__all__ = ["SharedMemoryCommunicator"]


@final
class SharedMemoryCommunicator(JoiningCommunicator):
    """Ranks of one machine. Not for use by several threads at once, `abort` aside.

    Nothing works in the background: a collective goes on while its rank is inside a call of this object, starting
    another one included. So a rank that starts a large collective should wait for it before it does something long.

    Args:
        membership: This rank's place.
        device: Of the CPU.
        timeout_s: The limit of every wait.
    """

    def __init__(self, membership: Membership, device: torch.device, timeout_s: float) -> None:
        self.membership = membership
        self.device = device
        self.timeout_s = timeout_s
        self._meeting = Meeting(membership, timeout_s)
        self._generation: SharedGeneration | None = None
        self._shared = SharedTensors()
        self._calls = CallTexts()

    def start(self) -> None:
        """Meet the other members. Blocking: until all have come, at most `timeout_s`.

        Raises:
            Declined: Not all of them can open one segment; on every rank alike.
        """
        self._generation = SharedGeneration(self.membership, self._meeting.join(), self.timeout_s)

    @property
    def checks_itself(self) -> bool:
        return True

    def allocate(self, sizes: Sequence[tuple[int, torch.dtype]]) -> list[torch.Tensor]:
        layout = hashlib.sha256(repr([(numel, dtype) for numel, dtype in sizes]).encode()).hexdigest()[:16]
        name = f"allocate({len(sizes)} tensors, layout {layout})"
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

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp) -> Work:
        return self._reduce(f"all_reduce({op.value})", tensor, op, everywhere=True)

    def reduce(self, tensor: torch.Tensor, root: int, op: ReduceOp) -> Work:
        self._check_rank("root", root)
        return self._reduce(f"reduce({op.value}, root={root})", tensor, op, everywhere=self.rank == root)

    def all_gather(self, outputs: list[torch.Tensor], tensor: torch.Tensor) -> Work:
        check_parts("all_gather", outputs, tensor, self.world_size)
        mine = stage_bytes(tensor)
        staged = [stage_bytes(output) for output in outputs]
        targets = {rank: one.carrier for rank, one in enumerate(staged)}
        return self._gather("all_gather", tensor, mine.carrier, targets, staged)

    def broadcast(self, tensor: torch.Tensor, root: int) -> Work:
        self._check_rank("root", root)
        return self._broadcast(f"broadcast(root={root})", tensor, root)

    def reduce_scatter(self, output: torch.Tensor, inputs: list[torch.Tensor], op: ReduceOp) -> Work:
        check_parts("reduce_scatter", inputs, output, self.world_size)
        staged = stage_reduction(output, op, 1)
        parts = [stage_reduction(value, op, 1).values.view(-1) for value in inputs]
        flat = staged.values.view(-1)
        name = f"reduce_scatter({op.value})"
        generation = self._open(name)
        small = flat.nbytes * self.world_size <= CONTRIBUTION_BYTES

        def body(number: int) -> Steps | None:
            if small:
                offset = self.rank * flat.nbytes
                slots = [_slot(generation, rank, number, flat, offset) for rank in range(self.world_size)]
                reduce_parts(slots, flat, op)
                staged.deliver()
                return None
            return large()

        def large() -> Steps:
            staging = generation.staging
            windows = staging.whole(flat.numel(), flat.element_size(), num_tensors=self.world_size)
            yield from staging.exchange(windows, Reduction(staging, parts, flat, op, scattered=True))
            staged.deliver()

        brought = tuple((part.data_ptr(), part.nbytes) for part in parts) if small else ()
        return self._start(generation, name, output, body, brings_all=small, brought=brought)

    def send(self, tensor: torch.Tensor, destination: int) -> Work:
        self._check_rank("destination", destination)
        operation = f"send(to={destination})"
        generation = self._open(operation)
        task = generation.mailboxes.send(operation, stage_bytes(tensor).carrier, describe_tensor(tensor), destination)
        return TaskWork(generation, task)

    def recv(self, tensor: torch.Tensor, source: int) -> Work:
        self._check_rank("source", source)
        operation = f"recv(from={source})"
        generation = self._open(operation)
        staged = stage_bytes(tensor)
        task = generation.mailboxes.recv(operation, staged.carrier, describe_tensor(tensor), source, staged.deliver)
        return TaskWork(generation, task)

    def barrier(self) -> None:
        self._start(self._open("barrier"), "barrier", None, lambda number: None, brings_all=True).wait()

    def reconfigure(self, membership: Membership) -> None:
        self.membership.check_successor(membership)
        self.abort()
        self.close()
        self.membership = membership
        self._meeting = Meeting(membership, self.timeout_s)
        self._shared = SharedTensors()
        self.start()

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
        flat = staged.values.view(-1)
        generation = self._open(name)
        small = flat.nbytes <= CONTRIBUTION_BYTES
        place, copies = (0, []) if small else self._shared.find(flat)

        def body(number: int) -> Steps | None:
            if not small:
                return large(number)
            if everywhere:
                reduce_parts([_slot(generation, rank, number, flat, 0) for rank in range(self.world_size)], flat, op)
                staged.deliver()
            return None

        def large(number: int) -> Steps:
            places = {generation.board.memory_of(rank, number) for rank in range(self.world_size)}
            if places == {place} and place:
                yield from reduce_in_place(generation.board, number, copies, op)
                return
            staging, size = generation.staging, flat.element_size()
            if self.world_size == 2:
                pair = PairReduction(staging, flat, op)
                yield from staging.exchange(staging.whole(flat.numel(), size, num_tensors=2), pair)
            else:
                transfer = Reduction(staging, [flat] * self.world_size, flat, op, everywhere=everywhere)
                yield from staging.transfer(staging.sliced(flat.numel(), size), transfer)
            staged.deliver()

        brought = ((flat.data_ptr(), flat.nbytes),) if small else ()
        return self._start(generation, name, tensor, body, brings_all=small, memory=place, brought=brought)

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
    ) -> Work:
        generation = self._open(name)
        num_bytes = tensor.nbytes
        small = num_bytes <= CONTRIBUTION_BYTES

        def body(number: int) -> Steps | None:
            if not small:
                return large()
            for rank, target in targets.items():
                target.copy_(_slot(generation, rank, number, target, 0))
            deliver()
            return None

        def large() -> Steps:
            staging = generation.staging
            yield from staging.exchange(staging.whole(num_bytes, 1, num_tensors=1), Gather(staging, source, targets))
            deliver()

        def deliver() -> None:
            for one in staged:
                one.deliver()

        brought = ((source.data_ptr(), num_bytes),) if small and source is not None else ()
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
    ) -> Work:
        call = self._calls.text(name, tensor)
        task = generation.sequence.call(name, call, body, brings_all=brings_all, memory=memory, brought=brought)
        if generation.sequence.num_begun > 1:
            generation.advance()  # perhaps others have come far enough for what was started earlier
        return TaskWork(generation, task)

    def _check_rank(self, role: str, rank: int) -> None:
        if not 0 <= rank < self.world_size:
            raise InvalidArgumentError(
                f"The {role} must be a rank of group {self.membership.group!r}, 0 to {self.world_size - 1}, got {rank}."
            )

    def _open(self, operation: str) -> SharedGeneration:
        generation = self._generation
        if generation is None:
            raise FailedPreconditionError(
                f"{describe_operation(self.membership, operation)}: the group is closed. Open a new one."
            )
        generation.check(operation)
        return generation


def _slot(generation: SharedGeneration, rank: int, number: int, like: torch.Tensor, offset: int) -> torch.Tensor:
    """What a rank has brought to a collective."""
    place = generation.board.layout.slot(rank, number) + CALL_BYTES + offset
    return generation.view(place, like.numel(), like.dtype)
