"""Communicators of CPU ranks on one host, in shared memory."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import weakref
from collections.abc import Iterable, Sequence
from typing import final

import torch

from raydist.collectives.base import ALL_REDUCE, Backend, Communicator, Declined, Membership, Work
from raydist.collectives.rendezvous import ErrorBroadcast, connect_store
from raydist.collectives.shared_memory.control import Layout, why_unsupported
from raydist.collectives.shared_memory.generation import DIGEST_BYTES, Generation, call_text
from raydist.collectives.shared_memory.transfers import SharedTensor, Steps
from raydist.collectives.tensors import Staged, check_parts, check_root, reduce_parts, stage_bytes, stage_reduction
from raydist.compat.torch_internals import PrefixStore
from raydist.core.values import ReduceOp
from raydist.utils.shared_segment import Segment

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

    def open(self, membership: Membership, device: torch.device, timeout_s: float) -> SharedMemoryCommunicator:
        return open_shared(membership, timeout_s, tuple(range(membership.world_size)))


@final
class SharedMemoryCommunicator(Communicator):
    """A communicator of ranks on one host. Not thread-safe, except for `abort`.

    There is no background thread: a collective proceeds only while its rank is inside a call of this object, which may
    be the start of another collective. A rank that starts a large collective should wait for it before a long task.

    Roots and parts are numbered within the ranks that share the memory; messages name ranks of the whole group.
    """

    checks_itself = True

    def __init__(self, generation: Generation) -> None:
        self.generation = generation
        self.membership = generation.membership
        self.timeout_s = generation.timeout_s
        self._layout = generation.control.layout
        self._announced = b""
        self._shared: dict[int, SharedTensor] = {}
        self._num_shared = 0

    @property
    def rank(self) -> int:
        return self.generation.control.rank

    @property
    def world_size(self) -> int:
        return self._layout.world_size

    def announce(self, what: str) -> None:
        self._announced = what.encode()

    def allocate(self, sizes: Sequence[tuple[int, torch.dtype]]) -> list[torch.Tensor]:
        offsets = [0]
        for numel, dtype in sizes:
            offsets.append(offsets[-1] + -(-numel * dtype.itemsize // _LINE) * _LINE)
        stride = -(-offsets[-1] // _PAGE) * _PAGE
        layout = hashlib.sha256(repr(list(sizes)).encode()).hexdigest()[:16]
        name = f"allocate({len(sizes)} tensors, layout {layout})"
        segment = self._allocate_segment(name, _PAGE + self.world_size * stride)
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
        segment = _create_to_share(size) if self.rank == 0 else None
        try:
            offer = torch.zeros(_OFFER_BYTES, dtype=torch.uint8)
            if segment is not None:
                text = segment.offer()
                offer[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
            self._broadcast(name, offer, 0).wait()
            text = bytes(offer.tolist()).rstrip(b"\0")
            if self.rank != 0 and text:
                with contextlib.suppress(OSError):
                    segment = Segment.accept(text, size)
            agreed = torch.tensor([segment is not None], dtype=torch.uint8)
            self.all_reduce(agreed, ReduceOp.MIN).wait()
        finally:
            if segment is not None:
                segment.close()
        return segment if agreed.item() else None

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp) -> Work:
        staged = stage_reduction(tensor, op, 1)
        flat = staged.values if staged.values.dim() == 1 else staged.values.view(-1)
        name = ALL_REDUCE[op]
        generation, world_size = self.generation, self.world_size
        small = flat.nbytes <= self._layout.slot_bytes
        shared = None if small else self._find(flat)

        def body(number: int) -> Steps | None:
            if not small:
                if shared is not None and generation.control.all_share(number, shared.number):
                    return shared.reduce(generation.control, number, op)
                return _then(generation.transfers.all_reduce(flat, op), [staged])
            reduce_parts([generation.slot(rank, number, flat) for rank in range(world_size)], flat, op)
            staged.deliver()
            return None

        text, place = self._text(name, tensor), 0 if shared is None else shared.number
        return generation.call(name, text, body, small=small, shared=place, brought=flat if small else None)

    def all_gather(self, outputs: list[torch.Tensor], tensor: torch.Tensor) -> Work:
        check_parts("all_gather", outputs, tensor, self.world_size)
        staged = dict(enumerate(stage_bytes(output) for output in outputs))
        return self._show("all_gather", tensor, stage_bytes(tensor).carrier, staged, tensor.nbytes)

    def broadcast(self, tensor: torch.Tensor, root: int) -> Work:
        check_root(root, self.membership.group, self.world_size)
        return self._broadcast(f"broadcast(root={root})", tensor, root)

    def abort(self) -> None:
        self.generation.abort()

    def close(self) -> None:
        self.generation.leave()

    # --- implementation of collectives --------------------------------------------------------------------------------

    def _text(self, name: str, tensor: torch.Tensor) -> bytes:
        """Return the description of the next call."""
        text, announced = call_text(name, tensor.dtype, tensor.shape), self._announced
        self._announced = b""
        return text[:DIGEST_BYTES] + announced if announced else text

    def _find(self, flat: torch.Tensor) -> SharedTensor | None:
        """Return the shared tensor for a whole tensor of :meth:`allocate`, and None for any other tensor."""
        known = self._shared.get(flat.data_ptr())
        if known is None or known.copies[0].dtype != flat.dtype or known.copies[0].numel() != flat.numel():
            return None
        return known

    def _broadcast(self, name: str, tensor: torch.Tensor, root: int) -> Work:
        staged = stage_bytes(tensor)
        source, targets = (staged.carrier, {}) if self.rank == root else (None, {root: staged})
        return self._show(name, tensor, source, targets, tensor.nbytes)

    def _show(
        self, name: str, shown: torch.Tensor, source: torch.Tensor | None, targets: dict[int, Staged], longest: int
    ) -> Work:
        """Start a collective in which `source` of each rank is copied to `targets` of other ranks."""
        generation = self.generation
        small = longest <= self._layout.slot_bytes

        def body(number: int) -> Steps | None:
            carriers = {rank: target.carrier for rank, target in targets.items()}
            if not small:
                return _then(generation.transfers.gather(longest, source, carriers), targets.values())
            for rank, target in targets.items():
                target.carrier.copy_(generation.slot(rank, number, target.carrier))
                target.deliver()
            return None

        text = self._text(name, shown)
        return generation.call(name, text, body, small=small, brought=source if small else None)


def _then(steps: Steps, staged: Iterable[Staged]) -> Steps:
    """Take these steps, then deliver the results."""
    yield from steps
    for one in staged:
        one.deliver()


def _create_to_share(size: int) -> Segment | None:
    """Return a new segment; None if there is not enough memory."""
    try:
        return Segment.create_nameless(size)
    except OSError as error:
        _log.warning("Tensors of %d bytes cannot be shared by ranks: %s. Reducing them takes longer.", size, error)
        return None


def open_shared(membership: Membership, timeout_s: float, members: tuple[int, ...]) -> SharedMemoryCommunicator:
    """Join a group and return the communicator of the `members` that share memory, this rank among them. See `join`."""
    layout = Layout(len(members))
    segment, error_broadcast = join(membership, members[0], layout.size, timeout_s)
    return SharedMemoryCommunicator(Generation(membership, members, segment, layout, timeout_s, error_broadcast))


def join(membership: Membership, root: int, size: int, timeout_s: float) -> tuple[Segment, ErrorBroadcast]:
    """Return a segment that all ranks of this host map, in which this rank holds its lock, and the broadcast of errors.

    A rank is on the same host as `root` if it can open root's segment and finds the token in it.

    Args:
        root: The rank that creates the segment of this rank's host.
        timeout_s: Limit of each of two waits, in seconds.

    Blocking: until all ranks of the group have opened their segment.

    Raises:
        Declined: A rank cannot open its segment. All ranks raise it, with the reasons.
        DeadlineExceededError: A rank did not arrive; the message names it.
    """
    # The group may use another backend in the same generation, if this one is declined.
    error_broadcast = ErrorBroadcast(PrefixStore("shm", connect_store(membership, timeout_s)), membership)
    segment, refusal, offer = None, why_unsupported() or "", b""
    try:
        if membership.rank == root and not refusal:
            try:
                segment = Segment.create_nameless(size)
                offer = segment.offer()
            except OSError as error:
                refusal = _no_memory(error)
        offer = error_broadcast.exchange(offer, "rendezvous", timeout_s)[root]
        if offer and not refusal:
            try:
                segment = segment or Segment.accept(offer, size)
                segment.hold(membership.rank)
            except OSError as error:
                refusal = _no_memory(error)
        answers = error_broadcast.exchange(refusal.encode(), "rendezvous", timeout_s)
        refusals = [f"rank {rank}: {answer.decode()}" for rank, answer in enumerate(answers) if answer]
        if refusals or segment is None:
            raise Declined(f"every rank must map the segment, got {'; '.join(refusals)}")
        return segment, error_broadcast
    except BaseException:
        if segment is not None:
            segment.close()
        raise


def _no_memory(error: OSError) -> str:
    return f"no shared memory: {error.strerror or error}"
