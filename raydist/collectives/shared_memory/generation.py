"""One generation of a group in shared memory: pending collectives, waits, failures and end.

There is no background thread. A collective proceeds while its rank is inside a call that waits or that starts another
collective.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import final

import torch

from raydist.collectives.base import Membership, Work
from raydist.collectives.rendezvous import Bulletin
from raydist.collectives.shared_memory.control import CALL_BYTES, NUM_SLOTS, ControlBlock, Count, Layout
from raydist.collectives.shared_memory.transfers import Steps, Transfers, Wait
from raydist.collectives.translation import describe_operation, describe_ranks, mismatch_error
from raydist.errors import (
    CancelledError,
    CollectiveMismatchError,
    DeadlineExceededError,
    FailedPreconditionError,
    RaydistError,
    UnavailableError,
)
from raydist.shared_segment import Segment

__all__ = ["DIGEST_BYTES", "Generation", "call_text"]

_SLICE_S = 0.05  # interval at which a waiting rank checks for the death of a peer
# A rank begins collective k only after it has ended k - 8. So when all ranks have begun k, all have ended k - 8, and a
# rank that has ended k may write into the slot of k + 8, which held k - 8.
_MOST_UNDER_WAY = NUM_SLOTS // 2
_TEXT_BYTES = CALL_BYTES - 8

DIGEST_BYTES = 16
"""Length of the first part of a call's text, which ranks compare; messages show the rest."""

Body = Callable[[int], Steps | None]
"""Continuation of collective k after all ranks have called it. It returns further steps, or None without waits."""


@final
@dataclass(slots=True, eq=False)
class Operation(Work):
    """One pending collective, which its generation updates.

    Attributes:
        generation: The generation.
        name: Name of the collective, for messages.
        number: Number of the collective in the sequence of collectives.
        text: Description that ranks compare.
        shared: Number of the shared tensor; 0 for none.
        brought: Flat tensors that the rank copies into its slot when the collective begins.
        small: Other ranks wait for this rank's slot only.
        steps: Remaining steps.
        awaited: Condition of the next step.
        done: The collective has ended, with or without an error.
        error: Error of the collective.
    """

    generation: Generation
    name: str
    number: int
    text: bytes
    shared: int
    brought: Sequence[torch.Tensor]
    small: bool
    steps: Steps | None = None
    awaited: Wait | None = None
    done: bool = False
    error: BaseException | None = None

    def wait(self, timeout_s: float | None = None) -> None:
        self.generation.wait(self, timeout_s)

    def end(self, error: BaseException | None) -> None:
        """Record the end, and release tensors."""
        self.done, self.error, self.steps, self.awaited, self.brought = True, error, None, None, ()


