"""Communicators of CPU ranks on one host, in shared memory."""

from __future__ import annotations

import hashlib
import logging
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Final, final

import torch

from raydist.collectives.base import ALL_REDUCE, Backend, JoiningCommunicator, Membership, Work
from raydist.collectives.point_to_point import PointToPoint
from raydist.collectives.reducing import reduce_parts
from raydist.collectives.shared_memory.control import Layout
from raydist.collectives.shared_memory.generation import CallTexts, Generation
from raydist.collectives.shared_memory.joining import Rendezvous
from raydist.collectives.shared_memory.transfers import SharedTensor, Steps
from raydist.collectives.tensors import (
    Staged,
    check_parts,
    check_rank,
    check_rows,
    check_swapped,
    rows_name,
    stage_bytes,
    stage_reduction,
)
from raydist.collectives.translation import describe_operation, describe_ranks
from raydist.errors import FailedPreconditionError, RaydistError, UnavailableError
from raydist.shared_segment import TOKEN_BYTES, Segment
from raydist.values import ReduceOp

__all__ = ["SharedMemoryBackend", "SharedMemoryCommunicator"]

_log = logging.getLogger("raydist")
_LINE, _PAGE = 64, 4096
_OFFER_BYTES = 256


@final
class SharedMemoryBackend(Backend):
    """Backend in shared memory. Declines groups whose ranks are on several hosts or cannot map one segment."""

    name = "shm"
    devices = ("cpu",)

    def declines(self, membership: Membership) -> str | None:
        hosts = tuple(dict.fromkeys(membership.hosts))
        return f"its ranks are on {len(hosts)} hosts ({', '.join(hosts[:3])}, ...)" if len(hosts) > 1 else None

    def communicator(self, membership: Membership, device: torch.device, timeout_s: float) -> SharedMemoryCommunicator:
        return SharedMemoryCommunicator(membership, device, timeout_s)


