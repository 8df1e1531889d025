"""Servers read the slices that they restore, and what optimizers remember of them; the driver reads no tensor."""

from __future__ import annotations

import threading
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import raydist as rd
from raydist.checkpoints import contents, read_tensors
from raydist.checkpoints.saved_checkpoint import SavedCheckpoint
from raydist.checkpoints.sharing import started_save
from raydist.checkpoints.sharing.part_reader import PartReader
from raydist.context.step_counter import StepCounter
from raydist.coordinator.restoring import ServedRestorer
from raydist.parameter_servers.consistency import BoundedStaleness, SyncWithBackups
from raydist.parameter_servers.partitioners import FixedShardsPartitioner
from raydist.pipelines.stored.directory_files import directory_files
from tests.coordinator.served_here import Served, served
from tests.coordinator.test_saving import opened

SERVER = "raydist-restore"

Kind = Callable[[Any], torch.optim.Optimizer]


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.02, betas=(0.8, 0.99), amsgrad=True)


class Net(nn.Module):
    """With all that servers may have: rows, buffers, a scalar, one variable under two names, none without elements."""

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

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.tied(self.second(self.norm(self.first(x)) * self.factor).tanh())
        return out


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
        self.model, self.counter = Net(), StepCounter()
        self.optimizer = kind(self.model.parameters())
        self.checkpoint = rd.Checkpoint(model=self.model, optimizer=self.optimizer, counter=self.counter)

    def _find_restorer(self) -> Any:
        return None if self.here is None else self.here.restorer

    def train(self, numbers: range) -> None:
        model, optimizer = self.model, self.optimizer

        def step(x: torch.Tensor) -> None:
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()

        for number in numbers:
            if self.here is None:
                step(batch(number))
            else:
                self.here.schedule(step, batch(number))
            self.counter.value += 1

    def state(self) -> dict[str, Any]:
        """All of it, copied."""
        if self.here is not None:
            self.here.coordinator.join()
        found: dict[str, Any] = {
            "model": {key: value.detach().clone() for key, value in self.model.state_dict().items()},
            "counter": int(self.counter.value),
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
        patch.setattr(ServedRestorer, "can_restore", lambda self, obj: False)
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
    monkeypatch.setattr(started_save, "UNDIVIDED_BYTES", 0)

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


@pytest.mark.parametrize("kind", [momentum, adam])
@pytest.mark.parametrize(
    ("before", "after", "num_steps"),
    [(None, (1, 1), 0), (None, (3, 3), 2), ((3, 3), (2, 2), 2), ((2, 2), (3, 3), 0), ((1, 1), (3, 5), 2)],
)
def test_servers_read_what_they_have_and_training_goes_on(
    kind: Kind,
    before: tuple[int, int] | None,
    after: tuple[int, int],
    num_steps: int,
    saved: Saved,
    read: Counter[tuple[str, str, bool]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of programs that have trained, and that begin; 50 steps more are those of one that the driver restored."""
    path, expected = saved(kind, *(before or ()))
    states = []
    for by_servers in (True, False):
        with served(1, after[0], partitioner=FixedShardsPartitioner(after[1])) as here:
            run = Run(kind, here, monkeypatch, seed=7)
            run.train(range(40, 40 + num_steps))
            read.clear()
            if by_servers:
                run.checkpoint.restore(path)
                assert read
                assert not [each for each in read if not each[2]], "the driver reads no tensor"
            else:
                with driver_alone(monkeypatch):
                    run.checkpoint.restore(path)
            run.train(range(3, 5))
            run.checkpoint.restore(path) if by_servers else None
            if by_servers:
                assert_same(run.state(), expected)
            else:
                with driver_alone(monkeypatch):
                    run.checkpoint.restore(path)
            run.train(range(3, 53))
            states.append(run.state())
    assert_same(*states)
    assert states[0]["counter"] == 53
