"""Workers as threads: a coordinator without actors, servers or variables."""

from __future__ import annotations

import pickle
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import cloudpickle
import torch

from raydist.actors.version_check import Software, installed_software
from raydist.actors.worker_actors import WorkerCall
from raydist.coordinator.closures import Closure
from raydist.coordinator.coordinator import Coordinator
from raydist.core.errors import UnavailableError
from raydist.core.exception_utils import as_exception
from raydist.mirroring.messages import StepPayload
from raydist.options import Timeouts
from raydist.replicas.ps.work_message import ClosureLabel
from raydist.replicas.ps.worker_runner import WorkerRules
from raydist.replicas.rules import VariablesView
from raydist.replicas.step import ReplicaSetup, StepHeader

TIMEOUTS = Timeouts(start_s=20.0, step_s=20.0, close_s=5.0)


class NoVariables(WorkerRules):
    """Rules of a worker without variables, which note the closures that begin: their number, and the worker."""

    def __init__(self, worker: int, begun: list[tuple[int, int]]) -> None:
        self.worker, self.begun = worker, begun

    def before_run(self, variables: VariablesView, closure: ClosureLabel) -> None:
        self.begun.append((closure.number, self.worker))

    def after_failure(self, variables: VariablesView) -> None: ...

    def end_closure(self, variables: VariablesView, *, last: bool) -> None: ...

    def versions(self) -> tuple[int, ...]:
        return ()

    def settle(self, variables: VariablesView) -> Any: ...

    def place(self, variables: VariablesView, plan: Any, closure: ClosureLabel) -> None: ...

    def follow(self, variables: VariablesView, plan: Any) -> None: ...

    def restore_servers(self, variables: VariablesView, order: Any) -> None: ...

    def before_read(self, variables: VariablesView, *, states: bool) -> None: ...


class NoServers:
    """A `ServerSide` of workers without variables, which notes what it is asked for."""

    def __init__(self) -> None:
        self.begun: list[tuple[int, int]] = []
        self.fenced: set[tuple[int, int]] = set()
        self.num_finished = 0

    def setup_of(self, worker: int, generation: int) -> ReplicaSetup:
        rules, threads = NoVariables(worker, self.begun), torch.get_num_threads()
        return ReplicaSetup("threads", worker, 1, "cpu", ("CPU:0",), threads, 10.0, 1 << 20, worker=worker, rules=rules)

    def plan(self, specs: Any) -> Any: ...

    def accept(self, plan: Any) -> None: ...

    def drop(self, handles: Sequence[int]) -> None: ...

    def fence(self, worker: int, generation: int) -> None:
        self.fenced.add((worker, generation))

    def finish(self) -> None:
        self.num_finished += 1


class _Thread:
    """One worker's process, as a thread; once dead it goes on, and nobody listens."""

    def __init__(self, name: str) -> None:
        self.dead = False
        self.runner: Any = None
        self.inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._work, name=name, daemon=True)
        self.thread.start()

    def _work(self) -> None:
        while (task := self.inbox.get()) is not None:
            task()


class ThreadPort:
    """A `WorkerConnections` to threads of this process. What is sent goes through pickle."""

    def __init__(self, num_workers: int) -> None:
        self.names = [f"worker {number}" for number in range(num_workers)]
        self.threads = [_Thread(name) for name in self.names]
        self.open: list[list[WorkerCall]] = [[] for _ in self.names]
        self.messages: list[tuple[int, Any]] = []
        self.num_replaced = 0
        self.refuse_to_start: set[int] = set()
        self.software: dict[int, Software] = {}  # of workers that run something else than this process
        self.says_nothing: set[int] = set()
        self._news = threading.Semaphore(0)
        self._lock = threading.RLock()

    def _ask(self, worker: int, doing: str, do: Callable[[Any], Any]) -> WorkerCall:
        asked, thread = WorkerCall(worker, doing), self.threads[worker]

        def task() -> None:
            if thread.dead:
                return
            try:
                answer, error = do(thread), None
            except BaseException as failure:
                answer, error = None, as_exception(failure)
            with self._lock:
                if not thread.dead:
                    asked.settle(answer, error)
            self.announce()

        with self._lock:
            if thread.dead:
                asked.settle(error=self._gone(worker))
                self.announce()
            else:
                self.open[worker].append(asked)
                thread.inbox.put(task)
        return asked

    def _gone(self, worker: int) -> UnavailableError:
        return UnavailableError(f"{self.names[worker]} is gone: killed.", actor=self.names[worker])

    def begin(self, worker: int, make_runner: Callable[..., Any], *args: Any) -> tuple[WorkerCall, WorkerCall]:
        def start(thread: _Thread) -> None:
            if worker in self.refuse_to_start:
                raise RuntimeError(f"worker {worker} has no place")
            thread.runner = make_runner(*args)

        if worker in self.says_nothing:
            return WorkerCall(worker, "starting"), WorkerCall(worker, "starting")
        about = self._ask(worker, "starting", lambda thread: self.software.get(worker, installed_software()))
        return about, self._ask(worker, "starting", start)

    def replace(self, worker: int) -> None:
        self.kill(worker)
        self.num_replaced += 1
        self.threads[worker] = _Thread(f"{self.names[worker]} again")
        self.open[worker] = []

    def send(self, worker: int, message: Any, objects: Sequence[Any]) -> WorkerCall:
        data = pickle.dumps(message)
        self.messages.append((worker, message))
        return self._ask(worker, "a closure", lambda thread: _copied(thread.runner.steps(pickle.loads(data), objects)))

    def call(self, worker: int, method: str, *args: Any) -> WorkerCall:
        data = pickle.dumps(args)
        return self._ask(worker, method, lambda thread: _copied(getattr(thread.runner, method)(*pickle.loads(data))))

    def kill(self, worker: int) -> None:
        """As if its process were gone: what it has not answered it never will."""
        with self._lock:
            thread = self.threads[worker]
            thread.dead = True
            thread.inbox.put(None)
            for asked in self.open[worker]:
                if not asked.done:
                    asked.settle(error=self._gone(worker))
        self.announce()

    def announce(self) -> None:
        self._news.release()

    def await_news(self, within_s: float) -> None:
        self._news.acquire(timeout=within_s)

    def close(self) -> None:
        for thread in self.threads:
            thread.inbox.put(None)


def _copied(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))


@contextmanager
def coordinated(
    num_workers: int = 2, timeouts: Timeouts = TIMEOUTS, port: ThreadPort | None = None, max_clocks: int | None = None
) -> Iterator[tuple[Coordinator, ThreadPort, NoServers]]:
    """A coordinator that has started, its workers and its servers."""
    port, side = port or ThreadPort(num_workers), NoServers()
    coordinator = Coordinator(port, side, num_workers, timeouts, max_clocks)
    coordinator.start()
    try:
        yield coordinator, port, side
    finally:
        coordinator.close()
        port.close()


def scheduled(coordinator: Coordinator, fn: Callable[..., Any], *args: Any) -> Closure:
    payload = StepPayload(function=cloudpickle.dumps(fn), arguments=cloudpickle.dumps((args, {})))

    def make_header(number: int) -> bytes:
        return pickle.dumps(StepHeader(number, 0, payload.of_step(), padding=False))

    return coordinator.schedule(payload, make_header)
