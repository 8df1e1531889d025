"""Save checkpoints from parameter servers: the driver's side."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Literal, final

from torch import nn

from raydist.actors.portable_errors import PortableError, pack_error
from raydist.checkpoints.object_state import kind_of_state
from raydist.checkpoints.ps_save import begin_ps_save
from raydist.checkpoints.shards import DispatchedSave, Shard, ShardRequest
from raydist.coordinator.closures import Closure
from raydist.errors import CancelledError
from raydist.mirroring.driver import MirrorDriver
from raydist.nest import unflatten
from raydist.parameter_servers.rows.sharded_embedding import SavedRows

__all__ = ["SERVED_SHARES", "ServedSaver", "ask_served"]


@final
class _Shares:
    """Placeholder for the `PsSaves` of each worker."""


SERVED_SHARES: Any = _Shares()


@final
class ServedSaver:
    """A `ShardSaver` of a strategy whose variables lie on servers.

    Args:
        mirror: The driver's objects.
        schedule: Runs a function of `PsSaves` on a worker while nothing else runs; takes that function, the
            save's token and the function's other arguments.
        nodes: Returns the ids of the nodes of servers and workers.
    """

    def __init__(
        self, mirror: MirrorDriver, schedule: Callable[..., DispatchedSave], nodes: Callable[[], Collection[str]]
    ) -> None:
        self._mirror = mirror
        self._schedule = schedule
        self._nodes = nodes

    def how(self, obj: Any) -> Literal["divided", "whole"] | None:
        """Implement `ShardSaver.how`. Objects with metrics, and other kinds of state, are saved by the driver."""
        if isinstance(obj, SavedRows):
            return "divided"
        if kind_of_state(obj) not in ("module", "optimizer") or self._mirror.has_metrics(obj):
            return None
        return "divided"

    def begin(
        self, request: ShardRequest, objects: Mapping[str, Any], modules: Mapping[str, nn.Module]
    ) -> DispatchedSave:
        """Implement `ShardSaver.begin`."""
        return self._schedule(begin_ps_save, request.token, request, dict(objects), dict(modules))

    def nodes(self) -> Collection[str]:
        """Implement `ShardSaver.nodes`."""
        return self._nodes()


def ask_served(
    closure: Closure, saved: Callable[[], Sequence[Shard | PortableError | None]]
) -> Sequence[Shard | PortableError | None]:
    """Return the state of a save so far, for `DispatchedSave`.

    Args:
        closure: The closure that makes the servers begin.
        saved: Returns the state of the save on each server.
    """
    if not closure.ended:
        return [None]
    error, result = closure.error, closure.result
    if error is not None:
        cause = error.__cause__ if isinstance(error, CancelledError) else None  # the error of the earlier closure
        return [pack_error(error if cause is None else cause)]
    if result is None:
        return [None]
    told: Shard | PortableError = pickle.loads(unflatten(result.structure, [result.leaf(0)]))
    return [told] if isinstance(told, PortableError) else [told, *saved()]
