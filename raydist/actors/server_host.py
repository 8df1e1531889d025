"""The actor that hosts one parameter server, with its metrics. Requests are answered one at a time."""

from __future__ import annotations

import dataclasses
import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import ray
import torch
from ray.util.metrics import Counter, Gauge

from raydist.actors.portable_errors import pack_error
from raydist.actors.software import Software, installed_software
from raydist.actors.supervision import RemoteFailure, title_of_this_actor
from raydist.collectives.flat_bytes import flat_bytes
from raydist.parameter_servers.desk import Outcome, RequestHandler, ServerDesk
from raydist.parameter_servers.lanes.hall import Hall
from raydist.parameter_servers.lanes.ticket import LaneTicket
from raydist.parameter_servers.link import too_late
from raydist.parameter_servers.requests import ServerAnswer, ServerRequest, Statistics
from raydist.parameter_servers.server_stats import ServerStats

__all__ = ["PackedTensor", "ServerHost", "ServerMetrics", "staleness_bucket"]

_TAGS = ("strategy", "server")
_COUNTED = {
    "pulls": "Reads of values.",
    "pushes": "Changes applied.",
    "late": "Gradients dropped because they came after their step.",
    "bytes_pulled": "Bytes of values read.",
    "bytes_pushed": "Bytes of changes.",
    "apply_seconds": "Seconds spent in applying changes.",
}


@final
class ServerMetrics:
    """Metrics of one server, in the server's process. Names begin with `raydist_parameter_server_`.

    Args:
        strategy: Name of the strategy; a tag.
        server: Name of the server; a tag.
    """

    def __init__(self, strategy: str, server: str) -> None:
        self._tags = {"strategy": strategy, "server": server}
        self._before = ServerStats(0)
        self._counters: dict[str, Any] = {
            name: Counter(f"raydist_parameter_server_{name}", description=text, tag_keys=_TAGS)
            for name, text in _COUNTED.items()
        }
        self._held = Gauge(
            "raydist_parameter_server_bytes_held",
            description="Bytes of values, and of what optimizers remember.",
            tag_keys=_TAGS,
        )
        self._staleness = Counter(
            "raydist_parameter_server_staleness",
            description="Gradients applied, by how many changes came between their read and that.",
            tag_keys=(*_TAGS, "changes"),
        )

    def update(self, stats: ServerStats) -> None:
        """Update Ray's metrics to the server's current counts."""
        for name, counter in self._counters.items():
            _raise(counter, getattr(stats, name) - getattr(self._before, name), self._tags)
        self._held.set(stats.bytes_held, tags=self._tags)
        for changes, count in stats.staleness.items():
            tags = {**self._tags, "changes": staleness_bucket(changes)}
            _raise(self._staleness, count - self._before.staleness.get(changes, 0), tags)
        self._before = stats


def _raise(counter: Any, by: float, tags: Mapping[str, str]) -> None:
    if by > 0:  # Ray refuses 0
        counter.inc(by, tags=dict(tags))


def staleness_bucket(changes: int) -> str:
    """Return the label of the range that a staleness falls into. Each range is twice as wide as the previous one.

    >>> [staleness_bucket(changes) for changes in (0, 1, 2, 3, 4, 7, 8)]
    ['0', '1', '2-3', '2-3', '4-7', '4-7', '8-15']
    """
    if changes < 2:
        return str(max(changes, 0))
    first = 1 << (changes.bit_length() - 1)
    return f"{first}-{2 * first - 1}"


_PUBLISH_S = 5.0  # between two readings of the server's statistics, for Ray's metrics

_log = logging.getLogger("raydist")


@final
@dataclass(frozen=True, slots=True)
class PackedTensor:
    """A tensor on its way through Ray's object store. numpy transfers the bytes without another copy.

    Attributes:
        array: The bytes.
        dtype: dtype of the tensor.
        shape: Shape of the tensor.
    """

    array: np.ndarray[Any, np.dtype[np.uint8]]
    dtype: torch.dtype
    shape: tuple[int, ...]

    @staticmethod
    def of(tensor: torch.Tensor) -> PackedTensor:
        """Copy the current values of a tensor."""
        flat = flat_bytes(tensor.detach())
        return PackedTensor(flat.numpy().copy(), tensor.dtype, tuple(tensor.shape))

    def tensor(self) -> torch.Tensor:
        """Return a copy of the values: memory of the object store must not be written to."""
        if not self.array.size:
            return torch.empty(self.shape, dtype=self.dtype)
        return torch.from_numpy(self.array.copy()).view(self.dtype).reshape(self.shape)


