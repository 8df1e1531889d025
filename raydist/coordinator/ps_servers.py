"""The coordinator's view of a strategy's parameter servers."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, final

from raydist.actors.parameter_servers import ServerActors
from raydist.parameter_servers.client import ServerClient
from raydist.parameter_servers.consistency import Consistency
from raydist.parameter_servers.requests import (
    CommitRestore,
    DiscardRestore,
    DropArrival,
    DropObjects,
    FenceWorker,
    Finish,
    ReadReport,
    SaveReport,
    Sender,
    ServerStats,
    Statistics,
)
from raydist.parameter_servers.slices import PsSlice, VariablePartitioner, VariableSpec, plan_slices
from raydist.replicas.ps.variables import PsVariables
from raydist.replicas.step import ReplicaSetup

_DRIVER = Sender(-1, 0)


@final
class PsServers:
    """A `ServerSide` that talks to running server actors. Threads may share this object.

    Args:
        partitioner: Splits variables into slices; None to keep every variable whole.
    """

    def __init__(
        self,
        setups: Sequence[ReplicaSetup],
        servers: ServerActors,
        *,
        consistency: Consistency,
        partitioner: VariablePartitioner | None,
        prefetch_pulls: bool,
        timeout_s: float,
    ) -> None:
        self._setups = tuple(setups)
        self._servers = servers
        self._connections = servers.connections
        self._consistency = consistency
        self._partitioner = partitioner
        self._prefetch_pulls = prefetch_pulls
        self._timeout_s = timeout_s
        self._loads = [0] * len(servers.names)  # bytes of variables on each server
        self._next_slice = 0
        self._placed: dict[int, list[PsSlice]] = {}
        self._client = ServerClient(self._connections, _DRIVER, timeout_s=timeout_s)
        self._client_lock = threading.Lock()

    @property
    def names(self) -> Sequence[str]:
        """Names of the servers: the `actor` of an UnavailableError is the name of a dead one."""
        return self._servers.names

    def lost(self, within_s: float) -> list[str]:
        """Return a sentence about each server that is gone. Blocks for up to `within_s` seconds."""
        return self._servers.lost(within_s)

    def restart(self, within_s: float) -> None:
        """Kill all servers, and start others, which hold nothing; only workers that start later reach them."""
        self._servers.restart(within_s)
        with self._client_lock:
            self._connections = self._servers.connections
            self._client = ServerClient(self._connections, _DRIVER, timeout_s=self._timeout_s)

    def kill(self) -> None:
        """Kill all servers. Every request is an UnavailableError afterwards."""
        self._servers.kill()

    def setup_of(self, worker: int, generation: int) -> ReplicaSetup:
        rules = PsVariables(
            worker,
            self._connections,
            generation=generation,
            consistency=self._consistency,
            prefetch_pulls=self._prefetch_pulls,
            timeout_s=self._timeout_s,
        )
        return replace(self._setups[worker], rules=rules)

    def plan(self, specs: Sequence[VariableSpec]) -> Sequence[PsSlice]:
        return plan_slices(specs, self._loads, self._partitioner, self._next_slice)

    def accept(self, plan: Sequence[PsSlice]) -> None:
        self._next_slice += len(plan)
        for part in plan:
            self._loads[part.server] += part.num_bytes
            self._placed.setdefault(part.handle, []).append(part)

    def drop(self, handles: Sequence[int]) -> None:
        parts = [part for handle in handles for part in self._placed.pop(handle, ())]
        for part in parts:
            self._loads[part.server] -= part.num_bytes
        numbers = tuple(part.number for part in parts)
        with self._client_lock:
            self._client.ask_all(DropObjects(numbers, tuple(handles)))

    def fence(self, worker: int, generation: int) -> None:
        with self._client_lock:
            answers = self._client.ask_all(FenceWorker(Sender(worker, generation)))
            if answers[0].completes:  # the worker was part of a step, which must not wait for the worker's gradients
                self._client.ask_all(DropArrival(Sender(worker, generation), answers[0].step, answers[0].completes))

    def finish(self) -> None:
        if self._consistency == "async":
            return
        with self._client_lock:
            answer = self._client.ask(0, Finish())
            if answer.completes:
                self._client.ask_all(Finish(answer.step, answer.completes))

    def saved(self, token: str) -> list[Any]:
        """Return the state of a save on each server; see `ServerSaver.report`."""
        with self._client_lock:
            return [answer.value for answer in self._client.ask_all(SaveReport(token))]

    def restored(self, token: str) -> list[Any]:
        """Return the state of a restore on each server; see `ServerRestorer.report`."""
        with self._client_lock:
            return [answer.value for answer in self._client.ask_all(ReadReport(token))]

    def commit_restore(self, token: str) -> tuple[int, ...]:
        """Make every server use the values that it has read. Return the version of each server's values afterwards."""
        with self._client_lock:
            return tuple(answer.version for answer in self._client.ask_all(CommitRestore(token)))

    def discard_restore(self) -> None:
        """Make every server drop the values that it has read."""
        with self._client_lock:
            self._client.ask_all(DiscardRestore())

    def statistics(self) -> list[ServerStats]:
        """Return the statistics of each server."""
        with self._client_lock:
            return [answer.value for answer in self._client.ask_all(Statistics())]
