"""Communicators of all chips of a TPU slice, whose collectives are XLA programs: all chips enter one, or none does.

An XLA collective that not all chips enter never ends and cannot be stopped. So the ranks compare their calls over gloo
before each collective. If a rank gives up meanwhile, an entry of the rendezvous store decides if the collective runs.
"""

from __future__ import annotations

import contextlib
import hashlib
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import final

import torch
import torch.distributed as dist

from raydist.collectives.base import ALL_REDUCE, Communicator, FinishingWork, Membership, Work
from raydist.collectives.process_group import (
    Generation,
    GlooBackend,
    ProcessGroupBackend,
    RawGroup,
    RawWork,
    wait_slice,
)
from raydist.collectives.tensors import check_parts, check_root, describe_tensor, stage_comparable
from raydist.collectives.translation import mismatch_error
from raydist.collectives.xla.chip import Chip
from raydist.compat.torch_internals import AllreduceOptions, Store
from raydist.core.errors import DeadlineExceededError, FailedPreconditionError, RaydistError, UnavailableError
from raydist.core.values import ReduceOp


@final
class CallComparison:
    """Comparison of a rank's calls with the calls of all other ranks, one call after the other.

    Args:
        gloo: A gloo group of the same ranks, which this object owns from now on.
    """

    def __init__(self, membership: Membership, store: Store, gloo: RawGroup) -> None:
        self._membership = membership
        self._store = store
        self._gloo = gloo
        self._number = 0
        self._call = ""
        self._extremes = torch.zeros(2, dtype=torch.int64, device="cpu")
        self._exchange: RawWork | None = None
        self._decided = ""  # the latest decision for a collective

    def announce(self, call: str) -> None:
        """Start to compare a call with the other ranks. Does not block."""
        self._number += 1
        self._call = call
        digest = int.from_bytes(hashlib.sha256(call.encode()).digest()[:7], "little")
        self._extremes = torch.tensor([digest, -digest], device="cpu")  # in a step the default device is the chip
        options = AllreduceOptions()
        options.reduceOp = dist.ReduceOp(dist.ReduceOp.MIN)
        self._exchange = self._gloo.allreduce([self._extremes], options)

    def all_agree(self, deadline: float) -> bool:
        """Block until all ranks have announced the same call; return False at `deadline`.

        Raises:
            CollectiveMismatchError: Ranks call different collectives. All ranks raise it.
            RuntimeError: The connection to a rank is lost.
        """
        if self._exchange is None or not wait_slice(self._exchange, deadline - time.monotonic()):
            return False
        lowest, highest = self._extremes.tolist()
        if lowest != -highest:
            ranks = range(self._membership.world_size)
            self._store.set(f"call/{self._number}/{self._membership.rank}", self._call)
            raise mismatch_error([self._store.get(f"call/{self._number}/{rank}").decode() for rank in ranks])
        return True

    def decide(self, *, go: bool) -> bool:
        """Return True if the announced collective runs. The first rank that calls this decides for all ranks."""
        decision = self._store.compare_set("decision", self._decided, f"{self._number} {'go' if go else 'no'}")
        if decision != f"{self._number} go".encode():
            return False
        self._decided = decision.decode()
        return True

    def close(self) -> None:
        """Disconnect, so that the other ranks notice. May be called twice."""
        holder, self._gloo, self._exchange = [self._gloo, self._exchange], None, None
        # gloo's destructor waits for its operations, which cannot be stopped.
        threading.Thread(target=holder.clear, name="raydist-release-group", daemon=True).start()


