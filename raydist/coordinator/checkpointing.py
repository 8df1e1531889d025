"""Checkpoints of parameter servers, saved and restored: the driver's side."""

from __future__ import annotations

import contextlib
import pickle
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Literal, final

from torch import nn

from raydist.actors.portable_errors import PortableError, pack_error
from raydist.actors.supervision import root_cause
from raydist.checkpoints.object_state import kind_of_state
from raydist.checkpoints.ps_restore import (
    BegunRestore,
    OptionGroups,
    begin_ps_restore,
    follow_driver,
)
from raydist.checkpoints.ps_save import begin_ps_save
from raydist.checkpoints.restore import Difference, PreparedShard, RestoreRequest, refused
from raydist.checkpoints.shards import DispatchedSave, Shard, ShardRequest
from raydist.coordinator.closures import Closure
from raydist.coordinator.ps_servers import PsServers
from raydist.core.errors import CancelledError, DeadlineExceededError, FailedPreconditionError, InvalidArgumentError
from raydist.core.nest import unflatten
from raydist.mirroring.driver import MirrorDriver
from raydist.mirroring.object_kinds import has_plain_state
from raydist.parameter_servers.sharded_embedding import SavedRows

PS_SAVES: Any = object()
"""Placeholder for the `PsSaves` of each worker."""
PS_RESTORES: Any = object()
"""Placeholder for the `PsRestores` of each worker."""


@final
class PsSaver:
    """A `ShardSaver` of a strategy whose variables lie on servers.

    Args:
        schedule: Runs a function of `PsSaves` on a worker while nothing else runs; takes that function, the
            save's token and the function's other arguments.
    """

    def __init__(
        self, mirror: MirrorDriver, schedule: Callable[..., DispatchedSave], nodes: Callable[[], Collection[str]]
    ) -> None:
        self._mirror = mirror
        self._schedule = schedule
        self._nodes = nodes

    def save_mode(self, obj: Any) -> Literal["divided", "whole"] | None:
        """Implement `ShardSaver.save_mode`. Objects with metrics, and other kinds of state, are saved by the driver."""
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


def ps_save_state(
    closure: Closure, saved: Callable[[], Sequence[Shard | PortableError | None]]
) -> Sequence[Shard | PortableError | None]:
    """Return the state of a save so far, for `DispatchedSave`."""
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


_SHORTEST_S, _LONGEST_S = 0.002, 0.1  # between two questions


