"""A group whose ranks share a machine, and meet in memory."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from typing import final

import torch

from raydist.collectives.backend import JoiningCommunicator
from raydist.collectives.base import Membership, Work
from raydist.collectives.folding import fold
from raydist.collectives.shared_memory.generation import SharedGeneration, TaskWork
from raydist.collectives.shared_memory.in_place import SharedTensors, allocation_bytes, reduce_in_place
from raydist.collectives.shared_memory.joining import Meeting
from raydist.collectives.shared_memory.layout import CALL_BYTES, CONTRIBUTION_BYTES
from raydist.collectives.shared_memory.segment import TOKEN_BYTES, Segment
from raydist.collectives.shared_memory.sequence import Body, Brought
from raydist.collectives.shared_memory.staging import Gather, Reduction
from raydist.collectives.shared_memory.task import Steps
from raydist.collectives.translation import describe_operation
from raydist.collectives.wire import Staged, stage_bytes, stage_reduction
from raydist.errors import FailedPreconditionError
from raydist.values import ReduceOp

__all__ = ["SharedMemoryCommunicator"]

_log = logging.getLogger("raydist")

_CALL_TEXT = CALL_BYTES - 8
_KNOWN_CALLS = 1024


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
        self._calls: dict[tuple[str, torch.dtype, torch.Size], bytes] = {}

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
        text = hashlib.sha256(repr(sizes).encode()).hexdigest()[:16]
        name = f"allocate({len(sizes)} tensors, layout {text})"
        size = allocation_bytes(sizes, self.world_size)
        offer = torch.zeros(CALL_BYTES, dtype=torch.uint8)
        segment: Segment | None = None
        try:
            if self.rank == 0:
                segment = _try_to_create(size, offer)
            self._broadcast(name, offer, 0).wait()
            if self.rank != 0:
                segment = _try_to_open(size, offer)
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
        return self._reduce(f"reduce({op.value}, root={root})", tensor, op, everywhere=self.rank == root)

    def all_gather(self, outputs: list[torch.Tensor], tensor: torch.Tensor) -> Work:
        mine = stage_bytes(tensor)
        staged = [stage_bytes(output) for output in outputs]
        targets = {rank: one.carrier for rank, one in enumerate(staged)}
        return self._gather("all_gather", tensor, mine.carrier, targets, staged)

    def broadcast(self, tensor: torch.Tensor, root: int) -> Work:
        return self._broadcast(f"broadcast(root={root})", tensor, root)

    def reduce_scatter(self, output: torch.Tensor, inputs: list[torch.Tensor], op: ReduceOp) -> Work:
        staged = stage_reduction(output, op, 1)
        parts = [stage_reduction(value, op, 1).values.view(-1) for value in inputs]
        flat = staged.values.view(-1)
        name = f"reduce_scatter({op.value})"
        generation = self._open(name)
        small = flat.nbytes * self.world_size <= CONTRIBUTION_BYTES

        def body(number: int) -> Steps | None:
            if small:
                offset = self.rank * flat.nbytes
                fold([_slot(generation, rank, number, flat, offset) for rank in range(self.world_size)], flat, op)
                staged.deliver()
                return None
            return large()

        def large() -> Steps:
            staging = generation.staging
            windows = staging.whole(flat.numel(), flat.element_size(), num_tensors=self.world_size)
            yield from staging.transfer(windows, Reduction(staging, parts, flat, op, scattered=True))
            staged.deliver()

        brought = tuple((part.data_ptr(), part.nbytes) for part in parts) if small else ()
        return self._start(generation, name, output, body, brings_all=small, brought=brought)

    def send(self, tensor: torch.Tensor, destination: int) -> Work:
        operation = f"send(to={destination})"
        generation = self._open(operation)
        task = generation.mailboxes.send(operation, stage_bytes(tensor).carrier, _describe(tensor), destination)
        return TaskWork(generation, task)

    def recv(self, tensor: torch.Tensor, source: int) -> Work:
        operation = f"recv(from={source})"
        generation = self._open(operation)
        staged = stage_bytes(tensor)
        task = generation.mailboxes.recv(operation, staged.carrier, _describe(tensor), source, staged.deliver)
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
                fold([_slot(generation, rank, number, flat, 0) for rank in range(self.world_size)], flat, op)
                staged.deliver()
            return None

        def large(number: int) -> Steps:
            places = {generation.board.memory_of(rank, number) for rank in range(self.world_size)}
            if places == {place} and place:
                yield from reduce_in_place(generation.board, number, copies, op)
                return
            staging = generation.staging
            transfer = Reduction(staging, [flat] * self.world_size, flat, op, everywhere=everywhere)
            yield from staging.transfer(staging.sliced(flat.numel(), flat.element_size()), transfer)
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
            yield from staging.transfer(staging.whole(num_bytes, 1, num_tensors=1), Gather(staging, source, targets))
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
        call = self._describe_call(name, tensor)
        task = generation.sequence.call(name, call, body, brings_all=brings_all, memory=memory, brought=brought)
        generation.advance()  # perhaps others have come far enough for what was started earlier
        return TaskWork(generation, task)

    def _open(self, operation: str) -> SharedGeneration:
        generation = self._generation
        if generation is None:
            raise FailedPreconditionError(
                f"{describe_operation(self.membership, operation)}: the group is closed. Open a new one."
            )
        generation.check(operation)
        return generation

    def _describe_call(self, name: str, tensor: torch.Tensor | None) -> bytes:
        """The text that is compared, made once for each kind of call."""
        if tensor is None:
            return name.encode()
        key = (name, tensor.dtype, tensor.shape)
        known = self._calls.get(key)
        if known is None:
            known = f"{name} of {_describe(tensor)}".encode()
            if len(known) > _CALL_TEXT:
                known = known[: _CALL_TEXT - 17] + b" " + hashlib.sha256(known).hexdigest()[:16].encode()
            if len(self._calls) >= _KNOWN_CALLS:
                self._calls.clear()
            self._calls[key] = known
        return known


def _slot(generation: SharedGeneration, rank: int, number: int, like: torch.Tensor, offset: int) -> torch.Tensor:
    """What a rank has brought to a collective."""
    place = generation.board.layout.slot(rank, number) + CALL_BYTES + offset
    return generation.segment.view(place, like.numel(), like.dtype)


def _describe(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} {tuple(tensor.shape)}"


def _try_to_create(size: int, offer: torch.Tensor) -> Segment | None:
    """A new segment, and in `offer` how to open it; None, and an empty offer, where there is no room."""
    try:
        segment = Segment.create(size)
    except OSError as error:
        _log.warning("Tensors of %d bytes are not shared between ranks: %s. Reducing them takes longer.", size, error)
        return None
    text = segment.token + segment.name.encode()
    offer[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    return segment


def _try_to_open(size: int, offer: torch.Tensor) -> Segment | None:
    text = bytes(offer.tolist()).rstrip(b"\0")
    try:
        return Segment.open(text[TOKEN_BYTES:].decode(), size, text[:TOKEN_BYTES]) if text else None
    except OSError:
        return None
