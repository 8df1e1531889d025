"""A `ParameterServerStrategy` without Ray: workers are threads, servers lie in this process. And programs on it."""

from __future__ import annotations

import functools
import pickle
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import raydist as rd
from raydist.checkpoints import checkpoint as saving
from raydist.checkpoints import contents, read_tensors
from raydist.checkpoints.capture import StagingBuffers
from raydist.checkpoints.checkpoint import StartedSave, contents_of, start_save
from raydist.checkpoints.manifest import SavedCheckpoint, open_checkpoint
from raydist.checkpoints.ps_reader import ServerReader
from raydist.checkpoints.ps_save import ServerWriter
from raydist.checkpoints.shards import DispatchedSave, ShardTerms
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
from raydist.parameter_servers.slices import FixedShardsPartitioner
from raydist.pipelines.stored.directory_files import directory_files
from raydist.replicas.step import ReplicaSetup, StepHeader
from tests.coordinator.in_process import TIMEOUTS, ThreadPort
from tests.parameter_servers.examples import LocalConnection


class ServersHere:
    """The part of `ServerActors` that `PsServers` uses."""

    def __init__(self, num_servers: int, consistency: Consistency, memory: int | None = None) -> None:
        self.names = [f"parameter server {number}" for number in range(num_servers)]
        self.servers = [
            ParameterServer(
                number,
                num_servers,
                consistency,
                memory=memory,
                saver=ServerWriter(),
                restorer=ServerReader(),
            )
            for number in range(num_servers)
        ]
        self.connections = [
            LocalConnection(server, name) for server, name in zip(self.servers, self.names, strict=True)
        ]


class LocalStrategy:
    """A strategy without Ray."""

    def __init__(self, coordinator: Coordinator, port: ThreadPort, side: PsServers) -> None:
        self.coordinator, self.port, self.side = coordinator, port, side
        self.servers: Sequence[ParameterServer] = ()
        link: Any = self
        self.mirror = MirrorDriver("served", link, row_holders=lambda: 1)
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
def local_strategy(
    num_workers: int = 2,
    num_servers: int = 1,
    consistency: Consistency = "async",
    *,
    partitioner: Any = None,
    timeouts: Timeouts = TIMEOUTS,
    memory: int | None = None,
) -> Iterator[LocalStrategy]:
    """Start a strategy without Ray; stop it afterwards."""
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
        here = LocalStrategy(coordinator, port, side)
        here.servers = servers.servers
        yield here
    finally:
        coordinator.close()
        port.close()


SERVER = "raydist-restore"

Kind = Callable[[Any], torch.optim.Optimizer]


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.02, betas=(0.8, 0.99), amsgrad=True)


class Net(nn.Module):
    """With all that servers may have: buffers, a scalar, a variable with two names, some without elements, a table."""

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
        self.words = rd.ShardedEmbedding(1000, 3, seed=5)

    def forward(self, x: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
        out = self.tied(self.second(self.norm(self.first(x)) * self.factor).tanh()) + self.words(words).square().mean()
        total: torch.Tensor = out + self.no_rows.sum() + self.no_columns.sum()
        return total


class Steps(nn.Module):
    """Counts steps."""

    value: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("value", torch.zeros((), dtype=torch.int64))


EVERY_ROW = torch.arange(120)  # of them from 90 on none is used


class Run:
    """A program on servers, or alone."""

    model: Any

    def __init__(
        self, kind: Kind = adam, here: LocalStrategy | None = None, monkeypatch: Any = None, seed: int = 1
    ) -> None:
        self.here = here
        torch.manual_seed(seed)
        if here is None:
            self._make(kind)
        else:
            with here.mirror.scope():
                self._make(kind)
            if monkeypatch is not None:
                monkeypatch.setattr(contents, "open_strategies", lambda: [self])

    def _make(self, kind: Kind) -> None:
        self.model, self.steps = Net(), Steps()
        self.optimizer = kind(self.model.parameters())
        self.checkpoint = rd.Checkpoint(model=self.model, optimizer=self.optimizer, steps=self.steps)

    def _find_restorer(self) -> Any:
        return None if self.here is None else self.here.restorer

    def inputs(self, number: int) -> tuple[torch.Tensor, ...]:
        return torch.sin(torch.arange(32.0) + number).reshape(8, 4), torch.arange(number, 90, 7)

    def train(self, numbers: range) -> None:
        model, optimizer, steps = self.model, self.optimizer, self.steps

        def step(*inputs: torch.Tensor) -> None:
            optimizer.zero_grad()
            model(*inputs).square().mean().backward()
            optimizer.step()
            steps.value += 1

        for number in numbers:
            if self.here is None:
                step(*self.inputs(number))
            else:
                self.here.schedule(step, *self.inputs(number))

    def state(self) -> dict[str, Any]:
        """All of it, copied."""
        if self.here is not None:
            self.here.coordinator.join()
        found: dict[str, Any] = {
            "model": {key: value.detach().clone() for key, value in self.model.state_dict().items()},
            "rows": self.model.words(EVERY_ROW).detach(),
            "steps": int(self.steps.value),
            **self.optimizer.state_dict(),
        }
        found["param_groups"] = [{**group, "fused": None} for group in found["param_groups"]]
        return found


def begun(run: Run, path: Path) -> StartedSave:
    return start_save(contents_of(run.checkpoint), directory_files(str(path)), {}, staging=StagingBuffers())


def opened(path: Path) -> SavedCheckpoint:
    return open_checkpoint(directory_files(str(path)))


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
    original = read_tensors._FileReader._read_piece

    def some(self: Any, size: int, what: str) -> bytes:
        piece = original(self, size, what)
        found[Path(self._path).name, what, threading.current_thread().name == SERVER] += len(piece)
        return piece

    monkeypatch.setattr(read_tensors._FileReader, "_read_piece", some)
    return found


Saved = Callable[..., tuple[Path, dict[str, Any]]]


@pytest.fixture
def saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Saved:
    """Saves a run of three steps on so many servers, or alone; says where, and its state."""
    monkeypatch.setattr(saving, "ShardTerms", functools.partial(ShardTerms, small_bytes=0))

    def save(kind: Kind = adam, num_servers: int = 0, parts: int = 1) -> tuple[Path, dict[str, Any]]:
        path = tmp_path / "c"
        parted = FixedShardsPartitioner(parts)
        with local_strategy(1, num_servers, partitioner=parted) if num_servers else nullcontext() as here:
            run = Run(kind, here, monkeypatch)
            run.train(range(3))
            run.checkpoint.save(path)
            return path, run.state()

    return save
