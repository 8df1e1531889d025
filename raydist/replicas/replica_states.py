"""Saving and restoring of the objects that replicas hold, on the driver."""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, final

import torch
from torch import nn

from raydist.actors.portable_errors import PortableError
from raydist.actors.supervision import root_cause
from raydist.checkpoints.restore import PreparedShard, RestoreRequest
from raydist.checkpoints.shard_reader import commit_shard, discard_shard, prepare_shard
from raydist.checkpoints.shards import DispatchedSave, ShardRequest, ShardWriter
from raydist.core.errors import FailedPreconditionError
from raydist.mirroring.driver import MirrorDriver
from raydist.mirroring.object_kinds import has_load_hooks
from raydist.parameter_servers.sharded_embedding import SavedRows
from raydist.replicas.rules import StrategyHooks
from raydist.replicas.step import ReplicaSetup

SAVES: Any = object()
"""Placeholder for the `ShardWriter` of each replica."""
RESTORES: Any = object()
"""Placeholder for the `ShardReader` of each replica."""


@final
class ReplicaRestorer:
    """The `ShardRestorer` of a strategy whose replicas run in lock step.

    Args:
        are_alike: Returns True if all replicas hold equal values, each in its own memory.
        ask: Given a function and its other arguments, runs it with each replica's `ShardReader` after all dispatched
            steps, and waits.
    """

    def __init__(
        self, mirror: MirrorDriver, are_alike: Callable[[], bool], ask: Callable[..., Sequence[bytes]]
    ) -> None:
        self._mirror = mirror
        self._are_alike = are_alike
        self._ask = ask

    def holds(self, obj: Any) -> bool:
        return self._mirror.holds(_mirrored_object(obj))

    def can_restore(self, obj: Any) -> bool:
        """Return True for objects that replicas restore: not per-replica metrics, nor objects with load hooks."""
        if isinstance(obj, SavedRows):
            return self._are_alike()
        return self.holds(obj) and not self._mirror.has_metrics(obj) and not has_load_hooks(obj) and self._are_alike()

    def prepare(
        self, request: RestoreRequest, objects: Mapping[str, Any], modules: Mapping[str, nn.Module]
    ) -> Sequence[PreparedShard] | None:
        are_new = not all(
            self._mirror.is_mirrored(_mirrored_object(obj)) for obj in (*objects.values(), *modules.values())
        )
        try:
            answers = self._ask(prepare_shard, request, dict(objects), dict(modules))
        except FailedPreconditionError:
            if are_new:  # the next step raises an error that says why they cannot be sent
                return None
            raise
        try:
            return _results(answers)
        except BaseException:
            with contextlib.suppress(Exception):  # the first error must be raised
                self.discard()
            raise

    def commit(self, token: str, objects: Mapping[str, Any], modules: Mapping[str, nn.Module]) -> None:
        _results(self._ask(commit_shard, token, dict(objects), dict(modules)))

    def discard(self) -> None:
        self._ask(discard_shard)


def _mirrored_object(obj: Any) -> Any:
    """Return the object that replicas have: for rows of tables the module with the tables."""
    return obj.module if isinstance(obj, SavedRows) else obj


def _results(answers: Sequence[bytes]) -> list[Any]:
    """Return the results of all replicas; raises the error of a replica."""
    found = [pickle.loads(each) for each in answers]
    errors = [each.restore() for each in found if isinstance(each, PortableError)]
    if errors:
        raise root_cause(errors)
    return found


@final
class ReplicaSaver:
    """The `ShardSaver` of a strategy whose replicas run in lock step.

    Args:
        dispatch: Given a function, the token of the save and the function's other arguments, runs the function with
            each replica's `ShardWriter` after all dispatched steps.
    """

    def __init__(
        self,
        mirror: MirrorDriver,
        setups: Callable[[], Sequence[ReplicaSetup]],
        dispatch: Callable[..., DispatchedSave],
        nodes: Callable[[], Collection[str]],
    ) -> None:
        self._mirror = mirror
        self._setups = setups
        self._dispatch = dispatch
        self._nodes = nodes

    def save_mode(self, obj: Any) -> Literal["divided", "whole"]:
        # With custom rules replicas may differ; then the driver saves the values of the first replica.
        return self._mirror.save_mode(obj) if self._have_one_rule() else "whole"

    def are_alike(self) -> bool:
        """Return True if the memory of each replica holds the same values."""
        # All replicas of a TPU slice must take part in reading a tensor.
        return self._have_one_rule() and {torch.device(each.device).type for each in self._setups()} <= {"cpu", "cuda"}

    def _have_one_rule(self) -> bool:
        return all(type(setup.rules) is StrategyHooks for setup in self._setups())

    def begin(
        self, request: ShardRequest, objects: Mapping[str, Any], modules: Mapping[str, torch.nn.Module]
    ) -> DispatchedSave:
        told = replace(request, terms=replace(request.terms, driver_items=self._mirror.driver_items(objects)))
        return self._dispatch(ShardWriter.begin, told.token, told, dict(objects), dict(modules))

    def nodes(self) -> Collection[str]:
        return self._nodes()
