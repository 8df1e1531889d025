"""Calls of single workers, beside the closures, and their repetition on another worker if one dies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, final

from raydist.coordinator.closure_waits import ClosureWaits
from raydist.coordinator.closures import ClosureQueue
from raydist.coordinator.ports import Question, WorkerPort
from raydist.coordinator.roster import Roster
from raydist.coordinator.workforce import Workforce
from raydist.errors import UnavailableError
from raydist.foreign_errors import what_was_raised

__all__ = ["WorkerQuestions"]

_T = TypeVar("_T")


@final
class WorkerQuestions:
    """Calls of workers' runners, for the program's threads.

    Args:
        port: The connection to the workers.
        roster: The workers.
        force: The scheduler of the workers.
        queue: The queue of closures.
        waits: The condition on which threads wait.
    """

    def __init__(
        self, port: WorkerPort, roster: Roster, force: Workforce, queue: ClosureQueue, waits: ClosureWaits
    ) -> None:
        self._port = port
        self._roster = roster
        self._force = force
        self._queue = queue
        self._waits = waits
        self._reader: tuple[int, int] | None = None

    def ask(self, worker: int, method: str, *args: Any) -> Any:
        """Call a method of one worker's runner after all messages sent before; return its result or raise its error."""
        with self._waits.changed:
            asked = self._force.call(worker, method, *args)
            self._waits.changed.notify_all()
            generation = self._roster.generation_of(worker)
            doing = f"{method} on {self._port.names[worker]}"
            self._waits.wait_until(lambda: self._is_over(asked, worker, generation), doing)
        if asked.error is not None:
            raise what_was_raised(asked.error)
        if not asked.done:
            raise UnavailableError(f"{self._port.names[worker]} is gone.", actor=self._port.names[worker])
        return asked.value

    def ask_after_log(self, worker: int, method: str, *args: Any) -> Any:
        """Send the worker the rest of the log, then `ask`."""
        entries = self._force.due(worker)
        if entries:
            self.ask(worker, "follow", entries)
        return self.ask(worker, method, *args)

    def read(self, method: str, *args: Any) -> Any:
        """Call `ask_after_log` on any one worker."""
        return self.with_reader(lambda worker: self._read_from(worker, method, *args))[1]

    def read_all(self, method: str, *args: Any) -> list[Any]:
        """Call `ask_after_log` on every living worker."""
        with self._waits.changed:
            self._await_ready()
            workers = self._roster.ready()
        return [self.ask_after_log(worker, method, *args) for worker in workers]

    def _read_from(self, worker: int, method: str, *args: Any) -> Any:
        reader = worker, self._roster.generation_of(worker)
        if self._reader not in (None, reader):  # the driver's knowledge comes from another worker
            self.ask(worker, "tell_everything")
        self._reader = reader
        return self.ask_after_log(worker, method, *args)

    def with_reader(self, do: Callable[[int], _T]) -> tuple[int, _T]:
        """Call `do` with one worker; if this worker dies meanwhile, repeat with another."""
        while True:
            with self._waits.changed:
                self._await_ready()
                worker = self._choose_reader()
            try:
                return worker, do(worker)
            except UnavailableError as error:
                if not self._is_dead(error, worker):
                    raise

    def _choose_reader(self) -> int:
        """Prefer the last reader, then the worker that last ran closures: it has what a step leaves behind."""
        ready = self._roster.ready()
        wanted = (None if self._reader is None else self._reader[0], self._force.last_to_answer)
        return next((worker for worker in wanted if worker is not None and worker in ready), ready[0])

    def _await_ready(self) -> None:
        self._waits.wait_until(lambda: bool(self._roster.ready()) or self._roster.all_gone, "a worker that has started")
        self._waits.require_open()
        self.require_workers()

    def require_workers(self) -> None:
        """Raise the cause if all workers are gone. The caller holds the lock."""
        if self._roster.all_gone:
            self._queue.take_error()
            raise self._roster.error_of_all

    def _is_over(self, asked: Question, worker: int, generation: int) -> bool:
        # Not before the death of a worker was handled: the next call would go to the same one.
        gone = self._roster.generation_of(worker) != generation or worker not in self._roster.ready()
        return gone or (asked.done and not self._is_dead(asked.error, worker)) or self._waits.is_closed

    def _is_dead(self, error: Exception | None, worker: int) -> bool:
        return isinstance(error, UnavailableError) and error.actor == self._port.names[worker]
