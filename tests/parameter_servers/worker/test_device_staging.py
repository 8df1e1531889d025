"""What a GPU would do is done by fakes of torch.cuda: no GPU is asked here."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from raydist.parameter_servers.worker import device_staging as module
from raydist.parameter_servers.worker.worker_copies import CudaSideStream, HostGradients


class FakeStream:
    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    def wait_stream(self, other: FakeStream) -> None:
        self.log.append(f"{self.name} waits for {other.name}")

    def synchronize(self) -> None:
        self.log.append(f"host waits for {self.name}")


class FakeTensor:
    """A tensor of a device, as far as copies use it."""

    def __init__(self, log: list[str]) -> None:
        self.log = log

    def copy_(self, source: Any, *, non_blocking: bool) -> None:
        self.log.append(f"copy, non-blocking {non_blocking}")

    def record_stream(self, stream: FakeStream) -> None:
        self.log.append(f"used by {stream.name}")


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    told: list[str] = []
    current = FakeStream("current", told)

    @contextlib.contextmanager
    def within(stream: FakeStream) -> Iterator[None]:
        told.append(f"in {stream.name}")
        yield
        told.append(f"out of {stream.name}")

    monkeypatch.setattr(torch.cuda, "Stream", lambda device: FakeStream("side", told))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current)
    monkeypatch.setattr(torch.cuda, "stream", within)
    return told


def test_values_are_copied_beside_what_is_computed(log: list[str]) -> None:
    stream = CudaSideStream(torch.device("cuda:0"))
    target: Any = FakeTensor(log)
    stream.copy([(target, torch.zeros(1))])
    assert log == [
        "side waits for current",
        "in side",
        "copy, non-blocking True",
        "used by side",
        "out of side",
        "current waits for side",
    ]
    log.clear()
    stream.wait()
    stream.fetch([(target, torch.zeros(1))])
    assert log == ["host waits for side", "copy, non-blocking True", "host waits for current"]


class Away(torch.Tensor):
    """Says that it is on a GPU."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cuda:0")

    is_cpu = False


class Brings:
    def __init__(self) -> None:
        self.made = 0

    def copy(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None: ...

    def wait(self) -> None: ...

    def fetch(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        for target, source in pairs:
            target.copy_(source.as_subclass(torch.Tensor))

    def pinned(self, like: torch.Tensor) -> torch.Tensor:
        self.made += 1
        return torch.empty(like.shape, dtype=like.dtype)


def test_gradients_come_to_memory_that_is_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    side = Brings()
    monkeypatch.setattr(module, "side_stream_for", lambda device: side)
    staging = HostGradients()
    here = torch.ones(2)
    assert staging.bring([here])[0] is here
    away = torch.full((3,), 4.0).as_subclass(Away)
    first = staging.bring([here, away])
    assert first[0] is here
    assert first[1].tolist() == [4, 4, 4]
    assert staging.bring([here, away])[1] is first[1]
    assert staging.bring([here, torch.ones(5).as_subclass(Away)])[1].tolist() == [1] * 5
    assert side.made == 2
