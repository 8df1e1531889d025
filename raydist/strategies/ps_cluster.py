"""The workers and parameter servers of one strategy: planned at the first question, started when first needed."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import final

import torch

from raydist.cluster.nodes import address_of, connect, waits_for_own
from raydist.cluster.preemption import add_step_queue
from raydist.coordinator.launch import Launched, PsPlan, PsRequest, launch_ps, plan_ps
from raydist.core.errors import InvalidArgumentError
from raydist.options import Timeouts
from raydist.parameter_servers.consistency import Consistency
from raydist.parameter_servers.slices import VariablePartitioner
from raydist.strategies.worker_request import assign_hosts


@final
@dataclass(frozen=True, slots=True)
class PsOptions:
    """Settings of the parameter servers.

    Attributes:
        consistency: The values that workers may read.
        partitioner: Splits variables into parts; None for no splits.
        prefetch_pulls: The parameters that a push returned serve the next closure.

    Raises:
        InvalidArgumentError: `partitioner` is not a function.
    """

    consistency: Consistency = "async"
    partitioner: VariablePartitioner | None = None
    prefetch_pulls: bool = True

    def __post_init__(self) -> None:
        if self.partitioner is not None and not callable(self.partitioner):
            raise InvalidArgumentError(
                "variable_partitioner must be a function of (shape, dtype), such as rd.MinSizePartitioner(), or None, "
                f"got {self.partitioner!r:.80}."
            )


@final
class PsCluster:
    """The workers and servers of one strategy. For use by one thread.

    `name` is unique, `title` is for messages. Once workers and servers are started, `close_when_dropped` is called with
    a function that ends the processes, then `on_start`.

    Attributes:
        launched: Workers and servers; None until they are started.
    """

    def __init__(
        self,
        name: str,
        title: str,
        request: PsRequest,
        options: PsOptions,
        timeouts: Timeouts,
        *,
        close_when_dropped: Callable[[Callable[[], None]], None],
        on_start: Callable[[Launched], None],
    ) -> None:
        self.launched: Launched | None = None
        self._name = name
        self._title = title
        self._request = request
        self._options = options
        self._timeouts = timeouts
        self._close_when_dropped = close_when_dropped
        self._on_start = on_start
        self._ps_plan: PsPlan | None = None

    @property
    def num_workers(self) -> int:
        """Number of workers. If it was left open, the property may start or join Ray."""
        return self._request.num_workers or len(self.plan().setups)

    @property
    def worker_devices(self) -> tuple[str, ...]:
        """One device name for each worker."""
        return tuple(setup.worker_devices[0] for setup in self.plan().setups)

    def device_types(self) -> set[str]:
        """Return the device types of the workers."""
        return {torch.device(setup.device).type for setup in self.plan().setups}

    def nodes(self) -> tuple[str, ...]:
        """Return the nodes of workers and servers, as far as they are placed."""
        return () if self.launched is None else (*self.launched.worker_hosts, *self.launched.server_hosts)

    def plan(self) -> PsPlan:
        """Plan workers and servers. May start or join Ray (limit: `Timeouts.start_s`)."""
        if self._ps_plan is None:
            cluster = connect()
            find = functools.partial(assign_hosts, nodes=cluster.nodes, resolve=address_of)
            self._ps_plan = plan_ps(
                self._name,
                self._request,
                cluster,
                self._timeouts,
                worker_addresses=find(self._request.worker_hosts),
                server_addresses=find(self._request.server_hosts),
            )
        return self._ps_plan

    def launch_early(self) -> None:
        """Launch, unless older strategies hold the resources: the program may be about to drop one of them."""
        if self.launched is None and not waits_for_own(self.plan().bundles, "SPREAD"):
            self.launch()

    def launch(self) -> Launched:
        """Start workers and servers if necessary, without waiting for workers: the driver builds its model then."""
        if self.launched is None:
            launched = launch_ps(self.plan(), self._timeouts, self._title)
            self._close_when_dropped(launched.close)
            try:
                self._start(launched)
            except BaseException:
                launched.close()
                raise
            add_step_queue(launched.coordinator)
            self.launched = launched
            self._on_start(launched)
        return self.launched

    def _start(self, launched: Launched) -> None:
        launched.start(
            self._timeouts,
            consistency=self._options.consistency,
            partitioner=self._options.partitioner,
            prefetch_pulls=self._options.prefetch_pulls,
            server_memory=int(self.plan().server_resources.get("memory", 0)) or None,
        )
