"""Replicas as threads, and a driver beside them: runs that draw batches themselves, without actors."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar, TypeVarTuple

import torch
from torch import nn

from raydist.actors.portable_errors import PortableError, pack_error
from raydist.checkpoints.driver_loop import DriverLoop, ManagedLoop
from raydist.checkpoints.loop_commands import IteratorPlace
from raydist.checkpoints.replica_loop import ReplicaLoop, ReplicaLoops
from raydist.checkpoints.shards import Shard, ShardTerms, ShardWriter

T = TypeVar("T")
Args = TypeVarTuple("Args")


def _sent(value: T) -> T:
    copy: T = pickle.loads(pickle.dumps(value))
    return copy


class Rank:
    """A `ReplicaSide` with objects of its own, by handles."""

    def __init__(self, rank: int, num_ranks: int, objects: Mapping[int, Any]) -> None:
        self.objects = dict(objects)
        self.writer = ShardWriter(rank, num_ranks, torch.device("cpu"))
        self.loops = ReplicaLoops(self.writer)
        self.drawn = self.num_left = 0

    def object_of(self, handle: int) -> Any:
        return self.objects[handle]

    def settle(self) -> None:
        """Nothing is agreed on."""

    def leave(self) -> None:
        self.num_left += 1

    def agree(self, number: float) -> float:
        return number

    def copy(self, token: str, terms: ShardTerms, objects: Mapping[str, Any], modules: Mapping[str, nn.Module]) -> None:
        self.writer.copy(token, terms, objects, modules)

    def places(self) -> tuple[IteratorPlace, ...]:
        return (IteratorPlace({"drawn": self.drawn}, False),)


class Host:
    """A `LoopHost` whose replicas are threads.

    Args:
        objects: What each replica has, by handle.
        handles: Of the driver's objects.
    """

    limit_s = 20.0

    def __init__(self, num_ranks: int, objects: Callable[[], Mapping[int, Any]], handles: Sequence[tuple[Any, int]]):
        self.ranks = [Rank(rank, num_ranks, objects()) for rank in range(num_ranks)]
        self.handles = list(handles)
        self.asked: list[str] = []
        self.saved_how = "divided"
        self._runs: list[Any] = []
        self._pool = ThreadPoolExecutor(num_ranks)

    def handle_of(self, obj: Any) -> int | None:
        return next((handle for known, handle in self.handles if known is obj), None)

    def how(self, obj: Any) -> str:
        return self.saved_how

    def driver_items(self, objects: Mapping[str, Any]) -> Mapping[str, Mapping[str, int]]:
        return {}

    def ask(self, rank: int | None, method: Callable[[ReplicaLoops, *Args], T], *args: *Args) -> list[T]:
        self.asked.append(method.__name__)
        ranks = self.ranks if rank is None else [self.ranks[rank]]
        return [_sent(getattr(each.loops, method.__name__)(*_sent(args))) for each in ranks]

    def shards(self, step: int, token: str) -> Sequence[Shard | PortableError | None]:
        found = [each.writer.report(token) for each in self.ranks]
        return [pack_error(each) if isinstance(each, Exception) else each for each in found]

    def drain(self) -> None:
        for run in self._runs:
            run.result(20)

    def run(self, part: ManagedLoop, body: Callable[[ReplicaLoop, Rank], Any], step: int = 3) -> DriverLoop:
        """Run `body` on every rank, watched by a driver's half."""
        loop = DriverLoop(self, [part])
        command = _sent(loop.command())

        def on_rank(rank: Rank) -> Any:
            with rank.loops.running(step, command, rank) as own:
                return body(own, rank)

        self._runs = [self._pool.submit(on_rank, rank) for rank in self.ranks]
        loop.start(step)
        return loop

    def close(self) -> None:
        self._pool.shutdown()
        for each in self.ranks:
            each.writer.close(5.0)


def wait_for(event: threading.Event) -> None:
    """Fail rather than hang."""
    assert event.wait(20)
