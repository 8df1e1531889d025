"""How restores reach what lies on parameter servers: the driver's end."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, final

from torch import nn

from raydist.actors.portable_errors import PortableError
from raydist.actors.supervision import root_cause
from raydist.checkpoints.differences import Difference, state_differences
from raydist.checkpoints.manifest import SavedObject
from raydist.checkpoints.restoring.compared_objects import refused
from raydist.checkpoints.saved_checkpoint import SavedCheckpoint
from raydist.checkpoints.saved_kinds import kind_of_state
from raydist.checkpoints.sharing.restore_request import PreparedShare, RestoreRequest
from raydist.checkpoints.sharing.served_restore import begin_served_restore
from raydist.errors import DeadlineExceededError, FailedPreconditionError
from raydist.mirroring.driver import MirrorDriver
from raydist.parameter_servers.rows.saved_rows import SavedRows, require_known

__all__ = ["SERVED_RESTORES", "RestoringServers", "ServedRestorer"]

_SHORTEST_S, _LONGEST_S = 0.002, 0.1  # between two questions


@final
class _Restores:
    """Stands for the `ServedRestores` that each worker has."""


SERVED_RESTORES: Any = _Restores()


class RestoringServers(Protocol):
    """The servers of a strategy: `ServedSide`."""

    def restored(self, token: str) -> Sequence[PreparedShare | PortableError | None]:
        """What has become of a restore on each."""

    def commit_restore(self, token: str) -> None:
        """Let every one have what it has read."""

    def discard_restore(self) -> None:
        """Let every one forget what it has read."""


@final
class ServedRestorer:
    """A `ShareRestorer` of a strategy whose embedding tables lie on servers: each reads the rows that it owns.

    Args:
        mirror: The driver's objects.
        run_alone: Has a worker run a function of its `ServedRestores` once all that was scheduled has ended, and waits;
            given that function and its other arguments.
        join: Waits until all that was scheduled has ended.
        servers: Those that were started.
        limit_s: Until all have read.
    """

    def __init__(
        self,
        mirror: MirrorDriver,
        run_alone: Callable[..., None],
        join: Callable[[], None],
        servers: Callable[[], RestoringServers],
        limit_s: float,
    ) -> None:
        self._mirror = mirror
        self._run_alone = run_alone
        self._join = join
        self._servers = servers
        self._limit_s = limit_s

    def holds(self, obj: Any) -> bool:
        """See `ShareRestorer`. Rows; all else goes through the driver."""
        return isinstance(obj, SavedRows) and all(map(self._mirror.holds, obj.tables().values()))

    def can_restore(self, obj: Any) -> bool:
        """See `ShareRestorer`."""
        return self.holds(obj)

    def prepare(
        self, request: RestoreRequest, objects: Mapping[str, Any], modules: Mapping[str, nn.Module]
    ) -> Sequence[PreparedShare] | None:
        """See `ShareRestorer`."""
        differences = {name: tuple(_differences(name, obj, request)) for name, obj in objects.items()}
        if any(refused(found, request.strict) for found in differences.values()):
            return [PreparedShare(differences)]
        for name, obj in objects.items():
            _require_state(obj, request.checkpoint, request.saved[name])
        try:
            if not self._begin(request, objects):
                return None
            return [PreparedShare(differences), *self._await(request.token)]
        except BaseException:
            self._forget()
            raise

    def _begin(self, request: RestoreRequest, objects: Mapping[str, SavedRows]) -> bool:
        tables = [table for obj in objects.values() for table in obj.tables().values()]
        are_new = not all(map(self._mirror.is_mirrored, tables))
        try:
            self._run_alone(begin_served_restore, request, dict(objects))
        except FailedPreconditionError:
            if are_new:  # a step will say why they cannot be sent
                return False
            raise
        return True

    def _await(self, token: str) -> Sequence[PreparedShare]:
        end, pause_s = time.monotonic() + self._limit_s, _SHORTEST_S
        while True:
            answers = self._servers().restored(token)
            errors = [each.restore() for each in answers if isinstance(each, PortableError)]
            if errors:
                raise root_cause(errors)
            shares = [each for each in answers if isinstance(each, PreparedShare)]
            if len(shares) == len(answers):
                return shares
            if time.monotonic() > end:
                raise DeadlineExceededError(
                    f"Rows must be read within {self._limit_s:g} s, but {len(answers) - len(shares)} of {len(answers)} "
                    "parameter servers have not. Raise Timeouts.step_s."
                )
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_S)

    def commit(self, token: str, objects: Mapping[str, Any], modules: Mapping[str, nn.Module]) -> None:
        """See `ShareRestorer`."""
        try:
            self._join()
            self._servers().commit_restore(token)
        except BaseException:
            self._forget()
            raise

    def _forget(self) -> None:
        with contextlib.suppress(Exception):  # its own error is what must be seen
            self.discard()

    def discard(self) -> None:
        """See `ShareRestorer`."""
        self._servers().discard_restore()


def _require_state(obj: SavedRows, checkpoint: SavedCheckpoint, saved: str) -> None:
    """What is saved must be rows, and of these tables."""
    checkpoint.require_state(saved)
    values = checkpoint.saved(saved).values
    if not isinstance(values, dict):
        raise checkpoint.loss(f"the state of {saved!r} is none: it has no tables")
    require_known(values, obj.tables())


def _differences(name: str, obj: SavedRows, request: RestoreRequest) -> list[Difference]:
    """As for all whose states are no module's: of what kind they are."""
    saved = request.saved[name]
    here = SavedObject(kind_of_state(obj), values={})
    return state_differences(name, here, {}, request.checkpoint.saved(saved), request.checkpoint.places(saved))