@final
class XlaOperation:
    """One collective of this rank, with the `is_completed` and `wait` of torch's Work.

    Args:
        call: Name and arguments of the collective, which must be equal on all ranks.
        program: Launches the collective on the chip; None for a collective without elements.
    """

    def __init__(self, group: XlaGroup, call: str, program: Callable[[], object] | None) -> None:
        self.group = group
        self._call = call
        self._program = program
        self._announced = self._launched = self._over = False
        self._error: BaseException | None = None
        self._ran = threading.Event()
        self._deciding = threading.RLock()

    def is_completed(self) -> bool:
        return self._over

    def wait(self, limit: timedelta) -> None:
        if not self.group.advance(self, time.monotonic() + limit.total_seconds()):
            raise RuntimeError(f"Operation timed out! The limit was {limit}.")  # begins as the text of gloo
        if self._error is not None:
            raise self._error

    @property
    def on_chip(self) -> bool:
        """True while the program runs on the chip."""
        return self._launched and not self._ran.is_set()

    def advance(self, calls: CallComparison, chip: Chip, deadline: float) -> bool:
        """Block until the collective has ended, or until `deadline`. Stores an error for `wait` to raise."""
        try:
            self._over = self._advance(calls, chip, deadline)
        except (RaydistError, RuntimeError) as error:
            self._error, self._over = error, True
        return self._over

    def _advance(self, calls: CallComparison, chip: Chip, deadline: float) -> bool:
        if not self._announced:
            calls.announce(self._call)
            self._announced = True
        if not self._launched:
            try:
                if not calls.all_agree(deadline):
                    return False
            except RuntimeError:
                self.withdraw(calls, chip)
                if not self._launched:
                    raise
            self._decide(calls, chip, go=True)
        return self._ran.wait(max(deadline - time.monotonic(), 0.0))

    def withdraw(self, calls: CallComparison, chip: Chip) -> None:
        """Give up an announced collective; launch it if other ranks have decided to launch it."""
        if self._announced and not self._over:
            self._decide(calls, chip, go=False)

    def _decide(self, calls: CallComparison, chip: Chip, *, go: bool) -> None:
        with self._deciding:  # the waiting and the aborting thread may both call this
            if not self._launched and calls.decide(go=go):
                self._launched = True
                self._launch(chip)

    def _launch(self, chip: Chip) -> None:
        if self._program is None:
            self._ran.set()
            return
        chip.launch()  # operations since `settle`: a collective must be a separate program, equal on all chips
        self._program()
        self._program = None
        # The wait for the chip has no limit and never ends if a peer dies, so a separate thread waits.
        threading.Thread(target=self._await, args=(chip,), name="raydist-xla-collective", daemon=True).start()

    def _await(self, chip: Chip) -> None:
        try:
            chip.wait()
        except BaseException as error:
            self._error = error
        self._ran.set()


@final
class XlaGroup:
    """The pending collectives of one rank, oldest first. A wait for a collective also completes all earlier ones.

    Threads of a backward pass may add collectives. The waiting thread launches them, so that other threads may first
    record the operations that compute the inputs.
    """

    def __init__(self, calls: CallComparison, chip: Chip) -> None:
        self._calls = calls
        self._chip = chip
        self._waiting: deque[XlaOperation] = deque()
        self._num_unsettled = 0

    def add(self, call: str, program: Callable[[], object] | None) -> XlaOperation:
        """Add a collective, with the arguments of an :class:`XlaOperation`."""
        operation = XlaOperation(self, call, program)
        self._waiting.append(operation)
        self._num_unsettled += 1
        return operation

    @property
    def stuck(self) -> bool:
        """True while a program runs on the chip."""
        return any(operation.on_chip for operation in self._waiting)

    def settle(self) -> None:
        """Run this rank's own operations, so that collectives are separate programs.

        Blocking: until the operations have run. This time does not count as part of a collective.
        """
        if self._num_unsettled:
            self._num_unsettled = 0
            self._chip.launch()
            self._chip.wait()

    def advance(self, last: XlaOperation, deadline: float) -> bool:
        """Complete all collectives up to `last`, or return False at `deadline`."""
        while not last.is_completed():
            if not self._waiting[0].advance(self._calls, self._chip, deadline):
                return False
            self._waiting.popleft()
        return True

    def give_up(self) -> None:
        """Withdraw from the oldest pending collective. May be called twice, and from any thread."""
        for operation in tuple(self._waiting)[:1]:
            with contextlib.suppress(RuntimeError):  # the store is closed, so no rank can go on
                operation.withdraw(self._calls, self._chip)

    def close(self) -> None:
        """Leave the group; the other ranks notice. May be called twice."""
        self._calls.close()


_LATEST: dict[tuple[str, int], XlaGroup] = {}  # by group and rank: a chip that hangs must not get another group
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}


@final
class XlaBackend(ProcessGroupBackend):
    """Backend on the links between the chips of a TPU slice, by torch_xla. Serves one communicator at a time."""

    name = "xla"
    devices = ("xla",)

    _group: XlaGroup  # of the generation that `open` has joined

    def __init__(self) -> None:
        self._chip = Chip(0)

    def open(self, membership: Membership, device: torch.device, timeout_s: float) -> XlaCommunicator:
        self._chip = Chip(device.index or 0)
        generation = Generation.join(membership, self, timeout_s)
        try:
            return XlaCommunicator(generation, self._chip, self._group, _exchange_ordinals(generation, self._chip))
        except BaseException:
            self._group.close()
            generation.leave()
            raise

    def create(self, store: Store, membership: Membership, timeout_s: float) -> RawGroup:
        place = (membership.group, membership.rank)
        if place in _LATEST and _LATEST[place].stuck:
            raise UnavailableError(
                f"The chip of rank {membership.rank} is still in a collective that another chip has left, and cannot "
                "be stopped. Close the strategy and make a new one: its processes start anew."
            )
        gloo = GlooBackend().create(store, membership, timeout_s)
        self._group = _LATEST[place] = XlaGroup(CallComparison(membership, store, gloo), self._chip)
        return self._group

    def kill(self, group: RawGroup) -> None:
        """Withdraw from a pending collective, on all ranks or on none. A collective on the chip cannot be stopped."""
        group.give_up()