@final
class SharedMemoryCommunicator(JoiningCommunicator):
    """A communicator of ranks on one host. Not thread-safe, except for `abort`.

    There is no background thread: a collective proceeds only while its rank is inside a call of this object, which may
    be the start of another collective. A rank that starts a large collective should wait for it before a long task.

    Args:
        membership: Membership of this rank in the group.
        device: The CPU.
        timeout_s: Limit of every wait, in seconds.
        members: The ranks that share the memory, if the group has ranks on other hosts as well. Roots and parts are
            then numbered within `members`, messages name ranks of the whole group, and failures reach other hosts.
    """

    checks_itself: Final = True

    def __init__(
        self, membership: Membership, device: torch.device, timeout_s: float, members: tuple[int, ...] | None = None
    ) -> None:
        self._named_members = members
        self._calls = CallTexts()
        self._generation: Generation | None = None
        super().__init__(membership, device, timeout_s)

    def _prepare(self) -> None:
        self._members = self._named_members or tuple(range(self.membership.world_size))
        self._place = self._members.index(self.membership.rank)
        self._layout = Layout.of(len(self._members))
        self._rendezvous = Rendezvous(self.membership, self._members, self._layout.size, self.timeout_s)
        self._messages = PointToPoint(self.membership, self.timeout_s, self._check_peer)
        self._shared: dict[int, SharedTensor] = {}
        self._num_shared = 0

    @property
    def rank(self) -> int:
        return self._place

    @property
    def world_size(self) -> int:
        return len(self._members)

    def start(self) -> None:
        """Join the group. Blocking: until all members have joined, at most `timeout_s`.

        Raises:
            Declined: A member cannot open the segment. All ranks raise it.
        """
        segment, bulletin = self._rendezvous.join()
        self._generation = Generation(
            self.membership,
            self._members,
            segment,
            self._layout,
            self.timeout_s,
            bulletin if self._named_members else None,
        )

    def announce(self, what: str) -> None:
        self._calls.announce(what)

    def allocate(self, sizes: Sequence[tuple[int, torch.dtype]]) -> list[torch.Tensor]:
        offsets = [0]
        for numel, dtype in sizes:
            offsets.append(offsets[-1] + -(-numel * dtype.itemsize // _LINE) * _LINE)
        stride = -(-offsets[-1] // _PAGE) * _PAGE
        segment = self._allocate_segment(_allocation_name(sizes), _PAGE + self.world_size * stride)
        if segment is None:
            return super().allocate(sizes)
        mine = []
        for (numel, dtype), offset in zip(sizes, offsets, strict=False):
            places = [_PAGE + rank * stride + offset for rank in range(self.world_size)]
            tensor = segment.view(places[self.rank], numel, dtype)
            mine.append(tensor)
            self._num_shared += 1
            if numel:
                # New tensors, since views of the returned one would keep it alive.
                copies = [segment.view(place, numel, dtype) for place in places]
                self._shared[tensor.data_ptr()] = SharedTensor(self._num_shared, copies, self.rank)
                weakref.finalize(tensor, self._shared.pop, tensor.data_ptr(), None).atexit = False
        return mine

    def _allocate_segment(self, name: str, size: int) -> Segment | None:
        """Return a new segment that all ranks have opened; None if a rank cannot open it."""
        offer = torch.zeros(_OFFER_BYTES, dtype=torch.uint8)
        segment: Segment | None = None
        try:
            if self.rank == 0:
                segment = _offer_segment(size, offer)
            self._broadcast(name, offer, 0).wait()
            if self.rank != 0:
                segment = _open_offered(size, offer)
            agreed = torch.tensor([segment is not None], dtype=torch.uint8)
            self.all_reduce(agreed, ReduceOp.MIN).wait()
        finally:
            if segment is not None:
                segment.close()
        return segment if agreed.item() else None

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp) -> Work:
        return self._reduce(ALL_REDUCE[op], tensor, op, wanted=True)

    def reduce(self, tensor: torch.Tensor, root: int, op: ReduceOp) -> Work:
        self._check_rank("root", root)
        return self._reduce(f"reduce({op.value}, root={root})", tensor, op, wanted=self.rank == root)

    def all_gather(self, outputs: list[torch.Tensor], tensor: torch.Tensor) -> Work:
        check_parts("all_gather", outputs, tensor, self.world_size)
        return self._gather("all_gather", tensor, stage_bytes(tensor), outputs, tensor.nbytes)

    def all_gather_rows(self, outputs: list[torch.Tensor], tensor: torch.Tensor) -> Work:
        check_rows(outputs, tensor, self.rank, self.world_size)
        longest = max(output.nbytes for output in outputs)
        return self._gather(rows_name(outputs), tensor[:0], stage_bytes(tensor), outputs, longest)

    def broadcast(self, tensor: torch.Tensor, root: int) -> Work:
        self._check_rank("root", root)
        return self._broadcast(f"broadcast(root={root})", tensor, root)

    def all_to_all(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor]) -> Work:
        check_swapped(outputs, inputs, self.world_size)
        generation, rank = self._opened("all_to_all"), self.rank
        staged = [stage_bytes(output) for output in outputs]
        parts = [stage_bytes(value).carrier for value in inputs]
        length = parts[0].numel()
        small = length * self.world_size <= self._layout.slot_bytes

        def body(number: int) -> Steps | None:
            if not small:
                return _then(generation.transfers.all_to_all([one.carrier for one in staged], parts), staged)
            for source, output in enumerate(staged):
                output.carrier.copy_(generation.slot(source, number, output.carrier, rank * length))
                output.deliver()
            return None

        text = self._calls.next_call("all_to_all", inputs[0])
        return generation.call("all_to_all", text, body, small=small, brought=parts if small else ())

    def reduce_scatter(self, output: torch.Tensor, inputs: list[torch.Tensor], op: ReduceOp) -> Work:
        check_parts("reduce_scatter", inputs, output, self.world_size)
        name, rank = f"reduce_scatter({op.value})", self.rank
        generation = self._opened(name)
        staged = stage_reduction(output, op, 1)
        parts = [stage_reduction(value, op, 1).values.view(-1) for value in inputs]
        flat = staged.values.view(-1)
        small = flat.nbytes * self.world_size <= self._layout.slot_bytes

        def body(number: int) -> Steps | None:
            if not small:
                return _then(generation.transfers.reduce_scatter(parts, flat, op), [staged])
            offset = rank * flat.nbytes
            reduce_parts([generation.slot(one, number, flat, offset) for one in range(len(parts))], flat, op)
            staged.deliver()
            return None

        text = self._calls.next_call(name, output)
        return generation.call(name, text, body, small=small, brought=parts if small else ())

    def barrier(self) -> None:
        text = self._calls.next_call("barrier", None)
        self._opened("barrier").call("barrier", text, lambda number: None, small=True).wait()

    def send(self, tensor: torch.Tensor, destination: int) -> Work:
        self._check_rank("destination", destination)
        self.check(f"send(to={destination})")
        return self._messages.send(tensor, destination)

    def recv(self, tensor: torch.Tensor, source: int) -> Work:
        self._check_rank("source", source)
        self.check(f"recv(from={source})")
        return self._messages.recv(tensor, source)

    def abort(self) -> None:
        self._rendezvous.abort()
        if self._generation is not None:
            self._generation.abort()

    def close(self) -> None:
        self._messages.close()
        generation, self._generation = self._generation, None
        if generation is not None:
            generation.leave()

    def check(self, name: str) -> None:
        """Raise an error if the group has failed or is closed."""
        self._opened(name).check(name)

    def hear(self) -> None:
        """Check for failures on other hosts. Does not raise; `check` does."""
        if self._generation is not None:
            self._generation.hear()

    def fail(self, failure: RaydistError) -> None:
        """Fail the group for every member, on all hosts."""
        if self._generation is not None:
            self._generation.fail(failure)

    # --- implementation of collectives --------------------------------------------------------------------------------

    def _reduce(self, name: str, tensor: torch.Tensor, op: ReduceOp, *, wanted: bool) -> Work:
        staged = stage_reduction(tensor, op, 1)
        flat = staged.values if staged.values.dim() == 1 else staged.values.view(-1)
        generation, world_size = self._opened(name), len(self._members)
        small = flat.nbytes <= self._layout.slot_bytes
        shared = None if small else self._find(flat)

        def body(number: int) -> Steps | None:
            if not small:
                if shared is not None and generation.control.all_share(number, shared.number):
                    return shared.reduce(generation.control, number, op)
                return _then(generation.transfers.all_reduce(flat, op, wanted=wanted), [staged])
            if wanted:
                reduce_parts([generation.slot(rank, number, flat) for rank in range(world_size)], flat, op)
                staged.deliver()
            return None

        text, place = self._calls.next_call(name, tensor), 0 if shared is None else shared.number
        return generation.call(name, text, body, small=small, shared=place, brought=(flat,) if small else ())

    def _find(self, flat: torch.Tensor) -> SharedTensor | None:
        """Return the shared tensor for a whole tensor of :meth:`allocate`, and None for any other tensor."""
        known = self._shared.get(flat.data_ptr())
        if known is None or known.copies[0].dtype != flat.dtype or known.copies[0].numel() != flat.numel():
            return None
        return known

    def _gather(
        self, name: str, shown: torch.Tensor, mine: Staged, outputs: Sequence[torch.Tensor], longest: int
    ) -> Work:
        staged = [stage_bytes(output) for output in outputs]
        return self._show(name, shown, mine.carrier, dict(enumerate(staged)), longest)

    def _broadcast(self, name: str, tensor: torch.Tensor, root: int) -> Work:
        staged = stage_bytes(tensor)
        source, targets = (staged.carrier, {}) if self.rank == root else (None, {root: staged})
        return self._show(name, tensor, source, targets, tensor.nbytes)

    def _show(
        self, name: str, shown: torch.Tensor, source: torch.Tensor | None, targets: dict[int, Staged], longest: int
    ) -> Work:
        """Start a collective in which `source` of each rank is copied to `targets` of other ranks."""
        generation = self._opened(name)
        small = longest <= self._layout.slot_bytes

        def body(number: int) -> Steps | None:
            carriers = {rank: target.carrier for rank, target in targets.items()}
            if not small:
                return _then(generation.transfers.gather(longest, source, carriers), targets.values())
            for rank, target in targets.items():
                target.carrier.copy_(generation.slot(rank, number, target.carrier))
                target.deliver()
            return None

        text = self._calls.next_call(name, shown)
        brought = (source,) if small and source is not None else ()
        return generation.call(name, text, body, small=small, brought=brought)

    def _opened(self, name: str) -> Generation:
        """Return the present generation; raise an error if the group is closed."""
        if self._generation is None:
            raise FailedPreconditionError(
                f"{describe_operation(self.membership, name)}: the group is closed. Open a new one."
            )
        return self._generation

    def _check_rank(self, role: str, rank: int) -> None:
        check_rank(role, rank, replace(self.membership, world_size=self.world_size))

    def _check_peer(self, name: str, rank: int) -> None:
        """Raise an error if the group has failed or the other rank of a message has died."""
        generation = self._opened(name)
        generation.check(name)
        if not generation.is_alive(rank):
            what = describe_operation(self.membership, name)
            raise UnavailableError(f"{what} failed: {describe_ranks([rank])} is gone.")


def _then(steps: Steps, staged: Iterable[Staged]) -> Steps:
    """Take these steps, then deliver the results."""
    yield from steps
    for one in staged:
        one.deliver()


def _allocation_name(sizes: Sequence[tuple[int, torch.dtype]]) -> str:
    """Return the name of an allocation with a digest of the sizes, for the comparison of calls."""
    layout = hashlib.sha256(repr([(numel, dtype) for numel, dtype in sizes]).encode()).hexdigest()[:16]
    return f"allocate({len(sizes)} tensors, layout {layout})"


def _offer_segment(size: int, offer: torch.Tensor) -> Segment | None:
    """Return a new segment, and write its token and name into `offer`; None if there is not enough memory."""
    try:
        segment = Segment.create_nameless(size)
    except OSError as error:
        _log.warning("Tensors of %d bytes cannot be shared by ranks: %s. Reducing them takes longer.", size, error)
        return None
    text = segment.token + segment.name.encode()
    offer[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    return segment


def _open_offered(size: int, offer: torch.Tensor) -> Segment | None:
    """Return the segment that another rank offers; None if there is no offer or the segment cannot be opened."""
    text = bytes(offer.tolist()).rstrip(b"\0")
    try:
        return Segment.open(text[TOKEN_BYTES:].decode(), size, text[:TOKEN_BYTES]) if text else None
    except OSError:
        return None