@final
class Generation:
    """Collectives of one rank in one segment. After the first failure every call raises that failure.

    Args:
        membership: Membership of the rank in the whole group.
        members: The ranks that share the segment.
        segment: The segment, which this object owns from now on.
        layout: Offsets in the segment.
        timeout_s: Default limit of a wait, in seconds.
        bulletin: Has the reason of a failure.
    """

    def __init__(
        self,
        membership: Membership,
        members: tuple[int, ...],
        segment: Segment,
        layout: Layout,
        timeout_s: float,
        bulletin: Bulletin,
    ) -> None:
        self.membership = membership
        self.segment = segment
        self.control = ControlBlock(segment, layout, members.index(membership.rank))
        self.transfers = Transfers(segment, self.control)
        self._members = members
        self.timeout_s = timeout_s
        self._bulletin = bulletin
        self._spans_hosts = len(members) < membership.world_size
        self._closed = False
        self._called: deque[Operation] = deque()
        self._begun: deque[Operation] = deque()
        self._num_called = self._num_ended = 0

    # --- collectives --------------------------------------------------------------------------------------------------

    def call(
        self, name: str, text: bytes, body: Body, *, small: bool, shared: int = 0, brought: Sequence[torch.Tensor] = ()
    ) -> Operation:
        """Start a collective, and advance all pending ones without a wait. See `Operation` for the arguments."""
        self.check(name)
        operation = Operation(
            self, name, self._num_called, text[:_TEXT_BYTES].ljust(_TEXT_BYTES), shared, brought, small
        )
        operation.steps = self._steps(operation, body)
        self._num_called += 1
        self._called.append(operation)
        self.advance()
        return operation

    def slot(self, rank: int, number: int, like: torch.Tensor, offset: int = 0) -> torch.Tensor:
        """Return the content of a rank's slot in a collective, from byte `offset` on, as a flat tensor like `like`."""
        return self.transfers.view(self.control.layout.slot(rank, number) + offset, like.numel(), like.dtype)

    def advance(self) -> None:
        """Run all steps that need not wait."""
        try:
            while self._begin() | self._take_steps():
                pass
        except BaseException as error:
            # The peers would wait forever for the steps that this rank does not take.
            what = f"{type(error).__name__}: {error}"
            self.fail(UnavailableError(f"rank {self.membership.rank} failed inside a collective ({what})."))
            raise

    def _begin(self) -> bool:
        """Begin collectives for which a slot is free; return True if there were any."""
        begins = False
        while self._called and self._called[0].number - self._num_ended < _MOST_UNDER_WAY:
            operation, begins = self._called.popleft(), True
            place = self.segment.address + self.control.layout.slot(self.control.rank, operation.number)
            for tensor in operation.brought:
                ctypes.memmove(place, tensor.data_ptr(), tensor.nbytes)
                place += tensor.nbytes
            self.control.write_call(operation.number, operation.text, operation.shared)
            self._begun.append(operation)
            self.control.reach(Count.ENTERED, operation.number + 1)
        return begins

    def _take_steps(self) -> bool:
        """Advance collectives in order; return True if one has ended and further ones wait for a slot."""
        for operation in self._begun:
            self._step(operation)
            if operation.awaited is not None and not operation.awaited.last:
                break
        ended = self._num_ended
        while self._begun and self._begun[0].done:
            self._begun.popleft()
            self._num_ended += 1
        return self._num_ended > ended and bool(self._called)

    def _step(self, operation: Operation) -> None:
        steps = operation.steps
        if steps is None:
            return
        try:
            while operation.awaited is None or self.control.all_reached(
                operation.awaited.counter, operation.awaited.value
            ):
                operation.awaited = next(steps)
        except StopIteration:
            operation.end(None)
        except CollectiveMismatchError as error:  # `wait` raises it; the group goes on
            operation.end(error)
        except BaseException as error:
            operation.end(error)
            raise

    def _steps(self, operation: Operation, body: Body) -> Steps:
        number = operation.number
        yield Wait(Count.ENTERED, number + 1, last=operation.small)
        if not self.control.all_call(number, operation.text, operation.shared):
            texts = self.control.calls_of(number)
            if len({text[:DIGEST_BYTES] for text in texts}) > 1:
                raise mismatch_error([f"{_shown(text)} as call {number}" for text in texts])
        steps = body(number)
        if steps is not None:
            yield from steps

    # --- waits --------------------------------------------------------------------------------------------------------

    def wait(self, operation: Operation, timeout_s: float | None) -> None:
        """Block until a collective has run. The group's own limit fails the group; after another one, wait again."""
        if not operation.done:
            self._sleep_until_done(operation, timeout_s)
        if operation.error is not None:
            raise operation.error

    def _sleep_until_done(self, operation: Operation, timeout_s: float | None) -> None:
        limit_s = self.timeout_s if timeout_s is None else timeout_s
        began = time.monotonic()
        deadline, next_look = began + limit_s, began + _SLICE_S
        while True:
            seen = self.control.bell.count()  # read before `advance`, so that no wake-up is lost
            self.advance()
            if operation.done:
                return
            self.check(operation.name)
            now = time.monotonic()
            if now >= deadline:
                raise self._late(operation, limit_s, fatal=timeout_s is None)
            if now >= next_look:
                if self._spans_hosts:
                    self.hear()
                self._look_for_the_dead(operation)
                next_look = now + _SLICE_S
            self.control.sleep(seen, min(_SLICE_S, deadline - now))

    def _missing(self, operation: Operation) -> list[int]:
        """Return the ranks that a collective, or an earlier one, waits for."""
        missing: set[int] = set()
        for one in self._begun:
            if one.awaited is not None:
                missing.update(self.control.missing(one.awaited.counter, one.awaited.value))
            if one is operation:
                break
        return sorted(self._members[place] for place in missing - {self.control.rank})

    def _look_for_the_dead(self, operation: Operation) -> None:
        dead = [rank for rank in self._missing(operation) if not self.segment.holds(rank)]
        self.advance()  # the dead ranks may have done their part before
        dead = [rank for rank in self._missing(operation) if rank in dead]
        if dead and not operation.done:
            error = UnavailableError(
                f"{describe_operation(self.membership, operation.name)} failed: {describe_ranks(dead)} "
                f"{'are' if len(dead) > 1 else 'is'} gone."
            )
            self.fail(error)
            raise error

    # --- failures -----------------------------------------------------------------------------------------------------

    def check(self, name: str) -> None:
        """Raise an error if the group has failed or is closed."""
        if self._closed:
            raise FailedPreconditionError(
                f"{describe_operation(self.membership, name)}: the group is closed. Open a new one."
            )
        if self.control.any_failed():
            self.hear()
        self._bulletin.check(name)

    def fail(self, failure: RaydistError) -> RaydistError:
        """Fail the group for every member, and return the failure with the ranks that do not answer."""
        self._bulletin.fail(failure)
        self.control.set_failed()
        return (self._bulletin.named() if self._spans_hosts else None) or failure

    def abort(self) -> None:
        """Fail the group at the user's request."""
        rank, group = self.membership.rank, self.membership.group
        self.fail(CancelledError(f"rank {rank} aborted group {group!r}, generation {self.membership.generation}."))

    def leave(self) -> None:
        """Release tensors and the segment; other ranks then see this rank as dead."""
        self._closed = True
        for operation in (*self._called, *self._begun):
            operation.end(None)
        self._called.clear()
        self._begun.clear()
        self.segment.close()

    def hear(self) -> None:
        """Check for failures in the bulletin. Does not raise; `check` does."""
        if self._bulletin.listen():
            self.control.set_failed()
            if self._spans_hosts:
                self._bulletin.named()

    def _late(self, operation: Operation, limit_s: float, *, fatal: bool) -> RaydistError:
        message = f"{describe_operation(self.membership, operation.name)} timed out after {limit_s} s."
        if not fatal:
            return DeadlineExceededError(f"{message} It goes on; wait again, or allow more time.")
        missing = [] if self._spans_hosts else self._missing(operation)
        absent = f" No sign of {describe_ranks(missing)}." if missing else ""
        advice = "Raise the limit (Timeouts.collective_s) if the others were only slow."
        return self.fail(DeadlineExceededError(f"{message}{absent} {self._who_calls_what()} {advice}"))

    def _who_calls_what(self) -> str:
        """Describe the latest call of every member, for messages."""
        latest = []
        for place, rank in enumerate(self._members):
            number = self.control.count_of(place, Count.ENTERED) - 1
            call = "nothing" if number < 0 else f"{_shown(self.control.calls_of(number)[place])} as call {number}"
            latest.append(f"rank {rank}: {call}")
        return f"Latest calls: {'; '.join(latest)}."


@functools.lru_cache(maxsize=1024)
def call_text(name: str, dtype: torch.dtype, shape: torch.Size) -> bytes:
    """Return a digest and the description of a call."""
    text = f"{name} of {dtype} {tuple(shape)}".encode()
    return hashlib.blake2b(text, digest_size=DIGEST_BYTES).digest() + text


def _shown(text: bytes) -> str:
    return text[DIGEST_BYTES:].decode(errors="replace").strip()
