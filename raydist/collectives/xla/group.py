"""The collectives that a rank has begun: all chips enter one, or none does.

A collective of XLA that not all chips enter never ends, and cannot be stopped. So before each one the ranks compare
over gloo what they are about to call. If one of them gives up meanwhile, an entry of the rendezvous store decides
whether the collective takes place.
"""

from __future__ import annotations

import contextlib
import hashlib
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import final

import torch
import torch.distributed as dist

from raydist.collectives.base import Membership
from raydist.collectives.process_group_backend import GlooFlight, RawGroup
from raydist.collectives.translation import mismatch_error
from raydist.collectives.xla.chip import Chip
from raydist.compat.torch_internals import AllreduceOptions, Store
from raydist.errors import RaydistError

__all__ = ["CallComparison", "XlaGroup", "XlaOperation"]


@final
class CallComparison:
    """Comparisons of a rank's calls with those of all other ranks, one call after the other.

    Args:
        membership: This rank's place.
        store: The store of this generation of the group.
        gloo: A gloo group of the same ranks, which belongs to this object from now on.
    """

    def __init__(self, membership: Membership, store: Store, gloo: RawGroup) -> None:
        self._membership = membership
        self._store = store
        self._gloo = gloo
        self._number = 0
        self._call = ""
        self._extremes = torch.zeros(2, dtype=torch.int64, device="cpu")
        self._exchange: GlooFlight | None = None
        self._decided = ""  # the latest decision for a collective

    def announce(self, call: str) -> None:
        """Tell the other ranks what this rank is about to call."""
        self._number += 1
        self._call = call
        digest = int.from_bytes(hashlib.sha256(call.encode()).digest()[:7], "little")
        self._extremes = torch.tensor([digest, -digest], device="cpu")  # in a step the default device is the chip
        options = AllreduceOptions()
        options.reduceOp = dist.ReduceOp(dist.ReduceOp.MIN)
        self._exchange = GlooFlight(self._gloo.allreduce([self._extremes], options))

    def all_agree(self, deadline: float) -> bool:
        """Return True once all ranks have announced the same call; False at `deadline`.

        Raises:
            CollectiveMismatchError: On every rank: they are about to call different collectives.
            RuntimeError: The connection to a rank is lost.
        """
        if self._exchange is None or not self._exchange.wait_slice(max(deadline - time.monotonic(), 0.0)):
            return False
        lowest, highest = self._extremes.tolist()
        if lowest != -highest:
            ranks = range(self._membership.world_size)
            self._store.set(f"call/{self._number}/{self._membership.rank}", self._call)
            raise mismatch_error([self._store.get(f"call/{self._number}/{rank}").decode() for rank in ranks])
        return True

    def decide(self, *, go: bool) -> bool:
        """Return True if the announced collective takes place: the answer of the first rank that asks holds for all."""
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
    """One collective of this rank. Its members other than those of `Flight` are for :class:`XlaGroup`.

    Args:
        group: The group that runs it when its turn comes.
        call: The name and arguments that all ranks must call.
        program: Launches it on the chip; None for a barrier.
    """

    def __init__(self, group: XlaGroup, call: str, program: Callable[[], object] | None) -> None:
        self.group = group
        self._call = call
        self._program = program
        self._announced = self._launched = self._over = False
        self._error: BaseException | None = None
        self._ran = threading.Event()
        self._deciding = threading.RLock()

    def landed(self) -> bool:
        return self._over

    def wait_slice(self, seconds: float) -> bool:
        over = self.group.advance(self, time.monotonic() + seconds)
        if over and self._error is not None:
            raise self._error
        return over

    @property
    def on_chip(self) -> bool:
        """True while its program runs."""
        return self._launched and not self._ran.is_set()

    def advance(self, calls: CallComparison, chip: Chip, deadline: float) -> bool:
        """Go on until it is over, or until `deadline`. Its error is for the thread that waits for it."""
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
        """Give up an announced collective; if other ranks have launched it, launch it for their sake."""
        if self._announced and not self._over:
            self._decide(calls, chip, go=False)

    def _decide(self, calls: CallComparison, chip: Chip, *, go: bool) -> None:
        with self._deciding:  # the thread that waits, and the thread that aborts
            if not self._launched and calls.decide(go=go):
                self._launched = True
                self._launch(chip)

    def _launch(self, chip: Chip) -> None:
        if self._program is None:
            self._ran.set()
            return
        chip.launch()  # operations since `settle`: the collective must be a program of its own, equal on all chips
        self._program()
        self._program = None
        # A peer may die in between: the wait for the chip has no limit, so a thread of its own waits.
        threading.Thread(target=self._await, args=(chip,), name="raydist-xla-collective", daemon=True).start()

    def _await(self, chip: Chip) -> None:
        try:
            chip.wait()
        except BaseException as error:
            self._error = error
        self._ran.set()


@final
class XlaGroup:
    """The collectives of one rank that are not over, oldest first. Waiting for one takes all before it to their end.

    Collectives may be added in the threads of a backward pass. The thread that waits launches them: until then, other
    threads may still add the operations that make their inputs.

    Args:
        calls: Compares them with those of the other ranks.
        chip: This rank's.
    """

    def __init__(self, calls: CallComparison, chip: Chip) -> None:
        self._calls = calls
        self._chip = chip
        self._waiting: deque[XlaOperation] = deque()
        self._num_unsettled = 0

    def add(self, call: str, program: Callable[[], object] | None) -> XlaOperation:
        """Add a collective; the arguments are those of an :class:`XlaOperation`."""
        operation = XlaOperation(self, call, program)
        self._waiting.append(operation)
        self._num_unsettled += 1
        return operation

    @property
    def stuck(self) -> bool:
        """True while a program is on the chip that has not ended."""
        return any(operation.on_chip for operation in self._waiting)

    def settle(self) -> None:
        """Run this rank's own operations, so that collectives are programs of their own.

        Blocking: until they have run; that is no part of a collective's time.
        """
        if self._num_unsettled:
            self._num_unsettled = 0
            self._chip.launch()
            self._chip.wait()

    def advance(self, last: XlaOperation, deadline: float) -> bool:
        """Take all up to `last` to their end, or as far as there is time; return True if `last` is over."""
        while not last.landed():
            if not self._waiting[0].advance(self._calls, self._chip, deadline):
                return False
            self._waiting.popleft()
        return True

    def give_up(self) -> None:
        """Withdraw: nobody will wait any more. May be called twice, and from another thread than the one that waits."""
        for operation in tuple(self._waiting)[:1]:
            with contextlib.suppress(RuntimeError):  # the store is gone: then no rank can go on
                operation.withdraw(self._calls, self._chip)

    def close(self) -> None:
        """Leave the group, so that the other ranks notice. May be called twice."""
        self._calls.close()
