"""The access of variables, and of loops in replicas, to the replicas of a strategy."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, TypeVarTuple, final

from raydist.actors.portable_errors import PortableError
from raydist.checkpoints.replica_loop import ReplicaLoops
from raydist.checkpoints.shards import Shard
from raydist.mirroring.driver import MirrorDriver
from raydist.mirroring.messages import MirrorCalls
from raydist.replicas.group import ReplicaGroup
from raydist.replicas.replica_states import ReplicaSaver
from raydist.replicas.runner import ReplicaRunner
from raydist.replicas.step_summaries import StepSummaries
from raydist.summary.record import Record

_T = TypeVar("_T")
_Args = TypeVarTuple("_Args")


@final
class LoopReplicas:
    """The `LoopHost` of replicas in lock step, which answer concurrently with the run."""

    def __init__(
        self,
        mirror: MirrorDriver,
        saver: ReplicaSaver,
        group: Callable[[], ReplicaGroup],
        summaries: StepSummaries,
        limit_s: float,
    ) -> None:
        self._mirror, self._saver, self._group, self.limit_s = mirror, saver, group, limit_s
        self._summaries = summaries

    def handle_of(self, obj: Any) -> int | None:
        return self._mirror.handle_of(obj)

    def save_mode(self, obj: Any) -> str:
        return self._saver.save_mode(obj)

    def driver_items(self, objects: Mapping[str, Any]) -> Mapping[str, Mapping[str, int]]:
        return self._mirror.driver_items(objects)

    def ask(
        self,
        rank: int | None,
        method: Callable[[ReplicaLoops, *_Args], _T],
        *args: *_Args,
    ) -> list[_T]:
        ranks = None if rank is None else (rank,)
        return self._group().ask_beside(ReplicaRunner.loop, method, *args, ranks=ranks)

    def shards(self, step: int, token: str) -> Sequence[Shard | PortableError | None]:
        return self._group().ask_beside(ReplicaRunner.shard_of, step, token)

    def take_records(self, by_replica: Sequence[Sequence[Record]]) -> None:
        self._summaries.take_records(by_replica)

    def drain(self) -> None:
        self._group().steps.wait()


@final
class LockStepLink:
    """The `ReplicaLink` to replicas in lock step; `replicas` returns these, ready for a step."""

    def __init__(self, replicas: Callable[[], ReplicaGroup]) -> None:
        self._replicas = replicas

    def call(self, rank: int, method: Callable[[MirrorCalls, *_Args], _T], *args: *_Args) -> _T:
        group = self._group_for(method)
        if group.is_sharded:  # all replicas take part in reading a tensor
            return group.ask_mirrors(method, *args)[rank * group.steps.same_rows]
        return group.ask_mirrors(method, *args, ranks=[rank])[0]

    def call_all(self, method: Callable[[MirrorCalls, *_Args], _T], *args: *_Args) -> list[_T]:
        group = self._group_for(method)
        return group.ask_mirrors(method, *args)[:: group.steps.same_rows]

    def _group_for(self, method: Callable[..., Any]) -> ReplicaGroup:
        group = self._replicas()
        if method is MirrorCalls.import_rows and group.copies is not None:
            group.copies.forget()  # steps that run again would not import them
        return group