@final
class XlaCommunicator(Communicator):
    """A communicator of the rank of one chip. The thread that waits for a collective launches it.

    Args:
        ordinals: Number of each rank's chip.
    """

    checks_itself = True

    def __init__(self, generation: Generation, chip: Chip, group: XlaGroup, ordinals: Sequence[int]) -> None:
        self.membership = generation.membership
        self.timeout_s = generation.timeout_s
        self._chip = chip
        self._group = group
        self._ordinals = ordinals
        self._generation = generation

    @property
    def device(self) -> torch.device:  # type: ignore[override]  # known once torch_xla is imported
        return self._chip.open().device

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp) -> Work:
        # XLA's CPU device ignores NaN on all chips except the first.
        staged = stage_comparable(tensor, op, self.world_size)

        def deliver(result: torch.Tensor) -> None:
            staged.carrier.copy_(result)
            staged.deliver()

        return self._launch(ALL_REDUCE[op], tensor, lambda: self._chip.all_reduce(staged.carrier, op), deliver)

    def broadcast(self, tensor: torch.Tensor, root: int) -> Work:
        check_root(root, self.membership.group, self.world_size)
        target, device = tensor.detach(), tensor.device
        # A sum of integers, zero on all other ranks: a floating-point sum would lose the sign of a zero. The conversion
        # runs on the host, as torch_xla's `view(dtype)` does, which crashes in several threads at once.
        whole = _BITS[target.dtype.itemsize]
        if self.rank == root and target.numel():
            part = target.cpu().reshape(-1).view(whole).to(device)
        else:
            part = torch.zeros(target.numel() * target.dtype.itemsize // whole.itemsize, dtype=whole, device=device)
        return self._launch(
            f"broadcast(root={root})",
            tensor,
            lambda: self._chip.all_reduce(part, ReduceOp.SUM),
            lambda result: _assign(target, result.cpu().view(target.dtype).reshape(target.shape)),
        )

    def all_gather(self, outputs: list[torch.Tensor], tensor: torch.Tensor) -> Work:
        check_parts("all_gather", outputs, tensor, self.world_size)
        target = tensor.detach().contiguous()

        def deliver(result: torch.Tensor) -> None:
            for output, ordinal in zip(outputs, self._ordinals, strict=True):
                _assign(output, result[ordinal])

        return self._launch("all_gather", tensor, lambda: self._chip.all_gather(target), deliver)

    def _launch(
        self,
        operation: str,
        shown: torch.Tensor,
        program: Callable[[], torch.Tensor],
        deliver: Callable[[torch.Tensor], None],
    ) -> Work:
        """Start a collective. Ranks compare dtype and shape of `shown`."""
        generation = self._generation
        call = f"{operation} of {describe_tensor(shown)}"
        results: list[torch.Tensor] = []
        launch = (lambda: results.append(program())) if shown.numel() else None
        work = generation.submit(operation, lambda group: group.add(call, launch))

        def wait(timeout_s: float | None) -> None:
            self._group.settle()
            try:
                generation.wait(work, operation, timeout_s)
            except RaydistError as error:
                if timeout_s is None or not isinstance(error, DeadlineExceededError):
                    self._group.give_up()
                raise

        def finish() -> None:
            if results:
                deliver(results[0])

        return FinishingWork(wait, finish)

    def abort(self) -> None:
        self._generation.abort()

    def close(self) -> None:
        self._group.close()
        self._generation.leave()


def _exchange_ordinals(generation: Generation, chip: Chip) -> list[int]:
    """Return the chip numbers of ranks, since libtpu numbers chips in its own order. Blocks.

    Raises:
        FailedPreconditionError: torch_xla is missing, or the slice does not have one chip per rank.
    """
    told = generation.exchange_on_host(str(chip.open().ordinal).encode(), "rendezvous of chips")
    ordinals, world_size = [int(each) for each in told], generation.membership.world_size
    if chip.num_chips != world_size or sorted(ordinals) != list(range(world_size)):
        raise FailedPreconditionError(
            f"Each of the {world_size} replicas must have one of the slice's chips, but torch_xla sees "
            f"{chip.num_chips} chips in all, and ranks have numbers {', '.join(map(str, ordinals))}. "
            "Name the topology and accelerator_version of the slice, and let TPUStrategy have all of it."
        )
    return ordinals


def _assign(target: torch.Tensor, values: torch.Tensor) -> None:
    with torch.no_grad():
        target.copy_(values)
