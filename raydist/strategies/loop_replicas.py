"""Replicas in lock step whose run draws batches itself, as what saves at its draws sees them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, TypeVarTuple, final

from raydist.actors.portable_errors import PortableError
from raydist.checkpoints.loops.replica_loops import ReplicaLoops
from raydist.checkpoints.sharing.shares import Share
from raydist.mirroring.driver import MirrorDriver
from raydist.replicas.group import ReplicaGroup
from raydist.replicas.replica_states import ReplicaSaver
from raydist.replicas.runner import ReplicaRunner

__all__ = ["LoopReplicas"]

_T = TypeVar("_T")
_Args = TypeVarTuple("_Args")


@final
class LoopReplicas:
    """A `LoopHost`. Replicas answer beside the run.

    Args:
        mirror: What they hold.
        saver: How they save it.
        group: Gives their group.
        limit_s: How long a step, and a save, may take.
    """

    def __init__(
        self, mirror: MirrorDriver, saver: ReplicaSaver, group: Callable[[], ReplicaGroup], limit_s: float
    ) -> None:
        self._mirror, self._saver, self._group, self.limit_s = mirror, saver, group, limit_s

    def handle_of(self, obj: Any) -> int | None:
        return self._mirror.handle_of(obj)

    def how(self, obj: Any) -> str:
        return self._saver.how(obj)

    def items_alone(self, objects: Mapping[str, Any]) -> Mapping[str, Mapping[str, int]]:
        return self._mirror.items_alone(objects)

    def ask(self, rank: int | None, method: Callable[[ReplicaLoops, *_Args], _T], *args: *_Args) -> list[_T]:
        ranks = None if rank is None else (rank,)
        return self._group().ask_beside(ReplicaRunner.loop, method, *args, ranks=ranks)

    def shares(self, step: int, token: str) -> Sequence[Share | PortableError | None]:
        return self._group().ask_beside(ReplicaRunner.share_of, step, token)

    def drain(self) -> None:
        self._group().wait()
