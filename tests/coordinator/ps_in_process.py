"""Everything of a `ParameterServerStrategy` but Ray: workers are threads, servers lie in this process."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from raydist.checkpoints.ps_reader import PartReader
from raydist.checkpoints.ps_save import SliceWriter
from raydist.checkpoints.shards import DispatchedSave
from raydist.coordinator.checkpointing import PS_RESTORES, PS_SAVES, PsRestorer, PsSaver, ps_save_state
from raydist.coordinator.closures import Closure
from raydist.coordinator.coordinator import Coordinator
from raydist.coordinator.ps_servers import PsServers
from raydist.coordinator.remote_value import RemoteValue
from raydist.mirroring.driver import MirrorDriver
from raydist.mirroring.messages import MirrorCalls
from raydist.options import Timeouts
from raydist.parameter_servers.consistency import BoundedStaleness, Consistency
from raydist.parameter_servers.server import ParameterServer
from raydist.replicas.step import ReplicaSetup, StepHeader
from tests.coordinator.in_process import TIMEOUTS, ThreadPort
from tests.parameter_servers.local_server import LocalConnection


class ServersHere:
    """What a `PsServers` needs of `ServerActors`."""

    def __init__(self, num_servers: int, consistency: Consistency, memory: int | None = None) -> None:
        self.names = [f"parameter server {number}" for number in range(num_servers)]
        self.servers = [
            ParameterServer(
                number,
                num_servers,
                consistency,
                memory=memory,
                saver=SliceWriter(),
                restorer=PartReader(),
            )
            for number in range(num_servers)
        ]
        self.connections = [
            LocalConnection(server, name) for server, name in zip(self.servers, self.names, strict=True)
        ]


class Served:
    """A strategy without Ray."""

    def __init__(self, coordinator: Coordinator, port: ThreadPort, side: PsServers) -> None:
        self.coordinator, self.port, self.side = coordinator, port, side
        self.servers: Sequence[ParameterServer] = ()
        link: Any = self
        self.mirror = MirrorDriver("served", link, serves_rows=True)
        self.mirror.shard_saver = PsSaver(self.mirror, self._save, lambda: ["here"])
        self.restorer = PsRestorer(
            self.mirror, self._run_alone, coordinator.join, lambda: side, coordinator.note_seen, 20.0
        )
        self.injected = {"strategy": self, "ps_saves": PS_SAVES, "ps_restores": PS_RESTORES}

    def call(self, rank: int, method: Callable[..., Any], *args: Any) -> Any:
        return self.coordinator.read("mirror", method, *args)

    def call_all(self, method: Callable[..., Any], *args: Any) -> list[Any]:
        if method is MirrorCalls.collect_metrics:
            return self.coordinator.read_all("mirror", method, *args)
        return [self.call(0, method, *args)]

    def schedule(self, fn: Callable[..., Any], *args: Any) -> RemoteValue:
        self.coordinator.raise_error()
        return RemoteValue(self.coordinator, self._schedule(fn, *args))

    def _schedule(self, fn: Callable[..., Any], *args: Any, looks_only: bool = False) -> Closure:
        payload = self.mirror.prepare(fn, args, injected=self.injected)

        def make_header(number: int) -> bytes:
            return pickle.dumps(StepHeader(number, 0, payload.of_step(), padding=False, looks_only=looks_only))

        closure = self.coordinator.schedule(payload, make_header, payload.digest, alone=looks_only)
        self.mirror.dispatched()
        return closure

    def _save(self, fn: Callable[..., Any], token: str, *args: Any) -> DispatchedSave:
        closure = self._schedule(fn, PS_SAVES, *args, looks_only=True)
        return DispatchedSave(partial(ps_save_state, closure, partial(self.side.saved, token)), 20.0)

    def _run_alone(self, fn: Callable[..., Any], *args: Any) -> Any:
        self.coordinator.join()
        return self.coordinator.value_of(self._schedule(fn, PS_RESTORES, *args, looks_only=True))


@contextmanager
def served(
    num_workers: int = 2,
    num_servers: int = 1,
    consistency: Consistency = "async",
    *,
    partitioner: Any = None,
    timeouts: Timeouts = TIMEOUTS,
    memory: int | None = None,
) -> Iterator[Served]:
    """Such a strategy, started."""
    port = ThreadPort(num_workers)
    setups = [
        ReplicaSetup("here", worker, 1, "cpu", ("CPU:0",), torch.get_num_threads(), 10.0, 1 << 20, worker=worker)
        for worker in range(num_workers)
    ]
    servers: Any = ServersHere(num_servers, consistency, memory)
    side = PsServers(
        setups,
        servers,
        consistency=consistency,
        partitioner=partitioner,
        prefetch_pulls=True,
        timeout_s=20.0,
    )
    max_clocks = consistency.max_clocks if isinstance(consistency, BoundedStaleness) else None
    coordinator = Coordinator(port, side, num_workers, timeouts, max_clocks)
    coordinator.start()
    try:
        here = Served(coordinator, port, side)
        here.servers = servers.servers
        yield here
    finally:
        coordinator.close()
        port.close()
