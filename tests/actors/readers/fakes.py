"""An input pipeline in this process: the same calls as through Ray, without actors and object store."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Iterator
from typing import Any

from raydist.actors.epochs.input_pipeline import InputPipeline
from raydist.actors.epochs.job import InputJob, MergedJob
from raydist.core.errors import UnavailableError
from raydist.distributed_dataset import InputSide, ReplicaCount
from raydist.options import Timeouts

TIMEOUTS = Timeouts(poll_s=0.2, input_s=20.0, close_s=5.0)


class FakeLink:
    """Stands for `PipelineLink`: an answer is computed when it is received."""

    def __init__(self, pipeline: InputPipeline, key: str, timeouts: Timeouts, on_host: bool = False) -> None:
        self.pipeline = pipeline
        self.name = "fake-input"
        self.key = key
        self.timeouts = timeouts
        self.on_host = on_host
        self.fetched = 0
        self.host: FakeHost | None = None

    def call(self, method: str, *args: Any) -> Any:
        self._require_alive()
        return getattr(self.pipeline, method)(self.key, *args)

    def _require_alive(self) -> None:
        if self.host is not None and self.pipeline is not self.host.pipeline:
            raise UnavailableError(f"The input pipeline {self.name} is gone.")

    def is_lost(self) -> bool:
        return self.host is not None and self.pipeline is not self.host.pipeline

    def ask(self, poll: Any) -> Any:
        return poll

    def acknowledge(self, asked: Any, rank: int | None, done: int) -> None:
        self.pipeline.acknowledge(self.key, rank, done)

    def is_answered(self, asked: Any, stop: Any = None, timeout_s: float | None = None) -> bool:
        return timeout_s is None

    def receive(self, asked: Any) -> Any:
        self._require_alive()
        return self.pipeline.poll(self.key, asked)

    def fetch(self, ref: Any) -> Any:
        self._require_alive()
        self.fetched += 1
        return ref

    def reclaim(self) -> Any:
        return self.pipeline.reclaim(self.key)

    def abandon(self) -> None:
        self.pipeline.abandon(self.key, self.timeouts.close_s)

    def close(self) -> None:
        self.pipeline.close(self.key, self.timeouts.close_s)


class FakeHost:
    """Stands for `InputPipelineActors`."""

    def __init__(self, timeouts: Timeouts = TIMEOUTS) -> None:
        self.pipeline = InputPipeline("fake", put=lambda piece: piece)
        self._timeouts = timeouts
        self.links: list[FakeLink] = []

    def open(self, job: InputJob | MergedJob) -> Any:
        if isinstance(job, InputJob):
            return self._link("open", job)
        return self._link("open_merged", job, [self._link("open", each) for each in job.of_workers()])

    def _link(self, method: str, job: Any, *args: Any) -> FakeLink:
        link = FakeLink(self.pipeline, uuid.uuid4().hex, self._timeouts, job.input_options.on_host)
        link.host = self
        link.call(method, job, *args)
        self.links.append(link)
        return link

    def lose_pipeline(self) -> None:
        """Replace the pipeline by another one, as if its process had died."""
        self.close()
        self.pipeline = InputPipeline("fake", put=lambda piece: piece)

    def close(self) -> None:
        for key in self.pipeline.open_epochs():
            self.pipeline.close(key, self._timeouts.close_s)


@contextlib.contextmanager
def fake_side(num_replicas: int, timeouts: Timeouts = TIMEOUTS, *, num_workers: int = 1) -> Iterator[InputSide]:
    """The input side of a strategy with `num_replicas` replicas."""
    host = FakeHost(timeouts)
    try:
        yield InputSide(host, ReplicaCount(num_replicas, num_workers), timeouts, drain=lambda: None)
    finally:
        host.close()
