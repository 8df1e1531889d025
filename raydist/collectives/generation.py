"""One generation of a group: from the meeting of its members until the first failure, or until it is left."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import final

from raydist.collectives.base import Membership
from raydist.collectives.bulletin import Bulletin
from raydist.collectives.flights import Flight
from raydist.collectives.process_group_backend import ProcessGroupBackend, RawGroup, RawWork
from raydist.collectives.rendezvous.store import connect_store
from raydist.collectives.translation import describe_operation, describe_ranks, translate_torch_error
from raydist.errors import CancelledError, DeadlineExceededError, FailedPreconditionError, RaydistError

__all__ = ["Generation"]

# How long an abort or a peer's failure may go unnoticed by a rank that waits.
_SLICE_S = 0.05
_ROLL_CALL_S = 0.3


@final
class Generation:
    """Waits, failures and the end of one process group. After its first failure every call fails the same way."""

    def __init__(self, membership: Membership, backend: ProcessGroupBackend, timeout_s: float) -> None:
        self.membership = membership
        self._backend = backend
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._failure: RaydistError | None = None
        self._group: RawGroup | None = None
        self._bulletin: Bulletin | None = None
        self._flights: list[Flight] = []

    def start(self) -> None:
        """Meet the other members; raises after `timeout_s` if one is missing, at once after `abort`."""
        operation = "rendezvous"
        store = connect_store(self.membership, self._timeout_s)
        self._bulletin = Bulletin(store, self.membership)
        missing = self._bulletin.arrive(self._timeout_s, lambda: self._check(operation))
        if missing:
            raise DeadlineExceededError(
                f"{describe_operation(self.membership, operation)} timed out after {self._timeout_s} s: "
                f"{describe_ranks(missing)} did not arrive. Raise the limit if they were only slow to start."
            )
        try:
            self._group = self._backend.create(store, self.membership, self._timeout_s)
        except RuntimeError as error:
            raise self._fail(translate_torch_error(error, self.membership, operation), operation) from error

    def submit(
        self,
        operation: str,
        call: Callable[[RawGroup], RawWork],
        *,
        point_to_point: bool = False,
    ) -> Flight:
        """Start an operation of the process group."""
        self._check(operation)
        group = self._group
        if group is None:
            raise FailedPreconditionError(
                f"{describe_operation(self.membership, operation)}: the group is closed. Open a new one."
            )
        try:
            work = call(group)
        except (RuntimeError, ValueError) as error:
            raise translate_torch_error(error, self.membership, operation) from error
        flight = self._backend.point_to_point(work) if point_to_point else self._backend.collective(work)
        self._flights = [other for other in self._flights if not other.landed()]
        self._flights.append(flight)
        return flight

    def wait(self, flight: Flight, operation: str, timeout_s: float | None) -> None:
        """Wait for an operation. Only the group's own limit fails the group; after a shorter one, wait again."""
        limit_s = self._timeout_s if timeout_s is None else timeout_s
        deadline = time.monotonic() + limit_s
        while True:
            if not flight.landed():
                self._check(operation)
            if self._wait_slice(flight, operation, min(_SLICE_S, deadline - time.monotonic())):
                return
            if time.monotonic() >= deadline:
                raise self._late(operation, limit_s, fatal=timeout_s is None)
            self._listen()

    def abort(self) -> None:
        """Fail the group for every member."""
        rank, group = self.membership.rank, self.membership.group
        self._record(CancelledError(f"rank {rank} aborted group {group!r}, generation {self.membership.generation}."))
        if self._group is not None:
            self._backend.kill(self._group)

    def leave(self) -> None:
        """Let go of sockets and threads. Operations that still hang are left to a thread that ends with them."""
        holder, self._group = [self._group], None
        if all(flight.landed() for flight in self._flights):
            holder.clear()
            return
        # gloo's destructor waits for its operations, which cannot be stopped.
        threading.Thread(target=holder.clear, name="raydist-release-group", daemon=True).start()

    def _wait_slice(self, flight: Flight, operation: str, seconds: float) -> bool:
        try:
            return flight.wait_slice(max(seconds, 0.0))
        except RuntimeError as error:
            raise self._fail(translate_torch_error(error, self.membership, operation), operation) from error

    def _check(self, operation: str) -> None:
        failure = self._failure
        if failure is not None:
            raise type(failure)(
                f"{describe_operation(self.membership, operation)} was given up: {failure.message} "
                "Reconfigure the group to go on."
            )

    def _listen(self) -> None:
        heard = self._bulletin.failure() if self._bulletin is not None else None
        if heard is None:
            return
        if not isinstance(heard, CancelledError):
            heard = self._with_missing(heard)  # it was posted before its author knew who was missing
        with self._lock:
            self._failure = self._failure or heard

    def _record(self, failure: RaydistError) -> None:
        with self._lock:
            self._failure = self._failure or failure
        if self._bulletin is not None:
            self._bulletin.post(failure)

    def _fail(self, error: RaydistError, operation: str) -> RaydistError:
        """Record what one rank saw, and add who is missing."""
        self._record(error)
        return self._with_missing(error)

    def _with_missing(self, error: RaydistError) -> RaydistError:
        missing = self._bulletin.roll_call(_ROLL_CALL_S) if self._bulletin is not None else ()
        return type(error)(f"{error.message} No sign of {describe_ranks(missing)}.") if missing else error

    def _late(self, operation: str, limit_s: float, *, fatal: bool) -> RaydistError:
        message = f"{describe_operation(self.membership, operation)} timed out after {limit_s} s."
        if not fatal:
            return DeadlineExceededError(f"{message} It goes on; wait again, or allow more time.")
        advice = "Raise the limit (Timeouts.collective_s) if the others were only slow."
        return self._fail(DeadlineExceededError(f"{message} {advice}"), operation)
