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
from collections.abc import Callable
from dataclasses import dataclass
from typing import final

import torch

from raydist.collectives.base import Membership, Work
from raydist.collectives.rendezvous import ErrorBroadcast
from raydist.collectives.shared_memory.control import CALL_BYTES, NUM_SLOTS, ControlBlock, Count, Layout
from raydist.collectives.shared_memory.transfers import Steps, Transfers, Wait
from raydist.collectives.translation import (
    aborted_error,
    closed_error,
    describe_operation,
    describe_ranks,
    late_error,
    mismatch_error,
)
from raydist.core.errors import CollectiveMismatchError, RaydistError, UnavailableError
from raydist.utils.shared_segment import Segment

_SLICE_S = 0.05  # interval at which a waiting rank checks for the death of a peer
# A rank begins collective k only after it has ended k - 8. So when all ranks have begun k, all have ended k - 8, and a
# rank that has ended k may write into the slot of k + 8, which held k - 8.
_MOST_PENDING = NUM_SLOTS // 2
_TEXT_BYTES = CALL_BYTES - 8

DIGEST_BYTES = 16
"""Length of the first part of a call's text, which ranks compare; messages show the rest."""

Body = Callable[[int], Steps | None]
"""Continuation of collective k after all ranks have called it. It returns further steps, or None without waits."""


@final
@dataclass(slots=True, eq=False)
class Operation(Work):
    """One pending collective, which its generation updates."""

    generation: Generation
    name: str  # name of the collective, for messages
    number: int  # in the sequence of collectives
    text: bytes  # description that ranks compare
    shared: int  # number of the shared tensor; 0 for none
    small: bool  # other ranks wait for this rank's slot only
    steps: Steps | None = None  # remaining steps
    awaited: Wait | None = None  # condition of the next step
    done: bool = False  # the collective has ended, with or without an error
    error: BaseException | None = None

    def wait(self, timeout_s: float | None = None) -> None:
        self.generation.wait(self, timeout_s)

    def end(self, error: BaseException | None) -> None:
        """Record the end, and release tensors."""
        self.done, self.error, self.steps, self.awaited = True, error, None, None


@final
class Generation:
    """Collectives of one rank in one segment. After the first failure every call raises that failure.

    Args:
        members: The ranks that share the segment.
        error_broadcast: Publishes and polls the failure of the group.
    """

    def __init__(
        self,
        membership: Membership,
        members: tuple[int, ...],
        segment: Segment,
        layout: Layout,
        timeout_s: float,
        error_broadcast: ErrorBroadcast,
    ) -> None:
        self.membership = membership
        self.segment = segment
        self.control = ControlBlock(segment, layout, members.index(membership.rank))
        self.transfers = Transfers(segment, self.control)
        self._members = members
        self.timeout_s = timeout_s
        self._error_broadcast = error_broadcast
        self._spans_hosts = len(members) < membership.world_size
        self._closed = False
        self._pending: deque[Operation] = deque()
        self._num_called = 0

    # --- collectives --------------------------------------------------------------------------------------------------

    def call(
        self, name: str, text: bytes, body: Body, *, small: bool, shared: int = 0, brought: torch.Tensor | None = None
    ) -> Operation:
        """Start a collective, and advance all pending ones. See `Operation` for the arguments.

        `brought` is a flat tensor for this rank's slot. Blocks while eight collectives are pending, until the oldest
        one has run.
        """
        self.check(name)
        if len(self._pending) >= _MOST_PENDING:
            self._sleep_until_done(self._pending[0], None)
        number, text = self._num_called, text[:_TEXT_BYTES].ljust(_TEXT_BYTES)
        self._num_called += 1
        operation = Operation(self, name, number, text, shared, small)
        operation.steps = self._steps(operation, body)
        if brought is not None:
            place = self.segment.address + self.control.layout.slot(self.control.rank, number)
            ctypes.memmove(place, brought.data_ptr(), brought.nbytes)
        self.control.write_call(number, text, shared)
        self._pending.append(operation)
        self.control.reach(Count.ENTERED, number + 1)
        self.advance()
        return operation

    def slot(self, rank: int, number: int, like: torch.Tensor) -> torch.Tensor:
        """Return the content of a rank's slot in a collective, as a flat tensor like `like`."""
        return self.transfers.view(self.control.layout.slot(rank, number), like.numel(), like.dtype)

    def advance(self) -> None:
        """Run all steps that need not wait."""
        try:
            for operation in self._pending:
                self._step(operation)
                if operation.awaited is not None and not operation.awaited.last:
                    break
        except BaseException as error:
            # The peers would wait forever for the steps that this rank does not take.
            what = f"{type(error).__name__}: {error}"
            self.fail(UnavailableError(f"rank {self.membership.rank} failed inside a collective ({what})."))
            raise
        while self._pending and self._pending[0].done:
            self._pending.popleft()

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
            seen = self.control.futex.count()  # read before `advance`, so that no wake-up is lost
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
        for one in self._pending:
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
            raise closed_error(self.membership, name)
        if self.control.any_failed():
            self.hear()
        self._error_broadcast.check(name)

    def fail(self, failure: RaydistError) -> RaydistError:
        """Fail the group for every member, and return the failure with the ranks that do not answer."""
        self._error_broadcast.fail(failure)
        self.control.set_failed()
        return (self._error_broadcast.name_missing_ranks() if self._spans_hosts else None) or failure

    def abort(self) -> None:
        """Fail the group at the user's request."""
        self.fail(aborted_error(self.membership))

    def leave(self) -> None:
        """Release tensors and the segment; other ranks then see this rank as dead."""
        self._closed = True
        for operation in self._pending:
            operation.end(None)
        self._pending.clear()
        self.segment.close()

    def hear(self) -> None:
        """Poll for a failure that another member has published. Does not raise; `check` does."""
        if self._error_broadcast.listen():
            self.control.set_failed()
            if self._spans_hosts:
                self._error_broadcast.name_missing_ranks()

    def _late(self, operation: Operation, limit_s: float, *, fatal: bool) -> RaydistError:
        if not fatal:
            return late_error(self.membership, operation.name, limit_s, fatal=False)
        missing = [] if self._spans_hosts else self._missing(operation)
        absent = f" No sign of {describe_ranks(missing)}." if missing else ""
        details = f"{absent} {self._who_calls_what()}"
        return self.fail(late_error(self.membership, operation.name, limit_s, fatal=True, details=details))

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
