"""Ranks as processes of this machine, started once and used by many checks."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import pytest
import torch

from raydist.collectives.base import Communicator, Membership
from raydist.collectives.opening import open_communicator
from raydist.collectives.rendezvous import RendezvousStore
from raydist.core.errors import RaydistError
from tests.contracts.communicator import Body, Team
from tests.fork_server import fork_server

# Starting an interpreter and importing torch takes seconds where many share few cores.
START_S = 50.0


def rank_main(requests: Connection, timeout_s: float, backend: str, device: str) -> None:
    """A rank's process: joins where it is told, runs what it is given, ends with the connection."""
    torch.set_num_threads(1)
    if device != "cpu":
        torch.set_default_device(device)
        torch.cuda.set_device(device)
    communicator: Communicator | None = None
    requests.send("ready")
    while True:
        try:
            request = requests.recv()
        except (EOFError, ConnectionResetError):
            return
        try:
            if not isinstance(request, Membership):
                requests.send(request(communicator))
                continue
            if communicator is not None:
                communicator.abort()
                communicator.close()
            communicator = open_communicator(request, device=torch.device(device), timeout_s=timeout_s, backend=backend)
            requests.send(None)
        except RaydistError as error:
            requests.send(error)
        except BaseException:
            # pytest's own failures do not pickle.
            requests.send(AssertionError(traceback.format_exc()))


class ProcessTeam(Team):
    """A team of processes with a backend between them; on "cuda" each has a device of its own."""

    def __init__(
        self,
        world_size: int,
        timeout_s: float,
        *,
        backend: str = "auto",
        device: str = "cpu",
        hosts: tuple[str, ...] = (),
    ) -> None:
        self.world_size = world_size
        self.timeout_s = timeout_s
        self._backend = backend
        self._device = device
        self._hosts = hosts
        self._group = f"team-{uuid.uuid4().hex[:8]}"
        self._generation = -1
        self._store = RendezvousStore()
        self._context = fork_server()
        self._ranks: dict[int, tuple[BaseProcess, Connection]] = {}

    def __enter__(self) -> ProcessTeam:
        self._store.start()
        self.reform()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for process, requests in self._ranks.values():
            requests.close()
            process.join(5)
            process.kill()
            process.join(5)
        self._store.close()

    def begin(self, bodies: Mapping[int, Body]) -> Callable[[], dict[int, Any]]:
        for rank, body in bodies.items():
            self._ranks[rank][1].send(body)
        return lambda: {rank: self._receive(rank) for rank in bodies}

    def kill(self, rank: int) -> None:
        process, requests = self._ranks.pop(rank)
        process.kill()
        process.join(5)
        requests.close()

    def await_stopped(self, rank: int) -> None:
        """Return once a rank has stopped itself: until then it may do more than it seems."""
        end = time.monotonic() + 20.0
        while _state_of(self._pid_of(rank)) != "T":
            assert time.monotonic() < end, f"rank {rank} has not stopped"
            time.sleep(0.005)

    def resume(self, rank: int) -> None:
        """Let a rank go on that has stopped itself."""
        os.kill(self._pid_of(rank), signal.SIGCONT)

    def _pid_of(self, rank: int) -> int:
        pid = self._ranks[rank][0].pid
        assert pid is not None
        return pid

    def reform(self) -> None:
        self._generation += 1
        newcomers = [rank for rank in range(self.world_size) if rank not in self._ranks]
        self._ranks |= {rank: self._start(rank) for rank in newcomers}
        assert [self._receive(rank) for rank in newcomers] == ["ready"] * len(newcomers)
        for rank, (_, requests) in self._ranks.items():
            membership = self._store.membership(
                self._group,
                generation=self._generation,
                rank=rank,
                world_size=self.world_size,
                hosts=self._hosts,
            )
            requests.send(membership)
        answers = [self._receive(rank) for rank in range(self.world_size)]
        assert answers == [None] * self.world_size, answers

    @contextlib.contextmanager
    def without_the_dead(self) -> Iterator[None]:
        """A generation of those that are left alone, in their order; afterwards one of as many as there were."""
        whole = self.world_size, self._hosts
        left = sorted(self._ranks)
        self._ranks = {place: self._ranks[rank] for place, rank in enumerate(left)}
        self._hosts = tuple(self._hosts[rank] for rank in left) if self._hosts else ()
        self.world_size = len(left)
        try:
            self.reform()
            yield
        finally:
            self.world_size, self._hosts = whole
            self.reform()

    def _start(self, rank: int) -> tuple[BaseProcess, Connection]:
        mine, theirs = self._context.Pipe()
        device = self._device if self._device == "cpu" else f"{self._device}:{rank}"
        args = (theirs, self.timeout_s, self._backend, device)
        process = self._context.Process(target=rank_main, args=args, daemon=True)
        process.start()
        theirs.close()
        return process, mine

    def _receive(self, rank: int) -> Any:
        requests = self._ranks[rank][1]
        assert requests.poll(START_S), f"rank {rank} hangs"
        return requests.recv()


def _state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0]


class Begun(Protocol):
    """An operation under way; a `Work`, say."""

    def wait(self) -> object: ...


class Failing:
    """Seconds until an operation failed, and how."""

    def __init__(self, operation: Callable[[Communicator], Begun]) -> None:
        self.operation = operation

    def __call__(self, communicator: Communicator) -> tuple[float, RaydistError]:
        start = time.monotonic()
        with pytest.raises(RaydistError) as caught:
            self.begin(communicator).wait()
        return time.monotonic() - start, caught.value

    def begin(self, communicator: Communicator) -> Begun:
        return self.operation(communicator)


class AbortingSoon(Failing):
    """Give up from another thread, in the middle of the operation."""

    def begin(self, communicator: Communicator) -> Begun:
        begun = super().begin(communicator)
        self.timer = threading.Timer(0.1, communicator.abort)
        self.timer.start()
        return begun

    def __call__(self, communicator: Communicator) -> tuple[float, RaydistError]:
        outcome = super().__call__(communicator)
        self.timer.join()
        return outcome


def stop_myself(communicator: Communicator) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)
