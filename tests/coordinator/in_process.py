"""Workers as threads, and variables that they share in one place of this process: a coordinator without actors."""

from __future__ import annotations

import pickle
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from raydist.actors.version_check import Software, installed_software
from raydist.actors.worker_actors import Asked
from raydist.coordinator.coordinator import Coordinator
from raydist.core.errors import UnavailableError
from raydist.core.exception_utils import as_exception
from raydist.options import Timeouts
from raydist.replicas.ps.work_message import ClosureLabel
from raydist.replicas.ps.worker_runner import WorkerRules
from raydist.replicas.rules import VariablesView
from raydist.replicas.step import ReplicaSetup

TIMEOUTS = Timeouts(start_s=20.0, step_s=20.0, close_s=5.0)


class Shared:
    """What stands for servers: values by handle, and which updates were applied."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.values: dict[int, torch.Tensor] = {}
        self.applied: list[tuple[int, int]] = []
        self.fenced: set[tuple[int, int]] = set()
        self.version = 0
        self.begun: list[tuple[int, int]] = []
        self.num_finished = 0
        self.dropped: list[int] = []


class SharedRules(WorkerRules):
    """Every parameter is read before a run; an optimizer step is carried out on the shared values, once."""

    def __init__(self, shared: Shared, worker: int, generation: int) -> None:
        self.shared, self.me = shared, (worker, generation)
        self.label, self.index = ClosureLabel(-1), 0

    def before_run(self, variables: VariablesView, closure: ClosureLabel) -> None:
        self.label, self.index = closure, 0
        self.shared.begun.append((closure.number, self.me[0]))
        self.read(variables)

    def read(self, variables: VariablesView) -> None:
        with self.shared.lock, torch.no_grad():
            for handle, obj in variables.items():
                if handle in self.shared.values:
                    obj.copy_(self.shared.values[handle])

    def step_optimizer(self, variables: VariablesView, optimizer: Any, step: Any, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        with self.shared.lock:
            key, self.index = (self.label.number, self.index), self.index + 1
            self.read(variables)
            if key not in self.shared.applied and self.me not in self.shared.fenced:
                step(*args, **kwargs)
                self.shared.applied.append(key)
                self.shared.version += 1
                self.write(variables)
            else:
                self.read(variables)

    def write(self, variables: VariablesView) -> None:
        for handle, obj in variables.items():
            if isinstance(obj, torch.Tensor):
                self.shared.values[handle] = obj.detach().clone()

    def after_failure(self, variables: VariablesView) -> None: ...

    def end_closure(self, variables: VariablesView, *, last: bool) -> None: ...

    def told(self) -> tuple[int, ...]:
        return (self.shared.version,)

    def settle(self, variables: VariablesView) -> Any:
        return [handle for handle, obj in variables.items() if isinstance(obj, torch.Tensor)]

    def place(self, variables: VariablesView, plan: Any, closure: ClosureLabel) -> None:
        with self.shared.lock:
            self.write(variables)

    def follow(self, variables: VariablesView, plan: Any) -> None: ...

    def before_read(self, variables: VariablesView, *, states: bool) -> None:
        self.read(variables)


class SharedSide:
    """A `ServerSide` whose variables lie in `Shared`."""

    def __init__(self, name: str = "threads") -> None:
        self.shared = Shared()
        self.name = name

    def setup_of(self, worker: int, generation: int) -> ReplicaSetup:
        rules = SharedRules(self.shared, worker, generation)
        devices = ("CPU:0",)
        return ReplicaSetup(
            self.name, worker, 1, "cpu", devices, torch.get_num_threads(), 10.0, 1 << 20, worker=worker, rules=rules
        )

    def plan(self, settled: Any) -> Any:
        return settled

    def accept(self, plan: Any) -> None: ...

    def fence(self, worker: int, generation: int) -> None:
        with self.shared.lock:
            self.shared.fenced.add((worker, generation))

    def drop(self, handles: Sequence[int]) -> None:
        self.shared.dropped += handles

    def finish(self) -> None:
        self.shared.num_finished += 1


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
        self.open: list[list[Asked]] = [[] for _ in self.names]
        self.messages: list[tuple[int, Any]] = []
        self.num_replaced = 0
        self.refuse_to_start: set[int] = set()
        self.software: dict[int, Software] = {}  # of workers that run something else than this process
        self.says_nothing: set[int] = set()
        self._news = threading.Semaphore(0)
        self._lock = threading.RLock()

    def _ask(self, worker: int, doing: str, do: Callable[[Any], Any]) -> Asked:
        asked, thread = Asked(worker, doing), self.threads[worker]

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

    def begin(self, worker: int, make_runner: Callable[..., Any], *args: Any) -> tuple[Asked, Asked]:
        def start(thread: _Thread) -> None:
            if worker in self.refuse_to_start:
                raise RuntimeError(f"worker {worker} has no place")
            thread.runner = make_runner(*args)

        if worker in self.says_nothing:
            return Asked(worker, "starting"), Asked(worker, "starting")
        about = self._ask(worker, "starting", lambda thread: self.software.get(worker, installed_software()))
        return about, self._ask(worker, "starting", start)

    def share_memory(self) -> None: ...

    def replace(self, worker: int) -> None:
        self.num_replaced += 1
        self.threads[worker] = _Thread(f"{self.names[worker]} again")
        self.open[worker] = []

    def send(self, worker: int, message: Any, objects: Sequence[Any]) -> Asked:
        data = pickle.dumps(message)
        self.messages.append((worker, message))
        return self._ask(worker, "a closure", lambda thread: _copied(thread.runner.steps(pickle.loads(data), objects)))

    def call(self, worker: int, method: str, *args: Any) -> Asked:
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
) -> Iterator[tuple[Coordinator, ThreadPort, SharedSide]]:
    """A coordinator that has started, its workers and its servers."""
    port, side = port or ThreadPort(num_workers), SharedSide()
    coordinator = Coordinator(port, side, num_workers, timeouts, max_clocks)
    coordinator.start()
    try:
        yield coordinator, port, side
    finally:
        coordinator.close()
        port.close()
