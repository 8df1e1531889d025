"""Start workers and parameter servers on the nodes of the cluster."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, TypeVar, final

from raydist.actors.parameter_servers import ServerActors, ServerSeat
from raydist.actors.replica import ReplicaActors, Seat, console_settings
from raydist.actors.worker_actors import WorkerActors
from raydist.checkpoints.ps_reader import PartReader
from raydist.checkpoints.ps_save import SliceWriter
from raydist.cluster import hosts_of, living_nodes, place, release
from raydist.coordinator.coordinator import Coordinator
from raydist.coordinator.served_request import ServedPlan
from raydist.coordinator.served_side import ServedSide
from raydist.errors import FailedPreconditionError
from raydist.options import Timeouts
from raydist.parameter_servers.consistency import BoundedStaleness, Consistency
from raydist.parameter_servers.server import ParameterServer
from raydist.parameter_servers.slices import VariablePartitioner
from raydist.replicas.launch import settle
from raydist.replicas.step import ReplicaSetup

__all__ = ["Launched", "launch_served", "make_server"]

_T = TypeVar("_T")


@final
class Launched:
    """Workers and servers that start and stop together. The constructor does not block.

    Attributes:
        worker_hosts: The node id of each worker.
        server_hosts: The node id of each server.
    """

    def __init__(
        self, setups: Sequence[ReplicaSetup], workers: WorkerActors, servers: ServerActors, hosts: Sequence[str]
    ) -> None:
        num_ps = len(servers.names)
        self.server_hosts, self.worker_hosts = tuple(hosts[:num_ps]), tuple(hosts[num_ps:])
        self._setups = tuple(setups)
        self._workers = workers
        self._servers = servers
        self._side: ServedSide | None = None
        self._coordinator: Coordinator | None = None

    def start(
        self,
        timeouts: Timeouts,
        *,
        consistency: Consistency,
        partitioner: VariablePartitioner | None,
        prefetch_pulls: bool,
        server_memory: int | None,
    ) -> None:
        """Wait for the servers (limit: `Timeouts.start_s`), and start the workers without waiting for them.

        Args:
            timeouts: The limit of every wait.
            consistency: See `ServedSide`.
            partitioner: See `ServedSide`.
            prefetch_pulls: See `ServedSide`.
            server_memory: Bytes that a server may hold; None: no limit.
        """
        limit_s = timeouts.collective_s
        terms = (len(self._servers.names), consistency, server_memory)
        self._servers.start(make_server, *terms, within_s=timeouts.start_s)
        self._side = ServedSide(
            self._setups,
            self._servers,
            consistency=consistency,
            partitioner=partitioner,
            prefetch_pulls=prefetch_pulls,
            timeout_s=limit_s,
        )
        max_clocks = consistency.max_clocks if isinstance(consistency, BoundedStaleness) else None
        self._coordinator = Coordinator(self._workers, self._side, len(self._setups), timeouts, max_clocks)
        self._coordinator.start()

    @property
    def side(self) -> ServedSide:
        """The driver's connection to the servers."""
        return _started(self._side)

    @property
    def coordinator(self) -> Coordinator:
        """The scheduler of closures."""
        return _started(self._coordinator)

    def close(self) -> None:
        """Stop everything. May be called twice."""
        with contextlib.ExitStack() as stack:
            stack.callback(self._workers.kill)
            stack.callback(self._servers.kill)
            if self._coordinator is not None:
                stack.callback(self._coordinator.close)


def _started(part: _T | None) -> _T:
    if part is None:
        raise FailedPreconditionError("raydist bug: servers and workers must have been started before they are used.")
    return part


def make_server(number: int, num_servers: int, consistency: Consistency, memory: int | None) -> ParameterServer:
    """Create a parameter server in the calling process."""
    return ParameterServer(
        number,
        num_servers,
        consistency,
        memory=memory,
        saver=SliceWriter(),
        restorer=PartReader(),
    )


def launch_served(plan: ServedPlan, timeouts: Timeouts, holder: str) -> Launched:
    """Reserve resources and start the processes; returns before they answer.

    Blocks until the reservation is made (limit: `Timeouts.start_s`). Servers and workers are spread over the nodes, so
    that servers have nodes of their own where there are enough. `holder` names the strategy in messages.
    """
    reservation = place(plan.bundles, strategy="SPREAD", timeout_s=timeouts.start_s, holder=holder)
    try:
        return _seat(plan, reservation, timeouts)
    except BaseException:
        release(reservation)
        raise


def _seat(plan: ServedPlan, reservation: Any, timeouts: Timeouts) -> Launched:
    hosts = hosts_of(reservation)
    nodes = {node.node_id: node for node in living_nodes()}
    setups = settle(plan.setups, hosts[plan.num_ps :], nodes)
    titles = [nodes[host].title if host in nodes else "" for host in hosts]
    name = setups[0].name
    servers = ServerActors(
        reservation,
        [ServerSeat(number, titles[number]) for number in range(plan.num_ps)],
        name=name,
        resources=plan.server_resources,
        num_workers=len(setups),
        limit_s=timeouts.collective_s,
    )
    seats = [
        Seat(
            bundle=plan.num_ps + setup.rank,
            resources=plan.worker_resources,
            env={"OMP_NUM_THREADS": str(setup.num_threads), **console_settings()},
            host=setup.host,
            node_id=hosts[plan.num_ps + setup.rank],
        )
        for setup in setups
    ]
    workers = WorkerActors(ReplicaActors(reservation, seats, name=name, kind="worker"))
    return Launched(setups, workers, servers, hosts)
