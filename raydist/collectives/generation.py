"""One generation of a process group, from the rendezvous of the members until the first failure or `leave`."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import final

from raydist.collectives.base import Membership
from raydist.collectives.process_group_backend import Flight, ProcessGroupBackend, RawGroup, RawWork
from raydist.collectives.rendezvous import Bulletin, connect_store
from raydist.collectives.translation import describe_operation, describe_ranks, translate_torch_error
from raydist.errors import CancelledError, DeadlineExceededError, FailedPreconditionError, RaydistError

__all__ = ["Generation"]

_SLICE_S = 0.05  # interval at which a waiting rank checks for an abort or a failure of a peer
_ROLL_CALL_S = 0.3
_WATCH_S = 0.2
_LEAST_PAUSE_S = 0.0002


@final
class Generation:
    """The process group of one generation. After the first failure every call raises that failure."""

    def __init__(self, membership: Membership, backend: ProcessGroupBackend, timeout_s: float) -> None:
        self.membership = membership
        self._backend = backend
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._failure: RaydistError | None = None
        self._group: RawGroup | None = None
        self._bulletin: Bulletin | None = None
        self._flights: list[Flight] = []
        self._watched: list[tuple[Flight, str]] = []  # pending work on a device, if the host runs ahead of it
        self._num_exchanges = 0
        self._ended = threading.Event()

    def start(self) -> None:
        """Join the other members. Blocks; raises after `timeout_s` if one is missing, at once after `abort`."""
        operation = "rendezvous"
        store = connect_store(self.membership, self._timeout_s)
        self._bulletin = Bulletin(store, self.membership)
        missing = self._bulletin.arrive(self._timeout_s, lambda: self.check(operation))
        if missing:
            raise DeadlineExceededError(
                f"{describe_operation(self.membership, operation)} timed out after {self._timeout_s} s: "
                f"{describe_ranks(missing)} did not arrive. Raise the limit if they were only slow to start."
            )
        try:
            self._group = self._backend.create(store, self.membership, self._timeout_s)
        except RuntimeError as error:
            raise self._fail(translate_torch_error(error, self.membership, operation), operation) from error
        if self._backend.host_runs_ahead:
            threading.Thread(target=self._watch, name="raydist-collectives-watchdog", daemon=True).start()

    def submit(
        self,
        operation: str,
        call: Callable[[RawGroup], RawWork],
        *,
        point_to_point: bool = False,
    ) -> Flight:
        """Start an operation of the process group."""
        self.check(operation)
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
        if self._backend.host_runs_ahead:
            with self._lock:
                self._watched.append((flight, operation))
        else:
            self._flights = [other for other in self._flights if not other.landed()]
            self._flights.append(flight)
        return flight

    def wait(self, flight: Flight, operation: str, timeout_s: float | None) -> None:
        """Block until an operation ends. The group's own limit fails the group; after another limit, wait again."""
        limit_s = self._timeout_s if timeout_s is None else timeout_s
        deadline = time.monotonic() + limit_s
        if self._backend.host_runs_ahead:  # the watchdog checks limits and failures
            self.check(operation)
            self._wait_slice(flight, operation, limit_s)
            return
        while True:
            if not flight.landed():
                self.check(operation)
            if self._wait_slice(flight, operation, min(_SLICE_S, deadline - time.monotonic())):
                return
            if time.monotonic() >= deadline:
                raise self._late(operation, limit_s, fatal=timeout_s is None)
            self._listen()

    def exchange_on_host(self, data: bytes, what: str) -> list[bytes]:
        """Exchange data through the store; return every rank's data, by rank. Blocks until all ranks have called it."""
        bulletin = self._bulletin
        self.check(what)
        if bulletin is None:
            raise FailedPreconditionError(
                f"{describe_operation(self.membership, what)}: the group must be started before. Call start()."
            )
        self._num_exchanges += 1
        bulletin.tell(self._num_exchanges, data)
        deadline = time.monotonic() + self._timeout_s
        pause_s = _LEAST_PAUSE_S
        while missing := bulletin.silent(self._num_exchanges):
            if time.monotonic() >= deadline:
                late = f"{describe_operation(self.membership, what)} timed out after {self._timeout_s} s"
                raise self._fail(DeadlineExceededError(f"{late}: {describe_ranks(missing)} did not call it."), what)
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _SLICE_S)
            self._listen()
            self.check(what)
        return bulletin.told(self._num_exchanges)

    def abort(self) -> None:
        """Fail the group for every member."""
        rank, group = self.membership.rank, self.membership.group
        self._record(CancelledError(f"rank {rank} aborted group {group!r}, generation {self.membership.generation}."))
        if self._group is not None:
            self._backend.kill(self._group)

    def _watch(self) -> None:
        """Run the watchdog, which detects hanging collectives on a device, since the host does not wait for them."""
        since = time.monotonic()
        while not self._ended.wait(_WATCH_S):
            with self._lock:
                before, self._watched = len(self._watched), [each for each in self._watched if not each[0].landed()]
                oldest = self._watched[0][1] if self._watched else None
                if oldest is None or len(self._watched) < before:
                    since = time.monotonic()
            if self._failure is None:
                self._listen()
            if self._failure is None and oldest is not None and time.monotonic() - since > self._timeout_s:
                self._late(oldest, self._timeout_s, fatal=True)
            if self._failure is not None and self._group is not None:
                self._backend.kill(self._group)  # threads that wait for the device wake up and find the failure
                return

    def leave(self) -> None:
        """Release sockets and threads. A daemon thread waits for operations that still hang."""
        self._ended.set()
        holder, self._group = [self._group], None
        if not self._watched and all(flight.landed() for flight in self._flights):
            holder.clear()
            return
        # gloo's destructor waits for its operations, which cannot be stopped.
        threading.Thread(target=holder.clear, name="raydist-release-group", daemon=True).start()

    def _wait_slice(self, flight: Flight, operation: str, seconds: float) -> bool:
        try:
            return flight.wait_slice(max(seconds, 0.0))
        except RuntimeError as error:
            raise self._fail(translate_torch_error(error, self.membership, operation), operation) from error

    def check(self, operation: str) -> None:
        """Raise the failure that has ended this generation, if there is one."""
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
            heard = self._with_missing(heard)  # the peer posted its failure before its roll call
        with self._lock:
            self._failure = self._failure or heard

    def _record(self, failure: RaydistError) -> None:
        with self._lock:
            self._failure = self._failure or failure
        if self._bulletin is not None:
            self._bulletin.post(failure)

    def _fail(self, error: RaydistError, operation: str) -> RaydistError:
        """Record a failure of this rank, and return it with the missing ranks."""
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