@final
class ServerHost:
    """The actor that hosts one server. Each `ask` waits in a thread; one thread runs all other methods."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self._hall: Hall | None = None
        self._title = "a parameter server that was not started"
        self._ended = threading.Event()
        self._shown = title_of_this_actor()

    def __repr__(self) -> str:
        return self._shown or type(self).__name__

    def about(self) -> Software:
        """Return the versions and devices of this process."""
        return installed_software()

    def start(self, title: str, strategy: str, make_server: Callable[..., RequestHandler], *args: Any) -> int:
        """Create the server, start to answer requests, and return the process id."""
        self._title = title
        self._ended = threading.Event()
        try:
            self._hall = Hall.open(ServerDesk(make_server(*args)), title)
        except BaseException as error:
            raise RemoteFailure(pack_error(error)) from None
        threading.Thread(target=self._serve, args=(self._hall,), name="raydist-server", daemon=True).start()
        metrics = ServerMetrics(strategy, title)
        threading.Thread(target=self._publish, args=(metrics, self._ended), name="raydist-metrics", daemon=True).start()
        return os.getpid()

    def _serve(self, hall: Hall) -> None:
        try:
            hall.serve()
        except BaseException:
            # End the process: callers that wait for an answer then learn that the server is gone.
            _log.exception("A parameter server ends.")
            os._exit(1)

    def open_lane(self) -> LaneTicket | None:
        """Open a lane for one process of this host."""
        return None if self._hall is None else self._hall.open_lane()

    @ray.method(concurrency_group="asks")
    def ask(self, request: ServerRequest, packed: Sequence[PackedTensor], limit_s: float) -> Any:
        """Return the server's answer and its tensors. Blocks until the server answers, for `limit_s` at most."""
        outcome, tensors = self._outcome(request, [each.tensor() for each in packed], limit_s)
        if outcome.error is not None:
            raise RemoteFailure(pack_error(outcome.error)) from None
        return outcome.answer, tensors

    def _outcome(
        self, request: ServerRequest, tensors: Sequence[torch.Tensor], limit_s: float
    ) -> tuple[Outcome, list[PackedTensor]]:
        told: list[tuple[Outcome, list[PackedTensor]]] = []
        there = threading.Event()

        def tell(outcome: Outcome) -> None:
            # Packed at once: the next request may change the tensors that these are views of.
            told.append((outcome, [PackedTensor.of(each) for each in outcome.tensors]))
            there.set()

        hall = self._hall
        if hall is None or self._ended.is_set():
            return Outcome(ServerAnswer(), error=too_late(self._title, 0)), []
        hall.submit(lambda desk: desk.take(request, tensors, tell))
        if not there.wait(limit_s):
            return Outcome(ServerAnswer(), error=too_late(self._title, limit_s)), []
        outcome, packed = told[0]
        if isinstance(request, Statistics) and outcome.error is None:
            outcome = dataclasses.replace(outcome, answer=self._with_reads(outcome.answer, hall))
        return outcome, packed

    def _with_reads(self, answer: ServerAnswer, hall: Hall) -> ServerAnswer:
        """Return the statistics with the reads that workers of this host made through shared memory."""
        stats = answer.value
        if not isinstance(stats, ServerStats):
            return answer
        pulls, num_bytes = hall.reads()
        counted = dataclasses.replace(stats, pulls=stats.pulls + pulls, bytes_pulled=stats.bytes_pulled + num_bytes)
        return dataclasses.replace(answer, value=counted)

    def _publish(self, metrics: ServerMetrics, ended: threading.Event) -> None:
        while not ended.wait(_PUBLISH_S):
            outcome, _ = self._outcome(Statistics(), (), _PUBLISH_S)
            if isinstance(outcome.answer.value, ServerStats):
                metrics.update(outcome.answer.value)

    def stop(self) -> None:
        """Stop answering requests."""
        self._ended.set()
        if self._hall is not None:
            self._hall.stop()
