"""How the driver's half of the mirrored variables reaches replicas in lock step."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, TypeVarTuple, final

from raydist.mirroring.calls import MirrorCalls
from raydist.replicas.group import ReplicaGroup

__all__ = ["LockStepLink"]

_T = TypeVar("_T")
_Args = TypeVarTuple("_Args")


@final
class LockStepLink:
    """A `ReplicaLink`.

    Args:
        replicas: Gives the replicas, ready for a step. Asked only when somebody calls.
    """

    def __init__(self, replicas: Callable[[], ReplicaGroup]) -> None:
        self._replicas = replicas

    def call(self, rank: int, method: Callable[[MirrorCalls, *_Args], _T], *args: *_Args) -> _T:
        """See `ReplicaLink`."""
        return self._replicas().ask_mirror(rank, method, *args)

    def call_all(self, method: Callable[[MirrorCalls, *_Args], _T], *args: *_Args) -> list[_T]:
        """See `ReplicaLink`."""
        return self._replicas().ask_mirrors(method, *args)
