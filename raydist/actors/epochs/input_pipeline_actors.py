"""The driver's handles of the InputPipeline actors: one actor, or one on the node of each worker with its own data."""

from __future__ import annotations

import contextlib
import threading
import uuid
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, final

import ray

from raydist.actors.epochs.input_pipeline import InputPipeline
from raydist.actors.epochs.job import MergedJob
from raydist.actors.epochs.link import PipelineLink
from raydist.actors.supervision import kill_actors
from raydist.cluster.nodes import living_nodes
from raydist.cluster.ray_session import RaySession
from raydist.cluster.reservation import on_node
from raydist.core.errors import UnavailableError
from raydist.core.fork_guard import OwningProcess

if TYPE_CHECKING:
    from raydist.actors.epochs.job import InputJob
    from raydist.options import Timeouts

_LEAST_REPLICAS = 8  # so that a strategy of a few replicas can get more of them
_SPARE_THREADS = 8  # calls that do not wait for data: open, close, release, ...


def _on_one_node() -> Sequence[str | None]:
    return ()


@final
class InputPipelineActors:
    """The InputPipeline actors of one strategy, which are started on demand and replaced when they die.

    Args:
        name: Prefix of the actors' names; made unique.
        num_replicas: Number of readers that may wait at the same time.
        timeouts: Limits.
        node_id: Ray node to run on; None for any.
        worker_nodes: Returns the node of each worker, for workers with their own data. May wait for their placement.
    """

    def __init__(
        self,
        name: str,
        *,
        num_replicas: int,
        timeouts: Timeouts,
        node_id: str | None = None,
        worker_nodes: Callable[[], Sequence[str | None]] = _on_one_node,
    ) -> None:
        self._timeouts = timeouts
        self._worker_nodes = worker_nodes
        self._process = OwningProcess("A distributed dataset")
        self._session: RaySession | None = None
        num_replicas = max(num_replicas, _LEAST_REPLICAS)
        self._hosted = {node_id: _PipelineActor(name, num_replicas, node_id)}
        self._main = self._hosted[node_id]
        self._name = name
        self._num_replicas = num_replicas
        self._retired: list[Any] = []  # actors that take no further epochs, but own batches that may be needed
        self._opening = threading.Lock()

    def open(self, job: InputJob | MergedJob) -> PipelineLink:
        """Start an epoch. Blocks until the actors have it (`Timeouts.start_s`). Thread-safe."""
        self._process.require("read")
        with self._opening:
            return self._open_epoch(job)

    def _open_epoch(self, job: InputJob | MergedJob) -> PipelineLink:
        if self._session is not None:
            self._session.require("The strategy of a distributed dataset")
        if not isinstance(job, MergedJob):
            found = self._worker_nodes() if job.serves_workers else ()
            node_ids = tuple(dict.fromkeys(node for node in found if node is not None))
            return self._open(self._main, "open", replace(job, node_ids=node_ids))
        jobs = job.of_workers()
        nodes = self._worker_nodes() or (self._main.node_id,) * len(jobs)
        hosted = [self._on(node) for node in nodes]
        for each in hosted:
            self._start(each)
        with contextlib.ExitStack() as opened:
            links = []
            for each, its_job in zip(hosted, jobs, strict=True):
                links.append(self._open(each, "open", its_job))
                opened.callback(links[-1].close)
            whole = self._open(self._main, "open_merged", job, links)
            opened.pop_all()
        return whole

    def link_to_epochs(self, *, on_host: bool = False) -> PipelineLink:
        """Return a link for epochs that another process opens later (`PipelineLink.keyed`)."""
        self._process.require("read")
        self.start()
        return PipelineLink(self._main.actor, self._main.title, uuid.uuid4().hex, self._timeouts, on_host=on_host)

    def _on(self, node_id: str | None) -> _PipelineActor:
        if node_id not in self._hosted:
            self._hosted[node_id] = _PipelineActor(self._name, self._num_replicas, node_id)
        return self._hosted[node_id]

    def _open(self, hosted: _PipelineActor, method: str, job: InputJob | MergedJob, *args: Any) -> PipelineLink:
        if hosted.actor is not None:
            try:
                return self._ask(hosted, method, job, *args)
            except UnavailableError:  # the actor died since the last epoch
                hosted.actor = None
        self._start(hosted)
        return self._ask(hosted, method, job, *args)

    def _ask(self, hosted: _PipelineActor, method: str, job: InputJob | MergedJob, *args: Any) -> PipelineLink:
        on_host = job.input_options.on_host
        link = PipelineLink(hosted.actor, hosted.title, uuid.uuid4().hex, self._timeouts, on_host=on_host)
        link.job = job
        link.call(method, job, *args)
        return link

    def start(self) -> None:
        """Start the main actor if there is none. Does not block."""
        self._start(self._main)

    def change(self, num_replicas: int, leaving: Collection[str] = ()) -> None:
        """Serve another number of replicas, and leave nodes. Does not block.

        Other actors make the next epochs: where the present ones serve fewer replicas, or are on these nodes.
        """
        with self._opening:
            for each in self._hosted.values():
                if each.actor is not None and (each.num_replicas < num_replicas or each.node_id in leaving):
                    self._retired.append(each.actor)
                    each.actor = None
                if each.node_id in leaving:
                    each.node_id = None
                each.num_replicas = max(num_replicas, each.num_replicas)
            self._num_replicas = max(num_replicas, self._num_replicas)
            self.start()

    def _start(self, hosted: _PipelineActor) -> None:
        if hosted.actor is None:
            self._session = RaySession()
            hosted.start()

    def close(self) -> None:
        """Kill the actors with their epochs, threads and input workers. Idempotent."""
        actors = [hosted.actor for hosted in self._hosted.values() if hosted.actor is not None]
        actors, self._retired = [*actors, *self._retired], []
        for hosted in self._hosted.values():
            hosted.actor = None
        if actors and self._process.is_this and self._session is not None and self._session.is_open:
            kill_actors(actors)


@final
class _PipelineActor:
    """One InputPipeline actor.

    Attributes:
        actor: Handle of the actor; None while there is none.
        name: Name of the last actor; empty before the first.
        num_replicas: Number of readers that may wait at the same time.
    """

    def __init__(self, prefix: str, num_replicas: int, node_id: str | None) -> None:
        self.node_id = node_id
        self.actor: Any = None
        self.name = ""
        self.num_replicas = num_replicas
        self._prefix = prefix

    @property
    def title(self) -> str:
        """The actor's name in messages."""
        return self.name if self.node_id is None else f"{self.name} (of Ray node {self.node_id[:8]})"

    def start(self) -> None:
        """Start a new actor; on any node if its own is gone. Does not block."""
        if self.name and self.node_id not in {node.node_id for node in living_nodes()}:
            self.node_id = None
        self.name = f"{self._prefix}-input-{uuid.uuid4().hex[:8]}"
        scheduling = None
        if self.node_id is not None:
            self.node_id, scheduling = on_node(self.node_id)
        self.actor = (
            ray.remote(InputPipeline)
            .options(
                name=self.name,
                num_cpus=0,
                max_concurrency=4 * self.num_replicas + _SPARE_THREADS,
                scheduling_strategy=scheduling,
                max_restarts=0,
                max_task_retries=0,
                enable_task_events=False,  # Ray's agents would spend CPU on every poll
            )
            .remote(self.name, node_id=self.node_id, own_process=True)
        )
