"""Programs on servers, or alone, that are saved and restored: what tests of restoring share."""

from __future__ import annotations

import functools
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import raydist as rd
from raydist.checkpoints import checkpoint as saving
from raydist.checkpoints import contents, read_tensors
from raydist.checkpoints.shards import ShardTerms
from raydist.coordinator.checkpointing import PsRestorer
from raydist.parameter_servers.slices import FixedShardsPartitioner
from tests.coordinator.ps_in_process import Served, served

__all__ = ["Kind", "Net", "Run", "Saved", "adam", "assert_same", "driver_alone", "momentum", "read", "saved"]

SERVER = "raydist-restore"

Kind = Callable[[Any], torch.optim.Optimizer]


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.02, betas=(0.8, 0.99), amsgrad=True)


class Net(nn.Module):
    """With all that servers may have: rows, buffers, a scalar, one variable under two names, some without elements."""

    empty: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 7)
        self.norm = nn.BatchNorm1d(7)
        self.factor = nn.Parameter(torch.tensor(1.5))
        self.second = nn.Linear(7, 7, bias=False)
        self.tied = nn.Linear(7, 7)
        self.tied.weight = self.second.weight
        self.register_buffer("empty", torch.empty(0, 3))
        self.no_rows = nn.Parameter(torch.empty(0, 3))
        self.no_columns = nn.Parameter(torch.empty(4, 0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.tied(self.second(self.norm(self.first(x)) * self.factor).tanh())
        return out + self.no_rows.sum() + self.no_columns.sum()


class Steps(nn.Module):
    """Counts steps."""

    value: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("value", torch.zeros((), dtype=torch.int64))


def batch(number: int) -> torch.Tensor:
    return torch.sin(torch.arange(32.0) + number).reshape(8, 4)


class Run:
    """A program on servers, or alone."""

    def __init__(self, kind: Kind = adam, here: Served | None = None, monkeypatch: Any = None, seed: int = 1) -> None:
        self.here = here
        torch.manual_seed(seed)
        if here is None:
            self._make(kind)
        else:
            with here.mirror.scope():
                self._make(kind)
            monkeypatch.setattr(contents, "open_strategies", lambda: [self])

    def _make(self, kind: Kind) -> None:
        self.model, self.steps = Net(), Steps()
        self.optimizer = kind(self.model.parameters())
        self.checkpoint = rd.Checkpoint(model=self.model, optimizer=self.optimizer, steps=self.steps)

    def _find_restorer(self) -> Any:
        return None if self.here is None else self.here.restorer

    def train(self, numbers: range) -> None:
        model, optimizer, steps = self.model, self.optimizer, self.steps

        def step(x: torch.Tensor) -> None:
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
            steps.value += 1

        for number in numbers:
            if self.here is None:
                step(batch(number))
            else:
                self.here.schedule(step, batch(number))

    def state(self) -> dict[str, Any]:
        """All of it, copied."""
        if self.here is not None:
            self.here.coordinator.join()
        found: dict[str, Any] = {
            "model": {key: value.detach().clone() for key, value in self.model.state_dict().items()},
            "steps": int(self.steps.value),
            **self.optimizer.state_dict(),
        }
        found["param_groups"] = [{**group, "fused": None} for group in found["param_groups"]]
        return found


def assert_same(found: Any, expected: Any, tolerance: float = 0.0) -> None:
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


@contextmanager
def driver_alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Inside, the driver restores everything."""
    with monkeypatch.context() as patch:
        patch.setattr(PsRestorer, "can_restore", lambda self, obj: False)
        yield


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> Counter[tuple[str, str, bool]]:
    """Bytes that were read: by file, by what it was, and whether a server read them."""
    found: Counter[tuple[str, str, bool]] = Counter()
    original = read_tensors._FileReader._some

    def some(self: Any, size: int, what: str) -> bytes:
        piece = original(self, size, what)
        found[Path(self._path).name, what, threading.current_thread().name == SERVER] += len(piece)
        return piece

    monkeypatch.setattr(read_tensors._FileReader, "_some", some)
    return found


Saved = Callable[..., tuple[Path, dict[str, Any]]]


@pytest.fixture
def saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Saved:
    """Saves a run of three steps on so many servers, or alone; says where, and its state."""
    monkeypatch.setattr(saving, "ShardTerms", functools.partial(ShardTerms, small_bytes=0))

    def save(kind: Kind = adam, num_servers: int | None = None, parts: int = 1) -> tuple[Path, dict[str, Any]]:
        path = tmp_path / "c"
        if num_servers is None:
            run = Run(kind)
            run.train(range(3))
            run.checkpoint.save(path)
            return path, run.state()
        with served(1, num_servers, partitioner=FixedShardsPartitioner(parts)) as here:
            run = Run(kind, here, monkeypatch)
            run.train(range(3))
            run.checkpoint.save(path)
            return path, run.state()

    return save
