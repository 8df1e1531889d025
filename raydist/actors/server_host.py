"""The actor that hosts one parameter server, with its metrics. Requests are answered one at a time."""

from __future__ import annotations

import functools
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
from raydist.parameter_servers.connection import RequestDispatcher, RequestHandler, server_is_late
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


@final
@dataclass(frozen=True, slots=True)
class PackedTensor:
    """A tensor on its way through Ray's object store, which maps the bytes of numpy arrays without a copy.

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
        """Pack a tensor; the array shares the memory of a contiguous one."""
        return PackedTensor(flat_bytes(tensor.detach()).numpy(), tensor.dtype, tuple(tensor.shape))

    def tensor(self) -> torch.Tensor:
        """Return a tensor that shares the array's memory."""
        if not self.array.size:
            return torch.empty(self.shape, dtype=self.dtype)
        return torch.from_numpy(_declared_writable(self.array)).view(self.dtype).view(self.shape)


@final
class _ArrayView:
    """A view of an array's memory that numpy takes for writable: torch warns of read-only arrays."""

    def __init__(self, array: np.ndarray[Any, np.dtype[np.uint8]]) -> None:
        self.array = array
        interface = array.__array_interface__
        self.__array_interface__ = {**interface, "data": (interface["data"][0], False)}


def _declared_writable(array: np.ndarray[Any, np.dtype[np.uint8]]) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return array if array.flags.writeable else np.asarray(_ArrayView(array))


@final
class ServerHost:
    """The actor that hosts one server. Each `ask` runs in a thread of its own; one thread runs all other methods."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self._dispatcher: RequestDispatcher | None = None
        self._title = "a parameter server that was not started"
        self._replaced = threading.Event()
        self._shown = title_of_this_actor()

    def __repr__(self) -> str:
        return self._shown or type(self).__name__

    def about(self) -> Software:
        """Return the versions and devices of this process."""
        return installed_software()

    def start(self, title: str, strategy: str, make_server: Callable[..., RequestHandler], *args: Any) -> int:
        """Create the server, start to answer requests, and return the process id."""
        self._title = title
        try:
            dispatcher = self._dispatcher = RequestDispatcher(make_server(*args))
        except BaseException as error:
            raise RemoteFailure(pack_error(error)) from None
        self._replaced.set()
        self._replaced = threading.Event()
        publish = functools.partial(_publish, dispatcher, ServerMetrics(strategy, title), self._replaced)
        threading.Thread(target=publish, name="raydist-metrics", daemon=True).start()
        return os.getpid()

    @ray.method(concurrency_group="asks")
    def ask(
        self, request: ServerRequest, packed: Sequence[PackedTensor], limit_s: float
    ) -> tuple[ServerAnswer, list[PackedTensor]]:
        """Return the server's answer and its tensors. Blocks until the server answers, for `limit_s` at most."""
        try:
            return self._answer(request, [each.tensor() for each in packed], limit_s)
        except Exception as error:
            raise RemoteFailure(pack_error(error)) from None

    def _answer(
        self, request: ServerRequest, tensors: Sequence[torch.Tensor], limit_s: float
    ) -> tuple[ServerAnswer, list[PackedTensor]]:
        if self._dispatcher is None:
            raise server_is_late(self._title, 0)
        future = self._dispatcher.submit(request, tensors, _copied)
        try:
            return future.result(limit_s)
        except TimeoutError:
            if future.done():
                raise  # the server's own
            raise server_is_late(self._title, limit_s) from None


def _copied(tensors: Sequence[torch.Tensor]) -> list[PackedTensor]:
    return [PackedTensor.of(tensor.detach().clone()) for tensor in tensors]


def _publish(dispatcher: RequestDispatcher, metrics: ServerMetrics, ended: threading.Event) -> None:
    while not ended.wait(_PUBLISH_S):
        answer, _ = dispatcher.submit(Statistics(), (), list).result()
        if isinstance(answer.value, ServerStats):
            metrics.update(answer.value)
