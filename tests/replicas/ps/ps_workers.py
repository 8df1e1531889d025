"""Workers whose variables live on servers, all in this process: threads of the test, no actors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from raydist.mirroring.handles import ReplicaTable
from raydist.mirroring.replica_hooks import note_steps
from raydist.parameter_servers.connection import ServerConnection
from raydist.parameter_servers.consistency import Consistency
from raydist.parameter_servers.server import ParameterServer
from raydist.parameter_servers.slices import PsSlice, plan_slices
from raydist.replicas.ps.variables import PsVariables
from raydist.replicas.ps.work_message import ClosureLabel
from tests.parameter_servers.examples import LocalConnection

LIMIT_S = 20.0
Make = Callable[[], Sequence[Any]]


class Held:
    """A `VariablesView` of a worker's objects."""

    def __init__(self) -> None:
        self.table = ReplicaTable()
        self.loaded: set[int] = set()

    def items(self) -> list[tuple[int, Any]]:
        return self.table.items()

    @property
    def changes(self) -> int:
        return self.table.changes

    def optimizers(self) -> list[torch.optim.Optimizer]:
        return [obj for _, obj in self.items() if isinstance(obj, torch.optim.Optimizer)]

    def take_loaded_states(self) -> frozenset[int]:
        loaded, self.loaded = frozenset(self.loaded), set()
        return loaded


class Worker:
    """One worker: rules, and objects made by `make`."""

    def __init__(
        self, number: int, connections: Sequence[ServerConnection], made: Sequence[Any], **options: Any
    ) -> None:
        self.held: Any = Held()
        self.rules = PsVariables(number, connections, timeout_s=LIMIT_S, **options)
        self.objects = list(made)
        self.next_closure = number
        self.add(made)

    def add(self, objects: Sequence[Any], first: int = 1) -> None:
        """Let objects be mirrored, and all variables of theirs."""
        found: dict[int, Any] = {}
        for obj in objects:
            found[id(obj)] = obj
            if isinstance(obj, torch.nn.Module):
                found.update((id(each), each) for each in [*obj.parameters(), *obj.buffers()])
        for handle, obj in enumerate(found.values(), first):
            self.held.table.add(handle, obj)
            if isinstance(obj, torch.optim.Optimizer):
                note_steps(obj, lambda: None, self._carry_out)

    def _carry_out(self, optimizer: Any, step: Any, *args: Any, **kwargs: Any) -> Any:
        return self.rules.step_optimizer(self.held, optimizer, step, *args, **kwargs)

    def run(
        self, fn: Callable[..., Any], *, closure: int | None = None, seen: Sequence[int] = (), last: bool = True
    ) -> Any:
        """One closure; without a number it is the next one of this worker."""
        if closure is None:
            closure, self.next_closure = self.next_closure, self.next_closure + 100
        self.rules.before_run(self.held, ClosureLabel(closure, 0, tuple(seen)))
        try:
            result = fn(*self.objects)
            self.rules.after_run(self.held)
            return result
        except BaseException:
            self.rules.after_failure(self.held)
            raise
        finally:
            self.rules.end_closure(self.held, last=last)


class Servers:
    """Servers of this process."""

    def __init__(self, count: int = 1, consistency: Consistency = "async") -> None:
        self.consistency = consistency
        self.servers = [ParameterServer(number, count, consistency) for number in range(count)]
        self.connections = [
            LocalConnection(server, f"parameter server {number}") for number, server in enumerate(self.servers)
        ]
        self.workers: list[Worker] = []
        self.slices: list[PsSlice] = []

    def worker(self, make: Make, *, partitioner: Any = None, **options: Any) -> Worker:
        """Another worker; the first one brings its values to the servers."""
        made = Worker(len(self.workers), self.connections, make(), consistency=self.consistency, **options)
        self.workers.append(made)
        self.settle(made, partitioner)
        return made

    def settle(self, worker: Worker, partitioner: Any = None) -> None:
        """Have the servers hold what is new on a worker, or what the driver wrote there."""
        if worker is self.workers[0]:
            specs = worker.rules.settle(worker.held)
            loads = [0] * len(self.servers)
            new = plan_slices(specs, loads, partitioner, len(self.slices))
            self.slices += new
            worker.rules.place(worker.held, new, ClosureLabel(10_000 + len(self.slices)))
        worker.rules.follow(worker.held, self.slices)

    def close(self) -> None:
        for worker in self.workers:
            worker.rules.close()
            worker.rules.close()
        for server in self.servers:
            server.close()


@contextmanager
def servers(count: int = 1, consistency: Consistency = "async") -> Iterator[Servers]:
    made = Servers(count, consistency)
    try:
        yield made
    finally:
        made.close()