@final
class PsRestorer:
    """A `ShardRestorer` of a strategy with parameter servers: each server reads its own part.

    Options of optimizers (learning rates) are the driver's; they reach the workers like its other changes.

    Args:
        run_alone: Runs a function of `PsRestores` on a worker once all scheduled closures have ended; takes that
            function and its other arguments. Blocks, and returns the function's result.
        note_seen: Makes closures scheduled later see these versions of the servers' values.
    """

    def __init__(
        self,
        mirror: MirrorDriver,
        run_alone: Callable[..., Any],
        join: Callable[[], None],
        servers: Callable[[], PsServers],
        note_seen: Callable[[Sequence[int]], None],
        limit_s: float,
    ) -> None:
        self._mirror = mirror
        self._run_alone = run_alone
        self._join = join
        self._servers = servers
        self._note_seen = note_seen
        self._limit_s = limit_s
        self._options: Mapping[str, OptionGroups] = {}  # that optimizers get at commit

    def holds(self, obj: Any) -> bool:
        """Implement `ShardRestorer.holds`."""
        if isinstance(obj, SavedRows):
            return all(map(self._mirror.holds, obj.tables().values()))
        return self._mirror.holds(obj)

    def can_restore(self, obj: Any) -> bool:
        """Implement `ShardRestorer.can_restore`. Metrics and states of a user's own kind are restored on the driver."""
        if isinstance(obj, SavedRows):
            return self.holds(obj)
        return self.holds(obj) and not self._mirror.has_metrics(obj) and has_plain_state(obj)

    def prepare(
        self, request: RestoreRequest, objects: Mapping[str, Any], modules: Mapping[str, nn.Module]
    ) -> Sequence[PreparedShard] | None:
        """Implement `ShardRestorer.prepare`."""
        self._options = {}
        try:
            begun = self._begin(request, objects, modules)
            if begun is None:
                return None
            differences, self._options = begun.shard.differences, begun.options
            if not differences or any(refused(found, request.strict) for found in differences.values()):
                return [begun.shard]
            return _joined(begun.shard, await_restored(self._servers(), request.token, self._limit_s))
        except BaseException:
            self._forget()
            raise

    def _begin(
        self, request: RestoreRequest, objects: Mapping[str, Any], modules: Mapping[str, nn.Module]
    ) -> BegunRestore | None:
        everything = [*objects.values(), *modules.values()]
        tables = [table for obj in everything if isinstance(obj, SavedRows) for table in obj.tables().values()]
        others = [obj for obj in everything if not isinstance(obj, SavedRows)]
        are_new = not all(map(self._mirror.is_mirrored, (*tables, *others)))
        self._join()  # raises the error of a closure scheduled before
        try:
            told = pickle.loads(self._run_alone(begin_ps_restore, request, dict(objects), dict(modules)))
        except (FailedPreconditionError, InvalidArgumentError):
            if are_new:  # the next step raises the reason why they cannot be sent
                return None
            raise
        if isinstance(told, PortableError):
            raise told.restore()
        begun: BegunRestore = told
        return begun

    def commit(self, token: str, objects: Mapping[str, Any], modules: Mapping[str, nn.Module]) -> None:
        """Implement `ShardRestorer.commit`. The driver's copies are stale afterwards and are fetched when read."""
        before = {name: _options_of(objects[name]) for name in self._options}
        try:
            for name, options in self._options.items():
                _give_options(objects[name], options)
            self._run_alone(follow_driver)  # the driver's own changes come first
            self._join()
            versions = self._servers().commit_restore(token)
        except BaseException:
            for name, options in before.items():
                _give_options(objects[name], options)
            self._forget()
            raise
        self._note_seen(versions)

    def _forget(self) -> None:
        with contextlib.suppress(Exception):  # the caller raises the original error
            self.discard()

    def discard(self) -> None:
        """Implement `ShardRestorer.discard`."""
        self._servers().discard_restore()


def await_restored(servers: PsServers, token: str, limit_s: float) -> Sequence[PreparedShard]:
    """Return the report of each server once all have read their parts, within `limit_s` (`Timeouts.step_s`)."""
    end, pause_s = time.monotonic() + limit_s, _SHORTEST_S
    while True:
        answers = servers.restored(token)
        errors = [each.restore() for each in answers if isinstance(each, PortableError)]
        if errors:
            raise root_cause(errors)
        shards = [each for each in answers if isinstance(each, PreparedShard)]
        if len(shards) == len(answers):
            return shards
        if time.monotonic() > end:
            raise DeadlineExceededError(
                f"A checkpoint must be read within {limit_s:g} s, but {len(answers) - len(shards)} of "
                f"{len(answers)} parameter servers have not. Raise Timeouts.step_s."
            )
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_S)


def _joined(own: PreparedShard, shards: Sequence[PreparedShard]) -> list[PreparedShard]:
    """Merge the differences that worker and servers found into the first shard; one variable's slices count once."""
    found: dict[str, dict[Difference, None]] = {name: dict.fromkeys(each) for name, each in own.differences.items()}
    for shard in shards:
        for name, several in shard.differences.items():
            found.setdefault(name, {}).update(dict.fromkeys(several))
    return [PreparedShard({name: tuple(each) for name, each in found.items()}), *shards]


def _options_of(optimizer: Any) -> OptionGroups:
    return [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]


def _give_options(optimizer: Any, options: OptionGroups) -> None:
    """Set the options of an optimizer's groups, as `load_state_dict` does."""
    for group, new in zip(optimizer.param_groups, options, strict=True):
        for name in [each for each in group if each not in new and each not in ("params", "param_names")]:
            del group[name]
        group.update(new)
